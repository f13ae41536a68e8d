"""``murmurfl try``: somebody's Flower project, run in this process and rehearsed with privacy."""

from __future__ import annotations

from typing import Annotated

import typer

from .terminal import failing_clearly, say


def try_package(
    package: Annotated[str, typer.Argument(help="A folder with [tool.flwr.app] in its pyproject.toml, or a module.")],
    clients: Annotated[int, typer.Option(help="Clients of the simulation.")] = 10,
    epsilon: Annotated[float, typer.Option(help="Privacy of all releases of a client together.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Rounds with privacy, each of which is one step.")] = 30,
) -> None:
    """Run a Flower project as it is and with privacy, on its simulated data; print the lines to change."""
    with failing_clearly():
        from ..projects.trial import try_project

        for line in try_project(package, nodes=clients, epsilon=epsilon, rounds=rounds).lines():
            say(line)
