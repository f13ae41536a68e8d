"""Flower's own ``flower-supernode`` as a process of ours, and what every process of Flower's needs.

Its lines go into the log; a SuperNode's contact with its SuperLink goes into the journal.

``python -m murmurfl.app.nodes.flower_process supernode PARENT_PID [options of flower-supernode]`` tells its parent
whether the SuperLink has accepted it and answers, as lines of JSON on a pipe of its own (:class:`Contact`): printed
text, which may come from a server, cannot pass for it. Without this, a SuperNode outlives whoever started it, and one
that the SuperLink no longer knows stays and does nothing.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import httpx

from .connection import cause_of
from .journal import Journal, flower_line, plain

FIRST_PAUSE_S, LONGEST_PAUSE_S, SETTLED_S = 1.0, 15.0, 60.0

EVENTS_VARIABLE = "MURMURFL_SUPERNODE_EVENTS"
"""Environment variable of the SuperNode's process: the file descriptor of the pipe."""

_LONGEST_READ = 1 << 16
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s*(.*)")
# Said at every start, or at every attempt while a SuperLink is away, which the journal has once.
_USUAL = ("EXPERIMENTAL: SuperExec authentication", "Connection attempt failed, retrying in")
_JOIN_S = 2.0
_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0
_ENDED = 1
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20
_HEAPS = 2


class Pauses:
    """Seconds to wait before a process is started again: twice as long each time, until one has lasted for a minute."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE_S

    def after(self, lasted_s: float) -> float:
        """Return the wait after a process that lasted so long."""
        pause = FIRST_PAUSE_S if lasted_s > SETTLED_S else self._next
        self._next = min(2 * pause, LONGEST_PAUSE_S)
        return pause


def open_process(
    start: Callable[..., subprocess.Popen[bytes]], command: Sequence[str], environment: Mapping[str, str], **more: Any
) -> subprocess.Popen[bytes]:
    """Start a process whose lines can be followed.

    It has a session of its own: Ctrl-C in the terminal reaches only this process, which then stops the other.
    """
    lines = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return start(list(command), env=dict(environment), start_new_session=True, **lines, **more)


def follow_lines(stream: IO[bytes], say: Callable[[int, str], None] = flower_line) -> threading.Thread:
    """Pass on level and text of each line that a process prints, in a thread that ends with the stream."""

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
    """Note a SuperNode's reports (:class:`Contact`) in a journal, in a thread that closes the pipe in the end."""

    def follow() -> None:
        with os.fdopen(pipe, "rb") as stream, suppress(ValueError, OSError):
            while line := stream.readline(_LONGEST_READ):
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    if event["event"] == "lost":
                        journal.note("disconnected", superlink=superlink, cause=str(event["cause"]))
                    elif event["event"] in ("connected", "contact", "turned-away"):
                        journal.note(event["event"], superlink=superlink)

    thread = threading.Thread(target=follow, daemon=True, name="murmurfl-contact")
    thread.start()
    return thread


def give_back_large_blocks() -> None:
    """Return freed blocks above 1 MiB to the system, in this process from now on; does nothing without glibc.

    After the first large block that is freed, glibc would keep blocks of up to 32 MiB, in a heap for each thread. A
    message comes in pieces of 5 MiB, pulled by two threads, so a node would hold the pieces of its last message for
    good. A fixed threshold makes larger blocks pages of their own.
    """
    if platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        allocator.mallopt(_ARENA_MAX, _HEAPS)


def environment_of_large_blocks() -> dict[str, str]:
    """Environment variables that do the same for a process yet to be started."""
    return {"MALLOC_MMAP_THRESHOLD_": str(_LARGE_BYTES), "MALLOC_ARENA_MAX": str(_HEAPS)}


def no_core_dumps() -> None:
    """Have this process and all that it starts leave no memory behind when they crash: there are keys in it."""
    with suppress(ImportError):
        import resource  # not everywhere

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
        environment = {**environment, EVENTS_VARIABLE: str(writing), "PYTHONUNBUFFERED": "1"}
        process = open_process(start, command, environment, pass_fds=(writing,))
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


CONTACT_EVERY_S = 5.0
_ACCEPTING, _LEAVING, _BEATING = "ActivateNode", "DeactivateNode", "SendNodeHeartbeat"
_NO = 412  # the key is unknown, or the session open


class Contact:
    """Reports changes of a SuperNode's contact with its SuperLink.

    ``tell`` receives an event, ``connected``, ``contact``, ``turned-away`` or ``lost``, and for ``lost`` its cause.
    """

    def __init__(self, tell: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._accepted = self._there = False
        self._cause = ""
        self._told_at = -CONTACT_EVERY_S

    def answered(self, method: str, *, success: bool = True) -> None:
        """Note an answer of the SuperLink to a remote procedure; ``success`` is whether it knows the node."""
        with self._lock:
            self._accepted = (self._accepted or method == _ACCEPTING) and method != _LEAVING and success
            self._cause = ""
            if not self._accepted:
                self._there = False
                return
            now = self._clock()
            event = "contact" if self._there else "connected"
            self._there = True
            if event == "connected" or now - self._told_at >= CONTACT_EVERY_S:
                self._told_at = now
                self._tell(event, "")

    def failed(self, error: BaseException, method: str = "") -> None:
        """Note a call without an answer. A refusal is an answer."""
        if method == _ACCEPTING and isinstance(error, httpx.HTTPStatusError) and error.response.status_code == _NO:
            self._tell("turned-away", "")
        cause = cause_of(error)
        if not cause:
            return
        with self._lock:
            known, self._there, self._cause = self._cause, False, cause
            if known != cause:
                self._tell("lost", cause)


def watch_fleet(contact: Contact) -> None:
    """Report every call that Flower's SuperNode makes in this process."""
    # The one place that touches the private names of Flower's connection; a test with a real SuperNode covers it.
    from flwr.supernode.fleet_http_client import FleetHttpClient

    call = FleetHttpClient._unary_unary

    def watched(client: FleetHttpClient, *, rpc_method: str, **request: Any) -> Any:
        method = rpc_method.rpartition("/")[2]
        try:
            response = call(client, rpc_method=rpc_method, **request)
        except Exception as error:
            contact.failed(error, method)
            raise
        contact.answered(method, success=method != _BEATING or bool(response.success))
        return response

    FleetHttpClient._unary_unary = watched  # type: ignore[method-assign]


def telling_the_node() -> Contact | None:
    """Return a contact that reports through the pipe named in the environment; None if none is named."""
    named = os.environ.pop(EVENTS_VARIABLE, "")
    if not named.isdigit():
        return None
    pipe = int(named)
    os.set_inheritable(pipe, False)

    def tell(event: str, cause: str) -> None:
        with suppress(OSError):  # the node is gone, and this process will be
            os.write(pipe, json.dumps({"event": event, "cause": cause}).encode() + b"\n")

    return Contact(tell)


def end_with(parent: int, politely: signal.Signals) -> None:
    """End this process once its parent has ended: by a signal, and for certain ten seconds later."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        signal.raise_signal(politely)
        time.sleep(_GRACE_S)
        os._exit(_ENDED)

    threading.Thread(target=watch, daemon=True, name="murmurfl-parent").start()


def run_supernode() -> None:
    """Run ``flower-supernode`` with the remaining arguments."""
    parent = int(sys.argv.pop(1))
    end_with(parent, signal.SIGINT)  # a node that signs off can come back at once
    code = _ENDED
    try:
        from flwr.supernode.cli import flower_supernode

        contact = telling_the_node()
        if contact is not None:
            watch_fleet(contact)
        flower_supernode()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _ENDED
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    # Not sys.exit: the thread of its API would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(min(code, 255))


def main() -> None:
    """Run ``flower-supernode``, which the first argument names, with the remaining arguments."""
    sys.argv.pop(1)
    run_supernode()


if __name__ == "__main__":
    main()
