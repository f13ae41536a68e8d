"""The ledger on Flower's ``context.state``: for simulation.

``context.state`` is kept in memory. It survives rounds, but neither a restart of the node nor a new run. That is enough
for a simulated machine. A real machine needs more, so a real node must not use this ledger.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from ...privacy import Account, Ledger, LedgerError, LedgerPage, StreamRecord, protocol
from ...privacy.errors import ANOTHER_FORMAT
from ...privacy.machine.clipping import TrainingFigures, observer_around
from ...privacy.protocol import read_array
from ..messages.answers import array_record, own_array, plain_record

LEDGER_RECORDS = "murmurfl/"
"""How the names of a ledger's records in ``context.state`` begin."""

_FORMAT = 6
# Flower handles the messages of a machine one at a time; the lock is for an engine that does not.
_LOCK = threading.RLock()


class ContextLedger(Ledger):
    """One machine's ledger in the ``context.state`` of its node, which several simulated machines may share.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, for as long as
    the state object lives and one message of a node is handled at a time; nothing survives the process.
    """

    def __init__(self, state: RecordDict, machine: str) -> None:
        self._page = _ContextPage(state, f"{LEDGER_RECORDS}{machine}")

    @contextmanager
    def exclusive(self) -> Iterator[LedgerPage]:
        with _LOCK:
            yield self._page


class TravellingLedger(Ledger, LedgerPage):
    """One machine's ledger in a worker process, which is given the node's state with a message and gives it back.

    Notes
    -----
    **Formal guarantees.** What was committed is what is read next, in whichever worker, provided :meth:`arrive` is
    called with each message's state and :meth:`leave` before its reply is handed back. State and reply leave the worker
    in one piece: neither is there without the other.
    """

    def __init__(self, machine: str) -> None:
        self._prefix = f"{LEDGER_RECORDS}{machine}"
        self.arrive(RecordDict())

    def arrive(self, state: RecordDict) -> None:
        """Take the state that came with a message: another worker may have had the one before."""
        self._page = _ContextPage(state, self._prefix)
        self._account: Account | None = None
        self._streams: dict[str, StreamRecord | None] = {}
        self._unwritten: list[str] = []

    def leave(self, reply: RecordDict | None) -> None:
        """Write what was recorded into the state, before it goes back with a reply.

        A release that the reply says to the last bit is written as the very bytes of the reply, and so travels once.
        """
        arrays = None if reply is None else reply.get(protocol.ARRAYS, None)
        sent = list(arrays.values()) if isinstance(arrays, ArrayRecord) else []
        for session in self._unwritten:
            stream = self._streams[session]
            if stream is not None:
                self._page.commit(session, stream, self.account(), sent)
        self._unwritten = []

    def exclusive(self) -> AbstractContextManager[LedgerPage]:
        return self

    def __enter__(self) -> LedgerPage:
        _LOCK.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        _LOCK.release()

    def account(self) -> Account:
        if self._account is None:
            self._account = self._page.account()
        return self._account

    def stream(self, session: str) -> StreamRecord | None:
        if session not in self._streams:
            self._streams[session] = self._page.stream(session)
        return self._streams[session]

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        self._streams[session], self._account = stream, account
        if session not in self._unwritten:
            self._unwritten.append(session)


class _ContextPage(LedgerPage):
    def __init__(self, state: RecordDict, prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def account(self) -> Account:
        record = self._config(f"{self._prefix}/account")
        if record is None:
            return Account()
        try:
            if record["format"] != _FORMAT:
                raise LedgerError(
                    f"Expected a ledger of format {_FORMAT} in context.state, got one of format {record['format']!r}; "
                    f"nothing was released. {ANOTHER_FORMAT}"
                )
            return Account(**json.loads(str(record["account"])))
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                "Expected a readable account in context.state, got a damaged one; start a new run."
            ) from error

    def stream(self, session: str) -> StreamRecord | None:
        record = self._config(f"{self._prefix}/stream/{session}")
        if record is None:
            return None
        try:
            entries = json.loads(str(record["stream"]))
            arrays: Mapping[str, Any] = self._state[f"{self._prefix}/arrays/{session}"]
            return StreamRecord(
                fingerprint=str(entries["fingerprint"]),
                release=int(entries["release"]),
                ack=int(entries["ack"]),
                nonces=bytes(record["nonces"]),  # type: ignore[arg-type]
                pending=_Pending(entries, arrays),
                noise_state=tuple(_read(arrays[f"state-{i}"]) for i in range(entries["num-state"])),
                noted=tuple(_read(arrays[f"noted-{i}"]) for i in range(entries["num-noted"])),
                ids={int(j): bytes.fromhex(name) for j, name in entries["ids"].items()},
                order=bytes.fromhex(entries["order"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                "Expected a readable stream in context.state, got a damaged one; start a new run."
            ) from error

    def commit(self, session: str, stream: StreamRecord, account: Account, sent: Sequence[Array] = ()) -> None:
        """Record stream and account; a newest release that ``sent`` says to the last bit is kept in its bytes."""
        newest = stream.pending.get(stream.release) if sent else None
        spacing = None if newest is None else _spacing(newest, [_read(array) for array in sent])
        kept_as_sent = None if spacing is None else stream.release
        arrays = {f"pending-{j}": counts for j, counts in stream.pending.items() if j != kept_as_sent}
        arrays |= {f"state-{i}": values for i, values in enumerate(stream.noise_state)}
        arrays |= {f"noted-{i}": values for i, values in enumerate(stream.noted)}
        written = array_record(list(arrays), list(arrays.values()))
        if kept_as_sent is not None:
            for i, array in enumerate(sent):
                written[f"sent-{i}"] = own_array(array)
        spent = {
            "samples_used": int(account.samples_used),
            "reserved": dict(account.reserved),
            "reserved_local": dict(account.reserved_local),
        }
        entries = {
            "fingerprint": stream.fingerprint,
            "release": int(stream.release),
            "ack": int(stream.ack),
            "pending": [int(j) for j in stream.pending],
            "as-sent": kept_as_sent,
            "num-sent": len(sent),
            "spacing": spacing,
            "num-state": len(stream.noise_state),
            "num-noted": len(stream.noted),
            "ids": {j: name.hex() for j, name in stream.ids.items()},
            "order": stream.order.hex(),
        }
        # The account first: if this is interrupted, samples may be lost but are never used again.
        self._state[f"{self._prefix}/account"] = plain_record({"format": _FORMAT, "account": json.dumps(spent)})
        self._state[f"{self._prefix}/arrays/{session}"] = written
        record = plain_record({"stream": json.dumps(entries), "nonces": bytes(stream.nonces)})
        self._state[f"{self._prefix}/stream/{session}"] = record

    def _config(self, key: str) -> ConfigRecord | None:
        record = self._state.get(key, None)
        if record is not None and not isinstance(record, ConfigRecord):
            raise LedgerError(
                f"Expected a ConfigRecord at {key!r} in context.state, got {type(record).__name__}: the ledger is "
                "damaged; start a new run."
            )
        return record


class _Pending(Mapping[int, NDArray[np.int64]]):
    """Releases that are not acknowledged, read when they are needed: mostly they are acknowledged first."""

    def __init__(self, entries: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self._spacing = entries["spacing"]
        self._found: dict[int, list[Any]] = {}
        for j in map(int, entries["pending"]):
            as_sent = j == entries["as-sent"]
            names = [f"sent-{i}" for i in range(entries["num-sent"])] if as_sent else [f"pending-{j}"]
            self._found[j] = [arrays[name] for name in names]
            if any(array.dtype != ("float64" if as_sent else "int64") for array in self._found[j]):
                raise ValueError("pending sums are not int64")
        self._as_sent = entries["as-sent"]

    def __getitem__(self, release: int) -> NDArray[np.int64]:
        parts = [_read(array).ravel() for array in self._found[release]]
        if release != self._as_sent:
            return parts[0]
        values = np.concatenate(parts)
        values /= self._spacing
        return values.astype(np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _read(array: Any) -> NDArray[Any]:
    values = read_array(array.dtype, array.shape, array.data)
    if values.dtype != array.dtype:
        raise LedgerError("Expected arrays in context.state of the types they say, got a damaged one; start a new run.")
    return values


def _spacing(counts: NDArray[np.int64], sent: Sequence[NDArray[Any]]) -> float | None:
    """The number by which all sent values must be divided to give the counts back; None if there is none."""
    if any(values.dtype != np.float64 for values in sent) or sum(values.size for values in sent) != counts.size:
        return None
    values = np.concatenate([part.ravel() for part in sent])
    first = int(np.argmax(counts != 0))
    if not counts[first] or not values[first]:
        return None
    spacing = float(values[first]) / float(counts[first])
    values /= spacing
    return spacing if np.array_equal(values, counts) else None


_in_process: ContextVar[bool] = ContextVar("murmurfl_inprocess", default=False)
_kept: ContextVar[dict[str, Any] | None] = ContextVar("murmurfl_kept_by_node", default=None)


def simulated_in_process(kept: dict[str, Any] | None = None) -> AbstractContextManager[None]:
    """Mark what runs inside as a message of a simulation in this process, with what its node keeps; for engines."""
    return _InProcess(kept)


class _InProcess(AbstractContextManager[None]):
    """A class and not a generator, because every message of a simulation comes here."""

    def __init__(self, kept: dict[str, Any] | None) -> None:
        self._memory = kept

    def __enter__(self) -> None:
        self._tokens = _in_process.set(True), _kept.set(self._memory)

    def __exit__(self, *error: object) -> None:
        in_process, kept = self._tokens
        _kept.reset(kept)
        _in_process.reset(in_process)


class _Worker(threading.local):
    """Memory of a simulation's worker process for its nodes; each thread has its own."""

    def __init__(self) -> None:
        self.run_id: int | None = None
        self.nodes: dict[int, dict[str, Any]] = {}


_MOST_NODES = 1024  # of which a worker keeps something; the first ones go first
_worker = _Worker()


def kept_by_node(context: Context) -> dict[str, Any] | None:
    """What a simulation's node keeps in this process between messages; None outside a simulation.

    No other node sees it, and it ends with the run. Another worker may have had the node's message before: only what
    does not change in a run may be kept, the rest is in the context's state, which travels (:func:`state_travels`).
    """
    if _in_process.get():
        return _kept.get()
    if not in_simulation():
        return None
    if _worker.run_id != context.run_id:
        _worker.run_id, _worker.nodes = context.run_id, {}
    kept = _worker.nodes.get(context.node_id)
    if kept is None:
        if len(_worker.nodes) >= _MOST_NODES:
            del _worker.nodes[next(iter(_worker.nodes))]
        kept = _worker.nodes[context.node_id] = {}
    return kept


def in_simulation() -> bool:
    """Whether this process is a simulation's worker: no message can make it look like one."""
    return _in_process.get() or _is_worker()


def _is_worker() -> bool:
    global _known_as_worker  # for good: Ray gives an actor a process of its own
    if not _known_as_worker:
        ray = sys.modules.get("ray")  # a worker of Ray's has imported it
        _known_as_worker = (
            ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None
        )
    return _known_as_worker


_known_as_worker = False


def state_travels() -> bool:
    """Whether a simulated machine's state goes back to where messages come from: not to an engine in this process."""
    return not _in_process.get()


def training_entries(name: str, figures: TrainingFigures | None) -> dict[str, int | float]:
    """Figures of clipping in a simulated machine's release, as entries of its reply.

    An engine in this process is told directly, so that replies are those of real machines. The figures are not private:
    outside a simulation there are no entries, and nobody is told.
    """
    if figures is None or not in_simulation():
        return {}
    if not _in_process.get():
        return figures.entries()
    observer = observer_around()
    if observer is not None:
        observer.machines[name] = figures
    return {}
