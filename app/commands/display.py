"""Rounds of a run as people see them: a bar on a terminal, a few lines elsewhere, whatever carries the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from ...privacy import Guarantee
from ...strategies.rounds.observed import log_forecast
from ..runs.progress import RoundLine
from .terminal import say, width

_LINES = 4
"""Rounds that are shown elsewhere beside the first."""


def is_worrying(line: str) -> bool:
    """Whether a line of Flower's log is for the eyes of whoever started the run."""
    return line.startswith(("WARNING :", "ERROR :")) and "flwr 1.32" not in line


class RunDisplay:
    """Rounds as they come: a bar on a terminal, a few lines elsewhere.

    Parameters
    ----------
    guarantee : Guarantee, optional
        Of the whole run: it stands above the rounds, and each has its epsilon. Without it no epsilon is shown, and no
        forecast, for the summary has both.
    console : Console, optional
        Default standard output.
    """

    def __init__(self, guarantee: Guarantee | None = None, console: Console | None = None) -> None:
        self._guarantee = guarantee
        self._console = Console() if console is None else console
        self._bar = Bar(
            TextColumn("round"),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[said]}", table_column=Column(no_wrap=False, overflow="fold")),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=False,
        )
        self._task = self._bar.add_task("", total=None, said="")
        self._measured = ""
        self._edges = 0

    def __enter__(self) -> RunDisplay:
        if self._guarantee is not None:
            self.message(self._guarantee.sentence)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, line: RoundLine) -> None:
        """One round is done."""
        if not self._console.is_terminal:
            if self._guarantee is not None and line.wanted:
                self.message(line.within(width()))
            elif self._guarantee is None and (line.server_round == 1 or line.among(_LINES)):
                self.message(line.measured)
            return
        # A round without an evaluation goes on showing the last one's figures.
        if line.loss is not None:
            accuracy = "" if line.accuracy is None else f"accuracy {100 * line.accuracy:.1f} %  "
            self._measured = f"{accuracy}loss {line.loss:.4g}  "
        left = line.time_left
        epsilon = "" if self._guarantee is None else f"epsilon {line.epsilon_text}  "
        said = f"{self._measured}{epsilon}replies {line.aggregated}/{line.asked}{f'  {left} left' if left else ''}"
        self._bar.update(self._task, completed=line.server_round, total=line.num_rounds, said=said)

    def read(self, text: str) -> bool:
        """Show a line of a run's log if it is a round's; whether it was."""
        if (line := RoundLine.read(text)) is not None:
            self.show(line)
        return line is not None

    def log_line(self, line: str, *, verbose: bool) -> None:
        """Show what matters of a line of Flower's log: rounds as such, and warnings; with verbose all as it is."""
        if verbose:
            self.message(line)
        elif self._guarantee is None and self._of_forecast(line):
            return
        elif not self.read(line.removeprefix("INFO :").strip()) and is_worrying(line):
            self.message(line, error=True)

    def _of_forecast(self, line: str) -> bool:
        """Whether a line of a log is of a forecast's banner, which is between three lines of equal signs."""
        if not line.startswith("WARNING :"):
            return False
        edge = line.endswith("=" * 20)
        self._edges += edge
        return edge or self._edges % 3 != 0

    @contextmanager
    def of_log(self, logger: logging.Logger) -> Iterator[None]:
        """Hold a forecast back from a logger of this process where the summary has it, until the block ends."""

        def kept(record: logging.LogRecord) -> bool:
            return self._guarantee is not None or record.funcName != log_forecast.__name__

        logger.addFilter(kept)
        try:
            yield
        finally:
            logger.removeFilter(kept)

    def message(self, text: str, *, error: bool = False) -> None:
        """Something else to say, above the bar."""
        if self._console.is_terminal and not error:
            self._console.print(text, markup=False, highlight=False)
        elif error or self._console.file is sys.stdout:
            say(text, err=error)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
