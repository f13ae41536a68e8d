"""What a child process of Flower's says: its lines into the log of whoever started it, its contact into the journal."""

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
# Said at every start, or at every attempt while a SuperLink is away: the journal has the second once.
_USUAL = ("EXPERIMENTAL: SuperExec authentication", "Connection attempt failed, retrying in")
_JOIN_S = 2.0


def follow_lines(stream: IO[bytes], say: Callable[[int, str], None] = flower_line) -> threading.Thread:
    """Pass on what a process prints, line by line, until it ends.

    Parameters
    ----------
    stream : binary file
        Its output, errors too.
    say : callable
        Gets each line's level, as :mod:`logging` counts them, and its text without it.

    Returns
    -------
    Thread
        It ends with the stream.
    """

    def follow() -> None:
        level = logging.WARNING
        with suppress(ValueError, OSError):  # closed, as it is in the end
            while line := stream.readline(_LONGEST_READ):
                level, text = _levelled(plain(line.decode("utf-8", "replace")), level)
                if text:
                    say(level, text)

    thread = threading.Thread(target=follow, daemon=True, name="murmurfl-lines")
    thread.start()
    return thread


def _levelled(line: str, before: int) -> tuple[int, str]:
    """A line's level and what else it says; one without a level goes on with the last one, if that was of interest."""
    found = _LEVEL.match(line)
    if found is None:
        return max(before, logging.WARNING), line
    level, text = logging.getLevelNamesMapping()[found[1]], found[2]
    return (logging.INFO if text.startswith(_USUAL) else level), text


def follow_contact(pipe: int, journal: Journal, superlink: str) -> threading.Thread:
    """Note in a journal what a SuperNode knows of its SuperLink (:mod:`.fleet_contact`), until it ends.

    Parameters
    ----------
    pipe : int
        A file descriptor, which is closed in the end.
    journal : Journal
    superlink : str
        As entries name it.
    """

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


@contextmanager
def followed(
    start: Callable[..., subprocess.Popen[Any]],
    command: Sequence[str],
    environment: Mapping[str, str],
    journal: Journal,
    superlink: str,
) -> Iterator[subprocess.Popen[Any]]:
    """A SuperNode's process whose lines are logged and whose contact is noted; the caller ends it.

    Parameters
    ----------
    start : callable
        As :class:`subprocess.Popen`.
    command : sequence of str
    environment : mapping
    journal : Journal
    superlink : str
    """
    reading, writing = os.pipe()
    try:
        process = start(
            list(command),
            env={**environment, EVENTS_VARIABLE: str(writing), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            # In a session of its own, so that Ctrl-C in the terminal reaches this process alone, which then stops it.
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
