r"""Online federated learning with local steps, the learner's half (zhang-2025, algorithm 1; ALGORITHMS 3.1).

A machine gets x^r, takes tau samples it has never used before, and makes one local step with each:

    z^{r,0} = x^r,    z^{r,t+1} = z^{r,t} - eta grad f^{r,t}(z^{r,t}),    g = (1 / tau) sum_t grad f^{r,t}(z^{r,t})

and releases g through the release rule. Replacing one sample moves its own gradient and, through the iterates, every
later gradient of the round. The paper's sensitivity 2 B / tau (lemma IV.8) leaves the second part out, which is right
only where steps never move two iterates apart; so there are two kinds of clipping, and the safe one is the default of
whoever builds a policy for this client:

``update``
    The whole g is clipped to S: Delta = 2 S, for any model without state of its own from round to round.
``contractive``
    Every local gradient is clipped to S: Delta = 2 S / tau. Refused unless the model declares itself convex and smooth,
    eta <= 2 / L, and clipping either keeps the step non-expansive or never changes anything.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, Ledger, NoiseKeys, PrivacyPolicy, RefusedError, RowCache, protocol
from ..privacy.clipping import clip_contributions
from ..privacy.cohort import DenseContributions, StackedContributions
from .base import PrivateClient, Request, Together
from .gradients import PerSampleGradients, Samples, flat_point, gradients_at, pick

logger = logging.getLogger(__name__)

# A query point beyond this could overflow a margin, and NaN is where monotone maps end.
_LARGEST_POINT = 1e100

# Machines go together as long as their iterates stay in a processor's cache.
_VALUES_TOGETHER = 1 << 16


@runtime_checkable
class ConvexSmoothGradients(PerSampleGradients, Protocol):
    """Gradients of losses that are convex and smooth whatever the sample: a declaration the guarantee rests on.

    Attributes
    ----------
    smoothness : float
        L: no sample's gradient changes faster, from a public bound on the samples that the model itself enforces.
    gradient_bound : float
        No sample's gradient is longer.
    clips_contractively : bool
        Whether a step along a clipped gradient still moves no two iterates apart. True for scalar generalised linear
        models (a clipped monotone function is monotone), not for softmax.
    """

    @property
    def smoothness(self) -> float: ...

    @property
    def gradient_bound(self) -> float: ...

    @property
    def clips_contractively(self) -> bool: ...


def local_updates(
    gradients: PerSampleGradients,
    start: NDArray[np.floating],
    samples: Any,
    learning_rates: NDArray[np.float64],
    *,
    clip_norm: float | None = None,
) -> NDArray[np.float64]:
    """The mean gradient along tau local steps of each of several machines: pure.

    Parameters
    ----------
    gradients : PerSampleGradients
    start : ndarray of shape (d,)
        x^r.
    samples : Any
        tau samples of each machine, machine after machine.
    learning_rates : ndarray of shape (machines, tau)
        eta of every step.
    clip_norm : float, optional
        Clip every local gradient to this norm; one that is not finite becomes zero.

    Returns
    -------
    ndarray of shape (machines, d), float64
        g, accumulated as a sum of gradients and not as a difference of iterates.
    """
    machines, steps = learning_rates.shape
    start = np.asarray(start, dtype=np.float64)
    means = np.zeros((machines, start.size))
    together = max(_VALUES_TOGETHER // max(start.size, 1), 1)
    for first in range(0, machines, together):
        total, rates = means[first : first + together], learning_rates[first : first + together]
        iterates = np.tile(start, (len(total), 1))
        step = np.empty_like(iterates)
        for t in range(steps):
            chosen = slice(first * steps + t, (first + len(total)) * steps, steps)
            rows = gradients_at(gradients, iterates, pick(samples, chosen))
            if clip_norm is not None:
                rows = clip_contributions(rows, clip_norm)
            total += rows
            if t + 1 < steps:
                iterates -= np.multiply(rates[:, t, None], rows, out=step)
        total /= steps
    return means


class OnlineClient(PrivateClient):
    """A learner of locally private online FL, for :class:`~murmurfl.strategies.OnlineFedSGD`.

    Parameters
    ----------
    gradients, samples, policy, ledger, keys, name, rows
        See :class:`~murmurfl.clients.base.PrivateClient`. The policy's batch_size is tau and its clip_unit ``update``
        or ``contractive``.
    learning_rate : float
        eta of the local steps: the machine's own, for a server that chose it could void the guarantee.

    Raises
    ------
    ConfigurationError
        If the policy clips samples, or is ``contractive`` for a model or a step it does not hold for.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.clients.base.PrivateClient`, for replacement of one sample. With
    ``update``: provided nothing but the samples of the round and the query point goes into the gradients. With
    ``contractive``: provided also that the model's declaration is true (:class:`ConvexSmoothGradients`) and that a
    gradient that cannot be computed is the fault of its sample alone.
    """

    query_points: ClassVar[int] = 1

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        learning_rate: float,
        rows: RowCache | None = None,
    ) -> None:
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ConfigurationError(f"Expected learning_rate > 0 and finite, got {learning_rate!r}.")
        if policy.clip_unit == "sample":
            raise ConfigurationError("Expected clip_unit 'update' or 'contractive' for local steps, got 'sample'.")
        if policy.clip_unit == "contractive":
            check_contractive(gradients, learning_rate, policy.clip_norm)
        super().__init__(gradients, samples, policy, ledger, keys, name=name, rows=rows)
        self.learning_rate = float(learning_rate)

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        """G of this round, shape (1, d)."""
        start = _checked_start(request.query_points[0])
        gradients = self.gradients if self.machine.simulated else CarefulGradients(self.gradients)
        return _updates([self], gradients, start, samples)

    @classmethod
    def together(
        cls,
        clients: Sequence[PrivateClient],
        server_round: int,  # noqa: ARG003 - local steps are the same in every round
        session: str,  # noqa: ARG003
        points: Sequence[Sequence[NDArray[Any]]],
    ) -> Together | None:
        if cls.contribution is not OnlineClient.contribution:
            return None
        start = flat_point(points[0])
        learners = [client for client in clients if isinstance(client, OnlineClient)]

        def contributions(positions: Sequence[int], samples: Any) -> StackedContributions:
            with np.errstate(all="ignore"):
                return DenseContributions(
                    _updates([learners[i] for i in positions], learners[0].gradients, start, samples)
                )

        return Together(contributions)

    def _read(self, parameters: Sequence[NDArray[Any]], config: Any) -> Request:
        request = super()._read(parameters, config)
        _checked_start(request.query_points[0])
        return request


def _updates(
    learners: Sequence[OnlineClient], gradients: PerSampleGradients, start: NDArray[np.float64], samples: Any
) -> NDArray[np.float64]:
    policy = learners[0].machine.policy
    rates = np.repeat([[learner.learning_rate] for learner in learners], policy.batch_size, axis=1)
    clip_norm = policy.clip_norm if policy.clip_unit == "contractive" else None
    return local_updates(gradients, start, samples, rates, clip_norm=clip_norm)


def _checked_start(point: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    start = flat_point(point)
    if np.abs(start).max(initial=0.0) > _LARGEST_POINT:
        raise RefusedError(protocol.MALFORMED_REQUEST, "malformed request: the query point is too large")
    return start


class CarefulGradients:
    """Gradients of a real machine: a sample they fail on has gradient zero, so that it moves the update no further."""

    def __init__(self, gradients: PerSampleGradients) -> None:
        self._gradients = gradients
        self.shapes = gradients.shapes

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        return self._gradients(parameters, samples)

    def at_points(self, points: NDArray[np.floating], samples: Any) -> NDArray[np.floating]:
        try:
            return gradients_at(self._gradients, points, samples)
        except Exception:
            logger.exception("The gradient of a sample could not be computed; it counts as zero.")
            return np.zeros_like(points)


def check_contractive(gradients: PerSampleGradients, learning_rate: float, clip_norm: float) -> None:
    """Refuse the ``contractive`` sensitivity where it would not hold.

    Raises
    ------
    ConfigurationError
        If the model does not declare itself convex and smooth, learning_rate > 2 / L, or clipping could change a
        gradient and thereby move iterates apart.

    Notes
    -----
    **Formal guarantees.** For a convex loss with L-Lipschitz gradient and eta <= 2 / L, z -> z - eta grad f(z) moves no
    two points apart (Hardt, Recht and Singer 2016, lemma 3.7). So replacing sample t moves the iterate by at most
    2 eta S after its step and no further, and g by at most 2 S / tau.
    """
    if not isinstance(gradients, ConvexSmoothGradients):
        raise ConfigurationError(
            f"Expected a model that declares itself convex and smooth for clip_unit 'contractive', got "
            f"{type(gradients).__name__}: use 'update', which needs no such thing."
        )
    if not (gradients.smoothness > 0 and learning_rate * gradients.smoothness <= 2.0):
        raise ConfigurationError(
            f"Expected learning_rate <= 2 / L = {2.0 / gradients.smoothness:g} for clip_unit 'contractive', got "
            f"{learning_rate:g}; lower it, or use 'update'."
        )
    if clip_norm < gradients.gradient_bound and not gradients.clips_contractively:
        raise ConfigurationError(
            f"Expected clip_norm >= {gradients.gradient_bound:g}, the model's gradient bound, for clip_unit "
            f"'contractive', got {clip_norm:g}: a clipped step of this model can move iterates apart."
        )
