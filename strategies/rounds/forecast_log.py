"""The forecast of a training on the server, made from what its machines state before the first round, and its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.common.logger import log

from ...privacy.accounting.noise_forecast import Forecast, StatedNoise

_WIDTH = 64
"""Of a line beside Flower's `WARNING :`, on a terminal of 80 columns."""


def read_noise(statements: Mapping[str, Mapping[str, Any]]) -> Sequence[StatedNoise]:
    """What machines state of their noise; those that say too little are left out.

    Parameters
    ----------
    statements : mapping
        By name.

    Notes
    -----
    These are the machines' own words; a server cannot check them.
    """
    read = (StatedNoise.read(statement) for statement in statements.values())
    return [one for one in read if one is not None]


def log_forecast(forecast: Forecast | None) -> None:
    """Say it once: a warning nobody can miss where the model will be noise, and otherwise a line or a few.

    Parameters
    ----------
    forecast : Forecast or None
        Nothing is said where there is none.
    """
    if forecast is None:
        return
    if forecast.is_warning:
        # A record for each line: `murmurfl run` and others who read this log look for warnings line by line.
        for line in forecast.banner(_WIDTH):
            log(WARNING, "%s", line)
        return
    log(INFO, "%s %s", forecast.sentence, forecast.basis)
    for line in forecast.advice():
        log(INFO, "%s", line)
