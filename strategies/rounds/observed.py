"""What a server sees of a training beside its model: what it refuses, says and notes for a monitor.

Before the first round, while nothing is spent: do machines last for all rounds, and evaluate; what does their noise
leave of the model? Afterwards: does anything come from them, and does clipping leave anything of it?

``murmurfl server`` names a folder in the environment; every strategy adds the counts of its rounds' reports to the one
file there, written anew after every round. A ServerApp is a process that ends with its run; the figures stay.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from ...privacy import ConfigurationError, MurmurflError, protocol
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.machine.clipping import FAR_BEYOND, TrainingFigures, times
from .replies import RoundReport

logger = logging.getLogger("flwr")

PATIENCE = 3
"""Rounds from which nothing came but refusals, after which a training that never had anything is given up."""

_MOST_NAMED = 10
_LEGACY = " In place of ClientApp(client_fn, mods=[...]) write app = numpy_client_app(client_fn, mods=[...])."


class NothingAggregatedError(MurmurflError):
    """No machine's release ever came into the model."""


def check_masks(statements: Mapping[str, Mapping[str, Any]], *, masked: bool) -> None:
    """Refuse a training if server (``masked``) and all machines disagree about masks: no reply could be read."""
    unlike = [name for name, stated in statements.items() if (protocol.MIN_COHORT in stated) != masked]
    if not unlike or len(unlike) < len(statements):
        return
    if masked:
        raise ConfigurationError(
            f"Expected machines that release under masks, got {len(unlike)} that do not, and secure_aggregation has "
            "sums of masked releases only. Set trust='secure-aggregation', min_honest=... and min_cohort=... in their "
            "policies, or leave secure_aggregation out."
        )
    raise ConfigurationError(
        f"Expected machines that release without masks, got {len(unlike)} with trust='secure-aggregation', whose masks "
        "this server cannot take off. Give the strategy secure_aggregation=SecureAggregation(min_cohort=..., "
        "helpers=...)."
    )


def check_evaluations(statements: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to ask machines for evaluations if none of them allows any; warn if some do not."""
    stated = {name: statement.get("evaluation-allowed") for name, statement in statements.items()}
    said = {name: bool(allowed) for name, allowed in stated.items() if isinstance(allowed, bool | int)}
    refusing = [name for name, allowed in said.items() if not allowed]
    if not refusing:
        return
    how = (
        "A machine evaluates only where its own configuration says so: allow_evaluation=True in its UpdatePolicy, "
        "allow-evaluation = true in its operator's file. The results have no noise."
    )
    if len(refusing) == len(said):
        raise ConfigurationError(
            f"Expected machines that evaluate, for evaluate_on_machines=True, got {len(said)} that do not. {how} Or "
            "leave evaluate_on_machines out and give start(..., evaluate_fn=...), on public data."
        )
    named = ", ".join(refusing[:_MOST_NAMED]) + (", ..." if len(refusing) > _MOST_NAMED else "")
    logger.warning("%d of %d machines do not evaluate (%s). %s", len(refusing), len(said), named, how)


def is_hopeless(history: Sequence[RoundReport], patience: int) -> bool:
    """Whether all of at least ``patience`` rounds had nothing but refusals; lost replies and closed rounds may mend."""
    return len(history) >= patience and all(
        report.asked and report.refusals + report.malformed >= report.asked for report in history
    )


def check_something_came(history: Sequence[RoundReport], why: Sequence[str] = ()) -> None:
    """Refuse a result of rounds that asked for releases and aggregated none; ``why`` has the texts of refusals."""
    asked = [report for report in history if report.asked]
    if not asked or any(report.aggregated for report in asked):
        return
    reasons = sorted({reason for report in asked for reason in report.refused})
    texts = f" ({'; '.join(why)})" if why else ""
    said = [f"machines refused with {', '.join(reasons)}{texts}"] if reasons else []
    said += sorted({f"a round was closed ({report.closed})" for report in asked if report.closed})
    said += [f"{count} replies were malformed"] if (count := sum(report.malformed for report in asked)) else []
    said += [f"{count} replies were lost"] if (count := sum(report.lost for report in asked)) else []
    rounds = "round" if len(asked) == 1 else "rounds"
    legacy = protocol.REFUSAL_NAMES[protocol.LEGACY_CLIENT_APP] in reasons
    raise NothingAggregatedError(
        f"Expected releases to aggregate, got none in {len(asked)} {rounds}: {'; '.join(said)}; see the machines' logs."
        f"{_LEGACY if legacy else ''}"
    )


_WIDTH = 64
"""Width of a line beside Flower's `WARNING :` on a terminal of 80 columns."""


def log_forecast(forecast: Forecast | None) -> None:
    """Log a forecast: as a banner where the model will be noise, else in a line or a few."""
    if forecast is None:
        return
    if forecast.is_warning:
        # A record for each line: `murmurfl run` and others who read this log look for warnings line by line.
        for line in forecast.banner(_WIDTH):
            logger.warning("%s", line)
        return
    logger.info("%s %s", forecast.sentence, forecast.basis)
    for line in forecast.advice():
        logger.info("%s", line)


ALL_MACHINES = ""
"""A machine's name for the figures of all machines of a round together."""


class ClippingWatch:
    """What clipping did in every round, with warnings; not private, so only simulated machines tell it."""

    def __init__(self) -> None:
        self.rounds: dict[int, TrainingFigures] = {}
        self._warned_of_not_finite = False
        self._warned_of_ratio = 0.0

    def take(self, server_round: int, figures: Mapping[str, TrainingFigures]) -> None:
        """Keep the figures of a round, by machine, and warn where they are bad."""
        if not figures:
            return
        of_round = TrainingFigures.together(figures.values())
        self.rounds[server_round] = of_round
        if of_round.not_finite and not self._warned_of_not_finite:
            self._warned_of_not_finite = True
            logger.warning("Round %d, in simulation: %s", server_round, of_round.sentence)
        # A warning each time the ratio has doubled: one is too few where a training diverges, one a round too many.
        if of_round.median_ratio > max(FAR_BEYOND, 2 * self._warned_of_ratio):
            self._warned_of_ratio = of_round.median_ratio
            name, worst = max(figures.items(), key=lambda item: item[1].largest_ratio)
            logger.warning(
                "Round %d, in simulation: half of the contributions were over %s the clip norm%s: next to "
                "nothing is left of them. Scale the model or its inputs, train less at a time, or raise clip_norm.",
                *(server_round, times(of_round.median_ratio)),
                ""
                if name == ALL_MACHINES
                else f", the update of machine {name} was {times(worst.largest_ratio)} the clip",
            )


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
        """These figures with one more round of a run."""
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
    """The figures in a folder; None where there are none, or none that could be believed.

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


class FigureFile:
    """The file to which one training adds its rounds; several may share a folder."""

    def __init__(self, folder: Path, run: int = 0) -> None:
        self._folder, self._run = folder, run
        self._last = time.monotonic()
        self._failed = False

    @classmethod
    def of_environment(cls, grid: Grid) -> FigureFile | None:
        """The file in the folder that the environment names, for the run of a grid; or None."""
        folder = os.environ.get(FIGURES_VARIABLE)
        return cls(Path(folder), _run_of(grid)) if folder else None

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
