"""What one machine has decided about its own privacy, and the noise that follows from it.

A :class:`PrivacyPolicy` is the machine's own configuration: the server can ask, it cannot weaken. A :class:`NoisePlan`
is that policy worked out for a model of d parameters: the charged sensitivity, the grid, the noise and the mu that all
the releases of one session together guarantee.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

from .errors import ConfigurationError
from .gdp import gdp_epsilon
from .grid import Grid, power_of_two_at_most
from .mechanisms import MECHANISMS, Mechanism, make_mechanism
from .noise import LARGEST_NORMAL, NOISE_QUALITIES, NoiseQuality

ReleaseRule = Literal["acknowledged", "paper"]
RELEASE_RULES: tuple[ReleaseRule, ...] = get_args(ReleaseRule)
Trust = Literal["untrusted-server", "trusted-server"]
TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)
ClipUnit = Literal["sample", "update", "contractive"]
CLIP_UNITS: tuple[ClipUnit, ...] = get_args(ClipUnit)

# The grid: fine against the noise it hides in, fine against the sensitivity it is charged to, and never so fine that
# float64 normals times their scale could not be rounded to it.
_GRID_PER_SIGMA = 2.0**-20
_GRID_PER_SENSITIVITY = 2.0**-10
_FINEST_GRID_PER_SIGMA = 2.0**-36
_TRUSTED_GRID_PER_SENSITIVITY = 2.0**-24
_LARGEST_COUNT = 2.0**52
_NORMALS_RESOLUTION = 2.0**-53
CONTRACTIVE_ROUNDING = 1e-6
"""What float64 rounding of a contractive update's local iterates may add, relative; where it could be more, a machine
refuses (:func:`murmurfl.clients.online.farthest_point`)."""


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
        Name of the noise mechanism.
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
        k, releases of a session that one sample may take part in. 1: every sample is used once, ever. More: the first
        ``min_separation`` x b samples are gone through in the same order, at most k times.
    min_separation : int
        Releases from one participation of a sample to its next; only with sample_participations > 1.
    noise_quality : {"exact", "fast"}
        ``fast`` is accepted only with simulated keys.
    release_rule : {"acknowledged", "paper"}
        ``acknowledged`` sends P_k - P_ack; ``paper`` always P_k - P_{k-1}, as if no reply could be lost.
    trust : {"untrusted-server", "trusted-server"}
        Under ``trusted-server`` the machine adds no noise: the server is trusted to. It must be asked for.

    Notes
    -----
    **Formal guarantees.** Under ``untrusted-server``: everything the machine releases in one session is mu-GDP, over
    all sessions budget_mu-GDP, with respect to replacement of one sample of this machine, against a server that
    chooses query points, rounds, acknowledgements and stopping adaptively; somebody with j samples on it has j times
    the mu. Every sample is used in one release only, or in sample_participations of them, min_separation apart. Under
    ``trusted-server`` there is no guarantee against the server.
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
            ("mechanism", tuple(MECHANISMS)),
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
        self.make_mechanism()

    def make_mechanism(self) -> Mechanism:
        """The mechanism for one session's releases."""
        options: dict[str, Any] = dict(self.mechanism_options)
        if self.schedule is not None:
            options["schedule"] = self.schedule
        if self.num_rounds is not None:
            options["num_rounds"] = self.num_rounds
        return make_mechanism(self.mechanism, self.max_participations, **options)

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
    def pattern(self) -> dict[str, Any]:
        """A sample's participations, as arguments of :meth:`~murmurfl.privacy.mechanisms.Mechanism.sensitivity`."""
        if self.sample_participations == 1:
            return {}
        return {
            "num_participations": self.sample_participations,
            "min_separation": self.min_separation,
            "pattern": "epochs",
        }

    def plan(self, num_parameters: int) -> NoisePlan:
        """The noise this policy needs for a model of ``num_parameters`` parameters."""
        return _plan(self, num_parameters)

    def terms(self, num_parameters: int) -> str:
        """The policy and its noise as a JSON document, for whoever reads a ledger."""
        return _terms(self, num_parameters)


@dataclass(frozen=True)
class NoisePlan:
    """A policy worked out for d parameters.

    Parameters
    ----------
    mechanism : Mechanism
        For the K releases of one session.
    grid : Grid
        Where contributions, noise and sums live.
    sensitivity : float
        The charged change of one release: 2 S / b + gamma sqrt(d).
    noise_std : float
        Standard deviation in front of the mechanism's rows; 0 under ``trusted-server``.
    mu : float
        What all K releases together guarantee (infinite under ``trusted-server``: the guarantee is the server's).
    fingerprint : str
        Names the policy and d; a session in a ledger belongs to one of them.
    largest_value : float
        No value of a release is larger in magnitude.
    pattern : mapping
        A sample's participations (:attr:`PrivacyPolicy.pattern`).
    """

    mechanism: Mechanism
    grid: Grid
    sensitivity: float
    noise_std: float
    mu: float
    fingerprint: str
    largest_value: float
    pattern: Mapping[str, Any] = field(default_factory=dict)

    def spent_mu(self, releases: int) -> float:
        """Bookkeeping: the mu of the first ``releases`` releases.

        Notes
        -----
        **Formal guarantees.** None beyond that of :attr:`mu`: a server that chooses when to stop can make this figure
        depend on the data. It is exact for a number of releases fixed in advance.
        """
        if releases == 0:
            return 0.0
        if self.noise_std == 0.0:
            return math.inf
        return self.sensitivity * self.mechanism.sensitivity(n=releases, **self.pattern) / self.noise_std

    def epsilon(self, delta: float) -> float:
        """Epsilon at delta of all K releases of one session."""
        return gdp_epsilon(self.mu, delta)


@lru_cache(maxsize=1024)
def _plan(policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    if num_parameters < 1:
        raise ConfigurationError(f"Expected num_parameters >= 1, got {num_parameters}.")
    mechanism = policy.make_mechanism()
    releases = policy.max_participations
    fingerprint = hashlib.sha256(repr((sorted(asdict(policy).items()), num_parameters)).encode())
    if policy.trust == "trusted-server":
        grid = Grid(
            power_of_two_at_most(policy.sensitivity * _TRUSTED_GRID_PER_SENSITIVITY / math.sqrt(num_parameters))
        )
        sensitivity = policy.sensitivity + grid.charge(num_parameters)
        largest = releases * (policy.clip_norm + grid.charge(num_parameters))
        return NoisePlan(mechanism, grid, sensitivity, 0.0, math.inf, fingerprint.hexdigest(), largest, policy.pattern)
    fingerprint.update(mechanism.identity())
    least_std, largest_std = mechanism.row_std_range()
    smallest = mechanism.noise_std(policy.sensitivity, policy.mu, **policy.pattern) * least_std
    spacing = min(smallest * _GRID_PER_SIGMA, policy.sensitivity * _GRID_PER_SENSITIVITY / math.sqrt(num_parameters))
    grid = Grid(power_of_two_at_most(max(spacing, smallest * _FINEST_GRID_PER_SIGMA)))
    sensitivity = policy.sensitivity + grid.charge(num_parameters)
    noise_std = mechanism.noise_std(sensitivity, policy.mu, **policy.pattern)
    if not math.isfinite(noise_std * largest_std):
        raise ConfigurationError(f"Expected a finite noise level, got {noise_std:g}: mu = {policy.mu:g} is too small.")
    if policy.delta < num_parameters * releases * _NORMALS_RESOLUTION:
        raise ConfigurationError(
            f"Expected delta >= {num_parameters * releases * _NORMALS_RESOLUTION:.1g} for {releases} releases of "
            f"{num_parameters} values, got {policy.delta:g}: the noise is Gaussian up to 2^-53 in probability a value."
        )
    largest = releases * (policy.clip_norm + grid.charge(num_parameters)) + 2 * LARGEST_NORMAL * noise_std * largest_std
    if largest / grid.spacing >= _LARGEST_COUNT:
        raise ConfigurationError(
            f"Expected sums below 2^52 grid spacings of {grid.spacing:g}, got up to {largest:g}: "
            "mu is too large for exact arithmetic; lower mu, clip_norm or max_participations."
        )
    mu = sensitivity * mechanism.sensitivity(**policy.pattern) / noise_std
    # Calibration and this line are inverse up to rounding; the configured mu is what was asked for, never less noise.
    mu = min(mu, policy.mu) if math.isclose(mu, policy.mu, rel_tol=1e-12) else mu
    return NoisePlan(mechanism, grid, sensitivity, noise_std, mu, fingerprint.hexdigest(), largest, policy.pattern)


@lru_cache(maxsize=1024)
def _terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    plan = policy.plan(num_parameters)
    noise = {"num_parameters": num_parameters, "sensitivity": plan.sensitivity, "noise_std": plan.noise_std}
    return json.dumps({**asdict(policy), "mechanism_options": dict(policy.mechanism_options), **noise}, default=repr)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"Expected {name} > 0 and finite, got {value!r}.")
