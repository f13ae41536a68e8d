"""``murmurfl schema`` and ``murmurfl statistics``: what a table's record is, and private statistics of columns."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...privacy.errors import ConfigurationError
from .run_options import AsJson
from .terminal import aligned, failing_clearly, say

if TYPE_CHECKING:
    from ...clients.records.drafting import Draft
    from ...strategies.queries import ColumnStatistics, TableStatistics


_WIDTH = 100


def schema(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Records: .csv, .csv.gz, .parquet or .npz.", show_default=False)
    ],
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="What is to be predicted.", show_default="the last column")
    ] = "",
    owner: Annotated[str, typer.Option(metavar="COLUMN", help="Whose a record is.", show_default="nobody's")] = "",
    out: Annotated[Path | None, typer.Option(help="The schema's new file.", show_default="print it")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="SCHEMA.toml", help="Say how many records of FILE fit it.", show_default=False
        ),
    ] = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print the digest of FILE, a schema.")] = False,
) -> None:
    """Draft what a record is from a file of records, for a person to review."""
    from ...clients.records.client_records import Records, file_items
    from ...clients.records.drafting import document, draft
    from ...clients.records.schema import Schema

    with failing_clearly():
        drafts = bool(label or owner or out or force)
        if drafts + (against is not None) + digest > 1:
            raise ConfigurationError(
                "Expected --digest, --schema or options of a draft, got several of them.", kind="conflict"
            )
        if digest:
            say(Schema.read_file(file).digest)
        elif against is not None:
            known = Schema.read_file(against)
            say(Records(file_items(file, known), known).report())
        else:
            if out is not None and out.exists() and not force:
                raise ConfigurationError(
                    f"Expected a new file, got {out}, which exists: --force overwrites it.", kind="exists"
                )
            found = draft(file, label=label, owner=owner)
            text = document(found.schema, _heading(file, found))
            if out is None:
                typer.echo(text, nl=False)
            else:
                out.write_text(text, encoding="utf-8")
                say(f"schema    {out}: a draft from all rows; leave only what is public, then set reviewed = true")


def _heading(file: Path, found: Draft) -> list[str]:
    """Comment lines for a person who reviews a draft; names are quoted, so that none ends a comment."""
    sentences = [
        f"Drafted from all rows of {file.name!r}, so it shows something of them; reviewed by nobody yet.",
        "Leave only what is public in it, then set reviewed = true: a guarantee holds given a schema that does not "
        "come from the rows.",
        "Bounds cut off the most extreme values. Categories of fewer than 20 records count as other; the "
        "label's of so few do not fit.",
        *_left_out(found),
    ]
    return [line for one in sentences for line in textwrap.wrap(one, _WIDTH, break_long_words=False)]


def _left_out(found: Draft) -> list[str]:
    return [f"Left out, with {reason}: {', '.join(map(repr, names))}." for reason, names in found.left_out.items()]


REHEARSAL = (
    "REHEARSAL: nobody is protected, because its keys follow from a seed and one computer holds all records. Do not "
    "publish it."
)

_ORDERS = (0.05, 0.25, 0.5, 0.75, 0.95)
_HEADINGS = {
    "number": ("mean", "95 % interval", *(f"{100 * order:g} %" for order in _ORDERS)),
    "category": ("share of each value",),
}


def statistics(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Records: .csv, .csv.gz or .parquet.", show_default=False)
    ],
    epsilon: Annotated[float, typer.Option(help="Epsilon of all figures together, for one record.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Delta.")] = 1e-5,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="SCHEMA.toml", help="Columns and their public bounds.", show_default="drafted from FILE"),
    ] = None,
    clients: Annotated[int, typer.Option(help="Over how many clients records are dealt.")] = 1,
    site: Annotated[
        str, typer.Option(metavar="COLUMN", help="Or the column that says on which client a record is.")
    ] = "",
    trust: Annotated[
        str, typer.Option(help="Who is trusted: untrusted-server, secure-aggregation or trusted-server.")
    ] = "untrusted-server",
    seed: Annotated[int, typer.Option(help="Seed of the clients' keys.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Rehearse private counts, means, quantiles and histograms of a table's columns on one computer."""
    from ...clients.records.drafting import Draft, draft
    from ...clients.records.schema import Schema
    from ..runs.private_statistics import private_statistics

    logging.getLogger("flwr").setLevel(logging.WARNING)
    with failing_clearly():
        known = draft(file) if schema is None else Draft(Schema.read_file(schema))
        asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "clients": clients, "site": site, "trust": trust}
        found = private_statistics(file, known.schema, seed=seed, **asked)
    if as_json:
        would = None if found.guarantee is None else found.guarantee.document()
        entries = {"rehearsal": True, "said": REHEARSAL, "schema_drafted": schema is None, "would_have": would}
        typer.echo(json.dumps({**entries, **found.document}, indent=2))
        return
    _show(found, _left_out(known), drafted=schema is None)


def _show(found: TableStatistics, left_out: list[str], *, drafted: bool) -> None:
    say(REHEARSAL)
    many = f"{found.clients:,} client{'s' * (found.clients != 1)}"
    say(f"{found.records:,} records of {many}. With secret keys it would have: {found.guarantee}")
    if drafted:
        say("The schema was drafted from these records, and shows something of them: write one with murmurfl schema.")
    for line in left_out:
        say(line)
    for kind, columns in _HEADINGS.items():
        chosen = [one for one in found.columns if (one.column.bounds is None) == (kind == "category")]
        if not chosen:
            continue
        headings = [kind, "with a value", *columns]
        cells = [[one.name, _share(one, found.records), *_cells(one)] for one in chosen]
        rows = [dict(zip(headings, row, strict=True)) for row in cells]
        say("")
        for line in aligned(rows, headings, headings[1:] if kind == "number" else headings[1:2]):
            typer.echo(line)


def _share(one: ColumnStatistics, records: int) -> str:
    return f"{100 * min(max(one.count / records, 0.0), 1.0):.1f} %"


def _cells(one: ColumnStatistics) -> list[str]:
    """Return the figures of a column, none where the noise hides them."""
    if one.column.bounds is None:
        counts = [(name, max(count, 0.0)) for name, count, _ in one.histogram]
        total = sum(count for _, count in counts) or 1.0
        return ["hidden by noise" if one.hidden else ", ".join(f"{n} {100 * c / total:.1f} %" for n, c in counts)]
    mean = one.mean
    if mean is None:
        return ["hidden by noise", *[""] * (1 + len(_ORDERS))]
    low, high = mean.interval
    quantiles = [one.quantile(order) for order in _ORDERS]
    cells = ["" if found is None else f"{found.value:.4g}" for found in quantiles]
    return [f"{mean.value:.4g}", f"{low:.4g} to {high:.4g}", *cells]
