"""Live progress of a run in the terminal: rounds, accuracy, loss, epsilon, replies and the time left.

A run says one line a round, whatever its engine; over ``flwr run`` the lines come back out of Flower's log. On a
terminal they move a bar, elsewhere they are printed. The guarantee that their epsilon belongs to stands above them.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from ..privacy import Guarantee, rounded_up
from .run import Progress
from .terminal import say, width

_LINES = 20
"""Rounds without an evaluation say so many lines in a run, and no more."""

_LINE = re.compile(
    r"round +(?P<round>\d+)/(?P<rounds>\d+)(?:  accuracy +(?P<accuracy>\S+) %)?(?:  loss (?P<loss>\S+))?"
    r"  epsilon (?P<epsilon>\S+)(?P<note> \(.*?\))? \(whole run\)  replies (?P<aggregated>\d+)/(?P<asked>\d+)"
    r"(?:  left (?P<left>\S+))?"
)
_FAST = " (fast noise: no guarantee)"


@dataclass(frozen=True)
class RoundLine:
    """What one round says of itself.

    Parameters
    ----------
    server_round, num_rounds : int
        t and T.
    accuracy, loss : float or None
        Of the central evaluation, in rounds that have one.
    epsilon : str
        Of the whole run, rounded up.
    fast : bool
        Whether the noise is ``fast``, so that epsilon protects nobody.
    aggregated, asked : int
        Replies that entered the model, and machines asked.
    seconds_left : float or None
        Until the last round, if the others take as long as those after the first; None while that is not known.
    """

    server_round: int
    num_rounds: int
    accuracy: float | None
    loss: float | None
    epsilon: str
    fast: bool
    aggregated: int
    asked: int
    seconds_left: float | None

    @classmethod
    def of(cls, progress: Progress, noise_quality: str) -> RoundLine:
        """The line of a round."""
        report = progress.report
        return cls(
            report.server_round,
            progress.num_rounds,
            progress.accuracy,
            progress.loss,
            rounded_up(progress.epsilon),
            noise_quality != "exact",
            report.aggregated,
            report.asked,
            progress.seconds_left,
        )

    @classmethod
    def read(cls, text: str) -> RoundLine | None:
        """A line of a log back as what it says; None if it is another."""
        found = _LINE.fullmatch(text)
        if found is None:
            return None
        accuracy, loss = found["accuracy"], found["loss"]
        left = None if found["left"] is None else _seconds(found["left"])
        return cls(
            int(found["round"]),
            int(found["rounds"]),
            None if accuracy is None else float(accuracy) / 100,
            None if loss is None else float(loss),
            found["epsilon"],
            bool(found["note"]),
            int(found["aggregated"]),
            int(found["asked"]),
            left,
        )

    @property
    def wanted(self) -> bool:
        """Whether it is worth a line in a log: an evaluation, the last round, or one of a few in between."""
        every = max(self.num_rounds // _LINES, 1)
        return self.loss is not None or self.server_round == self.num_rounds or not self.server_round % every

    def within(self, columns: int | None) -> str:
        """The line, shorter where it would not fit: what the guarantee above it says of the whole run goes first."""
        text = str(self)
        if columns is not None and len(text) > columns:
            text = " ".join(text.replace(" (whole run)", "").split())
        return text

    def __str__(self) -> str:
        measured = "" if self.accuracy is None else f"  accuracy {100 * self.accuracy:5.1f} %"
        measured += "" if self.loss is None else f"  loss {self.loss:.4g}"
        return (
            f"round {self.server_round:>{len(str(self.num_rounds))}}/{self.num_rounds}{measured}"
            f"  epsilon {self.epsilon}{_FAST if self.fast else ''} (whole run)"
            f"  replies {self.aggregated}/{self.asked}"
            f"{'' if self.seconds_left is None else f'  left {_clock(self.seconds_left)}'}"
        )


class RunDisplay:
    """Rounds as they come: a bar on a terminal, a line each elsewhere; the guarantee once, above them.

    Parameters
    ----------
    guarantee : Guarantee
        Of the whole run, which every line's epsilon belongs to.
    console : Console, optional
        Default standard output.
    """

    def __init__(self, guarantee: Guarantee, console: Console | None = None) -> None:
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

    def __enter__(self) -> RunDisplay:
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
            if line.wanted:
                self.message(line.within(width()))
            return
        if line.loss is not None:
            accuracy = "" if line.accuracy is None else f"accuracy {100 * line.accuracy:.1f} %  "
            self._measured = f"{accuracy}loss {line.loss:.4g}  "
        said = (
            f"{self._measured}epsilon {line.epsilon}{_FAST if line.fast else ''}  "
            f"replies {line.aggregated}/{line.asked}"
            f"{'' if line.seconds_left is None else f'  {_clock(line.seconds_left)} left'}"
        )
        self._bar.update(self._task, completed=line.server_round, total=line.num_rounds, said=said)

    def read(self, text: str) -> bool:
        """Show a line of a run's log if it is a round's; whether it was."""
        line = RoundLine.read(text)
        if line is not None:
            self.show(line)
        return line is not None

    def message(self, text: str, *, error: bool = False) -> None:
        """Something else to say, above the bar."""
        if self._console.is_terminal and not error:
            self._console.print(text, markup=False, highlight=False)
        elif error or self._console.file is sys.stdout:
            say(text, err=error)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _seconds(clock: str) -> float:
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return float(hours * 3600 + minutes * 60 + seconds)
