"""``murmurfl plan``: what every mechanism would need and do, from a few numbers or from a run's configuration."""

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

if TYPE_CHECKING:
    from ..analysis.plan import PlanRequest

_KEYS = {
    "machines": "num-clients",
    "rounds": "num-rounds",
    "batch": "batch-size",
    "epsilon": "epsilon",
    "delta": "delta",
    "per_round": "clients-per-round",
    "passes": "passes",
    "clip": "clip-norm",
}
"""The run-config key that an option of this command stands for."""
_NEEDED = ("machines", "samples", "rounds", "batch", "epsilon")
"""Options without a default, where no run configuration is given."""


def plan(
    machines: Annotated[int | None, typer.Option(help="Machines, M.", show_default=False)] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each machine.", show_default=False)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, T.", show_default=False)] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in one release, b.", show_default=False)] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="For one sample of one machine, over all its releases.", show_default=False)
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Of the same guarantee.", show_default="1e-05")] = None,
    per_round: Annotated[
        int | None, typer.Option(help="Machines asked in a round, m; 0 for all.", show_default="0")
    ] = None,
    passes: Annotated[
        int | None, typer.Option(help="How often a machine goes through its samples.", show_default="1")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="Clip norm of one sample's gradient, S.", show_default="1.0")
    ] = None,
    parameters: Annotated[int | None, typer.Option(help="Values in the model, d.", show_default="1000")] = None,
    config_file: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """What every mechanism would need and do, before anything runs: noise, cap, errors, memory, and which is best.

    With --config or --set the run of that configuration is planned, on its data; the other options win over it.
    """
    from ..analysis.plan import compared_table, make_plan, plan_lines, plan_table

    options = {
        "machines": machines,
        "samples": samples,
        "rounds": rounds,
        "batch": batch,
        "epsilon": epsilon,
        "delta": delta,
        "per_round": per_round,
        "passes": passes,
        "clip": clip,
        "parameters": parameters,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with failing_clearly():
        if config_file is None and assignments is None:
            request = _from_numbers(given)
        else:
            request = _from_run(settings_of(config_file, assignments), given)
        made = make_plan(request)
        if as_json:
            typer.echo(json.dumps(made.document(), indent=2, allow_nan=False))
            return
        before, after = plan_lines(made)
        for line in before:
            say(line)
        table = plan_table(made)
        say_table(table.title, table.texts(), table.labels)
        for line in after:
            say(line)
        compared = compared_table(made)
        say_table(compared.title, compared.texts(), compared.labels)


def _from_numbers(given: dict[str, Any]) -> PlanRequest:
    from ..analysis.plan import PlanRequest

    missing = [f"--{name}" for name in _NEEDED if name not in given]
    if missing:
        fail(f"Expected {', '.join(missing)} as well, or a run's configuration with --config or --set.", MISUSED)
    request = PlanRequest(
        machines=given["machines"],
        samples=given["samples"],
        rounds=given["rounds"],
        batch_size=given["batch"],
        epsilon=given["epsilon"],
        delta=given.get("delta", 1e-5),
        per_round=given.get("per_round") or given["machines"],
        passes=given.get("passes", 1),
        clip_norm=given.get("clip", 1.0),
        parameters=given.get("parameters", 1000),
    )
    request.check_rounds()
    return request


def _from_run(settings: dict[str, Value], given: dict[str, Any]) -> PlanRequest:
    from ..analysis.plan import request_of

    own = {_KEYS[name]: value for name, value in given.items() if name in _KEYS}
    if given.get("per_round") == 0:
        own["clients-per-round"] = given.get("machines", settings.get("num-clients", RunConfig.num_clients))
    request = request_of(RunConfig.from_mapping(layered(settings, own)), check_rounds="samples" not in given)
    changes = {name: given[name] for name in ("samples", "parameters") if name in given}
    if changes:
        request = replace(request, **changes)
        request.check_rounds()
    return request
