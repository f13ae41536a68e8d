"""Batches for PyTorch: tensors, and tuples and mappings of them, with the samples along the first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...privacy import ConfigurationError

if TYPE_CHECKING:
    import torch


def mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, with every array or tensor in it changed."""
    if isinstance(values, Mapping):
        return {name: mapped(part, change) for name, part in values.items()}
    if isinstance(values, tuple | list):
        return tuple(mapped(part, change) for part in values)
    return change(values)


def leaves(values: Any) -> list[Any]:
    """The arrays or tensors of a structure, in order."""
    found: list[Any] = []
    mapped(values, found.append)
    return found


def first_axis(values: Any) -> int:
    """How many samples a batch has.

    Raises
    ------
    ConfigurationError
        If its parts do not have the same number.
    """
    counts = {len(part) for part in leaves(values)}
    if len(counts) != 1:
        raise ConfigurationError(f"Expected inputs with one length along the first axis, got {sorted(counts)}.")
    return counts.pop()


def picked(values: Any, chosen: Any) -> Any:
    """Some samples of a batch."""
    return mapped(values, lambda part: part[chosen])


def with_batch_axis(sample: Any) -> Any:
    """One sample as a batch of one."""
    return mapped(sample, lambda part: part.unsqueeze(0))


def as_tensor(values: Any) -> torch.Tensor:
    """An array, a tensor or nested lists as a tensor, sharing memory where it can.

    Raises
    ------
    ConfigurationError
        If it is nothing that PyTorch reads.
    """
    import torch

    if isinstance(values, torch.Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
        # A tensor of a view that may not be written to warns, and a copy of a batch costs little.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Expected arrays or tensors of numbers, got {type(values).__name__}: give (inputs, targets) of them."
        ) from error


def as_inputs(values: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Inputs as a module wants them: floating-point numbers in its own type, integers as they are."""

    def change(part: Any) -> torch.Tensor:
        tensor = as_tensor(part)
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    return mapped(values, change)


def as_targets(values: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Targets as PyTorch's losses want them: class numbers in int64, floating-point numbers in the module's type."""
    import torch

    def change(part: Any) -> torch.Tensor:
        tensor = as_tensor(part)
        if tensor.is_floating_point():
            return tensor.to(device, dtype)
        return tensor.to(device) if tensor.dtype == torch.bool else tensor.to(device, torch.int64)

    return mapped(values, change)
