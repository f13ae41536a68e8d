"""The ServerApp of murmurfl's app, with nothing but its rounds; when they ended as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from murmurfl.app.runs.progress import Progress
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.server_app import look_often
from murmurfl.app.settings.run_config import RunConfig

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and write when rounds ended."""
    started = time.perf_counter()
    ended: list[float] = []
    answered: list[int] = []

    def note(progress: Progress) -> None:
        ended.append(time.perf_counter())
        answered.append(progress.report.aggregated)

    config = RunConfig.from_mapping(context.run_config)
    look_often(grid)
    run_experiment(grid, config, on_progress=note, engine="ray")
    document = {"started": started, "ended": ended, "answered": answered}
    (Path(config.out_dir) / "rounds.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
