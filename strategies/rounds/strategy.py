"""What every strategy here shares with Flower: asking machines over a grid, the loop over rounds, its evaluations.

The rounds themselves, and the update rule that a subclass is, stand in :mod:`.training_rounds`,
its checkpoint in :mod:`.resuming`. Everything a network can do to a
round happens here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from logging import INFO
from typing import Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ...privacy import ConfigurationError, protocol
from ...privacy.accounting.noise_forecast import forecast_of
from ...privacy.machine.clipping_figures import observing
from ..sums.secure_rounds import SecureRounds
from .asked_statements import ask_statements
from .asking import request_messages, say_refusals, say_unlike
from .forecast_log import log_forecast
from .known_machines import NodesUnavailableError, by_length_and_name, in_order
from .layout import vector_size
from .look_ahead import PATIENCE, check_rounds, check_something_came, is_hopeless
from .monitor_file import FigureFile
from .patient import PatientRounds
from .replies import DirectMachines, Reply, RoundReport, is_masked, read_outcome
from .waiting import is_simulation

_STATEMENT_TIMEOUT_S = 60.0
_FEW = 100

StateT = TypeVar("StateT")

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
"""Central evaluation of a round's published model, on data that is not private."""


class ReleaseStrategy(PatientRounds[StateT], Strategy):
    """A strategy whose machines answer with releases P_k - P_ack.

    Parameters
    ----------
    num_clients : int, optional
        M, machines in all; default all that are connected when the training begins. Machines that come later take no
        part in it.
    clients_per_round : int, optional
        m, machines asked in a round, without replacement; default all of them.
    fraction_train, min_train_nodes : optional
        In place of ``clients_per_round``, as for Flower's FedAvg: the share of all machines that a round asks, and the
        fewest (2 by default, where there is a share).
    min_available_nodes : int, optional
        In place of ``num_clients``, as for FedAvg: how many machines the training does not begin without; 2 by default.
    wait_for : float
        The share of ``clients_per_round`` whose answers end a round; 1, the default, waits for all that are asked. A
        machine that has not answered is not asked again until it has, and what it answers late counts where it can
        (:attr:`late_answers`).
    ask : float
        How many times ``clients_per_round`` machines a round asks, >= 1. Steps divide by that many.
    seed : int, optional
        Seed of the sampler; default from the operating system.
    sampling : {"uniform", "balanced"}
        How the machines of a round are drawn (:func:`~murmurfl.strategies.rounds.sampling.sample_machines`).
    session : str, optional
        Names this training to the machines, letters and digits; default a fresh random name. A machine opens a new
        private stream, and reserves its whole budget share, for every new session.
    node_deadline_s : float
        Longest wait for enough machines to be connected, in seconds.
    checkpoint : Path, optional
        Written after every round; if the file exists at the start, the training is resumed from it.
    largest_value : float
        The largest magnitude a value of an honest release can have (:attr:`murmurfl.privacy.NoisePlan.largest_value` of
        a public policy): a reply beyond it is malformed. The default only keeps sums finite, so that one broken
        machine can spoil the model.
    evaluate_every : int
        Rounds between central evaluations of the published model; the last round is always evaluated.
    run_dry : bool
        Whether machines may reach their cap, or the end of their samples, before the last round: they refuse from then
        on. By default :meth:`start` asks every machine how many releases it can still make, and refuses to begin a
        training that asks one of them for more.
    on_round : callable, optional
        Called after every round with its report and the central evaluation's metrics.
    secure_aggregation : SecureAggregation, optional
        That machines release under masks, and that helpers open sums of them only. A round whose sum is not opened is
        closed: its report says why, nothing is acknowledged, and machines carry over what they released.
    centre : ndarray of shape (k,), optional
        What machines see their samples from, sent with every request (:class:`~murmurfl.strategies.MeanOfFeatures`);
        for machines that are configured for centring.
    permit : str, optional
        Of the session's owner (``murmurfl owner permit``), sent with every message, for machines that take no other
        runs. Without ``session`` the training is in the permit's first one. A resumed training may have a renewed one.
    schema : str, optional
        The digest of what a record is (``Schema.digest``, ``murmurfl schema FILE --digest``): machines that state
        another are not asked. Default any, with a warning where they differ.

    Notes
    -----
    Privacy is the machines': a server that adds no noise need not be trusted, and all it computes is post-processing of
    what they released. Each release is aggregated at most once: a reply counts only if the acknowledgement it was built
    on is the last release aggregated for that machine, so a late original beside its carry-over is dropped. Without
    acknowledgements every release is a prefix sum that stands alone, and counts in one round only.
    """

    _QUERY_RECORDS: ClassVar[tuple[str, ...]] = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)

    # Flower's interface.

    def summary(self) -> None:
        """Log the strategy's settings."""
        log(INFO, "\t├──> Machines: %s", self._attendance.sentence())
        for name, value in self.settings().items():
            if name not in ("strategy", "num_clients", "clients_per_round"):
                log(INFO, "\t├──> %s: %s", name, value)
        log(INFO, "\t└──> Checkpoint: %s", self.checkpoint or "none")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this round's machines and ask each of them; waits for enough of them to be connected.

        Raises
        ------
        NodesUnavailableError
            If fewer than ``clients_per_round`` machines are connected when the deadline passes.
        """
        self._ensure_state(arrays)
        self._grid = grid
        self._meet(grid)
        self._nodes = self.machines.node_map()
        request = self._plan_round(server_round, self._nodes)
        points = {key: self._asked_at(point) for key, point in zip(self._QUERY_RECORDS, request.points, strict=False)}
        return request_messages(config, request, points, self._nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the releases that can be believed and take one step of the update rule."""
        asked = {name: self._nodes[name] for name in self._asked} | self._overdue
        layout, masked, replies = self.release_layout, self._secure is not None, list(replies)
        say_unlike(server_round, sum(is_masked(reply) is (not masked) for reply in replies), masked=masked)
        say_refusals(server_round, replies, self._reasons)
        outcomes = [read_outcome(reply, layout, asked, self.largest_value, masked=masked) for reply in replies]
        # In the order of names: the same sum on every engine (and on the machines' grid any order gives it).
        outcomes.sort(
            key=lambda outcome: by_length_and_name(outcome.machine) if isinstance(outcome, Reply) else (0, "")
        )
        report = self._take_round(server_round, outcomes)
        return self._record(self._published()), report.metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: a machine's loss or accuracy is not noised, so it is not asked for. Use ``evaluate_fn``."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: see :meth:`configure_evaluate`."""
        return None

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
        """Run the training, or resume it from its checkpoint; as Flower's own ``Strategy.start``.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Flower's grid, or machines of this process that are asked without messages.
        initial_arrays : ArrayRecord
            The model to start from, floating-point arrays.
        num_rounds : int
            T.
        timeout : float
            Seconds to wait for a round's replies; what has not come by then counts as lost.
        train_config : ConfigRecord, optional
            Sent along with every request; a private machine takes nothing from it.
        evaluate_config : ConfigRecord, optional
            Not used: machines do not evaluate.
        evaluate_fn : callable, optional
            Central evaluation of the published model, on data that is not private.

        Returns
        -------
        Result
            ``arrays`` is the last published model.

        Raises
        ------
        NodesUnavailableError
            If too few machines are connected when the deadline passes.
        CheckpointError
            If a checkpoint exists and is damaged or of another training.
        OpeningError
            Under secure aggregation, if a sum cannot be opened and the server's patience is at its end; the training
            can be resumed from its checkpoint.
        ConfigurationError
            If a machine says that it can make fewer releases than so many rounds ask it for, unless ``run_dry``.
        NothingAggregatedError
            If no release was aggregated in all rounds, and as soon as that is certain: after the first round in which
            all machines of a simulation refuse, after three such rounds of real ones.

        Notes
        -----
        Before the first round the log says how much of the model will be noise; :attr:`forecast` keeps it.
        """
        if self.history:
            raise ConfigurationError(
                f"Expected a new strategy, got one that has run {len(self.history)} rounds: make another, or resume "
                "from a checkpoint."
            )
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        result = Result()
        started = time.monotonic()
        self._ensure_state(initial_arrays)
        self._timeout = timeout
        done = self._resume(result)
        released = done + (self._secure is not None and self._secure.held is not None)
        if released < num_rounds:
            self._look_ahead(grid, released, num_rounds, min(timeout, _STATEMENT_TIMEOUT_S))
        if evaluate_fn and not done and (metrics := evaluate_fn(0, initial_arrays)) is not None:
            log(INFO, "Initial global evaluation results: %s", metrics)
            result.evaluate_metrics_serverapp[0] = metrics
        if done >= num_rounds:
            self._publish(done, num_rounds, evaluate_fn, result)
        figures = FigureFile.of_environment()
        for server_round in range(done + 1, num_rounds + 1):
            metrics = self._run_round(server_round, grid, initial_arrays, train_config or ConfigRecord(), timeout)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            # Before anybody sees the new model: a round that is repeated after a crash was never published.
            self._save()
            self._after_round(server_round, grid, evaluate_config or ConfigRecord(), timeout, result)
            evaluation = None
            if server_round == num_rounds or (evaluate_fn and not server_round % self.evaluate_every):
                evaluation = self._publish(server_round, num_rounds, evaluate_fn, result)
            if figures is not None:
                figures.note(self.history[-1], num_rounds)
            if self._on_round is not None:
                self._on_round(self.history[-1], evaluation)
            if self.must_aggregate and is_hopeless(self.history, 1 if is_simulation(grid) else PATIENCE):
                check_something_came(self.history, self._reasons)
        log(INFO, "%s finished in %.1f s.", type(self).__name__, time.monotonic() - started)
        if self.must_aggregate:
            check_something_came(self.history, self._reasons)
        return result

    def ask_privacy(self, grid: Grid | DirectMachines, timeout: float = 60.0) -> Mapping[str, Mapping[str, Any]]:
        """What each connected machine says it has spent in this session, by name; independent of their data.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for the answers.

        Returns
        -------
        mapping
            The machine's :class:`~murmurfl.privacy.PrivacyStatement` as plain values; machines that do not answer are
            missing.

        Notes
        -----
        These are the machines' own words, from their own ledgers; a server cannot check them.
        """
        return self._statements(grid, timeout)

    # Details.

    def _statements(
        self, grid: Grid | DirectMachines, timeout: float, most: int | None = None
    ) -> Mapping[str, Mapping[str, Any]]:
        """What machines say of themselves: all that are connected, or some ``most`` of them."""
        if isinstance(grid, DirectMachines):
            few = self._few(most)
            statements = grid.statements(self.session) if few is None else grid.statements(self.session, few)
            if few or len(statements) == len(self.machines.names):
                return statements
        else:
            nodes = self.machines.node_map()
            every = max(-(-len(nodes) // most), 1) if most else 1
            statements = ask_statements(
                grid,
                dict(list(nodes.items())[::every]),
                session=self.session,
                num_parameters=vector_size(self.release_layout),
                message_type=self.message_type_of_queries,
                timeout=timeout,
                entries=self.machines.entries,
            )
        return {name: statements[name] for name in self.machines.names if name in statements}

    def _few(self, most: int | None) -> list[str] | None:
        """Some ``most`` of the machines, or None if there are no more of them anyway."""
        names = self.machines.names
        return None if most is None or len(names) <= most else list(names[:: -(-len(names) // most)])

    def _meet(self, grid: Grid | DirectMachines) -> None:
        """Wait until enough machines can be asked: all of them the first time, for their names are learned then."""
        needed = self._fewest_connected if self.machines.names else self._attendance.fewest
        if not isinstance(grid, DirectMachines):
            self.machines.meet(grid, needed) if self._secure is None else self._secure.helpers.meet(grid, needed)
        elif not self.machines.names:
            names = in_order(grid.names())
            if len(names) < needed:
                raise NodesUnavailableError(f"Expected {needed} machines, got {len(names)}.")
            self.machines.restore(names[: self._attendance.num_clients])
        if not self.clients_per_round:
            self._settle(len(self.machines.names))

    def _look_ahead(self, grid: Grid | DirectMachines, done: int, num_rounds: int, timeout: float) -> None:
        """Ask machines, before anything is spent, for how many rounds they last and what their noise will leave."""
        if self.run_dry and not self.foresees:
            return
        self._meet(grid)
        simulated = isinstance(grid, DirectMachines) or self.machines.several_on_a_node
        # For how long a training lasts all machines matter; for how loud the noise is a few of them will do.
        statements = self._statements(grid, timeout, _FEW if self.run_dry and simulated else None)
        if not self.run_dry:
            self._check_statements(statements)
            if simulated or self._attendance.waits_for_all:
                check_rounds(self._sample, statements, done, num_rounds)
        if not simulated:
            self._foresee_leaving(statements, done, num_rounds)
        if not self.foresees:
            return
        self._say_what_is_dropped()
        self.forecast = forecast_of(
            self._stated_noise(statements),
            num_parameters=vector_size(self.release_layout),
            machines=self.num_clients,
            per_round=self._heard_per_round,
            rounds=num_rounds,
        )
        log_forecast(self.forecast)

    def _check_statements(self, statements: Mapping[str, Mapping[str, Any]]) -> None:
        """For subclasses that need more of their machines."""

    def _run_round(
        self,
        server_round: int,
        grid: Grid | DirectMachines,
        initial_arrays: ArrayRecord,
        config: ConfigRecord,
        timeout: float,
    ) -> MetricRecord | None:
        """Ask the machines of a round and take the step; the counts of the round."""
        if self._secure is not None and self._secure.held is not None:
            return self._resume_round(self._secure, grid).metrics
        if isinstance(grid, DirectMachines):
            self._grid = None
            self._meet(grid)
            return self._take_round(server_round, grid.answer(self._plan_round(server_round, None))).metrics
        messages = self.configure_train(server_round, initial_arrays, config, grid)
        with observing() as observer:  # simulated machines of this process
            replies = self._exchange(grid, messages, server_round, timeout)
        self._observed = observer.machines
        return self.aggregate_train(server_round, replies)[1]

    def _resume_round(self, secure: SecureRounds, grid: Grid | DirectMachines) -> RoundReport:
        """Go on where a server ended that may have asked helpers: with the very set that it had saved."""
        if isinstance(grid, DirectMachines):
            raise ConfigurationError("Expected the nodes of the interrupted training, got machines without messages.")
        self._grid = grid
        secure.helpers.meet(grid, 0)
        return self._open_held(secure, resumed=True)

    def _after_round(
        self, server_round: int, grid: Grid | DirectMachines, config: ConfigRecord, timeout: float, result: Result
    ) -> None:
        """For subclasses whose machines are asked for more than releases."""

    def _publish(
        self, server_round: int, num_rounds: int, evaluate_fn: EvaluateFunction | None, result: Result
    ) -> MetricRecord | None:
        """Put the model into the result, and evaluate it centrally; the evaluation's metrics."""
        result.arrays = self._record(self._published())
        evaluation = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
        if evaluation is not None:
            # The lines of Flower's own strategies.
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            log(INFO, "Global evaluation")
            log(INFO, "\t└──> MetricRecord: %s", evaluation)
            result.evaluate_metrics_serverapp[server_round] = evaluation
        return evaluation
