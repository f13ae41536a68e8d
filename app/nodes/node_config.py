"""A real machine's configuration: one TOML file of its operator, read on the machine and nowhere else.

Data, model, clip, noise, cap, budget, batch and ledger are decided here. No run configuration and no message can set or
widen any of it. Unknown keys, missing ones and impossible values are refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...clients import PrivateClient
from ...clients.nodes.operators_file import (
    NODE_CONFIG_KEY,
    NODE_CONFIG_VARIABLE,
    covering_budget,
    named_values,
    operators_file,
    read_operators_file,
)
from ...clients.records.owner_rows import OwnerGradients
from ...privacy import CENTRING_SHARE, MECHANISMS, ConfigurationError, PrivacyPolicy, SQLiteLedger, gdp_mu, protocol
from ...privacy.accounting.asked import asked_mu
from ..methods import METHODS, Method
from ..methods.method import bounding
from ..runs.centring_settings import beside_mean
from ..runs.evaluation_settings import HELD_OUT, trained_samples
from ..settings.registry import known_mechanism, registry, unknown_name
from ..settings.run_key import typed_value
from .bounded_node import BoundedNode
from .evaluated_node import EvaluatedNode
from .owned_node import OwnedNode
from .summed_node import SummedNode

__all__ = [
    "NODE_CONFIG_KEY",
    "NODE_CONFIG_VARIABLE",
    "NodeConfig",
    "configured_client",
    "node_strategies",
    "operators_file",
]


def node_strategies() -> list[str]:
    """The built-in methods that a real machine can take part in."""
    return [name for name, method in METHODS.items() if method.on_real_nodes]


@dataclass(frozen=True)
class NodeConfig(EvaluatedNode, BoundedNode, OwnedNode, SummedNode):
    """Everything a real machine decides for itself.

    Parameters
    ----------
    machine : str
        Its name: public, and its own among the machines of a training.
    ledger : str
        Path of its ledger, made once with ``murmurfl ledger create``.
    clip_norm : float
        S.
    batch_size : int
        b, samples a release; 1 with ``full-batch``, whose releases are sums over all samples.
    mu : float
        The privacy of all releases of one run together, mu-GDP; or ``epsilon`` in its place.
    strategy : str
        What it takes part in. With ``trusted-mu2`` it adds **no noise**: the server is trusted with its gradients, and
        to keep ``mu`` towards everybody else.
    model : str
        Of the run it takes part in; its layout must be the server's.
    samples : str
        Path of a file of the operator's own: ``.csv``, ``.csv.gz``, ``.parquet``, or an ``.npz`` with ``features``, one
        row a record, and ``labels``. Empty for a built-in task.
    schema : str
        Path of the schema of ``samples``, which says in public what a record is (:class:`~murmurfl.clients.Schema`).
    rows : int
        N, how many records of ``samples`` there are, or with ``samples_per_owner`` places for owners: public, and the
        same whatever is in them. Records behind the first N are left out, and those that are not there count as zero.
    samples_per_owner : int
        j: the schema then names an owner, of each owner the first j records are used, and a batch is one of whoever
        falls into b places: all records of an owner are clipped, noised and protected as one. 0: each record stands
        for itself.
    task, features, data_root : str
        A built-in data set, as in the run configuration; empty with ``samples``. Features of the operator's own, a
        function or a file, are what this file names and nothing that a server sends.
    partition, partition_seed, num_partitions : str, int, int
        How a built-in data set is split.
    partition_id : int
        Which part is this machine's.
    max_participations : int
        K, releases of one run; 0 for as many as there are samples for, ``passes`` times each. ``full-batch`` needs it.
    passes : int
        How often a sample may take part; the noise covers it. 1 with ``trusted-mu2``: its server counts a sample once.
    budget_mu, delta : float
        Of everything this machine ever releases from these data, over all runs (mus add in squares), and where epsilon
        is shown: those the ledger was made with. 0 leaves them to the ledger; anything else must agree with it.
    secret_order : bool
        Whether each sample draws its release by itself (:mod:`murmurfl.privacy.machine.secret_order`); then no other
        run may ever use these samples.
    clipping, clip_stability : str, float
        How gradients are bounded, and gamma: as in the run configuration.
    quantile_share : float
        Of mu^2, for how many gradients are clipped at the clip that the server asks for; ``clip_norm`` is then 1. The
        server must know the same share to read releases. 0 for releases of gradients alone.
    mechanism : str
        How the noise is correlated over the releases; empty for the strategy's own.
    centring : str
        Whether it releases the mean of its features first, and sees samples from everybody's: ``private`` or ``none``;
        empty for what the run configuration's empty one stands for with these features.
    centring_share : float
        Of mu^2, for the mean of a run; the rest is for everything after it.
    centring_norm : float
        S of the mean of ``samples``, whose longer rows are cut to it; 0 with a built-in task, whose features say it.
    centring_nonnegative : bool
        Whether the features of ``samples`` have no negative values: those that are there count as zero in the mean.
    private_evaluation : float
        Of mu^2 of a run, for a private evaluation of its model; 0 for none.
    held_out : float
        Which share of the samples, the last ones, is set aside for it and never trained on; 0: it is of all samples.
    score_bins : int
        Bins of scores for each of two classes, for its AUC; 0 for none. The server must know the same number.
    learning_rate : float
        eta of the local steps of ``online``, and of nothing else.
    feature_bound : float
        R of the ``logistic`` model; 0 for the preset's.
    trust : str
        Empty for the strategy's own: an untrusted server, or with ``trusted-mu2`` a trusted one. With
        ``secure-aggregation`` the machine adds its share of the noise only and sends releases under masks, and the
        keys below must be set; otherwise they must not.
    min_honest : int
        h, how many machines of every sum, this one among them, do not work with the server. Nobody can check it.
    min_cohort : int
        The fewest releases that this machine's may be summed with, its own among them: h, and as many as may work with
        the server.
    roster, roster_digest : str
        Path of the roster, and its digest, which this operator has compared with the other operators'.
    signing_key : str
        Path of this machine's private key of that roster (``murmurfl roster key``).
    budget_local_mu : float
        As ``budget_mu``, of what holds whatever happens; 0 leaves it to the ledger.
    epsilon : float
        In the place of ``mu``: the largest mu that implies this epsilon at ``delta``, or at the ledger's.

    Notes
    -----
    **Formal guarantees.** All runs together are budget_mu-GDP for replacement of one record (of all records of an
    owner), always with ``exact`` noise; :meth:`policy` says what one run is, and under whose trust. It is the
    operator's word about the operator's data: no value here comes from a server.
    """

    machine: str
    ledger: str
    clip_norm: float
    batch_size: int
    mu: float = 0.0
    strategy: str = "mu2"
    model: str = "softmax"
    samples: str = ""
    schema: str = ""
    rows: int = 0
    samples_per_owner: int = 0
    task: str = ""
    features: str = "pixels"
    data_root: str = ""
    partition: str = "iid"
    partition_seed: int = 1
    num_partitions: int = 0
    partition_id: int = -1
    max_participations: int = 0
    passes: int = 1
    secret_order: bool = False
    clipping: str = ""
    clip_stability: float = 0.01
    quantile_share: float = 0.0
    centring: str = ""
    centring_share: float = CENTRING_SHARE
    centring_norm: float = 0.0
    centring_nonnegative: bool = False
    private_evaluation: float = 0.0
    held_out: float = HELD_OUT
    score_bins: int = 0
    budget_mu: float = 0.0
    delta: float = 0.0
    mechanism: str = ""
    learning_rate: float = 0.0
    feature_bound: float = 0.0
    trust: str = ""
    min_honest: int = 0
    min_cohort: int = 0
    roster: str = ""
    roster_digest: str = ""
    signing_key: str = ""
    budget_local_mu: float = 0.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        method = self.method
        for name in ("model", "features", "partition"):
            registry(name)[getattr(self, name)]  # refuses an unknown name
        longest = protocol.LONGEST_MACHINE_NAME
        self._check("machine", 0 < len(self.machine) <= longest, f"a name of 1 to {longest} characters")
        self._check("ledger", bool(self.ledger), "the path of a ledger")
        self._check("clip_norm", self.clip_norm > 0, "a number > 0")
        # At the file's own delta if it has one, else at any: the ledger's is not known here.
        asked_mu(self.mu, self.epsilon or None, self.delta if 0 < self.delta < 1 else 0.5)
        if self.mechanism and known_mechanism(self.mechanism) not in MECHANISMS:
            raise ConfigurationError(unknown_name("mechanism", self.mechanism, MECHANISMS))
        self._check("delta", 0 <= self.delta < 1, "a number >= 0 and < 1")
        for name in ("batch_size", "passes"):
            self._check(name, getattr(self, name) >= 1, "an integer >= 1")
        for name in ("max_participations", "budget_mu", "feature_bound", "learning_rate", "partition_seed"):
            self._check(name, getattr(self, name) >= 0, "a number >= 0")
        # How far apart a sample's turns are is the machine's to say; a trusted server could not know what to charge.
        once = (method.samples_return and not method.trusted) or self.passes == 1
        reason = "every release has all samples" if method.sums_samples else "its server counts every sample once"
        self._check("passes", once, f"1 with strategy = {self.strategy!r}: {reason}")
        if method.sums_samples:
            self._check(
                "batch_size", self.batch_size == 1, f"1 with strategy = {self.strategy!r}, which has no batches"
            )
            rounds = f"the number of rounds with strategy = {self.strategy!r}, which uses all samples in each of them"
            self._check("max_participations", self.max_participations >= 1, rounds)
        steps = "set" if method.local_steps else "unset, for its machines take no steps of their own,"
        right = (self.learning_rate > 0) == method.local_steps
        self._check("learning_rate", right, f"{steps} with strategy = {self.strategy!r}")
        self._check("task", bool(self.task) != bool(self.samples), "set, or `samples`, and not both")
        if self.samples:
            self._check(
                "schema", bool(self.schema), "the path of the schema of `samples` (`murmurfl schema` drafts one)"
            )
            self._check("rows", self.rows >= 1, "the public number of records of `samples`, an integer >= 1")
        else:
            # What a function of one's own makes of a file is read as a whole: one record could decide over all others.
            self._check("task", ":" not in self.task, "a built-in one; data of one's own belong in `samples`")
            registry("task")[self.task]
            self._check("schema", not self.schema, "unset with a built-in task")
            self._check("rows", self.rows == 0, "unset with a built-in task")
            self._check("num_partitions", self.num_partitions >= 1, "the number of parts of the task, an integer >= 1")
            parts = f"from 0 to num-partitions - 1 = {self.num_partitions - 1}"
            self._check("partition_id", 0 <= self.partition_id < self.num_partitions, parts)
        self.check_bounding()
        self.check_owners(beside=self.centred or self.private_evaluation > 0)
        able = not self.secret_order or "secret-order" in self.method.keys
        self._check("secret_order", able, f"false with strategy = {self.strategy!r}")
        self.check_centring()
        self.check_evaluation()
        self.check_trust()

    @property
    def method(self) -> Method:
        """What this machine takes part in.

        Raises
        ------
        ConfigurationError
            If a real machine cannot.
        """
        method = METHODS[self.strategy]
        self._check("strategy", method.on_real_nodes, f"one for real nodes, one of {', '.join(node_strategies())}")
        return method

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            key = name.replace("_", "-")
            raise ConfigurationError(f"Expected {key} to be {expected}, got {getattr(self, name)!r}.")

    @classmethod
    def read(cls, path: Path, *, runs_kept: bool = False) -> NodeConfig:
        """The operator's file; relative paths in it are taken from its folder.

        ``runs_kept`` is as for :func:`~murmurfl.clients.nodes.operators_file.read_operators_file`.

        Raises
        ------
        ConfigurationError
            If it cannot be read, others may write to it, a key is unknown or missing, or a value is impossible.
        """
        files = ["ledger", "samples", "schema", "data_root", "roster", "signing_key"]
        config = read_operators_file(path, cls.from_mapping, files, runs_kept=runs_kept)
        return replace(
            config, features=registry("features").located(config.features, path.expanduser().resolve().parent)
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> NodeConfig:
        """A configuration from hyphenated keys.

        Raises
        ------
        ConfigurationError
            One line that names the key, what was expected and what came.
        """
        named, types = named_values(cls, values), {f.name: str(f.type) for f in fields(cls)}
        return cls(**{name: typed_value(name.replace("_", "-"), value, types[name]) for name, value in named.items()})

    def settled(self, ledger: SQLiteLedger) -> NodeConfig:
        """The same with a mu in the place of its epsilon, if it has one."""
        if not self.epsilon:
            return self
        return replace(self, mu=gdp_mu(self.epsilon, self.delta or float(ledger.delta or 0.0)), epsilon=0.0)

    def policy(self, num_samples: int, ledger: SQLiteLedger, **of_model: Any) -> PrivacyPolicy:
        """The machine's policy for so many samples and what its ledger allows; ``of_model`` is what its model settles.

        Notes
        -----
        **Formal guarantees.** ``exact`` noise, every sample in at most ``passes`` releases of a run, at most ``mu`` a
        run and the budget over all. With ``trusted-mu2`` nothing is guaranteed against the server, and mu and budget
        are what it is trusted to keep towards everybody else. Under secure aggregation mu and budget rest on one
        helper and ``min_honest`` machines of each sum; ``budget_local_mu`` holds whatever happens.
        """
        if self.epsilon:
            return self.settled(ledger).policy(num_samples, ledger, **of_model)
        separation = num_samples // self.batch_size
        budget = covering_budget(self.mu, ledger, self.budget_mu)
        policy = self.method.machine_policy(
            clip_norm=self.clip_norm,
            batch_size=self.batch_size,
            max_participations=self.max_participations or max(self.passes * separation, 1),
            mu=self.training_mu,
            budget_mu=budget,
            delta=self.delta or float(ledger.delta or 0.0),
            mechanism=known_mechanism(self.mechanism),
            sample_participations=self.passes,
            min_separation=separation if self.passes > 1 else 1,
            noise_quality="exact",
            **bounding(self, self.method.keys),
            **of_model,
            **({"order": "secret"} if self.secret_order else {}),
            **self.sums(ledger),
        )
        return beside_mean(policy, budget) if self.centred or self.private_evaluation else policy

    def client(self, ledger: SQLiteLedger | None = None) -> PrivateClient:
        """The machine: its own data, policy, ledger and key.

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
        samples, num_features, num_classes = self.load_samples(self._secret_of_owners())
        model = self.make_model(num_features, num_classes)
        self.check_model(model)
        # Never made here: a fresh one would have forgotten what was spent.
        ledger = SQLiteLedger(self.ledger) if ledger is None else ledger
        trained = trained_samples(self, len(samples))
        policy = self.policy(trained, ledger, **self.method.policy_of_model(model))
        gradients = OwnerGradients(model, one_by_one=True) if self.samples_per_owner else model
        parts = (gradients, samples, policy, ledger, ledger.keys())
        own: dict[str, Any] = {"learning_rate": self.learning_rate} if self.method.local_steps else {}
        if self.quantile_share:
            own["quantile_share"] = self.quantile_share
        masking = self.masking()
        if masking is not None:
            own["masking"] = masking
        own |= self.settled(ledger).parts_beside(policy, model, num_features, held_out=len(samples) - trained)
        client = self.method.client(*parts, name=self.machine, **own)
        client.machine.check_data()  # before the node says that it is ready
        return client

    def _secret_of_owners(self) -> bytes:
        """What the places of owners follow from; empty without owners, whose samples need no ledger to be read."""
        if not self.samples_per_owner:
            return b""
        ledger = SQLiteLedger(self.ledger)
        return ledger.secret_of_owners(ledger.keys())


@lru_cache(maxsize=1)
def configured_client(path: Path) -> PrivateClient:
    """The machine an operator's file describes, made once in this process.

    Notes
    -----
    **Formal guarantees.** The machine guarantees what its operator's file says (:class:`NodeConfig`); there is one of
    it in a process.
    """
    return NodeConfig.read(path).client()
