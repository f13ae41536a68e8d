"""A module's per-sample gradients: of what is trained alone, sample by sample, whatever it is made of."""

import numpy as np
import pytest
from murmurfl.clients import load_trainable, trainable_arrays
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure
from murmurfl.privacy import ConfigurationError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials, torch_client_model  # noqa: E402

from tests.harness.errors import raises  # noqa: E402
from tests.harness.trials import made_up_like  # noqa: E402

nn = torch.nn
GENERATOR = torch.Generator().manual_seed(5)
IMAGES = torch.randn(7, 2, 6, 6, generator=GENERATOR)
TOKENS = torch.randint(0, 9, (7, 5), generator=GENERATOR)
CLASSES = torch.arange(7) % 3
CROSS_ENTROPY = nn.functional.cross_entropy


class Adapter(nn.Module):
    """A frozen layer beside two small ones that are trained, as LoRA has them."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(72, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(72, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, images):
        flat = images.flatten(1)
        return self.frozen(flat) + self.up(self.down(flat))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.inner, self.output = nn.Embedding(9, 4), kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens):
        return self.output(self.inner(self.embedding(tokens))[0][:, -1])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(72, 3), nn.Embedding(9, 3)

    def forward(self, images, tokens):
        return self.left(images.flatten(1)) + self.right(tokens).sum(1)


def convolution(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.Linear(64, 3))


def frozen_statistics():
    module = convolution(nn.BatchNorm2d(4))
    module(IMAGES)  # running statistics of its own
    return module.eval()


MODULES = {
    "plain": (convolution, IMAGES),
    "group norm": (lambda: convolution(nn.GroupNorm(2, 4)), IMAGES),
    "frozen batch norm, with buffers": (frozen_statistics, IMAGES),
    "dropout that is off": (lambda: convolution(nn.Dropout(0.5)).eval(), IMAGES),
    "adapter": (Adapter, IMAGES),
    "tied weights": (Tied, TOKENS),
    "recurrence": (lambda: Recurrent(nn.LSTM), TOKENS),
    "not for vmap": (lambda: Recurrent(nn.GRU), TOKENS),
    "two inputs": (TwoInputs, (IMAGES, TOKENS)),
    "float64": (lambda: convolution().double(), IMAGES),
}


def by_autograd(module, inputs, targets):
    """The reference: each sample alone, by plain autograd, over what requires grad."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kind = trained[0].dtype
    rows = []
    for i in range(len(targets)):
        one = tuple(part[i : i + 1] for part in (inputs if isinstance(inputs, tuple) else (inputs,)))
        one = tuple(part.to(kind) if part.is_floating_point() else part for part in one)
        loss = CROSS_ENTROPY(module(*one), targets[i : i + 1])
        gradient = torch.autograd.grad(loss, trained)
        rows.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(rows).double().numpy()


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        make, inputs = MODULES[name]
        module = make()
    model = torch_client_model(module, CROSS_ENTROPY, seed=0, chunk=None)
    SampleTrials(model.gradients)(made_up_like(inputs, CLASSES))
    return module, model.gradients, inputs


def point_of(module):
    return [array.numpy() for array in trainable_arrays(module).values()]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_are_each_samples_gradient_by_itself_of_what_is_trained(name, chunk):
    module, gradients, inputs = made(name)
    gradients.chunk = chunk
    before = {key: values.clone() for key, values in module.state_dict().items()}
    expected = by_autograd(module, inputs, CLASSES)
    rows = gradients(point_of(module), (inputs, CLASSES))
    assert rows.shape == (7, sum(int(np.prod(shape)) for shape in gradients.shapes)) == expected.shape
    assert rows == pytest.approx(expected, abs=2e-6)
    picked = tuple(part[2:3] for part in inputs) if isinstance(inputs, tuple) else inputs[2:3]
    alone = gradients(point_of(module), (picked, CLASSES[2:3]))
    assert alone[0] == pytest.approx(rows[2], abs=2e-6)
    assert all(torch.equal(values, before[key]) for key, values in module.state_dict().items())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_sent_as_float32_and_computed_as_the_module_has_it(kind):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        module = convolution().to(kind)
    gradients = torch_client_model(module, CROSS_ENTROPY, seed=0, chunk=None).gradients
    SampleTrials(gradients)(made_up_like(IMAGES, CLASSES))
    arrays = trainable_arrays(module)
    assert {array.dtype for array in arrays.values()} == {"float32"}
    rows = gradients(point_of(module), (IMAGES.numpy(), CLASSES.numpy()))
    assert rows == pytest.approx(by_autograd(module, IMAGES, CLASSES), abs=0.05)
    assert {p.dtype for p in load_trainable(module, arrays).parameters()} == {kind}


def test_only_what_is_trained_is_sent_once_and_in_order():
    assert list(trainable_arrays(Adapter())) == ["down.weight", "up.weight"]
    assert list(trainable_arrays(Tied())) == ["embedding.weight"]
    assert list(trainable_arrays(frozen_statistics())) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    ]
    with raises(ConfigurationError, "missing", "module"):
        trainable_arrays(nn.Linear(2, 2).requires_grad_(False))
    tied = load_trainable(Tied(), trainable_arrays(Tied()))
    assert torch.equal(tied.output.weight, tied.embedding.weight)


def test_sums_and_norms_without_widening_are_those_of_float64():
    module, gradients, _ = made("plain")
    point = point_of(module)
    rows = np.asarray(gradients(point, (IMAGES, CLASSES)), dtype=np.float64)
    stacked = gradients.stacked([point], [-2.0], (IMAGES, CLASSES))
    scales = np.linspace(0.1, 1.0, 7)
    assert stacked.norms() == pytest.approx(2 * np.linalg.norm(rows, axis=1), rel=1e-14)
    assert stacked.scaled_sum(scales) == pytest.approx(-2 * scales @ rows, rel=1e-12, abs=1e-14)
    out = np.empty(rows.shape[1])
    stacked.write(4, 0.5, out)
    assert out == pytest.approx(-rows[4], rel=1e-14)


def test_two_points_are_combined_in_float64():
    module, gradients, _ = made("plain")
    point = point_of(module)
    other = [values + 0.1 for values in point]
    made_of_two = gradients.stacked([point, other], [3.0, -2.0], (IMAGES, CLASSES))
    one, two = (np.asarray(gradients(at, (IMAGES, CLASSES)), dtype=np.float64) for at in (point, other))
    assert made_of_two.scaled_sum if hasattr(made_of_two, "scaled_sum") else True
    assert made_of_two.norms() == pytest.approx(np.linalg.norm(3 * one - 2 * two, axis=1))


def test_frozen_weights_are_equal_in_every_process():
    state = torch.random.get_rng_state()
    first, second = (torch_client_model(Adapter, None, seed=4, chunk=None).gradients.module for _ in range(2))
    assert torch.equal(first.frozen.weight, second.frozen.weight)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_one_output_fits_classes_0_1_and_minus_1_1(low):
    """Losses of margins have the second; counted as another class they would be wrong without a word."""
    measure = ModuleMeasure(ModuleGradients(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss))
    inputs, targets = torch.tensor([[-2.0], [3.0], [-1.0], [4.0]]), torch.tensor([low, 1.0, 1.0, low])
    measured = measure([np.array([[1.0]])], (inputs, targets))
    assert measured.right.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert measured.positive.tolist() == [0.0, 1.0, 1.0, 0.0]
