"""The client's half of full batches: the sum of all samples, and no more releases than its cap."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import CountedGradients, FullBatchClient
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, RefusedError, SimulatedKeys, protocol
from murmurfl.privacy.queries.clipped_share import CountedRows

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.models import Quadratic

D, K, N = 4, 3, 17
POLICY = PrivacyPolicy(0.5, 1, K, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper")
SAMPLES = np.random.Generator(np.random.Philox(key=8)).normal(size=(N, D))


def make_client(policy=POLICY, samples=SAMPLES, kind=FullBatchClient):
    return kind(Quadratic(D), samples, policy, MemoryLedger(), SimulatedKeys(3, "0"), name="0")


def answer(client, point, *config, **entries):
    arrays, count, metrics = client.fit([np.asarray(point, np.float64)], training_config(*config, **entries))
    return arrays[0], count, metrics


def test_a_reply_is_the_clipped_sum_with_its_sample_number():
    point = np.full(D, 0.3)
    values, count, _ = answer(make_client(), point)
    nothing, _, _ = answer(make_client(samples=np.tile(point, (N, 1))), point)  # gradient zero: the noise alone
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
        one, another = (answer(make_client(samples=held), far)[0] for held in (samples, other))
        moved = np.linalg.norm(one - another)
        assert 0.999 < moved <= make_client().privatizer.plan.sensitivity
        assert make_client(samples=samples).privatizer.plan.noise_std == make_client().privatizer.plan.noise_std


def test_rows_that_count_twice_are_noticed(monkeypatch):
    """The planted bug, for the test above."""
    sums = type(POLICY.bound)
    total = sums.total
    monkeypatch.setattr(sums, "total", lambda self, rows, *rest: 2.0 * total(self, rows, *rest))
    samples = np.zeros((N, D))
    samples[0, 0], other = 1e6, samples.copy()
    other[0, 0] = -1e6
    one, another = (answer(make_client(samples=held), np.zeros(D))[0] for held in (samples, other))
    assert np.linalg.norm(one - another) > 1.9 * make_client().privatizer.plan.sensitivity


@pytest.mark.parametrize(
    "requests",
    [
        [(1, 0), (2, 1), (3, 2), (4, 3)],
        [(1, 0), (1, 0), (1, 0), (1, 0)],  # the same round again and again
        [(1, 0), (900, 0), (7, 1), (2, 0)],  # whatever was acknowledged, in whatever order
    ],
)
def test_rounds_beyond_the_cap_are_refused(requests):
    client = make_client()
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
        ({"batch_selection": "once", "sample_participations": 1}, "batch_selection 'full_batch'"),
        ({"release_rule": "acknowledged"}, "release_rule 'paper'"),
        ({"clip_unit": "nonnegative"}, "clip_unit 'sample'"),
    ],
)
def test_policies_of_other_releases_are_refused(changes, said):
    with pytest.raises(ConfigurationError, match=f"Expected {said} for full batches"):
        make_client(replace(POLICY, **changes))


@pytest.mark.long
def test_torch_sums_do_not_depend_on_pieces():
    torch = pytest.importorskip("torch")
    from murmurfl.clients import TorchGradients
    from murmurfl.privacy.release import prefix_sums as release

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


WIDE, COUNT, SHARE = 3, 9, 0.2
COUNTING = PrivacyPolicy(1.0, 1, 2, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper")
HOSTILE = [0.7, 1e-300, 1e-320, 0.0, -0.0, -1.0, -1e300, 1e300]
EDGES = [0.0, 1e-310, 1e-170, 0.7, 0.70001, 3.0, 1e200]
POINTS = np.random.Generator(np.random.Philox(key=8)).normal(size=(COUNT, WIDE))


class Closed(Quadratic):
    """The same gradients, not written out: their sums in closed form."""

    def stacked(self, points, weights, samples):
        rows = weights[0] * self(points[0], samples)

        class Rows:
            def norms(self):
                with np.errstate(all="ignore"):
                    return np.sqrt((rows**2).sum(axis=1))

            def write(self, row, scale, out):
                out[:] = rows[row] * scale

            def scaled_sum(self, scales):
                return scales @ rows

        return Rows()


def test_a_sum_in_closed_form_is_that_of_the_scaled_rows():
    made = CountedGradients(Closed(WIDE), SHARE).stacked([[np.zeros(WIDE), np.array([0.7])]], [1.0], POINTS)
    scales, rows = np.linspace(0.0, 1.0, COUNT), np.empty((COUNT, WIDE + 1))
    for i, row in enumerate(rows):
        made.write(i, 1.0, row)
    assert made.scaled_sum(scales) == pytest.approx(scales @ rows)


def counting(samples=POINTS, model=Quadratic, policy=COUNTING):
    gradients = CountedGradients(model(WIDE), SHARE)
    return FullBatchClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(3, "0"), name="0")


def counted_sum(client, clip, point=None):
    arrays = [np.zeros(WIDE) if point is None else point, np.array([clip])]
    return np.concatenate(client.fit(arrays, training_config())[0])


def neighbours():
    """Pairs of clients with one sample replaced; gradients at zero are minus the samples."""
    for one in EDGES:
        for other in EDGES:
            for sign in (1.0, -1.0):
                first, second = POINTS.copy(), POINTS.copy()
                first[4], second[4] = [one, 0, 0], [sign * other, 0, 0]
                yield first, second


def moved(clip, model):
    """How far one replaced sample moves a release, at most over many pairs: the noise is the same."""
    return max(
        float(np.linalg.norm(counted_sum(counting(a, model), clip) - counted_sum(counting(b, model), clip)))
        for a, b in neighbours()
    )


@pytest.mark.parametrize("model", [Quadratic, Closed])
def test_any_clip_keeps_a_counted_release_within_its_sensitivity(model):
    charged = counting().privatizer.plan.sensitivity
    assert charged < 2.01
    found = [moved(clip, model) for clip in HOSTILE]
    assert all(one <= charged for one in found)
    assert found[0] > 1.999  # and by no less, where one gradient is within the clip and another is not


def test_marks_beside_gradients_that_are_bounded_by_themselves_are_caught(monkeypatch):
    """The planted bug: gradients take the whole clip, and marks come on top, without being charged."""
    monkeypatch.setattr(
        CountedRows, "scales", lambda self, norms, clip: np.minimum(1.0 / clip, 1.0 / np.maximum(norms, 1e-300))
    )
    monkeypatch.setattr("murmurfl.clients.full_batch_client._CountedContributions.norms", lambda self: np.ones(COUNT))
    first, second = POINTS.copy(), POINTS.copy()
    first[4], second[4] = [0.7, 0, 0], [-1.0, 0, 0]
    one, other = (counted_sum(counting(samples, Closed), 0.7) for samples in (first, second))
    assert np.linalg.norm(one - other) > 1.05 * counting().privatizer.plan.sensitivity


@pytest.mark.parametrize("clip", [0.5, 1.5, 1e300, -1.0, 0.0])
def test_rows_that_are_written_and_sums_in_closed_form_are_the_same(clip):
    point = [np.full(WIDE, 0.2), np.array([clip])]
    rows = CountedGradients(Quadratic(WIDE), SHARE)(point, POINTS)
    with np.errstate(all="ignore"):
        stacked = CountedGradients(Closed(WIDE), SHARE).stacked([point], [1.0], POINTS)
        assert COUNTING.bound.total(stacked, WIDE + 1) == pytest.approx(COUNTING.bound.total(rows, WIDE + 1), abs=1e-12)
    assert counted_sum(counting(), clip, point[0]) == pytest.approx(
        counted_sum(counting(model=Closed), clip, point[0]), abs=1e-5
    )


def test_a_release_sums_scaled_gradients_and_marks():
    values = counted_sum(counting(), 1.5) - counted_sum(
        counting(np.full((COUNT, WIDE), np.nan)), 1.5
    )  # which count as nothing
    norms = np.linalg.norm(POINTS, axis=1)
    gradient, within = CountedRows(SHARE).read(values / COUNT, 1.5)
    assert gradient == pytest.approx(-(POINTS * np.minimum(1.0, 1.5 / norms)[:, None]).mean(axis=0), abs=1e-3)
    assert within == pytest.approx((norms <= 1.5).mean(), abs=1e-3)


@pytest.mark.parametrize(
    "arrays", [[np.zeros(WIDE)], [np.zeros(WIDE), np.array([np.nan])], [np.zeros(WIDE), np.array([1])]]
)
def test_a_malformed_clip_is_refused_with_a_text_that_says_nothing_of_data(arrays):
    with raises(
        RefusedError, "refused", code=protocol.MALFORMED_REQUEST, match="malformed request: expected"
    ) as refused:
        counting().fit(arrays, training_config())
    assert refused.value.code == protocol.MALFORMED_REQUEST


@pytest.mark.parametrize("changes", [{"clip_norm": 0.5}, {"clipping": "automatic"}])
def test_policies_that_rows_are_not_made_for_are_refused(changes):
    with raises(ConfigurationError, "out-of-range", "clip_norm", match="clip_norm 1"):
        counting(policy=replace(COUNTING, **changes))


def test_other_combinations_of_points_are_refused():
    with raises(ConfigurationError, "unsupported", "weights"):
        CountedGradients(Closed(WIDE), SHARE).stacked([[], []], [1.0, 1.0], POINTS)
