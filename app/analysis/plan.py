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

from ...privacy import MECHANISMS, SCHEDULES, ConfigurationError, Guarantee, PrivacyPolicy, gdp_epsilon, gdp_mu
from ...privacy.mechanisms import DECODERS, WORKLOADS, Mechanism
from ...privacy.policy import ClipUnit, ReleaseRule
from ..config import RunConfig
from ..experiment import prepare
from ..report.table import Column, Table

_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cancelling": ("schedule", SCHEDULES),
    "tree": ("decoder", DECODERS),
    "optimal": ("workload", WORKLOADS),
}

# Beyond these, nobody waits for a plan as long as it takes to find the optimal factorisation, and B is large to write.
_MOST_OPTIMAL = {"prefix-sum": 1024, "mu2": 512}
_MOST_DENSE = 2048


@dataclass(frozen=True)
class PlanRequest:
    """What is planned for.

    Parameters
    ----------
    machines : int
        M.
    samples : int
        Samples of each machine.
    rounds : int
        T.
    batch_size : int
        b, samples a release.
    epsilon, delta : float
        The guarantee wanted for one sample of one machine, over all its releases.
    per_round : int
        m, machines asked in a round.
    passes : int
        How often a machine goes through its samples.
    clip_norm : float
        S.
    parameters : int
        d.
    mu : float
        The same guarantee as Gaussian DP, where that was wanted; default what epsilon at delta allows.
    cap : int
        Most releases of a machine, where it is set; 0 for as many as rounds and samples allow.
    clip_unit, release_rule : str
        As in :class:`~murmurfl.privacy.PrivacyPolicy`.
    """

    machines: int
    samples: int
    rounds: int
    batch_size: int
    epsilon: float
    delta: float
    per_round: int
    passes: int = 1
    clip_norm: float = 1.0
    parameters: int = 1000
    mu: float = 0.0
    cap: int = 0
    clip_unit: ClipUnit = "sample"
    release_rule: ReleaseRule = "acknowledged"

    def __post_init__(self) -> None:
        if not self.mu:
            object.__setattr__(self, "mu", gdp_mu(self.epsilon, self.delta))
        for name in ("machines", "samples", "rounds", "batch_size", "per_round", "passes", "parameters"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Expected {name} >= 1, got {getattr(self, name)}.")
        if self.per_round > self.machines:
            raise ConfigurationError(f"Expected per_round <= machines = {self.machines}, got {self.per_round}.")
        if self.batch_size > self.samples:
            raise ConfigurationError(
                f"Expected batch_size <= the {self.samples} samples of a machine, got {self.batch_size}."
            )

    def check_rounds(self) -> None:
        """Refuse more rounds than the machines' samples last for, however their turns are drawn; as a run would.

        Raises
        ------
        ConfigurationError
            With the number of rounds that is possible.
        """
        possible = self.machines * self.passes * self.separation // self.per_round
        if self.rounds > possible:
            often = f", each {self.passes} times" if self.passes > 1 else ""
            raise ConfigurationError(
                f"Expected rounds <= {possible}, got {self.rounds}: {self.samples} samples in batches of "
                f"{self.batch_size}{often} last for {self.passes * self.separation} releases of a machine, and so many "
                f"rounds ask each for {self.rounds * self.per_round / self.machines:.4g}. Use fewer rounds, smaller "
                "batches, more passes, or ask fewer machines a round."
            )

    @property
    def separation(self) -> int:
        """Releases of one pass."""
        return self.samples // self.batch_size

    @property
    def releases(self) -> int:
        """K, the most releases of a machine."""
        return self.cap or min(self.rounds, self.passes * self.separation)

    def policy(self, mechanism: str, options: dict[str, str]) -> PrivacyPolicy:
        """A machine's policy."""
        paper = options.get("schedule") == "paper"
        return PrivacyPolicy(
            clip_norm=self.clip_norm,
            batch_size=self.batch_size,
            max_participations=self.releases,
            mu=self.mu,
            delta=self.delta,
            mechanism=mechanism,
            mechanism_options=options,
            num_rounds=self.rounds if paper else None,
            sample_participations=self.passes,
            min_separation=self.separation if self.passes > 1 else 1,
            clip_unit=self.clip_unit,
            release_rule=self.release_rule,
        )


@dataclass(frozen=True)
class MechanismPlan:
    """One mechanism worked out; all errors are standard deviations of one value, in the units of the clip norm.

    Parameters
    ----------
    name : str
        Mechanism and option.
    mu, epsilon : float
        What all K releases guarantee.
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
    """

    request: PlanRequest
    mu: float
    releases: int
    sensitivity: float
    mechanisms: list[MechanismPlan]
    left_out: dict[str, str]

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
    def guarantee(self) -> Guarantee:
        """What a machine's releases would guarantee, with any of the mechanisms."""
        return Guarantee(
            self.mu,
            self.request.delta,
            "noise of any of these mechanisms on each machine",
            covers=f"over all {self.releases} releases of a machine, a sample in at most {self.request.passes} of them",
        )


def request_of(config: RunConfig, *, check_rounds: bool = True) -> PlanRequest:
    """What a run asks for: its machine with the most samples, its clip norm and its model, on its data.

    Parameters
    ----------
    config : RunConfig
    check_rounds : bool
        Whether more rounds than its machines' samples last for are refused.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible, or its machines release no stream with noise of their own.
    """
    experiment = prepare(config)
    policy = experiment.policy()
    if not policy.adds_noise or "batch-size" not in experiment.method.keys:
        got = f"strategy = {config.strategy!r}" + ("" if config.private else f", mechanism = {config.mechanism!r}")
        raise ConfigurationError(
            f"Expected machines that add noise to a stream of releases, each of a batch, got {got}: a plan compares "
            "mechanisms for such noise."
        )
    if check_rounds:
        experiment.check_rounds()
    return PlanRequest(
        machines=config.num_clients,
        samples=max(experiment.sizes),
        rounds=experiment.num_rounds,
        batch_size=config.batch_size,
        epsilon=gdp_epsilon(config.mu, config.delta),
        delta=config.delta,
        per_round=config.clients_per_round,
        passes=config.passes,
        clip_norm=experiment.values.clip_norm,
        parameters=experiment.model.num_parameters,
        mu=config.mu,
        cap=config.max_participations,
        clip_unit=policy.clip_unit,
        release_rule=policy.release_rule,
    )


def make_plan(request: PlanRequest) -> Plan:
    """Every mechanism's noise and error for a request.

    Raises
    ------
    ConfigurationError
        If no mechanism can do what is asked for.
    """
    plans, left_out, sensitivity = [], {}, 0.0
    for mechanism in MECHANISMS:
        option, values = _VARIANTS.get(mechanism, ("", ("",)))
        for value in values:
            name = f"{mechanism} {value}".strip()
            if mechanism == "optimal" and request.releases > _MOST_OPTIMAL[value]:
                left_out[name] = f"more than {_MOST_OPTIMAL[value]} releases: finding it takes too long for a plan"
                continue
            policy = request.policy(mechanism, {option: value} if option else {})
            plan = policy.plan(request.parameters)
            if plan.problem:
                left_out[name] = plan.problem
                continue
            sensitivity = max(sensitivity, plan.sensitivity)
            prefix = _prefix_errors(plan.mechanism) * plan.noise_std
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
                    prefix_rmse=_rms(prefix),
                    prefix_last=float(prefix[-1]),
                    mu2_rmse=None if mu2 is None else _rms(mu2),
                    mu2_last=None if mu2 is None else float(mu2[-1]),
                    server_prefix_rmse=of_server * _rms(prefix),
                    server_mu2_rmse=None if mu2 is None else of_server * _rms(mu2),
                    memory_bytes=plan.mechanism.memory_bytes(request.parameters),
                )
            )
    if not plans:
        raise ConfigurationError(next(iter(left_out.values())))
    return Plan(request, request.mu, request.releases, sensitivity, plans, left_out)


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
        }
        for made in sorted(plan.mechanisms, key=lambda made: made.prefix_rmse)
    ]
    return Table("Noise of one value", _COLUMNS, rows, plan.guarantee.sentence)


def plan_lines(plan: Plan) -> tuple[list[str], list[str]]:
    """What stands above and below the table."""
    request = plan.request
    often = f"in at most {request.passes} of them" if request.passes > 1 else "in one of them"
    before = [
        f"Cap: {plan.releases} releases a machine, every sample {often}; a release changes by at most "
        f"{plan.sensitivity:.6g} when one sample does.",
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
    if plan.best_for_mu2 is not None:
        after.append(f"Least noise on their sums, which move DP-mu^2-FL's model: {plan.best_for_mu2}.")
    after += [f"Left out: {name}, {why}." for name, why in plan.left_out.items()]
    return before, after


def _prefix_errors(mechanism: Mechanism) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([mechanism.row_std(release) for release in range(1, mechanism.num_releases + 1)])


def _rms(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.sqrt(np.mean(values**2)))
