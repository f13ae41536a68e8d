"""The web server of health and figures: what it answers, and what whoever reaches it cannot do."""

import http.client
import socket
import time

import pytest
from murmurfl.app.nodes.watching import health as endpoint
from murmurfl.app.nodes.watching.health import (
    LONGEST_REQUEST,
    MOST_CONNECTIONS,
    Address,
    Addresses,
    Answer,
    Endpoint,
    kept_a_while,
    shown,
)
from murmurfl.privacy import ConfigurationError

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
    with pytest.raises(ConfigurationError, match="Choose another address"), Endpoint(listening.address, {}):
        pass


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


@pytest.mark.parametrize("typed", ["", "host", "host:", "host:0", "host:65536", "host:9x", "::1", "1:2:3", "host:-1"])
def test_what_is_no_address_is_refused(typed):
    with pytest.raises(ConfigurationError, match="Expected an address as HOST:PORT"):
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
