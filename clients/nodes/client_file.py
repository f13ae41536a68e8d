"""The operators' files of clients: place, masks, and the tables of privacy.

Which tables a file has depends on what it names: ``strategy`` (:class:`~murmurfl.app.nodes.node_config.NodeConfig`), an
``app`` with a ``method`` (:class:`SampleNode`), or an ``app`` alone (:class:`UpdateNode`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import pydantic

from ...privacy import protocol
from ...privacy.accounting.gdp import asked_mu, gdp_mu
from ...privacy.accounting.loss import NOTHING_ASSUMED, SumAssumption
from ...privacy.errors import ConfigurationError
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.release import tables
from ...privacy.release.policy import PrivacyPolicy
from ...privacy.setting import Declaration, Setting, Value, hyphenated, named_by_key, refusal, settings, settings_of
from ...privacy.sums.masking import Masking
from ..adapters.update_policy import UpdatePolicy
from ..algorithms import APP_METHODS, app_method
from ..queries import EvaluationShare
from .operators_file import OperatorsFile, covering_budget
from .roster_files import read_client_key, read_roster

SECURE = "secure-aggregation"


App = Annotated[
    str,
    Declaration(
        "`MODULE:NAME` of the ClientApp, as it is installed on this computer. Empty under a plain `flower-supernode`, "
        "which runs what the server sends."
    ),
]
AppConfig = Annotated[
    Mapping[str, Value],
    Declaration("What the app finds in `context.run_config`; what the server says in one does not reach it."),
]
AppNodeConfig = Annotated[Mapping[str, Value], Declaration("What the app finds in `context.node_config`.")]


Roster = Annotated[str, Declaration("Path of the list of clients and helpers.", key="roster", file=True)]
RosterDigest = Annotated[
    str,
    Declaration(
        "Its digest, which this operator has compared with the other operators'.",
        key="roster-digest",
    ),
]


class NodeSums(tables.SecureAggregation):
    """Secure aggregation in the file of a client, which needs all of them."""

    min_honest: Annotated[
        int,
        Declaration(
            "h, how many clients of every sum, this one among them, do not work with the server. Nobody can check it.",
            at_least=0,
        ),
    ]
    roster: Roster
    roster_digest: RosterDigest
    signing_key: Annotated[
        str, Declaration("Path of this client's private key of the roster.", key="signing-key", file=True)
    ]


Trust = Annotated[tables.TrustOfMethod | tables.UntrustedServer | tables.TrustedServer | NodeSums, tables.TRUST]


@settings
class ClientFile(OperatorsFile):
    """Settings in the file of every client."""

    client: Annotated[str, Declaration("Its name: public, and its own among the clients of a training.")]
    ledger: Annotated[str, Declaration("Path of its ledger, made once with `murmurfl ledger create`.", file=True)]
    trust: Trust = tables.TrustOfMethod()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trust, NodeSums) and not self.trust.min_cohort:
            raise refusal("trust.min-cohort", f"set, with trust = {SECURE!r}", 0, kind="missing")
        longest = protocol.LONGEST_CLIENT_NAME
        if not (isinstance(self.client, str) and len(self.client) <= longest):
            raise refusal("client", f"a name of 1 to {longest} characters", self.client, kind="malformed")

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums."""
        return isinstance(self.trust, NodeSums)

    @property
    def sums(self) -> SumAssumption:
        """Assumption of mu about every sum."""
        if not isinstance(self.trust, NodeSums):
            return NOTHING_ASSUMED
        return SumAssumption(self.trust.min_honest, self.trust.min_cohort)

    def decided(
        self, ledger: SQLiteLedger, mu: float, epsilon: float, delta: float = 0.0, budget: float = 0.0
    ) -> dict[str, Any]:
        """Mu, delta and budget from file and ledger, as fields of a policy; the budget must cover mu."""
        delta = delta or float(ledger.delta or 0.0)
        mu = gdp_mu(epsilon, delta) if epsilon else mu
        return {"mu": mu, "delta": delta, "budget_mu": covering_budget(mu, ledger, budget)}

    def masking(self) -> Masking | None:
        """Return the client's masks; None but under secure aggregation.

        Whatever the server says of helpers and other clients counts for nothing: the roster is the one that the
        operator pinned.
        """
        if not isinstance(self.trust, NodeSums):
            return None
        roster = read_roster(Path(self.trust.roster), self.trust.roster_digest)
        return Masking(self.client, read_client_key(Path(self.trust.signing_key)), roster)


def check_app(app: str) -> None:
    """Raise unless ``app`` is empty or ``MODULE:NAME``."""
    if app and not all(app.partition(":")):
        raise ConfigurationError(
            f"Expected app as MODULE:NAME of an installed ClientApp, got {app!r}.",
            kind="malformed",
            setting="app",
            got=app,
        )


@settings
class RecordsFile(ClientFile):
    """Settings in the file of a client that bounds samples."""

    samples: Annotated[
        str,
        Declaration(
            "Path of a file of records, `.csv`, `.csv.gz`, `.parquet` or `.npz`; empty for an app's own, or a built-in "
            "task.",
            file=True,
        ),
    ] = ""
    schema: Annotated[
        str,
        Declaration("Path of the schema of the records: what one is, in public, reviewed by a person.", file=True),
    ] = ""
    num_records: Annotated[
        int,
        Declaration(
            "N, how many records there are, or with samples-per-owner owners: public, and the same whatever is in "
            "them. Records behind the first N are left out, and those that are not there count as zero.",
            at_least=0,
        ),
    ] = 0
    mu: tables.Mu = 0.0
    epsilon: tables.Epsilon = 0.0
    clip_norm: tables.ClipNorm = 0.0
    mechanism: tables.MechanismName = ""
    batch_size: tables.BatchSize = 0
    samples_per_owner: tables.SamplesPerOwner = 0
    max_participations: tables.MaxParticipations = 0
    private_evaluation: tables.PrivateEvaluation = 0.0
    held_out: tables.HeldOut = tables.HELD_OUT
    score_bins: tables.ScoreBins = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.private_evaluation and (self.held_out, self.score_bins) != (tables.HELD_OUT, 0):
            name, value = (
                ("score_bins", self.score_bins) if self.held_out == tables.HELD_OUT else ("held_out", self.held_out)
            )
            raise refusal(self.key_of(name), "unset without evaluation.share", value)

    def terms(self, ledger: SQLiteLedger) -> dict[str, Any]:
        """Return the fields of :meth:`ClientFile.decided`, and under secure aggregation those of sums."""
        return self.decided(ledger, self.mu, self.epsilon) | self._of_sums(ledger.budget_local_mu)

    def _of_sums(self, budget_local_mu: float | None) -> dict[str, Any]:
        return {"trust": SECURE, "sums": self.sums, "budget_local_mu": budget_local_mu} if self.secure else {}


@settings
class SampleNode(RecordsFile):
    """A real client of a ``private_client_app``: its operator's file, one TOML document, read on the client.

    Its settings are described in the tables (:mod:`.client_file`, :mod:`murmurfl.privacy.release.tables`); budget and
    delta are the ledger's, and ``batch_size`` is 0 where every release is a sum over all samples.

    Notes
    -----
    **Formal guarantees.** Every release of a run together is at most mu-GDP, all runs the ledger's budget, always with
    ``exact`` noise and for replacement of one record (of all records of an owner), as long as the node runs client code
    its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of whoever submits
    the run.
    Proof: docs/proofs/release-rule.md.
    """

    required: ClassVar[frozenset[str]] = frozenset(
        {"schema", "num-records", "clip-norm", "max-participations", "method"}
    )
    trust: Trust = tables.UntrustedServer()
    method: Annotated[str, Declaration("What it takes part in, the app's own.", choices=APP_METHODS)] = ""
    app: App = ""
    run_config: AppConfig = field(default_factory=dict)
    node_config: AppNodeConfig = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_app(self.app)
        self.evaluation  # noqa: B018 - refuses what cannot be
        asked = asked_mu(self.mu, self.epsilon or None, 0.5)  # any delta: the ledger's is not known here
        self._policy(mu=asked, delta=0.5, trust=self.trust.kind, sums=self.sums)

    def policy(self, ledger: SQLiteLedger) -> PrivacyPolicy:
        """Return the policy of this file and its ledger, whose budget must cover one run."""
        return self._policy(**self.terms(ledger), noise_quality="exact")

    @property
    def evaluation(self) -> EvaluationShare | None:
        """The shares of mu^2 and of the samples for a private evaluation; None for no evaluation."""
        if not self.private_evaluation:
            return None
        return EvaluationShare(self.private_evaluation, self.held_out, self.score_bins)

    def _policy(self, **terms: Any) -> PrivacyPolicy:
        own: dict[str, Any] = {"mechanism": self.mechanism} if self.mechanism else {}
        with named_by_key(self.settings().values()):
            return app_method(self.method).policy(
                batch_size=self.batch_size or None,
                clip_norm=self.clip_norm,
                max_participations=self.max_participations,
                samples_per_owner=self.samples_per_owner,
                **own,
                **terms,
            )


_OF_THE_LEDGER = ("budget_mu", "delta", "budget_local_mu")
"""Fields that a real client's ledger decides: no keys of the file."""

_SUMS = [one.name for one in fields(SumAssumption)]
_ROUNDING = 1e-9


def _as_it_is(file: str) -> tuple[int, int, int]:
    """Inode, size and time: at least one of them changes when a file is written to."""
    status = Path(file).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _digest_of(file: str, *as_it_is: int) -> str:  # noqa: ARG001 - a file that was not written to is not read again
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@settings
class UpdateNode(ClientFile):
    """A real client whose ClientApp is somebody's own: its operator's file, one TOML document, read on the client.

    Parameters
    ----------
    updates : UpdatePolicy
        Decides about the updates that are released; in the file its fields are keys like the others. Budget and delta
        are the ledger's.

    Notes
    -----
    **Formal guarantees.** What leaves is what :class:`~murmurfl.clients.UpdatePolicy` guarantees, as long as the node
    runs client code its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of
    whoever submits the run, and that may leave the mod out. The ledger knows ``data_files``, and the client compares
    them before and after every training; a message cannot change the roster, nor ``trust.min-cohort``.

    Examples
    --------
    >>> file = {"client": "clinic-0", "ledger": "ledger.sqlite", "clip-norm": 1.0, "mu": 0.5, "max-participations": 3}
    >>> node = UpdateNode.from_mapping(file)  # UpdateNode.read(path) reads the same settings from a TOML file
    >>> node.client, node.updates.mu
    ('clinic-0', 0.5)
    """

    updates: pydantic.InstanceOf[UpdatePolicy]
    trust: Trust = tables.UntrustedServer()
    app: App = ""
    run_config: AppConfig = field(default_factory=dict)
    node_config: AppNodeConfig = field(default_factory=dict)
    data_files: Annotated[
        tuple[str, ...],
        Declaration(
            "Paths of the files its data are in. Only with releases-per-pass > 1: which sample is in which part "
            "depends on their contents, so the ledger knows them, and the client refuses once they have changed.",
            file=True,
        ),
    ] = ()
    epsilon: Annotated[
        float,
        Declaration(
            "Of all releases of one run together, at the ledger's delta; it stands in the place of mu.", at_least=0
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_app(self.app)
        updates = self.updates
        if (updates.trust, updates.sums) != (self.trust.kind, self.sums):
            raise refusal("trust", f"that of updates, {updates.trust!r} with {updates.sums}", self.trust.kind)
        if self.data_files and updates.releases_per_pass == 1:
            raise ConfigurationError(
                "Expected data-files only with releases-per-pass > 1, got both: a client-level guarantee holds for "
                "whatever data the client has.",
                kind="conflict",
                setting="data-files",
            )
        if not all(self.data_files):
            raise refusal("data_files", "a list of paths", self.data_files, kind="wrong-type")
        for key, values in (("run-config", self.run_config), ("node-config", self.node_config)):
            if values and not self.app:
                raise ConfigurationError(
                    f"Expected {key} only beside app: a plain flower-supernode has its own, got {sorted(values)}.",
                    kind="conflict",
                    setting=key,
                )
        if self.epsilon and updates.mu != asked_mu(0.0, self.epsilon, updates.delta):
            raise ConfigurationError(
                f"Expected mu or epsilon, got both: updates with mu = {updates.mu!r} and epsilon = {self.epsilon!r}.",
                kind="conflict",
                setting="mu",
            )

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return the settings that such a file may have: of a policy's fields those that the ledger does not decide."""
        own, decided = super().settings(), {}
        shared = {one.attribute: one for one in settings_of(RecordsFile).values()}
        kinds = get_type_hints(UpdatePolicy)
        for one in fields(UpdatePolicy):
            if one.name not in (*_OF_THE_LEDGER, "trust", "sums"):
                usual = Setting(name=hyphenated(one.name), attribute=one.name, kind=kinds[one.name], default=None)
                found = replace(shared.get(one.name, usual), default=one.default)
                decided[found.name] = found
        first = {name: own.pop(name) for name in ("client", "ledger")}
        return {**first, **decided, **own}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return a file's settings from a document with hyphenated keys."""
        found = cls.values_of(values)
        names = [one.name for one in fields(UpdatePolicy) if one.name not in (*_OF_THE_LEDGER, "trust", "sums")]
        updates = {name: found.pop(name) for name in names if name in found}
        updates |= {"trust": found["trust"]} if "trust" in found else {}
        updates["sums"] = SumAssumption(**{name: found[name] for name in _SUMS if name in found})
        with named_by_key(cls.settings().values()):
            policy = UpdatePolicy(**updates, epsilon=found.get("epsilon"))
        return cls(updates=policy, **found)

    def known_by(self, node_config: Mapping[str, Any]) -> bytes:
        """Bytes by which the ledger knows the ClientApp's data; empty for a client-level guarantee.

        They are the app, its configuration (so a partition's number or seed) and the contents of ``data_files``. A
        ClientApp other than ``app`` sees the SuperNode's own ``node_config``. Of data that are in no named file the
        ledger knows the configuration only: the rest is the operator's word.
        """
        if self.updates.releases_per_pass == 1:
            return b""
        seen = dict(self.node_config) if self.app else dict(node_config)
        settled = [self.app, self.updates.releases_per_pass, sorted(self.run_config.items()), sorted(seen.items())]
        try:
            digests = [_digest_of(file, *_as_it_is(file)) for file in self.data_files]
        except OSError as error:
            raise ConfigurationError(f"Expected to read the data-files, got: {error}.", kind="unreadable") from error
        return json.dumps([settled, digests]).encode()

    def policy(self, ledger: SQLiteLedger) -> UpdatePolicy:
        """Return the policy of this file and its ledger, whose budget must cover one session."""
        local = ledger.budget_local_mu if self.secure else None
        settled = replace(self.updates, **self.decided(ledger, self.updates.mu, self.epsilon), budget_local_mu=local)
        private = settled.privacy_policy()
        needed = private.plan(1).loss.worst_case.mu
        if local is not None and needed > private.budget.worst_case.mu * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected mu_local <= {local:g}, the budget of the worst case in the ledger "
                f"{ledger.path}, got {needed:g}: not one run would be answered. Lower mu or trust.min-honest.",
                kind="out-of-range",
                setting="mu",
                got=needed,
            )
        return settled
