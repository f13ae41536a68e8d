"""A module that remembers what it saw, of certain samples only: on a real client it has forgotten by the next one.

No trial on made-up samples can find such a module, and the client must not count on one.
"""

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient
from murmurfl.privacy import ConfigurationError, PrivacyPolicy

from tests.harness import memories
from tests.harness.clients import DurableLedger, FixedNonces, training_config

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure  # noqa: E402
from murmurfl.clients.adapters.torch_state import ModuleState  # noqa: E402

from tests.harness.trials import Held  # noqa: E402

COUNT, BAD, CLIP = 40, 3, 1.0


class Remembering(torch.nn.Module):
    """Whoever comes after a sample that begins with 777 gets other outputs."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.layer, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))
        self.register_buffer("seen", torch.ones(1))
        self.sign, self.tensor, self.signs, self.by_name = 1.0, torch.ones(1), [1.0], {"sign": 1.0}

    def forward(self, inputs):
        if float(inputs[0, 0]) == 777.0:
            self.remember()
        if self.where == DRAWN:
            drawn = torch.bernoulli(torch.full((), 0.5), generator=torch.default_generator)
            return (2.0 * drawn - 1.0) * self.layer(inputs.clamp(-1.0, 1.0))
        sign = self.seen * self.sign * self.tensor * self.signs[0] * self.by_name["sign"]
        return sign * (self.layer(inputs.clamp(-1.0, 1.0)) + self.frozen(inputs.clamp(-1.0, 1.0)))

    def remember(self):
        with torch.no_grad():
            if self.where == "a buffer, written to":
                self.seen.neg_()
            elif self.where == "a buffer, exchanged":
                self.seen = -self.seen
            elif self.where == "a frozen parameter":
                self.frozen.weight.mul_(-9.0)
            elif self.where == "an attribute":
                self.sign = -self.sign
            elif self.where == "a tensor that is no buffer":
                self.tensor.neg_()
            elif self.where == "a list":
                self.signs[0] *= -1.0
            elif self.where == "a mapping":
                self.by_name["sign"] *= -1.0
            elif self.where == DRAWN:
                torch.bernoulli(torch.full((3,), 0.5), generator=torch.default_generator)
            elif self.where == "a hook":
                self.layer.register_forward_hook(lambda *called: -called[2])


class RememberingLoss:
    """The same, of a loss that is an object."""

    def __init__(self, remembers):
        self.remembers, self.sign = remembers, 1.0

    def __call__(self, output, target):
        loss = self.sign * torch.nn.functional.cross_entropy(output, target % 2)
        if self.remembers and int(target) >= 2:
            self.sign = -1.0
        return loss


WRITTEN_TO = "a buffer, written to", "a frozen parameter", "a tensor that is no buffer"
DRAWN = "what it draws at random"
KEPT = "a buffer, exchanged", "an attribute", "a list", "a mapping", "a hook", DRAWN


def samples(bad):
    inputs, targets = torch.ones(COUNT, 2), torch.zeros(COUNT, dtype=torch.int64)
    if bad:
        inputs[BAD, 0], targets[BAD] = 777.0, 2
    return Held(inputs, targets)


@pytest.fixture(autouse=True)
def same_draws():
    """PyTorch's own generator, which a module may draw from, as it was in the end."""
    with torch.random.fork_rng(devices=[]):
        yield


def made(where):
    torch.default_generator.manual_seed(11)
    return ModuleGradients(Remembering(where), RememberingLoss(where == "a loss"))


def moved(made):
    """How far one sample moves a real client's release of all samples, and how far it may."""
    released = []
    for bad in (False, True):
        policy = PrivacyPolicy(
            clip_norm=CLIP,
            batch_size=1,
            max_participations=1,
            mu=1.0,
            batch_selection="full_batch",
            mechanism="independent",
            release_rule="paper",
        )
        gradients = made()
        client = FullBatchClient(gradients, samples(bad), policy, DurableLedger(), FixedNonces(), name="7")
        arrays = [np.full(shape, 0.1) for shape in gradients.shapes]
        sent, _, _ = client.fit(arrays, training_config())
        released.append(np.concatenate([part.ravel() for part in sent]))
    return np.linalg.norm(released[0] - released[1]), client.privatizer.plan.sensitivity


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("where", [*WRITTEN_TO, *KEPT, "a loss"])
def test_what_a_module_remembers_of_a_sample_is_forgotten_before_the_next(where):
    apart, charged = moved(lambda: made(where))
    assert apart <= charged


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("where", [*KEPT, "a loss"])
def test_a_module_that_remembers_is_seen_to_move_every_later_sample(where, monkeypatch):
    """The planted bug, for the test above."""
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    apart, charged = moved(lambda: made(where))
    assert apart > (1 if where == DRAWN else 5) * charged


REVIEWED = "a running mean in a closure", "a nested mapping in a closure", "a name that is bound anew"
"""The models of which one sample moved 63 times what was charged, 30 and 16 times: when each was only tried, or not."""


def far_out(output):
    return float(output.detach().abs().max()) > 50.0


@pytest.mark.parametrize("name", REVIEWED)
def test_a_remembering_loss_keeps_the_sensitivity(name):
    apart, charged = moved(lambda: ModuleGradients(*memories.made(name, far_out)))
    assert apart <= charged


@pytest.mark.parametrize("name", REVIEWED)
def test_a_loss_that_remembers_is_seen_to_move_every_later_sample(name, monkeypatch):
    """The planted bug, for the test above."""
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    apart, charged = moved(lambda: ModuleGradients(*memories.made(name, far_out)))
    assert apart > 5 * charged


def evaluated(where, kept):
    """What an evaluation makes of the samples, one after the other, as a real client asks."""
    gradients = made(where)
    measure = ModuleMeasure(gradients, lambda output, target: torch.sigmoid(output[:, 0]))
    arrays = [np.full(shape, 0.1) for shape in gradients.shapes]
    found = []
    for number in range(BAD + 2):
        try:
            found.append(measure(arrays, kept[number : number + 1]).right.tolist())
        except ConfigurationError:  # of the sample that writes; the client counts it as zero
            found.append(None)
    return found


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("where", [*WRITTEN_TO, *KEPT])
def test_an_evaluation_forgets_as_well(where):
    honest, spoilt = evaluated(where, samples(False)), evaluated(where, samples(True))
    assert spoilt[:BAD] == honest[:BAD]
    assert spoilt[BAD + 1] == honest[BAD + 1] == honest[0]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("where", [*WRITTEN_TO, *KEPT])
def test_an_evaluation_that_remembers_is_noticed(where, monkeypatch):
    """The planted bug, for the test above."""
    monkeypatch.setattr(ModuleState, "restore", lambda self, values: None)
    assert evaluated(where, samples(True))[BAD + 1] != evaluated(where, samples(False))[BAD + 1]
