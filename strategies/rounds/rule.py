"""Update rules: a frozen state of arrays, the query points a round asks for, and a pure step to the next state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from .replies import Layout, Vector

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Turn:
    """Facts that a rule may know about the round whose step it takes, besides the sum of its releases.

    Parameters
    ----------
    number : int
        t, from 1. A round that was skipped does not count: the next one asks for the same step again.
    clients_per_round : int
        m, the clients that a round asks, by which a step divides.
    aggregated : int
        Releases in the sum.
    samples : int
        Samples in the sum, by clients' own accounts.
    layout : Layout
        The arrays of the model.

    Examples
    --------
    >>> Turn(number=3, clients_per_round=10).clients_per_round
    10
    """

    number: int
    clients_per_round: int
    aggregated: int = 0
    samples: int = 0
    layout: Layout = ()


class Rule(ABC, Generic[StateT]):
    """Update rule of a server for the sum of a round's releases, as pure functions; usually a frozen dataclass.

    Its fields are settings that a checkpoint must agree on (:meth:`settings`).

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from murmurfl.strategies import Turn
    >>> @dataclass(frozen=True)
    ... class SignState:
    ...     model: np.ndarray
    >>> @dataclass(frozen=True)
    ... class SignRule(Rule[SignState]):
    ...     state_type = SignState
    ...     learning_rate: float
    ...     def init(self, start, layout):
    ...         return SignState(start)
    ...     def points(self, state):
    ...         return (state.model,)
    ...     def update(self, state, total, turn):
    ...         return SignState(state.model - self.learning_rate * np.sign(total))
    ...     def model(self, state):
    ...         return state.model
    >>> rule = SignRule(learning_rate=0.5)
    >>> state = rule.update(rule.init(np.zeros(2), []), np.array([3.0, -0.1]), Turn(number=1, clients_per_round=10))
    >>> rule.model(state).tolist(), rule.settings()
    ([-0.5, 0.5], {'learning_rate': 0.5})
    """

    state_type: ClassVar[type[Any]]
    """Frozen dataclass of the state, whose fields are arrays."""
    divides_by_cohort: ClassVar[bool] = True
    """Whether a step divides by ``clients_per_round`` whatever came, and not by what came."""

    @abstractmethod
    def init(self, start: Vector, layout: Layout) -> StateT:
        """Return the state before the first round, from the initial model as one vector."""

    @abstractmethod
    def points(self, state: StateT) -> tuple[Vector, ...]:
        """Return the points that clients are asked to compute gradients at."""

    @abstractmethod
    def update(self, state: StateT, total: Vector, turn: Turn) -> StateT:
        """Return the next state from the sum of a round's releases; zeros where none was opened."""

    @abstractmethod
    def model(self, state: StateT) -> Vector:
        """Return the model to publish."""

    def entries(self, turn: int) -> dict[str, Any]:
        """Return entries of a round's requests beside those that all rounds have; no guarantee depends on them."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on, plain values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
