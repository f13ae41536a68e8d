r"""Buffered linear Toeplitz noise: correlated over the whole stream, from a few rows of memory.

Dvijotham, McMahan, Pillutla, Steinke, Thakurta 2024, "Efficient and near-optimal noise generation for streaming
differential privacy"; McMahan, Xu, Zhang 2024, "A hassle-free algorithm for private learning in practice". C is
Toeplitz with

    c_0 = 1,   c_j = \sum_i omega_i theta_i^{j-1},   0 <= theta_i < 1,  omega_i >= 0,  \sum_i omega_i <= 1,

so it is non-negative and does not increase, and row k of C^{-1} Z is made from one buffer S_i (a row) for each i:

    z~ = z_k - \sum_i omega_i S_i,    S_i <- theta_i S_i + z~.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from .mechanism import Increment, State
from .optimal import Arrays, cached
from .toeplitz import BLOCK, ToeplitzMechanism, positive_integer


class BltNoise(ToeplitzMechanism):
    """Noise from a few decaying sums of the increments before (ALGORITHMS section 3, ``blt``).

    Parameters
    ----------
    buffers : int
        Rows of state, >= 1. Not used with theta and omega.
    num_participations, min_separation : int
        The pattern the parameters are made best for, as :func:`optimise_blt` takes it; ``min_separation`` by default
        num_releases // num_participations, as far apart as they can be. It does not limit the patterns
        :meth:`sensitivity` may be asked for. Not used with theta and omega.
    theta, omega : sequence of float, optional
        Parameters to use instead of optimised ones: 0 <= theta < 1, omega >= 0 with a sum of at most 1.

    Notes
    -----
    Three buffers, because the fourth gains little: at 2000 releases, 5 participations 400 apart, the standard deviation
    of the last prefix sum is 9.50, 9.45, 9.43, 9.43 for 2 to 5 buffers at Delta = mu = 1 (``sqrt_toeplitz`` 9.88); at
    1000 releases and one participation 3.32, 3.27, 3.27, 3.27 (3.27); at 100,000 it is 5.30, 4.85, 4.76, 4.74.

    **Formal guarantees.** mu = Delta x ``sensitivity(...)`` / noise_std for replacement of one sample that keeps to the
    declared pattern; exact for every pattern. State: ``buffers`` rows, which must be kept.
    Proof: docs/proofs/returning-samples.md.
    """

    name = "blt"
    memory = "state"

    def __init__(
        self,
        num_releases: int,
        *,
        buffers: int = 3,
        num_participations: int = 1,
        min_separation: int | None = None,
        theta: Sequence[float] | NDArray[np.float64] | None = None,
        omega: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> None:
        super().__init__(num_releases)
        if theta is None and omega is None:
            if min_separation is None:
                min_separation = max(1, self.num_releases // positive_integer("num_participations", num_participations))
            theta, omega = optimise_blt(self.num_releases, buffers, num_participations, min_separation)
        elif theta is None or omega is None:
            raise ConfigurationError(
                f"Expected theta and omega or neither, got {theta!r} and {omega!r}.", kind="conflict", setting="theta"
            )
        self.theta: NDArray[np.float64] = _numbers("theta", theta)
        self.omega: NDArray[np.float64] = _numbers("omega", omega)
        if not _allowed(self.theta, self.omega):
            raise ConfigurationError(
                "Expected theta and omega of one length, 0 <= theta < 1, omega >= 0 with a sum of at most 1, "
                f"got {theta!r} and {omega!r}.",
                kind="out-of-range",
                setting="theta",
            )
        self._parameters: list[tuple[float, float]] = list(zip(self.theta.tolist(), self.omega.tolist(), strict=True))

    def initial_state(self, size: int) -> State:
        return tuple(np.zeros(size, np.float32) for _ in self._parameters)

    def increment(self, state: State, release: int, normals: NDArray[np.floating], scale: float = 1.0) -> Increment:
        self._check_release(release)
        added = np.empty_like(normals)
        after = tuple(np.empty_like(normals) for _ in state)
        scratch = np.empty(min(BLOCK, normals.size), normals.dtype)
        for start in range(0, normals.size, BLOCK):
            values = slice(start, start + BLOCK)
            block = np.multiply(normals[values], scale, out=added[values])
            term = scratch[: block.size]
            for (_, omega), row in zip(self._parameters, state, strict=True):
                block -= np.multiply(row[values], omega, out=term)
            for (theta, _), row, row_after in zip(self._parameters, state, after, strict=True):
                buffer = np.multiply(row[values], theta, out=row_after[values])
                buffer += block
        return Increment(added, None, after)

    def memory_bytes(self, size: int) -> int:
        return len(self.theta) * size * np.dtype(np.float64).itemsize

    def _encoder_column(self) -> NDArray[np.float64]:
        return np.concatenate(([1.0], _powers(self.theta, self.num_releases - 1) @ self.omega))

    def _inverse_column(self) -> NDArray[np.float64]:
        theta, omega = _inverse_parameters(self.theta, self.omega)
        return np.concatenate(([1.0], -_powers(theta, self.num_releases - 1) @ omega))


def optimise_blt(
    num_releases: int, buffers: int, num_participations: int = 1, min_separation: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Parameters theta and omega, ``buffers`` of each, of least error for prefix sums.

    Minimises the variance of the last prefix sum, which is the largest, at a fixed mu: the squared sensitivity times
    the squared norm of the last row of B. Both are geometric sums in closed form, so a step costs the same for any
    number of releases. By BFGS over the logits of theta and of omega and one minus its sum, from two fixed starts; kept
    in the cache (:mod:`.optimal`). Then 0 <= theta <= 1 - 0.01 / num_releases, ascending, and omega >= 0 has a sum
    below 1. Whatever the result, the sensitivity derived from it is exact: the optimiser affects the error only.
    """
    n = positive_integer("num_releases", num_releases)
    buffers = positive_integer("buffers", buffers)
    k = positive_integer("num_participations", num_participations)
    s = positive_integer("min_separation", min_separation)
    largest_theta = 1.0 - 0.01 / n

    def parameters(logits: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        weights = np.exp(np.append(logits[buffers:], 0.0) - max(0.0, logits[buffers:].max()))
        return largest_theta / (1.0 + np.exp(-logits[:buffers])), weights[:-1] / weights.sum()

    def loss(logits: NDArray[np.float64]) -> float:
        theta, omega = parameters(logits)
        return math.log(_squared_sensitivity(theta, omega, n, k, s) * _squared_error(theta, omega, n))

    def compute() -> Arrays:
        from scipy.optimize import minimize  # here: it takes a third of a second to import

        found = []
        for gap, least_gap in ((0.9, 1.0 / n), (0.5, 0.1 / n)):
            gaps = np.geomspace(gap, min(gap, least_gap), buffers)
            roots = np.sqrt(gaps)
            start = np.concatenate((np.log(1.0 / gaps - 1.0), np.log(roots / roots.sum())))
            found.append(minimize(loss, start, method="BFGS", jac="3-point"))
        theta, omega = parameters(min(found, key=lambda result: result.fun).x)
        order = np.argsort(theta)
        return {"theta": theta[order], "omega": omega[order]}

    def check(arrays: Arrays) -> bool:
        return _allowed(arrays["theta"], arrays["omega"]) and len(arrays["theta"]) == buffers

    inputs = {"num_releases": n, "buffers": buffers, "num_participations": k, "min_separation": s}
    result = cached("optimise_blt", inputs, compute, check)
    return result["theta"], result["omega"]


def _numbers(name: str, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Expected {name} to be a list of numbers, got {values!r}.", kind="wrong-type", setting=name
        ) from error


def _allowed(theta: NDArray[np.float64], omega: NDArray[np.float64]) -> bool:
    if theta.ndim != 1 or theta.shape != omega.shape or not theta.size:
        return False
    return bool(((theta >= 0.0) & (theta < 1.0) & (omega >= 0.0)).all() and omega.sum() <= 1.0)


def _inverse_parameters(
    theta: NDArray[np.float64], omega: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """C^{-1} as a BLT: its entries are 1 and then -sum_i omega'_i theta'_i^{j-1}, with omega' >= 0.

    The buffers' own step is S <- (diag(theta) - 1 omega^T) S + z: theta' are the eigenvalues, those of the symmetric
    diag(theta) - h h^T with h = sqrt(omega); they lie in (-1, 1) and interlace theta.
    """
    root = np.sqrt(omega)
    values, vectors = np.linalg.eigh(np.diag(theta) - np.outer(root, root))
    return values, (root @ vectors) ** 2


def _squared_error(theta: NDArray[np.float64], omega: NDArray[np.float64], n: int) -> float:
    """Squared norm of row n of B, whose entries are sum_i w_i r_i^j with r_0 = 1 and all w_i >= 0."""
    ratios, weights = _inverse_parameters(theta, omega)
    limit = 1.0 / (1.0 + (omega / (1.0 - theta)).sum())
    ratios = np.append(ratios, 1.0)
    weights = np.append(weights / (1.0 - ratios[:-1]), limit)
    return float(weights @ _geometric(np.outer(ratios, ratios), n) @ weights)


def _squared_sensitivity(theta: NDArray[np.float64], omega: NDArray[np.float64], n: int, k: int, s: int) -> float:
    """Squared norm of the sum of columns 0, s, 2s, ... of C, as many as there are, at most k."""
    rank = np.arange(min(k, (n - 1) // s + 1))
    common = omega @ _geometric(np.outer(theta, theta), (n - 1 - rank * s)[:, None, None]) * omega
    # A column with the earlier ones: s, 2s, ..., rank x s rows before it.
    earlier = theta ** (s - 1) * _geometric(theta**s, rank[:, None])
    return float(len(rank) + common.sum() + 2.0 * (earlier * (omega + theta * common)).sum())


def _geometric(ratio: NDArray[np.float64], terms: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """1 + ratio + ... + ratio^(terms-1), for |ratio| <= 1."""
    same = ratio == 1.0
    return np.where(same, terms, (1.0 - ratio**terms) / np.where(same, 1.0, 1.0 - ratio))


def _powers(ratios: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """ratio^j for j = 0 .. count-1: shape (count, ratios)."""
    return ratios ** np.arange(count)[:, None]
