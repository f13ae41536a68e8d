"""``murmurfl schema``: draft what a record is from a file, for a person to review, and read it back."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...privacy import ConfigurationError
from .terminal import failing_clearly, say

if TYPE_CHECKING:
    from ...clients.records.drafting import Draft

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
    from ...clients.records.drafting import document, draft
    from ...clients.records.machine_records import Records, file_items
    from ...clients.records.schema import Schema

    with failing_clearly():
        drafts = bool(label or owner or out or force)
        if drafts + (against is not None) + digest > 1:
            raise ConfigurationError("Expected --digest, --schema or options of a draft, got several of them.")
        if digest:
            say(Schema.read_file(file).digest)
        elif against is not None:
            known = Schema.read_file(against)
            say(Records(file_items(file, known), known).report())
        else:
            if out is not None and out.exists() and not force:
                raise ConfigurationError(f"Expected a new file, got {out}, which exists: --force overwrites it.")
            found = draft(file, label=label, owner=owner)
            text = document(found.schema, _heading(file, found))
            if out is None:
                typer.echo(text, nl=False)
            else:
                out.write_text(text, encoding="utf-8")
                say(f"schema    {out}: read it, remove what is private, then set reviewed = true")


def _heading(file: Path, found: Draft) -> list[str]:
    """Comment lines for a person who reviews a draft; names are quoted, so that none ends a comment."""
    said = [
        f"Drafted from {file.name!r}; reviewed by nobody yet.",
        "Read it, remove what is private, then set reviewed = true.",
        "Bounds cut off the most extreme values. Categories of fewer than 20 records count as other.",
        *(f"Left out, with {reason}: {', '.join(map(repr, names))}." for reason, names in found.left_out.items()),
    ]
    return [line for one in said for line in textwrap.wrap(one, _WIDTH, break_long_words=False)]
