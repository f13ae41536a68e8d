"""Follow a child process of Flower's: its lines go into the log, its contact with the SuperLink into the journal."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from .connections.fleet_contact import EVENTS_VARIABLE
from .watching.journal import Journal
from .watching.node_log import flower_line, plain

_LONGEST_READ = 1 << 16
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s*(.*)")
# Said at every start, or at every attempt while a SuperLink is away, which the journal has once.
_USUAL = ("EXPERIMENTAL: SuperExec authentication", "Connection attempt failed, retrying in")
_JOIN_S = 2.0
_GRACE_S = 10.0


def follow_lines(stream: IO[bytes], say: Callable[[int, str], None] = flower_line) -> threading.Thread:
    """Pass on what a process prints, line by line, in a thread that ends with the stream.

    Parameters
    ----------
    say : callable
        Receives each line's level, as :mod:`logging` counts, and its text.
    """

    def follow() -> None:
        level = logging.WARNING
        with suppress(ValueError, OSError):  # closed in the end
            while line := stream.readline(_LONGEST_READ):
                level, text = _levelled(plain(line.decode("utf-8", "replace")), level)
                if text:
                    say(level, text)

    thread = threading.Thread(target=follow, daemon=True, name="murmurfl-lines")
    thread.start()
    return thread


def _levelled(line: str, before: int) -> tuple[int, str]:
    """Level and text of a line; one without a level takes the last one's, and at least WARNING."""
    found = _LEVEL.match(line)
    if found is None:
        return max(before, logging.WARNING), line
    level, text = logging.getLevelNamesMapping()[found[1]], found[2]
    return (logging.INFO if text.startswith(_USUAL) else level), text


def follow_contact(pipe: int, journal: Journal, superlink: str) -> threading.Thread:
    """Note a SuperNode's reports (:mod:`.fleet_contact`) in a journal, in a thread that closes the pipe in the end."""

    def follow() -> None:
        with os.fdopen(pipe, "rb") as stream, suppress(ValueError, OSError):
            while line := stream.readline(_LONGEST_READ):
                with suppress(ValueError, KeyError, TypeError):
                    told = json.loads(line)
                    if told["event"] == "lost":
                        journal.note("disconnected", superlink=superlink, cause=str(told["cause"]))
                    elif told["event"] in ("connected", "contact", "turned-away"):
                        journal.note(told["event"], superlink=superlink)

    thread = threading.Thread(target=follow, daemon=True, name="murmurfl-contact")
    thread.start()
    return thread


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a process: politely, and by force ten seconds later."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


@contextmanager
def followed(
    start: Callable[..., subprocess.Popen[Any]],
    command: Sequence[str],
    environment: Mapping[str, str],
    journal: Journal,
    superlink: str,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a SuperNode's process with its lines logged and its contact noted; the caller ends it."""
    reading, writing = os.pipe()
    try:
        process = start(
            list(command),
            env={**environment, EVENTS_VARIABLE: str(writing), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            # A session of its own: Ctrl-C in the terminal reaches only this process, which then stops the other.
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    following = [follow_lines(process.stdout), follow_contact(reading, journal, superlink)] if process.stdout else []
    try:
        yield process
    finally:
        for thread in following:
            thread.join(_JOIN_S)
