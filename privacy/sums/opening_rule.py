"""The opening rule: what a helper of secure aggregation checks, alone, before it gives away the sum of its masks.

A server asks a helper to *open* a set U of masked releases: it sends their headers, seals and signatures, and gets the
sum over U of the helper's keystreams, with which it can take that helper's masks off the sum of the releases and off
nothing else. The helper answers only if

* all of U are in the roster, distinct, signed, and sealed for this helper;
* session, d, spacing, roster, helpers, terms and ``release_mode`` are one in all of U, and those of the session for
  good;
* U has at least as many releases as the largest ``min_cohort`` in U, and at most 2^11;
* k rises strictly for each client and session;
* with ``release_mode = cumulative``, the ack is the id of the last release of that client which *this helper* opened;
* no other set was opened, or is void, under the same session and name. The same bytes again get the same answer;
* the helper has not promised another set of the session (*lock*), and this very set is not *void*;
* d, the number of releases, and what was opened in the last day are within the helper's own bounds.

Everything else is refused whole, with one fixed text, and the helper's own log says why. What was opened is recorded
durably before the answer leaves. The guarantee hangs on this record: a helper that forgets can be made to open what,
with what it opened before, singles a client's release out. A helper that lost its record gets a new key.

Asked before, a helper says whether it would open a set, and whose releases not; that binds nobody. Asked to promise it,
its yes is a *lock*, recorded as durably: of the session it opens that very set next or none. A lock ends when the set
is answered, or when a set is recorded as *void*: shown a set that another helper has signed to have opened, a helper
records that it never answers it, now and for ever, and moves its clients on as if it had. So a set that is open at one
helper only costs its round, and releases build on it everywhere. What clients are moved on to, they signed themselves:
another helper's word can cost a helper answers, and makes it give none.

Proof: docs/proofs/secure-aggregation.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..accounting.loss import MOST_SUMMED
from ..errors import ConfigurationError, LedgerError, RefusedError, formerly
from ..release.policy import ReleaseMode, read_mode, recorded_mode
from .masking import (
    LARGEST_SIZE,
    NOTHING_OPENED,
    Header,
    MaskedReleaseError,
    Sealed,
    add_mask,
    checked_header,
    opened_seal,
)
from .roster import HelperEntry, HelperKey, Roster, is_signed, name_proof


class OpeningRecordError(LedgerError):
    """A helper's opening record cannot be read, written or believed. Nothing was opened.

    Examples
    --------
    >>> from murmurfl.privacy import SQLiteOpeningRecord
    >>> try:
    ...     SQLiteOpeningRecord("no-such-folder/opened.sqlite")
    ... except OpeningRecordError as error:
    ...     error.kind
    'not-found'
    """


@dataclass(frozen=True)
class SessionTerms:
    """The part of a header that all releases of a session share, for good."""

    release_mode: ReleaseMode
    size: int
    spacing: float
    roster: str
    helpers: tuple[str, ...]
    terms: str

    @classmethod
    def of(cls, header: Header) -> SessionTerms:
        """Return the terms of one release."""
        return cls(header.release_mode, header.size, header.spacing, header.roster, header.helpers, header.terms)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> SessionTerms:
        """Terms from plain values, as JSON has them."""
        return cls(**{**read_mode(values), "helpers": tuple(values["helpers"])})

    def to_values(self) -> dict[str, Any]:
        """Return the plain values of :meth:`from_values`."""
        return recorded_mode(asdict(self))


@dataclass(frozen=True)
class LastOpened:
    """The last release of a client that a helper opened in a session."""

    release: int
    release_id: str


@dataclass(frozen=True)
class OpenedSet:
    """One set of releases that was opened, promised, or is void."""

    session: str
    opening: str
    """The server's name for the set."""
    set_digest: str
    """Digest of all its bytes (:func:`set_digest`)."""
    terms: SessionTerms
    clients: Mapping[str, LastOpened]
    """The clients whose releases were in it, and which."""
    kind: str = protocol.VIEW_OPENED
    """``locked`` if it was only promised, ``void`` if another helper opened it and this one never answers it."""

    def moves(self, last: Mapping[str, LastOpened]) -> dict[str, LastOpened]:
        """Return the clients whose last opened release it changes, and to which; a promise moves none."""
        if self.kind == protocol.VIEW_LOCKED:
            return {}
        return {name: one for name, one in self.clients.items() if name not in last or one.release > last[name].release}

    def to_bytes(self) -> bytes:
        """Encode this set; there is one encoding."""
        document = [
            self.session,
            self.opening,
            self.set_digest,
            self.terms.to_values(),
            [[name, last.release, last.release_id] for name, last in self.clients.items()],
            *([] if self.kind == protocol.VIEW_OPENED else [self.kind]),
        ]
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> OpenedSet:
        """Read what :meth:`to_bytes` wrote."""
        session, opening, digest, terms, clients, *kind = json.loads(content)
        last = {name: LastOpened(release, release_id) for name, release, release_id in clients}
        return cls(session, opening, digest, SessionTerms.from_values(terms), last, *kind)


class OpeningTransaction(ABC):
    """A record inside one exclusive transaction.

    Examples
    --------
    >>> from murmurfl.privacy import MemoryOpeningRecord
    >>> with MemoryOpeningRecord().exclusive() as transaction:
    ...     transaction.last_opened("session", ["a", "b"]), transaction.lock("session")  # nothing was opened yet
    ({}, None)
    """

    @abstractmethod
    def set_digest(self, session: str, opening: str) -> str | None:
        """Return the digest of the set that was opened under a name, or None if none was."""

    @abstractmethod
    def voids(self, session: str, opening: str) -> frozenset[str]:
        """Return the digests of the sets that are void under a name."""

    @abstractmethod
    def lock(self, session: str) -> OpenedSet | None:
        """Return the set that was promised, until it or a later one is opened or void."""

    @abstractmethod
    def terms(self, session: str) -> SessionTerms | None:
        """Return the terms of a session, or None if none of its sets was opened or is void."""

    @abstractmethod
    def last_opened(self, session: str, clients: Sequence[str]) -> dict[str, LastOpened]:
        """Return the last release, opened or in a void set, of each of these clients that had any."""

    def times(self, sessions: int, sets: int) -> tuple[float, float]:
        """Return when the last session but ``sessions - 1`` began, and the last set but ``sets - 1`` was opened.

        In seconds since 1970; minus infinity where there were fewer, or for 0.
        """
        raise OpeningRecordError(
            f"Expected a record that keeps times, for a helper that bounds what it opens in a day, got a "
            f"{type(self).__name__}. Nothing was opened.",
            kind="unsupported",
        )

    @abstractmethod
    def commit(self, opened: OpenedSet) -> None:
        """Record a set that :func:`check_forward` allows, durably; after it returns the sum may leave."""


class OpeningRecord(ABC):
    """A helper's memory of what it opened.

    Notes
    -----
    **Formal guarantees.** An implementation promises that transactions on one helper's record exclude each other, that
    a commit is all or nothing, and that what was committed is what is read next, for as long as the helper's key is
    used. The opening rule rests on it.

    Examples
    --------
    >>> from murmurfl.privacy import MemoryOpeningRecord, SQLiteOpeningRecord
    >>> MemoryOpeningRecord.durable, SQLiteOpeningRecord.durable
    (False, True)
    """

    durable: ClassVar[bool] = False
    """Whether a commit outlives the process: real helpers insist on it."""

    @abstractmethod
    def check_helper(self, helper: HelperEntry) -> None:
        """Refuse another helper than the one whose record this is."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[OpeningTransaction]:
        """Begin a transaction that nobody else can enter; without a commit it changes nothing."""


def key_digest(helper: HelperEntry) -> bytes:
    """Return the digest by which a record knows its helper's keys."""
    return hashlib.sha256(b"murmurfl helper 1\x00" + helper.sealing + helper.signing).digest()


def check_forward(transaction: OpeningTransaction, opened: OpenedSet) -> None:
    """Refuse a commit that goes back or against a promise.

    That is one under a name that was used, of a release that does not come after the client's last, or next to a
    promise; of a void set, what is recorded of it already.

    The opening rule never asks for one; a mistaken call must not make a record that nobody can believe.
    """
    session, name, digest = opened.session, opened.opening, opened.set_digest
    known, voids, lock = (
        transaction.set_digest(session, name),
        transaction.voids(session, name),
        transaction.lock(session),
    )
    wrong = transaction.terms(session) not in (None, opened.terms)
    if opened.kind == protocol.VIEW_VOID:
        wrong |= digest == known or digest in voids
    else:
        last = transaction.last_opened(session, list(opened.clients))
        again = lock is not None and opened.kind == protocol.VIEW_LOCKED
        promised = again or (lock is not None and (lock.opening, lock.set_digest) != (name, digest))
        behind = any(opened.clients[one].release <= before.release for one, before in last.items())
        wrong |= known is not None or bool(voids) or promised or behind
    if wrong:
        raise OpeningRecordError(
            "Expected a set under a new name, of releases that each come after the client's last opened one, and no "
            "other that was promised, got another. Nothing was recorded or opened.",
            kind="mismatch",
        )


@dataclass
class OpenedSession:
    """The part of a record in memory that is about one session."""

    terms: SessionTerms | None = None
    """Terms of its sets that were opened or are void; None if none was or is."""
    lock: OpenedSet | None = None
    """The set that was promised, until it or a later one is opened or void."""
    sets: dict[str, str] = field(default_factory=dict)
    """Digest of each set that was opened, by its name."""
    voids: list[OpenedSet] = field(default_factory=list)
    last: dict[str, LastOpened] = field(default_factory=dict)
    """Last release of each client, opened or in a void set."""

    def record(self, opened: OpenedSet) -> None:
        """Record a set that :func:`check_forward` allows."""
        if opened.kind == protocol.VIEW_LOCKED:
            self.lock = opened
            return
        if opened.kind == protocol.VIEW_VOID:
            self.voids.append(opened)
        else:
            self.sets[opened.opening] = opened.set_digest
        self.terms, self.lock = opened.terms, None
        self.last |= opened.moves(self.last)


class MemoryOpeningRecord(OpeningRecord, OpeningTransaction):
    """A record in this process's memory: for tests and in-process experiments; gone with the process.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, until the
    process ends: a real helper that used it, and was started again, could be made to open what singles clients out.

    Examples
    --------
    >>> from murmurfl.privacy import HelperKey, Opener, Roster
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> record = MemoryOpeningRecord()
    >>> opener = Opener("left", HelperKey.simulated(1, "left"), roster, record)
    >>> with record.exclusive() as transaction:
    ...     transaction.set_digest("session", "round-1") is None  # nothing was opened under that name
    True
    """

    def __init__(self) -> None:
        self._lock: AbstractContextManager[Any] = threading.Lock()
        self.sessions: dict[str, OpenedSession] = {}
        self._begun: dict[str, float] = {}
        self._opened: list[float] = []
        self._helper: bytes | None = None

    def check_helper(self, helper: HelperEntry) -> None:
        with self._lock:
            if self._helper not in (None, key_digest(helper)):
                raise OpeningRecordError(
                    f"Expected the opening record of helper {helper.name!r}, got another's.", kind="mismatch"
                )
            self._helper = key_digest(helper)

    @contextmanager
    def exclusive(self) -> Iterator[OpeningTransaction]:
        with self._lock:
            yield self

    def set_digest(self, session: str, opening: str) -> str | None:
        return self.session(session).sets.get(opening)

    def voids(self, session: str, opening: str) -> frozenset[str]:
        return frozenset(one.set_digest for one in self.session(session).voids if one.opening == opening)

    def lock(self, session: str) -> OpenedSet | None:
        return self.session(session).lock

    def terms(self, session: str) -> SessionTerms | None:
        return self.session(session).terms

    def last_opened(self, session: str, clients: Sequence[str]) -> dict[str, LastOpened]:
        last = self.session(session).last
        return {name: last[name] for name in clients if name in last}

    def times(self, sessions: int, sets: int) -> tuple[float, float]:
        found = ((list(self._begun.values()), sessions), (self._opened, sets))
        begun, opened = (times[-last] if 0 < last <= len(times) else -math.inf for times, last in found)
        return begun, opened

    def commit(self, opened: OpenedSet) -> None:
        check_forward(self, opened)
        self.sessions[opened.session] = known = self.session(opened.session)
        known.record(opened)
        if opened.kind == protocol.VIEW_OPENED:
            self._opened.append(time.time())
            self._begun.setdefault(opened.session, self._opened[-1])

    def session(self, session: str) -> OpenedSession:
        """Return what is recorded of a session, empty if nothing is."""
        return self.sessions.get(session) or OpenedSession()


logger = logging.getLogger(__name__)

_REFUSAL = "this helper does not open this set of releases; its own log says why"
_OTHER_TERMS = "the session was opened with another d, spacing, roster, terms or release mode"
_DAY_S = 86_400.0
_OPENING_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_SET_LABEL = b"murmurfl set 1\x00"
_ANSWER_LABEL = b"murmurfl opening 1\x00"
_VIEW_LABEL = b"murmurfl view 1\x00"


class OpeningRefusedError(RefusedError):
    """A helper refuses to open a set; nothing was opened and nothing recorded.

    ``why`` is for the helper's own log and does not leave; the text that does is the same whatever is wrong.

    Examples
    --------
    >>> from murmurfl.privacy import HelperKey, MemoryOpeningRecord, Opener, Roster
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> opener = Opener("left", HelperKey.simulated(1, "left"), roster, MemoryOpeningRecord(), min_cohort=2)
    >>> try:
    ...     opener.open("session", "round-1", [])
    ... except OpeningRefusedError as error:
    ...     error.kind, error.why
    ('refused', 'expected 1 to 2048 releases, got 0')
    """

    def __init__(self, why: str) -> None:
        super().__init__(protocol.OPENING_REFUSED, _REFUSAL)
        self.why = why


@dataclass(frozen=True)
class Opening:
    """A helper's answer.

    Notes
    -----
    **Formal guarantees.** The total shows a sum over at least as many distinct clients as the most careful of them
    asks for, and nothing of any single mask (:class:`Opener`).
    Proof: docs/proofs/secure-aggregation.md.

    Examples
    --------
    >>> import numpy as np
    >>> opening = Opening("left", "round-1", set_digest="5" * 64, total=np.zeros(4, np.uint64), signature=bytes(64))
    >>> opening.helper, opening.total.shape
    ('left', (4,))
    """

    helper: str
    """The helper's name in the roster."""
    opening: str
    """The server's name for the set."""
    set_digest: str
    """Digest of all bytes of the set (:func:`set_digest`)."""
    total: NDArray[np.uint64]
    """The sum of the helper's masks over the set, modulo 2^64, shape (d,)."""
    signature: bytes
    """The helper's, on all of this and on the session."""


@dataclass(frozen=True)
class SignedOpening:
    """Another helper's word that it opened a set: its :class:`Opening` without the sum."""

    helper: str
    total_digest: bytes
    signature: bytes

    @classmethod
    def of(cls, answer: Opening) -> SignedOpening:
        """Return the part of an answer that shows who gave it."""
        return cls(answer.helper, _digest_of(answer.total), answer.signature)

    def is_signed(self, entry: HelperEntry, session: str, opening: str, digest: str) -> bool:
        """Return True if the helper of an entry of the roster signed it for that set."""
        signed = _signed_digest(entry.name, session, opening, digest, self.total_digest)
        return is_signed(entry.signing, self.signature, signed)


@dataclass(frozen=True)
class Verdict:
    """Statement of a helper about a set, in addition to opening it."""

    helper: str
    opening: str
    set_digest: str
    would_open: str
    """``opened``, ``locked`` (promised) or ``void`` if this very set is recorded so, ``yes`` if it would be opened, and
    ``no`` if it would not."""
    disputed: tuple[str, ...]
    """Clients of the set without whose releases there would be one reason less: a seal that does not open, or a
    release that is not built on the client's last opened one. Empty for any other reason."""
    signature: bytes
    """The helper's, on all of this and on the session."""


@formerly(largest_model="max_model_size", sessions_a_day="max_sessions_per_day", sets_a_day="max_sums_per_day")
class Opener:
    """A helper: its name and keys in the roster that its operator pinned, and the one record of what they opened.

    Notes
    -----
    **Formal guarantees.** Of one helper that keeps its keys and its record: for every session, what it ever opens are
    sums of at least as many releases of distinct clients of the roster as the most careful of them asks for; a release
    is opened at most once; under ``cumulative`` the opened and the void releases of a client are a chain, each opened
    one built on the one before; of each name of a set there is one set; and of a void set nothing is opened from then
    on. By this a sample moves the sums once and for good, which is the
    second step of docs/proofs/secure-aggregation.md. It holds whatever the server, other helpers and other clients do.
    A set that is refused leaves no trace but in the log. A promised set is opened when it is asked for, unless a set
    was declared void in between. Seeds are dropped once they are added up, and never leave.
    What :meth:`view` says before shows which seals open and which releases follow: nothing of a seed or of any counts.
    Timing is not protected.

    ``max_model_size`` and ``min_cohort`` are the helper's own bounds on the values of a release, before it takes memory
    for them, and on the releases of a set; ``max_sessions_per_day`` and ``max_sums_per_day`` on what it begins and
    opens in 24 hours of its own clock, 0 for none. What was opened is answered again whatever they are.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import ClientKey, HelperKey, Masking, MemoryLedger, MemoryOpeningRecord, PrivacyPolicy
    >>> from murmurfl.privacy import Privatizer, Roster, SimulatedKeys, SumAssumption
    >>> names, helpers = ("a", "b", "c"), ("left", "right")
    >>> roster = Roster.simulated(1, names, helpers)
    >>> policy = PrivacyPolicy(
    ...     clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, trust="secure-aggregation",
    ...     sums=SumAssumption(min_honest=2, min_cohort=3),
    ... )
    >>> masked, total = [], 0
    >>> for name in names:
    ...     privatizer = Privatizer(policy, 4, 100, MemoryLedger(), SimulatedKeys(1, name))
    ...     release = privatizer.release("session", 0, lambda samples: np.zeros((2, 4)))
    ...     masked.append(Masking(name, ClientKey.simulated(1, name), roster).mask(release, "session", policy))
    ...     total = total + release.counts
    >>> opened = sum(release.counts for release in masked)
    >>> for name in helpers:
    ...     opener = Opener(name, HelperKey.simulated(1, name), roster, MemoryOpeningRecord())
    ...     opened -= opener.open("session", "round-1", [release.sealed for release in masked]).total
    >>> np.array_equal(opened.astype(np.int64), total)  # the masks are gone: the sum of the three releases
    True
    """

    def __init__(
        self,
        name: str,
        key: HelperKey,
        roster: Roster,
        record: OpeningRecord,
        *,
        max_model_size: int = LARGEST_SIZE,
        min_cohort: int = 1,
        max_sessions_per_day: int = 0,
        max_sums_per_day: int = 0,
    ) -> None:
        entry = next((one for one in roster.helpers if one.name == name), None)
        if entry is None:
            raise ConfigurationError(
                f"Expected helper {name!r} in the roster, got one without it: send its card to whoever keeps the "
                "roster, and take the new roster.",
                kind="missing",
                setting="roster",
            )
        if entry != key.entry(name):
            raise ConfigurationError(
                f"Expected the keys of helper {name!r} to be those in the roster, got others: use the keys whose card "
                "is in the roster, or have the roster made with these.",
                kind="mismatch",
                setting="key",
            )
        record.check_helper(entry)
        self.name = name
        self.roster = roster
        self.max_model_size, self.min_cohort = max_model_size, min_cohort
        self.max_sessions_per_day, self.max_sums_per_day = max_sessions_per_day, max_sums_per_day
        self._key = key
        self._record = record

    @property
    def durable(self) -> bool:
        """Whether what it opened outlives this process: real helpers insist on it."""
        return self._record.durable

    def prove_name(self, nonce: Any) -> bytes:
        """Sign a server's nonce (:func:`~.roster.name_proof`); return empty bytes for what is no nonce."""
        proof = name_proof(self.name, self.roster.digest, nonce)
        return b"" if proof is None else self._key.sign(proof)

    def open(self, session: str, opening: str, releases: Sequence[Sealed]) -> Opening:
        """Answer with the sum of this helper's masks over a set of releases; the same bytes get the same answer.

        ``opening`` is the server's name for the set, 1 to 64 letters, digits and hyphens; in a session each names one
        set. What the rule forbids raises :class:`OpeningRefusedError` with a fixed text.
        """
        try:
            return self._open(session, opening, tuple(releases))
        except OpeningRefusedError as refusal:
            named = f"{opening!r:.80} of session {session!r:.80}"  # anything may have been sent
            logger.warning("Refused to open set %s: %s", named, refusal.why)
            raise

    def view(self, session: str, opening: str, releases: Sequence[Sealed], *, lock: bool = False) -> Verdict:
        """Say whether :meth:`open` would open a set, and if not, whose releases stand in the way; changes nothing.

        With ``lock`` a yes is a promise, recorded before it is given (``locked``): the next set of the session that is
        opened is this one, unless one is declared :meth:`void`. What is wrong with a set by itself raises
        :class:`OpeningRefusedError`: a server can see that for itself.
        """
        releases = tuple(releases)
        try:
            headers = self._checked(session, opening, releases)
        except OpeningRefusedError as refusal:
            logger.warning("Asked about a set that is none: %s", refusal.why)
            raise
        digest, disputed = set_digest(session, opening, releases), list[str]()
        with self._record.exclusive() as transaction:
            would, why = _standing(transaction, opening, digest, headers)
            if would == protocol.VIEW_YES and (why := self._too_much_today(transaction, session)):
                would = protocol.VIEW_NO
            if would == protocol.VIEW_NO:
                logger.warning("Would not open a set of session %r: %s", session, why)
            last = transaction.last_opened(session, [header.client for header in headers])
            for sealed, header in zip(releases, headers, strict=True) if would == protocol.VIEW_YES else ():
                try:
                    self._seed(sealed, header)
                    _check_follows(header, last.get(header.client))
                except OpeningRefusedError as refusal:
                    logger.warning("Would not open a set of session %r: %s", session, refusal.why)
                    disputed.append(header.client)
            if disputed:
                would = protocol.VIEW_NO
            elif lock and would == protocol.VIEW_YES:
                would = protocol.VIEW_LOCKED
                transaction.commit(_entry(opening, digest, headers, would))
        return self._view(session, opening, digest, would, disputed)

    def void(self, session: str, opening: str, releases: Sequence[Sealed], elsewhere: SignedOpening) -> Verdict:
        """Record, now and for ever, that a set which another helper has opened is never answered here.

        Its releases count as opened: what clients release from now on is built on them. A lock ends with it. Of a set
        that was opened here too it only says so.
        """
        releases = tuple(releases)
        try:
            headers = self._checked(session, opening, releases, own_bounds=False)  # nothing of its size is made
            digest = set_digest(session, opening, releases)
            entry = next((one for one in self.roster.helpers if one.name == elsewhere.helper != self.name), None)
            if entry is None or not elsewhere.is_signed(entry, session, opening, digest):
                raise OpeningRefusedError("no other helper has signed that it opened this set")
            with self._record.exclusive() as transaction:
                would, _ = _standing(transaction, opening, digest, headers)
                if would not in (protocol.VIEW_OPENED, protocol.VIEW_VOID):
                    if transaction.terms(session) not in (None, SessionTerms.of(headers[0])):
                        raise OpeningRefusedError(_OTHER_TERMS)
                    would = protocol.VIEW_VOID
                    void = _entry(opening, digest, headers, would)
                    if void.moves(transaction.last_opened(session, list(void.clients))):
                        transaction.commit(void)  # one that moves nobody is never answered as it is, for k must rise
                    logger.warning(
                        "Set %s of session %r is void: helper %r has opened it, this one has not and never will.",
                        *(opening, session, elsewhere.helper),
                    )
        except OpeningRefusedError as refusal:
            logger.warning("Asked to declare a set void: %s", refusal.why)
            raise
        return self._view(session, opening, digest, would, [])

    def _view(self, session: str, opening: str, digest: str, would: str, disputed: Sequence[str]) -> Verdict:
        view = Verdict(self.name, opening, digest, would, tuple(disputed), b"")
        return replace(view, signature=self._key.sign(_said(view, session)))

    def _open(self, session: str, opening: str, releases: tuple[Sealed, ...]) -> Opening:
        headers = self._checked(session, opening, releases)
        digest = set_digest(session, opening, releases)
        # Before anything is recorded: a set that cannot be answered must not take its name.
        seeds = [self._seed(sealed, header) for sealed, header in zip(releases, headers, strict=True)]
        total = np.zeros(headers[0].size, np.uint64)
        with self._record.exclusive() as transaction:
            further = _standing(transaction, opening, digest, headers)[0] == protocol.VIEW_YES
            if further and (too_much := self._too_much_today(transaction, session)):
                raise OpeningRefusedError(too_much)
            self._record_set(transaction, opening, digest, headers)
        while seeds:
            add_mask(total, seeds.pop())
        signature = self._key.sign(_signed(self.name, session, opening, digest, total))
        return Opening(self.name, opening, digest, total, signature)

    def _checked(
        self, session: str, opening: str, releases: tuple[Sealed, ...], *, own_bounds: bool = True
    ) -> list[Header]:
        """Check a set without regard to what was opened before, and return its headers."""
        if not isinstance(opening, str) or not _OPENING_NAME.fullmatch(opening):
            raise OpeningRefusedError("expected a name of 1 to 64 letters, digits and hyphens for the set, got another")
        if not (isinstance(session, str) and session.isalnum()):  # of a length that headers may have, see below
            raise OpeningRefusedError("expected a session of letters and digits, got another")
        if not 0 < len(releases) <= MOST_SUMMED:
            raise OpeningRefusedError(f"expected 1 to {MOST_SUMMED} releases, got {len(releases)}")
        try:
            headers = [checked_header(sealed, self.roster) for sealed in releases]
        except MaskedReleaseError as error:
            raise OpeningRefusedError(f"one of them is no release of this roster: {error}") from error
        if len({header.client for header in headers}) < len(headers):
            raise OpeningRefusedError("a client is in it twice")
        if any(header.session != session for header in headers):
            raise OpeningRefusedError("a release is another session's")
        if len({SessionTerms.of(header) for header in headers}) > 1:
            raise OpeningRefusedError("its releases differ in d, spacing, terms or what they build on")
        if own_bounds and headers[0].size > self.max_model_size:
            raise OpeningRefusedError(
                f"its releases have {headers[0].size} values, and this helper's max-model-size is {self.max_model_size}"
            )
        if own_bounds and len(headers) < self.min_cohort:
            raise OpeningRefusedError(
                f"this helper's min-cohort is {self.min_cohort} releases, and it has {len(headers)}"
            )
        needed = max(headers, key=lambda header: header.min_cohort)
        if len(headers) < needed.min_cohort:
            raise OpeningRefusedError(
                f"client {needed.client!r} wants sums of {needed.min_cohort} releases or more, got {len(headers)}"
            )
        return headers

    def _too_much_today(self, transaction: OpeningTransaction, session: str) -> str:
        """Return which bound a further set of this session would pass, or an empty string."""
        sessions = self.max_sessions_per_day if transaction.terms(session) is None else 0
        if not (sessions or self.max_sums_per_day):
            return ""
        begun, opened = transaction.times(sessions, self.max_sums_per_day)
        yesterday = time.time() - _DAY_S
        if opened > yesterday:
            return (
                f"this helper's max-sums-per-day is {self.max_sums_per_day}, and it opened as many in the last 24 hours"
            )
        if begun > yesterday:
            return f"this helper's max-sessions-per-day is {sessions}, and as many began in the last 24 hours"
        return ""

    def _seed(self, sealed: Sealed, header: Header) -> bytes:
        try:
            return opened_seal(sealed, header, self.name, self._key)
        except MaskedReleaseError as error:
            raise OpeningRefusedError(f"the seal of client {header.client!r} does not open") from error

    @staticmethod
    def _record_set(transaction: OpeningTransaction, opening: str, digest: str, headers: list[Header]) -> None:
        """Record a set if it may be opened after those recorded; one that is recorded already stays as it is."""
        standing, why = _standing(transaction, opening, digest, headers)
        if standing == protocol.VIEW_OPENED:
            return
        if standing not in (protocol.VIEW_YES, protocol.VIEW_LOCKED):
            raise OpeningRefusedError(why)
        last = transaction.last_opened(headers[0].session, [header.client for header in headers])
        for header in headers:
            _check_follows(header, last.get(header.client))
        transaction.commit(_entry(opening, digest, headers, protocol.VIEW_OPENED))


def _standing(transaction: OpeningTransaction, opening: str, digest: str, headers: Sequence[Header]) -> tuple[str, str]:
    """Return a record's view of a set, in the protocol's words, and a reason; ``yes`` if nothing stands against it."""
    session = headers[0].session
    known, voids, lock = (
        transaction.set_digest(session, opening),
        transaction.voids(session, opening),
        transaction.lock(session),
    )
    if digest == known:
        return protocol.VIEW_OPENED, ""
    if digest in voids:
        return protocol.VIEW_VOID, "it is void: another helper has opened it, and this one said that it never will"
    if lock is not None and lock.set_digest == digest:
        return protocol.VIEW_LOCKED, ""
    why = ""
    if known is not None or voids:
        why = "another set was opened, or is void, under its name"
    elif lock is not None:
        why = f"set {lock.opening} of its session was promised, and is not opened yet"
    elif transaction.terms(session) not in (None, SessionTerms.of(headers[0])):
        why = _OTHER_TERMS
    return (protocol.VIEW_NO if why else protocol.VIEW_YES), why


def _entry(opening: str, digest: str, headers: Sequence[Header], kind: str) -> OpenedSet:
    """Return what is recorded of a set."""
    clients = {header.client: LastOpened(header.release, header.release_id) for header in headers}
    return OpenedSet(headers[0].session, opening, digest, SessionTerms.of(headers[0]), clients, kind)


def set_digest(session: str, opening: str, releases: Sequence[Sealed]) -> str:
    """SHA-256 of every byte of a set that a helper is asked to open, in order; 64 hexadecimal digits.

    Examples
    --------
    >>> len(set_digest("session", "opening", []))
    64
    """
    digest = hashlib.sha256(_SET_LABEL + _joined([session.encode(), opening.encode()]))
    for sealed in releases:
        digest.update(_joined([sealed.header, *sealed.seals, sealed.signature]))
    return digest.hexdigest()


def is_opening(entry: HelperEntry, session: str, answer: Opening) -> bool:
    """Return True if the helper of an entry of the roster signed this answer for that session, name, set and total.

    It tells the server who answered, not that the total is right: a helper that adds something to it is not noticed
    here.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import HelperKey, Opening
    >>> entry = HelperKey.simulated(1, "left").entry("left")
    >>> forged = Opening("left", "round-1", set_digest="5" * 64, total=np.zeros(4, np.uint64), signature=bytes(64))
    >>> is_opening(entry, "session", forged)
    False
    """
    try:
        signed = _signed(answer.helper, session, answer.opening, answer.set_digest, answer.total)
    except (AttributeError, TypeError, ValueError):
        return False
    return answer.helper == entry.name and is_signed(entry.signing, answer.signature, signed)


def is_view(entry: HelperEntry, session: str, view: Verdict) -> bool:
    """Return True if the helper of an entry of the roster said this of that session's set."""
    try:
        return view.helper == entry.name and is_signed(entry.signing, view.signature, _said(view, session))
    except (AttributeError, TypeError, ValueError):
        return False


def _said(view: Verdict, session: str) -> bytes:
    """Return the bytes that a helper's signature on what it would do covers."""
    texts = (view.helper, session, view.opening, view.set_digest, view.would_open, *view.disputed)
    return _VIEW_LABEL + _joined([text.encode() for text in texts])


def _check_follows(header: Header, last: LastOpened | None) -> None:
    """Refuse a release that is not built on its client's last opened one, or does not come after it."""
    if last is not None and header.release <= last.release:
        raise OpeningRefusedError(
            f"release {header.release} of client {header.client!r} does not come after release {last.release}, its "
            "last opened one"
        )
    expected = NOTHING_OPENED.hex() if last is None else last.release_id
    if header.release_mode == "cumulative" and header.ack_id != expected:
        raise OpeningRefusedError(
            f"release {header.release} of client {header.client!r} is not built on its last opened one"
        )


def _signed(helper: str, session: str, opening: str, digest: str, total: NDArray[np.uint64]) -> bytes:
    """Return the bytes that a helper's signature covers."""
    return _signed_digest(helper, session, opening, digest, _digest_of(total))


def _signed_digest(helper: str, session: str, opening: str, digest: str, content: bytes) -> bytes:
    texts = (helper.encode(), session.encode(), opening.encode(), digest.encode())
    return _ANSWER_LABEL + _joined([*texts, content])


def _digest_of(total: NDArray[np.uint64]) -> bytes:
    if total.dtype != np.uint64 or total.ndim != 1:
        raise ValueError("not a total")
    return hashlib.sha256(np.ascontiguousarray(total, "<u8").data).digest()


def _joined(parts: Iterable[bytes]) -> bytes:
    parts = list(parts)
    return len(parts).to_bytes(8, "big") + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
