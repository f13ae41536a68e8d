"""A durable append-only store: one SQLite file that only its owner may touch, with a high-water mark outside of it.

A client's ledger and a helper's opening record are such stores, each with tables of its own. The store owns what both
rest on: who may read the file, its kind and format, its header, one writer at a time, the order in which things reach
the disk, and every reason not to believe a file.

The high-water mark says how far a store had come, outside the file that is backed up. A file that was copied back from
a backup looks like an honest one; only something that was not copied back can show the difference. The mark is a small
file next to the store, or better on another disk: after every commit, before anything leaves, it takes on the store's
state. A store behind its mark has been rolled back. A trusted server's checkpoint
(:mod:`murmurfl.strategies.rounds.checkpoint`) has a mark of the same kind.

Order of writing
----------------
A commit is made (write-ahead log, ``synchronous=FULL``), then the mark is moved up to it, then a reply may leave. So,
depending on where a crash comes:

* before the commit: neither file knows of it, and nothing left;
* between commit and mark: the store is ahead of its mark, which is no rollback; the next transaction moves the mark
  before it does anything else;
* after the mark: both know of it; whether the reply left or not, what was committed is never done again.

The mark is never ahead of the store, unless the store was copied back. (Writing the mark first would leave it ahead
after a crash, and one commit behind would look like either.)
"""

from __future__ import annotations

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..errors import LedgerError, MurmurflError
from ..files import check_private, create_private, replace_durably, sync_folder

_MARK_FORMAT = 1


class StoreHeader(Protocol):
    """The settings with which a store was made."""

    @property
    def mark(self) -> Path:
        """The path of the high-water mark."""
        ...


class StoreState(Protocol):
    """The extent of a store, which its mark repeats."""

    @property
    def name(self) -> str:
        """The store's own random name."""
        ...

    @property
    def steps(self) -> int:
        """The number of commits so far."""
        ...


MarkT = TypeVar("MarkT")
HeaderT = TypeVar("HeaderT", bound=StoreHeader)
StateT = TypeVar("StateT", bound=StoreState)


@dataclass(frozen=True)
class MarkFormat(Generic[MarkT]):
    """The way in which one kind of high-water mark is written, and what a mark is refused for."""

    what: str
    """Name of the mark for errors, such as ``"the ledger's high-water mark"``."""
    key: str
    """Key of the format's number in the document."""
    done: str
    """Text for the step that did not happen, such as ``"nothing was released"``."""
    missing: str
    """The way out where there is no mark."""
    damaged: str
    """The way out from a mark that cannot be read."""
    other_format: str
    """The way out from a mark of another format."""
    error: type[MurmurflError]
    to_document: Callable[[MarkT], Mapping[str, Any]]
    from_document: Callable[[dict[str, Any]], MarkT]
    """Makes a mark from a document; raises ValueError, TypeError or KeyError if that is none."""

    def load(self, path: Path) -> MarkT:
        """Read the mark at ``path``; refuse one that is missing, damaged, of another format or open to others."""
        check_private(path, self.what, missing=self.missing, error=self.error)
        try:
            document = json.loads(path.read_text())
            if (version := document.pop(self.key)) != _MARK_FORMAT:
                raise self.error(
                    f"Expected {self.what} of format {_MARK_FORMAT} at {path}, got one of format {version!r}; it was "
                    f"left alone, and {self.done}. {self.other_format}",
                    kind="other-format",
                )
            return self.from_document(document)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.error(
                f"Expected {self.what} at {path}, got a file that is damaged or something else ({error}). "
                f"{self.damaged}",
            ) from error

    def save(self, path: Path, mark: MarkT) -> None:
        """Make this the mark, durably."""
        document = {self.key: _MARK_FORMAT, **self.to_document(mark)}
        replace_durably(path, json.dumps(document, indent=1).encode() + b"\n", error=self.error)


def mark_path(path: Path, mark: str) -> Path:
    """Return the path of a store's high-water mark: as configured, or next to the store."""
    return Path(mark) if mark else path.with_name(path.name + ".mark")


class Store(ABC, Generic[HeaderT, StateT]):
    """A durable append-only store in one SQLite file; a subclass says what its tables mean.

    Parameters
    ----------
    path : Path
        The store's file, absolute.
    timeout_s : float
        How long a transaction waits for another process or thread before it refuses.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, a commit is all or nothing, and what was committed is what
    is read next, across processes and losses of power, as far as the disk keeps what it says it has written. A commit
    moves the high-water mark before it returns. A file that is missing is never made anew by reading it, and one that
    is behind its mark, or differs from it, begins no exclusive transaction. If file and mark were both copied back
    nothing here can tell.
    """

    what: ClassVar[str]
    """Name of the store for errors, such as ``"a ledger"``."""
    user: ClassVar[str]
    """Keeper of the store: a node or a helper."""
    done: ClassVar[str]
    """Text for the step that did not happen, such as ``"nothing was released"``."""
    step: ClassVar[str]
    """Name of one of its steps, such as ``"commit"``."""
    forgotten: ClassVar[str]
    """Content that a store that was copied back has forgotten."""
    error: ClassVar[type[LedgerError]]
    application_id: ClassVar[int]
    formats: ClassVar[tuple[int, ...]]
    """Formats that are read; a new file has the first."""
    schema: ClassVar[str]
    """SQL that makes the tables."""
    missing: ClassVar[str]
    """The way out where there is no file."""
    other_format: ClassVar[str]
    """The way out from a file of another format."""
    lost: ClassVar[str]
    """The way out from a file that cannot be believed."""
    copied_back: ClassVar[str]
    """The way out from a file that was copied back."""
    other_mark: ClassVar[str]
    """The way out from another store's mark."""
    had_one: ClassVar[str]
    """The way out where a new store would follow an earlier one."""
    marks: MarkFormat[StateT]

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s

    @abstractmethod
    def read_header(self, connection: sqlite3.Connection) -> HeaderT:
        """Read the settings with which the store was made."""

    @abstractmethod
    def read_state(self, connection: sqlite3.Connection, header: HeaderT) -> StateT:
        """Read how far the store has come; refuse it if its last parts do not belong together."""

    def read_whole(self, connection: sqlite3.Connection, header: HeaderT) -> StateT:
        """Read how far the store has come; refuse it if any of its parts do not belong together."""
        return self.read_state(connection, header)

    @abstractmethod
    def follows(self, connection: sqlite3.Connection, state: StateT, mark: StateT) -> bool:
        """Return True if the store is not behind its own mark and has the mark's history."""

    def check(self) -> HeaderT:
        """Refuse a file that cannot be believed, or was copied back, and return its header."""
        with self.connected() as connection, self.errors():
            self.check_integrity(connection)
            header = self.read_header(connection)
            mark = self.marks.load(header.mark)  # before the file: another process may be moving both
            connection.execute("BEGIN")
            state = self.read_whole(connection, header)
            StoreTransaction(self, connection, header, state).check_mark(mark)
            return header

    @contextmanager
    def begun(self) -> Iterator[StoreTransaction[HeaderT, StateT]]:
        """Begin a transaction that nobody else can enter, whatever the mark says; what is not committed is gone."""
        with self.connected() as connection:
            with self.errors():
                connection.execute("BEGIN IMMEDIATE")
                header = self.read_header(connection)
                transaction = StoreTransaction(self, connection, header, self.read_state(connection, header))
            yield transaction

    @contextmanager
    def exclusive(self, header: HeaderT) -> Iterator[StoreTransaction[HeaderT, StateT]]:
        """Begin a transaction on the store with this header, if it is not behind its mark; move the mark if that is."""
        with self.begun() as transaction:
            if transaction.header != header:
                raise self.error(
                    f"Expected the {self._noun} this {self.user} began with at {self.path}, got another. "
                    f"{self.done.capitalize()}; restart the {self.user}.",
                    kind="mismatch",
                )
            mark = self.marks.load(header.mark)
            transaction.check_mark(mark)
            if mark.steps < transaction.state.steps:
                # A crash came between a commit and its mark; if it still cannot be written, nothing more is done.
                transaction.move_mark()
            yield transaction

    def make(
        self,
        header: HeaderT,
        state: StateT,
        fill: Callable[[sqlite3.Connection], None],
        *,
        key: tuple[Path, bytes] | None = None,
    ) -> None:
        """Make the store's file with its mark, and with a file for a noise key if one is given.

        ``fill`` writes the first rows. Nothing is ever overwritten, but for a mark under which nothing was committed;
        what is interrupted is no store.
        """
        create_private(self.path, self.what, error=self.error)
        made = [self.path]
        try:
            if header.mark.exists() and (steps := self.marks.load(header.mark).steps) > 0:
                raise self.error(
                    f"Expected no trace of an earlier {self._noun}, got a high-water mark at {header.mark} that counts "
                    f"{steps} {self.step}s: this {self.user} had {self.what}. {self.had_one}",
                    kind="exists",
                )
            if key is not None:
                create_private(key[0], "a noise key", key[1], error=self.error)
                made.append(key[0])
            self.marks.save(header.mark, state)
            self._make_tables(fill)
            sync_folder(self.path.parent)
        except BaseException:
            for file in made:
                file.unlink(missing_ok=True)
            raise

    def _make_tables(self, fill: Callable[[sqlite3.Connection], None]) -> None:
        with self.errors(), closing(connect(self.path, self.timeout_s)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {self.schema}")
            fill(connection)
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.formats[0]}")
            connection.execute("COMMIT")

    @contextmanager
    def opened(self, options: str = "mode=rw", *, writable: bool = False) -> Iterator[sqlite3.Connection]:
        """Connect to the file; refuse one that is missing, not private, of another kind or format."""
        check_private(self.path, self.what, missing=self.missing, writable=writable, error=self.error)
        with self.errors():
            application_id, version = first_numbers(self.path)
            if application_id == self.application_id:
                self._check_version(version)
            connection = connect(self.path, self.timeout_s, options)
        with closing(connection):
            with self.errors():
                (application_id,) = connection.execute("PRAGMA application_id").fetchone()
                if application_id != self.application_id:
                    raise self.error(
                        f"Expected {self.what} of murmurfl at {self.path}, got another file or one whose making "
                        f"was interrupted; it was left alone. Check the path in the {self.user}'s configuration; "
                        f"{self.done}.",
                        kind="malformed",
                    )
                self._check_version(format_of(connection))
            yield connection

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """Connect for one transaction: no threads or forks share a connection, and a replaced file is noticed.

        A copy that came back without SQLite's log gets one, if it can be believed.
        """
        with self.opened(writable=True) as connection:
            with self.errors():
                if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    self.read_whole(connection, self.read_header(connection))
                    connection.execute("PRAGMA journal_mode = WAL")
            yield connection

    def check_integrity(self, connection: sqlite3.Connection) -> None:
        """Refuse a file whose pages do not fit together."""
        with self.errors():
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(str(verdict).splitlines()[0])

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error of SQLite, of the disk or from a damaged row into one that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise self.error(
                    f"Expected {self.path} to be free within {self.timeout_s:g} s, but another process is using this "
                    f"{self._noun}. Let only one {self.user} use it, or wait; {self.done}.",
                    kind="busy",
                ) from error
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                raise self.error(
                    f"Expected {self.path} and its folder to be writable, got: {error}. Nothing can be recorded, so "
                    f"{self.done}.",
                    kind="failed",
                ) from error
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise self.error(
                    f"Expected room on a disk that works for {self.path}, got: {error}. {self.done.capitalize()}.",
                    kind="failed",
                ) from error
            raise self.damaged(str(error)) from error
        except OSError as error:
            raise self.error(
                f"Expected to read {self.path}, got {error.strerror}. {self.done.capitalize()}.", kind="unreadable"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, what: str) -> LedgerError:
        """Return the error of a file that cannot be believed."""
        return self.error(
            f"Expected a readable {self._noun} at {self.path}, got {what}: it is damaged or no {self._noun}. It was "
            f"left alone. {self.lost}",
        )

    def _check_version(self, version: int) -> None:
        if version not in self.formats:
            formats = " or ".join(map(str, self.formats))
            raise self.error(
                f"Expected {self.what} of format {formats} at {self.path}, got one of format {version}; it was left "
                f"alone, and {self.done}. {self.other_format}",
                kind="other-format",
            )

    @property
    def _noun(self) -> str:
        return self.what.split(" ", 1)[1]


@dataclass
class StoreTransaction(Generic[HeaderT, StateT]):
    """A store inside a transaction that has begun; without a commit nothing remains once it is closed."""

    store: Store[HeaderT, StateT]
    connection: sqlite3.Connection
    header: HeaderT
    state: StateT
    """Progress of the store when the transaction began, or with its last commit."""

    def commit(self) -> None:
        """Make durable what was written, then move the mark up to it; after it returns a reply may leave."""
        self.connection.execute("COMMIT")
        # The mark is moved inside another transaction, so that no other process moves it at the same time. Another
        # process may have committed in between and moved it further, so the state is read again.
        self.connection.execute("BEGIN IMMEDIATE")
        self.state = self.store.read_state(self.connection, self.header)
        self.move_mark()

    def move_mark(self) -> None:
        """Move the mark up to the store's state."""
        self.store.marks.save(self.header.mark, self.state)

    def check_belongs(self, mark: StateT) -> None:
        """Refuse another store's mark."""
        store = self.store
        if mark.name != self.state.name:
            raise store.error(
                f"Expected the high-water mark of {store.path}, got that of another {store.what.split(' ', 1)[1]}. Put "
                f"the right one back. {store.other_mark}",
                kind="mismatch",
                setting="mark",
            )

    def is_rolled_back(self, mark: StateT) -> bool:
        """Return True if the store is behind its own mark, or of another history."""
        return not self.store.follows(self.connection, self.state, mark)

    def check_mark(self, mark: StateT) -> None:
        """Refuse another store's mark, and a store that was copied back."""
        store = self.store
        self.check_belongs(mark)
        with store.errors():
            rolled_back = self.is_rolled_back(mark)
        if rolled_back:
            other = " of another history" if mark.steps <= self.state.steps else ""
            raise store.error(
                f"Expected {store.path} at {store.step} {mark.steps} of its high-water mark or after it, got "
                f"{store.step} {self.state.steps}{other}: the {store.what.split(' ', 1)[1]} was copied back from a "
                f"backup and has forgotten {store.forgotten}. {store.copied_back}",
                kind="rolled-back",
            )


def connect(path: Path, timeout_s: float, options: str = "mode=rw") -> sqlite3.Connection:
    """Connect to an existing file; a commit waits for the disk."""
    connection = sqlite3.connect(f"{path.as_uri()}?{options}", timeout=timeout_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    return connection


def format_of(connection: sqlite3.Connection) -> int:
    """Return the number of a file's format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def first_numbers(path: Path) -> tuple[int, int]:
    """Read the application's number and the format's from a SQLite file's header; 0 where only the log has them.

    They are read before SQLite opens a file, for it may then write what a crash left in the log.
    """
    with path.open("rb") as file:
        first = file.read(100)  # https://www.sqlite.org/fileformat.html#the_database_header
    return int.from_bytes(first[68:72]), int.from_bytes(first[60:64])
