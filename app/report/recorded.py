"""``murmurfl report``: what runs did and what they cost, as one HTML page that needs nothing but itself.

Everything comes from the files a run leaves (:mod:`.record`). Nothing in them is more than the server knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import MurmurflError, gdp_epsilon, rounded_up
from ..config import RunConfig
from ..record import CHECKPOINT_NAME, FAILURE_NAME, MACHINES_NAME, RESULT_NAME
from ..summary import loss_text, shown_accuracy
from .page import page
from .plots import compared_plots, run_plots

PAGE_NAME = "index.html"
BOOKKEEPING = (
    "Lines are bookkeeping: what the releases made so far would cost had their number been fixed in advance; a request "
    "without an answer counts as a release. What is guaranteed is the dashed line, from the first round on."
)
_NEEDED = ("accuracy", "loss", "mu", "epsilon", "delta", "guarantee", "rounds", "num_clients", "config", "per_round")
_WORKED_OUT = (
    *("num-rounds", "clip-norm", "learning-rate", "diameter", "schedule", "sampling"),
    *("run-name", "out-dir", "data-root"),
)
_MOST_MACHINES = 1000
"""Machines that a page lists; the first of them."""


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
        ``machines.json``; None for a run of a version that did not write it.
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
            If the folder holds no finished run, or its files are damaged.
        """
        path = folder / RESULT_NAME
        if not path.is_file():
            raise ReportError(f"Expected the folder of a finished run, got {folder}: {_what_is_there(folder)}.")
        document = _json(path)
        missing = [key for key in _NEEDED if key not in document]
        if missing:
            raise ReportError(
                f"Expected the result of a run in {path}, got a document without {', '.join(missing)}: is it the "
                "result.json of `murmurfl run`?"
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

    @cached_property
    def names(self) -> list[str]:
        """All machines that are known, in the order of their names."""
        asked = (name for round_ in (self.machines or {"rounds": {}})["rounds"].values() for name in round_)
        known = {*self.document.get("machines", {}), *asked}
        return sorted(known, key=lambda name: (len(name), name))

    @cached_property
    def participation(self) -> NDArray[np.int32] | None:
        """Shape (machines, rounds): the release aggregated, 0 asked in vain, -1 not asked; None if not recorded."""
        if not self.machines or not self.machines["rounds"]:
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
        statements = self.document.get("machines", {})
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
        **Formal guarantees.** Bookkeeping (:meth:`murmurfl.privacy.NoisePlan.spent_mu`), rounded up in the number of
        releases; the guarantee is the run's epsilon.
        """
        counts = self.releases
        if counts is None or not self.machines or not self.machines["streams"]:
            return None
        rows = {name: row for row, name in enumerate(self.names)}
        epsilons = np.full(counts.shape, np.nan)
        for stream in self.machines["streams"]:
            chosen = [rows[name] for name in stream["machines"] if name in rows]
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
        automatic = {
            "num-rounds",
            "clip-norm",
            "learning-rate",
            "diameter",
            "schedule",
            "sampling",
            "run-name",
            "out-dir",
        }
        return {
            key: (_text(value), key not in automatic and value != default.get(key))
            for key, value in self.document["config"].items()
        }


def make_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of runs into a folder: ``index.html``, and each plot as PNG and SVG beside it.

    Parameters
    ----------
    folders : sequence of Path
        The runs' folders, each as ``murmurfl run`` left it.
    out : Path
        Made if need be.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ReportError
        If a folder is no finished run, or none is given.
    """
    if not folders:
        raise ReportError("Expected the folder of at least one run, got none.")
    runs = _named([RecordedRun.read(folder) for folder in folders])
    out.mkdir(parents=True, exist_ok=True)
    compared = compared_plots(runs) if len(runs) > 1 else []
    plots = [run_plots(run) for run in runs]
    text = page(
        compared=[plot.inline("runs") for plot in compared],
        summary=[_summary(run) for run in runs],
        differing=_differing(runs),
        runs=[
            {
                "name": run.name,
                "guarantee": run.document["guarantee"],
                "tiles": _tiles(run),
                "plots": [plot.inline(f"run{i}") for plot in made],
                "refusals": _refusals(run),
                "training": run.document.get("training"),
                "machines": _machines(run),
                "left_out": max(len(run.names) - _MOST_MACHINES, 0),
                "settings": run.settings,
                "recorded": run.participation is not None,
            }
            for i, (run, made) in enumerate(zip(runs, plots, strict=True))
        ],
    )
    for plot in compared:
        plot.write(out, "runs")
    for run, made in zip(runs, plots, strict=True):
        for plot in made:
            plot.write(out, run.name)
    path = out / PAGE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _what_is_there(folder: Path) -> str:
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


def _named(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Names that are one of a kind: they name the plots' files."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        name = run.name if seen[run.name] == 1 else f"{run.name}-{seen[run.name]}"
        named.append(RecordedRun(name, run.document, run.machines))
    return named


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    document, totals = run.document, run.totals
    accuracy = document["accuracy"]
    return [
        *([("test accuracy", shown_accuracy(document))] if accuracy is not None else []),
        ("test loss", loss_text(document["loss"])),
        (f"ε at δ = {document['delta']:g}", _shown(document["epsilon"])),
        ("μ", _shown(document["mu"])),
        ("rounds", f"{document['rounds']:,}"),
        ("machines", f"{document['num_clients']:,}"),
        ("releases made", f"{document.get('releases', 0):,}"),
        ("aggregated", f"{totals['aggregated']:,} of {totals['asked']:,}"),
        *((name, f"{totals[name]:,}") for name in ("lost", "refused", "late", "malformed")),
    ]


def _summary(run: RecordedRun) -> dict[str, str]:
    document, totals = run.document, run.totals
    return {
        "run": run.name,
        "strategy": document["config"]["strategy"],
        "accuracy": shown_accuracy(document) if document["accuracy"] is not None else "none",
        "loss": loss_text(document["loss"]),
        "μ": _shown(document["mu"]),
        "ε": _shown(document["epsilon"]),
        "rounds": f"{document['rounds']:,}",
        "machines": f"{document['num_clients']:,}",
        "lost": f"{totals['lost']:,}",
        "refused": f"{totals['refused']:,}",
    }


def _differing(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """The settings in which the runs differ."""
    if len(runs) < 2:
        return {}
    keys = dict.fromkeys(key for run in runs for key in run.document["config"])
    rows = {key: [_text(run.document["config"].get(key, "")) for run in runs] for key in keys if key != "run-name"}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _refusals(run: RecordedRun) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for entry in run.document["per_round"]:
        for reason, count in entry["refused"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    return dict(sorted(reasons.items()))


def _machines(run: RecordedRun) -> list[dict[str, str]]:
    rows = []
    delta = run.document["delta"]
    for name in run.names[:_MOST_MACHINES]:
        statement = run.document.get("machines", {}).get(name)
        if statement is None:
            rows.append({"machine": name, "releases": "did not say"})
            continue
        spent, guaranteed = statement["mu-spent"], statement["mu-guaranteed"]
        rows.append(
            {
                "machine": name,
                "releases": f"{statement['releases']} of {statement['max-participations']}",
                "samples used": f"{statement['samples-used']:,}",
                "noise std": _number(statement.get("noise-std")),
                "mechanism": str(statement.get("mechanism", "")),
                "μ of its releases": _shown(spent),
                "ε of its releases": _shown(None if spent is None else gdp_epsilon(spent, delta)),
                "μ guaranteed": _shown(guaranteed),
                "ε guaranteed": _shown(None if guaranteed is None else gdp_epsilon(guaranteed, delta)),
            }
        )
    return rows


def _shown(value: float | None) -> str:
    return rounded_up(math.inf if value is None else value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
