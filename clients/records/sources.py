"""Where records come from: files, tables and data sets, each as items of which one can be asked for without the others.

Nothing here converts a value, and nothing looks at more than the one item that it is asked for: a type that a library
chose for a whole column is not a type of a record. What an item means is the schema's (:mod:`.schema`).
"""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ...privacy import ConfigurationError
from ...privacy.errors import MisfitError, check_installed
from .schema import Schema

ADVICE = (
    "give (inputs, targets), two arrays with the records along the first axis, a table, or a data set of pairs "
    "(input, target)"
)


class Items(Protocol):
    """Records as they were handed over, read one at a time, which may fail; ``record_kind`` is "row" for a file's."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Table(Items, Protocol):
    """Rows with named columns."""

    columns: list[str]


class CsvLines:
    """The rows of a ``.csv`` or ``.csv.gz``, whose first line names the columns.

    A row is one physical line, split off before quotes are read and decoded by itself: item i depends on line i + 2
    alone, and a line break within quotes ends a row. Whether the file is refused depends on the first line alone.
    """

    def __init__(self, path: Path, separator: str) -> None:
        try:
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix == ".gz" else content
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigurationError(f"Expected a CSV file at {path}, got: {error}.") from error
        self.record_kind = "row"
        first, *self._lines = content.split(b"\n")
        if self._lines and not self._lines[-1]:
            self._lines.pop()
        self._separator = separator
        try:
            self.columns = [name.strip() for name in self._cells(first.removeprefix(b"\xef\xbb\xbf"))]
        except MisfitError as error:
            raise ConfigurationError(
                f"Expected the names of columns in the first line of {path}, got {error}: save it as CSV in UTF-8."
            ) from None

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int, /) -> Mapping[str, str]:
        cells = self._cells(self._lines[number])
        if len(cells) != len(self.columns):
            raise MisfitError("a line with another number of cells than the header")
        return dict(zip(self.columns, cells, strict=True))

    def _cells(self, line: bytes) -> list[str]:
        try:
            (cells,) = csv.reader([line.removesuffix(b"\r").decode("utf-8")], delimiter=self._separator, strict=True)
        except (UnicodeDecodeError, csv.Error, ValueError):
            raise MisfitError("a line that is no CSV in UTF-8, or a line break within quotes") from None
        return cells


class ParquetRows:
    """The rows of a Parquet file, each cell by itself whatever type its column has."""

    def __init__(self, path: Path) -> None:
        check_installed("pyarrow", "tables", "Parquet files")
        import pyarrow.parquet as parquet

        try:
            self._table = parquet.read_table(path)
        except Exception as error:
            raise ConfigurationError(f"Expected a Parquet file at {path}, got: {type(error).__name__}.") from error
        self.record_kind = "row"
        self.columns = list(map(str, self._table.column_names))

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return {name: self._table.column(i)[number].as_py() for i, name in enumerate(self.columns)}


class FrameRows:
    """The rows of a pandas DataFrame, each cell by itself whatever type its column has."""

    def __init__(self, frame: Any) -> None:
        self._columns = [frame.iloc[:, i].tolist() for i in range(frame.shape[1])]
        self.columns = list(map(str, frame.columns))
        self._length = len(frame)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return {name: column[number] for name, column in zip(self.columns, self._columns, strict=True)}


class ListedRows:
    """Rows as a list of mappings from column to cell; the first one names the columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(map(str, rows[0])) if rows else []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return self._rows[number]


class Pairs:
    """Inputs, labels and perhaps owners, side by side, with the records along the first axis."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        if any(hasattr(part, "toarray") for part in parts):
            raise ConfigurationError("Expected inputs as a dense array, got a sparse one: give X.toarray().")
        lengths = {_length(part) for part in parts}
        if len(lengths) != 1:
            raise ConfigurationError(
                f"Expected inputs and targets of one length, got {' and '.join(map(str, sorted(lengths)))}: {ADVICE}."
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int, /) -> tuple[Any, ...]:
        return tuple(_picked(part, number) for part in self._parts)


class Batches:
    """An object that gives a batch for a slice, asked for batches of one."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: int, /) -> tuple[Any, ...]:
        batch = self._found[number : number + 1]
        if not isinstance(batch, tuple):
            raise MisfitError("a record that is no pair (inputs, label)")
        return tuple(_picked(part, 0) for part in batch)


class Collated:
    """The items of a data set, each handed alone to a ``DataLoader``'s own ``collate_fn``."""

    def __init__(self, items: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._items, self._collate = items, collate

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int, /) -> Any:
        batch = self._collate([self._items[number]])
        return tuple(_picked(part, 0) for part in batch) if isinstance(batch, list | tuple) else _picked(batch, 0)


class NpzRows(Pairs):
    """The rows of an ``.npz`` with the arrays ``features`` and ``labels``, and ``owners`` where a schema names one."""

    def __init__(self, path: Path, *, owners: bool) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = [file[name] for name in ["features", "labels", *(["owners"] if owners else [])]]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"Expected an .npz with the arrays features, labels{' and owners' if owners else ''} at {path}, got: "
                f"{error}."
            ) from error
        if any(part.ndim == 0 for part in parts):
            raise ConfigurationError(f"Expected arrays with a row a record in {path}, got a single number.")
        self.record_kind = "row"
        super().__init__(*parts)


def file_items(path: Path, schema: Schema) -> Items:
    """The rows of a file, by the ending of its name: ``.csv``, ``.csv.gz``, ``.parquet`` or ``.npz``.

    Item i depends on row i of the file alone; a refusal depends on the header, or on the names and shapes of arrays.
    """
    path = Path(path).expanduser()
    check_ending(path)
    if path.suffix == ".npz":
        return NpzRows(path, owners=bool(schema.owner))
    return ParquetRows(path) if path.suffix in (".parquet", ".pq") else CsvLines(path, schema.separator)


def table_file(path: Path, schema: Schema) -> Table:
    """The rows of a file with named columns, as :func:`file_items`."""
    if Path(path).suffix == ".npz":
        raise ConfigurationError(f"Expected a table with named columns, .csv, .csv.gz or .parquet, got {path}.")
    return cast("Table", file_items(path, schema))


def table_rows(table: Any) -> Table:
    """A DataFrame's rows, or those of a list of mappings.

    Raises
    ------
    ConfigurationError
        If it is another kind of object.
    """
    if hasattr(table, "iloc") and hasattr(table, "columns"):
        return FrameRows(table)
    listed = isinstance(table, Sequence) and not isinstance(table, str | bytes)
    if listed and table and all(isinstance(row, Mapping) for row in table):
        return ListedRows(table)
    raise ConfigurationError(
        f"Expected a file of a table, a DataFrame or a list of mappings, got {type(table).__name__}; arrays go to "
        "murmurfl.app.simulate, as a task of your own."
    )


def check_ending(path: Path) -> None:
    """Refuse a file of another kind, by the ending of its name."""
    if not path.name.endswith((".csv", ".csv.gz", ".parquet", ".pq", ".npz")):
        raise ConfigurationError(f"Expected a file that ends in .csv, .csv.gz, .parquet or .npz, got {path}.")


def check_columns(columns: Sequence[str], schema: Schema) -> None:
    """Refuse a table without a column that the schema names, or with one of them twice; the names are public."""
    if not schema.columns:
        raise ConfigurationError("Expected a schema of columns for a table, got one of arrays.")
    named = [*schema.columns, schema.label.column, *([schema.owner] if schema.owner else [])]
    wrong = [name for name in named if list(columns).count(name) != 1]
    if wrong:
        raise ConfigurationError(
            f"Expected each column of the schema once in the table, got {', '.join(wrong)} missing or twice."
        )


def items_of(found: Any) -> Items:
    """A project's samples as items.

    Parameters
    ----------
    found : Any
        A pair or triple (inputs, labels, owners) of arrays, tensors, lists or tables; a table of pandas; a list of
        items; PyTorch's ``Dataset`` or ``DataLoader``; a ``Dataset`` of the package ``datasets``; or whatever has a
        length and gives a batch for a slice. A loader's data set is taken item by item: its sampler sees none, and its
        own ``collate_fn`` sees one at a time.
    """
    loader, dataset, iterable = _torch_kinds()
    items: Any
    collate = None
    if loader and isinstance(found, loader):
        found, collate = found.dataset, found.collate_fn
    if iterable and isinstance(found, iterable):
        raise ConfigurationError(
            f"Expected samples with a length, got {type(found).__name__}, an iterable: a sample's number says how "
            f"often it was used; {ADVICE}."
        )
    if isinstance(found, tuple):
        if len(found) not in (2, 3):
            raise ConfigurationError(f"Expected a pair (inputs, targets), got {len(found)} parts: {ADVICE}.")
        items = Pairs(*found)
    elif _is_of("pandas", "DataFrame", found):
        items = FrameRows(found)
    elif isinstance(found, list) or (dataset and isinstance(found, dataset)) or _is_of("datasets", "Dataset", found):
        items = found
    elif isinstance(found, Mapping | str | bytes) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigurationError(f"Expected samples, got {type(found).__name__}: {ADVICE}.")
    else:
        items = Batches(found)
    if collate is not None and getattr(collate, "__module__", "").partition(".")[0] != "torch":
        items = Collated(items, collate)
    if not len(items):
        raise ConfigurationError("Expected at least one sample, got none.")
    return items


def _torch_kinds() -> tuple[Any, Any, Any]:
    """PyTorch's loader and data set classes, None if it is not imported: then nothing can be one."""
    data = sys.modules.get("torch.utils.data")
    return (None, None, None) if data is None else (data.DataLoader, data.Dataset, data.IterableDataset)


def _is_of(package: str, name: str, found: Any) -> bool:
    module = sys.modules.get(package)
    return module is not None and isinstance(found, getattr(module, name))


def _length(part: Any) -> int:
    if isinstance(part, Mapping):
        lengths = {_length(one) for one in part.values()}
    elif isinstance(part, tuple):
        lengths = {_length(one) for one in part}
    else:
        shape = getattr(part, "shape", None)
        lengths = {int(shape[0]) if shape else len(part)} if shape != () else set()
    if len(lengths) != 1:
        raise ConfigurationError(f"Expected inputs and targets with a first axis of one length: {ADVICE}.")
    return lengths.pop()


def _picked(part: Any, number: int) -> Any:
    """One record of arrays, tables and structures of them."""
    if isinstance(part, Mapping):
        return {name: _picked(one, number) for name, one in part.items()}
    if isinstance(part, tuple):
        return tuple(_picked(one, number) for one in part)
    if hasattr(part, "iloc"):  # a table or a column of pandas, whose brackets may mean names
        row = part.iloc[number]
        return row.tolist() if hasattr(part, "columns") else row
    return part[number]
