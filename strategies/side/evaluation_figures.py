r"""Accuracy and AUC from an evaluation's noisy sum, each with a 95 % interval that counts the noise.

**Accuracy.** a = count / n has noise of a known standard deviation s. The n samples are drawn from something in which
a share p of predictions is right. Then (a - p)^2 <= z^2 (p (1 - p) / n + s^2) holds for about 95 % of all outcomes,
z = 1.96, and the interval has every p for which it does: Wilson's interval, with noise beside the sampling. Without the
sampling it is a +- z s, for these very samples. Where machines draw from different sources, p (1 - p) / n is more than
the variance, so that the interval is not too short.

**AUC.** Scores are known in bins, and two scores in one bin count half. With the classes' noisy counts C_0 and C_1

    A = sum_b C_1[b] (C_0[0] + ... + C_0[b - 1] + C_0[b] / 2) / (|C_0| |C_1|),

whose noise follows from its derivatives with respect to each count, and from what products of two noises add to the
numerator. The variance of the sampling is at most A (1 - A) / min(|C_0|, |C_1|) (van Dantzig 1951), ties or not, which
is what is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""Standard deviations that a 95 % interval reaches."""

_SURELY = 4.0
"""Standard deviations of its noise from which a number is reported: by chance once in 30,000 times."""

EVALUATION_FIGURES = (
    *("accuracy", "interval", "noise_interval", "auc", "auc_interval", "auc_noise_interval"),
    *("samples", "machines", "held_out", "noise_std", "sentence"),
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
        n, samples in the sum.
    machines : int
        Machines in the sum.
    held_out : bool
        Whether all of them had set those samples aside, so that nobody trained on them.
    histograms : ndarray of shape (2, B), optional
        Samples of class 0 and of class 1 with a score in each bin, noise and all.
    histogram_std : float
        The standard deviation of the noise in each of these.
    silent, silent_std : float
        Samples without a prediction, noise and all, and the noise's standard deviation. Each counts as half right.
    """

    right: float
    right_std: float
    samples: int
    machines: int
    held_out: bool = False
    histograms: NDArray[np.float64] | None = None
    histogram_std: float = 0.0
    silent: float = 0.0
    silent_std: float = 0.0

    @property
    def accuracy(self) -> float:
        """The share of right predictions, from 0 to 1."""
        return min(max(self.right / self.samples, 0.0), 1.0)

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise in :attr:`accuracy`."""
        return self.right_std / self.samples

    @property
    def noise_interval(self) -> Interval:
        """95 % interval of the accuracy on these very samples, for the noise alone."""
        share, reach = self.right / self.samples, Z_95 * self.noise_std
        return _within(share - reach, share + reach)

    @property
    def interval(self) -> Interval:
        """95 % interval of the accuracy in the population, for noise and sampling."""
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
        machines = f"{self.machines:,} machine{'s' * (self.machines != 1)}"
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
        return f"{', '.join(parts)}, on {self.samples:,} samples of {machines} {of}"

    @property
    def document(self) -> dict[str, Any]:
        """The figures as plain values."""
        intervals = self.interval, self.noise_interval, self.auc_interval, self.auc_noise_interval
        plain = [None if interval is None else list(interval) for interval in intervals]
        accuracy, alone, auc, auc_alone = plain
        values = (
            *(self.accuracy, accuracy, alone, self.auc, auc, auc_alone),
            *(self.samples, self.machines, self.held_out, self.noise_std, self.sentence),
        )
        return dict(zip(EVALUATION_FIGURES, values, strict=True))


def noisy_share_interval(share: float, samples: int, noise_std: float, z: float = Z_95) -> Interval:
    """Wilson's interval for a share with Gaussian noise, which may lie outside of 0 and 1.

    It has every p with (share - p)^2 <= z^2 (p (1 - p) / samples + noise_std^2), within 0 and 1.
    """
    drawn = z * z / samples
    middle = share + drawn / 2.0
    square = middle * middle - (1.0 + drawn) * (share * share - (z * noise_std) ** 2)
    if square < 0:  # a share so far outside that no p explains it
        return _within(share, share)
    reach = math.sqrt(square)
    return _within((middle - reach) / (1.0 + drawn), (middle + reach) / (1.0 + drawn))


def noisy_auc(histograms: NDArray[np.float64], noise_std: float, z: float = Z_95) -> tuple[float, float, float] | None:
    """The area under the ROC curve of scores in bins, with noise of one standard deviation on every count.

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
    return _within(value - Z_95 * std, value + Z_95 * std)


def _within(low: float, high: float) -> Interval:
    return min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)


def _percent(interval: Interval) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"
