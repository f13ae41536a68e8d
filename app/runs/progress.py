"""Progress of a run after a round: the line that it logs, and the trackers that it is logged to.

Every engine says the same lines; over ``flwr run`` they come back out of Flower's log, where the command reads them.
The guarantee that their epsilon belongs to stands above them, once.

Trackers (TensorBoard, MLflow, Weights & Biases) are off by default and run through their own packages. They log only
what the server knows: losses and accuracies on public data, what became of requests, the configuration, and the
guarantee's sentence beside every epsilon. Everything stays on this computer and the packages' telemetry is off, unless
their own environment variables say otherwise.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...privacy.accounting.guarantee import Guarantee, rounded_up
from ...privacy.accounting.loss import Loss
from ...privacy.errors import MurmurflError, install_command
from ...strategies.rounds.replies import RoundReport
from ..settings.run_config import RunConfig, helper_names
from .outcome import Outcome
from .run_summary import shown_accuracy


def participant_names(config: RunConfig) -> list[str]:
    """Return the names of clients, then helpers; each is on a node of its own where there are enough nodes."""
    helpers = helper_names(config.summing.helpers) if config.secure else ()
    return [*map(str, range(config.num_clients)), *helpers]


_LINES = 20
"""Rounds without an evaluation say so many lines in a run, and no more."""

_FAST = " (fast noise: no guarantee)"

_LINE = re.compile(
    r"round +(?P<round>\d+)/(?P<rounds>\d+)(?:  accuracy +(?P<accuracy>\S+) %)?(?:  loss (?P<loss>\S+))?"
    r"  epsilon (?P<epsilon>\S+)(?: or (?P<local>\S+))?(?P<note> \(.*?\))? \(whole run\)"
    r"  replies (?P<aggregated>\d+)/(?P<asked>\d+)(?:  left (?P<left>\S+))?"
)
"""A line in Flower's log."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run after a round.

    Parameters
    ----------
    loss, accuracy, auc : float or None
        Of the central evaluation, in rounds that have one; the area under the ROC curve where there are two classes.
    guaranteed : Loss
        The guarantee of the whole run.
    delta : float
        Where its epsilons are shown.
    seconds_left : float or None
        Until the last round, if the others take as long as those after the first; None after the first, which waits
        for the clients to start.
    clients : mapping
        The clients that were asked, and of each the number of its release that was aggregated, or None.
    """

    report: RoundReport
    num_rounds: int
    loss: float | None
    accuracy: float | None
    guaranteed: Loss
    delta: float
    seconds_left: float | None = None
    clients: Mapping[str, int | None] = field(default_factory=dict)
    auc: float | None = None

    @property
    def mu(self) -> float:
        """Mu of the whole run."""
        return self.guaranteed.mu

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole run."""
        return self.guaranteed.assumed.epsilon(self.delta)

    @property
    def epsilon_worst_case(self) -> float | None:
        """Epsilon whatever server, helpers and other clients do, under secure aggregation; else None."""
        return self.guaranteed.worst_case.epsilon(self.delta) if self.guaranteed.conditional else None


@dataclass(frozen=True)
class RoundLine:
    """One round as a line of text: Progress as far as the line has it, its epsilons rounded up.

    ``epsilon_worst_case`` is empty without secure aggregation; noise that is ``fast`` protects nobody.
    """

    server_round: int
    num_rounds: int
    accuracy: float | None
    loss: float | None
    epsilon: str
    fast: bool
    aggregated: int
    asked: int
    seconds_left: float | None
    epsilon_worst_case: str = ""

    @classmethod
    def of(cls, progress: Progress, noise_quality: str) -> RoundLine:
        """Return the line of a round."""
        report = progress.report
        return cls(
            report.server_round,
            progress.num_rounds,
            progress.accuracy,
            progress.loss,
            rounded_up(progress.epsilon),
            noise_quality != "exact",
            report.aggregated,
            report.asked,
            progress.seconds_left,
            "" if progress.epsilon_worst_case is None else rounded_up(progress.epsilon_worst_case),
        )

    @classmethod
    def read(cls, text: str) -> RoundLine | None:
        """Return a line of a log back as what it says; None if it is another."""
        found = _LINE.fullmatch(text)
        if found is None:
            return None
        accuracy, loss, left = found["accuracy"], found["loss"], found["left"]
        hours, minutes, seconds = (int(part) for part in (left or "0:0:0").split(":"))
        return cls(
            int(found["round"]),
            int(found["rounds"]),
            None if accuracy is None else float(accuracy) / 100,
            None if loss is None else float(loss),
            found["epsilon"],
            bool(found["note"]),
            int(found["aggregated"]),
            int(found["asked"]),
            None if left is None else float(hours * 3600 + minutes * 60 + seconds),
            found["local"] or "",
        )

    @property
    def wanted(self) -> bool:
        """Whether it is worth a line in a log: an evaluation, the last round, or one of a few in between."""
        return self.loss is not None or self.among(_LINES)

    def among(self, lines: int) -> bool:
        """Return True if it is the last round, or one of so many in between."""
        return self.server_round == self.num_rounds or not self.server_round % max(self.num_rounds // lines, 1)

    @property
    def measured(self) -> str:
        """The line without epsilon."""
        return str(self).replace(f"  epsilon {self.epsilon_text} (whole run)", "")

    @property
    def epsilon_text(self) -> str:
        """Epsilon, that of the worst case where there is one, and what must stand beside it where noise is fast."""
        local = f" or {self.epsilon_worst_case}" if self.epsilon_worst_case else ""
        return f"{self.epsilon}{local}{_FAST if self.fast else ''}"

    @property
    def time_left(self) -> str:
        """Hours, minutes and seconds until the last round; empty while that is not known."""
        if self.seconds_left is None:
            return ""
        whole = math.ceil(self.seconds_left)
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"

    def within(self, columns: int | None) -> str:
        """Return the line, shorter where it would not fit.

        First goes what the guarantee above it says, then the time.
        """
        text = str(self)
        if columns is not None and len(text) > columns:
            text = " ".join(text.replace(" (whole run)", "").split())
        if columns is not None and len(text) > columns:
            text = text.removesuffix(f" left {self.time_left}")  # two epsilons and the counts of many clients
        return text

    def __str__(self) -> str:
        measured = "" if self.accuracy is None else f"  accuracy {100 * self.accuracy:5.1f} %"
        measured += "" if self.loss is None else f"  loss {self.loss:.4g}"
        return (
            f"round {self.server_round:>{len(str(self.num_rounds))}}/{self.num_rounds}{measured}"
            f"  epsilon {self.epsilon_text} (whole run)"
            f"  replies {self.aggregated}/{self.asked}"
            f"{f'  left {self.time_left}' if self.time_left else ''}"
        )


PROJECT = "murmurfl"
EPSILON = "epsilon_of_the_whole_run"
"""The epsilon that is logged, constant over the rounds; its sentence is logged with it."""
EPSILON_LOCAL = "epsilon_whatever_happens"
"""Second epsilon of that sentence, under secure aggregation."""

logger = logging.getLogger(__name__)


class TrackerError(MurmurflError):
    """A tracker that was asked for cannot be used."""

    kind = "failed"


class Tracker(ABC):
    """One package that a run is logged to, from the run's folder."""

    extra: str
    module: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def load(cls) -> Any:
        """Return the package's module; raises TrackerError if it is not installed."""
        try:
            return importlib.import_module(cls.module)
        except ImportError as error:
            raise TrackerError(
                f"Expected the package of track = {cls.extra!r}, got: {error}. Install it with "
                f"{install_command(cls.extra)}, or leave track empty.",
                kind="not-installed",
                setting="track",
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
            # Figures only: nothing about this client, its code or what it prints.
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
        values |= {EPSILON: progress.epsilon, EPSILON_LOCAL: progress.epsilon_worst_case}
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

    Raises TrackerError if a package is missing.
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
