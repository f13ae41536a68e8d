"""A client's own decisions about its privacy, and the noise that follows from them.

A :class:`PrivacyPolicy` is the client's own configuration: the server can ask, but it cannot weaken it. Its
:class:`~murmurfl.privacy.NoisePlan` is the policy worked out for a model of d parameters.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar, cast, get_args

from ..accounting.gdp import asked_mu, check_count, check_positive
from ..accounting.loss import MOST_SUMMED, NOTHING_ASSUMED, Loss, SumAssumption, plain_fields
from ..accounting.noise_plan import NO_NOISE as NO_NOISE
from ..accounting.noise_plan import NO_NOISE_WORDS, TRUSTING_WORDS, NoisePlan, Summing, noise_words
from ..errors import ConfigurationError, formerly
from ..mechanisms import MECHANISMS, Mechanism, make_mechanism, noise_is_memoryless
from ..noise import (
    FINEST_GRID,
    LARGEST_NORMAL,
    NOISE_QUALITIES,
    NOISE_VERSION,
    Grid,
    NoiseQuality,
    ideal_mu,
    power_of_two_at_most,
    range_problem,
    resolution_mu,
    summed_range_problem,
)
from .clipping import CLIPPINGS, MOST_ROWS, SUMMING_ERROR, Clipping, Moments, RowBound

NameT = TypeVar("NameT", bound=str)

ReleaseRule = Literal["acknowledged", "paper"]
RELEASE_RULES: tuple[ReleaseRule, ...] = get_args(ReleaseRule)
Trust = Literal["untrusted-server", "secure-aggregation", "trusted-server"]
TRUST_MODELS: tuple[Trust, ...] = get_args(Trust)
ClipUnit = Literal["sample", "update", "contractive", "nonnegative", "moments"]
CLIP_UNITS: tuple[ClipUnit, ...] = get_args(ClipUnit)
SINGLE_SAMPLES: tuple[ClipUnit, ...] = ("sample", "nonnegative", "moments")
"""Units of clipping that bound every sample by itself."""
BatchSelection = Literal["once", "cyclic", "full_batch", "shuffled", "poisson"]
BATCH_SELECTIONS: tuple[BatchSelection, ...] = get_args(BatchSelection)
ReleaseMode = Literal["cumulative", "independent"]
RELEASE_MODES: tuple[ReleaseMode, ...] = get_args(ReleaseMode)
RECORDED_SELECTIONS: Mapping[BatchSelection, str] = {
    "once": "in-turn",
    "cyclic": "again",
    "full_batch": "all",
    "shuffled": "secret",
    "poisson": "poisson",
}
"""Words for ``batch_selection``, under ``order``, in ledgers, fingerprints and checkpoints, whose bytes stay."""
RECORDED_MODES: Mapping[ReleaseMode, str] = {"cumulative": "last-opened", "independent": "nothing"}
"""Words for ``release_mode``, under ``builds_on``, in signed headers, records and checkpoints, whose bytes stay."""
CONTRACTIVE_ROUNDING = 1e-6
"""Relative excess that float64 rounding of a contractive update's local iterates may add; where it could be more, a
client refuses (:func:`murmurfl.clients.online_client.farthest_point`)."""


OF_SUMS = "sums=SumAssumption(min_honest=..., min_cohort=...)"
"""Replacement for ``min_honest`` and ``min_cohort`` by themselves."""
_OF_ORDER = f"batch_selection ({', '.join(f'{now!r} for {word!r}' for now, word in RECORDED_SELECTIONS.items())})"


@formerly(min_honest=OF_SUMS, min_cohort=OF_SUMS, order=_OF_ORDER)
@dataclass(frozen=True)
class PrivacyPolicy:
    """A client's own decisions; none of them ever comes from a message.

    Parameters
    ----------
    clip_norm : float
        S, the L2 bound on what ``clip_unit`` names.
    batch_size : int
        b, the most samples in one release; the contribution is their sum over b, or an update made from b of them. A
        client with few samples has smaller batches, whose missing samples count as zero.
    max_participations : int
        K, the most releases of one session.
    mu : float
        Gaussian-DP parameter of all K releases of one session together; or ``epsilon`` in its place.
    budget_mu : float, optional
        Gaussian-DP parameter of everything this client ever releases, over all sessions (mus add in squares).
        Default ``mu``: one session.
    delta : float
        Where epsilon is shown.
    mechanism : str
        Name of the noise mechanism; ``none`` for no noise at all, which is accepted only with simulated keys.
    schedule, num_rounds : str, int, optional
        Schedule of ``cancelling``, default ``uniform``; and T of the ``paper`` schedule.
    mechanism_options : mapping or tuple of pairs
        Further options of the mechanism, plain values.
    clip_unit : {"sample", "update", "contractive", "nonnegative", "moments"}
        ``sample``: each sample's row is clipped and their mean released, Delta = 2 S / b. ``update``: a whole update
        made from the b samples is clipped, Delta = 2 S, whatever is computed inside. ``contractive``: b local steps
        with gradients clipped to S, Delta = 2 S / b (1 + 1e-6): only for steps that never move two iterates apart,
        which the client must check (:class:`~murmurfl.clients.OnlineClient`). It must be asked for. ``nonnegative``:
        as ``sample``, with negative entries of every row set to zero first, Delta = sqrt(2) S / b: for sums of features
        that have none (:mod:`~murmurfl.privacy.release.clipping`). ``moments``: each sample's features are clipped,
        and the client makes rows of second moments and class from them, Delta = S^2 sqrt(2 + 2 a^2 + a^4 / 2); only
        with ``batch_selection`` ``full_batch`` (:mod:`~murmurfl.privacy.release.clipping`).
    batch_selection : {"once", "cyclic", "full_batch", "shuffled", "poisson"}
        Which samples a release is made from. ``once``: the next b that no session has used, so that each is used
        once, ever (or ``sample_participations`` times in a session). ``cyclic``: each session goes through the samples
        from the first one; the budget counts sessions together. ``full_batch``: every sample in every release, and the
        release is their *sum*: batch_size must be 1, and sample_participations follows from max_participations.
        ``shuffled``: each sample in one release, which the client draws and keeps secret; a release is the sum of its
        samples divided by b. ``poisson``: each sample in each release with probability ``sampling_rate``, which the
        client draws anew and keeps secret; a release is the *sum*, batch_size must be 1, and sample_participations
        follows from max_participations: mu is that of a sample in every release. Only under a trusted server.
    sampling_rate : float
        q of ``poisson``, 0 < q <= 1; 0 for any other batch selection.
    clipping, clip_stability : {"clip", "automatic"}, float
        ``automatic``: a row g becomes S g / (||g|| + gamma), whatever its length, with gamma the stability; only where
        samples are clipped.
    classes, class_weight : int, float
        C and a of ``moments``.
    samples_per_owner : int
        If it is not 0, a row of the client's data is an *owner* with at most so many samples, whose gradients are made
        one row that is clipped once (:class:`~murmurfl.clients.OwnedSamples`). Wherever else it says sample here, read
        owner: batches are of b owners, and each takes part as often as a sample would.
    epsilon : float, optional
        Asks for ``mu`` in other words: the largest that implies this epsilon at ``delta``. Exactly one of the two is
        given; what is kept is the mu.
    sample_participations : int
        k, how many releases of a session one sample may take part in. 1: every sample is used once, ever. More: the
        client goes through the first ``min_separation`` x b samples in the same order, at most k times.
    min_separation : int
        Releases from one participation of a sample to its next; only with sample_participations > 1.
    noise_quality : {"exact", "fast"}
        ``fast`` is accepted only with simulated keys.
    release_rule : {"acknowledged", "paper"}
        ``acknowledged`` sends P_k - P_ack; ``paper`` always P_k - P_{k-1}, as if no reply could be lost.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
        Under ``secure-aggregation`` the client adds its share of the noise and hides the release under masks that only
        a sum of ``sums.min_cohort`` releases loses. Under ``trusted-server`` it adds no noise: the server is trusted
        to. Both must be asked for.
    sums : SumAssumption
        Under ``secure-aggregation``, h and n: how many clients of every sum are honest, and its fewest releases.
    budget_local_mu : float, optional
        The budget, as ``budget_mu``, of what holds whatever the server, helpers and other clients do; default that of
        the ledger, where it has one, or ``budget_mu`` times sqrt(h).

    Notes
    -----
    **Formal guarantees.** Under ``untrusted-server``: everything the client releases in one session is mu-GDP, over
    all sessions budget_mu-GDP, with respect to replacement of one sample of this client (a record: a row of a
    file that murmurfl reads, or an item as it was handed over, if whatever made the items treats each by itself:
    docs/proofs/records.md), against a server that chooses query points, rounds, acknowledgements and stopping
    adaptively; somebody with j samples on it has j times
    the mu (:func:`~murmurfl.privacy.person_loss`). With samples_per_owner it is for replacement of all samples of one
    owner on this client by others of that owner; one sample under another owner's name costs up to 2 mu
    (docs/proofs/owners.md). Every sample is used in one release only, or in sample_participations of them,
    min_separation apart. Under
    ``secure-aggregation`` that holds for everybody but the h honest clients of a sum together, as long as one helper
    is honest; in the worst case, the plan's ``loss.worst_case`` does. A ledger's sessions of both kinds together are
    budget_mu-GDP under what those of sums rest on, and budget_local_mu-GDP in the worst case. Under
    ``trusted-server`` there is no guarantee against the server; with mechanism ``none`` there is none at all, whatever
    ``mu`` says.
    Proof: docs/proofs/release-rule.md, docs/proofs/secure-aggregation.md.

    Examples
    --------
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0)
    >>> policy.mechanism, policy.budget_mu, policy.delta
    ('cancelling', 1.0, 1e-05)
    """

    clip_norm: float
    batch_size: int
    max_participations: int
    mu: float = 0.0
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
    sums: SumAssumption = NOTHING_ASSUMED
    budget_local_mu: float | None = None
    batch_selection: BatchSelection = "once"
    clipping: Clipping = "clip"
    clip_stability: float = 0.01
    classes: int = 0
    class_weight: float = 1.0
    samples_per_owner: int = 0
    sampling_rate: float = 0.0
    epsilon: InitVar[float | None] = None

    def __post_init__(self, epsilon: float | None) -> None:
        check_positive("clip_norm", self.clip_norm)
        object.__setattr__(self, "clip_norm", float(self.clip_norm))
        object.__setattr__(self, "mu", asked_mu(self.mu, epsilon, self.delta))
        for name in ("batch_size", "max_participations", "sample_participations", "min_separation"):
            check_count(name, getattr(self, name))
        if self.budget_mu is None:
            object.__setattr__(self, "budget_mu", self.mu)
        check_positive("budget_mu", self.budget_mu)
        object.__setattr__(self, "budget_mu", float(self.budget_mu or 0.0))
        if not 0 < self.delta < 1:
            raise ConfigurationError(
                f"Expected delta between 0 and 1, got {self.delta!r}.",
                kind="out-of-range",
                setting="delta",
                got=self.delta,
            )
        for name, allowed in (
            ("mechanism", (*MECHANISMS, NO_NOISE)),
            ("clip_unit", CLIP_UNITS),
            ("noise_quality", NOISE_QUALITIES),
            ("release_rule", RELEASE_RULES),
            ("trust", TRUST_MODELS),
            ("batch_selection", BATCH_SELECTIONS),
            ("clipping", CLIPPINGS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"Expected {name} one of {allowed}, got {getattr(self, name)!r}.", kind="unknown-name", setting=name
                )
        object.__setattr__(self, "mechanism_options", tuple(sorted(dict(self.mechanism_options).items())))
        self._check_batch_selection()
        covered = self.sample_participations * self.min_separation
        if self.sample_participations == 1 and self.min_separation != 1:
            raise ConfigurationError(
                f"Expected min_separation only with sample_participations > 1, got {self.min_separation}.",
                kind="conflict",
                setting="min_separation",
                got=self.min_separation,
            )
        if self.sample_participations > 1 and self.max_participations > covered:
            raise ConfigurationError(
                f"Expected max_participations <= sample_participations x min_separation = {covered}, got "
                f"{self.max_participations}: a later release would use a sample once too often.",
                kind="out-of-range",
                setting="max_participations",
                got=self.max_participations,
            )
        check_sums(self)
        check_owners(self)
        self.make_mechanism()

    def _check_batch_selection(self) -> None:
        """Raise if batch selection and clipping contradict the rest; settle what ``full_batch`` settles."""
        check_positive("clip_stability", self.clip_stability)
        check_moments(self)
        _ = self.bound  # refuses a stability that norms are not precise to
        if self.clipping != "clip" and self.clip_unit != "sample":
            raise ConfigurationError(
                f"Expected clip_unit 'sample' with clipping {self.clipping!r}, got {self.clip_unit!r}.",
                kind="conflict",
                setting="clip_unit",
                got=self.clip_unit,
            )
        if self.batch_selection in ("full_batch", "shuffled", "poisson") and not self.clips_samples:
            raise ConfigurationError(
                f"Expected a clip_unit of single samples with batch_selection {self.batch_selection!r}, got "
                f"{self.clip_unit!r}.",
                kind="conflict",
                setting="clip_unit",
                got=self.clip_unit,
            )
        check_sampling(self)
        if self.batch_selection in ("full_batch", "poisson"):
            for name in ("batch_size", "min_separation"):
                if (value := getattr(self, name)) != 1:
                    raise ConfigurationError(
                        f"Expected {name} 1 with batch_selection {self.batch_selection!r}, whose releases are sums of "
                        f"samples, got {value}.",
                        kind="conflict",
                        setting=name,
                        got=value,
                    )
            if self.sample_participations not in (1, self.max_participations):
                raise ConfigurationError(
                    f"Expected sample_participations left out with batch_selection {self.batch_selection!r}, got "
                    f"{self.sample_participations}: every sample may be in every release.",
                    kind="conflict",
                    setting="sample_participations",
                    got=self.sample_participations,
                )
            object.__setattr__(self, "sample_participations", self.max_participations)
        elif self.batch_selection == "shuffled" and self.trust == "trusted-server":
            raise ConfigurationError(
                "Expected batch_selection 'once' under a trusted server, got 'shuffled': its noise does not count on "
                "a secret order.",
                kind="conflict",
                setting="batch_selection",
            )
        elif self.batch_selection != "once" and self.sample_participations > 1:
            raise ConfigurationError(
                f"Expected sample_participations 1 with batch_selection {self.batch_selection!r}, got "
                f"{self.sample_participations}.",
                kind="conflict",
                setting="sample_participations",
                got=self.sample_participations,
            )

    @property
    def release_mode(self) -> ReleaseMode:
        """``cumulative`` if a release builds on the last one that counted; ``independent`` if it stands alone."""
        return "independent" if self.release_rule == "paper" else "cumulative"

    @property
    def budget(self) -> Loss:
        """The most that this client may ever spend: ``budget_mu``, and ``budget_local_mu`` in the worst case."""
        budget = cast("float", self.budget_mu)  # settled when the policy is made
        if self.trust != "secure-aggregation":
            return Loss.of(budget)
        local = self.budget_local_mu
        return Loss.of(budget, budget * math.sqrt(self.sums.min_honest) if local is None else float(local))

    def make_mechanism(self) -> Mechanism:
        """Return the mechanism for one session's releases."""
        name = "independent" if self.mechanism == NO_NOISE else self.mechanism  # scaled by a noise_std of 0
        return make_mechanism(name, **self.mechanism_settings)

    @property
    def mechanism_settings(self) -> dict[str, Any]:
        """The mechanism's number of releases and options."""
        settings: dict[str, Any] = {"num_releases": self.max_participations, **dict(self.mechanism_options)}
        given = {"schedule": self.schedule, "num_rounds": self.num_rounds}
        return settings | {name: value for name, value in given.items() if value is not None}

    @cached_property
    def adds_noise(self) -> bool:
        """Whether the client's own releases carry noise."""
        return self.trust != "trusted-server" and self.mechanism != NO_NOISE

    @property
    def sensitivity(self) -> float:
        """Delta, the L2 change of one release when one sample is replaced, before rounding to a grid."""
        if self.clip_unit == "update":
            return 2.0 * self.clip_norm
        delta = self.bound.distance / self.batch_size
        if self.sums_samples:
            delta *= 1.0 + SUMMING_ERROR
        return delta * (1.0 + CONTRACTIVE_ROUNDING) if self.clip_unit == "contractive" else delta

    @cached_property
    def bound(self) -> RowBound:
        """The bound of each row of a contribution before rows are added up."""
        return RowBound(
            self.clip_norm,
            nonnegative=self.clip_unit == "nonnegative",
            stability=self.clip_stability if self.clipping == "automatic" else None,
            # The steps of a contractive update were clipped one by one, where they were made.
            # Automatic clipping shortens most rows, and is meant to: there is nothing to warn of.
            observed=self.clip_unit != "contractive" and self.clipping == "clip",
            moments=Moments(self.classes, self.class_weight) if self.clip_unit == "moments" else None,
        )

    @cached_property
    def clips_samples(self) -> bool:
        """Whether every sample is bounded by itself."""
        return self.clip_unit in SINGLE_SAMPLES

    @property
    def unit(self) -> Literal["sample", "owner"]:
        """Whether a row of the client's data, which is protected as a whole, is a sample or an owner."""
        return "owner" if self.samples_per_owner else "sample"

    @cached_property
    def sums_samples(self) -> bool:
        """Whether a release is a weighted sum over all of the client's samples, and not over b of them."""
        return self.batch_selection in ("full_batch", "shuffled", "poisson")

    @cached_property
    def rows_per_release(self) -> int:
        """Clipped rows whose mean is a release's contribution: b samples, or one update."""
        return self.batch_size if self.clips_samples else 1

    @property
    def normals_per_parameter(self) -> int:
        """The normals that a session draws for each parameter, on which the cost of their range depends."""
        return self.max_participations

    @property
    def pattern(self) -> dict[str, Any]:
        """A sample's participations, as arguments of :meth:`~murmurfl.privacy.mechanisms.Mechanism.sensitivity`."""
        return {
            "num_participations": self.sample_participations,
            "min_separation": self.min_separation,
            "pattern": "epochs",
        }

    @property
    def participations(self) -> int:
        """The most releases a sample may be in, given the cap."""
        return min(self.sample_participations, -(-self.max_participations // self.min_separation))

    @property
    def batches_of_a_pass(self) -> int:
        """Number of batches into which a session deals a client's samples, full or not."""
        return self.min_separation if self.sample_participations > 1 else self.max_participations

    def has_few(self, num_samples: int) -> bool:
        """Return True if a client of so many samples cannot fill the batches of a pass.

        Its batches are smaller then, and each missing sample counts as zero.
        """
        return not self.sums_samples and num_samples < self.batch_size * self.batches_of_a_pass

    @property
    def words(self) -> str:
        """Words for a sentence about a guarantee: whose noise of which mechanism this policy is, with its options."""
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
            clipping="" if self.clipping == "clip" else self.clipping,
            secret=self.batch_selection == "shuffled",
            per_owner=self.samples_per_owner,
        )

    def plan(self, num_parameters: int) -> NoisePlan:
        """Return the noise this policy needs for a model of ``num_parameters`` parameters."""
        return make_plan(self, num_parameters)

    def shared_terms(self, num_parameters: int) -> str:
        """Return a digest of all that clients must have in common about the noise to share a sum, 64 hex digits.

        The worst case's mu / sqrt(h) counts h clients of *one* noise and one sensitivity: clients with the same
        digest have the same, up to 1e-9 of it. What only one client's own figure depends on is left out: its budget,
        delta, data, passes, least cohort.
        """
        return _shared_terms(self, num_parameters)

    def terms(self, num_parameters: int) -> str:
        """Return the policy and its noise as a JSON document, independent of data, for whoever reads a ledger."""
        return _ledger_terms(self, num_parameters)


MOST_CLIENTS = 2**20
"""Clients of a roster: what the range of normals misses is charged for the releases of so many."""

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
    """Return the noise a policy needs for a model of ``num_parameters`` parameters; an error if none can serve it.

    Notes
    -----
    **Formal guarantees.** With that noise a client's releases have the plan's ``loss``, as
    :class:`~murmurfl.privacy.PrivacyPolicy` says, and mu is at most the policy's where it is finite.
    Proof: docs/proofs/release-rule.md, docs/proofs/secure-aggregation.md.
    """
    if num_parameters < 1:
        raise ConfigurationError(
            f"Expected num_parameters >= 1, got {num_parameters}.",
            kind="out-of-range",
            setting="num_parameters",
            got=num_parameters,
        )
    mechanism = policy.make_mechanism()
    if not policy.adds_noise:
        return _plan_without_noise(policy, mechanism, num_parameters)
    grid, sensitivity, noise_std = _grid_and_noise(policy, mechanism, num_parameters)
    _, largest_std = mechanism.row_std_range()
    if not math.isfinite(noise_std * largest_std):
        raise ConfigurationError(
            f"Expected a finite noise level, got {noise_std:g}: mu = {policy.mu:g} is too small.",
            kind="out-of-range",
            setting="mu",
        )
    plan = NoisePlan(
        mechanism,
        grid,
        sensitivity,
        noise_std,
        loss=Loss.of(math.inf),
        fingerprint=_fingerprint(policy, num_parameters, grid, noise_std, mechanism.identity()),
        largest_value=_largest_value(policy, num_parameters, grid, 2 * LARGEST_NORMAL * noise_std * largest_std),
        pattern=policy.pattern,
        sums=_sums(policy),
    )
    return _with_figures(plan, policy, num_parameters)


def _largest_value(policy: PrivacyPolicy, num_parameters: int, grid: Grid, noise: float) -> float:
    """Return the largest magnitude of a release's values, given that of its noise.

    Refused where counts would not be exact.
    """
    largest = _largest_contribution(policy, num_parameters, grid) + noise
    if largest / grid.spacing >= _LARGEST_COUNT:
        raise ConfigurationError(
            f"Expected sums below 2^52 grid spacings of {grid.spacing:g}, got up to {largest:g}: "
            "mu is too large for exact arithmetic; lower mu, clip_norm or max_participations.",
            kind="out-of-range",
            setting="mu",
        )
    return largest


def _largest_contribution(policy: PrivacyPolicy, num_parameters: int, grid: Grid) -> float:
    """Return the largest magnitude of the values of a release's contributions."""
    # A release that stands alone has one contribution, and a prefix sum those of all; in a secret order every sample is
    # in one of them.
    alone = policy.sums_samples and policy.release_mode == "independent"
    contributions = 1 if alone or policy.batch_selection == "shuffled" else policy.max_participations
    rows = MOST_ROWS / policy.batch_size if policy.sums_samples else 1.0
    if policy.samples_per_owner and not policy.sums_samples:  # all owners may be in the places of one batch
        contributions, rows = policy.participations, MOST_ROWS / policy.batch_size
    return contributions * rows * policy.bound.longest + policy.max_participations * grid.charge(num_parameters)


def _sums(policy: PrivacyPolicy) -> Summing | None:
    """Return the sums this policy's releases are seen in; None if each is seen by itself."""
    if policy.trust != "secure-aggregation":
        return None
    return Summing(policy.sums.min_honest, is_memoryless=policy.release_mode == "independent")


def _with_figures(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> NoisePlan:
    """Return the plan with what its noise guarantees, or why it guarantees nothing."""
    local, local_problem, local_hint = _alone(plan, policy, num_parameters)
    mu, problem, hint = local, local_problem, local_hint
    if plan.sums is not None:
        mu, problem, hint = _summed(plan, policy, num_parameters)
    # Calibration and these figures are inverse up to rounding, so the configured mu is stated exactly.
    mu = policy.mu if math.isclose(mu, policy.mu, rel_tol=1e-12) else mu
    loss = Loss.of(mu, None if plan.sums is None else local)
    return replace(plan, loss=loss, problem=problem, local_problem=local_problem, resolution_mu=hint)


def _alone(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> tuple[float, str, float]:
    """Return mu of releases seen one by one, why there is none, and the part of the normals' resolution."""
    mu = plan.sensitivity * plan.mechanism.sensitivity(**policy.pattern) / plan.noise_std
    if policy.noise_quality != "exact":
        return mu, "", 0.0
    turns = policy.sample_participations
    shift = min(mu, turns * plan.sensitivity * plan.mechanism.largest_entry() / plan.noise_std)
    values = num_parameters * policy.normals_per_parameter
    name, claimed = ("mu", policy.mu) if plan.sums is None else ("mu_local", mu)
    problem = range_problem(shift, values, policy.delta, claimed, name)
    hint = resolution_mu(values, _grid_per_std(plan))
    return math.inf if problem else math.hypot(mu, hint), problem, hint


def _summed(plan: NoisePlan, policy: PrivacyPolicy, num_parameters: int) -> tuple[float, str, float]:
    """Return mu of releases seen in sums only, why there is none, and the part of the normals' resolution."""
    mu = plan.sensitivity * plan.summed_sensitivity() / plan.noise_std
    if policy.noise_quality != "exact":
        return mu, "", 0.0
    values = num_parameters * policy.normals_per_parameter
    problem = summed_range_problem(values * MOST_CLIENTS, policy.delta, policy.mu)  # sets may be chosen of all
    hint = resolution_mu(values * MOST_SUMMED, _grid_per_std(plan))  # the sum has every client's rows in it
    return math.inf if problem else math.hypot(mu, hint), problem, hint


def _grid_per_std(plan: NoisePlan) -> float:
    return plan.grid.spacing / (plan.noise_std * plan.mechanism.rounded_std()[0])


def _plan_without_noise(policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int) -> NoisePlan:
    """Return the plan of a client that adds no noise: a trusted server adds it on the client's grid, or nobody does."""
    # The same for all clients of a training: it depends on nothing that they may have decided differently.
    grid = Grid(power_of_two_at_most(policy.sensitivity * _NOISELESS_GRID_PER_SENSITIVITY / math.sqrt(num_parameters)))
    sensitivity = policy.sensitivity + grid.charge(num_parameters)
    largest = _largest_contribution(policy, num_parameters, grid)
    fingerprint = _fingerprint(policy, num_parameters, grid, 0.0)
    loss = Loss.of(math.inf, math.inf if policy.trust == "secure-aggregation" else None)
    return NoisePlan(mechanism, grid, sensitivity, 0.0, loss, fingerprint, largest, policy.pattern)


def recorded_fields(policy: PrivacyPolicy) -> dict[str, Any]:
    """Return a policy's fields as ledgers, fingerprints and checkpoints have them, in the words of their format."""
    recorded = {"batch_selection": ("order", RECORDED_SELECTIONS[policy.batch_selection])}
    fields = dict(recorded.get(name, (name, value)) for name, value in plain_fields(policy).items())
    if not policy.sampling_rate:
        del fields["sampling_rate"]
    return fields


def read_fields(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's fields from the terms in a ledger; raise ValueError for a word of no batch selection."""
    found = dict(terms)
    if "order" in found:
        found["batch_selection"] = _meaning(RECORDED_SELECTIONS, found.pop("order"))
    return found


def recorded_mode(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with a ``release_mode`` as signed headers and records have them, in the words of their format."""
    recorded = {"release_mode": ("builds_on", RECORDED_MODES[values["release_mode"]])}
    return dict(recorded.get(name, (name, value)) for name, value in values.items())


def read_mode(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that :func:`recorded_mode` wrote; raise ValueError for a word of no release mode."""
    values = dict(recorded)
    return {"release_mode": release_mode_of(values.pop("builds_on", None)), **values}


def release_mode_of(word: object) -> ReleaseMode:
    """Return the release mode of a recorded word; raise ValueError if it is none."""
    return _meaning(RECORDED_MODES, word)


def _meaning(recorded: Mapping[NameT, str], word: object) -> NameT:
    for name, known in recorded.items():
        if word == known:
            return name
    raise ValueError(f"expected one of {', '.join(recorded.values())}")


def _fingerprint(
    policy: PrivacyPolicy, num_parameters: int, grid: Grid, noise_std: float, identity: bytes = b""
) -> str:
    """Return a name for a policy, d and everything that its noise depends on, the version of the normals included."""
    settled = (sorted(_settled(policy).items()), num_parameters, grid.spacing, noise_std, NOISE_VERSION)
    return hashlib.sha256(repr(settled).encode() + identity).hexdigest()


def _settled(policy: PrivacyPolicy) -> dict[str, Any]:
    """Return a policy's fields without newer ones at their defaults, so that older sessions go on."""
    fields = recorded_fields(policy)
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
def _shared_terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    plan = policy.plan(num_parameters)
    # In nine digits: the last ones may differ between two clients' mathematical libraries.
    numbers = [f"{value:.9g}" for value in (plan.sensitivity, plan.grid.spacing, plan.noise_std)]
    # Options by name, those that were left out too: `uniform` is the same whether or not it was said.
    options = inspect.signature(type(plan.mechanism)).bind(**policy.mechanism_settings)
    options.apply_defaults()
    shared = (
        numbers,
        policy.mechanism,
        sorted(options.arguments.items()),
        policy.noise_quality,
        RECORDED_MODES[policy.release_mode],
        NOISE_VERSION,
    )
    return hashlib.sha256(repr(shared).encode() + plan.mechanism.identity()).hexdigest()


def _grid_and_noise(policy: PrivacyPolicy, mechanism: Mechanism, num_parameters: int) -> tuple[Grid, float, float]:
    """Return the grid, the charged sensitivity and the standard deviation in front of the mechanism's rows."""
    found = _served(policy, mechanism, num_parameters, policy.mu)
    if found is not None:
        return found
    low = high = policy.mu
    while _served(policy, mechanism, num_parameters, high) is None:
        low, high = high, 2.0 * high
        if math.isinf(high):
            raise ConfigurationError(
                f"Expected a finite noise level, got {policy.mu:g} for mu.",
                kind="out-of-range",
                setting="mu",
                got=policy.mu,
            )
    for _ in range(20):
        middle = math.sqrt(low * high)
        served = _served(policy, mechanism, num_parameters, middle) is not None
        low, high = (low, middle) if served else (middle, high)
    raise ConfigurationError(
        f"Expected mu >= {high * 1.002:.4g} for {policy.max_participations} releases of {num_parameters:,} values, got "
        f"{policy.mu:g}: a grid fine enough for the clip would be finer than 2^{math.log2(FINEST_GRID):.0f} of the "
        "noise, where the normals' resolution shows. Raise mu, or lower max_participations or the model's size.",
        kind="out-of-range",
        setting="mu",
        got=policy.mu,
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
def _ledger_terms(policy: PrivacyPolicy, num_parameters: int) -> str:
    plan = policy.plan(num_parameters)
    noise = {
        "num_parameters": num_parameters,
        "sensitivity": plan.sensitivity,
        "noise_std": plan.noise_std,
        "spacing": plan.grid.spacing,
        "noise_version": NOISE_VERSION,
    }
    return json.dumps({**_settled(policy), "mechanism_options": dict(policy.mechanism_options), **noise}, default=repr)


def check_federation(policy: PrivacyPolicy, clients: int) -> None:
    """Raise if a federation has more clients than the policy's noise accounts for.

    A plan pays for the normals of 2^11 clients. A sample in several releases of one chain may meet as many in each of
    its sums (docs/proofs/secure-aggregation.md, step 15).
    """
    returns = policy.release_mode == "cumulative" and policy.participations > 1
    if policy.trust == "secure-aggregation" and returns and clients > MOST_SUMMED:
        raise ConfigurationError(
            f"Expected at most {MOST_SUMMED} clients under secure aggregation where samples return in releases that "
            f"build on each other, got {clients}: use every sample once (passes = 1), or fewer clients.",
            kind="out-of-range",
            setting="clients",
            got=clients,
        )


def check_sums(policy: PrivacyPolicy) -> None:
    """Raise if numbers of clients make no sense, or if helpers could not tell releases apart."""
    sums = policy.sums
    if not isinstance(sums, SumAssumption):
        raise ConfigurationError(f"Expected {OF_SUMS}, got {sums!r}.", kind="wrong-type", setting="sums")
    check_count("min_honest", sums.min_honest)
    check_count("min_cohort", sums.min_cohort)
    if policy.trust != "secure-aggregation":
        if sums != NOTHING_ASSUMED or policy.budget_local_mu is not None:
            raise ConfigurationError(
                "Expected sums and budget_local_mu only with trust 'secure-aggregation', got "
                f"{sums} and {policy.budget_local_mu!r} with {policy.trust!r}.",
                kind="conflict",
                setting="sums",
            )
        return
    if not sums.min_honest <= sums.min_cohort <= MOST_SUMMED:
        raise ConfigurationError(
            f"Expected min_honest <= min_cohort <= {MOST_SUMMED}, got {sums.min_honest} and {sums.min_cohort}: "
            "min_cohort is the honest clients of a sum and those that may work with the server.",
            kind="out-of-range",
            setting="min_honest",
            got=sums.min_honest,
        )
    alone = noise_is_memoryless(policy.mechanism) or policy.mechanism == NO_NOISE
    if policy.release_rule == "paper" and not alone:
        raise ConfigurationError(
            "Expected release_rule 'acknowledged' under secure aggregation, or the mechanism 'independent', got "
            f"{policy.release_rule!r} with {policy.mechanism!r}: a helper opens a correlated release only if it is "
            "built on the last one that was opened.",
            kind="conflict",
            setting="release_rule",
            got=policy.release_rule,
        )
    shares = dict(policy.mechanism_options).get("shares", "uniform")
    if shares != "uniform":
        raise ConfigurationError(
            f"Expected shares 'uniform' under secure aggregation, got {shares!r}: clients of one sum may have "
            "made different numbers of releases, and each counts on the others' noise being as large as its own.",
            kind="conflict",
            setting="shares",
            got=shares,
        )
    if policy.budget_local_mu is not None:
        check_positive("budget_local_mu", policy.budget_local_mu)


def check_own_noise(policy: PrivacyPolicy) -> None:
    """Raise if the client trusts a server with its noise, and no server here can make it."""
    if policy.trust == "trusted-server":
        raise ConfigurationError(
            f"Expected trust one of {TRUST_MODELS[:2]}, got {policy.trust!r}: this client's noise is its own.",
            kind="unknown-name",
            setting="trust",
            got=policy.trust,
        )


def check_sampling(policy: PrivacyPolicy) -> None:
    """Raise if batches are sampled with no rate, or a rate is there for nothing, or nobody could hide the batches."""
    rate = policy.sampling_rate
    if policy.batch_selection != "poisson":
        if rate != 0.0:
            raise ConfigurationError(
                f"Expected sampling_rate only with batch_selection 'poisson', got {rate!r} with "
                f"{policy.batch_selection!r}.",
                kind="conflict",
                setting="sampling_rate",
                got=rate,
            )
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 < rate <= 1.0:
        raise ConfigurationError(
            f"Expected 0 < sampling_rate <= 1 with batch_selection 'poisson', got {rate!r}.",
            kind="out-of-range",
            setting="sampling_rate",
            got=rate,
        )
    object.__setattr__(policy, "sampling_rate", float(rate))
    # Moments and rows without negative entries are not opposite to each other, which the account is of.
    wanted = {"trust": "trusted-server", "release_rule": "paper", "clip_unit": "sample"}
    for name, expected in wanted.items():
        if (value := getattr(policy, name)) != expected:
            raise ConfigurationError(
                f"Expected {name} {expected!r} with batch_selection 'poisson', got {value!r}.",
                kind="conflict",
                setting=name,
                got=value,
            )
    if not (noise_is_memoryless(policy.mechanism) or policy.mechanism == NO_NOISE):
        raise ConfigurationError(
            f"Expected mechanism 'independent' with batch_selection 'poisson', got {policy.mechanism!r}: what "
            "correlated noise hides of a secret batch is not accounted for.",
            kind="conflict",
            setting="mechanism",
            got=policy.mechanism,
        )


def check_moments(policy: PrivacyPolicy) -> None:
    """Raise if only some of what moments need is there; :attr:`PrivacyPolicy.bound` refuses what they cannot be."""
    if policy.clip_unit != "moments":
        if (policy.classes, policy.class_weight) != (0, 1.0):
            raise ConfigurationError(
                "Expected classes and class_weight only with clip_unit 'moments', got "
                f"{policy.classes} and {policy.class_weight} with {policy.clip_unit!r}.",
                kind="conflict",
                setting="classes",
                got=policy.classes,
            )
        return
    if policy.batch_selection != "full_batch":
        raise ConfigurationError(
            f"Expected batch_selection 'full_batch' with clip_unit 'moments', got {policy.batch_selection!r}.",
            kind="conflict",
            setting="batch_selection",
            got=policy.batch_selection,
        )


def check_owners(policy: PrivacyPolicy) -> None:
    """Raise if samples are grouped by owner but not clipped by row."""
    held = policy.samples_per_owner
    if isinstance(held, bool) or not isinstance(held, int) or held < 0:
        raise ConfigurationError(
            f"Expected samples_per_owner to be an integer >= 0, got {held!r}.",
            kind="out-of-range",
            setting="samples_per_owner",
            got=held,
        )
    if held and policy.clip_unit != "sample":
        raise ConfigurationError(
            f"Expected clip_unit 'sample' with samples_per_owner, got {policy.clip_unit!r}: what is clipped is one row "
            "of gradients an owner.",
            kind="conflict",
            setting="clip_unit",
            got=policy.clip_unit,
        )


def check_owned(policy: PrivacyPolicy, samples: Any) -> None:
    """Raise unless samples are grouped by owner just as the policy says."""
    held = getattr(samples, "samples_per_owner", 0)
    if policy.samples_per_owner != held:
        raise ConfigurationError(
            f"Expected samples grouped by owner, at most {policy.samples_per_owner} of each, as the policy says, got "
            f"{f'at most {held} of each' if held else 'samples by themselves'}: group them with OwnedSamples, and set "
            "samples_per_owner of the policy to the same number (0 for samples by themselves).",
            kind="mismatch",
            setting="samples_per_owner",
        )
