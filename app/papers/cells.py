"""The papers' tables and figures as cells: what is run, and what the paper prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...privacy import gdp_mu
from ..config import PUBLIC_TASKS

Overrides = Mapping[str, bool | int | float | str]

_PAPER_MNIST: dict[str, bool | int | float | str] = {
    "task": "mnist",
    "batch-size": 1,
    "noise-quality": "fast",
    "evaluate-every": 1_000_000,
    "checkpoint": False,
    "node-deadline-s": 600.0,
}


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Parameters
    ----------
    table : str
        The table it belongs to.
    settings : mapping
        Run-config overrides, beside those of the algorithm.
    algorithms : mapping of str to mapping
        Overrides of each algorithm in the cell.
    paper : mapping of str to mapping
        What the paper prints, by algorithm: ``accuracy`` in percent, ``loss``.
    steps : tuple of float
        Learning rates each algorithm is run with; the one with the least mean loss at the end is its result.
    grids : mapping of str to tuple of float
        Learning rates to choose from, by algorithm, on runs of their own with the seeds of ``VALIDATION_SEEDS``: the
        one with the least gradient norm is used, or with the least loss on held-out samples where ``validation`` holds
        some out.
    validation : mapping
        Overrides of the runs that choose a step.
    """

    table: str
    settings: Overrides
    algorithms: Mapping[str, Overrides]
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    validation: Overrides = field(default_factory=dict)


def _mu2_and_baseline(**extra: Any) -> dict[str, Overrides]:
    return {"mu2": {"strategy": "mu2", **extra}, "noisy-sgd": {"strategy": "noisy-sgd", **extra}}


_OTHER_BATCHES, _OTHER_PASSES = 8, 5
"""Minibatches a machine deals its 600 samples into, and how often it goes through them, for the "other work"."""


def _other_work(mu: float, machines: int, asked: int) -> dict[str, Overrides]:
    """The paper's "other work", of which it prints accuracy and time but no batch, rounds or noise (docs/results.md).

    With samples dealt, one of them is in P of R = 8 P M / m rounds. The noise that charges it with every round is
    sqrt(R / P) times as large: that of a smaller mu, and the epsilon beside it is the one that is true of it.
    """
    batch = 60_000 // machines // _OTHER_BATCHES
    dealt: dict[str, bool | int | float | str] = {"batch-size": batch, "passes": _OTHER_PASSES}
    charged = mu * (asked / (_OTHER_BATCHES * machines)) ** 0.5
    return {
        "isrl-dp": {"strategy": "isrl-dp", **dealt},
        "isrl-dp-accelerated": {"strategy": "isrl-dp-accelerated", **dealt},
        "isrl-dp, every round charged": {"strategy": "isrl-dp", **dealt, "mu": charged},
    }


def _reshef_levy_2025() -> list[Cell]:
    figures = {  # mu, m: ours, noisy SGD, other work
        (4, 50): (53.8, 45.1, 47.6),
        (8, 50): (63.7, 58.9, 63.3),
        (12, 50): (66.5, 63.7, 66.7),
        (8, 20): (60.8, 54.9, 59.7),
        (8, 80): (63.8, 57.0, 65.8),
    }
    cells = [
        Cell(
            "paper's constants",
            {**_PAPER_MNIST, "preset": "paper", "mu": float(mu), "num-clients": 100, "clients-per-round": m},
            {
                **_mu2_and_baseline(),
                **_other_work(mu, 100, m),
                **({"delayed-momentum": {"strategy": "delayed-momentum"}} if mu == 8 else {}),
            },
            {
                "mu2": {"accuracy": ours},
                "noisy-sgd": {"accuracy": sgd},
                "isrl-dp": {"accuracy": other},
                "isrl-dp, every round charged": {"accuracy": other},
            },
        )
        for (mu, m), (ours, sgd, other) in figures.items()
    ]
    practical: dict[str, bool | int | float | str] = {**_PAPER_MNIST, "preset": "practical", "num-clients": 100}
    # Samples that return: whole shards and a step chosen on held-out images, or small batches and the preset's step.
    returning: dict[float, dict[str, Overrides]] = {
        1.0: {
            "isrl-dp, 20 passes": {"strategy": "isrl-dp", "batch-size": 600, "passes": 20, "learning-rate": 1.7},
        },
        4.0: {"isrl-dp, 5 passes": {"strategy": "isrl-dp", "batch-size": 75, "passes": 5}},
    }
    cells += [
        Cell("practical", {**practical, "mu": mu, "clients-per-round": 50}, {**_mu2_and_baseline(), **more})
        for mu, more in returning.items()
    ]
    full: dict[str, bool | int | float | str] = {**practical, "clients-per-round": 100, "batch-size": 12}
    cells.append(Cell("practical, all machines", {**full, "mu": 1.0}, _mu2_and_baseline()))
    cells += [
        Cell(
            "practical, oriented gradients",
            {**full, "features": "oriented-gradients", "mu": mu},
            _mu2_and_baseline(),
        )
        for mu in (0.25, 1.0)
    ]
    lossy = {"mu2": {"strategy": "mu2"}, "mu2, papers' release rule": {"strategy": "mu2", "release-rule": "paper"}}
    cells.append(Cell("20 % of replies lost", {**full, "mu": 1.0, "lost-replies": 0.2}, lossy))
    return cells


def _reshef_levy_2024() -> list[Cell]:
    figures = {  # mu, M: untrusted loss and accuracy, trusted loss and accuracy
        (4, 1): ((2.256, 69.9), (2.256, 69.9)),
        (4, 10): ((2.267, 69.4), (2.256, 69.7)),
        (4, 100): ((2.285, 65.4), (2.258, 69.5)),
        (8, 1): ((2.253, 70.2), (2.253, 70.2)),
        (8, 10): ((2.259, 70.0), (2.253, 70.1)),
        (8, 100): ((2.274, 69.8), (2.257, 69.6)),
        (16, 1): ((2.252, 70.4), (2.252, 70.4)),
        (16, 10): ((2.255, 70.1), (2.252, 70.3)),
        (16, 100): ((2.264, 70.0), (2.256, 69.7)),
    }
    algorithms: dict[str, Overrides] = {
        "mu2": {"strategy": "mu2"},
        "trusted-mu2": {"strategy": "trusted-mu2"},
        "noisy-sgd": {"strategy": "noisy-sgd"},
    }
    return [
        Cell(
            "paper's constants",
            {
                **_PAPER_MNIST,
                "preset": "paper",
                "mu": float(mu),
                "num-clients": machines,
                "clients-per-round": machines,
            },
            algorithms,
            {
                name: dict(zip(("loss", "accuracy"), figure, strict=True))
                for name, figure in zip(("mu2", "trusted-mu2"), pair, strict=True)
            },
        )
        for (mu, machines), pair in figures.items()
    ]


def _online(**extra: Any) -> dict[str, bool | int | float | str]:
    return {"strategy": "online", **extra}


_CORRELATED: dict[str, dict[str, bool | int | float | str]] = {
    "(i) tree": _online(mechanism="tree", decoder="dyadic"),
    "(ii) optimal": _online(mechanism="optimal"),
    "(iii) sqrt_toeplitz": _online(mechanism="sqrt_toeplitz"),
    "banded": _online(mechanism="banded"),
    "blt": _online(mechanism="blt"),
}
_ZHANG_DELTA = 1e-3


def _zhang_2025(**settings: Any) -> dict[str, bool | int | float | str]:
    return {
        "preset": "practical",
        "delta": _ZHANG_DELTA,
        "noise-quality": "fast",
        "checkpoint": False,
        "node-deadline-s": 600.0,
        **settings,
    }


def _zhang_2025_logistic() -> list[Cell]:
    """Section V-A, figure 3: one step size for all, and independent noise at its own best beside it.

    The paper prints neither step sizes nor the gradient bound; these were chosen on seeds 101 and up (docs/tuning.md).
    """
    own_step = {2.0: 0.0001, 0.5: 0.0001}
    return [
        Cell(
            f"epsilon = {epsilon:g}",
            _zhang_2025(
                **{
                    "task": "synthetic-logistic",
                    "partition": "own",
                    "model": "logistic",
                    "clip-unit": "contractive",
                    "num-clients": 20,
                    "clients-per-round": 20,
                    "batch-size": 5,
                    "num-rounds": 1000,
                    "synthetic-samples": 100_000,
                    "synthetic-features": 100,
                    "evaluate-every": 20,
                    "clip-norm": 12.0,
                    "learning-rate": 0.003,
                    "mu": gdp_mu(epsilon, _ZHANG_DELTA),
                }
            ),
            {
                "noiseless": _online(mechanism="none"),
                **_CORRELATED,
                "independent": _online(mechanism="independent"),
                "independent, own step": _online(mechanism="independent", **{"learning-rate": step}),
            },
        )
        for epsilon, step in own_step.items()
    ]


def _zhang_2025_cnn() -> list[Cell]:
    """Section V-B, figure 4, with both sensitivities, each with a step of its own for all its curves.

    ``update`` clips a machine's whole update, which is a guarantee. The paper divides the sensitivity by tau, which
    holds only for steps that never move two iterates apart: its noise is that of ``update`` at tau times the mu, and
    the epsilon beside it is the one that is true of it.
    """
    cells = []
    for steps in (5, 10):
        for label, factor, rate in (("update", 1, 0.015 / steps), ("the paper's noise", steps, 0.03)):
            cells.append(
                Cell(
                    f"tau = {steps}, {label}",
                    _zhang_2025(
                        **{
                            "task": "mnist",
                            "partition": "half-by-label",
                            "model": "cnn",
                            "num-clients": 10,
                            "clients-per-round": 10,
                            "batch-size": steps,
                            "evaluate-every": 500 // steps,
                            "clip-norm": 1.0,
                            "learning-rate": rate,
                            "mu": factor * gdp_mu(2.0, _ZHANG_DELTA),
                        }
                    ),
                    {
                        "noiseless": _online(mechanism="none"),
                        **_CORRELATED,
                        "independent": _online(mechanism="independent"),
                    },
                )
            )
    return cells


_JIANG_STEPS = tuple(float(f"{digit}e-{power}") for power in range(1, 10) for digit in (5, 1))
_JIANG_DELTA = 1e-6
_JIANG_ALGORITHMS = {
    "Interleaved": "interleaved",
    "Priv-Pub": "priv-pub",
    "Pub-Priv": "pub-priv",
    "DP-ShuffleG": "dp-shuffleg",
    "Public-Only": "public-only",
}


def _jiang_2026(
    task: str, epsilons: tuple[float, ...], settings: tuple[tuple[str, float], ...] = (("RR", 0.5),)
) -> list[Cell]:
    """Section 6 and appendix H: figure 2, and for some data sets figures 3 to 6, with other orders and shares p."""
    return [
        Cell(
            f"{task}, epsilon = {epsilon:g}, {order}, p = {share:g}",
            {
                "preset": "practical",
                "task": task,
                "model": PUBLIC_TASKS[task],
                "num-clients": 1,
                "clients-per-round": 1,
                "num-rounds": 50,
                "clip-norm": 10.0,
                "delta": _JIANG_DELTA,
                "mu": gdp_mu(epsilon, _JIANG_DELTA),
                "order": order,
                "private-share": share,
                "noise-quality": "fast",
                "checkpoint": False,
            },
            {label: {"strategy": "shuffled", "variant": variant} for label, variant in _JIANG_ALGORITHMS.items()},
            steps=_JIANG_STEPS,
        )
        for order, share in settings
        for epsilon in epsilons
    ]


_JIANG_VARIED = (("RR", 0.5), ("IG", 0.5), ("SO", 0.5), ("RR", 0.25), ("RR", 0.75))


def _jiang_2026_mean() -> list[Cell]:
    return _jiang_2026("mnist-69", (5.0, 10.0), _JIANG_VARIED)


def _jiang_2026_ridge() -> list[Cell]:
    return [cell for task in ("cifar10-ridge", "crime") for cell in _jiang_2026(task, (1.0, 5.0))]


def _jiang_2026_lasso() -> list[Cell]:
    return [*_jiang_2026("compas", (5.0, 10.0)), *_jiang_2026("credit-card", (5.0, 10.0), _JIANG_VARIED)]


VALIDATION_SEEDS = (101,)
"""Of the runs that choose a step; no result is made with them."""

_TRAN_DELTA = 1e-5
_TRAN_MOMENTUM: dict[str, dict[str, bool | int | float | str]] = {
    "algorithm 1": {"strategy": "tree-momentum"},
    "algorithm 2": {"strategy": "reduced-tree-momentum"},
    "sqrt_toeplitz": {"strategy": "correlated-momentum", "mechanism": "sqrt_toeplitz"},
    "blt": {"strategy": "correlated-momentum", "mechanism": "blt"},
}
_TRAN_ALGORITHMS = {**_TRAN_MOMENTUM, "DP-SGD": {"strategy": "trusted-sgd"}}
LOGISTIC_SAMPLES = 6000
"""Training samples where epsilon varies."""


def _tran_cutkosky(**settings: Any) -> dict[str, bool | int | float | str]:
    return {
        "preset": "practical",
        "delta": _TRAN_DELTA,
        "noise-quality": "fast",
        "checkpoint": False,
        "gradient-norm": True,
        "node-deadline-s": 600.0,
        **settings,
    }


def _tran_logistic(epsilon: float, samples: int, **settings: Any) -> dict[str, bool | int | float | str]:
    return _tran_cutkosky(
        **{
            "task": "mnist-parity",
            "features": "means-4x4",
            "model": "nonconvex-logistic",
            "num-clients": 1,
            "clients-per-round": 1,
            "training-samples": samples,
            "feature-bound": 1.0,
            "clip-norm": 1.05,  # the model's own bound, R + lambda 3 sqrt(3 d) / 8, is 1.045: nothing is clipped
            "mu": gdp_mu(epsilon, _TRAN_DELTA),
            **settings,
        }
    )


def _tran_grids(rounds: int, paths: tuple[float, ...], rates: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """As many steps for every algorithm: eta T for normalised ones, eta for DP-SGD."""
    return {**{label: tuple(path / rounds for path in paths) for label in _TRAN_MOMENTUM}, "DP-SGD": rates}


def _tran_cutkosky_2022() -> list[Cell]:
    """The appendix has no experiments: these are ours, to see what its rates say at sizes one can run."""
    cells = []
    batch, passes = 100, 10
    varied = [(epsilon, LOGISTIC_SAMPLES) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)]
    varied += [(1.0, samples) for samples in (750, 1500, 3000, 12_000)]
    for epsilon, samples in varied:
        rounds = passes * (samples // batch)
        settings = {"batch-size": batch, "passes": passes, "alpha": 0.03, "evaluate-every": max(rounds // 20, 1)}
        cells.append(
            Cell(
                f"logistic, epsilon = {epsilon:g}, N = {samples}",
                _tran_logistic(epsilon, samples, **settings),
                _TRAN_ALGORITHMS,
                grids=_tran_grids(rounds, (3.0, 10.0, 30.0, 100.0), (0.02, 0.1, 0.5, 2.5)),
            )
        )
    for samples in (250, 500, 1000):
        cells.append(_theorem_6(2.0, samples, 49))
    batch, passes, machines, samples = 60, 2, 10, 12_000
    rounds = passes * (samples // (batch * machines))
    settings = {"batch-size": batch, "passes": passes, "alpha": 0.1, "evaluate-every": rounds // 4}
    settings |= {"task": "mnist", "features": "means-2x2", "model": "cnn", "clip-norm": 1.0}
    settings |= {"training-samples": samples}
    settings |= {"num-clients": machines, "clients-per-round": machines}
    for epsilon in (4.0, 32.0):
        cells.append(
            Cell(
                f"CNN, epsilon = {epsilon:g}, N = {samples}",
                _tran_cutkosky(**settings, mu=gdp_mu(epsilon, _TRAN_DELTA)),
                _TRAN_ALGORITHMS,
                grids=_tran_grids(rounds, (4.0, 10.0, 25.0), (1.0, 4.0, 16.0)),
                # A network's gradient is small where it begins: the step of least gradient norm is the one that stays.
                validation={"validation-samples": 10_000},
            )
        )
    return cells


def _theorem_6(epsilon: float, samples: int, parameters: int) -> Cell:
    """Algorithm 1 with one sample a step, and T, eta and alpha as theorem 6 has them: nothing is chosen."""
    spread = math.sqrt(parameters * math.log(1 / _TRAN_DELTA))
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
        _tran_logistic(epsilon, samples, **settings),
        {"algorithm 1, theorem 6": {"strategy": "tree-momentum"}},
    )


REPRODUCTIONS: dict[str, Callable[[], list[Cell]]] = {
    "reshef-levy-2025": _reshef_levy_2025,
    "reshef-levy-2024": _reshef_levy_2024,
    "zhang-2025-logistic": _zhang_2025_logistic,
    "zhang-2025-cnn": _zhang_2025_cnn,
    "tran-cutkosky-2022": _tran_cutkosky_2022,
    "jiang-2026-mean": _jiang_2026_mean,
    "jiang-2026-ridge": _jiang_2026_ridge,
    "jiang-2026-lasso": _jiang_2026_lasso,
}
DEFAULT_SEEDS = {"reshef-levy-2025": 5, "reshef-levy-2024": 5, "zhang-2025-logistic": 10, "zhang-2025-cnn": 10}
DEFAULT_SEEDS |= {"tran-cutkosky-2022": 3}
DEFAULT_SEEDS |= {name: 10 for name in REPRODUCTIONS if name.startswith("jiang-2026")}
"""Runs of each cell, as many as the paper made; tran-cutkosky-2022 made none."""
