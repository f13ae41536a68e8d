r"""ISRL-DP minibatch SGD, the server's half: the "other work" of reshef-levy-2025 (Lowy and Razaviyayn 2023).

With g_r the sum of the releases divided by m, the number asked, and Project_K onto the ball of diameter D:

``minibatch`` (their algorithm 1, equal weights)
    w_r = Project_K(w_{r-1} - eta g_r) with g_r asked for at w_{r-1}; published is the average of w_1 .. w_r.
``accelerated`` (their algorithm 2 without strong convexity: AC-SA of Lan 2012)
    With a_r = 2 / (r + 1), g_r is asked for at (1 - a_r) v_{r-1} + a_r w_{r-1}, w_r = Project_K(w_{r-1} - r eta g_r),
    and v_r = (1 - a_r) v_{r-1} + a_r w_r is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack, get_args

from ...privacy import ConfigurationError
from ..projected import ProjectedOptions, ProjectedStrategy, project_to_ball
from ..rounds.layout import Vector

Variant = Literal["minibatch", "accelerated"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class IsrlDpState:
    """State after a round: centre of the ball K, iterate w, published model v and query point, each of shape (d,)."""

    start: Vector
    w: Vector
    average: Vector
    query: Vector


def isrl_dp_step(
    state: IsrlDpState,
    release_sum: Vector,
    server_round: int,
    *,
    variant: Variant,
    clients_per_round: int,
    learning_rate: float,
    diameter: float,
) -> IsrlDpState:
    """One round: a pure function; parameters as in :func:`~murmurfl.strategies.mu2_step`."""
    r, accelerated = server_round, variant == "accelerated"
    step = learning_rate * (r if accelerated else 1) / clients_per_round
    w = project_to_ball(state.w - step * release_sum, state.start, diameter / 2)
    weight = 2.0 / (r + 1) if accelerated else 1.0 / r
    average = (1.0 - weight) * state.average + weight * w
    following = 2.0 / (r + 2)
    query = (1.0 - following) * average + following * w if accelerated else w
    return IsrlDpState(state.start, w, average, query)


class IsrlDp(ProjectedStrategy[IsrlDpState]):
    """ISRL-DP minibatch SGD with an untrusted server, for :class:`~murmurfl.clients.IsrlDpClient`.

    Parameters
    ----------
    variant : {"minibatch", "accelerated"}
        The accelerated variant's step grows with the round: r eta.
    **options
        See :class:`~murmurfl.strategies.projected.ProjectedStrategy`.
    """

    state_type: ClassVar[type[IsrlDpState]] = IsrlDpState

    def __init__(self, *, variant: Variant = "minibatch", **options: Unpack[ProjectedOptions]) -> None:
        super().__init__(**options)
        if variant not in VARIANTS:
            raise ConfigurationError(f"Expected variant one of {VARIANTS}, got {variant!r}.")
        self.variant: Variant = variant

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "variant": self.variant}

    def initial_state(self, start: Vector) -> IsrlDpState:
        return IsrlDpState(start, start, start, start)

    def query_points(self, state: IsrlDpState) -> tuple[Vector, ...]:
        return (state.query,)

    def step(self, state: IsrlDpState, release_sum: Vector, server_round: int) -> IsrlDpState:
        return isrl_dp_step(state, release_sum, server_round, variant=self.variant, **self.step_options())

    def model(self, state: IsrlDpState) -> Vector:
        return state.average
