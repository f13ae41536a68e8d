"""What a server does at its own SuperLink: which nodes it registers, and what it says of runs that end."""

import json
import logging
from types import SimpleNamespace

import pytest
from flwr.supercore.constant import NodeStatus
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key
from murmurfl.app.fleet.servers.control_api import ControlError, OwnServer, node_key_bytes
from murmurfl.app.fleet.servers.gate import SuperLinkOptions
from murmurfl.app.fleet.servers.watched_server import SuperLinkLines
from murmurfl.app.nodes.journal import Journal, LogSettings, lines_of_log


class Control:
    """A SuperLink that remembers what it was told."""

    def __init__(self):
        self.known, self.said, self.failing = {}, {}, False

    def runs(self):
        if self.failing:
            raise ControlError("Expected an answer, got none.")
        return {number: SimpleNamespace(status=status) for number, status in self.said.items()}

    def nodes(self):
        return [
            SimpleNamespace(public_key=key, node_id=number, status=NodeStatus.REGISTERED)
            for number, key in self.known.items()
        ]

    def register(self, public, name):
        self.known[len(self.known) + 1] = public

    def unregister(self, node):
        del self.known[node]


def status(sub="", details="", now="finished"):
    return SimpleNamespace(status=now, sub_status=sub, details=details)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    control, entries, journal = Control(), [], Journal()
    journal.listen(lambda entry: entries.append((entry.facts["end"], entry.facts["run"])))
    server = OwnServer(SuperLinkOptions.read(["--insecure"]), b"x" * 32, tmp_path / "members.json", journal)
    monkeypatch.setattr(server, "_control", lambda: control)
    monkeypatch.setattr(OwnServer, "_changed", lambda self: None)
    return server, control, entries


def look(server):
    server._next, server._tried = 0.0, float("-inf")
    server.look()


def test_every_end_of_a_run_is_counted_once_and_told_apart(watched):
    server, control, entries = watched
    control.said = {1: status("failed"), 2: status(now="running"), 3: status(now="running")}
    look(server)  # what ended before is not this server's to say
    control.said |= {2: status("completed"), 4: status("failed", "ServerApp failed with exception: Expected rounds.")}
    look(server)
    look(server)
    control.said |= {3: status("failed", "No heartbeat received from the task"), 5: status("stopped")}
    look(server)
    assert entries == [("completed", 2), ("failed", 4), ("killed", 3), ("stopped", 5)]
    assert server.ends == {"completed": 1, "failed": 1, "stopped": 1, "killed": 1, "other": 0}
    control.said |= {6: status(now="running")}
    look(server)
    control.said = {}  # a SuperLink without a database was started again
    look(server)
    assert entries[-1] == ("killed", 6)


def test_a_superlink_that_does_not_answer_is_said_once_and_loses_no_end(watched, caplog):
    server, control, entries = watched
    control.said = {1: status(now="running")}
    look(server)
    control.failing = True
    for _ in range(3):
        look(server)
    assert caplog.text.count("could not look at its runs") == 1
    control.failing, control.said = False, {1: status("completed")}
    look(server)
    assert entries == [("completed", 1)]


def test_nodes_of_members_are_registered_and_those_that_left_are_not(tmp_path, monkeypatch):
    members = [make_node_key(tmp_path / name).read_text() for name in ("a", "b", "c")]
    control, path = Control(), tmp_path / "members.json"
    control.known = {7: b"registered by hand"}
    server = OwnServer(SuperLinkOptions.read(["--insecure"]), b"x" * 32, path, Journal())
    monkeypatch.setattr(server, "_control", lambda: control)

    def write(inside, left):
        document = {"members": [{"node": key, "card": {"client": "m"}} for key in inside], "left": left}
        path.write_text(json.dumps(document))
        look(server)
        return set(control.known.values())

    first, second, third = map(node_key_bytes, members)
    assert write(members[:2], []) == {b"registered by hand", first, second}
    assert write(members[1:], members[:1]) == {b"registered by hand", second, third}


def test_a_key_that_is_refused_holds_up_no_other_registration_and_is_said_once(tmp_path, monkeypatch, caplog):
    keys = {name: make_node_key(tmp_path / name).read_text() for name in ("returned", "next", "gone")}
    path = tmp_path / "members.json"

    class Refusing(Control):
        def register(self, public, name):
            if public == node_key_bytes(keys["returned"]):
                raise ControlError("Public key already in use")
            super().register(public, name)

        def unregister(self, node):
            raise ControlError("No such node")

    control = Refusing()
    control.known = {7: node_key_bytes(keys["gone"])}
    server = OwnServer(SuperLinkOptions.read(["--insecure"]), b"x" * 32, path, Journal())
    monkeypatch.setattr(server, "_control", lambda: control)
    members = [{"node": keys[name], "card": {"client": name}} for name in ("returned", "next")]
    path.write_text(json.dumps({"members": members, "left": [keys["gone"]]}))
    control.said = {1: status(now="running")}
    for _ in range(3):
        look(server)
    assert node_key_bytes(keys["next"]) in control.known.values()
    assert caplog.text.count("did not register or unregister every node: returned (Public key already in use)") == 1
    control.said = {1: status("completed")}
    look(server)
    assert server.ends["completed"] == 1, "runs are followed all the same"


def test_calls_that_flower_refuses_again_and_again_are_one_line_of_ours_in_an_hour():
    now = [0.0]
    lines = SuperLinkLines(lambda: now[0])
    text = "[/v1/fleet/activate-node][ApiError:{}] Attempted to register SuperNode with public key: b'---'"
    with lines_of_log(LogSettings()) as said:
        for _ in range(89):
            lines(logging.ERROR, text.format(2004))
            lines(logging.ERROR, text.format(2003))  # a node's --check
        now[0] = 3601.0
        lines(logging.ERROR, text.format(2004))
        lines(logging.ERROR, "something else")
        for _ in range(9):
            lines(logging.ERROR, "[/v1/fleet/push-object][UnexpectedError:OperationalError] database or disk is full")
            lines(logging.WARNING, "2026-01-01T00:00:00Z WARNING [uvicorn.error] Invalid HTTP request received.")
    assert [line.split()[0] for line in said] == ["WARNING", "WARNING", "ERROR", "WARNING"]
    assert "its database (--database) cannot be written" in said[3]
    assert "and 88 times in the last hour" in said[1]
    assert not any("BEGIN" in line or "public key" in line for line in said)
