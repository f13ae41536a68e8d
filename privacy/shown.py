"""Figures of a guarantee for people: rounded up, so that nobody reads a smaller one than the one that holds."""

from __future__ import annotations

import math
from decimal import Decimal

_DIGITS = 4
_ROUNDING = 1e-9


def rounded_up(value: float, digits: int = _DIGITS, *, places: int | None = None) -> str:
    """A mu or an epsilon for people, never below what it is.

    Parameters
    ----------
    value : float
    digits : int
        Significant digits.
    places : int, optional
        Decimal places in their stead.

    Examples
    --------
    >>> rounded_up(24.3812), rounded_up(4.0), rounded_up(4.371, places=2), rounded_up(float("inf"))
    ('24.39', '4', '4.38', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    shown = Decimal(f"{value:.{digits - 1}e}" if places is None else f"{value:.{places}f}")
    if float(shown) < value * (1 - _ROUNDING):  # beyond what rounding in float64 may have added
        shown += Decimal((0, (1,), shown.adjusted() - digits + 1 if places is None else -places))
    return f"{float(shown):.{digits}g}" if places is None else f"{shown:.{places}f}"
