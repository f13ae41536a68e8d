"""Rounds over real nodes that do not wait for the slowest: nothing is lost but time, and nothing counts twice."""

import numpy as np
import pytest

from tests.deployment.rig import (
    assert_ledgers_know_all_that_was_heard,
    assert_no_release_was_sent_with_two_contents,
    configuration,
    federation,
)

pytestmark = pytest.mark.deployment

ROUNDS, CLIENTS = 12, 4
LATE_S = 12.0


def test_a_late_nodes_releases_count_once_and_delay_nobody(tmp_path):
    settings = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "num_rounds": ROUNDS, "batch_size": 10}
    config = configuration(tmp_path / "run", quorum=0.75, evaluate_every=ROUNDS, **settings)
    with federation(config, tmp_path / "run", 900) as real:
        slow = {"delay": (1.0, LATE_S, 1, ROUNDS + 1)}
        real.start({name: slow if name == "node-0" else {} for name in real.running.nodes})
        real.submit()
        history = real.history()
        assert real.result()["rounds"] == ROUNDS
        assert real.result()["refusals"] == 0
        assert sum(report.get("overdue", 0) for report in history) > 0
        assert sum(report["late"] for report in history) == 0
        assert sum(report["asked"] for report in history) < ROUNDS * CLIENTS, "who is late is not asked meanwhile"
        assert_no_release_was_sent_with_two_contents(real)
        assert_ledgers_know_all_that_was_heard(real)
        plain, total = real.checkpoint()
        prefix_sums = prefix_sums_of(real)
        assert plain["acks"]["node-0"] < plain["acks"]["node-1"]
        assert np.array_equal(total, sum(prefix_sums[name, ack] for name, ack in plain["acks"].items()))


def prefix_sums_of(real):
    """P_k of every release that was heard, from what was sent: P_k - P_ack, and P_0 = 0."""
    heard = [
        (line["client"], line["release"], line["ack"], np.concatenate([a.ravel() for a in arrays]).astype(np.float64))
        for _, (line,), arrays in real.events("heard")
    ]
    sums = {}
    for name, release, ack, values in sorted(heard, key=lambda one: one[:2]):
        sums[name, release] = values + (sums[name, ack] if ack else 0.0)
    return sums
