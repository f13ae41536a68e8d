"""`strategy = auto`: the run of what was chosen, on every engine, with a line that says so; never on real nodes."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.papers.plan_grid import GridTable, chosen_settings, grid_rows
from murmurfl.app.papers.reproduction import caption_guarantee
from murmurfl.app.planning import rehearsal
from murmurfl.app.planning.plan_answers import choice_of_run, command_of_candidate, command_of_result, secret_ways
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import check_deployed
from murmurfl.app.settings.layers import parse_assignments, with_defaults
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("small_rehearsals")


@pytest.fixture
def not_rehearsed(monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: [])


AUTO = RunConfig(strategy="auto", features="soft-gradients", mu=4.0, num_rounds=5)


def test_auto_is_the_run_of_what_it_chose_on_every_engine():
    chosen = prepare(AUTO).config
    assert chosen.strategy == "full-batch"
    results = [run_cohort(AUTO), run_in_process(AUTO), run_cohort(chosen)]
    for other in results[1:]:
        for one, same in zip(results[0].parameters, other.parameters, strict=True):
            np.testing.assert_allclose(one, same, rtol=0, atol=1e-6)
    assert {result.mu for result in results} == {4.0}
    assert len({result.guarantee.sentence for result in results}) == 1


def test_a_result_says_what_was_chosen_and_why():
    document, set_by_hand = (run_cohort(config).outcome.document() for config in (AUTO, prepare(AUTO).config))
    assert (document["chosen_by"], document["config"]["strategy"]) == ("auto", "full-batch")
    assert "few full batches win" in document["chosen_because"]
    assert (set_by_hand["chosen_by"], set_by_hand["chosen_because"]) == (None, None)
    assert document["guarantee"] == set_by_hand["guarantee"]


def test_real_nodes_refuse_it_and_say_what_to_do_first():
    with raises(ConfigurationError, "conflict", "strategy", match=r"operators' files name the strategy.*murmurfl plan"):
        check_deployed(AUTO)


def test_words_about_auto_are_those_of_what_it_chose():
    assert caption_guarantee(AUTO).sentence == caption_guarantee(prepare(AUTO).config).sentence


def test_run_says_what_was_chosen_above_the_first_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "strategy=auto", "--set", "mu=4", "--set", "num-rounds=2"]
    ran = CliRunner().invoke(cli, ["run", "--no-twin", "--engine", "cohort", "--name", "x", *settings])
    assert ran.exit_code == 0, ran.output
    chosen = json.loads(Path("runs/x/result.json").read_text())["config"]["strategy"]
    first = ran.output.splitlines()[0]
    assert first.startswith(f"auto chose {chosen}: samples may be used in every round")
    assert "noise-to-signal" in first


def planned(*arguments, **environment):
    ran = CliRunner().invoke(cli, ["plan", *map(str, arguments)], env=environment)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_the_command_that_plan_prints_is_the_chosen_run():
    for settings in (["mu=4"], ["epsilon=2", "strategy.sample-uses=once"], ["mu=1", "trust=secure-aggregation"]):
        choice = choice_of_run({"strategy": "auto", **parse_assignments(settings)})
        words = shlex.split(command_of_result(choice))
        assert words[:2] == ["murmurfl", "run"]
        typed = RunConfig.from_mapping(with_defaults(parse_assignments(words[3::2])))
        chosen = choice.request.with_settings(choice.settings)
        asked = with_defaults({"strategy": "auto", **parse_assignments(settings)})
        assert chosen == prepare(RunConfig.from_mapping(asked)).config
        assert replace(typed, mechanism="") == replace(chosen, mechanism="")
        assert prepare(typed).policy() == prepare(chosen).policy()


@pytest.mark.more_cases
def test_plan_decides_from_a_few_numbers_and_says_what_for():
    few = ["--clients", 100, "--samples", 600, "--parameters", 5000, "--epsilon", 2]
    short = planned(*few, COLUMNS="80")
    assert short.startswith("Take full-batch: ")
    assert len(short.splitlines()) <= 20
    assert "mu=" not in short, "who says epsilon reads epsilon"
    assert "--set epsilon=2" in short
    text = planned(*few, "--details")
    assert text.startswith("Take full-batch: ")
    for said in (
        "noise to signal",
        "Guarantee: mu = 0.5016",
        "Not mu2: on made-up data it keeps",
        "murmurfl run --set task=synthetic",
    ):
        assert said in text
    assert "Take mu2: " in planned(*few, "--stream")
    assert "Take trusted-full-batch: " in planned(*few, "--trust", "trusted-server")
    document = json.loads(planned(*few, "--json"))["decision"]
    assert document["chosen"]["strategy"] == document["settings"]["strategy"] == "full-batch"
    assert {one["strategy"] for one in document["alternatives"]} >= {"mu2", "noisy-sgd", "one-shot"}
    assert all(one["why_not"] for one in document["alternatives"])


def test_what_plan_prints_fits_into_a_terminal_of_80_columns():
    text = planned("--clients", 20, "--samples", 100, "--epsilon", 2, "--details", COLUMNS="80")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sample-uses", "onc"], "did you mean 'once'"),
        (["--stream", "--rounds", "101"], "Expected rounds <= 100 for a stream of 100 samples a client"),
        (["--rounds", "60", "--batch", "2"], "Use fewer rounds, smaller batches, more passes"),
        (["--samples", "0"], "Expected samples >= 1, got 0"),
        (["--batch", "0"], "Expected batch-size to be an integer >= 1, got 0"),
        (["--mu", "1"], "Expected mu or epsilon, got both"),
    ],
)
def test_what_cannot_be_decided_is_refused_in_one_line(arguments, words):
    ran = CliRunner().invoke(cli, ["plan", "--clients", "20", "--samples", "100", "--epsilon", "2", *arguments])
    assert ran.exit_code == 1, ran.output
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_grid_puts_the_best_first_and_auto_under_what_it_took():
    def entry(strategy, score, **more):
        figures = {name: {"mean": 1.0} for name in ("mu", "epsilon")}
        return {**figures, "score": {"mean": score, "std": 0.0, "runs": [score]}, "rounds": 3.0, **more} | {
            "settings": {"strategy": strategy}
        }

    algorithms = {"a": entry("mu2", 90.0), "b": entry("full-batch", 95.0), "auto": entry("mu2", 94.5, chosen_by="auto")}
    rows = grid_rows({"cells": [{"table": "x", "algorithms": algorithms}]})
    assert [(row["algorithm"], row["behind"]) for row in rows] == [("b", 0.0), ("auto: mu2", 0.5), ("a", 5.0)]
    (row,) = GridTable().rows({"cells": [{"table": "x", "settings": {}, "algorithms": algorithms}]})
    assert (row["took"], row["best"], row["behind"]) == ("mu2", "b", 0.5)
    assert GridTable().curves({"rounds": 3, "auc": 0.7})["auc"]["values"] == [0.7]
    settings = chosen_settings(AUTO)
    assert settings["strategy"] == "full-batch"
    assert "features" not in settings


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({}, "soft-gradients"),
        ({"strategy.stream": True}, "strokes"),
        ({"strategy.sample-uses": "once"}, "strokes"),
        ({"centring": "none"}, "strokes"),
        ({"strategy.stream": True, "features": "soft-gradients"}, "soft-gradients"),
    ],
    ids=str,
)
def test_auto_takes_features_that_want_centring_only_where_it_can_centre(changes, features):
    """On the default run's task; features that somebody names stay."""
    config = RunConfig.from_mapping(with_defaults({"strategy": "auto", "num-clients": 5, "epsilon": 4.0, **changes}))
    chosen = prepare(config)
    assert chosen.config.features == features
    assert chosen.is_centred == (not changes)


def test_a_secret_order_has_features_that_need_no_centring(not_rehearsed):
    (way,) = secret_ways(choice_of_run({"num-clients": 10, "epsilon": 4.0}).request)
    assert way.features == "strokes"
    assert not way.problem.is_centred


def test_a_trusted_server_is_shown_poisson_batches_and_never_given_them_unasked():
    choice = choice_of_run({"num-clients": 10, "epsilon": 2.0, "trust": "trusted-server"})
    assert not choice.chosen.problem.config.poisson_batches
    assert not any(one.problem.config.poisson_batches for one in choice.others)
    (way,) = secret_ways(choice.request)
    assert way.amplification is not None
    assert 1.9 < way.amplification.epsilon <= 2.0
    assert not way.problem.is_centred
    words = shlex.split(command_of_candidate(way))
    run = prepare(RunConfig.from_mapping(with_defaults(parse_assignments(words[3::2]))))
    assert (run.config.mu, run.num_rounds) == (way.config.mu, way.rounds)
    # Replacing a sample moves a sum by 2 S at most, in each of T rounds; a sum has q N samples on average.
    sums_noise = 2 * math.sqrt(way.rounds) / way.config.mu
    summed = way.policy.sampling_rate * sum(run.sizes)
    assert way.noise_to_signal == pytest.approx(sums_noise / summed * math.sqrt(way.num_values), rel=0.01)
