"""Ledgers of many clients as columns: what was committed for each, and nothing of clients without entries."""

import sys

import numpy as np
from murmurfl.privacy import MemoryLedger
from murmurfl.privacy.ledger.ledger_records import Account, BlockLedger, StreamRecord


def stream(release):
    nonces = (bytes([release]) * 16,)
    return StreamRecord(fingerprint="f", release=release, ack=0, nonces=nonces[0], terms="t")


def test_ledgers_in_columns_say_what_was_committed_for_each():
    """Commits of clients in any order, alone and together, in two sessions, against mappings."""
    clients, draw = 40, np.random.default_rng(3)
    block, alone = BlockLedger(clients), [MemoryLedger() for _ in range(clients)]
    accounts, streams = {}, {}
    for step in range(120):
        session = f"s{draw.integers(2)}"
        rows = 2 * draw.choice(clients // 2, int(draw.integers(1, 4)), replace=False)
        account = Account(samples_used=step, reserved={session: 1.0})
        accounts |= dict.fromkeys(rows.tolist(), account)
        streams |= dict.fromkeys(((row, session) for row in rows.tolist()), stream(step))
        for ledger in [alone[row] for row in rows] if len(rows) > 1 else [block.ledger(int(rows[0])), alone[rows[0]]]:
            with ledger.exclusive() as transaction:
                transaction.commit(session, stream(step), account)
        if len(rows) > 1:
            with block.exclusive(rows) as together:
                made, spent = together.streams(session, rows), together.accounts(rows)
                for place in range(len(rows)):
                    made.set(place, stream(step))
                    spent.set(place, account)
                together.commit(rows, made, spent)
        for row in range(clients):
            for ledger in (block.ledger(row), alone[row]):
                with ledger.exclusive() as transaction:
                    assert transaction.account() == accounts.get(row, Account())
                    assert [transaction.stream(s) for s in ("s0", "s1")] == [
                        streams.get((row, s)) for s in ("s0", "s1")
                    ]


def test_figures_tell_clients_apart_that_have_spent_something_else():
    block = BlockLedger(6)
    for row, used, sessions in ((4, 2, ("a",)), (1, 2, ("a",)), (2, 2, ("a", "b")), (3, 5, ("a",))):
        with block.ledger(row).exclusive() as page:
            page.commit("a", stream(1), Account(samples_used=used, reserved=dict.fromkeys(sessions, 1.0)))
    columns = np.stack(block.figures(np.arange(6))).T.tolist()
    assert columns == [[0, 0, 0], [2, 1, 1], [2, 2, 1], [5, 1, 1], [2, 1, 1], [0, 0, 0]]


def test_a_client_without_entries_takes_four_bytes():
    clients, asked = 50_000, np.arange(7, 50_000, 500)
    block = BlockLedger(clients)
    streams, accounts = block.streams("s", asked), block.accounts(asked)
    streams.release += 1
    block.commit(asked, streams, accounts)
    kept = [column for part in (block._accounts, *block._streams.values()) for column in vars(part).values()]
    rows = {len(column) for column in kept if not isinstance(column, str)}
    assert rows == {len(asked) + 1}
    assert sum(map(sys.getsizeof, [block._place, *kept])) < 4 * clients + 200 * len(asked)
