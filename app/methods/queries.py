"""The queries of a run beside its training: the mean of the features before it, a private evaluation after it.

A run has a list of them (:attr:`~murmurfl.app.runs.experiment.Experiment.queries`), from the registry
:data:`RUN_QUERIES`. Each says which share of mu^2 a configuration gives it, how a client answers it, and what its
answer is to the result. Everything else is the same for all: its noise, the server's part with a session of its own,
which a permit names too, and its sentence in the guarantee. What a query is stands in :mod:`murmurfl.privacy.queries`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...clients.queries import Centring, ClientQuery, Evaluation, Knots, held_out_samples
from ...clients.records.places import additive_rows
from ...privacy.accounting.loss import NO_LOSS, Loss
from ...privacy.accounting.noise_plan import NoisePlan
from ...privacy.errors import ConfigurationError, MurmurflError
from ...privacy.noise import SimulatedKeys
from ...privacy.permits import read_permit
from ...privacy.queries.evaluation import EVALUATION_FIGURES, EvaluationRows, Measured, evaluation_policy
from ...privacy.queries.knots import KnotRows
from ...privacy.queries.mean_of_features import MeanRows, centring_policy
from ...privacy.queries.query import divided_mu
from ...privacy.release.policy import NO_NOISE, PrivacyPolicy
from ...privacy.release.tables import NONE, PRIVATE
from ...strategies.queries import MeanOfFeatures, PrivateEvaluation, QueryRound, noise_on_answers
from ...strategies.rounds.replies import DirectReplies, RoundReport
from ...strategies.rounds.strategy import ReleaseStrategy
from ...strategies.sums.secure_aggregation import SecureAggregation
from ..data.partition import shard_sizes
from ..data.task import Dataset, Shard
from ..models.linear import MOSTLY_RANK, RANK_ALONE
from ..models.model import CENTRE_ARRAY, CONSTANT_ARRAY, KNOTS_ARRAY, Model
from ..settings.registry import registry
from ..settings.run_config import RunConfig, is_additive, is_centred

logger = logging.getLogger("flwr")

Asked = TypeVar("Asked", bound=ClientQuery)

MEAN, KNOTS, EVALUATION = MeanRows.name, KnotRows.name, EvaluationRows.name
"""Suffixes of the sessions of queries, after the training's name."""


def part_session(session: str, part: str) -> str:
    """Return the session of a part of a run whose training is in a session.

    The owner's command names it the same way.
    """
    return session + part


def session_options(config: RunConfig, simulated: str, part: str = "", *, deployed: bool) -> dict[str, Any]:
    """Return the session, the permit and the schema that a strategy of a ``part`` of a run is told.

    Empty for its training.

    A simulation's session is named ``simulated``. Real clients' is named by the permit, or has a fresh name.
    """
    if not deployed:
        return {"session": simulated}
    options = {"session": None, "schema": config.schema}
    if not config.permit:
        return options
    session = read_permit(config.permit).sessions[0]
    return {**options, "session": part_session(session, part) if part else session, "permit": config.permit}


def check_permit(config: RunConfig) -> None:
    """Refuse a permit that leaves out a part of the run, before anything is spent."""
    if not config.permit:
        return
    sessions = read_permit(config.permit).sessions
    parts = list(shares(config))
    missing = [part for part in parts if part_session(sessions[0], part) not in sessions]
    if missing:
        raise ConfigurationError(
            f"Expected a permit for every part of this run, got one without its {' and its '.join(missing)}: have the "
            f"owner sign `murmurfl owner permit KEY --session {sessions[0]} "
            f"{' '.join(f'--{part}' for part in parts)}`.",
            kind="missing",
            setting="permit",
        )


def shares(config: RunConfig) -> dict[str, float]:
    """Return the share of mu^2 of each query that a run asks, by its name, in the order in which clients answer."""
    found = {name: kind.share_of(config) for name, kind in RUN_QUERIES.items()}
    return {name: share for name, share in found.items() if share}


def queries_in(config: RunConfig) -> list[str]:
    """Return the names of the queries of a run, in the order in which clients answer, with those that cost nothing."""
    return [name for name, kind in RUN_QUERIES.items() if kind.is_in(config)]


def trained_config(config: RunConfig) -> RunConfig:
    """Return the run configuration with the mu that its queries leave for the training."""
    taken = sum(shares(config).values())
    return replace(config, mu=divided_mu(config.mu, taken)[1]) if taken else config


class Divides(Protocol):
    """A run configuration or an operator's file, as far as it sets samples aside for an evaluation."""

    @property
    def private_evaluation(self) -> float:
        """The evaluation's share of mu^2."""
        ...

    @property
    def held_out(self) -> float:
        """The share of a client's samples."""
        ...


def trained_samples(config: Divides, samples: int) -> int:
    """Return the number of a client's samples that are trained on: all but those held out for an evaluation."""
    if not config.private_evaluation or not config.held_out:
        return samples
    if samples < 2:
        raise ConfigurationError(
            f"Expected at least two samples on every client with evaluation.held-out = {config.held_out:g}, got "
            f"{samples}: one to train on, and one to evaluate on.",
            kind="out-of-range",
        )
    return samples - held_out_samples(samples, config.held_out)


_SHARED = (
    *("mechanism", "delta", "noise_quality", "trust", "sums", "budget_mu", "budget_local_mu", "samples_per_owner"),
)


def fields_beside(policy: PrivacyPolicy) -> dict[str, Any]:
    """Fields that the policy of a query has in common with that of the training on the same client."""
    return {name: getattr(policy, name) for name in _SHARED}


def beside_queries(policy: PrivacyPolicy, budget_mu: float) -> PrivacyPolicy:
    """Return the training's policy on a client that answers queries: samples are used again, within a budget.

    Notes
    -----
    **Formal guarantees.** A sample is in several sessions then, a query's and another, which the budget counts
    together: everything is budget_mu-GDP for replacement of one sample.
    """
    once = policy.batch_selection == "once" and policy.sample_participations == 1
    return replace(policy, budget_mu=budget_mu, batch_selection="cyclic" if once else policy.batch_selection)


def features_bound(task: str, features: str, num_features: int, feature_bound: float) -> tuple[float, bool]:
    """Return the longest that a row of a task's features can be, and whether it has no negative values.

    ``feature_bound`` is R where the run declares it, else 0: the task's. Both results follow from how features are
    made, never from data, and clients enforce them on every row.
    """
    the_task = registry("task")[task]
    declared = feature_bound or the_task.feature_bound
    bound = math.sqrt(the_task.squared_norm_bound(features, num_features, declared))
    return bound, registry("features")[features].nonnegative and the_task.has_images


def make_centring(
    policy: PrivacyPolicy, bound: tuple[float, bool], num_features: int, *, mu: float, share: float
) -> Centring:
    """Return a client's half of the mean of the features.

    Parameters
    ----------
    policy : PrivacyPolicy
        The training's.
    bound : tuple of float and bool
        From :func:`features_bound`.
    num_features : int
        Values of one sample.
    mu : float
        Mu of the training with all its queries.
    share : float
        Share of mu^2 that the query takes.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.centring_policy`) the release of the
    mean is mu-GDP for replacement of one sample; it stands alone and takes every sample.
    """
    length, nonnegative = bound
    own = centring_policy(length, nonnegative=nonnegative, mu=divided_mu(mu, share)[0], **fields_beside(policy))
    return Centring(own, num_features)


def make_knots(policy: PrivacyPolicy, rows: KnotRows, *, mu: float, share: float) -> Knots:
    """Return a client's half of the knots.

    Parameters
    ----------
    policy : PrivacyPolicy
        The training's.
    mu : float
        Mu of the training with all its queries.
    share : float
        Share of mu^2 that the query takes.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release of the counts is mu-GDP for replacement of one
    sample (of all samples of an owner, where the policy has samples_per_owner); it takes every sample.
    """
    own = mu if rows.given else divided_mu(mu, share)[0]  # of given knots nothing is released
    return Knots(rows.policy(own, **fields_beside(policy)), rows)


def make_evaluation(
    policy: PrivacyPolicy, model: Model, *, mu: float, share: float, bins: int, held_out: int
) -> Evaluation:
    """Return a client's half of the private evaluation.

    Parameters
    ----------
    policy : PrivacyPolicy
        The training's.
    mu : float
        Mu of the training with all its queries.
    share : float
        Share of mu^2 that the query takes.
    bins : int
        Number of bins of scores.
    held_out : int
        Samples that are set aside.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.evaluation_policy`) the release of an
    evaluation is mu-GDP for replacement of one sample, whatever the model is.
    """
    own = evaluation_policy(divided_mu(mu, share)[0], **fields_beside(policy))
    return Evaluation(own, partial(_measured, model), bins=bins, held_out=held_out, shapes=model.shapes)


def _measured(model: Model, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
    """Whether a model predicts each sample right, and, of two classes, how sure it is of class 1."""
    features, labels = samples
    scores = np.asarray(model.logits(parameters, features), dtype=np.float64)
    right = scores.argmax(axis=1) == labels
    if model.num_classes != 2:
        return Measured(right)
    with np.errstate(all="ignore"):
        return Measured(right, 1.0 / (1.0 + np.exp(scores[:, 0] - scores[:, 1])), labels)


_HALVINGS = 200
_BISECTIONS = 30


def plan_or_largest_mu(policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    """Return a policy's plan; if its mu alone is too large for one, the refusal names the largest that is not.

    Notes
    -----
    **Formal guarantees.** The plan is the policy's own: its releases are mu-GDP for replacement of one sample, and a mu
    that has no plan is refused and not made smaller.
    """
    try:
        return policy.plan(num_parameters)
    except ConfigurationError as error:
        largest = _largest_mu(policy, num_parameters)
        if largest is None:
            raise
        raise error.reworded(
            f"{error} Here mu may be at most {largest:.2g}; for a run without any noise, set mechanism={NO_NOISE}."
        ) from error


def _largest_mu(policy: PrivacyPolicy, num_parameters: int) -> float | None:
    """Return the largest mu below the policy's that has a plan, rounded down to two digits.

    None if no smaller one has.
    """

    def possible(mu: float) -> bool:
        try:
            replace(policy, mu=mu, budget_mu=None).plan(num_parameters)
        except ConfigurationError:
            return False
        return True

    low = next((mu for k in range(1, _HALVINGS) if possible(mu := policy.mu * 0.5**k)), None)
    if low is None:
        return None
    high = 2 * low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    step = 10.0 ** (math.floor(math.log10(low)) - 1)
    return math.floor(low / step) * step


class QueriedProblem(Protocol):
    """Part of a run that its queries need (:class:`~murmurfl.app.methods.presets.ResolvedRun`)."""

    @property
    def config(self) -> RunConfig:
        """The run configuration."""
        ...

    @property
    def model(self) -> Model:
        """The run's model."""
        ...

    @property
    def shards(self) -> Sequence[Shard]:
        """The samples of each client."""
        ...

    @property
    def trained_on(self) -> int:
        """Samples that all clients train on."""
        ...

    @property
    def sum_mu(self) -> float:
        """The mu of the noise in a sum over all clients."""
        ...

    def query_session(self, name: str) -> str:
        """Return the session's name of a query, in simulation."""
        ...

    def summation(self) -> dict[str, SecureAggregation]:
        """Options of a strategy under secure aggregation."""
        ...


@dataclass(frozen=True)
class QueryOutcome:
    """Outcome of a query in a run."""

    answer: Any
    """The answer; None where there is none."""
    report: RoundReport | None = None
    """Report on the query's round."""
    failure: str = ""
    """Reason for a missing answer."""


@dataclass(frozen=True)
class RunQuery(ABC, Generic[Asked]):
    """A query of a run: a base class, whose subclasses are entries of :data:`RUN_QUERIES`.

    ``policy`` gives the training's policy on a simulated client; of None for the client with the most samples.
    """

    problem: QueriedProblem
    policy: Callable[[int | None], PrivacyPolicy] = field(repr=False)

    name: ClassVar[str]
    """Name of the query in sessions, permits and noise keys."""
    says: ClassVar[str]
    """Description of what is released, in words for the guarantee."""
    off: ClassVar[str] = ""
    """The setting of a run without it: ``key=value``."""
    result_key: ClassVar[str] = ""
    """Key under which a result has its figures; empty for ``queries``, by its name."""
    of_trained: ClassVar[bool] = True
    """Whether samples that are trained on have a row even where others are set aside."""
    before: ClassVar[bool] = False
    """Whether it is asked before the training, which then needs its answer; else after it, and it may fail."""

    @staticmethod
    @abstractmethod
    def share_of(config: RunConfig) -> float:
        """Return the share of mu^2 that a configuration gives it; 0 where a run does not ask it."""

    @classmethod
    def is_in(cls, config: RunConfig) -> bool:
        """Return True if a run has it: it is asked, or its answer is public anyway."""
        return cls.share_of(config) > 0

    @staticmethod
    def node_settings(config: RunConfig) -> dict[str, Any]:  # noqa: ARG004 - for queries that operators' files know
        """Return settings of an operator's file, by hyphenated key.

        With which a node answers as a simulated client does.
        """
        return {}

    @abstractmethod
    def client_query(self, policy: PrivacyPolicy, samples: int) -> Asked:
        """Return how a client of so many samples answers it, whose training is under ``policy``."""

    def round(self, **options: Any) -> QueryRound[Any]:
        """Return the server's part, with these options."""
        return QueryRound(self.largest.query, **options)

    def seen(self, data: Dataset, answer: Any) -> Dataset:
        """Return data with a test set as clients see their samples, given the answer.

        Their samples stay as they are.
        """
        if not self.largest.query.gives:
            return data
        data = replace(data, test_features=self.largest.seen(data.test_features, answer))
        if self.problem.config.gradient_norm:  # which a simulation computes from all samples
            data = replace(data, train_features=self.largest.seen(data.train_features, answer))
        return data

    def inputs(self, answer: Any) -> dict[str, Any]:
        """Return what later requests bring of the answer: an entry of their strategies' ``public_inputs``."""
        gives = self.largest.query.gives
        return {gives: answer} if gives else {}

    def arrays(self, answer: Any) -> dict[str, Any]:
        """Arrays that whoever uses the model needs beside the model's own, by their names in a saved model."""
        return {}

    def figures(self, outcome: QueryOutcome) -> dict[str, Any]:
        """Return what a result says of it; its mu is by the run configuration."""
        report = outcome.report
        counts = {name: getattr(report, name, None) for name in ("asked", "aggregated", "samples")}
        return {
            **self.recorded,
            "answer": getattr(outcome.answer, "document", outcome.answer),
            **counts,
            "failure": outcome.failure or None,
        }

    @property
    def included(self) -> str:
        """Sentence of the query in the guarantee of real clients."""
        return f"It includes {self.says}, which is released {'first' if self.before else 'last'}."

    def included_share(self, mu: str) -> str:
        """Return the query's sentence in the guarantee of a simulation."""
        when = "which is released first" if self.before else "released last"
        return f"Of it mu = {mu}, {100 * self.share:.4g} % of mu^2, is for {self.says}, {when}."

    @property
    def share(self) -> float:
        """Share of mu^2 that the query costs."""
        return self.share_of(self.problem.config)

    @cached_property
    def largest(self) -> Asked:
        """Query of the client with the most samples."""
        return self.client_query(self.policy(None), max(shard_sizes(self.problem.shards)))

    def of_client(self, client: int) -> Asked:
        """Return the query of a simulated client."""
        samples = len(self.problem.shards[client])
        # A simulation builds a client for every message.
        if samples not in self._answering:
            self._answering[samples] = self.client_query(self.policy(client), samples)
        return self._answering[samples]

    @cached_property
    def _answering(self) -> dict[int, Asked]:
        return {}

    @property
    def width(self) -> int:
        """Values of a release."""
        return self.largest.query.width

    @cached_property
    def plan(self) -> NoisePlan:
        """The noise of one client."""
        return plan_or_largest_mu(self.largest.policy, self.width)

    @cached_property
    def loss(self) -> Loss:
        """Loss of the release: the client's, or the trusted server's."""
        policy = self.largest.policy
        if policy.trust != "trusted-server":
            return self.plan.loss
        noise = noise_on_answers(self.largest.query, policy, self._server_keys)
        return Loss.of(noise.guaranteed_mu(self.width))

    @property
    def mu(self) -> float:
        """Mu of the release."""
        return self.loss.mu

    @property
    def recorded(self) -> dict[str, float]:
        """Mu and share as a result has them; infinite without noise, whatever the configured mu is."""
        return {"mu": self.mu if self.problem.config.private else math.inf, "share": self.share}

    def strategy(
        self, *, deployed: bool = False, checkpoint: Path | None = None, inputs: Mapping[str, Any] | None = None
    ) -> QueryRound[Any]:
        """Return the server's part; a trusted server makes the noise, by a policy.

        Parameters
        ----------
        deployed : bool
            Whether the clients are real.
        checkpoint : Path, optional
            The training's. The query's own lies beside it: a server that is killed asks again in the same session.
        inputs : mapping, optional
            What requests bring of answers to earlier queries (``public_inputs``), such as ``centre``.
        """
        config, policy = self.problem.config, self.largest.policy
        simulated = self.problem.query_session(self.name)
        options: dict[str, Any] = {
            "num_clients": config.num_clients,
            "seed": config.seed,
            **session_options(config, simulated, self.name, deployed=deployed),
            "largest_value": self.plan.largest_value,
            "node_deadline_s": config.node_deadline_s,
            "checkpoint": None
            if checkpoint is None
            else checkpoint.with_name(f"{checkpoint.stem}-{self.name}{checkpoint.suffix}"),
            **self.problem.summation(),
            **({"public_inputs": inputs} if inputs else {}),
        }
        if policy.trust == "trusted-server":
            options |= {"policy": policy, "noise_keys": None if deployed else self._server_keys}
        return self.round(**options)

    @property
    def _server_keys(self) -> SimulatedKeys:
        return SimulatedKeys(self.problem.config.seed, f"server, {self.name}")

    def ask(
        self,
        grid: Grid | DirectReplies,
        checkpoint: Path | None,
        *,
        deployed: bool,
        inputs: Mapping[str, Any],
        model: ArrayRecord | None = None,
        trained: ReleaseStrategy[Any] | None = None,
    ) -> QueryOutcome:
        """Ask all clients, now or from the checkpoint.

        Parameters
        ----------
        inputs : mapping
            What requests bring of answers to earlier queries.
        model : ArrayRecord, optional
            The trained model.
        trained : ReleaseStrategy, optional
            The training, if it has ended. Clients that were off or excluded at its end are not waited for or not asked.
            Where nobody answers, the run keeps its model, and the outcome says why.
        """
        strategy = self.strategy(deployed=deployed, checkpoint=checkpoint, inputs=inputs)
        if deployed and trained is not None:
            strategy.follow(trained)
        about = model if self.largest.query.at_a_model else None
        try:
            timeout = self.problem.config.round_timeout_s
            answer = strategy.collect(grid, about, timeout=timeout, simulated=not deployed)
        except MurmurflError as error:
            if trained is None:
                raise
            logger.warning("There is no answer to a query, %s: %s", self.says, error)
            return QueryOutcome(None, failure=str(error))
        return QueryOutcome(answer, strategy.history[-1])


class MeanOfRun(RunQuery[Centring]):
    """The mean of the features, which clients release before the training."""

    name: ClassVar[str] = MEAN
    says: ClassVar[str] = "the mean of the features"
    off: ClassVar[str] = f"centring={NONE}"
    result_key: ClassVar[str] = "centring"
    before: ClassVar[bool] = True

    @staticmethod
    def share_of(config: RunConfig) -> float:
        """Return the share of mu^2 with centring."""
        return config.centring_share if is_centred(config) else 0.0

    @staticmethod
    def node_settings(config: RunConfig) -> dict[str, Any]:
        """Return settings of centring in an operator's file."""
        if is_centred(config):
            return {"centring": PRIVATE, "centring.share": config.centring_share}
        return {"centring": config.centring} if config.centring else {}

    def client_query(self, policy: PrivacyPolicy, samples: int) -> Centring:
        """Return how a client releases the mean of its features, without the constant appended to them."""
        config, width = self.problem.config, self.problem.model.num_features - 1
        bound = features_bound(config.task, config.features, width, config.feature_bound)
        return make_centring(policy, bound, width, mu=config.mu, share=self.share)

    def round(self, **options: Any) -> MeanOfFeatures:
        """Return the server's part."""
        return MeanOfFeatures(num_features=self.width, **options)

    def arrays(self, answer: NDArray[np.float32]) -> dict[str, Any]:
        """Return the centre of the model's inputs, and the constant beside them (:func:`murmurfl.privacy.centred`)."""
        return {CENTRE_ARRAY: answer, CONSTANT_ARRAY: np.float64(self.constant)}

    @property
    def constant(self) -> float:
        """Value that was appended to centred features (:func:`murmurfl.privacy.centred`)."""
        return self.largest.constant

    def figures(self, outcome: QueryOutcome) -> dict[str, Any]:
        """Return what a result says of the mean; its mu is by the run configuration."""
        counts = {name: getattr(outcome.report, name) for name in ("asked", "aggregated", "samples")}
        return {**self.recorded, "constant": self.constant, **counts}


def knot_rows(config: RunConfig, rank_share: float = 0.0) -> KnotRows | None:
    """Return the query of the knots of a run with an additive model; None with another model.

    Raises ConfigurationError if the task is no table.

    Notes
    -----
    **Formal guarantees.** Its rows depend on one record each (:func:`~murmurfl.clients.records.places.additive_rows`).
    """
    if not is_additive(config):
        return None
    schema = registry("task")[config.task].schema
    if schema is None:
        raise ConfigurationError(
            f"Expected a table for model = {config.model!r}, whose columns have curves, got task = {config.task!r}.",
            kind="conflict",
            setting="model",
        )
    return additive_rows(schema, config.knots, rank_share)


def additive_strength(config: RunConfig, samples_times_mu: float) -> float:
    """Return samples times the mu of a sum, over the root of an additive model's columns: what its constants follow.

    A category counts as many columns as it has values.
    """
    rows = knot_rows(config)
    columns = 1 if rows is None else sum(len(one.values) or 1 for one in rows.columns)
    return samples_times_mu / math.sqrt(columns)


_GIVEN = "The knots of its curves are the schema's, and no part of it is for them."


class KnotsOfRun(RunQuery[Knots]):
    """The counts for the knots of an additive model, which clients release before the training."""

    name: ClassVar[str] = KNOTS
    says: ClassVar[str] = "a histogram of each column of numbers, for its knots"
    off: ClassVar[str] = "model=softmax"
    before: ClassVar[bool] = True

    @staticmethod
    def share_of(config: RunConfig) -> float:
        """Return the share of mu^2 of an additive model's knots; none if the schema has them."""
        rows = knot_rows(config)
        return 0.0 if rows is None or rows.given else config.knots_share

    @classmethod
    def is_in(cls, config: RunConfig) -> bool:
        """Return True if the model needs knots, released or given."""
        return is_additive(config)

    @staticmethod
    def node_settings(config: RunConfig) -> dict[str, Any]:
        """Return settings of an additive model in an operator's file."""
        if not is_additive(config):
            return {}
        return {"model.knots": config.knots, "model.knots-share": config.knots_share}

    def client_query(self, policy: PrivacyPolicy, samples: int) -> Knots:
        """Return how a client counts for the knots of its columns."""
        rows = knot_rows(self.problem.config, self.rank_share)
        if rows is None:
            raise ConfigurationError("Expected an additive model for knots, got another.", kind="conflict")
        return make_knots(policy, rows, mu=self.problem.config.mu, share=self.share)

    @property
    def rank_share(self) -> float:
        """The share of the rank, as set or as noise and sizes want it (docs/tuning.md)."""
        config = self.problem.config
        if config.rank_share:
            return config.rank_share
        strength = additive_strength(config, self.problem.trained_on * self.problem.sum_mu)
        return 1.0 if strength < RANK_ALONE else 0.6 if strength < MOSTLY_RANK else 0.3

    @property
    def given(self) -> bool:
        """Whether the schema has the knots."""
        return bool(self.largest.asked.given)

    @cached_property
    def loss(self) -> Loss:
        """Loss of the release; none if the schema has the knots."""
        return NO_LOSS if self.given else super().loss

    @property
    def included(self) -> str:
        """Sentence of the query in the guarantee of real clients."""
        return _GIVEN if self.given else super().included

    def included_share(self, mu: str) -> str:
        """Return the query's sentence in the guarantee of a simulation."""
        return _GIVEN if self.given else super().included_share(mu)

    def ask(self, grid: Grid | DirectReplies, checkpoint: Path | None, **options: Any) -> QueryOutcome:
        """Ask all clients, or nobody if the schema has the knots."""
        return QueryOutcome(self.largest.asked.public) if self.given else super().ask(grid, checkpoint, **options)

    def seen(self, data: Dataset, answer: Any) -> Dataset:
        """Return data with a test set of additive features, and scaled labels for a regression."""
        rows, data = self.largest.asked, super().seen(data, answer)
        if rows.label is None:
            return data
        data = replace(data, test_labels=rows.scaled(data.test_labels, answer, bounded=False))
        if self.problem.config.gradient_norm:
            data = replace(data, train_labels=rows.scaled(data.train_labels, answer))
        return data

    def arrays(self, answer: NDArray[np.float64]) -> dict[str, Any]:
        """Return the rank share and the knots of the model's features."""
        return {KNOTS_ARRAY: answer}

    def figures(self, outcome: QueryOutcome) -> dict[str, Any]:
        """Return what a result says of the knots; its mu is by the run configuration."""
        counts = {name: getattr(outcome.report, name, None) for name in ("asked", "aggregated", "samples")}
        return {**self.recorded, "answer": np.asarray(outcome.answer).tolist(), **counts, "failure": None}


class EvaluationOfRun(RunQuery[Evaluation]):
    """The private evaluation of the model, which clients release after the training."""

    name: ClassVar[str] = EVALUATION
    of_trained: ClassVar[bool] = False
    says: ClassVar[str] = "a private evaluation of the model"
    off: ClassVar[str] = "evaluation.share=0"
    result_key: ClassVar[str] = "private_evaluation"

    @staticmethod
    def share_of(config: RunConfig) -> float:
        """Return the share of mu^2 of a private evaluation."""
        return config.private_evaluation

    @staticmethod
    def node_settings(config: RunConfig) -> dict[str, Any]:
        """Return settings of a private evaluation in an operator's file."""
        if not config.private_evaluation:
            return {}
        bins = {"evaluation.score-bins": config.score_bins} if config.score_bins else {}
        return {"evaluation.share": config.private_evaluation, "evaluation.held-out": config.held_out, **bins}

    def client_query(self, policy: PrivacyPolicy, samples: int) -> Evaluation:
        """Return how a client of so many samples evaluates the model on those that it sets aside."""
        config = self.problem.config
        return make_evaluation(
            policy,
            self.problem.model,
            mu=config.mu,
            share=self.share,
            bins=config.score_bins,
            held_out=samples - trained_samples(config, samples),
        )

    def round(self, **options: Any) -> PrivateEvaluation:
        """Return the server's part."""
        return PrivateEvaluation(bins=self.largest.bins, scores_share=self.largest.scores_share, **options)

    def figures(self, outcome: QueryOutcome) -> dict[str, Any]:
        """Return what a result says of the evaluation; its mu is by the run configuration."""
        found = dict.fromkeys(EVALUATION_FIGURES) if outcome.answer is None else outcome.answer.document
        return {**self.recorded, **found, "failure": outcome.failure or None}


RUN_QUERIES: dict[str, type[RunQuery[Any]]] = {kind.name: kind for kind in (MeanOfRun, KnotsOfRun, EvaluationOfRun)}
"""Queries that runs may ask, in the order in which clients answer them."""
