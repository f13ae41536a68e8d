r"""Private evaluation: how many of a client's samples a model gets right, released once and with noise.

Teams without public test data want to know how good their model is. A count of right predictions is of private samples,
so it is a release like any other: of a session of its own, with a share of mu^2, in the same ledger.

**Its row.** A sample gives c, how right the model is about it, from 0 to 1 (0 or 1 where it is right or wrong). With
scores it also gives one of two classes and a score from 0 to 1, for the area under the ROC curve. Its row is

    sqrt(1 - q) (c, 1 - c);    sqrt(q) e_j,

with e_j the unit vector of the sample's class and the bin of its score, B bins a class. Without scores q = 0, and the
second part is left out. No entry is negative and no row is longer than 1.

**Its sensitivity.** The client sets negative entries to zero and cuts longer rows, whatever it is handed
(``clip_unit="nonnegative"``), and two rows without negative entries have no negative product. So replacing one sample
moves the sum by at most sqrt(2), and by that much where a right prediction becomes a wrong one.

**Owners.** Where all samples of an owner are protected as one, the owner's row is the mean of the rows of its samples,
no longer than the longest of them. The client cuts it to 1, so replacing an owner moves the sum by at most 2. Every
owner counts once, however many samples there are of it.

**What is read from it.** The number of samples n is public, so the number of right predictions is (n + (first - second)
/ sqrt(1 - q)) / 2: the two values of a sample add up to a constant, and half of the noise in each is left out.
The number of owners is not public: it is (first + second) / sqrt(1 - q), with noise.

Each figure has a 95 % interval that counts the noise.

**Accuracy.** a = count / n has noise of a known standard deviation s. The n samples are drawn from something in which
a share p of predictions is right. Then (a - p)^2 <= z^2 (p (1 - p) / n + s^2) holds for about 95 % of all outcomes,
z = 1.96, and the interval has every p for which it does: Wilson's interval, with noise beside the sampling. Without the
sampling it is a +- z s, for these very samples. Where clients draw from different sources, p (1 - p) / n is more than
the variance, so that the interval is not too short.

**Accuracy of owners.** F = first / sqrt(1 - q) and n = (first + second) / sqrt(1 - q) both have noise, of F - p n with
the variance s^2 ((1 - p)^2 + p^2), s that of F. The interval has every p with (F - p n)^2 <= z^2 (n p (1 - p) + s^2
((1 - p)^2 + p^2)): Fieller's interval for a ratio, with the sampling of owners, whose shares from 0 to 1 have a
variance of at most p (1 - p). If the noise hides n, it is all of 0 to 1.

**AUC.** Scores are known in bins, and two scores in one bin count half. With the classes' noisy counts C_0 and C_1

    A = sum_b C_1[b] (C_0[0] + ... + C_0[b - 1] + C_0[b] / 2) / (|C_0| |C_1|),

whose noise follows from its derivatives with respect to each count, and from what products of two noises add to the
numerator. The variance of the sampling is at most A (1 - A) / min(|C_0|, |C_1|) (van Dantzig 1951), ties or not, which
is what is counted. With owners |C_0| and |C_1| are sums of shares, and the bound is the same: an owner's part is a mean
over its samples, and the square of a mean is at most the mean of the squares.

A private count is the simpler query: for how many of a client's samples something holds. A sample's row is 1/2 or
-1/2, so replacing one moves the sum by 1 and no more. Half the public number of samples is added where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..errors import ConfigurationError
from ..release.ledgered_privatizer import Release
from ..release.policy import PrivacyPolicy
from ..release.prefix_sums import Privatizer
from .query import ClipUnit, Query, QuerySum, mean_over_owners, query_policy


def counting_policy(mu: float = 0.0, **fields: Any) -> PrivacyPolicy:
    """Return the policy of a client that releases one count, of this mu, over all of its samples.

    ``fields`` are others of :class:`~murmurfl.privacy.PrivacyPolicy`: who is trusted, budgets, delta, quality of the
    noise.

    Notes
    -----
    **Formal guarantees.** The count is mu-GDP for replacement of one sample: rows are cut to 1/2, so Delta = 1.
    Proof: docs/proofs/sensitivities.md.
    """
    return query_policy(0.5, "sample", mu, **fields)


def release_count(privatizer: Privatizer, session: str, holds: Callable[[slice], NDArray[Any]]) -> Release:
    """Release the number of a client's samples for which ``holds`` is true, with noise, in a session of its own.

    The client has a :func:`counting_policy` and one parameter.

    Raises
    ------
    RefusedError
        If cap or budget forbid it. Nothing was released or spent.

    Notes
    -----
    **Formal guarantees.** Under the trust of the client's policy the count is mu-GDP for replacement of one sample,
    whatever ``holds`` gives for a sample, and the ledger has it before it is returned.
    Proof: docs/proofs/sensitivities.md.
    """
    return privatizer.release(session, 0, lambda samples: np.asarray(holds(samples), dtype=np.float64)[:, None] - 0.5)


def counted(releases: Iterable[Release]) -> tuple[float, int]:
    """Return the noisy count over all clients, and the samples it is of."""
    total, samples = 0.0, 0
    for release in releases:
        total += float(release.values[0]) + release.samples / 2
        samples += release.samples
    return total, samples


EVALUATION_SHARE = 0.05
"""The share of mu^2 that an evaluation is given by default."""
SCORES_SHARE = 0.5
"""The share of an evaluation's mu^2 that is for the histograms of scores, where there are some."""

MOST_BINS = 1024


@dataclass(frozen=True)
class Measured:
    """Evaluation of a model on a batch of samples; row i of each array is of sample i alone.

    Parameters
    ----------
    right : ndarray of shape (samples,)
        From 0 to 1: whether the prediction is right, or how good it is.
    score : ndarray of shape (samples,), optional
        From 0 to 1: how sure the model is of class 1, where there are two classes.
    positive : ndarray of shape (samples,), optional
        Whether the sample's class is 1.

    Examples
    --------
    >>> import numpy as np
    >>> measured = Measured(right=np.array([1.0, 0.0]), score=np.array([0.9, 0.6]), positive=np.array([True, False]))
    >>> float(measured.right.mean())
    0.5
    """

    right: NDArray[Any]
    score: NDArray[Any] | None = None
    positive: NDArray[Any] | None = None


_ROUNDING = 1e-9


@dataclass(frozen=True)
class EvaluationRows(Query["EvaluationResult"]):
    """The query of a private evaluation: the rows that it adds up, and the figures read from their sum.

    ``bins`` is B, bins of scores for each of two classes, 0 where scores are not counted; ``scores_share`` is q, the
    scores' share of mu^2. ``of_owners`` says on a client whether a row is an owner's, and a client's reply tells it to
    the server.

    Notes
    -----
    **Formal guarantees.** Row i depends on sample i alone. Its length is for the client to bound
    (:func:`evaluation_policy`).

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import Measured
    >>> EvaluationRows().rows(Measured(np.array([True, False]))).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    name: ClassVar[str] = protocol.OF_EVALUATION
    what: ClassVar[str] = "the evaluation"
    setting: ClassVar[str] = "an evaluation"
    policy_maker: ClassVar[str] = "evaluation_policy"
    of_client: ClassVar[str] = "a private evaluation of the model, which it releases last"
    of_client_if_trusted: ClassVar[str] = "how good a model is on its samples after them"
    not_configured: ClassVar[str] = "this client is not configured for private evaluation: it releases no count"
    at_a_model: ClassVar[bool] = True
    per_owner: ClassVar[bool] = True

    bins: int = 0
    scores_share: float = SCORES_SHARE
    of_owners: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, int) or not 0 <= self.bins <= MOST_BINS:
            raise ConfigurationError(
                f"Expected bins to be an integer from 0 to {MOST_BINS}, got {self.bins!r}.",
                kind="out-of-range",
                setting="bins",
                got=self.bins,
            )
        if self.bins == 1:
            raise ConfigurationError(
                "Expected at least 2 bins of scores, or 0 for none, got 1: it would tell nothing.",
                kind="out-of-range",
                setting="bins",
            )
        if not 0 < self.scores_share < 1:
            raise ConfigurationError(
                f"Expected a share of mu^2 above 0 and below 1 for scores, got {self.scores_share!r}.",
                kind="out-of-range",
                setting="scores_share",
                got=self.scores_share,
            )

    @property
    def width(self) -> int:
        """Values of a row."""
        return 2 + 2 * self.bins

    @property
    def bound(self) -> tuple[float, ClipUnit]:
        """No row is longer than 1, and none has a negative entry."""
        return 1.0, "nonnegative"

    @property
    def right_weight(self) -> float:
        """The factor sqrt(1 - q) of whether a sample is right."""
        return math.sqrt(1.0 - self.scores_share) if self.bins else 1.0

    @property
    def score_weight(self) -> float:
        """The factor sqrt(q) of a sample's bin."""
        return math.sqrt(self.scores_share)

    def rows(self, measured: Measured) -> NDArray[np.float64]:
        """Return the row of each sample, shape (samples, ``width``).

        What is not finite counts as wrong, and a score or class that is none is in no bin.

        Notes
        -----
        **Formal guarantees.** Row i depends on row i of what was measured alone.
        """
        right = np.nan_to_num(np.asarray(measured.right, dtype=np.float64).ravel(), nan=0.0, posinf=0.0, neginf=0.0)
        right = np.clip(right, 0.0, 1.0)
        rows = np.zeros((len(right), self.width))
        rows[:, 0], rows[:, 1] = self.right_weight * right, self.right_weight * (1.0 - right)
        if self.bins and measured.score is not None and measured.positive is not None:
            score = np.asarray(measured.score, dtype=np.float64).ravel()
            classes = np.asarray(measured.positive, dtype=np.float64).ravel()
            known = np.isfinite(score) & ((classes == 0.0) | (classes == 1.0))
            bins = np.clip(np.where(known, score, 0.0) * self.bins, 0, self.bins - 1).astype(np.int64)
            columns = 2 + self.bins * np.where(known, classes, 0.0).astype(np.int64) + bins
            rows[np.flatnonzero(known), columns[known]] = self.score_weight
        return rows

    def rows_of_owners(self, rows: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the mean of each owner's rows."""
        return mean_over_owners(rows, present)

    def read(self, found: QuerySum) -> EvaluationResult:
        """Return the figures of a model."""
        common: dict[str, Any] = {
            "samples": found.samples,
            "clients": found.clients,
            "held_out": all(held_out for _, held_out, _ in found.facts),
            "histograms": self.histograms(found.total) if self.bins else None,
            "histogram_std": self.histogram_std(found.noise_std) if self.bins else 0.0,
        }
        if any(of_owners for *_, of_owners in found.facts):  # read like this, a client of samples counts right too
            std = found.noise_std / self.right_weight
            right, wrong = (float(one) / self.right_weight for one in found.total[:2])
            return EvaluationResult(right, std, owners=right + wrong, **common)
        return EvaluationResult(
            self.right(found.total, found.samples),
            self.right_std(found.noise_std),
            silent=self.silent(found.total, found.samples),
            silent_std=self.silent_std(found.noise_std),
            **common,
        )

    def entries(self, noise_std: float, *, held_out: bool) -> dict[str, Any]:
        """Return a client's noise, whether it set samples aside, the share of the scores, and whether owners count."""
        shares = {protocol.SCORES_SHARE: float(self.scores_share)} if self.bins else {}
        owners = {protocol.OF_OWNERS: 1} if self.of_owners else {}
        return {**super().entries(noise_std, held_out=held_out), protocol.HELD_OUT: int(held_out), **shares, **owners}

    def facts(self, entries: Mapping[str, Any]) -> list[float] | None:
        """Return a client's noise, whether it set samples aside, and whether owners count; None for what is wrong."""
        noise, held_out = super().facts(entries), entries.get(protocol.HELD_OUT)
        of_owners = entries.get(protocol.OF_OWNERS, 0)
        if noise is None or held_out not in (0, 1) or of_owners not in (0, 1):
            return None
        share = entries.get(protocol.SCORES_SHARE)
        if self.bins and not (isinstance(share, float) and abs(share - self.scores_share) <= _ROUNDING):
            return None
        return [*noise, float(held_out), float(of_owners)]

    def settings(self) -> dict[str, Any]:
        """Bins of scores, and their share of mu^2."""
        return {"bins": self.bins, **({"scores_share": self.scores_share} if self.bins else {})}

    def right(self, total: NDArray[np.float64], samples: int) -> float:
        """Return the noisy number of right predictions in a sum of rows of so many samples."""
        return (samples + float(total[0] - total[1]) / self.right_weight) / 2.0

    def silent(self, total: NDArray[np.float64], samples: int) -> float:
        """Return the noisy number of samples that gave no row, which count as half right."""
        return samples - float(total[0] + total[1]) / self.right_weight

    def silent_std(self, noise_std: float) -> float:
        """Return the standard deviation of the noise in :meth:`silent`."""
        return noise_std * math.sqrt(2.0) / self.right_weight

    def right_std(self, noise_std: float) -> float:
        """Return the standard deviation of the noise in :meth:`right`, with ``noise_std`` in every value of the sum."""
        return noise_std / (math.sqrt(2.0) * self.right_weight)

    def histograms(self, total: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the noisy counts of class 0 and class 1 in each bin, shape (2, B)."""
        return total[2:].reshape(2, self.bins) / self.score_weight

    def histogram_std(self, noise_std: float) -> float:
        """Return the standard deviation of the noise in each count of :meth:`histograms`."""
        return noise_std / self.score_weight


def evaluation_policy(mu: float = 0.0, *, mechanism: str = "", **fields: Any) -> PrivacyPolicy:
    """Return the policy of a client's evaluation: every sample's row, once, in a session of its own.

    ``mechanism`` is ``none`` for a simulation without noise; ``fields`` are others of
    :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``budget_mu``, or ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one sample of this client (of all
    samples of one owner by others, where ``fields`` has samples_per_owner), and whatever the session is called, another
    one takes the same from the budget again. It stands alone and takes every sample of the client.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> policy = evaluation_policy(mu=0.5)
    >>> policy.mu, policy.max_participations, policy.clip_unit
    (0.5, 1, 'nonnegative')
    """
    return EvaluationRows().policy(mu, mechanism=mechanism, **fields)


Z_95 = 1.959963984540054
"""Standard deviations that a 95 % interval reaches."""

_SURELY = 4.0
"""Standard deviations of its noise from which a number is reported: by chance once in 30,000 times."""

EVALUATION_FIGURES = (
    *("accuracy", "interval", "noise_interval", "auc", "auc_interval", "auc_noise_interval"),
    *("samples", "owners", "clients", "held_out", "noise_std", "sentence"),
)
"""The names of an evaluation's figures as plain values."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of a model from the noisy sum of an evaluation: post-processing of a release.

    Parameters
    ----------
    right : float
        Right predictions, noise and all.
    right_std : float
        The standard deviation of that noise.
    samples : int
        n, samples in the sum; with owners, the places for them.
    clients : int
        Clients in the sum.
    held_out : bool
        Whether all of them had set those samples aside, so that nobody trained on them.
    histograms : ndarray of shape (2, B), optional
        Samples of class 0 and of class 1 with a score in each bin, noise and all.
    histogram_std : float
        The standard deviation of the noise in each of these.
    silent, silent_std : float
        Samples without a prediction, noise and all, and the noise's standard deviation. Each counts as half right.
    owners : float, optional
        The number of owners with a prediction, noise and all, where each counts once; None where samples are counted.

    Examples
    --------
    >>> found = EvaluationResult(right=912.4, right_std=4.0, samples=1000, clients=10, held_out=True)
    >>> found.accuracy, found.noise_std
    (0.9124, 0.004)
    >>> [round(end, 3) for end in found.interval]
    [0.892, 0.93]
    """

    right: float
    right_std: float
    samples: int
    clients: int
    held_out: bool = False
    histograms: NDArray[np.float64] | None = None
    histogram_std: float = 0.0
    silent: float = 0.0
    silent_std: float = 0.0
    owners: float | None = None

    @property
    def counted(self) -> float:
        """Number of samples or owners that :attr:`accuracy` is a share of; of owners at least 1, whatever the noise."""
        return self.samples if self.owners is None else max(self.owners, 1.0)

    @property
    def accuracy(self) -> float:
        """The share of right predictions, from 0 to 1; with owners, the mean over them of each one's share."""
        return min(max(self.right / self.counted, 0.0), 1.0)

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in :attr:`accuracy`."""
        own = 1.0 if self.owners is None else math.hypot(self.accuracy, 1.0 - self.accuracy)
        return own * self.right_std / self.counted

    @property
    def noise_interval(self) -> Interval:
        """95 % interval of the accuracy on these very samples, for the noise alone."""
        if self.owners is not None:
            return noisy_ratio_interval(self.right, self.owners, self.right_std, sampled=False)
        return _around(self.accuracy, self.noise_std)

    @property
    def interval(self) -> Interval:
        """95 % interval of the accuracy in the population, for noise and sampling."""
        if self.owners is not None:
            return noisy_ratio_interval(self.right, self.owners, self.right_std)
        return noisy_share_interval(self.right / self.samples, self.samples, self.noise_std)

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve, of scores in bins; None without scores, or where the noise hides a class."""
        curve = self._curve
        return None if curve is None else min(max(curve[0], 0.0), 1.0)

    @property
    def auc_noise_interval(self) -> Interval | None:
        """95 % interval of the AUC on these very samples, for the noise alone."""
        curve = self._curve
        return None if curve is None else _around(curve[0], curve[1])

    @property
    def auc_interval(self) -> Interval | None:
        """95 % interval of the AUC in the population; never too short for the sampling."""
        curve = self._curve
        return None if curve is None else _around(curve[0], math.hypot(curve[1], curve[2]))

    @property
    def _curve(self) -> tuple[float, float, float] | None:
        """The AUC, the standard deviation of its noise, and at most that of the sampling."""
        return None if self.histograms is None else noisy_auc(self.histograms, self.histogram_std)

    @property
    def sentence(self) -> str:
        """The figures in words."""
        of = "that were held out" if self.held_out else "that it was trained on"
        clients = f"{self.clients:,} client{'s' * (self.clients != 1)}"
        parts = [
            f"accuracy {100 * self.accuracy:.1f} % (95 % interval {_percent(self.interval)}, noise and sampling; "
            f"noise alone {_percent(self.noise_interval)})"
        ]
        auc, both, alone = self.auc, self.auc_interval, self.auc_noise_interval
        if auc is not None and both is not None and alone is not None:
            parts.append(
                f"AUC {auc:.3f} ({both[0]:.3f} to {both[1]:.3f}; noise alone {alone[0]:.3f} to {alone[1]:.3f})"
            )
        elif self.histograms is not None:
            parts.append("no AUC: the noise hides one of the classes")
        if self.silent > max(_SURELY * self.silent_std, 0.5):
            of += f"; about {self.silent:,.0f} of them could not be evaluated, and count as half right"
        what = f"{self.samples:,} samples"
        if self.owners is not None:
            what = f"about {self.counted:,.0f} owners (each counted once)"
        return f"{', '.join(parts)}, on {what} of {clients} {of}"

    @property
    def document(self) -> dict[str, Any]:
        """The figures as plain values."""
        intervals = self.interval, self.noise_interval, self.auc_interval, self.auc_noise_interval
        plain = [None if interval is None else list(interval) for interval in intervals]
        accuracy, alone, auc, auc_alone = plain
        values = (
            *(self.accuracy, accuracy, alone, self.auc, auc, auc_alone),
            *(self.samples, self.owners, self.clients, self.held_out, self.noise_std, self.sentence),
        )
        return dict(zip(EVALUATION_FIGURES, values, strict=True))


def noisy_share_interval(share: float, samples: int, noise_std: float, z: float = Z_95) -> Interval:
    """Wilson's interval for a share with Gaussian noise, which may lie outside of 0 and 1.

    It has every p with (share - p)^2 <= z^2 (p (1 - p) / samples + noise_std^2), within 0 and 1. A share from outside
    counts as the nearest inside: that leaves no such p out, and what is left is never a single figure.
    """
    share, drawn = min(max(share, 0.0), 1.0), z * z / samples
    middle = share + drawn / 2.0
    reach = math.sqrt(middle * middle - (1.0 + drawn) * (share * share - (z * noise_std) ** 2))
    return _within((middle - reach) / (1.0 + drawn), (middle + reach) / (1.0 + drawn))


def noisy_ratio_interval(
    right: float, count: float, noise_std: float, z: float = Z_95, *, sampled: bool = True
) -> Interval:
    """Fieller's interval for a share of a number that is as noisy as the share's.

    It has every p within 0 and 1 with (right - p count)^2 <= z^2 (count p (1 - p) + noise_std^2 ((1 - p)^2 + p^2)).

    Parameters
    ----------
    right, count : float
        Noisy numbers of right predictions and of all; what is left, ``count`` - ``right``, has noise of its own.
    noise_std : float
        Standard deviation of the noise in either.
    sampled : bool
        Whether the sampling counts, the first term; otherwise it is of these very owners.

    Examples
    --------
    >>> [round(end, 3) for end in noisy_ratio_interval(right=80.0, count=100.0, noise_std=2.0)]
    [0.706, 0.874]
    >>> noisy_ratio_interval(right=3.0, count=4.0, noise_std=5.0)
    (0.0, 1.0)
    """
    noise = (z * noise_std) ** 2
    if count * count <= 2.0 * noise:
        return 0.0, 1.0
    right = min(max(right, 0.0), count)  # noise carries it out
    drawn = z * z * count if sampled else 0.0
    square, linear, constant = (
        count * count + drawn - 2 * noise,
        2 * right * count + drawn - 2 * noise,
        right**2 - noise,
    )
    reach = math.sqrt(max(linear * linear - 4 * square * constant, 0.0))
    return _within((linear - reach) / (2 * square), (linear + reach) / (2 * square))


def noisy_auc(histograms: NDArray[np.float64], noise_std: float, z: float = Z_95) -> tuple[float, float, float] | None:
    """Return the area under the ROC curve of scores in bins, with noise of one standard deviation on every count.

    Parameters
    ----------
    histograms : ndarray of shape (2, B)
        Counts of class 0 and class 1, from the lowest scores on.
    z : float
        Standard deviations of its noise that a class's count must exceed.

    Returns
    -------
    tuple of float or None
        The area, the standard deviation of its noise, and an upper bound on that of the sampling; None where the noise
        hides a class.
    """
    zeros, ones = np.asarray(histograms, dtype=np.float64)
    total_zeros, total_ones = float(zeros.sum()), float(ones.sum())
    bins = len(zeros)
    if min(total_zeros, total_ones) <= max(z * noise_std * math.sqrt(bins), 0.5):
        return None
    below = np.cumsum(zeros) - zeros / 2.0
    above = total_ones - (np.cumsum(ones) - ones / 2.0)
    pairs = total_zeros * total_ones
    area = float(ones @ below) / pairs
    slopes = np.concatenate([below / pairs - area / total_ones, above / pairs - area / total_zeros])
    # Of the products of two noises in the numerator: B (B - 1) / 2 of weight 1 and B of weight 1/2.
    products = noise_std**2 * math.sqrt(bins * (bins - 1) / 2.0 + bins / 4.0) / pairs
    noise = math.hypot(noise_std * float(np.linalg.norm(slopes)), products)
    within = min(max(area, 0.0), 1.0)
    return area, noise, math.sqrt(within * (1.0 - within) / min(total_zeros, total_ones))


def _around(value: float, std: float) -> Interval:
    value = min(max(value, 0.0), 1.0)  # noise carries it out; an interval there would be a single figure
    return _within(value - Z_95 * std, value + Z_95 * std)


def _within(low: float, high: float) -> Interval:
    return min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)


def _percent(interval: Interval) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"
