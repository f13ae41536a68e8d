"""Health and metrics of nodes and servers: the addresses that show them, the closed list, and what depends on data."""

import http.client
import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
import yaml
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.fleet import health as endpoint
from murmurfl.app.fleet import health as health
from murmurfl.app.fleet.health import (
    BUILD,
    BUILD_LABELS,
    FIGURES,
    LONGEST_REQUEST,
    MOST_CONNECTIONS,
    OTHER,
    PROBLEMS,
    Address,
    Addresses,
    Answer,
    BudgetWatch,
    Endpoint,
    NodeFigures,
    NodeHealth,
    Shown,
    figures_of,
    health_answer,
    kept_a_while,
    shown,
)
from murmurfl.app.fleet.servers.gate import SuperLinkOptions
from murmurfl.app.fleet.servers.watched_server import ServerHealth
from murmurfl.app.nodes.diagnosis import CAUSES
from murmurfl.app.nodes.journal import Journal, noting
from murmurfl.app.nodes.node_app import client_of
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.privacy import ConfigurationError, SQLiteLedger, gdp_epsilon, protocol
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node
from tests.harness.schemas import write_samples

ANY = Address("127.0.0.1", 0)


@pytest.fixture
def listening():
    with Endpoint(ANY, {"/metrics": lambda: Answer(b"figure 1\n")}) as made:
        yield made


def connected(to):
    made = socket.create_connection((to.address.host, to.address.port), timeout=5)
    made.settimeout(5)
    return made


def all_of(connection):
    """What comes until the other side hangs up."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def ask(to, raw):
    with connected(to) as connection:
        try:
            connection.sendall(raw)
        except ConnectionError:
            return b""
        return all_of(connection)


def get(to, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection(to.address.host, to.address.port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_path_answers_whoever_asks_and_others_are_not_found(listening):
    assert get(listening) == (200, b"figure 1\n")
    assert get(listening, "/metrics?name[]=x") == (200, b"figure 1\n")
    assert get(listening, method="HEAD") == (200, b"")
    assert get(listening, "/../../etc/passwd") == (404, b"Not Found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_written(listening, method):
    assert get(listening, method=method) == (405, b"Method Not Allowed\n")


@pytest.mark.parametrize(
    "raw", [b"GARBAGE\r\n\r\n", b"\r\n\r\n", b"GET /metrics SMTP\r\n\r\n", b"\xff\x00 a b\r\n\r\n"]
)
def test_what_is_no_request_gets_a_fixed_answer(listening, raw):
    assert ask(listening, raw).split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"HTTP/1.1 405 Method Not Allowed")
    assert get(listening)[0] == 200


def test_a_huge_request_is_cut_off(listening):
    answer = ask(listening, b"GET /" + b"a" * (4 * LONGEST_REQUEST) + b" HTTP/1.1\r\n\r\n")
    assert answer == b""
    assert get(listening)[0] == 200


def test_a_slow_client_is_cut_off(monkeypatch, listening):
    monkeypatch.setattr(endpoint, "DEADLINE_S", 0.2)
    assert ask(listening, b"GET /metrics HTTP/1.1\r\nHost: ") == b""
    assert get(listening)[0] == 200


def test_many_slow_clients_keep_nobody_else_out(listening):
    slow = [connected(listening) for _ in range(3 * MOST_CONNECTIONS)]
    try:
        for connection in slow:
            connection.send(b"GET ")
        assert get(listening)[0] == 200
        assert len(listening._open) <= MOST_CONNECTIONS
    finally:
        for connection in slow:
            connection.close()


def test_an_answer_that_cannot_be_made_says_nothing_of_why(caplog):
    def fails():
        raise ValueError("a secret")

    with Endpoint(ANY, {"/metrics": fails}) as made:
        assert get(made) == (500, b"Internal Server Error\n")
        assert get(made)[0] == 500


def test_it_ends_with_its_block_whoever_is_still_there():
    with Endpoint(ANY, {}) as made:
        waiting = connected(made)
    began = time.monotonic()
    assert all_of(waiting) == b""
    assert time.monotonic() - began < 5
    waiting.close()
    with pytest.raises(ConnectionRefusedError):
        connected(made)


def test_an_address_that_is_taken_is_refused_with_the_way_out(listening):
    with raises(ConfigurationError, "failed", match="Choose another address"), Endpoint(listening.address, {}):
        pass


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("typed", "host", "port", "local"),
    [
        ("9464", "127.0.0.1", 9464, True),
        (":9464", "127.0.0.1", 9464, True),
        ("localhost:1", "localhost", 1, True),
        ("0.0.0.0:9464", "0.0.0.0", 9464, False),
        ("[::1]:9464", "::1", 9464, True),
        ("[::]:9464", "::", 9464, False),
        ("node.example.org:65535", "node.example.org", 65535, False),
    ],
)
def test_an_address_without_a_host_is_this_computers_own(typed, host, port, local):
    address = Address.read(typed)
    assert (address.host, address.port, address.is_local) == (host, port, local)
    assert Address.read(str(address)) == address


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("typed", ["", "host", "host:", "host:0", "host:65536", "host:9x", "::1", "1:2:3", "host:-1"])
def test_what_is_no_address_is_refused(typed):
    with raises(ConfigurationError, "malformed", "address"):
        Address.read(typed)


def test_health_and_figures_may_share_an_address(caplog):
    with Endpoint(ANY, {}) as free:
        port = free.address.port
    with shown(Addresses(str(port), f"127.0.0.1:{port}"), lambda: Answer(b"well"), lambda: b"figure 1\n"):
        to = Endpoint(Address("127.0.0.1", port), {})  # never started: where to ask
        assert get(to, "/health") == (200, b"well")
        assert get(to, "/metrics") == (200, b"figure 1\n")
    assert "there is no password" not in caplog.text


def test_figures_are_made_once_a_second_whoever_asks():
    made, times = [], iter([0.0, 0.2, 0.9, 1.1, 1.2])

    def make():
        made.append(1)
        return Answer(str(len(made)).encode())

    answer = kept_a_while(make, 1.0, lambda: next(times))
    assert [answer().content for _ in range(5)] == [b"1", b"1", b"1", b"2", b"2"]


def test_an_address_of_the_network_is_warned_of(caplog):
    with Endpoint(Address("0.0.0.0", 0), {}) as free:
        port = free.address.port
    with shown(Addresses(health=f"0.0.0.0:{port}"), lambda: Answer(b""), lambda: b""):
        assert "there is no password" in caplog.text


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(clock, monkeypatch):
    made = Journal()
    monkeypatch.setattr(made, "reached", lambda: setattr(made, "reached_at", clock.now))
    return made


def test_a_node_is_well_from_its_connection_to_its_end(journal, clock):
    node = NodeHealth(journal, clock)
    said = [node.problem]
    for entry, facts in (
        ("started", {"kind": "node", "name": "n"}),
        ("connecting", {"superlink": "a:1"}),
        ("connected", {"superlink": "a:1"}),
        ("released", {"run": 1, "session": "s", "round": 1, "release": 1}),
        ("disconnected", {"superlink": "a:1", "cause": "refused"}),
        ("refused", {"run": 1, "reason": "cap-reached"}),  # an answer that was on its way
        ("contact", {"superlink": "a:1"}),
        ("stopped", {}),
    ):
        journal.note(entry, **facts)
        said.append(node.problem)
    lost, stopped = health.DISCONNECTED, health.STOPPED
    assert said == [health.STARTING, health.STARTING, health.CONNECTING, "", "", lost, lost, "", stopped]


def test_a_node_whose_supernode_is_silent_is_not_well(journal, clock):
    node = NodeHealth(journal, clock)
    journal.note("connected", superlink="a:1")
    clock.now += health.SILENT_S - 1
    assert not node.problem
    clock.now += 2
    assert node.problem == health.NO_ANSWER
    journal.reached()
    assert not node.problem


def test_a_node_that_has_not_heard_its_superlink_for_long_is_not_well(journal, clock):
    node = NodeHealth(journal, clock)
    journal.note("connected", superlink="a:1")
    clock.now += health.UNHEARD_S + 1
    journal.reached()
    assert node.problem == health.NOT_HEARD
    journal.note("contact", superlink="a:1")
    assert not node.problem


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("problem", ["", *health.PROBLEMS])
def test_an_answer_is_a_status_and_a_fixed_reason(problem):
    answer = health_answer("node", problem)
    said = json.loads(answer.content)
    assert answer.status == (503 if problem else 200)
    assert said == (
        {"status": "failed", "kind": "node", "reason": problem} if problem else {"status": "ok", "kind": "node"}
    )


def test_a_server_is_well_while_its_superlink_answers(clock):
    answers = [False]
    server = ServerHealth(lambda: answers[0], clock)
    said = [server.problem]

    def then(seconds=0.0, *, ask=True):
        clock.now += seconds
        if ask:
            server.ask()
        said.append(server.problem)

    server.started()
    then()
    then(100.0)  # still not there
    answers[0] = True
    then()
    answers[0] = False
    then(10.0)
    then(60.0)
    server.ended()
    then()
    answers[0] = True
    server.started()
    then(ask=False)
    then()
    unwell = health.NOT_LISTENING
    starting = health.STARTING
    assert said == [starting, starting, unwell, "", "", unwell, health.NOT_RUNNING, starting, ""]
    assert server.restarts == 1


def test_an_answer_of_the_superlink_before_does_not_count_for_the_next(clock):
    server = ServerHealth(lambda: bool(restart()), clock)

    def restart():
        clock.now += 1.0
        server.ended()
        server.started()
        return True

    server.started()
    server.ask()
    assert server.problem == health.STARTING


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("127.0.0.1", 8000, "")),
        (["--host", "0.0.0.0", "--port=9", "--database", "x"], ("0.0.0.0", 9, "")),
        (["--ssl-certfile", "a.pem", "--ssl-ca-certfile", "b"], ("127.0.0.1", 8000, "a.pem")),
        (["--ssl-certfile", "a.pem", "--insecure"], ("127.0.0.1", 8000, "")),
        (["--port"], ("127.0.0.1", 8000, "")),
        (["--port", "x"], ("127.0.0.1", 8000, "")),
    ],
)
def test_a_superlinks_address_is_read_from_its_options(options, expected):
    read = SuperLinkOptions.read(options)
    assert (read.host, read.port, read.certificate) == expected


@pytest.mark.parametrize(
    ("named", "file"),
    [
        (["--database", "a/b.db"], "a/b.db"),
        (["--database=sqlite:////srv/b.db?timeout=9"], "/srv/b.db"),
        ([], None),
        (["--database", ":flwr-in-memory:"], None),
        (["--database", "sqlite:///:memory:"], None),
        (["--database", "postgresql://there/b"], None),
    ],
)
def test_a_superlinks_database_is_a_file_unless_it_is_in_memory_or_elsewhere(named, file):
    read = SuperLinkOptions.read(named).database
    assert (read and str(read)) == file


# Whoever adds a figure adds it here, and by that says: it does not depend on anybody's data.
NODE = {
    "murmurfl_started_timestamp_seconds": (),
    "murmurfl_healthy": (),
    "murmurfl_connected": (),
    "murmurfl_last_contact_timestamp_seconds": (),
    "murmurfl_rounds_total": (),
    "murmurfl_round_seconds": (),
    "murmurfl_releases_total": (),
    "murmurfl_repeated_total": (),
    "murmurfl_refusals_total": ("reason",),
    "murmurfl_disconnections_total": ("cause",),
    "murmurfl_certificate_expiry_timestamp_seconds": (),
    "murmurfl_budget_mu": (),
    "murmurfl_budget_left_mu": (),
    "murmurfl_budget_left_epsilon": (),
    "murmurfl_budget_local_left_mu": (),
    "murmurfl_sessions": (),
    "murmurfl_ledger_readable": (),
    "murmurfl_build_info": ("kind", "version", "flower", "python"),
}
OF_THE_NODE_ALONE = {name for name in NODE if "budget" in name} | {
    "murmurfl_releases_total",
    "murmurfl_repeated_total",
    "murmurfl_sessions",
    "murmurfl_ledger_readable",
}
HELPER = {name: labels for name, labels in NODE.items() if name not in OF_THE_NODE_ALONE} | {
    "murmurfl_openings_total": ()
}
SERVER = {
    "murmurfl_started_timestamp_seconds": (),
    "murmurfl_healthy": (),
    "murmurfl_superlink_running": (),
    "murmurfl_superlink_restarts_total": (),
    "murmurfl_runs_total": ("end",),
    "murmurfl_last_contact_timestamp_seconds": (),
    "murmurfl_round": (),
    "murmurfl_rounds_planned": (),
    "murmurfl_rounds_total": (),
    "murmurfl_round_seconds": (),
    "murmurfl_closed_rounds_total": (),
    "murmurfl_asked_total": (),
    "murmurfl_releases_total": (),
    "murmurfl_lost_total": (),
    "murmurfl_late_total": (),
    "murmurfl_malformed_total": (),
    "murmurfl_unopened_total": (),
    "murmurfl_refusals_total": ("reason",),
    "murmurfl_certificate_expiry_timestamp_seconds": (),
    "murmurfl_build_info": ("kind", "version", "flower", "python"),
}
REASONS = {*protocol.REFUSAL_NAMES.values(), "other"}
ENDS = {"completed", "failed", "stopped", "killed", "other"}
VALUES = {"reason": REASONS, "cause": {*CAUSES, "other"} - {"reached"}, "end": ENDS}


def samples(text):
    return [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]


def full(kind):
    """All figures of a kind, each with a value; those with labels with one that nobody expects."""
    return {figure.name: {"evil": 1.0} if figure.label else 2.0 for figure in figures_of(kind)}


@pytest.mark.parametrize(("kind", "expected"), [("node", NODE), ("helper", HELPER), ("server", SERVER)])
def test_what_is_shown_is_the_closed_list_and_nothing_else(kind, expected):
    shown = samples(Shown(kind, lambda: full(kind)).text())
    assert {sample.name: tuple(sorted(sample.labels)) for sample in shown} == {
        name: tuple(sorted(labels)) for name, labels in expected.items()
    }


def test_a_label_has_no_value_but_those_that_are_listed():
    for sample in samples(Shown("node", lambda: full("node")).text()):
        for label, value in sample.labels.items():
            assert label in BUILD_LABELS or value in VALUES[label]


def test_what_is_not_listed_counts_as_other():
    refused = {"cap-reached": 2, 'x"} 1\nmurmurfl_secret{a="': 3, "error-7": 4}
    shown = samples(Shown("node", lambda: {"murmurfl_refusals_total": refused}).text())
    counted = {sample.labels["reason"]: sample.value for sample in shown if sample.name != BUILD}
    assert {reason: count for reason, count in counted.items() if count} == {"cap-reached": 2, OTHER: 7}
    assert set(counted) == REASONS


@pytest.mark.parametrize("name", ["murmurfl_accuracy", "murmurfl_asked_total"])
def test_a_figure_that_is_not_a_nodes_cannot_be_shown(name):
    with raises(ConfigurationError, "unknown-name", match="Expected figures of a node, got"):
        Shown("node", lambda: {name: 1.0}).text()


def test_a_figure_that_is_not_known_is_left_out():
    shown = samples(Shown("server", lambda: {"murmurfl_round": None, "murmurfl_rounds_total": 0}).text())
    assert {sample.name for sample in shown} == {BUILD, "murmurfl_rounds_total"}


def test_each_process_shows_its_own_figures_and_none_of_the_client_librarys():
    before = {family.name for family in prometheus_client.REGISTRY.collect()}
    Shown("node", dict).text()
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == before
    assert not any(name.startswith("murmurfl") for name in before)


def test_names_follow_the_customs_of_prometheus():
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        assert figure.counts == figure.name.endswith("_total")
        assert figure.meaning.endswith(".")
        assert bool(figure.label) == bool(figure.values)


FEATURES, CLASSES = 3, 2


class NodeClock:
    """Seconds since 1970, as a test has them pass."""

    def __init__(self):
        self.now = 1_800_000_000.25

    def __call__(self):
        return self.now


class Watched:
    """A real client's answers, its journal and its figures, on a clock of the test's."""

    def __init__(self, folder, values, slowness=0.0):
        folder.mkdir()
        own = write_samples(folder, **values, classes=CLASSES)
        SQLiteLedger.create(folder / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
        settings = {
            "client": "clinic",
            "ledger": "ledger.sqlite",
            **own,
            "clip-norm": 1.0,
            "batch-size": 2,
            "max-participations": 3,
            "mu": 2.0,
        }
        (folder / "node.toml").write_text(toml_document(settings))
        self.clock, self.slowness = NodeClock(), slowness
        self.journal = Journal(self.clock)
        self.health = NodeHealth(self.journal, lambda: 0.0)
        watch = BudgetWatch(folder / "ledger.sqlite")
        self.looked = 0.0
        self.figures = NodeFigures("node", self.journal, self.health, lambda: watch.left(self.looked))
        answers, _ = client_of(NodeConfig.read(folder / "node.toml"))
        self.app = noting(self._slowly(answers), self.journal)
        self.journal.note("started", kind="node", name="clinic")
        self.journal.note("connecting", superlink="a:1")
        self.journal.note("connected", superlink="a:1")

    def _slowly(self, answers):
        def answer(message, context: Context):
            self.clock.now += self.slowness  # how long a client computes may depend on its data
            return answers(message, context)

        return answer

    def ask(self, at, number, session="s", ack=0, **entries):
        """A request that comes at a time, whatever the client is busy with."""
        self.clock.now = at
        points = [np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)]
        config = training_config(number, ack, session, **entries)
        content = RecordDict(
            {
                protocol.ARRAYS: ArrayRecord(points),
                protocol.PREVIOUS_ARRAYS: ArrayRecord(points),
                protocol.CONFIG: ConfigRecord(config),
            }
        )
        return ask_real_node(self.app, content)

    def text(self):
        self.looked += 10.0
        return Shown("node", self.figures.read).text()


def data(seed, scale):
    numbers = np.random.default_rng(seed)
    return {
        "features": scale * numbers.normal(size=(10, FEATURES)),
        "labels": numbers.integers(0, CLASSES, 10),
    }


def whole_life(watched):
    """Releases, a repetition, refusals, the end of the samples, a second session, a lost connection."""
    for number in range(1, 6):
        watched.ask(1_800_000_100.7 + 20 * number, number, ack=0)
    watched.ask(1_800_000_300.0, 1, session="t")
    watched.ask(1_800_000_301.0, 1, session="t", ack=7)
    watched.journal.note("disconnected", superlink="a:1", cause="refused", retry_s=1.0)
    return watched.text()


def values(text, wanted):
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if name.startswith(wanted)}


def test_two_data_sets_give_the_same_metrics(tmp_path):
    calm = Watched(tmp_path / "calm", data(1, 1e-3), slowness=0.1)
    wild = Watched(tmp_path / "wild", data(2, 1e6), slowness=9.4)
    texts = whole_life(calm), whole_life(wild)
    assert texts[0] == texts[1]
    assert values(texts[0], "murmurfl_releases_total")["murmurfl_releases_total"] > 2


def test_a_figure_of_how_long_an_answer_took_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "arrived", lambda journal: None)
    monkeypatch.setattr(
        Journal, "asked_at", property(lambda journal: journal._clock(), lambda journal, value: None), False
    )
    calm = Watched(tmp_path / "calm", data(1, 1e-3), slowness=0.1)
    wild = Watched(tmp_path / "wild", data(1, 1e-3), slowness=9.4)
    assert whole_life(calm) != whole_life(wild)


def test_releases_refusals_rounds_and_times_are_counted(tmp_path):
    watched = Watched(tmp_path / "node", data(1, 1.0))
    whole_life(watched)
    shown = watched.text()
    assert values(shown, "murmurfl_releases_total") == {"murmurfl_releases_total": 4}
    refused = {name: count for name, count in values(shown, "murmurfl_refusals_total").items() if count}
    assert refused == {
        'murmurfl_refusals_total{reason="cap-reached"}': 2,
        'murmurfl_refusals_total{reason="bad-acknowledgement"}': 1,
    }
    assert values(shown, "murmurfl_rounds_total") == {"murmurfl_rounds_total": 6}
    assert values(shown, "murmurfl_round_seconds") == {"murmurfl_round_seconds": 20}  # and not until another run
    assert values(shown, "murmurfl_last_contact") == {"murmurfl_last_contact_timestamp_seconds": 1_800_000_301}
    assert values(shown, "murmurfl_connected") == {"murmurfl_connected": 0}
    assert values(shown, 'murmurfl_disconnections_total{cause="refused"}').popitem()[1] == 1


def test_the_budget_that_is_left_is_the_ledgers_and_no_name_is_shown(tmp_path):
    watched = Watched(tmp_path / "node", data(1, 1.0))
    assert values(watched.text(), "murmurfl_budget_left_mu") == {"murmurfl_budget_left_mu": 4}
    watched.ask(1_800_000_100.0, 1, session="secretsession")
    assert b"secretsession" not in watched.text()
    assert b"clinic" not in watched.text()
    left = values(watched.text(), "murmurfl_budget_left")
    assert left["murmurfl_budget_left_mu"] == pytest.approx(np.sqrt(12))
    assert left["murmurfl_budget_left_epsilon"] == pytest.approx(gdp_epsilon(np.sqrt(12), 1e-5))
    assert values(watched.text(), "murmurfl_sessions") == {"murmurfl_sessions": 1}


def test_a_ledger_that_cannot_be_believed_shows_no_budget(tmp_path, caplog):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    watch, journal = BudgetWatch(tmp_path / "ledger.sqlite"), Journal()
    assert watch.left(0.0) is not None
    (tmp_path / "ledger.sqlite.mark").write_text("{}")
    for now in (10.0, 20.0):
        figures = NodeFigures("node", journal, NodeHealth(journal), lambda now=now: watch.left(now)).read()
        assert {name for name in figures if "budget" in name or "ledger" in name} == {"murmurfl_ledger_readable"}
        assert figures["murmurfl_ledger_readable"] == 0
    assert len([line for line in caplog.messages if "cannot be shown" in line]) == 1


def test_a_ledger_is_not_read_again_for_everybody_who_asks(tmp_path, monkeypatch):
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    watch = BudgetWatch(tmp_path / "ledger.sqlite")
    assert watch.left(0.0) is not None
    monkeypatch.setattr("murmurfl.app.fleet.health.budget_left", None)
    assert all(watch.left(now) is not None for now in (0.1, 4.9, 60.0))


def test_a_helper_counts_what_it_opened():
    journal = Journal(NodeClock())
    figures = NodeFigures("helper", journal, NodeHealth(journal))
    journal.note("started", kind="helper", name="auditor")
    journal.note("opened", run=1, session="s", round=1, releases=3)
    journal.note("refused", run=1, reason="opening-refused", session="s", round=2)
    shown = values(Shown("helper", figures.read).text(), "murmurfl")
    assert shown["murmurfl_openings_total"] == 1
    assert shown['murmurfl_refusals_total{reason="opening-refused"}'] == 1
    assert not any(name.startswith("murmurfl_budget") for name in shown)


FLEET = Path(__file__).parents[3] / "examples" / "fleet"
DASHBOARD = FLEET / "grafana-dashboard.json"
JOBS = ("node", "helper", "server")
OF_PROMETHEUS = {"job", "instance"}
BY_NAME = {figure.name: figure for figure in FIGURES}


def targets(document):
    return [target for panel in document["panels"] for target in panel["targets"]]


def expressions():
    shown = [target["expr"] for target in targets(json.loads(DASHBOARD.read_text()))]
    rules = yaml.safe_load((FLEET / "alerts.yml").read_text())["groups"][0]["rules"]
    return shown + [rule["expr"] for rule in rules]


def unknown(expression):
    """Metrics, labels and jobs that an expression names and nobody shows."""
    names = set(re.findall(r"\bmurmurfl_\w+", expression))
    known = {label for name in names & set(BY_NAME) for label in [BY_NAME[name].label] if label}
    asked = {label for group in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)\s*=~?", group)}
    asked |= {
        label for group in re.findall(r"\bby \((.*?)\)", expression) for label in group.replace(" ", "").split(",")
    }
    jobs = {job for jobs in re.findall(r'job=~?"([^"]*)"', expression) for job in jobs.split("|")} - {"murmurfl-.*"}
    return (
        names - set(BY_NAME) - {BUILD},
        asked - known - OF_PROMETHEUS,
        {job for job in jobs if job.removeprefix("murmurfl-") not in JOBS},
    )


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_shown(expression):
    assert unknown(expression) == (set(), set(), set())
    assert expression.count("(") == expression.count(")")
    assert re.search(r"\bmurmurfl_\w+|\bup\{", expression)


@pytest.mark.parametrize(
    "expression",
    [
        "sum(murmurfl_accuracy)",
        'murmurfl_refusals_total{session="x"}',
        "sum(murmurfl_lost_total) by (reason)",
        'murmurfl_healthy{job="murmurfl-nodes"}',
    ],
)
def test_a_name_that_nobody_shows_would_be_noticed(expression):
    assert unknown(expression) != (set(), set(), set())


def test_a_job_is_asked_only_for_what_it_shows():
    for expression in expressions():
        for name, jobs in re.findall(r'(murmurfl_\w+)\{job=~?"([^"]*)"', expression):
            for job in jobs.split("|"):
                assert BY_NAME[name] in figures_of(job.removeprefix("murmurfl-")), expression


def test_every_figure_is_on_the_dashboard():
    shown = " ".join(target["expr"] for target in targets(json.loads(DASHBOARD.read_text())))
    assert {figure.name for figure in FIGURES} | {BUILD} <= set(re.findall(r"murmurfl_\w+", shown))


def test_a_legend_names_labels_that_there_are():
    labels = OF_PROMETHEUS | set(BUILD_LABELS) | {figure.label for figure in FIGURES}
    for target in targets(json.loads(DASHBOARD.read_text())):
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_prometheus_asks_each_kind_at_the_port_of_its_unit():
    document = yaml.safe_load((FLEET / "prometheus.yml").read_text())
    jobs = {job["job_name"].removeprefix("murmurfl-"): job for job in document["scrape_configs"]}
    assert set(jobs) == set(JOBS)
    addresses = [target for job in jobs.values() for group in job["static_configs"] for target in group["targets"]]
    assert len(set(addresses)) == len(addresses)
    for kind, job in jobs.items():
        assert "metrics_path" not in job  # /metrics, as Prometheus has it by itself
        unit = (FLEET / f"murmurfl-{kind}.service").read_text()
        (own,) = re.findall(r"--metrics-address (\S+)", unit)
        assert Address.read(own).is_local
        for target in (target for group in job["static_configs"] for target in group["targets"]):
            assert Address.read(target).port == Address.read(own).port
    assert [Address.read(target).is_local for target in addresses] == [True, False, False, False]
    for file in document["rule_files"]:
        assert (FLEET / file).exists()


PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def listed(page):
    """The names in the table of metrics, labels among them, each with who shows it."""
    section = page.partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| (`.*`) \|$", section, flags=re.MULTILINE)
    return {(name, kinds) for kinds, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_documentation_has_every_figure_and_every_reason():
    shown = {(BUILD, "all"), (f"{{{', '.join(BUILD_LABELS)}}}", "all")}
    for figure in FIGURES:
        kinds = "all" if len(figure.shown_by) == len(JOBS) else ", ".join(figure.shown_by)
        shown |= {(name, kinds) for name in (figure.name, figure.label and f"{{{figure.label}}}") if name}
    assert listed(PAGE) == {(name.removeprefix("murmurfl_"), kinds) for name, kinds in shown}
    for reason in PROBLEMS:
        assert f"| `{reason}` |" in PAGE


@pytest.mark.parametrize("kind", JOBS)
def test_each_figure_says_what_it_means_where_it_is_shown(kind):
    said = Shown(kind, lambda: {figure.name: {} if figure.label else 0 for figure in figures_of(kind)}).text().decode()
    for figure in figures_of(kind):
        assert f"# HELP {figure.name} {figure.meaning}\n" in said
