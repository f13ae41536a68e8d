"""One run, whatever carries its messages: from a run configuration to a trained model and what it cost.

The same code builds the machines (in simulation an engine constructs their configurations from the run configuration),
the strategy, and the record of the run.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ..clients import (
    DelayedMomentumClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    OnlineClient,
    PrivateClient,
    ShuffledClient,
)
from ..clients.gradients import gradients_at
from ..privacy import (
    ClipUnit,
    ConfigurationError,
    Ledger,
    MurmurflError,
    NoisePlan,
    PrivacyPolicy,
    RowCache,
    ShuffledPolicy,
    SimulatedKeys,
    derived_seed,
    gdp_epsilon,
)
from ..privacy.training import TrainingFigures
from ..strategies import (
    CorrelatedMomentum,
    DelayedMomentum,
    DirectMachines,
    IsrlDp,
    Mu2,
    NoisySGD,
    OnlineFedSGD,
    PublicEpochs,
    ReducedTreeMomentum,
    ReleaseStrategy,
    RoundReport,
    ShuffledAvg,
    TreeMomentum,
    TrustedMu2,
    private_rounds,
)
from ..strategies.shuffled import penalty
from .config import BASELINES, MOMENTUM, NO_NOISE, TRUSTED, RunConfig
from .largest_mu import plan_or_largest_mu
from .models.models import Model, make_model
from .network import LossyGrid
from .observers.gradient_norms import GradientNorms
from .observers.online_losses import OnlineLosses
from .presets import Hyperparameters, feature_bound, hyperparameters, regularization
from .rounds import Shortage, shortage
from .tasks.loading import Shard, Task, load_shards, load_task, public_shard

_SERVER_NOISE = "server"
_CLIENTS: dict[str, type[PrivateClient]] = {
    "mu2": Mu2Client,
    "trusted-mu2": Mu2Client,
    "delayed-momentum": DelayedMomentumClient,
    "noisy-sgd": NoisySGDClient,
    "isrl-dp": IsrlDpClient,
    "isrl-dp-accelerated": IsrlDpClient,
    **dict.fromkeys(MOMENTUM, NoisySGDClient),
}


@dataclass(frozen=True)
class Experiment:
    """A run configuration worked out on its data: everything both sides need, before the first round.

    Parameters
    ----------
    config : RunConfig
    task : Task
    shards : list of Shard
        One a machine, in the order of their names.
    model : Model
    num_rounds : int
        T.
    values : Hyperparameters
        Clip, step, ball and schedule.
    """

    config: RunConfig
    task: Task
    shards: list[Shard]
    model: Model
    num_rounds: int
    values: Hyperparameters

    @cached_property
    def session(self) -> str:
        """The name of this run to its machines: in simulation, of its seed alone.

        Noise is a function of seed, machine and release, so that runs with one seed differ by what was changed between
        them and not by their noise. Every run has ledgers of its own.
        """
        return hashlib.sha256(f"seed {self.config.seed}".encode()).hexdigest()[:32]

    def policy(self, machine: int | None = None) -> PrivacyPolicy:
        """The policy an engine gives a simulated machine; None for the machine with the most samples."""
        return self._policy_for(self._most_samples if machine is None else len(self.shards[machine]))

    @cached_property
    def _most_samples(self) -> int:
        return max(len(shard) for shard in self.shards)

    @cached_property
    def _policies(self) -> dict[int, PrivacyPolicy]:
        return {}

    def _policy_for(self, samples: int) -> PrivacyPolicy:
        # Machines with as many samples have the same policy; a simulation builds a machine for every message.
        if samples not in self._policies:
            self._policies[samples] = self._make_policy(samples)
        return self._policies[samples]

    def _make_policy(self, samples: int) -> PrivacyPolicy:
        config = self.config
        if config.strategy == "shuffled":
            return self.shuffled_policy(samples)
        if config.strategy in MOMENTUM:  # one epoch for all machines
            samples = min(len(shard) for shard in self.shards)
        separation = samples // config.batch_size
        cap = config.max_participations or min(self.num_rounds, config.passes * separation)
        momentum = config.strategy in ("mu2", "delayed-momentum")
        schedule = self.values.schedule if self.mechanism == "cancelling" and momentum else None
        return PrivacyPolicy(
            clip_norm=self.values.clip_norm,
            batch_size=config.batch_size,
            max_participations=cap,
            mu=config.mu,
            delta=config.delta,
            mechanism=self.mechanism,
            mechanism_options=config.mechanism_options,
            schedule=schedule,
            num_rounds=self.num_rounds if schedule == "paper" else None,
            clip_unit=self.clip_unit,
            sample_participations=config.passes,
            min_separation=separation if config.passes > 1 else 1,
            noise_quality=config.noise_quality,  # type: ignore[arg-type]
            # SGD has nothing to carry over: a gradient that was lost belongs to a model that is gone.
            release_rule="paper" if config.strategy in (*BASELINES, *MOMENTUM) else config.release_rule,  # type: ignore[arg-type]
            trust="trusted-server" if config.strategy in TRUSTED else "untrusted-server",
        )

    def shuffled_policy(self, samples: int) -> ShuffledPolicy:
        """The policy of a silo of ``shuffled`` with so many samples."""
        config, private = self.config, samples
        if config.variant == "interleaved":
            private = max(round(config.private_share * samples), 1)
        return ShuffledPolicy(
            clip_norm=self.values.clip_norm,
            batch_size=samples,
            max_participations=config.max_participations or max(len(self.private_rounds), 1),
            mu=config.mu,
            delta=config.delta,
            private_steps=private,
            public_steps=samples - private,
            accounting=config.accounting,  # type: ignore[arg-type]
            noise_quality=config.noise_quality,  # type: ignore[arg-type]
            mechanism=NO_NOISE if not config.private else "independent",
        )

    @property
    def private_rounds(self) -> range:
        """The rounds of ``shuffled`` in which silos are asked."""
        return private_rounds(self.config.variant, self.num_rounds, self.config.private_share)  # type: ignore[arg-type]

    @cached_property
    def shortage(self) -> Shortage | None:
        """The simulated machine that is asked once too often first, if one is."""
        return self._shortage_within(self.num_rounds)

    def _shortage_within(self, num_rounds: int) -> Shortage | None:
        config, rounds = self.config, range(1, num_rounds + 1)
        if config.strategy == "shuffled":
            rounds = private_rounds(config.variant, num_rounds, config.private_share)  # type: ignore[arg-type]
        return shortage(config, [len(shard) for shard in self.shards], rounds, self.values.sampling)

    def check_rounds(self) -> None:
        """Refuse more rounds than samples and caps of simulated machines allow.

        Without ``num-rounds`` a run is one pass over all samples, in which a machine may use its own up before others
        do: that is allowed, and :func:`run_experiment` says so. So is everything with ``run-dry``.

        Raises
        ------
        ConfigurationError
            With the number of rounds that is possible.
        """
        config, found = self.config, self.shortage
        if found is None or config.run_dry or not (config.num_rounds or config.max_participations):
            return
        possible = self.num_rounds - 1 if config.strategy == "shuffled" else found.server_round - 1
        while self._shortage_within(possible):  # which rounds are private may depend on how many there are
            possible -= 1
        ways = [
            "fewer rounds",
            "a larger cap" if config.max_participations else "more data, smaller batches, more passes",
        ]
        if config.clients_per_round < config.num_clients and self.values.sampling != "balanced":
            ways.append("sampling = balanced, which asks all machines equally often")
        if config.strategy != "reduced-tree-momentum":
            ways.append("run-dry = true: machines that have nothing left then refuse, and the others go on")
        raise ConfigurationError(
            f"Expected num-rounds <= {possible}, got {self.num_rounds}: machine {found.machine} can make "
            f"{found.releases} releases ({found.reason}), and round {found.server_round} asks it for one more. Use "
            f"{', or '.join(ways)}."
        )

    @property
    def mechanism(self) -> str:
        """The mechanism of the machines' noise."""
        if not self.config.private:
            return NO_NOISE
        if self.config.strategy in MOMENTUM:
            return "independent"  # the mechanism that is set is the server's
        if self.config.mechanism:
            return self.config.mechanism
        alone = self.config.strategy in (*BASELINES, "shuffled")
        return "independent" if alone else "cancelling"

    @property
    def clip_unit(self) -> ClipUnit:
        """What the machines clip."""
        default = "update" if self.config.strategy == "online" else "sample"
        return self.config.clip_unit or default  # type: ignore[return-value]

    def plans(self) -> list[NoisePlan]:
        """The different noise plans of the machines."""
        sizes = {len(shard): i for i, shard in enumerate(self.shards)}
        return [plan_or_largest_mu(self.policy(i), self.model.num_parameters) for i in sizes.values()]

    def client(self, machine: int, ledger: Ledger, rows: RowCache | None = None) -> PrivateClient:
        """A simulated machine, with seeded keys. For engines only."""
        name = str(machine)
        parts = (self.model, self.shards[machine], self.policy(machine), ledger, SimulatedKeys(self.config.seed, name))
        if self.config.strategy == "online":
            return OnlineClient(*parts, name=name, learning_rate=self.values.learning_rate, rows=rows)
        if self.config.strategy == "shuffled":
            return self._silo(machine, ledger, rows)
        return _CLIENTS[self.config.strategy](*parts, name=name, rows=rows)

    def _silo(self, machine: int, ledger: Ledger, rows: RowCache | None) -> ShuffledClient:
        name, policy = str(machine), self.shuffled_policy(len(self.shards[machine]))
        return ShuffledClient(
            self.model,
            self.shards[machine],
            policy,
            ledger,
            SimulatedKeys(self.config.seed, name),
            name=name,
            learning_rate=self.values.learning_rate,
            public=public_shard(self.task, machine * policy.public_steps),
            order=self.config.order,  # type: ignore[arg-type]
            order_seed=self.order_seed(machine),
            rows=rows,
        )

    def order_seed(self, machine: int) -> int:
        """What the orders of a silo's samples are made from."""
        return derived_seed("order of a silo", self.config.seed, machine)

    def _shuffled_avg(self, common: dict[str, Any]) -> ShuffledAvg:
        steps, shard = max(len(shard) for shard in self.shards), public_shard(self.task, 0)
        epochs = None
        if len(self.private_rounds) < self.num_rounds:
            if shard is None or len(shard) < steps:
                raise ConfigurationError(
                    f"Expected {steps} public samples, an epoch of a silo, for variant {self.config.variant!r}, got "
                    f"{0 if shard is None else len(shard)}: set public-samples, or use a task that has them."
                )
            public = shard
            epochs = PublicEpochs(
                lambda point, i: gradients_at(self.model, point[None], public[i : i + 1])[0],
                steps,
                self.values.clip_norm,
            )
        kind, strength = regularization(self.config)
        return ShuffledAvg(
            steps_per_epoch=steps,
            regularizer=kind,
            strength=strength,
            rounds=self.private_rounds,
            public=epochs,
            **common,
        )

    def strategy(self, *, deployed: bool = False, **options: Any) -> ReleaseStrategy[Any]:
        """The server's half.

        Parameters
        ----------
        deployed : bool
            For real machines. Then the session has a fresh random name, because their ledgers know every session they
            ever took part in, and a trusted server's noise key comes from the operating system.
        **options
            The strategy's own.
        """
        config, values = self.config, self.values
        common: dict[str, Any] = {
            "num_clients": config.num_clients,
            "clients_per_round": config.clients_per_round,
            "learning_rate": values.learning_rate,
            "seed": config.seed,
            "sampling": values.sampling,
            "session": None if deployed else self.session,
            "largest_value": max(plan.largest_value for plan in self.plans()),
            "node_deadline_s": config.node_deadline_s,
            # What simulated machines can do is known without asking them.
            "run_dry": config.run_dry or not deployed,
            **options,
        }
        if config.strategy == "online":
            rate = config.global_learning_rate
            return OnlineFedSGD(local_steps=config.batch_size, global_learning_rate=rate, **common)
        if config.strategy == "shuffled":
            return self._shuffled_avg(common)
        keys = None if deployed else SimulatedKeys(config.seed, _SERVER_NOISE)  # None: the operating system's
        if config.strategy in MOMENTUM:
            return self._momentum(
                {**common, "policy": self.policy(), "num_rounds": self.num_rounds, "noise_keys": keys}
            )
        common["diameter"] = values.diameter
        if config.strategy == "noisy-sgd":
            return NoisySGD(**common)
        if config.strategy == "trusted-mu2":
            return TrustedMu2(policy=self.policy(), num_rounds=self.num_rounds, noise_keys=keys, **common)
        if config.strategy in ("isrl-dp", "isrl-dp-accelerated"):
            return IsrlDp(variant="minibatch" if config.strategy == "isrl-dp" else "accelerated", **common)
        return DelayedMomentum(**common) if config.strategy == "delayed-momentum" else Mu2(**common)

    def _momentum(self, options: dict[str, Any]) -> ReleaseStrategy[Any]:
        config = self.config
        if config.strategy == "trusted-sgd":
            return CorrelatedMomentum(alpha=1.0, normalised=False, **options)
        if config.strategy == "correlated-momentum":
            mechanism = "independent" if not config.private else config.mechanism or "blt"
            chosen = config.mechanism_options
            if mechanism == "blt" and config.passes > 1:
                chosen |= {"num_participations": config.passes, "min_separation": self.policy().min_separation}
            return CorrelatedMomentum(alpha=config.alpha, mechanism=mechanism, mechanism_options=chosen, **options)
        if config.strategy == "reduced-tree-momentum":
            smoothness = float(getattr(self.model, "smoothness", math.inf))
            return ReducedTreeMomentum(alpha=config.alpha, smoothness=smoothness, **options)
        return TreeMomentum(alpha=config.alpha, **options)

    def initial_arrays(self) -> ArrayRecord:
        """The public model training starts from, with the names of its parts."""
        parameters = self.model.initial_parameters(self.config.seed)
        record = ArrayRecord(parameters)
        return ArrayRecord(dict(zip(self.model.names, record.values(), strict=True)))

    def evaluate(self, arrays: ArrayRecord) -> MetricRecord:
        """Loss and accuracy on the test set, which is public; ``shuffled`` adds its regulariser to the loss."""
        parameters = arrays.to_numpy_ndarrays()
        loss, accuracy = self.model.evaluate(parameters, (self.task.test_features, self.task.test_labels))
        if self.config.strategy == "shuffled":
            kind, strength = regularization(self.config)
            loss += sum(float(penalty(kind, np.ravel(part), strength)) for part in parameters)
        return MetricRecord({"loss": loss, "accuracy": accuracy})


def _rounds_of_a_pass(config: RunConfig, shards: list[Shard], samples: int) -> int:
    if config.strategy == "shuffled":  # an epoch
        return 1
    if config.strategy in (
        "online",
        *MOMENTUM,
    ):  # every sample of a round is somebody's: until the first machine has no more
        return min(len(shard) for shard in shards) // config.batch_size
    return samples // (config.clients_per_round * config.batch_size)


@lru_cache(maxsize=2)
def prepare(config: RunConfig) -> Experiment:
    """Work out a run configuration on its data; cached, so every message of a simulation pays for it once.

    Raises
    ------
    ConfigurationError
        If the configuration is impossible for these data; one line.
    """
    task = load_task(config)
    shards = load_shards(config, task)
    model = make_model(config.model, task.num_features, task.num_classes, feature_bound(config))
    per_round = config.clients_per_round * config.batch_size
    num_rounds = config.num_rounds or config.passes * _rounds_of_a_pass(config, shards, len(task.train_labels))
    if num_rounds < 1:
        raise ConfigurationError(
            f"Expected at least one round in one pass, got {len(task.train_labels)} samples for clients-per-round x "
            f"batch-size = {per_round}."
        )
    if config.max_participations > num_rounds:
        raise ConfigurationError(
            f"Expected max-participations <= num-rounds = {num_rounds}, got {config.max_participations}."
        )
    values = hyperparameters(config, num_rounds, task.num_features, model.num_parameters)
    return Experiment(config, task, shards, model, num_rounds, values)


class NoReleasesError(MurmurflError):
    """Machines have sent nothing that could be aggregated for too long."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round.

    Parameters
    ----------
    report : RoundReport
    num_rounds : int
    loss, accuracy : float or None
        Of the central evaluation, in rounds that have one.
    mu, epsilon : float
        The guarantee of the whole run.
    seconds_left : float or None
        Until the last round, if the others take as long as those after the first; None after the first, which waits
        for the machines to start.
    machines : mapping
        The machines that were asked, and of each the number of its release that was aggregated, or None.
    """

    report: RoundReport
    num_rounds: int
    loss: float | None
    accuracy: float | None
    mu: float
    epsilon: float
    seconds_left: float | None = None
    machines: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """What came out of a run.

    Parameters
    ----------
    experiment : Experiment
    strategy : ReleaseStrategy
        After its last round.
    parameters : list of ndarray
        The published model.
    progress : list of Progress
        One a round.
    statements : dict
        What each machine says it has spent, by name.
    mu, epsilon : float
        The guarantee, at the configuration's delta.
    seconds : float
        Wall-clock time of the rounds.
    online : dict or None
        Cumulative loss and regrets, where they were computed
        (:meth:`murmurfl.app.observers.online_losses.OnlineLosses.document`).
    deployed : bool
        Whether the machines were real ones.
    training : dict of int to TrainingFigures
        What clipping did in each round of a simulation: not private.
    gradient_norms : dict or None
        The norms of the training loss's gradient, where they were asked for: ``rounds`` and ``values``.
    """

    experiment: Experiment
    strategy: ReleaseStrategy[Any]
    parameters: list[NDArray[Any]]
    progress: list[Progress]
    statements: dict[str, dict[str, Any]]
    mu: float
    epsilon: float
    seconds: float
    online: dict[str, Any] | None = None
    deployed: bool = False
    gradient_norms: dict[str, Any] | None = None
    training: Mapping[int, TrainingFigures] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """On the test set, after the last round; None where the model has none."""
        return next((p.accuracy for p in reversed(self.progress) if p.accuracy is not None), None)

    @property
    def loss(self) -> float:
        """On the test set, after the last round."""
        return float(next(p.loss for p in reversed(self.progress) if p.loss is not None))


def guaranteed_mu(experiment: Experiment) -> float:
    """Mu of everything a run may release: the largest of its machines', or the trusted server's.

    Notes
    -----
    **Formal guarantees.** For replacement of one sample of one machine, over all releases the caps allow. With an
    untrusted server it holds against the server; with a trusted one, against everybody else. Infinite without noise,
    whatever the configured mu is.
    """
    if experiment.config.strategy == "shuffled" and experiment.config.variant == "public-only":
        return 0.0  # nobody is asked
    if not experiment.config.private:
        return math.inf
    if experiment.config.strategy in TRUSTED:
        server: Any = experiment.strategy()
        return server.guaranteed_mu(experiment.model.num_parameters)
    return max(plan.mu for plan in experiment.plans())


def check_deployed(config: RunConfig) -> None:
    """Refuse a run on real machines that is for simulation only.

    Raises
    ------
    ConfigurationError

    Notes
    -----
    **Formal guarantees.** None rests on it: real machines add the noise of their own policies whatever a run
    configuration says, and refuse to be without. It keeps a run from being called what it is not.
    """
    if not config.private:
        raise ConfigurationError(
            f"Expected a noise mechanism on real machines, got mechanism = {config.mechanism!r}: runs without noise "
            "are for simulation only, and a machine's noise is its operator's business. Leave mechanism empty; to see "
            "what noise costs, use `murmurfl run --engine cohort --set mechanism=none`."
        )


def run_experiment(
    grid: Grid | DirectMachines,
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    deployed: bool = False,
) -> RunResult:
    """Run a configuration over a grid, to the end.

    Parameters
    ----------
    grid : Grid or DirectMachines
        Ray's grid, the in-process one or a network's; or the machines of the cohort engine.
    config : RunConfig
    checkpoint : Path, optional
        Where the server saves its state after every round; of use where the machines' ledgers outlive the run.
    on_progress : callable, optional
        Called after every round.
    deployed : bool
        Whether the machines are real ones, with policies of their own and ledgers that outlive the run: then the
        session has a fresh name, the guarantee is what the machines state, and they are asked before the first round
        how many releases they can make.

    Raises
    ------
    MurmurflError
        If the configuration is impossible, machines are missing or can make too few releases, nothing could be
        aggregated in ``give-up-after`` rounds in a row, or ever.
    """
    if deployed:
        check_deployed(config)
    experiment = prepare(config)
    if not deployed:
        experiment.check_rounds()
        _say_shortage(experiment)
    mu = guaranteed_mu(experiment)
    epsilon = gdp_epsilon(mu, config.delta) if math.isfinite(mu) else math.inf
    progress: list[Progress] = []
    online = None
    everybody = config.strategy == "online" and config.clients_per_round == config.num_clients
    if everybody and experiment.num_rounds * config.batch_size <= min(len(shard) for shard in experiment.shards):
        online = OnlineLosses(
            experiment.model, experiment.shards, config.batch_size, experiment.num_rounds, _data_of(config)
        )

    # Of samples that only a simulation has.
    norms = GradientNorms(experiment.model, experiment.task) if config.gradient_norm and not deployed else None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if online is not None:
            online.record(server_round, arrays.to_numpy_ndarrays())
        wanted = server_round % config.evaluate_every == 0 or server_round == experiment.num_rounds
        if norms is not None and wanted:
            norms.record(server_round, arrays.to_numpy_ndarrays())
        return experiment.evaluate(arrays) if server_round and wanted else None

    def on_round(report: RoundReport, metrics: MetricRecord | None) -> None:
        loss = None if metrics is None else float(metrics["loss"])  # type: ignore[arg-type]
        accuracy = None if metrics is None else float(metrics["accuracy"])  # type: ignore[arg-type]
        accuracy = None if accuracy is None or math.isnan(accuracy) else accuracy
        diverged = (entry.loss is not None and not math.isfinite(entry.loss) for entry in progress)
        if loss is not None and not math.isfinite(loss) and not any(diverged):  # said once
            log(WARNING, "The loss is not a finite number: the model has diverged. Lower learning-rate.")
        now = time.perf_counter()
        ended.append(now)
        to_do = experiment.num_rounds - report.server_round
        left = (now - ended[0]) / len(progress) * to_do if progress else None if to_do else 0.0
        progress.append(
            Progress(report, experiment.num_rounds, loss, accuracy, mu, epsilon, left, strategy.participation)
        )
        if report.aggregated:
            silent.clear()
        elif report.asked:
            silent.append(report)
        _give_up(silent, config.give_up_after)
        if on_progress is not None:
            on_progress(progress[-1])

    ended: list[float] = []  # when rounds ended; machines of Ray start in the first
    silent: list[RoundReport] = []  # rounds in a row that asked for releases and got none
    every = 1 if online is not None else config.evaluate_every
    strategy = experiment.strategy(deployed=deployed, checkpoint=checkpoint, evaluate_every=every, on_round=on_round)
    strategy.machines.several_on_a_node = not deployed  # a simulation may have fewer nodes than machines
    if config.lost_replies and not isinstance(grid, DirectMachines):
        grid = LossyGrid(grid, config.lost_replies, config.seed)
    started = time.perf_counter()
    result = strategy.start(
        grid,
        experiment.initial_arrays(),
        num_rounds=experiment.num_rounds,
        timeout=config.round_timeout_s,
        evaluate_fn=evaluate,
    )
    seconds = time.perf_counter() - started
    resumed = len(strategy.history) - len(progress)
    asked = any(report.asked for report in strategy.history[resumed:])
    if progress and asked and not any(report.aggregated for report in strategy.history[resumed:]):
        reasons = sorted({reason for report in strategy.history[resumed:] for reason in report.refused})
        raise ConfigurationError(
            f"Expected releases to aggregate, got none in {len(progress)} rounds"
            f"{': machines refused with ' + ', '.join(reasons) if reasons else ''}; see the machines' logs."
        )
    if not progress:  # resumed after its last round: only the evaluation was left to do
        metrics = result.evaluate_metrics_serverapp.get(len(strategy.history))
        on_round(strategy.history[-1], metrics)
    statements = strategy.ask_privacy(grid, timeout=config.round_timeout_s)
    if deployed and config.strategy not in TRUSTED:
        mu = _stated_mu(statements, mu, config.num_clients)
        epsilon = gdp_epsilon(mu, config.delta) if math.isfinite(mu) else math.inf
    return RunResult(
        experiment=experiment,
        strategy=strategy,
        parameters=result.arrays.to_numpy_ndarrays(),
        progress=progress,
        statements=statements,
        mu=mu,
        epsilon=epsilon,
        seconds=seconds,
        online=None if online is None else online.document(),
        deployed=deployed,
        gradient_norms=None if norms is None else norms.document(),
        training={} if deployed else strategy.training,
    )


def _stated_mu(statements: dict[str, dict[str, Any]], configured: float, num_clients: int) -> float:
    """The largest mu that machines state; for those that did not answer, the run configuration's."""
    stated = [float(statement["mu-guaranteed"]) for statement in statements.values()]
    return max([*stated, *([configured] if len(statements) < num_clients else [])])


def _say_shortage(experiment: Experiment) -> None:
    found = experiment.shortage
    if found is not None:
        log(
            WARNING,
            "Not every machine lasts for all %d rounds: machine %d is the first to run out; it can make %d releases "
            "(%s) and is asked for one more in round %d. Such machines refuse, and the others go on.",
            *(experiment.num_rounds, found.machine, found.releases, found.reason, found.server_round),
        )


def _give_up(silent: list[RoundReport], patience: int) -> None:
    """End a run from which nothing comes any more."""
    if not patience or len(silent) < patience:
        return
    reasons = " and ".join(sorted({reason for report in silent for reason in report.refused}))
    raise NoReleasesError(
        f"Expected releases to aggregate, got none in {patience} rounds in a row, the last of them round "
        f"{silent[-1].server_round}: {f'machines refused with {reasons}' if reasons else 'no machine refused'}, "
        f"{sum(report.lost for report in silent)} replies were lost. See the machines' logs; give-up-after sets how "
        "many such rounds are waited for."
    )


def _data_of(config: RunConfig) -> str:
    """What settles every machine's samples, their order and the model's loss on them."""
    return repr(
        (
            *(
                config.task,
                config.features,
                config.partition,
                config.num_clients,
                config.seed,
                config.validation_samples,
            ),
            *(config.synthetic_samples, config.synthetic_features, config.synthetic_alpha, config.synthetic_beta),
            *(config.dirichlet_alpha, config.model, feature_bound(config)),
        )
    )


def model_arrays(result: RunResult) -> dict[str, NDArray[Any]]:
    """The trained model's arrays by name."""
    return {name: np.asarray(v) for name, v in zip(result.experiment.model.names, result.parameters, strict=True)}
