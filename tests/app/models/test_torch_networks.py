"""Networks in PyTorch and models of one's own: their gradients, memory, and rows that stand alone."""

import textwrap

import numpy as np
import pytest
import torch
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.models import linear as softmax
from murmurfl.app.models import make_model
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.models.torch_networks import ConvolutionalNetwork, MultilayerPerceptron
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import TorchGradients
from murmurfl.clients.adapters.per_sample_gradients import (
    LEAST_TOGETHER,
    ChunkedContributions,
    Need,
    chunks,
    combined_gradients,
    peak_bytes,
    rows_unmixed,
    stacked_gradients,
)
from murmurfl.clients.adapters.torch_model import ModuleGradients
from murmurfl.clients.full_batch_client import CountedGradients
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.release.clipping import DenseContributions, RowBound, squared_lengths

from tests.harness.errors import raises


def test_the_papers_cnn_has_the_papers_layers():
    model = make_model("cnn", 784, 10)
    assert [shape for shape in model.shapes if len(shape) > 1] == [
        (32, 1, 3, 3), (32, 32, 3, 3), (64, 800), (32, 64), (10, 32),
    ]  # fmt: skip
    assert model.num_parameters == 63_242
    generator = np.random.Generator(np.random.Philox(key=42))
    batch = generator.random((3, 784), dtype=np.float32), np.array([1, 5, 9])
    parameters = model.initial_parameters(1)
    flat = np.concatenate([values.ravel() for values in parameters])
    together = model.at_points(np.tile(flat, (3, 1)), batch)
    assert together == pytest.approx(model(parameters, batch), abs=1e-6)
    assert model.logits(parameters, batch[0]).shape == (3, 10)
    with raises(ConfigurationError, "conflict", "model"):
        make_model("cnn", 783, 10)


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_scores_are_its_modules(side):
    model = make_model("cnn", side * side, 10)
    parameters = [values * 3 for values in model.initial_parameters(5)]
    images = np.random.Generator(np.random.Philox(key=44)).standard_normal((230, side * side), dtype=np.float32)
    named = dict(zip(model.names, map(torch.as_tensor, parameters), strict=True))
    expected = torch.func.functional_call(model.module, named, (torch.as_tensor(images),)).detach().numpy()
    assert np.ptp(expected) > 1
    assert model.logits(parameters, images) == pytest.approx(expected, rel=1e-5, abs=1e-4)  # of values around 50


@pytest.mark.parametrize("side", [10, 13, 28])
def test_the_cnns_closed_form_is_what_pytorch_derives(side):
    model = make_model("cnn", side * side, 10)
    reference = TorchGradients(model.module, torch.nn.functional.cross_entropy)
    generator = np.random.Generator(np.random.Philox(key=43))
    images = generator.random((4, side, side), dtype=np.float32)
    images[:, : side // 2] = 0.0  # black and white areas: many values of a pooling window are the same
    images[:, -side // 4 :] = 1.0
    batch = images.reshape(4, -1), np.array([0, 3, 3, 9])
    starts = [model.initial_parameters(seed) for seed in range(4)]
    points = np.stack([np.concatenate([values.ravel() for values in start]) for start in starts]).astype(np.float64)
    rows = model.at_points(points, batch)
    assert rows == pytest.approx(reference.at_points(points, batch), abs=1e-6)
    assert model(starts[2], batch)[2] == pytest.approx(rows[2], abs=1e-6)
    # A sample that is not finite spoils its own row and no other.
    batch[0][1, 5] = np.nan
    again = model.at_points(points, batch)
    assert not np.isfinite(again[1]).all()
    assert np.array_equal(again[[0, 2, 3]], rows[[0, 2, 3]])


@pytest.mark.parametrize(("name", "features"), [("mlp", 6), ("cnn", 196)])
def test_a_networks_mean_gradient_is_the_mean_of_its_samples(name, features):
    model = make_model(name, features, 10)
    rng = np.random.default_rng(3)
    batch = rng.random(size=(150, features)).astype(np.float32), rng.integers(10, size=150)
    parameters = model.initial_parameters(1)
    assert model.mean_gradient(parameters, batch) == pytest.approx(model(parameters, batch).mean(axis=0), abs=1e-6)


def test_a_run_says_how_much_memory_gradients_may_take():
    made = prepare(RunConfig(model="mlp", gradient_memory_mib=96.0)).model
    assert made.gradient_memory_mib == 96.0
    assert made._gradients.gradient_memory_mib == 96.0


def test_a_model_without_a_network_refuses_it():
    with raises(ConfigurationError, "conflict", "model.gradient-memory-mib"):
        RunConfig(model="softmax", gradient_memory_mib=96.0)


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
    of_many = gradients.of_many

    def counted(parameters, inputs, targets):
        sizes.append(len(targets))
        return of_many(parameters, inputs, targets)

    monkeypatch.setattr(gradients, "of_many", counted)
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
    with raises(
        ConfigurationError,
        "out-of-range",
        "gradient_memory_mib",
        match=r"at least (0\.\d+) MiB, which the gradient of a single",
    ) as refusal:
        small(point_of(made), SAMPLES)
    needed = float(str(refusal.value).split("at least ")[1].split(" MiB")[0])
    assert 4 * width_of(made) / 2**20 < needed < 14 * width_of(made) / 2**20
    rows = kind(made, LOSS, gradient_memory_mib=needed)(point_of(made), SAMPLES)
    assert close(rows, kind(made, LOSS)(point_of(made), SAMPLES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_by_itself_is_computed_whatever_was_stated(kind):
    """As on a real client, where a refusal would count as a gradient of zero."""
    made = module()
    one = SAMPLES[0][:1], SAMPLES[1][:1]
    small = kind(made, LOSS, gradient_memory_mib=1e-6)(point_of(made), one)
    assert np.array_equal(small, kind(made, LOSS)(point_of(made), one))


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), float("inf"), True, "256"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_is_a_number_of_mebibytes(kind, memory):
    with raises(ConfigurationError, "out-of-range", "gradient_memory_mib"):
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


COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 126, 127, 200]


def generator(seed=1):
    return np.random.Generator(np.random.Philox(key=seed))


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (MultilayerPerceptron(64, 10), 200),
        (ConvolutionalNetwork(144, 10), 9),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_gradients_of_models_that_say_so_stand_alone(model, most):
    assert model.rows_stand_alone
    draws = generator(2)
    features = draws.standard_normal((most, model.num_features)).astype(np.float32)
    labels = draws.integers(0, max(model.num_classes, 2), most)
    points = [[draws.standard_normal(shape) for shape in model.shapes] for _ in range(2)]

    def rows_of(chosen):
        stack = stacked_gradients(model, points, (3.0, -2.0), (features[chosen], labels[chosen]))
        rows = np.empty((len(chosen), model.num_parameters))
        for i, row in enumerate(rows):
            stack.write(i, 1.0, row)
        return np.column_stack([rows, stack.norms()])

    whole = rows_of(np.arange(most))
    for count in [count for count in COUNTS if count <= most]:
        chosen = draws.permutation(most)[:count]
        assert (rows_of(chosen) == whole[chosen]).all(), count


def test_a_single_row_has_the_length_it_has_among_others():
    """NumPy adds up the values of a single long row in another order."""
    rows = generator(3).standard_normal((3, 20_000))
    assert (squared_lengths(rows[1:2]) == squared_lengths(rows)[1:2]).all()


EXTREMES = {
    "zeros": 0.0,
    "tiny": 1e-310,
    "small": 1e-160,
    "just beyond the bound": 0.5 * (1 + 2.0**-45),
    "huge": 1e160,
    "infinite": np.inf,
    "not a number": np.nan,
}


def bounded_rows(model, point, features, labels):
    with np.errstate(all="ignore"):
        return RowBound(0.7).rows(np.asarray(model(point, (features, labels))))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("reach", [1.0, 1e9, 1e200])
@pytest.mark.parametrize("kind", ["softmax", "logistic", "ridge", "counted"])
def test_no_bit_of_a_row_depends_on_a_sample_beside_it(kind, reach, extreme):
    """However far away a hostile point is: rows of models that say so are computed together on real clients."""
    classes = 1 if kind == "ridge" else 2
    model = made = make_model("softmax" if kind == "counted" else kind, 16, classes, 2.0)
    draws = generator(7)
    point = [reach * draws.standard_normal(shape) for shape in made.shapes]
    if kind == "counted":
        model, point = CountedGradients(made), [*point, np.array([0.5])]
    assert rows_unmixed(model)
    features = draws.standard_normal((257, 16)).astype(np.float32).astype(np.float64)
    labels = draws.integers(0, 2, 257)
    before = bounded_rows(model, point, features, labels)
    for place in (0, 128, 256):
        beside = features.copy()
        beside[place] = extreme
        rows = bounded_rows(model, point, beside, labels)
        assert np.array_equal(np.delete(rows, place, 0), np.delete(before, place, 0), equal_nan=True)


def test_a_model_that_centres_its_batch_would_be_noticed():
    """The planted bug, for the test above."""

    class Centring(SoftmaxRegression):
        def __call__(self, parameters, samples):
            return super().__call__(parameters, (samples[0] - samples[0].mean(axis=0), samples[1]))

    model, draws = Centring(16, 2), generator(7)
    point = [draws.standard_normal(shape) for shape in model.shapes]
    features, labels = draws.standard_normal((257, 16)), draws.integers(0, 2, 257)
    beside = features.copy()
    beside[128] = 1e-310
    one, other = (bounded_rows(model, point, made, labels) for made in (features, beside))
    assert not np.array_equal(one[0], other[0])
    assert not rows_unmixed(model), "a subclass does not inherit what its ancestor says of itself"


MINE = """
import numpy as np
import torch
from murmurfl.app.models.model import ModelKind
from murmurfl.app.models.linear import SoftmaxRegression


def make_model(num_features, num_classes):
    return SoftmaxRegression(num_features, num_classes)


def make_module(num_features, num_classes):
    layers = torch.nn.Linear(num_features, 12), torch.nn.ReLU(), torch.nn.Linear(12, num_classes)
    return torch.nn.Sequential(*layers)


def started_at_ones(num_features, num_classes):
    module = torch.nn.Linear(num_features, num_classes)
    torch.nn.init.ones_(module.bias)
    return module


class Mine(ModelKind):
    name = "mine"
    paper_constants = True

    def make(self, num_features, num_classes, feature_bound):
        return SoftmaxRegression(num_features, num_classes)


class Short(SoftmaxRegression):
    def __call__(self, parameters, samples):
        return super().__call__(parameters, samples)[:, 1:]


class Nameless(SoftmaxRegression):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.names = []


def short(*sizes):
    return Short(*sizes)


def nameless(*sizes):
    return Nameless(*sizes)


def text(num_features, num_classes):
    return "a model"


def fails(num_features, num_classes):
    raise RuntimeError("this one never works")


def one_score(num_features, num_classes):
    return torch.nn.Linear(num_features, 1)


def other_inputs(num_features, num_classes):
    return torch.nn.Linear(num_features + 1, num_classes)


def with_buffers(num_features, num_classes):
    return torch.nn.Sequential(torch.nn.BatchNorm1d(num_features), torch.nn.Linear(num_features, num_classes))


def without_parameters(num_features, num_classes):
    return torch.nn.Identity()


module = torch.nn.Linear(64, 10)
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "my_murmurfl_models.py").write_text(textwrap.dedent(MINE))
    monkeypatch.syspath_prepend(tmp_path)


def config(model, **changes):
    settings = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 6, "checkpoint": False}
    return RunConfig(model=f"my_murmurfl_models:{model}", **{**settings, **changes})


@pytest.mark.parametrize("model", ["make_model", "Mine"])
def test_a_model_of_ones_own_trains_as_the_built_in_one_that_it_is(model):
    expected = run_cohort(RunConfig(num_clients=3, clients_per_round=3, num_rounds=6, checkpoint=False))
    for run in (run_cohort, run_in_process):
        result = run(config(model))
        assert result.accuracy == expected.accuracy
    assert all((a == b).all() for a, b in zip(run_cohort(config(model)).parameters, expected.parameters, strict=True))


@pytest.mark.parametrize(
    ("strategy", "step"), [("noisy-sgd", 1.0), pytest.param("online", 0.1, marks=pytest.mark.long)]
)
def test_a_torch_module_of_ones_own_learns_on_every_engine_in_this_process(strategy, step):
    run_config = config("make_module", strategy=strategy, mechanism="none", learning_rate=step, num_rounds=50)
    cohort, in_process = (run(run_config) for run in (run_cohort, run_in_process))
    assert cohort.accuracy == in_process.accuracy > 0.5
    names = cohort.experiment.model.names
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for one, two in zip(cohort.parameters, in_process.parameters, strict=True):
        assert one == pytest.approx(two, abs=1e-5)


def test_a_seed_starts_a_module_without_touching_global_generators():
    model = make_model("my_murmurfl_models:started_at_ones", 5, 3)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first, again, other = (model.initial_parameters(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(4), expected)
    assert first[1].tolist() == [1.0, 1.0, 1.0]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first[0] != other[0]).any()


def test_a_torch_modules_gradients_are_the_slopes_of_its_loss():
    model = make_model("my_murmurfl_models:make_module", 6, 3)
    generator = np.random.Generator(np.random.Philox(key=9))
    batch = generator.normal(size=(300, 6)).astype(np.float32), generator.integers(3, size=300)
    start = model.initial_parameters(1)
    rows = model(start, batch)
    flat = np.concatenate([values.ravel() for values in start])
    assert model.at_points(np.tile(flat, (300, 1)), batch) == pytest.approx(rows, abs=1e-6)
    assert model.mean_gradient(start, batch) == pytest.approx(rows.mean(axis=0), abs=1e-6)
    way = [generator.normal(size=shape) for shape in model.shapes]
    ahead, behind = (
        model.evaluate([(s + sign * 5e-3 * w).astype(np.float32) for s, w in zip(start, way, strict=True)], batch)[0]
        for sign in (1, -1)
    )
    slope = rows.mean(axis=0) @ np.concatenate([w.ravel() for w in way])
    assert (ahead - behind) / 1e-2 == pytest.approx(slope, rel=2e-2, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("text", "a Model or a torch.nn.Module, got str"),
        ("fails", "RuntimeError: this one never works"),
        ("short", r"gradient of shape \(1, 650\) for one sample, got \(1, 649\)"),
        ("nameless", "one named array for each of its shapes"),
        ("one_score", r"scores of shape \(1, 10\) for one sample, got \(1, 1\)"),
        ("other_inputs", "scores and a gradient for one sample of 64 values"),
        ("with_buffers", "BatchNorm1d at '0', .*: use torch.nn.GroupNorm"),
        ("without_parameters", "with parameters"),
    ],
)
def test_models_that_will_not_do_are_refused_with_what_is_wrong(model, words):
    with pytest.raises(ConfigurationError, match=words):
        run_cohort(config(model))


def test_a_module_in_place_of_a_function_is_refused():
    with raises(ConfigurationError, "wrong-type", "model"):
        config("module")


def test_the_papers_constants_are_for_models_that_say_so():
    assert config("Mine", preset="paper").preset == "paper"
    with raises(ConfigurationError, "conflict", "preset"):
        config("make_model", preset="paper")
