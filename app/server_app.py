"""The Flower ServerApp: it reads the run configuration, runs it over Flower's grid and writes the record."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..privacy.errors import ConfigurationError, MurmurflError
from .methods.presets import the_task
from .models.trained_model import MODEL
from .nodes.flower_internals import simulation_grid
from .runs.experiment import prepare
from .runs.outcome import CHECKPOINT_NAME, RESULT_NAME
from .runs.progress import Progress, RoundLine, tracking
from .runs.result import write_failure, write_record
from .runs.run_guarantees import expected_guarantee
from .runs.run_summary import meaning_lines, summary_lines
from .runs.training_run import check_deployed, run_experiment
from .settings.layers import flower_config
from .settings.run_config import RunConfig

app = ServerApp()
logger = logging.getLogger("flwr")

_PULL_INTERVAL_S = 0.02
"""Between two looks for replies of a simulation; a look takes a few hundredths of that."""


def run_folder(config: RunConfig, run_id: int, *, deployed: bool = False) -> Path:
    """Return where a run writes its files: a folder of its own.

    Parameters
    ----------
    run_id : int
        Flower's.
    deployed : bool
        Whether the clients are real. Their ledgers outlive a run, so a run that was cut off goes on from its
        checkpoint under its old run-name.

    Raises
    ------
    ConfigurationError
        If the folder holds another run; for a simulation also if it holds the checkpoint of one on real clients.
    """
    name = config.run_name or f"{config.label}-{run_id}"
    folder = (Path(config.out_dir) if config.out_dir else Path.cwd() / "runs") / name
    taken = [name for name in (RESULT_NAME, *(() if deployed else (CHECKPOINT_NAME,))) if (folder / name).exists()]
    if taken:
        raise ConfigurationError(
            f"Expected a new run folder, got {folder}, which holds a {taken[0]} of another run; "
            "choose another run-name.",
            kind="exists",
        )
    return folder


def is_deployed(grid: Grid) -> bool:
    """Return True if the clients behind a grid count as real ones: all do, except those that are known to be simulated.

    Notes
    -----
    Seeded noise keys of a trusted server, seeded sessions and nodes with several names exist on Flower's simulation
    grid only; a grid this function does not know gets none of them.
    """
    return simulation_grid(grid) is None


def look_often(grid: Grid) -> None:
    """Have a simulation's grid look for replies more often than ten times a second, as it does by itself.

    A round waits for half of that in the mean, and for as long as replies lie there, Flower's backend goes through all
    of them again and again while it looks for new messages.
    """
    if (simulated := simulation_grid(grid)) is not None:
        simulated.pull_interval = min(simulated.pull_interval, _PULL_INTERVAL_S)


@contextmanager
def naming(run: str) -> Iterator[None]:
    """Put a run's name before each line that is logged meanwhile: a server's log has the lines of all its runs."""
    make = logging.getLogRecordFactory()

    def named(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.msg:
            record.msg = f"[{run.replace('%', '%%') if record.args else run}] {record.msg}"
        return record

    logging.setLogRecordFactory(named)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration, write its record, log its summary."""
    try:
        deployed = is_deployed(grid)
        config = flower_config(context.run_config, deployed=deployed)
        look_often(grid)
        folder = run_folder(config, context.run_id, deployed=deployed)
        try:
            with naming(folder.name) if deployed else nullcontext():
                _run(grid, config, folder, deployed)
        except BaseException as error:
            if deployed:  # others may look for the reason where the result would be
                with suppress(OSError):  # of a full disk the log tells
                    write_failure(error, folder)
            raise
    except MurmurflError:
        # Flower prints the traceback of whatever ends a run; ours say in one line what was expected and what came.
        sys.tracebacklimit = 0
        raise


def _run(grid: Grid, config: RunConfig, folder: Path, deployed: bool) -> None:
    if deployed:
        check_deployed(config)
    guarantee = expected_guarantee(config, deployed=deployed)
    if choice := prepare(config, deployed=deployed).choice:
        logger.info("%s", choice)
    logger.info("%s", guarantee)
    checkpoint = folder / CHECKPOINT_NAME if deployed and config.checkpoint else None
    with tracking(config, folder, guarantee) as trackers:

        def show(progress: Progress) -> None:
            line = RoundLine.of(progress, config.noise_quality)
            if line.wanted:
                logger.info("%s", line)
            trackers.round(progress)

        result = run_experiment(
            grid, config, checkpoint=checkpoint, on_progress=show, deployed=deployed, engine="ray", rehearsed=True
        )
        write_record(result, folder)
        if the_task(config).schema is not None:
            result.save(folder / MODEL)
        trackers.result(result.outcome)
    logger.info("")
    for line in [*summary_lines(result.outcome, folder), *(f"  {line}" for line in meaning_lines(result.outcome))]:
        logger.info(line)
