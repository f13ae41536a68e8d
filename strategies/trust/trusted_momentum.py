r"""The base of private momentum with a trusted server (tran-cutkosky-2022; ALGORITHMS section 4).

Machines send clipped gradients without noise, all of them in every round, and go through their samples in the same
order in every epoch of N rounds. The server publishes w_{t+1} = w_t - eta m^_t / ||m^_t||, m^_t a private momentum.
"""

from __future__ import annotations

from typing import Any, ClassVar, Required, TypeVar, Unpack

import numpy as np

from ...privacy import ConfigurationError, NoiseKeys, PrivacyPolicy
from ..projected import check_step
from ..rounds.attendance import LateAnswers
from ..rounds.layout import Vector
from ..rounds.options import ReleaseOptions
from ..rounds.replies import Reply
from ..rounds.strategy import ReleaseStrategy
from .server_trust import TrustedServer, TrustedStrategy

StateT = TypeVar("StateT")


class MomentumOptions(ReleaseOptions, total=False):
    """Options of :class:`TrustedMomentum`, where they are described."""

    learning_rate: Required[float]


def normalised_step(w: Vector, momentum: Vector, learning_rate: float) -> Vector:
    """A step of length eta against the momentum; none if that is zero."""
    length = float(np.linalg.norm(momentum))
    return w - (learning_rate / length) * momentum if length > 0 else w


class MomentumNoise(TrustedServer):
    """A trusted server's noise on a momentum of gradients in which samples return every N rounds; a base class.

    Parameters
    ----------
    policy : PrivacyPolicy
        With ``release_rule="paper"``, and as many passes (``sample_participations``) of ``min_separation`` = N releases
        as samples are used.
    num_rounds, noise_keys
        See :class:`~murmurfl.strategies.trust.server_trust.TrustedServer`.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.

    Notes
    -----
    **Formal guarantees.** Whatever of the momentum is published is mu-GDP, as :class:`TrustedMomentum` says.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(
        self, policy: PrivacyPolicy, num_rounds: int, noise_keys: NoiseKeys | None = None, *, alpha: float
    ) -> None:
        super().__init__(policy, num_rounds, noise_keys)
        if not 0 < alpha <= 1:
            raise ConfigurationError(f"Expected 0 < alpha <= 1, got {alpha!r}.")
        if policy.release_rule != "paper":
            raise ConfigurationError(
                f"Expected a policy with release_rule 'paper', got {policy.release_rule!r}: a contribution that "
                "comes later has another weight."
            )
        self.alpha = float(alpha)
        self.epoch = policy.min_separation if policy.sample_participations > 1 else num_rounds
        """N."""


class TrustedMomentum(TrustedStrategy, ReleaseStrategy[StateT]):
    """Private momentum, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`; a base class.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`. Every machine is asked in every round:
        ``clients_per_round`` is ``num_clients``.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.trust.server_trust.TrustedStrategy`. It rests on every sample taking part in rounds
    c, c + N, c + 2 N, ... only: a reply counts only if its number is the round's, so a machine that misses a request is
    left out from then on (and every machine, if the server stops between its replies and its checkpoint). Noise that
    was drawn before an interruption is the same when it is needed again. Proof: docs/proofs/sensitivities.md.
    """

    late_answers: ClassVar[LateAnswers] = "refused"  # a sample would not return after as many rounds

    def __init__(self, *, noise: MomentumNoise, learning_rate: float, **options: Unpack[ReleaseOptions]) -> None:
        self.trust = noise
        super().__init__(**options)
        check_step(learning_rate)
        self.learning_rate = float(learning_rate)
        self._momentum = {"alpha": noise.alpha, "epoch": noise.epoch}

    def _settle(self, machines: int) -> None:
        super()._settle(machines)
        if self.clients_per_round != self.num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {self.num_clients} for private momentum, got "
                f"{self.clients_per_round}: samples must return in the same rounds of every epoch."
            )

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "learning_rate": self.learning_rate, **self._momentum}

    def check_reply(self, reply: Reply) -> bool:
        return reply.release == len(self.history) + 1
