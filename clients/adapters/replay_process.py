"""The process in which a real client's records meet its model: started, fed and restarted by the client."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.errors import OF_DATA, ConfigurationError, InvalidRecordError
from . import replay

logger = logging.getLogger(__name__)

_WORKSPACE = 1 << 30
"""Bytes that the process may use in addition to twice the values of its programs: what routines use internally."""
_OF_A_THREAD = 1 << 27
"""Address space of a thread: its stack and its part of the heap."""
_KEPT_POINTS = 4
_LONGEST_PAUSE_S = 10.0
_PASSED_ON = ("LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "CUDA_VISIBLE_DEVICES", "MKL_CBWR", "DNNL_MAX_CPU_ISA")
_ENVIRONMENT = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
"""Read once, when this module is imported: later changes may depend on records."""
_ENVIRONMENT["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # entry points of installed packages are code that nobody checked


@dataclass(frozen=True)
class Program:
    """A list of what a model computes for one record, as plain data (:mod:`.replay` has the kinds).

    Notes
    -----
    **Formal guarantees.** What it computes is a function of its content, its constants, the parameters and one record,
    if its kind accepts it (:class:`.replay.TorchProgram`). Its digest covers content and constants.
    Proof: docs/proofs/records.md.
    """

    kind: str
    content: Mapping[str, Any]
    constants: Mapping[str, NDArray[Any]]
    results: tuple[tuple[tuple[int, ...], str], ...]
    """Shapes and NumPy types of what it returns."""
    memory: int | None
    """Bytes of all values of one computation together; None where memory is not limited, as on a GPU."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program with its constants, in hexadecimal: what runs, to the last bit."""
        of_constants = {
            name: [array.dtype.name, list(array.shape), hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()]
            for name, array in self.constants.items()
        }
        text = json.dumps([self.kind, self.content, of_constants], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def runnable(self) -> Any:
        """The program in this process, for simulations and trials."""
        return replay.KINDS[self.kind](self.content, self.constants)


class ReplayProcess:
    """Computes programs record by record in a process that never imported the project's code.

    It starts when a program is first computed, and anew if it ends. Programs have to be added before.

    Notes
    -----
    **Formal guarantees.** What :meth:`compute` returns or raises depends on the program, the parameters and one record.
    A record that fails, or ends the process, raises InvalidRecordError, whatever happened. A process that cannot be
    started again is tried again for as long as it takes, since giving up would make the next records count as zero as
    well. So an earlier record shows in time alone, which no guarantee covers. Assumes that the programs are pure
    (:class:`.replay.TorchProgram`).
    Proof: docs/proofs/records.md.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._programs: dict[str, Program] = {}
        self._together: dict[str, int] = {}
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._points: dict[int, list[NDArray[Any]]] = {}
        self._has_started = False
        self._has_seen = False  # whether the process that runs may have seen a record

    def add(self, program: Program, together: int = 1) -> None:
        """Add a program, which must not depend on records, and how many records are computed together."""
        with self._lock:
            if program.digest in self._programs:
                return
            self._programs[program.digest] = program
            self._together[program.digest] = together
            if self._running is not None:
                self._close()  # the next one starts with all of them

    def check(self) -> None:
        """Start the process unless it runs; raise ConfigurationError if it cannot be started or refuses a program."""
        with self._lock:
            if self._running is None:
                self._start()

    @property
    def pid(self) -> int | None:
        """Number of the process; None if none runs."""
        with self._lock:
            return None if self._running is None else self._running.pid

    def compute(
        self, program: Program, parameters: Sequence[NDArray[Any]], record: Sequence[NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """Return what a program that was added computes for one record.

        Raises
        ------
        InvalidRecordError
            If it cannot be computed, for whatever reason.
        """
        with self._lock:
            self._ensure_running()
            try:
                header, results = self._answer(program, parameters, record)
            except (OSError, EOFError, ValueError) as error:
                self._close()
                logger.warning(
                    "The process that computes gradients has ended; the record counts as zero.", extra=OF_DATA
                )
                raise InvalidRecordError("a record that ended the process") from error
            except BaseException:  # half a message may be on its way, which would be another record's
                self._close()
                raise
        if header.get("ok") is not True:
            raise InvalidRecordError("a record for which the model cannot be computed")
        if [(array.shape, array.dtype.name) for array in results] != list(program.results):
            raise InvalidRecordError("a record with results of another shape")
        return results

    def _answer(
        self, program: Program, parameters: Sequence[NDArray[Any]], record: Sequence[NDArray[Any]]
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Return the answer to a request for one record.

        A project's own function could write more than its reply to the pipe, which would be read as the answer for the
        next record. An answer that does not have the request's own ticket, which no earlier record could know, is asked
        for once more, of a new process.
        """
        has_seen, self._has_seen = self._has_seen and program.kind == "function", True
        try:
            return self._asked_once(program, parameters, record)
        except (OSError, EOFError, ValueError, MemoryError):
            if not has_seen:
                raise
        self._close()
        self._ensure_running()
        self._has_seen = True
        return self._asked_once(program, parameters, record)

    def _asked_once(
        self, program: Program, parameters: Sequence[NDArray[Any]], record: Sequence[NDArray[Any]]
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        slot, ticket = self._sent_point(parameters), secrets.token_hex(16)
        self._send({"do": "compute", "name": program.digest, "slot": slot, "ticket": ticket}, record)
        header, results = self._received()
        if header.get("ticket") != ticket:
            raise ValueError("an answer to another request")
        return header, results

    def sum_of_batch(
        self,
        program: Program,
        parameters: Sequence[NDArray[Any]],
        records: Sequence[NDArray[Any]],
        scales_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """Return the sum of the gradients of a batch of records, each times the scale that follows from its norm.

        ``records`` are the stacked arrays of records, for a program with factors (:class:`.replay.SummedBatch`).

        Raises
        ------
        InvalidRecordError
            If it cannot be computed, for whatever reason.
        """
        with self._lock:
            self._ensure_running()
            try:
                slot = self._sent_point(parameters)
                norms = self._asked({"do": "norms", "name": program.digest, "slot": slot}, records)
                count, width = len(records[0]), sum(math.prod(shape) for shape, _ in program.results)
                scales = scales_of(_checked(norms, count))
                return _checked(self._asked({"do": "sum"}, [scales]), width)
            except (OSError, EOFError, ValueError) as error:
                self._close()
                logger.warning("The process that computes gradients has ended.", extra=OF_DATA)
                raise InvalidRecordError("a batch that ended the process") from error
            except InvalidRecordError:
                raise
            except BaseException:  # an answer may be on its way, which would be that of another batch
                self._close()
                raise

    def _asked(self, header: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self._send(header, arrays)
        answer, made = self._received()
        if answer.get("ok") is not True:
            raise InvalidRecordError("a batch for which the model cannot be computed")
        return made

    def close(self) -> None:
        """End the process; it is started again when something is to be computed."""
        with self._lock:
            self._close()

    @property
    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._owner != os.getpid():  # a fork: the process is the parent's
            self._owner, self._process = os.getpid(), None
        return self._process

    def _ensure_running(self) -> None:
        pause = 0.1
        while self._running is None:
            try:
                self._start()
            except ConfigurationError:
                if not self._has_started:
                    raise
                logger.warning(
                    "The process that computes gradients could not be started again; waiting.", extra=OF_DATA
                )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _start(self) -> None:
        command = [sys.executable, "-I", "-B", str(Path(replay.__file__)), str(os.getpid()), str(self._threads)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd=Path.cwd().anchor,
                start_new_session=True,  # Ctrl-C is for the client, which then ends it
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        weakref.finalize(self, _end_own, self._process, os.getpid())
        self._points, self._has_seen = {}, False
        try:
            for number, program in enumerate(self._programs.values()):
                self._load(program, first=number == 0)
        except BaseException:
            self._close()
            raise
        self._has_started = True

    def _load(self, program: Program, *, first: bool) -> None:
        own = sum(array.nbytes for array in program.constants.values())
        memory = None
        if program.memory is not None:
            memory = 2 * (self._together[program.digest] * program.memory + own) + first * (
                _WORKSPACE + self._threads * _OF_A_THREAD
            )
            memory += (_KEPT_POINTS + 1) * program.memory
        header = {"do": "load", "name": program.digest, "kind": program.kind, "program": program.content}
        header |= {"names": list(program.constants), "memory": memory}
        try:
            self._send(header, list(program.constants.values()))
            answer, _ = self._received()
        except (OSError, EOFError, ValueError) as error:
            raise _not_started("it ended at once") from error
        if answer.get("ok") is not True:
            raise _not_started(str(answer.get("why")))

    def _sent_point(self, parameters: Sequence[NDArray[Any]]) -> int:
        """Return the slot at which the process has parameters; sent unless it has them, bit for bit."""
        for slot, known in self._points.items():
            if all(map(_is_same, known, parameters)):
                self._points[slot] = self._points.pop(slot)  # used last
                return slot
        taken = self._points.keys()
        slot = (
            next(iter(taken)) if len(taken) >= _KEPT_POINTS else next(i for i in range(_KEPT_POINTS) if i not in taken)
        )
        self._points.pop(slot, None)
        sent = [np.array(values) for values in parameters]
        self._send({"do": "point", "slot": slot}, sent)
        self._points[slot] = sent
        return slot

    def _send(self, header: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise EOFError
        replay.write_message(process.stdin, header, arrays)  # type: ignore[arg-type]

    def _received(self) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        process = self._process
        if process is None or process.stdout is None:
            raise EOFError
        return replay.read_message(process.stdout)  # type: ignore[arg-type]

    def _close(self) -> None:
        process, self._process, self._points = self._running, None, {}
        if process is not None:
            _end(process)


def _is_same(known: NDArray[Any], given: NDArray[Any]) -> bool:
    """Return True if two arrays have the same type, shape and bits."""
    given = np.asarray(given)
    if known.dtype != given.dtype or known.shape != given.shape:
        return False
    return np.array_equal(_bits(known), _bits(given))


def _bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checked(made: Sequence[NDArray[Any]], size: int) -> NDArray[np.float64]:
    if [(one.shape, one.dtype.name) for one in made] != [((size,), "float64")]:
        raise InvalidRecordError("a batch with results of another shape")
    return made[0]


def _not_started(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a process of its own for the model ({sys.executable} -I), in which no code of the project runs, "
        f"got: {why}. Check that this interpreter starts, and that memory is left.",
        kind="failed",
    )


def _end_own(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, unless this one is a fork of its parent."""
    if os.getpid() == owner:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                continue  # what was in the pipe is lost with the process
    process.wait()
