"""A helper's side of secure aggregation on its Flower node: it says who it is, and opens sets of masked releases.

It is sent seeds, never vectors, and answers with one sum over a set (:class:`~murmurfl.privacy.Opener`). It trains
nothing and has no data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..privacy import protocol
from ..privacy.errors import RefusedError
from ..privacy.sums.masking import Sealed
from ..privacy.sums.opening_rule import Opener, OpeningRecordError, OpeningRefusedError, SignedOpening
from .messages import answer, check_version, malformed

logger = logging.getLogger(__name__)
TOTAL = "total"
"""The name of the sum in the reply's ArrayRecord."""


def answer_helper(opener: Opener, message: Message) -> Message:
    """Return a helper's reply to a message.

    To a hello it is the helper's name and its roster, to ``query.open`` the sum of its masks over the set, to
    everything else an error; for servers that know no queries, both may come in a train message. What leaves are the
    sums that :class:`~murmurfl.privacy.Opener` allows, and texts that are fixed: one for every set that is refused,
    whatever is wrong with it. Timing is not protected.

    Examples
    --------
    >>> from flwr.app import ConfigRecord, Message, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.privacy import HelperKey, MemoryOpeningRecord, Opener, Roster, protocol
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> opener = Opener("left", HelperKey.simulated(1, "left"), roster, MemoryOpeningRecord())
    >>> app = ClientApp()
    >>> @app.query()
    ... def query(message, context):
    ...     return answer_helper(opener, message)
    >>> grid = InProcessGrid(app, 1, {})
    >>> hello = ConfigRecord({protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.ASK: protocol.ASK_HELLO})
    >>> (node_id,) = grid.get_node_ids()
    >>> message = Message(RecordDict({protocol.CONFIG: hello}), dst_node_id=node_id, message_type="query")
    >>> (reply,) = grid.send_and_receive([message])
    >>> reply.content[protocol.CONFIG][protocol.HELPERS]
    'left'
    """
    return answer(message, lambda: _content(opener, message))


def helper_app(opener: Opener) -> ClientApp:
    """Return the ``ClientApp`` of a real helper, whose record must be durable.

    Examples
    --------
    >>> import tempfile
    >>> from murmurfl.privacy import HelperKey, Opener, Roster, SQLiteOpeningRecord
    >>> key = HelperKey.simulated(1, "left")
    >>> roster = Roster.simulated(1, clients=("a", "b", "c"), helpers=("left", "right"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record = SQLiteOpeningRecord.create(f"{folder}/opened.sqlite", helper=key.entry("left"))
    ...     app = helper_app(Opener("left", key, roster, record, min_cohort=3))
    >>> type(app).__name__
    'ClientApp'
    """
    if not opener.durable:
        raise OpeningRecordError(
            "Expected a record that outlives this process (SQLiteOpeningRecord) for a real helper, got one in memory. "
            "Nothing was opened.",
            kind="unsupported",
        )
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:  # noqa: ARG001 - what a helper knows is in its record
        return answer_helper(opener, message)

    for register in (app.query(), app.query(protocol.QUERY_OPEN.partition(".")[2]), app.train(), app.evaluate()):
        register(reply)
    return app


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
    reply = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.HELPER: view.helper,
        protocol.OPENING: view.opening,
        protocol.SET_DIGEST: view.set_digest,
        protocol.WOULD_OPEN: view.would_open,
        protocol.DISPUTED: list(view.disputed),
        protocol.SIGNATURE: view.signature,
    }
    return RecordDict({protocol.CONFIG: ConfigRecord(reply)})


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
    reply = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.HELPER: opened.helper,
        protocol.OPENING: opened.opening,
        protocol.SET_DIGEST: opened.set_digest,
        protocol.SIGNATURE: opened.signature,
    }
    arrays = ArrayRecord({TOTAL: Array(opened.total)})
    return RecordDict({protocol.ARRAYS: arrays, protocol.CONFIG: ConfigRecord(reply)})


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
