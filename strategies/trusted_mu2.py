r"""DP-mu^2-FL with a trusted server (reshef-levy-2025, appendix F; reshef-levy-2024, algorithm 2; ALGORITHMS 2.1).

Machines send their contributions without noise over an authenticated, encrypted link; the server steps with
q_t + Y_t, Y_t fresh in every round and never accumulated. One sample changes q by at most Delta / m and stays in it to
the end, so with T rounds sigma^2 = (Delta / m)^2 T / mu^2 makes the whole run mu-GDP.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..privacy import (
    NO_NOISE,
    ConfigurationError,
    NoiseKeys,
    PrivacyPolicy,
    SystemKeys,
    gdp_epsilon,
    protocol,
    row_key,
    standard_normals,
)
from .mu2 import Mu2, Mu2State, mu2_step
from .replies import Reply, Vector


def could_be_honest(policy: PrivacyPolicy, reply: Reply, *, releases: int) -> bool:
    """Whether a machine under this policy, which adds no noise, can have sent this as the sum of that many releases."""
    plan = policy.plan(len(reply.values))
    stated = reply.metrics.get(protocol.SENSITIVITY)
    if not isinstance(stated, float) or not 0.0 < stated <= plan.sensitivity * (1 + 1e-9):
        return False
    # What honest machines that clip at S can have sent; each rounds its mean to the grid.
    if not np.linalg.norm(reply.values) <= releases * (policy.clip_norm + plan.grid.charge(len(reply.values))):
        return False
    counts = reply.values / plan.grid.spacing
    return bool((counts == np.rint(counts)).all())


def check_server_noise(policy: PrivacyPolicy, keys: NoiseKeys) -> None:
    """Refuse a trusted server's policy that is for simulation only with keys that are not.

    Raises
    ------
    ConfigurationError
    """
    if keys.simulated:
        return
    if policy.noise_quality != "exact":
        raise ConfigurationError("Expected noise_quality 'exact' with real keys: 'fast' noise is for simulation only.")
    if policy.mechanism == NO_NOISE:
        raise ConfigurationError(
            f"Expected a noise mechanism with real keys, got {NO_NOISE!r}: runs without noise are for simulation only."
        )


def server_mu(policy: PrivacyPolicy) -> float:
    """Gaussian-DP parameter of everything a trusted server publishes; infinite if it adds no noise."""
    return math.inf if policy.mechanism == NO_NOISE else policy.mu


class TrustedMu2(Mu2):
    """DP-mu^2-FL with a trusted server, which adds the noise for everybody.

    Parameters
    ----------
    num_clients, clients_per_round, learning_rate, diameter, seed, session, node_deadline_s, checkpoint, on_round
        See :class:`~murmurfl.strategies.Mu2`.
    policy : PrivacyPolicy
        What the machines were configured with: ``trust="trusted-server"``, and the clip and batch that give Delta; its
        mu is the guarantee of the run. With mechanism ``none`` the server adds no noise either.
    num_rounds : int
        T, the most rounds this server will ever publish a model of.
    noise_keys : NoiseKeys, optional
        The server's noise key; default one from the operating system.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, which sees contributions without noise, provided machines are honest,
    links are private, and nothing else computed from the un-noised momentum is published; the checkpoint holds it and
    must be kept like the data. Each release is aggregated exactly once, and replies that state a larger sensitivity
    or another grid than the policy's are dropped. With mechanism ``none``, which is refused unless the keys are
    simulated, nothing is guaranteed.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        clients_per_round: int,
        learning_rate: float,
        policy: PrivacyPolicy,
        num_rounds: int,
        diameter: float = math.inf,
        noise_keys: NoiseKeys | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            learning_rate=learning_rate,
            diameter=diameter,
            **options,
        )
        if policy.trust != "trusted-server":
            raise ConfigurationError(f"Expected a policy with trust 'trusted-server', got {policy.trust!r}.")
        if num_rounds < 1:
            raise ConfigurationError(f"Expected num_rounds >= 1, got {num_rounds}.")
        self.policy = policy
        self.num_rounds = num_rounds
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        check_server_noise(policy, self._keys)

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together; infinite without noise."""
        return server_mu(self.policy)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        return gdp_epsilon(self.mu, self.policy.delta if delta is None else delta)

    def noise_std(self, num_parameters: int) -> float:
        """Standard deviation of Y_t, the noise on q."""
        plan = self.policy.plan(num_parameters)
        return plan.sensitivity / self.clients_per_round * math.sqrt(self.num_rounds) / self.mu

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "num_rounds": self.num_rounds,
            "mu": self.mu,
            "clip_norm": self.policy.clip_norm,
            "batch_size": self.policy.batch_size,
        }

    def check_reply(self, reply: Reply) -> bool:
        return could_be_honest(self.policy, reply, releases=reply.release - reply.ack)

    def step(self, state: Mu2State, release_sum: Vector, server_round: int) -> Mu2State:
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}."
            )
        # On the machines' grid, so that sum and noise are one rounded Gaussian release (privacy/grid.py).
        plan = self.policy.plan(len(release_sum))
        key = row_key(self._keys.secret_key, self._keys.nonce(self.session, server_round))
        normals = standard_normals(key, len(release_sum), self.policy.noise_quality)
        std = self.noise_std(len(release_sum)) * self.clients_per_round
        return mu2_step(
            state,
            release_sum,
            server_round,
            clients_per_round=self.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
            noise=plan.grid.values(plan.grid.counts(normals * np.float64(std))),
        )
