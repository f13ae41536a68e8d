"""``murmurfl schema`` and ``murmurfl statistics``: what a table's record is, and private statistics of columns."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...privacy.errors import ConfigurationError
from .run_options import AsJson
from .terminal import aligned, failing_clearly, say

if TYPE_CHECKING:
    from ...clients.records.drafting import Draft
    from ...clients.records.schema import Schema
    from ...strategies.queries import ColumnStatistics, TableStatistics


_TERMINAL, _WIDEST_NAME = 80, 24


def schema(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Records: .csv, .csv.gz, .parquet or .npz.", show_default=False)
    ],
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="What is to be predicted.", show_default="the last column")
    ] = "",
    owner: Annotated[str, typer.Option(metavar="COLUMN", help="Whose a record is.", show_default="nobody's")] = "",
    site: Annotated[
        str, typer.Option(metavar="COLUMN", help="On which site a record is: no feature.", show_default=False)
    ] = "",
    no_header: Annotated[bool, typer.Option("--no-header", help="The first line is a record.")] = False,
    texts: Annotated[
        list[str] | None, typer.Option("--text", metavar="COLUMN", help="A column of free text.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The schema's new file.", show_default="print it")] = None,
    html: Annotated[
        Path | None, typer.Option(help="A new page that shows the draft, to review it.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out and --html.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="SCHEMA.toml", help="Say how many records of FILE fit it.", show_default=False
        ),
    ] = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print the digest of FILE, a schema.")] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Complete --schema, a declared one, by releases with noise that FILE's ledger pays for once.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="With --epsilon, for a new ledger: epsilon of all calls.", show_default="this call's epsilon"
        ),
    ] = 0.0,
    ledger: Annotated[Path | None, typer.Option(help="With --epsilon: its file.", show_default="FILE.ledger")] = None,
    private_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --epsilon: as for murmurfl fit.", show_default="nowhere"),
    ] = None,
) -> None:
    """Draft what a record is from a file of records, for a person to review."""
    from ...clients.records.drafting import Draft, document, draft
    from ...clients.records.image_folders import ImageFolder
    from ...clients.records.schema import Schema
    from ...privacy.accounting.gdp import gdp_mu
    from ..data.table_task import folder_schema
    from ..reports.draft_review import draft_page
    from ..runs.fit_arguments import EPSILON
    from ..settings.run_config import run_keys

    with failing_clearly():
        if epsilon is not None or budget or ledger or private_log:
            others = label or owner or site or no_header or texts or html or digest
            if against is None or epsilon is None or others:
                raise ConfigurationError(
                    "Expected --epsilon with --schema, a declared schema, and of other options --out, --force, "
                    "--budget, --ledger and --private-log alone, got others.",
                    kind="conflict",
                    setting="epsilon",
                )
            _pay(file, against, out, force=force, epsilon=epsilon, budget=budget, ledger=ledger, log=private_log)
            return
        drafts = bool(label or owner or site or no_header or texts or out or html or force)
        if drafts + (against is not None) + digest > 1:
            raise ConfigurationError(
                "Expected --digest, --schema or options of a draft, got several of them.", kind="conflict"
            )
        if digest:
            say(Schema.read_file(file).digest)
        elif against is not None:
            known = Schema.read_file(against)
            _say_fitting(file, known)
        else:
            _check_new(out, html, force=force)
            apart = [site] if site else []
            mu = gdp_mu(EPSILON, run_keys()["delta"].default)
            if file.is_dir():
                found = Draft(folder_schema(ImageFolder(file, site), mu=mu))
            else:
                asked: dict[str, Any] = {"label": label, "owner": owner, "apart": apart, "header": not no_header}
                found = draft(file, **asked, text=texts or (), mu=mu)
            text = document(found.schema, _heading(file, found))
            if html is not None:
                html.write_text(draft_page(file.name, found), encoding="utf-8")
            if out is None:
                typer.echo(text, nl=False)
                _review(found, err=True)
            else:
                out.write_text(text, encoding="utf-8")
                _review(found, err=False)
                say(f"schema    {out}: a draft from all rows; leave only what is public, then set reviewed = true")
            if html is not None:
                say(f"page      {html}: shows something of the rows, so keep it where they are", err=out is None)


def _say_fitting(file: Path, known: Schema) -> None:
    """Print how many records fit a schema, by the kind of model where kinds read them differently."""
    from ...clients.records.client_records import Records, file_items
    from ...clients.records.image_folders import ImageFolder

    rows = ImageFolder(file) if file.is_dir() else file_items(file, known)
    found = Records(rows, known)
    read = known.of_values() if known.columns and known.norm is None and not known.is_encoded else known
    additive = found if read is known else Records(rows, read)
    if found.fits.sum() == additive.fits.sum():
        say(found.report())
        return
    say(f"An additive model, which reads missing values: {additive.report()}")
    say(f"Any other model, which needs `missing` in each column: {found.report()}")


def _check_new(*files: Path | None, force: bool) -> None:
    """Raise if a file that is to be made is there already."""
    for new in files:
        if new is not None and new.exists() and not force:
            raise ConfigurationError(
                f"Expected a new file, got {new}, which exists: --force overwrites it.", kind="exists"
            )


def _pay(
    file: Path,
    declared: Path,
    out: Path | None,
    *,
    force: bool,
    epsilon: float,
    budget: float,
    ledger: Path | None,
    log: Path | None,
) -> None:
    """Complete a declared schema, paid from the ledger of its table, and print it or write it."""
    from ...clients.records.drafting import document
    from ..runs.paid_schema import paid_schema

    _check_new(out, force=force)
    made = paid_schema(file, declared, epsilon=epsilon, budget=budget, ledger=ledger, private_log=log)
    text = document(made.schema, _comments([PAID, *made.sentences]))
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        say(f"schema    {out}: for murmurfl fit --schema {out} --real")
    for line in made.sentences:
        say(line, err=out is None)


PAID = "Declared by a person, and completed by releases with noise: released names what came from them."


def _review(found: Draft, *, err: bool) -> None:
    """Print a draft of a table as columns, kinds, reasons and losses, then what a person should decide."""
    from ..reports.draft_review import draft_table

    rows = draft_table(found).texts() if found.columns else []
    _print_review(rows, err=err)
    for note in found.notes:
        for line in textwrap.wrap(f"check     {note}", _TERMINAL, subsequent_indent=" " * 10):
            typer.echo(line, err=err)


def _print_review(rows: Sequence[Mapping[str, str]], *, err: bool) -> None:
    """Print a draft's columns, kinds, reasons and losses."""
    if not rows:
        return
    names = list(rows[0])
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names[:2]}
    wide = {names[0]: min(wide[names[0]], _WIDEST_NAME), names[1]: wide[names[1]]}
    indent = " " * (sum(wide.values()) + 4)
    for row in ({name: name for name in names}, *rows):
        name, kind, *rest = row.values()
        first = f"{textwrap.shorten(name, wide[names[0]], placeholder='...') or repr(name):<{wide[names[0]]}}  "
        words = ". ".join(one for one in rest if one)
        room = {"width": _TERMINAL, "initial_indent": f"{first}{kind:<{wide[names[1]]}}  ", "subsequent_indent": indent}
        for line in textwrap.wrap(words, **room):  # type: ignore[arg-type]
            typer.echo(line.rstrip(), err=err)


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
    return _comments(sentences)


def _comments(sentences: Sequence[str]) -> list[str]:
    """Return sentences as lines that fit a terminal behind the sign of a comment."""
    room = _TERMINAL - len("# ")
    return [line for one in sentences for line in textwrap.wrap(one, room, break_long_words=False)]


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
