"""Private statistics, the server's half: how the values of a table's columns are spread, in one round.

Each machine releases the noisy sum of its records' rows once (:mod:`murmurfl.privacy.side.statistics_query`). Counts,
means, histograms and quantiles are read from the sum of these (:mod:`.statistics_figures`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Required, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid

from ...privacy import ConfigurationError, CountedColumn, NoiseKeys, PrivacyPolicy, StatisticsRows, protocol
from ..rounds.layout import Layout, Vector
from ..rounds.options import RoundOptions
from ..rounds.replies import DirectMachines, RoundReport
from ..trust.server_trust import TrustedStrategy
from .one_answer import OneAnswer, one_sum, stated_std
from .statistics_figures import TableStatistics

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class StatisticsState:
    """The sum of the machines' rows; zeros before the round."""

    total: Vector


class StatisticsOptions(RoundOptions, total=False):
    """Options of :class:`Statistics`, where they are described."""

    columns: Required[Sequence[CountedColumn]]
    num_clients: int | None
    beside: bool


class Statistics(OneAnswer[StatisticsState]):
    """Statistics of a table's columns over all machines in one round.

    Parameters
    ----------
    columns : sequence of CountedColumn
        The columns, as on the machines: ``murmurfl.clients.statistics_columns(schema)``.
    num_clients : int, optional
        M, machines in all; all of them are asked. Default as many as are connected.
    beside : bool
        Whether machines release statistics beside a training (:class:`murmurfl.clients.Counting`) and not as a run of
        their own (:class:`murmurfl.clients.StatisticsClient`).
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`; checkpoint and session are this round's own.

    Notes
    -----
    Each machine answers once in a session, and counts every session against its budget. What is guaranteed is
    the machines': mu-GDP for replacement of one record, of all figures together
    (:func:`~murmurfl.privacy.statistics_policy`).

    Examples
    --------
    In a Flower project's ``ServerApp``::

        found = Statistics(columns=statistics_columns(schema), num_clients=10).collect(grid)
        print(found["age"].mean, found["age"].quantile(0.5))
    """

    state_type: ClassVar[type[StatisticsState]] = StatisticsState

    def __init__(
        self,
        *,
        columns: Sequence[CountedColumn],
        num_clients: int | None = None,
        beside: bool = False,
        **options: Unpack[RoundOptions],
    ) -> None:
        if options.get("centre") is not None:
            raise ConfigurationError("Expected no centre for Statistics, got one: records are counted as they are.")
        self.rows = StatisticsRows(tuple(columns))
        super().__init__(num_clients=num_clients, of=protocol.OF_STATISTICS if beside else "", **options)

    def collect(self, grid: Grid | DirectMachines, *, timeout: float = 3600.0) -> TableStatistics:
        """The statistics, from all machines or from the checkpoint.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for replies; later ones are not in the figures.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        OpeningError
            Under secure aggregation, if the sum cannot be opened.
        ConfigurationError
            If no machine released anything, with what they said.

        Notes
        -----
        A server that was killed while machines answered asks again in the same session. murmurfl's nodes repeat their
        last answer; other machines have made their only release of it, and refuse.
        """
        self.start(grid, ArrayRecord({"statistics": Array(np.zeros(self.rows.width))}), num_rounds=1, timeout=timeout)
        report = self.history[-1]
        if not report.aggregated or self.state is None:
            raise ConfigurationError(
                f"Expected machines to release statistics, got none from {report.asked}: {self.said(report)}. Machines "
                "must be configured for statistics of the same columns; see their logs."
            )
        noise = self.noise_std(self.rows.width)
        counts = self.rows.read(self.state.total, report.samples, noise)
        found = TableStatistics.of(
            self.rows.columns, counts, records=report.samples, machines=report.aggregated, noise_std=noise
        )
        logger.info("Statistics of %d columns, from %d machines in all.", len(counts), report.aggregated)
        return found

    @property
    def release_layout(self) -> Layout:
        return [("statistics", (self.rows.width,), np.dtype(np.float64))]

    def initial_state(self, start: Vector) -> StatisticsState:
        return StatisticsState(start)

    def query_points(self, state: StatisticsState) -> tuple[Vector, ...]:
        """No points: records do not depend on a model."""
        return ()

    def step(self, state: StatisticsState, release_sum: Vector, server_round: int) -> StatisticsState:
        """The state with the sum of the rows."""
        return StatisticsState(release_sum)

    def next_state(self, state: StatisticsState, release_sum: Vector, report: RoundReport) -> StatisticsState:
        if not report.samples:
            return state  # nothing came
        return self.step(state, self.trust.noisy(release_sum, report.server_round), report.server_round)

    def model(self, state: StatisticsState) -> Vector:
        return state.total

    def read_entries(self, entries: Mapping[str, Any]) -> list[float] | None:
        std = stated_std(entries)
        return None if std is None else [std]

    def settings(self) -> dict[str, Any]:
        told = hashlib.sha256(repr(self.rows.columns).encode()).hexdigest()[:8]
        return {**super().settings(), "columns": f"{len(self.rows.columns)} ({told})"}


class TrustedStatistics(TrustedStrategy, Statistics):
    """Statistics with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.statistics_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.trust.server_trust.TrustedServer`.
    **options
        See :class:`Statistics`.

    Notes
    -----
    **Formal guarantees.** The statistics are mu-GDP for replacement of one record of one machine, against everybody but
    the server itself, under the conditions of :class:`~murmurfl.strategies.trust.server_trust.TrustedStrategy`.
    Proof: docs/proofs/sensitivities.md.
    """

    def __init__(
        self, *, policy: PrivacyPolicy, noise_keys: NoiseKeys | None = None, **options: Unpack[StatisticsOptions]
    ) -> None:
        self.trust = one_sum(type(self), policy, noise_keys, "statistics_policy")
        super().__init__(**options)
