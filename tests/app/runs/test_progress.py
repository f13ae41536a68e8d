"""Progress lines: the same on every engine, and read back as what they say."""

import math

import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.progress import RoundLine
from murmurfl.app.settings.run_config import RunConfig

FULL = RoundLine(7, 120, 0.873, 0.4375, "4.38", False, 9, 10, 3725.0)


@pytest.mark.parametrize(
    "line",
    [
        FULL,
        RoundLine(1, 3, None, 2.5, "infinite", False, 0, 0, 0.0),
        RoundLine(12, 17, None, None, "24.4", True, 10, 10, 59.0),
        RoundLine(1, 17, 0.1, 2.5, "24.39", True, 10, 10, None),
        RoundLine(1, 17, 0.1, 2.5, "24.39", False, 10, 10, None, "77.34"),
        RoundLine(1, 17, None, None, "24.39", True, 0, 10, 5.0, "infinite"),
    ],
)
def test_a_line_is_read_back_as_what_it_says(line):
    assert RoundLine.read(str(line)) == line


def test_a_line_says_rounds_accuracy_loss_epsilon_replies_and_time_left():
    assert str(FULL) == (
        "round   7/120  accuracy  87.3 %  loss 0.4375  epsilon 4.38 (whole run)  replies 9/10  left 1:02:05"
    )


@pytest.mark.parametrize("text", ["", "round 1/2", "Round 3: 1 of 2 replies aggregated", f"{FULL} and more"])
def test_other_lines_of_a_log_are_not_taken_for_progress(text):
    assert RoundLine.read(text) is None


def test_a_long_run_without_evaluations_says_a_few_lines_only():
    lines = [RoundLine(t, 1000, None, None, "1", False, 1, 1, 0.0) for t in range(1, 1001)]
    assert sum(line.wanted for line in lines) == 20
    assert lines[-1].wanted
    assert RoundLine(3, 1000, None, 1.0, "1", False, 1, 1, 0.0).wanted


def test_time_left_is_rounded_up():
    assert str(RoundLine(1, 2, None, None, "1", False, 1, 1, math.nextafter(1.0, 2.0))).endswith("left 0:00:02")


def test_time_left_leaves_out_the_first_round_which_waits_for_the_machines(monkeypatch):
    clock = iter([100.0, 130.0, 131.0, 132.0, 133.0, 134.0])  # the start of the run, then the end of every round
    monkeypatch.setattr("murmurfl.app.runs.training_run.time.perf_counter", lambda: next(clock))
    progress = run_cohort(RunConfig(num_rounds=4, evaluate_every=4)).progress
    assert [entry.seconds_left for entry in progress] == [None, 2.0, 1.0, 0.0]
    assert "left" not in str(RoundLine.of(progress[0], "exact"))
