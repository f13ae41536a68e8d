"""A ledger's contents for its operator, and what its releases guarantee together, one line each.

Nothing is altered by reading. For an operator who asks what happened last night. A line's ``mu_so_far`` is of the
releases in it and above it:

    mu_so_far^2 = sum over the sessions s of (Delta_s S_s(k_s) / noise_std_s)^2 + mu_n^2

with k_s the releases of s up to the line and S_s(k) the norm of the mechanism's C for the rows drawn up to release k
and the samples' pattern. It is never too small:

* Fix the numbers k_s beforehand. What a server sees of the first k_s releases of each session is made from these rows,
  and on every path of its choices they move by at most that sum of squares, whatever it acknowledges and however it
  mixes sessions (docs/proofs/release-rule.md, steps 2, 5, 6 and 7 with the cap k_s in place of K).
* mu_n, what the normals' resolution tells, is charged whole to a session's first release.
* Under secure aggregation the clients of a sum may have made all of their releases: S is that of
  :meth:`~murmurfl.privacy.accounting.noise_plan.Summing.sensitivity` for the first k_s of this one.
* Where any of it cannot be known, the session counts whole: what was closed, what a trusted server answers for, noise
  of another version, and terms that do not give again the mu that was reserved. If its first line is not known either,
  it counts in every line.
* Clocks go wrong. Lines stand in an order in which a session's releases rise and samples are only used up, and each
  figure is of all the lines above it, in whatever order they came about.

"Beforehand" matters: for a line that was chosen by what the releases said, such as the one at which a server has
stopped, ``mu_reserved`` holds, in which every session that was opened counts whole (step 8 there).
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..accounting.loss import NO_LOSS, Loss, SumAssumption, total_loss, weakest_loss
from ..accounting.noise_plan import NoisePlan
from ..errors import LedgerError, MurmurflError
from ..noise import NOISE_VERSION
from ..release.policy import PrivacyPolicy, read_fields
from ..release.shuffled_privatizer import ShuffledPolicy
from .ledger_file import CLOSED, LedgerFile, LedgerStore, read_added, read_reserved
from .ledger_records import no_bound

_ATTEMPTS = 50
_PAUSE_S = 0.02
WAIT_S = 5.0
"""Longest wait for another process, in seconds."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class SessionSummary:
    """One session of a ledger, for its operator.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from murmurfl.privacy import PrivacyPolicy, Privatizer, SQLiteLedger, read_ledger, row_bytes
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, budget_mu=2.0, noise_quality="exact"
    ... )
    >>> rows = [[0.0, float(number)] for number in range(100)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = SQLiteLedger.create(f"{folder}/ledger.sqlite", budget_mu=2.0, delta=1e-5)
    ...     privatizer = Privatizer(policy, 3, 100, ledger, ledger.keys(), data=row_bytes(rows))
    ...     release = privatizer.release("spring", 0, lambda samples: np.zeros((samples.stop - samples.start, 3)))
    ...     (session,) = read_ledger(f"{folder}/ledger.sqlite").sessions
    >>> session.session, session.releases, session.loss.mu, session.closed
    ('spring', 1, 1.0, False)
    """

    session: str
    loss: Loss
    """Reserved whole, whatever number of its releases was made; under a trusted server that server's word. Conditional
    under secure aggregation: its worst case holds whatever other clients and helpers do."""
    releases: int
    ack: int
    """The last release the server says it has."""
    closed: bool
    """Whether it was closed after a rollback."""
    first_release: float | None
    """Time of the first release, in seconds since 1970; ``last_release`` likewise."""
    last_release: float | None
    terms: Mapping[str, Any]
    """The policy it was opened with and the noise that followed from it."""
    trusted: bool = False
    """Whether the client left the noise to a trusted server: the loss holds against everybody but that server, by its
    word; against it nothing is guaranteed."""

    @property
    def min_honest(self) -> int | None:
        """Number of honest clients in each sum that the loss rests on; None if on none or only the mark knows."""
        return self.terms.get("min_honest") if self.loss.conditional else None


ROWS_DEALT, ALL_ROWS = "; rows dealt: ", "; all rows on one computer"
"""Ends of the name of the data in the ledger of a real fit: with the numbers of rows, or with owners."""
_CURATED = re.compile(rf"{re.escape(ROWS_DEALT)}\d+( \d+)*$|{re.escape(ALL_ROWS)}$")


@dataclass(frozen=True)
class LedgerSummary:
    """The contents of a ledger, for its operator.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import SQLiteLedger, read_ledger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = SQLiteLedger.create(f"{folder}/ledger.sqlite", budget_mu=2.0, delta=1e-5)
    ...     summary = read_ledger(f"{folder}/ledger.sqlite")
    >>> summary.spent.mu, summary.left.mu, summary.sessions
    (0.0, 2.0, ())
    """

    data: str
    """The operator's name for the data."""
    created: float
    """Time of creation, in seconds since 1970."""
    budget: Loss
    """Budget; in the worst case, whatever other clients and helpers do; the same where that was not decided."""
    delta: float
    samples_used: int
    commits: int
    mark: str
    """Location of the high-water mark."""
    mark_problem: str
    """The error of the mark, or empty."""
    key_file: str
    """Path of the noise key; empty if it is in the ledger."""
    sessions: tuple[SessionSummary, ...]
    """Sessions in the order in which they were opened."""

    @property
    def curated(self) -> bool:
        """Whether one computer with all rows trained, a trusted curator, by the name that a real fit gives the data."""
        others = any(one.trusted or one.loss.conditional for one in self.sessions)
        return _CURATED.search(self.data) is not None and not others

    @property
    def summed(self) -> bool:
        """Whether a session or the budget makes the worst case differ from what is assumed."""
        return self.budget.conditional or self.spent.conditional

    @property
    def spent(self) -> Loss:
        """Loss that all sessions together reserved. Against a server it is a bound only while none was trusted."""
        return total_loss(session.loss for session in self.sessions)

    @property
    def left(self) -> Loss:
        """Loss that new sessions may still reserve."""
        return self.budget.left_of(self.spent, self.delta)

    @property
    def trusted_a_server(self) -> bool:
        """Whether any session left the noise to a trusted server; then new sessions can only be of that kind."""
        return any(session.trusted for session in self.sessions)


def read_ledger(path: str | Path) -> LedgerSummary:
    """Read a ledger without altering it.

    It may be in use, or a copy. A mark that is missing or does not agree is no error here; the summary says so. After a
    crash SQLite's own index (``-shm``) of the log that was left may be made again; nothing else is touched.

    Notes
    -----
    What it returns does not depend on the client's data.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import SQLiteLedger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = SQLiteLedger.create(f"{folder}/ledger.sqlite", budget_mu=2.0, delta=1e-5)
    ...     summary = read_ledger(f"{folder}/ledger.sqlite")
    >>> summary.budget.mu, summary.samples_used
    (2.0, 0)
    """
    return read_steadily(Path(path).absolute(), _read)


def read_steadily(path: Path, read: Callable[[Path], Read]) -> Read:
    """Read a ledger while nobody writes to it: again, if somebody did."""
    for _ in range(_ATTEMPTS):
        before = _times(path)
        try:
            found = read(path)
        except LedgerError:
            if _times(path) == before:
                raise
        else:
            if _times(path) == before:
                return found
        time.sleep(_PAUSE_S)  # its node wrote to it meanwhile
    raise LedgerError(
        f"Expected a moment in which {path} is not written to, got none in {_ATTEMPTS} attempts; try again.",
        kind="busy",
    )


def _times(path: Path) -> list[tuple[int, int, int] | None]:
    """Inode, size and time of the files that change when a ledger is written to."""
    stats = [file.stat() if file.exists() else None for file in (path, _log(path))]
    return [None if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def read_only(path: Path) -> str:
    """Options of a connection that makes no file."""
    # Without a log nobody is writing, and SQLite need not make its own files; with one they are there already.
    return "mode=ro" if _log(path).exists() else "mode=ro&immutable=1"


def _read(path: Path) -> LedgerSummary:
    store, mark, problem = LedgerStore(path, WAIT_S), None, ""
    with store.errors(), store.opened(read_only(path)) as connection:
        store.check_integrity(connection)
        header = store.read_header(connection)
        try:
            mark = store.marks.load(header.mark)
        except LedgerError as error:
            problem = str(error)
        connection.execute("BEGIN")
        state = store.read_state(connection, header)
        sessions = tuple(session_summaries(connection))
        try:
            if mark is not None:
                LedgerFile(store, connection, header, state).check_mark(mark)
        except LedgerError as error:
            problem = str(error)
    return LedgerSummary(
        data=header.data,
        created=header.created,
        budget=Loss.of(header.budget_mu, header.budget_local_mu),
        delta=header.delta,
        samples_used=state.samples_used,
        commits=state.counter,
        mark=str(header.mark),
        mark_problem=problem,
        key_file=str(header.key_file or ""),
        sessions=sessions,
    )


def session_summaries(connection: sqlite3.Connection) -> Iterator[SessionSummary]:
    """Yield the sessions of an open ledger, in the order in which they were opened."""
    added = read_added(connection)
    losses = {
        session: Loss.of(abs(mu), local).with_added(added.get(session, 0.0))
        for session, mu, local in read_reserved(connection)
    }
    for session, mu, fingerprint, releases, ack, terms, first, last in connection.execute(
        "SELECT s.session, r.mu, s.fingerprint, s.release, s.ack, s.terms, min(l.time), max(l.time) "
        "FROM streams s JOIN reserved r USING (session) LEFT JOIN releases l USING (session) "
        "GROUP BY s.session ORDER BY r.rowid"
    ):
        made = session, losses[session], releases, ack, fingerprint == CLOSED, first, last, json.loads(terms or "{}")
        yield SessionSummary(*made, trusted=no_bound(mu))


_MOST_FIGURES = 128
_SAME = 1e-9


class ReleaseRow(NamedTuple):
    """A release as the ledger wrote it down: session, number, when (seconds since 1970), samples used up by then."""

    session: str
    release: int
    time: float
    samples_used: int


@dataclass(frozen=True)
class ReleaseLine:
    """One release, and what all releases up to it guarantee together."""

    session: str
    release: int
    """Number in the session, from 1."""
    time: float
    """Time at which it was recorded, in seconds since 1970, by the client's clock."""
    samples_used: int
    """Over all sessions, by then."""
    so_far: Loss
    """Loss of the releases up to this line, for a line chosen beforehand. Under secure aggregation it rests on what
    each session's guarantee rests on; under a trusted server it is that server's word."""
    reserved: Loss
    """Loss of all releases that the sessions opened up to this line may ever make."""


@dataclass(frozen=True)
class LedgerHistory:
    """The releases of a ledger in order, and which sessions count whole."""

    lines: tuple[ReleaseLine, ...]
    in_every_line: tuple[str, ...]
    """Sessions whose first release has no line: they count whole from the first line on."""
    whole: tuple[str, ...]
    """Sessions that count whole from their first line on."""


def read_history(path: str | Path) -> LedgerHistory:
    """Read a ledger's releases without altering it; it may be in use, or a copy.

    Notes
    -----
    What it returns does not depend on the client's data. ``mu_so_far`` of a line is an upper bound: what a server sees
    of the first releases of each session, as many as there are up to this line, is mu_so_far-GDP for replacement of one
    sample of this client (or what the session's unit is), for numbers of releases fixed beforehand. ``mu_reserved``
    covers a server that stops where it likes.
    Proof: docs/proofs/release-rule.md, step 8.
    """

    def read(file: Path) -> LedgerHistory:
        store = LedgerStore(file, WAIT_S)
        with store.errors(), store.opened(read_only(file)) as connection:
            connection.execute("BEGIN")
            store.read_state(connection, store.read_header(connection))
            rows = connection.execute("SELECT session, release, time, samples_used FROM releases").fetchall()
            return history_of(tuple(session_summaries(connection)), [ReleaseRow(*row) for row in rows])

    return read_steadily(Path(path).absolute(), read)


def history_of(sessions: Sequence[SessionSummary], rows: Iterable[ReleaseRow]) -> LedgerHistory:
    """Return the history of sessions in their order of opening, from the rows, in any order, that their ledger has."""
    ordered = _ordered(sessions, rows)
    known = {session.session: session for session in sessions}
    numbers: dict[str, list[int]] = {name: [] for name in known}
    for row in ordered:
        numbers.setdefault(row.session, []).append(row.release)
    figures = {name: _figures(known[name], made) for name, made in numbers.items() if name in known}
    hidden = tuple(name for name, session in known.items() if session.releases > 0 and numbers[name][:1] != [1])
    whole = {name: whole_of(session) for name, session in known.items()}
    so_far, reserved = {name: whole[name] for name in hidden}, {name: whole[name] for name in hidden}
    lines = []
    for row in ordered:
        if row.session not in hidden:
            made = figures.get(row.session)
            reserved[row.session] = whole.get(row.session, Loss.of(math.inf))  # unknown in a damaged ledger
            so_far[row.session] = reserved[row.session] if made is None else made[row.release - 1]
        lines.append(ReleaseLine(*row, *(NO_LOSS.compose(*of.values()) for of in (so_far, reserved))))
    count_whole = tuple(name for name, made in figures.items() if made is None and name not in hidden)
    return LedgerHistory(tuple(lines), hidden, count_whole)


def whole_of(session: SessionSummary) -> Loss:
    """Return the loss of all releases that a session may make.

    Notes
    -----
    **Formal guarantees.** What the session reserved when it was opened, for replacement of one of its units; only the
    worst case where nobody knows how many honest clients the other figure rests on.
    """
    return session.loss.unconditional() if session.min_honest is None else session.loss


def _ordered(sessions: Sequence[SessionSummary], rows: Iterable[ReleaseRow]) -> list[ReleaseRow]:
    """Sort rows as they may have happened: a session's by number, none before one with fewer samples used."""
    place = {session.session: i for i, session in enumerate(sessions)}
    latest: dict[str, float] = {}
    keys = {}
    for row in sorted(rows, key=lambda row: (row.session, row.release)):
        # A clock that was put back brings no release before its predecessor.
        latest[row.session] = max(row.time, latest.get(row.session, -math.inf))
        keys[row] = (row.samples_used, latest[row.session], place.get(row.session, len(place)), row.release)
    return sorted(keys, key=lambda row: keys[row])


def _figures(session: SessionSummary, numbers: Sequence[int]) -> list[Loss] | None:
    """Return the loss of a session's first k releases, for each k; None if only the whole is known."""
    if session.closed or session.trusted or not math.isfinite(session.loss.mu):
        return None
    if list(numbers) != list(range(1, session.releases + 1)) or not numbers:
        return None
    plan = plan_of(session)
    if plan is None or session.releases > plan.mechanism.num_releases:
        return None
    # Of many releases only every few are worked out; one between counts as the next, which is more.
    step = -(-session.releases // _MOST_FIGURES)
    resolve: list[Loss] = []
    before = NO_LOSS
    for k in range(1, session.releases + 1):
        if (k - 1) % step == 0:
            before = weakest_loss([first_releases(plan, session, min(k + step - 1, session.releases)), before])
        resolve.append(before)
    return resolve


def first_releases(plan: NoisePlan, session: SessionSummary, releases: int) -> Loss:
    """Return the loss of a session's first releases under this noise.

    Notes
    -----
    **Formal guarantees.** Upper bounds, for a number of releases fixed beforehand, and never more than the whole
    session's. Proof: docs/proofs/release-rule.md, step 8.
    """
    whole = whole_of(session)
    if whole.added_delta:  # of a part of it nothing is known
        return whole
    alone = plan.sensitivity * plan.mechanism.sensitivity(n=releases, **plan.pattern) / plan.noise_std
    every = plan.sensitivity * plan.mechanism.sensitivity(**plan.pattern) / plan.noise_std
    # The part of the worst case that is not the noise's is the normals' resolution: it is charged whole.
    alone = math.hypot(alone, math.sqrt(max(plan.loss.worst_case.mu**2 - every**2, 0.0)))
    local = min(alone, whole.worst_case.mu)
    if plan.sums is None:
        return Loss.of(min(alone, whole.mu), local if whole.conditional else None)
    summed = plan.sensitivity * plan.summed_sensitivity(releases) / plan.noise_std
    made = alone if session.min_honest is None else math.hypot(summed, plan.resolution_mu)
    return Loss.of(min(made, whole.mu), local)


def plan_of(session: SessionSummary) -> NoisePlan | None:
    """Work out a session's noise plan again from its terms; None if it may differ.

    Notes
    -----
    **Formal guarantees.** The plan's loss is what the session reserved when it was opened, on both sides, for
    replacement of one of its units; where they are not, there is no plan.
    Proof: docs/proofs/release-rule.md.
    """
    terms = dict(session.terms)
    size = terms.get("num_parameters")
    if not isinstance(size, int) or terms.get("noise_version") != NOISE_VERSION:
        return None
    kind = ShuffledPolicy if "private_steps" in terms else PrivacyPolicy
    try:
        found = read_fields(terms)
        known = {f.name: _hashable(found[f.name]) for f in fields(kind) if f.name in found}
        of_sums = {f.name: terms[f.name] for f in fields(SumAssumption) if f.name in terms}
        policy = kind(**known, sums=SumAssumption(**of_sums))
        plan = policy.plan(size)
        same = json.loads(policy.terms(size)) == terms
    except (MurmurflError, TypeError, ValueError, ArithmeticError):
        return None
    sides = (plan.loss.assumed, session.loss.assumed), (plan.loss.worst_case, session.loss.worst_case)
    return plan if same and all(math.isclose(ours.mu, theirs.mu, rel_tol=_SAME) for ours, theirs in sides) else None


def _hashable(value: Any) -> Any:
    """Return a value of a JSON document as policies have it."""
    if isinstance(value, Mapping):
        return {name: _hashable(inner) for name, inner in value.items()}
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
