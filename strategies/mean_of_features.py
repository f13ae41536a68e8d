"""Private centring, the server's half: the mean of everybody's features, in one round before a training.

All machines are asked once for the noisy sum of their features; the sums, added up and divided by the number of samples
they are of, are the centre that machines see their samples from afterwards (:mod:`murmurfl.privacy.centring`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from ..privacy import ConfigurationError, protocol
from .base import ReleaseStrategy
from .layout import Vector
from .options import RoundOptions
from .replies import DirectMachines, Reply, RoundReport, RoundRequest

_CAP_REACHED = protocol.REFUSAL_NAMES[protocol.CAP_REACHED]


@dataclass(frozen=True)
class MeanState:
    """The mean of the features, shape (k,); zeros before the round."""

    mean: Vector


class MeanOfFeatures(ReleaseStrategy[MeanState]):
    """The round in which machines release the mean of their features, for machines configured for centring.

    Parameters
    ----------
    num_features : int
        k, values of one sample's features.
    num_clients : int
        M, machines in all; all of them are asked.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`. A checkpoint is a file of its own, and a session one too.

    Notes
    -----
    **Formal guarantees.** As for :class:`~murmurfl.strategies.ReleaseStrategy`: privacy is the machines'. Each answers
    once in a session, and counts every session against its budget.

    Examples
    --------
    A training around a private mean takes two strategies, one after the other, over one grid::

        centre = MeanOfFeatures(num_features=64, num_clients=10).collect(grid)
        Mu2(num_clients=10, clients_per_round=5, learning_rate=0.1, centre=centre).start(grid, initial, num_rounds=20)
    """

    state_type: ClassVar[type[MeanState]] = MeanState
    foresees: ClassVar[bool] = False

    def __init__(self, *, num_features: int, num_clients: int, **options: Unpack[RoundOptions]) -> None:
        # How often a machine answers is known: once.
        settled: RoundOptions = {**options, "run_dry": True}
        super().__init__(num_clients=num_clients, clients_per_round=num_clients, **settled)
        if isinstance(num_features, bool) or not isinstance(num_features, int) or num_features < 1:
            raise ConfigurationError(f"Expected num_features to be an integer >= 1, got {num_features!r}.")
        if self.entries:
            raise ConfigurationError("Expected no centre for MeanOfFeatures, got one: it makes one.")
        self.num_features = num_features
        self.entries = {protocol.RELEASE_OF: protocol.OF_MEAN}
        self._resumed = False

    def collect(self, grid: Grid | DirectMachines, *, timeout: float = 3600.0) -> NDArray[np.float32]:
        """Ask all machines, or take what is in the checkpoint: the centre, shape (k,).

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for their replies; what has not come by then is not in the mean.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        ConfigurationError
            If no machine released anything, with what they said.

        Notes
        -----
        A server that was killed while machines answered asks again in the same session. murmurfl's nodes repeat their
        last answer; other machines have made their only release of it. Then the mean is of those that had not answered,
        or zero where all had, which a warning says: features are then used as they lie.
        """
        start = ArrayRecord({"mean": Array(np.zeros(self.num_features, np.float32))})
        centre = self.start(grid, start, num_rounds=1, timeout=timeout).arrays.to_numpy_ndarrays()[0]
        report = self.history[-1]
        if not report.aggregated:
            self._say_nothing_came(report)
        log(INFO, "Centring: the mean of the features of %d machines.", report.aggregated)
        return np.asarray(centre, dtype=np.float32)

    def _say_nothing_came(self, report: RoundReport) -> None:
        """Refuse to go on without a mean; but where a killed server has lost it, say so."""
        if self._resumed and set(report.refused) == {_CAP_REACHED}:
            log(
                WARNING,
                "Centring: all machines had released the mean of their features to a server that was killed before it "
                "had them; features are used as they lie.",
            )
            return
        said = [f"machines refused with {', '.join(report.refused)}"] if report.refused else []
        said += [f"the round was closed ({report.closed})"] if report.closed else []
        said += [f"{report.lost} replies were lost"] if report.lost else []
        said += [f"{report.malformed} replies were malformed"] if report.malformed else []
        raise ConfigurationError(
            f"Expected machines to release the mean of their features, got none from {report.asked}: "
            f"{'; '.join(said)}. Machines must be configured for centring; see their logs, or train with "
            "centring = none."
        )

    def initial_state(self, start: Vector) -> MeanState:
        return MeanState(start)

    def query_points(self, state: MeanState) -> tuple[Vector, ...]:
        """None: features are what they are."""
        return ()

    def next_state(self, state: MeanState, release_sum: Vector, report: RoundReport) -> MeanState:
        return self.step(state, release_sum / max(report.samples, 1), report.server_round)

    def step(self, state: MeanState, release_sum: Vector, server_round: int) -> MeanState:
        """What :meth:`next_state` makes of the sum: the mean over the samples that are in it."""
        return MeanState(release_sum)

    def check_reply(self, reply: Reply) -> bool:
        return reply.samples > 0  # nothing can be divided by what it does not say

    def model(self, state: MeanState) -> Vector:
        return state.mean

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_features": self.num_features}

    @property
    def worth_keeping(self) -> bool:
        """Whether there is anything to save: a round that gave nothing is asked for again, in the same session."""
        return not self.history or self.history[-1].aggregated > 0

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        request = super()._plan_round(server_round, reachable)
        self._before_asking()
        return request

    def _before_asking(self) -> None:
        """Save the session's name: in another one machines would count the mean a second time."""
        self._save()

    def _save(self) -> None:
        if self.worth_keeping:
            super()._save()

    def _resume(self, result: Result) -> int:
        self._resumed = self.checkpoint is not None and self.checkpoint.exists()
        return super()._resume(result)
