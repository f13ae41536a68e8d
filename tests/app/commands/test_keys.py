"""`murmurfl keys`, `murmurfl names` and the Tab key: what they say is what is declared."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import partial
from pathlib import Path

import jsonschema
import pytest
from murmurfl.app.commands.main import cli, in_any_shell
from murmurfl.app.commands.run_options import complete_assignment
from murmurfl.app.settings.catalogue import CATALOGUE, config_schema
from murmurfl.app.settings.run_config import RunConfig, run_keys
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]


def said(*arguments):
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_key_has_a_line_with_its_default_and_its_sentence():
    lines = said("keys").splitlines()
    assert len(lines) == len(run_keys()) == len(fields(RunConfig))
    for line, one in zip(lines, run_keys().values(), strict=True):
        assert line.split()[0] == one.name
        assert one.sentence in line
        assert "default" in line


def test_one_key_says_all_of_itself():
    text = said("keys", "alpha")
    assert "Weight of a new gradient in a momentum." in text
    for words in ("default  0.1", "may be   a number > 0 and <= 1", "read by  tree-momentum, reduced-tree-momentum"):
        assert words in text
    assert "read by  every run" in said("keys", "mu")
    assert "mnist" in said("keys", "task")
    assert "60,000 handwritten digits" in said("keys", "task")


def test_a_mistyped_key_is_refused_with_the_nearest():
    result = CliRunner().invoke(cli, ["keys", "num-cleints"])
    assert result.exit_code == 1
    assert "did you mean 'num-clients'?" in result.stderr


def test_as_toml_it_is_the_table_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tomllib.loads(said("keys", "--toml")) == project["tool"]["flwr"]["app"]["config"]


def test_as_json_it_is_a_schema_that_says_what_the_configuration_checks():
    schema = json.loads(said("keys", "--json"))
    assert schema == config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(RunConfig(mechanism="blt", num_rounds=5).to_mapping(), schema)
    jsonschema.validate({"task": "package.module:make_task"}, schema)
    for wrong in ({"mu": 0}, {"mu": "4"}, {"task": "minst"}, {"num-clients": 1.5}, {"nothing": 1}, {"preset": ""}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert json.loads(said("keys", "mu", "--json")) == schema["properties"]["mu"]


def test_the_list_has_every_name_with_a_sentence():
    text, document = said("names"), json.loads(said("names", "--json"))
    assert set(document) == {"strategy", "task", "features", "partition", "model", "mechanism", "paper"}
    for key, shelf in CATALOGUE.items():
        assert list(document[key]) == list(shelf.names())
        for name, sentence in document[key].items():
            assert len(sentence.split()) > 2, f"{key} {name}"
            assert "ALGORITHMS" not in sentence
            assert f"{name} " in text
            assert sentence.rstrip(".") in text


def test_reproduce_lists_its_papers_and_wants_one():
    text = said("reproduce", "--list")
    assert all(name in text for name in CATALOGUE["paper"].names())
    refused = CliRunner().invoke(cli, ["reproduce"])
    assert refused.exit_code == 2
    assert "reproduce --list" in refused.output


def test_the_list_has_what_the_keys_may_be():
    for key in ("strategy", "task", "features", "partition", "model", "mechanism"):
        assert set(CATALOGUE[key].names()) == set(run_keys()[key].known) - {""}


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("strat", ["strategy="]),
        ("num-c", ["num-clients="]),
        ("task=mnist", ["task=mnist", "task=mnist-parity", "task=mnist-69"]),
        ("mechanism=b", ["mechanism=bisr", "mechanism=banded", "mechanism=blt"]),
        ("download=", ["download=true", "download=false"]),
        ("schedule=h", ["schedule=harmonic"]),
        ("mu=", []),
        ("nothing=", []),
    ],
)
def test_an_assignment_is_completed(typed, completions):
    found = list(complete_assignment(typed))
    assert [text for text, _ in found] == completions
    assert all(len(sentence) <= 60 for _, sentence in found)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["murmurfl", "run", "--set", "strat"], ["strategy="]),
        (
            ["murmurfl", "run", "--set", "strategy", "=", "tr"],
            ["trusted-mu2", "trusted-full-batch", "tree-momentum", "trusted-sgd"],
        ),
        (["murmurfl", "audit", "--set", "download", "="], ["true", "false"]),
        (["murmurfl", "keys", "num-r"], ["num-rounds"]),
        (["murmurfl", "reproduce", "zhang"], ["zhang-2025-logistic", "zhang-2025-cnn"]),
        (["murmurfl", "lis"], ["list"]),
    ],
)
def test_bash_which_splits_words_at_an_equals_sign_gets_what_follows_it(words, expected, monkeypatch, capsys):
    asked = {
        "_MURMURFL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        in_any_shell(partial(cli, prog_name="murmurfl"))
    assert capsys.readouterr().out.split() == expected


def test_the_command_itself_answers_a_shell():
    asked = {"_MURMURFL_COMPLETE": "complete_bash", "COMP_WORDS": "murmurfl\nlis", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['murmurfl']; from murmurfl.app.commands.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert output.stdout.split() == ["list"], output.stderr


def test_the_version_is_said():
    from murmurfl import __version__

    assert said("--version") == f"murmurfl {__version__}\n"


def test_help_leads_to_the_keys():
    text = " ".join(said("run", "--help").replace("│", " ").split())
    assert "`murmurfl keys`" in text
    assert "--config" in text
