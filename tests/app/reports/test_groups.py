"""Runs that differ in their seed alone are one line with its error; what is not the same stays apart."""

import json
import re
from dataclasses import replace
from statistics import mean, stdev

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.groups import Group, grouped
from murmurfl.app.reports.making import make_report
from murmurfl.app.reports.plots import compared_plots, measure_plot
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.result import write_record
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy.setting import by_key
from typer.testing import CliRunner

FIRST = RunConfig(num_rounds=2, mu=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one configuration, and one of another."""
    out = tmp_path_factory.mktemp("runs")
    for name, config in {
        "a-seed1-20260101-120000": FIRST,
        "a-seed2-20260101-120001": replace(FIRST, seed=2),
        "b": replace(FIRST, mu=4.0),
    }.items():
        write_record(run_cohort(config), out / name)
    return [RecordedRun.read(folder) for folder in sorted(out.iterdir())]


def with_fields(run, **fields):
    """The same run with another outcome."""
    return replace(run, outcome=Outcome.model_validate({**run.outcome.document(), **fields}))


def other(run, name="other", **config):
    """The same run with another configuration."""
    changed = by_key(config, run_keys())
    return replace(with_fields(run, config={**run.outcome.config, **changed}), name=name)


def with_twin(run, accuracy):
    twin = {"accuracy": accuracy, "auc": None, "loss": 0.1, "rounds": 2, "seconds": 0.0, "note": ""}
    return with_fields(run, without_noise=twin)


def test_seeds_are_together_and_settings_apart(runs):
    groups = grouped(runs)
    assert [(group.name, group.seeds) for group in groups] == [("a", [1, 2]), ("b", [1])]
    values = [run.outcome.accuracy for run in runs[:2]]
    assert groups[0].spread("accuracy") == (pytest.approx(mean(values)), pytest.approx(stdev(values)))
    assert groups[1].spread("accuracy") == (runs[2].outcome.accuracy, None)
    rounds, means, deviations = groups[0].curve("loss")
    curves = [run.curve("loss")[1] for run in runs[:2]]
    assert rounds == [1, 2]
    assert means == pytest.approx([mean(pair) for pair in zip(*curves, strict=True)])
    assert deviations == pytest.approx([stdev(pair) for pair in zip(*curves, strict=True)])


def test_the_same_seed_twice_is_no_error_bar(runs):
    again = other(runs[0], name="a-seed1-again")
    assert [group.seeds for group in grouped([*runs, again])] == [[1, 2], [1], [1]]


def test_runs_with_another_guarantee_are_another_group(runs):
    weaker = with_fields(runs[1], guarantee="another")
    assert len(grouped([runs[0], weaker])) == 2


def test_groups_of_one_name_are_told_apart_by_what_differs(runs):
    many = [other(runs[0], name="a"), other(runs[0], name="a", mu=3.0), other(runs[0], name="a", mu=3.0)]
    assert [group.name for group in grouped(many)] == ["a (mu = 1)", "a (mu = 3)", "a (mu = 3), 2"]


@pytest.mark.long
def test_the_page_shows_mean_and_deviation_and_the_twin(runs, tmp_path):
    folders = []
    for run, accuracy in zip(runs, (0.95, 0.97, 0.98), strict=True):
        folder = tmp_path / run.name
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(with_twin(run, accuracy).outcome.document()))
        folders.append(folder)
    text = make_report(folders, tmp_path / "out").read_text()
    values = [100 * run.outcome.accuracy for run in runs[:2]]
    assert f">{mean(values):.1f} ± {stdev(values):.1f} %</td>" in text
    assert ">96.0 ± 1.4 %</td>" in text
    assert ">98.0 %</td>" in text
    assert text.count("The best guess whether") == 2, "two guarantees in three runs"
    assert "Bands: one standard deviation over seeds." in text
    assert '<th scope="row">seed</th><td data-of="a">1, 2</td><td data-of="b">1</td>' in re.sub(r"\s*\n\s*", "", text)


def test_a_line_without_noise_is_in_every_picture_of_accuracy_and_loss(runs):
    alone = measure_plot([Group("x", [with_twin(runs[0], 0.95)])], "accuracy")
    (line,) = [line for line in alone.figure.axes[0].lines if line.get_linestyle() == ":"]
    assert list(line.get_ydata()) == [95.0, 95.0]
    assert "not private" in alone.caption
    groups = grouped([with_twin(run, 0.95) for run in runs])
    for plot in compared_plots(groups):
        assert [line.get_linestyle() for line in plot.figure.axes[0].lines].count(":") == 1, plot.name
    for plot in compared_plots(grouped(runs)):
        assert ":" not in [line.get_linestyle() for line in plot.figure.axes[0].lines]
        assert "Dotted" not in plot.caption


@pytest.mark.long
def test_a_report_makes_twins_where_it_is_asked_to(tmp_path):
    write_record(run_cohort(FIRST), tmp_path / "runs" / "x")
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "runs"), "--twins"])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "runs" / "x" / "result.json").read_text())["without_noise"]["accuracy"] > 0.5
    assert "without noise, not private" in (tmp_path / "runs" / "report" / "index.html").read_text()
