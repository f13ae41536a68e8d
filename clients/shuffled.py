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
    Release,
    RowCache,
    ShuffledMachine,
    ShuffledPolicy,
)
from ..privacy.shuffled import ITERATION_ROUNDING, Order, epoch_order, noisy_epoch
from .base import PrivateClient, Request
from .gradients import CarefulGradients, PerSampleGradients, Samples, flat_point, gradients_at
from .online import FURTHER_ROUNDINGS, LARGEST_POINT, UNIT_ROUNDOFF, declares_itself_convex, longest_gradient
from .requests import malformed


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
    machine_type: ClassVar[type[ShuffledMachine]] = ShuffledMachine  # type: ignore[assignment]
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
        if policy.accounting_used == "amplified" and policy.mechanism != NO_NOISE:
            check_amplified(gradients, learning_rate, policy.clip_norm)
        super().__init__(gradients, samples, policy, ledger, keys, name=name, rows=rows)
        self.learning_rate = float(learning_rate)
        self._farthest = self._farthest_start()
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
            if not np.linalg.norm(start) <= self._farthest:
                raise malformed("the starting point is too far away")
        policy = self.machine.policy

        def epoch(release: int, noise: Iterator[NDArray[np.float64]] | None) -> NDArray[np.float64]:
            # The number of samples is the one the machine was made with: asked again, their source might fail.
            order = epoch_order(self.order, self.machine.num_samples, self.order_seed, release)[
                : policy.private_steps
            ].tolist()

            def gradient(point: NDArray[np.float64], i: int) -> NDArray[np.floating]:
                source, j = (self.samples, order[i]) if i < len(order) else (self.public, i - len(order))
                if self.machine.simulated:
                    return gradients_at(self.gradients, point[None], source[j : j + 1])[0]  # type: ignore[index]
                careful = CarefulGradients(self.gradients, source)  # type: ignore[arg-type]
                return careful.at_points(point[None], np.array([j]))[0]

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

    def _farthest_start(self) -> float:
        """How far from the origin a starting point may be for rounding to stay within what is charged.

        Under ``amplified`` every computed step moves iterates of two worlds apart by up to 2 eta D, with D the rounding
        of a gradient and its point (:func:`~murmurfl.clients.online.farthest_point`). If each step's noise hides its
        own, and the last m = n - n_d + 1 the replaced sample's 2 eta S as well, then in units of eta the shifts are
        2 S / m + 2 D in those and 2 D in at most n others: relative to the exact account no more than
        (m + n / 2) D / S <= 3/2 n D / S. An epoch's own steps, with their noise, lead away from the start.
        """
        policy = self.machine.policy
        if policy.accounting_used != "amplified" or policy.mechanism == NO_NOISE:
            return LARGEST_POINT
        smoothness = check_amplified(self.gradients, self.learning_rate, policy.clip_norm)
        size, longest = self.machine.num_parameters, longest_gradient(self.gradients, policy.clip_norm)
        rounding = 1.5 * policy.steps * (size + FURTHER_ROUNDINGS) * UNIT_ROUNDOFF
        reach = (ITERATION_ROUNDING * policy.clip_norm / rounding - longest) / smoothness
        reach -= self.learning_rate * self.machine.plan.largest_value * math.sqrt(size)
        if not reach > 0:
            raise ConfigurationError(
                f"Expected epochs whose rounding stays below {ITERATION_ROUNDING:g} of what is charged for accounting "
                f"'amplified', got {policy.steps} steps of {size} parameters at learning_rate {self.learning_rate:g}: "
                "lower the step, or ask for accounting 'composed'."
            )
        return min(reach, LARGEST_POINT)

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
    if not declares_itself_convex(gradients):
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
