"""The interface of a task: a data set, and what the application must know of it before it is loaded."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...clients.records.schema import Schema
from ...privacy.errors import ConfigurationError
from ...strategies.shuffled import Regularizer
from ..settings.registry import Named, registry
from ..settings.run_config import RunConfig

if TYPE_CHECKING:
    from .features.feature_map import Features


@dataclass(frozen=True)
class Dataset:
    """A data set, split into training and evaluation.

    Parameters
    ----------
    train_labels, test_labels : ndarray of shape (samples,), int64
        Classes from 0; with one class, numbers to regress on.
    client_of : ndarray of shape (samples,), int64, optional
        Client of each training sample.
    public_features, public_labels : ndarray, optional
        Samples that are nobody's secret, like those for training.
    owner_of : ndarray of shape (samples,), int64, optional
        Owner of each training sample, read with ``samples-per-owner``.
    far_longer : int
        Training samples of one's own whose features were more than twice as long as R; counted when they are loaded.
    """

    train_features: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_features: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    num_classes: int
    client_of: NDArray[np.int64] | None = None
    public_features: NDArray[np.float32] | None = None
    public_labels: NDArray[np.int64] | None = None
    owner_of: NDArray[np.int64] | None = None
    far_longer: int = 0

    @property
    def num_features(self) -> int:
        """Values of one sample."""
        return self.train_features.shape[1]


class Shard:
    """One client's samples, in the order in which it uses them."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, samples: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        chosen = self._indices[samples]
        return self._dataset.train_features[chosen], self._dataset.train_labels[chosen]

    def places(self, samples: slice) -> NDArray[np.int64]:
        """Positions of some of this client's samples among the data set's training samples."""
        return self._indices[samples]

    @classmethod
    def stack(cls, parts: Sequence[tuple[Shard, slice]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """One batch of several clients' samples."""
        dataset = parts[0][0]._dataset
        chosen = np.concatenate([shard._indices[samples] for shard, samples in parts])
        return dataset.train_features[chosen], dataset.train_labels[chosen]


@dataclass(frozen=True)
class Tuned:
    """Constants chosen on held-out training samples (docs/tuning.md), and the rules that carry them to other sizes.

    mu^2-SGD: eta = mu2_rate x mu^mu2_power / T^2, because w moves by eta times a momentum that grows with t.
    Noisy SGD: eta = sgd_rate x mu b sqrt(m / T), because its noise adds up over the rounds; with samples that return P
    times the noise is sqrt(P) times as large.

    Both steps grow with mu, as long as noise limits them. ``mu2_most`` and ``sgd_most`` bound eta L where the curvature
    of the loss takes over.
    """

    mu2_clip_norm: float
    mu2_rate: float
    mu2_power: float
    sgd_clip_norm: float
    sgd_rate: float
    diameter: float
    mu2_most: float
    sgd_most: float


SYNTHETIC_FEATURE_BOUND = 12.0
"""Feature bound for synthetic(alpha, beta) with 100 features, whose samples have norms around 10."""


class Task(Named, ABC):
    """A data set that a run configuration can name.

    A user's own is a subclass, named ``package.module:Class``. If there are only data, a function that returns them is
    enough (:class:`FunctionTask`).

    Attributes
    ----------
    reads : frozenset of str, optional
        Fields of the run configuration that determine its data, which runs that agree in them load once; None for all.
    models : tuple of str, optional
        Names of the models that fit; None for any.
    partitions : tuple of str, optional
        Names of the partitions that fit; None for any, of which ``own`` needs data that name clients.
    image_shape : tuple of int, optional
        Height and width of its images; features other than ``pixels`` are made from images.
    in_colour : bool
        Whether its images have three values a pixel.
    public : bool
        Whether it has public samples of its own.
    constant : bool
        Whether its values include a constant, so that a linear model needs no bias.
    feature_bound : float
        R, a bound on the norm of a row of features, to which longer rows are cut; 0 where none is declared. Public
        knowledge, never taken from the data. Clip and step of the presets are in its units.
    majority : float
        The most frequent class's share, which forecasts rehearse; 0 where none is declared: then classes are taken as
        equal. Public knowledge likewise.
    class_weights : tuple of float
        Weights of the classes' gradients (:class:`murmurfl.clients.Label`); empty for equal ones. Public likewise.
    has_records : bool
        Whether it has records, for training and for the test; otherwise only real clients have some.
    is_tested : bool
        Whether the test set has records; otherwise nothing is measured on it.
    schema : Schema, optional
        What a record is, for a task whose models are saved with it. If its inputs are values, for an additive model,
        the data are float64, and as long as values are.
    regularizer, regularizer_strength : str, float
        psi of ``shuffled`` and its lambda or radius.
    tuned : mapping of str to Tuned
        Constants of the practical preset, by the name of the features; others get those in units of R.
    """

    reads: frozenset[str] | None = None
    models: tuple[str, ...] | None = None
    partitions: tuple[str, ...] | None = None
    image_shape: tuple[int, int] | None = None
    in_colour: bool = False
    public: bool = False
    constant: bool = False
    feature_bound: float = 0.0
    majority: float = 0.0
    class_weights: tuple[float, ...] = ()
    has_records: bool = True
    is_tested: bool = True
    schema: Schema | None = None
    regularizer: Regularizer = "none"
    regularizer_strength: float = 0.0
    tuned: ClassVar[Mapping[str, Tuned]] = {}

    @property
    def has_images(self) -> bool:
        """Whether features other than ``pixels`` can be made."""
        return self.image_shape is not None

    def check(self, config: RunConfig) -> None:
        """Raise if this task cannot serve a run configuration."""
        for key, allowed in (("model", self.models), ("partition", self.partitions)):
            got = getattr(config, key)
            if allowed is not None and got not in allowed:
                names = " or ".join(map(repr, allowed))
                raise ConfigurationError(
                    f"Expected {key} to be {names} for this task, got {got!r}.", kind="conflict", setting=key, got=got
                )

    def squared_norm_bound(self, features: str, num_features: int, feature_bound: float) -> float:
        """Largest possible ||x||^2 of a sample's features x, by how they are made.

        Parameters
        ----------
        features : str
            Name of the features.
        num_features : int
            Values of one sample, without the bias.
        feature_bound : float
            R where the run or the task declares it, else 0.

        Notes
        -----
        It scales clips and steps; no guarantee depends on it. Values of features without any bound are taken to be in
        [-1, 1]; a task for which that is wrong declares its ``feature_bound``.
        """
        bound = registry("features")[features].norm_bound or feature_bound
        return bound**2 if bound else float(num_features)

    @abstractmethod
    def load(self, config: RunConfig, root: str) -> Dataset:
        """Load the data.

        Parameters
        ----------
        root : str
            Folder with the data sets, empty if there is none.

        Raises
        ------
        ConfigurationError
            If they are not there.
        """


@dataclass(frozen=True)
class Images:
    """Images and their labels, split into training and evaluation.

    Parameters
    ----------
    train, test : ndarray of shape (samples, height, width), or (samples, height, width, 3) in colour
    white : int
        Largest possible value of a pixel.
    """

    train: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    num_classes: int
    white: int = 255


class ImageTask(Task):
    """A task whose features are made from images, by the map that the run configuration names."""

    @abstractmethod
    def images(self, config: RunConfig, root: str) -> Images:
        """Load the images; parameters and errors are those of :meth:`Task.load`."""

    def load(self, config: RunConfig, root: str) -> Dataset:
        images = self.images(config, root)
        features: Features = registry("features")[config.features]
        train, test = features.of_any(images.train, images.white), features.of_any(images.test, images.white)
        return Dataset(train, images.train_labels, test, images.test_labels, images.num_classes)


def settings(reads: frozenset[str] | None, config: RunConfig) -> Hashable:
    """Values of some fields of a run configuration, as a key of what follows from them; all fields if None."""
    return config if reads is None else tuple((name, getattr(config, name)) for name in sorted(reads))


_ARRAYS = 4


class FunctionTask(Task):
    """A task made of a user's function, with one parameter, the run configuration, or none.

    An attribute ``feature_bound`` of the function declares R, as the run-config key does, and ``majority`` the most
    frequent class's share; ``schema``, a :class:`~murmurfl.clients.Schema`, both of them.
    """

    keys = frozenset({"feature-bound"})

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        schema = getattr(function, "schema", None)
        if schema is not None and not isinstance(schema, Schema):
            raise ConfigurationError(
                f"Expected schema of task = {name!r} to be a Schema, got {type(schema).__name__}.",
                kind="wrong-type",
                setting="task",
            )
        bound = 0.0 if schema is None or math.isinf(schema.norm_bound) else schema.norm_bound
        majority = 0.0 if schema is None else schema.label.majority or 0.0
        self.feature_bound = float(getattr(function, "feature_bound", bound))
        self.majority = float(getattr(function, "majority", majority))
        self.class_weights = () if schema is None else schema.label.class_weights
        self.sentence = "data of your own"
        self._function = function

    def load(self, config: RunConfig, root: str) -> Dataset:
        setting = f"task = {self.name!r}"
        try:
            made = self._function(config) if _takes_config(self._function) else self._function()
        except ConfigurationError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected {setting} to give a data set, got {type(error).__name__}: {error}.",
                kind="failed",
                setting="task",
            ) from error
        if isinstance(made, Dataset):
            return made
        if not isinstance(made, tuple | list) or len(made) != _ARRAYS:
            got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
            raise ConfigurationError(
                f"Expected {setting} to give a Dataset or four arrays (train_features, train_labels, test_features, "
                f"test_labels), got {got}.",
                kind="wrong-type",
                setting="task",
                got=got,
            )
        for part, features in (("train_features", made[0]), ("test_features", made[2])):
            refuse_text(features, f"{part} of {setting}")
        train_features, train_labels, test_features, test_labels = map(np.asarray, made)
        return Dataset(train_features, train_labels, test_features, test_labels, _classes(train_labels, test_labels))


def own_task(found: Any, name: str) -> Task:
    """Wrap a user's function or data as a Task; raise ConfigurationError if it is neither."""
    if isinstance(found, Dataset | tuple | list):
        return FunctionTask(lambda: found, name)
    if isinstance(found, type) or not callable(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(
            f"Expected task = {name!r} to be a Task, a Dataset, four arrays, or a function that gives one, got {kind}: "
            "a table with a column of labels is for murmurfl.app.fit(table, label=...).",
            kind="wrong-type",
            setting="task",
        )
    return FunctionTask(found, name)


def _takes_config(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # no signature
        return False
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return any(one.default is one.empty or one.name == "config" for one in positional)


def _classes(*labels: NDArray[Any]) -> int:
    """Return the largest label plus one if labels are integers, else 1: numbers to regress on."""
    if any(part.dtype.kind not in "iub" or not part.size for part in labels):
        return 1
    return int(max(part.max() for part in labels)) + 1


def refuse_text(values: Any, what: str) -> None:
    """Refuse a pandas table with columns that are no numbers; the first of them is named."""
    if not hasattr(values, "select_dtypes"):
        return
    if text := list(values.select_dtypes(exclude=["number", "bool"]).columns):
        raise ConfigurationError(
            f"Expected {what} to be numbers, got others in column {text[0]!r}: encode it, or let `murmurfl fit FILE "
            "--label COLUMN` do so.",
            kind="wrong-type",
        )
