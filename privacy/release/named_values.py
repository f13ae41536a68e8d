r"""Names of frequent values: texts that nobody has listed are counted with noise and named above a threshold.

A column of texts has no public list of values, and a list made from the records would show each of them. So every value
that occurs is counted, noise is added to each count, and only values whose noisy count exceeds a threshold are named.
Values that occur nowhere are never looked at. Two neighbouring tables differ in which values occur at all: the value
that the replaced record has in a column may be no other record's, in either table. The probability that such a value is
named is all that mu does not cover. It is the *added delta*:

    Q = 2 k q,    q = P(1 + noise > threshold),

with k columns: in each, one value of either table. The threshold is chosen for a Q that is given, and the ledger books
Q next to mu. Proof: docs/proofs/sensitivities.md, 2j.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from ..errors import OF_DATA, ConfigurationError, InvalidRecordError, is_interrupt
from ..ledger.ledger_records import Ledger
from ..noise import NoiseKeys
from ..queries.query import query_policy
from .admission import Admission, AdmissionRule
from .known_samples import RowBytes
from .ledgered_privatizer import LedgeredPrivatizer, Release
from .prefix_sums import ReleaseRule

logger = logging.getLogger(__name__)

MOST_NAMED = 50
"""Values that are named of a column at most: the most frequent ones, by their noisy counts."""
_ROUNDING = 1e-9
"""Room, relative, for the rounding of a quantile."""

Texts = Callable[[int], Sequence[str | None]]
"""Function of a record's number that returns its value in each column, None where it has none."""


def value_threshold(noise_std: float, spacing: float, columns: int, added_delta: float) -> float:
    """Return the threshold that a value of a single record exceeds with probability q, 2 k q <= ``added_delta``.

    Parameters
    ----------
    noise_std : float
        Standard deviation of the Gaussian noise in a count.
    spacing : float
        Spacing of the grid to which counts and noise are rounded.
    columns : int
        k, columns of texts.
    added_delta : float
        Q, for all columns together.

    Count and noise are rounded by at most half the spacing each, which the threshold covers
    (docs/proofs/sensitivities.md, 2j).

    Examples
    --------
    >>> round(value_threshold(noise_std=10.0, spacing=0.0, columns=1, added_delta=2e-6), 1)
    48.5
    """
    deviations = -float(ndtri(added_delta / (2.0 * columns))) * (1.0 + _ROUNDING)
    return 1.0 + spacing + deviations * noise_std


class NamedValues(LedgeredPrivatizer):
    """The client that names frequent values of columns of texts, once in a session.

    Parameters
    ----------
    columns : int
        k, the columns of texts.
    mu : float
        Mu of the counts.
    added_delta : float
        Q, the probability at most that a value is named which one of two neighbouring tables does not have.
    num_samples, ledger, keys, data
        See :class:`~murmurfl.privacy.release.ledgered_privatizer.LedgeredPrivatizer`.
    delta, budget_mu : float
        The ledger's.

    Raises
    ------
    ConfigurationError
        If the added delta is not below ``delta``, or as the base class.

    Notes
    -----
    **Formal guarantees.** What :meth:`release` returns is, for replacement of one record, within total variation Q of a
    mu-GDP mechanism, in either direction: so it is (epsilon, delta(epsilon) + Q)-DP for every epsilon, with delta of
    mu-GDP, also together with everything else that the ledger counts. It holds whatever texts a record has, one for
    each column at most, if what ``texts`` returns for record i depends on record i alone. The ledger has the release,
    with mu and Q, before it is returned. Proof: docs/proofs/sensitivities.md, 2j.

    Examples
    --------
    >>> from murmurfl.privacy import MemoryLedger, SimulatedKeys
    >>> texts = ["a"] * 60 + ["b"] * 39 + ["Ann's own"]
    >>> names = NamedValues(1, 1.0, 1e-6, 100, MemoryLedger(), SimulatedKeys(1, "3"), delta=1e-5, budget_mu=2.0)
    >>> names.release("session", lambda record: [texts[record]])
    [('a', 'b')]
    """

    def __init__(
        self,
        columns: int,
        mu: float,
        added_delta: float,
        num_samples: int,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        delta: float,
        budget_mu: float | None,
        data: RowBytes | None = None,
    ) -> None:
        if not 0.0 < added_delta < delta:
            raise ConfigurationError(
                f"Expected an added delta above 0 and below delta = {delta!r}, got {added_delta!r}.",
                kind="out-of-range",
                setting="added_delta",
                got=added_delta,
            )
        fields = {"delta": delta, "budget_mu": budget_mu, "noise_quality": "exact"}
        policy = query_policy(math.sqrt(columns), "nonnegative", mu, **fields)
        super().__init__(policy, columns * num_samples, num_samples, ledger, keys, data=data)
        self.columns, self.num_records = columns, num_samples
        self.plan = replace(self.plan, loss=self.plan.loss.with_added(added_delta))
        self.admission = AdmissionRule(self.policy, self.plan, self.num_parameters, self.admission.budget)
        self.threshold = value_threshold(self.plan.noise_std, self.plan.grid.spacing, columns, added_delta)

    def release(self, session: str, texts: Texts) -> list[tuple[str, ...]]:
        """Return the frequent values of each column, the most frequent first, once they are recorded.

        Raises
        ------
        RefusedError
            If the session was released already, or the budget forbids it. Nothing was released or spent.
        LedgerError
            If the ledger cannot be believed.
        """
        named: list[tuple[str, ...]] = []

        def record(admission: Admission, counted: list[Counter[str]]) -> Release:
            values = [sorted(column) for column in counted]
            made = np.zeros((self.columns, self.num_records))
            for row, column, found in zip(made, counted, values, strict=True):
                row[: len(found)] = [column[value] for value in found]
            nonce = self._keys.nonce(session, admission.release)
            counts = self.plan.grid.counts(made.ravel())
            rule = ReleaseRule(self.policy, self.plan, self.num_parameters)
            (noisy,) = rule.advance(admission.streams, [counts], [self._keys.secret_key], [nonce])
            release = self._record(admission, noisy)
            found = release.values.reshape(self.columns, self.num_records)
            named[:] = [self._above(row, of) for row, of in zip(found, values, strict=True)]
            return release

        self._answer(session, 0, lambda _: self._counted(texts), record)
        return named

    def _counted(self, texts: Texts) -> list[Counter[str]]:
        """Return how often each value occurs; a record that cannot be read has none."""
        counted: list[Counter[str]] = [Counter() for _ in range(self.columns)]
        for number in range(self.num_records):
            try:
                found = [value if isinstance(value, str) else None for value in texts(number)]
            except InvalidRecordError:
                continue
            except BaseException as error:
                if is_interrupt(error):
                    raise
                logger.exception("The values of a record could not be read; it has none.", extra=OF_DATA)
                continue
            for column, value in zip(counted, found, strict=False):
                if value is not None:
                    column[value] += 1
        return counted

    def _above(self, noisy: NDArray[np.float64], values: Sequence[str]) -> tuple[str, ...]:
        """Return the values whose noisy count exceeds the threshold, of those that occur."""
        kept = [(count, value) for count, value in zip(noisy.tolist(), values, strict=False) if count > self.threshold]
        return tuple(value for _, value in sorted(kept, key=lambda pair: -pair[0])[:MOST_NAMED])
