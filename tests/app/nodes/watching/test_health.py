"""When a health address says that all is well, and what it says otherwise."""

import json

import pytest
from murmurfl.app.nodes.servers.gate import SuperLinkOptions
from murmurfl.app.nodes.servers.watched_server import ServerHealth
from murmurfl.app.nodes.watching import health as health
from murmurfl.app.nodes.watching.health import NodeHealth, health_answer
from murmurfl.app.nodes.watching.journal import Journal


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
