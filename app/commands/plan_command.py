"""``murmurfl plan`` and ``murmurfl audit``: what a run would be, and its claim held against a measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..settings.run_config import RunConfig
from .run_options import AsJson, Assignments, ConfigFile, Details, given_settings, setting_options, settings_of
from .terminal import CLAIM_REFUTED, MISUSED, fail, failing_clearly, say, say_command, say_table, working

if TYPE_CHECKING:
    from ..planning import PlanResult
    from ..reports.table import Table


_COMPARED = "Mechanisms are compared for it."
_KEYS = {
    "clients": ("num-clients", "", ""),
    "rounds": ("num-rounds", "any", ""),
    "batch": ("batch-size", "", _COMPARED),
    "epsilon": ("epsilon", "", ""),
    "mu": ("mu", "", ""),
    "delta": ("delta", "1e-05", ""),
    "per_round": ("clients-per-round", "all", ""),
    "passes": ("passes", "1", _COMPARED),
    "batch_selection": ("batch-selection", "", _COMPARED),
    "clip": ("clip-norm", "1.0, or the choice's", ""),
    "sample_uses": ("strategy.sample-uses", "any", ""),
    "stream": ("strategy.stream", "", ""),
    "trust": ("trust", "untrusted-server", ""),
    "colluders": ("trust.colluders", "half", ""),
    "partition": ("partition", "alike, and skewed", "How sites differ: declares it."),
    "alpha": ("partition.alpha", "0.5", ""),
    "classes": ("partition.classes", "2", ""),
}
"""Run-config key, default and use of each option."""
_SIZES = ("samples", "parameters")
_OF_BATCHES = ("batch-size", "passes", "batch-selection")
"""Keys that settle the run whose mechanisms are compared, and not the decision."""
_PARAMETERS = 1000

_DETAILED = ("batch", "passes", "batch_selection")
"""Options about what only the details say."""

_OF_UPDATES = ("clients", "per_round", "rounds", "clip", "trust", "colluders", "epsilon", "mu", "delta", *_SIZES)
"""Options about updates of whole clients."""


@setting_options(_KEYS)
def plan(
    context: typer.Context,
    samples: Annotated[int | None, typer.Option(help="Samples of each client.", show_default=False)] = None,
    parameters: Annotated[int | None, typer.Option(help="Values in the model, d.", show_default="1000")] = None,
    unit: Annotated[
        str,
        typer.Option(help="What is protected: sample, or client for a project's own updates."),
    ] = "sample",
    person_clients: Annotated[
        int | None, typer.Option(help="Of one person: on how many clients there are samples.", show_default=False)
    ] = None,
    person_samples: Annotated[
        int | None, typer.Option(help="Of that person: how many on each of them.", show_default=False)
    ] = None,
    try_out: Annotated[
        int | None,
        typer.Option("--try", help="Train the first so many ways in simulation, for accuracy.", show_default="0"),
    ] = None,
    code: Annotated[
        bool, typer.Option("--code", help="Print the Python of a project of your own in place of the command.")
    ] = False,
    details: Details = False,
    config_file: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Recommend a strategy and its settings; --details explains why not the others, and what every mechanism would do.

    It is decided before anything runs, from sizes alone. With --config or --set it is decided for that run, on the
    sizes of its data; the other options win over it. With --unit client it says what noise on the updates of a project
    of your own would leave of its model.
    """
    known = {**given_settings(context), "samples": samples, "parameters": parameters}
    given = {name: known[name] for name in (*_KEYS, *_SIZES) if known.get(name) is not None}
    of_run = config_file is not None or assignments is not None
    with failing_clearly():
        if code and as_json:
            fail("Expected --code or --json, got both: leave one out.", MISUSED)
        if unit != "sample":
            _show_updates(unit, given, of_run=of_run, as_json=as_json, code=code)
            return
        settings = settings_of(config_file, assignments) if of_run else None
        whole = details or as_json or bool(try_out) or any(name in given for name in _DETAILED)
        with working("planning"):
            found = _answer(settings, given, try_out or 0, (person_clients, person_samples), whole)
        _show(found, as_json=as_json, details=whole, code=code)


def _answer(
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    tries: int,
    person: tuple[int | None, int | None],
    details: bool,
) -> PlanResult:
    """Return the plan of a run's settings and options that win over them, or of options alone."""
    from ..planning.plan_answers import answer, asked_of_numbers, asked_of_run

    keys = {_KEYS[name][0]: value for name, value in given.items() if name in _KEYS}
    if settings is None:
        missing = [f"--{name}" for name in ("clients", "samples") if name not in given]
        missing += [] if {"epsilon", "mu"} & set(given) else ["--epsilon"]
        if missing:
            fail(f"Expected {', '.join(missing)} as well, or a run's configuration with --config or --set.", MISUSED)
        if tries:
            words = "got numbers alone: there are no data to learn."
            fail(f"Expected --config or --set with a task for --try, {words}", MISUSED)
        of_batches = {name: keys.pop(name) for name in _OF_BATCHES if name in keys}
        parameters = given.get("parameters", _PARAMETERS)
        choice, request = asked_of_numbers(given["samples"], parameters, keys, of_batches)
    else:
        if given.get("per_round") == 0:
            keys["clients-per-round"] = given.get("clients", settings.get("num-clients", RunConfig.num_clients))
        choice, request = asked_of_run(settings, keys, {name: given[name] for name in _SIZES if name in given})
    return answer(choice, request, settings or {}, tries=tries, person=person, details=details)


def _show(found: PlanResult, *, as_json: bool, details: bool, code: bool) -> None:
    from ..planning.plan_document import result_document
    from ..planning.plan_lines import answer_parts

    if as_json:
        typer.echo(json.dumps(result_document(found), indent=2, allow_nan=False))
        return
    for part in answer_parts(found, details=details, code=code):
        _say(part)


def _show_updates(unit: str, given: Mapping[str, Any], *, of_run: bool, as_json: bool, code: bool) -> None:
    """Print the forecast for updates of a project of one's own, where all data of a client are protected."""
    if unit != "client":
        fail(f"Expected --unit to be sample or client, got {unit!r}.", MISUSED)
    if code:
        fail(
            "Expected --code with --unit sample, which has code to print, got --unit client. Leave --code out; the "
            "lines of the mod are in docs/swap-in.md, All data of a client.",
            MISUSED,
        )
    if of_run:
        fail("Expected --unit client without a run's configuration: what a run protects is one sample.", MISUSED)
    unread = [f"--{name.replace('_', '-')}" for name in given if name not in _OF_UPDATES]
    if unread:
        fail(f"Expected no {', '.join(unread)} with --unit client: nothing there reads it.", MISUSED)
    missing = [f"--{name}" for name in ("clients", "parameters") if name not in given]
    if len({"epsilon", "mu"} & set(given)) != 1:
        missing.append("exactly one of --epsilon and --mu")
    if missing:
        fail(f"Expected {', '.join(missing)} as well.", MISUSED)
    from ..planning.plan_answers import request_of_updates
    from ..planning.plan_document import update_document
    from ..planning.plan_lines import update_parts

    keys = {_KEYS[name][0]: value for name, value in given.items() if name in _KEYS}
    request = request_of_updates(given.get("samples", 0), given["parameters"], keys)
    if as_json:
        typer.echo(json.dumps(update_document(request), indent=2, allow_nan=False))
        return
    for part in update_parts(request):
        _say(part)


def _say(part: str | Table) -> None:
    if not isinstance(part, str):
        say_table(part.title, part.texts(), part.labels)
    elif part.lstrip().startswith("murmurfl "):
        say_command(part)
    else:
        say(part)


_MOST_ERRORS = 3
NodeFile = Annotated[
    Path | None,
    typer.Option(
        help="An operator's file: its client is tried on made-up records, one of them replaced by a strange one.",
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
    runs: Annotated[int, typer.Option(help="Simulated clients with the canary, and as many without.")] = 2000,
    node: NodeFile = None,
    app: AppName = "",
    as_json: AsJson = False,
) -> None:
    """Measure the privacy of clients and hold it against their claim; exit code 3 if that is refuted."""
    with failing_clearly():
        if node is not None or app:
            if assignments or config_file or (node is not None and app):
                fail("Expected one of --node, --app and a run's settings, got more: leave the others out.", MISUSED)
            _audit_strange_records(node, app, as_json=as_json)
            return
        from ..auditing.run_audit import audit_lines, audit_run

        with working("auditing"):
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

    with working("auditing"):
        found = audit_app(app) if node is None else audit_node(read_node(node, runs_kept=True))
    if as_json:
        typer.echo(json.dumps(found.document(), indent=2))
    else:
        say(f"Audited, made small for it: {found.client}")
        say(f"Made-up records come as {', '.join(found.sources)}.")
        say_table("What one record shows", found.rows(), ["strange record", "same bytes"])
        for line in (*found.errors[:_MOST_ERRORS], *found.notes, found.sentence):
            say(line)
    if found.refuted:
        fail("what leaves the client depends on a record beyond what is charged for it.", CLAIM_REFUTED)
