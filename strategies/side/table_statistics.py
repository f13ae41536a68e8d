"""Private statistics, the server's half: how the values of a table's columns are spread, in one round.

Each machine releases the noisy sum of its records' rows once (:mod:`murmurfl.privacy.side.statistics_query`). Counts,
means, histograms and quantiles are read from the sum of these, with 95 % intervals. With counts c of a column's places
v, their covariance V (noise alone), m = sum c of those with a value, and z = 1.96:

**Mean.** a = sum v c / m. To first order its noise is w . noise with w = (v - a) / m, of variance w V w. The interval
of the records' own mean is a +- z sqrt(w V w); that of the population has the variance of a mean of m draws in it.

**Quantile** of order p. F_k = (c_1 + ... + c_k) / m rises with k, so noise that lets it fall is taken out (isotonic
regression). F_k is the mean of the distribution function between v_k and v_(k+1), where a number is split between its
neighbours, and its value at v_k where each number has a place of its own. The noise of F_k where it is p has the
variance w V w with w = (1[place <= k] - p) / m. The interval begins at the first place at which F_k + z sd reaches p
and ends behind the last one at which F_k - z sd is below p, each a place wider where numbers lie between places.

Where the noise hides how many cells have a value (m below 4 standard deviations of it) there are no figures.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from ...privacy import ConfigurationError, Guarantee, StatisticsRows, protocol
from ...privacy.side.statistics_query import CountedColumn, PlaceCounts
from ..aggregation.noisy import TrustedStrategy
from ..rounds.options import takes
from ..rounds.replies import DirectMachines, Layout, Vector
from .mean_of_features import OneAnswer, OneAnswerOptions, OneSumOptions, one_sum, stated_std
from .private_evaluation import Z_95, Interval

logger = logging.getLogger("flwr")

_SURELY = 4.0
"""Standard deviations of its noise that a number of records must exceed."""
ORDERS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Orders of the quantiles that are shown."""
MOST_BARS = 16
_OUTERMOST = 0.005
"""Share of a column's values at each end that :attr:`ColumnStatistics.bounds` leave out."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % intervals.

    ``noise_interval`` is of the figure on these very records, for the noise alone; ``interval`` of that in the
    population they are drawn from, for noise and sampling.
    """

    value: float
    noise_interval: Interval
    interval: Interval


@dataclass(frozen=True)
class ColumnStatistics:
    """The statistics of one column: post-processing of a release.

    Parameters
    ----------
    column : CountedColumn
    found : PlaceCounts
        Records at each place, noise and all.
    """

    column: CountedColumn
    found: PlaceCounts

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name

    @property
    def count(self) -> float:
        """How many records have a value, noise and all."""
        return float(self.found.counts[:-1].sum())

    @property
    def missing(self) -> float:
        """How many records have none: a missing cell, or one that does not fit."""
        return float(self.found.counts[-1])

    @property
    def count_std(self) -> float:
        """The standard deviation of the noise in :attr:`count` and in :attr:`missing`."""
        return math.sqrt(max(float(self.found.covariance[-1, -1]), 0.0))

    @property
    def hidden(self) -> bool:
        """Whether the noise hides how many records have a value: then there are no other figures."""
        return self.count <= max(_SURELY * self.count_std, 0.5)

    @property
    def mean(self) -> Estimate | None:
        """The mean of a number; None for a category."""
        if self.column.bounds is None or self.hidden:
            return None
        grid, counts = self.column.grid, self.found.counts[:-1]
        value = float(grid @ counts) / self.count
        noise = self._noise_std((grid - value) / self.count)
        low, high = self.column.bounds
        spread = min(max(float((grid - value) ** 2 @ counts) / self.count, 0.0), (high - low) ** 2 / 4.0)
        drawn = math.hypot(noise, math.sqrt(spread / self.count))
        return Estimate(_within(value, low, high), self._around(value, noise), self._around(value, drawn))

    @property
    def sum(self) -> float | None:
        """The sum of a number, noise and all."""
        return None if self.column.bounds is None else float(self.column.grid @ self.found.counts[:-1])

    @property
    def sum_std(self) -> float:
        """The standard deviation of the noise in :attr:`sum`."""
        return self._noise_std(self.column.grid)

    def quantile(self, order: float) -> Estimate | None:
        """The quantile of a number, 0 < ``order`` < 1; None for a category."""
        if self.column.bounds is None or self.hidden:
            return None
        shares, grid, last = self._shares, self.column.grid, self.column.places - 1
        below = np.tril(np.ones((last + 1, last + 1))) - order
        noise = np.sqrt(np.maximum(self._variances(below / self.count), 0.0))
        noise[-1] = 0.0  # all values lie below the last bound
        drawn = np.hypot(noise, math.sqrt(order * (1.0 - order) / self.count))
        drawn[-1] = 0.0
        if self.column.exact:
            value = float(grid[min(int(np.searchsorted(shares, order)), last)])
        else:
            middles = np.concatenate([grid[:1], (grid[:-1] + grid[1:]) / 2.0, grid[-1:]])
            value = float(np.interp(order, np.append(0.0, shares), middles))
        reached = [self._reached(shares, spread, order) for spread in (noise, drawn)]
        return Estimate(value, *reached)

    def _reached(self, shares: NDArray[np.float64], spread: NDArray[np.float64], order: float) -> Interval:
        """The places between which a quantile lies."""
        grid, last = self.column.grid, self.column.places - 1
        first = int(np.argmax(shares + Z_95 * spread >= order))
        below = np.flatnonzero(shares - Z_95 * spread < order)
        behind = int(below[-1]) + 1 if len(below) else 0
        beside = 0 if self.column.exact else 1
        return float(grid[max(first - beside, 0)]), float(grid[min(behind + beside, last)])

    @property
    def bounds(self) -> Interval | None:
        """Bounds between which all but about 1 % of a number's values lie, to scale it by; None where nothing is said.

        They are made from the release, so they are as public as it is. Noise in a long empty tail passes for values:
        they are no further out than half of the range between the inner ends of the noise's intervals.
        """
        first, last = (self.quantile(order) for order in (_OUTERMOST, 1.0 - _OUTERMOST))
        if first is None or last is None:
            return None
        low, high = first.noise_interval[1], last.noise_interval[0]
        beyond = (high - low) / 2.0
        low, high = max(low - beyond, min(first.value, low)), min(high + beyond, max(last.value, high))
        return (low, high) if beyond > 0 else self.column.bounds

    @property
    def histogram(self) -> list[tuple[str, float, float]]:
        """Bars: what each is of, how many records it has, noise and all, and the noise's standard deviation."""
        column, counts = self.column, self.found.counts[:-1]
        if column.bounds is None:
            parts = [np.array([place]) for place in range(column.places)]
            names = list(column.values)
        else:
            parts = np.array_split(np.arange(column.places), min(MOST_BARS, column.places))
            ends = [(column.grid[part[0]], column.grid[part[-1]]) for part in parts]
            names = [f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}" for low, high in ends]
        found = []
        for name, part in zip(names, parts, strict=True):
            chosen = np.zeros(column.places)
            chosen[part] = 1.0
            found.append((name, float(counts[part].sum()), self._noise_std(chosen)))
        return found

    @property
    def document(self) -> dict[str, Any]:
        """The figures as plain values."""
        found: dict[str, Any] = {
            "count": self.count,
            "missing": self.missing,
            "count_std": self.count_std,
            "histogram": [list(bar) for bar in self.histogram],
        }
        if self.column.bounds is not None:
            quantiles = {f"{order:g}": _plain(self.quantile(order)) for order in ORDERS}
            found |= {"mean": _plain(self.mean), "sum": self.sum, "sum_std": self.sum_std, "quantiles": quantiles}
            found["bounds"] = None if self.bounds is None else list(self.bounds)
        return found

    @property
    def _shares(self) -> NDArray[np.float64]:
        """F at every place, rising to 1."""
        risen = isotonic_regression(np.cumsum(self.found.counts[:-1]) / self.count).x
        shares = np.clip(risen, 0.0, 1.0)
        shares[-1] = 1.0
        return shares

    def _variances(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The noise's variance in sums of counts with these weights, one row each."""
        spread = self.found.covariance[:-1, :-1]
        return np.einsum("ij,ij->i", weights @ spread, weights)

    def _noise_std(self, weights: NDArray[np.float64]) -> float:
        return math.sqrt(max(float(self._variances(weights[None])[0]), 0.0))

    def _around(self, value: float, std: float) -> Interval:
        low, high = self.column.bounds or (-math.inf, math.inf)
        value = _within(value, low, high)  # else an interval of a value that noise carries out is a single figure
        return _within(value - Z_95 * std, low, high), _within(value + Z_95 * std, low, high)


@dataclass(frozen=True)
class TableStatistics:
    """The statistics of a table's columns from the noisy sum of a release.

    Parameters
    ----------
    columns : tuple of ColumnStatistics
    records : int
        Records in the sum, a public number.
    machines : int
        Machines in the sum.
    noise_std : float
        The standard deviation of the noise in each value of the sum.
    guarantee : Guarantee, optional
        What a rehearsal would guarantee if its keys were secret.
    """

    columns: tuple[ColumnStatistics, ...]
    records: int
    machines: int
    noise_std: float
    guarantee: Guarantee | None = None

    @classmethod
    def of(
        cls,
        columns: Sequence[CountedColumn],
        counts: Sequence[PlaceCounts],
        *,
        records: int,
        machines: int,
        noise_std: float,
    ) -> TableStatistics:
        """The statistics of columns with these counts."""
        found = tuple(ColumnStatistics(*pair) for pair in zip(columns, counts, strict=True))
        return cls(found, records, machines, noise_std)

    def __getitem__(self, name: str) -> ColumnStatistics:
        """The statistics of a column."""
        return {column.name: column for column in self.columns}[name]

    @property
    def bounds(self) -> dict[str, Interval]:
        """The :attr:`ColumnStatistics.bounds` of the numbers that have some."""
        return {column.name: column.bounds for column in self.columns if column.bounds is not None}

    @property
    def document(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "records": self.records,
            "machines": self.machines,
            "noise_std": self.noise_std,
            "columns": {column.name: column.document for column in self.columns},
        }

    @property
    def sentences(self) -> list[str]:
        """A line for each column."""
        return [_sentence(column) for column in self.columns]


def _sentence(column: ColumnStatistics) -> str:
    if column.hidden:
        return f"{column.name}: the noise hides how many records have a value"
    missing = ""
    if column.missing > max(_SURELY * column.count_std, 0.5):
        missing = f"; {100 * column.missing / (column.count + column.missing):.1f} % without a value"
    mean = column.mean
    if mean is None:
        total = sum(max(count, 0.0) for _, count, _ in column.histogram) or 1.0
        said = [f"{name} {100 * max(count, 0.0) / total:.1f} %" for name, count, _ in column.histogram[:MOST_BARS]]
        return f"{column.name}: {', '.join(said)}{missing}"
    low, high = mean.interval
    quantiles = [column.quantile(order) for order in (0.25, 0.5, 0.75)]
    shown = ", ".join(f"{one.value:.4g}" for one in quantiles if one is not None)
    return f"{column.name}: mean {mean.value:.4g} ({low:.4g} to {high:.4g}), quartiles {shown}{missing}"


def _plain(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "value": found.value,
        "interval": list(found.interval),
        "noise_interval": list(found.noise_interval),
    }


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@dataclass(frozen=True)
class StatisticsState:
    """The sum of the machines' rows; zeros before the round."""

    total: Vector


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsOptions(OneAnswerOptions):
    """What :class:`Statistics` takes."""

    columns: Sequence[CountedColumn]
    beside: bool = False

    def __post_init__(self) -> None:
        if self.centre is not None:
            raise ConfigurationError("Expected no centre for Statistics, got one: records are counted as they are.")
        super().__post_init__()


class Statistics(OneAnswer[StatisticsState]):
    """Statistics of a table's columns over all machines in one round.

    Parameters
    ----------
    columns : sequence of CountedColumn
        The columns, as on the machines: ``murmurfl.clients.statistics_columns(schema)``.
    num_clients : int, optional
        M, machines in all; all of them are asked. Default as many as are connected.
    beside : bool
        Whether machines release statistics beside a training (:class:`murmurfl.clients.Counting`) and not as a run of
        their own (:class:`murmurfl.clients.StatisticsClient`).
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`; checkpoint and session are this round's own.

    Notes
    -----
    Each machine answers once in a session, and counts every session against its budget. What is guaranteed is
    the machines': mu-GDP for replacement of one record, of all figures together
    (:func:`~murmurfl.privacy.statistics_policy`).

    Examples
    --------
    In a Flower project's ``ServerApp``::

        found = Statistics(columns=statistics_columns(schema), num_clients=10).collect(grid)
        print(found["age"].mean, found["age"].quantile(0.5))
    """

    state_type: ClassVar[type[StatisticsState]] = StatisticsState

    options: StatisticsOptions

    @takes(StatisticsOptions)
    def __init__(self, **options: Any) -> None:
        self.rows = StatisticsRows(tuple(self.options.columns))
        self.of = protocol.OF_STATISTICS if self.options.beside else ""
        super().__init__(**options)

    def collect(self, grid: Grid | DirectMachines, *, timeout: float = 3600.0) -> TableStatistics:
        """The statistics, from all machines or from the checkpoint.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for replies; later ones are not in the figures.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        OpeningError
            Under secure aggregation, if the sum cannot be opened.
        ConfigurationError
            If no machine released anything, with what they said.

        Notes
        -----
        A server that was killed while machines answered asks again in the same session. murmurfl's nodes repeat their
        last answer; other machines have made their only release of it, and refuse.
        """
        self.start(grid, ArrayRecord({"statistics": Array(np.zeros(self.rows.width))}), num_rounds=1, timeout=timeout)
        report = self.history[-1]
        if not report.aggregated or self.state is None:
            raise ConfigurationError(
                f"Expected machines to release statistics, got none from {report.asked}: {self.said(report)}. Machines "
                "must be configured for statistics of the same columns; see their logs."
            )
        noise = self.noise_std(self.rows.width)
        counts = self.rows.read(self.state.total, report.samples, noise)
        found = TableStatistics.of(
            self.rows.columns, counts, records=report.samples, machines=report.aggregated, noise_std=noise
        )
        logger.info("Statistics of %d columns, from %d machines in all.", len(counts), report.aggregated)
        return found

    @property
    def release_layout(self) -> Layout:
        return [("statistics", (self.rows.width,), np.dtype(np.float64))]

    def initial_state(self, start: Vector) -> StatisticsState:
        return StatisticsState(start)

    def query_points(self, state: StatisticsState) -> tuple[Vector, ...]:
        """No points: records do not depend on a model."""
        return ()

    def step(self, state: StatisticsState, release_sum: Vector, server_round: int) -> StatisticsState:
        """The state with the sum of the rows."""
        return StatisticsState(release_sum)

    def model(self, state: StatisticsState) -> Vector:
        return state.total

    def read_entries(self, entries: Mapping[str, Any]) -> list[float] | None:
        std = stated_std(entries)
        return None if std is None else [std]

    def settings(self) -> dict[str, Any]:
        told = hashlib.sha256(repr(self.rows.columns).encode()).hexdigest()[:8]
        return {**super().settings(), "columns": f"{len(self.rows.columns)} ({told})"}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrustedStatisticsOptions(OneSumOptions, StatisticsOptions):
    """What :class:`TrustedStatistics` takes."""


class TrustedStatistics(TrustedStrategy, Statistics):
    """Statistics with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.statistics_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.aggregation.noisy.TrustedOptions`.
    **options
        See :class:`Statistics`.

    Notes
    -----
    **Formal guarantees.** The statistics are mu-GDP for replacement of one record of one machine, against everybody but
    the server itself, under the conditions of :class:`~murmurfl.strategies.aggregation.noisy.TrustedStrategy`.
    Proof: docs/proofs/sensitivities.md.
    """

    options: TrustedStatisticsOptions  # type: ignore[assignment]

    @takes(TrustedStatisticsOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "aggregator": one_sum(type(self), self.options, "statistics_policy")})
