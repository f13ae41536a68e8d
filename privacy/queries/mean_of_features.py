r"""Private centring: the mean of everybody's features, released once, and every sample seen from there.

Features without negative values point all in one direction, more or less, and what tells classes apart is little beside
it. Taken around their mean m they spread, and a model learns from less. m is of private samples, so it is a release
like any other: the first one of a training, in a session of its own, with a share of mu^2.

**Its sensitivity.** With a and b two rows of features, bounded by the client
(:mod:`~murmurfl.privacy.release.clipping`), replacing one sample changes the client's sum by a - b, and

    ||a - b||^2 = ||a||^2 + ||b||^2 - 2 <a, b>  <=  2 S^2 - 2 <a, b>.

Rows without negative entries have <a, b> >= 0, so the sum moves by at most sqrt(2) S, and not by 2 S. Features being
without negative entries is nothing to rely on. The client sets negative ones to zero and cuts rows longer than S, and
refuses none. Where features may be negative, ``nonnegative`` is False, and the sensitivity is 2 S.

**What follows it.** x = unit(phi - m) with a constant appended, unit again, is computed on the client from one sample
and m. m came from a server, and is public: x is as private as the sample's own features, whatever m is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..accounting.gdp import check_count
from ..release.clipping import squared_lengths
from ..release.policy import PrivacyPolicy
from .query import Query, QuerySum, query_policy

CENTRING_SHARE = 0.05
"""The share of mu^2 that the mean is given by default."""
CENTRING_CONSTANT = 0.3
"""The constant appended to a sample's features around the mean, before they are made unit again."""


def centring_policy(
    clip_norm: float, *, nonnegative: bool, mu: float = 0.0, mechanism: str = "", **fields: Any
) -> PrivacyPolicy:
    """Return the policy of the mean's release: every sample's features, once, in a session of its own.

    Parameters
    ----------
    clip_norm : float
        S, which longer rows of features are cut to: a public bound of how they are made.
    nonnegative : bool
        Whether features have no negative entries, as they are made. The client sets negative ones to zero then, and
        the noise is that of sqrt(2) S instead of 2 S.
    mechanism : str
        ``none`` for a simulation without noise.
    **fields
        ``budget_mu`` and others of :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one sample of this client, and
    whatever the session is called, another one takes the same from the budget again. It stands alone and takes every
    sample of the client.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> policy = centring_policy(clip_norm=1.0, nonnegative=True, mu=0.5)
    >>> policy.mu, policy.max_participations, policy.clip_unit
    (0.5, 1, 'nonnegative')
    """
    return query_policy(clip_norm, "nonnegative" if nonnegative else "sample", mu, mechanism=mechanism, **fields)


@dataclass(frozen=True)
class MeanRows(Query[NDArray[np.float32]]):
    """The query of a mean of features: a sample's row is its features, and the sum is read as their mean.

    Parameters
    ----------
    num_features : int
        k, values of one sample's features.

    Notes
    -----
    **Formal guarantees.** Row i is the features of sample i. Its length is for the client to bound
    (:func:`centring_policy`).
    """

    name: ClassVar[str] = protocol.OF_MEAN
    what: ClassVar[str] = "the mean of features"
    setting: ClassVar[str] = "centring"
    of_client: ClassVar[str] = "the mean of its features, which it releases first"
    of_client_if_trusted: ClassVar[str] = "the mean of its features before them"
    not_configured: ClassVar[str] = (
        "this client is not configured for centring: it releases no mean and takes no centre"
    )
    policy_maker: ClassVar[str] = "centring_policy"
    gives: ClassVar[str] = protocol.CENTRE
    of_trained: ClassVar[bool] = True

    num_features: int

    def __post_init__(self) -> None:
        check_count("num_features", self.num_features)

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.num_features

    def rows(self, measured: Any) -> NDArray[np.float64]:
        """Return the features of a batch of samples, an array or a tuple that begins with it: one row each."""
        values = np.asarray(measured[0] if isinstance(measured, tuple) else measured, dtype=np.float64)
        return values.reshape(len(values), -1)

    def read(self, found: QuerySum) -> NDArray[np.float32]:
        """Return the mean of the features, shape (k,)."""
        return (found.total / found.samples).astype(np.float32)

    def entries(self, noise_std: float, *, held_out: bool) -> dict[str, Any]:
        """No entries: a mean is used without an interval."""
        return {}

    def facts(self, entries: Mapping[str, Any]) -> list[float] | None:
        """No facts."""
        return []

    def settings(self) -> dict[str, Any]:
        """Return the number of features."""
        return {"num_features": self.num_features}


def centred(features: NDArray[Any], centre: NDArray[np.floating], constant: float) -> NDArray[np.float32]:
    """Features around a centre, with a constant: unit([unit(phi - m), c]) of each row phi, shape (samples, k + 1).

    Row i depends on sample i and the centre alone. Its length is 1 but for rounding. A row that is the centre has
    nothing but its constant c > 0; a row that is not finite gives NaN.

    Examples
    --------
    >>> import numpy as np
    >>> centred(np.array([[1.0, 2.0]]), np.array([1.0, 0.0]), constant=0.5).tolist()
    [[0.0, 0.8944271802902222, 0.4472135901451111]]
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
