"""``murmurfl run``: one training on an engine, its files in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...privacy import Guarantee
from ..settings.default_run import started_with
from ..settings.run_config import RunConfig
from .run_options import Assignments, ConfigFile, Details, Device, RayAddress, Verbose, Workers, settings_of
from .terminal import fail, failing_clearly, say

ENGINES = ("ray", "inprocess", "cohort")
_SHORT = 60.0
"""Seconds: runs that take no longer are made once more without noise unless somebody says otherwise."""


def run(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    engine: Annotated[str, typer.Option(help="ray (through `flwr run`), inprocess or cohort.")] = "ray",
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
            help="Whether to make the same run without noise too, to compare with; --no-twin: no machine alone either.",
            show_default="if the run took less than a minute",
        ),
    ] = None,
    details: Details = False,
    verbose: Verbose = False,
) -> None:
    """Run one private federated training and leave its result in a folder.

    Without settings it is a good run on the data that come along. Whoever names another task, strategy, model, preset
    or partition starts from the keys' plain defaults.
    """
    from ..engines.device.backend import checked_device
    from ..engines.pool import checked_workers
    from ..runs.experiment import prepare
    from ..runs.outcome import CHECKPOINT_NAME, RESULT_NAME, Outcome
    from ..runs.run_files import PICTURE_NAME, folder_for
    from ..runs.run_guarantees import expected_guarantee
    from ..runs.run_summary import closing_lines, plot_accuracy, short_lines, summary_lines
    from ..runs.trackers import check_trackers
    from ..runs.without_noise import add_alone, add_without_noise

    with failing_clearly():
        settings = started_with(settings_of(config_file, assignments))
        config = RunConfig.from_mapping(settings)
        if engine not in ENGINES:
            fail(f"Expected engine 'ray', 'inprocess' or 'cohort', got {engine!r}.")
        checked_workers(workers, engine, ray)
        checked_device(device, engine, workers, ray)
        if device:
            from ..engines.device.device_block import open_device

            open_device(device)
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
        outcome = Outcome.read(folder) if twin is False else add_alone(folder)
        if twin or (twin is None and outcome.seconds is not None and outcome.seconds <= _SHORT):
            outcome = add_without_noise(folder)
        if not (folder / PICTURE_NAME).exists():  # drawn once, with the twin where there is one
            plot_accuracy(outcome, folder / PICTURE_NAME)
        typer.echo("")
        whole = [*summary_lines(outcome, folder), *closing_lines(outcome)] if details else []
        for line in whole or short_lines(outcome, _from_here(folder)):
            say(line)


def _from_here(folder: Path) -> Path:
    """A folder as one types it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _run_on_ray(config: RunConfig, shown: Guarantee | None, folder: Path, timeout: float, verbose: bool) -> None:
    from ..engines.start import app_folder, num_nodes, ray_environment, ray_overrides
    from ..engines.superlink import run_flower_app
    from ..runs.outcome import RESULT_NAME
    from .display import RunDisplay

    say(f"Starting {config.num_clients} simulated machines on Flower's Ray engine ...")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "flower.log").open("w") as log, RunDisplay(shown) as display:

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
    from ..runs.progress import Progress, RoundLine
    from ..runs.run_files import write_record
    from ..runs.trackers import tracking
    from .display import RunDisplay

    logger, shown = logging.getLogger("flwr"), guarantee if details else None
    logger.setLevel(logging.WARNING)
    start = run_cohort if engine == "cohort" else run_in_process
    with tracking(config, folder, guarantee) as trackers, RunDisplay(shown) as display, display.of_log(logger):

        def show(progress: Progress) -> None:
            display.show(RoundLine.of(progress, config.noise_quality))
            trackers.round(progress)

        if spread:
            spread["say"] = display.message
        result = start(config, on_progress=show, rehearsed=True, **spread)
        write_record(result, folder, picture=False)
        trackers.result(result.outcome)
