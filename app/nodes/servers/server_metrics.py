"""The figures of a server: of Flower's SuperLink, whose process is watched, and of the rounds, from their file."""

from __future__ import annotations

from pathlib import Path

from ....strategies.rounds.monitor_file import ServerFigures, read_figures
from ..watching.monitor_figures import Value
from .server_health import ServerHealth


class ServerMetrics:
    """What a server shows of itself.

    Parameters
    ----------
    health : ServerHealth
    folder : Path
        Where the strategies of its runs note their rounds.
    started : float
        In seconds since 1970.
    expiry : float, optional
        When the first of its certificates expires.

    Notes
    -----
    Shows counts of machines, answers and refusals, which a server has anyway, and times; no figure of a model, no name.
    """

    def __init__(self, health: ServerHealth, folder: Path, started: float, expiry: float | None = None) -> None:
        self._health = health
        self._folder = folder
        self._started = started
        self._expiry = expiry

    def read(self) -> dict[str, Value]:
        """The figures by name, as they are now."""
        noted = read_figures(self._folder)
        rounds = noted or ServerFigures()
        last = {
            "murmurfl_last_contact_timestamp_seconds": int(rounds.at),
            "murmurfl_round_seconds": round(rounds.seconds),
            "murmurfl_round": rounds.round,
            "murmurfl_rounds_planned": rounds.planned,
        }
        return {
            "murmurfl_started_timestamp_seconds": self._started,
            "murmurfl_healthy": float(not self._health.problem),
            "murmurfl_superlink_running": float(self._health.running),
            "murmurfl_superlink_restarts_total": self._health.restarts,
            "murmurfl_certificate_expiry_timestamp_seconds": self._expiry,
            "murmurfl_rounds_total": rounds.rounds,
            "murmurfl_closed_rounds_total": rounds.closed,
            "murmurfl_asked_total": rounds.asked,
            "murmurfl_releases_total": rounds.aggregated,
            "murmurfl_lost_total": rounds.lost,
            "murmurfl_late_total": rounds.late,
            "murmurfl_malformed_total": rounds.malformed,
            "murmurfl_unopened_total": rounds.unopened,
            "murmurfl_refusals_total": rounds.refused,
            **({} if noted is None else last),
        }
