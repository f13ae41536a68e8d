"""The base of machines that take several steps of their own before they release."""

from __future__ import annotations

import math
from typing import ClassVar, Required, Unpack

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, Ledger, NoiseKeys, PrivacyPolicy
from .adapters.convex import LARGEST_POINT, ConvexSmoothGradients, declares_itself_convex
from .adapters.per_sample_gradients import PerSampleGradients, Samples, flat_point
from .messages.requests import malformed
from .private_client import ClientOptions, PrivateClient, Request


def check_steps(
    gradients: PerSampleGradients, learning_rate: float, clip_norm: float, *, most: float, of: str, instead: str
) -> ConvexSmoothGradients:
    """Return a model whose clipped steps move no two iterates apart; refuse any other.

    The model must declare itself convex and smooth, the step be at most ``most`` / L, and clipping move no iterates
    apart. Errors say what this is needed for and what to use ``instead``.

    Notes
    -----
    **Formal guarantees.** With ``most`` <= 2 a step of the model, clipped or not, moves no two iterates apart, if its
    declaration is true (:func:`~murmurfl.clients.online_client.check_contractive`).
    """
    if not declares_itself_convex(gradients):
        raise ConfigurationError(
            f"Expected a model that declares itself convex and smooth for {of}, got {type(gradients).__name__}: use "
            f"{instead}, which needs no such thing."
        )
    if not (gradients.smoothness > 0 and learning_rate * gradients.smoothness <= most):
        raise ConfigurationError(
            f"Expected learning_rate <= {most:g} / L = {most / gradients.smoothness:g} for {of}, got "
            f"{learning_rate:g}: lower it, or use {instead}."
        )
    if clip_norm < gradients.gradient_bound and not gradients.clips_contractively:
        raise ConfigurationError(
            f"Expected clip_norm >= {gradients.gradient_bound:g}, the model's gradient bound, for {of}, got "
            f"{clip_norm:g}: a clipped step of this model can move iterates apart; use {instead}."
        )
    return gradients


class LocalStepsOptions(ClientOptions, total=False):
    """Keyword options of :class:`LocalStepsClient`, where they are described."""

    learning_rate: Required[float]


class LocalStepsClient(PrivateClient):
    """A machine that takes steps of its own; a base class.

    Parameters
    ----------
    learning_rate : float
        eta of the local steps: the machine's own, for a server that chose it could void the guarantee.
    **options
        See :class:`~murmurfl.clients.PrivateClient`.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP for replacement
    of one sample, if a subclass charges how far its steps let one sample move a release. Steps are computed in float64,
    whose rounding grows with the distance from the origin; a subclass says from how far away it still answers.
    Proof: docs/proofs/sensitivities.md.
    """

    query_points: ClassVar[int] = 1
    centres: ClassVar[bool] = False

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        learning_rate: float,
        **options: Unpack[ClientOptions],
    ) -> None:
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ConfigurationError(f"Expected learning_rate > 0 and finite, got {learning_rate!r}.")
        # Before the rest: a subclass's check of its model needs them.
        self.learning_rate = float(learning_rate)
        self._farthest = LARGEST_POINT
        super().__init__(gradients, samples, policy, ledger, keys, **options)

    def _start_of(self, request: Request, called: str) -> NDArray[np.float64]:
        """The query point as one vector, or a refusal if it is too far away."""
        start = flat_point(request.query_points[0])
        if not self._reaches(start):
            raise malformed(f"the {called} is too far away")
        return start

    def _reaches(self, start: NDArray[np.float64]) -> bool:
        """Whether a point is near enough for rounding to stay within what is charged."""
        with np.errstate(over="ignore"):
            return bool(np.linalg.norm(start) <= self._farthest)
