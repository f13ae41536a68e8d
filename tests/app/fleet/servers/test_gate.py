"""The gate before a SuperLink: what reaches the other side, and who is named in the log."""

import asyncio
import json
import os

import pytest
from cryptography import x509
from murmurfl.app.fleet.federation.keys_and_cards import make_server_certificates
from murmurfl.app.fleet.servers import gate as gate
from murmurfl.app.fleet.servers.gate import (
    COMMANDED,
    CONTROL,
    PUBLISHED,
    UNREAD,
    Gate,
    Sender,
    SuperLinkOptions,
    own_key,
    read_owners,
)
from murmurfl.app.nodes.connection import name_of, server_name
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.permits import OwnerKey

from tests.harness.errors import raises

ANA, EVE = OwnerKey(bytes(range(32))), OwnerKey(bytes(range(1, 33)))
SERVER, NOW = "ab" * 32, 1000.0
LOGIN = ANA.login(SERVER, until=2000)
RUNS = f"{CONTROL}list-runs"


@pytest.fixture
def owners(tmp_path):
    file = tmp_path / "owners"
    file.write_text(f"# who\n{ANA.public.hex()} Ana of the  clinic  # since May\n\n{EVE.public.hex().upper()}\n")
    file.chmod(0o600)
    file.write_text(file.read_text().replace(EVE.public.hex().upper(), ""))
    return file


async def nobody(path, headers):
    return UNREAD


def asked(owners, path, *headers, kind="http", server=SERVER, senders=nobody, body=None, **options):
    """The status of an answer, 0 from the other side; and its body, or the request's from there."""
    sent = []

    async def behind(scope, receive, send):
        read = await receive() if scope["type"] == "http" else {}
        await send({"type": "http.response.start", "status": 0, "body": read.get("body")})

    async def receive():
        assert body is not None, "a body was read"
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers), "client": ("10.0.0.9", 1)}
    asyncio.run(Gate(behind, owners, server, senders, clock=lambda: NOW, **options)(scope, receive, send))
    return sent[0].get("status", sent[0]["type"]), sent[-1].get("body", b"")


def bearer(text):
    return b"authorization", f"Bearer {text}".encode()


def test_commands_are_for_owners_with_a_login_and_the_rest_is_flowers(owners):
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 0
    for path in ("/health", "/v1/fleet/pull-messages", "/v1/runtime/acquire-task"):
        assert asked(owners, path)[0] == 0
    for path in (RUNS, f"{RUNS}/", CONTROL, "/v1/control", "/V1/CONTROL/list-runs", "//v1/control/list-runs", "/"):
        assert asked(owners, path)[0] == 403
    for path in ("/docs", "/openapi.json", "/health/", "/healthy", "/v1/fleet", "/v1/fleetx/", "/anything", ""):
        assert asked(owners, path)[0] == 403
    assert asked(owners, "", kind="lifespan")[0] == 0
    assert asked(owners, RUNS, bearer(LOGIN), kind="websocket")[0] == "websocket.close"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("")],
        [bearer(LOGIN[:-1])],
        [bearer(EVE.login(SERVER, until=2000))],
        [bearer(ANA.login("cd" * 32, until=2000))],
        [bearer(ANA.login("", until=2000))],
        [bearer(ANA.login(SERVER, until=1000))],
        [bearer(ANA.permit(["night1"], not_before=0, until=2000))],
        [bearer(LOGIN), bearer(LOGIN)],
        [(b"authorization", b"Basic " + LOGIN.encode())],
        [(b"authorization", LOGIN.encode())],
        [(b"authorization", b"\xff\xfe Bearer")],
        [(b"x-authorization", b"Bearer " + LOGIN.encode())],
    ],
)
def test_no_other_credential_commands(owners, headers):
    status, body = asked(owners, RUNS, *headers)
    assert status == 403
    assert "`murmurfl owner login KEY CONNECTION`" in json.loads(body)["detail"]


def test_nodes_and_processes_are_read_as_far_as_they_are_known(owners):
    kinds = {"node": Sender(b"n", 10, 1.0), "small": Sender(b"n", 2, 1.0), "nobody": None, "ended": UNREAD}
    seen = []

    async def senders(path, headers):
        seen.append(path)
        return kinds[path.rpartition("/")[2]]

    length = b"content-length", b"3"
    for prefix in ("/v1/fleet/", "/v1/runtime/"):
        assert asked(owners, f"{prefix}node", length, senders=senders, body=b"abc") == (0, b"abc")
        assert asked(owners, f"{prefix}small", length, senders=senders, body=b"abc")[0] == 413
        assert asked(owners, f"{prefix}nobody", length, senders=senders)[0] == 401
        assert asked(owners, f"{prefix}ended", length, senders=senders) == (0, b"")
    seen.clear()
    asked(owners, RUNS, bearer(LOGIN), senders=senders)
    asked(owners, "/health", senders=senders)
    assert seen == []


@pytest.mark.parametrize(
    ("status", "answer", "left"),
    [(200, b"a message", True), (200, b"", False), (401, b'{"detail": "no"}', False), (500, b"no", False)],
)
def test_only_a_message_lets_a_node_upload_another_reply(owners, status, answer, left):
    """A refusal would be free to have, so a node could fill the server's disk."""
    ends = []

    async def behind(scope, receive, send):
        length = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": answer})

    async def senders(path, headers):
        return Sender(b"n", 100, 1.0)

    async def receive():
        return {"type": "http.request", "body": bytes(10)}

    async def send(message):
        ends.append(message.get("status"))

    opened = Gate(behind, owners, SERVER, senders, clock=lambda: NOW, largest_reply=10)
    for path in (gate.UPLOAD, gate.FETCH, gate.UPLOAD):
        scope = {"type": "http", "path": path, "headers": [(b"content-length", b"10")], "client": ("10.0.0.9", 1)}
        asyncio.run(opened(scope, receive, send))
    assert (ends[-2] != 413) == left


def test_who_started_the_server_may_look_and_register_nodes_and_nothing_else(owners):
    secret = b"s" * 32
    login = own_key(secret).login(SERVER, until=1500)
    for command in ("list-runs", "list-nodes", "register-node", "unregister-node"):
        assert asked(owners, f"{CONTROL}{command}", bearer(login), secret=secret)[0] == 0
        assert asked(None, f"{CONTROL}{command}", bearer(login), secret=secret)[0] == 0
    for command in ("start-run", "stop-run", "stream-logs", "list-runs/", "start-automation", "pull-artifacts"):
        assert asked(owners, f"{CONTROL}{command}", bearer(login), secret=secret)[0] == 403
    for other in ({}, {"secret": b"t" * 32}):
        assert asked(owners, RUNS, bearer(login), **other)[0] == 403
    assert asked(owners, RUNS, bearer(own_key(secret).login(SERVER, until=999)), secret=secret)[0] == 403


def test_a_published_document_is_for_whoever_knows_its_digest_and_no_other_file_is(tmp_path):
    folder, digest = tmp_path / "published", "ab" * 32
    folder.mkdir()
    (folder / f"{digest}.json").write_bytes(b"{}")
    (tmp_path / "secret.json").write_bytes(b"secret")
    assert asked(None, f"{PUBLISHED}{digest}", published=folder) == (200, b"{}")
    for name in ("", "cd" * 32, f"{digest}.json", "../secret", f"{digest}/../../secret", digest.upper(), "."):
        assert asked(None, f"{PUBLISHED}{name}", published=folder) == (404, b"")
    assert asked(None, f"{PUBLISHED}{digest}")[0] == 403


def test_a_published_document_goes_out_in_parts_and_ends_its_connection(tmp_path):
    """Whoever has a kit could hold a document of megabytes on each connection, and send as much after it."""
    document, sent = bytes(range(256)) * 1000, []
    (tmp_path / f"{SERVER}.json").write_bytes(document)

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("a body was read")

    for name in (SERVER, "no digest"):
        scope = {"type": "http", "path": PUBLISHED + name, "headers": []}
        asyncio.run(Gate(None, None, SERVER, nobody, published=tmp_path)(scope, receive, send))
    starts = [one for one in sent if "status" in one]
    assert [one["status"] for one in starts] == [200, 404]
    assert all((b"connection", b"close") in one["headers"] for one in starts)
    parts = [one["body"] for one in sent if "body" in one]
    assert b"".join(parts) == document
    assert max(map(len, parts)) <= 1 << 16
    assert sum(not one.get("more_body", False) for one in sent if "body" in one) == 2


def test_removed_owners_and_a_missing_list_are_kept_out(owners, caplog):
    kept = owners.read_text()
    owners.write_text("")
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 403
    owners.write_text(kept)
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 0
    owners.chmod(0o666)
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 403
    owners.chmod(0o600)
    owners.write_text(kept + "nonsense\n")
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 403
    owners.unlink()
    assert asked(owners, RUNS, bearer(LOGIN))[0] == 403
    assert asked(None, RUNS, bearer(LOGIN))[0] == 403
    assert len([message for message in caplog.messages if message.startswith("Nobody may command")]) == 3


def test_the_log_names_the_owner_and_is_not_filled_by_others(owners, caplog):
    caplog.set_level("INFO", "flwr")
    asked(owners, f"{CONTROL}stop-run", bearer(LOGIN))
    assert caplog.messages == [f"{COMMANDED}Ana of the  clinic: stop-run"]
    caplog.clear()
    closed = Gate(None, owners, SERVER, nobody, clock=lambda: NOW)

    async def nothing(message=None):
        return message

    for path in (CONTROL, RUNS + "\x1b[2J\nCommand of Ana", RUNS):
        asyncio.run(closed({"type": "http", "path": path, "headers": [], "client": None}, nothing, nothing))
    assert caplog.messages == ["Refused /v1/control/list-runs Command of Ana from ?: no login of an owner."]


def test_a_list_of_owners_is_read_with_its_mistakes_named(owners):
    assert read_owners(owners) == {ANA.public: "Ana of the  clinic"}
    owners.write_text(f"{EVE.public.hex()}\n")
    assert read_owners(owners) == {EVE.public: EVE.public.hex()[:8]}
    for text, place in ((f"\n{'0' * 64} nobody\n", "line 2"), ("Ana\n", "line 1")):
        owners.write_text(text)
        with raises(ConfigurationError, "malformed", "owners", match=f"{place} of "):
            read_owners(owners)
    owners.write_bytes(b"\xff")
    with raises(ConfigurationError, "malformed", match="got no text"):
        read_owners(owners)
    owners.unlink()
    os.mkfifo(owners, 0o600)
    with raises(ConfigurationError, "malformed", match="no regular file"):  # and nobody waited for its other end
        read_owners(owners)
    owners.unlink()
    owners.touch(0o600)
    owners.chmod(0o602)
    with raises(ConfigurationError, "insecure", match="mode 602"):
        read_owners(owners)
    with raises(ConfigurationError, "malformed", match="No such file"):
        read_owners(owners.with_name("none"))


def test_a_server_is_known_by_its_own_certificate(tmp_path):
    made = make_server_certificates(tmp_path)
    assert server_name(None) == ""
    assert len(server_name(made.certificate)) == 64
    assert server_name(made.certificate) != server_name(made.authority)
    (shown,) = x509.load_pem_x509_certificates(made.certificate.read_bytes())
    assert name_of(shown) == server_name(made.certificate)
    with raises(ConfigurationError, "unreadable", match="certificate"):
        server_name(made.key)
    with raises(ConfigurationError, "unreadable", match="certificate"):
        server_name(tmp_path / "none")


def test_options_that_would_let_others_command_are_refused():
    tls = ["--ssl-certfile", "server.pem", "--host", "0.0.0.0", "--enable-supernode-auth"]
    for options in (["--insecure"], ["--insecure", "--host", "localhost"], ["--insecure", "--host", "::1"], tls):
        SuperLinkOptions.read([*options] if "--host" in options else [*options, "--host", "127.0.0.1"]).check()
    for options in (["--insecure", "--host", "0.0.0.0"], [*tls, "--insecure"], ["--host", "fl.example.org"]):
        with raises(ConfigurationError, "insecure", match="without TLS"):
            SuperLinkOptions.read(options).check()
    with raises(ConfigurationError, "insecure", match="Expected --enable-supernode-auth"):
        SuperLinkOptions.read(tls[:-1]).check()
    SuperLinkOptions.read([*tls[:-1], "--simulation"]).check()
    assert SuperLinkOptions.read(["--port", "+9000"]).port == 9000  # as Flower reads it
    with raises(ConfigurationError, "insecure", match="superexec-auth-secret-file"):
        SuperLinkOptions.read([*tls, "--isolation", "process"]).check()
    SuperLinkOptions.read([*tls, "--isolation", "process", "--superexec-auth-secret-file", "s"]).check()
    assert SuperLinkOptions.read(tls).nearby.startswith("127.0.0.1:")
    assert SuperLinkOptions.read([*tls, "--host", "::", "--port", "9"]).nearby == "[::1]:9"


@pytest.mark.parametrize("planted", ["prefix", "list", "server"])
def test_a_check_that_is_taken_away_is_noticed(owners, monkeypatch, planted):
    if planted == "prefix":
        monkeypatch.setattr(gate, "OPEN_PATHS", ("/v1/",))
        assert asked(owners, RUNS)[0] == 0
    elif planted == "list":
        monkeypatch.setattr(gate, "read_owners", lambda path: {EVE.public: "Eve"})
        assert asked(owners, RUNS, bearer(EVE.login(SERVER, until=2000)))[0] == 0
    else:
        assert asked(owners, RUNS, bearer(ANA.login("cd" * 32, until=2000)), server="cd" * 32)[0] == 0
