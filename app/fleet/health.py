"""Health and metrics of a node, a helper or a server, and the addresses where an operator has them shown.

A health address answers 200 and ``{"status": "ok"}``, or 503 and one of a few fixed reasons. It names no client, run
or file. No metric depends on data: only :data:`FIGURES` can be shown, and a label takes listed values only. No message,
run name or error text becomes part of a metric.

Python's own web server gives each connection a thread for as long as the other side likes. Anybody may reach an
address, so here one thread answers all, a connection has a few seconds and a few kilobytes, and a new one displaces the
oldest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...privacy import protocol
from ...privacy.errors import ConfigurationError, LedgerError
from ...privacy.ledger.ledger_file import BudgetLeft, budget_left
from ...privacy.ledger.ledger_history import read_ledger
from ..nodes import diagnosis as causes
from ..nodes.connection import expiries
from ..nodes.journal import Entry, Journal
from ..version import __version__

logger = logging.getLogger(__name__)


MOST_CONNECTIONS = 32
LONGEST_REQUEST = 8192
DEADLINE_S = 5.0
_STARTED_WITHIN_S = 10.0
_WAITING = 128
_LEFT_OVER = 16
_PAUSE_S = 0.5
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Address:
    """A host and a port to listen at."""

    host: str
    port: int  # 0 for any free one

    @classmethod
    def read(cls, text: str) -> Address:
        """Read HOST:PORT, or PORT alone for this computer only."""
        host, _, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        whole = not host or text.strip().startswith("[") or ":" not in host
        if not (whole and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"Expected an address as HOST:PORT, such as 127.0.0.1:9464, or a PORT of this computer, got {text!r}.",
                kind="malformed",
                setting="address",
            )
        return cls(host or "127.0.0.1", int(port))

    @property
    def is_local(self) -> bool:
        """Whether only programs of this computer reach it."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """The response of one path."""

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


class Endpoint:
    """A web server at one address; it listens from ``start`` to ``close``, or within a ``with`` block.

    ``paths`` make their answers from what is in memory. Only the method and the path of a request are read; an unlisted
    path gets a fixed answer, so only what ``paths`` return leaves. No request changes anything. Without password or
    encryption, whoever reaches the address can read it.
    """

    def __init__(self, address: Address, paths: Mapping[str, Callable[[], Answer]]) -> None:
        self.address = address
        self._paths = dict(paths)
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="murmurfl-endpoint")
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._ending: asyncio.Event | None = None

    def start(self) -> None:
        self._thread.start()
        self._started.wait(_STARTED_WITHIN_S)
        if self._failure is not None:
            raise ConfigurationError(
                f"Expected to listen at {self.address}, got: {self._failure.strerror or self._failure}. Choose another "
                "address, or end what listens there.",
                kind="failed",
            )

    def close(self) -> None:
        """Stop listening and cut open connections."""
        if self._ending is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_STARTED_WITHIN_S)

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except Exception:  # a thread of its own, whose end nobody else would see
            logger.exception("The address %s answers no more.", self.address)
        finally:
            self._started.set()
            self._loop.close()

    async def _listen(self) -> None:
        self._ending = asyncio.Event()
        host, port = self.address.host, self.address.port
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listening = socket.create_server(place[:2], family=family, backlog=_WAITING)
        except OSError as error:
            self._failure = error
            return
        with listening:
            listening.setblocking(False)
            self.address = Address(self.address.host, listening.getsockname()[1])
            self._started.set()
            accepting = self._loop.create_task(self._accept(listening))
            await self._ending.wait()
            tasks = [accepting, *self._open]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except OSError:  # the other side left, or the system has no more files
                await asyncio.sleep(_PAUSE_S)
                continue
            while len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(lambda ended: self._open.pop(ended, None))

    async def _answer(self, connection: socket.socket) -> None:
        # The other side may ask for too much, too slowly, or leave.
        with connection, suppress(OSError, TimeoutError):
            connection.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                head = b""
                while _END_OF_HEAD not in head:
                    piece = await self._loop.sock_recv(connection, LONGEST_REQUEST)
                    head += piece
                    if not piece or len(head) > LONGEST_REQUEST:
                        return
                await self._loop.sock_sendall(connection, self._response(head))
                connection.shutdown(socket.SHUT_WR)
            # Read and forget the rest: a connection closed with unread bytes may lose the answer.
            async with asyncio.timeout(_PAUSE_S):
                for _ in range(_LEFT_OVER):
                    if not await self._loop.sock_recv(connection, LONGEST_REQUEST):
                        return

    def _response(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        method, path = (words[0], words[1].split(b"?", 1)[0]) if len(words) == 3 else (b"", b"")
        make = self._paths.get(path.decode("latin-1"))
        allowed = b""
        if not words[-1].startswith(b"HTTP/") or not method:
            answer = _fixed(HTTPStatus.BAD_REQUEST)
        elif method not in (b"GET", b"HEAD"):
            answer, allowed = _fixed(HTTPStatus.METHOD_NOT_ALLOWED), b"Allow: GET, HEAD\r\n"
        elif make is None:
            answer = _fixed(HTTPStatus.NOT_FOUND)
        else:
            try:
                answer = make()
            except Exception:  # one page that fails must not end the others
                logger.exception("What is shown at %s could not be made.", self.address)
                answer = _fixed(HTTPStatus.INTERNAL_SERVER_ERROR)
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.content)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        )
        first = "".join(f"{line}\r\n" for line in lines).encode("ascii") + allowed + b"\r\n"
        return first if method == b"HEAD" else first + answer.content


def _fixed(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n".encode("ascii"), status=status)


NODE, HELPER, SERVER = "node", "helper", "server"
OTHER = "other"
"""Label value for everything that is not listed."""
REASONS = (*protocol.REFUSAL_NAMES.values(), OTHER)
"""Reasons of refusals: the protocol's own names."""
ENDS = ("completed", "failed", "stopped", "killed", OTHER)
"""Ends of a run: its process ended, with or without an error; its owner stopped it; or it was no longer heard of."""
CAUSES = (*(cause for cause in causes.CAUSES if cause != "reached"), OTHER)
"""Causes of a lost or impossible connection."""

Value = float | Mapping[str, float] | None
"""A number; with a label, a number for each of its values; None if unknown."""


@dataclass(frozen=True)
class Figure:
    """One metric."""

    name: str
    shown_by: tuple[str, ...]  # of ``node``, ``helper``, ``server``
    meaning: str  # one line
    label: str = ""  # the only label, or none
    values: tuple[str, ...] = ()  # of the label

    @property
    def counts(self) -> bool:
        """Whether it is a counter, which only grows until the process restarts."""
        return self.name.endswith("_total")


_NODES, _ALL = (NODE, HELPER), (NODE, HELPER, SERVER)

BUILD = "murmurfl_build_info"
BUILD_LABELS = ("kind", "version", "flower", "python")

FIGURES: tuple[Figure, ...] = (
    Figure("murmurfl_started_timestamp_seconds", _ALL, "When this process was started."),
    Figure("murmurfl_healthy", _ALL, "1 while the health address answers 200, otherwise 0."),
    Figure("murmurfl_last_contact_timestamp_seconds", _ALL, "When the other side was last heard: a request, a round."),
    Figure("murmurfl_rounds_total", _ALL, "Rounds: of a node those it was asked in, of a server those that ended."),
    Figure("murmurfl_round_seconds", _ALL, "Between the last two rounds, in whole seconds."),
    Figure("murmurfl_refusals_total", _ALL, "Requests that were refused, by reason.", "reason", REASONS),
    Figure("murmurfl_certificate_expiry_timestamp_seconds", _ALL, "When the first certificate in the file expires."),
    Figure("murmurfl_connected", _NODES, "1 while the SuperLink is reached, otherwise 0."),
    Figure("murmurfl_disconnections_total", _NODES, "Ends of the connection, by cause.", "cause", CAUSES),
    Figure("murmurfl_releases_total", (NODE, SERVER), "Releases: of a node those made, of a server those aggregated."),
    Figure("murmurfl_repeated_total", (NODE,), "Releases that were sent once more, because they were asked for again."),
    Figure("murmurfl_budget_mu", (NODE,), "The ledger's budget of all runs, as a Gaussian-DP mu."),
    Figure("murmurfl_budget_left_mu", (NODE,), "What new runs may still reserve of it."),
    Figure("murmurfl_budget_left_epsilon", (NODE,), "The same as an epsilon, at the ledger's delta."),
    Figure("murmurfl_budget_local_left_mu", (NODE,), "The same of what holds whatever other clients and helpers do."),
    Figure("murmurfl_sessions", (NODE,), "Sessions on the ledger: runs of training that reserved something."),
    Figure("murmurfl_ledger_readable", (NODE,), "1 if the ledger's high-water mark can be read and believed, else 0."),
    Figure("murmurfl_openings_total", (HELPER,), "Sums of releases that were opened."),
    Figure("murmurfl_runs_total", (SERVER,), "Runs that have ended, by how.", "end", ENDS),
    Figure("murmurfl_superlink_running", (SERVER,), "1 while Flower's SuperLink runs, otherwise 0."),
    Figure("murmurfl_superlink_restarts_total", (SERVER,), "How often it ended and was started again."),
    Figure("murmurfl_round", (SERVER,), "The number of the round that ended last."),
    Figure("murmurfl_rounds_planned", (SERVER,), "How many rounds its run is to have."),
    Figure("murmurfl_asked_total", (SERVER,), "Requests for releases."),
    Figure("murmurfl_lost_total", (SERVER,), "Of them, those that were not answered in time."),
    Figure(
        "murmurfl_late_total", (SERVER,), "Answers that came too late to count; a later release has what is in them."
    ),
    Figure("murmurfl_malformed_total", (SERVER,), "Answers that could not be read."),
    Figure(
        "murmurfl_unopened_total",
        (SERVER,),
        "Answers in rounds that stayed closed; later releases have what is in them.",
    ),
    Figure("murmurfl_closed_rounds_total", (SERVER,), "Rounds of secure aggregation in which no sum was opened."),
)
"""All metrics but :data:`BUILD`, which states the software's versions."""

_BY_NAME = {figure.name: figure for figure in FIGURES}


def figures_of(kind: str) -> list[Figure]:
    """Return the metrics of a node, a helper or a server."""
    return [figure for figure in FIGURES if kind in figure.shown_by]


class Shown(Collector):
    """Collector for Prometheus' client library, with a registry of its own, of what ``read`` returns by name.

    Shows the metrics of :data:`FIGURES` only, with labels from closed lists. They depend on a client's data only if
    what ``read`` returns does.
    """

    def __init__(self, kind: str, read: Callable[[], Mapping[str, Value]]) -> None:
        self._kind = kind
        self._read = read
        self._about = [kind, __version__, version("flwr"), platform.python_version()]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return no descriptors: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        about = GaugeMetricFamily(BUILD, "Which software this is.", labels=BUILD_LABELS)
        about.add_metric(self._about, 1)
        yield about
        values = self._read()
        allowed = {figure.name for figure in figures_of(self._kind)}
        if unknown := sorted(values.keys() - allowed):
            raise ConfigurationError(
                f"Expected figures of a {self._kind}, got {', '.join(unknown)}.", kind="unknown-name"
            )
        for name, value in values.items():
            if value is not None:
                yield _family(_BY_NAME[name], value)


def _family(figure: Figure, value: float | Mapping[str, float]) -> Metric:
    make = CounterMetricFamily if figure.counts else GaugeMetricFamily
    family = make(figure.name, figure.meaning, labels=[figure.label] if figure.label else [])
    if isinstance(value, Mapping):
        counted = dict.fromkeys(figure.values, 0.0)
        for key, number in value.items():
            counted[key if key in counted else OTHER] += number
        for key, number in counted.items():
            family.add_metric([key], number)
    else:
        family.add_metric([], value)
    return family


NOT_CONFIGURED = "not-configured"
STARTING = "starting"
CONNECTING = "connecting"
DISCONNECTED = "disconnected"
NO_ANSWER = "supernode-does-not-answer"
NOT_HEARD = "superlink-not-heard"
STOPPED = "stopped"
NOT_RUNNING = "superlink-not-running"
NOT_LISTENING = "superlink-does-not-listen"

PROBLEMS = (
    NOT_CONFIGURED,
    STARTING,
    CONNECTING,
    DISCONNECTED,
    NO_ANSWER,
    NOT_HEARD,
    STOPPED,
    NOT_RUNNING,
    NOT_LISTENING,
)
"""Every problem that a health address may report."""

_AFTER = {
    "started": STARTING,
    "connecting": CONNECTING,
    "turned-away": CONNECTING,
    "connected": "",
    "contact": "",
    "disconnected": DISCONNECTED,
    "stopped": STOPPED,
}

SILENT_S = 60.0
"""Seconds for which a SuperNode's process may leave its executor without an answer; the executor asks ten times a
second.
"""
UNHEARD_S = 120.0
"""Seconds for which a SuperLink may leave its SuperNode without an answer; it is called at least every half minute."""


def health_answer(kind: str, problem: str) -> Answer:
    """Return the answer of a health address; ``problem`` is one of :data:`PROBLEMS`, empty if all is well."""
    document = {"status": "failed" if problem else "ok", "kind": kind, **({"reason": problem} if problem else {})}
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return Answer(json.dumps(document).encode() + b"\n", "application/json", status)


class NodeHealth:
    """Health of a node or a helper, by its journal."""

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._problem = STARTING
        self._unconfigured = False
        self._since = self._heard = clock()
        journal.listen(self._hear)

    @property
    def connected(self) -> bool:
        return not self._problem

    @property
    def problem(self) -> str:
        """Current problem, one of :data:`PROBLEMS`; empty if there is none."""
        if self._problem:
            return self._problem
        if self._unconfigured:
            return NOT_CONFIGURED
        now = self._clock()
        if now - max(self._since, self._journal.reached_at) > SILENT_S:
            return NO_ANSWER
        return NOT_HEARD if now - self._heard > UNHEARD_S else ""

    def _hear(self, entry: Entry) -> None:
        self._unconfigured = self._unconfigured or entry.kind == "unconfigured"
        problem = _AFTER.get(entry.kind, self._problem)
        self._heard = self._clock()
        if self._problem != problem:
            self._problem, self._since = problem, self._heard


_LOOK_EVERY_S = 5.0


class NodeFigures:
    """Metrics of a node or a helper, by its journal; ``budget`` returns what is left, None if unknown.

    Counts answers by kind and refusals by reason, and gives the times of requests in whole seconds: what the server
    sees anyway. It does not give the duration of an answer; but a request that waits for the answer to another arrives
    when that one is made, and a count grows then. Timing is not protected.
    """

    def __init__(
        self,
        kind: str,
        journal: Journal,
        health: NodeHealth,
        budget: Callable[[], BudgetLeft | None] | None = None,
        expiry: float | None = None,
    ) -> None:
        self._kind, self._journal, self._health, self._budget, self._expiry = kind, journal, health, budget, expiry
        self._lock = threading.Lock()
        self._started: float | None = None
        self._contact: float | None = None
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._round: tuple[object, object] | None = None
        self._asked: float | None = None
        self._seconds: float | None = None
        journal.listen(self._hear)

    def read(self) -> dict[str, Value]:
        """Return the current metrics by name."""
        with self._lock:
            values: dict[str, Value] = {
                "murmurfl_started_timestamp_seconds": self._started,
                "murmurfl_healthy": float(not self._health.problem),
                "murmurfl_connected": float(self._health.connected),
                "murmurfl_last_contact_timestamp_seconds": self._contact,
                "murmurfl_disconnections_total": dict(self._causes),
                "murmurfl_refusals_total": dict(self._refusals),
                "murmurfl_rounds_total": self._counts["rounds"],
                "murmurfl_round_seconds": self._seconds,
                "murmurfl_certificate_expiry_timestamp_seconds": self._expiry,
            }
            if self._kind == HELPER:
                return values | {"murmurfl_openings_total": self._counts["opened"]}
            values["murmurfl_releases_total"] = self._counts["released"]
            values["murmurfl_repeated_total"] = self._counts["repeated"]
        left = None if self._budget is None else self._budget()
        if left is None:
            return values | {"murmurfl_ledger_readable": 0.0}
        return values | {
            "murmurfl_ledger_readable": 1.0,
            "murmurfl_budget_mu": left.budget.mu,
            "murmurfl_budget_left_mu": left.left.mu,
            "murmurfl_budget_left_epsilon": left.left.assumed.epsilon(left.delta),
            "murmurfl_budget_local_left_mu": left.left.worst_case.mu,
            "murmurfl_sessions": left.sessions,
        }

    def _hear(self, entry: Entry) -> None:
        with self._lock:
            self._counts[entry.kind] += 1
            if entry.kind == "started":
                self._started = _whole(entry.at)
            elif entry.kind in ("connected", "contact"):
                self._contact = _whole(entry.at)
            elif entry.kind == "disconnected":
                self._causes[str(entry.facts.get("cause", ""))] += 1
            elif entry.kind in ("released", "repeated", "opened", "answered", "refused"):
                if entry.kind == "refused":
                    self._refusals[str(entry.facts.get("reason", ""))] += 1
                self._asked_for(entry)

    def _asked_for(self, entry: Entry) -> None:
        """Note a request, by the time it arrived and not by when it was answered."""
        came = _whole(self._journal.asked_at)
        self._contact = came
        number = entry.facts.get("session"), entry.facts.get("round")
        if None in number or number == self._round:
            return
        if self._round is not None and self._asked is not None and number[0] == self._round[0]:
            self._seconds = max(came - self._asked, 0.0)  # within one run: a night between runs is no round
        self._round, self._asked = number, came
        self._counts["rounds"] += 1


class BudgetWatch:
    """Reads what is left on a ledger, again whenever its mark has changed."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._mark: Path | None = None
        self._seen: tuple[int, int, int] | None = None
        self._left: BudgetLeft | None = None
        self._looked = -_LOOK_EVERY_S
        self._said = ""

    def left(self, now: float) -> BudgetLeft | None:
        """Return what is left, at most a few seconds old; None if the ledger or its mark cannot be read.

        ``now`` is in monotonic seconds.
        """
        if now - self._looked < _LOOK_EVERY_S:
            return self._left
        self._looked = now
        try:
            if self._mark is None:
                self._mark = Path(read_ledger(self._ledger).mark)
            status = self._mark.stat()
            seen = status.st_ino, status.st_size, status.st_mtime_ns
            if seen != self._seen:
                self._left, self._seen, self._said = budget_left(self._mark), seen, ""
        except (LedgerError, OSError) as error:
            self._left = self._seen = None
            if str(error) != self._said:
                logger.warning("What is left of the budget cannot be shown: %s", error)
            self._said = str(error)
        return self._left


def _whole(seconds: float) -> float:
    return float(int(seconds))


HEALTH_PATH, METRICS_PATH = "/health", "/metrics"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Addresses:
    """Addresses at which health and metrics are shown, as typed; empty for none. Both may be one address."""

    health: str = ""
    metrics: str = ""

    def __bool__(self) -> bool:
        return bool(self.health or self.metrics)


@contextmanager
def shown(
    addresses: Addresses, health: Callable[[], Answer], metrics: Callable[[], bytes]
) -> Iterator[Mapping[str, Address]]:
    """Answer at the addresses until the block ends; one typed without a host is this computer's own."""
    paths: dict[Address, dict[str, Callable[[], Answer]]] = {}
    if addresses.health:
        paths.setdefault(Address.read(addresses.health), {})[HEALTH_PATH] = health
    if addresses.metrics:
        own = paths.setdefault(Address.read(addresses.metrics), {})
        own[METRICS_PATH] = kept_a_while(lambda: Answer(metrics(), METRICS_TYPE))
    listening: dict[str, Address] = {}
    with ExitStack() as stack:
        for address, answers in paths.items():
            stack.enter_context(Endpoint(address, answers))
            for path in answers:
                listening[path] = address
                logger.info("Shown at http://%s%s.", address, path)
            if not address.is_local:
                logger.warning(
                    "Whoever reaches %s can read it: there is no password. Keep it within your own network.", address
                )
        yield listening


def kept_a_while(
    make: Callable[[], Answer], seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> Callable[[], Answer]:
    """Return a callable that makes its answer at most once in ``seconds``, so that endless questions cost no work."""
    kept: list[tuple[float, Answer]] = []

    def answer() -> Answer:
        now = clock()
        if not kept or now - kept[0][0] >= seconds:
            kept[:] = [(now, make())]
        return kept[0][1]

    return answer


@contextmanager
def watched(
    kind: str, journal: Journal, addresses: Addresses, ledger: Path | None = None, certificates: Path | None = None
) -> Iterator[None]:
    """Show a node or a helper until the block ends; does nothing without an address.

    Shows counts of answers and refusals, times of requests and what is left of budgets, by a node's ``ledger``; nothing
    that depends on data. ``certificates`` is the PEM file that the SuperLink's certificate is checked against.
    """
    if not addresses:
        yield
        return
    health = NodeHealth(journal)
    watch = None if ledger is None else BudgetWatch(ledger)
    budget = None if watch is None else lambda: watch.left(time.monotonic())
    figures = NodeFigures(kind, journal, health, budget, min(expiries(certificates), default=None))
    text = Shown(kind, figures.read).text
    with shown(addresses, lambda: health_answer(kind, health.problem), text):
        yield
