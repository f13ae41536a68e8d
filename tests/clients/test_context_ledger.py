"""The ledger in a node's context: what was sent stands in it once, in the very bytes of the reply."""

import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from murmurfl.clients import ContextLedger
from murmurfl.privacy import Account, StreamRecord, protocol

SPACING = 2.0**-30
COUNTS = np.random.Generator(np.random.Philox(key=5)).integers(-(2**40), 2**40, 3000)
STREAM = StreamRecord("f", 2, 0, bytes(16), {1: COUNTS[::-1].copy(), 2: COUNTS}, (np.ones(3, np.float32),))
ACCOUNT = Account(4, {"s": 1.5, "r": -0.5})


def recorded(stream=STREAM):
    state = RecordDict()
    ledger = ContextLedger(state, "7")
    with ledger.exclusive() as page:
        page.commit("s", stream, ACCOUNT)
    return ledger


def reply(values, parts=3):
    arrays = ArrayRecord({str(i): Array(part.reshape(2, -1)) for i, part in enumerate(np.split(values, parts))})
    return RecordDict({protocol.ARRAYS: arrays})


def assert_says_the_same(ledger, stream=STREAM):
    with ledger.exclusive() as page:
        read, account = page.stream("s"), page.account()
    assert account == ACCOUNT
    assert list(read.pending) == list(stream.pending)
    for j, counts in stream.pending.items():
        assert read.pending[j].dtype == np.int64
        assert (read.pending[j] == counts).all()
    assert (read.release, read.ack, read.nonces, read.fingerprint) == (2, 0, bytes(16), "f")
    assert all((a == b).all() for a, b in zip(read.noise_state, stream.noise_state, strict=True))


def test_a_release_that_was_sent_weighs_nothing_beside_its_reply_and_can_be_read_as_before():
    ledger, sent = recorded(), reply(COUNTS * SPACING)
    before = len(pickle.dumps((sent, ledger.state)))
    ledger.keep_as_sent("s", sent)
    assert len(pickle.dumps((sent, ledger.state))) < before - COUNTS.nbytes
    assert_says_the_same(ledger)
    ledger.state = pickle.loads(pickle.dumps((sent, ledger.state)))[1]
    assert_says_the_same(ledger)


def test_the_next_record_has_nothing_left_of_the_one_before():
    ledger = recorded()
    ledger.keep_as_sent("s", reply(COUNTS * SPACING))
    later = StreamRecord("f", 2, 0, bytes(16), {2: COUNTS + 1}, STREAM.noise_state)
    with ledger.exclusive() as page:
        page.commit("s", later, ACCOUNT)
    assert_says_the_same(ledger, later)
    assert list(ledger.state["murmurfl/7/arrays/s"]) == ["pending-2", "state-0"]


def one_bit_off(values):
    values[-1] = np.nextafter(values[-1], np.inf)
    return values


@pytest.mark.parametrize(
    "other",
    [
        lambda values: values.astype(np.float32),
        lambda values: values[:2400],
        lambda values: one_bit_off(np.ldexp(values, 13)),
        lambda values: -values * np.where(np.arange(3000) % 2, 1, -1),
        lambda values: COUNTS.astype(np.uint64),
        np.zeros_like,
    ],
    ids=["float32", "fewer", "one bit off", "signs", "masked", "zeros"],
)
def test_a_reply_that_does_not_say_the_release_to_the_last_bit_is_not_kept_for_it(other):
    counts = COUNTS.copy()
    counts[-1] = 2**40 - 1
    stream = StreamRecord("f", 2, 0, bytes(16), {2: counts}, ())
    ledger = recorded(stream)
    before = pickle.dumps(ledger.state)
    sent = other(counts * SPACING)
    ledger.keep_as_sent("s", reply(sent))
    ledger.keep_as_sent("another session", reply(counts * SPACING))
    ledger.keep_as_sent("s", RecordDict())
    assert pickle.dumps(ledger.state) == before
    assert_says_the_same(ledger, stream)


def test_a_damaged_ledger_is_left_for_the_next_request_to_refuse():
    ledger = recorded()
    del ledger.state["murmurfl/7/arrays/s"]
    ledger.keep_as_sent("s", reply(COUNTS * SPACING))
    assert "murmurfl/7/arrays/s" not in ledger.state
