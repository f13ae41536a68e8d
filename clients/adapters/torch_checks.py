"""Whether a PyTorch module can be trained sample by sample: layers by name, then trials on made-up samples.

A gradient is private because it is one sample's: it is replayed from a program that was captured without values
(:mod:`.torch_graph`). Here is said, with what to use instead, why a module has none or why it would not be useful: what
mixes samples (batch norm, losses over the batch), draws at random (dropout), or branches on values. What is tried is
made up: no sample of any client is looked at. A module that passes is a client's model (:func:`torch_client_model`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ...privacy.errors import OF_DATA, ConfigurationError, check_installed
from ...privacy.noise import derived_seed
from ..queries import Measure
from ..records.schema import Schema
from .client_model import ClientModel, measured_bound
from .hugging_face import OwnLoss, is_transformer, with_labels
from .keras_variables import is_keras
from .per_sample_gradients import GRADIENT_MEMORY_MIB
from .torch_graph import INSTEAD_OF_DROPOUT, leaves, mapped
from .torch_model import (
    ModuleGradients,
    ModuleMeasure,
    as_inputs,
    as_targets,
    called_with,
    first_axis,
    picked,
    trainable_parameters,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
ORDINARY = 4
"""Examples that must have a gradient; few, for they are computed one by one as well."""

_INSTEAD_OF_BATCH_NORM = (
    "use torch.nn.GroupNorm or LayerNorm, or freeze its statistics with .eval() before the app is made"
)


def check_layers(module: torch.nn.Module) -> None:
    """Refuse layers that mix samples, draw at random or remember, by their names."""
    found = next(_unfit_layers(module), None)
    if found is not None:
        name, layer, problem, instead = found
        raise ConfigurationError(
            f"Expected layers that treat each sample by itself, got {type(layer).__name__} at {name or 'the top'!r}, "
            f"which {problem}: {instead}.",
            kind="unsupported",
            setting="module",
        )


def _unfit_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, str]]:
    for name, layer in module.named_modules():
        if (fault := _writes_of(layer) or _statistics_of(layer) or _draws_of(layer)) is not None:
            yield name, layer, *fault


def _statistics_of(layer: torch.nn.Module) -> tuple[str, str] | None:
    """Return why a layer that normalises depends on other samples, and what to use; None if it does not."""
    from torch.nn.modules import batchnorm, instancenorm

    tracking = getattr(layer, "track_running_stats", True)
    if isinstance(layer, instancenorm._InstanceNorm):
        remembers = "remembers statistics of samples", "use track_running_stats=False, or GroupNorm"
        return remembers if layer.training and tracking else None
    if isinstance(layer, batchnorm._BatchNorm) and (layer.training or not tracking):
        return "takes statistics over a batch", _INSTEAD_OF_BATCH_NORM
    return None


def _draws_of(layer: torch.nn.Module) -> tuple[str, str] | None:
    """Return why a layer draws at random, and what to do; None if it does not."""
    from torch import nn
    from torch.nn.modules import dropout

    if isinstance(layer, dropout._DropoutNd) and layer.training and layer.p > 0:
        return "draws at random", INSTEAD_OF_DROPOUT
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.training and layer.dropout > 0:
        return "has dropout, which draws at random", INSTEAD_OF_DROPOUT
    return None


def _writes_of(layer: torch.nn.Module) -> tuple[str, str] | None:
    """Return why a layer makes or writes its parameters when it is called, and what to do; None if it does not."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    if is_keras(layer):
        return "computes with variables of its own", "give the Keras model itself, without PyTorch's around it"
    if any(map(is_lazy, layer.parameters(recurse=False))):
        return "has no parameters yet", "run the module once before the app is made"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "writes to its weights when it is called (max_norm)", "leave max_norm out"
    return None


def check_loss(loss: Callable[..., Any]) -> None:
    """Refuse what is no criterion, and those of PyTorch's own that are no scalar or divide by something of a batch."""
    if isinstance(loss, type):
        raise ConfigurationError(
            f"Expected loss(output, target), got the class {loss.__name__}: write {loss.__name__}().",
            kind="wrong-type",
            setting="loss",
        )
    name = type(loss).__name__
    if not callable(loss):
        raise ConfigurationError(
            f"Expected loss(output, target), a function, got {name}: write private_client_app(model, loss, samples).",
            kind="wrong-type",
            setting="loss",
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "none":
        raise ConfigurationError(
            f"Expected a loss that is a scalar, got {name}(reduction='none'): use 'mean'.",
            kind="unsupported",
            setting="loss",
        )
    weighted = name in ("CrossEntropyLoss", "NLLLoss") and getattr(loss, "weight", None) is not None
    if weighted and reduction == "mean":
        raise ConfigurationError(
            f"Expected a loss of each sample by itself, got {name} with weights and reduction='mean', which divides by "
            "the weights of the batch: use reduction='sum'.",
            kind="unsupported",
            setting="loss",
        )


class SampleTrials:
    """Captures what a module computes for one record, and tries it on made-up records: no verdict depends on a sample.

    What is captured takes the same steps for every record. A model that does not, and hides it, gives another gradient
    than its program on some record; the trial finds this where a made-up record shows it. It is a mistake and no leak:
    a program that passes is a function of one record in any case.
    """

    def __init__(self, gradients: ModuleGradients) -> None:
        self._gradients = gradients

    def __call__(
        self, examples: Sequence[tuple[Any, Any]], *, ordinary: int = ORDINARY, measure: ModuleMeasure | None = None
    ) -> None:
        """Refuse a model that cannot be captured, whose program computes something else, or that mixes samples.

        Examples are batches of one record each. The first ``ordinary`` ones, at least two, must have a gradient; an
        extreme one that fails counts as zero, as a client's sample would. The ``measure`` of a private evaluation is
        captured and tried as well.
        """
        import torch

        if ordinary < 2 or len(examples) < ordinary:
            raise ConfigurationError(
                f"Expected at least {max(ordinary, 2)} examples, got {len(examples)}.",
                kind="out-of-range",
                setting="examples",
            )
        found = [self._tensors(one) for one in examples]
        with torch.random.fork_rng(devices=[]):  # a model that draws is refused, and has drawn by then
            for number, example in enumerate(found):
                self._try_alone(*example, number < ordinary)
            if measure is not None:
                self._try_measure(measure, found, ordinary)
            self._try_together(found[:ordinary])

    def _tensors(self, example: Any) -> tuple[Any, Any]:
        if not isinstance(example, tuple) or len(example) != 2:
            raise ConfigurationError(
                f"Expected examples that are pairs (inputs, targets), got {type(example).__name__}.",
                kind="wrong-type",
                setting="examples",
            )
        kind = self._gradients
        return as_inputs(example[0], kind.dtype, kind.device), as_targets(example[1], kind.dtype, kind.device)

    @property
    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._gradients.module.named_parameters() if p.requires_grad}

    def _try_alone(self, inputs: Any, targets: Any, ordinary: bool) -> None:
        """Compare a record's gradient by the model's own code with that of its program."""
        one, target = picked(inputs, 0), picked(targets, 0)
        try:
            by_code = _flat(self._gradients.eager(self._trained, one, target))
        except ConfigurationError:
            raise
        except Exception as error:  # a user's module raises what it likes; an extreme record may fail, as any may
            if ordinary:
                raise self._failed(error, inputs, targets) from error
            by_code = None
        self._gradients.program(one, target)
        if by_code is None:
            return
        try:
            replayed = self._one(self._trained, inputs, targets, 0)
        except Exception as error:  # the program of another record's looks
            raise _other_steps() from error
        if _apart(by_code, replayed) > self._rounding or (by_code.isfinite() != replayed.isfinite()).any():
            raise _other_steps()

    def _failed(self, error: Exception, inputs: Any, targets: Any) -> ConfigurationError:
        """Return the refusal of a model that has no gradient for an ordinary record."""
        refusal, message = _unfit_step(error), _first_line(error)
        if refusal is None and "scalar" in message:
            refusal = ConfigurationError(
                f"Expected loss(output, target) to be a scalar tensor, got: {message}. Use reduction='mean'.",
                kind="wrong-type",
                setting="loss",
            )
        looks = repr([(tuple(part.shape[1:]), part.dtype) for part in leaves((inputs, targets))])
        return refusal or ConfigurationError(
            f"Expected a loss and a gradient for one sample like this client's, {looks}, got "
            f"{type(error).__name__}: {message}. The module gets a batch of one, as does loss(output, target); "
            "integers stay integers, so scale images (x / 255).",
            kind="failed",
        )

    def _try_measure(self, measure: ModuleMeasure, examples: Sequence[tuple[Any, Any]], ordinary: int) -> None:
        """Compare what an evaluation makes of each record by the model's own code with its program."""
        arrays = [values.float().cpu().numpy() for values in self._trained.values()]
        for number, (inputs, targets) in enumerate(examples):
            try:
                by_code = measure.eager(self._trained, picked(inputs, 0), picked(targets, 0))
            except ConfigurationError:
                raise
            except Exception as error:
                if number >= ordinary:
                    continue
                raise ConfigurationError(
                    "Expected right(output, target) to give a value from 0 to 1 for each sample of a batch, got "
                    f"{type(error).__name__}: {_first_line(error)}.",
                    kind="wrong-type",
                    setting="right",
                ) from error
            measured = measure(arrays, (inputs, targets))
            replayed = [one for one in (measured.right, measured.score, measured.positive) if one is not None]
            if any(abs(float(one) - float(other[0])) > _ROUNDED for one, other in zip(by_code, replayed, strict=True)):
                raise _other_steps()

    def _try_together(self, examples: list[tuple[Any, Any]]) -> None:
        """Try several at a time: each gradient must be what it is alone."""
        import torch

        if len({repr([part.shape for part in leaves(one)]) for one in examples}) > 1:
            self._gradients.together = False  # of several lengths, which make no batch
            return
        columns = iter(zip(*map(leaves, examples), strict=True))
        inputs, targets = (mapped(part, lambda _: torch.cat(next(columns))) for part in examples[0])
        trained, tolerance = self._trained, self._tolerance
        alone = [self._one(trained, inputs, targets, i) for i in range(len(examples))]
        together, problem = self._together(trained, inputs, targets)
        if any(_apart(mine, theirs) > tolerance for mine, theirs in zip(alone, together or alone, strict=True)):
            raise _mixing("a sample's gradient is another one beside other samples", self._guilty_layer(inputs))
        mean, turned = torch.stack(alone).mean(dim=0), torch.arange(len(examples)).flip(0)
        for whole in (
            self._whole(trained, inputs, targets),
            self._whole(trained, picked(inputs, turned), picked(targets, turned)),
        ):
            if whole is not None and min(_apart(whole, mean), _apart(whole, len(alone) * mean)) > tolerance:
                guilty = self._guilty_layer(inputs)
                raise problem or _mixing("a batch's gradient is not the mean of its samples' gradients", guilty)

    def _one(self, trained: Any, inputs: Any, targets: Any, i: int) -> torch.Tensor:
        return _flat(self._gradients.of_one(trained, picked(inputs, i), picked(targets, i)))

    def _together(
        self, trained: Any, inputs: Any, targets: Any
    ) -> tuple[list[torch.Tensor] | None, ConfigurationError | None]:
        """Gradients by vmap; none for a module that it has no rule for, whose samples are then computed one by one."""
        try:
            made = self._gradients.vmapped(trained, inputs, targets)
        except Exception as error:
            refusal, branches = _unfit_step(error), _branches(error)
            if refusal is not None and not branches:
                raise refusal from error
            logger.warning(
                "torch.func.vmap cannot compute this model's samples together, so they are computed one by one, which "
                "is slow (%s).",
                _first_line(error),
                extra=OF_DATA,
            )
            self._gradients.together = False
            return None, refusal
        return [_flat({name: rows[i] for name, rows in made.items()}) for i in range(first_axis(inputs))], None

    def _whole(self, trained: Any, inputs: Any, targets: Any) -> torch.Tensor | None:
        """Return the gradient of the loss of all of them as one batch; None for a module that takes no batches."""
        import torch

        if isinstance(self._gradients.loss, OwnLoss):
            return None  # of a batch it is the mean over words, of which records have different numbers

        def batch_loss(values: Any) -> torch.Tensor:
            loss = self._gradients.loss
            arguments, named = called_with(with_labels(loss, inputs, targets))
            return loss(torch.func.functional_call(self._gradients.module, values, arguments, named), targets)

        try:
            return _flat(torch.func.grad(batch_loss)(trained))
        except Exception:  # a user's module that takes no batches raises what it likes
            return None

    def _guilty_layer(self, inputs: Any) -> str:
        """Return the first layer that makes something else of a sample when others are beside it.

        Empty if none does.
        """
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
        except Exception:  # a user's module raises what it likes; the refusal then names no layer
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
        """Return True if the first sample of a batch is what it is alone, as far as both are tensors with samples."""
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

    @property
    def _rounding(self) -> float:
        """Largest distance of the same gradient by another route: rounding, and no other step."""
        return 1e-2 * self._tolerance


_ROUNDED = 1e-3
"""Largest difference of a measure by another route."""


def _mixing(seen: str, guilty: str) -> ConfigurationError:
    if guilty:
        return ConfigurationError(
            f"Expected layers that treat each sample by itself, got {guilty}, which mixes samples ({seen}): replace "
            "statistics over the batch by those of each sample, as GroupNorm and LayerNorm have them.",
            kind="unsupported",
        )
    return ConfigurationError(
        f"Expected a loss of each sample by itself, got one that mixes samples ({seen}): use a mean over samples, as "
        "torch.nn.functional.cross_entropy; contrastive losses and those weighted within the batch are none. Outputs "
        "of shape (n, 1) beside targets of shape (n,) mix samples too: give targets a second axis (targets[:, None]).",
        kind="unsupported",
    )


def _unfit_step(error: Exception) -> ConfigurationError | None:
    """Return the refusal of a model by the error of ``torch.func``; None if it may do so."""
    message = str(error)
    if _branches(error):
        return ConfigurationError(
            "Expected a model that takes the same steps for every sample, got one with data-dependent control flow: "
            "use torch.where in place of an `if` on values, masks in place of indices, and no .item().",
            kind="unsupported",
        )
    if "random" in message:
        return _drawing()
    if "captured Tensor" in message:
        return ConfigurationError(
            "Expected a model that writes to no tensor of its own, got one that does (a running mean, say), so that "
            "one sample's data would reach the next: use GroupNorm or LayerNorm, or freeze it with .eval().",
            kind="unsupported",
        )
    return None


def _other_steps() -> ConfigurationError:
    return ConfigurationError(
        "Expected a model that takes the same steps for every record, got one whose captured steps give another result "
        "than its own code on a made-up record: it branches on values, draws, or remembers. Use torch.where in the "
        "place of an `if`, and compute everything anew in every call.",
        kind="unsupported",
    )


def _branches(error: Exception) -> bool:
    """Whether steps depend on values: vmap cannot compute such samples together, and one by one they are private."""
    return any(word in str(error) for word in ("control flow", ".item()", "dynamic"))


def _drawing() -> ConfigurationError:
    return ConfigurationError(
        "Expected a model that draws nothing at random, got one that does (dropout called as a function, say): "
        f"{INSTEAD_OF_DROPOUT}.",
        kind="unsupported",
    )


def _flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([part.detach().double().flatten().cpu() for part in gradient.values()])


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far apart two vectors are, relative to the longer one; 0 where they cannot be compared."""
    one, other = one.detach().double().flatten(), other.detach().double().flatten()
    longest = max(float(one.norm()), float(other.norm()))
    apart = float((one - other).norm())
    return apart / longest if longest > 0 and apart == apart else 0.0


def _first_line(error: Exception | None) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def torch_client_model(
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    *,
    seed: int,
    chunk: int | None = None,
    gradient_memory_mib: float = GRADIENT_MEMORY_MIB,
) -> ClientModel:
    """Return the client's model of a module, or of a function that makes one by a seed.

    By default with the cross-entropy.
    """
    check_installed("torch", "torch", "a PyTorch model")
    import torch

    module = made_module(model, seed)
    if loss is None:
        loss = OwnLoss(module) if is_transformer(module) else torch.nn.functional.cross_entropy
    check_layers(module)
    check_loss(loss)
    gradients = ModuleGradients(module, loss, chunk=chunk, gradient_memory_mib=gradient_memory_mib)
    trials, tried = SampleTrials(gradients), set()

    def check(schema: Schema, measure: Measure | None) -> None:
        if (schema.digest, measure is None) not in tried:
            trials(schema.examples(), measure=cast(ModuleMeasure | None, measure))  # made by the model's measure
            tried.add((schema.digest, measure is None))

    def bound(schema: Schema) -> float:
        arrays = [part.detach().float().cpu().numpy() for part in trainable_parameters(module).values()]
        return measured_bound(gradients, arrays, schema)

    measure = partial(ModuleMeasure, gradients)
    return ClientModel(gradients, tuple(gradients.names), check, measure, bound, norm=network_norm(module))


def network_norm(module: torch.nn.Module) -> float:
    """Return the norm of a network's trained parameters as they are now; infinite for a module of one weight matrix.

    Scores are linear in one matrix, so steps of any length scale them. Several matrices are multiplied with each other.
    """
    parameters = [part.detach().double() for part in trainable_parameters(module).values()]
    if sum(part.ndim > 1 for part in parameters) < 2:
        return math.inf
    return math.sqrt(sum(float(part.square().sum()) for part in parameters)) or math.inf


def made_module(model: Any, seed: int) -> torch.nn.Module:
    """Return a module, or the one that a function makes.

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
            f"Expected model to be a torch.nn.Module or a function that makes one, got {type(made).__name__}.",
            kind="wrong-type",
            setting="model",
        )
    return made
