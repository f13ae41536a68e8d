"""Models that mix samples, draw at random, branch or remember are refused by name; what no trial shows is forgotten."""

import random
import threading

import numpy as np
import pytest
from murmurfl.clients import Label, Part, Schema, private_client_app
from murmurfl.privacy import ConfigurationError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure  # noqa: E402

from tests.harness import memories  # noqa: E402
from tests.harness.errors import raises  # noqa: E402

nn = torch.nn
GENERATOR = np.random.Generator(np.random.Philox(key=11))
IMAGES = GENERATOR.normal(size=(5, 2, 6, 6)).astype(np.float32)
CLASSES = np.arange(5) % 3


def convolution(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.Linear(64, 3))


def layer(forward, **kept):
    made = type("Own", (nn.Module,), {"forward": forward, **kept})
    return convolution(made())


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 4, 4))

    def forward(self, values):
        self.mean.mul_(0.9).add_(0.1 * values.detach().mean(0))
        return values - self.mean


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
        "bernoulli.*draws at random.*leave it out",
    ),
    "noise as a function": (
        lambda: layer(lambda self, values: values + torch.randn_like(values)),
        "draws at random",
    ),
    "an if on values of the batch": (
        lambda: layer(lambda self, values: values if values[-1].sum() > values[0].sum() else -values),
        "data-dependent control flow.*torch.where",
    ),
    "item": (
        lambda: layer(lambda self, values: values * values.mean().item()),
        "data-dependent control flow.*torch.where",
    ),
    "statistics of the batch": (
        lambda: layer(lambda self, values: values - values.mean(0)),
        "Own at '1', which mixes samples.*LayerNorm",
    ),
    "statistics in its own forward": (Centring, "Centring at 'the top', which mixes samples"),
    "a running mean": (lambda: convolution(Running()), "writes to no tensor of its own.*GroupNorm"),
    "a memory": (lambda: layer(remembering), "another result than its own code.*draws, or remembers"),
    "weights that shrink themselves": (
        lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3)),
        "Embedding at '0'.*max_norm",
    ),
    "no parameters yet": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "LazyLinear at '1'.*run the module"),
    "nothing to train": (lambda: convolution().requires_grad_(False), "requires_grad"),
    "no module": (lambda: 3, "torch.nn.Module or a function"),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_a_samples_own_is_refused_by_name(name):
    make, said = REFUSED[name]
    with pytest.raises(ConfigurationError, match=said):
        private_client_app(make, samples=(IMAGES, CLASSES), mu=1.0, rounds=2)


def test_targets_that_broadcast_against_outputs_are_named():
    """The common mistake of a regression: nothing fails, and every output is held against every target."""
    values, module = np.ones((5, 3), dtype=np.float32), lambda: nn.Linear(3, 1)
    with (
        raises(ConfigurationError, "unsupported", match=r"targets\[:, None\]"),
        pytest.warns(UserWarning, match="target size"),
    ):
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
    "another type": (nn.BCEWithLogitsLoss(), "one sample like this client's"),
}


@pytest.mark.few_cases(6)
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


@pytest.mark.few_cases(4)
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


def test_a_samples_function_tries_the_model_on_its_schema():
    def never(context):
        raise AssertionError("no client is there yet")

    mixing = lambda: layer(lambda self, values: values - values.mean(0))  # noqa: E731
    private_client_app(mixing, samples=never, mu=1.0, rounds=2)
    schema = Schema(inputs=(Part(shape=(2, 6, 6), bounds=(-9, 9)),), label=Label(classes=3))
    with raises(ConfigurationError, "unsupported", match="mixes samples"):
        private_client_app(mixing, samples=never, schema=schema, mu=1.0, rounds=2)


cross_entropy = torch.nn.functional.cross_entropy


def record(scale, label):
    return scale * torch.tensor([[1.0, -0.5]]), torch.tensor([label])


ORDINARY = [record(scale, 0) for scale in (1.0, -1.0, 0.5, 2.0)]
OUTLIER = record(1e4, 0)
POINT = [np.full((2, 2), 0.1, np.float32), np.full(2, 0.1, np.float32)]


def far_out(output):
    return float(output.detach().abs().max()) > 500.0


def far_out_if_there_are_values(output):
    try:
        return bool(output.detach().abs().max() > 500.0)
    except Exception:
        return False


def always(output):
    return True


@pytest.fixture(autouse=True)
def globals_as_they_were():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)  # how far out a record is depends on the weights
        yield
    memories.forget_globals()


def rows(gradients, *records):
    return [gradients(POINT, one).copy() for one in records]


def verdict(name, shows):
    """Return what becomes of a model that remembers: ``refused``, ``harmless``, or ``moves others``."""
    gradients = ModuleGradients(*memories.made(name, shows))
    try:
        SampleTrials(gradients)(ORDINARY)
    except ConfigurationError as error:
        return "refused" if error.kind in ("unsupported", "failed") else str(error)
    before, strange, after, _, again = rows(gradients, ORDINARY[0], OUTLIER, ORDINARY[0], OUTLIER, ORDINARY[0])
    assert before.any()
    assert strange.shape == before.shape
    return "harmless" if before.tobytes() == after.tobytes() == again.tobytes() else "moves others"


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("shows", [far_out, far_out_if_there_are_values, always])
@pytest.mark.parametrize("name", memories.EVERY_NAME)
def test_model_that_remembers_is_refused_or_harmless(name, shows):
    """A strange record before an ordinary one changes no bit of its gradient."""
    assert verdict(name, shows) in ("refused", "harmless")


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", [name for name in memories.EVERY_NAME if name != "warning filters"])  # put back
def test_model_that_remembers_moves_later_gradients_by_its_own_code(name):
    """The planted bug, for the test above: what would happen if a model's own code saw records."""
    gradients = ModuleGradients(*memories.made(name, far_out))
    trained = {name: torch.tensor(values) for name, values in zip(gradients.names, POINT, strict=True)}

    def by_code(example):
        made = gradients.eager(trained, example[0][0], example[1][0])
        return torch.cat([values.flatten() for values in made.values()])

    later = record(1.0, int(name.startswith("draws")))
    before = by_code(later)
    by_code(OUTLIER)
    assert not torch.equal(before, by_code(later))


def test_draws_of_another_thread_refuse_no_model():
    over = threading.Event()

    def draw():
        while not over.wait(0.001):
            random.random()
            torch.rand(1)

    with torch.random.fork_rng(devices=[]):
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), cross_entropy))([*ORDINARY, OUTLIER])
        finally:
            over.set()
            thread.join()


def test_trial_leaves_the_generator_of_pytorch_where_it_was():
    state = torch.get_rng_state()
    with raises(ConfigurationError, "unsupported"):
        SampleTrials(ModuleGradients(*memories.made("draws from PyTorch", always)))([*ORDINARY, OUTLIER])
    assert torch.equal(torch.get_rng_state(), state)


def test_branch_that_capture_hides_is_refused_by_a_made_up_record():
    """The program is a function of one record all the same; it would only be another model than the author's."""

    def loss(output, target):
        return cross_entropy(-output if far_out_if_there_are_values(output) else output, target)

    gradients = ModuleGradients(torch.nn.Linear(2, 2), loss)
    SampleTrials(gradients)(ORDINARY)
    with raises(ConfigurationError, "unsupported", match="takes the same steps for every record"):
        SampleTrials(gradients)([*ORDINARY, record(3e3, 1)])


def test_only_ordinary_records_that_fail_refuse_a_model():
    def loss(output, target):
        if far_out_if_there_are_values(output):
            raise ValueError("too far out")
        return cross_entropy(output, target)

    SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), loss))([*ORDINARY, OUTLIER])
    with raises(ConfigurationError, "failed", match="too far out"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), loss))([OUTLIER, *ORDINARY])


def test_compiled_module_is_taken():
    gradients = ModuleGradients(torch.compile(torch.nn.Linear(2, 2), backend="eager"), cross_entropy)
    SampleTrials(gradients)(ORDINARY)


def test_what_the_first_call_makes_and_keeps_is_taken():
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.positions, self.size = torch.nn.Linear(2, 2), None, None

        def forward(self, inputs):
            if self.positions is None:
                self.positions = torch.arange(2.0)
            self.size = tuple(inputs.shape)  # anew in every call, and the same
            return self.layer(inputs + self.positions)

    SampleTrials(ModuleGradients(Lazy(), cross_entropy))([*ORDINARY, OUTLIER])


def test_right_that_remembers_is_refused_or_harmless():
    for shows in (far_out, far_out_if_there_are_values, always):
        state = {"sign": 1.0}

        def right(output, target, state=state, shows=shows):
            value = torch.sigmoid(state["sign"] * output[:, 0])
            state["sign"] = -1.0 if shows(output) else state["sign"]
            return value

        gradients = ModuleGradients(torch.nn.Linear(2, 2), cross_entropy)
        measure = ModuleMeasure(gradients, right)
        try:
            SampleTrials(gradients)(ORDINARY, measure=measure)
        except ConfigurationError:
            continue
        before, _, after = (measure(POINT, one).right for one in (ORDINARY[0], OUTLIER, ORDINARY[0]))
        assert before.tobytes() == after.tobytes()


def test_two_examples_at_least():
    with raises(ConfigurationError, "out-of-range", "examples", match="4 examples, got 1"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), cross_entropy))(ORDINARY[:1])
