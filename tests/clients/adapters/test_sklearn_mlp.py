"""Perceptrons of scikit-learn: its own steps, its own predictions, and a refusal by name of what cannot be kept."""

import numpy as np
import pytest
from murmurfl.clients import LinearEstimator, MLPEstimator, private_client_app
from murmurfl.clients.adapters.sklearn_model import estimator_model
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import FullBatch
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor

from tests.harness.grid import NodesGrid

pytestmark = [
    pytest.mark.usefixtures("no_result_folder"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

FEATURES, STEP = 4, 1e-3
GENERATOR = np.random.Generator(np.random.Philox(key=83))
INPUTS = GENERATOR.normal(size=(40, FEATURES))
TARGETS = {"two": GENERATOR.integers(2, size=40), "three": GENERATOR.integers(3, size=40), "numbers": INPUTS[:, 0] ** 2}


def made(kind, activation="relu", **options):
    settings = {"hidden_layer_sizes": (5, 3), "activation": activation, "random_state": 1, "alpha": 0.0, **options}
    if kind == "numbers":
        return MLPEstimator(MLPRegressor(**settings), FEATURES, bounds=(0.0, 9.0))
    return MLPEstimator(MLPClassifier(**settings), FEATURES, classes=np.unique(TARGETS[kind]))


def values(model):
    return [array.numpy() for array in model.initial_arrays().values()]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
@pytest.mark.parametrize("kind", TARGETS)
def test_the_mean_gradient_is_the_step_of_scikit_learn(kind, activation):
    plain = {"solver": "sgd", "momentum": 0.0, "learning_rate_init": STEP, "shuffle": False, "batch_size": 40}
    model, point = made(kind, activation, **plain), None
    point = values(model)
    theirs, classes = clone(model.estimator), {} if kind == "numbers" else {"classes": np.unique(TARGETS[kind])}
    theirs.partial_fit(INPUTS, TARGETS[kind], **classes)
    theirs.coefs_, theirs.intercepts_ = [one.copy() for one in point[:3]], [one.copy() for one in point[3:]]
    theirs._optimizer.params = theirs.coefs_ + theirs.intercepts_
    theirs._optimizer.velocities = [np.zeros_like(one) for one in theirs._optimizer.params]
    theirs.partial_fit(INPUTS, TARGETS[kind])
    after = [*theirs.coefs_, *theirs.intercepts_]
    stepped = np.concatenate([(one - other).ravel() for one, other in zip(point, after, strict=True)]) / STEP
    rows = model.gradients(point, (INPUTS, TARGETS[kind]))
    assert np.abs(stepped).max() > 0.01
    assert rows.mean(axis=0) == pytest.approx(stepped, abs=1e-10)


@pytest.mark.parametrize("kind", TARGETS)
def test_fitted_predicts_from_the_arrays_alone_and_starts_anew_from_them(kind):
    model = made(kind)
    scores = model.gradients.activations(values(model), INPUTS)[-1]
    found = model.fitted(model.initial_arrays())
    if kind == "numbers":
        assert found.predict(INPUTS) == pytest.approx(scores[:, 0])
    elif kind == "two":
        assert found.predict_proba(INPUTS)[:, 1] == pytest.approx(1 / (1 + np.exp(-scores[:, 0])))
    else:
        assert (found.predict(INPUTS) == scores.argmax(axis=1)).all()
    again = MLPEstimator(found, FEATURES, model.classes, model.bounds)
    assert all(map(np.array_equal, values(again), values(model)))
    assert not hasattr(model.estimator, "coefs_")


def test_a_row_depends_on_its_own_sample():
    """A label that is no class, or an input that is not finite, spoils its own row and no other bit."""
    model = made("three")
    point, labels = values(model), TARGETS["three"]
    clean = model.gradients(point, (INPUTS, labels))
    for value, label in ((None, 3), (None, -1), (np.nan, 0), (np.inf, 1)):
        inputs, found = INPUTS.copy(), labels.copy()
        found[7] = label
        if value is not None:
            inputs[7, 0] = value
        rows = model.gradients(point, (inputs, found))
        assert not np.isfinite(rows[7]).all()
        assert np.array_equal(np.delete(rows, 7, 0), np.delete(clean, 7, 0))


def test_full_batches_with_next_to_no_noise_learn_what_no_line_separates():
    inputs = GENERATOR.uniform(-1, 1, size=(200, 2))
    labels = (inputs[:, 0] * inputs[:, 1] > 0).astype(int)
    model = MLPEstimator(MLPClassifier(hidden_layer_sizes=16, activation="tanh", random_state=3), 2, classes=[0, 1])

    def samples(context):
        own = slice(50 * context.node_config["partition-id"], 50 * (context.node_config["partition-id"] + 1))
        return inputs[own], labels[own]

    app = private_client_app(model, samples=samples, mu=1e4, rounds=60, clip_norm=2.0)
    strategy = FullBatch(num_clients=4, clients_per_round=4, learning_rate=1.0, momentum=0.9)
    result = strategy.start(NodesGrid(app, 4), model.initial_arrays(), num_rounds=60)
    assert model.fitted(result.arrays).score(inputs, labels) > 0.9
    assert app.steps()["learning_rate"] > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLPEstimator(LinearRegression(), 4, classes=[0, 1]), "got LinearRegression"),
        (lambda: MLPEstimator(MLPClassifier, 4, classes=[0, 1]), "Expected MLPClassifier(...)"),
        (lambda: MLPEstimator(MLPClassifier(), 4), "classes and no bounds with MLPClassifier"),
        (lambda: MLPEstimator(MLPRegressor(), 4, classes=[0, 1]), "bounds and no classes with MLPRegressor"),
        (lambda: MLPEstimator(MLPClassifier(), 4, classes=[1, 1]), "Expected at least two classes"),
        (lambda: MLPEstimator(MLPClassifier(alpha=0.1), 4, classes=[0, 1]), "FullBatch(l2=...)"),
        (lambda: MLPEstimator(MLPClassifier(early_stopping=True), 4, classes=[0, 1]), "choose the rounds"),
        (lambda: MLPEstimator(MLPClassifier(activation="selu"), 4, classes=[0, 1]), "relu, got 'selu'"),
        (lambda: estimator_model(MLPClassifier()), "give MLPEstimator(MLPClassifier(...)"),
        (lambda: LinearEstimator(LinearRegression(), 4, [0, 1]), "MLPRegressor(hidden_layer_sizes=())"),
        (lambda: made("two").fitted(made("three").initial_arrays()), "Expected arrays of shapes"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_takes_its_place(make, words):
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert words in str(refused.value)


def test_a_perceptron_without_hidden_layers_is_least_squares():
    model = MLPEstimator(MLPRegressor(hidden_layer_sizes=()), FEATURES, bounds=(0.0, 9.0))
    rows = model.gradients([np.zeros((FEATURES, 1)), np.zeros(1)], (INPUTS, TARGETS["numbers"]))
    assert rows == pytest.approx(-np.c_[INPUTS, np.ones(40)] * TARGETS["numbers"][:, None])
