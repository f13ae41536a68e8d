"""What a machine decides about noise on model updates: in simulation, and in its operator's file on a real node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..privacy import (
    NO_NOISE,
    SIMULATED,
    ConfigurationError,
    Guarantee,
    PrivacyPolicy,
    SQLiteLedger,
    Unit,
    policy_guarantee,
    protocol,
)
from .operators_file import covering_budget, named_values, read_operators_file


@dataclass(frozen=True)
class UpdatePolicy:
    """A machine's decisions about the model updates it releases; none of them ever comes from a message.

    Parameters
    ----------
    clip_norm : float
        S, the L2 bound on an update: the difference between the trained and the received model.
    mu : float
        Gaussian-DP parameter of all releases of one session together.
    max_participations : int
        K, the most releases of one session.
    budget_mu : float, optional
        Of everything this machine ever releases, over all sessions (mus add in squares). Default ``mu``: one session.
        On a real node the ledger's.
    delta : float
        Where epsilon is shown. On a real node the ledger's.
    mechanism : str
        How the noise is correlated over the releases; empty for ``independent`` where data return in every release
        (nothing has less noise then) and ``blt`` where they do not.
    releases_per_pass : int
        Into how many disjoint, fixed parts the ClientApp divides its data, of which it uses one a release: the one
        whose number, from 0, it finds as ``part`` in the request's config. That is the machine's own count; the
        server's round is not. A promise about the ClientApp that only its operator can give. 1, the default, promises
        nothing. K or more: no sample is used twice in a session.
    allow_evaluation : bool
        Whether results of the ClientApp's ``evaluate`` may leave, **without noise**: no epsilon here covers them.

    Raises
    ------
    ConfigurationError
        If a value is impossible.

    Notes
    -----
    **Formal guarantees.** The update is clipped as a whole, whatever is computed inside, so one release moves by at
    most 2 S. With ``releases_per_pass = 1`` that is charged in every one of the K releases: all releases of a session
    together are mu-GDP for replacement of *all data of the machine* (client-level), and with that of any one sample.
    With more, a sample is charged in ceil(K / releases_per_pass) releases, that many apart: they are mu-GDP for
    replacement of *one sample* (sample-level), provided the ClientApp keeps the promise whatever the server sends
    along, and carries nothing learned from a sample into another release (no optimiser state or local layers kept
    between rounds). All sessions together are budget_mu-GDP likewise. Against a server that chooses models, rounds,
    acknowledgements and stopping adaptively. With ``allow_evaluation`` this is true of the updates alone.
    Proof: docs/proofs/returning-samples.md.
    """

    clip_norm: float
    mu: float
    max_participations: int
    budget_mu: float | None = None
    delta: float = 1e-5
    mechanism: str = ""
    releases_per_pass: int = 1
    allow_evaluation: bool = False

    def __post_init__(self) -> None:
        value = self.releases_per_pass
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"Expected releases_per_pass to be an integer >= 1, got {value!r}.")
        if not isinstance(self.allow_evaluation, bool):
            raise ConfigurationError(f"Expected allow_evaluation to be true or false, got {self.allow_evaluation!r}.")
        if self.mechanism == NO_NOISE:
            raise ConfigurationError(
                f"Expected a noise mechanism, got {self.mechanism!r}: to see what noise costs, leave the mod out."
            )
        self.privacy_policy()

    @property
    def unit(self) -> Unit:
        """What may be replaced: ``machine`` (all of its data) or ``sample``."""
        return "machine" if self.releases_per_pass == 1 else "sample"

    def privacy_policy(self) -> PrivacyPolicy:
        """The policy a :class:`~murmurfl.privacy.PrivateMachine` keeps.

        Notes
        -----
        **Formal guarantees.** Those of the class, with ``exact`` noise and the acknowledged release rule.
        """
        releases = self.max_participations  # checked with the rest of the policy
        passes = -(-releases // self.releases_per_pass) if isinstance(releases, int) and releases > 0 else 1
        return PrivacyPolicy(
            clip_norm=self.clip_norm,
            batch_size=1,
            max_participations=self.max_participations,
            mu=self.mu,
            budget_mu=self.budget_mu,
            delta=self.delta,
            mechanism=self.mechanism or ("independent" if self.releases_per_pass == 1 else "blt"),
            clip_unit="update",
            # At least two, for parts to be counted by session; a second that does not come is not charged.
            sample_participations=max(2, passes),
            min_separation=self.releases_per_pass,
        )


def _as_it_is(file: str) -> tuple[int, int, int]:
    """What changes when a file is written to."""
    status = Path(file).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _digest_of(file: str, *as_it_is: int) -> str:  # noqa: ARG001 - one that was not written to is not read again
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def update_guarantee(policy: UpdatePolicy, mu: float, *, simulated: bool = False) -> Guarantee:
    """What is true of all updates of one session of a machine with this policy.

    Parameters
    ----------
    policy : UpdatePolicy
    mu : float
        Of all releases of the session.
    simulated : bool
        Whether the keys are a simulation's.

    Notes
    -----
    **Formal guarantees.** Says what :class:`UpdatePolicy` guarantees, and names what rests on the operator's word or is
    not covered.
    """
    notes = []
    if policy.unit == "sample":
        notes.append("Which sample is in which release is as the machine's operator declared.")
    if policy.allow_evaluation:
        notes.append("Results of evaluations leave without noise and are NOT covered.")
    if simulated:
        notes.append(SIMULATED)
    return policy_guarantee(policy.privacy_policy(), mu, unit=policy.unit, notes=notes)


@dataclass(frozen=True)
class UpdateNode:
    """A real machine whose ClientApp is somebody's own: its operator's file, one TOML document, read on the machine.

    Parameters
    ----------
    machine : str
        Its name: public, and its own among the machines of a training.
    ledger : str
        Path of its ledger, made once with ``murmurfl ledger create``; budget and delta are in it.
    clip_norm, mu, max_participations, mechanism, releases_per_pass, allow_evaluation
        See :class:`UpdatePolicy`.
    app : str
        ``MODULE:NAME`` of the ClientApp, as it is installed on this machine, that ``murmurfl node`` answers with. Empty
        under a plain ``flower-supernode``, which runs what the server sends.
    data_files : tuple of str
        Paths of the files its data are in. Only with ``releases_per_pass`` > 1: which sample is in which part rests on
        their contents, so the ledger knows them, and the machine refuses once they have changed. It looks before and
        after every training.
    run_config, node_config : mapping
        What that app finds in ``context.run_config`` and ``context.node_config``: TOML tables of the operator's. What
        the server says in a run configuration does not reach it.

    Raises
    ------
    ConfigurationError
        If a value is impossible.

    Notes
    -----
    **Formal guarantees.** Those of :class:`UpdatePolicy`, as long as the node runs client code its operator chose:
    ``murmurfl node`` runs ``app``; a plain ``flower-supernode`` runs the code of whoever submits the run, and that may
    leave the mod out.
    """

    machine: str
    ledger: str
    clip_norm: float
    mu: float
    max_participations: int
    mechanism: str = ""
    releases_per_pass: int = 1
    allow_evaluation: bool = False
    app: str = ""
    data_files: tuple[str, ...] = ()
    run_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    node_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = protocol.LONGEST_MACHINE_NAME
        if not (isinstance(self.machine, str) and 0 < len(self.machine) <= longest):
            raise ConfigurationError(
                f"Expected machine to be a name of 1 to {longest} characters, got {self.machine!r}."
            )
        if not (isinstance(self.ledger, str) and self.ledger):
            raise ConfigurationError(f"Expected ledger to be the path of a ledger, got {self.ledger!r}.")
        if not isinstance(self.app, str) or (self.app and not all(self.app.partition(":"))):
            raise ConfigurationError(f"Expected app as MODULE:NAME of an installed ClientApp, got {self.app!r}.")
        files = self.data_files
        if isinstance(files, str) or not all(isinstance(file, str) and file for file in files):
            raise ConfigurationError(f"Expected data-files to be a list of paths, got {files!r}.")
        if files and self.releases_per_pass == 1:
            raise ConfigurationError(
                "Expected data-files only with releases-per-pass > 1, got both: a client-level guarantee holds for "
                "whatever data the machine has."
            )
        for name in ("run_config", "node_config"):
            values, key = getattr(self, name), name.replace("_", "-")
            if not isinstance(values, Mapping) or not all(
                isinstance(v, bool | int | float | str) for v in values.values()
            ):
                raise ConfigurationError(
                    f"Expected {key} to be a table of numbers, texts and booleans, got {values!r}."
                )
            if values and not self.app:
                raise ConfigurationError(
                    f"Expected {key} only beside app: a plain flower-supernode has its own, got {sorted(values)}."
                )
        self._policy()

    @classmethod
    def read(cls, path: Path) -> UpdateNode:
        """The operator's file; a relative ledger is taken from its folder.

        Raises
        ------
        ConfigurationError
            If it cannot be read, others may write to it, a key is unknown or missing, or a value is impossible.
        """
        node = read_operators_file(path, lambda values: cls(**named_values(cls, values)), ["ledger"])
        folder = path.expanduser().resolve().parent
        return replace(node, data_files=tuple(str(folder / Path(file).expanduser()) for file in node.data_files))

    def known_by(self, node_config: Mapping[str, Any]) -> bytes:
        """What the ledger knows the ClientApp's data by: nothing for a client-level guarantee, which needs nothing.

        Otherwise the app, its configuration (so a partition's number or seed) and the contents of ``data_files``.

        Parameters
        ----------
        node_config : mapping
            The SuperNode's own, from the operator's command line; what a ClientApp sees that is not ``app``.

        Raises
        ------
        ConfigurationError
            If one of the files cannot be read.

        Notes
        -----
        **Formal guarantees.** Releases nothing; stays on the machine. Of data that are in no named file the ledger
        knows the configuration only: the rest is the operator's word.
        """
        if self.releases_per_pass == 1:
            return b""
        seen = dict(self.node_config) if self.app else dict(node_config)
        settled = [self.app, self.releases_per_pass, sorted(self.run_config.items()), sorted(seen.items())]
        try:
            digests = [_digest_of(file, *_as_it_is(file)) for file in self.data_files]
        except OSError as error:
            raise ConfigurationError(f"Expected to read the data-files, got: {error}.") from error
        return json.dumps([settled, digests]).encode()

    def policy(self, ledger: SQLiteLedger) -> UpdatePolicy:
        """What this file and its ledger say together.

        Raises
        ------
        ConfigurationError
            If the ledger's budget does not cover one session.
        """
        budget = covering_budget(self.mu, ledger)
        return self._policy(budget_mu=budget, delta=float(ledger.delta or 0.0))

    def _policy(self, **of_the_ledger: float) -> UpdatePolicy:
        return UpdatePolicy(
            clip_norm=self.clip_norm,
            mu=self.mu,
            max_participations=self.max_participations,
            mechanism=self.mechanism,
            releases_per_pass=self.releases_per_pass,
            allow_evaluation=self.allow_evaluation,
            **of_the_ledger,  # type: ignore[arg-type]
        )
