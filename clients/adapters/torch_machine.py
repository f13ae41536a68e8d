"""A PyTorch module as a machine's model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...privacy import ConfigurationError, derived_seed
from ...privacy.errors import check_installed
from ..records.schema import Schema
from ..side.evaluation_client import Measure
from .model_checks import SampleTrials, check_layers, check_loss
from .per_sample_gradients import GRADIENT_MEMORY_MIB
from .private_model import MachineModel, measured_bound
from .torch_measure import ModuleMeasure
from .torch_model import ModuleGradients, trainable_parameters

if TYPE_CHECKING:
    import torch


def torch_machine_model(
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    *,
    seed: int,
    chunk: int | None = None,
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
) -> MachineModel:
    """The machine's model of a module, or of a function that makes one by a seed; by default with the cross-entropy."""
    check_installed("torch", "torch", "a PyTorch model")
    import torch

    module = made_module(model, seed)
    loss = torch.nn.functional.cross_entropy if loss is None else loss
    check_layers(module)
    check_loss(loss)
    gradients = ModuleGradients(module, loss, chunk=chunk, gradient_memory_mib=gradient_memory_mib)
    trials, tried = SampleTrials(gradients), set()

    def check(schema: Schema, measure: Measure | None) -> None:
        if (schema.digest, measure is None) not in tried:
            trials(schema.examples(), measure=measure)
            tried.add((schema.digest, measure is None))

    def bound(schema: Schema) -> float:
        arrays = [part.detach().float().cpu().numpy() for part in trainable_parameters(module).values()]
        return measured_bound(gradients, arrays, schema)

    return MachineModel(gradients, tuple(gradients.names), check, partial(ModuleMeasure, gradients), bound)


def made_module(model: Any, seed: int) -> torch.nn.Module:
    """A module, or the one that a function makes.

    The function's draws from PyTorch's own generator follow from the seed, so that frozen layers of random weights are
    the same in every process; the generator is put back as it was.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        return model
    made = model
    if callable(model):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed("a module's own weights", seed) % 2**63)
            made = model()
    if not isinstance(made, torch.nn.Module):
        raise ConfigurationError(
            f"Expected model to be a torch.nn.Module or a function that makes one, got {type(made).__name__}."
        )
    return made
