"""plan-grid: every strategy on every kind of data, with a few settings each, to see what is best before it is chosen.

The settings of what has no preset for some data were taken from docs/tuning.md and from a few runs on held-out training
samples; the grid was fixed before :mod:`murmurfl.app.planning` was tried on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..methods.method import AUTO
from ..reports.table import Column, Table, statistics
from ..settings.run_config import RunConfig
from .accuracy import AT_DELTA, MU, Document, TableKind, Trial, at_the_end, caption_of
from .paper import JUDGED_AT_THE_END, Cell, Overrides, Paper, Settings, everybody, hyphenated

_AUC = "auc"
_TABULAR = ("credit-default", "recidivism")
"""Tasks whose classes are so unequal that accuracy says little."""


class GridTable(TableKind):
    """The choice of ``auto`` beside the best of the grid, and every algorithm of each cell."""

    name = "grid"
    sentence = "how good every strategy is on the same data at the same mu, and how far behind the best"
    digits = 5
    indent = None

    columns = (
        Column("data", "what was learnt, and on how many clients", label=True),
        MU,
        AT_DELTA,
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

    def curves(self, document: Document) -> dict[str, Any]:
        """Return the AUC at the end, where there are two classes, and the number of rounds."""
        kept = {"rounds-made": at_the_end(document, float(document["rounds"]))}
        auc = document.get(_AUC)
        return kept if auc is None else {**kept, _AUC: at_the_end(document, auc)}

    def entry(self, best: Trial, trials: Sequence[Trial], choice: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the score and the rounds; of ``auto``, the settings of what it took: captions are about those."""
        measure = _AUC if best.config.task in _TABULAR else "accuracy"
        values = [run["curves"][_AUC]["values"][-1] if measure == _AUC else run["accuracy"] for run in best.runs]
        entry = {
            "measure": measure,
            "score": statistics([100 * value for value in values], self.digits),
            "rounds": best.runs[0]["curves"]["rounds-made"]["values"][-1],
        }
        if best.config.strategy == AUTO:
            entry["settings"] = chosen_settings(best.config)
            entry["chosen_by"] = AUTO
        return entry

    def rows(self, document: Document) -> list[dict[str, Any]]:
        """Return a row for each cell: the best of its grid, and what ``auto`` took where it was run."""
        return [_choice(cell) for cell in document["cells"]]

    def table(self, document: Document, title: str = "") -> Table:
        """Return a line for each kind of data and mu.

        What ``auto`` took beside the best of the grid; it has no picture.
        """
        return replace(super().table(document, title), draw=None)

    def further_tables(self, document: Document) -> list[Table]:
        """Return a line for each algorithm of each cell, the best first."""
        return [Table("the whole grid", self.grid_columns, grid_rows(document), caption_of(document))]


def chosen_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that ``auto`` chose for a configuration."""
    asked = {**config.to_mapping(), "strategy": AUTO}
    from ..runs.experiment import prepare  # which imports everything that a run needs

    chosen = prepare(config).config.to_mapping()
    return {name: value for name, value in chosen.items() if value != asked[name]}


def _score(entry: Document) -> float:
    return entry["score"]["mean"]


def _best_of_grid(cell: Document) -> tuple[str, Document]:
    grid = {label: entry for label, entry in cell["algorithms"].items() if "chosen_by" not in entry}
    return max(grid.items(), key=lambda item: _score(item[1]))


def grid_rows(document: Document) -> list[dict[str, Any]]:
    """One flat row for each algorithm, the best of each cell first."""
    return [
        {
            "data": cell["table"],
            "mu": entry["mu"]["mean"],
            "epsilon": entry["epsilon"]["mean"],
            "algorithm": f"{label}: {entry['settings']['strategy']}" if "chosen_by" in entry else label,
            "score": _score(entry),
            "± std": _deviation(entry),
            "behind": _score(_best_of_grid(cell)[1]) - _score(entry),
            "rounds": round(entry["rounds"]),
        }
        for cell in document["cells"]
        for label, entry in sorted(cell["algorithms"].items(), key=lambda item: -_score(item[1]))
    ]


def _choice(cell: Document) -> dict[str, Any]:
    """Return the flat row of a cell: the best of its grid, and what ``auto`` took where it was run."""
    label, best = _best_of_grid(cell)
    taken = next((entry for entry in cell["algorithms"].values() if "chosen_by" in entry), best)
    return {
        "data": cell["table"],
        "mu": taken["mu"]["mean"],
        "epsilon": taken["epsilon"]["mean"],
        "took": _named(cell, taken["settings"]),
        "score": _score(taken),
        "± std": _deviation(taken),
        "best": label,
        "best score": _score(best),
        "± best": _deviation(best),
        "behind": _score(best) - _score(taken),
    }


def _named(cell: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return a strategy with the features and rounds that were chosen for it."""
    rounds = settings.get("num-rounds", cell["settings"].get("num-rounds"))
    features = settings.get("features")
    parts = [str(settings["strategy"]), *([str(features)] if features else []), *([f"T = {rounds}"] if rounds else [])]
    return ", ".join(parts)


def _deviation(entry: Mapping[str, Any]) -> float | None:
    return entry["score"]["std"] if len(entry["score"]["runs"]) > 1 else None


_CHOSEN: dict[str, Overrides] = {"auto": {"strategy": "auto"}}


def _setting(clients: int, **more: Any) -> Settings:
    return {"preset": "practical", **JUDGED_AT_THE_END, **everybody(clients), **hyphenated(**more)}


def _full(**more: Any) -> Overrides:
    return {"strategy": "full-batch", **hyphenated(**more)}


def _stepping(strategy: str, batch: int, clip: float, rate: float, **more: Any) -> Overrides:
    settings = hyphenated(batch_size=batch, clip_norm=clip, learning_rate=rate, **more)
    return {"strategy": strategy, **settings}


def _mu2(batch: int, rounds: int, clip: float, rate: float, **more: Any) -> Overrides:
    """One pass with a step of rate / T^2."""
    return _stepping("mu2", batch, clip, rate / rounds**2, **{"mechanism": "cancelling", **more})


def _sgd(batch: int, clip: float, rate: float, **more: Any) -> Overrides:
    return _stepping("noisy-sgd", batch, clip, rate, **more)


def _whole(samples: int, passes: int, clip: float, rate: float, **more: Any) -> Overrides:
    """ISRL-DP with all samples of a client as its batch."""
    return _stepping("isrl-dp-accelerated", samples, clip, rate, passes=passes, **more)


def _digits() -> list[Cell]:
    """1,437 samples on 10 clients."""
    soft = {"features": "soft-gradients"}
    return [
        Cell(
            "digits, 10 clients",
            _setting(10, task="digits", mu=mu),
            {
                "full batch": _full(),
                "full batch, T = 4": _full(num_rounds=4),
                "full batch, T = 12": _full(num_rounds=12),
                "full batch, soft gradients": _full(**soft),
                "full batch, soft gradients, T = 4": _full(num_rounds=4, **soft),
                "mu2, T = 17": {"strategy": "mu2", "batch-size": 8},
                "mu2, T = 8": {"strategy": "mu2", "batch-size": 17},
                "mu2, T = 8, cancelling": {"strategy": "mu2", "batch-size": 17, "mechanism": "cancelling"},
                "noisy SGD, T = 17": {"strategy": "noisy-sgd", "batch-size": 8},
                "noisy SGD, T = 8": {"strategy": "noisy-sgd", "batch-size": 17},
                "ISRL-DP, 8 passes": {"strategy": "isrl-dp-accelerated", "batch-size": 143, "passes": 8},
                "ISRL-DP, 20 passes": {"strategy": "isrl-dp-accelerated", "batch-size": 143, "passes": 20},
                "one shot": {"strategy": "one-shot"},
                "one shot, soft gradients": {"strategy": "one-shot", **soft},
                **_CHOSEN,
            },
        )
        for mu in (0.25, 1.0, 4.0)
    ]


def _tables(table: str, task: str, samples: int) -> list[Cell]:
    """Tables of people on 100 clients, by AUC."""
    return [
        Cell(
            f"{table}, 100 clients",
            _setting(100, task=task, mu=mu),
            {
                "full batch": _full(),
                "full batch, T = 2": _full(num_rounds=2),
                "full batch, T = 4": _full(num_rounds=4),
                "full batch, T = 4, averaged": _full(num_rounds=4, average="linear"),
                "full batch, T = 10, averaged": _full(num_rounds=10, average="linear"),
                "mu2, b = 6": _mu2(6, samples // 6, 0.5, 300.0 * mu),
                "mu2, b = 19": _mu2(19, samples // 19, 0.5, 100.0 * mu),
                "noisy SGD, b = 6": _sgd(6, 0.5, 2 * mu),
                "noisy SGD, b = 19": _sgd(19, 0.5, 4 * mu),
                "ISRL-DP, 8 passes": _whole(samples, 8, 0.5, 3 * mu),
                "one shot": {"strategy": "one-shot"},
                **_CHOSEN,
            },
        )
        for mu in (0.25, 1.0)
    ]


def _stream() -> list[Cell]:
    """zhang-2025's logistic regression: 1,000 samples of each of 20 clients, each used as it comes."""
    steps: Settings = {"clip-unit": "contractive", "clip-norm": 12.0}

    def online(mechanism: str, batch: int, eta: float) -> Overrides:
        return {"strategy": "online", "mechanism": mechanism, "batch-size": batch, "learning-rate": eta, **steps}

    return [
        Cell(
            "stream of zhang-2025, 20 clients",
            _setting(
                20,
                task="synthetic-logistic",
                partition="own",
                model="logistic",
                synthetic_samples=20_000,
                synthetic_features=100,
                delta=1e-3,
                mu=mu,
            ),
            {
                "online, square root, tau = 5": online("sqrt_toeplitz", 5, 0.003),
                "online, square root, tau = 20": online("sqrt_toeplitz", 20, 0.003),
                "online, square root, tau = 5, short": online("sqrt_toeplitz", 5, 0.001),
                "online, cancelling, tau = 5": online("cancelling", 5, 0.003),
                "online, independent, tau = 5": online("independent", 5, 0.0003),
                "mu2, b = 5": {"strategy": "mu2", "batch-size": 5},
                "mu2, b = 20": {"strategy": "mu2", "batch-size": 20},
                "mu2, b = 50": {"strategy": "mu2", "batch-size": 50},
                "noisy SGD, b = 20": {"strategy": "noisy-sgd", "batch-size": 20},
                "noisy SGD, b = 50": {"strategy": "noisy-sgd", "batch-size": 50},
                "auto": {"strategy": "auto", "strategy.stream": True},
            },
        )
        for mu in (0.25, 1.0)
    ]


class PlanGrid(Paper):
    """Small data: digits, tables of people, a stream."""

    name = "plan-grid"
    sentence = "every strategy on digits, tables of people and a stream, and what `strategy = auto` takes"
    seeds = 5
    table = GridTable()

    def cells(self) -> list[Cell]:
        """Return a cell for each data set and mu."""
        people = [*_tables("CreditCard", "credit-default", 240), *_tables("COMPAS", "recidivism", 57)]
        return [*_digits(), *people, *_stream()]


class PlanGridMnist(Paper):
    """MNIST."""

    name = "plan-grid-mnist"
    sentence = "every strategy on MNIST, and what `strategy = auto` takes"
    seeds = 3
    table = GridTable()

    def cells(self) -> list[Cell]:
        """60,000 samples on 100 clients, by mu; the features are each algorithm's own."""
        soft, oriented = {"features": "soft-gradients"}, {"features": "oriented-gradients"}
        rates = {0.25: 500.0, 1.0: 1500.0}
        return [
            Cell(
                "MNIST, 100 clients",
                _setting(100, task="mnist", mu=mu),
                {
                    "full batch": _full(**soft),
                    "full batch, T = 4": _full(num_rounds=4, **soft),
                    "full batch, oriented": _full(**oriented),
                    "mu2, T = 75": _mu2(8, 75, 0.5, rate, **soft),
                    "mu2, T = 25": _mu2(24, 25, 0.5, rate, **soft),
                    "mu2, T = 75, oriented": {"strategy": "mu2", "batch-size": 8, **oriented},
                    "mu2, T = 25, decay": _mu2(24, 25, 0.5, rate, mechanism="decay", workload="mu2", **soft),
                    "noisy SGD, T = 75": _sgd(8, 0.5, 14 * mu, **soft),
                    "noisy SGD, T = 25": _sgd(24, 0.5, 72 * mu, **soft),
                    "noisy SGD, T = 75, oriented": {"strategy": "noisy-sgd", "batch-size": 8, **oriented},
                    "ISRL-DP, 8 passes": _whole(600, 8, 0.5, 48.0, **soft),
                    "one shot": {"strategy": "one-shot", **soft},
                    "one shot, oriented": {"strategy": "one-shot", **oriented},
                    **_CHOSEN,
                },
            )
            for mu, rate in rates.items()
        ]
