"""The rule of admission: whether a request may be answered, and from which samples.

The rule is a pure function of what ledgers say and of what was asked for, for one client as for a whole block of them.
It spends nothing: what an admission takes is spent when it is recorded.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..accounting.loss import Loss
from ..accounting.noise_plan import NoisePlan
from ..errors import ConfigurationError, LedgerError, RefusedError
from ..ledger.ledger_records import (
    NOTHING,
    Account,
    AccountBlock,
    LedgerBlock,
    LedgerTransaction,
    Pending,
    StreamBlock,
    StreamRecord,
)
from ..noise import NOISE_VERSION
from .policy import NO_NOISE, PrivacyPolicy

logger = logging.getLogger(__name__)

ID_BYTES = 16
"""Bytes of a release's random name."""
ROUNDING = 1e-9
"""Budgets are compared with this much room, relative, for the rounding of sums of squares."""

_NO_SAMPLES = protocol.SAMPLES_USED_UP, "no fresh samples are left"


@dataclass(frozen=True)
class Request:
    """The clients that are asked, a row each, as far as their ledgers do not say it."""

    num_samples: NDArray[np.int64]
    fingerprints: Sequence[str]
    """Fingerprint of each client's policy and key: a session in its ledger belongs to one of these."""
    order_nonce: Callable[[int, str], bytes]
    """Given a row and a session, the nonce of its secret order: drawn once, and the same until it is recorded."""
    has_shuffled_batches: Callable[[int, Account], bool]
    """Given a row and its account, whether any of the client's sessions has a secret order."""


@dataclass(frozen=True, eq=False)
class Admissions:
    """Requests of several clients that may be answered, and from what; nothing is spent yet."""

    rows: NDArray[np.intp]
    """Indices of the admitted clients among those that were asked; the other columns have a row for each of them."""
    streams: StreamBlock
    """Streams with the acknowledgements applied."""
    accounts: AccountBlock
    """Accounts with the session's mu reserved."""
    start: NDArray[np.int64]
    """The samples the releases will be made from, up to ``stop``."""
    stop: NDArray[np.int64]
    refused: Mapping[int, RefusedError]

    @property
    def samples_used(self) -> NDArray[np.int64]:
        """Samples that are used up once they are recorded."""
        return np.maximum(self.accounts.samples_used, self.stop)

    @property
    def slices(self) -> list[slice]:
        return list(map(slice, self.start.tolist(), self.stop.tolist()))


@dataclass(eq=False)
class Admission:
    """Requests of clients that may be answered, once, in one transaction of their ledgers; nothing is spent yet.

    A real client, or one that is asked alone, is a block of one, and the properties are about its row.
    """

    client: object
    """The client or block that admitted them."""
    ledgers: LedgerBlock
    """Inside the transaction."""
    index: NDArray[np.intp]
    """Rows of the ledgers that were asked."""
    admitted: Admissions
    is_open: bool = True

    @property
    def session(self) -> str:
        """The session of the requests."""
        return self.streams.session

    @property
    def samples(self) -> slice:
        """The samples that the release will be made from."""
        return self.admitted.slices[0]

    @property
    def streams(self) -> StreamBlock:
        """The streams of the clients that may release."""
        return self.admitted.streams

    @property
    def release(self) -> int:
        """The number of the release."""
        return int(self.streams.release[0]) + 1

    @property
    def samples_used(self) -> int:
        """Samples that are used up once it is recorded."""
        return int(self.admitted.samples_used[0])

    def use(self, client: object) -> None:
        """End it for its one release; refuse one that was used, has ended, or is another client's."""
        if not self.is_open or client is not self.client:
            raise ConfigurationError(
                "Expected an open admission of this client, got one that was used, has ended, or is another's.",
                kind="wrong-order",
            )
        self.is_open = False

    def record(self, policy: PrivacyPolicy) -> None:
        """Record the releases whose streams have moved on, in the transaction that admitted them; then they may leave.

        Under secure aggregation each gets a fresh random name.
        """
        streams, accounts = self.admitted.streams, self.admitted.accounts
        accounts.samples_used = self.admitted.samples_used
        if policy.trust == "secure-aggregation":
            for row, release in enumerate(streams.release.tolist()):
                kept = {int(streams.ack[row]), *streams.pending[row]}
                known = {j: name for j, name in streams.ids[row].items() if j in kept}
                streams.ids[row] = {**known, release: secrets.token_bytes(ID_BYTES)}
        self.ledgers.commit(self.index[self.admitted.rows], streams, accounts)


@dataclass(frozen=True)
class AdmissionRule:
    """The rule of admission for clients of one policy, decided for whole blocks of them, each row by itself.

    ``plan`` is the policy worked out for their model. ``budget`` is the most that may ever be reserved. Its worst case
    is for what holds whatever other clients and helpers do.

    Notes
    -----
    **Formal guarantees.** Admits at most K releases of a session, takes every sample at most as often as the policy
    says, ``min_separation`` releases apart, reserves a session's whole mu with its first release, and admits no session
    that would take the sum of all reserved mus (in squares) beyond the budget's, assumed or in the worst case. With
    added deltas the budget is less, so that epsilon at the policy's delta stays within its own.
    Samples in a secret order are in no other session, before or after it. Of a block every row is
    decided by its own ledger and request alone. Those of :class:`~murmurfl.privacy.Privatizer` rest on this,
    provided that what is admitted is recorded before anything leaves.
    Proof: docs/proofs/release-rule.md.
    """

    policy: PrivacyPolicy
    plan: NoisePlan
    num_parameters: int
    budget: Loss

    def admit(
        self, streams: StreamBlock, accounts: AccountBlock, acks: NDArray[np.int64], clients: Request
    ) -> Admissions:
        """Admit or refuse the requests of a session's clients; LedgerError if parts of a ledger contradict each other.

        ``streams`` and ``accounts``, as the ledgers have them, are taken over and changed.
        """
        refused: dict[int, RefusedError] = {}
        self._check(streams, accounts, clients)
        self._open(streams, accounts, clients, refused)
        if self.policy.batch_selection == "shuffled":
            self._order(streams, accounts, clients, refused)
        if streams.fingerprint != clients.fingerprints:
            for row, (theirs, ours) in enumerate(zip(streams.fingerprint, clients.fingerprints, strict=True)):
                if theirs != ours and row not in refused:
                    refused[row] = _changed(streams.terms[row])
        capped = streams.release >= self.policy.max_participations
        _refuse(capped, refused, protocol.CAP_REACHED, "the cap of releases for this session is reached")
        start, stop = self._samples(streams, accounts, clients.num_samples)
        _refuse(stop > clients.num_samples, refused, *_NO_SAMPLES)
        if self.policy.batch_selection == "once" and self.policy.sample_participations == 1:
            fresh = accounts.samples_used < clients.num_samples
            _refuse((streams.release == 0) & ~fresh, refused, *_NO_SAMPLES)
        for row in (acks != streams.ack).nonzero()[0].tolist():
            if row not in refused:
                try:
                    self.acknowledge(streams, row, int(acks[row]))
                except RefusedError as refusal:
                    refused[row] = refusal
        rows = np.arange(len(streams), dtype=np.intp)
        if refused:
            rows = np.array([row for row in rows.tolist() if row not in refused], dtype=np.intp)
            streams, accounts, start, stop = streams.chosen(rows), accounts.chosen(rows), start[rows], stop[rows]
        return Admissions(rows, streams, accounts, start, stop, refused)

    def _check(self, streams: StreamBlock, accounts: AccountBlock, clients: Request) -> None:
        """Raise if the parts of a ledger contradict each other."""
        session = streams.session
        if any(bool(f) != (session in r) for f, r in zip(streams.fingerprint, accounts.reserved, strict=True)):
            raise LedgerError(
                "Expected a session's stream and its reserved budget in the ledger together, got one of them: the "
                "ledger is damaged. Restore it from a backup or retire this client's data; nothing was released."
            )
        least = self._samples_of(streams.release, clients.num_samples)
        if (accounts.samples_used < least).any():
            row = int(np.argmax(accounts.samples_used < least))
            raise LedgerError(
                f"Expected at least {least[row]} used samples in the ledger, got "
                f"{accounts.samples_used[row]}: the ledger is damaged, or a client of few samples got more in the "
                "middle of this session. Begin a new session in that case, else restore the ledger from a backup or "
                "retire this client's data; nothing was released."
            )
        summed = self.policy.trust == "secure-aggregation" and self.policy.release_mode != "independent"
        if not summed and self.policy.batch_selection != "shuffled":
            return
        for row, fingerprint in enumerate(streams.fingerprint):
            if fingerprint != clients.fingerprints[row]:
                continue
            if self.policy.batch_selection == "shuffled" and streams.release[row] > 0 and not streams.order[row]:
                raise LedgerError(
                    "Expected a session's secret order in the ledger, got none: it is damaged. Restore it from a "
                    "backup or retire this client's data; nothing was released."
                )
            # What a helper would be told instead, that nothing was released before, may open what must stay closed.
            if summed and (nameless := _nameless(streams, row)):
                raise LedgerError(
                    f"Expected the names of releases {nameless} in the ledger, got none: it is damaged. "
                    "Restore it from a backup or retire this client's data; nothing was released."
                )

    def _open(
        self, streams: StreamBlock, accounts: AccountBlock, clients: Request, refused: dict[int, RefusedError]
    ) -> None:
        """Begin the streams of clients that have none, with the session's mu reserved."""
        reserved: dict[tuple[int, int], Account] = {}  # clients that have spent the same share what they reserve
        for row in [row for row, fingerprint in enumerate(streams.fingerprint) if not fingerprint]:
            account = accounts.record(row)
            alike = id(account.reserved), id(account.reserved_local)  # and so their added deltas
            try:
                self._check_alone(clients, row, account)
                if alike not in reserved:
                    reserved[alike] = self._reserved(account, streams.session)
            except RefusedError as refusal:
                refused[row] = refusal
                continue
            accounts.reserved[row] = reserved[alike].reserved
            accounts.reserved_local[row] = reserved[alike].reserved_local
            accounts.reserved_delta[row] = reserved[alike].reserved_delta
            streams.fingerprint[row] = clients.fingerprints[row]
            streams.terms[row] = self._terms

    @cached_property
    def _terms(self) -> str:
        return self.policy.terms(self.num_parameters)

    def _check_alone(self, clients: Request, row: int, account: Account) -> None:
        """Refuse a new session that would reuse samples of a secret order, or hide samples that others have used."""
        # What a secret order is worth is counted for samples that show nowhere else.
        secret = self.policy.batch_selection == "shuffled"
        returning = self.policy.batch_selection != "once" or self.policy.sample_participations > 1
        if (secret and account.samples_used) or (returning and clients.has_shuffled_batches(row, account)):
            raise RefusedError(*_NO_SAMPLES)

    def _order(
        self, streams: StreamBlock, accounts: AccountBlock, clients: Request, refused: dict[int, RefusedError]
    ) -> None:
        """Give streams the nonce of their secret order, drawn once before the first release and recorded with it."""
        for row, reserved in enumerate(accounts.reserved):
            if row in refused:
                continue
            if reserved.keys() != {streams.session}:  # of rows that were added since: these may not hide here as well
                refused[row] = RefusedError(*_NO_SAMPLES)
            elif not streams.order[row]:
                streams.order[row] = clients.order_nonce(row, streams.session)

    def _samples(
        self, streams: StreamBlock, accounts: AccountBlock, num_samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and stop of the samples of each stream's next release."""
        policy, batch, turns = self.policy, self.policy.batch_size, self.policy.batches_of_a_pass
        if policy.sums_samples:
            return np.zeros_like(num_samples), num_samples
        turn = streams.release if policy.sample_participations == 1 else streams.release % turns
        fresh = policy.batch_selection == "once" and policy.sample_participations == 1
        start = accounts.samples_used.copy() if fresh else turn * batch
        stop = start + batch
        few = num_samples < batch * turns
        if few.any() and fresh:  # evenly, and each from the first sample that no session has used
            most = np.minimum(_dealt(turn + 1, num_samples, turns), start + batch)
            stop = np.where(few, np.maximum(most, start), stop)
        elif few.any():  # a sample returns after as many releases, however many there are by then
            start, stop = np.minimum(start, num_samples), np.minimum(stop, num_samples)
        return start, stop

    def acknowledge(self, streams: StreamBlock, row: int, ack: int) -> None:
        """Apply an acknowledgement to a stream, or refuse it."""
        if not streams.has(row):
            raise RefusedError(protocol.BAD_ACKNOWLEDGEMENT, "there is nothing to acknowledge in this session")
        before, release, pending = int(streams.ack[row]), int(streams.release[row]), streams.pending[row]
        if ack == before:
            return
        if ack > release:
            logger.error(
                "The server acknowledges release %d of a session in which the ledger knows of %d. Either the server is "
                "wrong or this client's ledger was copied back from a backup: see docs/ledger.md before going on.",
                ack,
                release,
            )
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT,
                "the acknowledgement names a release this client's ledger does not know of; if the client did make "
                "it, its ledger was rolled back",
            )
        if self.policy.release_rule == "paper":
            valid = before < ack <= release
            left: Pending = NOTHING
        else:
            valid = ack > before and ack in pending
            # (P_j - P_old) - (P_new - P_old): the same prefixes, told from the new acknowledgement.
            left = {j: pending[j] - pending[ack] for j in pending if j > ack} if valid else NOTHING
        if not valid:
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT,
                "the acknowledgement must not move backwards and must name a release that can still be acknowledged",
            )
        streams.ack[row], streams.pending[row] = ack, left or NOTHING
        ids = streams.ids[row]
        streams.ids[row] = {j: name for j, name in ids.items() if j >= ack} if ids else NOTHING

    def acknowledge_each(self, streams: StreamBlock, rows: Sequence[int], acks: Sequence[int]) -> None:
        """Apply an acknowledgement to each of several streams; if one is refused, those before it were applied."""
        index, pending, ids = np.asarray(rows, dtype=np.intp), streams.pending, streams.ids
        last = bool((streams.release[index] == np.asarray(acks, dtype=np.int64)).all())
        # The last release of each, as where nothing is lost: nothing is told from it, and no name is kept.
        if last and all(ack in pending[row] and not ids[row] for row, ack in zip(rows, acks, strict=True)):
            streams.ack[index] = acks
            for row in rows:
                pending[row] = NOTHING
            return
        for row, ack in zip(rows, acks, strict=True):
            self.acknowledge(streams, row, ack)

    def releases_left(self, stream: StreamRecord | None, account: Account, fingerprint: str, num_samples: int) -> int:
        """Return the number of further releases of a client's session that its cap and the fresh samples allow."""
        if stream is not None and stream.fingerprint != fingerprint:
            return 0
        left = self.policy.max_participations - (0 if stream is None else stream.release)
        if self.policy.batch_selection != "once" or self.policy.sample_participations > 1:
            return left  # the session goes through samples that others may have used
        if self.policy.has_few(num_samples):
            begun = stream is not None and stream.release > 0
            return left if begun or account.samples_used < num_samples else 0
        return min(left, (num_samples - account.samples_used) // self.policy.batch_size)

    def _samples_of(self, releases: NDArray[np.int64], num_samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the fewest samples that a number of releases of one session has used."""
        if self.policy.sums_samples:
            return np.minimum(releases, 1)  # all there were: rows may have been added since
        turns = self.policy.batches_of_a_pass
        few = num_samples < self.policy.batch_size * turns  # whose number may have been another one before
        return np.where(few, 0, np.minimum(releases, turns) * self.policy.batch_size)

    def _reserved(self, account: Account, session: str) -> Account:
        """Return the account with the mu of a new session reserved."""
        if self.plan.problem or self.policy.mechanism == NO_NOISE:
            return account.reserve(session, Loss.of(math.inf))  # a simulated client's, which guarantees nothing
        trusted = self.policy.trust == "trusted-server"
        if account.unbounded and not trusted:
            raise RefusedError(
                protocol.BUDGET_EXHAUSTED,
                "this client has trusted a server with its samples: it has no budget against servers any more",
            )
        # Without noise of its own the client's plan guarantees nothing; what counts is what the server has to keep.
        loss = Loss.of(self.policy.mu) if trusted else self.plan.loss
        reserved = account.reserve(session, loss, trusted=trusted)
        spent = reserved.spent
        budget = self.budget.less_added(spent.added_delta, self.policy.delta)
        if spent.assumed.mu > budget.assumed.mu * (1 + ROUNDING):
            raise RefusedError(protocol.BUDGET_EXHAUSTED, "the privacy budget of this client does not allow a session")
        # A simulated client's may be infinite; a real one's is refused before it comes here.
        bounded = math.isfinite(loss.worst_case.mu)
        if bounded and spent.worst_case.mu > budget.worst_case.mu * (1 + ROUNDING):
            raise RefusedError(
                protocol.BUDGET_EXHAUSTED,
                "the budget for what holds without anybody's honesty does not allow a session on this client",
            )
        return reserved


def _dealt(turn: NDArray[np.int64], num_samples: NDArray[np.int64], turns: int) -> NDArray[np.int64]:
    """Return how many of few samples are in the first batches of a pass, as evenly as whole numbers allow."""
    return (2 * turn * num_samples + turns) // (2 * turns)


def _refuse(rows: NDArray[np.bool_], refused: dict[int, RefusedError], code: int, reason: str) -> None:
    for row in rows.nonzero()[0].tolist():
        refused.setdefault(row, RefusedError(code, reason))


def _changed(terms: str) -> RefusedError:
    """Return the refusal of a session that belongs to another policy or key."""
    if terms and json.loads(terms).get("noise_version") != NOISE_VERSION:  # a ledger that nobody reads has no terms
        return RefusedError(
            protocol.POLICY_CHANGED,
            "this session was begun with the noise of another version of murmurfl, which this version cannot "
            "take out again; start a new session",
        )
    return RefusedError(
        protocol.POLICY_CHANGED,
        "this session was opened under another privacy policy or key, or was closed; start a new session",
    )


def _nameless(streams: StreamBlock, row: int) -> list[int]:
    """Return the releases without a name that helpers would need."""
    ack = int(streams.ack[row])
    return sorted({*streams.pending[row], *([ack] if ack else [])} - set(streams.ids[row]))


def has_shuffled_batches(transaction: LedgerTransaction, account: Account) -> bool:
    """Return True if any of a ledger's sessions had a secret order, or may have had one (its stream is lost)."""
    streams = (transaction.stream(session) for session in account.reserved)
    return any(stream is None or stream.order for stream in streams)
