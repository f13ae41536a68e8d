"""A node's log: one line with a time for each event, for people or, as JSON, for programs.

No line has a control character, whoever wrote its text: no terminal escape, no second line. What may depend on the
machine's data stays out unless its operator asks for details: texts of exceptions, warnings of arithmetic, figures of a
training, and every line whose presence depends on the samples.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from ....privacy import MurmurflError
from .journal import Entry

LONGEST_LINE = 4000
"""Characters of a line's text; the rest is cut."""

SAY_AGAIN_S = 3600.0
"""Seconds after which it is said again that a SuperLink is away."""

_LONGEST_CHAIN = 8
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_JOURNAL = "murmurfl.journal"
_TAKEN_OVER = ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access")
_QUIET = ("httpx", "httpcore", "asyncio")
# Modules that log what an entry says already.
_SAID_TWICE = frozenset({"answers", "noise_mod"})


def plain(text: str) -> str:
    """Somebody else's text as one line: terminal escapes are dropped, other control characters become spaces."""
    shown = "".join(c if c.isprintable() else " " for c in _ANSI.sub("", text)).strip()
    return shown if len(shown) <= LONGEST_LINE else f"{shown[:LONGEST_LINE]} ..."


def moment(seconds: float, *, milliseconds: bool = False) -> str:
    """A time in UTC by ISO 8601, ``2026-11-23T02:09:07Z``, from seconds since 1970."""
    whole, part = divmod(int(seconds * 1000), 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{text}.{part:03}Z" if milliseconds else f"{text}Z"


def _asked(facts: Mapping[str, Any]) -> str:
    """Run, session and round of a request, as far as it named them."""
    parts = [f"run {facts['run']}"] if "run" in facts else []
    if "session" in facts:
        parts.append(f"session {json.dumps(facts['session'], ensure_ascii=False)}")
    if "round" in facts:
        parts.append(f"round {facts['round']}")
    return ", ".join(parts)


def _released(facts: Mapping[str, Any]) -> str:
    samples = f", {facts['samples']} samples" if "samples" in facts else ""
    return f"Released: {_asked(facts)}, release {facts['release']}{_of(facts)}{samples}."


def _of(facts: Mapping[str, Any]) -> str:
    return f" of its {facts['of']}" if "of" in facts else ""


def _refused(facts: Mapping[str, Any]) -> str:
    return f"Refused: {facts.get('reason')}{_why(facts)}; {_asked(facts)}."


def _why(facts: Mapping[str, Any]) -> str:
    return f" ({facts['why']})" if facts.get("why") else ""


def _round(facts: Mapping[str, Any]) -> str:
    ended = f"Round {facts['round']}" if facts["rounds"] == 1 else f"{facts['rounds']} rounds, up to {facts['round']},"
    lacking = ", ".join(f"{facts[name]} {name}" for name in ("refused", "lost", "late", "malformed"))
    return (
        f"{ended} of {facts['planned']} ended: {facts['aggregated']} of {facts['asked']} aggregated, {lacking}; "
        f"{facts['seconds']} s."
    )


def _disconnected(facts: Mapping[str, Any]) -> str:
    again = f"; tried again in {facts['retry_s']:.0f} s" if "retry_s" in facts else "; tried again until it is back"
    return f"Disconnected from {facts.get('superlink', 'the SuperLink')}: {facts.get('cause', 'ended')}{again}."


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda facts: f"Started: {facts.get('kind', 'node')} {json.dumps(facts.get('name', ''))}.",
    "stopped": lambda facts: "Stopped.",  # noqa: ARG005
    "connecting": lambda facts: f"Connecting to {facts.get('superlink', 'the SuperLink')}.",
    "connected": lambda facts: f"Connected to {facts.get('superlink', 'the SuperLink')}.",
    "contact": lambda facts: f"Heard from {facts.get('superlink', 'the SuperLink')}.",
    "turned-away": lambda facts: f"Turned away by {facts.get('superlink', 'the SuperLink')}.",
    "disconnected": _disconnected,
    "released": _released,
    "repeated": lambda facts: f"Sent again, as it was: {_asked(facts)}, release {facts.get('release')}{_of(facts)}.",
    "opened": lambda facts: f"Opened a sum: {_asked(facts)}, {facts.get('releases')} releases.",
    "answered": lambda facts: f"Answered a question: {_asked(facts)}.",
    "refused": _refused,
    "round": _round,
    "run-ended": lambda facts: f"Run {facts['run']} ended: {facts['end']}{_why(facts)}.",
}
_LEVELS = {"refused": logging.WARNING, "disconnected": logging.WARNING, "answered": logging.DEBUG}
_NEVER_SHOWN = frozenset({"contact", "turned-away"})


class EntryWriter:
    """Listener that writes entries to the log (:meth:`~.journal.Journal.listen`).

    A line is a change. While one cause keeps a node from its SuperLink, only a verbose log has each try; others have
    one an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: tuple[str, float] | None = None

    def __call__(self, entry: Entry) -> None:
        if entry.kind in _NEVER_SHOWN:
            return
        level = logging.DEBUG if self._is_usual(entry) else _LEVELS.get(entry.kind, logging.INFO)
        if entry.kind == "run-ended" and entry.facts.get("end") != "completed":
            level = logging.WARNING
        sentence = _SENTENCES[entry.kind](entry.facts)
        logging.getLogger(_JOURNAL).log(level, "%s", sentence, extra={"entry": entry})

    def _is_usual(self, entry: Entry) -> bool:
        """Whether an entry repeats the last one of its kind."""
        if entry.kind == "connected":
            self._away = None
        if entry.kind == "connecting":
            return self._away is not None
        if entry.kind != "disconnected":
            return False
        cause, now = str(entry.facts.get("cause", "")), self._clock()
        usual = self._away is not None and self._away[0] == cause and now - self._away[1] < SAY_AGAIN_S
        self._away = self._away if usual else (cause, now)
        return usual


@dataclass(frozen=True)
class LogSettings:
    """Settings of a node's log."""

    as_json: bool = False  # one JSON object a line
    # Also what is of no interest while all is well: every line of Flower's, every question that was answered
    verbose: bool = False
    details: bool = False  # also what may depend on the machine's data. Such a log must not leave the machine.


def start_log(settings: LogSettings, stream: IO[str] | None = None) -> None:
    """Write everything that this process logs as a node's log, and nothing in any other form.

    Parameters
    ----------
    stream : text file, optional
        Default standard error, which systemd reads.

    Notes
    -----
    Without ``details``, neither the text nor the presence of a line that murmurfl or Flower logs depends on the
    machine's data. What a project's own code logs is its own affair. Number and times of lines show requests, which the
    server made.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(_JSONLines(settings) if settings.as_json else _Lines(settings))
    handler.addFilter(_Shown(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if settings.verbose else logging.INFO)
    for name in _TAKEN_OVER:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


@contextmanager
def lines_of_log(settings: LogSettings) -> Iterator[list[str]]:
    """Level and text of each line that a node with these settings would log inside the block."""
    lines: list[str] = []
    shown, written = _Shown(settings), _Lines(settings)

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if shown.filter(record):
                lines.append(f"{record.levelname} {written.text(record)}")

    taken = [logging.getLogger(), *map(logging.getLogger, _TAKEN_OVER)]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in taken]
    for logger in taken:
        logger.handlers[:], logger.propagate = [], True
    taken[0].addHandler(Kept())
    taken[0].setLevel(logging.DEBUG if settings.verbose else logging.INFO)
    try:
        yield lines
    finally:
        for logger, (handlers, level, propagate) in zip(taken, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def flower_line(level: int, text: str) -> None:
    """Log a line that a child process of Flower's has printed."""
    if shown := plain(text):
        logging.getLogger("flwr").log(level, "%s", shown, extra={"event": "flower"})


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A log that cannot be written, because of a full disk for example, holds up nothing."""


class _Shown(logging.Filter):
    """Filter of a node's log."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def filter(self, record: logging.LogRecord) -> bool:
        if (getattr(record, "of_data", False) or record.name == "py.warnings") and not self._settings.details:
            return False
        if self._settings.verbose or record.levelno >= logging.WARNING:
            return True
        if getattr(record, "event", "") == "flower" or {record.module, record.name.rpartition(".")[2]} & _SAID_TWICE:
            return False
        return record.levelno >= logging.INFO


class _Lines(logging.Formatter):
    """``2026-11-23T02:09:07Z INFO     Released: ...``: one line for each record."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def format(self, record: logging.LogRecord) -> str:
        return f"{moment(_time(record))} {record.levelname:<8} {self.text(record)}"

    def text(self, record: logging.LogRecord) -> str:
        failed = self.failure(record)
        return f"{plain(record.getMessage())} [{failed}]" if failed else plain(record.getMessage())

    def failure(self, record: logging.LogRecord) -> str:
        """What failed and where; with its text only if it is murmurfl's own or details are asked for."""
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return plain(", because of ".join(self._told(error) for error in _chain(record.exc_info[1])))

    def _told(self, error: BaseException) -> str:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
        told = isinstance(error, MurmurflError) or self._settings.details
        return f"{type(error).__name__}{f': {error}' if told else ''} at {' > '.join(places) or 'no place'}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error not in seen and len(seen) < _LONGEST_CHAIN:
        seen.append(error)
        yield error
        error = error.__cause__ or (error.__context__ if not error.__suppress_context__ else None) or error


class _JSONLines(_Lines):
    """One JSON object for each record: ``time``, ``level``, ``event`` and its facts, or a ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": moment(_time(record), milliseconds=True), "level": record.levelname.lower()}
        entry: Entry | None = getattr(record, "entry", None)
        if entry is not None:
            # Run ids have 64 bits, and many readers of JSON only 53.
            facts = {name: str(value) if name == "run" else value for name, value in entry.facts.items()}
            line |= {"event": entry.kind, **facts}
        else:
            line |= {"event": getattr(record, "event", "message"), "message": plain(record.getMessage())}
            if failed := self.failure(record):
                line["failure"] = failed
        return json.dumps(line)


def _time(record: logging.LogRecord) -> float:
    entry: Entry | None = getattr(record, "entry", None)
    return record.created if entry is None else entry.at


def _log_uncaught(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger(__name__).critical(
            "This process ends: an error that nobody expected.", exc_info=(kind, error, place)
        )


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        _log_uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
