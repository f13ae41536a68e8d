"""The options of every strategy, typed once, so that a type checker knows them in ``**options`` (PEP 692).

A permit is signed by the session's owner away from the server (:mod:`murmurfl.privacy.permits`), which shows it with
every message; whether it fits is checked here before anybody is asked.
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
from ...privacy.accounting.gdp import check_count
from ...privacy.permits import read_permit, shown_time
from ..sums.secure_aggregation import SecureAggregation
from .replies import RoundReport
from .sampling import SAMPLINGS, Sampling

OnRound = Callable[[RoundReport, MetricRecord | None], None]
"""Called after every round with its report and the metrics of the central evaluation."""


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
    """Refuse impossible values of these options."""
    check_count("evaluate_every", evaluate_every)
    if sampling not in SAMPLINGS:
        raise ConfigurationError(f"Expected sampling one of {SAMPLINGS}, got {sampling!r}.")
    if session is not None and not (session.isalnum() and len(session) <= protocol.LONGEST_SESSION_NAME):
        raise ConfigurationError(f"Expected a session of up to 64 letters and digits, got {session!r}.")


def refuse_sums(option: SecureAggregation, refusing: str) -> None:
    """Refuse what is no SecureAggregation, and any where the strategy named ``refusing`` needs more than sums."""
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
    """A centre in a request: float32 values, little endian; refused unless it is one row of finite ones."""
    with np.errstate(over="ignore"):
        values = np.asarray(centre).astype("<f4")
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ConfigurationError(f"Expected a centre of finite values, one a feature, got shape {np.shape(centre)}.")
    return values.tobytes()


def session_of(permit: str | None, session: str | None) -> str:
    """The session of a training: the given one, its permit's first, or a fresh one; refuses a permit that is no use."""
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
    """Refuse a permit for other sessions than the training's."""
    sessions = read_permit(permit).sessions
    if session not in sessions:
        raise ConfigurationError(
            f"Expected a permit for session {session!r}, got one for {', '.join(sessions)}. A training that "
            f"goes on from its checkpoint stays in its session: have the owner sign for it (`murmurfl owner permit KEY "
            f"--session {session}`), or begin a new training."
        )
