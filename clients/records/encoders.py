"""Encoders: how one text or one image becomes numbers, by a fixed map that has seen no private data.

A column of texts or images in a schema names its encoder. Two are built in: hashed n-grams for texts, here, and
features of images, which the application registers. One of your own is a function that this process registers
(:func:`register_encoder`): a schema is a file, and no file makes a client run code.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, InvalidRecordError

EncoderKind = Literal["text", "image"]
Encode = Callable[[Any], Any]

N_GRAMS = "n-grams"
"""Encoder of a column of texts that names none."""
TEXT_DIMENSION = 2048
"""Largest dimension of hashed n-grams that is chosen, and the default where nothing is known of the noise."""
_LONGEST = 20_000
_FEWEST_FEATURES, _MOST_FEATURES = 2, 1 << 16
_WORDS, _CHARACTERS = (1, 2), (3, 4)
_WORD = r"\w+"
_PARTS_OF_WORDS, _WEIGHT_OF_WORDS = 4, 0.5
"""One in so many values is for words, and the norm that words have, compared with characters."""
_MOST_STRENGTH = {256: 100.0, 512: 300.0, 1024: 1000.0}


@dataclass(frozen=True)
class Encoder:
    """An encoder by its name: a function of one text, or of one image, and the number of values it returns.

    Notes
    -----
    **Formal guarantees.** A row depends on its text or image alone if the function's does, and has an L2 norm of at
    most 1; whatever the function returns, or raises, costs this record alone.
    """

    kind: EncoderKind
    name: str
    function: Encode
    dimension: int

    def __call__(self, value: Any) -> NDArray[np.float32]:
        """Encode one value as a row whose L2 norm is at most 1; raise InvalidRecordError if it cannot be."""
        try:
            row = np.asarray(self.function(value), dtype=np.float64).reshape(-1)
        except InvalidRecordError:
            raise
        except Exception:  # the function may be anyone's
            raise InvalidRecordError(
                f"{'a text' if self.kind == 'text' else 'an image'} that cannot be encoded"
            ) from None
        if row.shape != (self.dimension,) or not np.isfinite(row).all():
            raise InvalidRecordError("an encoding of another length, or with values that are not finite")
        with np.errstate(all="ignore"):
            norm = float(np.linalg.norm(row))
        if not math.isfinite(norm):
            raise InvalidRecordError("an encoding too large for the type")
        return (row / max(norm, 1.0)).astype(np.float32)


_ENCODERS: dict[tuple[EncoderKind, str], Encoder] = {}
_LOADERS: list[Callable[[], object]] = []


def load_encoders_with(load: Callable[[], object]) -> None:
    """Call a function, which registers encoders, when one is looked for that is not there."""
    _LOADERS.append(load)


def register_encoder(kind: EncoderKind, name: str, function: Encode, dimension: int) -> None:
    """Register an encoder for columns of this process's schemas.

    Parameters
    ----------
    kind : {"text", "image"}
        Type of the column. The function gets one text (str), or one image as an array of shape (height, width, 3),
        uint8.
    name : str
        Name that a schema's column has as its ``encoder``.
    function : callable
        Returns a vector of ``dimension`` numbers. One whose L2 norm is above 1 is scaled down to it.
    dimension : int
        Number of values, which is public.

    Notes
    -----
    A record is encoded by itself. That the function keeps nothing of other records, and that what it was trained on is
    public, is the promise of whoever registers it: no budget pays for what its weights reveal.

    Examples
    --------
    >>> from murmurfl.clients import Column
    >>> register_encoder("text", "vowels", lambda text: [text.count(one) / 100 for one in "aeiou"], 5)
    >>> Column(kind="text", encoder="vowels", dimension=5).num_features
    5
    """
    if not isinstance(dimension, int) or not 1 <= dimension <= _MOST_FEATURES:
        raise ConfigurationError(
            f"Expected an encoder's dimension from 1 to {_MOST_FEATURES}, got {dimension!r}.",
            kind="out-of-range",
            setting="dimension",
        )
    if (kind, name) == ("text", N_GRAMS) or not name:
        raise ConfigurationError(
            f"Expected a name of its own for an encoder, got {name!r}.", kind="exists", setting="encoder"
        )
    _ENCODERS[kind, name] = Encoder(kind, name, function, dimension)


def find_encoder(kind: EncoderKind, name: str, dimension: int) -> Encoder:
    """Return an encoder; raise ConfigurationError if this process has none of that name and dimension.

    Notes
    -----
    **Formal guarantees.** A name is looked up among those that this process registered: no schema makes it run code.
    """
    if (kind, name) == ("text", N_GRAMS):
        return _hashed(dimension)
    if (kind, name) not in _ENCODERS:
        for load in _LOADERS:
            load()
    found = _ENCODERS.get((kind, name))
    if found is None:
        known = sorted(one for its, one in _ENCODERS if its == kind) + ([N_GRAMS] if kind == "text" else [])
        raise ConfigurationError(
            f"Expected an encoder of {kind}s among {', '.join(known) or 'none'}, got {name!r}. A schema runs no code: "
            "register an encoder of your own with murmurfl.clients.register_encoder before the schema is used.",
            kind="unknown-name",
            setting="encoder",
            got=name,
        )
    if found.dimension != dimension:
        raise ConfigurationError(
            f"Expected dimension = {found.dimension} with encoder = {name!r}, got {dimension}.",
            kind="mismatch",
            setting="dimension",
            got=dimension,
        )
    return found


@lru_cache(maxsize=16)
def _hashed(dimension: int) -> Encoder:
    return Encoder("text", N_GRAMS, HashedNGrams(dimension), dimension)


def usual_dimension(samples: int, num_classes: int, mu: float) -> int:
    """Return the dimension of hashed n-grams that learn most under noise.

    Parameters
    ----------
    samples : int
        Number of texts of all clients together.
    mu : float
        Gaussian differential privacy of their sum, whoever adds its noise.

    Notes
    -----
    The constants were chosen on docstrings of nine packages that are in no table, and moved once, on those, after a
    look at the table of docs/images.md. All arguments are public.

    Examples
    --------
    >>> usual_dimension(1_680, 3, 0.72), usual_dimension(1_680, 3, 0.14), usual_dimension(50_000, 3, 0.72)
    (1024, 256, 2048)
    """
    strength = samples * mu / num_classes
    return next((few for few, most in _MOST_STRENGTH.items() if strength < most), TEXT_DIMENSION)


class HashedNGrams:
    """Hashed n-grams of one text: a quarter of the values for one and two words, the rest for 3 and 4 characters.

    Each n-gram adds its sign to a place of the vector, both given by its hash (Weinberger et al. 2009), so the
    dimension is public and nothing is learnt from texts. Each part is the signed square root of its sums. Words have
    half the norm of characters, and the whole has norm 1, or 0 without any n-gram. Of a longer text the first 20,000
    characters count.

    Parameters
    ----------
    dimension : int
        Number of values, even.

    Examples
    --------
    >>> row = HashedNGrams(64)("No murmur. No pain.")
    >>> row.shape, round(float((row**2).sum()), 3)
    ((64,), 1.0)
    """

    def __init__(self, dimension: int) -> None:
        if dimension % 2 or not _FEWEST_FEATURES <= dimension <= _MOST_FEATURES:
            raise ConfigurationError(
                f"Expected an even dimension of n-grams from {_FEWEST_FEATURES} to {_MOST_FEATURES}, got {dimension}.",
                kind="out-of-range",
                setting="dimension",
                got=dimension,
            )
        from sklearn.feature_extraction.text import HashingVectorizer

        usual: dict[str, Any] = {"norm": None, "alternate_sign": True, "dtype": np.float64}
        self.dimension = dimension
        own = max(dimension // _PARTS_OF_WORDS, 1)
        words: dict[str, Any] = {"n_features": own, "ngram_range": _WORDS, "token_pattern": _WORD}
        self._parts = (
            (HashingVectorizer(analyzer="word", **words, **usual), _WEIGHT_OF_WORDS),
            (HashingVectorizer(analyzer="char_wb", n_features=dimension - own, ngram_range=_CHARACTERS, **usual), 1.0),
        )

    def __call__(self, text: str) -> NDArray[np.float64]:
        """Return the row of one text, shape (dimension,)."""
        plain = unicodedata.normalize("NFKC", text[:_LONGEST])[:_LONGEST]
        plain = plain.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
        parts = []
        for part, weight in self._parts:
            found: Any = part.transform([plain])
            sums = found.toarray()[0]
            row = np.sign(sums) * np.sqrt(np.abs(sums))
            parts.append(weight * row / max(float(np.linalg.norm(row)), 1e-12))
        whole = np.concatenate(parts)
        return whole / max(float(np.linalg.norm(whole)), 1e-12)


def text_in(cell: Any) -> str:
    """Return the text in a cell, "" for one without any; raise InvalidRecordError if it holds something else."""
    if isinstance(cell, bytes):
        cell = cell[: 4 * _LONGEST].decode("utf-8", "replace")
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if not isinstance(cell, str):
        if isinstance(cell, bool | int | float):
            return repr(cell)[:_LONGEST] if not isinstance(cell, int) or abs(cell) < 1 << 64 else ""
        raise InvalidRecordError("a value that is no text")
    return cell
