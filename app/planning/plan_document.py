"""Every answer of ``murmurfl plan`` as JSON; its lines and tables (:mod:`.plan_lines`) are made of the same values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import Guarantee
from ...privacy.accounting.loss import Loss, SumAssumption
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.forecast_text import forecast_document
from ..settings.run_config import SECURE
from .deciding import Candidate, PlanRequest, PlanResult
from .noise_plans import (
    forecasts_by_epsilon,
    guarantee_of_updates,
    noise_guarantee,
    update_forecast,
    update_policy,
    update_rounds,
)
from .plan_answers import command_of_candidate, command_of_result, guarantee_for_persons, guarantee_of, policy_of
from .rehearsal import LocalBaseline, judged


def result_document(result: PlanResult) -> dict[str, Any]:
    """Return everything that was answered, as plain values."""
    decision = {
        **decision_document(result),
        "noise": policy_of(result).words,
        "command": command_of_result(result),
        "made_up_data": result.made_up,
        "guarantee": guarantee_of(result).document(),
        "ways": [way_document(way) for way in result.ways],
        "persons": persons_document(guarantee_for_persons(result), result.persons),
    }
    return {**({} if result.noise is None else plan_document(result.noise)), "decision": decision}


def persons_document(guarantee: Guarantee, losses: Mapping[tuple[int, int], Loss]) -> list[dict[str, Any]]:
    """Return the loss of persons by clients and samples on each, as plain values; None if nothing is vouched for."""
    return [{"clients": one[0], "samples": one[1], **loss.document(guarantee.delta)} for one, loss in losses.items()]


def decision_document(result: PlanResult) -> dict[str, Any]:
    """Return the decision as plain values: the choice, the reason for it, and why not the others."""
    others = [{**_candidate_document(one), "why_not": result.why_not(one)} for one in result.others]
    others += [{"strategy": name, "possible": False, "why_not": why} for name, why in result.impossible.items()]
    baselines = result.chosen.local_baselines
    return {
        "chosen": {**_candidate_document(result.chosen), "kept_alone": baselines[0].alone if baselines else None},
        "worth_federating": [_worth_document(one, judged(baselines[0], one)) for one in baselines],
        "reason": result.reason,
        "settings": result.settings,
        "alternatives": others,
    }


def _worth_document(one: LocalBaseline, nearer: LocalBaseline) -> dict[str, Any]:
    return {
        "partition": one.sites.partition,
        "amount": one.sites.amount or None,
        "federation": one.federation,
        "alone": one.alone,
        "own_lead": one.own_lead,
        "is_worth": one.is_worth,
        "is_worth_judged": nearer.is_worth,
        "is_worth_on_own": nearer.own_lead < 0,
    }


def _candidate_document(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "possible": True,
        "rounds": candidate.rounds,
        "sample_uses": candidate.uses,
        "clip_norm": candidate.problem.values.clip_norm,
        "features": candidate.features,
        "centring": "private" if candidate.problem.is_centred else "none",
        "noise_to_signal": candidate.noise_to_signal,
        "kept": candidate.retained_utility,
        "settings": dict(candidate.settings),
    }


def way_document(way: Candidate) -> dict[str, Any]:
    """Return a way to run it as plain values, with what secret batches guarantee and cost; None without them."""
    secret = None
    if (found := way.amplification) is not None:
        known = gdp_epsilon(way.config.mu, way.config.delta)
        secret = {"epsilon": found.epsilon, "epsilon_if_known": known, "proved": found.proved}
        secret["times_the_gradients"] = found.slots
        if found.rate:
            secret["sampling_rate"] = found.rate
    return {
        **_candidate_document(way),
        "trust": way.trust,
        "batch": way.batch,
        "varied": way.varied,
        "mark": way.mark or None,
        "accuracy": way.accuracy,
        "command": command_of_candidate(way),
        "shuffled_batches": secret if way.config.shuffled_batches else None,
        "poisson_batches": secret if way.config.poisson_batches else None,
    }


def plan_document(plan: PlanResult) -> dict[str, Any]:
    """Return every mechanism of a plan, as plain values."""
    base, policy, config = plan.chosen, plan.chosen.policy, plan.chosen.config
    request = {
        "clients": config.num_clients,
        "samples": base.samples,
        "rounds": base.rounds,
        "batch_size": policy.batch_size,
        "epsilon": base.settings["epsilon"],
        "delta": policy.delta,
        "per_round": config.asked_per_round,
        "passes": policy.sample_participations,
        "clip_norm": policy.clip_norm,
        "parameters": base.num_values,
        "mu": policy.mu,
        "cap": base.settings["max-participations"],
        "clip_unit": policy.clip_unit,
        "release_rule": policy.release_rule,
        "trust": policy.trust,
        **asdict(policy.sums),
        "shuffled_batches": config.shuffled_batches,
        "after_mean": base.problem.is_centred,
        "samples_per_owner": policy.samples_per_owner,
    }
    return {
        "request": request,
        "mu": policy.mu,
        "releases": policy.max_participations,
        "sensitivity": max(0.0, *(one.noise.sensitivity for one in plan.mechanisms)),
        "mechanisms": [mechanism_document(one) for one in plan.mechanisms],
        "left_out": dict(plan.impossible),
        "trusts": [trust_document(*one) for one in plan.trusts.items()],
        "best_for_prefix_sums": base.mark,
        "best_for_mu2": plan.best_for_mu2,
        "guarantee": noise_guarantee(plan).document(),
    }


_FIGURES = ("noise_std", "prefix_rmse", "prefix_last", "mu2_rmse", "mu2_last", "server_prefix_rmse")
_FIGURES += ("server_mu2_rmse", "memory_bytes")


def mechanism_document(one: Candidate) -> dict[str, Any]:
    """Return a mechanism's figures as plain values; None for what is infinite or not known."""
    return {
        "name": one.mark,
        **{name: getattr(one, name) for name in _FIGURES},
        "epsilon_amplified": None if one.amplified is None else one.amplified.epsilon,
        "amplified_proved": None if one.amplified is None else one.amplified.proved,
        **one.loss.document(one.policy.delta),
    }


def trust_document(trust: str, one: Candidate) -> dict[str, Any]:
    """Return the noise and the worst case under a trust model as plain values; None if nothing holds in that case."""
    worst = {"mu_local": one.loss.worst_case.mu, "epsilon_local": one.loss.worst_case.epsilon(one.policy.delta)}
    return {
        "trust": trust,
        "assumes": assumed_of(trust, one.policy.sums),
        "noise_std": one.noise_std,
        "server_prefix_rmse": one.server_prefix_rmse,
        **{name: value if math.isfinite(value) else None for name, value in worst.items()},
    }


def assumed_of(trust: str, sums: SumAssumption) -> str:
    """Return what a guarantee rests on under a trust model."""
    honest = f"1 helper and {sums.min_honest} of {sums.min_cohort} clients of each sum are honest"
    return {"untrusted-server": "nothing", SECURE: honest, "trusted-server": "the server is honest"}[trust]


def update_document(request: PlanRequest) -> dict[str, Any]:
    """Return the forecast of a project's own updates, as plain values."""
    config = request.config
    asked = {
        "clients": config.num_clients,
        "parameters": request.num_parameters,
        "mu": config.mu,
        "delta": config.delta,
        "per_round": config.clients_per_round,
        "rounds": update_rounds(request),
        "clip_norm": update_policy(request).clip_norm,
        "trust": config.trust_model,
        "colluders": config.summing.colluders,
        "samples": max(request.sizes, default=0),
    }
    return {
        "request": asked,
        "forecast": forecast_document(update_forecast(request)),
        "guarantee": guarantee_of_updates(request).document(),
        "table": [_update_document(*one) for one in forecasts_by_epsilon(request)],
    }


def _update_document(epsilon: float, forecast: Forecast) -> dict[str, Any]:
    summed = forecast.summed()
    return {
        "epsilon": epsilon,
        "longest": forecast.ratio,
        "typical": forecast.typical_ratio,
        "verdict": forecast.verdict,
        "clients_needed": forecast.clients_needed,
        "summed": None if summed is None else summed.typical_ratio,
        "sample": forecast.per_sample(),
    }
