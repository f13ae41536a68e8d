"""A declared schema completed by releases with noise: bounds, values for empty cells and knots, paid from a ledger.

A person declares which columns there are, what kind each is, its unit and its codes for missing values, without looking
at the rows. Two releases give the rest. The first counts the numbers whose bounds are open on a grid of all
magnitudes. The second counts all numbers between their bounds and gives knots and medians. Both are sessions of the
table's ledger with names of their own, so that each is paid for once, and every later fit counts them.
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
from ...clients.records.schema import Bounds, Column, Schema
from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.guarantee import rounded_up
from ...privacy.errors import ConfigurationError
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.queries.knots import KNOTS, knots_of, scale_of, share_of_label
from ...privacy.queries.query import QuerySum, divided_mu
from ...privacy.queries.statistics import (
    ColumnStatistics,
    CountedColumn,
    StatisticsRows,
    TableStatistics,
    statistics_policy,
)
from ..data.table_task import ReadTable
from .fitting import ledger_of
from .real_fit import Dealt, DeclaredRows, Places, check_room, check_unchanged, data_text, order_on
from .sealed import Seal, run_sealed

SESSION = "schema"
"""Name of the releases in a ledger, before what each is of."""
BOUNDS_SHARE = 0.3
"""Share of mu^2 for open bounds; the rest is for knots and values of empty cells."""
_BOUNDS, _KNOTS, _STORED = f"{SESSION}: bounds", f"{SESSION}: knots", 0
_DIGITS, _KNOT_DIGITS = 4, 6
_OUTERMOST, _FARTHEST_ORDER = 0.005, 0.25
"""Share of the values that open bounds leave out at each end, and the order up to which noise may hide quantiles."""
_SURELY = 3.0
"""Standard deviations of the noise in a share of the values that no share in a long empty tail is likely to exceed."""


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
    """Columns of numbers of which the noise hides everything."""
    again: bool
    """Whether it was paid for by an earlier call, so that this one spent nothing."""
    mu: float
    """Mu of both releases together."""
    spent_mu: float
    """Mu of everything that calls with this ledger have released on these rows so far."""
    budget_mu: float
    delta: float
    ledger: Path

    @property
    def sentences(self) -> list[str]:
        """Lines for people on what it cost, and on what noise hides."""
        costs, spent, budget = (
            f"{rounded_up(gdp_epsilon(mu, self.delta))}" for mu in (self.mu, self.spent_mu, self.budget_mu)
        )
        first = "was paid for by an earlier call, and this one spent nothing" if self.again else "is paid for"
        lines = [
            f"The schema {first}: epsilon = {costs} at delta = {self.delta:g}. All calls with the ledger {self.ledger} "
            f"have spent epsilon = {spent} of {budget}."
        ]
        if self.hidden:
            lines.append(f"The noise hides {', '.join(self.hidden)}: leave them out of a fit, or declare their bounds.")
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
        A schema in TOML, reviewed, whose numbers may lack ``bounds`` and ``missing``.
    epsilon : float
        Of both releases together, at ``delta``.
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
    **Formal guarantees.** What is returned is mu-GDP for replacement of one row of the table, with the mu that epsilon
    and delta stand for: both releases together, of which the second is about columns that the first one chose. It
    rests on this computer, on a declared schema that does not come from these rows, and on the number of rows being
    public. The ledger has both releases before anything is returned. Nothing else that depends on a row leaves
    (:func:`~.sealed.run_sealed`). Proof: docs/proofs/sensitivities.md.
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
    mu = gdp_mu(epsilon, delta)
    _check_plans(schema, mu, delta)
    kept = _opened(ledger_of(table, ledger), mu, budget, delta, found.name, count)
    delta = float(kept.delta or delta)
    paid = partial(_paid, mu=mu, delta=delta, ledger=kept)
    if (stored := _stored(kept, schema)) is not None:
        return paid(stored, hidden=(), again=True)
    check_room(kept, mu, float(kept.budget_mu or 0.0), delta)
    order = order_on(kept, found.name, count)
    table_rows = _Releases(found, schema, order, kept, delta, seal)
    seal.begin_rows()
    made, hidden = _released(table_rows, schema, mu)
    made = made.changed(seal=kept.seal_of(made.sealed_text()))
    _store(kept, made)
    return paid(made, hidden=hidden, again=False)


def _paid(
    schema: Schema, *, mu: float, delta: float, ledger: SQLiteLedger, hidden: tuple[str, ...], again: bool
) -> PaidSchema:
    with ledger.exclusive() as page:
        account = page.account()
    costs = math.hypot(*(abs(account.reserved.get(name, 0.0)) for name in (_BOUNDS, _KNOTS)))
    return PaidSchema(schema, hidden, again, costs, account.spent.mu, float(ledger.budget_mu or mu), delta, ledger.path)


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
    if not schema.columns or not knot_columns(schema):
        raise ConfigurationError(
            "Expected a table with a column of numbers, got none: there is nothing to release for its schema.",
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


def _check_plans(schema: Schema, mu: float, delta: float) -> None:
    """Raise if columns are too many or the noise cannot serve mu, before a ledger is made."""
    for columns in filter(None, (open_columns(schema), knot_columns(schema))):
        width = StatisticsRows(tuple(columns.values())).width
        if problem := statistics_policy(mu, delta=delta, noise_quality="exact").plan(width).problem:
            raise ConfigurationError(problem, kind="out-of-range", setting="epsilon")


def _opened(path: Path, mu: float, budget: float, delta: float, name: str, count: int) -> SQLiteLedger:
    """Return the table's ledger, a new one with its budget if there is none."""
    if path.exists():
        if budget:
            raise ConfigurationError(
                f"Expected no budget for the ledger {path}, which has one, got {budget:g}: `murmurfl ledger show "
                f"{path}` says what is left.",
                kind="conflict",
                setting="budget",
                got=budget,
            )
        return SQLiteLedger(path)
    whole = gdp_mu(budget, delta) if budget else mu
    if mu > whole:
        raise ConfigurationError(
            f"Expected a budget that covers this call's epsilon, got {budget:g}: raise it, or leave it out.",
            kind="out-of-range",
            setting="budget",
            got=budget,
        )
    return SQLiteLedger.create(path, budget_mu=whole, delta=delta, data=data_text(name, [count]))


def _stored(ledger: SQLiteLedger, declared: Schema) -> Schema | None:
    """Return the schema that an earlier call has paid for and stored; None if nothing was paid for yet."""
    with ledger.exclusive() as page:
        streams = {name: page.stream(name) for name in (_BOUNDS, _KNOTS)}
    if not any(streams.values()):
        return None
    stream = streams[_KNOTS]
    if stream is None or not stream.noted:
        raise ConfigurationError(
            f"Expected a ledger without a schema that was paid for and lost, got {ledger.path}: a call was interrupted "
            "after it was booked. It stays booked and is not paid for again: declare what is open.",
            kind="exhausted",
            setting="ledger",
        )
    stored = Schema.read_text(stream.noted[_STORED].tobytes().decode(), str(ledger.path))
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
        stream = page.stream(_KNOTS)
        if stream is not None:
            page.commit(_KNOTS, replace(stream, noted=(text,)), page.account())


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
        # What a fit without these releases would know rows by, where all of the schema but knots was declared.
        self.known: Dealt | DeclaredRows = Dealt(found.rows, schema, order)
        if schema.is_completed:
            self.known = DeclaredRows(found.rows, schema, order)
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


def _released(rows: _Releases, schema: Schema, mu: float) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema completed by both releases, and the columns that noise hides.

    Notes
    -----
    **Formal guarantees.** Post-processing of two releases that are together mu-GDP for replacement of one row.
    """
    hidden: set[str] = set()
    if opened := open_columns(schema):
        for_bounds, mu = divided_mu(mu, BOUNDS_SHARE)
        statistics = rows.counts(_BOUNDS, schema, opened, for_bounds)
        bounds = {column.name: _bounds(column) for column in statistics.columns}
        hidden |= {name for name, found in bounds.items() if found is None}
        schema = _bounded(schema, {name: found or (-1.0, 1.0) for name, found in bounds.items()})
    columns = knot_columns(schema)
    regression = schema.num_classes == 1
    share = share_of_label(len(columns)) if regression else 0.0
    found = {one.name: one for one in rows.counts(_KNOTS, schema, columns, mu, share).columns}
    made = {
        name: _with_knots(column, found[name]) if name in found else column for name, column in schema.columns.items()
    }
    label = schema.label
    if regression:
        label = label.changed(scale=tuple(scale_of(found[label.column])))
    hidden |= {name for name, one in found.items() if one.hidden}
    return schema.changed(columns=made, label=label), tuple(sorted(hidden))


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
