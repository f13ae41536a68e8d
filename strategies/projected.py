"""Steps of update rules: their length, overflow, and the ball K around the start onto which some are projected."""

from __future__ import annotations

import math
from typing import Any, Required, TypedDict, TypeVar, Unpack

import numpy as np

from ..privacy import ConfigurationError
from .rounds.layout import Vector
from .rounds.options import ReleaseOptions
from .rounds.strategy import ReleaseStrategy

StateT = TypeVar("StateT")


class ProjectedOptions(ReleaseOptions, total=False):
    """Options of :class:`ProjectedStrategy`, where they are described."""

    learning_rate: Required[float]
    diameter: float


class StepOptions(TypedDict):
    """Arguments of the pure functions of projected steps beside states and releases."""

    clients_per_round: int
    learning_rate: float
    diameter: float


def check_finite(values: Vector | float) -> None:
    """Refuse a step that overflows."""
    if not np.isfinite(values).all():
        raise ConfigurationError(
            "Expected a finite step, got one that overflows: lower learning_rate, or look for a broken machine "
            "(largest_value)."
        )


def project_to_ball(point: Vector, centre: Vector, radius: float) -> Vector:
    """The nearest point of the L2 ball."""
    offset = point - centre
    distance = float(np.linalg.norm(offset))
    check_finite(distance)
    return point if distance <= radius else centre + offset * (radius / distance)


def check_step(learning_rate: float, diameter: float = math.inf) -> None:
    """Refuse a step or a ball that is not positive."""
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ConfigurationError(f"Expected learning_rate > 0 and finite, got {learning_rate!r}.")
    if math.isnan(diameter) or diameter <= 0:
        raise ConfigurationError(f"Expected diameter > 0, got {diameter!r}.")


class ProjectedStrategy(ReleaseStrategy[StateT]):
    """A strategy whose steps are projected onto a ball; a base class.

    Parameters
    ----------
    learning_rate : float
        eta > 0.
    diameter : float
        D > 0, diameter of the ball K around the initial model; default none.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`.
    """

    def __init__(self, *, learning_rate: float, diameter: float = math.inf, **options: Unpack[ReleaseOptions]) -> None:
        super().__init__(**options)
        check_step(learning_rate, diameter)
        self.learning_rate = float(learning_rate)
        self.diameter = float(diameter)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "learning_rate": self.learning_rate, "diameter": self.diameter}

    def step_options(self) -> StepOptions:
        """Arguments of the update rule's pure function in every round."""
        return StepOptions(
            clients_per_round=self.clients_per_round, learning_rate=self.learning_rate, diameter=self.diameter
        )
