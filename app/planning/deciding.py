"""The decision: every strategy worked out for a situation, the best one, and why not the others (``strategy = auto``).

When every sample may be used in every round, independent noise and few full batches win: a sample that moves all rounds
together shifts what the model rests on by the sum of what it does in each, whatever the noise's correlation, and
independent noise attains the least that this takes (docs/proofs/full-batches.md). Noise that cancels is for streams,
for samples that may be used once or in few rounds, and for machines that are seldom asked. Nobody has to know which
case it is: options are ranked by their score, and that puts them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...privacy import ConfigurationError
from ...privacy.setting import Value
from .option import Impossible, Option
from .rules import options
from .situation import Situation


@dataclass(frozen=True)
class Decision:
    """What is chosen for a situation, and what was not.

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
    """Choose the strategy for a situation, by its sizes and wishes alone: server and machines choose the same.

    Raises
    ------
    ConfigurationError
        If no strategy can do what is asked for, with what to change.
    """
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
