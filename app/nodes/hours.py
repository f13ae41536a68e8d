"""Hours of a week in which a node takes runs, by the machine's own clock."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...privacy import ConfigurationError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
TimeZone = Literal["local", "UTC"]
TIME_ZONES: tuple[TimeZone, ...] = get_args(TimeZone)
WHOLE_DAY = "00:00-24:00"

_SPAN = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Hours:
    """Hours of some days.

    Parameters
    ----------
    span : str
        ``HH:MM-HH:MM``, from and up to; past midnight where the second is the earlier one.
    days : tuple of str
        On which they begin, of :data:`DAYS`.
    time_zone : {"local", "UTC"}
        Of the machine, or UTC.

    Raises
    ------
    ConfigurationError
        If there are none such.
    """

    span: str = WHOLE_DAY
    days: tuple[str, ...] = DAYS
    time_zone: TimeZone = "local"

    def __post_init__(self) -> None:
        begin, end = self._minutes()
        if begin == end:
            raise ConfigurationError(
                f"Expected hours that do not end when they begin, got {self.span!r}: leave hours out for all day."
            )
        if not self.days or any(day not in DAYS for day in self.days):
            raise ConfigurationError(f"Expected days among {', '.join(DAYS)}, got {list(self.days)}.")
        if self.time_zone not in TIME_ZONES:
            raise ConfigurationError(f"Expected time-zone 'local' (the machine's) or 'UTC', got {self.time_zone!r}.")

    def has(self, now: float) -> bool:
        """Whether a time, in seconds since 1970, lies in them."""
        at = time.gmtime(now) if self.time_zone == "UTC" else time.localtime(now)
        begin, end = self._minutes()
        minute = 60 * at.tm_hour + at.tm_min
        today, yesterday = DAYS[at.tm_wday] in self.days, DAYS[at.tm_wday - 1] in self.days
        if begin < end:
            return today and begin <= minute < end
        return (today and minute >= begin) or (yesterday and minute < end)

    def sentence(self) -> str:
        """The same for people."""
        zone = "UTC" if self.time_zone == "UTC" else "the machine's local time"
        days = "" if set(self.days) == set(DAYS) else f" of {', '.join(self.days)}"
        return f"from {self.span.replace('-', ' to ')}{days}, {zone}"

    def _minutes(self) -> tuple[int, int]:
        found: Any = _SPAN.fullmatch(self.span) if isinstance(self.span, str) else None
        parts = [int(part) for part in found.groups()] if found else [99] * 4
        begin, end = 60 * parts[0] + parts[1], 60 * parts[2] + parts[3]
        if max(parts[1], parts[3]) > 59 or begin >= _DAY_MINUTES or end > _DAY_MINUTES:
            raise ConfigurationError(f"Expected hours as HH:MM-HH:MM, such as 22:00-06:00, got {self.span!r}.")
        return begin, end
