"""Rounds over machines that are late, and machines that leave: whom a round asks then, and for how long it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from logging import WARNING
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from ...privacy import ConfigurationError, derived_seed
from .leaving import Leaving, ReleasesLeft, foreseen, log_leaving
from .replies import Reply, RoundReport, RoundRequest, exchange
from .resuming import ResumableRounds
from .stragglers import Enough, LateAnswers, OpenRequests

StateT = TypeVar("StateT")


class PatientRounds(ResumableRounds[StateT]):
    """Rounds that need not wait for all, and machines that need not stay to the end; a base class.

    Parameters are those of :class:`~murmurfl.strategies.ReleaseStrategy`.

    Notes
    -----
    A late reply counts by the same rule as any other, so whatever is late, lost or given up, a release enters the model
    at most once.
    """

    late_answers: ClassVar[LateAnswers] = "counted"
    """What becomes of an answer that comes after its round."""

    def _made(self) -> None:
        super()._made()
        if self.late_answers == "refused" and not self._attendance.waits_for_all:
            raise ConfigurationError(
                f"Expected wait_for = 1 and ask = 1 for {type(self).__name__}, got {self._attendance.wait_for:g} and "
                f"{self._attendance.ask:g}: it has no use for a late answer, whose budget would be spent for nothing. "
                "The timeout of start() says how long a round waits."
            )
        self.leaving: Leaving | None = None
        """Which machines leave before the end and when, as they stated it before the first round."""
        self._requests = OpenRequests()
        self._releases_left = ReleasesLeft()
        self._times: Counter[str] = Counter()
        self._overdue: dict[str, int] = {}
        self._given_up = 0

    @property
    def _patient(self) -> bool:
        """Whether rounds may end before all have answered; simulated machines that share a node always answer."""
        return not self._attendance.waits_for_all and not self.machines.several_on_a_node

    def _settle(self, machines: int) -> None:
        super()._settle(machines)
        if self._secure is None or self._attendance.waits_for_all:
            return
        needed = self._attendance.needed(machines)
        if self._secure.option.min_cohort > needed:
            raise ConfigurationError(
                f"Expected rounds that wait for at least min_cohort = {self._secure.option.min_cohort} machines, got "
                f"{needed}: raise wait_for, or lower min_cohort."
            )

    # Whom a round asks.

    def _sample(self, server_round: int) -> list[str]:
        absent = self._requests.machines | self._releases_left.finished
        return self._drawn(server_round, absent, self._times)

    def _drawn(self, server_round: int, absent: AbstractSet[str], times: Mapping[str, int]) -> list[str]:
        """The machines of a round: as sampled, with others in the place of those that cannot be asked."""
        sampled = super()._sample(server_round)
        missing = [name for name in sampled if name in absent]
        if not missing:
            return sampled
        chosen = set(sampled).difference(missing)
        if self._patient:
            free = [name for name in self.machines.names if name not in chosen and name not in absent]
            key = derived_seed("replace machines", self.seed, server_round)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(len(free)).tolist()
            if self.sampling == "balanced":
                order.sort(key=lambda place: times.get(free[place], 0))
            chosen.update(free[place] for place in order[: len(missing)])
        return [name for name in self.machines.names if name in chosen]

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        if reachable is not None:
            self._given_up = self._requests.give_up(reachable, self._timeout)
        request = super()._plan_round(server_round, reachable)
        self._overdue = {}
        self._releases_left.asked(request.acks)
        if self._patient:
            self._times.update(request.acks.keys())
        return request

    @property
    def _fewest_connected(self) -> int:
        """How many machines must be connected before a round begins: as many as it waits for, of those that stay."""
        needed = self._attendance.needed(self.num_clients) if self._patient else self.clients_per_round
        return min(needed, len(self.machines.names) - len(self._releases_left.finished))

    # For how long it waits.

    def _exchange(self, grid: Grid, messages: Iterable[Message], server_round: int, timeout: float) -> list[Message]:
        """Send a round's requests and take what comes."""
        if not self._patient:
            return exchange(grid, messages, timeout)
        done = self._releases_left.finished - self._requests.machines
        askable = sum(name not in done for name in self._nodes)
        share = self._attendance.needed(self.num_clients, min(askable, self.clients_per_round))
        enough = Enough(
            answers=self._attendance.needed(self.num_clients, len(self._asked)),
            open=max(askable - share, 0),
            releases=0 if self._secure is None else self._secure.option.min_cohort,
        )
        found = self._requests.gather(
            grid, list(messages), self._asked, server_round=server_round, enough=enough, timeout=timeout
        )
        self._overdue = found.overdue
        self._given_up += found.given_up
        return found.replies

    def _is_late(self, reply: Reply) -> bool:
        dropped = self.late_answers == "dropped" and reply.machine in self._overdue
        return dropped or super()._is_late(reply)

    def _counted(self, report: RoundReport) -> RoundReport:
        self._releases_left.made(self.participation)
        finished = len(self._releases_left.finished)
        if not self._patient or self._grid is None:
            return replace(report, finished=finished)
        return replace(
            report,
            lost=self._sampled - len(self._asked) + self._given_up,
            overdue=len(self._overdue),
            awaited=len(self._requests.machines),
            finished=finished,
        )

    # What is known before the first round.

    def _foresee_leaving(self, statements: Mapping[str, Mapping[str, Any]], done: int, num_rounds: int) -> None:
        """Say who leaves when; refuse a training for which too few would stay, unless it may run dry."""
        self._releases_left.take(statements)
        rounds = range(done + 1, num_rounds + 1)
        fewest = 0 if self.run_dry or not self._patient or done else self._attendance.needed(self.num_clients)
        stated = self._releases_left.stated
        self.leaving = foreseen(self._drawn, stated, self.machines.names, rounds, fewest)
        log_leaving(self.leaving)

    def _say_what_is_dropped(self) -> None:
        """Say what not waiting costs where a late answer is of no use."""
        most = self.clients_per_round - self._attendance.needed(self.num_clients)
        if self._patient and self.late_answers == "dropped" and most:
            log(
                WARNING,
                "A round waits for %d of %d machines. What comes later is dropped, and no other release carries it: of "
                "up to %d machines a round the budget of a release is spent for nothing.",
                *(self.clients_per_round - most, self.clients_per_round, most),
            )

    @property
    def _heard_per_round(self) -> int:
        """How many machines of a round enter the model, sooner or later, if no more are late than may be."""
        dropped = self._patient and self.late_answers == "dropped"
        return self._attendance.needed(self.num_clients) if dropped else self.clients_per_round
