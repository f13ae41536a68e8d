"""Whether a PyTorch module predicts each sample right, for a private evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError, Measured
from .torch_model import ModuleGradients, as_inputs, as_targets, called_with, first_axis, picked

if TYPE_CHECKING:
    import torch

_AT_A_TIME = 256
"""Samples that go through the module together, in a simulation."""
_OF_PROBABILITIES = ("BCELoss", "binary_cross_entropy")


class ModuleMeasure:
    """Which samples a module predicts right, and its scores for class 1 of two.

    Parameters
    ----------
    gradients : ModuleGradients
        The module and its trained parameters.
    right : callable, optional
        ``right(output, target)`` gives a value from 0 to 1 a sample. By default the largest of several outputs is the
        prediction; of a single one its sign, or with ``BCELoss``, which takes probabilities, whether it is above 1/2.

    Notes
    -----
    Row i depends on sample i alone for a module that mixes no samples, as those that ``private_client_app`` accepts; a
    real machine computes one sample at a time, whatever the module does.
    """

    def __init__(self, gradients: ModuleGradients, right: Callable[[Any, Any], Any] | None = None) -> None:
        self._gradients = gradients
        self._right = right
        if right is not None:
            gradients.state.add("right", right)
        loss = gradients.loss
        name = getattr(loss, "__name__", type(loss).__name__)
        self._of_probabilities = name in _OF_PROBABILITIES

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
        kind = self._gradients
        inputs = as_inputs(samples[0], kind.dtype, kind.device)
        targets = as_targets(samples[1], kind.dtype, kind.device)
        trained = kind.trained(parameters)
        count = first_axis(inputs)
        if count == 1:
            kind.forget(values=True)
        parts = [
            self._measured(trained, picked(inputs, chosen), picked(targets, chosen))
            for chosen in (slice(start, start + _AT_A_TIME) for start in range(0, count, _AT_A_TIME))
        ]
        kind.check_constants()
        return _joined(parts)

    def _measured(self, trained: dict[str, torch.Tensor], inputs: Any, targets: Any) -> Measured:
        import torch

        with torch.no_grad():
            arguments, named = called_with(inputs)
            output = torch.func.functional_call(self._gradients.module, trained, arguments, named)
            if self._right is not None:
                return Measured(_as_numpy(self._right(output, targets)))
            if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
                raise _unknown(output)
            count = len(targets)
            if output.numel() == count and targets.numel() == count:
                return self._of_one_output(output.reshape(count), targets.reshape(count))
            if output.ndim == 2 and targets.shape == (count,) and not targets.is_floating_point():
                return _of_scores(output, targets)
        raise _unknown(output)

    def _of_one_output(self, output: torch.Tensor, targets: torch.Tensor) -> Measured:
        positive = (targets > 0.5).double()  # classes 0 and 1, or -1 and 1 as losses of margins have them
        score = output.double() if self._of_probabilities else output.double().sigmoid()
        guess = (output > (0.5 if self._of_probabilities else 0.0)).double()
        return Measured(_as_numpy(guess == positive), _as_numpy(score), _as_numpy(positive))


def _of_scores(output: torch.Tensor, targets: torch.Tensor) -> Measured:
    right = _as_numpy(output.argmax(dim=1) == targets)
    if output.shape[1] != 2:
        return Measured(right)
    return Measured(right, _as_numpy((output[:, 1] - output[:, 0]).double().sigmoid()), _as_numpy(targets))


def _as_numpy(values: Any) -> NDArray[np.float64]:
    return values.detach().cpu().double().numpy()


def _joined(parts: Sequence[Measured]) -> Measured:
    if len(parts) == 1:
        return parts[0]
    right = np.concatenate([part.right for part in parts])
    scores = [part.score for part in parts if part.score is not None]
    classes = [part.positive for part in parts if part.positive is not None]
    return Measured(right, np.concatenate(scores) if scores else None, np.concatenate(classes) if classes else None)


def _unknown(output: Any) -> ConfigurationError:
    return ConfigurationError(
        "Expected one output a class and a class number as target, or a single output and 0 or 1, got outputs of "
        f"{tuple(getattr(output, 'shape', ()))}: say which predictions are right, with "
        "evaluation=EvaluationShare(right=lambda output, target: ...)."
    )
