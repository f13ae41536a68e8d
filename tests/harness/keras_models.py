"""Keras models on one backend, in a process of their own: the backend is chosen when Keras is imported.

``python -m tests.harness.keras_models`` prints what became of each as JSON.
"""

import json
import os
import sys

import keras
import numpy as np
from murmurfl.clients import Label, Part, Schema, load_trainable, private_client_app, trainable_arrays
from murmurfl.privacy import ConfigurationError

BACKEND = os.environ["KERAS_BACKEND"]
GENERATOR = np.random.Generator(np.random.Philox(key=5))
INPUTS = GENERATOR.uniform(size=(5, 6, 6, 1)).astype(np.float32)
TARGETS = np.arange(5) % 3
SCHEMA = Schema(inputs=(Part(shape=(6, 6, 1), bounds=(0, 1)),), label=Label(classes=3))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
KEPT = []
ops, layers = keras.ops, keras.layers


def convolution(*middle):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="tanh"),
            *middle,
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def own(call, build=None):
    """A model with a layer of the project's in its middle."""

    class Own(layers.Layer):
        def build(self, shape):
            if build is not None:
                build(self, shape)

        def call(self, x, training=None):
            return call(self, x)

        def compute_output_spec(self, x, training=None):
            return keras.KerasTensor(x.shape, x.dtype)  # so that making the model calls nothing of ours

    return convolution(Own())


def held(x):
    return ops.stop_gradient(x)


def out(x):
    """A way out of the program: a host callback, or values as an array."""
    if BACKEND == "jax":
        import jax

        return jax.pure_callback(lambda v: (KEPT.append(v), np.zeros(v.shape, v.dtype))[1], held(x), held(x))
    return ops.convert_to_tensor(keras.ops.convert_to_numpy(held(x)))


def running_mean(layer, x):
    before = layer.mean + 0.0
    layer.mean.assign(0.9 * layer.mean + 0.1 * ops.mean(held(x), 0))
    return x - before


def add_mean(layer, shape):
    layer.mean = layer.add_weight(shape=shape[1:], trainable=False, initializer="zeros")


def counting(layer, x):
    layer.count = getattr(layer, "count", 0) + 1
    return x * layer.count


def swallowing(x):
    try:
        positive = bool(ops.sum(x) > -1e9)
    except Exception:
        positive = False
    return x if positive else -2.0 * x


def with_inner(layer, x):
    return layer.inner(x, training=True)


def add_inner(inner):
    def build(layer, shape):
        layer.inner = inner
        inner.build(shape)

    return build


class Holder:
    """Keeps what it is called with."""

    def __init__(self):
        self.kept = []

    def __call__(self, x):
        self.kept.append(x)
        return x


def attention():
    keras.utils.set_random_seed(3)
    x = given = keras.Input((6, 6, 1))
    x = layers.Reshape((12, 3))(x)
    x = layers.LayerNormalization()(layers.MultiHeadAttention(1, 2)(x, x))
    return keras.Model(given, layers.Dense(3)(layers.Flatten()(x)))


REFUSED = {
    "values as an array": lambda: own(lambda s, x: x + out(x)),
    "value as a number": lambda: own(lambda s, x: x * float(ops.sum(x))),
    "value as a truth": lambda: own(lambda s, x: x if ops.sum(x) > 0 else -x),
    "counter": lambda: own(counting),
    "draws of numpy": lambda: own(lambda s, x: x * GENERATOR.normal()),
    "out of a backward pass": lambda: own(
        lambda s, x: ops.custom_gradient(lambda v: (v, lambda g, **k: g + out(v)))(x)
    ),
    "frozen branch": lambda: own(lambda s, x: swallowing(x)),
    "loop on values": lambda: own(
        lambda s, x: x + ops.while_loop(lambda v: ops.sum(v) < 99.0, lambda v: (v + 1.0,), (held(x),))[0]
    ),
    "penalty": lambda: convolution(layers.Conv2D(2, 2, kernel_regularizer="l2")),
    "penalty of activations": lambda: convolution(layers.Conv2D(2, 2, activity_regularizer="l2")),
    "penalty of its own": lambda: own(lambda s, x: s.add_loss(ops.mean(x)) or x),
    "not built": lambda: keras.Sequential([layers.Dense(3)]),
    "nothing to train": lambda: keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten()]),
}
FINE = {
    "convolution": convolution,
    "dropout and batch normalisation": lambda: convolution(layers.Dropout(0.5), layers.BatchNormalization()),
    "running mean": lambda: own(running_mean, add_mean),
    "keeps what it is given": lambda: own(lambda s, x: KEPT.append(x) or setattr(s, "seen", [x]) or x),
    "keeps it in a container": lambda: own(lambda s, x: s.box(x), lambda s, shape: setattr(s, "box", Holder())),
    "keeps it in the library": lambda: own(lambda s, x: setattr(keras, "murmurfl_kept", x) or x),
    "group normalisation": lambda: convolution(layers.GroupNormalization(1)),
    "recurrent": lambda: convolution(layers.Reshape((16, 3)), layers.GRU(4, return_sequences=True)),
    "attention": attention,
}


def point(model):
    return [array.numpy() for array in trainable_arrays(model).values()]


def by_differences(model, number, which=-1, step=1e-2):
    """The largest entries of one sample's gradient in one variable, by central differences of Keras's own loss."""
    variable = model.trainable_variables[which]
    before, found = np.array(ops.convert_to_numpy(variable)), []
    for place in np.ndindex(before.shape):
        values = []
        for sign in (1, -1):
            moved = before.copy()
            moved[place] += sign * step
            variable.assign(moved)
            made = model(INPUTS[number : number + 1], training=False)
            values.append(float(ops.convert_to_numpy(LOSS(TARGETS[number : number + 1], made))))
        found.append((values[0] - values[1]) / (2 * step))
    variable.assign(before)
    return np.array(found)


def refused(make):
    try:
        model = make()
        app = private_client_app(model, LOSS, (INPUTS, TARGETS), epsilon=1.0, rounds=1, schema=SCHEMA)
        rows = app.model.gradients(point(model), (INPUTS, TARGETS))
    except ConfigurationError as error:
        return f"{error.kind}: {error}"
    return "" if np.abs(rows).max() > 0 else "zero"


def fine(make):
    model = make()
    try:
        app = private_client_app(model, LOSS, (INPUTS, TARGETS), epsilon=1.0, rounds=1, schema=SCHEMA)
    except ConfigurationError as error:
        return {"refused": str(error)}
    gradients, start = app.model.gradients, point(model)
    together = gradients(start, (INPUTS, TARGETS))
    width = start[-1].size
    # Keras's own calls move the statistics that a layer keeps, so a fresh model is asked.
    apart = np.abs(together[1, -width:] - by_differences(make(), 1)).max() if make is not FINE["running mean"] else 0.0
    gradients.isolate()
    first = gradients(start, (INPUTS[:1], TARGETS[:1]))
    alone = gradients(start, (INPUTS, TARGETS))
    gradients(start, (np.full_like(INPUTS[:1], np.nan), TARGETS[:1]))
    again = gradients(start, (INPUTS[:1], TARGETS[:1]))
    gradients.process.close()
    return {
        "apart": float(apart),
        "alone": float(np.abs(alone - together).max()),
        "same": bool(np.array_equal(first, again) and np.array_equal(first[0], alone[0])),
        "norms": np.linalg.norm(alone, axis=1).tolist(),
    }


def others():
    """Arrays there and back, a compiled loss, probabilities, and another framework's module around a layer."""
    model = convolution()
    arrays = trainable_arrays(model)
    shifted = load_trainable(convolution(), type(arrays)({k: type(v)(v.numpy() + 1) for k, v in arrays.items()}))
    moved = [float((b - a).mean()) for a, b in zip(point(model), point(shifted), strict=True)]
    model = keras.Sequential([keras.Input((6, 6, 1)), *model.layers, layers.Softmax()])
    model.compile(loss="sparse_categorical_crossentropy")
    compiled = private_client_app(model, samples=(INPUTS, TARGETS), epsilon=1.0, rounds=1, schema=SCHEMA)
    two = keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(), layers.Dense(1, activation="sigmoid")])
    binary = Schema(inputs=SCHEMA.inputs, label=Label(classes=2))
    app = private_client_app(
        two, keras.losses.BinaryCrossentropy(), (INPUTS, TARGETS % 2), mu=1.0, rounds=1, schema=binary, evaluation=0.1
    )
    measured = app.model.measure(None)(point(two), (INPUTS, TARGETS % 2))
    probabilities = ops.convert_to_numpy(two(INPUTS))[:, 0]
    found = {
        "moved": moved,
        "names": list(arrays),
        "compiled": float(np.abs(compiled.model.gradients(point(model), (INPUTS, TARGETS))).max()),
        "score": float(np.abs(measured.score - probabilities).max()),
        "right": bool(((probabilities > 0.5) == (TARGETS % 2 == 1)).astype(float).tolist() == measured.right.tolist()),
    }
    found["no loss"] = _error(lambda: private_client_app(convolution(), None, (INPUTS, TARGETS), mu=1.0, rounds=1))
    if BACKEND == "torch":
        import torch

        mixed = torch.nn.Sequential(convolution(), torch.nn.Linear(3, 3))
        found["around"] = _error(lambda: private_client_app(mixed, None, (INPUTS, TARGETS), mu=1.0, rounds=1))
    return found


def _error(call):
    try:
        call()
    except ConfigurationError as error:
        return f"{error.kind}: {error}"
    return ""


if __name__ == "__main__":
    made = {
        "refused": {name: refused(make) for name, make in REFUSED.items()},
        "kept": [type(one).__name__ for one in KEPT if isinstance(one, np.ndarray)],
        "fine": {name: fine(make) for name, make in FINE.items()},
        "others": others(),
    }
    sys.stdout.write(json.dumps(made))
