"""The high-water mark: how far a ledger had come, kept outside the file that is backed up.

A ledger that was copied back from a backup looks like an honest one; only something that was not copied back can show
the difference. The mark is a small file beside the ledger, or better on another disk: after every commit, before the
reply leaves, it takes on the ledger's state. A ledger behind its mark has been rolled back, and the mark says what must
be counted as spent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..accounting.gdp import compose_gdp, gdp_epsilon
from ..errors import ANOTHER_FORMAT, LedgerError
from ..files import check_private, replace_durably
from .ledger_records import left_of

_FORMAT = 1


@dataclass(frozen=True)
class SessionState:
    """How far one session has come."""

    mu: float
    """Reserved, with a minus sign under a trusted server (:class:`~murmurfl.privacy.Account`)."""
    releases: int
    digest: str = ""
    """Digest of the session's whole stream; empty if it has none."""
    local: float | None = None
    """mu_local, reserved under secure aggregation; None otherwise."""

    @property
    def reserved_local(self) -> float:
        """The mu reserved for the case that nobody else is honest."""
        return abs(self.mu) if self.local is None else self.local


@dataclass(frozen=True)
class LedgerState:
    """How far a ledger has come."""

    ledger: str
    """The ledger's own random name."""
    budget_mu: float
    delta: float
    counter: int = 0
    """Commits so far."""
    samples_used: int = 0
    sessions: Mapping[str, SessionState] = field(default_factory=dict)
    data: str = ""
    """Digest of the samples used up; empty in a ledger that never had one."""
    budget_local_mu: float | None = None
    """None until the operator has decided it."""
    key: str = ""
    """Check value of the noise key, once it was exchanged; empty in a ledger with its first key."""

    @cached_property
    def seal(self) -> str:
        """A digest of the whole state: it does not match if a part was lost or comes from another time."""
        document = self._document()
        if not self.data:
            del document["data"]  # what is not there is not sealed
        return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()

    def write_mark(self, path: Path) -> None:
        """Make this the mark, durably."""
        document = {"murmurfl-ledger-mark": _FORMAT, "seal": self.seal, **self._document()}
        replace_durably(path, json.dumps(document, indent=1).encode() + b"\n")

    def _document(self) -> dict[str, Any]:
        document = asdict(self)
        if not self.key:
            del document["key"]
        for values in (document, *document["sessions"].values()):
            for name in ("local", "budget_local_mu"):
                if name in values and values[name] is None:
                    del values[name]
        return document


def read_mark(path: Path) -> LedgerState:
    """Read the mark at ``path``; refuse one that is missing, damaged, of another format or open to others."""
    check_private(
        path,
        "the ledger's high-water mark",
        missing="Without it nobody can tell whether the ledger was copied back, so nothing is released. Put the mark "
        "back; if it is lost, and this ledger was never copied back, `murmurfl ledger new-mark` makes another.",
    )
    try:
        document = json.loads(path.read_text())
        if (version := document.pop("murmurfl-ledger-mark")) != _FORMAT:
            raise LedgerError(
                f"Expected a high-water mark of format {_FORMAT} at {path}, got one of format {version!r}; it was left "
                f"alone, and nothing was released. {ANOTHER_FORMAT}"
            )
        seal = document.pop("seal")
        sessions = {name: SessionState(**values) for name, values in document.pop("sessions").items()}
        state = LedgerState(**document, sessions=sessions)
        if state.seal != seal:
            raise ValueError("the seal does not match")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerError(
            f"Expected the ledger's high-water mark at {path}, got a file that is damaged or something else ({error}). "
            "Nothing was released. If the mark is lost, and this ledger was never copied back, remove the file; "
            "`murmurfl ledger new-mark` makes another."
        ) from error
    return state


@dataclass(frozen=True)
class BudgetLeft:
    """A ledger's budget and what new sessions may still reserve of it."""

    budget_mu: float
    left_mu: float
    left_epsilon: float
    """Epsilon of ``left_mu`` at the ledger's delta."""
    left_local_mu: float
    """What is left of the budget that holds whatever other machines and helpers do."""
    sessions: int


def budget_left(mark: Path) -> BudgetLeft:
    """Read from a high-water mark what its ledger's budget leaves: nothing is locked, the ledger is not touched.

    Notes
    -----
    What it returns does not depend on the machine's data: budgets, and what sessions reserved when they were opened.
    Between a commit and its mark it is what was left before; the ledger alone decides what is released.
    """
    state = read_mark(mark)
    sessions = state.sessions.values()
    budget_local_mu = state.budget_mu if state.budget_local_mu is None else state.budget_local_mu
    left = left_of(state.budget_mu, compose_gdp(abs(session.mu) for session in sessions))
    local = left_of(budget_local_mu, compose_gdp(session.reserved_local for session in sessions))
    return BudgetLeft(state.budget_mu, left, gdp_epsilon(left, state.delta), local, len(sessions))
