"""Health and metrics of a node, a helper or a server, and the addresses where an operator has them shown.

A health address answers 200 and ``{"status": "ok"}``, or 503 and one of a few fixed reasons. It names no machine, run
or file.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from ....privacy import LedgerError, read_ledger
from ....privacy.ledger.ledger_file import BudgetLeft, budget_left
from ..connections.certificate import expiries
from .endpoint import HELPER, Address, Answer, Endpoint, Shown, Value
from .journal import Entry, Journal

logger = logging.getLogger(__name__)

STARTING = "starting"
CONNECTING = "connecting"
DISCONNECTED = "disconnected"
NO_ANSWER = "supernode-does-not-answer"
NOT_HEARD = "superlink-not-heard"
STOPPED = "stopped"
NOT_RUNNING = "superlink-not-running"
NOT_LISTENING = "superlink-does-not-listen"

REASONS = (STARTING, CONNECTING, DISCONNECTED, NO_ANSWER, NOT_HEARD, STOPPED, NOT_RUNNING, NOT_LISTENING)
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
    """The answer of a health address.

    Parameters
    ----------
    kind : {"node", "helper", "server"}
    problem : str
        One of :data:`REASONS`; empty if all is well.
    """
    said = {"status": "failed" if problem else "ok", "kind": kind, **({"reason": problem} if problem else {})}
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return Answer(json.dumps(said).encode() + b"\n", "application/json", status)


class NodeHealth:
    """Health of a node or a helper, by its journal.

    Parameters
    ----------
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._problem = STARTING
        self._since = self._heard = clock()
        journal.listen(self._hear)

    @property
    def connected(self) -> bool:
        return not self._problem

    @property
    def problem(self) -> str:
        """What is wrong, one of :data:`REASONS`; empty if nothing is."""
        if self._problem:
            return self._problem
        now = self._clock()
        if now - max(self._since, self._journal.reached_at) > SILENT_S:
            return NO_ANSWER
        return NOT_HEARD if now - self._heard > UNHEARD_S else ""

    def _hear(self, entry: Entry) -> None:
        problem = _AFTER.get(entry.kind, self._problem)
        self._heard = self._clock()
        if self._problem != problem:
            self._problem, self._since = problem, self._heard


_LOOK_EVERY_S = 5.0


class NodeFigures:
    """Metrics of a node or a helper, by its journal.

    Parameters
    ----------
    budget : callable, optional
        Returns what is left; None if unknown.
    expiry : float, optional
        When the first certificate expires, in seconds since 1970.

    Notes
    -----
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
        """The current metrics by name."""
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
            "murmurfl_budget_mu": left.budget_mu,
            "murmurfl_budget_left_mu": left.left_mu,
            "murmurfl_budget_left_epsilon": left.left_epsilon,
            "murmurfl_budget_local_left_mu": left.left_local_mu,
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
        """What is left, at most a few seconds old; None if the ledger or its mark cannot be read. ``now`` is monotonic
        seconds.
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
    """Where health and metrics are shown, as typed; empty for nowhere. Both may be one address."""

    health: str = ""
    metrics: str = ""

    def __bool__(self) -> bool:
        return bool(self.health or self.metrics)


@contextmanager
def shown(
    addresses: Addresses, health: Callable[[], Answer], metrics: Callable[[], bytes]
) -> Iterator[Mapping[str, Address]]:
    """Answer at the addresses until the block ends.

    An address typed without a host is this computer's own.

    Parameters
    ----------
    metrics : callable
        Returns all metrics in Prometheus' text format.

    Raises
    ------
    ConfigurationError
        If an address is malformed or cannot be listened at.
    """
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

    Parameters
    ----------
    ledger : Path, optional
        A node's.
    certificates : Path, optional
        PEM file that the SuperLink's certificate is checked against.

    Raises
    ------
    ConfigurationError
        As :func:`shown`.

    Notes
    -----
    Shows counts of answers and refusals, times of requests and what is left of budgets; nothing that depends on data.
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
