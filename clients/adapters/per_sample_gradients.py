"""Per-sample gradients: what a client needs from a model, how it combines them, and in how much memory.

What one sample needs is measured once: the bytes of tensors that are alive at a time while its gradient is computed,
which depend on shapes alone. As many samples are then computed together as fit into the memory set aside. Gradients of
a linear layer are outer products, and are not written out at all (:class:`OuterProducts`).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import OF_DATA, ConfigurationError, InvalidRecordError, is_interrupt
from ...privacy.release.clipping import (
    ChosenContributions,
    DenseContributions,
    StackedContributions,
    squared_lengths,
)

logger = logging.getLogger(__name__)


def wide_row_bytes(points: int, width: int) -> int:
    """Bytes of a row while gradients at points are combined in float64."""
    return 8 * width * (2 if points == 1 else 3)


@runtime_checkable
class PerSampleGradients(Protocol):
    """Gradients of a loss, one row a sample.

    Notes
    -----
    **Formal guarantees.** Row i must depend on sample i and the parameters alone (so no batch normalisation): every
    guarantee for one sample rests on it. How long a row is does not matter, for the client bounds it.

    Examples
    --------
    >>> import numpy as np
    >>> class LeastSquares:
    ...     shapes = [(3,)]
    ...     def __call__(self, parameters, samples):
    ...         features, targets = samples
    ...         return (features @ parameters[0] - targets)[:, None] * features
    >>> isinstance(LeastSquares(), PerSampleGradients)
    True
    >>> LeastSquares()([np.zeros(3)], (np.eye(3)[:2], np.array([1.0, 2.0]))).tolist()
    [[-1.0, -0.0, -0.0], [-0.0, -2.0, -0.0]]
    """

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of the model's parameter arrays, in order; d is the sum of their sizes."""
        ...

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: Any) -> NDArray[np.floating]:
        """Gradients, shape (b, d), at one array for each of ``shapes``, of a batch as the data gives it for a slice."""
        ...


class Samples(Protocol):
    """A client's data: a length, and a batch for a slice.

    Examples
    --------
    >>> import numpy as np
    >>> class Rows:
    ...     def __init__(self, features, labels):
    ...         self.features, self.labels = features, labels
    ...     def __len__(self):
    ...         return len(self.labels)
    ...     def __getitem__(self, samples):
    ...         return self.features[samples], self.labels[samples]
    >>> features, labels = Rows(np.zeros((5, 3)), np.arange(5))[1:3]
    >>> features.shape, labels.tolist()
    ((2, 3), [1, 2])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, samples: slice, /) -> Any: ...


def rows_unmixed(gradients: PerSampleGradients) -> bool:
    """Return True if gradients declare that a row of a batch depends on its own sample and the batch's size alone.

    The declaration, ``rows_unmixed = True``, covers every bit, whatever samples and parameters are, and that computing
    a batch never fails. A real client may then compute many samples together. A subclass does not inherit it.
    """
    return bool(vars(gradients).get("rows_unmixed", vars(type(gradients)).get("rows_unmixed", False)))


def isolate(gradients: PerSampleGradients) -> None:
    """Have gradients computed where no code of the project runs from now on, if they come from such code.

    Real clients do this before they read a sample. Gradients that need it have a method ``isolate()``, which starts a
    process (:class:`.replay_process.ReplayProcess`) and refuses what cannot run there. Gradients that are computed from
    others name these as ``wrapped``.
    """
    own = getattr(_innermost(gradients), "isolate", None)
    if own is not None:
        own()


def programs_of(gradients: PerSampleGradients) -> str:
    """Return which programs compute the gradients, by their hashes; empty for gradients without programs.

    Programs are captured before any record is read, so their hashes are public.
    """
    own = getattr(_innermost(gradients), "programs_used", None)
    return "" if own is None else own()


def _innermost(gradients: Any) -> Any:
    while (inner := getattr(gradients, "wrapped", None)) is not None:
        gradients = inner
    return gradients


def combined_gradients(
    gradients: PerSampleGradients,
    points: Sequence[Sequence[NDArray[Any]]],
    weights: Sequence[float | NDArray[np.float64]],
    samples: Any,
) -> NDArray[np.float64]:
    """Per-sample sums over the query points of weight times gradient, shape (b, d), float64.

    A weight is one for a point, or one for a point and each sample of a batch that is an array or a tuple of arrays;
    where it is 0 nothing is evaluated. Row i depends on sample i alone if the gradients' does.
    """
    total: NDArray[np.float64] | None = None
    for point, weight in zip(points, weights, strict=True):
        if isinstance(weight, np.ndarray):
            chosen = np.flatnonzero(weight)
            if not len(chosen):
                continue
            rows = weight[chosen, None] * np.asarray(gradients(point, pick(samples, chosen)), dtype=np.float64)
            if total is None:
                total = np.zeros((len(weight), rows.shape[1]))
            total[chosen] += rows
        elif weight:
            rows = weight * np.asarray(gradients(point, samples), dtype=np.float64)
            total = rows if total is None else total.__iadd__(rows)
    if total is None:
        raise ConfigurationError(
            f"Expected a query point with a weight other than 0, got weights {tuple(weights)}.", kind="unsupported"
        )
    return total


def stacked_gradients(
    gradients: PerSampleGradients,
    points: Sequence[Sequence[NDArray[Any]]],
    weights: Sequence[float | NDArray[np.float64]],
    samples: Any,
) -> StackedContributions:
    """Return the rows of :func:`combined_gradients`.

    Not written out where the gradients' own ``stacked`` knows how to.
    """
    stacked = getattr(gradients, "stacked", None)
    if stacked is not None:
        return stacked(points, weights, samples)

    def made(chosen: slice | None = None, _: int = 0) -> DenseContributions:
        some, own = (samples, weights) if chosen is None else (pick(samples, chosen), weights_of(weights, chosen))
        with np.errstate(all="ignore"):
            return DenseContributions(combined_gradients(gradients, points, own, some))

    memory_mib = getattr(gradients, "gradient_memory_mib", None)
    if memory_mib is None:
        return made()
    count = batch_length(samples)
    width = sum(map(math.prod, gradients.shapes))
    return in_chunks(made, count, wide_row_bytes(len(points), width), memory_mib)


def weights_of(weights: Sequence[float | NDArray[np.float64]], chosen: slice) -> list[float | NDArray[np.float64]]:
    """Return the weights of some samples."""
    return [weight[chosen] if isinstance(weight, np.ndarray) else weight for weight in weights]


def gradients_at(gradients: PerSampleGradients, points: NDArray[np.floating], samples: Any) -> NDArray[np.floating]:
    """Return the gradient of sample i at point i, shape (b, d), for points of shape (b, d).

    They are computed at once by a method ``at_points(points, samples)`` of the gradients, or else one by one. Row i
    depends on point i and sample i alone if the gradients' does.
    """
    together = getattr(gradients, "at_points", None)
    if together is not None:
        return together(points, samples)
    rows = []
    for i, point in enumerate(points):
        arrays = unflatten(point, gradients.shapes)
        rows.append(np.asarray(gradients(arrays, pick(samples, slice(i, i + 1))))[0])
    return np.stack(rows)


def check_rows_alone(gradients: PerSampleGradients, examples: Sequence[Any]) -> None:
    """Refuse gradients of which a sample's differs after or beside other samples.

    The examples are made-up batches of one sample, ordinary ones and outliers, so the verdict depends on no private
    sample. It finds mistakes and proves nothing.
    """
    random = np.random.Generator(np.random.Philox(key=29))
    point = [random.normal(scale=0.1, size=shape) for shape in gradients.shapes]
    alone = [_rows_or_none(gradients, point, one) for one in examples]
    again = [_rows_or_none(gradients, point, one) for one in reversed(examples)][::-1]
    found = [one for one in alone if one is not None]
    if not found:
        raise ConfigurationError(
            "Expected a model that has a gradient for records of the schema, got one that fails for all of them.",
            kind="unsupported",
        )
    if not all(map(_are_alike, alone, again)):
        raise ConfigurationError(
            "Expected the gradient of a sample to be the same after other samples, got another one: the model draws at "
            "random, or remembers what it saw.",
            kind="unsupported",
        )
    if isinstance(examples[0], tuple) and len(found) == len(alone):
        batch = tuple(np.concatenate(parts) for parts in zip(*examples, strict=True))
        scale = max(float(np.abs(one).max()) for one in found)
        together = _rows_or_none(gradients, point, batch)
        if not _are_alike(together, np.concatenate(found), 1e-4 * max(1.0, scale)):
            raise ConfigurationError(
                "Expected the gradient of a sample to be the same beside other samples, got another one: the model "
                "mixes samples.",
                kind="unsupported",
            )


def _rows_or_none(
    gradients: PerSampleGradients, point: Sequence[NDArray[np.float64]], batch: Any
) -> NDArray[np.floating] | None:
    """Return the gradients of a batch, or None if they cannot be computed."""
    try:
        with np.errstate(all="ignore"):
            return np.asarray(gradients([values.copy() for values in point], batch))
    except BaseException as error:
        if is_interrupt(error):
            raise
        return None


def _are_alike(one: NDArray[np.floating] | None, other: NDArray[np.floating] | None, apart: float = 0.0) -> bool:
    """Return True if both failed, or both have the same values up to ``apart``."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(np.allclose(one, other, apart, apart, equal_nan=True))


class CarefulGradients:
    """Gradients of a real client, which loads its samples one by one: a sample that fails has gradient zero.

    A batch is an array of numbers of samples in ``source``. Whether a sample can be loaded, and its gradient computed,
    may depend on the sample. So a failure must not show, and must change nothing but what that sample contributes.

    Notes
    -----
    **Formal guarantees.** Row i depends on sample i alone, and nothing else shows whether it could be computed.
    """

    def __init__(self, gradients: PerSampleGradients, source: Samples) -> None:
        self._gradients = gradients
        self._source = source
        self.shapes = gradients.shapes

    def __call__(self, parameters: Sequence[NDArray[Any]], samples: NDArray[np.intp]) -> NDArray[np.float64]:
        return self.at_points(np.tile(flat_point(parameters), (len(samples), 1)), samples)

    def at_points(self, points: NDArray[np.floating], samples: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the gradient of sample ``samples[i]`` at point i, shape (b, d), float64."""
        rows = np.zeros(np.shape(points))
        for row, point, number in zip(rows, points, samples, strict=True):
            try:
                # A copy, so that a gradient function that writes to its parameters cannot change later steps.
                made = gradients_at(self._gradients, point[None].copy(), self._source[int(number) : int(number) + 1])
                if np.shape(made) != (1, row.size):
                    raise ConfigurationError(
                        f"Expected a gradient of shape (1, {row.size}), got {np.shape(made)}.", kind="wrong-shape"
                    )
                row[:] = made[0]
            except InvalidRecordError:
                row[:] = 0.0
            except BaseException as error:
                if is_interrupt(error):
                    raise
                logger.exception("The gradient of a sample could not be computed; it counts as zero.", extra=OF_DATA)
                row[:] = 0.0
        return rows


def unflatten(values: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Return a vector of d values as arrays of the model's shapes; views of it."""
    arrays, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        arrays.append(values[start : start + size].reshape(shape))
        start += size
    return arrays


def flat_point(point: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return a list of the model's arrays as one float64 vector, shape (d,)."""
    return np.concatenate([np.asarray(values, dtype=np.float64).ravel() for values in point])


def batch_length(samples: Any) -> int:
    """Return the number of samples of a batch: an array, or a tuple or mapping of such parts."""
    while isinstance(samples, tuple | Mapping):
        samples = next(iter(samples.values() if isinstance(samples, Mapping) else samples))
    return len(samples)


def pick(samples: Any, chosen: slice | NDArray[np.intp]) -> Any:
    """Return some samples of a batch: an array, or a tuple or mapping of such parts."""
    if isinstance(samples, tuple):
        return tuple(pick(part, chosen) for part in samples)
    if isinstance(samples, Mapping):
        return {name: pick(part, chosen) for name, part in samples.items()}
    if isinstance(samples, np.ndarray) or hasattr(samples, "detach"):
        return samples[chosen]
    raise ConfigurationError(
        f"Expected a batch that is an array, or a tuple or mapping of arrays, got {type(samples).__name__}.",
        kind="wrong-type",
        setting="samples",
    )


GRADIENT_MEMORY_MIB = 512.0
"""Default memory for gradients."""

MOST_TOGETHER = 128
"""More samples together are no faster."""

_SHARE = 0.95
"""Share of the memory for what grows with the samples; the rest is for what one and two of them do not show."""

LEAST_TOGETHER = 4
"""Fewer samples together go through other routines of the linear algebra, which round otherwise."""


@dataclass(frozen=True)
class Need:
    """Bytes that gradients of samples need when they are computed together."""

    fixed: int  # whatever the number of samples
    a_sample: int

    @classmethod
    def measured(cls, compute: Callable[[int], Any]) -> Need:
        """Return the need of a function of the number of samples, from its tensors for 1 and for 2."""
        one, two = (peak_bytes(lambda count=count: compute(count)) for count in (1, 2))
        a_sample = max(two - one, 1)
        return cls(max(one - a_sample, 0), a_sample)

    def samples(self, memory_mib: float, beside: int = 0) -> int:
        """Return how many samples fit where something else takes ``beside`` bytes; refuse if not one does."""
        count = int((_SHARE * memory_mib * 2**20 - beside - self.fixed) // self.a_sample)
        if count < 1:
            needed = (self.fixed + self.a_sample + beside) / _SHARE / 2**20
            needed = math.ceil(needed * 100) / 100  # so that what is asked for is enough
            rows = " with the rows beside it" if beside else ""
            raise ConfigurationError(
                f"Expected a gradient memory of at least {needed} MiB, which the gradient of a single sample of this "
                f"model needs{rows}, got {memory_mib:g} MiB: set aside more (gradient_memory_mib, "
                "model.gradient-memory-mib).",
                kind="out-of-range",
                setting="gradient_memory_mib",
            )
        return count


def check_memory(memory_mib: float) -> float:
    """Return the memory as a float; refused unless it is a number > 0."""
    number = isinstance(memory_mib, int | float) and not isinstance(memory_mib, bool)
    if not (number and math.isfinite(memory_mib) and memory_mib > 0):
        raise ConfigurationError(
            f"Expected gradient_memory_mib to be a number > 0, got {memory_mib!r}.",
            kind="out-of-range",
            setting="gradient_memory_mib",
            got=memory_mib,
        )
    return float(memory_mib)


def chunks(count: int, step: int) -> Iterator[tuple[slice, slice | NDArray[np.intp]]]:
    """Yield samples in chunks of at most ``step``: the rows of each, and the samples it is computed from.

    In a short last chunk the last sample is repeated up to ``LEAST_TOGETHER``, so that a row is the same wherever
    chunks end.
    """
    least = min(LEAST_TOGETHER, step, count)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        short = rows.stop - start < least
        yield rows, np.minimum(np.arange(start, start + least), rows.stop - 1) if short else rows


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Return the most bytes of tensors alive at a time while something is computed.

    Without what routines use internally.
    """
    import torch
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
                storage = values.untyped_storage() if isinstance(values, torch.Tensor) else None
                if storage is not None and storage._cdata not in sizes:
                    sizes[storage._cdata] = storage.nbytes()
                    alive += storage.nbytes()
                    most = max(most, alive)
                    weakref.finalize(storage, gone, storage._cdata)
            return made

    with Counting():
        compute()
    return most


class ChunkedContributions:
    """Contributions of more samples than fit into memory: computed in chunks for their norms, and again when written.

    ``make`` gives the contributions of a slice of the ``count`` samples, of which ``step`` are computed together.
    """

    def __init__(self, make: Callable[[slice], StackedContributions], count: int, step: int) -> None:
        self._make, self._count, self._step = make, count, step
        self._first = -1
        self._made: StackedContributions | None = None

    def norms(self) -> NDArray[np.float64]:
        """Return the L2 norm of every row, shape (samples,); NaN or infinite where it cannot be told."""
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
    """Contributions at once where their rows fit into half of the memory, in chunks where they do not.

    ``make`` gives the contributions of a slice of the samples, whose rows take so many bytes.
    """
    step = max(int(memory_mib * 2**19) // row_bytes, 1)
    if step >= count:
        return make(slice(0, count), count * row_bytes)
    return ChunkedContributions(lambda chosen: make(chosen, step * row_bytes), count, step)


LEAST_SQUARES = 1e-300
"""Sums of squares below this have lost digits."""

_CANCELLING = 4.0
"""Two parts cancel where the square of their lengths' sum is more than this times that of their sum's length."""

_ROUNDING = 2.0**-50
_WRITTEN_AT_A_TIME = 64


class OuterProducts:
    """Per-sample gradients of a linear layer, [r x^T, r] for a sample's r and x, not written out.

    ``residuals`` have a row r for each sample, ``features`` a row x. Without a ``bias`` gradients are r x^T.
    """

    def __init__(self, residuals: NDArray[np.float64], features: NDArray[np.float64], *, bias: bool = True) -> None:
        self.residuals, self.features, self.bias = residuals, features, bias
        self._shape = (residuals.shape[1], features.shape[1])
        self._split = math.prod(self._shape)

    def norms(self) -> NDArray[np.float64]:
        """||[r x^T, r]|| = ||r|| sqrt(||x||^2 + 1), and ||r x^T|| = ||r|| ||x||."""
        with np.errstate(all="ignore"):
            squares = _told(self.features) + (1.0 if self.bias else 0.0)
            return np.sqrt(_told(self.residuals) * squares)

    def chosen(self, rows: NDArray[np.intp]) -> StackedContributions:
        """Return some of the rows."""
        if type(self) is not OuterProducts:  # a subclass has more than these
            return ChosenContributions(self, rows)
        return OuterProducts(self.residuals[rows], self.features[rows], bias=self.bias)

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        """Write ``scale`` times a row to ``out``."""
        residual = self.residuals[row : row + 1].T * scale
        # A matrix product of inner size one: the same products as broadcasting makes, in half the time.
        np.dot(residual, self.features[row : row + 1], out=out[: self._split].reshape(self._shape))
        if self.bias:
            out[self._split :] = residual[:, 0]

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of rows, each times its scale; one matrix product."""
        residuals = self.residuals * scales[:, None]
        weight = (residuals.T @ self.features).ravel()
        return np.concatenate([weight, residuals.sum(axis=0)]) if self.bias else weight


class PulledOuterProducts(OuterProducts):
    """Outer products with one matrix V added to each, [r x^T + V, r]: gradients with a penalty on the weights.

    ``pull`` is V, shape (classes, features), the same for every sample. Norms are at most 2^-41 too small, and sums as
    precise as clipping and adding up need them (:mod:`~murmurfl.privacy.release.clipping`), whatever V a server
    chooses: where r x^T and V cancel, and little but rounding is left, a row is written out first.
    """

    def __init__(
        self,
        residuals: NDArray[np.float64],
        features: NDArray[np.float64],
        pull: NDArray[np.float64],
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(residuals, features, bias=bias)
        self._pull = pull
        with np.errstate(all="ignore"):
            own, of_pull = super().norms(), float(np.sqrt((pull * pull).sum()))
            crossed = np.einsum("ij,ij->i", residuals, features @ pull.T)
            squares = own * own + 2.0 * crossed + of_pull * of_pull
            parts = own + of_pull
            self._cancels = ~(_CANCELLING * squares >= parts * parts)  # where either is NaN, too
            # Products are summed in any order, so each may be wrong by as many roundings as there are.
            self._norms = np.sqrt(np.maximum(squares, 0.0)) * (1.0 + _ROUNDING * self.features.shape[1])
        for rows in self._written_ones():
            self._norms[rows] = DenseContributions(self._written(rows)).norms()

    def norms(self) -> NDArray[np.float64]:
        """Return the root of ||[r x^T, r]||^2 + 2 r^T V x + ||V||^2."""
        return self._norms

    def write(self, row: int, scale: float, out: NDArray[np.float64]) -> None:
        super().write(row, 1.0, out)
        out[: self._split] += self._pull.ravel()
        out *= scale

    def scaled_sum(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        apart = ~self._cancels  # left out, and not times zero: a feature may be NaN where a residual is zero
        total = OuterProducts(self.residuals[apart], self.features[apart], bias=self.bias).scaled_sum(scales[apart])
        total[: self._split] += scales[apart].sum() * self._pull.ravel()
        for rows in self._written_ones():
            total += scales[rows] @ self._written(rows)
        return total

    def _written_ones(self) -> Iterator[NDArray[np.intp]]:
        """Yield the numbers of rows whose parts cancel, a few at a time."""
        numbers = np.flatnonzero(self._cancels)
        for start in range(0, len(numbers), _WRITTEN_AT_A_TIME):
            yield numbers[start : start + _WRITTEN_AT_A_TIME]

    def _written(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        found = np.empty((len(rows), self._split + (self.residuals.shape[1] if self.bias else 0)))
        with np.errstate(all="ignore"):
            for row, out in zip(rows, found, strict=True):
                self.write(int(row), 1.0, out)
        return found


def _told(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squared length of every row.

    NaN for one so short that rounding hides it, which a long factor would show.
    """
    squares = squared_lengths(rows)
    if squares.min(initial=math.inf) < LEAST_SQUARES:
        squares[(squares < LEAST_SQUARES) & rows.any(axis=1)] = np.nan
    return squares
