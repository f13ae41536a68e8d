"""A helper of secure aggregation as a Flower node: it says who it is, and opens sets of masked releases.

It is sent seeds, never vectors, and answers with one sum over a set (:class:`~murmurfl.privacy.Opener`). It trains
nothing and has no data.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...privacy import (
    ConfigurationError,
    HelperEntry,
    Opener,
    OpeningPage,
    OpeningRecord,
    OpeningRecordError,
    OpeningRefusedError,
    RefusedError,
    Sealed,
    protocol,
)
from ...privacy.sums.opening_rule import LastOpened, OpenedSet, SessionTerms, SignedOpening, check_forward
from ...privacy.sums.roster import HelperKey, Roster
from ..simulation.context_ledger import LEDGER_RECORDS, in_simulation
from .answers import answer
from .requests import check_version, malformed

logger = logging.getLogger(__name__)

TOTAL = "total"
"""The name of the sum in the reply's ArrayRecord."""

# Flower handles the messages of a node one at a time; the lock is for an engine that does not.
_LOCK = threading.RLock()


def answer_helper(opener: Opener, message: Message) -> Message:
    """A helper's reply to a message.

    To a hello it is the helper's name and its roster, to ``query.open`` the sum of its masks over the set, to
    everything else an error; for servers that know no queries, both may come in a train message. What leaves are the
    sums that :class:`~murmurfl.privacy.Opener` allows, and texts that are fixed: one for every set that is refused,
    whatever is wrong with it. Timing is not protected.
    """
    return answer(message, lambda: _content(opener, message))


def helper_app(opener: Opener) -> ClientApp:
    """The ``ClientApp`` of a real helper, whose record must be durable."""
    if not opener.durable:
        raise OpeningRecordError(
            "Expected a record that outlives this process (SQLiteOpeningRecord) for a real helper, got one in memory. "
            "Nothing was opened."
        )
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:  # noqa: ARG001 - what a helper knows is in its record
        return answer_helper(opener, message)

    for register in (app.query(), app.query(protocol.QUERY_OPEN.partition(".")[2]), app.train(), app.evaluate()):
        register(reply)
    return app


class ContextOpeningRecord(OpeningRecord):
    """A simulated helper's record in the ``context.state`` of its node, which several helpers may share.

    Notes
    -----
    **Formal guarantees.** What was committed is what is read next for as long as the state object lives and one message
    of a node is handled at a time; nothing survives the process.
    """

    def __init__(self, state: RecordDict, helper: str) -> None:
        self._state = state
        self._helper = helper
        self._prefix = f"{LEDGER_RECORDS}{helper}/opened/"

    def check_helper(self, helper: HelperEntry) -> None:
        if helper.name != self._helper:
            raise OpeningRecordError(f"Expected the record of helper {helper.name!r}, got that of {self._helper!r}.")

    @contextmanager
    def exclusive(self) -> Iterator[OpeningPage]:
        with _LOCK:
            yield _ContextPage(self._state, self._prefix)


class _ContextPage(OpeningPage):
    """One record a session: its terms, its sets, what is promised or void, and each machine's last opened release."""

    def __init__(self, state: RecordDict, prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def set_digest(self, session: str, opening: str) -> str | None:
        entries = self._entries(session)
        return dict(zip(entries["openings"], entries["digests"], strict=True)).get(opening)

    def voids(self, session: str, opening: str) -> frozenset[str]:
        found = (OpenedSet.from_bytes(line) for line in self._entries(session)["voids"])
        return frozenset(one.set_digest for one in found if one.opening == opening)

    def lock(self, session: str) -> OpenedSet | None:
        line = self._entries(session)["lock"]
        return OpenedSet.from_bytes(line) if line else None

    def terms(self, session: str) -> SessionTerms | None:
        values = json.loads(self._entries(session)["terms"])
        return values and SessionTerms.from_values(values)

    def last_opened(self, session: str, machines: Sequence[str]) -> dict[str, LastOpened]:
        last = self._last(self._entries(session))
        return {name: last[name] for name in machines if name in last}

    def commit(self, opened: OpenedSet) -> None:
        check_forward(self, opened)
        before, line = self._entries(opened.session), opened.to_bytes()
        last = self._last(before)
        last |= opened.moves(last)
        promise, name = opened.kind == protocol.VIEW_LOCKED, opened.kind == protocol.VIEW_OPENED
        self._state[self._prefix + opened.session] = ConfigRecord(
            {
                "terms": before["terms"] if promise else json.dumps(asdict(opened.terms)),
                "lock": line if promise else b"",
                "voids": [*before["voids"], *([line] if opened.kind == protocol.VIEW_VOID else [])],
                "openings": [*before["openings"], *([opened.opening] if name else [])],
                "digests": [*before["digests"], *([opened.set_digest] if name else [])],
                "machines": list(last),
                "releases": [one.release for one in last.values()],
                "ids": [one.release_id for one in last.values()],
            }
        )

    @staticmethod
    def _last(entries: dict[str, Any]) -> dict[str, LastOpened]:
        rows = zip(entries["machines"], entries["releases"], entries["ids"], strict=True)
        return {name: LastOpened(release, release_id) for name, release, release_id in rows}

    def _entries(self, session: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"terms": "null", "lock": b""}
        empty |= {key: [] for key in ("voids", "openings", "digests", "machines", "releases", "ids")}
        record = self._state.get(self._prefix + session, None)
        if record is None:
            return empty
        if not isinstance(record, ConfigRecord) or set(record) != set(empty):
            raise OpeningRecordError(
                "Expected a readable opening record in context.state, got a damaged one; start a new run."
            )
        return dict(record)


def _content(opener: Opener, message: Message) -> RecordDict:
    config = message.content.get(protocol.CONFIG, None)
    entries: dict[str, Any] = dict(config) if isinstance(config, ConfigRecord) else {}
    check_version(entries)
    if message.metadata.message_type == protocol.QUERY_OPEN or entries.get(protocol.ASK) == protocol.ASK_OPEN:
        return _opened(opener, entries)
    if entries.get(protocol.ASK) == protocol.ASK_HELLO:
        hello: dict[str, Any] = {
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.HELPERS: opener.name,
            protocol.ROSTER: json.dumps(opener.roster.document),
        }
        if protocol.NONCE in entries:
            hello[protocol.SIGNATURE] = opener.prove_name(entries[protocol.NONCE])
        return RecordDict({protocol.CONFIG: ConfigRecord(hello)})
    if entries.get(protocol.ASK) in protocol.ASKS_OF_SETS:
        return _viewed(opener, entries)
    raise malformed("a helper says who it is and opens sets of releases, and does nothing else")


def _viewed(opener: Opener, entries: dict[str, Any]) -> RecordDict:
    request, asked = _request(opener, entries), entries[protocol.ASK]
    with _usable_record():
        if asked == protocol.ASK_VOID:
            helper, total, signature = (
                entries.get(key) for key in (protocol.OPENED_BY, protocol.OPENED_TOTAL, protocol.OPENED_SIGNATURE)
            )
            if not (isinstance(helper, str) and isinstance(total, bytes) and isinstance(signature, bytes)):
                raise _refused("expected the opening of another helper")
            view = opener.void(*request, SignedOpening(helper, total, signature))
        else:
            view = opener.view(*request, lock=asked == protocol.ASK_LOCK)
    said = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.HELPER: view.helper,
        protocol.OPENING: view.opening,
        protocol.SET_DIGEST: view.set_digest,
        protocol.WOULD_OPEN: view.would_open,
        protocol.DISPUTED: list(view.disputed),
        protocol.SIGNATURE: view.signature,
    }
    return RecordDict({protocol.CONFIG: ConfigRecord(said)})


@contextmanager
def _usable_record() -> Iterator[None]:
    try:
        yield
    except OpeningRecordError as error:
        logger.exception("This helper's opening record cannot be used; nothing was opened.")
        raise RefusedError(protocol.LEDGER_UNUSABLE, "this helper's opening record cannot be used") from error


def _opened(opener: Opener, entries: dict[str, Any]) -> RecordDict:
    with _usable_record():
        opened = opener.open(*_request(opener, entries))
    said = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.HELPER: opened.helper,
        protocol.OPENING: opened.opening,
        protocol.SET_DIGEST: opened.set_digest,
        protocol.SIGNATURE: opened.signature,
    }
    arrays = ArrayRecord({TOTAL: Array(opened.total)})
    return RecordDict({protocol.ARRAYS: arrays, protocol.CONFIG: ConfigRecord(said)})


def _request(opener: Opener, entries: dict[str, Any]) -> tuple[Any, Any, list[Sealed]]:
    """Session, name and releases of a request to open; :meth:`Opener.open` checks the first two itself."""
    if entries.get(protocol.HELPER) != opener.name:
        raise _refused("the request is for another helper")
    headers, seals, signatures = (
        _bytes_of(entries, key) for key in (protocol.HEADER, protocol.SEALS, protocol.SIGNATURE)
    )
    width = len(opener.roster.helpers)
    if len(signatures) != len(headers) or len(seals) != width * len(headers):
        raise _refused("expected one signature, and one seal for each helper, for each header")
    releases = [
        Sealed(header, tuple(seals[width * i : width * (i + 1)]), signature)
        for i, (header, signature) in enumerate(zip(headers, signatures, strict=True))
    ]
    return entries.get(protocol.SESSION), entries.get(protocol.OPENING), releases


def _bytes_of(entries: dict[str, Any], key: str) -> list[bytes]:
    values = entries.get(key)
    if not isinstance(values, list) or not all(isinstance(value, bytes) for value in values):
        raise _refused(f"expected {key} to be a list of bytes")
    return values


def _refused(why: str) -> OpeningRefusedError:
    logger.warning("Refused to open a set: %s", why)
    return OpeningRefusedError(why)


def answer_simulated_helper(message: Message, state: RecordDict, *, name: str, seed: int, roster: Roster) -> Message:
    """A simulated helper's reply to a message: its keys follow from the run's seed, its record is in ``context.state``.

    It opens what a real helper would and nothing else. It hides nothing from anybody who knows the seed, and its record
    ends with the run: that is why a real node is refused.
    """
    if not in_simulation():
        raise ConfigurationError("Expected a simulation, got a real node: a helper there is `murmurfl helper CONFIG`.")
    opener = Opener(name, HelperKey.simulated(seed, name), roster, ContextOpeningRecord(state, name))
    return answer_helper(opener, message)
