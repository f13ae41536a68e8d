"""An added delta in a ledger: it outlives all that mu outlives, and every epsilon is at what is left of delta."""

import math

import pytest
from murmurfl.app.nodes.ledger_views import ledger_document, ledger_guarantee, ledger_lines, session_rows
from murmurfl.privacy import (
    LedgerError,
    Loss,
    SQLiteLedger,
    StreamRecord,
    accept_rollback,
    gdp_epsilon,
    gdp_mu,
    read_ledger,
)
from murmurfl.privacy.accounting.guarantee import Guarantee, plain_meaning, rounded_up
from murmurfl.privacy.accounting.loss import Curve, Gaussian, total_loss, weakest_loss
from murmurfl.privacy.ledger.ledger_file import budget_left

from tests.harness.errors import raises

DELTA, ADDED, MU = 1e-5, 4e-6, 0.3


@pytest.fixture
def path(tmp_path):
    SQLiteLedger.create(tmp_path / "a.ledger", budget_mu=gdp_mu(3.0, DELTA), delta=DELTA)
    return tmp_path / "a.ledger"


def book(path, session, loss, **changes):
    with SQLiteLedger(path).exclusive() as page:
        account = page.account().reserve(session, loss)
        page.commit(session, StreamRecord("plan", release=1), account if not changes else changes["of"](account))


def test_every_figure_of_a_ledger_is_at_what_is_left_of_delta(path):
    book(path, "plain", Loss.of(0.4))
    before = path.read_bytes()
    assert b"reserved_delta" not in before  # a ledger without one has the tables that it always had
    book(path, "names", Loss.of(MU).with_added(ADDED))
    summary = read_ledger(path)
    epsilon = gdp_epsilon(0.5, DELTA - ADDED)
    document = ledger_document(summary, path)
    assert document["spent"]["epsilon"] == pytest.approx(epsilon)
    assert document["spent"]["added_delta"] == ADDED
    assert rounded_up(epsilon) in ledger_lines(summary, path)[3]
    assert f"epsilon = {rounded_up(epsilon)}" in ledger_guarantee(summary).sentence
    assert f"added delta of {ADDED:g}" in ledger_guarantee(summary).sentence
    rows = {row["session"]: row["epsilon"] for row in session_rows(summary)}
    assert rows["names"] == rounded_up(gdp_epsilon(MU, DELTA - ADDED))
    assert rows["plain"] == rounded_up(gdp_epsilon(0.4, DELTA))
    # what is left may be spent as well, and epsilon is then the budget's
    left = budget_left(path.with_name("a.ledger.mark")).left
    assert left.mu == summary.left.mu
    whole = summary.spent.compose(Loss.of(left.mu))
    assert whole.assumed.epsilon(DELTA) == pytest.approx(3.0, rel=1e-9)


def test_a_delta_of_no_more_than_what_is_booked_has_no_epsilon():
    loss = Loss.of(MU).with_added(ADDED)
    for delta in (ADDED, ADDED / 2):
        assert loss.assumed.epsilon(delta) == math.inf
        assert loss.document(delta)["epsilon"] is None
        assert "Nothing is guaranteed" in Guarantee(loss, delta, "noise").sentence


def test_it_is_kept_by_copies_and_rollbacks_and_cannot_be_forgotten(path):
    backup = path.read_bytes()
    book(path, "names", Loss.of(MU).with_added(ADDED))
    log = path.with_name(path.name + "-wal")
    with SQLiteLedger(path).exclusive() as page:
        assert page.account().reserved_delta == {"names": ADDED}

    def forgotten(account):
        return type(account)(account.samples_used, account.reserved, account.data, account.reserved_local, {})

    with raises(LedgerError, "mismatch"):
        book(path, "other", Loss.of(0.1), of=forgotten)
    log.unlink(missing_ok=True)
    path.write_bytes(backup)  # the ledger is copied back, its mark is not
    assert accept_rollback(path) == 1
    assert read_ledger(path).spent == Loss.of(MU).with_added(ADDED)
    SQLiteLedger(path)


def test_a_table_of_added_deltas_that_was_removed_is_noticed(path):
    import sqlite3

    book(path, "names", Loss.of(MU).with_added(ADDED))
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE reserved_delta")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError):
        SQLiteLedger(path)


def test_losses_keep_it_in_every_operation():
    one, other = Loss.of(3.0).with_added(1e-6), Loss.of(4.0).with_added(2e-6)
    for whole in (one.compose(other), total_loss([one, other])):
        assert (whole.mu, whole.added_delta) == (5.0, pytest.approx(3e-6))
    assert weakest_loss([one, other]) == other
    assert one.times(1.0).mu == math.inf  # of several records nothing is derived
    assert one.statement()["mu-guaranteed"] == math.inf
    curve = Loss(Curve(lambda epsilon: 1e-7), Curve(lambda epsilon: 1e-7), conditional=False)
    both = curve.compose(one)
    assert both.assumed.epsilon(1e-5) >= Gaussian(3.0, 1e-6).epsilon(1e-5)
    assert both.assumed.epsilon(1e-6) == math.inf
    assert Gaussian(1.0, 1e-3).delta(50.0) == pytest.approx(1e-3)


def test_the_best_guess_gains_half_of_it():
    assert "right at most 50.3 %" in plain_meaning(Loss.of(0.01).with_added(0.002))
    assert "right at most 50.2 %" in plain_meaning(0.01)
