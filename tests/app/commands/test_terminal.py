"""Lines, tables, help and rounds fit their terminal, and a pipe gets whole lines."""

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from murmurfl.app.commands import terminal
from murmurfl.app.commands.main import cli
from murmurfl.app.commands.run_command import RunDisplay
from murmurfl.app.commands.terminal import say_table, system_error, working, wrapped
from murmurfl.app.papers import PAPERS
from murmurfl.app.papers.reproduction import tables_of
from murmurfl.app.planning.noise_plans import compare_mechanisms, noise_guarantee
from murmurfl.app.planning.plan_answers import base_of_numbers
from murmurfl.app.runs.progress import RoundLine
from murmurfl.privacy import Forecast, Guarantee, PrivacyPolicy, Privatizer, SQLiteLedger, rounded_up, row_bytes
from murmurfl.privacy.forecast_text import forecast_banner
from rich.console import Console
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("small_rehearsals")

ROOT = Path(__file__).resolve().parents[3]
PLAN = ["plan", "--clients=10", "--samples=140", "--rounds=17", "--batch=8", "--epsilon=2"]
QUICK = ["--engine", "cohort", "--set", "num-rounds=2", "--set", "noise-quality=fast"]
COMMANDS = ["", "run", "reproduce", "plan", "audit", "report", "node", "deploy-demo", "ledger", "ledger create"]
COMMANDS += ["ledger show", "ledger accept-rollback", "ledger new-mark", "keys", "list"]


def shown(*arguments, columns="80"):
    result = CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": columns} if columns else {})
    assert result.exit_code == 0, result.output
    return result.stdout


def fits(text, columns=80):
    # A path stays whole, however long the folder of these tests is.
    lines = [line for line in text.splitlines() if max(map(len, line.split()), default=0) <= columns - 16]
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    return " ".join(text.split())


class Terminal(io.StringIO):
    """Standard error that is a terminal, or says so, and knows when something was written."""

    def __init__(self, *, terminal):
        super().__init__()
        self.terminal, self.shown = terminal, threading.Event()

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.shown.set()
        return super().write(text)


def test_a_command_that_takes_long_says_so_on_a_terminal_and_takes_it_back(monkeypatch):
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.001)
    screen = Terminal(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with working("planning"):
        assert screen.shown.wait(60)
    assert screen.getvalue().startswith("\rplanning 0:0")
    assert screen.getvalue().endswith("\r\x1b[K")


def test_the_line_is_seen_while_standard_error_is_closed_for_everything_else(monkeypatch):
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.001)
    seen, screen = os.openpty()
    with os.fdopen(screen, "w") as stream, Path(os.devnull).open("w") as nowhere, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        with working("training") as at:
            at(", round 1 of 2")
            os.dup2(nowhere.fileno(), screen)  # as a real fit does
            patched.setattr(sys, "stderr", nowhere)
            assert os.read(seen, 99).startswith(b"\rtraining 0:00, round 1 of 2")
    os.close(seen)


def test_a_command_that_is_quick_or_has_no_terminal_says_nothing(monkeypatch):
    quick = Terminal(terminal=True)
    monkeypatch.setattr(sys, "stderr", quick)
    with pytest.raises(ZeroDivisionError), working("planning"):
        raise ZeroDivisionError
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.001)
    file = Terminal(terminal=False)
    monkeypatch.setattr(sys, "stderr", file)
    with working("planning"):
        assert not file.shown.wait(0.05)
    assert (quick.getvalue(), file.getvalue()) == ("", "")


def test_a_full_disk_is_said_with_its_file_and_what_to_do():
    full = OSError(errno.ENOSPC, "No space left on device", "/srv/x")
    assert system_error(full).startswith("No space left on device: /srv/x. Make room on the disk")
    assert system_error(FileNotFoundError(errno.ENOENT, "No such file", "/srv/x")) == "No such file: /srv/x"


@pytest.mark.few_cases(6)
def test_help_groups_every_command_by_task_and_ends_with_the_documentation():
    help_text = shown("--help")
    tasks = re.findall(r"^╭─ ([\w ]+) ─", help_text, re.MULTILINE)
    assert tasks == ["Options", "Tables", "Runs", "Real clients"]
    assert set(re.findall(r"^│ ([a-z][a-z-]+) ", help_text, re.MULTILINE)) == set(typer.main.get_command(cli).commands)
    assert help_text.strip().splitlines()[-1].strip().startswith("Documentation: https://")


def test_help_of_fit_imports_neither_flower_nor_settings():
    code = "import sys; from murmurfl.app.commands.main import cli; cli(['fit', '--help'], standalone_mode=False);"
    code += "print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = set(told.stdout.splitlines()[-1].split())
    assert "murmurfl.app.commands.fit_command" in loaded
    assert not loaded & {"flwr", "numpy", "scipy", "pydantic", "murmurfl.app.settings.run_config"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits(command):
    fits(shown(*command.split(), "--help"))


def test_a_plan_fits_and_names_every_mechanism_whole():
    text = fits(shown(*PLAN))
    asked = {"num-clients": 10, "num-rounds": 17, "batch-size": 8, "epsilon": 2.0}
    plan = compare_mechanisms(base_of_numbers(140, 1000, asked))
    for made in plan.mechanisms:
        for word in made.mark.split():
            assert word in text
        assert f"{made.server_mu2_rmse:.4g}" in text
        assert f" {made.memory_bytes} " in text
    assert noise_guarantee(plan).sentence in text


def test_a_run_its_report_and_an_audit_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = fits(shown("run", *QUICK, "--out", "runs", "--name", "x").replace(str(tmp_path.resolve()), ""))
    assert "Fast simulation noise: a figure for research, no guarantee" in text
    assert "files runs/x" in text
    fits(shown("report", "runs/x"))
    assert "The claim stands" in fits(shown("audit", "--set", "num-rounds=2", "--runs", "20"))


SHOWN = ("best-accuracy", "secure-aggregation", "reshef-levy-2024")
"""Three kinds of table; `make test-long` shows the others."""
RESULTS = ROOT / "docs" / "results"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in SHOWN))
        for name in PAPERS
        if (RESULTS / f"{name}.json").exists()
    ],
)
def test_every_reproduction_fits_with_all_its_algorithms(name, monkeypatch):
    document = {"guarantee": "words", **json.loads((RESULTS / f"{name}.json").read_text())}
    monkeypatch.setattr("murmurfl.app.papers.reproduction.run_cells", lambda *_, **__: document)
    monkeypatch.setattr("murmurfl.app.papers.reproduction.write_reproduction", lambda *_: None)
    text = fits(shown("reproduce", name))
    whole = max((table.document()["rows"] for table in tables_of(document, name, PAPERS[name].table)), key=len)
    federated = [row for row in whole if "alone" not in row["algorithm"]]
    assert len(federated) == sum(len(cell["algorithms"]) for cell in document["cells"])
    for row in whole:
        for word in f"{row['algorithm']} {rounded_up(row['epsilon'])}".split() if row["epsilon"] is not None else ():
            assert word in text, word


def test_a_ledger_fits_and_names_its_sessions_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SQLiteLedger.create("l", budget_mu=2.0, delta=1e-5, data="ward 3")
    ledger = SQLiteLedger("l")
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=2, mu=1.0, budget_mu=2.0)
    name = "".join(f"{i:02}" for i in range(16))
    Privatizer(policy, 3, 9, ledger, ledger.keys(), data=row_bytes(range(9))).release(
        name, 0, lambda samples: [[0.0] * 3]
    )
    text = fits(shown("ledger", "show", "l"))
    assert name in text.replace("│ ", "").replace(" ", "") or (name[:24] in text and name[24:] in text)
    assert "cancelling, std 2" in text


def test_an_error_fits():
    result = CliRunner().invoke(
        cli,
        ["run", "--set", "strategy=mu2", "--set", "partition=iid", "--set", "num-rounds=1000"],
        env={"COLUMNS": "80"},
    )
    assert result.exit_code == 1
    assert "Expected num-rounds <= 3, got 1000: client 0 can make" in fits(result.stderr)


def test_in_a_pipe_every_line_and_every_row_is_whole():
    lines = shown(*PLAN, columns=None).splitlines()
    assert any(line.startswith("Guarantee: mu") and line.endswith("them.") for line in lines)
    row = next(line for line in lines if "sqrt_toeplitz" in line)
    assert len(row.split("│")) == 10


def test_what_is_cut_is_all_there(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [{"of": f"row {i}", **{f"column {j}": f"{i}.{j}" for j in range(9)}, "empty": ""} for i in range(3)]
    say_table("T", rows, ("of",))
    text = fits(capsys.readouterr().out, 40)
    for i in range(3):
        assert text.count(f"row {i}") > 1
        assert all(f" {i}.{j} " in text for j in range(9))
    assert "empty" not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("short", "short"),
        ("  files   a/path", "  files   a/path"),
        ("  name  one two three four", "  name  one two\n        three four"),
        ("  said one two three four five", "  said one two three\n  four five"),
        ("see /a/very/long/path/that/stays/whole", "see\n/a/very/long/path/that/stays/whole"),
        ("  files     /a/very/long/path", "  files\n    /a/very/long/path"),
        ("then `murmurfl fit FILE --real` it", "then\n`murmurfl fit FILE --real`\nit"),
    ],
)
def test_lines_are_wrapped_below_what_they_say_and_paths_stay_whole(line, expected):
    assert wrapped(line, 20) == expected
    assert wrapped(line, None) == line


LINE = RoundLine(97, 99, 0.873, 0.4375, "24.39", False, 10, 10, 3601.0)


def test_a_rounds_line_fits():
    assert len(str(LINE)) > 80
    assert len(LINE.within(80)) <= 80
    assert LINE.within(None) == str(LINE)
    fits(wrapped(replace(LINE, fast=True, server_round=10**6, num_rounds=10**6).within(80), 80))


@pytest.mark.parametrize("fast", [False, True])
def test_the_bar_of_a_terminal_cuts_nothing_off(fast):
    screen = io.StringIO()
    with RunDisplay(
        Guarantee(1.0, 1e-5, "tree noise"), Console(file=screen, force_terminal=True, width=80, color_system=None)
    ) as display:
        display.show(replace(LINE, fast=fast))
    text = " ".join(screen.getvalue().split())
    assert "…" not in text
    for part in ("accuracy 87.3 %", "loss 0.4375", "epsilon 24.39", "1:00:01 left"):
        assert part in text, text


@pytest.mark.more_cases
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_real_terminal_of_80_columns():
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "dumb", "NO_COLOR": "1"}
    program = "from murmurfl.app.planning import rehearsal; rehearsal.rehearse = lambda *_, **__: []; "
    program += "from murmurfl.app.commands.main import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, *PLAN], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    said = b""
    try:
        while chunk := os.read(master, 65536):
            said += chunk
    except OSError:  # how a terminal ends on Linux
        pass
    assert process.wait(60) == 0
    os.close(master)
    assert "sqrt_toeplitz" in fits(said.decode().replace("\r\n", "\n"))


GUARANTEE = Guarantee(1.0, 1e-5, "tree noise on each client")
FULL = RoundLine(7, 120, 0.873, 0.4375, "4.38", False, 9, 10, 3725.0)


def displayed(terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, color_system=None)
    with RunDisplay(GUARANTEE, console) as display:
        assert display.read(str(FULL))
        assert not display.read("INFO :      something else")
        display.message("a message")
    return screen.getvalue()


def test_elsewhere_each_round_is_a_line_below_the_guarantee():
    text = displayed(terminal=False)
    assert text.splitlines() == [GUARANTEE.sentence, str(FULL), "a message"]


def test_on_a_terminal_a_bar_moves_below_the_guarantee():
    text = displayed(terminal=True)
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
    useless = Forecast(40.0, 650, 10, 10, rounds=5, mu=1.0, delta=1e-5, unit="client")
    lines = [f"WARNING :   {line}" for line in forecast_banner(useless, 64)]
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
