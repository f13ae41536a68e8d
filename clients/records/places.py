"""The places of records for private statistics: where the cells of a record lie in the columns of a table.

What is released and what it costs stands in :mod:`murmurfl.privacy.queries.statistics`. A record's places are read
from its cells as they were handed over, not from what a model is given: a missing value is counted as one, whatever
value the schema has in its place, and a cell that does not fit costs the record no other column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import ConfigurationError, InvalidRecordError, is_interrupt
from ...privacy.queries.knots import KNOTS, FineColumn, KnotRows, LogColumn
from ...privacy.queries.statistics import CountedColumn, StatisticsRows
from .client_records import Records
from .schema import OTHER, Column, Label, Schema, number_in, text_of


def statistics_columns(schema: Schema) -> tuple[CountedColumn, ...]:
    """Return the columns of a table that can be counted, the label last, with their public places.

    A label without classes or bounds is left out, and so are texts and images.

    Examples
    --------
    >>> from murmurfl.clients import Column, Label, Schema
    >>> age = Column(kind="integer", bounds=(0, 120))
    >>> schema = Schema(label=Label(column="ill", classes=("no", "yes")), columns={"age": age})
    >>> [column.name for column in statistics_columns(schema)]
    ['age', 'ill']
    """
    if not schema.columns:
        raise ConfigurationError(
            "Expected a schema of a table's columns for statistics, got one of arrays.",
            kind="wrong-type",
            setting="schema",
        )
    if schema.owner:
        raise ConfigurationError(
            f"Expected a schema without an owner for statistics, got owner = {schema.owner!r}: statistics protect "
            "single records, and not all of a person's.",
            kind="conflict",
            setting="schema",
        )
    return tuple(column for column, _ in _counted(schema))


def _counted(schema: Schema) -> list[tuple[CountedColumn, Column | Label]]:
    found: list[tuple[CountedColumn, Column | Label]] = [
        (_counted_column(name, column), column) for name, column in schema.columns.items() if not column.is_encoded
    ]
    label = schema.label
    if label.names:
        return [*found, (CountedColumn(label.column, values=label.names), label)]
    if label.bounds is not None:
        return [*found, (CountedColumn(label.column, label.bounds, label.kind == "integer"), label)]
    return found


def _counted_column(name: str, column: Column) -> CountedColumn:
    if column.kind == "category":
        return CountedColumn(name, values=(*column.values, OTHER))
    if column.kind == "yes/no":
        return CountedColumn(name, values=("no", "yes"))
    return CountedColumn(name, column.bounds, column.kind == "integer")


def additive_rows(schema: Schema, knots: int = KNOTS, rank_share: float = 0.0) -> KnotRows:
    """Return the query of the knots of a table, for an additive model; with the schema's knots if it has some.

    Notes
    -----
    **Formal guarantees.** The row of a record, and its features, depend on that record and the schema alone, and on
    the knots that a server sent.

    Examples
    --------
    >>> from murmurfl.clients import Column, Label, Schema
    >>> age = Column(kind="integer", bounds=(0, 120))
    >>> schema = Schema(label=Label(column="ill", classes=("no", "yes")), columns={"age": age})
    >>> additive_rows(schema, knots=4).num_features
    6
    """
    if not schema.columns:
        raise ConfigurationError(
            "Expected a schema of a table's columns for an additive model, got one of arrays.",
            kind="wrong-type",
            setting="schema",
        )
    columns = tuple(_counted_column(name, column) for name, column in schema.columns.items())
    label = CountedColumn(schema.label.column, schema.label.bounds) if schema.num_classes == 1 else None
    if schema.knots:
        count = next(len(column.knots) for column in schema.columns.values() if column.knots)
        if knots not in (KNOTS, count):
            raise ConfigurationError(
                f"Expected as many knots as the schema has of each number, {count}, got {knots}: leave model.knots "
                "out.",
                kind="conflict",
                setting="model.knots",
                got=knots,
            )
        knots = count
    return KnotRows(columns, knots, rank_share, label, given=schema.knots)


def open_columns(schema: Schema) -> dict[str, CountedColumn]:
    """Return the numbers of a declared schema whose bounds are open, the label last, on a grid that needs none."""
    whole = {name: column.kind == "integer" for name, column in schema.columns.items() if "bounds" in column.released}
    label = {schema.label.column: schema.label.kind == "integer"} if schema.label.released else {}
    return {name: LogColumn.widest(name, whole=one) for name, one in {**whole, **label}.items()}


def knot_columns(schema: Schema) -> dict[str, CountedColumn]:
    """Return all numbers of a schema on the grids that knots are read from, the label of a regression last."""
    numbers: dict[str, Column | Label] = {
        name: column for name, column in schema.columns.items() if column.bounds is not None
    }
    if schema.num_classes == 1:
        numbers[schema.label.column] = schema.label
    return {name: FineColumn(name, one.bounds, one.kind == "integer") for name, one in numbers.items()}


class RecordPlaces:
    """The places of records of a schema: one number a column, NaN where a cell is missing or does not fit.

    ``numbers`` are columns to be counted in the place of all, on grids of their own, by the names of the schema's.

    Notes
    -----
    **Formal guarantees.** The places of a record depend on that record and the schema alone. None is refused: a record
    that cannot be read has no place in any column.
    """

    def __init__(self, schema: Schema, numbers: Mapping[str, CountedColumn] | None = None) -> None:
        counted = statistics_columns(schema)
        kinds = [kind for _, kind in _counted(schema)]
        place = {name: number for number, name in enumerate([*schema.columns, schema.label.column])}
        known = {one.name: (place[one.name], one, kind) for one, kind in zip(counted, kinds, strict=True)}
        if numbers is not None:
            known = {name: (known[name][0], column, known[name][2]) for name, column in numbers.items()}
        self.columns = tuple(column for _, column, _ in known.values())
        self._schema, self._parts = schema, tuple(known.values())

    def of(self, item: Any) -> NDArray[np.float64]:
        """Return the places of one record as it was handed over, shape (d,)."""
        try:
            cells = self._schema.cells(item)  # the label's last, which has no column without bounds
            return np.array([_place(column, kind, cells[place]) for place, column, kind in self._parts])
        except BaseException as error:
            if is_interrupt(error):
                raise
            return np.full(len(self.columns), np.nan)

    def batch(self, samples: Any, chosen: slice) -> NDArray[np.float64]:
        """Return the places of a slice of records, or of samples that are places already, shape (records, d)."""
        if isinstance(samples, Records):
            return np.array([self.of(item) for item in samples.handed_over(chosen)]).reshape(-1, len(self.columns))
        return np.asarray(samples[chosen], dtype=np.float64)


def _place(column: CountedColumn, kind: Column | Label, cell: Any) -> float:
    """Return the place of a cell in a column; NaN if it has none."""
    try:
        if column.values:
            return _of_values(column, kind, cell)
        if kind.is_missing(cell):
            return math.nan
        return column.place(number_in(cell, kind, integer=column.whole))
    except InvalidRecordError:
        return math.nan


def _of_values(column: CountedColumn, kind: Column | Label, cell: Any) -> float:
    if isinstance(kind, Label):
        return float(kind.encode(cell))
    if kind.kind == "yes/no":
        value = kind.value_of(cell)
        return math.nan if value is None else float(value > 0)
    text = text_of(cell)
    if text in column.values:
        return float(column.values.index(text))
    return math.nan if kind.is_missing(cell) else float(len(column.values) - 1)


class TableRows:
    """The rows of private statistics, in the place of a model's :class:`~murmurfl.clients.PerSampleGradients`.

    Notes
    -----
    **Formal guarantees.** Row i depends on record i and the schema alone.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.clients import Column, Label, Schema
    >>> smoker = Column(kind="category", values=("no", "yes"))
    >>> rows = TableRows(Schema(label=Label(column="ill", classes=("no", "yes")), columns={"smoker": smoker}))
    >>> places = np.array([rows.places.of({"smoker": "yes", "ill": "no"})])
    >>> places.tolist(), rows((), places).shape == (1, rows.rows.width)
    ([[1.0, 0.0]], True)
    """

    def __init__(self, schema: Schema, places: RecordPlaces | None = None, last_share: float = 0.0) -> None:
        self.schema = schema
        self.places = RecordPlaces(schema) if places is None else places
        self.rows = StatisticsRows(self.places.columns, last_share=last_share)
        self.shapes: list[tuple[int, ...]] = [(self.rows.width,)]

    def __call__(self, parameters: Any, samples: Any) -> NDArray[np.float64]:
        """Return the rows of records with these places."""
        return self.rows.rows(samples)
