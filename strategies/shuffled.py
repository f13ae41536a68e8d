r"""Private shuffled gradients with public data, the server's half (jiang-2026, algorithm 1; ALGORITHMS section 5).

The end of an epoch is the mean of the machines' ends, and the regulariser is applied there, once an epoch:

    x_end = x - eta (1 / m) sum of the releases v,    x <- argmin_x n psi(x) + ||x - x_end||^2 / (2 eta)

An epoch on public samples alone is the server's own: nobody is asked and nothing is spent. The paper has one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError
from ..privacy.machine.shuffled_machine import noisy_epoch
from .rounds.options import StepOptions, takes
from .rounds.replies import Vector
from .rounds.sampling import LateAnswers
from .rounds.strategy import ReleaseStrategy

Regularizer = Literal["none", "l2", "l1", "ball"]
REGULARIZERS: tuple[Regularizer, ...] = get_args(Regularizer)
Variant = Literal["dp-shuffleg", "priv-pub", "pub-priv", "interleaved", "public-only"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class ShuffledState:
    """State of shuffled gradients: where the next epoch starts, shape (d,)."""

    x: Vector


def private_rounds(variant: Variant, num_rounds: int, private_share: float) -> range:
    """The rounds, from 1, in which machines are asked (the paper's table 2): ``private_share`` of K, rounded."""
    if variant not in VARIANTS or not 0 < private_share <= 1:
        raise ConfigurationError(
            f"Expected a variant of {VARIANTS} and 0 < private_share <= 1, got {variant!r} and {private_share!r}."
        )
    some = min(max(round(private_share * num_rounds), 1), num_rounds)
    if variant == "public-only":
        return range(0)
    if variant == "priv-pub":
        return range(1, some + 1)
    return range(num_rounds - some + 1 if variant == "pub-priv" else 1, num_rounds + 1)


def proximal(kind: Regularizer, x: NDArray[np.float64], strength: float, weight: float) -> NDArray[np.float64]:
    """argmin_z weight psi(z) + ||z - x||^2 / 2, for points along the last axis: pure.

    Parameters
    ----------
    kind : {"none", "l2", "l1", "ball"}
        psi: 0; strength / 2 ||.||^2; strength ||.||_1; the indicator of a ball of radius ``strength`` around 0.
    x : ndarray of shape (..., d)
    strength : float
        lambda, or the radius.
    weight : float or ndarray that broadcasts
        eta n.
    """
    if kind == "l2":
        return x / (1.0 + weight * strength)
    if kind == "l1":
        return np.sign(x) * np.maximum(np.abs(x) - weight * strength, 0.0)
    if kind == "ball":
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return x * np.minimum(1.0, strength / np.maximum(norms, 1e-300))
    return x


def penalty(kind: Regularizer, x: NDArray[np.float64], strength: float) -> NDArray[np.float64]:
    """The value of psi at points along the last axis; 0 in the ball, where every epoch ends."""
    if kind == "l2":
        return strength / 2 * np.square(x).sum(axis=-1)
    if kind == "l1":
        return strength * np.abs(x).sum(axis=-1)
    return np.zeros(np.shape(x)[:-1])


@dataclass(frozen=True)
class PublicEpochs:
    """Public samples for the server's own epochs.

    Parameters
    ----------
    gradient : callable
        The gradient at a point, shape (d,), on public sample i, from 0.
    steps : int
        n.
    clip_norm : float
        S. The paper clips public gradients too; no guarantee needs it.
    """

    gradient: Callable[[Vector, int], NDArray[np.floating]]
    steps: int
    clip_norm: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledOptions(StepOptions):
    """What :class:`ShuffledAvg` takes."""

    steps_per_epoch: int
    regularizer: Regularizer = "none"
    strength: float = 0.0
    rounds: range | None = None
    public: PublicEpochs | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_epoch < 1:
            raise ConfigurationError(f"Expected steps_per_epoch >= 1, got {self.steps_per_epoch!r}.")
        if self.regularizer not in REGULARIZERS or (self.regularizer != "none" and not self.strength > 0):
            raise ConfigurationError(
                f"Expected regularizer one of {REGULARIZERS} with strength > 0, got {self.regularizer!r}, "
                f"{self.strength!r}."
            )


class ShuffledAvg(ReleaseStrategy[ShuffledState]):
    """Shuffled gradients over machines, for :class:`~murmurfl.clients.ShuffledClient`.

    Parameters
    ----------
    learning_rate : float
        eta > 0, that of the machines.
    steps_per_epoch : int
        n, steps of a machine's epoch.
    regularizer : {"none", "l2", "l1", "ball"}
    strength : float
        lambda of the regulariser, or the ball's radius; > 0 unless there is none.
    rounds : range, optional
        The rounds, from 1, in which machines are asked; default all (:func:`private_rounds`).
    public : PublicEpochs, optional
        For all other rounds.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`.

    Notes
    -----
    The proximal step and the epochs on public samples are post-processing of what machines released.
    """

    state_type: ClassVar[type[ShuffledState]] = ShuffledState
    sums_suffice: ClassVar[bool] = False  # an epoch is built on no release before
    late_answers: ClassVar[LateAnswers] = "refused"  # the next epoch goes on from all of this one

    options: ShuffledOptions

    @takes(ShuffledOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options)

    def settings(self) -> dict[str, Any]:
        own, rounds = self.options.own, self.options.rounds
        del own["public"], own["rounds"]
        return {**super().settings(), **own, "private_rounds": [] if rounds is None else [rounds.start, rounds.stop]}

    def initial_state(self, start: Vector) -> ShuffledState:
        return ShuffledState(start)

    def query_points(self, state: ShuffledState) -> tuple[Vector, ...]:
        return (state.x,)

    def step(self, state: ShuffledState, release_sum: Vector, server_round: int) -> ShuffledState:
        if self.asks_machines(server_round):
            if not release_sum.any():  # nobody answered: there was no epoch
                return state
            total = release_sum / self.clients_per_round
        elif self.options.public is None:
            raise ConfigurationError(f"Expected public samples for round {server_round}, which asks no silo; got none.")
        else:
            public, rate = self.options.public, self.options.learning_rate
            total = noisy_epoch(public.gradient, state.x, public.steps, learning_rate=rate, clip_norm=public.clip_norm)
        end = state.x - self.options.learning_rate * total
        weight = self.options.learning_rate * self.options.steps_per_epoch
        return ShuffledState(proximal(self.options.regularizer, end, self.options.strength, weight))

    def model(self, state: ShuffledState) -> Vector:
        return state.x

    def asks_machines(self, server_round: int) -> bool:
        return self.options.rounds is None or server_round in self.options.rounds
