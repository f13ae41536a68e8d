"""A permit that a training carries to machines: of which session, and with every message.

The server cannot make one. It shows what the session's owner signed away from it (:mod:`murmurfl.privacy.permits`), and
learns here, before anybody is asked, whether that is of any use.
"""

from __future__ import annotations

import secrets
import time

from ...privacy import ConfigurationError
from ...privacy.permits import read_permit, shown_time


def session_of(permit: str | None, session: str | None) -> str:
    """The session of a training: the one that it is given, its permit's first, or without either a fresh one.

    Parameters
    ----------
    permit : str or None
    session : str or None

    Raises
    ------
    ConfigurationError
        If it is no permit, one that has ended, or one for other sessions.

    Notes
    -----
    Machines look at the permit themselves.
    """
    if not permit:
        return secrets.token_hex(16) if session is None else session
    said = read_permit(permit)
    if time.time() >= said.until:
        raise ConfigurationError(
            f"Expected a permit that has not ended, got one until {shown_time(said.until)}. Have the owner sign "
            "another: `murmurfl owner permit KEY --renew PERMIT`, away from this server."
        )
    settled = said.sessions[0] if session is None else session
    check_permitted(permit, settled)
    return settled


def check_permitted(permit: str, session: str) -> None:
    """Refuse a permit for other sessions than that of a training.

    Raises
    ------
    ConfigurationError
    """
    sessions = read_permit(permit).sessions
    if session not in sessions:
        raise ConfigurationError(
            f"Expected a permit for session {session!r}, got one for {', '.join(sessions)}. A training that "
            f"goes on from its checkpoint stays in its session: have the owner sign for it (`murmurfl owner permit KEY "
            f"--session {session}`), or begin a new training."
        )
