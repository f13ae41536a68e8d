"""The ledger on disk: what was committed is what is read, whatever dies, and nothing it cannot believe is used."""

import math
import os
import shutil
import sqlite3
import stat
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import (
    Account,
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    StreamRecord,
    files,
    protocol,
    read_ledger,
)
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.ledger import sqlite as ledger_page
from murmurfl.privacy.ledger import store

from tests.harness.errors import raises
from tests.privacy.ledger.nodes import DATA, client, contribution, folder, fork, run, stream_of

AWKWARD = (
    np.array([[-0.0, np.nan, np.inf], [5e-324, -np.inf, 1.0]]),
    np.array([0x7FF8DEADBEEF0001], dtype=np.int64).view(np.float64),
    np.array([-0.0, 1e-45, 3.4e38], dtype=np.float32),
    np.arange(6.0, dtype=">f8")[::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.float64(2.5).reshape(()),
    np.zeros((0, 3), dtype=np.float32),
)

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_a_stream_and_an_account_come_back_to_the_last_bit(path):
    limits = np.iinfo(np.int64)
    pending = {3: np.array([limits.min, -1, 0, limits.max]), 10: np.arange(4)}
    stream = StreamRecord("f" * 64, 10, 2, bytes(range(160)), pending, AWKWARD, '{"clip_norm": 1.0}')
    account = Account(17, {"s": 0.1 + 0.2, "other": np.inf, "a": 5e-324})
    with SQLiteLedger(path).exclusive() as page:
        page.commit("s", stream, account)
    with SQLiteLedger(path).exclusive() as page:
        ours = page.stream("s")
        assert page.account() == account
        assert list(page.account().reserved) == list(account.reserved)
        assert page.stream("other") is None
    assert replace(ours, pending={}, noise_state=()) == replace(stream, pending={}, noise_state=())
    assert list(ours.pending) == [3, 10]
    for mine, theirs in zip([*ours.pending.values(), *ours.noise_state], [*pending.values(), *AWKWARD], strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    "options", [{"mechanism": "cancelling"}, {"mechanism": "blt"}, {"mechanism": "tree"}], ids=lambda o: o["mechanism"]
)
def test_releases_are_those_of_the_ledger_in_memory_to_the_last_bit(path, options):
    """A new process for every release, with losses."""
    keys, ack = SimulatedKeys(1, "m"), 0
    memory = client(MemoryLedger(), keys, **options)
    for k in range(1, 10):
        ours = client(SQLiteLedger(path), keys, **options).release("s", ack, contribution)
        theirs = memory.release("s", ack, contribution)
        assert (ours.release, ours.ack) == (theirs.release, theirs.ack) == (k, ack)
        assert ours.values.tobytes() == theirs.values.tobytes()
        ack = ack if k in (3, 4, 8) else k


def test_a_real_client_takes_its_key_from_the_ledger_and_the_ledger_lasts(path):
    assert SQLiteLedger.durable
    assert not SQLiteLedger(path).keys().simulated
    assert SQLiteLedger(path).keys() == SQLiteLedger(path).keys()
    assert [release.release for release in run(path, 3)] == [1, 2, 3]


def test_without_a_commit_nothing_changes(path):
    run(path, 1)
    before = folder(path)
    with pytest.raises(RefusedError):
        client(SQLiteLedger(path)).release("s", 5, contribution)
    with pytest.raises(ZeroDivisionError), SQLiteLedger(path).exclusive():
        raise ZeroDivisionError
    assert folder(path) == before


def test_a_ledger_that_is_exchanged_while_its_node_runs_is_refused(path, tmp_path):
    subject = client(SQLiteLedger(path))
    subject.release("s", 0, contribution)
    SQLiteLedger.create(tmp_path / "other.db", budget_mu=2.0, delta=1e-5)
    for name in ("", ".mark"):
        (tmp_path / f"other.db{name}").replace(f"{path}{name}")
    before = folder(path)
    with raises(LedgerError, "mismatch", match="the ledger this node began with"):
        subject.release("t", 0, contribution)
    assert folder(path) == before


@pytest.mark.parametrize("step", ["digest_of", "unsealed_state"])
def test_a_commit_is_all_or_nothing(path, monkeypatch, step):
    run(path, 1)
    before, ledger = folder(path), SQLiteLedger(path)
    subject = client(ledger)

    def fails(*arguments):
        raise OSError(5, "disk on fire")

    with ledger.exclusive() as page:
        stream, account = page.stream("s"), page.account()
        monkeypatch.setattr(ledger_page, step, fails)
        with raises(LedgerError, "unreadable", match="disk on fire"):
            page.commit("s", replace(stream, release=2), Account(4, account.reserved))
    monkeypatch.undo()
    assert folder(path) == before
    assert subject.statement("s").releases == 1


def test_a_ledger_never_goes_backwards(path):
    run(path, 2)
    with SQLiteLedger(path).exclusive() as page:
        stream, account = page.stream("s"), page.account()
        for past in (
            (replace(stream, release=1), account),
            (stream, replace(account, samples_used=2)),
            (stream, replace(account, reserved={})),
            (stream, replace(account, reserved={"s": 0.5})),
        ):
            with raises(LedgerError, "mismatch", match="forgets nothing"):
                page.commit("s", *past)
    assert client(SQLiteLedger(path)).statement("s").releases == 2


def test_a_ledger_never_forgets_that_a_session_was_under_a_trusted_server(tmp_path):
    SQLiteLedger.create(tmp_path / "second", budget_mu=4.0, delta=1e-5)
    ledger = SQLiteLedger(tmp_path / "second")
    with ledger.exclusive() as page:
        page.commit("s", StreamRecord("f", release=1), Account(2).reserve("s", Loss.of(1.0), trusted=True))
        for reserved in ({"s": 1.0}, {"s": 3.0}, {"s": -0.5}, {}):
            with raises(LedgerError, "mismatch", match="forgets nothing"):
                page.commit("s", StreamRecord("f", release=2), Account(4, reserved))
        page.commit("s", StreamRecord("f", release=2), Account(4, {"s": -1.0}))
    with SQLiteLedger(tmp_path / "second").exclusive() as page:
        assert page.account().unbounded
        assert page.account().spent.mu == 1.0


@pytest.mark.parametrize(("mu", "bounded"), [(0.0, True), (1e-9, True), (-1e-9, False), (math.inf, False)])
def test_an_account_is_bounded_where_each_of_its_sessions_is(mu, bounded):
    account = Account(2, {"a": 1.0, "s": mu})
    assert account.unbounded is not bounded
    assert account.bound_of("s") == (mu if bounded else math.inf)


def test_everything_the_ledger_makes_is_for_its_owner_alone(path, tmp_path):
    run(path, 1)
    with SQLiteLedger(path).exclusive() as page:
        stream = page.stream("s")
        page.commit("s", replace(stream, release=2), Account(4, page.account().reserved))
        names = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert names == dict.fromkeys(["ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.mark"], 0o600)
    assert sorted(folder(path)) == ["ledger.db", "ledger.db.mark"], "one file to back up"


def test_the_ledger_does_not_grow_with_what_was_acknowledged(path):
    run(path, 2)
    before = path.stat().st_size
    run(path, 15, first=3)
    assert path.stat().st_size == before
    assert len(read_ledger(path).sessions) == 1


def spoiled(kind, path):
    """Make an existing ledger into something that must be refused."""
    if kind == "missing":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "readable by others":
        path.chmod(0o640)
    elif kind == "read-only":
        path.chmod(0o400)
    elif kind == "not SQLite":
        path.write_bytes(b"my thesis" * 1000)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-4096])
    elif kind == "mark missing":
        Path(f"{path}.mark").unlink()
    elif kind == "mark damaged":
        mark = Path(f"{path}.mark")
        mark.write_text(mark.read_text().replace('"counter": 3', '"counter": 2'))
    elif kind == "mark garbage":
        Path(f"{path}.mark").write_bytes(b"\xff\x00")
    elif kind == "mark open to others":
        Path(f"{path}.mark").chmod(0o666)
    elif kind == "mark of another ledger":
        SQLiteLedger.create(f"{path}2", budget_mu=1.0, delta=1e-5)
        Path(f"{path}2.mark").replace(f"{path}.mark")
    else:
        statement = {
            "foreign": "PRAGMA application_id = 7",
            "older": "PRAGMA user_version = 2",
            "newer": "PRAGMA user_version = 5",
            "data": "UPDATE state SET data = '00'",
            "samples": "UPDATE state SET samples_used = 2",
            "budget": "UPDATE ledger SET budget_mu = 9",
            "reserved": "DELETE FROM reserved",
            "stream": "UPDATE streams SET release = 1",
            "no header": "DELETE FROM ledger",
            "no table": "DROP TABLE state",
        }[kind]
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(statement)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "got no file. A node that had one must get it back"),
        ("folder", "something that is no file"),
        ("readable by others", "chmod 600"),
        ("read-only", "read-only"),
        ("not SQLite", "damaged or no ledger"),
        ("empty", "got another file"),
        ("truncated", "damaged"),
        ("foreign", "got another file"),
        ("older", "of format 3 or 4 at .*, got one of format 2"),
        ("newer", "of format 3 or 4 at .*, got one of format 5"),
        ("samples", "do not match their seal"),
        ("data", "do not match their seal"),
        ("budget", "do not match their seal"),
        ("reserved", "do not match their seal"),
        ("stream", "do not match their seal"),
        ("no header", "damaged"),
        ("no table", "damaged"),
        ("mark missing", "high-water mark at .* got no file"),
        ("mark damaged", "seal does not match"),
        ("mark garbage", "damaged or something else"),
        ("mark open to others", "chmod 600"),
        ("mark of another ledger", "that of another ledger"),
    ],
)
def test_what_cannot_be_believed_is_refused_and_left_alone(path, kind, message):
    run(path, 3)
    running = client(SQLiteLedger(path))
    spoiled(kind, path)
    files = [file for file in (path, Path(f"{path}.mark")) if file.is_file()]
    before = [file.read_bytes() for file in files]
    with pytest.raises(LedgerError, match=message):
        SQLiteLedger(path)
    with pytest.raises(LedgerError):
        running.release("s", 3, contribution)
    assert [file.read_bytes() for file in files] == before


def test_only_its_owner_writes_a_ledger(path, monkeypatch):
    """Root would leave a mark that the node cannot read."""
    run(path, 1)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with raises(LedgerError, "insecure", match=f"belongs to user {uid}"):
        SQLiteLedger(path)
    assert read_ledger(path).commits == 1


def test_a_full_disk_or_a_lost_folder_releases_nothing(path, monkeypatch):
    subject = client(SQLiteLedger(path))
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
        for _ in range(3):
            with raises(LedgerError, "failed", match="No space left"):
                subject.release("s", 0, contribution)
    assert subject.statement("s").releases == 1, "one is committed and not sent, and no other wasted"
    assert subject.release("s", 0, contribution).release == 2
    shutil.rmtree(path.parent)
    with raises(LedgerError, "not-found", match="no file"):
        subject.release("s", 0, contribution)
    assert not path.parent.exists()


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing_that_counts(path):
    run(path, 3)

    def known(ledger):
        with ledger.exclusive() as page:
            stream = page.stream("s")
            arrays = [counts.tobytes() for counts in stream.pending.values()]
            return page.account(), replace(stream, pending={}), arrays, ledger.keys(), ledger.budget_mu

    whole, expected, refused = path.read_bytes(), known(SQLiteLedger(path)), 0
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    for position in used[:: len(used) // 60]:
        spoilt = bytearray(whole)
        spoilt[position] ^= 16
        path.write_bytes(spoilt)
        try:
            assert known(SQLiteLedger(path)) == expected
        except LedgerError:
            refused += 1
    assert refused > 20


def test_making_a_ledger_overwrites_nothing(path, tmp_path):
    run(path, 1)
    before = folder(path)
    with raises(LedgerError, "exists"):
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    assert folder(path) == before
    with raises(LedgerError, "not-found", match="Expected a folder"):
        SQLiteLedger.create(tmp_path / "nowhere" / "ledger.db", budget_mu=2.0, delta=1e-5)
    path.unlink()
    with raises(LedgerError, "exists", match="this node had a ledger"):
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    assert list(folder(path)) == ["ledger.db.mark"]


@pytest.mark.parametrize(
    "changes", [{"budget_mu": 0.0}, {"budget_mu": np.inf}, {"budget_mu": np.nan}, {"delta": 0.0}, {"mark": "ledger.db"}]
)
def test_an_impossible_ledger_is_not_made(tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError):
        SQLiteLedger.create("ledger.db", **{"budget_mu": 1.0, "delta": 1e-5, **changes})
    assert not list(tmp_path.iterdir())


def test_the_key_may_live_in_a_file_of_its_own(tmp_path):
    path, key_file = tmp_path / "ledger.db", tmp_path / "key"
    ledger = SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, key_file=key_file)
    assert ledger.keys().secret_key == key_file.read_bytes()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert key_file.read_bytes() not in path.read_bytes()
    run(path, 1)
    key = key_file.read_bytes()
    for spoil, message in (
        (lambda: key_file.chmod(0o644), "chmod 600"),
        (lambda: key_file.write_bytes(os.urandom(32)), "got another or a damaged one"),
        (lambda: key_file.write_bytes(key[:16]), "got another or a damaged one"),
        (key_file.unlink, "the noise key at .* got no file"),
    ):
        spoil()
        with pytest.raises(LedgerError, match=message):
            ledger.keys()
        key_file.write_bytes(key)
        key_file.chmod(0o600)
    assert ledger.keys().secret_key == key
    with raises(LedgerError, "exists", match="a noise key is to be made"):
        SQLiteLedger.create(tmp_path / "second.db", budget_mu=2.0, delta=1e-5, key_file=key_file)
    assert not (tmp_path / "second.db").exists()
    assert key_file.read_bytes() == key


@pytest.mark.parametrize("changes", [{"budget_mu": 2.5}, {"delta": 1e-6}])
def test_a_client_and_its_ledger_must_agree_on_the_budget(path, changes):
    with pytest.raises(ConfigurationError, match="with which the ledger was made"):
        client(SQLiteLedger(path), **changes)


def test_the_budget_is_shared_by_all_sessions_and_all_restarts(path):
    for session in "abcd":  # four times mu = 1 is 2
        client(SQLiteLedger(path)).release(session, 0, contribution)
    with pytest.raises(RefusedError) as refusal:
        client(SQLiteLedger(path)).release("e", 0, contribution)
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED
    assert read_ledger(path).left.mu == 0.0


def test_an_unknown_acknowledgement_is_refused_with_a_hint(path, caplog):
    run(path, 2)
    saved = folder(path)
    run(path, 1, first=3)
    for name, content in saved.items():
        (path.parent / name).write_bytes(content)
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="rolled back") as refusal:
        client(SQLiteLedger(path)).release("s", 3, contribution)
    assert refusal.value.code == protocol.BAD_ACKNOWLEDGEMENT
    assert "copied back" in caplog.text
    assert read_ledger(path).commits == 2


def test_two_processes_never_spend_the_same_twice(path, tmp_path, real_disk):
    def spend(number):
        subject = client(SQLiteLedger(path))
        with (tmp_path / f"spent-{number}").open("w") as log:
            asked = []

            def contribution(samples):
                asked.append(samples.start)
                return DATA[samples]

            for k in range(6):
                for session in (f"{number}x", f"{number}y", f"{number}z"):
                    try:
                        subject.release(session, k, contribution)
                    except RefusedError as refusal:
                        print("refused", refusal.code, file=log, flush=True)
                    else:  # what was computed last is what was released; before it the other process may have come
                        print("used", asked[-2], "\nused", asked[-1], file=log, flush=True)

    children = [fork.Process(target=spend, args=(number,)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    lines = [line.split() for n in range(2) for line in (tmp_path / f"spent-{n}").read_text().splitlines()]
    used = sorted(int(number) for what, number in lines if what == "used")
    # A real client asks for every sample by itself.
    assert used == list(range(48)), "four sessions of six releases of two samples, each sample once"
    assert lines.count(["refused", str(protocol.BUDGET_EXHAUSTED)]) == 12
    assert len(read_ledger(path).sessions) == 4, "six were asked for, the budget allows four"
    assert read_ledger(path).spent.mu <= 2.0


def test_a_ledger_is_free_while_a_gradient_is_computed(path):
    def long(samples):
        with SQLiteLedger(path, timeout_s=0.0).exclusive() as page:
            assert page.stream("s") is None
        return DATA[samples]

    assert client(SQLiteLedger(path, timeout_s=0.0)).release("s", 0, long).release == 1


@pytest.mark.parametrize("session", ["s", "other"])
def test_who_is_overtaken_while_computing_uses_the_next_samples(path, session):
    """Another process releases in the middle: of another session, or of this one, where k moves on as well."""
    asked, fast, slow = [], client(SQLiteLedger(path)), client(SQLiteLedger(path))

    def overtaken(samples):
        if not asked:
            fast.release(session, 0, contribution)
        asked.append(samples.start)
        return DATA[samples]

    release = slow.release("s", 0, overtaken)
    assert asked == [0, 1, 2, 3]
    assert release.release == (2 if session == "s" else 1)
    assert read_ledger(path).samples_used == 4
    both, alone = (stream_of(path, name).pending for name in ("s", session))
    plan = slow.plan
    if session == "s":  # the sum carries the first release along, once
        assert set(both) == {1, 2}
    else:
        assert set(both) == set(alone) == {1}
    assert np.array_equal(plan.grid.values(both[release.release]), release.values)


def test_a_request_that_is_refused_after_its_gradient_was_computed_spends_nothing(path):
    fast, slow = client(SQLiteLedger(path), mu=2.0), client(SQLiteLedger(path), mu=2.0)

    def overtaken(samples):
        if read_ledger(path).samples_used == 0:
            fast.release("first", 0, contribution)
        return DATA[samples]

    with pytest.raises(RefusedError) as refusal:
        slow.release("second", 0, overtaken)
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED
    assert [session.session for session in read_ledger(path).sessions] == ["first"]
    assert read_ledger(path).samples_used == 2


def test_a_ledger_in_use_is_waited_for_and_then_refused(path):
    waiting, holding = threading.Event(), threading.Event()

    def hold():
        with SQLiteLedger(path).exclusive():
            holding.set()
            waiting.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(10)
    start = time.monotonic()
    with raises(LedgerError, "busy", match="another process is using this ledger"):
        client(SQLiteLedger(path, timeout_s=0.2)).release("s", 0, contribution)
    assert 0.15 < time.monotonic() - start < 5
    threading.Timer(0.1, waiting.set).start()
    assert client(SQLiteLedger(path)).release("s", 0, contribution).release == 1
    holder.join()


def test_showing_a_ledger_alters_nothing_and_is_consistent_while_its_node_writes(path):
    run(path, 1)
    before = folder(path)
    assert read_ledger(path).sessions[0].releases == 1
    assert folder(path) == before
    node = fork.Process(target=run, args=(path, 15, "s", 2))
    node.start()
    while node.is_alive():
        summary = read_ledger(path)
        assert summary.samples_used == 2 * summary.sessions[0].releases == 2 * summary.commits
        assert not summary.mark_problem
    assert read_ledger(path).sessions[0].releases == 16


def test_a_reply_leaves_only_after_commit_and_mark_are_on_the_disk(path, monkeypatch, real_disk):
    """Which calls were made, in order: the disk itself cannot be asked."""
    calls, real_connect, real_replace, real_fsync = [], store.connect, Path.replace, os.fsync

    def connect(*arguments):
        connection = real_connect(*arguments)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        connection.set_trace_callback(lambda statement: calls.append(statement) if statement == "COMMIT" else None)
        return connection

    subject = client(SQLiteLedger(path))
    monkeypatch.setattr(store, "connect", connect)
    monkeypatch.setattr(Path, "replace", lambda *paths: calls.append("rename") or real_replace(*paths))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or real_fsync(descriptor))
    subject.release("s", 0, contribution)
    assert calls == ["COMMIT", "fsync", "rename", "fsync"]
