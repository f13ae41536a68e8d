"""A project's own gradient in NumPy: called record by record in copies of a process, and never twice in one."""

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from murmurfl.clients import Label, Part, Schema, private_client_app
from murmurfl.clients.adapters.function_model import FunctionGradients, function_client_model
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import InvalidRecordError
from murmurfl.strategies import FullBatch

from tests.harness.errors import raises
from tests.harness.grid import NodesGrid

pytestmark = pytest.mark.usefixtures("no_result_folder")

GENERATOR = np.random.Generator(np.random.Philox(key=21))
INPUTS = GENERATOR.uniform(-1, 1, size=(6, 3)).astype(np.float32)
TARGETS = INPUTS.sum(axis=1).astype(np.float32)
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system lists a process's memory")
START = {"weights": np.full(3, 0.5), "bias": np.zeros(())}
SCHEMA = Schema(inputs=(Part(shape=(3,), bounds=(-1.0, 1.0)),), label=Label(bounds=(-3.0, 3.0)))

SOURCE = """
import builtins, gc, logging, os, threading
import numpy as np

SEEN = []
LOCK = threading.Lock()

def plain(parameters, inputs, target):
    apart = parameters["weights"] @ inputs + parameters["bias"] - target
    return {"weights": apart * inputs, "bias": apart}

def _with(parameters, inputs, target, extra):
    made = plain(parameters, inputs, target)
    return {**made, "bias": made["bias"] + extra}

def of_globals(parameters, inputs, target):
    SEEN.append(inputs)
    return _with(parameters, inputs, target, len(SEEN))

def of_builtins(parameters, inputs, target):
    builtins.murmurfl_seen = getattr(builtins, "murmurfl_seen", 0) + 1
    return _with(parameters, inputs, target, builtins.murmurfl_seen)

def of_the_environment(parameters, inputs, target):
    os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
    return _with(parameters, inputs, target, len(os.environ["SEEN"]))

def of_a_lock(parameters, inputs, target):
    return _with(parameters, inputs, target, float(LOCK.acquire(blocking=False)))

def of_a_logger(parameters, inputs, target):
    logger = logging.getLogger("any")
    logger.setLevel(logger.level + 1)
    return _with(parameters, inputs, target, logger.level)

def of_the_generator(parameters, inputs, target):
    return _with(parameters, inputs, target, np.random.random())

def of_its_parameters(parameters, inputs, target):
    parameters["weights"] += 1.0
    return plain(parameters, inputs, target)

def of_a_file(parameters, inputs, target):
    with open(__file__ + ".seen", "a") as file:
        file.write("x")
    return plain(parameters, inputs, target)

def raising(parameters, inputs, target):
    if inputs[0] > 2:
        raise RuntimeError(inputs)
    return plain(parameters, inputs, target)

def ending(parameters, inputs, target):
    if inputs[0] > 2:
        os._exit(3)
    return plain(parameters, inputs, target)

def forging(parameters, inputs, target):
    if inputs[0] > 2:  # a reply of its own, and after it the one that is due, which would be the next record's
        header = b'{"ok": true, "ticket": "", "arrays": [["float64", [3]], ["float64", []]]}'
        os.write(3, len(header).to_bytes(8, "little") + header + np.full(4, 7.0).tobytes())
    return plain(parameters, inputs, target)

def scribbling(parameters, inputs, target):
    if inputs[0] > 2:
        os.write(3, bytes([255] * 9))
    return plain(parameters, inputs, target)

def of_another_shape(parameters, inputs, target):
    made = plain(parameters, inputs, target)
    return {**made, "weights": made["weights"][:2]} if inputs[0] > 2 else made

def batched(parameters, inputs, target):
    return plain(parameters, inputs[0], target[0])

class Holder:
    def method(self, parameters, inputs, target):
        return plain(parameters, inputs, target)

inner = Holder().method
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "own_gradients.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("own_gradients", folder / "own_gradients.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_gradients"] = module
    sys.path.append(str(folder))
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_gradients"]
    sys.path.remove(str(folder))


def isolated(function, schema=SCHEMA):
    gradients = FunctionGradients(function, START)
    gradients.show(schema.examples())
    gradients.isolate()
    return gradients


def point():
    return list(START.values())


def of(gradients, number):
    return gradients(point(), (INPUTS[number : number + 1], TARGETS[number : number + 1]))[0]


def expected(number):
    apart = INPUTS[number] @ START["weights"] - TARGETS[number]
    return np.append(apart * INPUTS[number], apart)


@LINUX
@pytest.mark.parametrize("name", ["forging", "scribbling"])
def test_what_a_function_writes_to_the_pipe_of_replies_is_no_other_records_gradient(own, name):
    gradients = isolated(getattr(own, name))
    before = of(gradients, 1)
    strange = np.full((1, 3), 3.0, np.float32), TARGETS[:1]
    with suppress(InvalidRecordError):  # which counts as zero
        gradients(point(), strange)
    assert np.array_equal(of(gradients, 1), before)
    assert np.array_equal(of(gradients, 1), before)


def test_rows_are_the_functions_own_in_a_simulation_and_in_the_process(own):
    simulated, real = FunctionGradients(own.plain, START), isolated(own.plain)
    for gradients in (simulated, real):
        rows = gradients(point(), (INPUTS, TARGETS))
        assert rows == pytest.approx(np.stack([expected(i) for i in range(6)]), abs=1e-6)
    assert np.array_equal(rows, simulated(point(), (INPUTS, TARGETS)))


REMEMBERING = ["of_globals", "of_builtins", "of_the_environment", "of_a_lock", "of_a_logger", "of_its_parameters"]


@pytest.mark.parametrize("name", [*REMEMBERING, "of_the_generator"])
def test_what_a_function_keeps_in_memory_is_gone_before_the_next_record(own, name):
    gradients = isolated(getattr(own, name))
    alone = [of(gradients, number) for number in (0, 1)]
    for _ in range(3):
        of(gradients, 2)
    assert np.array_equal(of(gradients, 1), alone[1])
    assert np.array_equal(of(gradients, 0), alone[0])


def _memory_holds(pid, values):
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                if values.tobytes() in memory.read(end - start):
                    return True
    return False


@LINUX
def test_neither_record_nor_gradient_reaches_memory_that_later_copies_start_with(own):
    """Written by fresh eyes: np.empty in a copy gave bytes of the record before."""
    gradients, row = isolated(own.plain), of(isolated(own.plain), 2)
    weights = np.array([0.123456789, 0.5, 0.25])
    gradients([weights, START["bias"]], (INPUTS[2:3], TARGETS[2:3]))
    assert _memory_holds(gradients.process.pid, weights)  # parameters are public, and what is looked for is found
    assert np.array_equal(of(gradients, 2), row)
    assert not _memory_holds(gradients.process.pid, INPUTS[2])
    assert not _memory_holds(gradients.process.pid, row)


@LINUX
@pytest.mark.parametrize("made", ["mmap.mmap(-1, 4096)", "multiprocessing.RawValue('d', 0.0)"])
def test_memory_that_copies_share_keeps_the_process_from_starting(tmp_path, monkeypatch, made):
    """Written by fresh eyes: a value of multiprocessing remembered a record from one copy to the next."""
    (tmp_path / "own_shared.py").write_text(f"import mmap, multiprocessing\n{SOURCE}\nSHARED = {made}\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        function = importlib.import_module("own_shared").plain
        with raises(ConfigurationError, "failed", match="memory that is shared with other processes"):
            isolated(function)
    finally:
        sys.modules.pop("own_shared", None)


@pytest.mark.parametrize("name", ["of_globals", "of_builtins", "of_the_environment", "of_a_logger"])
def test_such_a_function_is_refused_by_made_up_records_where_it_shows(own, name):
    with raises(ConfigurationError, "unsupported", match="remembers what it saw|after other samples"):
        function_client_model(getattr(own, name), START).check_schema(SCHEMA, None)


def test_a_function_that_opens_a_file_keeps_the_process_from_nothing_but_its_record(own):
    gradients = isolated(own.of_a_file)
    with pytest.raises(InvalidRecordError):
        of(gradients, 0)


STRANGE = np.array([[3.0, 0.0, 0.0]], np.float32)


@pytest.mark.parametrize("name", ["raising", "ending", "of_another_shape"])
def test_a_record_for_which_it_fails_changes_no_other(own, name):
    gradients = isolated(getattr(own, name))
    before = of(gradients, 1)
    process = gradients.process.pid
    with pytest.raises(InvalidRecordError) as caught:
        gradients(point(), (STRANGE, TARGETS[:1]))
    assert "3.0" not in str(caught.value)
    assert np.array_equal(of(gradients, 1), before)
    assert gradients.process.pid == process
    simulated = FunctionGradients(own.raising, START)(point(), (np.concatenate([INPUTS[:1], STRANGE]), TARGETS[:2]))
    assert np.isfinite(simulated).all(axis=1).tolist() == [True, False]


def test_a_function_that_no_other_process_can_import_is_refused_before_any_record(own):
    for function in (lambda p, x, y: p, own.inner, own.Holder().method):
        gradients = FunctionGradients(function, START)
        gradients.show(SCHEMA.examples())
        with raises(ConfigurationError, "unsupported", "gradients", match="top of a file"):
            gradients.isolate()


def test_a_file_that_changed_since_it_was_imported_keeps_the_process_from_starting(own):
    gradients = FunctionGradients(own.plain, START)
    gradients.show(SCHEMA.examples())
    gradients.isolate()
    (program, *_) = gradients.programs
    object.__setattr__(program, "content", {**program.content, "source": "0" * 64})
    gradients.process.close()
    with raises(ConfigurationError, "failed", match="another file"):
        gradients.process.check()


def test_what_is_no_gradient_is_refused_with_the_reason(own):
    with raises(ConfigurationError, "failed", "gradients", match="without a batch axis"):
        function_client_model(own.batched, START).check_schema(SCHEMA, None)
    with raises(ConfigurationError, "conflict", "loss"):
        private_client_app(START, len, (INPUTS, TARGETS), gradients=own.plain, mu=1.0, rounds=1)
    for start in (None, {}, ["x"], 3.0):
        with raises(ConfigurationError, "wrong-type", "model"):
            function_client_model(own.plain, start)
    with raises(ConfigurationError, "wrong-type", "gradients"):
        function_client_model(3, START)


def test_a_training_moves_by_the_mean_of_clipped_gradients(own):
    app = private_client_app(
        START, samples=(INPUTS, TARGETS), gradients=own.plain, schema=SCHEMA, mu=3e3, rounds=1, clip_norm=0.1
    )
    options = {"num_clients": 1, "clients_per_round": 1, "node_deadline_s": 30.0, "seed": 1, "session": "s"}
    from flwr.app import Array, ArrayRecord

    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in START.items()})
    result = FullBatch(learning_rate=1.0, **options).start(NodesGrid(app, 1), arrays, num_rounds=1)
    rows = np.stack([expected(i) for i in range(6)])
    rows *= np.minimum(1.0, 0.1 / np.linalg.norm(rows, axis=1))[:, None]
    moved = np.concatenate([result.arrays["weights"].numpy() - 0.5, result.arrays["bias"].numpy().reshape(1)])
    assert moved == pytest.approx(-rows.mean(axis=0), abs=1e-3)
