"""The operator's file of a machine: its place, its masks, and the tables of a machine that bounds samples.

Which tables a file has depends on what it names: ``strategy`` (:class:`~murmurfl.app.nodes.node_config.NodeConfig`), an
``app`` with a ``method`` (:class:`.sample_node.SampleNode`), or an ``app`` alone (:class:`.update_node.UpdateNode`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, ClassVar

from ...privacy import ConfigurationError, SQLiteLedger, gdp_mu, protocol
from ...privacy.accounting.gdp import asked_mu
from ...privacy.machine.tables import HELD_OUT, Clip, Evaluating, Noise, Releases, Sums, Wanted
from ...privacy.setting import Value, refusal, setting, table
from ...privacy.sums.masking import Masking
from .operators_file import OperatorsFile, covering_budget
from .roster_files import read_machine_key, read_roster

SECURE = "secure-aggregation"


@table(SECURE)
class Pinned(OperatorsFile):
    """The roster that a machine or a helper trusts."""

    roster: str = setting("", "Path of the list of machines and helpers.", file=True)
    roster_digest: str = setting("", "Its digest, which this operator has compared with the other operators'.")


@table()
class MachineFile(Pinned):
    """Settings in the file of every machine."""

    of_sums: ClassVar[tuple[str, ...]] = ("roster", "roster_digest", "signing_key")
    """Settings that must be set under secure aggregation, and unset otherwise."""
    machine: str = setting(MISSING, "Its name: public, and its own among the machines of a training.", kw_only=False)
    ledger: str = setting(
        MISSING, "Path of its ledger, made once with `murmurfl ledger create`.", kw_only=False, file=True
    )
    signing_key: str = setting("", "Path of this machine's private key of the roster.", file=True)
    app: str = setting(
        "",
        "`MODULE:NAME` of the ClientApp, as it is installed on this machine. Empty under a plain `flower-supernode`, "
        "which runs what the server sends.",
    )
    run_config: Mapping[str, Value] = setting(
        {}, "What the app finds in `context.run_config`; what the server says in one does not reach it."
    )
    node_config: Mapping[str, Value] = setting({}, "What the app finds in `context.node_config`.")

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = protocol.LONGEST_MACHINE_NAME
        if not (isinstance(self.machine, str) and len(self.machine) <= longest):
            raise refusal("machine", f"a name of 1 to {longest} characters", self.machine)
        if self.app and not all(self.app.partition(":")):
            raise ConfigurationError(f"Expected app as MODULE:NAME of an installed ClientApp, got {self.app!r}.")
        for name in self.of_sums:
            value = getattr(self, name)
            if self.sums and not value:
                raise refusal(name, f"set, with trust = {SECURE!r}", value)
            if not self.sums and value != getattr(type(self), name):
                raise refusal(name, f"unset, for it is read with trust = {SECURE!r} only", value)

    @property
    def sums(self) -> bool:
        """Whether the server sees only sums."""
        raise NotImplementedError

    def decided(
        self, ledger: SQLiteLedger, mu: float, epsilon: float, delta: float = 0.0, budget: float = 0.0
    ) -> dict[str, Any]:
        """Mu, delta and budget from file and ledger, as fields of a policy; the budget must cover mu."""
        delta = delta or float(ledger.delta or 0.0)
        mu = gdp_mu(epsilon, delta) if epsilon else mu
        return {"mu": mu, "delta": delta, "budget_mu": covering_budget(mu, ledger, budget)}

    def masking(self) -> Masking | None:
        """The machine's masks; None but under secure aggregation.

        Whatever the server says of helpers and other machines counts for nothing: the roster is the one that the
        operator pinned.
        """
        if not self.sums:
            return None
        roster = read_roster(Path(self.roster), self.roster_digest)
        return Masking(self.machine, read_machine_key(Path(self.signing_key)), roster)


@table("data")
class OwnRecords:
    """A file of records."""

    samples: str = setting(
        "",
        "Path of a file of records, `.csv`, `.csv.gz`, `.parquet` or `.npz`; empty for an app's own, or a built-in "
        "task.",
        file=True,
    )
    schema: str = setting(
        "", "Path of the schema of the records: what one is, in public, reviewed by a person.", file=True
    )
    rows: int = setting(
        0,
        "N, how many records there are, or with samples-per-owner owners: public, and the same whatever is in them. "
        "Records behind the first N are left out, and those that are not there count as zero.",
        at_least=0,
    )


@table("privacy")
class Budget:
    """The budget of all runs, where a file says it beside the ledger."""

    budget_mu: float = setting(
        0.0,
        "Of everything this machine ever releases from these data, over all runs (mus add in squares).",
        at_least=0,
        zero="the ledger's",
    )
    budget_local_mu: float = setting(
        0.0, "As budget-mu, of what holds whatever happens.", at_least=0, zero="the ledger's"
    )


@table(SECURE)
class Honest:
    """Assumption about the other machines of a sum."""

    min_honest: int = setting(
        0,
        "h, how many machines of every sum, this one among them, do not work with the server. Nobody can check it.",
        at_least=0,
    )


@table(mu=0.0, delta=0.0, batch_size=0, quantile_share=0.0)
class RecordsFile(MachineFile, Honest, Sums, Evaluating, Releases, Noise, Clip, Budget, Wanted, OwnRecords):
    """The file of a machine that bounds samples; each kind of machine closes settings that it does not read."""

    of_sums: ClassVar[tuple[str, ...]] = (*MachineFile.of_sums, "min_honest", "min_cohort")

    def __post_init__(self) -> None:
        super().__post_init__()
        # At the file's own delta if it has one, else at any: the ledger's is not known here.
        asked_mu(self.mu, self.epsilon or None, self.delta or 0.5)
        if not self.private_evaluation and (self.held_out, self.score_bins) != (HELD_OUT, 0):
            name, value = ("score_bins", self.score_bins) if self.held_out == HELD_OUT else ("held_out", self.held_out)
            raise refusal(name, "unset without private-evaluation", value)

    @property
    def sums(self) -> bool:
        """Whether the server sees only sums."""
        return self.trust == SECURE

    def terms(self, ledger: SQLiteLedger) -> dict[str, Any]:
        """The fields of :meth:`MachineFile.decided`, and under secure aggregation those of sums."""
        found = self.decided(ledger, self.mu, self.epsilon, self.delta, self.budget_mu)
        if self.sums:
            local = self.budget_local_mu or ledger.budget_local_mu
            found |= {"trust": SECURE, "min_honest": self.min_honest, "min_cohort": self.min_cohort}
            found["budget_local_mu"] = local
        return found
