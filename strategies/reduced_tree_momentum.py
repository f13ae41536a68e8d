r"""Sensitivity-reduced momentum with a trusted server (tran-cutkosky-2022, algorithm 2; ALGORITHMS section 4).

With g_t the mean of the clients' clipped gradients, a_t the iterate at which the epoch of round t began, and the trees
of :mod:`murmurfl.strategies.momentum_tree` for A (gradients at a_t), D (A_t - A_{t-N}) and R (what is left of
g_t):

    F^X_[y,z] = sum_{s=y..z} alpha (1 - alpha)^{z-s} X_s + fresh noise,   X = A, D, R
    m^_t      = lemma 17's combination of the nodes
    w_{t+1}   = w_t - eta m^_t / ||m^_t||

The combination of the sums without noise is plain momentum, m_t = (1 - alpha) m_{t-1} + alpha g_t, exactly: the server
computes that, and takes only the noise from the trees, whose rows it draws again from their keys. So a client computes
one gradient a sample and not three, and the server keeps no node at all.

This works only because differences are not clipped one by one. A clipped difference is no longer the difference of two
gradients, so the sums would not telescope, and the server would have to remember a gradient for every round of an
epoch. Differences are bounded instead: gradients that are L-smooth before they are clipped differ by at most L times
the distance between two points, which for steps of length eta is at most eta N, and by no more than 2 S.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError, MurmurflError
from ..privacy.noise import NONCE_BYTES, NoiseKeys
from ..privacy.release.policy import PrivacyPolicy
from .callbacks.callback import Callback
from .momentum_tree import Changes, ReconstructionTrees, best_gamma
from .rounds.options import RoundOptions, positive
from .rounds.participation import Sampling
from .rounds.replies import LARGEST_VALUE, Layout, RoundReport, Vector
from .rounds.rule import Turn
from .sums.secure_aggregation import SecureAggregation
from .tree_momentum import MomentumRule, MomentumStream, TrustedMomentum, normalised_step

# Steps are computed in float64: an epoch leads at most eta N away, and this much more, relatively.
_ROUNDING = 1e-9
# How many rows of noise are in memory at a time beside those that are cached: a few, and more where rows are short.
_FEW_ROWS = 8
_BLOCK_VALUES = 1 << 17


class IncompleteRoundError(MurmurflError):
    """A client was missing from a round of an algorithm whose guarantee needs all of them in every round.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import ReducedTreeMomentum, RoundReport
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=4, max_participations=8, mu=1.0, trust="trusted-server", release_rule="paper",
    ...     sample_participations=2, min_separation=4,
    ... )
    >>> strategy = ReducedTreeMomentum(policy=policy, num_rounds=8, alpha=0.1, learning_rate=0.1, num_clients=10)
    >>> try:
    ...     strategy.check_report(RoundReport(server_round=1, asked=10, aggregated=9, lost=1))
    ... except IncompleteRoundError as error:
    ...     error.kind
    'missing'
    """

    kind = "missing"


@dataclass(frozen=True)
class ReducedTreeMomentumState:
    """State after round t: two vectors of d floats, however many nodes the trees have.

    Parameters
    ----------
    w : ndarray of shape (d,)
        w_{t+1}.
    momentum : ndarray of shape (d,)
        m_t without noise, times the number of clients.
    nonces : ndarray of shape (T, 16), uint8
        A nonce for each round. The noise of the nodes that a round completes is drawn again from it.

    Examples
    --------
    >>> import numpy as np
    >>> state = ReducedTreeMomentumState(w=np.zeros(2), momentum=np.zeros(2), nonces=np.zeros((8, 16), np.uint8))
    >>> len(state.nonces)  # T, the most rounds
    8
    """

    w: Vector
    momentum: Vector
    nonces: NDArray[np.uint8]


def reduced_tree_momentum_step(
    state: ReducedTreeMomentumState,
    momentum: Vector,
    noisy_momentum: Vector,
    nonces: NDArray[np.uint8],
    *,
    learning_rate: float,
) -> ReducedTreeMomentumState:
    """One round: a pure function of the state, m_t and m^_t.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import ReducedTreeMomentumState
    >>> state = ReducedTreeMomentumState(np.zeros(2), np.zeros(2), np.zeros((8, 16), np.uint8))
    >>> momentum, noisy = np.array([3.0, 4.0]), np.array([3.0, -4.0])
    >>> reduced_tree_momentum_step(state, momentum, noisy, state.nonces, learning_rate=0.1).w.round(3).tolist()
    [-0.06, 0.08]
    """
    return ReducedTreeMomentumState(normalised_step(state.w, noisy_momentum, learning_rate), momentum, nonces)


class ReducedTree(MomentumStream):
    """The momentum, under the noise of the nodes of the trees for A, D and R, of which nothing is kept but nonces.

    Parameters
    ----------
    alpha : float
        Weight of a new gradient, 0 < alpha <= 1.
    learning_rate : float
        eta, the length of the rule's steps, which bounds how far gradients move.
    smoothness, gamma, noise_cache_mib
        As in :class:`ReducedTreeMomentum`.

    Notes
    -----
    **Formal guarantees.** See :class:`ReducedTreeMomentum`: what it says rests on these standard deviations.
    """

    def __init__(
        self,
        alpha: float,
        *,
        learning_rate: float,
        smoothness: float = math.inf,
        gamma: float | None = None,
        noise_cache_mib: float = 256.0,
    ) -> None:
        super().__init__(alpha)
        self.learning_rate, self.smoothness = positive("learning_rate", learning_rate), float(smoothness)
        if not self.smoothness >= 0:
            raise ConfigurationError(
                f"Expected smoothness >= 0, infinite if none is known, got {self.smoothness!r}.",
                kind="out-of-range",
                setting="smoothness",
                got=self.smoothness,
            )
        if gamma is not None and not 0 <= gamma <= 1:
            raise ConfigurationError(
                f"Expected 0 <= gamma <= 1, got {gamma!r}.", kind="out-of-range", setting="gamma", got=gamma
            )
        self.gamma = gamma
        self._cache_bytes = int(noise_cache_mib * 2**20)
        self._cached: dict[tuple[bytes, int], NDArray[np.floating]] = {}
        self._trees: dict[int, tuple[ReconstructionTrees, NDArray[np.float64]]] = {}

    def bind(self, policy: PrivacyPolicy, num_rounds: int, keys: NoiseKeys) -> None:
        super().bind(policy, num_rounds, keys)
        if policy.max_participations < num_rounds:
            raise ConfigurationError(
                f"Expected max_participations >= num_rounds = {num_rounds}, got {policy.max_participations}: "
                "every client must be in every round.",
                kind="out-of-range",
                setting="max_participations",
                got=policy.max_participations,
            )

    def changes(self, num_parameters: int) -> Changes:
        """Return how far a replaced sample moves what the trees add up, for the sum over the clients."""
        clients, server = self.policy.plan(num_parameters).grid, self.noise_grid(num_parameters)
        return self._changes(clients.charge(num_parameters), server.charge(num_parameters))

    def _changes(self, rounding: float, node_rounding: float) -> Changes:
        """Return the changes, given what the rounding of the clients and that of the server add."""
        policy, clip = self.policy, self.policy.clip_norm

        def difference(steps: int) -> float:
            way = self.learning_rate * steps * (1 + _ROUNDING)
            longest = min(self.smoothness * way, 2 * clip) if steps else 0.0
            return 2 * longest / policy.batch_size

        residual = tuple(difference(steps) + rounding for steps in range(self.epoch))
        return Changes(2 * clip / policy.batch_size, difference(self.epoch), residual, node_rounding=2 * node_rounding)

    def trees(self, num_parameters: int) -> tuple[ReconstructionTrees, NDArray[np.float64]]:
        """Return the trees, and the standard deviation of the noise on each node, for the sum over the clients."""
        if num_parameters not in self._trees:
            changes = self.changes(num_parameters)
            trees = self._trees_for(changes)
            if math.isinf(self.mu):
                stds = np.zeros(trees.num_nodes)
            else:
                stds = self._noise_stds(trees, changes, num_parameters)
            self._trees[num_parameters] = trees, stds
        return self._trees[num_parameters]

    def unrounded_noise_std(self, num_parameters: int) -> float:
        changes = self._changes(self.policy.plan(num_parameters).grid.charge(num_parameters), 0.0)
        trees = self._trees_for(changes)
        return float(self._round_stds(trees, trees.noise_stds(changes, self.mu)).max())

    def calibrate(self, num_parameters: int) -> None:
        self.trees(num_parameters)

    def _trees_for(self, changes: Changes) -> ReconstructionTrees:
        shape = self.num_rounds, self.epoch, self.alpha
        return ReconstructionTrees(*shape, best_gamma(*shape, changes) if self.gamma is None else self.gamma)

    def _noise_stds(self, trees: ReconstructionTrees, changes: Changes, num_parameters: int) -> NDArray[np.float64]:
        stds = trees.noise_stds(changes, self.mu)
        mean_std = float(np.sqrt(np.mean(self._round_stds(trees, stds) ** 2)))
        return stds * (self.mu / self.ideal_mu(num_parameters, mean_std))

    def _round_stds(self, trees: ReconstructionTrees, stds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the standard deviations of what is rounded: the combination of nodes that each round publishes."""
        rows = (trees.row(server_round) for server_round in range(1, self.num_rounds + 1))
        return np.array([float(np.linalg.norm(weights * stds[numbers])) for numbers, weights in rows])

    def noise(self, nonces: NDArray[np.uint8], server_round: int, num_parameters: int) -> NDArray[np.float64]:
        """Return the noise on the sum of the clients' momenta: lemma 17's combination of the noise of the nodes."""
        trees, stds = self.trees(num_parameters)
        numbers, weights = trees.row(server_round)
        weights = weights * stds[numbers]
        numbers, weights = numbers[weights > 0], weights[weights > 0]
        noise = np.zeros(num_parameters)
        block = max(_FEW_ROWS, _BLOCK_VALUES // num_parameters)
        for start in range(0, len(numbers), block):
            chosen = slice(start, start + block)
            rows = np.stack(self._rows(trees, nonces, numbers[chosen].tolist(), num_parameters))
            noise += weights[chosen] @ rows
        return noise

    def _rows(
        self, trees: ReconstructionTrees, nonces: NDArray[np.uint8], numbers: list[int], size: int
    ) -> list[NDArray[np.floating]]:
        """Return the normals of nodes; those that are not cached are drawn again."""
        names = []
        for number in numbers:
            # Every node has a nonce of its own, made from the nonce of the round that completed the node.
            nonce = nonces[trees.node(number)[2] - 1].tobytes() + number.to_bytes(8, "little")
            names.append(hashlib.blake2b(nonce, digest_size=NONCE_BYTES, person=b"murmurfl node").digest())
        missing = [name for name in names if (name, size) not in self._cached]
        drawn = self.rows_of(missing, size) if missing else []
        made = dict(zip(missing, drawn, strict=True))
        rows = [made[name] if name in made else self._cached[name, size] for name in names]
        for name, row in made.items():
            if (len(self._cached) + 1) * row.nbytes <= self._cache_bytes:
                self._cached[name, size] = row.copy()
        return rows


@dataclass(frozen=True, eq=False)
class ReducedTreeMomentumRule(MomentumRule[ReducedTreeMomentumState, ReducedTree]):
    """Momentum with normalised steps (:func:`reduced_tree_momentum_step`), whose length the stream's noise rests on."""

    state_type: ClassVar[type[ReducedTreeMomentumState]] = ReducedTreeMomentumState

    def init(self, start: Vector, layout: Layout) -> ReducedTreeMomentumState:
        wrong = [name for name, _, dtype in layout if dtype != np.float64]
        if wrong and not math.isinf(self.stream.smoothness):
            raise ConfigurationError(
                f"Expected a float64 model where smoothness bounds how far gradients move, got another dtype in "
                f"{', '.join(wrong)}: steps would be rounded. Convert the initial arrays, or use smoothness = inf.",
                kind="wrong-type",
            )
        nonces = np.zeros((self.stream.num_rounds, NONCE_BYTES), np.uint8)
        return ReducedTreeMomentumState(start, np.zeros_like(start), nonces)

    def points(self, state: ReducedTreeMomentumState) -> tuple[Vector, ...]:
        return (state.w,)

    def update(self, state: ReducedTreeMomentumState, total: Vector, turn: Turn) -> ReducedTreeMomentumState:
        self.stream.check_round(turn.number)
        nonces, alpha = self.stream.with_nonce(state.nonces, turn.number), self.stream.alpha
        rate = self.learning_rate
        momentum = (1 - alpha) * state.momentum + alpha * total
        noisy = self.stream.rounded(momentum, self.stream.noise(nonces, turn.number, len(total)))
        after = reduced_tree_momentum_step(state, momentum, noisy, nonces, learning_rate=rate)
        if not np.linalg.norm(after.w - state.w) <= rate * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected steps of length {rate:g}, got a longer one: they are too short for float64 at "
                f"a model of length {np.linalg.norm(state.w):.3g}. Use a larger learning_rate.",
                kind="out-of-range",
                setting="learning_rate",
            )
        return after

    def model(self, state: ReducedTreeMomentumState) -> Vector:
        return state.w

    def settings(self) -> dict[str, Any]:
        smoothness = None if math.isinf(self.stream.smoothness) else self.stream.smoothness
        return {**super().settings(), "smoothness": smoothness, "gamma": self.stream.gamma}


class ReducedTreeMomentum(TrustedMomentum[ReducedTreeMomentumState, ReducedTree]):
    """Momentum of less sensitivity, trusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

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
    smoothness : float
        L, of every sample's loss whatever the sample; infinite (the default) if none is known, and then this algorithm
        adds more noise than :class:`~murmurfl.strategies.TreeMomentum`.
    gamma : float, optional
        0 <= gamma <= 1, public; default the one with the least noise. Only the noise depends on it, not the momentum.
    noise_cache_mib : float
        Most memory for noise rows of nodes, in MiB; what does not fit is drawn again in every round that needs it.
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
    :class:`~murmurfl.strategies.tree_momentum.TrustedMomentum`, and provided also that every sample's gradient
    is L-Lipschitz in the model, for any sample (a model must be built so, for example by bounding its features; data
    cannot show it), and that clients compute it at the points they are sent. So models must be float64, or steps would
    not have the length they should have. Every client must be in every round. Where a reply is missing, a sample's
    gradient changes from one epoch to the next by as much as it is long; so the run ends with
    :class:`IncompleteRoundError` before anything of that round is published. Samples in another order would do the
    same: policies in which samples do not return after exactly N rounds are refused.
    Proof: docs/proofs/sensitivities.md.

    Momentum and noise are rounded to the clients' grid. A node of R is m_t minus (1 - alpha)^{its length} times the
    momentum before it, so it is charged with two roundings. The clients' own roundings are charged to R_t.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=4, max_participations=8, mu=1.0, trust="trusted-server", release_rule="paper",
    ...     sample_participations=2, min_separation=4,
    ... )
    >>> strategy = ReducedTreeMomentum(policy=policy, num_rounds=8, alpha=0.1, learning_rate=0.1, num_clients=10)
    >>> strategy.needs_all, strategy.rule.learning_rate
    (True, 0.1)
    """

    needs_all: ClassVar[bool] = True
    absence_costs: ClassVar[str] = (
        "a missing answer ends the training, for the noise is too little for a sample that is missing from some "
        "epochs. TreeMomentum can do without."
    )

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
        alpha: float,
        learning_rate: float,
        smoothness: float = math.inf,
        gamma: float | None = None,
        noise_cache_mib: float = 256.0,
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
        stream = ReducedTree(
            alpha,
            learning_rate=learning_rate,
            smoothness=smoothness,
            gamma=gamma,
            noise_cache_mib=noise_cache_mib,
        )
        rule = ReducedTreeMomentumRule(stream, float(learning_rate))
        super().__init__(options, rule, policy=policy, num_rounds=num_rounds, noise_keys=noise_keys)

    def check_report(self, report: RoundReport) -> None:
        if report.aggregated < self.num_clients:
            raise IncompleteRoundError(
                f"Expected replies of all {self.num_clients} clients in every round, got {report.aggregated} in "
                f"round {report.server_round}: the noise is too little for a sample that is missing from some epochs. "
                "Nothing of the round was published; start anew, or use TreeMomentum, which can do without."
            )
