"""Real nodes and a real server killed with SIGKILL at every step of a release, and what is true of the run after it."""

import pytest
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.privacy import read_ledger

from tests.deployment.rig import (
    assert_ledgers_know_all_that_was_heard,
    assert_no_release_was_sent_with_two_contents,
    assert_nothing_is_missing_or_left_over,
    assert_the_model_is_that_of_the_same_releases_without_messages,
    configuration,
    federation,
)

pytestmark = pytest.mark.deployment

SETTINGS = {
    "batch_size": 16,
    "node_deadline_s": 120.0,
    "round_timeout_s": 15.0,
    "give_up_after": 0,
}

# Every node dies in rounds 2, 3, 4, 5 and 6, where it stands: 20 steps in one run.
STEPS = {
    "node-0": ["fetch", "admit", "noise", "seal", "marked"],
    "node-1": ["fetching", "admitted", "noise made", "commit", "send"],
    "node-2": ["fetched", "gradient", "half a gradient", "committed", "sent"],
    "node-3": ["read", "gradient made", "write", "mark written", "answered"],
}


def test_killed_nodes_come_back_without_lost_or_repeated_releases(tmp_path):
    folder = tmp_path / "run"
    config = configuration(folder, num_clients=4, clients_per_round=4, num_rounds=9, **SETTINGS)
    with federation(config, folder, 1200, {"max-participations": 20}) as real:
        real.start({name: {"kills": [[step, 2 + i] for i, step in enumerate(steps)]} for name, steps in STEPS.items()})
        real.submit({"late": True})
        for name, steps in STEPS.items():
            assert [step for step, _ in real.lines(name, "killed")] == steps
            assert real.restarts[name] == len(steps)
        assert real.result()["rounds"] == 9
        assert_no_release_was_sent_with_two_contents(real)
        assert_ledgers_know_all_that_was_heard(real)
        assert_nothing_is_missing_or_left_over(real)


def test_a_power_cut_and_a_supernode_that_dies_alone_are_no_different(tmp_path):
    """Nobody signs off: Flower lets such a node in again when it has given up its old session, after about a minute."""
    folder = tmp_path / "run"
    patient = {**SETTINGS, "round_timeout_s": 45.0}
    config = configuration(folder, num_clients=2, clients_per_round=2, num_rounds=5, **patient)
    plans = {
        "node-0": {"kills": [["power cut: committed", 2]]},
        "node-1": {"kills": [["the SuperNode alone: sent", 2]]},
    }
    with federation(config, folder, 900, {"max-participations": 20}) as real:
        real.start(plans)
        real.submit()
        assert [len(real.lines(name, "killed")) for name in plans] == [1, 1]
        assert dict(real.restarts) == {"node-0": 1}
        assert real.result()["rounds"] == 5
        assert_no_release_was_sent_with_two_contents(real)
        assert_ledgers_know_all_that_was_heard(real)
        assert_nothing_is_missing_or_left_over(real)


def test_a_node_that_commits_after_sending_is_caught(tmp_path):
    """The planted bug: the same kill, and the release that was sent is made and sent again."""
    folder = tmp_path / "run"
    config = configuration(folder, num_clients=1, clients_per_round=1, num_rounds=3, **SETTINGS)
    with federation(config, folder, 600, {"max-participations": 20}) as real:
        real.start({"node-0": {"kills": [["sent", 2]], "bug": "commits after sending"}})
        real.submit()
        with pytest.raises(AssertionError, match="node-0 sent a release with two contents"):
            assert_no_release_was_sent_with_two_contents(real)


# Flower notices a ServerApp's death after a minute, so there are three: requests on their way; a checkpoint half
# written, which for the disk is the same as none begun, or no reply heard; a checkpoint that nobody has heard of.
SERVER_KILLS = [["asked", 2], ["half saved", 3], ["saved", 4]]


def test_a_server_killed_anywhere_ends_with_the_same_model(tmp_path):
    folder = tmp_path / "run"
    config = configuration(folder, num_clients=2, clients_per_round=2, num_rounds=5, **SETTINGS)
    with federation(config, folder, 900, {"max-participations": 5}) as real:
        real.start({"node-0": {}, "node-1": {}})
        for _ in SERVER_KILLS:
            with pytest.raises(LaunchError):
                real.submit({"kills": SERVER_KILLS})
            assert not (folder / "result.json").exists()
        real.submit({"kills": SERVER_KILLS})
        assert (folder / "killed").read_text().splitlines() == [f"{step} {number}" for step, number in SERVER_KILLS]
        # A round that is asked again gets the same releases: none is wasted, and a cap of the rounds is enough.
        sessions = [read_ledger(real.ledger(name)).sessions for name in real.running.nodes]
        assert [[session.releases for session in of_one] for of_one in sessions] == [[5], [5]]
        assert_no_release_was_sent_with_two_contents(real)
        assert_nothing_is_missing_or_left_over(real)
        assert_the_model_is_that_of_the_same_releases_without_messages(real)
