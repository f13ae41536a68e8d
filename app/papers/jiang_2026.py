"""jiang-2026: shuffled gradients with public samples, mean estimation, ridge and lasso regression (section 6)."""

from __future__ import annotations

from collections.abc import Sequence

from ...privacy import gdp_mu
from .cell import Cell
from .excess_risk import ExcessRiskTable
from .paper import Paper

SIZES = {
    "mnist-69": (1000, 784),
    "cifar10-ridge": (1000, 3072),
    "crime": (159, 124),
    "compas": (2103, 11),
    "credit-card": (200, 21),
}
"""n and d of the paper (table 6; for COMPAS it says 2013 there and 2103 in the text)."""

_STEPS = tuple(float(f"{digit}e-{power}") for power in range(1, 10) for digit in (5, 1))
_DELTA = 1e-6
_ALGORITHMS = {
    "Interleaved": "interleaved",
    "Priv-Pub": "priv-pub",
    "Pub-Priv": "pub-priv",
    "DP-ShuffleG": "dp-shuffleg",
    "Public-Only": "public-only",
}


def _cells(
    task: str, model: str, epsilons: tuple[float, ...], settings: tuple[tuple[str, float], ...] = (("RR", 0.5),)
) -> list[Cell]:
    """Section 6 and appendix H: figure 2, and for some data sets figures 3 to 6, with other orders and shares p."""
    return [
        Cell(
            f"{task}, epsilon = {epsilon:g}, {order}, p = {share:g}",
            {
                "preset": "practical",
                "task": task,
                "model": model,
                "num-clients": 1,
                "clients-per-round": 1,
                "num-rounds": 50,
                "clip-norm": 10.0,
                "delta": _DELTA,
                "mu": gdp_mu(epsilon, _DELTA),
                "order": order,
                "private-share": share,
                "noise-quality": "fast",
                "checkpoint": False,
            },
            {label: {"strategy": "shuffled", "variant": variant} for label, variant in _ALGORITHMS.items()},
            steps=_STEPS,
        )
        for order, share in settings
        for epsilon in epsilons
    ]


_VARIED = (("RR", 0.5), ("IG", 0.5), ("SO", 0.5), ("RR", 0.25), ("RR", 0.75))


class Jiang2026(Paper):
    """One of the paper's three problems."""

    seeds = 10
    table = ExcessRiskTable(SIZES)

    def __init__(self, problem: str, sentence: str, cells: Sequence[Cell]) -> None:
        self.name = f"jiang-2026-{problem}"
        self.sentence = f"{sentence} with shuffled gradients and public samples: excess risk"
        self._cells = list(cells)

    def cells(self) -> list[Cell]:
        """One for each task, epsilon, order and share of private samples."""
        return list(self._cells)


MEAN = Jiang2026("mean", "mean estimation", _cells("mnist-69", "mean", (5.0, 10.0), _VARIED))
RIDGE = Jiang2026(
    "ridge",
    "ridge regression",
    [cell for task in ("cifar10-ridge", "crime") for cell in _cells(task, "ridge", (1.0, 5.0))],
)
LASSO = Jiang2026(
    "lasso",
    "logistic lasso regression",
    [
        *_cells("compas", "logistic", (5.0, 10.0)),
        *_cells("credit-card", "logistic", (5.0, 10.0), _VARIED),
    ],
)
