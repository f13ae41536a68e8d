"""What a policy would mean, before anything runs: cap, noise and error of every mechanism (``murmurfl plan``).

Everything comes from the policy that a machine would have, so the printed noise is the noise that it would add. There
are two errors, both standard deviations of one value: of the prefix sums that a machine releases, and of the sums of
these, by which DP-mu^2-FL moves its model (its momentum is a prefix sum, its model a sum of momenta).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...privacy import MECHANISMS, SCHEDULES, ConfigurationError, Guarantee, gdp_epsilon, rounded_up
from ...privacy.accounting.amplification import amplification_of
from ...privacy.mechanisms import DECODERS, WORKLOADS, noise_stands_alone
from ..reports.table import Column, Table
from ..settings.trust_settings import nothing_gained
from .request import PlanRequest
from .request import request_of as request_of
from .trusts import TrustPlan, compared_trusts, prefix_errors, rms, trust_table

_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cancelling": ("schedule", SCHEDULES),
    "decay": ("workload", WORKLOADS),
    "tree": ("decoder", DECODERS),
    "optimal": ("workload", WORKLOADS),
}

BESIDE_MEAN = "Not in it: the mean of the features, one more release of every sample, with the rest of the run's mu^2."

# Beyond these, nobody waits for a plan as long as it takes to find the optimal factorisation, and B is large to write.
_MOST_OPTIMAL = {"prefix-sum": 1024, "mu2": 512}
_MOST_DENSE = 2048


@dataclass(frozen=True)
class MechanismPlan:
    """One mechanism worked out; all errors are standard deviations of one value, in the units of the clip norm.

    Parameters
    ----------
    name : str
        Mechanism and option.
    mu, epsilon : float
        What all K releases guarantee.
    mu_local, epsilon_local : float or None
        Under secure aggregation, what they guarantee whatever happens; None also where that is nothing.
    noise_std : float
        In front of the mechanism's rows.
    prefix_rmse, prefix_last : float
        Noise of a machine's released prefix sums: root mean square over its releases, and the last.
    mu2_rmse, mu2_last : float or None
        The same of the sums of the prefix sums; None for too many releases to write B out.
    server_prefix_rmse, server_mu2_rmse : float or None
        Of the server's running sums of averages over m machines: each of the M machines has a prefix in them, divided
        by m, so sqrt(M) / m times one machine's.
    memory_bytes : int
        What the mechanism makes a stream remember between releases.
    epsilon_amplified, amplified_proved : float and bool, or None
        What a secret order makes of epsilon, and whether that is proved or an estimate; None without one, and where
        nothing is known of it.
    """

    name: str
    mu: float
    epsilon: float
    noise_std: float
    prefix_rmse: float
    prefix_last: float
    mu2_rmse: float | None
    mu2_last: float | None
    server_prefix_rmse: float
    server_mu2_rmse: float | None
    memory_bytes: int
    mu_local: float | None = None
    epsilon_local: float | None = None
    epsilon_amplified: float | None = None
    amplified_proved: bool | None = None


@dataclass(frozen=True)
class Plan:
    """A request worked out for every mechanism.

    Parameters
    ----------
    request : PlanRequest
    mu : float
        What epsilon at delta allows.
    releases : int
        K.
    sensitivity : float
        The charged change of one release.
    mechanisms : list of MechanismPlan
    left_out : dict of str to str
        Mechanisms that were not worked out, and why.
    trusts : list of TrustPlan
        What the same mu costs under each trust model, with the mechanism of least error of prefix sums.
    """

    request: PlanRequest
    mu: float
    releases: int
    sensitivity: float
    mechanisms: list[MechanismPlan]
    left_out: dict[str, str]
    trusts: list[TrustPlan]

    @property
    def best_for_prefix_sums(self) -> str:
        """The mechanism with the least error of prefix sums."""
        return min(self.mechanisms, key=lambda plan: plan.prefix_rmse).name

    @property
    def best_for_mu2(self) -> str | None:
        """The mechanism with the least error of the sums of prefix sums."""
        known = [(plan.mu2_rmse, plan.name) for plan in self.mechanisms if plan.mu2_rmse is not None]
        return min(known)[1] if known else None

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        best = {"best_for_prefix_sums": self.best_for_prefix_sums, "best_for_mu2": self.best_for_mu2}
        return {**asdict(self), **best, "guarantee": self.guarantee.document()}

    @property
    def noise_values(self) -> int:
        """How many values of noise all releases of a machine have."""
        return self.request.parameters * self.releases

    @property
    def guarantee(self) -> Guarantee:
        """What a machine's releases would guarantee, with any of the mechanisms."""
        request = self.request
        words = "noise of any of these mechanisms on each machine"
        unit = "owner" if request.samples_per_owner else "sample"
        covers = f"over all {self.releases} releases of a machine, a sample in at most {request.passes} of them"
        notes = (BESIDE_MEAN,) if request.after_mean else ()
        if not request.secure:
            return Guarantee(self.mu, request.delta, words, unit=unit, covers=covers, notes=notes)
        local = [math.inf if made.mu_local is None else made.mu_local for made in self.mechanisms]
        return Guarantee(
            self.mu,
            request.delta,
            f"{words}, under masks",
            trust=request.trust,
            unit=unit,
            covers=covers,
            mu_local=max(local),
            min_honest=request.min_honest,
            notes=notes,
        )


def make_plan(request: PlanRequest) -> Plan:
    """Every mechanism's noise and error for a request.

    Raises
    ------
    ConfigurationError
        If no mechanism can do what is asked for.
    """
    plans, left_out, sensitivity = [], {}, 0.0
    summed = request.secure
    for mechanism in MECHANISMS:
        option, values = _VARIANTS.get(mechanism, ("", ("",)))
        for value in values:
            name = f"{mechanism} {value}".strip()
            if mechanism == "optimal" and request.releases > _MOST_OPTIMAL[value]:
                left_out[name] = f"more than {_MOST_OPTIMAL[value]} releases: finding it takes too long for a plan"
                continue
            if summed and request.release_rule == "paper" and not noise_stands_alone(mechanism):
                left_out[name] = "no helper opens a correlated release that is built on one which may be lost"
                continue
            policy = request.policy(mechanism, {option: value} if option else {})
            plan = policy.plan(request.parameters)
            if plan.problem:
                left_out[name] = plan.problem
                continue
            sensitivity = max(sensitivity, plan.sensitivity)
            amplified = amplification_of(policy, plan)
            prefix = prefix_errors(plan)
            mu2 = None
            if request.releases <= _MOST_DENSE:
                mu2 = np.linalg.norm(np.cumsum(plan.mechanism.decoder(), axis=0), axis=1) * plan.noise_std
            of_server = math.sqrt(request.machines) / request.per_round
            plans.append(
                MechanismPlan(
                    name=name,
                    mu=plan.mu,
                    epsilon=plan.epsilon(request.delta),
                    noise_std=plan.noise_std,
                    prefix_rmse=rms(prefix),
                    prefix_last=float(prefix[-1]),
                    mu2_rmse=None if mu2 is None else rms(mu2),
                    mu2_last=None if mu2 is None else float(mu2[-1]),
                    server_prefix_rmse=of_server * rms(prefix),
                    server_mu2_rmse=None if mu2 is None else of_server * rms(mu2),
                    memory_bytes=plan.mechanism.memory_bytes(request.parameters),
                    mu_local=plan.mu_local if summed and math.isfinite(plan.mu_local) else None,
                    epsilon_local=gdp_epsilon(plan.mu_local, request.delta)
                    if summed and math.isfinite(plan.mu_local)
                    else None,
                    epsilon_amplified=None if amplified is None else amplified.epsilon,
                    amplified_proved=None if amplified is None else amplified.proved,
                )
            )
    if not plans:
        raise ConfigurationError(next(iter(left_out.values())))
    best = min(plans, key=lambda plan: plan.prefix_rmse).name
    trusts = compared_trusts(request, *_named(best))
    return Plan(request, request.mu, request.releases, sensitivity, plans, left_out, trusts)


def _named(name: str) -> tuple[str, dict[str, str]]:
    """The mechanism and the options that a plan's name stands for."""
    mechanism, _, value = name.partition(" ")
    return mechanism, {_VARIANTS[mechanism][0]: value} if value else {}


def compared_table(plan: Plan) -> Table:
    """What the same mu costs under each trust model."""
    return trust_table(plan.trusts, plan.best_for_prefix_sums, plan.guarantee)


AMPLIFIED_MEANS = (
    "In a secret order: epsilon at the same delta while nobody learns which release a sample is in. An estimate "
    "guarantees nothing; the guarantee above holds whoever knows."
)

_COLUMNS = (
    Column("mechanism", "mechanism and option", label=True),
    Column("noise std", "standard deviation in front of the mechanism's rows", form=".4g"),
    Column("prefix sums", "noise of a machine's released prefix sums, root mean square over its releases", form=".4g"),
    Column("last one", "noise of the last prefix sum", form=".4g"),
    Column("their sums", "noise of the sums of the prefix sums, which move DP-mu^2-FL's model", form=".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", form=".4g"),
    Column("their sums there", "noise of the sums of those", form=".4g"),
    Column("bytes kept", "what a machine remembers between releases"),
)
_AMPLIFIED = Column(
    "in a secret order", "what becomes of epsilon if nobody learns which release a sample is in", missing="not known"
)


def plan_table(plan: Plan) -> Table:
    """The table of a plan: a row for each mechanism, least error of prefix sums first."""
    rows = [
        {
            "mechanism": made.name,
            "noise std": made.noise_std,
            "prefix sums": made.prefix_rmse,
            "last one": made.prefix_last,
            "their sums": made.mu2_rmse,
            "at the server": made.server_prefix_rmse,
            "their sums there": made.server_mu2_rmse,
            "bytes kept": made.memory_bytes,
            "in a secret order": _in_secret(made),
        }
        for made in sorted(plan.mechanisms, key=lambda made: made.prefix_rmse)
    ]
    columns = (*_COLUMNS, _AMPLIFIED) if plan.request.secret_order else _COLUMNS
    return Table("Noise of one value", columns, rows, plan.guarantee.sentence)


def _in_secret(made: MechanismPlan) -> str | None:
    """What a secret order makes of a mechanism's epsilon; an estimate is called one wherever it stands."""
    if made.epsilon_amplified is None:
        return None
    return rounded_up(made.epsilon_amplified) + ("" if made.amplified_proved else ", estimated")


def plan_lines(plan: Plan) -> tuple[list[str], list[str]]:
    """What stands above and below the table."""
    request = plan.request
    often = f"in at most {request.passes} of them" if request.passes > 1 else "in one of them"
    before = [
        f"Cap: {plan.releases} releases a machine, every sample {often}; a release changes by at most "
        f"{plan.sensitivity:.6g} when one {plan.guarantee.unit} does.",
        f"Guarantee: {plan.guarantee.sentence}",
    ]
    if request.per_round < request.machines:
        asked = request.rounds * request.per_round / request.machines
        before.insert(
            1,
            f"Asked: each machine for {asked:.4g} releases on average. With sampling = uniform some are asked for more "
            "(`murmurfl run` says how many rounds that leaves), with balanced all equally often.",
        )
    after = [f"Least noise on prefix sums: {plan.best_for_prefix_sums}."]
    if request.secret_order:
        after.insert(0, AMPLIFIED_MEANS)
    if plan.best_for_mu2 is not None:
        after.append(f"Least noise on their sums, which move DP-mu^2-FL's model: {plan.best_for_mu2}.")
    if request.secure and (why := nothing_gained(request.min_honest)):
        after.append(why)
    after += [f"Left out: {name}, {why}." for name, why in plan.left_out.items()]
    return before, after
