"""Checks of a node or a helper before it starts; none alters anything."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...clients import PrivateClient, Schema, UpdateNode
from ...clients.nodes.machine_file import SampleNode
from ...clients.records.machine_records import Records, file_items
from ...privacy import MurmurflError, SQLiteLedger, read_ledger
from ...privacy.files import exposure
from .allowance import DAY_S, Allowance, Costs, allowance_of
from .connections.connection import Given
from .connections.connection_checks import Check, connection_checks, not_tried, worst
from .describing import describe, describe_helper, describe_own
from .helper_config import HelperConfig
from .node_config import NodeConfig
from .own_app import OwnNode, own_app, own_client, read_node
from .roster_check import check_operators_file
from .taken_runs import TakenRuns

_BYTES_OF_A_VALUE = 8
_VECTORS = 8  # sent and perhaps still to be acknowledged: up to four in the file, as many in its log
_LEAST_FREE = 16 << 20
_COMFORTABLE = 4
_ENOUGH = 0.9
"""Share of records that fit their schema below which a warning is due."""


@dataclass(frozen=True)
class Preflight:
    """The outcome of all checks."""

    description: str = ""  # of the machine or helper; empty if it could not be made
    checks: list[Check] = field(default_factory=list)
    allowance: Allowance | None = None  # of a machine that could be made

    @property
    def state(self) -> str:
        """The worst state of all checks."""
        return worst(self.checks)

    def document(self, now: float) -> dict[str, Any]:
        """Plain values for JSON; ``now`` in seconds since 1970."""
        left = self.allowance
        ends = None if left is None or left.days is None else now + left.days * DAY_S
        budget = None if left is None else {"runs": left.runs, "releases": left.releases, "until": ends}
        checks = [{"check": check.name, "state": check.state, "sentence": check.sentence} for check in self.checks]
        return {"state": self.state, "description": self.description, "checks": checks, "left": budget}


def check_node(
    path: Path, given: Given, *, run_every_days: float | None = None, clock: Callable[[], float] = time.time
) -> Preflight:
    """Check everything that can be known of a node before it starts.

    Parameters
    ----------
    run_every_days : float, optional
        Days between the beginnings of runs; default as in the ledger.
    clock : callable
        Seconds since 1970.

    Notes
    -----
    Releases and spends nothing: ledger and mark stay as they are. The samples are read as when the node starts, and one
    sentence depends on what is in them: ``records`` says how many fit the schema and why the others do not. It is for
    the operator alone; neither it nor the exit code of ``--check`` belongs anywhere that a server can see. A node that
    starts says and does the same whatever it is. The SuperLink receives what
    :func:`~murmurfl.app.nodes.connections.diagnosis.diagnose` sends.
    """
    try:
        config, runs = read_node(path, runs_kept=True), TakenRuns.read(path)
    except (MurmurflError, OSError) as error:
        made = Preflight(checks=[Check("configuration", "failed", _told(error))])
    else:
        made = _machine_checks(config, run_every_days, clock())
        made.checks.extend([*(_roster(path) if config.sums else []), *_data(config), *_runs(runs)])
    return Preflight(made.description, [*made.checks, *_connection(path, given, clock)], made.allowance)


def check_helper(path: Path, given: Given, *, clock: Callable[[], float] = time.time) -> Preflight:
    """Check everything that can be known of a helper before it starts; parameters as :func:`check_node`.

    Opens nothing; the record stays as it is.
    """
    checks, description = [], ""
    try:
        config, runs = HelperConfig.read(path, runs_kept=True), TakenRuns.read(path)
        description = describe_helper(config, config.opener())
        checks.append(Check("configuration", "ok", "Configuration, key, roster and record are in order."))
        checks += [*_roster(path), _disk([Path(config.record)], 0), *_runs(runs)]
    except (MurmurflError, OSError) as error:
        checks.append(Check("configuration", "failed", _told(error)))
    return Preflight(description, [*checks, *_connection(path, given, clock)])


def _roster(path: Path) -> list[Check]:
    """Whether file and roster agree: the pinned digest, this operator's own key, the cohort, the helpers."""
    try:
        found = list(check_operators_file(path))
    except (MurmurflError, OSError) as error:
        return [Check("roster", "failed", _told(error))]
    wrong = [one.text for one in found if not one.right]
    said = "; ".join(wrong or [one.text for one in found])
    return [Check("roster", "failed" if wrong else "ok", f"{said[0].upper()}{said[1:].removesuffix('.')}.")]


def _runs(runs: TakenRuns | None) -> list[Check]:
    return [] if runs is None else [Check("runs", "ok", runs.sentence())]


def _data(config: NodeConfig | OwnNode) -> list[Check]:
    """Whether others may change or read the data files that the operator's file names; everybody may read a schema."""
    try:
        found = [exposure(file, "a data file") for file in _data_files(config)]
        schema = Path("" if isinstance(config, UpdateNode) else config.schema)
        if schema.is_file():
            kind, sentence = exposure(schema, "a schema")
            found.append((kind, sentence) if kind == "write" else ("", ""))
    except OSError as error:
        return [Check("data", "failed", f"Expected to look at the data files, got: {_told(error)}.")]
    for others_may, state in (("write", "failed"), ("read", "warning")):
        sentences = [sentence for kind, sentence in found if kind == others_may]
        if sentences:
            return [Check("data", state, " ".join(sentences))]
    return [Check("data", "ok", "Others may neither change nor read the data files.")] if found else []


def _data_files(config: NodeConfig | OwnNode) -> list[Path]:
    """The files that are there, of those that the operator's file names; in tables any text may be a path."""
    tables = [*config.run_config.values(), *config.node_config.values()]
    files = config.data_files if isinstance(config, UpdateNode) else (config.samples,)
    named = [*files, *(value for value in tables if isinstance(value, str))]
    return [Path(text) for text in dict.fromkeys(named) if os.path.isfile(text)]  # noqa: PTH113 - any text: none is an error


def _connection(path: Path, given: Given, clock: Callable[[], float]) -> list[Check]:
    try:
        connection = given.connection(path)
    except (MurmurflError, OSError) as error:
        first, *rest = not_tried("The connection comes first.")
        return [Check(first.name, "failed", _told(error)), *rest]
    if connection is None:
        return not_tried("No SuperLink is named, neither by --superlink nor in [connection] of the file.")
    return connection_checks(connection, clock=clock)


def _machine_checks(config: NodeConfig | OwnNode, run_every_days: float | None, now: float) -> Preflight:
    try:
        machine = _Machine.of(config)
        summary = read_ledger(config.ledger)
    except (MurmurflError, OSError) as error:
        # It may have failed for want of room.
        disk = _disk([Path(config.ledger)], 0)
        return Preflight(checks=[Check("configuration", "failed", _told(error)), disk])
    checks = [Check("configuration", "ok", "Configuration, data and ledger are in order."), *_records(machine.records)]
    left = allowance_of(summary, machine.costs, run_every_days, now)
    disk = _disk([Path(config.ledger), Path(summary.mark)], machine.num_parameters)
    checks += [Check("budget", left.state, left.sentence(now)), disk]
    return Preflight(machine.description, checks, left)


@dataclass(frozen=True)
class _Machine:
    description: str
    costs: Costs
    num_parameters: int
    records: Records | None = None

    @classmethod
    def of(cls, config: NodeConfig | OwnNode) -> _Machine:
        """Make the machine as when the node starts: what would be refused then is refused here."""
        if isinstance(config, UpdateNode):
            own_app(config)
            costs = Costs.of_updates(config.policy(SQLiteLedger(config.ledger)))
            return cls(describe_own(config), costs, 0)  # the size of its updates is unknown before the first
        client: PrivateClient = own_client(config)[1] if isinstance(config, SampleNode) else config.client()
        return cls(describe(client), Costs.of_client(client), client.machine.num_parameters, _read(client, config))


def _read(client: PrivateClient, config: NodeConfig | SampleNode) -> Records | None:
    """The records that a machine was made of; with owners, its file read again."""
    if isinstance(client.samples, Records):
        return client.samples
    if not config.samples:
        return None
    schema = Schema.read_file(Path(config.schema))
    return Records(file_items(Path(config.samples), schema), schema)


def _records(found: Records | None) -> list[Check]:
    """How many records fit their schema; nothing without a schema, as with a built-in data set."""
    if found is None:
        return []
    share = float(found.fits.mean()) if len(found) else 0.0
    if share >= _ENOUGH:
        return [Check("records", "ok", found.report())]
    state = "warning" if share else "failed"
    return [Check("records", state, f"{found.report()} Compare the schema with the data.")]


def _disk(files: Sequence[Path], num_parameters: int) -> Check:
    """Whether the folders can be written to, with room for what a run leaves in them."""
    needed = _LEAST_FREE + _VECTORS * _BYTES_OF_A_VALUE * num_parameters
    least = None
    for folder in dict.fromkeys(file.absolute().parent for file in files):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:  # as a ledger's log and mark are written
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            status = os.statvfs(folder)
        except OSError as error:
            return Check(
                "disk",
                "failed",
                f"Expected to write to {folder}, got: {error.strerror}. Nothing can be recorded there, so nothing is "
                "released; make room, or give the folder to the user this runs as.",
            )
        free = status.f_bavail * status.f_frsize
        if least is None or free < least[0]:
            least = free, folder
    if least is None:
        return Check("disk", "not tried", "There is no folder to look at.")
    free, folder = least
    said = f"{_size(free)} are free in {folder}; what was sent and is not acknowledged takes up to {_size(needed)}"
    if free < needed:
        return Check("disk", "failed", f"{said}: make room.")
    return Check("disk", "warning" if free < _COMFORTABLE * needed else "ok", f"{said}.")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _told(error: Exception) -> str:
    """An error in one line for the operator."""
    if isinstance(error, OSError) and not isinstance(error, MurmurflError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return " ".join(str(error).split())
