"""A client with a ledger: the loop that every kind of client shares, whatever its releases are made of.

A client admits a request, computes, records, and only then answers. What is computed and how it becomes a release is
the business of its two kinds: prefix sums (:class:`~murmurfl.privacy.Privatizer`) and epochs
(:class:`~murmurfl.privacy.ShuffledPrivatizer`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..accounting.loss import Loss, SumAssumption
from ..accounting.noise_plan import NoisePlan
from ..errors import ConfigurationError
from ..ledger.ledger_records import Account, JoinedLedgers, Ledger, LedgerBlock, StreamBlock
from ..mechanisms import State
from ..noise import Grid, NoiseKeys
from .admission import ID_BYTES, ROUNDING, Admission, AdmissionRule, Request, has_shuffled_batches
from .clipping import MOST_ROWS
from .known_samples import Owners, RowBytes, any_data, make_digest
from .policy import NO_NOISE, PrivacyPolicy


@dataclass(frozen=True)
class Release:
    """Release of a client: of its fields only ``counts`` depends on data.

    Under secure aggregation it does not leave as it is. It has only this client's share of the noise, so it is as
    sensitive as data: by itself it guarantees the plan's ``loss.worst_case``. Clients send it under masks
    (:class:`~murmurfl.privacy.sums.masking.Masking`) and in no other way.

    Parameters
    ----------
    counts : ndarray of shape (parameters,), int64
        P_k - P_ack, or the end of an epoch, in units of the grid's spacing; read-only.
    release, ack : int
        k, and the acknowledgement it was built on.
    release_id, ack_id : bytes
        Random names of the two, 16 bytes each, under secure aggregation; empty otherwise.
    samples : int
        How many samples the server counts it for: b, or all that the client has; public.
    mended : bool
        Whether it also takes out the noise of releases whose sums were skipped.

    Notes
    -----
    **Formal guarantees.** The counts are covered by the plan of the session that they belong to: mu for replacement of
    one sample, under secure aggregation only of the sum they enter. Nothing else in it depends on data.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, MemoryLedger(), SimulatedKeys(1, "3"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 3)))
    >>> release.release, release.ack, release.samples, release.values.shape
    (1, 0, 2, (3,))
    >>> np.array_equal(release.values, release.counts * release.spacing)
    True
    """

    counts: NDArray[np.int64]
    spacing: float
    release: int
    ack: int
    release_id: bytes = b""
    ack_id: bytes = b""
    samples: int = 1
    recovered: bool = False

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The counts as numbers, shape (parameters,), exact multiples of the spacing, as they are sent."""
        return Grid(self.spacing).values(self.counts)


@dataclass(frozen=True)
class PrivacyStatement:
    """A client's account of what it has spent and guarantees in one session; independent of its data.

    Parameters
    ----------
    releases : int
        Releases made in this session.
    mu_spent : float
        Bookkeeping: mu of those releases, from the noise that was put on them. Of a session that was opened under
        another policy, or closed, all that it reserved.
    guaranteed : Loss
        Of all the releases this session may make: the guarantee against the server; of such a session what it
        reserved. Infinite under a trusted server, whose own guarantee towards everybody else is not the client's to
        state, and with mechanism ``none``. Conditional under secure aggregation: its worst case holds whatever server,
        helpers and other clients do.
    mu_budget : float
        mu of everything the client will ever release, against any server; infinite once contributions have left
        without noise. Under secure aggregation it rests on what ``guaranteed`` rests on; of a client whose ledger
        has such sessions and which now has releases seen by themselves it is that of the worst case.
    samples_used : int
        Fresh samples used up.
    max_participations : int
        K.
    releases_left : int
        How many more releases of this session its cap and the fresh samples allow, whatever the budget allows.
    sums : SumAssumption, optional
        The policy's under secure aggregation. None otherwise.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, MemoryLedger(), SimulatedKeys(1, "3"))
    >>> release = privatizer.release("session", 0, lambda samples: np.zeros((2, 3)))
    >>> statement = privatizer.statement("session")
    >>> statement.releases, statement.releases_left, statement.guaranteed.mu, round(statement.mu_spent, 3)
    (1, 4, 1.0, 0.447)
    """

    releases: int
    mu_spent: float
    guaranteed: Loss
    mu_budget: float
    samples_used: int
    max_participations: int
    releases_left: int
    sums: SumAssumption | None = None


_NO_ID = bytes(ID_BYTES)
_ONE = np.zeros(1, np.intp)  # the row of a client in its block of one


def stream_fingerprint(plan: NoisePlan, secret_key: bytes, roster: str = "") -> str:
    """Return the digest of a policy, the client's key and, under secure aggregation, a roster.

    A stream belongs to them.

    Under another key the last noise row of a stream could not be taken back out.
    """
    terms = f"murmurfl stream\0{plan.fingerprint}\0{roster}".encode()
    return hmac.digest(secret_key, terms, hashlib.sha256).hex()


def release_of(
    streams: StreamBlock,
    row: int,
    counts: NDArray[np.int64],
    plan: NoisePlan,
    policy: PrivacyPolicy,
    num_samples: int,
) -> Release:
    """Return the release of one stream, which was recorded before.

    Notes
    -----
    **Formal guarantees.** The ledger has the release before it is put together here. All but ``counts`` is public:
    under a secret order the constant b stands for the number of samples.
    """
    release, ack, names = int(streams.release[row]), int(streams.ack[row]), streams.ids[row]
    ids = [names.get(j, _NO_ID) for j in (release, ack)] if names else (b"", b"")
    return Release(counts, plan.grid.spacing, release, ack, *ids, samples=samples_counted(policy, num_samples))


def samples_counted(policy: PrivacyPolicy, num_samples: int) -> int:
    """Return the number of samples the server counts a release for: public."""
    # Of a secret order nobody learns how many samples there are in a release: the constant b stands for them, and for
    # those of a Poisson batch all that the client has.
    return num_samples if policy.batch_selection in ("full_batch", "poisson") else policy.batch_size


def check_real(policy: PrivacyPolicy, ledger: Ledger, data: RowBytes | Owners | None, roster: str) -> None:
    """Raise if a real client is set up as only a simulation may be."""
    if not ledger.durable:
        raise ConfigurationError(
            f"Expected a durable ledger on a real client, got {type(ledger).__name__}: what it forgets when the "
            "process ends would be spent again.",
            kind="unsupported",
            setting="ledger",
        )
    if policy.noise_quality != "exact":
        raise ConfigurationError(
            f"Expected noise_quality 'exact' on a real client, got {policy.noise_quality!r}: 'fast' noise is for "
            "simulation only.",
            kind="conflict",
            setting="noise_quality",
            got=policy.noise_quality,
        )
    if policy.mechanism == NO_NOISE:
        raise ConfigurationError(
            f"Expected a noise mechanism on a real client, got {policy.mechanism!r}: runs without noise are for "
            "simulation only.",
            kind="conflict",
            setting="mechanism",
            got=policy.mechanism,
        )
    if data is None:
        raise ConfigurationError(
            "Expected `data` on a real client, got none: the ledger must know the rows it was used with. Pass "
            "data=row_bytes(samples).",
            kind="missing",
            setting="data",
        )
    if policy.samples_per_owner and not (isinstance(data, Owners) and data.marks is not None):
        raise ConfigurationError(
            "Expected the owners' places on a real client to follow from their names, got rows in an order of their "
            "own: group them by Owners.of, and pass data=samples.owners.",
            kind="mismatch",
            setting="data",
        )
    if policy.trust == "secure-aggregation" and not roster:
        raise ConfigurationError(
            "Expected `roster` on a real client under secure aggregation, got none: a session must not go on under "
            "another roster. Pass roster=masking.roster.digest.",
            kind="missing",
            setting="roster",
        )


def check_plan(policy: PrivacyPolicy, plan: NoisePlan, ledger: Ledger) -> None:
    """Raise if the noise cannot serve the policy, or the local budget cannot cover one session."""
    if problem := plan.problem or plan.local_problem:
        raise ConfigurationError(problem, kind="out-of-range")
    needed, budget = plan.loss.worst_case.mu * (1 + ROUNDING), policy.budget.worst_case.mu
    if policy.trust == "secure-aggregation" and plan.loss.worst_case.mu > budget * (1 + ROUNDING):
        raise ConfigurationError(
            f"Expected a budget_local_mu of at least {needed:.5g}, which one session with mu = "
            f"{policy.mu:g} and {policy.sums.min_honest} honest clients takes of it, got {budget:g}: not one would be "
            f"opened. Lower mu or min_honest.{ledger.local_hint}",
            kind="out-of-range",
            setting="budget_local_mu",
            got=budget,
        )


def within_ledger(policy: PrivacyPolicy, ledger: Ledger) -> PrivacyPolicy:
    """Fill in the ledger's budget_local_mu if the policy has none; raise if budgets or delta differ.

    Notes
    -----
    **Formal guarantees.** Only a missing budget is filled in: what all sessions release stays within the ledger's
    budget_local_mu, in the worst case.
    """
    summed = policy.trust == "secure-aggregation"
    if summed and policy.budget_local_mu is None and ledger.budget_local_mu is not None:
        policy = replace(policy, budget_local_mu=ledger.budget_local_mu)
    for name in ("budget_mu", "delta", *(("budget_local_mu",) if summed else ())):
        fixed, ours = getattr(ledger, name), getattr(policy, name)
        if fixed is not None and not math.isclose(fixed, ours, rel_tol=ROUNDING):
            raise ConfigurationError(
                f"Expected {name} = {fixed!r}, with which the ledger was made, got {ours!r} in the policy: "
                "everything on this client's data shares one budget. Put the ledger's into the configuration.",
                kind="mismatch",
                setting=name,
                got=ours,
            )
    return policy


def check_samples(policy: PrivacyPolicy, num_samples: int) -> None:
    """Raise if a policy needs more samples than the client has."""
    if policy.sums_samples:
        if not 1 <= num_samples <= MOST_ROWS:
            raise ConfigurationError(
                f"Expected 1 to {MOST_ROWS} samples with batch_selection {policy.batch_selection!r}, got "
                f"{num_samples}: counts of their sum would not be exact.",
                kind="out-of-range",
                setting="num_samples",
                got=num_samples,
            )
        return
    if num_samples < 1:
        raise ConfigurationError(
            f"Expected at least one sample, got {num_samples}.", kind="out-of-range", setting="num_samples"
        )
    if policy.has_few(num_samples) and not policy.clips_samples:
        releases = policy.batches_of_a_pass
        name = "min_separation" if policy.sample_participations > 1 else "max_participations"
        raise ConfigurationError(
            f"Expected batch_size x {name} <= the client's {num_samples} samples with clip_unit "
            f"{policy.clip_unit!r}, got {policy.batch_size} x {releases} = {policy.batch_size * releases}.",
            kind="out-of-range",
            setting="batch_size",
            got=policy.batch_size,
        )


ComputedT = TypeVar("ComputedT")


class LedgeredPrivatizer:
    """A client's policy, ledger, keys and data digest, and the only way out for anything; a base class.

    Parameters
    ----------
    policy : PrivacyPolicy
        The client's own configuration.
    num_parameters : int
        d.
    num_samples : int
        Samples the client holds, or places of owners; each is used as often as the policy says.
    ledger : Ledger
        Where releases are recorded before they leave.
    keys : NoiseKeys
        The secret key and the source of nonces.
    data : callable or Owners, optional
        How rows are recognised (:func:`~murmurfl.privacy.release.known_samples.known_by`), so that the ledger knows the
        data it was used with; required with real keys, ignored with simulated ones, whose ledger ends with the run.
    roster : str
        Under secure aggregation the digest of the roster that releases are masked for; required there with real keys. A
        session belongs to it: under another roster a helper may be new, and not know what its predecessor opened.

    Raises
    ------
    ConfigurationError
        If there is no sample, or the cap needs more fresh ones than there are and what is clipped is not single
        samples, or with real keys the noise is ``fast`` or ``none`` or
        cannot serve the policy, the ledger is not durable, or ``data`` is missing.

    Notes
    -----
    **Formal guarantees.** Whatever requests arrive in whatever order: every release was admitted by
    :class:`~murmurfl.privacy.release.admission.AdmissionRule` inside the transaction that recorded it, from samples
    that were still the admitted ones then, and was recorded before it is returned, provided the ledger keeps its
    promise. What a release must be made of, for all of them to be mu-GDP, is each kind's own promise. Proof:
    docs/proofs/release-rule.md.

    Examples
    --------
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, MemoryLedger(), SimulatedKeys(1, "3"))
    >>> isinstance(privatizer, LedgeredPrivatizer), privatizer.admits("session", ack=0)
    (True, slice(0, 2, None))
    """

    def __init__(
        self,
        policy: PrivacyPolicy,
        num_parameters: int,
        num_samples: int,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        data: RowBytes | Owners | None = None,
        roster: str = "",
    ) -> None:
        if not keys.simulated:
            check_real(policy, ledger, data, roster)
        policy = within_ledger(policy, ledger)
        check_samples(policy, num_samples)
        self.policy = policy
        self.plan: NoisePlan = policy.plan(num_parameters)
        if not keys.simulated:
            check_plan(policy, self.plan, ledger)
        self.num_parameters = num_parameters
        self.num_samples = num_samples
        self.num_rows = num_samples  # more, where rows behind the samples are known that other sessions use
        self._ledger = ledger
        self._ledgers = JoinedLedgers([ledger])
        self._keys = keys
        known = None if keys.simulated or data is any_data else data
        self._data = None if known is None else make_digest(keys.secret_key, known)
        if self._data is not None:
            self._data.warn_of_kind(num_samples)
        self._fingerprint = stream_fingerprint(self.plan, keys.secret_key, roster)
        budget = policy.budget
        if (
            not budget.conditional
        ):  # its sessions spend of what the ledger's others may have been given in the worst case
            local = ledger.budget_local_mu
            budget = Loss.of(budget.mu, math.inf if local is None else local)
        self.admission = AdmissionRule(policy, self.plan, num_parameters, budget)
        self._orders: dict[str, bytes] = {}

    @property
    def simulated(self) -> bool:
        """Whether the keys are a simulation's."""
        return self._keys.simulated

    @property
    def ledger(self) -> Ledger:
        """The ledger in which it records."""
        return self._ledger

    @property
    def row_bytes(self) -> RowBytes | Owners:
        """The bytes, or owners, by which its ledger recognises its data."""
        return any_data if self._data is None else self._data.rows

    @property
    def keys(self) -> NoiseKeys:
        """A simulated client's keys, which follow from the run's seed.

        Whoever has the keys can take the noise out, so a real client hands out none.
        """
        if not self.simulated:
            raise ConfigurationError(
                "Expected a simulated client, got one with real keys: they stay where they are.", kind="unsupported"
            )
        return self._keys

    def alike(self, num_samples: int, ledger: Ledger, keys: NoiseKeys) -> Self:
        """Another simulated client of the same policy and model, with samples, a ledger and keys of its own."""
        if not (self.simulated and keys.simulated):
            raise ConfigurationError(
                "Expected simulated clients, got one with real keys: it is made by itself.",
                kind="unsupported",
                setting="keys",
            )
        check_samples(self.policy, num_samples)
        other = copy(self)
        other.num_samples = other.num_rows = num_samples
        other._ledger, other._keys = ledger, keys
        other._fingerprint = stream_fingerprint(self.plan, keys.secret_key)
        other._ledgers, other._orders = JoinedLedgers([ledger]), {}
        return other

    @contextmanager
    def admitted(self, session: str, ack: int) -> Iterator[Admission]:
        """Hold the ledger while a request that it admits is answered; no other request is admitted meanwhile.

        ``ack`` is the last release of this session that the server has aggregated; 0 for none. The admission is good
        for one release, and only until the context ends.

        Raises
        ------
        RefusedError
            If the acknowledgement, the cap, the samples or the budget forbid it.
        LedgerError
            If the ledger cannot be believed.

        Notes
        -----
        **Formal guarantees.** Spends nothing: the ledger is as it was unless a release is recorded.
        """
        with self._ledgers.exclusive(_ONE) as ledgers:
            admission = self._admit(ledgers, session, ack)
            try:
                yield admission
            finally:
                admission.is_open = False

    def admits(self, session: str, ack: int) -> slice:
        """Return the samples that a release asked for now would be made from.

        Raises
        ------
        RefusedError
            As a release would.

        Notes
        -----
        **Formal guarantees.** Spends nothing; a release is admitted anew.
        """
        with self.admitted(session, ack) as admission:
            return admission.samples

    def check_data(self) -> None:
        """Raise LedgerError, with the way out, if the data are not those this client's ledger was used with.

        Notes
        -----
        **Formal guarantees.** Releases and spends nothing; every release checks it too. The rows used so far are read
        and hashed here, once in the life of this object, while others may use the ledger.
        """
        if self._data is None:
            return
        with self._ledger.exclusive() as transaction:
            account = transaction.account()
        self._check_data(account)

    def noted(self, session: str) -> tuple[int, State]:
        """Return the number of releases a session has made, and what was remembered with the last one."""
        with self._ledger.exclusive() as transaction:
            stream = transaction.stream(session)
        return (0, ()) if stream is None else (stream.release, stream.noted)

    def acknowledge(self, session: str, ack: int) -> None:
        """Apply an acknowledgement ahead of the next request, or refuse it."""
        with self._ledgers.exclusive(_ONE) as ledgers:
            streams = ledgers.streams(session, _ONE)
            self.admission.acknowledge(streams, 0, ack)
            ledgers.commit(_ONE, streams)

    def statement(self, session: str) -> PrivacyStatement:
        """Return the client's account of what it has spent in a session and what it guarantees.

        Independent of its data.
        """
        with self._ledger.exclusive() as transaction:
            stream, account = transaction.stream(session), transaction.account()
        releases = 0 if stream is None else stream.release
        if stream is None or stream.fingerprint == self._fingerprint:
            spent, guaranteed = self.plan.spent_mu(releases), self.plan.loss
        else:
            # Opened under another policy, or closed: today's noise and today's h say nothing of it, what it reserved
            # for the case that nobody is honest holds for it.
            spent = account.local_bound_of(session)
            guaranteed = Loss.of(spent, spent if self.plan.loss.conditional else None)
        summed = self.policy.trust == "secure-aggregation"
        budget = self.policy.budget.mu
        if account.reserved_local and not summed:
            # What sums told rests on others' honesty. Who was not promised it can count on the other budget alone.
            budget = self.admission.budget.worst_case.mu
        # No mu is true of everything where a session has an added delta.
        unbounded = not self.policy.adds_noise or account.unbounded or bool(account.reserved_delta)
        return PrivacyStatement(
            releases=releases,
            mu_spent=spent,
            guaranteed=guaranteed,
            mu_budget=math.inf if unbounded else budget,
            samples_used=account.samples_used,
            max_participations=self.policy.max_participations,
            releases_left=self.admission.releases_left(stream, account, self._fingerprint, self.num_samples),
            sums=self.policy.sums if summed else None,
        )

    def _answer(
        self,
        session: str,
        ack: int,
        compute: Callable[[Admission], ComputedT],
        record: Callable[[Admission, ComputedT], Release],
    ) -> Release:
        """Admit, compute outside of the transaction, admit again inside the one that records."""
        computed: list[ComputedT] = []
        computed_for: tuple[int, slice] | None = None
        self.check_data()
        while True:
            with self.admitted(session, ack) as admission:
                wanted = admission.release, admission.samples
                if self.simulated:  # whose ledger nobody else waits for
                    computed, computed_for = [compute(admission)], wanted
                if computed_for == wanted:
                    return record(admission, computed.pop())
            # A gradient or an epoch may take long, so it is computed while others may use the ledger. Nothing is spent
            # by that: it counts only if the request is admitted for the same release and the same samples again,
            # inside the transaction that records it. Otherwise somebody else took them, and the next are computed.
            computed, computed_for = [compute(admission)], wanted
            self._digest_of(admission.samples_used)  # read and hashed now, and not while the ledger is held

    def _record(self, admission: Admission, counts: NDArray[np.int64]) -> Release:
        """Record a release as the admission's, then hand it out; its stream and ``counts`` have its noise."""
        admission.use(self)
        accounts = admission.admitted.accounts
        accounts.data[0] = self._digest_of(admission.samples_used, accounts.data[0])
        admission.record(self.policy)
        counts.setflags(write=False)  # the ledger in memory may hold the very array
        return release_of(admission.streams, 0, counts, self.plan, self.policy, self.num_samples)

    def _admit(self, ledgers: LedgerBlock, session: str, ack: int) -> Admission:
        accounts = ledgers.accounts(_ONE)
        self._check_data(accounts.record(0))
        asked = Request(
            np.array([self.num_samples]),
            [self._fingerprint],
            order_nonce=lambda _, session: self._order_nonce(session),
            has_shuffled_batches=lambda row, account: has_shuffled_batches(ledgers.transaction(row), account),
        )
        admitted = self.admission.admit(ledgers.streams(session, _ONE), accounts, np.array([ack]), asked)
        if admitted.refused:
            raise admitted.refused[0]
        return Admission(self, ledgers, _ONE, admitted)

    def _order_nonce(self, session: str) -> bytes:
        # A request is admitted twice, before the gradients are computed and when they are recorded, for one order.
        if session not in self._orders:
            self._orders[session] = self._keys.nonce(session, 0)
        return self._orders[session]

    def _check_data(self, account: Account) -> None:
        if self._data is not None:
            self._data.check(account.samples_used, account.data, self.num_rows)

    def _digest_of(self, rows: int, otherwise: str = "") -> str:
        return otherwise if self._data is None else self._data.of(rows)
