"""Counts of rounds in a file for a monitor.

``murmurfl server`` names a folder in the environment; every training adds the counts of its rounds' reports to the one
file there, written anew after every round. A ServerApp is a process that ends with its run; the figures stay.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp import Grid

from ...privacy import protocol
from ..rounds.replies import DirectReplies, RoundReport
from .callback import Callback, Training

logger = logging.getLogger("flwr")

FIGURES_VARIABLE = "MURMURFL_FIGURES"
"""The environment variable with the folder of the file; without it nothing is written."""

_FILE, _LOCK = "figures.json", "figures.lock"
_LARGEST_FILE = 65536
_LONGEST_WAIT_S = 2.0
_PAUSE_S = 0.005
_LARGEST = 2**53
_LARGEST_RUN = 2**64
"""Flower's numbers of runs are shown, and no figure of a monitor, which has floats."""
_OTHER = "other"
_REASONS = frozenset(protocol.REFUSAL_NAMES.values())


@dataclass(frozen=True)
class ServerFigures:
    """Counts of all rounds of all runs in one folder, as in :class:`~murmurfl.strategies.RoundReport`, and the last."""

    rounds: int = 0  # rounds that ended
    closed: int = 0  # rounds in which no sum was opened
    asked: int = 0
    aggregated: int = 0
    lost: int = 0
    late: int = 0
    malformed: int = 0
    unopened: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the protocol's names of refusals, and ``other``
    run: int = 0  # Flower's number of the last round's run; 0 where it has none
    round: int = 0  # the number of the last round
    planned: int = 0  # rounds of its run
    seconds: float = 0.0  # since the round before it, or since its run began
    at: float = 0.0  # when it ended, in seconds since 1970

    def after(self, report: RoundReport, run: int, planned: int, seconds: float, at: float) -> ServerFigures:
        """Return these figures with one more round of a run."""
        refused = dict(self.refused)
        for reason, count in report.refused.items():
            name = reason if reason in _REASONS else _OTHER
            refused[name] = refused.get(name, 0) + count
        counts = ("asked", "aggregated", "lost", "late", "malformed", "unopened")
        return ServerFigures(
            rounds=self.rounds + 1,
            closed=self.closed + bool(report.closed),
            **{name: getattr(self, name) + getattr(report, name) for name in counts},
            refused=refused,
            run=run,
            round=report.server_round,
            planned=planned,
            seconds=seconds,
            at=at,
        )


def read_figures(folder: Path) -> ServerFigures | None:
    """Read the figures in a folder; None where there are none, or none that could be believed.

    Whoever submits a run can write to the file. It is read up to a fixed length and never waited for; only numbers are
    returned, and counts under the protocol's names of refusals.
    """
    try:
        # Neither through a link, nor waiting for the other end of a pipe.
        descriptor = os.open(folder / _FILE, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            content = file.read(_LARGEST_FILE + 1)
        return None if len(content) > _LARGEST_FILE else _figures(json.loads(content))
    except (OSError, ValueError, RecursionError):
        return None


def _figures(document: Any) -> ServerFigures | None:
    if not isinstance(document, Mapping):
        return None
    made: dict[str, Any] = {}
    for name, default in asdict(ServerFigures()).items():
        value = document.get(name, default)
        if name == "refused":
            counts = value if isinstance(value, Mapping) else {}
            known = {reason: count for reason, count in counts.items() if reason in _REASONS or reason == _OTHER}
            if not all(_is_number(count, int) for count in known.values()):
                return None
            made[name] = known
        elif _is_number(value, type(default), _LARGEST_RUN if name == "run" else _LARGEST):
            made[name] = value
        else:
            return None
    return ServerFigures(**made)


def _is_number(value: Any, kind: type, largest: int = _LARGEST) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return 0 <= value <= largest  # of NaN neither is true, and no integer is too large to be compared


class MetricsFile(Callback):
    """The file to which one training adds its rounds, for a monitor; several may share a folder."""

    def __init__(self, folder: Path, run: int = 0) -> None:
        self._folder, self._run = folder, run
        self._last = time.monotonic()
        self._planned = 0
        self._failed = False

    @classmethod
    def from_environment(cls, grid: Grid) -> MetricsFile | None:
        """Return the file in the folder that the environment names, for the run of a grid; or None."""
        folder = os.environ.get(FIGURES_VARIABLE)
        return cls(Path(folder), _run_of(grid)) if folder else None

    def on_start(self, training: Training, grid: Grid | DirectReplies, num_rounds: int) -> None:
        self._planned = num_rounds

    def after_round(self, training: Training, report: RoundReport, metrics: MetricRecord | None) -> None:
        self.note(report, self._planned)

    def note(self, report: RoundReport, planned: int) -> None:
        """Add a round of a training of ``planned`` rounds; a failure to write is logged once and disturbs nothing."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        try:
            with _locked(self._folder):
                before = read_figures(self._folder) or ServerFigures()
                self._write(before.after(report, self._run, planned, seconds, time.time()))
        except (OSError, OverflowError, ValueError) as error:
            if not self._failed:
                logger.warning("What a monitor is to see could not be written to %s: %s", self._folder, error)
            self._failed = True

    def _write(self, figures: ServerFigures) -> None:
        temporary = self._folder / f"{_FILE}.{os.getpid()}"
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w") as file:
                json.dump(asdict(figures), file)
            temporary.replace(self._folder / _FILE)  # a reader sees all of the old one or all of the new one
        finally:
            temporary.unlink(missing_ok=True)


def _run_of(grid: Grid) -> int:
    """Flower's number of a grid's run; 0 of a grid without one, and of a number that no figure may have."""
    try:
        run = int(grid.run.run_id)
    except Exception:  # a grid of somebody's own may do anything
        return 0
    return run if 0 <= run <= _LARGEST_RUN else 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that write to a folder; gives up soon, since no run waits for another one."""
    with (folder / _LOCK).open("ab") as file:
        with suppress(ImportError):
            import fcntl

            end = time.monotonic() + _LONGEST_WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the file's end, and with the process
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(_PAUSE_S)
        yield
