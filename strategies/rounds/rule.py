"""Update rules: a frozen state of arrays, the query points a round asks for, and a pure step to the next state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from .participation import LateAnswers
from .replies import Reply, RoundReport, Vector

StateT = TypeVar("StateT")


class UpdateRule(ABC, Generic[StateT]):
    """The pure part of a strategy: what a server computes from the sum of a round's releases, and what that needs."""

    state_type: ClassVar[type[Any]]
    acknowledges: ClassVar[bool] = True
    """Whether machines are told what was aggregated; if not, every release is P_k: all of the machine's prefix sum."""
    sums_suffice: ClassVar[bool] = True
    """Whether rounds need only the sum of releases, so that these may come under masks."""
    late_answers: ClassVar[LateAnswers] = "counted"
    """What becomes of an answer that comes after its round."""
    needs_all: ClassVar[bool] = False
    """Whether the rule's proof needs the answer of every client in every round; one that is off ends a training."""
    absence_costs: ClassVar[str] = ""
    """What a missing answer costs for good, said before the first round; empty where the next one mends it."""
    must_aggregate: ClassVar[bool] = True
    """Whether a training in which nothing was ever aggregated ends with :class:`NothingAggregatedError`."""
    supports_forecast: ClassVar[bool] = True
    """Whether the noise in the model is forecast; not where the rounds make no model."""

    @abstractmethod
    def initial_state(self, start: Vector) -> StateT:
        """The state before the first round, from the initial model as one vector."""

    @abstractmethod
    def query_points(self, state: StateT) -> tuple[Vector, ...]:
        """The points machines are asked to compute gradients at."""

    @abstractmethod
    def step(self, state: StateT, release_sum: Vector, server_round: int) -> StateT:
        """The next state from the sum of a round's releases: pure."""

    def round_entries(self, server_round: int) -> dict[str, Any]:
        """Entries of a round's requests beside those that all rounds have; no guarantee depends on them."""
        return {}

    def next_state(self, state: StateT, release_sum: Vector, report: RoundReport) -> StateT:
        """The state after a round: :meth:`step`, unless a subclass's step also depends on the report."""
        return self.step(state, release_sum, report.server_round)

    @abstractmethod
    def model(self, state: StateT) -> Vector:
        """The model to publish."""

    def asks_machines(self, server_round: int) -> bool:
        """Whether a round asks any machine; for subclasses in which some rounds are the server's own."""
        return True

    def check_reply(self, reply: Reply) -> bool:
        """Whether a well-formed reply may be aggregated; under secure aggregation its release cannot be looked at."""
        return True

    def check_report(self, report: RoundReport) -> None:
        """Refuse a round from whose replies the rule must not make a step."""
