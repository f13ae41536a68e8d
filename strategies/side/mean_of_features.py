"""Private centring, the server's half: the mean of everybody's features, in one round before a training.

Each machine releases the noisy sum of its features once. The mean over all samples is the centre that machines subtract
from their samples afterwards (:mod:`murmurfl.privacy.side.centring_query`).

All side releases are strategies of one round in which every machine answers once (:class:`OneAnswer`), in a session and
a checkpoint of their own: this one, :mod:`.table_statistics` and :mod:`.private_evaluation`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from ...privacy import ConfigurationError, protocol
from ...privacy.accounting.gdp import check_count
from ..aggregation.noisy import FreshNoise, TrustedOptions, TrustedStrategy
from ..callbacks.callback import Callback, Training
from ..rounds.options import RoundOptions, takes
from ..rounds.replies import DirectMachines, Reply, RoundReport, Vector
from ..rounds.sampling import LateAnswers
from ..rounds.strategy import ReleaseStrategy

logger = logging.getLogger("flwr")

StateT = TypeVar("StateT")

_CAP_REACHED = protocol.REFUSAL_NAMES[protocol.CAP_REACHED]


@dataclass(frozen=True, kw_only=True, eq=False)
class OneAnswerOptions(RoundOptions):
    """What strategies of one round take: those of every strategy, but all machines are asked, and each answers once."""

    def __post_init__(self) -> None:
        if self.clients_per_round is not None:
            raise ConfigurationError(
                f"Expected no clients_per_round, got {self.clients_per_round}: all machines are asked. Leave it out."
            )
        object.__setattr__(self, "clients_per_round", self.num_clients)
        object.__setattr__(self, "allow_exhaustion", True)
        super().__post_init__()


class _ExcludedBefore(Callback):
    """Exclusion of the clients that another training excluded last."""

    def __init__(self, trained: ReleaseStrategy[Any]) -> None:
        self._trained = trained

    def exclude(self, training: Training) -> Collection[str]:
        return self._trained.excluded


class OneAnswer(ReleaseStrategy[StateT]):
    """A strategy of one round, in which all machines are asked for the only release of a session; a base class.

    :attr:`of` is what they are asked for (:data:`~murmurfl.privacy.protocol.RELEASE_OF`); empty for machines that
    release nothing else.
    """

    of: str

    foresees: ClassVar[bool] = False
    late_answers: ClassVar[LateAnswers] = "refused"  # there is one round

    must_aggregate: ClassVar[bool] = False

    @takes(OneAnswerOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(self.options, aggregator=options.get("aggregator"))
        if self.of:
            self.entries = {**self.entries, protocol.RELEASE_OF: self.of}
        self._resumed = False
        self._stated: dict[str, list[float]] = {}

    def follow(self, trained: ReleaseStrategy[Any]) -> None:
        """Ask the clients of a training that has ended, and wait for no others than it did."""
        self.machines.restore(trained.machines.names)
        self.roll.requests.absences = trained.roll.requests.absences
        self.callbacks.append(_ExcludedBefore(trained))

    def check_reply(self, reply: Reply) -> bool:
        stated = self.read_entries(reply.metrics)
        if stated is None or reply.samples <= 0:  # nothing can be divided by what it does not say
            return False
        self._stated[reply.machine] = stated
        return True

    def next_state(self, state: StateT, release_sum: Vector, report: RoundReport) -> StateT:
        if not report.samples:
            return state  # nothing came
        return self.step(state, self.aggregator.noisy(release_sum, report.server_round), report.server_round)

    def read_entries(self, entries: Mapping[str, Any]) -> list[float] | None:
        """Further public figures of a reply; None where they make no sense."""
        return []

    @property
    def heard(self) -> list[list[float]]:
        """:meth:`read_entries` of each machine in the sum."""
        return [self._stated[name] for name, release in self.acks.items() if name in self._stated and release]

    def noise_std(self, width: int) -> float:
        """The standard deviation of the noise in each value of the sum; machines state theirs first of all."""
        return math.hypot(self.aggregator.own_noise_std(width), *(stated[0] for stated in self.heard))

    @property
    def worth_keeping(self) -> bool:
        """Whether there is anything to save: a round that gave nothing is repeated in the same session."""
        return not self.history or self.history[-1].aggregated > 0

    def answered_to_another(self, report: RoundReport) -> bool:
        """Whether a round gave nothing because machines had answered to a server that was then killed."""
        return self._resumed and set(report.refused) == {_CAP_REACHED}

    @staticmethod
    def said(report: RoundReport) -> str:
        """Why a round gave nothing, in a line."""
        said = [f"machines refused with {', '.join(report.refused)}"] if report.refused else []
        said += [f"the round was closed ({report.closed})"] if report.closed else []
        said += [f"{report.lost} replies were lost"] if report.lost else []
        said += [f"{report.malformed} replies were malformed"] if report.malformed else []
        return "; ".join(said)

    def _before_asking(self) -> None:
        """Save the session's name: in another session machines would count the release a second time."""
        if not self.aggregator.before_asking(self._save):
            self._save()

    def _kept(self) -> dict[str, Any]:
        return {**super()._kept(), "stated": self._stated}

    def _restore(self, saved: Mapping[str, Any]) -> None:
        super()._restore(saved)
        self._stated = {str(name): [float(value) for value in said] for name, said in saved["stated"].items()}

    def _resume(self, result: Result) -> int:
        self._resumed = self.checkpoint is not None and self.checkpoint.exists()
        return super()._resume(result)


def stated_std(entries: Mapping[str, Any]) -> float | None:
    """A machine's own noise by its entries; None where it is none."""
    std = entries.get(protocol.NOISE_STD)
    return std if isinstance(std, float) and math.isfinite(std) and std >= 0 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class OneSumOptions(TrustedOptions):
    """What strategies of one round with a trusted server take."""

    num_rounds: int = field(default=1, init=False)


def one_sum(strategy: type, options: OneSumOptions, made_with: str) -> FreshNoise:
    """The noise of a trusted server on the one sum of a :class:`OneAnswer`; refuses policies of more than one answer.

    Notes
    -----
    **Formal guarantees.** What is made of the sum is mu-GDP, as
    :class:`~murmurfl.strategies.aggregation.noisy.FreshNoise` says for one round.
    Proof: docs/proofs/sensitivities.md.
    """
    policy = options.policy
    if policy.order != "all" or policy.max_participations != 1:
        raise ConfigurationError(
            f"Expected for {strategy.__name__} a policy with order 'all' and max_participations 1, got "
            f"{policy.order!r} and {policy.max_participations}: make it with {made_with}."
        )
    return FreshNoise(options)


@dataclass(frozen=True)
class MeanState:
    """The mean of the features, shape (k,); zeros before the round."""

    mean: Vector


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanOptions(OneAnswerOptions):
    """What :class:`MeanOfFeatures` takes."""

    num_features: int
    num_clients: int = field()

    def __post_init__(self) -> None:
        if self.centre is not None:
            raise ConfigurationError("Expected no centre for MeanOfFeatures, got one: it makes one.")
        super().__post_init__()
        check_count("num_features", self.num_features)


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
    of = protocol.OF_MEAN

    options: MeanOptions

    @takes(MeanOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

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
        start = ArrayRecord({"mean": Array(np.zeros(self.options.num_features, np.float32))})
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
        noisy = super().next_state(state, release_sum, report)
        return MeanState(noisy.mean / report.samples) if report.samples else state

    def step(self, state: MeanState, release_sum: Vector, server_round: int) -> MeanState:
        """The state with the sum, which :meth:`next_state` divides."""
        return MeanState(release_sum)

    def model(self, state: MeanState) -> Vector:
        return state.mean

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_features": self.options.num_features}


@dataclass(frozen=True, kw_only=True, eq=False)
class TrustedMeanOptions(OneSumOptions, MeanOptions):
    """What :class:`TrustedMeanOfFeatures` takes."""


class TrustedMeanOfFeatures(TrustedStrategy, MeanOfFeatures):
    """The mean of the features, with a trusted server.

    Parameters
    ----------
    policy : PrivacyPolicy
        The :func:`~murmurfl.privacy.centring_policy` that all machines were configured with.
    noise_keys : NoiseKeys, optional
        See :class:`~murmurfl.strategies.aggregation.noisy.TrustedOptions`.
    **options
        See :class:`MeanOfFeatures`.

    Notes
    -----
    **Formal guarantees.** The centre is mu-GDP for replacement of one sample of one machine, against everybody but the
    server itself, under the conditions of :class:`~murmurfl.strategies.aggregation.noisy.TrustedStrategy`. Proof:
    docs/proofs/sensitivities.md.
    """

    options: TrustedMeanOptions  # type: ignore[assignment]

    @takes(TrustedMeanOptions)
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "aggregator": one_sum(type(self), self.options, "centring_policy")})
