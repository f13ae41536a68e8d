"""`murmurfl list`: every run with what it came to, in the width there is, and no epsilon without its terms."""

import json
import os
import re
import shutil

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports.finding import expanded, find_runs
from murmurfl.app.runs.result import write_record
from murmurfl.app.settings.run_config import RunConfig
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three finished runs, one of them below another folder, a failed one and one that has not ended."""
    runs = tmp_path_factory.mktemp("world") / "runs"
    configs = {
        "plain": RunConfig(num_rounds=1),
        "study/sums": RunConfig(num_rounds=1, trust="secure-aggregation"),
        "study/fast": RunConfig(num_rounds=1, noise_quality="fast"),
    }
    for number, (name, config) in enumerate(configs.items(), 1):
        document = write_record(run_cohort(config), runs / name)
        document["date"] = f"2026-01-0{number}T12:00:00+00:00"
        (runs / name / "result.json").write_text(json.dumps(document))
    (runs / "failed").mkdir()
    (runs / "failed" / "failure.json").write_text('{"reason": "no nodes"}')
    (runs / "stopped").mkdir()
    (runs / "stopped" / "checkpoint.npz").touch()
    os.utime(runs / "failed", (0, 1.8e9))
    os.utime(runs / "stopped", (0, 1.9e9))
    return runs


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made.parent)
    return made


def listed(*arguments, columns="80"):
    result = CliRunner(env={"COLUMNS": columns}).invoke(cli, ["list", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_runs_are_found_below_a_folder_the_newest_last(here):
    found = find_runs([here])
    assert [str(one.folder.relative_to(here)) for one in found] == [
        "plain",
        "study/sums",
        "study/fast",
        "failed",
        "stopped",
    ]
    assert [one.outcome is not None for one in found] == [True, True, True, False, False]
    assert find_runs([here, here / "plain"]) == found
    assert [one.folder for one in find_runs([here / "plain"])] == [here / "plain"]


def test_each_has_its_date_strategy_epsilon_accuracy_and_folder(here):
    lines = listed().splitlines()
    document = json.loads((here / "plain" / "result.json").read_text())
    assert lines[0].split() == ["#", "date", "time", "strategy", "task", "epsilon", "accuracy", "folder"]
    for word in ("1 ", "2026-01-01", "mu2", "24.39", f"{100 * document['accuracy']:.1f} %", "runs/plain"):
        assert word in lines[1], word
    assert "24.39*" in lines[3]
    assert "its run failed (no nodes)  runs/failed" in lines[4]
    assert "has not ended" in lines[5]
    assert any(line.startswith("* Fast simulation noise") for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(here, columns):
    assert max(map(len, listed(columns=str(columns)).splitlines())) <= columns


def test_list_shows_runs_and_what_their_epsilons_mean_once(here, check_output):
    check_output(re.sub(r"\d+\.\d %", "00.0 %", listed(columns="120")))


def test_only_the_newest_are_shown_unless_all_are_wanted(here, tmp_path):
    for number in range(25):
        shutil.copytree(here / "failed", tmp_path / f"{number:02}")
    assert "5 older runs are left out" in listed(tmp_path)
    assert listed(tmp_path).count("no nodes") == 20
    assert listed(tmp_path, "--all").count("no nodes") == 25
    assert len(json.loads(listed(tmp_path, "--json"))) == 25


def test_as_json_it_is_a_list_and_nothing_else(here):
    made = json.loads(listed("--json"))
    assert [one["finished"] for one in made] == [True, True, True, False, False]
    assert made[1]["trust"] == "secure-aggregation"
    assert made[1]["epsilon_local"] > made[1]["epsilon"]
    assert made[3]["problem"] == "its run failed (no nodes)"


def test_without_any_it_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "No runs in runs. `murmurfl run` makes one" in " ".join(listed().split())
    assert json.loads(listed("--json")) == []
    result = CliRunner().invoke(cli, ["list", "nowhere"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "there is no such folder" in result.stderr


def test_a_damaged_result_is_listed_with_what_is_wrong(here, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "result.json").write_text("{")
    assert "Expected JSON" in listed(tmp_path)


def test_a_report_takes_a_folder_of_runs_for_the_runs_in_it(here, tmp_path):
    assert expanded([here / "study"]) == [here / "study" / "sums", here / "study" / "fast"]
    assert expanded([here / "plain", tmp_path]) == [here / "plain", tmp_path]


def test_a_run_without_test_data_shows_noised_counts(here, tmp_path):
    document = json.loads((here / "plain" / "result.json").read_text())
    document |= {"accuracy": None, "private_evaluation": {"accuracy": 0.75}}
    document["config"] = {"strategy": "murmurfl.strategies:Mu2", "task": "own:tumours"}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "result.json").write_text(json.dumps(document))
    text = listed(tmp_path)
    assert "75.0 %~" in text
    assert " Mu2 " in text
    assert "~ A private evaluation" in text
