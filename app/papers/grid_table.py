"""The table of a grid: for each kind of data and mu, every strategy in the order of how good it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...privacy import rounded_up
from ..methods.auto_method import AUTO
from ..reports.table import Column, Table, statistics
from ..settings.run_config import RunConfig
from .kind import TableKind, Trial

_AUC = "auc"
_TABULAR = ("credit-default", "recidivism")
"""Tasks whose classes are so unequal that accuracy says little."""


class GridTable(TableKind):
    """What ``auto`` took beside the best of the grid, and every algorithm of each cell."""

    name = "grid"
    sentence = "how good every strategy is on the same data at the same mu, and how far behind the best"
    digits = 5
    indent = None

    columns = (
        Column("data", "what was learnt, and on how many machines", label=True),
        Column("mu", "what every run of the line guarantees, in the terms above", form=rounded_up),
        Column("epsilon", "the same at delta", form=rounded_up),
        Column("auto took", "the strategy that was chosen from sizes alone", "took"),
        Column("score", "test accuracy in percent, or AUC x 100; mean over seeds", form=".1f", spread="± std"),
        Column("best of the grid", "what else was run and scored highest", "best"),
        Column("its score", "in the same terms", "best score", ".1f", spread="± best"),
        Column("behind", "how many points the best has more", form=".1f"),
    )
    grid_columns = (
        *columns[:3],
        Column("algorithm", "what was run; for auto, what it took", label=True),
        columns[4],
        Column("behind", "how many points the best of the data and the mu has more", form=".1f"),
        Column("rounds", "T"),
    )

    def curves(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The AUC at the end, where there are two classes, and the number of rounds."""
        kept = {"rounds-made": {"rounds": [document["rounds"]], "values": [float(document["rounds"])]}}
        auc = document.get(_AUC)
        return kept if auc is None else {**kept, _AUC: {"rounds": [document["rounds"]], "values": [auc]}}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The score and the rounds; of ``auto``, the settings of what it took: captions are about those."""
        measure = _AUC if best.config.task in _TABULAR else "accuracy"
        values = [run["curves"][_AUC]["values"][-1] if measure == _AUC else run["accuracy"] for run in best.runs]
        told = {
            "measure": measure,
            "score": statistics([100 * value for value in values], self.digits),
            "rounds": best.runs[0]["curves"]["rounds-made"]["values"][-1],
        }
        if best.config.strategy == AUTO:
            told["settings"] = chosen_settings(best.config)
            told["chosen_by"] = AUTO
        return told

    def table(self, document: Mapping[str, Any], title: str = "") -> Table:
        """A line for each kind of data and mu: what ``auto`` took beside the best of the grid."""
        return Table(title, self.columns, choice_rows(document), str(document.get("guarantee", "")))

    def further_tables(self, document: Mapping[str, Any]) -> list[Table]:
        """A line for each algorithm of each cell, the best first."""
        caption = str(document.get("guarantee", ""))
        return [Table("the whole grid", self.grid_columns, grid_rows(document), caption)]


def chosen_settings(config: RunConfig) -> dict[str, Any]:
    """What ``auto`` chose for a configuration, as settings in its place."""
    asked = {**config.to_mapping(), "strategy": AUTO}
    from ..runs.experiment import prepare  # which imports everything that a run needs

    chosen = prepare(config).config.to_mapping()
    return {name: value for name, value in chosen.items() if value != asked[name]}


def grid_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each algorithm, the best of each cell first."""
    rows = []
    for cell in document["cells"]:
        found = sorted(cell["algorithms"].items(), key=lambda item: -item[1]["score"]["mean"])
        most = max(entry["score"]["mean"] for label, entry in found if "chosen_by" not in entry)
        rows += [
            {
                "data": cell["table"],
                "mu": entry["mu"]["mean"],
                "epsilon": entry["epsilon"]["mean"],
                "algorithm": f"{label}: {entry['settings']['strategy']}" if "chosen_by" in entry else label,
                "score": entry["score"]["mean"],
                "± std": _deviation(entry),
                "behind": most - entry["score"]["mean"],
                "rounds": round(entry["rounds"]),
            }
            for label, entry in found
        ]
    return rows


def choice_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row for each cell: the best of its grid, and what ``auto`` took where it was run."""
    rows = []
    for cell in document["cells"]:
        entries = cell["algorithms"]
        grid = {label: entry for label, entry in entries.items() if "chosen_by" not in entry}
        label, best = max(grid.items(), key=lambda item: item[1]["score"]["mean"])
        taken = next((entry for entry in entries.values() if "chosen_by" in entry), best)
        rows.append(
            {
                "data": cell["table"],
                "mu": taken["mu"]["mean"],
                "epsilon": taken["epsilon"]["mean"],
                "took": _named(cell, taken["settings"]),
                "score": taken["score"]["mean"],
                "± std": _deviation(taken),
                "best": label,
                "best score": best["score"]["mean"],
                "± best": _deviation(best),
                "behind": best["score"]["mean"] - taken["score"]["mean"],
            }
        )
    return rows


def _named(cell: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A strategy with the features and rounds that were chosen for it."""
    rounds = settings.get("num-rounds", cell["settings"].get("num-rounds"))
    features = settings.get("features")
    parts = [str(settings["strategy"]), *([str(features)] if features else []), *([f"T = {rounds}"] if rounds else [])]
    return ", ".join(parts)


def _deviation(entry: Mapping[str, Any]) -> float | None:
    return entry["score"]["std"] if len(entry["score"]["runs"]) > 1 else None
