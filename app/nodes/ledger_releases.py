"""What an operator is shown of a ledger's releases: when each was made, and what all of them guarantee up to there."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ...privacy import LedgerSummary, SessionSummary, rounded_up
from ...privacy.ledger.release_history import LedgerHistory, ReleaseLine

COLUMNS = ("when, UTC", "session", "number", "samples", "mu so far", "mu reserved")
LOCAL_COLUMNS = ("whatever happens", "reserved for it")
_SHORTEST_NAME = 8


def releases_document(history: LedgerHistory, summary: LedgerSummary) -> dict[str, Any]:
    """A ledger's releases as entries of a JSON document; null where there is no bound.

    Parameters
    ----------
    history : LedgerHistory
    summary : LedgerSummary
        Of the same ledger.

    Notes
    -----
    ``mu_so_far`` and ``mu_reserved`` of a line are what :func:`~murmurfl.privacy.ledger.release_history.read_history`
    says.
    """
    terms = {session.session: session.terms for session in summary.sessions}
    return {
        "releases": [
            {
                "time": line.time,
                "session": line.session,
                "release": line.release,
                "samples": _samples(terms.get(line.session, {})),
                "samples_used": line.samples_used,
                **{name: value if math.isfinite(value) else None for name, value in _figures(line, summary).items()},
            }
            for line in history.lines
        ],
        "counted_in_every_line": list(history.in_every_line),
        "counted_whole": list(history.whole),
    }


def releases_rows(history: LedgerHistory, summary: LedgerSummary, *, short: bool) -> list[dict[str, str]]:
    """A ledger's releases, a row of texts each.

    Parameters
    ----------
    history : LedgerHistory
    summary : LedgerSummary
        Of the same ledger.
    short : bool
        Whether names of sessions are cut where that leaves them apart.
    """
    known = {session.session: session for session in summary.sessions}
    shown = _shortened(list(known)) if short else {}
    return [
        {
            "when, UTC": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.time)),
            "session": shown.get(line.session, line.session),
            "number": str(line.release),
            "samples": _shown_samples(known.get(line.session)),
            **_columns(line, summary),
        }
        for line in history.lines
    ]


def releases_notes(history: LedgerHistory, summary: LedgerSummary, *, local_shown: bool) -> list[str]:
    """What must be known of the figures, in sentences.

    Parameters
    ----------
    history : LedgerHistory
    summary : LedgerSummary
        Of the same ledger.
    local_shown : bool
        Whether there is room for what holds whatever others do.
    """
    notes = [
        "mu so far: of the releases up to a line that was chosen beforehand. Of a server that stops where it likes "
        "what it has seen, mu reserved holds: every session above counts with all the releases that it may make."
    ]
    if summary.summed:
        same = "the same two if no other machine and no helper is honest."
        notes.append(f"whatever happens: {same}" if local_shown else f"A wider window, or --json, also shows {same}")
    if summary.trusted_a_server:
        notes.append("Of a session under a trusted server they hold against everybody but that server.")
    if history.whole:
        notes.append(f"Counted whole from their first line on, because no part is certain: {', '.join(history.whole)}.")
    if history.in_every_line:
        notes.append(f"Counted in every line, because their first is not known: {', '.join(history.in_every_line)}.")
    return notes


def _figures(line: ReleaseLine, summary: LedgerSummary) -> dict[str, float]:
    figures = {"mu_so_far": line.mu_so_far, "mu_reserved": line.mu_reserved}
    if summary.summed:
        figures |= {"mu_local_so_far": line.local_so_far, "mu_local_reserved": line.local_reserved}
    return figures


def _columns(line: ReleaseLine, summary: LedgerSummary) -> dict[str, str]:
    names = (*COLUMNS[-2:], *LOCAL_COLUMNS)
    values = _figures(line, summary).values()
    return {name: rounded_up(mu) if math.isfinite(mu) else "none" for name, mu in zip(names, values, strict=False)}


def _samples(terms: Mapping[str, Any]) -> int | None:
    """How many samples a release of a session is made from; None where that is all of them, or not the ledger's."""
    counted = terms.get("order", "in-turn") not in ("all", "secret") and terms.get("clip_unit") != "update"
    return terms.get("batch_size") if counted else None


def _shown_samples(session: SessionSummary | None) -> str:
    if session is None or not session.terms:
        return "?"
    samples = _samples(session.terms)
    return "all" if samples is None else str(samples)


def _shortened(names: list[str]) -> dict[str, str]:
    """Names cut as far as they can be told apart, and to no fewer than a few characters."""
    for length in range(_SHORTEST_NAME, max(map(len, names), default=0)):
        if len({name[:length] for name in names}) == len(names):
            return {name: name if len(name) <= length + 1 else f"{name[:length]}…" for name in names}
    return {name: name for name in names}
