"""Senders of requests to a SuperLink, as far as headers show: Flower's own checks, before a body is read.

A node signs the time with its key, and a run's process has its task's token. Neither covers the body, so headers alone
show as much as Flower finds out after parsing. Flower checks again, and compares the sender with the body.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from base64 import b64decode
from datetime import datetime
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TASK_TOKEN_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from .gate import FLEET, RUNTIME, UNREAD, UPLOAD, Headers, Sender, Senders
from .limits import LARGEST_BODY, LARGEST_CALL, LARGEST_INTRODUCTION, LARGEST_OF_TASK, NODE_S, UNKNOWN_S

if TYPE_CHECKING:
    from fastapi import FastAPI

_INTRODUCTIONS = frozenset({f"{FLEET}register-node", f"{FLEET}activate-node", f"{RUNTIME}acquire-task"})
"""Calls of senders who may be unknown. They are small, and Flower answers them as it answers anybody."""
_STRANGER = Sender(b"", LARGEST_INTRODUCTION, UNKNOWN_S)


def flower_senders(application: FastAPI) -> Senders:
    """Return what recognises the senders whom Flower's SuperLink ``application`` knows."""

    async def sender(path: str, headers: Headers) -> Sender | None:
        # In a thread: the SuperLink's state is a database.
        if path.startswith(RUNTIME):
            known = await asyncio.to_thread(_task, application, headers)
        else:
            known = await asyncio.to_thread(_node, application, path, headers)
        if known is None and path in _INTRODUCTIONS:
            return _STRANGER
        # A process whose run has ended gets Flower's own answer, by which it ends.
        return UNREAD if known is None and path.startswith(RUNTIME) else known

    return sender


def _node(application: FastAPI, path: str, headers: Headers) -> Sender | None:
    """Return the node that a request is signed by, if its key is registered."""
    try:
        key = b64decode(_one(headers, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True)
        signature = b64decode(_one(headers, FLEET_HTTP_SIGNATURE_HEADER), validate=True)
        timestamp = _one(headers, TIMESTAMP_HEADER)
        age_s = (now() - datetime.fromisoformat(timestamp.decode("ascii"))).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age_s < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        # First the look-up: anybody can sign with a key of their own.
        if application.state.linkstate_factory.state().get_node_id_by_public_key(key) is None:
            return None
        if not verify_signature(bytes_to_public_key(key), timestamp, signature):
            return None
    except (KeyError, ValueError, TypeError, binascii.Error, UnsupportedAlgorithm):
        return None
    return Sender(_name(key), _largest_object() if path == UPLOAD else LARGEST_CALL, NODE_S)


def _largest_object() -> int:
    """Arrays may be cut into larger objects where everybody sets Flower's variable."""
    return max(LARGEST_BODY, 2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)


def _task(application: FastAPI, headers: Headers) -> Sender | None:
    """Return the task whose token comes with a request."""
    try:
        token = _one(headers, TASK_TOKEN_HEADER).decode("ascii")
    except (KeyError, ValueError):
        return None
    task = application.state.linkstate_factory.state().get_task_by_token(token) if token else None
    return None if task is None else Sender(_name(token.encode()), LARGEST_OF_TASK, None)


def _one(headers: Headers, name: str) -> bytes:
    """Return the value of a header that must be there once."""
    (value,) = [found for given, found in headers if given.lower() == name.encode()] or [None]
    if value is None:
        raise KeyError(name)
    return value


def _name(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
