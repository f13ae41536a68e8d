r"""Private centring: the mean of everybody's features, released once, and every sample seen from there.

Features without negative values point all in one direction, more or less, and what tells classes apart is little beside
it. Taken around their mean m they spread, and a model learns from less. m is of private samples, so it is a release
like any other: the first one of a training, in a session of its own, with a share of mu^2.

**Its sensitivity.** With a and b two rows of features, bounded by the machine
(:mod:`~murmurfl.privacy.machine.clipping`), replacing one sample changes the machine's sum by a - b, and

    ||a - b||^2 = ||a||^2 + ||b||^2 - 2 <a, b>  <=  2 S^2 - 2 <a, b>.

Rows without negative entries have <a, b> >= 0, so the sum moves by at most sqrt(2) S, and not by 2 S. Features being
without negative entries is nothing to rely on. The machine sets negative ones to zero and cuts rows longer than S, and
refuses none. Where features may be negative, ``nonnegative`` is False, and the sensitivity is 2 S.

**What follows it.** x = unit(phi - m) with a constant appended, unit again, is computed on the machine from one sample
and m. m came from a server, and is public: x is as private as the sample's own features, whatever m is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..machine.clipping import squared_lengths
from ..machine.policy import NO_NOISE, PrivacyPolicy

CENTRING_SHARE = 0.05
"""The share of mu^2 that the mean is given by default."""
CENTRING_CONSTANT = 0.3
"""The constant appended to a sample's features around the mean, before they are made unit again."""


def divided_mu(mu: float, share: float) -> tuple[float, float]:
    """The mu of a release with a ``share`` of mu^2, and that of everything beside it; in squares they add up to ``mu``.

    Notes
    -----
    **Formal guarantees.** Of releases that are mu_1-GDP and, whatever those were, mu_2-GDP, all are sqrt(mu_1^2 +
    mu_2^2)-GDP for the same neighbouring relation (Dong, Roth and Su 2022): that is mu here, up to rounding.
    Proof: docs/proofs/release-rule.md.
    """
    if not 0 < share < 1:
        raise ConfigurationError(f"Expected a share of mu^2 above 0 and below 1, got {share!r}.")
    mean = mu * math.sqrt(share)
    return mean, math.sqrt((mu - mean) * (mu + mean))


def centring_policy(
    clip_norm: float, *, nonnegative: bool, mu: float = 0.0, mechanism: str = "", **fields: Any
) -> PrivacyPolicy:
    """The policy of the mean's release: every sample's features, once, in a session of its own.

    Parameters
    ----------
    clip_norm : float
        S, which longer rows of features are cut to: a public bound of how they are made.
    nonnegative : bool
        Whether features have no negative entries, as they are made. The machine sets negative ones to zero then, and
        the noise is that of sqrt(2) S instead of 2 S.
    mechanism : str
        ``none`` for a simulation without noise.
    **fields
        ``budget_mu`` and others of :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one sample of this machine, and
    whatever the session is called, another one takes the same from the budget again. It stands alone and takes every
    sample of the machine.
    Proof: docs/proofs/sensitivities.md.
    """
    return PrivacyPolicy(
        clip_norm=clip_norm,
        batch_size=1,
        max_participations=1,
        mu=mu,
        mechanism=NO_NOISE if mechanism == NO_NOISE else "independent",
        clip_unit="nonnegative" if nonnegative else "sample",
        order="all",
        release_rule="paper",
        **fields,
    )


def centred(features: NDArray[Any], centre: NDArray[np.floating], constant: float) -> NDArray[np.float32]:
    """Features around a centre, with a constant: unit([unit(phi - m), c]) of each row phi, shape (samples, k + 1).

    Row i depends on sample i and the centre alone. Its length is 1 but for rounding. A row that is the centre has
    nothing but its constant c > 0; a row that is not finite gives NaN.
    """
    rows = np.asarray(features, dtype=np.float64).reshape(len(features), -1)
    with np.errstate(all="ignore"):
        rows = rows - np.asarray(centre, dtype=np.float64)
        squares = squared_lengths(rows)
        lengths = np.sqrt(np.where(squares > 0, squares, 1.0) * (1.0 + constant * constant))
        found = np.empty((len(rows), rows.shape[1] + 1), dtype=np.float32)
        np.divide(rows, lengths[:, None], out=found[:, :-1], casting="unsafe")
        found[:, -1] = np.where(squares > 0, constant / math.sqrt(1.0 + constant * constant), 1.0)
        found[~np.isfinite(squares)] = np.nan
    return found
