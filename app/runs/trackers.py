"""Optional logging of runs to TensorBoard, MLflow or Weights & Biases, through their own packages; off by default.

Only what the server knows is logged: losses and accuracies on public data, what became of requests, the configuration,
and the guarantee's sentence beside every epsilon. Everything stays on this computer and the packages' telemetry is
off, unless their own environment variables say otherwise.
"""

from __future__ import annotations

import importlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...privacy import Guarantee, MurmurflError
from ..settings.run_config import RunConfig
from .outcome import Outcome
from .progress import Progress
from .run_summary import shown_accuracy

PROJECT = "murmurfl"
EPSILON = "epsilon_of_the_whole_run"
"""The epsilon that is logged, constant over the rounds; its sentence is logged with it."""
EPSILON_LOCAL = "epsilon_whatever_happens"
"""Under secure aggregation, the other one of that sentence."""

logger = logging.getLogger(__name__)


class TrackerError(MurmurflError):
    """A tracker that was asked for cannot be used."""


class Tracker(ABC):
    """One package that a run is logged to, from the run's folder."""

    extra: str
    module: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def load(cls) -> Any:
        """The package's module; raises TrackerError if it is not installed."""
        try:
            return importlib.import_module(cls.module)
        except ImportError as error:
            raise TrackerError(
                f"Expected the package of track = {cls.extra!r}, got: {error}. Install it with "
                f"pip install 'murmurfl[{cls.extra}]', or leave track empty."
            ) from error

    @abstractmethod
    def start(self, settings: Mapping[str, Any], guarantee: Guarantee) -> None:
        """Before the first round: the configuration and what the run will guarantee."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Figures of a round."""

    @abstractmethod
    def finish(self, outcome: Outcome | None) -> None:
        """After the run, with what it left, or None if it failed."""


class TensorBoard(Tracker):
    """Events in the run's folder, under ``tensorboard``."""

    extra, module = "tensorboard", "torch.utils.tensorboard"

    def start(self, settings: Mapping[str, Any], guarantee: Guarantee) -> None:
        self._writer = self.load().SummaryWriter(str(self.folder / "tensorboard"))
        table = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("configuration", f"| key | value |\n|---|---|\n{table}")
        self._writer.add_text("guarantee", guarantee.sentence)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._writer.add_text("guarantee", outcome.guarantee, outcome.rounds)
            self._writer.add_text("test accuracy", shown_accuracy(outcome), outcome.rounds)
        self._writer.close()


class MLflow(Tracker):
    """A run in ``MLFLOW_TRACKING_URI``, or else in a local file, ``mlflow.db`` beside the run's folder."""

    extra, module = "mlflow", "mlflow"

    def start(self, settings: Mapping[str, Any], guarantee: Guarantee) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        module = self.load()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder.resolve().parent / 'mlflow.db'}"
        self._client = module.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        tags = {"guarantee": guarantee.sentence}
        self._run = self._client.create_run(number, run_name=self.folder.name, tags=tags).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def finish(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._client.set_tag(self._run, "guarantee", outcome.guarantee)
        self._client.set_terminated(self._run, "FAILED" if outcome is None else "FINISHED")


class WandB(Tracker):
    """A run in the run's folder, under ``wandb``; offline unless ``WANDB_MODE`` says otherwise."""

    extra, module = "wandb", "wandb"

    def start(self, settings: Mapping[str, Any], guarantee: Guarantee) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        module = self.load()
        self._run = module.init(
            project=PROJECT,
            name=self.folder.name,
            dir=str(self.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(settings),
            notes=guarantee.sentence,
            # Figures only: nothing about this machine, its code or what it prints.
            settings=module.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                silent=True,
            ),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._run.summary["guarantee"] = outcome.guarantee
        self._run.finish(exit_code=1 if outcome is None else 0)


_TRACKERS: dict[str, type[Tracker]] = {kind.extra: kind for kind in (TensorBoard, MLflow, WandB)}


class Tracking:
    """All trackers of one run."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self.outcome: Outcome | None = None

    def round(self, progress: Progress) -> None:
        """Log what a round gave."""
        report = progress.report
        values = {name: getattr(progress, name) for name in ("accuracy", "auc", "loss")}
        values |= {EPSILON: progress.epsilon, EPSILON_LOCAL: progress.epsilon_local}
        known = {name: value for name, value in values.items() if value is not None}
        known |= {f"replies/{name}": value for name, value in report.metrics.items()}
        for tracker in self._trackers:
            tracker.log(known, report.server_round)

    def result(self, outcome: Outcome) -> None:
        """Take note of the outcome; a run without one counts as failed."""
        self.outcome = outcome


def check_trackers(config: RunConfig) -> None:
    """Refuse a configuration whose trackers are not installed, before anything starts."""
    for name in config.trackers:
        _TRACKERS[name].load()


@contextmanager
def tracking(config: RunConfig, folder: Path, guarantee: Guarantee) -> Iterator[Tracking]:
    """Start the trackers that a configuration asks for, and close them when the block ends, however it ends.

    Raises
    ------
    TrackerError
        If a package is missing.
    """
    check_trackers(config)
    if config.trackers:
        folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in config.shown().items() if key not in ("out-dir", "data-root")}
    started: list[Tracker] = []
    made = Tracking(started)
    try:
        for name in config.trackers:
            tracker = _TRACKERS[name](folder)
            tracker.start(settings, guarantee)
            started.append(tracker)
        yield made
    finally:
        for tracker in started:
            tracker.finish(made.outcome)
