r"""Tree-aggregated momentum with a trusted server (tran-cutkosky-2022, algorithm 1; ALGORITHMS section 4).

With g_t the mean over the machines of their contributions and h the number of trailing zeros of t,

    F_t     = sum over the last 2^h steps s of alpha (1 - alpha)^{t-s} g_s       (the node that step t completes)
    F^_t    = F_t + fresh noise
    m^_t    = sum over the nodes [y, z] of COMPOSE(1, t) of (1 - alpha)^{t-z} F^_z
    w_{t+1} = w_t - eta m^_t / ||m^_t||

Every machine is in every round and goes through its samples in the same order in every epoch of N rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, NoiseKeys, PrivacyPolicy, SystemKeys, gdp_epsilon, row_key, standard_normals
from ..privacy.momentum_tree import MomentumTree
from .base import ReleaseStrategy
from .mu2 import check_step
from .replies import Reply, Vector
from .trusted_mu2 import could_be_honest


@dataclass(frozen=True)
class TreeMomentumState:
    """State after round t.

    Parameters
    ----------
    w : ndarray of shape (d,)
        w_{t+1}.
    sums, noisy : ndarray of shape (floor(log2 T) + 1, d)
        F and F^ of the node of size 2^h that makes up COMPOSE(1, t), in row h where t has that binary digit: all the
        tree there is.
    """

    w: Vector
    sums: NDArray[np.float64]
    noisy: NDArray[np.float64]


def tree_momentum_start(start: Vector, num_rounds: int) -> TreeMomentumState:
    """The state before the first round."""
    nodes = np.zeros((num_rounds.bit_length(), len(start)))
    return TreeMomentumState(start, nodes, nodes)


def node_sum(state: TreeMomentumState, gradient: Vector, server_round: int, alpha: float) -> Vector:
    """F_t, from g_t and the nodes of the round before."""
    total = alpha * gradient
    for height in range((server_round & -server_round).bit_length() - 1):
        total = (1 - alpha) ** 2**height * state.sums[height] + total
    return total


def tree_momentum_step(
    state: TreeMomentumState,
    node: Vector,
    noisy_node: Vector,
    server_round: int,
    *,
    alpha: float,
    learning_rate: float,
) -> TreeMomentumState:
    """One round: a pure function of the state, F_t (:func:`node_sum`) and F^_t; an m^_t of zero moves nothing."""
    height = (server_round & -server_round).bit_length() - 1
    sums, noisy = state.sums.copy(), state.noisy.copy()
    sums[height], noisy[height] = node, noisy_node
    momentum = tree_momentum(noisy, server_round, alpha)
    length = float(np.linalg.norm(momentum))
    w = state.w - (learning_rate / length) * momentum if length > 0 else state.w
    return TreeMomentumState(w, sums, noisy)


def tree_momentum(nodes: NDArray[np.float64], server_round: int, alpha: float) -> Vector:
    """M_t from the nodes that make up COMPOSE(1, t)."""
    momentum, rounds = np.zeros(nodes.shape[1]), 0
    for height in range(server_round.bit_length()):
        if server_round >> height & 1:  # from the last node, and the smallest, to the first
            momentum += (1 - alpha) ** rounds * nodes[height]
            rounds += 2**height
    return momentum


class TreeMomentum(ReleaseStrategy[TreeMomentumState]):
    """Tree-aggregated momentum, normalised steps, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    num_clients, seed, session, node_deadline_s, checkpoint, on_round
        See :class:`~murmurfl.strategies.base.ReleaseStrategy`; every machine is asked in every round.
    learning_rate : float
        eta > 0, the length of a step.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    policy : PrivacyPolicy
        What all machines were configured with: ``trust="trusted-server"``, ``release_rule="paper"``, clip and batch
        that give Delta, passes (``sample_participations``) of ``min_separation`` = N releases; its mu is the guarantee.
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
    than the policy's are dropped. Nodes are rounded to the machines' grid, which is charged.
    """

    state_type: ClassVar[type[TreeMomentumState]] = TreeMomentumState

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
        if clients_per_round != num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {num_clients} for tree momentum, got {clients_per_round}: "
                "samples must return in the same rounds of every epoch."
            )
        if policy.trust != "trusted-server" or policy.release_rule != "paper":
            raise ConfigurationError(
                "Expected a policy with trust 'trusted-server' and release_rule 'paper', got "
                f"{policy.trust!r} and {policy.release_rule!r}: a contribution that comes later has another weight."
            )
        self.policy = policy
        self.num_rounds = num_rounds
        self.learning_rate = float(learning_rate)
        epoch = policy.min_separation if policy.sample_participations > 1 else num_rounds
        self.tree = MomentumTree(num_rounds, epoch, alpha)
        self._noise_stds: dict[int, NDArray[np.float64]] = {}
        self._keys = SystemKeys.generate() if noise_keys is None else noise_keys
        if policy.noise_quality != "exact" and not self._keys.simulated:
            raise ConfigurationError(
                "Expected noise_quality 'exact' with real keys: 'fast' noise is for simulation only."
            )

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of all num_rounds published models together."""
        return self.policy.mu

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon at delta (default the policy's) of all num_rounds published models together."""
        return gdp_epsilon(self.mu, self.policy.delta if delta is None else delta)

    def noise_stds(self, num_parameters: int) -> NDArray[np.float64]:
        """Standard deviation of the noise on the node of every round."""
        if num_parameters not in self._noise_stds:
            plan = self.policy.plan(num_parameters)
            change, rounding = plan.sensitivity / self.clients_per_round, plan.grid.charge(num_parameters)
            self._noise_stds[num_parameters] = self.tree.noise_stds(change, self.mu, rounding=rounding)
        return self._noise_stds[num_parameters]

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "learning_rate": self.learning_rate,
            "alpha": self.tree.alpha,
            "num_rounds": self.num_rounds,
            "epoch": self.tree.epoch_length,
            "mu": self.mu,
            "clip_norm": self.policy.clip_norm,
            "batch_size": self.policy.batch_size,
        }

    def check_reply(self, reply: Reply) -> bool:
        return reply.release == len(self.history) + 1 and could_be_honest(self.policy, reply, releases=1)

    def initial_state(self, start: Vector) -> TreeMomentumState:
        return tree_momentum_start(start, self.num_rounds)

    def query_points(self, state: TreeMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: TreeMomentumState, release_sum: Vector, server_round: int) -> TreeMomentumState:
        if server_round > self.num_rounds:
            raise ConfigurationError(
                f"Expected at most {self.num_rounds} rounds, for which the noise was calibrated, got {server_round}."
            )
        plan, alpha = self.policy.plan(len(release_sum)), self.tree.alpha
        node = node_sum(state, release_sum / self.clients_per_round, server_round, alpha)
        key = row_key(self._keys.secret_key, self._keys.nonce(self.session, server_round))
        normals = standard_normals(key, len(node), self.policy.noise_quality)
        noise = normals * np.float64(self.noise_stds(len(node))[server_round - 1])
        # Sum and noise on one grid: one rounded Gaussian release (privacy/grid.py).
        noisy = plan.grid.values(plan.grid.counts(node) + plan.grid.counts(noise))
        return tree_momentum_step(state, node, noisy, server_round, alpha=alpha, learning_rate=self.learning_rate)

    def model(self, state: TreeMomentumState) -> Vector:
        return state.w
