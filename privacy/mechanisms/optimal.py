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
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, eigh, solve_triangular, svd
from scipy.optimize import minimize
from scipy.special import logsumexp

from ..errors import ConfigurationError
from .dense_stream import HistoryMechanism
from .optimiser_cache import Arrays, cached

Workload = Literal["prefix-sum", "mu2"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)

_TOLERANCE = 1e-3
_MOST_RELEASES: dict[Workload, int] = {"prefix-sum": 4096, "mu2": 1024}
_FIXED_POINT_STEPS = 5
_MOST_STEPS = 200
# The multipliers of columns whose bound does not bind go to zero; their logarithms stop so far below the largest one at
# the start.
_WIDEST = 30.0
# Below this ratio of eigenvalues, the smallest have lost the digits that their square roots need.
_ILL_CONDITIONED = 1e-9


class OptimalNoise(HistoryMechanism):
    """The factorisation with the least total error, for a known number of releases.

    Parameters
    ----------
    num_releases : int
        K, the most releases of one stream; at most 4096, or 1024 with ``mu2``, for C is dense and must be found.
    workload : {"prefix-sum", "mu2"}
        Whose error is least (module description).

    Notes
    -----
    **Formal guarantees.** Columns have norm 1, so for one participation mu = Delta / noise_std. C is found by an
    optimiser once and kept on disk; the sensitivity is always computed from the C in use. State: what the noise so far
    adds to the coming releases, made again from the nonces of all releases (:mod:`.dense_stream`).
    Proof: docs/proofs/sensitivities.md.
    """

    name = "optimal"

    def __init__(self, num_releases: int, *, workload: Workload = "prefix-sum") -> None:
        super().__init__(num_releases)
        if workload not in WORKLOADS:
            raise ConfigurationError(f"Expected workload one of {WORKLOADS}, got {workload!r}.")
        most = _MOST_RELEASES[workload]
        if self.num_releases > most:
            raise ConfigurationError(
                f"Expected num_releases <= {most} for the dense mechanism 'optimal' with workload {workload!r}, got "
                f"{self.num_releases}: use {'blt' if workload == 'prefix-sum' else 'cancelling'!r}."
            )
        self.workload: Workload = workload

    @cached_property
    def encoder(self) -> NDArray[np.float64]:
        """C, shape (num_releases, num_releases), lower triangular with columns of norm 1."""
        n = self.num_releases
        arrays = cached(
            "optimal factorisation, 1",
            {"num_releases": n, "workload": self.workload, "tolerance": _TOLERANCE},
            lambda: _optimise(n, self.workload),
            lambda found: _is_encoder(found, n),
        )
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
    """The lower-triangular C with columns of norm 1 and the least ||A C^{-1}||_F.

    Parameters
    ----------
    workload : ndarray of shape (n, n)
        A, lower triangular and invertible.
    tolerance : float
        Relative duality gap of ||A C^{-1}||_F^2 to stop at.

    Returns
    -------
    ndarray of shape (n, n)

    Raises
    ------
    ConfigurationError
        If the gap is not reached.

    Notes
    -----
    The columns have norm 1 up to rounding whatever the gap: the gap is about error, not privacy.
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
        f"{gap:g}."
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
    """The lower-triangular C with C^T C the given matrix, columns scaled to norm 1."""
    backwards = cholesky(square[::-1, ::-1], lower=True, check_finite=False)
    encoder = backwards.T[::-1, ::-1]
    return encoder / np.linalg.norm(encoder, axis=0)


def _optimise(n: int, workload: Workload) -> Arrays:
    prefix = np.tri(n)
    return {"encoder": optimal_encoder(prefix if workload == "prefix-sum" else prefix @ prefix)}


def _is_encoder(found: Arrays, n: int) -> bool:
    encoder = found["encoder"]
    return encoder.shape == (n, n) and bool((encoder.diagonal() > 0).all()) and not np.triu(encoder, 1).any()
