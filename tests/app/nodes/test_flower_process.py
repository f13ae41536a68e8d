"""What Flower's process says reaches the log line by line; only what it knows of its SuperLink is in the journal."""

import importlib
import logging
import os
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from murmurfl.app.fleet.servers.superlink_process import run_superexec
from murmurfl.app.nodes.connection import cause_of
from murmurfl.app.nodes.diagnosis import CAUSES
from murmurfl.app.nodes.flower_process import (
    CONTACT_EVERY_S,
    EVENTS_VARIABLE,
    Contact,
    follow_lines,
    followed,
    watch_fleet,
)
from murmurfl.app.nodes.journal import Journal

TALKS = """
import json, os, sys
events = int(os.environ["MURMURFL_SUPERNODE_EVENTS"])
print("\\x1b[92mINFO \\x1b[0m:      Starting Flower SuperNode")
print('{"event": "connected", "cause": ""}')  # a server's text, printed
sys.stderr.write("\\x1b[91mERROR \\x1b[0m:     Exit Code: 305\\nFailed to initialize the connection\\n")
sys.stderr.write("INFO:     Uvicorn running on http://127.0.0.1:1\\n")
sys.stderr.flush()
for event in EVENTS:
    os.write(events, json.dumps(event).encode() + b"\\n")
"""


def test_a_runs_token_is_on_no_command_line(tmp_path, monkeypatch):
    """Every user of a computer can read command lines, and whoever has the token is the run."""
    token = "0123456789abcdef" * 4
    run = tmp_path / "run"
    run.write_text(f"""#!{sys.executable}
import argparse, pathlib
from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
parser = argparse.ArgumentParser()
parser.add_argument("--runtime-api-address")
add_args_flwr_app_common(parser)
told = try_obtain_flwr_app_token(parser.parse_args())
line = pathlib.Path("/proc/self/cmdline").read_bytes().replace(bytes(1), b" ").decode()
pathlib.Path({str(tmp_path / "said")!r}).write_text(f"{{told}}|{{line}}")
""")
    run.chmod(0o700)
    spec = ExecutionSpec(TaskType.SERVER_APP, "127.0.0.1:1", token, True, None, False, None, True, 1)
    monkeypatch.setitem(subprocess_executor.TASK_TYPE_TO_COMMAND, TaskType.SERVER_APP, str(run))
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess)
    module = importlib.import_module("flwr.supercore.cli.flower_superexec")
    monkeypatch.setattr(module, "flower_superexec", lambda: subprocess_executor.SubprocessExecutor().launch(spec))
    monkeypatch.setattr(sys, "argv", ["x"])
    run_superexec()
    said, limit = tmp_path / "said", time.monotonic() + 20
    while not (said.exists() and "|" in said.read_text()) and time.monotonic() < limit:
        time.sleep(0.02)
    told, line = said.read_text().split("|")
    assert told == token
    assert token not in line
    assert "--insecure" in line


def test_nodes_helpers_and_servers_leave_no_core_dump():
    program = """
import contextlib, os, resource
from murmurfl.app.nodes import supernode
from murmurfl.app.fleet.servers import watched_server
from murmurfl.app.fleet.health import Addresses
start = {
    "node": lambda: supernode.run_node(None, None),
    "helper": lambda: supernode.run_helper(None, None),
    "server": lambda: watched_server.run_server(["--host", "0.0.0.0"], Addresses()),
}
if resource.getrlimit(resource.RLIMIT_CORE)[1]:  # a process started in this one's tests may have lowered it for good
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
for kind in start:  # each in a process of its own
    if os.fork() == 0:
        with contextlib.suppress(Exception):  # nothing can be started, and it is over before anything is
            start[kind]()
        print(kind, *resource.getrlimit(resource.RLIMIT_CORE), flush=True)
        os._exit(0)
    os.wait()
"""
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["node 0 0", "helper 0 0", "server 0 0"]


def talked(events):
    """What a child process with these events leaves in a journal."""
    journal, entries = Journal(), []
    journal.listen(lambda entry: entries.append((entry.kind, dict(entry.facts))))
    script = TALKS.replace("EVENTS:", f"{events!r}:")
    with followed(subprocess.Popen, [sys.executable, "-c", script], os.environ, journal, "a:1") as process:
        assert process.wait(20) == 0
    assert EVENTS_VARIABLE not in os.environ
    return entries


def test_contact_is_noted_from_its_own_pipe_and_never_from_what_is_printed(caplog):
    caplog.set_level(logging.DEBUG, "flwr")
    entries = talked([{"event": "lost", "cause": "refused"}, {"event": "connected", "cause": ""}, {"event": "contact"}])
    there = {"superlink": "a:1"}
    assert entries == [("disconnected", {**there, "cause": "refused"}), ("connected", there), ("contact", there)]
    assert talked([{"event": "released"}, {"no": "event"}, "connected", {"event": "lost"}]) == []


def test_log_lines_have_levels_and_errors_keep_their_lines(caplog):
    caplog.set_level(logging.DEBUG, "flwr")
    talked([])
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "flwr"]
    assert said == [
        ("INFO", "Starting Flower SuperNode"),
        ("WARNING", '{"event": "connected", "cause": ""}'),
        ("ERROR", "Exit Code: 305"),
        ("ERROR", "Failed to initialize the connection"),
        ("INFO", "Uvicorn running on http://127.0.0.1:1"),
    ]


def test_what_is_said_at_every_try_is_no_warning():
    reading, writing = os.pipe()
    said = []
    thread = follow_lines(os.fdopen(reading, "rb"), lambda level, text: said.append((level, text)))
    with os.fdopen(writing, "wb") as stream:
        stream.write(b"WARNING :   Connection attempt failed, retrying in 1.00 seconds\n")
        stream.write(b"WARNING :   other\n" + b"x" * 10**6)
    thread.join(10)
    assert [level for level, _ in said[:2]] == [logging.INFO, logging.WARNING]
    assert all(len(text) < 5000 for _, text in said), "a line without an end takes no memory"


class Told:
    """What is told, and a clock that a test moves."""

    def __init__(self):
        self.events, self.now = [], 0.0
        self.contact = Contact(lambda event, cause: self.events.append((event, cause)), clock=lambda: self.now)


def refused():
    return httpx.ConnectError("no")


def test_a_node_is_connected_once_it_was_accepted_and_not_because_something_answers():
    told = Told()
    for method in ("RegisterNode", "SendNodeHeartbeat", "PullMessages"):
        told.contact.answered(method)
    assert told.events == []
    told.contact.answered("ActivateNode")
    assert told.events == [("connected", "")]


def test_an_answer_is_contact_every_few_seconds():
    told = Told()
    told.contact.answered("ActivateNode")
    for _ in range(40):
        told.now += CONTACT_EVERY_S / 4
        told.contact.answered("PullMessages")
    assert told.events == [("connected", ""), *[("contact", "")] * 10]


def test_a_superlinks_loss_and_return_are_logged_once():
    told = Told()
    told.contact.answered("ActivateNode")
    for _ in range(3):
        told.contact.failed(refused())
    told.contact.failed(httpx.ConnectTimeout("late"))
    told.contact.answered("PullMessages")
    told.contact.failed(refused())
    assert told.events == [
        ("connected", ""),
        ("lost", "unreachable"),
        ("lost", "timed-out"),
        ("connected", ""),
        ("lost", "unreachable"),
    ]


def test_an_unknown_node_is_not_connected():
    for method, success in (("SendNodeHeartbeat", False), ("DeactivateNode", True)):
        told = Told()
        told.contact.answered("ActivateNode")
        told.contact.answered(method, success=success)
        told.now += 100.0
        told.contact.answered("PullMessages")
        assert told.events == [("connected", "")]


def test_what_a_superlink_says_no_to_is_an_answer_and_no_loss():
    request = httpx.Request("POST", "https://a:1")
    for status, cause in ((401, ""), (403, ""), (500, ""), (502, "unreachable"), (503, "unreachable")):
        error = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
        assert cause_of(error) == cause
    assert cause_of(ValueError("ours")) == ""


def chained(*errors):
    top = httpx.ConnectError("outermost")
    inner = top
    for error in errors:
        inner.__cause__ = error
        inner = error
    return top


def certificate_error(code):
    error = ssl.SSLCertVerificationError("certificate verify failed")
    error.verify_code = code
    return error


CHAINS = {
    "refused": (ConnectionRefusedError(111, "no"),),
    "name-not-found": (socket.gaierror(-2, "no such name"),),
    "timed-out": (TimeoutError(),),
    "no-tls": (ssl.SSLError("wrong version number"),),
    "certificate-expired": (certificate_error(10),),
    "certificate-not-yet-valid": (certificate_error(9),),
    "certificate-name": (certificate_error(62),),
    "certificate-unknown": (certificate_error(19),),
    "unreachable": (OSError(113, "no route"),),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("cause", CHAINS)
def test_a_cause_is_one_of_those_that_the_diagnosis_knows(cause):
    assert cause_of(chained(httpx.NetworkError("between"), *CHAINS[cause])) == cause
    assert cause in CAUSES


def test_a_wrapped_port_refusal_is_recognised():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError) as raised:
        client.post(f"http://127.0.0.1:{port}")
    assert cause_of(raised.value) == "refused"


def test_every_call_of_flowers_connection_is_seen(monkeypatch):
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient

    told, answers = Told(), iter([ActivateNodeResponse(node_id=1), refused()])

    def answer(client, **call):
        made = next(answers)
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(FleetHttpClient, "_unary_unary", answer)
    watch_fleet(told.contact)
    client = FleetHttpClient("http://127.0.0.1:1")
    assert client.ActivateNode(ActivateNodeRequest()).node_id == 1
    with pytest.raises(httpx.ConnectError):
        client.PullMessages(PullMessagesRequest())
    assert told.events == [("connected", ""), ("lost", "unreachable")]


def test_a_process_that_cannot_be_started_leaves_no_pipe_open(monkeypatch):
    made, pipe = [], os.pipe

    def noted():
        made.append(pipe())
        return made[-1]

    monkeypatch.setattr(os, "pipe", noted)
    with pytest.raises(FileNotFoundError), followed(subprocess.Popen, ["/no/such/program"], {}, Journal(), "a:1"):
        pass
    for end in made[0]:  # the first pipe is that of the contact
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(end)
