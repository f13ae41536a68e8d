"""Training samples on a device, per-sample gradients of many clients at once, and their clipped counts on the grid.

Closed forms are in float64, as in :mod:`murmurfl.app.models`, and differ from those by rounding. Modules compute in
their own type.

:meth:`murmurfl.privacy.release.clipping.RowBound.scales` decides how much clipping leaves of a row, from norms that the
device computes: one number a sample comes to this side and goes back. The device multiplies, rounds and adds up. A
client with a row without a finite norm is computed on this side, by the same code as everywhere.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....clients.adapters.per_sample_gradients import LEAST_SQUARES
from ....clients.adapters.torch_model import ModuleGradients
from ....privacy.errors import ConfigurationError
from ....privacy.noise import MARK, Grid
from ....privacy.release.clipping import RowBound, observe_releases
from ...data.partition import PerClient
from ...data.task import Shard
from ...models.linear import (
    LinearModel,
    LogisticRegression,
    MeanEstimation,
    NonconvexLogistic,
    RidgeRegression,
    SoftmaxRegression,
)
from ...models.model import Model, Parameters
from .backend import torch


class DeviceContributions(ABC):
    """Contributions of many samples, stacked on a device."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which the arrays live."""

    @abstractmethod
    def squared_norms(self) -> torch.Tensor:
        """Squared L2 norms of the rows, shape (samples,), float64; not finite if unknown."""

    @abstractmethod
    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        """Return some rows, each times its factor: shape (rows, d), float64, in memory of their own."""

    @abstractmethod
    def chosen(self, rows: NDArray[np.intp]) -> DeviceContributions:
        """Return some of the rows."""

    def norms(self) -> NDArray[np.float64]:
        """L2 norms of the rows, on this side."""
        with np.errstate(all="ignore"):
            return np.sqrt(self.squared_norms().cpu().numpy())

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to this side, for the few rows with careful treatment."""
        factor = torch.full((1,), scale, dtype=torch.float64, device=self.device)
        out[:] = self.scaled(slice(row, row + 1), factor)[0].cpu().numpy()


class DeviceOuterProducts(DeviceContributions):
    """Gradients of a linear layer, [r x^T, r] for a sample's r and x, without the second r if the layer has no bias.

    See :class:`~murmurfl.clients.adapters.per_sample_gradients.OuterProducts`.
    """

    def __init__(self, residuals: torch.Tensor, features: torch.Tensor, *, bias: bool) -> None:
        self._residuals, self._features, self._bias = residuals, features, bias

    @property
    def device(self) -> torch.device:
        return self._residuals.device

    def squared_norms(self) -> torch.Tensor:
        return _told(self._residuals) * (_told(self._features) + (1.0 if self._bias else 0.0))

    def chosen(self, rows: NDArray[np.intp]) -> DeviceOuterProducts:
        index = torch.from_numpy(rows).to(self.device)
        return DeviceOuterProducts(self._residuals[index], self._features[index], bias=self._bias)

    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        residuals, features = self._residuals[rows] * factors[:, None], self._features[rows]
        count, classes, width = len(residuals), residuals.shape[1], features.shape[1]
        split = classes * width
        made = residuals.new_empty((count, split + (classes if self._bias else 0)))
        torch.mul(residuals[:, :, None], features[:, None, :], out=made[:, :split].view(count, classes, width))
        if self._bias:
            made[:, split:] = residuals
        return made


class DeviceRows(DeviceContributions):
    """Contributions as plain rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def squared_norms(self) -> torch.Tensor:
        return self._rows.square().sum(dim=1)

    def chosen(self, rows: NDArray[np.intp]) -> DeviceRows:
        return DeviceRows(self._rows[torch.from_numpy(rows).to(self.device)])

    def scaled(self, rows: slice, factors: torch.Tensor) -> torch.Tensor:
        return self._rows[rows] * factors[:, None]


def _told(rows: torch.Tensor) -> torch.Tensor:
    """Squared lengths of the rows; NaN for one too short to be exact, since a long factor would amplify its error."""
    squares = rows.square().sum(dim=1)
    return squares.masked_fill((squares < LEAST_SQUARES) & rows.any(dim=1), torch.nan)


_MARK = int(MARK)
_ROUNDER = 1.5 * 2.0**52


def clipped_counts(stack: DeviceContributions, bound: RowBound, grid: Grid, rows_per_release: int) -> torch.Tensor:
    """Return the mean of each client's bounded rows, ``rows_per_release`` each, on the grid.

    Each row rounded by itself.

    Rows are bounded as by :meth:`murmurfl.privacy.release.clipping.RowBound.rows`: float64 products and roundings
    follow IEEE 754 on a device too; norms are sums of at most 2^26 squares in another order.
    """
    norms = stack.norms()
    share = 1.0 / rows_per_release
    grid.rounded(np.empty(0), bound.clip_norm * share)  # refuses a grid on which the bound does not fit
    scales = np.full(norms.shape, np.nan) if bound.nonnegative else bound.scales(norms)
    clients = scales.reshape(-1, rows_per_release)
    plain = np.isfinite(clients).all(axis=1)
    if bound.observed:
        observe_releases(norms.reshape(clients.shape)[plain], bound.clip_norm)
    factors = np.where(np.isfinite(clients), clients * (share / grid.spacing), 0.0)
    sent = torch.from_numpy(np.ascontiguousarray(factors.T)).to(stack.device)
    total = marked(stack.scaled(slice(0, None, rows_per_release), sent[0])).sub_(_MARK)
    for j in range(1, rows_per_release):
        total += marked(stack.scaled(slice(j, None, rows_per_release), sent[j])).sub_(_MARK)
    for i in np.flatnonzero(~plain).tolist():
        total[i] = _careful_counts(stack, bound, grid, i, rows_per_release, total.shape[1]).to(stack.device)
    return total


def marked(scaled: torch.Tensor) -> torch.Tensor:
    """:meth:`~murmurfl.privacy.noise.Grid.marked` of bounded float64 values, in place."""
    return scaled.add_(_ROUNDER).view(torch.int64)


def _careful_counts(
    stack: DeviceContributions, bound: RowBound, grid: Grid, client: int, rows_per_release: int, size: int
) -> torch.Tensor:
    """One client's contribution by the code of every client, on this side."""
    rows = np.empty((rows_per_release, size))
    with np.errstate(all="ignore"):
        for j, row in enumerate(rows):
            stack.write(client * rows_per_release + j, 1.0, row)
    share = 1.0 / rows_per_release
    return torch.from_numpy(grid.counts(bound.rows(rows), scale=share, bound=bound.clip_norm).sum(axis=0))


@dataclass(frozen=True)
class DeviceBatch:
    """Samples of several clients, one client after the other."""

    features: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class DeviceSamples:
    """All training samples of a run."""

    features: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, features: NDArray[Any], labels: NDArray[Any], device: torch.device) -> DeviceSamples:
        return cls(torch.tensor(np.asarray(features), device=device), torch.tensor(np.asarray(labels), device=device))

    def batch(self, places: NDArray[np.int64]) -> DeviceBatch:
        """Return samples by their places; only these numbers travel to the device."""
        chosen = torch.from_numpy(places).to(self.features.device)
        return DeviceBatch(self.features.index_select(0, chosen), self.labels.index_select(0, chosen))


class DeviceShard:
    """One client's samples in the order in which it uses them."""

    def __init__(self, shard: Shard, samples: DeviceSamples) -> None:
        self._shard, self._samples = shard, samples

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, samples: slice) -> DeviceBatch:
        return self._samples.batch(self._shard.places(samples))

    @classmethod
    def stack(cls, parts: Sequence[tuple[DeviceShard, slice]]) -> DeviceBatch:
        """One batch of several clients' samples, made on the device."""
        places = np.concatenate([shard._shard.places(samples) for shard, samples in parts])
        return parts[0][0]._samples.batch(places)


class DeviceShards(PerClient[DeviceShard]):
    """The samples of all clients, each made on access."""

    def __init__(self, shards: Sequence[Shard], samples: DeviceSamples) -> None:
        self._shards, self._samples = shards, samples

    def __len__(self) -> int:
        return len(self._shards)

    def client(self, number: int) -> DeviceShard:
        return DeviceShard(self._shards[number], self._samples)


Weight = float | NDArray[np.float64]

_MOST_VALUES = 1 << 27
"""Values of a module's gradients that are computed together: 512 MiB of float32."""


class DeviceGradients(ABC):
    """A model's per-sample gradients on a device."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self.device = device
        self.shapes = model.shapes
        self._at: tuple[Any, list[list[torch.Tensor]]] = (None, [])

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the model, such as whether it is convex."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: DeviceBatch) -> NDArray[np.float64]:
        """Gradients as an array, shape (b, d), for a client that is asked alone."""
        made = self.stacked([parameters], [1.0], samples)
        ones = torch.ones(len(samples.labels), dtype=torch.float64, device=self.device)
        return made.scaled(slice(None), ones).cpu().numpy()

    def samples(self, features: NDArray[Any], labels: NDArray[Any]) -> DeviceSamples:
        """All training samples on the device, as the model takes them."""
        return DeviceSamples.of(features, labels, self.device)

    def stacked(
        self, points: Sequence[Parameters], weights: Sequence[Weight], samples: DeviceBatch
    ) -> DeviceContributions:
        """Per-sample sums over the query points of weight times gradient.

        See :func:`~murmurfl.clients.adapters.per_sample_gradients.combined_gradients`. The points go to the device
        once.
        """
        if self._at[0] is not points:
            self._at = points, [self._sent(point) for point in points]
        terms = [
            (point, self._weight(weight)) for point, weight in zip(self._at[1], weights, strict=True) if np.any(weight)
        ]
        return self._combined(terms, samples)

    @abstractmethod
    def _combined(
        self, terms: Sequence[tuple[list[torch.Tensor], float | torch.Tensor]], samples: DeviceBatch
    ) -> DeviceContributions:
        """Return the sum over points of weight times gradient.

        A weight is a number, or a column with one for each sample.
        """

    def _sent(self, point: Parameters) -> list[torch.Tensor]:
        return [torch.tensor(np.asarray(values, dtype=np.float64), device=self.device) for values in point]

    def _weight(self, weight: Weight) -> float | torch.Tensor:
        if isinstance(weight, np.ndarray):
            return torch.tensor(weight, dtype=torch.float64, device=self.device)[:, None]
        return float(weight)


def _weighted(weight: float | torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values times a weight; exactly zero where a sample's weight is 0, even if its values are not finite."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight != 0.0, weight * values, torch.zeros_like(values))
    return values.mul_(weight)


class SoftmaxGradients(DeviceGradients):
    """Softmax regression: outer products."""

    _model: SoftmaxRegression

    def _combined(
        self, terms: Sequence[tuple[list[torch.Tensor], float | torch.Tensor]], samples: DeviceBatch
    ) -> DeviceContributions:
        features = samples.features.to(torch.float64)
        total = features.new_zeros((len(features), self._model.num_classes))
        for point, weight in terms:
            scores = features @ point[0].T
            if self._model.bias:
                scores += point[1]
            scores -= scores.amax(dim=1, keepdim=True)
            residuals = scores.exp_()
            residuals /= residuals.sum(dim=1, keepdim=True)
            residuals[torch.arange(len(residuals), device=self.device), samples.labels] -= 1.0
            total += _weighted(weight, residuals)
        return DeviceOuterProducts(total, features, bias=self._model.bias)


class MarginGradients(DeviceGradients):
    """A loss of one margin: its slope times the features, and the gradient of a regulariser."""

    _model: LinearModel

    def samples(self, features: NDArray[Any], labels: NDArray[Any]) -> DeviceSamples:
        bounded = self._model.bounded(features)  # by the model's own rule, once
        same = np.array_equal(bounded, features)
        return super().samples(np.asarray(features) if same else bounded, labels)

    def _combined(
        self, terms: Sequence[tuple[list[torch.Tensor], float | torch.Tensor]], samples: DeviceBatch
    ) -> DeviceContributions:
        features = samples.features.to(torch.float64)
        total, penalty = features.new_zeros((len(features), 1)), None
        for (point,), weight in terms:
            slopes = self._slopes(features @ point, samples.labels)[:, None]
            total += _weighted(weight, slopes)
            if isinstance(self._model, NonconvexLogistic):
                added = weight * self._penalty(point)
                penalty = added if penalty is None else penalty + added
        if penalty is None:
            return DeviceOuterProducts(total, features, bias=False)
        return DeviceRows(total * features + penalty)

    def _slopes(self, margins: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if isinstance(self._model, RidgeRegression):
            return 2.0 * (margins - labels)
        return 0.5 * (1.0 + torch.tanh(0.5 * margins)) - labels

    def _penalty(self, point: torch.Tensor) -> torch.Tensor:
        return NonconvexLogistic.strength * 2.0 * point / (1.0 + point.square()).square()


class MeanGradients(DeviceGradients):
    """Half the squared distance to a sample."""

    def _combined(
        self, terms: Sequence[tuple[list[torch.Tensor], float | torch.Tensor]], samples: DeviceBatch
    ) -> DeviceContributions:
        features = samples.features.to(torch.float64)
        finite = torch.isfinite(features).all(dim=1, keepdim=True)
        features = torch.where(finite, features, torch.zeros_like(features))
        total = torch.zeros_like(features)
        for (point,), weight in terms:
            total += _weighted(weight, point - features)
        return DeviceRows(total)


class ModuleOnDevice(DeviceGradients):
    """A PyTorch module with the cross-entropy of its scores, by ``torch.func``.

    Convolutions use no TensorFloat-32, and deterministic algorithms.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__(model, device)
        module = copy.deepcopy(vars(model)["module"]).to(device)
        self._gradients = ModuleGradients(module, torch.nn.functional.cross_entropy)
        self._chunk = max(_MOST_VALUES // model.num_parameters, 1)

    def _sent(self, point: Parameters) -> list[torch.Tensor]:
        return list(self._gradients.trained(point).values())

    def _combined(
        self, terms: Sequence[tuple[list[torch.Tensor], float | torch.Tensor]], samples: DeviceBatch
    ) -> DeviceContributions:
        total: torch.Tensor | None = None
        inputs, targets = samples.features.to(self._gradients.dtype), samples.labels.to(torch.int64)
        with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
            for point, weight in terms:
                rows = _weighted(weight, self._rows(point, inputs, targets))
                total = rows if total is None else total.add_(rows)
        if total is None:
            total = torch.zeros((len(inputs), self._model.num_parameters), dtype=torch.float64, device=self.device)
        return DeviceRows(total)

    def _rows(self, point: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = len(inputs)
        rows = torch.empty((count, self._model.num_parameters), dtype=torch.float64, device=self.device)
        for first in range(0, count, self._chunk):
            some = slice(first, min(first + self._chunk, count))
            trained = dict(zip(self._gradients.names, point, strict=True))
            made = self._gradients.of_many(trained, inputs[some], targets[some])
            parts = [made[name].detach().reshape(some.stop - some.start, -1) for name in self._gradients.names]
            torch.cat([part.to(torch.float64) for part in parts], dim=1, out=rows[some])
        return rows


_KINDS: tuple[tuple[type[Model], type[DeviceGradients]], ...] = (
    (SoftmaxRegression, SoftmaxGradients),
    (NonconvexLogistic, MarginGradients),
    (LogisticRegression, MarginGradients),
    (RidgeRegression, MarginGradients),
    (MeanEstimation, MeanGradients),
)


def gradients_on(model: Model, device: torch.device) -> DeviceGradients:
    """Return a model's gradients on a device; refused unless it has a closed form here or a PyTorch module."""
    # A subclass may have another loss, so only the classes themselves match.
    found = next((kind for known, kind in _KINDS if type(model) is known), None)
    if found is not None:
        return found(model, device)
    if isinstance(vars(model).get("module"), torch.nn.Module) and type(model).__module__.startswith(_TORCH_MODELS):
        return ModuleOnDevice(model, device)
    raise ConfigurationError(
        "Expected a model whose gradients a device can compute (softmax, logistic, nonconvex-logistic, ridge, mean, "
        f"mlp, cnn, or a torch.nn.Module of your own), got {type(model).__name__}: leave the device empty for it.",
        kind="unsupported",
        setting="model",
    )


_TORCH_MODELS = Model.__module__.rpartition(".")[0] + ".torch"
