"""``murmurfl plan``: which strategy to take, and what every mechanism would do, from a few numbers or a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...privacy.setting import Value
from ..methods.auto_method import AUTO
from ..settings.layers import layered
from ..settings.run_config import RunConfig
from .failing import MISUSED, fail, failing_clearly
from .run_options import AsJson, Assignments, ConfigFile, settings_of
from .terminal import aligned, say, say_command, say_table
from .update_plan_lines import show_updates

if TYPE_CHECKING:
    from ..planning.decision_lines import Choice
    from ..planning.noise_plans import Plan
    from ..planning.person import Asked
    from ..planning.request import PlanRequest
    from ..planning.variations import Variation

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
    person_machines: Annotated[
        int | None, typer.Option(help="Of one person: on how many machines there are samples.", show_default=False)
    ] = None,
    person_samples: Annotated[
        int | None, typer.Option(help="Of that person: how many on each of them.", show_default=False)
    ] = None,
    try_out: Annotated[
        int | None,
        typer.Option("--try", help="Train the first so many ways in simulation, for accuracy.", show_default="0"),
    ] = None,
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
    from ..planning.person import Asked

    with failing_clearly():
        if unit != "sample":
            show_updates(unit, given, of_a_run=config_file is not None or assignments is not None, as_json=as_json)
            return
        if config_file is None and assignments is None:
            choice, request, asked = *_from_numbers(given), {}
        else:
            asked = settings_of(config_file, assignments)
            choice, request = _from_run(asked, given)
        person = Asked(person_machines, person_samples)
        _show(choice, request, _ways(choice, asked, try_out or 0), person, as_json=as_json)


def _ways(choice: Choice, asked: Mapping[str, Value], most: int) -> list[Variation]:
    """The decision beside other passes, batches and trust, and beside the run that would be made if nobody decided."""
    from ..planning.variations import AS_SET, DEFAULT, tried_out, variations_of
    from ..settings.default_run import started_with

    if most and choice.made_up:
        fail(
            "Expected --config or --set with a task for --try, got numbers alone: there are no data to learn.", MISUSED
        )
    named = asked.get("strategy", AUTO) not in (AUTO, RunConfig.strategy)
    settings = choice.asked if choice.made_up else started_with({**choice.asked, **asked, **_strategy_of(asked)})
    rows = variations_of(choice.decision, settings, mark=AS_SET if named else DEFAULT)
    return tried_out(rows, most) if most else rows


def _strategy_of(asked: Mapping[str, Value]) -> dict[str, Value]:
    """The strategy of a run that nobody decides about: as it is set, or the default where the decision is left open."""
    strategy = asked.get("strategy", AUTO)
    return {"strategy": RunConfig.strategy if strategy == AUTO else strategy}


def _show(
    choice: Choice,
    request: PlanRequest | None,
    ways: Sequence[Variation],
    person: Asked,
    *,
    as_json: bool,
) -> None:
    from ..planning.late_answers import late_lines
    from ..planning.noise_plans import make_plan
    from ..planning.person import OWNERS_UNDECIDED, person_lines

    made = None if request is None else make_plan(request)
    of_owners = made is not None and made.guarantee.unit == "owner"
    persons = person.of(made) if made is not None and of_owners else person.of(choice)
    if as_json:
        document = {} if made is None else made.document()
        told = {"ways": [way.document() for way in ways], "persons": [person.document() for person in persons]}
        document["decision"] = {**choice.document(), **told}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    for line in choice.lines():
        _say(line)
    for line in late_lines(choice.decision.chosen.problem.config):
        say(line)
    for line in [OWNERS_UNDECIDED] * of_owners + person_lines(persons):
        say(line)
    _show_ways(ways, made_up=choice.made_up)
    if made is not None:
        say("")
        _show_tables(made)


def _show_ways(ways: Sequence[Variation], *, made_up: bool) -> None:
    from ..planning.variation_lines import HEADING, RIGHT, columns_of, reasons, rows_of

    say("")
    say(HEADING)
    for line in aligned(rows_of(ways), columns_of(ways), RIGHT):
        say(line)
    for line in reasons(ways, made_up=made_up):
        _say(line)


def _say(line: str) -> None:
    (say_command if line.lstrip().startswith("murmurfl ") else say)(line)


def _show_tables(made: Plan) -> None:
    from ..planning.noise_plans import compared_table, plan_lines, plan_table

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
    from ..planning.decision_lines import choice_of_numbers, request_of_choice
    from ..planning.request import PlanRequest

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


def _from_run(settings: dict[str, Value], given: dict[str, Any]) -> tuple[Choice, PlanRequest | None]:
    from ..planning.decision_lines import choice_of_run, request_of_choice
    from ..planning.request import request_of

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
