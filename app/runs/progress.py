"""Where a run stands after a round, and the line that it says of it.

Every engine says the same lines; over ``flwr run`` they come back out of Flower's log, where the command reads them.
The guarantee that their epsilon belongs to stands above them, once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...privacy import rounded_up
from ...strategies import RoundReport
from ..settings.run_config import RunConfig, helper_names

_NOTHING = -1


class Participation(Mapping[str, "int | None"]):
    """The machines asked in a round, and the number of the release aggregated of each, or None.

    Parameters
    ----------
    numbers : ndarray of int
        Of the machines, ascending.
    releases : ndarray of int
        As many; -1 for None.
    """

    def __init__(self, numbers: NDArray[np.integer], releases: NDArray[np.integer]) -> None:
        self._numbers, self._releases = numbers, releases

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(str, self._numbers.tolist())

    def __getitem__(self, name: str) -> int | None:
        place = int(np.searchsorted(self._numbers, int(name))) if name.isascii() and name.isdigit() else len(self)
        if place == len(self) or str(self._numbers[place]) != name:
            raise KeyError(name)
        release = int(self._releases[place])
        return None if release == _NOTHING else release

    def plain(self) -> dict[str, int | None]:
        """The mapping as a dict."""
        releases = (None if release == _NOTHING else release for release in self._releases.tolist())
        return dict(zip(self, releases, strict=True))


def compact(asked: Mapping[str, int | None]) -> Mapping[str, int | None]:
    """A mapping as two arrays where its names are ascending numbers; otherwise as it is."""
    if not all(name.isascii() and name.isdigit() for name in asked):
        return asked
    try:
        numbers = np.array([int(name) for name in asked], dtype=np.int32)
        releases = np.array([_NOTHING if release is None else release for release in asked.values()], dtype=np.int32)
    except (OverflowError, ValueError):
        return asked
    made = Participation(numbers, releases)
    plain = bool((np.diff(numbers) > 0).all()) and all(map(str.__eq__, made, asked))
    return made if plain else asked


def participant_names(config: RunConfig) -> list[str]:
    """The names of machines, then helpers; each is on a node of its own where there are enough nodes."""
    helpers = helper_names(config.helpers) if config.secure else ()
    return [*map(str, range(config.num_clients)), *helpers]


_LINES = 20
"""Rounds without an evaluation say so many lines in a run, and no more."""

_FAST = " (fast noise: no guarantee)"

_LINE = re.compile(
    r"round +(?P<round>\d+)/(?P<rounds>\d+)(?:  accuracy +(?P<accuracy>\S+) %)?(?:  loss (?P<loss>\S+))?"
    r"  epsilon (?P<epsilon>\S+)(?: or (?P<local>\S+))?(?P<note> \(.*?\))? \(whole run\)"
    r"  replies (?P<aggregated>\d+)/(?P<asked>\d+)(?:  left (?P<left>\S+))?"
)
"""A line in Flower's log."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round.

    Parameters
    ----------
    loss, accuracy, auc : float or None
        Of the central evaluation, in rounds that have one; the area under the ROC curve where there are two classes.
    mu, epsilon : float
        The guarantee of the whole run.
    mu_local, epsilon_local : float or None
        Under secure aggregation, what holds whatever server, helpers and other machines do.
    seconds_left : float or None
        Until the last round, if the others take as long as those after the first; None after the first, which waits
        for the machines to start.
    machines : mapping
        The machines that were asked, and of each the number of its release that was aggregated, or None.
    """

    report: RoundReport
    num_rounds: int
    loss: float | None
    accuracy: float | None
    mu: float
    epsilon: float
    seconds_left: float | None = None
    machines: Mapping[str, int | None] = field(default_factory=dict)
    mu_local: float | None = None
    epsilon_local: float | None = None
    auc: float | None = None


@dataclass(frozen=True)
class RoundLine:
    """One round as a line of text.

    Parameters
    ----------
    server_round, num_rounds : int
        t and T.
    accuracy, loss : float or None
        Of the central evaluation, in rounds that have one.
    epsilon : str
        Of the whole run, rounded up.
    epsilon_local : str
        Under secure aggregation, what holds whatever happens, rounded up; empty under another trust.
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
    epsilon_local: str = ""

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
            "" if progress.epsilon_local is None else rounded_up(progress.epsilon_local),
        )

    @classmethod
    def read(cls, text: str) -> RoundLine | None:
        """A line of a log back as what it says; None if it is another."""
        found = _LINE.fullmatch(text)
        if found is None:
            return None
        accuracy, loss, left = found["accuracy"], found["loss"], found["left"]
        hours, minutes, seconds = (int(part) for part in (left or "0:0:0").split(":"))
        return cls(
            int(found["round"]),
            int(found["rounds"]),
            None if accuracy is None else float(accuracy) / 100,
            None if loss is None else float(loss),
            found["epsilon"],
            bool(found["note"]),
            int(found["aggregated"]),
            int(found["asked"]),
            None if left is None else float(hours * 3600 + minutes * 60 + seconds),
            found["local"] or "",
        )

    @property
    def wanted(self) -> bool:
        """Whether it is worth a line in a log: an evaluation, the last round, or one of a few in between."""
        return self.loss is not None or self.among(_LINES)

    def among(self, lines: int) -> bool:
        """Whether it is the last round, or one of so many in between."""
        return self.server_round == self.num_rounds or not self.server_round % max(self.num_rounds // lines, 1)

    @property
    def measured(self) -> str:
        """The line without epsilon."""
        return str(self).replace(f"  epsilon {self.epsilon_text} (whole run)", "")

    @property
    def epsilon_text(self) -> str:
        """Epsilon, the local one where there is one, and what must stand beside it where noise is fast."""
        local = f" or {self.epsilon_local}" if self.epsilon_local else ""
        return f"{self.epsilon}{local}{_FAST if self.fast else ''}"

    @property
    def time_left(self) -> str:
        """Hours, minutes and seconds until the last round; empty while that is not known."""
        if self.seconds_left is None:
            return ""
        whole = math.ceil(self.seconds_left)
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"

    def within(self, columns: int | None) -> str:
        """The line, shorter where it would not fit: first goes what the guarantee above it says, then the time."""
        text = str(self)
        if columns is not None and len(text) > columns:
            text = " ".join(text.replace(" (whole run)", "").split())
        if columns is not None and len(text) > columns:
            text = text.removesuffix(f" left {self.time_left}")  # two epsilons and the counts of many machines
        return text

    def __str__(self) -> str:
        measured = "" if self.accuracy is None else f"  accuracy {100 * self.accuracy:5.1f} %"
        measured += "" if self.loss is None else f"  loss {self.loss:.4g}"
        return (
            f"round {self.server_round:>{len(str(self.num_rounds))}}/{self.num_rounds}{measured}"
            f"  epsilon {self.epsilon_text} (whole run)"
            f"  replies {self.aggregated}/{self.asked}"
            f"{f'  left {self.time_left}' if self.time_left else ''}"
        )
