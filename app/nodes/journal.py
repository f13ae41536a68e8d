"""Events on a node, a helper or a server, in a journal and in its log.

Log, health and metrics are made from the journal's entries. No fact of an entry depends on anybody's data: names,
numbers of releases, fixed reasons, times. A terminal or a monitor may show all of it.

The log has one line with a time for each event, for people or, as JSON, for programs. No line has a control character,
whoever wrote its text: no terminal escape, no second line. What may depend on the client's data stays out unless its
operator asks for details: texts of exceptions, warnings of arithmetic, figures of a training, and every line whose
presence depends on the samples.
"""

from __future__ import annotations

import importlib.util
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
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MessageType

from ...privacy import protocol
from ...privacy.errors import ConfigurationError, InvalidRecordError, MurmurflError
from ...privacy.queries import QUERIES

if TYPE_CHECKING:
    from ...clients.messages import Answers

logger = logging.getLogger(__name__)


Fact = str | int | float

_SESSIONS_KNOWN = 64
_DIGITS = 10
_LONGEST_WHY = 300

FACTS: dict[str, frozenset[str]] = {
    "started": frozenset({"kind", "name"}),
    "unconfigured": frozenset({"reason"}),
    "stopped": frozenset(),
    "connecting": frozenset({"superlink"}),
    "connected": frozenset({"superlink"}),
    "contact": frozenset({"superlink"}),
    "turned-away": frozenset({"superlink"}),
    "disconnected": frozenset({"superlink", "cause", "retry_s"}),
    "released": frozenset({"run", "session", "round", "release", "samples", "of"}),
    "repeated": frozenset({"run", "session", "round", "release", "samples", "of"}),
    "opened": frozenset({"run", "session", "round", "releases"}),
    "answered": frozenset({"run"}),
    "refused": frozenset({"run", "reason", "why", "session", "round"}),
    "run-ended": frozenset({"run", "end", "why"}),
    "round": frozenset(
        {"run", "round", "planned", "rounds", "asked", "aggregated", "lost", "late", "malformed", "refused", "seconds"}
    ),
}
"""Every kind of entry, and the facts that it may have.

``unconfigured``: the client cannot be made as its operator's file says.

``connected``: the SuperLink has accepted the node. ``contact``: it has answered since, at most one every few seconds.
``turned-away``: it did not accept the node. ``disconnected`` without ``retry_s``: the SuperNode lost it and retries by
itself. ``of`` names a query beside the training, such as the ``mean`` of features or an ``evaluation``. ``why`` is the
fixed text of a refusal. ``round`` is a server's: one round of a ``run`` has ended, or several rounds since the last
entry (``rounds``), perhaps of several runs.
"""


@dataclass(frozen=True)
class Entry:
    """One event."""

    kind: str  # one of :data:`FACTS`
    at: float  # when, in seconds since 1970
    facts: Mapping[str, Fact]  # those of its kind; none depends on data

    def __post_init__(self) -> None:
        unknown = set(self.facts) - FACTS.get(self.kind, frozenset())
        if self.kind not in FACTS or unknown:
            raise ConfigurationError(
                f"Expected an entry of a known kind with its own facts, got {self.kind!r} with {sorted(self.facts)}.",
                kind="unknown-name",
                setting="kind",
            )


Listener = Callable[[Entry], None]


class Journal:
    """Tells listeners what happens, in order.

    A listener that fails is logged and changes nothing else: no release is lost or repeated because somebody looked on.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners: list[Listener] = []
        self._one_at_a_time = threading.RLock()
        self.asked_at = 0.0
        """Time of the last request, in seconds since 1970."""
        self.reached_at = 0.0
        """Time of the last answer of the SuperNode's process, in monotonic seconds; too often for entries."""

    def arrived(self) -> None:
        """Note when a request came: what is made of it later must not tell how long the answer took."""
        self.asked_at = self._clock()

    def reached(self) -> None:
        """Note an answer of the SuperNode's process."""
        self.reached_at = time.monotonic()

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for every entry from now on, in the thread of the event; it must be quick."""
        self._listeners.append(listener)

    def note(self, event: str, /, **facts: Fact) -> None:
        """Tell all listeners of an event, one of :data:`FACTS`, with facts of its kind."""
        with self._one_at_a_time:
            entry = Entry(event, self._clock(), facts)
            for listener in self._listeners:
                try:
                    listener(entry)
                except Exception:  # a listener is somebody else's code, and must not keep an answer from leaving
                    logger.exception("What happened could not be shown to everybody.")


def noting(app: Answers, journal: Journal) -> Answers:
    """Return an app that notes each answer in a journal, unchanged, after it was made and before it leaves.

    An entry has what leaves the client, without the values of a release or of the request.
    """
    made: dict[tuple[str, str], int] = {}

    def answer(message: Message, context: Context) -> Message:
        journal.arrived()
        asked = _asked(message)  # before the app, which may change the message
        reply = app(message, context)
        try:
            event, facts = _entry(message, reply, asked)
            if event == "released" and _is_repeated(facts, made):
                event = "repeated"
            journal.note(event, **facts)
        except Exception:  # the answer leaves whether it was noted or not
            logger.exception("An answer could not be noted.")
        return reply

    return answer


def _is_repeated(facts: Mapping[str, Fact], made: dict[tuple[str, str], int]) -> bool:
    """Return True if a release has left before; ``made`` has the last number of each session."""
    name, number = (str(facts.get("session", "")), str(facts.get("of", ""))), int(facts["release"])
    repeated = number <= made.get(name, 0)
    made[name] = max(number, made.pop(name, 0))  # the last ones last
    while len(made) > _SESSIONS_KNOWN:
        del made[next(iter(made))]
    return repeated


def _entry(message: Message, reply: Message, asked: Mapping[str, Fact]) -> tuple[str, dict[str, Fact]]:
    run: dict[str, Fact] = {"run": message.metadata.run_id}
    if reply.has_error():
        name = protocol.REFUSAL_NAMES.get(reply.error.code)
        # The text of a refusal of murmurfl is fixed, and the server gets it. No other text is repeated.
        why: dict[str, Fact] = {} if name is None else {"why": _shown(reply.error.reason or "", _LONGEST_WHY)}
        return "refused", {**run, **_named(asked), "reason": name or f"error-{reply.error.code}", **why}
    opened = reply.content.config_records.get(protocol.CONFIG, {})
    if protocol.OPENING in opened and protocol.SET_DIGEST in opened and protocol.WOULD_OPEN not in opened:
        return "opened", {**run, **_named(asked), "releases": asked.get("releases", 0)}
    made = reply.content.metric_records.get(protocol.METRICS, {})
    release = made.get(protocol.RELEASE)
    if message.metadata.message_type.split(".")[0] == MessageType.TRAIN and isinstance(release, int):
        samples = made.get(protocol.NUM_EXAMPLES)
        counted: dict[str, Fact] = {"samples": int(samples)} if isinstance(samples, int | float) else {}
        part: dict[str, Fact] = {"of": asked["of"]} if "of" in asked else {}
        return "released", {**run, **_named(asked), **counted, **part, "release": release}
    return "answered", run


def _named(asked: Mapping[str, Fact]) -> dict[str, Fact]:
    return {name: value for name, value in asked.items() if name in ("session", "round")}


def _asked(message: Message) -> dict[str, Fact]:
    """Name and numbers in a request, as far as they are a name and numbers."""
    if message.has_error():
        return {}
    for config in _spoken(message):
        session, number = config.get(protocol.SESSION), config.get(protocol.SERVER_ROUND)
        headers, opening = config.get(protocol.HEADER), config.get(protocol.OPENING)
        of = config.get(protocol.RELEASE_OF)
        if not isinstance(session, str):
            continue
        asked: dict[str, Fact] = {"session": _shown(session, protocol.LONGEST_SESSION_NAME)}
        if isinstance(opening, str) and opening.isascii() and opening.isdigit():
            number = int(opening[:_DIGITS])
        if isinstance(number, int):
            asked["round"] = number
        if isinstance(headers, list):
            asked["releases"] = len(headers)
        if isinstance(of, str) and of in QUERIES:
            asked["of"] = of
        return asked
    return {}


def _spoken(message: Message) -> list[ConfigRecord]:
    """Return records that speak the protocol, which are the only ones that a client reads.

    Another record put first could have a release noted as one of another session, or as a repeated one.
    """
    records = list(message.content.config_records.values())
    spoken = [record for record in records if protocol.VERSION in record]
    first = message.content.config_records.get(protocol.CONFIG)
    return sorted(spoken, key=lambda record: record is not first) or records


def _shown(text: str, longest: int) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:longest])


LONGEST_LINE = 4000
"""Characters of a line's text; the rest is cut."""

SAY_AGAIN_S = 3600.0
"""Seconds after which it is said again that a SuperLink is away."""

_LONGEST_CHAIN = 8
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_JOURNAL = "murmurfl.journal"
_TAKEN_OVER = ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access")
_QUIET = ("httpx", "httpcore", "asyncio")
_PRODUCT, _PACKAGES = f"{Path(__file__).parents[2]}/", ("app/", "clients/", "privacy/", "strategies/")
_SEE_NO_SAMPLE = frozenset({"flwr", "uvicorn", *_QUIET})
"""Other packages whose lines may leave a node: they see what is sent and no sample."""
_OURS_THAT_SEE_NO_SAMPLE = (
    *("app/nodes/", "app/fleet/", "app/commands/", "strategies/"),
    *("clients/messages.py", "clients/sums_helper.py", "clients/nodes/"),
    *("privacy/ledger/", "privacy/sums/", "privacy/release/admission.py"),
)
"""Files of murmurfl likewise. A line of another file needs the mark :data:`~murmurfl.privacy.errors.PUBLIC`, so that
none can be added that leaves unseen."""
# Modules that log what an entry says already.
_SAID_TWICE = frozenset({"messages", "noise_mod"})


def plain(text: str) -> str:
    """Somebody else's text as one line: terminal escapes are dropped, other control characters become spaces."""
    printable = "".join(c if c.isprintable() else " " for c in _ANSI.sub("", text)).strip()
    return printable if len(printable) <= LONGEST_LINE else f"{printable[:LONGEST_LINE]} ..."


def moment(seconds: float, *, milliseconds: bool = False) -> str:
    """Return a time in UTC by ISO 8601, ``2026-11-23T02:09:07Z``, from seconds since 1970."""
    whole, part = divmod(int(seconds * 1000), 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{text}.{part:03}Z" if milliseconds else f"{text}Z"


def _request(facts: Mapping[str, Any]) -> str:
    """Run, session and round of a request, as far as it named them."""
    parts = [f"run {facts['run']}"] if "run" in facts else []
    if "session" in facts:
        parts.append(f"session {json.dumps(facts['session'], ensure_ascii=False)}")
    if "round" in facts:
        parts.append(f"round {facts['round']}")
    return ", ".join(parts)


def _released(facts: Mapping[str, Any]) -> str:
    samples = f", {facts['samples']} samples" if "samples" in facts else ""
    return f"Released: {_request(facts)}, release {facts['release']}{_of(facts)}{samples}."


def _of(facts: Mapping[str, Any]) -> str:
    return f" of its {facts['of']}" if "of" in facts else ""


def _refused(facts: Mapping[str, Any]) -> str:
    return f"Refused: {facts.get('reason')}{_why(facts)}; {_request(facts)}."


def _why(facts: Mapping[str, Any]) -> str:
    return f" ({facts['why']})" if facts.get("why") else ""


def _round(facts: Mapping[str, Any]) -> str:
    ended = f"Round {facts['round']}" if facts["rounds"] == 1 else f"{facts['rounds']} rounds, up to {facts['round']},"
    lacking = ", ".join(f"{facts[name]} {name}" for name in ("refused", "lost", "late", "malformed"))
    run = f" of run {facts['run']}" if "run" in facts else ""
    return (
        f"{ended} of {facts['planned']}{run} ended: {facts['aggregated']} of {facts['asked']} aggregated, {lacking}; "
        f"{facts['seconds']} s."
    )


def _disconnected(facts: Mapping[str, Any]) -> str:
    again = f"; tried again in {facts['retry_s']:.0f} s" if "retry_s" in facts else "; tried again until it is back"
    return f"Disconnected from {facts.get('superlink', 'the SuperLink')}: {facts.get('cause', 'ended')}{again}."


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "unconfigured": lambda facts: f"Every request is refused: {facts.get('reason', '')}.",
    "started": lambda facts: f"Started: {facts.get('kind', 'node')} {json.dumps(facts.get('name', ''))}.",
    "stopped": lambda facts: "Stopped.",  # noqa: ARG005
    "connecting": lambda facts: f"Connecting to {facts.get('superlink', 'the SuperLink')}.",
    "connected": lambda facts: f"Connected to {facts.get('superlink', 'the SuperLink')}.",
    "contact": lambda facts: f"Heard from {facts.get('superlink', 'the SuperLink')}.",
    "turned-away": lambda facts: f"Turned away by {facts.get('superlink', 'the SuperLink')}.",
    "disconnected": _disconnected,
    "released": _released,
    "repeated": lambda facts: f"Sent again, as it was: {_request(facts)}, release {facts.get('release')}{_of(facts)}.",
    "opened": lambda facts: f"Opened a sum: {_request(facts)}, {facts.get('releases')} releases.",
    "answered": lambda facts: f"Answered a question: {_request(facts)}.",
    "refused": _refused,
    "round": _round,
    "run-ended": lambda facts: f"Run {facts['run']} ended: {facts['end']}{_why(facts)}.",
}
_LEVELS = {"refused": logging.WARNING, "disconnected": logging.WARNING, "answered": logging.DEBUG}
_NEVER_SHOWN = frozenset({"contact", "turned-away"})


class Repeated:
    """Whether a cause repeats the last one within an hour; then it need not be said again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: tuple[str, float] | None = None

    def is_repeated(self, cause: str) -> bool:
        """Return True if ``cause`` was said; otherwise it is from now on."""
        now = self._clock()
        if self._said is not None and self._said[0] == cause and now - self._said[1] < SAY_AGAIN_S:
            return True
        self._said = (cause, now)
        return False

    @property
    def any(self) -> bool:
        return self._said is not None

    def forget(self) -> None:
        """Say whatever comes next."""
        self._said = None


class EntryWriter:
    """Listener that writes entries to the log (:meth:`~.journal.Journal.listen`).

    A line is a change. While one cause keeps a node from its SuperLink, only a verbose log has each try; others have
    one an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._away = Repeated(clock)

    def __call__(self, entry: Entry) -> None:
        if entry.kind in _NEVER_SHOWN:
            return
        level = logging.DEBUG if self._is_usual(entry) else _LEVELS.get(entry.kind, logging.INFO)
        if entry.kind == "run-ended" and entry.facts.get("end") != "completed":
            level = logging.WARNING
        sentence = _SENTENCES[entry.kind](entry.facts)
        logging.getLogger(_JOURNAL).log(level, "%s", sentence, extra={"entry": entry})

    def _is_usual(self, entry: Entry) -> bool:
        """Return True if an entry repeats the last one of its kind."""
        if entry.kind == "connected":
            self._away.forget()
        if entry.kind == "connecting":
            return self._away.any
        return entry.kind == "disconnected" and self._away.is_repeated(str(entry.facts.get("cause", "")))


@dataclass(frozen=True)
class LogSettings:
    """Settings of a node's log."""

    as_json: bool = False  # one JSON object a line
    # Also what is of no interest while all is well: every line of Flower's, every question that was answered
    verbose: bool = False
    details: bool = False  # also what may depend on the client's data. Such a log must not leave the client.
    sees_samples: bool = True  # whether the process has samples of anybody: then only known parts of it may speak


def start_log(settings: LogSettings, stream: IO[str] | None = None) -> None:
    """Write what this process logs as a node's log, to standard error by default, and in no other form.

    Without ``details``, neither the text nor the presence of a line depends on the client's data: where the process
    has samples, only parts of murmurfl and of Flower that see none are heard, and lines that are marked as public. What
    a project's own code logs is left out; what it prints is its own affair. Number and times of lines show requests,
    which the server made.
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
    on_screen, written = _Shown(settings), _Lines(settings)

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if on_screen.filter(record):
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
    if line := plain(text):
        logging.getLogger("flwr").log(level, "%s", line, extra={"event": "flower"})


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignore a log that cannot be written, because of a full disk for example."""


class _Shown(logging.Filter):
    """Filter of a node's log."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._settings.details and (getattr(record, "of_data", False) or not self._may_leave(record)):
            return False
        if self._settings.verbose or record.levelno >= logging.WARNING:
            return True
        if getattr(record, "event", "") == "flower" or {record.module, record.name.rpartition(".")[2]} & _SAID_TWICE:
            return False
        return record.levelno >= logging.INFO

    def _may_leave(self, record: logging.LogRecord) -> bool:
        """Return True if who wrote a line saw no sample, or marked the line as one that depends on none."""
        if record.name == "py.warnings":
            return False
        if not self._settings.sees_samples or getattr(record, "public", False):
            return True
        place = record.pathname.removeprefix(_PRODUCT)
        # By the file, for some of ours, and most projects, speak through Flower's logger.
        if place.startswith(_PACKAGES):
            return place.startswith(_OURS_THAT_SEE_NO_SAMPLE)
        package = record.name.partition(".")[0]
        return package in _SEE_NO_SAMPLE and record.pathname.startswith(_folders(package))


@lru_cache
def _folders(package: str) -> tuple[str, ...]:
    """Return the folder of an installed package, with a slash; none for another."""
    found = importlib.util.find_spec(package)
    return (f"{Path(found.origin).parent}/",) if found is not None and found.origin else ()


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
        """Return what failed and where; with its text only if it is murmurfl's own or details are asked for."""
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return plain(", because of ".join(self._told(error) for error in _chain(record.exc_info[1])))

    def _told(self, error: BaseException) -> str:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
        has_text = (
            isinstance(error, MurmurflError) and not isinstance(error, InvalidRecordError)
        ) or self._settings.details
        return f"{type(error).__name__}{f': {error}' if has_text else ''} at {' > '.join(places) or 'no place'}"


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
