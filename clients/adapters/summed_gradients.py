"""Sums of clipped gradients of many samples, none of which is written out (ghost clipping), for large PyTorch models.

A program whose gradients have factors (:mod:`.torch_graph`) computes a batch of records at once: their norms, and then
the sum of their gradients, each times its scale (:class:`.replay.SummedBatch`). Which models have such programs follows
from shapes alone, and so does how many records are in a batch.

A record must change nothing but its own part of a sum, whatever it does to the computation. A batch that fails for one
record is therefore computed anew, record by record, each in a batch of copies of itself, and one that still fails
counts as zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import OF_DATA, InvalidRecordError, is_interrupt
from .per_sample_gradients import LEAST_TOGETHER, MOST_TOGETHER, Need, check_memory
from .replay import MOST_ROWS_TOGETHER, UnfitRecordError
from .replay_process import Program

logger = logging.getLogger(__name__)

Record = Sequence[NDArray[Any]]
"""The arrays of one record."""
ScalesOf = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Given the norms of a batch, the factors of its gradients."""
SumOfBatch = Callable[[list[NDArray[Any]], ScalesOf], NDArray[np.float64]]
"""Given the stacked arrays of a batch of records, the sum of its scaled gradients. It raises InvalidRecordError if that
cannot be computed."""

_ROWS_TOGETHER = 1 << 10
"""Rows of factors of a batch: more are no faster, and take more memory than an ordinary step."""


def has_factors(program: Program) -> bool:
    """Return True if a program's gradients can be summed without being written out."""
    return program.content.get("factors") is not None


def records_together(program: Program, memory_mib: float) -> int:
    """Return how many records of a program with factors are computed together, from shapes alone.

    As many as fit into the memory next to the sum, but no more than are useful.
    """
    width = sum(math.prod(shape) for shape, _ in program.results)
    need = _need(program)
    fitting = int((check_memory(memory_mib) * 2**20 - 16 * width - need.fixed) // need.a_sample)
    rows: int = program.content["factors"]["rows"]
    useful = min(max(_ROWS_TOGETHER // rows, LEAST_TOGETHER), MOST_ROWS_TOGETHER // rows, MOST_TOGETHER)
    return max(min(fitting, useful), 1)


def _need(program: Program) -> Need:
    """Return what made-up records need, whose values are no record's; more where they cannot be computed."""
    runnable = program.runnable

    def compute(count: int) -> None:
        batch = runnable.batch(*runnable.made_up(count))
        batch.norms()
        batch.scaled_sum(np.ones(count))

    try:
        return Need.measured(compute)
    except (IndexError, RuntimeError):  # an index that is computed
        return Need(0, program.memory or 1 << 30)


def sum_of_batch(program: Program, point: list[Any]) -> SumOfBatch:
    """Return what computes batches in this process, at parameters that are tensors, for simulations."""
    runnable = program.runnable

    def compute(records: list[NDArray[Any]], scales_of: ScalesOf) -> NDArray[np.float64]:
        try:
            batch = runnable.batch(point, runnable.stacked(records))
        except (IndexError, RuntimeError, UnfitRecordError) as error:
            raise InvalidRecordError("a batch that cannot be computed") from error
        return batch.scaled_sum(scales_of(batch.norms()))

    return compute


class SummedGradients:
    """Gradients of many samples, which are clipped and added up batch by batch.

    Parameters
    ----------
    compute : callable
        What computes a batch (``SumOfBatch``).
    read : callable
        Given a sample's place, its arrays; it may raise whatever it likes.
    write : callable
        Given a sample's place, its gradient written out, shape (d,).
    count, together, width : int
        Samples in all, samples of a batch, and d.
    weight : float
        Public factor of every gradient.

    Notes
    -----
    **Formal guarantees.** Norms are as :class:`.replay.SummedBatch` says, so no scaled gradient is longer than its
    bound, and what rounding adds to a sum is within it. What sample i adds to a sum depends on sample i alone, but for
    that rounding. Assumes that PyTorch's operators, mapped over a batch, compute each record from its own values.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(
        self,
        compute: SumOfBatch,
        read: Callable[[int], Record],
        write: Callable[[int], NDArray[np.floating]],
        *,
        count: int,
        together: int,
        width: int,
        weight: float,
    ) -> None:
        self._compute, self._read, self._write = compute, read, write
        self._count, self._together, self._width, self._weight = count, together, width, float(weight)
        self._fits = np.ones(count, dtype=bool)

    def leave_out(self, fits: NDArray[np.bool_]) -> None:
        """Have samples that do not fit count as zero."""
        self._fits = fits

    def norms(self) -> NDArray[np.float64]:
        """Return the norm of every row, enlarged; NaN for one that is not finite or could not be computed."""
        return self.clipped_sum(np.zeros_like)[1]

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of rows, each times its scale; those of scale 0 are left out."""
        return self.clipped_sum(np.ones_like, scales)[0]

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``, shape (d,)."""
        if self._fits[row]:
            np.multiply(self._write(row), self._weight * scale, out=out)
        else:
            out[:] = 0.0

    def clipped_sum(
        self, scales_of: ScalesOf, weights: NDArray[np.float64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sum of rows, each times the scale that follows from its norm, and all norms.

        Rows of which norm or scale is not finite count as zero. ``weights`` lie between 0 and 1.
        """
        total, norms = np.zeros(self._width), np.full(self._count, np.nan)
        for start in range(0, self._count, self._together):
            places = np.arange(start, min(start + self._together, self._count))

            def scales_at(found: NDArray[np.float64], places: NDArray[np.intp] = places) -> NDArray[np.float64]:
                found = abs(self._weight) * found
                norms[places] = found
                with np.errstate(all="ignore"):
                    scales = scales_of(found) * (1.0 if weights is None else weights[places])
                return np.where(np.isfinite(found) & np.isfinite(scales), scales, 0.0) * self._weight

            total += self._of_batch([self._record(place) for place in places.tolist()], scales_at)
        return total, norms

    def _record(self, place: int) -> Record | None:
        """Return a sample's arrays; None if it does not fit, which must not show."""
        if not self._fits[place]:
            return None
        try:
            return self._read(place)
        except InvalidRecordError:
            return None
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A sample could not be read; it counts as zero.", extra=OF_DATA)
            return None

    def _of_batch(self, records: list[Record | None], scales_of: ScalesOf) -> NDArray[np.float64]:
        """Return the sum of a batch; another record stands in for one that does not fit, and is not counted."""
        known = next((one for one in records if one is not None), None)
        if known is None:
            scales_of(np.full(len(records), np.nan))
            return np.zeros(self._width)
        fits = np.array([one is not None for one in records])
        given = [known if one is None else one for one in records]
        try:
            return self._compute(_stacked(given), lambda norms: scales_of(np.where(fits, norms, np.nan)))
        except InvalidRecordError:
            return self._one_by_one(records, scales_of)

    def _one_by_one(self, records: list[Record | None], scales_of: ScalesOf) -> NDArray[np.float64]:
        """Return the sum of a batch that failed, of each record in a batch of copies of itself."""
        logger.warning("A batch of samples could not be computed; each is computed alone.", extra=OF_DATA)
        norms = np.full(len(records), np.nan)
        total = np.zeros(self._width)
        for place, record in enumerate(records):
            own = np.arange(len(records)) == place

            def scales_at(found: NDArray[np.float64], own: NDArray[np.bool_] = own) -> NDArray[np.float64]:
                norms[own] = found[own]
                return np.where(own, scales_of(np.where(own, found, np.nan)), 0.0)

            try:
                if record is not None:
                    total += self._compute(_stacked([record] * len(records)), scales_at)
            except InvalidRecordError:
                continue
        scales_of(norms)
        return total


def _stacked(records: Sequence[Record]) -> list[NDArray[Any]]:
    return [np.stack(parts) for parts in zip(*records, strict=True)]
