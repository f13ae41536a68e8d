r"""Private evaluation: how many of a machine's samples a model gets right, released once and with noise.

Teams without public test data want to know how good their model is. A count of right predictions is of private samples,
so it is a release like any other: of a session of its own, with a share of mu^2, in the same ledger.

**Its row.** A sample gives c, how right the model is about it, from 0 to 1 (0 or 1 where it is right or wrong). With
scores it also gives one of two classes and a score from 0 to 1, for the area under the ROC curve. Its row is

    sqrt(1 - q) (c, 1 - c);    sqrt(q) e_j,

with e_j the unit vector of the sample's class and the bin of its score, B bins a class. Without scores q = 0, and the
second part is left out. No entry is negative and no row is longer than 1.

**Its sensitivity.** The machine sets negative entries to zero and cuts longer rows, whatever it is handed
(``clip_unit="nonnegative"``), and two rows without negative entries have no negative product. So replacing one sample
moves the sum by at most sqrt(2), and by that much where a right prediction becomes a wrong one.

**What is read from it.** The number of samples n is public, so the number of right predictions is (n + (first - second)
/ sqrt(1 - q)) / 2: the two values of a sample add up to a constant, and half of the noise in each is left out.

A private count is the simpler query: for how many of a machine's samples something holds. A sample's row is 1/2 or
-1/2, so replacing one moves the sum by 1 and no more. Half the public number of samples is added where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..machine.ledgered_machine import Release
from ..machine.policy import NO_NOISE, PrivacyPolicy
from ..machine.prefix_sums import PrivateMachine
from ..mechanisms import noise_stands_alone

_RELEASED_ONCE: Mapping[str, Any] = {
    "batch_size": 1,
    "max_participations": 1,
    "order": "all",
    "release_rule": "paper",
}


def counting_policy(mu: float = 0.0, **fields: Any) -> PrivacyPolicy:
    """The policy of a machine that releases one count, of this mu, over all of its samples.

    ``fields`` are others of :class:`~murmurfl.privacy.PrivacyPolicy`: who is trusted, budgets, delta, quality of the
    noise.

    Notes
    -----
    **Formal guarantees.** The count is mu-GDP for replacement of one sample: rows are cut to 1/2, so Delta = 1.
    Proof: docs/proofs/sensitivities.md.
    """
    settled = {"clip_norm": 0.5, "mechanism": "independent"}
    return PrivacyPolicy(**{**fields, **_RELEASED_ONCE, **settled, "mu": mu})


def release_count(machine: PrivateMachine, session: str, holds: Callable[[slice], NDArray[Any]]) -> Release:
    """Release the number of a machine's samples for which ``holds`` is true, with noise, in a session of its own.

    The machine has a :func:`counting_policy` and one parameter.

    Raises
    ------
    RefusedError
        If cap or budget forbid it. Nothing was released or spent.

    Notes
    -----
    **Formal guarantees.** Under the trust of the machine's policy the count is mu-GDP for replacement of one sample,
    whatever ``holds`` gives for a sample, and the ledger has it before it is returned.
    Proof: docs/proofs/sensitivities.md.
    """
    return machine.release(session, 0, lambda samples: np.asarray(holds(samples), dtype=np.float64)[:, None] - 0.5)


def counted(releases: Iterable[Release]) -> tuple[float, int]:
    """The noisy count over all machines, and the samples it is of."""
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
    """What a model makes of a batch of samples; row i of each array is of sample i alone.

    Parameters
    ----------
    right : ndarray of shape (samples,)
        From 0 to 1: whether the prediction is right, or how good it is.
    score : ndarray of shape (samples,), optional
        From 0 to 1: how sure the model is of class 1, where there are two classes.
    positive : ndarray of shape (samples,), optional
        Whether the sample's class is 1.
    """

    right: NDArray[Any]
    score: NDArray[Any] | None = None
    positive: NDArray[Any] | None = None


@dataclass(frozen=True)
class EvaluationRows:
    """The rows that an evaluation adds up, and the figures read from their sum.

    ``bins`` is B, bins of scores for each of two classes, 0 where scores are not counted; ``scores_share`` is q, the
    scores' share of mu^2.

    Notes
    -----
    **Formal guarantees.** Row i depends on sample i alone. Its length is for the machine to bound
    (:func:`evaluation_policy`).
    """

    bins: int = 0
    scores_share: float = SCORES_SHARE

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or not isinstance(self.bins, int) or not 0 <= self.bins <= MOST_BINS:
            raise ConfigurationError(f"Expected bins to be an integer from 0 to {MOST_BINS}, got {self.bins!r}.")
        if self.bins == 1:
            raise ConfigurationError("Expected at least 2 bins of scores, or 0 for none, got 1: it would tell nothing.")
        if not 0 < self.scores_share < 1:
            raise ConfigurationError(
                f"Expected a share of mu^2 above 0 and below 1 for scores, got {self.scores_share!r}."
            )

    @property
    def width(self) -> int:
        """Values of a row."""
        return 2 + 2 * self.bins

    @property
    def right_weight(self) -> float:
        """The factor sqrt(1 - q) of whether a sample is right."""
        return math.sqrt(1.0 - self.scores_share) if self.bins else 1.0

    @property
    def score_weight(self) -> float:
        """The factor sqrt(q) of a sample's bin."""
        return math.sqrt(self.scores_share)

    def rows(self, measured: Measured) -> NDArray[np.float64]:
        """The row of each sample, shape (samples, ``width``).

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

    def right(self, total: NDArray[np.float64], samples: int) -> float:
        """Return the noisy number of right predictions in a sum of rows of so many samples."""
        return (samples + float(total[0] - total[1]) / self.right_weight) / 2.0

    def silent(self, total: NDArray[np.float64], samples: int) -> float:
        """Return the noisy number of samples that gave no row, which count as half right."""
        return samples - float(total[0] + total[1]) / self.right_weight

    def silent_std(self, noise_std: float) -> float:
        """The standard deviation of the noise in :meth:`silent`."""
        return noise_std * math.sqrt(2.0) / self.right_weight

    def right_std(self, noise_std: float) -> float:
        """The standard deviation of the noise in :meth:`right`, with ``noise_std`` in every value of the sum."""
        return noise_std / (math.sqrt(2.0) * self.right_weight)

    def histograms(self, total: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the noisy counts of class 0 and class 1 in each bin, shape (2, B)."""
        return total[2:].reshape(2, self.bins) / self.score_weight

    def histogram_std(self, noise_std: float) -> float:
        """The standard deviation of the noise in each count of :meth:`histograms`."""
        return noise_std / self.score_weight


def evaluation_policy(mu: float = 0.0, *, mechanism: str = "", **fields: Any) -> PrivacyPolicy:
    """The policy of a machine's evaluation: every sample's row, once, in a session of its own.

    ``mechanism`` is ``none`` for a simulation without noise; ``fields`` are others of
    :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``budget_mu``, or ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one sample of this machine, and
    whatever the session is called, another one takes the same from the budget again. It stands alone and takes every
    sample of the machine.
    Proof: docs/proofs/sensitivities.md.
    """
    noise = NO_NOISE if mechanism == NO_NOISE else "independent"
    settled = {"clip_norm": 1.0, "mechanism": noise, "clip_unit": "nonnegative"}
    return PrivacyPolicy(**{**fields, **_RELEASED_ONCE, **settled, "mu": mu})


def is_evaluation_policy(policy: PrivacyPolicy) -> bool:
    """Whether :func:`evaluation_policy` can have made a policy."""
    made = (policy.clip_norm, policy.clip_unit, policy.clipping, policy.order, policy.max_participations)
    alone = policy.release_rule == "paper" and (policy.mechanism == NO_NOISE or noise_stands_alone(policy.mechanism))
    return alone and made == (1.0, "nonnegative", "clip", "all", 1)
