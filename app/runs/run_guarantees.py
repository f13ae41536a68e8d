"""Guarantees of runs: what their epsilons are true of (:class:`~murmurfl.privacy.Guarantee`).

The words come from the policy that was used and from nowhere else; the method hands it over
(:meth:`~murmurfl.app.methods.Method.guarantee`). This file adds what only a run knows: what the figure rests on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import overload

from ...privacy import protocol
from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import (
    CURATED,
    CURATED_NOISE,
    RECORDS,
    SAME_OWNER,
    SIMULATED,
    Figures,
    Guarantee,
    Statements,
    rounded_up,
)
from ...privacy.accounting.loss import NO_LOSS, Loss, SumAssumption, weakest_loss
from ...privacy.accounting.noise_plan import stated_words
from ...privacy.errors import ConfigurationError
from ..settings.run_config import RunConfig
from .client_statements import statement_groups
from .experiment import Experiment, prepare

TRUSTED = "Real clients; the server's noise key is the operating system's."
STATED = "Real clients: the figure is what {said} of {all} clients say of themselves, which a server cannot check."
EXPECTED = "Real clients: what the run configuration expects of them; their own figure comes at the end."

ONE_POLICY = "Clients that share sums have one noise and one cap, {cap}: small ones send fewer samples in each release."

COUNTED = "It includes how many gradients are clipped, which is a part of every release."
COUNTED_SHARE = "Of it mu = {mu}, {share:.4g} % of mu^2, is for how many gradients are clipped."

STAND_INS = "The data do not say whose samples are: every {most} of a client's stand for one owner's."

_ROUNDING = 1e-9
"""Mus are compared with this much room for the rounding of sums of squares."""


def configured_figures(experiment: Experiment) -> Figures:
    """Return the figures that follow from the policies of a run's configuration."""
    loss = experiment.loss()
    if not experiment.config.secure:
        return Figures(loss)
    # Of the policies that the loss comes from: a method of one's own may have other numbers than the configuration.
    clients = {size: client for client, size in enumerate(experiment.sizes)}.values()
    policies = [experiment.policy(client) for client in clients]
    honest, cohorts = zip(*((one.sums.min_honest, one.sums.min_cohort) for one in policies), strict=True)
    return Figures(loss, SumAssumption(max(honest), min(cohorts)))


def refuse_untrue(figures: Figures, statements: Statements) -> None:
    """Refuse a result whose figures are not its clients': a method of one's own may say what it does not do."""
    released = [group.statement for group in statement_groups(statements) if group.statement["releases"]]
    found = weakest_loss([NO_LOSS, *(Loss.stated(one) for one in released)])
    claims = [("mu", figures.loss.assumed.mu, found.assumed.mu)]
    if figures.loss.conditional:
        claims.append(("worst-case mu", figures.loss.worst_case.mu, found.worst_case.mu))
    for name, claimed, actual in claims:
        if actual > claimed * (1 + _ROUNDING):
            raise ConfigurationError(
                f"Expected clients that guarantee {name} = {claimed:g}, as the method says of the run, got {name} = "
                f"{actual:g} from those that made releases: its policy, asked_rounds and client do not agree. "
                "There is no result.",
                kind="mismatch",
            )
    sums = figures.sums
    if sums is None:
        return
    honest = [int(one.get("min-honest", 1)) for one in released]
    cohorts = [int(one.get("min-cohort", 1)) for one in released]
    if max(honest, default=0) > sums.min_honest:
        claimed = f"rests on {sums.min_honest} honest clients of a sum"
        raise ConfigurationError(_rests_on(claimed, max(honest)), kind="mismatch")
    if min(cohorts, default=math.inf) < sums.min_cohort:
        claimed = f"is for sums of at least {sums.min_cohort} releases"
        raise ConfigurationError(_rests_on(claimed, min(cohorts)), kind="mismatch")


def _rests_on(claimed: str, found: int) -> str:
    return (
        f"Expected clients whose mu {claimed}, as the run configuration says, got {found} from those that made "
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
    experiment: Experiment,
    figures: Figures,
    *,
    deployed: bool = False,
    statements: Statements | None = None,
    curated: bool = False,
) -> Guarantee:
    """Return the guarantee of a run; where it is ``curated``, one client is everything, and has all rows.

    Notes
    -----
    **Formal guarantees.** In simulation mu is for replacement of one sample of one client over all releases the caps
    allow, against whom the trust says. For real clients it is what they say or, before they were asked, what the run
    configuration expects; the notes say which.
    """
    known = list((statements or {}).values())
    mechanisms = [str(one.get("mechanism", "")) for one in known]
    guarantee = experiment.method.guarantee(
        experiment,
        figures.loss,
        min_honest=figures.sums.min_honest if figures.sums else None,
        notes=tuple(_notes(experiment, deployed, statements, curated)),
        words=_noise_words(mechanisms, experiment.config.secure, curated) if deployed else "",
        stated=deployed,
    )
    # Whoever protects owners protects samples that stay their owner's: what is not said of all real clients is said of
    # these.
    of_owners = [one.get("unit") == "owner" for one in known]
    if not deployed or (len(known) >= experiment.config.num_clients and all(of_owners)):
        return guarantee
    notes = [SAME_OWNER] if any(of_owners) or experiment.config.samples_per_owner else []
    return replace(guarantee, unit="sample", notes=(*guarantee.notes, *notes))


def _noise_words(mechanisms: list[str], masked: bool, curated: bool) -> str:
    if curated and any(mechanisms):
        return CURATED_NOISE.format(mechanisms=" or ".join(sorted(set(mechanisms))))
    return stated_words(mechanisms, masked=masked)


def expected_guarantee(config: RunConfig, *, deployed: bool = False) -> Guarantee:
    """Return the guarantee of a run before its first round.

    Notes
    -----
    **Formal guarantees.** It is what clients that keep to the run configuration guarantee for replacement of one
    sample; real ones keep to their own policies, which may differ.
    """
    experiment = prepare(config, deployed=deployed)
    if not deployed:
        experiment.check_rounds()
    return run_guarantee(experiment, configured_figures(experiment), deployed=deployed)


def _notes(experiment: Experiment, deployed: bool, statements: Statements | None, curated: bool) -> Iterator[str]:
    """Sentences on what the figure includes and rests on."""
    config = experiment.config
    if config.private and experiment.asked_rounds:
        yield from included_notes(experiment, deployed=deployed)
    if not deployed:
        yield SIMULATED
        if _one_policy(experiment):
            yield ONE_POLICY.format(cap=experiment.policy().max_participations)
        if config.samples_per_owner and experiment.data.owner_of is None:
            yield STAND_INS.format(most=config.samples_per_owner)
    elif experiment.method.trusted:
        yield TRUSTED
    elif curated:
        yield CURATED
    elif statements is None:
        yield EXPECTED
    else:
        yield STATED.format(said=len(statements), all=config.num_clients)
    kinds = {str(one.get(protocol.RECORD, "")) for one in (statements or {}).values()}
    yield from (sentence for kind, sentence in RECORDS.items() if kind in kinds)


def included_notes(experiment: Experiment, *, deployed: bool = False) -> Iterator[str]:
    """Yield sentences on the queries, and the clipped share, that the figure includes."""
    config = experiment.config
    for query in experiment.queries:
        yield query.included if deployed else query.included_share(rounded_up(query.mu))
    if config.quantile and deployed:
        yield COUNTED
    elif config.quantile:  # of what is left after the mean of the features, where there is one
        part = max(plan.mu for plan in experiment.plans()) * math.sqrt(config.quantile_share)
        share = 100 * (part / experiment.loss().mu) ** 2
        yield COUNTED_SHARE.format(mu=rounded_up(part), share=share)


def _one_policy(experiment: Experiment) -> bool:
    """Return True if clients that share sums have very different numbers of samples for the one cap of all."""
    config, sizes = experiment.config, experiment.sizes
    if not config.secure or config.max_participations or "batch-size" not in experiment.method.keys:
        return False
    return max(sizes) // config.batch_size - min(sizes) // config.batch_size > 1  # one is how samples are split
