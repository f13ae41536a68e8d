"""What a run's files say of its machines: each by its name, or of very many what groups of them have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...privacy import PrivacyPolicy
from .experiment import Experiment
from .participation import Participation
from .result import RunResult
from .machine_statements import MOST_NAMED, statement_groups
from ..data.shards import shard_sizes

_MOST_POINTS = 200


def stated(result: RunResult) -> dict[str, Any]:
    """What machines say of themselves, as ``result.json`` has it: each by name, or in groups that say the same."""
    statements = result.statements
    if len(statements) <= MOST_NAMED:
        # JSON has no infinity: null where nothing is guaranteed.
        return {"machines": {name: finite(entries) for name, entries in statements.items()}, "machine_groups": None}
    groups = [
        {"machines": group.count, "first": group.first, "statement": finite(group.statement)}
        for group in statement_groups(statements)
    ]
    return {"machines": None, "machine_groups": groups}


def releases_made(result: RunResult) -> int:
    """How many releases machines say they made, all together."""
    return sum(group.count * int(group.statement["releases"]) for group in statement_groups(result.statements))


def machines_document(result: RunResult) -> dict[str, Any]:
    """The contents of ``machines.json``: who was asked when, and what a machine's releases cost one after the other.

    Notes
    -----
    Nothing that a server does not know: whom it asked, which release of whose it aggregated, and arithmetic on the
    policies the machines state. ``mu`` is bookkeeping, true of a number of releases fixed in advance
    (:meth:`murmurfl.privacy.NoisePlan.spent_mu`).
    """
    return {"rounds": dict(_rounds(result)), "streams": _streams(result)}


def write_machines(result: RunResult, path: Path) -> None:
    """Write :func:`machines_document`, a round at a time: all rounds of many machines need not be in memory at once.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    with path.open("w") as file:
        file.write('{"rounds": {')
        for number, (server_round, asked) in enumerate(_rounds(result)):
            file.write(f"{', ' if number else ''}{json.dumps(server_round)}: {json.dumps(asked)}")
        file.write(f'}}, "streams": {json.dumps(_streams(result), allow_nan=False)}}}\n')


def _rounds(result: RunResult) -> Iterator[tuple[str, dict[str, int | None]]]:
    for progress in result.progress:
        asked = progress.machines
        if asked:
            plain = asked.plain() if isinstance(asked, Participation) else dict(asked)
            yield str(progress.report.server_round), plain


def _streams(result: RunResult) -> list[dict[str, Any]]:
    """What releases cost, of every kind of noise; the names of its machines, or of very many how many they are."""
    streams: list[dict[str, Any]] = []
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    experiment = result.experiment
    size = experiment.method.release_size(experiment)
    for plan, policy in ((policy.plan(size), policy) for policy in _policies(experiment)):
        if not math.isfinite(plan.mu):
            continue
        cap = policy.max_participations
        releases = sorted({round(cap * i / _MOST_POINTS) for i in range(_MOST_POINTS + 1)} | {0, 1, cap})
        key = (plan.noise_std, plan.sensitivity, cap, policy.mechanism)
        if key in known:
            continue
        known[key] = {
            "machines": [],
            "count": 0,
            "noise_std": plan.noise_std,
            "sensitivity": plan.sensitivity,
            "releases": releases,
            "mu": [plan.spent_mu(k) for k in releases],
            "prefix_std": [plan.noise_std * plan.mechanism.row_std(k) if k else 0.0 for k in releases],
        }
        streams.append(known[key])
    for group in statement_groups(result.statements):
        if (stream := known.get(_stream_of(group.statement))) is not None:
            stream["count"] += group.count
    if len(result.statements) <= MOST_NAMED:
        for name, statement in result.statements.items():
            if (stream := known.get(_stream_of(statement))) is not None:
                stream["machines"].append(name)
    return [stream for stream in streams if stream["count"]]


def _stream_of(statement: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(statement.get(key) for key in ("noise-std", "sensitivity", "max-participations", "mechanism"))


def _policies(experiment: Experiment) -> list[PrivacyPolicy]:
    sizes = {size: i for i, size in enumerate(shard_sizes(experiment.shards))}
    return [experiment.policy(i) for i in sizes.values()]


def finite(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries as JSON can have them: null for a figure that is infinite."""
    return {key: finite_or_none(value) for key, value in entries.items()}


def finite_or_none(value: Any) -> Any:
    """A value, or None for a float that is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
