r"""Whether a model will be more than noise, forecast before its first round from public numbers alone.

All releases of a training add up to a path from the first model to the last one. Clipping bounds how long that path
can be, the noise on it is known, and their ratio

    noise / longest = sqrt(d) * tau / (sqrt(M) * k * L)

says what the model will be made of: d values, M clients of k releases each, none of which is longer than L, and tau
the standard deviation of the noise in one value of what one client releases in all. For updates clipped to S, with
all of a client's data protected, it is 2 sqrt(d / M) / mu, whatever k and S are; for full batches of N samples on M
clients 2 sqrt(d M) / (N mu). Under secure aggregation, with h honest clients of each sum, it is 1 / sqrt(h) of that.

No training uses the whole length that clipping allows: updates are shorter than the clip and point in different
directions. Which part of it a typical training uses (:data:`TYPICAL`), and what is left of what it learns
(:func:`kept_share`), are **estimates**, measured on small trainings whose noise was varied: docs/swap-in.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .. import protocol
from ..mechanisms import noise_is_memoryless
from ..mechanisms.mechanism import Mechanism
from ..release.policy import CLIP_UNITS, ClipUnit, PrivacyPolicy
from ..release.shuffled_privatizer import ShuffledPolicy
from .gdp import gdp_epsilon
from .noise_plan import NoisePlan

_SHORTEST_RELEASE, _LARGEST_NOISE = 1e-150, 1e100
"""A client that states something else states nothing: squares and quotients of these are finite."""
_LARGEST_RATIO = 1e50
"""Largest ratio of the noise to the path. If it or its inverse is larger, clients state what none has."""


@dataclass(frozen=True)
class StatedNoise:
    """Public numbers, stated by one client, that a forecast needs.

    Parameters
    ----------
    longest : float
        L: no contribution to a release is longer.
    noise : float
        The standard deviation of one value of the noise in all of its releases together.
    releases : int
        K, how many these are.
    mu, delta : float
        The guarantee of all of them.
    clip_unit, unit, trust : str
        As in the client's :class:`~murmurfl.privacy.PrivacyPolicy`.
    honest : int
        Under secure aggregation, h; else 1.
    alone : bool
        Whether each release has noise of its own, so that fewer releases have less in them.

    Examples
    --------
    >>> stated = StatedNoise(longest=1.0, noise=4.0, releases=5, mu=1.0, delta=1e-5)
    >>> stated.after(5), round(stated.after(1), 3)
    (4.0, 1.789)
    """

    longest: float
    noise: float
    releases: int
    mu: float
    delta: float
    clip_unit: ClipUnit = "sample"
    unit: str = "sample"
    trust: str = "untrusted-server"
    honest: int = 1
    alone: bool = True

    @classmethod
    def read(cls, statement: Mapping[str, Any]) -> StatedNoise | None:
        """Return the numbers in a client's statement; None if it says too little."""
        longest, noise = (_size(statement.get(key)) for key in (protocol.LONGEST_RELEASE, protocol.NOISE_IN_ALL))
        mu, delta = _size(statement.get("mu-guaranteed")), statement.get("delta")
        releases, honest = _count(statement.get("max-participations")), _count(statement.get(protocol.MIN_HONEST, 1))
        if longest is None or noise is None or mu is None or releases is None or honest is None:
            return None
        if not (_SHORTEST_RELEASE <= longest <= _LARGEST_NOISE and noise <= _LARGEST_NOISE):
            return None
        if not isinstance(delta, float) or not 0 < delta < 1:
            return None
        words = {key: str(statement.get(key, "")) for key in (protocol.CLIP_UNIT, "unit", "trust", "mechanism")}
        units: dict[str, ClipUnit] = {one: one for one in CLIP_UNITS}
        return cls(
            longest,
            noise,
            releases,
            mu,
            delta,
            clip_unit=units.get(words[protocol.CLIP_UNIT], "sample"),
            unit=words["unit"] if words["unit"] in ("client", "owner") else "sample",
            trust=words["trust"] or "untrusted-server",
            honest=honest,
            alone=noise_is_memoryless(words["mechanism"]),
        )

    def after(self, releases: float) -> float:
        """Return the noise in so many releases; for correlated noise no less than in all of them."""
        return self.noise * math.sqrt(min(releases / self.releases, 1.0)) if self.alone else self.noise


def _size(value: Any) -> float | None:
    """Return a stated number that is not negative, which may be infinite; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value >= 0 else None


def _count(value: Any) -> int | None:
    """Return a stated number of at least one thing; None for anything else."""
    return value if isinstance(value, int) and value >= 1 else None


def stated_noise(policy: PrivacyPolicy, plan: NoisePlan, num_samples: int) -> dict[str, float | str]:
    """Return the entries of a client's statement that a forecast is made from.

    Nothing in it depends on data but ``num_samples``, which is public.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> stated_noise(policy, policy.plan(3), num_samples=100)["longest-release"]
    1.0
    """
    releases, steps = plan.mechanism.num_releases, 1
    longest = policy.bound.longest
    if isinstance(policy, ShuffledPolicy):
        steps = policy.steps  # a release is the sum of clipped steps, each with noise of its own
        longest *= steps
    elif policy.batch_selection == "full_batch":
        longest *= num_samples
    elif policy.batch_selection == "poisson":
        longest *= num_samples * policy.sampling_rate  # on average
    elif policy.batch_selection == "shuffled":  # on average over the releases: each sample is in one of them
        longest *= num_samples / (releases * policy.batch_size)
    noise = plan.noise_std * plan.mechanism.row_std(releases) * math.sqrt(steps)
    return {
        protocol.LONGEST_RELEASE: longest,
        protocol.NOISE_IN_ALL: noise,
        # The steps of an epoch are gradients.
        protocol.CLIP_UNIT: "sample" if steps > 1 else policy.clip_unit,
    }


def lasting_noise(mechanism: Mechanism, streams: Iterable[tuple[int, Iterable[Sequence[int]]]]) -> float:
    """Variance of the noise in a sum of streams that misses releases, over that of the whole sum.

    Parameters
    ----------
    mechanism : Mechanism
        Whose noise it is, of at least one stream.
    streams : iterable of tuples
        Of each stream the last release that was added up, >= 1, and (a, k) for each P_k - P_a that is missing.

    Examples
    --------
    >>> from murmurfl.privacy import make_mechanism
    >>> cancelling = make_mechanism("cancelling", 9)
    >>> skips = [], [(3, 4)], [(3, 4), (6, 7)], [(3, 4), (4, 5)]
    >>> [round(lasting_noise(cancelling, [(9, one)])) for one in skips]
    [1, 3, 5, 3]
    """
    streams = list(streams)
    decoder = mechanism.decoder(max(last for last, _ in streams))
    rows = np.vstack([np.zeros_like(decoder[:1]), decoder])
    found = whole = 0.0
    for last, missing in streams:
        left = rows[last] - sum(rows[k] - rows[a] for a, k in missing)
        found, whole = found + float(left @ left), whole + float(rows[last] @ rows[last])
    return found / whole


Verdict = Literal["useful", "noisy", "useless"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

TYPICAL: Mapping[ClipUnit, float] = {
    "update": 0.7,
    "contractive": 0.3,
    "sample": 0.15,
    "nonnegative": 0.5,
    "moments": 0.5,
}
"""Part of the longest path that a typical training uses, by what is clipped: an estimate. Updates of a client agree
with each other far more than gradients do, which shrink while a training goes on."""

USEFUL_SHARE, LEAST_SHARE = 0.5, 0.25
"""A run is called useful if it keeps half of what can be learnt, in the middle of what is rehearsed, and useless if it
does not keep a quarter."""
MOST_USEFUL = 1.0
"""Largest ratio of the noise to a typical update at which a training is called useful: it keeps nine tenths."""
LEAST_USELESS = 5.0
"""Ratio above which a training is called useless: it keeps a quarter, or nothing."""
_HALF_LEFT = 3.0
"""The ratio at which half of what a training learns is left."""
WARNED = 1.0
"""Ratio of the noise to the *longest* update above which there is a warning, whatever a typical one is."""
_SAMPLES = 100
"""Samples of a client, where nobody says how many there are."""
_LEAST_HONEST = 2
_FEWEST_VALUES = 10


def kept_share(ratio: float) -> float:
    """Return the share of what a training learns that is left at a ratio of noise to a typical update: an estimate.

    It is of the accuracy above that of always naming the most frequent class; a curve through what small trainings
    kept, and no bound.

    Examples
    --------
    >>> [round(kept_share(ratio), 2) for ratio in (0.0, 1.0, 3.0, 9.0)]
    [1.0, 0.9, 0.5, 0.1]
    """
    return 1.0 / (1.0 + (ratio / _HALF_LEFT) ** 2)


ChangeKind = Literal["sample", "sums", "both", "clients", "samples", "parameters", "epsilon"]


class Change(NamedTuple):
    """A change that would lessen the noise.

    Parameters
    ----------
    kind : str
        What is changed: ``sample`` protects one sample in place of all of a client's, ``sums`` is secure aggregation
        with half of the clients honest, ``both`` is the two together, and the others change that number.
    ratio : float
        The ratio of noise to a typical update that it would lead to.
    amount : float
        The new number; of ``samples`` how many times as many.
    """

    kind: ChangeKind
    ratio: float
    amount: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """Forecast of how much of a training's model is noise, as far as public numbers tell.

    The ratio to the longest update is arithmetic on what clients state; everything about a typical update is an
    estimate, and called one. No data are looked at. It has figures alone; :mod:`murmurfl.privacy.forecast_text` says
    them to people.

    Parameters
    ----------
    ratio : float
        The noise in the average of all releases over the longest that average could be.
    num_parameters, clients, per_round, rounds : int
        d, M, m and T.
    mu, delta : float
        The largest mu that a client guarantees, and where epsilon is shown.
    clip_unit, unit, trust, honest, alone
        As for :class:`StatedNoise`.
    samples : int
        Samples of a client, where they are known; else 0.
    rehearsed : tuple of float, optional
        Between which shares of what can be learnt the very run is likely to keep, by made-up data of its shape; then
        ``kept`` and ``verdict`` are of these.

    Examples
    --------
    >>> forecast = Forecast(ratio=0.1, num_parameters=650, clients=50, per_round=50, rounds=20, mu=1.0, delta=1e-5)
    >>> forecast.is_warning, round(forecast.typical_ratio, 2), round(forecast.kept, 2)
    (False, 0.14, 1.0)
    """

    ratio: float
    num_parameters: int
    clients: int
    per_round: int
    rounds: int
    mu: float
    delta: float
    clip_unit: ClipUnit = "update"
    unit: str = "client"
    trust: str = "untrusted-server"
    honest: int = 1
    alone: bool = True
    samples: int = 0
    rehearsed: tuple[float, float] | None = None

    @property
    def typical_ratio(self) -> float:
        """The noise over a typical update, an estimate."""
        return self.ratio / TYPICAL[self.clip_unit]

    @property
    def kept(self) -> float:
        """The share of what is learnt without noise that is likely to be left, an estimate (:func:`kept_share`)."""
        return kept_share(self.typical_ratio) if self.rehearsed is None else sum(self.rehearsed) / 2

    @property
    def verdict(self) -> Verdict:
        """``useful``, ``noisy`` or ``useless``, by the rehearsal, or else by the noise over a typical update."""
        if self.rehearsed is not None:
            return "useful" if self.kept >= USEFUL_SHARE else "noisy" if self.kept >= LEAST_SHARE else "useless"
        if self.typical_ratio <= MOST_USEFUL:
            return "useful"
        return "noisy" if self.typical_ratio <= LEAST_USELESS else "useless"

    @property
    def is_warning(self) -> bool:
        """Whether to warn: more noise than the longest update, or a useless model."""
        return (self.ratio > WARNED and self.rehearsed is None) or self.verdict == "useless"

    @property
    def clients_needed(self) -> int:
        """The number of such clients at which it is useful; under sums the same share of them is honest."""
        times = self._excess if self.trust != "untrusted-server" else self._excess**2
        return max(math.ceil(self.clients * times * (1 - 1e-12)), 1)

    @property
    def mu_needed(self) -> float:
        """The mu at which it is useful."""
        return self.mu * self._excess

    @property
    def epsilon_needed(self) -> float:
        """The epsilon at which it is useful, at the same delta."""
        return gdp_epsilon(self.mu_needed, self.delta)

    @property
    def parameters_needed(self) -> int:
        """The largest number of values of a useful model; 0 if one is too many."""
        if not self._excess:
            return self.num_parameters
        return math.floor(self.num_parameters / self._excess**2 * (1 + 1e-12))

    @property
    def _excess(self) -> float:
        """The noise over what a useful model may have; 0 without noise."""
        return self.typical_ratio / MOST_USEFUL

    def changes(self) -> list[Change]:
        """Return changes that would lessen the noise, each by itself, those without a larger epsilon first."""
        found: list[Change] = []
        summed = self.summed()
        if self._excess <= 1 and self.rehearsed is not None:
            return found  # it is not the noise that keeps it from learning
        if self.unit == "client":
            found.append(Change("sample", self.per_sample(), self.samples or _SAMPLES))
        if summed is not None:
            found.append(Change("sums", summed.typical_ratio))
            if self.unit == "client":
                found.append(Change("both", summed.per_sample()))
        found.append(Change("clients", MOST_USEFUL, self.clients_needed))
        if self.clip_unit == "sample":
            found.append(Change("samples", MOST_USEFUL, max(self._excess, 1.0)))
        if self.parameters_needed >= _FEWEST_VALUES:
            found.append(Change("parameters", MOST_USEFUL, self.parameters_needed))
        if math.isfinite(self.epsilon_needed):  # a simulation may have noise that nothing can be vouched for
            found.append(Change("epsilon", MOST_USEFUL, self.epsilon_needed))
        return found

    def summed(self) -> Forecast | None:
        """Return the forecast with sums only, half of the clients of a round honest; None where that gains nothing."""
        honest = self.per_round // 2
        if self.trust != "untrusted-server" or honest < _LEAST_HONEST:
            return None
        return replace(self, ratio=self.ratio / math.sqrt(honest), trust="secure-aggregation", honest=honest)

    def per_sample(self) -> float:
        """Return the noise over a typical sum of gradients if one sample were protected, not a whole client."""
        return self.ratio / (self.samples or _SAMPLES) / TYPICAL["sample"]

    def document(self) -> dict[str, Any]:
        """Return the figures as plain values; a number that is infinite or that nobody needs is None."""
        return {
            "verdict": self.verdict,
            "warning": self.is_warning,
            "noise_over_longest": self.ratio,
            "noise_over_typical": self.typical_ratio,
            "typical": TYPICAL[self.clip_unit],
            "kept": self.kept,
            "kept_range": None if self.rehearsed is None else list(self.rehearsed),
            "clients_needed": self.clients_needed,
            "parameters_needed": self.parameters_needed,
            "epsilon_needed": self.epsilon_needed,
        }


def forecast_of(
    stated: Sequence[StatedNoise], *, num_parameters: int, clients: int, per_round: int, rounds: int, samples: int = 0
) -> Forecast | None:
    """Forecast a training from what its clients state; None if nobody adds noise, or what they state makes no sense.

    Parameters
    ----------
    stated : sequence of StatedNoise
        Of some clients or all: the others are taken to be like them.
    num_parameters, clients, per_round, rounds : int
        d, M, m and T: values of a release, clients in all and in a round, and rounds.
    samples : int
        Of a client, where they are known.

    Examples
    --------
    >>> from murmurfl.privacy import StatedNoise
    >>> stated = [StatedNoise(longest=1.0, noise=0.2, releases=5, mu=1.0, delta=1e-5)]
    >>> forecast = forecast_of(stated, num_parameters=650, clients=50, per_round=50, rounds=5)
    >>> round(forecast.ratio, 3), forecast.verdict
    (0.144, 'useful')
    """
    if not stated or not any(one.noise for one in stated):
        return None
    # As often as each is asked on average, and never less than once.
    asked = [min(max(rounds * per_round / clients, 1.0), one.releases) for one in stated]
    noise = math.sqrt(sum(one.after(times) ** 2 for one, times in zip(stated, asked, strict=True)) / len(stated))
    path = sum(one.longest * times for one, times in zip(stated, asked, strict=True)) / len(stated)
    most = max(stated, key=lambda one: one.mu)
    asked_clients = min(clients, rounds * per_round)  # of very many clients a short training asks few
    ratio = math.sqrt(num_parameters / asked_clients) * noise / path
    if not 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO:
        return None
    return Forecast(
        ratio=ratio,
        num_parameters=num_parameters,
        clients=clients,
        per_round=per_round,
        rounds=rounds,
        mu=most.mu,
        delta=most.delta,
        clip_unit=most.clip_unit,
        unit=most.unit,
        trust=most.trust,
        honest=min(one.honest for one in stated),
        alone=all(one.alone for one in stated),
        samples=samples,
    )
