"""A model of whatever library, as an app with per-sample gradients needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .evaluation import Measure
from .gradients import PerSampleGradients, Samples


@dataclass(frozen=True)
class MachineModel:
    """What an app needs of a model, whatever library it is of.

    Parameters
    ----------
    gradients : PerSampleGradients
    names : tuple of str
        Of the arrays that are trained, in order.
    read_samples : callable
        ``read_samples(found, in_memory=...)``: what the project calls its samples, as a machine reads them.
    check_samples : callable
        Tries the model on made-up samples like those of a machine, and refuses one that mixes samples.
    measure : callable, optional
        How right the model is about a batch of samples (:class:`~murmurfl.clients.Evaluation`).
    """

    gradients: PerSampleGradients
    names: tuple[str, ...]
    read_samples: Callable[..., Samples]
    check_samples: Callable[[Samples], None] = lambda samples: None  # noqa: ARG005
    measure: Measure | None = None
