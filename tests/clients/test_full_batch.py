"""The machine's half of full batches: the sum of all samples, and no more releases than its cap."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, RefusedError, SimulatedKeys, protocol

from tests.harness.machines import training_config
from tests.harness.models import Quadratic

D, K, N = 4, 3, 17
POLICY = PrivacyPolicy(0.5, 1, K, 1.0, order="all", mechanism="independent", release_rule="paper")
SAMPLES = np.random.Generator(np.random.Philox(key=8)).normal(size=(N, D))


def machine(policy=POLICY, samples=SAMPLES, kind=FullBatchClient):
    return kind(Quadratic(D), samples, policy, MemoryLedger(), SimulatedKeys(3, "0"), name="0")


def answer(client, point, *config, **entries):
    arrays, count, metrics = client.fit([np.asarray(point, np.float64)], training_config(*config, **entries))
    return arrays[0], count, metrics


def test_a_reply_is_the_clipped_sum_with_its_sample_number():
    point = np.full(D, 0.3)
    values, count, _ = answer(machine(), point)
    nothing, _, _ = answer(machine(samples=np.tile(point, (N, 1))), point)  # gradient zero: the noise alone
    rows = point - SAMPLES
    rows *= np.minimum(1.0, 0.5 / np.linalg.norm(rows, axis=1))[:, None]
    assert values - nothing == pytest.approx(rows.sum(axis=0), abs=1e-3)
    assert count == N


def test_any_number_of_samples_keeps_the_sensitivity_of_a_sum():
    far = np.zeros(D)
    for size in (1, N, 3 * N):
        samples = np.zeros((size, D))
        samples[0, 0], other = 1e6, samples.copy()
        other[0, 0] = -1e6
        one, another = (answer(machine(samples=held), far)[0] for held in (samples, other))
        moved = np.linalg.norm(one - another)
        assert 0.999 < moved <= machine().machine.plan.sensitivity
        assert machine(samples=samples).machine.plan.noise_std == machine().machine.plan.noise_std


def test_rows_that_count_twice_are_noticed(monkeypatch):
    """The planted bug, for the test above."""
    sums = type(POLICY.bound)
    total = sums.total
    monkeypatch.setattr(sums, "total", lambda self, rows, *rest: 2.0 * total(self, rows, *rest))
    samples = np.zeros((N, D))
    samples[0, 0], other = 1e6, samples.copy()
    other[0, 0] = -1e6
    one, another = (answer(machine(samples=held), np.zeros(D))[0] for held in (samples, other))
    assert np.linalg.norm(one - another) > 1.9 * machine().machine.plan.sensitivity


@pytest.mark.parametrize(
    "requests",
    [
        [(1, 0), (2, 1), (3, 2), (4, 3)],
        [(1, 0), (1, 0), (1, 0), (1, 0)],  # the same round again and again
        [(1, 0), (900, 0), (7, 1), (2, 0)],  # whatever was acknowledged, in whatever order
    ],
)
def test_rounds_beyond_the_cap_are_refused(requests):
    client = machine()
    for server_round, ack in requests[:K]:
        answer(client, np.zeros(D), server_round, ack)
    server_round, ack = requests[-1]
    with pytest.raises(RefusedError) as refused:
        answer(client, np.ones(D), server_round, ack)
    assert refused.value.code == protocol.CAP_REACHED
    assert client.statement("s")["releases"] == K
    with pytest.raises(RefusedError):  # another session has no budget left
        answer(client, np.zeros(D), 1, 0, session="t")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": "cancelling"}, "mechanism 'independent'"),
        ({"order": "in-turn", "sample_participations": 1}, "order 'all'"),
        ({"release_rule": "acknowledged"}, "release_rule 'paper'"),
        ({"clip_unit": "nonnegative"}, "clip_unit 'sample'"),
    ],
)
def test_policies_of_other_releases_are_refused(changes, said):
    with pytest.raises(ConfigurationError, match=f"Expected {said} for full batches"):
        machine(replace(POLICY, **changes))


@pytest.mark.long
def test_torch_sums_do_not_depend_on_pieces():
    torch = pytest.importorskip("torch")
    from murmurfl.clients import TorchGradients
    from murmurfl.privacy.machine import prefix_sums as release

    module = torch.nn.Linear(6, 3)
    inputs = np.random.Generator(np.random.Philox(key=9)).normal(size=(40, 6)).astype(np.float32)
    labels = np.arange(40) % 3

    class Pairs:
        def __len__(self):
            return 40

        def __getitem__(self, chosen):
            return inputs[chosen], labels[chosen]

    def released(at_a_time):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(release, "_VALUES_AT_A_TIME", at_a_time)
            gradients = TorchGradients(module, torch.nn.functional.cross_entropy)
            client = FullBatchClient(gradients, Pairs(), POLICY, MemoryLedger(), SimulatedKeys(3, "0"), name="0")
            point = [parameter.detach().numpy() for parameter in module.parameters()]
            arrays, count, _ = client.fit(point, training_config())
            return np.concatenate([values.ravel() for values in arrays]), count

    whole, pieces = released(1 << 22), released(21 * 7)
    assert whole[0] == pytest.approx(pieces[0], abs=1e-6)
    assert whole[1] == pieces[1] == 40
