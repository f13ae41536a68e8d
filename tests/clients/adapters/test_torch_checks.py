"""Models that mix samples, draw at random, branch or remember are refused by name; what no trial shows is forgotten."""

import collections
import dataclasses
import enum
import itertools
import logging
import random
import re
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
from murmurfl.clients import Label, Part, Schema, private_client_app
from murmurfl.privacy import ConfigurationError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure  # noqa: E402
from murmurfl.clients.adapters.torch_state import ModuleState  # noqa: E402

from tests.harness import memories  # noqa: E402
from tests.harness.errors import raises  # noqa: E402
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


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 4, 4))

    def forward(self, values):
        self.mean.mul_(0.9).add_(0.1 * values.detach().mean(0))
        return values - self.mean


class Exchanging(Running):
    def forward(self, values):
        self.mean = self.mean + 1.0
        return values


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
    "a running mean": (lambda: convolution(Running()), "writes to no tensor of its own.*GroupNorm"),
    "a buffer that is made anew": (lambda: convolution(Exchanging()), r"writes to 1\.mean.*module\.eval"),
    "a memory": (lambda: layer(remembering), r"remembers nothing.*changes model\.1\.seen"),
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
        raise AssertionError("no client is there yet")

    mixing = lambda: layer(lambda self, values: values - values.mean(0))  # noqa: E731
    private_client_app(mixing, samples=never, mu=1.0, rounds=2)
    schema = Schema(inputs=(Part(shape=(2, 6, 6), bounds=(-9, 9)),), label=Label(classes=3))
    with raises(ConfigurationError, "unsupported", match="mixes samples"):
        private_client_app(mixing, samples=never, schema=schema, mu=1.0, rounds=2)


cross_entropy = torch.nn.functional.cross_entropy
DRAWS = [name for name in memories.NAMES if name.startswith("draws")]


def record(scale, label):
    return scale * torch.tensor([[1.0, -0.5]]), torch.tensor([label])


ORDINARY = [record(scale, 0) for scale in (1.0, -1.0, 0.5, 2.0)]
OUTLIER = record(1e4, 0)


def far_out(output):
    return float(output.detach().abs().max()) > 500.0


def always(output):
    return True


@pytest.fixture(autouse=True)
def globals_as_they_were():
    yield
    memories.forget_globals()


def gradients_of(name, shows=far_out):
    return ModuleGradients(*memories.made(name, shows))


def rows(gradients, *records):
    arrays = [np.full(shape, 0.1, dtype=np.float32) for shape in gradients.shapes]
    return [gradients(arrays, one).copy() for one in records]


REMEMBERED = [name for name in memories.NAMES if name != "a cached value"]  # of which only the next sample is told


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", REMEMBERED)
def test_a_memory_that_an_example_shows_is_refused(name):
    with raises(ConfigurationError, "unsupported", match=r"remembers nothing|draws nothing"):
        SampleTrials(gradients_of(name))([*ORDINARY, OUTLIER])


@pytest.mark.parametrize(
    "name", ["a running mean in a closure", "a module within the loss", "a mapping that is global"]
)
def test_a_memory_of_every_sample_is_refused(name):
    with raises(ConfigurationError, "unsupported", match=r"remembers nothing|draws nothing"):
        SampleTrials(gradients_of(name, always))(ORDINARY)


def untried(name, shows=far_out):
    """A model that was tried on examples that show nothing."""
    gradients = gradients_of(name, shows)
    SampleTrials(gradients)(ORDINARY)
    return gradients


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", memories.NAMES)
def test_a_memory_that_no_example_shows_moves_no_later_gradient(name):
    """To the last bit, of samples one by one as on a real client."""
    later = record(1.0, int(name in DRAWS))
    before, _, after, _, again = rows(untried(name), later, OUTLIER, later, OUTLIER, later)
    assert before.any()
    assert np.array_equal(before, after)
    assert np.array_equal(before, again)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", memories.NAMES)
def test_a_memory_that_is_not_put_back_moves_later_gradients(name, monkeypatch):
    """The planted bug, for the test above."""
    later = record(1.0, int(name in DRAWS))
    gradients = untried(name)
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    before, _, after = rows(gradients, later, OUTLIER, later)
    assert not np.array_equal(before, after)


def verdict(name):
    """What becomes of one kind of state: ``refused``, ``put back`` or ``not found``."""
    try:
        gradients = untried(name)
    except ConfigurationError as error:
        return "refused" if "whose memory can be put back" in str(error) else str(error)
    before, _, after = rows(gradients, ORDINARY[0], OUTLIER, ORDINARY[0])
    assert before.any()
    return "put back" if np.array_equal(before, after) else "not found"


def listed():
    """The table of the page: kinds of state by what becomes of them."""
    text = (Path(__file__).parents[3] / "docs/private-client-app.md").read_text()
    found = re.findall(r"^\| \*\*(.*)\*\* \| (.*) \|$", text, flags=re.MULTILINE)
    return {name: said for said, names in found for name in names.split("; ")}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", memories.KINDS)
def test_the_page_says_what_becomes_of_each_kind_of_state(name):
    assert listed()[name] == verdict(name)


def test_the_page_lists_no_kind_of_state_that_is_not_tried():
    assert listed().keys() == memories.KINDS.keys()
    assert set(listed().values()) == {"put back", "refused", "not found"}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", [name for name, said in listed().items() if said == "put back"])
def test_each_kind_that_is_put_back_remembers_if_it_is_not(name, monkeypatch):
    """The planted bug, for the test before; a cached value is told of at the next sample alone."""
    gradients = untried(name)
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    before, _, after = rows(gradients, ORDINARY[0], OUTLIER, ORDINARY[0])
    assert not np.array_equal(before, after)


def test_a_trial_leaves_random_generators_where_they_were():
    states = torch.get_rng_state(), np.random.get_state()[1:3]  # noqa: NPY002
    with raises(ConfigurationError, "unsupported", match="draws nothing"):
        SampleTrials(gradients_of("draws from PyTorch", always))([*ORDINARY, OUTLIER])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[2] == states[1][1]  # noqa: NPY002


@pytest.fixture
def drawing_thread():
    """Another thread of the process, which draws from every shared generator each few milliseconds."""
    over = threading.Event()

    def draw():
        while not over.wait(0.003):
            random.random()
            np.random.random()  # noqa: NPY002
            torch.rand(1)

    with torch.random.fork_rng(devices=[]):
        thread = threading.Thread(target=draw)
        thread.start()
        yield
        over.set()
        thread.join()


WIDE = Schema(inputs=(Part(shape=(2, 24, 24), bounds=(-9, 9)),), label=Label(classes=3))


def tried_wide(draw):
    """Try a network of which one gradient takes longer than the other thread waits."""

    def drawing(self, values):
        draw()
        return values

    own = type("Own", (nn.Module,), {"forward": drawing})
    convolutions = nn.Sequential(nn.Conv2d(2, 64, 5), own(), nn.Conv2d(64, 64, 5))
    module = nn.Sequential(convolutions, nn.Flatten(), nn.Linear(64 * 256, 3))
    SampleTrials(ModuleGradients(module, cross_entropy))(WIDE.examples())


def test_draws_of_another_thread_refuse_no_model(drawing_thread):
    tried_wide(lambda: None)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.standard_normal,
        lambda: torch.rand(1),
        lambda: nn.functional.dropout(torch.ones(3)),
        lambda: next(map(random.randrange, [3])),  # called by no Python code
        lambda: random.random() < 0.5 and torch.relu(torch.zeros(1)),  # takes other steps after its draw
    ],
)
def test_a_model_that_draws_is_refused_while_another_thread_draws(draw, drawing_thread):
    with raises(ConfigurationError, "unsupported", match="draws nothing"):
        tried_wide(draw)


def test_a_draw_at_the_first_call_is_refused_while_another_thread_draws(drawing_thread):
    kept = []
    with raises(ConfigurationError, "unsupported", match="draws nothing"):
        tried_wide(lambda: kept or kept.append(random.random()))


def test_a_draw_within_a_tensor_of_the_models_own_kind_is_refused_while_another_thread_draws(drawing_thread):
    class Drawing(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            random.random()
            return torch.zeros(1)

    drawing = torch.zeros(1).as_subclass(Drawing)
    with raises(ConfigurationError, "unsupported", match="draws nothing"):
        tried_wide(lambda: torch.relu(drawing))


def test_a_place_is_named_as_people_write_it():
    for name, said in (
        ("a nested mapping in a closure", r"changes loss\.<closure .*\['sign'\]:"),
        ("a global", r"changes loss\..*<global>\['SIGN'\]"),
        ("an attribute of a class", r"<class Shared>\.sign|Shared'\]\.sign"),
        ("a hook", r"changes model\."),
    ):
        memories.forget_globals()
        with raises(ConfigurationError, "unsupported", match=said):
            SampleTrials(gradients_of(name))([*ORDINARY, OUTLIER])


def test_only_ordinary_records_that_fail_refuse_a_model():
    def loss(output, target):
        if far_out(output):
            raise ValueError("too far out")
        return cross_entropy(output, target)

    SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), loss))([*ORDINARY, OUTLIER])
    with raises(ConfigurationError, "failed", match="too far out"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), loss))([OUTLIER, *ORDINARY])


def closed_over(kept):
    return lambda output, target: cross_entropy(output, target) + 0.0 * (kept is None)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    names: list = dataclasses.field(default_factory=list)


def lost(kind):
    return {
        "count": lambda: itertools.count(),
        "generator": lambda: (number for number in range(3)),
        "list_iterator": lambda: iter([1.0, 2.0]),
        "_local": threading.local,
    }[kind]()


@pytest.mark.parametrize("kind", ["count", "generator", "list_iterator", "_local"])
def test_what_cannot_be_put_back_is_refused_by_its_place(kind):
    with raises(ConfigurationError, "unsupported", match=rf"put back, got \S*{kind} at loss\.<closure kept>"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), closed_over(lost(kind))))(ORDINARY)


def harmless():
    return [
        *(re.compile("a"), logging.getLogger("a"), torch.float32, torch.device("cpu"), torch.Size([2]), np.dtype("f4")),
        *(Colour.RED, weakref.ref(torch.nn.Linear), collections.OrderedDict(a=[1]), types.SimpleNamespace(a={1, 2})),
        *(Settings(), types.MappingProxyType({"a": 1}), threading.Lock(), torch.Generator(), Path("a"), range(3)),
        *(np.float32(1.0), slice(1), collections.Counter("aab"), weakref.WeakSet()),
        *(torch.nn.ModuleDict({"a": torch.nn.ReLU()}), torch.nn.ParameterList([torch.ones(2)]), torch.ones(2, 2)),
        *(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), torch.distributions.Normal(0.0, 1.0)),
        *(memoryview(b"a"), collections.namedtuple("Pair", "a b")(1, [2]), np.array([None, "a"]), property(id)),
        *(torch.utils.data.DataLoader([1, 2]), torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,))),
        *(
            torch.func.grad(cross_entropy),
            torch.compile(cross_entropy, backend="eager"),
            torch.jit.script(torch.nn.ReLU()),
        ),
    ]


def test_what_models_hold_for_other_ends_is_taken(tmp_path):
    log = (tmp_path / "log").open("w")
    kept = [log, *harmless()]
    gradients = ModuleGradients(torch.nn.Linear(2, 2), closed_over(kept))
    SampleTrials(gradients)([*ORDINARY, OUTLIER])
    assert len(rows(gradients, *ORDINARY)) == 4
    log.close()


def test_a_compiled_module_is_taken():
    gradients = ModuleGradients(torch.compile(torch.nn.Linear(2, 2), backend="eager"), cross_entropy)
    SampleTrials(gradients)(ORDINARY)


def test_what_the_first_call_makes_and_keeps_is_no_memory():
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


def test_a_right_that_remembers_is_refused_or_forgets():
    def made(shows):
        state = {"sign": 1.0}

        def right(output, target):
            value = torch.sigmoid(state["sign"] * output[:, 0])
            state["sign"] = -1.0 if shows(output) else state["sign"]
            return value

        gradients = ModuleGradients(torch.nn.Linear(2, 2), cross_entropy)
        return SampleTrials(gradients), ModuleMeasure(gradients, right), gradients

    trials, measure, _ = made(far_out)
    with raises(ConfigurationError, "unsupported", match=r"changes right\.<closure state>\['sign'\]"):
        trials([*ORDINARY, OUTLIER], measure=measure)
    trials, measure, gradients = made(far_out)
    trials(ORDINARY, measure=measure)
    arrays = [np.full(shape, 0.1, dtype=np.float32) for shape in gradients.shapes]
    before, _, after = (measure(arrays, one).right for one in (ORDINARY[0], OUTLIER, ORDINARY[0]))
    assert np.array_equal(before, after)


def test_two_examples_at_least():
    with raises(ConfigurationError, "out-of-range", "examples", match="4 examples, got 1"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), cross_entropy))(ORDINARY[:1])
