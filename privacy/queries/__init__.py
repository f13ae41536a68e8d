"""Queries: what is bounded, and how a sum is read, one file each; :mod:`.query` is the contract."""

from typing import Any

from .evaluation import EvaluationRows
from .knots import KnotRows
from .mean_of_features import MeanRows
from .query import Query
from .statistics import StatisticsRows

QUERIES: dict[str, type[Query[Any]]] = {
    kind.name: kind for kind in (MeanRows, KnotRows, StatisticsRows, EvaluationRows)
}
"""Queries beside a training, by their names in requests."""
