"""One strategy for a situation, worked out; or why it cannot be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...privacy.setting import Value
from ..runs.evaluated import EvaluatedProblem


@dataclass(frozen=True)
class Impossible:
    """A strategy that a situation rules out.

    Parameters
    ----------
    strategy : str
    why : str
        In words, for people.
    """

    strategy: str
    why: str

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return {"strategy": self.strategy, "possible": False, "why_not": self.why}


@dataclass(frozen=True)
class Option:
    """A strategy that is possible, with what it would be run with.

    Parameters
    ----------
    strategy : str
    settings : mapping
        Run-config keys that it sets beyond the situation's own.
    problem : EvaluatedProblem
        The run, worked out on sizes.
    noise_to_signal : float
        :func:`~murmurfl.app.planning.noise_to_signal` of it.
    shortfall : float
        What so few rounds leave undone, in the same units: a rule of thumb (:mod:`.deciding`).
    uses : int
        In how many releases a sample is.
    loudness : float
        How much more noise does to it than to a step.
    """

    strategy: str
    settings: Mapping[str, Value]
    problem: EvaluatedProblem
    noise_to_signal: float
    shortfall: float
    uses: int
    loudness: float = 1.0

    @property
    def score(self) -> float:
        """What options are ranked by; less is better."""
        return self.loudness * self.noise_to_signal + self.shortfall

    @property
    def features(self) -> str:
        """The features that are learnt from."""
        return self.problem.config.features

    @property
    def centring(self) -> str:
        """Whether machines release the mean of their features first, as the run-config key says it."""
        return "private" if self.problem.is_centred else "none"

    @property
    def rounds(self) -> int:
        """T."""
        return self.problem.num_rounds

    def document(self) -> dict[str, Any]:
        """As plain values."""
        problem = self.problem
        return {
            "strategy": self.strategy,
            "possible": True,
            "rounds": self.rounds,
            "sample_uses": self.uses,
            "clip_norm": problem.values.clip_norm,
            "features": self.features,
            "centring": self.centring,
            "noise_to_signal": self.noise_to_signal,
            "score": self.score,
            "settings": dict(self.settings),
        }
