"""The files of a run: ``result.json``, ``machines.json``, a plot and the model."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...privacy import ConfigurationError
from ..data.shards import shard_sizes
from ..settings.run_config import check_run_name
from .machine_statements import is_named, statement_groups
from .outcome import CHECKPOINT_NAME, FAILURE_NAME, RESULT_NAME, Outcome
from .progress import Participation
from .result import RunResult
from .run_summary import plot_accuracy

MACHINES_NAME, PICTURE_NAME, END_NAME = "machines.json", "accuracy.png", "end"

_MOST_POINTS = 200


@contextmanager
def folder_for(out: Path, name: str | None, beginning: str) -> Iterator[Path]:
    """The folder of a run: ``out / name``, or without a name a new one named by the time.

    The latter is unique even among runs that start in the same second, and is removed if it stays empty.

    Raises
    ------
    ConfigurationError
        If the name would leave ``out`` (:func:`~murmurfl.app.settings.run_config.check_run_name`).
    """
    if name is not None:
        check_run_name(name)
        yield out / name
        return
    with new_folder(out / f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}") as folder:
        yield folder


@contextmanager
def new_folder(wanted: Path) -> Iterator[Path]:
    """A new folder: the wanted one, or with a number behind its name; removed if it stays empty."""
    number, folder, made = 1, wanted, False
    while not made:
        try:
            folder.mkdir(parents=True)
            made = True
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def write_record(result: RunResult, folder: Path, *, picture: bool = True) -> dict[str, Any]:
    """Write what a run leaves into a folder, its ``picture`` too; the contents of ``result.json`` are returned."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "model.npz", **result.arrays)
    if picture:
        plot_accuracy(result.outcome, folder / PICTURE_NAME)
    write_machines(result, folder / MACHINES_NAME)
    write_outcome(result.outcome, folder)  # last: whoever finds a result.json finds a finished run
    return result.outcome.document()


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Write ``result.json``, whole or not at all, and remove what an earlier try left."""
    temporary = folder / f"{RESULT_NAME}.part"
    temporary.write_text(json.dumps(outcome.document(), indent=2, allow_nan=False) + "\n")
    temporary.replace(folder / RESULT_NAME)
    for name in (FAILURE_NAME, END_NAME):
        (folder / name).unlink(missing_ok=True)


def write_failure(error: Exception, folder: Path) -> None:
    """Leave the reason why a run ended without a result in ``failure.json``; its checkpoint stays where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT_NAME
    document = {"reason": str(error), "checkpoint": str(checkpoint) if checkpoint.exists() else None}
    (folder / FAILURE_NAME).write_text(json.dumps(document, indent=2) + "\n")


def ask_to_end(folder: Path) -> None:
    """Ask the run on real machines that writes into a folder to end after its round, with its model so far.

    Raises
    ------
    ConfigurationError
        If no such run is under way there.
    """
    if not (folder / CHECKPOINT_NAME).exists() or (folder / RESULT_NAME).exists():
        raise ConfigurationError(
            f"Expected the folder of a run on real machines that has ended a round and goes on, got {folder}: name "
            "OUT-DIR/RUN-NAME of the run, on the server."
        )
    (folder / END_NAME).touch(mode=0o600)


def machines_document(result: RunResult) -> dict[str, Any]:
    """The contents of ``machines.json``: who was asked when, and what a machine's releases cost one after the other.

    Notes
    -----
    A server knows all of it: whom it asked, whose release it aggregated, and the policies that machines state. ``mu``
    is bookkeeping, true of a number of releases fixed in advance (:meth:`murmurfl.privacy.NoisePlan.spent_mu`).
    """
    return {"rounds": dict(_rounds(result)), "streams": _streams(result)}


def write_machines(result: RunResult, path: Path) -> None:
    """Write :func:`machines_document`, a round at a time: all rounds of many machines need not be in memory at once."""
    with path.open("w") as file:
        file.write('{"rounds": {')
        for number, (server_round, asked) in enumerate(_rounds(result)):
            file.write(f"{', ' if number else ''}{json.dumps(server_round)}: {json.dumps(asked)}")
        file.write(f'}}, "streams": {json.dumps(_streams(result), allow_nan=False)}}}\n')


def _rounds(result: RunResult) -> Iterator[tuple[str, dict[str, int | None]]]:
    for progress in result.progress:
        if asked := progress.machines:
            plain = asked.plain() if isinstance(asked, Participation) else dict(asked)
            yield str(progress.report.server_round), plain


def _streams(result: RunResult) -> list[dict[str, Any]]:
    """The cost of releases for every kind of noise, with the names of its machines, or of very many their number."""
    streams: dict[tuple[Any, ...], dict[str, Any]] = {}
    experiment = result.experiment
    size = experiment.method.release_size(experiment)
    machines = {samples: machine for machine, samples in enumerate(shard_sizes(experiment.shards))}.values()
    for policy in map(experiment.policy, machines):
        plan, cap = policy.plan(size), policy.max_participations
        key = (plan.noise_std, plan.sensitivity, cap, policy.mechanism)
        if not math.isfinite(plan.mu) or key in streams:
            continue
        releases = sorted({round(cap * i / _MOST_POINTS) for i in range(_MOST_POINTS + 1)} | {0, 1, cap})
        streams[key] = {
            "machines": [],
            "count": 0,
            "noise_std": plan.noise_std,
            "sensitivity": plan.sensitivity,
            "releases": releases,
            "mu": [plan.spent_mu(k) for k in releases],
            "prefix_std": [plan.noise_std * plan.mechanism.row_std(k) if k else 0.0 for k in releases],
        }
    for group in statement_groups(result.statements):
        if (stream := streams.get(_stream_of(group.statement))) is not None:
            stream["count"] += group.count
    if is_named(result.statements):
        for name, statement in result.statements.items():
            if (stream := streams.get(_stream_of(statement))) is not None:
                stream["machines"].append(name)
    return [stream for stream in streams.values() if stream["count"]]


def _stream_of(statement: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(statement.get(key) for key in ("noise-std", "sensitivity", "max-participations", "mechanism"))
