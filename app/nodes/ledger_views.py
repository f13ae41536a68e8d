"""A ledger for its operator: what each run and release spent, what it guarantees, what is left, and until when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...clients.adapters.noise_mod import privatizer_behind
from ...clients.adapters.update_policy import UpdatePolicy
from ...clients.nodes.client_file import UpdateNode
from ...clients.private_client import PrivateClient
from ...privacy.accounting.guarantee import (
    CURATED,
    CURATED_NOISE,
    SAME_OWNER,
    SESSION,
    Guarantee,
    Unit,
    added_words,
    rounded_down,
    rounded_up,
)
from ...privacy.accounting.loss import NO_LOSS, Loss, Profile
from ...privacy.ledger.ledger_history import LedgerHistory, LedgerSummary, ReleaseLine, SessionSummary
from ...privacy.ledger.repair import rotate_key
from ...privacy.release.admission import ROUNDING
from ...privacy.release.policy import RECORDED_SELECTIONS
from .node_app import OwnNode, client_of
from .node_config import NodeConfig

_NOTHING_AGAINST_IT = "Against the server nothing is guaranteed: it got contributions without noise."
_ONLY_TRUSTED = " under a trusted server, and for no other"


def ledger_document(summary: LedgerSummary, path: Path) -> dict[str, Any]:
    """Return a ledger's summary, read at ``path``, as a JSON document; null stands for no bound.

    ``spent`` is the joint guarantee of all releases of all sessions opened so far, made or not, against whom
    ``guarantee`` says: with a session under a trusted server, against everybody but that one. ``local`` is the same
    whatever other clients and helpers do; null if no session is under secure aggregation and no budget was decided for
    them.
    """
    amounts = {"budget": summary.budget, "spent": summary.spent, "left": summary.left}
    local = {name: _amount(loss.worst_case, summary.delta) for name, loss in amounts.items()}
    return {
        "path": str(path),
        "data": summary.data,
        "created": summary.created,
        "guarantee": ledger_guarantee(summary).document(),
        "delta": summary.delta,
        **{name: _amount(loss.assumed, summary.delta) for name, loss in amounts.items()},
        "local": local if summary.summed else None,
        "samples_used": summary.samples_used,
        "commits": summary.commits,
        "mark": summary.mark,
        "problem": summary.mark_problem,
        "key_file": summary.key_file,
        "sessions": [_session_document(session, summary) for session in summary.sessions],
    }


def _session_document(session: SessionSummary, summary: LedgerSummary) -> dict[str, Any]:
    delta = summary.delta
    guarantee = session_guarantee(session, delta, curated=summary.curated)
    return {
        "session": session.session,
        "trust": guarantee.trust,
        **guarantee.loss.document(delta),
        "min_honest": guarantee.min_honest,
        "guarantee": guarantee.sentence,
        "releases": session.releases,
        "acknowledged": session.ack,
        "closed": session.closed,
        "first_release": session.first_release,
        "last_release": session.last_release,
        "terms": dict(session.terms),
    }


def _amount(profile: Profile, delta: float) -> dict[str, float | None]:
    """Return mu and epsilon of one side of a loss; None if infinite."""
    both = {"mu": profile.mu, "epsilon": profile.epsilon(delta)}
    figures = {name: value if math.isfinite(value) else None for name, value in both.items()}
    return {**figures, "added_delta": profile.added_delta} if profile.added_delta else figures


def ledger_guarantee(summary: LedgerSummary) -> Guarantee:
    """Guarantee of everything released under a ledger: all sessions opened so far, made or not.

    Notes
    -----
    **Formal guarantees.** Mu is what all sessions on the ledger reserved together, under the trust that it names, for
    replacement of one sample (of one owner's samples, if every session protects owners). Once a session was under a
    trusted server it holds against everybody but that one. Where one computer with all rows trained, it holds against
    everybody but that computer.
    """
    made = [session_guarantee(session, summary.delta, curated=summary.curated) for session in summary.sessions]
    words = "; ".join(dict.fromkeys(guarantee.mechanism for guarantee in made)) or "nothing released yet"
    covers = "over all releases of all sessions on this ledger"
    both = len({_unit([session]) for session in summary.sessions}) > 1
    notes = (*([SAME_OWNER] if both else []), *([CURATED] if summary.curated else []))
    unit = _unit(summary.sessions)
    loss = summary.spent
    local = Guarantee(loss.unconditional(), summary.delta, words, covers=covers, unit=unit, notes=notes)
    honest = [guarantee.min_honest for guarantee in made if guarantee.min_honest is not None]
    if summary.trusted_a_server:  # the one figure covers what was summed before, too
        return replace(local, trust="trusted-server", notes=(*notes, _NOTHING_AGAINST_IT))
    if len(honest) < sum(session.loss.conditional for session in summary.sessions) or not honest:
        return local
    trust, least = "secure-aggregation", max(honest)  # on which every session rests
    return replace(local, loss=loss, trust=trust, min_honest=least)


def session_guarantee(session: SessionSummary, delta: float, *, curated: bool = False) -> Guarantee:
    """Guarantee of one session on a ledger, at the ledger's delta, by the terms it was opened with.

    ``curated`` says that one computer with all rows trained.

    Notes
    -----
    **Formal guarantees.** Mu is what the session reserved when it was opened, for replacement of one sample or of one
    owner's samples, against whom its terms say.
    """
    terms, unit = session.terms, _unit([session])
    if session.trusted:
        words, notes = "no noise on this client: the server's, by its own word", (_NOTHING_AGAINST_IT,)
        trust = "trusted-server"
        return Guarantee(session.loss.mu, delta, words, trust=trust, covers=SESSION, notes=notes, unit=unit)
    options = (terms.get("schedule"), *terms.get("mechanism_options", {}).values())
    named = ", ".join(str(value) for value in options if value)
    words = f"{terms.get('mechanism', 'unknown')}{f' ({named})' if named else ''} noise on this client"
    if curated:
        words = CURATED_NOISE.format(mechanisms=str(terms.get("mechanism", "unknown")))
        return Guarantee(session.loss, delta, words, covers=SESSION, unit=unit, notes=(CURATED,))
    if not session.loss.conditional:
        return Guarantee(session.loss, delta, words, covers=SESSION, unit=unit)
    local = Guarantee(session.loss.unconditional(), delta, f"{words}, under masks", covers=SESSION, unit=unit)
    if session.min_honest is None:  # forgotten in a rollback: the local figure does not rest on it
        return local
    trust, least = "secure-aggregation", session.min_honest
    return replace(local, loss=session.loss, trust=trust, min_honest=least)


def _unit(sessions: Iterable[SessionSummary]) -> Unit:
    """Owner if every session protects owners, else sample: who protects owners protects samples that stay theirs."""
    owners = [bool(session.terms.get("samples_per_owner")) for session in sessions]
    return "owner" if owners and all(owners) else "sample"


def ledger_lines(summary: LedgerSummary, path: Path) -> list[str]:
    """Return a ledger in lines for people."""

    def amount(side: Profile, rounded: Callable[[float], str] = rounded_up) -> str:
        if math.isinf(side.epsilon(summary.delta)):
            return "no bound"
        # One rounding for a budget and what is spent of it, so that they read alike when they are equal.
        epsilon = rounded(side.epsilon(summary.delta))
        return f"epsilon {epsilon} at delta {summary.delta:g} (mu {rounded(side.mu)}{added_words(side)})"

    return [
        f"ledger    {path}",
        f"data      {summary.data or '(no name)'}; {summary.samples_used} {_unit(summary.sessions)}s used up",
        f"budget    {amount(summary.budget.assumed)}",
        f"spent     {amount(summary.spent.assumed)}: all releases the sessions below may make",
        f"left      {amount(summary.left.assumed, rounded_down)}: for new sessions"
        f"{_ONLY_TRUSTED if summary.trusted_a_server else ''}",
        *(_local_lines(summary, amount) if summary.summed else []),
        f"that is   {ledger_guarantee(summary).sentence}",
        f"mark      {summary.mark}{' (see below)' if summary.mark_problem else ''}",
        f"key       {summary.key_file or 'in the ledger'}",
    ]


def _local_lines(summary: LedgerSummary, amount: Callable[..., str]) -> list[str]:
    """Lines on budget, spent and left that hold whatever other clients and helpers do."""
    budget, spent = (amount(loss.worst_case) for loss in (summary.budget, summary.spent))
    left = amount(summary.left.worst_case, rounded_down)
    decided = "" if summary.budget.conditional else ", for none was decided (`murmurfl ledger set-local-budget`)"
    return [
        "and in the worst case, if nobody else is honest:",
        f"  budget  {budget}{decided}",
        f"  spent   {spent}",
        f"  left    {left}",
    ]


def session_rows(summary: LedgerSummary) -> list[dict[str, str]]:
    """Return a ledger's sessions, each a row of texts."""
    return [
        {
            "session": session.session,
            "opened, UTC": _when(session.first_release),
            "last, UTC": _when(session.last_release),
            "releases": f"{session.releases} of {session.terms.get('max_participations', '?')}",
            "mu": rounded_up(session_guarantee(session, summary.delta).mu),
            "epsilon": rounded_up(session_guarantee(session, summary.delta).epsilon),
            **(_local_cells(session, summary.delta) if summary.summed else {}),
            "clip": f"{_clip(session)} a {session.terms.get('clip_unit', '?')}",
            "batch": str(session.terms.get("batch_size", "?")),
            "noise": _noise(session),
            "state": _state(session),
        }
        for session in summary.sessions
    ]


def _clip(session: SessionSummary) -> str:
    clip = session.terms.get("clip_norm", "?")
    return str(round(clip, 4) if isinstance(clip, float) else clip)


def _state(session: SessionSummary) -> str:
    """Return whether a session can release anything more: not if it was closed, nor once it has made all releases."""
    if session.closed:
        return "closed"
    most = session.terms.get("max_participations")
    return "finished" if isinstance(most, int) and session.releases >= most else "open"


def _local_cells(session: SessionSummary, delta: float) -> dict[str, str]:
    side = session.loss.worst_case
    return {"worst-case mu": rounded_up(side.mu), "its epsilon": rounded_up(side.epsilon(delta))}


def _noise(session: SessionSummary) -> str:
    if session.trusted:
        return "none: the server's"
    return f"{session.terms.get('mechanism', '?')}, std {session.terms.get('noise_std', math.nan):.3g}"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


COLUMNS = ("when, UTC", "session", "number", "samples", "mu so far", "mu reserved")
LOCAL_COLUMNS = ("worst case", "reserved for it")
_SHORTEST_NAME = 8


def releases_document(history: LedgerHistory, summary: LedgerSummary) -> dict[str, Any]:
    """Return a ledger's releases as entries of a JSON document; null stands for no bound.

    ``mu_so_far`` and ``mu_reserved`` are those of :func:`~murmurfl.privacy.ledger.ledger_history.read_history`.
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
    """Return a ledger's releases, each a row of texts.

    ``short`` cuts names of sessions as far as they stay distinct.
    """
    known, columns = {session.session: session for session in summary.sessions}, (*COLUMNS[-2:], *LOCAL_COLUMNS)
    shortened = _shortened(list(known)) if short else {}
    return [
        {
            "when, UTC": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.time)),
            "session": shortened.get(line.session, line.session),
            "number": str(line.release),
            "samples": _shown_samples(known.get(line.session)),
            **dict(zip(columns, map(_rounded, _figures(line, summary).values()), strict=False)),
        }
        for line in history.lines
    ]


def releases_notes(history: LedgerHistory, summary: LedgerSummary, *, local_shown: bool) -> list[str]:
    """Sentences that explain the figures; ``local_shown``: the table has what holds whatever others do."""
    notes = [
        "mu so far: of the releases up to a line that was chosen beforehand. Of a server that stops where it likes "
        "what it has seen, mu reserved holds: every session above counts with all the releases that it may make."
    ]
    if summary.summed:
        same = "the same two if no other client and no helper is honest."
        notes.append(f"in the worst case: {same}" if local_shown else f"A wider window, or --json, also shows {same}")
    if added := summary.spent.added_delta:
        notes.append(
            f"All of them hold with an added delta of {rounded_up(added)}, that of sessions which name values."
        )
    if summary.trusted_a_server:
        notes.append("Of a session under a trusted server they hold against everybody but that server.")
    if history.whole:
        notes.append(f"Counted whole from their first line on, because no part is certain: {', '.join(history.whole)}.")
    if history.in_every_line:
        notes.append(f"Counted in every line, because their first is not known: {', '.join(history.in_every_line)}.")
    return notes


def _figures(line: ReleaseLine, summary: LedgerSummary) -> dict[str, float]:
    figures = {"mu_so_far": line.so_far.mu, "mu_reserved": line.reserved.mu}
    if summary.summed:
        worst = line.so_far.worst_case.mu, line.reserved.worst_case.mu
        figures |= dict(zip(("mu_local_so_far", "mu_local_reserved"), worst, strict=True))
    return figures


def _rounded(mu: float) -> str:
    return rounded_up(mu) if math.isfinite(mu) else "none"


def _samples(terms: Mapping[str, Any]) -> int | None:
    """Return number of samples of a release; None if it uses all, or an unknown number."""
    every = tuple(RECORDED_SELECTIONS[name] for name in ("full_batch", "shuffled", "poisson"))
    counted = terms.get("order") not in every and terms.get("clip_unit") != "update"
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
    """Exchange the noise key of a client's ledger; return how many sessions it closed.

    The ledger keeps the digest of the client's data under the key. ``key_file`` is a new file for the new key.
    """
    privatizer = privatizer_behind(node) if isinstance(node, UpdateNode) else client_of(node)[1].privatizer
    return rotate_key(node.ledger, privatizer.row_bytes, privatizer.num_rows, key_file=key_file)


DAY_S = 86400.0
_ENDLESS_DAYS = 36500.0


@dataclass(frozen=True)
class Costs:
    """Costs of one run of a client."""

    loss: Loss  # reserved by a run's first release, queries included
    releases: int  # k, the most of one run
    budget: Loss  # of all runs
    trusted: bool = False  # a trusted server adds the noise
    samples: int | None = None  # of the client; None if a run may use samples again
    batch_size: int = 1  # samples of a release
    once: bool = False  # a secret order hides the samples, which works for the first run only

    @classmethod
    def of_client(cls, client: PrivateClient) -> Costs:
        """Costs of a client with murmurfl's clients."""
        privatizer, beside = client.privatizer, client.beside
        policy, trusted = privatizer.policy, privatizer.policy.trust == "trusted-server"
        losses = [Loss.of(one.policy.mu) if trusted else one.plan.loss for one in (privatizer, *beside)]
        fresh = policy.batch_selection == "once" and policy.sample_participations == 1
        return cls(
            loss=NO_LOSS.compose(*losses),
            releases=policy.max_participations,
            budget=privatizer.admission.budget,
            trusted=trusted,
            samples=privatizer.num_samples if fresh else None,
            batch_size=policy.batch_size,
            once=policy.batch_selection == "shuffled",
        )

    @classmethod
    def of_updates(cls, policy: UpdatePolicy) -> Costs:
        """Costs of a node that runs a third-party ClientApp."""
        private = policy.privacy_policy()
        summed = policy.trust == "secure-aggregation"
        return cls(
            loss=Loss.of(policy.mu, private.plan(1).loss.worst_case.mu if summed else None),
            releases=policy.max_participations,
            budget=private.budget,
            trusted=policy.trust == "trusted-server",
        )


@dataclass(frozen=True)
class Allowance:
    """Remaining budget and samples of a client.

    This is arithmetic on the policy and on a ledger's entries, and no promise: the ledger decides, release by release.
    """

    runs: int  # that may still begin
    releases: int | None  # that fresh samples allow, over all runs; None if samples are not used up
    open_releases: int  # of the newest run, if it is open
    days: float | None  # until a run is refused or ends early for lack of samples; None if the pace is unknown
    every_days: float | None  # from one run's beginning to the next
    costs: Costs

    @property
    def state(self) -> str:
        """``failed`` if no release is possible any more, ``warning`` if no further run can begin."""
        if self.runs:
            return "ok"
        return "warning" if self.open_releases else "failed"

    def sentence(self, now: float) -> str:
        """Return the allowance in one sentence for the operator; ``now`` in seconds since 1970."""
        costs = self.costs
        each = f"of mu = {rounded_up(costs.loss.mu)} and up to {costs.releases} releases"
        runs = f"the budget allows {_counted(self.runs, 'more run')} {each}"
        parts = [runs if self.runs else "no further run can begin"]
        if self.releases is not None:
            parts.append(f"unused data allow {_counted(self.releases, 'more release')} of {costs.batch_size}")
        if self.open_releases:
            parts.append(f"the newest run may make {_counted(self.open_releases, 'more release')}")
        sentence = ", ".join(parts)
        if not self.runs:
            return f"{sentence[0].upper()}{sentence[1:]}: {_RETIRED}"
        return f"{sentence[0].upper()}{sentence[1:]}; {self._until(now)}."

    def _until(self, now: float) -> str:
        if self.days is None or self.every_days is None:
            return "until when depends on how often runs are made, which --run-every DAYS says"
        if self.days > _ENDLESS_DAYS:
            return f"at a run in {self.every_days:.3g} days that lasts for more than a hundred years"
        when = time.strftime("%Y-%m-%d", time.gmtime(now + self.days * DAY_S))
        return f"at a run in {self.every_days:.3g} days that lasts until about {when}"


_RETIRED = "a ledger's budget is never raised; new data get a ledger of their own, and these may be retired."


def allowance_of(summary: LedgerSummary, costs: Costs, run_every_days: float | None, now: float) -> Allowance:
    """Return what is left of a client's budget and samples; by default, runs begin as often as in the ledger."""
    releases = None if costs.samples is None else max(costs.samples - summary.samples_used, 0) // costs.batch_size
    # Without the one-release sessions of a mean or an evaluation
    trainings = [s for s in summary.sessions if costs.releases == 1 or s.terms.get("max_participations") != 1]
    by_budget = 0 if releases == 0 else _runs_by_budget(summary, costs)
    left = Allowance(by_budget, releases, _open_releases(trainings, releases), None, None, costs)
    begun = sorted(session.first_release for session in trainings if session.first_release is not None)
    every = run_every_days or ((begun[-1] - begun[0]) / (len(begun) - 1) / DAY_S if len(begun) > 1 else None)
    if not every:
        return left
    runs = left.runs
    if releases is not None:
        made = [session.releases for session in trainings if session.releases]
        a_run = sum(made) / len(made) if made else costs.releases
        runs = min(runs, int(releases / max(a_run, 1.0)))
    # The next run begins when it is due, at once if it is overdue.
    first = max(every - (now - begun[-1]) / DAY_S, 0.0) if begun else 0.0
    return replace(left, every_days=every, days=first + runs * every)


def _runs_by_budget(summary: LedgerSummary, costs: Costs) -> int:
    """Return how many further runs the ledger's budget and its earlier uses of samples admit."""
    if (summary.trusted_a_server and not costs.trusted) or (costs.once and summary.samples_used):
        return 0
    runs = _runs(costs.budget.assumed, summary.spent.assumed, costs.loss.assumed)
    if costs.loss.conditional:
        runs = min(runs, _runs(costs.budget.worst_case, summary.spent.worst_case, costs.loss.worst_case))
    return min(runs, 1) if costs.once else runs


def _open_releases(trainings: Sequence[SessionSummary], releases: int | None) -> int:
    """Return how many releases the last training may still make, of the ``releases`` that its samples allow."""
    if not trainings or trainings[-1].closed:
        return 0
    cap = trainings[-1].terms.get("max_participations")
    left = cap - trainings[-1].releases if isinstance(cap, int) else 0
    return max(left if releases is None else min(left, releases), 0)


def _runs(budget: Profile, reserved: Profile, each: Profile) -> int:
    """Return the number of further runs within a budget; mus add in squares, compared as the admission rule does."""
    if not (math.isfinite(reserved.mu) and math.isfinite(each.mu) and each.mu > 0):
        return 0
    if math.isinf(budget.mu):
        return int(_ENDLESS_DAYS)
    room = (budget.mu * (1 + ROUNDING)) ** 2 - reserved.mu**2
    return max(int(room / each.mu**2), 0)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
