"""The figures of a node and of a helper: counted from its journal, its budget read from its ledger's mark."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ....privacy import LedgerError, read_ledger
from ....privacy.ledger.mark import BudgetLeft, budget_left
from .endpoint import HELPER, Value
from .health import NodeHealth
from .journal import Entry, Journal

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_COUNTED = {"released": "murmurfl_releases_total", "repeated": "murmurfl_repeated_total"}


class NodeFigures:
    """What a node or a helper shows of itself.

    Parameters
    ----------
    kind : {"node", "helper"}
    journal : Journal
        Told from now on.
    health : NodeHealth
    budget : callable, optional
        What is left; None where that is not known.
    expiry : float, optional
        When the first certificate expires, in seconds since 1970.

    Notes
    -----
    Counts answers by their kind and refusals by their reason, and says when requests came, in whole seconds: what the
    server sees anyway, and no more. How long an answer took is not among it; but a request that waits for the answer to
    another comes when that one is made, and a count grows then. Timing is not protected.
    """

    def __init__(
        self,
        kind: str,
        journal: Journal,
        health: NodeHealth,
        budget: Callable[[], BudgetLeft | None] | None = None,
        expiry: float | None = None,
    ) -> None:
        self._kind = kind
        self._journal = journal
        self._health = health
        self._budget = budget
        self._expiry = expiry
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
        """The figures by name, as they are now."""
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
            values |= {name: self._counts[kind] for kind, name in _COUNTED.items()}
        return values | self._left()

    def _left(self) -> dict[str, Value]:
        left = None if self._budget is None else self._budget()
        if left is None:
            return {"murmurfl_ledger_readable": 0.0}
        return {
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
        """Take note of a request: by when it came, not by when it was answered."""
        came = _whole(self._journal.asked_at)
        self._contact = came
        number = entry.facts.get("session"), entry.facts.get("round")
        if None in number or number == self._round:
            return
        if self._round is not None and self._asked is not None and number[0] == self._round[0]:
            self._seconds = max(came - self._asked, 0.0)  # of one run: nights in between are no round
        self._round, self._asked = number, came
        self._counts["rounds"] += 1


class BudgetWatch:
    """What is left on a ledger, read again when its mark has changed.

    Parameters
    ----------
    ledger : Path
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._mark: Path | None = None
        self._seen: tuple[int, int, int] | None = None
        self._left: BudgetLeft | None = None
        self._looked = -_LOOK_EVERY_S
        self._said = ""

    def left(self, now: float) -> BudgetLeft | None:
        """What is left, a few seconds old at most; None where the ledger or its mark cannot be read.

        Parameters
        ----------
        now : float
            Seconds that only ever grow.
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
