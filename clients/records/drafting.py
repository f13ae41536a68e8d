"""A schema from data: a draft on an analyst's own computer, or what the records of a simulation seem to be.

Both look at all records, so both show something of them. A draft is for a person to review; real nodes take no other.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, InvalidRecordError
from .client_records import CsvLines, Items, Rows, cells_of, check_ending, npz_rows, parquet_rows
from .column_drafts import (
    ABOUT_LABEL,
    Cells,
    ColumnDraft,
    about_label,
    about_site,
    bounds_of,
    drafted_column,
    drafted_label,
    missing_codes,
)
from .encoders import usual_dimension
from .schema import Column, Label, Part, Schema, array_of, is_missing, text_of

_MOST_SAID, _MOST_LOSING = 12, 6  # columns that a message names
_NUMBER = re.compile(r"\s*[+-]?\d*[.,]?\d+\s*")
_COMMAS = re.compile(r"[+-]?\d+(,\d+)?")
_DOTS_AND_COMMAS = re.compile(r"[+-]?\d{1,3}(\.\d{3})*(,\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
_SEPARATORS = ",;\t|"
_TRIED, _MOST = 200, 0.95
"""Lines that a separator is tried on, and the share of cells of a column that are of one kind."""


@dataclass(frozen=True)
class Draft:
    """A draft of a file's schema, and what a person must know to review it."""

    schema: Schema
    columns: Sequence[ColumnDraft] = ()
    """Every column but the label and those set apart, used or left out."""
    label_notes: Sequence[str] = ()
    """Rows without a label, other spellings of the classes, rare classes: not for others to see."""
    warnings: Sequence[str] = ()
    """Notes on the whole table."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """Columns that are no features, with what they say: the site's and the owner's."""

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Columns that are left out, by the reason."""
        return _by_text((one.reason, one.name) for one in self.columns if one.column is None)

    @property
    def notes(self) -> list[str]:
        """Everything that a person should decide: the whole table's, columns that tell the label, then the others."""
        return [*self.warnings, *_column_notes(self.columns, of_label=True), *_column_notes(self.columns)]

    @property
    def notes_on_used(self) -> list[str]:
        """Everything of :attr:`notes` but on columns that are left out, and how many cells of which column are lost."""
        used = [one for one in self.columns if one.column is not None]
        losing = sorted((one for one in used if one.num_lost), key=lambda one: -one.num_lost)
        named = ", ".join(f"{one.name} {one.num_lost:,}" for one in losing[:_MOST_LOSING])
        more = f" and {len(losing) - _MOST_LOSING} more" if len(losing) > _MOST_LOSING else ""
        lost = [f"cells read as missing or as other: {named}{more}"] if losing else []
        return [*self.warnings, *_column_notes(used, of_label=True), *lost, *_column_notes(used)]


def _column_notes(columns: Sequence[ColumnDraft], *, of_label: bool = False) -> list[str]:
    """Return the warnings of columns that tell the label, or all others, each once with the columns that it is of."""
    noted = ((note, one.name) for one in columns for note in one.warnings if (note in ABOUT_LABEL) == of_label)
    return [f"{', '.join(names)}: {note}" for note, names in _by_text(noted).items()]


def draft(
    path: Path,
    *,
    label: str = "",
    owner: str = "",
    apart: Collection[str] = (),
    header: bool = True,
    text: Sequence[str] = (),
    mu: float = math.inf,
) -> Draft:
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
    header : bool
        Whether the first line of a CSV file names the columns. Without it they are ``column-1``, ``column-2``, ...
    text : sequence of str
        Columns of free text, which become hashed n-grams. Others are left out.
    mu : float
        Gaussian differential privacy of a sum of all clients. With the number of rows and classes it decides the
        dimension of the n-grams (:func:`~murmurfl.clients.records.encoders.usual_dimension`).

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
        arrays = npz_rows(path, owners=bool(owner))
        return Draft(
            _of_arrays(arrays, owner),
            warnings=about_copies(map(_bytes_of, map(arrays.__getitem__, range(len(arrays))))),
        )
    if path.suffix in (".parquet", ".pq"):
        asked: dict[str, Any] = {"label": label, "owner": owner, "apart": apart, "text": text, "mu": mu}
        return draft_of_rows(parquet_rows(path), str(path), **asked)
    written = _written(path, header=header)
    file = {name: written[name] for name in ("header", "row_names", "encoding")}
    rows = CsvLines(path, written["separator"], **file)
    return draft_of_rows(rows, str(path), label=label, owner=owner, apart=apart, text=text, mu=mu, **written)


def draft_of_rows(
    rows: Rows,
    table: str,
    *,
    label: str = "",
    owner: str = "",
    apart: Collection[str] = (),
    text: Sequence[str] = (),
    mu: float = math.inf,
    **written: Any,
) -> Draft:
    """Draft the schema of a table's rows.

    ``table`` is its name in messages, ``written`` are keys of the schema on how a file is written, and the rest is as
    for :func:`draft`.

    Notes
    -----
    As :func:`draft`, it looks at all records.
    """
    if not rows.columns:
        raise ConfigurationError(
            f"Expected the names of columns in the first line of {table}, got none.", kind="missing"
        )
    cells = _read_cells(rows, table)
    if isinstance(rows, CsvLines) and not written.get("header"):
        _check_header(rows.columns, cells, table)
    label = label or rows.columns[-1]
    copies = about_copies(
        rows.lines if isinstance(rows, CsvLines) else zip(*map(_comparable, cells.values()), strict=True)
    )
    for name in [label, *([owner] if owner else []), *apart, *text]:
        _check_column(name, rows.columns, table)
    if wrong := [name for name in text if name in (label, owner, *apart)]:
        raise ConfigurationError(
            f"Expected columns of texts that are neither label, owner nor site, got {wrong[0]!r}.",
            kind="conflict",
            setting="text",
            got=wrong[0],
        )
    uncounted = {owner, *apart, *text} - {"", label}
    counted = {name: Cells(name, found) for name, found in cells.items() if name not in uncounted}
    telling = {name: about_label(cells[name], cells[label]) for name in counted if name != label}
    del cells
    decimal = _decimal(counted.values(), written.get("separator", ","))
    codes = Counter(code for one in counted.values() for code in missing_codes(one.numbers(decimal)))
    twice = "a name that stands twice"
    columns = [
        drafted_column(one, decimal, codes) if rows.columns.count(name) == 1 else ColumnDraft(name, None, twice)
        for name, one in counted.items()
        if name != label
    ]
    columns = [
        replace(one, warnings=(*telling[one.name], *one.warnings)) if one.column is not None else one for one in columns
    ]
    if not apart:
        columns = [replace(one, warnings=(*one.warnings, *about_site(one.name))) for one in columns]
    if not text and all(one.column is None for one in columns):
        why = "; ".join(f"{one.name}: {one.reason}" for one in columns[:_MOST_SAID]) or "no other"
        many = f"{len(rows):,} row{'s' * (len(rows) != 1)}"
        raise ConfigurationError(
            f"Expected a column beside {label!r} in {table} with values to learn from, got none in {many} ({why}).",
            kind="missing",
        )
    target, notes = drafted_label(counted[label], decimal, codes)
    dimension = usual_dimension(len(rows), max(len(target.names), 2), mu)
    about = f"texts, as {dimension:,} hashed n-grams of words and characters"
    columns += [ColumnDraft(name, Column(kind="text", dimension=dimension), about) for name in text]
    kept = {one.name: one.column for one in columns if one.column is not None}
    schema = Schema(columns=kept, label=target, owner=owner, decimal=decimal, **written)
    set_apart = {**dict.fromkeys(apart, _OF_SITE), **({owner: _OF_OWNER} if owner else {})}
    return Draft(schema, columns, notes, [*_about_file(schema), *copies], set_apart)


_OF_SITE, _OF_OWNER = "says the site, no feature", "says whose a row is, no feature"


def _by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that have each text."""
    found: dict[str, list[str]] = {}
    for text, name in pairs:
        found.setdefault(text, []).append(name)
    return found


def _about_file(schema: Schema) -> list[str]:
    """Return what a person must know of how the file is written."""
    found = []
    if schema.encoding != "utf-8":
        found.append("The file is not in UTF-8 and is read as Windows-1252, which includes Latin-1: check the letters.")
    if schema.header:
        found.append("The file has no header: columns are called column-1, column-2, ... Rename them in header.")
    return found


_FEWEST_COPIES = 20


def about_copies(rows: Iterable[Hashable]) -> list[str]:
    """Return a note on rows that are copies of other rows; nothing where they are few.

    It looks at all rows. Each is given as whatever is equal for copies alone.
    """
    counted = Counter(rows)
    if (copies := counted.total() - len(counted)) < _FEWEST_COPIES:
        return []
    return [
        f"{copies:,} rows are copies of other rows. If rows were copied on purpose, remove the copies: a score on "
        "rows held out would be computed on copies of rows trained on."
    ]


def _comparable(cells: Sequence[Any]) -> Sequence[Hashable]:
    """Return cells that are equal where their values are, as NaN is not."""
    kinds = set(map(type, cells))
    if kinds <= {str, int, bool, type(None)}:
        return cells
    if kinds <= {float, int, bool, type(None)}:
        return [cell if cell == cell else None for cell in cells]  # quick, because tables are large
    return [None if is_missing(cell) else cell if isinstance(cell, Hashable) else repr(cell) for cell in cells]


def _bytes_of(record: Any) -> bytes:
    return b"".join(np.ascontiguousarray(one).tobytes() for one in record)


def _read_cells(rows: Rows, table: str) -> dict[str, Sequence[Any]]:
    """Return the cells of each column. Raise if more than half of the rows cannot be read."""
    read: list[Sequence[Any]] = []
    unread: Counter[str] = Counter()
    names = rows.columns
    for number in range(len(rows)):
        try:
            if isinstance(rows, CsvLines):
                read.append(rows.row_cells(number))
            else:
                row = rows[number]
                read.append([row.get(name) for name in names])
        except InvalidRecordError as error:
            unread[str(error)] += 1
    if unread.total() > len(rows) / 2:
        reason, count = unread.most_common(1)[0]
        raise ConfigurationError(
            f"Expected rows of {table} as its first line names them, got {count:,} of {len(rows):,} with {reason}. "
            f"{_remedy(rows, reason)}",
            kind="malformed",
        )
    columns = zip(*read, strict=True) if read else ([] for _ in names)
    return dict(zip(names, columns, strict=True))


def _remedy(rows: Rows, reason: str) -> str:
    """Return what to do about rows that cannot be read."""
    if "another number of cells" not in reason or not isinstance(rows, CsvLines):
        return "Save it as CSV in UTF-8."
    sizes: Counter[int] = Counter()
    for line in islice(rows.lines, _TRIED):
        try:
            sizes[len(rows.cells_of(line or b""))] += 1
        except InvalidRecordError:
            continue
    usual = sizes.most_common(1)[0][0] if sizes else 0
    return f"The first line names {len(rows.columns)} columns and most rows have {usual} cells: name every column."


def _check_header(names: Sequence[str], cells: Mapping[str, Sequence[Any]], table: str) -> None:
    """Raise if the first line seems to be a row: its names are numbers, or values of the rows below."""
    if list(names) == [str(number) for number in range(len(names))]:
        return
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    texts = [name for name in names if name and name not in numbers]
    repeated = [name for name in texts if _stands_below(name, names, cells)]
    if len(numbers) == len(names) or (repeated and (numbers or 2 * len(repeated) >= len(texts))):
        raise ConfigurationError(
            f"Expected the names of columns in the first line of {table}, got numbers or values that stand in rows as "
            "well. Add a line of names, or use --no-header (header=False).",
            kind="malformed",
            setting="header",
        )


def _stands_below(name: str, names: Sequence[str], cells: Mapping[str, Sequence[Any]]) -> bool:
    """Return True if a name is a value of its own column, other than where the whole header stands once more."""
    places = [place for place, cell in enumerate(cells[name]) if isinstance(cell, str) and cell.strip() == name]
    return any(any(str(cells[other][place]).strip() != other for other in names) for place in places[:_TRIED])


def _decimal(columns: Collection[Cells], separator: str) -> Literal[".", ","]:
    """Return the decimal sign of a table: a comma if a column of numbers has some, and not between thousands alone."""
    for one in columns:
        texts = [cell.strip() for cell, _ in one.present if isinstance(cell, str)]
        with_commas = [text for text in texts if "," in text]
        if not with_commas or one.share(_DOTS_AND_COMMAS) < _MOST:
            continue
        if separator != "," and one.share(_COMMAS) >= _MOST:
            return ","
        if not all(map(_THOUSANDS.fullmatch, with_commas)):
            return ","
    return "."


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


def inferred(*clients: Items) -> Schema:
    """Infer the schema that the records of a simulation's clients seem to have, all of them together.

    A client may have records of one class, or a single record: what it lacks is known from the others.

    Notes
    -----
    **Formal guarantees.** Records are read against the result alone. It is made from all items, though, so whether one
    record fits depends on all of them: for simulations.
    """
    read = []
    for items in clients:
        for number in range(len(items)):
            try:
                read.append(pair_of(items[number]))
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


def pair_of(item: Any) -> tuple[Any, Any]:
    """Return inputs and label of an item; raise InvalidRecordError if it has none."""
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
        part = Part(kind=part.kind, shape=part.shape, bounds=_some_bounds(values))
    if label.kind == "integer" and label.bounds is not None and label.bounds[0] >= 0:
        label = Label(classes=int(label.bounds[1]) + 1, shape=label.shape)
    elif label.kind:
        labels = np.array([float(np.ravel(rows[number][1])[0]) for number in range(len(rows))])
        labels = labels[np.isfinite(labels)]
        label = Label(bounds=_some_bounds(labels), shape=label.shape)
    return Schema(inputs=(part,), label=label, owner=owner)


def _some_bounds(values: NDArray[np.float64]) -> tuple[float, float]:
    found = bounds_of(values)
    low = float(values[0])
    return (low, low + 1.0) if found is None else found


def _written(path: Path, *, header: bool) -> dict[str, Any]:
    """Return how a CSV file is written: keys of a schema."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error):  # refused by whatever reads it
        content = b""
    encoding = _encoding(content)
    lines = content[: _TRIED << 12].split(b"\n")[: _TRIED + 1]
    lines = [line for line in lines if line] or [b""]
    separator = max(_SEPARATORS, key=lambda one: _fit(lines, one, encoding))
    if _fit(lines, separator, encoding)[1] < 2 and _fit(lines, " ", encoding)[1] > 1:
        separator = " "
    written: dict[str, Any] = {"separator": separator, "encoding": encoding, "header": (), "row_names": False}
    sizes = _sizes(lines, separator, encoding)
    usual = Counter(sizes[1:] or sizes).most_common(1)[0][0]
    if not header:
        return {**written, "header": tuple(f"column-{number}" for number in range(1, usual + 1))}
    named = usual == sizes[0] + 1 and sizes[1:].count(usual) >= _MOST * len(sizes[1:])
    return {**written, "row_names": named and _begin_differently(lines[1:], separator, encoding)}


def _begin_differently(lines: Sequence[bytes], separator: str, encoding: str) -> bool:
    """Return True if no two lines have the same first cell, as names of rows."""
    firsts = []
    for line in lines:
        with suppress(InvalidRecordError):
            firsts += cells_of(line, separator, encoding)[:1]
    return len(set(firsts)) == len(firsts)


def _encoding(content: bytes) -> str:
    """Return UTF-8 unless bytes are none and no line has letters of it."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    else:
        return "utf-8"
    for line in content.split(b"\n"):
        if line.isascii():
            continue
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            continue
        return "utf-8"  # with a few broken lines
    return "utf-8" if b"\0" in content[:_TRIED] else "cp1252"


def _sizes(lines: Sequence[bytes], separator: str, encoding: str) -> list[int]:
    """Return how many cells lines have; 0 for one that cannot be read."""
    found = []
    for line in lines:
        try:
            found.append(len(cells_of(line.removeprefix(b"\xef\xbb\xbf"), separator, encoding)))
        except InvalidRecordError:
            found.append(0)
    return found


def _fit(lines: Sequence[bytes], separator: str, encoding: str) -> tuple[float, int]:
    """Return how well a separator fits: the share of lines with as many cells as the first, and how many cells."""
    sizes = _sizes(lines, separator, encoding)
    first = sizes[0]
    alike = sum(size in (first, first + 1) for size in sizes) / len(sizes)
    return (round(alike, 1) if first > 1 else 0.0), first
