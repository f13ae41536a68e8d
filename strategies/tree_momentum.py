r"""Tree-aggregated momentum with a trusted server (tran-cutkosky-2022, algorithm 1; ALGORITHMS section 4).

With g_t the mean over the clients of their contributions and h the number of trailing zeros of t,

    F_t     = sum over the last 2^h steps s of alpha (1 - alpha)^{t-s} g_s       (the node that step t completes)
    F^_t    = F_t + fresh noise
    m^_t    = sum over the nodes [y, z] of COMPOSE(1, t) of (1 - alpha)^{t-z} F^_z
    w_{t+1} = w_t - eta m^_t / ||m^_t||

Clients send clipped gradients without noise, all of them in every round, and go through their samples in the same
order in every epoch of N rounds. What all strategies of private momentum share comes first: streams of a momentum in
which samples return (:class:`MomentumStream`), and normalised steps (:class:`TrustedMomentum`).

A rule of private momentum and its stream are one unit, because one proof ties them: the rule's state holds the
un-noised sums (and, where rows are drawn again, their nonces), and its step asks the stream for the noise of a round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.accounting.gdp import check_positive
from ..privacy.errors import ConfigurationError
from ..privacy.noise import NoiseKeys
from ..privacy.release.policy import PrivacyPolicy
from .aggregation.noisy import Noisy
from .aggregation.streams import Stream
from .callbacks.callback import Callback
from .momentum_tree import MomentumTree
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers, Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Reply, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

StateT = TypeVar("StateT")


def normalised_step(w: Vector, momentum: Vector, learning_rate: float) -> Vector:
    """Take a step of length eta against the momentum; none if that is zero."""
    length = float(np.linalg.norm(momentum))
    return w - (learning_rate / length) * momentum if length > 0 else w


class MomentumStream(Stream):
    """A stream of momentum of gradients in which samples return every N rounds; a base class.

    Parameters
    ----------
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.

    Notes
    -----
    **Formal guarantees.** Whatever of the momentum is published is mu-GDP, as :class:`TrustedMomentum` says.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = float(alpha)
        if not 0 < self.alpha <= 1:
            raise ConfigurationError(
                f"Expected 0 < alpha <= 1, got {self.alpha!r}.", kind="out-of-range", setting="alpha", got=self.alpha
            )

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        super().bind(policy, num_rounds, keys)
        if policy.release_rule != "paper":
            raise ConfigurationError(
                f"Expected a policy with release_rule 'paper', got {policy.release_rule!r}: a contribution that "
                "comes later has another weight.",
                kind="conflict",
                setting="release_rule",
                got=policy.release_rule,
            )
        self.epoch = policy.min_separation if policy.sample_participations > 1 else num_rounds
        """N."""


StreamT = TypeVar("StreamT", bound=MomentumStream)


@dataclass(frozen=True, eq=False)
class MomentumRule(Rule[StateT], Generic[StateT, StreamT]):
    """A rule of private momentum, one unit with its stream; a base class.

    A step is pure but for the noise, which it asks the stream for.

    Parameters
    ----------
    stream : MomentumStream
        What the server releases of the momentum.
    learning_rate : float
        eta > 0.
    """

    stream: StreamT
    learning_rate: float

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)

    def settings(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "alpha": self.stream.alpha, "epoch": self.stream.epoch}


class TrustedMomentum(ReleaseStrategy[StateT], Generic[StateT, StreamT]):
    """Private momentum, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`; a base class.

    Parameters
    ----------
    options : RoundOptions
        What every strategy takes. Every client is asked in every round: ``clients_per_round`` is ``num_clients``.
    rule : MomentumRule
        The rule, with the stream that the server releases of the momentum.
    policy : PrivacyPolicy
        Policy that all clients were configured with.
    num_rounds : int
        T, the most rounds of which this server ever publishes a model.
    noise_keys : NoiseKeys, optional
        The server's noise key.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one client,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.aggregation.noisy.Noisy`. It rests on every sample taking part in rounds
    c, c + N, c + 2 N, ... only: a reply counts only if its number is the round's, so a client that misses a request is
    left out from then on (and every client, if the server stops between its replies and its checkpoint). Noise that
    was drawn before an interruption is the same when it is needed again. Proof: docs/proofs/sensitivities.md.
    """

    late_answers: ClassVar[LateAnswers] = "refused"  # a sample would not return after as many rounds
    absence_costs: ClassVar[str] = (
        "A client that misses a round is left out of all later ones, unless batches are Poisson: its samples would "
        "return in other rounds of an epoch than the noise was made for."
    )

    def __init__(
        self,
        options: RoundOptions,
        rule: MomentumRule[StateT, StreamT],
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None,
    ) -> None:
        noise = Noisy(policy, rule.stream, num_rounds=num_rounds, noise_keys=noise_keys)
        self._drawn_anew = policy.batch_selection == "poisson"
        super().__init__(options, rule, aggregator=noise)

    def _settle(self, clients: int) -> None:
        super()._settle(clients)
        if self.clients_per_round != self.num_clients:
            raise ConfigurationError(
                f"Expected clients_per_round = num_clients = {self.num_clients} for private momentum, got "
                f"{self.clients_per_round}: samples must return in the same rounds of every epoch.",
                kind="conflict",
                setting="clients_per_round",
                got=self.clients_per_round,
            )

    def check_reply(self, reply: Reply) -> bool:
        # A Poisson batch is drawn anew for every release, so it does not matter which round that is in.
        return self._drawn_anew or reply.release == len(self.history) + 1


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

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import tree_momentum_start
    >>> state = tree_momentum_start(np.zeros(2), num_rounds=8)
    >>> state.w.shape, state.sums.shape, state.noisy.shape
    ((2,), (4, 2), (4, 2))
    """

    w: Vector
    sums: NDArray[np.float64]
    noisy: NDArray[np.float64]


def tree_momentum_start(start: Vector, num_rounds: int) -> TreeMomentumState:
    """Return the state before the first round.

    Examples
    --------
    >>> import numpy as np
    >>> tree_momentum_start(np.zeros(2), num_rounds=8).w.tolist()
    [0.0, 0.0]
    """
    nodes = np.zeros((num_rounds.bit_length(), len(start)))
    return TreeMomentumState(start, nodes, nodes)


def node_sum(state: TreeMomentumState, gradient: Vector, server_round: int, alpha: float) -> Vector:
    """Return F_t, from g_t and the nodes of the round before.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import tree_momentum_start
    >>> state = tree_momentum_start(np.zeros(2), num_rounds=8)
    >>> node_sum(state, np.array([1.0, 0.0]), server_round=1, alpha=0.5).tolist()
    [0.5, 0.0]
    """
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
    """Take one step: a pure function of the state, F_t (:func:`node_sum`) and F^_t; an m^_t of zero moves nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import tree_momentum_start
    >>> state, node = tree_momentum_start(np.zeros(2), num_rounds=8), np.array([3.0, 4.0])
    >>> state = tree_momentum_step(state, node, node, 1, alpha=0.5, learning_rate=0.1)
    >>> state.w.round(3).tolist()  # a step of length 0.1
    [-0.06, -0.08]
    """
    height = (server_round & -server_round).bit_length() - 1
    sums, noisy = state.sums.copy(), state.noisy.copy()
    sums[height], noisy[height] = node, noisy_node
    w = normalised_step(state.w, tree_momentum(noisy, server_round, alpha), learning_rate)
    return TreeMomentumState(w, sums, noisy)


def tree_momentum(nodes: NDArray[np.float64], server_round: int, alpha: float) -> Vector:
    """Return m_t from the nodes that make up COMPOSE(1, t)."""
    momentum, rounds = np.zeros(nodes.shape[1]), 0
    for height in range(server_round.bit_length()):
        if server_round >> height & 1:  # from the last node, and the smallest, to the first
            momentum += (1 - alpha) ** rounds * nodes[height]
            rounds += 2**height
    return momentum


class Tree(MomentumStream):
    """The nodes of a tree over the rounds, under noise that fits each node.

    Parameters
    ----------
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.

    Notes
    -----
    **Formal guarantees.** All nodes together are mu-GDP for replacement of one sample that takes part in rounds
    c, c + N, ... only. Nodes are rounded to the clients' grid, which is charged.
    Proof: docs/proofs/sensitivities.md.
    """

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        super().bind(policy, num_rounds, keys)
        self.tree = MomentumTree(num_rounds, self.epoch, self.alpha)
        self._noise_stds: dict[int, NDArray[np.float64]] = {}

    def noise_stds(self, num_parameters: int) -> NDArray[np.float64]:
        """Return the standard deviation of the noise on the node that each round completes, shape (T,)."""
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


@dataclass(frozen=True, eq=False)
class TreeMomentumRule(MomentumRule[TreeMomentumState, Tree]):
    """Tree-aggregated momentum with normalised steps (:func:`node_sum`, :func:`tree_momentum_step`)."""

    state_type: ClassVar[type[TreeMomentumState]] = TreeMomentumState

    def init(self, start: Vector, layout: Layout) -> TreeMomentumState:
        return tree_momentum_start(start, self.stream.num_rounds)

    def points(self, state: TreeMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def update(self, state: TreeMomentumState, total: Vector, turn: Turn) -> TreeMomentumState:
        alpha, t = self.stream.alpha, turn.number
        node = node_sum(state, total / turn.clients_per_round, t, alpha)
        noisy = self.stream.noisy_node(node, t)
        return tree_momentum_step(state, node, noisy, t, alpha=alpha, learning_rate=self.learning_rate)

    def model(self, state: TreeMomentumState) -> Vector:
        return state.w


class TreeMomentum(TrustedMomentum[TreeMomentumState, Tree]):
    """Tree-aggregated momentum, normalised steps, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy that all clients were configured with, with ``release_rule="paper"``, and as many passes
        (``sample_participations``) of ``min_separation`` = N releases as samples are used.
    num_rounds : int
        T, the most rounds of which this server ever publishes a model.
    noise_keys : NoiseKeys, optional
        The server's noise key (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`). Default: one from the operating
        system, kept in a file beside the checkpoint.
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    learning_rate : float
        eta > 0.
    num_clients : int, optional
        M, clients of the training. Default: all that are connected when it begins.
    clients_per_round : int, optional
        m, clients that a round asks, sampled without replacement. Default: all.
    fraction_train : float, optional
        Share of the clients that a round asks, in place of ``clients_per_round``.
    min_train_nodes : int, optional
        Fewest clients that a round asks with ``fraction_train``. Default: 2.
    min_available_nodes : int, optional
        Fewest connected clients with which a round begins after ``node_deadline_s``.
    quorum : float
        Share of ``clients_per_round`` whose answers end a round; 1 waits for all.
    over_selection : float
        A round asks this many times ``clients_per_round`` clients; at least 1.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler. Default: from the operating system.
    sampling : {"uniform", "balanced"}
        Whether rounds are drawn independently, or so that all clients take part equally often.
    session : str, optional
        Name of the training, letters and digits. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File written after every round. A training whose file exists is resumed.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    evaluate_every : int
        Rounds between central evaluations of the published model.
    allow_exhaustion : bool
        Whether clients may run out of releases before the last round.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that every request brings, such as ``{"centre": centre}``
        (:class:`~murmurfl.strategies.MeanOfFeatures`).
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one client,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`. Nodes are rounded to the clients' grid, which
    is charged.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0, trust="trusted-server", release_rule="paper"
    ... )
    >>> strategy = TreeMomentum(policy=policy, num_rounds=5, alpha=0.1, learning_rate=0.1, num_clients=10)
    >>> strategy.rule.learning_rate
    0.1
    """

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        alpha: float,
        learning_rate: float,
        num_clients: int | None = None,
        clients_per_round: int | None = None,
        fraction_train: float | None = None,
        min_train_nodes: int | None = None,
        min_available_nodes: int | None = None,
        quorum: float = 1.0,
        over_selection: float = 1.0,
        excluded: Collection[str] = (),
        seed: int | None = None,
        sampling: Sampling = "uniform",
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        evaluate_every: int = 1,
        allow_exhaustion: bool = False,
        secure_aggregation: SecureAggregation | None = None,
        public_inputs: Mapping[str, NDArray[np.floating]] | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        options = RoundOptions(
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
            quorum=quorum,
            over_selection=over_selection,
            excluded=excluded,
            seed=seed,
            sampling=sampling,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            evaluate_every=evaluate_every,
            allow_exhaustion=allow_exhaustion,
            secure_aggregation=secure_aggregation,
            public_inputs=public_inputs,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )
        rule = TreeMomentumRule(Tree(alpha), float(learning_rate))
        super().__init__(options, rule, policy=policy, num_rounds=num_rounds, noise_keys=noise_keys)
