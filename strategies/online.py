"""Online federated learning, the server's half (zhang-2025, algorithm 1; ALGORITHMS 3.1).

    x^{r+1} = x^r - eta~ (1 / m) sum of the releases,    eta~ = eta eta_g tau

So x is one step along the prefix sums of what the machines release, and the noise in it is theirs: a row of B Z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..privacy.accounting.gdp import check_count, check_positive
from .rounds.options import StepOptions, takes
from .rounds.replies import Vector
from .rounds.strategy import ReleaseStrategy


@dataclass(frozen=True)
class OnlineState:
    """State of online federated SGD: the global model, shape (d,)."""

    x: Vector


def online_step(state: OnlineState, release_sum: Vector, *, clients_per_round: int, step: float) -> OnlineState:
    """One round with m = ``clients_per_round`` and eta~ = ``step``: a pure function."""
    return OnlineState(state.x - step / clients_per_round * release_sum)


@dataclass(frozen=True, kw_only=True, eq=False)
class OnlineOptions(StepOptions):
    """What :class:`OnlineFedSGD` takes."""

    local_steps: int
    global_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("global_learning_rate", self.global_learning_rate)
        check_count("local_steps", self.local_steps)


class OnlineFedSGD(ReleaseStrategy[OnlineState]):
    """Locally private online federated learning, for :class:`~murmurfl.clients.OnlineClient`.

    Parameters
    ----------
    learning_rate : float
        eta of the machines' local steps, which have their own setting; this one only scales the server's step.
    local_steps : int
        tau.
    global_learning_rate : float
        eta_g > 0.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`; the paper asks all machines in every round.
    """

    state_type: ClassVar[type[OnlineState]] = OnlineState

    options: OnlineOptions

    @takes(OnlineOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options)
        taken = self.options
        self.step_size = taken.learning_rate * taken.global_learning_rate * taken.local_steps
        """eta~."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "step_size": self.step_size}

    def initial_state(self, start: Vector) -> OnlineState:
        return OnlineState(start)

    def query_points(self, state: OnlineState) -> tuple[Vector, ...]:
        return (state.x,)

    def step(self, state: OnlineState, release_sum: Vector, server_round: int) -> OnlineState:
        return online_step(state, release_sum, clients_per_round=self.clients_per_round, step=self.step_size)

    def model(self, state: OnlineState) -> Vector:
        return state.x
