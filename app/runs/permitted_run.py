"""The permit of a run over real machines: which session each of its parts is in."""

from __future__ import annotations

from typing import Any

from ...privacy import ConfigurationError
from ...privacy.permits import read_permit
from ..settings.run_config import RunConfig, is_centred, is_evaluated

MEAN, EVALUATION = "mean", "evaluation"
"""Suffixes of the sessions of side releases, after the training's name."""


def part_session(session: str, part: str) -> str:
    """The session of a part of a run whose training is in a session; the owner's command names it the same way."""
    return session + part


def session_options(config: RunConfig, simulated: str, part: str = "", *, deployed: bool) -> dict[str, Any]:
    """The session, the permit and the schema that a strategy of a run is told.

    Parameters
    ----------
    simulated : str
        The session's name in a simulation.
    part : str
        Of the run; empty for its training.
    deployed : bool
        Whether machines are real ones: then a session is named by the permit, or has a fresh name.
    """
    if not deployed:
        return {"session": simulated}
    told = {"session": None, "schema": config.schema}
    if not config.permit:
        return told
    session = read_permit(config.permit).sessions[0]
    return {**told, "session": part_session(session, part) if part else session, "permit": config.permit}


def check_permit(config: RunConfig) -> None:
    """Refuse a permit that leaves out a part of the run, before anything is spent."""
    if not config.permit:
        return
    sessions = read_permit(config.permit).sessions
    parts = [part for part, there in ((MEAN, is_centred(config)), (EVALUATION, is_evaluated(config))) if there]
    missing = [part for part in parts if part_session(sessions[0], part) not in sessions]
    if missing:
        raise ConfigurationError(
            f"Expected a permit for every part of this run, got one without its {' and its '.join(missing)}: have the "
            f"owner sign `murmurfl owner permit KEY --session {sessions[0]} "
            f"{' '.join(f'--{part}' for part in parts)}`."
        )
