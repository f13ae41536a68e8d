"""What a run is about, worked out on its data before the first round: all that a method needs to know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from ...privacy import derived_seed
from ..data.shards import shard_sizes
from ..data.task import Dataset, Shard
from ..models.model import Model
from ..runs.evaluation_settings import trained_samples
from ..settings.run_config import RunConfig


@dataclass(frozen=True)
class Hyperparameters:
    """What a preset settles where the run configuration leaves it open.

    Parameters
    ----------
    clip_norm : float
        S.
    learning_rate : float
        eta.
    diameter : float
        D.
    schedule : str
        Noise schedule of the cancelling mechanism.
    sampling : str
        How the machines of a round are drawn.
    """

    clip_norm: float
    learning_rate: float
    diameter: float = 1.0
    schedule: str = "uniform"
    sampling: str = "uniform"

    def overridden(self, config: RunConfig) -> Hyperparameters:
        """These values, with those a run configuration sets in their place."""
        given = {field.name: getattr(config, field.name) for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value})


@dataclass(frozen=True)
class Problem:
    """A run configuration worked out on its data.

    Parameters
    ----------
    config : RunConfig
    data : Dataset
    shards : sequence of Shard
        One a machine, in the order of their names.
    model : Model
    num_rounds : int
        T.
    values : Hyperparameters
        Clip, step, ball and schedule.
    """

    config: RunConfig
    data: Dataset
    shards: Sequence[Shard]
    model: Model
    num_rounds: int
    values: Hyperparameters

    @cached_property
    def sizes(self) -> list[int]:
        """Samples that each machine trains on: all but those that are set aside."""
        return shard_sizes(self.shards, partial(trained_samples, self.config))

    @cached_property
    def session(self) -> str:
        """The name of this run to its machines: in simulation it depends on the seed alone.

        Noise is a function of seed, machine and release. So two runs with one seed differ by what was changed between
        them and not by their noise. Every run has ledgers of its own.
        """
        return hashlib.sha256(f"seed {self.config.seed}".encode()).hexdigest()[:32]

    def order_seed(self, machine: int) -> int:
        """What the orders of a machine's samples are made from, where a method shuffles them."""
        return derived_seed("order of a silo", self.config.seed, machine)
