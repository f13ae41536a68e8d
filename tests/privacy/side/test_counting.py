"""A private count moves by one when one sample does, whatever says what holds, and is near the true one."""

import math

import numpy as np
import pytest
from murmurfl.privacy import PrivateMachine, RefusedError, SimulatedKeys, SystemKeys, row_bytes
from murmurfl.privacy.side.evaluation_query import counted, counting_policy, release_count

from tests.privacy.machines import DATA, DurableLedger

HOSTILE = [0.0, 1.0, 0.5, -7.0, 1e300, math.nan, math.inf, -math.inf]


def counter(mu=1.0, ledger=None, keys=None, **fields):
    ledger = DurableLedger() if ledger is None else ledger
    keys = SimulatedKeys(1, "m") if keys is None else keys
    return PrivateMachine(counting_policy(mu, **fields), 1, len(DATA), ledger, keys, data=row_bytes(DATA))


def count_of(holds, **options):
    return counted([release_count(counter(**options), "s", lambda samples: holds[samples])])[0]


def test_replacing_one_sample_moves_the_count_by_one():
    counts = []
    for value in HOSTILE:  # the same noise every time
        holds = np.zeros(len(DATA))
        holds[7] = value
        counts.append(count_of(holds))
    gaps = np.abs(np.subtract.outer(counts, counts))
    policy = counting_policy(1.0)
    assert gaps.max() <= policy.plan(1).sensitivity
    assert abs(counts[1] - counts[0]) == pytest.approx(1.0, abs=1e-4)
    # The bug that would be: 0 and 1 as rows cut to 1, whose bound would allow a sample to move them by 2.
    assert policy.sensitivity == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("keys", [None, SystemKeys(b"k" * 32)])
def test_a_count_is_near_the_true_one_and_says_of_how_many(keys):
    holds = DATA[:, 0] > 0
    count, samples = counted([release_count(counter(2.0, keys=keys), "s", lambda chosen: holds[chosen])])
    assert samples == len(DATA)
    assert abs(count - holds.sum()) < 5  # ten standard deviations


def test_a_count_has_its_place_in_the_budget():
    ledger = DurableLedger()
    holds = np.ones(len(DATA))
    for session in ("one", "two"):
        release_count(counter(1.0, ledger, budget_mu=1.5), session, lambda chosen: holds[chosen])
        if session == "one":
            with pytest.raises(RefusedError, match="cap"):
                release_count(counter(1.0, ledger, budget_mu=1.5), session, lambda chosen: holds[chosen])
    with pytest.raises(RefusedError, match="budget"):
        release_count(counter(1.0, ledger, budget_mu=1.5), "three", lambda chosen: holds[chosen])
