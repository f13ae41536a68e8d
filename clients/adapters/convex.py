"""A model's declaration that its loss is convex and smooth, with gradients of bounded length.

The guarantees of clients that take several steps before they release rest on it; the constants charge for rounding in
float64.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeGuard, runtime_checkable

from .per_sample_gradients import PerSampleGradients

LARGEST_POINT = 1e100
"""A query point beyond this could overflow a margin, and a map that meets NaN is no longer monotone."""

UNIT_ROUNDOFF = 2.0**-53
FURTHER_ROUNDINGS = 8
"""Roundings of a value besides those of a sum over the parameters: clipping, a slope, a label, one step."""


@runtime_checkable
class ConvexSmoothGradients(PerSampleGradients, Protocol):
    """Gradients of losses that are convex and smooth whatever the sample: a declaration the guarantee rests on.

    An attribute ``convex`` that is False takes it back. Gradients must be computed in float64, with no error larger
    than that of sums of at most d terms: how far away a query point may be follows from it
    (:func:`~murmurfl.clients.online_client.farthest_point`).

    Attributes
    ----------
    smoothness : float
        L: no sample's gradient changes faster, from a public bound on the samples that the model itself enforces.
    gradient_bound : float
        No sample's gradient is longer.
    clips_contractively : bool
        Whether a step along a clipped gradient still moves no two iterates apart. True for scalar generalised linear
        models (a clipped monotone function is monotone), not for softmax.

    Notes
    -----
    **Formal guarantees.** Accounts of several local steps rest on the declaration being true for every sample, whatever
    the data; nothing here can check it.
    """

    @property
    def smoothness(self) -> float: ...

    @property
    def gradient_bound(self) -> float: ...

    @property
    def clips_contractively(self) -> bool: ...


def declares_itself_convex(gradients: PerSampleGradients) -> TypeGuard[ConvexSmoothGradients]:
    """Whether a model is :class:`ConvexSmoothGradients` and does not take it back."""
    return isinstance(gradients, ConvexSmoothGradients) and getattr(gradients, "convex", True) is True


def longest_gradient(gradients: PerSampleGradients, clip_norm: float) -> float:
    """The length that the rounding of a gradient is relative to: its bound, or S where it has none."""
    bound = float(getattr(gradients, "gradient_bound", math.inf))
    return max(clip_norm, bound) if math.isfinite(bound) else clip_norm
