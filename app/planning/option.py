"""One way to serve a situation, and how loud noise is in what its model rests on: one measure for every strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...privacy import NoisePlan
from ...privacy.mechanisms import noise_stands_alone
from ...privacy.setting import Value
from ..methods import METHODS, Problem


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
        What so few rounds leave undone, in the same units: a rule of thumb (:mod:`.rules`).
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
        """What options are ranked by; less is better."""
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
