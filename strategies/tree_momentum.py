r"""Tree-aggregated momentum with a trusted server (tran-cutkosky-2022, algorithm 1; ALGORITHMS section 4).

With g_t the mean over the machines of their contributions and h the number of trailing zeros of t,

    F_t     = sum over the last 2^h steps s of alpha (1 - alpha)^{t-s} g_s       (the node that step t completes)
    F^_t    = F_t + fresh noise
    m^_t    = sum over the nodes [y, z] of COMPOSE(1, t) of (1 - alpha)^{t-z} F^_z
    w_{t+1} = w_t - eta m^_t / ||m^_t||

Machines send clipped gradients without noise, all of them in every round, and go through their samples in the same
order in every epoch of N rounds. What all strategies of private momentum share comes first: noise on a momentum in
which samples return (:class:`MomentumNoise`), and normalised steps (:class:`TrustedMomentum`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError
from .aggregation.noisy import Noisy, TrustedOptions, TrustedStrategy
from .momentum_tree import MomentumTree
from .rounds.options import StepOptions, takes
from .rounds.replies import Reply, Vector
from .rounds.sampling import LateAnswers
from .rounds.strategy import ReleaseStrategy

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentumOptions(TrustedOptions, StepOptions):
    """What strategies of private momentum take."""

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise ConfigurationError(f"Expected 0 < alpha <= 1, got {self.alpha!r}.")


def normalised_step(w: Vector, momentum: Vector, learning_rate: float) -> Vector:
    """A step of length eta against the momentum; none if that is zero."""
    length = float(np.linalg.norm(momentum))
    return w - (learning_rate / length) * momentum if length > 0 else w


class MomentumNoise(Noisy):
    """A trusted server's noise on a momentum of gradients in which samples return every N rounds; a base class.

    Notes
    -----
    **Formal guarantees.** Whatever of the momentum is published is mu-GDP, as :class:`TrustedMomentum` says.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, options: MomentumOptions) -> None:
        super().__init__(options)
        policy = options.policy
        if policy.release_rule != "paper":
            raise ConfigurationError(
                f"Expected a policy with release_rule 'paper', got {policy.release_rule!r}: a contribution that "
                "comes later has another weight."
            )
        self.alpha = options.alpha
        self.epoch = policy.min_separation if policy.sample_participations > 1 else self.num_rounds
        """N."""


class TrustedMomentum(TrustedStrategy, ReleaseStrategy[StateT]):
    """Private momentum, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`; a base class.

    Parameters
    ----------
    policy : PrivacyPolicy
        With ``release_rule="paper"``, and as many passes (``sample_participations``) of ``min_separation`` = N releases
        as samples are used.
    num_rounds, noise_keys
        See :class:`~murmurfl.strategies.aggregation.noisy.TrustedOptions`.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    learning_rate : float
        eta > 0.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`. Every machine is asked in every round:
        ``clients_per_round`` is ``num_clients``.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.aggregation.noisy.TrustedStrategy`. It rests on every sample taking part in rounds
    c, c + N, c + 2 N, ... only: a reply counts only if its number is the round's, so a machine that misses a request is
    left out from then on (and every machine, if the server stops between its replies and its checkpoint). Noise that
    was drawn before an interruption is the same when it is needed again. Proof: docs/proofs/sensitivities.md.
    """

    late_answers: ClassVar[LateAnswers] = "refused"  # a sample would not return after as many rounds
    absence_costs: ClassVar[str] = (
        "A client that misses a round is left out of all later ones: its samples would return in other rounds of an "
        "epoch than the noise was made for."
    )

    options: MomentumOptions

    def _settle(self, machines: int) -> None:
        super()._settle(machines)
        if self.clients_per_round != self.num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {self.num_clients} for private momentum, got "
                f"{self.clients_per_round}: samples must return in the same rounds of every epoch."
            )

    def settings(self) -> dict[str, Any]:
        own = {
            "learning_rate": self.options.learning_rate,
            "alpha": self.aggregator.alpha,
            "epoch": self.aggregator.epoch,
        }
        return {**super().settings(), **own}

    def check_reply(self, reply: Reply) -> bool:
        return reply.release == len(self.history) + 1


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

    def __init__(self, options: MomentumOptions) -> None:
        super().__init__(options)
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
    **options
        See :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one machine,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`. Nodes are rounded to the machines' grid, which
    is charged.
    Proof: docs/proofs/sensitivities.md.
    """

    aggregator: TreeNoise
    state_type: ClassVar[type[TreeMomentumState]] = TreeMomentumState

    @takes(MomentumOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options, aggregator=TreeNoise(self.options))

    def initial_state(self, start: Vector) -> TreeMomentumState:
        return tree_momentum_start(start, self.aggregator.num_rounds)

    def query_points(self, state: TreeMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def step(self, state: TreeMomentumState, release_sum: Vector, server_round: int) -> TreeMomentumState:
        alpha = self.aggregator.tree.alpha
        node = node_sum(state, release_sum / self.clients_per_round, server_round, alpha)
        noisy = self.aggregator.noisy_node(node, server_round)
        rate = self.options.learning_rate
        return tree_momentum_step(state, node, noisy, server_round, alpha=alpha, learning_rate=rate)

    def model(self, state: TreeMomentumState) -> Vector:
        return state.w
