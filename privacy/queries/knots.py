r"""Private knots: quantiles of a table's numbers, released once and with noise, and the additive features they give.

An additive model has one curve for each column. A number x of a column with knots k_1 < ... < k_K becomes

    w_i sqrt(1 - l)    for i = 1 .. K, with hat functions w less their mean over ranks that are evenly spread,
    r sqrt(l)          its rank from -1 to 1, linear between two knots,
    1 or 0             whether it is missing; all others are 0 then,

and a category of k values its one-hot vector less 1 / k. The knots are quantiles, so every hat has as many records, and
a column with a long tail is as good as any other. The public share l is that of the rank, which alone is left where
noise is large.

**Its sensitivity.** Knots are read from one release of :class:`~murmurfl.privacy.queries.statistics.StatisticsRows`
over the numbers alone, on a grid of their bounds that has places at equal steps and at equal ratios: the knots are as
good where bounds are a thousand times too wide. What they cost is what these rows cost.

**What follows it.** Features of a record depend on that record and on the knots alone. The knots came from a server and
are public, so features are as private as the record, whatever the knots are. Each column has norm at most 1: hats are
a convex combination of two unit vectors, and for the i-th of them, with m their mean,

    ||e_i - m||^2 = 1 - 2 m_i + ||m||^2 <= 1 - 1 / (K - 1) + (K - 3/2) / (K - 1)^2 < 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..errors import ConfigurationError
from .query import ClipUnit, Query, QuerySum, mean_over_owners
from .statistics import ColumnStatistics, CountedColumn, StatisticsRows, TableStatistics

KNOTS = 8
"""Default number of knots of a column."""
MOST_KNOTS = 64
KNOTS_SHARE = 0.1
"""The share of mu^2 that the knots are given by default."""
_OUTERMOST = 0.01
"""Share of the values below the first knot, and above the last."""
_OUTERMOST_LABEL, _FARTHEST_ORDER = 0.02, 0.25
"""Share of the labels below the scale of a regression, and above it; the most that it is guessed from."""
_SHARE_OF_LABEL = 0.3
"""Share of a row's squared length that a label has at least: all of a regression depends on its scale."""
_FARTHEST_LABEL = 1.5
"""Largest magnitude of a scaled label; labels beyond it are moved there."""
_DECADES = 9
_RATIOS = 256
_SMALLEST_DECADE, _LARGEST_DECADE, _A_DECADE = -6, 12, 24
"""Decades of a grid for numbers of unknown magnitude, and places of each."""


@dataclass(frozen=True)
class FineColumn(CountedColumn):
    """A number counted on a grid with places at equal steps and at equal ratios between its bounds.

    Integers with few values have a place each, as in :class:`CountedColumn`.

    Examples
    --------
    >>> column = FineColumn("income", bounds=(0.0, 1e6))
    >>> column.places > 256, bool(column.grid[1] < 0.01)
    (True, True)
    """

    @property
    def places(self) -> int:
        """Number of places for values."""
        return super().places if self.exact else len(self.grid)

    @property
    def grid(self) -> NDArray[np.float64]:
        """The places of the number, increasing."""
        return self._grid

    @cached_property
    def _grid(self) -> NDArray[np.float64]:
        steps = np.linspace(*(self.bounds or (0.0, 1.0)), super().places)
        if self.exact:
            return steps
        low, high = steps[0], steps[-1]
        ratios = max(abs(low), abs(high)) * 10.0 ** -np.linspace(0.0, _DECADES, _RATIOS)
        both = np.concatenate([-ratios, [0.0], ratios])
        return np.unique(np.concatenate([steps, both[(low < both) & (both < high)]]))

    def place(self, value: float) -> float:
        """Return the place of a finite number, from 0 to ``places`` - 1; between two of them a fraction."""
        return float(np.interp(value, self.grid, np.arange(self.places)))


@dataclass(frozen=True)
class LogColumn(CountedColumn):
    """A number of unknown magnitude, counted on a grid with places at equal ratios on both sides of 0.

    Examples
    --------
    >>> column = LogColumn.widest("income")
    >>> column.places, column.bounds, column.place(0.0)
    (867, (-1000000000000.0, 1000000000000.0), 433.0)
    """

    @classmethod
    def widest(cls, name: str, *, whole: bool = False) -> LogColumn:
        """Return a column with places from -1e12 to 1e12, the smallest next to 0 at 1e-6."""
        return cls(name, (-(10.0**_LARGEST_DECADE), 10.0**_LARGEST_DECADE), whole)

    @property
    def exact(self) -> bool:
        """Whether every value has a place of its own."""
        return False

    @property
    def places(self) -> int:
        """Number of places for values."""
        return len(self.grid)

    @property
    def grid(self) -> NDArray[np.float64]:
        """The places of the number, increasing."""
        return self._grid

    @cached_property
    def _grid(self) -> NDArray[np.float64]:
        decades = np.linspace(_SMALLEST_DECADE, _LARGEST_DECADE, (_LARGEST_DECADE - _SMALLEST_DECADE) * _A_DECADE + 1)
        ratios = 10.0**decades
        return np.concatenate([-ratios[::-1], [0.0], ratios])

    def place(self, value: float) -> float:
        """Return the place of a finite number, from 0 to ``places`` - 1; between two of them a fraction."""
        return float(np.interp(value, self.grid, np.arange(self.places)))


@dataclass(frozen=True)
class KnotRows(Query[NDArray[np.float64]]):
    """The query of the knots of a table's numbers, and the additive features that they give.

    Parameters
    ----------
    columns : tuple of CountedColumn
        The columns of the table in their order: numbers have ``bounds``, categories ``values``.
    knots : int
        K, knots of each number.
    rank_share : float
        l, the share of a number's features that its rank has; a server states it with the knots.
    label : CountedColumn, optional
        The label of a regression: its scale is from private quantiles as well.
    given : tuple of float
        Knots of every number, and the scale of the label, where a schema has them: then nothing is released for them.

    Notes
    -----
    **Formal guarantees.** Row i depends on record i and on public columns alone. Its length is for the client to bound
    by the policy of the query. The row of an owner is the mean of those of its records.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import CountedColumn
    >>> query = KnotRows((CountedColumn("age", bounds=(0.0, 100.0)),), knots=3, rank_share=1.0)
    >>> features = query.features(np.array([[75.0, 0.0], [0.0, 1.0]]), np.array([1.0, 20.0, 50.0, 100.0]))
    >>> (features.round(2) + 0.0).tolist()
    [[0.0, 0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    """

    name: ClassVar[str] = protocol.OF_KNOTS
    what: ClassVar[str] = "the knots of the columns"
    setting: ClassVar[str] = "model = 'additive'"
    of_client: ClassVar[str] = "the counts for the knots of its columns, which it releases first"
    of_client_if_trusted: ClassVar[str] = "the counts for the knots of its columns before them"
    not_configured: ClassVar[str] = (
        "this client is not configured for an additive model: it releases no counts and takes no knots"
    )
    gives: ClassVar[str] = protocol.KNOTS
    gives_type: ClassVar[str] = "<f8"
    of_trained: ClassVar[bool] = True
    per_owner: ClassVar[bool] = True

    columns: tuple[CountedColumn, ...]
    knots: int = KNOTS
    rank_share: float = 0.3
    label: CountedColumn | None = None
    given: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not any(column.bounds is not None for column in self.columns):
            raise ConfigurationError(
                "Expected a column of numbers for an additive model, got none: use model = 'softmax' or 'ridge'.",
                kind="missing",
                setting="model",
            )
        if isinstance(self.knots, bool) or not isinstance(self.knots, int) or not 2 <= self.knots <= MOST_KNOTS:
            raise ConfigurationError(
                f"Expected from 2 to {MOST_KNOTS} knots, got {self.knots!r}.",
                kind="out-of-range",
                setting="model.knots",
                got=self.knots,
            )
        if not 0.0 <= self.rank_share <= 1.0:
            raise ConfigurationError(
                f"Expected a rank share from 0 to 1, got {self.rank_share!r}.",
                kind="out-of-range",
                setting="model.rank-share",
                got=self.rank_share,
            )

    @cached_property
    def _counts(self) -> StatisticsRows:
        """The rows that are added up: counts on the grids of the numbers, and of a regression's label."""
        numbers = [column for column in self.columns if column.bounds is not None]
        counted = [*numbers, *([] if self.label is None else [self.label])]
        share = 0.0 if self.label is None else share_of_label(len(counted))
        fine = tuple(FineColumn(f"{i}", one.bounds, one.whole) for i, one in enumerate(counted))
        return StatisticsRows(fine, last_share=share)

    @property
    def blocks(self) -> Iterator[tuple[CountedColumn, slice, slice]]:
        """Return each column with its places among a record's values, and among its features."""
        value = feature = 0
        for column in self.columns:
            values, features = (2, self.knots + 2) if column.bounds is not None else (len(column.values),) * 2
            yield column, slice(value, value + values), slice(feature, feature + features)
            value, feature = value + values, feature + features

    @property
    def num_values(self) -> int:
        """Values of a record as the query takes it: a number and whether it is missing, or one for each category."""
        return max(values.stop for _, values, _ in self.blocks)

    @property
    def num_features(self) -> int:
        """Features of a record; those of a regression end with a constant, in the place of a bias."""
        return max(features.stop for *_, features in self.blocks) + (self.label is not None)

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._counts.width

    @property
    def input_width(self) -> int:
        """Values that :meth:`read` gives: the rank share, the knots, and the lowest and highest scaled label."""
        numbers = len(self._counts.columns) - (self.label is not None)
        return 1 + self.knots * numbers + 2 * (self.label is not None)

    @property
    def bound(self) -> tuple[float, ClipUnit]:
        """No row is longer than 1, and none has a negative entry."""
        return self._counts.bound

    def rows(self, measured: Any) -> NDArray[np.float64]:
        """Return the row of each record of a batch: its values, with its labels if the query has a label."""
        values, labels = (measured[0], measured[1]) if isinstance(measured, tuple) else (measured, None)
        values = np.asarray(values, dtype=np.float64)
        at = np.full((len(values), len(self._counts.columns)), np.nan)
        for number, (place, column) in enumerate(zip(self._numbers, self._counts.columns, strict=False)):
            there = values[:, place + 1] == 0.0
            at[there, number] = np.interp(values[there, place], column.grid, np.arange(column.places))
        if self.label is not None:
            grid = self._counts.columns[-1].grid
            at[:, -1] = np.interp(np.asarray(labels, dtype=np.float64), grid, np.arange(len(grid)))
        return self._counts.rows(at)

    @property
    def _numbers(self) -> list[int]:
        """Places of the numbers among a record's values."""
        return [values.start for column, values, _ in self.blocks if column.bounds is not None]

    def rows_of_owners(self, rows: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the mean of each owner's rows."""
        return mean_over_owners(rows, present)

    def read(self, found: QuerySum) -> NDArray[np.float64]:
        """Return the rank share, the knots of every number, and for a regression the scale of its label."""
        statistics: TableStatistics = self._counts.read(found)
        made = [self.rank_share]
        for number, column in enumerate(statistics.columns):
            if self.label is not None and number == len(statistics.columns) - 1:
                made += scale_of(column)
            else:
                made += knots_of(column, self.knots)
        return np.array(made)

    @property
    def public(self) -> NDArray[np.float64]:
        """The rank share and the given knots, as :meth:`read` returns them."""
        made = np.array([self.rank_share, *self.given])
        self.checked(made)
        return made

    def checked(self, public: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return what a server sent in the place of :meth:`read`; raise ConfigurationError if that cannot be it.

        The rank share is from 0 to 1, knots do not fall and lie between the bounds of their column.
        """
        low_high = [column.bounds or (0.0, 0.0) for column in self._counts.columns]
        parts = [public[1:][place : place + self.knots] for place in range(0, len(public) - 1, self.knots)]
        fits = public.shape == (self.input_width,) and bool(np.isfinite(public).all()) and 0.0 <= public[0] <= 1.0
        for part, (low, high) in zip(parts, low_high, strict=False):
            fits = fits and bool((np.diff(part) >= 0).all()) and low <= part[0] < part[-1] <= high
        if not fits:
            raise ConfigurationError(
                f"Expected a rank share and {self.knots} rising knots of each number between its bounds, got others.",
                kind="malformed",
                setting="knots",
            )
        return public

    def features(self, values: NDArray[Any], public: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the additive features of records, shape (..., ``num_features``) for values (..., ``num_values``)."""
        values = np.asarray(values, dtype=np.float64)
        made = np.ones((*values.shape[:-1], self.num_features))
        number, share = 0, float(public[0])
        levels = np.asarray(public, dtype=np.float64)
        for column, place, feature in self.blocks:
            there = values[..., place]
            if column.bounds is None:
                made[..., feature] = there - 1.0 / len(column.values)
                continue
            knots = np.unique(levels[1 + number * self.knots : 1 + (number + 1) * self.knots])
            made[..., feature] = _hats(there, knots, share, self.knots)
            number += 1
        return made

    @property
    def even(self) -> NDArray[np.float64]:
        """Rank share and knots for values that are spread evenly between their public bounds."""
        made = [self.rank_share]
        for number, column in enumerate(self._counts.columns):
            of_label = self.label is not None and number == len(self._counts.columns) - 1
            made += np.linspace(*(column.bounds or (0.0, 1.0)), 2 if of_label else self.knots).tolist()
        return np.array(made)

    def scaled(self, labels: NDArray[Any], public: NDArray[np.floating], *, bounded: bool = True) -> NDArray[Any]:
        """Return labels of a regression on the released scale, from -1 to 1 and at most half as far beyond."""
        if self.label is None:
            return labels
        low, high = (float(one) for one in public[-2:])
        made = 2.0 * (np.asarray(labels, dtype=np.float64) - low) / (high - low) - 1.0
        return np.clip(made, -_FARTHEST_LABEL, _FARTHEST_LABEL) if bounded else made

    def unscaled(self, predicted: NDArray[np.floating], public: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return predictions of a regression in units of its label."""
        low, high = (float(one) for one in public[-2:])
        within = np.clip(np.asarray(predicted, dtype=np.float64), -_FARTHEST_LABEL, _FARTHEST_LABEL)
        return low + (within + 1.0) / 2.0 * (high - low)

    def settings(self) -> dict[str, Any]:
        """Return what is counted, and the number of knots."""
        return {**self._counts.settings(), "knots": self.knots}


def share_of_label(columns: int) -> float:
    """Return the share of a row's squared length that a regression's label has, the last of so many columns."""
    return max(_SHARE_OF_LABEL, 1.0 / columns)


def knots_of(column: ColumnStatistics, count: int) -> list[float]:
    """Return ``count`` knots of a number from its released statistics; its bounds where noise hides it."""
    return _filled(column.spread_places(count, _OUTERMOST), column.column, count)


def scale_of(label: ColumnStatistics) -> list[float]:
    """Return the ends of the scale of a regression's label from its released statistics."""
    return _filled(_scale(label), label.column, 2)


def _scale(label: ColumnStatistics) -> NDArray[np.float64]:
    """Return the ends of the scale of a label: its 2 and 98 % quantiles.

    Where noise hides these they are guessed from quantiles further in, as those of a normal distribution on either
    side of the median. Where there is nothing but noise they are the public bounds.
    """
    order = max(2.0 * label.share_std, _OUTERMOST_LABEL)
    if order > _FARTHEST_ORDER:
        return np.array(label.column.bounds)
    low, middle, high = label.places_of(np.array([order, 0.5, 1.0 - order]))
    stretch = NormalDist().inv_cdf(_OUTERMOST_LABEL) / NormalDist().inv_cdf(order)
    ends = np.array([middle - stretch * (middle - low), middle + stretch * (high - middle)])
    return np.clip(ends, *(label.column.bounds or (low, high)))


def _filled(knots: NDArray[np.float64], column: CountedColumn, count: int) -> list[float]:
    """Return ``count`` knots: those that differ, with the last one repeated; bounds where all are equal."""
    found = np.unique(knots)
    if len(found) < 2:
        found = np.array(column.bounds, dtype=np.float64)
    return [*found.tolist(), *[float(found[-1])] * (count - len(found))]


def _hats(values: NDArray[np.float64], knots: NDArray[np.float64], share: float, count: int) -> NDArray[np.float64]:
    """Features of one number, shape (..., count + 2), from its values and whether they are missing."""
    made = np.zeros((*values.shape[:-1], count + 2))
    there = (values[..., 1] == 0.0) & ~np.isnan(values[..., 0])  # what is no number is missing
    steps = len(knots) - 1
    rank = np.interp(values[..., 0][there], knots, np.arange(len(knots)))
    left = np.minimum(rank.astype(np.intp), steps - 1)
    part = rank - left
    hats = np.zeros((len(rank), count))
    rows = np.arange(len(rank))
    hats[rows, left], hats[rows, left + 1] = 1.0 - part, part
    hats[:, : len(knots)] -= np.array([0.5, *[1.0] * (steps - 1), 0.5]) / steps
    made[there, :count] = hats * math.sqrt(1.0 - share)
    made[there, count] = (2.0 * rank / steps - 1.0) * math.sqrt(share)
    made[..., count + 1] = ~there
    return made
