r"""The share of gradients that are clipped, a query around another one: a clip inside the budget is found by it.

A clip C that fits the gradients' lengths is worth much and not known beforehand. So beside a sample's gradient g a row
has a mark, whether g is within C (Andrew, Thakkar, Ramaswamy and McMahan 2021):

    ( sqrt(1 - q) g / max(C, ||g||),    sqrt(q) (+1 if ||g|| <= C, else -1) ).

No row is longer than 1, whatever C is. So the client's ordinary clip of the whole row, to S = 1, cuts nothing, and one
noise of Delta = 2 covers both parts; the marks have the share q of mu^2. Whoever sums rows reads the mean clipped
gradient at C, and the share of gradients within C; the next C is raised or lowered towards the share that is wanted:

    C <- C exp(-rate (share - wanted)).

C is a public number of the query point and no privacy parameter: it is the server's, and may be anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..release.clipping import LEAST_STABILITY, bounded_scales

QUANTILE_SHARE = 0.02
"""The share of mu^2 spent on how many gradients are clipped."""
COUNTED_CLIP_NORM = 1.0
"""S of a client that counts: rows are made for it."""


@dataclass(frozen=True)
class CountedRows:
    """Rows of a gradient and a mark; the marks have a ``share`` of mu^2: q, 0 < q < 1.

    Notes
    -----
    **Formal guarantees.** For replacement of one sample: a row depends on its sample and on C, which is public, and is
    no longer than 1 for every C, if lengths are true up to a relative error of 2^-41, or lost to rounding below 1e-150.
    A client clips the whole row to S = 1 besides, and mu of a release covers all of it. The marks alone are sqrt(q)
    mu-GDP, for two of them are 2 sqrt(q) apart.
    Proof: docs/proofs/sensitivities.md.
    """

    share: float = QUANTILE_SHARE

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise ConfigurationError(
                f"Expected a share of mu^2 above 0 and below 1, got {self.share!r}.",
                kind="out-of-range",
                setting="share",
                got=self.share,
            )

    def scales(self, norms: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
        """Factors for gradients of these lengths; NaN where there is none, and the row becomes zero."""
        at = _believed(clip)
        with np.errstate(all="ignore"):
            return math.sqrt(1.0 - self.share) * bounded_scales(norms, at) / at

    def marks(self, norms: NDArray[np.float64], clip: float) -> NDArray[np.float64]:
        """Return the last value of the rows of gradients of these lengths."""
        mark = math.sqrt(self.share)
        with np.errstate(all="ignore"):
            return np.where(norms <= _believed(clip), mark, -mark)

    def read(self, mean: NDArray[np.float64], clip: float) -> tuple[NDArray[np.float64], float]:
        """Return the mean clipped gradient at C, and the share of gradients within C, from the mean of rows.

        Rows were made at ``clip``, and the mean has noise; the share is brought back to 0 .. 1.
        """
        within = 0.5 * (1.0 + float(mean[-1]) / math.sqrt(self.share))
        return clip / math.sqrt(1.0 - self.share) * mean[:-1], min(max(within, 0.0), 1.0)


def _believed(clip: float) -> float:
    """Return a clip no shorter than lengths can be told: over a shorter one a gradient of lost length would be long."""
    return clip if math.isnan(clip) else max(clip, LEAST_STABILITY)
