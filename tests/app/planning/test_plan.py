"""`murmurfl plan`: what it prints is what clients would do, by dense algebra and by a run."""

import json
import math
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.planning import rehearsal
from murmurfl.app.planning.noise_plans import (
    BESIDE_MEAN,
    compare_mechanisms,
    guarantee_of_updates,
    noise_guarantee,
    update_forecast,
    update_policy,
)
from murmurfl.app.planning.plan_answers import base_of_numbers, base_of_run, request_of_updates
from murmurfl.app.planning.plan_document import plan_document
from murmurfl.app.planning.plan_lines import compared_table, late_lines, plan_lines, plan_table, update_parts
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import UpdatePolicy
from murmurfl.privacy import ConfigurationError, gdp_mu, make_mechanism
from typer.testing import CliRunner

from tests.harness.errors import raises

REQUEST = {"num-clients": 10, "clients-per-round": 5, "num-rounds": 30, "batch-size": 4, "epsilon": 3.0}
OPTIONS = {
    "cancelling uniform": {"schedule": "uniform"},
    "cancelling harmonic": {"schedule": "harmonic"},
    "cancelling paper": {"schedule": "paper", "num_rounds": 30},
    "decay mu2": {"workload": "mu2"},
    "decay prefix-sum": {"workload": "prefix-sum"},
    "tree dyadic": {"decoder": "dyadic"},
    "tree least-squares": {"decoder": "least-squares"},
    "optimal prefix-sum": {"workload": "prefix-sum"},
    "optimal mu2": {"workload": "mu2"},
}


@pytest.fixture(autouse=True)
def _not_rehearsed(monkeypatch):
    """Of the decision beside the noise, which test_auto.py looks at, no way is rehearsed."""
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: [])


def compared(samples=96, parameters=1000, **changes):
    return compare_mechanisms(base_of_numbers(samples, parameters, {**REQUEST, **changes}))


@pytest.fixture(scope="module")
def plan():
    return compared()


def test_noise_and_errors_are_those_of_dense_algebra(plan):
    assert plan.chosen.policy.max_participations == 24
    without = {"independent", "banded", "bisr", "blt", "sqrt_normalised", "sqrt_toeplitz"}
    assert {made.mark for made in plan.mechanisms} >= OPTIONS.keys() | without
    sums = np.tril(np.ones((24, 24)))
    for made in plan.mechanisms:
        mechanism = make_mechanism(made.mark.split()[0], 24, **OPTIONS.get(made.mark, {}))
        encoder = mechanism.materialize(24)
        columns = np.linalg.norm(encoder, axis=0)
        noise = made.noise.sensitivity * columns.max() / gdp_mu(3.0, 1e-5)
        assert made.noise_std >= noise * (1 - 1e-3)  # more only where a schedule is more than is needed
        if not made.mark.startswith("tree"):
            decoder = sums @ np.linalg.inv(encoder)
            errors = np.linalg.norm(decoder, axis=1) * made.noise_std
            assert made.prefix_rmse == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6), made.mark
            assert made.prefix_last == pytest.approx(errors[-1], rel=1e-6)
            errors = np.linalg.norm(sums @ decoder, axis=1) * made.noise_std
            assert made.mu2_rmse == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6)
        assert made.server_prefix_rmse == pytest.approx(made.prefix_rmse * math.sqrt(10) / 5)


def test_it_says_what_is_best(plan):
    assert plan.chosen.mark == "optimal prefix-sum"
    assert plan.best_for_mu2 == "optimal mu2"
    assert plan_table(plan).rows[0]["name"] == "optimal prefix-sum"


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"batch-size": 8}, "decay mu2"), ({"batch-size": 8, "mechanism": "blt"}, "blt")],
)
def test_the_noise_is_what_clients_of_a_run_add(settings, name):
    result = run_cohort(RunConfig.from_mapping({**settings, "clip-norm": 1.0, "mu": gdp_mu(3.0, 1e-5)}))
    rounds = {"num-rounds": result.experiment.num_rounds, "clients-per-round": 10, "batch-size": 8}
    samples = min(len(shard) for shard in result.experiment.shards)
    plan = compared(samples, result.experiment.model.num_parameters, **rounds)
    (made,) = (made for made in plan.mechanisms if made.mark == name)
    assert {statement["noise-std"] for statement in result.statements.values()} == {made.noise_std}


def test_samples_that_return_need_more_noise():
    once, often = (
        compared(40, passes=passes, **{"num-rounds": 10 * passes, "clients-per-round": 10}) for passes in (1, 3)
    )
    assert [plan.chosen.policy.max_participations for plan in (once, often)] == [10, 30]
    noise = [{made.mark: made.noise_std for made in plan.mechanisms} for plan in (once, often)]
    assert noise[1]["independent"] == pytest.approx(math.sqrt(3) * noise[0]["independent"], rel=1e-3)


def test_what_takes_too_long_is_left_out_and_named():
    plan = compared(3000, **{"num-rounds": 2500, "batch-size": 1})
    assert set(plan.impossible) == {"optimal prefix-sum", "optimal mu2"}
    assert plan.best_for_mu2 is None
    assert any("Left out: optimal mu2" in line for line in plan_lines(plan)[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [("clients-per-round", 11), ("batch-size", 97), ("passes", 0), ("batch-size", 0)],
)
def test_impossible_requests_are_refused(key, value):
    with pytest.raises(ConfigurationError, match=key):
        compared(**{key: value})


ARGUMENTS = shlex.split("plan --clients 10 --samples 96 --rounds 30 --batch 4 --per-round 5 --epsilon 3")


def test_the_command_prints_a_table_and_the_best():
    result = CliRunner().invoke(cli, ARGUMENTS)
    assert result.exit_code == 0, result.output
    for text in (
        "24 releases a client",
        "epsilon = 3 at delta = 1e-05",
        "sqrt_toeplitz",
        "Least noise on prefix sums",
    ):
        assert text in result.output


def test_the_command_prints_json_and_nothing_else(plan):
    result = CliRunner().invoke(cli, [*ARGUMENTS, "--json"])
    document = json.loads(result.stdout)
    decision = document.pop("decision")
    assert document == json.loads(json.dumps(plan_document(plan)))
    assert decision["chosen"]["strategy"] == decision["settings"]["strategy"]


@pytest.mark.parametrize(
    ("clients", "asked", "possible"),
    [(10, 10, 24), (10, 5, 48)],
)
def test_more_rounds_than_samples_last_for_are_refused_as_in_a_run(clients, asked, possible):
    arguments = ["plan", f"--clients={clients}", "--samples=96", "--batch=4", f"--per-round={asked}", "--epsilon=3"]
    assert CliRunner().invoke(cli, [*arguments, f"--rounds={possible}"]).exit_code == 0
    result = CliRunner().invoke(cli, [*arguments, f"--rounds={possible + 1}"])
    assert result.exit_code == 1
    assert f"murmurfl: Expected rounds <= {possible}, got {possible + 1}: 96 samples" in result.stderr
    config = RunConfig(num_clients=clients, clients_per_round=clients, batch_size=4, training_samples=960)
    with raises(ConfigurationError, "exhausted", "num-rounds", match="num-rounds <= 24, got 25"):
        run_cohort(replace(config, num_rounds=25))


def test_the_command_refuses_in_one_line():
    result = CliRunner().invoke(cli, [*ARGUMENTS[:-1], "-3"])
    assert result.exit_code == 1
    assert "murmurfl: Expected epsilon" in result.stderr


def planned(*arguments):
    ran = CliRunner().invoke(cli, ["plan", *map(str, arguments), "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num-clients": 12, "clients-per-round": 5, "batch-size": 4, "num-rounds": 20}, "decay mu2"),
        ({"passes": 2, "batch-size": 24, "mechanism": "blt", "model": "mlp"}, "blt"),
        ({"strategy": "noisy-sgd", "max-participations": 7, "num-rounds": 7, "mu": 1.5, "delta": 1e-6}, "independent"),
        ({"strategy": "online", "batch-size": 5, "num-rounds": 6, "mechanism": "sqrt_toeplitz"}, "sqrt_toeplitz"),
        (
            {
                "strategy.release-rule": "paper",
                "partition": "dirichlet",
                "batch-size": 2,
                "num-rounds": 4,
                "mechanism.schedule": "uniform",
            },
            "cancelling uniform",
        ),
    ],
)
def test_the_plan_of_a_run_has_the_noise_of_its_clients(settings, name, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    plan = planned("--config", path)
    result = run_cohort(RunConfig.from_mapping(settings))
    (made,) = (made for made in plan["mechanisms"] if made["name"] == name)
    largest = max(result.statements.values(), key=lambda statement: statement["max-participations"])
    assert made["noise_std"] == largest["noise-std"]
    assert plan["releases"] == largest["max-participations"]
    assert plan["mu"] == RunConfig.from_mapping(settings).mu
    assert plan["request"]["parameters"] == result.experiment.model.num_parameters


@pytest.mark.parametrize("centring", ["none", "private"])
def test_a_plan_of_what_comes_after_the_mean_of_the_features_says_that_a_run_guarantees_less(centring):
    config = RunConfig(epsilon=2.0, features="soft-gradients", strategy="mu2", centring=centring)
    guarantee = noise_guarantee(compare_mechanisms(base_of_run(config)))
    whole = math.isclose(guarantee.epsilon, 2.0)
    assert whole == (centring == "none")
    assert (BESIDE_MEAN in guarantee.sentence) == (not whole)


def test_options_win_over_a_runs_configuration(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("epsilon = 2.0\nnum-clients = 20\nclients-per-round = 5\nbatch-size = 4\n")
    assert planned("--config", path, "--set", "mu=3")["mu"] == 3.0
    plan = planned("--config", path, "--epsilon", 1.0, "--clip", 0.5, "--batch", 2, "--parameters", 7, "--samples", 600)
    request = plan["request"]
    assert (pytest.approx(request["epsilon"]), plan["mu"]) == (1.0, gdp_mu(1.0, 1e-5))
    assert (request["clients"], request["per_round"], request["batch_size"], request["samples"]) == (20, 5, 2, 600)
    assert (request["clip_norm"], request["parameters"]) == (0.5, 7)
    assert planned("--config", path, "--per-round", 0)["request"]["per_round"] == 20


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--clients", "3"], 2, "Expected --samples, --epsilon as well"),
        (["--set", "strategy=trusted-mu2"], 1, "strategy = 'trusted-mu2'"),
        (["--set", "mechanism=none"], 1, "mechanism = 'none'"),
        (["--set", "num-rounds=1000"], 1, "Expected num-rounds <= 17, got 1000"),
        (["--set", "num-clients=10", "--samples", "3"], 1, "Expected batch-size <= the 3 samples of a client"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(arguments, code, words):
    ran = CliRunner().invoke(cli, ["plan", *arguments])
    assert ran.exit_code == code, ran.output
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1


SUMS = {"trust": "secure-aggregation", "trust.min-cohort": 5, "trust.colluders": 1}  # h = 4 of n = 5


def test_under_secure_aggregation_every_client_adds_a_share_and_both_figures_are_said(plan):
    sums = compared(**SUMS)
    alone = {made.mark: made for made in plan.mechanisms}
    for made in sums.mechanisms:
        assert made.noise_std == pytest.approx(alone[made.mark].noise_std / 2, rel=1e-3), made.mark
        assert made.loss.worst_case.mu == pytest.approx(2 * made.loss.mu, rel=1e-3)
        assert not alone[made.mark].loss.conditional
    assert "if one helper and 4 clients of each sum are honest" in noise_guarantee(sums).sentence
    assert json.loads(json.dumps(plan_document(sums), allow_nan=False))["guarantee"]["min_honest"] == 4


def test_a_plan_compares_trust_models_at_the_same_mu(plan):
    assert list(plan.trusts) == ["untrusted-server", "secure-aggregation", "trusted-server"]
    untrusted, sums, trusted = plan.trusts.values()
    assumed = [row["assumes"] for row in compared_table(plan).rows]
    assert assumed[1] == "1 helper and 2 of 4 clients of each sum are honest"  # half of the 5 that are asked
    assert untrusted.server_prefix_rmse == pytest.approx(
        next(made.server_prefix_rmse for made in plan.mechanisms if made.mark == plan.chosen.mark)
    )
    assert sums.server_prefix_rmse == pytest.approx(untrusted.server_prefix_rmse / math.sqrt(2), rel=1e-3)
    assert trusted.server_prefix_rmse == pytest.approx(untrusted.server_prefix_rmse / math.sqrt(10))
    worst = [made.loss.worst_case.mu for made in (untrusted, sums, trusted)]
    assert worst[1] == pytest.approx(math.sqrt(2) * worst[0], rel=1e-6)
    assert math.isinf(worst[2])
    of_sums = compared(**SUMS)
    assert of_sums.trusts["untrusted-server"].policy == untrusted.policy
    assert compared_table(of_sums).rows[1]["assumes"] == "1 helper and 4 of 5 clients of each sum are honest"


def test_what_no_helper_would_open_is_left_out_of_a_plan():
    made = compared(**SUMS, **{"strategy.release-rule": "paper", "mechanism": "independent"})
    assert [one.mark for one in made.mechanisms] == ["independent"]
    assert "blt" in made.impossible


def test_the_noise_of_a_run_under_secure_aggregation_is_the_plans():
    config = RunConfig(trust="secure-aggregation", partition="dirichlet", seed=2, num_clients=6, clients_per_round=6)
    plan = compare_mechanisms(base_of_run(config))
    (made,) = (one for one in plan.mechanisms if one.mark == "decay mu2")
    assert {one["noise-std"] for one in run_cohort(config).statements.values()} == {made.noise_std}


PLAN = ["plan", "--unit", "client", "--clients", "100", "--parameters", "60000", "--epsilon", "4"]


def invoke(*arguments, width="80"):
    return CliRunner().invoke(cli, list(arguments), env={"COLUMNS": width})


def test_it_is_the_forecast_of_the_policy_that_it_prints():
    result = invoke(*PLAN, "--samples", "600")
    assert result.exit_code == 0, result.output
    assert "useless" in result.output
    assert "600 a client" in result.output
    assert "UpdatePolicy(clip_norm=1, epsilon=4," in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    document = json.loads(invoke(*PLAN, "--json").output)
    mu = gdp_mu(4.0, 1e-5)
    assert document["forecast"]["noise_over_longest"] == pytest.approx(2 * math.sqrt(600) / mu, rel=1e-2)
    assert [row["epsilon"] for row in document["table"]] == pytest.approx([1, 2, 4, 8, 16])
    clients = [row["clients_needed"] for row in document["table"]]
    assert clients == sorted(clients, reverse=True)


def updates(clients=100, parameters=500, mu=2.0, samples=0, **settings):
    return request_of_updates(samples, parameters, {"num-clients": clients, "mu": mu, **settings})


def test_neither_clip_nor_rounds_change_it():
    one = update_forecast(updates(**{"num-rounds": 5})).ratio
    other = update_forecast(updates(**{"num-rounds": 40, "clip-norm": 7.0})).ratio
    assert other == pytest.approx(one, rel=1e-3)


def test_sums_count_half_of_the_clients_unless_more_of_them_may_work_with_the_server():
    alone, summed = update_forecast(updates()), updates(trust="secure-aggregation")
    assert update_forecast(summed).ratio == pytest.approx(alone.ratio / math.sqrt(50), rel=1e-2)
    few = updates(trust="secure-aggregation", **{"trust.colluders": 70})
    assert update_policy(few).sums.min_honest == 10
    assert guarantee_of_updates(summed).min_honest == 50


def test_what_is_printed_is_what_was_asked_for():
    *_, line, _table = update_parts(updates(10, 20, gdp_mu(2.5, 1e-5), **{"num-rounds": 7}))
    assert "epsilon=2.5, max_participations=7" in line
    assert UpdatePolicy(clip_norm=1.0, epsilon=2.5, max_participations=7).mu == pytest.approx(gdp_mu(2.5, 1e-5))
    *_, line, _table = update_parts(updates(10, 20, 1.2345))
    assert "mu=1.2345, max" in line


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--unit", "person"], "sample or client"),
        (["--unit", "client", "--set", "mu=1"], "without a run's configuration"),
        (["--unit", "client", "--clients", "5", "--epsilon", "1"], "--parameters"),
        (["--unit", "client", "--clients", "5", "--parameters", "9"], "exactly one of --epsilon and --mu"),
        ([*PLAN[1:], "--mu", "1"], "exactly one of --epsilon and --mu"),
        ([*PLAN[1:], "--batch", "5"], "--batch"),
        ([*PLAN[1:], "--stream"], "--stream"),
        ([*PLAN[1:], "--per-round", "101"], "clients-per-round to be at most num-clients = 100"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    result = invoke("plan", *arguments, width="200")
    assert result.exit_code != 0
    assert said in result.output


def test_numbers_that_are_none_are_refused():
    for changes in ({"clients": 0}, {"parameters": 0}, {"num-rounds": 0}, {"samples": -1}):
        with pytest.raises(ConfigurationError, match="Expected"):
            updates(**{"clients": 5, "parameters": 9, "mu": 1.0, **changes})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quorum": 0.8}, "no budget is"),
        ({"quorum": 0.8, "strategy": "noisy-sgd"}, "one that never comes is lost, and its budget"),
        (
            {"quorum": 0.8, "strategy": "full-batch"},
            r"2 clients a round \(20 %\) the budget of a release",
        ),
        ({"over_selection": 1.2, "clients_per_round": 5, "strategy": "full-batch"}, "asks 6 clients and ends when 5"),
    ],
)
def test_a_plan_says_what_late_answers_are_worth(settings, said):
    (line,) = late_lines(RunConfig(**settings))
    assert re.search(said, line)


def test_a_plan_says_nothing_where_rounds_wait_for_all():
    assert late_lines(RunConfig()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "one-shot", "quorum": 0.8}, "quorum to be 1 with this strategy"),
        ({"strategy": "tree-momentum", "quorum": 0.8}, "quorum to be 1 with this strategy"),
        ({"over_selection": 1.2}, "over-selection to be at most 10 clients over clients-per-round = 10"),
        ({"trust": "secure-aggregation", "quorum": 0.5}, "at least trust.min-cohort = 8 clients"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        RunConfig(**settings)


def test_whatever_depends_on_clients_a_round_counts_those_that_are_asked():
    more, as_many = RunConfig(clients_per_round=5, over_selection=1.2), RunConfig(clients_per_round=6)
    assert more.asked_per_round == 6
    assert prepare(more).num_rounds == prepare(as_many).num_rounds
    assert prepare(more).values == prepare(as_many).values
    assert prepare(more).strategy().clients_per_round == 6
