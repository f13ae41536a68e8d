"""Ledgers under secure aggregation: two figures, each under a budget of its own, and releases known by their names."""

import json
import math
import sqlite3
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
    SumAssumption,
    SystemKeys,
    accept_rollback,
    protocol,
    read_ledger,
    set_local_budget,
)
from murmurfl.privacy.ledger.ledger_file import LEDGER_MARK, budget_left
from murmurfl.privacy.release.prefix_sums import MOST_PENDING

from tests.harness.clients import DurableLedger
from tests.harness.errors import raises
from tests.privacy.ledger.nodes import client, contribution, folder, stream_of

pytestmark = pytest.mark.usefixtures("quick_disk")

SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(4, 6)}  # mu = 1, mu_local = 2


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "node" / "ledger.db"
    path.parent.mkdir()
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, budget_local_mu=3.0)
    return path


@pytest.fixture
def undecided(tmp_path):
    SQLiteLedger.create(tmp_path / "undecided.db", budget_mu=2.0, delta=1e-5)
    return tmp_path / "undecided.db"


def release(path, session="s", count=1, first=1, **changes):
    subject = client(SQLiteLedger(path), **changes)
    return [subject.release(session, k - 1, contribution) for k in range(first, first + count)]


def spend(path, statement):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def test_both_figures_and_the_names_of_releases_come_back(path):
    ids = {3: bytes(range(16)), 4: bytes(16), 9: b"\xff" * 16}
    stream = StreamRecord("f" * 64, 9, 3, bytes(16), {4: np.arange(3), 9: np.arange(3)}, (), "{}", (), ids)
    account = Account(7, {"s": 0.5, "plain": 0.25, "t": -0.125}, "", {"s": 0.1 + 0.2})
    with SQLiteLedger(path).exclusive() as page:
        page.commit("s", stream, account)
    with SQLiteLedger(path).exclusive() as page:
        assert page.account() == account
        assert page.stream("s").ids == ids
        assert page.account().spent.worst_case.mu == pytest.approx(math.hypot(0.3, 0.25, 0.125))
    state = json.loads((path.parent / "ledger.db.mark").read_text())
    assert state["sessions"]["s"]["local"] == 0.1 + 0.2
    assert "local" not in state["sessions"].get("plain", {})
    assert state["budget_local_mu"] == 3.0


def test_local_budget_left_is_read_without_the_ledger(path, undecided):
    assert budget_left(Path(f"{undecided}.mark")).left.worst_case.mu == 2.0
    assert budget_left(Path(f"{path}.mark")).left.worst_case.mu == 3.0
    release(path, **SUMS)
    assert budget_left(Path(f"{path}.mark")).left.worst_case.mu == pytest.approx(math.sqrt(3.0**2 - 2.0**2))


def test_mu_of_a_trusted_server_is_taken_from_what_is_left(path):
    release(path, "a", trust="trusted-server", mu=1.5)
    left = budget_left(Path(f"{path}.mark"))
    assert left.left.mu == pytest.approx(math.sqrt(2.0**2 - 1.5**2))
    assert left.left.worst_case.mu == pytest.approx(math.sqrt(3.0**2 - 1.5**2))


def test_a_client_states_the_sums_that_its_figures_rest_on(path):
    stated = [client(SQLiteLedger(path), **changes).statement("s") for changes in (SUMS, {})]
    assert [one.sums for one in stated] == [SumAssumption(4, 6), None]


def test_a_release_has_its_own_id_and_that_of_its_base(path):
    one, two, three = release(path, count=1, **SUMS) + release(path, count=2, first=2, **SUMS)
    assert len({one.release_id, two.release_id, three.release_id}) == 3
    assert (one.ack_id, two.ack_id, three.ack_id) == (bytes(16), one.release_id, two.release_id)
    assert stream_of(path).ids == {2: two.release_id, 3: three.release_id}
    assert release(path, "plain")[0].release_id == b""


def test_the_budget_of_what_holds_whatever_happens_ends_a_client_too(path):
    """2^2 + 2.4^2 is more than 3^2, where 1 + 1.2^2 is not more than 2^2."""
    release(path, "a", **SUMS)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="without anybody's honesty") as refusal:
        release(path, "b", mu=1.2, **SUMS)
    assert refusal.value.code == protocol.BUDGET_EXHAUSTED
    assert [session.session for session in read_ledger(path).sessions] == ["a"]
    release(path, "c", mu=1.5, **{**SUMS, "sums": SumAssumption(1, 6)})  # 4 + 2.25 of 9, and 1 + 2.25 of 4
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget of this client"):
        release(path, "d", mu=1.0, **{**SUMS, "sums": SumAssumption(1, 6)})


@pytest.mark.parametrize(("short", "opens"), [(1e-10, True), (1e-8, False)])
def test_that_budget_has_room_for_rounding_and_for_nothing_else(tmp_path, short, opens):
    path = tmp_path / "ledger.db"
    alone = client(DurableLedger(), SimulatedKeys(1, "m"), **SUMS).plan.loss.worst_case.mu
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, budget_local_mu=math.sqrt(2.0) * alone * (1.0 - short))
    release(path, "a", **SUMS)
    if opens:
        assert [one.release for one in release(path, "b", **SUMS)] == [1]
    else:
        with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="without anybody's honesty"):
            release(path, "b", **SUMS)


def test_releases_that_are_seen_by_themselves_count_in_both_budgets(tmp_path):
    path = tmp_path / "ledger.db"
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, budget_local_mu=2.1)
    release(path, "a", **SUMS)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="without anybody's honesty"):
        release(path, "b", mu=1.0)
    release(path, "b", mu=0.5)
    account = read_ledger(path)
    assert account.spent.mu == pytest.approx(math.hypot(1.0, 0.5))
    assert account.spent.worst_case.mu == pytest.approx(math.hypot(2.0, 0.5))
    assert account.left.worst_case.mu == pytest.approx(math.sqrt(2.1**2 - 4.25))


def test_an_undecided_local_budget_is_the_main_one(undecided):
    ledger = SQLiteLedger(undecided)
    assert ledger.budget_local_mu == 2.0
    with raises(
        ConfigurationError,
        "out-of-range",
        "budget_local_mu",
        match="3, .* got 2: .*ledger set-local-budget .* --budget-local-mu",
    ):
        client(ledger, **{**SUMS, "sums": SumAssumption(9, 9)})
    release(undecided, "a", **SUMS)  # mu_local = 2: just within
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="without anybody's honesty"):
        release(undecided, "b", mu=0.5)


def test_that_budget_is_decided_once(undecided):
    release(undecided, "a", **SUMS)
    with raises(ConfigurationError, "out-of-range", "budget_local_mu", match="budget_local_mu >= budget_mu = 2"):
        set_local_budget(undecided, 1.9)
    before = json.loads(undecided.with_name("undecided.db.mark").read_text())["counter"]
    set_local_budget(undecided, 3.0)
    mark = json.loads(undecided.with_name("undecided.db.mark").read_text())
    assert (mark["counter"], mark["budget_local_mu"]) == (before + 1, 3.0)
    release(undecided, "b", mu=0.5)
    for again in (3.0, 4.0):
        with raises(LedgerError, "exists", "budget_local_mu"):
            set_local_budget(undecided, again)
    assert read_ledger(undecided).budget.worst_case.mu == 3.0


def test_an_impossible_budget_of_that_kind_makes_nothing(tmp_path):
    for budget in (1.9, 0.0, -3.0, math.inf, math.nan):
        with raises(ConfigurationError, "out-of-range", "budget_local_mu"):
            SQLiteLedger.create(tmp_path / "ledger.db", budget_mu=2.0, delta=1e-5, budget_local_mu=budget)
    assert not list(tmp_path.iterdir())
    alone = SQLiteLedger.create(tmp_path / "ledger.db", budget_mu=2.0, delta=1e-5, budget_local_mu=2.0)
    assert alone.budget_local_mu == 2.0


def test_a_policy_must_have_the_ledgers_budget_if_it_has_one(path):
    with raises(
        ConfigurationError,
        "mismatch",
        "budget_local_mu",
        match=r"Expected budget_local_mu = 3\.0, with which the ledger was made",
    ):
        client(SQLiteLedger(path), budget_local_mu=4.0, **SUMS)
    assert client(SQLiteLedger(path), **SUMS).policy.budget_local_mu == 3.0
    said, unsaid = (client(SQLiteLedger(path), **SUMS, **told) for told in ({"budget_local_mu": 3.0}, {}))
    assert said.plan.fingerprint == unsaid.plan.fingerprint


@pytest.mark.parametrize(
    "past",
    [
        lambda stream, account: (stream, replace(account, reserved_local={})),
        lambda stream, account: (stream, replace(account, reserved_local={"s": 1.9})),
        lambda stream, account: (replace(stream, ids={}), account),
        lambda stream, account: (replace(stream, ids={1: bytes(16)}), account),
    ],
)
def test_a_commit_that_forgets_a_local_figure_or_a_name_is_refused(path, past):
    release(path, count=2, **SUMS)
    before = folder(path)
    with SQLiteLedger(path).exclusive() as page:
        stream, account = page.stream("s"), page.account()
        assert account.reserved_local["s"] == pytest.approx(2.0, rel=1e-8)
        with raises(LedgerError, "mismatch", match="forgets nothing"):
            page.commit("s", *past(stream, account))
    assert folder(path) == before


def test_a_small_local_figure_is_not_forgotten_either(path):
    with SQLiteLedger(path).exclusive() as page:
        page.commit("s", StreamRecord("f", release=1), Account(2, {"s": 0.1}, "", {"s": 0.2}))
        with raises(LedgerError, "mismatch"):
            page.commit("s", StreamRecord("f", release=2), Account(4, {"s": 0.1}))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE reserved SET local = 0.5", "do not match their seal"),
        ("UPDATE reserved SET local = NULL", "do not match their seal"),
        ("UPDATE ledger SET budget_local_mu = 9", "do not match their seal"),
        ("UPDATE ledger SET budget_local_mu = NULL", "do not match their seal"),
        ("DELETE FROM arrays WHERE kind = 'ids'", "does not match its digest"),
        ("UPDATE arrays SET content = zeroblob(16) WHERE kind = 'ids'", "does not match its digest"),
        ("UPDATE arrays SET number = 7 WHERE kind = 'ids'", "does not match its digest"),
        ("UPDATE arrays SET kind = 'names' WHERE kind = 'ids'", "damaged"),
    ],
)
def test_damaged_local_figures_and_names_are_refused(path, statement, message):
    release(path, **SUMS)
    spend(path, statement)
    before = folder(path)
    with raises(LedgerError, "damaged", match=message):
        release(path, first=2, **SUMS)
    assert {name: content for name, content in folder(path).items() if name.endswith((".db", ".mark"))} == {
        name: content for name, content in before.items() if name.endswith((".db", ".mark"))
    }


def test_without_the_name_of_what_it_is_built_on_nothing_is_released():
    """Else helpers would be told that nothing was opened before, and might believe it."""
    ledger = MemoryLedger()
    subject = client(ledger, SimulatedKeys(1, "m"), **SUMS)
    for k in range(3):
        subject.release("s", k, contribution)
    with ledger.exclusive() as transaction:
        whole, account = transaction.stream("s"), transaction.account()

    def put(ids):
        with ledger.exclusive() as transaction:
            transaction.commit("s", replace(whole, ids=ids), account)

    for lost in ({3: whole.ids[3]}, {2: whole.ids[2]}, {}):
        put(lost)
        with raises(LedgerError, "damaged", match="Expected the names of releases"):
            subject.release("s", 2, contribution)
    put(whole.ids)
    assert subject.release("s", 3, contribution).ack_id == whole.ids[3]


def test_deciding_that_budget_of_a_ledger_that_was_copied_back_is_refused(undecided):
    release(undecided)
    saved = undecided.read_bytes()
    release(undecided, first=2)
    undecided.write_bytes(saved)
    with raises(LedgerError, "rolled-back"):
        set_local_budget(undecided, 3.0)
    assert undecided.read_bytes() == saved


def test_a_rollback_that_is_accepted_keeps_both_figures_and_ends_all_names(path):
    release(path, "plain")
    saved = path.read_bytes()
    release(path, "s", count=2, mu=0.9, **SUMS)
    path.write_bytes(saved)
    with raises(LedgerError, "rolled-back"):
        SQLiteLedger(path)
    assert accept_rollback(path) == 2
    with SQLiteLedger(path).exclusive() as page:
        account = page.account()
        assert page.stream("s").ids == {}
    assert account.reserved == {"plain": 1.0, "s": pytest.approx(0.9)}
    assert account.reserved_local == {"s": pytest.approx(1.8, rel=1e-8)}
    with raises(RefusedError, "refused", code=protocol.POLICY_CHANGED, match="closed"):
        release(path, "s", mu=0.9, **SUMS)
    forgotten = read_ledger(path).sessions[1]
    assert (forgotten.loss.worst_case.mu, forgotten.min_honest) == (pytest.approx(1.8, rel=1e-8), None)


@pytest.mark.parametrize(("known", "counts"), [(0.7, 1.0), (1.4, 1.4)])
def test_of_two_histories_the_larger_local_figure_counts(path, known, counts):
    release(path, mu=0.5, **SUMS)
    ours, mark = path.read_bytes(), path.with_name("ledger.db.mark")
    release(path, "other", mu=0.5)
    path.write_bytes(ours)
    state = LEDGER_MARK.load(mark)
    sessions = {**state.sessions, "s": replace(state.sessions["s"], local=known)}
    LEDGER_MARK.save(mark, replace(state, sessions=sessions))
    accept_rollback(path)
    with SQLiteLedger(path).exclusive() as page:
        assert page.account().reserved_local["s"] == pytest.approx(counts, rel=1e-8)


def test_a_rollback_keeps_a_later_budget_and_spending(undecided):
    release(undecided, "plain")
    saved = undecided.read_bytes()
    set_local_budget(undecided, 3.0)
    release(undecided, "s", mu=0.9, **SUMS)
    undecided.write_bytes(saved)
    accept_rollback(undecided)
    summary = read_ledger(undecided)
    assert (summary.budget.conditional, summary.budget.worst_case.mu, summary.mark_problem) == (True, 3.0, "")
    assert summary.spent.worst_case.mu == pytest.approx(math.hypot(1.0, 1.8))
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="without anybody's honesty"):
        release(undecided, "t", mu=1.3, **SUMS)


def test_changed_terms_are_stated_by_the_larger_figure():
    ledger = MemoryLedger()
    keys = SimulatedKeys(1, "m")
    client(ledger, keys, **SUMS).release("s", 0, contribution)
    for other in ({}, {**SUMS, "sums": SumAssumption(2, 6)}):
        statement = client(ledger, keys, **other).statement("s")
        assert statement.guaranteed.mu == statement.mu_spent == pytest.approx(2.0, rel=1e-8)
    assert client(ledger, keys, **SUMS).statement("s").guaranteed.mu == 1.0


def test_a_simulated_client_whose_local_figure_nothing_bounds_still_takes_part():
    ledger = MemoryLedger()
    far = {"mechanism": "independent", "trust": "secure-aggregation", "sums": SumAssumption(400, 400)}
    subject = client(ledger, SimulatedKeys(1, "m"), **far)
    assert subject.plan.loss.worst_case.mu == math.inf
    subject.release("s", 0, contribution)
    assert ledger.account().spent.mus == (1.0, math.inf)
    with raises(ConfigurationError, "out-of-range", match="mu_local"):
        client(DurableLedger(), SystemKeys(bytes(32)), **far)


def test_after_sums_a_client_states_only_its_local_budget(path):
    """The mu of a session of sums rests on others; a session without sums promises that nobody has to be honest."""
    plain = client(SQLiteLedger(path), mu=1.0, budget_mu=2.0)
    assert plain.statement("plain").mu_budget == 2.0
    release(path, "sums", mu=1.0, budget_mu=2.0, **SUMS)
    assert plain.statement("plain").mu_budget == 3.0
    assert client(SQLiteLedger(path), mu=1.0, budget_mu=2.0, **SUMS).statement("sums").mu_budget == 2.0


def test_names_are_kept_of_releases_that_may_still_be_acknowledged():
    ledger = MemoryLedger()
    subject = client(ledger, SimulatedKeys(1, "m"), **SUMS)
    for _ in range(MOST_PENDING + 2):
        subject.release("s", 0, contribution)
    with ledger.exclusive() as transaction:
        stream = transaction.stream("s")
    assert stream.ids.keys() == stream.pending.keys() == {3, 4, 5, 6}


def test_an_acknowledgement_forgets_the_names_and_sums_before_it(path):
    subject = client(SQLiteLedger(path), **SUMS)
    for _ in range(3):
        subject.release("s", 0, contribution)
    assert list(stream_of(path).ids) == [1, 2, 3]
    subject.acknowledge("s", 2)
    stream = stream_of(path)
    assert (stream.ack, list(stream.pending), list(stream.ids)) == (2, [3], [2, 3])
