"""The options that say where something that serves for long shows its health and its figures."""

from __future__ import annotations

from typing import Annotated

import typer

HealthAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /health there; a port alone: for this computer only.")
]
MetricsAddress = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="Answer /metrics there, for Prometheus; a port alone: as above.")
]
