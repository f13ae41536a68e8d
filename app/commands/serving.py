"""The options of what serves for long: nodes, helpers and servers, the same for each of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy import MurmurflError
from .failing import FAILED, INTERRUPTED, failing_clearly

if TYPE_CHECKING:
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
    """How something that serves for long tells its operator what happens.

    Parameters
    ----------
    log_json, log_details, verbose : bool
        As the options.
    """

    log_json: bool = False
    log_details: bool = False
    verbose: bool = False

    def start_log(self, *, watched: bool = False) -> None:
        """Have everything from here on written as a node's log, to standard error.

        Parameters
        ----------
        watched : bool
            Whether somebody looks on, and nothing is kept: then there are details.
        """
        from ..nodes.watching.node_log import LogSettings, start_log

        start_log(LogSettings(as_json=self.log_json, verbose=self.verbose, details=self.log_details or watched))

    def journal(self) -> Journal:
        """A journal whose entries are in the log."""
        from ..nodes.watching.journal import Journal
        from ..nodes.watching.node_log import EntryWriter

        journal = Journal()
        journal.listen(EntryWriter())
        return journal

    @contextmanager
    def failing(self) -> Iterator[None]:
        """As :func:`~.failing.failing_clearly`; where the log is for programs, its last line says why."""
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
