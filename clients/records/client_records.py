"""The records of a client: where they come from, each read by itself, and by owner where a row is an owner's.

Sources give items: files, tables and data sets, of which one can be asked for without the others. They convert no
value, and look at no more than the one item that they are asked for: a type that a library chose for a whole column is
not a type of a record. :class:`Records` reads items by a schema (:mod:`.schema`). :class:`OwnedSamples` takes the place
of a client's samples and has as many rows as owners, :class:`OwnerGradients` that of a model's gradients; a batch of b
samples becomes one of b owners.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import logging
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import OF_DATA, ConfigurationError, InvalidRecordError, check_installed, is_interrupt
from ...privacy.release.known_samples import Owners
from ..adapters.per_sample_gradients import PerSampleGradients
from .schema import Record, Schema, stacked

_PART_BYTES = 1 << 20
ADVICE = (
    "give (inputs, targets), two arrays with the records along the first axis, a table, or a data set of pairs "
    "(input, target)"
)


class Items(Protocol):
    """Records as they were handed over, read one at a time, which may fail; ``record_kind`` is "row" for a file's."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Rows:
    """Items by a function of their numbers; only a table's have ``columns``."""

    columns: list[str]

    def __init__(
        self, length: int, row: Callable[[int], Any], columns: Sequence[str] | None = None, kind: str = "item"
    ) -> None:
        if columns is not None:
            self.columns = list(columns)
        self.record_kind = kind
        self._length, self._row = length, row

    @property
    def public_count(self) -> int:
        """Number of rows that what stands in a row cannot change."""
        return self._length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int, /) -> Any:
        return self._row(number)


_LINE_BYTES, _TIMES_THE_HEADER = 1 << 20, 16
_MARK, _MOST_MAGIC = b"\xef\xbb\xbf", 4
_OF_A_SCHEMA = ', or name its encoding in a schema (encoding = "cp1252" for Latin-1)'


ROW_NAME = "row-name"
"""Name of a column of row names, which a header has none for."""
_LONGEST_FIELD = 131_072
"""Characters that Python's CSV reader takes for a cell."""
_OTHER_FILES = {
    b"PK\x03\x04": "an Excel workbook or another zip archive; save the sheet as CSV in UTF-8",
    b"\x1f\x8b": "a file that is compressed; let its name end in .csv.gz",
    b"\xff\xfe": "UTF-16; save it as CSV in UTF-8 (`iconv -f UTF-16 -t UTF-8`)",
    b"\xfe\xff": "UTF-16; save it as CSV in UTF-8 (`iconv -f UTF-16 -t UTF-8`)",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save the sheet as CSV in UTF-8",
}
"""Files that are no CSV, by what they begin with, and what to do."""


class CsvLines(Rows):
    """The rows of a ``.csv`` or ``.csv.gz``, whose first line names the columns unless ``header`` does.

    A row is one physical line, split off before quotes are read and decoded by itself: item i depends on line i + 2
    alone, and a line break within quotes ends a row. Whether the file is refused depends on the first line alone. A
    line of more than 1 MiB, or of 16 times the first line where that is more, is not kept and does not fit, so no line
    takes more memory than that.
    """

    def __init__(
        self,
        path: Path,
        separator: str,
        *,
        header: Sequence[str] = (),
        row_names: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        self._separator, self._encoding, self._names_columns = separator, encoding, not header
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                begin = file.read(_MOST_MAGIC)
                file.seek(0)
                first = b"" if header else file.readline().removesuffix(b"\n")
                self.lines = list(_lines(file, max(_LINE_BYTES, _TIMES_THE_HEADER * len(first))))
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"Expected a CSV file at {path}, got: {reason}.", kind="unreadable") from error
        other = next((what for magic, what in _OTHER_FILES.items() if begin.startswith(magic)), "")
        if other and not header:  # the first line is a record where the header is given
            raise ConfigurationError(f"Expected a CSV file at {path}, got {other}.", kind="malformed", setting="path")
        try:
            columns = list(header) or [name.strip() for name in self.cells_of(first.removeprefix(_MARK))]
        except InvalidRecordError as error:
            raise ConfigurationError(
                f"Expected the names of columns in the first line of {path}, got {error}: save it as CSV in UTF-8"
                f"{_OF_A_SCHEMA if encoding == 'utf-8' else ''}.",
                kind="malformed",
            ) from None
        if header and self.lines and self.lines[0] is not None:
            self.lines[0] = self.lines[0].removeprefix(_MARK)
        super().__init__(len(self.lines), self._named_cells, [ROW_NAME, *columns] if row_names else columns, "row")
        self._path = path

    def row_cells(self, number: int) -> list[str]:
        """Return the cells of a row in the columns' order; raise InvalidRecordError if it has no such cells."""
        line = self.lines[number]
        if line is None:
            raise InvalidRecordError("a line that is too long")
        cells = self.cells_of(line)
        if len(cells) != len(self.columns):
            raise InvalidRecordError("a line with another number of cells than the header")
        return cells

    def _named_cells(self, number: int) -> Mapping[str, str]:
        return dict(zip(self.columns, self.row_cells(number), strict=True))

    @property
    def public_count(self) -> int:
        """Number of lines behind the header that end with a line break.

        A last line without one may be empty, and then there is no telling that it was there.
        """
        with gzip.open(self._path) if self._path.suffix == ".gz" else self._path.open("rb") as file:
            breaks = sum(part.count(b"\n") for part in iter(lambda: file.read(_PART_BYTES), b""))
        return min(max(breaks - self._names_columns, 0), len(self))

    def cells_of(self, line: bytes) -> list[str]:
        """Return the cells of a line; raise InvalidRecordError if it is no line of CSV."""
        return cells_of(line, self._separator, self._encoding)


def cells_of(line: bytes, separator: str, encoding: str) -> list[str]:
    """Return the cells of a line; raise InvalidRecordError if it cannot be decoded, or its quotes do not end."""
    try:
        text = line.removesuffix(b"\r").decode(encoding)
        if '"' not in text and "\r" not in text and len(text) <= _LONGEST_FIELD:  # faster, and what a reader says
            return text.split(separator) if text else []
        (cells,) = csv.reader([text], delimiter=separator, strict=True)
    except (UnicodeDecodeError, csv.Error, ValueError):
        name = "UTF-8" if encoding == "utf-8" else encoding
        raise InvalidRecordError(f"a line that is no CSV in {name}, or a line break within quotes") from None
    return cells


def _lines(file: io.BufferedIOBase, longest: int) -> Iterator[bytes | None]:
    """Yield the lines that are left in a file, without their ends; None for one of more bytes than ``longest``."""
    while line := file.readline(longest + 1):
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) <= longest:  # the last one
            yield line
        else:
            while (rest := file.readline(longest)) and not rest.endswith(b"\n"):
                pass
            yield None


def parquet_rows(path: Path) -> Rows:
    """Read the rows of a Parquet file, each cell by itself whatever type its column has."""
    check_installed("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as parquet

    try:
        # Not read_table: of a folder it takes one type for the names of all parts.
        with parquet.ParquetFile(path) as file:
            table = file.read()
    except Exception as error:
        raise ConfigurationError(
            f"Expected a Parquet file at {path}, got: {type(error).__name__}.", kind="unreadable"
        ) from error
    names, columns = list(map(str, table.column_names)), table.columns

    def row(number: int) -> Mapping[str, Any]:
        return {name: column[number].as_py() for name, column in zip(names, columns, strict=True)}

    return Rows(table.num_rows, row, names, "row")


def _frame_rows(frame: Any) -> Rows:
    """Read the rows of a pandas DataFrame, each cell by itself whatever type its column has."""
    cells = [frame.iloc[:, i].tolist() for i in range(frame.shape[1])]
    names = list(map(str, frame.columns))
    return Rows(len(frame), lambda i: {name: column[i] for name, column in zip(names, cells, strict=True)}, names)


def _pairs(*parts: Any, kind: str = "item") -> Rows:
    """Pair inputs, labels and perhaps owners, side by side, with the records along the first axis."""
    if any(hasattr(part, "toarray") for part in parts):
        raise ConfigurationError(
            "Expected inputs as a dense array, got a sparse one: give X.toarray().", kind="wrong-type"
        )
    lengths = {_length(part) for part in parts}
    if len(lengths) != 1:
        raise ConfigurationError(
            f"Expected inputs and targets of one length, got {' and '.join(map(str, sorted(lengths)))}: {ADVICE}.",
            kind="wrong-shape",
        )
    return Rows(lengths.pop(), lambda number: tuple(_picked(part, number) for part in parts), kind=kind)


def _batches_of_one(found: Any) -> Rows:
    """Read an object that gives a batch for a slice in batches of one."""

    def row(number: int) -> tuple[Any, ...]:
        batch = found[number : number + 1]
        if not isinstance(batch, tuple):
            raise InvalidRecordError("a record that is no pair (inputs, label)")
        return tuple(_picked(part, 0) for part in batch)

    return Rows(len(found), row)


def _collated(items: Any, collate: Callable[[list[Any]], Any]) -> Rows:
    """Read the items of a data set, each handed alone to a ``DataLoader``'s own ``collate_fn``."""

    def row(number: int) -> Any:
        batch = collate([items[number]])
        return tuple(_picked(part, 0) for part in batch) if isinstance(batch, list | tuple) else _picked(batch, 0)

    return Rows(len(items), row)


def npz_rows(path: Path, *, owners: bool) -> Rows:
    """Read the rows of an ``.npz`` with arrays ``features`` and ``labels``, and ``owners`` where a schema names one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = [file[name] for name in ["features", "labels", *(["owners"] if owners else [])]]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"Expected an .npz with the arrays features, labels{' and owners' if owners else ''} at {path}, got: "
            f"{error}.",
            kind="unreadable",
        ) from error
    if any(part.ndim == 0 for part in parts):
        raise ConfigurationError(
            f"Expected arrays with a row a record in {path}, got a single number.", kind="wrong-shape"
        )
    return _pairs(*parts, kind="row")


def file_items(path: Path, schema: Schema) -> Rows:
    """Read the rows of a file, by the ending of its name: ``.csv``, ``.csv.gz``, ``.parquet`` or ``.npz``.

    Item i depends on row i of the file alone; a refusal depends on the header, or on the names and shapes of arrays.
    """
    path = Path(path).expanduser()
    check_ending(path)
    if path.suffix == ".npz":
        return npz_rows(path, owners=bool(schema.owner))
    if path.suffix in (".parquet", ".pq"):
        return parquet_rows(path)
    written: dict[str, Any] = {"header": schema.header, "row_names": schema.row_names, "encoding": schema.encoding}
    return CsvLines(path, schema.separator, **written)


def table_file(path: Path, schema: Schema) -> Rows:
    """Read the rows of a file with named columns, as :func:`file_items` does."""
    if Path(path).suffix == ".npz":
        raise ConfigurationError(
            f"Expected a table with named columns, .csv, .csv.gz or .parquet, got {path}.", kind="malformed"
        )
    return file_items(path, schema)


class Frame(Protocol):
    """The part of a pandas DataFrame by which one is recognised."""

    @property
    def iloc(self) -> object: ...

    @property
    def columns(self) -> object: ...


Table = Path | str | Frame | Sequence[Mapping[str, object]] | Rows
"""A file, a DataFrame, a list of rows, or rows that are read already."""


def table_rows(table: Any) -> Rows:
    """Read a DataFrame's rows, or those of a list of mappings; refuse another kind of object."""
    if isinstance(table, Rows):
        return table
    if hasattr(table, "iloc") and hasattr(table, "columns"):
        return _frame_rows(table)
    rows: Any = table
    listed = isinstance(table, Sequence) and not isinstance(table, str | bytes)
    if listed and rows and all(isinstance(row, Mapping) for row in rows):
        return Rows(len(rows), rows.__getitem__, list(map(str, rows[0])))
    raise ConfigurationError(
        f"Expected a file of a table, a DataFrame or a list of mappings, got {type(table).__name__}; arrays go to "
        "murmurfl.app.simulate, as a task of your own.",
        kind="wrong-type",
        setting="table",
    )


def check_ending(path: Path) -> None:
    """Refuse a file of another kind, by the ending of its name."""
    if path.suffix.lower() in (".xlsx", ".xls", ".xlsm", ".ods"):
        raise ConfigurationError(
            f"Expected a file that ends in .csv, .csv.gz, .parquet or .npz, got {path}, a workbook of spreadsheets. "
            "Save the sheet as CSV in UTF-8, or read it with pandas.read_excel and pass the DataFrame to "
            "murmurfl.fit.",
            kind="malformed",
            setting="path",
        )
    if not path.name.endswith((".csv", ".csv.gz", ".parquet", ".pq", ".npz")):
        raise ConfigurationError(
            f"Expected a file that ends in .csv, .csv.gz, .parquet or .npz, or a folder of images, got {path}.",
            kind="malformed",
        )


def check_columns(columns: Sequence[str], schema: Schema) -> None:
    """Refuse a table without a column that the schema names, or with one of them twice; the names are public."""
    if not schema.columns:
        raise ConfigurationError(
            "Expected a schema of columns for a table, got one of arrays.", kind="wrong-type", setting="schema"
        )
    for column in schema.columns.values():
        if column.is_encoded:
            _ = column.encoding  # raises before a record is read if this process has no such encoder
    named = [*schema.columns, schema.label.column, *([schema.owner] if schema.owner else [])]
    wrong = [name for name in named if list(columns).count(name) != 1]
    if wrong:
        others = [name for name in columns if name not in named]
        near = [(one, name) for name in wrong for one in difflib.get_close_matches(name, others, n=1)]
        meant = f" Rename {near[0][0]!r} if it is {near[0][1]!r}." if near else ""
        raise ConfigurationError(
            f"Expected each column of the schema once in the table, got {', '.join(wrong)} missing or twice.{meant}",
            kind="mismatch",
            setting="columns",
        )


def items_of(found: Any) -> Items:
    """Read a project's samples as items.

    Parameters
    ----------
    found : Any
        A pair or triple (inputs, labels, owners) of arrays, tensors, lists or tables; a table of pandas; a list of
        items; PyTorch's ``Dataset`` or ``DataLoader``; a ``Dataset`` of the package ``datasets``; or whatever has a
        length and gives a batch for a slice. A loader's data set is taken item by item: its sampler sees none, and its
        own ``collate_fn`` sees one at a time.
    """
    loader, dataset, iterable = _torch_kinds()
    collate = None
    if loader and isinstance(found, loader):
        found, collate = found.dataset, found.collate_fn
    if iterable and isinstance(found, iterable):
        raise ConfigurationError(
            f"Expected samples with a length, got {type(found).__name__}, an iterable: a sample's number says how "
            f"often it was used; {ADVICE}.",
            kind="wrong-type",
        )
    items = _one_by_one(found, dataset)
    if collate is not None and getattr(collate, "__module__", "").partition(".")[0] != "torch":
        items = _collated(items, collate)
    if not len(items):
        raise ConfigurationError("Expected at least one sample, got none.", kind="out-of-range")
    return items


def _one_by_one(found: Any, dataset: Any) -> Any:
    """Read samples as items, of which ``dataset`` is PyTorch's kind; refuse what has no samples."""
    if isinstance(found, tuple):
        if len(found) not in (2, 3):
            raise ConfigurationError(
                f"Expected a pair (inputs, targets), got {len(found)} parts: {ADVICE}.", kind="wrong-shape"
            )
        return _pairs(*found)
    if _is_of("pandas", "DataFrame", found):
        return _frame_rows(found)
    if isinstance(found, list) or (dataset and isinstance(found, dataset)) or _is_of("datasets", "Dataset", found):
        return found
    if isinstance(found, Mapping | str | bytes) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigurationError(f"Expected samples, got {type(found).__name__}: {ADVICE}.", kind="failed")
    return _batches_of_one(found)


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
        raise ConfigurationError(
            f"Expected inputs and targets with a first axis of one length: {ADVICE}.", kind="wrong-shape"
        )
    return lengths.pop()


def _picked(part: Any, chosen: int | slice) -> Any:
    """One record, or some, of arrays, tables and structures of them."""
    if isinstance(part, Mapping):
        return {name: _picked(one, chosen) for name, one in part.items()}
    if isinstance(part, tuple):
        return tuple(_picked(one, chosen) for one in part)
    if hasattr(part, "iloc"):  # a table or a column of pandas, whose brackets may mean names
        row = part.iloc[chosen]
        return row.tolist() if hasattr(part, "columns") else row
    return part[chosen]


logger = logging.getLogger(__name__)
_MOST_KEPT = 1 << 30
"""Bytes of converted records that are kept: of more each is read again when it is asked for."""

_MOST_REASONS = 8
_COMPARED = 8
"""Records that are read again to see whether they change."""


class Records:
    """Records of one schema, each converted by itself.

    Parameters
    ----------
    items : Items
        The records as they were handed over.
    schema : Schema
    count : int, optional
        N, a public number of records, fixed by the operator of a real client. Items behind them are left out, missing
        ones do not fit. Default as many as there are.
    prepared : callable, optional
        Converts each record's inputs, one by one.
    together : bool
        Whether batches of several are asked for, in a simulation: there a made-up record stands in for one that does
        not fit, and :attr:`fits` says which. A real client asks for one record, which then fails.
    first_read : Records, optional
        The same records as a ledger knows them, if it does so by another reading; default these.

    Notes
    -----
    **Formal guarantees.** Record i, and whether it fits, depends on item i and the schema alone. For a file that
    murmurfl reads an item is one row of it; of what was handed over it is one item, if whatever made the items treats
    each by itself. Nothing is refused because of a record.
    """

    def __init__(
        self,
        items: Items,
        schema: Schema,
        *,
        count: int | None = None,
        prepared: Callable[[Any], Any] | None = None,
        together: bool = False,
        first_read: Records | None = None,
    ) -> None:
        columns = getattr(items, "columns", None)
        if columns is not None:
            check_columns(columns, schema)
        self.schema = schema
        self.record_kind: str = getattr(items, "record_kind", "item")
        """``row`` for records of a file, ``item`` for records that were handed over."""
        self._items, self._prepared, self._together = items, prepared, together
        self._memory: dict[tuple[str, str], Any] | None = {} if together and prepared is None else None
        self.first_read: Records = self if first_read is None else first_read
        """The records as a ledger knows them."""
        self._available = len(items)
        self._length = self._available if count is None else count
        example = next(schema.made_up(1, np.random.Generator(np.random.Philox(key=1))))
        self._stand_in = self._converted(example)
        self.nbytes = self._length * _size_of(self._stand_in)
        self._kept: list[Record | None] | None = None
        self.fits: NDArray[np.bool_] = np.zeros(self._length, dtype=np.bool_)
        """Whether each record fits."""
        self.reasons: Counter[str] = Counter()
        """Number of records that do not fit, by the reason: for the operator alone."""
        kept: list[Record | None] = []
        keeps = self.nbytes <= _MOST_KEPT or together
        for number in range(self._length):
            try:
                record = self._read(number)
                self.fits[number] = True
            except InvalidRecordError as error:
                record = None
                self.reasons[str(error)] += 1
            if keeps:
                kept.append(record)
        if keeps:
            self._kept = kept
        if self._together:
            self._batch = stacked(*zip(*((r.inputs, r.label) for r in self._stood_in()), strict=True))
            self._kept = self._memory = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, chosen: slice, /) -> tuple[Any, NDArray[Any]]:
        """Read a batch of records; InvalidRecordError if one does not fit and they are not asked for together."""
        if self._together:
            inputs, labels = self._batch
            return _picked(inputs, chosen), labels[chosen]
        found = [self._record(number) for number in range(*chosen.indices(self._length))]
        return stacked([record.inputs for record in found], [record.label for record in found])

    def handed_over(self, chosen: slice) -> Iterator[Any]:
        """Yield records as they were handed over, before any schema; None for one that cannot be read."""
        for number in range(*chosen.indices(self._length)):
            try:
                yield self._item(number)
            except InvalidRecordError:
                yield None

    def by_owner(self, most: int, *, places: int | None, secret: bytes) -> OwnedSamples:
        """Group the records by owner, for clients that protect all records of an owner as one.

        At most ``most`` records of an owner are used. ``places`` is the public number of places for owners on a real
        client, None in a simulation; with ``secret`` owners are put in places (:class:`~murmurfl.privacy.Owners`).
        """
        inputs, labels = self._batch
        if not isinstance(inputs, np.ndarray):
            raise ConfigurationError(
                "Expected records of one array with owners, got several arrays.", kind="unsupported"
            )
        names = map(self._owner, range(self._length))  # one at a time: a name may be long
        if places is None:
            owners = Owners.one_each(names, most, secret=secret)
        else:
            owners = Owners.of(names, most, secret=secret, places=places)
        return OwnedSamples((inputs, labels), owners, fits=self.fits, schema=self.schema, record_kind=self.record_kind)

    def report(self) -> str:
        """Return how many of how many fit, for the operator of the client alone."""
        fitting, behind = int(self.fits.sum()), self._available - self._length
        left_out = f" Rows behind them are left out: {behind}." if behind > 0 else ""
        reasons = [f"{count} with {reason}" for reason, count in self.reasons.most_common(_MOST_REASONS)]
        others = f"; the others count as zero ({'; '.join(reasons)})" if reasons else ""
        return f"{fitting} of {self._length} records fit the schema{others}.{left_out}"

    def changes(self, again: Items | None = None) -> bool:
        """Return True if one of the first records is another when it is read again, from ``again`` or where it was.

        Random crops are, and streams; every round uses what the first reading gave.
        """
        items = self._items if again is None else again
        if len(items) != self._available:
            return True
        for number in range(min(_COMPARED, self._length)):
            try:
                with _or_invalid("read again"):
                    read = self._converted(items[number])
            except InvalidRecordError:
                if self.fits[number]:
                    return True
                continue
            if not self.fits[number] or not _alike(stacked([read.inputs], [read.label]), self[number : number + 1]):
                return True
        return False

    def log(self) -> None:
        """Write :meth:`report` into the client's own log, among the lines that depend on data."""
        logger.log(logging.INFO if self.fits.all() else logging.WARNING, "%s", self.report(), extra=OF_DATA)

    def _stood_in(self) -> list[Record]:
        return [self._stand_in if record is None else record for record in self._kept or []]

    def _record(self, number: int) -> Record:
        if self._kept is None:
            return self._read(number)
        record = self._kept[number]
        if record is None:
            raise InvalidRecordError("a record that does not fit")
        return record

    def _read(self, number: int) -> Record:
        return self._converted(self._item(number))

    def _item(self, number: int) -> Any:
        if number >= self._available:
            raise InvalidRecordError("no record there")
        with _or_invalid("read"):
            return self._items[number]

    def _converted(self, item: Any) -> Record:
        with _or_invalid("converted"):
            record = self.schema.read(item, self._memory)
            # Without the owner's name, which may be long: it is read again where records are put together by owner.
            return Record(record.inputs if self._prepared is None else self._prepared(record.inputs), record.label)

    def _owner(self, number: int) -> str:
        try:
            return self.schema.owner_of(self._item(number))
        except BaseException as error:  # a record that cannot be converted was logged when it was
            if is_interrupt(error):
                raise
            return ""


def _alike(one: Any, other: Any) -> bool:
    """Return True if two batches have the same values."""
    if isinstance(one, Mapping):
        return all(_alike(part, other[name]) for name, part in one.items())
    if isinstance(one, tuple):
        return all(map(_alike, one, other))
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@contextmanager
def _or_invalid(done: str) -> Iterator[None]:
    """Log any error, whose text may depend on data, and raise InvalidRecordError in its place."""
    try:
        yield
    except InvalidRecordError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        logger.exception("A record could not be %s; it counts as zero.", done, extra=OF_DATA)
        raise InvalidRecordError(f"a record that cannot be {done}") from None


def file_records(
    path: Path | str, schema: Schema, *, rows: int | None = None, part: int = 0, parts: int = 1
) -> tuple[Any, NDArray[Any]]:
    """Read inputs and labels of the fitting records of a file, for your own ClientApp.

    Parameters
    ----------
    path : Path
    schema : Schema
    rows : int, optional
        N, a public number: the first N rows count. Default all of them.
    part, parts : int
        Which of so many disjoint parts: row i is in part i modulo ``parts``, for clients that use one part in a
        release (``releases_per_pass`` of :class:`~murmurfl.clients.UpdatePolicy`; the request says which one).

    Notes
    -----
    What a row becomes, and in which part it is, depends on that row and its number alone.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from murmurfl.clients import Column, Label, Schema
    >>> age = Column(kind="integer", bounds=(0, 100))
    >>> schema = Schema(label=Label(column="ill", classes=("no", "yes")), columns={"age": age})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/patients.csv"
    ...     np.savetxt(path, [["age", "ill"], ["0", "no"], ["100", "yes"], ["old", "no"]], fmt="%s", delimiter=",")
    ...     inputs, labels = file_records(path, schema)  # the last row does not fit
    >>> inputs.tolist(), labels.tolist()
    ([[-1.0], [1.0]], [0, 1])
    """
    found = Records(file_items(Path(path), schema), schema, count=rows)
    found.log()
    read = [found._record(number) for number in range(part, len(found), parts) if found.fits[number]]
    inputs, labels = stacked(*zip(*((one.inputs, one.label) for one in [*read, found._stand_in]), strict=True))
    return _picked(inputs, slice(0, len(read))), labels[: len(read)]


def _size_of(record: Record) -> int:
    inputs = record.inputs
    parts = list(inputs.values()) if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else [inputs]
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in [*parts, record.label])


_MOST_VALUES = 1 << 22
"""Values of gradients of single samples that are in memory together."""


class OwnedSamples:
    """A client's samples by owner: row i is everything that is used of owner i's.

    Its length is the number of places for owners, which is public; how many rows there are is not.

    Parameters
    ----------
    arrays : sequence of ndarray
        Arrays such as features and labels, with the samples along the first axis.
    owners : Owners
        Which of these rows are whose (:meth:`~murmurfl.privacy.Owners.of`).
    fits : ndarray of shape (rows,), bool, optional
        Which rows the model can use. The others are among the first j of their owner all the same, and count as zero in
        the owner's mean.
    schema : Schema, optional
        The schema of the records.

    Notes
    -----
    **Formal guarantees.** For two files with the same set of owners' names, of which one owner's rows are any others
    anywhere in the file, one row differs. One record under another owner's name moves two rows. A row depends on one
    owner's samples alone, and has the shape of every other.
    Proof: docs/proofs/owners.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import Owners
    >>> owners = Owners.of(["ann", "bob", "ann"], most=2, secret=bytes(32))
    >>> samples = OwnedSamples([np.eye(3), np.arange(3)], owners)
    >>> features, labels, present = samples[0:2]
    >>> len(samples), features.shape, sorted(present.sum(axis=1).tolist())
    (2, (2, 2, 3), [1, 2])
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        owners: Owners,
        fits: NDArray[np.bool_] | None = None,
        *,
        schema: Schema | None = None,
        record_kind: str = "",
    ) -> None:
        needed = int(owners.rows.max()) + 1 if len(owners.rows) else 0
        given = [*arrays, *([] if fits is None else [fits])]
        if not arrays or any(len(array) < needed for array in given):
            raise ConfigurationError(
                f"Expected arrays of at least {needed} rows, got {[np.shape(array) for array in given]}.",
                kind="out-of-range",
                setting="arrays",
            )
        self.schema, self.record_kind = schema, record_kind
        self._arrays = tuple(arrays)
        self._fits = None if fits is None else np.asarray(fits, dtype=bool)
        self.owners = owners

    @property
    def samples_per_owner(self) -> int:
        """Largest number of samples of an owner that are used."""
        return self.owners.most

    def __len__(self) -> int:
        return self.owners.num_places

    def __getitem__(self, owners: slice, /) -> tuple[NDArray[Any], ...]:
        """Return some owners' samples, shape (owners, most, ...), and which count: no repetitions (owners, most)."""
        rows, present = self.owners.padded_rows(owners)
        if self._fits is not None:
            present = present & self._fits[rows]
        return (*(array[rows] for array in self._arrays), present)


class OwnerGradients:
    """One row an owner: the mean of the gradients of that owner's samples, before it is clipped; zero without any.

    It takes the place of a model's :class:`~murmurfl.clients.PerSampleGradients` where a client's samples are
    :class:`OwnedSamples`. An owner of few samples counts as much as one of many. With ``one_by_one`` each sample's
    gradient is computed by itself: on a real client, for a model that might remember others.

    Notes
    -----
    **Formal guarantees.** Row i depends on owner i's samples alone if a row of ``gradients`` depends on its sample
    alone; the client clips it, whatever it is. As many gradients are computed for an owner of one sample as for one of
    the most, so the shapes of a computation tell nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import OwnedSamples
    >>> from murmurfl.privacy import Owners
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return samples[0] - parameters[0]
    >>> owners = Owners.of(["ann", "ann", "ann"], most=2, secret=bytes(32))
    >>> samples = OwnedSamples([np.array([[1.0], [3.0], [8.0]])], owners)
    >>> OwnerGradients(Mean())([np.zeros(1)], samples[0:1]).tolist()  # the first two rows of the only owner
    [[2.0]]
    """

    def __init__(self, gradients: PerSampleGradients, *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self.shapes = [tuple(shape) for shape in gradients.shapes]
        self._size = sum(map(math.prod, self.shapes))
        self.wrapped = gradients

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        """Means of gradients at ``parameters``, shape (owners, d)."""
        *parts, present = samples
        owners, most = present.shape
        together = max(_MOST_VALUES // (most * self._size), 1)
        made = np.zeros((owners, self._size))
        for start in range(0, owners, together):
            chosen = slice(start, start + together)
            self._add(made[chosen], parameters, [part[chosen] for part in parts], present[chosen])
        made /= np.maximum(present.sum(axis=1), 1)[:, None]
        return made

    def _add(
        self,
        total: NDArray[np.float64],
        parameters: Sequence[NDArray[Any]],
        parts: Sequence[NDArray[Any]],
        present: NDArray[np.bool_],
    ) -> None:
        """Add the gradients of some owners' samples to a row for each."""
        owners, most = present.shape
        flat = tuple(part.reshape(owners * most, *part.shape[2:]) for part in parts)
        if self._one_by_one:
            each = [tuple(part[i : i + 1] for part in flat) for i in range(owners * most)]
            rows = np.concatenate([np.asarray(self.wrapped(parameters, one)) for one in each])
        else:
            rows = np.asarray(self.wrapped(parameters, flat))
        if rows.shape != (owners * most, self._size):
            raise ConfigurationError(
                f"Expected gradients of shape {(owners * most, self._size)}, got {rows.shape}.", kind="wrong-shape"
            )
        rows = rows.reshape(owners, most, self._size)
        for number in range(most):  # one after the other, so that a row is the same whoever stands beside it
            chosen = present[:, number]
            total[chosen] += rows[chosen, number]
