"""Files that only their owner may touch, and writes that outlive a loss of power."""

from __future__ import annotations

import errno
import os
import stat
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
        raise error(f"Expected {what} at {path}, got no file. {missing}", kind="not-found") from reason
    except OSError as reason:
        raise error(
            f"Expected {what} at {path}, got {reason.strerror}. Nothing was released.", kind="unreadable"
        ) from reason
    mode, owner = status.st_mode, status.st_uid
    if not stat.S_ISREG(mode):
        raise error(
            f"Expected {what} at {path}, got something that is no file. Nothing was released.", kind="unreadable"
        )
    if mode & 0o077:
        raise error(
            f"Expected {what} that only its owner can read and write, got {path} with mode {mode & 0o777:o}. Find out "
            f"who could change it, then `chmod 600 {path}`. Nothing was released.",
            kind="insecure",
        )
    if writable and owner != os.geteuid():
        raise error(
            f"Expected {what} of the user this runs as, got {path}, which belongs to user {owner}: what is "
            "written would become unreadable to one of them. Run this as its owner, or `chown` it. Nothing was "
            "released.",
            kind="insecure",
        )
    if writable and not (mode & stat.S_IWUSR and os.access(path, os.W_OK)):
        raise error(
            f"Expected {what} that can be written, got {path}, which is read-only: nothing can be recorded, so nothing "
            "is released. Make it writable again (`chmod 600`, or mount its disk for writing).",
            kind="failed",
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
            f"Expected nothing at {path}, where {what} is to be made, got a file; it was left alone.", kind="exists"
        ) from reason
    except FileNotFoundError as reason:
        raise error(
            f"Expected a folder at {path.parent}, got none; make it first (`mkdir -m 700`).", kind="not-found"
        ) from reason
    except OSError as reason:
        raise error(f"Expected to make {what} at {path}, got {reason.strerror}.", kind="failed") from reason
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
        raise error(
            f"Expected to write {path}, got {reason.strerror}. Nothing was released.", kind="failed"
        ) from reason


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
