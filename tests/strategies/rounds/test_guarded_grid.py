"""The guard around a grid: bounds, deadlines, senders, and what it does where Flower has other private names."""

import ast
import logging
import threading
import time
import tracemalloc
from pathlib import Path

import httpx
import murmurfl.strategies
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from murmurfl.privacy import protocol
from murmurfl.strategies.rounds import guarded_grid
from murmurfl.strategies.rounds.guarded_grid import GuardedGrid, ReplyBounds, guarded
from murmurfl.strategies.rounds.replies import model_vector

from tests.harness.grid import NodesGrid, claim_identity
from tests.harness.wire import MIB, FakeSuperLink, Wire, body_of, json_body, wire_of, with_head

NODES = (10, 11, 12)
LIAR = 12
MODEL = ArrayRecord({"w": Array(np.zeros(1000))})


def content(size=3):
    arrays = ArrayRecord({"w": Array(np.ones(size))})
    return RecordDict({protocol.ARRAYS: arrays, protocol.CONFIG: ConfigRecord({"a": 1})})


class Link(FakeSuperLink):
    """Three nodes that answer with small records, one of which does with its answer what ``lie`` says."""

    def __init__(self, lie=None, size=3):
        self.lie, self.size = lie, size
        super().__init__(NODES, self._answer)
        self.guard = guarded(self.grid())
        self.guard.bounds = ReplyBounds.of(model_vector(MODEL)[0])

    def _answer(self, node_id, message):
        reply = Message(content(self.size), reply_to=message)
        wire = wire_of(reply)
        if node_id != LIAR or self.lie is None:
            return wire
        return self.lie(wire)

    def requests(self):
        claim_identity()
        return [Message(RecordDict({"n": ConfigRecord({"n": n})}), n, MessageType.TRAIN) for n in NODES]

    def ask(self, timeout=0.0):
        return list(self.guard.send_and_receive(self.requests(), timeout=timeout))


def told(replies):
    """What each node's reply is: ``fine``, or the code of its error."""
    return {
        reply.metadata.src_node_id: reply.error.code if reply.has_error() else "fine"
        for reply in sorted(replies, key=lambda one: one.metadata.src_node_id)
    }


OTHERS = {10: "fine", 11: "fine"}
ALL_BUT_LIAR = {**OTHERS, LIAR: protocol.MALFORMED_REPLY}


def chunk_of(wire):
    return next(one for one, kind in wire.kinds().items() if kind == "ArrayChunk")


def object_of(wire, kind):
    return next(one for one, known in wire.kinds().items() if known == kind)


def damaged(kind, change):
    def lie(wire):
        one = object_of(wire, kind)
        wire.objects[one] = change(wire.objects[one])
        return wire

    return lie


@pytest.mark.parametrize("kind", ["Message", "RecordDict", "ConfigRecord", "Array"])
def test_a_reply_that_does_not_parse_is_its_nodes_alone(kind):
    link = Link(damaged(kind, lambda content: with_head(content, body=b"\xff" * 9)))
    assert told(link.ask()) == ALL_BUT_LIAR
    assert len(link.confirmed) == 3  # its objects too are taken off the SuperLink
    assert told(link.ask()) == ALL_BUT_LIAR


@pytest.mark.parametrize("lengths", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("kind", ["ArrayChunk", "ConfigRecord", "Message"])
def test_six_hundred_mebibytes_are_not_read(kind, lengths):
    def lie(wire):
        wire.endless = {object_of(wire, kind): 600 * MIB}
        return wire

    link = Link(lie)
    link.lengths = lengths
    assert told(link.ask()) == ALL_BUT_LIAR
    assert link.sent <= 2 * MIB  # what was on its way already
    assert told(Link().ask()) == {**OTHERS, LIAR: "fine"}


def test_an_object_that_is_never_uploaded_keeps_nobody_waiting(caplog):
    link = Link(damaged("ArrayChunk", lambda content: None))
    started = time.monotonic()
    assert told(link.ask(timeout=0.2)) == OTHERS
    assert time.monotonic() - started < 10.0  # Flower waits 190 s
    assert "A reply of node 12 is dropped: it was announced, and not uploaded in time." in caplog.text
    assert len(link.confirmed) == 3


def test_an_object_that_is_uploaded_late_arrives_with_the_next_look():
    missing = {}

    def lie(wire):
        missing[chunk_of(wire)] = wire.objects[chunk_of(wire)]
        wire.objects[chunk_of(wire)] = None
        return wire

    link = Link(lie)
    ids = list(link.guard.push_messages(link.requests()))
    assert told(link.guard.pull_messages(ids)) == OTHERS
    assert not list(link.guard.pull_messages(ids))
    link.objects.update(missing)
    (late,) = link.guard.pull_messages(ids)
    assert told([late]) == {LIAR: "fine"}
    assert (late.content[protocol.ARRAYS]["w"].numpy() == 1).all()
    assert len(set(link.pulled)) == len(link.pulled) - 2  # nothing but the missing one was asked for again


def test_a_reply_whose_objects_are_gone_is_lost_and_not_malformed():
    def lie(wire):
        wire.gone = {wire.root}
        return wire

    assert told(Link(lie).ask()) == {**OTHERS, LIAR: ErrorCode.MESSAGE_UNAVAILABLE}


@pytest.mark.parametrize(("field", "value"), [("_src_node_id", 10), ("_reply_to_message_id", "f" * 64)])
def test_nobody_answers_for_another_node_or_to_another_request(field, value):
    """The metadata inside a reply are its sender's own words; Flower's grid believes them."""

    class Liar(Link):
        def _answer(self, node_id, message):
            reply = Message(content(), reply_to=message)
            honest = wire_of(reply)
            if node_id != LIAR:
                return honest
            vars(reply.metadata)[field] = value
            lying = wire_of(reply)
            lying.header.metadata.CopyFrom(honest.header.metadata)
            lying.header.metadata.message_id = lying.root
            return lying

    assert told(Liar().ask()) == ALL_BUT_LIAR


def test_messages_that_answer_nothing_cost_nobody_a_reply():
    """A member may store messages for the server itself, of any size; they come with the next list of replies."""
    link = Link()
    claim_identity()
    for size in (10, 3 * MIB, 70 * MIB):
        wire = wire_of(Message(content(), 1, MessageType.TRAIN))
        wire.header.metadata.reply_to_message_id = ""
        wire.header.error.reason = "x" * size
        wire.tree.children.extend(ObjectTree(object_id=f"{n:064x}") for n in range(20_000))
        link.unasked.append(wire)
    client, read = link.guard.unguarded._runtime_client, []
    pull = client.PullMessages
    client.PullMessages = lambda request: read.append(pull(request)) or read[-1]
    assert told(link.ask()) == {**OTHERS, LIAR: "fine"}
    assert read[0].ByteSize() < MIB  # of 73 MiB and three trees of 1.3 MiB


BOMB = MIB - 2000


def repeated(field):
    return lambda: field * (BOMB // len(field))


def body_of_record(entries):
    return lambda: body_of(ConfigRecord(entries()).deflate())


def json_list(text):
    return lambda: f'{{"a": [{text * (BOMB // len(text) - 10)}1]}}'.encode()


BOMBS = {
    "numbers": ("ConfigRecord", repeated(b"\x7f")),
    **{
        f"fields {number}": ("ConfigRecord", repeated(field))
        for number, field in enumerate((b"\x0a\x00", b"\x12\x00", b"\x0a\x02\x0a\x00", b"\x0a\x04\x12\x02\x12\x00"))
    },
    "a list": ("ConfigRecord", body_of_record(lambda: {"a": [1] * (BOMB - 100)})),
    "names": ("ConfigRecord", body_of_record(lambda: {str(number): 0 for number in range(60_000)})),
    **{f"json {text}": ("RecordDict", json_list(text)) for text in ("[],", "{},", '"",', "1,", "[[[[]]]],")},
}
"""Replies within the bounds whose contents unpack to much more: what is damaged, and a function that makes its body."""


def bomb(name):
    if name == "chunks":
        return damaged("Array", lambda content: json_body(content, arraychunk_ids=[0] * (BOMB // 3)))
    kind, make = BOMBS[name]
    body = make()
    return damaged(kind, lambda content: with_head(content, body=body))


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("name", [*BOMBS, "chunks"])
def test_memory_stays_below_the_stated_multiple(name):
    link = Link(bomb(name))
    link.ask()  # whatever is imported or cached on the way
    tracemalloc.start()
    told(link.ask())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 5 * link.guard.bounds.arrays + 64 * link.guard.bounds.entries


def test_memory_of_a_large_model_stays_below_the_stated_multiple():
    values = 2**20
    link = Link(size=values)
    link.guard.bounds = ReplyBounds.of([("w", (values,), np.dtype(np.float64))])
    assert link.guard.bounds.arrays == 16 * values + MIB
    ids = list(link.guard.push_messages(link.requests()))
    add, made = link.add, {}
    link.add = lambda wire: made.update(wire.objects) or add(Wire(wire.header, wire.tree, dict.fromkeys(wire.objects)))
    assert list(link.guard.pull_messages(ids)) == []
    link.objects = made  # uploaded now: what is measured is the guard, and not what the nodes make
    tracemalloc.start()
    replies = list(link.guard.pull_messages(ids))
    peak, kept = tracemalloc.get_traced_memory()[1], sum(len(r.content["arrays"]["w"].data) for r in replies)
    tracemalloc.stop()
    assert kept >= 3 * 8 * values
    assert peak - kept <= 5 * link.guard.bounds.arrays


@pytest.mark.parametrize(
    ("values", "fits"), [(1000, True), (2000, True), (2000 + MIB // 8, False), (10 * MIB // 8, False)]
)
def test_arrays_may_be_twice_the_model_and_a_mebibyte(values, fits):
    link = Link(size=values)
    assert set(told(link.ask()).values()) == {"fine" if fits else protocol.MALFORMED_REPLY}


def test_the_log_names_node_and_client_and_says_how_it_is_excluded(caplog):
    link = Link(damaged("Message", body_of))
    link.guard.node_names[LIAR] = "clinic 3"
    link.ask()
    link.ask()
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert first.startswith("A reply of node 12 ('clinic 3') is dropped: it ")
    assert "`murmurfl federation exclude FOLDER 'clinic 3'` with the run's folder" in first
    assert "`flwr supernode unregister 12`" in first
    assert "exclude" not in second


def test_a_look_for_many_replies_asks_the_superlink_once():
    link = Link()
    link.lie = lambda wire: None
    asked = []
    handle = link._pull_messages
    link._pull_messages = lambda content: asked.append(content) or handle(content)
    assert told(link.ask()) == OTHERS
    assert len(asked) == 1


# Where Flower's private names are others, or a grid is somebody's own.


class Wrapped(NodesGrid):
    """A grid of somebody's own around Flower's."""

    def __init__(self, grid):
        self.inner = grid

    def push_messages(self, messages):
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids):
        return self.inner.pull_messages(message_ids)


@pytest.fixture(params=["other names", "wrapped"])
def other(request, monkeypatch):
    """A guard that has to leave pulling to the grid."""

    def made(lie):
        link = Link(lie)
        grid = link.grid()
        if request.param == "wrapped":
            grid = Wrapped(grid)
        else:
            monkeypatch.setattr(guarded_grid._Internals, "found", classmethod(lambda cls, grid: None))
        link.guard = guarded(grid)
        return link

    return made


def test_other_grids_are_pulled_reply_by_reply(other):
    link = other(damaged("Message", lambda content: with_head(content, body=b"\xff" * 9)))
    assert told(link.ask(timeout=5.0)) == ALL_BUT_LIAR


def test_other_grids_hang_for_one_reply_at_most(other, monkeypatch):
    monkeypatch.setattr(guarded_grid, "_PULL_PATIENCE_S", 0.2)
    link = other(damaged("ArrayChunk", lambda content: None))
    started = time.monotonic()
    assert told(link.ask(timeout=0.5)) == OTHERS
    assert time.monotonic() - started < 10.0
    assert any(thread.name == "murmurfl-pull" and thread.daemon for thread in threading.enumerate())
    link.gone = set(link.objects)  # ends Flower's own wait, in threads that a process joins


def test_other_grids_answers_count_for_the_node_that_was_asked(other):
    def lie(wire):
        return wire

    link = other(lie)
    link.guard._asked = {}
    ids = list(link.guard.push_messages(link.requests()))
    link.guard._asked[ids[2]] = 99  # as if another node had been asked
    assert told(link.guard.pull_messages(ids)) == {**OTHERS, 99: protocol.MALFORMED_REPLY}


def test_a_server_that_cannot_be_reached_is_nobodys_malformed_reply():
    link = Link()

    def refuse(request):
        return httpx.Response(500)

    ids = list(link.guard.push_messages(link.requests()))
    link.guard.unguarded._runtime_client._client = httpx.Client(transport=httpx.MockTransport(refuse))
    with pytest.raises(httpx.HTTPStatusError):
        link.guard.pull_messages(ids)


def test_a_grid_of_this_process_raises_what_it_raises():
    class Broken(NodesGrid):
        def pull_messages(self, message_ids):
            raise KeyError("a bug")

    guard = guarded(Broken(None, 1))
    with pytest.raises(KeyError, match="a bug"):
        guard.pull_messages(["1"])


def test_a_grid_has_one_guard():
    grid = Link().grid()
    assert guarded(grid) is guarded(grid) is guarded(guarded(grid))
    assert isinstance(guarded(grid), GuardedGrid)


PULLS = {"pull_messages", "send_and_receive"}


def unguarded_pulls(path):
    """Calls that take replies from anything but a guard."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if any(name in text for name in PULLS) else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in PULLS:
            continue
        owner = node.func.value
        if not (isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "guarded"):
            yield f"{path.name}:{node.lineno}"


def test_no_reply_of_the_product_is_pulled_past_the_guard():
    root = Path(murmurfl.strategies.__file__).parents[1]
    files = [path for part in ("strategies", "app", "clients", "privacy") for path in (root / part).rglob("*.py")]
    # The guard, a grid that calls itself, and a project that is tried on one.
    known = {"guarded_grid.py", "inprocess.py", "foreign.py"}
    found = [one for path in files for one in unguarded_pulls(path) if path.name not in known]
    # A lossy grid is a guard, and calls its own class.
    assert [one.partition(":")[0] for one in found] == ["training_run.py"]
    assert len(files) > 100


def test_a_pull_past_the_guard_would_be_found(tmp_path):
    (tmp_path / "a.py").write_text("def f(grid):\n    return guarded(grid).pull_messages([]), grid.pull_messages([])\n")
    assert list(unguarded_pulls(tmp_path / "a.py")) == ["a.py:2"]
