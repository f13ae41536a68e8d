"""What a high-water mark says of the budget: the same as its ledger."""

import math

import pytest
from murmurfl.privacy import LedgerError, SQLiteLedger, read_ledger
from murmurfl.privacy.ledger.ledger_file import LedgerState, SessionState, budget_left


def test_a_new_ledger_has_all_of_its_budget(tmp_path):
    SQLiteLedger.create(tmp_path / "l", budget_mu=2.0, delta=1e-5, budget_local_mu=3.0)
    left, summary = budget_left(tmp_path / "l.mark"), read_ledger(tmp_path / "l")
    assert (left.left_mu, left.left_local_mu, left.sessions) == (summary.left_mu, summary.left_local_mu, 0) == (2, 3, 0)


@pytest.mark.parametrize(
    ("sessions", "mu", "local"),
    [
        ({"a": SessionState(1.2, 3), "b": SessionState(1.6, 1, local=2.0)}, 0.0, math.sqrt(9 - 1.44 - 4)),
        ({"a": SessionState(-1.2, 3)}, 1.6, math.sqrt(9 - 1.44)),  # a trusted server's word
        ({"a": SessionState(math.inf, 3)}, 0.0, 0.0),
        ({"a": SessionState(5.0, 3)}, 0.0, 0.0),
    ],
)
def test_what_is_left_is_what_no_session_has_reserved(tmp_path, sessions, mu, local):
    state = LedgerState("l", 2.0, 1e-5, 1, 8, sessions, budget_local_mu=3.0)
    state.write_mark(tmp_path / "mark")
    left = budget_left(tmp_path / "mark")
    assert left.left_mu == pytest.approx(mu, abs=1e-7)
    assert left.left_local_mu == pytest.approx(local)
    assert left.sessions == len(sessions)


def test_a_mark_that_is_not_there_or_damaged_says_nothing(tmp_path):
    with pytest.raises(LedgerError):
        budget_left(tmp_path / "mark")
    (tmp_path / "mark").write_text("{}")
    (tmp_path / "mark").chmod(0o600)
    with pytest.raises(LedgerError):
        budget_left(tmp_path / "mark")
