"""A strategy: an update rule, and the rounds of a training around it, in their order.

A subclass is the rule: a frozen state of arrays, the query points it asks for, and a pure step from the sum of a
round's releases to the next state. The rounds are put together from a sampler (:mod:`.sampling`: whom a round asks,
how long it waits), a trust (:mod:`~murmurfl.strategies.aggregation.noisy`: whose noise is in a sum) and a checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ...privacy import ConfigurationError, protocol
from ...privacy.accounting.guarantee import Statements
from ...privacy.accounting.noise_forecast import Forecast, forecast_of
from ...privacy.machine.clipping import TrainingFigures, observing
from ..aggregation.masked import Masked
from ..aggregation.plain import Aggregator, Closed, Opened, Plain, RoundContext, RoundOutcome, Skipped
from ..callbacks.callback import Callback, CallbackList
from ..callbacks.central_evaluation import CentralEvaluation, EvaluateFunction
from ..callbacks.metrics_file import MetricsFile
from ..callbacks.result_folder import default_callbacks
from ..sums.secure_aggregation import Helpers
from ..sums.summation import Summation
from .checkpoint import load_checkpoint, save_checkpoint
from .guarded_grid import ReplyBounds, guarded
from .known_machines import (
    MachineDirectory,
    by_length_and_name,
    is_simulation,
    plain_names,
    restored_names,
)
from .observed import (
    PATIENCE,
    ClippingWatch,
    log_forecast,
    no_progress,
    require_progress,
)
from .options import (
    RoundOptions,
    centre_bytes,
    check_permitted,
    refuse_sums,
    session_of,
)
from .preflight import client_statements, wait_for_clients
from .replies import (
    STATEMENT_TIMEOUT_S,
    DirectMachines,
    Layout,
    Outcome,
    Reply,
    RoundReport,
    RoundRequest,
    Vector,
    array_record,
    is_masked,
    log_losses,
    model_vector,
    plain,
    read_outcome,
    request_messages,
    say_refusals,
    say_unlike,
    vector_size,
)
from .sampling import CohortSampler, ExhaustionSchedule, LateAnswers
from .validation import ReplyValidator

logger = logging.getLogger("flwr")

_TIMEOUT_S = 3600.0
_MOST_NAMED = 5

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class _Run:
    """What :meth:`ReleaseStrategy.start` was called with, and its result."""

    grid: Grid | DirectMachines
    initial_arrays: ArrayRecord
    num_rounds: int
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    result: Result = field(default_factory=Result)
    started: float = field(default_factory=time.monotonic)


class ReleaseStrategy(Strategy, ABC, Generic[StateT]):
    """A strategy whose machines answer with releases P_k - P_ack.

    Parameters
    ----------
    num_clients : int, optional
        M, the machines of the training; default all that are connected when it begins. Later ones take no part.
    clients_per_round : int, optional
        m, machines asked in a round, without replacement; default all.
    fraction_train, min_train_nodes : optional
        In place of ``clients_per_round``, as in FedAvg: the share of machines a round asks, and the fewest (default 2).
    min_available_nodes : int, optional
        The fewest connected clients with which a round begins once ``node_deadline_s`` has passed: a client that is off
        ends no training. Default half of ``clients_per_round``, rounded up, or the quorum if that is less. Without
        ``num_clients`` also, as in FedAvg, the fewest that the training begins with (default 2).
    quorum : float
        Share of ``clients_per_round`` whose answers end a round; 1, the default, waits for all, at most for the timeout
        of :meth:`start`. A client is not asked again before it has answered, and a late answer counts where it can
        (:attr:`late_answers`). Steps divide by ``clients_per_round`` however many answer, so that fewer answers are a
        smaller step with less noise, and no client's guarantee changes.
    over_selection : float
        A round asks this many times ``clients_per_round`` machines, >= 1. Steps divide by as many.
    excluded : collection of str
        Names of clients that the operator has taken out: they are not asked, and what they still send is not looked at.
        M, m and what helpers have signed stay. A resumed training may exclude others.
    seed : int, optional
        Seed of the sampler; default from the operating system.
    sampling : {"uniform", "balanced"}
        How a round's machines are drawn (:func:`~murmurfl.strategies.rounds.sampling.sample_machines`).
    session : str, optional
        Name of the training, letters and digits; default random. For every new session a machine opens a new private
        stream and reserves its whole budget share.
    node_deadline_s : float
        Longest wait for the quorum to be connected, in seconds. A training begins with all M, and goes on without those
        that are missing; it waits for each of them once, and again after they have answered.
    checkpoint : Path, optional
        Written after every round; a training whose file exists is resumed.
    largest_value : float
        Largest magnitude in an honest release (:attr:`murmurfl.privacy.NoisePlan.largest_value` of a public policy); a
        reply beyond it is malformed. The default only keeps sums finite: one broken machine can spoil the model.
    evaluate_every : int
        Rounds between central evaluations of the published model; the last round is always evaluated.
    allow_exhaustion : bool
        Whether machines may reach their cap, or the end of their samples, before the last round and refuse from then
        on. By default :meth:`start` refuses a training that asks a machine for more releases than it can make.
    callbacks : sequence of Callback
        What is called between rounds (:class:`~murmurfl.strategies.Callback`), in this order.
    secure_aggregation : SecureAggregation, optional
        Machines release under masks, and helpers open only sums. A round whose sum stays closed says why in its report;
        nothing of it is acknowledged, and machines carry over what they released.
    centre : ndarray of shape (k,), optional
        Centre of the features (:class:`~murmurfl.strategies.MeanOfFeatures`), sent with every request to machines that
        are configured for centring.
    permit : str, optional
        Permit of the session's owner (``murmurfl owner permit``), sent with every message to machines that require one.
        Without ``session`` the permit's first session is used. A resumed training may have a renewed permit.
    schema : str, optional
        Digest of the schema of records (``murmurfl schema FILE --digest``); machines that state another are not asked.
        Default any, with a warning where they differ.

    Notes
    -----
    A server that adds no noise need not be trusted: it computes post-processing of what machines released. Each release
    is aggregated at most once: a reply counts only if it was built on the last release aggregated for that machine, so
    a late original beside its carry-over is dropped. Without acknowledgements every release is a prefix sum that stands
    alone, and counts in one round only.
    """

    _QUERY_RECORDS: ClassVar[tuple[str, ...]] = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)

    options: Any
    """What the strategy takes, a :class:`~murmurfl.strategies.rounds.options.RoundOptions` or a dataclass of more."""
    state_type: ClassVar[type[Any]]
    acknowledges: ClassVar[bool] = True
    """Whether machines are told what was aggregated; if not, every release is P_k: all of the machine's prefix sum."""
    sums_suffice: ClassVar[bool] = True
    """Whether rounds need only the sum of releases, so that these may come under masks."""
    late_answers: ClassVar[LateAnswers] = "counted"
    """What becomes of an answer that comes after its round."""
    needs_all: ClassVar[bool] = False
    """Whether the rule's proof needs the answer of every client in every round; one that is off ends a training."""
    absence_costs: ClassVar[str] = ""
    """What a missing answer costs for good, said before the first round; empty where the next one mends it."""
    must_aggregate: ClassVar[bool] = True
    """Whether a training in which nothing was ever aggregated ends with :class:`NothingAggregatedError`."""
    foresees: ClassVar[bool] = True
    """Whether the noise in the model is forecast; not where the rounds make no model."""
    message_type_of_queries: ClassVar[str] = MessageType.QUERY
    """Type of the messages that ask machines for their names and statements."""
    aggregator: Aggregator
    """How the releases of a round become a sum."""

    client_line: ClassVar[str] = (
        "app = private_client_app(model, loss, samples, epsilon=..., rounds=...), or numpy_client_app(client_fn) "
        "around a client of murmurfl's."
    )
    """The ClientApp that machines must have, as code, for error messages."""

    def __init__(self, options: RoundOptions, *, aggregator: Aggregator | None = None) -> None:
        self.options = taken = options
        self.aggregator = Plain() if aggregator is None else aggregator
        self.session = session_of(taken.permit, taken.session)
        self.machines = MachineDirectory(
            taken.num_clients,
            taken.node_deadline_s,
            message_type=self.message_type_of_queries,
            fewest=taken.fewest,
            client=self.client_line,
            permit=taken.permit or "",
            schema=taken.schema or "",
        )
        strategy = type(self).__name__
        self.roll = CohortSampler(
            taken, self.machines, late_answers=self.late_answers, strategy=strategy, needs_all=self.needs_all
        )
        self.state: StateT | None = None
        self.acks: dict[str, int] = {}
        """The last release aggregated of each machine."""
        self.participation: dict[str, int | None] = {}
        """The number of the release aggregated of each machine that the last round asked, or None."""
        self.history: list[RoundReport] = []
        self.forecast: Forecast | None = None
        """Forecast of the noise in the model, from machines' statements before the first round; None without noise."""
        self._stated_before: Statements = {}
        self.callbacks: list[Callback] = list(taken.callbacks)
        """What is called between rounds, in this order."""
        self._hooks = CallbackList(self.callbacks)
        self.ended = ""
        """Why the training ended with the model it had before its last round; empty if it did not."""
        self.leaving: ExhaustionSchedule | None = None
        """Which machines leave before the end and when, from their statements before the first round."""
        self._clipping = ClippingWatch()
        self.training: dict[int, TrainingFigures] = self._clipping.rounds
        """What clipping did in each round; of simulated machines only, and not private."""
        self.checkpoint = None if taken.checkpoint is None else Path(taken.checkpoint)
        self.secure_aggregation = taken.secure_aggregation
        if self.secure_aggregation is not None:
            able = self.sums_suffice and self.acknowledges and not self.aggregator.adds_noise
            refuse_sums(self.secure_aggregation, "" if able else strategy)
            helpers = Helpers(self.secure_aggregation, self.machines, self.message_type_of_queries)
            self.aggregator = Masked(self.secure_aggregation, helpers, taken.largest_value)
        self._validator = ReplyValidator(
            self.aggregator,
            self.acks,
            acknowledges=self.acknowledges,
            comes_too_late=self.roll.drops,
            check_reply=None if type(self).check_reply is ReleaseStrategy.check_reply else self.check_reply,
            say_malformed=lambda name, problem: self._say_malformed(self._nodes.get(name, 0), problem),
        )
        self.roll.fewest_summed = self.aggregator.fewest_releases
        self.aggregator.join(self.session)
        self.aggregator.attach_checkpoint(self.checkpoint)
        if taken.num_clients is not None:
            self._settle(taken.num_clients)
        self.entries: dict[str, Any] = {} if taken.centre is None else {protocol.CENTRE: centre_bytes(taken.centre)}
        """Entries of every request beside the protocol's own; plain values."""
        self._grid: Grid | None = None  # None for machines that are asked without messages
        self._timeout = _TIMEOUT_S
        self._fresh_session = taken.session is None or bool(taken.permit)  # a permit may be renewed
        self._layout: Layout = []
        self._nodes: dict[str, int] = {}
        self._observed: Mapping[str, TrainingFigures] = {}
        self._start = ""
        self._reasons: list[str] = []
        self._not_excluded = ""

    @property
    def num_clients(self) -> int:
        """M; 0 until a training has begun with all connected machines."""
        return self.roll.num_clients

    @property
    def clients_per_round(self) -> int:
        """Machines a round asks, by which a step divides; 0 until :attr:`num_clients` is known."""
        return self.roll.clients_per_round

    @property
    def seed(self) -> int:
        """Seed of the sampler."""
        return self.roll.seed

    @property
    def excluded(self) -> Collection[str]:
        """Names of the clients that the operator has taken out."""
        return self.roll.excluded

    @property
    def stated(self) -> Statements:
        """The last statement of each client from before the first round, or before the first one after a resume."""
        return self._stated_before

    @property
    def skipped_noise(self) -> float | None:
        """Variance of the noise in the model over what it would be without the sums that were skipped.

        Of mechanisms as machines state them, with their usual options; None without such sums.
        """
        return self.aggregator.skipped_noise(self._stated_before, self.acks)

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

    def round_entries(self, server_round: int) -> dict[str, Any]:
        """Entries of a round's requests beside those that all rounds have; no guarantee depends on them."""
        return {}

    def next_state(self, state: StateT, release_sum: Vector, report: RoundReport) -> StateT:
        """The state after a round: :meth:`step`, unless a subclass's step also depends on the report."""
        return self.step(state, release_sum, report.server_round)

    @abstractmethod
    def model(self, state: StateT) -> Vector:
        """The model to publish."""

    @property
    def release_layout(self) -> Layout:
        """The arrays of a release; by default the model's."""
        return self._layout

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on; plain values."""
        entries = hashlib.sha256(repr(sorted(self.entries.items())).encode()).hexdigest()
        return {
            "strategy": type(self).__name__,
            **self.roll.config.plain,
            "seed": None if self.options.seed is None else self.seed,
            "sampling": self.roll.sampling,
            "session": None if self._fresh_session else self.session,
            **self.aggregator.settings(),
            **({"entries": entries} if self.entries else {}),
        }

    def asks_machines(self, server_round: int) -> bool:
        """Whether a round asks any machine; for subclasses in which some rounds are the server's own."""
        return True

    def check_reply(self, reply: Reply) -> bool:
        """Whether a well-formed reply may be aggregated; under secure aggregation its release cannot be looked at."""
        return True

    def check_report(self, report: RoundReport) -> None:
        """Refuse a round from whose replies the rule must not make a step."""

    @property
    def worth_keeping(self) -> bool:
        """Whether there is anything to save."""
        return True

    # A training, under Flower's interface.

    def start(  # type: ignore[override]
        self,
        grid: Grid | DirectMachines,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run the training, or resume it from its checkpoint, with the arguments of Flower's ``Strategy.start``.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Flower's grid, or machines of this process that are asked without messages.
        initial_arrays : ArrayRecord
            The model to start from, floating-point arrays.
        num_rounds : int
            T.
        timeout : float
            Seconds to wait for a round's replies; later ones count as lost.
        train_config : ConfigRecord, optional
            Sent along with every request; a private machine takes nothing from it.
        evaluate_config : ConfigRecord, optional
            Not used: machines do not evaluate.
        evaluate_fn : callable, optional
            Central evaluation of the published model, on data that is not private.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        CheckpointError
            If the checkpoint is damaged or of another training.
        OpeningError
            Under secure aggregation, if a sum cannot be opened, or wrong ones do not end; the training can be resumed
            from its checkpoint.
        ConfigurationError
            If a machine can make fewer releases than the rounds ask it for, unless ``allow_exhaustion``.
        NothingAggregatedError
            If no release was aggregated: after the first round in which all machines of a simulation refuse, after
            three such rounds of real ones, or at the end.

        Notes
        -----
        Before the first round the log says how much of the model will be noise; :attr:`forecast` keeps it. After the
        last one it says what machines guarantee, by what they stated before the first: every release that their caps
        allow in this training. What is asked of them besides, such as a private evaluation, has a statement of its own.
        Then it leaves a folder with the result (:class:`~murmurfl.strategies.ResultFolder`).
        """
        if self.history:
            raise ConfigurationError(
                f"Expected a new strategy, got one that has run {len(self.history)} rounds: make another, or resume "
                "from a checkpoint."
            )
        logger.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        self._ensure_state(initial_arrays)
        if not isinstance(grid, DirectMachines):
            self._grid = grid = guarded(grid)
            grid.bounds = ReplyBounds.of(self._layout, self.release_layout)
        self._timeout = timeout
        self._hooks = self._all_callbacks(grid, evaluate_fn)
        run = _Run(grid, initial_arrays, num_rounds, train_config or ConfigRecord(), evaluate_config or ConfigRecord())
        for server_round in range(self._begin(run) + 1, num_rounds + 1):
            if self.ended:
                logger.warning("The training ends after round %d of %d: %s.", server_round - 1, num_rounds, self.ended)
                break
            self._exclude(server_round - 1, num_rounds)
            metrics = self._run_round(server_round, run)
            if metrics is not None:
                run.result.train_metrics_clientapp[server_round] = metrics
            # Before anybody sees the new model: a round that is repeated after a crash was never published.
            self._save()
            self._after_round(server_round, grid, run.evaluate_config, timeout, run.result)
            if self._is_last(server_round, run):
                break
        self._end(run)
        return run.result

    def _begin(self, run: _Run) -> int:
        """Resume from a checkpoint, and ask clients for statements while nothing is spent; return the rounds done."""
        done = self._resume(run.result)
        self._exclude()
        released = done + self.aggregator.pending
        if released < run.num_rounds:
            self._preflight(run.grid, released, run.num_rounds)
        self._hooks.on_start(self, run.grid, run.num_rounds)
        if not done and (metrics := self._hooks.evaluate(self, 0, run.initial_arrays)) is not None:
            logger.info("Initial global evaluation results: %s", metrics)
            run.result.evaluate_metrics_serverapp[0] = metrics
        stops = done < run.num_rounds
        self.ended = self.aggregator.should_stop(self.history, self.skipped_noise) if stops else ""
        if done >= run.num_rounds or self.ended:
            self._publish(done, run)
        return done

    def _is_last(self, server_round: int, run: _Run) -> bool:
        """Publish and evaluate the model of a round, and call back; return True if the training ends with it."""
        evaluation, last, every = None, server_round == run.num_rounds, self.options.evaluate_every
        self.ended = "" if last else self.aggregator.should_stop(self.history, self.skipped_noise)
        evaluated = last or self.ended or (self._hooks.evaluates and not server_round % every)
        if evaluated:
            evaluation = self._publish(server_round, run)
        asked = not last and self._hooks.should_stop(self, server_round)
        if asked:
            self.ended = "it was asked to end"
        if asked and not evaluated:
            evaluation = self._publish(server_round, run)
        self._hooks.after_round(self, self.history[-1], evaluation)
        self.aggregator.check_pause()
        if self._requires_progress and no_progress(self.history, 1 if is_simulation(run.grid) else PATIENCE):
            require_progress(self.history, self._reasons)
        return last or asked

    def _end(self, run: _Run) -> None:
        """Say how the training ended."""
        logger.info("%s finished in %.1f s.", type(self).__name__, time.monotonic() - run.started)
        if self._requires_progress:
            require_progress(self.history, self._reasons)
        if (noise := self.skipped_noise) is not None:
            came = sum(report.aggregated for report in self.history) / (run.num_rounds * self.roll.heard_per_round)
            logger.warning(
                "%d sums were skipped: %.0f %% of the releases that were planned are in the model, and its noise has "
                "%.3g times the variance that was planned. Left out at the end: %s.",
                *(sum(bool(report.skipped) for report in self.history), 100 * came, noise),
                ", ".join(map(repr, sorted(self.roll.left_out))) or "nobody",
            )
        self._hooks.on_end(self, run.grid, run.result)

    @property
    def _requires_progress(self) -> bool:
        return self.must_aggregate and not self._hooks.handles_no_progress

    def _all_callbacks(self, grid: Grid | DirectMachines, evaluate_fn: EvaluateFunction | None) -> CallbackList:
        """The callbacks of the options, between those that every training has."""
        first: list[Callback] = [] if evaluate_fn is None else [CentralEvaluation(evaluate_fn)]
        # A rehearsal's machines are in this process: its rounds are nobody's.
        file = None if isinstance(grid, DirectMachines) else MetricsFile.from_environment(grid)
        first += [] if file is None else [file]
        last = [one for one in default_callbacks() if not any(isinstance(mine, type(one)) for mine in self.callbacks)]
        return CallbackList([*first, *self.callbacks, *last])

    def summary(self) -> None:
        """Log the strategy's settings."""
        logger.info("\t├──> Machines: %s", self.roll.config.sentence())
        for name, value in self.settings().items():
            if name not in ("strategy", "num_clients", "clients_per_round"):
                logger.info("\t├──> %s: %s", name, value)
        logger.info("\t└──> Checkpoint: %s", self.checkpoint or "none")

    def ask_privacy(self, grid: Grid | DirectMachines, timeout: float | None = None) -> Mapping[str, Mapping[str, Any]]:
        """The :class:`~murmurfl.privacy.PrivacyStatement` of each machine that answers, as plain values by name.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default the timeout of :meth:`start`, and at most 60.

        Notes
        -----
        Statements come from the machines' own ledgers and are independent of their data; a server cannot check them.
        """
        return self._statements(grid, min(self._timeout, STATEMENT_TIMEOUT_S) if timeout is None else timeout)

    # Before the first round: who is there, and machines' statements.

    def _statements(
        self, grid: Grid | DirectMachines, timeout: float, *, few: bool = False
    ) -> Mapping[str, Mapping[str, Any]]:
        """The statements of all connected machines, or of a few of many."""
        return client_statements(
            *(grid, self.machines, self.roll),
            session=self.session,
            num_parameters=vector_size(self.release_layout),
            message_type=self.message_type_of_queries,
            timeout=timeout,
            few=few,
        )

    def _wait_for_clients(self, grid: Grid | DirectMachines) -> None:
        """Wait until enough machines can be asked; the first time for all, whose names are learned then."""
        begun = bool(self.machines.names)
        wait_for_clients(grid, self.machines, self.roll, self.aggregator)
        if not self.clients_per_round:
            self._settle(len(self.machines.names))
        if not begun:
            self._exclude()

    def _exclude(self, done: int = 0, num_rounds: int = 0) -> None:
        """Take out whom the operator excludes now; after ``done`` rounds, with who leaves when worked out anew."""
        if not self.machines.names:  # before anybody was met
            return
        try:
            if not self.roll.exclude({*self.options.excluded, *self._hooks.exclude(self)}):
                return
        except ConfigurationError as error:
            if not done:
                raise
            if str(error) != self._not_excluded:
                self._not_excluded = str(error)
                logger.warning("Nobody else is excluded. %s", error)
            return
        names = ", ".join(map(repr, sorted(self.roll.excluded))) or "nobody"
        logger.warning("Excluded from now on: %s. %d clients are left.", names, len(self.roll.askable))
        if done:
            self.leaving = self.roll.foresee_again(done, num_rounds)

    def _settle(self, machines: int) -> None:
        needed = self.roll.settle(machines)
        self.aggregator.settle(self.clients_per_round, needed)

    def _preflight(self, grid: Grid | DirectMachines, done: int, num_rounds: int) -> None:
        """Ask machines, before anything is spent, how many rounds they last and how loud their noise is."""
        exhausts = self.options.allow_exhaustion
        if exhausts and not self.foresees:
            return
        self._wait_for_clients(grid)
        simulated = isinstance(grid, DirectMachines) or self.machines.several_on_a_node
        # For how long a training lasts all machines matter; for how loud the noise is a few of them will do.
        statements = self._statements(grid, min(self._timeout, STATEMENT_TIMEOUT_S), few=exhausts and simulated)
        # Who is gone since has releases in the model, and its word counts as before.
        self._stated_before = {**self._stated_before, **statements}
        if not exhausts:
            self._check_statements(statements)
            if simulated or self.roll.config.waits_for_all:
                self.roll.check_rounds(statements, done, num_rounds, self.asks_machines)
        if not simulated:
            self.leaving = self.roll.foresee(statements, done, num_rounds, allow_exhaustion=exhausts)
        if not done:
            self.roll.say_what_absence_costs(type(self).__name__, self.absence_costs)
        if self.foresees:
            self.roll.say_what_is_dropped()
            self._forecast(statements, num_rounds)

    def _forecast(self, statements: Statements, num_rounds: int) -> None:
        """Log how much of the model will be noise."""
        machines = self.num_clients - len(self.roll.excluded)
        self.forecast = forecast_of(
            self.aggregator.read_noise(statements),
            num_parameters=vector_size(self.release_layout),
            machines=machines,
            per_round=min(self.roll.heard_per_round, machines),
            rounds=num_rounds,
        )
        if self.forecast is not None:
            self.forecast = self._hooks.on_forecast(self, self.forecast)
        log_forecast(self.forecast)
        if self.forecast is not None:
            self.aggregator.log_forecast(self.forecast)

    def _check_statements(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse machines that a subclass cannot work with."""

    # A round: plan, replies, step.

    def _run_round(self, server_round: int, run: _Run) -> MetricRecord | None:
        """Ask the machines of a round and take the step; returns the counts of the round."""
        grid = run.grid
        if self.aggregator.pending:
            self._grid = None if isinstance(grid, DirectMachines) else grid
            return self._finish_round(self.aggregator.open_pending(self._context())).metrics
        if isinstance(grid, DirectMachines):
            self._grid = None
            self._wait_for_clients(grid)
            return self._take_round(server_round, grid.answer(self._plan_round(server_round, None))).metrics
        messages = self.configure_train(server_round, run.initial_arrays, run.train_config, grid)
        with observing() as observer:  # simulated machines of this process
            replies = self.roll.exchange(
                *(grid, messages, self._nodes),
                server_round=server_round,
                least_releases=self.aggregator.fewest_releases,
                timeout=self._timeout,
            )
        self._observed = observer.machines
        return self.aggregate_train(server_round, replies)[1]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this round's machines and ask each of them; waits for enough of them to be connected.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes: all of a training that begins, later
            ``min_available_nodes``.
        """
        self._ensure_state(arrays)
        self._grid = grid
        self._wait_for_clients(grid)
        self._nodes = self.machines.node_map()
        request = self._plan_round(server_round, self._nodes)
        points = {key: self._asked_at(point) for key, point in zip(self._QUERY_RECORDS, request.points, strict=False)}
        return request_messages(config, request, points, self._nodes)

    def _sample(self, server_round: int) -> list[str]:
        return self.roll.sample(server_round) if self.asks_machines(server_round) else []

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        """The request for a round's machines, of those that can be reached (None: all can)."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a round is planned.")
        self.roll.give_up(reachable, self._timeout)
        names = self._sample(server_round)
        acks = {name: self._validator.ack(name) for name in names if reachable is None or name in reachable}
        said = self.machines.entries
        if said:
            check_permitted(said[protocol.PERMIT], self.session)  # of a training that was begun under another one
        request = RoundRequest(
            *(server_round, self.session, acks, self.acks if self.acknowledges else {}),
            *(self.query_points(self.state), {**self.entries, **said, **self._entries_of(server_round)}),
            sums_suffice=self.sums_suffice and not self.aggregator.adds_noise,
            skipped=self.aggregator.skipped,
        )
        self.roll.ask(names, acks)
        self.aggregator.asked(acks.keys())
        self._before_asking()
        return request

    def _turn(self, server_round: int) -> int:
        """Which round of the update rule a round is: one that was skipped does not count."""
        return server_round - sum(bool(report.skipped) for report in self.history)

    def _entries_of(self, server_round: int) -> dict[str, Any]:
        turn = self._turn(server_round)
        return {**({protocol.WEIGHED_AS: turn} if turn < server_round else {}), **self.round_entries(turn)}

    def _before_asking(self) -> None:
        """Write what must be known before a machine is asked."""
        self.aggregator.before_asking(self._save)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the releases that can be believed and take one step of the update rule."""
        asked = self.roll.answering(self._nodes)
        layout, masked, replies = self.release_layout, self.aggregator.masked, list(replies)
        say_unlike(server_round, sum(is_masked(reply) is (not masked) for reply in replies), masked=masked)
        say_refusals(server_round, replies, self._reasons)
        outcomes: list[Outcome] = []
        for reply in replies:
            outcomes.append(read_outcome(reply, layout, asked, self.options.largest_value, masked=masked))
            if outcomes[-1] is None and not reply.has_error():  # else it was said already
                self._say_malformed(reply.metadata.src_node_id, "its arrays, values or entries are no release's")
        # In the order of names: the same sum on every engine (and on the machines' grid any order gives it).
        outcomes.sort(
            key=lambda outcome: by_length_and_name(outcome.machine) if isinstance(outcome, Reply) else (0, "")
        )
        report = self._take_round(server_round, outcomes)
        return self._record(self._published()), report.metrics

    def _take_round(self, server_round: int, outcomes: Iterable[Outcome]) -> RoundReport:
        """Believe what can be believed and take one step of the update rule."""
        if self.state is None:
            raise ConfigurationError("Expected configure_train before aggregate_train.")
        done = self.history[-1].server_round if self.history else 0
        if server_round != done + 1:
            raise ConfigurationError(f"Expected round {done + 1} after round {done}, got round {server_round}.")
        size = vector_size(self.release_layout)
        summation = self.aggregator.summation(size)
        screened = self.aggregator.screened(outcomes, self._context(), size)
        report = self._count_replies(server_round, screened, summation)
        releases = {name: release for name, release in self.participation.items() if release is not None}
        return self._finish_round(self.aggregator.aggregate(summation, releases, report, self._context()))

    def _count_replies(self, server_round: int, outcomes: Iterable[Outcome], summation: Summation) -> RoundReport:
        """Add the releases that count to a sum; return the report of the round."""
        tally = self._validator.add_valid(outcomes, summation, self._stated_before, self._observed)
        self._clipping.take(server_round, tally.figures)
        self.participation = {name: tally.aggregated.get(name) for name in self.roll.asked} | tally.aggregated
        report = tally.report(server_round, self.roll.sampled)
        report = self.roll.counted(report, self.participation, direct=self._grid is None)
        self.aggregator.record_participation(self.participation)
        if not self.aggregator.masked:  # else it is not over yet
            log_losses(report)
        self.check_report(report)
        return report

    def _say_malformed(self, node: int, problem: str) -> None:
        if self._grid is not None:
            guarded(self._grid).say_malformed(node, problem)

    def _context(self) -> RoundContext:
        """What the aggregator needs of the round."""
        return RoundContext(
            session=self.session,
            timeout=self._timeout,
            grid=self._grid,
            acks=self.acks,
            asked=self.roll.asked,
            askable=self.roll.askable,
            nodes=self._nodes,
            entries=self.machines.entries,
            layout=self.release_layout,
            is_late=self._validator.is_late,
            save=self._save,
        )

    def _finish_round(self, outcome: RoundOutcome) -> RoundReport:
        """Acknowledge the releases of a round, and take the step along their sum."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a step is taken.")
        report, total = outcome.report, None
        if isinstance(outcome, Opened):
            weight = self._weight(outcome)
            total = outcome.total if weight == 1.0 else weight * outcome.total
            if self.aggregator.masked:
                log_losses(report)
        self.acks.update(outcome.acknowledged)
        self.roll.left_out = frozenset(self.aggregator.excluded)
        taken = {} if isinstance(outcome, Closed) else outcome.releases
        self.participation = {name: taken.get(name) for name in outcome.asked} | dict(taken)  # late ones, too
        self.aggregator.check_round(report.server_round)
        if not isinstance(outcome, Skipped):  # else the next round asks for the same step again
            total = np.zeros(vector_size(self.release_layout)) if total is None else total
            turn = self._turn(report.server_round)
            self.state = self.next_state(self.state, total, replace(report, server_round=turn))
        self.history.append(report)
        return report

    def _weight(self, outcome: Opened) -> float:
        """By what a round's sum is multiplied: a step divides by the machines of a round that leaves nobody out."""
        # Other strategies divide by what came; and of streams a sum that weighs more than the next would leave noise.
        divides = type(self).next_state is ReleaseStrategy.next_state and outcome.stands_alone
        if not (self.roll.left_out and outcome.report.asked and divides):
            return 1.0
        asked = min(self.clients_per_round, len(self.roll.askable) + len(self.roll.left_out))  # if nobody were left out
        return max(asked / outcome.report.asked, 1.0)

    # After a round.

    def _save(self) -> None:
        if self.checkpoint is None or self.state is None or not self.worth_keeping:
            return
        with self.aggregator.saving(self.history[-1].server_round if self.history else 0):
            state = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(self.state)}  # type: ignore[arg-type]
            save_checkpoint(self.checkpoint, self._identity(), state | self._kept())

    def _after_round(
        self, server_round: int, grid: Grid | DirectMachines, config: ConfigRecord, timeout: float, result: Result
    ) -> None:
        """Ask machines for what a subclass needs beside releases."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No requests: a machine's loss or accuracy has no noise. Use ``evaluate_fn``."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None; see :meth:`configure_evaluate`."""
        return None

    def _publish(self, server_round: int, run: _Run) -> MetricRecord | None:
        """Put the model into the result and evaluate it centrally; returns the metrics."""
        result = run.result
        result.arrays = self._record(self._published())
        evaluation = self._hooks.evaluate(self, server_round, result.arrays)
        if evaluation is not None:
            # The lines of Flower's own strategies.
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, run.num_rounds)
            logger.info("Global evaluation")
            logger.info("\t└──> MetricRecord: %s", evaluation)
            result.evaluate_metrics_serverapp[server_round] = evaluation
        return evaluation

    # The checkpoint.

    def _kept(self) -> dict[str, Any]:
        """Contents of a checkpoint beside the update rule's state, for :meth:`_restore`."""
        return {
            "server_round": self.history[-1].server_round if self.history else 0,
            "acks": self.acks,
            "machines": plain_names(self.machines.names),
            "seed": self.seed,
            "session": self.session,
            "history": [plain(report) for report in self.history],
            "statements": self._stated_kept(),
            **self.aggregator.state(),
        }

    def _stated_kept(self) -> dict[str, dict[str, Any]]:
        """Return what clients stated, for a resumed training of which some are gone; without messages nobody is."""
        if self._grid is None or isinstance(self._grid, DirectMachines):
            return {}
        return {
            name: {key: value for key, value in statement.items() if isinstance(value, str | int | float)}
            for name, statement in self._stated_before.items()
        }

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on: settings, layout and initial model."""
        layout = [[name, list(shape), str(dtype)] for name, shape, dtype in self._layout]
        return {**self.settings(), "layout": layout, "start": self._start, **self.aggregator.identity()}

    def _resume(self, result: Result) -> int:
        """Load the checkpoint if there is one; returns the number of rounds done."""
        self.aggregator.look_for_checkpoint()
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0
        names = [f.name for f in fields(self.state_type)]
        expected = {f"state.{name}" for name in names} | set(self._kept()) - {"statements"}  # older ones lack it
        saved = load_checkpoint(self.checkpoint, self._identity(), expected)
        self.aggregator.check_saved(saved)
        self.state = self.state_type(**{name: saved[f"state.{name}"] for name in names})
        self._restore(saved)
        for report in self.history:
            result.train_metrics_clientapp[report.server_round] = report.metrics
        result.arrays = self._record(self._published())
        logger.info("Resuming after round %d from %s.", saved["server_round"], self.checkpoint)
        if self.aggregator.adds_noise:
            self._save()  # before anybody is asked: it shows that the file can be written, and stops any other server
        return int(saved["server_round"])

    def _restore(self, saved: Mapping[str, Any]) -> None:
        self.acks.clear()
        self.acks.update({str(name): int(ack) for name, ack in saved["acks"].items()})
        self.machines.restore(restored_names(saved["machines"]))
        if self.machines.names:  # else it was saved before any machine was met
            self._settle(len(self.machines.names))
        self.roll.seed, self.session = int(saved["seed"]), str(saved["session"])
        self.aggregator.join(self.session)
        self.history = [RoundReport(**report) for report in saved["history"]]
        self._stated_before = saved.get("statements", {})
        self.aggregator.restore(saved, self.machines.names)
        self.roll.left_out = frozenset(self.aggregator.excluded)

    # The model.

    def _ensure_state(self, arrays: ArrayRecord) -> StateT:
        if self.state is None:
            self._layout, start = model_vector(arrays)
            self._start = hashlib.sha256(start.tobytes()).hexdigest()
            self.state = self.initial_state(start)
            self.aggregator.shape(vector_size(self._layout), vector_size(self.release_layout))
        return self.state

    def _published(self) -> Vector:
        return self.model(self.state)  # type: ignore[arg-type]

    def _record(self, vector: Vector) -> ArrayRecord:
        return array_record(vector, self._layout)

    def _asked_at(self, point: Vector) -> ArrayRecord:
        """The arrays of a query point in a request."""
        return self._record(point)
