"""Private centring, the server's half: the mean of everybody's features, in one round before a training.

Each machine releases the noisy sum of its features once. The mean over all samples is the centre that machines subtract
from their samples afterwards (:mod:`murmurfl.privacy.side.centring_query`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Required, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import ConfigurationError, NoiseKeys, PrivacyPolicy, protocol
from ...privacy.accounting.gdp import check_count
from ..rounds.layout import Vector
from ..rounds.options import RoundOptions
from ..rounds.replies import DirectMachines, RoundReport
from ..trust.server_trust import TrustedStrategy
from .one_answer import OneAnswer, one_sum

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class MeanState:
    """The mean of the features, shape (k,); zeros before the round."""

    mean: Vector


class MeanOptions(RoundOptions, total=False):
    """Options of :class:`MeanOfFeatures`, where they are described."""

    num_features: Required[int]
    num_clients: Required[int]


class MeanOfFeatures(OneAnswer[MeanState]):
    """The mean of the features in one round, for machines configured for centring.

    Parameters
    ----------
    num_features : int
        k, values of one sample's features.
    num_clients : int
        M, machines in all; all of them are asked.
    **options
        See :class:`~murmurfl.strategies.ReleaseStrategy`; checkpoint and session are this round's own.

    Notes
    -----
    Each machine answers once in a session, and counts every session against its budget.

    Examples
    --------
    A training around a private mean takes two strategies, one after the other, over one grid::

        centre = MeanOfFeatures(num_features=64, num_clients=10).collect(grid)
        Mu2(num_clients=10, clients_per_round=5, learning_rate=0.1, centre=centre).start(grid, initial, num_rounds=20)
    """

    state_type: ClassVar[type[MeanState]] = MeanState

    def __init__(self, *, num_features: int, num_clients: int, **options: Unpack[RoundOptions]) -> None:
        if options.get("centre") is not None:
            raise ConfigurationError("Expected no centre for MeanOfFeatures, got one: it makes one.")
        super().__init__(num_clients=num_clients, of=protocol.OF_MEAN, **options)
        check_count("num_features", num_features)
        self.num_features = num_features

    def collect(self, grid: Grid | DirectMachines, *, timeout: float = 3600.0) -> NDArray[np.float32]:
        """The centre, shape (k,), from all machines or from the checkpoint.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for replies; later ones are not in the mean.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        ConfigurationError
            If no machine released anything, with what they said.

        Notes
        -----
        A server that was killed while machines answered asks again in the same session. murmurfl's nodes repeat their
        last answer; other machines have made their only release of it. The mean is then of those that had not answered,
        or zero, with a warning, where all had: features are used as they lie.
        """
        start = ArrayRecord({"mean": Array(np.zeros(self.num_features, np.float32))})
        centre = self.start(grid, start, num_rounds=1, timeout=timeout).arrays.to_numpy_ndarrays()[0]
        report = self.history[-1]
        if not report.aggregated and self.answered_to_another(report):
            logger.warning(
                "Centring: all machines had released the mean of their features to a server that was killed before it "
                "had them; features are used as they lie."
            )
        elif not report.aggregated:
            raise ConfigurationError(
                f"Expected machines to release the mean of their features, got none from {report.asked}: "
                f"{self.said(report)}. Machines must be configured for centring; see their logs, or train with "
                "centring = none."
            )
        logger.info("Centring: the mean of the features of %d machines.", report.aggregated)
        return np.asarray(centre, dtype=np.float32)

    def initial_state(self, start: Vector) -> MeanState:
        return MeanState(start)

    def query_points(self, state: MeanState) -> tuple[Vector, ...]:
        """No points: features do not depend on a model."""
        return ()

    def next_state(self, state: MeanState, release_sum: Vector, report: RoundReport) -> MeanState:
        if not report.samples:
            return state  # nothing came
        mean = self.trust.noisy(release_sum, report.server_round) / report.samples
        return self.step(state, mean, report.server_round)

    def step(self, state: MeanState, release_sum: Vector, server_round: int) -> MeanState:
        """The state with the mean, which :meth:`next_state` makes of the sum."""
        return MeanState(release_sum)

    def model(self, state: MeanState) -> Vector:
        return state.mean

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_features": self.num_features}


class TrustedMeanOfFeatures(TrustedStrategy, MeanOfFeatures):
    """The mean of the features, with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.centring_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.trust.server_trust.TrustedServer`.
    **options
        See :class:`MeanOfFeatures`.

    Notes
    -----
    **Formal guarantees.** The centre is mu-GDP for replacement of one sample of one machine, against everybody but the
    server itself, under the conditions of :class:`~murmurfl.strategies.trust.server_trust.TrustedStrategy`. Proof:
    docs/proofs/sensitivities.md.
    """

    def __init__(
        self, *, policy: PrivacyPolicy, noise_keys: NoiseKeys | None = None, **options: Unpack[MeanOptions]
    ) -> None:
        self.trust = one_sum(type(self), policy, noise_keys, "centring_policy")
        super().__init__(**options)
