"""What lies beside a trusted server's checkpoint, and every way in which it can be wrong."""

import json
import logging
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, SystemKeys
from murmurfl.strategies import CheckpointError, Mu2
from murmurfl.strategies.rounds.checkpoint import CheckpointMark, TrustedCheckpoint

from tests.harness.trusted_runs import Deaths, Killed, Machines, policy, strategy

SIZE = 3
START = ArrayRecord([np.zeros(SIZE)])
NAMES = ["checkpoint", "checkpoint.key", "checkpoint.mark"]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", True)


def train(folder, rounds, kind="tree", machines=None, **changes):
    subject = strategy(kind, folder / "checkpoint", **changes)
    machines = machines or Machines(subject.trust.policy, SIZE)
    subject.start(machines, START, num_rounds=rounds)
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
    before, machines = files(folder), Machines(policy(), SIZE)
    with pytest.raises(CheckpointError, match=match) as caught:
        train(folder, 6, machines=machines, **changes)
    assert not machines.seen
    assert files(folder) == before
    assert str(caught.value).startswith("Expected ")
    return str(caught.value)


def test_private_files_exist_before_the_first_request(tmp_path):
    class Looking(Machines):
        def answer(self, request):
            assert sorted(files(tmp_path / "made")) == NAMES
            assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "made").iterdir())
            yield from super().answer(request)

    subject = train(tmp_path / "made", 2, machines=Looking(policy(), SIZE))
    assert (tmp_path / "made" / "checkpoint.key").read_bytes() == subject.trust._keys.secret_key
    assert json.loads((tmp_path / "made" / "checkpoint.mark").read_text())["server_round"] == 2
    assert subject.trust._keys.secret_key not in (tmp_path / "made" / "checkpoint").read_bytes()


def test_a_training_goes_on_with_its_key_and_in_its_session(folder):
    key, subject = (folder / "checkpoint.key").read_bytes(), train(folder, 6)
    assert subject.trust._keys.secret_key == key
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
    said = refused(folder, "high-water mark of format 1 at .*, got one of format 2; it was left alone. Go on with the")
    assert "data that were never used before" in said
    assert "remove" not in said


@pytest.mark.parametrize("name", NAMES)
def test_files_that_others_can_read_are_refused(folder, name):
    (folder / name).chmod(0o640)
    refused(folder, "chmod 600")


def test_a_second_server_on_one_checkpoint_stops_before_it_publishes(folder):
    machines = Machines(policy(), SIZE)

    class Overtaken(Machines):
        def answer(self, request):
            if not machines.seen:
                train(folder, 6, machines=machines)
            yield from super().answer(request)

    slow = Overtaken(policy(), SIZE)
    with pytest.raises(CheckpointError, match="a second server"):
        train(folder, 6, machines=slow)
    assert {number for number, _ in slow.seen} == {4}, "what was published before"
    assert machines.seen[-1][0] == 5


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
    """It holds only what the machines released, so going back to it tells nothing new."""
    options = {"num_clients": 2, "clients_per_round": 2, "learning_rate": 0.1, "seed": 1}
    Mu2(**options, checkpoint=tmp_path / "checkpoint").start(Machines(policy(), SIZE), START, num_rounds=2)
    assert sorted(files(tmp_path)) == ["checkpoint"]


def test_a_checkpoint_is_saved_only_of_a_training_that_was_begun(tmp_path):
    with pytest.raises(CheckpointError, match="begun or resumed"):
        TrustedCheckpoint(tmp_path / "checkpoint", keeps_key=True).next_mark(1)
    assert CheckpointMark("a").following(1).saves == 1


def test_samples_that_return_are_refused_by_a_server_that_counts_them_once():
    with pytest.raises(ConfigurationError, match="sample that returns"):
        strategy("trusted-mu2", None, policy=policy("trusted-mu2", sample_participations=4, min_separation=5))


def test_noise_of_another_version_is_not_mixed_with_what_was_published(folder, monkeypatch):
    """The plan's fingerprint names the version of the noise: with another one, old rows would not be the same again."""
    plan = PrivacyPolicy.plan
    monkeypatch.setattr(PrivacyPolicy, "plan", lambda policy, size: replace(plan(policy, size), fingerprint="other"))
    refused(folder, "other noise")
