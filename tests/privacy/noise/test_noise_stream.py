"""The noise of a stream by itself: the rows of B Z, made again from nonces, gone to the last bit where they cancel."""

import numpy as np
import pytest
from murmurfl.privacy import RowCache, SimulatedKeys, StreamRecord, row_key, standard_normals
from murmurfl.privacy.machine.prefix_sums import NoiseStream

from tests.privacy.machines import D, machine, mechanisms

K = 12
KEYS = SimulatedKeys(1, "m")


def noise_of(subject, rows=None):
    return NoiseStream(subject.plan, D, subject.policy.noise_quality, rows)


def increments(noise, releases=K):
    """What each release of one session carries beside its contribution, and the last record."""
    stream, carried = StreamRecord("f"), []
    for k in range(1, releases + 1):
        counts = np.zeros(D, dtype=np.int64)
        nonces, state = noise.add_to(counts, stream, KEYS.secret_key, KEYS.nonce("s", k))
        stream = stream.released(nonces, {}, state)
        carried.append(counts)
    return np.array(carried), stream


@mechanisms
def test_summed_it_is_the_mechanisms_matrix_times_the_normals(options):
    subject = machine(**options)
    mechanism, plan = subject.plan.mechanism, subject.plan
    normals = np.concatenate(
        [
            standard_normals(row_key(KEYS.secret_key, KEYS.nonce("s", k)), mechanism.draws(k) * D, "exact").reshape(
                -1, D
            )
            for k in range(1, K + 1)
        ]
    )
    dense = plan.noise_std * mechanism.decoder(K) @ normals
    carried, _ = increments(noise_of(subject))
    summed = plan.grid.values(carried.cumsum(axis=0))
    assert summed == pytest.approx(dense, abs=2 * K * plan.grid.spacing)
    assert np.abs(summed).max() > 1e3 * K * plan.grid.spacing, "noise, and not its rounding, was compared"


@mechanisms
def test_it_is_the_same_whatever_is_kept(options):
    subject = machine(**options)
    alone, record = increments(noise_of(subject))
    for cache in (RowCache(0), RowCache(3 * 8 * D), RowCache(1 << 20)):
        kept, same = increments(noise_of(subject, cache))
        assert (kept == alone).all()
        assert same.nonces == record.nonces


@pytest.mark.parametrize("schedule", ["uniform", "harmonic"])
def test_what_cancels_cancels_to_the_last_bit(schedule):
    """Of cancelling noise a sum of releases carries the last row and nothing of the others."""
    subject = machine(schedule=schedule)
    carried, record = increments(noise_of(subject))
    last = noise_of(subject)
    row = standard_normals(row_key(KEYS.secret_key, record.nonces), D, "exact")
    expected = np.rint(row * last.plan.grid.factor(last.plan.noise_std) * subject.plan.mechanism.decoder(K)[-1, -1])
    assert np.abs(carried.sum(axis=0) - expected).max() <= 1, "one rounding"


@pytest.mark.parametrize("changes", [{"mechanism": "none"}, {"trust": "trusted-server"}])
def test_a_machine_without_noise_adds_none_and_remembers_its_nonce(changes):
    noise = noise_of(machine(**changes))
    counts, stream = np.arange(D), StreamRecord("f")
    assert noise.add_to(counts, stream, KEYS.secret_key, b"n" * 16) == (b"n" * 16, ())
    assert (counts == np.arange(D)).all()
    assert not noise.draws_a_row(1)


def test_normals_made_beforehand_are_those_it_would_draw():
    noise, nonce = noise_of(machine(mechanism="blt")), KEYS.nonce("s", 1)
    assert noise.draws_a_row(1)
    one, other = np.zeros(D, dtype=np.int64), np.zeros(D, dtype=np.int64)
    noise.add_to(one, StreamRecord("f"), KEYS.secret_key, nonce)
    made = standard_normals(row_key(KEYS.secret_key, nonce), D, "exact")
    noise.add_to(other, StreamRecord("f"), KEYS.secret_key, nonce, made)
    assert (one == other).all()
    assert one.any()


def test_sessions_and_machines_share_no_noise():
    subject = machine(mechanism="independent")
    ours, _ = increments(noise_of(subject))
    counts = np.zeros(D, dtype=np.int64)
    noise_of(subject).add_to(counts, StreamRecord("f"), SimulatedKeys(1, "other").secret_key, KEYS.nonce("s", 1))
    assert not (counts == ours).any()
