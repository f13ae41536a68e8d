"""``murmurfl fit`` and ``murmurfl predict``: from a table to a private model, and to a column of predictions."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from warnings import catch_warnings

import typer

from ...privacy.errors import ConfigurationError
from .run_options import AsJson, Assignments
from .terminal import aligned, fail, failing_clearly, say, working

if TYPE_CHECKING:
    from ...clients.records.schema import Schema
    from ..runs.progress import Progress

_SUMS = "secure-aggregation"
_TWO = 2


def fit(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A table: .csv, .csv.gz or .parquet; or a folder of images.", show_default=False
        ),
    ],
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="What is to be predicted.", show_default="the last column")
    ] = "",
    site: Annotated[
        str, typer.Option(metavar="COLUMN", help="Whose a row is: each site is a client.", show_default=False)
    ] = "",
    clients: Annotated[
        int, typer.Option(help="Without --site: over how many clients rows are dealt.", show_default="5")
    ] = 0,
    owner: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Which person a row belongs to: all rows of a person are protected together.",
            show_default="the schema's",
        ),
    ] = "",
    owners: Annotated[
        int,
        typer.Option(metavar="N", help="With --real and --owner: places for persons, public.", show_default=False),
    ] = 0,
    epsilon: Annotated[float, typer.Option(help="Of everything that is released, at delta = 1e-5.")] = 2.0,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="SCHEMA.toml", help="How rows are read.", show_default="a draft from the rows"),
    ] = None,
    no_header: Annotated[bool, typer.Option("--no-header", help="The first line is a row.")] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="A column of free text: hashed n-grams are learnt from.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Rehearsals with other seeds, for the figure's error.")] = 1,
    trust: Annotated[
        str,
        typer.Option(help="untrusted-server, secure-aggregation or trusted-server.", show_default="untrusted-server"),
    ] = "",
    helpers: Annotated[
        int, typer.Option(help="With --trust secure-aggregation: helpers, of which one is honest.", show_default="2")
    ] = 0,
    evaluate: Annotated[
        str,
        typer.Option(
            metavar="private",
            help="Release with noise, too, how often the model is right, out of the same epsilon.",
            show_default="with --real, if rows are enough for a useful figure",
        ),
    ] = "",
    scale: Annotated[
        str,
        typer.Option(
            metavar="private",
            help="Scale columns by private statistics, where the schema's bounds are far too wide.",
            show_default=False,
        ),
    ] = "",
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="For a model to be used: this computer has all rows and is trusted, as --trust trusted-server "
            "rehearses; with --schema and a ledger.",
        ),
    ] = False,
    budget: Annotated[
        float,
        typer.Option(help="With --real, for a new ledger: epsilon of all calls.", show_default="this call's epsilon"),
    ] = 0.0,
    ledger: Annotated[Path | None, typer.Option(help="With --real: its file.", show_default="FILE.ledger")] = None,
    private_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --real: a new file, for you alone, for everything that must not leave.",
            show_default="nowhere",
        ),
    ] = None,
    assignments: Assignments = None,
    out: Annotated[Path, typer.Option(help="Folder for the run's own folder.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.", show_default="from the time")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a private model of a table, as its sites would together: a rehearsal on this computer, unless --real."""
    from ..models.trained_model import MODEL, SCHEMA
    from ..runs import fitting
    from ..runs.fit_summary import fit_lines
    from ..runs.outcome import RESULT_NAME
    from ..runs.result import folder_for, room_kept, write_record
    from ..settings.layers import parse_assignments

    with failing_clearly():
        settings: dict[str, Any] = {
            name.replace("-", "_"): value for name, value in parse_assignments(assignments or []).items()
        }
        trusted = trust or settings.get("trust", "")
        if helpers and trusted != _SUMS:
            found = f"--trust {trusted}" if trusted else "no --trust"
            fail(f"Expected --trust {_SUMS} beside --helpers {helpers}, got {found}: set it, or leave --helpers out.")
        if helpers:
            settings["trust.helpers"] = helpers
        with folder_for(out.resolve(), name, f"fit-{table.name.partition('.')[0]}") as folder:
            if (folder / RESULT_NAME).exists():
                fail(f"Expected a new run folder, got {folder}, which holds another run; choose another --name.")
            options: dict[str, Any] = {} if "mu" in settings else {"epsilon": epsilon}
            options |= {"label": label, "site": site, "clients": clients, "schema": schema, "trust": trust}
            options |= {"owner": owner, "owners": owners, "seeds": seeds}
            options |= {"evaluate": evaluate, "scale": scale, "real": real, "budget": budget, "ledger": ledger}
            options |= {"private_log": private_log, "header": not no_header, "text": text or ()}
            with room_kept(folder) if real else nullcontext(), working("training") as at:

                def note(progress: Progress) -> None:
                    at(f", round {progress.report.server_round} of {progress.num_rounds}")  # a public number

                seen: dict[str, Any] = {"on_progress": note} if sys.stderr.isatty() else {}
                result = fitting.fit(table, **{**options, **settings, **seen})
            model = result.save(folder / MODEL)  # first: what is released once cannot be made again
            write_record(result, folder)
        path = model.relative_to(Path.cwd()) if model.is_relative_to(Path.cwd()) else model
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "model": str(model), **result.outcome.document()}))
            return
        if result.table is not None:
            by = path / SCHEMA if schema is None else schema
            words = ["murmurfl", "fit", str(table), "--schema", str(by), "--real"]
            words += [] if "mu" in settings else ["--epsilon", f"{epsilon:g}"]
            words += [part for name in ("evaluate", "scale") if options[name] for part in (f"--{name}", options[name])]
            kept = [one for one in assignments or [] if not one.startswith(_OF_A_REHEARSAL)]
            words += [part for one in kept for part in ("--set", one)]
            for line in fit_lines(result, result.table, path, shlex.join(words)):
                say(line)


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a model.", show_default=False)],
    table: Annotated[
        Path, typer.Argument(metavar="FILE", help="A table with its columns, or a folder.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="The new file.", show_default="FILE's name with .predicted.csv")
    ] = None,
    features: Annotated[
        str,
        typer.Option(metavar="NAME", help="A model's features of images, if they are your own.", show_default=False),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out.")] = False,
) -> None:
    """Add what a model predicts to a table as a column, of two classes with the second one's probability."""
    from ...clients.records.client_records import CsvLines
    from ...clients.records.image_folders import rows_of_table
    from ...privacy.errors import InvalidRecordError
    from ..data.table_task import registered_images
    from ..models.trained_model import PERSONAL, PersonalModel, read_model

    with failing_clearly():
        if features:
            registered_images(features)
        trained = read_model(model)
        how = "personalised" if isinstance(trained, PersonalModel) else "predicted"
        if trained.schema is None:
            raise ConfigurationError(
                "Expected a model of a table, which has a schema, got one of arrays: use murmurfl.app.load_model.",
                kind="unsupported",
            )
        target = out or table.with_name(f"{table.name.partition('.')[0]}.{how}.csv")
        if target.exists() and not force:
            raise ConfigurationError(
                f"Expected a new file, got {target}, which exists: --force overwrites it.", kind="exists"
            )
        rows = rows_of_table(table, trained.schema)
        _check_columns_differ(table, rows.columns)
        if isinstance(trained, PersonalModel):
            say(f"warning: {model} {PERSONAL}. Its predictions stay inside this site.")
        found, added = trained.predict(table), [f"{how}_{trained.schema.label.column}"]
        texts = [[value] for value in found]
        if trained.num_classes == _TWO:  # of two classes a rare one is often never the likelier
            with catch_warnings(record=True) as uncertain:
                shares = trained.predict_proba(table)[:, 1]
            for warning in uncertain:
                say(f"warning: {warning.message}")
            texts = [[value, f"{share:.4f}"] for value, share in zip(found, shares, strict=True)]
            added.append(f"probability_{trained.classes[1]}")
        separator = trained.schema.separator if isinstance(rows, CsvLines) else ","
        left, unread, lost = sum(map(_is_missing, found)), 0, _LostCells(trained.schema)
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerow([*rows.columns, *added])
            for number, text in enumerate(texts):
                try:
                    row = rows[number]
                except InvalidRecordError:
                    unread += 1
                else:
                    predicted = [""] * len(text) if _is_missing(text[0]) else text
                    lost.count(row)
                    writer.writerow([*(row[name] for name in rows.columns), *predicted])
        say(f"{target}: {len(rows) - unread:,} rows with {' and '.join(added)}")
        if left:
            say(
                f"{left:,} rows do not fit the model's schema: {unread:,} are no rows of it and were left out, the "
                "others have no prediction."
            )
        for line in lost.lines():
            say(line)
        known = {*trained.schema.columns, trained.schema.label.column}
        if unused := [name for name in rows.columns if name not in known]:
            say(f"not used by the model: {_few(unused)}")


def personalise(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a private model.", show_default=False)],
    table: Annotated[
        Path, typer.Argument(metavar="FILE", help="This site's rows, with the label.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "--output", help="The new folder.", show_default="FILE's name with .personal"),
    ] = None,
) -> None:
    """Adapt a private model to one site's own rows, for use inside that site alone."""
    from ..runs.personal import personalise as personalised

    with failing_clearly():
        target = out or table.with_name(f"{table.name.partition('.')[0]}.personal")
        if target.exists():
            raise ConfigurationError(
                f"Expected a new folder for a personalised model, got {target}, which exists.", kind="exists"
            )
        with working("Adapting the model"):
            made = personalised(model, table)
        for line in made.lines():
            say(line)
        if made.unused:
            say(f"not used by the model: {_few(made.unused)}")
        say(f"model     {made.save(target)}: for murmurfl predict and load_model, inside this site")


def curves(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The folder of an additive model.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="The new picture: .png or .svg.", show_default="print the columns")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--most", min=1, help="Only so many columns, the most important ones.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out.")] = False,
) -> None:
    """Show the columns of an additive model by importance, and draw its curves with bands for the noise."""
    from ..models.curves import OF_NOISE
    from ..models.trained_model import TrainedModel

    with failing_clearly():
        if out is not None and out.suffix not in (".png", ".svg"):
            raise ConfigurationError(
                f"Expected a picture that ends with .png or .svg, got {out}.", kind="unknown-name", setting="out"
            )
        if out is not None and out.exists() and not force:
            raise ConfigurationError(
                f"Expected a new file, got {out}, which exists: --force overwrites it.", kind="exists"
            )
        trained = TrainedModel.read(model)
        found = dict(list(trained.importance().items())[:most])
        bands = {name: curve.half_width for name, curve in trained.curves().items()}
        rows = [
            {"column": name, "importance": f"{value:.3f}", "noise": _shown_band(bands[name])}
            for name, value in found.items()
        ]
        for line in aligned(rows, list(rows[0]), list(rows[0])[1:]):
            typer.echo(line)
        say("Importance is the mean absolute effect. The noise is half the width of the band where it is widest.")
        say(OF_NOISE)
        if out is not None:
            from ..reports.figures import figure_style
            from ..reports.plots import curves_picture

            picture = curves_picture(trained, most)
            with figure_style():
                picture.savefig(
                    out, dpi=150, facecolor="white", metadata={"Date": None} if out.suffix == ".svg" else None
                )
            say(f"{out}: {len(found)} curves")


_OF_A_REHEARSAL = ("trust", "samples-per-owner", "partition")
"""Settings that a real fit does not take from a rehearsal, or that its summary proposes."""


def _shown_band(half_width: float) -> str:
    return "not known" if math.isnan(half_width) else f"{half_width:.3f}"


class _LostCells:
    """Cells of rows that a model does not read as what they say, counted by column."""

    _WORDS: ClassVar = {
        "clipped": "cells outside the schema's bounds, clipped to the nearer one",
        "other": "cells not among the model's categories, read as other",
        "missing": "cells not readable, read as missing",
    }

    def __init__(self, schema: Schema) -> None:
        self._columns = schema.columns
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, row: Mapping[str, Any]) -> None:
        """Count the cells of a row."""
        for name, column in self._columns.items():
            if how := column.lost(row[name]):
                self._counts[how, name] += 1

    def lines(self) -> list[str]:
        """Return a line for each way in which cells are lost, with the columns that lose the most."""
        found = []
        for how, words in self._WORDS.items():
            of = [(name, count) for (one, name), count in self._counts.most_common() if one == how]
            if of:
                (name, count), *others = of
                first = f"{count:,} cell{'s' * (count != 1)} of {name}"
                found.append(f"{words}: {_few([first, *(f'{count:,} of {name}' for name, count in others)])}")
        return found


_MOST_NAMED = 6


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _check_columns_differ(table: Path, columns: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise ConfigurationError(
            f"Expected each column of {table} once, got several named {', '.join(map(repr, twice))}: rename them, "
            "for a row is copied by its columns' names.",
            kind="duplicate",
        )


def _is_missing(value: Any) -> bool:
    """Return True if a row has no prediction: None, or a number that is none."""
    return value is None or value != value
