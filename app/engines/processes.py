"""Finding the processes a launch started, however they were detached, and being interrupted in an orderly way."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PROC = Path("/proc")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    born: str  # with the pid it names a process for good: pids come round again
    marked: bool


class Processes:
    """The processes with a marker in their environment, and all that descend from them.

    The environment finds what was detached or orphaned, and descent finds what overwrote or dropped its environment.
    Whatever was found once is remembered, because it may be orphaned afterwards.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._known: set[tuple[int, str]] = set()

    def living(self, own: set[int]) -> list[int]:
        """Those alive now, and those of ``own`` and their descendants, in ascending order."""
        table = list(_process_table(self._marker))
        found = {p.pid for p in table if p.marked or p.pid in own or (p.pid, p.born) in self._known}
        grew = True
        while grew:
            children = {p.pid for p in table if p.parent in found} - found
            found |= children
            grew = bool(children)
        found.discard(os.getpid())
        self._known |= {(p.pid, p.born) for p in table if p.pid in found}
        return sorted(found)


def _process_table(marker: str) -> Iterator[_Process]:
    """Every process that is not a zombie."""
    if not (_PROC / "self" / "environ").exists():
        yield from _process_table_by_ps(marker)
        return
    wanted = marker.encode()
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            state, parent, born = fields[0], int(fields[1]), fields[19]
            marked = False
            with suppress(OSError):  # another user's
                marked = wanted in (folder / "environ").read_bytes().split(b"\0")
            if state not in "ZX":
                yield _Process(int(folder.name), parent, born, marked)


def _process_table_by_ps(marker: str) -> Iterator[_Process]:
    """The same where there is no /proc (macOS): ``e`` prints the environment after the command."""
    try:
        listing = subprocess.run(
            ["ps", "axeww", "-o", "pid=,ppid=,stat=,lstart=,command="],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # the start as five words
        ).stdout
    except OSError:
        return
    for line in listing.splitlines():
        fields = line.split(None, 8)
        if len(fields) == 9 and not fields[2].startswith("Z"):
            yield _Process(int(fields[0]), int(fields[1]), " ".join(fields[3:8]), f" {marker} " in f" {fields[8]} ")


@contextmanager
def interrupts_as_keyboard_interrupt() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the run is cleaned up after them too.

    Yields a function that makes this thread deaf to them and to SIGINT until the block ends. Signals belong to the
    main thread: in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {}

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    def protect() -> None:
        for number in (signal.SIGINT, *ending):
            previous.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN)

    ending = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    for number in ending:
        if signal.getsignal(number) is signal.SIG_DFL:
            previous[number] = signal.signal(number, interrupt)
    try:
        yield protect
    finally:
        for number, handler in previous.items():
            # None is a handler that was not installed from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
