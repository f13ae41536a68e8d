"""A run worked out on its data before the first round: all that a method needs to know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Protocol

from ...clients.side.evaluation_client import held_out_samples
from ...privacy import ConfigurationError, derived_seed
from ...privacy.sums.roster import Roster
from ...strategies import SecureAggregation
from ..data.partition import shard_sizes
from ..data.task import Dataset, Shard
from ..models.model import Model
from ..settings.run_config import SECURE, RunConfig, helper_names, is_centred, is_evaluated, trained_config

_FOR_EVER = 2**31
"""Rounds in which helpers are waited for, where that is never given up."""


class Divides(Protocol):
    """A run configuration or an operator's file, as far as it sets samples aside for an evaluation."""

    @property
    def private_evaluation(self) -> float:
        """The evaluation's share of mu^2."""
        ...

    @property
    def held_out(self) -> float:
        """The share of a machine's samples."""
        ...


def trained_samples(config: Divides, samples: int) -> int:
    """The number of a machine's samples that are trained on: all but those held out for an evaluation."""
    if not config.private_evaluation or not config.held_out:
        return samples
    if samples < 2:
        raise ConfigurationError(
            f"Expected at least two samples on every machine with held-out = {config.held_out:g}, got {samples}: one "
            "to train on, and one to evaluate on."
        )
    return samples - held_out_samples(samples, config.held_out)


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that a preset settles where the run configuration leaves them open.

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
    shards : sequence of Shard
        One a machine, in the order of their names.
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
    fewest: int = 0  # samples that every machine has at least, whatever the shards say: real ones state what they have

    @cached_property
    def sizes(self) -> list[int]:
        """Samples that each machine trains on: all but those that are set aside."""
        sizes = shard_sizes(self.shards, partial(trained_samples, self.config))
        return [max(size, self.fewest) for size in sizes] if self.fewest else sizes

    @cached_property
    def session(self) -> str:
        """The session's name, which in simulation depends on the seed alone.

        Noise is a function of seed, machine and release. So two runs with one seed differ by what was changed between
        them and not by their noise. Every run has ledgers of its own.
        """
        return hashlib.sha256(f"seed {self.config.seed}".encode()).hexdigest()[:32]

    def side_session(self, of: str) -> str:
        """The session's name of a side release, in simulation."""
        return hashlib.sha256(f"{of}, seed {self.config.seed}".encode()).hexdigest()[:32]

    @cached_property
    def is_centred(self) -> bool:
        """Whether machines release the mean of their features first."""
        return is_centred(self.config)

    @cached_property
    def is_evaluated(self) -> bool:
        """Whether machines say privately, after the training, how good the model is."""
        return is_evaluated(self.config)

    @cached_property
    def trained(self) -> Problem:
        """The training alone, with the mu that side releases leave for it."""
        if not self.is_centred and not self.is_evaluated:
            return self
        parts = (self.data, self.shards, self.model, self.num_rounds, self.values, self.fewest)
        return Problem(trained_config(self.config), *parts)

    @property
    def uses_beside(self) -> int:
        """The number of side releases that a training sample is in."""
        return self.is_centred + (self.is_evaluated and not self.config.held_out)

    @cached_property
    def roster(self) -> Roster:
        """The machines and helpers of a simulation under secure aggregation; their keys are the seed's.

        Notes
        -----
        Whoever knows the seed knows every key. Real machines have rosters of their own.
        """
        if not self.config.secure:
            raise ConfigurationError(f"Expected trust = {SECURE!r} for a roster, got {self.config.trust_model!r}.")
        machines = tuple(str(machine) for machine in range(self.config.num_clients))
        return Roster.simulated(self.config.seed, machines, helper_names(self.config.helpers))

    def summation(self) -> dict[str, SecureAggregation]:
        """The options of a strategy under secure aggregation; empty under another trust model.

        Which roster it is helpers say: without messages none is made, of however many machines.
        """
        config = self.config
        if not config.secure:
            return {}
        told = SecureAggregation(
            min_cohort=config.cohort_floor,
            helpers=config.helpers,
            patience=config.give_up_after or _FOR_EVER,
            culprits=config.culprits,
            most_skipped=config.most_skipped,
            most_noise=config.most_noise,
        )
        return {"secure_aggregation": told}

    def order_seed(self, machine: int) -> int:
        """The seed of a machine's orders of samples, where a method shuffles them."""
        return derived_seed("order of a silo", self.config.seed, machine)
