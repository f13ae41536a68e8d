"""Releases that say how many gradients are clipped: bounded whatever clip a server sends, and by nothing of its own."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import CountedGradients, FullBatchClient
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, RefusedError, SimulatedKeys, protocol
from murmurfl.privacy.side.clipped_share import CountedRows

from tests.harness.machines import training_config
from tests.harness.models import Quadratic

D, N, SHARE = 3, 9, 0.2
POLICY = PrivacyPolicy(1.0, 1, 2, 1.0, order="all", mechanism="independent", release_rule="paper")
HOSTILE = [0.7, 1e-300, 1e-320, 0.0, -0.0, -1.0, -1e300, 1e300]
EDGES = [0.0, 1e-310, 1e-170, 0.7, 0.70001, 3.0, 1e200]
SAMPLES = np.random.Generator(np.random.Philox(key=8)).normal(size=(N, D))


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
    made = CountedGradients(Closed(D), SHARE).stacked([[np.zeros(D), np.array([0.7])]], [1.0], SAMPLES)
    scales, rows = np.linspace(0.0, 1.0, N), np.empty((N, D + 1))
    for i, row in enumerate(rows):
        made.write(i, 1.0, row)
    assert made.scaled_sum(scales) == pytest.approx(scales @ rows)


def machine(samples=SAMPLES, model=Quadratic, policy=POLICY):
    gradients = CountedGradients(model(D), SHARE)
    return FullBatchClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(3, "0"), name="0")


def answer(client, clip, point=None):
    arrays = [np.zeros(D) if point is None else point, np.array([clip])]
    return np.concatenate(client.fit(arrays, training_config())[0])


def neighbours():
    """Pairs of machines with one sample replaced; gradients at zero are minus the samples."""
    for one in EDGES:
        for other in EDGES:
            for sign in (1.0, -1.0):
                first, second = SAMPLES.copy(), SAMPLES.copy()
                first[4], second[4] = [one, 0, 0], [sign * other, 0, 0]
                yield first, second


def moved(clip, model):
    """How far one replaced sample moves a release, at most over many pairs: the noise is the same."""
    return max(
        float(np.linalg.norm(answer(machine(a, model), clip) - answer(machine(b, model), clip)))
        for a, b in neighbours()
    )


@pytest.mark.parametrize("model", [Quadratic, Closed])
def test_any_clip_keeps_a_counted_release_within_its_sensitivity(model):
    charged = machine().machine.plan.sensitivity
    assert charged < 2.01
    found = [moved(clip, model) for clip in HOSTILE]
    assert all(one <= charged for one in found)
    assert found[0] > 1.999  # and by no less, where one gradient is within the clip and another is not


def test_marks_beside_gradients_that_are_bounded_by_themselves_are_caught(monkeypatch):
    """The planted bug: gradients take the whole clip, and marks come on top, without being charged."""
    monkeypatch.setattr(
        CountedRows, "scales", lambda self, norms, clip: np.minimum(1.0 / clip, 1.0 / np.maximum(norms, 1e-300))
    )
    monkeypatch.setattr("murmurfl.clients.full_batch_client._CountedContributions.norms", lambda self: np.ones(N))
    first, second = SAMPLES.copy(), SAMPLES.copy()
    first[4], second[4] = [0.7, 0, 0], [-1.0, 0, 0]
    one, other = (answer(machine(samples, Closed), 0.7) for samples in (first, second))
    assert np.linalg.norm(one - other) > 1.05 * machine().machine.plan.sensitivity


@pytest.mark.parametrize("clip", [0.5, 1.5, 1e300, -1.0, 0.0])
def test_rows_that_are_written_and_sums_in_closed_form_are_the_same(clip):
    point = [np.full(D, 0.2), np.array([clip])]
    rows = CountedGradients(Quadratic(D), SHARE)(point, SAMPLES)
    with np.errstate(all="ignore"):
        stacked = CountedGradients(Closed(D), SHARE).stacked([point], [1.0], SAMPLES)
        assert POLICY.bound.total(stacked, D + 1) == pytest.approx(POLICY.bound.total(rows, D + 1), abs=1e-12)
    assert answer(machine(), clip, point[0]) == pytest.approx(answer(machine(model=Closed), clip, point[0]), abs=1e-5)


def test_a_release_sums_scaled_gradients_and_marks():
    values = answer(machine(), 1.5) - answer(machine(np.full((N, D), np.nan)), 1.5)  # which count as nothing
    norms = np.linalg.norm(SAMPLES, axis=1)
    gradient, within = CountedRows(SHARE).read(values / N, 1.5)
    assert gradient == pytest.approx(-(SAMPLES * np.minimum(1.0, 1.5 / norms)[:, None]).mean(axis=0), abs=1e-3)
    assert within == pytest.approx((norms <= 1.5).mean(), abs=1e-3)


@pytest.mark.parametrize("arrays", [[np.zeros(D)], [np.zeros(D), np.array([np.nan])], [np.zeros(D), np.array([1])]])
def test_a_malformed_clip_is_refused_with_a_text_that_says_nothing_of_data(arrays):
    with pytest.raises(RefusedError, match="malformed request: expected") as refused:
        machine().fit(arrays, training_config())
    assert refused.value.code == protocol.MALFORMED_REQUEST


@pytest.mark.parametrize("changes", [{"clip_norm": 0.5}, {"clipping": "automatic"}])
def test_policies_that_rows_are_not_made_for_are_refused(changes):
    with pytest.raises(ConfigurationError, match="Expected clip_norm 1 and clipping 'clip'"):
        machine(policy=replace(POLICY, **changes))


def test_other_combinations_of_points_are_refused():
    with pytest.raises(ConfigurationError, match="one point"):
        CountedGradients(Closed(D), SHARE).stacked([[], []], [1.0, 1.0], SAMPLES)
