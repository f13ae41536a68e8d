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
Proof: docs/proofs/grid-and-noise.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError

# Rounded values stay below this. A sum may be four times as large and is still exact in float64, the type in which a
# release is sent.
_LARGEST_COUNT = 2.0**51
_ROUNDER = np.float64(1.5 * 2.0**52)
MARK = _ROUNDER.view(np.int64)
"""Marked counts are too large by this much (:meth:`Grid.marked`)."""


@dataclass(frozen=True)
class Grid:
    """The multiples of ``spacing``, gamma, a positive power of two."""

    spacing: float

    def __post_init__(self) -> None:
        if not (self.spacing > 0 and math.isfinite(self.spacing) and math.frexp(self.spacing)[0] == 0.5):
            raise ConfigurationError(f"Expected a grid spacing that is a positive power of two, got {self.spacing!r}.")

    def counts(
        self, values: NDArray[np.floating], *, scale: float = 1.0, bound: float | None = None
    ) -> NDArray[np.int64]:
        """Nearest multiples of the spacing to ``scale`` times finite values, as int64 counts.

        With a ``bound`` the caller knows that no value exceeds it in magnitude. Without it every value is looked at,
        and one that is too large for the grid is an error: callers bound their values beforehand.
        """
        return self.rounded(np.asarray(values * self.factor(scale)), None if bound is None else bound * scale)

    def factor(self, scale: float) -> np.float64:
        """The factor from a value to ``scale`` times it in units of the spacing; a power of two loses no digit."""
        return np.float64(scale / self.spacing)

    def rounded(self, scaled: NDArray[np.float64], bound: float | None = None) -> NDArray[np.int64]:
        """Counts of values that are in units of the spacing already, written over the values.

        ``bound`` is as for :meth:`counts`: a value, not in units of the spacing.
        """
        counts = self.marked(scaled, bound)
        counts -= MARK
        return counts

    def marked(
        self, scaled: NDArray[np.floating], bound: float | None = None, *, in_place: bool = True
    ) -> NDArray[np.int64]:
        """The counts of :meth:`rounded`, all too large by ``MARK``, which cancels in the difference of two of them.

        Values that are not to be overwritten (``in_place`` False) may be of another real dtype, and are converted.
        """
        if bound is not None:
            fits = bound / self.spacing < _LARGEST_COUNT
        else:
            # Also false for NaN. This must stop loudly: a wrapped integer would be a wrong release that nobody notices.
            fits = not scaled.size or (scaled.max() < _LARGEST_COUNT and scaled.min() > -_LARGEST_COUNT)
        if not fits:
            raise ConfigurationError(
                "Expected finite values below 2^51 grid spacings; clip before rounding to the grid."
            )
        # In [2^52, 2^53) the spacing of float64 is 1: adding 1.5 x 2^52 rounds to the nearest integer, ties to even as
        # rint does, and leaves that integer in the low bits. Twice as fast as rounding and converting.
        if scaled.dtype != np.float64:
            scaled, in_place = scaled.astype(np.float64), True
        scaled = np.add(scaled, _ROUNDER, out=scaled if in_place else None)
        return scaled.view(np.int64)

    def values(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The numbers behind int64 counts, exact in float64 up to 2^53 spacings."""
        values = counts.astype(np.float64)  # first: converting and multiplying in one goes in small pieces
        values *= self.spacing
        return values

    def charge(self, num_parameters: int) -> float:
        """The addition of rounding to the sensitivity: gamma sqrt(d)."""
        return self.spacing * math.sqrt(num_parameters)


def power_of_two_at_most(value: float) -> float:
    """The largest power of two that is at most ``value`` (> 0)."""
    return math.ldexp(0.5, math.frexp(value)[1])
