"""The papers' tables and figures: what is run, what the paper prints, and how both are shown.

A paper is one object, and so is the kind of its tables. ``murmurfl reproduce package.module:PAPER`` runs a user's own.
The command names the papers in its help, so nothing that takes long is imported here.
"""

from ..settings.registry import Registry
from .accuracy import TableKind
from .best_accuracy import BestAccuracy, ManySites
from .jiang_2026 import LASSO, MEAN, RIDGE
from .paper import Cell, Paper
from .plan_grid import PlanGrid, PlanGridMnist
from .rates import Rates
from .reshef_levy import ReshefLevy2024, ReshefLevy2025
from .sums_on_mnist import SecureAggregation
from .tran_cutkosky_2022 import TranCutkosky2022
from .zhang_2025 import Zhang2025Cnn, Zhang2025Logistic

PAPERS: Registry[Paper] = Registry(
    "reproduction",
    Paper,  # type: ignore[type-abstract]
    [
        ReshefLevy2025(),
        ReshefLevy2024(),
        SecureAggregation(),
        BestAccuracy(),
        ManySites(),
        PlanGrid(),
        PlanGridMnist(),
        Zhang2025Logistic(),
        Zhang2025Cnn(),
        TranCutkosky2022(),
        MEAN,
        RIDGE,
        LASSO,
        Rates(),
    ],
)

__all__ = ["PAPERS", "Cell", "Paper", "TableKind"]
