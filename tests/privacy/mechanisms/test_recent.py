"""Noise that takes out a part of the last: decay and bisr, whose C^{-1} has few diagonals."""

import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, make_mechanism
from murmurfl.privacy.mechanisms import WORKLOADS, best_decay
from scipy.optimize import minimize_scalar

from tests.privacy.machines import contribution, machine


def error(mechanism, workload="mu2"):
    """Root mean square noise of what is released, summed once more for mu2, at a fixed mu."""
    rows = mechanism.decoder() if workload == "prefix-sum" else np.cumsum(mechanism.decoder(), axis=0)
    return np.linalg.norm(rows) / math.sqrt(len(rows)) * mechanism.sensitivity()


@pytest.mark.parametrize("n", [16, 64, pytest.param(256, marks=pytest.mark.long)])
def test_decay_is_nearly_optimal_for_mu2(n):
    made = error(make_mechanism("decay", n))
    assert 0.130 <= 1 - made / error(make_mechanism("cancelling", n)) <= 0.1425
    assert 1.0 < made / error(make_mechanism("optimal", n, workload="mu2")) <= 1.012


@pytest.mark.parametrize("n", [16, 64, 256])
def test_decay_leaves_less_noise_in_the_output_of_mu2(n):
    """x is the mean of w_1, w_2, ... with weights 1, 2, ...: w_1 without noise, each other a sum of prefix sums."""

    def noises(name):
        mechanism = make_mechanism(name, n)
        points = np.cumsum(mechanism.decoder(), axis=0) * mechanism.sensitivity()
        output = np.arange(2, n + 2) @ points / ((n + 1) * (n + 2) / 2)
        return np.linalg.norm(output), np.linalg.norm(points[-1])

    output, last = (ours / theirs for ours, theirs in zip(noises("decay"), noises("cancelling"), strict=True))
    assert 0.07 <= 1 - output <= 0.08
    assert 1.03 <= last <= 1.05


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("n", [2, 3, 5, 9, 17, 40, 100, 333])
def test_the_default_decay_is_within_a_thousandth_of_the_best(n, workload):
    found = minimize_scalar(
        lambda decay: error(make_mechanism("decay", n, decay=float(decay)), workload), bounds=(0, 1), method="bounded"
    )
    assert error(make_mechanism("decay", n, workload=workload), workload) <= 1.001 * found.fun


def test_every_machine_finds_the_same_decay():
    """Digits that machines with other versions of the libraries must find as well, to share sums."""
    assert [best_decay(n) for n in (1, 10, 14, 100, 600, 10_000, 10**6)] == [
        0.0, 0.81, 0.86, 0.978, 0.9963, 0.99978, 0.9999978,
    ]  # fmt: skip
    assert [best_decay(n, "prefix-sum") for n in (1, 10, 100, 10_000)] == [0.0, 0.63, 0.87, 0.986]
    policies = [machine(mechanism="decay", **changes).policy for changes in ({}, {"decay": best_decay(20)})]
    assert policies[0].plan(6).mechanism.identity() == policies[1].plan(6).mechanism.identity()
    assert policies[0].plan(6).noise_std == policies[1].plan(6).noise_std


def test_machines_with_another_decay_share_no_sum_and_go_on_with_no_session():
    summed = {"trust": "secure-aggregation", "min_honest": 3, "min_cohort": 4, "mechanism": "decay"}
    policies = [machine(**summed, **changes).policy for changes in ({}, {"decay": 0.5}, {"workload": "prefix-sum"})]
    assert len({policy.shared_terms(6) for policy in policies}) == 3
    assert len({policy.plan(6).fingerprint for policy in policies}) == 3


@pytest.mark.parametrize(("decay", "other"), [(0, "independent"), (1, "cancelling")])
@pytest.mark.parametrize("pattern", [{}, {"num_participations": 3, "min_separation": 4}])
def test_its_ends_are_independent_and_uniform_cancelling_noise(decay, other, pattern):
    ours, theirs = make_mechanism("decay", 12, decay=decay), make_mechanism(other, 12)
    noise = [one.noise_std(0.5, 2.0, **pattern) * one.decoder() for one in (ours, theirs)]
    assert noise[0] == pytest.approx(noise[1])


def test_the_sensitivity_of_decay_is_a_geometric_sum():
    assert make_mechanism("decay", 5, decay=0.5).sensitivity() == pytest.approx(math.sqrt(341 / 256))
    twice = make_mechanism("decay", 3, decay=0.5).sensitivity(2, 1)  # columns 1, 1/2, 1/4 and 0, 1, 1/2
    assert twice == pytest.approx(math.sqrt(1 + 1.5**2 + 0.75**2))


def test_bisr_is_the_square_roots_inverse_with_fewer_diagonals():
    whole = make_mechanism("sqrt_toeplitz", 20)
    for bands in (1, 2, 7, 20, 50):
        mechanism = make_mechanism("bisr", 20, bands=bands)
        kept = min(bands, 20)
        assert mechanism.inverse_column[:kept] == pytest.approx(whole.inverse_column[:kept])
        assert not mechanism.inverse_column[kept:].any()
        ratios = mechanism.inverse_column[1:kept] / mechanism.inverse_column[: kept - 1]
        assert ratios == pytest.approx(1 - 1.5 / np.arange(1, kept))
    assert make_mechanism("bisr", 20, bands=50).encoder_column == pytest.approx(whole.encoder_column)


@pytest.mark.parametrize("n", [60, 400])
def test_the_first_column_of_bisr_never_rises(n):
    for bands in (1, 2, 3, 5, 8, 16, 17, 40):
        column = make_mechanism("bisr", n, bands=bands).encoder_column
        assert (column >= 0).all()
        assert (np.diff(column) <= 1e-15).all()


def test_at_1024_releases_16_bands_have_the_papers_error():
    assert error(make_mechanism("bisr", 1024), "prefix-sum") == pytest.approx(5.10, abs=0.005)


@pytest.mark.parametrize(("options", "nonces"), [({"mechanism": "decay"}, 1), ({"mechanism": "bisr", "bands": 4}, 3)])
def test_a_machine_keeps_the_nonces_of_the_last_releases_and_no_more(options, nonces):
    ledger = MemoryLedger()
    subject = machine(ledger, **options)
    for k in range(1, 9):
        subject.release("s", 0, contribution)
        stream = ledger.stream("s")
        assert len(stream.nonces) == 16 * min(k, nonces)
        assert not stream.noise_state


def test_a_state_is_made_from_the_last_rows_alone():
    mechanism, asked = make_mechanism("bisr", 30, bands=5), []
    mechanism.state_after(20, lambda releases: asked.append(releases) or np.zeros((len(releases), 2)))
    assert asked == [range(17, 21)]


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_bands_must_be_a_number_of_diagonals(value):
    with pytest.raises(ConfigurationError, match="bands"):
        make_mechanism("bisr", 4, bands=value)
