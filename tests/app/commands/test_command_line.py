"""What the command says of itself: help and hints, whichever click is installed beside Typer."""

import subprocess
import sys

import pytest
import typer
from murmurfl.app.commands.main import cli
from murmurfl.app.papers import PAPERS
from typer.testing import CliRunner


def said(*arguments):
    result = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "80"})
    return " ".join((result.stdout + result.stderr).replace("│", " ").split())


def imported_by(code, tmp_path):
    """Which heavy packages a program has imported in the end, and how many modules in all."""
    heavy = ("numpy", "scipy", "flwr", "torch", "matplotlib", "sklearn", "pandas", "pydantic", "ray")
    program = f"import sys\n{code}\nprint('HEAVY', *[one for one in {heavy!r} if one in sys.modules], len(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    *found, count = ran.stdout.splitlines()[-1].split()[1:]
    return set(found), int(count)


COMMAND = """
from murmurfl.app.commands.main import main
sys.argv = ["murmurfl", *{words!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_imports_nothing_that_takes_long(words, tmp_path):
    heavy, count = imported_by(COMMAND.format(words=words), tmp_path)
    assert not heavy
    assert count < 500


@pytest.mark.long
def test_run_imports_no_large_package_but_matplotlib_for_its_picture(tmp_path):
    run = "from murmurfl.app import simulate\nresult = simulate(num_rounds=1, mu=50.0)\nrepr(result)"
    run += "\nassert not {'torch', 'matplotlib', 'ray', 'sklearn', 'pandas'} & {*sys.modules}"
    assert "matplotlib" in imported_by(f"{run}\nresult._repr_html_()", tmp_path)[0]
    words = ["run", "--engine", "cohort", "--set", "num-rounds=1"]
    assert imported_by(COMMAND.format(words=words), tmp_path)[0] & {"torch", "ray", "sklearn", "pandas"} == set()


def test_help_of_all_commands_is_that_of_each():
    text = said("--help")
    for name, command in typer.main.get_command(cli).commands.items():
        sentence = " ".join(command.get_short_help_str(400).split())
        assert f"{name} {sentence[:30]}" in text


def test_the_help_of_reproduce_names_every_paper():
    text = said("reproduce", "--help")
    assert "One of reshef-levy-2025" in text
    for name in PAPERS:
        assert name in text, name


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        (("ledger", "show"), "The ledger's file."),
        (("node",), "The operator's node configuration"),
        (("report",), "Folders of finished runs, or a folder of such."),
    ],
)
def test_every_argument_has_its_help(command, argument):
    assert argument in said(*command, "--help")


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["run", "--mu", "2"], "It is a run-config key: --set mu=VALUE."),
        (["run", "--machines", "5"], "It is called --clients."),
        (["plan", "--machines", "5"], "It is called --clients."),
        (["fit", "x.csv", "--sites", "5"], "It is called --clients."),
        (["run", "--lr", "2"], "It is a run-config key: --set learning-rate=VALUE."),
        (["fit", "x.csv", "--lr", "2"], "It is a run-config key: --set learning-rate=VALUE."),
        (["fit", "x.csv", "--eps", "2"], "It is called --epsilon."),
        (["run", "--set", "dropout=0.1"], "`murmurfl keys` lists all of them."),
    ],
)
def test_what_other_programs_call_a_setting_is_named_as_here(words, way_out):
    text = said(*words)
    assert way_out in text
    assert "data-root" not in text


@pytest.mark.parametrize(
    ("mistyped", "meant"), [(("reprduce",), "reproduce"), (("ledger", "sho"), "show"), (("ledger", "crate"), "create")]
)
def test_a_mistyped_command_gets_one_hint(mistyped, meant):
    text = said(*mistyped)
    assert text.count("Did you mean") == 1
    assert text.count(f"'{meant}'") == 1
