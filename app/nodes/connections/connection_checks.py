"""What of a connection can be checked before a node starts: the way, certificate, clocks, key, and who commands."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....privacy import ConfigurationError
from .connection import Connection
from .diagnosis import AHEAD_S, BEHIND_S, Diagnosis, diagnose
from .presented import authority_ends, utc

STATES = ("ok", "warning", "failed", "not tried")


@dataclass(frozen=True)
class Check:
    """What came of trying one thing.

    Parameters
    ----------
    name : str
        Of what was tried.
    state : str
        One of :data:`STATES`.
    sentence : str
        For the operator; with ``failed`` it says what to do.
    """

    name: str
    state: str
    sentence: str

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigurationError(f"Expected one of {', '.join(STATES)}, got {self.state!r}.")


def worst(checks: Sequence[Check]) -> str:
    """``failed`` if one of them did, else ``warning`` if there is one, else ``ok``."""
    states = {check.state for check in checks}
    return next((state for state in ("failed", "warning") if state in states), "ok")


NAMES = ("connection", "certificate", "clock", "key", "commands")
"""The checks, in the order in which a SuperLink makes them."""

_DAY_S = 86400.0
_DAYS_LEFT = 30.0


def not_tried(reason: str) -> list[Check]:
    """None of them, for a reason.

    Parameters
    ----------
    reason : str
        What was missing.
    """
    return [Check(name, "not tried", reason) for name in NAMES]


def connection_checks(
    connection: Connection,
    *,
    trying: Callable[..., Diagnosis] = diagnose,
    clock: Callable[[], float] = time.time,
) -> list[Check]:
    """Try a connection, and say of each step what came of it.

    Parameters
    ----------
    connection : Connection
    trying : callable
        As :func:`~murmurfl.app.nodes.connections.diagnosis.diagnose`.
    clock : callable
        In seconds since 1970.

    Notes
    -----
    Nothing is released, and a node that is running with the same key keeps its session.
    """
    found = trying(connection)
    if (
        found.cause == "key-unusable" and connection.private_key is not None
    ):  # that much a node finds out by itself; the rest can be tried without
        rest = connection_checks(replace(connection, private_key=None), trying=trying, clock=clock)
        at = NAMES.index("key")
        return [*rest[:at], Check("key", "failed", found.sentence), *rest[at + 1 :]]
    failed = _failed_check(found.cause)
    reached = NAMES.index(failed) if failed else len(NAMES)
    passed = [
        Check("connection", "ok", f"A SuperLink answers at {connection.superlink}."),
        _certificate(connection, found, clock()),
        _clock(found),
        _key(connection),
        _commands(connection, found),
    ][:reached]
    if failed is None:
        return passed
    rest = [Check(name, "not tried", f"The {failed} comes first.") for name in NAMES[reached + 1 :]]
    return [*passed, Check(failed, "failed", found.sentence), *rest]


def _failed_check(cause: str) -> str | None:
    """Which of the checks a cause belongs to."""
    if cause == "reached":
        return None
    return next((name for name in NAMES if cause.startswith(name)), "connection")


def _certificate(connection: Connection, found: Diagnosis, now: float) -> Check:
    if connection.insecure:
        return Check("certificate", "warning", "There is none: without TLS anybody in between reads and answers.")
    ends = [end for end in (found.certificate_ends, authority_ends(connection.root_certificates)) if end is not None]
    if not ends:
        return Check("certificate", "ok", "The SuperLink's certificate is believed.")
    days = math.floor((min(ends) - now) / _DAY_S)
    whose = "The SuperLink's certificate" if min(ends) == found.certificate_ends else "Its authority's certificate"
    said = f"{whose} is valid until {utc(min(ends))}, for {days} more day{'s' * (days != 1)}"
    if days >= _DAYS_LEFT:
        return Check("certificate", "ok", f"{said}.")
    return Check("certificate", "warning", f"{said}: ask the server's operator for the next one now.")


def _clock(found: Diagnosis) -> Check:
    allowed = f"(up to {AHEAD_S:.0f} s ahead and {BEHIND_S:.0f} s behind are allowed)"
    if found.ahead_s is None:
        return Check("clock", "ok", f"The SuperLink accepts this machine's clock {allowed}.")
    side = "ahead of" if found.ahead_s > 0 else "behind"
    said = f"This machine's clock is {abs(found.ahead_s):.0f} s {side} the SuperLink's, to within 2 s {allowed}"
    near = found.ahead_s > AHEAD_S - 1 or found.ahead_s < -BEHIND_S / 2
    if near:
        return Check("clock", "warning", f"{said}: set the clock (NTP) of whichever is wrong.")
    return Check("clock", "ok", f"{said}.")


def _key(connection: Connection) -> Check:
    path = connection.private_key
    if path is None:
        return Check(
            "key", "warning", "The SuperLink takes any node, and this one has no key: any machine may take part."
        )
    if os.name == "posix" and Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Check("key", "warning", f"It is registered, but others may read it: run `chmod 600 {path}`.")
    return Check("key", "ok", f"The SuperLink knows the key at {path}.")


def _commands(connection: Connection, found: Diagnosis) -> Check:
    if not found.takes_commands:
        return Check("commands", "ok", "The SuperLink takes none from a machine without a login.")
    return Check(
        "commands",
        "warning",
        f"Whoever reaches {connection.superlink} may submit runs there and run code as the server: ask its operator "
        "for `murmurfl server --owners`.",
    )
