"""The rounds of a training, whatever carries the messages: what a round asks, which replies count, and one step.

A subclass is an update rule: a frozen state of arrays, the query points it asks for, and a pure step from the sum of a
round's releases to the next state. :mod:`.strategy` adds Flower's grid.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from logging import WARNING
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import ConfigurationError, protocol
from ...privacy.accounting.noise_forecast import Forecast, StatedNoise
from ...privacy.machine.clipping_figures import TrainingFigures
from ..sums.opening_round import Helpers
from ..sums.release_sum import ReleaseSum, Summation
from ..sums.secure_aggregation import SecureAggregation
from ..sums.secure_rounds import SecureRounds
from ..sums.summation import CohortSum
from .attendance import Attendance
from .carried_permit import session_of
from .clipping_watch import ALL_MACHINES, ClippingWatch
from .flower_arguments import refuse_arguments
from .forecast_log import read_noise
from .known_machines import MachineDirectory
from .layout import Layout, Vector, array_record, model_vector, vector_size
from .options import OnRound, centre_bytes, check_rounds_options, refuse_sums
from .replies import LARGEST_VALUE, Outcome, Refusal, Reply, RoundReport, RoundRequest, SummedReplies, log_losses
from .sampling import Sampling, sample_machines

StateT = TypeVar("StateT")

_TIMEOUT_S = 3600.0


class Rounds(ABC, Generic[StateT]):
    """State and rounds of a training; the base of :class:`~murmurfl.strategies.ReleaseStrategy`.

    Parameters are described there.
    """

    state_type: ClassVar[type[Any]]
    acknowledges: ClassVar[bool] = True
    """Whether machines are told what was aggregated; if not, every release is P_k: all of the machine's prefix sum."""
    sums_suffice: ClassVar[bool] = True
    """Whether the rounds need nothing of releases but their sum, so that they may come under masks."""
    must_aggregate: bool = True
    """Whether a training in which nothing was ever aggregated ends with an error; not where another one says more."""
    foresees: ClassVar[bool] = True
    """Whether what noise leaves of the model is forecast; not where the rounds make no model."""
    message_type_of_queries: ClassVar[str] = MessageType.QUERY
    """The type of the messages in which machines are asked who they are and what they have spent."""

    client_line: ClassVar[str] = (
        "app = private_client_app(model, loss, samples, epsilon=..., rounds=...), or numpy_client_app(client_fn) "
        "around a client of murmurfl's."
    )
    """What the machines' ClientApp must be, as code: for those who meet one that is not."""

    def __init__(
        self,
        *,
        num_clients: int | None = None,
        clients_per_round: int | None = None,
        fraction_train: float | None = None,
        min_train_nodes: int | None = None,
        min_available_nodes: int | None = None,
        wait_for: float = 1.0,
        ask: float = 1.0,
        seed: int | None = None,
        sampling: Sampling = "uniform",
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        evaluate_every: int = 1,
        run_dry: bool = False,
        on_round: OnRound | None = None,
        secure_aggregation: SecureAggregation | None = None,
        centre: NDArray[np.floating] | None = None,
        permit: str | None = None,
        schema: str | None = None,
        **others: object,
    ) -> None:
        refuse_arguments(type(self), others)
        counts = (num_clients, clients_per_round, fraction_train, min_train_nodes, min_available_nodes)
        self._attendance = Attendance(*counts, wait_for, ask)
        check_rounds_options(sampling, session, evaluate_every)
        if not largest_value > 0:
            raise ConfigurationError(f"Expected largest_value > 0, got {largest_value!r}.")
        self.num_clients = num_clients or 0
        """M; 0 as long as it is not known, which it is when a training begins."""
        self.clients_per_round = 0
        """How many a round asks, and what a step divides by; 0 if not known yet."""
        self.seed = secrets.randbits(63) if seed is None else seed
        self.sampling: Sampling = sampling
        self.session = session_of(permit, session)
        self.machines = MachineDirectory(
            num_clients,
            node_deadline_s,
            message_type=self.message_type_of_queries,
            fewest=self._attendance.fewest,
            client=self.client_line,
            permit=permit or "",
            schema=schema or "",
        )
        self.state: StateT | None = None
        self.acks: dict[str, int] = {}
        """The last release aggregated of each machine."""
        self.participation: dict[str, int | None] = {}
        """The machines asked in the last round, and the number of the release aggregated of each, or None."""
        self.history: list[RoundReport] = []
        self.forecast: Forecast | None = None
        """What the noise will leave of the model, as machines stated it before the first round; None without noise."""
        self._clipping = ClippingWatch()
        self.training: dict[int, TrainingFigures] = self._clipping.rounds
        """What clipping did in each round; of simulated machines only, and not private."""
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.largest_value = float(largest_value)
        self.evaluate_every = evaluate_every
        self.run_dry = run_dry
        self.secure_aggregation = secure_aggregation
        self._secure: SecureRounds | None = None
        if secure_aggregation is not None:
            refuse_sums(secure_aggregation, "" if self.sums_suffice and self.acknowledges else type(self).__name__)
            helpers = Helpers(secure_aggregation, self.machines, self.message_type_of_queries)
            self._secure = SecureRounds(secure_aggregation, helpers, self.largest_value)
        if num_clients is not None:
            self._settle(num_clients)
        self.entries: dict[str, Any] = {} if centre is None else {protocol.CENTRE: centre_bytes(centre)}
        """What every request says beside the protocol's own entries; plain values."""
        self._grid: Grid | None = None  # None for machines that are asked without messages
        self._timeout = _TIMEOUT_S
        self._fresh_seed = seed is None
        self._fresh_session = session is None or bool(permit)  # a permit may be renewed
        self._on_round = on_round
        self._layout: Layout = []
        self._asked: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._sampled = 0
        self._observed: Mapping[str, TrainingFigures] = {}
        self._start = ""
        self._reasons: list[str] = []
        self._made()

    def _made(self) -> None:
        """What a class between this one and its strategies has of its own; they have their options from here."""

    # The update rule.

    @abstractmethod
    def initial_state(self, start: Vector) -> StateT:
        """The state before the first round, from the initial model as one vector."""

    @abstractmethod
    def query_points(self, state: StateT) -> tuple[Vector, ...]:
        """The points machines are asked to compute gradients at."""

    @abstractmethod
    def step(self, state: StateT, release_sum: Vector, server_round: int) -> StateT:
        """The next state from the sum of a round's releases: pure."""

    def next_state(self, state: StateT, release_sum: Vector, report: RoundReport) -> StateT:
        """The state after a round: :meth:`step`; for subclasses whose step also depends on what the sum is made of."""
        return self.step(state, release_sum, report.server_round)

    @abstractmethod
    def model(self, state: StateT) -> Vector:
        """The model to publish."""

    @property
    def release_layout(self) -> Layout:
        """The arrays of a release: the model's, where machines send nothing else."""
        return self._layout

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on; plain values."""
        secure = self.secure_aggregation
        return {
            "strategy": type(self).__name__,
            **self._attendance.settings,
            "seed": None if self._fresh_seed else self.seed,
            "sampling": self.sampling,
            "session": None if self._fresh_session else self.session,
            **({} if secure is None else {"secure_aggregation": secure.settled}),
            **(
                {"entries": hashlib.sha256(repr(sorted(self.entries.items())).encode()).hexdigest()}
                if self.entries
                else {}
            ),
        }

    def _stated_noise(self, statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
        """The noise of each machine's releases in all, by its own words; of a trusted server, its part of the noise."""
        return read_noise(statements)

    def check_reply(self, reply: Reply) -> bool:
        """Whether a well-formed reply may be aggregated; for subclasses that expect more of their machines.

        Under secure aggregation a reply has no release that could be looked at, on the cohort engine neither.
        """
        return True

    def _settle(self, machines: int) -> None:
        """Take note of how many machines the training has."""
        self.num_clients, self.clients_per_round = machines, self._attendance.asked(machines)
        if self._secure is not None:
            self._secure.settle(self.clients_per_round)

    # A round: its plan, what came back, and the step.

    def _sample(self, server_round: int) -> list[str]:
        """The machines to ask in a round."""
        return sample_machines(self.machines.names, self.clients_per_round, self.seed, server_round, self.sampling)

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        """Sample the machines of a round; what to ask those of them that can be reached (None: all can)."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a round is planned.")
        names = self._sample(server_round)
        self._sampled = len(names)
        self._asked = {name: self._ack(name) for name in names if reachable is None or name in reachable}
        aggregated = self.acks if self.acknowledges else {}
        points = self.query_points(self.state)
        asked = (server_round, self.session, self._asked, aggregated, points, self.entries)
        return RoundRequest(*asked, sums_suffice=self.sums_suffice)

    def _ack(self, name: str) -> int:
        """What a machine is told was aggregated of it."""
        return self.acks.get(name, 0) if self.acknowledges else 0

    def _take_round(self, server_round: int, outcomes: Iterable[Outcome]) -> RoundReport:
        """Believe what can be believed and take one step of the update rule."""
        if self.state is None:
            raise ConfigurationError("Expected configure_train before aggregate_train.")
        done = self.history[-1].server_round if self.history else 0
        if server_round != done + 1:
            raise ConfigurationError(f"Expected round {done + 1} after round {done}, got round {server_round}.")
        size = vector_size(self.release_layout)
        if self._secure is None:
            release_sum = ReleaseSum(size)
            report = self._believe(server_round, outcomes, release_sum)
            return self._step(report, release_sum.total())
        cohort, direct = CohortSum(size), self._grid is None
        screened = self._secure.screened(outcomes, self.session, size, self._is_late, direct=direct)
        report = self._believe(server_round, screened, cohort)
        self._secure.hold(cohort, report, self._asked)
        return self._open_held(self._secure)

    def _open_held(self, secure: SecureRounds, *, resumed: bool = False) -> RoundReport:
        """Have the set of a round opened, and take the step; also of a round that was interrupted there."""
        held = secure.held
        if held is None:
            raise ConfigurationError("Expected a set of releases before it is opened.")
        closed, total = secure.too_few(held), np.zeros(held.total.size)
        if not closed and not resumed:  # else it may be open at a helper already, and the round must not be closed
            if held.sealed:
                # Before any helper is asked: once it may be open, there must never be another one in its place.
                self._save()
            closed = secure.greet(self._grid, held)
        if not closed:
            opened = secure.open(self._grid, self.session, held, self._timeout)
            closed, total = (opened, total) if isinstance(opened, str) else ("", opened)
        report = RoundReport(**held.report)
        if closed:
            report = replace(report, aggregated=0, samples=0, unopened=report.aggregated, closed=closed)
            log(WARNING, "Round %d is closed: %s. Machines carry over what they released.", held.server_round, closed)
        else:
            secure.opened(held)
            self.acks.update(held.releases)
            log_losses(report)
        taken = {} if closed else held.releases
        self.participation = {name: taken.get(name) for name in held.asked} | taken
        secure.held = None
        return self._step(report, total)

    def _step(self, report: RoundReport, release_sum: Vector) -> RoundReport:
        """The step of a round that is over."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a step is taken.")
        self.state = self.next_state(self.state, release_sum, report)
        self.history.append(report)
        return report

    def _believe(self, server_round: int, outcomes: Iterable[Outcome], release_sum: Summation) -> RoundReport:
        """Add the releases that can be believed to ``release_sum``, one after the other; the report of the round."""
        aggregated: dict[str, int] = {}
        refused: Counter[str] = Counter()
        late = malformed = samples = 0
        figures: dict[str, TrainingFigures] = {}
        for outcome in outcomes:
            if isinstance(outcome, TrainingFigures):
                figures[ALL_MACHINES] = outcome
            elif isinstance(outcome, Refusal):
                refused[protocol.REFUSAL_NAMES.get(outcome.code, f"error-{outcome.code}")] += 1
            elif isinstance(outcome, SummedReplies):
                self._check_summed(outcome, aggregated)
                release_sum.add_sum(outcome)
                taken = dict(zip(outcome.machines, outcome.releases, strict=True))
                if self._secure is None:
                    self.acks.update(taken)
                aggregated.update(taken)
                samples += sum(outcome.samples)
            elif outcome is None or not self.check_reply(outcome if self._secure is None else outcome.hidden):
                malformed += 1
            elif outcome.machine in aggregated or self._is_late(outcome):
                late += 1
            else:
                release_sum.add(outcome)
                if self._secure is None:  # else it counts once it is opened
                    self.acks[outcome.machine] = outcome.release
                aggregated[outcome.machine] = outcome.release
                samples += outcome.samples
                found = self._observed.get(outcome.machine) or TrainingFigures.read(outcome.metrics)
                if found is not None:
                    figures[outcome.machine] = found
        self._clipping.take(server_round, figures)
        self.participation = {name: aggregated.get(name) for name in self._asked} | aggregated  # late ones, too
        answered = len(aggregated) + late + malformed + sum(refused.values())
        report = RoundReport(
            server_round=server_round,
            asked=self._sampled,
            aggregated=len(aggregated),
            lost=max(self._sampled - answered, 0),
            late=late,
            malformed=malformed,
            refused=dict(sorted(refused.items())),
            samples=samples,
        )
        report = self._counted(report)
        if self._secure is None:  # else it is not over yet
            log_losses(report)
        return report

    def _counted(self, report: RoundReport) -> RoundReport:
        """A report with what only those who sent the requests know."""
        return report

    def _check_summed(self, replies: SummedReplies, aggregated: Mapping[str, int]) -> None:
        """Refuse a sum with a release in it that does not count: nobody can take it out again."""
        # Of many machines in every round: no object for each, and nothing asked of a check that accepts everything.
        looks = type(self).check_reply is not Rounds.check_reply
        checked = (self.check_reply(reply) for reply in replies.each()) if looks else repeat(True)
        numbers = zip(replies.machines, replies.releases, replies.acks, checked, strict=False)
        for machine, release, ack, accepted in numbers:
            last = self.acks.get(machine, 0)
            if machine in aggregated or ack != (last if self.acknowledges else 0) or release <= last or not accepted:
                raise ConfigurationError(
                    f"Expected a sum of releases that all count, got one with release {release} of machine "
                    f"{machine!r} in it, which does not: an engine must hand it in by itself."
                )

    def _is_late(self, reply: Reply) -> bool:
        """Whether another release of the machine was aggregated since this one was asked for.

        A reply contains everything after the acknowledgement it was built on. Beside a reply that was aggregated since,
        it would count a part of that twice.
        """
        return reply.ack != self._ack(reply.machine) or reply.release <= self.acks.get(reply.machine, 0)

    # The model.

    def _ensure_state(self, arrays: ArrayRecord) -> StateT:
        """The state; made from the initial arrays if there is none yet."""
        if self.state is None:
            self._layout, start = model_vector(arrays)
            self._start = hashlib.sha256(start.tobytes()).hexdigest()
            self.state = self.initial_state(start)
        return self.state

    def _published(self) -> Vector:
        return self.model(self.state)  # type: ignore[arg-type]

    def _record(self, vector: Vector) -> ArrayRecord:
        return array_record(vector, self._layout)

    def _asked_at(self, point: Vector) -> ArrayRecord:
        """A query point as requests have it: the arrays of a model, where it says nothing else."""
        return self._record(point)

    def _save(self) -> None:
        """Write a checkpoint, where there is one (:mod:`.resuming`)."""
