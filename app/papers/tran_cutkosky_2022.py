"""tran-cutkosky-2022: private momentum with tree noise, to a stationary point."""

from __future__ import annotations

import math
from typing import Any

from ...privacy import gdp_mu
from .cell import Cell, Settings
from .gradient_norm import GradientNormTable
from .paper import Paper

_DELTA = 1e-5
_MOMENTUM: dict[str, Settings] = {
    "algorithm 1": {"strategy": "tree-momentum"},
    "algorithm 2": {"strategy": "reduced-tree-momentum"},
    "sqrt_toeplitz": {"strategy": "correlated-momentum", "mechanism": "sqrt_toeplitz"},
    "blt": {"strategy": "correlated-momentum", "mechanism": "blt"},
}
_LOGISTIC_SAMPLES = 6000
"""Training samples where epsilon varies."""


def _settings(**settings: Any) -> Settings:
    return {
        "preset": "practical",
        "delta": _DELTA,
        "noise-quality": "fast",
        "checkpoint": False,
        "gradient-norm": True,
        "node-deadline-s": 600.0,
        **settings,
    }


def _logistic(epsilon: float, samples: int, **settings: Any) -> Settings:
    return _settings(
        **{
            "task": "mnist-parity",
            "features": "means-4x4",
            "model": "nonconvex-logistic",
            "num-clients": 1,
            "clients-per-round": 1,
            "training-samples": samples,
            "feature-bound": 1.0,
            "clip-norm": 1.05,  # the model's own bound, R + lambda 3 sqrt(3 d) / 8, is 1.045: nothing is clipped
            "mu": gdp_mu(epsilon, _DELTA),
            **settings,
        }
    )


def _algorithms(alpha: float) -> dict[str, Settings]:
    """All of them; the momentum's alpha is of those that have a momentum."""
    momentum: dict[str, Settings] = {label: {**options, "alpha": alpha} for label, options in _MOMENTUM.items()}
    return {**momentum, "DP-SGD": {"strategy": "trusted-sgd"}}


def _grids(rounds: int, paths: tuple[float, ...], rates: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """As many steps for every algorithm: eta T for normalised ones, eta for DP-SGD."""
    return {**{label: tuple(path / rounds for path in paths) for label in _MOMENTUM}, "DP-SGD": rates}


def _all() -> list[Cell]:
    """The appendix has no experiments: these are ours, to see what its rates say at sizes one can run."""
    cells = []
    batch, passes = 100, 10
    varied = [(epsilon, _LOGISTIC_SAMPLES) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)]
    varied += [(1.0, samples) for samples in (750, 1500, 3000, 12_000)]
    for epsilon, samples in varied:
        rounds = passes * (samples // batch)
        settings = {"batch-size": batch, "passes": passes, "evaluate-every": max(rounds // 20, 1)}
        cells.append(
            Cell(
                f"logistic, epsilon = {epsilon:g}, N = {samples}",
                _logistic(epsilon, samples, **settings),
                _algorithms(0.03),
                grids=_grids(rounds, (3.0, 10.0, 30.0, 100.0), (0.02, 0.1, 0.5, 2.5)),
            )
        )
    for samples in (250, 500, 1000):
        cells.append(_theorem_6(2.0, samples, 49))
    batch, passes, machines, samples = 60, 2, 10, 12_000
    rounds = passes * (samples // (batch * machines))
    settings = {"batch-size": batch, "passes": passes, "evaluate-every": rounds // 4}
    settings |= {"task": "mnist", "features": "means-2x2", "model": "cnn", "clip-norm": 1.0}
    settings |= {"training-samples": samples}
    settings |= {"num-clients": machines, "clients-per-round": machines}
    for epsilon in (4.0, 32.0):
        cells.append(
            Cell(
                f"CNN, epsilon = {epsilon:g}, N = {samples}",
                _settings(**settings, mu=gdp_mu(epsilon, _DELTA)),
                _algorithms(0.1),
                grids=_grids(rounds, (4.0, 10.0, 25.0), (1.0, 4.0, 16.0)),
                # A network's gradient is small where it begins: least gradient norm would choose the step that stays.
                validation={"validation-samples": 10_000},
            )
        )
    return cells


def _theorem_6(epsilon: float, samples: int, parameters: int) -> Cell:
    """Algorithm 1 with one sample a step, and T, eta and alpha as theorem 6 has them: nothing is chosen."""
    spread = math.sqrt(parameters * math.log(1 / _DELTA))
    rounds = 2.0
    for _ in range(100):  # T = epsilon N^2 / (log2(T) spread)
        rounds = epsilon * samples**2 / (math.log2(max(rounds, 2.0)) * spread)
    num_rounds = max(round(rounds), 2)
    settings = {
        "batch-size": 1,
        "passes": max(math.ceil(num_rounds / samples), 2),
        "num-rounds": num_rounds,
        "alpha": min(epsilon * samples / (num_rounds * math.log2(num_rounds) * spread), 1.0),
        "learning-rate": 1 / math.sqrt(samples * num_rounds),
        "evaluate-every": max(num_rounds // 20, 1),
    }
    return Cell(
        f"logistic, theorem 6, epsilon = {epsilon:g}, N = {samples}",
        _logistic(epsilon, samples, **settings),
        {"algorithm 1, theorem 6": {"strategy": "tree-momentum"}},
    )


class TranCutkosky2022(Paper):
    """The theorems' rates, at sizes that can be run."""

    name = "tran-cutkosky-2022"
    sentence = "private momentum with tree noise: gradient norms against epsilon and the number of samples"
    seeds = 3
    table = GradientNormTable(
        # Up to logarithms and 1 / sqrt(N).
        rates={"algorithm 1": -1 / 2, "algorithm 1, theorem 6": -1 / 2, "algorithm 2": -2 / 3},
        model_names={"nonconvex-logistic": "logistic", "cnn": "CNN"},
    )

    def cells(self) -> list[Cell]:
        """Our own cells, because the paper made no runs."""
        return _all()
