"""Counts of rounds that a server leaves for a monitor."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.clients import Mu2Client
from murmurfl.strategies import Mu2, RoundReport
from murmurfl.strategies.callbacks.metrics_file import (
    FIGURES_VARIABLE,
    MetricsFile,
    ServerFigures,
    _locked,
    read_figures,
)

from tests.harness.clients import normal_samples, simulated_app
from tests.harness.grid import NodesGrid
from tests.harness.models import Data

SHAPES = [(3,)]
REPORT = RoundReport(3, asked=5, aggregated=2, lost=1, refused={"cap-reached": 1, "error-5": 1}, samples=16)


def train(monkeypatch, folder, rounds=3, lost=0.0):
    monkeypatch.setenv(FIGURES_VARIABLE, str(folder))
    app = simulated_app(Mu2Client, Data(SHAPES), lambda name: normal_samples(name, 30, 3))
    options = {"learning_rate": 0.1, "diameter": 4.0, "seed": 1, "session": "s", "node_deadline_s": 1.0}
    strategy = Mu2(num_clients=4, clients_per_round=4, **options)
    strategy.start(NodesGrid(app, 4, lost=lost), ArrayRecord([np.zeros(3)]), num_rounds=rounds)
    return strategy


def test_every_round_of_a_training_is_noted_as_its_report_has_it(tmp_path, monkeypatch):
    strategy = train(monkeypatch, tmp_path, lost=0.3)
    noted = read_figures(tmp_path)
    assert noted is not None
    reports = strategy.history
    assert (noted.rounds, noted.round, noted.planned) == (3, 3, 3)
    for name in ("asked", "aggregated", "lost", "late", "malformed", "unopened"):
        assert getattr(noted, name) == sum(getattr(report, name) for report in reports)
    assert noted.lost > 0
    assert noted.seconds > 0
    assert (tmp_path / "figures.json").stat().st_mode & 0o137 == 0


def test_figures_outlive_a_run_and_go_on_with_the_next(tmp_path, monkeypatch):
    for rounds in (2, 3):
        train(monkeypatch, tmp_path, rounds)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert (noted.rounds, noted.round, noted.aggregated) == (5, 3, 20)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(FIGURES_VARIABLE, raising=False)
    assert MetricsFile.from_environment(None) is None


def test_a_round_is_noted_with_flowers_number_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path))
    run = 2**63 + 7
    MetricsFile.from_environment(SimpleNamespace(run=SimpleNamespace(run_id=run))).note(REPORT, 7)
    assert read_figures(tmp_path).run == run
    MetricsFile.from_environment(None).note(REPORT, 7)  # a grid that does not say
    assert read_figures(tmp_path).run == 0


def test_a_folder_that_cannot_be_written_to_disturbs_no_training(tmp_path, monkeypatch, caplog):
    strategy = train(monkeypatch, tmp_path / "missing")
    assert len(strategy.history) == 3
    assert len([line for line in caplog.messages if "could not be written" in line]) == 1


def test_reasons_that_are_not_the_protocols_count_as_other(tmp_path):
    MetricsFile(tmp_path).note(REPORT, 7)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert noted.refused == {"cap-reached": 1, "other": 1}
    assert noted.planned == 7


def test_a_closed_round_is_counted(tmp_path):
    MetricsFile(tmp_path).note(RoundReport(1, asked=3, unopened=2, closed="2 of at least 3 releases"), 1)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert (noted.closed, noted.unopened) == (1, 2)
    assert "releases" not in (tmp_path / "figures.json").read_text()


def note_many(folder, count):
    file = MetricsFile(folder)
    for number in range(count):
        file.note(RoundReport(number, asked=1), count)


def test_runs_that_note_their_rounds_at_the_same_time_lose_none(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=note_many, args=(tmp_path, 30)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert (noted.rounds, noted.asked) == (60, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "figures.lock"]


def test_no_run_waits_for_another_that_keeps_the_lock(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("murmurfl.strategies.callbacks.metrics_file._LONGEST_WAIT_S", 0.05)
    with _locked(tmp_path):
        MetricsFile(tmp_path).note(REPORT, 7)
    assert read_figures(tmp_path) is None
    assert any("could not be written" in line for line in caplog.messages)


GOOD = {"rounds": 1, "asked": 4, "refused": {"cap-reached": 1}}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps(GOOD) + " " * 100_000,
        *(json.dumps({**GOOD, **changes}) for changes in ({"rounds": -1}, {"rounds": True}, {"rounds": 1.5})),
        *(json.dumps({**GOOD, **changes}) for changes in ({"asked": "4"}, {"asked": 2**60}, {"seconds": float("nan")})),
        json.dumps({**GOOD, "refused": {"cap-reached": "many"}}),
        *(json.dumps({**GOOD, name: 10**400}) for name in ("asked", "seconds")),
        json.dumps({**GOOD, "refused": {"cap-reached": 10**400}}),
    ],
)
def test_a_file_that_somebody_else_wrote_is_not_believed(tmp_path, content):
    (tmp_path / "figures.json").write_text(content)
    assert read_figures(tmp_path) is None
    MetricsFile(tmp_path).note(REPORT, 7)  # and the next round begins anew
    assert read_figures(tmp_path).rounds == 1


def test_what_somebody_else_wrote_keeps_no_later_run_from_its_figures(tmp_path):
    (tmp_path / "figures.json").write_text(json.dumps({**GOOD, "asked": 10**400}))
    MetricsFile(tmp_path).note(REPORT, 7)
    assert read_figures(tmp_path) is not None


def test_names_that_somebody_else_wrote_are_not_taken_over(tmp_path):
    (tmp_path / "figures.json").write_text(json.dumps({**GOOD, "secret": 7, "refused": {'x"} 1': 3, "cap-reached": 1}}))
    assert read_figures(tmp_path) == ServerFigures(rounds=1, asked=4, refused={"cap-reached": 1})


def test_nobody_waits_for_a_pipe_or_follows_a_link(tmp_path):
    figures = tmp_path / "figures.json"
    os.mkfifo(figures)
    assert read_figures(tmp_path) is None
    figures.unlink()
    (tmp_path / "elsewhere").write_text(json.dumps(GOOD))
    figures.symlink_to(tmp_path / "elsewhere")
    assert read_figures(tmp_path) is None
    figures.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(figures))
        assert read_figures(tmp_path) is None
