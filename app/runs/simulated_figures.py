"""Metrics that only a simulation can compute, from samples that no server has, such as regret and gradient norms.

None of it is private, and none of it a release: of real clients nothing of it is computed, since no ledger would count
what it tells of their records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...privacy.mechanisms.optimal import cached
from ...privacy.queries.knots import KnotRows
from ...privacy.queries.query import QuerySum
from ..data.loading import load_dataset, wanted_by
from ..data.partition import Parts
from ..data.task import Dataset, Shard, settings
from ..methods.queries import knot_rows
from ..models.fitted_linear import logistic, ridge
from ..models.model import Batch, Model, area_under_curve
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from .outcome import Alone, OwnMixes


@runtime_checkable
class ComputableOptima(Protocol):
    """A convex model whose optima can be computed."""

    def loss_and_gradient(self, weight: NDArray[np.float64], samples: Batch) -> tuple[float, NDArray[np.float64]]:
        """Return the mean loss over some samples at ``weight``, shape (d,), and its gradient."""
        ...


class OnlineLosses:
    """Regret of online federated learning: the global models' losses on the samples their round is about to use.

    With f^{r,t}_i the loss on the t-th sample of client i in round r, and sums over all of them (zhang-2025, section
    II),

        dynamic regret = sum (f(x^r) - min_x f^r(x)),    static regret = sum (f(x^r) - f(x*)),

    where f^r is the mean over round r and x* minimises the mean over all rounds. Models that give no loss with its
    gradient have a cumulative loss alone. ``shards`` are in the order of use, tau = ``local_steps``, R =
    ``num_rounds``; ``data`` names data, order and model, for optima in the cache on disk.
    """

    def __init__(self, model: Model, shards: Sequence[Shard], local_steps: int, num_rounds: int, data: str) -> None:
        self._data = data
        self._model = model
        self._shards = shards
        self._local_steps = local_steps
        self._num_rounds = num_rounds
        self.losses: dict[int, float] = {}
        """Mean loss of x^r over round r, by r from 0."""

    def record(self, server_round: int, parameters: Sequence[NDArray[Any]]) -> None:
        """Take note of the model after ``server_round``, which is the one round ``server_round`` (from 0) starts at."""
        if server_round < self._num_rounds:
            self.losses[server_round], _ = self._model.evaluate(parameters, self._round(server_round))

    def document(self, most_points: int = 200) -> dict[str, Any] | None:
        """Cumulative loss and regrets after every few ``rounds``, as plain values; None if rounds are missing.

        ``cumulative-loss``, ``dynamic-regret`` and ``static-regret`` are sums of losses over samples divided by the
        number of clients, as the paper has them. The regrets are None where the optima are not known.
        """
        if len(self.losses) != self._num_rounds:
            return None
        losses = np.array([self.losses[r] for r in range(self._num_rounds)])
        dynamic = static = None
        if isinstance(self._model, ComputableOptima):
            optima = self._optima(self._model)
            dynamic, static = losses - optima["of each round"], losses - optima["fixed"]
        rounds = np.unique(np.linspace(0, self._num_rounds - 1, min(most_points, self._num_rounds)).round().astype(int))

        def sums(values: NDArray[np.float64] | None) -> list[float] | None:
            return None if values is None else (self._local_steps * np.cumsum(values))[rounds].tolist()

        return {
            "rounds": (rounds + 1).tolist(),
            "cumulative-loss": sums(losses),
            "dynamic-regret": sums(dynamic),
            "static-regret": sums(static),
        }

    def _round(self, server_round: int) -> Batch:
        chosen = slice(server_round * self._local_steps, (server_round + 1) * self._local_steps)
        return Shard.stack([(shard, chosen) for shard in self._shards])

    def _optima(self, model: ComputableOptima) -> dict[str, NDArray[np.float64]]:
        """Return the loss of every round at its own optimum, and at that of all rounds."""
        start = np.zeros(self._model.num_parameters)

        def compute() -> dict[str, NDArray[np.float64]]:
            used = slice(0, self._num_rounds * self._local_steps)
            _, fixed = _minimum(model, Shard.stack([(shard, used) for shard in self._shards]), start)
            rounds = [self._round(r) for r in range(self._num_rounds)]
            return {
                "of each round": np.array([_minimum(model, samples, start)[0] for samples in rounds]),
                "fixed": np.array([model.loss_and_gradient(fixed, samples)[0] for samples in rounds]),
            }

        inputs: dict[str, int | float | str] = {"data": self._data, "rounds": self._num_rounds}
        inputs["local steps"] = self._local_steps
        shape = (self._num_rounds,)
        return cached(
            "optima of online learning, 2",
            inputs,
            compute,
            lambda found: all(found[name].shape == shape for name in ("of each round", "fixed")),
        )


def _minimum(model: ComputableOptima, samples: Batch, start: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the least mean loss over some samples and where; where it is not attained, to about 1e-4."""
    from scipy.optimize import minimize

    double = np.asarray(samples[0], dtype=np.float64), samples[1]  # once, and not at every step
    found = minimize(
        lambda weight: model.loss_and_gradient(weight, double),
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500, "ftol": 1e-9, "gtol": 1e-5},
    )
    return float(found.fun), found.x


class GradientNorms:
    """Gradient norms of a run: ||grad F(w_t)||, F the mean training loss, 0 at a stationary point (tran-cutkosky-2022).

    Of a network, over the first 2,000 training samples.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        count = model.most_samples
        self._model = model
        self._samples = dataset.train_features[:count], dataset.train_labels[:count]
        self._norms: dict[int, float] = {}

    def record(self, server_round: int, parameters: Sequence[NDArray[Any]]) -> None:
        """Take note of the model after a round."""
        self._norms[server_round] = float(np.linalg.norm(self._model.mean_gradient(parameters, self._samples)))

    def document(self) -> dict[str, Any]:
        """Return ``rounds`` and ``values`` as plain values."""
        return {"rounds": list(self._norms), "values": list(self._norms.values())}


NOTE = "simulation only, and not private"
_NO_LINEAR_MODEL = "It is made for linear models, which are trained in a moment."
_MOST_CLIENTS, _FEWEST_CLIENTS = 20, 5
_MOST_SAMPLES, _MOST_VALUES = 2_000, 8_000_000
"""Samples of one client, and values of all of them: wide features are tried on fewer clients."""
_STRENGTHS = (1.0, 10.0, 100.0)
"""Inverse strengths of shrinkage (scikit-learn's C), of features with a root mean square norm of one."""


def alone(config: RunConfig) -> Alone:
    """Return what one client of a simulated run reaches without the others; cached, for noise and steps do not matter.

    A linear model is trained on the run's features of each of up to 20 clients, spread evenly, and judged on the test
    set. Its L2 penalty is the best of three on other clients' samples.
    """
    chosen = registry("partition")[config.partition]
    partition = config.partition, settings(getattr(chosen, "reads", None), config)
    own = config.model, config.validation_samples, config.training_samples, config.public_samples
    key = wanted_by(config), partition, own
    if key not in _made:
        _made[key] = _measured(config)
    return _made[key]


_made: dict[Hashable, Alone] = {}


def _measured(config: RunConfig) -> Alone:
    from threadpoolctl import threadpool_limits

    data = load_dataset(config)
    if (rows := knot_rows(config, _RANK_SHARE)) is not None:
        data = _additive(data, rows)
    classes = data.num_classes
    kind = registry("model")[config.model]
    if not (kind.scores or kind.predicts_numbers or rows is not None):
        return Alone(note=NOTE, reason=_NO_LINEAR_MODEL)
    parts = Parts.together(registry("partition")[config.partition].parts(data, config))
    usual = min(int(np.median(parts.sizes)), _MOST_SAMPLES)
    most = _MOST_VALUES // max(usual * data.num_features, 1)
    tried = min(max(most, _FEWEST_CLIENTS), _MOST_CLIENTS, len(parts))
    clients = np.linspace(0, len(parts) - 1, tried).round().astype(int)
    kept = [parts[i][:_MOST_SAMPLES] for i in clients if len(parts[i])]
    batches = [_taken(data, numbers) for numbers in kept]
    few, test = range(min(_FEWEST_CLIENTS, len(kept))), (data.test_features, data.test_labels)
    others = [np.concatenate(kept[:i] + kept[i + 1 :] or kept)[:_MOST_SAMPLES] for i in few]
    with threadpool_limits(limits=1):  # its models are small: threads would wait for each other
        judged = {
            one: sum(_Trained(batches[i], one, classes).score(_taken(data, others[i])) for i in few)
            for one in _STRENGTHS
        }
        models = {one: [_Trained(batch, one, classes) for batch in batches] for one in _STRENGTHS}
        best = max(_STRENGTHS, key=lambda one: judged[one])
        found = [model.figures(test) for model in models[best]]
        mixes = np.stack([_counts(data, numbers) for numbers in kept])
        of_strength = [_diagonal(data, mixes, [model.scores for model in one]) for one in models.values()]
    figures: dict[str, Any] = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    own = max(of_strength, key=lambda one: float(np.mean(one))) if classes > 1 and len(of_strength[0]) else []
    if len(own):
        figures |= {"own_mix": float(np.mean(own)), "own_worst": float(np.min(own)), "own_best": float(np.max(own))}
    return Alone(note=NOTE, clients=len(kept), samples=float(np.mean(list(map(len, kept)))), **figures)


def own_mixes(config: RunConfig, data: Dataset, scores: Scores) -> OwnMixes | None:
    """Return the accuracy of a simulated run's model in the proportions of classes of each client; None without any.

    Parameters
    ----------
    data : Dataset
        The run's, with the test set as the model takes it.
    scores : callable
        The model's scores of such rows.
    """
    if data.num_classes == 1 or not len(data.test_labels):
        return None
    parts = Parts.together(registry("partition")[config.partition].parts(data, config))
    found = _on_mixes(data, np.stack([_counts(data, part) for part in parts if len(part)]), scores)
    if not len(found):
        return None
    figures = {"mean": float(found.mean()), "worst": float(found.min()), "best": float(found.max())}
    return OwnMixes(note=NOTE, clients=len(found), **figures)


Scores = Callable[[NDArray[Any]], NDArray[Any]]


def _counts(data: Dataset, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of some training samples there are of each class."""
    labels = data.train_labels[numbers].astype(np.int64) if data.num_classes > 1 else np.empty(0, np.int64)
    return np.bincount(labels, minlength=data.num_classes)


def _on_mixes(data: Dataset, mixes: NDArray[np.int64], scores: Scores) -> NDArray[np.float64]:
    """Return a model's accuracy on the test set in several proportions of classes, of those that the set has."""
    labels = data.test_labels.astype(np.int64)
    tested = np.bincount(labels, minlength=data.num_classes)
    right = np.bincount(labels, scores(data.test_features).argmax(axis=1) == labels, minlength=data.num_classes)
    heavy = np.where(tested > 0, mixes, 0)
    heavy = heavy[heavy.sum(axis=1) > 0]
    return heavy @ (right / np.maximum(tested, 1)) / heavy.sum(axis=1)


def _diagonal(data: Dataset, mixes: NDArray[np.int64], models: Sequence[Scores]) -> NDArray[np.float64]:
    """Return the accuracy of each model in its own proportions of classes."""
    if data.num_classes == 1:
        return np.empty(0)
    return np.concatenate([_on_mixes(data, mixes[i : i + 1], one) for i, one in enumerate(models)])


def _additive(data: Dataset, rows: KnotRows) -> Dataset:
    """Return data with additive features, whose knots are all clients' quantiles without noise."""
    values, labels = data.train_features, data.train_labels
    parts = (slice(start, start + _ROWS) for start in range(0, len(labels), _ROWS))
    total = np.sum([rows.rows((values[part], labels[part])).sum(axis=0) for part in parts], axis=0)
    public = rows.read(QuerySum(total, len(labels), 1, 0.0))
    return replace(
        data,
        train_features=rows.features(values, public),
        test_features=rows.features(data.test_features, public),
        train_labels=rows.scaled(labels, public),
        test_labels=rows.scaled(data.test_labels, public, bounded=False),
    )


_RANK_SHARE, _ROWS = 0.3, 1024


def _taken(data: Dataset, numbers: NDArray[np.int64]) -> Batch:
    return data.train_features[numbers], data.train_labels[numbers]


class _Trained:
    """A linear model, trained on one client's samples; of numbers ridge regression."""

    def __init__(self, batch: Batch, strength: float, num_classes: int) -> None:
        features, labels = batch
        self._num_classes = num_classes
        self._norm = float(np.sqrt(np.square(_finite(features), dtype=np.float64).sum(axis=1).mean())) or 1.0
        seen = self._seen(features)
        of_numbers = num_classes == 1
        self._model = ridge(seen, labels, 1 / strength) if of_numbers else logistic(seen, labels, strength, num_classes)

    def _seen(self, features: NDArray[Any]) -> NDArray[Any]:
        return _finite(features) / np.float32(self._norm)

    def score(self, batch: Batch) -> float:
        """Accuracy, or what is as good to compare by: minus the mean squared error."""
        figures = self.figures(batch)
        return figures.get("accuracy", -figures.get("loss", 0.0))

    def scores(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Scores of rows."""
        return self._model.scores(self._seen(rows))

    def figures(self, batch: Batch) -> dict[str, float]:
        """Accuracy, and AUC of two classes; of numbers the mean squared error."""
        scores, labels = self.scores(batch[0]), batch[1]
        if self._num_classes == 1:
            return {"loss": float(np.square(scores[:, 0] - labels).mean())}
        figures = {"accuracy": float((scores.argmax(axis=1) == labels).mean())}
        if self._num_classes == 2:
            known = np.isfinite(scores[0]).all()  # or it knows one class alone
            figures["auc"] = area_under_curve(scores[:, 1] - scores[:, 0] if known else np.zeros(len(labels)), labels)
        return figures


def _finite(features: NDArray[Any]) -> NDArray[Any]:
    """Features with zero for what is not finite, as a federation counts it."""
    return np.nan_to_num(features, nan=0.0, posinf=0.0, neginf=0.0)
