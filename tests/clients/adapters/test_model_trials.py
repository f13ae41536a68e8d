"""A model that remembers is refused on made-up examples; what no example shows is forgotten by the next sample."""

import collections
import dataclasses
import enum
import itertools
import logging
import re
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure  # noqa: E402
from murmurfl.clients.adapters.torch_state import ModuleState  # noqa: E402

from tests.harness import memories  # noqa: E402

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


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_memory_that_an_example_shows_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"remembers nothing|draws nothing"):
        SampleTrials(gradients_of(name))([*ORDINARY, OUTLIER])


@pytest.mark.parametrize(
    "name", ["a running mean in a closure", "a module within the loss", "a mapping that is global"]
)
def test_a_memory_of_every_sample_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"remembers nothing|draws nothing"):
        SampleTrials(gradients_of(name, always))(ORDINARY)


def untried(name, shows=far_out):
    """A model that was tried on examples that show nothing."""
    gradients = gradients_of(name, shows)
    SampleTrials(gradients)(ORDINARY)
    return gradients


@pytest.mark.parametrize("name", memories.NAMES)
def test_a_memory_that_no_example_shows_moves_no_later_gradient(name):
    """To the last bit, of samples one by one as on a real machine."""
    later = record(1.0, int(name in DRAWS))
    before, _, after, _, again = rows(untried(name), later, OUTLIER, later, OUTLIER, later)
    assert before.any()
    assert np.array_equal(before, after)
    assert np.array_equal(before, again)


@pytest.mark.parametrize("name", memories.NAMES)
def test_a_memory_that_is_not_put_back_moves_later_gradients(name, monkeypatch):
    """The planted bug, for the test above."""
    later = record(1.0, int(name in DRAWS))
    gradients = untried(name)
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    before, _, after = rows(gradients, later, OUTLIER, later)
    assert not np.array_equal(before, after)


def test_a_trial_leaves_random_generators_where_they_were():
    states = torch.get_rng_state(), np.random.get_state()[1:3]  # noqa: NPY002
    with pytest.raises(ConfigurationError, match="draws nothing"):
        SampleTrials(gradients_of("draws from PyTorch", always))([*ORDINARY, OUTLIER])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[2] == states[1][1]  # noqa: NPY002


def test_a_place_is_named_as_people_write_it():
    for name, said in (
        ("a nested mapping in a closure", r"changes loss\.<closure .*\['sign'\]:"),
        ("a global", r"changes loss\..*<global>\['SIGN'\]"),
        ("an attribute of a class", r"<class Shared>\.sign|Shared'\]\.sign"),
        ("a hook", r"changes model\."),
    ):
        memories.forget_globals()
        with pytest.raises(ConfigurationError, match=said):
            SampleTrials(gradients_of(name))([*ORDINARY, OUTLIER])


def test_only_ordinary_records_that_fail_refuse_a_model():
    def loss(output, target):
        if far_out(output):
            raise ValueError("too far out")
        return cross_entropy(output, target)

    SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), loss))([*ORDINARY, OUTLIER])
    with pytest.raises(ConfigurationError, match="too far out"):
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
    with pytest.raises(ConfigurationError, match=rf"put back, got \S*{kind} at loss\.<closure kept>"):
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


def test_what_cannot_remember_or_can_be_put_back_is_taken(tmp_path):
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
    with pytest.raises(ConfigurationError, match=r"changes right\.<closure state>\['sign'\]"):
        trials([*ORDINARY, OUTLIER], measure=measure)
    trials, measure, gradients = made(far_out)
    trials(ORDINARY, measure=measure)
    arrays = [np.full(shape, 0.1, dtype=np.float32) for shape in gradients.shapes]
    before, _, after = (measure(arrays, one).right for one in (ORDINARY[0], OUTLIER, ORDINARY[0]))
    assert np.array_equal(before, after)


def test_two_examples_at_least():
    with pytest.raises(ConfigurationError, match="at least 4 examples, got 1"):
        SampleTrials(ModuleGradients(torch.nn.Linear(2, 2), cross_entropy))(ORDINARY[:1])
