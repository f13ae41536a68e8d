"""The Flower ServerApp."""

from __future__ import annotations

import sys
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from ..privacy import MurmurflError
from .config import RunConfig
from .experiment import Progress, run_experiment
from .record import progress_line, summary_lines, write_record

app = ServerApp()


def run_folder(config: RunConfig) -> Path:
    """Where a run writes its files."""
    name = config.run_name or f"{config.strategy}-{config.task}-seed{config.seed}"
    return (Path(config.out_dir) if config.out_dir else Path.cwd() / "runs") / name


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration, write its record, log its summary."""
    try:
        _run(grid, RunConfig.from_mapping(context.run_config))
    except MurmurflError:
        # Flower prints the traceback of whatever ends a run; ours say in one line what was expected and what came.
        sys.tracebacklimit = 0
        raise


def _run(grid: Grid, config: RunConfig) -> None:
    folder = run_folder(config)

    def show(progress: Progress) -> None:
        report = progress.report
        if progress.accuracy is not None:
            line = progress_line(
                report.server_round, progress.num_rounds, progress.accuracy, progress.epsilon, config.delta
            )
            log(INFO, "%s  replies %d/%d", line, report.aggregated, report.asked)

    checkpoint = folder / "checkpoint.npz" if config.checkpoint else None
    result = run_experiment(grid, config, checkpoint=checkpoint, on_progress=show)
    document = write_record(result, folder)
    log(INFO, "")
    for line in summary_lines(document, folder):
        log(INFO, line)
