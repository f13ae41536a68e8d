"""Reports of rounds, as a log and as a checkpoint have them."""

from __future__ import annotations

from dataclasses import asdict
from logging import INFO, WARNING
from typing import Any

from flwr.common.logger import log

from .replies import RoundReport


def plain(report: RoundReport) -> dict[str, Any]:
    """A report for a checkpoint; what only closed rounds have stands only there, so that older ones read the same."""
    closed = ("unopened", "closed")
    return {name: value for name, value in asdict(report).items() if value or name not in closed}


def log_losses(report: RoundReport) -> None:
    """One line where replies are missing; a warning where one of them was malformed."""
    if report.aggregated < report.asked:
        log(
            WARNING if report.malformed else INFO,
            "Round %d: %d of %d replies aggregated (lost %d, refused %s, late %d, malformed %d).",
            *(report.server_round, report.aggregated, report.asked, report.lost, report.refused),
            *(report.late, report.malformed),
        )
