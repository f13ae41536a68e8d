"""Clients of a simulation: seeded keys and ledgers that travel with a node's state, refused to real nodes."""

import math
import pickle
import threading

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, RecordDict
from murmurfl.clients import ContextLedger, simulated_client
from murmurfl.clients.messages import in_simulation, simulated_in_process
from murmurfl.clients.simulation.simulated_clients import TravellingLedger
from murmurfl.privacy import Account, ConfigurationError, LedgerError, SimulatedKeys, StreamRecord, protocol

from tests.harness.errors import raises

SPACING = 2.0**-30
COUNTS = np.random.Generator(np.random.Philox(key=5)).integers(-(2**40), 2**40, 3000)
COUNTS[-1] = 2**40 - 1
STREAM = StreamRecord(
    "f",
    2,
    0,
    bytes(range(16)),
    {1: COUNTS[::-1].copy(), 2: COUNTS},
    (np.ones(3, np.float32),),
    noted=(np.arange(4.0).reshape(2, 2),),
    ids={1: bytes(16), 2: b"x" * 16},
    order=b"y" * 16,
)
ACCOUNT = Account(4, {"s": 1.5, "r": -0.1, "t": math.inf}, reserved_local={"s": 3.0000000000000004})


def recorded(stream=STREAM):
    ledger = TravellingLedger("7")
    ledger.arrive(state := RecordDict())
    with ledger.exclusive() as page:
        page.commit("s", stream, ACCOUNT)
    return ledger, state


@pytest.mark.parametrize("version", [5, 7, "6"])
def test_a_ledger_of_another_format_is_refused_with_the_two_ways_out(version):
    ledger, state = TravellingLedger("7"), RecordDict()
    with ContextLedger(state, "7").exclusive() as page:
        page.commit("s", STREAM, ACCOUNT)
    state["murmurfl/7/account"]["format"] = version
    before = pickle.dumps(state)
    for again in (ContextLedger(state, "7"), ledger):
        ledger.arrive(state)
        with (
            again.exclusive() as page,
            raises(LedgerError, "other-format", match="ormat 6 .*data that were never used before"),
        ):
            page.account()
    assert pickle.dumps(state) == before


def reply(values, parts=3):
    arrays = ArrayRecord({str(i): Array(part.reshape(2, -1)) for i, part in enumerate(np.split(values, parts))})
    return RecordDict({protocol.ARRAYS: arrays})


def assert_says(state, stream=STREAM):
    for ledger in (ContextLedger(state, "7"), TravellingLedger("7")):
        if isinstance(ledger, TravellingLedger):
            ledger.arrive(state)
        with ledger.exclusive() as page:
            read, account = page.stream("s"), page.account()
        assert account == ACCOUNT
        assert list(read.pending) == list(stream.pending)
        for j, counts in stream.pending.items():
            assert read.pending[j].dtype == np.int64
            assert (read.pending[j] == counts).all()
        for name in ("fingerprint", "release", "ack", "nonces", "ids", "order"):
            assert getattr(read, name) == getattr(stream, name)
        for name in ("noise_state", "noted"):
            ours, theirs = getattr(read, name), getattr(stream, name)
            assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_a_sent_release_adds_no_weight_and_stays_readable():
    (ledger, state), sent = recorded(), reply(COUNTS * SPACING)
    ledger.leave(sent)
    (other, plain), _ = recorded(), None
    other.leave(None)
    assert len(pickle.dumps((sent, state))) < len(pickle.dumps((sent, plain))) - 0.98 * COUNTS.nbytes
    assert_says(state)
    assert_says(plain)
    assert_says(pickle.loads(pickle.dumps((sent, state)))[1])


def test_each_message_carries_its_own_state_only():
    ledger, state = recorded()
    assert not state
    ledger.arrive(other := RecordDict())
    ledger.leave(None)
    assert not other
    assert not state
    with ledger.exclusive() as page:
        assert page.stream("s") is None
        assert page.account() == Account()


def test_the_next_record_has_nothing_left_of_the_one_before():
    ledger, state = recorded()
    ledger.leave(reply(COUNTS * SPACING))
    later = StreamRecord("f", 3, 2, bytes(16), {3: COUNTS + 1}, STREAM.noise_state)
    ledger.arrive(state)
    with ledger.exclusive() as page:
        page.commit("s", later, ACCOUNT)
    ledger.leave(None)
    assert_says(state, later)
    assert list(state["murmurfl/7/arrays/s"]) == ["pending-3", "state-0"]


def one_bit_off(values):
    values[-1] = np.nextafter(values[-1], np.inf)
    return values


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "other",
    [
        lambda values: values.astype(np.float32),
        lambda values: values[:2400],
        one_bit_off,
        lambda values: values * np.where(np.arange(3000) % 2, 1, -1),
        lambda values: COUNTS.astype(np.uint64),
        np.zeros_like,
        lambda values: np.full_like(values, np.nan),
    ],
    ids=["float32", "fewer", "one bit off", "signs", "masked", "zeros", "nan"],
)
def test_an_inexact_reply_is_not_kept_for_its_release(other):
    ledger, state = recorded()
    ledger.leave(reply(other(COUNTS * SPACING)))
    assert "pending-2" in state["murmurfl/7/arrays/s"]
    assert_says(state)


def test_an_array_that_is_not_what_it_says_is_a_damaged_ledger():
    ledger, state = recorded()
    ledger.leave(None)
    state["murmurfl/7/arrays/s"]["pending-2"].data = Array(COUNTS.astype(np.int32)).data
    with ContextLedger(state, "7").exclusive() as page, raises(LedgerError, "damaged", match="damaged"):
        page.stream("s").pending[2]


def context(**node_config):
    return Context(run_id=1, node_id=5, node_config=node_config, state=RecordDict(), run_config={})


def test_a_simulated_client_is_named_by_its_partition():
    with simulated_in_process():
        client = simulated_client(context(**{"partition-id": 3}), seed=7)
        assert simulated_client(context())["name"] == "5"
    assert client["name"] == "3"
    assert isinstance(client["ledger"], ContextLedger)
    assert client["keys"] == SimulatedKeys(7, "3")


def test_a_real_node_gets_none():
    assert not in_simulation()
    with raises(ConfigurationError, "unsupported", "context"):
        simulated_client(context(**{"partition-id": 3}))


def test_a_simulation_ends_with_its_message_and_is_its_threads_own():
    seen = []
    with simulated_in_process():
        thread = threading.Thread(target=lambda: seen.append(in_simulation()))
        thread.start()
        thread.join()
        assert in_simulation()
    assert seen == [False]
    assert not in_simulation()
