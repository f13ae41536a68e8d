"""A run configuration worked out on its data, with the clients and the strategy that its method makes of it.

The same code serves every engine: in simulation an engine builds the clients here, with policies from the run
configuration; on real nodes only the strategy is built, and the clients come from their operators' files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy.typing import NDArray

from ...clients.private_client import PrivateClient
from ...clients.records.client_records import OwnerGradients
from ...privacy.accounting.loss import NO_LOSS, Loss, weakest_loss
from ...privacy.accounting.noise_plan import NoisePlan
from ...privacy.errors import ConfigurationError
from ...privacy.ledger.ledger_records import Ledger
from ...privacy.noise import SimulatedKeys, derived_seed
from ...privacy.release.policy import PrivacyPolicy, check_federation
from ...privacy.release.prefix_sums import RowCache
from ...privacy.setting import refusal
from ...privacy.sums.masking import Masking
from ...privacy.sums.roster import ClientKey
from ...strategies.callbacks.result_folder import ResultFolder
from ...strategies.rounds.exhaustion import exhaustion_schedule
from ...strategies.rounds.sampling import sample_numbers
from ...strategies.rounds.strategy import ReleaseStrategy
from ..data.loading import load_dataset, load_shards
from ..data.partition import shard_sizes
from ..data.task import Dataset
from ..methods import METHODS, Method, ResolvedRun
from ..methods.method import AUTO
from ..methods.presets import constant_feature, feature_bound, the_task
from ..methods.queries import (
    RUN_QUERIES,
    QueryOutcome,
    RunQuery,
    beside_queries,
    knot_rows,
    queries_in,
    session_options,
    shares,
    trained_config,
    trained_samples,
)
from ..models import make_model
from ..models.model import Model
from ..planning import PlanRequest, decide
from ..settings.run_config import RunConfig, check_classes, is_centred

_MOST_COINS = 200_000
"""Replies whose loss is looked at before the first round: seconds."""


@dataclass(frozen=True)
class Exhaustion:
    """The client that first runs out: how many releases it can make, why, and the round that asks for one more."""

    client: int
    server_round: int
    releases: int
    reason: str


@dataclass(frozen=True)
class Experiment(ResolvedRun):
    """A problem and its method: everything that both sides need before the first round.

    Parameters
    ----------
    chosen_by : str
        ``auto`` where the strategy was chosen for the run, otherwise empty.
    chosen_because : str
        Why it was chosen, in a sentence.
    """

    chosen_by: str = ""
    chosen_because: str = ""

    @property
    def choice(self) -> str:
        """The chosen strategy and why, in a line for people; empty where none was chosen."""
        if not self.chosen_by:
            return ""
        return f"{self.chosen_by} chose {self.config.strategy}: {self.chosen_because}"

    @cached_property
    def method(self) -> Method:
        """The method of its configuration."""
        return METHODS[self.config.strategy]

    @cached_property
    def gradients(self) -> Any:
        """The model's gradients, of samples or of owners."""
        return OwnerGradients(self.model) if self.config.samples_per_owner else self.model

    @property
    def asked_rounds(self) -> range:
        """The rounds in which clients are asked."""
        return self.method.asked_rounds(self.config, self.num_rounds)

    def policy(self, client: int | None = None) -> PrivacyPolicy:
        """Return the policy an engine gives a simulated client; None for the client with the most samples."""
        size = max(self.sizes) if client is None else self.sizes[client]
        # Clients with as many samples have the same policy; a simulation builds a client for every message.
        if size not in self._policies:
            policy = self.method.policy(self.trained, size)
            check_federation(policy, self.config.num_clients)
            self._policies[size] = beside_queries(policy, self.config.mu) if shares(self.config) else policy
        return self._policies[size]

    @cached_property
    def _policies(self) -> dict[int, PrivacyPolicy]:
        return {}

    @cached_property
    def queries(self) -> list[RunQuery]:
        """Queries that clients answer in addition to the training, in the order in which they answer."""
        return [RUN_QUERIES[name](self, self.policy) for name in queries_in(self.config)]

    def query(self, name: str) -> RunQuery:
        """Return a query of the run by its name."""
        return {one.name: one for one in self.queries}[name]

    def seen_by(self, answers: Mapping[str, QueryOutcome]) -> Experiment:
        """Return the experiment with a test set as clients see their samples, given answers; their samples stay."""
        data = self.data
        for name, outcome in answers.items():
            data = self.query(name).seen(data, outcome.answer)
        return self if data is self.data else replace(self, data=data)

    def plans(self) -> list[NoisePlan]:
        """Return the different noise plans of the clients."""
        return self.method.plans(self.trained)

    def masking(self, client: int) -> Masking:
        """Return a simulated client's masks."""
        name = str(client)
        return Masking(name, ClientKey.simulated(self.config.seed, name), self.roster)

    def client(
        self, client: int, ledger: Ledger, rows: RowCache | None = None, *, masked: bool = False
    ) -> PrivateClient:
        """Return a simulated client, with seeded keys; for engines only.

        With ``masked`` it hides its releases under secure aggregation, as it must where it answers messages. Masks
        cancel exactly, so an engine without messages leaves them out.
        """
        name = str(client)
        keys = SimulatedKeys(self.config.seed, name)
        parts = (self.gradients, self.shards[client], self.policy(client), ledger, keys)
        options = dict(self.method.client_options(self.trained, client))
        if self.queries:
            options["queries"] = [one.of_client(client) for one in self.queries]
        if masked and self.config.secure:
            options["masking"] = self.masking(client)
        return self.method.client(*parts, name=name, rows=rows, **options)

    def strategy(self, *, deployed: bool = False, **options: Any) -> ReleaseStrategy[Any]:
        """Return the server's half.

        With ``deployed`` clients are real: the session has a fresh random name, because their ledgers know every
        session they ever took part in, and a trusted server's noise key comes from the operating system.
        ``options`` are further ones of the strategy, such as what requests bring of answers to queries.
        """
        config, values = self.config, self.values
        common = {
            "num_clients": config.num_clients,
            "clients_per_round": config.clients_per_round,
            "quorum": config.quorum,
            "min_available_nodes": config.min_available_nodes or None,
            "over_selection": config.over_selection,
            "learning_rate": values.learning_rate,
            "seed": config.seed,
            "sampling": values.sampling,
            **session_options(config, self.session, deployed=deployed),
            "largest_value": max(plan.largest_value for plan in self.plans()),
            "node_deadline_s": config.node_deadline_s,
            # What simulated clients can do is known without asking them.
            "allow_exhaustion": config.allow_exhaustion or not deployed,
            **self.summation(),
            **options,
            # The run has a folder of its own, and knows more.
            "callbacks": [*options.get("callbacks", ()), ResultFolder(None)],
        }
        return self.method.strategy(self.trained, common, deployed=deployed)

    def initial_arrays(self) -> ArrayRecord:
        """Return the public model training starts from, with the names of its parts."""
        parameters = self.model.initial_parameters(self.config.seed)
        record = ArrayRecord(parameters)
        return ArrayRecord(dict(zip(self.model.names, record.values(), strict=True)))

    def evaluate(self, arrays: ArrayRecord) -> MetricRecord | None:
        """Return objective, accuracy and AUC on the test set, which is public; None without a test set."""
        task = the_task(self.config)
        if not (task.has_records and task.is_tested):
            return None
        parameters, samples = arrays.to_numpy_ndarrays(), (self.data.test_features, self.data.test_labels)
        loss, accuracy = self.model.evaluate(parameters, samples)
        objective = self.method.objective(self, parameters, loss)
        return MetricRecord({"loss": objective, "accuracy": accuracy, "auc": self.model.auc(parameters, samples)})

    def loss(self) -> Loss:
        """Return the loss of everything a run may release: the largest of its clients', or the trusted server's.

        Notes
        -----
        It is for replacement of one sample of one client, over all releases the caps allow. With an untrusted server
        it holds against the server; with a trusted one, against everybody else. Under secure aggregation its worst case
        holds whatever server, helpers and other clients do. Infinite without noise, whatever the configured mu is.
        """
        if not (self.asked_rounds and self.config.private):
            mu = math.inf if self.asked_rounds else 0.0  # nobody is asked
            return Loss.of(mu, mu if self.config.secure else None)
        if self.method.trusted:
            server: Any = self.strategy()
            own = Loss.of(server.aggregator.guaranteed_mu(self.model.num_parameters))
        else:
            own = weakest_loss(plan.loss for plan in self.plans())
        return NO_LOSS.compose(*(query.loss for query in self.queries), own)

    @cached_property
    def shortage(self) -> Exhaustion | None:
        """The simulated client that is asked once too often first, if one is.

        Samples and cap settle how many releases a client can make; seed and round settle whom a round asks. A request
        spends samples whether or not its reply is lost.
        """
        return self._shortage(self.num_rounds)

    def _shortage(self, num_rounds: int) -> Exhaustion | None:
        config, sizes = self.config, self.sizes
        rounds = self.method.asked_rounds(config, num_rounds)
        limits = {size: self.method.releases_of(config, size, sizes) for size in set(sizes)}
        # More releases than rounds are as good as that many; so they need not be finite.
        most = {size: math.floor(min(releases, len(rounds))) for size, (releases, _) in limits.items()}
        caps = np.fromiter((most[size] for size in sizes), np.int64)
        found = exhaustion_schedule(lambda server_round, _: self._asked(server_round), caps, rounds).refused
        if found is None:
            return None
        server_round, client = found
        releases, reason = limits[sizes[client]]
        return Exhaustion(client, server_round, int(releases), reason)

    def _asked(self, server_round: int) -> NDArray[np.int64]:
        """Return the clients that a round asks."""
        config, sampling = self.config, self.values.sampling
        return sample_numbers(config.num_clients, config.asked_per_round, config.seed, server_round, sampling)  # type: ignore[arg-type]

    @cached_property
    def replies_left(self) -> list[int]:
        """Replies that arrive in each round, of very many in the first ones; empty where no round can stay closed."""
        config, left = self.config, []
        if config.secure and config.lost_replies:
            for server_round in self.asked_rounds[: max(_MOST_COINS // config.asked_per_round, 1)]:
                names = map(str, self._asked(server_round).tolist())
                lost = (reply_is_lost(config.lost_replies, config.seed, server_round, name) for name in names)
                left.append(sum(not one for one in lost))
        return left

    def check_rounds(self) -> None:
        """Refuse more rounds than samples and caps of simulated clients allow, or sums that would never be opened.

        Without ``num-rounds`` a run is one pass over all samples, in which one client may use up its samples before
        others do. That is allowed with a warning; with ``allow-exhaustion`` everything is.
        """
        config, found = self.config, self.shortage
        if found is not None and not config.allow_exhaustion and (config.num_rounds or config.max_participations):
            raise self._refused(found)
        left, patience = self.replies_left, config.give_up_after
        if not patience or len(left) < patience:
            return
        # Of every so many rounds in a row the best one must be opened.
        possible = min(max(left[i : i + patience]) for i in range(len(left) - patience + 1))
        if possible < config.sums.min_cohort:
            raise ConfigurationError(
                f"Expected a sum in one of every {patience} rounds, got {patience} rounds in a row with fewer than "
                f"trust.min-cohort = {config.sums.min_cohort} replies, with lost-replies = {config.lost_replies:g}: "
                f"the run would be given up. Here trust.min-cohort may be at most {possible}; or set a larger "
                "give-up-after (0: never).",
                kind="conflict",
                setting="trust.min-cohort",
                got=patience,
            )

    def _refused(self, found: Exhaustion) -> ConfigurationError:
        """Return the refusal of a run that asks a client for too many releases.

        It says how many rounds are possible.
        """
        config, num_rounds = self.config, self.num_rounds
        # Which rounds ask clients may depend on how many there are; where all of them do, the answer is known at once.
        possible = found.server_round - 1 if len(self.asked_rounds) == num_rounds else num_rounds - 1
        while self._shortage(possible):
            possible -= 1
        more = "a larger cap" if config.max_participations else "more data, smaller batches, more passes"
        ways = ["fewer rounds", more]
        if config.asked_per_round < config.num_clients and self.values.sampling != "balanced":
            ways.append("sampling = balanced, which asks all clients equally often")
        if self.method.tolerates_dropouts:
            ways.append("allow-exhaustion = true: clients that have nothing left then refuse, and the others go on")
        return ConfigurationError(
            f"Expected num-rounds <= {possible}, got {num_rounds}: client {found.client} can make {found.releases} "
            f"releases ({found.reason}), and round {found.server_round} asks it for one more. Use "
            f"{', or '.join(ways)}.",
            kind="exhausted",
            setting="num-rounds",
            got=num_rounds,
        )


@lru_cache(maxsize=2)
def prepare(config: RunConfig, *, deployed: bool = False) -> Experiment:
    """Work out a run configuration on its data; cached, so every message of a simulation pays for it once.

    Parameters
    ----------
    deployed : bool
        Whether the clients are real: batch and cap are then bounded by what they state, before the first round.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible for these data; one line.
    """
    if not deployed and not the_task(config).has_records:
        raise ConfigurationError(
            f"Expected a task with records in a simulation, got task = {config.task!r}, whose records only real nodes "
            "have: `murmurfl fit TABLE --schema SCHEMA.toml` rehearses a training on a table.",
            kind="conflict",
            setting="task",
        )
    if config.strategy == AUTO:
        return _chosen(config)
    data = load_dataset(config)
    return resolve(config, data, load_shards(config, data, stated=deployed), deployed=deployed)


def _chosen(config: RunConfig) -> Experiment:
    """Return the experiment of the strategy that is chosen for a configuration's sizes, which are public."""
    decision = decide(plan_request_of(config))
    experiment = prepare(decision.request.with_settings(decision.settings))
    return replace(experiment, chosen_by=AUTO, chosen_because=decision.reason)


def plan_request_of(config: RunConfig) -> PlanRequest:
    """Return the situation of a run before its strategy is chosen.

    Wishes and, of the samples, sizes and shapes alone.
    """
    data = load_dataset(config)
    sizes = tuple(shard_sizes(load_shards(config, data)))
    return PlanRequest(config, sizes, data.num_features, data.num_classes, resolve)


def _weighted(config: RunConfig, model: Model) -> Model:
    """Return the model with the class weights of the task's schema; refuse them where they would not be used."""
    weights = the_task(config).class_weights
    if weights and not METHODS[config.strategy].weighs_classes:
        able = ", ".join(name for name, one in METHODS.items() if one.weighs_classes)
        raise refusal("strategy", f"one of {able} with class_weights in the schema", config.strategy)
    return model.with_class_weights(weights)


_ROUNDED = 0.01
"""Relative difference of a clip that was rounded for people."""


def model_of(config: RunConfig, data: Dataset) -> Model:
    """Return the model of a run configuration for its data, cached in this process."""
    centred = is_centred(config)  # a constant stands beside the features that are seen from their mean
    bound, constant = feature_bound(config), constant_feature(config) or centred
    rows = knot_rows(config)
    width = data.num_features + centred if rows is None else rows.num_features
    own = {"constant": constant, "augmentations": config.augmentations}
    model = make_model(config.model, width, data.num_classes, bound, **own)
    model.set_gradient_memory(config.gradient_memory_mib)
    return model


def resolve(config: RunConfig, data: Dataset, shards: Sequence[Any], *, deployed: bool = False) -> Experiment:
    """Work out a run configuration on data that are there; of them only sizes and shapes are looked at."""
    method = METHODS[config.strategy]
    model = _weighted(config, model_of(config, data))
    per_round = config.asked_per_round * config.batch_size
    check_classes(config, data.num_classes)
    sizes = shard_sizes(shards, partial(trained_samples, config))
    if deployed and method.is_iterative and not config.num_rounds:
        raise ConfigurationError(
            "Expected num-rounds for real clients, got none: the server does not know how many samples they have. Say "
            "how many rounds their operators agreed on.",
            kind="missing",
            setting="num-rounds",
        )
    num_rounds = config.num_rounds or method.usual_rounds(config, sizes, model)
    if num_rounds < 1:
        raise ConfigurationError(
            f"Expected at least one round in one pass, got {sum(sizes)} samples for clients-per-round x "
            f"batch-size = {per_round}.",
            kind="out-of-range",
        )
    config = method.calibrated(config, num_rounds, sizes)
    usual = method.settled(trained_config(config), num_rounds, model, sizes)
    values = usual.overridden(config)
    rounded = math.isclose(values.clip_norm, usual.clip_norm, rel_tol=_ROUNDED)  # as in operators' files
    if rounded and replace(values, clip_norm=usual.clip_norm) == usual:  # others have another effect on scores
        model = model.with_temperature(method.usual_temperature(config, num_rounds, model, sizes))
    as_stated = deployed and "batch-size" in method.keys
    fewest = config.batch_size * max(config.max_participations, num_rounds) if as_stated else 0
    return Experiment(config, data, shards, model, num_rounds, values, fewest)


def reply_is_lost(share: float, seed: int, server_round: int, client: str) -> bool:
    """Say whether a client's reply of a round is lost: each reply has a coin of its own, the same on every engine."""
    if share == 0.0:
        return False
    generator = np.random.Generator(np.random.Philox(key=derived_seed("loss", seed, server_round, client)))
    return bool(generator.random() < share)
