"""The ``murmurfl`` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...privacy import MurmurflError, rounded_up
from ..config import RunConfig, parse_assignments
from ..papers.cells import DEFAULT_SEEDS, REPRODUCTIONS
from ..terminal import say, say_table
from .command_line import CommandLine
from .ledger import ledger_cli
from .node import deploy_demo, node

_LABELS = ("table", "setting", "algorithm", "mechanism")
_PRIVACY_COLUMNS = ("mu", "mu asked", "epsilon")
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
        with folder_for(out.resolve(), name, f"{config.strategy}-{config.task}-seed{config.seed}") as folder:
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
    from ..engines.start import RAY_ENVIRONMENT, app_folder, ray_overrides
    from ..engines.superlink import run_flower_app
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
    from ..experiment import Progress as RunProgress
    from ..guarantees import expected_guarantee
    from ..progress import RoundLine, RunDisplay
    from ..record import write_record
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


@cli.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(REPRODUCTIONS)}.")],
    assignments: Assignments = None,
    seeds: Annotated[int, typer.Option(help="Runs of each cell, seeds 1 to this; 0 for as many as the paper.")] = 0,
    engine: Annotated[str, typer.Option(help="cohort, inprocess or ray.")] = "cohort",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default as many as cores.")] = None,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Reproduce a paper's tables, or with --set any other cell of them."""
    from ..papers.reproduce import cells_of, markdown_table, plan_runs, run_cells, table_rows, write_reproduction

    with _failing_clearly():
        cells = cells_of(name, parse_assignments(assignments or []))
        seeds = seeds or DEFAULT_SEEDS[name]
        plan_runs(cells, seeds, engine)  # refuses before the progress bar shows
        folder = out or Path("runs") / name
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=as_json
        ) as progress:
            task = progress.add_task(name, total=None)
            document = run_cells(
                cells,
                seeds=seeds,
                out=folder,
                engine=engine,
                jobs=jobs,
                on_run=lambda done, total: progress.update(task, completed=done, total=total),
            )
        document = {"reproduction": name, "engine": engine, "seeds": seeds, **document}
        write_reproduction(document, name, folder)
        if as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        rows = table_rows(document)
        # Tables of curves have a column for everything; people get those of the pages.
        texts = _markdown_texts(markdown_table(rows)) if "step" in rows[0] else _texts(rows)
        say_table(name, texts, _LABELS)
        say(document["guarantee"])
        say(f"{name}.json, .csv, .md and .png are in {folder}")


@cli.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder for page and plots; default `report` in the first RUN.")
    ] = None,
) -> None:
    """Show runs as one HTML page that needs no network, with every plot as PNG and SVG beside it."""
    from ..report.recorded import make_report

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
    from ..analysis.plan import PlanRequest, make_plan, plan_lines, plan_rows

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
        say_table("Noise of one value", _texts(plan_rows(made)), _LABELS)
        for line in after:
            say(line)


def _texts(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    formats = {"accuracy %": ".1f", "± std": ".1f", "paper %": ".1f", "loss": ".3f", "paper loss": ".3f"}
    formats |= {"delta": "g", "seconds": ".1f", "step": "g"}
    formats |= {column: ".1f" for column in rows[0] if "regret" in column or "cumulative" in column}
    return [{column: _cell(column, value, formats) for column, value in row.items()} for row in rows]


def _cell(column: str, value: Any, formats: Mapping[str, str]) -> str:
    if value is None:
        return ""
    if column in _PRIVACY_COLUMNS:
        return rounded_up(value)
    return format(value, formats.get(column, ".4g" if isinstance(value, float) else ""))


def _markdown_texts(text: str) -> list[dict[str, str]]:
    text = text.strip().replace("**", "")
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


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
