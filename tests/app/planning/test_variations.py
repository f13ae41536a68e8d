"""`murmurfl plan` varies passes, batch and trust: every row is a run that can be made, at the mu that is asked for."""

import json
import shlex
from dataclasses import replace

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.methods import METHODS
from murmurfl.app.planning import decide
from murmurfl.app.planning.deciding import noise_to_signal_of
from murmurfl.app.planning.plan_answers import (
    AS_SET,
    DEFAULT,
    choice_of_numbers,
    choice_of_run,
    command_of_candidate,
    tried_out,
    variations_of,
)
from murmurfl.app.planning.plan_lines import ways_lines, ways_table
from murmurfl.app.runs.experiment import plan_request_of, prepare
from murmurfl.app.runs.run_guarantees import configured_figures, run_guarantee
from murmurfl.app.settings.layers import parse_assignments, with_defaults
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import gdp_epsilon, gdp_mu, rounded_up
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("small_rehearsals")

FEDERATION = {"mu": 1.0, "trust": "untrusted-server", "num-clients": 10, "partition": "iid"}
SETTINGS = {
    **FEDERATION,
    "strategy": "mu2",
    "passes": 4,
    "batch-size": 71,
    "mechanism": "decay",
    "mechanism.decay": 0.5,
}


@pytest.fixture(scope="module")
def choice():
    return choice_of_run(SETTINGS)


@pytest.fixture(scope="module")
def rows(choice):
    return variations_of(choice, with_defaults(SETTINGS))


def run_of(command):
    """The run configuration that a printed command makes."""
    words = shlex.split(command)
    assert words[:2] == ["murmurfl", "run"]
    assert words[2::2] == ["--set"] * len(words[3::2])
    return RunConfig.from_mapping(with_defaults(parse_assignments(words[3::2])))


def test_rounds_batch_and_trust_are_varied_and_the_best_is_first(rows):
    scores = [row.score for row in rows]
    assert scores == sorted(scores)
    assert {row.trust for row in rows} == {"untrusted-server", "secure-aggregation", "trusted-server"}
    mu2 = [row for row in rows if row.strategy == "mu2" and row.trust == "untrusted-server"]
    assert len({row.batch for row in mu2}) >= 4
    assert len({row.rounds for row in rows if row.strategy == "full-batch"}) >= 3
    assert sum(row.mark == "taken" for row in rows) == 1
    assert sum(row.mark == DEFAULT for row in rows) == 1


def test_every_row_is_run_by_its_command_with_the_noise_that_it_shows(rows):
    for row in rows:
        experiment = prepare(run_of(command_of_candidate(row)))
        mu = row.config.mu if row.amplification else 1.0
        assert experiment.config.mu == mu
        assert experiment.config.trust_model == row.trust
        assert (experiment.config.strategy, experiment.num_rounds) == (row.strategy, row.rounds)
        assert experiment.loss().mu == pytest.approx(mu, rel=1e-6)
        assert noise_to_signal_of(experiment) == pytest.approx(row.noise_to_signal), command_of_candidate(row)


def test_no_row_uses_samples_more_often_than_its_noise_covers_or_than_is_allowed():
    for uses, most in (("few", 4), ("once", 1)):
        settings = {**FEDERATION, "strategy": "auto", "strategy.sample-uses": uses}
        found = variations_of(choice_of_run(settings), with_defaults(SETTINGS))
        for row in found:
            problem = row.problem
            policy = METHODS[row.strategy].policy(problem.trained, min(problem.sizes))
            assert policy.participations == row.training_uses
            assert row.mark == DEFAULT or row.uses <= most, command_of_candidate(row)


def test_other_trusts_are_what_would_be_decided_under_them(rows):
    for row in rows:
        if row.varied == "trust":
            config = RunConfig(strategy="auto", mu=1.0, trust=row.trust)
            chosen = decide(plan_request_of(config)).chosen
            assert (chosen.strategy, chosen.score) == (row.strategy, pytest.approx(row.score))


def test_lines_below_the_table_name_marked_rows_and_what_each_trust_assumes(rows):
    text = " ".join(ways_lines(rows, made_up=False))
    taken, default = (next(i for i, row in enumerate(rows, 1) if row.mark == mark) for mark in ("taken", DEFAULT))
    assert f"Row {taken} is taken." in text
    assert f"Row {default} is the default." in text
    trust = next(i for i, row in enumerate(rows, 1) if row.trust == "trusted-server")
    for words in (f"Row {trust} assumes: the server is honest.", "--try 5"):
        assert words in text
    honest = RunConfig(trust="secure-aggregation").sums.min_honest
    assert f"1 helper and {honest} of 8 clients of each sum are honest" in text
    assert len(ways_table(rows).rows) == len(rows)


def test_a_secret_order_is_ranked_at_the_epsilon_asked_for_and_never_taken(choice, rows):
    asked = gdp_epsilon(1.0, 1e-5)
    (row,) = (row for row in rows if row.amplification)
    assert (row.strategy, row.trust, row.training_uses) == ("noisy-sgd", "untrusted-server", 1)
    assert row.amplification.proved
    assert 0.98 * asked < row.amplification.epsilon <= asked < gdp_epsilon(row.config.mu, 1e-5)
    guarantee = run_guarantee(
        prepare(run_of(command_of_candidate(row))), configured_figures(prepare(run_of(command_of_candidate(row))))
    )
    assert guarantee.amplified.epsilon == pytest.approx(row.amplification.epsilon)
    assert not row.mark, "nobody can check that an order stays secret"
    assert not choice.chosen.problem.config.shuffled_batches
    assert not any(one.problem.config.shuffled_batches for one in choice.others)


def test_a_secret_order_has_its_price_in_its_line_and_below(rows):
    number, row = next((i, row) for i, row in enumerate(rows, 1) if row.amplification)
    texts, slots = ways_table(rows).texts(), row.amplification.slots
    assert (texts[number - 1]["strategy"], texts[number - 1]["trust"]) == (f"noisy-sgd, {slots} x", "secrecy")
    (said,) = (one for one in ways_lines(rows, made_up=False) if "nobody learns" in one)
    known = rounded_up(gdp_epsilon(row.config.mu, 1e-5))
    for words in (
        f"Row {number} has epsilon = ",
        f"which of {slots} releases",
        f"epsilon = {known}, which the ledger",
        "time stay",
    ):
        assert words in said
    assert sum(one["trust"] == "secrecy" for one in texts) == 1


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("more", "possible"),
    [
        ({"trust": "secure-aggregation"}, True),
        ({"trust": "trusted-server"}, True),
        ({"trust": "trusted-server", "strategy.sample-uses": "once"}, False),
        ({"trust": "trusted-server", "strategy.stream": True}, False),
        ({"trust": "trusted-server", "evaluation.share": 0.05, "evaluation.held-out": 0.1}, False),
        ({"strategy.stream": True}, False),
        ({"strategy.sample-uses": "once"}, True),
        ({"evaluation.share": 0.05, "evaluation.held-out": 0.1}, False),
    ],
    ids=str,
)
def test_a_secret_order_is_offered_only_where_its_proof_holds(more, possible):
    found = variations_of(choice_of_run({"strategy": "auto", **FEDERATION, **more}), with_defaults(SETTINGS))
    own = [row for row in found if row.amplification]
    assert len(own) == possible
    assert all(row.trust == more.get("trust", "untrusted-server") for row in own)
    assert all(row.config.poisson_batches == (row.trust == "trusted-server") for row in own)


def test_a_run_as_set_stands_in_the_table_with_what_it_keeps():
    settings = {"strategy": "noisy-sgd", "mu": 1.0, "num-rounds": 17}
    found = variations_of(choice_of_run(settings), settings, mark=AS_SET)
    texts = ways_table(found).texts()
    (number,) = (i for i, row in enumerate(found) if row.mark == AS_SET)
    assert texts[number]["strategy"] == "noisy-sgd"
    assert texts[number]["keeps"] == f"{100 * found[number].retained_utility:.0f} %"


def test_rows_above_what_is_taken_are_explained():
    settings = {"mu": 0.5}
    found = variations_of(choice_of_run(settings), with_defaults(settings))
    taken = next(row for row in found if "taken" in row.mark)
    before = [row for row in found if row.trust == taken.trust and row.score < taken.score]
    said = [line for line in ways_lines(found, made_up=False) if "not among those compared" in line]
    assert bool(before) == bool(said)
    worst = [replace(row, prior_penalty=row.prior_penalty + (row is taken)) for row in found]
    assert any("not among those compared" in line for line in ways_lines(worst, made_up=False))


def test_a_default_that_is_taken_has_both_marks():
    settings = {**choice_of_run(SETTINGS).settings, "mu": 1.0}
    found = variations_of(choice_of_run(settings), settings, mark=AS_SET)
    assert any(row.mark == "taken and as it is set" for row in found)


def test_from_numbers_alone_there_are_the_same_ways():
    asked = {"num-clients": 10, "clients-per-round": 10, "epsilon": 4.0}
    choice = choice_of_numbers(100, 1000, asked)
    found = variations_of(choice, choice.asked)
    assert {row.config.mu for row in found if not row.amplification} == {gdp_mu(4.0, 1e-5)}
    assert {row.trust for row in found} == {"untrusted-server", "secure-aggregation", "trusted-server"}
    assert any(row.mark == DEFAULT for row in found)


def test_tried_out_the_first_rows_and_the_marked_ones_have_the_accuracy_of_their_runs(rows):
    found = tried_out(rows, 2)
    assert [row.accuracy is not None for row in found] == [i < 2 or bool(row.mark) for i, row in enumerate(rows)]
    marked = {row.mark: row.accuracy for row in found if row.mark}
    assert marked["taken"] > marked[DEFAULT] > 0.8
    shown = {row["#"]: row["acc."] for row in ways_table(found).texts() if row["acc."]}
    assert shown == {
        str(i): f"{100 * row.accuracy:.1f} %" for i, row in enumerate(found, 1) if row.accuracy is not None
    }


def plan(*arguments, columns="80"):
    return CliRunner(env={"COLUMNS": columns}).invoke(cli, ["plan", *arguments])


def test_the_command_shows_them_and_commands_that_can_be_copied():
    result = plan("--set", "mu=1", "--try", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    heading = next(line for line in lines if line.split()[:2] == ["#", "strategy"])
    assert heading.split()[2:] == ["trust", "uses", "batch", "rounds", "noise", "keeps", "acc."]
    whole = result.stdout.replace(" \\\n", " ")
    commands = [line.strip() for line in whole.splitlines() if line.strip().startswith("murmurfl run")]
    assert len(commands) == 4
    for command in commands:
        prepare(run_of(command))
    assert max(map(len, lines)) <= 80


@pytest.mark.long
def test_as_json_each_way_has_its_command():
    result = plan("--set", "mu=1", "--json")
    ways = json.loads(result.stdout)["decision"]["ways"]
    found = [run_of(way["command"]) for way in ways]
    assert all(config.mu == 1.0 for config in found if not config.batch_selection)
    (shuffled,) = (config for config in found if config.batch_selection)  # of the same epsilon while batches are secret
    assert shuffled.mu > 1.0
    marks = {way["mark"] for way in ways} - {None}
    assert marks in ({"taken", DEFAULT}, {f"taken and {DEFAULT}"})


def test_numbers_alone_are_nothing_to_try():
    result = plan("--clients=10", "--samples=100", "--epsilon=4", "--try=3")
    assert result.exit_code == 2
    assert "Expected --config or --set with a task for --try" in " ".join(result.stderr.split())
