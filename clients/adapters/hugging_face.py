"""Models of transformers and peft: a loss that the model computes itself, from labels among its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IGNORED = -100
"""The label that transformers' losses leave out."""


def is_transformer(module: Any) -> bool:
    """Return True if a module is a model of transformers, or of peft around one; imports nothing."""
    names = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(module).__mro__}
    return ("transformers", "PreTrainedModel") in names or ("peft", "PeftModel") in names


class OwnLoss:
    """The loss that a model of transformers computes if it is called with ``labels``, as ``loss(output, target)``.

    Labels of words that the attention mask hides are left out of it, as transformers leaves out labels of -100. It is a
    record's own mean over its words.
    """

    def __init__(self, module: Any) -> None:
        self._first = str(getattr(module, "main_input_name", "input_ids"))

    def with_labels(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """Return a model's inputs by name, with the targets among them."""
        named = inputs if isinstance(inputs, Mapping) else {self._first: inputs}
        mask = named.get("attention_mask")
        if mask is not None and getattr(targets, "shape", ()) == mask.shape and not targets.is_floating_point():
            targets = targets.masked_fill(mask == 0, _IGNORED)
        return {**named, "labels": targets}

    def __call__(self, output: Any, targets: Any) -> Any:
        return output["loss"]


def with_labels(loss: Any, inputs: Any, targets: Any) -> Any:
    """Return inputs as a loss wants the model to be called: with labels, if the model computes the loss."""
    return loss.with_labels(inputs, targets) if isinstance(loss, OwnLoss) else inputs
