r"""DP-mu^2-FL, the server's half (reshef-levy-2025, algorithm 1; ALGORITHMS section 2).

mu^2-SGD: anytime averaging with corrected momentum, weights alpha_t = t. With s_t the sum of what came back divided by
m, the number asked,

    q_t     = q_{t-1} + s_t
    w_{t+1} = Project_K(w_t - eta q_t)
    x_{t+1} = (1 - a) x_t + a w_{t+1},    a = alpha_{t+1} / alpha_{1:t+1} = 2 / (t + 2)

K is the ball of diameter D around the start. Always dividing by m, also when replies are lost, is what makes q the same
again once a client is heard that carries over what was missing.

With a trusted server (appendix F; reshef-levy-2024, algorithm 2; ALGORITHMS 2.1) clients send contributions without
noise over an authenticated, encrypted link, and the step is along q_t + Y_t, Y_t fresh in every round and never
accumulated. One sample changes q by at most Delta / m and stays in it to the end, so with T rounds
sigma^2 = (Delta / m)^2 T / mu^2 makes the whole run mu-GDP.

Anytime steps need no T. A constant eta must be of the order of 1 / T^2, which makes a model that is good at the end and
poor before it. Here eta is divided by the root mean square of the values of q_1 .. q_t:

    eta_t   = eta / rms_t, half of it for t = 1,    rms_t^2 = (||q_1||^2 + .. + ||q_t||^2) / (t d)
    w_{t+1} = Project_K(w_t - eta_t q_t),    x_{t+1} as above,    and w_{t+1} is published

so that a parameter moves by about eta in a round, whatever clip, noise and batch are. With a window of W rounds the
past is forgotten, for streams that drift: in rounds t > W clients weigh as in round W, and

    q_t     = (1 - 1 / W) q_{t-1} + s_t,    a = 2 / (W + 2),    rms_t^2 = (1 - 1 / W) rms_{t-1}^2 + ||q_t||^2 / (W d)
    w_{t+1} = Project_K(w_1 + (1 - 1 / (2 W)) (w_t - w_1) - eta_t q_t)

A release's noise leaves q as fast as the decay lambda = 1 - 1 / W takes it out, and then no noise depends on T either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.accounting.gdp import check_positive
from ..privacy.errors import ConfigurationError
from ..privacy.noise import NoiseKeys
from ..privacy.release.policy import PrivacyPolicy
from .aggregation.noisy import Noisy
from .aggregation.plain import Aggregator
from .aggregation.streams import Prefix, Stream
from .callbacks.callback import Callback
from .rounds.options import RoundOptions
from .rounds.participation import Sampling
from .rounds.replies import LARGEST_VALUE, Layout, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

StateT = TypeVar("StateT")


def check_finite(values: Vector | float) -> None:
    """Refuse a step that overflows."""
    if not np.isfinite(values).all():
        raise ConfigurationError(
            "Expected a finite step, got one that overflows: lower learning_rate, or look for a broken client "
            "(largest_value).",
            kind="out-of-range",
            setting="learning_rate",
        )


def project_to_ball(point: Vector, centre: Vector, radius: float) -> Vector:
    """Project a point onto an L2 ball."""
    offset = point - centre
    distance = float(np.linalg.norm(offset))
    check_finite(distance)
    return point if distance <= radius else centre + offset * (radius / distance)


@dataclass(frozen=True)
class ProjectedRule(Rule[StateT]):
    """A rule whose steps are projected onto a ball; a base class.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
    """

    learning_rate: float
    diameter: float = math.inf

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate)
        if math.isnan(self.diameter) or self.diameter <= 0:
            raise ConfigurationError(
                f"Expected diameter > 0, got {self.diameter!r}.",
                kind="out-of-range",
                setting="diameter",
                got=self.diameter,
            )


@dataclass(frozen=True)
class Mu2State:
    """State of mu^2-SGD after a round.

    Parameters
    ----------
    start : ndarray of shape (d,)
        Centre of the ball K.
    w, x, x_previous : ndarray of shape (d,)
        Iterate, query point and previous query point.
    release_sum : ndarray of shape (d,)
        m q: the sum of all releases aggregated, exact multiples of the clients' grid where nothing is forgotten.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import mu2_start, mu2_step
    >>> state = mu2_start(np.zeros(2))
    >>> state = mu2_step(state, np.array([10.0, 0.0]), 1, clients_per_round=10, learning_rate=0.1, diameter=np.inf)
    >>> state.w.tolist(), state.x.tolist(), state.release_sum.tolist()
    ([-0.1, 0.0], [-0.06666666666666667, 0.0], [10.0, 0.0])
    """

    start: Vector
    w: Vector
    x: Vector
    x_previous: Vector
    release_sum: Vector


def mu2_start(start: Vector) -> Mu2State:
    """w_1 = x_1 = x_0, q_0 = 0.

    Examples
    --------
    >>> import numpy as np
    >>> mu2_start(np.zeros(2)).w.tolist()
    [0.0, 0.0]
    """
    return Mu2State(start=start, w=start, x=start, x_previous=start, release_sum=np.zeros_like(start))


def mu2_step(
    state: Mu2State,
    release_sum: Vector,
    server_round: int,
    *,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> Mu2State:
    """One round of mu^2-SGD: a pure function.

    Parameters
    ----------
    state : Mu2State
        After round t - 1.
    release_sum : ndarray of shape (d,)
        Sum of the releases aggregated in round t.
    server_round : int
        t, from 1.
    clients_per_round : int
        m, clients asked.
    learning_rate : float
        eta.
    diameter : float
        D, diameter of the ball K around the start; infinite for no constraint.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import mu2_start
    >>> state = mu2_start(np.zeros(2))
    >>> state = mu2_step(state, np.array([10.0, 0.0]), 1, clients_per_round=10, learning_rate=0.1, diameter=np.inf)
    >>> state.w.tolist()
    [-0.1, 0.0]
    """
    total = state.release_sum + release_sum
    q = total / clients_per_round
    w = project_to_ball(state.w - learning_rate * q, state.start, diameter / 2)
    a = 2.0 / (server_round + 2)
    return Mu2State(state.start, w, (1.0 - a) * state.x + a * w, state.x, total)


@dataclass(frozen=True)
class Mu2Rule(ProjectedRule[Mu2State]):
    """mu^2-SGD, whose model is the query point x (:func:`mu2_step`)."""

    state_type: ClassVar[type[Mu2State]] = Mu2State

    def init(self, start: Vector, layout: Layout) -> Mu2State:
        return mu2_start(start)

    def points(self, state: Mu2State) -> tuple[Vector, ...]:
        return state.x, state.x_previous

    def update(self, state: Mu2State, total: Vector, turn: Turn) -> Mu2State:
        return mu2_step(
            state,
            total,
            turn.number,
            clients_per_round=turn.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
        )

    def model(self, state: Mu2State) -> Vector:
        return state.x


class Mu2(ReleaseStrategy[Mu2State]):
    """DP-mu^2-FL with an untrusted server: the clients' noise cancels itself.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
    aggregator : Aggregator, optional
        How the releases of a round become a sum. Default: they are added up, as they are or under masks with
        ``secure_aggregation``. One that adds noise must release prefix sums (:class:`TrustedMu2` makes it).
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
    Everything the server sees is covered by each client's own guarantee (:class:`~murmurfl.clients.Mu2Client`), and
    so is everything computed here, as post-processing.

    The published model after round t is x_{t+1}. The papers output x_T, which leaves the replies of the last round
    unused though their privacy is spent; the analysis is the same for either.

    Examples
    --------
    >>> strategy = Mu2(learning_rate=0.1, diameter=10.0, num_clients=10, clients_per_round=5)
    >>> strategy.rule.learning_rate
    0.1
    """

    def __init__(
        self,
        *,
        learning_rate: float,
        diameter: float = math.inf,
        aggregator: Aggregator | None = None,
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
        if isinstance(aggregator, Noisy):
            self._check_noise(aggregator)
        super().__init__(options, Mu2Rule(float(learning_rate), float(diameter)), aggregator=aggregator)

    def _check_noise(self, noise: Noisy[Stream]) -> None:
        """Refuse noise that does not cover a momentum in which every sample counts once."""
        uses = noise.policy.sample_participations
        if uses > 1:
            raise ConfigurationError(
                f"Expected sample_participations = 1 for {type(self).__name__}, got {uses}: a sample that returns "
                "moves the momentum again, which the noise does not cover. Use one pass, or a strategy of private "
                "momentum (TreeMomentum).",
                kind="conflict",
                setting="sample_participations",
                got=uses,
            )
        if not noise.stream.accumulates:
            raise ConfigurationError(
                f"Expected an aggregator with the stream Prefix for {type(self).__name__}, got "
                f"{type(noise.stream).__name__}: steps are along the sum of all releases so far, which a round's own "
                "noise does not cover.",
                kind="conflict",
                setting="aggregator",
            )


@dataclass(frozen=True)
class AnytimeMu2State(Mu2State):
    """State of mu^2-SGD with anytime steps: rms_t^2, of shape (1,), beside the others."""

    mean_square: Vector


def anytime_mu2_step(
    state: AnytimeMu2State,
    release_sum: Vector,
    server_round: int,
    *,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
    window: int = 0,
) -> AnytimeMu2State:
    """One round with anytime steps: a pure function; parameters as in :func:`mu2_step` and :class:`AnytimeMu2`."""
    weight = min(server_round, window or server_round)
    kept, drawn = (1.0, 0.0) if weight == server_round else (1.0 - 1.0 / window, 0.5 / window)
    total = kept * state.release_sum + release_sum
    q = total / clients_per_round
    mean_square = state.mean_square + (np.mean(np.square(q)) - state.mean_square) / weight
    first = 0.5 if server_round == 1 else 1.0  # nothing shows yet how far one can go
    eta = first * learning_rate / math.sqrt(mean_square[0]) if mean_square[0] else 0.0  # nothing came yet
    w = project_to_ball(state.w - drawn * (state.w - state.start) - eta * q, state.start, diameter / 2)
    a = 2.0 / (weight + 2)
    return AnytimeMu2State(state.start, w, (1.0 - a) * state.x + a * w, state.x, total, mean_square)


@dataclass(frozen=True)
class AnytimeMu2Rule(ProjectedRule[AnytimeMu2State]):
    """mu^2-SGD with anytime steps, whose model is the iterate w (:func:`anytime_mu2_step`).

    Parameters
    ----------
    window : int
        W, rounds after which the past is forgotten; 0 for never.
    """

    state_type: ClassVar[type[AnytimeMu2State]] = AnytimeMu2State

    window: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 0 or self.window == 1:
            raise ConfigurationError(
                f"Expected window of at least 2 rounds, or 0 for none, got {self.window!r}.",
                kind="out-of-range",
                setting="window",
                got=self.window,
            )
        super().__post_init__()

    def init(self, start: Vector, layout: Layout) -> AnytimeMu2State:
        return AnytimeMu2State(start, start, start, start, np.zeros_like(start), np.zeros(1))

    def points(self, state: AnytimeMu2State) -> tuple[Vector, ...]:
        return state.x, state.x_previous

    def update(self, state: AnytimeMu2State, total: Vector, turn: Turn) -> AnytimeMu2State:
        return anytime_mu2_step(
            state,
            total,
            turn.number,
            clients_per_round=turn.clients_per_round,
            learning_rate=self.learning_rate,
            diameter=self.diameter,
            window=self.window,
        )

    def model(self, state: AnytimeMu2State) -> Vector:
        return state.w

    def entries(self, turn: int) -> dict[str, Any]:
        return {protocol.WEIGHED_AS: self.window} if 0 < self.window < turn else {}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "steps": "anytime"}


class AnytimeMu2(ReleaseStrategy[AnytimeMu2State]):
    """DP-mu^2-FL with an untrusted server and steps that need no horizon: for streams whose every model is used.

    Parameters
    ----------
    learning_rate : float
        eta, about how far a parameter moves in a round; 0.5 / (R d^(1/8)) does well for features with norms up to R.
    diameter : float
        D > 0, diameter of the ball K around the initial model; infinite for none.
    window : int
        W, rounds after which the past is forgotten; 0, the default, for never.
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
    Clients are those of :class:`Mu2`, and so is their guarantee: it holds for whatever weights a server asks for, and
    steps are computed from noisy releases alone.

    The published model after round t is w_{t+1}. Nothing depends on the number of rounds: a training that ends after
    round t publishes what a longer one published then.

    Examples
    --------
    >>> strategy = AnytimeMu2(learning_rate=0.1, num_clients=10, clients_per_round=5)
    >>> type(strategy.rule).__name__
    'AnytimeMu2Rule'
    """

    def __init__(
        self,
        *,
        learning_rate: float,
        diameter: float = math.inf,
        window: int = 0,
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
        super().__init__(options, AnytimeMu2Rule(float(learning_rate), float(diameter), window))


class TrustedMu2(Mu2):
    """DP-mu^2-FL with a trusted server: :class:`Mu2` with fresh noise on the sum of all releases so far.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy that all clients were configured with, in which every sample is used once.
    num_rounds : int
        T, the most rounds of which this server ever publishes a model.
    noise_keys : NoiseKeys, optional
        The server's noise key (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`). Default: one from the operating
        system, kept in a file beside the checkpoint.
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
    **Formal guarantees.** The sequence of published models is mu-GDP for replacement of one sample of one client,
    against everybody but the server itself, under the conditions of
    :class:`~murmurfl.strategies.aggregation.noisy.Noisy`. Each release is aggregated exactly once, and
    replies of more releases than the client was asked for are dropped.

    A sample counts once: one that returns would move q by Delta / m again, in rounds that depend on how many samples
    its client has, which no reply tells. So policies in which samples return are refused here, by
    :class:`~murmurfl.clients.Mu2Client` and in the operator's file.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0, trust="trusted-server")
    >>> strategy = TrustedMu2(policy=policy, num_rounds=5, learning_rate=0.1, num_clients=10)
    >>> strategy.rule.learning_rate
    0.1
    """

    def __init__(
        self,
        *,
        policy: PrivacyPolicy,
        num_rounds: int,
        noise_keys: NoiseKeys | None = None,
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
        super().__init__(
            learning_rate=learning_rate,
            diameter=diameter,
            aggregator=Noisy(policy, Prefix(), num_rounds=num_rounds, noise_keys=noise_keys),
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
