"""Requests to a machine with per-sample gradients, whatever strategy they come from: read, or refused by a fixed text.

A mistaken strategy must not go unnoticed: a machine of full batches answers with sums of gradients, one of ``fedavg``
with what a model is to be moved by. So a machine says which strategy it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from ..privacy import RefusedError, protocol
from .requests import malformed
from .sample_methods import SampleMethod

_RECORDS = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)
Layout = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a model's arrays, in order."""


def read_request(message: Message, method: SampleMethod, layout: Layout) -> tuple[str, RecordDict]:
    """The kind of a request ("train", "evaluate" or "query") and its content under the protocol's record keys.

    Parameters
    ----------
    message : Message
    method : SampleMethod
        What the machine takes part in.
    layout : sequence
        Of what is trained.

    Raises
    ------
    RefusedError
        If it is none of this method's strategy, or about another model. The texts depend on the request alone.
    """
    kind = message.metadata.message_type.split(".")[0]
    if kind == MessageType.EVALUATE:
        return kind, message.content
    entries = _entries(message.content, method)
    if kind == MessageType.TRAIN and protocol.ASK in entries:
        _check_asked_as(method, updates=True)
        return MessageType.QUERY, RecordDict({protocol.CONFIG: entries})
    if kind == MessageType.QUERY:
        _check_asked_as(method, updates=False)
        return kind, RecordDict({protocol.CONFIG: entries})
    records = [record for record in message.content.array_records.values() if len(record)]
    if protocol.RELEASE_OF not in entries and len(records) != method.client.query_points:
        raise malformed(
            f"expected {method.client.query_points} models, got {len(records)}: this machine is for {method.strategy}"
        )
    numbered = [(str(i), shape) for i, (_, shape) in enumerate(layout)]
    for record in records:
        if [(name, tuple(array.shape)) for name, array in record.items()] not in (list(layout), numbered):
            raise malformed(
                "expected the arrays of what is trained: start the strategy with "
                "murmurfl.clients.trainable_arrays(module), not with a whole state_dict, or with initial_arrays() of a "
                "LinearEstimator"
            )
    content: dict[str, Any] = dict(zip(_RECORDS, records, strict=False))
    return kind, RecordDict({**content, protocol.CONFIG: entries})


def _entries(content: RecordDict, method: SampleMethod) -> ConfigRecord:
    """The record that speaks murmurfl's protocol, under whatever key."""
    found = [record for record in content.config_records.values() if protocol.VERSION in record]
    if len(found) != 1:
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this machine speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states "
            f"{'several versions' if found else 'no version'}: the server must use murmurfl's {method.strategy}",
        )
    return found[0]


def _check_asked_as(method: SampleMethod, *, updates: bool) -> None:
    """CorrelatedFedAvg asks in messages of training, the other strategies in queries: a machine answers its own."""
    if method.updates != updates:
        evaluation = ", or PrivateEvaluation(of_updates=True)" if method.updates else ""
        raise malformed(f"this machine is for {method.strategy}{evaluation}, and another strategy asks")
