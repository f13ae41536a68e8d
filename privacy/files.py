"""Files that only their owner may touch, and writes that outlive a loss of power."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import LedgerError, MurmurflError


def check_private(
    path: Path, what: str, *, missing: str, writable: bool = False, error: type[MurmurflError] = LedgerError
) -> None:
    """Raise ``error`` if a file is missing, or if other people can read or write it.

    ``what`` names the file and ``missing`` says what to do if there is none; a ``writable`` one must be ours to write.
    """
    try:
        status = path.stat()
    except FileNotFoundError as reason:
        raise error(f"Expected {what} at {path}, got no file. {missing}") from reason
    except OSError as reason:
        raise error(f"Expected {what} at {path}, got {reason.strerror}. Nothing was released.") from reason
    mode, owner = status.st_mode, status.st_uid
    if not stat.S_ISREG(mode):
        raise error(f"Expected {what} at {path}, got something that is no file. Nothing was released.")
    if mode & 0o077:
        raise error(
            f"Expected {what} that only its owner can read and write, got {path} with mode {mode & 0o777:o}. Find out "
            f"who could change it, then `chmod 600 {path}`. Nothing was released."
        )
    if writable and owner != os.geteuid():
        raise error(
            f"Expected {what} of the user this runs as, got {path}, which belongs to user {owner}: what is "
            "written would become unreadable to one of them. Run this as its owner, or `chown` it. Nothing was "
            "released."
        )
    if writable and not (mode & stat.S_IWUSR and os.access(path, os.W_OK)):
        raise error(
            f"Expected {what} that can be written, got {path}, which is read-only: nothing can be recorded, so nothing "
            "is released. Make it writable again (`chmod 600`, or mount its disk for writing)."
        )


def exposure(path: Path, what: str) -> tuple[Literal["", "read", "write"], str]:
    """Return what other people may do with a file, and a sentence with the way out; empty texts if nothing.

    The group of somebody else's file may read it: that is how this user reads it. Only POSIX permission bits are looked
    at, no access control lists.
    """
    if os.name != "posix":
        return "", ""
    status = path.stat()
    own = status.st_uid == os.geteuid()
    readers = stat.S_IROTH | (stat.S_IRGRP if own else 0)
    got = f"got {path} with mode {stat.S_IMODE(status.st_mode):o}"
    command = f"`chmod {'600' if own else '640'} {path}`"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            "write",
            f"Expected {what} that only its owner may change, {got}: look at what is in it, then run {command}.",
        )
    folder = open_folder(path)
    if folder is not None:
        return "write", (
            f"Expected {what} in folders only its owner may change, got {folder}, where anybody may put another in its "
            f"place: run `chmod o-w {folder}`, or keep it elsewhere."
        )
    if status.st_mode & readers:
        return "read", f"Expected {what} that only its owner may read, {got}: run {command}."
    return "", ""


def open_folder(path: Path) -> Path | None:
    """Return the first folder above a file in which anybody may replace it; None if there is none.

    Folders before and after symbolic links count; those with the sticky bit and file systems mounted read-only do not.
    """
    for folder in dict.fromkeys([*path.absolute().parents, *path.resolve().parents]):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not os.statvfs(folder).f_flag & os.ST_RDONLY:
            return folder
    return None


def not_written(what: str, path: Path, reason: OSError) -> str:
    """Return what could not be written where, why, and what to do first: two sentences without the last full stop."""
    full = reason.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    advice = f"Make room on the disk of {path.parent} (`df {path.parent}`)" if full else "Let this user write there"
    return f"Expected to write {what} to {path}, got: {reason.strerror or reason}. {advice}"


def create_private(path: Path, what: str, data: bytes = b"", *, error: type[MurmurflError] = LedgerError) -> None:
    """Make a new file of mode 600, durable when this returns; raise ``error`` if one is there, or no folder for it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as reason:
        raise error(
            f"Expected nothing at {path}, where {what} is to be made, got a file; it was left alone."
        ) from reason
    except FileNotFoundError as reason:
        raise error(f"Expected a folder at {path.parent}, got none; make it first (`mkdir -m 700`).") from reason
    except OSError as reason:
        raise error(f"Expected to make {what} at {path}, got {reason.strerror}.") from reason
    _write(descriptor, data)
    sync_folder(path.parent)


def write_private(path: Path, text: str) -> None:
    """Write a text to a file of mode 600, whatever the umask; an existing file is replaced."""
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as reason:  # a full disk does not say of which file
        raise OSError(reason.errno, reason.strerror, str(path)) from reason


def replace_durably(path: Path, data: bytes, *, error: type[MurmurflError] = LedgerError) -> None:
    """Replace the contents of a file: after a crash there is either the old file or the new one, complete."""
    temporary = path.with_name(path.name + ".new")
    try:
        _write(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), data)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as reason:
        raise error(f"Expected to write {path}, got {reason.strerror}. Nothing was released.") from reason


def sync_folder(folder: Path) -> None:
    """Make a folder's list of names durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class FileKind:
    """A kind of SQLite file that only its owner may touch, and everything that such a file is refused for.

    A machine's ledger is one, a helper's opening record another.
    """

    what: str
    """``"a ledger"``, for the errors."""
    user: str
    """Who keeps it: a node or a helper."""
    done: str
    """``"nothing was released"``, for the errors."""
    error: type[LedgerError]
    application_id: int
    formats: tuple[int, ...]
    missing: str
    """The way out where there is no file."""
    other_format: str
    """The way out from a file of another format."""
    lost: str
    """The way out from a file that cannot be believed."""

    @property
    def _noun(self) -> str:
        return self.what.split(" ", 1)[1]

    @contextmanager
    def opened(
        self, path: Path, timeout_s: float, options: str = "mode=rw", *, writable: bool = False
    ) -> Iterator[sqlite3.Connection]:
        """Connect to the file at ``path``; refuse one that is missing, not private, of another kind or format."""
        check_private(path, self.what, missing=self.missing, writable=writable, error=self.error)
        with self.clear_errors(path, timeout_s):
            application_id, version = first_numbers(path)
            if application_id == self.application_id:
                self._check_version(version, path)
            connection = connect(path, timeout_s, options)
        with closing(connection):
            with self.clear_errors(path, timeout_s):
                (application_id,) = connection.execute("PRAGMA application_id").fetchone()
                if application_id != self.application_id:
                    raise self.error(
                        f"Expected {self.what} of murmurfl at {path}, got another file or one whose making "
                        f"was interrupted; it was left alone. Check the path in the {self.user}'s configuration; "
                        f"{self.done}."
                    )
                self._check_version(format_of(connection), path)
            yield connection

    @contextmanager
    def connection_to(
        self, path: Path, timeout_s: float, believe: Callable[[sqlite3.Connection], None]
    ) -> Iterator[sqlite3.Connection]:
        """Connect for one transaction: no threads or forks share a connection, and a replaced file is noticed.

        A copy that came back without SQLite's log gets one, unless ``believe`` refuses it.
        """
        with self.opened(path, timeout_s, writable=True) as connection:
            with self.clear_errors(path, timeout_s):
                if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    believe(connection)
                    connection.execute("PRAGMA journal_mode = WAL")
            yield connection

    @contextmanager
    def making(self, path: Path, timeout_s: float, schema: str) -> Iterator[sqlite3.Connection]:
        """Make the tables of a new file in an empty one; the caller fills them. What is interrupted is no such file."""
        with self.clear_errors(path, timeout_s), closing(connect(path, timeout_s)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {schema}")
            yield connection
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.formats[0]}")
            connection.execute("COMMIT")

    def _check_version(self, version: int, path: Path) -> None:
        if version not in self.formats:
            formats = " or ".join(map(str, self.formats))
            raise self.error(
                f"Expected {self.what} of format {formats} at {path}, got one of format {version}; it was left alone, "
                f"and {self.done}. {self.other_format}"
            )

    def check_integrity(self, connection: sqlite3.Connection, path: Path) -> None:
        """Refuse a file whose pages do not fit together."""
        with self.clear_errors(path, 0.0):
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(path, str(verdict).splitlines()[0])

    @contextmanager
    def clear_errors(self, path: Path, timeout_s: float) -> Iterator[None]:
        """Turn an error of SQLite, of the disk or from a damaged row into one that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise self.error(
                    f"Expected {path} to be free within {timeout_s:g} s, but another process is using this "
                    f"{self._noun}. Let only one {self.user} use it, or wait; {self.done}."
                ) from error
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                raise self.error(
                    f"Expected {path} and its folder to be writable, got: {error}. Nothing can be recorded, so "
                    f"{self.done}."
                ) from error
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise self.error(
                    f"Expected room on a disk that works for {path}, got: {error}. {self.done.capitalize()}."
                ) from error
            raise self.damaged(path, str(error)) from error
        except OSError as error:
            raise self.error(f"Expected to read {path}, got {error.strerror}. {self.done.capitalize()}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damaged(path, str(error)) from error

    def damaged(self, path: Path, what: str) -> LedgerError:
        """The error of a file that cannot be believed."""
        return self.error(
            f"Expected a readable {self._noun} at {path}, got {what}: it is damaged or no {self._noun}. It was left "
            f"alone. {self.lost}"
        )


def connect(path: Path, timeout_s: float, options: str = "mode=rw") -> sqlite3.Connection:
    """Connect to an existing file; a commit waits for the disk."""
    connection = sqlite3.connect(f"{path.as_uri()}?{options}", timeout=timeout_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    return connection


def format_of(connection: sqlite3.Connection) -> int:
    """The number of a file's format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def first_numbers(path: Path) -> tuple[int, int]:
    """Read the application's number and the format's from a SQLite file's header; 0 where only the log has them.

    They are read before SQLite opens a file, for it may then write what a crash left in the log.
    """
    with path.open("rb") as file:
        first = file.read(100)  # https://www.sqlite.org/fileformat.html#the_database_header
    return int.from_bytes(first[68:72]), int.from_bytes(first[60:64])
