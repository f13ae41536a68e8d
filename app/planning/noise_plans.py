"""The noise of a run's releases under every mechanism and trust, and what they guarantee a person.

Everything comes from the policy that a machine would have, so the noise is the noise that it would add. There are two
errors, both standard deviations of one value: of the prefix sums that a machine releases, and of the sums of these, by
which DP-mu^2-FL moves its model (its momentum is a prefix sum, its model a sum of momenta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...clients.adapters.update_policy import UpdatePolicy, update_guarantee
from ...privacy.accounting.amplification import amplification_of
from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.guarantee import Guarantee, person_loss
from ...privacy.accounting.loss import NOTHING_ASSUMED, Gaussian, Loss, SumAssumption, weakest_loss
from ...privacy.accounting.noise_forecast import Forecast, StatedNoise, forecast_of, stated_noise
from ...privacy.accounting.noise_plan import NoisePlan
from ...privacy.errors import ConfigurationError
from ...privacy.machine.policy import MOST_MACHINES, ClipUnit, PrivacyPolicy, ReleaseRule, Trust
from ...privacy.mechanisms import DECODERS, MECHANISMS, SCHEDULES, WORKLOADS, noise_stands_alone
from ...privacy.noise import range_problem, summed_range_problem
from ..settings.run_config import SECURE, sum_assumption

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

USUAL = 3
"""Samples, and machines, of the person that is told of where nobody asks for another."""


@dataclass(frozen=True)
class NoiseRequest:
    """A run's releases, for which mechanisms are compared: a few numbers, or what a run comes to on its data."""

    machines: int  # M
    samples: int  # of each machine
    rounds: int  # T
    batch_size: int  # b, samples of a release
    epsilon: float  # for one sample of one machine, over all its releases
    delta: float
    per_round: int  # m, machines asked in a round
    passes: int = 1  # how often a machine goes through its samples
    clip_norm: float = 1.0  # S
    parameters: int = 1000  # d
    mu: float = 0.0  # where it is not given, what epsilon at delta allows
    cap: int = 0  # Most releases of a machine, where it is set; 0 for as many as rounds and samples allow
    clip_unit: ClipUnit = "sample"  # As in PrivacyPolicy
    release_rule: ReleaseRule = "acknowledged"
    trust: Trust = "untrusted-server"
    sums: SumAssumption = NOTHING_ASSUMED
    secret_order: bool = False  # Whether each sample draws its release
    # Whether machines release the mean of their features before all that is planned here, with a part of mu^2 that is
    # not in `mu` and `epsilon`
    after_mean: bool = False
    samples_per_owner: int = 0  # As in PrivacyPolicy; where it is not 0, samples are owners

    def __post_init__(self) -> None:
        if not self.mu:
            object.__setattr__(self, "mu", gdp_mu(self.epsilon, self.delta))
        for name in ("machines", "samples", "rounds", "batch_size", "per_round", "passes", "parameters"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"Expected {name} >= 1, got {getattr(self, name)}.", kind="out-of-range", setting=name
                )
        if self.per_round > self.machines:
            raise ConfigurationError(
                f"Expected per_round <= machines = {self.machines}, got {self.per_round}.",
                kind="out-of-range",
                setting="per_round",
                got=self.per_round,
            )
        if self.batch_size > self.samples:
            raise ConfigurationError(
                f"Expected batch_size <= the {self.samples} samples of a machine, got {self.batch_size}.",
                kind="out-of-range",
                setting="batch_size",
                got=self.batch_size,
            )

    def check_rounds(self) -> None:
        """Refuse more rounds than the machines' samples last for, however their turns are drawn; as a run would."""
        possible = self.machines * self.passes * self.separation // self.per_round
        if self.rounds > possible:
            often = f", each {self.passes} times" if self.passes > 1 else ""
            raise ConfigurationError(
                f"Expected rounds <= {possible}, got {self.rounds}: {self.samples} samples in batches of "
                f"{self.batch_size}{often} last for {self.passes * self.separation} releases of a machine, and so many "
                f"rounds ask each for {self.rounds * self.per_round / self.machines:.4g}. Use fewer rounds, smaller "
                "batches, more passes, or ask fewer machines a round.",
                kind="exhausted",
                setting="rounds",
                got=self.rounds,
            )

    @property
    def separation(self) -> int:
        """Releases of one pass."""
        return self.samples // self.batch_size

    @property
    def releases(self) -> int:
        """K, the most releases of a machine."""
        return self.cap or (self.separation if self.secret_order else min(self.rounds, self.passes * self.separation))

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums."""
        return self.trust == SECURE

    def trusting(self, trust: Trust) -> NoiseRequest:
        """The request under another trust model; for sums with h as set, or else half of a round's machines."""
        if trust != SECURE:
            return replace(self, trust=trust, sums=NOTHING_ASSUMED)
        return replace(self, trust=trust, sums=self.sums if self.secure else sum_assumption(self.per_round))

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
            num_rounds=max(self.rounds, self.releases) if paper else None,
            sample_participations=self.passes,
            min_separation=self.separation if self.passes > 1 else 1,
            clip_unit=self.clip_unit,
            release_rule=self.release_rule,
            trust=self.trust,
            sums=self.sums,
            samples_per_owner=self.samples_per_owner,
            batch_selection="shuffled" if self.secret_order and self.trust != "trusted-server" else "once",
        )


@dataclass(frozen=True)
class MechanismPlan:
    """One mechanism worked out; all errors are standard deviations of one value, in the units of the clip norm."""

    name: str  # Mechanism and option
    loss: Loss  # Of all K releases
    noise_std: float  # In front of the mechanism's rows
    prefix_rmse: float  # Noise of a machine's released prefix sums: root mean square over its releases
    prefix_last: float  # and of the last
    mu2_rmse: float | None  # The same of the sums of the prefix sums; None for too many releases to write B out
    mu2_last: float | None
    # Of the server's running sums of averages over m machines: each of the M machines has a prefix in them, divided
    # by m, so sqrt(M) / m times one machine's
    server_prefix_rmse: float
    server_mu2_rmse: float | None
    memory_bytes: int  # What the mechanism makes a stream remember between releases
    # What a secret order makes of epsilon, and whether that is proved or an estimate; None without one, and where
    # nothing is known of it
    epsilon_amplified: float | None = None
    amplified_proved: bool | None = None

    def document(self, delta: float) -> dict[str, Any]:
        """Return everything as plain values; None for what is infinite or not known."""
        return {name: value for name, value in vars(self).items() if name != "loss"} | self.loss.document(delta)


@dataclass(frozen=True)
class Plan:
    """A request worked out for every mechanism."""

    request: NoiseRequest
    mu: float  # What epsilon at delta allows
    releases: int  # K
    sensitivity: float  # The charged change of one release
    mechanisms: list[MechanismPlan]
    left_out: dict[str, str]  # Mechanisms that were not worked out, and why
    # What the same mu costs under each trust model, with the mechanism of least error of prefix sums
    trusts: dict[Trust, MechanismPlan]

    @property
    def best_for_prefix_sums(self) -> str:
        """The mechanism with the least error of prefix sums."""
        return min(self.mechanisms, key=lambda plan: plan.prefix_rmse).name

    @property
    def best_for_mu2(self) -> str | None:
        """The mechanism with the least error of the sums of prefix sums."""
        known = [(plan.mu2_rmse, plan.name) for plan in self.mechanisms if plan.mu2_rmse is not None]
        return min(known)[1] if known else None

    @property
    def noise_values(self) -> int:
        """The number of noise values in all releases of a machine."""
        return self.request.parameters * self.releases

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of a machine's releases with any of the mechanisms."""
        request = self.request
        words = "noise of any of these mechanisms on each machine"
        unit = "owner" if request.samples_per_owner else "sample"
        covers = f"over all {self.releases} releases of a machine, a sample in at most {request.passes} of them"
        notes = (BESIDE_MEAN,) if request.after_mean else ()
        if not request.secure:
            return Guarantee(self.mu, request.delta, words, unit=unit, covers=covers, notes=notes)
        return Guarantee(
            Loss(Gaussian(self.mu), weakest_loss(made.loss for made in self.mechanisms).worst_case),
            request.delta,
            f"{words}, under masks",
            trust=request.trust,
            unit=unit,
            covers=covers,
            min_honest=request.sums.min_honest,
            notes=notes,
        )


def make_plan(request: NoiseRequest) -> Plan:
    """Every mechanism's noise and error for a request."""
    plans: dict[str, tuple[NoisePlan, MechanismPlan]] = {}
    left_out: dict[str, str] = {}
    for mechanism in MECHANISMS:
        option, values = _VARIANTS.get(mechanism, ("", ("",)))
        for value in values:
            name = f"{mechanism} {value}".strip()
            if mechanism == "optimal" and request.releases > _MOST_OPTIMAL[value]:
                left_out[name] = f"more than {_MOST_OPTIMAL[value]} releases: finding it takes too long for a plan"
            elif request.secure and request.release_rule == "paper" and not noise_stands_alone(mechanism):
                left_out[name] = "no helper opens a correlated release that is built on one which may be lost"
            else:
                policy = request.policy(mechanism, {option: value} if option else {})
                plan = policy.plan(request.parameters)
                if plan.problem:
                    left_out[name] = plan.problem
                else:
                    plans[name] = plan, _mechanism_plan(name, request, policy, plan)
    if not plans:
        raise ConfigurationError(next(iter(left_out.values())), kind="out-of-range")
    made = [one for _, one in plans.values()]
    best = min(made, key=lambda one: one.prefix_rmse)
    trusts = _compared_trusts(request, best.name)
    sensitivity = max(0.0, *(plan.sensitivity for plan, _ in plans.values()))
    return Plan(request, request.mu, request.releases, sensitivity, made, left_out, trusts)


def _mechanism_plan(name: str, request: NoiseRequest, policy: PrivacyPolicy, plan: NoisePlan) -> MechanismPlan:
    amplified = amplification_of(policy, plan)
    prefix, mu2 = _prefix_errors(plan), None
    if request.releases <= _MOST_DENSE:
        mu2 = np.linalg.norm(np.cumsum(plan.mechanism.decoder(), axis=0), axis=1) * plan.noise_std
    of_server = math.sqrt(request.machines) / request.per_round
    return MechanismPlan(
        name=name,
        loss=plan.loss,
        noise_std=plan.noise_std,
        prefix_rmse=_rms(prefix),
        prefix_last=float(prefix[-1]),
        mu2_rmse=None if mu2 is None else _rms(mu2),
        mu2_last=None if mu2 is None else float(mu2[-1]),
        server_prefix_rmse=of_server * _rms(prefix),
        server_mu2_rmse=None if mu2 is None else of_server * _rms(mu2),
        memory_bytes=plan.mechanism.memory_bytes(request.parameters),
        epsilon_amplified=None if amplified is None else amplified.epsilon,
        amplified_proved=None if amplified is None else amplified.proved,
    )


def _prefix_errors(plan: NoisePlan) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Standard deviations of a machine's prefix sums, release by release."""
    releases = range(1, plan.mechanism.num_releases + 1)
    return np.array([plan.mechanism.row_std(release) for release in releases]) * plan.noise_std


def _rms(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def _compared_trusts(request: NoiseRequest, name: str) -> dict[Trust, MechanismPlan]:
    """Return a mechanism's plan under each trust model, all for the request's mu, without those that have none.

    A trusted server adds noise once, in the place of once for each machine, on which there is none.
    """
    mechanism, _, value = name.partition(" ")
    options = {_VARIANTS[mechanism][0]: value} if value else {}
    made: dict[Trust, MechanismPlan] = {}
    trusts: tuple[Trust, ...] = ("untrusted-server", SECURE)
    for trust in trusts:
        asked = request.trusting(trust)
        try:
            policy = asked.policy(mechanism, options)
            made[trust] = _mechanism_plan(name, asked, policy, policy.plan(asked.parameters))
        except ConfigurationError:
            continue
    if (alone := made.get("untrusted-server")) is not None:
        made["trusted-server"] = replace(
            alone,
            loss=Loss(alone.loss.assumed, Gaussian(math.inf)),
            noise_std=0.0,
            server_prefix_rmse=alone.server_prefix_rmse / math.sqrt(request.machines),
        )
    return made


@dataclass(frozen=True)
class Person:
    """A guarantee worked out for somebody with samples on several machines.

    Notes
    -----
    The figures hold if the guarantee is that of each machine, where the range of exact noise allows them; they are
    infinite elsewhere. Each machine's share of delta for that range, below 2^-20 delta, counts once a machine.
    """

    guarantee: Guarantee  # For one sample, or for one owner on one machine; of each machine
    machines: int  # j
    samples: int  # On each of them; 1 where the unit is an owner, whose samples count as one
    values: int  # Of noise, in all releases of a machine: what the range of the normals costs depends on it

    @cached_property
    def loss(self) -> Loss:
        """Loss of all samples of that person together."""
        known, machines, samples = self.guarantee, self.machines, self.samples
        together = person_loss(known.loss, machines=machines, samples=samples, trust=known.trust)
        if not known.loss.conditional:
            # A machine's noise must reach over what is moved on it, and a server's over everything.
            moved = together.mu if known.trust == "trusted-server" else samples * known.mu
            return Loss.of(self._in_range(together.mu, moved))
        beyond = summed_range_problem(self.values * MOST_MACHINES, known.delta, together.mu)
        worst = person_loss(known.loss.unconditional(), machines=machines, samples=samples).mu
        local = self._in_range(worst, samples * known.loss.worst_case.mu)
        return Loss.of(math.inf if beyond else together.mu, local)

    @property
    def mu(self) -> float:
        """Mu of all samples of that person together."""
        return self.loss.mu

    def _in_range(self, figure: float, moved: float) -> float:
        """The figure, if noise reaches over one value that takes all of the move: more than any other would."""
        sound = moved == 0.0 or not range_problem(moved, self.values, self.guarantee.delta, moved)
        return figure if sound and math.isfinite(moved) else math.inf

    def epsilon(self, mu: float) -> float:
        """Epsilon of a mu at the guarantee's delta."""
        return gdp_epsilon(mu, self.guarantee.delta)


def persons_of(
    guarantee: Guarantee, values: int, machines: int | None = None, samples: int | None = None
) -> list[Person]:
    """A guarantee worked out for a person, by default one with several samples and one on several machines.

    An owner's samples on a machine are one row of it, however many they are.

    Returns
    -------
    list of Person
        Empty where nothing is guaranteed.
    """
    owner = guarantee.unit == "owner"
    if not math.isfinite(guarantee.mu):
        return []
    if machines is not None or samples is not None:
        return [Person(guarantee, machines or 1, 1 if owner else samples or 1, values)]
    several = Person(guarantee, USUAL, 1, values)
    return [several] if owner else [Person(guarantee, 1, USUAL, values), several]


_EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Epsilons that are shown beside the one asked for."""
_ROUNDS = 10
_NEAR = 0.01


@dataclass(frozen=True)
class UpdateRequest:
    """Updates of machines that a project has, and what is wanted of them."""

    machines: int  # M and d
    parameters: int
    mu: float  # Wanted for all data of a machine, over all its updates
    delta: float = 1e-5
    per_round: int = 0  # m; 0 for all
    rounds: int = _ROUNDS  # T
    clip_norm: float = 1.0  # S, which does not matter to how much of the model is noise
    trust: Trust = "untrusted-server"
    colluders: int = -1  # Machines of a sum that may work with the server; negative for what leaves half honest
    samples: int = 0  # Of a machine, for what privacy of one sample would leave; 0 where it is not known

    def __post_init__(self) -> None:
        if not self.per_round:
            object.__setattr__(self, "per_round", self.machines)
        for name in ("machines", "parameters", "per_round", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"Expected {name} >= 1, got {getattr(self, name)}.", kind="out-of-range", setting=name
                )
        if self.per_round > self.machines:
            raise ConfigurationError(
                f"Expected per_round <= {self.machines} machines, got {self.per_round}.",
                kind="out-of-range",
                setting="per_round",
                got=self.per_round,
            )
        if self.samples < 0:
            raise ConfigurationError(
                f"Expected samples >= 0, got {self.samples}.", kind="out-of-range", setting="samples", got=self.samples
            )

    @property
    def releases(self) -> int:
        """K: how often a machine is asked, rounded up."""
        return -(-self.rounds * self.per_round // self.machines)

    def policy(self) -> UpdatePolicy:
        """The policy each machine would have."""
        secure = self.trust == SECURE
        return UpdatePolicy(
            clip_norm=self.clip_norm,
            mu=self.mu,
            max_participations=self.releases,
            delta=self.delta,
            trust=self.trust,
            sums=sum_assumption(self.per_round, colluders=self.colluders) if secure else NOTHING_ASSUMED,
        )

    def forecast(self) -> Forecast:
        """The forecast of that policy's noise, from the very plan that a machine makes."""
        policy = self.policy().privacy_policy()
        plan = policy.plan(self.parameters)
        stated = StatedNoise(
            noise=float(stated_noise(policy, plan, 1)["noise-in-all"]),
            longest=self.clip_norm,
            releases=self.releases,
            mu=plan.mu,
            delta=self.delta,
            clip_unit="update",
            unit="machine",
            trust=self.trust,
            honest=policy.sums.min_honest,
        )
        found = forecast_of(
            [stated],
            num_parameters=self.parameters,
            machines=self.machines,
            per_round=self.per_round,
            rounds=self.rounds,
            samples=self.samples,
        )
        if found is None:
            raise ConfigurationError(
                "Expected a policy with noise, got one without.", kind="conflict", setting="mechanism"
            )
        return found

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the updates."""
        plan = self.policy().privacy_policy().plan(self.parameters)
        return update_guarantee(self.policy(), plan.loss)


def by_epsilon(request: UpdateRequest) -> list[tuple[float, Forecast]]:
    """The forecasts of a request at its own epsilon and at others, the smallest first."""
    asked = gdp_epsilon(request.mu, request.delta)
    wanted = {one: gdp_mu(one, request.delta) for one in _EPSILONS if not math.isclose(one, asked, rel_tol=_NEAR)}
    wanted[asked] = request.mu
    return [(epsilon, replace(request, mu=mu).forecast()) for epsilon, mu in sorted(wanted.items())]
