"""The ``murmurfl`` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...privacy import MurmurflError
from ..config import RunConfig, parse_assignments
from ..papers import PAPERS
from ..terminal import say, say_table
from .command_line import CommandLine
from .ledger import ledger_cli
from .node import deploy_demo, node

_AS_JSON = typer.Option("--json", help="Print one JSON document and nothing else.")

cli = CommandLine(help="Private federated learning whose noise cancels itself.", pretty_exceptions_enable=False)

cli.add_typer(ledger_cli, name="ledger")

Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="A run-config key=value; may be repeated.", show_default=False)
]


@cli.callback()
def _commands() -> None:
    """Private federated learning whose noise cancels itself."""


@cli.command()
def run(
    assignments: Assignments = None,
    engine: Annotated[str, typer.Option(help="ray (through `flwr run`), inprocess or cohort.")] = "ray",
    out: Annotated[Path, typer.Option(help="Folder for the run's own folder.")] = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder; default from the settings and the time.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest time the run may take, in seconds.")] = 3600.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's whole log.")] = False,
) -> None:
    """Run one private federated training and leave its result in a folder."""
    from ..record import CHECKPOINT_NAME, RESULT_NAME, folder_for, summary_lines

    with _failing_clearly():
        overrides = parse_assignments(assignments or [])
        config = RunConfig.from_mapping(overrides)
        if engine not in ("ray", "cohort", "inprocess"):
            _fail(f"Expected engine 'ray', 'inprocess' or 'cohort', got {engine!r}.")
        with folder_for(out.resolve(), name, config.label) as folder:
            if (folder / RESULT_NAME).exists() or (folder / CHECKPOINT_NAME).exists():
                _fail(f"Expected a new run folder, got {folder}, which holds another run; choose another --name.")
            overrides |= {"out-dir": str(out.resolve()), "run-name": name or folder.name}
            if engine == "ray":
                _run_on_ray(RunConfig.from_mapping(overrides), folder, timeout, verbose)
            else:
                _run_here(RunConfig.from_mapping(overrides), engine, folder)
        document = json.loads((folder / RESULT_NAME).read_text())
        typer.echo("")
        for line in summary_lines(document, folder):
            say(line)


def _run_on_ray(config: RunConfig, folder: Path, timeout: float, verbose: bool) -> None:
    from ..engines.flower_run import run_flower_app
    from ..engines.start import RAY_ENVIRONMENT, app_folder, ray_overrides
    from ..guarantees import expected_guarantee
    from ..progress import RunDisplay
    from ..record import RESULT_NAME
    from ..trackers import check_trackers

    check_trackers(config)
    guarantee = expected_guarantee(config)  # an impossible configuration is refused here, before anything starts
    say(f"Starting {config.num_clients} simulated machines on Flower's Ray engine ...")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "flower.log").open("w") as log, RunDisplay(guarantee) as display:

        def show(line: str) -> None:
            log.write(line + "\n")
            if verbose:
                display.message(line)
            elif not display.read(line.removeprefix("INFO :").strip()) and is_worrying(line):
                display.message(line, error=True)

        run_flower_app(
            app_folder(),
            run_config=ray_overrides(config),
            num_supernodes=config.num_clients,
            timeout_s=timeout,
            environment=RAY_ENVIRONMENT,
            on_line=show,
        )
    if not (folder / RESULT_NAME).exists():
        _fail(f"Expected the run to write {folder / RESULT_NAME}, but it did not; see {folder / 'flower.log'}.")


def is_worrying(line: str) -> bool:
    """Whether a line of Flower's log is for the eyes of whoever started the run."""
    return line.startswith(("WARNING :", "ERROR :")) and "flwr 1.32" not in line


def _run_here(config: RunConfig, engine: str, folder: Path) -> None:
    import logging

    from ..engines.start import run_cohort, run_in_process
    from ..guarantees import expected_guarantee
    from ..progress import RoundLine, RunDisplay
    from ..record import write_record
    from ..run import Progress as RunProgress
    from ..trackers import tracking

    logging.getLogger("flwr").setLevel(logging.WARNING)
    start = run_cohort if engine == "cohort" else run_in_process
    guarantee = expected_guarantee(config)
    with tracking(config, folder, guarantee) as trackers, RunDisplay(guarantee) as display:

        def show(progress: RunProgress) -> None:
            display.show(RoundLine.of(progress, config.noise_quality))
            trackers.round(progress)

        result = start(config, on_progress=show)
        trackers.result(write_record(result, folder))


@cli.command("reproduce")
def reproduce_command(
    name: Annotated[
        str, typer.Argument(help=f"One of {', '.join(PAPERS)}; or package.module:PAPER, a Paper of your own.")
    ],
    assignments: Assignments = None,
    seeds: Annotated[int, typer.Option(help="Runs of each cell, seeds 1 to this; 0 for as many as the paper.")] = 0,
    engine: Annotated[str, typer.Option(help="cohort, inprocess or ray.")] = "cohort",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default as many as cores.")] = None,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Reproduce a paper's tables, or with --set any other cell of them."""
    from ..papers.reproduce import reproduce, tables_of
    from ..papers.runs import plan_runs

    with _failing_clearly():
        paper = PAPERS[name]
        cells = paper.cells_with(parse_assignments(assignments or []))
        seeds = seeds or paper.seeds
        plan_runs(cells, seeds, engine, paper.table)  # refuses before the progress bar shows
        folder = out or Path("runs") / paper.name
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=as_json
        ) as progress:
            task = progress.add_task(paper.name, total=None)
            document = reproduce(
                paper,
                cells,
                folder,
                seeds=seeds,
                engine=engine,
                jobs=jobs,
                on_run=lambda done, total: progress.update(task, completed=done, total=total),
            )
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        for table in tables_of(document, paper.name, paper.table):
            say_table(table.title, table.texts(), table.labels)
        say(f"{seeds} runs of each, with seeds 1 to {seeds}." if seeds > 1 else "One run of each, with seed 1.")
        say(document["guarantee"])
        say(f"{paper.name}.json, .csv, .md and .png are in {folder}")


@cli.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and plots; default `report` in the first RUN.")
    ] = None,
) -> None:
    """Show runs as one HTML page that needs no network, with every plot as PNG and SVG beside it."""
    from ..report.making import make_report

    with _failing_clearly():
        say(f"Wrote {make_report(runs, out or runs[0] / 'report')}")


@cli.command()
def audit(
    assignments: Assignments = None,
    runs: Annotated[int, typer.Option(help="Simulated machines with the canary, and as many without.")] = 2000,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Measure the privacy of a run's machines and hold it against their claim; exit code 3 if that is refuted."""
    from ..analysis.audit import audit_lines, audit_run

    with _failing_clearly():
        found = audit_run(RunConfig.from_mapping(parse_assignments(assignments or [])), runs)
        if as_json:
            typer.echo(json.dumps(found.document(), indent=2))
        else:
            for line in audit_lines(found):
                say(line)
        if found.result.violated:
            _fail("the measured privacy loss is above the claimed one.", code=3)


@cli.command()
def plan(
    machines: Annotated[int, typer.Option(help="Machines, M.")],
    samples: Annotated[int, typer.Option(help="Samples of each machine.")],
    rounds: Annotated[int, typer.Option(help="Rounds, T.")],
    batch: Annotated[int, typer.Option(help="Samples in one release, b.")],
    epsilon: Annotated[float, typer.Option(help="For one sample of one machine, over all its releases.")],
    delta: Annotated[float, typer.Option(help="Of the same guarantee.")] = 1e-5,
    per_round: Annotated[int, typer.Option(help="Machines asked in a round, m; 0 for all.")] = 0,
    passes: Annotated[int, typer.Option(help="How often a machine goes through its samples.")] = 1,
    clip: Annotated[float, typer.Option(help="Clip norm of one sample's gradient, S.")] = 1.0,
    parameters: Annotated[int, typer.Option(help="Values in the model, d.")] = 1000,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """What every mechanism would need and do, before anything runs: noise, cap, errors, memory, and which is best."""
    from ..analysis.plan import PlanRequest, make_plan, plan_lines, plan_table

    with _failing_clearly():
        request = PlanRequest(
            machines=machines,
            samples=samples,
            rounds=rounds,
            batch_size=batch,
            epsilon=epsilon,
            delta=delta,
            per_round=per_round or machines,
            passes=passes,
            clip_norm=clip,
            parameters=parameters,
        )
        request.check_rounds()
        made = make_plan(request)
        if as_json:
            typer.echo(json.dumps(made.document(), indent=2, allow_nan=False))
            return
        before, after = plan_lines(made)
        for line in before:
            say(line)
        table = plan_table(made)
        say_table(table.title, table.texts(), table.labels)
        for line in after:
            say(line)


class _failing_clearly:  # noqa: N801 - reads as a sentence where it is used
    """Turns an error of ours into one clear message and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MurmurflError):
            _fail(str(error))
        if isinstance(error, OSError):
            _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        if isinstance(error, KeyboardInterrupt):
            _fail("Interrupted.", code=130)


def _fail(message: str, code: int = 1) -> NoReturn:
    say(f"murmurfl: {message}", err=True)
    sys.exit(code)


cli.command()(node)
cli.command()(deploy_demo)


def main() -> None:
    """Entry point of the ``murmurfl`` command."""
    cli()
