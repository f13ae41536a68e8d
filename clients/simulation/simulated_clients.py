"""Clients and helpers of a simulation: their ledgers, keys and records, in Flower's ``context.state``.

``context.state`` is kept in memory. It survives rounds, but neither a restart of the node nor a new run. That is enough
for a simulated client or helper. A real one needs more, so a real node is refused all that is here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NoReturn, TypedDict

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.accounting.loss import SumAssumption
from ...privacy.errors import ANOTHER_FORMAT, ConfigurationError, LedgerError
from ...privacy.ledger.ledger_records import Account, Ledger, LedgerTransaction, StreamRecord
from ...privacy.noise import SimulatedKeys
from ...privacy.protocol import read_array
from ...privacy.sums.masking import Masking
from ...privacy.sums.opening_rule import (
    LastOpened,
    MemoryOpeningRecord,
    OpenedSession,
    OpenedSet,
    Opener,
    OpeningRecordError,
    OpeningTransaction,
    SessionTerms,
)
from ...privacy.sums.roster import ClientKey, HelperEntry, HelperKey, Roster
from ..messages import answer, array_record, in_simulation, own_array, plain_record
from ..sums_helper import answer_helper

LEDGER_RECORDS = "murmurfl/"
"""Prefix of the names of a ledger's records in ``context.state``."""

_FORMAT = 6

# Flower handles the messages of a client one at a time; the lock is for an engine that does not.
_LOCK = threading.RLock()


class ContextLedger(Ledger, LedgerTransaction):
    """One client's ledger in the ``context.state`` of its node, which several simulated clients may share.

    Notes
    -----
    **Formal guarantees.** Transactions exclude each other, and what was committed is what is read next, for as long as
    the state object lives and one message of a node is handled at a time; nothing survives the process.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from murmurfl.privacy import PrivacyPolicy, Privatizer, SimulatedKeys
    >>> state = RecordDict()  # of a node: ``context.state``
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> privatizer = Privatizer(policy, 3, 100, ContextLedger(state, "3"), SimulatedKeys(1, "3"))
    >>> release = privatizer.release("session", 0, lambda samples: [[0.0, 0.0, 0.0]] * 2)
    >>> with ContextLedger(state, "3").exclusive() as transaction:
    ...     transaction.account().samples_used
    2
    """

    def __init__(self, state: RecordDict, client: str) -> None:
        self._state = state
        self._prefix = f"{LEDGER_RECORDS}{client}"

    @contextmanager
    def exclusive(self) -> Iterator[LedgerTransaction]:
        with _LOCK:
            yield self

    def account(self) -> Account:
        record = self._config(f"{self._prefix}/account")
        if record is None:
            return Account()
        try:
            if record["format"] != _FORMAT:
                raise LedgerError(
                    f"Expected a ledger of format {_FORMAT} in context.state, got one of format {record['format']!r}; "
                    f"nothing was released. {ANOTHER_FORMAT}",
                    kind="other-format",
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

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        self._write(session, stream, account)

    def _write(self, session: str, stream: StreamRecord, account: Account, sent: Sequence[Array] = ()) -> None:
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


class TravellingLedger(ContextLedger):
    """One client's ledger in a worker process, which is given the node's state with a message and gives it back.

    Notes
    -----
    **Formal guarantees.** What was committed is what is read next, in whichever worker, provided :meth:`arrive` is
    called with each message's state and :meth:`leave` before its reply is handed back. State and reply leave the worker
    in one piece: neither is there without the other.
    """

    def __init__(self, client: str) -> None:
        super().__init__(RecordDict(), client)
        self.arrive(self._state)

    def arrive(self, state: RecordDict) -> None:
        """Take the state that came with a message: another worker may have had the one before."""
        self._state = state
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
                self._write(session, stream, self.account(), sent)
        self._unwritten = []

    def account(self) -> Account:
        if self._account is None:
            self._account = super().account()
        return self._account

    def stream(self, session: str) -> StreamRecord | None:
        if session not in self._streams:
            self._streams[session] = super().stream(session)
        return self._streams[session]

    def commit(self, session: str, stream: StreamRecord, account: Account) -> None:
        self._streams[session], self._account = stream, account
        if session not in self._unwritten:
            self._unwritten.append(session)


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
    """Return the number by which all sent values must be divided to give the counts back; None if there is none."""
    if any(values.dtype != np.float64 for values in sent) or sum(values.size for values in sent) != counts.size:
        return None
    values = np.concatenate([part.ravel() for part in sent])
    first = int(np.argmax(counts != 0))
    if not counts[first] or not values[first]:
        return None
    spacing = float(values[first]) / float(counts[first])
    values /= spacing
    return spacing if np.array_equal(values, counts) else None


class ContextOpeningRecord(MemoryOpeningRecord):
    """A simulated helper's record in the ``context.state`` of its node, which several helpers may share.

    Notes
    -----
    **Formal guarantees.** What was committed is what is read next for as long as the state object lives and one message
    of a node is handled at a time; nothing survives the process.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from murmurfl.privacy import HelperKey, Opener, Roster
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> record = ContextOpeningRecord(RecordDict(), "left")
    >>> opener = Opener("left", HelperKey.simulated(1, "left"), roster, record)
    >>> opener.durable
    False
    """

    def __init__(self, state: RecordDict, helper: str) -> None:
        super().__init__()
        self._lock = _LOCK
        self._state = state
        self._name = helper
        self._prefix = f"{LEDGER_RECORDS}{helper}/opened/"

    def check_helper(self, helper: HelperEntry) -> None:
        if helper.name != self._name:
            raise OpeningRecordError(
                f"Expected the record of helper {helper.name!r}, got that of {self._name!r}.", kind="mismatch"
            )

    @contextmanager
    def exclusive(self) -> Iterator[OpeningTransaction]:
        with super().exclusive() as transaction:
            self.sessions = {}  # another record may have written to the state
            yield transaction

    def times(self, sessions: int, sets: int) -> tuple[float, float]:
        return OpeningTransaction.times(self, sessions, sets)  # the state has none

    def commit(self, opened: OpenedSet) -> None:
        super().commit(opened)
        known = self.session(opened.session)
        self._state[self._prefix + opened.session] = ConfigRecord(
            {
                "terms": json.dumps(known.terms and known.terms.to_values()),
                "lock": known.lock.to_bytes() if known.lock else b"",
                "voids": [one.to_bytes() for one in known.voids],
                "openings": list(known.sets),
                "digests": list(known.sets.values()),
                "clients": list(known.last),
                "releases": [one.release for one in known.last.values()],
                "ids": [one.release_id for one in known.last.values()],
            }
        )

    def session(self, session: str) -> OpenedSession:
        if session not in self.sessions:
            record = self._state.get(self._prefix + session, None)
            self.sessions[session] = OpenedSession() if record is None else _opened_session(record)
        return self.sessions[session]


def _opened_session(record: Any) -> OpenedSession:
    """Read what a helper's record in ``context.state`` has of a session."""
    try:
        if not isinstance(record, ConfigRecord):
            raise TypeError
        entries: dict[str, Any] = dict(record)
        terms = json.loads(entries["terms"])
        rows = zip(entries["clients"], entries["releases"], entries["ids"], strict=True)
        return OpenedSession(
            terms=terms and SessionTerms.from_values(terms),
            lock=OpenedSet.from_bytes(entries["lock"]) if entries["lock"] else None,
            sets=dict(zip(entries["openings"], entries["digests"], strict=True)),
            voids=[OpenedSet.from_bytes(line) for line in entries["voids"]],
            last={name: LastOpened(release, release_id) for name, release, release_id in rows},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OpeningRecordError(
            "Expected a readable opening record in context.state, got a damaged one; start a new run."
        ) from error


def answer_simulated_helper(message: Message, state: RecordDict, *, name: str, seed: int, roster: Roster) -> Message:
    """Return a simulated helper's reply to a message.

    Its keys follow from the run's seed, its record is in ``context.state``.

    It opens what a real helper would and nothing else. It hides nothing from anybody who knows the seed, and its record
    ends with the run: that is why a real node is refused.
    """
    if not in_simulation():
        raise ConfigurationError(
            "Expected a simulation, got a real node: a helper there is `murmurfl helper CONFIG`.", kind="unsupported"
        )
    opener = Opener(name, HelperKey.simulated(seed, name), roster, ContextOpeningRecord(state, name))
    return answer_helper(opener, message)


class SimulatedSums:
    """A simulation's roster, and its helpers: the last nodes of all. Whoever knows the run's seed knows every key."""

    def __init__(self, helpers: int, seed: int) -> None:
        if isinstance(helpers, bool) or not isinstance(helpers, int) or helpers < 1:
            raise ConfigurationError(
                f"Expected helpers to be an integer >= 1, got {helpers!r}.",
                kind="out-of-range",
                setting="helpers",
                got=helpers,
            )
        self._helpers = helpers
        self._seed = seed

    def answer(self, message: Message, context: Context, as_client: Callable[[Context], Message]) -> Message:
        """Return a node's answer: a helper's own, or ``as_client``'s, with a context that knows of clients only."""
        try:
            node, clients = self._place(context)
        except ConfigurationError as error:
            return answer(message, partial(_fail, error))
        if node >= clients:
            roster = _roster(self._seed, clients, self._helpers)
            name = roster.helper_names[node - clients]
            return answer_simulated_helper(message, context.state, name=name, seed=self._seed, roster=roster)
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**context.node_config, "num-partitions": clients},
            state=context.state,
            run_config=context.run_config,
        )
        return as_client(own)

    def masking(self, context: Context, sums: SumAssumption) -> Masking:
        """Return the masks of the simulated client that a message is for, from the context that :meth:`answer` made."""
        name, clients = str(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        if clients < sums.min_cohort:
            raise ConfigurationError(
                f"Expected a simulation of at least min_cohort = {sums.min_cohort} clients, got {clients}: its "
                f"{clients + self._helpers} nodes less {self._helpers} helpers, the last ones. Start it with a node "
                "for each client and each helper.",
                kind="out-of-range",
                setting="clients",
                got=clients,
            )
        return Masking(name, ClientKey.simulated(self._seed, name), _roster(self._seed, clients, self._helpers))

    def _place(self, context: Context) -> tuple[int, int]:
        """Return the number of this node, and how many nodes are clients."""
        node, nodes = (context.node_config.get(key) for key in ("partition-id", "num-partitions"))
        if not isinstance(node, int) or not isinstance(nodes, int) or nodes <= self._helpers:
            raise ConfigurationError(
                f"Expected nodes with a partition-id, more of them than the {self._helpers} helpers, got partition-id "
                f"{node!r} of num-partitions {nodes!r}: start the simulation with a node for each client and helper.",
                kind="out-of-range",
            )
        return node, nodes - self._helpers


def _fail(error: Exception) -> NoReturn:
    raise error


@lru_cache(maxsize=8)
def _roster(seed: int, clients: int, helpers: int) -> Roster:
    names = tuple(f"helper-{number}" for number in range(helpers))
    return Roster.simulated(seed, tuple(map(str, range(clients))), names)


class SimulatedClient(TypedDict):
    """Constructor options of a simulated client."""

    name: str
    ledger: ContextLedger
    keys: SimulatedKeys


def simulated_client(context: Context, *, seed: int = 0) -> SimulatedClient:
    """Name, ledger and keys of the simulated client a message is for, to be handed to a client as ``**``.

    The keys follow from the run's seed, and the ledger ends with the run. That is why a real node is refused them.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.clients import NoisySGDClient, numpy_client_app
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import NoisySGD, ResultFolder
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> def client_fn(context):
    ...     return NoisySGDClient(Mean(), np.ones((20, 1)), policy, **simulated_client(context, seed=1))
    >>> grid = InProcessGrid(numpy_client_app(client_fn), 4, {})
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=4, callbacks=[ResultFolder(None)])
    >>> result = strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=1)
    >>> strategy.history[0].aggregated
    4
    """
    if not in_simulation():
        raise ConfigurationError(
            "Expected a simulation, got a real node: there a client is made with a ledger and keys of its own, "
            "ledger = SQLiteLedger(path) and ledger.keys(), or with `murmurfl node`.",
            kind="unsupported",
            setting="context",
        )
    name = str(context.node_config.get("partition-id", context.node_id))
    return SimulatedClient(name=name, ledger=ContextLedger(context.state, name), keys=SimulatedKeys(seed, name))
