r"""Private shuffled gradients with public data, the silo's half (jiang-2026, algorithm 1 and 5; ALGORITHMS section 5).

A silo gets x_1, takes n_d steps on samples of its own in the epoch's order and then n - n_d on public ones,

    x_{i+1} = x_i - eta (clip_S(grad f(x_i; d_{pi(i)})) + rho_i)      i = 1 .. n_d
    x_{i+1} = x_i - eta (clip_S(grad f(x_i; p_{i - n_d})) + rho_i)    i = n_d + 1 .. n

and releases the end alone, as v = (x_1 - x_{n+1}) / eta. Without public samples this is DP-ShuffleG; Priv-Pub and
Pub-Priv are DP-ShuffleG in some epochs and the server by itself in the others; with them it is Interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import (
    NO_NOISE,
    ORDERS,
    ConfigurationError,
    Ledger,
    NoiseKeys,
    PrivateMachine,
    RefusedError,
    Release,
    RowCache,
    ShuffledMachine,
    ShuffledPolicy,
    protocol,
)
from ..privacy.shuffled import ITERATION_ROUNDING, Order, epoch_order, noisy_epoch
from .base import PrivateClient, Request
from .gradients import PerSampleGradients, Samples, flat_point, gradients_at
from .online import CarefulGradients, ConvexSmoothGradients


class ShuffledClient(PrivateClient):
    """A silo of shuffled gradient methods, for :class:`~murmurfl.strategies.ShuffledAvg`.

    Parameters
    ----------
    gradients, samples, ledger, keys, name, rows
        See :class:`~murmurfl.clients.base.PrivateClient`.
    policy : ShuffledPolicy
        Its batch_size is the number of samples.
    learning_rate : float
        eta: the silo's own, for a server that chose it could void the guarantee.
    public : Samples, optional
        Public samples, of which the first public_steps end every epoch; the same whatever the silo's own samples are.
    order : {"IG", "SO", "RR"}
    order_seed : int
        What the orders are made from; not secret.

    Raises
    ------
    ConfigurationError
        If there are too few public samples, or the policy is ``amplified`` for a model or a step it does not hold for.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.privacy.ShuffledMachine`, for replacement of one of the silo's own
    samples. With public steps under ``amplified``: provided the model's declaration is true
    (:class:`~murmurfl.clients.ConvexSmoothGradients`) and a gradient that cannot be computed is the fault of its sample
    alone.
    """

    query_points: ClassVar[int] = 1
    machine_type: ClassVar[type[PrivateMachine]] = ShuffledMachine
    machine: ShuffledMachine

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: ShuffledPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
        learning_rate: float,
        public: Samples | None = None,
        order: Order = "RR",
        order_seed: int = 0,
        rows: RowCache | None = None,
    ) -> None:
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ConfigurationError(f"Expected learning_rate > 0 and finite, got {learning_rate!r}.")
        if order not in ORDERS:
            raise ConfigurationError(f"Expected order one of {ORDERS}, got {order!r}.")
        if policy.public_steps > (0 if public is None else len(public)):
            raise ConfigurationError(
                f"Expected {policy.public_steps} public samples, got {0 if public is None else len(public)}."
            )
        if policy.batch_size != len(samples):
            raise ConfigurationError(f"Expected batch_size = {len(samples)}, the samples, got {policy.batch_size}.")
        self._farthest = math.inf
        if policy.accounting_used == "amplified" and policy.mechanism != NO_NOISE:
            smoothness = check_amplified(gradients, learning_rate, policy.clip_norm)
            rounding = smoothness * policy.steps * (sum(map(math.prod, gradients.shapes)) + 2) * 2.0**-53
            self._farthest = ITERATION_ROUNDING * 2.0 * policy.clip_norm / rounding
        super().__init__(gradients, samples, policy, ledger, keys, name=name, rows=rows)
        self.learning_rate = float(learning_rate)
        self.public = public
        self.order: Order = order
        self.order_seed = order_seed

    def release(self, request: Request) -> Release:
        """The end of the silo's next epoch, as v.

        Raises
        ------
        RefusedError
            If the starting point is so far away that rounding could undo the guarantee, or the policy forbids it.

        Notes
        -----
        **Formal guarantees.** Those of the class.
        """
        start = flat_point(request.query_points[0])
        with np.errstate(over="ignore"):
            if not np.linalg.norm(start) <= min(self._farthest, 1e100):
                raise RefusedError(protocol.MALFORMED_REQUEST, "malformed request: the starting point is too far away")
        policy = self.machine.policy
        gradients = self.gradients if self.machine.simulated else CarefulGradients(self.gradients)

        def epoch(release: int, noise: Iterator[NDArray[np.float64]] | None) -> NDArray[np.float64]:
            order = epoch_order(self.order, len(self.samples), self.order_seed, release)[
                : policy.private_steps
            ].tolist()

            def gradient(point: NDArray[np.float64], i: int) -> NDArray[np.floating]:
                source, j = (self.samples, order[i]) if i < len(order) else (self.public, i - len(order))
                return gradients_at(gradients, point[None], source[j : j + 1])[0]  # type: ignore[index]

            with np.errstate(all="ignore"):
                return noisy_epoch(
                    gradient,
                    start,
                    policy.steps,
                    learning_rate=self.learning_rate,
                    clip_norm=policy.clip_norm,
                    noise=noise,
                )

        return self.machine.release_epoch(request.session, request.ack, epoch)

    @classmethod
    def together(
        cls, clients: Sequence[PrivateClient], server_round: int, session: str, points: Sequence[Sequence[NDArray[Any]]]
    ) -> None:
        """None: silos are few and their steps many, so they are asked one by one."""

    def statement(self, session: str) -> dict[str, Any]:
        """As :meth:`PrivateClient.statement`, and how an epoch is mixed: only private steps are what is spent on."""
        policy = self.machine.policy
        return {
            **super().statement(session),
            "private-steps": policy.private_steps,
            "public-steps": policy.public_steps,
            "accounting": policy.accounting_used,
        }


def check_amplified(gradients: PerSampleGradients, learning_rate: float, clip_norm: float) -> float:
    """Refuse privacy amplification by iteration where it would not hold.

    Returns
    -------
    float
        L*, which covers private and public samples alike.

    Raises
    ------
    ConfigurationError
        If the model does not declare itself convex and smooth, learning_rate > 1 / L*, or clipping could change a
        gradient and thereby move iterates apart.

    Notes
    -----
    **Formal guarantees.** For a convex loss with L-Lipschitz gradient and eta <= 2 / L, x -> x - eta grad f(x) moves no
    two points apart; the paper's lemma F.2 asks for eta <= 1 / L*, and so does this.
    Proof: docs/proofs/sensitivities.md.
    """
    instead = "lower the step, or ask for accounting 'composed', which needs no such thing and more noise"
    if not isinstance(gradients, ConvexSmoothGradients):
        raise ConfigurationError(
            f"Expected a model that declares itself convex and smooth for accounting 'amplified', got "
            f"{type(gradients).__name__}: use 'composed', which needs no such thing and more noise."
        )
    if not (gradients.smoothness > 0 and learning_rate * gradients.smoothness <= 1.0 + 1e-12):
        raise ConfigurationError(
            f"Expected learning_rate <= 1 / L* = {1.0 / gradients.smoothness:g} for accounting 'amplified', got "
            f"{learning_rate:g}: {instead}."
        )
    if clip_norm < gradients.gradient_bound and not gradients.clips_contractively:
        raise ConfigurationError(
            f"Expected clip_norm >= {gradients.gradient_bound:g}, the model's gradient bound, for accounting "
            f"'amplified', got {clip_norm:g}: a clipped step of this model can move iterates apart; use 'composed'."
        )
    return gradients.smoothness
