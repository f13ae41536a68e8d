"""Rules of thumb: with what settings each strategy would be run in a situation, and what few rounds leave undone.

:func:`options` is all that the decision asks of this file, and :func:`tried` all that variations of it ask. A rule
gives settings to try; of those the one that scores best is the strategy's option. How the constants were chosen:
docs/tuning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..methods import METHODS
from ..settings.registry import registry
from .option import Impossible, Option, noise_to_signal_of
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
_FEATURES_LEAVE = {"soft-gradients": 0.05, "oriented-gradients": 0.15, "pixels": 0.5}
"""What features leave undone beside the best there are, in the same units."""


@dataclass(frozen=True)
class _Rule:
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
        """What so few rounds leave undone, in units of noise-to-signal."""
        share = max(classes - 1, 1) / (_CLASSES - 1) if self.whole else 1.0
        return self.leaves + share * _TOO_FEW / (rounds * self.worth) ** 1.5

    def features(self, situation: Situation) -> tuple[str, ...]:
        """The features it is tried on."""
        found = situation.features
        if not self.tuned or len(found) == 1:
            return found
        known = tuple(name for name in found if name in registry("task")[situation.config.task].tuned)
        return known or found


def options(situation: Situation) -> list[Option | Impossible]:
    """Every strategy for the situation's kind of server at its best, or why it cannot be had.

    They come in the order in which they are preferred where they score alike.
    """
    trust = situation.config.trust_model
    return [_best(rule, situation) for rule in _RULES.values() if trust in METHODS[rule.strategy].trusts]


def _best(rule: _Rule, situation: Situation) -> Option | Impossible:
    if situation.config.stream and not rule.stream:
        return Impossible(rule.strategy, "samples come as a stream, and it uses every sample in every round")
    if not situation.config.stream and not rule.standing:
        return Impossible(rule.strategy, "made for streams, and samples are there")
    found = rule.settings(situation)
    if isinstance(found, str):
        return Impossible(rule.strategy, found)
    made, refused = [], ""
    for features in rule.features(situation):
        for settings in found:
            try:
                made.append(tried(situation, rule.strategy, {**settings, "features": features}))
            except ConfigurationError as error:
                refused = refused or str(error)
    return min(made, key=lambda option: option.score) if made else Impossible(rule.strategy, refused)


def tried(situation: Situation, strategy: str, settings: Settings) -> Option:
    """A strategy with some settings, in as many rounds as it takes and as are possible.

    Raises
    ------
    ConfigurationError
        If it cannot be run with them, or is none of those that are compared.
    """
    rule = _RULES.get(strategy)
    if rule is None:
        raise ConfigurationError(f"Expected one of {', '.join(_RULES)}, got {strategy!r}.")

    def made(**more: Value) -> Option:
        chosen = {"strategy": strategy, **settings, **more}
        if situation.most_uses == 1:  # the mean of the features is one use more
            chosen["centring"] = "none"
        problem = situation.problem(chosen)
        if situation.most_uses == 1 and problem.uses_beside:
            raise ConfigurationError("a private evaluation with held-out = 0 uses every sample once more")
        chosen["num-rounds"] = problem.num_rounds
        known = situation.config.to_mapping()
        own = {name: value for name, value in chosen.items() if name != "strategy" and known[name] != value}
        features = _FEATURES_LEAVE.get(problem.config.features, 0.0) if len(situation.features) > 1 else 0.0
        shortfall = rule.shortfall(problem.num_rounds, situation.num_classes) + features
        policy = METHODS[strategy].policy(problem.trained, min(problem.sizes))
        uses = policy.participations + problem.uses_beside
        ratio = noise_to_signal_of(problem)
        return Option(strategy, own, problem, ratio, shortfall, uses, rule.loudness, rule.whole)

    first = made()
    uses, rounds = situation.most_uses, situation.most_rounds
    if not rule.whole or (first.uses <= (uses or first.uses) and first.rounds <= (rounds or first.rounds)):
        return first
    left = None if uses is None else uses - first.problem.uses_beside
    most = min(one for one in (left, rounds) if one is not None)
    if most < 1:
        raise ConfigurationError("it needs a sample in more releases than one")
    return made(**{"num-rounds": most})


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
    return [{"num-rounds": 0}]


def _whole_machines(situation: Situation) -> list[Settings] | str:
    """ISRL-DP with all samples of a machine as its batch, many times."""
    most = min(one for one in (situation.most_uses, situation.most_rounds, max(_PASSES)) if one is not None)
    if most < min(_PASSES):
        return f"at most {most} rounds with every sample are possible, and it takes {min(_PASSES)}"
    if situation.asked < situation.machines:
        return "it asks every machine in every round"
    return [{"batch-size": situation.fewest, "passes": passes} for passes in _PASSES if passes <= most]


def _online(situation: Situation) -> list[Settings] | str:
    kind = registry("model")[situation.config.model]
    unit: Settings = {"clip-unit": "contractive"} if getattr(kind, "clips_contractively", False) else {}
    made: list[Settings] = []
    for steps in _LOCAL_STEPS:
        rounds = situation.fewest * situation.machines // (situation.asked * steps)
        rounds = min(rounds, situation.most_rounds or rounds)
        if rounds >= 1 and steps <= situation.fewest:
            made += [
                {"batch-size": steps, "num-rounds": rounds, "mechanism": mechanism, **unit}
                for mechanism in _ONLINE_MECHANISMS
            ]
    return made or "there are too few samples for its local steps"


_RULES = {
    rule.strategy: rule
    for rule in (
        _Rule("full-batch", _full_batch, whole=True, worth=1.0, stream=False),
        _Rule("trusted-full-batch", _full_batch, whole=True, worth=1.0, stream=False),
        _Rule("one-shot", _one_shot, whole=True, worth=math.inf, leaves=_OF_RIDGE, loudness=1.7, stream=False),
        _Rule("mu2", _one_pass, leaves=_OF_BATCHES, tuned=True),
        _Rule("trusted-mu2", _one_pass, leaves=_OF_BATCHES, tuned=True),
        _Rule("online", _online, leaves=_OF_LOCAL_STEPS, tuned=True, standing=False),
        _Rule("isrl-dp-accelerated", _whole_machines, whole=True, worth=0.5, tuned=True, stream=False),
        _Rule("noisy-sgd", _one_pass, leaves=_OF_BATCHES, tuned=True),
        _Rule("trusted-sgd", _one_pass, leaves=_OF_BATCHES, tuned=True),
    )
}
