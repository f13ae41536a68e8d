"""The fixed grid on which private sums are kept, as int64 counts of its spacing.

Floating-point noise added to a floating-point value leaks: the gaps between representable numbers depend on the value
(Mironov 2012). So contributions and noise are each rounded to multiples of one public spacing ``gamma``, a power of
two, and everything after that is exact integer arithmetic: sums do not depend on their order, noise cancels to the last
bit, and the difference of two private prefixes is exact.

Formal guarantees
-----------------
round(x) + round(noise) = round(x' + noise) for x' on the grid: a release on the grid is a function of the real-valued
Gaussian mechanism applied to the rounded contributions. Rounding moves every coordinate of a contribution by at most
gamma / 2, so replacing one sample changes a rounded sum by at most Delta + gamma sqrt(d), which is what is charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError

# Counts up to here are exact in float64, so a release is sent as float64 without rounding.
_EXACT_COUNT = 2.0**53


@dataclass(frozen=True)
class Grid:
    """Multiples of ``spacing``.

    Parameters
    ----------
    spacing : float
        gamma, a positive power of two.
    """

    spacing: float

    def __post_init__(self) -> None:
        if not (self.spacing > 0 and math.isfinite(self.spacing) and math.frexp(self.spacing)[0] == 0.5):
            raise ConfigurationError(f"Expected a grid spacing that is a positive power of two, got {self.spacing!r}.")

    def counts(self, values: NDArray[np.floating]) -> NDArray[np.int64]:
        """Nearest multiples of the spacing, as int64 counts; values of any shape, finite.

        Raises
        ------
        ConfigurationError
            If a value is not finite or too large for the grid: callers bound their values beforehand.
        """
        scaled = values * np.float64(1.0 / self.spacing)
        np.rint(scaled, out=scaled)
        # Also false for NaN. A loud stop: a wrapped integer would be a silent wrong release.
        if scaled.size and not (scaled.max() < _EXACT_COUNT and scaled.min() > -_EXACT_COUNT):
            raise ConfigurationError(
                "Expected finite values below 2^53 grid spacings; clip before rounding to the grid."
            )
        return scaled.astype(np.int64)

    def values(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The numbers behind int64 counts, exact in float64 up to 2^53 spacings."""
        return counts * np.float64(self.spacing)

    def charge(self, num_parameters: int) -> float:
        """What rounding adds to the sensitivity: gamma sqrt(d)."""
        return self.spacing * math.sqrt(num_parameters)


def power_of_two_at_most(value: float) -> float:
    """The largest power of two that is at most ``value`` (> 0)."""
    return math.ldexp(0.5, math.frexp(value)[1])
