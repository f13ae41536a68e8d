"""What the epsilons of runs are true of: their :class:`~murmurfl.privacy.Guarantee`.

The words come from the policy that was used and from nowhere else; the method hands it over
(:meth:`~murmurfl.app.methods.Method.guarantee`). This file adds what only a run knows: what the figure rests on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

from ...privacy import SIMULATED, ConfigurationError, Guarantee, gdp_epsilon, rounded_up, stated_words
from ...privacy import protocol
from ...privacy.accounting.guarantee import RECORDS
from ..settings.run_config import RunConfig
from .experiment import Experiment, prepare
from .machine_statements import statement_groups

_NOMINAL = 10
"""Batches of a machine where only words are wanted of a policy."""

EXPECTED = "Real machines: what the run configuration expects of them; their own figure comes at the end."

ONE_POLICY = "Machines that share sums have one noise: all of them the cap of the one with the fewest samples, {cap}."

MEAN_FIRST = "It includes the mean of the features, which is released first."
MEAN_SHARE = "Of it mu = {mu}, {share:.4g} % of mu^2, is for the mean of the features, which is released first."

EVALUATION_LAST = "It includes a private evaluation of the model, which is released last."
EVALUATION_SHARE = "Of it mu = {mu}, {share:.4g} % of mu^2, is for a private evaluation of the model, released last."

COUNTED = "It includes how many gradients are clipped, which is a part of every release."
COUNTED_SHARE = "Of it mu = {mu}, {share:.4g} % of mu^2, is for how many gradients are clipped."

STAND_INS = "The data do not say whose samples are: every {most} of a machine's stand for one owner's."

_ROUNDING = 1e-9
"""Mus are compared with this much room for the rounding of sums of squares."""

Statements = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figures:
    """What a run guarantees, in numbers.

    Parameters
    ----------
    mu : float
        Of everything the run may release; infinite without noise, 0 if nobody is asked.
    mu_local : float or None
        Under secure aggregation, what holds whatever server, helpers and other machines do.
    min_honest, min_cohort : int or None
        Under secure aggregation, h, which mu rests on, and the fewest releases of a sum.

    Notes
    -----
    :func:`run_guarantee` says in words what they are true of.
    """

    mu: float
    mu_local: float | None = None
    min_honest: int | None = None
    min_cohort: int | None = None


def configured_figures(experiment: Experiment) -> Figures:
    """What a run guarantees by the policies of its configuration."""
    mus = experiment.guaranteed_mu(), experiment.local_mu()
    if not experiment.config.secure:
        return Figures(*mus)
    # Of the policies that the mus come from: a method of one's own may have other numbers than the configuration.
    machines = {size: machine for machine, size in enumerate(experiment.sizes)}.values()
    policies = [experiment.policy(machine) for machine in machines]
    return Figures(*mus, max(p.min_honest for p in policies), min(p.min_cohort for p in policies))


def stated_figures(expected: Figures, statements: Statements, num_clients: int) -> Figures:
    """What real machines state, in one figure that is true of all of them.

    Parameters
    ----------
    expected : Figures
        What the run configuration expects of them: counts for machines that did not answer.
    statements : mapping
        What each machine says of itself.
    num_clients : int
        Machines in all.

    Notes
    -----
    A server cannot check what machines say. Under secure aggregation a machine says its mu for h honest machines of a
    sum, and machines may differ in h. One sentence names the smallest: what a machine stated for a larger one is worked
    out again for it, mu sqrt(h), and never more than its mu_local. Where the run configuration does not ask for sums,
    what a machine states for them is not said of it: its mu_local is.
    """
    silent = len(statements) < num_clients
    stated = [_stated(one) for one in statements.values()]
    own = (expected.mu, expected.mu if expected.mu_local is None else expected.mu_local, expected.min_honest or 1)
    claims = [*stated, *([own] if silent or not stated else [])]
    local = max(mu_local for _, mu_local, _ in claims)
    if expected.mu_local is None:
        return Figures(local)
    named = [int(one["min-honest"]) for one in statements.values() if "min-honest" in one]
    if expected.min_honest is not None and (silent or not named):
        named.append(expected.min_honest)
    fewest = min(named, default=1)
    cohorts = [int(one["min-cohort"]) for one in statements.values() if "min-cohort" in one]
    if expected.min_cohort is not None and (silent or not cohorts):
        cohorts.append(expected.min_cohort)
    mu = max(min(mu_local, mu * math.sqrt(max(honest / fewest, 1.0))) for mu, mu_local, honest in claims)
    return Figures(mu, local, fewest, min(cohorts, default=1))


def _stated(statement: Mapping[str, Any]) -> tuple[float, float, int]:
    """A machine's mu, its mu_local and the h that its mu is for; one that says no more than mu needs nobody."""
    mu = float(statement["mu-guaranteed"])
    return mu, float(statement.get("mu-local", mu)), int(statement.get("min-honest", 1))


def refuse_untrue(figures: Figures, statements: Statements) -> None:
    """Refuse a result whose figures are not its machines': a method of one's own may say what it does not do.

    Raises
    ------
    ConfigurationError
    """
    released = [group.statement for group in statement_groups(statements) if group.statement["releases"]]
    claims = [("mu", figures.mu, [float(one["mu-guaranteed"]) for one in released])]
    if figures.mu_local is not None:
        local = [float(one.get("mu-local", one["mu-guaranteed"])) for one in released]
        claims.append(("mu whatever happens", figures.mu_local, local))
    for name, claimed, found in claims:
        if max(found, default=0.0) > claimed * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected machines that guarantee {name} = {claimed:g}, as the method says of the run, got {name} = "
                f"{max(found):g} from those that made releases: its policy, asked_rounds and client do not agree. "
                "There is no result."
            )
    honest = [int(one.get("min-honest", 1)) for one in released]
    cohorts = [int(one.get("min-cohort", 1)) for one in released]
    if figures.min_honest is not None and max(honest, default=0) > figures.min_honest:
        raise ConfigurationError(_rests_on(f"rests on {figures.min_honest} honest machines of a sum", max(honest)))
    if figures.min_cohort is not None and min(cohorts, default=math.inf) < figures.min_cohort:
        raise ConfigurationError(_rests_on(f"is for sums of at least {figures.min_cohort} releases", min(cohorts)))


def _rests_on(claimed: str, found: int) -> str:
    return (
        f"Expected machines whose mu {claimed}, as the run configuration says, got {found} from those that made "
        "releases: the method's policy or client has numbers of its own. There is no result."
    )


@overload
def epsilon_of(mu: float, delta: float) -> float: ...
@overload
def epsilon_of(mu: float | None, delta: float) -> float | None: ...
def epsilon_of(mu: float | None, delta: float) -> float | None:
    """Epsilon at delta of a mu that may be infinite, or unknown."""
    if mu is None:
        return None
    return gdp_epsilon(mu, delta) if math.isfinite(mu) else math.inf


def run_guarantee(
    experiment: Experiment, figures: Figures, *, deployed: bool = False, statements: Statements | None = None
) -> Guarantee:
    """What a run guarantees.

    Parameters
    ----------
    experiment : Experiment
    figures : Figures
    deployed : bool
        Whether the machines are real ones.
    statements : mapping, optional
        What real machines say of themselves, once they were asked.

    Notes
    -----
    **Formal guarantees.** In simulation mu is for replacement of one sample of one machine over all releases the caps
    allow, against whom the trust says. For real machines it is what they say or, before they were asked, what the run
    configuration expects; the notes say which.
    """
    stated = (str(one.get("mechanism", "")) for one in (statements or {}).values())
    words = stated_words(stated, masked=experiment.config.secure) if deployed else ""
    notes = (
        *_of_the_mean(experiment, deployed),
        *_of_the_evaluation(experiment, deployed),
        *_of_the_quantile(experiment, deployed),
        _basis(experiment, deployed, statements),
        *_of_one_policy(experiment, deployed),
        *_of_stand_ins(experiment, deployed),
        *_of_records(statements),
    )
    guarantee = experiment.method.guarantee(
        experiment,
        figures.mu,
        mu_local=figures.mu_local,
        min_honest=figures.min_honest,
        notes=notes,
        words=words,
        stated=deployed,
    )
    # Whoever protects owners protects samples: what is not said of all real machines is said of their samples.
    return replace(guarantee, unit="sample") if deployed and not _all_owners(experiment, statements) else guarantee


def _all_owners(experiment: Experiment, statements: Statements | None) -> bool:
    """Whether every real machine says that its unit is an owner; what the run configuration expects proves nothing."""
    said = list((statements or {}).values())
    return len(said) >= experiment.config.num_clients and all(one.get("unit") == "owner" for one in said)


def expected_guarantee(config: RunConfig, *, deployed: bool = False) -> Guarantee:
    """What a run will guarantee, before its first round.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible.

    Notes
    -----
    **Formal guarantees.** It is what machines that keep to the run configuration guarantee for replacement of one
    sample; real ones keep to their own policies, which may differ.
    """
    experiment = prepare(config)
    if not deployed:
        experiment.check_rounds()
    return run_guarantee(experiment, configured_figures(experiment), deployed=deployed)


def _basis(experiment: Experiment, deployed: bool, statements: Statements | None) -> str:
    if not deployed:
        return SIMULATED
    if experiment.method.trusted:
        return "Real machines; the server's noise key is the operating system's."
    if statements is None:
        return EXPECTED
    answered = f"{len(statements)} of {experiment.config.num_clients} machines"
    return f"Real machines: the figure is what {answered} say of themselves, which a server cannot check."


def _of_the_mean(experiment: Experiment, deployed: bool) -> tuple[str, ...]:
    """What of mu is for the mean of the features, where machines release it first."""
    plan, config = experiment.mean_plan, experiment.config
    if plan is None or not config.private or not experiment.asked_rounds:
        return ()
    if deployed:
        return (MEAN_FIRST,)
    return (MEAN_SHARE.format(mu=rounded_up(experiment.mean_mu), share=100 * config.centring_share),)


def _of_the_evaluation(experiment: Experiment, deployed: bool) -> tuple[str, ...]:
    """What of mu is for a private evaluation, where machines release one."""
    config = experiment.config
    if not experiment.is_evaluated or not config.private or not experiment.asked_rounds:
        return ()
    if deployed:
        return (EVALUATION_LAST,)
    return (EVALUATION_SHARE.format(mu=rounded_up(experiment.evaluation_mu), share=100 * config.private_evaluation),)


def _of_the_quantile(experiment: Experiment, deployed: bool) -> tuple[str, ...]:
    """What of mu is for how many gradients are clipped, where releases say it."""
    config = experiment.config
    if not config.quantile or not config.private or not experiment.asked_rounds:
        return ()
    if deployed:
        return (COUNTED,)
    # Of what is left after the mean of the features, where there is one.
    mu = max(plan.mu for plan in experiment.plans()) * math.sqrt(config.quantile_share)
    return (COUNTED_SHARE.format(mu=rounded_up(mu), share=100 * (mu / experiment.guaranteed_mu()) ** 2),)


def _of_stand_ins(experiment: Experiment, deployed: bool) -> tuple[str, ...]:
    """That owners are made up, where they are."""
    most = experiment.config.samples_per_owner
    if deployed or not most or experiment.data.owner_of is not None:
        return ()
    return (STAND_INS.format(most=most),)


def _of_records(statements: Statements | None) -> tuple[str, ...]:
    """What a sample is, where real machines say it."""
    stated = {str(one.get(protocol.RECORD, "")) for one in (statements or {}).values()}
    return tuple(sentence for kind, sentence in RECORDS.items() if kind in stated)


def _of_one_policy(experiment: Experiment, deployed: bool) -> tuple[str, ...]:
    """That machines with more samples use no more of them than the one with the fewest, where that is so."""
    config, sizes = experiment.config, experiment.sizes
    if deployed or not config.secure or config.max_participations or "batch-size" not in experiment.method.keys:
        return ()
    cap = experiment.policy().max_participations
    # One batch more or less is how samples are split, and nobody's loss.
    unused = max(sizes) // config.batch_size - min(sizes) // config.batch_size > 1
    settled = cap == config.passes * (min(sizes) // config.batch_size)
    return (ONE_POLICY.format(cap=cap),) if settled and unused else ()
