"""Limits of connections and bodies: who is closed for whom, what waits, and what is refused."""

import asyncio
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from murmurfl.app.fleet.servers import limits
from murmurfl.app.fleet.servers.limits import (
    KNOWN_PER_SENDER,
    UNKNOWN,
    UNKNOWN_PER_ADDRESS,
    BodyLimits,
    ConnectionLimits,
    RejectedRequestError,
    UploadLimits,
    known_connections,
    largest_reply,
    request_of_unknown,
)
from murmurfl.app.nodes.connection import tls_context
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises
from tests.harness.loopback_servers import Authority

MIB = 1 << 20


# Connections.


class Counted:
    """A connection, as the limits know it."""

    def __init__(self, address, log):
        self.address, self.sender, self.open, self._log = address, None, True, log

    def abort(self):
        self.open = False
        self._log.append(self)


def counted(limited, address, closed):
    made = Counted(address, closed)
    limited.add(made)
    return made


def test_a_new_connection_closes_the_oldest_of_its_address_and_no_other():
    limited, closed = ConnectionLimits(1024), []
    others = [counted(limited, "other", closed) for _ in range(UNKNOWN_PER_ADDRESS)]
    many = [counted(limited, "loud", closed) for _ in range(3 * UNKNOWN_PER_ADDRESS)]
    assert closed == many[: 2 * UNKNOWN_PER_ADDRESS]
    assert all(one.open for one in others)


def test_many_addresses_close_the_oldest_of_the_loudest():
    limited, closed = ConnectionLimits(1024), []
    loud = [counted(limited, "loud", closed) for _ in range(UNKNOWN_PER_ADDRESS)]
    quiet = [counted(limited, str(number), closed) for number in range(UNKNOWN)]
    assert closed[: UNKNOWN_PER_ADDRESS - 1] == loud[: UNKNOWN_PER_ADDRESS - 1]
    assert sum(one.open for one in [*loud, *quiet]) == UNKNOWN


@pytest.mark.parametrize("many", ["2001:db8:0:{:x}::1", "127.0.0.{}", "192.0.2.{}"])
def test_one_customer_with_many_addresses_displaces_nobody_else(many):
    limited, closed = ConnectionLimits(1024), []
    others = [counted(limited, limits._network((address, 1)), closed) for address in ("2001:db8:1::1", "198.51.100.7")]
    for number in range(4 * UNKNOWN):
        counted(limited, limits._network((many.format(number % UNKNOWN), 1)), closed)
    assert all(one.open for one in others)


def test_a_known_sender_keeps_its_connections_whoever_shares_its_address():
    limited, closed = ConnectionLimits(1024), []
    known = [counted(limited, "clinic", closed) for _ in range(KNOWN_PER_SENDER)]
    assert all(limited.know(one, b"node") for one in known)
    for _ in range(4 * UNKNOWN):
        counted(limited, "clinic", closed)
    assert all(one.open for one in known)
    more = counted(limited, "clinic", closed)
    assert not limited.know(more, b"node")
    assert limited.know(more, b"another")
    assert limited.know(known[0], b"node")  # its next request
    limited.remove(known[0])
    assert limited.know(counted(limited, "clinic", closed), b"node")


def test_more_known_connections_than_files_stay_among_the_unknown():
    limited, closed = ConnectionLimits(768), []
    most = known_connections(768)
    assert 0 < most < 768 - UNKNOWN
    for number in range(most):
        assert limited.know(counted(limited, "a", closed), str(number).encode())
    last = counted(limited, "b", closed)
    assert limited.know(last, b"last")  # and is answered
    assert last.sender is None


def test_connections_that_end_are_forgotten():
    limited = ConnectionLimits(1024)
    for number in range(5000):
        one = counted(limited, f"10.0.0.{number % 250}", [])
        if number % 2:
            limited.know(one, str(number).encode())
        limited.remove(one)
    counts = limited._unknown, limited._addresses, limited._areas, limited._senders
    assert [len(one) for one in counts] == [0, 0, 0, 0]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (("::1", 1, 0, 0), "::/64"),
        (None, "?"),
        ("", "?"),
        (("pipe", 1), "?"),
    ],
)
def test_addresses_that_one_customer_has_count_together(peer, network):
    assert limits._network(peer) == network


@contextmanager
def serving(application, monkeypatch, seconds, context=None, buffer=None):
    """uvicorn within the limits, in a thread; its port."""
    monkeypatch.setattr(limits, "UNKNOWN_S", seconds)
    made = ConnectionLimits(1024, context)
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None, lifespan="off", **made.options()))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        limit = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < limit
            time.sleep(0.01)
        (listening,) = server.servers[0].sockets
        if buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


LARGE = 4 * MIB


async def much(scope, receive, send):
    with request_of_unknown() as connection:
        connection.is_from(b"node", 60.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(LARGE)})


@contextmanager
def asked_for_much(monkeypatch, tmp_path, secured):
    """A connection on which an answer comes through small buffers, as it does from far away."""
    authority = Authority(tmp_path) if secured else None
    context, small = authority and authority.context(), 64 << 10
    with serving(much, monkeypatch, 0.5, context, buffer=small) as port, socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, small)
        plain.settimeout(10)
        plain.connect(("127.0.0.1", port))
        trusted = ssl.create_default_context(cafile=authority.path) if authority else None
        connection = trusted.wrap_socket(plain, server_hostname="127.0.0.1") if trusted else plain
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        yield connection


@pytest.mark.parametrize("secured", [False, True])
def test_a_node_on_a_slow_line_gets_its_whole_answer(monkeypatch, tmp_path, secured):
    monkeypatch.setattr(limits, "_TLS_GOODBYE_S", 0.1)
    count = 0
    with asked_for_much(monkeypatch, tmp_path, secured) as connection:
        while count < LARGE and (part := connection.recv(64 << 10)):
            count += len(part)
            time.sleep(0.02 * len(part) / (64 << 10))
    assert count >= LARGE


@pytest.mark.parametrize("secured", [pytest.param(False, marks=pytest.mark.more_cases), True])
def test_a_node_that_reads_nothing_of_its_answer_is_closed(monkeypatch, tmp_path, secured):
    count = 0
    with asked_for_much(monkeypatch, tmp_path, secured) as connection:
        time.sleep(2.0)
        with suppress(OSError):
            while part := connection.recv(64 << 10):
                count += len(part)
    assert count < LARGE


async def answers(scope, receive, send):
    with request_of_unknown() as connection:
        if scope["path"] == "/known":
            connection.is_from(b"node", None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] in ("/slow", "/known"):
            await asyncio.sleep(1.0)
        await send({"type": "http.response.body", "body": b"ok"})


SLOW = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nhost: x\r\n",
    "an answer that takes long": b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n",
    "half a second head": b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n",
}


@pytest.mark.parametrize("what", SLOW)
def test_a_stranger_has_little_time(monkeypatch, what):
    with serving(answers, monkeypatch, 0.5) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(SLOW[what])
        with suppress(ConnectionResetError):
            while connection.recv(4096):
                pass


@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n"])
def test_half_a_handshake_ends_and_a_whole_one_is_answered(monkeypatch, tmp_path, start):
    authority = Authority(tmp_path)
    with serving(answers, monkeypatch, 1.0, authority.context()) as port:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(start)
            with suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        answer = httpx.get(f"https://127.0.0.1:{port}/", verify=tls_context(authority.path), trust_env=False)
    assert answer.text == "ok"


def test_a_head_that_comes_byte_by_byte_ends(monkeypatch):
    with serving(answers, monkeypatch, 0.5) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
        assert dripped(connection, 1000) < 1000


def dripped(connection, most):
    """How many bytes are taken, one every 10 ms."""
    for number in range(most):
        try:
            connection.sendall(b"a")
        except OSError:
            return number
        time.sleep(0.01)
    return most


def test_a_known_sender_has_the_time_it_is_given(monkeypatch):
    with serving(answers, monkeypatch, 0.5) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"GET /known HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        said = b""
        while part := connection.recv(4096):
            said += part
    assert said.endswith(b"ok")


def test_the_limit_of_files_is_raised_and_one_that_is_too_small_is_refused():
    program = (
        "import resource, sys; from murmurfl.app.fleet.servers.limits import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))\n"
        "print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )

    def raised(hard):
        return subprocess.run([sys.executable, "-c", program, str(hard)], capture_output=True, text=True, timeout=60)

    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2048)
    assert raised(hard).stdout.strip() == f"{hard} ({hard}, {hard})"
    assert "Expected at least 768 open files to be allowed, got 700" in raised(700).stderr


# Bodies.


def body(limited, parts, headers=(), largest=MIB, sender=b"a", during=None):
    """A coroutine that reads a body, comes in these parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages = [*messages, {"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        return messages.pop(0)

    async def read():
        async with limited.body(receive, headers, sender, largest) as found:
            if during is not None:
                await during.wait()
            return len(found)

    return read()


def declared(size):
    return [(b"Content-Length", str(size).encode())]


CHUNKED = [(b"transfer-encoding", b"chunked")]


def test_a_body_is_read_up_to_its_limit():
    limited = BodyLimits()
    assert asyncio.run(body(limited, [b"ab", b"c"], declared(3))) == 3
    assert asyncio.run(body(limited, [bytes(MIB)], CHUNKED)) == MIB
    assert asyncio.run(body(limited, [], [])) == 0
    for headers in (declared(MIB + 1), declared(-1), declared("x"), [*declared(1), *declared(2)]):
        with pytest.raises(RejectedRequestError):
            asyncio.run(body(limited, ["never read"], headers))
    for headers in (CHUNKED, declared(10), [*declared(10), *CHUNKED]):  # it says less than it sends
        with pytest.raises(RejectedRequestError):
            asyncio.run(body(limited, [bytes(MIB), b"a"], headers))


def test_bodies_that_do_not_fit_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(limits, "_TURN_S", 0.05)
    largest = limits.LARGEST_BODY

    async def course():
        limited, end = BodyLimits(), asyncio.Event()
        for sender in (b"a", b"b", b"c", b"d"):
            for _ in range(2):
                task = body(limited, [b"x"], declared(largest), largest, sender, end)
                running.append(asyncio.ensure_future(task))
        await asyncio.sleep(0)
        with pytest.raises(RejectedRequestError) as refused:
            await body(limited, [b"x"], declared(largest), largest, b"e")
        assert refused.value.status == 503
        assert await body(limited, [b"x"], declared(9), largest, b"e") == 1  # a small one waits for nobody
        monkeypatch.setattr(limits, "_TURN_S", 10.0)
        waiting = asyncio.ensure_future(body(limited, [b"x"], declared(largest), largest, b"e"))
        await asyncio.sleep(0)
        end.set()
        assert await waiting == 1
        assert await asyncio.gather(*running) == [1] * 8
        assert not limited._held

    running = []
    asyncio.run(course())


def test_one_sender_does_not_take_the_place_of_all(monkeypatch):
    monkeypatch.setattr(limits, "_TURN_S", 0.05)
    largest = limits.LARGEST_BODY

    async def course():
        limited, end = BodyLimits(), asyncio.Event()
        many = [body(limited, [b"x"], declared(largest), largest, b"loud", end) for _ in range(9)]
        running = [asyncio.ensure_future(one) for one in many]
        await asyncio.sleep(0)
        assert await body(limited, [b"x"], declared(largest), largest, b"quiet") == 1
        await asyncio.sleep(0.2)
        end.set()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert sum(isinstance(one, RejectedRequestError) for one in ended) == 7

    asyncio.run(course())


def test_a_body_that_stops_coming_is_given_up(monkeypatch):
    monkeypatch.setattr(limits, "_SILENT_S", 0.05)

    async def never():
        await asyncio.sleep(10)

    async def left():
        return {"type": "http.disconnect"}

    async def read(receive):
        async with BodyLimits().body(receive, declared(3), b"a", MIB):
            raise AssertionError

    for receive, status in ((never, 408), (left, 400)):
        with pytest.raises(RejectedRequestError) as refused:
            asyncio.run(read(receive))
        assert refused.value.status == status


def test_a_node_uploads_a_reply_for_each_message_and_no_more():
    limited = UploadLimits(10)
    limited.take(b"a", 6)
    limited.take(b"a", 4)
    with pytest.raises(RejectedRequestError):
        limited.take(b"a", 1)
    limited.take(b"b", 10)
    for _ in range(9):
        limited.asked(b"a")
    for _ in range(4):
        limited.take(b"a", 10)
    with pytest.raises(RejectedRequestError):
        limited.take(b"a", 1)


def test_the_size_of_a_reply_is_a_setting():
    assert largest_reply(None) == 1 << 30
    assert largest_reply("7") == 7 * MIB
    for wrong in ("", "0", "-1", "1.5", "a", "9" * 30):
        with raises(ConfigurationError, "out-of-range", "MURMURFL_LARGEST_REPLY_MIB"):
            largest_reply(wrong)


def test_the_page_states_the_limits():
    page = " ".join((Path(__file__).parents[4] / "docs" / "deployment.md").read_text().split())
    for said in (
        f"{UNKNOWN_PER_ADDRESS} connections at a time; a new one closes the oldest",
        f"{UNKNOWN} connections, about half a MiB of memory each",
        f"{limits.UNKNOWN_S:.0f} s for TLS and the head of a request ({limits.LONGEST_HEAD >> 10} KiB)",
        f"{limits.LARGEST_INTRODUCTION >> 10} KiB, for the calls by which",
        f"{KNOWN_PER_SENDER} connections; {limits.LARGEST_BODY // MIB} MiB for an object",
        f"{limits.LARGEST_CALL // MIB} MiB for any other call, {limits.NODE_S / 60:.0f} minutes for each",
        f"{largest_reply(None) // MIB:,} MiB for each message",
    ):
        assert said in page
