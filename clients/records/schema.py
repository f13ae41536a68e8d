"""The schema: a public description of a record, and how one record is read by it.

A guarantee is for a record of a *file*. It holds only if nothing that is made of one record depends on another: not its
type, not its order, not its scale, and not whether it is refused. So types, categories, bounds and shapes come from a
schema that clients have in common, and every record is converted by itself (:meth:`Schema.read`). A record that does
not fit counts as zero, and nobody but the client's operator can tell.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, Self
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...privacy.errors import ConfigurationError, InvalidRecordError
from .encoders import N_GRAMS, Encoder, find_encoder, text_in
from .image_files import IMAGE_ENCODER, pixels_of

OTHER = "other"
"""The category of every value that a column does not name."""
MISSING_WORDS = frozenset({"none", "unknown", "unk", "-"})
"""Words for a missing value that are names as well: of a category, or of a class."""
_MISSING = MISSING_WORDS | {"", "na", "nan", "n/a", "null", "<na>", "nat", "?", "."}
_YES, _NO = frozenset({"yes", "y", "true", "t", "1", "on"}), frozenset({"no", "n", "false", "f", "0", "off"})
_WHOLE = re.compile(r"([+-]?\d+)\.0*")
_LONGEST_TEXT, _LONGEST_NUMBER = 1 << 16, 400
_WRITTEN = (int, Decimal, date, time, UUID)  # their texts are names; a date with a time of day is a date
_MOST_REMEMBERED = 1 << 16
_FREE = 1e30  # a made-up outlier of a part without bounds
_WORDS, _MADE_UP_WORDS, _MADE_UP_SHAPE = ("record", "that", "is", "nobody's", "own"), 12, (32, 32, 3)
Bounds = tuple[float, float]
Thousands = Literal["", ",", ".", " ", "'"]
_GROUPS = {sign: re.compile(rf"[+-]?\d{{1,3}}(?:{re.escape(sign)}\d{{3}})+(?:[.,]\d+)?") for sign in ",. '"}
WIDEST: Bounds = (-1e12, 1e12)
"""Bounds in the place of those that a declared schema leaves to a paid release: what lies outside counts as these."""
NONE_NAMED = "none named"
"""The one value of a category of which a release has named none, or not yet."""
_MOST_KNOTS, _MOST_ENCODED = 64, 1 << 16
_COMPLETE = "declare them, or complete the schema with `murmurfl schema FILE --schema SCHEMA.toml --epsilon E`."
_UNIT_LIKE_NUMBER = re.compile(r"[\d+.,-]")


class _Said(BaseModel):
    """A part of a schema; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def changed(self, **changes: Any) -> Self:
        """Return it with other values of some fields, checked anew."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


def _checked_bounds(bounds: Bounds | None) -> None:
    if bounds is not None and not (all(map(math.isfinite, bounds)) and bounds[0] < bounds[1]):
        raise ValueError(f"Expected bounds [lowest, highest], two finite numbers, got {list(bounds)}.")


def check_majority(majority: float, classes: int, name: str = "majority") -> None:
    """Raise if this cannot be the share of the most frequent of so many classes."""
    if classes < 2 or not 1 / classes <= majority < 1:
        of = f"from 1/{classes} to below 1 of {classes} classes" if classes > 1 else "of two classes or more"
        raise ConfigurationError(
            f"Expected {name}, the most frequent class's share, {of}, got {majority!r}.", kind="out-of-range"
        )


class Column(_Said):
    """One column of a table.

    Parameters
    ----------
    kind : {"number", "integer", "category", "yes/no", "text", "image"}
    bounds : (float, float), optional
        Required for numbers and integers. A value outside is moved to the nearer bound.
    values : tuple of str, optional
        Required for a category. Any other value counts as ``other``.
    missing : float or str, optional
        Value of an empty cell, and of one that holds no such value, as a text among numbers. Without it, a record with
        such a cell does not fit.
    missing_codes : tuple of float or str
        Cells that count as empty, such as -9 or ``"Not Available"``.
    unit : str
        Unit that may stand before or behind a number, such as ``CC`` or ``$``. A number with another unit is none.
    thousands : {"", ",", ".", " ", "'"}
        Sign that may stand between groups of three digits.
    knots : tuple of float
        Public knots of a number's curve in an additive model. Default they are private quantiles of each training.
    released : tuple of {"bounds", "missing", "values"}
        Which of these were declared by nobody, and come from a release with noise (:meth:`Schema.declared`).
    encoder : str
        Name of the fixed map from a text or an image to numbers (:func:`register_encoder`). Default ``n-grams`` for
        texts and ``colour`` for images.
    dimension : int, optional
        Number of values of a text or an image, which is public; required for both.

    Notes
    -----
    A number is scaled from its bounds to [-1, 1], yes and no are 1 and -1, and a category of v values is v + 1 numbers,
    one of them 1 and the others 0; an encoding that is longer than 1 is scaled down: every column has norm at most 1.
    An empty text is zeros. A record whose image cannot be decoded does not fit.

    Examples
    --------
    >>> Column(kind="number", bounds=(0.0, 120.0)).num_features
    1
    """

    kind: Literal["number", "integer", "category", "yes/no", "text", "image"]
    bounds: Bounds | None = None
    values: tuple[str, ...] = ()
    missing: float | bool | str | None = None
    missing_codes: tuple[float | str, ...] = ()
    unit: str = ""
    thousands: Thousands = ""
    knots: tuple[float, ...] = ()
    released: tuple[Literal["bounds", "missing", "values"], ...] = ()
    encoder: str = ""
    dimension: int | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _checked_bounds(self.bounds)
        _check_writing(self)
        self._check_encoding()
        if (self.bounds is not None) != (self.kind in ("number", "integer")):
            got = f"got none: {_COMPLETE}" if self.bounds is None else f"got {self.bounds}."
            raise ValueError(f"Expected bounds of a number or an integer and of nothing else, {got}")
        if bool(self.values) != (self.kind == "category"):
            got = f"got {list(self.values)}." if self.values else f"got none: {_COMPLETE}"
            raise ValueError(f"Expected values of a category and of nothing else, {got}")
        if len(set(self.values)) != len(self.values) or OTHER in self.values:
            raise ValueError(f"Expected values that are all different and none of them {OTHER!r}.")
        if any(map(self._codes.holds, self.values)):
            raise ValueError(f"Expected missing_codes that are none of the values, got {list(self.missing_codes)}.")
        if self.missing is not None and not self._has_value(self.missing):
            raise ValueError(f"Expected missing to be a value of the column, got {self.missing!r}.")
        if self.knots or self.released:
            self._check_released()
        return self

    def _check_encoding(self) -> None:
        """Raise unless a text or an image, and nothing else, has an encoding."""
        if self.is_encoded != (self.dimension is not None) or (self.encoder and not self.is_encoded):
            raise ValueError("Expected a dimension of a text or an image and of nothing else.")
        if self.dimension is not None and not 1 <= self.dimension <= _MOST_ENCODED:
            raise ValueError(f"Expected dimension from 1 to {_MOST_ENCODED}, got {self.dimension}.")
        if self.is_encoded and (self.missing is not None or self.missing_codes):
            raise ValueError("Expected no missing and no missing_codes of a text or an image, got some.")

    def _check_released(self) -> None:
        """Raise if knots or what was released cannot be a number's."""
        low, high = self.bounds or (math.inf, -math.inf)
        rising = all(one <= other for one, other in pairwise(self.knots))
        if self.knots and not (rising and 2 <= len(self.knots) <= _MOST_KNOTS and low <= self.knots[0]):
            raise ValueError(f"Expected 2 to {_MOST_KNOTS} rising knots of a number between its bounds, got others.")
        if self.knots and not self.knots[0] < self.knots[-1] <= high:
            raise ValueError("Expected knots of a number that differ and lie between its bounds, got others.")
        able = {"values"} if self.kind == "category" else {"bounds", "missing"} if self.bounds is not None else set()
        if not able.issuperset(self.released):
            raise ValueError(f"Expected released of {sorted(able)} of such a column, got {list(self.released)}.")

    def declared(self) -> Column:
        """Return the column as it was declared: :data:`WIDEST` for bounds, :data:`NONE_NAMED` for values."""
        own: dict[str, Any] = {"bounds": WIDEST} if "bounds" in self.released else {}
        own |= {"values": (NONE_NAMED,)} if "values" in self.released else {}
        missing = None if "missing" in self.released else self.missing
        return self.changed(**own, missing=missing, knots=()) if self.released or self.knots else self

    @property
    def is_encoded(self) -> bool:
        """Whether cells are texts or images, which an encoder makes numbers of."""
        return self.kind in ("text", "image")

    @property
    def num_features(self) -> int:
        """Number of values that a cell becomes."""
        if self.dimension is not None:
            return self.dimension
        return len(self.values) + 1 if self.kind == "category" else 1

    @cached_property
    def encoding(self) -> Encoder:
        """The encoder of texts or images; raises ConfigurationError if this process has none of that name."""
        if self.kind == "image":
            return find_encoder("image", self.encoder or IMAGE_ENCODER, self.num_features)
        return find_encoder("text", self.encoder or N_GRAMS, self.num_features)

    def encode(self, cell: Any) -> list[float]:
        """Encode one cell as numbers; raise InvalidRecordError if it does not fit."""
        if self.kind == "text":
            text = text_in(cell)
            return self.encoding(text).tolist() if text.strip() else [0.0] * self.num_features
        if self.kind == "image":
            return self.encoding(pixels_of(cell)).tolist()
        if self.kind == "category":
            return self._encoded_category(cell)
        value = self.value_of(cell)
        if value is None:
            if self.missing is None:
                raise InvalidRecordError("a missing value")
            value = self._value(self.missing)
        if self.kind == "yes/no":
            return [value]
        low, high = self.bounds or (0.0, 1.0)
        return [2.0 * (min(max(value, low), high) - low) / (high - low) - 1.0]

    def value_of(self, cell: Any) -> float | None:
        """Return the number in a cell, 1 for yes and -1 for no; None if it counts as missing.

        Raises InvalidRecordError for a cell that holds no such value, in a column without ``missing``.
        """
        if self.is_missing(cell):
            return None
        try:
            return self._value(cell)
        except InvalidRecordError:
            if self.missing is None:
                raise
            return None

    def is_missing(self, cell: Any) -> bool:
        """Return True if a cell has no value, or is one of the column's codes for that."""
        return is_missing(cell) or self._codes.holds(cell)

    def lost(self, cell: Any) -> str:
        """Return how a cell that has a value is not read as what it says; empty if it is read so, or has none.

        Returns
        -------
        str
            ``clipped`` for a number outside the bounds, ``other`` for a value that is no category of the column, and
            ``missing`` for a cell that holds no such value.

        Examples
        --------
        >>> column = Column(kind="number", bounds=(0, 120), missing=40)
        >>> [column.lost(cell) for cell in ("75", "130", "old", "")]
        ['', 'clipped', 'missing', '']
        """
        if self.is_encoded or self.is_missing(cell):
            return ""
        try:
            if self.kind == "category":
                return "" if text_of(cell) in self.values else "other"
            value = self._value(cell)
        except InvalidRecordError:
            return "missing"
        return "clipped" if self.bounds is not None and not self.bounds[0] <= value <= self.bounds[1] else ""

    def _value(self, cell: Any) -> float:
        if self.kind == "yes/no":
            return 1.0 if _is_yes(cell) else -1.0
        return number_in(cell, self, integer=self.kind == "integer")

    def _has_value(self, cell: Any) -> bool:
        try:
            _ = text_of(cell) if self.kind == "category" else self._value(cell)
        except InvalidRecordError:
            return False
        return True

    def _encoded_category(self, cell: Any) -> list[float]:
        made = [0.0] * self.num_features
        instead = OTHER if self.missing is None else text_of(self.missing)
        try:
            value = text_of(cell)
            if value not in self.values and self.is_missing(cell):
                value = instead
        except InvalidRecordError:
            if self.missing is None:
                raise
            value = instead
        made[self.values.index(value) if value in self.values else -1] = 1.0
        return made

    @cached_property
    def _codes(self) -> _Codes:
        return _Codes(self)

    @property
    def num_values(self) -> int:
        """Number of values that a cell becomes for an additive model."""
        return {"category": len(self.values) + 1}.get(self.kind, 2)

    def values_of(self, cell: Any) -> list[float]:
        """Return one cell as an additive model takes it; raise InvalidRecordError if it does not fit.

        A number is itself between its bounds, and 0; a missing one is 0 and 1. Yes and no are (0, 1) and (1, 0), and
        (0, 0) where they are missing. A category is as in :meth:`encode`.
        """
        if self.kind == "category":
            return self.encode(cell)
        value = self.value_of(cell)
        if value is None:
            return [0.0, float(self.kind != "yes/no")]
        if self.kind == "yes/no":
            return [float(value < 0.0), float(value > 0.0)]
        low, high = self.bounds or (0.0, 1.0)
        return [min(max(value, low), high), 0.0]


class Part(_Said):
    """One array of a record's inputs.

    Parameters
    ----------
    kind : {"number", "integer", "byte", "yes/no", "sequence"}
        ``byte`` is an integer from 0 to 255, as pixels are; ``sequence`` a list of tokens, integers from 0.
    shape : tuple of int
        Shape of one record's array.
    bounds : (float, float), optional
        Bounds of numbers and integers. A value outside is moved to the nearer one.
    length, vocabulary, padding : int, optional
        A sequence's number of tokens, how many tokens there are, and the one that fills up a shorter sequence.
    name : str
        Name of one of several inputs, where the model takes them by name.

    Examples
    --------
    >>> Part(kind="byte", shape=(28, 28)).shape
    (28, 28)
    """

    kind: Literal["number", "integer", "byte", "yes/no", "sequence"] = "number"
    shape: tuple[int, ...] = ()
    bounds: Bounds | None = None
    length: int | None = None
    vocabulary: int | None = None
    padding: int | None = None
    name: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _checked_bounds(self.bounds)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"Expected a shape of sizes >= 0, got {list(self.shape)}.")
        if self.bounds is not None and self.kind not in ("number", "integer"):
            raise ValueError(f"Expected bounds of numbers and integers only, got them for {self.kind!r}.")
        return self

    @model_validator(mode="after")
    def _of_sequences(self) -> Self:
        sequence = self.kind == "sequence"
        if sequence != (self.length is not None and self.vocabulary is not None) or (sequence and self.shape):
            raise ValueError("Expected length and vocabulary of a sequence, without a shape, and of nothing else.")
        if sequence and not (self.length or 0) > 0 < (self.vocabulary or 0):
            raise ValueError(f"Expected length and vocabulary >= 1, got {self.length} and {self.vocabulary}.")
        if self.padding is not None and not (sequence and 0 <= self.padding < (self.vocabulary or 0)):
            raise ValueError(f"Expected padding to be a token of a sequence, got {self.padding}.")
        return self

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one record's array."""
        return (int(self.length),) if self.length is not None else self.shape

    @property
    def dtype(self) -> type[np.generic]:
        """The type of its values."""
        kinds: dict[str, type[np.generic]] = {"number": np.float32, "byte": np.uint8, "yes/no": np.bool_}
        return kinds.get(self.kind, np.int64)

    @property
    def limits(self) -> Bounds | None:
        """The lowest and highest value, where they are known."""
        if self.kind == "sequence":
            return 0.0, float((self.vocabulary or 1) - 1)
        return {"byte": (0.0, 255.0), "yes/no": (0.0, 1.0)}.get(self.kind, self.bounds)

    def encode(self, value: Any) -> NDArray[Any]:
        """Encode one record's value as an array; raise InvalidRecordError if it does not fit."""
        found = array_of(value)
        if self.kind == "sequence" and found.ndim == 1 and self.padding is not None and len(found) < self.dims[0]:
            found = np.concatenate([found, np.full(self.dims[0] - len(found), self.padding, found.dtype)])
        if found.shape != self.dims:
            raise InvalidRecordError("a value of another shape")
        if self.kind == "yes/no":
            return np.array([_is_yes(cell) for cell in found.ravel().tolist()], dtype=np.bool_).reshape(self.dims)
        numbers = _numbers_of(found)
        return self._encoded_numbers(numbers) if self.kind == "number" else self._encoded_integers(numbers)

    def _encoded_numbers(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return numbers within the bounds, float32."""
        if self.bounds is not None:
            numbers = np.clip(numbers, *self.bounds)
        with np.errstate(all="ignore"):
            numbers = numbers.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise InvalidRecordError("a number too large for the type")
        return numbers

    def _encoded_integers(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return whole numbers within the bounds. Raise if a byte or a token is outside of its range."""
        if (numbers != np.rint(numbers)).any():
            raise InvalidRecordError("a number where an integer should be")
        low, high = self.limits or (-(2.0**53), 2.0**53)
        if self.kind == "integer" and self.bounds is not None:
            numbers = np.clip(numbers, low, high)
        elif ((numbers < low) | (numbers > high)).any():
            raise InvalidRecordError("an integer out of range")
        return numbers.astype(self.dtype)


class Label(_Said):
    """The value of a record that is to be predicted.

    Parameters
    ----------
    classes : int or tuple, optional
        The names of the classes, or how many there are if they are 0, 1, ... Upper and lower case are read alike where
        no two names differ in them alone.
    bounds : (float, float), optional
        Bounds of a number that is to be predicted instead of classes. A number outside of them becomes the nearer one.
    shape : tuple of int
        Shape of one record's labels, where there are several.
    column : str
        Name of the label's column in a table.
    kind : {"number", "integer"}
        Whether a number is a whole one, which losses take as it is.
    missing_codes : tuple of float or str
        Cells that count as a missing label.
    unit, thousands : str
        How numbers are written, as in a :class:`Column`.
    scale : (float, float), optional
        Public ends of the scale of a number in an additive model, between the bounds.
    released : tuple of {"bounds"}
        ``bounds`` if they come from a release with noise, as in a :class:`Column`.
    majority : float, optional
        The share of records that the most frequent class is publicly known to have; the others are taken as equal. No
        record is read by it: forecasts are of data like these.
    class_weights : tuple of float
        Public weights of the classes, in their order: the gradient of a record is multiplied by the weight of its class
        over the largest one, before it is clipped. Empty where all count the same. Never compute them from private
        records.

    Examples
    --------
    >>> Label(column="ill", classes=("no", "yes")).names
    ('no', 'yes')
    """

    classes: int | tuple[bool | int | float | str, ...] | None = None
    bounds: Bounds | None = None
    shape: tuple[int, ...] = ()
    column: str = ""
    kind: Literal["", "number", "integer"] = ""
    missing_codes: tuple[float | str, ...] = ()
    unit: str = ""
    thousands: Thousands = ""
    scale: Bounds | None = None
    released: tuple[Literal["bounds"], ...] = ()
    majority: float | None = None
    class_weights: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _checked_bounds(self.bounds)
        _checked_bounds(self.scale)
        _check_writing(self)
        low, high = self.bounds or (math.inf, -math.inf)
        if self.scale is not None and not low <= self.scale[0] < self.scale[1] <= high:
            raise ValueError(f"Expected scale between the bounds of a number, got {list(self.scale)}.")
        if self.released and self.bounds is None:
            raise ValueError(f"Expected released of a number only, got {list(self.released)}.")
        if (self.classes is None) == (self.bounds is None and not self.kind):
            raise ValueError("Expected a label with classes or with bounds, one of them.")
        if self.classes is not None and (len(self.names) < 2 or len(set(self.names)) != len(self.names)):
            raise ValueError(f"Expected at least two classes, all different, got {self.classes!r}.")
        if self.majority is not None:
            check_majority(self.majority, len(self.names))
        positive = all(math.isfinite(weight) and weight > 0 for weight in self.class_weights)
        if self.class_weights and not (positive and len(self.class_weights) == len(self.names)):
            raise ValueError(
                f"Expected class_weights, a positive number for each of {len(self.names)} classes, got "
                f"{list(self.class_weights)}."
            )
        return self

    def declared(self) -> Label:
        """Return the label as it was declared (:meth:`Column.declared`)."""
        return self.changed(scale=None, **({"bounds": WIDEST} if self.released else {}))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The classes as texts, in the order of their numbers; empty for a number."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return tuple(text_of(one) for one in self.classes or ())

    @cached_property
    def _codes(self) -> _Codes:
        return _Codes(self)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def _folded(self) -> dict[str, int]:
        """Numbers of the classes that no other one equals but for upper and lower case."""
        folded = [name.casefold() for name in self.names]
        return {name: number for number, name in enumerate(folded) if folded.count(name) == 1}

    @property
    def dtype(self) -> type[np.generic]:
        """The type of its values: class numbers are int64."""
        return np.int64 if self.classes is not None or self.kind == "integer" else np.float32

    def encode(self, value: Any) -> NDArray[Any]:
        """Encode the label of one record as numbers; raise InvalidRecordError if it is no class or no number.

        A number outside of the bounds becomes the nearer one, as in a :class:`Column`.
        """
        found = array_of(value)
        if found.shape != self.shape:
            raise InvalidRecordError("a label of another shape")
        cells = found.ravel().tolist()
        if any(map(self._codes.holds, cells)):
            raise InvalidRecordError("a missing label")
        if self.names:
            numbers = [self._class(cell) for cell in cells]
            return np.array(numbers, dtype=np.int64).reshape(self.shape)
        if any(map(is_missing, cells)):
            raise InvalidRecordError("a missing label")
        made = np.array([number_in(cell, self, integer=self.kind == "integer") for cell in cells], dtype=np.float64)
        with np.errstate(all="ignore"):
            values = np.clip(made, *(self.bounds or (-math.inf, math.inf))).astype(self.dtype).reshape(self.shape)
        if not np.isfinite(values).all():
            raise InvalidRecordError("a label too large for the type")
        return values

    def is_missing(self, cell: Any) -> bool:
        """Return True if a cell has no value, or is one of the label's codes for that."""
        return is_missing(cell) or self._codes.holds(cell)

    def _class(self, cell: Any) -> int:
        name = text_of(cell)
        number = self._numbers.get(name, self._folded.get(name.casefold()))
        if number is None:
            missing = "a missing label, or a word such as NA or none that is no class of the schema"
            raise InvalidRecordError(missing if is_missing(cell) else "a label that is none of the classes")
        return number


def _check_writing(of: Column | Label) -> None:
    """Raise if a unit or a sign of thousands could be part of a number, or stands where there is none."""
    if (of.unit or of.thousands) and of.bounds is None:
        raise ValueError("Expected unit and thousands with bounds of a number, got them without.")
    if of.unit != of.unit.strip() or _UNIT_LIKE_NUMBER.match(of.unit):
        raise ValueError(f"Expected a unit that begins with no digit, sign, comma or blank, got {of.unit!r}.")


class _Codes:
    """Cells that stand for a missing value: numbers by their value, others by their text."""

    def __init__(self, of: Column | Label) -> None:
        self._of = of
        self._texts = {text_of(code).casefold() for code in of.missing_codes}
        self._numbers: set[float] = set()
        for code in of.missing_codes if of.bounds is not None else ():
            with suppress(InvalidRecordError):
                self._numbers.add(number_of(code))

    def holds(self, cell: Any) -> bool:
        """Return True if a cell is one of the codes."""
        if not self._texts:
            return False
        with suppress(InvalidRecordError):
            if text_of(cell).casefold() in self._texts:
                return True
        with suppress(InvalidRecordError):
            return bool(self._numbers) and number_in(cell, self._of) in self._numbers
        return False


@dataclass(frozen=True)
class Record:
    """One record as a model takes it."""

    inputs: Any
    """An array, or a tuple or mapping of arrays."""
    label: NDArray[Any]
    owner: str = ""
    """Empty where the schema names no owners."""


class Schema(_Said):
    """A public description of records: of a table, or of arrays and sequences.

    Parameters
    ----------
    label : Label
    columns : mapping of str to Column
        Columns of a table, by name and in the order in which a model takes them.
    inputs : tuple of Part
        The array, or several, of other records.
    owner : str
        The column that says whose a record is; empty where every record stands for itself.
    norm : float, optional
        A public bound on the L2 norm of a record's inputs, to which longer ones are scaled down; for columns, and for
        inputs that are numbers.
    inputs_are : {"scaled", "values"}
        What the columns of a table become: scaled numbers for linear models, or values for additive ones
        (:meth:`of_values`).
    separator : str
        Separator of cells in a CSV file.
    decimal : {".", ","}
        What stands before the decimals of a number that is a text.
    header : tuple of str
        Names of the columns of a CSV file whose first line is a row. Default the first line's.
    row_names : bool
        Whether rows of a CSV file begin with a cell that the first line has no name for, as R writes them. Its column
        is called ``row-name``.
    encoding : {"utf-8", "cp1252"}
        Encoding of a CSV file; ``cp1252`` is Windows' and includes Latin-1.
    reviewed : bool
        Whether a person has read it and vouches that what it says is public. Real nodes take no other.
    seal : str
        Mark of a ledger on a schema whose open parts it has paid for (:meth:`sealed_text`); empty for others.

    Notes
    -----
    **Formal guarantees.** What :meth:`read` makes of a record depends on that record and the schema alone, and so does
    whether it fits. A schema is public: a draft that was made from private data (``murmurfl schema``) shows what stands
    in it, which is why a person has to review it.

    Examples
    --------
    >>> schema = Schema(columns={"age": Column(kind="number", bounds=(0, 100))}, label=Label(column="ill", classes=2))
    >>> record = schema.read({"age": " 75.0 ", "ill": "1"})
    >>> record.inputs.tolist(), int(record.label)
    ([0.5], 1)
    """

    label: Label
    columns: Mapping[str, Column] = Field(default_factory=dict)
    inputs: tuple[Part, ...] = ()
    owner: str = ""
    norm: float | None = None
    inputs_are: Literal["scaled", "values"] = "scaled"
    separator: str = ","
    decimal: Literal[".", ","] = "."
    header: tuple[str, ...] = ()
    row_names: bool = False
    encoding: Literal["utf-8", "cp1252"] = "utf-8"
    reviewed: bool = False
    seal: str = ""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _refusal(error) from None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.columns) == bool(self.inputs):
            raise ValueError("Expected columns or inputs, one of them.")
        named = [part.name for part in self.inputs]
        if len(self.inputs) > 1 and len(set(named)) not in (1, len(named)):
            raise ValueError(f"Expected all inputs to have names of their own, or none, got {named}.")
        if self.columns and not self.label.column:
            raise ValueError("Expected the name of the label's column beside columns, got none.")
        if {self.label.column, self.owner} & set(self.columns):
            raise ValueError("Expected label and owner to be no columns of the inputs.")
        if self.header and (self.row_names or len(set(self.header)) < len(self.header)):
            raise ValueError("Expected a header of names that are all different, and no row_names with it.")
        if len(self.separator) != 1 or self.separator in '"\r\n':
            raise ValueError(f"Expected separator to be one character, got {self.separator!r}.")
        return self

    @model_validator(mode="after")
    def _of_norm(self) -> Self:
        if self.norm is not None and not (math.isfinite(self.norm) and self.norm > 0):
            raise ValueError(f"Expected norm > 0 and finite, got {self.norm}.")
        if self.norm is not None and any(part.kind != "number" for part in self.inputs):
            raise ValueError("Expected norm for columns or inputs of kind 'number' alone, got it beside other inputs.")
        return self

    @classmethod
    def read_file(cls, path: Path) -> Schema:
        """Read a schema from its TOML file."""
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"Expected a schema in TOML at {path}, got: {error}. `murmurfl schema FILE` drafts one.",
                kind="unreadable",
                setting="schema",
            ) from error
        return cls.read_text(text, str(path))

    @classmethod
    def read_text(cls, text: str, where: str) -> Schema:
        """Read a schema from TOML; ``where`` it stood, for errors."""
        try:
            return cls(**tomllib.loads(text))
        except ConfigurationError as error:
            raise error.reworded(f"{where}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Expected a schema in TOML at {where}, got: {error}. `murmurfl schema FILE` drafts one.",
                kind="unreadable",
                setting="schema",
            ) from error

    @classmethod
    def read_declared(cls, path: Path) -> Schema:
        """Read a schema whose numbers may lack bounds and values for empty cells, and whose categories may lack values.

        Returns
        -------
        Schema
            With :data:`WIDEST` and :data:`NONE_NAMED` in the place of bounds and values that are open, and each
            column's ``released`` naming what is open: it equals its own :meth:`declared`.

        Raises
        ------
        ConfigurationError
            If it cannot be read, is completed already, or leaves open what no release gives.
        """
        try:
            settings = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"Expected a schema in TOML at {path}, got: {error}.", kind="unreadable", setting="schema"
            ) from error
        columns, label = settings.get("columns", {}), settings.get("label", {})
        tables = columns if isinstance(columns, dict) else {}
        parts = [one for one in (label, *tables.values()) if isinstance(one, dict)]
        if any("released" in one or "knots" in one or "scale" in one for one in parts) or "seal" in settings:
            raise ConfigurationError(
                f"Expected a declared schema at {path}, got one that is completed: `murmurfl fit --schema` takes it.",
                kind="exists",
                setting="schema",
            )
        for one in tables.values():
            if isinstance(one, dict) and one.get("kind") == "category" and "values" not in one:
                one |= {"released": ["values"], "values": [NONE_NAMED]}
            if isinstance(one, dict) and one.get("kind") in ("number", "integer"):
                one["released"] = [part for part in ("bounds", "missing") if part not in one]
                one.setdefault("bounds", list(WIDEST))
        if isinstance(label, dict) and not {"classes", "bounds"} & label.keys() and label.get("kind"):
            label |= {"bounds": list(WIDEST), "released": ["bounds"]}
        try:
            return cls(**settings)
        except ConfigurationError as error:
            raise error.reworded(f"{path}: {error}") from None
        except TypeError as error:
            raise ConfigurationError(
                f"Expected a schema in TOML at {path}, got: {error}.", kind="unreadable", setting="schema"
            ) from error

    def declared(self) -> Schema:
        """Return the schema as it was declared, without anything that was released."""
        columns = {name: column.declared() for name, column in self.columns.items()}
        return self.changed(columns=columns, label=self.label.declared(), seal="")

    @property
    def knots(self) -> tuple[float, ...]:
        """Public knots of all numbers, and the scale of a label, in the order of an additive model; else empty."""
        numbers = [column.knots for column in self.columns.values() if column.bounds is not None]
        regression = self.num_classes == 1
        if not numbers or not all(numbers) or len(set(map(len, numbers))) > 1 or (regression and not self.label.scale):
            return ()
        return (*(knot for knots in numbers for knot in knots), *(self.label.scale or () if regression else ()))

    def sealed_text(self) -> bytes:
        """Return everything that a ledger's seal is of: the whole schema, without the seal and the review."""
        settings = self.model_dump(mode="json", exclude={"seal", "reviewed", "inputs_are"})
        settings["columns"] = list(settings["columns"].items())
        return json.dumps(settings, sort_keys=True).encode()

    @cached_property
    def digest(self) -> str:
        """A digest that clients of one training compare: equal for schemas by which records are read alike."""
        file = dict.fromkeys(("separator", "decimal", "header", "row_names", "encoding"), True)
        unread: Any = {"reviewed": True, "seal": True, "inputs_are": True, **file, "label": {"majority"}}
        settings = self.model_dump(mode="json", exclude=unread, exclude_defaults=True)
        settings["columns"] = list(settings.get("columns", {}).items())  # their order settles what a model is given
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]

    def check_for_real_nodes(self) -> None:
        """Refuse a schema that nobody has reviewed, or that leaves open what a record is."""
        if not self.reviewed:
            raise ConfigurationError(
                "Expected a schema with reviewed = true, got one that no person has reviewed: read it, see that "
                "nothing in it is private, and set reviewed = true.",
                kind="missing",
                setting="reviewed",
            )
        unknown = self.label.classes is None and self.label.bounds is None
        if unknown or any(part.limits is None for part in self.inputs):
            raise ConfigurationError(
                "Expected a schema that says classes or bounds of the label and bounds of every number, got one that "
                "leaves some out: write them down from what is publicly known.",
                kind="missing",
                setting="schema",
            )

    @property
    def num_features(self) -> int:
        """Number of values in the inputs of a record."""
        if self.columns:
            columns = self.columns.values()
            scaled = self.inputs_are == "scaled"
            return sum(column.num_features if scaled else column.num_values for column in columns)
        return sum(math.prod(part.dims) for part in self.inputs)

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 where a number is predicted."""
        return len(self.label.names) or 1

    @property
    def norm_bound(self) -> float:
        """The largest L2 norm of a record's inputs; infinite where neither bounds nor a norm are known."""
        most = math.inf if self.norm is None else self.norm
        if self.columns:
            return min(most, math.sqrt(len(self.columns)))
        squares = [
            math.inf if part.limits is None else math.prod(part.dims) * max(map(abs, part.limits)) ** 2
            for part in self.inputs
        ]
        return min(most, math.sqrt(sum(squares)))

    def read(self, item: Any, memory: dict[tuple[str, str], Any] | None = None) -> Record:
        """Convert one record by itself.

        Parameters
        ----------
        item : mapping, or pair (inputs, label)
            For a table a mapping from column to cell, or a pair whose first part has the cells in the columns' order.
        memory : dict, optional
            Texts that were encoded before, by column, so that simulations read many rows faster. It changes no result.

        Raises
        ------
        InvalidRecordError
            If it does not fit. The text names the column and the kind of mistake, and no value.
        """
        if self.columns:
            cells, label, owner = self._cells(item)
            made: list[float] = []
            scaled = self.inputs_are == "scaled"
            for (name, column), cell in zip(self.columns.items(), cells, strict=True):
                known = None if column.is_encoded else memory
                made += _within(name, column.encode if scaled else column.values_of, cell, known)
            inputs: Any = self._cut([np.array(made, dtype=np.float32)])[0] if scaled else np.array(made)
        else:
            values, label, owner = self._parts(item)
            encoded = zip(self.inputs, values, strict=True)
            arrays = self._cut([_within(part.name or "inputs", part.encode, value) for part, value in encoded])
            inputs = arrays[0] if len(arrays) == 1 else tuple(arrays)
            if self.inputs[0].name and len(arrays) > 1:
                inputs = {part.name: array for part, array in zip(self.inputs, arrays, strict=True)}
        whose = "" if not self.owner else text_of(owner)
        if self.owner and (is_missing(owner) or not whose):
            raise InvalidRecordError(f"{self.owner}: a missing owner")
        return Record(inputs, _within(self.label.column or "label", self.label.encode, label, memory), whose)

    def _cut(self, arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """One record's arrays, scaled down together to the declared norm if they are longer."""
        if self.norm is None:
            return arrays
        length = math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))
        if length <= self.norm:
            return arrays
        return [(array.astype(np.float64) * (self.norm / length)).astype(np.float32) for array in arrays]

    def of_values(self) -> Schema:
        """Return the schema with which records are read for an additive model: values, and whether they are missing.

        A missing number needs no value in its place then. Values of a record have no common bound, but the features
        that are made of them have (:attr:`norm_bound`).
        """
        if self.norm is not None:
            raise ConfigurationError(
                f"Expected a schema without norm for an additive model, whose columns have one each, got {self.norm}.",
                kind="conflict",
                setting="norm",
            )
        if encoded := [name for name, column in self.columns.items() if column.is_encoded]:
            raise ConfigurationError(
                f"An additive model has curves of numbers and weights of categories, and cannot read {encoded[0]!r}, a "
                "text or an image. Choose another model, such as model=softmax.",
                kind="conflict",
                setting="model",
            )
        return self.model_copy(update={"inputs_are": "values"})

    @property
    def is_encoded(self) -> bool:
        """Whether some column has texts or images, which only models other than additive ones read."""
        return any(column.is_encoded for column in self.columns.values())

    def bounded(self, bounds: Mapping[str, Bounds]) -> Schema:
        """Return the schema with other bounds of numbers (integers for integers) and missing values moved between."""
        columns = dict(self.columns)
        for name, column in self.columns.items():
            if column.bounds is None or name not in bounds:
                continue
            low, high = bounds[name]
            if column.kind == "integer":
                low, high = float(math.floor(low)), float(math.ceil(high))
            missing = column.missing if column.missing is None else min(max(float(column.missing), low), high)
            columns[name] = column.changed(bounds=(low, high), missing=missing, knots=())
        return self.changed(columns=columns)

    def cells(self, item: Any) -> list[Any]:
        """Return a record's cells as handed over, the label's last; raise InvalidRecordError if they are others."""
        cells, label, _ = self._cells(item)
        return [*cells, label]

    def plain(self, column: Column | Label, cell: Any) -> Any:
        """Return the number of a cell that is the text of one with a decimal comma; any other cell as it is."""
        if self.decimal == "," and column.bounds is not None and isinstance(cell, str):
            with suppress(InvalidRecordError):
                return number_in(cell, column, decimal=",")
        return cell

    def owner_of(self, item: Any) -> str:
        """Return the owner of a record, whether or not the rest of it fits; empty if it does not say."""
        try:
            owner = (self._cells if self.columns else self._parts)(item)[2]
            return "" if is_missing(owner) else text_of(owner)
        except InvalidRecordError:
            return ""

    def _cells(self, item: Any) -> tuple[list[Any], Any, Any]:
        if isinstance(item, Mapping):
            if self.label.column not in item or not self.columns.keys() <= item.keys():
                raise InvalidRecordError("a record without some of the columns")
            cells = [self.plain(column, item[name]) for name, column in self.columns.items()]
            return cells, self.plain(self.label, item[self.label.column]), item.get(self.owner)
        cells, label, owner = _as_pair(item)
        found = array_of(cells)
        if found.shape != (len(self.columns),):
            raise InvalidRecordError("a record of another number of cells")
        return found.tolist(), label, owner

    def _parts(self, item: Any) -> tuple[list[Any], Any, Any]:
        several = len(self.inputs) > 1
        if isinstance(item, Mapping):
            names = self.label.column, *_LABELS
            label = next((name for name in names if name in item), None)
            if label is None:
                raise InvalidRecordError("a record without a label")
            rest = {name: value for name, value in item.items() if name not in (label, self.owner)}
            inputs = rest if several else rest.get(self.inputs[0].name, next(iter(rest.values()), None))
            found, owner = item[label], item.get(self.owner)
        else:
            inputs, found, owner = _as_pair(item)
        if not several:
            if isinstance(inputs, Mapping):
                inputs = inputs.get(self.inputs[0].name)
            return [inputs], found, owner
        if isinstance(inputs, Mapping):
            if not {part.name for part in self.inputs} <= inputs.keys():
                raise InvalidRecordError("a record without some of the inputs")
            return [inputs[part.name] for part in self.inputs], found, owner
        if not isinstance(inputs, tuple | list) or len(inputs) != len(self.inputs):
            raise InvalidRecordError("a record of another number of inputs")
        return list(inputs), found, owner

    def made_up(self, count: int, random: np.random.Generator) -> Iterator[Any]:
        """Yield records that are nobody's, of every class, spread over the bounds: mappings for a table, else pairs."""
        for number in range(count):
            values = [_made_up_cell(column, random) for column in self.columns.values()]
            values += [_made_up_part(part, random) for part in self.inputs]
            yield self._item(values, _made_up_label(self.label, number, random), f"owner-{number}")

    def outliers(self) -> Iterator[Any]:
        """Yield made-up records at the ends of what the schema allows: all lowest, highest, in the middle, in turn."""
        random = np.random.Generator(np.random.Philox(key=29))
        for number, (even, odd) in enumerate([(0.0, 0.0), (1.0, 1.0), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)]):
            ends = enumerate(self.columns.values())
            values = [_end_of_column(column, odd if place % 2 else even) for place, column in ends]
            values += [_end_of_part(part, even, odd) for part in self.inputs]
            yield self._item(values, _made_up_label(self.label, number, random), f"outlier-{number}")

    def examples(self, ordinary: int = 6) -> list[tuple[Any, Any]]:
        """Made-up records as batches of one: some ordinary ones, then :meth:`outliers`; what a model is tried on."""
        random = np.random.Generator(np.random.Philox(key=2029))
        read = [self.read(item) for item in [*self.made_up(ordinary, random), *self.outliers()]]
        return [stacked([record.inputs], [record.label]) for record in read]

    def _item(self, values: list[Any], label: Any, owner: str) -> Any:
        """Build a record as it would be handed over, of cells or arrays; with the owner if the schema names one."""
        if self.columns:
            whose = {self.owner: owner} if self.owner else {}
            cell = label.item() if isinstance(label, np.ndarray) and not label.ndim else label
            return {**whose, **dict(zip(self.columns, values, strict=True)), self.label.column: cell}
        inputs: Any = values[0] if len(values) == 1 else tuple(values)
        if len(values) > 1 and self.inputs[0].name:
            inputs = {part.name: value for part, value in zip(self.inputs, values, strict=True)}
        return (inputs, label, owner) if self.owner else (inputs, label)


_LABELS = ("label", "labels", "target", "targets")
"""Names of the label in a record that is a mapping, where the schema does not say."""


def stacked(inputs: Sequence[Any], labels: Sequence[NDArray[Any]]) -> tuple[Any, NDArray[Any]]:
    """Stack records to a batch, with the records along the first axis."""
    first = inputs[0]
    if isinstance(first, Mapping):
        made: Any = {name: np.stack([one[name] for one in inputs]) for name in first}
    elif isinstance(first, tuple):
        made = tuple(np.stack(parts) for parts in zip(*inputs, strict=True))
    else:
        made = np.stack(list(inputs))
    return made, np.stack(list(labels))


def is_missing(cell: Any) -> bool:
    """Return True if a cell has no value: None, NaN, an empty text, or a text such as ``NA``."""
    if isinstance(cell, str):
        return cell.strip().lower() in _MISSING
    if cell is None:
        return True
    try:
        return bool(cell != cell)  # NaN and NaT; pandas' NA refuses to say
    except Exception:  # a cell may be of any class, whose comparison raises what it likes
        return type(cell).__name__ in ("NAType", "NaTType")


def text_of(cell: Any) -> str:
    """Return a cell as the text by which owners, categories and classes are compared: 1, 1.0 and "1.0" are alike."""
    if getattr(cell, "shape", None) == () and hasattr(cell, "item"):  # of NumPy or PyTorch
        cell = cell.item()
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", "replace")
    if isinstance(cell, float):
        cell = str(int(cell)) if math.isfinite(cell) and cell == int(cell) else repr(cell)
    elif isinstance(cell, _WRITTEN):  # booleans are integers
        try:
            cell = str(cell)
        except ValueError:  # of more digits than Python writes
            raise InvalidRecordError("a number too long to be a name") from None
    if not isinstance(cell, str):
        if is_missing(cell):
            return ""
        raise InvalidRecordError("a value that is no name")
    if len(cell) > _LONGEST_TEXT:
        raise InvalidRecordError("a text too long to be a name")
    cell = cell.strip()
    whole = _WHOLE.fullmatch(cell)
    return whole.group(1) if whole else cell


def number_of(cell: Any, *, integer: bool = False) -> float:
    """Read a cell as a finite number; raise InvalidRecordError if it is none."""
    cell = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell
    cell = cell.strip() if isinstance(cell, str) else cell
    if isinstance(cell, str) and (len(cell) > _LONGEST_NUMBER or "_" in cell):
        raise InvalidRecordError("a text where a number should be")
    # One complex cell makes a column of them.
    real: Any = cell.real if isinstance(cell, complex) and not cell.imag else cell
    try:
        number = float(real)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRecordError("a text where a number should be") from None
    if not math.isfinite(number):
        raise InvalidRecordError("a number that is not finite")
    if integer and number != math.floor(number):
        raise InvalidRecordError("a number where an integer should be")
    return number


class Writing(Protocol):
    """Way in which the numbers of a column are written."""

    @property
    def unit(self) -> str: ...

    @property
    def thousands(self) -> str: ...


def number_in(cell: Any, of: Writing, *, decimal: str = ".", integer: bool = False) -> float:
    """Read a cell as a finite number, written with the unit and thousands of a column; raise InvalidRecordError."""
    if isinstance(cell, str) and (of.unit or of.thousands or decimal == ",") and len(cell) <= _LONGEST_NUMBER:
        cell = _without_unit(cell.strip(), of.unit)
        if of.thousands and _GROUPS[of.thousands].fullmatch(cell):
            cell = cell.replace(of.thousands, "")
        cell = cell.replace(",", ".") if decimal == "," else cell
    return number_of(cell, integer=integer)


def _without_unit(text: str, unit: str) -> str:
    """Return the text of a number without its unit, whatever its case and the blanks between them."""
    if not unit:
        return text
    found = _written_with(unit).fullmatch(text)
    return text if found is None else found["sign"] + (found["behind"] or found["before"])


@lru_cache
def _written_with(unit: str) -> re.Pattern[str]:
    letters = r"\s*".join(map(re.escape, "".join(unit.split())))
    text = rf"(?P<sign>[+-]?)\s*(?:{letters}\s*(?P<behind>.+)|(?P<before>.*\S)\s*{letters})"
    return re.compile(text, re.DOTALL | re.IGNORECASE)


def _is_yes(cell: Any) -> bool:
    word = text_of(cell).lower()
    if word not in _YES | _NO:
        raise InvalidRecordError("neither yes nor no")
    return word in _YES


def array_of(value: Any) -> NDArray[Any]:
    """Read a number, array or tensor as an array; raise InvalidRecordError if it is none."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        # Texts stay objects: NumPy's own array of them is as wide as the longest in every place, and drops its NULs.
        found = np.asarray(value, dtype=object if _holds_text(value) else None)
    except InvalidRecordError:
        raise
    except Exception:
        raise InvalidRecordError("a value that is no array") from None
    if found.dtype.kind == "c" and not np.imag(found).any():
        found = np.real(found)  # one record with a complex number makes an array of them of all
    if found.dtype.kind not in "fiubUSO":
        raise InvalidRecordError("a value that is no number")
    return found


def _holds_text(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, list | tuple) and any(map(_holds_text, value)))


def _numbers_of(found: NDArray[Any]) -> NDArray[np.float64]:
    if found.dtype.kind in "fiub":
        numbers = found.astype(np.float64)
        if not np.isfinite(numbers).all():
            raise InvalidRecordError("a number that is not finite")
        return numbers
    cells = [number_of(cell) for cell in found.ravel().tolist()]
    return np.array(cells, dtype=np.float64).reshape(found.shape)


def _as_pair(item: Any) -> tuple[Any, Any, Any]:
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise InvalidRecordError("a record that is no pair (inputs, label)")
    return item[0], item[1], item[2] if len(item) == 3 else None


def _within(
    name: str, encode: Callable[[Any], Any], cell: Any, memory: dict[tuple[str, str], Any] | None = None
) -> Any:
    known = None if memory is None or type(cell) is not str else memory.get((name, cell))
    if known is not None:
        return known
    try:
        found = encode(cell)
    except InvalidRecordError as error:
        raise InvalidRecordError(f"{name}: {error}") from None
    if memory is not None and type(cell) is str and len(memory) < _MOST_REMEMBERED and len(cell) <= _LONGEST_NUMBER:
        memory[name, cell] = found
    return found


def _made_up_cell(column: Column, random: np.random.Generator) -> Any:
    if column.kind == "text":
        return " ".join(random.choice(_WORDS, size=_MADE_UP_WORDS).tolist())
    if column.kind == "image":
        return random.integers(0, 256, size=_MADE_UP_SHAPE, dtype=np.uint8)
    if column.kind == "category":
        return str(random.choice([*column.values, OTHER]))
    if column.kind == "yes/no":
        return "yes" if random.random() < 0.5 else "no"
    low, high = column.bounds or (0.0, 1.0)
    if column.kind == "integer":
        return int(random.integers(math.ceil(low), math.floor(high), endpoint=True))
    return float(round(random.uniform(low, high), 6))


def _end_of_column(column: Column, where: float) -> Any:
    if column.kind == "text":
        return _WORDS[0] * round(where * _MADE_UP_WORDS)
    if column.kind == "image":
        return np.full(_MADE_UP_SHAPE, round(255 * where), np.uint8)
    if column.kind == "category":
        return [*column.values, OTHER][round(where * len(column.values))]
    if column.kind == "yes/no":
        return "yes" if where > 0.5 else "no"
    low, high = column.bounds or (0.0, 1.0)
    at = low + where * (high - low)
    return int(min(max(round(at), math.ceil(low)), math.floor(high))) if column.kind == "integer" else at


def _made_up_part(part: Part, random: np.random.Generator) -> NDArray[Any]:
    if part.kind == "number":
        if part.bounds is None:
            return random.normal(size=part.dims).astype(np.float32)
        return random.uniform(*part.bounds, size=part.dims).astype(np.float32)
    low, high = part.limits or (0.0, 1.0)
    made = random.integers(math.ceil(low), math.floor(high), endpoint=True, size=part.dims)
    if part.limits is None or part.kind == "yes/no":
        made.reshape(-1)[:1] = 1  # so that no mask hides all of a record
    return made.astype(part.dtype)


def _end_of_part(part: Part, even: float, odd: float) -> NDArray[Any]:
    low, high = part.limits or ((-_FREE, _FREE) if part.kind == "number" else (0.0, 1.0))
    places = np.arange(math.prod(part.dims)).reshape(part.dims) % 2
    at = low + np.where(places, odd, even) * (high - low)
    return np.clip(at if part.kind == "number" else np.rint(at), low, high).astype(part.dtype)


def _made_up_label(label: Label, number: int, random: np.random.Generator) -> Any:
    if label.names:
        chosen = np.full(label.shape, number % len(label.names))
        names = label.classes if isinstance(label.classes, tuple) else tuple(range(len(label.names)))
        return np.array([names[i] for i in chosen.ravel()], dtype=object).reshape(label.shape)
    if label.kind == "integer":
        low, high = label.bounds or (0.0, 1.0)
        return np.full(label.shape, math.ceil(low) + number % (math.floor(high) - math.ceil(low) + 1), dtype=np.int64)
    return random.uniform(*(label.bounds or (0.0, 1.0)), size=label.shape)


def _refusal(error: ValidationError) -> ConfigurationError:
    """Return the error for the first of pydantic's findings, in the words of our messages."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message, setting = first["msg"].removeprefix("Value error, "), place or None
    if message.startswith("Expected"):
        cause = first.get("ctx", {}).get("error")
        kind = cause.kind if isinstance(cause, ConfigurationError) else None
        return ConfigurationError(f"{place}: {message}" if place else message, kind=kind, setting=setting)
    if first["type"] == "extra_forbidden":
        unknown = f"Expected no key {place!r} in a schema, got one: look for a typo."
        return ConfigurationError(unknown, kind="unknown-name", setting=setting)
    if first["type"] == "missing":
        return ConfigurationError(f"Expected {place} in a schema, got none.", kind="missing", setting=setting)
    return ConfigurationError(
        f"Expected another value of {place} in a schema ({message.lower()}), got {first['input']!r}.",
        kind="unknown-name" if first["type"] == "literal_error" else "wrong-type",
        setting=setting,
    )
