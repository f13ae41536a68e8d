"""A machine's records: items read one by one by a schema, of a number that is public."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ...privacy.errors import OF_DATA, MisfitError, is_interrupt
from ...privacy.machine.known_samples import Owners
from .owner_rows import OwnedSamples
from .schema import Record, Schema, stacked
from .sources import Items, check_columns, file_items

logger = logging.getLogger(__name__)

_MOST_KEPT = 1 << 30
"""Bytes of converted records that are kept: of more each is read again when it is asked for."""
_MOST_REASONS = 8


class Records:
    """Records of one schema, each converted by itself.

    Parameters
    ----------
    items : Items
        The records as they were handed over.
    schema : Schema
    count : int, optional
        N, a public number of records, fixed by the operator of a real machine. Items behind them are left out, missing
        ones do not fit. Default as many as there are.
    prepared : callable, optional
        Converts each record's inputs, one by one.
    together : bool
        Whether batches of several are asked for, in a simulation: there a made-up record stands in for one that does
        not fit, and :attr:`fits` says which. A real machine asks for one record, which then fails.

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
    ) -> None:
        columns = getattr(items, "columns", None)
        if columns is not None:
            check_columns(columns, schema)
        self.schema = schema
        self.record_kind: str = getattr(items, "record_kind", "item")
        """``row`` for records of a file, ``item`` for records that were handed over."""
        self._items, self._prepared, self._together = items, prepared, together
        self._available = len(items)
        self._length = self._available if count is None else count
        example = next(schema.made_up(1, np.random.Generator(np.random.Philox(key=1))))
        self._stand_in = self._converted(example)
        self.nbytes = self._length * _size_of(self._stand_in)
        self._kept: list[Record | None] | None = None
        self.fits: NDArray[np.bool_] = np.zeros(self._length, dtype=np.bool_)
        """Which records fit."""
        self.reasons: Counter[str] = Counter()
        """How many do not, by the reason: for the operator alone."""
        kept: list[Record | None] = []
        keeps = self.nbytes <= _MOST_KEPT or together
        for number in range(self._length):
            try:
                record = self._read(number)
                self.fits[number] = True
            except MisfitError as error:
                record = None
                self.reasons[str(error)] += 1
            if keeps:
                kept.append(record)
        if keeps:
            self._kept = kept
        if self._together:
            self._batch = stacked(*zip(*((r.inputs, r.label) for r in self._stood_in()), strict=True))
            self._kept = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, chosen: slice, /) -> tuple[Any, NDArray[Any]]:
        """A batch of records; MisfitError if one does not fit and they are not asked for together."""
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
            except MisfitError:
                yield None

    def by_owner(self, most: int, *, places: int | None, secret: bytes) -> OwnedSamples:
        """The records by owner, for machines that protect all records of an owner as one.

        At most ``most`` records of an owner are used. ``places`` is the public number of places for owners on a real
        machine, None in a simulation; with ``secret`` owners are put in places (:class:`~murmurfl.privacy.Owners`).
        """
        inputs, labels = self._batch
        if not isinstance(inputs, np.ndarray):
            raise ConfigurationError("Expected records of one array with owners, got several arrays.")
        names = [self._owner(number) for number in range(self._length)]
        if places is None:
            owners = Owners.one_each(names, most, secret=secret)
        else:
            owners = Owners.of(names, most, secret=secret, places=places)
        return OwnedSamples((inputs, labels), owners, fits=self.fits, schema=self.schema, record_kind=self.record_kind)

    def report(self) -> str:
        """How many of how many fit, for the operator of the machine alone."""
        fitting, behind = int(self.fits.sum()), self._available - self._length
        left_out = f" Rows behind them are left out: {behind}." if behind > 0 else ""
        reasons = [f"{count} with {reason}" for reason, count in self.reasons.most_common(_MOST_REASONS)]
        others = f"; the others count as zero ({'; '.join(reasons)})" if reasons else ""
        return f"{fitting} of {self._length} records fit the schema{others}.{left_out}"

    def log(self) -> None:
        """Write :meth:`report` into the machine's own log, among the lines that depend on data."""
        logger.log(logging.INFO if self.fits.all() else logging.WARNING, "%s", self.report(), extra=OF_DATA)

    def _stood_in(self) -> list[Record]:
        return [self._stand_in if record is None else record for record in self._kept or []]

    def _record(self, number: int) -> Record:
        if self._kept is None:
            return self._read(number)
        record = self._kept[number]
        if record is None:
            raise MisfitError("a record that does not fit")
        return record

    def _read(self, number: int) -> Record:
        return self._converted(self._item(number))

    def _item(self, number: int) -> Any:
        if number >= self._available:
            raise MisfitError("no record there")
        with _or_misfit("read"):
            return self._items[number]

    def _converted(self, item: Any) -> Record:
        with _or_misfit("converted"):
            record = self.schema.read(item)
            if self._prepared is None:
                return record
            return Record(self._prepared(record.inputs), record.label, record.owner)

    def _owner(self, number: int) -> str:
        try:
            return self.schema.owner_of(self._item(number))
        except BaseException as error:  # a record that cannot be converted was logged when it was
            if is_interrupt(error):
                raise
            return ""


@contextmanager
def _or_misfit(done: str) -> Iterator[None]:
    """Log any error, whose text may depend on data, and raise a misfit in its place."""
    try:
        yield
    except MisfitError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        logger.exception("A record could not be %s; it counts as zero.", done, extra=OF_DATA)
        raise MisfitError(f"a record that cannot be {done}") from None


def file_records(
    path: Path | str, schema: Schema, *, rows: int | None = None, part: int = 0, parts: int = 1
) -> tuple[Any, NDArray[Any]]:
    """Inputs and labels of the fitting records of a file, for your own ClientApp.

    Parameters
    ----------
    path : Path
    schema : Schema
    rows : int, optional
        N, a public number: the first N rows count. Default all of them.
    part, parts : int
        Which of so many disjoint parts: row i is in part i modulo ``parts``, for machines that use one part in a
        release (``releases_per_pass`` of :class:`~murmurfl.clients.UpdatePolicy`; the request says which one).

    Notes
    -----
    What a row becomes, and in which part it is, depends on that row and its number alone.
    """
    found = Records(file_items(Path(path), schema), schema, count=rows)
    found.log()
    read = [found._record(number) for number in range(part, len(found), parts) if found.fits[number]]
    inputs, labels = stacked(*zip(*((one.inputs, one.label) for one in [*read, found._stand_in]), strict=True))
    return _picked(inputs, slice(0, len(read))), labels[: len(read)]


def _picked(inputs: Any, chosen: slice) -> Any:
    if isinstance(inputs, dict):
        return {name: part[chosen] for name, part in inputs.items()}
    return tuple(part[chosen] for part in inputs) if isinstance(inputs, tuple) else inputs[chosen]


def _size_of(record: Record) -> int:
    inputs = record.inputs
    parts = list(inputs.values()) if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else [inputs]
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in [*parts, record.label])
