"""Ledgers copied back from a backup, marks that are lost, and what an operator may do about either.

Another noise key: what ends with the old one, what stays spent, and what a crash may leave.
"""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    RefusedError,
    SQLiteLedger,
    accept_rollback,
    any_data,
    new_mark,
    protocol,
    read_ledger,
    rotate_key,
    row_bytes,
)
from murmurfl.privacy.ledger import repair as rotation
from murmurfl.privacy.ledger import sqlite as ledger_page
from murmurfl.privacy.ledger.ledger_file import LEDGER_MARK
from murmurfl.privacy.ledger.sqlite import _larger
from murmurfl.privacy.ledger.store import StoreTransaction

from tests.harness.errors import raises
from tests.privacy.ledger.nodes import client, contribution, folder, run, stream_of, zero

pytestmark = pytest.mark.usefixtures("quick_disk")


def backup_and_go_on(path, releases=2, session="s"):
    saved = path.read_bytes()
    run(path, releases, session, first=1 if session == "new" else 3)
    return saved


def test_a_ledger_that_was_copied_back_releases_nothing(path):
    run(path, 2)
    running = client(SQLiteLedger(path))
    path.write_bytes(backup_and_go_on(path, 1))
    before = folder(path)
    for attempt in (lambda: SQLiteLedger(path), lambda: running.release("s", 3, zero), lambda: running.statement("s")):
        with raises(LedgerError, "rolled-back", match=r"copied back from a backup .*accept-rollback"):
            attempt()
    assert folder(path) == before
    assert "copied back" in read_ledger(path).mark_problem


def test_a_rollback_that_is_accepted_counts_as_spent_what_the_mark_knows(path):
    run(path, 2)
    saved = path.read_bytes()
    run(path, 3, first=3)
    run(path, 1, "new")
    path.write_bytes(saved)
    assert accept_rollback(path) == 2
    subject = client(SQLiteLedger(path))
    for session in ("s", "new"):
        with pytest.raises(RefusedError) as refusal:
            subject.release(session, 0, contribution)
        assert refusal.value.code == protocol.POLICY_CHANGED
    assert [(s.session, s.releases, s.closed) for s in read_ledger(path).sessions] == [("s", 5, True), ("new", 1, True)]
    assert read_ledger(path).spent.mu == pytest.approx(np.sqrt(2))
    seen = []
    subject.release("again", 0, lambda samples: seen.append(samples.start) or contribution(samples))
    assert seen[0] == 12, "twelve samples were used before the rollback"
    with raises(LedgerError, "wrong-order", match="which was not"):
        accept_rollback(path)


def test_after_a_rollback_no_copy_from_before_is_believed(path):
    """A copy that is older than the mark was must not pass for a ledger that is ahead of its mark."""
    copies = [path.read_bytes()]
    for k in range(1, 4):
        run(path, 1, first=k)
        copies.append(path.read_bytes())
    steps = LEDGER_MARK.load(Path(f"{path}.mark")).counter
    path.write_bytes(copies[1])
    accept_rollback(path)
    assert LEDGER_MARK.load(Path(f"{path}.mark")).counter == steps + 1
    for copy in copies:
        path.write_bytes(copy)
        with raises(LedgerError, "rolled-back"):
            SQLiteLedger(path)


@pytest.mark.parametrize("way", ["backup", "vacuum"])
def test_a_backup_made_while_the_node_runs_can_be_gone_on_with(path, tmp_path, way):
    run(path, 2)
    copy = tmp_path / "copy.db"
    with SQLiteLedger(path).exclusive(), closing(sqlite3.connect(path)) as connection:
        if way == "vacuum":
            connection.execute(f"VACUUM INTO '{copy}'")
        else:
            with closing(sqlite3.connect(copy)) as target:
                connection.backup(target)
    run(path, 1, first=3)
    copy.chmod(0o600)
    copy.replace(path)
    assert read_ledger(path).sessions[0].releases == 2
    assert accept_rollback(path) == 1
    assert read_ledger(path).samples_used == 6
    assert run(path, 1, "new")[0].release == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_two_histories_of_one_ledger_are_told_apart(path):
    """Copied back with its mark, gone on, and then the other one put in its place: as many commits, other contents."""
    run(path, 1)
    saved = folder(path)
    run(path, 1, "ours")
    ours = path.read_bytes()
    for name, content in saved.items():
        (path.parent / name).write_bytes(content)
    run(path, 1, "theirs")
    path.write_bytes(ours)
    with raises(LedgerError, "rolled-back", match="of another history"):
        SQLiteLedger(path)
    assert accept_rollback(path) == 3
    assert {session.session for session in read_ledger(path).sessions} == {"s", "ours", "theirs"}


def test_a_rollback_is_not_accepted_by_the_mark_of_another_ledger(path, tmp_path):
    run(path, 1)
    SQLiteLedger.create(tmp_path / "other.db", budget_mu=2.0, delta=1e-5)
    run(tmp_path / "other.db", 3)
    (tmp_path / "other.db.mark").replace(f"{path}.mark")
    before = path.read_bytes()
    with raises(LedgerError, "mismatch", "mark", match="got that of another ledger"):
        accept_rollback(path)
    assert path.read_bytes() == before


def test_of_two_histories_one_under_a_trusted_server_leaves_no_bound():
    pairs = ((-0.5, 1.0), (1.0, -0.5), (-1.0, 0.5), (0.5, -1.0), (0.5, 1.0))
    assert [_larger(*mus) for mus in pairs] == [-1.0, -1.0, -1.0, -1.0, 1.0]


def test_a_lost_mark_is_made_again_only_where_there_is_none(path):
    run(path, 2)
    with raises(LedgerError, "exists"):
        new_mark(path)
    Path(f"{path}.mark").unlink()
    with raises(LedgerError, "not-found", match="new-mark"):
        SQLiteLedger(path)
    with raises(LedgerError, "not-found", match="no file"):
        accept_rollback(path)
    new_mark(path)
    assert run(path, 1, first=3)[0].release == 3


def test_the_mark_may_live_elsewhere_and_is_found_again(tmp_path):
    (tmp_path / "other").mkdir()
    path, mark = tmp_path / "ledger.db", tmp_path / "other" / "mark"
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, mark=mark)
    run(path, 2)
    assert json.loads(mark.read_text())["counter"] == 2
    assert not Path(f"{path}.mark").exists()


def test_noise_is_never_repeated_even_after_a_rollback_nobody_can_detect(path):
    """Ledger and mark both copied back: the budget is spent twice, but a difference of the two shows no data."""
    run(path, 2)
    saved = folder(path)
    first = client(SQLiteLedger(path)).release("s", 2, zero)
    nonce = stream_of(path).nonces
    for name, content in saved.items():
        (path.parent / name).write_bytes(content)
    again = client(SQLiteLedger(path)).release("s", 2, zero)
    assert first.release == again.release == 3
    assert stream_of(path).nonces != nonce
    assert (first.values != again.values).all()


ROWS = row_bytes(range(200))


def rotated(path, **options):
    return rotate_key(path, ROWS, 200, **options)


def refusal_of(subject, session, ack=0):
    with pytest.raises(RefusedError) as refusal:
        subject.release(session, ack, contribution)
    return refusal.value.code


def test_a_new_key_forgets_nothing_that_was_spent(path):
    run(path, 3)
    run(path, 1, "other")
    before = read_ledger(path)
    assert rotated(path) == 2
    after = read_ledger(path)
    assert after.mark_problem == ""
    for name in ("spent", "samples_used", "budget", "delta", "left"):
        assert getattr(after, name) == getattr(before, name)
    assert [(s.session, s.loss.mu, s.releases, s.closed) for s in after.sessions] == [
        ("s", 1.0, 3, True),
        ("other", 1.0, 1, True),
    ]


def test_a_new_key_closes_sessions_and_opens_fresh_ones(path):
    run(path, 2)
    rotated(path)
    subject = client(SQLiteLedger(path))
    assert refusal_of(subject, "s", 2) == protocol.POLICY_CHANGED
    seen = []
    subject.release("next", 0, lambda samples: seen.append(samples.start) or contribution(samples))
    assert seen[0] == 4


def test_a_node_that_still_runs_with_the_old_key_releases_nothing_more(path):
    run(path, 1)
    running = client(SQLiteLedger(path))
    rotated(path)
    before = folder(path)
    with raises(LedgerError, "mismatch", match="restart the node"):
        running.release("s", 1, contribution)
    with raises(LedgerError, "mismatch", match="restart the node"):
        running.release("new", 0, contribution)
    assert folder(path) == before


def test_rotation_erases_old_key_nonces_and_sums(path):
    run(path, 2)
    key, stream = SQLiteLedger(path).keys().secret_key, stream_of(path)
    (pending,) = [values.tobytes() for release, values in stream.pending.items() if release == 2]
    secrets_of_it = [key, stream.nonces[-16:], pending]
    assert all(any(part in content for content in folder(path).values()) for part in secrets_of_it)
    rotated(path)
    assert not any(part in content for part in secrets_of_it for content in folder(path).values())
    assert SQLiteLedger(path).keys().secret_key != key


def test_new_key_makes_other_noise_for_the_same_nonce(path, monkeypatch):
    monkeypatch.setattr("murmurfl.privacy.noise.secrets.token_bytes", lambda size: b"n" * size)
    first = client(SQLiteLedger(path)).release("s", 0, zero)
    rotated(path)
    again = client(SQLiteLedger(path)).release("t", 0, zero)
    assert (first.values != again.values).all()


def test_rotation_compares_data_by_the_old_key(path):
    run(path, 2)
    before = folder(path)
    with raises(LedgerError, "mismatch", "data"):
        rotate_key(path, row_bytes(range(1, 201)), 200)
    with raises(LedgerError, "wrong-shape", "data", match="data of 3 rows"):
        rotate_key(path, ROWS, 3)
    with raises(LedgerError, "missing"):
        rotate_key(path, any_data, 200)
    assert folder(path) == before
    rotated(path)
    with raises(LedgerError, "mismatch", "data"):
        rotate_key(path, row_bytes(range(1, 201)), 200)
    assert run(path, 1, "next")[0].release == 1


def test_an_old_key_is_overwritten_on_the_disk_before_its_file_goes(tmp_path, monkeypatch):
    path, first, synced = tmp_path / "ledger.db", tmp_path / "first.key", []
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, key_file=first)
    length = len(first.read_bytes())

    def fsync(number):
        if first.exists() and os.path.samestat(os.fstat(number), first.stat()):
            synced.append(first.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    rotated(path, key_file=tmp_path / "second.key")
    assert synced == [bytes(length)]


def test_rotation_replaces_a_separate_key_file(tmp_path):
    path, first, second = (tmp_path / name for name in ("ledger.db", "first.key", "second.key"))
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, key_file=first)
    run(path, 1)
    with raises(ConfigurationError, "missing", "key-file"):
        rotated(path)
    with raises(LedgerError, "exists", match="got a file"):
        rotated(path, key_file=first)
    key = first.read_bytes()
    rotated(path, key_file=second)
    assert not first.exists()
    assert second.stat().st_mode & 0o777 == 0o600
    assert SQLiteLedger(path).keys().secret_key == second.read_bytes() != key
    assert key not in path.read_bytes()
    assert read_ledger(path).key_file == str(second)


def test_a_key_moves_out_of_the_ledger(path):
    run(path, 1)
    rotated(path, key_file=path.parent / "noise.key")
    assert (path.parent / "noise.key").read_bytes() not in path.read_bytes()
    assert run(path, 1, "next")[0].release == 1


def test_a_copy_from_before_is_refused_and_cannot_be_accepted(path):
    run(path, 2)
    saved = path.read_bytes()
    rotated(path)
    path.write_bytes(saved)
    with raises(LedgerError, "rolled-back"):
        SQLiteLedger(path)
    with raises(LedgerError, "mismatch", match="copy made after `murmurfl ledger rotate-key`"):
        accept_rollback(path)
    assert path.read_bytes()[:100] == saved[:100]


def test_a_copy_from_after_it_can_be_gone_on_with(path):
    run(path, 2)
    rotated(path)
    saved = path.read_bytes()
    run(path, 3, "next")
    path.write_bytes(saved)
    assert accept_rollback(path) == 2
    assert read_ledger(path).samples_used == 10
    assert run(path, 1, "last")[0].release == 1


def test_a_ledger_that_was_copied_back_gets_no_new_key(path):
    run(path, 1)
    saved = path.read_bytes()
    run(path, 1, first=2)
    path.write_bytes(saved)
    with raises(LedgerError, "rolled-back"):
        rotated(path)


@pytest.mark.parametrize("own_file", [False, True])
def test_a_crash_during_rotation_leaves_one_whole_key(path, monkeypatch, own_file):
    run(path, 2)
    options = {"key_file": path.parent / "noise.key"} if own_file else {}
    key = SQLiteLedger(path).keys().secret_key

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger_page, "write_key", crash)
        with pytest.raises(KeyboardInterrupt):
            rotated(path, **options)
    assert SQLiteLedger(path).keys().secret_key == key
    assert run(path, 1, first=3)[0].release == 3
    assert not (path.parent / "noise.key").exists()
    with monkeypatch.context() as patch:
        patch.setattr(StoreTransaction, "move_mark", crash)
        with pytest.raises(KeyboardInterrupt):
            rotated(path, **options)
    assert json.loads(Path(f"{path}.mark").read_text())["counter"] == 3  # behind, which is no rollback
    assert SQLiteLedger(path).keys().secret_key != key
    assert run(path, 1, "next")[0].release == 1
    assert read_ledger(path).mark_problem == ""


def test_a_mark_that_cannot_be_written_leaves_no_old_key_in_its_file(tmp_path, monkeypatch):
    path, old = tmp_path / "l.sqlite", tmp_path / "old.key"
    ledger = SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, key_file=old)
    key = ledger.keys().secret_key

    def full(*arguments):
        raise LedgerError("no room for the mark")

    with monkeypatch.context() as patch:
        patch.setattr(StoreTransaction, "move_mark", full)
        with raises(LedgerError, "damaged", match="no room"):
            rotated(path, key_file=tmp_path / "new.key")
    assert SQLiteLedger(path).keys().secret_key != key
    assert not old.exists(), "no later rotation would know of it"


def test_it_may_be_done_again_and_again(path):
    keys = set()
    for session in "abc":
        run(path, 1, session)
        keys.add(SQLiteLedger(path).keys().secret_key)
        rotated(path)
    assert len(keys) == 3
    assert read_ledger(path).samples_used == 6
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT rotations FROM ledger").fetchone() == (3,)


def test_a_session_that_was_kept_open_would_be_noticed(path, monkeypatch):
    """The bug: streams stay, so that their next release would take out a row that the new key never made."""
    run(path, 2)
    monkeypatch.setattr(ledger_page.SQLiteTransaction, "_close", lambda *_: None)
    rotated(path)
    assert not any(session.closed for session in read_ledger(path).sessions)
    assert refusal_of(client(SQLiteLedger(path)), "s", 2) == protocol.POLICY_CHANGED, "its fingerprint is the old key's"
    assert np.any(stream_of(path).pending[2]), "and what it sent was still there"


def test_nothing_is_left_of_the_old_key_only_because_it_is_overwritten(path, monkeypatch):
    run(path, 2)
    key = SQLiteLedger(path).keys().secret_key
    monkeypatch.setattr(rotation, "_forget", lambda *_: None)
    reader = sqlite3.connect(path)  # a process that keeps SQLite's log alive
    reader.execute("SELECT count(*) FROM state").fetchone()
    rotated(path)
    try:
        assert any(key in content for content in folder(path).values())
    finally:
        reader.close()


def test_samples_of_a_secret_order_stay_out_of_every_other_session(path):
    secret = {"batch_selection": "shuffled", "mechanism": "independent", "batch_size": 10}
    client(SQLiteLedger(path), **secret).release("s", 0, contribution)
    rotated(path)
    for order in (secret, {"batch_selection": "cyclic", "max_participations": 5}):
        subject = client(SQLiteLedger(path), **order)
        assert refusal_of(subject, "next") == protocol.SAMPLES_USED_UP
