"""Server optimisers on a round's average update: momentum, Adam and Yogi, as Flower's FedAvgM, FedAdam and FedYogi.

With Delta_t the average update of round t and eta the learning rate,

    momentum:  u_t = beta u_{t-1} + Delta_t,  x_{t+1} = x_t + eta u_t
    Adam:      m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t,  v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2,
               x_{t+1} = x_t + eta c_t m_t / (sqrt v_t + tau)
    Yogi:      m_t as Adam,  v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2),
               x_{t+1} = x_t + eta m_t / (sqrt v_t + tau)

where c_t = sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1)). Everything here is computed from releases, whose noise is in
them already: it costs no privacy, whatever is computed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError
from ..privacy.accounting.gdp import check_positive
from .rounds.layout import Vector

Moments = NDArray[np.float64]
"""What an optimiser remembers from round to round, shape (k, d): one row for momentum, two for Adam and Yogi."""


def momentum_step(
    moments: Moments, update: Vector, *, momentum: float, nesterov: bool = False
) -> tuple[Vector, Moments]:
    """The direction of a momentum step, with ``nesterov`` Delta + beta u, and the new moments u, shape (1, d): pure."""
    velocity = momentum * moments[0] + update
    return (update + momentum * velocity if nesterov else velocity), velocity[None, :]


def adam_step(
    moments: Moments, update: Vector, steps: int, *, beta_1: float, beta_2: float, tau: float
) -> tuple[Vector, Moments]:
    """The direction of an Adam step after ``steps`` others, and the new moments m and v, shape (2, d): pure.

    The correction is that of Flower's FedAdam, which counts from 2.
    """
    first = beta_1 * moments[0] + (1 - beta_1) * update
    second = beta_2 * moments[1] + (1 - beta_2) * update**2
    correction = math.sqrt(1 - beta_2 ** (steps + 2)) / (1 - beta_1 ** (steps + 2))
    return correction * first / (np.sqrt(second) + tau), np.stack([first, second])


def yogi_step(moments: Moments, update: Vector, *, beta_1: float, beta_2: float, tau: float) -> tuple[Vector, Moments]:
    """The direction of a Yogi step, Adam whose second moment grows slowly, and the new moments: pure."""
    first = beta_1 * moments[0] + (1 - beta_1) * update
    square = update**2
    second = moments[1] - (1 - beta_2) * square * np.sign(moments[1] - square)
    return first / (np.sqrt(second) + tau), np.stack([first, second])


class ServerOptimizer:
    """A rule by which :class:`~murmurfl.strategies.CorrelatedFedAvg` steps along average updates; a base class.

    A subclass is a frozen dataclass of its settings. It sees releases alone, so the machines' guarantees are what they
    are without it.
    """

    learning_rate: ClassVar[float] = 1.0
    """Default eta."""
    remembered: ClassVar[int] = 0
    """k, rows of moments."""

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        """The direction of a step after ``steps`` others, and the new moments, shape (k, d), zeros at first: pure."""
        raise NotImplementedError(f"{type(self).__name__} must define direction.")

    @property
    def settings(self) -> dict[str, Any]:
        """Name and numbers that a checkpoint must agree on, plain values."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class ServerMomentum(ServerOptimizer):
    """Momentum on the average update, as Flower's FedAvgM; the learning rate is 1 unless the strategy says another.

    Parameters
    ----------
    momentum : float
        beta, 0 <= beta < 1. In the long run the steps along a constant update are 1 / (1 - beta) times as long.
    nesterov : bool
        Whether to look ahead along the momentum.
    """

    remembered: ClassVar[int] = 1

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_below_one("momentum", self.momentum)

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return momentum_step(moments, update, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """Adam on the average update, as Flower's FedAdam; the learning rate is 0.1 unless the strategy says another.

    Parameters
    ----------
    beta_1, beta_2 : float
        What of the moments stays from round to round, from 0 to below 1.
    tau : float
        Added to the root of the second moment, > 0.

    Notes
    -----
    Where noise is most of the average, the second moment is the noise's, and the steps are those of momentum.
    """

    learning_rate: ClassVar[float] = 0.1
    remembered: ClassVar[int] = 2

    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self.beta_1, self.beta_2, self.tau)

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return adam_step(moments, update, steps, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


@dataclass(frozen=True)
class ServerYogi(ServerOptimizer):
    """Yogi on the average update, as Flower's FedYogi; the learning rate is 0.01 unless the strategy says another.

    Its parameters are those of :class:`ServerAdam`.
    """

    learning_rate: ClassVar[float] = 0.01
    remembered: ClassVar[int] = 2

    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_adaptive(self.beta_1, self.beta_2, self.tau)

    def direction(self, moments: Moments, update: Vector, steps: int) -> tuple[Vector, Moments]:
        return yogi_step(moments, update, beta_1=self.beta_1, beta_2=self.beta_2, tau=self.tau)


OPTIMIZERS: dict[str, type[ServerOptimizer]] = {"momentum": ServerMomentum, "adam": ServerAdam, "yogi": ServerYogi}
"""Optimisers by the names that ``CorrelatedFedAvg(optimizer=...)`` takes as well."""


def server_optimizer(stated: ServerOptimizer | str | None) -> ServerOptimizer | None:
    """An optimiser, by its name or as it is; None for plain averaging."""
    if stated is None or isinstance(stated, ServerOptimizer):
        return stated
    if isinstance(stated, str) and stated in OPTIMIZERS:
        return OPTIMIZERS[stated]()
    names = ", ".join(map(repr, OPTIMIZERS))
    raise ConfigurationError(
        f"Expected optimizer one of {names}, or an object such as ServerMomentum(momentum=0.9), got {stated!r}."
    )


def _check_below_one(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigurationError(f"Expected 0 <= {name} < 1, got {value!r}.")


def _check_adaptive(beta_1: float, beta_2: float, tau: float) -> None:
    _check_below_one("beta_1", beta_1)
    _check_below_one("beta_2", beta_2)
    check_positive("tau", tau)
