"""Per-sample gradients of a PyTorch module that was made for it: all of it is trained, and nothing else is in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ...privacy.errors import check_installed
from .gradient_memory import GRADIENT_MEMORY_MIB, Need, check_memory, chunks
from .torch_state import ModuleState

if TYPE_CHECKING:
    import torch


class TorchGradients:
    """Per-sample gradients of a PyTorch module by ``torch.func``.

    Parameters
    ----------
    module : torch.nn.Module
        Without buffers: a buffer such as batch norm's running mean mixes samples, which would break the guarantee.
    loss : callable
        ``loss(output, target) -> scalar tensor`` for a batch of one.
    gradient_memory_mib : float
        What computing gradients may take at a time, in MiB, beside the rows that are given back: as many samples are
        computed together as fit.

    Raises
    ------
    ConfigurationError
        If the module has buffers or no parameters, or PyTorch is not installed; when gradients of several samples are
        computed, if not one fits.

    Notes
    -----
    A batch is a pair (inputs, targets) of arrays or tensors with the samples along the first axis. Each sample is
    passed through the module alone, as a batch of one (``torch.func.vmap``), so rows cannot depend on each other. What
    module and loss remember is put back before samples that come one by one, as a real machine's
    (:class:`~murmurfl.clients.adapters.torch_state.ModuleState`).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
    ) -> None:
        check_installed("torch", "torch", "TorchGradients")
        import torch

        if any(True for _ in module.buffers()):
            raise ConfigurationError(
                f"Expected a module without buffers, got {[name for name, _ in module.named_buffers()]}: "
                "they carry data from sample to sample. Replace batch norm by group or layer norm."
            )
        self.gradient_memory_mib = check_memory(gradient_memory_mib)
        self._module = module
        self._names = [name for name, _ in module.named_parameters()]
        if not self._names:
            raise ConfigurationError("Expected a module with parameters, got none.")
        self._dtypes = [parameter.dtype for parameter in module.parameters()]
        self.shapes: list[tuple[int, ...]] = [tuple(parameter.shape) for parameter in module.parameters()]
        self._needs: dict[str, Need] = {}
        self._state = ModuleState(module, loss)

        def sample_loss(parameters: dict[str, torch.Tensor], inputs: Any, target: Any) -> torch.Tensor:
            output = torch.func.functional_call(module, parameters, (inputs.unsqueeze(0),))
            return loss(output, target.unsqueeze(0))

        self._gradients = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))
        self._gradients_at = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(0, 0, 0))

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        import torch

        named = {
            name: torch.tensor(np.asarray(values), dtype=dtype)
            for name, values, dtype in zip(self._names, parameters, self._dtypes, strict=True)
        }
        return self._rows(samples, lambda inputs, targets, _: self._gradients(named, inputs, targets), "one point")

    def at_points(self, points: NDArray[np.floating], samples: Any) -> NDArray[np.float64]:
        """The gradient of sample i at point i, shape (b, d)."""

        def gradients(inputs: Any, targets: Any, chosen: slice | NDArray[np.intp]) -> dict[str, torch.Tensor]:
            return self._gradients_at(self._named(points[chosen]), inputs, targets)

        return self._rows(samples, gradients, "a point each")

    def _named(self, points: NDArray[np.floating]) -> dict[str, torch.Tensor]:
        """A parameter for each sample, in copies that this module's type has."""
        import torch

        named, start = {}, 0
        for name, shape, dtype in zip(self._names, self.shapes, self._dtypes, strict=True):
            size = math.prod(shape)
            values = np.ascontiguousarray(points[:, start : start + size])
            named[name] = torch.as_tensor(values, dtype=dtype).reshape(len(points), *shape)
            start += size
        return named

    def _rows(
        self, samples: Any, gradients: Callable[[Any, Any, Any], dict[str, torch.Tensor]], kind: str
    ) -> NDArray[np.float64]:
        """The gradients of all samples, as many at a time as memory is set aside for."""
        import torch

        inputs, targets = (torch.as_tensor(part) for part in samples)
        count = len(inputs)
        if count == 1:  # as a real machine asks: whatever another sample has left behind is put back
            self._state.restore(values=False)
        rows = np.empty((count, sum(map(math.prod, self.shapes))))
        step = count if count < 2 else self._need(inputs, targets, gradients, kind).samples(self.gradient_memory_mib)
        for kept, chosen in chunks(count, max(step, 1)):
            made = gradients(inputs[chosen], targets[chosen], chosen)
            start = 0
            for name, shape in zip(self._names, self.shapes, strict=True):
                size, number = math.prod(shape), kept.stop - kept.start
                values = made[name].detach()[:number].reshape(number, size)
                rows[kept, start : start + size] = (
                    values.float() if values.dtype == torch.bfloat16 else values
                ).numpy()
                start += size
            del made
        return rows

    def _need(self, inputs: Any, targets: Any, gradients: Callable[..., Any], kind: str) -> Need:
        """What a sample of this shape needs; measured once."""
        looks = repr((kind, tuple(inputs.shape[1:]), inputs.dtype, tuple(targets.shape[1:]), targets.dtype))
        if looks not in self._needs:
            some = (inputs, targets)
            need = Need.measured(lambda count: gradients(*(part[:count] for part in some), np.arange(count)))
            # Points are copied in NumPy's types as well, which nobody counts.
            own = 16 * sum(map(math.prod, self.shapes)) if kind == "a point each" else 0
            self._needs[looks] = Need(need.fixed, need.a_sample + own)
        return self._needs[looks]
