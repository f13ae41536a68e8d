"""``murmurfl audit``: a run's claim held against a measurement."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..config import RunConfig
from .failing import CLAIM_REFUTED, fail, failing_clearly
from .settings import AsJson, Assignments, ConfigFile, settings_of
from .terminal import say


def audit(
    assignments: Assignments = None,
    config_file: ConfigFile = None,
    runs: Annotated[int, typer.Option(help="Simulated machines with the canary, and as many without.")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Measure the privacy of a run's machines and hold it against their claim; exit code 3 if that is refuted."""
    from ..analysis.audit import audit_lines, audit_run

    with failing_clearly():
        found = audit_run(RunConfig.from_mapping(settings_of(config_file, assignments)), runs)
        if as_json:
            typer.echo(json.dumps(found.document(), indent=2))
        else:
            for line in audit_lines(found):
                say(line)
        if found.violated:
            fail("the measured privacy loss is above the claimed one.", CLAIM_REFUTED)
