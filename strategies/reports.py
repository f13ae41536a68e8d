"""Reports of rounds, as a log and as a checkpoint have them."""

from __future__ import annotations

from dataclasses import asdict
from logging import INFO, WARNING
from typing import Any

from flwr.common.logger import log

from .replies import RoundReport

_ONLY_SOMETIMES = ("unopened", "closed", "overdue", "awaited", "finished")


def plain(report: RoundReport) -> dict[str, Any]:
    """A report for a checkpoint; what only some rounds have stands only there."""
    return {name: value for name, value in asdict(report).items() if value or name not in _ONLY_SOMETIMES}


def log_losses(report: RoundReport) -> None:
    """One line where replies are missing; a warning where one of them was malformed."""
    if report.aggregated < report.asked or report.overdue:
        log(
            WARNING if report.malformed else INFO,
            "Round %d: %d of %d replies aggregated (lost %d, refused %s, late %d, malformed %d%s).",
            *(report.server_round, report.aggregated, report.asked, report.lost, report.refused),
            *(report.late, report.malformed, _still_open(report)),
        )


def _still_open(report: RoundReport) -> str:
    """What a round that does not wait for all has beside the others."""
    overdue = f", {report.overdue} asked for before" if report.overdue else ""
    return f"{overdue}, {report.awaited} awaited" if report.awaited else overdue
