"""Models of a user's own, by name, and a clear refusal of those that will not do."""

import textwrap

import numpy as np
import pytest
import torch
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.models import make_model
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

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
    with pytest.raises(ConfigurationError, match="a function of the numbers of features and classes"):
        config("module")


def test_the_papers_constants_are_for_models_that_say_so():
    assert config("Mine", preset="paper").preset == "paper"
    with pytest.raises(ConfigurationError, match="'practical' unless model = 'softmax'"):
        config("make_model", preset="paper")
