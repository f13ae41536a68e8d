"""Whether a PyTorch module can be trained sample by sample: layers by name, then trials on made-up samples.

A gradient is private because it is one sample's. What mixes samples (batch norm, losses over the batch), draws at
random (dropout), remembers (running statistics) or branches on values is refused with what to use instead. No sample of
any machine is looked at but for its shape and type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..privacy import ConfigurationError, derived_seed
from ..privacy.errors import OF_DATA
from .torch_model import ModuleGradients, called_with
from .torch_values import as_inputs, as_targets, leaves, mapped, picked

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_TRIED = 4
"""Made-up samples: few, for they are computed one by one as well."""
_INSTEAD_OF_BATCH_NORM = (
    "use torch.nn.GroupNorm or LayerNorm, or freeze its statistics with .eval() before the app is made"
)
_INSTEAD_OF_DROPOUT = "leave it out (p=0, or .eval()): clipping and noise keep a model from learning samples by heart"


def check_layers(module: torch.nn.Module) -> None:
    """Refuse layers that mix samples, draw at random or remember, by their names.

    Raises
    ------
    ConfigurationError
    """
    found = next(_unfit_layers(module), None)
    if found is not None:
        name, layer, problem, instead = found
        raise ConfigurationError(
            f"Expected layers that treat each sample by itself, got {type(layer).__name__} at {name or 'the top'!r}, "
            f"which {problem}: {instead}."
        )


def _unfit_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, str]]:
    from torch import nn
    from torch.nn.modules import batchnorm, dropout, instancenorm
    from torch.nn.parameter import is_lazy

    for name, layer in module.named_modules():
        tracking = getattr(layer, "track_running_stats", True)
        if any(map(is_lazy, layer.parameters(recurse=False))):
            yield name, layer, "has no parameters yet", "run the module once before the app is made"
        elif isinstance(layer, instancenorm._InstanceNorm):
            if layer.training and tracking:
                yield name, layer, "remembers statistics of samples", "use track_running_stats=False, or GroupNorm"
        elif isinstance(layer, batchnorm._BatchNorm):
            if layer.training or not tracking:
                yield name, layer, "takes statistics over a batch", _INSTEAD_OF_BATCH_NORM
        elif isinstance(layer, dropout._DropoutNd):
            if layer.training and layer.p > 0:
                yield name, layer, "draws at random", _INSTEAD_OF_DROPOUT
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            if layer.training and layer.dropout > 0:
                yield name, layer, "has dropout, which draws at random", _INSTEAD_OF_DROPOUT
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            yield name, layer, "writes to its weights when it is called (max_norm)", "leave max_norm out"


def check_loss(loss: Callable[..., Any]) -> None:
    """Refuse what is no criterion, and those of PyTorch's own that are no scalar or divide by something of a batch.

    Raises
    ------
    ConfigurationError
    """
    if isinstance(loss, type):
        raise ConfigurationError(
            f"Expected loss(output, target), got the class {loss.__name__}: write {loss.__name__}()."
        )
    name = type(loss).__name__
    if not callable(loss):
        raise ConfigurationError(
            f"Expected loss(output, target), a function, got {name}: write private_client_app(model, loss, samples)."
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "none":
        raise ConfigurationError(f"Expected a loss that is a scalar, got {name}(reduction='none'): use 'mean'.")
    weighted = name in ("CrossEntropyLoss", "NLLLoss") and getattr(loss, "weight", None) is not None
    if weighted and reduction == "mean":
        raise ConfigurationError(
            f"Expected a loss of each sample by itself, got {name} with weights and reduction='mean', which divides by "
            "the weights of the batch: use reduction='sum'."
        )


class SampleTrials:
    """Tries a module's gradients on made-up samples, once for every shape and type.

    Parameters
    ----------
    gradients : ModuleGradients

    Notes
    -----
    **Formal guarantees.** None of its own: it finds mistakes. What a real machine releases is made of gradients that
    were computed one sample at a time, whatever was tried.
    """

    def __init__(self, gradients: ModuleGradients) -> None:
        self._gradients = gradients
        self._tried: set[str] = set()

    def __call__(self, samples: Any) -> None:
        """Try the model on samples that look like these.

        Parameters
        ----------
        samples : Samples
            Shapes and types of the first one are looked at, and nothing else.

        Raises
        ------
        ConfigurationError
            If it mixes samples, or cannot be computed sample by sample, with what to do.
        """
        first = samples[0:1]
        if not isinstance(first, tuple) or len(first) != 2:
            raise ConfigurationError(
                f"Expected samples to give a pair (inputs, targets) for a slice, got {type(first).__name__}."
            )
        kind = self._gradients
        inputs, targets = as_inputs(first[0], kind.dtype, kind.device), as_targets(first[1], kind.dtype, kind.device)
        looks = repr([(tuple(part.shape[1:]), part.dtype) for part in leaves((inputs, targets))])
        if looks not in self._tried:
            self._try(mapped(inputs, _made_up), targets, looks)
            self._tried.add(looks)

    def _try(self, inputs: Any, like: Any, looks: str) -> None:
        import torch

        trained = {name: p.detach() for name, p in self._gradients.module.named_parameters() if p.requires_grad}
        targets, alone = self._alone(trained, inputs, like, looks)
        together = self._together(trained, inputs, targets) or alone
        tolerance = self._tolerance
        again = self._one(trained, inputs, targets, 0)
        self._gradients.check_constants()
        if _apart(again, alone[0]) > tolerance:
            raise ConfigurationError(
                "Expected the gradient of a sample to be the same however often it is computed, got another one the "
                "second time: the model draws at random, or remembers what it saw. Leave such layers out."
            )
        if any(_apart(mine, theirs) > tolerance for mine, theirs in zip(alone, together, strict=True)):
            raise _mixing("a sample's gradient is another one beside other samples", self._guilty_layer(inputs))
        whole = self._whole(trained, inputs, targets)
        mean = torch.stack(alone).mean(dim=0)
        if whole is not None and min(_apart(whole, mean), _apart(whole, len(alone) * mean)) > tolerance:
            guilty = self._guilty_layer(inputs)
            raise _mixing("a batch's gradient is not the mean of its samples' gradients", guilty)

    def _alone(self, trained: Any, inputs: Any, like: Any, looks: str) -> tuple[Any, list[torch.Tensor]]:
        """Gradients one by one, of targets of several classes if there are several."""
        problem: Exception | None = None
        for classes in (2, 1):
            targets = mapped(like, lambda part, classes=classes: _made_up_target(part, classes))
            try:
                return targets, [self._one(trained, inputs, targets, i) for i in range(_TRIED)]
            except Exception as error:
                problem = problem or error
        said = _first_line(problem)
        refusal = None if problem is None else _unfit_step(problem)
        if refusal is not None:
            raise refusal from problem
        if "scalar" in said:
            raise ConfigurationError(
                f"Expected loss(output, target) to be a scalar tensor, got: {said}. Use reduction='mean'."
            ) from problem
        raise ConfigurationError(
            f"Expected a loss and a gradient for one sample like this machine's, {looks}, got "
            f"{type(problem).__name__}: {said}. The module gets a batch of one, as does loss(output, target); "
            "integers stay integers, so scale images (x / 255)."
        ) from problem

    def _one(self, trained: Any, inputs: Any, targets: Any, i: int) -> torch.Tensor:
        return _flat(self._gradients.of_one(trained, picked(inputs, i), picked(targets, i)))

    def _together(self, trained: Any, inputs: Any, targets: Any) -> list[torch.Tensor] | None:
        """Gradients by vmap; None for a module that it has no rule for, whose samples are then computed one by one."""
        try:
            made = self._gradients.of_many(trained, inputs, targets)
        except Exception as error:
            refusal = _unfit_step(error)
            if refusal is not None:
                raise refusal from error
            logger.warning(
                "torch.func.vmap cannot compute this model's samples together, so they are computed one by one, which "
                "is slow (%s).",
                _first_line(error),
                extra=OF_DATA,
            )
            self._gradients.together = False
            return None
        return [_flat({name: rows[i] for name, rows in made.items()}) for i in range(_TRIED)]

    def _whole(self, trained: Any, inputs: Any, targets: Any) -> torch.Tensor | None:
        """The gradient of the loss of all of them as one batch; None for a module that takes no batches."""
        import torch

        def batch_loss(values: Any) -> torch.Tensor:
            arguments, named = called_with(inputs)
            output = torch.func.functional_call(self._gradients.module, values, arguments, named)
            return self._gradients.loss(output, targets)

        try:
            return _flat(torch.func.grad(batch_loss)(trained))
        except Exception:
            return None

    def _guilty_layer(self, inputs: Any) -> str:
        """The first layer that makes something else of a sample when others are beside it; empty if none does."""
        import torch

        module = self._gradients.module
        seen: dict[str, list[tuple[Any, Any]]] = {}

        def note(name: str, given: Any, output: Any) -> None:
            seen.setdefault(name, []).append((given, output))

        hooks = [
            layer.register_forward_hook(lambda _, given, output, name=name: note(name, given, output))
            for name, layer in module.named_modules()
        ]
        try:
            with torch.no_grad():
                for some in (inputs, picked(inputs, slice(0, 1))):
                    arguments, named = called_with(some)
                    module(*arguments, **named)
        except Exception:
            return ""
        finally:
            for hook in hooks:
                hook.remove()
        for name, calls in seen.items():  # inner layers answer before those they are in
            (given, output), (given_alone, output_alone) = calls[0], calls[-1]
            if self._agree(given, given_alone) and not self._agree(output, output_alone):
                return f"{type(module.get_submodule(name)).__name__} at {name or 'the top'!r}"
        return ""

    def _agree(self, whole: Any, alone: Any) -> bool:
        """Whether the first sample of a batch is what it is alone, as far as both are tensors with samples."""
        pairs = zip(leaves(whole), leaves(alone), strict=False)
        return all(
            one.shape[1:] == other.shape[1:] and _apart(one[0], other[0]) <= self._tolerance
            for one, other in pairs
            if hasattr(one, "shape") and hasattr(other, "shape") and one.ndim and other.ndim
        )

    @property
    def _tolerance(self) -> float:
        import torch

        return {torch.float64: 1e-6, torch.float32: 1e-3}.get(self._gradients.dtype, 0.1)


def _mixing(seen: str, guilty: str) -> ConfigurationError:
    if guilty:
        return ConfigurationError(
            f"Expected layers that treat each sample by itself, got {guilty}, which mixes samples ({seen}): replace "
            "statistics over the batch by those of each sample, as GroupNorm and LayerNorm have them."
        )
    return ConfigurationError(
        f"Expected a loss of each sample by itself, got one that mixes samples ({seen}): use a mean over samples, as "
        "torch.nn.functional.cross_entropy; contrastive losses and those weighted within the batch are none. Outputs "
        "of shape (n, 1) beside targets of shape (n,) mix samples too: give targets a second axis (targets[:, None])."
    )


def _unfit_step(error: Exception) -> ConfigurationError | None:
    """What a model does that it must not, by what ``torch.func`` says of it; None if it may do so."""
    said = str(error)
    if "control flow" in said or ".item()" in said or "dynamic" in said:
        return ConfigurationError(
            "Expected a model that takes the same steps for every sample, got one with data-dependent control flow: "
            "use torch.where in place of an `if` on values, masks in place of indices, and no .item()."
        )
    if "random" in said:
        return ConfigurationError(
            "Expected a model that draws nothing at random, got one that does (dropout called as a function, say): "
            f"{_INSTEAD_OF_DROPOUT}."
        )
    if "captured Tensor" in said:
        return ConfigurationError(
            "Expected a model that writes to no tensor of its own, got one that does (a running mean, say), so that "
            "one sample's data would reach the next: use GroupNorm or LayerNorm, or freeze it with .eval()."
        )
    return None


def _made_up(values: torch.Tensor) -> torch.Tensor:
    """Some samples of the same shape and type."""
    import torch

    generator = torch.Generator().manual_seed(derived_seed("made-up samples") % 2**63)
    shape = (_TRIED, *values.shape[1:])
    if values.is_floating_point():
        return torch.randn(shape, generator=generator).to(values.device, values.dtype)
    made = torch.randint(0, 2, shape, generator=generator)
    made.view(_TRIED, -1)[:, :1] = 1  # so that no mask hides all of a sample
    return made.to(values.device, values.dtype)


def _made_up_target(values: torch.Tensor, classes: int) -> torch.Tensor:
    import torch

    shape = (_TRIED, *values.shape[1:])
    if values.is_floating_point():
        generator = torch.Generator().manual_seed(derived_seed("made-up targets") % 2**63)
        return torch.rand(shape, generator=generator).to(values.device, values.dtype)
    numbers = torch.arange(_TRIED).reshape(_TRIED, *[1] * (len(shape) - 1)) % classes
    return numbers.expand(shape).contiguous().to(values.device, values.dtype)


def _flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([part.detach().double().flatten().cpu() for part in gradient.values()])


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far apart two vectors are, relative to the longer one; 0 where they cannot be compared."""
    one, other = one.detach().double().flatten(), other.detach().double().flatten()
    longest = max(float(one.norm()), float(other.norm()))
    apart = float((one - other).norm())
    return apart / longest if longest > 0 and apart == apart else 0.0


def _first_line(error: Exception | None) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
