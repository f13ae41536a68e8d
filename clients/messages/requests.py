"""Reading the entries of a request from a server that is not trusted: each is checked, or the request is refused.

The texts depend on the request alone, because Flower forwards them to the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import RefusedError, protocol

GRADIENTS = "gradients"
"""A request for a contribution to the training, not for a side release."""


@dataclass(frozen=True)
class Request:
    """A training request that has passed every check."""

    server_round: int
    """t, from 1, by which gradients are weighed."""
    session: str
    """The training this request belongs to."""
    ack: int
    """The last of this machine's releases that the server has aggregated."""
    query_points: tuple[list[NDArray[Any]], ...]
    """The points to compute gradients at, each a list of the model's arrays."""
    of: str = GRADIENTS
    """The kind of release: :data:`GRADIENTS`, or a side release (:mod:`murmurfl.clients.side`)."""
    centre: NDArray[np.float32] | None = None
    """The centre, shape (k,), that the machine sees its samples from, where it is configured for centring."""
    skipped: bool = False
    """Whether the sum with release ``ack`` was skipped."""


def malformed(reason: str) -> RefusedError:
    """The refusal of a malformed request; the reason must depend on the request alone."""
    return RefusedError(protocol.MALFORMED_REQUEST, f"malformed request: {reason}")


def check_version(config: Mapping[str, Any]) -> None:
    """Refuse a request of another protocol version; the text names ours, so that both sides' logs say what to do."""
    version = config.get(protocol.VERSION)
    if version != protocol.PROTOCOL_VERSION:
        stated = f"version {version}" if isinstance(version, int) else "no version"
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this machine speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states {stated}",
        )


def skipped_entry(config: Mapping[str, Any]) -> bool:
    """Whether the request says that the sum with the acknowledged release was skipped."""
    return protocol.SKIPPED in config and integer_entry(config, protocol.SKIPPED, 0, 1) == 1


def integer_entry(config: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Read an integer of the request, or refuse it."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise malformed(f"expected {key} to be an integer from {low} to {high}")
    return value


def session_entry(config: Mapping[str, Any]) -> str:
    """Read the session of the request, or refuse it."""
    session = config.get(protocol.SESSION)
    if not isinstance(session, str) or not 0 < len(session) <= protocol.LONGEST_SESSION_NAME or not session.isalnum():
        raise malformed(f"expected {protocol.SESSION} to be 1 to {protocol.LONGEST_SESSION_NAME} letters and digits")
    return session


def read_points(
    parameters: Sequence[NDArray[Any]], shapes: Sequence[tuple[int, ...]], count: int
) -> tuple[list[NDArray[Any]], ...]:
    """Read the query points of the request, each a list of the model's arrays, or refuse them."""
    width = len(shapes)
    if len(parameters) != width * count:
        raise malformed(f"expected {count} query points of {width} arrays")
    points = []
    for start in range(0, len(parameters), width):
        point = list(parameters[start : start + width])
        for values, shape in zip(point, shapes, strict=True):
            if values.shape != shape or values.dtype.kind != "f" or not np.isfinite(values).all():
                raise malformed("expected finite floating-point arrays of the model's shapes")
        points.append(point)
    return tuple(points)
