"""JAX's functions on a client: what is captured, replayed and refused, and that no attacking model remembers."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from murmurfl.clients import JaxModel, Label, Part, Schema, private_client_app
from murmurfl.clients.adapters.jax_graph import captured
from murmurfl.clients.adapters.jax_model import JaxGradients, cross_entropy, jax_client_model
from murmurfl.clients.adapters.per_sample_gradients import CarefulGradients, programs_of, stacked_gradients
from murmurfl.clients.adapters.replay import JaxProgram, UnfitRecordError
from murmurfl.clients.adapters.replay_process import ReplayProcess
from murmurfl.clients.adapters.torch_graph import CaptureError
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import FullBatch

from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.trials import Held

pytestmark = pytest.mark.usefixtures("no_result_folder")

jax = pytest.importorskip("jax")
jnp = jax.numpy
GENERATOR = np.random.Generator(np.random.Philox(key=48))
INPUTS = GENERATOR.normal(size=(8, 3)).astype(np.float32)
TARGETS = np.arange(8) % 2
SCHEMA = Schema(inputs=(Part(shape=(3,), bounds=(-3.0, 3.0)),), label=Label(classes=2))
PARAMETERS = {
    "hidden": {"kernel": GENERATOR.normal(size=(3, 4)).astype(np.float32), "bias": np.zeros(4, np.float32)},
    "out": {"kernel": GENERATOR.normal(size=(4, 2)).astype(np.float32)},
}


def hidden(p, x):
    return jnp.tanh(x @ p["hidden"]["kernel"] + p["hidden"]["bias"])


def apply(p, x):
    return hidden(p, x) @ p["out"]["kernel"]


def layer(change):
    """A model with something in its middle."""
    return lambda p, x: change(hidden(p, x)) @ p["out"]["kernel"]


def gradients_of(function, loss=cross_entropy, schema=SCHEMA):
    model = jax_client_model(JaxModel(function, PARAMETERS), loss)
    model.check_schema(schema, None)
    return model.gradients


def point():
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(PARAMETERS)]


def isolated(function, **kept):
    gradients = gradients_of(function, **kept)
    gradients.isolate()
    return gradients


def test_names_and_arrays_follow_the_order_of_the_tree_and_come_back_as_one():
    model = JaxModel(apply, PARAMETERS)
    arrays = model.initial_arrays()
    assert list(arrays) == ["hidden/bias", "hidden/kernel", "out/kernel"] == list(model.names)
    again = model.fitted(arrays)
    assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(PARAMETERS)
    assert all(map(np.array_equal, jax.tree_util.tree_leaves(again), point()))
    half = JaxModel(apply, jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMETERS))
    assert {array.dtype for array in half.initial_arrays().values()} == {"float32"}
    with raises(ConfigurationError, "mismatch", "arrays"):
        model.fitted(JaxModel(apply, {"a": np.zeros(3, np.float32)}).initial_arrays())


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({}, "missing"),
        ({"steps": np.arange(3)}, "wrong-type"),
        ({"kernel": [0.5]}, "wrong-type"),
        ({"params": {"kernel": np.zeros(3)}, "batch_stats": {"mean": np.zeros(3)}}, "unsupported"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(parameters, kind):
    with raises(ConfigurationError, kind, "parameters"):
        JaxModel(apply, parameters)


def test_a_real_clients_gradients_are_those_of_the_models_own_code_and_have_the_bits_of_jit():
    gradients = isolated(apply)
    rows = gradients(point(), (INPUTS, TARGETS))

    def loss(p, x, y):
        return cross_entropy(apply(p, x[None]), y[None])

    own = [jax.tree_util.tree_leaves(jax.grad(loss)(PARAMETERS, x, y)) for x, y in zip(INPUTS, TARGETS, strict=True)]
    expected = np.stack([np.concatenate([np.ravel(part) for part in parts]) for parts in own])
    assert rows == pytest.approx(expected, abs=1e-6)
    of_one = jax.jit(lambda p, x, y: jax.tree_util.tree_leaves(jax.grad(loss)(p, x, y)))
    bits = np.concatenate([np.ravel(part) for part in of_one(PARAMETERS, INPUTS[0], np.int32(TARGETS[0]))])
    assert np.array_equal(rows[0], bits)
    assert gradients_of(apply)(point(), (INPUTS, TARGETS)) == pytest.approx(rows, abs=1e-6)  # a simulation, together


def test_the_process_that_sees_records_never_imported_the_projects_code():
    gradients = isolated(apply)
    gradients(point(), (INPUTS[:1], TARGETS[:1]))
    command = Path(f"/proc/{gradients.process.pid}/cmdline").read_bytes().split(b"\0")
    assert command[1:3] == [b"-I", b"-B"]
    assert command[3].endswith(b"replay.py")
    gradients.process.close()
    gradients(point(), (INPUTS[:1], TARGETS[:1]))
    assert gradients.process.pid is not None  # it was started again, for nothing else computes a record


FLAX = {
    "convolution": lambda nn: [nn.Conv(4, (3, 3)), nn.GroupNorm(2), nn.relu, lambda x: nn.max_pool(x, (2, 2), (2, 2))],
    "attention": lambda nn: [lambda x: x.reshape(len(x), 36, 1), nn.Dense(4), nn.SelfAttention(2), nn.LayerNorm()],
    "lstm": lambda nn: [lambda x: x.reshape(len(x), 6, 6), nn.RNN(nn.LSTMCell(4)), nn.gelu],
    "gru": lambda nn: [lambda x: x.reshape(len(x), 6, 6), nn.RNN(nn.GRUCell(4))],
    "without dropout": lambda nn: [nn.Dropout(0.5, deterministic=True), nn.WeightNorm(nn.Dense(4))],
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("kind", FLAX)
def test_models_of_flax_are_captured_and_replayed(kind):
    nn = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    module = nn.Sequential([*FLAX[kind](nn), lambda x: x.reshape(len(x), -1), nn.Dense(3)])
    images = GENERATOR.uniform(size=(4, 6, 6, 1)).astype(np.float32)
    model = JaxModel(module.apply, jax.jit(module.init)(jax.random.key(0), images[:1]))
    made = jax_client_model(model, optax.softmax_cross_entropy_with_integer_labels)
    made.check_schema(Schema(inputs=(Part(shape=(6, 6, 1), bounds=(0, 1)),), label=Label(classes=3)), None)
    start = [np.asarray(leaf) for leaf in model.leaves]
    together = made.gradients(start, (images, np.arange(4) % 3))
    made.gradients.isolate()
    alone = made.gradients(start, (images, np.arange(4) % 3))
    assert alone == pytest.approx(together, abs=2e-5)
    assert np.abs(alone).max() > 1e-3


def test_a_module_of_flax_nnx_is_trained_without_its_state():
    nnx = pytest.importorskip("flax.nnx")
    definition, parameters, rest = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    model = JaxModel(lambda p, x: nnx.merge(definition, p, rest)(x), parameters)
    made = jax_client_model(model, None)
    made.check_schema(SCHEMA, None)
    rows = made.gradients([np.asarray(leaf) for leaf in model.leaves], (INPUTS, TARGETS))
    assert np.abs(rows).sum(axis=1).min() > 0


class Named(Held):
    def __getitem__(self, chosen):
        return {name: part[chosen] for name, part in self.inputs.items()}, self.targets[chosen]


def test_several_inputs_come_as_arguments_or_by_name():
    parts = (Part(shape=(3,), bounds=(-3, 3), name="values"), Part(kind="yes/no", shape=(3,), name="mask"))
    schema = Schema(inputs=parts, label=Label(classes=2))

    def masked(p, values, mask):
        return apply(p, jnp.where(mask, values, 0.0))

    gradients = isolated(masked, schema=schema)
    batch = {"values": INPUTS[:2], "mask": np.array([[True, True, True], [False, False, False]])}
    rows = gradients(point(), (batch, TARGETS[:2]))
    batch_of_5 = {"values": INPUTS[:5], "mask": np.ones((5, 3), bool)}
    stacked = stacked_gradients(gradients_of(masked, schema=schema), [point()], [1.0], (batch_of_5, TARGETS[:5]))
    assert stacked.norms() == pytest.approx(np.linalg.norm(gradients(point(), (batch_of_5, TARGETS[:5])), axis=1))
    careful = CarefulGradients(gradients, Named(batch_of_5, TARGETS[:5]))
    assert np.linalg.norm(careful(point(), np.arange(5)), axis=1) == pytest.approx(stacked.norms())
    assert rows[0] == pytest.approx(gradients_of(apply)(point(), (INPUTS[:1], TARGETS[:1]))[0], abs=1e-6)
    assert rows[1] != pytest.approx(rows[0])


def test_integers_and_16_bit_parameters_keep_their_meaning():
    table = {"table": GENERATOR.normal(size=(5, 4)).astype(np.float32), "out": PARAMETERS["out"]["kernel"]}
    tokens = Schema(inputs=(Part(kind="sequence", length=3, vocabulary=5, padding=0),), label=Label(classes=2))
    for kind in (jnp.float32, jnp.bfloat16):
        model = JaxModel(
            lambda p, x: p["table"][x].mean(1) @ p["out"],
            jax.tree_util.tree_map(lambda leaf, kind=kind: jnp.asarray(leaf, kind), table),
        )
        made = jax_client_model(model, None)
        made.check_schema(tokens, None)
        start = [array.numpy() for array in model.initial_arrays().values()]
        batch = np.array([[1, 2, 2], [4, 4, 4]]), np.array([0, 1])
        together = made.gradients(start, batch)
        made.gradients.isolate()
        assert made.gradients(start, batch) == pytest.approx(together, abs=1e-6 if kind == jnp.float32 else 1e-2)
        moved = np.abs(made.gradients(start, batch)[:, 8:].reshape(2, 5, 4)).sum(axis=2) > 0
        assert moved.tolist() == [[False, True, True, False, False], [False, False, False, False, True]]


def test_constants_travel_beside_the_module_and_are_part_of_the_hash():
    def closing_over(frozen):
        return lambda p, x: apply(p, x @ frozen)

    weights = GENERATOR.normal(size=(3, 3)).astype(np.float32)
    one, other = (gradients_of(closing_over(jnp.asarray(kept))) for kept in (weights, weights + 1e-3))
    (program,), (changed,) = ([found.program for found in made.gradient.programs] for made in (one, other))
    assert [array.shape for array in program.constants.values()] == [(3, 3)]
    assert program.content == changed.content
    assert program.digest != changed.digest
    assert programs_of(one) == f"gradient {program.digest[:16]}"


# What a model may try in order to remember. Each is refused, or is a function of one record all the same.
KEPT = []


def with_callback(callback):
    return layer(lambda x: x + callback(KEPT.append, jax.lax.stop_gradient(x)))


def pure(store, x):
    return jax.pure_callback(lambda v: (store(v), np.zeros(v.shape, v.dtype))[1], x, x)


def in_out(store, x, ordered=False):
    return jax.experimental.io_callback(
        lambda v: (store(v), np.zeros(v.shape, v.dtype))[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=ordered
    )


def in_backward(x):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, x), lambda x, g: (g + pure(KEPT.append, x),))
    return identity(x)


def in_tangent(x):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda p, t: (p[0], t[0] + pure(KEPT.append, jax.lax.stop_gradient(p[0]))))
    return identity(x)


def in_scan(x):
    return jax.lax.scan(lambda c, _: (c + pure(KEPT.append, jax.lax.stop_gradient(c)), None), x, None, length=2)[0]


def in_branch(x):
    held = jax.lax.stop_gradient(x)
    return x + jax.lax.cond(held.sum() > 0, lambda v: pure(KEPT.append, v), jnp.zeros_like, held)


def in_jit(x):
    return jax.jit(lambda v: v + pure(KEPT.append, jax.lax.stop_gradient(v)))(x)


def printing(x):
    jax.debug.print("{}", x)
    return x


def showing(x):
    jax.debug.callback(KEPT.append, x)
    return x


def foreign(x):
    return x + jax.ffi.ffi_call("not_ours", jax.ShapeDtypeStruct(x.shape, x.dtype))(jax.lax.stop_gradient(x))


def own_primitive(x):
    import jax.extend as extend
    from jax.interpreters import mlir

    primitive = extend.core.Primitive("remember")
    primitive.def_abstract_eval(lambda v: v)
    primitive.def_impl(lambda v: KEPT.append(v) or v)
    rule = mlir.custom_call if hasattr(mlir, "custom_call") else None
    if rule is not None:
        mlir.register_lowering(
            primitive,
            lambda context, v: rule("remember", result_types=[v.type], operands=[v]).results,
        )
    return x + primitive.bind(jax.lax.stop_gradient(x))


SHARED = {}


def own_partition(x):
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def identity(v):
        return v

    identity.def_partition(
        partition=lambda mesh, shapes, result: (mesh, lambda v: v, shapes[0].sharding, [shapes[0].sharding]),
        infer_sharding_from_operands=lambda mesh, shapes, result: shapes[0].sharding,
        sharding_rule="a b -> a b",
    )
    return x + identity(jax.lax.stop_gradient(x))


def in_export(x):
    """Written by fresh eyes: a loop on values within a function that was exported, whose steps JAX's list hides."""
    from jax import export

    loop = jax.jit(lambda v: jax.lax.while_loop(lambda c: c < v, lambda c: c + jnp.where(v > 50, 0.0, 1.0), v * 0))
    made = export.export(loop)(jax.ShapeDtypeStruct((), x.dtype))
    return x + jax.lax.stop_gradient(made.call(jax.lax.stop_gradient(x[0, 0])))


COUNT, DRAWN = itertools.count(), np.random.Generator(np.random.Philox(key=3))
REFUSED = {
    "pure callback": (with_callback(pure), "pure_callback, which calls code outside"),
    "io callback": (with_callback(in_out), "io_callback"),
    "ordered io callback": (with_callback(lambda s, x: in_out(s, x, ordered=True)), "io_callback"),
    "callback in a backward pass": (layer(in_backward), "pure_callback"),
    "callback in a tangent": (layer(in_tangent), "pure_callback"),
    "callback in a loop": (layer(in_scan), "pure_callback"),
    "callback in a branch": (layer(in_branch), "pure_callback"),
    "callback in a nested jit": (layer(in_jit), "pure_callback"),
    "debug print": (layer(printing), "jax.debug"),
    "debug callback": (layer(showing), "jax.debug"),
    "foreign function": (layer(foreign), "ffi_call"),
    "primitive of its own": (layer(own_primitive), "remember"),
    "matrix routine of a library": (lambda p, x: apply(p, x) + jnp.linalg.eigh(x.T @ x)[0][:2], "lapack"),
    "loop on values": (
        layer(lambda x: x + jax.lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, jax.lax.stop_gradient(x))),
        "while, which runs for as long",
    ),
    "loop on values that was exported": (layer(in_export), "without a fixed number of rounds"),
    "loop until a function converges": (
        layer(lambda x: x + jax.lax.stop_gradient(jax.scipy.special.gammainc(2.0, jnp.abs(x)))),
        "without a fixed number of rounds",
    ),
    "value as a number": (layer(lambda x: x * float(x.sum())), "depend on a record's values"),
    "value as a truth": (layer(lambda x: x if x.sum() > 0 else -x), "depend on a record's values"),
    "value as an array": (layer(lambda x: x + KEPT.append(np.asarray(x))), "depend on a record's values"),
    "item": (layer(lambda x: x * x.sum().item()), "depend on a record's values"),
    "values that choose": (layer(lambda x: x * (x[x > 0]).sum()), "depend on a record's values"),
    "counter": (layer(lambda x: x * (1 + next(COUNT))), "the second time"),
    "draws of numpy": (layer(lambda x: x * DRAWN.normal()), "the second time"),
    "key from the clock": (
        layer(lambda x: x + jax.random.normal(jax.random.key(time.perf_counter_ns() % 2**31), x.shape)),
        "the second time",
    ),
    "sum over a batch that is not there": (layer(lambda x: jax.lax.psum(x, "batch")), "batch"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_a_model_that_could_remember_is_refused_by_what_it_does(attack):
    model, match = REFUSED[attack]
    KEPT.clear()
    with raises(ConfigurationError, "unsupported", match=f"(?s)captured as pure operations.*({match})"):
        gradients_of(model)
    assert not any(isinstance(one, np.ndarray) for one in KEPT)


def swallowing(x):
    try:
        return x if bool(x.sum() > 0) else -x
    except jax.errors.ConcretizationTypeError:
        return x


def test_a_branch_that_was_frozen_is_refused_since_made_up_records_show_it():
    with raises(ConfigurationError, "unsupported", match="takes the same steps"):
        gradients_of(layer(swallowing))


class Leaking:
    """Keeps whatever it is given, wherever it finds room."""

    def __init__(self):
        self.kept, self.total = [], 0.0

    def __call__(self, p, x):
        self.kept.append(x)
        KEPT.append(repr(x))
        SHARED["last"] = x
        np.ma.core.murmurfl_kept = x  # an attribute of a library's module
        return apply(p, x)


def with_fixed_key(p, x):
    return apply(p, x) + 0.1 * jax.random.normal(jax.random.key(7), (1, 2))


HARMLESS = {
    "keeps what it is given": Leaking(),
    "key that is a constant": with_fixed_key,
    "loop of fixed length": layer(lambda x: jax.lax.fori_loop(0, 3, lambda i, v: jnp.sin(v) + i, x)),
    "branch of XLA": layer(lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)),
    "sorted": layer(lambda x: jax.lax.top_k(x, 4)[0]),
    "rematerialised": layer(jax.checkpoint(jnp.sin)),
    "partition of its own": layer(own_partition),
}


def test_earlier_records_change_no_bit_of_a_later_one():
    """One process has all of these programs."""
    found = {name: gradients_of(model).gradient.programs[0].program for name, model in HARMLESS.items()}
    process, start = ReplayProcess(), point()
    for program in found.values():
        process.add(program)

    def bits(program, number):
        made = process.compute(program, start, [INPUTS[number], np.asarray(TARGETS[number])])
        return np.concatenate([one.ravel() for one in made])

    before = {name: [bits(program, number) for number in (0, 1)] for name, program in found.items()}
    for program in found.values():
        for strange in (np.nan, 1e30):
            process.compute(program, start, [np.full(3, strange, np.float32), np.asarray(0)])
    for name, program in found.items():
        assert np.array_equal(bits(program, 1), before[name][1]), name
        assert np.array_equal(bits(program, 0), before[name][0]), name
        assert not np.array_equal(*before[name]), name
    process.close()


def test_an_array_that_a_model_writes_to_is_an_effect():
    make = getattr(jax, "new_ref", None) or jax.core.mutable_array
    kept = make(np.zeros(2, np.float32))

    def writing(_, record):
        kept[...] = record[0]
        return [record[0] * 2]

    with pytest.raises(CaptureError, match="effects"):
        captured(writing, [], [jax.ShapeDtypeStruct((2,), np.float32)])


def test_a_library_changed_after_the_capture_changes_no_gradient(monkeypatch):
    gradients = isolated(apply)
    before = gradients(point(), (INPUTS[:1], TARGETS[:1]))
    monkeypatch.setattr(jnp, "tanh", lambda x: KEPT.append(x) or x)
    monkeypatch.setattr(jax, "jit", lambda *a, **k: 1 / 0)
    KEPT.clear()
    assert np.array_equal(gradients(point(), (INPUTS[:1], TARGETS[:1])), before)
    assert not KEPT


def program_of(function=apply):
    return gradients_of(function).gradient.programs[0].program


@pytest.mark.parametrize(
    "operation",
    [
        "stablehlo.custom_call @xla_python_cpu_callback(%arg0) : (tensor<4xf32>) -> tensor<4xf32>",
        '"stablehlo.rng"(%lo, %lo, %shape) {rng_distribution = #stablehlo<rng_distribution UNIFORM>} : '
        "(tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>",
    ],
)
def test_the_process_refuses_an_operation_that_is_not_on_its_list(operation):
    """Whatever wrote the program: the list is checked where it runs."""
    module = f"""module @m {{ func.func public @main(%arg0: tensor<4xf32>) -> (tensor<4xf32>) {{
        %lo = stablehlo.constant dense<0.0> : tensor<f32>
        %shape = stablehlo.constant dense<4> : tensor<1xi64>
        %0 = {operation}
        return %0 : tensor<4xf32> }} }}"""
    content = {"inputs": [[[4], "float32"]], "parameters": 1, "record": 0, "results": [[[4], "float32"]]}
    with pytest.raises(ValueError, match=r"the operation stablehlo\.(custom_call|rng)"):
        JaxProgram({**content, "platform": "cpu", "module": module}, {})
    replaced = module.replace(operation, "stablehlo.tanh %arg0 : tensor<4xf32>")
    made = JaxProgram({**content, "platform": "cpu", "module": replaced}, {})
    assert made.compute(made.point([np.ones(4)]), [])[0] == pytest.approx(np.tanh(np.ones(4)))


def test_a_program_that_is_not_pure_keeps_the_process_from_starting():
    gradients = gradients_of(apply)
    found = gradients.gradient.programs[0].program
    bad = found.content["module"].replace("stablehlo.tanh", "stablehlo.custom_call @tanh", 1)
    object.__setattr__(found, "content", {**found.content, "module": bad})
    with raises(ConfigurationError, "failed", match="custom_call|failed to|error"):
        gradients.isolate()


def test_a_record_that_looks_otherwise_than_captured_is_not_computed():
    found = program_of()
    program = JaxProgram(found.content, found.constants)
    at = program.point(point())
    good = [INPUTS[0], np.array(1)]
    assert len(program.compute(at, good)) == 3
    for strange in (
        [INPUTS[0, :2], np.array(1)],
        [INPUTS[0].astype(int), np.array(1)],
        [INPUTS[0], np.array(1.0)],
        [INPUTS[0], np.array([1])],
        [INPUTS[0], np.array(2**40)],
        [INPUTS[0].astype("U9"), np.array(1)],
    ):
        with pytest.raises(UnfitRecordError):
            program.compute(at, strange)


def test_an_integer_too_large_for_its_type_counts_as_zero_in_a_simulation_as_well():
    rows = gradients_of(apply)(point(), (INPUTS[:3], np.array([0, 2**40, 1])))
    assert (np.abs(rows).sum(axis=1) > 0).tolist() == [True, False, True]


def test_types_of_64_bits_are_kept():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        wide = {"w": GENERATOR.normal(size=(3, 2))}
        gradients = JaxGradients(JaxModel(lambda p, x: x @ p["w"], wide), cross_entropy)
        together = gradients([wide["w"]], (INPUTS.astype(np.float64), TARGETS))
        gradients.isolate()
        alone = gradients([wide["w"]], (INPUTS.astype(np.float64), TARGETS))
    assert alone.dtype == together.dtype == np.float64
    assert alone == pytest.approx(together, abs=1e-14)


def test_an_example_that_takes_the_first_two_captures_apart_is_refused_and_one_that_does_not_is_not():
    calls = itertools.count()
    blank = [jax.ShapeDtypeStruct((2,), np.float32)]
    with pytest.raises(CaptureError, match="the second time"):
        captured(lambda p, r: [r[0] * next(calls)], [], blank)
    assert captured(lambda p, r: [r[0] * 2], [], blank).program.results == (((2,), "float32"),)


@pytest.mark.parametrize("loss", ["mse", int, 3])
def test_a_loss_that_is_none_is_refused(loss):
    with raises(ConfigurationError, "wrong-type", "loss"):
        jax_client_model(JaxModel(apply, PARAMETERS), loss)
    with raises(ConfigurationError, "wrong-type", "loss"):
        gradients_of(apply, loss=lambda outputs, targets: outputs)


def load(context):
    number = int(context.node_config["partition-id"])
    return INPUTS[4 * number : 4 * number + 4], TARGETS[4 * number : 4 * number + 4]


def test_a_training_moves_by_the_mean_of_clipped_gradients_and_evaluates():
    model, clip = JaxModel(apply, PARAMETERS), 0.5
    app = private_client_app(model, samples=load, mu=3e3, rounds=1, clip_norm=clip, schema=SCHEMA)
    options = {"num_clients": 2, "clients_per_round": 2, "node_deadline_s": 30.0, "seed": 1, "session": "s"}
    strategy = FullBatch(learning_rate=2.0, **options)
    result = strategy.start(NodesGrid(app, 2), model.initial_arrays(), num_rounds=1)
    rows = gradients_of(apply)(point(), (INPUTS, TARGETS)).astype(float)
    rows *= np.minimum(1.0, clip / np.linalg.norm(rows, axis=1))[:, None]
    moved = np.concatenate([array.numpy().ravel() for array in result.arrays.values()])
    start = np.concatenate([one.ravel() for one in point()])
    assert moved - start == pytest.approx(-2.0 * rows.mean(axis=0), abs=2e-3)
    fitted = model.fitted(result.arrays)
    assert jnp.asarray(apply(fitted, INPUTS)).shape == (8, 2)


def test_a_measure_says_what_the_model_predicts_right_and_how_sure_it_is():
    made = jax_client_model(JaxModel(apply, PARAMETERS), None)
    measure = made.measure(None)
    made.check_schema(SCHEMA, measure)
    scores = np.asarray(apply(PARAMETERS, INPUTS))
    found = measure(point(), (INPUTS, TARGETS))
    made.gradients.isolate()
    alone = measure(point(), (INPUTS, TARGETS))
    for one in (found, alone):
        assert (one.right == (scores.argmax(axis=1) == TARGETS)).all()
        assert one.score == pytest.approx(1 / (1 + np.exp(scores[:, 0] - scores[:, 1])), abs=1e-6)
        assert (one.positive == TARGETS).all()
    own = jax_client_model(JaxModel(apply, PARAMETERS), None).measure(
        lambda outputs, targets: (outputs[:, 0] > 0) * 0.5
    )
    assert own(point(), (INPUTS, TARGETS)).right == pytest.approx(0.5 * (scores[:, 0] > 0))


def test_one_record_alone_is_read_where_a_client_reads_one_at_a_time():
    gradients = isolated(apply)
    batch = Held(INPUTS, TARGETS)[2:3]
    assert np.array_equal(gradients(point(), batch)[0], gradients(point(), (INPUTS, TARGETS))[2])
