"""A Keras 3 model on a client, as a pure function of its variables: on JAX's and on PyTorch's backend.

Keras keeps values in variables of its own. A layer of Keras's that is called as a PyTorch module computes with these
and not with the parameters it is given, so its gradients are zero. ``stateless_call`` computes with what it is given;
here it becomes a :class:`.jax_model.JaxModel` or a PyTorch module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...privacy.errors import ConfigurationError
from .client_model import ClientModel
from .jax_model import JaxModel, jax_client_model
from .keras_variables import check_built, keras_module


def keras_client_model(model: Any, loss: Any, *, seed: int, **limits: Any) -> ClientModel:
    """Return the client's model of a Keras model, by default with the loss that it was compiled with.

    It computes as in inference: dropout is off, and batch normalisation has the statistics that the model has now,
    which are public.
    """
    check_built(model)
    backend = keras_module().backend.backend()
    own = _loss(model, loss)
    if backend == "jax":
        return jax_client_model(_jax_model(model), own, **limits)
    if backend == "torch":
        from .torch_checks import torch_client_model

        return torch_client_model(_torch_module(model), own, seed=seed, **limits)
    raise ConfigurationError(
        f"Expected Keras on JAX or PyTorch, got the backend {backend!r}: set KERAS_BACKEND to jax or torch.",
        kind="unsupported",
        setting="model",
    )


def _loss(model: Any, loss: Any) -> Callable[[Any, Any], Any]:
    """Return ``loss(outputs, targets)`` of a project's loss, or of the one that a model was compiled with."""
    keras = keras_module()
    found: Any = getattr(model, "loss", None) if loss is None else loss
    if isinstance(found, str):
        found = keras.losses.get(found)
    if isinstance(found, type) or not callable(found):
        raise ConfigurationError(
            f"Expected loss=, or a Keras model that was compiled with one, got {found!r}: write "
            "keras.losses.SparseCategoricalCrossentropy(from_logits=True), say.",
            kind="missing" if found is None else "wrong-type",
            setting="loss",
        )
    kind: Any = type(found)
    origins = [getattr(found, "__module__", ""), *(one.__module__ for one in kind.__mro__)]
    keras_own = any(origin.startswith("keras.") for origin in origins)

    def criterion(outputs: Any, targets: Any) -> Any:
        value = found(targets, outputs) if keras_own else found(outputs, targets)  # Keras's losses take the truth first
        return keras.ops.mean(value)

    if keras_own and "binary" in str(getattr(found, "name", getattr(found, "__name__", ""))):
        criterion.__name__ = "binary_cross_entropy" if not getattr(found, "from_logits", False) else "with_logits"
    return criterion


def _computed(model: Any, trained: Any, kept: Any, inputs: Any) -> Any:
    with _own_errors():
        outputs, _, penalties = model.stateless_call(trained, kept, inputs, training=False, return_losses=True)
    if penalties:
        raise ConfigurationError(
            "Expected a Keras model without penalties of layers, got some (kernel_regularizer, add_loss): leave them "
            "out, since clipping and noise keep a model from learning samples by heart.",
            kind="unsupported",
            setting="model",
        )
    return outputs


@contextmanager
def _own_errors() -> Iterator[None]:
    """Have Keras raise errors as they are: it makes others of them, for which some of JAX's have no room."""
    config = keras_module().config
    if not config.is_traceback_filtering_enabled():
        yield
        return
    config.disable_traceback_filtering()
    try:
        yield
    finally:
        config.enable_traceback_filtering()


def _inputs(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return dict(named) if named else arguments[0] if len(arguments) == 1 else list(arguments)


def _jax_model(model: Any) -> JaxModel:
    kept = [variable.value for variable in model.non_trainable_variables]

    def apply(parameters: Any, *arguments: Any, **named: Any) -> Any:
        return _computed(model, parameters, kept, _inputs(arguments, named))

    return JaxModel(apply, [variable.value for variable in model.trainable_variables])


def _torch_module(model: Any) -> Any:
    import torch

    class KerasModule(torch.nn.Module):
        """A Keras model whose parameters are PyTorch's."""

        def __init__(self) -> None:
            super().__init__()
            self._held = (model,)  # in a tuple, so that its own parameters are none of this module's
            self._counts = len(model.trainable_variables), len(model.non_trainable_variables)
            for i, variable in enumerate(model.trainable_variables):
                self.register_parameter(str(i), torch.nn.Parameter(variable.value.detach().clone()))
            for i, variable in enumerate(model.non_trainable_variables):
                self.register_buffer(f"kept{i}", variable.value.detach().clone())

        def forward(self, *arguments: Any, **named: Any) -> Any:
            trained = [getattr(self, str(i)) for i in range(self._counts[0])]
            kept = [getattr(self, f"kept{i}") for i in range(self._counts[1])]
            return _computed(self._held[0], trained, kept, _inputs(arguments, named))

    return KerasModule()
