"""The runs that lie in folders, finished or not, and what is known of who took part in them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.gdp import gdp_epsilon
from ..models.trained_model import CARD, MODEL, TrainedModel
from ..runs.outcome import CHECKPOINT_NAME, FAILURE_NAME, RESULT_NAME, Outcome, ReportError, read_json, what_is_there
from ..runs.result import CLIENTS_NAME

_FILES = {RESULT_NAME, FAILURE_NAME, CHECKPOINT_NAME}
_DEEPEST = 4
"""Folders of folders of runs that are looked through."""
_MOST_ENTRIES = 50_000_000
"""Largest table of clients and rounds that is drawn."""


@dataclass(frozen=True)
class RecordedRun:
    """A finished run as its files tell it; nothing in them is more than the server knows.

    Parameters
    ----------
    name : str
        Its folder's.
    outcome : Outcome
        ``result.json``.
    clients : mapping or None
        ``clients.json``; None for a run that wrote none.
    model : TrainedModel or None
        The model in its folder; None of a run that saved none there.
    """

    name: str
    outcome: Outcome
    clients: Mapping[str, Any] | None
    model: TrainedModel | None = None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Read a run's files."""
        outcome, clients = Outcome.read(folder), folder / CLIENTS_NAME
        model = TrainedModel.read(folder / MODEL) if (folder / MODEL / CARD).is_file() else None
        return cls(folder.resolve().name, outcome, read_json(clients) if clients.is_file() else None, model)

    @property
    def rounds(self) -> list[int]:
        """The rounds, in order."""
        return [one.round for one in self.outcome.per_round]

    def curve(self, measure: str) -> tuple[list[int], list[float]]:
        """Return the rounds with a central evaluation, and its results."""
        entries = [one for one in self.outcome.per_round if getattr(one, measure) is not None]
        return [one.round for one in entries], [getattr(one, measure) for one in entries]

    @property
    def statements(self) -> Mapping[str, Mapping[str, Any]]:
        """The statements of clients, by name; empty where they are too many for that."""
        return self.outcome.clients or {}

    @cached_property
    def names(self) -> list[str]:
        """The names of all known clients, in order."""
        asked = (name for round_ in (self.clients or {"rounds": {}})["rounds"].values() for name in round_)
        known = {*self.statements, *asked}
        return sorted(known, key=lambda name: (len(name), name))

    @cached_property
    def participation(self) -> NDArray[np.int32] | None:
        """Shape (clients, rounds): the release aggregated, 0 asked in vain, -1 not asked; None if not recorded.

        None too where clients and rounds are so many that no picture shows them.
        """
        if not self.clients or not self.clients["rounds"]:
            return None
        if len(self.names) * len(self.rounds) > _MOST_ENTRIES:
            return None
        table = np.full((len(self.names), len(self.rounds)), -1, dtype=np.int32)
        rows = {name: row for row, name in enumerate(self.names)}
        columns = {number: column for column, number in enumerate(self.rounds)}
        for number, asked in self.clients["rounds"].items():
            for name, release in asked.items():
                table[rows[name], columns[int(number)]] = _count(release or 0)
        return table

    @cached_property
    def releases(self) -> NDArray[np.int32] | None:
        """Shape (clients, rounds): releases made up to each round, never too few; None if not recorded.

        A request without an aggregated answer counts as a release, until a later one, or what the client states in
        the end, says that it was none.
        """
        table = self.participation
        if table is None:
            return None
        counts = np.zeros(table.shape, dtype=np.int32)
        made = np.zeros(len(table), dtype=np.int32)
        for column in range(table.shape[1]):
            asked = table[:, column]
            made = np.where(asked > 0, asked, made + (asked == 0))
            counts[:, column] = made
        statements = self.statements
        limit = np.array([_count(statements.get(name, {}).get("releases", _LARGEST_COUNT)) for name in self.names])
        for column in reversed(range(table.shape[1])):
            counts[:, column] = np.minimum(counts[:, column], limit)
            limit = np.minimum(limit, counts[:, column])
            limit = np.where(table[:, column] > 0, limit - 1, limit)
        return counts

    @cached_property
    def epsilons(self) -> NDArray[np.float64] | None:
        """Shape (clients, rounds): epsilon at delta of the releases made; NaN where a client's noise is not known.

        Notes
        -----
        Bookkeeping (:meth:`murmurfl.privacy.NoisePlan.spent_mu`), rounded up in the number of releases; the guarantee
        is the run's epsilon.
        """
        counts = self.releases
        if counts is None or not self.clients or not self.clients["streams"]:
            return None
        rows = {name: row for row, name in enumerate(self.names)}
        epsilons = np.full(counts.shape, np.nan)
        for stream in self.clients["streams"]:
            # Of very many clients no names are recorded: if all have one noise, it is theirs.
            named = rows if len(self.clients["streams"]) == 1 and not stream["clients"] else stream["clients"]
            chosen = [rows[name] for name in named if name in rows]
            known = np.array(stream["releases"])
            curve = np.array([gdp_epsilon(mu, self.outcome.delta) for mu in stream["mu"]])
            places = np.minimum(np.searchsorted(known, counts[chosen]), len(known) - 1)
            epsilons[chosen] = curve[places]
        return epsilons


_LARGEST_COUNT = np.iinfo(np.int32).max


def _count(value: object) -> int:
    """Return a number that a client stated as one that fits into a table; results of older versions have any."""
    number = value if isinstance(value, int | float) and not math.isnan(value) else 0
    return int(min(max(number, 0), _LARGEST_COUNT))


@dataclass(frozen=True)
class FoundRun:
    """A run's folder.

    Parameters
    ----------
    date : datetime
        When its result was written; of a run without one, when its folder last changed.
    outcome : Outcome or None
        Its result, if it has one that can be read.
    problem : str
        Why there is none, in words; otherwise empty.
    """

    folder: Path
    date: datetime
    outcome: Outcome | None
    problem: str = ""

    def document(self) -> dict[str, Any]:
        """Return the run in a few plain values; its epsilon has its sentence next to it."""
        date, outcome = self.date.isoformat(timespec="seconds"), self.outcome
        entries = {"folder": str(self.folder), "date": date, "finished": outcome is not None}
        if outcome is None:
            return {**entries, "problem": self.problem}
        figures = ("mu", "epsilon", "delta", "epsilon_local", "guarantee", "accuracy", "auc", "loss")
        return {
            **entries,
            "strategy": outcome.config["strategy"],
            "task": outcome.config["task"],
            **{name: getattr(outcome.privacy, name, None) for name in ("trust", "unit")},
            "num_clients": outcome.num_clients,
            "seed": outcome.config.get("seed"),
            **{name: getattr(outcome, name) for name in figures},
            "accuracy_without_noise": None if outcome.without_noise is None else outcome.without_noise.accuracy,
            "accuracy_alone": None if outcome.alone is None else outcome.alone.accuracy,
        }


def find_runs(folders: Sequence[Path]) -> list[FoundRun]:
    """Find the runs in folders and in the folders below them, the newest last."""
    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"Expected a folder of runs, got {folder}: there is no such folder.", kind="not-found")
    found = {path.resolve(): path for folder in folders for path in _run_folders(folder, _DEEPEST)}
    return sorted(map(_found, found.values()), key=lambda one: (one.date, str(one.folder)))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run's files, at most so deep; nothing is looked for inside of one."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if _FILES & {entry.name for entry in entries}:
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _run_folders(folder / entry.name, depth - 1)


def _found(folder: Path) -> FoundRun:
    try:
        outcome = Outcome.read(folder)
    except ReportError as error:
        problem = str(error) if (folder / RESULT_NAME).is_file() else what_is_there(folder)
        return FoundRun(folder, datetime.fromtimestamp(folder.stat().st_mtime, UTC), None, problem)
    return FoundRun(folder, datetime.fromisoformat(outcome.date), outcome)


def expanded(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs, with every finished run in place of a folder that holds several.

    A folder without any run in it stays, so that whoever reads it says what is wrong.
    """
    made: list[Path] = []
    for folder in folders:
        several = folder.is_dir() and not any((folder / name).is_file() for name in _FILES)
        made += ([one.folder for one in find_runs([folder]) if one.outcome] if several else []) or [folder]
    return made
