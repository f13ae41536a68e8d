"""What a helper remembers of the sets it opened (for :mod:`.opening_rule`), and the record in memory.

A helper opens a release only if it is built on the last release of that machine which the same helper opened. So the
record is what the guarantee of secure aggregation hangs on: a helper that forgets can be made to open what, with what
it opened before, singles a machine's release out. Records live as long as the helper's key. A helper that lost its
record gets a new key.
"""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar

from ..errors import LedgerError
from .masking import Header
from .roster import HelperEntry


class OpeningRecordError(LedgerError):
    """A helper's opening record cannot be read, written or believed. Nothing was opened."""


@dataclass(frozen=True)
class SessionTerms:
    """What all releases of a session have in common, for good.

    Parameters
    ----------
    builds_on, size, spacing, roster, helpers, terms
        As in :class:`~murmurfl.privacy.sums.masking.Header`.
    """

    builds_on: str
    size: int
    spacing: float
    roster: str
    helpers: tuple[str, ...]
    terms: str

    @classmethod
    def of(cls, header: Header) -> SessionTerms:
        """Those of one release."""
        return cls(header.builds_on, header.size, header.spacing, header.roster, header.helpers, header.terms)


@dataclass(frozen=True)
class LastOpened:
    """The last release of a machine that a helper opened in a session.

    Parameters
    ----------
    release : int
        k.
    release_id : str
    """

    release: int
    release_id: str


@dataclass(frozen=True)
class OpenedSet:
    """One set of releases that was opened.

    Parameters
    ----------
    session : str
    opening : str
        The server's name for the set.
    set_digest : str
        Of all its bytes (:func:`~murmurfl.privacy.sums.opening_rule.set_digest`).
    terms : SessionTerms
    machines : mapping of str to LastOpened
        Whose releases were in it, and which.
    """

    session: str
    opening: str
    set_digest: str
    terms: SessionTerms
    machines: Mapping[str, LastOpened]

    def to_bytes(self) -> bytes:
        """The one way to write it."""
        document = [
            self.session,
            self.opening,
            self.set_digest,
            asdict(self.terms),
            [[name, last.release, last.release_id] for name, last in self.machines.items()],
        ]
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> OpenedSet:
        """What :meth:`to_bytes` wrote.

        Raises
        ------
        ValueError, TypeError, KeyError
            If it is something else.
        """
        session, opening, digest, terms, machines = json.loads(content)
        terms = SessionTerms(**{**terms, "helpers": tuple(terms["helpers"])})
        last = {name: LastOpened(release, release_id) for name, release, release_id in machines}
        return cls(session, opening, digest, terms, last)


class OpeningPage(ABC):
    """A record inside one exclusive transaction."""

    @abstractmethod
    def set_digest(self, session: str, opening: str) -> str | None:
        """The digest of the set that was opened under a name, or None if none was."""

    @abstractmethod
    def terms(self, session: str) -> SessionTerms | None:
        """What all releases of a session have in common, or None if none was opened."""

    @abstractmethod
    def last_opened(self, session: str, machines: Sequence[str]) -> dict[str, LastOpened]:
        """The last release that was opened, of those of the machines that had any."""

    @abstractmethod
    def commit(self, opened: OpenedSet) -> None:
        """Record a set, durably; after it returns the sum may leave.

        Raises
        ------
        OpeningRecordError
            If the name was used, or a release does not come after the machine's last: a record forgets nothing.
        """


class OpeningRecord(ABC):
    """A helper's memory of what it opened.

    Notes
    -----
    **Formal guarantees.** An implementation promises that transactions on one helper's record exclude each other, that
    a commit is all or nothing, and that what was committed is what is read next, for as long as the helper's key is
    used. The opening rule rests on it.
    """

    durable: ClassVar[bool] = False
    """Whether a commit outlives the process: real helpers insist on it."""

    @abstractmethod
    def check_helper(self, helper: HelperEntry) -> None:
        """Refuse a helper whose record this is not.

        Raises
        ------
        OpeningRecordError
        """

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[OpeningPage]:
        """A transaction nobody else can enter; without a commit it changes nothing.

        Raises
        ------
        OpeningRecordError
            If the record cannot be read or believed.
        """


def key_digest(helper: HelperEntry) -> bytes:
    """By what a record knows its helper's keys."""
    return hashlib.sha256(b"murmurfl helper 1\x00" + helper.sealing + helper.signing).digest()


def check_forward(page: OpeningPage, opened: OpenedSet) -> None:
    """Refuse a commit under a name that was used, or of a release that does not come after the machine's last.

    The opening rule never asks for one; whoever calls :meth:`OpeningPage.commit` by mistake must not make a record
    that can be believed no more.

    Raises
    ------
    OpeningRecordError
    """
    last = page.last_opened(opened.session, list(opened.machines))
    terms = page.terms(opened.session)
    if (
        page.set_digest(opened.session, opened.opening) is not None
        or terms not in (None, opened.terms)
        or any(opened.machines[name].release <= before.release for name, before in last.items())
    ):
        raise OpeningRecordError(
            "Expected a set under a new name, of releases that each come after the machine's last opened one, got "
            "another. Nothing was recorded or opened."
        )


class MemoryOpeningRecord(OpeningRecord, OpeningPage):
    """A record in this process's memory: for tests and in-process experiments; gone with the process.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, until the
    process ends: a real helper that used it, and was started again, could be made to open what singles machines out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: dict[tuple[str, str], str] = {}
        self._terms: dict[str, SessionTerms] = {}
        self._last: dict[tuple[str, str], LastOpened] = {}
        self._helper: bytes | None = None

    def check_helper(self, helper: HelperEntry) -> None:
        with self._lock:
            if self._helper not in (None, key_digest(helper)):
                raise OpeningRecordError(f"Expected the opening record of helper {helper.name!r}, got another's.")
            self._helper = key_digest(helper)

    @contextmanager
    def exclusive(self) -> Iterator[OpeningPage]:
        with self._lock:
            yield self

    def set_digest(self, session: str, opening: str) -> str | None:
        return self._sets.get((session, opening))

    def terms(self, session: str) -> SessionTerms | None:
        return self._terms.get(session)

    def last_opened(self, session: str, machines: Sequence[str]) -> dict[str, LastOpened]:
        return {name: self._last[session, name] for name in machines if (session, name) in self._last}

    def commit(self, opened: OpenedSet) -> None:
        check_forward(self, opened)
        self._sets[opened.session, opened.opening] = opened.set_digest
        self._terms[opened.session] = opened.terms
        self._last |= {(opened.session, name): last for name, last in opened.machines.items()}
