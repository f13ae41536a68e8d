"""One strange record changes its own contribution and nothing else, through every adapter of a real client."""

import numpy as np
import pytest
from murmurfl.clients import JaxModel, Label, LinearEstimator, MLPEstimator, Part, Schema
from murmurfl.clients.adapters.function_model import function_client_model
from murmurfl.clients.adapters.jax_model import jax_client_model
from murmurfl.clients.adapters.per_sample_gradients import CarefulGradients, isolate
from murmurfl.clients.adapters.sklearn_model import estimator_model
from murmurfl.clients.records.client_records import Records, items_of

from tests.harness import own_gradients

GENERATOR = np.random.Generator(np.random.Philox(key=77))
INPUTS = GENERATOR.uniform(-1, 1, size=(6, 4)).astype(np.float32)
LABELS = np.arange(6) % 2
CLASSES = Schema(inputs=(Part(shape=(4,)),), label=Label(classes=2))
NUMBERS = Schema(inputs=(Part(shape=(4,)),), label=Label(kind="number"))


def of_torch():
    torch = pytest.importorskip("torch")
    from murmurfl.clients.adapters.torch_checks import torch_client_model

    return torch_client_model(torch.nn.Linear(4, 2), None, seed=1), CLASSES


def of_sklearn():
    from sklearn.linear_model import SGDClassifier

    return estimator_model(LinearEstimator(SGDClassifier(), num_features=4, classes=(0, 1))), CLASSES


def of_a_perceptron():
    from sklearn.neural_network import MLPClassifier

    estimator = MLPClassifier(hidden_layer_sizes=(3,), random_state=0)
    return estimator_model(MLPEstimator(estimator, num_features=4, classes=(0, 1))), CLASSES


def of_jax():
    pytest.importorskip("jax")
    parameters = {"w": GENERATOR.normal(size=(4, 2)).astype(np.float32)}
    return jax_client_model(JaxModel(lambda p, x: x @ p["w"], parameters), None), CLASSES


def of_keras():
    pytest.importorskip("jax")
    pytest.importorskip("keras")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", "jax")  # read at the first import
        import keras
    from murmurfl.clients.adapters.keras_model import keras_client_model

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    return keras_client_model(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), seed=1), CLASSES


def of_a_function():
    return function_client_model(own_gradients.huber, {"weights": np.zeros(4), "bias": np.zeros(())}), NUMBERS


ADAPTERS = {
    "torch": of_torch,
    "scikit-learn": of_sklearn,
    "perceptron": of_a_perceptron,
    "jax": of_jax,
    "keras": of_keras,
    "function": of_a_function,
}
STRANGE = {
    "not a number": ([np.nan] * 4, 1),
    "infinite": ([np.inf, 0, 0, 0], 1),
    "huge": ([3e38] * 4, 1),
    "too large for the type": ([1e300] * 4, 1),
    "another shape": ([0.5] * 3, 1),
    "one number": (0.5, 1),
    "nested": ([[0.5] * 4] * 2, 1),
    "a text": ("x" * 1_000_000, 1),
    "texts": (["x" * 1_000_000, "b", "c", "d"], 1),
    "an object": (object(), 1),
    "complex": ([1j] * 4, 1),
    "truths": ([True, False, True, False], 1),
    "nothing": (None, None),
    "label out of range": ([0.5] * 4, 99),
    "a negative label": ([0.5] * 4, -1),
    "a label too large for an integer": ([0.5] * 4, 2**70),
    "a label that is no number": ([0.5] * 4, np.nan),
    "a label with a shape": ([0.5] * 4, [1, 0]),
    "no pair": 7,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_strange_record_changes_its_own_contribution_alone(adapter):
    model, schema = ADAPTERS[adapter]()
    model.check_schema(schema, None)
    isolate(model.gradients)
    point = [np.asarray(one, np.float64) for one in model.begins()]
    targets = LABELS if schema is CLASSES else INPUTS.sum(axis=1)

    def rows(strange=None):
        items = [(one, target) for one, target in zip(INPUTS, targets, strict=True)]
        if strange is not None:
            items[2] = strange
        samples = Records(items_of(items), schema, count=len(items))
        return CarefulGradients(model.gradients, samples)(point, np.arange(len(items)))

    expected = rows()
    others = np.delete(np.arange(6), 2)
    assert np.abs(expected[others]).sum(axis=1).min() > 0
    for name, strange in STRANGE.items():
        made = rows(strange)
        assert np.array_equal(made[others], expected[others]), name
        assert not np.array_equal(made[2], expected[2]), name
    assert np.array_equal(rows(), expected)
