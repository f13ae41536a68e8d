"""The ledger on Flower's ``context.state``: for simulation.

``context.state`` is kept in memory. It survives rounds, but neither a restart of the node nor a new run. That is enough
for a simulated machine. A real machine needs more, so a real node must not use this ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from ..privacy import Account, Ledger, LedgerError, LedgerPage, StreamRecord, protocol
from ..privacy.arrays import read_array
from .reply_records import array_record, record_like

LEDGER_RECORDS = "murmurfl/"
"""How the names of a ledger's records in ``context.state`` begin."""

_FORMAT = 6
# Flower handles the messages of a machine one at a time; the lock is for an engine that does not.
_LOCK = threading.RLock()


class ContextLedger(Ledger):
    """One machine's ledger in a ``RecordDict``.

    Parameters
    ----------
    state : RecordDict
        ``context.state`` of the node.
    machine : str
        The machine's name: several simulated machines may share a node.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.privacy.Ledger` for as long as the state object lives and one
    message of a node is handled at a time; nothing survives the process.
    """

    def __init__(self, state: RecordDict, machine: str) -> None:
        self.state = state
        self._prefix = f"{LEDGER_RECORDS}{machine}"

    @contextmanager
    def exclusive(self) -> Iterator[LedgerPage]:
        with _LOCK:
            yield _ContextPage(self.state, self._prefix)

    def keep_as_sent(self, session: str, reply: RecordDict) -> None:
        """Remember a session's newest release in the very bytes of its reply, which is about to leave.

        A worker process gives both back together, and what stands twice in them is written once. What the ledger says
        is the same before and after; a reply that does not say the release to the last bit (under masks, say) is left
        alone.

        Parameters
        ----------
        session : str
        reply : RecordDict
            The reply's content.

        Notes
        -----
        **Formal guarantees.** Releases and spends nothing: the ledger holds what it held.
        """
        arrays = reply.get(protocol.ARRAYS, None)
        with _LOCK:
            if isinstance(arrays, ArrayRecord):
                _ContextPage(self.state, self._prefix).keep_as_sent(session, list(arrays.values()))


class _ContextPage(LedgerPage):
    def __init__(self, state: RecordDict, prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def account(self) -> Account:
        record = self._config(f"{self._prefix}/account")
        if record is None:
            return Account()
        try:
            entries: dict[str, Any] = dict(record)
            if entries["format"] != _FORMAT:
                raise LedgerError(f"Expected a ledger of format {_FORMAT}, got {entries['format']!r}.")
            reserved = dict(zip(entries["sessions"], entries["reserved"], strict=True))
            local = dict(zip(entries["sessions-local"], entries["reserved-local"], strict=True))
            return Account(int(entries["samples-used"]), reserved, reserved_local=local)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                "Expected a readable account in context.state, got a damaged one; start a new run."
            ) from error

    def stream(self, session: str) -> StreamRecord | None:
        record = self._config(f"{self._prefix}/stream/{session}")
        if record is None:
            return None
        try:
            entries: dict[str, Any] = dict(record)
            arrays = {name: _read(array) for name, array in self._state[f"{self._prefix}/arrays/{session}"].items()}
            pending = {int(j): _pending(j, arrays, entries) for j in entries["pending"]}
            if any(counts.dtype != np.int64 for counts in pending.values()):
                raise ValueError("pending sums are not int64")
            return StreamRecord(
                fingerprint=str(entries["fingerprint"]),
                release=int(entries["release"]),
                ack=int(entries["ack"]),
                nonces=bytes(entries["nonces"]),
                pending=pending,
                noise_state=tuple(arrays[f"state-{i}"] for i in range(int(entries["num-state"]))),
                noted=tuple(arrays[f"noted-{i}"] for i in range(int(entries["num-noted"]))),
                ids=dict(zip(map(int, entries["named"]), entries["ids"], strict=True)),
                order=bytes(entries["order"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                "Expected a readable stream in context.state, got a damaged one; start a new run."
            ) from error

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        entries: dict[str, Any] = {
            "fingerprint": stream.fingerprint,
            "release": stream.release,
            "ack": stream.ack,
            "nonces": stream.nonces,
            "pending": list(stream.pending),
            "num-state": len(stream.noise_state),
            "num-noted": len(stream.noted),
            "named": list(stream.ids),
            "ids": list(stream.ids.values()),
            "order": stream.order,
            "num-sent": 0,
            "spacing": 1.0,
        }
        arrays = {f"pending-{j}": counts for j, counts in stream.pending.items()}
        arrays |= {f"state-{i}": values for i, values in enumerate(stream.noise_state)}
        arrays |= {f"noted-{i}": values for i, values in enumerate(stream.noted)}
        spent: dict[str, Any] = {
            "format": _FORMAT,
            "samples-used": account.samples_used,
            "sessions": list(account.reserved),
            "reserved": [float(mu) for mu in account.reserved.values()],
            "sessions-local": list(account.reserved_local),
            "reserved-local": [float(mu) for mu in account.reserved_local.values()],
        }
        account_record = self._changed(f"{self._prefix}/account", spent)
        stream_record = self._changed(f"{self._prefix}/stream/{session}", entries)
        written = array_record(list(arrays), list(arrays.values()))
        # The account first: if this is interrupted, samples may be lost but are never used again.
        self._state[f"{self._prefix}/account"] = account_record
        self._state[f"{self._prefix}/arrays/{session}"] = written
        self._state[f"{self._prefix}/stream/{session}"] = stream_record

    def keep_as_sent(self, session: str, sent: list[Array]) -> None:
        key = f"{self._prefix}/arrays/{session}"
        record, held = self._config(f"{self._prefix}/stream/{session}"), self._state.get(key, None)
        name = "" if record is None else f"pending-{record.get('release')}"
        if record is None or not isinstance(held, ArrayRecord) or name not in held:
            return
        held = held.copy()
        counts = _read(held.pop(name))
        spacing = _spacing(counts, [_read(array).ravel() for array in sent])
        if spacing is None:
            return
        # With bytes of one object and an Array of one's own: nobody else's changes show here.
        for i, array in enumerate(sent):
            held[f"{name}-sent-{i}"] = Array(array.dtype, array.shape, array.stype, array.data)
        # One record after the other: between the two the ledger says the same.
        record["spacing"], record["num-sent"] = spacing, len(sent)
        self._state[key] = held

    def _changed(self, key: str, entries: dict[str, Any]) -> ConfigRecord:
        """A record of the ledger with other entries, of which most are the old ones."""
        before = self._state.get(key, None)
        if isinstance(before, ConfigRecord) and before.keys() == entries.keys():
            return record_like(before, entries)
        return ConfigRecord(entries)

    def _config(self, key: str) -> ConfigRecord | None:
        record = self._state.get(key, None)
        if record is not None and not isinstance(record, ConfigRecord):
            raise LedgerError(
                f"Expected a ConfigRecord at {key!r} in context.state, got {type(record).__name__}: the ledger is "
                "damaged; start a new run."
            )
        return record


def _read(array: Any) -> NDArray[Any]:
    return read_array(array.dtype, array.shape, array.data)


def _pending(release: int, arrays: Mapping[str, NDArray[Any]], entries: Mapping[str, Any]) -> NDArray[np.int64]:
    """The counts of a pending release, kept as they are or as they were sent."""
    name = f"pending-{release}"
    if name in arrays:
        return arrays[name]
    parts = [arrays[f"{name}-sent-{i}"].ravel() for i in range(int(entries["num-sent"]))]
    return (np.concatenate(parts) / entries["spacing"]).astype(np.int64)


def _spacing(counts: NDArray[np.int64], sent: Sequence[NDArray[Any]]) -> float | None:
    """What sent values must be divided by to give the counts back, every one; None if nothing does."""
    if any(values.dtype != np.float64 for values in sent) or sum(values.size for values in sent) != counts.size:
        return None
    values = np.concatenate(sent)
    first = int(np.argmax(counts != 0))
    if not counts[first] or not values[first]:
        return None
    spacing = float(values[first]) / float(counts[first])
    return spacing if np.array_equal(values / spacing, counts) else None
