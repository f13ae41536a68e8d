"""A fifth of the replies dropped, late or twice between real processes: a delay, and no noise or accuracy lost."""

import numpy as np
import pytest
from murmurfl.app.engines.start import run_in_process

from tests.deployment.rig import (
    assert_ledgers_know_all_that_was_heard,
    assert_no_release_was_sent_with_two_contents,
    configuration,
    federation,
    sum_and_parts,
)

pytestmark = pytest.mark.deployment

ROUNDS, CLIENTS, SEEDS = 34, 4, (1, 2, 3)
TIMEOUT_S = 15.0
SETTINGS = {
    "num_clients": CLIENTS,
    "clients_per_round": CLIENTS,
    "num_rounds": ROUNDS,
    "batch_size": 10,
    "round_timeout_s": TIMEOUT_S,
    "evaluate_every": ROUNDS,
}
# Of all replies; those of the last round come, so that everything made is acknowledged or was sent with it.
DROPPED, LATE, TWICE = 0.08, 0.06, 0.06


def run_with_losses(folder, seed):
    """A run over real nodes to its end, checked; its accuracy."""
    config = configuration(folder, seed=seed, **SETTINGS)
    with federation(config, folder, 1500) as real:
        late = {"delay": (LATE, TIMEOUT_S + 3.0, seed, ROUNDS - 1)}  # a late one may make the next late as well
        real.start(dict.fromkeys(real.running.nodes, late))
        shares = {"drop": DROPPED, "repeat": TWICE / 2, "seed": seed, "punctual_from": ROUNDS, "late": True}
        real.submit(shares)
        result = real.result()
        assert result["rounds"] == ROUNDS
        assert result["lost_replies"] > 0
        assert result["late_replies"] > 0
        assert result["refusals"] == 0
        assert_no_release_was_sent_with_two_contents(real)
        assert_ledgers_know_all_that_was_heard(real)
        parts = sum_and_parts(real)
        assert np.array_equal(parts.server - parts.contributions, parts.noise), (
            "noise is left over, or something missing"
        )
        assert not np.array_equal(parts.server, parts.contributions), "the check sees the noise of the last release"
    # Of a client that was missed rounds do not wait for: what comes of it later counts, and is neither lost nor late.
    assert result["lost_replies"] + result["late_replies"] > 0.1 * ROUNDS * CLIENTS
    return result["accuracy"]


def test_a_fifth_of_the_replies_in_trouble_costs_less_than_two_points(tmp_path):
    """Two points of the mean of three seeds: simulated 18 times it fell short of none by 0.7, with a deviation of 0.4.

    So a run that is as good fails in about one of a thousand.
    """
    accuracies = []
    for seed in SEEDS:
        accuracy = run_with_losses(tmp_path / f"run-{seed}", seed)
        lossless = run_in_process(configuration(tmp_path / "none", seed=seed, checkpoint=False, **SETTINGS)).accuracy
        accuracies.append((accuracy, lossless))
    with_losses, without = np.mean(accuracies, axis=0)
    assert with_losses > without - 0.02
