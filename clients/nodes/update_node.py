"""The operator's file of a real machine with somebody's own ClientApp: what it releases, and which data it uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from ...privacy import ConfigurationError, SQLiteLedger
from ...privacy.accounting.gdp import asked_mu
from ...privacy.setting import Setting, refusal, setting, settings_of, table
from ..adapters.update_policy import UpdatePolicy
from .machine_file import SECURE, MachineFile, RecordsFile

_OF_THE_LEDGER = ("budget_mu", "delta", "budget_local_mu")
"""Fields that a real machine's ledger decides: no keys of the file."""
_ROUNDING = 1e-9


def _as_it_is(file: str) -> tuple[int, int, int]:
    """Inode, size and time: at least one of them changes when a file is written to."""
    status = Path(file).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _digest_of(file: str, *as_it_is: int) -> str:  # noqa: ARG001 - a file that was not written to is not read again
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@table()
class UpdateNode(MachineFile):
    """A real machine whose ClientApp is somebody's own: its operator's file, one TOML document, read on the machine.

    Parameters
    ----------
    updates : UpdatePolicy
        Decides about the updates that are released; in the file its fields are keys like the others. Budget and delta
        are the ledger's.

    Notes
    -----
    **Formal guarantees.** What leaves is what :class:`~murmurfl.clients.UpdatePolicy` guarantees, as long as the node
    runs client code its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of
    whoever submits the run, and that may leave the mod out. The ledger knows ``data_files``, and the machine compares
    them before and after every training; a message cannot change the roster, nor ``min-cohort``.
    """

    updates: UpdatePolicy
    data_files: tuple[str, ...] = setting(
        (),
        "Paths of the files its data are in. Only with releases-per-pass > 1: which sample is in which part depends on "
        "their contents, so the ledger knows them, and the machine refuses once they have changed.",
        file=True,
    )
    epsilon: float = setting(
        0.0, "Of all releases of one run together, at the ledger's delta; it stands in the place of mu.", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        updates = self.updates
        if self.data_files and updates.releases_per_pass == 1:
            raise ConfigurationError(
                "Expected data-files only with releases-per-pass > 1, got both: a client-level guarantee holds for "
                "whatever data the machine has."
            )
        if not all(self.data_files):
            raise refusal("data_files", "a list of paths", self.data_files)
        for key, values in (("run-config", self.run_config), ("node-config", self.node_config)):
            if values and not self.app:
                raise ConfigurationError(
                    f"Expected {key} only beside app: a plain flower-supernode has its own, got {sorted(values)}."
                )
        if self.epsilon and updates.mu != asked_mu(0.0, self.epsilon, updates.delta):
            raise ConfigurationError(
                f"Expected mu or epsilon, got both: updates with mu = {updates.mu!r} and epsilon = {self.epsilon!r}."
            )

    @property
    def sums(self) -> bool:
        """Whether the server sees only sums."""
        return self.updates.trust == SECURE

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """The settings that such a file may have: of a policy's fields those that the ledger does not decide."""
        own, shared, decided = super().settings(), settings_of(RecordsFile), {}
        for one in fields(UpdatePolicy):
            name = one.name.replace("_", "-")
            if one.name not in _OF_THE_LEDGER:
                decided[name] = replace(shared.get(name, Setting(name, str(one.type), None)), default=one.default)
        first = {name: own.pop(name) for name in ("machine", "ledger")}
        return {**first, **decided, **own}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """A file's settings from a document with hyphenated keys."""
        found = cls.values_of(values)
        names = [one.name for one in fields(UpdatePolicy) if one.name not in _OF_THE_LEDGER]
        updates = {name: found.pop(name) for name in names if name in found}
        found["data_files"] = tuple(found.get("data_files", ()))
        return cls(updates=UpdatePolicy(**updates, epsilon=found.get("epsilon")), **found)

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
            raise ConfigurationError(f"Expected to read the data-files, got: {error}.") from error
        return json.dumps([settled, digests]).encode()

    def policy(self, ledger: SQLiteLedger) -> UpdatePolicy:
        """The policy of this file and its ledger, whose budget must cover one session."""
        local = ledger.budget_local_mu if self.sums else None
        settled = replace(self.updates, **self.decided(ledger, self.updates.mu, self.epsilon), budget_local_mu=local)
        private = settled.privacy_policy()
        needed = private.plan(1).mu_local
        if local is not None and needed > private.local_budget * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected mu_local <= {local:g}, the budget of what holds whatever happens in the ledger "
                f"{ledger.path}, got {needed:g}: not one run would be answered. Lower mu or min-honest."
            )
        return settled
