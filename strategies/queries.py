"""Queries beside a training, the server's part: one round in which every client answers once, and what is read from it.

What a query releases, how it is bounded and how the sum is read stands in :mod:`murmurfl.privacy.queries`, one file
each. :class:`QueryRound` asks any of them, in a session and a checkpoint of its own; the other classes name the
questions that a run may ask: the mean of features before its training, the evaluation of a model after it, and
statistics of a table.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.errors import ConfigurationError, MurmurflError
from ..privacy.noise import NoiseKeys
from ..privacy.queries.evaluation import SCORES_SHARE, EvaluationResult, EvaluationRows
from ..privacy.queries.mean_of_features import MeanRows
from ..privacy.queries.query import Query, QuerySum
from ..privacy.queries.statistics import ColumnStatistics as ColumnStatistics
from ..privacy.queries.statistics import CountedColumn, StatisticsRows, TableStatistics
from ..privacy.queries.statistics import Estimate as Estimate
from ..privacy.release.policy import PrivacyPolicy
from .aggregation.noisy import Noisy
from .aggregation.streams import Sum
from .callbacks.callback import Callback, Training
from .rounds.options import RoundOptions
from .rounds.participation import LateAnswers
from .rounds.replies import LARGEST_VALUE, DirectReplies, Layout, Reply, RoundReport, Vector
from .rounds.rule import Rule, Turn
from .rounds.strategy import ReleaseStrategy
from .sums.secure_aggregation import SecureAggregation

logger = logging.getLogger("flwr")

Answer = TypeVar("Answer")

_CAP_REACHED = protocol.REFUSAL_NAMES[protocol.CAP_REACHED]


@dataclass(frozen=True)
class QueryState:
    """The model that rows are measured at, and the sum of all rows; zeros before the round.

    Without a model ``model`` has zeros too, as many as a row has values.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import EvaluationRows
    >>> from murmurfl.strategies import QueryRound
    >>> rule = QueryRound(EvaluationRows(), num_clients=10).rule
    >>> state = rule.init(np.zeros(3), [])
    >>> state.model.shape, state.total.shape
    ((3,), (2,))
    """

    model: Vector
    total: Vector


@dataclass(frozen=True)
class QueryRule(Rule[QueryState]):
    """The sum of the rows of one round, kept as it is.

    Parameters
    ----------
    query : Query
        What is asked.
    """

    state_type: ClassVar[type[QueryState]] = QueryState
    divides_by_cohort: ClassVar[bool] = False

    query: Query[Any]

    def init(self, start: Vector, layout: Layout) -> QueryState:
        return QueryState(start, np.zeros(self.query.width))

    def points(self, state: QueryState) -> tuple[Vector, ...]:
        """Return the model, for a query about one."""
        return (state.model,) if self.query.at_a_model else ()

    def update(self, state: QueryState, total: Vector, turn: Turn) -> QueryState:
        return QueryState(state.model, total) if turn.samples else state  # else nothing came

    def model(self, state: QueryState) -> Vector:
        return state.model

    def settings(self) -> dict[str, Any]:
        return self.query.settings()


def noise_on_answers(query: Query[Any], policy: PrivacyPolicy, noise_keys: NoiseKeys | None) -> Noisy[Sum]:
    """Make the noise of a trusted server on the one sum of a query; refuse a policy that is not the query's.

    Notes
    -----
    **Formal guarantees.** What is read from the sum is mu-GDP for replacement of one sample of one client, against
    everybody but the server itself, as :class:`~murmurfl.strategies.aggregation.streams.Sum` says for one round,
    under the conditions of :class:`~murmurfl.strategies.aggregation.noisy.Noisy`.
    Proof: docs/proofs/sensitivities.md.
    """
    query.check_policy(policy)
    return Noisy(policy, Sum(), num_rounds=1, noise_keys=noise_keys)


class _ExcludedBefore(Callback):
    """Exclusion of the clients that another training excluded last."""

    def __init__(self, trained: ReleaseStrategy[Any]) -> None:
        self._trained = trained

    def exclude(self, training: Training) -> Collection[str]:
        return self._trained.excluded


class QueryRound(ReleaseStrategy[QueryState], Generic[Answer]):
    """One round in which all clients answer a query, and what is read from the sum of their answers.

    Parameters
    ----------
    query : Query
        What is asked, as on the clients (:class:`murmurfl.clients.RecordQuery`).
    policy : PrivacyPolicy, optional
        With a trusted server, the policy of the query that all clients were configured with: the server adds the noise.
    noise_keys : NoiseKeys, optional
        The noise key of a trusted server (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`).
    beside : bool
        Whether clients answer the query beside a training; if not, they answer nothing else.
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that the request brings, such as ``{"centre": centre}``
        (:class:`~murmurfl.strategies.MeanOfFeatures`).
    num_clients : int, optional
        M, clients in all; all of them are asked. Default: all that are connected.
    min_available_nodes : int, optional
        Fewest connected clients with which the round begins after ``node_deadline_s``.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler, which has nothing to draw here. Default: from the operating system.
    session : str, optional
        Name of the round, letters and digits, other than a training's. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File of this round's own, written before clients are asked and after they have answered.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    Each client answers once in a session, and counts every session against its budget. A server that was killed while
    clients answered asks again in the same session. Nodes of murmurfl repeat their last answer; other clients have
    given their only answer of it, and refuse.

    With a ``policy`` the server adds the noise (:func:`noise_on_answers`). Without one it adds none, and what is
    guaranteed is the clients'.

    Examples
    --------
    >>> from murmurfl.privacy import EvaluationRows
    >>> strategy = QueryRound(EvaluationRows(), num_clients=10)
    >>> strategy.query.name
    'evaluation'
    """

    supports_forecast: ClassVar[bool] = False
    late_answers: ClassVar[LateAnswers] = "refused"  # there is one round

    must_aggregate: ClassVar[bool] = False

    def __init__(
        self,
        query: Query[Answer],
        *,
        policy: PrivacyPolicy | None = None,
        noise_keys: NoiseKeys | None = None,
        beside: bool = True,
        public_inputs: Mapping[str, NDArray[np.floating]] | None = None,
        num_clients: int | None = None,
        min_available_nodes: int | None = None,
        excluded: Collection[str] = (),
        seed: int | None = None,
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        secure_aggregation: SecureAggregation | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        options = RoundOptions(
            clients_per_round=num_clients,
            allow_exhaustion=True,
            public_inputs=public_inputs,
            num_clients=num_clients,
            min_available_nodes=min_available_nodes,
            excluded=excluded,
            seed=seed,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            secure_aggregation=secure_aggregation,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )
        self.query = query
        self._noise = None if policy is None else noise_on_answers(query, policy, noise_keys)
        super().__init__(options, QueryRule(query), aggregator=self._noise)
        if beside:
            self.entries = {**self.entries, protocol.RELEASE_OF: query.name}
        self._resumed = False
        self._stated: dict[str, list[float]] = {}

    def follow(self, trained: ReleaseStrategy[Any]) -> None:
        """Ask the clients of a training that has ended, and wait for no others than it did."""
        self.clients.restore(trained.clients.names)
        self.requests.follow(trained.requests)
        self.callbacks.append(_ExcludedBefore(trained))

    def collect(
        self,
        grid: Grid | DirectReplies,
        model: ArrayRecord | None = None,
        *,
        timeout: float = 3600.0,
        simulated: bool = False,
    ) -> Answer:
        """Collect the answer from all clients, or from the checkpoint.

        Parameters
        ----------
        grid : Grid or DirectReplies
            Where the clients are.
        model : ArrayRecord, optional
            The model that the query is about; None for a query about records alone.
        timeout : float
            Seconds to wait for replies; later ones are not in the answer.
        simulated : bool
            Whether nodes are simulated ones, as in :meth:`ReleaseStrategy.start`.

        Raises
        ------
        NodesUnavailableError
            If too few clients are connected when the deadline passes.
        OpeningError
            Under secure aggregation, if the sum cannot be opened.
        MurmurflError
            If no client released anything, with what they said.
        """
        if (model is not None) != self.query.at_a_model:
            expected = "the model" if self.query.at_a_model else "no model"
            raise ConfigurationError(
                f"Expected {expected} for {self.query.what}, got {'none' if model is None else 'one'}.", kind="conflict"
            )
        start = ArrayRecord({self.query.name: Array(np.zeros(self.query.width))}) if model is None else model
        self.start(grid, start, num_rounds=1, timeout=timeout, simulated=simulated)
        report = self.history[-1]
        if not report.aggregated or self.state is None:
            return self.unanswered(report)
        logger.info("Query: %s, from %d clients in all.", self.query.what, report.aggregated)
        return self.query.read(
            QuerySum(self.state.total, report.samples, report.aggregated, self.noise_std(), self.heard)
        )

    def unanswered(self, report: RoundReport) -> Answer:
        """Return what :meth:`collect` gives where no client released anything; here, raise with what they said."""
        raise ConfigurationError(
            f"Expected clients to release {self.query.what}, got none from {report.asked}: {self.said(report)}. "
            f"Clients must be configured for {self.query.setting}; see their logs.",
            kind="missing",
        )

    @property
    def release_layout(self) -> Layout:
        return [(self.query.name, (self.query.width,), np.dtype(np.float64))]

    def check_reply(self, reply: Reply) -> bool:
        facts = self.query.facts(reply.metrics)
        if facts is None or reply.samples <= 0:  # nothing can be divided by what it does not say
            return False
        self._stated[reply.client] = facts
        return True

    @property
    def heard(self) -> list[list[float]]:
        """Public facts of each client in the sum (:meth:`Query.facts`)."""
        return [self._stated[name] for name, release in self.acks.items() if name in self._stated and release]

    def noise_std(self) -> float:
        """Return the standard deviation of the noise in each value of the sum, as clients state theirs."""
        own = 0.0 if self._noise is None else self._noise.stream.noise_std(self.query.width)
        return math.hypot(own, *(facts[0] for facts in self.heard if facts))

    @property
    def should_checkpoint(self) -> bool:
        """Whether there is anything to save: a round that gave nothing is repeated in the same session."""
        return not self.history or self.history[-1].aggregated > 0

    def answered_to_another(self, report: RoundReport) -> bool:
        """Return True if a round gave nothing because clients had answered to a server that was then killed."""
        return self._resumed and set(report.refused) == {_CAP_REACHED}

    @staticmethod
    def said(report: RoundReport) -> str:
        """Return why a round gave nothing, in a line."""
        reasons = [f"clients refused with {', '.join(report.refused)}"] if report.refused else []
        reasons += [f"the round was closed ({report.closed})"] if report.closed else []
        reasons += [f"{report.lost} replies were lost"] if report.lost else []
        reasons += [f"{report.malformed} replies were malformed"] if report.malformed else []
        return "; ".join(reasons)

    def _before_asking(self) -> None:
        """Save the session's name: in another session clients would count the release a second time."""
        if not self.aggregator.adds_noise:  # else it has saved it
            self._save()

    def _kept(self) -> dict[str, Any]:
        return {**super()._kept(), "stated": self._stated}

    def _restore(self, saved: Mapping[str, Any]) -> None:
        super()._restore(saved)
        self._stated = {str(name): [float(value) for value in facts] for name, facts in saved["stated"].items()}

    def _resume(self, result: Result) -> int:
        self._resumed = self.checkpoint is not None and self.checkpoint.exists()
        return super()._resume(result)


_LARGEST_FEATURE = 1e30
"""The largest magnitude in a release of a mean: a float32 holds the sum over a hundred million clients."""


class MeanOfFeatures(QueryRound[NDArray[np.float32]]):
    """The mean of the features in one round, for clients configured for centring.

    Parameters
    ----------
    num_features : int
        k, values of one sample's features.
    policy : PrivacyPolicy, optional
        With a trusted server, the policy of the query that all clients were configured with: the server adds the noise.
    noise_keys : NoiseKeys, optional
        The noise key of a trusted server (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`).
    num_clients : int, optional
        M, clients in all; all of them are asked. Default: all that are connected.
    min_available_nodes : int, optional
        Fewest connected clients with which the round begins after ``node_deadline_s``.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler, which has nothing to draw here. Default: from the operating system.
    session : str, optional
        Name of the round, letters and digits, other than a training's. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File of this round's own, written before clients are asked and after they have answered.
    largest_value : float
        Largest magnitude of a value in an honest release, at most 1e30; a reply beyond it is malformed.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    A server that was killed while clients answered asks again in the same session. Where all had answered, the mean is
    zero, with a warning: features are used as they lie.

    Examples
    --------
    A training around a private mean takes two strategies, one after the other, over one grid::

        centre = MeanOfFeatures(num_features=64, num_clients=10).collect(grid)
        trained = Mu2(num_clients=10, clients_per_round=5, learning_rate=0.1, public_inputs={"centre": centre})
        trained.start(grid, initial, num_rounds=20)

    Examples
    --------
    >>> strategy = MeanOfFeatures(num_features=64, num_clients=10)
    >>> strategy.query.name
    'mean'
    """

    def __init__(
        self,
        *,
        num_features: int,
        policy: PrivacyPolicy | None = None,
        noise_keys: NoiseKeys | None = None,
        num_clients: int | None = None,
        min_available_nodes: int | None = None,
        excluded: Collection[str] = (),
        seed: int | None = None,
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        secure_aggregation: SecureAggregation | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        super().__init__(
            MeanRows(num_features),
            policy=policy,
            noise_keys=noise_keys,
            num_clients=num_clients,
            min_available_nodes=min_available_nodes,
            excluded=excluded,
            seed=seed,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=min(largest_value, _LARGEST_FEATURE),
            secure_aggregation=secure_aggregation,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )

    def unanswered(self, report: RoundReport) -> NDArray[np.float32]:
        """Zero where a killed server had all answers: a training need not fail for it."""
        if self.answered_to_another(report):
            logger.warning(
                "Centring: all clients had released the mean of their features to a server that was killed before it "
                "had them; features are used as they lie."
            )
            return np.zeros(self.query.width, dtype=np.float32)
        raise ConfigurationError(
            f"Expected clients to release the mean of their features, got none from {report.asked}: "
            f"{self.said(report)}. Clients must be configured for centring; see their logs, or train with "
            "centring = none.",
            kind="missing",
        )


class NotEvaluatedError(MurmurflError):
    """No client has evaluated the model.

    Examples
    --------
    >>> from murmurfl.strategies import PrivateEvaluation, RoundReport
    >>> evaluation = PrivateEvaluation(num_clients=4)
    >>> try:
    ...     evaluation.unanswered(RoundReport(server_round=1, asked=4, aggregated=0, lost=4))
    ... except NotEvaluatedError as error:
    ...     error.kind
    'missing'
    """

    kind = "missing"


class PrivateEvaluation(QueryRound[EvaluationResult]):
    """The evaluation of a model on clients' samples in one round, for clients configured for it.

    Parameters
    ----------
    bins : int
        Bins of scores, as on the clients; 0 where they count right predictions alone.
    scores_share : float
        Share of the evaluation's mu^2 spent on the scores, as on the clients.
    of_updates : bool
        Whether the clients are those of :class:`~murmurfl.strategies.CorrelatedFedAvg`, which asks them otherwise.
    policy : PrivacyPolicy, optional
        With a trusted server, the policy of the query that all clients were configured with: the server adds the noise.
    noise_keys : NoiseKeys, optional
        The noise key of a trusted server (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`).
    public_inputs : mapping of str to ndarray, optional
        Answers to earlier queries that the request brings, such as ``{"centre": centre}``
        (:class:`~murmurfl.strategies.MeanOfFeatures`).
    num_clients : int, optional
        M, clients in all; all of them are asked. Default: all that are connected.
    min_available_nodes : int, optional
        Fewest connected clients with which the round begins after ``node_deadline_s``.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler, which has nothing to draw here. Default: from the operating system.
    session : str, optional
        Name of the round, letters and digits, other than a training's. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File of this round's own, written before clients are asked and after they have answered.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Examples
    --------
    A training and an evaluation take two strategies, one after the other, over one grid::

        trained = FullBatch(num_clients=10, clients_per_round=10, learning_rate=0.1).start(grid, initial, num_rounds=9)
        print(PrivateEvaluation(num_clients=10).evaluate(grid, trained.arrays).sentence)

    Examples
    --------
    >>> evaluation = PrivateEvaluation(bins=8, num_clients=10)
    >>> evaluation.query.bins
    8
    """

    def __init__(
        self,
        *,
        bins: int = 0,
        scores_share: float = SCORES_SHARE,
        of_updates: bool = False,
        policy: PrivacyPolicy | None = None,
        noise_keys: NoiseKeys | None = None,
        public_inputs: Mapping[str, NDArray[np.floating]] | None = None,
        num_clients: int | None = None,
        min_available_nodes: int | None = None,
        excluded: Collection[str] = (),
        seed: int | None = None,
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        secure_aggregation: SecureAggregation | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if of_updates:
            self.message_type_of_queries = MessageType.TRAIN  # type: ignore[misc]
        super().__init__(
            EvaluationRows(bins, scores_share),
            policy=policy,
            noise_keys=noise_keys,
            public_inputs=public_inputs,
            num_clients=num_clients,
            min_available_nodes=min_available_nodes,
            excluded=excluded,
            seed=seed,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            secure_aggregation=secure_aggregation,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )

    def evaluate(self, grid: Grid | DirectReplies, arrays: ArrayRecord, *, timeout: float = 3600.0) -> EvaluationResult:
        """Evaluate a model as :meth:`QueryRound.collect` does.

        Raises
        ------
        NotEvaluatedError
            If no client released anything, with what they said.
        """
        found = self.collect(grid, arrays, timeout=timeout)
        logger.info("Private evaluation: %s.", found.sentence)
        return found

    def unanswered(self, report: RoundReport) -> EvaluationResult:
        """Raise, with what clients said."""
        killed = " by a server that was killed before it had their answers" if self.answered_to_another(report) else ""
        raise NotEvaluatedError(
            f"Expected clients to evaluate the model, got nothing from {report.asked}{killed}: {self.said(report)}. "
            "Clients must be configured for private evaluation; see their logs."
        )


class Statistics(QueryRound[TableStatistics]):
    """Statistics of a table's columns over all clients in one round.

    Parameters
    ----------
    columns : sequence of CountedColumn
        The columns, as on the clients: ``murmurfl.clients.statistics_columns(schema)``.
    beside : bool
        Whether clients release statistics beside a training (:class:`murmurfl.clients.Counting`) and not as a run of
        their own (:class:`murmurfl.clients.StatisticsClient`).
    policy : PrivacyPolicy, optional
        With a trusted server, the policy of the query that all clients were configured with: the server adds the noise.
    noise_keys : NoiseKeys, optional
        The noise key of a trusted server (:class:`~murmurfl.strategies.aggregation.noisy.Noisy`).
    num_clients : int, optional
        M, clients in all; all of them are asked. Default: all that are connected.
    min_available_nodes : int, optional
        Fewest connected clients with which the round begins after ``node_deadline_s``.
    excluded : collection of str
        Names of clients that are not asked.
    seed : int, optional
        Seed of the sampler, which has nothing to draw here. Default: from the operating system.
    session : str, optional
        Name of the round, letters and digits, other than a training's. Default: random.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds.
    checkpoint : Path or str, optional
        File of this round's own, written before clients are asked and after they have answered.
    largest_value : float
        Largest magnitude of a value in an honest release; a reply beyond it is malformed.
    secure_aggregation : SecureAggregation, optional
        Clients release under masks, and helpers open only sums.
    permit : str, optional
        Permit of the session's owner, sent with every message.
    schema : str, optional
        Digest of the schema of records. Clients that state another one are not asked.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.

    Notes
    -----
    What is guaranteed is the clients': mu-GDP for replacement of one record, of all figures together
    (:func:`~murmurfl.privacy.statistics_policy`).

    Examples
    --------
    In a Flower project's ``ServerApp``::

        found = Statistics(columns=statistics_columns(schema), num_clients=10).collect(grid)
        print(found["age"].mean, found["age"].quantile(0.5))

    Examples
    --------
    >>> from murmurfl.privacy import CountedColumn
    >>> strategy = Statistics(columns=[CountedColumn("age", bounds=(0.0, 120.0))], num_clients=10)
    >>> strategy.query.name
    'statistics'
    """

    def __init__(
        self,
        *,
        columns: Sequence[CountedColumn],
        beside: bool = False,
        policy: PrivacyPolicy | None = None,
        noise_keys: NoiseKeys | None = None,
        num_clients: int | None = None,
        min_available_nodes: int | None = None,
        excluded: Collection[str] = (),
        seed: int | None = None,
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        secure_aggregation: SecureAggregation | None = None,
        permit: str | None = None,
        schema: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        super().__init__(
            StatisticsRows(tuple(columns)),
            policy=policy,
            noise_keys=noise_keys,
            beside=beside,
            num_clients=num_clients,
            min_available_nodes=min_available_nodes,
            excluded=excluded,
            seed=seed,
            session=session,
            node_deadline_s=node_deadline_s,
            checkpoint=checkpoint,
            largest_value=largest_value,
            secure_aggregation=secure_aggregation,
            permit=permit,
            schema=schema,
            callbacks=callbacks,
        )

    def unanswered(self, report: RoundReport) -> TableStatistics:
        """Raise, with what clients said."""
        raise ConfigurationError(
            f"Expected clients to release statistics, got none from {report.asked}: {self.said(report)}. Clients "
            "must be configured for statistics of the same columns; see their logs.",
            kind="missing",
        )
