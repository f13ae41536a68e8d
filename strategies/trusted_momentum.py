r"""What strategies of private momentum with a trusted server share (tran-cutkosky-2022; ALGORITHMS section 4).

Machines send clipped gradients without noise, all of them in every round, and go through their samples in the same
order in every epoch of N rounds. The server publishes w_{t+1} = w_t - eta m^_t / ||m^_t||, m^_t a private momentum.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import numpy as np

from ..privacy import ConfigurationError, NoiseKeys, PrivacyPolicy, SystemKeys, gdp_epsilon
from .base import ReleaseStrategy
from .mu2 import check_step
from .replies import Reply, Vector
from .trusted_mu2 import check_server_noise, could_be_honest, server_mu

StateT = TypeVar("StateT")


def normalised_step(w: Vector, momentum: Vector, learning_rate: float) -> Vector:
    """A step of length eta against the momentum; a momentum of zero moves nothing."""
    length = float(np.linalg.norm(momentum))
    return w - (learning_rate / length) * momentum if length > 0 else w


class TrustedMomentum(ReleaseStrategy[StateT], Generic[StateT]):
    """Private momentum, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`; a base class.

    Parameters
    ----------
    num_clients, seed, session, node_deadline_s, checkpoint, on_round
        See :class:`~murmurfl.strategies.base.ReleaseStrategy`; every machine is asked in every round.
    learning_rate : float
        eta > 0.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    policy : PrivacyPolicy
        What all machines were configured with: ``trust="trusted-server"``, ``release_rule="paper"``, clip and batch
        that give Delta, passes (``sample_participations``) of ``min_separation`` = N releases; its mu is the guarantee.
        With mechanism ``none`` the server adds no noise either.
    num_rounds : int
        T, the most rounds this server will ever publish a model of.
    noise_keys : NoiseKeys, optional
        The server's noise key; default one from the operating system.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, which sees contributions without noise, provided machines are honest, links
    are private, and nothing else computed from un-noised sums is published; the checkpoint holds them and must be kept
    like the data. It rests on every sample taking part in rounds c, c + N, c + 2 N, ... only: a reply counts only if
    its number is the round's, so a machine that misses a request is left out from then on (and every machine, if the
    server stops between its replies and its checkpoint), and replies that state a larger sensitivity or another grid
    than the policy's are dropped. With mechanism ``none``, which is refused unless the keys are simulated, nothing is
    guaranteed.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        clients_per_round: int,
        learning_rate: float,
        alpha: float,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, clients_per_round=clients_per_round, **options)
        check_step(learning_rate, math.inf)
        if not 0 < alpha <= 1:
            raise ConfigurationError(f"Expected 0 < alpha <= 1, got {alpha!r}.")
        if num_rounds < 1:
            raise ConfigurationError(f"Expected num_rounds >= 1, got {num_rounds}.")
        if clients_per_round != num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {num_clients} for private momentum, got "
                f"{clients_per_round}: samples must return in the same rounds of every epoch."
            )
        if policy.trust != "trusted-server" or policy.release_rule != "paper":
            raise ConfigurationError(
                "Expected a policy with trust 'trusted-server' and release_rule 'paper', got "
                f"{policy.trust!r} and {policy.release_rule!r}: a contribution that comes later has another weight."
            )
        self.policy = policy
        self.num_rounds = num_rounds
        self.learning_rate = float(learning_rate)
        self.alpha = float(alpha)
        self.epoch = policy.min_separation if policy.sample_participations > 1 else num_rounds
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        check_server_noise(policy, self._keys)

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together; infinite without noise."""
        return server_mu(self.policy)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        return gdp_epsilon(self.mu, self.policy.delta if delta is None else delta)

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "learning_rate": self.learning_rate,
            "alpha": self.alpha,
            "num_rounds": self.num_rounds,
            "epoch": self.epoch,
            "mu": self.mu,
            "clip_norm": self.policy.clip_norm,
            "batch_size": self.policy.batch_size,
        }

    def check_reply(self, reply: Reply) -> bool:
        return reply.release == len(self.history) + 1 and could_be_honest(self.policy, reply, releases=1)

    def check_round(self, server_round: int) -> None:
        """Refuse a round beyond those the noise was calibrated for."""
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}."
            )
