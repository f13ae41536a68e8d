r"""The releases a ledger knows of, one line each, with what they guarantee together up to each line.

For an operator who asks what happened last night. A line's ``mu_so_far`` is of the releases in it and above it:

    mu_so_far^2 = sum over the sessions s of (Delta_s S_s(k_s) / noise_std_s)^2 + mu_n^2

with k_s the releases of s up to the line and S_s(k) the norm of the mechanism's C for the rows drawn up to release k
and the samples' pattern. It is never too small:

* Fix the numbers k_s beforehand. What a server sees of the first k_s releases of each session is made from these rows,
  and on every path of its choices they move by at most that sum of squares, whatever it acknowledges and however it
  mixes sessions (docs/proofs/release-rule.md, steps 2, 5, 6 and 7 with the cap k_s in place of K).
* mu_n, what the normals' resolution tells, is charged whole to a session's first release.
* Under secure aggregation the machines of a sum may have made all of their releases: S is that of
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
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ..accounting.noise_plan import NoisePlan
from ..errors import MurmurflError
from ..machine.policy import PrivacyPolicy
from ..machine.shuffled_machine import ShuffledPolicy
from ..noise.normals import NOISE_VERSION
from .ledger_file import clear_errors, opened, read_header, read_state
from .ledger_summary import WAIT_S, SessionSummary, read_only, read_steadily, session_summaries

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
    """One release, and what all releases up to it guarantee together.

    Parameters
    ----------
    session : str
    release : int
        Its number in the session, from 1.
    time : float
        When it was recorded, in seconds since 1970, by the machine's clock.
    samples_used : int
        By then, over all sessions.
    mu_so_far : float
        Of the releases up to this line, for a line chosen beforehand. Under secure aggregation it rests on what each
        session's guarantee rests on; under a trusted server it is that server's word.
    mu_reserved : float
        Of all releases that the sessions opened up to this line may ever make.
    local_so_far, local_reserved : float
        The same whatever other machines and helpers do.
    """

    session: str
    release: int
    time: float
    samples_used: int
    mu_so_far: float
    mu_reserved: float
    local_so_far: float
    local_reserved: float


@dataclass(frozen=True)
class LedgerHistory:
    """All releases that a ledger has a line of.

    Parameters
    ----------
    lines : tuple of ReleaseLine
    in_every_line : tuple of str
        Sessions whose first release has no line: they count whole from the first line on.
    whole : tuple of str
        Sessions that count whole from their first line on.
    """

    lines: tuple[ReleaseLine, ...]
    in_every_line: tuple[str, ...]
    whole: tuple[str, ...]


def read_history(path: str | Path) -> LedgerHistory:
    """Read a ledger's releases without altering it.

    Parameters
    ----------
    path : path
        A ledger, or a copy of one; it may be in use.

    Raises
    ------
    LedgerError
        If there is no ledger at ``path``, or none that can be read or believed.

    Notes
    -----
    What it returns does not depend on the machine's data. ``mu_so_far`` of a line is an upper bound: what a server sees
    of the first releases of each session, as many as there are up to this line, is mu_so_far-GDP for replacement of one
    sample of this machine (or what the session's unit is), for numbers of releases fixed beforehand. Who stops where it
    likes is covered by ``mu_reserved``.
    Proof: docs/proofs/release-rule.md, step 8.
    """

    def read(file: Path) -> LedgerHistory:
        with clear_errors(file, WAIT_S), opened(file, WAIT_S, read_only(file)) as connection:
            connection.execute("BEGIN")
            read_state(connection, read_header(connection, file), file)
            return history_of(tuple(session_summaries(connection)), list(_rows(connection)))

    return read_steadily(Path(path).absolute(), read)


def _rows(connection: sqlite3.Connection) -> Iterator[ReleaseRow]:
    for row in connection.execute("SELECT session, release, time, samples_used FROM releases"):
        yield ReleaseRow(*row)


def history_of(sessions: Sequence[SessionSummary], rows: Iterable[ReleaseRow]) -> LedgerHistory:
    """The history of some sessions, from what their ledger wrote down of each release.

    Parameters
    ----------
    sessions : sequence of SessionSummary
        In the order in which they were opened.
    rows : iterable of ReleaseRow
        In any order.
    """
    ordered = _ordered(sessions, rows)
    known = {session.session: session for session in sessions}
    numbers: dict[str, list[int]] = {name: [] for name in known}
    for row in ordered:
        numbers.setdefault(row.session, []).append(row.release)
    figures = {name: _figures(known[name], made) for name, made in numbers.items() if name in known}
    hidden = tuple(name for name, session in known.items() if _begins_before(session, numbers[name]))
    totals = _Totals()
    for name in hidden:
        totals.count(name, whole_of(known[name]), whole_of(known[name]))
    lines = []
    for row in ordered:
        if row.session in known and row.session not in hidden:
            made = figures[row.session]
            so_far = whole_of(known[row.session]) if made is None else made[row.release - 1]
            totals.count(row.session, so_far, whole_of(known[row.session]))
        elif row.session not in known:
            totals.count(row.session, (math.inf, math.inf), (math.inf, math.inf))  # a damaged ledger
        lines.append(ReleaseLine(*row, *totals.figures()))
    whole = tuple(name for name, made in figures.items() if made is None and name not in hidden)
    return LedgerHistory(tuple(lines), hidden, whole)


class _Totals:
    """What sessions come to together: of the releases made, and of all that were reserved."""

    def __init__(self) -> None:
        self._so_far: dict[str, tuple[float, float]] = {}
        self._reserved: dict[str, tuple[float, float]] = {}

    def count(self, session: str, so_far: tuple[float, float], reserved: tuple[float, float]) -> None:
        self._so_far[session], self._reserved[session] = so_far, reserved

    def figures(self) -> tuple[float, float, float, float]:
        """Mu so far, mu reserved, and both whatever others do."""
        made, whole = self._so_far.values(), self._reserved.values()
        return (
            math.hypot(*(mu for mu, _ in made)),
            math.hypot(*(mu for mu, _ in whole)),
            math.hypot(*(local for _, local in made)),
            math.hypot(*(local for _, local in whole)),
        )


def whole_of(session: SessionSummary) -> tuple[float, float]:
    """The mu of all releases that a session may make: by its guarantee, and whatever others do."""
    local = session.mu if session.mu_local is None else session.mu_local
    return (local if session.min_honest is None else session.mu), local


def _ordered(sessions: Sequence[SessionSummary], rows: Iterable[ReleaseRow]) -> list[ReleaseRow]:
    """Rows as they may have come about: a session's by their numbers, and none before one that used fewer samples."""
    place = {session.session: i for i, session in enumerate(sessions)}
    latest: dict[str, float] = {}
    keys = {}
    for row in sorted(rows, key=lambda row: (row.session, row.release)):
        # A clock that was put back does not bring a release before the one that it came after.
        latest[row.session] = max(row.time, latest.get(row.session, -math.inf))
        keys[row] = (row.samples_used, latest[row.session], place.get(row.session, len(place)), row.release)
    return sorted(keys, key=lambda row: keys[row])


def _begins_before(session: SessionSummary, numbers: Sequence[int]) -> bool:
    """Whether a session's first release has no line."""
    return session.releases > 0 and numbers[:1] != [1]


def _figures(session: SessionSummary, numbers: Sequence[int]) -> list[tuple[float, float]] | None:
    """The mu of a session's first k releases for each k, and whatever others do; None if only the whole is known."""
    if session.closed or session.trusted or not math.isfinite(session.mu):
        return None
    if list(numbers) != list(range(1, session.releases + 1)) or not numbers:
        return None
    plan = plan_of(session)
    if plan is None or session.releases > plan.mechanism.num_releases:
        return None
    # Of many releases every few: each counts as the next one that is worked out, which is more.
    step = -(-session.releases // _MOST_FIGURES)
    worked_out: list[tuple[float, float]] = []
    before = (0.0, 0.0)
    for k in range(1, session.releases + 1):
        if (k - 1) % step == 0:
            mu, local = first_releases(plan, session, min(k + step - 1, session.releases))
            before = max(mu, before[0]), max(local, before[1])
        worked_out.append(before)
    return worked_out


def first_releases(plan: NoisePlan, session: SessionSummary, releases: int) -> tuple[float, float]:
    """The mu of the first releases of a session with this noise: by its guarantee, and whatever others do.

    Parameters
    ----------
    plan : NoisePlan
        The session's.
    session : SessionSummary
    releases : int
        How many, from 1.

    Notes
    -----
    Upper bounds, for a number fixed beforehand, and never more than the whole session's.
    """
    whole, local = whole_of(session)
    alone = plan.sensitivity * plan.mechanism.sensitivity(n=releases, **plan.pattern) / plan.noise_std
    every = plan.sensitivity * plan.mechanism.sensitivity(**plan.pattern) / plan.noise_std
    # What of the local figure is not the noise's is the normals' resolution: it is charged whole.
    alone = math.hypot(alone, math.sqrt(max(plan.mu_local**2 - every**2, 0.0)))
    if plan.sums is None:
        return min(alone, whole), min(alone, local)
    summed = plan.sensitivity * plan.summed_sensitivity(releases) / plan.noise_std
    made = alone if session.min_honest is None else math.hypot(summed, plan.resolution_mu)
    return min(made, whole), min(alone, local)


def plan_of(session: SessionSummary) -> NoisePlan | None:
    """The noise that a session was opened with, made again from its terms; None if it is not certainly the same.

    Notes
    -----
    **Formal guarantees.** The plan's mu and mu_local are those that the session reserved when it was opened, for
    replacement of one of its units; where they are not, there is no plan.
    Proof: docs/proofs/release-rule.md.
    """
    terms = dict(session.terms)
    size = terms.get("num_parameters")
    if not isinstance(size, int) or terms.get("noise_version") != NOISE_VERSION:
        return None
    kind = ShuffledPolicy if "private_steps" in terms else PrivacyPolicy
    try:
        policy = kind(**{f.name: _hashable(terms[f.name]) for f in fields(kind) if f.name in terms})
        plan = policy.plan(size)
        same = json.loads(policy.terms(size)) == terms
    except (MurmurflError, TypeError, ValueError, ArithmeticError):
        return None
    local = session.mu if session.mu_local is None else session.mu_local
    same = same and math.isclose(plan.mu, session.mu, rel_tol=_SAME)
    return plan if same and math.isclose(plan.mu_local, local, rel_tol=_SAME) else None


def _hashable(value: Any) -> Any:
    """A value of a JSON document as policies have it."""
    if isinstance(value, Mapping):
        return {name: _hashable(inner) for name, inner in value.items()}
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
