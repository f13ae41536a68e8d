"""zhang-2025: online federated learning with correlated noise, logistic regression (V-A) and a CNN (V-B)."""

from __future__ import annotations

from typing import Any

from ...privacy import gdp_mu
from .cell import Cell, Settings
from .paper import Paper
from .regret import RegretTable


def _online(**extra: Any) -> Settings:
    return {"strategy": "online", **extra}


_CORRELATED: dict[str, Settings] = {
    "(i) tree": _online(mechanism="tree", decoder="dyadic"),
    "(ii) optimal": _online(mechanism="optimal"),
    "(iii) sqrt_toeplitz": _online(mechanism="sqrt_toeplitz"),
    "banded": _online(mechanism="banded"),
    "blt": _online(mechanism="blt"),
}
_DELTA = 1e-3


def _settings(**settings: Any) -> Settings:
    return {
        "preset": "practical",
        "delta": _DELTA,
        "noise-quality": "fast",
        "checkpoint": False,
        "node-deadline-s": 600.0,
        **settings,
    }


def _logistic() -> list[Cell]:
    """Section V-A, figure 3: one step size for all, and independent noise at its own best beside it.

    The paper prints neither step sizes nor the gradient bound; these were chosen on seeds 101 and up (docs/tuning.md).
    """
    own_step = {2.0: 0.0001, 0.5: 0.0001}
    return [
        Cell(
            f"epsilon = {epsilon:g}",
            _settings(
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
                    "mu": gdp_mu(epsilon, _DELTA),
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


def _cnn() -> list[Cell]:
    """Section V-B, figure 4, with both sensitivities, each with a step of its own for all its curves.

    ``update`` clips a machine's whole update, which is a guarantee. The paper divides the sensitivity by tau, which
    holds only for steps that never move two iterates apart. So its noise is that of ``update`` at tau times the mu, and
    the epsilon beside it is the true one of that mu.
    """
    cells = []
    for steps in (5, 10):
        for label, factor, rate in (("update", 1, 0.015 / steps), ("the paper's noise", steps, 0.03)):
            cells.append(
                Cell(
                    f"tau = {steps}, {label}",
                    _settings(
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
                            "mu": factor * gdp_mu(2.0, _DELTA),
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


class Zhang2025Logistic(Paper):
    """Figure 3."""

    name = "zhang-2025-logistic"
    sentence = "correlated noise in online learning: regret of logistic regression"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """One for each epsilon."""
        return _logistic()


class Zhang2025Cnn(Paper):
    """Figure 4."""

    name = "zhang-2025-cnn"
    sentence = "correlated noise in online learning: accuracy and loss of a CNN on MNIST"
    seeds = 10
    table = RegretTable()

    def cells(self) -> list[Cell]:
        """Two numbers of local steps, with both sensitivities."""
        return _cnn()
