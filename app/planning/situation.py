"""The situation of a run: machines, records, classes, features, mu, trust, rounds, attendance, a sample's uses.

Decision, plan and variations all read this one description. All of it is public: sizes and wishes, never samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..data.task import Dataset
from ..methods import Problem
from ..settings.registry import registry
from ..settings.run_config import RunConfig, run_keys

SAMPLE_USES = {"once": 1, "few": 4, "any": None}
"""The most releases of a sample, by the run-config key ``sample-uses``; None for any number."""

WorkedOut = Callable[[RunConfig, Dataset, Sequence[Any]], Problem]
"""Works a run configuration out on data; of the shards only the lengths matter here."""

FEATURES_TRIED = ("strokes", "soft-gradients", "oriented-gradients", "pixels")
"""Features that are tried where none are named, those that teach most first."""
_SIDE_OF_STROKES = 16
"""Images with fewer pixels a side have no strokes to speak of: on digits of 8 x 8 soft gradients teach more."""

_OF_AUTO = ("strategy", "sample-uses", "stream")


@dataclass(frozen=True)
class Situation:
    """The basis of a decision.

    Parameters
    ----------
    config : RunConfig
        What is wanted, with ``strategy = auto``: machines, mu, trust, attendance, ``sample-uses``, ``stream``, and in
        ``num-rounds`` how many rounds are possible, 0 for any number.
    sizes : tuple of int
        Samples of each machine.
    num_features, num_classes : int
        Of the data as they are, before any features are made of them.
    worked_out : callable
        Works a run configuration out on data (:func:`~murmurfl.app.runs.experiment.worked_out`).
    """

    config: RunConfig
    sizes: tuple[int, ...]
    num_features: int
    num_classes: int
    worked_out: WorkedOut

    def __post_init__(self) -> None:
        config = self.config
        if len(self.sizes) != config.num_clients or min(self.sizes, default=0) < 1:
            raise ConfigurationError(
                f"Expected sizes of num-clients = {config.num_clients} machines, each of 1 sample at least, got "
                f"{len(self.sizes)} with {min(self.sizes, default=0)} samples at least."
            )
        if not config.stream:
            return
        object.__setattr__(self, "config", replace(config, sample_uses="once"))
        possible = self.machines * self.fewest // self.asked
        if config.num_rounds > possible:
            raise ConfigurationError(
                f"Expected rounds <= {possible} for a stream of {self.fewest} samples a machine, got "
                f"{config.num_rounds}: with {self.asked} of {self.machines} machines asked in a round, each has not "
                "one sample for every round. Use fewer rounds, ask fewer machines a round, or wait for more samples."
            )

    @property
    def machines(self) -> int:
        """M."""
        return self.config.num_clients

    @property
    def asked(self) -> int:
        """Machines asked in a round, m."""
        return self.config.asked_per_round

    @property
    def fewest(self) -> int:
        """Samples of the machine with the fewest."""
        return min(self.sizes)

    @property
    def most_uses(self) -> int | None:
        """The most releases that a sample may be in; None for any number."""
        return SAMPLE_USES[self.config.sample_uses]

    @property
    def most_rounds(self) -> int | None:
        """The most rounds; None for any number."""
        return self.config.num_rounds or None

    @property
    def features(self) -> tuple[str, ...]:
        """Features to choose from: those that the run configuration names, or all that are fit for its images."""
        task = registry("task")[self.config.task]
        if self.config.features != run_keys()["features"].default or not task.has_images:
            return (self.config.features,)
        small = min(task.image_shape) < _SIDE_OF_STROKES
        return tuple(name for name in FEATURES_TRIED if self._can_have(name) and not (small and name == "strokes"))

    def _can_have(self, features: str) -> bool:
        try:
            registry("features")[features].check(replace(self.config, features=features))
        except ConfigurationError:
            return False
        return True

    def with_settings(self, settings: Mapping[str, Value]) -> RunConfig:
        """The run configuration with a strategy's settings, and nothing left in it that only ``auto`` reads."""
        own = {name: run_keys()[name].default for name in _OF_AUTO}
        return RunConfig.from_mapping({**self.config.to_mapping(), **own, **settings})

    def problem(self, settings: Mapping[str, Value]) -> Problem:
        """The run with a strategy's settings, worked out on sizes: it has the rounds, clip, step and noise to come."""
        config = self.with_settings(settings)
        width, empty = self._width(config), np.zeros(0, np.int64)
        none = np.zeros((0, width), np.float32)
        outline = Dataset(none, empty, none, empty, self.num_classes)
        return self.worked_out(config, outline, [range(size) for size in self.sizes])

    def _width(self, config: RunConfig) -> int:
        """Values of a sample's features: the map says it of a blank image."""
        shape = registry("task")[config.task].image_shape
        if shape is None or config.features == self.config.features:
            return self.num_features
        return int(registry("features")[config.features](np.zeros((1, *shape), np.uint8), 255).shape[1])
