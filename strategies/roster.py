"""The roster that a server works with: the one all its helpers have. Operators pinned it; a server only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..privacy import ConfigurationError
from ..privacy.roster import Roster
from .secure_aggregation import SecureAggregation


def read_roster(text: str) -> Roster | None:
    """The roster in a JSON text, or None if there is none."""
    try:
        return Roster.from_document(json.loads(text))
    except (ConfigurationError, ValueError, RecursionError):
        return None


def same_roster(text: str, roster: Roster) -> bool:
    """Whether a JSON text has that roster."""
    found = read_roster(text)
    return found is not None and found.digest == roster.digest


def common_roster(said: Mapping[str, str], option: SecureAggregation) -> Roster:
    """The one roster that all helpers have.

    Parameters
    ----------
    said : mapping of str to str
        What each connected helper says it works with, JSON text by its name.
    option : SecureAggregation

    Raises
    ------
    ConfigurationError
        If there is not one, or it has other helpers, or is not the one to insist on.
    """
    rosters = {name: read_roster(text) for name, text in said.items()}
    wanted = {name: one for name, one in rosters.items() if one is not None and option.roster in ("", one.digest)}
    if option.roster:
        for name, one in rosters.items():
            if name not in wanted:
                raise ConfigurationError(
                    f"Expected helpers with the roster {option.roster}, got helper {name!r} with "
                    f"{'none' if one is None else one.digest}: give it the same roster file, or take its digest out."
                )
    digests = {name: "none" if one is None else one.digest for name, one in rosters.items()}
    first = next(iter(wanted.values()), None)
    if first is None or len(set(digests.values())) > 1:
        shown = ", ".join(f"{name!r} has {digest}" for name, digest in sorted(digests.items()))
        raise ConfigurationError(
            f"Expected one roster at all helpers, got several: {shown}. Give all of them the same roster file; with "
            "SecureAggregation(roster=...) the server insists on the right one."
        )
    if len(first.helpers) != option.helpers or set(first.helper_names) != set(said):
        raise ConfigurationError(
            f"Expected {option.helpers} helpers, those of their roster ({', '.join(map(repr, first.helper_names))}), "
            f"got {', '.join(map(repr, sorted(said)))}: set helpers to as many as the roster has, and start each once."
        )
    return first
