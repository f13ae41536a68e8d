"""Ledgers copied back from a backup, marks that are lost, and what an operator may do about either."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import LedgerError, RefusedError, SQLiteLedger, accept_rollback, new_mark, protocol, read_ledger
from murmurfl.privacy.ledger.sqlite import _larger

from tests.privacy.ledger.nodes import contribution, folder, machine, run, stream_of, zero

pytestmark = pytest.mark.usefixtures("quick_disk")


def backup_and_go_on(path, releases=2, session="s"):
    saved = path.read_bytes()
    run(path, releases, session, first=1 if session == "new" else 3)
    return saved


def test_a_ledger_that_was_copied_back_releases_nothing(path):
    run(path, 2)
    running = machine(SQLiteLedger(path))
    path.write_bytes(backup_and_go_on(path, 1))
    before = folder(path)
    for attempt in (lambda: SQLiteLedger(path), lambda: running.release("s", 3, zero), lambda: running.statement("s")):
        with pytest.raises(LedgerError, match=r"copied back from a backup .*accept-rollback"):
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
    subject = machine(SQLiteLedger(path))
    for session in ("s", "new"):
        with pytest.raises(RefusedError) as refusal:
            subject.release(session, 0, contribution)
        assert refusal.value.code == protocol.POLICY_CHANGED
    assert [(s.session, s.releases, s.closed) for s in read_ledger(path).sessions] == [("s", 5, True), ("new", 1, True)]
    assert read_ledger(path).reserved_mu == pytest.approx(np.sqrt(2))
    seen = []
    subject.release("again", 0, lambda samples: seen.append(samples.start) or contribution(samples))
    assert seen[0] == 12, "twelve samples were used before the rollback"
    with pytest.raises(LedgerError, match="which was not"):
        accept_rollback(path)


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
    with pytest.raises(LedgerError, match="of another history"):
        SQLiteLedger(path)
    assert accept_rollback(path) == 3
    assert {session.session for session in read_ledger(path).sessions} == {"s", "ours", "theirs"}


def test_a_rollback_is_not_accepted_by_the_mark_of_another_ledger(path, tmp_path):
    run(path, 1)
    SQLiteLedger.create(tmp_path / "other.db", budget_mu=2.0, delta=1e-5)
    run(tmp_path / "other.db", 3)
    (tmp_path / "other.db.mark").replace(f"{path}.mark")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="got that of another ledger"):
        accept_rollback(path)
    assert path.read_bytes() == before


def test_of_two_histories_one_under_a_trusted_server_leaves_no_bound():
    assert [_larger(*mus) for mus in ((-0.5, 1.0), (1.0, -0.5), (-1.0, 0.5), (0.5, 1.0))] == [-1.0, -1.0, -1.0, 1.0]


def test_a_lost_mark_is_made_again_only_where_there_is_none(path):
    run(path, 2)
    with pytest.raises(LedgerError, match="left alone"):
        new_mark(path)
    Path(f"{path}.mark").unlink()
    with pytest.raises(LedgerError, match="new-mark"):
        SQLiteLedger(path)
    with pytest.raises(LedgerError, match="no file"):
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
    first = machine(SQLiteLedger(path)).release("s", 2, zero)
    nonce = stream_of(path).nonces
    for name, content in saved.items():
        (path.parent / name).write_bytes(content)
    again = machine(SQLiteLedger(path)).release("s", 2, zero)
    assert first.release == again.release == 3
    assert stream_of(path).nonces != nonce
    assert (first.values != again.values).all()
