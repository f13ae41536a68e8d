"""Runs that a node takes: the table ``[runs]`` of its operator's file, applied before anything reads a request.

The table names owners whose permits count (:mod:`murmurfl.privacy.permits`), bundles, and hours. Nothing that Flower
says of a run counts: who submitted it, and its number, are the server's word.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flwr.app import ConfigRecord, Context, Error, Message

from ...clients.messages import Answers
from ...clients.nodes.operators_file import RUNS_TABLE, named_values, operators_values
from ...privacy import protocol
from ...privacy.errors import ConfigurationError
from ...privacy.permits import PermitError, check_bundle_digest, public_owner_key, shown_time, verified_permit

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
TimeZone = Literal["local", "UTC"]
TIME_ZONES: tuple[TimeZone, ...] = get_args(TimeZone)
WHOLE_DAY = "00:00-24:00"

_SPAN = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Hours:
    """Hours of some days."""

    span: str = WHOLE_DAY  # ``HH:MM-HH:MM``, the end excluded; past midnight if the end is the earlier one
    days: tuple[str, ...] = DAYS  # on which they begin
    time_zone: TimeZone = "local"  # the client's, or UTC

    def __post_init__(self) -> None:
        begin, end = self._minutes()
        if begin == end:
            raise ConfigurationError(
                f"Expected hours that do not end when they begin, got {self.span!r}: leave hours out for all day.",
                kind="out-of-range",
                setting="hours",
                got=self.span,
            )
        if not self.days or any(day not in DAYS for day in self.days):
            raise ConfigurationError(
                f"Expected days among {', '.join(DAYS)}, got {list(self.days)}.", kind="unknown-name", setting="days"
            )
        if self.time_zone not in TIME_ZONES:
            raise ConfigurationError(
                f"Expected time-zone 'local' (the client's) or 'UTC', got {self.time_zone!r}.",
                kind="unknown-name",
                setting="time-zone",
                got=self.time_zone,
            )

    def has(self, now: float) -> bool:
        """Return True if ``now``, in seconds since 1970, lies in them."""
        at = time.gmtime(now) if self.time_zone == "UTC" else time.localtime(now)
        begin, end = self._minutes()
        minute = 60 * at.tm_hour + at.tm_min
        today, yesterday = DAYS[at.tm_wday] in self.days, DAYS[at.tm_wday - 1] in self.days
        if begin < end:
            return today and begin <= minute < end
        return (today and minute >= begin) or (yesterday and minute < end)

    def sentence(self) -> str:
        zone = "UTC" if self.time_zone == "UTC" else "the client's local time"
        days = "" if set(self.days) == set(DAYS) else f" of {', '.join(self.days)}"
        return f"from {self.span.replace('-', ' to ')}{days}, {zone}"

    def _minutes(self) -> tuple[int, int]:
        found: Any = _SPAN.fullmatch(self.span) if isinstance(self.span, str) else None
        parts = [int(part) for part in found.groups()] if found else [99] * 4
        begin, end = 60 * parts[0] + parts[1], 60 * parts[2] + parts[3]
        if max(parts[1], parts[3]) > 59 or begin >= _DAY_MINUTES or end > _DAY_MINUTES:
            raise ConfigurationError(
                f"Expected hours as HH:MM-HH:MM, such as 22:00-06:00, got {self.span!r}.",
                kind="malformed",
                setting="hours",
                got=self.span,
            )
        return begin, end


logger = logging.getLogger(__name__)

REFUSAL = "this client does not take this run"
"""Text that a server receives, whatever the reason."""


class ReceivedContext(Context):
    """Flower's context without its run configuration, which the app must not see, and the bundle that came with it."""

    def __init__(self, context: Context, bundle: bytes) -> None:
        super().__init__(context.run_id, context.node_id, context.node_config, context.state, run_config={})
        self._bundle = bundle

    @property
    def bundle_digest(self) -> str:
        """SHA-256 of the bundle's bytes; empty if none came."""
        return hashlib.sha256(self._bundle).hexdigest() if self._bundle else ""


@dataclass(frozen=True)
class RunsTable:
    """The table ``[runs]`` as written."""

    # Public keys of 64 hexadecimal digits (``murmurfl owner key``), one of which must have signed a session's permit
    owners: Sequence[str] | None = None
    bundles: Sequence[str] | None = None  # SHA-256 of the only bundles (``murmurfl owner bundle``)
    hours: str = WHOLE_DAY  # the only hours for requests, ``22:00-06:00``
    days: Sequence[str] | None = None  # ``mon`` to ``sun``, on which the hours begin
    time_zone: str = "local"  # of hours and days: ``local``, the client's own, or ``UTC``


@dataclass(frozen=True)
class RunAdmissionPolicy:
    """Policy for the runs that a node takes: everything that is set must hold.

    Notes
    -----
    Adds no noise and spends nothing. With ``owners``, a request is answered only if it carries a permit that one of
    them signed, that is valid now by this computer's clock, and that names every session the request names: no server
    can make the client begin another session. It may use a permit again within its sessions and its time. ``bundles``
    guard against a bundle that nobody has looked at, but not against a server that ships one bundle and runs another
    program.
    """

    owners: tuple[bytes, ...] = ()  # public keys; empty for any session
    bundles: frozenset[str] = frozenset()  # digests; empty for any bundle
    hours: Hours | None = None  # None for any time

    @classmethod
    def read(cls, path: Path) -> RunAdmissionPolicy | None:
        """Read the table ``[runs]`` of an operator's file; None if there is none. An empty one is refused."""
        values = operators_values(path.expanduser().absolute()).get(RUNS_TABLE)
        if values is None:
            return None
        try:
            if not isinstance(values, Mapping) or not values:
                raise ConfigurationError(
                    f"Expected owners, bundles, hours or days, got {values!r}: leave the table out to take every run.",
                    kind="malformed",
                )
            return cls._of(RunsTable(**named_values(RunsTable, values)))
        except ConfigurationError as error:
            raise error.reworded(f"{path}: [{RUNS_TABLE}]: {error}") from error

    @classmethod
    def _of(cls, table: RunsTable) -> RunAdmissionPolicy:
        owners, bundles = _listed("owners", table.owners), _listed("bundles", table.bundles)
        for bundle in bundles:
            check_bundle_digest(bundle)
        days: Any = _listed("days", table.days) or DAYS
        hours: Any = Hours(table.hours, tuple(days), table.time_zone)  # type: ignore[arg-type]
        always = hours == Hours(time_zone=hours.time_zone)
        return cls(tuple(map(public_owner_key, owners)), frozenset(bundles), None if always else hours)

    def why_not(self, message: Message, bundle: Callable[[], str], now: float) -> str:
        """Reason for refusing a request, for the operator's own log; empty if it is answered."""
        if self.hours is not None and not self.hours.has(now):
            return f"runs are taken {self.hours.sentence()}"
        if self.bundles and bundle() not in self.bundles:
            return f"the bundle with SHA-256 {bundle() or '(none came)'} is not one of [runs] bundles"
        return self._why_no_permit(message, bundle, now) if self.owners else ""

    def _why_no_permit(self, message: Message, bundle: Callable[[], str], now: float) -> str:
        # All records, whatever their names: none may differ, since it is not known here which a client reads.
        records = [] if message.has_error() else list(message.content.config_records.values())
        carried = [record[protocol.PERMIT] for record in records if protocol.PERMIT in record]
        if len(carried) != 1:
            return f"it carries {'no permit' if not carried else 'more permits than one'}"
        try:
            permit = verified_permit(carried[0], self.owners)
        except PermitError:
            return "none of [runs] owners signed its permit"
        if not permit.is_for(now):
            times = f"from {shown_time(permit.not_before)} to {shown_time(permit.until)}"
            return f"its permit is for {times}, and this computer's clock says {shown_time(int(now))}"
        if permit.bundle and permit.bundle != bundle():
            return f"its permit is for another bundle than the one with SHA-256 {bundle() or '(none came)'}"
        named = [record[protocol.SESSION] for record in records if protocol.SESSION in record]
        if any(session not in permit.sessions for session in named):
            return f"its permit is for other sessions ({', '.join(permit.sessions)})"
        return ""

    def sentence(self) -> str:
        """Return the runs that are taken, for the operator's own log."""
        conditions = []
        if self.owners:
            conditions.append(f"with a permit of {_one_of(len(self.owners), 'listed owner')}")
        if self.bundles:
            conditions.append(f"with {_one_of(len(self.bundles), 'listed bundle')}")
        if self.hours is not None:
            conditions.append(self.hours.sentence())
        return f"Takes runs {', '.join(conditions) or 'of everybody'}."


def taking(app: Answers, runs: RunAdmissionPolicy | None, clock: Callable[[], float] = time.time) -> Answers:
    """Return an app that answers only the requests of such runs (None: of all), and sees nothing of permits.

    Notes
    -----
    :class:`RunAdmissionPolicy` judges every message, greetings, questions and evaluations too. A refused one gets one
    fixed text, which depends on the request, the operator's file and the clock, never on data, and ``app`` does not
    see it. What ``app`` sees does not depend on the permit, so a repeated request with a renewed permit is the same
    request.
    """

    def answer(message: Message, context: Context) -> Message:
        if runs is not None and (why := _why_not(runs, message, context, clock())):
            logger.warning("Run %d is not taken: %s.", message.metadata.run_id, why)
            return Message(Error(protocol.RUN_NOT_ALLOWED, REFUSAL), reply_to=message)
        _take_permits_out(message)
        return app(message, context)

    return answer


def _why_not(runs: RunAdmissionPolicy, message: Message, context: Context, now: float) -> str:
    def bundle() -> str:
        return context.bundle_digest if isinstance(context, ReceivedContext) else ""

    try:
        return runs.why_not(message, bundle, now)
    except Exception:  # of a message that anybody wrote, and which fails in ways of its own: it is refused
        logger.exception("Whether a run is taken could not be told.")
        return "the request cannot be read"


def _take_permits_out(message: Message) -> None:
    if message.has_error():
        return
    for name, record in list(message.content.config_records.items()):
        if protocol.PERMIT in record:
            kept = {key: value for key, value in record.items() if key != protocol.PERMIT}
            message.content[name] = ConfigRecord(kept)


def _listed(key: str, values: Any) -> list[str]:
    if values is None:
        return []
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ConfigurationError(
            f"Expected {key} to be a list of one or more texts, got {values!r}.", kind="wrong-type", setting=key
        )
    return values


def _one_of(count: int, what: str) -> str:
    return f"the {what}" if count == 1 else f"one of {count} {what}s"
