"""Whatever bytes a member sends: its reply is dropped, and the training goes on as if it had sent none.

Replies pass Flower's own HTTP client and its own parsing; only the SuperLink is a stand-in (tests/harness/wire.py). The
cases are those of tests/harness/damage.py, in every kind of answer that a server asks for, in a fixed order.
"""

import json
import logging
from contextlib import suppress
from itertools import count

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from murmurfl.privacy import ConfigurationError, MurmurflError, protocol
from murmurfl.privacy.accounting.guarantee import Figures, stated_figures, stated_guarantee
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.accounting.noise_forecast import forecast_of
from murmurfl.strategies import CorrelatedFedAvg, OnlineFedSGD, ResultFolder
from murmurfl.strategies.rounds.client_registry import Awaited, ClientRegistry
from murmurfl.strategies.rounds.guarded_grid import guarded
from murmurfl.strategies.rounds.preflight import foresee
from murmurfl.strategies.rounds.replies import ask_statements

from tests.harness import damage
from tests.harness.callbacks import AfterRound
from tests.harness.errors import raises
from tests.harness.grid import claim_identity
from tests.harness.secure import START as SECURE_START
from tests.harness.secure import SecureGrid, build, clients
from tests.harness.wire import FakeSuperLink, wire_of

pytestmark = pytest.mark.usefixtures("no_result_folder")

HONEST = ("0", "1", "2")
START = ArrayRecord({"w": Array(np.zeros((2, 2))), "b": Array(np.zeros(3))})
NODE = 1000
CAP = 10_000


def hello(name):
    return {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: name}


def statement(name):
    counts = {"releases": 0, "samples-used": 0, "max-participations": CAP, protocol.RELEASES_LEFT: CAP}
    mus = {"mu-spent": 0.0, "mu-guaranteed": 1.0, "mu-budget": 1.0, "delta": 1e-5}
    noise = {"noise-std": 1.0, "sensitivity": 1.0, protocol.LONGEST_RELEASE: 1.0, protocol.NOISE_IN_ALL: 1.0}
    words = {"mechanism": "tree", "trust": "untrusted-server", "noise-quality": "exact", protocol.CLIP_UNIT: "sample"}
    return {protocol.CLIENTS: name, **counts, **mus, **noise, **words, "unit": "sample", protocol.RECORD: "row"}


class Node:
    """A client that answers what it is asked; what it releases is 0 unless it is an honest one."""

    def __init__(self, name):
        self.name, self.honest = name, name in HONEST

    def answer(self, message):
        config = message.content[protocol.CONFIG]
        asked = config.get(protocol.ASK)
        if asked is not None:
            said = hello(self.name) if asked == protocol.ASK_HELLO else statement(self.name)
            return Message(RecordDict({protocol.CONFIG: ConfigRecord(said)}), reply_to=message)
        value = int(self.name) + 1.0 + config[protocol.SERVER_ROUND] / 4 if self.honest else 0.0
        numbers = {protocol.RELEASE: config[protocol.ACK] + 1, protocol.ACK: config[protocol.ACK]}
        more = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.NUM_EXAMPLES: 3, protocol.DELTA: 1e-5}
        figures = {protocol.SENSITIVITY: 1.0, protocol.MU_GUARANTEED: 1.0, protocol.CLIENT_LEVEL: 0}
        arrays = {"w": Array(np.full((2, 2), value)), "b": Array(np.full(3, value))}
        content = {
            protocol.ARRAYS: ArrayRecord(arrays),
            protocol.METRICS: MetricRecord({**numbers, **more, **figures}),
            protocol.CONFIG: ConfigRecord({protocol.CLIENT: self.name}),
        }
        return Message(RecordDict(content), reply_to=message)

    def training_reply(self):
        """An honest reply to learn the cases from."""
        asked = {protocol.SERVER_ROUND: 1, protocol.ACK: 0}
        request = Message(RecordDict({protocol.CONFIG: ConfigRecord(asked)}), dst_node_id=NODE, message_type="train")
        request.metadata.__dict__["_message_id"] = "f" * 64
        return self.answer(request)


def link_of(names, damaged=lambda name, message, reply: wire_of(reply)):
    """A SuperLink with a node for every name; ``damaged`` gives what becomes of the reply of one that is not honest."""
    nodes = {NODE + place: Node(name) for place, name in enumerate(names)}

    def answer(node_id, message):
        node = nodes[node_id]
        reply = node.answer(message)
        reply.metadata.__dict__["_src_node_id"] = node_id
        return wire_of(reply) if node.honest else damaged(node.name, message, reply)

    return FakeSuperLink(nodes, answer)


def asks(message, what=None):
    return message.content[protocol.CONFIG].get(protocol.ASK) == what


class Rounds:
    """A training whose hostile nodes answer each round with one case after the other; None for no answer at all."""

    def __init__(self, some, liars, kind=OnlineFedSGD, **options):
        self.cases, self.left = list(some), liars
        names = [*HONEST, *(str(3 + place) for place in range(liars))]
        self.rounds = -(-len(self.cases) // liars)
        self.link = link_of(names, self._damaged)
        self.sent, self.heard = [], []
        own = {"local_steps": 1} if kind is OnlineFedSGD else {}
        common = {"num_clients": len(names), "session": "s", "seed": 1, "learning_rate": 0.5, "node_deadline_s": 0.0}
        self.strategy = kind(**{**common, **own, "callbacks": [AfterRound(self._after)], **options})

    def _damaged(self, name, message, reply):
        if not asks(message):
            return wire_of(reply)
        place = len(self.sent)
        self.sent.append(name)
        case = self.cases[place] if place < len(self.cases) else None
        return None if case is None else case[1](wire_of(reply), reply)

    def _after(self, report, _):
        self.heard.append({name: self.strategy.participation.get(name) for name in HONEST})

    def run(self):
        self.strategy.start(self.link.grid(), START, num_rounds=self.rounds, timeout=0.0)
        return self


def assert_unharmed(run, model=True):
    """All honest releases are in the model, whatever became of the others'."""
    assert run.heard == [dict.fromkeys(HONEST, number) for number in range(1, run.rounds + 1)]
    for report in run.strategy.history:
        counted = report.aggregated + report.late + report.malformed + report.lost + report.refusals + report.awaited
        assert counted == report.asked
    if model:
        absent = Rounds([None] * len(run.cases), run.left).run()
        np.testing.assert_array_equal(run.strategy.state.x, absent.strategy.state.x)
        assert np.linalg.norm(run.strategy.state.x) > 0


LIARS = 24


thirds = pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.more_cases) for part in (1, 2))])


def training_cases(seed=0):
    return list(damage.cases(Node("3").training_reply(), seed))


def figure_cases():
    return [one for one in training_cases() if one[0].startswith(("metrics", "config"))]


@pytest.fixture(autouse=True)
def quiet(caplog):
    claim_identity()
    caplog.set_level(logging.CRITICAL, "flwr")


@thirds
def test_no_training_reply_harms_a_training(part):
    run = Rounds(training_cases()[part::3], LIARS).run()
    assert_unharmed(run)
    assert len(run.sent) >= len(run.cases) > 550 // 3
    assert sum(report.malformed for report in run.strategy.history) > len(run.cases) / 2


@thirds
def test_no_training_reply_harms_rounds_that_do_not_wait(part):
    run = Rounds(training_cases(seed=1)[part::3], LIARS, quorum=0.1).run()
    assert all(set(heard.values()) != {None} for heard in run.heard)
    assert run.strategy.history[-1].server_round == run.rounds


def test_no_figure_harms_averaging_of_updates():
    """CorrelatedFedAvg reads what clients state of their noise with every update."""
    run = Rounds(figure_cases(), LIARS, kind=CorrelatedFedAvg).run()
    assert_unharmed(run, model=False)


def reply_of(kind):
    """An honest answer to a query of a kind."""
    config = ConfigRecord({protocol.ASK: kind, protocol.NONCE: "n"})
    request = Message(RecordDict({protocol.CONFIG: config}), dst_node_id=NODE + 3, message_type="query")
    request.metadata.__dict__["_message_id"] = "f" * 64
    return Node("3").answer(request)


class Queried:
    """A SuperLink of three honest nodes, and one more for every case, which answers so."""

    def __init__(self, kind):
        self.cases = dict(zip(map(str, count(3)), damage.cases(reply_of(kind)), strict=False))
        names = [*HONEST, *self.cases]
        self.nodes = {one: NODE + place for place, one in enumerate(names)}
        self.grid = link_of(names, lambda name, _, reply: self.cases[name][1](wire_of(reply), reply)).grid()


def test_no_handshake_keeps_others_from_being_met():
    queried = Queried(protocol.ASK_HELLO)
    directory = ClientRegistry(3, 0.0)
    directory.meet(queried.grid, Awaited(3))
    assert directory.node_map() == {name: NODE + int(name) for name in HONEST}


def test_there_are_two_thousand_cases():
    queries = sum(len(Queried(kind).cases) for kind in (protocol.ASK_HELLO, protocol.ASK_PRIVACY))
    assert 2 * len(training_cases()) + len(figure_cases()) + queries > 2000


def test_no_statement_ends_a_training():
    """What is read from statements is read after each: forecast, guarantee, caps, and the result's JSON."""
    queried = Queried(protocol.ASK_PRIVACY)
    asked = {"session": "s", "num_parameters": 7, "message_type": "query", "timeout": 0.0, "entries": {}}
    all_stated = ask_statements(queried.grid, queried.nodes, **asked)
    assert {*HONEST} <= all_stated.keys()
    assert 80 < len(all_stated) < len(queried.cases) - 300
    strategy = Rounds([], 1).strategy
    strategy.clients.restore(list(queried.nodes))
    strategy.sampler.settle(len(queried.nodes))
    foresee(strategy.sampler, all_stated, range(1, 6), allow_exhaustion=True)
    for name in all_stated:
        stated = {one: all_stated[one] for one in (*HONEST, name)}
        forecast = {"num_parameters": 7, "clients": 4, "per_round": 4, "rounds": 5}
        forecast_of(strategy.aggregator.read_noise(stated), **forecast)
        with suppress(ConfigurationError):  # where one says that its server is trusted
            assert stated_guarantee(stated, 4, masked=False).sentence
        stated_figures(Figures(Loss.of(1.0)), stated, 4)
        json.dumps(stated)


def test_a_statement_of_trust_takes_no_result_away(tmp_path):
    """One client of four states that it trusts a server that adds no noise: the run has its folder all the same."""

    def trusting(name, message, reply):
        if not asks(message, protocol.ASK_PRIVACY):
            return wire_of(reply)
        said = {**reply.content[protocol.CONFIG], "trust": "trusted-server"}
        changed = Message(RecordDict({protocol.CONFIG: ConfigRecord(said)}), reply_to=message)
        changed.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        return wire_of(changed)

    options = {"num_clients": 4, "session": "s", "seed": 1, "learning_rate": 0.5, "node_deadline_s": 0.0}
    strategy = OnlineFedSGD(local_steps=1, **options, callbacks=[ResultFolder(tmp_path / "run")])
    strategy.start(link_of([*HONEST, "3"], trusting).grid(), START, num_rounds=1, timeout=0.0)
    said = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(said["clients"]) == {*HONEST, "3"}


PARTS = [0, *(pytest.param(part, marks=pytest.mark.more_cases) for part in range(1, 10))]
"""Parts of the cases; a client of these tests makes no more than 30 releases."""


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("part", PARTS)
def test_no_answer_of_a_helper_ends_a_training(part):
    """A round whose helper's answer cannot be read is closed, or asks again; the next one is opened."""
    nodes, rounds = SecureGrid(clients()), 24
    turn, sent, cases = count(), [], []

    def answer(node_id, message):
        reply = nodes.handle(message, message.metadata.message_id)
        if node_id != SecureGrid.first_helper or reply.has_error():
            return wire_of(reply)
        kind = message.content[protocol.CONFIG].get(protocol.ASK)
        if kind not in (protocol.ASK_WHETHER, protocol.ASK_OPEN):
            return wire_of(reply)
        wire = wire_of(reply)
        if next(turn) % 2:  # every other answer is true: patience is for helpers that never answer
            return wire
        known = [one for one in damage.cases(reply) if "600 MiB" not in one[0]]
        case = known[(rounds * part + len(sent)) * 7 % len(known)]
        cases.append(case[0])
        sent.append(kind)
        return case[1](wire, reply)

    link = FakeSuperLink(nodes.get_node_ids(), answer)
    strategy = build(secure={"patience": 20, "max_failed_aggregations": rounds}, clients_per_round=6)
    strategy.clients.sleep = lambda seconds: None
    strategy.start(link.grid(), SECURE_START, num_rounds=rounds, timeout=0.0)
    assert len(strategy.history) == rounds
    assert len(set(cases)) > 20
    assert {protocol.ASK_WHETHER, protocol.ASK_OPEN} == set(sent)
    assert sum(report.aggregated for report in strategy.history) >= 2 * rounds


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("part", PARTS)
def test_no_masked_reply_harms_a_sum(part):
    """One liar of six under masks: its replies are left out, or its sum is skipped as the mathematics allows."""
    nodes, rounds = SecureGrid(clients()), 20
    places = count()

    def answer(node_id, message):
        reply = nodes.handle(message, message.metadata.message_id)
        if node_id != nodes.first_node + 5 or reply.has_error() or protocol.ARRAYS not in reply.content:
            return wire_of(reply)
        known = list(damage.cases(reply))
        return known[(rounds * part + next(places)) * 37 % len(known)][1](wire_of(reply), reply)

    link = FakeSuperLink(nodes.get_node_ids(), answer)
    strategy = build(secure={"max_failed_aggregations": rounds}, clients_per_round=6)
    strategy.start(link.grid(), SECURE_START, num_rounds=rounds, timeout=0.0)
    assert len(strategy.history) == rounds
    assert sum(report.aggregated >= 5 for report in strategy.history) >= 3 * rounds // 4


def test_a_helper_that_never_answers_ends_a_training_with_its_reason():
    """Sums need every helper, which is said; the error is the strategy's own and names it."""
    nodes = SecureGrid(clients())

    def answer(node_id, message):
        wire = wire_of(nodes.handle(message, message.metadata.message_id))
        asked = message.content[protocol.CONFIG].get(protocol.ASK)
        if node_id == SecureGrid.first_helper and asked == protocol.ASK_OPEN:
            wire.objects[wire.root] = b"Message  0\0"
        return wire

    link = FakeSuperLink(nodes.get_node_ids(), answer)
    strategy = build(secure={}, clients_per_round=6)
    with raises(MurmurflError, "missing", match="a helper did not answer"):
        strategy.start(link.grid(), SECURE_START, num_rounds=3, timeout=0.0)
    assert guarded(strategy._grid).node_names[SecureGrid.first_helper] == "helper-0"
