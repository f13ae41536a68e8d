"""How loud noise is in what a model rests on: one definition for every strategy."""

from __future__ import annotations

import math
from dataclasses import replace

from ...privacy import NoisePlan
from ..methods import Method, Problem


def noise_to_signal(
    plan: NoisePlan,
    *,
    clip_norm: float,
    num_parameters: int,
    rounds: int,
    asked: int,
    machines: int,
    stands_alone: bool,
    samples_summed: float = 1.0,
) -> float:
    """The noise in the mean gradient that the last step rests on, against a typical clipped gradient.

    It is the length that the noise of that estimate has in expectation, its standard deviation in one value times
    sqrt(d), over the clip norm S, which is how long a gradient that is clipped is. The estimate is what the strategy
    has of the mean gradient when it takes its last step:

    * releases that stand alone: the mean of the last round's releases. Its noise is that of one release, in sqrt(m)
      of m machines;
    * releases that build on each other: the running sum of all of them over their number (mu^2's q_T / T). Its noise
      is that of a machine's last prefix sum over its number of releases, in sqrt(M) of M machines.

    Below 0.1 noise hardly shows; at 1 it is as long as a gradient, and what is learnt comes from many rounds at best.

    Parameters
    ----------
    plan : NoisePlan
        Of one machine. All figures of noise come from it: under secure aggregation it has the machine's share.
    clip_norm : float
        S.
    num_parameters : int
        d.
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
    **Formal guarantees.** None, and no data: it is arithmetic on a plan, the same for every data set of a size.
    """
    own = plan.mechanism.num_releases
    made = min(max(round(rounds * asked / machines), 1), own)
    if stands_alone:
        last = math.sqrt(max(plan.mechanism.row_std(made) ** 2 - _before(plan, made) ** 2, 0.0))
        value = plan.noise_std * last / math.sqrt(asked)
    else:
        value = plan.noise_std * plan.mechanism.row_std(made) / (made * math.sqrt(machines))
    return value / samples_summed * math.sqrt(num_parameters) / clip_norm


def _before(plan: NoisePlan, release: int) -> float:
    """The noise of the prefix sum before a release."""
    return plan.mechanism.row_std(release - 1) if release > 1 else 0.0


def noise_to_signal_of(method: Method, problem: Problem) -> float:
    """:func:`noise_to_signal` of a run, with the plan of its machine with the fewest samples.

    Parameters
    ----------
    method : Method
    problem : Problem

    Notes
    -----
    A trusted server makes one noise for all machines of a round: that of one machine by itself, over sqrt(m).

    **Formal guarantees.** None of its own.
    """
    config, policy = problem.config, method.policy(problem, min(problem.sizes))
    if not config.private:
        return 0.0
    together = 1.0
    if method.trusted:
        policy = replace(policy, trust="untrusted-server")
        together = math.sqrt(config.clients_per_round)
    plan = policy.plan(problem.model.num_parameters)
    found = noise_to_signal(
        plan,
        clip_norm=policy.clip_norm,
        num_parameters=problem.model.num_parameters,
        rounds=problem.num_rounds,
        asked=config.clients_per_round,
        machines=config.num_clients,
        stands_alone=policy.builds_on == "nothing",
        samples_summed=sum(problem.sizes) / len(problem.sizes) if policy.order == "all" else 1.0,
    )
    return found / together
