"""The contract of a query: what every client answers once, in a session of its own, with a noisy sum of bounded rows.

A query is one file. It says how long a row is, what bounds it, how a record gives one, which public facts an answer
states, and how the sum of all answers is read. Client (:class:`murmurfl.clients.ClientQuery`), server
(:class:`murmurfl.strategies.QueryRound`), ledger and aggregator know nothing else about it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..errors import ConfigurationError
from ..mechanisms import noise_is_memoryless
from ..release.policy import NO_NOISE, PrivacyPolicy

Answer = TypeVar("Answer")
ClipUnit = Literal["sample", "nonnegative"]


def divided_mu(mu: float, share: float) -> tuple[float, float]:
    """Return the mu of a release with a ``share`` of mu^2, and that of everything beside it.

    In squares they add up to ``mu``.

    Notes
    -----
    **Formal guarantees.** Of releases that are mu_1-GDP and, whatever those were, mu_2-GDP, all are sqrt(mu_1^2 +
    mu_2^2)-GDP for the same neighbouring relation (Dong, Roth and Su 2022): that is mu here, up to rounding.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> [round(mu, 3) for mu in divided_mu(mu=1.0, share=0.36)]
    [0.6, 0.8]
    """
    if not 0 < share < 1:
        raise ConfigurationError(
            f"Expected a share of mu^2 above 0 and below 1, got {share!r}.",
            kind="out-of-range",
            setting="share",
            got=share,
        )
    mean = mu * math.sqrt(share)
    return mean, math.sqrt((mu - mean) * (mu + mean))


def query_policy(
    clip_norm: float, clip_unit: ClipUnit, mu: float = 0.0, *, mechanism: str = "", **fields: Any
) -> PrivacyPolicy:
    """Return the policy of a query's answer: the row of every sample, once, in a session of its own.

    Parameters
    ----------
    clip_norm : float
        S, which longer rows are cut to.
    clip_unit : {"sample", "nonnegative"}
        Whether rows have no negative entries: the client sets negative ones to zero then, and the noise is that of
        sqrt(2) S instead of 2 S.
    mechanism : str
        ``none`` for a simulation without noise.
    **fields
        Others of :class:`~murmurfl.privacy.PrivacyPolicy`, such as ``budget_mu``, or ``epsilon`` in the place of mu.

    Notes
    -----
    **Formal guarantees.** The one release of a session is mu-GDP for replacement of one sample of this client, and
    whatever the session is called, another one takes the same from the budget again. It stands alone and takes every
    sample of the client.
    Proof: docs/proofs/sensitivities.md.

    Examples
    --------
    >>> policy = query_policy(clip_norm=0.5, clip_unit="sample", mu=0.3)
    >>> policy.mu, policy.max_participations, policy.clip_norm
    (0.3, 1, 0.5)
    """
    settled: dict[str, Any] = {
        "clip_norm": clip_norm,
        "clip_unit": clip_unit,
        "mechanism": NO_NOISE if mechanism == NO_NOISE else "independent",
        "mu": mu,
        "batch_size": 1,
        "max_participations": 1,
        "batch_selection": "full_batch",
        "release_rule": "paper",
    }
    return PrivacyPolicy(**{**fields, **settled})


def mean_over_owners(rows: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean of each owner's rows, shape (owners, width).

    An owner of many samples counts as much as one of few.

    Parameters
    ----------
    rows : ndarray of shape (owners, most, width)
        Rows of samples.
    present : ndarray of shape (owners, most)
        Which samples there are. An owner without any has a row of zeros.
    """
    counts = present.astype(np.float64)
    return np.einsum("ijk,ij->ik", rows, counts) / np.maximum(counts.sum(axis=1), 1.0)[:, None]


def is_query_policy(policy: PrivacyPolicy) -> bool:
    """Return True if :func:`query_policy` can have made a policy."""
    alone = policy.release_rule == "paper" and (policy.mechanism == NO_NOISE or noise_is_memoryless(policy.mechanism))
    return alone and (policy.batch_selection, policy.max_participations, policy.clipping) == ("full_batch", 1, "clip")


@dataclass(frozen=True)
class QuerySum:
    """The sum of the answers to a query, and what is public about it.

    Examples
    --------
    >>> import numpy as np
    >>> found = QuerySum(np.array([1.5]), samples=3, clients=1, noise_std=0.0)
    >>> float(found.total[0] + found.samples / 2)
    3.0
    """

    total: NDArray[np.float64]
    """The sum of all rows with noise, shape (width,)."""
    samples: int
    """Samples in the sum."""
    clients: int
    """Clients in the sum."""
    noise_std: float
    """Standard deviation of the noise in each value of the sum."""
    facts: Sequence[Sequence[float]] = field(default=())
    """:meth:`Query.facts` of each client in the sum."""


_WORDS = {
    "setting": "{what}",
    "of_client": "{what}, which it releases beside its training",
    "of_client_if_trusted": "{what} beside them",
    "not_configured": "this client is not configured for {what}",
}
"""Default texts of a query in messages, where its class leaves them out."""


class Query(ABC, Generic[Answer]):
    """A question that clients answer with the sum of one bounded row for each sample.

    A subclass has at least a ``name`` and says ``what`` is released; other words follow from these.

    Notes
    -----
    **Formal guarantees.** Row i depends on what was measured of sample i alone. The client bounds each row by the
    policy of the query (:meth:`check_policy`), whatever :meth:`rows` gives.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from murmurfl.privacy import QuerySum
    >>> @dataclass(frozen=True)
    ... class Exceedances(Query[float]):
    ...     name = "exceedances"
    ...     what = "the number of records above a threshold"
    ...     threshold: float
    ...     @property
    ...     def width(self):
    ...         return 1
    ...     @property
    ...     def bound(self):
    ...         return 0.5, "sample"
    ...     def rows(self, measured):
    ...         return np.where(measured[:, :1] > self.threshold, 0.5, -0.5)
    ...     def read(self, found):
    ...         return float(found.total[0]) + found.samples / 2
    >>> query = Exceedances(threshold=1.0)
    >>> rows = query.rows(np.array([[0.2], [1.5], [3.0]]))
    >>> query.read(QuerySum(rows.sum(axis=0), samples=3, clients=1, noise_std=0.0))
    2.0
    >>> query.policy(mu=0.3).clip_norm
    0.5
    """

    name: ClassVar[str]
    """Name in requests, sessions, permits and noise keys."""
    what: ClassVar[str]
    """Description of what is released, in words for messages: "the mean of features"."""
    setting: ClassVar[str]
    """Name of the query in settings: "centring"."""
    of_client: ClassVar[str]
    """Description of what a client releases and when: "the mean of its features, which it releases first"."""
    of_client_if_trusted: ClassVar[str]
    """The same for a client without noise: "the mean of its features before them", its releases."""
    not_configured: ClassVar[str]
    """Refusal of a client that is asked and does not answer this query: a fixed text."""
    policy_maker: ClassVar[str] = "its method policy"
    """Name of what makes the policy, in words for messages."""
    gives: ClassVar[str] = ""
    """Entry of all later requests that brings what is made of the answer, such as a centre; empty for none."""
    gives_type: ClassVar[str] = "<f4"
    """NumPy's name of the type of its values."""
    at_a_model: ClassVar[bool] = False
    """Whether a request brings a model that rows are measured at."""
    of_trained: ClassVar[bool] = False
    """Whether only samples that are trained on have a row, and not those that are set aside."""
    per_owner: ClassVar[bool] = False
    """Whether the query can protect all samples of an owner as one (:meth:`rows_of_owners`)."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for name, words in _WORDS.items():
            if not hasattr(cls, name):
                setattr(cls, name, words.format(what=cls.what))

    @property
    @abstractmethod
    def width(self) -> int:
        """Values of a row."""

    @property
    def bound(self) -> tuple[float, ClipUnit] | None:
        """Clip and clip unit of a row; None where the policy of each federation decides them."""
        return None

    @abstractmethod
    def rows(self, measured: Any) -> NDArray[np.float64]:
        """Return the row of each sample, shape (samples, ``width``), from what was measured of it."""

    @abstractmethod
    def read(self, found: QuerySum) -> Answer:
        """Return the answer to the query from the sum of rows: post-processing."""

    def rows_of_owners(self, rows: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the row of each owner, shape (owners, ``width``), from the rows of its samples.

        ``rows`` has shape (owners, most, ``width``), and ``present`` of shape (owners, most) says which samples there
        are. The client bounds the row of an owner as it bounds one of a sample.
        """
        return np.einsum("ijk,ij->ik", rows, present.astype(np.float64))

    def policy(self, mu: float = 0.0, **fields: Any) -> PrivacyPolicy:
        """Return the policy of a client's answer, for a query that has a :attr:`bound`: see :func:`query_policy`.

        Notes
        -----
        **Formal guarantees.** The one release of a session is mu-GDP for replacement of one row of this client's data:
        a sample, or an owner where ``fields`` has samples_per_owner.
        Proof: docs/proofs/sensitivities.md.
        """
        if self.bound is None:
            raise ConfigurationError(
                f"Expected a clip for {self.what}: make its policy with {self.policy_maker}.",
                kind="missing",
                setting="clip",
            )
        return query_policy(*self._bound(owners=bool(fields.get("samples_per_owner"))), mu, **fields)

    def _bound(self, *, owners: bool) -> tuple[float, ClipUnit]:
        """Return clip and clip unit of a sample's row, or an owner's, which is clipped and nothing else."""
        norm, unit = self.bound or (0.0, "sample")
        return norm, "sample" if owners else unit

    def check_policy(self, policy: PrivacyPolicy) -> None:
        """Raise unless :attr:`policy_maker` can have made a policy."""
        if not self.per_owner and policy.samples_per_owner:
            raise ConfigurationError(
                f"Expected no samples_per_owner for {self.what}, which protects single samples, got "
                f"{policy.samples_per_owner}.",
                kind="conflict",
            )
        bound = self._bound(owners=policy.samples_per_owner > 0)
        bounded = self.bound is None or (policy.clip_norm, policy.clip_unit) == bound
        if not (bounded and is_query_policy(policy)):
            words = "" if self.bound is None else f"clip_norm {bound[0]:g}, clip_unit {bound[1]!r}, "
            raise ConfigurationError(
                f"Expected for {self.what} a policy with {words}batch_selection 'full_batch', max_participations 1, "
                "clipping 'clip', mechanism 'independent' and release_rule 'paper', got another: make it with "
                f"{self.policy_maker}.",
                kind="conflict",
                setting="policy",
            )

    def entries(self, noise_std: float, *, held_out: bool) -> dict[str, Any]:
        """Public entries of a client's reply.

        Parameters
        ----------
        noise_std : float
            Standard deviation of the noise in each value of the client's release.
        held_out : bool
            Whether the release is of samples that are set aside.
        """
        return {protocol.NOISE_STD: noise_std}

    def facts(self, entries: Mapping[str, Any]) -> list[float] | None:
        """Read what :meth:`entries` wrote, the noise first; None where it makes no sense."""
        std = entries.get(protocol.NOISE_STD)
        return [std] if isinstance(std, float) and math.isfinite(std) and std >= 0 else None

    def settings(self) -> dict[str, Any]:
        """Return what client and server must agree on, as plain values for a checkpoint."""
        return {}
