"""The operator's file of a real machine with a project's own model and samples, released sample by sample.

The project's code says what model, which loss and how samples are read. This file says everything about privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError, PrivacyPolicy, SQLiteLedger
from ...privacy.accounting.asked import asked_mu, check_count
from ...privacy.sums.masking import Masking
from ..side.evaluation_client import EvaluationShare
from .app_node import AppNode
from .operators_file import covering_budget, read_operators_file, values_by_field
from .sample_methods import SampleMethod, sample_method


@dataclass(frozen=True)
class SampleNode(AppNode):
    """A real machine of a ``private_client_app``: its operator's file, one TOML document, read on the machine.

    Parameters
    ----------
    machine : str
        Its name: public, and its own among the machines of a training.
    ledger : str
        Path of its ledger, made once with ``murmurfl ledger create``; budget and delta are in it.
    method : str
        What it takes part in, the app's own: ``full-batch``, ``mu2``, ``noisy-sgd`` or ``fedavg``.
    schema : str
        Path of the schema: what a record is, reviewed by a person (:class:`~murmurfl.clients.Schema`).
    rows : int
        N, how many records there are, or with ``samples_per_owner`` owners: public, and the same whatever is in the
        data. Records behind the first N are left out, and those that are not there count as zero.
    clip_norm : float
        S, the L2 bound on one sample's gradient.
    max_participations : int
        K, the most releases of one run.
    mu, epsilon : float
        Of all releases of one run together, exactly one of them; epsilon at the ledger's delta.
    batch_size : int
        b, samples in a release; 0 where every release is a sum over all of them.
    mechanism : str
        How the noise is correlated over the releases; empty for the method's own.
    samples : str
        Path of a file of records, ``.csv``, ``.csv.gz``, ``.parquet`` or ``.npz``, which is read in the place of the
        app's own samples. Empty for those.
    samples_per_owner : int
        j, where the schema names an owner: the first j records of each are used, and all are protected as one.
    app : str
        ``MODULE:NAME`` of the app, as it is installed on this machine. Empty under a plain ``flower-supernode``, which
        runs what the server sends.
    private_evaluation : float
        Of mu^2 of a run, for a private evaluation of its model; 0 for none.
    held_out : float
        Which share of the samples, the last ones, is set aside for it and never trained on.
    score_bins : int
        Bins of scores for each of two classes, for its AUC; 0 for none.
    trust : {"untrusted-server", "secure-aggregation"}
    min_honest, min_cohort : int
        h and the fewest releases of a sum, under ``secure-aggregation``.
    roster, roster_digest, signing_key : str
        The list of machines and helpers, its digest as it was compared with the other operators', and this machine's
        private key, under ``secure-aggregation`` and under nothing else.
    run_config, node_config : mapping
        What the app's ``samples`` finds in ``context.run_config`` and ``context.node_config``. What the server says in
        a run configuration does not reach it.

    Raises
    ------
    ConfigurationError
        If a value is impossible.

    Notes
    -----
    **Formal guarantees.** Every release of a run together is at most mu-GDP, all runs the ledger's budget, always with
    ``exact`` noise and for replacement of one record (of all records of an owner), as long as the node runs client code
    its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of whoever submits
    the run.
    Proof: docs/proofs/release-rule.md.
    """

    machine: str
    ledger: str
    method: str
    schema: str
    rows: int
    clip_norm: float
    max_participations: int
    mu: float = 0.0
    epsilon: float = 0.0
    batch_size: int = 0
    mechanism: str = ""
    samples: str = ""
    samples_per_owner: int = 0
    app: str = ""
    private_evaluation: float = 0.0
    held_out: float = 0.1
    score_bins: int = 0
    trust: str = "untrusted-server"
    min_honest: int = 1
    min_cohort: int = 1
    roster: str = ""
    roster_digest: str = ""
    signing_key: str = ""
    run_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    node_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_place()
        self.check_sums(self.trust)
        self.check_table("run-config", self.run_config)
        self.check_table("node-config", self.node_config)
        check_count("rows", self.rows)
        self.evaluation  # noqa: B018 - refuses what cannot be
        self._policy(delta=0.5, budget_mu=None, budget_local_mu=None)  # any delta: the ledger's is not known here

    @classmethod
    def read(cls, path: Path, *, runs_kept: bool = False) -> SampleNode:
        """The operator's file; relative paths in it are taken from its folder.

        Parameters
        ----------
        path : Path
        runs_kept : bool
            As for :func:`~murmurfl.clients.nodes.operators_file.read_operators_file`.

        Raises
        ------
        ConfigurationError
            If it cannot be read, others may write to it, a key is unknown or missing, or a value is impossible.
        """

        def made(document: Mapping[str, Any]) -> SampleNode:
            return cls(**values_by_field(fields(cls), document))

        files = ["ledger", "schema", "samples", "roster", "signing_key"]
        return read_operators_file(path, made, files, runs_kept=runs_kept)

    def policy(self, ledger: SQLiteLedger) -> PrivacyPolicy:
        """What this file and its ledger say together.

        Raises
        ------
        ConfigurationError
            If the ledger's budget does not cover one run.
        """
        delta = float(ledger.delta or 0.0)
        mu = asked_mu(self.mu, self.epsilon or None, delta)
        local = ledger.budget_local_mu if self.trust == "secure-aggregation" else None
        return self._policy(
            delta=delta,
            budget_mu=covering_budget(mu, ledger),
            budget_local_mu=local,
            noise_quality="exact",
        )

    def masking(self) -> Masking | None:
        """What hides this machine's releases; None but under secure aggregation.

        Raises
        ------
        ConfigurationError
            If roster or key are not there, are not those that were pinned, or do not belong to this machine.
        """
        return self.masking_under(self.trust)

    @property
    def evaluation(self) -> EvaluationShare | None:
        """What of mu^2 and of the samples is for a private evaluation; None for nothing.

        Raises
        ------
        ConfigurationError
        """
        if self.private_evaluation:
            return EvaluationShare(self.private_evaluation, self.held_out, self.score_bins)
        if (self.held_out, self.score_bins) != (0.1, 0):
            raise ConfigurationError(
                f"Expected held-out and score-bins unset without private-evaluation, got {self.held_out!r} and "
                f"{self.score_bins!r}."
            )
        return None

    @property
    def _method(self) -> SampleMethod:
        return sample_method(self.method)

    def _policy(self, *, delta: float, **given: Any) -> PrivacyPolicy:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 0:
            raise ConfigurationError(f"Expected batch-size to be an integer >= 0, got {self.batch_size!r}.")
        own: dict[str, Any] = {"mechanism": self.mechanism} if self.mechanism else {}
        return self._method.policy(
            batch_size=self.batch_size or None,
            clip_norm=self.clip_norm,
            max_participations=self.max_participations,
            mu=asked_mu(self.mu, self.epsilon or None, delta),
            delta=delta,
            trust=self.trust,
            min_honest=self.min_honest,
            min_cohort=self.min_cohort,
            samples_per_owner=self.samples_per_owner,
            **own,
            **given,
        )
