"""What every client promises: recorded before it is returned, honest about itself, strict when it is real."""

import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, RefusedError, SumAssumption, SystemKeys, protocol
from murmurfl.privacy.release.clipping import MOST_ROWS

from tests.harness.errors import raises
from tests.privacy.clients import (
    DATA,
    D,
    DurableLedger,
    client,
    contribution,
    refused,
)

ALL = {"batch_selection": "full_batch", "mechanism": "independent", "release_rule": "paper"}


def test_failing_contribution_records_nothing_in_simulation():
    subject = client()
    before = subject.statement("s")
    with pytest.raises(ZeroDivisionError):
        subject.release("s", 0, lambda samples: 1 // 0)
    assert subject.statement("s") == before


def test_nothing_is_returned_before_it_is_committed():
    class BrokenLedger(MemoryLedger):
        def exclusive(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        client(BrokenLedger()).release("s", 0, contribution)


@pytest.mark.parametrize("changes", [{"max_participations": 2}, {"clip_norm": 0.5}, {"mu": 1.0}, {"mechanism": "blt"}])
def test_session_of_another_policy_states_its_reserved_mu(changes):
    """A cap lowered later must not make it an error, nor another noise level a figure that is not true."""
    ledger = DurableLedger()
    opened = client(ledger, budget_mu=10.0)
    for k in range(3):
        opened.release("s", k, contribution)
    later = client(ledger, budget_mu=10.0, **changes)
    statement = later.statement("s")
    assert statement.releases == 3
    assert statement.mu_spent == statement.guaranteed.mu == opened.plan.mu
    assert later.statement("new").guaranteed.mu == later.plan.mu


def test_a_client_of_one_sample_releases_once():
    for more in ({}, ALL):
        subject = client(batch_size=1, max_participations=1, num_samples=1, **more)
        assert subject.release("s", 0, contribution).samples == 1


def test_real_client_needs_exact_noise_and_enough_samples():
    with raises(ConfigurationError, "conflict", "noise_quality"):
        client(keys=SystemKeys.generate(), noise_quality="fast")
    with raises(ConfigurationError, "out-of-range", "num_samples"):
        client(num_samples=0)
    with raises(ConfigurationError, "wrong-shape", "contribution"):
        client().release("s", 0, lambda samples: np.zeros((2, D + 1)))


def test_a_real_client_adds_noise():
    with raises(ConfigurationError, "conflict", "mechanism"):
        client(keys=SystemKeys.generate(), mechanism="none")


def test_local_steps_need_the_samples_of_all_releases():
    """A release of local steps is divided by their number, and moves further with fewer."""
    steps = {"batch_size": 2, "max_participations": 20, "clip_unit": "update"}
    assert client(num_samples=40, **steps).num_samples == 40
    with raises(ConfigurationError, "out-of-range", "batch_size", match="clip_unit 'update'"):
        client(num_samples=39, **steps)


def test_sums_over_all_samples_are_of_as_many_as_can_be_counted():
    whole = {"batch_size": 1, "max_participations": 1, **ALL}
    assert client(num_samples=MOST_ROWS, **whole).num_samples == MOST_ROWS
    for samples in (0, MOST_ROWS + 1):
        with raises(ConfigurationError, "out-of-range", "num_samples"):
            client(num_samples=samples, **whole)


def test_the_server_counts_a_release_for_all_samples_or_for_a_batch():
    assert client(batch_size=1, max_participations=1, **ALL).release("s", 0, contribution).samples == len(DATA)
    assert client(batch_size=5).release("s", 0, contribution).samples == 5


def test_a_release_cannot_be_changed_under_its_ledger():
    """The ledger in memory may hold the very array: what is built on it would have another base."""
    release = client(mechanism="independent").release("s", 0, contribution)
    with pytest.raises(ValueError, match="read-only"):
        release.counts[0] += 1


def test_a_closed_session_s_figure_rests_on_what_the_client_s_rests_on():
    """A figure that holds in the worst case is its own worst case, and says so only where sums are assumed."""
    ledger = DurableLedger()
    opened = client(ledger, budget_mu=10.0)
    opened.release("s", 0, contribution)
    alone = client(ledger, budget_mu=10.0, clip_norm=0.5).statement("s").guaranteed
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(4, 6), "budget_local_mu": 40.0}
    summed = client(ledger, budget_mu=10.0, **sums).statement("s").guaranteed
    assert (alone.conditional, summed.conditional) == (False, True)
    assert alone.mu == summed.mu == summed.worst_case.mu == opened.plan.mu


def test_a_real_client_insists_on_a_ledger_that_lasts():
    with raises(ConfigurationError, "unsupported", "ledger"):
        client(MemoryLedger(), SystemKeys(bytes(32)))


def test_after_a_trusted_server_no_other_session_opens():
    ledger = MemoryLedger()
    trusted = client(ledger, trust="trusted-server", budget_mu=100.0)
    own = client(ledger, budget_mu=100.0)
    own.release("own noise", 0, contribution)
    assert own.statement("own noise").mu_budget == 100.0
    trusted.release("t", 0, contribution)
    for statement in (trusted.statement("t"), own.statement("t"), own.statement("new")):
        assert statement.mu_budget == math.inf
    for statement in (trusted.statement("t"), own.statement("t")):
        assert statement.mu_spent == statement.guaranteed.mu == math.inf, "its mu is not the client's to state"
    assert own.statement("own noise").guaranteed.mu == own.plan.mu, "its own noise is still there"
    own.release("own noise", 1, contribution)
    refused(protocol.BUDGET_EXHAUSTED, own, "u", 0)


def test_a_delta_the_noise_cannot_deliver_is_refused():
    with raises(ConfigurationError, "out-of-range", match="delta"):
        client(keys=SystemKeys(bytes(32)), delta=1e-100)
    simulated = client(delta=1e-100)
    assert math.isinf(simulated.plan.mu), "in simulation nothing is guaranteed"
    assert simulated.release("s", 0, contribution).release == 1


def test_what_is_left_of_a_session_is_stated():
    """Of 20 samples in batches of 3: its own cap, then the samples that another session has used up."""
    ledger = MemoryLedger()
    subject = client(batch_size=3, max_participations=4, budget_mu=9.0, num_samples=20, ledger=ledger)
    assert subject.statement("s").releases_left == 4
    for left in (3, 2, 1, 0):
        subject.release("s", 0, contribution)
        assert subject.statement("s").releases_left == left
    assert subject.statement("t").releases_left == 2
    for _ in range(2):
        subject.release("t", 0, contribution)
    assert subject.statement("t").releases_left == 0
    with pytest.raises(RefusedError):
        subject.release("t", 0, contribution)


@pytest.mark.parametrize("changes", [{"mechanism": "none"}, {"trust": "trusted-server"}])
def test_a_client_without_own_noise_states_no_bound(changes):
    subject = client(ledger=MemoryLedger(), **changes)
    for releases in range(2):
        stated = subject.statement("s")
        assert stated.releases == releases
        assert stated.guaranteed.mu == stated.mu_budget == math.inf
        subject.release("s", 0, contribution)
