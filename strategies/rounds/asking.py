"""Messages to machines, and what is said where they answer in another way than they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from logging import WARNING
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.common.logger import log

from ...privacy import protocol
from .replies import RoundRequest

RecordT = TypeVar("RecordT", bound=MutableMapping[str, Any])


def request_messages(
    config: ConfigRecord,
    request: RoundRequest,
    points: Mapping[str, ArrayRecord],
    nodes: Mapping[str, int],
    message_type: str = MessageType.TRAIN,
) -> list[Message]:
    """The messages of a round, one a machine.

    Parameters
    ----------
    config : ConfigRecord
        The caller's own entries.
    request : RoundRequest
    points : mapping of str to ArrayRecord
        The query points, the same objects for all machines: nobody may change them.
    nodes : mapping of str to int
        Where each machine is.
    message_type : str
    """
    # What is equal for all machines is made and checked once: a copy of a record shares its values.
    entries, content = _common_entries(config, request), RecordDict(dict(points))
    messages: list[Message] = []
    for name, ack in request.acks.items():
        own = _put(entries.copy(), {protocol.MACHINE: name, protocol.ACK: ack})
        records = _put(content.copy(), {protocol.CONFIG: own})
        alike = _alike(messages[0], records, nodes[name]) if messages else None
        messages.append(alike or Message(records, dst_node_id=nodes[name], message_type=message_type))
    return messages


def _alike(message: Message, content: RecordDict, node_id: int) -> Message | None:
    """A copy of a message that was not sent yet, with other content and for another node; None if Flower has changed.

    Making a message, Flower looks at each argument in every way it can be given, and at the clock.
    """
    made, metadata = Message.__new__(Message), Metadata.__new__(Metadata)
    vars(metadata).update(vars(message.metadata))
    metadata.dst_node_id = node_id
    vars(made).update(vars(message), _metadata=metadata, _content=content)
    return made if vars(made).keys() == vars(message).keys() else None


def _put(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """Put a string, an integer or a record into a copy of a record, without the checks Flower makes of any value."""
    inside = vars(record).get("_data")
    if inside is None:  # a Flower that keeps them elsewhere
        record.update(values)
    else:
        inside.update(values)
    return record


def _common_entries(config: ConfigRecord, request: RoundRequest) -> ConfigRecord:
    """The config of every request of a round but whose it is: the caller's own entries, and those of the protocol."""
    return ConfigRecord(
        {
            **config,
            **request.entries,
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: request.server_round,
            protocol.SESSION: request.session,
        }
    )


_LONGEST_REASON = 300
_MOST_REASONS = 10


def say_refusals(server_round: int, replies: Iterable[Message], known: list[str]) -> None:
    """Say why machines refuse, each reason once a training; their texts depend on requests alone.

    Parameters
    ----------
    server_round : int
    replies : iterable of Message
    known : list of str
        What was said before; what is new is appended.
    """
    for reply in replies:
        if not reply.has_error() or reply.error.code not in protocol.REFUSAL_NAMES:
            continue
        if reply.error.code == protocol.INTERNAL_ERROR:  # its text says nothing
            continue
        # Whatever a machine writes ends up in a terminal.
        shown = "".join(c if c.isprintable() else " " for c in (reply.error.reason or "")[:_LONGEST_REASON])
        if shown and shown not in known and len(known) < _MOST_REASONS:
            known.append(shown)
            log(WARNING, "Round %d: machines refuse: %s.", server_round, shown)


def say_unlike(server_round: int, unlike: int, *, masked: bool) -> None:
    """Server and machines disagree about masks: all such replies are malformed, in this round and in any other."""
    if unlike and masked:
        log(
            WARNING,
            "Round %d: %d replies without masks, and this server has sums of masked releases only: they are "
            "dropped. Have these machines set trust = 'secure-aggregation'.",
            *(server_round, unlike),
        )
    elif unlike:
        log(
            WARNING,
            "Round %d: %d replies under masks (trust = 'secure-aggregation'), and this server cannot take them "
            "off: they are dropped. Give the strategy secure_aggregation=SecureAggregation(...), or run murmurfl's "
            "app with trust=secure-aggregation.",
            *(server_round, unlike),
        )
