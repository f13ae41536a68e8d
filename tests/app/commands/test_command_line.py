"""What the command says of itself: help and hints, whichever click is installed beside Typer."""

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.papers import PAPERS
from typer.testing import CliRunner


def said(*arguments):
    result = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "80"})
    return " ".join((result.stdout + result.stderr).replace("│", " ").split())


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
    ("mistyped", "meant"), [(("reprduce",), "reproduce"), (("ledger", "sho"), "show"), (("ledger", "crate"), "create")]
)
def test_a_mistyped_command_gets_one_hint(mistyped, meant):
    text = said(*mistyped)
    assert text.count("Did you mean") == 1
    assert text.count(f"'{meant}'") == 1
