"""``murmurfl run`` and ``murmurfl search``: one training, or trials and one; rounds are shown as they come."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from ...privacy.accounting.guarantee import Guarantee
from ...privacy.errors import check_installed
from ...strategies.rounds.observed import log_forecast
from ..runs.progress import RoundLine
from ..settings.layers import with_defaults
from ..settings.run_config import RunConfig
from .run_options import AsJson, Assignments, ConfigFile, Details, Device, RayAddress, Verbose, Workers, settings_of
from .terminal import fail, failing_clearly, say, width

if TYPE_CHECKING:
    from ..runs.outcome import Outcome

ENGINES = ("ray", "inprocess", "cohort")
PICTURE_NAME = "accuracy.png"
_SHORT = 60.0
"""Seconds: runs that take no longer are made once more without noise unless somebody says otherwise."""


def run(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    epsilon: Annotated[
        float | None, typer.Option(help="As --set epsilon=...: smaller is more private.", show_default="4")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="As --set seed=...", show_default="1")] = None,
    clients: Annotated[int | None, typer.Option(help="As --set num-clients=...", show_default="50")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="cohort (all clients at once, in this process), inprocess (one after the other, with messages) or ray "
            "(through `flwr run`)."
        ),
    ] = "cohort",
    out: Annotated[Path, typer.Option(help="Folder for the run's own folder.")] = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder; default from the settings and the time.")
    ] = None,
    workers: Workers = None,
    ray: RayAddress = "",
    device: Device = "",
    timeout: Annotated[float, typer.Option(help="Longest time the run may take, in seconds.")] = 3600.0,
    twin: Annotated[
        bool | None,
        typer.Option(
            "--twin/--no-twin",
            help="Whether to make the same run without noise too, to compare with; --no-twin: no client alone either.",
            show_default="if the run took less than a minute",
        ),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help=f"Draw {PICTURE_NAME} too; `murmurfl report` draws a whole page.")
    ] = False,
    details: Details = False,
    verbose: Verbose = False,
) -> None:
    """Run one private federated training and leave its result in a folder.

    Without settings it is fifty clients with different mixtures of handwritten digits, whose server sees only sums.
    """
    from ..runs.experiment import prepare
    from ..runs.outcome import CHECKPOINT_NAME, RESULT_NAME
    from ..runs.progress import check_trackers
    from ..runs.result import folder_for
    from ..runs.run_guarantees import expected_guarantee
    from ..runs.run_summary import closing_lines, plot_accuracy, short_lines, summary_lines

    with failing_clearly():
        short = {"epsilon": epsilon, "seed": seed, "num-clients": clients}
        given = [f"{name}={value}" for name, value in short.items() if value is not None]
        settings = with_defaults(settings_of(config_file, [*(assignments or []), *given]))
        config = RunConfig.from_mapping(settings)
        if plot:
            check_installed("matplotlib", "reports", "--plot", load=False)
        _check_engine(engine, workers, ray, device)
        with folder_for(out.resolve(), name, config.label) as folder:
            if (folder / RESULT_NAME).exists() or (folder / CHECKPOINT_NAME).exists():
                fail(f"Expected a new run folder, got {folder}, which holds another run; choose another --name.")
            settings |= {"out-dir": str(out.resolve()), "run-name": name or folder.name}
            config = RunConfig.from_mapping(settings)
            check_trackers(config)
            guarantee = expected_guarantee(config)  # an impossible configuration is refused before anything starts
            if choice := prepare(config).choice:
                say(choice)
            if engine == "ray":
                _run_on_ray(config, guarantee if details else None, folder, timeout, verbose)
            else:
                spread = {"workers": workers, "ray_address": ray, "device": device} if engine == "cohort" else {}
                _run_here(config, guarantee, engine, folder, details, **spread)
        outcome = _with_baselines(folder, twin)
        if plot and outcome.has_curve:
            plot_accuracy(outcome, folder / PICTURE_NAME)
        typer.echo("")
        whole = [*summary_lines(outcome, folder), *closing_lines(outcome)] if details else []
        for line in whole or short_lines(outcome, _from_here(folder)):
            say(line)


def _check_engine(engine: str, workers: int | None, ray: str, device: str) -> None:
    """Refuse an engine that does not exist, is not installed or does not go with its options; open its device."""
    from ..engines.device.backend import checked_device
    from ..engines.pool import checked_workers

    if engine not in ENGINES:
        fail(f"Expected engine 'ray', 'inprocess' or 'cohort', got {engine!r}.")
    if engine == "ray":
        check_installed("ray", "simulation", "engine = 'ray'", load=False)
    checked_workers(workers, engine, ray)
    checked_device(device, engine, workers, ray)
    if device:
        from ..engines.device.device_block import open_device

        open_device(device)


def _with_baselines(folder: Path, twin: bool | None) -> Outcome:
    """Read a run's outcome, with one client alone and the run without noise as ``twin`` says; a short run has both."""
    from ..runs.outcome import Outcome
    from ..runs.simulate import add_alone, add_without_noise

    outcome = Outcome.read(folder) if twin is False else add_alone(folder)
    if twin or (twin is None and outcome.seconds is not None and outcome.seconds <= _SHORT):
        return add_without_noise(folder)
    return outcome


def _from_here(folder: Path) -> Path:
    """Return the path of a folder as a user types it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _run_on_ray(config: RunConfig, guarantee: Guarantee | None, folder: Path, timeout: float, verbose: bool) -> None:
    from ..engines.start import app_folder, num_nodes, ray_environment, ray_overrides
    from ..engines.superlink import run_flower_app
    from ..runs.outcome import RESULT_NAME

    say(f"Starting {config.num_clients} simulated clients on Flower's Ray engine ...")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "flower.log").open("w") as log, RunDisplay(guarantee) as display:

        def show(line: str) -> None:
            log.write(line + "\n")
            display.log_line(line, verbose=verbose)

        run_flower_app(
            app_folder(),
            run_config=ray_overrides(config),
            num_supernodes=num_nodes(config),
            timeout_s=timeout,
            environment=ray_environment(config),
            on_line=show,
        )
    if not (folder / RESULT_NAME).exists():
        fail(f"Expected the run to write {folder / RESULT_NAME}, but it did not; see {folder / 'flower.log'}.")


def _run_here(config: RunConfig, guarantee: Guarantee, engine: str, folder: Path, details: bool, **spread: Any) -> None:
    import logging

    from ..engines.start import run_cohort, run_in_process
    from ..runs.progress import Progress, RoundLine, tracking
    from ..runs.result import write_record

    logger, displayed = logging.getLogger("flwr"), guarantee if details else None
    logger.setLevel(logging.WARNING)
    start = run_cohort if engine == "cohort" else run_in_process
    with tracking(config, folder, guarantee) as trackers, RunDisplay(displayed) as display, display.of_log(logger):

        def show(progress: Progress) -> None:
            display.show(RoundLine.of(progress, config.noise_quality))
            trackers.round(progress)

        if spread:
            spread["say"] = display.message
        result = start(config, on_progress=show, rehearsed=True, **spread)
        write_record(result, folder)
        trackers.result(result.outcome)


_LINES = 4
"""Rounds that are shown elsewhere beside the first."""


def is_worrying(line: str) -> bool:
    """Return True if a line of Flower's log concerns whoever started the run."""
    return line.startswith(("WARNING :", "ERROR :")) and "flwr 1.32" not in line


class RunDisplay:
    """Rounds as they come, on standard output unless ``console`` is given: a bar on a terminal, a few lines elsewhere.

    With the run's ``guarantee``, it stands above the rounds and each has its epsilon. Without it no epsilon is shown,
    and no forecast, for the summary has both.
    """

    def __init__(self, guarantee: Guarantee | None = None, console: Console | None = None) -> None:
        self._guarantee = guarantee
        self._console = Console() if console is None else console
        self._bar = Bar(
            TextColumn("round"),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=False, overflow="fold")),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=False,
        )
        self._task = self._bar.add_task("", total=None, words="")
        self._measured = ""
        self._edges = 0

    def __enter__(self) -> RunDisplay:
        if self._guarantee is not None:
            self.message(self._guarantee.sentence)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, line: RoundLine) -> None:
        """Show a round that has ended."""
        if not self._console.is_terminal:
            if self._guarantee is not None and line.wanted:
                self.message(line.within(width()))
            elif self._guarantee is None and (line.server_round == 1 or line.among(_LINES)):
                self.message(line.measured)
            return
        # A round without an evaluation goes on showing the last one's figures.
        if line.loss is not None:
            accuracy = "" if line.accuracy is None else f"accuracy {100 * line.accuracy:.1f} %  "
            self._measured = f"{accuracy}loss {line.loss:.4g}  "
        left = line.time_left
        epsilon = "" if self._guarantee is None else f"epsilon {line.epsilon_text}  "
        words = f"{self._measured}{epsilon}replies {line.aggregated}/{line.asked}{f'  {left} left' if left else ''}"
        self._bar.update(self._task, completed=line.server_round, total=line.num_rounds, words=words)

    def read(self, text: str) -> bool:
        """Show a line of a run's log if it is a round's; whether it was."""
        if (line := RoundLine.read(text)) is not None:
            self.show(line)
        return line is not None

    def log_line(self, line: str, *, verbose: bool) -> None:
        """Show rounds and warnings in a line of Flower's log; with verbose, show every line as it is."""
        if verbose:
            self.message(line)
        elif self._guarantee is None and self._of_forecast(line):
            return
        elif not self.read(line.removeprefix("INFO :").strip()) and is_worrying(line):
            self.message(line, error=True)

    def _of_forecast(self, line: str) -> bool:
        """Return True if a line belongs to a forecast's banner, which stands between three lines of equal signs."""
        if not line.startswith("WARNING :"):
            return False
        edge = line.endswith("=" * 20)
        self._edges += edge
        return edge or self._edges % 3 != 0

    @contextmanager
    def of_log(self, logger: logging.Logger) -> Iterator[None]:
        """Hold a forecast back from a logger of this process where the summary has it, until the block ends."""

        def kept(record: logging.LogRecord) -> bool:
            return self._guarantee is not None or record.funcName != log_forecast.__name__

        logger.addFilter(kept)
        try:
            yield
        finally:
            logger.removeFilter(kept)

    def message(self, text: str, *, error: bool = False) -> None:
        """Print another line, above the bar."""
        if self._console.is_terminal and not error:
            self._console.print(text, markup=False, highlight=False)
        elif error or self._console.file is sys.stdout:
            say(text, err=error)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


Multiples = Annotated[str, typer.Option(help="Multiples of the preset's, separated by commas.")]


def search(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    clip_norm: Multiples = "1",
    learning_rate: Multiples = "0.5,1,2",
    share: Annotated[float, typer.Option(help="Of mu^2, for all trials together.")] = 0.3,
    counting: Annotated[float, typer.Option(help="Of a trial's part, for its count of correct predictions.")] = 0.1,
    public: Annotated[
        bool, typer.Option(help="Whether samples that runs are evaluated on are public, and choose without a count.")
    ] = False,
    workers: Workers = None,
    ray: RayAddress = "",
    as_json: AsJson = False,
) -> None:
    """Try multiples of the preset's clip and step in simulation, and train with the best: mu is that of everything."""
    import logging

    from ..planning.private_search import MULTIPLES, Trial
    from ..planning.private_search import search as run_search

    logging.getLogger("flwr").setLevel(logging.WARNING)
    with failing_clearly():
        tried = itertools.product(_numbers("clip-norm", clip_norm), _numbers("learning-rate", learning_rate))
        candidates = [dict(zip(MULTIPLES, multiples, strict=True)) for multiples in tried]
        candidates = [{name: one for name, one in each.items() if one != 1} for each in candidates]

        def show(trial: Trial) -> None:
            if not as_json:
                how = "on public samples" if public else "by a private count"
                say(f"clip {trial.clip_norm:.4g}, step {trial.learning_rate:.4g}: {trial.score:.1%} {how}")

        config = RunConfig.from_mapping(settings_of(config_file, assignments))
        where = {"workers": workers, "ray_address": ray, "say": partial(say, err=True)}
        found = run_search(config, candidates, share=share, counting=counting, public=public, on_trial=show, **where)
    values, accuracy = found.result.experiment.values, found.result.progress[-1].accuracy
    if as_json:
        trials = [vars(trial) for trial in found.trials]
        document = {
            "trials": trials,
            "chosen": found.chosen,
            "clip_norm": values.clip_norm,
            "learning_rate": values.learning_rate,
            "accuracy": accuracy,
            "privacy": found.guarantee.document(),
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    say(f"Chosen: clip {values.clip_norm:.4g}, step {values.learning_rate:.4g} for the last training.")
    if accuracy is not None:
        say(f"Test accuracy: {accuracy:.1%}")
    say(found.guarantee.sentence)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        fail(f"Expected --{name} to be numbers separated by commas, got {text!r}.")
