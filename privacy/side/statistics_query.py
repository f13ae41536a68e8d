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

**Its sensitivity.** The machine sets negative entries to zero and cuts longer rows, whatever it is handed
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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from ..errors import ConfigurationError
from ..machine.policy import PrivacyPolicy
from .evaluation_query import evaluation_policy

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
    """

    name: str
    bounds: tuple[float, float] | None = None
    whole: bool = False
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.bounds is None) != bool(self.values):
            raise ConfigurationError(f"Expected bounds or values of the column {self.name!r}, one of them.")
        if self.bounds is not None and not (
            all(map(math.isfinite, self.bounds)) and self.bounds[0] < self.bounds[1] < self.bounds[0] + 1e300
        ):
            raise ConfigurationError(
                f"Expected bounds of the column {self.name!r}, lowest and highest, got {self.bounds!r}."
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
        """How many places there are for values."""
        if self.bounds is None:
            return len(self.values)
        return round(self.bounds[1] - self.bounds[0]) + 1 if self.exact else STATISTICS_PLACES

    @property
    def grid(self) -> NDArray[np.float64]:
        """The places of a number."""
        return np.linspace(*(self.bounds or (0.0, len(self.values) - 1.0)), self.places)

    def place(self, value: float) -> float:
        """The place of a finite number, from 0 to ``places`` - 1; between two of them a fraction."""
        low, high = self.bounds or (0.0, 1.0)
        return (min(max(value, low), high) - low) / (high - low) * (self.places - 1)


@dataclass(frozen=True)
class PlaceCounts:
    """How many records are at each place of a column, and the covariance of the noise in that.

    The last count is of cells without a value. All add up to the public number of records.
    """

    counts: NDArray[np.float64]
    covariance: NDArray[np.float64]


@dataclass(frozen=True)
class StatisticsRows:
    """The rows that private statistics add up, and the counts read from their sum.

    Notes
    -----
    **Formal guarantees.** Row i depends on the places of record i alone, and on public columns. Its length is for the
    machine to bound (:func:`statistics_policy`).
    """

    columns: tuple[CountedColumn, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns or not all(isinstance(one, CountedColumn) for one in self.columns):
            raise ConfigurationError("Expected at least one column to count, each a CountedColumn.")
        if len({column.name for column in self.columns}) != len(self.columns):
            raise ConfigurationError("Expected columns with names of their own, got a name twice.")
        if self.width > MOST_STATISTICS:
            raise ConfigurationError(
                f"Expected at most {MOST_STATISTICS:,} places in all, got {self.width:,}: leave columns out."
            )

    @cached_property
    def width(self) -> int:
        """Values of a row."""
        return sum(column.places + 1 for column in self.columns)

    @property
    def weight(self) -> float:
        """The factor 1 / sqrt(d) of every column's part."""
        return 1.0 / math.sqrt(len(self.columns))

    @property
    def _parts(self) -> Iterator[tuple[CountedColumn, slice]]:
        start = 0
        for column in self.columns:
            stop = start + column.places + 1
            yield column, slice(start, stop)
            start = stop

    def rows(self, places: NDArray[np.floating]) -> NDArray[np.float64]:
        """The row of each record, shape (records, ``width``), from its place in every column; NaN where it has none."""
        found = np.zeros((len(places), self.width))
        for number, (column, part) in enumerate(self._parts):
            at = np.asarray(places[:, number], dtype=np.float64)
            known = np.flatnonzero((at >= 0) & (at <= column.places - 1))
            none = np.setdiff1d(np.arange(len(at)), known)
            found[none, part.stop - 1] = self.weight
            left = np.floor(at[known]).astype(np.intp)
            share = (at[known] - left)[:, None]
            made = _encoding(column.places, column.bounds is not None).T
            right = np.minimum(left + 1, column.places - 1)
            rows = made[left] * ((1.0 - share) * self.weight)
            between = np.flatnonzero(share[:, 0])
            rows[between] += made[right[between]] * (share[between] * self.weight)
            found[known, part.start : part.stop - 1] = rows
        return found

    def read(self, total: NDArray[np.float64], samples: int, noise_std: float) -> list[PlaceCounts]:
        """The counts of each column in a sum of rows of so many samples, with ``noise_std`` in every value of it."""
        found = []
        for column, part in self._parts:
            decoded, spread = _decoding(column.places, column.bounds is not None)
            counts = decoded @ total[part] / self.weight
            # All counts add up to a public number: what the noise says otherwise is taken out where it is likeliest.
            pull = spread.sum(axis=1)
            counts += pull * ((samples - counts.sum()) / pull.sum())
            covariance = spread - np.outer(pull, pull) / pull.sum()
            found.append(PlaceCounts(counts, covariance * (noise_std / self.weight) ** 2))
        return found


@lru_cache(maxsize=64)
def _encoding(places: int, number: bool) -> NDArray[np.float64]:
    """The columns c_j or e_j, shape (places, places)."""
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
    """The inverse of the encoding with the place of no value, and the covariance of counts for noise of 1."""
    inverse = np.eye(places + 1)
    if number:
        inverse[:-1, :-1] = solve_triangular(_encoding(places, number), np.eye(places), lower=True)
    return inverse, inverse @ inverse.T


def statistics_policy(mu: float = 0.0, *, mechanism: str = "", **fields: Any) -> PrivacyPolicy:
    """The policy of a machine's statistics: every record's row, once, in a session of its own.

    ``mechanism`` is ``none`` for a simulation without noise; ``fields`` are others of
    :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``budget_mu``, or ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one record of this machine, and
    whatever the session is called, another one takes the same from the budget again: everything that is read from it,
    of however many columns, is post-processing. It stands alone and takes every record of the machine.
    Proof: docs/proofs/sensitivities.md.
    """
    return evaluation_policy(mu, mechanism=mechanism, **fields)
