r"""Private shuffled gradients with public data, the client's half (jiang-2026, algorithms 1 and 5; ALGORITHMS 5).

A client gets x_1, takes n_d steps on samples of its own in the epoch's order and then n - n_d on public ones,

    x_{i+1} = x_i - eta (clip_S(grad f(x_i; d_{pi(i)})) + rho_i)      i = 1 .. n_d
    x_{i+1} = x_i - eta (clip_S(grad f(x_i; p_{i - n_d})) + rho_i)    i = n_d + 1 .. n

and releases only the end, as v = (x_1 - x_{n+1}) / eta. Without public samples this is DP-ShuffleG; with them it is
Interleaved. Priv-Pub and Pub-Priv are DP-ShuffleG in some epochs, and the server by itself in the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError
from ..privacy.ledger.ledger_records import Ledger
from ..privacy.noise import NoiseKeys
from ..privacy.release.ledgered_privatizer import Release
from ..privacy.release.policy import NO_NOISE, PrivacyPolicy
from ..privacy.release.prefix_sums import RowCache
from ..privacy.release.shuffled_privatizer import (
    ITERATION_ROUNDING,
    ORDERS,
    Order,
    ShuffledPolicy,
    ShuffledPrivatizer,
    epoch_order,
    noisy_epoch,
)
from ..privacy.sums.masking import Masking
from .adapters.per_sample_gradients import CarefulGradients, PerSampleGradients, Samples, gradients_at
from .online_client import (
    FURTHER_ROUNDINGS,
    LARGEST_POINT,
    UNIT_ROUNDOFF,
    LocalStepsClient,
    check_steps,
    longest_gradient,
)
from .private_client import PrivateClient, Request
from .queries import ClientQuery


class ShuffledClient(LocalStepsClient):
    """A client of shuffled gradient methods, for :class:`~murmurfl.strategies.ShuffledAvg`.

    Parameters
    ----------
    gradients : PerSampleGradients
        The model's per-sample gradients.
    samples : Samples
        The client's data; used in order, each sample once.
    policy : ShuffledPolicy
        The client's own decisions. Its batch_size is the number of samples.
    ledger : Ledger
        Where releases are recorded before they leave.
    keys : NoiseKeys
        The client's noise key.
    name : str
        The client's public name, such as its partition id.
    learning_rate : float
        eta of the local steps: the client's own, for a server that chose it could void the guarantee.
    public : Samples, optional
        Public samples, of which the first public_steps end every epoch; the same whatever the client's own are.
    order : {"IG", "SO", "RR"}
        The same order in every epoch, shuffled once, or shuffled anew in every epoch.
    order_seed : int
        Seed of the orders; not secret.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.Privatizer`).
    masking : Masking, optional
        The client's masks; required under ``trust="secure-aggregation"``, and refused otherwise.
    queries : sequence of ClientQuery
        What it answers in addition to the training (:class:`~murmurfl.clients.PrivateClient`).

    Notes
    -----
    **Formal guarantees.** The releases of a session are mu-GDP, those of all sessions budget_mu-GDP, for replacement of
    one of the client's own samples. With public steps under ``amplified``: provided the model's declaration is true
    (:class:`~murmurfl.clients.ConvexSmoothGradients`) and a gradient that cannot be computed is the fault of its sample
    alone.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, ShuffledPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = ShuffledPolicy(clip_norm=1.0, batch_size=20, max_participations=5, mu=1.0, accounting="composed")
    >>> ledger, keys = MemoryLedger(), SimulatedKeys(1, "3")
    >>> client = ShuffledClient(gradients, samples, policy, ledger, keys, name="3", learning_rate=0.1)
    >>> client.statement("session")["mu-guaranteed"]
    1.0
    """

    privatizer_type: ClassVar[type[ShuffledPrivatizer]] = ShuffledPrivatizer  # type: ignore[assignment]
    answers_queries: ClassVar[bool] = False
    privatizer: ShuffledPrivatizer

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
        masking: Masking | None = None,
        queries: Sequence[ClientQuery] = (),
    ) -> None:
        if order not in ORDERS:
            raise ConfigurationError(
                f"Expected order one of {ORDERS}, got {order!r}.", kind="unknown-name", setting="order", got=order
            )
        if policy.public_steps > (0 if public is None else len(public)):
            raise ConfigurationError(
                f"Expected {policy.public_steps} public samples, got {0 if public is None else len(public)}.",
                kind="mismatch",
                setting="public",
            )
        if policy.batch_size != len(samples):
            raise ConfigurationError(
                f"Expected batch_size = {len(samples)}, the samples, got {policy.batch_size}.",
                kind="mismatch",
                setting="batch_size",
                got=policy.batch_size,
            )
        super().__init__(
            gradients,
            samples,
            policy,
            ledger,
            keys,
            name=name,
            learning_rate=learning_rate,
            rows=rows,
            masking=masking,
            queries=queries,
        )
        self._farthest = self._farthest_start()
        self.public = public
        self.order: Order = order
        self.order_seed = order_seed

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        if isinstance(policy, ShuffledPolicy) and _is_amplified(policy):
            check_amplified(gradients, self.learning_rate, policy.clip_norm)

    def release(self, request: Request) -> Release:
        """Return the end of the client's next epoch, as v.

        Refused if rounding at its start could undo the guarantee.
        """
        start, policy = self._start_of(request, "starting point"), self.privatizer.policy

        def epoch(release: int, noise: Iterator[NDArray[np.float64]] | None) -> NDArray[np.float64]:
            # The number of samples is the one the client was made with: asked again, their source might fail.
            order = epoch_order(self.order, self.privatizer.num_samples, self.order_seed, release)
            gradient = self._gradient_in(order[: policy.private_steps].tolist())
            rate, clip_norm = self.learning_rate, policy.clip_norm
            with np.errstate(all="ignore"):
                return noisy_epoch(gradient, start, policy.steps, learning_rate=rate, clip_norm=clip_norm, noise=noise)

        return self.privatizer.release_epoch(request.session, request.ack, epoch)

    def _gradient_in(self, order: list[int]) -> Callable[[NDArray[np.float64], int], NDArray[np.floating]]:
        """Return the gradient at a point for step i of an epoch: on own samples in this order, then on public ones."""

        def gradient(point: NDArray[np.float64], i: int) -> NDArray[np.floating]:
            source, j = (self.samples, order[i]) if i < len(order) else (self.public, i - len(order))
            if self.privatizer.simulated:
                return gradients_at(self.gradients, point[None], source[j : j + 1])[0]  # type: ignore[index]
            # On a real client a sample that fails counts as zero, and the rest of the epoch stays as it is.
            careful = CarefulGradients(self.gradients, source)  # type: ignore[arg-type]
            return careful.at_points(point[None], np.array([j]))[0]

        return gradient

    def _farthest_start(self) -> float:
        """Return the largest norm of a starting point for which rounding stays within what is charged.

        Under ``amplified`` every computed step moves iterates of two worlds apart by up to 2 eta D, with D the rounding
        of a gradient and its point (:func:`~murmurfl.clients.online_client.farthest_point`). If each step's noise hides
        its own, and the noise of the last m = n - n_d + 1 steps hides the replaced sample's 2 eta S as well, then in
        units of eta the shifts are 2 S / m + 2 D in those steps and 2 D in at most n others. Relative to the exact
        account that is at most (m + n / 2) D / S <= 3/2 n D / S more. How far an epoch leads away from its start, with
        its noise, is taken off at the end.
        """
        policy = self.privatizer.policy
        if not _is_amplified(policy):
            return LARGEST_POINT
        smoothness = check_amplified(self.gradients, self.learning_rate, policy.clip_norm)
        size, longest = self.privatizer.num_parameters, longest_gradient(self.gradients, policy.clip_norm)
        rounding = 1.5 * policy.steps * (size + FURTHER_ROUNDINGS) * UNIT_ROUNDOFF
        reach = (ITERATION_ROUNDING * policy.clip_norm / rounding - longest) / smoothness
        reach -= self.learning_rate * self.privatizer.plan.largest_value * math.sqrt(size)
        if not reach > 0:
            raise ConfigurationError(
                f"Expected epochs whose rounding stays below {ITERATION_ROUNDING:g} of what is charged for accounting "
                f"'amplified', got {policy.steps} steps of {size} parameters at learning_rate {self.learning_rate:g}: "
                "lower the step, or ask for accounting 'composed'.",
                kind="out-of-range",
            )
        return min(reach, LARGEST_POINT)

    @classmethod
    def together(
        cls, clients: Sequence[PrivateClient], server_round: int, session: str, points: Sequence[Sequence[NDArray[Any]]]
    ) -> None:
        """None: these clients are few and their steps many, so they are asked one by one."""

    def statement(self, session: str) -> dict[str, Any]:
        """Return the client's figures of a session and how an epoch is mixed.

        Privacy is spent on private steps only.
        """
        policy = self.privatizer.policy
        return {
            **super().statement(session),
            "private-steps": policy.private_steps,
            "public-steps": policy.public_steps,
            "accounting": policy.accounting_used,
        }


def _is_amplified(policy: ShuffledPolicy) -> bool:
    """Return True if the guarantee rests on amplification by iteration; without noise there is nothing to amplify."""
    return policy.accounting_used == "amplified" and policy.mechanism != NO_NOISE


def check_amplified(gradients: PerSampleGradients, learning_rate: float, clip_norm: float) -> float:
    """Return L* of a model for which privacy amplification by iteration holds, for all samples; refuse any other.

    The model must declare itself convex and smooth, the step be at most 1 / L*, and clipping move no iterates apart.

    Notes
    -----
    For a convex loss with L-Lipschitz gradient and eta <= 2 / L, x -> x - eta grad f(x) moves no two points apart; the
    paper's lemma F.2 asks for eta <= 1 / L*, and so does this.
    Proof: docs/proofs/sensitivities.md.
    """
    return check_steps(
        gradients,
        learning_rate,
        clip_norm,
        most=1.0 + 1e-12,
        of="accounting 'amplified'",
        instead="'composed' with more noise",
    ).smoothness
