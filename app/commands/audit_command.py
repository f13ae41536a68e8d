"""``murmurfl audit``: measure a run against its claim, or a real node against strange records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..settings.run_config import RunConfig
from .run_options import AsJson, Assignments, ConfigFile, settings_of
from .terminal import CLAIM_REFUTED, MISUSED, fail, failing_clearly, say, say_table

_MOST_ERRORS = 3
NodeFile = Annotated[
    Path | None,
    typer.Option(
        help="An operator's file: its machine is tried on made-up records, one of them replaced by a strange one.",
        metavar="FILE",
        show_default=False,
    ),
]
AppName = Annotated[
    str,
    typer.Option(
        help="The same of an installed private_client_app that says what a record is.",
        metavar="PACKAGE:NAME",
        show_default=False,
    ),
]


def audit(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    runs: Annotated[int, typer.Option(help="Simulated machines with the canary, and as many without.")] = 2000,
    node: NodeFile = None,
    app: AppName = "",
    as_json: AsJson = False,
) -> None:
    """Measure the privacy of machines and hold it against their claim; exit code 3 if that is refuted."""
    with failing_clearly():
        if node is not None or app:
            if assignments or config_file or (node is not None and app):
                fail("Expected one of --node, --app and a run's settings, got more: leave the others out.", MISUSED)
            _audit_strange_records(node, app, as_json=as_json)
            return
        from ..auditing.run_audit import audit_lines, audit_run

        found = audit_run(RunConfig.from_mapping(settings_of(config_file, assignments)), runs)
        if as_json:
            typer.echo(json.dumps(found.document(), indent=2))
        else:
            for line in audit_lines(found):
                say(line)
        if found.violated:
            fail("the measured privacy loss is above the claimed one.", CLAIM_REFUTED)


def _audit_strange_records(node: Path | None, app: str, *, as_json: bool) -> None:
    from ..auditing.differential import audit_app, audit_node
    from ..nodes.node_app import read_node

    found = audit_app(app) if node is None else audit_node(read_node(node, runs_kept=True))
    if as_json:
        typer.echo(json.dumps(found.document(), indent=2))
    else:
        say(f"Audited, made small for it: {found.machine}")
        say(f"Made-up records come as {', '.join(found.sources)}.")
        say_table("What one record shows", found.rows(), ["strange record", "same bytes"])
        for line in (*found.errors[:_MOST_ERRORS], *found.notes, found.sentence):
            say(line)
    if found.refuted:
        fail("what leaves the machine depends on a record beyond what is charged for it.", CLAIM_REFUTED)
