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
from typing import ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from ..privacy import NoiseKeys, PrivacyPolicy
from ..privacy.mechanisms.momentum_tree import MomentumTree
from .rounds.layout import Vector
from .trust.trusted_momentum import MomentumNoise, MomentumOptions, TrustedMomentum, normalised_step


@dataclass(frozen=True)
class TreeMomentumState:
    """State after round t.

    Parameters
    ----------
    w : ndarray of shape (d,)
        w_{t+1}.
    sums, noisy : ndarray of shape (floor(log2 T) + 1, d)
        Row h has F and F^ of the node of size 2^h, where t has that binary digit. These nodes make up COMPOSE(1, t),
        and no others are needed again.
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
    w = normalised_step(state.w, tree_momentum(noisy, server_round, alpha), learning_rate)
    return TreeMomentumState(w, sums, noisy)


def tree_momentum(nodes: NDArray[np.float64], server_round: int, alpha: float) -> Vector:
    """M_t from the nodes that make up COMPOSE(1, t)."""
    momentum, rounds = np.zeros(nodes.shape[1]), 0
    for height in range(server_round.bit_length()):
        if server_round >> height & 1:  # from the last node, and the smallest, to the first
            momentum += (1 - alpha) ** rounds * nodes[height]
            rounds += 2**height
    return momentum


class TreeNoise(MomentumNoise):
    """The noise on the nodes of a tree over the rounds.

    Notes
    -----
    **Formal guarantees.** All nodes together are mu-GDP for replacement of one sample that takes part in rounds
    c, c + N, ... only. Nodes are rounded to the machines' grid, which is charged.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(
        self, policy: PrivacyPolicy, num_rounds: int, noise_keys: NoiseKeys | None = None, *, alpha: float
    ) -> None:
        super().__init__(policy, num_rounds, noise_keys, alpha=alpha)
        self.tree = MomentumTree(self.num_rounds, self.epoch, self.alpha)
        self._noise_stds: dict[int, NDArray[np.float64]] = {}

    def noise_stds(self, num_parameters: int) -> NDArray[np.float64]:
        """Standard deviation of the noise on the node that each round completes, shape (T,)."""
        if math.isinf(self.mu):
            return np.zeros(self.num_rounds)
        if num_parameters not in self._noise_stds:
            change = self.policy.plan(num_parameters).sensitivity / self.clients_per_round
            rounding = self.noise_grid(num_parameters).charge(num_parameters)
            stds = self.tree.noise_stds(change, self.mu, rounding=rounding)
            stds = stds * (self.mu / self.ideal_mu(num_parameters, float(np.sqrt(np.mean(stds**2)))))
            self._noise_stds[num_parameters] = stds
        return self._noise_stds[num_parameters]

    def unrounded_noise_std(self, num_parameters: int) -> float:
        change = self.policy.plan(num_parameters).sensitivity / self.clients_per_round
        return float(self.tree.noise_stds(change, self.mu).max())

    def calibrate(self, num_parameters: int) -> None:
        self.noise_stds(num_parameters)

    def noisy_node(self, node: Vector, server_round: int) -> Vector:
        """F^_t of F_t."""
        self.check_round(server_round)
        std = np.float64(self.noise_stds(len(node))[server_round - 1])
        return self.rounded(node, self.fresh_normals(server_round, len(node)) * std)


class TreeMomentum(TrustedMomentum[TreeMomentumState]):
    """Tree-aggregated momentum, normalised steps, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    policy, num_rounds, alpha, noise_keys
        See :class:`~murmurfl.strategies.trust.trusted_momentum.MomentumNoise`.
    **options
        See :class:`~murmurfl.strategies.trust.trusted_momentum.TrustedMomentum`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.trust.trusted_momentum.TrustedMomentum`. Nodes are rounded to the machines' grid, which
    is charged.
    Proof: docs/proofs/sensitivities.md.
    """

    trust: TreeNoise
    state_type: ClassVar[type[TreeMomentumState]] = TreeMomentumState

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        alpha: float,
        noise_keys: NoiseKeys | None = None,
        **options: Unpack[MomentumOptions],
    ) -> None:
        super().__init__(noise=TreeNoise(policy, num_rounds, noise_keys, alpha=alpha), **options)

    def initial_state(self, start: Vector) -> TreeMomentumState:
        return tree_momentum_start(start, self.trust.num_rounds)

    def query_points(self, state: TreeMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: TreeMomentumState, release_sum: Vector, server_round: int) -> TreeMomentumState:
        alpha = self.trust.tree.alpha
        node = node_sum(state, release_sum / self.clients_per_round, server_round, alpha)
        noisy = self.trust.noisy_node(node, server_round)
        return tree_momentum_step(state, node, noisy, server_round, alpha=alpha, learning_rate=self.learning_rate)

    def model(self, state: TreeMomentumState) -> Vector:
        return state.w
