"""What ``murmurfl plan --unit machine`` says of the updates of a project of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from ...privacy import gdp_mu
from .terminal import MISUSED, fail, say, say_table

_OPTIONS = {
    "machines": "machines",
    "parameters": "parameters",
    "per_round": "per_round",
    "rounds": "rounds",
    "clip": "clip_norm",
    "trust": "trust",
    "colluders": "colluders",
    "samples": "samples",
    "delta": "delta",
}
"""The field of a request that an option of ``murmurfl plan`` stands for; epsilon and mu beside."""
_NEEDED = ("machines", "parameters")
_DELTA = 1e-5


def show_updates(unit: str, given: Mapping[str, Any], *, of_a_run: bool, as_json: bool) -> None:
    """Print the forecast for a project's updates.

    Parameters
    ----------
    unit : str
        As it was given: ``machine``.
    given : mapping
        Options of the command.
    of_a_run : bool
        Whether a run's configuration was given, whose unit is one sample.
    as_json : bool
    """
    if unit != "machine":
        fail(f"Expected --unit to be sample or machine, got {unit!r}.", MISUSED)
    if of_a_run:
        fail("Expected --unit machine without a run's configuration: what a run protects is one sample.", MISUSED)
    unread = [f"--{name.replace('_', '-')}" for name in given if name not in (*_OPTIONS, "epsilon", "mu")]
    if unread:
        fail(f"Expected no {', '.join(unread)} with --unit machine: nothing there reads it.", MISUSED)
    missing = [f"--{name}" for name in _NEEDED if name not in given]
    if len({"epsilon", "mu"} & set(given)) != 1:
        missing.append("exactly one of --epsilon and --mu")
    if missing:
        fail(f"Expected {', '.join(missing)} as well.", MISUSED)
    _show(given, as_json=as_json)


def _show(given: Mapping[str, Any], *, as_json: bool) -> None:
    from ..planning.update_plans import UpdateRequest, update_plan

    mu = given["mu"] if "mu" in given else gdp_mu(given["epsilon"], given.get("delta", _DELTA))
    fields = {_OPTIONS[name]: value for name, value in given.items() if name in _OPTIONS}
    made = update_plan(UpdateRequest(mu=mu, **fields))
    if as_json:
        typer.echo(json.dumps(made.document(), indent=2, allow_nan=False))
        return
    for line in made.lines():
        say(line)
    table = made.table()
    say_table(table.title, table.texts(), table.labels)
