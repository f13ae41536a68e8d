"""The options that every strategy takes, typed once; a strategy's own file adds what only that strategy takes.

A strategy hands options on to its base class as ``**options``. With ``Unpack`` (PEP 692) a type checker knows what they
are, so that a misspelt option is found before anything runs.

A permit is what the session's owner signed away from the server (:mod:`murmurfl.privacy.permits`). The server shows it
with every message, and learns here, before anybody is asked, whether that is of any use.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from ...privacy import ConfigurationError, protocol
from ...privacy.permits import read_permit, shown_time
from ..sums.secure_aggregation import SecureAggregation
from .replies import RoundReport
from .sampling import SAMPLINGS, Sampling

OnRound = Callable[[RoundReport, MetricRecord | None], None]
"""What is called after every round, with its report and the metrics of the central evaluation."""


class RoundOptions(TypedDict, total=False):
    """Options of :class:`~murmurfl.strategies.ReleaseStrategy`, where they are described, that all strategies take."""

    fraction_train: float | None
    min_train_nodes: int | None
    min_available_nodes: int | None
    wait_for: float
    ask: float
    seed: int | None
    sampling: Sampling
    session: str | None
    node_deadline_s: float
    checkpoint: Path | str | None
    largest_value: float
    evaluate_every: int
    run_dry: bool
    on_round: OnRound | None
    secure_aggregation: SecureAggregation | None
    centre: NDArray[np.floating] | None
    permit: str | None
    schema: str | None


class ReleaseOptions(RoundOptions, total=False):
    """All options of :class:`~murmurfl.strategies.ReleaseStrategy`."""

    num_clients: int | None
    clients_per_round: int | None


def check_rounds_options(sampling: str, session: str | None, evaluate_every: int) -> None:
    """Refuse a number of rounds, a way of sampling or a session's name that cannot be."""
    if isinstance(evaluate_every, bool) or not isinstance(evaluate_every, int) or evaluate_every < 1:
        raise ConfigurationError(f"Expected evaluate_every to be an integer >= 1, got {evaluate_every!r}.")
    if sampling not in SAMPLINGS:
        raise ConfigurationError(f"Expected sampling one of {SAMPLINGS}, got {sampling!r}.")
    if session is not None and not (session.isalnum() and len(session) <= protocol.LONGEST_SESSION_NAME):
        raise ConfigurationError(f"Expected a session of up to 64 letters and digits, got {session!r}.")


def refuse_sums(option: SecureAggregation, refusing: str) -> None:
    """Refuse secure aggregation where a strategy needs more than sums: ``refusing`` is its name."""
    if not isinstance(option, SecureAggregation):
        raise ConfigurationError(
            f"Expected secure_aggregation to be a SecureAggregation, got {type(option).__name__}: write "
            "secure_aggregation=SecureAggregation(min_cohort=3, helpers=2)."
        )
    if refusing:
        raise ConfigurationError(
            f"Expected no secure_aggregation for {refusing}, got one: it is not made for sums of masked releases. Mu2, "
            "OnlineFedSGD, FullBatch, NoisySGD and CorrelatedFedAvg are."
        )


def centre_bytes(centre: NDArray[np.floating]) -> bytes:
    """A centre as requests have it: float32 values, little endian.

    Raises
    ------
    ConfigurationError
        If it is not one row of values that are finite in float32.
    """
    with np.errstate(over="ignore"):
        values = np.asarray(centre).astype("<f4")
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ConfigurationError(f"Expected a centre of finite values, one a feature, got shape {np.shape(centre)}.")
    return values.tobytes()


def session_of(permit: str | None, session: str | None) -> str:
    """The session of a training: the one that it is given, its permit's first, or without either a fresh one.

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
    """Refuse a permit for other sessions than that of a training."""
    sessions = read_permit(permit).sessions
    if session not in sessions:
        raise ConfigurationError(
            f"Expected a permit for session {session!r}, got one for {', '.join(sessions)}. A training that "
            f"goes on from its checkpoint stays in its session: have the owner sign for it (`murmurfl owner permit KEY "
            f"--session {session}`), or begin a new training."
        )
