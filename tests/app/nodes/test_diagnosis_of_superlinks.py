"""Real SuperLinks, with every defect that a connection may have, are diagnosed rightly."""

import json
import os
import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from ssl import create_default_context

import pytest
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from httpx import HTTPStatusError
from murmurfl.app.engines.loopback import executable, free_port, is_healthy, launch_environment, without_proxy
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key, make_server_certificates
from murmurfl.app.nodes import diagnosis as fleet_api
from murmurfl.app.nodes.connection import Connection
from murmurfl.app.nodes.diagnosis import diagnose, read_key

pytestmark = pytest.mark.long


class SuperLink:
    """A real one, and what it remembers of its nodes."""

    def __init__(self, folder, address, roots, environment):
        self.folder, self.address, self.roots, self._environment = folder, address, roots, environment

    def connection(self, key=None):
        return Connection(self.address, self.roots, key)

    def new_key(self, name, *, registered):
        public = make_node_key(self.folder / name)
        if registered:
            command = [executable("flwr"), "supernode", "register", str(public), "ours"]
            subprocess.run(command, env=self._environment, cwd=self.folder, check=True, timeout=60, capture_output=True)
        return self.folder / name

    def nodes(self):
        with closing(sqlite3.connect(f"file:{self.folder}/superlink.db?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute("SELECT * FROM node ORDER BY registered_at")]

    @contextmanager
    def open_session(self, key):
        """A node's session, as Flower's own SuperNode opens it."""
        private = read_key(key)
        public = public_key_to_bytes(private.public_key())
        signed = NodeAuthHttpInterceptor(private, private.public_key())
        roots = self.roots.read_bytes()
        with FleetHttpClient.from_server_address(self.address, False, roots, [signed]) as client:
            node = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30.0)).node_id
            try:
                yield client, public
            finally:
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))


@contextmanager
def superlink(folder, *options):
    certificates = make_server_certificates(folder)
    environment = launch_environment(folder, {})
    port = free_port()
    roots = certificates.authority
    (folder / "config.toml").write_text(
        f'[superlink.ours]\naddress = "127.0.0.1:{port}"\nroot-certificates = {json.dumps(str(roots))}\n'
    )
    command = [executable("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--ssl-ca-certfile", str(roots), "--ssl-certfile", str(certificates.certificate)]
    command += ["--ssl-keyfile", str(certificates.key), "--database", str(folder / "superlink.db")]
    with (folder / "superlink.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        limit, context = time.monotonic() + 60, create_default_context(cafile=str(roots))
        while not is_healthy(port, context):
            assert time.monotonic() < limit, (folder / "superlink.log").read_text()
            assert process.poll() is None, (folder / "superlink.log").read_text()
            time.sleep(0.05)
        yield SuperLink(folder, f"127.0.0.1:{port}", roots, environment)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in without_proxy(os.environ).items():
            patch.setenv(name, value)
        with superlink(tmp_path_factory.mktemp("superlink"), "--enable-supernode-auth") as running:
            yield running


@pytest.fixture(scope="module")
def key(ours):
    return ours.new_key("registered", registered=True)


def test_a_registered_key_reaches_its_superlink_and_learns_certificate_and_clock(ours, key):
    found = diagnose(ours.connection(key))
    assert found.cause == "reached"
    assert found.takes_commands  # a plain flower-superlink, of anybody
    assert abs(found.ahead_s) < 5
    assert 0 < found.certificate_ends - time.time() <= 86400


def test_a_key_that_is_not_registered_is_told(ours):
    unknown = ours.new_key("unknown", registered=False)
    found = diagnose(ours.connection(unknown))
    assert found.cause == "key-not-registered"
    assert f"{unknown}.pub" in found.sentence


def calls_as(node, public):
    """What a SuperNode may call, each with a well-formed request in the name of a node that is there."""
    me = Node(node_id=node)
    return {
        "RegisterNode": fleet_pb2.RegisterNodeFleetRequest(public_key=public),
        "ActivateNode": ActivateNodeRequest(public_key=public, heartbeat_interval=30.0),
        "SendNodeHeartbeat": heartbeat_pb2.SendNodeHeartbeatRequest(node=me, heartbeat_interval=30.0),
        "PullMessages": fleet_pb2.PullMessagesRequest(node=me),
        "PushMessages": fleet_pb2.PushMessagesRequest(node=me),
        "GetRun": run_pb2.GetRunRequest(node=me, run_id=1),
        "GetFab": GetFabRequest(node=me, hash_str="0" * 64, run_id=1),
        "PushObject": message_pb2.PushObjectRequest(node=me, object_id="0" * 64, object_content=b"", run_id=1),
        "PullObject": message_pb2.PullObjectRequest(node=me, object_id="0" * 64, run_id=1),
        "ConfirmMessageReceived": message_pb2.ConfirmMessageReceivedRequest(
            node=me, message_object_id="0" * 64, run_id=1
        ),
        "DeactivateNode": DeactivateNodeRequest(node_id=node),
        "UnregisterNode": fleet_pb2.UnregisterNodeFleetRequest(node_id=node),
    }


def test_a_stranger_with_the_certificate_may_call_nothing_in_the_name_of_a_node(ours, key):
    """Without a signature, and with that of a key that nobody registered; the planted sibling is the node itself."""
    unknown_node = read_key(ours.new_key("stranger", registered=False))
    roots = ours.roots.read_bytes()
    with ours.open_session(key) as (itself, public):
        before = ours.nodes()
        (node,) = [one["node_id"] % 2**64 for one in before if one["public_key"] == public]
        calls = calls_as(node, public)
        known = [name for name in dir(FleetHttpClient) if name[0].isupper()]
        assert sorted(calls) == sorted(known), "every call that Flower has is tried"
        for signed in ([], [NodeAuthHttpInterceptor(unknown_node, unknown_node.public_key())]):
            with FleetHttpClient.from_server_address(ours.address, False, roots, signed) as client:
                for name, request in calls.items():
                    with pytest.raises(HTTPStatusError) as refused:
                        getattr(client, name)(request)
                    assert refused.value.response.status_code in (401, 403), name
        assert ours.nodes() == before
        assert itself.SendNodeHeartbeat(calls["SendNodeHeartbeat"]).success


def test_a_superlink_that_wants_keys_is_told_from_one_that_does_not(ours, tmp_path):
    known = ours.nodes()
    assert diagnose(ours.connection()).cause == "key-missing"
    assert ours.nodes() == known
    with superlink(tmp_path) as open_to_all:
        assert diagnose(open_to_all.connection()).cause == "reached"
        assert [node["status"] for node in open_to_all.nodes()] == ["unregistered"]  # as of any SuperNode that has gone


@pytest.mark.parametrize(("ahead", "told"), [(20, "20 s ahead of it"), (-3600, "3600 s behind it")])
def test_a_clock_that_is_wrong_is_told_with_its_error(ours, key, ahead, told):
    found = diagnose(ours.connection(key), clock=lambda: time.time() + ahead)
    assert found.cause == "clock"
    assert any(near in found.sentence for near in _near(told))


def _near(told):
    """The same to within two seconds: as exact as a date is."""
    seconds, rest = told.split(" ", 1)
    return [f"about {int(seconds) + error} {rest}" for error in (-2, -1, 0, 1, 2)]


def test_a_node_that_runs_with_the_same_key_is_not_disturbed(ours, key):
    with ours.open_session(key) as (client, public):
        before = ours.nodes()
        assert "online" in [node["status"] for node in before]
        assert diagnose(ours.connection(key)).cause == "reached"
        assert ours.nodes() == before
        with pytest.raises(HTTPStatusError):  # the session is open, and another SuperNode is turned away
            client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30.0))
        assert diagnose(ours.connection(key), refused=True).cause == "session-open"
    before = ours.nodes()
    assert diagnose(ours.connection(key)).cause == "reached"
    assert ours.nodes() == before
    assert diagnose(ours.connection(ours.new_key("other", registered=False)), refused=True).cause != "session-open"


def test_a_diagnosis_that_began_a_session_would_be_noticed(ours, key, monkeypatch):
    before = ours.nodes()
    monkeypatch.setattr(fleet_api, "_NEVER_ALLOWED_S", 30.0)
    assert diagnose(ours.connection(key)).cause == "reached"
    after = ours.nodes()
    assert after != before
    assert [node["status"] for node in after] == [node["status"] for node in before]  # it is ended again at once
