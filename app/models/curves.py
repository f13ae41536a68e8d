r"""Additive models to look at: a curve for each column, the columns' importance, and every coefficient by its name.

Everything here follows from the saved model, which was released with noise, and from public settings. No row is read.

**Bands.** A model's parameters are what gradients made of them and what noise did. With l the curvature of the loss
in some direction, noise n_s in the mean gradient of round s moves the parameters of round t by -eta h_{t-s} n_s,
where h_k = (1 - x) ((1 + beta) h_{k-1} - beta h_{k-2}), h_0 = 1 and x = eta l: Nesterov's momentum on a quadratic.
Without curvature h_k = 1 + beta + ... + beta^k. With 0 <= x <= 1 the roots r_1, r_2 of z^2 - (1 - x) ((1 + beta) z -
beta) have the product s^2 = beta (1 - x). Where they are real, h_k = s^k sum_j u^{k - 2 j} with u = r_1 / s, a sum
that grows with u + 1 / u = (1 + beta) sqrt((1 - x) / beta); both that and s fall with x. Where they are not, |h_k| <=
(k + 1) s^k, which is at most (k + 1) beta^{k / 2} <= 1 + beta + ... + beta^k, the means of the same numbers. From x =
1 to where steps do not converge, 1 + 1 / (1 + 2 beta), the roots have opposite signs and are at most 1, so |h_k| <=
1. So noise moves parameters most where there is no curvature, which is what
:attr:`murmurfl.app.models.curves.ColumnCurve.lower` and ``upper`` count: it is exact there and no less elsewhere, for a
loss whose curvature stays. A gradient that is cut has none. Averages of iterates and a penalty are counted as the
update rule has them, because the rule itself is run on noise alone.

Bands are of the noise in the parameters, given the knots. They are not confidence intervals: other rows, or knots
with other noise, would give another curve, and clipping and few rounds pull every curve towards zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema
from ...privacy.errors import ConfigurationError
from ...privacy.queries.evaluation import Z_95
from ...privacy.queries.knots import KnotRows
from .model import KNOTS_ARRAY, Model

NOISE_STD = "noise_std"
"""Entry of a model's card: at most this standard deviation is in each of its parameters, by noise."""
OF_NOISE = (
    "Bands are of the privacy noise alone, 95 % at each point: they are no confidence intervals, because other rows "
    "would give other curves."
)
"""Note under every picture of bands."""
_POINTS, _RANKS, _TWO = 101, 201, 2


class FittedModel(Protocol):
    """Model of a table as curves read it: :class:`~murmurfl.app.models.trained_model.TrainedModel`."""

    @property
    def kind(self) -> str:
        """Name of its kind."""
        ...

    @property
    def num_classes(self) -> int:
        """Number of its classes; 1 of numbers."""
        ...

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Parameters and knots."""
        ...

    @property
    def card(self) -> Mapping[str, Any]:
        """Card of the model."""
        ...

    @property
    def schema(self) -> Schema | None:
        """Schema of its rows."""
        ...

    @property
    def classes(self) -> NDArray[Any]:
        """Names of its classes."""
        ...

    @property
    def model(self) -> Model:
        """Model without its parameters."""
        ...

    @property
    def additive(self) -> KnotRows:
        """Query of its knots."""
        ...


@dataclass(frozen=True)
class ColumnCurve:
    """Effect of one column on the prediction, with bands for the noise.

    Parameters
    ----------
    column : str
        The column's name.
    values : ndarray of shape (points,)
        Numbers in the column's own units, or names of categories.
    effect : ndarray of shape (points,) or (classes, points)
        Of two classes the log odds of the second, of several each class's score less their mean, of numbers the
        label in its own units. Its mean is zero, over categories or over ranks that are
        evenly spread between distinct knots.
    lower, upper : ndarray
        Band of ``effect`` for the noise: 95 % at each point. NaN if the amount of noise is not known.
    missing : ndarray of shape (3,) or (classes, 3), optional
        Effect of a cell without a value, and its band's ends. Categories have none.
    importance : float
        Mean absolute effect, weighted as the mean is, over classes too.

    Examples
    --------
    >>> import numpy as np
    >>> effect = np.array([-0.5, 0.5])
    >>> curve = ColumnCurve("smoker", np.array(["no", "yes"]), effect, effect - 0.1, effect + 0.1, None, 0.5)
    >>> bool(curve.lower[1] > 0)
    True
    """

    column: str
    values: NDArray[np.float64] | NDArray[np.str_]
    effect: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    missing: NDArray[np.float64] | None
    importance: float

    @property
    def half_width(self) -> float:
        """Half of the width of the band where it is widest; NaN if the amount of noise is not known."""
        return float(np.max(self.upper - self.lower)) / 2.0

    @property
    def is_number(self) -> bool:
        """Whether it is a column of numbers."""
        return self.values.dtype.kind == "f"


class Coefficient(NamedTuple):
    """One coefficient of an additive model."""

    column: str
    """The column; empty for the constant."""
    feature: str
    """``knot 41.5``, ``rank``, ``missing``, the name of a category, or ``constant``."""
    label: str
    """The class of several; empty of two, where it is the log odds of the second, and of numbers."""
    value: float
    noise_std: float
    """Standard deviation of its noise, or more; NaN if it is not known."""


def curves(model: FittedModel) -> dict[str, ColumnCurve]:
    """Return the curve of each column of an additive model, with bands of the noise, by the column's name.

    Raises
    ------
    ConfigurationError
        If the model is no additive one.

    Examples
    --------
    >>> from murmurfl import fit
    >>> rows = [{"age": float(age % 80), "ill": "yes" if age % 80 > 50 else "no"} for age in range(800)]
    >>> found = curves(fit(rows, label="ill", clients=2, epsilon=8).model)["age"]
    >>> bool(found.effect[0] < 0 < found.effect[-1]), found.values.shape == found.upper.shape
    (True, True)
    """
    own = _Weights(model)
    return {
        column.name: own.curve(column.name, column.values, values, features)
        for column, values, features in own.rows.blocks
    }


def importance(model: FittedModel) -> dict[str, float]:
    """Return the mean absolute effect of each column of an additive model, the most important one first.

    The mean is over what was released: numbers count by their rank, evenly between distinct knots, and categories each
    the same, because how frequent they are was not released. Missing cells do not count. Noise has importance too.

    Raises
    ------
    ConfigurationError
        If the model is no additive one.

    Examples
    --------
    >>> from murmurfl import fit
    >>> rows = [{"age": float(age % 80), "ill": "yes" if age % 80 > 50 else "no"} for age in range(800)]
    >>> list(importance(fit(rows, label="ill", clients=2, epsilon=8).model))
    ['age']
    """
    found = {name: curve.importance for name, curve in curves(model).items()}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def coefficients(model: FittedModel) -> list[Coefficient]:
    """Return the coefficients of an additive model by column and feature, each with the noise in it.

    Features of a column of numbers are hat functions of its distinct knots, less their mean, its rank from -1 to 1, and
    whether it is missing: two of them say the same where both are used, so read curves before coefficients.

    Raises
    ------
    ConfigurationError
        If the model is no additive one.

    Examples
    --------
    >>> from murmurfl import fit
    >>> rows = [{"age": float(age % 80), "ill": "yes" if age % 80 > 50 else "no"} for age in range(800)]
    >>> coefficients(fit(rows, label="ill", clients=2, epsilon=8).model)[-1].feature
    'constant'
    """
    own = _Weights(model)
    found: list[tuple[str, str, NDArray[np.float64]]] = []
    for column, _, features in own.rows.blocks:
        if column.values:
            named = list(enumerate(column.values))
        else:
            knots = own.knots[column.name]
            named = [(place, f"knot {knot:.6g}") for place, knot in enumerate(knots)]
            named += [(own.rows.knots, "rank"), (own.rows.knots + 1, "missing")]
        found += [(column.name, name, own.weights[:, features.start + place]) for place, name in named]
    found.append(("", "constant", own.constant))
    labels = own.labels
    return [
        Coefficient(column, feature, label, float(value), own.noise_std)
        for column, feature, values in found
        for label, value in zip(labels, values, strict=True)
    ]


def effect_name(model: FittedModel) -> str:
    """Return what an effect is an effect on, in words."""
    if model.num_classes == 1:
        return "label" if model.schema is None else model.schema.label.column
    return f"log odds of {model.classes[1]}" if model.num_classes == _TWO else "score, log scale"


class _Weights:
    """Weights of an additive model as effects: one row for two classes or a number, or one for each of several."""

    def __init__(self, model: FittedModel) -> None:
        if KNOTS_ARRAY not in model.arrays:
            raise ConfigurationError(
                f"Expected an additive model, which has a curve for each column, got {model.kind!r}: fit a table with "
                "model = 'additive'.",
                kind="unsupported",
                setting="model",
                got=model.kind,
            )
        self.rows: KnotRows = model.additive
        self.public = np.asarray(model.arrays[KNOTS_ARRAY], dtype=np.float64)
        temperature = model.model.temperature
        arrays = [np.asarray(model.arrays[name], dtype=np.float64) / temperature for name in model.model.names]
        std = model.card.get(NOISE_STD)
        own = math.nan if std is None else float(std) / temperature
        self.labels = [""]
        if model.num_classes == 1:
            low, high = self.public[-2:]
            scale = (high - low) / 2.0
            self.weights, self.constant = scale * arrays[0][None, :-1], scale * (arrays[0][-1:] + 1.0) + low
            self.noise_std = float(scale * own)
        elif model.num_classes == _TWO:
            self.weights, self.constant = arrays[0][1:] - arrays[0][:1], arrays[1][1:] - arrays[1][:1]
            self.noise_std = math.sqrt(2.0) * own
        else:
            self.weights, self.constant = (one - one.mean(axis=0) for one in arrays)
            self.noise_std = math.sqrt(1.0 - 1.0 / model.num_classes) * own
            self.labels = [str(one) for one in model.classes]

    @property
    def knots(self) -> dict[str, NDArray[np.float64]]:
        """The distinct knots of each column of numbers."""
        numbers = [column.name for column, *_ in self.rows.blocks if not column.values]
        count = self.rows.knots
        return {
            name: np.unique(self.public[1 + place * count : 1 + (place + 1) * count])
            for place, name in enumerate(numbers)
        }

    def curve(self, name: str, categories: tuple[str, ...], values: slice, features: slice) -> ColumnCurve:
        """Return the curve of the column with these places among values and features."""
        if categories:
            wide = np.eye(len(categories))
            effect, lower, upper = self._effects(wide, values, features)
            return ColumnCurve(name, np.array(categories), effect, lower, upper, None, float(np.abs(effect).mean()))
        knots = self.knots[name]
        grid = np.unique(np.concatenate([knots, np.linspace(knots[0], knots[-1], _POINTS)]))
        effect, lower, upper = self._effects(np.stack([grid, np.zeros_like(grid)], axis=1), values, features)
        missing = np.stack(self._effects(np.array([[0.0, 1.0]]), values, features), axis=-1)[..., 0, :]
        even = np.interp(np.linspace(0.0, len(knots) - 1.0, _RANKS), np.arange(len(knots)), knots)
        spread, _, _ = self._effects(np.stack([even, np.zeros_like(even)], axis=1), values, features)
        return ColumnCurve(name, grid, effect, lower, upper, missing, float(np.abs(spread).mean()))

    def _effects(self, cells: NDArray[np.float64], values: slice, features: slice) -> list[NDArray[np.float64]]:
        """Return the effects of values of one column, and the ends of their bands, each of shape (..., points)."""
        rows = np.zeros((len(cells), self.rows.num_values))
        rows[:, values] = cells
        seen = self.rows.features(rows, self.public)[:, features]
        effect = self.weights[:, features] @ seen.T
        reach = Z_95 * self.noise_std * np.linalg.norm(seen, axis=1)
        found = [effect, effect - reach, effect + reach]
        return [one[0] for one in found] if len(self.weights) == 1 else found
