"""What a method says of its runs in a reproduction."""

from __future__ import annotations

import math

from ..config import RunConfig
from ..experiment import prepare

# The one place of this room that knows a strategy by its name, until the methods are objects: these are the hooks
# Method.sweeps(config) and Method.covers(experiment), and go when there are methods to ask.

_LARGEST_MEAN_RATE = 0.5


def sweeps(config: RunConfig) -> bool:
    """Whether a run can be made together with others that differ in variant, mu and step (:mod:`.sweep`).

    One silo, no losses, a model in closed form.
    """
    alone = config.strategy == "shuffled" and config.num_clients == 1 and not config.lost_replies
    small = config.model != "mean" or config.learning_rate <= _LARGEST_MEAN_RATE
    return alone and small and config.model in ("logistic", "ridge", "mean") and config.max_participations == 0


def covers(config: RunConfig) -> bool:
    """Whether the guarantee holds for a run's step: amplification needs eta <= 1 / L*, plain composition nothing."""
    amplified = config.strategy == "shuffled" and config.variant == "interleaved" and config.accounting == "amplified"
    if not amplified or not config.private:
        return True
    experiment = prepare(config)
    smoothness = float(getattr(experiment.model, "smoothness", math.inf))
    return experiment.values.learning_rate * smoothness <= 1.0 + 1e-12
