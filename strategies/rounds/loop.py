"""The loop of a training: its rounds in the order that guarantees need, and what happens between them.

Clients are asked for statements while nothing is spent. A checkpoint is written before anything of a round is
published, and callbacks come last: no guarantee depends on them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ...privacy.accounting.guarantee import Statements
from ...privacy.accounting.noise_forecast import Forecast, forecast_of
from ...privacy.errors import ConfigurationError
from ...privacy.release.clipping import TrainingFigures
from ..aggregation.masked import Masked
from ..aggregation.plain import Aggregator, Plain
from ..callbacks.callback import Callback, CallbackList
from ..callbacks.central_evaluation import CentralEvaluation, EvaluateFunction
from ..callbacks.metrics_file import MetricsFile
from ..callbacks.result_folder import default_callbacks
from ..sums.secure_aggregation import Helpers
from .checkpoint import load_checkpoint, save_checkpoint
from .client_registry import ClientRegistry, is_simulation, plain_names, restored_names
from .exchange import RoundExchange
from .exhaustion import ExhaustionSchedule, check_rounds
from .guarded_grid import ReplyBounds, guarded
from .in_flight import InFlightRequests
from .observed import (
    PATIENCE,
    ClippingWatch,
    DivergenceWatch,
    log_forecast,
    log_simulated_records,
    no_progress,
    require_progress,
)
from .options import RoundOptions, input_entries, refuse_sums, session_of
from .participation import LateAnswers
from .preflight import (
    client_statements,
    foresee,
    log_absence_costs,
    log_dropped,
    plain_statements,
    wait_for_clients,
)
from .replies import (
    STATEMENT_TIMEOUT_S,
    DirectReplies,
    Layout,
    RoundReport,
    Vector,
    array_record,
    model_vector,
    plain,
    vector_size,
)
from .rule import Rule
from .sampling import CohortSampler

logger = logging.getLogger("flwr")

_TIMEOUT_S = 3600.0

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Run:
    """Arguments of :meth:`TrainingLoop.start`, and its result."""

    grid: Grid | DirectReplies
    initial_arrays: ArrayRecord
    num_rounds: int
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    result: Result = field(default_factory=Result)
    started: float = field(default_factory=time.monotonic)

    @cached_property
    def direct(self) -> DirectReplies | None:
        """The clients that are asked without messages; None where there are messages."""
        return self.grid if isinstance(self.grid, DirectReplies) else None


class TrainingLoop(Strategy, Generic[StateT]):
    """Base class for the rounds of a training under Flower's interface."""

    acknowledges: ClassVar[bool] = True
    """Whether clients are told what was aggregated; if not, every release is P_k: all of the client's prefix sum."""
    sums_suffice: ClassVar[bool] = True
    """Whether rounds need only the sum of releases, so that these may come under masks."""
    late_answers: ClassVar[LateAnswers] = "counted"
    """Treatment of an answer that comes after its round."""
    needs_all: ClassVar[bool] = False
    """Whether the rule's proof needs the answer of every client in every round; one that is off ends a training."""
    absence_costs: ClassVar[str] = ""
    """Permanent cost of a missing answer, said before the first round; empty where the next answer makes up for it."""
    must_aggregate: ClassVar[bool] = True
    """Whether a training in which nothing was ever aggregated ends with :class:`NothingAggregatedError`."""
    supports_forecast: ClassVar[bool] = True
    """Whether the noise in the model is forecast; not where the rounds make no model."""

    divergence_remedy: ClassVar[str] = ""
    """Remedy for a model that diverges; empty where releases of different rounds cannot be compared."""

    options: RoundOptions
    """Options of every strategy."""
    message_type_of_queries: ClassVar[str] = MessageType.QUERY
    """Type of the messages that ask clients for their names and statements."""
    aggregator: Aggregator
    """Aggregator that turns the releases of a round into a sum."""
    client_line: ClassVar[str] = (
        "app = private_client_app(model, loss, samples, epsilon=..., rounds=...), or numpy_client_app(client_fn) "
        "around a client of murmurfl's."
    )
    """The ClientApp that clients must have, as code, for error messages."""

    def __init__(self, options: RoundOptions, rule: Rule[StateT], *, aggregator: Aggregator | None = None) -> None:
        self.options = taken = options
        self.rule = rule
        """The server's update, pure functions."""
        self.aggregator = Plain() if aggregator is None else aggregator
        self.session = session_of(taken.permit, taken.session)
        self.clients = ClientRegistry(
            taken.num_clients,
            taken.node_deadline_s,
            message_type=self.message_type_of_queries,
            fewest=taken.fewest,
            client=self.client_line,
            permit=taken.permit or "",
            schema=taken.schema or "",
        )
        self.state: StateT | None = None
        self.acks: dict[str, int] = {}
        """The last release aggregated of each client."""
        self.participation: dict[str, int | None] = {}
        """The number of the release aggregated of each client that the last round asked, or None."""
        self.history: list[RoundReport] = []
        self.forecast: Forecast | None = None
        """Forecast of the noise in the model, from clients' statements before the first round; None without noise."""
        self._stated_before: Statements = {}
        self.callbacks: list[Callback] = list(taken.callbacks)
        """Callbacks between rounds, in this order."""
        self._hooks = CallbackList(self.callbacks)
        self.simulated = False
        """Whether the clients are known to be simulated; False before the start."""
        self.ended = ""
        """Reason for which the training ended with the model it had before its last round; empty if it did not."""
        self.leaving: ExhaustionSchedule | None = None
        """Schedule of the clients that leave before the end, from their statements before the first round."""
        self._clipping = ClippingWatch()
        self.training: dict[int, TrainingFigures] = self._clipping.rounds
        """Effects of clipping in each round; of simulated clients only, and not private."""
        self._divergence = DivergenceWatch(self.divergence_remedy) if self.divergence_remedy else None
        self.checkpoint = None if taken.checkpoint is None else Path(taken.checkpoint)
        self.secure_aggregation = taken.secure_aggregation
        strategy = type(self).__name__
        if self.secure_aggregation is not None:
            able = self.sums_suffice and self.acknowledges and not self.aggregator.adds_noise
            refuse_sums(self.secure_aggregation, "" if able else strategy)
            helpers = Helpers(self.secure_aggregation, self.clients, self.message_type_of_queries)
            self.aggregator = Masked(self.secure_aggregation, helpers, taken.largest_value)
        self.requests = InFlightRequests()
        """Requests that are not answered yet, and the clients that rounds do not wait for."""
        self.sampler = CohortSampler(taken, self.clients, self.aggregator, self.requests, needs_all=self.needs_all)
        """Sampler of the clients that a round asks."""
        self.exchange = RoundExchange(self.sampler, late_answers=self.late_answers, strategy=strategy)
        """Requests and replies of a round, and how long it waits."""
        self.aggregator.begin(self.session, self.checkpoint)
        if taken.num_clients is not None:
            self._settle(taken.num_clients)
        self.entries: dict[str, Any] = dict(input_entries(taken.public_inputs or {}))
        """Entries of every request beside the protocol's own; plain values."""
        self._grid: Grid | None = None  # None for clients that are asked without messages
        self._timeout = _TIMEOUT_S
        self._fresh_session = taken.session is None or bool(taken.permit)  # a permit may be renewed
        self._layout: Layout = []
        self._start = ""
        self._reasons: list[str] = []
        self._not_excluded = ""
        self._foreseen = False

    @property
    def num_clients(self) -> int:
        """M; 0 until a training has begun with all connected clients."""
        return self.sampler.num_clients

    @property
    def clients_per_round(self) -> int:
        """Clients a round asks, by which a step divides; 0 until :attr:`num_clients` is known."""
        return self.sampler.clients_per_round

    @property
    def excluded(self) -> Collection[str]:
        """Names of the clients that the operator has taken out."""
        return self.sampler.excluded

    @property
    def stated(self) -> Statements:
        """The last statement of each client from before the first round, or before the first one after a resume."""
        return self._stated_before

    @property
    def skipped_noise(self) -> float | None:
        """Variance of the noise in the model over what it would be without the sums that were skipped.

        Of mechanisms as clients state them, with their usual options; None without such sums.
        """
        return self.aggregator.skipped_noise(self._stated_before, self.acks)

    @property
    def release_layout(self) -> Layout:
        """The arrays of a release; by default the model's."""
        return self._layout

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on; plain values."""
        entries = hashlib.sha256(repr(sorted(self.entries.items())).encode()).hexdigest()
        return {
            "strategy": type(self).__name__,
            **self.sampler.config.plain,
            "seed": None if self.options.seed is None else self.sampler.seed,
            "sampling": self.sampler.sampling,
            "session": None if self._fresh_session else self.session,
            **self.aggregator.settings(),
            **({"entries": entries} if self.entries else {}),
            **self.rule.settings(),
        }

    @property
    def should_checkpoint(self) -> bool:
        """Whether there is anything to save."""
        return True

    def start(  # type: ignore[override]
        self,
        grid: Grid | DirectReplies,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
        *,
        simulated: bool = False,
    ) -> Result:
        """Run the training, or resume it from its checkpoint, with the arguments of Flower's ``Strategy.start``.

        Parameters
        ----------
        grid : Grid or DirectReplies
            Flower's grid, or clients of this process that are asked without messages.
        initial_arrays : ArrayRecord
            The model to start from, floating-point arrays.
        num_rounds : int
            T.
        timeout : float
            Seconds to wait for a round's replies; later ones count as lost.
        train_config : ConfigRecord, optional
            Sent along with every request; a private client takes nothing from it.
        evaluate_config : ConfigRecord, optional
            Not used: clients do not evaluate.
        evaluate_fn : callable, optional
            Central evaluation of the published model, on data that is not private.
        simulated : bool
            Whether nodes are simulated ones. Only these may be several clients each; a real one is not asked then.

        Raises
        ------
        NodesUnavailableError
            If too few clients are connected when the deadline passes.
        CheckpointError
            If the checkpoint is damaged or of another training.
        OpeningError
            Under secure aggregation, if a sum cannot be opened, or wrong ones do not end; the training can be resumed
            from its checkpoint.
        ConfigurationError
            If a client can make fewer releases than the rounds ask it for, unless ``allow_exhaustion``.
        NothingAggregatedError
            If no release was aggregated: after the first round in which all clients of a simulation refuse, after
            three such rounds of real ones, or at the end.

        Notes
        -----
        Before the first round the log says how much of the model will be noise; :attr:`forecast` keeps it. After the
        last one it says what clients guarantee, by what they stated before the first: every release that their caps
        allow in this training. What is asked of them besides, such as a private evaluation, has a statement of its own.
        Then it leaves a folder with the result (:class:`~murmurfl.strategies.ResultFolder`).
        """
        if self.history:
            raise ConfigurationError(
                f"Expected a new strategy, got one that has run {len(self.history)} rounds: make another, or resume "
                "from a checkpoint.",
                kind="wrong-order",
            )
        logger.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        self.clients.several_on_a_node = simulated
        self._know(grid)
        self._ensure_state(initial_arrays)
        if not isinstance(grid, DirectReplies):
            self._grid = grid = guarded(grid)
            grid.bounds = ReplyBounds.of(self._layout, self.release_layout)
        self._timeout = timeout
        self._hooks = _between_rounds(self.callbacks, grid, evaluate_fn)
        run = Run(grid, initial_arrays, num_rounds, train_config or ConfigRecord(), evaluate_config or ConfigRecord())
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
            if self._conclude_round(server_round, run):
                break
        self._end(run)
        return run.result

    def _know(self, grid: Grid | DirectReplies) -> None:
        """Note whether clients are simulated."""
        self.simulated = self.clients.several_on_a_node or isinstance(grid, DirectReplies) or is_simulation(grid)
        self.simulated |= bool(getattr(grid, "simulated", False))  # nodes in this process
        self.clients.simulated = self.simulated

    def _begin_without_start(self, grid: Grid, done: int) -> None:
        """Forecast the noise for a loop of rounds that is somebody's own, and say what it lacks."""
        name = type(self).__name__
        logger.warning(
            "The rounds of %s are asked for by a loop of its own and not by start() of murmurfl's strategy: there is "
            "no checkpoint, no callback and no result. Call "
            "super().start(grid, initial_arrays, num_rounds=...), and put what the loop did between rounds into "
            "callbacks=[...].",
            name,
        )
        self._know(grid)
        self._preflight(grid, done, None)

    def _begin(self, run: Run) -> int:
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
        is_over = done >= run.num_rounds
        self.ended = "" if is_over else self.aggregator.should_stop(self.history, self.skipped_noise)
        if is_over or self.ended:
            self._publish(done, run)
        return done

    def _conclude_round(self, server_round: int, run: Run) -> bool:
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

    def _end(self, run: Run) -> None:
        """Say how the training ended."""
        logger.info("%s finished in %.1f s.", type(self).__name__, time.monotonic() - run.started)
        if self._requires_progress:
            require_progress(self.history, self._reasons)
        if (noise := self.skipped_noise) is not None:
            came = sum(report.aggregated for report in self.history) / (run.num_rounds * self.exchange.heard_per_round)
            logger.warning(
                "%d sums were skipped: %.0f %% of the releases that were planned are in the model, and its noise has "
                "%.3g times the variance that was planned. Left out at the end: %s.",
                *(sum(bool(report.skipped) for report in self.history), 100 * came, noise),
                ", ".join(map(repr, sorted(self.sampler.left_out))) or "nobody",
            )
        self._hooks.on_end(self, run.grid, run.result)

    @property
    def _requires_progress(self) -> bool:
        return self.must_aggregate and not self._hooks.handles_no_progress

    def summary(self) -> None:
        """Log the strategy's settings."""
        logger.info("\t├──> Clients: %s", self.sampler.config.sentence())
        for name, value in self.settings().items():
            if name not in ("strategy", "num_clients", "clients_per_round"):
                logger.info("\t├──> %s: %s", name, value)
        logger.info("\t└──> Checkpoint: %s", self.checkpoint or "none")

    def ask_privacy(
        self, grid: Grid | DirectReplies, timeout: float | None = None, *, few: bool = False
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the :class:`~murmurfl.privacy.PrivacyStatement` of each client that answers, as plain values by name.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default the timeout of :meth:`start`, and at most 60.
        few : bool
            Whether a few of many clients are enough, spread over all.

        Notes
        -----
        Statements come from the clients' own ledgers and are independent of their data; a server cannot check them.
        """
        return client_statements(
            *(grid, self.clients, self.sampler),
            session=self.session,
            num_parameters=vector_size(self.release_layout),
            message_type=self.message_type_of_queries,
            timeout=min(self._timeout, STATEMENT_TIMEOUT_S) if timeout is None else timeout,
            few=few,
        )

    def _wait_for_clients(self, grid: Grid | DirectReplies) -> None:
        """Wait until enough clients can be asked; the first time for all, whose names are learned then."""
        begun = bool(self.clients.names)
        wait_for_clients(grid, self.clients, self.sampler, self.aggregator)
        if not self.clients_per_round:
            self._settle(len(self.clients.names))
        if not begun:
            self._exclude()

    def _exclude(self, done: int = 0, num_rounds: int = 0) -> None:
        """Take out whom the operator excludes now; after ``done`` rounds, with who leaves when worked out anew."""
        if not self.clients.names:  # before anybody was met
            return
        try:
            if not self.sampler.exclude({*self.options.excluded, *self._hooks.exclude(self)}):
                return
        except ConfigurationError as error:
            if not done:
                raise
            if str(error) != self._not_excluded:
                self._not_excluded = str(error)
                logger.warning("Nobody else is excluded. %s", error)
            return
        names = ", ".join(map(repr, sorted(self.sampler.excluded))) or "nobody"
        logger.warning("Excluded from now on: %s. %d clients are left.", names, len(self.sampler.askable))
        if done:
            self.leaving = self.sampler.exhaustion(range(done + 1, num_rounds + 1)).logged()

    def asks_clients(self, server_round: int) -> bool:
        """Return True if a round asks any client; for subclasses in which some rounds are the server's own."""
        return True

    def _cohort(self, server_round: int) -> list[str]:
        """Return the clients of a round; none where it is the server's own."""
        return self.sampler.draw(server_round) if self.asks_clients(server_round) else []

    def _settle(self, clients: int) -> None:
        needed = self.sampler.settle(clients)
        self.aggregator.settle(self.clients_per_round, needed)

    def _preflight(self, grid: Grid | DirectReplies, done: int, num_rounds: int | None) -> None:
        """Ask clients, before anything is spent, how many rounds they last and how loud their noise is.

        Rounds of an unknown number are as many as clients have releases.
        """
        self._foreseen = True
        exhausts = self.options.allow_exhaustion
        if exhausts and not self.supports_forecast:
            return
        self._wait_for_clients(grid)
        simulated = isinstance(grid, DirectReplies) or self.clients.several_on_a_node
        # For how long a training lasts all clients matter; for how loud the noise is a few of them will do.
        statements = self.ask_privacy(grid, few=exhausts and simulated)
        if num_rounds is None:
            lasts = [int(statement["max-participations"]) for statement in statements.values()]
            num_rounds = done + max(min(lasts, default=1), 1)
        rounds = range(done + 1, num_rounds + 1)
        if self.simulated:
            log_simulated_records(statements)
        # Who is gone since has releases in the model, and its word counts as before.
        self._stated_before = {**self._stated_before, **statements}
        if not exhausts:
            self._check_statements(statements)
            if simulated or self.sampler.config.waits_for_all:
                check_rounds(self._cohort, self.clients.names, statements, rounds)
        if not simulated:
            self.leaving = foresee(self.sampler, statements, rounds, allow_exhaustion=exhausts)
        if not done:
            log_absence_costs(self.sampler, type(self).__name__, self.absence_costs)
        if self.supports_forecast:
            log_dropped(self.exchange, self.sampler)
            clients = self.num_clients - len(self.sampler.excluded)
            self.forecast = forecast_of(
                self.aggregator.read_noise(statements),
                num_parameters=vector_size(self.release_layout),
                clients=clients,
                per_round=min(self.exchange.heard_per_round, clients),
                rounds=num_rounds,
            )
            if self.forecast is not None:
                self.forecast = self._hooks.on_forecast(self, self.forecast)
            sums = self.secure_aggregation
            log_forecast(self.forecast, 0 if sums is None else sums.max_failed_aggregations)

    def _check_statements(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse clients that a subclass cannot work with."""

    def _save(self) -> None:
        if self.checkpoint is None or self.state is None or not self.should_checkpoint:
            return
        with self.aggregator.saving(self.history[-1].server_round if self.history else 0):
            state = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(self.state)}  # type: ignore[arg-type]
            save_checkpoint(self.checkpoint, self._identity(), state | self._kept())

    def _after_round(
        self, server_round: int, grid: Grid | DirectReplies, config: ConfigRecord, timeout: float, result: Result
    ) -> None:
        """Ask clients for what a subclass needs beside releases."""

    def _publish(self, server_round: int, run: Run) -> MetricRecord | None:
        """Put the model into the result and evaluate it centrally; returns the metrics."""
        result = run.result
        result.arrays = self._model()
        evaluation = self._hooks.evaluate(self, server_round, result.arrays)
        if evaluation is not None:
            # The lines of Flower's own strategies.
            logger.info("")
            logger.info("[ROUND %s/%s]", server_round, run.num_rounds)
            logger.info("Global evaluation")
            logger.info("\t└──> MetricRecord: %s", evaluation)
            result.evaluate_metrics_serverapp[server_round] = evaluation
        return evaluation

    def _kept(self) -> dict[str, Any]:
        """Contents of a checkpoint beside the update rule's state, for :meth:`_restore`."""
        return {
            "server_round": self.history[-1].server_round if self.history else 0,
            "acks": self.acks,
            "clients": plain_names(self.clients.names),
            "seed": self.sampler.seed,
            "session": self.session,
            "history": [plain(report) for report in self.history],
            # For a resumed training of which some clients are gone; without messages nobody is.
            "statements": {} if self._grid is None else plain_statements(self._stated_before),
            **self.aggregator.state(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on: settings, layout and initial model."""
        layout = [[name, list(shape), str(dtype)] for name, shape, dtype in self._layout]
        return {**self.settings(), "layout": layout, "start": self._start, **self.aggregator.identity()}

    def _resume(self, result: Result) -> int:
        """Load the checkpoint if there is one; returns the number of rounds done."""
        if self.checkpoint is None or not self.checkpoint.exists():
            self.aggregator.load(None, ())
            return 0
        names = [f.name for f in fields(self.rule.state_type)]
        expected = {f"state.{name}" for name in names} | set(self._kept()) - {"statements"}  # older ones lack it
        saved = load_checkpoint(self.checkpoint, self._identity(), expected)
        self.aggregator.load(saved, restored_names(saved["clients"]))
        self.state = self.rule.state_type(**{name: saved[f"state.{name}"] for name in names})
        self._restore(saved)
        for report in self.history:
            result.train_metrics_clientapp[report.server_round] = report.metrics
        result.arrays = self._model()
        logger.info("Resuming after round %d from %s.", saved["server_round"], self.checkpoint)
        if self.aggregator.adds_noise:
            self._save()  # before anybody is asked: it shows that the file can be written, and stops any other server
        return int(saved["server_round"])

    def _restore(self, saved: Mapping[str, Any]) -> None:
        self.acks.clear()
        self.acks.update({str(name): int(ack) for name, ack in saved["acks"].items()})
        self.clients.restore(restored_names(saved["clients"]))
        if self.clients.names:  # else it was saved before any client was met
            self._settle(len(self.clients.names))
        self.sampler.resume(int(saved["seed"]))
        self.session = str(saved["session"])
        self.history = [RoundReport(**report) for report in saved["history"]]
        self._stated_before = saved.get("statements", {})

    def _ensure_state(self, arrays: ArrayRecord) -> StateT:
        if self.state is None:
            self._layout, start = model_vector(arrays)
            self._start = hashlib.sha256(start.tobytes()).hexdigest()
            self.state = self.rule.init(start, self._layout)
            self.aggregator.shape(vector_size(self._layout), vector_size(self.release_layout))
        return self.state

    def _model(self) -> ArrayRecord:
        """Return the model to publish."""
        return self._record(self.rule.model(self.state))  # type: ignore[arg-type]

    def _record(self, vector: Vector) -> ArrayRecord:
        return array_record(vector, self._layout)

    @abstractmethod
    def _run_round(self, server_round: int, run: Run) -> MetricRecord | None:
        """Ask the clients of a round and take the step; return the counts of the round."""


def _between_rounds(
    callbacks: Sequence[Callback], grid: Grid | DirectReplies, evaluate_fn: EvaluateFunction | None
) -> CallbackList:
    """Return a training's callbacks, between those that every training has."""
    first: list[Callback] = [] if evaluate_fn is None else [CentralEvaluation(evaluate_fn)]
    # A rehearsal's clients are in this process: its rounds are nobody's.
    file = None if isinstance(grid, DirectReplies) else MetricsFile.from_environment(grid)
    first += [] if file is None else [file]
    last = [one for one in default_callbacks() if not any(isinstance(mine, type(one)) for mine in callbacks)]
    return CallbackList([*first, *callbacks, *last])
