"""What every strategy here shares: the round loop, asking machines, believing replies, counting losses, checkpoints.

A subclass is an update rule: a frozen state of arrays, the query points it asks for, and a pure step from the sum of a
round's releases to the next state. Everything a network can do to a round happens here.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..privacy import ConfigurationError, protocol
from ..privacy.training import FAR_BEYOND, TrainingFigures, observing, times
from .checkpoint import load_checkpoint, save_checkpoint
from .machines import (
    SAMPLINGS,
    MachineDirectory,
    NodesUnavailableError,
    Sampling,
    by_length_and_name,
    rounds_possible,
    sample_machines,
)
from .replies import (
    LARGEST_VALUE,
    DirectMachines,
    Outcome,
    Refusal,
    ReleaseSum,
    Reply,
    RoundReport,
    RoundRequest,
    Vector,
    exchange,
    is_statement,
    read_outcome,
    releases_left,
    vector_size,
)

_STATEMENT_TIMEOUT_S = 60.0
_TOGETHER = ""  # of all machines of a round

StateT = TypeVar("StateT")


OnRound = Callable[[RoundReport, MetricRecord | None], None]


class ReleaseStrategy(Strategy, Generic[StateT]):
    """A strategy whose machines answer with releases P_k - P_ack.

    Parameters
    ----------
    num_clients : int
        M, machines in all.
    clients_per_round : int
        m, machines asked in a round, without replacement.
    seed : int, optional
        Seed of the sampler; default from the operating system.
    sampling : {"uniform", "balanced"}
        How the machines of a round are drawn (:func:`~murmurfl.strategies.machines.sample_machines`).
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

    Notes
    -----
    **Formal guarantees.** None of its own for an untrusted server: privacy is the machines'. Each release is aggregated
    at most once: a reply counts only if the acknowledgement it was built on is the last release aggregated for that
    machine, so a late original beside its carry-over is dropped. Without acknowledgements every release is a prefix sum
    that stands alone, and counts in one round only.
    """

    state_type: ClassVar[type[Any]]
    acknowledges: ClassVar[bool] = True
    """Whether machines are told what was aggregated; if not, every release is P_k: all of the machine's prefix sum."""
    message_type_of_queries: ClassVar[str] = MessageType.QUERY
    """The type of the messages in which machines are asked who they are and what they have spent."""
    _QUERY_RECORDS: ClassVar[tuple[str, ...]] = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)

    def __init__(
        self,
        *,
        num_clients: int,
        clients_per_round: int,
        seed: int | None = None,
        sampling: Sampling = "uniform",
        session: str | None = None,
        node_deadline_s: float = 120.0,
        checkpoint: Path | str | None = None,
        largest_value: float = LARGEST_VALUE,
        evaluate_every: int = 1,
        run_dry: bool = False,
        on_round: OnRound | None = None,
    ) -> None:
        if isinstance(evaluate_every, bool) or not isinstance(evaluate_every, int) or evaluate_every < 1:
            raise ConfigurationError(f"Expected evaluate_every to be an integer >= 1, got {evaluate_every!r}.")
        if not 1 <= clients_per_round <= num_clients:
            raise ConfigurationError(
                f"Expected 1 <= clients_per_round <= num_clients, got {clients_per_round} of {num_clients}."
            )
        if sampling not in SAMPLINGS:
            raise ConfigurationError(f"Expected sampling one of {SAMPLINGS}, got {sampling!r}.")
        if session is not None and not (session.isalnum() and len(session) <= protocol.LONGEST_SESSION_NAME):
            raise ConfigurationError(f"Expected a session of up to 64 letters and digits, got {session!r}.")
        self.num_clients = num_clients
        self.clients_per_round = clients_per_round
        self.seed = secrets.randbits(63) if seed is None else seed
        self.sampling: Sampling = sampling
        self.session = secrets.token_hex(16) if session is None else session
        self.machines = MachineDirectory(num_clients, node_deadline_s, message_type=self.message_type_of_queries)
        self.state: StateT | None = None
        self.acks: dict[str, int] = {}
        """The last release aggregated of each machine."""
        self.participation: dict[str, int | None] = {}
        """The machines asked in the last round, and the number of the release aggregated of each, or None."""
        self.history: list[RoundReport] = []
        self.training: dict[int, TrainingFigures] = {}
        """What clipping did in each round; of simulated machines only, and not private."""
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._fresh_seed = seed is None
        self._fresh_session = session is None
        if not largest_value > 0:
            raise ConfigurationError(f"Expected largest_value > 0, got {largest_value!r}.")
        self.largest_value = float(largest_value)
        self.evaluate_every = evaluate_every
        self.run_dry = run_dry
        self._on_round = on_round
        self._layout: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = []
        self._asked: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._sampled = 0
        self._observed: Mapping[str, TrainingFigures] = {}
        self._warned_of_not_finite = False
        self._warned_of_ratio = 0.0
        self._start = ""

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

    @abstractmethod
    def model(self, state: StateT) -> Vector:
        """The model to publish."""

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree on; plain values."""
        return {
            "strategy": type(self).__name__,
            "num_clients": self.num_clients,
            "clients_per_round": self.clients_per_round,
            "seed": None if self._fresh_seed else self.seed,
            "sampling": self.sampling,
            "session": None if self._fresh_session else self.session,
        }

    def check_reply(self, reply: Reply) -> bool:
        """Whether a well-formed reply may be aggregated; for subclasses that expect more of their machines."""
        return True

    # Flower's interface.

    def summary(self) -> None:
        """Log the strategy's settings."""
        log(INFO, "\t├──> Machines: %d in all, %d a round", self.num_clients, self.clients_per_round)
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
        self.machines.meet(grid, self.num_clients if not self.machines.names else self.clients_per_round)
        self._nodes = self.machines.node_map()
        request = self._plan_round(server_round, self._nodes)
        records = {key: self._record(point) for key, point in zip(self._QUERY_RECORDS, request.points, strict=False)}
        return [
            Message(
                RecordDict({**records, protocol.CONFIG: self._request(config, request, name)}),
                dst_node_id=self._nodes[name],
                message_type=MessageType.TRAIN,
            )
            for name in request.acks
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the releases that can be believed and take one step of the update rule."""
        asked = {name: self._nodes[name] for name in self._asked}
        outcomes = [read_outcome(reply, self._layout, asked, self.largest_value) for reply in replies]
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
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
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
        ConfigurationError
            If a machine says that it can make fewer releases than so many rounds ask it for, unless ``run_dry``.
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
        done = self._resume(result)
        if done < num_rounds and not self.run_dry:
            self._check_rounds(grid, done, num_rounds, min(timeout, _STATEMENT_TIMEOUT_S))
        if evaluate_fn and not done and (metrics := evaluate_fn(0, initial_arrays)) is not None:
            log(INFO, "Initial global evaluation results: %s", metrics)
            result.evaluate_metrics_serverapp[0] = metrics
        if done >= num_rounds:
            result.arrays = self._record(self._published())
            evaluation = evaluate_fn(done, result.arrays) if evaluate_fn else None
            if evaluation is not None:
                _log_evaluation(done, num_rounds, evaluation)
                result.evaluate_metrics_serverapp[done] = evaluation
        for server_round in range(done + 1, num_rounds + 1):
            if isinstance(grid, DirectMachines):
                if not self.machines.names:
                    self.machines.restore(self._direct_names(grid))
                metrics = self._take_round(server_round, grid.answer(self._plan_round(server_round, None))).metrics
            else:
                messages = self.configure_train(server_round, initial_arrays, train_config or ConfigRecord(), grid)
                with observing() as observer:  # simulated machines of this process
                    replies = exchange(grid, messages, timeout)
                self._observed = observer.machines
                _, metrics = self.aggregate_train(server_round, replies)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            # Before anybody sees the new model: a round that is repeated after a crash was never published.
            self._save()
            self._after_round(server_round, grid, evaluate_config or ConfigRecord(), timeout, result)
            evaluation, last = None, server_round == num_rounds
            if last or (evaluate_fn and not server_round % self.evaluate_every):
                result.arrays = self._record(self._published())
                evaluation = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
            if evaluation is not None:
                _log_evaluation(server_round, num_rounds, evaluation)
                result.evaluate_metrics_serverapp[server_round] = evaluation
            if self._on_round is not None:
                self._on_round(self.history[-1], evaluation)
        log(INFO, "%s finished in %.1f s.", type(self).__name__, time.monotonic() - started)
        return result

    def ask_privacy(self, grid: Grid | DirectMachines, timeout: float = 60.0) -> dict[str, dict[str, Any]]:
        """What each connected machine says it has spent in this session, by name; independent of their data.

        Parameters
        ----------
        grid : Grid or DirectMachines
            Where the machines are.
        timeout : float
            Seconds to wait for the answers.

        Returns
        -------
        dict
            The machine's :class:`~murmurfl.privacy.PrivacyStatement` as plain values; machines that do not answer are
            missing.

        Notes
        -----
        **Formal guarantees.** These are the machines' own words, from their own ledgers; a server cannot check them.
        """
        if isinstance(grid, DirectMachines):
            statements = grid.statements(self.session)
            return {name: statements[name] for name in self.machines.names if name in statements}
        messages, nodes = [], self.machines.node_map()
        for name, node_id in nodes.items():
            config = ConfigRecord(
                {
                    protocol.VERSION: protocol.PROTOCOL_VERSION,
                    protocol.ASK: protocol.ASK_PRIVACY,
                    protocol.SESSION: self.session,
                    protocol.MACHINE: name,
                    protocol.NUM_PARAMETERS: vector_size(self._layout),
                }
            )
            content = RecordDict({protocol.CONFIG: config})
            messages.append(Message(content, dst_node_id=node_id, message_type=self.message_type_of_queries))
        statements = {}
        for reply in exchange(grid, messages, timeout):
            if not reply.has_error() and protocol.CONFIG in reply.content.config_records:
                entries = dict(reply.content.config_records[protocol.CONFIG])
                name = str(entries.pop(protocol.MACHINES, ""))
                # A machine speaks for itself only, and what it says must be a statement.
                if nodes.get(name) == reply.metadata.src_node_id and is_statement(entries):
                    statements[name] = entries
        return {name: statements[name] for name in self.machines.names if name in statements}

    # Details.

    def _direct_names(self, machines: DirectMachines) -> list[str]:
        names = sorted(machines.names(), key=by_length_and_name)
        if len(names) < self.num_clients:
            raise NodesUnavailableError(f"Expected {self.num_clients} machines, got {len(names)}.")
        return names[: self.num_clients]

    def _check_rounds(self, grid: Grid | DirectMachines, done: int, num_rounds: int, timeout: float) -> None:
        """Refuse a training that asks a machine more often than it says it can answer; it knows before it begins."""
        if not isinstance(grid, DirectMachines):
            self.machines.meet(grid, self.clients_per_round if self.machines.names else self.num_clients)
        elif not self.machines.names:
            self.machines.restore(self._direct_names(grid))
        stated = {name: releases_left(said) for name, said in self.ask_privacy(grid, timeout).items()}
        last, name = rounds_possible(self._sample, range(done + 1, num_rounds + 1), stated)
        if last is None or name is None:
            return
        said = (
            f"machine {name} says that it can make {stated[name]} {'more ' if done else ''}releases, and round {last} "
            "asks it for one more: its cap (max-participations) and its fresh samples decide"
        )
        if not done:
            raise ConfigurationError(
                f"Expected at most {last - 1} rounds, got {num_rounds}: {said}. Use fewer rounds, or run_dry=True "
                "(run-dry = true in murmurfl's own app): machines that can make no more then refuse."
            )
        # A server that was killed asks for a round again: what its machines made of it then is spent.
        log(WARNING, "In what is left of %d rounds %s; it refuses from then on.", num_rounds, said)

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
        return RoundRequest(server_round, self.session, self._asked, aggregated, self.query_points(self.state))

    def _after_round(
        self, server_round: int, grid: Grid | DirectMachines, config: ConfigRecord, timeout: float, result: Result
    ) -> None:
        """For subclasses whose machines have more to be asked."""

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
        release_sum = ReleaseSum(vector_size(self._layout))
        report = self._believe(server_round, outcomes, release_sum)
        self.state = self.step(self.state, release_sum.total(), server_round)
        self.history.append(report)
        return report

    def _published(self) -> Vector:
        return self.model(self.state)  # type: ignore[arg-type]

    def _ensure_state(self, arrays: ArrayRecord) -> StateT:
        if self.state is None:
            values = {name: array.numpy() for name, array in arrays.items()}
            for name, value in values.items():
                if value.dtype.kind != "f" or not np.isfinite(value).all():
                    raise ConfigurationError(
                        f"Expected finite floating-point initial arrays, got {value.dtype} in {name!r}"
                        f"{'' if value.dtype.kind != 'f' else ' with values that are not finite'}."
                    )
            if not values:
                raise ConfigurationError("Expected initial arrays, got an empty ArrayRecord.")
            self._layout = [(name, value.shape, value.dtype) for name, value in values.items()]
            start = np.concatenate([np.asarray(value, dtype=np.float64).ravel() for value in values.values()])
            self._start = hashlib.sha256(start.tobytes()).hexdigest()
            self.state = self.initial_state(start)
        return self.state

    def _record(self, vector: Vector) -> ArrayRecord:
        arrays, start = {}, 0
        for name, shape, dtype in self._layout:
            size = math.prod(shape)
            arrays[name] = Array(np.asarray(vector[start : start + size].reshape(shape), dtype=dtype))
            start += size
        return ArrayRecord(arrays)

    def _request(self, config: ConfigRecord, request: RoundRequest, name: str) -> ConfigRecord:
        return ConfigRecord(
            {
                **config,
                protocol.VERSION: protocol.PROTOCOL_VERSION,
                protocol.SERVER_ROUND: request.server_round,
                protocol.SESSION: request.session,
                protocol.MACHINE: name,
                protocol.ACK: request.acks[name],
            }
        )

    def _believe(self, server_round: int, outcomes: Iterable[Outcome], release_sum: ReleaseSum) -> RoundReport:
        """Add the releases that can be believed to ``release_sum``, one after the other; the report of the round."""
        aggregated: set[str] = set()
        refused: Counter[str] = Counter()
        late = malformed = 0
        figures: dict[str, TrainingFigures] = {}
        for outcome in outcomes:
            if isinstance(outcome, TrainingFigures):
                figures[_TOGETHER] = outcome
            elif isinstance(outcome, Refusal):
                refused[protocol.REFUSAL_NAMES.get(outcome.code, f"error-{outcome.code}")] += 1
            elif outcome is None or not self.check_reply(outcome):
                malformed += 1
            elif (
                outcome.machine in aggregated
                or outcome.ack != self._ack(outcome.machine)
                or outcome.release <= self.acks.get(outcome.machine, 0)
            ):
                late += 1
            else:
                release_sum.add(outcome)
                self.acks[outcome.machine] = outcome.release
                aggregated.add(outcome.machine)
                found = self._observed.get(outcome.machine) or TrainingFigures.read(outcome.metrics)
                if found is not None:
                    figures[outcome.machine] = found
        self._take_figures(server_round, figures)
        self.participation = {name: self.acks[name] if name in aggregated else None for name in self._asked}
        answered = len(aggregated) + late + malformed + sum(refused.values())
        report = RoundReport(
            server_round=server_round,
            asked=self._sampled,
            aggregated=len(aggregated),
            lost=max(self._sampled - answered, 0),
            late=late,
            malformed=malformed,
            refused=dict(sorted(refused.items())),
        )
        if report.aggregated < report.asked:
            log(
                WARNING if report.malformed else INFO,
                "Round %d: %d of %d replies aggregated (lost %d, refused %s, late %d, malformed %d).",
                *(server_round, report.aggregated, report.asked, report.lost, report.refused, late, malformed),
            )
        return report

    def _take_figures(self, server_round: int, figures: Mapping[str, TrainingFigures]) -> None:
        """Keep what simulated machines say that clipping did, and warn of what makes a training useless."""
        if not figures:
            return
        of_round = TrainingFigures.together(figures.values())
        self.training[server_round] = of_round
        name, worst = max(figures.items(), key=lambda item: item[1].largest_ratio)
        if of_round.not_finite and not self._warned_of_not_finite:
            self._warned_of_not_finite = True
            log(WARNING, "Round %d, in simulation: %s", server_round, of_round.sentence)
        # Each time it has doubled: once is too few where a training diverges, every round too many.
        if of_round.median_ratio > max(FAR_BEYOND, 2 * self._warned_of_ratio):
            self._warned_of_ratio = of_round.median_ratio
            log(
                WARNING,
                "Round %d, in simulation: half of the contributions were over %s the clip norm%s: next to "
                "nothing is left of them. Scale the model or its inputs, train less at a time, or raise clip_norm.",
                *(server_round, times(of_round.median_ratio)),
                ""
                if name == _TOGETHER
                else f", the update of machine {name} was {times(worst.largest_ratio)} the clip",
            )

    def _save(self) -> None:
        if self.checkpoint is None or self.state is None:
            return
        state = {f"state.{f.name}": getattr(self.state, f.name) for f in fields(self.state)}  # type: ignore[arg-type]
        save_checkpoint(self.checkpoint, self._identity(), state | self._kept())

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint holds beside the update rule's state, plain values; :meth:`_restore` takes it back."""
        return {
            "server_round": self.history[-1].server_round if self.history else 0,
            "acks": self.acks,
            "machines": self.machines.names,
            "seed": self.seed,
            "session": self.session,
            "history": [asdict(report) for report in self.history],
        }

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on: the settings, the model's layout and where it started."""
        layout = [[name, list(shape), str(dtype)] for name, shape, dtype in self._layout]
        return {**self.settings(), "layout": layout, "start": self._start}

    def _resume(self, result: Result) -> int:
        """Load the checkpoint if there is one; the number of rounds done."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0
        names = [f.name for f in fields(self.state_type)]
        expected = {f"state.{name}" for name in names} | set(self._kept())
        saved = load_checkpoint(self.checkpoint, self._identity(), expected)
        self._check_saved(saved)
        self.state = self.state_type(**{name: saved[f"state.{name}"] for name in names})
        self._restore(saved)
        for report in self.history:
            result.train_metrics_clientapp[report.server_round] = report.metrics
        result.arrays = self._record(self.model(self.state))  # type: ignore[arg-type]
        log(INFO, "Resuming after round %d from %s.", saved["server_round"], self.checkpoint)
        return int(saved["server_round"])

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that can be read and must not be gone on from; for subclasses."""

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Take back what :meth:`_kept` gave."""
        self.acks = {str(name): int(ack) for name, ack in saved["acks"].items()}
        self.machines.restore(list(saved["machines"]))
        self.seed, self.session = int(saved["seed"]), str(saved["session"])
        self.history = [RoundReport(**report) for report in saved["history"]]


def _log_evaluation(server_round: int, num_rounds: int, metrics: MetricRecord) -> None:
    """As Flower's own strategies log it, in rounds that have one."""
    log(INFO, "")
    log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
    log(INFO, "Global evaluation")
    log(INFO, "\t└──> MetricRecord: %s", metrics)
