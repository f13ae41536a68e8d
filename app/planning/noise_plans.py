"""The noise of a run's releases under every mechanism and trust, of whole updates, and what it guarantees a person.

Everything comes from the policy that a client would have, so the noise is the noise that it would add. Its figures are
those of :class:`~.deciding.Candidate`, which has one mechanism's policy here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...clients.adapters.update_policy import UpdatePolicy, update_guarantee
from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.guarantee import Guarantee, person_loss
from ...privacy.accounting.loss import NOTHING_ASSUMED, Gaussian, Loss, SumAssumption, weakest_loss
from ...privacy.accounting.noise_forecast import Forecast, StatedNoise, forecast_of, stated_noise
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import DECODERS, MECHANISMS, SCHEDULES, WORKLOADS, noise_is_memoryless
from ...privacy.noise import range_problem, summed_range_problem
from ...privacy.release.policy import MOST_CLIENTS, PrivacyPolicy, Trust
from ..methods import METHODS, ResolvedRun
from ..settings.run_config import SECURE, sum_assumption
from .deciding import Candidate, PlanRequest, PlanResult

_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cancelling": ("schedule", SCHEDULES),
    "decay": ("workload", WORKLOADS),
    "tree": ("decoder", DECODERS),
    "optimal": ("workload", WORKLOADS),
}

BESIDE_MEAN = "Not in it: the mean of the features, one more release of every sample, with the rest of the run's mu^2."

_MOST_OPTIMAL = {"prefix-sum": 1024, "mu2": 512}
"""Releases beyond which nobody waits until a plan has found the optimal factorisation."""

USUAL = 3
"""Samples, and clients, of the person whose loss is shown where nobody asks for another."""


def mechanism_base(
    request: PlanRequest,
    problem: ResolvedRun,
    *,
    samples: int = 0,
    num_values: int = 0,
    epsilon: float = 0.0,
    cap: int = 0,
) -> Candidate:
    """Return the run whose mechanisms are compared, with the policy of the client that has the most samples.

    Parameters
    ----------
    samples, num_values : int
        In place of the run's own samples of a client and values of a release, where they are not 0.
    epsilon : float
        What was asked for; 0 for the run's mu.
    cap : int
        Most releases of a client, where it is set; 0 for as many as rounds and samples allow.
    """
    config, method = problem.config, METHODS[problem.config.strategy]
    own = method.policy(problem.trained, max(problem.sizes))
    if not samples and own.trust == SECURE and "batch-size" in method.keys:  # one cap for all that share sums
        samples = method.common_batches(config, problem.sizes) * config.batch_size
    samples = samples or (min if own.trust == SECURE else max)(problem.sizes)
    batch = config.batch_size if "batch-size" in method.keys else samples
    check_batch(batch, samples)
    uses, separation = own.participations, samples // batch
    possible = separation if config.shuffled_batches else min(problem.num_rounds, uses * separation)
    policy = PrivacyPolicy(
        clip_norm=own.clip_norm,
        batch_size=batch,
        max_participations=cap or possible,
        mu=own.mu,
        delta=own.delta,
        mechanism="independent",
        sample_participations=uses,
        min_separation=separation if uses > 1 else 1,
        clip_unit=own.clip_unit,
        release_rule=own.release_rule,
        trust=own.trust,
        sums=own.sums,
        samples_per_owner=own.samples_per_owner,
        batch_selection="shuffled" if config.shuffled_batches and own.trust != "trusted-server" else "once",
    )
    asked = {"epsilon": epsilon, "max-participations": cap}
    values = num_values or method.release_size(problem)
    return Candidate(request, config.strategy, asked, problem, policy, values, samples)


def check_batch(batch: int, samples: int) -> None:
    """Refuse a batch of more samples than a client has."""
    if batch > samples:
        raise ConfigurationError(
            f"Expected batch-size <= the {samples} samples of a client, got {batch}.",
            kind="out-of-range",
            setting="batch-size",
            got=batch,
        )


def check_rounds(base: Candidate) -> None:
    """Refuse more rounds than the clients' samples last for, however their turns are drawn; as a run would."""
    policy, config = base.policy, base.config
    uses, lasting = policy.sample_participations, policy.sample_participations * (base.samples // policy.batch_size)
    possible = config.num_clients * lasting // config.asked_per_round
    if base.rounds > possible:
        often = f", each {uses} times" if uses > 1 else ""
        raise ConfigurationError(
            f"Expected rounds <= {possible}, got {base.rounds}: {base.samples} samples in batches of "
            f"{policy.batch_size}{often} last for {lasting} releases of a client, and so many rounds ask each for "
            f"{base.rounds * config.asked_per_round / config.num_clients:.4g}. Use fewer rounds, smaller batches, more "
            "passes, or ask fewer clients a round.",
            kind="exhausted",
            setting="rounds",
            got=base.rounds,
        )


def compare_mechanisms(base: Candidate) -> PlanResult:
    """Return the plan of a run's mechanisms: the one with the least error of prefix sums is chosen.

    The result's ``ways`` are the mechanisms, and the chosen one under each trust model at the same mu.
    """
    made: list[Candidate] = []
    left_out: dict[str, str] = {}
    policy = base.policy
    for mechanism in MECHANISMS:
        option, values = _VARIANTS.get(mechanism, ("", ("",)))
        for value in values:
            name = f"{mechanism} {value}".strip()
            if mechanism == "optimal" and policy.max_participations > _MOST_OPTIMAL[value]:
                left_out[name] = f"more than {_MOST_OPTIMAL[value]} releases: finding it takes too long for a plan"
            elif policy.trust == SECURE and policy.release_rule == "paper" and not noise_is_memoryless(mechanism):
                left_out[name] = "no helper opens a correlated release that is built on one which may be lost"
            else:
                longest = max(base.rounds, policy.max_participations) if value == "paper" else None
                options = {option: value} if option else {}
                own = replace(policy, mechanism=mechanism, mechanism_options=options, num_rounds=longest)
                one = replace(base, policy=own, varied="mechanism", mark=name)
                if one.noise.problem:
                    left_out[name] = one.noise.problem
                else:
                    made.append(one)
    if not made:
        raise ConfigurationError(next(iter(left_out.values())), kind="out-of-range")
    best = min(made, key=lambda one: one.prefix_rmse)
    others = [one for one in made if one is not best]
    return PlanResult(base.request, best, others, left_out, ways=[*made, *_under_other_trusts(best)])


def _under_other_trusts(best: Candidate) -> list[Candidate]:
    """Return a mechanism under each trust model, all for the same mu, without those that have none.

    Sums are of the clients as set, or else half of a round's are honest. A trusted server adds noise once, in the place
    of once for each client, on which there is none.
    """
    policy, found = best.policy, list[Candidate]()
    sums = policy.sums if policy.trust == SECURE else sum_assumption(best.config.asked_per_round)
    trusts: dict[Trust, SumAssumption] = {"untrusted-server": NOTHING_ASSUMED, SECURE: sums}
    for trust, assumed in trusts.items():
        try:
            own = replace(policy, trust=trust, sums=assumed)
            one = replace(best, policy=own, varied="trust", settings={**best.settings, "trust": trust})
            one.noise.loss  # noqa: B018 - there may be no noise for it
        except ConfigurationError:
            continue
        found.append(one)
    alone = [one for one in found if one.policy.trust == "untrusted-server"]
    trusted = [replace(one, settings={**one.settings, "trust": "trusted-server"}) for one in alone]
    return [*found, *trusted]


def noise_guarantee(plan: PlanResult) -> Guarantee:
    """Return the guarantee of a client's releases with any of the mechanisms.

    Notes
    -----
    **Formal guarantees.** It is what a client that keeps to the policy would guarantee for replacement of one sample,
    or of one owner's samples; nothing was released.
    """
    policy = plan.chosen.policy
    words = "noise of any of these mechanisms on each client"
    unit = "owner" if policy.samples_per_owner else "sample"
    uses = policy.sample_participations
    covers = f"over all {policy.max_participations} releases of a client, a sample in at most {uses} of them"
    notes = (BESIDE_MEAN,) if plan.chosen.problem.is_centred else ()
    if policy.trust != SECURE:
        return Guarantee(policy.mu, policy.delta, words, unit=unit, covers=covers, notes=notes)
    return Guarantee(
        Loss(Gaussian(policy.mu), weakest_loss(one.noise.loss for one in plan.mechanisms).worst_case),
        policy.delta,
        f"{words}, under masks",
        trust=policy.trust,
        unit=unit,
        covers=covers,
        min_honest=policy.sums.min_honest,
        notes=notes,
    )


def loss_of_person(guarantee: Guarantee, values: int, *, clients: int = 1, samples: int = 1) -> Loss:
    """Return the loss of all samples of one person together, who has some on several clients.

    Parameters
    ----------
    guarantee : Guarantee
        For one sample, or for one owner on one client; of each client.
    values : int
        Noise values in all releases of a client: what the range of the normals costs depends on it.
    clients, samples : int
        Clients that have samples of that person, and how many each; 1 where the unit is an owner, whose samples count
        as one.

    Notes
    -----
    **Formal guarantees.** The figures hold if the guarantee is that of each client, where the range of exact noise
    allows them; they are infinite elsewhere. Each client's share of delta for that range, below 2^-20 delta, counts
    once a client.
    """
    known = guarantee

    def in_range(figure: float, moved: float) -> float:
        """Return the figure, if noise reaches over one value that takes all of the move: more than any other would."""
        sound = moved == 0.0 or not range_problem(moved, values, known.delta, moved)
        return figure if sound and math.isfinite(moved) else math.inf

    together = person_loss(known.loss, clients=clients, samples=samples, trust=known.trust)
    if not known.loss.conditional:
        # A client's noise must reach over what is moved on it, and a server's over everything.
        moved = together.mu if known.trust == "trusted-server" else samples * known.mu
        return Loss.of(in_range(together.mu, moved))
    beyond = summed_range_problem(values * MOST_CLIENTS, known.delta, together.mu)
    worst = person_loss(known.loss.unconditional(), clients=clients, samples=samples).mu
    local = in_range(worst, samples * known.loss.worst_case.mu)
    return Loss.of(math.inf if beyond else together.mu, local)


def losses_of_persons(
    guarantee: Guarantee, values: int, clients: int | None = None, samples: int | None = None
) -> dict[tuple[int, int], Loss]:
    """Return the loss of a person by clients and samples on each; by default of several samples, and several clients.

    An owner's samples on a client are one row of it, however many they are. Nothing is returned where nothing is
    guaranteed.

    Notes
    -----
    **Formal guarantees.** Each loss bounds what anybody against whom the guarantee holds can tell of one person whose
    records or samples are all replaced, if the releases are made as the guarantee says
    (:func:`~murmurfl.privacy.person_loss`).
    """
    owner = guarantee.unit == "owner"
    if not math.isfinite(guarantee.mu):
        return {}
    if clients is not None or samples is not None:
        cases = [(clients or 1, 1 if owner else samples or 1)]
    else:
        cases = [(USUAL, 1)] if owner else [(1, USUAL), (USUAL, 1)]
    return {one: loss_of_person(guarantee, values, clients=one[0], samples=one[1]) for one in cases}


_EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Epsilons that are shown next to the one asked for."""
_ROUNDS = 10
"""Rounds of updates, where nobody says how many."""
_NEAR = 0.01


def update_rounds(request: PlanRequest) -> int:
    """Return T, the rounds of a project's updates."""
    return request.config.num_rounds or _ROUNDS


def update_policy(request: PlanRequest) -> UpdatePolicy:
    """Return the policy that each client of a project would have, for updates that protect all of its data.

    Notes
    -----
    **Formal guarantees.** A client that releases under this policy has the guarantee that
    :class:`~murmurfl.clients.UpdatePolicy` states; a plan releases nothing.
    """
    config = request.config
    asked = update_rounds(request) * config.clients_per_round
    return UpdatePolicy(
        clip_norm=config.clip_norm or 1.0,
        mu=config.mu,
        max_participations=-(-asked // config.num_clients),
        delta=config.delta,
        trust=config.trust_model,
        sums=config.sums,
    )


def update_forecast(request: PlanRequest) -> Forecast:
    """Return the forecast of the updates' noise, from the very plan that a client makes."""
    config, update = request.config, update_policy(request)
    policy = update.privacy_policy()
    plan = policy.plan(request.num_parameters)
    noise = StatedNoise(
        noise=float(stated_noise(policy, plan, 1)["noise-in-all"]),
        longest=update.clip_norm,
        releases=update.max_participations,
        mu=plan.mu,
        delta=update.delta,
        clip_unit="update",
        unit="client",
        trust=update.trust,
        honest=policy.sums.min_honest,
    )
    found = forecast_of(
        [noise],
        num_parameters=request.num_parameters,
        clients=config.num_clients,
        per_round=config.clients_per_round,
        rounds=update_rounds(request),
        samples=max(request.sizes, default=0),
    )
    if found is None:
        raise ConfigurationError("Expected a policy with noise, got one without.", kind="conflict", setting="mechanism")
    return found


def guarantee_of_updates(request: PlanRequest) -> Guarantee:
    """Return the guarantee of the updates.

    Notes
    -----
    **Formal guarantees.** It is what clients with :func:`update_policy` would guarantee for replacement of all data of
    one client; nothing was released.
    """
    policy = update_policy(request)
    return update_guarantee(policy, policy.privacy_policy().plan(request.num_parameters).loss)


def forecasts_by_epsilon(request: PlanRequest) -> list[tuple[float, Forecast]]:
    """Return the forecasts of updates at the epsilon asked for and at others, the smallest first."""
    config = request.config
    asked = gdp_epsilon(config.mu, config.delta)
    wanted = {one: gdp_mu(one, config.delta) for one in _EPSILONS if not math.isclose(one, asked, rel_tol=_NEAR)}
    wanted[asked] = config.mu
    return [
        (epsilon, update_forecast(replace(request, config=replace(config, mu=mu))))
        for epsilon, mu in sorted(wanted.items())
    ]
