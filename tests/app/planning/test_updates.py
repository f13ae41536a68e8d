"""What is planned for the updates of a project of one's own."""

import json
import math

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.planning.plan_lines import update_lines
from murmurfl.app.planning.update_plans import UpdateRequest
from murmurfl.clients import UpdatePolicy
from murmurfl.privacy import ConfigurationError, gdp_mu
from typer.testing import CliRunner

PLAN = ["plan", "--unit", "machine", "--machines", "100", "--parameters", "60000", "--epsilon", "4"]


def invoke(*arguments, width="80"):
    return CliRunner().invoke(cli, list(arguments), env={"COLUMNS": width})


def test_it_is_the_forecast_of_the_policy_that_it_prints():
    result = invoke(*PLAN, "--samples", "600")
    assert result.exit_code == 0, result.output
    assert "useless" in result.output
    assert "600 a machine" in result.output
    assert "UpdatePolicy(clip_norm=1, epsilon=4," in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    document = json.loads(invoke(*PLAN, "--json").output)
    mu = gdp_mu(4.0, 1e-5)
    assert document["forecast"]["noise_over_longest"] == pytest.approx(2 * math.sqrt(600) / mu, rel=1e-2)
    assert [row["epsilon"] for row in document["table"]] == pytest.approx([1, 2, 4, 8, 16])
    machines = [row["machines_needed"] for row in document["table"]]
    assert machines == sorted(machines, reverse=True)


def test_neither_clip_nor_rounds_change_it():
    one = UpdateRequest(100, 500, 2.0, rounds=5).forecast().ratio
    assert UpdateRequest(100, 500, 2.0, rounds=40, clip_norm=7.0).forecast().ratio == pytest.approx(one, rel=1e-3)


def test_sums_count_half_of_the_machines_unless_more_of_them_may_work_with_the_server():
    alone = UpdateRequest(100, 500, 2.0).forecast()
    summed = UpdateRequest(100, 500, 2.0, trust="secure-aggregation")
    assert summed.forecast().ratio == pytest.approx(alone.ratio / math.sqrt(50), rel=1e-2)
    few = UpdateRequest(100, 500, 2.0, trust="secure-aggregation", colluders=70)
    assert few.policy().min_honest == 10
    assert summed.guarantee.min_honest == 50


def test_what_is_printed_is_what_was_asked_for():
    made = update_lines(UpdateRequest(10, 20, gdp_mu(2.5, 1e-5), rounds=7))
    assert "epsilon=2.5, max_participations=7" in made[-1]
    assert UpdatePolicy(clip_norm=1.0, epsilon=2.5, max_participations=7).mu == pytest.approx(gdp_mu(2.5, 1e-5))
    assert "mu=1.2345, max" in update_lines(UpdateRequest(10, 20, 1.2345))[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--unit", "person"], "sample or machine"),
        (["--unit", "machine", "--set", "mu=1"], "without a run's configuration"),
        (["--unit", "machine", "--machines", "5", "--epsilon", "1"], "--parameters"),
        (["--unit", "machine", "--machines", "5", "--parameters", "9"], "exactly one of --epsilon and --mu"),
        ([*PLAN[1:], "--mu", "1"], "exactly one of --epsilon and --mu"),
        ([*PLAN[1:], "--batch", "5"], "--batch"),
        ([*PLAN[1:], "--stream"], "--stream"),
        ([*PLAN[1:], "--per-round", "101"], "per_round <= 100"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    result = invoke("plan", *arguments, width="200")
    assert result.exit_code != 0
    assert said in result.output


def test_numbers_that_are_none_are_refused():
    for changes in ({"machines": 0}, {"parameters": 0}, {"rounds": 0}, {"samples": -1}):
        with pytest.raises(ConfigurationError, match="Expected"):
            UpdateRequest(**{"machines": 5, "parameters": 9, "mu": 1.0, **changes})
