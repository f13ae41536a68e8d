"""``murmurfl server``: Flower's SuperLink behind a gate, with health, metrics and a log line for each round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .run_options import Verbose
from .serving import HealthAddress, LogJSON, MetricsAddress, Serving

Figures = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Keeps the counts of rounds when this ends; default: none does.")
]
Owners = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Who may submit runs and register nodes (docs/deployment.md); default nobody."),
]


def server(
    context: typer.Context,
    owners: Owners = None,
    health_address: HealthAddress = "",
    metrics_address: MetricsAddress = "",
    figures: Figures = None,
    log_json: LogJSON = False,
    verbose: Verbose = False,
) -> None:
    """Run Flower's SuperLink: takes its options too, starts it again when it ends, shows how it is."""
    # Details, because a server's log contains no data of a machine.
    serving = Serving(log_json, log_details=True, verbose=verbose)
    serving.start_log()
    with serving.failing():
        from ..nodes.servers.watched_server import run_server
        from ..nodes.watching.health import Addresses

        addresses = Addresses(health_address, metrics_address)
        run_server(context.args, addresses, figures, serving.journal(), owners)
