"""The operator's file of a real machine with a project's own model and samples, released sample by sample.

The project's code says what model, which loss and how samples are read. This file says everything about privacy.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...privacy import PrivacyPolicy, SQLiteLedger
from ...privacy.accounting.gdp import asked_mu
from ...privacy.setting import setting, table
from ..side.evaluation_client import EvaluationShare
from .machine_file import RecordsFile
from .sample_methods import SAMPLE_METHODS, sample_method


@table(trust="untrusted-server", min_honest=1, min_cohort=1)
class SampleNode(RecordsFile):
    """A real machine of a ``private_client_app``: its operator's file, one TOML document, read on the machine.

    Its settings are described in the tables (:mod:`.machine_file`, :mod:`murmurfl.privacy.machine.tables`); budget and
    delta are the ledger's, and ``batch_size`` is 0 where every release is a sum over all samples.

    Notes
    -----
    **Formal guarantees.** Every release of a run together is at most mu-GDP, all runs the ledger's budget, always with
    ``exact`` noise and for replacement of one record (of all records of an owner), as long as the node runs client code
    its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of whoever submits
    the run.
    Proof: docs/proofs/release-rule.md.
    """

    required: ClassVar[frozenset[str]] = frozenset({"schema", "rows", "clip-norm", "max-participations", "method"})
    closed: ClassVar[frozenset[str]] = frozenset(
        {"clipping", "clip-stability", "quantile-share", "passes", "secret-order", "delta", "budget-mu"}
        | {"budget-local-mu"}
    )
    method: str = setting("", "What it takes part in, the app's own.", choices=tuple(SAMPLE_METHODS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.evaluation  # noqa: B018 - refuses what cannot be
        asked = asked_mu(self.mu, self.epsilon or None, 0.5)  # any delta: the ledger's is not known here
        sums = {"trust": self.trust, "min_honest": self.min_honest, "min_cohort": self.min_cohort}
        self._policy(mu=asked, delta=0.5, **sums)

    def policy(self, ledger: SQLiteLedger) -> PrivacyPolicy:
        """The policy of this file and its ledger, whose budget must cover one run."""
        return self._policy(**self.terms(ledger), noise_quality="exact")

    @property
    def evaluation(self) -> EvaluationShare | None:
        """The shares of mu^2 and of the samples for a private evaluation; None for no evaluation."""
        if not self.private_evaluation:
            return None
        return EvaluationShare(self.private_evaluation, self.held_out, self.score_bins)

    def _policy(self, **terms: Any) -> PrivacyPolicy:
        own: dict[str, Any] = {"mechanism": self.mechanism} if self.mechanism else {}
        return sample_method(self.method).policy(
            batch_size=self.batch_size or None,
            clip_norm=self.clip_norm,
            max_participations=self.max_participations,
            samples_per_owner=self.samples_per_owner,
            **own,
            **terms,
        )
