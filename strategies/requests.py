"""Messages to machines, and what is said where they answer in another way than they are read."""

from __future__ import annotations

from logging import WARNING

from flwr.app import ConfigRecord
from flwr.common.logger import log

from ..privacy import protocol
from .replies import RoundRequest


def request_entries(config: ConfigRecord, request: RoundRequest, name: str) -> ConfigRecord:
    """The config of a machine's request: the caller's own entries, and those of the protocol."""
    return ConfigRecord(
        {
            **config,
            **request.entries,
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: request.server_round,
            protocol.SESSION: request.session,
            protocol.MACHINE: name,
            protocol.ACK: request.acks[name],
        }
    )


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
