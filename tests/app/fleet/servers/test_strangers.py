"""What strangers cost a real SuperLink behind the gate: its memory and its other clients stay as they were."""

import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from murmurfl.app.engines.loopback import free_port
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key, make_server_certificates
from murmurfl.app.fleet.servers import limits
from murmurfl.app.fleet.servers.control_api import Control, node_key_bytes
from murmurfl.app.fleet.servers.gate import SuperLinkOptions, own_key
from murmurfl.app.fleet.servers.superlink_process import PROOF_VARIABLE
from murmurfl.app.nodes.connection import Connection, server_name, tls_context
from murmurfl.app.nodes.diagnosis import FleetApi, diagnose, passing_key
from murmurfl.app.nodes.flower_process import end_process, followed
from murmurfl.app.nodes.journal import Journal

FILES = 1024
"""How many files the SuperLink may open: the usual default."""
MIB = 1 << 20
GROWTH = 64 * MIB
"""What its memory may grow by: half a MiB for each of the 64 connections that a stranger may hold, and caches."""
NAME = "superlink.example"
STARTS_WITHIN_S, PATIENCE_S = 90.0, 10.0
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
SECRET = bytes(range(32))


@dataclass
class SuperLink:
    """A running SuperLink, and a node whose key it knows."""

    process: subprocess.Popen
    port: int
    authority: Path
    private: Path  # the node's key, and as an object
    key: object

    def memory(self):
        """Resident memory, in bytes."""
        (line,) = [one for one in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "VmRSS" in one]
        return int(line.split()[1]) * 1024

    def plain(self):
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def connect(self):
        context = ssl.create_default_context(cafile=self.authority)
        return context.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def client(self):
        return httpx.Client(verify=tls_context(self.authority), timeout=PATIENCE_S, trust_env=False)

    def fleet(self, client, key=None):
        return FleetApi(client, f"https://127.0.0.1:{self.port}", key or self.key)

    def serves(self):
        """Whether a stranger's question about its health and a known node are answered as ever."""
        with self.client() as client:
            health = client.get(f"https://127.0.0.1:{self.port}/health").status_code
            known = self.fleet(client).may_begin(time.time()).code
            unknown = self.fleet(client, passing_key()).may_begin(time.time()).code
        codes = ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL, ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
        return (health, known, unknown) == (200, *codes)


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    made, port = make_server_certificates(folder, NAME), free_port()
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    options = ["--ssl-ca-certfile", made.authority, "--ssl-certfile", made.certificate, "--ssl-keyfile", made.key]
    options += ["--enable-supernode-auth", "--database", folder / "superlink.db", "--host", "127.0.0.1"]
    options += ["--port", port, "--isolation", "process", "--superexec-auth-secret-file", secret]
    command = [
        sys.executable,
        "-P",
        "-m",
        "murmurfl.app.fleet.servers.superlink_process",
        "superlink",
        os.getpid(),
        "-",
        *options,
    ]
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder), PROOF_VARIABLE: SECRET.hex()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    try:
        options_read = SuperLinkOptions.read(list(map(str, options)))
        limit = time.monotonic() + STARTS_WITHIN_S
        while not options_read.answers():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit
            time.sleep(0.1)
        private = folder / "node"
        public = make_node_key(private)
        control = Control(f"127.0.0.1:{port}", made.authority, server_name(made.certificate), own_key(SECRET))
        control.register(node_key_bytes(public.read_text()), "node")
        key = load_ssh_private_key(private.read_bytes(), None)
        found = SuperLink(process, port, made.authority, private, key)
        assert found.serves()
        yield found
    finally:
        end_process(process)


@contextmanager
def costs_nothing(superlink):
    """Fail unless the SuperLink serves others during the block and afterwards, and its memory stays."""
    before = superlink.memory()
    yield
    assert superlink.serves()
    assert superlink.memory() - before < GROWTH


def request(path, *headers, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/protobuf", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def sent(connection, head, body, most):
    """How many bytes of a body went out before the other side hung up, and what it said."""
    count, said = 0, b""
    with suppress(OSError):
        connection.sendall(head)
        for part in body:
            if count >= most:
                break
            connection.sendall(part)
            count += len(part)
    with suppress(OSError):
        said = connection.recv(4096)
    return count, said


PATHS = ("/v1/fleet/push-object", "/v1/fleet/activate-node", "/v1/runtime/push-object", "/v1/control/start-run")


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("path", [*PATHS, "/v1/runtime/acquire-task", "/health", "/federation/x", "/"])
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
def test_a_large_body_from_a_stranger_is_refused_early(superlink, path, framing):
    part, most = bytes(64 << 10), 300 * MIB
    with costs_nothing(superlink), superlink.connect() as connection:
        if framing == "chunked":
            head, chunk = request(path, "transfer-encoding: chunked"), b"10000\r\n" + part + b"\r\n"
        else:
            head, chunk = request(path, f"content-length: {most}"), part
        count, said = sent(connection, head, iter(lambda: chunk, None), most)
        assert superlink.serves()
    assert count < 8 * MIB, said


def test_many_empty_messages_are_not_parsed(superlink):
    # Each of its two bytes is a message of its own to the parser: 64 MiB of them are 1.6 GB.
    body = b"\x0a\x00" * (32 << 10)
    with costs_nothing(superlink), superlink.connect() as connection:
        head = request("/v1/fleet/push-messages", f"content-length: {64 * MIB}")
        count, said = sent(connection, head, iter(lambda: body, None), 64 * MIB)
    assert count < 8 * MIB, said


@contextmanager
def held(superlink, number, start, secured):
    """So many connections that say ``start`` and no more, at once; how many are still open in the end."""
    with ExitStack() as stack:
        connections = []
        for _ in range(number):
            with suppress(OSError):
                connection = stack.enter_context(superlink.connect() if secured else superlink.plain())
                connection.sendall(start)
                connections.append(connection)
        yield connections


def is_open(connection):
    connection.settimeout(0.0)
    try:
        return bool(connection.recv(1))
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


HELLO = b"\x16\x03\x01\x02\x00\x01"  # the first bytes of a handshake
STARTS = {
    "nothing said": (b"", False),
    "half a handshake": (HELLO, False),
    "half a head": (b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n", True),
    "half a body": (request("/v1/fleet/activate-node", "content-length: 4000") + b"\x0a", True),
}


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[] if one == "half a handshake" else pytest.mark.more_cases) for one in STARTS]
)
def test_a_thousand_half_open_connections_shut_nobody_out(superlink, what):
    start, secured = STARTS[what]
    with costs_nothing(superlink), held(superlink, 1002, start, secured) as connections:
        assert superlink.serves()
        assert superlink.process.poll() is None
        assert sum(map(is_open, connections)) <= limits.UNKNOWN_PER_ADDRESS


def test_huge_headers_are_refused(superlink):
    with costs_nothing(superlink), superlink.connect() as connection:
        line = b"x-long: " + b"a" * (4 << 10) + b"\r\n"
        count, said = sent(connection, b"POST /v1/fleet/pull-messages HTTP/1.1\r\n", iter(lambda: line, None), 64 * MIB)
    assert count < 8 * MIB
    assert not said or said.startswith(b"HTTP/1.1 400")


def test_requests_in_one_row_are_answered_one_after_the_other(superlink):
    # Nobody reads the answers, so the server stops reading too.
    many = request("/federation/x", method="GET") * 200
    with costs_nothing(superlink), superlink.connect() as connection:
        connection.settimeout(1.0)
        sent(connection, b"", iter(lambda: many, None), 64 * MIB)
        assert superlink.serves()


def test_a_websocket_is_no_way_in(superlink):
    upgrade = "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAA"
    with superlink.connect() as connection:
        connection.sendall(request("/v1/control/list-runs", *upgrade, method="GET"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")


# Members.


def signed(key, signer=None, seconds=0):
    """The headers of a node's call, signed by its key unless another signs, so many seconds from now."""
    at = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
    return [
        (FLEET_HTTP_PUBLIC_KEY_HEADER, b64encode(public_key_to_bytes(key.public_key())).decode()),
        (TIMESTAMP_HEADER, at),
        (FLEET_HTTP_SIGNATURE_HEADER, b64encode(sign_message(signer or key, at.encode())).decode()),
    ]


def called(superlink, path, message):
    """The status of a member's call; 0 if the server hung up before it had read everything."""
    headers = [("content-type", PROTOBUF_MEDIA_TYPE), *signed(superlink.key)]
    with superlink.client() as client, suppress(httpx.HTTPError):
        url = f"https://127.0.0.1:{superlink.port}/v1/fleet/{path}"
        return client.post(url, content=message.SerializeToString(), headers=headers).status_code
    return 0


def upload(size):
    return PushObjectRequest(node=Node(node_id=1), object_id="0" * 64, object_content=bytes(size))


def test_a_member_uploads_an_object_and_no_larger_one(superlink):
    # Flower itself refuses what it has read: the node's number is another.
    with costs_nothing(superlink):
        assert called(superlink, "push-object", upload(20 * MIB)) == 401
        assert called(superlink, "push-object", upload(limits.LARGEST_BODY + 1)) in (0, 413)
        many = PushMessagesRequest(messages_list=[Message()] * MIB)
        assert called(superlink, "push-messages", many) in (0, 413)
        assert called(superlink, "pull-messages", PullMessagesRequest()) == 401


def test_nobody_is_a_member_without_its_signature(superlink):
    """The answer comes before the body, so nobody waits for it."""
    key = superlink.key
    wrong = {
        "nothing": [],
        "another's signature": signed(key, signer=passing_key()),
        "a key that is not registered": signed(passing_key()),
        "a time to come": signed(key, seconds=60),
        "a time long ago": signed(key, seconds=-3600),
        "everything twice": signed(key) * 2,
        "no signature": signed(key)[:2],
        "no values": [(name, "AAAA") for name, _ in signed(key)],
        "a token of another kind": [("flwr-task-token", "AAAA")],
    }
    for what, headers in wrong.items():
        with superlink.connect() as connection:
            lines = [f"{name}: {value}" for name, value in headers]
            connection.sendall(request("/v1/fleet/push-object", f"content-length: {MIB}", *lines))
            assert connection.recv(4096).startswith(b"HTTP/1.1 401"), what


def test_the_body_of_a_member_is_waited_for(superlink):
    lines = [f"{name}: {value}" for name, value in signed(superlink.key)]
    with superlink.connect() as connection:
        connection.sendall(request("/v1/fleet/push-object", f"content-length: {MIB}", *lines))
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(4096)


@pytest.mark.more_cases
def test_a_member_that_sends_much_at_a_time_is_bounded(superlink):
    before = superlink.memory()
    with ThreadPoolExecutor(24) as pool:
        ended = list(
            pool.map(lambda _: called(superlink, "push-object", upload(limits.LARGEST_BODY - 4096)), range(24))
        )
        assert set(ended) <= {0, 401, 413, 503}
    assert superlink.serves()
    # Of 768 MiB two bodies of 32 MiB are there at a time, each up to four times: read, joined, parsed.
    assert superlink.memory() - before < GROWTH + 8 * limits.LARGEST_BODY


# Proxies.


@contextmanager
def proxied(port, connects):
    """A proxy to a port, after a CONNECT if it ``connects``; its own port, and the first lines that it was sent."""
    calls = []

    def pump(source, target):
        with suppress(OSError):
            while part := source.recv(65536):
                target.sendall(part)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(listener):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=forward, args=(connection,), daemon=True).start()

    def forward(connection):
        with connection, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as target:
            head = b""
            while connects and b"\r\n\r\n" not in head:
                head += connection.recv(1)
            calls.append(head.partition(b"\r\n")[0])
            if connects:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=pump, args=(target, connection), daemon=True)
            back.start()
            pump(connection, target)
            back.join(PATIENCE_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield listener.getsockname()[1], calls
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def connected(superlink, address, environment):
    """Whether Flower's own SuperNode is accepted there; it is ended again."""
    connection = Connection(address, superlink.authority, superlink.private)
    command = [sys.executable, "-m", "murmurfl.app.nodes.flower_process", "supernode", str(os.getpid())]
    command += [*connection.arguments(), "--isolation", "process", "--host", "127.0.0.1", "--port", str(free_port())]
    journal, found = Journal(), threading.Event()
    journal.listen(lambda entry: found.set() if entry.kind == "connected" else None)
    with followed(subprocess.Popen, command, {**os.environ, **QUIET, **environment}, journal, address) as process:
        try:
            return found.wait(STARTS_WITHIN_S)
        finally:
            end_process(process)


def test_a_node_reaches_its_superlink_through_the_proxy_of_its_network(superlink, monkeypatch):
    address = f"{NAME}:{superlink.port}"  # only the proxy finds it
    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with proxied(superlink.port, connects=True) as (port, calls):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        found = diagnose(Connection(address, superlink.authority, superlink.private), PATIENCE_S)
        assert found.cause == "reached", found.sentence
        assert connected(superlink, address, {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "FLWR_HOME": "."})
    assert set(calls) == {f"CONNECT {address} HTTP/1.1".encode()}


def test_a_superlink_answers_behind_a_proxy_that_passes_tls_on(superlink):
    with proxied(superlink.port, connects=False) as (port, calls), ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        # Everybody has the proxy's address, and whoever is slow makes room.
        found = diagnose(Connection(f"127.0.0.1:{port}", superlink.authority, superlink.private), PATIENCE_S)
    assert found.cause == "reached", found.sentence
    assert len(calls) > 200
