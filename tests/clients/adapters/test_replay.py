"""Programs of one record, and the process that replays them: what a record can change, and what it cannot."""

import os
import signal
import time

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient, OwnerGradients
from murmurfl.clients.adapters import per_sample_gradients, replay, replay_process
from murmurfl.clients.adapters.per_sample_gradients import programs_of
from murmurfl.clients.adapters.replay_process import Program, ReplayProcess
from murmurfl.clients.full_batch_client import CountedGradients
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys
from murmurfl.privacy.errors import InvalidRecordError

from tests.harness.clients import DurableLedger, FixedNonces, training_config
from tests.harness.errors import raises

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_graph import CaptureError, RecordPrograms, captured  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients, TorchGradients  # noqa: E402

from tests.harness.trials import Held  # noqa: E402

CROSS_ENTROPY = torch.nn.functional.cross_entropy


def made_gradients():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3))
    return ModuleGradients(module, CROSS_ENTROPY)


GRADIENTS = made_gradients()
POINT = [parameter.detach().numpy().copy() for parameter in GRADIENTS.module.parameters()]
RECORD = np.array([0, 4, 2]), np.array(1)
PROGRAM = GRADIENTS.program(torch.tensor(RECORD[0]), torch.tensor(RECORD[1]))


@pytest.fixture(scope="module")
def process():
    made = ReplayProcess()
    made.add(PROGRAM)
    yield made
    made.close()


def by_hand(record=RECORD):
    return PROGRAM.runnable.compute(PROGRAM.runnable.point(POINT), record)


def same(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def test_process_gives_the_bits_of_this_process_and_of_the_models_own_code(process):
    trained = dict(zip(GRADIENTS.names, PROGRAM.runnable.point(POINT), strict=True))
    own = GRADIENTS.eager(trained, *map(torch.tensor, RECORD))
    found = process.compute(PROGRAM, POINT, RECORD)
    assert same(found, by_hand())
    assert same(found, [values.numpy() for values in own.values()])


UNFIT = {
    "another shape": (np.array([0, 4]), np.array(1)),
    "numbers where tokens should be": (np.array([0.0, 4.0, 2.0]), np.array(1)),
    "a label out of range": (RECORD[0], np.array(3)),
    "a label below": (RECORD[0], np.array(-1)),
    "a token out of range": (np.array([0, 5, 2]), np.array(1)),
    "a token below": (np.array([0, -1, 2]), np.array(1)),
    "an array too few": (RECORD[0],),
    "an array too many": (*RECORD, RECORD[1]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_record_that_does_not_fit_fails_alone_and_without_a_reason(name, process):
    before = process.compute(PROGRAM, POINT, RECORD)
    with pytest.raises(InvalidRecordError) as failure:
        process.compute(PROGRAM, POINT, UNFIT[name])
    assert str(failure.value) == "a record for which the model cannot be computed"
    assert same(process.compute(PROGRAM, POINT, RECORD), before)


@pytest.mark.parametrize("name", ["a label out of range", "a token below"])
def test_record_out_of_range_is_zero_and_leaves_others_of_its_batch_alone(name):
    batch = [np.stack([RECORD[part], UNFIT[name][part], RECORD[part]]) for part in (0, 1)]
    rows = GRADIENTS(POINT, tuple(batch))
    assert rows[0].any()
    assert rows[0].tobytes() == rows[2].tobytes()
    assert not rows[1].any()
    assert not GRADIENTS(POINT, tuple(part[1:2] for part in batch)).any()


def test_record_that_fails_on_the_way_leaves_others_of_its_batch_alone():
    """An index that is computed from values has no range that is known beforehand."""

    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 3)

        def forward(self, numbers):
            return self.table((numbers.sum(1) * 2.0).long())

    gradients = ModuleGradients(Counted(), CROSS_ENTROPY)
    point = [gradients.module.table.weight.detach().numpy()]
    rows = gradients(point, (np.array([[0.5], [9.0], [0.5], [1.0]], np.float32), np.zeros(4, np.int64)))
    assert rows[0].any()
    assert rows[0].tobytes() == rows[2].tobytes()
    assert not rows[1].any()
    with pytest.raises((IndexError, RuntimeError)):
        gradients(point, (np.full((3, 1), 9.0, np.float32), np.zeros(3, np.int64)))


def test_target_that_a_loss_ignores_fits():
    programs = ModuleGradients(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(ignore_index=-100))
    program = programs.program(torch.zeros(2), torch.tensor(1)).runnable
    assert program.in_range([torch.zeros(4, 2), torch.tensor([-100, 0, 3, -1])]).tolist() == [True, True, False, False]


def test_process_that_is_killed_starts_again_with_the_same_bits(process):
    before = process.compute(PROGRAM, POINT, RECORD)
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(InvalidRecordError):
        process.compute(PROGRAM, POINT, RECORD)
    assert process.pid is None
    assert same(process.compute(PROGRAM, POINT, RECORD), before)


def test_record_that_is_no_array_of_numbers_leaves_no_half_message_for_the_next_one(process):
    """Written by fresh eyes: the next record was read as the rest of this one, and counted as zero."""
    before = process.compute(PROGRAM, POINT, RECORD)
    with pytest.raises(TypeError):
        process.compute(PROGRAM, POINT, (RECORD[0], np.array([None])))
    assert same(process.compute(PROGRAM, POINT, RECORD), before)


def test_answer_that_nobody_waited_for_is_not_the_next_records(process, monkeypatch):
    """Written by fresh eyes: an exception from outside, such as a signal's, shifted all answers by one."""
    before = process.compute(PROGRAM, POINT, RECORD)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_received", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            process.compute(PROGRAM, POINT, (np.array([1, 1, 1]), np.array(0)))
    assert same(process.compute(PROGRAM, POINT, RECORD), before)


def test_device_that_failed_answers_no_other_record(monkeypatch):
    """Written by fresh eyes: after a failed assertion a GPU fails for every later record of its process."""

    class Failing:
        def __init__(self, on_device):
            self.on_device = on_device

        def point(self, arrays):
            return arrays

        def compute(self, point, record):
            raise record

    ended = []
    monkeypatch.setattr(replay.os, "_exit", ended.append)
    for on_device, error in ((False, RuntimeError()), (True, replay.UnfitRecordError()), (True, RuntimeError())):
        assert not ended
        serving = replay.Serving(1)
        serving._programs["one"], serving._arrays[0] = Failing(on_device), []
        assert serving.answer({"do": "compute", "name": "one", "slot": 0}, error) == ({"ok": False}, [])
    assert ended == [1]
    content = {"inputs": [[[1], "torch.float32", "cuda:0"]], "parameters": 1, "bounds": {}}
    assert replay.TorchProgram({**content, "steps": [["input", 0], ["results", [{"n": 0}]]]}, {}).on_device


def test_order_of_bytes_changes_no_value(process):
    swapped = tuple(part.astype(part.dtype.newbyteorder()) for part in RECORD)
    assert same(process.compute(PROGRAM, POINT, swapped), process.compute(PROGRAM, POINT, RECORD))


def test_process_that_cannot_start_again_is_tried_until_it_can(process, monkeypatch):
    """Giving up would make every later record count as zero, because of one."""
    before, tries = process.compute(PROGRAM, POINT, RECORD), []
    start = ReplayProcess._start

    def start_at_third_try(self):
        tries.append(None)
        if len(tries) < 3:
            raise replay_process._not_started("no memory")
        start(self)

    monkeypatch.setattr(ReplayProcess, "_start", start_at_third_try)
    process.close()
    assert same(process.compute(PROGRAM, POINT, RECORD), before)
    assert len(tries) == 3


def test_process_that_never_started_is_an_error_before_any_record(monkeypatch):
    monkeypatch.setattr(replay_process.sys, "executable", "/no/interpreter")
    with raises(ConfigurationError, "failed"):
        ReplayProcess().check()


def test_process_runs_nothing_of_the_project_and_little_else(process):
    """What it was started with, the files that it holds, and its limits."""
    process.check()
    command = open(f"/proc/{process.pid}/cmdline", "rb").read().decode().split("\0")  # noqa: SIM115, PTH123
    assert command[1:3] == ["-I", "-B"]
    assert command[3] == replay.__file__
    limits = open(f"/proc/{process.pid}/limits").read()  # noqa: SIM115, PTH123
    space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert "unlimited" not in space.split("  ")[1:3][0] and int(space.split()[3]) < 64 * 2**30  # noqa: PT018
    assert core.split()[4:6] == ["0", "0"]
    files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]  # noqa: PTH115, PTH208
    assert all(name.startswith(("pipe:", "/dev/null", "anon_inode:")) for name in files), files


def test_process_ends_when_nobody_asks_any_more():
    made = ReplayProcess()
    made.add(PROGRAM)
    made.check()
    pid = made.pid
    del made
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_process_with_more_memory_than_asked_for_fails_that_record_alone():
    """A program of 8 GiB of zeros where it asked for a few bytes."""

    def large(parameters, fixed, record):
        return [record[0] + parameters[0] + torch.zeros(1 << 31, dtype=torch.float32).sum() * 0.0]

    program = captured(large, [torch.zeros(1)], [], [torch.zeros(1)])
    assert program.memory > 1 << 33
    small = Program(program.kind, program.content, program.constants, program.results, 100)
    for limited, fails in ((small, True), (PROGRAM, False)):
        made = ReplayProcess()
        made.add(limited)
        record = RECORD if limited is PROGRAM else [np.ones(1, np.float32)]
        point = POINT if limited is PROGRAM else [np.ones(1, np.float32)]
        if fails:
            with pytest.raises(InvalidRecordError):
                made.compute(limited, point, record)
        else:
            made.compute(limited, point, record)
        made.close()


def changed(program, **content):
    return Program(program.kind, {**program.content, **content}, program.constants, program.results, program.memory)


def test_hash_covers_every_step_and_every_constant():
    def scaled(constant):
        return captured(lambda p, f, r: [p[0] * f[0] * r[0]], [torch.ones(2)], [constant], [torch.ones(2)])

    one = scaled(torch.tensor([1.0, 2.0]))
    assert one.digest == scaled(torch.tensor([1.0, 2.0])).digest
    assert one.digest != scaled(torch.tensor([1.0, 2.0 + 2**-20])).digest
    assert one.digest != scaled(torch.tensor([1.0, 2.0]).double()).digest
    assert one.digest != changed(one, parameters=2).digest
    assert one.digest != changed(one, steps=one.content["steps"][:-1]).digest
    assert one.digest != changed(one, bounds={"0": [0, 1, None]}).digest


@pytest.mark.parametrize("name", ["bernoulli", "add_", "empty", "as_strided", "nonzero", "_unsafe_index"])
def test_process_refuses_programs_with_other_operators(name):
    overload = getattr(torch.ops.aten, name).overloads()[0]
    steps = [["input", 0], ["call", name, overload, [{"n": 0}], {}], ["results", [{"n": 1}]]]
    program = Program("torch", {**PROGRAM.content, "steps": steps}, {}, PROGRAM.results, 0)
    with pytest.raises(ValueError, match="none of a program"):
        _ = program.runnable
    serving = replay.Serving(1)
    header = {"do": "load", "kind": "torch", "name": "a", "names": [], "memory": None, "program": program.content}
    answer, _ = serving.answer(header, [])
    assert answer["ok"] is False


def test_process_refuses_programs_that_write():
    steps = [["input", 0], ["call", "add", "out", [{"n": 0}, {"n": 0}], {"out": {"n": 0}}], ["results", [{"n": 1}]]]
    program = Program("torch", {**PROGRAM.content, "steps": steps}, {}, PROGRAM.results, 0)
    with pytest.raises(ValueError, match="writes"):
        _ = program.runnable


def test_messages_keep_arrays_of_every_shape_and_type():
    arrays = [np.array(3), np.zeros((0, 2)), np.ones((2, 3), np.float32).T, np.array([True]), np.ones(2, np.float16)]
    sent, received = os.pipe()[::-1]
    with os.fdopen(sent, "wb") as writing, os.fdopen(received, "rb") as reading:
        replay.write_message(writing, {"do": "x"}, arrays)
        header, found = replay.read_message(reading)
    assert header == {"do": "x"}
    for one, other in zip(arrays, found, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def program_of(compute, *shapes, held=None):
    module = torch.nn.Linear(2, 2)
    programs = RecordPrograms(lambda held, values, inputs, target: [compute(inputs)], module, [], held)
    return programs.program(*shapes, ())


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.empty(2) + x,
        lambda x: torch.empty_like(x) + x,
        lambda x: x.new_empty(2) + x,
        lambda x: torch.empty_strided((2,), (1,)) + x,
        lambda x: x.new_empty_strided((2,), (1,)) + x,
        lambda x: torch.Tensor(2) + x,
    ],
)
def test_memory_that_nobody_wrote_to_is_zeros(made):
    program = program_of(made, torch.ones(2))
    assert "empty" not in str(program.content)
    (found,) = program.runnable.compute(program.runnable.point([]), [np.array([1.5, 2.5], np.float32)])
    assert found.tolist() == [1.5, 2.5]


def test_default_type_of_the_process_is_part_of_a_program():
    torch.set_default_dtype(torch.float64)
    try:
        program = program_of(lambda x: x.double() + torch.ones(2), torch.ones(2))
    finally:
        torch.set_default_dtype(torch.float32)
    (found,) = program.runnable.compute([], [np.ones(2, np.float32)])
    assert found.dtype == np.float64


def test_constants_of_every_type_come_through(process):
    for kind in (torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.float64, torch.uint8):
        constant = torch.tensor([0, 1, 1]).to(kind)
        program = captured(lambda p, f, r: [f[0].float() + r[0]], [], [constant], [torch.zeros(3)])
        process.add(program)
        (found,) = process.compute(program, [], [np.zeros(3, np.float32)])
        assert found.tolist() == [0.0, 1.0, 1.0]


def test_values_of_a_record_are_in_no_program():
    secret = torch.tensor([777.25, 3.0])
    text = str(program_of(lambda x: x * 2.0, secret).content)
    assert "777" not in text
    assert (777.25).hex() not in text


KEPT, ONE = torch.zeros(3), torch.ones(1)


@torch.library.custom_op("replays::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return 2.0 * values


twice.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (torch.bernoulli, "bernoulli"),
        (lambda values: torch.ops.aten._unsafe_index(values, [torch.tensor([1])]), "_unsafe_index"),
        (lambda values: torch.fft.rfft(values).real, "_fft_r2c"),
        (lambda values: torch.as_strided(values, (1,), (1,), 9), "as_strided"),
        (lambda values: values.mul_(2.0), "writes to its parameters, buffers or the record"),
        (lambda values: KEPT.copy_(values), "writes to|RuntimeError"),
        (lambda values: values[values > 0.0], "depend on a record's values"),
        (lambda values: twice(values), "replays.twice.default, which is not PyTorch's own"),
        (
            lambda values: torch.ops.aten.native_batch_norm(values[None], None, None, ONE, ONE, False, 0.1, 1e-5)[0],
            "statistics of another size",
        ),
    ],
)
def test_capture_error_says_the_operator(compute, name):
    with pytest.raises(CaptureError, match=name):
        captured(lambda p, f, r: [compute(r[0])], [], [], [torch.zeros(3)])


CLIP = 1.0
POLICY = PrivacyPolicy(
    clip_norm=CLIP,
    batch_size=1,
    max_participations=1,
    mu=1.0,
    batch_selection="full_batch",
    mechanism="independent",
    release_rule="paper",
)


def batch(strange=None):
    tokens, labels = np.tile(RECORD[0], (6, 1)), np.ones(6, np.int64)
    if strange is not None:
        tokens[2], labels[2] = strange
    return Held(tokens, labels)


def client_of(gradients, samples, keys=None):
    return FullBatchClient(gradients, samples, POLICY, DurableLedger(), keys or FixedNonces(), name="7")


def test_real_client_computes_in_a_process_of_its_own_and_a_simulated_one_does_not():
    for simulated in (True, False):
        gradients = made_gradients()
        if not simulated:
            gradients.program(*map(torch.tensor, RECORD))
        keys = SimulatedKeys(1, "7") if simulated else None
        client = client_of(gradients, batch(), keys)
        assert (gradients.process is None) == simulated
        client.fit(POINT, training_config())
        assert simulated or gradients.process.pid is not None
        assert programs_of(gradients) == f"gradient {PROGRAM.digest[:16]}"


@pytest.mark.parametrize("wrap", [lambda found: OwnerGradients(found, one_by_one=True), CountedGradients])
def test_gradients_of_gradients_are_computed_in_a_process_of_their_own_as_well(wrap):
    gradients = made_gradients()
    gradients.program(*map(torch.tensor, RECORD))
    replay_process_of = wrap(gradients)
    per_sample_gradients.isolate(replay_process_of)
    assert gradients.process.pid is not None
    assert programs_of(replay_process_of)


def test_real_client_whose_samples_nobody_described_is_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    with raises(ConfigurationError, "missing", "example"):
        client_of(TorchGradients(module, CROSS_ENTROPY), batch())
    example = np.zeros((1, 3, 4), np.float32), np.zeros(1, np.int64)
    client_of(TorchGradients(module, CROSS_ENTROPY, example=example), batch())


@pytest.mark.parametrize("strange", [([4, 4, 4], 2), ([0, 5, 2], 1), ([0, 4, 2], 3), ([0, -7, 2], -1)])
def test_strange_record_moves_a_release_by_no_more_than_is_charged(strange):
    """Noise is the same in both worlds, because nonces are; a label or token out of range counts as zero."""
    released = []
    for samples in (batch(), batch(strange)):
        gradients = made_gradients()
        gradients.program(*map(torch.tensor, RECORD))
        client = client_of(gradients, samples)
        sent, _, _ = client.fit(POINT, training_config())
        released.append(np.concatenate([part.ravel() for part in sent]))
    charged = client.privatizer.plan.sensitivity
    assert 0.0 < np.linalg.norm(released[0] - released[1]) <= charged * (1 + 1e-12)


def test_record_of_other_inputs_is_none_of_those_that_were_captured():
    """Inputs of the same shapes, but of other names or number types, fit no program, though its process could run."""

    class Difference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, one, other):
            return (one - 2 * other) @ self.weight

    gradients = ModuleGradients(Difference(), lambda output, target: (output - target).square().sum())
    row = {"one": torch.ones(2), "other": torch.zeros(2)}
    gradients.program(row, torch.tensor(1.0))
    gradients.isolate()
    point, target = [np.ones(2, np.float32)], np.ones(1, np.float32)
    batch = {name: values[None].numpy() for name, values in row.items()}
    assert np.isfinite(gradients(point, (batch, target))).all()
    with pytest.raises(InvalidRecordError):
        gradients(point, ({"other": batch["one"], "one": batch["other"]}, target))
    gradients.process.close()


def test_model_that_knows_how_often_it_was_captured_is_refused():
    calls = []

    def counting(parameters, fixed, record):
        calls.append(None)
        return [record[0] * float(len(calls))]

    with pytest.raises(CaptureError, match="another list the second time"):
        captured(counting, [], [], [torch.zeros(3)])


@pytest.mark.parametrize("name", ["a label out of range", "a label below", "a token out of range", "a token below"])
def test_index_out_of_range_is_found_before_an_operator_meets_it(name):
    """On a GPU an operator that meets it ends every computation that follows."""
    with pytest.raises(replay.UnfitRecordError):
        by_hand(UNFIT[name])
