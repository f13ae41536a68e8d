"""How loud noise is in what a model rests on: one definition for every strategy."""

from __future__ import annotations

import math
from dataclasses import replace

from ...privacy import NoisePlan
from ...privacy.mechanisms import noise_stands_alone
from ..methods import METHODS
from ..runs.evaluated import EvaluatedProblem


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
    """The noise in the mean gradient that the last step rests on, against a typical clipped gradient.

    It is how long the noise of that estimate is in expectation, its standard deviation in one value times sqrt(d), over
    the clip norm S, which is how long a gradient that is clipped is. The estimate is what the strategy has of the mean
    gradient when it takes its last step:

    * releases that stand alone: the mean of the last round's releases. Its noise is that of one release, in sqrt(m)
      of m machines;
    * releases that build on each other: the running sum of all of them over their number (mu^2's q_T / T). Its noise
      is that of a machine's last prefix sum over its number of releases, in sqrt(M) of M machines.

    Below 0.1 noise hardly shows; at 1 it is as long as a gradient, and little is learnt. Where machines release another
    thing than gradients, such as second moments, it is the noise in the mean of those, against the longest there is.

    Parameters
    ----------
    plan : NoisePlan
        Of one machine. All figures of noise come from it: under secure aggregation it has the machine's share.
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

    Notes
    -----
    Arithmetic on a plan, the same for every data set of a size.
    """
    own = plan.mechanism.num_releases
    made = min(max(round(rounds * asked / machines), 1), own)
    if stands_alone:
        last = math.sqrt(max(plan.mechanism.row_std(made) ** 2 - _before(plan, made) ** 2, 0.0))
        value = plan.noise_std * last / math.sqrt(asked)
    else:
        value = plan.noise_std * plan.mechanism.row_std(made) / (made * math.sqrt(machines))
    return value / samples_summed * math.sqrt(num_values) / longest


def _before(plan: NoisePlan, release: int) -> float:
    """The noise of the prefix sum before a release."""
    return plan.mechanism.row_std(release - 1) if release > 1 else 0.0


def noise_to_signal_of(problem: EvaluatedProblem) -> float:
    """:func:`noise_to_signal` of a run, with the plan of its machine with the fewest samples.

    Parameters
    ----------
    problem : EvaluatedProblem

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
        policy = replace(policy, trust="untrusted-server")
        together = math.sqrt(config.asked_per_round)
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
