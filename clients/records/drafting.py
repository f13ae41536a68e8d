"""A schema from data: a draft on an analyst's own computer, or what the records of a simulation seem to be.

Both look at all records, so both show something of them. A draft is for a person to review; real nodes take no other.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, InvalidRecordError
from .client_records import CsvLines, Items, Rows, check_ending, npz_rows, parquet_rows
from .schema import MISSING_WORDS, OTHER, Column, Label, Part, Schema, array_of, is_missing, number_of, text_of

FEWEST_OF_A_CATEGORY = 20
"""Records that a category must have to stand in a draft; rarer ones count as ``other``."""
_EXTREME = 0.005
"""Share of a column's values at each end that bounds may cut off: they are moved to the bound."""
_FEWEST_NAMES = 500
"""Rows from which on whole numbers that are all different are taken for names of the rows."""
_MOST_CATEGORIES = 50
_MOST_CLASSES = 20
_MOST_SAID, _MOST_READ = 12, 4  # columns that a message names, and spellings of a class
_YES_NO = ({"yes", "no"}, {"true", "false"}, {"y", "n"}, {"t", "f"}, {"0", "1"})
_SEPARATORS = ",;\t|"
_FAR, _TIMES = 0.02, 5.0
"""Share of a label's values at each end that bounds leave out where they would be so many times as wide with them."""
_MOST = 0.95
"""Share of the cells of a column that are of one kind."""
_NUMBER = re.compile(r"\s*[+-]?\d*[.,]?\d+\s*")
_COMMAS = re.compile(r"[+-]?\d+(,\d+)?")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([ T].*)?")
_DRESSED = re.compile(r"[$€£¥]?\s?[+-]?\d[\d,.' ]*\s?[%$€£¥]?")


@dataclass(frozen=True)
class Draft:
    """A draft of a file's schema, and the columns that are left out of it."""

    schema: Schema
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    """Columns by the reason."""
    label_notes: Sequence[str] = ()
    """Other spellings of the label's classes, and classes that are too rare: not for others to see."""


def draft(path: Path, *, label: str = "", owner: str = "", apart: Collection[str] = ()) -> Draft:
    """Draft a file's schema for a person to review, and name the columns that are left out of it.

    Parameters
    ----------
    path : Path
        ``.csv``, ``.csv.gz``, ``.parquet`` or ``.npz``.
    label : str
        The column that is to be predicted; default the last one.
    owner : str
        The column that says whose a row is.
    apart : collection of str
        Columns that are no features, such as the site's.

    Notes
    -----
    It looks at all records. Bounds are rounded outwards to a step of 1, 2 or 5 times a power of ten, and categories of
    fewer than 20 records are left out: that hides single records as a rule, and is no promise.
    """
    path = Path(path).expanduser()
    check_ending(path)
    if path.suffix == ".npz":
        if label:
            raise ConfigurationError(
                "Expected a label of a table only, got one for an .npz: its array is `labels`.",
                kind="conflict",
                setting="label",
            )
        return Draft(_of_arrays(npz_rows(path, owners=bool(owner)), owner))
    separator = "," if path.suffix in (".parquet", ".pq") else _separator(path)
    rows = parquet_rows(path) if path.suffix in (".parquet", ".pq") else CsvLines(path, separator)
    numbered = [str(number) for number in range(len(rows.columns))]
    if isinstance(rows, CsvLines) and rows.columns != numbered and all(map(_NUMBER.fullmatch, rows.columns)):
        raise ConfigurationError(
            f"Expected the names of columns in the first line of {path}, got numbers: add a line of names.",
            kind="malformed",
            setting="path",
        )
    return draft_of_rows(rows, str(path), label=label, owner=owner, separator=separator, apart=apart)


def draft_of_rows(
    rows: Rows, table: str, *, label: str = "", owner: str = "", separator: str = ",", apart: Collection[str] = ()
) -> Draft:
    """Draft the schema of a table's rows; ``table`` is its name in messages, and the rest is as for :func:`draft`.

    Notes
    -----
    As :func:`draft`, it looks at all records.
    """
    if not rows.columns:
        raise ConfigurationError(
            f"Expected the names of columns in the first line of {table}, got none.", kind="missing"
        )
    label = label or rows.columns[-1]
    for name in [label, *([owner] if owner else []), *apart]:
        _check_column(name, rows.columns, table)
    cells, decimal = _with_points(_read_cells(rows, table), separator)
    columns = {
        name: _column(found) if rows.columns.count(name) == 1 else "a name that stands twice"
        for name, found in cells.items()
        if name not in (label, owner, *apart)
    }
    kept = {name: column for name, column in columns.items() if isinstance(column, Column)}
    if not kept:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(columns.items())[:_MOST_SAID]) or "no other"
        many = f"{len(rows):,} row{'s' * (len(rows) != 1)}"
        raise ConfigurationError(
            f"Expected a column beside {label!r} in {table} with values to learn from, got none in {many} ({why}).",
            kind="missing",
        )
    left_out: dict[str, list[str]] = {}
    for name, reason in columns.items():
        if isinstance(reason, str):
            left_out.setdefault(reason, []).append(name)
    target, notes = _label(label, cells[label])
    schema = Schema(columns=kept, label=target, owner=owner, separator=separator, decimal=decimal)
    return Draft(schema, left_out, notes)


def _read_cells(rows: Rows, table: str) -> dict[str, list[Any]]:
    """Return the cells of each column. Raise if more than half of the rows cannot be read."""
    cells: dict[str, list[Any]] = {name: [] for name in rows.columns}
    unread: Counter[str] = Counter()
    for number in range(len(rows)):
        try:
            row = rows[number]
        except InvalidRecordError as error:
            unread[str(error)] += 1
            continue
        for name, cell in row.items():
            cells[name].append(cell)
    if unread.total() > len(rows) / 2:
        reason, count = unread.most_common(1)[0]
        raise ConfigurationError(
            f"Expected rows of {table} as its first line names them, got {count:,} of {len(rows):,} with {reason}: "
            "save it as CSV in UTF-8.",
            kind="malformed",
        )
    return cells


def _with_points(cells: dict[str, list[Any]], separator: str) -> tuple[dict[str, list[Any]], Literal[".", ","]]:
    """Return the cells with decimal points, and the decimal sign of the table."""
    decimal: Literal[".", ","] = "."
    for name, found in cells.items():
        if separator != "," and _all_are(_COMMAS, found) and any("," in str(cell) for cell in found):
            cells[name], decimal = [c.replace(",", ".") if isinstance(c, str) else c for c in found], ","
    return cells, decimal


def drafted(path: Path, *, label: str = "", owner: str = "") -> Schema:
    """Return the schema of :func:`draft`.

    Notes
    -----
    **Formal guarantees.** Whether a record fits depends on that record and the schema alone, once the schema is
    settled. The schema itself is made from all records and hides single ones as a rule only (:func:`draft`).
    """
    return draft(path, label=label, owner=owner).schema


def _check_column(name: str, columns: Sequence[str], table: str) -> None:
    found = columns.count(name)
    if found == 1:
        return
    if found:
        raise ConfigurationError(
            f"Expected a column {name!r} once in {table}, got it {found} times: rename the others.", kind="duplicate"
        )
    near = difflib.get_close_matches(name, columns, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(columns) - _MOST_SAID} more" if len(columns) > _MOST_SAID else ""
    known = ", ".join(columns[:_MOST_SAID])
    raise ConfigurationError(
        f"Expected a column {name!r} once in {table}, got none: {meant}It has {known}{more}.", kind="unknown-name"
    )


def document(schema: Schema, heading: Sequence[str] = ()) -> str:
    """Write a schema as TOML that a person can read and review, with a heading of comments."""
    settings = schema.model_dump(mode="json", exclude_defaults=True)
    tables = {
        "label": settings.pop("label"),
        **{f"columns.{_key(k)}": c for k, c in settings.pop("columns", {}).items()},
    }
    lines = [*(f"# {line}" for line in heading), f"reviewed = {_toml(schema.reviewed)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.items() if name not in ("reviewed", "inputs")]
    named = [(f"[{name}]", table) for name, table in tables.items()]
    for title, table in [*named, *(("[[inputs]]", part) for part in settings.get("inputs", []))]:
        lines += ["", title, *(f"{name} = {_toml(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """Write a value as TOML: a JSON text is one, but for DEL, which TOML wants escaped."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and value == math.floor(value) and abs(value) < 2.0**53:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def inferred(items: Items) -> Schema:
    """Infer the schema that the records of a simulation seem to have.

    Notes
    -----
    **Formal guarantees.** Records are read against the result alone. It is made from all items, though, so whether one
    record fits depends on all of them: for simulations.
    """
    read = []
    for number in range(len(items)):
        try:
            read.append(_pair(items[number]))
        except InvalidRecordError:
            continue
    if not read:
        raise ConfigurationError(
            "Expected items that are pairs (input, target), or mappings with a label and inputs beside it, got others: "
            'write [(row["img"], row["class"]) for row in data].',
            kind="wrong-type",
        )
    first = read[0][0]
    if isinstance(first, dict):
        parts = [_part([one[0].get(name) for one in read], name if len(first) > 1 else "") for name in first]
    elif isinstance(first, tuple):
        parts = [_part([one[0][i] for one in read if len(one[0]) > i]) for i in range(len(first))]
    else:
        parts = [_part([one[0] for one in read])]
    return Schema(inputs=tuple(parts), label=_label_of([one[1] for one in read]))


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, dict):
        label = next((name for name in ("label", "labels", "target", "targets") if name in item), None)
        rest = {name: value for name, value in item.items() if name != label}
        if label is None or not rest:
            raise InvalidRecordError("a record without a label")
        return (rest if len(rest) > 1 else next(iter(rest.values()))), item[label]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise InvalidRecordError("a record that is no pair (inputs, label)")
    inputs = item[0]
    return (tuple(inputs) if isinstance(inputs, list) and _are_arrays(inputs) else inputs), item[1]


def _are_arrays(inputs: list[Any]) -> bool:
    return any(hasattr(one, "shape") and one.shape for one in inputs)


def _arrays(values: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values that are arrays or numbers, as arrays."""
    found = []
    for value in values:
        try:
            found.append(array_of(value))
        except InvalidRecordError:
            continue
    return found


def _has_text(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "US" or any(isinstance(cell, str | bytes) for cell in array.ravel().tolist())


def _part(values: Sequence[Any], name: str = "") -> Part:
    arrays = _arrays(values)
    if not arrays or _has_text(arrays[0]):
        raise ConfigurationError(
            "Expected inputs that are numbers, arrays or tensors of them, got others: encode them by a table that does "
            "not come from private data, or give a schema with columns.",
            kind="wrong-type",
        )
    shape = Counter(array.shape for array in arrays).most_common(1)[0][0]
    kinds = {array.dtype.kind for array in arrays}
    kind = "number" if kinds & set("fOUS") else "yes/no" if kinds == {"b"} else "integer"
    if kind == "integer" and all(array.dtype == np.uint8 for array in arrays):
        kind = "byte"
    return Part(kind=kind, shape=shape, name=name)


def _label_of(values: Sequence[Any]) -> Label:
    arrays = _arrays(values)
    if not arrays:
        raise ConfigurationError(
            "Expected targets that are numbers, texts or arrays, got others: give a schema.", kind="wrong-type"
        )
    shape = Counter(array.shape for array in arrays).most_common(1)[0][0]
    arrays = [array for array in arrays if array.shape == shape]
    if any(array.dtype.kind in "USO" for array in arrays):
        names = sorted({text_of(cell) for array in arrays for cell in array.ravel().tolist() if not is_missing(cell)})
        return Label(classes=tuple(names), shape=shape)
    if any(array.dtype.kind == "f" for array in arrays):
        return Label(kind="number", shape=shape)
    low, high = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
    return Label(kind="integer", bounds=(float(low), float(max(high, low + 1))), shape=shape)


def _of_arrays(rows: Rows, owner: str) -> Schema:
    found = inferred(rows)
    part, label = found.inputs[0], found.label
    values = np.concatenate([np.ravel(rows[number][0]) for number in range(len(rows))]).astype(np.float64)
    values = values[np.isfinite(values)]
    if part.kind in ("number", "integer"):
        part = Part(kind=part.kind, shape=part.shape, bounds=_bounds(values))
    if label.kind == "integer" and label.bounds is not None and label.bounds[0] >= 0:
        label = Label(classes=int(label.bounds[1]) + 1, shape=label.shape)
    elif label.kind:
        labels = np.array([float(np.ravel(rows[number][1])[0]) for number in range(len(rows))])
        labels = labels[np.isfinite(labels)]
        label = Label(bounds=_bounds(labels), shape=label.shape)
    return Schema(inputs=(part,), label=label, owner=owner)


def _column(cells: Sequence[Any]) -> Column | str:
    """Infer the column that cells seem to be, or return the reason why nothing can be learnt from them."""
    present = [cell for cell in cells if not is_missing(cell)]
    numbers, words = _numbers(present)
    of_numbers = bool(numbers) and len(words) <= len(present) * (1 - _MOST)
    if not of_numbers:
        present = [cell for cell in cells if not is_missing(cell) or _is_name(cell)]
    try:
        counts = Counter(text_of(cell).lower() for cell in present)
    except InvalidRecordError:
        return "free text"
    some_missing = len(present) < len(cells)
    if len(counts) < 2:
        return "a single value" if counts else "no value"
    if any(counts.keys() <= words for words in _YES_NO):
        return Column(kind="yes/no", missing="no" if some_missing else None)
    return _number_column(numbers, cells, some_missing) if of_numbers else _category_column(present, numbers, words)


def _number_column(numbers: Sequence[float], cells: Sequence[Any], some_missing: bool) -> Column | str:
    """Return a column of numbers, or the reason why nothing can be learnt from them."""
    whole = all(number == math.floor(number) for number in numbers)
    if whole and len(set(numbers)) == len(cells) >= _FEWEST_NAMES:
        return "a number of its own in each row"
    low, high = _bounds(numbers)
    missing: float | None = None
    if some_missing:
        missing = min(max(_nearest(float(np.median(numbers))), low), high)
    if missing is not None and whole:
        missing = round(missing)
    return Column(kind="integer" if whole else "number", bounds=(low, high), missing=missing)


def _category_column(present: Sequence[Any], numbers: Sequence[float], words: Sequence[Any]) -> Column | str:
    """Return a column of categories, or the reason why nothing can be learnt from the cells.

    ``numbers`` and ``words`` are the cells that can and cannot be read as numbers.
    """
    named = Counter(text_of(cell) for cell in present)
    if len(named) > _MOST_CATEGORIES and _all_are(_DATE, present):
        return "dates: write them as numbers"
    if len(set(numbers)) > _MOST_CLASSES and len(numbers) > len(words):
        word, count = Counter(map(text_of, words)).most_common(1)[0]
        such = f" such as {word!r}" if count >= FEWEST_OF_A_CATEGORY else ""
        return f"numbers beside texts{such}: leave these cells empty, or write them as numbers"
    frequent = [name for name, count in named.items() if count >= FEWEST_OF_A_CATEGORY and name != OTHER]
    frequent = sorted(sorted(frequent, key=lambda name: -named[name])[:_MOST_CATEGORIES])
    if frequent:
        return Column(kind="category", values=tuple(frequent))
    if _all_are(_DRESSED, present):
        return "numbers with signs or commas: write them plain"
    return "free text" if len(named) < len(present) else "a name of its own in each row"


def _all_are(kind: re.Pattern[str], cells: Sequence[Any]) -> bool:
    """Return True if texts of a kind are all cells that have a value, but for one in twenty."""
    present = [cell for cell in cells if not is_missing(cell)]
    found = sum(bool(kind.fullmatch(str(cell).strip())) for cell in present)
    return bool(present) and found >= _MOST * len(present)


def _numbers(cells: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Return the cells that are numbers, and those that are none."""
    found, others = [], []
    for cell in cells:
        try:
            found.append(number_of(cell))
        except InvalidRecordError:
            others.append(cell)
    return found, others


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and cell.strip().lower() in MISSING_WORDS


def _label(name: str, cells: Sequence[Any]) -> tuple[Label, Sequence[str]]:
    """Infer the label, and what a person must know of its classes."""
    present = [cell for cell in cells if not is_missing(cell)]
    numbers, words = _numbers(present)
    if len(words) > len(present) * (1 - _MOST) or not numbers:
        numbers, present = [], present + [cell for cell in cells if _is_name(cell)]
    spelt = Counter(text_of(cell) for cell in present)
    named = _by_usual_spelling(spelt)
    if numbers and (len(named) > _MOST_CLASSES or any(number % 1 for number in numbers)):
        return Label(column=name, bounds=_bounds_of_label(numbers)), ()
    frequent = [one for one, count in named.items() if count >= min(FEWEST_OF_A_CATEGORY, max(len(present) // 10, 1))]
    if not 2 <= len(frequent) <= _MOST_CLASSES:
        dressed = bool(words) and _all_are(_DRESSED, present)
        raise _no_label(name, named, frequent, dressed=dressed)
    order = sorted(frequent) if _numbers(frequent)[1] else sorted(frequent, key=float)
    return Label(column=name, classes=tuple(order)), _notes_on_classes(order, spelt, named)


def _no_label(name: str, named: Counter[str], frequent: Sequence[str], *, dressed: bool) -> ConfigurationError:
    """Return the refusal of a column that is neither classes nor numbers."""
    got = f"{len(named):,} values, of which {len(frequent):,} are frequent"
    if len(named) <= 1:
        got = "".join(f"{one!r} alone" for one in named) or "no value"
    plain = "write numbers without signs and commas, or " if dressed else ""
    return ConfigurationError(
        f"Expected a label of 2 to {_MOST_CLASSES} frequent classes or of numbers in the column {name!r}, got {got}"
        f": {plain}name another column with --label.",
        kind="wrong-type",
        setting="label",
    )


def _by_usual_spelling(spelt: Counter[str]) -> Counter[str]:
    """Return how often each value occurs, by its most common spelling."""
    names = _usual_spellings(spelt)
    named: Counter[str] = Counter()
    for one, count in spelt.items():
        named[names[one.casefold()]] += count
    return named


def _usual_spellings(spelt: Counter[str]) -> dict[str, str]:
    """Return the most common spelling of each value, by the value without regard to case."""
    names: dict[str, str] = {}
    for one, _ in spelt.most_common():
        names.setdefault(one.casefold(), one)
    return names


def _notes_on_classes(classes: Sequence[str], spelt: Counter[str], named: Counter[str]) -> list[str]:
    """Return what a person must know: other spellings of the classes, and values too rare to be one."""
    names = _usual_spellings(spelt)
    others = sorted(one for one in spelt if one not in classes and names[one.casefold()] in classes)
    notes = [f"{', '.join(others[:_MOST_READ])} are read as these"] if others else []
    rare = [f"{one!r} ({count:,})" for one, count in named.most_common() if one not in classes]
    return notes + ([f"too rare to be a class: {', '.join(rare[:_MOST_READ])}"] if rare else [])


def _bounds_of_label(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of a number to be predicted: narrower, where a few extreme ones would make all others one."""
    wide, narrow = _bounds(values), _bounds(values, _FAR)
    return narrow if wide[1] - wide[0] > _TIMES * (narrow[1] - narrow[0]) else wide


def _bounds(values: Sequence[float] | NDArray[np.float64], extreme: float = _EXTREME) -> tuple[float, float]:
    """Bounds of all but the most extreme values, rounded outwards to a step of 1, 2 or 5 times a power of ten."""
    low, high = (float(one) for one in np.quantile(np.asarray(values, dtype=np.float64), [extreme, 1.0 - extreme]))
    half = max((high - low) / 2.0, abs(high) * 1e-6, 1e-12)
    power = 10.0 ** math.floor(math.log10(half))
    step = next(one for one in (1.0, 2.0, 5.0, 10.0) if one * power >= half * (1.0 - 1e-9)) * power
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _nearest(first * step, 12), _nearest(max(last, first + 1) * step, 12)


def _nearest(value: float, digits: int = 2) -> float:
    return 0.0 if value == 0 else round(value, digits - 1 - math.floor(math.log10(abs(value))))


def _separator(path: Path) -> str:
    """Find the separator that splits the header of a CSV file into most columns."""

    def columns(separator: str) -> int:
        try:
            return len(CsvLines(path, separator).columns)
        except ConfigurationError:  # quotes that do not end with a wrong separator, or no such file, refused later
            return 0

    return max(_SEPARATORS, key=columns)
