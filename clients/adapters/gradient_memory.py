"""Per-sample gradients in as much memory as was set aside for them: how many samples fit, and rows in chunks of them.

What one sample needs is measured once, on the first of them: how many bytes of tensors are alive at a time while its
gradient is computed. That depends on the shapes alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import ConfigurationError
from ...privacy.machine.contributions import StackedContributions

if TYPE_CHECKING:
    import torch

GRADIENT_MEMORY_MIB = 512.0
"""What is set aside for gradients unless something else is said."""
MOST_TOGETHER = 128
"""More samples together are no faster."""
_SHARE = 0.95
"""Of the memory, for what grows with the samples; the rest is for what was not seen in one and two of them."""
LEAST_TOGETHER = 4
"""Fewer samples together go through other routines of the linear algebra, which round otherwise."""


@dataclass(frozen=True)
class Need:
    """Bytes that gradients of samples need which are computed together.

    Parameters
    ----------
    fixed : int
        However many samples there are: the model's parameters, once.
    a_sample : int
        For each of them.
    """

    fixed: int
    a_sample: int

    @classmethod
    def measured(cls, compute: Callable[[int], Any]) -> Need:
        """What a function needs in tensors, given how many samples it is to compute: 1 or 2."""
        one, two = (peak_bytes(lambda count=count: compute(count)) for count in (1, 2))
        a_sample = max(two - one, 1)
        return cls(max(one - a_sample, 0), a_sample)

    def samples(self, memory_mib: float, beside: int = 0) -> int:
        """How many samples fit.

        Parameters
        ----------
        memory_mib : float
        beside : int
            Bytes of it that something else takes.

        Raises
        ------
        ConfigurationError
            If not one does.
        """
        count = int((_SHARE * memory_mib * 2**20 - beside - self.fixed) // self.a_sample)
        if count < 1:
            needed = (self.fixed + self.a_sample + beside) / _SHARE / 2**20
            needed = math.ceil(needed * 100) / 100  # so that what is asked for is enough
            rows = " with the rows beside it" if beside else ""
            raise ConfigurationError(
                f"Expected a gradient memory of at least {needed} MiB, which the gradient of a single sample of this "
                f"model needs{rows}, got {memory_mib:g} MiB: set aside more (gradient_memory_mib, gradient-memory-mib)."
            )
        return count


def check_memory(memory_mib: float) -> float:
    """A stated memory, or a refusal.

    Raises
    ------
    ConfigurationError
    """
    number = isinstance(memory_mib, int | float) and not isinstance(memory_mib, bool)
    if not (number and math.isfinite(memory_mib) and memory_mib > 0):
        raise ConfigurationError(f"Expected gradient_memory_mib to be a number > 0, got {memory_mib!r}.")
    return float(memory_mib)


def chunks(count: int, step: int) -> Iterator[tuple[slice, slice | NDArray[np.intp]]]:
    """Samples in chunks of at most ``step``: which rows each gives, and the samples it is computed from.

    The last chunk may be short. Its last sample is then computed again and again, up to ``LEAST_TOGETHER``, so that a
    row is the same wherever chunks end.
    """
    least = min(LEAST_TOGETHER, step, count)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        short = rows.stop - start < least
        yield rows, np.minimum(np.arange(start, start + least), rows.stop - 1) if short else rows


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The most bytes of tensors that are alive at a time while something is computed, its result among them.

    What a routine takes and gives back by itself is not seen.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sizes: dict[int, int] = {}
    alive = most = 0

    def gone(key: int) -> None:
        nonlocal alive
        alive -= sizes.pop(key, 0)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal alive, most
            made = func(*args, **(kwargs or {}))
            for values in tree_leaves(made):
                storage = _storage(values)
                if storage is not None and storage._cdata not in sizes:
                    sizes[storage._cdata] = storage.nbytes()
                    alive += storage.nbytes()
                    most = max(most, alive)
                    weakref.finalize(storage, gone, storage._cdata)
            return made

    with Counting():
        compute()
    return most


def _storage(values: Any) -> torch.UntypedStorage | None:
    import torch

    return values.untyped_storage() if isinstance(values, torch.Tensor) else None


class ChunkedContributions:
    """Contributions of more samples than fit into memory: computed in chunks for their norms, and again to be written.

    Parameters
    ----------
    make : callable
        The contributions of a slice of the samples.
    count, step : int
        Samples, and how many are computed together.
    """

    def __init__(self, make: Callable[[slice], StackedContributions], count: int, step: int) -> None:
        self._make, self._count, self._step = make, count, step
        self._first = -1
        self._made: StackedContributions | None = None

    def norms(self) -> NDArray[np.float64]:
        """The L2 norm of every row, shape (samples,); NaN or infinite where it cannot be told."""
        norms = np.empty(self._count)
        for start in range(0, self._count, self._step):
            norms[start : start + self._step] = self._chunk(start).norms()
        return norms

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``, shape (d,); quickest for rows in order."""
        start = row - row % self._step
        self._chunk(start).write(row - start, scale, out)

    def _chunk(self, start: int) -> StackedContributions:
        if self._made is None or self._first != start:
            self._made = None  # before the next one is made
            self._made = self._make(slice(start, min(start + self._step, self._count)))
            self._first = start
        return self._made


def in_chunks(
    make: Callable[[slice, int], StackedContributions], count: int, row_bytes: int, memory_mib: float
) -> StackedContributions:
    """Contributions at once where they fit into half of the memory, in chunks where they do not.

    Parameters
    ----------
    make : callable
        Given a slice of the samples, and how many bytes its rows take: their contributions.
    count : int
        Samples.
    row_bytes : int
        What a row takes.
    memory_mib : float
    """
    step = max(int(memory_mib * 2**19) // row_bytes, 1)
    if step >= count:
        return make(slice(0, count), count * row_bytes)
    return ChunkedContributions(lambda chosen: make(chosen, step * row_bytes), count, step)
