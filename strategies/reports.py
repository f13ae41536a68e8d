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


def say_unlike(server_round: int, unlike: int, *, masked: bool) -> None:
    """Server and machines disagree about masks: all such replies are malformed, in this round and in any other."""
    if unlike and masked:
        log(
            WARNING,
            "Round %d: %d replies without masks, and this server has sums of masked releases only: they are "
            "dropped. Have these machines set trust = 'secure-aggregation'.",
            *(server_round, unlike),
        )
    elif unlike:
        log(
            WARNING,
            "Round %d: %d replies under masks (trust = 'secure-aggregation'), and this server cannot take them "
            "off: they are dropped. Give the strategy secure_aggregation=SecureAggregation(...), or run murmurfl's "
            "app with trust=secure-aggregation.",
            *(server_round, unlike),
        )
