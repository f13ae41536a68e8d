"""Reading the entries of a request from a server that is not trusted: each is checked, or the request is refused.

The texts depend on the request alone, because Flower forwards them to the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..privacy import RefusedError, protocol


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


def integer_entry(config: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """An integer of the request, or a refusal."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise malformed(f"expected {key} to be an integer from {low} to {high}")
    return value


def session_entry(config: Mapping[str, Any]) -> str:
    """The session of the request, or a refusal."""
    session = config.get(protocol.SESSION)
    if not isinstance(session, str) or not 0 < len(session) <= protocol.LONGEST_SESSION_NAME or not session.isalnum():
        raise malformed(f"expected {protocol.SESSION} to be 1 to {protocol.LONGEST_SESSION_NAME} letters and digits")
    return session
