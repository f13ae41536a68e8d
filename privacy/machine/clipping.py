"""Clipping of per-sample contributions to an L2 bound."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError
from .clipping_figures import observe

# Rounding of the norm and of the scaling is a few units in the last place of float64; this margin swallows it, so the
# bound below is true of the numbers, not only of the reals behind them.
_MARGIN = 1.0 - 2.0**-40
LEAST_STABILITY = 1e-100
"""The smallest gamma of automatic clipping. Squares of entries below 1e-154 are lost, so the norm of so short a row may
come out as zero; beside this that is nothing, and a smaller gamma alone would make a row of any length of it."""


def clip_per_sample(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Scale every row down to an L2 norm of at most ``clip_norm``.

    Parameters
    ----------
    contributions : array of shape (samples, parameters)
        One row a sample. Any real dtype; computed in float64.
    clip_norm : float
        The bound S, > 0 and finite.

    Returns
    -------
    ndarray of shape (samples, parameters), float64
        Rows with norm at most S; a row with any NaN or infinity becomes zero, and a zero row stays zero.

    Raises
    ------
    ConfigurationError
        If clip_norm is not positive and finite, or contributions is not a matrix.

    Notes
    -----
    **Formal guarantees.** Whatever the input, each returned row has L2 norm <= S in exact arithmetic (for up to 2^26
    parameters, because NumPy adds up squares in runs of 8192), so replacing one sample changes a sum of rows by at most
    2 S. A non-finite row is made zero, not dropped: the number of rows, and
    with it any mean, does not depend on the data.
    Proof: docs/proofs/sensitivities.md.
    """
    return _clipped(contributions, clip_norm, observed=False)


def clip_contributions(contributions: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """:func:`clip_per_sample` for a machine's release; a simulation may observe it (:mod:`.clipping_figures`).

    Notes
    -----
    **Formal guarantees.** Each returned row has L2 norm <= S, so replacing one sample changes a sum of rows by at most
    2 S; a row that is not finite is made zero.
    Proof: docs/proofs/sensitivities.md.
    """
    return _clipped(contributions, clip_norm, observed=True)


def _clipped(contributions: ArrayLike, clip_norm: float, *, observed: bool) -> NDArray[np.float64]:
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ConfigurationError(f"Expected clip_norm > 0 and finite, got {clip_norm!r}.")
    rows = np.array(contributions, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigurationError(f"Expected contributions of shape (samples, parameters), got shape {rows.shape}.")
    if rows.size == 0:
        return rows
    largest = np.maximum.reduce(np.abs(rows), axis=1)
    finite = np.isfinite(largest)  # a NaN or an infinity among the entries is the largest of them
    if not finite.all():
        rows[~finite] = 0.0
        largest[~finite] = 0.0
    # Dividing by the largest entry first keeps the square of a huge but finite entry from overflowing.
    scale_free = np.float64(1.0)
    if largest.max() > 1e150 or largest.min() < 1e-150:
        scale_free = np.where(largest > 0, largest, 1.0)
        rows /= scale_free[:, None]
    unit_norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    bound = clip_norm * _MARGIN
    with np.errstate(over="ignore"):  # with an infinite bound nothing is clipped
        if observed:
            observe(np.where(finite, unit_norms * scale_free, np.nan), clip_norm)
        within = unit_norms <= bound / scale_free
        scales = np.where(within, scale_free, bound / np.where(within, 1.0, unit_norms))
    if not (scales == 1.0).all():
        rows *= scales[:, None]
    return rows


def bounded_scales(
    norms: NDArray[np.float64], clip_norm: float | NDArray[np.float64], stability: float | None = None
) -> NDArray[np.float64]:
    """Factors that bring rows of given L2 norms down to at most ``clip_norm``; NaN for a norm that is not finite.

    Parameters
    ----------
    norms : ndarray of shape (samples,)
        True up to a relative error of 2^-41.
    clip_norm : float or ndarray of shape (samples,)
        S, > 0.
    stability : float, optional
        gamma >= ``LEAST_STABILITY``: every row g then becomes S g / (||g|| + gamma), which is automatic clipping (Bu,
        Wang, Zha and Karypis 2022).

    Notes
    -----
    **Formal guarantees.** A row times its scale has norm at most S.
    """
    bound = clip_norm * _MARGIN
    with np.errstate(all="ignore"):
        if stability is not None:
            return np.where(np.isfinite(norms), bound / (norms + stability), np.nan)
        return np.where(norms <= bound, 1.0, np.where(np.isfinite(norms), bound / norms, np.nan))
