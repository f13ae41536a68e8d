"""The decision: every strategy worked out for a situation, the best one, and why not the others.

When every sample may be used in every round, independent noise and few full batches win: a sample that moves all rounds
together shifts what the model rests on by the sum of what it does in each, whatever the noise's correlation, and
independent noise attains the least that this takes (docs/proofs/full-batches.md). Noise that cancels is for streams,
for samples that may be used once or in few rounds, and for machines that are seldom asked. Nobody has to know which
case it is: options are ranked by noise-to-signal and by what too few rounds leave undone, and that puts them in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from ..methods import METHODS
from ..runs.evaluated import EvaluatedProblem
from .noise_to_signal import noise_to_signal_of
from .option import Impossible, Option
from .rules import FEATURES_LEAVE, RULES, Rule
from .situation import Situation, WorkedOut


@dataclass(frozen=True)
class Decision:
    """What is chosen for a situation, and what was not.

    Parameters
    ----------
    situation : Situation
    chosen : Option
    others : list of Option
        Other strategies that are possible, the best first.
    impossible : list of Impossible
        Those that are not.

    Notes
    -----
    It is made from public sizes alone and says nothing of samples.
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
        situation, chosen = self.situation, self.chosen
        uses = situation.config.sample_uses
        case = "samples come as a stream" if situation.config.stream else f"samples may be used {_OFTEN[uses]}"
        words = f"{case}, and {_WHY.get(chosen.strategy, 'it scores best')}"
        return f"{words}; noise-to-signal {chosen.noise_to_signal:.2g} in {chosen.rounds} rounds."

    def why_not(self, option: Option) -> str:
        """Why an option that is possible was not taken."""
        chosen = self.chosen
        if option.noise_to_signal > chosen.noise_to_signal:
            ratio = option.noise_to_signal / chosen.noise_to_signal if chosen.noise_to_signal else 0.0
            times = f", {ratio:.3g} times that of {chosen.strategy}" if ratio else ""
            return f"noise-to-signal {option.noise_to_signal:.2g}{times}"
        if option.features != chosen.features:
            return f"noise-to-signal {option.noise_to_signal:.2g}, on {option.features}, which teach less"
        return f"noise-to-signal {option.noise_to_signal:.2g}, but it leaves more undone than {chosen.strategy} does"

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        others = [{**one.document(), "why_not": self.why_not(one)} for one in self.others]
        return {
            "chosen": self.chosen.document(),
            "reason": self.reason,
            "settings": self.settings,
            "alternatives": [*others, *(one.document() for one in self.impossible)],
        }


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


def decide(situation: Situation, worked_out: WorkedOut) -> Decision:
    """The strategy for a situation.

    Parameters
    ----------
    situation : Situation
    worked_out : callable
        Works a run configuration out on data (:func:`~murmurfl.app.runs.experiment.worked_out`).

    Raises
    ------
    ConfigurationError
        If no strategy can do what is asked for, with what to change.

    Notes
    -----
    A function of sizes and wishes, the same on server and machines: it looks at no sample.
    """
    options: list[Option] = []
    impossible: list[Impossible] = []
    for rule in RULES:
        if rule.strategy not in METHODS or not _is_for(rule, situation):
            continue
        found = _option(rule, situation, worked_out)
        options.append(found) if isinstance(found, Option) else impossible.append(found)
    if not options:
        said = "; ".join(f"{one.strategy}: {one.why}" for one in impossible)
        raise ConfigurationError(
            f"Expected a situation that some strategy can serve, got none ({said}). Ask fewer machines a round, use "
            "fewer rounds, let samples be used more often, or raise mu."
        )
    ranked = sorted(options, key=lambda option: option.score)
    return Decision(situation, ranked[0], ranked[1:], impossible)


def _is_for(rule: Rule, situation: Situation) -> bool:
    """Whether a strategy is of the situation's kind of server: the others are other strategies, not worse ones."""
    return situation.config.trust_model in METHODS[rule.strategy].trusts


def _option(rule: Rule, situation: Situation, worked_out: WorkedOut) -> Option | Impossible:
    if situation.config.stream and not rule.stream:
        return Impossible(rule.strategy, "samples come as a stream, and it uses every sample in every round")
    if not situation.config.stream and not rule.standing:
        return Impossible(rule.strategy, "made for streams, and samples are there")
    found = rule.settings(situation)
    if isinstance(found, str):
        return Impossible(rule.strategy, found)
    options, refused = [], ""
    for features in rule.features(situation):
        for settings in found:
            try:
                options.append(tried(rule, situation, {**settings, "features": features}, worked_out))
            except ConfigurationError as error:
                refused = refused or str(error)
    return min(options, key=lambda option: option.score) if options else Impossible(rule.strategy, refused)


def tried(rule: Rule, situation: Situation, settings: Mapping[str, Value], worked_out: WorkedOut) -> Option:
    """A strategy with some settings, in as many rounds as it takes and as are possible.

    Raises
    ------
    ConfigurationError
        If it cannot be run with them.
    """

    def made(**more: Value) -> Option:
        chosen = {"strategy": rule.strategy, **settings, **more}
        if situation.most_uses == 1:  # the mean of the features is one use more
            chosen["centring"] = "none"
        problem = situation.problem(chosen, worked_out)
        if situation.most_uses == 1 and problem.uses_beside:
            raise ConfigurationError("a private evaluation with held-out = 0 uses every sample once more")
        chosen["num-rounds"] = problem.num_rounds
        own = {name: value for name, value in chosen.items() if name != "strategy" and situation.differs(name, value)}
        shortfall = rule.shortfall(problem.num_rounds, situation.num_classes) + _features_leave(problem, situation)
        ratio = noise_to_signal_of(problem)
        return Option(rule.strategy, own, problem, ratio, shortfall, _uses(problem), rule.loudness)

    first = made()
    uses, rounds = situation.most_uses, situation.most_rounds
    if not rule.whole or (first.uses <= (uses or first.uses) and first.rounds <= (rounds or first.rounds)):
        return first
    left = None if uses is None else uses - first.problem.uses_beside
    most = min(one for one in (left, rounds) if one is not None)
    if most < 1:
        raise ConfigurationError("it needs a sample in more releases than one")
    return made(**{"num-rounds": most})


def _features_leave(problem: EvaluatedProblem, situation: Situation) -> float:
    """What features leave undone, where there are several to choose from."""
    return FEATURES_LEAVE.get(problem.config.features, 0.0) if len(situation.features) > 1 else 0.0


def _uses(problem: EvaluatedProblem) -> int:
    """In how many releases of a run a sample is."""
    policy = METHODS[problem.config.strategy].policy(problem.trained, min(problem.sizes))
    return policy.participations + problem.uses_beside
