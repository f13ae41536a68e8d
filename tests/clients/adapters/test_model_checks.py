"""Models that mix samples, draw at random, remember or branch on values are refused by name, with what to use."""

import numpy as np
import pytest
from murmurfl.clients import Label, Part, Schema, private_client_app
from murmurfl.privacy import ConfigurationError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients  # noqa: E402

from tests.harness.trials import made_up_like  # noqa: E402

nn = torch.nn

GENERATOR = np.random.Generator(np.random.Philox(key=11))
IMAGES = GENERATOR.normal(size=(5, 2, 6, 6)).astype(np.float32)
CLASSES = np.arange(5) % 3


def convolution(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.Linear(64, 3))


def layer(forward, **kept):
    made = type("Own", (nn.Module,), {"forward": forward, **kept})
    return convolution(made())


def with_buffer():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, 4, 4))

        def forward(self, values):
            self.mean.mul_(0.9).add_(0.1 * values.detach().mean(0))
            return values - self.mean

    return convolution(Running())


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(72, 3)

    def forward(self, images):
        return self.inner((images - images.mean(0)).flatten(1))


def remembering(self, values):
    self.seen = 0.5 + getattr(self, "seen", 0.0)
    return values - self.seen


def transformer(dropout):
    inner = nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), inner, nn.Flatten(), nn.Linear(72, 3))


REFUSED = {
    "batch norm": (lambda: convolution(nn.BatchNorm2d(4)), r"BatchNorm2d at '1'.*GroupNorm.*\.eval\(\)"),
    "batch norm of the batch": (
        lambda: convolution(nn.BatchNorm2d(4, track_running_stats=False)).eval(),
        "BatchNorm2d at '1'.*GroupNorm",
    ),
    "instance norm that remembers": (
        lambda: convolution(nn.InstanceNorm2d(4, track_running_stats=True)),
        "InstanceNorm2d at '1'.*track_running_stats=False",
    ),
    "dropout": (lambda: convolution(nn.Dropout(0.5)), r"Dropout at '1'.*leave it out"),
    "dropout in attention": (lambda: transformer(0.1), "MultiheadAttention at '1.self_attn'.*leave it out"),
    "dropout in a recurrence": (lambda: nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.2)), "LSTM at '0'.*leave it out"),
    "dropout as a function": (
        lambda: layer(lambda self, values: nn.functional.dropout(values)),
        "draws nothing at random.*leave it out",
    ),
    "noise as a function": (
        lambda: layer(lambda self, values: values + torch.randn_like(values)),
        "draws nothing at random|another one the second time",
    ),
    "an if on values of the batch": (
        lambda: layer(lambda self, values: values if values[-1].sum() > values[0].sum() else -values),
        "data-dependent control flow.*torch.where",
    ),
    "item": (
        lambda: layer(lambda self, values: values * values.mean().item()),
        "data-dependent control flow.*no .item",
    ),
    "statistics of the batch": (
        lambda: layer(lambda self, values: values - values.mean(0)),
        "Own at '1', which mixes samples.*LayerNorm",
    ),
    "statistics in its own forward": (Centring, "Centring at 'the top', which mixes samples"),
    "a running mean": (with_buffer, "writes to no tensor of its own.*GroupNorm"),
    "a memory": (lambda: layer(remembering), r"remembers nothing.*changes model\.1\.seen"),
    "weights that shrink themselves": (
        lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3)),
        "Embedding at '0'.*max_norm",
    ),
    "no parameters yet": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "LazyLinear at '1'.*run the module"),
    "nothing to train": (lambda: convolution().requires_grad_(False), "requires_grad"),
    "no module": (lambda: 3, "torch.nn.Module or a function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_a_samples_own_is_refused_by_name(name):
    make, said = REFUSED[name]
    with pytest.raises(ConfigurationError, match=said):
        private_client_app(make, samples=(IMAGES, CLASSES), mu=1.0, rounds=2)


def test_targets_that_broadcast_against_outputs_are_named():
    """The common mistake of a regression: nothing fails, and every output is held against every target."""
    values, module = np.ones((5, 3), dtype=np.float32), lambda: nn.Linear(3, 1)
    with pytest.raises(ConfigurationError, match=r"targets\[:, None\]"), pytest.warns(UserWarning, match="target size"):
        private_client_app(module, nn.MSELoss(), (values, values[:, 0]), mu=1.0, rounds=2)
    private_client_app(module, nn.MSELoss(), (values, values[:, :1]), mu=1.0, rounds=2)


LOSSES = {
    "a class": (nn.CrossEntropyLoss, r"write CrossEntropyLoss\(\)"),
    "samples in its place": ((IMAGES, CLASSES), r"private_client_app\(model, loss, samples\)"),
    "contrastive": (lambda output, target: ((output @ output.T) - 1).square().mean(), "loss of each sample by itself"),
    "weighted": (nn.CrossEntropyLoss(weight=torch.ones(3)), "reduction='sum'"),
    "weighted as a function": (
        lambda output, target: nn.functional.cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 3.0])),
        "loss of each sample by itself.*weighted within the batch",
    ),
    "no scalar": (nn.CrossEntropyLoss(reduction="none"), "scalar.*'mean'"),
    "no scalar, as a function": (
        lambda output, target: nn.functional.cross_entropy(output, target, reduction="none"),
        "scalar.*reduction='mean'",
    ),
    "another type": (nn.BCEWithLogitsLoss(), "one sample like this machine's"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_more_than_one_sample_is_refused(name):
    loss, said = LOSSES[name]
    with pytest.raises(ConfigurationError, match=said):
        private_client_app(convolution, loss, (IMAGES, CLASSES), mu=1.0, rounds=2)


FIT = {
    "group norm": lambda: convolution(nn.GroupNorm(2, 4)),
    "instance norm": lambda: convolution(nn.InstanceNorm2d(4, affine=True)),
    "frozen batch norm": lambda: convolution(nn.BatchNorm2d(4)).eval(),
    "in place": lambda: convolution(nn.ReLU(inplace=True)),
    "attention": lambda: transformer(0.0),
    "a class": type(
        "Whole",
        (nn.Sequential,),
        {"__init__": lambda self: nn.Sequential.__init__(self, nn.Flatten(), nn.Linear(72, 3))},
    ),
}


@pytest.mark.parametrize("name", FIT)
def test_a_model_that_treats_each_sample_by_itself_is_taken(name):
    for loss in (None, nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum")):
        private_client_app(FIT[name], loss, (IMAGES, CLASSES), mu=1.0, rounds=2)


def test_regression_and_two_classes_with_one_score_are_taken():
    values = GENERATOR.normal(size=(5, 1))
    head = nn.Sequential(nn.Flatten(), nn.Linear(72, 1))
    private_client_app(head, nn.MSELoss(), (IMAGES, values), mu=1.0, rounds=2)
    private_client_app(head, nn.BCEWithLogitsLoss(), (IMAGES, (values > 0).astype(float)), mu=1.0, rounds=2)


def test_no_value_of_a_sample_is_looked_at_when_a_model_is_tried(monkeypatch):
    """What decides whether a node starts must not depend on anybody's data: not even an infinity shows."""
    seen = []
    tried = SampleTrials.__call__

    def spy(self, examples, **others):
        seen.extend(examples)
        tried(self, examples, **others)

    monkeypatch.setattr(SampleTrials, "__call__", spy)
    private_client_app(convolution, samples=(np.full_like(IMAGES, np.inf), CLASSES), mu=1.0, rounds=2)
    assert seen
    assert "inf" not in repr(seen)


def test_a_model_that_branches_on_a_samples_own_values_is_computed_one_by_one():
    """As the masks of transformers' models do: each sample is by itself then, and that is all that privacy needs."""
    module = layer(lambda self, values: values if values.amax() > -1e6 else -values)
    gradients = ModuleGradients(module, nn.functional.cross_entropy)
    SampleTrials(gradients)(made_up_like(IMAGES, CLASSES))
    assert not gradients.together
    arrays = [parameter.detach().numpy() for parameter in module.parameters()]
    rows = gradients(arrays, (IMAGES, CLASSES))
    assert rows[2] == pytest.approx(gradients(arrays, (IMAGES[2:3], CLASSES[2:3]))[0], abs=1e-6)


def test_a_samples_function_tries_the_model_on_its_schema():
    def never(context):
        raise AssertionError("no machine is there yet")

    mixing = lambda: layer(lambda self, values: values - values.mean(0))  # noqa: E731
    private_client_app(mixing, samples=never, mu=1.0, rounds=2)
    schema = Schema(inputs=(Part(shape=(2, 6, 6), bounds=(-9, 9)),), label=Label(classes=3))
    with pytest.raises(ConfigurationError, match="mixes samples"):
        private_client_app(mixing, samples=never, schema=schema, mu=1.0, rounds=2)
