"""Hours in which runs are taken: past midnight, on some days, in the machine's own time or in UTC."""

import os
import time
from datetime import UTC, datetime

import pytest
from murmurfl.app.nodes.taken_runs import Hours
from murmurfl.privacy import ConfigurationError


@pytest.fixture
def in_zone(monkeypatch):
    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.delenv("TZ", raising=False)
    os.environ.pop("TZ", None)
    time.tzset()


def at(text):
    """Of a week in November that begins on Monday, the 23rd; in UTC."""
    return datetime.fromisoformat(f"2026-11-{text}").replace(tzinfo=UTC).timestamp()


def has(hours, *times):
    return [hours.has(at(text)) for text in times]


def test_hours_past_midnight_belong_to_the_day_on_which_they_begin():
    hours = Hours("22:00-06:00", ("mon", "fri"), "UTC")
    assert has(hours, "23T21:59", "23T22:00", "23T23:59", "24T00:00", "24T05:59", "24T06:00") == [
        *(False, True, True, True, True, False),
    ]
    assert has(hours, "23T03:00", "24T22:30", "28T03:00", "29T03:00") == [False, False, True, False]
    # From Sunday to Monday.
    assert has(Hours("22:00-06:00", ("sun",), "UTC"), "23T05:59", "29T22:00", "30T01:00") == [True, True, True]


def test_hours_of_one_day_have_their_end_outside():
    hours = Hours("09:30-17:00", time_zone="UTC")
    assert has(hours, "23T09:29", "23T09:30", "23T16:59", "23T17:00") == [False, True, True, False]
    assert has(Hours("22:00-24:00", time_zone="UTC"), "23T21:59", "23T23:59", "24T00:00") == [False, True, False]
    assert has(Hours(days=("tue",), time_zone="UTC"), "23T23:59", "24T00:00", "24T23:59", "25T00:00") == [
        *(False, True, True, False),
    ]


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="time zones of a process are POSIX's")
def test_local_hours_are_those_of_the_machine(in_zone):
    in_zone("XYZ-5")  # five hours ahead of UTC
    assert has(Hours("22:00-06:00"), "23T16:59", "23T17:00", "24T00:59", "24T01:00") == [False, True, True, False]
    assert has(Hours("22:00-06:00", time_zone="UTC"), "23T17:00", "23T22:00") == [False, True]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"span": "22-6"}, "as HH:MM-HH:MM"),
        ({"span": "24:00-06:00"}, "as HH:MM-HH:MM"),
        ({"span": "22:60-06:00"}, "as HH:MM-HH:MM"),
        ({"span": "22:00-24:01"}, "as HH:MM-HH:MM"),
        ({"span": "22:00-06:00\n"}, "as HH:MM-HH:MM"),
        ({"span": 22}, "as HH:MM-HH:MM"),
        ({"span": "22:00-22:00"}, "do not end when they begin"),
        ({"days": ()}, "days among mon"),
        ({"days": ("monday",)}, "days among mon"),
        ({"time_zone": "Europe/Berlin"}, "'local' .* or 'UTC'"),
    ],
)
def test_hours_that_cannot_be_are_refused(values, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Hours(**values)


def test_hours_can_be_said():
    assert Hours("22:00-06:00").sentence() == "from 22:00 to 06:00, the machine's local time"
    assert Hours("22:00-06:00", ("sat", "sun"), "UTC").sentence() == "from 22:00 to 06:00 of sat, sun, UTC"
