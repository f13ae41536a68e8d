"""What the operator's file of every machine with an app of a project's own has: name, ledger, app, roster, tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError, protocol
from ...privacy.sums.masking import Masking
from .roster_files import read_machine_key, read_roster

_OF_SUMS = ("roster", "roster_digest", "signing_key")
"""What a machine needs under secure aggregation, and under nothing else."""


class AppNode:
    """The checks of such a file; its fields are the file's keys."""

    machine: str
    ledger: str
    app: str
    roster: str
    roster_digest: str
    signing_key: str

    def check_place(self) -> None:
        """Refuse a name, a ledger or an app that cannot be.

        Raises
        ------
        ConfigurationError
        """
        longest = protocol.LONGEST_MACHINE_NAME
        if not (isinstance(self.machine, str) and 0 < len(self.machine) <= longest):
            raise ConfigurationError(
                f"Expected machine to be a name of 1 to {longest} characters, got {self.machine!r}."
            )
        if not (isinstance(self.ledger, str) and self.ledger):
            raise ConfigurationError(f"Expected ledger to be the path of a ledger, got {self.ledger!r}.")
        if not isinstance(self.app, str) or (self.app and not all(self.app.partition(":"))):
            raise ConfigurationError(f"Expected app as MODULE:NAME of an installed ClientApp, got {self.app!r}.")

    def check_sums(self, trust: str) -> None:
        """Refuse what only secure aggregation needs where it is not, and its absence where it is.

        Raises
        ------
        ConfigurationError
        """
        sums = trust == "secure-aggregation"
        for name in _OF_SUMS:
            key, value = name.replace("_", "-"), getattr(self, name)
            if not isinstance(value, str) or bool(value) != sums:
                expected = "a text" if sums else "unset"
                raise ConfigurationError(
                    f"Expected {key} to be {expected} with trust = {trust!r}, got {value!r}: roster, "
                    "roster-digest and signing-key are needed for secure aggregation, and for nothing else."
                )

    def check_table(self, key: str, values: Any) -> None:
        """Refuse a table that Flower's contexts could not hold.

        Raises
        ------
        ConfigurationError
        """
        if not isinstance(values, Mapping) or not all(isinstance(v, bool | int | float | str) for v in values.values()):
            raise ConfigurationError(f"Expected {key} to be a table of numbers, texts and booleans, got {values!r}.")

    def masking_under(self, trust: str) -> Masking | None:
        """What hides this machine's releases; None but under secure aggregation.

        Raises
        ------
        ConfigurationError
            If roster or key are not there, are not those that were pinned, or do not belong to this machine.

        Notes
        -----
        Whatever the server says of helpers and other machines counts for nothing: the roster is the one that the
        operator pinned.
        """
        if trust != "secure-aggregation":
            return None
        roster = read_roster(Path(self.roster), self.roster_digest)
        return Masking(self.machine, read_machine_key(Path(self.signing_key)), roster)
