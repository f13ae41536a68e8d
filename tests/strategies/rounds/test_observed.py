"""What a server says of a training before it begins, and the figures that it leaves for a monitor."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import CorrelatedNoiseMod, Mu2Client, UpdatePolicy
from murmurfl.strategies import CorrelatedFedAvg, Mu2, RoundReport, SecureAggregation
from murmurfl.strategies.rounds.observed import FIGURES_VARIABLE, FigureFile, ServerFigures, _locked, read_figures

from tests.harness.grid import NodesGrid
from tests.harness.machines import normal_samples, simulated_app
from tests.harness.models import Data

D, MACHINES, ROUNDS, CLIP = 3000, 5, 4, 0.5
TOLERANCE = 0.1
"""The length of 3,000 normals deviates by 1.3 % of itself, so by 10 % with a probability below 1e-13."""


def standing_still(**options):
    """A training that learns nothing: what becomes of the model is noise alone."""
    app = ClientApp(mods=[CorrelatedNoiseMod(**options)])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"n": 1})}), reply_to=message)

    return app


def trained(mu, *, rounds=ROUNDS, cap=ROUNDS, size=D, per_round=MACHINES, **changes):
    policy = UpdatePolicy(clip_norm=CLIP, mu=mu, max_participations=cap, **changes)
    sums = policy.trust == "secure-aggregation"
    secure = SecureAggregation(min_cohort=policy.min_cohort, helpers=1) if sums else None
    strategy = CorrelatedFedAvg(
        num_clients=MACHINES, clients_per_round=per_round, seed=1, sampling="balanced", secure_aggregation=secure
    )
    grid = NodesGrid(standing_still(simulation=policy, helpers=1), MACHINES + sums)
    start = ArrayRecord({"w": Array(np.zeros(size))})
    return strategy, strategy.start(grid, start, num_rounds=rounds).arrays.to_numpy_ndarrays()[0]


KINDS = {
    "all data of a machine": {},
    "two passes": {"releases_per_pass": 2},
    "fewer rounds than the cap": {"cap": 2 * ROUNDS},
    "sums": {"trust": "secure-aggregation", "min_honest": 4, "min_cohort": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_in_the_model_is_as_long_as_the_forecast_says(kind):
    strategy, model = trained(2.0, **KINDS[kind])
    noise = np.linalg.norm(model) / (ROUNDS * CLIP)
    # Correlated noise in a part of the releases is taken to be that in all of them: never too little.
    least = 1 - TOLERANCE if strategy.forecast.alone else 0.3
    assert least < noise / strategy.forecast.ratio < 1 + TOLERANCE


def test_half_of_the_noise_would_be_noticed():
    strategy, model = trained(2.0)
    assert not 1 - TOLERANCE < np.linalg.norm(model / 2) / (ROUNDS * CLIP) / strategy.forecast.ratio < 1 + TOLERANCE


def test_a_model_of_noise_is_a_warning_before_the_first_round_that_nobody_misses(caplog):
    caplog.set_level(logging.INFO)
    strategy, _ = trained(0.5)
    assert strategy.forecast.verdict == "useless"
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = [record.getMessage() for record in said]
    assert sum("THIS MODEL IS LIKELY TO BE USELESS" in line for line in text) == 1
    assert any("machines like these" in line for line in text)
    assert max(map(len, text)) <= 64  # Flower writes 15 characters in front
    rounds = [record.created for record in caplog.records if record.getMessage().startswith("Round 1:")]
    assert max(record.created for record in said) <= rounds[0]


def test_much_noise_is_a_warning_too_and_little_noise_is_a_line(caplog):
    caplog.set_level(logging.INFO)
    strategy, _ = trained(20.0)
    assert strategy.forecast.verdict == "noisy"
    assert strategy.forecast.is_warning
    assert "MUCH OF THIS MODEL WILL BE NOISE" in caplog.text
    caplog.clear()
    strategy, _ = trained(8.0, size=4)
    assert strategy.forecast.verdict == "useful"
    assert [r.getMessage() for r in caplog.records if "Forecast" in r.getMessage()] == [
        f"{strategy.forecast.sentence} {strategy.forecast.basis}"
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_machines_asked_in_half_of_the_rounds_leave_more_noise():
    """m = 4 of 5 in 5 rounds is 4 releases of each, of a cap of 4: as if all were asked in 4 rounds."""
    all_of_them, some = trained(2.0)[0].forecast, trained(2.0, per_round=4, rounds=5)[0].forecast
    assert some.ratio == pytest.approx(all_of_them.ratio, rel=1e-9)


def test_a_training_that_is_over_is_not_forecast_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    policy = UpdatePolicy(clip_norm=CLIP, mu=4.0, max_participations=2)
    grid = NodesGrid(standing_still(simulation=policy), 2)

    def run():
        made = CorrelatedFedAvg(num_clients=2, seed=1, session="s", checkpoint=tmp_path / "checkpoint.npz")
        made.start(grid, ArrayRecord({"w": Array(np.zeros(9))}), num_rounds=2)
        return made

    assert run().forecast is not None
    caplog.clear()
    assert run().forecast is None
    assert "Forecast" not in caplog.text


def test_machines_that_state_nothing_are_not_guessed_at(monkeypatch):
    monkeypatch.setattr(CorrelatedFedAvg, "_statements", lambda *_: {"0": {"releases": 0}, "1": {}})
    strategy, model = trained(2.0)
    assert strategy.forecast is None
    assert math.isfinite(np.linalg.norm(model))


def test_where_simulated_machines_may_run_dry_a_hundred_of_many_are_asked():
    asked = []

    class Counting(NodesGrid):
        def handle(self, message, identifier):
            for config in message.content.config_records.values():
                asked.append(config.get("ask"))
            return super().handle(message, identifier)

    policy = UpdatePolicy(clip_norm=CLIP, mu=4.0, max_participations=1)
    app = standing_still(simulation=policy)
    strategy = CorrelatedFedAvg(num_clients=150, clients_per_round=1, seed=1, allow_exhaustion=True)
    strategy.machines.several_on_a_node = True  # real ones are all asked: who has made all releases is left in peace
    strategy.start(Counting(app, 150), ArrayRecord({"w": Array(np.zeros(2))}), num_rounds=1)
    assert 50 <= asked.count("privacy") <= 100
    assert strategy.forecast.machines == 150


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
    assert FigureFile.of_environment(None) is None


def test_a_round_is_noted_with_flowers_number_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv(FIGURES_VARIABLE, str(tmp_path))
    run = 2**63 + 7
    FigureFile.of_environment(SimpleNamespace(run=SimpleNamespace(run_id=run))).note(REPORT, 7)
    assert read_figures(tmp_path).run == run
    FigureFile.of_environment(None).note(REPORT, 7)  # a grid that does not say
    assert read_figures(tmp_path).run == 0


def test_a_folder_that_cannot_be_written_to_disturbs_no_training(tmp_path, monkeypatch, caplog):
    strategy = train(monkeypatch, tmp_path / "missing")
    assert len(strategy.history) == 3
    assert len([line for line in caplog.messages if "could not be written" in line]) == 1


def test_reasons_that_are_not_the_protocols_count_as_other(tmp_path):
    FigureFile(tmp_path).note(REPORT, 7)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert noted.refused == {"cap-reached": 1, "other": 1}
    assert noted.planned == 7


def test_a_closed_round_is_counted(tmp_path):
    FigureFile(tmp_path).note(RoundReport(1, asked=3, unopened=2, closed="2 of at least 3 releases"), 1)
    noted = read_figures(tmp_path)
    assert noted is not None
    assert (noted.closed, noted.unopened) == (1, 2)
    assert "releases" not in (tmp_path / "figures.json").read_text()


def note_many(folder, count):
    file = FigureFile(folder)
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
    monkeypatch.setattr("murmurfl.strategies.rounds.observed._LONGEST_WAIT_S", 0.05)
    with _locked(tmp_path):
        FigureFile(tmp_path).note(REPORT, 7)
    assert read_figures(tmp_path) is None
    assert any("could not be written" in line for line in caplog.messages)


GOOD = {"rounds": 1, "asked": 4, "refused": {"cap-reached": 1}}


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
    FigureFile(tmp_path).note(REPORT, 7)  # and the next round begins anew
    assert read_figures(tmp_path).rounds == 1


def test_what_somebody_else_wrote_keeps_no_later_run_from_its_figures(tmp_path):
    (tmp_path / "figures.json").write_text(json.dumps({**GOOD, "asked": 10**400}))
    FigureFile(tmp_path).note(REPORT, 7)
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
