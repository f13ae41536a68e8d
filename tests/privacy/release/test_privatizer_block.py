"""What a caller who computes for many clients may do, and what it may not: one release for one open admission."""

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, MemoryLedger, RefusedError, SimulatedKeys, SystemKeys, protocol
from murmurfl.privacy.ledger.ledger_records import BlockLedger
from murmurfl.privacy.release.clipping import DenseContributions
from murmurfl.privacy.release.privatizer_block import PrivatizerBlock

from tests.harness.errors import raises
from tests.privacy.clients import DATA, D, client, contribution, mechanisms

CLIENTS = 4


def block_of(count=CLIENTS, **changes):
    """Clients that differ by their keys, with rows of one ledger."""
    first = client(keys=SimulatedKeys(1, "0"), ledger=MemoryLedger(), **changes)
    return PrivatizerBlock(first, BlockLedger(count), np.full(count, 200), lambda row: SimulatedKeys(1, str(row)))


def alone(row, ledger=None, **changes):
    return client(keys=SimulatedKeys(1, str(row)), ledger=ledger or MemoryLedger(), **changes)


def rows(places, slices):
    return DenseContributions(np.concatenate([DATA[chosen] for chosen in slices]))


@mechanisms
def test_block_and_single_clients_release_the_same_bits(options):
    """Whatever is lost, refused and acknowledged: client i follows its own script."""
    scripts = [[0, 1, 2, 3, 4, 5], [0, 0, 0, 3, 3, 5], [0, 9, 0, 2, 1, 4], [0, 0, 1, 1, 1, 1]]
    block, clients = block_of(**options), [alone(row, **options) for row in range(CLIENTS)]
    for acks in zip(*scripts, strict=True):
        made = block.release("s", range(CLIENTS), acks, rows)
        for row, (subject, ack) in enumerate(zip(clients, acks, strict=True)):
            if row in made.refused:
                with pytest.raises(RefusedError) as refusal:
                    subject.release("s", ack, contribution)
                assert (refusal.value.code, refusal.value.reason) == (made.refused[row].code, made.refused[row].reason)
                continue
            expected = subject.release("s", ack, contribution)
            release = block.made(made, made.rows.index(row), row)
            assert (release.counts == expected.counts).all()
            assert (release.release, release.ack, release.samples) == (expected.release, expected.ack, expected.samples)


def test_a_client_of_a_block_goes_on_by_itself_and_comes_back():
    """Both keep one ledger and one rule."""
    block, ledgers = block_of(), BlockLedger(CLIENTS)
    block = PrivatizerBlock(alone(0), ledgers, np.full(CLIENTS, 200), lambda row: SimulatedKeys(1, str(row)))
    reference = alone(2)
    expected = [reference.release("s", ack, contribution).counts for ack in (0, 1, 1)]
    first = block.release("s", [1, 2], [0, 0], rows).counts[1]
    second = alone(2, ledger=ledgers.ledger(2)).release("s", 1, contribution).counts
    third = block.release("s", [2, 3], [1, 0], rows).counts[0]
    assert all((a == b).all() for a, b in zip((first, second, third), expected, strict=True))
    assert alone(2, ledger=ledgers.ledger(2)).statement("s").releases == 3


def test_clients_computed_elsewhere_are_admitted_here():
    """Two processes, each with half of the clients, know the same of all of them."""
    whole, halves = block_of(max_participations=3), [block_of(max_participations=3) for _ in range(2)]
    acks = np.zeros(CLIENTS, int)
    for _ in range(4):  # the last is beyond the cap
        expected = whole.release("s", range(CLIENTS), acks, rows)
        for half, subject in enumerate(halves):
            here = [row % 2 == half for row in range(CLIENTS)]
            with subject.admitted("s", range(CLIENTS), acks, here) as admission:
                assert admission.places == expected.rows
                ours = [i for i, computed in enumerate(admission.here) if computed]
                made = admission.release(rows(None, [admission.slices[i] for i in ours]) if ours else None)
            assert made.streams.release.tolist() == expected.streams.release.tolist()
            assert made.refused.keys() == expected.refused.keys()
            for i in ours:
                assert (made.counts[i] == expected.counts[i]).all()
        acks += 1
    assert set(expected.refused) == set(range(CLIENTS))


def test_an_admission_spends_nothing_until_it_is_used():
    block = block_of()
    with block.admitted("s", [0, 1], [0, 0]) as admission:
        assert (admission.places, admission.slices) == ([0, 1], [slice(0, 2)] * 2)
    with block.admitted("s", [0, 1], [0, 0]) as admission:
        assert admission.slices == [slice(0, 2)] * 2


def test_an_admission_is_good_for_one_release():
    """Two releases of other contributions under one nonce would tell their difference without any noise."""
    block = block_of()
    with block.admitted("s", [0, 1], [0, 0]) as admission:
        admission.release(rows(None, admission.slices))
        with raises(ConfigurationError, "wrong-order", match="open admission"):
            admission.release(rows(None, admission.slices))
    with raises(ConfigurationError, "wrong-order", match="open admission"):
        admission.release(None)
    assert block.release("s", [0, 1], [1, 1], rows).streams.release.tolist() == [2, 2]


def test_an_admission_ends_with_its_transaction():
    block = block_of()
    with block.admitted("s", [0], [0]) as admission:
        pass
    with raises(ConfigurationError, "wrong-order", match="open admission"):
        admission.release(rows(None, admission.slices))
    assert block.release("s", [0], [0], rows).streams.release.tolist() == [1]


def test_a_real_client_is_in_no_block_and_hands_out_no_keys():
    real = client(keys=SystemKeys(bytes(32)))
    with raises(ConfigurationError, "unsupported", match="real keys"):
        PrivatizerBlock.of([real])
    with raises(ConfigurationError, "unsupported", match="real keys"):
        _ = real.keys
    with raises(ConfigurationError, "unsupported", "keys"):
        real.alike(200, MemoryLedger(), SimulatedKeys(1, "m"))
    with raises(ConfigurationError, "unsupported", "keys"):
        client(ledger=MemoryLedger()).alike(200, MemoryLedger(), SystemKeys(bytes(32)))
    first = client(ledger=MemoryLedger())
    block = PrivatizerBlock(first, BlockLedger(1), np.array([200]), lambda _: SystemKeys(bytes(32)))
    with raises(ConfigurationError, "unsupported", match="real keys"):
        block.release("s", [0], [0], rows)


def test_a_block_asks_for_the_keys_of_each_client_once():
    asked = []
    block = PrivatizerBlock(
        alone(0), BlockLedger(3), np.full(3, 200), lambda row: asked.append(row) or SimulatedKeys(1, str(row))
    )
    for k in range(3):
        block.release("s", range(3), [k] * 3, rows)
    assert sorted(asked) == [0, 1, 2]


def test_clients_of_several_policies_are_in_no_block():
    with raises(ConfigurationError, "mismatch", match="one policy"):
        PrivatizerBlock.of([alone(0), alone(1, mu=1.0)])


def test_nothing_is_held_or_spent_where_a_caller_fails_in_between():
    block = block_of(budget_mu=2.5)
    with pytest.raises(ZeroDivisionError):
        block.release("s", range(CLIENTS), [0] * CLIENTS, lambda _, __: 1 / 0)
    made = block.release("s", range(CLIENTS), [0, 9, 0, 0], rows)
    assert made.streams.release.tolist() == [1, 1, 1]
    assert made.refused[1].code == protocol.BAD_ACKNOWLEDGEMENT
    assert block.release("t", range(CLIENTS), [0] * CLIENTS, rows).refused[0].code == protocol.BUDGET_EXHAUSTED
    assert 1 not in block.release("t", range(CLIENTS), [0] * CLIENTS, rows).refused, "a refusal reserves nothing"


def test_a_block_of_clients_and_sessions_keeps_each_clients_own_account():
    ledgers = BlockLedger(2)
    block = PrivatizerBlock(alone(0, budget_mu=3.0), ledgers, np.full(2, 200), lambda row: SimulatedKeys(1, str(row)))
    block.release("s", [0, 1], [0, 0], rows)
    block.release("t", [1], [0], rows)
    accounts = [ledgers.ledger(row).account() for row in range(2)]
    assert [sorted(account.reserved) for account in accounts] == [["s"], ["s", "t"]]
    assert [account.samples_used for account in accounts] == [2, 4]
    assert len(DATA[0]) == D


def test_client_is_in_one_transaction_at_a_time():
    """Both would make the same release, under one nonce: the difference of the two has no noise."""
    block = block_of()
    with raises(ConfigurationError, "wrong-order", "rows"):
        block.release("s", [1, 2, 1], [0, 0, 0], rows)
    with block.admitted("s", [0, 1], [0, 0]) as first:
        with raises(ConfigurationError, "wrong-order", "rows"), block.admitted("s", [1, 2], [0, 0]):
            pass
        with raises(ConfigurationError, "wrong-order", "rows"):
            block.acknowledge("s", [1], [0])
        with raises(ConfigurationError, "wrong-order", "rows"):
            alone(0, ledger=block._ledgers.ledger(0)).release("s", 0, contribution)
        assert block.release("s", [2, 3], [0, 0], rows).rows == [0, 1], "others are not concerned"
        assert first.release(rows(None, first.slices)).streams.release.tolist() == [1, 1]
    assert block.release("s", range(CLIENTS), [1] * CLIENTS, rows).streams.release.tolist() == [2] * CLIENTS


def test_what_is_handed_out_cannot_change_what_the_ledger_remembers():
    """A ledger in memory holds the very counts: what is lost is carried over from them."""
    block = block_of()
    made = block.release("s", [0], [0], rows)
    release = block.made(made, 0, 0)
    with pytest.raises(ValueError, match="read-only"):
        release.counts += 1
    with pytest.raises(ValueError, match="read-only"):
        block._ledgers.ledger(0).stream("s").pending[1][0] = 0


def test_a_block_acknowledges_as_each_client_alone_does():
    """Also where there is nothing to acknowledge: then nothing is written either."""
    block, ledgers = block_of(), [MemoryLedger() for _ in range(2)]
    joined = PrivatizerBlock.of([alone(row, ledger=ledgers[row]) for row in range(2)])
    for subject in (block, joined):
        for session in ("s", "t"):
            for ack in (0, 1):
                with pytest.raises(RefusedError) as refusal:
                    subject.acknowledge(session, [1], [ack])
                with pytest.raises(RefusedError) as expected:
                    alone(1).acknowledge(session, ack)
                assert refusal.value.reason == expected.value.reason
        subject.release("s", [0], [0], rows)
    assert ledgers[1].stream("s") is None
    assert block._ledgers.ledger(1).stream("s") is None


def test_a_row_that_is_not_finite_is_nothing_in_a_block_too():
    """Beside a good row of the same client, and beside clients all of whose rows are good."""
    data = DATA.copy()
    data[0, 1], data[3, 0] = np.nan, np.inf
    block, clients = block_of(), [alone(row) for row in range(2)]
    for ack in range(2):
        made = block.release(
            "s", [0, 1], [ack, 0], lambda _, parts: DenseContributions(np.concatenate([data[part] for part in parts]))
        )
        for row, subject in enumerate(clients):
            expected = subject.release("s", (ack, 0)[row], lambda samples: data[samples])
            assert (made.counts[row] == expected.counts).all()


@pytest.mark.parametrize("rule", ["acknowledged", "paper"])
@pytest.mark.parametrize("acks", [[2, 2, 2, 2], [2, 2, 1, 2], [2, 3, 2, 2], [0, 2, 2, 2], [2, 2, 0, 1]])
def test_acknowledgements_of_a_block_are_those_of_single_clients(acks, rule):
    """All at once or one by one, of the last release or of earlier ones, and with one that is refused."""
    block, clients = block_of(release_rule=rule), [alone(row, release_rule=rule) for row in range(CLIENTS)]
    for _ in range(2):
        block.release("s", range(CLIENTS), [0] * CLIENTS, rows)
        for subject in clients:
            subject.release("s", 0, contribution)
    for row, (subject, ack) in enumerate(zip(clients, acks, strict=True)):
        try:
            subject.acknowledge("s", ack)
        except RefusedError:
            with pytest.raises(RefusedError):
                block.acknowledge("s", range(CLIENTS), acks)
            acks = acks[:row]
            break
    else:
        block.acknowledge("s", range(CLIENTS), acks)
    for row, ack in enumerate(acks):
        made, expected = block.release("s", [row], [ack], rows), clients[row].release("s", ack, contribution)
        assert (made.counts[0] == expected.counts).all()
        assert made.streams.pending[0].keys() == known_to(clients[row])


def known_to(subject):
    with subject.ledger.exclusive() as ledger:
        return ledger.stream("s").pending.keys()
