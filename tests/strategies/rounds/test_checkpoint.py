"""A trusted server goes on from its newest checkpoint only, with its key, wherever it was cut off."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import shutil
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, SystemKeys
from murmurfl.strategies import CheckpointError, Mu2, load_checkpoint, save_checkpoint
from murmurfl.strategies.rounds.checkpoint import CheckpointMark, TrustedCheckpoint

from tests.harness.errors import raises
from tests.harness.trusted_runs import (
    CLAIM,
    KINDS,
    POINTS,
    ROUNDS,
    Clients,
    Columns,
    Deaths,
    Killed,
    deaths_in,
    exact_mu,
    policy,
    published_noise,
    run,
    strategy,
)

SIZE = 3
START = ArrayRecord([np.zeros(SIZE)])
NAMES = ["checkpoint", "checkpoint.key", "checkpoint.mark"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """No power is cut here, and hundreds of checkpoints are saved."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", True)


def train(folder, rounds, kind="tree", clients=None, **changes):
    subject = strategy(kind, folder / "checkpoint", **changes)
    clients = clients or Clients(subject.aggregator.policy, SIZE)
    subject.start(clients, START, num_rounds=rounds)
    return subject


@pytest.fixture
def folder(tmp_path):
    """A training that ended after round 4, and a copy of its files after round 2."""
    made, backup = tmp_path / "made", tmp_path / "backup"
    train(made, 2)
    shutil.copytree(made, backup)
    train(made, 4)
    return made


def files(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def refused(folder, match, **changes):
    """Nobody is asked, nothing is changed, and the error says the way out."""
    before, clients = files(folder), Clients(policy(), SIZE)
    with pytest.raises(CheckpointError, match=match) as caught:
        train(folder, 6, clients=clients, **changes)
    assert not clients.seen
    assert files(folder) == before
    assert str(caught.value).startswith("Expected ")
    return str(caught.value)


def test_private_files_exist_before_the_first_request(tmp_path):
    class Looking(Clients):
        def answer(self, request):
            assert sorted(files(tmp_path / "made")) == NAMES
            assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "made").iterdir())
            yield from super().answer(request)

    subject = train(tmp_path / "made", 2, clients=Looking(policy(), SIZE))
    assert (tmp_path / "made" / "checkpoint.key").read_bytes() == subject.aggregator.stream.keys.secret_key
    assert json.loads((tmp_path / "made" / "checkpoint.mark").read_text())["server_round"] == 2
    assert subject.aggregator.stream.keys.secret_key not in (tmp_path / "made" / "checkpoint").read_bytes()


def test_a_training_goes_on_with_its_key_and_in_its_session(folder):
    key, subject = (folder / "checkpoint.key").read_bytes(), train(folder, 6)
    assert subject.aggregator.stream.keys.secret_key == key
    assert [report.server_round for report in subject.history] == list(range(1, 7))


def test_a_checkpoint_from_a_backup_is_refused_and_the_newest_put_back_is_not(folder):
    newest = (folder / "checkpoint").read_bytes()
    shutil.copy(folder.parent / "backup" / "checkpoint", folder / "checkpoint")
    said = refused(folder, "copied back from a backup")
    assert "Put the newest checkpoint back" in said
    assert "remove" in said
    (folder / "checkpoint").write_bytes(newest)
    train(folder, 6)


def test_a_checkpoint_of_another_history_with_as_many_saves_is_refused(folder, tmp_path):
    """Two servers went on from one copy; their checkpoints are equally new, and not the same."""
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "backup", other)
    train(other, 4)
    shutil.copy(other / "checkpoint", folder / "checkpoint")
    refused(folder, "of another history")


def test_a_mark_two_saves_behind_was_copied_back(folder):
    mark, document = folder / "checkpoint.mark", json.loads((folder / "checkpoint.mark").read_text())
    document |= {"saves": document["saves"] - 2, "stamp": "0" * 32}
    mark.write_text(json.dumps(document))
    refused(folder, "the mark was copied back")
    mark.write_text(json.dumps({**document, "saves": document["saves"] + 1}))
    train(folder, 6)


@pytest.mark.parametrize(
    ("lost", "match"),
    [
        (["checkpoint.mark"], "high-water mark at .* got no file.*Put the mark back"),
        (["checkpoint.key"], "noise key .* got no file.*Put the key back"),
        (["checkpoint"], "only its high-water mark .* after round 4"),
        (["checkpoint", "checkpoint.key"], "only its high-water mark"),
        (["checkpoint", "checkpoint.mark"], "no trace of an earlier training"),
    ],
)
def test_what_is_lost_is_named_with_the_way_out(folder, lost, match):
    for name in lost:
        (folder / name).unlink()
    said = refused(folder, match)
    assert "Or start anew: remove" in said


def test_removing_all_files_starts_a_new_key_and_session(folder):
    key, session = (folder / "checkpoint.key").read_bytes(), train(folder, 4).session
    for name in NAMES:
        (folder / name).unlink()
    subject = train(folder, 4)
    assert subject.session != session
    assert (folder / "checkpoint.key").read_bytes() != key
    assert len(subject.history) == 4


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("checkpoint.key", bytes(32), "with at .* got another"),
        ("checkpoint.key", bytes(31), "32 bytes at .* got 31"),
        ("checkpoint.mark", b"", "damaged"),
        ("checkpoint.mark", b'{"murmurfl-checkpoint-mark": 1, "training": "a", "saves": "9"}', "damaged"),
        ("checkpoint.mark", b'{"murmurfl-checkpoint-mark": 1, "training": "a", "saves": 9}', "another training"),
        ("checkpoint", b"PK", "readable"),
    ],
)
def test_damaged_and_foreign_files_are_refused(folder, name, content, match):
    (folder / name).write_bytes(content)
    refused(folder, match)


@pytest.mark.parametrize("kept", [NAMES, ["checkpoint.mark"]], ids=["all", "mark"])
def test_a_mark_of_another_format_is_refused_and_nothing_is_said_of_starting_anew(folder, kept):
    mark = folder / "checkpoint.mark"
    mark.write_text(mark.read_text().replace('"murmurfl-checkpoint-mark": 1', '"murmurfl-checkpoint-mark": 2'))
    for name in set(NAMES) - set(kept):
        (folder / name).unlink()
    said = refused(
        folder, "high-water mark of format 1 at .*, got one of format 2; it was left alone, .* Go on with the"
    )
    assert "data that were never used before" in said
    assert "remove" not in said


@pytest.mark.parametrize("name", NAMES)
def test_files_that_others_can_read_are_refused(folder, name):
    (folder / name).chmod(0o640)
    refused(folder, "chmod 600")


def test_a_second_server_on_one_checkpoint_stops_before_it_publishes(folder):
    clients = Clients(policy(), SIZE)

    class Overtaken(Clients):
        def answer(self, request):
            if not clients.seen:
                train(folder, 6, clients=clients)
            yield from super().answer(request)

    slow = Overtaken(policy(), SIZE)
    with raises(CheckpointError, "mismatch", match="a second server"):
        train(folder, 6, clients=slow)
    assert {number for number, _ in slow.seen} == {4}, "what was published before"
    assert clients.seen[-1][0] == 5


def test_a_start_cut_off_before_its_first_checkpoint_is_no_training(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        Deaths(patch, [("noise drawn", 0)])
        with pytest.raises(Killed):
            train(tmp_path / "made", 2)
    assert sorted(files(tmp_path / "made")) == NAMES[1:]
    key = (tmp_path / "made" / "checkpoint.key").read_bytes()
    train(tmp_path / "made", 2)
    assert (tmp_path / "made" / "checkpoint.key").read_bytes() != key


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"policy": policy(mu=2.0)}, r"mu \(1.0, now 2.0\).*policy.mu"),
        ({"policy": policy(delta=1e-6)}, "policy.delta"),
        ({"policy": policy(max_participations=19)}, "policy.max_participations"),
        ({"alpha": 0.2}, "alpha"),
    ],
)
def test_a_resumed_server_has_the_policy_the_noise_was_made_for(folder, changes, match):
    refused(folder, match, **changes)


def test_keys_of_the_callers_own_are_the_callers_to_keep(tmp_path):
    made, keys = tmp_path / "made", SystemKeys.generate()
    train(made, 2, noise_keys=keys)
    assert sorted(files(made)) == ["checkpoint", "checkpoint.mark"]
    refused(made, "in noise_keys, got another", noise_keys=SystemKeys.generate())
    refused(made, "noise key .* got no file.*pass noise_keys")
    train(made, 4, noise_keys=keys)


def test_seeded_keys_have_no_files_and_are_not_real(tmp_path):
    made, seeded = tmp_path / "made", SimulatedKeys(1, "server")
    train(made, 2, noise_keys=seeded)
    assert sorted(files(made)) == ["checkpoint"]
    train(made, 3, noise_keys=seeded)
    refused(made, "noise keys", noise_keys=SimulatedKeys(2, "server"))
    refused(made, "got one without a mark of its own, from a simulation")
    train(tmp_path / "real", 2)
    refused(tmp_path / "real", "noise keys", noise_keys=seeded)


def test_an_untrusted_servers_checkpoint_needs_neither(tmp_path):
    """It holds only what the clients released, so going back to it tells nothing new."""
    options = {"num_clients": 2, "clients_per_round": 2, "learning_rate": 0.1, "seed": 1}
    Mu2(**options, checkpoint=tmp_path / "checkpoint").start(Clients(policy(), SIZE), START, num_rounds=2)
    assert sorted(files(tmp_path)) == ["checkpoint"]


@pytest.mark.parametrize(("code", "advice"), [(errno.ENOSPC, "Make room on"), (errno.EACCES, "Let this user write")])
def test_a_disk_that_takes_nothing_leaves_the_checkpoint_before(monkeypatch, tmp_path, code, advice):
    path = tmp_path / "checkpoint.npz"
    save_checkpoint(path, {}, {"round": 1})

    def fails(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, {}, {"round": 2, "sums": np.zeros(1000)})
    for part in (str(path), os.strerror(code), advice, str(tmp_path)):
        assert part in str(caught.value)
    assert load_checkpoint(path, {})["round"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.npz"]


def test_a_checkpoint_is_saved_only_of_a_training_that_was_begun(tmp_path):
    with raises(CheckpointError, "wrong-order"):
        TrustedCheckpoint(tmp_path / "checkpoint", keeps_key=True).next_mark(1)
    assert CheckpointMark("a").following(1).saves == 1


def test_samples_that_return_are_refused_by_a_server_that_counts_them_once():
    with raises(ConfigurationError, "conflict", "sample_participations"):
        strategy("trusted-mu2", None, policy=policy("trusted-mu2", sample_participations=4, min_separation=5))


def test_noise_of_another_version_is_not_mixed_with_what_was_published(folder, monkeypatch):
    """The plan's fingerprint names the version of the noise: with another one, old rows would not be the same again."""
    plan = PrivacyPolicy.plan
    monkeypatch.setattr(PrivacyPolicy, "plan", lambda policy, size: replace(plan(policy, size), fingerprint="other"))
    refused(folder, "other noise")


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


@pytest.mark.few_cases(6)
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
    columns, clients = Columns(monkeypatch), Clients(policy(kind))
    deaths = Deaths(monkeypatch, [("seen", 4), ("seen", 18)])
    saved = []

    def build():
        if path.exists() and not saved:
            saved.append(path.read_bytes())  # a backup, after round 4
        elif saved:
            path.write_bytes(saved[0])
        return strategy(kind, path)

    if not planted:
        with raises(CheckpointError, "rolled-back"):
            run(build, clients, deaths)
        return
    resume = TrustedCheckpoint.resume

    def believing(files, found):
        files.marks.save(files.mark_path, CheckpointMark(**found))
        resume(files, found)

    monkeypatch.setattr(TrustedCheckpoint, "resume", believing)
    subject, restarts = run(build, clients, deaths)
    published = [(number, model) for number, model in dict.fromkeys(clients.seen) if number]
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
    ends, clients = [], [Clients(policy(kind), 7, empty=False) for _ in range(2)]
    for name, plan in (("whole", []), ("interrupted", deaths_in(7))):
        scripted_keys.clear()
        deaths.plan = list(plan)
        subject, restarts = run(
            lambda name=name: strategy(kind, tmp_path / name, session="s"), clients[len(ends)], deaths
        )
        ends.append(subject)
        assert restarts == len(plan)
        assert len(scripted_keys) == restarts + 1, "every start made a key; all but the first were put away"
    whole, resumed = ends
    assert resumed.history == whole.history
    assert resumed.acks == whole.acks
    for name, value in vars(whole.state).items():
        assert value.tobytes() == getattr(resumed.state, name).tobytes(), name
    assert dict.fromkeys(clients[0].seen) == dict.fromkeys(clients[1].seen), "and everything that was published"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", ["trusted-mu2", "reduced tree"])
@pytest.mark.parametrize("server_round", [0, 1, 3, 6])
@pytest.mark.parametrize("point", POINTS)
def test_a_dying_server_leaves_one_model_a_round(kind, server_round, point, monkeypatch, tmp_path):
    """Round 0 is the checkpoint before the first request."""
    deaths, clients = Deaths(monkeypatch, [(point, server_round)]), Clients(policy(kind), 7, empty=False)
    _, restarts = run(lambda: strategy(kind, tmp_path / "checkpoint"), clients, deaths, num_rounds=6)
    assert restarts == 1
    assert len(set(clients.sessions)) == 1
    models = defaultdict(set)
    for number, model in clients.seen:
        models[number].add(model)
    assert sorted(models) == list(range(7))
    assert all(len(versions) == 1 for versions in models.values())


def test_a_repeated_round_publishes_fresh_noise_only(monkeypatch, tmp_path):
    """The server dies between noise and checkpoint: nobody sees the noise of the first try."""
    columns, clients = Columns(monkeypatch), Clients(policy("tree"))
    deaths = Deaths(monkeypatch, [("noise drawn", 5)])
    run(lambda: strategy("tree", tmp_path / "checkpoint"), clients, deaths)
    assert len(columns.numbers) == ROUNDS + 1
    assert len(columns.of_model) == ROUNDS + 1, "two models of round 5 were made"
    published = {model for number, model in clients.seen if number}
    assert len(published) == ROUNDS


def test_exact_mu_knows_noise_that_is_missing(monkeypatch, tmp_path):
    """The tool itself is tested: without noise mu is infinite, and with half the noise it is twice the claim."""
    columns = Columns(monkeypatch)
    numbers, weights, subject = published_noise("tree", tmp_path / "c", columns, Deaths(monkeypatch))
    assert exact_mu("tree", subject, numbers, weights / 2) == pytest.approx(2 * CLAIM, rel=1e-3)
    assert math.isinf(exact_mu("tree", subject, numbers, weights * 0))
