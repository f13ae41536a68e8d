"""Settings on the command line: assignments, files, completions, `murmurfl keys` and `names`."""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import jsonschema
import pytest
from murmurfl.app.commands.main import cli, in_any_shell
from murmurfl.app.commands.run_options import complete_assignment
from murmurfl.app.fleet.deployment import demo_config
from murmurfl.app.papers import PAPERS
from murmurfl.app.settings.catalogue import CATALOGUE, config_schema
from murmurfl.app.settings.layers import DEFAULT_RUN, FROM_DEFAULT_RUN, layered, read_settings
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import ConfigurationError, gdp_mu
from murmurfl.privacy.setting import Setting, flat
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("small_rehearsals")

QUICK = ["run", "--engine", "cohort", "--no-twin", "--name", "x"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def document(*arguments):
    result = CliRunner().invoke(cli, [*QUICK, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(Path("runs/x/result.json").read_text())


def refused(*arguments):
    result = CliRunner().invoke(cli, [*QUICK, *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("murmurfl: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_file_sets_keys_and_the_command_line_wins(tmp_path):
    path = written(tmp_path, "num-rounds = 2\nseed = 4\nclip-norm = 3\nepsilon = 2.0\ngradient-norm = false\n")
    config = document("--config", path, "--set", "seed=5", "--set", "num-rounds=3")["config"]
    assert (config["seed"], config["num-rounds"], config["clip-norm"]) == (5, 3, 3.0)
    assert config["mu"] == gdp_mu(2.0, 1e-5)


def test_a_plot_is_drawn_for_whoever_asks_for_it(tmp_path):
    for name, options, drawn in (("plain", (), False), ("drawn", ("--plot",), True)):
        command = ["run", "--no-twin", "--set", "num-rounds=2", "--out", str(tmp_path), "--name", name, *options]
        assert CliRunner().invoke(cli, command).exit_code == 0
        assert (tmp_path / name / "accuracy.png").exists() == drawn
    assert (tmp_path / "drawn" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "assignment", "mu"),
    [
        ("epsilon = 2.0", "mu=3", 3.0),
        ("mu = 3.0", "epsilon=2", gdp_mu(2.0, 1e-5)),
        ("mu = 3.0\nepsilon = 0", "delta=1e-4", 3.0),
        ("epsilon = 2.0", "delta=1e-4", gdp_mu(2.0, 1e-4)),
        ("mu = 3.0", "epsilon=0", 3.0),
    ],
)
def test_of_mu_and_epsilon_the_later_one_counts(tmp_path, text, assignment, mu):
    name, _, value = assignment.partition("=")
    settings = layered(read_settings(written(tmp_path, text)), {name: float(value)})
    assert RunConfig.from_mapping(settings).mu == mu
    assert demo_config(settings, tmp_path, "x").mu == mu


def test_both_in_one_place_are_refused(tmp_path):
    assert "Expected mu or epsilon, got both: mu = 2, epsilon = 3." in refused("--set", "mu=2", "--set", "epsilon=3")
    path = written(tmp_path, "mu = 2.0\nepsilon = 3.0\n")
    assert f"In {path}: Expected mu or epsilon, got both" in refused("--config", path)
    with raises(ConfigurationError, "conflict", "mu"):
        layered({"mu": 4.0, "epsilon": 3.0})


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-client = 3", "got 'num-client'; did you mean 'num-clients'?"),
        ("num-clients = [1, 2]", "Expected num-clients to be an integer, got [1, 2]."),
        ("num-clients = 2.5", "Expected num-clients to be an integer, got 2.5."),
        ("num-clients = 0", "Expected num-clients to be an integer >= 1, got 0."),
        ("mu = true", "Expected mu to be a finite number, got True."),
        ('preset = "papr"', "did you mean 'paper'?"),
        ("seed = 2024-01-01", "Expected seed to be an integer"),
        ("[tool.flwr.app.config]\nmu = 2.0", "got 'tool.flwr.app.config.mu'; it is called 'mu'."),
        ("mu = = 3", "Invalid value (at line 1, column 6)"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, text, words):
    path = written(tmp_path, text)
    said = refused("--config", path)
    assert str(path) in said
    assert words in said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "at nowhere.toml: No such file or directory." in refused("--config", "nowhere.toml")
    assert f"at {tmp_path}: Is a directory." in refused("--config", tmp_path)
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    assert f"at {path}, got: 'utf-8' codec" in refused("--config", path)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("strategi=mu2", "got 'strategi'; did you mean 'strategy'?"),
        ("strategy=mu22", "Expected strategy to be a known name, got 'mu22'; did you mean 'mu2'?"),
        ("task=minst", "did you mean 'mnist'?"),
        ("mechanism=bltt", "did you mean 'blt'?"),
        ("mu", "Expected key=value, got 'mu'."),
        ("num-clients=ten", "Expected num-clients to be an integer, got 'ten'."),
        ("task=nowhere_at_all:thing", "No module named 'nowhere_at_all'"),
    ],
)
def test_a_mistyped_setting_is_named_with_what_was_meant(assignment, words):
    assert words in refused("--set", assignment)


def test_a_file_of_all_defaults_has_them(tmp_path):
    printed = CliRunner().invoke(cli, ["keys", "--toml"]).stdout
    assert RunConfig.from_mapping(read_settings(written(tmp_path, printed))) == RunConfig()


def test_an_epsilon_stands_for_the_mu_of_a_papers_cell():
    paper = PAPERS["reshef-levy-2025"]
    (cell,) = paper.cells_with({"mu": gdp_mu(2.0, 1e-5), "num-clients": 50})
    (same,) = paper.cells_with({"epsilon": 2.0, "num-clients": 50})
    assert same == cell
    (other,) = paper.cells_with({"epsilon": 2.0, "delta": 1e-4, "num-clients": 50})
    assert other.settings["mu"] == gdp_mu(2.0, 1e-4)


MINE = """
import numpy as np

def make_task():
    features = np.eye(4)[np.arange(120) % 4]
    return features, np.arange(120) % 4, features[:40], np.arange(40) % 4
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the current folder, which nothing has on its search path; gone from the process afterwards."""
    (tmp_path / "mine_of_settings.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield "task=mine_of_settings:make_task"
    sys.modules.pop("mine_of_settings", None)


def test_things_of_ones_own_are_found_in_the_current_folder(mine):
    settings = ["--set", mine, "--set", "num-clients=3", "--set", "clients-per-round=3"]
    assert document(*settings)["config"]["task"] == "mine_of_settings:make_task"
    for command in (["plan"], ["audit", "--runs", "20"]):
        result = CliRunner().invoke(cli, [*command, *settings])
        assert result.exit_code == 0, result.output


def test_without_things_of_ones_own_the_search_path_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = sys.path.copy()
    document("--set", "num-rounds=1")
    assert sys.path == before


def test_every_key_that_may_name_ones_own_is_looked_at():
    from murmurfl.app.settings.layers import names_own
    from murmurfl.app.settings.run_config import run_keys

    own = {one.name for one in run_keys().values() if one.names or one.own}
    assert own == {"strategy", "task", "features", "model", "partition", "mechanism"}
    assert all(names_own({name: "package.module:Thing"}) for name in own)
    assert not names_own({"out-dir": "C:/", "track": "a:b", "task": "digits"})
    assert isinstance(run_keys()["task"], Setting)


ROOT = Path(__file__).resolve().parents[3]


def said(*arguments):
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_key_has_a_line_with_its_default_and_its_sentence():
    lines = said("keys").splitlines()
    assert len(lines) == len(run_keys())
    for line, one in zip(lines, run_keys().values(), strict=True):
        assert line.split()[0] == one.name
        assert one.sentence in line
        assert "default" in line


def test_one_key_says_all_of_itself():
    text = said("keys", "strategy.alpha")
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
    table = flat(project["tool"]["flwr"]["app"]["config"], run_keys())
    keys = flat(tomllib.loads(said("keys", "--toml")), run_keys())
    named = {name for name, value in table.items() if value == FROM_DEFAULT_RUN}
    assert named == {*DEFAULT_RUN}
    assert {name: value for name, value in table.items() if name not in named} == {
        name: value for name, value in keys.items() if name not in named
    }
    assert table.keys() == keys.keys()


def test_as_json_it_is_a_schema_that_says_what_the_configuration_checks():
    schema = json.loads(said("keys", "--json"))
    assert schema == config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(RunConfig(mechanism="blt", num_rounds=5).to_mapping(), schema)
    jsonschema.validate({"task": "package.module:make_task"}, schema)
    for table in ({"kind": "banded", "bands": 8}, {"kind": "package.module:Own", "bands": 8}, {"kind": ""}):
        jsonschema.validate({"mechanism": table}, schema)
    tree = {"mechanism": {"kind": "tree", "bands": 8}}
    for wrong in (
        {"mu": -1},
        {"mu": "4"},
        {"task": "minst"},
        {"num-clients": 1.5},
        {"nothing": 1},
        {"preset": ""},
        tree,
    ):
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


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("num-c", ["num-clients="]),
        ("task=mnist", ["task=mnist", "task=mnist-parity", "task=mnist-69"]),
        ("mechanism=b", ["mechanism=bisr", "mechanism=banded", "mechanism=blt"]),
        ("download=", ["download=true", "download=false"]),
        ("mechanism.schedule=h", ["mechanism.schedule=harmonic"]),
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
        (["murmurfl", "run", "--set", "num-c"], ["num-clients="]),
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
