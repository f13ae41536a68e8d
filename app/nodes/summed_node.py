"""Secure aggregation on a real machine: what its operator's file says of it, and the masks that follow from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clients.nodes.roster_files import read_machine_key, read_roster
from ...privacy import Masking, SQLiteLedger
from ..settings.trust_settings import SECURE

if TYPE_CHECKING:
    from ..methods import Method

SUMS = ("min_honest", "min_cohort", "roster", "roster_digest", "signing_key", "budget_local_mu")
"""Fields that only secure aggregation reads."""


class SummedNode:
    """The part of an operator's file that secure aggregation is in; its fields are the file's."""

    machine: str
    strategy: str
    trust: str
    min_honest: int
    min_cohort: int
    roster: str
    roster_digest: str
    signing_key: str
    budget_local_mu: float

    @property
    def method(self) -> Method:
        """What the machine takes part in."""
        raise NotImplementedError

    def _check(self, name: str, holds: bool, expected: str) -> None:
        raise NotImplementedError

    def check_trust(self) -> None:
        """Refuse a trust model that the strategy does not have, and keys of secure aggregation without it."""
        able = self.method.trusts
        named = f"{' or '.join(map(repr, able))} with strategy = {self.strategy!r}"
        self._check("trust", self.trust in ("", *able), named)
        kind: Any = type(self)  # a dataclass
        unset = {f.name: f.default for f in fields(kind) if f.name in SUMS}
        if self.trust != SECURE:
            for name, default in unset.items():
                expected = f"unset, for it is read with trust = {SECURE!r} only"
                self._check(name, getattr(self, name) == default, expected)
            return
        for name in unset:
            self._check(name, name == "budget_local_mu" or bool(getattr(self, name)), f"set, with trust = {SECURE!r}")
        self._check("min_honest", 1 <= self.min_honest <= self.min_cohort, f"from 1 to min-cohort = {self.min_cohort}")
        self._check("budget_local_mu", self.budget_local_mu >= 0, "a number >= 0")

    def sums(self, ledger: SQLiteLedger) -> dict[str, Any]:
        """What a policy under secure aggregation says beyond the others."""
        if self.trust != SECURE:
            return {}
        local = self.budget_local_mu or ledger.budget_local_mu
        return {
            "trust": SECURE,
            "min_honest": self.min_honest,
            "min_cohort": self.min_cohort,
            "budget_local_mu": local,
        }

    def masking(self) -> Masking | None:
        """What hides this machine's releases; None but under secure aggregation.

        Raises
        ------
        ConfigurationError
            If roster or key are not there, or are not those that were pinned.

        Notes
        -----
        Whatever the server says of helpers and other machines counts for nothing: the roster is the one that the
        operator pinned.
        """
        if self.trust != SECURE:
            return None
        roster = read_roster(Path(self.roster), self.roster_digest)
        return Masking(self.machine, read_machine_key(Path(self.signing_key)), roster)
