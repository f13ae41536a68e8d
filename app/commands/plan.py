"""``murmurfl plan``: which strategy to take, and what every mechanism would do, from a few numbers or a run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import RunConfig
from ..keys import Value
from ..settings import layered
from .failing import MISUSED, fail, failing_clearly
from .settings import AsJson, Assignments, ConfigFile, settings_of
from .terminal import say, say_table
from .updates import show_updates

if TYPE_CHECKING:
    from ..analysis.decision import Choice
    from ..analysis.plan import Plan
    from ..analysis.request import PlanRequest

_KEYS = {
    "machines": "num-clients",
    "rounds": "num-rounds",
    "batch": "batch-size",
    "epsilon": "epsilon",
    "mu": "mu",
    "delta": "delta",
    "per_round": "clients-per-round",
    "passes": "passes",
    "secret_order": "secret-order",
    "clip": "clip-norm",
    "sample_uses": "sample-uses",
    "stream": "stream",
    "trust": "trust",
    "colluders": "colluders",
}
"""The run-config key that an option of this command stands for."""
_OF_TABLES = ("batch", "passes", "secret_order")
"""Options that settle the run whose mechanisms are compared, and not the decision."""
_OF_DECISIONS = ("sample_uses", "stream")
"""Options that settle the decision alone."""


def plan(
    machines: Annotated[int | None, typer.Option(help="Machines, M.", show_default=False)] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each machine.", show_default=False)] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="For one sample of one machine, over all its releases.", show_default=False)
    ] = None,
    mu: Annotated[float | None, typer.Option(help="The same as Gaussian DP.", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="Of the same guarantee.", show_default="1e-05")] = None,
    sample_uses: Annotated[
        str | None, typer.Option(help="In how many releases a sample may be: any, few (4), once.", show_default="any")
    ] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream", help="Samples come while rounds go on.", show_default=False)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds that are possible, T.", show_default="any")] = None,
    per_round: Annotated[
        int | None, typer.Option(help="Machines asked in a round, m; 0 for all.", show_default="0")
    ] = None,
    trust: Annotated[str | None, typer.Option(help="Whom a machine trusts.", show_default="untrusted-server")] = None,
    colluders: Annotated[
        int | None, typer.Option(help="Machines of a sum that may work with the server.", show_default="half")
    ] = None,
    parameters: Annotated[int | None, typer.Option(help="Values in the model, d.", show_default="1000")] = None,
    clip: Annotated[
        float | None, typer.Option(help="Clip norm of one sample's gradient, S.", show_default="1.0, or the choice's")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples in one release, b: compare mechanisms for it.", show_default=False)
    ] = None,
    passes: Annotated[
        int | None, typer.Option(help="Of that comparison: how often samples are gone through.", show_default="1")
    ] = None,
    secret_order: Annotated[
        bool | None,
        typer.Option("--secret-order", help="Of that comparison: each sample draws its release.", show_default=False),
    ] = None,
    unit: Annotated[
        str,
        typer.Option(help="What is protected: sample, or machine for a project's own updates."),
    ] = "sample",
    config_file: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Which strategy to take, with what, and why not the others; then what every mechanism would need and do.

    It is decided before anything runs, from sizes alone. With --config or --set it is decided for that run, on the
    sizes of its data; the other options win over it. With --unit machine it says what noise on the updates of a project
    of your own would leave of its model.
    """
    options = {
        "machines": machines,
        "samples": samples,
        "rounds": rounds,
        "batch": batch,
        "epsilon": epsilon,
        "mu": mu,
        "delta": delta,
        "per_round": per_round,
        "passes": passes,
        "secret_order": secret_order,
        "clip": clip,
        "parameters": parameters,
        "sample_uses": sample_uses,
        "stream": stream,
        "trust": trust,
        "colluders": colluders,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with failing_clearly():
        if unit != "sample":
            show_updates(unit, given, of_a_run=config_file is not None or assignments is not None, as_json=as_json)
            return
        if config_file is None and assignments is None:
            choice, request = _from_numbers(given)
        else:
            choice, request = _from_run(settings_of(config_file, assignments), given)
        _show(choice, request, as_json=as_json)


def _show(choice: Choice | None, request: PlanRequest | None, *, as_json: bool) -> None:
    from ..analysis.plan import make_plan

    made = None if request is None else make_plan(request)
    if as_json:
        document = {} if made is None else made.document()
        document["decision"] = None if choice is None else choice.document()
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    for line in [] if choice is None else choice.lines():
        say(line)
    if made is not None:
        say("")
        _show_tables(made)


def _show_tables(made: Plan) -> None:
    from ..analysis.plan import compared_table, plan_lines, plan_table

    before, after = plan_lines(made)
    for line in before:
        say(line)
    table = plan_table(made)
    say_table(table.title, table.texts(), table.labels)
    for line in after:
        say(line)
    compared = compared_table(made)
    say_table(compared.title, compared.texts(), compared.labels)


def _from_numbers(given: dict[str, Any]) -> tuple[Choice, PlanRequest | None]:
    from ..analysis.decision import choice_of_numbers, request_of_choice
    from ..analysis.request import PlanRequest

    missing = [f"--{name}" for name in ("machines", "samples") if name not in given]
    missing += [] if {"epsilon", "mu"} & set(given) else ["--epsilon"]
    if missing:
        fail(f"Expected {', '.join(missing)} as well, or a run's configuration with --config or --set.", MISUSED)
    request = None
    if "batch" in given:
        machines = given["machines"]
        per_round = given.get("per_round") or machines
        passes = given.get("passes", 1)
        request = PlanRequest(
            machines=machines,
            samples=given["samples"],
            rounds=given.get("rounds") or passes * machines * (given["samples"] // given["batch"]) // per_round,
            batch_size=given["batch"],
            epsilon=given.get("epsilon", 0.0),
            mu=given.get("mu", 0.0),
            delta=given.get("delta", 1e-5),
            per_round=per_round,
            passes=passes,
            clip_norm=given.get("clip", 1.0),
            parameters=given.get("parameters", 1000),
            secret_order=given.get("secret_order", False),
        )
        request.check_rounds()
    settings = {key: given[name] for name, key in _KEYS.items() if name in given and name not in _OF_TABLES}
    settings["clients-per-round"] = given.get("per_round") or given["machines"]
    choice = choice_of_numbers(given["samples"], given.get("parameters", 1000), settings)
    return choice, request or request_of_choice(choice)


def _from_run(settings: dict[str, Value], given: dict[str, Any]) -> tuple[Choice | None, PlanRequest | None]:
    from ..analysis.decision import choice_of_run, request_of_choice
    from ..analysis.request import request_of
    from ..methods.auto import AUTO

    own = {_KEYS[name]: value for name, value in given.items() if name in _KEYS}
    if given.get("per_round") == 0:
        own["clients-per-round"] = given.get("machines", settings.get("num-clients", RunConfig.num_clients))
    merged = layered(settings, own)
    if merged.get("strategy") == AUTO:
        choice = choice_of_run(merged)
        return choice, request_of_choice(choice)
    of_decision = {_KEYS[name] for name in _OF_DECISIONS}
    config = RunConfig.from_mapping({name: value for name, value in merged.items() if name not in of_decision})
    request = request_of(config, check_rounds="samples" not in given)
    changes = {name: given[name] for name in ("samples", "parameters") if name in given}
    if changes:
        request = replace(request, **changes)
        request.check_rounds()
    return choice_of_run(merged), request
