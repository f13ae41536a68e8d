"""The base of strategies of one round in which every machine answers once.

The mean of the features (:mod:`.mean_of_features`), statistics (:mod:`.table_statistics`) and an evaluation
(:mod:`.private_evaluation`) are one round each, in a session and a checkpoint of their own. All machines are asked, and
each has one release to make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, Unpack

from flwr.serverapp.strategy import Result

from ...privacy import ConfigurationError, NoiseKeys, PrivacyPolicy, protocol
from ..rounds.attendance import LateAnswers
from ..rounds.options import RoundOptions
from ..rounds.replies import Reply, RoundReport
from ..rounds.strategy import ReleaseStrategy
from ..trust.server_trust import FreshNoise

StateT = TypeVar("StateT")

_CAP_REACHED = protocol.REFUSAL_NAMES[protocol.CAP_REACHED]


class OneAnswer(ReleaseStrategy[StateT]):
    """A strategy of one round, in which all machines are asked for the only release of a session; a base class.

    ``of`` is what they are asked for (:data:`~murmurfl.privacy.protocol.RELEASE_OF`); empty for machines that release
    nothing else.
    """

    foresees: ClassVar[bool] = False
    late_answers: ClassVar[LateAnswers] = "refused"  # there is one round

    must_aggregate: bool = False

    def __init__(self, *, num_clients: int | None, of: str, **options: Unpack[RoundOptions]) -> None:
        # How often a machine answers is known: once.
        settled: RoundOptions = {**options, "run_dry": True}
        super().__init__(num_clients=num_clients, clients_per_round=num_clients, **settled)
        if of:
            self.entries = {**self.entries, protocol.RELEASE_OF: of}
        self._resumed = False
        self._stated: dict[str, list[float]] = {}

    def check_reply(self, reply: Reply) -> bool:
        stated = self.read_entries(reply.metrics)
        if stated is None or reply.samples <= 0:  # nothing can be divided by what it does not say
            return False
        self._stated[reply.machine] = stated
        return True

    def read_entries(self, entries: Mapping[str, Any]) -> list[float] | None:
        """Further public figures of a reply; None where they make no sense."""
        return []

    @property
    def heard(self) -> list[list[float]]:
        """:meth:`read_entries` of each machine in the sum."""
        return [self._stated[name] for name, release in self.acks.items() if name in self._stated and release]

    def noise_std(self, width: int) -> float:
        """The standard deviation of the noise in each value of the sum; machines state theirs first of all."""
        return math.hypot(self.trust.own_noise_std(width), *(stated[0] for stated in self.heard))

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
        if not self.trust.before_asking(self._save):
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


def one_sum(strategy: type, policy: PrivacyPolicy, noise_keys: NoiseKeys | None, made_with: str) -> FreshNoise:
    """The noise of a trusted server on the one sum of a :class:`OneAnswer`; refuses policies of more than one answer.

    Notes
    -----
    **Formal guarantees.** What is made of the sum is mu-GDP, as
    :class:`~murmurfl.strategies.trust.server_trust.FreshNoise` says for one round.
    Proof: docs/proofs/sensitivities.md.
    """
    if policy.order != "all" or policy.max_participations != 1:
        raise ConfigurationError(
            f"Expected for {strategy.__name__} a policy with order 'all' and max_participations 1, got "
            f"{policy.order!r} and {policy.max_participations}: make it with {made_with}."
        )
    return FreshNoise(policy, 1, noise_keys)
