"""What only a simulation computes: one client alone, regret, gradient norms."""

import json
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.data.loading import load_dataset, load_shards
from murmurfl.app.data.task import Dataset
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.reports.finding import find_runs
from murmurfl.app.runs import simulated_figures as module
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.result import write_record
from murmurfl.app.runs.run_summary import closing_lines, summary_lines
from murmurfl.app.runs.simulate import add_alone
from murmurfl.app.runs.simulated_figures import NOTE, OnlineLosses, alone
from murmurfl.app.settings.run_config import RunConfig
from sklearn.linear_model import LogisticRegression, Ridge
from typer.testing import CliRunner

from tests.app.run_table import GRADIENT_NORMS as SMALL

NAME = f"{__name__}:"
DIGITS = RunConfig(num_rounds=2)


ONE_EACH = {"task": NAME + "one_class_each", "partition": "own", "num-clients": 2, "clients-per-round": 2}
FEW_ROUNDS = {"strategy": "full-batch", "num_clients": 4, "clients_per_round": 4, "num_rounds": 2}


def numbers():
    """A number to regress on."""
    features = np.random.default_rng(1).normal(size=(400, 3)).astype(np.float32)
    labels = features @ np.array([1.0, -2.0, 0.5])
    return Dataset(features[:300], labels[:300], features[300:], labels[300:], num_classes=1)  # type: ignore[arg-type]


def one_class_each():
    """Every client has samples of one class."""
    generator = np.random.default_rng(2)
    labels = generator.integers(0, 2, 300)
    features = (generator.normal(size=(300, 3)) + labels[:, None]).astype(np.float32)
    return Dataset(features[:200], labels[:200], features[200:], labels[200:], 2, client_of=labels[:200])


@pytest.fixture(autouse=True)
def _importable(monkeypatch, request):
    monkeypatch.setitem(__import__("sys").modules, __name__, request.module)
    monkeypatch.setattr(module, "_made", {})


def test_it_is_logistic_regression_on_each_clients_own_samples():
    found = alone(DIGITS)
    data = load_dataset(DIGITS)
    accuracies = {}
    for strength in (1.0, 10.0, 100.0):
        scores = []
        for shard in load_shards(DIGITS, data):
            features, labels = shard[0:10_000]
            norm = np.sqrt(np.square(features).sum(axis=1).mean())
            fitted = LogisticRegression(C=strength, max_iter=1000).fit(features / norm, labels)
            scores.append(fitted.score(data.test_features / norm, data.test_labels))
        accuracies[strength] = np.mean(scores)
    assert found.accuracy == pytest.approx(max(accuracies.values()), abs=0.01)
    assert min(accuracies.values()) < found.accuracy - 0.05, "or the penalty would not have to be chosen"
    assert (found.clients, found.samples, found.auc, found.loss) == (10, pytest.approx(143.8, abs=0.1), None, None)


def test_of_many_clients_twenty_are_tried_that_are_spread_evenly(monkeypatch):
    asked = []
    part = module.Parts.client
    monkeypatch.setattr(module.Parts, "client", lambda parts, number: asked.append(int(number)) or part(parts, number))
    assert alone(RunConfig(num_clients=100, clients_per_round=10, batch_size=1)).clients == 20
    chosen = sorted(set(asked))
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 99, 20)
    assert set(np.diff(chosen)) == {5, 6}


def test_wide_features_are_tried_on_fewer_clients(monkeypatch):
    monkeypatch.setattr(module, "_MOST_VALUES", 1000)
    assert alone(DIGITS).clients == 5


def test_it_is_made_once_for_the_same_data_whatever_noise_method_and_steps(monkeypatch):
    made = []
    real = module._measured
    monkeypatch.setattr(module, "_measured", lambda config: made.append(config) or real(config))
    for config in (DIGITS, replace(DIGITS, mu=0.1), replace(DIGITS, strategy="noisy-sgd", learning_rate=0.5)):
        alone(config)
    assert made == [DIGITS]
    alone(replace(DIGITS, seed=2))  # the samples are split in another way
    alone(replace(DIGITS, num_clients=5, clients_per_round=5))
    alone(replace(DIGITS, training_samples=500))
    alone(replace(DIGITS, partition="unequal"))
    assert len(made) == 5


def test_numbers_are_regressed_on_by_ridge_regression():
    found = alone(
        RunConfig(task=NAME + "numbers", model="ridge", strategy="shuffled", num_clients=4, clients_per_round=4)
    )
    data = numbers()
    fitted = Ridge(alpha=0.01).fit(data.train_features[:75], data.train_labels[:75])
    assert fitted.score(data.test_features, data.test_labels) > 0.99
    assert found.accuracy is None
    assert found.loss < 0.01 * np.square(data.test_labels).mean()


def test_a_client_that_knows_one_class_alone_names_it_always():
    own = {"task": NAME + "one_class_each", "partition": "own", "num_clients": 2, "clients_per_round": 2}
    found = alone(RunConfig(**own))
    assert found.accuracy == pytest.approx(0.5)  # one client names class 0, the other class 1
    assert found.auc == pytest.approx(0.5)


def test_a_model_of_all_and_one_alone_are_judged_in_each_clients_mix_of_classes():
    config = RunConfig.from_mapping({**ONE_EACH, "strategy": "full-batch", "epsilon": 8.0, "num-rounds": 4})
    made = run_cohort(config)
    data, found, single = one_class_each(), made.own_mixes, made.alone
    right = made.predict(data.test_features) == data.test_labels
    by_class = [right[data.test_labels == one].mean() for one in (0, 1)]
    assert (found.worst, found.best) == pytest.approx((min(by_class), max(by_class)))
    assert found.mean == pytest.approx(np.mean(by_class))
    assert found.clients == 2
    assert (single.own_mix, single.own_worst, single.own_best) == (1.0, 1.0, 1.0), "each names its own class"
    assert single.accuracy == pytest.approx(0.5)
    assert replace(made, deployed=True).own_mixes is None, "of real clients nobody learns that"
    assert made.outcome.own_mixes == found


def test_numbers_have_no_mixes_of_classes():
    assert run_cohort(RunConfig(task=NAME + "numbers", model="ridge", **FEW_ROUNDS)).own_mixes is None


def test_samples_that_are_not_finite_count_as_zero(monkeypatch):
    data = load_dataset(DIGITS)
    features = data.train_features.copy()
    features[::50] = np.nan
    monkeypatch.setattr(module, "load_dataset", lambda config: replace(data, train_features=features))
    assert alone(DIGITS).accuracy > 0.85


def test_networks_have_none_and_it_is_said_why():
    found = alone(replace(DIGITS, model="mlp"))
    assert (found.accuracy, found.loss, found.clients) == (None, None, 0)
    assert "linear models" in found.reason


@pytest.fixture(scope="module")
def result():
    return run_cohort(DIGITS)


def test_of_a_result_it_is_made_where_it_is_looked_at_and_never_of_real_clients(result, monkeypatch):
    monkeypatch.setattr(module, "_measured", lambda config: pytest.fail("not asked for"))
    again = replace(result)
    assert again.outcome.alone is None
    assert again.accuracy is not None
    deployed = replace(result, deployed=True)
    assert deployed.alone is None
    assert deployed.outcome.alone is None


def test_files_of_real_clients_and_of_other_programs_stay_as_they_are(result, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_measured", lambda config: pytest.fail("of somebody's records"))
    for engine in ("real-nodes", None):
        (tmp_path / "result.json").write_text(json.dumps({**result.outcome.document(), "engine": engine}))
        before = (tmp_path / "result.json").read_bytes()
        assert add_alone(tmp_path).alone is None
        assert (tmp_path / "result.json").read_bytes() == before


def test_it_stands_in_file_summary_list_and_report(result, tmp_path):
    folder = tmp_path / "run"
    write_record(result, folder)
    outcome = add_alone(folder)
    assert outcome == Outcome.read(folder)
    assert outcome.alone == result.alone
    assert outcome.alone.note == NOTE
    said = f"{100 * outcome.alone.accuracy:.1f} %"
    (line,) = (line for line in summary_lines(outcome, folder) if "one alone" in line)
    assert said in line
    assert "not private" in line
    (found,) = find_runs([tmp_path])
    assert found.document()["accuracy_alone"] == outcome.alone.accuracy
    assert said in CliRunner().invoke(cli, ["list", str(tmp_path)]).stdout
    assert CliRunner().invoke(cli, ["report", str(folder)]).exit_code == 0
    (page,) = (path.read_text() for path in (folder / "report").glob("*.html"))
    assert "one client alone, without noise, not private" in page
    assert said in page
    assert outcome.accuracy < outcome.alone.accuracy
    assert "One client alone does better than this federation" in page


def told(outcome, accuracy, **more):
    known = {"note": NOTE, "clients": 10, "samples": 1.0, "accuracy": accuracy}
    return " ".join(closing_lines(outcome.model_copy(update={"alone": module.Alone(**known), **more})))


def test_whoever_does_better_alone_is_told_and_nobody_else(result):
    outcome, better = result.outcome, "One client alone does better than this federation"
    assert better not in told(outcome, outcome.accuracy)
    said = told(outcome, outcome.accuracy + 0.01)
    assert f"{better}: add clients, let the server see sums only (trust=secure-aggregation), allow a larger" in said
    sums = outcome.privacy.model_copy(update={"trust": "secure-aggregation"})
    assert f"{better}: add clients, allow a larger epsilon" in told(outcome, 1.0, privacy=sums)


LOGISTIC = {
    "strategy": "online", "task": "synthetic-logistic", "partition": "own", "model": "logistic", "num-clients": 4,
    "clients-per-round": 4, "batch-size": 5, "task.samples": 400, "task.features": 12,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MURMURFL_CACHE", str(tmp_path / "cache"))


def test_regret_is_against_the_best_of_each_round_and_the_best_of_all():
    experiment = prepare(RunConfig.from_mapping(LOGISTIC))
    model, shards = experiment.model, experiment.shards
    losses = OnlineLosses(model, shards, 5, 20, "test")
    generator = np.random.Generator(np.random.Philox(key=43))
    points = generator.normal(size=(20, 12))
    for r, point in enumerate(points):
        losses.record(r, [point])
    losses.record(20, [points[0]])
    document = losses.document()
    rounds = [
        tuple(np.concatenate(c) for c in zip(*(s[5 * r : 5 * r + 5] for s in shards), strict=True)) for r in range(20)
    ]
    own = [model.evaluate([point], batch)[0] for point, batch in zip(points, rounds, strict=True)]
    assert document["rounds"] == list(range(1, 21))
    assert document["cumulative-loss"] == pytest.approx(5 * np.cumsum(own))
    # No fixed point and no guess for a round beats the optima that were subtracted.
    best = min(np.sum([model.evaluate([c * p], batch)[0] for batch in rounds]) for p in points for c in (0.1, 1, 5))
    assert document["cumulative-loss"][-1] - document["static-regret"][-1] <= 5 * best + 1e-6
    assert document["dynamic-regret"][-1] >= document["static-regret"][-1]
    assert document["dynamic-regret"][-1] <= document["cumulative-loss"][-1] + 1e-9
    del losses.losses[3]
    assert losses.document() is None


def test_the_gradient_norm_is_told_on_request():
    config = RunConfig.from_mapping({**SMALL, "strategy": "reduced-tree-momentum"})
    result = run_cohort(config)
    task, model = result.experiment.data, result.experiment.model
    last = np.linalg.norm(model.mean_gradient(result.parameters, (task.train_features, task.train_labels)))
    assert result.gradient_norms["rounds"][-1] == result.experiment.num_rounds == 60
    assert result.gradient_norms["values"][-1] == pytest.approx(last)
    assert run_cohort(RunConfig(num_rounds=2, checkpoint=False)).gradient_norms is None
