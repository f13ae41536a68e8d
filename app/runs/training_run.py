"""One run, whatever carries its messages: from an experiment to a trained model and what it cost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from ...privacy import protocol
from ...privacy.accounting.guarantee import Figures, Statements, stated_figures
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.errors import ConfigurationError, MurmurflError
from ...strategies.callbacks.callback import Callback, Training
from ...strategies.rounds.checkpoint import checkpoint_header
from ...strategies.rounds.guarded_grid import GuardedGrid
from ...strategies.rounds.replies import DirectReplies, RoundReport
from ...strategies.rounds.strategy import ReleaseStrategy
from ..methods.method import AUTO, refuse_unsettled
from ..methods.presets import feature_bound
from ..methods.queries import QueryOutcome, check_permit
from ..planning.rehearsal import foretold
from ..settings.run_config import RunConfig, nothing_gained
from .client_statements import compact, listed
from .experiment import Experiment, prepare, reply_is_lost, resolve
from .progress import Progress
from .result import END_NAME, RunResult, excluded_clients
from .run_guarantees import configured_figures, refuse_untrue
from .simulated_figures import GradientNorms, OnlineLosses

REAL_NODES = "real-nodes"
"""The engine's name where clients are real."""

log = logging.getLogger("flwr").log

_WORTH_SAYING = 0.05
"""Share of closed rounds above which a run warns beforehand."""


class NoReleasesError(MurmurflError):
    """No release could be aggregated for ``give-up-after`` rounds in a row."""

    kind = "missing"


def check_deployed(config: RunConfig) -> None:
    """Refuse a run on real clients that is for simulation only.

    Notes
    -----
    Real clients add the noise of their own policies whatever a run configuration says, and refuse to be without. It
    keeps a run without noise from being called private.
    """
    if config.strategy == AUTO:
        raise refuse_unsettled()
    if not config.private:
        raise ConfigurationError(
            f"Expected a noise mechanism on real clients, got mechanism = {config.mechanism.kind!r}: runs without "
            "noise are for simulation only, and a client's noise is its operator's business. Leave mechanism empty; "
            "to see what noise costs, use `murmurfl run --engine cohort --set mechanism=none`.",
            kind="conflict",
            setting="mechanism",
        )
    check_permit(config)


def of_session(config: RunConfig, checkpoint: Path | None) -> RunConfig:
    """Return a configuration with the numbers of clients of the session that it resumes, which are fixed, if it does.

    A federation whose members have changed since then has others in its settings: those are for its next session.
    """
    if checkpoint is None or not checkpoint.exists() or config.over_selection != 1:
        return config
    settings, _ = checkpoint_header(checkpoint)
    found = {name: settings.get(name) for name in ("num_clients", "clients_per_round")}
    if not all(isinstance(value, int) for value in found.values()):
        return config
    if any(getattr(config, name) != value for name, value in found.items()):
        log(
            WARNING,
            "The session that is resumed has num-clients = %s and clients-per-round = %s, which stay: got %s and %s.",
            *(*found.values(), config.num_clients, config.clients_per_round),
        )
        return replace(config, **found)
    return config


def run_experiment(
    grid: Grid | DirectReplies,
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    deployed: bool = False,
    engine: str = "",
    experiment: Experiment | None = None,
    rehearsed: bool = False,
) -> RunResult:
    """Run a configuration over a grid, to the end.

    Parameters
    ----------
    grid : Grid or DirectReplies
        Ray's grid, the in-process one or a network's; or the clients of the cohort engine.
    checkpoint : Path, optional
        Where the server saves its state after every round; useful where the clients' ledgers outlive the run.
    on_progress : callable, optional
        Called after every round.
    deployed : bool
        Whether the clients are real ones, with policies of their own and ledgers that outlive the run: then the
        session has a fresh name, the guarantee is what the clients state, and they are asked before the first round
        how many releases they can make.
    engine : str
        What carries the messages, for the record; real clients are called ``real-nodes``.
    experiment : Experiment, optional
        The configuration worked out, where its clients are not those that it would have by itself.
    rehearsed : bool
        Whether the forecast before the first round is a rehearsal on made-up data, which takes about a second.

    Raises
    ------
    MurmurflError
        If the configuration is impossible, clients are missing or can make too few releases, nothing could be
        aggregated in ``give-up-after`` rounds in a row, or ever.
    """
    experiment = _ready(config, experiment, checkpoint, deployed=deployed)
    config = experiment.config  # of a strategy that was chosen, the chosen one's
    if config.lost_replies and not isinstance(grid, DirectReplies):
        grid = LossyGrid(grid, config.lost_replies, config.seed)
    started = time.perf_counter()
    answers: dict[str, QueryOutcome] = {}
    inputs: dict[str, Any] = {}  # what later requests bring of answers
    for query in (query for query in experiment.queries if query.before):
        found = answers[query.name] = query.ask(grid, checkpoint, deployed=deployed, inputs=inputs)
        inputs |= query.inputs(found.answer)
    watch = _Watch(
        experiment.seen_by(answers), deployed, on_progress, checkpoint, rehearsed=experiment if rehearsed else None
    )
    strategy = experiment.strategy(
        deployed=deployed,
        **({"public_inputs": inputs} if inputs else {}),
        checkpoint=checkpoint,
        evaluate_every=watch.evaluate_every,
        callbacks=[watch],
    )
    result = strategy.start(
        grid,
        experiment.initial_arrays(),
        num_rounds=experiment.num_rounds,
        timeout=config.round_timeout_s,
        simulated=not deployed,  # a simulation may have fewer nodes than clients
    )
    seconds = time.perf_counter() - started
    _refuse_nothing(strategy, watch.progress)
    if not watch.progress:  # resumed after its last round: only the evaluation was left to do
        watch.after_round(strategy, strategy.history[-1], result.evaluate_metrics_serverapp.get(len(strategy.history)))
    for query in (query for query in experiment.queries if not query.before):
        answers[query.name] = query.ask(
            grid, checkpoint, deployed=deployed, inputs=inputs, model=result.arrays, trained=strategy
        )
    statements = strategy.ask_privacy(grid, timeout=config.round_timeout_s)
    # A real client that is gone by now has said before the first round what its releases guarantee.
    known = {**strategy.stated, **statements} if deployed else statements
    figures = _confirmed(watch.figures, experiment, known, deployed=deployed)
    return RunResult(
        experiment=experiment,
        strategy=strategy,
        parameters=result.arrays.to_numpy_ndarrays(),
        progress=watch.progress,
        statements=listed(statements),
        figures=figures,
        seconds=seconds,
        online=None if watch.regret is None else watch.regret.document(),
        deployed=deployed,
        gradient_norms=None if watch.norms is None else watch.norms.document(),
        training={} if deployed else strategy.training,
        engine=REAL_NODES if deployed else engine,
        answers=answers,
    )


def _ready(config: RunConfig, experiment: Experiment | None, checkpoint: Path | None, *, deployed: bool) -> Experiment:
    """Work a configuration out, unless it is already, refuse what cannot be run, and log what is unwise."""
    if deployed:
        check_deployed(config)
        config = of_session(config, checkpoint)
    experiment = prepare(config, deployed=deployed) if experiment is None else experiment
    if not deployed:
        experiment.check_rounds()
        _warn_beforehand(experiment)
    config = experiment.config
    if config.secure and config.private and (why := nothing_gained(config.sums.min_honest)):
        log(WARNING, why)
    return experiment


def _confirmed(figures: Figures, experiment: Experiment, statements: Statements, *, deployed: bool) -> Figures:
    """Return a run's figures as its clients confirm them: real ones state their own, simulated ones have the run's."""
    if experiment.method.trusted:
        return figures
    if deployed:
        return stated_figures(figures, statements, experiment.config.num_clients)
    refuse_untrue(figures, statements)
    return figures


def _rehearsal(experiment: Experiment, deployed: bool, forecast: Forecast) -> tuple[float, float] | None:
    """Rehearse a run; that of real clients at the mu that they state, if it is less than was thought."""
    config = experiment.config
    if deployed and forecast.mu < config.mu:
        experiment = replace(experiment, config=replace(config, mu=forecast.mu))
    return foretold(experiment, resolve)


class _Watch(Callback):
    """Observes a run: evaluations, progress, and rounds without a release.

    The folder of ``checkpoint`` is where people ask a run on real clients to end, or to exclude clients; ``rehearsed``
    is the experiment that is rehearsed before the first round, if it has noise.
    """

    handles_no_progress = True  # give-up-after says when a run ends, and what is made of its history

    def __init__(
        self,
        experiment: Experiment,
        deployed: bool,
        on_progress: Callable[[Progress], None] | None,
        checkpoint: Path | None,
        *,
        rehearsed: Experiment | None,
    ) -> None:
        config = experiment.config
        self.experiment = experiment
        self._looked = 0, False  # the last round in which END_NAME was looked for, and whether it was there
        self._deployed, self._rehearsed = deployed, rehearsed
        self._folder = checkpoint.parent if deployed and checkpoint is not None else None
        self.progress: list[Progress] = []
        self.figures = configured_figures(experiment)
        self.regret = _regret_of(experiment)
        # Computed from samples that only a simulation has.
        wanted = config.gradient_norm and not deployed
        self.norms = GradientNorms(experiment.model, experiment.data) if wanted else None
        self._on_progress = on_progress
        self._times: list[float] = []  # when rounds ended; clients of Ray start in the first
        self._silent: list[RoundReport] = []  # rounds in a row that asked for releases and got none

    @property
    def evaluate_every(self) -> int:
        """Rounds from one evaluation to the next: one where every round's model is looked at."""
        return 1 if self.regret is not None else self.experiment.config.evaluate_every

    def on_forecast(self, training: Training, forecast: Forecast) -> Forecast:
        """Return the forecast with what a rehearsal on made-up data found."""
        if self._rehearsed is None or not self._rehearsed.config.private:
            return forecast
        return replace(forecast, rehearsed=_rehearsal(self._rehearsed, self._deployed, forecast))

    def exclude(self, training: Training) -> Collection[str]:
        """Return the clients that the operator has excluded from the run of a folder."""
        return () if self._folder is None else excluded_clients(self._folder)

    def should_stop(self, training: Training, server_round: int) -> bool:
        """Return True if somebody asked the run of a folder to end (:func:`~murmurfl.app.runs.result.ask_to_end`)."""
        if not self._is_asked_to_end(server_round):
            return False
        rounds = self.experiment.num_rounds
        log(WARNING, "The training ends after round %d of %d with its model so far, as asked.", server_round, rounds)
        return True

    def evaluate(self, training: Training, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the central evaluation of the model after a round, in rounds that have one."""
        if self.regret is not None:
            self.regret.record(server_round, arrays.to_numpy_ndarrays())
        last = server_round == self.experiment.num_rounds or bool(training.ended) or self._is_asked_to_end(server_round)
        wanted = last or server_round % self.experiment.config.evaluate_every == 0
        if self.norms is not None and wanted:
            self.norms.record(server_round, arrays.to_numpy_ndarrays())
        return self.experiment.evaluate(arrays) if server_round and wanted else None

    def _is_asked_to_end(self, server_round: int) -> bool:
        """Return True if the run is asked to end; one look a round, so that a last model is always evaluated."""
        if self._folder is not None and self._looked[0] != server_round:
            self._looked = server_round, (self._folder / END_NAME).exists()
        return self._looked == (server_round, True)

    def after_round(self, training: Training, report: RoundReport, metrics: MetricRecord | None) -> None:
        """Take note of a round that is over; ends a run from which nothing comes any more."""
        config = self.experiment.config
        loss = None if metrics is None else float(metrics["loss"])  # type: ignore[arg-type]
        self._say_divergence(loss)
        self.progress.append(
            Progress(
                report,
                self.experiment.num_rounds,
                loss,
                _measured(metrics, "accuracy"),
                self.figures.loss,
                config.delta,
                self._seconds_left(report),
                compact(training.participation),
                _measured(metrics, "auc"),
            )
        )
        if report.aggregated:
            self._silent.clear()
        elif report.asked and not report.skipped:  # of wrong sums the strategy has bounds of its own
            self._silent.append(report)
        _give_up(self._silent, config.give_up_after)
        if self._on_progress is not None:
            self._on_progress(self.progress[-1])

    def _say_divergence(self, loss: float | None) -> None:
        diverged = (entry.loss is not None and not math.isfinite(entry.loss) for entry in self.progress)
        if loss is not None and not math.isfinite(loss) and not any(diverged):  # said once
            log(WARNING, "The loss is not a finite number: the model has diverged. Lower learning-rate.")

    def _seconds_left(self, report: RoundReport) -> float | None:
        self._times.append(time.perf_counter())
        to_do = self.experiment.num_rounds - report.server_round
        if not self.progress:
            return None if to_do else 0.0
        return (self._times[-1] - self._times[0]) / len(self.progress) * to_do


def _measured(metrics: MetricRecord | None, name: str) -> float | None:
    """Return a figure of the central evaluation; None where the model has none such."""
    value = math.nan if metrics is None else float(metrics.get(name, math.nan))  # type: ignore[arg-type]
    return None if math.isnan(value) else value


def _regret_of(experiment: Experiment) -> OnlineLosses | None:
    """Return the losses of a regret, where every client learns once from every sample; otherwise None."""
    config = experiment.config
    if not experiment.method.has_regret or config.clients_per_round != config.num_clients:
        return None
    if experiment.num_rounds * config.batch_size > min(experiment.sizes):
        return None
    # Names every client's samples, their order and the model's loss on them, for optima that are kept on disk.
    data = (
        *(config.task, config.features, config.partition, config.num_clients, config.seed),
        config.validation_samples,
        *(config.synthetic_samples, config.synthetic_features, config.synthetic_alpha, config.synthetic_beta),
        *(config.dirichlet_alpha, config.classes_per_client, config.model, feature_bound(config)),
    )
    return OnlineLosses(experiment.model, experiment.shards, config.batch_size, experiment.num_rounds, repr(data))


def _refuse_nothing(strategy: ReleaseStrategy[Any], progress: list[Progress]) -> None:
    """Refuse to call it a result if rounds asked for releases and none was ever aggregated."""
    made = strategy.history[len(strategy.history) - len(progress) :]
    if not progress or not any(report.asked for report in made) or any(report.aggregated for report in made):
        return
    reasons = sorted({reason for report in made for reason in report.refused})
    parts = [f"clients refused with {', '.join(reasons)}"] if reasons else []
    parts += sorted({f"a round was closed ({report.closed})" for report in made if report.closed})
    raise ConfigurationError(
        f"Expected releases to aggregate, got none in {len(progress)} rounds{': ' if parts else ''}{'; '.join(parts)}; "
        "see the clients' logs.",
        kind="missing",
    )


def _warn_beforehand(experiment: Experiment) -> None:
    """Say which client runs out and how many rounds stay closed, as far as seed and sizes tell."""
    found, left, floor = experiment.shortage, experiment.replies_left, experiment.config.sums.min_cohort
    if found is not None:
        log(
            WARNING,
            "Not every client lasts for all %d rounds: client %d is the first to run out; it can make %d releases "
            "(%s) and is asked for one more in round %d. Such clients refuse, and the others go on.",
            *(experiment.num_rounds, found.client, found.releases, found.reason, found.server_round),
        )
    closed = sum(replies < floor for replies in left)
    if closed > _WORTH_SAYING * len(left):
        log(
            WARNING,
            "%d of %d rounds will have fewer replies than trust.min-cohort = %d, with lost-replies = %g: they stay "
            "closed, and clients carry their releases over.",
            *(closed, len(left), floor, experiment.config.lost_replies),
        )


def _give_up(silent: list[RoundReport], patience: int) -> None:
    """End a run from which nothing comes any more."""
    if not patience or len(silent) < patience:
        return
    reasons = " and ".join(sorted({reason for report in silent for reason in report.refused}))
    closed = next((f"it was closed ({report.closed}); " for report in reversed(silent) if report.closed), "")
    raise NoReleasesError(
        f"Expected releases to aggregate, got none in {patience} rounds in a row, the last of them round "
        f"{silent[-1].server_round}: {closed}"
        f"{f'clients refused with {reasons}' if reasons else 'no client refused'}, "
        f"{sum(report.lost for report in silent)} replies were lost. See the clients' logs; give-up-after sets how "
        "many such rounds are waited for."
    )


class LossyGrid(GuardedGrid):
    """A guarded grid, whose train replies are lost at random: the client did its work, the server never hears of it.

    Each is lost by itself with probability ``lost_replies``; the same seed loses the same replies on every engine.
    """

    def __init__(self, grid: Grid, lost_replies: float, seed: int) -> None:
        super().__init__(grid)
        self._lost_replies = lost_replies
        self._seed = seed

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        lost = {message.metadata.dst_node_id for message in messages if self._loses(message)}
        replies = super().send_and_receive(messages, timeout=timeout)
        return [
            reply
            for reply in replies
            if reply.metadata.message_type != MessageType.TRAIN or reply.metadata.src_node_id not in lost
        ]

    def _loses(self, message: Message) -> bool:
        config = message.content.get(protocol.CONFIG, None)
        if message.metadata.message_type != MessageType.TRAIN or not isinstance(config, ConfigRecord):
            return False
        if protocol.ASK in config:  # a query to a noise mod, in a message of this type
            return False
        server_round, client = config[protocol.SERVER_ROUND], config[protocol.CLIENT]
        return reply_is_lost(self._lost_replies, self._seed, int(server_round), str(client))  # type: ignore[arg-type]
