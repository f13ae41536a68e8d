"""One machine alone, without noise: what a simulated machine reaches on its own samples.

It tells whether a federation is worth joining. It is a figure of simulated data, and not private: of real machines
nothing of it is computed, since no ledger would count what it tells of their records.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.loading import load_dataset, wanted_by
from ..data.shards import Parts
from ..data.task import Dataset, settings
from ..models.fitted_linear import logistic, ridge
from ..models.model import Batch, area_under_curve
from ..settings.registry import registry
from ..settings.run_config import RunConfig
from .outcome import Alone

NOTE = "simulation only, and not private"
_NO_LINEAR_MODEL = "It is made for linear models, which are trained in a moment."
_MOST_MACHINES, _FEWEST_MACHINES = 20, 5
_MOST_SAMPLES, _MOST_VALUES = 2_000, 8_000_000
"""Samples of one machine, and values of all of them: wide features are tried on fewer machines."""
_STRENGTHS = (1.0, 10.0, 100.0)
"""How little is shrunk (scikit-learn's C), of features with a root mean square norm of one."""


def alone(config: RunConfig) -> Alone:
    """What one machine of a simulated run reaches without the others; cached, for noise and steps do not matter.

    A linear model is trained on the run's features of each of up to 20 machines, spread evenly, and judged on the test
    set. Its L2 penalty is the best of three on other machines' samples.
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
    classes = data.num_classes
    if not (registry("model")[config.model].scores or config.model == "ridge"):
        return Alone(note=NOTE, reason=_NO_LINEAR_MODEL)
    parts = Parts.together(registry("partition")[config.partition].parts(data, config))
    usual = min(int(np.median(parts.sizes)), _MOST_SAMPLES)
    most = _MOST_VALUES // max(usual * data.num_features, 1)
    tried = min(max(most, _FEWEST_MACHINES), _MOST_MACHINES, len(parts))
    machines = np.linspace(0, len(parts) - 1, tried).round().astype(int)
    kept = [parts[i][:_MOST_SAMPLES] for i in machines if len(parts[i])]
    batches = [_taken(data, numbers) for numbers in kept]
    few, test = range(min(_FEWEST_MACHINES, len(kept))), (data.test_features, data.test_labels)
    others = [np.concatenate(kept[:i] + kept[i + 1 :] or kept)[:_MOST_SAMPLES] for i in few]
    with threadpool_limits(limits=1):  # its models are small: threads would wait for each other
        judged = {
            one: sum(_Trained(batches[i], one, classes).score(_taken(data, others[i])) for i in few)
            for one in _STRENGTHS
        }
        best = max(_STRENGTHS, key=lambda one: judged[one])
        found = [_Trained(batch, best, classes).figures(test) for batch in batches]
    figures: dict[str, Any] = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    return Alone(note=NOTE, machines=len(kept), samples=float(np.mean(list(map(len, kept)))), **figures)


def _taken(data: Dataset, numbers: NDArray[np.int64]) -> Batch:
    return data.train_features[numbers], data.train_labels[numbers]


class _Trained:
    """A linear model, trained on one machine's samples; of numbers ridge regression."""

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

    def figures(self, batch: Batch) -> dict[str, float]:
        """Accuracy, and AUC of two classes; of numbers the mean squared error."""
        scores, labels = self._model.scores(self._seen(batch[0])), batch[1]
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
