"""Federated averaging of private updates, the server's half of :class:`~murmurfl.clients.CorrelatedNoiseMod`.

    x_{t+1} = x_t + (eta_g / m) sum of the releases

where a client's releases sum up to its clipped updates (trained minus received model) and one row of noise. Weights
are equal: a weight by the number of examples would publish a number that depends on data, and would change what one
client's noise hides.

Or a step of a server optimiser along that average Delta_t, as Flower's FedAvgM, FedAdam and FedYogi:

    momentum:  u_t = beta u_{t-1} + Delta_t,  x_{t+1} = x_t + eta u_t
    Adam:      m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t,  v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2,
               x_{t+1} = x_t + eta c_t m_t / (sqrt v_t + tau)
    Yogi:      m_t as Adam,  v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2),
               x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

where c_t = sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1)). An optimiser sees releases alone, whose noise is in them
already: it costs no privacy.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.accounting.gdp import check_positive
from ..privacy.accounting.guarantee import Guarantee, Unit
from ..privacy.accounting.loss import Loss
from ..privacy.errors import ConfigurationError
from .callbacks.callback import Callback
from .mu2 import check_finite
from .rounds.observed import check_evaluations, check_masks
from .rounds.options import RoundOptions, positive
from .rounds.participation import Sampling
from .rounds.replies import LARGEST_VALUE, DirectReplies, Layout, Reply, RoundReport, Vector, exchange
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

logger = logging.getLogger("flwr")

Moments = NDArray[np.float64]
"""State of an optimiser between rounds, shape (k, d): one row for momentum, two for Adam and Yogi."""


def momentum_step(
    moments: Moments, update: Vector, *, momentum: float, nesterov: bool = False
) -> tuple[Vector, Moments]:
    """Return a momentum step's direction (Delta + beta u if ``nesterov``) and the new moments u, shape (1, d): pure.

    Examples
    --------
    >>> direction, moments = momentum_step(np.array([[1.0, 0.0]]), np.array([1.0, 2.0]), momentum=0.5)
    >>> direction.tolist()
    [1.5, 2.0]
    """
    velocity = momentum * moments[0] + update
    return (update + momentum * velocity if nesterov else velocity), velocity[None, :]


def adam_step(
    moments: Moments, update: Vector, steps: int, *, beta_1: float, beta_2: float, tau: float
) -> tuple[Vector, Moments]:
    """Return the direction of an Adam step after ``steps`` others, and the new moments m and v, shape (2, d): pure.

    The correction is that of Flower's FedAdam, which counts from 2.

    Examples
    --------
    >>> import numpy as np
    >>> direction, moments = adam_step(np.zeros((2, 1)), np.array([1.0]), 0, beta_1=0.9, beta_2=0.99, tau=1e-3)
    >>> moments.round(3).tolist()
    [[0.1], [0.01]]
    """
    first = beta_1 * moments[0] + (1 - beta_1) * update
    second = beta_2 * moments[1] + (1 - beta_2) * update**2
    correction = math.sqrt(1 - beta_2 ** (steps + 2)) / (1 - beta_1 ** (steps + 2))
    return correction * first / (np.sqrt(second) + tau), np.stack([first, second])


def yogi_step(moments: Moments, update: Vector, *, beta_1: float, beta_2: float, tau: float) -> tuple[Vector, Moments]:
    """Return the direction of a Yogi step, Adam whose second moment grows slowly, and the new moments: pure.

    Examples
    --------
    >>> import numpy as np
    >>> direction, moments = yogi_step(np.zeros((2, 1)), np.array([1.0]), beta_1=0.9, beta_2=0.99, tau=1e-3)
    >>> moments.round(3).tolist()
    [[0.1], [0.01]]
    """
    first = beta_1 * moments[0] + (1 - beta_1) * update
    square = update**2
    second = moments[1] - (1 - beta_2) * square * np.sign(moments[1] - square)
    return first / (np.sqrt(second) + tau), np.stack([first, second])


class ServerOptimizer:
    """A rule by which :class:`~murmurfl.strategies.CorrelatedFedAvg` steps along average updates; a base class.

    A subclass is a frozen dataclass of its settings. It sees releases alone, so the clients' guarantees are what they
    are without it.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from murmurfl.strategies import CorrelatedFedAvg
    >>> @dataclass(frozen=True)
    ... class SignSteps(ServerOptimizer):
    ...     scale: float = 0.1
    ...     def direction(self, moments, update, steps):
    ...         return self.scale * np.sign(update), moments
    >>> SignSteps().direction(np.zeros((0, 2)), np.array([3.0, -0.2]), 0)[0].tolist()
    [0.1, -0.1]
    >>> strategy = CorrelatedFedAvg(optimizer=SignSteps(), num_clients=10, clients_per_round=5)
    """

    learning_rate: ClassVar[float] = 1.0
    """Default eta."""
    remembered: ClassVar[int] = 0
    """k, rows of moments."""

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        """Return a step's direction after ``steps`` others and the new moments, shape (k, d), zeros at first: pure."""
        raise NotImplementedError(f"{type(self).__name__} must define direction.")

    @property
    def settings(self) -> dict[str, Any]:
        """Name and numbers that a checkpoint must agree on, plain values."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class ServerMomentum(ServerOptimizer):
    """Momentum on the average update, as Flower's FedAvgM; the learning rate is 1 unless the strategy says another.

    Parameters
    ----------
    momentum : float
        beta, 0 <= beta < 1. In the long run the steps along a constant update are 1 / (1 - beta) times as long.
    nesterov : bool
        Whether to look ahead along the momentum.

    Examples
    --------
    >>> from murmurfl.strategies import CorrelatedFedAvg
    >>> strategy = CorrelatedFedAvg(optimizer=ServerMomentum(momentum=0.9), num_clients=10, clients_per_round=5)
    >>> strategy.rule.optimizer.remembered
    1
    """

    remembered: ClassVar[int] = 1

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_below_one("momentum", self.momentum)

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return momentum_step(moments, update, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """Adam on the average update, as Flower's FedAdam; the learning rate is 0.1 unless the strategy says another.

    Parameters
    ----------
    beta_1, beta_2 : float
        What of the moments stays from round to round, from 0 to below 1.
    tau : float
        Added to the root of the second moment, > 0.

    Notes
    -----
    Where noise is most of the average, the second moment is the noise's, and the steps are those of momentum.

    Examples
    --------
    >>> from murmurfl.strategies import CorrelatedFedAvg
    >>> strategy = CorrelatedFedAvg(optimizer=ServerAdam(tau=0.01), num_clients=10, clients_per_round=5)
    >>> strategy.rule.optimizer.remembered
    2
    """

    learning_rate = 0.1
    remembered: ClassVar[int] = 2

    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_below_one("beta_1", self.beta_1)
        _check_below_one("beta_2", self.beta_2)
        check_positive("tau", self.tau)

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return adam_step(moments, update, steps, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


@dataclass(frozen=True)
class ServerYogi(ServerAdam):
    """Yogi on the average update, as Flower's FedYogi; the learning rate is 0.01 unless the strategy says another.

    Its parameters are those of :class:`ServerAdam`.

    Examples
    --------
    >>> from murmurfl.strategies import CorrelatedFedAvg
    >>> strategy = CorrelatedFedAvg(optimizer=ServerYogi(tau=0.01), num_clients=10, clients_per_round=5)
    >>> strategy.rule.optimizer.remembered
    2
    """

    learning_rate = 0.01
    remembered: ClassVar[int] = 2

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return yogi_step(moments, update, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


OPTIMIZERS: dict[str, type[ServerOptimizer]] = {"momentum": ServerMomentum, "adam": ServerAdam, "yogi": ServerYogi}
"""Optimisers by the names that ``CorrelatedFedAvg(optimizer=...)`` takes as well."""


def server_optimizer(optimizer: ServerOptimizer | str | None) -> ServerOptimizer | None:
    """Return a server optimiser given by name or as an object; None for plain averaging."""
    if optimizer is None or isinstance(optimizer, ServerOptimizer):
        return optimizer
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]()
    names = ", ".join(map(repr, OPTIMIZERS))
    raise ConfigurationError(
        f"Expected optimizer one of {names}, or an object such as ServerMomentum(momentum=0.9), got {optimizer!r}.",
        kind="unknown-name",
        setting="optimizer",
        got=optimizer,
    )


def _check_below_one(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigurationError(
            f"Expected 0 <= {name} < 1, got {value!r}.", kind="out-of-range", setting=name, got=value
        )


_RUNNING_STATISTICS = ("running_mean", "running_var")
"""Names of PyTorch's buffers of a normalisation that tracks its statistics."""
_UNITS: dict[Any, Unit] = {0: "sample", 1: "client"}
_MECHANISM = "noise on each client, by its own account"
_UNCHECKED = "It is what the clients say of themselves, which a server cannot check."


@dataclass(frozen=True)
class AverageState:
    """State of federated averaging: the model's floating-point values x, shape (d,), and a server optimiser's memory.

    ``moments`` has the rows of the optimiser (:class:`~murmurfl.strategies.ServerOptimizer`), and ``steps`` counts the
    steps it has taken; without one both stay empty.

    Examples
    --------
    >>> import numpy as np
    >>> AverageState(np.zeros(3)).x.shape
    (3,)
    """

    x: Vector
    moments: Moments = field(default_factory=lambda: np.zeros((0, 0)))
    steps: NDArray[np.float64] = field(default_factory=lambda: np.zeros(()))


def average_step(
    state: AverageState, release_sum: Vector, *, clients_per_round: int, learning_rate: float
) -> AverageState:
    """One round: a pure function.

    Parameters
    ----------
    release_sum : ndarray of shape (d,)
        Sum of the releases aggregated in the round.
    clients_per_round : int
        m, clients asked: what a lost reply carried comes with that client's next.
    learning_rate : float
        eta_g.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import AverageState
    >>> average_step(AverageState(np.zeros(2)), np.array([4.0, 0.0]), clients_per_round=4, learning_rate=1.0).x.tolist()
    [1.0, 0.0]
    """
    return replace(state, x=state.x + learning_rate / clients_per_round * release_sum)


def optimizer_step(
    state: AverageState,
    release_sum: Vector,
    *,
    clients_per_round: int,
    learning_rate: float,
    optimizer: ServerOptimizer,
) -> AverageState:
    """One round with a server optimiser: a pure function, with the parameters of :func:`average_step`.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.strategies import AverageState, ServerMomentum
    >>> state, total = AverageState(np.zeros(2), np.zeros((1, 2))), np.array([4.0, 0.0])
    >>> state = optimizer_step(state, total, clients_per_round=4, learning_rate=1.0, optimizer=ServerMomentum(0.5))
    >>> state.x.tolist()
    [1.0, 0.0]
    """
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        update = release_sum / clients_per_round
        direction, moments = optimizer.direction(state.moments, update, int(state.steps))
        x = state.x + learning_rate * direction
    check_finite(x)
    return AverageState(x, moments, state.steps + 1.0)


@dataclass(frozen=True)
class AverageRule(Rule[AverageState]):
    """Federated averaging, with a server's optimiser if there is one.

    Parameters
    ----------
    learning_rate : float
        eta_g > 0.
    optimizer : ServerOptimizer, optional
        Makes a step of the mean update.
    """

    state_type: ClassVar[type[AverageState]] = AverageState
    divides_by_cohort: ClassVar[bool] = False

    learning_rate: float
    optimizer: ServerOptimizer | None = None

    def init(self, start: Vector, layout: Layout) -> AverageState:
        return AverageState(start, np.zeros((0 if self.optimizer is None else self.optimizer.remembered, start.size)))

    def points(self, state: AverageState) -> tuple[Vector, ...]:
        return (state.x,)

    def update(self, state: AverageState, total: Vector, turn: Turn) -> AverageState:
        if not turn.aggregated:
            return state  # momentum would go on without a word from any client
        m, rate = turn.clients_per_round, self.learning_rate
        if turn.samples > turn.aggregated:  # sums over samples, not updates that count once each
            total = total * (m / turn.samples)
        if self.optimizer is None:
            return average_step(state, total, clients_per_round=m, learning_rate=rate)
        return optimizer_step(state, total, clients_per_round=m, learning_rate=rate, optimizer=self.optimizer)

    def model(self, state: AverageState) -> Vector:
        return state.x

    def settings(self) -> dict[str, Any]:
        own = {} if self.optimizer is None else {"optimizer": self.optimizer.settings}
        return {"learning_rate": self.learning_rate, **own}


class CorrelatedFedAvg(ReleaseStrategy[AverageState]):
    """Federated averaging for ClientApps with :class:`~murmurfl.clients.CorrelatedNoiseMod`, in place of FedAvg.

    Parameters
    ----------
    learning_rate : float, optional
        eta_g > 0, how far to go along the average; default 1, plain averaging, or what the optimiser has.
    optimizer : ServerOptimizer or {"momentum", "adam", "yogi"}, optional
        What is made of a round's average: :class:`~murmurfl.strategies.ServerMomentum`,
        :class:`~murmurfl.strategies.ServerAdam` or :class:`~murmurfl.strategies.ServerYogi`, as Flower's FedAvgM,
        FedAdam and FedYogi; default plain averaging.
    evaluate_on_clients : bool
        Ask all connected clients to evaluate the model after every round. Clients refuse unless their own
        configuration allows it; what comes back is not private, and is marked so.
    arrayrecord_key : str
        Key of the model in requests, as in Flower's FedAvg.
    configrecord_key : str
        Key of the configuration in requests, as in Flower's FedAvg.
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
    The model may hold arrays of integers and booleans (such as masks): they are sent along and published as they came
    in ``initial_arrays``, never changed. Running statistics of a batch norm (``running_mean``, ``running_var``) are
    refused, because noise makes variances negative. Other floating-point arrays of any width are kept in float64 here
    and cast to their own dtype when they are sent.

    A round from which nothing came, or which stayed closed under secure aggregation, changes nothing, the optimiser's
    moments neither; what clients carry over comes with a later average. Noise that cancels between a client's
    releases does so in plain averages only: an optimiser keeps more of it, Adam and Yogi most. With releases that stand
    alone (``mechanism="independent"``, the default where data return in every release) there is nothing to lose.

    The epsilon in the log is what the clients say they guarantee (:class:`~murmurfl.clients.CorrelatedNoiseMod`); a
    server cannot check it. It does not cover evaluations.

    Examples
    --------
    >>> strategy = CorrelatedFedAvg(num_clients=10, clients_per_round=5, learning_rate=1.0)
    >>> type(strategy.rule).__name__
    'AverageRule'
    """

    divergence_remedy: ClassVar[str] = (
        "Lower the learning rate of the clients' training, or that of the strategy, to a third for instance."
    )
    # A ClientApp that has only `@app.train` hands no other message to its mods.
    message_type_of_queries: ClassVar[str] = MessageType.TRAIN
    client_line: ClassVar[str] = (
        "app = ClientApp(mods=[CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, epsilon=4.0, "
        "max_participations=20))])."
    )

    def __init__(
        self,
        *,
        learning_rate: float | None = None,
        optimizer: ServerOptimizer | str | None = None,
        evaluate_on_clients: bool = False,
        arrayrecord_key: str = protocol.ARRAYS,
        configrecord_key: str = protocol.CONFIG,
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
        if learning_rate is not None:
            learning_rate = positive("learning_rate", learning_rate)
        if arrayrecord_key == configrecord_key:
            raise ConfigurationError(f"Expected two record keys, got {arrayrecord_key!r} twice.", kind="duplicate")
        if evaluate_on_clients and not options.waits_for_all:
            raise ConfigurationError(
                "Expected quorum = 1 and over_selection = 1 with evaluate_on_clients, got others: an evaluation waits "
                "for all. Give start(..., evaluate_fn=...), on public data.",
                kind="conflict",
                setting="evaluate_on_clients",
            )
        made = server_optimizer(optimizer)
        default = 1.0 if made is None else made.learning_rate
        super().__init__(options, AverageRule(default if learning_rate is None else learning_rate, made))
        self.evaluate_on_clients = evaluate_on_clients
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self._fixed: dict[str, Array] = {}
        self._order: list[str] = []
        self._stated: dict[tuple[Unit, float, int], tuple[float, float]] = {}
        self._said_who_evaluates = False

    def check_reply(self, reply: Reply) -> bool:
        mu, delta = reply.metrics.get(protocol.MU_GUARANTEED), reply.metrics.get(protocol.DELTA)
        unit = _UNITS.get(reply.metrics.get(protocol.CLIENT_LEVEL, -1))
        if unit is None or not (isinstance(mu, float) and mu > 0 and isinstance(delta, float) and 0 < delta < 1):
            return False
        local, honest = 0.0, 0
        if self.secure_aggregation is not None:  # both figures or none: mu alone would say too much
            local, honest = reply.metrics.get(protocol.MU_LOCAL), reply.metrics.get(protocol.MIN_HONEST)
            if not (isinstance(local, float) and local > 0 and isinstance(honest, int) and honest >= 1):
                return False
        known = self._stated.get((unit, delta, honest), (0.0, 0.0))
        self._stated[unit, delta, honest] = max(mu, known[0]), max(local, known[1])
        return True

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests of :meth:`ReleaseStrategy.configure_train`, under this project's record keys."""
        messages = super().configure_train(server_round, arrays, config, grid)
        for message in messages:
            content = message.content
            records = {
                self.arrayrecord_key: content[protocol.ARRAYS],
                self.configrecord_key: content[protocol.CONFIG],
            }
            message.content.clear()
            message.content.update(records)
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return requests to all connected clients that owe no answer, with ``evaluate_on_clients``; otherwise none."""
        if not self.evaluate_on_clients:
            return []
        settings = ConfigRecord({**config, **self.clients.entries, protocol.SERVER_ROUND: server_round})
        records = {self.arrayrecord_key: arrays, self.configrecord_key: settings}
        return [
            Message(RecordDict({**records}), dst_node_id=node_id, message_type=MessageType.EVALUATE)
            for name, node_id in self.clients.node_map().items()
            if name not in self.sampler.excluded | self.requests.clients  # one message at a time
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the plain mean of what the clients that allow it report; **not private**."""
        replies = list(replies)
        reports = [
            dict(record)
            for reply in replies
            if not reply.has_error()
            for record in reply.content.metric_records.values()
            if record.get(protocol.NOT_PRIVATE) == 1
        ]
        if len(reports) < len(replies) and not self._said_who_evaluates:
            self._said_who_evaluates = True
            logger.warning(
                "Round %d: %d of %d clients evaluated the model. A client does so only where its own configuration "
                "allows it: allow_evaluation=True in its UpdatePolicy, allow-evaluation = true in its operator's file. "
                "The results have no noise; evaluate_fn, on public data, needs no permission.",
                *(server_round, len(reports), len(replies)),
            )
        if not reports:
            return None
        logger.warning("Round %d: results of evaluations came without noise; no epsilon covers them.", server_round)
        names = [name for name in reports[0] if all(isinstance(report.get(name), int | float) for report in reports)]
        return MetricRecord({name: float(np.mean([report[name] for report in reports])) for name in names})

    def _check_statements(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        check_masks(statements, masked=self.aggregator.masked)
        if self.evaluate_on_clients:
            check_evaluations(statements)

    def _take_round(self, server_round: int, outcomes: Iterable[Any]) -> RoundReport:
        self._stated = {}
        report = super()._take_round(server_round, outcomes)
        sentence = " ".join(
            _guarantee(unit, delta, honest, *mus).sentence
            for (unit, delta, honest), mus in sorted(self._stated.items())
        )
        logger.info(
            "Round %d: %d of %d updates aggregated. %s",
            *(server_round, report.aggregated, report.asked, sentence or "Nothing is known of its privacy."),
        )
        return report

    def _after_round(
        self, server_round: int, grid: Grid | DirectReplies, config: ConfigRecord, timeout: float, result: Result
    ) -> None:
        if not self.evaluate_on_clients or isinstance(grid, DirectReplies):
            return
        messages = self.configure_evaluate(server_round, self._model(), config, grid)
        metrics = self.aggregate_evaluate(server_round, exchange(grid, messages, timeout))
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _ensure_state(self, arrays: ArrayRecord) -> AverageState:
        if self.state is None:
            self._order = list(arrays)
            self._fixed = {name: array for name, array in arrays.items() if array.numpy().dtype.kind in "iub"}
            trained = {name: array for name, array in arrays.items() if name not in self._fixed}
            _check_running_statistics(trained)
            arrays = ArrayRecord(trained) if trained else arrays  # else refused, with what is in it
        return super()._ensure_state(arrays)

    def _identity(self) -> dict[str, Any]:
        fixed = [[name, array.dtype, hashlib.sha256(array.data).hexdigest()] for name, array in self._fixed.items()]
        return {**super()._identity(), "fixed": fixed}

    def _record(self, vector: Vector) -> ArrayRecord:
        arrays = {**self._fixed, **super()._record(vector)}
        return ArrayRecord({name: arrays[name] for name in self._order})


def _check_running_statistics(names: Iterable[str]) -> None:
    """Refuse the running statistics of a normalisation, whose variances noise makes negative."""
    found = [name for name in names if name.rsplit(".", 1)[-1] in _RUNNING_STATISTICS]
    if found:
        raise ConfigurationError(
            f"Expected arrays to which noise can be added, got the running statistics {found[0]!r} of a batch or "
            "instance norm: noise makes variances negative, and the model then computes NaN. Use torch.nn.GroupNorm or "
            "LayerNorm; or freeze the layer, and send and return trainable_arrays(module) in place of its state_dict.",
            kind="unsupported",
            setting="module",
        )


def _guarantee(unit: Unit, delta: float, honest: int, mu: float, local: float) -> Guarantee:
    """Return the guarantee that clients state."""
    if not honest:
        return Guarantee(mu, delta, _MECHANISM, unit=unit, notes=(_UNCHECKED,))
    return Guarantee(
        Loss.of(mu, local).tightened(),
        delta,
        _MECHANISM,
        unit=unit,
        notes=(_UNCHECKED,),
        trust="secure-aggregation",
        min_honest=honest,
    )
