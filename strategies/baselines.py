r"""The papers' baselines, the server's halves: noisy SGD, ISRL-DP and delayed momentum, each with an untrusted server.

With g_t the sum of the releases divided by m, the number asked, and Project_K onto the ball of diameter D:

**Noisy SGD** (reshef-levy-2025, inspired by Abadi et al. 2016; ALGORITHMS 2.5): fresh noise, no momentum.
    w_{t+1} = Project_K(w_t - eta g_t); published is the last iterate.

**ISRL-DP** minibatch SGD (Lowy and Razaviyayn 2023, whose clients draw every batch anew; here batches are dealt)
    ``minibatch`` (their algorithm 1, equal weights): w_r = Project_K(w_{r-1} - eta g_r) with g_r asked for at w_{r-1};
    published is the average of w_1 .. w_r.
    ``accelerated`` (their algorithm 2 without strong convexity: AC-SA of Lan 2012): with a_r = 2 / (r + 1), g_r is
    asked for at (1 - a_r) v_{r-1} + a_r w_{r-1}, w_r = Project_K(w_{r-1} - r eta g_r), and
    v_r = (1 - a_r) v_{r-1} + a_r w_r is published.

**Delayed momentum** (reshef-levy-2025, alternative 1 and appendix G). Every client keeps a momentum q_i of its own,
corrected against the query point of its own last participation (eq. 12), and the server has no momentum but theirs:
    q_t = (1 / m) sum of q_{t,i} over the clients of round t,    w_{t+1} = Project_K(w_t - eta q_t),
    x_{t+1} = (1 - a) x_t + a w_{t+1},    a = 2 / (t + 2).
A correction reaches back to the last participation, M / m rounds and more, so the error of q_i and the sensitivity grow
with the delay. Appendix G has E ||q_t - t grad f(x_t)||^2 larger than that of mu^2-SGD by M / m for a delay that is
always M / m; for clients drawn uniformly the delay is geometric and it is 2 M / m - 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError
from .callbacks.callback import Callback
from .mu2 import ProjectedRule, project_to_ball
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers, Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation


@dataclass(frozen=True)
class NoisySGDState:
    """State of noisy SGD: centre of the ball K and iterate, each of shape (d,).

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import noisy_sgd_step
    >>> state = NoisySGDState(start=np.zeros(2), w=np.zeros(2))
    >>> noisy_sgd_step(state, np.array([4.0, 0.0]), clients_per_round=4, learning_rate=0.5, diameter=np.inf).w.tolist()
    [-0.5, 0.0]
    """

    start: Vector
    w: Vector


def noisy_sgd_step(
    state: NoisySGDState, release_sum: Vector, *, clients_per_round: int, learning_rate: float, diameter: float
) -> NoisySGDState:
    """Take one projected step: a pure function; parameters as in :func:`~murmurfl.strategies.mu2_step`.

    Examples
    --------
    >>> start = NoisySGDState(np.zeros(2), np.zeros(2))
    >>> total = np.array([10.0, -20.0])  # the sum of ten clients' noisy gradients
    >>> noisy_sgd_step(start, total, clients_per_round=10, learning_rate=0.5, diameter=math.inf).w.tolist()
    [-0.5, 1.0]
    """
    w = state.w - learning_rate / clients_per_round * release_sum
    return NoisySGDState(state.start, project_to_ball(w, state.start, diameter / 2))


@dataclass(frozen=True)
class NoisySGDRule(ProjectedRule[NoisySGDState]):
    """Noisy SGD (:func:`noisy_sgd_step`)."""

    state_type: ClassVar[type[NoisySGDState]] = NoisySGDState

    def init(self, start: Vector, layout: Layout) -> NoisySGDState:
        return NoisySGDState(start, start)

    def points(self, state: NoisySGDState) -> tuple[Vector, ...]:
        return (state.w,)

    def update(self, state: NoisySGDState, total: Vector, turn: Turn) -> NoisySGDState:
        return noisy_sgd_step(
            state,
            total,
            clients_per_round=turn.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
        )

    def model(self, state: NoisySGDState) -> Vector:
        return state.w


class NoisySGD(ReleaseStrategy[NoisySGDState]):
    """Noisy SGD with an untrusted server, for :class:`~murmurfl.clients.NoisySGDClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
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

    Examples
    --------
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=10, clients_per_round=5)
    >>> strategy.rule.learning_rate
    0.1
    """

    divergence_remedy: ClassVar[str] = "Lower learning_rate, to a third for instance."

    def __init__(
        self,
        *,
        learning_rate: float,
        diameter: float = math.inf,
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
        super().__init__(options, NoisySGDRule(float(learning_rate), float(diameter)))


Variant = Literal["minibatch", "accelerated"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class IsrlDpState:
    """State after a round: centre of the ball K, iterate w, published model v and query point, each of shape (d,).

    Examples
    --------
    >>> import numpy as np
    >>> zeros = np.zeros(2)
    >>> state = IsrlDpState(start=zeros, w=zeros, average=zeros, query=zeros)
    >>> state.average.tolist()  # the model that would be published
    [0.0, 0.0]
    """

    start: Vector
    w: Vector
    average: Vector
    query: Vector


def isrl_dp_step(
    state: IsrlDpState,
    release_sum: Vector,
    server_round: int,
    *,
    variant: Variant,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> IsrlDpState:
    """One round: a pure function; parameters as in :func:`~murmurfl.strategies.mu2_step`.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import IsrlDpState
    >>> zeros = np.zeros(2)
    >>> state = IsrlDpState(start=zeros, w=zeros, average=zeros, query=zeros)
    >>> arguments = {"variant": "minibatch", "clients_per_round": 4, "learning_rate": 0.5, "diameter": np.inf}
    >>> isrl_dp_step(state, np.array([4.0, 0.0]), 1, **arguments).w.tolist()
    [-0.5, 0.0]
    """
    r, accelerated = server_round, variant == "accelerated"
    step = learning_rate * (r if accelerated else 1) / clients_per_round
    w = project_to_ball(state.w - step * release_sum, state.start, diameter / 2)
    weight = 2.0 / (r + 1) if accelerated else 1.0 / r
    average = (1.0 - weight) * state.average + weight * w
    following = 2.0 / (r + 2)
    query = (1.0 - following) * average + following * w if accelerated else w
    return IsrlDpState(state.start, w, average, query)


@dataclass(frozen=True)
class IsrlDpRule(ProjectedRule[IsrlDpState]):
    """ISRL-DP (:func:`isrl_dp_step`)."""

    state_type: ClassVar[type[IsrlDpState]] = IsrlDpState

    variant: Variant = "minibatch"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ConfigurationError(
                f"Expected variant one of {VARIANTS}, got {self.variant!r}.",
                kind="unknown-name",
                setting="variant",
                got=self.variant,
            )
        super().__post_init__()

    def init(self, start: Vector, layout: Layout) -> IsrlDpState:
        return IsrlDpState(start, start, start, start)

    def points(self, state: IsrlDpState) -> tuple[Vector, ...]:
        return (state.query,)

    def update(self, state: IsrlDpState, total: Vector, turn: Turn) -> IsrlDpState:
        return isrl_dp_step(
            state,
            total,
            turn.number,
            variant=self.variant,
            clients_per_round=turn.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
        )

    def model(self, state: IsrlDpState) -> Vector:
        return state.average


class IsrlDp(ReleaseStrategy[IsrlDpState]):
    """ISRL-DP minibatch SGD with an untrusted server, for :class:`~murmurfl.clients.IsrlDpClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
    variant : {"minibatch", "accelerated"}
        The accelerated variant's step grows with the round: r eta.
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

    Examples
    --------
    >>> strategy = IsrlDp(learning_rate=0.1, variant="minibatch", num_clients=10, clients_per_round=5)
    >>> strategy.rule.learning_rate
    0.1
    """

    def __init__(
        self,
        *,
        learning_rate: float,
        diameter: float = math.inf,
        variant: Variant = "minibatch",
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
        super().__init__(options, IsrlDpRule(float(learning_rate), float(diameter), variant))


@dataclass(frozen=True)
class DelayedMomentumState:
    """State after round t: centre of the ball K, w_{t+1}, x_{t+1} and q_t, each of shape (d,).

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import delayed_momentum_step
    >>> zeros = np.zeros(2)
    >>> state, total = DelayedMomentumState(zeros, zeros, zeros, zeros), np.array([4.0, 0.0])
    >>> state = delayed_momentum_step(state, total, 1, clients_per_round=4, learning_rate=0.5, diameter=np.inf)
    >>> state.w.tolist(), state.q.tolist()
    ([-0.5, 0.0], [1.0, 0.0])
    """

    start: Vector
    w: Vector
    x: Vector
    q: Vector


def delayed_momentum_step(
    state: DelayedMomentumState,
    release_sum: Vector,
    server_round: int,
    *,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> DelayedMomentumState:
    """One round: a pure function of the sum of momenta; parameters as in :func:`~murmurfl.strategies.mu2_step`.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import DelayedMomentumState
    >>> zeros = np.zeros(2)
    >>> state = DelayedMomentumState(zeros, zeros, zeros, zeros)
    >>> total = np.array([4.0, 0.0])
    >>> delayed_momentum_step(state, total, 1, clients_per_round=4, learning_rate=0.5, diameter=np.inf).w.tolist()
    [-0.5, 0.0]
    """
    q = release_sum / clients_per_round
    w = project_to_ball(state.w - learning_rate * q, state.start, diameter / 2)
    a = 2.0 / (server_round + 2)
    return DelayedMomentumState(state.start, w, (1.0 - a) * state.x + a * w, q)


@dataclass(frozen=True)
class DelayedMomentumRule(ProjectedRule[DelayedMomentumState]):
    """Delayed momentum (:func:`delayed_momentum_step`)."""

    state_type: ClassVar[type[DelayedMomentumState]] = DelayedMomentumState

    def init(self, start: Vector, layout: Layout) -> DelayedMomentumState:
        return DelayedMomentumState(start, start, start, np.zeros_like(start))

    def points(self, state: DelayedMomentumState) -> tuple[Vector, ...]:
        return (state.x,)

    def update(self, state: DelayedMomentumState, total: Vector, turn: Turn) -> DelayedMomentumState:
        return delayed_momentum_step(
            state,
            total,
            turn.number,
            clients_per_round=turn.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
        )

    def model(self, state: DelayedMomentumState) -> Vector:
        return state.x


class DelayedMomentum(ReleaseStrategy[DelayedMomentumState]):
    """Delayed momentum with an untrusted server, for :class:`~murmurfl.clients.DelayedMomentumClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
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
    No release is ever acknowledged, so each is P_k - P_0, the client's whole noisy momentum. A missing reply counts as
    zero in q_t.

    Examples
    --------
    >>> strategy = DelayedMomentum(learning_rate=0.1, num_clients=10, clients_per_round=5)
    >>> strategy.rule.learning_rate
    0.1
    """

    acknowledges: ClassVar[bool] = False
    late_answers: ClassVar[LateAnswers] = "dropped"  # the client's next has all of it again

    def __init__(
        self,
        *,
        learning_rate: float,
        diameter: float = math.inf,
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
        super().__init__(options, DelayedMomentumRule(float(learning_rate), float(diameter)))
