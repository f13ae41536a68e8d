"""The practical preset's step: tuned where noise limits it, and no longer than the model's smoothness allows."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data.features.gradients import ORIENTED_GRADIENTS_NORM, oriented_gradients
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.methods import METHODS
from murmurfl.app.methods.presets import smoothness
from murmurfl.app.models import make_model
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.algorithms import ALGORITHMS


def test_runs_take_the_clients_half_from_the_registry_of_algorithms():
    made = {name: (method.client_type, method.strategy_type.__name__) for name, method in METHODS.items()}
    assert made.pop("auto")
    assert made == {name: (ALGORITHMS[name].client, ALGORITHMS[name].strategy) for name in made}
    assert set(ALGORITHMS) - set(made) == {"fedavg", "statistics"}


STRATEGIES = {
    "mu2": RunConfig(strategy="mu2"),
    "mu2, few rounds": RunConfig(strategy="mu2", batch_size=16),
    "delayed-momentum, 2 of 10": RunConfig(strategy="delayed-momentum", clients_per_round=2, batch_size=16),
    "noisy-sgd": RunConfig(strategy="noisy-sgd"),
    "isrl-dp": RunConfig(strategy="isrl-dp"),
    "isrl-dp-accelerated": RunConfig(strategy="isrl-dp-accelerated"),
    "trusted-mu2": RunConfig(strategy="trusted-mu2"),
    "trusted-sgd": RunConfig(strategy="trusted-sgd"),
}
MUS = (1.0, 4.0, 16.0, 100.0, 1e4)
SEEDS = (1, 2, 3)
FALL = 0.02
"""Most that the mean accuracy of three seeds may fall by, from one mu to any larger one: noise between seeds. With
seven groups of three seeds it was 0.006 at most; without the bound on steps it was 0.075 to 0.675 (three groups)."""


def falls(config: RunConfig) -> float:
    """The largest fall of the mean accuracy from one mu to a larger one."""
    accuracies = [
        np.mean([run_cohort(replace(config, mu=mu, seed=seed, evaluate_every=10**6)).accuracy for seed in SEEDS])
        for mu in MUS
    ]
    return max(best - later for best, later in zip(np.maximum.accumulate(accuracies), accuracies, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("label", STRATEGIES)
def test_accuracy_does_not_fall_as_mu_grows(label):
    assert falls(STRATEGIES[label]) < FALL


def step(config: RunConfig, num_rounds: int, num_features: int) -> float:
    model = SoftmaxRegression(num_features, 10)
    return METHODS[config.strategy].preset(config, num_rounds, model).overridden(config).learning_rate


def test_steps_are_the_tuned_ones_at_the_sizes_and_mus_they_were_tuned_for():
    images = RunConfig(task="mnist", num_clients=100, clients_per_round=100, batch_size=12)
    edges = replace(images, features="oriented-gradients")
    for mu in (0.25, 1.0, 4.0):
        assert step(RunConfig(mu=mu), 17, 64) == 58.0 * mu / 17**2
        assert step(RunConfig(mu=mu, strategy="noisy-sgd"), 17, 64) == pytest.approx(0.8 * mu * (10 / 17) ** 0.5)
        assert step(replace(images, mu=mu), 50, 784) == 110.0 * mu**0.5 / 50**2
        assert step(replace(edges, mu=mu), 50, 392) == 700.0 * mu / 50**2
    many = replace(images, mu=4.0, clients_per_round=50, batch_size=1)
    assert step(many, 1200, 784) == 110.0 * 2 / 1200**2


def test_a_step_is_for_the_noise_in_a_sum_and_not_for_each_clients_share():
    """One noise of a trusted server for m clients is that of clients with mu sqrt(m) each."""
    trusted = RunConfig(strategy="trusted-mu2", task="mnist", num_clients=100, clients_per_round=25, mu=0.25)
    for features in ("pixels", "oriented-gradients"):
        config = replace(trusted, features=features)
        assert step(config, 200, 784) == step(replace(config, strategy="mu2", mu=1.25), 200, 784)


@pytest.mark.parametrize(
    "strategy", ["mu2", "noisy-sgd", "isrl-dp", "isrl-dp-accelerated", "trusted-mu2", "trusted-sgd"]
)
@pytest.mark.parametrize("task", ["digits", "mnist"])
@pytest.mark.parametrize("num_rounds", [3, 17, 100, 1200])
def test_a_step_grows_with_mu_up_to_a_bound_that_shrinks_with_the_smoothness(strategy, task, num_rounds):
    base = RunConfig(strategy=strategy, task=task)
    steps = [step(replace(base, mu=mu), num_rounds, 64) for mu in (0.5, 1.0, 4.0, 100.0, 1e6, 1e9)]
    assert steps == sorted(steps)
    assert steps[-1] == steps[-2]
    assert steps[0] < steps[-1] or num_rounds == 3  # where so few rounds are bounded from the start
    steeper = step(replace(base, mu=1e9), num_rounds, 4 * 64 + 3)  # L = (features + 1) / 2 is four times as large
    assert steeper == pytest.approx(steps[-1] / 4)


def test_the_smoothness_of_softmax_regression_bounds_every_samples_gradient_and_is_nearly_reached():
    generator = np.random.default_rng(0)
    features = generator.random((50, 9)).astype(np.float32)
    features[0] = 1.0  # the longest sample there can be
    labels = generator.integers(2, size=50)
    model = SoftmaxRegression(9, 2)
    bound = smoothness(RunConfig(), model)
    assert bound == 5.0
    rates = []
    for scale in (1e-3, 0.1, 1.0):
        for _ in range(100):
            start, end = (
                [generator.normal(size=shape) * scale for shape in model.shapes] for _ in range(2)
            )  # near 0 both classes are as likely: there the loss is steepest
            change = np.linalg.norm(model(start, (features, labels)) - model(end, (features, labels)), axis=1)
            way = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(start, end, strict=True)))
            rates.append(change.max() / way)
    assert max(rates) <= bound
    # Along its own gradient at zero a sample of full length changes as fast as L says.
    direction = model([np.zeros(shape) for shape in model.shapes], (features[:1], labels[:1]))[0] * 1e-4
    moved = [direction[:18].reshape(2, 9), direction[18:]]
    change = np.linalg.norm(model(moved, (features[:1], labels[:1]))[0] - direction * 1e4)
    assert change / np.linalg.norm(direction) == pytest.approx(bound, rel=1e-3)


def test_oriented_gradients_have_the_norm_that_their_smoothness_rests_on():
    images = np.random.default_rng(1).integers(256, size=(20, 28, 28), dtype=np.uint8)
    norms = np.linalg.norm(oriented_gradients(images), axis=1)
    assert norms == pytest.approx(ORIENTED_GRADIENTS_NORM)
    assert smoothness(RunConfig(task="mnist", features="oriented-gradients"), SoftmaxRegression(392, 10)) == 8.5


def test_linear_models_say_themselves_how_smooth_they_are_and_networks_get_the_softmax_regressions_figure():
    for name in ("logistic", "nonconvex-logistic"):
        config = RunConfig(task="synthetic-logistic", model=name)
        model = make_model(name, 100, 2, 12.0)
        assert smoothness(config, model) == model.smoothness
    assert smoothness(RunConfig(task="synthetic-logistic"), SoftmaxRegression(100, 2)) == (144 + 1) / 2
    network = make_model("mlp", 64, 10, 12.0)
    assert smoothness(RunConfig(model="mlp"), network) == smoothness(RunConfig(), SoftmaxRegression(64, 10))


def clouds(length):
    """Three clouds with a constant feature, in rows no longer than ``length``, as a user's function gives them."""

    class Clouds(Task):
        constant = True
        feature_bound = length

        def load(self, config, root):
            generator = np.random.Generator(np.random.Philox(5))
            labels = generator.integers(0, 3, 900)
            rows = 0.4 * generator.standard_normal((900, 6)) + generator.standard_normal((3, 6))[labels]
            rows[:, 0] = 1.0
            rows *= length / np.linalg.norm(rows, axis=1, keepdims=True)
            return Dataset(rows[:600].astype(np.float32), labels[:600], rows[600:].astype(np.float32), labels[600:], 3)

    return Clouds()


SHORT, LONG = clouds(0.01), clouds(1000.0)
HERE = __name__
OWN = {"num-clients": 10, "clients-per-round": 10, "mu": 4.0}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full-batch"},
        {"strategy": "mu2", "batch-size": 15},
        {"strategy": "noisy-sgd", "batch-size": 15},
        {"strategy": "isrl-dp-accelerated", "batch-size": 15},
        {"strategy": "one-shot"},
        {"strategy": "trusted-mu2", "batch-size": 15},
        {"strategy": "tree-momentum", "batch-size": 15},
        {"strategy": "online", "batch-size": 15},
        {"strategy": "shuffled", "num-rounds": 2, "strategy.variant": "dp-shuffleg"},
    ],
    ids=lambda settings: settings["strategy"],
)
def test_presets_are_the_same_whatever_unit_rows_are_in(settings):
    short, long = (
        run_cohort(RunConfig.from_mapping({**OWN, **settings, "task": f"{HERE}:{name}"})) for name in ("SHORT", "LONG")
    )
    assert short.accuracy == pytest.approx(long.accuracy, abs=0.02)  # the grid of noise differs
    assert short.accuracy > 0.7


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"strategy": "online", "model": "logistic", "clip-unit": "contractive"}, 1.0),
        ({"strategy": "online", "model": "logistic"}, 4.0),  # of whole updates: losses of scores are flat far away
        ({"strategy": "online", "model": "ridge"}, 1.0),
        ({"strategy": "shuffled", "model": "ridge"}, 1.0),
    ],
)
def test_steps_of_linear_models_keep_to_their_smoothness_in_any_unit(settings, most):
    made = []
    for bound in (0.01, 1000.0):
        task = {"task": "synthetic-logistic", "partition": "own", "feature-bound": bound}
        batch = {"batch-size": 2} if settings["strategy"] == "online" else {}
        config = RunConfig.from_mapping({**task, **settings, **batch})
        model = make_model(config.model, 100, 2, bound)
        values = METHODS[config.strategy].settled(config, 10, model, [8] * 10)
        made.append((values.clip_norm / bound, values.learning_rate * model.smoothness))
    assert made[0] == pytest.approx(made[1])
    assert 0.1 < made[0][1] <= most


def rows_of_ten(config):
    generator = np.random.Generator(np.random.Philox(6))
    rows, labels = generator.standard_normal((120, 4)), generator.integers(0, 2, 120)
    rows *= 10 / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:80], labels[:80], rows[80:], labels[80:]


def rows_of_one(config):
    return rows_of_ten(config)


rows_of_one.feature_bound = 1.0


def test_rows_longer_than_what_is_declared_are_cut_to_it_each_by_itself():
    task = {"task": f"{HERE}:rows_of_ten", "num-clients": 4, "clients-per-round": 4}
    whole, cut, by_key = (
        load_dataset(RunConfig.from_mapping(settings))
        for settings in (task, {**task, "task": f"{HERE}:rows_of_one"}, {**task, "feature-bound": 1.0})
    )
    lengths = np.linalg.norm(whole.train_features, axis=1, keepdims=True)
    np.testing.assert_allclose(lengths, 10, rtol=1e-6)
    for data in (cut, by_key):
        np.testing.assert_allclose(data.train_features, whole.train_features / lengths, rtol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(data.test_features, axis=1), 1, rtol=1e-6)
