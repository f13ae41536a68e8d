"""Made-up records of a schema, and the strange ones that stand in the place of one of them in a differential audit.

Two data sets are neighbours if they differ in one record (in all records of one owner). A record that nobody has read
yet is a line of a file or an item that was handed over, so it is made strange here, before any type, table or array.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema

ROWS = 24
"""Records of an audit."""
OWNERS = 12
"""Owners of these, with as many records each, scattered over the file."""
_MOST_CLASSES = 8
_PLACES = (0, 13)
"""Positions at which a record is replaced: the first, which a reader may take for all, and one in the middle."""
_LONG = 1 << 20

Row = Any
"""A record as it is written down: a mapping from column to cell, a pair or triple of arrays; bytes: a line of CSV."""
Rows = list[Row]


@dataclass(frozen=True)
class Neighbour:
    """Rows that differ from the made-up ones in one record, or in all of one owner's.

    ``again`` if the same was tried in another place, so that one form of it is enough.
    """

    name: str
    rows: Rows
    again: bool = False


def made_up_rows(schema: Schema) -> Rows:
    """Return records that are nobody's, a few of each owner where there are owners.

    An owner's records have one label, and every second owner has another than the one before: it shows if an owner
    takes another's place.
    """
    random = np.random.Generator(np.random.Philox(key=83))
    if not schema.owner:
        return [_of_owner(schema, row, "") for row in schema.made_up(ROWS, random)]
    classes = min(schema.num_classes, _MOST_CLASSES)
    made = list(schema.made_up(ROWS * classes, random))
    owners = [number % OWNERS for number in range(ROWS)]
    chosen = [made[number * classes + (owner // 2) % classes] for number, owner in enumerate(owners)]
    return [_of_owner(schema, row, f"owner-{owner}") for row, owner in zip(chosen, owners, strict=True)]


def neighbours(schema: Schema, *, lines: bool) -> Iterator[Neighbour]:
    """Yield the made-up rows, with one of them, or one owner's, replaced by strange ones.

    With ``lines`` a row is a line of CSV, which can be broken as such.
    """
    rows = made_up_rows(schema)
    yield Neighbour("the same record", rows)
    for place in _PLACES:
        strange = (_strange_cells if schema.columns else _strange_arrays)(schema, rows[place])
        broken = _broken_lines(csv_line(schema, rows[place]), schema.separator.encode()) if lines else ()
        for name, row in (*_ordinary(schema, rows[place]), *strange, *broken):
            yield Neighbour(name, [*rows[:place], row, *rows[place + 1 :]], again=place > 0)
    if schema.owner:
        yield from _strange_owners(schema, rows)


def _ordinary(schema: Schema, row: Row) -> Iterator[tuple[str, Row]]:
    """Yield records that fit, of which every contribution must be bounded."""
    random = np.random.Generator(np.random.Philox(key=89))
    owner = _owner_of(schema, row)
    *_, other = schema.made_up(2, random)
    yield "another record", _of_owner(schema, other, owner)
    for outlier in schema.outliers():
        yield "a record at the ends of its bounds", _of_owner(schema, outlier, owner)


def _strange_cells(schema: Schema, row: Mapping[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yield a row of a table with a cell that nobody expects."""
    label = schema.label.column
    numbers = [name for name, column in schema.columns.items() if column.kind in ("number", "integer")]
    categories = [name for name, column in schema.columns.items() if column.kind == "category"]
    yield "nothing in any cell", dict.fromkeys(row)
    yield "zero in every cell", {name: row[name] if name == schema.owner else 0 for name in row}
    for name, cell in _STRANGE_LABELS:
        yield name, {**row, label: cell}
    for column in (*numbers[:1], *numbers[-1:]):
        for name, cell in _STRANGE_NUMBERS:
            yield name, {**row, column: cell}
    for column in categories[:1]:
        yield "an unknown category", {**row, column: "neverseen"}
        yield "a missing cell", {**row, column: None}
    if schema.owner:
        yield "a missing owner", {**row, schema.owner: None}


_STRANGE_LABELS: tuple[tuple[str, Any], ...] = (
    ("a missing label", None),
    ("a label far from all others", 10**6),
    ("a label below all classes", -1),
    ("a label that is a text", "neverseen"),
    ("half a number for a label", 0.5),
    ("a label that is not a number", float("nan")),
    ("an infinite label", float("inf")),
    ("a label of 1e308", 1e308),
    ("a boolean for a label", True),
)
_STRANGE_NUMBERS: tuple[tuple[str, Any], ...] = (
    ("a missing cell", None),
    ("a text for a number", "tall"),
    ("half a number for an integer", 0.5),
    ("a number of 1e308", 1e308),
    ("an integer of 80 bits", 2**80),
    ("a denormal number", 5e-324),
    ("not a number", float("nan")),
    ("infinity", float("inf")),
    ("a number of 17 digits", 0.12345678901234568),
    ("a boolean for a number", "True"),
    ("a text of 1 MB", "9" * _LONG),
    ("a complex number", 1j),
    ("a NUL in a cell", "1\x00"),
    ("a carriage return in a cell", "1\r2"),
)


def _broken_lines(line: bytes, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a line of CSV that is none; the first cell stays, for it may say whose the line is."""
    first, between, rest = line.partition(separator)
    first += between
    yield "an empty line", b""
    yield "a cell too many", line + separator + b'"1"'
    yield "cells too few", first[:-1]
    yield "a quote that is not closed", first + b'"' + rest
    yield "another encoding", first + b"\xff\xfe" + rest
    yield "a byte-order mark", first + b"\xef\xbb\xbf" + rest
    yield "NULs all over", first + b"\x00" * 8 + rest


def _strange_arrays(schema: Schema, row: Sequence[Any]) -> Iterator[tuple[str, Row]]:
    """Yield a pair whose inputs or label nobody expects."""
    inputs, label, *owner = row
    shape = np.shape(label)
    for name, cell in _STRANGE_LABELS:
        yield name, (inputs, cell if not shape else np.full(shape, cell), *owner)
    yield "labels of another shape", (inputs, np.zeros((3, 2), np.int64), *owner)
    for name, change in _STRANGE_INPUTS:
        yield name, (_with_first(inputs, change), label, *owner)
    yield "nothing for the inputs", (None, label, *owner)
    yield "a text for the inputs", ("tall", label, *owner)
    if schema.owner:
        yield "a missing owner", (inputs, label, "")


def _with_value(value: Any) -> Callable[[NDArray[Any]], Any]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        whole = isinstance(value, int) and array.dtype.kind in "iu"
        changed = array.astype(np.int64 if whole else np.result_type(np.float64, type(value)))
        changed.reshape(-1)[:1] = value
        return changed

    return change


_STRANGE_INPUTS: tuple[tuple[str, Callable[[NDArray[Any]], Any]], ...] = (
    ("a missing cell", lambda array: np.array([None, *array.ravel()[1:]], dtype=object).reshape(array.shape)),
    ("a text for a number", lambda array: np.array(["tall", *map(str, array.ravel()[1:])]).reshape(array.shape)),
    ("half a number for an integer", _with_value(0.5)),
    ("a number of 1e308", _with_value(1e308)),
    ("an integer of 60 bits", _with_value(2**60)),
    ("a negative integer", _with_value(-1)),
    ("a denormal number", _with_value(5e-324)),
    ("not a number", _with_value(float("nan"))),
    ("infinity", _with_value(float("inf"))),
    ("zero everywhere", np.zeros_like),
    ("inputs too long", lambda array: np.concatenate([array.ravel(), array.ravel()])),
    ("inputs too short", lambda array: array.ravel()[:-1]),
    ("one axis more", lambda array: array[None]),
    ("lists of many lengths", lambda array: [[1.0], [1.0, 2.0]]),  # noqa: ARG005
    ("a complex number", _with_value(1j)),
)


def _with_first(inputs: Any, change: Callable[[NDArray[Any]], Any]) -> Any:
    if isinstance(inputs, Mapping):
        first = next(iter(inputs))
        return {**inputs, first: change(np.asarray(inputs[first]))}
    if isinstance(inputs, tuple):
        return (change(np.asarray(inputs[0])), *inputs[1:])
    return change(np.asarray(inputs))


def _strange_owners(schema: Schema, rows: Rows) -> Iterator[Neighbour]:
    """All rows of one owner replaced and moved: their number and their places are the owner's as well."""
    for whose in dict.fromkeys(_owner_of(schema, row) for row in rows):
        own = [row for row in rows if _owner_of(schema, row) == whose]
        others = [row for row in rows if _owner_of(schema, row) != whose]
        strange = [_of_owner(schema, row, whose) for row in schema.outliers()]
        yield Neighbour("an owner's rows last", [*others, *own])
        yield Neighbour("an owner's rows first, in another order", [*own[::-1], *others])
        yield Neighbour("an owner with one row", [own[0], *others])
        yield Neighbour("an owner with 30 rows", [*others, *(own * 30)[:30]])
        yield Neighbour("an owner with other rows", [*others[:5], *strange[: len(own)], *others[5:]])
        yield Neighbour("an owner with other rows and more", [*strange, *others, *strange])


def _owner_of(schema: Schema, row: Row) -> str:
    return "" if not schema.owner else str(row[schema.owner] if isinstance(row, Mapping) else row[2])


def _of_owner(schema: Schema, row: Row, owner: str) -> Row:
    """Return a made-up row as somebody would have it: one owner's, and with a label that is a plain value."""
    if isinstance(row, Mapping):
        return {**row, schema.owner: owner} if schema.owner else row
    plain = np.asarray(row[1].tolist()) if row[1].ndim else row[1].item()
    return (row[0], plain, owner) if schema.owner else (row[0], plain)


def csv_line(schema: Schema, row: Row) -> bytes:
    """Return a row as a line of CSV; bytes are one already."""
    if isinstance(row, bytes):
        return row
    cells = [row.get(name, "") for name in schema.header] if schema.header else [*row.values()]
    return _line(schema, ["row", *cells] if schema.row_names else cells)


def _line(schema: Schema, cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=schema.separator, lineterminator="").writerow(cells)
    return text.getvalue().encode(schema.encoding)


def written(schema: Schema, rows: Rows, path: Path) -> bool:
    """Write rows as a file of the kind that its name says; False where such a file cannot have them.

    A library that gives a whole column one type does so here, as it would for an operator.
    """
    if path.suffix in (".csv", ".gz"):
        names = next(row for row in rows if isinstance(row, Mapping))
        lines = [*([] if schema.header else [_line(schema, [*names])]), *(csv_line(schema, row) for row in rows)]
        content = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return True
    if path.suffix == ".npz":
        parts = [_column([row[i] for row in rows]) for i in range(3 if schema.owner else 2)]
        if any(part.dtype == object for part in parts):
            return False
        np.savez(path, **dict(zip(("features", "labels", "owners"), parts, strict=False)))  # type: ignore[arg-type]
        return True
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(arrow.table({name: _arrow_column(arrow, cells) for name, cells in columns.items()}), path)
    return True


def _arrow_column(arrow: Any, cells: list[Any]) -> Any:
    try:
        return arrow.array(cells)
    except (arrow.ArrowException, OverflowError, ValueError):
        return arrow.array([None if cell is None else str(cell) for cell in cells])


def handed_over(schema: Schema, rows: Rows) -> Iterator[tuple[str, Any]]:
    """Yield the same rows as projects hand them over.

    In each form that can have them and whose library is installed.
    """
    pairs = [_as_pair(schema, row) for row in rows]
    yield "list", pairs
    yield "arrays", tuple(_stacked([pair[i] for pair in pairs]) for i in range(len(pairs[0])))
    if schema.columns and find_spec("pandas"):
        pandas = import_module("pandas")  # of whoever has it: nothing here needs it

        yield "pandas", pandas.DataFrame(rows)
    items = [dict(row) for row in rows] if schema.columns else pairs
    if find_spec("torch"):
        from torch.utils.data import DataLoader

        yield "torch", DataLoader(_torch_items(items), batch_size=4)
        if not schema.columns:
            tensors = _tensors(pairs)
            if tensors is not None:
                yield "tensors", tensors
    if schema.columns and find_spec("datasets"):
        import datasets

        try:
            yield "datasets", datasets.Dataset.from_list(rows)
        except Exception:  # what Arrow has no column for cannot be handed over as one
            return


def _as_pair(schema: Schema, row: Row) -> tuple[Any, ...]:
    if not schema.columns:
        return tuple(row)
    owner = [row[schema.owner]] if schema.owner else []
    return [row[name] for name in schema.columns], row[schema.label.column], *owner


def _column(values: Sequence[Any]) -> NDArray[Any]:
    """Values as NumPy makes one array of them, or pandas of texts: one strange value may change the type of all."""
    if any(isinstance(value, list) and any(isinstance(cell, str) for cell in value) for value in values):
        return np.array(values, dtype=object)
    try:
        return np.asarray(values)
    except (ValueError, OverflowError):  # of many lengths
        made = np.empty(len(values), dtype=object)
        for number, value in enumerate(values):
            made[number] = value
        return made


def _stacked(values: Sequence[Any]) -> Any:
    """Values side by side, as arrays: of inputs that are several, each part by itself."""
    first = next((value for value in values if isinstance(value, Mapping | tuple)), None)
    same = first is not None and all(isinstance(value, type(first)) and len(value) == len(first) for value in values)
    if isinstance(first, Mapping) and same:
        return {name: _column([value[name] for value in values]) for name in first}
    if isinstance(first, tuple) and same:
        return tuple(_column(parts) for parts in zip(*values, strict=True))
    return _column(values)


def _torch_items(items: list[Any]) -> Any:
    from torch.utils.data import Dataset

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, number: int) -> Any:
            return items[number]

    return Items()


def _tensors(pairs: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """All inputs as one tensor and all labels as another; None where PyTorch has no type for them."""
    import torch

    try:
        return tuple(torch.as_tensor(np.asarray([pair[i] for pair in pairs])) for i in range(len(pairs[0])))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
