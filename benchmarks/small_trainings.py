"""Small trainings whose outcome a forecast is held against: real ones, in this process, in seconds.

Updates: a ClientApp of somebody's own, softmax regression or a network of one hidden layer in plain numpy, with
murmurfl's mod around it, under ``CorrelatedFedAvg``. Samples: runs of murmurfl's own application. Only data that come
with scikit-learn are used. mu is set so that the forecast is a given one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.runs.simulate import simulate
from murmurfl.app.settings.run_config import RunConfig, without_unread
from murmurfl.clients import CorrelatedNoiseMod, UpdatePolicy
from murmurfl.privacy import Forecast
from murmurfl.strategies import CorrelatedFedAvg
from numpy.typing import NDArray

Arrays = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Outcome:
    """What became of a training.

    Parameters
    ----------
    forecast : Forecast
        Before its first round.
    accuracy, noiseless, majority : float
        On test samples: of its model, of the same without noise and clip, of always naming the most frequent class.
    """

    forecast: Forecast
    accuracy: float
    noiseless: float
    majority: float

    @property
    def kept(self) -> float:
        """Which part of what is learnt without noise is left; negative where it is worse than naming one class."""
        return (self.accuracy - self.majority) / (self.noiseless - self.majority)


@lru_cache(maxsize=8)
def _data(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Training and test samples, standardised by the training samples."""
    from sklearn import datasets

    features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.Generator(np.random.Philox(key=1)).permutation(len(features))
    features, labels = features[order], labels[order]
    train = 3 * len(features) // 4
    mean, std = features[:train].mean(axis=0), features[:train].std(axis=0) + 1e-6
    features = np.clip((features - mean) / std, -5.0, 5.0)
    return features[:train], labels[:train], features[train:], labels[train:]


@dataclass(frozen=True)
class UpdateTraining:
    """A project of somebody's own whose updates get noise.

    Parameters
    ----------
    data : str
        Of scikit-learn.
    hidden : int
        Neurons of the hidden layer; 0 for softmax regression.
    clients, rounds, epochs : int
        M, T, and passes over a client's samples between two updates.
    clip_norm, learning_rate : float
    by_class : bool
        Whether clients have few classes each, and not a random part of the samples.
    """

    data: str
    hidden: int = 0
    clients: int = 10
    rounds: int = 10
    epochs: int = 2
    clip_norm: float = 0.2
    learning_rate: float = 0.1
    by_class: bool = False

    @property
    def name(self) -> str:
        """For people."""
        network = f"network of {self.hidden} neurons" if self.hidden else "softmax regression"
        return f"updates: {self.data}, {network}{', few classes a client' if self.by_class else ''}"

    @property
    def classes(self) -> int:
        """C."""
        return int(_data(self.data)[1].max()) + 1

    def start(self) -> Arrays:
        """Return the first model."""
        width, generator = _data(self.data)[0].shape[1], np.random.Generator(np.random.Philox(key=2))
        sizes = [width, *([self.hidden] if self.hidden else []), self.classes]
        made: Arrays = []
        for inputs, outputs in pairwise(sizes):
            scale = 1.0 / np.sqrt(inputs) if self.hidden else 0.0
            made += [scale * generator.standard_normal((inputs, outputs)), np.zeros(outputs)]
        return made

    def parts(self) -> list[NDArray[np.int64]]:
        """Which samples each client has."""
        labels = _data(self.data)[1]
        order = np.argsort(labels, kind="stable") if self.by_class else np.arange(len(labels))
        return [np.sort(part) for part in np.array_split(order, self.clients)]

    def trained(self, model: Arrays, part: NDArray[np.int64], seed: tuple[int, int]) -> Arrays:
        """Return a client's own training: stochastic gradient descent on its samples."""
        features, labels = _data(self.data)[0][part], _data(self.data)[1][part]
        generator = np.random.Generator(np.random.Philox(key=seed[0] * 1000 + seed[1]))
        model = [values.copy() for values in model]
        for _ in range(self.epochs):
            order = generator.permutation(len(part))
            for batch in np.array_split(order, max(len(part) // 16, 1)):
                for values, step in zip(model, _gradient(model, features[batch], labels[batch]), strict=True):
                    values -= self.learning_rate * step
        return model

    def accuracy(self, model: Arrays) -> float:
        """On test samples."""
        _, _, features, labels = _data(self.data)
        return float((_scores(model, features)[-1].argmax(axis=1) == labels).mean())

    @property
    def majority(self) -> float:
        """Of always naming the most frequent class."""
        labels = _data(self.data)[3]
        return float(np.bincount(labels).max() / len(labels))

    @lru_cache(maxsize=64)  # noqa: B019 - a frozen value, made once
    def noiseless(self) -> tuple[float, float]:
        """Return the accuracy without noise and clip, and which part of the longest path clipped updates use."""
        model, clipped, total = self.start(), self.start(), 0.0
        parts = self.parts()
        for turn in range(self.rounds):
            model = _mean([self.trained(model, part, (turn, i)) for i, part in enumerate(parts)])
            updates = []
            for i, part in enumerate(parts):
                after = self.trained(clipped, part, (turn, i))
                update = np.concatenate([(b - a).ravel() for a, b in zip(clipped, after, strict=True)])
                updates.append(update * min(1.0, self.clip_norm / max(float(np.linalg.norm(update)), 1e-12)))
            step = np.mean(updates, axis=0)
            total = total + step
            clipped = _moved(clipped, step)
        return self.accuracy(model), float(np.linalg.norm(total)) / (self.rounds * self.clip_norm)

    def run(self, mu: float, seed: int = 1) -> Outcome:
        """Return the training with noise for this mu: mod, messages and strategy, as a project has them."""
        policy = UpdatePolicy(clip_norm=self.clip_norm, mu=mu, max_participations=self.rounds)
        app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy, seed=seed)])
        parts, start = self.parts(), self.start()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            turn = int(message.content["config"]["server-round"])  # type: ignore[index,arg-type]
            model = [np.asarray(values, np.float64) for values in message.content["arrays"].to_numpy_ndarrays()]  # type: ignore[union-attr]
            arrays = ArrayRecord(self.trained(model, parts[client], (turn - 1, client)))
            return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"n": 1})}), reply_to=message)

        strategy = CorrelatedFedAvg(num_clients=self.clients, seed=seed, session="forecast")
        result = strategy.start(InProcessGrid(app, self.clients, {}), ArrayRecord(start), num_rounds=self.rounds)
        if strategy.forecast is None:
            raise AssertionError("no forecast of a training with noise")
        accuracy = self.accuracy(result.arrays.to_numpy_ndarrays())
        return Outcome(strategy.forecast, accuracy, self.noiseless()[0], self.majority)

    def at(self, typical_ratio: float, seed: int = 1) -> Outcome:
        """Return the training with the mu at which the forecast is this ratio of noise to a typical update."""
        values = sum(part.size for part in self.start())
        wanted = typical_ratio * 0.7
        return self.run(2.0 * np.sqrt(values / self.clients) / wanted, seed)


def _scores(model: Arrays, features: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Every layer's values, the scores of the classes last."""
    layers = [features]
    for i in range(0, len(model), 2):
        values = layers[-1] @ model[i] + model[i + 1]
        layers.append(values if i + 2 == len(model) else np.maximum(values, 0.0))
    return layers


def _gradient(model: Arrays, features: NDArray[np.float64], labels: NDArray[np.int64]) -> Arrays:
    """Of the mean cross-entropy."""
    layers = _scores(model, features)
    scores = layers[-1] - layers[-1].max(axis=1, keepdims=True)
    back = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    back[np.arange(len(labels)), labels] -= 1.0
    back /= len(labels)
    gradient: Arrays = []
    for i in range(len(model) - 2, -1, -2):
        gradient = [layers[i // 2].T @ back, back.sum(axis=0), *gradient]
        back = (back @ model[i].T) * (layers[i // 2] > 0)
    return gradient


def _mean(models: list[Arrays]) -> Arrays:
    return [np.mean(values, axis=0) for values in zip(*models, strict=True)]


def _moved(model: Arrays, step: NDArray[np.float64]) -> Arrays:
    moved, first = [], 0
    for values in model:
        moved.append(values + step[first : first + values.size].reshape(values.shape))
        first += values.size
    return moved


@dataclass(frozen=True)
class SampleTraining:
    """A run of murmurfl's own application, on scikit-learn's digits.

    Parameters
    ----------
    name : str
        For people.
    settings : tuple of pairs
        Run-config keys.
    """

    name: str
    settings: tuple[tuple[str, Any], ...]

    def run(self, mu: float, seed: int = 1) -> Outcome:
        """Return the run with noise for this mu."""
        made = simulate(RunConfig.from_mapping({**dict(self.settings), "mu": mu, "seed": seed}))
        if made.forecast is None or made.accuracy is None:
            raise AssertionError("no forecast or no accuracy of a run with noise")
        labels = made.experiment.data.test_labels
        majority = float(np.bincount(labels).max() / len(labels))
        return Outcome(made.forecast, made.accuracy, self.noiseless(seed), majority)

    @lru_cache(maxsize=64)  # noqa: B019 - a frozen value, made once
    def noiseless(self, seed: int = 1) -> float:
        """Return the accuracy of the same run without noise."""
        settings = without_unread({**dict(self.settings), "mechanism": "none", "seed": seed})
        made = simulate(RunConfig.from_mapping(settings))
        return float(made.accuracy or 0.0)

    def at(self, typical_ratio: float, seed: int = 1) -> Outcome:
        """Return the run with about the mu at which the forecast is this ratio of noise to a typical update."""
        mu = 1.0
        for _ in range(4):  # rounds and clip may follow from mu
            found = self.run(mu, seed)
            if abs(found.forecast.typical_ratio / typical_ratio - 1) < 0.05:
                break
            mu *= found.forecast.typical_ratio / typical_ratio
        return self.run(mu, seed)


UPDATES = (
    UpdateTraining("iris", clip_norm=0.2),
    UpdateTraining("wine", clip_norm=0.2),
    UpdateTraining("breast_cancer", clip_norm=0.1),
    UpdateTraining("digits"),
    UpdateTraining("digits", by_class=True),
    UpdateTraining("digits", hidden=32),
    UpdateTraining("digits", hidden=128, rounds=20),
    UpdateTraining("breast_cancer", hidden=32, clip_norm=0.1),
)
_TEN = (("num-clients", 10), ("clients-per-round", 10))
SAMPLES = (
    SampleTraining("samples: full batches", (*_TEN, ("strategy", "full-batch"))),
    SampleTraining(
        "samples: full batches, 30 clients",
        (("num-clients", 30), ("clients-per-round", 30), ("strategy", "full-batch")),
    ),
    SampleTraining(
        "samples: four passes of mu2",
        (
            *_TEN,
            ("features", "soft-gradients"),
            ("passes", 4),
            ("batch-size", 71),
            ("mechanism", "decay"),
            ("mechanism.decay", 0.5),
        ),
    ),
    SampleTraining("samples: one pass, delayed momentum", (*_TEN, ("strategy", "delayed-momentum"))),
    SampleTraining("samples: one pass, noisy SGD", (*_TEN, ("strategy", "noisy-sgd"))),
)
RATIOS = (0.3, 1.0, 3.0, 10.0)
"""Of the noise to a typical update."""
