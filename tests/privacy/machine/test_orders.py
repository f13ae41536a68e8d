"""Which samples a release is made from: all of them, or each session's own from the first one."""

import numpy as np
import pytest
from murmurfl.privacy import RefusedError, SystemKeys

from tests.privacy.machines import DATA, D, DurableLedger, contribution, machine, zero

ALL = {"order": "all", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}


def noise_of(subject, session="s"):
    return subject.release(session, 0, zero).values


def test_a_release_of_all_samples_is_the_sum_of_their_bounded_rows():
    release = machine(**ALL, max_participations=3).release("s", 0, contribution)
    expected = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA
    found = release.values - noise_of(machine(**ALL, max_participations=3))
    assert found == pytest.approx(expected.sum(axis=0), abs=1e-2)
    assert release.samples == len(DATA)


def test_every_sample_returns_in_every_release_until_the_cap():
    subject = machine(**ALL, max_participations=3)
    for _ in range(3):
        assert subject.admits("s", 0) == slice(0, len(DATA))
        subject.release("s", 0, contribution)
    with pytest.raises(RefusedError, match="cap"):
        subject.release("s", 0, contribution)


def test_a_failing_sample_counts_as_zero_in_the_sum():
    def failing(samples):
        assert samples.stop - samples.start == 1
        if samples.start == 5:
            raise ValueError("of this sample")
        return DATA[samples]

    keys = SystemKeys(b"k" * 32)
    subject = machine(ledger=DurableLedger(), keys=keys, mu=8.0, **ALL, max_participations=1)
    values = subject.release("s", 0, failing).values
    rows = np.clip(1 / np.linalg.norm(DATA, axis=1), None, 1)[:, None] * DATA
    rows[5] = 0.0
    # Noise of standard deviation 1/4 in six coordinates: beyond 2.5 with a chance below 1e-20.
    assert np.abs(values - rows.sum(axis=0)).max() < 2.5


def test_a_session_that_begins_again_uses_samples_of_sessions_before_it():
    ledger = DurableLedger()
    again = {"order": "again", "mechanism": "independent", "budget_mu": 3.0, "mu": 2.0, "max_participations": 4}
    for session in ("one", "two"):
        subject = machine(ledger=ledger, **again)
        assert subject.admits(session, 0) == slice(0, 2)
        subject.release(session, 0, contribution)
        assert subject.admits(session, 0) == slice(2, 4)
    with pytest.raises(RefusedError, match="budget"):
        machine(ledger=ledger, **again).release("three", 0, contribution)


def test_a_session_in_turn_finds_nothing_fresh_after_a_release_of_all_samples():
    ledger = DurableLedger()
    machine(ledger=ledger, **ALL, max_participations=1, mu=1.0, budget_mu=3.0).release("all", 0, contribution)
    with pytest.raises(RefusedError, match="no fresh samples"):
        machine(ledger=ledger, mu=1.0, budget_mu=3.0).release("turn", 0, contribution)
    again = machine(ledger=ledger, order="again", mu=1.0, budget_mu=3.0)
    assert again.release("again", 0, contribution).samples == 2
    assert D == 6
