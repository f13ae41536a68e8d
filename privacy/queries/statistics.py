r"""Private statistics: how the values of a table's columns are spread, released once and with noise.

Counts, means, histograms and quantiles all follow from one thing: how many records lie at each place of a column. The
places are public. A number has a grid v_1 < ... < v_B over its bounds, a category its values, and every column one more
place for a cell without a value, whether it is missing or does not fit.

**Its row.** A record is at one place of each of d columns. Its row has, for each column and divided by sqrt(d),

    e_j              for a category at place j, or for a cell without a value,
    c_j              for a number at v_j,    (1 - t) c_j + t c_(j+1)    for one at v_j + t (v_(j+1) - v_j),

with c_j the j-th column of the square root of the triangle of ones, entries binom(2k, k) / 4^k for k = 0, 1, ...
from row j on, made unit. So each part has length 1 / sqrt(d) at a place and less in between, and the row at most 1. No
entry is negative. Splitting a number between its neighbours keeps its value: the mean has no error of the grid.

**Its sensitivity.** The client sets negative entries to zero and cuts longer rows, whatever it is handed
(``clip_unit="nonnegative"``), and two rows without negative entries have no negative product. So replacing one record
moves the sum by at most sqrt(2), and by that much where every category changes.

**Why c_j and not e_j.** With s the noise of a sum, the noise of a count is s sqrt(d). What lies below place k of B is a
sum of counts, and all of them add up to the public number of records. From one-hot rows its noise is s sqrt(d) times
sqrt(k (B - k) / B), which is sqrt(B) / 2 in the middle and 0.29 sqrt(B) for the mean in units of the range. With c_j
(Fichtenberger, Henzinger and Upadhyay 2023) both grow with log(B) only:

    B                                    16      64     128     256
    prefix in the middle, one-hot      2.00    4.00    5.66    8.00
    prefix, largest, with c_j          1.65    2.10    2.33    2.55
    mean, one-hot                      1.23    2.35    3.29    4.63
    mean, with c_j                     0.87    0.98    1.03    1.10

So a fine grid costs little, and B is 256. Single counts pay for it: 1.8 in the place of 1.

**What is read from it.** Counts, means, histograms and quantiles, with 95 % intervals. With counts c of a column's
places v, their covariance V (noise alone), m = sum c of those with a value, and z = 1.96:

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
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from .. import protocol
from ..accounting.guarantee import Guarantee
from ..errors import ConfigurationError
from ..release.policy import PrivacyPolicy
from .evaluation import Z_95, Interval
from .query import ClipUnit, Query, QuerySum, query_policy

STATISTICS_PLACES = 256
"""B, places of a number with more values than that."""
MOST_STATISTICS = 1 << 20
"""Values of a release."""


@dataclass(frozen=True)
class CountedColumn:
    """A column and its public places; a number has ``bounds``, a category ``values``.

    Parameters
    ----------
    name : str
    bounds : (float, float), optional
        The first and the last place of a number.
    whole : bool
        Whether numbers are integers.
    values : tuple of str
        The places of a category.

    Examples
    --------
    >>> CountedColumn("age", bounds=(0.0, 120.0), whole=True).name
    'age'
    """

    name: str
    bounds: tuple[float, float] | None = None
    whole: bool = False
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.bounds is None) != bool(self.values):
            raise ConfigurationError(
                f"Expected bounds or values of the column {self.name!r}, one of them.", kind="conflict"
            )
        if self.bounds is not None and not (
            all(map(math.isfinite, self.bounds)) and self.bounds[0] < self.bounds[1] < self.bounds[0] + 1e300
        ):
            raise ConfigurationError(
                f"Expected bounds of the column {self.name!r}, lowest and highest, got {self.bounds!r}.",
                kind="out-of-range",
                setting="bounds",
            )

    @property
    def exact(self) -> bool:
        """Whether every value has a place of its own."""
        if self.bounds is None:
            return True
        low, high = self.bounds
        return self.whole and low == math.floor(low) and high == math.floor(high) and high - low < STATISTICS_PLACES

    @property
    def places(self) -> int:
        """Number of places for values."""
        if self.bounds is None:
            return len(self.values)
        return round(self.bounds[1] - self.bounds[0]) + 1 if self.exact else STATISTICS_PLACES

    @property
    def grid(self) -> NDArray[np.float64]:
        """The places of a number."""
        return np.linspace(*(self.bounds or (0.0, len(self.values) - 1.0)), self.places)

    def place(self, value: float) -> float:
        """Return the place of a finite number, from 0 to ``places`` - 1; between two of them a fraction."""
        low, high = self.bounds or (0.0, 1.0)
        return (min(max(value, low), high) - low) / (high - low) * (self.places - 1)


@dataclass(frozen=True)
class PlaceCounts:
    """Number of records at each place of a column, and the covariance of the noise in those numbers.

    The last count is of cells without a value. All add up to the public number of records.
    """

    counts: NDArray[np.float64]
    covariance: NDArray[np.float64]


@dataclass(frozen=True)
class StatisticsRows(Query["TableStatistics"]):
    """The query of private statistics: the rows that they add up, and the statistics read from their sum.

    Notes
    -----
    **Formal guarantees.** Row i depends on the places of record i alone, and on public columns. Its length is for the
    client to bound (:func:`statistics_policy`).

    Examples
    --------
    >>> from murmurfl.privacy import CountedColumn
    >>> query = StatisticsRows((CountedColumn("smoker", values=("no", "yes")),))
    >>> query.width
    3
    """

    name: ClassVar[str] = protocol.OF_STATISTICS
    what: ClassVar[str] = "the statistics of the records"
    setting: ClassVar[str] = "statistics"
    policy_maker: ClassVar[str] = "statistics_policy"
    of_client: ClassVar[str] = "the statistics of its records, which it releases beside its training"
    of_client_if_trusted: ClassVar[str] = "the statistics of its records beside them"
    not_configured: ClassVar[str] = "this client is not configured for statistics: it releases none beside a training"

    columns: tuple[CountedColumn, ...]
    last_share: float = 0.0
    """Share of a row's squared length that the last column has; 0: as much as any other."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not 0.0 <= self.last_share < 1.0:
            raise ConfigurationError(
                f"Expected a share of the last column from 0 to below 1, got {self.last_share!r}.",
                kind="out-of-range",
                setting="last_share",
                got=self.last_share,
            )
        if not self.columns or not all(isinstance(one, CountedColumn) for one in self.columns):
            raise ConfigurationError("Expected at least one column to count, each a CountedColumn.", kind="missing")
        if len({column.name for column in self.columns}) != len(self.columns):
            raise ConfigurationError("Expected columns with names of their own, got a name twice.", kind="duplicate")
        if self.width > MOST_STATISTICS:
            raise ConfigurationError(
                f"Expected at most {MOST_STATISTICS:,} places in all, got {self.width:,}: leave columns out.",
                kind="out-of-range",
            )

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._width

    @cached_property
    def _width(self) -> int:
        return sum(column.places + 1 for column in self.columns)

    @property
    def bound(self) -> tuple[float, ClipUnit]:
        """No row is longer than 1, and none has a negative entry."""
        return 1.0, "nonnegative"

    @cached_property
    def weights(self) -> list[float]:
        """The factor of every column's part, 1 / sqrt(d) or the root of its share; their squares add up to 1."""
        count = len(self.columns)
        if not self.last_share or count == 1:
            return [1.0 / math.sqrt(count)] * count
        return [math.sqrt((1.0 - self.last_share) / (count - 1))] * (count - 1) + [math.sqrt(self.last_share)]

    @property
    def _parts(self) -> Iterator[tuple[CountedColumn, slice]]:
        start = 0
        for column in self.columns:
            stop = start + column.places + 1
            yield column, slice(start, stop)
            start = stop

    def rows(self, measured: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the row of each record, shape (records, ``width``), from its place in every column.

        NaN where it has none.
        """
        found = np.zeros((len(measured), self.width))
        for number, ((column, part), weight) in enumerate(zip(self._parts, self.weights, strict=True)):
            at = np.asarray(measured[:, number], dtype=np.float64)
            known = np.flatnonzero((at >= 0) & (at <= column.places - 1))
            none = np.setdiff1d(np.arange(len(at)), known)
            found[none, part.stop - 1] = weight
            left = np.floor(at[known]).astype(np.intp)
            share = (at[known] - left)[:, None]
            made = _encoding(column.places, column.bounds is not None).T
            right = np.minimum(left + 1, column.places - 1)
            rows = made[left] * ((1.0 - share) * weight)
            between = np.flatnonzero(share[:, 0])
            rows[between] += made[right[between]] * (share[between] * weight)
            found[known, part.start : part.stop - 1] = rows
        return found

    def read(self, found: QuerySum) -> TableStatistics:
        """Return the statistics of all columns."""
        return TableStatistics.of(
            self.columns,
            self.counts(found.total, found.samples, found.noise_std),
            records=found.samples,
            clients=found.clients,
            noise_std=found.noise_std,
        )

    def settings(self) -> dict[str, Any]:
        """Return the number of columns, and a digest of what they are."""
        counted = (self.columns, self.last_share) if self.last_share else self.columns
        digest = hashlib.sha256(repr(counted).encode()).hexdigest()[:8]
        return {"columns": f"{len(self.columns)} ({digest})"}

    def counts(self, total: NDArray[np.float64], samples: int, noise_std: float) -> list[PlaceCounts]:
        """Return the counts of each column in a sum of rows of so many samples.

        With ``noise_std`` in every value of it.
        """
        found = []
        for (column, part), weight in zip(self._parts, self.weights, strict=True):
            decoded, spread = _decoding(column.places, column.bounds is not None)
            counts = decoded @ total[part] / weight
            # All counts add up to a public number: what the noise says otherwise is taken out where it is likeliest.
            pull = spread.sum(axis=1)
            counts += pull * ((samples - counts.sum()) / pull.sum())
            covariance = spread - np.outer(pull, pull) / pull.sum()
            found.append(PlaceCounts(counts, covariance * (noise_std / weight) ** 2))
        return found


@lru_cache(maxsize=64)
def _encoding(places: int, number: bool) -> NDArray[np.float64]:
    """Return the columns c_j or e_j, shape (places, places)."""
    if not number:
        return np.eye(places)
    steps = np.arange(1, places)
    root = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    made = np.tril(root[np.abs(np.subtract.outer(np.arange(places), np.arange(places)))])
    made = made / np.sqrt(np.einsum("ij,ij->j", made, made))
    made.setflags(write=False)
    return made


@lru_cache(maxsize=64)
def _decoding(places: int, number: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the inverse of the encoding with the place of no value, and the covariance of counts for noise of 1."""
    inverse = np.eye(places + 1)
    if number:
        inverse[:-1, :-1] = solve_triangular(_encoding(places, number), np.eye(places), lower=True)
    return inverse, inverse @ inverse.T


def statistics_policy(mu: float = 0.0, *, mechanism: str = "", **fields: Any) -> PrivacyPolicy:
    """Return the policy of a client's statistics: every record's row, once, in a session of its own.

    ``mechanism`` is ``none`` for a simulation without noise; ``fields`` are others of
    :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``budget_mu``, or ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one record of this client, and
    whatever the session is called, another one takes the same from the budget again: everything that is read from it,
    of however many columns, is post-processing. It stands alone and takes every record of the client.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> policy = statistics_policy(mu=0.5)
    >>> policy.mu, policy.max_participations, policy.clip_unit
    (0.5, 1, 'nonnegative')
    """
    return query_policy(1.0, "nonnegative", mu, mechanism=mechanism, **fields)


HIDDEN_BELOW = 4.0
"""Standard deviations of its noise that a number or a share of records must exceed."""
_SETTLED = 0.999
"""Ratio of two values with which a search for one ends."""
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

    Examples
    --------
    >>> Estimate(41.5, noise_interval=(40.0, 43.0), interval=(39.0, 44.0)).value
    41.5
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

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import CountedColumn, QuerySum, StatisticsRows
    >>> query = StatisticsRows((CountedColumn("smoker", values=("no", "yes")),))
    >>> rows = query.rows(np.array([[0.0], [1.0], [1.0], [np.nan]]))  # four records, one without a value
    >>> statistics = query.read(QuerySum(rows.sum(axis=0), samples=4, clients=2, noise_std=0.0))
    >>> smoker = statistics["smoker"]
    >>> round(smoker.count, 3), round(smoker.missing, 3), smoker.hidden
    (3.0, 1.0, False)
    """

    column: CountedColumn
    found: PlaceCounts

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name

    @property
    def count(self) -> float:
        """Number of records with a value, including noise."""
        return float(self.found.counts[:-1].sum())

    @property
    def missing(self) -> float:
        """Number of records without a value: a missing cell, or one that does not fit."""
        return float(self.found.counts[-1])

    @property
    def count_std(self) -> float:
        """The standard deviation of the noise in :attr:`count` and in :attr:`missing`."""
        return math.sqrt(max(float(self.found.covariance[-1, -1]), 0.0))

    @property
    def hidden(self) -> bool:
        """Whether the noise hides how many records have a value: then there are no other figures."""
        return self.count <= max(HIDDEN_BELOW * self.count_std, 0.5)

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

    @property
    def share_std(self) -> float:
        """The largest standard deviation of the noise in the share of a number's values that lie below a place."""
        if self.column.bounds is None or self.hidden:
            return math.inf
        below = np.tril(np.ones((self.column.places, self.column.places))) - 0.5
        return math.sqrt(max(float(self._variances(below / self.count).max()), 0.0))

    def quantile(self, order: float) -> Estimate | None:
        """Return the quantile of a number, 0 < ``order`` < 1; None for a category."""
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
        """Return the places between which a quantile lies."""
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

    def places_of(self, orders: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the places of a number at which its distribution reaches these orders; its bounds where it is hidden.

        They are places of the public grid, so that a value that many records have is found exactly.
        """
        if self.hidden:
            return np.interp(orders, [0.0, 1.0], self.column.bounds or (0.0, 1.0))
        at = np.searchsorted(self._shares, orders)
        return self.column.grid[np.minimum(at, self.column.places - 1)]

    def spread_places(self, count: int, outermost: float) -> NDArray[np.float64]:
        """Return quantiles of a number at ``count`` even orders, of which a value that many records have takes one.

        A place with more than a ``count``-th of what all places count for counts as so much, and places beside it have
        the other quantiles. What lies between two such places counts if it is clearly more than noise.

        Parameters
        ----------
        count : int
            At least 2. Fewer places differ where fewer have values.
        outermost : float
            Order of the first quantile, and of the last one from above.
        """
        orders = np.linspace(outermost, 1.0 - outermost, count)
        if self.hidden:
            return self.places_of(orders)
        shares, clear = np.diff(self._shares, prepend=0.0), HIDDEN_BELOW * self.share_std
        counted, most = shares, 1.0
        while (smaller := max(float(counted.sum()) / count, clear)) < most * _SETTLED:
            most = smaller
            frequent = shares > most
            between = np.cumsum(frequent)
            rest = np.where(frequent, 0.0, shares)
            clearly = np.bincount(between, rest) > clear
            counted = np.where(frequent, most, rest * clearly[between])
        risen = np.cumsum(counted)
        return self.column.grid[np.minimum(np.searchsorted(risen, orders * risen[-1]), self.column.places - 1)]

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
        from scipy.optimize import isotonic_regression  # here: it takes a third of a second to import

        risen = isotonic_regression(np.cumsum(self.found.counts[:-1]) / self.count).x
        shares = np.clip(risen, 0.0, 1.0)
        shares[-1] = 1.0
        return shares

    def _variances(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the noise's variance in sums of counts with these weights, one row each."""
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
    clients : int
        Clients in the sum.
    noise_std : float
        The standard deviation of the noise in each value of the sum.
    guarantee : Guarantee, optional
        What a rehearsal would guarantee if its keys were secret.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import CountedColumn, QuerySum, StatisticsRows
    >>> query = StatisticsRows((CountedColumn("smoker", values=("no", "yes")),))
    >>> rows = query.rows(np.array([[0.0], [1.0], [1.0], [np.nan]]))  # four records, one without a value
    >>> statistics = query.read(QuerySum(rows.sum(axis=0), samples=4, clients=2, noise_std=0.0))
    >>> statistics.records, [column.name for column in statistics.columns]
    (4, ['smoker'])
    """

    columns: tuple[ColumnStatistics, ...]
    records: int
    clients: int
    noise_std: float
    guarantee: Guarantee | None = None

    @classmethod
    def of(
        cls,
        columns: Sequence[CountedColumn],
        counts: Sequence[PlaceCounts],
        *,
        records: int,
        clients: int,
        noise_std: float,
    ) -> TableStatistics:
        """Return the statistics of columns with these counts."""
        found = tuple(ColumnStatistics(*pair) for pair in zip(columns, counts, strict=True))
        return cls(found, records, clients, noise_std)

    def __getitem__(self, name: str) -> ColumnStatistics:
        """Return the statistics of a column."""
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
            "clients": self.clients,
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
    if column.missing > max(HIDDEN_BELOW * column.count_std, 0.5):
        missing = f"; {100 * column.missing / (column.count + column.missing):.1f} % without a value"
    mean = column.mean
    if mean is None:
        total = sum(max(count, 0.0) for _, count, _ in column.histogram) or 1.0
        shares = [f"{name} {100 * max(count, 0.0) / total:.1f} %" for name, count, _ in column.histogram[:MOST_BARS]]
        return f"{column.name}: {', '.join(shares)}{missing}"
    low, high = mean.interval
    quantiles = [column.quantile(order) for order in (0.25, 0.5, 0.75)]
    figures = ", ".join(f"{one.value:.4g}" for one in quantiles if one is not None)
    return f"{column.name}: mean {mean.value:.4g} ({low:.4g} to {high:.4g}), quartiles {figures}{missing}"


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
