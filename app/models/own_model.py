"""A user's own model: a function that makes one, with murmurfl's interface or in PyTorch.

``model = package.module:make_model`` names a :class:`~murmurfl.app.models.model.ModelKind`, or a function
``make_model(num_features, num_classes)`` that returns a :class:`~murmurfl.app.models.model.Model` or a
``torch.nn.Module``. A module takes rows of ``num_features`` values and gives ``num_classes`` scores; its loss is the
cross-entropy. Every process that needs the model calls the function.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...clients.adapters.torch_checks import check_layers
from ...privacy import ConfigurationError
from .model import Model, ModelKind
from .torch_networks import TorchModel


class FunctionKind(ModelKind):
    """Models made by a user's function, ``function(num_features, num_classes)``.

    Notes
    -----
    Every guarantee needs row i of the gradients to depend on sample i alone. :class:`~murmurfl.clients.TorchGradients`
    ensures that for a module; for a Model it is the user's own promise.
    """

    keys = frozenset({"gradient-memory-mib"})

    def __init__(self, function: Callable[[int, int], Any], name: str) -> None:
        self.name = name
        self.sentence = "a model of your own"
        self._function = function

    def make(self, num_features: int, num_classes: int, feature_bound: float) -> Model:
        made = self._made(num_features, num_classes)
        if _is_module(made):
            check_layers(made)
            made = TorchModel(made, num_features, num_classes, lambda: self._made(num_features, num_classes))
        if not isinstance(made, Model):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give a Model or a torch.nn.Module, got {type(made).__name__}."
            )
        self._check(made, num_features, num_classes)
        return made

    def _made(self, num_features: int, num_classes: int) -> Any:
        try:
            return self._function(num_features, num_classes)
        except ConfigurationError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected model = {self.name!r} to make a model of {num_features} features and {num_classes} classes, "
                f"got {type(error).__name__}: {error}."
            ) from error

    def _check(self, model: Model, num_features: int, num_classes: int) -> None:
        """Try the model on one sample of zeros."""
        try:
            start = model.initial_parameters(1)
            shapes = [np.shape(values) for values in start]
            sample = np.zeros((1, num_features), np.float32), np.zeros(1, np.int64)
            gradients, scores = np.shape(model(start, sample)), np.shape(model.logits(start, sample[0]))
        except Exception as error:  # the user's own code
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give scores and a gradient for one sample of {num_features} "
                f"values, got {type(error).__name__}: {error}."
            ) from error
        if not shapes or shapes != [tuple(shape) for shape in model.shapes] or len(set(model.names)) != len(shapes):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to start from one named array for each of its shapes "
                f"{list(model.shapes)}, got names {list(model.names)} and arrays of shapes {shapes}."
            )
        if gradients != (1, model.num_parameters):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give a gradient of shape (1, {model.num_parameters}) for one "
                f"sample, got {gradients}."
            )
        if scores != (1, num_classes):
            raise ConfigurationError(
                f"Expected model = {self.name!r} to give scores of shape (1, {num_classes}) for one sample, got "
                f"{scores}."
            )


def own_model(found: Any, name: str) -> ModelKind:
    """The model kind of a user's object that is no ModelKind itself.

    Raises
    ------
    ConfigurationError
        If it is neither a function nor a module of this process.
    """
    # One that was given in this process has its class's name; imported, each process would start from another.
    if _is_module(found) and name.startswith(f"{type(found).__module__}:{type(found).__qualname__}"):
        return FunctionKind(lambda *_: copy.deepcopy(found), name)
    if isinstance(found, type) or not callable(found) or _is_module(found):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigurationError(
            f"Expected model = {name!r} to be a function of the numbers of features and classes, which gives a Model "
            f"or a torch.nn.Module, got {kind}. scikit-learn's logistic regression is model 'softmax'; in a project "
            "of your own, private_client_app takes LinearEstimator(LogisticRegression(), ...)."
        )
    return FunctionKind(found, name)


def _is_module(found: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever made a module has imported it
    return torch is not None and isinstance(found, torch.nn.Module)
