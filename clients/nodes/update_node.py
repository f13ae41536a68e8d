"""The operator's file of a real machine with somebody's own ClientApp: what it releases, and which data it uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError, SQLiteLedger, gdp_mu
from ...privacy.accounting.asked import asked_mu
from ...privacy.sums.masking import Masking
from ..adapters.update_policy import UpdatePolicy
from .app_node import AppNode
from .operators_file import covering_budget, read_operators_file, values_by_field

_OF_THE_LEDGER = ("budget_mu", "delta", "budget_local_mu")
"""What a real machine's ledger decides: no keys of the file."""
_OF_THE_POLICY = [f for f in fields(UpdatePolicy) if f.name not in _OF_THE_LEDGER]
_ROUNDING = 1e-9


def _as_it_is(file: str) -> tuple[int, int, int]:
    """Inode, size and time: at least one of them changes when a file is written to."""
    status = Path(file).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _digest_of(file: str, *as_it_is: int) -> str:  # noqa: ARG001 - a file that was not written to is not read again
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@dataclass(frozen=True)
class UpdateNode(AppNode):
    """A real machine whose ClientApp is somebody's own: its operator's file, one TOML document, read on the machine.

    Parameters
    ----------
    machine : str
        Its name: public, and its own among the machines of a training.
    ledger : str
        Path of its ledger, made once with ``murmurfl ledger create``; budget and delta are in it.
    updates : UpdatePolicy
        What it decides about the updates it releases; in the file its fields are keys like the others. Budget and delta
        are the ledger's.
    app : str
        ``MODULE:NAME`` of the ClientApp, as it is installed on this machine, that ``murmurfl node`` answers with. Empty
        under a plain ``flower-supernode``, which runs what the server sends.
    data_files : tuple of str
        Paths of the files its data are in. Only with ``releases_per_pass`` > 1: which sample is in which part depends
        on their contents, so the ledger knows them, and the machine refuses once they have changed. It compares them
        before and after every training.
    roster : str
        Path of the list of machines and helpers, under ``trust = "secure-aggregation"``, and under nothing else.
    roster_digest : str
        That list's digest, as its operator compared it with the other operators'. A message cannot change it, nor
        ``min-cohort``, which is one of the policy's.
    signing_key : str
        Path of this machine's own private key, whose public half stands in the roster.
    epsilon : float
        Of all releases of one run together, at the ledger's delta: in the place of the file's ``mu``, which is then not
        given. 0 where the mu of ``updates`` counts.
    run_config, node_config : mapping
        What that app finds in ``context.run_config`` and ``context.node_config``: TOML tables of the operator's. What
        the server says in a run configuration does not reach it.

    Raises
    ------
    ConfigurationError
        If a value is impossible.

    Notes
    -----
    **Formal guarantees.** What leaves is what :class:`~murmurfl.clients.UpdatePolicy` guarantees, as long as the node
    runs client code its operator chose: ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of
    whoever submits the run, and that may leave the mod out.
    """

    machine: str
    ledger: str
    updates: UpdatePolicy
    app: str = ""
    data_files: tuple[str, ...] = ()
    roster: str = ""
    roster_digest: str = ""
    signing_key: str = ""
    epsilon: float = 0.0
    run_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    node_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_place()
        self._check_data_files()
        self.check_sums(self.updates.trust)
        self._check_table("run-config", self.run_config)
        self._check_table("node-config", self.node_config)
        self._check_epsilon()

    def _check_epsilon(self) -> None:
        """Refuse an epsilon beside a mu that somebody chose; in a file one of them is read already."""
        updates = self.updates
        if self.epsilon and updates.mu != asked_mu(0.0, self.epsilon, updates.delta):
            raise ConfigurationError(
                f"Expected mu or epsilon, got both: updates with mu = {updates.mu!r} and epsilon = {self.epsilon!r}."
            )

    def _check_data_files(self) -> None:
        files = self.data_files
        if isinstance(files, str) or not all(isinstance(file, str) and file for file in files):
            raise ConfigurationError(f"Expected data-files to be a list of paths, got {files!r}.")
        if files and self.updates.releases_per_pass == 1:
            raise ConfigurationError(
                "Expected data-files only with releases-per-pass > 1, got both: a client-level guarantee holds for "
                "whatever data the machine has."
            )

    def _check_table(self, key: str, values: Any) -> None:
        self.check_table(key, values)
        if values and not self.app:
            raise ConfigurationError(
                f"Expected {key} only beside app: a plain flower-supernode has its own, got {sorted(values)}."
            )

    @classmethod
    def read(cls, path: Path, *, runs_kept: bool = False) -> UpdateNode:
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
        node = read_operators_file(path, cls._from_document, ["ledger", "roster", "signing_key"], runs_kept=runs_kept)
        folder = path.expanduser().resolve().parent
        return replace(node, data_files=tuple(str(folder / Path(file).expanduser()) for file in node.data_files))

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> UpdateNode:
        own = fields(cls)
        place = [f.name for f in own].index("updates")
        # In the order in which the fields are declared, which is that of the keys that an error names.
        values = values_by_field([*own[:place], *_OF_THE_POLICY, *own[place + 1 :]], document)
        updates = {f.name: values.pop(f.name) for f in _OF_THE_POLICY if f.name in values}
        return cls(updates=UpdatePolicy(**updates, epsilon=values.get("epsilon")), **values)

    def known_by(self, node_config: Mapping[str, Any]) -> bytes:
        """By what the ledger knows the ClientApp's data: nothing for a client-level guarantee, which needs nothing.

        Otherwise the app, its configuration (so a partition's number or seed) and the contents of ``data_files``.

        Parameters
        ----------
        node_config : mapping
            The SuperNode's own, from the operator's command line; a ClientApp other than ``app`` sees it.

        Raises
        ------
        ConfigurationError
            If one of the files cannot be read.

        Notes
        -----
        Of data that are in no named file the ledger knows the configuration only: the rest is the operator's word.
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

    def masking(self) -> Masking | None:
        """What hides this machine's releases; None but under secure aggregation.

        Raises
        ------
        ConfigurationError
            If roster or key are not there, are not those that were pinned, or do not belong to this machine.
        """
        return self.masking_under(self.updates.trust)

    def policy(self, ledger: SQLiteLedger) -> UpdatePolicy:
        """What this file and its ledger say together.

        Raises
        ------
        ConfigurationError
            If the ledger's budget does not cover one session.
        """
        delta = float(ledger.delta or 0.0)
        mu = gdp_mu(self.epsilon, delta) if self.epsilon else self.updates.mu
        budget, local = covering_budget(mu, ledger), None
        if self.updates.trust == "secure-aggregation":
            local = getattr(ledger, "budget_local_mu", None)
        settled = replace(self.updates, mu=mu, budget_mu=budget, delta=delta, budget_local_mu=local)
        private = settled.privacy_policy()
        needed = private.plan(1).mu_local
        if local is not None and needed > private.local_budget * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected mu_local <= {local:g}, the budget of what holds whatever happens in the ledger "
                f"{ledger.path}, got {needed:g}: not one run would be answered. Lower mu or min-honest."
            )
        return settled
