"""From a machine's policy to its noise: the grid, the charged sensitivity, the noise level, and the mu they guarantee.

Of a machine by itself, with Delta what one sample may change of a release, gamma the grid and S the norm of the
mechanism's C for the samples' pattern (:mod:`.mechanisms`), and mu_n what the normals' resolution tells
(:mod:`.normals`):

    mu^2 = (Delta + gamma sqrt(d))^2 S^2 / noise_std^2 + mu_n^2.

Under secure aggregation that is ``mu_local``, which holds whatever happens. If h machines of every sum are honest, with
noise of one kind (:func:`shared_terms`), the first part is divided by h where a sample is used once, and where releases
stand alone. Where samples return, p times, in releases that build on each other, it is

    (Delta + gamma sqrt(d))^2 (p S_1)^2 / (noise_std^2 h),

with S_1 the norm of the largest column of C: each turn by itself, added up. The other machines of a sum hide one turn
as this machine's own noise does, but two turns together not as well: theirs may be closer to each other. It is never
more than the machine's own figure, which needs no sum. mu_n then counts the normals of all machines that a sum may
have, the rounding gamma sqrt(d) is charged once: what h roundings do to noise of h machines is the rounding of one.

Source: docs/secure-aggregation.md, section 1.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError
from .grid import Grid, power_of_two_at_most
from .mechanisms import Mechanism
from .noise_plan import NoisePlan, Summing
from .normals import (
    FINEST_GRID,
    LARGEST_NORMAL,
    NOISE_VERSION,
    ideal_mu,
    range_problem,
    resolution_mu,
    summed_range_problem,
)
from .row_bound import MOST_ROWS

if TYPE_CHECKING:
    from .policy import PrivacyPolicy

MOST_SUMMED = 2**11
"""Machines whose releases may be in one sum: each count stays below 2^52, so an int64 cannot wrap around."""

# The grid: fine against the noise it hides in, fine against the sensitivity it is charged to, and never finer than
# normals can be rounded to without showing (FINEST_GRID).
_GRID_PER_SIGMA = 2.0**-20
_GRID_PER_SENSITIVITY = 2.0**-10
_NOISELESS_GRID_PER_SENSITIVITY = 2.0**-24
_LARGEST_COUNT = 2.0**52
# A coarser grid is charged more, which makes the noise larger and the grid finer in comparison. After so many doublings
# no grid will do.
_MOST_DOUBLINGS = 16
_MOST_MORE_NOISE = 4.0
_YOUNGER_FIELDS = {"order": "in-turn", "clipping": "clip", "classes": 0, "samples_per_owner": 0}
"""Fields that policies of sessions begun before did not have, and what they were as good as."""


@lru_cache(maxsize=1024)
def make_plan(policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    """The noise a policy needs for a model of ``num_parameters`` parameters.

    Parameters
    ----------
    policy : PrivacyPolicy
    num_parameters : int
        d.

    Raises
    ------
    ConfigurationError
        If no noise can serve the policy.

    Notes
    -----
    **Formal guarantees.** With that noise a machine's releases are ``mu``-GDP and ``mu_local``-GDP, as
    :class:`~murmurfl.privacy.PrivacyPolicy` says, and mu is at most the policy's where it is finite.
    Proof: docs/proofs/release-rule.md, docs/proofs/secure-aggregation.md.
    """
    if num_parameters < 1:
        raise ConfigurationError(f"Expected num_parameters >= 1, got {num_parameters}.")
    mechanism = policy.make_mechanism()
    if not policy.adds_noise:
        return _plan_without_noise(policy, mechanism, num_parameters)
    grid, sensitivity, noise_std = _grid_and_noise(policy, mechanism, num_parameters)
    _, largest_std = mechanism.row_std_range()
    if not math.isfinite(noise_std * largest_std):
        raise ConfigurationError(f"Expected a finite noise level, got {noise_std:g}: mu = {policy.mu:g} is too small.")
    plan = NoisePlan(
        mechanism,
        grid,
        sensitivity,
        noise_std,
        mu=math.inf,
        fingerprint=_fingerprint(policy, num_parameters, grid, noise_std, mechanism.identity()),
        largest_value=_largest_value(policy, num_parameters, grid, 2 * LARGEST_NORMAL * noise_std * largest_std),
        pattern=policy.pattern,
        sums=_sums(policy),
    )
    return _with_figures(plan, policy, num_parameters)


def _largest_value(policy: PrivacyPolicy, num_parameters: int, grid: Grid, noise: float) -> float:
    """No value of a release is larger in magnitude, given that of its noise; refused where it would not be exact."""
    largest = _largest_contribution(policy, num_parameters, grid) + noise
    if largest / grid.spacing >= _LARGEST_COUNT:
        raise ConfigurationError(
            f"Expected sums below 2^52 grid spacings of {grid.spacing:g}, got up to {largest:g}: "
            "mu is too large for exact arithmetic; lower mu, clip_norm or max_participations."
        )
    return largest


def _largest_contribution(policy: PrivacyPolicy, num_parameters: int, grid: Grid) -> float:
    """No value of the contributions to a release is larger in magnitude."""
    # A release that stands alone has one contribution, and a prefix sum those of all; in a secret order every sample is
    # in one of them.
    alone = policy.sums_samples and policy.builds_on == "nothing"
    contributions = 1 if alone or policy.order == "secret" else policy.max_participations
    rows = MOST_ROWS / policy.batch_size if policy.sums_samples else 1.0
    if policy.samples_per_owner and not policy.sums_samples:  # all owners may be in the places of one batch
        contributions, rows = policy.participations, MOST_ROWS / policy.batch_size
    return contributions * rows * policy.bound.longest + policy.max_participations * grid.charge(num_parameters)


def _sums(policy: PrivacyPolicy) -> Summing | None:
    """What the sums are that this policy's releases are seen in; None if each is seen by itself."""
    if policy.trust != "secure-aggregation":
        return None
    return Summing(policy.min_honest, stands_alone=policy.builds_on == "nothing")


def _with_figures(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    """A plan with what its noise guarantees, and why it does not."""
    local, local_problem, local_hint = _alone(plan, policy, num_parameters)
    mu, problem, hint = local, local_problem, local_hint
    if plan.sums is not None:
        mu, problem, hint = _summed(plan, policy, num_parameters)
    # Calibration and these figures are inverse up to rounding, so the configured mu is stated exactly.
    mu = policy.mu if math.isclose(mu, policy.mu, rel_tol=1e-12) else mu
    local = mu if plan.sums is None else local
    return replace(plan, mu=mu, problem=problem, resolution_mu=hint, mu_local=local, local_problem=local_problem)


def _alone(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> tuple[float, str, float]:
    """The mu of releases that are each seen by itself, why there is none, and what of it is for the resolution."""
    mu = plan.sensitivity * plan.mechanism.sensitivity(**policy.pattern) / plan.noise_std
    if policy.noise_quality != "exact":
        return mu, "", 0.0
    turns = policy.sample_participations
    shift = min(mu, turns * plan.sensitivity * plan.mechanism.largest_entry() / plan.noise_std)
    values = num_parameters * policy.normals_per_parameter
    name, stated = ("mu", policy.mu) if plan.sums is None else ("mu_local", mu)
    problem = range_problem(shift, values, policy.delta, stated, name)
    hint = resolution_mu(values, _grid_per_std(plan))
    return math.inf if problem else math.hypot(mu, hint), problem, hint


def _summed(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> tuple[float, str, float]:
    """As :func:`_alone`, of releases of which only sums are seen."""
    mu = plan.sensitivity * plan.summed_sensitivity() / plan.noise_std
    if policy.noise_quality != "exact":
        return mu, "", 0.0
    values = num_parameters * policy.normals_per_parameter * MOST_SUMMED  # the sum has every machine's rows in it
    problem = summed_range_problem(values, policy.delta, policy.mu)
    hint = resolution_mu(values, _grid_per_std(plan))
    return math.inf if problem else math.hypot(mu, hint), problem, hint


def _grid_per_std(plan: NoisePlan) -> float:
    return plan.grid.spacing / (plan.noise_std * plan.mechanism.rounded_std()[0])


def _plan_without_noise(policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int) -> NoisePlan:
    """The plan of a machine that adds no noise: a trusted server adds it on the machine's grid, or nobody does."""
    # The same for all machines of a training: it depends on nothing that they may have decided differently.
    grid = Grid(power_of_two_at_most(policy.sensitivity * _NOISELESS_GRID_PER_SENSITIVITY / math.sqrt(num_parameters)))
    sensitivity = policy.sensitivity + grid.charge(num_parameters)
    largest = _largest_contribution(policy, num_parameters, grid)
    fingerprint = _fingerprint(policy, num_parameters, grid, 0.0)
    return NoisePlan(mechanism, grid, sensitivity, 0.0, math.inf, fingerprint, largest, policy.pattern)


def _fingerprint(
    policy: PrivacyPolicy, num_parameters: int, grid: Grid, noise_std: float, identity: bytes = b""
) -> str:
    """A name for a policy, d and everything that its noise depends on, the version of the normals included."""
    settled = (sorted(_settled(policy).items()), num_parameters, grid.spacing, noise_std, NOISE_VERSION)
    return hashlib.sha256(repr(settled).encode() + identity).hexdigest()


def _settled(policy: PrivacyPolicy) -> dict[str, Any]:
    """A policy's fields; without those that say nothing of it and were not there before: sessions begun then go on."""
    fields = asdict(policy)
    if policy.trust != "secure-aggregation":
        for name in ("min_honest", "min_cohort", "budget_local_mu"):
            del fields[name]
    for name, usual in _YOUNGER_FIELDS.items():
        if fields[name] == usual:
            del fields[name]
    if policy.clipping == "clip":
        fields.pop("clip_stability", None)
    if policy.clip_unit != "moments":
        fields.pop("class_weight", None)
    return fields


@lru_cache(maxsize=1024)
def shared_terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    """A digest of everything about the noise that machines must have in common to share a sum, 64 hex digits.

    What only one machine's own figure depends on is not in it: its budget, delta, data, passes, least cohort.

    Parameters
    ----------
    policy : PrivacyPolicy
    num_parameters : int
        d.

    Notes
    -----
    mu_local / sqrt(h) counts h machines of *one* noise and one sensitivity: machines with the same digest have the
    same, up to 1e-9 of it.
    """
    plan = policy.plan(num_parameters)
    # In nine digits: the last ones may differ between two machines' mathematical libraries.
    numbers = [f"{value:.9g}" for value in (plan.sensitivity, plan.grid.spacing, plan.noise_std)]
    # Options by name, those that were left out too: `uniform` is the same whether or not it was said.
    options = inspect.signature(type(plan.mechanism)).bind(**policy.mechanism_settings)
    options.apply_defaults()
    shared = (
        numbers,
        policy.mechanism,
        sorted(options.arguments.items()),
        policy.noise_quality,
        policy.builds_on,
        NOISE_VERSION,
    )
    return hashlib.sha256(repr(shared).encode() + plan.mechanism.identity()).hexdigest()


def _grid_and_noise(policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int) -> tuple[Grid, float, float]:
    """The grid, the charged sensitivity and the standard deviation in front of the mechanism's rows.

    Raises
    ------
    ConfigurationError
        With the smallest mu that can be served, if no grid is fine against the sensitivity and coarse against the
        normals' resolution.
    """
    found = _served(policy, mechanism, num_parameters, policy.mu)
    if found is not None:
        return found
    low = high = policy.mu
    while _served(policy, mechanism, num_parameters, high) is None:
        low, high = high, 2.0 * high
        if math.isinf(high):
            raise ConfigurationError(f"Expected a finite noise level, got {policy.mu:g} for mu.")
    for _ in range(20):
        middle = math.sqrt(low * high)
        served = _served(policy, mechanism, num_parameters, middle) is not None
        low, high = (low, middle) if served else (middle, high)
    raise ConfigurationError(
        f"Expected mu >= {high * 1.002:.4g} for {policy.max_participations} releases of {num_parameters:,} values, got "
        f"{policy.mu:g}: a grid fine enough for the clip would be finer than 2^{math.log2(FINEST_GRID):.0f} of the "
        "noise, where the normals' resolution shows. Raise mu, or lower max_participations or the model's size."
    )


def _served(
    policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int, mu: float
) -> tuple[Grid, float, float] | None:
    """Grid, charged sensitivity and noise for mu; None if the normals cannot serve it."""
    (least_std, _), (mean_std, rounded_std) = mechanism.row_std_range(), mechanism.rounded_std()
    # Each value of a release may be the sum of several normals, as in an epoch.
    normals, summing, sums = num_parameters * policy.normals_per_parameter, 1.0, _sums(policy)
    if sums is not None:
        normals, summing = normals * MOST_SUMMED, sums.share(mechanism, policy.pattern)
    rounded_std = rounded_std * math.sqrt(policy.normals_per_parameter / policy.max_participations)
    ideal_std = mechanism.noise_std(policy.sensitivity, mu / summing, **policy.pattern)
    finest = policy.sensitivity * _GRID_PER_SENSITIVITY / math.sqrt(num_parameters)
    wanted = min(ideal_std * least_std * _GRID_PER_SIGMA, finest)
    if policy.noise_quality == "exact":
        wanted = max(wanted, ideal_std * rounded_std * FINEST_GRID)
    grid = Grid(power_of_two_at_most(wanted))
    for _ in range(_MOST_DOUBLINGS):
        sensitivity = policy.sensitivity + grid.charge(num_parameters)
        noise_std = mechanism.noise_std(sensitivity, mu / summing, **policy.pattern)
        if policy.noise_quality != "exact":
            return grid, sensitivity, noise_std
        ideal = ideal_mu(mu, normals, grid.spacing / (noise_std * mean_std))
        if grid.spacing >= FINEST_GRID * noise_std * rounded_std and not math.isnan(ideal):
            noise_std = mechanism.noise_std(sensitivity, ideal / summing, **policy.pattern)
            return (grid, sensitivity, noise_std) if noise_std <= _MOST_MORE_NOISE * ideal_std else None
        grid = Grid(2.0 * grid.spacing)
    return None


@lru_cache(maxsize=1024)
def ledger_terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    """A policy and its noise as a JSON document, for whoever reads a ledger.

    Parameters
    ----------
    policy : PrivacyPolicy
    num_parameters : int
        d.

    Notes
    -----
    Nothing in it depends on data.
    """
    plan = policy.plan(num_parameters)
    noise = {
        "num_parameters": num_parameters,
        "sensitivity": plan.sensitivity,
        "noise_std": plan.noise_std,
        "spacing": plan.grid.spacing,
        "noise_version": NOISE_VERSION,
    }
    return json.dumps({**_settled(policy), "mechanism_options": dict(policy.mechanism_options), **noise}, default=repr)
