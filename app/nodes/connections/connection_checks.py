"""Checks of a connection before a node starts: the way, the certificate, the clocks, the key, and who commands."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....privacy import ConfigurationError
from .certificate import expiries, utc
from .connection import Connection
from .diagnosis import AHEAD_S, BEHIND_S, Diagnosis, diagnose

STATES = ("ok", "warning", "failed", "not tried")


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    state: str  # one of :data:`STATES`
    sentence: str  # for the operator; with ``failed`` it says what to do

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigurationError(f"Expected one of {', '.join(STATES)}, got {self.state!r}.")


def worst(checks: Sequence[Check]) -> str:
    """``failed`` if any check failed, else ``warning`` if any warned, else ``ok``."""
    states = {check.state for check in checks}
    return next((state for state in ("failed", "warning") if state in states), "ok")


NAMES = ("connection", "certificate", "clock", "key", "commands")
"""The checks, in the order in which a SuperLink makes them."""

_DAY_S = 86400.0
_DAYS_LEFT = 30.0


def not_tried(reason: str) -> list[Check]:
    """Every check as not tried, for a reason."""
    return [Check(name, "not tried", reason) for name in NAMES]


def connection_checks(
    connection: Connection,
    *,
    trying: Callable[..., Diagnosis] = diagnose,
    clock: Callable[[], float] = time.time,
) -> list[Check]:
    """Try a connection and report each step.

    Releases nothing. A running node with the same key keeps its session.

    Parameters
    ----------
    trying : callable
        As :func:`~murmurfl.app.nodes.connections.diagnosis.diagnose`.
    clock : callable
        Seconds since 1970.
    """
    found = trying(connection)
    if found.cause == "key-unusable" and connection.private_key is not None:  # the rest can be tried without it
        rest = connection_checks(replace(connection, private_key=None), trying=trying, clock=clock)
        at = NAMES.index("key")
        return [*rest[:at], Check("key", "failed", found.sentence), *rest[at + 1 :]]
    failed = None
    if found.cause != "reached":
        failed = next((name for name in NAMES if found.cause.startswith(name)), "connection")
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


def _certificate(connection: Connection, found: Diagnosis, now: float) -> Check:
    if connection.insecure:
        return Check("certificate", "warning", "There is none: without TLS anybody in between reads and answers.")
    ends = [] if found.certificate_ends is None else [found.certificate_ends]
    ends += sorted(expiries(connection.root_certificates))[-1:]
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
    if found.ahead_s > AHEAD_S - 1 or found.ahead_s < -BEHIND_S / 2:
        return Check("clock", "warning", f"{said}: set the clock (NTP) of whichever is wrong.")
    return Check("clock", "ok", f"{said}.")


def _key(connection: Connection) -> Check:
    path = connection.private_key
    if path is None:
        sentence = "The SuperLink takes any node, and this one has no key: any machine may take part."
        return Check("key", "warning", sentence)
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
