"""``murmurfl server`` around a SuperLink of the test's own: its rounds, its end, its figures."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from murmurfl.app.engines.loopback import free_port
from murmurfl.app.fleet.health import SERVER, Addresses, Shown
from murmurfl.app.fleet.servers.gate import PROOF_HEADER, SuperLinkOptions, proof_of
from murmurfl.app.fleet.servers.watched_server import (
    ServerError,
    ServerHealth,
    ServerMetrics,
    _environment,
    _Rounds,
    _Server,
    run_server,
)
from murmurfl.app.nodes.journal import EntryWriter, Journal
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies import RoundReport
from murmurfl.strategies.callbacks.metrics_file import FIGURES_VARIABLE, MetricsFile

from tests.harness.errors import raises

REPORT = RoundReport(1, asked=5, aggregated=2, lost=1, refused={"cap-reached": 2})


def test_each_round_is_said_once_and_several_at_a_time_together(tmp_path, caplog):
    caplog.set_level("INFO")
    journal = Journal()
    journal.listen(EntryWriter())
    file, rounds = MetricsFile(tmp_path), _Rounds(tmp_path, journal)
    rounds.look()
    file.note(REPORT, 7)
    rounds.look()
    rounds.look()
    for _ in range(2):
        file.note(RoundReport(3, asked=5, aggregated=5), 7)
    rounds.look()
    (tmp_path / "figures.json").unlink()
    rounds.look()
    assert caplog.messages == [
        "Round 1 of 7 ended: 2 of 5 aggregated, 2 refused, 1 lost, 0 late, 0 malformed; 0 s.",
        "2 rounds, up to 3, of 7 ended: 10 of 10 aggregated, 0 refused, 0 lost, 0 late, 0 malformed; 0 s.",
    ]


def test_lines_of_two_trainings_say_of_which_run_a_round_is(tmp_path, caplog):
    caplog.set_level("INFO")
    journal = Journal()
    journal.listen(EntryWriter())
    first, second, rounds = MetricsFile(tmp_path, 11), MetricsFile(tmp_path, 22), _Rounds(tmp_path, journal)
    for file in (first, second):
        file.note(REPORT, 7)
        rounds.look()
    for file in (first, second):
        file.note(REPORT, 7)
    rounds.look()
    assert [line.split(" ended")[0] for line in caplog.messages] == [
        "Round 1 of 7 of run 11",
        "Round 1 of 7 of run 22",
        "2 rounds, up to 1, of 7",
    ]


def test_a_server_shows_the_counts_of_its_rounds(tmp_path):
    health = ServerHealth(lambda: True, lambda: 0.0)
    metrics = ServerMetrics(health, tmp_path, 1.0)
    assert "murmurfl_round " not in Shown(SERVER, metrics.read).text().decode()
    MetricsFile(tmp_path).note(REPORT, 7)
    health.started()
    text = Shown(SERVER, metrics.read).text().decode().splitlines()
    assert "murmurfl_healthy 0.0" in text  # it has not answered yet
    health.ask()
    text = Shown(SERVER, metrics.read).text().decode().splitlines()
    for line in (
        "murmurfl_healthy 1.0",
        "murmurfl_superlink_running 1.0",
        "murmurfl_rounds_total 1.0",
        "murmurfl_asked_total 5.0",
        "murmurfl_releases_total 2.0",
        "murmurfl_lost_total 1.0",
        'murmurfl_refusals_total{reason="cap-reached"} 2.0',
        "murmurfl_rounds_planned 7.0",
    ):
        assert line in text


def test_what_a_run_needs_is_installed_by_nobody_who_submits_it(tmp_path, monkeypatch):
    monkeypatch.delenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", raising=False)
    environment = _environment(tmp_path)
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment[FIGURES_VARIABLE] == str(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"


def superlink(monkeypatch, program, started=None):
    """Have another program in the SuperLink's place; what was started is kept."""
    start, kept = subprocess.Popen, [] if started is None else started

    def starting(command, **options):
        kept.append(command)
        return start([sys.executable, "-c", program, *command], **options)

    monkeypatch.setattr("murmurfl.app.fleet.servers.watched_server.subprocess.Popen", starting)


def test_a_superlink_that_never_answered_is_not_started_again(monkeypatch):
    superlink(monkeypatch, "raise SystemExit(7)")
    with raises(ServerError, "failed", match="got exit code 7"):
        run_server(["--port", str(free_port())], Addresses())


def test_an_address_that_is_none_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("murmurfl.app.fleet.servers.watched_server.subprocess.Popen", None)
    with raises(ConfigurationError, "malformed", "address"):
        run_server([], Addresses(health="nowhere"))


def database_of(folder, mode=None):
    """What a server says of a database with this mode, or of none, and the mode it has afterwards."""
    database = folder / "superlink.db"
    if mode is not None:
        database.touch()
        database.chmod(mode)
    with pytest.raises(ServerError) as ended:
        run_server(["--port", str(free_port()), "--database", str(database)], Addresses())
    return str(ended.value), database.stat().st_mode & 0o777


def test_a_new_database_is_its_owners_alone_whatever_the_umask(monkeypatch, tmp_path):
    superlink(monkeypatch, "raise SystemExit(7)")
    before = os.umask(0)
    try:
        said, mode = database_of(tmp_path)
    finally:
        os.umask(before)
    assert "got exit code 7" in said
    assert mode == 0o600


def test_a_database_that_others_may_read_is_a_warning(monkeypatch, tmp_path, caplog):
    superlink(monkeypatch, "raise SystemExit(7)")
    assert "got exit code 7" in database_of(tmp_path, 0o600)[0]
    assert not [message for message in caplog.messages if "database that" in message]
    assert "got exit code 7" in database_of(tmp_path, 0o644)[0]
    (said,) = [message for message in caplog.messages if "database that" in message]
    assert said == (
        f"Expected a SuperLink's database that only its owner may read, got {tmp_path / 'superlink.db'} with mode 644: "
        f"run `chmod 600 {tmp_path / 'superlink.db'}`. It holds what nodes send."
    )


def test_a_database_that_others_may_change_is_refused_and_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr("murmurfl.app.fleet.servers.watched_server.subprocess.Popen", None)
    assert "chmod 600" in database_of(tmp_path, 0o620)[0]
    log = tmp_path / "superlink.db-wal"
    log.touch()
    log.chmod(0o602)
    assert f"got {log} with mode 602" in database_of(tmp_path, 0o600)[0]
    log.unlink()
    tmp_path.chmod(0o777)
    assert f"chmod o-w {tmp_path}`" in database_of(tmp_path, 0o600)[0]


ANSWERS_ONCE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"")
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
server.handle_request()
"""


@pytest.mark.long
def test_a_superlink_that_ends_is_started_again_until_somebody_interrupts(monkeypatch):
    superlink(monkeypatch, ANSWERS_ONCE)
    journal, noted, pauses = Journal(), [], []
    journal.listen(lambda entry: noted.append(entry.kind))

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr("murmurfl.app.fleet.servers.watched_server.time", clock)
    run_server(["--port", str(free_port())], Addresses(), journal=journal)
    assert pauses == [1.0, 2.0, 4.0]
    assert noted == ["started", "stopped"]


@pytest.mark.long
def test_a_real_superlink_is_healthy_and_ends_with_its_server(tmp_path):
    """Started as an operator does, and stopped as systemd does; no process of it stays."""
    port, shown = free_port(), free_port()
    command = [sys.executable, "-m", "murmurfl.app", "server", "--health-address", str(shown)]
    command += ["--metrics-address", str(shown), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        command += ["--simulation", "--database", "superlink.db"]
        process = subprocess.Popen(command, stderr=log, stdout=log, cwd=tmp_path)
    try:
        statuses = set()
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                statuses.add(httpx.get(f"http://127.0.0.1:{shown}/health").status_code)
            if 200 in statuses or process.poll() is not None:
                break
            time.sleep(0.1)
        assert 200 in statuses, (tmp_path / "log").read_text()
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("superlink.db*")}
        assert (tmp_path / "superlink.db").stat().st_size > 0
        assert modes == dict.fromkeys(modes, 0o600), "those that SQLite makes beside it too"
        assert "murmurfl_superlink_running 1.0" in httpx.get(f"http://127.0.0.1:{shown}/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        text = (tmp_path / "log").read_text()
        assert "\x1b" not in text
        assert "Stopped." in text
    finally:
        process.kill()
        process.wait()


class Impostor(BaseHTTPRequestHandler):
    """Whatever else may have the port: it answers as a closed SuperLink would, without its secret."""

    asked: ClassVar[list] = []
    proof = ""

    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        self.answer(403)

    def answer(self, status):
        self.asked.append(self.path)
        self.send_response(status)
        self.send_header(PROOF_HEADER, self.proof)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def impostor():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Impostor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Impostor.asked.clear()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_another_process_on_the_port_is_given_nothing(monkeypatch):
    started = []
    superlink(monkeypatch, "import time; time.sleep(60)", started)
    with impostor() as port, raises(ServerError, "failed", match="another program has that port"):
        run_server(["--insecure", "--host", "127.0.0.1", "--port", str(port)], Addresses())
    assert "/v1/control/" in Impostor.asked
    assert len(started) == 1  # no flower-superexec, which would take its orders from there


def test_a_gate_shows_whose_it_is_by_a_secret_and_a_fresh_nonce():
    with impostor() as port:
        at = SuperLinkOptions.read(["--insecure", "--host", "127.0.0.1", "--port", str(port)])
        assert at.refuses(b"secret") is False
        Impostor.proof = proof_of(b"secret", b"an earlier nonce").decode()
        try:
            assert at.refuses(b"secret") is False
        finally:
            Impostor.proof = ""
    assert at.refuses(b"secret") is None  # too busy to answer is not open


@pytest.mark.long
def test_nothing_is_imported_from_the_folder_that_a_server_is_started_in(monkeypatch, tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    command = _Server(["--version"], SuperLinkOptions.read([]), tmp_path, None).superlink()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Flower version" in ended.stdout


@pytest.mark.parametrize("name", ["FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"])
def test_a_second_way_in_is_not_opened_by_an_environment(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "1")
    assert name not in _environment(tmp_path)
