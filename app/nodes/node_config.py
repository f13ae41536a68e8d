"""The operator's file of a real client or helper: one TOML file, read where it runs and nowhere else.

Data, model, clip, noise, cap, budget, batch and ledger of a client are decided here, and so is which roster a helper
opens sums of. No run configuration and no message can set or widen any of it. Unknown keys, missing ones and impossible
values are refused with one line.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import PerSampleGradients, Samples, check_rows_alone
from ...clients.messages import records_being_read
from ...clients.nodes.client_file import RecordsFile, Roster, RosterDigest
from ...clients.nodes.operators_file import OperatorsFile
from ...clients.nodes.roster_files import read_helper_key, read_roster
from ...clients.private_client import PrivateClient
from ...clients.queries import ClientQuery
from ...clients.records.client_records import OwnerGradients, Records, check_columns, file_items
from ...clients.records.image_folders import ImageFolder
from ...clients.records.places import additive_rows
from ...clients.records.schema import Schema
from ...privacy.accounting.gdp import asked_mu, gdp_mu
from ...privacy.errors import ConfigurationError
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.mechanisms import MECHANISMS
from ...privacy.queries.clipped_share import COUNTED_CLIP_NORM
from ...privacy.queries.knots import KNOTS, KNOTS_SHARE, KnotRows
from ...privacy.queries.mean_of_features import CENTRING_CONSTANT, CENTRING_SHARE
from ...privacy.queries.query import divided_mu
from ...privacy.release import tables
from ...privacy.release.policy import PrivacyPolicy
from ...privacy.release.tables import CENTRINGS, PRIVATE, SHUFFLED
from ...privacy.setting import Declaration, named_by_key, refusal, settings, unknown_name
from ...privacy.sums.opening_file import SQLiteOpeningRecord
from ...privacy.sums.opening_rule import Opener
from ...privacy.sums.roster import HelperKey
from ..data.loading import load_dataset, load_shards
from ..data.partition import OwnedShards
from ..methods import METHODS, Method
from ..methods.method import bounding
from ..methods.presets import feature_bound
from ..methods.queries import (
    beside_queries,
    features_bound,
    make_centring,
    make_evaluation,
    make_knots,
    trained_samples,
)
from ..models import make_model
from ..models.model import Model
from ..settings.registry import known_mechanism, registry
from ..settings.run_config import RunConfig, centred_by_default
from ..settings.run_keys import (
    Augmentations,
    DataRoot,
    FeatureBound,
    FeaturesName,
    Knots,
    KnotsShare,
    LearningRate,
    ModelName,
    PartitionName,
    StrategyName,
    TaskName,
)

_ANY_DELTA, _FEWEST_CLASSES = 0.5, 2
"""Public facts of a ledger and a model that are not known yet where a file is read."""


def node_strategies() -> list[str]:
    """Return the built-in methods that a real client can take part in."""
    return [name for name, method in METHODS.items() if method.on_real_nodes]


@settings
class NodeConfig(RecordsFile):
    """Everything a real client decides for itself.

    Its settings stand with their sentences in the tables, most of them shared with run configurations
    (:mod:`murmurfl.privacy.release.tables`, :mod:`murmurfl.clients.nodes.client_file`,
    :mod:`~murmurfl.app.settings.run_keys`). In such a file ``strategy`` may be ``trusted-mu2``: the client then adds
    **no noise**, and its server is trusted with gradients and with keeping ``mu`` towards everybody else.
    ``batch_size`` is 1 with ``full-batch``, whose releases are sums over all samples, and which needs
    ``max_participations``. With ``batch_selection = "shuffled"`` no other run may ever use these
    samples. The server must know the same ``quantile_share`` and ``score_bins`` to read releases.

    Notes
    -----
    **Formal guarantees.** All runs together are budget_mu-GDP for replacement of one record (of all records of an
    owner), always with ``exact`` noise; :meth:`policy` says what one run is, and under whose trust. It is the
    operator's word about the operator's data: no value here comes from a server.
    """

    required: ClassVar[frozenset[str]] = frozenset({"clip-norm", "batch-size"})
    strategy: StrategyName = "mu2"
    model: ModelName = "softmax"
    feature_bound: FeatureBound = 0.0
    knots: Knots = KNOTS
    knots_share: KnotsShare = KNOTS_SHARE
    augmentations: Augmentations = 0
    learning_rate: LearningRate = 0.0
    task: TaskName = ""
    features: FeaturesName = "pixels"
    data_root: DataRoot = ""
    partition: PartitionName = "iid"
    partition_seed: Annotated[int, Declaration("How a built-in data set is split.", at_least=0)] = 1
    num_partitions: Annotated[int, Declaration("Into how many parts.")] = 0
    partition_id: Annotated[int, Declaration("Which part is this client's, from 0.")] = -1
    delta: tables.Delta = 0.0
    budget_mu: Annotated[
        float,
        Declaration(
            "Of everything this client ever releases from these data, over all runs (mus add in squares).",
            at_least=0,
            zero="the ledger's",
        ),
    ] = 0.0
    budget_local_mu: Annotated[
        float,
        Declaration("As budget-mu, of the worst case.", at_least=0, zero="the ledger's"),
    ] = 0.0
    clipping: tables.Clipping = ""
    clip_stability: tables.ClipStability = 0.01
    quantile_share: tables.QuantileShare = 0.0
    passes: tables.Passes = 1
    batch_selection: tables.BatchSelection = ""
    centring: tables.Centring = ""
    centring_share: tables.CentringShare = CENTRING_SHARE
    centring_norm: Annotated[
        float, Declaration("S of the mean of `samples`, whose longer rows are cut to it.", key="centring.norm")
    ] = 0.0
    centring_nonnegative: Annotated[
        bool,
        Declaration(
            "Whether `samples` have no negative values: those that are there count as zero in the mean.",
            key="centring.nonnegative",
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "features", "partition"):
            registry(name)[getattr(self, name)]  # refuses an unknown name
        if self.mechanism and known_mechanism(self.mechanism) not in MECHANISMS:
            raise ConfigurationError(
                unknown_name("mechanism", self.mechanism, MECHANISMS), kind="unknown-name", setting="mechanism"
            )
        self._check_method(self.method)
        self._check_data()
        self._check_sides(self.method)
        self._check_policy(self.method)

    def _check_method(self, method: Method) -> None:
        """Refuse settings that the strategy cannot have."""
        keys, named = method.keys, f"with strategy = {self.strategy!r}"
        # How far apart a sample's turns are is the client's to say; a trusted server could not know what to charge.
        once = (method.samples_return and not method.trusted) or self.passes == 1
        reason = "every release has all samples" if method.sums_samples else "its server counts every sample once"
        self._check("passes", once, f"1 {named}: {reason}")
        if method.sums_samples:
            rounds = f"the number of rounds {named}, which uses all samples in each of them"
            self._check("max_participations", self.max_participations >= 1, rounds)
        steps = "set" if method.local_steps else "unset, for its clients take no steps of their own,"
        self._check("learning_rate", (self.learning_rate > 0) == method.local_steps, f"{steps} {named}")
        selections = method.batch_selections if "batch-selection" in keys else ("",)
        expected = " or ".join(filter(None, selections)) or "left out"
        self._check("batch_selection", self.batch_selection in selections, f"{expected} {named}")
        self._check("clipping", not self.clipping or "clipping" in keys, f"left out {named}")
        if self.quantile_share:
            able = "clipping.quantile-share" in keys and self.clipping != "automatic"
            self._check("quantile_share", able, f"0 {named} and clipping = {self.clipping!r}")
            self._check("clip_norm", self.clip_norm == COUNTED_CLIP_NORM, "1 with a clipping.quantile-share")

    def _check_policy(self, method: Method) -> None:
        """Refuse what no policy can be, whatever its ledger, samples and model are."""
        mu = asked_mu(self.mu, self.epsilon or None, self.delta or _ANY_DELTA)
        decided: dict[str, Any] = {
            "mu": mu,
            "delta": self.delta or _ANY_DELTA,
            "budget_mu": mu,
            "trust": self.trust.kind,
        }
        decided |= {"budget_local_mu": self.budget_local_mu or None} | self._of_sums(self.budget_local_mu or None)
        of_model = {"classes": _FEWEST_CLASSES} if "moments" in method.clip_units else {}
        policy = self._policy(self.batch_size * max(self.max_participations, 1), decided, **of_model)
        method.client_type.check_policy(policy)

    def _check_data(self) -> None:
        """Refuse data that are not there, or there twice."""
        self._check("task", bool(self.task) != bool(self.samples), "set, or `samples`, and not both")
        if self.samples:
            self._check(
                "schema", bool(self.schema), "the path of the schema of `samples` (`murmurfl schema` drafts one)"
            )
            self._check(
                "num_records", self.num_records >= 1, "the public number of records of `samples`, an integer >= 1"
            )
            return
        # What a function of one's own makes of a file is read as a whole: one record could decide over all others.
        built_in = ":" not in self.task and not registry("task").is_file(self.task)
        self._check("task", built_in, "a built-in one; data of one's own belong in `samples`")
        registry("task")[self.task]
        self._check("schema", not self.schema, "unset with a built-in task")
        self._check("num_records", self.num_records == 0, "unset with a built-in task")
        self._check("num_partitions", self.num_partitions >= 1, "the number of parts of the task, an integer >= 1")
        parts = f"from 0 to num-partitions - 1 = {self.num_partitions - 1}"
        self._check("partition_id", 0 <= self.partition_id < self.num_partitions, parts)

    def _check_sides(self, method: Method) -> None:
        """Refuse owners, a mean or an evaluation that the strategy cannot have, and settings of them nothing reads."""
        if self.additive:
            able = method.centres and not self.shuffled_batches and not self.centred
            self._check("model", able, "another one with this strategy, batch-selection or centring")
            self._check("model", bool(self.samples), "another one with a built-in task, which is no table")
        else:
            usual = (self.knots, self.knots_share) == (KNOTS, KNOTS_SHARE)
            self._check("knots", usual, "unset, like model.knots-share, unless model = 'additive'")
        able = not self.augmentations or "model.augmentations" in registry("model")[self.model].keys
        self._check("augmentations", able, "0 with a model that is no network of images")
        if self.samples_per_owner:
            able = "samples-per-owner" in method.keys
            clips = f"0 with strategy = {self.strategy!r}, which does not clip by owner"
            self._check("samples_per_owner", able, clips)
            self._check("samples_per_owner", not self.centred, "0 with centring, which counts samples")
        able = method.centres and not self.shuffled_batches
        self._check("centring", self.centring in (CENTRINGS if able else CENTRINGS[:2]), "'none' or empty here")
        if not self.centred:
            self._check("centring_share", self.centring_share == CENTRING_SHARE, "unset without centring")
        own = self.centred and bool(self.samples)
        self._check("centring_norm", (self.centring_norm > 0) == own, "set with centring and `samples`, and only then")
        self._check("centring_nonnegative", own or not self.centring_nonnegative, "unset without centring of `samples`")
        able = method.evaluates and not self.shuffled_batches
        self._check("private_evaluation", able or not self.private_evaluation, "0 here")
        left = 1.0 - self._share_before
        self._check("private_evaluation", self.private_evaluation < left, f"a number >= 0 and < {left:g}")

    @property
    def shuffled_batches(self) -> bool:
        """Whether each sample draws the release it is in, and only this client knows which."""
        return self.batch_selection == SHUFFLED

    @property
    def method(self) -> Method:
        """Method that this client takes part in; refused if a real client cannot."""
        method = METHODS[self.strategy]
        self._check("strategy", method.on_real_nodes, f"one for real nodes, one of {', '.join(node_strategies())}")
        return method

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise refusal(self.key_of(name), expected, getattr(self, name))

    def located(self, folder: Path) -> Self:
        """Return these settings with relative paths, also of a features file, taken from a folder."""
        return replace(super().located(folder), features=registry("features").located(self.features, folder))

    def settled(self, ledger: SQLiteLedger) -> NodeConfig:
        """Return these settings with a mu in the place of an epsilon."""
        if not self.epsilon:
            return self
        return replace(self, mu=gdp_mu(self.epsilon, self.delta or float(ledger.delta or 0.0)), epsilon=0.0)

    def terms(self, ledger: SQLiteLedger) -> dict[str, Any]:
        """Return the fields of a policy that the file decides, or leaves to its ledger."""
        decided = self.decided(ledger, self.mu, self.epsilon, self.delta, self.budget_mu)
        return decided | self._of_sums(self.budget_local_mu or ledger.budget_local_mu)

    def policy(self, num_samples: int, ledger: SQLiteLedger, **of_model: Any) -> PrivacyPolicy:
        """Return the client's policy for so many samples and what its ledger allows.

        ``of_model`` is what its model settles.

        Notes
        -----
        **Formal guarantees.** ``exact`` noise, every sample in at most ``passes`` releases of a run, at most ``mu`` a
        run and the budget over all. With ``trusted-mu2`` nothing is guaranteed against the server, and mu and budget
        are what it is trusted to keep towards everybody else. Under secure aggregation mu and budget rest on one
        helper and ``min_honest`` clients of each sum; ``budget_local_mu`` holds in the worst case.
        """
        return self._policy(num_samples, self.terms(ledger), **of_model)

    def proposed_policy(self, records: Schema) -> PrivacyPolicy:
        """Return the policy of one run by these settings, before there are records and a ledger; for a look alone."""
        decided = {"mu": self.mu, "delta": self.delta, "budget_mu": self.mu} | self._of_sums(None)
        of_model = self.method.policy_of_model(self.make_model(records.num_features, records.num_classes, records))
        enough = self.batch_size * max(self.max_participations, 1)
        return self._policy(enough, decided, records, **of_model)

    def _policy(
        self, num_samples: int, terms: dict[str, Any], records: Schema | None = None, /, **of_model: Any
    ) -> PrivacyPolicy:
        """Return the policy for so many samples, and for a mu, delta and budget that were decided (:meth:`terms`)."""
        separation = max(num_samples // self.batch_size, 1)
        before = 0.0 if self._knots_are_given(records) else self._share_before
        shares = before + self.private_evaluation
        if shares:
            terms["mu"] = divided_mu(terms["mu"], shares)[1]
        with named_by_key(self.settings().values()):
            policy = self.method.client_policy(
                clip_norm=self.clip_norm,
                batch_size=self.batch_size,
                max_participations=self.max_participations or max(self.passes * separation, 1),
                mechanism=known_mechanism(self.mechanism),
                sample_participations=self.passes,
                min_separation=separation if self.passes > 1 else 1,
                noise_quality="exact",
                **bounding(self, self.method.keys),
                **of_model,
                **({"batch_selection": "shuffled"} if self.shuffled_batches else {}),
                **terms,
            )
        return beside_queries(policy, terms["budget_mu"]) if shares else policy

    def check_before_records(self) -> None:
        """Raise what keeps the client from being made whatever its records are; none of them is read."""
        SQLiteLedger(self.ledger)
        self.masking()
        if self.samples:
            schema = Schema.read_file(Path(self.schema))
            schema.check_for_real_nodes()
            self._check_model(self._model_of(schema))

    def _model_of(self, schema: Schema) -> Model:
        """Return the model for records of a schema, which alone decides its size."""
        width = (schema.of_values() if self.additive else schema).num_features
        return self.make_model(width, schema.num_classes)

    def make_client(self, ledger: SQLiteLedger | None = None) -> PrivateClient:
        """Return the client: its own data, policy, ledger and key.

        Parameters
        ----------
        ledger : SQLiteLedger, optional
            What records and has the key; default the file's own. An audit brings one that is nobody's.

        Raises
        ------
        ConfigurationError, LedgerError
            If it cannot be made; nothing was released.

        Notes
        -----
        The ledger outlives the process; key and nonces are the operating system's.
        """
        if self.samples:  # a model of one's own has run, on made-up records, before any record is read
            schema = Schema.read_file(Path(self.schema))
            schema.check_for_real_nodes()
            model = self._model_of(schema)
            self._check_model(model)
            samples, num_features, _ = self.load_samples(self._secret_of_owners())
        else:
            samples, num_features, num_classes = self.load_samples(self._secret_of_owners())
            model = self.make_model(num_features, num_classes)
        # Never made here: a fresh one would have forgotten what was spent.
        ledger = SQLiteLedger(self.ledger) if ledger is None else ledger
        trained = trained_samples(self, len(samples))
        policy = self.policy(trained, ledger, **self.method.policy_of_model(model))
        gradients = OwnerGradients(model, one_by_one=True) if self.samples_per_owner else model
        own: dict[str, Any] = {"learning_rate": self.learning_rate} if self.method.local_steps else {}
        if self.quantile_share:
            own["quantile_share"] = self.quantile_share
        masking = self.masking()
        if masking is not None:
            own["masking"] = masking
        own["queries"] = self.settled(ledger).queries(policy, model, num_features, held_out=len(samples) - trained)
        client = self.method.client(gradients, samples, policy, ledger, ledger.keys(), name=self.client, **own)
        client.privatizer.check_data()  # before the node says that it is ready
        return client

    def _secret_of_owners(self) -> bytes:
        """Return the secret from which places of owners, or of a folder's files, follow; empty without either."""
        if not (self.samples_per_owner or (self.samples and Path(self.samples).expanduser().is_dir())):
            return b""
        ledger = SQLiteLedger(self.ledger)
        return ledger.secret_of_owners(ledger.keys())

    @property
    def centred(self) -> bool:
        """Whether it releases the mean of its features first."""
        if self.centring or self.samples:
            return self.centring == PRIVATE
        return centred_by_default(self.strategy, self.features, secret_batches=self.shuffled_batches)

    @property
    def additive(self) -> bool:
        """Whether it releases counts for the knots of its columns first, and trains on additive features."""
        return registry("model")[self.model].takes_knots

    @property
    def _share_before(self) -> float:
        """Share of mu^2 of what is released before the training."""
        return self.centring_share if self.centred else self.knots_share if self.additive else 0.0

    def _knot_rows(self, records: Schema | None = None) -> KnotRows | None:
        """Return the query of the knots, by which additive features are made; None for another model."""
        return additive_rows(records or Schema.read_file(Path(self.schema)), self.knots) if self.additive else None

    def _knots_are_given(self, records: Schema | None) -> bool:
        """Return True if the schema has the knots; a schema that is not there yet has none."""
        if records is None and not (self.schema and Path(self.schema).expanduser().exists()):
            return False
        rows = self._knot_rows(records)
        return rows is not None and bool(rows.given)

    def _bound(self, records: Schema | None) -> float:
        if self.additive and not self.feature_bound:
            return math.hypot((records or Schema.read_file(Path(self.schema))).norm_bound, 1.0)
        return feature_bound(RunConfig(feature_bound=self.feature_bound))

    def queries(self, policy: PrivacyPolicy, model: Model, num_features: int, *, held_out: int) -> list[ClientQuery]:
        """Return what the client answers beside its training."""
        queries: list[ClientQuery] = []
        if self.centred:
            bound = self.centring_norm, self.centring_nonnegative
            if self.task:
                bound = features_bound(self.task, self.features, num_features, self.feature_bound)
            queries.append(make_centring(policy, bound, num_features, mu=self.mu, share=self.centring_share))
        if (rows := self._knot_rows()) is not None:
            queries.append(make_knots(policy, rows, mu=self.mu, share=self.knots_share))
        if self.private_evaluation:
            classes = not self.score_bins or model.num_classes == 2
            self._check("score_bins", classes, "unset unless there are two classes")
            own = {"mu": self.mu, "share": self.private_evaluation, "bins": self.score_bins, "held_out": held_out}
            queries.append(make_evaluation(policy, model, **own))
        return queries

    def make_model(self, num_features: int, num_classes: int, records: Schema | None = None) -> Model:
        """Return the model that a server on the same features has; centred samples have a constant beside them.

        ``records`` is the schema, if its file is not there yet.
        """
        rows = self._knot_rows(records)
        inputs = num_features + self.centred if rows is None else rows.num_features
        constant = self.centred or bool(getattr(registry("features")[self.features], "constant", False))
        own = {"constant": constant, "augmentations": self.augmentations}
        made = make_model(self.model, inputs, num_classes, self._bound(records), **own)
        if not self.schema:
            return made
        weights = (records or Schema.read_file(Path(self.schema))).label.class_weights
        self._check(
            "strategy", not weights or self.method.weighs_classes, "full-batch with class_weights in the schema"
        )
        return made.with_class_weights(weights)

    def _check_model(self, model: PerSampleGradients) -> None:
        """Refuse a model that does not treat each record by itself, on records made up from the schema alone."""
        if not self.samples:
            return
        seen = np.full(
            int(self.centred), CENTRING_CONSTANT, np.float32
        )  # what a centred sample has beside its features
        schema, rows = Schema.read_file(Path(self.schema)), self._knot_rows()
        if rows is not None:
            examples = [
                (rows.features(x, rows.even), rows.scaled(y, rows.even)) for x, y in schema.of_values().examples()
            ]
            check_rows_alone(model, examples)
            return
        examples = schema.examples()
        check_rows_alone(model, [(np.append(_flat(x), seen)[None], label) for x, label in examples])

    def load_samples(self, secret: bytes = b"") -> tuple[Samples, int, int]:
        """Return the client's own samples, their number of features and of classes.

        With owners, a row for each of them.

        ``secret`` is, with owners or a folder of images, the client's ledger's
        (:meth:`~murmurfl.privacy.Ledger.secret_of_owners`). No refusal says anything of any one sample.
        """
        if self.samples:
            schema = Schema.read_file(Path(self.schema))
            schema.check_for_real_nodes()
            width = (schema.of_values() if self.additive else schema).num_features
            return self._records(schema, secret), width, schema.num_classes
        run = RunConfig(
            task=self.task,
            features=self.features,
            data_root=self.data_root,
            partition=self.partition,
            seed=self.partition_seed,
            num_clients=self.num_partitions,
            clients_per_round=self.num_partitions,
            batch_size=self.batch_size,
            samples_per_owner=self.samples_per_owner,
            model=self.model,
        )
        data = load_dataset(run)
        shards = load_shards(run, data)
        owned = isinstance(shards, OwnedShards)
        held = shards.real(self.partition_id, secret, None) if owned else shards[self.partition_id]
        return held, data.num_features, data.num_classes

    def _records(self, schema: Schema, secret: bytes) -> Samples:
        if bool(schema.owner) != bool(self.samples_per_owner):
            raise ConfigurationError(
                f"Expected samples-per-owner >= 1 with a schema that names an owner, and 0 with another, got "
                f"{self.samples_per_owner} and owner = {schema.owner!r}.",
                kind="conflict",
                setting="samples-per-owner",
                got=self.samples_per_owner,
            )
        if len(schema.inputs) > 1:
            raise ConfigurationError(
                f"Expected a schema of one input for these models, got {len(schema.inputs)}.",
                kind="unsupported",
                setting="schema",
            )
        where = Path(self.samples).expanduser()
        items = _folder_items(where, schema, secret) if where.is_dir() else file_items(where, schema)
        prepared = None if self.additive else _flat
        read = schema.of_values() if self.additive else schema
        if not self.samples_per_owner:
            usual = Records(items, schema, count=self.num_records, prepared=_flat)
            if not self.additive:
                usual.log()
                return usual
            # The ledger knows records as every other model reads them.
            records = Records(items, read, count=self.num_records, prepared=prepared, first_read=usual)
            records.log()
            return records
        records = Records(items, read, prepared=prepared, together=True)
        records.log()
        return records.by_owner(self.samples_per_owner, places=self.num_records, secret=secret)


def _folder_items(where: Path, schema: Schema, secret: bytes) -> ImageFolder:
    """Return the entries of a folder with a directory for each of the schema's classes, in a secret order.

    Notes
    -----
    **Formal guarantees.** Where a file stands does not depend on the names of the others, for whoever does not know the
    secret: if a file is replaced by any other, one record is another one. Directories without a class of the schema are
    records that do not fit, so they are not told apart from others.
    """
    folder = ImageFolder(where)
    check_columns(folder.columns, schema)
    return folder.in_secret_order(secret)


def _flat(inputs: NDArray[Any]) -> NDArray[np.float32]:
    """One record's inputs as these models take them."""
    return inputs.astype(np.float32).ravel()


@lru_cache(maxsize=1)
def configured_client(path: Path) -> PrivateClient:
    """Return the client an operator's file describes, made once in this process.

    Notes
    -----
    **Formal guarantees.** The client guarantees what its operator's file says (:class:`NodeConfig`); there is one of
    it in a process.
    """
    return NodeConfig.read(path).make_client()


@lru_cache(maxsize=1)
def answering_client(path: Path) -> PrivateClient:
    """Return :func:`configured_client` on a node whose server is connected already.

    Notes
    -----
    **Formal guarantees.** The client guarantees what its operator's file says (:class:`NodeConfig`). A server is told
    by a fixed code of what fails before the client's records are read, and of nothing that fails later
    (:func:`~murmurfl.clients.messages.records_being_read`).
    """
    NodeConfig.read(path).check_before_records()
    with records_being_read():
        return configured_client(path)


@settings
class HelperConfig(OperatorsFile):
    """Everything a helper decides for itself.

    Notes
    -----
    **Formal guarantees.** A release is opened at most once, in a sum of at least as many as the most careful of its
    clients asks for, as long as keys and record are the operator's alone. No value here comes from a server.
    """

    required: ClassVar[frozenset[str]] = frozenset({"roster", "roster-digest"})
    helper: Annotated[str, Declaration("Its name in the roster: public.")]
    roster: Roster = ""
    roster_digest: RosterDigest = ""
    record: Annotated[
        str,
        Declaration(
            "Path of its opening record, made once, together with its key, by `murmurfl roster key --helper`.",
            file=True,
        ),
    ]
    key: Annotated[str, Declaration("Path of its private keys.", file=True)]
    max_model_size: Annotated[
        int,
        Declaration(
            "The most values of a release that it takes memory for, some 30 bytes each, whatever a header says.",
            at_least=1,
        ),
    ] = 2**20
    min_cohort: Annotated[
        int,
        Declaration("The fewest releases of a sum that it opens; clients have such a number too.", at_least=1),
    ] = 2
    max_sessions_per_day: Annotated[
        int,
        Declaration("The most sessions that it begins in 24 hours of its clock; a run takes one to three.", at_least=1),
    ] = 100
    max_sums_per_day: Annotated[
        int,
        Declaration("The most sums that it opens in 24 hours of its clock; a round takes one.", at_least=1),
    ] = 10_000

    def keys(self) -> HelperKey:
        """Return the helper's private keys; refused if others could read them, or they are another helper's."""
        name, key = read_helper_key(Path(self.key))
        if name != self.helper:
            raise ConfigurationError(
                f"Expected the keys of helper {self.helper!r} at {self.key}, got those of {name!r}: the configuration "
                "names another helper or another file.",
                kind="mismatch",
            )
        return key

    def opener(self) -> Opener:
        """Return what opens sums: the pinned roster, the helper's keys and its record.

        The record outlives the process and is never made here: a fresh one would have forgotten what was opened.
        """
        roster = read_roster(Path(self.roster), self.roster_digest)
        return Opener(
            self.helper,
            self.keys(),
            roster,
            SQLiteOpeningRecord(Path(self.record)),
            max_model_size=self.max_model_size,
            min_cohort=self.min_cohort,
            max_sessions_per_day=self.max_sessions_per_day,
            max_sums_per_day=self.max_sums_per_day,
        )
