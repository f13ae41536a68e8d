"""The two figures of secure aggregation: what clients state, what a run may say, and where people read both."""

import json
import math
from dataclasses import replace

import pytest
from murmurfl.app import client_app
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import run_cohort
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.methods.mu2_methods import Mu2Method
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.progress import EPSILON, EPSILON_LOCAL, RoundLine, Tracking
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_guarantees import Figures, epsilon_of, refuse_untrue
from murmurfl.app.runs.run_summary import summary_lines
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, SumAssumption, gdp_epsilon, rounded_up
from murmurfl.privacy.accounting.guarantee import stated_figures
from murmurfl.privacy.accounting.loss import Loss
from typer.testing import CliRunner

from tests.app.plain import simulate
from tests.harness.errors import raises

NAME = f"{__name__}:"
SUMS = RunConfig(trust="secure-aggregation", num_clients=4, clients_per_round=4, num_rounds=2, mu=1.0, batch_size=16)
EXPECTED = Figures(Loss.of(1.0, 2.0), SumAssumption(4, 5))


def stated(mu, local, honest, cohort=6, releases=3):
    names = ("mu-guaranteed", "mu-local", "min-honest", "min-cohort", "releases")
    return dict(zip(names, (mu, local, honest, cohort, releases), strict=True))


def test_of_what_clients_state_the_largest_mus_and_the_fewest_honest_count():
    statements = {"a": stated(0.9, 2.7, 9, 10), "b": stated(1.35, 2.7, 4, 9)}
    assert stated_figures(EXPECTED, statements, 2) == Figures(Loss.of(1.35, 2.7), SumAssumption(4, 9))


def test_for_clients_that_do_not_answer_what_the_run_expects_counts():
    statements = {"a": stated(0.5, 1.5, 9, 10)}
    assert stated_figures(EXPECTED, statements, 2) == Figures(Loss.of(1.0, 2.0), SumAssumption(4, 5))
    assert stated_figures(EXPECTED, statements, 1) == Figures(Loss.of(0.5, 1.5), SumAssumption(9, 10))
    assert stated_figures(EXPECTED, {}, 2) == EXPECTED


def test_a_client_that_states_no_local_mu_is_taken_by_the_one_it_states():
    """As one under an older murmurfl, or whose operator did not ask for sums: what it states holds by itself."""
    assert stated_figures(EXPECTED, {"a": {"mu-guaranteed": 3.0, "releases": 1}}, 1) == Figures(
        Loss.of(3.0, 3.0), SumAssumption(4, 5)
    )


def test_mu_for_many_honest_clients_is_not_claimed_for_fewer():
    """Clients that do not share sums, or one that is silent, may name fewer than the first needs."""
    statements = {"a": stated(1.0, 7.0711, 50, 60), "b": stated(0.9, 1.2728, 2, 4)}
    found = stated_figures(EXPECTED, statements, 2)
    assert found.sums.min_honest == 2
    assert found.loss.mu == pytest.approx(5.0)  # 1 sqrt(50 / 2)
    silent = stated_figures(EXPECTED, {"a": stated(1.0, 7.0711, 50, 60)}, 2)
    assert silent.sums.min_honest == EXPECTED.sums.min_honest == 4
    assert silent.loss.mu == pytest.approx(math.sqrt(50 / 4))
    alone = stated_figures(Figures(Loss.of(1.0, 2.0), SumAssumption(1, 5)), {"a": stated(1.0, 1.5, 50, 60)}, 2)
    assert alone.loss.mu == 1.5, "never more than the worst case"


def test_a_run_without_sums_states_the_local_mu():
    """Nobody opens its releases, and nobody promised that helpers are honest."""
    assert stated_figures(Figures(Loss.of(1.0)), {"a": stated(3.0, 9.0, 2)}, 1) == Figures(Loss.of(9.0))


@pytest.mark.parametrize(
    ("statement", "named"), [(stated(1.1, 2.0, 4), "mu = 1,"), (stated(1.0, 2.1, 4), "worst-case mu = 2,")]
)
def test_either_figure_above_what_a_run_says_is_no_result(statement, named):
    refuse_untrue(EXPECTED, {"a": stated(1.0, 2.0, 4)})
    refuse_untrue(EXPECTED, {"a": {**statement, "releases": 0}})
    with raises(ConfigurationError, "mismatch", match=named):
        refuse_untrue(EXPECTED, {"a": statement})


class TooFew(Mu2Method):
    """Says h and has clients whose noise is for more."""

    name = "too-few"

    def client(self, gradients, samples, policy, ledger, keys, **options):
        policy = replace(policy, sums=SumAssumption(4, 4))
        return super().client(gradients, samples, policy, ledger, keys, **options)


class Plain(Mu2Method):
    """Says that its clients hide in sums; their noise is a share, and they send it by itself."""

    name = "plain"

    def client(self, gradients, samples, policy, ledger, keys, **options):
        weak = replace(policy, trust="untrusted-server", sums=SumAssumption(1, 1), mu=2.0, budget_mu=None)
        return super().client(gradients, samples, weak, ledger, keys, **options)


class Careless(Mu2Method):
    """Its clients take smaller sums than its policy, and the run, say."""

    name = "careless"

    def client(self, gradients, samples, policy, ledger, keys, **options):
        return super().client(
            gradients, samples, replace(policy, sums=replace(policy.sums, min_cohort=2)), ledger, keys, **options
        )


@pytest.mark.parametrize("strategy", ["TooFew", "Plain", "Careless"])
def test_a_method_cannot_say_more_than_its_clients_do(strategy, monkeypatch, request):
    monkeypatch.setitem(__import__("sys").modules, __name__, request.module)
    with raises(ConfigurationError, "mismatch", match="There is no result"):
        run_cohort(replace(SUMS, strategy=NAME + strategy))


class Counted(Mu2Method):
    """Its policy rests on more honest clients than the run is told."""

    name = "counted"

    def policy(self, problem, samples):
        return replace(super().policy(problem, samples), sums=SumAssumption(3, 3))


def test_a_runs_honest_number_is_its_policies(monkeypatch, request):
    monkeypatch.setitem(__import__("sys").modules, __name__, request.module)
    config = replace(SUMS, strategy=f"{NAME}Counted")
    assert (config.sums.min_honest, config.sums.min_cohort) == (2, 4)
    counted = run_cohort(config)
    assert (counted.min_honest, counted.min_cohort) == (3, 3)
    assert "if one helper and 3 clients of each sum are honest" in counted.guarantee.sentence
    assert counted.mu_local == pytest.approx(3**0.5)


@pytest.fixture(scope="module")
def result():
    return run_cohort(SUMS)


def test_a_run_says_both_figures_and_what_the_better_one_rests_on(result):
    local = 2**0.5
    assert result.mu == pytest.approx(1.0)
    assert (result.mu_local, result.min_honest, result.min_cohort) == (pytest.approx(local), 2, 4)
    assert result.epsilon_local == pytest.approx(gdp_epsilon(local, 1e-5))
    sentence = result.guarantee.sentence
    assert "if one helper and 2 clients of each sum are honest" in sentence
    assert f"mu = {rounded_up(local)}, epsilon = {rounded_up(result.epsilon_local)} in the worst case" in sentence


def test_everything_that_a_run_leaves_has_both(result, tmp_path):
    document = json.loads(json.dumps(write_record(result, tmp_path)))
    figures = {key: document[key] for key in ("mu_local", "epsilon_local", "min_honest", "min_cohort", "helpers")}
    assert figures == {
        "mu_local": result.mu_local,
        "epsilon_local": result.epsilon_local,
        "min_honest": 2,
        "min_cohort": 4,
        "helpers": 2,
    }
    assert document["privacy"]["mu_local"] == result.mu_local
    assert {entry["closed"] for entry in document["per_round"]} == {""}
    summary = "\n".join(summary_lines(Outcome.model_validate(document), tmp_path))
    assert f"{rounded_up(result.mu_local)} in the worst case" in summary
    assert "1 of 2 helpers and 2 clients of each sum" in summary
    assert CliRunner().invoke(cli, ["report", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "ε would be in the worst case" in page
    assert rounded_up(result.epsilon_local) in page


def test_under_another_trust_there_is_one_figure_and_no_word_of_sums(tmp_path):
    plain = simulate(num_rounds=2)
    document = plain.outcome.document()
    assert [document[key] for key in ("mu_local", "epsilon_local", "min_honest", "min_cohort", "helpers")] == [None] * 5
    summary = "\n".join(summary_lines(Outcome.model_validate(document), tmp_path))
    assert "worst case" not in summary
    assert "sums" not in summary
    assert RoundLine.of(plain.progress[-1], "exact").epsilon_worst_case == ""


def test_every_round_says_and_logs_both(result):
    last = result.progress[-1]
    assert f"epsilon {rounded_up(result.epsilon)} or {rounded_up(result.epsilon_local)} (whole run)" in str(
        RoundLine.of(last, "exact")
    )
    logged = {}

    class Kept:
        def log(self, values, step):
            logged.update(values)

    Tracking([Kept()]).round(last)
    assert (logged[EPSILON], logged[EPSILON_LOCAL]) == (result.epsilon, result.epsilon_local)


def test_real_clients_word_is_the_runs_guarantee():
    """On the in-process grid, whose clients answer as real ones do; the real thing is in tests/deployment."""
    grid = InProcessGrid(client_app.app, 6, SUMS.to_mapping())
    found = run_experiment(grid, SUMS, deployed=True)
    assert {one["mu-local"] for one in found.statements.values()} == {found.mu_local}
    assert found.min_honest == min(one["min-honest"] for one in found.statements.values()) == 2
    assert "under masks, by its own account" in found.guarantee.sentence
    assert "4 of 4 clients say of themselves" in found.guarantee.sentence


def test_an_epsilon_of_nothing_is_nothing():
    assert epsilon_of(None, 1e-5) is None
    assert epsilon_of(float("inf"), 1e-5) == float("inf")
