"""Every answer of ``murmurfl plan`` as lines, tables and JSON: the one place that turns planning's data into words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import Guarantee, rounded_up
from ...privacy.accounting.loss import Loss
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.forecast_text import (
    forecast_advice,
    forecast_basis,
    forecast_document,
    forecast_sentence,
    rounded_count,
    shortest,
)
from ..methods import METHODS
from ..reports.table import Column, Table
from ..settings.run_config import SECURE, RunConfig, nothing_gained, run_keys
from .deciding import FEW_POINTS, Candidate, PlanRequest, PlanResult
from .noise_plans import (
    forecasts_by_epsilon,
    guarantee_of_updates,
    noise_guarantee,
    update_forecast,
    update_policy,
    update_rounds,
)
from .plan_answers import (
    DEFAULT,
    TAKEN,
    command_of_candidate,
    command_of_result,
    guarantee_for_persons,
    guarantee_of,
    policy_of,
    protects_owners,
)


def result_document(result: PlanResult) -> dict[str, Any]:
    """Return everything that was answered, as plain values."""
    decision = {
        **decision_document(result),
        "noise": policy_of(result).words,
        "command": command_of_result(result),
        "made_up_data": result.made_up,
        "guarantee": guarantee_of(result).document(),
        "ways": [_way_document(way) for way in result.ways],
        "persons": persons_document(result),
    }
    return {**({} if result.noise is None else plan_document(result.noise)), "decision": decision}


def short_lines(result: PlanResult) -> list[str]:
    """Return what to take, what it keeps, what it guarantees, and the command."""
    chosen = result.chosen
    return [
        f"Take {chosen.strategy}: {chosen.rounds} rounds, {_often(chosen)}.",
        *(worth_lines(chosen) or [f"Because {result.reason.partition(';')[0]}."]),
        *longer_lines(result),
        f"Guarantee: {guarantee_of(result).sentence}",
        *late_lines(chosen.config),
        *([person_line(guarantee_for_persons(result), result.persons)] if result.persons else []),
        *command_lines(result),
        "More, with --details: other ways to run it, every mechanism, other trust.",
    ]


def result_lines(result: PlanResult) -> list[str]:
    """Return the lines above the table of ways."""
    return [
        *decision_lines(result),
        *late_lines(result.chosen.config),
        *([_OWNERS_UNDECIDED] if protects_owners(result) else []),
        *([person_line(guarantee_for_persons(result), result.persons)] if result.persons else []),
    ]


_OWNERS_UNDECIDED = "What to take was decided for samples by themselves; the table of mechanisms is of owners."


# The decision.


def decision_document(result: PlanResult) -> dict[str, Any]:
    """Return the decision as plain values: what was chosen, why, and why not the others."""
    others = [{**_candidate_document(one), "why_not": result.why_not(one)} for one in result.others]
    others += [{"strategy": name, "possible": False, "why_not": why} for name, why in result.impossible.items()]
    beside = result.chosen.against_local_baseline
    alone = {"kept_alone": None if beside is None else beside[1]}
    return {
        "chosen": {**_candidate_document(result.chosen), **alone},
        "reason": result.reason,
        "settings": result.settings,
        "alternatives": others,
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


def decision_lines(result: PlanResult) -> list[str]:
    """Return the chosen strategy with its settings, its guarantee, why not the others, and the command."""
    chosen, guarantee = result.chosen, guarantee_of(result)
    problem = chosen.problem
    rows = {
        "rounds": f"{chosen.rounds}, {_often(chosen)}",
        "batch": str(chosen.settings["batch-size"]) if "batch-size" in chosen.settings else "",
        "noise": policy_of(result).words,
        "clip": f"{problem.values.clip_norm:.4g}",
        "features": chosen.features if chosen.features != run_keys()["features"].default else "as they are",
        "centring": "private: the mean of the features is released first" if problem.is_centred else "",
        "noise to signal": f"{chosen.noise_to_signal:.2g}: in the mean gradient that the last step rests on, the "
        "length of the noise over that of a clipped gradient",
        "because": result.reason.partition(";")[0] + ".",
    }
    width = max(map(len, rows))
    told = [f"Take {chosen.strategy}."]
    told += [f"  {name:<{width}}  {text}" for name, text in rows.items() if text]
    told.append(f"Guarantee: {guarantee.sentence}")
    told += [f"In plain words: {guarantee.meaning}"] if guarantee.meaning else []
    told += [*worth_lines(chosen), *longer_lines(result)]
    told += [f"Not {one.strategy}: {result.why_not(one)}." for one in result.others]
    told += [f"Not {name}: {why.rstrip('.')}." for name, why in result.impossible.items()]
    return told + command_lines(result)


def command_lines(result: PlanResult) -> list[str]:
    """Return the command, and what it runs on where nobody has named data."""
    made_up = ["It has made-up data of these sizes; --set task=package.module:make_task has yours."]
    return ["Run it:", f"    {command_of_result(result)}", *(made_up if result.made_up else [])]


def _often(candidate: Candidate) -> str:
    """Return in how many rounds a sample is."""
    times = "each sample in one of them" if candidate.uses == 1 else f"each sample in {candidate.uses} of them"
    return "every sample in each" if candidate.uses == candidate.rounds else times


def worth_lines(chosen: Candidate) -> list[str]:
    """Whether federating is worth it, by rehearsal; empty where nothing was rehearsed."""
    if chosen.against_local_baseline is None:
        return []
    kept, alone = chosen.against_local_baseline
    figures = f"on made-up data it keeps {100 * kept:.0f} % of what can be learnt{chosen.measure}"
    sizes = chosen.problem.sizes
    of = " of average size" if max(sizes) >= 2 * min(sizes) else ""
    one = f"one machine{of} alone, without noise, {100 * max(alone, 0.0):.0f} %"
    if kept > alone:
        return [f"Worth federating, likely: {figures}, {one}."]
    return [
        f"Not worth federating, likely: {figures}, {one}. More machines, sums (--trust secure-aggregation) or a larger "
        "epsilon would change that."
    ]


def longer_lines(result: PlanResult) -> list[str]:
    """Whether twice as many rounds would learn more, by rehearsal; empty where they cannot be had."""
    chosen, longer = result.chosen, result.longer
    if longer is None or not longer.retained_utility:
        return []
    gained = longer.retained_utility - chosen.retained_utility
    more = "learn more" if gained > FEW_POINTS else "learn less" if gained < -FEW_POINTS else "gain little"
    return [f"More rounds would {more}, likely: twice as many keep {100 * longer.retained_utility:.0f} %."]


def late_lines(config: RunConfig) -> list[str]:
    """The use and cost of late answers; empty where rounds wait for all."""
    if config.quorum == 1 and config.over_selection == 1:
        return []
    asked, needed = config.asked_per_round, config.answers_needed
    ends = f"A round asks {asked} machines and ends when {needed} have answered."
    method = METHODS[config.strategy]
    if method.strategy_type.late_answers == "dropped":
        return [
            f"{ends} Later answers are dropped, and no other release carries them: of up to {asked - needed} machines "
            f"a round ({100 * (asked - needed) / asked:.0f} %) the budget of a release is spent for nothing."
        ]
    if (method.release_rule or config.release_rule) == "paper":
        return [f"{ends} Later answers count when they come; one that never comes is lost, and its budget with it."]
    return [f"{ends} Later answers count when they come, and what is lost comes with the machine's next: no budget is."]


# Persons.


def persons_document(result: PlanResult) -> list[dict[str, Any]]:
    """Return the figures of persons as plain values; None for what nothing is vouched for."""
    delta = guarantee_for_persons(result).delta
    return [
        {"machines": machines, "samples": samples, **loss.document(delta)}
        for (machines, samples), loss in result.persons.items()
    ]


def person_line(guarantee: Guarantee, losses: Mapping[tuple[int, int], Loss]) -> str:
    """Return a line with each person's samples, machines, mu and epsilon."""
    words = []
    for (machines, samples), loss in losses.items():
        held = "all samples" if guarantee.unit == "owner" else _counted(samples, "sample")
        each = "each of " if machines > 1 else ""
        figures = _vouched(loss.mu, guarantee.delta)
        if loss.conditional:
            figures += f", whatever happens {_vouched(loss.worst_case.mu, guarantee.delta)}"
        words.append(f"with {held} on {each}{_counted(machines, 'machine')}: {figures}")
    return f"Somebody {'; '.join(words)}."


def _vouched(mu: float, delta: float) -> str:
    if math.isinf(mu):
        return "more than this noise can be vouched for"
    return f"mu = {rounded_up(mu)} (epsilon = {rounded_up(gdp_epsilon(mu, delta))})"


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


# Ways to run it.

_TRUSTS = {"untrusted-server": "nobody", SECURE: "sums", "trusted-server": "server"}
RIGHT = ("#", "uses", "batch", "rounds", "noise", "keeps", "accuracy")
"""Columns of numbers."""
HEADING = "Ways to run it, the best first on made-up data of this shape:"
MEANINGS = (
    "trusts: what a machine trusts: nobody, that the server sees only sums (secure aggregation), or the server. uses: "
    "releases a sample is in. batch: samples of a machine in a release. noise: noise to signal, as above. keeps: of "
    "what can be learnt from the made-up data, on average over six kinds of them."
)
SECRECY = (
    "secrecy: that nobody learns the order of samples and the time that releases take. "
    "N x: N times the gradients of a pass."
)
"""The meanings that only a row in a secret order needs."""
NOT_TRIED = "What they come to on your data: --try 5 trains the first five and says their accuracy."
TRIED = "Accuracy is of one simulated run each, on the test set: choosing by it is private only where that is public."


def _way_document(way: Candidate) -> dict[str, Any]:
    return {
        **_candidate_document(way),
        "trust": way.trust,
        "batch": way.batch,
        "varied": way.varied,
        "mark": way.mark or None,
        "accuracy": way.accuracy,
        "command": command_of_candidate(way),
        "secret_order": _hidden_document(way),
    }


def _hidden_document(way: Candidate) -> dict[str, Any] | None:
    """What a way in a secret order guarantees with and without it, and its price; None for others."""
    amplification = way.amplification
    if amplification is None:
        return None
    return {
        "epsilon": amplification.epsilon,
        "epsilon_if_known": gdp_epsilon(way.config.mu, way.config.delta),
        "proved": amplification.proved,
        "times_the_gradients": amplification.slots,
    }


def rows_of(rows: Sequence[Candidate]) -> list[dict[str, str]]:
    """The table's texts."""
    return [
        {
            "#": str(number),
            "strategy": _named(row),
            "trusts": "secrecy" if row.amplification else _TRUSTS[row.trust],
            "uses": str(row.training_uses),
            "batch": str(row.batch),
            "rounds": str(row.rounds),
            "noise": f"{row.noise_to_signal:.2f}",
            "keeps": f"{100 * row.retained_utility:.0f} %",
            "accuracy": "" if row.accuracy is None else f"{100 * row.accuracy:.1f} %",
        }
        for number, row in enumerate(rows, 1)
    ]


def _named(way: Candidate) -> str:
    """A way's strategy; in a secret order with what that costs."""
    if way.amplification is None:
        return way.strategy
    return f"{way.strategy}, {way.amplification.slots} x"


def columns_of(rows: Sequence[Candidate]) -> list[str]:
    """The columns: accuracy only where something was tried out."""
    unread = "" if _are_tried(rows) else "accuracy"
    return [name for name in ("#", "strategy", "trusts", *RIGHT[1:]) if name != unread]


def _are_tried(rows: Sequence[Candidate]) -> bool:
    return any(row.accuracy is not None for row in rows)


def reasons(rows: Sequence[Candidate], *, made_up: bool) -> list[str]:
    """Lines below the table: which row is taken, why the default is not first, and what rounds, batch and trust do."""
    numbers = {id(row): number for number, row in enumerate(rows, 1)}
    taken = next(row for row in rows if TAKEN in row.mark)
    default = next((row for row in rows if row.mark and row is not taken), None)
    return [
        f"{MEANINGS} {SECRECY}" if any(row.amplification for row in rows) else MEANINGS,
        " ".join(f"Row {numbers[id(row)]} is {row.mark}." for row in rows if row.mark),
        *([] if default is None else _why_not_default(taken, default, numbers)),
        *_not_taken(taken, rows, numbers),
        *_rounds(rows),
        *_batches(rows),
        *_secret_orders(rows, numbers),
        *_trusts(taken, rows, numbers),
        *([TRIED] if _are_tried(rows) else [] if made_up else [NOT_TRIED]),
    ]


def _why_not_default(taken: Candidate, default: Candidate, numbers: Mapping[int, int]) -> list[str]:
    """Why the default, or the run as set, is not the one taken."""
    name = "the default" if DEFAULT in default.mark else "what is set"
    if default.score <= taken.score:
        return []
    why = f"on made-up data it keeps {100 * default.retained_utility:.0f} % of what can be learnt, "
    why += f"row {numbers[id(taken)]} keeps {100 * taken.retained_utility:.0f} %"
    tried = "" if taken.accuracy is None or default.accuracy is None else f" Tried out: {_accuracies(default, taken)}."
    return [f"Why {name} is not the best: {why}.{tried}"]


def _accuracies(one: Candidate, other: Candidate) -> str:
    return f"{100 * (one.accuracy or 0.0):.1f} % against {100 * (other.accuracy or 0.0):.1f} %"


def _not_taken(taken: Candidate, rows: Sequence[Candidate], numbers: Mapping[int, int]) -> list[str]:
    """Rows that score or did better than the one taken, and why they were not."""
    own = numbers[id(taken)]
    others = [row for row in rows if row.trust == taken.trust and row is not taken]
    before = [numbers[id(row)] for row in others if row.score < taken.score]
    said = []
    if before:
        named = f"Rows {', '.join(map(str, before))} keep" if len(before) > 1 else f"Row {before[0]} keeps"
        said.append(
            f"{named} more than row {own}, which is taken: they were not among the ways that are compared, and on your "
            "data it may be otherwise."
        )
    known = taken.accuracy
    better = [row for row in others if known is not None and row.accuracy is not None and row.accuracy > known]
    return said + [
        f"Tried out, row {numbers[id(row)]} did better than row {own}: {_accuracies(row, taken)}." for row in better
    ]


def _rounds(rows: Sequence[Candidate]) -> list[str]:
    """What each number of rounds keeps, for strategies that were tried with several."""
    by_strategy: dict[str, dict[int, Candidate]] = {}
    for row in rows:
        if row.varied in ("taken", "rounds"):
            by_strategy.setdefault(row.strategy, {}).setdefault(row.rounds, row)
    return [f"Rounds: {strategy} keeps {_kept_by(alike)}." for strategy, alike in by_strategy.items() if len(alike) > 1]


def _batches(rows: Sequence[Candidate]) -> list[str]:
    """What each batch keeps."""
    found = {row.batch: row for row in rows if row.varied == "batch"}
    if not found:
        return []
    strategy = next(iter(found.values())).strategy
    return [
        f"Batch: {strategy} by samples a release keeps {_kept_by(found)}. Large batches have less noise and fewer "
        "rounds."
    ]


def _kept_by(candidates: Mapping[int, Candidate]) -> str:
    return ", ".join(
        f"{100 * candidates[number].retained_utility:.0f} % with {number}" for number in sorted(candidates)
    )


def _secret_orders(rows: Sequence[Candidate], numbers: Mapping[int, int]) -> list[str]:
    """What rows in a secret order rest on and cost, and why none is taken, with their commands."""
    said = []
    for row in rows:
        if (found := row.amplification) is not None:
            known, slots = gdp_epsilon(row.config.mu, row.config.delta), found.slots
            said += [
                f"Secret order: row {numbers[id(row)]} has epsilon = {rounded_up(found.epsilon)} while nobody learns "
                f"which of {slots} releases a sample is in, nor how long a machine takes for one. For somebody who "
                f"does it is {rounded_up(known)}, which the ledger counts. A pass takes {slots} times the gradients. "
                "It is never taken unasked, because nobody can check that order and time stay secret. Run it:",
                f"    {command_of_candidate(row)}",
            ]
    return said


def _trusts(taken: Candidate, rows: Sequence[Candidate], numbers: Mapping[int, int]) -> list[str]:
    """The noise of the same mu under other kinds of trust, and their commands."""
    noise, said = taken.noise_to_signal, []
    for row in (row for row in rows if row.varied == "trust" and noise):
        config, loud = row.config, row.noise_to_signal
        assumed = {
            "untrusted-server": "trusting nobody",
            SECURE: f"with secure aggregation, if one helper and {config.sums.min_honest} of {config.sums.min_cohort} "
            "machines of each sum are honest",
            "trusted-server": "with a server that is trusted",
        }[row.trust]
        said += [
            f"Trust: row {numbers[id(row)]}, {assumed}: noise {loud:.2f}, which is {loud / noise:.2g} times that of "
            f"row {numbers[id(taken)]}. Run it:",
            f"    {command_of_candidate(row)}",
        ]
    return said


# Mechanisms and trust.


def plan_document(plan: PlanResult) -> dict[str, Any]:
    """Every mechanism of a plan, as plain values."""
    policy = plan.chosen.policy
    return {
        "request": _compared_document(plan.chosen),
        "mu": policy.mu,
        "releases": policy.max_participations,
        "sensitivity": _sensitivity(plan),
        "mechanisms": [_mechanism_document(one) for one in plan.mechanisms],
        "left_out": dict(plan.impossible),
        "trusts": [_trust_document(*one) for one in plan.trusts.items()],
        "best_for_prefix_sums": plan.chosen.mark,
        "best_for_mu2": plan.best_for_mu2,
        "guarantee": noise_guarantee(plan).document(),
    }


def _sensitivity(plan: PlanResult) -> float:
    return max(0.0, *(one.noise.sensitivity for one in plan.mechanisms))


def _compared_document(base: Candidate) -> dict[str, Any]:
    """Return the run whose mechanisms are compared as plain values."""
    policy, config = base.policy, base.config
    return {
        "machines": config.num_clients,
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
        "secret_order": config.secret_order,
        "after_mean": base.problem.is_centred,
        "samples_per_owner": policy.samples_per_owner,
    }


_FIGURES = (
    "noise_std",
    "prefix_rmse",
    "prefix_last",
    "mu2_rmse",
    "mu2_last",
    "server_prefix_rmse",
    "server_mu2_rmse",
    "memory_bytes",
)


def _mechanism_document(one: Candidate) -> dict[str, Any]:
    """Return a mechanism's figures as plain values; None for what is infinite or not known."""
    amplified = one.amplified
    return {
        "name": one.mark,
        **{name: getattr(one, name) for name in _FIGURES},
        "epsilon_amplified": None if amplified is None else amplified.epsilon,
        "amplified_proved": None if amplified is None else amplified.proved,
        **one.loss.document(one.policy.delta),
    }


def _trust_document(trust: str, one: Candidate) -> dict[str, Any]:
    """Return the noise and the worst case under a trust model as plain values; None if nothing holds in that case."""
    sums, worst_case = one.policy.sums, one.loss.worst_case
    assumed = {
        "untrusted-server": "nothing",
        SECURE: f"1 helper and {sums.min_honest} of {sums.min_cohort} machines of each sum are honest",
        "trusted-server": "the server is honest",
    }
    worst = {"mu_local": worst_case.mu, "epsilon_local": worst_case.epsilon(one.policy.delta)}
    return {
        "trust": trust,
        "assumes": assumed[trust],
        "noise_std": one.noise_std,
        "server_prefix_rmse": one.server_prefix_rmse,
        **{name: value if math.isfinite(value) else None for name, value in worst.items()},
    }


AMPLIFIED_MEANS = (
    "In a secret order: epsilon at the same delta while nobody learns which release a sample is in. An estimate "
    "guarantees nothing; the guarantee above holds whoever knows."
)

_COLUMNS = (
    Column("mechanism", "mechanism and option", "name", label=True),
    Column("noise std", "standard deviation in front of the mechanism's rows", "noise_std", ".4g"),
    Column("prefix sums", "noise of a machine's prefix sums, root mean square over its releases", "prefix_rmse", ".4g"),
    Column("last one", "noise of the last prefix sum", "prefix_last", ".4g"),
    Column("their sums", "noise of the sums of the prefix sums, which move DP-mu^2-FL's model", "mu2_rmse", ".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", "server_prefix_rmse", ".4g"),
    Column("their sums there", "noise of the sums of those", "server_mu2_rmse", ".4g"),
    Column("bytes kept", "what a machine remembers between releases", "memory_bytes"),
)


def _in_secret(row: Mapping[str, Any]) -> str | None:
    """A mechanism's epsilon in a secret order; an estimate is always called one."""
    epsilon = row["epsilon_amplified"]
    return None if epsilon is None else rounded_up(epsilon) + ("" if row["amplified_proved"] else ", estimated")


_AMPLIFIED = Column(
    "in a secret order",
    "what becomes of epsilon if nobody learns which release a sample is in",
    _in_secret,
    missing="not known",
)


def plan_table(plan: PlanResult) -> Table:
    """A row for each mechanism, least error of prefix sums first."""
    rows = [_mechanism_document(one) for one in sorted(plan.mechanisms, key=lambda one: one.prefix_rmse)]
    columns = (*_COLUMNS, _AMPLIFIED) if plan.chosen.config.secret_order else _COLUMNS
    return Table("Noise of one value", columns, rows, noise_guarantee(plan).sentence)


def plan_lines(plan: PlanResult) -> tuple[list[str], list[str]]:
    """The lines above the table, and those below it."""
    policy, config, guarantee = plan.chosen.policy, plan.chosen.config, noise_guarantee(plan)
    uses, rounds = policy.sample_participations, plan.chosen.rounds
    often = f"in at most {uses} of them" if uses > 1 else "in one of them"
    before = [
        f"Cap: {policy.max_participations} releases a machine, every sample {often}; a release changes by at most "
        f"{_sensitivity(plan):.6g} when one {guarantee.unit} does.",
        f"Guarantee: {guarantee.sentence}",
    ]
    if config.asked_per_round < config.num_clients:
        asked = rounds * config.asked_per_round / config.num_clients
        before.insert(
            1,
            f"Asked: each machine for {asked:.4g} releases on average. With sampling = uniform some are asked for more "
            "(`murmurfl run` says how many rounds that leaves), with balanced all equally often.",
        )
    after = [f"Least noise on prefix sums: {plan.chosen.mark}."]
    if config.secret_order:
        after.insert(0, AMPLIFIED_MEANS)
    if plan.best_for_mu2 is not None:
        after.append(f"Least noise on their sums, which move DP-mu^2-FL's model: {plan.best_for_mu2}.")
    if policy.trust == SECURE and (why := nothing_gained(policy.sums.min_honest)):
        after.append(why)
    after += [f"Left out: {name}, {why}." for name, why in plan.impossible.items()]
    return before, after


_TRUST_COLUMNS = (
    Column("trust", "the run-config key", "trust", label=True),
    Column("mu rests on", "what is assumed", "assumes"),
    Column("mu whatever happens", "against the server", "mu_local", rounded_up, missing="none"),
    Column("epsilon then", "of that mu", "epsilon_local", rounded_up, missing="none"),
    Column("noise std", "on each machine, in front of the mechanism's rows", "noise_std", ".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", "server_prefix_rmse", ".4g"),
)


def compared_table(plan: PlanResult) -> Table:
    """The noise of the same mu under each trust model."""
    title = f"The same mu, by who is trusted ({plan.chosen.mark})"
    rows = [_trust_document(*one) for one in plan.trusts.items()]
    return Table(title, _TRUST_COLUMNS, rows, noise_guarantee(plan).sentence)


# Updates of a project's own.


def update_document(request: PlanRequest) -> dict[str, Any]:
    """The forecast of updates, as plain values."""
    config = request.config
    asked = {
        "machines": config.num_clients,
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
        "table": [_update_row(*one) for one in forecasts_by_epsilon(request)],
    }


def update_lines(request: PlanRequest) -> list[str]:
    """The lines above the table of updates."""
    policy, forecast = update_policy(request), update_forecast(request)
    sums = f", trust={policy.trust!r}, sums={policy.sums}"
    given = (
        f"clip_norm={policy.clip_norm:g}, {_wanted(request)}, max_participations={policy.max_participations}"
        f"{sums if policy.trust == SECURE else ''}"
    )
    return [
        forecast_sentence(forecast),
        forecast_basis(forecast),
        *forecast_advice(forecast),
        f"Guarantee: {guarantee_of_updates(request).sentence}",
        "Run it:",
        f"    CorrelatedNoiseMod(simulation=UpdatePolicy({given}))",
    ]


_ROUNDING = 1e-6


def _wanted(request: PlanRequest) -> str:
    """Mu, or the epsilon that it was asked for by, as it is typed: down, so that no more is spent."""
    mu = request.config.mu
    epsilon = gdp_epsilon(mu, request.config.delta)
    if math.isclose(epsilon, round(epsilon, 2), rel_tol=_ROUNDING):
        return f"epsilon={round(epsilon, 2):g}"
    return f"mu={math.floor(mu * 1e6) / 1e6}"


_UPDATE_COLUMNS = (
    Column("epsilon", "for all data of a machine", form=".4g", label=True),
    Column("noise / longest", "noise in the average over the longest it can be", "longest", shortest),
    Column("noise / typical", "the same over a typical one, an estimate", "typical", shortest),
    Column("model", "what to expect of it", "verdict"),
    Column("machines needed", "for a useful one", "machines_needed", rounded_count),
    Column("under sums", "secure aggregation, half honest: noise over a typical one", "summed", shortest, missing=""),
    Column("one sample protected", "per-sample gradients: likewise", "sample", shortest),
)


def update_table(request: PlanRequest) -> Table:
    """The noise over a typical update by epsilon, and how many machines would do."""
    rows = [_update_row(*one) for one in forecasts_by_epsilon(request)]
    return Table(
        "Updates, all data of a machine protected", _UPDATE_COLUMNS, rows, guarantee_of_updates(request).sentence
    )


def _update_row(epsilon: float, forecast: Forecast) -> dict[str, Any]:
    summed = forecast.summed()
    return {
        "epsilon": epsilon,
        "longest": forecast.ratio,
        "typical": forecast.typical_ratio,
        "verdict": forecast.verdict,
        "machines_needed": forecast.machines_needed,
        "summed": None if summed is None else summed.typical_ratio,
        "sample": forecast.per_sample(),
    }
