"""A ledger of another format, or one whose number was edited, is refused and left alone, whatever opens it."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from murmurfl.privacy import (
    LedgerError,
    SQLiteLedger,
    accept_rollback,
    new_mark,
    read_ledger,
    rotate_key,
    row_bytes,
    set_local_budget,
)
from murmurfl.privacy.ledger.ledger_file import budget_left
from murmurfl.privacy.ledger.ledger_history import read_history

from tests.privacy.ledger.nodes import folder, run

pytestmark = pytest.mark.usefixtures("quick_disk")

OTHERS = (0, 1, 2, 5, 2**31 - 1)
READERS = (
    SQLiteLedger,
    read_ledger,
    read_history,
    accept_rollback,
    new_mark,
    lambda path: set_local_budget(path, 5.0),
    lambda path: rotate_key(path, row_bytes(range(200)), 200),
    lambda path: SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5),
)
# What a ledger had not yet when its format had another number.
EARLIER = {
    2: ("ALTER TABLE ledger DROP COLUMN budget_local_mu", "ALTER TABLE reserved DROP COLUMN local"),
    1: (
        "ALTER TABLE ledger DROP COLUMN budget_local_mu",
        "ALTER TABLE reserved DROP COLUMN local",
        "ALTER TABLE state DROP COLUMN data",
    ),
}


def changed(path, *statements):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def number(path, version):
    """Write another number of the format into the file, and nothing else."""
    with path.open("r+b") as file:
        file.seek(60)
        file.write(version.to_bytes(4))


def refusals(path, left=folder):
    """What everything that opens a ledger says to this one; nothing in its folder may change."""
    before, said = left(path), []
    for reader in READERS:
        with pytest.raises(LedgerError) as refused:
            reader(path)
        said.append(str(refused.value))
        assert left(path) == before
    return said[:-1]  # a new one is refused for the file that is there


@pytest.mark.parametrize("version", OTHERS)
def test_a_ledger_of_another_format_is_refused_with_the_two_ways_out(path, version):
    run(path, 3)
    number(path, version)
    for said in refusals(path):
        assert f"Expected a ledger of format 3 or 4 at {path}, got one of format {version}" in said
        assert "Go on with the version of murmurfl that wrote it" in said
        assert "data that were never used before" in said
        assert "ledger create" not in said


@pytest.mark.parametrize("version", OTHERS)
def test_what_a_crash_left_in_the_log_of_such_a_ledger_stays_there(path, version, tmp_path):
    """SQLite would write it into the file, for whoever opens that."""
    run(path, 1)
    (tmp_path / "copy").mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT * FROM state").fetchone()  # the log stays while somebody reads
        run(path, 1, "t")
        for file in path.parent.iterdir():
            if not file.name.endswith("-shm"):
                shutil.copy(file, tmp_path / "copy")
    copy = tmp_path / "copy" / path.name
    assert copy.with_name(f"{copy.name}-wal").stat().st_size
    number(copy, version)
    refusals(copy)


@pytest.mark.parametrize("version", EARLIER)
@pytest.mark.parametrize("edited", [3, 4])
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_an_earlier_layout_under_this_formats_number_is_refused(path, version, edited, journal):
    run(path, 3)
    changed(path, *EARLIER[version], f"PRAGMA journal_mode = {journal}", f"PRAGMA user_version = {edited}")
    assert all("damaged or no ledger" in said for said in refusals(path))


def test_a_ledger_under_the_number_of_one_whose_key_was_exchanged_is_refused(path):
    run(path, 3)
    number(path, 4)
    assert all("damaged or no ledger" in said for said in refusals(path))


def test_a_ledger_with_an_exchanged_key_is_refused(path):
    run(path, 3)
    rotate_key(path, row_bytes(range(200)), 200)
    assert read_ledger(path).mark_problem == ""
    number(path, 3)
    assert all("do not match their seal" in said for said in refusals(path)[:2])


@pytest.mark.parametrize("kept", [0, 50, 100, 4096, 8192, -4096, -5000])
def test_a_truncated_ledger_is_refused(path, kept):
    run(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    # SQLite leaves an empty log beside what it cannot read.
    refusals(path, lambda path: [file.read_bytes() for file in (path, path.with_name("ledger.db.mark"))])


@pytest.mark.parametrize("version", [0, 2, '"1"', "null"])
def test_a_mark_of_another_format_is_refused_and_says_nothing_of_making_another(path, version):
    run(path, 3)
    mark = path.with_name("ledger.db.mark")
    text = mark.read_text()
    mark.write_text(text.replace('"murmurfl-ledger-mark": 1', f'"murmurfl-ledger-mark": {version}'))
    before = folder(path)
    assert mark.read_text() != text
    readers = (SQLiteLedger, accept_rollback, lambda path: set_local_budget(path, 5.0), lambda _: budget_left(mark))
    for reader in readers:
        with pytest.raises(
            LedgerError, match=r"high-water mark of format 1 at .* data that were never used"
        ) as refused:
            reader(path)
        assert "new-mark" not in str(refused.value)
    assert "format 1" in read_ledger(path).mark_problem
    with pytest.raises(LedgerError, match="got one; it was left alone"):
        new_mark(path)
    assert folder(path) == before
    path.unlink()
    with pytest.raises(LedgerError, match="high-water mark of format 1"):
        SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5)
    assert {name: content for name, content in before.items() if name != path.name} == folder(path)


def test_a_copy_without_a_log_gets_one_again_once_it_is_believed(path):
    run(path, 3)
    changed(path, "PRAGMA journal_mode = DELETE")
    assert path.read_bytes()[18:20] == b"\1\1"
    assert SQLiteLedger(path).budget_mu == 2.0
    assert path.read_bytes()[18:20] == b"\2\2"
    changed(path, "PRAGMA journal_mode = DELETE", "UPDATE state SET samples_used = 0")
    refusals(path)


def test_ledgers_with_first_and_rotated_keys_continue(path):
    assert run(path, 2)[-1].release == 2
    rotate_key(path, row_bytes(range(200)), 200)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert [release.release for release in run(path, 2, "t")] == [1, 2]
