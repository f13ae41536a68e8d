"""The runs that lie in folders, finished or not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...privacy import Guarantee
from ..runs.run_files import CHECKPOINT_NAME, FAILURE_NAME, RESULT_NAME
from .recorded import RecordedRun, ReportError, what_is_there

_FILES = {RESULT_NAME, FAILURE_NAME, CHECKPOINT_NAME}
_DEEPEST = 4
"""Folders of folders of runs that are looked through."""


@dataclass(frozen=True)
class FoundRun:
    """A run's folder.

    Parameters
    ----------
    folder : Path
    date : datetime
        When its result was written; of a run without one, when its folder last changed.
    run : RecordedRun or None
        Its files, if it has a result that can be read.
    problem : str
        Why there is no result, in words; empty where there is one.
    """

    folder: Path
    date: datetime
    run: RecordedRun | None
    problem: str = ""

    @property
    def guarantee(self) -> Guarantee | None:
        """What the run guarantees, as its result has it; None without a result or without its parts."""
        parts: dict[str, Any] | None = self.run.document.get("privacy") if self.run else None
        if not parts:
            return None
        names = ("delta", "mechanism", "trust", "unit", "relation", "covers", "min_honest")
        summed = parts.get("min_honest") is not None
        return Guarantee(
            _or_infinite(parts["mu"]),
            mu_local=_or_infinite(parts.get("mu_local")) if summed else None,
            **{name: parts[name] for name in names if name in parts},
        )

    def document(self) -> dict[str, Any]:
        """What matters of it, as plain values; its epsilon has its sentence beside it."""
        told: dict[str, Any] = {
            "folder": str(self.folder),
            "date": self.date.isoformat(timespec="seconds"),
            "finished": self.run is not None,
        }
        if self.run is None:
            return {**told, "problem": self.problem}
        document = self.run.document
        config, twin = document["config"], document.get("without_noise") or {}
        return {
            **told,
            "strategy": config["strategy"],
            "task": config["task"],
            "trust": (document.get("privacy") or {}).get("trust"),
            "unit": (document.get("privacy") or {}).get("unit"),
            "num_clients": document["num_clients"],
            "seed": config.get("seed"),
            **{name: document.get(name) for name in ("mu", "epsilon", "delta", "epsilon_local", "guarantee")},
            **{name: document.get(name) for name in ("accuracy", "auc", "loss")},
            "accuracy_without_noise": twin.get("accuracy"),
        }


def _or_infinite(mu: float | None) -> float:
    return float("inf") if mu is None else mu


def find_runs(folders: Sequence[Path]) -> list[FoundRun]:
    """The runs in folders and in the folders below them, the newest last.

    Parameters
    ----------
    folders : sequence of Path
        Each that of a run, or one that holds folders of runs.

    Raises
    ------
    ReportError
        If there is no such folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"Expected a folder of runs, got {folder}: there is no such folder.")
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
    changed = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    try:
        run = RecordedRun.read(folder)
    except ReportError as error:
        problem = str(error) if (folder / RESULT_NAME).is_file() else what_is_there(folder)
        return FoundRun(folder, changed, None, problem)
    return FoundRun(folder, datetime.fromisoformat(run.document["date"]), run)


def expanded(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs, with every finished run in place of a folder that holds several.

    Parameters
    ----------
    folders : sequence of Path
        A folder without any run in it stays, so that whoever reads it says what is wrong.
    """
    made: list[Path] = []
    for folder in folders:
        inside = (
            [] if _is_run(folder) or not folder.is_dir() else [one.folder for one in find_runs([folder]) if one.run]
        )
        made += inside or [folder]
    return made


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)
