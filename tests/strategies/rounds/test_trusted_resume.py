"""A trusted training that is cut off and resumed: the same model to the last bit, and no more mu than is claimed."""

import logging
import math
import os
import secrets
from collections import defaultdict

import numpy as np
import pytest
from murmurfl.privacy import SystemKeys
from murmurfl.strategies import CheckpointError
from murmurfl.strategies.rounds.checkpoint import TrustedCheckpoint

from tests.harness.trusted_runs import (
    CLAIM,
    KINDS,
    POINTS,
    ROUNDS,
    Columns,
    Deaths,
    Machines,
    deaths_in,
    exact_mu,
    policy,
    published_noise,
    run,
    strategy,
)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No power is cut here, and hundreds of checkpoints are saved."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", True)


def key_of_every_start_its_own(monkeypatch):
    """The bug of 0.1, planted: a resumed server draws under another key."""
    monkeypatch.setattr(TrustedCheckpoint, "key", lambda files: secrets.token_bytes(32))
    monkeypatch.setattr(TrustedCheckpoint, "check_key", lambda files, fits: None)


def mu_of_a_run(kind, folder, monkeypatch, deaths):
    columns, deaths = Columns(monkeypatch), Deaths(monkeypatch, deaths)
    numbers, weights, subject = published_noise(kind, folder / "checkpoint", columns, deaths)
    assert not deaths.plan, "every death came"
    assert len(set(numbers)) == ROUNDS
    return exact_mu(kind, subject, numbers, weights), numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interruptions", [0, 1, 7])
def test_exact_mu_of_what_was_published_is_at_most_the_claim(kind, interruptions, monkeypatch, tmp_path):
    """V' Sigma^+ v over the rows really drawn, with deaths at every point of a round; most calibrations are exact."""
    mu, numbers = mu_of_a_run(kind, tmp_path, monkeypatch, deaths_in(interruptions))
    assert numbers == list(range(1, ROUNDS + 1)), "one model a round, whatever happened"
    assert mu <= CLAIM * (1 + 1e-5)  # weights are read off the grid
    assert mu > (0.8 if kind == "reduced tree" else 0.999) * CLAIM


def test_nodes_drawn_again_under_another_key_cost_more_than_the_claim(monkeypatch, tmp_path):
    """With the bug of 0.1, a new key for every start, the same deaths cost more: the test above can fail."""
    key_of_every_start_its_own(monkeypatch)
    found = []
    for interruptions in (1, 7):
        with monkeypatch.context() as patch:
            folder = tmp_path / str(interruptions)
            found.append(mu_of_a_run("reduced tree", folder, patch, deaths_in(interruptions))[0])
    assert found[0] > 1.05 * CLAIM
    assert found[1] > 1.3 * CLAIM


@pytest.mark.parametrize("kind", ["sqrt_toeplitz", "optimal"])
def test_rows_drawn_again_under_another_key_are_not_the_mechanisms(kind, monkeypatch, tmp_path):
    """Some mechanisms make their state again from old rows. From other rows the noise is not what was claimed."""
    key_of_every_start_its_own(monkeypatch)
    mu, _ = mu_of_a_run(kind, tmp_path, monkeypatch, deaths_in(7))
    assert abs(mu - CLAIM) > 0.05


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("kind", ["trusted-mu2", "tree", "reduced tree", "blt"])
def test_a_checkpoint_copied_back_would_publish_the_same_sums_under_other_noise(kind, planted, monkeypatch, tmp_path):
    path = tmp_path / "checkpoint"
    columns, machines = Columns(monkeypatch), Machines(policy(kind))
    deaths = Deaths(monkeypatch, [("seen", 4), ("seen", 18)])
    saved = []

    def build():
        if path.exists() and not saved:
            saved.append(path.read_bytes())  # a backup, after round 4
        elif saved:
            path.write_bytes(saved[0])
        return strategy(kind, path)

    if not planted:
        with pytest.raises(CheckpointError, match="copied back"):
            run(build, machines, deaths)
        return
    resume = TrustedCheckpoint.resume

    def believing(files, found):
        files._write_mark(type(files._read_mark())(**found))
        resume(files, found)

    monkeypatch.setattr(TrustedCheckpoint, "resume", believing)
    subject, restarts = run(build, machines, deaths)
    published = [(number, model) for number, model in dict.fromkeys(machines.seen) if number]
    weights = np.array([columns.of_model[model] for _, model in published])[:, : len(columns.numbers)]
    assert restarts == 2
    assert len(published) == ROUNDS + 14, "rounds 5 to 18 were published twice"
    assert exact_mu(kind, subject, [number for number, _ in published], weights) > 1.02 * CLAIM


@pytest.fixture
def scripted_keys(monkeypatch):
    """Real keys that are known, with nonces that are the number of the round, so that two runs can be compared."""
    made = []

    def generate():
        made.append(len(made))
        return SystemKeys(bytes([made[-1]] * 32))

    monkeypatch.setattr(SystemKeys, "generate", generate)
    monkeypatch.setattr(SystemKeys, "nonce", lambda keys, session, release: bytes([release] * 16))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_every_point_equals_uninterrupted_bit_for_bit(kind, scripted_keys, monkeypatch, tmp_path):
    deaths = Deaths(monkeypatch, [])
    ends, machines = [], [Machines(policy(kind), 7, empty=False) for _ in range(2)]
    for name, plan in (("whole", []), ("interrupted", deaths_in(7))):
        scripted_keys.clear()
        deaths.plan = list(plan)
        subject, restarts = run(
            lambda name=name: strategy(kind, tmp_path / name, session="s"), machines[len(ends)], deaths
        )
        ends.append(subject)
        assert restarts == len(plan)
        assert len(scripted_keys) == restarts + 1, "every start made a key; all but the first were put away"
    whole, resumed = ends
    assert resumed.history == whole.history
    assert resumed.acks == whole.acks
    for name, value in vars(whole.state).items():
        assert value.tobytes() == getattr(resumed.state, name).tobytes(), name
    assert dict.fromkeys(machines[0].seen) == dict.fromkeys(machines[1].seen), "and everything that was published"


@pytest.mark.parametrize("kind", ["trusted-mu2", "reduced tree"])
@pytest.mark.parametrize("server_round", [0, 1, 3, 6])
@pytest.mark.parametrize("point", POINTS)
def test_a_dying_server_leaves_one_model_a_round(kind, server_round, point, monkeypatch, tmp_path):
    """Round 0 is the checkpoint before the first request."""
    deaths, machines = Deaths(monkeypatch, [(point, server_round)]), Machines(policy(kind), 7, empty=False)
    _, restarts = run(lambda: strategy(kind, tmp_path / "checkpoint"), machines, deaths, num_rounds=6)
    assert restarts == 1
    assert len(set(machines.sessions)) == 1
    models = defaultdict(set)
    for number, model in machines.seen:
        models[number].add(model)
    assert sorted(models) == list(range(7))
    assert all(len(versions) == 1 for versions in models.values())


def test_a_repeated_round_publishes_fresh_noise_only(monkeypatch, tmp_path):
    """The server dies between noise and checkpoint: nobody sees the noise of the first try."""
    columns, machines = Columns(monkeypatch), Machines(policy("tree"))
    deaths = Deaths(monkeypatch, [("noise drawn", 5)])
    run(lambda: strategy("tree", tmp_path / "checkpoint"), machines, deaths)
    assert len(columns.numbers) == ROUNDS + 1
    assert len(columns.of_model) == ROUNDS + 1, "two models of round 5 were made"
    published = {model for number, model in machines.seen if number}
    assert len(published) == ROUNDS


def test_exact_mu_knows_noise_that_is_missing(monkeypatch, tmp_path):
    """The tool itself is tested: without noise mu is infinite, and with half the noise it is twice the claim."""
    columns = Columns(monkeypatch)
    numbers, weights, subject = published_noise("tree", tmp_path / "c", columns, Deaths(monkeypatch))
    assert exact_mu("tree", subject, numbers, weights / 2) == pytest.approx(2 * CLAIM, rel=1e-3)
    assert math.isinf(exact_mu("tree", subject, numbers, weights * 0))
