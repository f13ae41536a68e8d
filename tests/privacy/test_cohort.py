"""What a caller who computes for many machines may do, and what it may not: one release for one open admission."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, RefusedError, SystemKeys
from murmurfl.privacy.cohort import release_together
from murmurfl.privacy.contributions import DenseContributions

from tests.privacy.machines import D, contribution, machine


def counts():
    return np.zeros(D, dtype=np.int64)


def test_an_admitted_release_is_the_one_the_machine_makes_alone():
    alone = machine(ledger=MemoryLedger()).release("s", 0, contribution)
    subject = machine(ledger=MemoryLedger())
    with subject.admitted("s", 0) as admission:
        made = subject._contribution_counts(contribution, admission.samples)
        release = subject.finish(admission, made)
    assert (release.counts == alone.counts).all()
    assert subject.statement("s").releases == 1


def test_an_admission_spends_nothing_until_it_is_finished():
    subject = machine()
    with subject.admitted("s", 0) as admission:
        assert (admission.release, admission.samples) == (1, slice(0, 2))
    assert subject.admits("s", 0) == slice(0, 2)
    assert subject.statement("s").releases == subject.statement("s").samples_used == 0


def test_an_admission_is_good_for_one_release():
    """Two releases of other contributions under one nonce would tell their difference without any noise."""
    subject = machine()
    with subject.admitted("s", 0) as admission:
        subject.finish(admission, counts())
        with pytest.raises(ConfigurationError, match="open admission"):
            subject.finish(admission, counts() + 1)
        with pytest.raises(ConfigurationError, match="open admission"):
            subject.normals_key(admission)
    assert subject.statement("s").releases == 1


def test_an_admission_ends_with_its_transaction():
    subject = machine()
    with subject.admitted("s", 0) as admission:
        pass
    with pytest.raises(ConfigurationError, match="open admission"):
        subject.finish(admission, counts())
    assert subject.statement("s").releases == 0
    assert subject.release("s", 0, contribution).release == 1


def test_an_admission_is_good_for_the_machine_that_made_it():
    subject, other = machine(), machine()
    with subject.admitted("s", 0) as admission:
        for method in (lambda: other.finish(admission, counts()), lambda: other.normals_key(admission)):
            with pytest.raises(ConfigurationError, match="open admission"):
                method()
    assert subject.statement("s").releases == other.statement("s").releases == 0


def test_a_real_machine_finishes_nothing_that_others_computed_and_hands_out_no_key():
    subject = machine(keys=SystemKeys(bytes(32)))
    with subject.admitted("s", 0) as admission:
        with pytest.raises(ConfigurationError, match="real keys"):
            subject.finish(admission, counts())
        with pytest.raises(ConfigurationError, match="real keys"):
            subject.normals_key(admission)
    assert subject.statement("s").releases == 0


def test_nothing_is_held_or_spent_where_a_caller_stops_in_between():
    machines = [machine(ledger=MemoryLedger(), budget_mu=3.0) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        list(release_together(machines, "s", [0, 0, 0], lambda _, __: 1 / 0))
    half = release_together(machines, "s", [0, 9, 0], lambda positions, _: rows(len(positions)))
    assert next(half).release == 1
    assert isinstance(next(half), RefusedError)
    half.close()
    assert [subject.statement("s").releases for subject in machines] == [1, 0, 0]
    assert [subject.release("t", 0, contribution).release for subject in machines] == [1, 1, 1], "ledgers are free"


def rows(machines):
    return DenseContributions(np.ones((2 * machines, D)))
