"""Gradients of several samples are computed in the memory that was set aside for them."""

import numpy as np
import pytest
import torch
from murmurfl.app.models import linear as softmax
from murmurfl.clients import TorchGradients
from murmurfl.clients.adapters.per_sample_gradients import (
    LEAST_TOGETHER,
    ChunkedContributions,
    Need,
    chunks,
    combined_gradients,
    peak_bytes,
    stacked_gradients,
)
from murmurfl.clients.adapters.torch_model import ModuleGradients
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.machine.clipping import DenseContributions

LOSS = torch.nn.functional.cross_entropy
DRAW = np.random.Generator(np.random.Philox(key=7))
SAMPLES = DRAW.random((70, 60), dtype=np.float32), DRAW.integers(10, size=70)
KINDS = [TorchGradients, ModuleGradients]


def module(hidden=100):
    generator = torch.Generator().manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(60, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 10))
    with torch.no_grad():
        for values in made.parameters():
            values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    return made


def point_of(made):
    return [values.detach().numpy() for values in made.parameters()]


def width_of(made):
    return sum(values.numel() for values in made.parameters())


def close(rows, expected):
    return rows.shape == expected.shape and np.abs(rows - expected).max() <= 1e-5 * np.abs(expected).max()


def watched(gradients, monkeypatch):
    """How many samples each call to the module's vmapped gradient had."""
    sizes = []
    name = "of_many" if isinstance(gradients, ModuleGradients) else "_gradients"
    of_many = getattr(gradients, name)

    def counted(parameters, inputs, targets):
        sizes.append(len(targets))
        return of_many(parameters, inputs, targets)

    monkeypatch.setattr(gradients, name, counted)
    return sizes


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_fit_memory_and_keep_rows(kind, monkeypatch):
    made = module()
    expected = kind(made, LOSS)(point_of(made), SAMPLES)
    for memory in (0.4, 0.8, 2.0):
        gradients = kind(made, LOSS, gradient_memory_mib=memory)
        sizes = watched(gradients, monkeypatch)
        rows = gradients(point_of(made), SAMPLES)
        sizes = sizes[2:]  # one sample and two, to see what they need
        assert max(sizes) < 70
        assert max(sizes) * 4 * width_of(made) < memory * 2**20
        assert len(sizes) == -(-70 // max(sizes))
        assert close(rows, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tensors_take_stays_below_the_memory_that_was_stated(kind):
    made = module(hidden=400)
    peaks = []
    for memory in (0.8, 2.0, 5.0):
        gradients = kind(made, LOSS, gradient_memory_mib=memory)
        gradients(point_of(made), SAMPLES)
        peaks.append(peak_bytes(lambda gradients=gradients: gradients(point_of(made), SAMPLES)) / 2**20)
        assert peaks[-1] <= memory
        assert peaks[-1] > 0.4 * memory, "what is there is used"
    assert peaks == sorted(peaks)


def test_a_chunk_that_was_too_large_would_be_seen(monkeypatch):
    monkeypatch.setattr(Need, "samples", lambda self, memory_mib, beside=0: 70)
    made = module(hidden=400)
    gradients = TorchGradients(made, LOSS, gradient_memory_mib=2.0)
    assert peak_bytes(lambda: gradients(point_of(made), SAMPLES)) > 2 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_gradient_memory_is_refused_with_the_need(kind):
    made = module(hidden=400)
    small = kind(made, LOSS, gradient_memory_mib=0.1)
    with pytest.raises(ConfigurationError, match=r"at least (0\.\d+) MiB, which the gradient of a single") as refusal:
        small(point_of(made), SAMPLES)
    needed = float(str(refusal.value).split("at least ")[1].split(" MiB")[0])
    assert 4 * width_of(made) / 2**20 < needed < 14 * width_of(made) / 2**20
    rows = kind(made, LOSS, gradient_memory_mib=needed)(point_of(made), SAMPLES)
    assert close(rows, kind(made, LOSS)(point_of(made), SAMPLES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_by_itself_is_computed_whatever_was_stated(kind):
    """As on a real machine, where a refusal would count as a gradient of zero."""
    made = module()
    one = SAMPLES[0][:1], SAMPLES[1][:1]
    small = kind(made, LOSS, gradient_memory_mib=1e-6)(point_of(made), one)
    assert np.array_equal(small, kind(made, LOSS)(point_of(made), one))


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), float("inf"), True, "256"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_is_a_number_of_mebibytes(kind, memory):
    with pytest.raises(ConfigurationError, match="Expected gradient_memory_mib to be a number > 0"):
        kind(module(), LOSS, gradient_memory_mib=memory)


def test_gradients_at_points_of_their_own_are_chunked_as_well():
    made = module()
    points = np.concatenate([values.ravel() for values in point_of(made)]) + 0.01 * DRAW.random((70, width_of(made)))
    expected = TorchGradients(made, LOSS).at_points(points, SAMPLES)
    gradients = TorchGradients(made, LOSS, gradient_memory_mib=1.0)
    assert close(gradients.at_points(points, SAMPLES), expected)
    assert peak_bytes(lambda: gradients.at_points(points, SAMPLES)) < 2**20


def test_modules_whose_layers_are_functions_are_measured_too():
    """Scores of attention are no layer's output: whoever counts layers does not see them."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs):
            scores = (self.scale * inputs.unsqueeze(1)).mT @ inputs.unsqueeze(1)  # 60 x 60 a sample
            return torch.softmax(scores, dim=-1).sum(dim=-1)[:, :10]

    made = Attention()
    gradients = ModuleGradients(made, LOSS, gradient_memory_mib=0.5)
    gradients(point_of(made), SAMPLES)
    assert 0.2 * 2**20 < peak_bytes(lambda: gradients(point_of(made), SAMPLES)) <= 0.5 * 2**20


@pytest.mark.parametrize(("count", "step"), [(1, 1), (3, 2), (70, 64), (66, 64), (66, 33), (8, 100), (9, 4)])
def test_a_short_chunk_repeats_its_last_sample(count, step):
    seen = []
    for rows, positions in chunks(count, step):
        chosen = np.arange(count)[positions]
        assert np.array_equal(chosen[: rows.stop - rows.start], np.arange(rows.start, rows.stop))
        assert set(chosen) == set(range(rows.start, rows.stop))
        assert min(LEAST_TOGETHER, step, count) <= len(chosen) <= step
        seen.extend(range(rows.start, rows.stop))
    assert seen == list(range(count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [[1.0], [2.0, -0.5], [1.0, np.linspace(0.0, 1.0, 70)]], ids=["one", "two", "own"])
def test_rows_that_do_not_fit_are_made_again_when_they_are_written(kind, weights):
    made = module()
    points = [[values + 0.1 * i for values in point_of(made)] for i in range(len(weights))]
    at_once = stacked_gradients(kind(made, LOSS), points, weights, SAMPLES)
    assert not isinstance(at_once, ChunkedContributions)
    in_parts = stacked_gradients(kind(made, LOSS, gradient_memory_mib=3.0), points, weights, SAMPLES)
    assert isinstance(in_parts, ChunkedContributions)
    assert in_parts.norms() == pytest.approx(at_once.norms(), rel=1e-5)
    ours, theirs = np.empty((2, width_of(made)))
    for row in (0, 1, 69, 30, 31):
        in_parts.write(row, 0.25, ours)
        at_once.write(row, 0.25, theirs)
        assert close(ours, theirs)


def test_chunks_change_no_bit_of_what_does_not_depend_on_them():
    model = softmax.SoftmaxRegression(60, 10)

    class Rows:
        shapes, gradient_memory_mib = model.shapes, 0.1

        def __call__(self, parameters, samples):
            return np.stack(
                [model(parameters, (samples[0][i : i + 1], samples[1][i : i + 1]))[0] for i in range(len(samples[1]))]
            )

    points = [model.initial_parameters(1), [values + 1 for values in model.initial_parameters(1)]]
    in_parts = stacked_gradients(Rows(), points, [2.0, -1.0], SAMPLES)
    at_once = DenseContributions(combined_gradients(Rows(), points, [2.0, -1.0], SAMPLES))
    assert isinstance(in_parts, ChunkedContributions)
    assert in_parts.norms().tobytes() == at_once.norms().tobytes()
    ours, theirs = np.empty((2, model.num_parameters))
    for row in range(70):
        in_parts.write(row, 0.3, ours)
        at_once.write(row, 0.3, theirs)
        assert ours.tobytes() == theirs.tobytes()
