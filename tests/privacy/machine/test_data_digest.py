"""The ledger knows its data: rows used up must be the same rows at every start, in the same session and the next."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    PrivacyPolicy,
    PrivateMachine,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    SystemKeys,
    accept_rollback,
    any_data,
    read_ledger,
    row_bytes,
)
from murmurfl.privacy.machine.known_samples import DataDigest

pytestmark = pytest.mark.usefixtures("quick_disk")

D, ROWS = 3, 40
DATA = np.arange(2.0 * ROWS).reshape(ROWS, 2)


@pytest.fixture
def path(tmp_path):
    SQLiteLedger.create(tmp_path / "ledger", budget_mu=3.0, delta=1e-5)
    return tmp_path / "ledger"


def start(path, data=DATA, known=None, **changes):
    """A machine as after a start of its node."""
    settings = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 4, "mu": 1.0, "budget_mu": 3.0, **changes}
    ledger = SQLiteLedger(path)
    known = row_bytes(data) if known is None else known
    return PrivateMachine(PrivacyPolicy(**settings), D, len(data), ledger, ledger.keys(), data=known)


def release(machine, session="s", times=1):
    for _ in range(times):
        machine.release(session, machine.statement(session).releases, lambda samples: np.ones((1, D)))


def changed(rows, value=-1.0):
    data = DATA.copy()
    data[rows] = value
    return data


@pytest.mark.parametrize("session", ["s", "another"])
@pytest.mark.parametrize(
    "data",
    [
        changed(0),
        changed(3),
        DATA[::-1],
        np.roll(DATA, 1, axis=0),
        DATA[[1, 0, *range(2, ROWS)]],
        DATA.astype(np.float32),
        DATA[:, :1],
        DATA + 1e-12,
    ],
    ids=["first", "last used", "reversed", "moved by one", "two exchanged", "narrower", "fewer columns", "a little"],
)
def test_used_rows_that_changed_or_moved_are_refused_with_the_way_out(path, data, session):
    release(start(path), times=2)
    before = read_ledger(path)
    with pytest.raises(LedgerError, match="Put the data back") as refused:
        release(start(path, data), session)
    assert "4 rows" in str(refused.value)
    assert "ledger create" in str(refused.value)
    assert read_ledger(path) == before, "nothing was spent"
    release(start(path), session)  # put back, it goes on


def test_rows_that_are_not_used_yet_may_change_and_new_ones_may_come(path):
    release(start(path), times=2)
    release(start(path, changed(slice(4, ROWS))), times=1)
    with pytest.raises(LedgerError, match="6 rows"):
        release(start(path))  # rows 4 and 5 were used as they were then
    grown = np.concatenate([changed(slice(4, ROWS)), DATA])
    release(start(path, grown), times=1)


def test_data_with_fewer_rows_than_were_used_are_refused(path):
    release(start(path), times=4)
    with pytest.raises(LedgerError, match=r"8 rows .* got data of 6 rows"):
        release(start(path, DATA[:6], max_participations=3), "another")


def test_a_machine_notices_what_another_process_used_from_other_data(path):
    """Two processes on one ledger, one of them with a rewritten file: the other refuses from then on."""
    ours, theirs = start(path), start(path, changed(slice(2, 4)))
    release(ours)
    release(theirs)
    with pytest.raises(LedgerError, match="4 rows"):
        release(ours)


def test_samples_that_return_are_known_as_well(path):
    passes = {"sample_participations": 2, "min_separation": 2, "max_participations": 4}
    release(start(path, **passes), times=3)
    with pytest.raises(LedgerError, match="Put the data back"):
        release(start(path, changed(3), **passes))
    release(start(path, changed(4), **passes))


def test_a_used_row_is_hashed_once(path):
    seen = []

    def counted(data):
        known = row_bytes(data)
        return lambda row: seen.append(row) or known(row)

    ledger = SQLiteLedger(path)
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=4, mu=1.0, budget_mu=3.0)
    machine = PrivateMachine(policy, D, ROWS, ledger, ledger.keys(), data=counted(DATA))
    release(machine, times=4)
    assert seen == [0, *range(8)], "the first one is looked at when the machine is made"
    seen.clear()
    again = PrivateMachine(policy, D, ROWS, ledger, ledger.keys(), data=counted(DATA))
    again.check_data()
    release(again, "t", times=2)
    assert seen == [0, *range(12)]


def test_the_digest_of_rows_is_the_one_it_was():
    """Another one would make every ledger refuse the data that it was used with."""
    digest = DataDigest(bytes(32), row_bytes(DATA))
    assert [digest.of(0), digest.of(2)] == ["", "b3a1fc4a234d1fcfa5ae7ac5ff098c0c"]


def test_the_digest_is_keyed_and_nothing_of_the_data_is_in_the_ledger(path):
    release(start(path))
    with closing(sqlite3.connect(path)) as connection:
        ((digest,),) = connection.execute("SELECT data FROM state").fetchall()
    keys = SQLiteLedger(path).keys()
    assert DataDigest(keys.secret_key, row_bytes(DATA)).of(2) == digest
    assert DataDigest(bytes(32), row_bytes(DATA)).of(2) != digest
    assert json.loads((path.parent / "ledger.mark").read_text())["data"] == digest


def test_a_row_that_cannot_be_read_is_known_as_such_and_raises_nothing(path):
    class Failing:
        def __init__(self, bad):
            self.bad = bad

        def __len__(self):
            return ROWS

        def __getitem__(self, rows):
            if rows.start == self.bad:
                raise OSError("bad sector with private words")
            return DATA[rows]

    release(start(path, Failing(1)), times=2)
    release(start(path, Failing(1)))
    with pytest.raises(LedgerError, match="Put the data back"):
        release(start(path))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(1), np.zeros(1, np.int64)),
        (("ab", "c"), ("a", "bc")),
        ((1, "1"), ("1", 1)),
        ([b"x", None], [b"x"]),
        ({"a": 1.0}, {"a": 2.0}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ((np.ones(2), [np.zeros(1)]), (np.ones(2), np.zeros(1))),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (0.0, -0.0),
    ],
)
def test_different_rows_are_known_by_different_bytes(one, other):
    known, different = (row_bytes(_Row(value))(0) for value in (one, other))
    assert known != different
    assert known == row_bytes(_Row(one))(0)


class _Row:
    def __init__(self, value):
        self.value = value

    def __getitem__(self, rows):
        return self.value


def test_torch_tensors_are_known_by_their_values():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    assert row_bytes(_Row(tensor))(0) == row_bytes(_Row(np.ones(2, np.float32)))(0)


def test_only_a_real_machine_needs_its_rows_digest(path):
    policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=4, mu=1.0, budget_mu=3.0)
    ledger = SQLiteLedger(path)
    with pytest.raises(ConfigurationError, match="row_bytes"):
        PrivateMachine(policy, D, ROWS, ledger, SystemKeys(bytes(32)))
    simulated = PrivateMachine(policy, D, ROWS, ledger, SimulatedKeys(1, "a"), data=None)
    simulated.release("s", 0, lambda samples: np.ones((2, D)))
    assert simulated.statement("s").releases == 1


def test_a_rollback_that_is_accepted_keeps_the_digest_of_what_was_used(path):
    release(start(path), times=1)
    backup = path.read_bytes()
    release(start(path), times=2)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(backup)
    accept_rollback(path)
    with pytest.raises(LedgerError, match="6 rows"):
        release(start(path, changed(5)), "t")
    release(start(path), "t")


def test_a_ledger_whose_releases_counted_for_any_data_knows_rows_from_the_next_on(path):
    release(start(path, known=any_data), times=2)
    assert read_ledger(path).samples_used == 4
    release(start(path))
    with pytest.raises(LedgerError, match="6 rows"):
        release(start(path, changed(0)))


def test_a_session_with_another_versions_noise_is_refused(path):
    release(start(path))
    ledger = SQLiteLedger(path)
    with ledger.exclusive() as page:
        stream, account = page.stream("s"), page.account()
        terms = json.loads(stream.terms)
        terms["noise_version"] += 1
        old = type(stream)("another fingerprint", stream.release, stream.ack, terms=json.dumps(terms))
        page.commit("s", old, account)
    with pytest.raises(RefusedError, match="noise of another version of murmurfl"):
        release(start(path))
    release(start(path), "t")


def test_unrecognisable_rows_are_reported_in_the_machines_log(path, caplog):
    class Unknowable:
        def __len__(self):
            return ROWS

        def __getitem__(self, rows):
            return (row for row in DATA[rows])

    release(start(path, Unknowable()))
    assert "nobody will notice" in caplog.text


def test_a_part_that_cannot_be_read_leaves_the_others_known(path):
    known = [row_bytes(_Row({"x": np.full(2, value), "how": lambda: None}))(0) for value in (1.0, 2.0)]
    assert known[0] != known[1]


def test_tensors_numpy_has_no_type_for_are_known_by_their_bytes():
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(values) for values in ([1.0, 2.0], [1.0, 3.0])]
    for kind in (lambda tensor: tensor.to(torch.bfloat16), torch.Tensor.to_sparse):
        one, other = (row_bytes(_Row(kind(tensor)))(0) for tensor in tensors)
        assert one != other
    masked = [row_bytes(_Row(np.ma.masked_array([1.0, 2.0], mask=mask)))(0) for mask in ([0, 0], [0, 1])]
    assert masked[0] != masked[1]


def test_a_rollback_before_any_row_keeps_the_marks_digest(path):
    """With samples that return, both know of as many used rows; only the mark has their digest."""
    passes = {"sample_participations": 2, "min_separation": 2, "max_participations": 4}
    release(start(path, known=any_data, **passes), times=2)
    backup = path.read_bytes()
    release(start(path, **passes))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(backup)
    accept_rollback(path)
    with pytest.raises(LedgerError, match="Put the data back"):
        release(start(path, changed(0)), "t")
