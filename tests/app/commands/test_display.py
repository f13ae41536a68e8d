"""Rounds as people see them: a bar on a terminal, lines elsewhere, no epsilon unless the guarantee is above them."""

import io
import logging
from dataclasses import replace

import pytest
from murmurfl.app.commands.run_command import RunDisplay
from murmurfl.app.runs.progress import RoundLine
from murmurfl.privacy import Forecast, Guarantee
from rich.console import Console

GUARANTEE = Guarantee(1.0, 1e-5, "tree noise on each machine")
FULL = RoundLine(7, 120, 0.873, 0.4375, "4.38", False, 9, 10, 3725.0)


def shown(terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, color_system=None)
    with RunDisplay(GUARANTEE, console) as display:
        assert display.read(str(FULL))
        assert not display.read("INFO :      something else")
        display.message("a message")
    return screen.getvalue()


def test_elsewhere_each_round_is_a_line_below_the_guarantee():
    text = shown(terminal=False)
    assert text.splitlines() == [GUARANTEE.sentence, str(FULL), "a message"]


def test_on_a_terminal_a_bar_moves_below_the_guarantee():
    text = shown(terminal=True)
    assert " ".join(text.split()).startswith(GUARANTEE.sentence)
    assert "7/120" in text
    assert "accuracy 87.3 %  loss 0.4375  epsilon 4.38  replies 9/10  1:02:05 left" in text
    assert str(FULL) not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_guarantee_above_them_rounds_show_no_epsilon_and_are_few(terminal):
    screen = io.StringIO()
    with RunDisplay(console=Console(file=screen, force_terminal=terminal, width=120, color_system=None)) as display:
        for number in range(1, 121):
            display.show(replace(FULL, server_round=number))
    text = screen.getvalue()
    assert "epsilon" not in text
    assert "accuracy" in text
    assert terminal or [line.split()[1] for line in text.splitlines()] == [
        "1/120",
        "30/120",
        "60/120",
        "90/120",
        "120/120",
    ]


@pytest.mark.parametrize("guarantee", [None, GUARANTEE])
def test_forecast_is_left_to_the_summary_where_that_has_the_guarantee(guarantee, capsys):
    useless = Forecast(40.0, 650, 10, 10, rounds=5, mu=1.0, delta=1e-5, unit="machine")
    lines = [f"WARNING :   {line}" for line in useless.banner(64)]
    with RunDisplay(guarantee, Console(file=io.StringIO())) as display:
        for line in [*lines, "WARNING :   the model has diverged"]:
            display.log_line(line, verbose=False)
        logger = logging.getLogger("murmurfl.test-display")
        with display.of_log(logger):
            record = logging.LogRecord("x", logging.WARNING, "", 1, "said", None, None, func="log_forecast")
            assert bool(logger.filter(record)) == (guarantee is not None)
        assert logger.filter(record)
    said = capsys.readouterr().err
    assert ("USELESS" in said) == (guarantee is not None)
    assert said.endswith("WARNING :   the model has diverged\n")


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (f"INFO :      {FULL}", str(FULL)),
        ("INFO :      Round 3 starts", ""),
        ("WARNING :   the model has diverged", ""),
    ],
)
def test_of_flowers_log_only_rounds_go_to_standard_output_and_with_verbose_everything(line, seen):
    for verbose, expected in ((False, seen), (True, line)):
        screen = io.StringIO()
        with RunDisplay(GUARANTEE, Console(file=screen, width=200)) as display:
            display.log_line(line, verbose=verbose)
        assert screen.getvalue().splitlines()[1:] == ([expected] if expected else [])


def test_a_warning_of_flowers_log_goes_to_standard_error(capsys):
    with RunDisplay(GUARANTEE, Console(file=io.StringIO())) as display:
        display.log_line("WARNING :   the model has diverged", verbose=False)
        display.log_line("WARNING :   something flwr 1.32 says to everybody", verbose=False)
    assert capsys.readouterr().err == "WARNING :   the model has diverged\n"
