"""A cohort over several workers gives the model of one, to the last bit; here all workers are this process."""

import contextlib
import logging
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import run_cohort, workers
from murmurfl.app.engines.loopback import free_port
from murmurfl.app.engines.pool import HerePool, checked_workers, computing_alone, opened_pool
from murmurfl.app.engines.workers import WorkerClients
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.planning import private_search as search
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import baseline_clients as delayed_momentum
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.release.clipping import ObservedFigures, TrainingObserver
from typer.testing import CliRunner

from tests.app.engines.test_engines import assert_same_result as assert_same
from tests.app.engines.test_engines import over_workers as over
from tests.app.plain import simulate
from tests.app.run_table import BASE, RUNS
from tests.harness.errors import raises


@pytest.mark.parametrize("workers", [1, 2])
def test_every_release_is_its_own_clients_where_kinds_differ(workers):
    """A sum comes in the order of kinds: told by the order of the question, clients would get others' releases."""
    changes = {
        "partition": "dirichlet",
        "num_clients": 13,
        "clients_per_round": 9,
        "allow_exhaustion": True,
        "seed": 1030,
    }
    config = replace(BASE, num_rounds=10, model="mlp", **changes)
    assert_same(run_cohort(config), over(config, workers))


def test_gradients_that_follow_from_what_all_clients_noted_are_the_same(monkeypatch):
    """Of clients that a worker does not look at it knows no notes: their points would be missing from its products."""
    summed, made = delayed_momentum.stacked_gradients, []

    def noting(gradients, points, *others):
        made.append(len(points))
        return summed(gradients, points, *others)

    monkeypatch.setattr(delayed_momentum, "stacked_gradients", noting)
    config = replace(BASE, strategy="delayed-momentum", num_clients=8, clients_per_round=4, num_rounds=8, batch_size=1)
    alone, alone_points = run_cohort(config), made.copy()
    made.clear()
    assert_same(alone, over(config, 2))
    for points in alone_points:
        assert made[:2] == [points] * 2
        del made[:2]


def test_models_whose_rows_do_not_stand_alone_are_asked_for_all_clients(monkeypatch):
    monkeypatch.setattr(SoftmaxRegression, "rows_stand_alone", False)
    config = replace(BASE, lost_replies=0.2)
    assert_same(run_cohort(config), over(config, 3))


def test_a_sum_that_lacks_one_count_of_one_client_would_be_noticed(monkeypatch):
    expected, gathered = run_cohort(BASE), workers._gathered

    def forgetful(*arguments, **options):
        answer = gathered(*arguments, **options)
        answer.parts[0].counts[0] += 1
        return answer

    monkeypatch.setattr(workers, "_gathered", forgetful)
    with pytest.raises(AssertionError):
        assert_same(expected, over(BASE, 2))


def test_a_client_is_always_the_same_workers_and_each_is_asked_for_its_own(monkeypatch):
    monkeypatch.setattr(SoftmaxRegression, "rows_stand_alone", True)
    asked = []

    class Watched(HerePool):
        def call(self, worker, function, *arguments):
            if function is workers.answer_part:
                asked.append((worker, set(arguments[0].clients.tolist())))
            return super().call(worker, function, *arguments)

    run_experiment(WorkerClients(prepare(BASE), Watched(3)), BASE)
    assert len(asked) > BASE.num_rounds
    assert all(number % 3 == worker for worker, numbers in asked for number in numbers)


def test_a_worker_sends_one_sum_and_three_numbers_a_client():
    answers = []

    class Watched(HerePool):
        def completed(self, calls):
            for call, made in super().completed(calls):
                answers.append(made)
                yield call, made

    run_experiment(WorkerClients(prepare(BASE), Watched(2)), BASE)
    of_rounds = [made for made in answers if isinstance(made, workers._Answer)]
    assert len(of_rounds) == 2 * BASE.num_rounds
    assert all(len(made.parts) == 1 and not made.replies for made in of_rounds)


def test_clients_forget_what_was_aggregated_before_their_next_release():
    pool = HerePool(2)
    experiment = prepare(replace(BASE, clients_per_round=10))
    experiment.strategy().start(WorkerClients(experiment, pool), experiment.initial_arrays(), num_rounds=3)
    for worker, state in enumerate(pool._states):
        assert set(state["sent"]) <= {str(number) for number in range(worker, 10, 2)}
        assert len(state["sent"]) == 5, "those of the last round, and no others"


def test_what_clients_warn_of_is_said_once_here(caplog):
    class Talking(HerePool):
        def completed(self, calls):
            for call, made in super().completed(calls):
                if isinstance(made, workers._Answer):
                    made.messages.append("Something is odd.")
                yield call, made

    with caplog.at_level(logging.WARNING):
        run_experiment(WorkerClients(prepare(BASE), Talking(2)), BASE)
    assert caplog.text.count("Something is odd.") == 1


def test_figures_of_clipping_are_united_as_if_observed_in_one_place():
    draws = np.random.Generator(np.random.Philox(key=1))
    ratios = [draws.standard_gamma(2.0, 3) for _ in range(7)]
    ratios[2][1] = np.nan

    def observed(chosen):
        observer = TrainingObserver()
        for one in chosen:
            observer.add(one, 1.0)
        return observer.figures()

    united = ObservedFigures.united([observed(ratios[:3]), observed(ratios[3:4]), observed(ratios[4:])])
    assert united == observed(ratios)
    assert "medians" not in united.document()
    assert len(united.entries()) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "cohort", "--workers", "0"], "workers >= 1, got 0"),
        (["--engine", "ray", "--workers", "2"], "engine 'cohort' for workers"),
        (["--engine", "inprocess", "--ray", "auto"], "engine 'cohort' for workers"),
        (["--engine", "cohort", "--ray", "somewhere"], "HOST:PORT"),
        (["--engine", "cohort", "--ray", "local"], "leave it out"),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, said, tmp_path):
    result = CliRunner().invoke(cli, ["run", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert said in result.stderr.replace("\n", " ")


def test_an_address_where_nobody_answers_is_refused_at_once():
    with raises(ConfigurationError, "unreachable", match="nobody answers there"):
        run_cohort(BASE, workers=2, ray_address=f"127.0.0.1:{free_port()}", say=print)


def test_python_refuses_the_same():
    with raises(ConfigurationError, "out-of-range", "workers"):
        simulate(workers=-1)
    with raises(ConfigurationError, "conflict", "engine"):
        simulate(engine="inprocess", workers=2)
    checked_workers(None, "ray")


def test_one_worker_is_this_process_and_spare_ones_never_start():
    said = []
    with opened_pool(5, most=1, of="clients", say=said.append) as pool:
        assert isinstance(pool, HerePool)
    assert said == ["1 of 5 workers are enough: there are 1 clients."]
    config = RunConfig(num_clients=1, clients_per_round=1, num_rounds=2, checkpoint=False)
    assert_same(run_cohort(config), run_cohort(config, workers=1))


def test_idle_workers_take_whole_tasks_with_late_arguments():
    made, finished = [], []

    def tasks():
        for number in range(5):
            made.append(number)
            yield (number,)

    for number, square in HerePool(2).each(lambda state, value: value**2, tasks()):
        assert square == number**2
        assert len(made) <= len(finished) + 3
        finished.append(number)
    assert sorted(finished) == list(range(5))


def test_computing_alone_puts_back_what_it_changed():
    logger = logging.getLogger("flwr")
    before = logger.level
    with computing_alone():
        assert logger.level == logging.ERROR
    assert logger.level == before


@pytest.mark.parametrize("rows_stand_alone", [False, True])
def test_a_search_over_workers_gives_the_same_ledgers(rows_stand_alone, monkeypatch):
    monkeypatch.setattr(SoftmaxRegression, "rows_stand_alone", rows_stand_alone)
    config = RunConfig(num_clients=5, clients_per_round=4, num_rounds=3, batch_size=4, checkpoint=False, epsilon=8.0)
    candidates = [{"learning_rate": 0.5}, {"learning_rate": 2.0}]
    alone = search.search(config, candidates)

    @contextlib.contextmanager
    def here(*arguments, **options):
        yield HerePool(3)

    monkeypatch.setattr(search, "opened_pool", here)
    spread = search.search(config, candidates)
    assert_same(alone.result, spread.result)
    assert (alone.trials, alone.chosen, alone.spent) == (spread.trials, spread.chosen, spread.spent)
    assert alone.guarantee == spread.guarantee
    assert alone.spent == pytest.approx(config.mu)


def test_an_unexpected_refusal_ends_the_run_without_changing_bits(monkeypatch):
    """The bug that would be: products of another shape than in one process, and nobody is told."""
    monkeypatch.setattr(Experiment, "shortage", None)
    with raises(ConfigurationError, "refused", match="one refused"):
        over(RUNS["mu2, refusals"].config, 3)
