r"""The optimal dense factorisation (Denisov et al. 2022, theorem 3.2; zhang-2025, MF (ii); ALGORITHMS section 3).

Of all C whose columns have norm at most 1, the one with the least ||A C^{-1}||_F. With X = C^T C and W = A^T A this is

    minimise tr(W X^{-1})   with diag(X) = 1,

whose Lagrangian with multipliers v, D = diag(v), has the minimiser X(v) = D^{-1/2} S D^{-1/2} with
S = (D^{1/2} W D^{1/2})^{1/2}, and the dual value (tr S)^2 / sum v after the best scaling of v. diag(X(v)) is
diag(S) / v, so the optimum is the fixed point v = diag(S) of Denisov et al. Iterating it is slow where the bound on a
late column does not bind (``mu2``), so log v maximises the dual by L-BFGS instead, until the value of X(v), its rows
and columns scaled to a unit diagonal, is within ``tolerance`` of the dual value, which no factorisation can be below.

C is lower triangular with C^T C = X: the Cholesky factor of X *read backwards*. The ordinary factor has C C^T = X; its
columns are longer than 1, so noise for columns of norm 1 would be too little.

``workload`` says whose error is least. ``prefix-sum`` has A, the triangle of ones; ``mu2`` has A A, because DP-mu^2-FL
sums the prefix sums once more. In both cases prefix sums are released and decoded.

**Streams with a dense C^{-1}** (:class:`HistoryMechanism`). Row k of C^{-1} Z is a sum over all k rows of Z. Only their
nonces are remembered, 16 bytes a release. To draw every row again for every release would take K^2 / 2 rows, so
releases go in blocks: when a block begins, all earlier rows are drawn once and what they add to each release of the
block is kept in memory. That is K^2 / 64 rows drawn, and 32 rows of memory (64 while they are made) that may be lost at
any time, a restart included: they are made again to the last bit, because they are always computed in the same order.

**The cache of optimisers' results** (:func:`cached`). They depend on a few numbers and may take seconds. One ``.npz``
file a result, in the folder named by the environment variable ``MURMURFL_CACHE``, else ``$XDG_CACHE_HOME/murmurfl``,
else ``~/.cache/murmurfl``. A file that cannot be read or does not pass the caller's check is computed again. Where the
folder cannot be written there is no cache, which is no error.

Formal guarantees
-----------------
The files need not be trusted: what is read is a proposal for factors B and C, checked by the caller for being a
factorisation at all, and the sensitivity is always derived from the factors in use, never stored. Somebody who changes
a file can make the noise larger, or its correlation worse, but cannot make the privacy parameter mu wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, eigh, solve_triangular, svd
from scipy.special import logsumexp

from ..errors import ConfigurationError
from ..noise import NONCE_BYTES
from .mechanism import Draw, Increment, Mechanism, Memory, State

Arrays = dict[str, NDArray[np.float64]]

_FORMAT = 1
_MOST_IN_MEMORY = 16

_in_memory: OrderedDict[str, Arrays] = OrderedDict()
_lock = Lock()


def cached(
    name: str, inputs: Mapping[str, int | float | str], compute: Callable[[], Arrays], check: Callable[[Arrays], bool]
) -> Arrays:
    """Return the read-only float64 arrays that ``compute`` returns, computed once for a name and its inputs.

    Change the name when the function's results change. ``check`` says whether arrays read from a file, all float64 and
    finite, have the right names and shapes and may be used.
    """
    text = json.dumps([name, _FORMAT, sorted(inputs.items())])
    key = hashlib.sha256(text.encode()).hexdigest()
    with _lock:
        if key in _in_memory:
            _in_memory.move_to_end(key)
            return dict(_in_memory[key])
    arrays = _read(key, check)
    if arrays is None:
        arrays = compute()
        _write(key, arrays)
    for array in arrays.values():
        array.setflags(write=False)
    with _lock:
        _in_memory[key] = arrays
        while len(_in_memory) > _MOST_IN_MEMORY:
            _in_memory.popitem(last=False)
    return dict(arrays)


def forget() -> None:
    """Empty the memory; the files stay."""
    with _lock:
        _in_memory.clear()


def folder() -> Path:
    """Return the cache's folder; raise RuntimeError if no variable names one and the user has no home."""
    if chosen := os.environ.get("MURMURFL_CACHE"):
        return Path(chosen)
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache") / "murmurfl"


def _read(key: str, check: Callable[[Arrays], bool]) -> Arrays | None:
    try:
        with np.load(folder() / f"{key}.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        sound = all(array.dtype == np.float64 and np.isfinite(array).all() for array in arrays.values())
        return arrays if sound and check(arrays) else None
    except Exception:  # whatever a damaged or foreign file makes NumPy or the check raise
        return None


def _write(key: str, arrays: Arrays) -> None:
    # RuntimeError: no home folder.
    with suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] - its stubs know no named arrays
            Path(temporary).replace(folder() / f"{key}.npz")
        except BaseException:
            Path(temporary).unlink()
            raise


_BLOCK = 32
# How many values of a row are handled at a time: so many that the results stay in the second-level cache.
_VALUES = 1 << 12


class HistoryMechanism(Mechanism):
    """A mechanism whose increments use all noise so far, through the entries of C^{-1} that a subclass gives.

    A state is what the noise so far adds to the coming releases of a block.

    Notes
    -----
    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern, with the C whose inverse a subclass gives. Memory that is lost is made again to the last bit, so
    it changes no release.
    Proof: docs/proofs/returning-samples.md.
    """

    memory: ClassVar[Memory] = "all"

    @abstractmethod
    def entries(self, rows: range, columns: range) -> NDArray[np.float64]:
        """Return a block of C^{-1}; rows and columns count releases from 1, and there is zero above the diagonal."""

    def initial_state(self, size: int) -> State:
        return (np.zeros((min(_BLOCK, self.num_releases), size), np.float32),)

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        ahead = self._with(state[0], self._check_release(release), normals * normals.dtype.type(scale))
        return Increment(ahead[0], None, (ahead[1:],) if len(ahead) > 1 else None)

    def state_after(self, release: int, draw: Draw, scale: float = 1.0) -> State:
        start = self._check_release(release) // _BLOCK * _BLOCK
        rows = range(start + 1, min(start + _BLOCK, self.num_releases) + 1)
        if not rows:
            return ()
        ahead: NDArray[np.floating] | None = None
        for first in range(1, start + 1, _BLOCK):
            columns = range(first, first + _BLOCK)
            normals = draw(columns)
            normals *= normals.dtype.type(scale)
            entries = self.entries(rows, columns).astype(normals.dtype)
            if ahead is None:
                ahead = np.zeros((len(rows), normals.shape[1]), normals.dtype)
            for values in _slices(normals.shape[1]):
                ahead[:, values] += entries @ normals[:, values]
        for column in range(start + 1, release + 1):
            normals = draw(range(column, column + 1))[0]
            if ahead is None:
                ahead = np.zeros((len(rows), normals.size), np.float32)
            ahead = self._with(ahead, column, normals * normals.dtype.type(scale))[1:]
        return () if ahead is None else (ahead,)

    def memory_bytes(self, size: int) -> int:
        return NONCE_BYTES * self.num_releases

    def _with(self, ahead: NDArray[np.floating], release: int, row: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the noise of the coming releases as far as row ``release`` of Z; that of the first is final."""
        column = self.entries(range(release, release + len(ahead)), range(release, release + 1)).astype(row.dtype)
        known = np.empty(ahead.shape, np.result_type(ahead, row))
        for values in _slices(row.size):
            np.multiply(column, row[values], out=known[:, values])
            known[:, values] += ahead[:, values]
        return known


def _slices(size: int) -> list[slice]:
    return [slice(start, start + _VALUES) for start in range(0, size, _VALUES)]


Workload = Literal["prefix-sum", "mu2"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)

_TOLERANCE = 1e-3
_MOST_RELEASES: dict[Workload, int] = {"prefix-sum": 4096, "mu2": 1024}
NEXT_BEST: dict[Workload, str] = {"prefix-sum": "sqrt_normalised", "mu2": "decay"}
"""The mechanism with the least error of a workload after ``optimal``: 1.2 % more for either, at 1,024 releases."""
_FIXED_POINT_STEPS = 5
_MOST_STEPS = 200
# The multipliers of columns whose bound does not bind go to zero; their logarithms stop so far below the largest one at
# the start.
_WIDEST = 30.0
# Below this ratio of eigenvalues, the smallest have lost the digits that their square roots need.
_ILL_CONDITIONED = 1e-9


class OptimalNoise(HistoryMechanism):
    """The factorisation with the least total error, for a known number of releases.

    ``workload`` says whose error is least (module description). At most 4096 releases, or 1024 with ``mu2``, for C is
    dense and must be found.

    Notes
    -----
    **Formal guarantees.** Columns have norm 1, so for one participation mu = Delta / noise_std. C is found by an
    optimiser once and kept on disk; the sensitivity is always computed from the C in use. State: what the noise so far
    adds to the coming releases, made again from the nonces of all releases (:mod:`.optimal`).
    Proof: docs/proofs/sensitivities.md.
    """

    name = "optimal"

    def __init__(self, num_releases: int, *, workload: Workload = "prefix-sum") -> None:
        super().__init__(num_releases)
        if workload not in WORKLOADS:
            raise ConfigurationError(
                f"Expected workload one of {WORKLOADS}, got {workload!r}.",
                kind="unknown-name",
                setting="workload",
                got=workload,
            )
        most = _MOST_RELEASES[workload]
        if self.num_releases > most:
            raise ConfigurationError(
                f"Expected num_releases <= {most} for the dense mechanism 'optimal' with workload {workload!r}, got "
                f"{self.num_releases}. Use {NEXT_BEST[workload]!r}: its error was 1.2 % larger at 1,024 releases.",
                kind="out-of-range",
                setting="num_releases",
                got=self.num_releases,
            )
        self.workload: Workload = workload

    @cached_property
    def encoder(self) -> NDArray[np.float64]:
        """C, shape (num_releases, num_releases), lower triangular with columns of norm 1."""
        n = self.num_releases

        def compute() -> Arrays:
            prefix = np.tri(n)
            return {"encoder": optimal_encoder(prefix if self.workload == "prefix-sum" else prefix @ prefix)}

        def check(found: Arrays) -> bool:
            encoder = found["encoder"]
            return encoder.shape == (n, n) and bool((encoder.diagonal() > 0).all()) and not np.triu(encoder, 1).any()

        inputs = {"num_releases": n, "workload": self.workload, "tolerance": _TOLERANCE}
        arrays = cached("optimal factorisation, 1", inputs, compute, check)
        # Scaled once more, because a file need not be trusted.
        return arrays["encoder"] / np.linalg.norm(arrays["encoder"], axis=0)

    @cached_property
    def _inverse(self) -> NDArray[np.float64]:
        return solve_triangular(self.encoder, np.eye(self.num_releases), lower=True)

    @cached_property
    def _row_stds(self) -> NDArray[np.float64]:
        return np.linalg.norm(np.cumsum(self._inverse, axis=0), axis=1)

    def identity(self) -> bytes:
        return self.encoder.tobytes()

    def materialize(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        return self.encoder[:n, :n].copy()

    def decoder(self, n: int | None = None) -> NDArray[np.float64]:
        return np.cumsum(self.inverse(n), axis=0)

    def inverse(self, n: int | None = None) -> NDArray[np.float64]:
        n = self._check_n(n)
        return self._inverse[:n, :n].copy()

    def entries(self, rows: range, columns: range) -> NDArray[np.float64]:
        return self._inverse[rows.start - 1 : rows.stop - 1, columns.start - 1 : columns.stop - 1]

    def row_std(self, release: int) -> float:
        return float(self._row_stds[self._check_release(release) - 1])

    def row_std_range(self) -> tuple[float, float]:
        return float(self._row_stds.min()), float(self._row_stds.max())

    def increment_bound(self, release: int) -> float:
        return float(np.abs(self._inverse[self._check_release(release) - 1]).sum())


def optimal_encoder(workload: NDArray[np.float64], tolerance: float = _TOLERANCE) -> NDArray[np.float64]:
    """Find the lower-triangular C, with columns of norm 1, of least ||A C^{-1}||_F; A is lower-triangular, invertible.

    It stops at ``tolerance``, a relative duality gap of ||A C^{-1}||_F^2, which is about error and not privacy: the
    columns have norm 1 up to rounding whatever the gap.

    Returns
    -------
    ndarray of shape (n, n)
    """
    gram = workload.T @ workload
    gap, accurate = np.inf, True

    def negative_dual(logarithms: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        nonlocal gap, accurate
        multipliers = np.exp(logarithms)
        roots = np.sqrt(multipliers)
        values, vectors, accurate = _square_root(gram, workload, roots, accurate)
        diagonal = vectors**2 @ values  # of S
        trace, total = diagonal.sum(), multipliers.sum()
        # X(v) with its rows and columns scaled to a unit diagonal: its inverse, and the objective.
        inverse = vectors / np.sqrt(values) * (roots * np.sqrt(diagonal / multipliers))[:, None]
        gap = float(np.einsum("ij,ij->", gram @ inverse, inverse)) * total / trace**2 - 1
        if gap <= tolerance:
            factor = vectors * np.sqrt(values) / roots[:, None]
            raise _FoundError(_encoder_of(factor @ factor.T))
        # Times n: the second derivatives are then around 1, which is where the search starts from.
        return n * float(np.log(total) - 2 * np.log(trace)), n * (multipliers / total - diagonal / trace)

    from scipy.optimize import minimize  # here: it takes a third of a second to import

    n, start = len(gram), 0.5 * np.log(gram.diagonal())
    try:
        for _ in range(_FIXED_POINT_STEPS):
            _, slope = negative_dual(start)
            shares = np.exp(start - logsumexp(start))
            start += np.log1p(-slope / n / shares)  # v = diag(S), up to a factor
        bounds = [(start.max() - _WIDEST, start.max() + _WIDEST)] * n
        minimize(
            negative_dual, start, jac=True, method="L-BFGS-B", bounds=bounds,
            options={"maxiter": _MOST_STEPS, "maxcor": 20, "ftol": 0.0, "gtol": 0.0},
        )  # fmt: skip
    except _FoundError as found:
        return found.encoder
    raise ConfigurationError(
        f"Expected the factorisation of {len(gram)} releases within {_MOST_STEPS} steps of a gap of {tolerance:g}, got "
        f"{gap:g}.",
        kind="failed",
    )


class _FoundError(Exception):
    """Ends the search as soon as the gap is small enough."""

    def __init__(self, encoder: NDArray[np.float64]) -> None:
        super().__init__()
        self.encoder = encoder


def _square_root(
    gram: NDArray[np.float64], workload: NDArray[np.float64], roots: NDArray[np.float64], accurate: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """Eigenvalues and eigenvectors of S = (D^{1/2} W D^{1/2})^{1/2}, and whether W itself is accurate enough for it."""
    if accurate:
        values, vectors = eigh(roots[:, None] * gram * roots, overwrite_a=True, check_finite=False)
        if values[0] > _ILL_CONDITIONED * values[-1]:
            return np.sqrt(values), vectors, True
    _, values, transposed = svd(workload * roots, full_matrices=False, overwrite_a=True, check_finite=False)
    return values, transposed.T, False


def _encoder_of(square: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower-triangular C with C^T C the given matrix, columns scaled to norm 1."""
    backwards = cholesky(square[::-1, ::-1], lower=True, check_finite=False)
    encoder = backwards.T[::-1, ::-1]
    return encoder / np.linalg.norm(encoder, axis=0)
