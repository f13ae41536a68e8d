"""For each strategy: with what settings it would be run in a situation, or why it cannot be.

A rule gives settings to try. Of those the one that scores best is the strategy's option (:mod:`.deciding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...privacy.setting import Value
from ..settings.registry import registry
from .situation import Situation

Settings = Mapping[str, Value]

_ROUNDS = (4, 8, 12, 16, 24, 32, 48, 75, 100)
"""How many rounds one pass may be cut into: few make a round's noise small, many follow the loss."""
_PASSES = (8, 20)
"""Of ISRL-DP with whole machines as batches; more would only add noise."""
_LOCAL_STEPS = (1, 5, 20)
_ONLINE_MECHANISMS = ("sqrt_toeplitz", "cancelling", "independent")
_TOO_FEW = 2.0
"""What one full-batch round leaves undone in units of noise-to-signal, with ten classes: on MNIST it costs 15 points,
and a noise-to-signal of 0.1 costs one or less. T rounds leave T^1.5 times less, and fewer classes less in
proportion; where rounds are of batches, classes make no difference."""
_CLASSES = 10
_OF_BATCHES = 0.15
"""What batches leave undone beside full ones: other samples in every round are noise as well."""
_OF_RIDGE = 0.3
"""What ridge regression on second moments leaves undone beside many steps on the loss itself."""
_OF_LOCAL_STEPS = 0.35
"""What steps leave undone whose length was not chosen for the noise."""
FEATURES_LEAVE = {"soft-gradients": 0.05, "oriented-gradients": 0.15, "pixels": 0.5}
"""What features leave undone beside the best there are, in the same units."""


@dataclass(frozen=True)
class Rule:
    """How a strategy is tried.

    Parameters
    ----------
    strategy : str
    settings : callable
        The settings to try in a situation, or in words why there are none.
    whole : bool
        Whether each round goes through all samples of a machine.
    worth : float
        How many full-batch rounds one of its rounds is worth.
    leaves : float
        What it leaves undone however many its rounds are.
    loudness : float
        How much more noise does to it than to a step: second moments with noise are inverted.
    tuned : bool
        Whether its clip and step are chosen for each task and features, so that it is tried on those they are for.
    stream : bool
        Whether it takes samples as they come.
    standing : bool
        Whether it makes sense where samples stay.
    """

    strategy: str
    settings: Callable[[Situation], list[Settings] | str]
    whole: bool = False
    worth: float = 0.2
    leaves: float = 0.0
    loudness: float = 1.0
    tuned: bool = False
    stream: bool = True
    standing: bool = True

    def shortfall(self, rounds: int, classes: int) -> float:
        """What so few rounds leave undone, in units of noise-to-signal: a rule of thumb (docs/tuning.md)."""
        share = max(classes - 1, 1) / (_CLASSES - 1) if self.whole else 1.0
        return self.leaves + share * _TOO_FEW / (rounds * self.worth) ** 1.5

    def features(self, situation: Situation) -> tuple[str, ...]:
        """The features it is tried on."""
        found = situation.features
        if not self.tuned or len(found) == 1:
            return found
        known = tuple(name for name in found if name in registry("task")[situation.config.task].tuned)
        return known or found


def _one_pass(situation: Situation) -> list[Settings] | str:
    """One pass over all samples, cut into rounds."""
    share = situation.asked / situation.machines
    most = situation.most_rounds
    wanted = [rounds for rounds in _ROUNDS if most is None or rounds < most] + ([] if most is None else [most])
    made: dict[int, Settings] = {}
    for rounds in wanted:
        batch = int(situation.fewest // max(rounds * share, 1.0))
        if batch >= 1:
            made[batch] = {"batch-size": batch, "num-rounds": rounds}
    return list(made.values()) or (
        f"{situation.fewest} samples of a machine are too few for {most} rounds in which each is used once"
    )


def _full_batch(situation: Situation) -> list[Settings] | str:  # noqa: ARG001 - its preset knows how many rounds
    return [{}]


def _one_shot(situation: Situation) -> list[Settings] | str:  # noqa: ARG001 - there is nothing to settle
    """Second moments in one release."""
    return [{"num-rounds": 0}]


def _whole_machines(situation: Situation) -> list[Settings] | str:
    """ISRL-DP with all samples of a machine as its batch, many times."""
    uses, rounds = situation.most_uses, situation.most_rounds
    most = min(one for one in (uses, rounds, max(_PASSES)) if one is not None)
    if most < min(_PASSES):
        return f"at most {most} rounds with every sample are possible, and it takes {min(_PASSES)}"
    if situation.asked < situation.machines:
        return "it asks every machine in every round"
    chosen = [passes for passes in _PASSES if passes <= most]
    return [{"batch-size": situation.fewest, "passes": passes} for passes in chosen]


def _online(situation: Situation) -> list[Settings] | str:
    kind = registry("model")[situation.config.model]
    unit: Settings = {"clip-unit": "contractive"} if getattr(kind, "clips_contractively", False) else {}
    made: list[Settings] = []
    for steps in _LOCAL_STEPS:
        rounds = situation.fewest * situation.machines // (situation.asked * steps)
        if situation.most_rounds is not None:
            rounds = min(rounds, situation.most_rounds)
        if rounds >= 1 and steps <= situation.fewest:
            made += [
                {"batch-size": steps, "num-rounds": rounds, "mechanism": mechanism, **unit}
                for mechanism in _ONLINE_MECHANISMS
            ]
    return made or "there are too few samples for its local steps"


RULES = (
    Rule("full-batch", _full_batch, whole=True, worth=1.0, stream=False),
    Rule("trusted-full-batch", _full_batch, whole=True, worth=1.0, stream=False),
    Rule("one-shot", _one_shot, whole=True, worth=math.inf, leaves=_OF_RIDGE, loudness=1.7, stream=False),
    Rule("mu2", _one_pass, leaves=_OF_BATCHES, tuned=True),
    Rule("trusted-mu2", _one_pass, leaves=_OF_BATCHES, tuned=True),
    Rule("online", _online, leaves=_OF_LOCAL_STEPS, tuned=True, standing=False),
    Rule("isrl-dp-accelerated", _whole_machines, whole=True, worth=0.5, tuned=True, stream=False),
    Rule("noisy-sgd", _one_pass, leaves=_OF_BATCHES, tuned=True),
    Rule("trusted-sgd", _one_pass, leaves=_OF_BATCHES, tuned=True),
)
"""Strategies in the order in which they are preferred where they score alike."""
