"""A declared schema completed by releases with noise: bounds, categories, fills and knots, paid from a ledger.

A person declares which columns there are, what kind each is, its unit and its codes for missing values, without looking
at the rows. Up to three releases give the rest. One names the frequent values of categories whose values are open. One
counts the numbers whose bounds are open on a grid of all magnitudes. The last counts all numbers between their bounds
and gives knots and medians. All are sessions of the table's ledger with names of their own, so that each is paid for
once, and every later fit counts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.messages import Request
from ...clients.one_shot_client import StatisticsClient
from ...clients.records.places import RecordPlaces, TableRows, knot_columns, open_columns
from ...clients.records.schema import NONE_NAMED, OTHER, Bounds, Column, Schema, text_of
from ...privacy.accounting.gdp import gdp_mu
from ...privacy.accounting.guarantee import added_words, rounded_up
from ...privacy.accounting.loss import Gaussian, Loss
from ...privacy.errors import ConfigurationError, InvalidRecordError
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.queries.knots import KNOTS, knots_of, scale_of, share_of_label
from ...privacy.queries.query import QuerySum, divided_mu, query_policy
from ...privacy.queries.statistics import (
    HIDDEN_BELOW,
    ColumnStatistics,
    CountedColumn,
    StatisticsRows,
    TableStatistics,
    statistics_policy,
)
from ...privacy.release.known_samples import row_bytes
from ...privacy.release.named_values import NamedValues, value_threshold
from ..data.table_task import ReadTable
from .fitting import ledger_of
from .real_fit import (
    SCHEMA_SESSION,
    Dealt,
    Places,
    RowCells,
    check_room,
    check_unchanged,
    data_text,
    known_ledger,
    knows_cells,
    left_words,
    order_on,
)
from .sealed import Seal, run_sealed

VALUES_SHARE, BOUNDS_SHARE = 0.4, 0.3
"""Shares of mu^2 for the names of categories and, of what they leave, for open bounds; the rest is for knots."""
ADDED_SHARE = 0.1
"""Share of delta that is the probability of naming a value of a single record."""
_VALUES, _BOUNDS, _KNOTS = (f"{SCHEMA_SESSION}{of}" for of in ("values", "bounds", "knots"))
_SESSIONS = _VALUES, _BOUNDS, _KNOTS
_LONGEST_NAME = 200
"""Characters of a value that may be named; longer ones count as other."""
_DIGITS, _KNOT_DIGITS = 4, 6
_OUTERMOST, _FARTHEST_ORDER = 0.005, 0.25
"""Share of the values that open bounds leave out at each end, and the order up to which noise may hide quantiles."""
_SURELY, _LITTLE_NOISE = 3.0, 1e-3
"""Standard deviations of the noise in a share of the values that no share in a long empty tail is likely to exceed, and
noise that hides no record, for a factor from noise to such a deviation."""
_TYPICAL, _FREQUENT, _ALMOST_CERTAINLY = 0.75, 0.25, 3.5
"""Share of its cells in which a typical column has a value, share of the rows with the most frequent value of a typical
category, and standard deviations of noise in a count for which there is room where neither is likely to be hidden."""


@dataclass(frozen=True)
class PaidSchema:
    """A completed schema, and what it cost.

    Notes
    -----
    **Formal guarantees.** ``schema`` is post-processing of releases that the ledger has recorded, and of what was
    declared.
    """

    schema: Schema
    hidden: tuple[str, ...]
    """Columns of which the noise hides everything."""
    again: bool
    """Whether it was paid for by an earlier call, so that this one spent nothing."""
    loss: Loss
    """Loss of its releases together."""
    spent: Loss
    """Loss of everything that calls with this ledger have released on these rows so far."""
    budget_mu: float
    delta: float
    ledger: Path

    @property
    def sentences(self) -> list[str]:
        """Lines for people on what it cost, and on what noise hides."""
        losses, hidden = (self.loss, self.spent, Loss.of(self.budget_mu)), ", ".join(map(repr, self.hidden))
        costs, spent, budget = (rounded_up(one.assumed.epsilon(self.delta)) for one in losses)
        first = "was paid for by an earlier call, and this one spent nothing" if self.again else "is paid for"
        lines = [
            f"The schema {first}: epsilon = {costs} at delta = {self.delta:g}"
            f"{added_words(self.loss.assumed).replace(' with', ', with')}. All calls with the ledger "
            f"{self.ledger.name} have spent epsilon = {spent} of {budget}. "
            f"{left_words(Loss.of(self.budget_mu).left_of(self.spent, self.delta), self.delta)}"
        ]
        if self.hidden:
            lines.append(f"The noise hides {hidden}: leave them out of a fit, or declare bounds or values.")
        return lines


def paid_schema(
    table: Path | str,
    declared: Path | str,
    *,
    epsilon: float,
    delta: float = 1e-5,
    ledger: Path | str | None = None,
    budget: float = 0.0,
    private_log: Path | str | None = None,
) -> PaidSchema:
    """Complete a declared schema by releases with noise, which a table's ledger pays for once.

    Parameters
    ----------
    table : path
        ``.csv``, ``.csv.gz`` or ``.parquet``.
    declared : path
        A schema in TOML, reviewed, whose numbers may lack ``bounds`` and ``missing``, and whose categories may lack
        ``values``.
    epsilon : float
        Of all its releases together, at ``delta``.
    delta : float
        For a new ledger; one that is there has its own.
    ledger : path, optional
        The ledger's file; default the table's with ``.ledger`` behind it. Made if it is not there.
    budget : float
        For a new ledger: epsilon of everything that is ever released of these rows; default ``epsilon``.
    private_log : path, optional
        As for :func:`~.fitting.fit`.

    Raises
    ------
    ConfigurationError, LedgerError
        Before a row was read: if schema, header or ledger cannot be, or an earlier call was paid and interrupted.
    SealedError
        For any failure after that, with a fixed text.

    Notes
    -----
    **Formal guarantees.** What is returned is (epsilon, delta)-DP for replacement of one row of the table: all releases
    together, of which the last is about bounds that the one before it chose. They are mu-GDP, but for an added delta
    where values are named, a tenth of delta. The ledger counts both, and has all releases before anything is returned.
    It rests on this computer, on a declared schema that does not come from these rows, and on the number of rows being
    public. Nothing else that depends on a row leaves (:func:`~.sealed.run_sealed`).
    Proof: docs/proofs/sensitivities.md.
    """
    schema = Schema.read_declared(Path(declared))
    return run_sealed(
        partial(_completed, Path(table).expanduser(), schema, epsilon, delta, ledger, budget),
        None if private_log is None else Path(private_log),
    )


def _completed(
    table: Path, schema: Schema, epsilon: float, delta: float, ledger: Path | str | None, budget: float, seal: Seal
) -> PaidSchema:
    found = ReadTable.of(table, schema=schema)
    count = _checked(found, epsilon)
    path = ledger_of(table, ledger)
    if path.exists():
        kept = SQLiteLedger(path)
        delta = float(kept.delta or delta)
        if (stored := _stored(kept, schema)) is not None:
            return _paid(stored, kept, delta, hidden=(), again=True)
    prices = _Prices.of(schema, epsilon, delta)
    prices.check_plans(schema, count)
    prices.check_useful(schema, count, epsilon, delta)
    kept = _opened(path, epsilon, budget, delta, found.name, count)
    check_room(kept, prices.mu, float(kept.budget_mu or 0.0), delta, prices.added_delta)
    order = order_on(kept, found.name, count)
    seal.begin_rows()
    made, hidden = _released(_Releases(found, schema, order, kept, delta, seal), schema, prices)
    made = made.changed(seal=kept.seal_of(made.sealed_text()))
    _store(kept, made)
    return _paid(made, kept, delta, hidden=hidden, again=False)


def _paid(schema: Schema, ledger: SQLiteLedger, delta: float, *, hidden: tuple[str, ...], again: bool) -> PaidSchema:
    with ledger.exclusive() as page:
        account = page.account()
    others = replace(account, reserved={name: mu for name, mu in account.reserved.items() if name in _SESSIONS})
    return PaidSchema(
        schema, hidden, again, others.spent, account.spent, float(ledger.budget_mu or 0.0), delta, ledger.path
    )


@dataclass(frozen=True)
class _Prices:
    """Mu of each release, 0 for one that is not made, and the added delta of the one that names values."""

    values: float
    bounds: float
    knots: float
    added_delta: float

    @classmethod
    def of(cls, schema: Schema, epsilon: float, delta: float) -> _Prices:
        """Return prices that are together (epsilon, delta)-DP."""
        added = ADDED_SHARE * delta if open_values(schema) else 0.0
        mu = gdp_mu(epsilon, math.nextafter(delta - added, 0.0) if added else delta)
        values = bounds = 0.0
        if added and not knot_columns(schema):
            return cls(mu, 0.0, 0.0, added)
        if added:
            values, mu = divided_mu(mu, VALUES_SHARE)
        if open_columns(schema):
            bounds, mu = divided_mu(mu, BOUNDS_SHARE)
        return cls(values, bounds, mu, added)

    @property
    def mu(self) -> float:
        """Mu of all of them together."""
        return math.hypot(self.values, self.bounds, self.knots)

    def check_plans(self, schema: Schema, count: int) -> None:
        """Raise if columns are too many or the noise cannot serve a mu, before a ledger is made."""
        plans = [
            statistics_policy(mu, noise_quality="exact").plan(StatisticsRows(tuple(columns.values())).width)
            for mu, columns in ((self.bounds, open_columns(schema)), (self.knots, knot_columns(schema)))
            if mu
        ]
        if self.values:
            texts = len(open_values(schema))
            policy = query_policy(math.sqrt(texts), "nonnegative", self.values, noise_quality="exact")
            plans.append(policy.plan(texts * count))
        if problem := next((plan.problem for plan in plans if plan.problem), ""):
            raise ConfigurationError(problem, kind="out-of-range", setting="epsilon")

    def check_useful(self, schema: Schema, count: int, epsilon: float, delta: float) -> None:
        """Raise if noise is likely to hide a typical column; it follows from public numbers alone."""
        short = max(self._short_of_bounds(schema, count), self._short_of_knots(schema, count))
        short = max(short, self._short_of_names(schema, count))
        if short > 1.0:
            enough = Gaussian(self.mu * short, self.added_delta).epsilon(delta)
            raise ConfigurationError(
                f"Expected an epsilon at which noise hides no typical column of {count:,} rows, got {epsilon:g}: "
                f"epsilon = {rounded_up(enough)} is enough. Raise it, or declare bounds and values, which is free.",
                kind="out-of-range",
                setting="epsilon",
                got=epsilon,
            )

    def _short_of_bounds(self, schema: Schema, count: int) -> float:
        """Return by which factor mu is too small for the bounds of a typical column."""
        if not self.bounds:
            return 0.0
        query = StatisticsRows(tuple(open_columns(schema).values()))
        one = StatisticsRows(query.columns[:1])
        of_all = one.read(QuerySum(one.rows(np.zeros((1, 1)))[0], 1, 1, _LITTLE_NOISE)).columns[0]
        needed = _SURELY * of_all.share_std / _LITTLE_NOISE / _FARTHEST_ORDER + _ALMOST_CERTAINLY
        return needed * _count_std(query, self.bounds) / (_TYPICAL * count)

    def _short_of_knots(self, schema: Schema, count: int) -> float:
        """Return by which factor mu is too small for the knots of a typical column."""
        if not self.knots:
            return 0.0
        columns = tuple(knot_columns(schema).values())
        query = StatisticsRows(columns, share_of_label(len(columns)) if schema.num_classes == 1 else 0.0)
        return (HIDDEN_BELOW + _ALMOST_CERTAINLY) * _count_std(query, self.knots) / (_TYPICAL * count)

    def _short_of_names(self, schema: Schema, count: int) -> float:
        """Return by which factor mu is too small for the most frequent value of a typical category."""
        if not self.values:
            return 0.0
        texts = len(open_values(schema))
        policy = query_policy(math.sqrt(texts), "nonnegative", self.values, noise_quality="exact")
        plan = policy.plan(texts * count)
        threshold = value_threshold(plan.noise_std, plan.grid.spacing, texts, self.added_delta)
        return (threshold + _ALMOST_CERTAINLY * plan.noise_std) / (_FREQUENT * count)


def _count_std(query: StatisticsRows, mu: float) -> float:
    """Return the largest standard deviation of noise in the number of records of a column that have a value."""
    plan = statistics_policy(mu, noise_quality="exact").plan(query.width)
    return plan.noise_std / min(query.weights)


def open_values(schema: Schema) -> list[str]:
    """Return the categories of a declared schema whose values are open."""
    return [name for name, column in schema.columns.items() if "values" in column.released]


def _checked(found: ReadTable, epsilon: float) -> int:
    """Return the public number of rows; raise if there is nothing to pay for, or persons would have to be protected."""
    schema = found.schema
    if not schema.reviewed:
        raise ConfigurationError(
            "Expected a declared schema with reviewed = true, got one that no person has reviewed: see that nothing in "
            "it comes from the rows, and set reviewed = true.",
            kind="missing",
            setting="reviewed",
        )
    if schema.owner:
        raise ConfigurationError(
            f"Expected a schema without an owner, got owner = {schema.owner!r}: these releases protect single rows, "
            "and not all of a person's. Declare bounds and categories of such a table.",
            kind="conflict",
            setting="owner",
        )
    if schema.norm is not None:
        raise ConfigurationError(
            f"Expected a declared schema without norm, which is of scaled numbers, got {schema.norm}.",
            kind="conflict",
            setting="norm",
        )
    if not schema.columns or not (knot_columns(schema) or open_values(schema)):
        raise ConfigurationError(
            "Expected a table with a number, or a category without values, got none: there is nothing to release.",
            kind="missing",
            setting="schema",
        )
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigurationError(
            f"Expected epsilon > 0 and finite, got {epsilon!r}.", kind="out-of-range", setting="epsilon", got=epsilon
        )
    if not (count := found.rows.public_count):
        raise ConfigurationError(
            f"Expected rows in {found.name} that end with a line break, got none.", kind="malformed"
        )
    return count


def _opened(path: Path, epsilon: float, budget: float, delta: float, name: str, count: int) -> SQLiteLedger:
    """Return the table's ledger, a new one with its budget if there is none."""
    if (kept := known_ledger(path, budget)) is not None:
        return kept
    if budget and budget < epsilon:
        raise ConfigurationError(
            f"Expected a budget that covers this call's epsilon, got {budget:g}: raise it, or leave it out.",
            kind="out-of-range",
            setting="budget",
            got=budget,
        )
    whole = gdp_mu(budget or epsilon, delta)
    return SQLiteLedger.create(path, budget_mu=whole, delta=delta, data=data_text(name, [count]))


def _stored(ledger: SQLiteLedger, declared: Schema) -> Schema | None:
    """Return the schema that an earlier call has paid for and stored; None if nothing was paid for yet."""
    with ledger.exclusive() as page:
        streams = [stream for name in _SESSIONS if (stream := page.stream(name)) is not None]
    if not streams:
        return None
    notes = [stream.noted for stream in streams if stream.noted]
    if not notes:
        raise ConfigurationError(
            f"Expected a ledger without a schema that was paid for and lost, got {ledger.path}: a call was interrupted "
            "after it was booked. It stays booked and is not paid for again: declare what is open, and fit with that.",
            kind="exhausted",
            setting="ledger",
        )
    stored = Schema.read_text(notes[-1][0].tobytes().decode(), str(ledger.path))
    if stored.declared().sealed_text() != declared.sealed_text():
        raise ConfigurationError(
            f"Expected the declared schema that the ledger {ledger.path} has paid for, got another: a table's "
            "schema is paid for once.",
            kind="mismatch",
            setting="schema",
        )
    return stored


def _store(ledger: SQLiteLedger, schema: Schema) -> None:
    """Write the completed schema into the ledger, next to the release that it came from."""
    from ...clients.records.drafting import document

    text = np.frombuffer(document(schema).encode(), np.uint8)
    with ledger.exclusive() as page:
        made = [(name, stream) for name in _SESSIONS if (stream := page.stream(name)) is not None]
        name, stream = made[-1]
        page.commit(name, replace(stream, noted=(text,)), page.account())


class _Releases:
    """The releases of one table, each the only one of a session in its ledger."""

    def __init__(
        self,
        found: ReadTable,
        schema: Schema,
        order: NDArray[np.int64],
        ledger: SQLiteLedger,
        delta: float,
        seal: Seal,
    ) -> None:
        self.found, self.order, self.ledger, self.delta, self.seal = found, order, ledger, delta, seal
        self._schema, self._cells = schema, RowCells(found.rows, order)
        # A ledger that a fit began knows rows by the schema of that fit.
        self.known = self._cells if knows_cells(ledger, new=True) else Dealt(found.rows, schema, order)
        self._rows: Dealt | None = None

    def counts(
        self, session: str, schema: Schema, columns: dict[str, CountedColumn], mu: float, last_share: float = 0.0
    ) -> TableStatistics:
        """Release counts of some columns, read by a schema, and return the statistics made of them."""
        if self._rows is None:
            self._rows = Dealt(self.found.rows, schema.of_values(), self.order, self.known)
            self.seal.note(self._rows.records.report())
        places = RecordPlaces(schema, columns)
        policy = statistics_policy(mu, delta=self.delta, budget_mu=self.ledger.budget_mu, noise_quality="exact")
        rows, ledger = TableRows(schema, places, last_share), self.ledger
        client = StatisticsClient(rows, Places(self._rows, places), policy, ledger, ledger.keys(), name=self.found.name)
        client.privatizer.together = True  # each row is read and placed by itself, and none fails
        check_unchanged(client.privatizer)
        release = client.release(Request(server_round=1, session=session, ack=0, query_points=()))
        std = client.privatizer.plan.noise_std
        return rows.rows.read(QuerySum(release.values, release.samples, 1, std))

    def names(self, session: str, columns: list[str], mu: float, added_delta: float) -> dict[str, tuple[str, ...]]:
        """Release the frequent values of some categories."""
        own = [
            (place, self._schema.columns[name]) for place, name in enumerate(self._schema.columns) if name in columns
        ]

        def texts(row: int) -> list[str | None]:
            cells = self._schema.cells(self._cells.item(row))
            return [_name_in(cells[place], column) for place, column in own]

        ledger = self.ledger
        privatizer = NamedValues(
            *(len(columns), mu, added_delta, len(self._cells), ledger, ledger.keys()),
            delta=self.delta,
            budget_mu=ledger.budget_mu,
            data=row_bytes(self.known),
        )
        check_unchanged(privatizer)
        return dict(zip(columns, privatizer.release(session, texts), strict=True))


def _released(rows: _Releases, schema: Schema, prices: _Prices) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema completed by its releases, and the columns that noise hides.

    Notes
    -----
    **Formal guarantees.** Post-processing of releases that cost the prices together, for replacement of one row.
    """
    hidden: set[str] = set()
    if prices.values:
        named = rows.names(_VALUES, open_values(schema), prices.values, prices.added_delta)
        hidden |= {name for name, values in named.items() if not values}
        columns = {
            name: column.changed(values=named[name] or (NONE_NAMED,)) if name in named else column
            for name, column in schema.columns.items()
        }
        schema = schema.changed(columns=columns)
    if prices.bounds:
        statistics = rows.counts(_BOUNDS, schema, open_columns(schema), prices.bounds)
        bounds = {column.name: _bounds(column) for column in statistics.columns}
        hidden |= {name for name, found in bounds.items() if found is None}
        schema = _bounded(schema, {name: found or (-1.0, 1.0) for name, found in bounds.items()})
    if prices.knots:
        counted = knot_columns(schema)
        regression = schema.num_classes == 1
        share = share_of_label(len(counted)) if regression else 0.0
        found = {one.name: one for one in rows.counts(_KNOTS, schema, counted, prices.knots, share).columns}
        hidden |= {name for name, one in found.items() if one.hidden}
        label = schema.label
        if regression:
            label = label.changed(scale=tuple(scale_of(found[label.column])))
        columns = {
            name: _with_knots(column, found[name]) if name in found else column
            for name, column in schema.columns.items()
        }
        schema = schema.changed(columns=columns, label=label)
    return schema, tuple(sorted(hidden))


def _name_in(cell: Any, column: Column) -> str | None:
    """Return the value of a category that a cell may be named as; None if it is missing, or counts as other."""
    try:
        text = text_of(cell)
    except InvalidRecordError:
        return None
    return None if column.is_missing(text) or text == OTHER or len(text) > _LONGEST_NAME else text


def _bounds(column: ColumnStatistics) -> Bounds | None:
    """Return bounds of a number from its released counts; None where noise hides it.

    They leave out half a percent of the values at each end. In a long empty tail noise passes for values, so they lie
    no further out than half of the range between quantiles that noise does not move.
    """
    sure = _SURELY * column.share_std
    if sure > _FARTHEST_ORDER:
        return None
    orders = np.array([_OUTERMOST, max(sure, _OUTERMOST)])
    lowest, low = column.places_of(orders).tolist()
    highest, high = column.places_of(1.0 - orders).tolist()
    beyond = (high - low) / 2.0
    at = np.searchsorted(column.column.grid, [max(lowest, low - beyond), min(highest, high + beyond)])
    # Values lie between places, and all may lie between two.
    grid = column.column.grid[np.clip(at + np.array([-1, 1]), 0, column.column.places - 1)]
    first, last = float(f"{grid[0]:.{_DIGITS}g}"), float(f"{grid[1]:.{_DIGITS}g}")
    return (math.floor(first), math.ceil(last)) if column.column.whole else (first, last)


def _bounded(schema: Schema, bounds: dict[str, Bounds]) -> Schema:
    """Return the schema with these bounds in the place of those that were open."""
    columns = {
        name: column.changed(bounds=bounds[name]) if name in bounds else column
        for name, column in schema.columns.items()
    }
    label = schema.label
    if label.column in bounds:
        label = label.changed(bounds=bounds[label.column])
    return schema.changed(columns=columns, label=label)


def _with_knots(column: Column, found: ColumnStatistics) -> Column:
    """Return a number with knots, and with its median for empty cells if none was declared."""
    low, high = column.bounds or (0.0, 1.0)
    knots = tuple(min(max(float(f"{knot:.{_KNOT_DIGITS}g}"), low), high) for knot in knots_of(found, KNOTS))
    fill: Any = column.missing
    if "missing" in column.released:
        (middle,) = found.places_of(np.array([0.5])).tolist()
        step = 1.0 if column.kind == "integer" else 10.0 ** (math.floor(math.log10(high - low)) - _DIGITS)
        fill = min(max(float(f"{round(middle / step) * step:.{_KNOT_DIGITS}g}"), low), high)
    return column.changed(knots=knots, missing=fill)
