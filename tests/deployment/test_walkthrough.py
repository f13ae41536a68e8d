"""docs/deployment.md followed to the letter on one machine, and the commands of other pages that need its federation.

Four operators do what the page says, each in folders that stand for ``/etc`` and ``/var/lib``; the name of the server
is ``localhost`` and its port a free one. What systemd would do is left out.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.config import RunConfig
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.processes import Processes
from murmurfl.app.experiment import prepare
from murmurfl.privacy import MemoryLedger, read_ledger

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
NODES = 4
AGREED = {"num-clients": NODES, "clients-per-round": NODES, "batch-size": 32, "num-rounds": 2}
"""What runs of the other pages must say too, to be of this federation and short."""


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """The shell blocks of a page that a federation is needed for."""
    return [block.strip() for block in blocks(page, "sh") if "flwr run . ours" in block]


class Machines:
    """The folders and processes of everybody who reads the page."""

    def __init__(self, folder):
        self.folder, self.port, self.logs = folder, launch.free_port(), []
        # A wide terminal: Flower's tables break words.
        self.environment = {**launch.launch_environment(folder / "home", {}), "COLUMNS": "200"}
        (folder / "home").mkdir()

    def text(self, text, who, number=0):
        """The page's text with this reader's names in it."""
        own = self.folder / who
        for there, here in {
            "/etc/systemd": "/etc/systemd",
            "/etc/murmurfl": str(own / "etc"),
            "/var/lib": str(own / "lib"),
            "/path/to/ca.crt": str(self.folder / "server" / "ca.crt"),
            "--host 0.0.0.0 --port 8000": f"--host 127.0.0.1 --port {self.port}",
            "fl.example.org:8000": f"localhost:{self.port}",
            "fl.example.org": "localhost",
            "clinic-0": f"clinic-{number}",
        }.items():
            text = text.replace(there, here)
        return text

    def join(self, who):
        for name in ("etc", "lib/superlink", "lib/murmurfl"):
            (self.folder / who / name).mkdir(parents=True)
        return self.folder / who

    def run(self, line, folder):
        ended = subprocess.run(
            ["bash", "-euc", line], cwd=folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, f"{line}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
        return ended.stdout

    def start(self, line, folder):
        self.logs.append(folder / "log")
        with self.logs[-1].open("wb") as log:
            subprocess.Popen(["bash", "-euc", line], cwd=folder, env=self.environment, stdout=log, stderr=log)

    def stop(self):
        for process in Processes(f"{launch.MARKER}={self.environment[launch.MARKER]}").living(set()):
            os.kill(process, signal.SIGKILL)


def wait_until(answers, what):
    limit = time.monotonic() + 90
    while not answers():
        assert time.monotonic() < limit, what
        time.sleep(0.2)


def settings(command):
    """A ``flwr run`` of another page with the settings of this federation where it has none of its own."""
    head, given = re.fullmatch(r"(.*?) -c '(.*)'", command, flags=re.DOTALL).groups()
    missing = [f"{key}={value}" for key, value in AGREED.items() if f"{key}=" not in given]
    if "out-dir" not in given:
        missing.append('out-dir="/var/lib/murmurfl" run-name="first"')
    return f"{head} -c '{' '.join([given, *missing])}'"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    made = Machines(tmp_path_factory.mktemp("walk"))
    try:
        yield made
    finally:
        made.stop()


def test_the_page_followed_by_a_server_and_four_nodes(machines):
    certificate, superlink, register, submit, keygen, create, node, _systemd = blocks("deployment.md", "sh")
    connection, config = blocks("deployment.md", "toml")
    server = machines.join("server")
    machines.run(machines.text(certificate, "server"), server)
    machines.start(machines.text(superlink, "server"), server)
    (machines.folder / "home" / "config.toml").write_text(machines.text(connection, "server"))

    experiment = prepare(RunConfig(num_clients=NODES, clients_per_round=NODES, batch_size=32))
    operators = [machines.join(f"operator-{i}") for i in range(NODES)]
    for i, operator in enumerate(operators):
        (operator / "etc" / "ca.crt").write_bytes((server / "ca.crt").read_bytes())
        (operator / "etc" / "node.toml").write_text(machines.text(config, operator.name, i))
        (operator / "etc" / "node.toml").chmod(0o600)
        features, labels = experiment.client(i, MemoryLedger()).samples[:]
        # More than the page's run needs: for those of the other pages.
        path = operator / "lib" / "murmurfl" / "samples.npz"
        np.savez(path, features=np.tile(features, (2, 1)), labels=np.tile(labels, 2))
        machines.run(machines.text(keygen, operator.name, i), operator)
        said = machines.run(machines.text(create, operator.name, i), operator)
        assert "epsilon" in said
        (server / f"clinic-{i}.pub").write_bytes((operator / "etc" / f"clinic-{i}.pub").read_bytes())
    wait_until(lambda: b"SuperLink" in machines.logs[0].read_bytes(), "the SuperLink did not start")
    for i, operator in enumerate(operators):
        machines.run(machines.text(register, "server", i), server)
        machines.start(machines.text(node, operator.name, i), operator)

    project = (ROOT / "pyproject.toml").read_bytes()
    said = machines.run(machines.text(submit, "server"), ROOT)
    assert (ROOT / "pyproject.toml").read_bytes() == project
    assert "completed" in said  # flwr ls
    result = json.loads((server / "lib" / "murmurfl" / "first" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"]) == (11, 11 * NODES)
    assert result["accuracy"] > 0.7
    for operator in operators:
        (session,) = read_ledger(operator / "lib" / "murmurfl" / "ledger.sqlite").sessions
        assert session.releases == 11


@pytest.mark.parametrize("page", ["how-to.md", "errors.md"])
def test_runs_of_other_pages_on_the_same_federation(page, machines):
    """After the page above; the last of them spends the last of what its ledgers allow: 4 runs of mu = 2."""
    found = commands(page)
    assert found
    for number, command in enumerate(found):
        who = f"{page}-{number}"
        machines.run(machines.text(settings(command), who), ROOT)
        result = json.loads((machines.folder / who / "lib" / "murmurfl" / "first" / "result.json").read_text())
        asked = int(re.search(r"clients-per-round=(\d+)", settings(command)).group(1))
        assert (result["rounds"], result["aggregated"]) == (AGREED["num-rounds"], AGREED["num-rounds"] * asked)


def test_then_nothing_is_left(machines):
    for i in range(NODES):
        ledger = read_ledger(machines.folder / f"operator-{i}" / "lib" / "murmurfl" / "ledger.sqlite")
        spent = len(ledger.sessions)
        assert spent <= 4
        assert ledger.reserved_mu == pytest.approx(2.0 * spent**0.5)


def test_the_demonstration(tmp_path):
    """The command line `make deploy-demo` would run."""
    assert "$(BIN)/murmurfl deploy-demo $(ARGS)" in (ROOT / "Makefile").read_text()
    command = [launch.executable("murmurfl"), "deploy-demo", "--out", str(tmp_path), "--name", "demo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "44 made, 44 aggregated" in ended.stdout
    for i in range(NODES):
        assert f"ledger of node-{i}: 11 releases" in ended.stdout
