"""A model of whatever library, as an app with per-sample gradients needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        ``measure(right)``: which predictions are right, for a private evaluation; ``right`` is a project's own word.
    """

    gradients: PerSampleGradients
    names: tuple[str, ...]
    read_samples: Callable[..., Samples]
    check_samples: Callable[[Samples], None] = lambda samples: None  # noqa: ARG005
    measure: Callable[[Callable[..., Any] | None], Measure] | None = None
