"""Full batches, the client's half (ALGORITHMS section 8): the sum of all samples' clipped gradients, every time.

A client gets a point and releases the sum over all of its samples of clipped gradients there, with fresh noise. Every
sample is in every release, so K releases of sensitivity Delta = 2 S with noise sigma are mu-GDP for
mu = Delta sqrt(K) / sigma. A release stands alone: one that is lost is never made up for, nor does it weigh on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError
from ..privacy.mechanisms import noise_is_memoryless
from ..privacy.queries.clipped_share import COUNTED_CLIP_NORM, QUANTILE_SHARE, CountedRows
from ..privacy.release.clipping import DenseContributions, StackedContributions
from ..privacy.release.policy import NO_NOISE, PrivacyPolicy
from .adapters.per_sample_gradients import PerSampleGradients, rows_unmixed, stacked_gradients
from .private_client import PrivateClient


class _CountedContributions:
    """Rows of gradients and marks that are not written out."""

    def __init__(
        self, gradients: StackedContributions, norms: NDArray[np.float64], rows: CountedRows, clip: float
    ) -> None:
        self._gradients = gradients
        self._scales, self._marks = rows.scales(norms, clip), rows.marks(norms, clip)
        with np.errstate(all="ignore"):
            self._norms = np.hypot(self._scales * norms, self._marks)

    def norms(self) -> NDArray[np.float64]:
        return self._norms

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        with np.errstate(all="ignore"):
            self._gradients.write(row, scale * self._scales[row], out[:-1])
        out[-1] = scale * self._marks[row]

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        gradients: Any = self._gradients
        return np.append(gradients.scaled_sum(scales * self._scales), scales @ self._marks)


class _CountedSums:
    """Gradients and marks, which are clipped and summed without being written out."""

    def __init__(self, gradients: Any, rows: CountedRows, clip: float) -> None:
        self._gradients, self._rows, self._clip = gradients, rows, clip
        self.leave_out = gradients.leave_out

    def norms(self) -> NDArray[np.float64]:
        return self._rows_of(self._gradients.norms())[2]

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        gradient = DenseContributions(np.empty((1, len(out) - 1)))
        self._gradients.write(row, 1.0, gradient.rows[0])
        _CountedContributions(gradient, gradient.norms(), self._rows, self._clip).write(0, scale, out)

    def clipped_sum(
        self,
        scales_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
        weights: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sum of rows, each times the scale that follows from its norm, and all norms."""

        def scales_at(norms: NDArray[np.float64]) -> NDArray[np.float64]:
            own, _, lengths = self._rows_of(norms)
            return own * scales_of(lengths)

        total, norms = self._gradients.clipped_sum(scales_at, weights)
        _, marks, lengths = self._rows_of(norms)
        with np.errstate(all="ignore"):
            scales = scales_of(lengths) * (1.0 if weights is None else weights)
        counts = np.isfinite(scales) & np.isfinite(norms)
        return np.append(total, np.where(counts, scales, 0.0) @ marks), lengths

    def _rows_of(self, norms: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """Return factors, marks and lengths of the rows of gradients of these norms."""
        scales, marks = self._rows.scales(norms, self._clip), self._rows.marks(norms, self._clip)
        with np.errstate(all="ignore"):
            return scales, marks, np.hypot(scales * norms, marks)


class CountedGradients:
    """A model's gradients, each row with a mark that says whether it is within the clip C of the query point.

    It takes the place of the model's :class:`~murmurfl.clients.PerSampleGradients`, with one more array, of shape (1,),
    behind the model's: C in a query point, the marks in a release. The marks get this share of mu^2.

    Notes
    -----
    **Formal guarantees.** Row i depends on sample i alone, and the client bounds it whatever C a server sends.

    Examples
    --------
    >>> import numpy as np
    >>> class LeastSquares:
    ...     shapes = [(3,)]
    ...     def __call__(self, parameters, samples):
    ...         features, targets = samples
    ...         return (features @ parameters[0] - targets)[:, None] * features
    >>> counted = CountedGradients(LeastSquares(), share=0.01)
    >>> counted.shapes
    [(3,), (1,)]
    >>> rows = counted([np.zeros(3), np.array([1.5])], (np.eye(3)[:2], np.array([1.0, 2.0])))
    >>> np.sign(rows[:, -1]).tolist()  # the first gradient is within the clip of 1.5, the second is not
    [1.0, -1.0]
    """

    def __init__(self, gradients: PerSampleGradients, share: float = QUANTILE_SHARE) -> None:
        self.rows = CountedRows(share)
        self.model_shapes = [tuple(shape) for shape in gradients.shapes]
        self.shapes = [*self.model_shapes, (1,)]
        self.rows_unmixed = rows_unmixed(gradients)
        self.wrapped = gradients

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.float64]:
        return self._written(self._counted(parameters, DenseContributions(self._of(parameters, samples))))

    def stacked(
        self,
        points: Sequence[Sequence[NDArray[Any]]],
        weights: Sequence[float | NDArray[np.float64]],
        samples: Any,
    ) -> StackedContributions:
        """Rows at one point, of weight 1; in closed form where the model has sums of gradients in closed form."""
        if len(points) != 1 or list(weights) != [1.0]:
            raise ConfigurationError(
                f"Expected gradients at one point, with weight 1, got weights {list(weights)}.",
                kind="unsupported",
                setting="weights",
            )
        made = stacked_gradients(self.wrapped, [points[0][:-1]], weights, samples)
        counted = self._counted(points[0], made)
        return counted if hasattr(made, "scaled_sum") else DenseContributions(self._written(counted))

    @property
    def sums_unwritten(self) -> bool:
        """Whether the model's gradients can be summed without being written out."""
        return bool(getattr(self.wrapped, "sums_unwritten", False))

    def summed(
        self, points: Sequence[Sequence[NDArray[Any]]], weight: float, read: Callable[[int], Any], count: int
    ) -> StackedContributions | None:
        """Return the rows of ``count`` samples, to be clipped and added up (:meth:`.ModuleGradients.summed`)."""
        wrapped: Any = self.wrapped
        made = wrapped.summed([points[0][:-1]], weight, read, count)
        return None if made is None else _CountedSums(made, self.rows, float(points[0][-1][0]))

    def _of(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        return np.asarray(self.wrapped(parameters[:-1], samples), dtype=np.float64)

    def _counted(self, parameters: Sequence[NDArray[Any]], gradients: StackedContributions) -> _CountedContributions:
        return _CountedContributions(gradients, gradients.norms(), self.rows, float(parameters[-1][0]))

    def _written(self, counted: _CountedContributions) -> NDArray[np.float64]:
        rows = np.empty((len(counted.norms()), sum(math.prod(shape) for shape in self.shapes)))
        for i, row in enumerate(rows):
            counted.write(i, 1.0, row)
        return rows


class FullBatchClient(PrivateClient):
    """A client of full batches, for :class:`~murmurfl.strategies.FullBatch`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`. The policy has ``batch_selection="full_batch"``
    (and so a batch of 1), ``clip_unit="sample"``, the mechanism ``independent`` (or ``none``) and
    ``release_rule="paper"``, under which every release stands alone. With :class:`CountedGradients` releases also say
    how many gradients are clipped.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all K releases together are mu-GDP for replacement of one
    sample, for which 2 S sqrt(K) is charged, whatever the number of samples. With ``trust="trusted-server"`` sums leave
    without noise and the guarantee is the server's (:class:`~murmurfl.strategies.TrustedFullBatch`).
    Proof: docs/proofs/returning-samples.md, docs/proofs/sensitivities.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=1, max_participations=5, mu=1.0, mechanism="independent",
    ...     release_rule="paper", batch_selection="full_batch",
    ... )
    >>> client = FullBatchClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.statement("session")["max-participations"]
    5
    """

    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.mechanism != NO_NOISE and not noise_is_memoryless(policy.mechanism):
            raise ConfigurationError(
                f"Expected mechanism 'independent' for full batches, got {policy.mechanism!r}.",
                kind="conflict",
                setting="mechanism",
                got=policy.mechanism,
            )
        for name, expected in (("batch_selection", "full_batch"), ("clip_unit", "sample"), ("release_rule", "paper")):
            if getattr(policy, name) != expected:
                raise ConfigurationError(
                    f"Expected {name} {expected!r} for full batches, got {getattr(policy, name)!r}: every release is "
                    "the sum over all samples, and stands alone.",
                    kind="conflict",
                    setting=name,
                )

    def check_model(self, gradients: PerSampleGradients, policy: PrivacyPolicy) -> None:
        bounded = policy.clip_norm == COUNTED_CLIP_NORM and policy.clipping == "clip"
        if isinstance(gradients, CountedGradients) and not bounded:
            raise ConfigurationError(
                f"Expected clip_norm {COUNTED_CLIP_NORM:g} and clipping 'clip' with CountedGradients, whose rows are "
                f"no longer, got {policy.clip_norm:g} and {policy.clipping!r}.",
                kind="out-of-range",
                setting="clip_norm",
                got=policy.clip_norm,
            )

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """1: the gradient itself."""
        return (1.0,)
