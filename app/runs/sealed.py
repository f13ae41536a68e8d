"""Run code on people's rows so that nothing but its typed result or one of a few fixed texts leaves.

A list of what must not be said is never complete: any library may print, warn or log something new. So
:func:`run_sealed` closes every way out of the process while the code runs, and what may leave is a list of types:

* whatever the code returns, which its caller vouches for: a real fit's released model and public numbers;
* what it hands to :meth:`Seal.show`, likewise: the number of a round that is over;
* before :meth:`Seal.begin_rows`, an error of murmurfl's or of the operating system, which is of files and settings;
* from then on, and for an error that nobody expected, one of :class:`Ending`, a text and nothing else.

Whatever else is printed, logged, warned or raised goes nowhere, or into a private file that the operator asked for.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ...privacy.errors import ConfigurationError, LedgerError, MurmurflError
from ...privacy.files import create_private
from ...strategies.callbacks.metrics_file import FIGURES_VARIABLE

PRIVATE_FIRST_LINE = (
    "PRIVATE: what stands here depends on single rows, and no epsilon covers it. Keep it on this computer.\n"
)
"""First line of a private log."""

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_ONE_AT_A_TIME = threading.Lock()
ResultT = TypeVar("ResultT")


class Ending(Enum):
    """Everything that may be said of a failure once a row was read, or that nobody expected."""

    FAILED = (
        "This call failed. Why is not said, because it may depend on rows; --private-log FILE (private_log) keeps it "
        "where only you can read it. The ledger says what was released, and without one nothing was."
    )
    CHANGED = (
        "Expected the rows and the schema with which this ledger was used, unchanged and in their order, got others. "
        "Put both back as they were: new rows may be added at the table's end. Nothing was released by this call."
    )
    INTERRUPTED = "Interrupted."


class SealedError(MurmurflError):
    """A failure on people's rows, of which nothing but its :class:`Ending` is known."""

    kind = "failed"

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.value)
        self.ending = ending


class ChangedRowsError(SealedError, LedgerError):
    """Rows are not those that a ledger was used with."""

    kind = "mismatch"

    def __init__(self) -> None:
        super().__init__(Ending.CHANGED)


class Seal:
    """The open seal of one call, for the code that runs under it."""

    def __init__(self, sink: int) -> None:
        self._sink = sink
        self.rows_are_read = False
        self._ways_out: list[tuple[int, int]] = []
        self._streams: tuple[Any, Any] = (None, None)
        self._closed: tuple[Any, Any] = (None, None)
        self.shown_by = 0
        """The thread that shows something now; 0 for none."""

    def begin_rows(self) -> None:
        """Let no error's text leave from here on: the next step reads rows."""
        self.rows_are_read = True

    def show(self, print_result: Callable[[], object]) -> None:
        """Call a function with the standard streams open: what it shows, its caller vouches for."""
        self._open()
        self.shown_by = threading.get_ident()
        try:
            print_result()
        finally:
            self.shown_by = 0
            self._close()

    def tell(self, text: str) -> None:
        """Show a text for people on standard error, wrapped to their terminal; its caller vouches for it."""

        def write() -> None:
            known = os.environ.get("COLUMNS", "").isdigit() or sys.stderr.isatty()
            lines = textwrap.wrap(text, shutil.get_terminal_size().columns) if known else [text]
            sys.stderr.write("\n".join(lines) + "\n")

        self.show(write)

    def note(self, text: str) -> None:
        """Write a text into the private log, if there is one."""
        with suppress(OSError):
            os.write(self._sink, text.encode("utf-8", "backslashreplace") + b"\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the standard streams closed, as Python objects and as file descriptors."""
        with ExitStack() as stack:
            for descriptor in (_STANDARD_OUTPUT, _STANDARD_ERROR):
                with suppress(OSError):  # one that is closed needs no seal
                    self._ways_out.append((descriptor, kept := os.dup(descriptor)))
                    stack.callback(os.close, kept)
            self._streams = sys.stdout, sys.stderr
            sealed = [os.fdopen(os.dup(self._sink), "w", encoding="utf-8", errors="backslashreplace") for _ in range(2)]
            for stream in sealed:
                stack.callback(stream.close)
            self._closed = sealed[0], sealed[1]
            self._close()
            try:
                yield
            finally:
                self._open()

    def _close(self) -> None:
        _flush(*self._streams, sys.__stdout__, sys.__stderr__)
        for descriptor, _ in self._ways_out:
            os.dup2(self._sink, descriptor)
        sys.stdout, sys.stderr = self._closed

    def _open(self) -> None:
        # A text that waits in a buffer, of Python or of C, would leave later.
        _flush(*self._closed, *self._streams, sys.__stdout__, sys.__stderr__)
        for descriptor, kept in self._ways_out:
            os.dup2(kept, descriptor)
        sys.stdout, sys.stderr = self._streams


def run_sealed(work: Callable[[Seal], ResultT], private_log: Path | None = None) -> ResultT:
    """Run a function on people's rows and let nothing but what it returns leave this process, or an :class:`Ending`.

    Parameters
    ----------
    work : callable
        Given the :class:`Seal`; whatever it returns must be released or public.
    private_log : Path, optional
        New file of mode 600 for everything that does not leave; default nowhere. It is removed again if no row was
        read and nothing failed that the error does not say.

    Raises
    ------
    MurmurflError, OSError
        As ``work`` raised it before it called :meth:`Seal.begin_rows`.
    SealedError
        With a fixed text and no cause, for every error after that.
    KeyboardInterrupt
        Without anything else, where somebody interrupted it.

    Notes
    -----
    **Formal guarantees.** While ``work`` runs, nothing that this process writes to its standard streams and their
    descriptors, logs, warns of or raises leaves it: neither its presence nor its text depends on a row, as far as what
    ``work`` returns and shows does not. It holds for all threads of the process, and for processes that ``work``
    starts. Time, and a process that the operating system ends, are not covered, nor files, sockets and streams that
    code under it opens or holds for itself. Proof: docs/proofs/records.md.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise ConfigurationError(
            "Expected one real fit at a time in a process, got a second one: wait for the first.", kind="wrong-order"
        )
    ending, result, known = Ending.FAILED, None, None
    try:
        with _sink(private_log) as sink:
            seal = Seal(sink)
            with seal.held(), _nothing_said(seal):
                try:
                    result = [work(seal)]
                except KeyboardInterrupt:
                    ending = Ending.INTERRUPTED
                except SealedError as error:
                    ending = error.ending
                except BaseException as error:
                    with suppress(Exception):
                        seal.note("".join(traceback.format_exception(error)))
                    if not seal.rows_are_read:
                        known = _of_settings(error)
                gc.collect()  # what is finalised with an error is finalised here
            unexplained = ending is Ending.FAILED and result is None and known is None
            if private_log is not None and not (seal.rows_are_read or unexplained):  # so that a retry may make it
                Path(private_log).expanduser().unlink(missing_ok=True)
    except KeyboardInterrupt:  # while an error was noted, or rows were freed: it has that error as its context
        result, known, ending = None, None, Ending.INTERRUPTED
    finally:
        _ONE_AT_A_TIME.release()
    # Raised here, an error has no context, no cause and no frame in which a row could be found.
    if known is not None:
        known.__cause__ = known.__context__ = None
        raise known.with_traceback(None)
    if result is None:
        if ending is Ending.INTERRUPTED:
            raise KeyboardInterrupt
        raise ChangedRowsError if ending is Ending.CHANGED else SealedError(ending)
    return result[0]


def _of_settings(error: BaseException) -> Exception | None:
    """Return an error that is of files and settings, to be raised again; None if nobody expected it."""
    return error if isinstance(error, MurmurflError | OSError) else None


@contextmanager
def _sink(private_log: Path | None) -> Iterator[int]:
    """Open a descriptor for everything that does not leave."""
    path: Path | str = os.devnull
    if private_log is not None:
        path = Path(private_log).expanduser()
        create_private(path, "a private log", PRIVATE_FIRST_LINE.encode(), error=ConfigurationError)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _nothing_said(seal: Seal) -> Iterator[None]:
    """Hand log records, warnings and errors of threads to the seal alone, whatever handlers anybody has installed.

    A folder for a monitor's figures, which the environment may name, is unknown meanwhile.
    """
    written = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handled = logging.Logger.handle

    def note_record(logger: logging.Logger, record: logging.LogRecord) -> None:
        if seal.shown_by == threading.get_ident():
            handled(logger, record)
            return
        with suppress(Exception):
            seal.note(written.format(record))

    def note_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        seal.note(warnings.formatwarning(message, category, filename, lineno))

    def note_failure(failed: Any) -> None:
        seal.note("".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)))

    with ExitStack() as stack, warnings.catch_warnings():
        # Not through handlers and filters: a logger made meanwhile would have its own.
        for place, name, sealed in (
            (logging.Logger, "handle", note_record),
            (warnings, "showwarning", note_warning),
            (threading, "excepthook", note_failure),
            (sys, "unraisablehook", note_failure),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, sealed)
        warnings.simplefilter("always")
        if (folder := os.environ.pop(FIGURES_VARIABLE, None)) is not None:  # a monitor's file has times of rounds
            stack.callback(os.environ.__setitem__, FIGURES_VARIABLE, folder)
        yield


def _flush(*streams: Any) -> None:
    for stream in streams:
        with suppress(Exception):  # a stream that is gone has nothing left to say
            stream.flush()
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # buffers of C
