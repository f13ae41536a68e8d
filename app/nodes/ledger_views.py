"""A ledger for its operator: what each run and release spent, what is left, what it guarantees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...clients import UpdateNode
from ...clients.adapters.noise_mod import machine_behind
from ...clients.nodes.sample_node import SampleNode
from ...privacy import Guarantee, LedgerSummary, SessionSummary, Unit, gdp_epsilon, rotate_key, rounded_up
from ...privacy.accounting.guarantee import SESSION
from ...privacy.ledger.ledger_history import LedgerHistory, ReleaseLine
from .node_config import NodeConfig
from .own_app import OwnNode, own_client

_NOTHING_AGAINST_IT = "Against the server nothing is guaranteed: it got contributions without noise."
_ONLY_TRUSTED = " under a trusted server, and for no other"


def ledger_document(summary: LedgerSummary, path: Path) -> dict[str, Any]:
    """A ledger's summary as a JSON document; null stands for no bound.

    Parameters
    ----------
    path : Path
        Where it was read.

    Notes
    -----
    ``spent`` is the joint guarantee of all releases of all sessions opened so far, made or not, against whom
    ``guarantee`` says: with a session under a trusted server, against everybody but that one. ``local`` is the same
    whatever other machines and helpers do; null if no session is under secure aggregation and no budget was decided for
    them.
    """
    amounts = (("budget", summary.budget_mu), ("spent", summary.reserved_mu), ("left", summary.left_mu))
    local = [(name, mu) for (name, _), mu in zip(amounts, _local_amounts(summary), strict=True)]
    return {
        "path": str(path),
        "data": summary.data,
        "created": summary.created,
        "guarantee": ledger_guarantee(summary).document(),
        "delta": summary.delta,
        **{name: _amount(mu, summary.delta) for name, mu in amounts},
        "local": {name: _amount(mu, summary.delta) for name, mu in local} if summary.summed else None,
        "samples_used": summary.samples_used,
        "commits": summary.commits,
        "mark": summary.mark,
        "problem": summary.mark_problem,
        "key_file": summary.key_file,
        "sessions": [_session_document(session, summary.delta) for session in summary.sessions],
    }


def _local_amounts(summary: LedgerSummary) -> tuple[float, float, float]:
    return summary.budget_local_mu, summary.reserved_local_mu, summary.left_local_mu


def _session_document(session: SessionSummary, delta: float) -> dict[str, Any]:
    guarantee = session_guarantee(session, delta)
    return {
        "session": session.session,
        "trust": guarantee.trust,
        **_amount(guarantee.mu, delta),
        "mu_local": guarantee.document()["mu_local"],
        "epsilon_local": guarantee.document()["epsilon_local"],
        "min_honest": guarantee.min_honest,
        "guarantee": guarantee.sentence,
        "releases": session.releases,
        "acknowledged": session.ack,
        "closed": session.closed,
        "first_release": session.first_release,
        "last_release": session.last_release,
        "terms": dict(session.terms),
    }


def _amount(mu: float, delta: float) -> dict[str, float | None]:
    """A mu and its epsilon; None if infinite."""
    both = {"mu": mu, "epsilon": gdp_epsilon(mu, delta)}
    return {name: value if math.isfinite(value) else None for name, value in both.items()}


def ledger_guarantee(summary: LedgerSummary) -> Guarantee:
    """Guarantee of everything released under a ledger: all sessions opened so far, made or not.

    Notes
    -----
    **Formal guarantees.** Mu is what all sessions on the ledger reserved together, under the trust that it names, for
    replacement of one sample (of one owner's samples, if every session protects owners). Once a session was under a
    trusted server it holds against everybody but that one.
    """
    made = [session_guarantee(session, summary.delta) for session in summary.sessions]
    words = "; ".join(dict.fromkeys(guarantee.mechanism for guarantee in made)) or "nothing released yet"
    covers = "over all releases of all sessions on this ledger"
    local = Guarantee(summary.reserved_local_mu, summary.delta, words, covers=covers, unit=_unit(summary.sessions))
    honest = [guarantee.min_honest for guarantee in made if guarantee.min_honest is not None]
    if summary.trusted_a_server:  # the one figure covers what was summed before, too
        return replace(local, trust="trusted-server", notes=(_NOTHING_AGAINST_IT,))
    if len(honest) < sum(session.mu_local is not None for session in summary.sessions) or not honest:
        return local
    trust, least = "secure-aggregation", max(honest)  # on which every session rests
    return replace(local, mu=summary.reserved_mu, trust=trust, mu_local=local.mu, min_honest=least)


def session_guarantee(session: SessionSummary, delta: float) -> Guarantee:
    """Guarantee of one session on a ledger, by the terms it was opened with.

    Parameters
    ----------
    delta : float
        The ledger's.

    Notes
    -----
    **Formal guarantees.** Mu is what the session reserved when it was opened, for replacement of one sample or of one
    owner's samples, against whom its terms say.
    """
    terms, unit = session.terms, _unit([session])
    if session.trusted:
        words, notes = "no noise on this machine: the server's, by its own word", (_NOTHING_AGAINST_IT,)
        trust = "trusted-server"
        return Guarantee(session.mu, delta, words, trust=trust, covers=SESSION, notes=notes, unit=unit)
    options = (terms.get("schedule"), *terms.get("mechanism_options", {}).values())
    named = ", ".join(str(value) for value in options if value)
    words = f"{terms.get('mechanism', 'unknown')}{f' ({named})' if named else ''} noise on this machine"
    if session.mu_local is None:
        return Guarantee(session.mu, delta, words, covers=SESSION, unit=unit)
    local = Guarantee(session.mu_local, delta, f"{words}, under masks", covers=SESSION, unit=unit)
    if session.min_honest is None:  # forgotten in a rollback: the local figure does not rest on it
        return local
    trust, least = "secure-aggregation", session.min_honest
    return replace(local, mu=session.mu, trust=trust, mu_local=local.mu, min_honest=least)


def _unit(sessions: Iterable[SessionSummary]) -> Unit:
    """Owner if every session protects owners, else sample: who protects owners protects samples."""
    owners = [bool(session.terms.get("samples_per_owner")) for session in sessions]
    return "owner" if owners and all(owners) else "sample"


def ledger_lines(summary: LedgerSummary, path: Path) -> list[str]:
    """A ledger in lines for people."""

    def amount(mu: float) -> str:
        if math.isinf(mu):
            return "no bound"
        # One rounding for all three, so that a budget and what is spent of it read alike when they are equal.
        return f"epsilon {rounded_up(gdp_epsilon(mu, summary.delta))} at delta {summary.delta:g} (mu {rounded_up(mu)})"

    return [
        f"ledger    {path}",
        f"data      {summary.data or '(no name)'}; {summary.samples_used} {_unit(summary.sessions)}s used up",
        f"budget    {amount(summary.budget_mu)}",
        f"spent     {amount(summary.reserved_mu)}: all releases the sessions below may make",
        f"left      {amount(summary.left_mu)}: for new sessions{_ONLY_TRUSTED if summary.trusted_a_server else ''}",
        *(_local_lines(summary, amount) if summary.summed else []),
        f"that is   {ledger_guarantee(summary).sentence}",
        f"mark      {summary.mark}{' (see below)' if summary.mark_problem else ''}",
        f"key       {summary.key_file or 'in the ledger'}",
    ]


def _local_lines(summary: LedgerSummary, amount: Callable[[float], str]) -> list[str]:
    """Budget, spent and left, whatever other machines and helpers do."""
    budget, spent, left = map(amount, _local_amounts(summary))
    decided = "" if summary.local_decided else ", for none was decided (`murmurfl ledger set-local-budget`)"
    return [
        "and if nobody else is honest, whatever happens:",
        f"  budget  {budget}{decided}",
        f"  spent   {spent}",
        f"  left    {left}",
    ]


def session_rows(summary: LedgerSummary) -> list[dict[str, str]]:
    """A ledger's sessions, each a row of texts."""
    return [
        {
            "session": session.session,
            "opened, UTC": _when(session.first_release),
            "last, UTC": _when(session.last_release),
            "releases": f"{session.releases} of {session.terms.get('max_participations', '?')}",
            "mu": rounded_up(session_guarantee(session, summary.delta).mu),
            "epsilon": rounded_up(session_guarantee(session, summary.delta).epsilon),
            **(_local_cells(session, summary.delta) if summary.summed else {}),
            "clip": f"{session.terms.get('clip_norm', '?')} a {session.terms.get('clip_unit', '?')}",
            "batch": str(session.terms.get("batch_size", "?")),
            "noise": _noise(session),
            "state": "closed" if session.closed else "open",
        }
        for session in summary.sessions
    ]


def _local_cells(session: SessionSummary, delta: float) -> dict[str, str]:
    mu = session.mu if session.mu_local is None else session.mu_local
    return {"mu, whatever happens": rounded_up(mu), "its epsilon": rounded_up(gdp_epsilon(mu, delta))}


def _noise(session: SessionSummary) -> str:
    if session.trusted:
        return "none: the server's"
    return f"{session.terms.get('mechanism', '?')}, std {session.terms.get('noise_std', math.nan):.3g}"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


COLUMNS = ("when, UTC", "session", "number", "samples", "mu so far", "mu reserved")
LOCAL_COLUMNS = ("whatever happens", "reserved for it")
_SHORTEST_NAME = 8


def releases_document(history: LedgerHistory, summary: LedgerSummary) -> dict[str, Any]:
    """A ledger's releases as entries of a JSON document; null stands for no bound.

    ``mu_so_far`` and ``mu_reserved`` are as in :func:`~murmurfl.privacy.ledger.ledger_history.read_history`.
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
    """A ledger's releases, each a row of texts.

    Parameters
    ----------
    short : bool
        Whether to cut names of sessions as far as they stay distinct.
    """
    known, columns = {session.session: session for session in summary.sessions}, (*COLUMNS[-2:], *LOCAL_COLUMNS)
    shown = _shortened(list(known)) if short else {}
    return [
        {
            "when, UTC": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.time)),
            "session": shown.get(line.session, line.session),
            "number": str(line.release),
            "samples": _shown_samples(known.get(line.session)),
            **dict(zip(columns, map(_rounded, _figures(line, summary).values()), strict=False)),
        }
        for line in history.lines
    ]


def releases_notes(history: LedgerHistory, summary: LedgerSummary, *, local_shown: bool) -> list[str]:
    """What must be known of the figures, in sentences.

    Parameters
    ----------
    local_shown : bool
        Whether the table shows what holds whatever others do.
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


def _rounded(mu: float) -> str:
    return rounded_up(mu) if math.isfinite(mu) else "none"


def _samples(terms: Mapping[str, Any]) -> int | None:
    """Number of samples of a release; None if it uses all, or an unknown number."""
    counted = terms.get("order", "in-turn") not in ("all", "secret") and terms.get("clip_unit") != "update"
    return terms.get("batch_size") if counted else None


def _shown_samples(session: SessionSummary | None) -> str:
    if session is None or not session.terms:
        return "?"
    samples = _samples(session.terms)
    return "all" if samples is None else str(samples)


def _shortened(names: list[str]) -> dict[str, str]:
    """Names cut as far as they stay distinct, to no fewer than a few characters."""
    for length in range(_SHORTEST_NAME, max(map(len, names), default=0)):
        if len({name[:length] for name in names}) == len(names):
            return {name: name if len(name) <= length + 1 else f"{name[:length]}…" for name in names}
    return {name: name for name in names}


def rotate_key_of(node: NodeConfig | OwnNode, key_file: Path | None) -> int:
    """Exchange the noise key of a machine's ledger; return how many sessions it closed.

    Parameters
    ----------
    node : NodeConfig, UpdateNode or SampleNode
        Names the data, whose digest the ledger keeps under the key.
    key_file : Path, optional
        A new file for the new key.

    Raises
    ------
    ConfigurationError, LedgerError
        If the machine cannot be made from its file, or as :func:`~murmurfl.privacy.rotate_key`.
    """
    if isinstance(node, UpdateNode):
        machine = machine_behind(node)
    elif isinstance(node, SampleNode):
        machine = own_client(node)[1].machine
    else:
        machine = node.client().machine
    return rotate_key(node.ledger, machine.row_bytes, machine.num_rows, key_file=key_file)
