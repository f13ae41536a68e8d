"""Options shared by nodes, helpers and servers, and the output of ``--check``."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy import ConfigurationError, MurmurflError
from .terminal import FAILED, INTERRUPTED, fail, failing_clearly, say

if TYPE_CHECKING:
    from ..nodes.preflight import Preflight
    from ..nodes.watching.journal import Journal

HealthAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /health there; a port alone: for this computer only.")
]
MetricsAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /metrics there, for Prometheus; a port alone: as above.")
]


LogJSON = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]
LogDetails = Annotated[
    bool,
    typer.Option("--log-details", help="Log what may depend on this machine's data, too: such a log must stay here."),
]


@dataclass(frozen=True)
class Serving:
    """How a long-running process reports to its operator; fields as the options."""

    log_json: bool = False
    log_details: bool = False
    verbose: bool = False

    def start_log(self, *, watched: bool = False) -> None:
        """Write everything from here on as a node's log, to standard error.

        Parameters
        ----------
        watched : bool
            Whether somebody looks on and nothing is kept; then details are shown.
        """
        from ..nodes.watching.journal import LogSettings, start_log

        start_log(LogSettings(as_json=self.log_json, verbose=self.verbose, details=self.log_details or watched))

    def journal(self) -> Journal:
        """A journal whose entries are in the log."""
        from ..nodes.watching.journal import EntryWriter, Journal

        journal = Journal()
        journal.listen(EntryWriter())
        return journal

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Like :func:`~.terminal.failing_clearly`; a log for programs ends with the reason."""
        if not self.log_json:
            with failing_clearly():
                yield
            return
        logger = logging.getLogger(__name__)
        try:
            yield
        except MurmurflError as error:
            logger.critical("%s", error)
            sys.exit(FAILED)
        except OSError as error:
            logger.critical("%s%s", error.strerror or error, f": {error.filename}" if error.filename else "")
            sys.exit(FAILED)
        except KeyboardInterrupt:
            logger.critical("Interrupted.")
            sys.exit(INTERRUPTED)


Checked = Annotated[
    bool,
    typer.Option(
        "--check", help="Try everything that can be tried before the start, release nothing, and end: a line a check."
    ),
]
RunEvery = Annotated[
    float | None,
    typer.Option(metavar="DAYS", help="With --check: how often a run begins; default as often as in the ledger."),
]
CheckedAsJson = Annotated[bool, typer.Option("--json", help="With --check: print one JSON document.")]


def refuse_without_check(*, check: bool, as_json: bool, run_every: float | None = None) -> None:
    """Raise if options that only a check reads come without it, or the time is impossible."""
    if not check and (as_json or run_every is not None):
        raise ConfigurationError("Expected --json and --run-every with --check only, got one without it.")
    if run_every is not None and not 0 < run_every < float("inf"):
        raise ConfigurationError(f"Expected --run-every to be a number of days > 0, got {run_every!r}.")


def say_checks_and_end(found: Preflight, *, as_json: bool) -> None:
    """Print the outcome of checks; exit code 1 if one failed."""
    failed = [check for check in found.checks if check.state == "failed"]
    # The reason why a node does not start reads as at a start.
    first = next((check for check in failed if check.name == "configuration"), None)
    if as_json:
        typer.echo(json.dumps(found.document(time.time()), indent=2, allow_nan=False))
    else:
        if found.description:
            say(found.description)
        for check in found.checks:
            say(f"{check.name:<14} {check.state:<10} {'See below.' if check is first else check.sentence}")
    if first is not None:
        fail(first.sentence)
    if failed:
        fail(f"Expected every check to pass, got failures of {', '.join(check.name for check in failed)}: see above.")
