"""Who takes part in a simulation: its machines, and under secure aggregation its helpers."""

from __future__ import annotations

from .config import RunConfig
from .trust import helper_names


def participant_names(config: RunConfig) -> list[str]:
    """All of them in order, machines first; each is on a node of its own where there are enough nodes."""
    helpers = helper_names(config.helpers) if config.secure else ()
    return [*map(str, range(config.num_clients)), *helpers]
