"""Asking a node who it is, and reading what it says: machines it hosts, helpers it hosts, or why it said neither."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode

from ..privacy import protocol
from .waiting import LEGACY, WITHOUT

# An exception of the ClientApp, which murmurfl's never lets out.
_RAISED = (ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
# What Flower's legacy ClientApp raises on a message of the Message API.
_OF_LEGACY = ("fitins.", "evaluateins.", "Invalid message type: query")


@dataclass(frozen=True)
class Introduction:
    """Who is on a node, in its own words.

    Parameters
    ----------
    machines, helpers : tuple of str
        Names; a real node is one of the two.
    roster : str
        Of its helpers: the roster they work with, as JSON text; empty without helpers.
    schema : str
        The digest of what its machines take for a record; empty where they do not say.
    """

    machines: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    roster: str = ""
    schema: str = ""


def hello(node_id: int, message_type: str, entries: Mapping[str, Any]) -> Message:
    """What a node is asked; ``entries`` are what every message of the training says."""
    asked = {protocol.ASK: protocol.ASK_HELLO, protocol.VERSION: protocol.PROTOCOL_VERSION}
    config = ConfigRecord({**entries, **asked})
    return Message(RecordDict({protocol.CONFIG: config}), dst_node_id=node_id, message_type=message_type)


def introduction(reply: Message) -> Introduction | None:
    """What a node said, or None if it said nothing that this server understands."""
    config = None if reply.has_error() else reply.content.config_records.get(protocol.CONFIG)
    if config is None or config.get(protocol.VERSION) != protocol.PROTOCOL_VERSION:
        return None
    machines, helpers = _names(config, protocol.MACHINES), _names(config, protocol.HELPERS)
    roster = config.get(protocol.ROSTER, "")
    if machines is None or helpers is None or not (machines or helpers) or not isinstance(roster, str):
        return None
    schema = config.get(protocol.SCHEMA, "")
    known = isinstance(schema, str) and re.fullmatch(r"[0-9a-f]{32}", schema)
    return Introduction(machines, helpers, roster if helpers else "", str(schema) if known else "")


def failure(reply: Message) -> str:
    """Why a node could not be met, in words a node cannot choose."""
    stated: Any = None
    if not reply.has_error():
        config = reply.content.config_records.get(protocol.CONFIG)
        stated = None if config is None else config.get(protocol.VERSION)
    elif reply.error.code != protocol.PROTOCOL_MISMATCH:
        return protocol.REFUSAL_NAMES.get(reply.error.code, f"error {reply.error.code}")
    elif found := re.search(r"protocol version (\d{1,9})\b", reply.error.reason or ""):
        stated = int(found[1])
    if isinstance(stated, int) and stated != protocol.PROTOCOL_VERSION:
        name, ours = protocol.REFUSAL_NAMES[protocol.PROTOCOL_MISMATCH], protocol.PROTOCOL_VERSION
        return f"{name} (they speak version {stated} of murmurfl's protocol, this server version {ours})"
    return "an answer this server does not understand"


def stranger(reply: Message) -> str:
    """Of what kind a node's ClientApp is, where it does not know murmurfl; empty where it does, or cannot be told.

    A node may say anything in its reply, which chooses between two sentences of ours and no more.
    """
    if not reply.has_error():
        return "" if any(protocol.VERSION in record for record in reply.content.config_records.values()) else WITHOUT
    if reply.error.code not in _RAISED:
        return ""
    reason = reply.error.reason or ""
    return LEGACY if any(mark in reason for mark in _OF_LEGACY) else WITHOUT


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """The names of an entry, none if it is missing; None if it is no list of names."""
    names = config.get(key, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        return None
    if not all(isinstance(name, str) and 0 < len(name) <= protocol.LONGEST_MACHINE_NAME for name in names):
        return None
    return tuple(str(name) for name in names)
