"""A launch tells success from failure and leaves nothing behind: three real `flwr run`s, and many with stand-ins."""

import json
import math
import os
import random
import secrets
import signal
import string
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import LaunchError, is_listening, toml_document
from murmurfl.app.engines.superlink import override_document, run_flower_app
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

MARKER = "MURMURFL_TEST_LAUNCH"

PROJECT = """
[project]
name = "tiny-app"
version = "1.0.0"
description = "Adds one"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "tiny.server_app:app"
clientapp = "tiny.client_app:app"

[tool.flwr.app.config]
num-rounds = 1
text = ""
flag = false
ratio = 0.5
failure = ""
own-project = ""
"""

CLIENT_APP = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    arrays = ArrayRecord([a + 1 for a in message.content["arrays"].to_numpy_ndarrays()])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
"""

SERVER_APP = """
import json
import os
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    config = dict(context.run_config)
    home = os.environ["FLWR_HOME"]
    superlink = (Path(home) / "config.toml").read_text()
    print("SEEN " + json.dumps({"config": config, "home": home, "superlink": superlink, "cwd": os.getcwd()}))
    if config["own-project"]:
        with open(config["own-project"], "a") as file:
            file.write("# changed by the run")
    if config["failure"]:
        raise ValueError(config["failure"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    result = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=config["num-rounds"])
    print("MODEL " + json.dumps(result.arrays.to_numpy_ndarrays()[0].tolist()))
"""


def write_app(folder, project=PROJECT):
    package = folder / "tiny"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project)
    (package / "__init__.py").touch()
    (package / "client_app.py").write_text(CLIENT_APP)
    (package / "server_app.py").write_text(SERVER_APP)
    # An environment inside the app's folder, as `uv` and many users make it, is not part of the app.
    (folder / ".venv").mkdir()
    (folder / ".venv" / "broken.py").write_text("raise RuntimeError('bundled')")
    return folder


def marked(value):
    """Processes whose environment carries a launch's test marker: independent of how launch finds them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={value}".encode() in (folder / "environ").read_bytes():
                found.append((folder.name, (folder / "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def line_after(word, text):
    return json.loads(next(line for line in text.splitlines() if line.startswith(word)).removeprefix(word))


def assert_nothing_left(marker, log):
    seen = line_after("SEEN ", log)
    assert not marked(marker)
    assert not Path(seen["home"]).exists()
    (connection,) = [c for c in tomllib.loads(seen["superlink"])["superlink"].values() if isinstance(c, dict)]
    assert not is_listening(int(connection["address"].rpartition(":")[2]))


TEXT = 'two  words, "quotes", it\'s a \\ and a café = [x]'


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A run that completes and one whose ServerApp raises, at once: they must not get into each other's way."""
    folder = tmp_path_factory.mktemp("launch")
    runs = {
        "good": {"text": TEXT, "flag": True, "ratio": 1e-5, "num-rounds": 2},
        "bad": {"failure": f"it broke: {TEXT}", "own-project": str(folder / "bad" / "pyproject.toml")},
    }

    def one(name):
        lines = []
        marker = secrets.token_hex(8)
        app = write_app(folder / name)
        try:
            outcome = run_flower_app(
                app,
                run_config=runs[name],
                num_supernodes=2,
                total_cpus=2,
                timeout_s=240,
                environment={MARKER: marker},
                on_line=lines.append,
            )
        except LaunchError as error:
            outcome = error
        return outcome, lines, marker, app

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(one, runs), strict=True))


@pytest.mark.long
def test_a_good_run_completes_with_the_configuration_it_was_given(two_runs):
    result, lines, marker, app = two_runs["good"]
    assert not isinstance(result, LaunchError), result
    assert result.status == "finished:completed"
    assert result.run_id > 0
    assert result.log.splitlines() == "\n".join(lines).splitlines()
    assert line_after("MODEL ", result.log) == [2.0, 2.0, 2.0]
    seen = line_after("SEEN ", result.log)
    given = {"text": TEXT, "flag": True, "ratio": 1e-5, "num-rounds": 2, "failure": "", "own-project": ""}
    assert seen["config"] == given
    assert [type(seen["config"][key]) for key in given] == [type(value) for value in given.values()]
    assert seen["cwd"] == str(Path.cwd())
    assert (app / "pyproject.toml").read_text() == PROJECT
    assert_nothing_left(marker, result.log)


@pytest.mark.long
def test_a_server_app_that_raises_is_a_failure_that_names_the_exception(two_runs):
    """`flwr run` returns 0 here. The app also rewrites its own pyproject.toml, which must not stay."""
    error, lines, marker, app = two_runs["bad"]
    assert isinstance(error, LaunchError)
    assert isinstance(error, RuntimeError)
    assert error.reason == f"The run failed: ValueError: it broke: {TEXT}"
    assert str(error).startswith(error.reason + "\n")
    assert "Traceback" in error.log
    assert error.log.splitlines() == "\n".join(lines).splitlines()
    assert (app / "pyproject.toml").read_text() == PROJECT
    assert_nothing_left(marker, error.log)


@pytest.mark.long
def test_an_unknown_key_is_refused_in_flowers_words(tmp_path):
    marker = secrets.token_hex(8)
    with pytest.raises(LaunchError, match=r"Invalid run configuration.*'speed'") as caught:
        run_flower_app(
            write_app(tmp_path / "app"),
            run_config={"speed": 3},
            num_supernodes=2,
            timeout_s=120,
            environment={MARKER: marker},
            on_line=lambda line: None,
        )
    assert "\n" not in caught.value.reason
    assert not marked(marker)


# With stand-ins for Flower's executables: seconds, not minutes, for all that can go wrong.

SUPERLINK = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

if os.environ.get("FAKE_SUPERLINK") == "broken":
    sys.exit("no database")
port = int(sys.argv[sys.argv.index("--port") + 1])
tries = os.path.join(os.environ["FLWR_HOME"], "tries")
if os.environ.get("FAKE_SUPERLINK") == "taken" and not os.path.exists(tries):
    open(tries, "w").close()
    sys.exit("[Errno 98] error while attempting to bind on address: address already in use")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

FLWR = """
import os, signal, subprocess, sys, time

if sys.argv[1] == "ls":
    print(os.environ["FAKE_LS"])
    sys.exit()
if sys.argv[1] == "log":
    print(*os.environ["FAKE_LOG"].split("|"), sep=os.linesep)
    sys.exit()
print("home", os.environ["FLWR_HOME"])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
if os.environ["FAKE_RUN"] == "hang":
    # Detached, deaf and without our environment, as the worst of daemons.
    child = subprocess.Popen([sys.executable, "-c", stubborn], env={}, start_new_session=True)
    time.sleep(0.3)
    print("child", child.pid)
    time.sleep(300)
if os.environ["FAKE_RUN"] == "slow":
    time.sleep(1.2)
for line in os.environ["FAKE_RUN"].split("|"):
    print(line)
"""

COMPLETED = {"run-id": "7", "status": "finished:completed", "status-details": "N/A"}


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Runs an app with stand-ins; returns the outcome, the log's lines and the scratch home."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, source in (("murmurfl", SUPERLINK), ("flwr", FLWR)):
        (folder / name).write_text(f"#!{sys.executable}\n{source}")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(launch, "_STOP_STEPS", tuple((1.0, *step[1:]) for step in launch._STOP_STEPS))
    app = write_app(tmp_path / "app")
    marker = secrets.token_hex(8)

    def run(log="", runs=(COMPLETED,), *, kept="", superlink="", on_line=None, timeout_s=30.0):
        lines = []

        def line_seen(line):
            lines.append(line)
            if on_line is not None:
                on_line(line)

        listing = json.dumps({"success": True, "runs": list(runs)})
        environment = {MARKER: marker, "FAKE_RUN": log, "FAKE_LS": listing, "FAKE_SUPERLINK": superlink}
        environment["FAKE_LOG"] = kept or log
        try:
            outcome = run_flower_app(
                app, num_supernodes=2, environment=environment, on_line=line_seen, timeout_s=timeout_s
            )
        except (LaunchError, KeyError) as error:
            outcome = error
        assert not marked(marker)
        for line in lines:
            if line.startswith("home "):
                assert not Path(line.removeprefix("home ")).exists()
            if line.startswith("child "):
                assert not alive(int(line.removeprefix("child ")))
        return outcome, lines

    return run


def on_child(action):
    def on_line(line):
        if line.startswith("child "):
            action()

    return on_line


@pytest.mark.long
def test_a_run_that_says_nothing_is_stopped_in_time(stand_ins):
    began = time.monotonic()
    error, lines = stand_ins("hang", timeout_s=2.0)
    assert error.reason == "The run did not end within 2 s and was stopped."
    assert any(line.startswith("child ") for line in lines)
    assert time.monotonic() - began < 15


@pytest.mark.more_cases
def test_a_keyboard_interrupt_stops_everything_first(stand_ins):
    def interrupt():
        raise KeyboardInterrupt

    error, _ = stand_ins("hang", on_line=on_child(interrupt))
    assert error.reason == "The run was interrupted (SIGINT)."


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_sigterm_stops_everything_first_and_handlers_are_put_back(stand_ins):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    error, _ = stand_ins("hang", on_line=on_child(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert error.reason == "The run was interrupted (SIGTERM)."
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.more_cases
def test_an_error_in_the_callers_hook_stops_everything_and_comes_through(stand_ins):
    def fail():
        raise KeyError("hook")

    error, _ = stand_ins("hang", on_line=on_child(fail))
    assert isinstance(error, KeyError)


@pytest.mark.long
def test_without_the_stopping_the_daemon_stays(stand_ins, monkeypatch):
    """The sibling that plants the bug: what these tests look at does notice a launch that stops nothing."""
    stop = launch.Launch.stop
    stopped = []
    monkeypatch.setattr(launch.Launch, "stop", lambda self: stopped.append(self) or [])
    try:
        with pytest.raises(AssertionError, match="assert not "):
            stand_ins("hang", timeout_s=2.0)
    finally:
        stop(stopped[0])


def test_a_superlink_that_cannot_start_says_why(stand_ins):
    error, _ = stand_ins(superlink="broken")
    assert error.reason == "The SuperLink ended while it started."
    assert "no database" in str(error)


def test_a_port_that_is_taken_in_the_meantime_is_tried_again(stand_ins):
    result, _ = stand_ins("slow", superlink="taken")
    assert not isinstance(result, LaunchError), result
    assert result.run_id == 7


@pytest.mark.parametrize(
    ("log", "runs", "reason"),
    [
        ("╭─ Error ─╮|│ No such │|│ app. │|╰─────────╯", (), "Flower refused the run: No such app."),
        ("Connection lost", (), "Flower refused the run: Connection lost"),
        (
            "Traceback (most recent call last):|  File x|a.b.OddError: two words|ERROR :     Exit Code: 700",
            ({"status": "finished:failed", "status-details": "Simulation failed with exception: two words"},),
            "The run failed: a.b.OddError: two words",
        ),
        (
            "ValueError: of a client|Traceback (most recent call last):|  File x|StopIteration|ERROR : Exit Code: 700",
            ({"status": "finished:failed", "status-details": "Simulation failed with exception: "},),
            "The run failed: StopIteration",
        ),
        (
            "ValueError: of a client",
            ({"status": "finished:failed", "status-details": "No heartbeat received"},),
            "The run did not complete (finished:failed): No heartbeat received",
        ),
        (
            "stopped",
            ({"status": "finished:stopped", "status-details": "N/A"},),
            "The run did not complete (finished:stopped): Flower gives no details",
        ),
    ],
)
def test_the_reason_is_one_line_in_flowers_or_the_exceptions_words(stand_ins, log, runs, reason):
    error, _ = stand_ins(log, runs)
    assert isinstance(error, LaunchError)
    assert error.reason == reason


def test_colours_are_taken_out_and_all_else_is_left(stand_ins):
    result, lines = stand_ins("\x1b[92mINFO \x1b[0m:      \t└──> done  ")
    assert lines[-1] == "INFO :      \t└──> done  "
    assert result.log.endswith(lines[-1])


def test_lines_that_a_stream_lost_follow_when_the_run_has_ended(stand_ins):
    kept = "one|two|two||three"
    result, lines = stand_ins("of flwr itself|one|two", kept=kept)
    assert lines[1:] == ["of flwr itself", *kept.split("|")]
    assert result.log.splitlines()[1:] == lines[1:]


def test_an_app_that_flower_would_rewrite_is_refused_before_anything_starts(tmp_path):
    project = PROJECT + '\n[tool.flwr.federations]\ndefault = "local"\n'
    app = write_app(tmp_path / "app", project)
    with raises(LaunchError, "failed", match="federations"):
        run_flower_app(app, num_supernodes=2)
    assert (app / "pyproject.toml").read_text() == project
    with raises(LaunchError, "failed", match="Expected a Flower App"):
        run_flower_app(tmp_path, num_supernodes=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_supernodes": 0},
        {"client_cpus": 0},
        {"client_cpus": 0.5},
        {"client_cpus": math.nan},
        {"client_cpus": 3, "total_cpus": 2},
        {"run_config": {"text": None}},
    ],
)
def test_impossible_arguments_are_refused(tmp_path, arguments):
    with pytest.raises(ConfigurationError, match="Expected"):
        run_flower_app(write_app(tmp_path / "app"), **({"num_supernodes": 2} | arguments))


def test_the_run_config_file_says_what_it_was_given():
    generator = random.Random(5)
    alphabet = string.printable + "\x00\x1f\x7f\x85é\u2028\U0001f338"
    config = {f"text.{i}": "".join(generator.choices(alphabet, k=20)) for i in range(200)}
    config |= {
        "yes": True,
        "no": False,
        "big": -(2**63),
        "small": 1e-300,
        "large": 1e22,
        "zero": -0.0,
        "inf": -math.inf,
    }
    read = tomllib.loads(toml_document(config))
    assert read == config
    assert [type(value) for value in read.values()] == [type(value) for value in config.values()]
    assert math.isnan(tomllib.loads(toml_document({"x": math.nan}))["x"])


def test_the_name_of_a_choice_stands_for_its_kind_where_the_app_has_a_table(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app.config]\nmechanism.kind = "decay"\nmodel = "cnn"\n')
    values = {"mechanism": "banded", "model": "mlp", "rounds": 3}
    assert tomllib.loads(override_document(tmp_path, values)) == {
        "mechanism.kind": "banded",
        "model": "mlp",
        "rounds": 3,
    }
    assert tomllib.loads(override_document(tmp_path / "none", values)) == values
