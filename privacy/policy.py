"""What one machine has decided about its own privacy, and the noise that follows from it.

A :class:`PrivacyPolicy` is the machine's own configuration: the server can ask, but it cannot weaken it. Its
:class:`~murmurfl.privacy.NoisePlan` is the policy worked out for a model of d parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from .errors import ConfigurationError
from .grid import Grid, power_of_two_at_most
from .mechanisms import MECHANISMS, Mechanism, make_mechanism
from .noise import NOISE_QUALITIES, NoiseQuality
from .noise_plan import NoisePlan
from .normals import FINEST_GRID, LARGEST_NORMAL, NOISE_VERSION, ideal_mu, range_problem, resolution_mu
from .words import NO_NOISE_WORDS, TRUSTING_WORDS, noise_words

ReleaseRule = Literal["acknowledged", "paper"]
RELEASE_RULES: tuple[ReleaseRule, ...] = get_args(ReleaseRule)
Trust = Literal["untrusted-server", "secure-aggregation", "trusted-server"]
TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)
ClipUnit = Literal["sample", "update", "contractive"]
CLIP_UNITS: tuple[ClipUnit, ...] = get_args(ClipUnit)
MOST_SUMMED = 2**11
"""Machines whose releases may be in one sum: each count stays below 2^52, so an int64 cannot wrap around."""
NO_NOISE = "none"
"""The mechanism of a simulated machine that adds no noise, to see what noise costs."""

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
CONTRACTIVE_ROUNDING = 1e-6
"""How much, relatively, float64 rounding of a contractive update's local iterates may add; where it could be more, a
machine refuses (:func:`murmurfl.clients.online.farthest_point`)."""


@dataclass(frozen=True)
class PrivacyPolicy:
    """A machine's own decisions; none of them ever comes from a message.

    Parameters
    ----------
    clip_norm : float
        S, the L2 bound on what ``clip_unit`` names.
    batch_size : int
        b, samples in one release; the contribution is the mean over them, or an update made from them.
    max_participations : int
        K, the most releases of one session.
    mu : float
        Gaussian-DP parameter of all K releases of one session together.
    budget_mu : float, optional
        Gaussian-DP parameter of everything this machine ever releases, over all sessions (mus add in squares).
        Default ``mu``: one session.
    delta : float
        Where epsilon is shown.
    mechanism : str
        Name of the noise mechanism; ``none`` for no noise at all, which is accepted only with simulated keys.
    schedule : str, optional
        Schedule of ``cancelling``; default ``uniform``.
    num_rounds : int, optional
        T of the ``paper`` schedule.
    mechanism_options : mapping or tuple of pairs
        Further options of the mechanism, plain values.
    clip_unit : {"sample", "update", "contractive"}
        ``sample``: each sample's row is clipped and their mean released, Delta = 2 S / b. ``update``: a whole update
        made from the b samples is clipped, Delta = 2 S, whatever is computed inside. ``contractive``: b local steps
        with gradients clipped to S, Delta = 2 S / b (1 + 1e-6): only for steps that never move two iterates apart,
        which the client must check (:class:`~murmurfl.clients.OnlineClient`). It must be asked for.
    sample_participations : int
        k, how many releases of a session one sample may take part in. 1: every sample is used once, ever. More: the
        machine goes through the first ``min_separation`` x b samples in the same order, at most k times.
    min_separation : int
        Releases from one participation of a sample to its next; only with sample_participations > 1.
    noise_quality : {"exact", "fast"}
        ``fast`` is accepted only with simulated keys.
    release_rule : {"acknowledged", "paper"}
        ``acknowledged`` sends P_k - P_ack; ``paper`` always P_k - P_{k-1}, as if no reply could be lost.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
        Under ``secure-aggregation`` the machine adds its share of the noise and hides the release under masks that only
        a sum of ``min_cohort`` releases loses. Under ``trusted-server`` it adds no noise: the server is trusted to.
        Both must be asked for.
    min_honest : int
        h, under ``secure-aggregation``: how many machines of every sum, this one among them, do not work with the
        server. It cannot be checked.
    min_cohort : int
        The fewest releases a sum with this machine's has, under ``secure-aggregation``: h, and as many as may work with
        the server. Helpers see to it.
    budget_local_mu : float, optional
        As ``budget_mu``, of what holds whatever the server, helpers and other machines do; default ``budget_mu`` times
        sqrt(h).

    Notes
    -----
    **Formal guarantees.** Under ``untrusted-server``: everything the machine releases in one session is mu-GDP, over
    all sessions budget_mu-GDP, with respect to replacement of one sample of this machine, against a server that
    chooses query points, rounds, acknowledgements and stopping adaptively; somebody with j samples on it has j times
    the mu. Every sample is used in one release only, or in sample_participations of them, min_separation apart. Under
    ``secure-aggregation`` that holds for everybody but the h honest machines of a sum together, as long as one helper
    is honest; whatever happens, the plan's ``mu_local`` does. Under
    ``trusted-server`` there is no guarantee against the server; with mechanism ``none`` there is none at all, whatever
    ``mu`` says.
    Proof: docs/proofs/release-rule.md.
    """

    clip_norm: float
    batch_size: int
    max_participations: int
    mu: float
    budget_mu: float | None = None
    delta: float = 1e-5
    mechanism: str = "cancelling"
    schedule: str | None = None
    num_rounds: int | None = None
    mechanism_options: tuple[tuple[str, Any], ...] | Mapping[str, Any] = ()
    clip_unit: ClipUnit = "sample"
    sample_participations: int = 1
    min_separation: int = 1
    noise_quality: NoiseQuality = "exact"
    release_rule: ReleaseRule = "acknowledged"
    trust: Trust = "untrusted-server"
    min_honest: int = 1
    min_cohort: int = 1
    budget_local_mu: float | None = None

    def __post_init__(self) -> None:
        for name in ("clip_norm", "mu"):
            _check_positive(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("batch_size", "max_participations", "sample_participations", "min_separation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"Expected {name} to be an integer >= 1, got {value!r}.")
        if self.budget_mu is None:
            object.__setattr__(self, "budget_mu", self.mu)
        _check_positive("budget_mu", self.budget_mu)
        object.__setattr__(self, "budget_mu", float(self.budget_mu or 0.0))
        if not 0 < self.delta < 1:
            raise ConfigurationError(f"Expected delta between 0 and 1, got {self.delta!r}.")
        for name, allowed in (
            ("mechanism", (*MECHANISMS, NO_NOISE)),
            ("clip_unit", CLIP_UNITS),
            ("noise_quality", NOISE_QUALITIES),
            ("release_rule", RELEASE_RULES),
            ("trust", TRUST_MODELS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"Expected {name} one of {allowed}, got {getattr(self, name)!r}.")
        object.__setattr__(self, "mechanism_options", tuple(sorted(dict(self.mechanism_options).items())))
        covered = self.sample_participations * self.min_separation
        if self.sample_participations == 1 and self.min_separation != 1:
            raise ConfigurationError(
                f"Expected min_separation only with sample_participations > 1, got {self.min_separation}."
            )
        if self.sample_participations > 1 and self.max_participations > covered:
            raise ConfigurationError(
                f"Expected max_participations <= sample_participations x min_separation = {covered}, got "
                f"{self.max_participations}: a later release would use a sample once too often."
            )
        self._check_secure_aggregation()
        self.make_mechanism()

    def _check_secure_aggregation(self) -> None:
        """Refuse numbers of machines that make no sense, and releases that helpers could not tell apart."""
        for name in ("min_honest", "min_cohort"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"Expected {name} to be an integer >= 1, got {value!r}.")
        if self.trust != "secure-aggregation":
            if (self.min_honest, self.min_cohort, self.budget_local_mu) != (1, 1, None):
                raise ConfigurationError(
                    "Expected min_honest, min_cohort and budget_local_mu only with trust 'secure-aggregation', got "
                    f"{self.min_honest}, {self.min_cohort} and {self.budget_local_mu!r} with {self.trust!r}."
                )
            return
        if not self.min_honest <= self.min_cohort <= MOST_SUMMED:
            raise ConfigurationError(
                f"Expected min_honest <= min_cohort <= {MOST_SUMMED}, got {self.min_honest} and {self.min_cohort}: "
                "min_cohort is the honest machines of a sum and those that may work with the server."
            )
        if self.release_rule == "paper" and self.mechanism not in ("independent", NO_NOISE):
            raise ConfigurationError(
                "Expected release_rule 'acknowledged' under secure aggregation, or the mechanism 'independent', got "
                f"{self.release_rule!r} with {self.mechanism!r}: a helper opens a correlated release only if it is "
                "built on the last one that was opened."
            )
        if self.budget_local_mu is not None:
            _check_positive("budget_local_mu", self.budget_local_mu)

    @property
    def builds_on(self) -> Literal["last-opened", "nothing"]:
        """What a release is built on: the last one that counted, or nothing, with noise that stands alone."""
        return "nothing" if self.release_rule == "paper" else "last-opened"

    @property
    def local_budget(self) -> float:
        """What of mu this machine may ever spend, counted as if every release were seen by itself."""
        budget = float(self.budget_mu or self.mu)
        return budget * math.sqrt(self.min_honest) if self.budget_local_mu is None else float(self.budget_local_mu)

    def make_mechanism(self) -> Mechanism:
        """The mechanism for one session's releases."""
        options: dict[str, Any] = dict(self.mechanism_options)
        if self.schedule is not None:
            options["schedule"] = self.schedule
        if self.num_rounds is not None:
            options["num_rounds"] = self.num_rounds
        name = "independent" if self.mechanism == NO_NOISE else self.mechanism  # scaled by a noise_std of 0
        return make_mechanism(name, self.max_participations, **options)

    @property
    def adds_noise(self) -> bool:
        """Whether the machine's own releases carry noise."""
        return self.trust != "trusted-server" and self.mechanism != NO_NOISE

    @property
    def sensitivity(self) -> float:
        """Delta, the L2 change of one release when one sample is replaced, before rounding to a grid."""
        if self.clip_unit == "update":
            return 2.0 * self.clip_norm
        delta = 2.0 * self.clip_norm / self.batch_size
        return delta * (1.0 + CONTRACTIVE_ROUNDING) if self.clip_unit == "contractive" else delta

    @property
    def rows_per_release(self) -> int:
        """Clipped rows whose mean is a release's contribution: b samples, or one update."""
        return self.batch_size if self.clip_unit == "sample" else 1

    @property
    def normals_per_parameter(self) -> int:
        """How many normals a session draws for each parameter: what the range of the noise costs depends on it."""
        return self.max_participations

    @property
    def pattern(self) -> dict[str, Any]:
        """A sample's participations, as arguments of :meth:`~murmurfl.privacy.mechanisms.Mechanism.sensitivity`."""
        if self.sample_participations == 1:
            return {}
        return {
            "num_participations": self.sample_participations,
            "min_separation": self.min_separation,
            "pattern": "epochs",
        }

    @property
    def participations(self) -> int:
        """In how many releases a sample may be: a policy may allow more than its cap has room for."""
        return min(self.sample_participations, -(-self.max_participations // self.min_separation))

    @property
    def words(self) -> str:
        """Whose noise of which mechanism this policy is, with its options, for a sentence about its guarantee.

        Notes
        -----
        **Formal guarantees.** None of its own: it describes what the policy does and states no figure.
        """
        if self.mechanism == NO_NOISE:
            return NO_NOISE_WORDS
        if not self.adds_noise:
            return TRUSTING_WORDS
        schedule = self.schedule or ("uniform" if self.mechanism == "cancelling" else None)
        return noise_words(
            self.mechanism,
            (schedule, *dict(self.mechanism_options).values()),
            sensitivity="" if self.clip_unit == "sample" else self.clip_unit,
            participations=self.participations,
            masked=self.trust == "secure-aggregation",
        )

    def plan(self, num_parameters: int) -> NoisePlan:
        """The noise this policy needs for a model of ``num_parameters`` parameters."""
        return _plan(self, num_parameters)

    def shared_terms(self, num_parameters: int) -> str:
        """A digest of everything about the noise that machines must have in common to share a sum, 64 hex digits.

        Notes
        -----
        **Formal guarantees.** None of its own. mu_local / sqrt(h) counts h machines of *one* noise and one sensitivity.
        """
        return _shared_terms(self, num_parameters)

    def terms(self, num_parameters: int) -> str:
        """The policy and its noise as a JSON document, for whoever reads a ledger."""
        return _terms(self, num_parameters)


@lru_cache(maxsize=1024)
def _plan(policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    if num_parameters < 1:
        raise ConfigurationError(f"Expected num_parameters >= 1, got {num_parameters}.")
    mechanism = policy.make_mechanism()
    releases = policy.max_participations
    if not policy.adds_noise:
        return _plan_without_noise(policy, mechanism, num_parameters)
    grid, sensitivity, noise_std = _grid_and_noise(policy, mechanism, num_parameters)
    _, largest_std = mechanism.row_std_range()
    if not math.isfinite(noise_std * largest_std):
        raise ConfigurationError(f"Expected a finite noise level, got {noise_std:g}: mu = {policy.mu:g} is too small.")
    mu_local = sensitivity * mechanism.sensitivity(**policy.pattern) / noise_std
    mu, problem, hint, local_problem = mu_local * _summing(policy, mechanism), "", 0.0, ""
    if policy.noise_quality == "exact":
        shift = min(mu_local, policy.sample_participations * sensitivity * mechanism.largest_entry() / noise_std)
        normals = num_parameters * policy.normals_per_parameter
        grid_per_std = grid.spacing / (noise_std * mechanism.rounded_std()[0])
        if policy.trust == "secure-aggregation":
            local_problem = range_problem(shift, normals, policy.delta, mu_local)
            mu_local = math.inf if local_problem else math.hypot(mu_local, resolution_mu(normals, grid_per_std))
            # The sum has every machine's rows in it. Where its range ends nobody has worked out: ideal normals in the
            # place of all of them cost delta exp(epsilon) times what is missing, which a shift of mu stands for.
            normals, shift = normals * MOST_SUMMED, mu
        problem = range_problem(shift, normals, policy.delta, policy.mu)
        hint = resolution_mu(normals, grid_per_std)
        mu = math.inf if problem else math.hypot(mu, hint)
    largest = releases * (policy.clip_norm + grid.charge(num_parameters)) + 2 * LARGEST_NORMAL * noise_std * largest_std
    if largest / grid.spacing >= _LARGEST_COUNT:
        raise ConfigurationError(
            f"Expected sums below 2^52 grid spacings of {grid.spacing:g}, got up to {largest:g}: "
            "mu is too large for exact arithmetic; lower mu, clip_norm or max_participations."
        )
    # Calibration and the line above are inverse up to rounding, so the configured mu is stated exactly.
    mu = policy.mu if math.isclose(mu, policy.mu, rel_tol=1e-12) else mu
    fingerprint = _fingerprint(policy, num_parameters, grid, noise_std, mechanism.identity())
    if policy.trust != "secure-aggregation":
        mu_local, local_problem = mu, problem
    return NoisePlan(
        mechanism,
        grid,
        sensitivity,
        noise_std,
        mu,
        fingerprint,
        largest,
        policy.pattern,
        problem,
        hint,
        mu_local,
        local_problem,
        _summing(policy, mechanism),
    )


def _summing(policy: PrivacyPolicy, mechanism: Mechanism) -> float:
    """What a sum of releases guarantees of what one of them would: mu / mu_local, for ideal normals; 1 without sums.

    1 / sqrt(h) for a sample that is used once, and for releases that stand alone. For a sample that returns in
    releases that build on each other, what each of its turns costs is added up: the turns' own sums may have other
    machines in them, whose samples are less far apart (docs/secure-aggregation.md).
    """
    if policy.trust != "secure-aggregation":
        return 1.0
    if policy.participations == 1 or policy.builds_on == "nothing":
        return 1.0 / math.sqrt(policy.min_honest)
    apart = policy.participations * mechanism.sensitivity()
    return apart / mechanism.sensitivity(**policy.pattern) / math.sqrt(policy.min_honest)


def _plan_without_noise(policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int) -> NoisePlan:
    """The plan of a machine that adds no noise: a trusted server adds it on the machine's grid, or nobody does."""
    # The same for all machines of a training: it depends on nothing that they may have decided differently.
    grid = Grid(power_of_two_at_most(policy.sensitivity * _NOISELESS_GRID_PER_SENSITIVITY / math.sqrt(num_parameters)))
    sensitivity = policy.sensitivity + grid.charge(num_parameters)
    largest = policy.max_participations * (policy.clip_norm + grid.charge(num_parameters))
    fingerprint = _fingerprint(policy, num_parameters, grid, 0.0)
    return NoisePlan(mechanism, grid, sensitivity, 0.0, math.inf, fingerprint, largest, policy.pattern)


def _fingerprint(
    policy: PrivacyPolicy, num_parameters: int, grid: Grid, noise_std: float, identity: bytes = b""
) -> str:
    """A name for a policy, d and everything that its noise depends on, the version of the normals included."""
    settled = (sorted(_settled(policy).items()), num_parameters, grid.spacing, noise_std, NOISE_VERSION)
    return hashlib.sha256(repr(settled).encode() + identity).hexdigest()


def _settled(policy: PrivacyPolicy) -> dict[str, Any]:
    """A policy's fields; without those of secure aggregation under another trust: sessions begun before go on."""
    fields = asdict(policy)
    if policy.trust != "secure-aggregation":
        for name in ("min_honest", "min_cohort", "budget_local_mu"):
            del fields[name]
    return fields


@lru_cache(maxsize=1024)
def _shared_terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    plan = policy.plan(num_parameters)
    shared = (
        plan.sensitivity,
        plan.grid.spacing,
        (policy.mechanism, policy.schedule, policy.num_rounds, policy.mechanism_options),
        policy.max_participations,
        plan.noise_std,
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
    normals, summing = num_parameters * policy.normals_per_parameter, _summing(policy, mechanism)
    if policy.trust == "secure-aggregation":
        normals *= MOST_SUMMED
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
def _terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    plan = policy.plan(num_parameters)
    noise = {
        "num_parameters": num_parameters,
        "sensitivity": plan.sensitivity,
        "noise_std": plan.noise_std,
        "spacing": plan.grid.spacing,
        "noise_version": NOISE_VERSION,
    }
    return json.dumps({**_settled(policy), "mechanism_options": dict(policy.mechanism_options), **noise}, default=repr)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"Expected {name} > 0 and finite, got {value!r}.")
