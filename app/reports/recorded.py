"""A run as its files tell it (:mod:`~murmurfl.app.runs.run_files`); nothing in them is more than the server knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import MurmurflError, gdp_epsilon
from ..runs.run_files import CHECKPOINT_NAME, FAILURE_NAME, FORMAT, MACHINES_NAME, RESULT_NAME, WORKED_OUT
from ..settings.run_config import RunConfig

_NEEDED = ("accuracy", "loss", "mu", "epsilon", "delta", "guarantee", "rounds", "num_clients", "config", "per_round")
_MOST_ENTRIES = 50_000_000
"""Of a table of machines and rounds."""
_OF_THE_FOLDER = ("run-name", "out-dir")
"""Keys that say where a run lies, so that they tell nothing of what was set."""


class ReportError(MurmurflError):
    """A folder is no run that could be reported."""


@dataclass(frozen=True)
class RecordedRun:
    """A run as its files tell it.

    Parameters
    ----------
    name : str
        Its folder's.
    document : mapping
        ``result.json``.
    machines : mapping or None
        ``machines.json``; None for a run that wrote none.
    """

    name: str
    document: Mapping[str, Any]
    machines: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """A run's files.

        Raises
        ------
        ReportError
            If the folder holds no finished run, or its files are damaged or of another format.
        """
        path = folder / RESULT_NAME
        if not path.is_file():
            raise ReportError(f"Expected the folder of a finished run, got {folder}: {what_is_there(folder)}.")
        document = _json(path)
        missing = [key for key in _NEEDED if key not in document]
        if missing:
            raise ReportError(
                f"Expected the result of a run in {path}, got a document without {', '.join(missing)}: is it the "
                "result.json of `murmurfl run`?"
            )
        if (version := document.get("format")) != FORMAT:
            raise ReportError(
                f"Expected the result of a run of format {FORMAT} in {path}, got one of format {version!r}. Report it "
                "with the version of murmurfl that wrote it."
            )
        machines = folder / MACHINES_NAME
        return cls(folder.resolve().name, document, _json(machines) if machines.is_file() else None)

    @property
    def rounds(self) -> list[int]:
        """The rounds, in order."""
        return [int(entry["round"]) for entry in self.document["per_round"]]

    def curve(self, measure: str) -> tuple[list[int], list[float]]:
        """Rounds with a central evaluation, and what it gave."""
        entries = [entry for entry in self.document["per_round"] if entry[measure] is not None]
        return [entry["round"] for entry in entries], [float(entry[measure]) for entry in entries]

    @property
    def statements(self) -> Mapping[str, Mapping[str, Any]]:
        """What machines say of themselves, by name; empty where they are too many for that."""
        return self.document.get("machines") or {}

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Of very many machines those that say the same, together."""
        return self.document.get("machine_groups") or []

    @cached_property
    def names(self) -> list[str]:
        """All machines that are known, in the order of their names."""
        asked = (name for round_ in (self.machines or {"rounds": {}})["rounds"].values() for name in round_)
        known = {*self.statements, *asked}
        return sorted(known, key=lambda name: (len(name), name))

    @cached_property
    def participation(self) -> NDArray[np.int32] | None:
        """Shape (machines, rounds): the release aggregated, 0 asked in vain, -1 not asked; None if not recorded.

        None too where machines and rounds are so many that no picture shows them.
        """
        if not self.machines or not self.machines["rounds"]:
            return None
        if len(self.names) * len(self.rounds) > _MOST_ENTRIES:
            return None
        table = np.full((len(self.names), len(self.rounds)), -1, dtype=np.int32)
        rows = {name: row for row, name in enumerate(self.names)}
        columns = {number: column for column, number in enumerate(self.rounds)}
        for number, asked in self.machines["rounds"].items():
            for name, release in asked.items():
                table[rows[name], columns[int(number)]] = release or 0
        return table

    @cached_property
    def releases(self) -> NDArray[np.int32] | None:
        """Shape (machines, rounds): releases made up to each round, never too few; None if not recorded.

        A request without an aggregated answer counts as a release, until a later one, or what the machine states in
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
        limit = np.array([int(statements.get(name, {}).get("releases", np.iinfo(np.int32).max)) for name in self.names])
        for column in reversed(range(table.shape[1])):
            counts[:, column] = np.minimum(counts[:, column], limit)
            limit = np.minimum(limit, counts[:, column])
            limit = np.where(table[:, column] > 0, limit - 1, limit)
        return counts

    @cached_property
    def epsilons(self) -> NDArray[np.float64] | None:
        """Shape (machines, rounds): epsilon at delta of the releases made; NaN where a machine's noise is not known.

        Notes
        -----
        Bookkeeping (:meth:`murmurfl.privacy.NoisePlan.spent_mu`), rounded up in the number of releases; the guarantee
        is the run's epsilon.
        """
        counts = self.releases
        if counts is None or not self.machines or not self.machines["streams"]:
            return None
        rows = {name: row for row, name in enumerate(self.names)}
        epsilons = np.full(counts.shape, np.nan)
        for stream in self.machines["streams"]:
            # Of very many machines no names are recorded: if all have one noise, it is theirs.
            named = rows if len(self.machines["streams"]) == 1 and not stream["machines"] else stream["machines"]
            chosen = [rows[name] for name in named if name in rows]
            known = np.array(stream["releases"])
            curve = np.array([gdp_epsilon(mu, self.document["delta"]) for mu in stream["mu"]])
            places = np.minimum(np.searchsorted(known, counts[chosen]), len(known) - 1)
            epsilons[chosen] = curve[places]
        return epsilons

    @property
    def totals(self) -> dict[str, int]:
        """What became of all requests."""
        history = self.document["per_round"]
        return {
            "asked": sum(entry["asked"] for entry in history),
            "aggregated": sum(entry["aggregated"] for entry in history),
            "lost": sum(entry["lost"] for entry in history),
            "refused": sum(sum(entry["refused"].values()) for entry in history),
            "late": sum(entry["late"] for entry in history),
            "malformed": sum(entry["malformed"] for entry in history),
        }

    @property
    def settings(self) -> dict[str, tuple[str, bool]]:
        """Every key of the configuration: its value, and whether it was set to other than the default."""
        default = RunConfig().to_mapping()
        config = self.document["config"]
        # What an earlier murmurfl worked out tells nothing of what was set.
        asked = {**config, **dict.fromkeys(WORKED_OUT), **(self.document.get("asked") or {})}
        return {
            key: (
                setting_text(value),
                key not in _OF_THE_FOLDER and asked[key] is not None and asked[key] != default.get(key),
            )
            for key, value in config.items()
        }


def what_is_there(folder: Path) -> str:
    """Why a folder is no finished run, in words."""
    if not folder.exists():
        return "there is nothing"
    if (folder / FAILURE_NAME).is_file():
        return f"its run failed ({_json(folder / FAILURE_NAME).get('reason', 'no reason given')})"
    if (folder / CHECKPOINT_NAME).is_file():
        return "its run has not ended, there is only a checkpoint"
    return f"there is no {RESULT_NAME}"


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"Expected JSON in {path}, got: {error}.") from error
    if not isinstance(document, dict):
        raise ReportError(f"Expected a JSON object in {path}, got {type(document).__name__}.")
    return document


def setting_text(value: Any) -> str:
    """A value of the configuration as a page shows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
