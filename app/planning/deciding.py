"""The decision: every strategy worked out for a situation, the best one, and why not the others (``strategy = auto``).

When every sample may be used in every round, independent noise and few full batches win: a sample that moves all rounds
together shifts what the model rests on by the sum of what it does in each, whatever the noise's correlation, and
independent noise attains the least that this takes (docs/proofs/full-batches.md). Noise that cancels is for streams,
for samples that may be used once or in few rounds, and for machines that are seldom asked. Nobody has to know which
case it is: options are ranked by their score, and that puts them in order.

A rule of thumb gives each strategy the settings to try, and says what few rounds leave undone; the settings that score
best are the strategy's option. How the rules' constants were chosen: docs/tuning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...privacy import ConfigurationError, NoisePlan
from ...privacy.mechanisms import noise_stands_alone
from ...privacy.setting import Value
from ..methods import METHODS, Problem
from ..settings.registry import registry
from .situation import Situation


@dataclass(frozen=True)
class Impossible:
    """A strategy that a situation rules out.

    Parameters
    ----------
    why : str
        In words, for people.
    """

    strategy: str
    why: str


@dataclass(frozen=True)
class Option:
    """A strategy that is possible, with what it would be run with.

    Parameters
    ----------
    settings : mapping
        Run-config keys that it sets beyond the situation's own.
    problem : Problem
        The run, worked out on sizes.
    noise_to_signal : float
        :func:`noise_to_signal` of it.
    shortfall : float
        What so few rounds leave undone, in the same units: by the strategy's rule of thumb.
    uses : int
        In how many releases a sample is.
    loudness : float
        How much more noise does to it than to a step.
    whole : bool
        Whether all samples of a machine are in every release.
    """

    strategy: str
    settings: Mapping[str, Value]
    problem: Problem
    noise_to_signal: float
    shortfall: float
    uses: int
    loudness: float = 1.0
    whole: bool = False

    @property
    def score(self) -> float:
        """The rank of an option; less is better."""
        return self.loudness * self.noise_to_signal + self.shortfall

    @property
    def features(self) -> str:
        """The features that are learnt from."""
        return self.problem.config.features

    @property
    def rounds(self) -> int:
        """T."""
        return self.problem.num_rounds


def noise_to_signal(
    plan: NoisePlan,
    *,
    longest: float,
    num_values: int,
    rounds: int,
    asked: int,
    machines: int,
    stands_alone: bool,
    samples_summed: float = 1.0,
) -> float:
    """The expected length of the noise in the mean gradient of the last step, over the clip norm.

    What a strategy has of the mean gradient in its last step is

    * the mean of the last round's releases, where releases stand alone: its noise is that of one release, over sqrt(m);
    * the running sum of all of them over their number (mu^2's q_T / T), where they build on each other: its noise is
      that of a machine's last prefix sum over its number of releases and over sqrt(M).

    Below 0.1 noise hardly shows; at 1 it is as long as a clipped gradient, and little is learnt. Where machines release
    another thing than gradients, such as second moments, it is the noise in their mean over the longest there is.

    Parameters
    ----------
    plan : NoisePlan
        Of one machine; under secure aggregation it has the machine's share.
    longest : float
        S: no sample's contribution is longer (:attr:`~murmurfl.privacy.RowBound.longest`).
    num_values : int
        d, values of a release.
    rounds, asked, machines : int
        T, m and M.
    stands_alone : bool
        Whether a release has noise of its own, and not one that takes out what was added before.
    samples_summed : float
        Samples that a release is the *sum* of, mean over machines; 1 where it is a mean.

    Returns
    -------
    float
        0 without noise.
    """
    row_std = plan.mechanism.row_std
    made = min(max(round(rounds * asked / machines), 1), plan.mechanism.num_releases)
    if stands_alone:
        before = row_std(made - 1) if made > 1 else 0.0
        value = plan.noise_std * math.sqrt(max(row_std(made) ** 2 - before**2, 0.0)) / math.sqrt(asked)
    else:
        value = plan.noise_std * row_std(made) / (made * math.sqrt(machines))
    return value / samples_summed * math.sqrt(num_values) / longest


def noise_to_signal_of(problem: Problem) -> float:
    """:func:`noise_to_signal` of a run, with the plan of its machine with the fewest samples.

    Notes
    -----
    A trusted server makes one noise for all machines of a round: that of one machine by itself, over sqrt(m). Where the
    mean of the features is released first, the noise is that of what is left of mu^2.
    """
    config, method = problem.config, METHODS[problem.config.strategy]
    if not config.private:
        return 0.0
    policy, together = method.policy(problem.trained, min(problem.sizes)), 1.0
    if method.trusted:
        policy, together = replace(policy, trust="untrusted-server"), math.sqrt(config.asked_per_round)
    values = method.release_size(problem)
    found = noise_to_signal(
        policy.plan(values),
        longest=policy.bound.longest,
        num_values=values,
        rounds=problem.num_rounds,
        asked=config.asked_per_round,
        machines=config.num_clients,
        # Correlated noise is taken out again whatever a release is built on.
        stands_alone=policy.builds_on == "nothing" and noise_stands_alone(policy.mechanism),
        samples_summed=sum(problem.sizes) / len(problem.sizes) if policy.sums_samples else 1.0,
    )
    return found / together


Settings = Mapping[str, Value]

_ROUNDS = (4, 8, 12, 16, 24, 32, 48, 75, 100)
"""Rounds that one pass may be cut into: few make a round's noise small, many follow the loss."""
_PASSES = (8, 20)
"""Passes of ISRL-DP with whole machines as batches; more would only add noise."""
_LOCAL_STEPS = (1, 5, 20)
_ONLINE_MECHANISMS = ("sqrt_toeplitz", "cancelling", "independent")
_TOO_FEW = 2.0
"""Shortfall of one full-batch round in units of noise-to-signal, with ten classes: on MNIST it costs 15 points,
and a noise-to-signal of 0.1 costs one or less. T rounds leave T^1.5 times less, and fewer classes less in
proportion; where rounds are of batches, classes make no difference."""
_CLASSES = 10
_OF_BATCHES = 0.15
"""Shortfall of batches beside full ones: other samples in every round are noise as well."""
_OF_RIDGE = 0.3
"""Shortfall of ridge regression on second moments beside many steps on the loss itself."""
_OF_LOCAL_STEPS = 0.35
"""Shortfall of steps whose length was not chosen for the noise."""
_FEATURES_LEAVE = {"soft-gradients": 0.05, "oriented-gradients": 0.15, "pixels": 0.5}
"""Shortfall of features beside the best there are."""


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
        """The loss from so few rounds, in units of noise-to-signal."""
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
    """A strategy with some settings, in as many rounds as it takes and as are possible."""
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


@dataclass(frozen=True)
class Decision:
    """The choice for a situation, and the alternatives.

    Parameters
    ----------
    others : list of Option
        Other strategies that are possible, the best first.
    impossible : list of Impossible
        Those that are not.
    """

    situation: Situation
    chosen: Option
    others: list[Option]
    impossible: list[Impossible]

    @property
    def settings(self) -> dict[str, Value]:
        """The run-config keys that the choice sets."""
        return {"strategy": self.chosen.strategy, **self.chosen.settings}

    @property
    def reason(self) -> str:
        """Why this one, in a sentence."""
        config, chosen = self.situation.config, self.chosen
        case = "samples come as a stream" if config.stream else f"samples may be used {_OFTEN[config.sample_uses]}"
        why = _WHY.get(chosen.strategy, "it scores best")
        return f"{case}, and {why}; noise-to-signal {chosen.noise_to_signal:.2g} in {chosen.rounds} rounds."

    def why_not(self, option: Option) -> str:
        """Why an option that is possible was not taken."""
        chosen, noise = self.chosen, f"noise-to-signal {option.noise_to_signal:.2g}"
        if option.noise_to_signal > chosen.noise_to_signal:
            if not chosen.noise_to_signal:
                return noise
            return f"{noise}, {option.noise_to_signal / chosen.noise_to_signal:.3g} times that of {chosen.strategy}"
        if option.features != chosen.features:
            return f"{noise}, on {option.features}, which teach less"
        return f"{noise}, but it leaves more undone than {chosen.strategy} does"


_OFTEN = {"once": "once", "few": "in few rounds", "any": "in every round"}
_WHY = {
    "full-batch": "independent noise and few full batches win",
    "trusted-full-batch": "few full batches win, with one noise for all machines",
    "one-shot": "one release of second moments has less noise in it than any steps would",
    "isrl-dp-accelerated": "independent noise and few full batches win",
    "noisy-sgd": "fresh noise in few rounds leaves least",
    "mu2": "noise that cancels leaves least in the running sum of corrected gradients",
    "trusted-mu2": "corrected gradients that add up need least noise of a trusted server",
    "online": "correlated noise leaves least in what local steps add up to",
}


def decide(situation: Situation) -> Decision:
    """Choose the strategy for a situation, by its sizes and wishes alone: server and machines choose the same."""
    found = options(situation)
    impossible = [one for one in found if isinstance(one, Impossible)]
    ranked = sorted((one for one in found if isinstance(one, Option)), key=lambda option: option.score)
    if not ranked:
        said = "; ".join(f"{one.strategy}: {one.why}" for one in impossible)
        raise ConfigurationError(
            f"Expected a situation that some strategy can serve, got none ({said}). Ask fewer machines a round, use "
            "fewer rounds, let samples be used more often, or raise mu."
        )
    return Decision(situation, ranked[0], ranked[1:], impossible)
