"""docs/deployment.md followed to the letter on one client, and the commands of other pages that need its federation.

Four operators do what the page says, each in folders that stand for ``/etc`` and ``/var/lib``; the name of the server
is ``localhost`` and its port a free one. What systemd would do is left out.
"""

import functools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import Processes
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.nodes.roster_files import read_roster
from murmurfl.privacy import MemoryLedger, SQLiteOpeningRecord, read_ledger

from tests.deployment.submitting import submitted
from tests.harness.schemas import write_table

pytestmark = [pytest.mark.docs, pytest.mark.long]

ROOT = Path(__file__).parents[2]
NODES = 4
AGREED = {"num-clients": NODES, "clients-per-round": NODES, "batch-size": 32, "num-rounds": 2}
"""What runs of the other pages must say too, to be of this federation and short."""


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    # The short way is typed by test_federation_page.py.
    text = re.sub(r"## The short way\n.*?\n(?=## )", "", text, flags=re.DOTALL)
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """The shell blocks of a page that a federation is needed for."""
    return [block.strip() for block in blocks(page, "sh") if "flwr run . ours" in block]


class Clients:
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
            "num-records = 5410": f"num-records = {len(samples_of(number)[0])}",
        }.items():
            text = text.replace(there, here)
        return text

    def join(self, who):
        for name in ("etc", "lib/superlink", "lib/murmurfl"):
            (self.folder / who / name).mkdir(parents=True)
        return self.folder / who

    def run(self, line, folder):
        ended = self.ended(line, folder)
        assert ended.returncode == 0, f"{line}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
        return ended.stdout

    def submit(self, lines):
        return submitted(lambda typed: self.ended(typed, ROOT), lines)

    def ended(self, line, folder):
        return subprocess.run(
            ["bash", "-euc", line], cwd=folder, env=self.environment, capture_output=True, text=True, timeout=600
        )

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
def clients(tmp_path_factory):
    made = Clients(tmp_path_factory.mktemp("walk"))
    try:
        yield made
    finally:
        made.stop()


def start_server(clients):
    certificate, key, superlink, *_ = blocks("deployment.md", "sh")
    connection, *_ = blocks("deployment.md", "toml")
    server = clients.join("server")
    for command in (certificate, key):
        clients.run(clients.text(command, "server"), server)
    clients.start(clients.text(superlink, "server"), server)
    (clients.folder / "home" / "config.toml").write_text(clients.text(connection, "server"))
    return server


def log_in(clients):
    """What the page has an owner do before the first command: the rest of its block is about one node."""
    line, _ = blocks("deployment.md", "sh")[3].strip().splitlines()
    clients.run(clients.text(line, "server"), clients.folder / "server")


def register(clients, name):
    """The other line of that block."""
    _, line = blocks("deployment.md", "sh")[3].strip().splitlines()
    return clients.run(clients.text(line, "server").replace("clinic-0", name), clients.folder / "server")


def make_operator(clients, server, number, samples, lines):
    """An operator's folder with certificate, file and samples, where these lines of the page were typed."""
    operator = clients.join(f"operator-{number}")
    (operator / "etc" / "ca.crt").write_bytes((server / "ca.crt").read_bytes())
    (operator / "etc" / "node.toml").write_text(clients.text(blocks("deployment.md", "toml")[1], operator.name, number))
    (operator / "etc" / "node.toml").chmod(0o600)
    write_table(operator / "lib" / "murmurfl", *samples)
    said = [clients.run(clients.text(line, operator.name, number), operator) for line in lines]
    (server / f"clinic-{number}.pub").write_bytes((operator / "etc" / f"clinic-{number}.pub").read_bytes())
    return operator, said


@functools.cache
def samples_of(number):
    """More than the page's run needs: for those of the other pages."""
    experiment = prepare(RunConfig(num_clients=NODES, clients_per_round=NODES, batch_size=32))
    features, labels = experiment.client(number, MemoryLedger()).samples[:]
    return np.tile(features, (2, 1)), np.tile(labels, 2)


def test_the_page_followed_by_a_server_and_four_nodes(clients):
    _, _, _, _, submit, keygen, create, node, *_ = blocks("deployment.md", "sh")
    server = start_server(clients)
    operators = []
    for i in range(NODES):
        operator, said = make_operator(clients, server, i, samples_of(i), [keygen, create])
        operators.append(operator)
        assert "epsilon" in said[1]
    wait_until(lambda: b"SuperLink" in clients.logs[0].read_bytes(), "the SuperLink did not start")
    log_in(clients)
    for i, operator in enumerate(operators):
        register(clients, f"clinic-{i}")
        clients.start(clients.text(node, operator.name, i), operator)

    project = (ROOT / "pyproject.toml").read_bytes()
    said = clients.submit(clients.text(submit, "server"))
    assert (ROOT / "pyproject.toml").read_bytes() == project
    assert "completed" in said  # flwr ls
    result = json.loads((server / "lib" / "murmurfl" / "first" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"]) == (11, 11 * NODES)
    assert result["accuracy"] > 0.7
    for operator in operators:
        (session,) = read_ledger(operator / "lib" / "murmurfl" / "ledger.sqlite").sessions
        assert session.releases == 11


@pytest.mark.parametrize("page", ["running.md", "errors.md"])
def test_runs_of_other_pages_on_the_same_federation(page, clients):
    """After the page above; the last of them spends the last of what its ledgers allow: 4 runs of mu = 2."""
    found = commands(page)
    assert found
    for number, command in enumerate(found):
        who = f"{page}-{number}"
        clients.submit(clients.text(settings(command), who))
        result = json.loads((clients.folder / who / "lib" / "murmurfl" / "first" / "result.json").read_text())
        asked = int(re.search(r"clients-per-round=(\d+)", settings(command)).group(1))
        assert (result["rounds"], result["aggregated"]) == (AGREED["num-rounds"], AGREED["num-rounds"] * asked)


def test_then_nothing_is_left(clients):
    for i in range(NODES):
        ledger = read_ledger(clients.folder / f"operator-{i}" / "lib" / "murmurfl" / "ledger.sqlite")
        spent = len(ledger.sessions)
        assert spent <= 4
        assert ledger.spent.mu == pytest.approx(2.0 * spent**0.5)


def test_the_demonstration(tmp_path):
    """The command line `make deploy-demo` would run."""
    assert "$(BIN)/murmurfl deploy-demo $(ARGS)" in (ROOT / "Makefile").read_text()
    command = [launch.executable("murmurfl"), "deploy-demo", "--out", str(tmp_path), "--name", "demo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "44 made, 44 aggregated" in ended.stdout
    for i in range(NODES):
        assert f"ledger of node-{i}: 11 releases" in ended.stdout


HELPERS = ("auditor", "ward")


def test_the_part_on_secure_aggregation_followed_by_four_operators_and_two_helpers(tmp_path):
    clients = Clients(tmp_path)
    try:
        follow_secure_aggregation(clients)
    finally:
        clients.stop()


def follow_secure_aggregation(clients):
    _, _, _, _, _, keygen, _, node, *sums = blocks("deployment.md", "sh")
    key, helper_key, make, create, check, check_helper, helper_keygen, start_helper, submit, *_ = sums
    _, _, more, helper_file, *_ = blocks("deployment.md", "toml")
    server = start_server(clients)
    made = [make_operator(clients, server, i, samples_of(i), [keygen, key, create]) for i in range(NODES)]
    operators = [operator for operator, _ in made]
    cards = [operator / "etc" / f"clinic-{i}.card" for i, operator in enumerate(operators)]
    for helper in HELPERS:
        folder = clients.join(helper)
        clients.run(of_helper(clients, helper_key, helper), folder)
        clients.run(of_helper(clients, helper_keygen, helper), folder)
        cards.append(folder / "etc" / f"{helper}.card")
        for name, there in ((f"{helper}.pub", server), ("ca.crt", None)):
            (there or folder / "etc").joinpath(name).write_bytes(
                ((folder / "etc" if there else server) / name).read_bytes()
            )
    for card in cards:
        (server / card.name).write_bytes(card.read_bytes())
    said = clients.run(make, server)
    roster = read_roster(server / "roster.json", None)
    assert said.count(roster.digest) == 2  # made, and shown
    for i, operator in enumerate(operators):
        (operator / "etc" / "roster.json").write_bytes((server / "roster.json").read_bytes())
        pinned = clients.text(more, operator.name, i).replace("0" * 64, roster.digest)
        path = operator / "etc" / "node.toml"
        path.write_text(f"{path.read_text()}\n{pinned}")
        said = " ".join(clients.run(clients.text(check, operator.name, i), operator).split())
        assert "WRONG" not in said
        assert "mu = 2 Gaussian DP" in said
        assert "2 clients of each sum are honest, and mu = 2.829" in said
    for helper in HELPERS:
        folder = clients.folder / helper
        (folder / "etc" / "roster.json").write_bytes((server / "roster.json").read_bytes())
        text = of_helper(clients, helper_file, helper).replace("0" * 64, roster.digest)
        (folder / "etc" / "helper.toml").write_text(text)
        (folder / "etc" / "helper.toml").chmod(0o600)
        assert "are in order" in clients.run(of_helper(clients, check_helper, helper), folder)
    wait_until(lambda: b"SuperLink" in clients.logs[0].read_bytes(), "the SuperLink did not start")
    log_in(clients)
    for helper in HELPERS:
        register(clients, helper)
        clients.start(of_helper(clients, start_helper, helper), clients.folder / helper)
    for i, operator in enumerate(operators):
        register(clients, f"clinic-{i}")
        clients.start(clients.text(node, operator.name, i), operator)
    clients.submit(clients.text(submit, "server"))
    result = json.loads((server / "lib" / "murmurfl" / "sums" / "result.json").read_text())
    assert (result["rounds"], result["aggregated"]) == (3, 3 * NODES)
    assert result["mu"] == pytest.approx(2.0)
    assert result["mu_local"] == pytest.approx(2.0 * 2**0.5)
    for helper in HELPERS:
        assert SQLiteOpeningRecord(clients.folder / helper / "lib" / "murmurfl" / "openings.sqlite").sets == 3


def of_helper(clients, text, helper):
    return clients.text(text, helper).replace("auditor", helper)


def test_the_demonstration_of_secure_aggregation(tmp_path):
    """`make deploy-demo ARGS="--trust secure-aggregation"`."""
    command = [launch.executable("murmurfl"), "deploy-demo", "--trust", "secure-aggregation"]
    command += ["--set", "num-rounds=2", "--out", str(tmp_path), "--name", "demo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = " ".join(ended.stdout.split())  # wrapped
    assert "12 made, 12 aggregated" in said
    assert "if one helper and 3 clients of each sum are honest, and mu = 6.929" in said
    for i in range(6):
        assert f"ledger of node-{i}: 2 releases, mu 4 of 4 spent, 6.929 of 6.929 in the worst case" in said
    for i in range(2):
        assert f"record of helper-{i}: 2 sums opened" in said
