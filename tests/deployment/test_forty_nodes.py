"""Forty real SuperNodes on one computer, with TLS, node keys and a ledger each; a tenth of them is killed.

The nodes share their imports (forked_nodes.py): otherwise they would take 11 GiB and some minutes to start.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.engines.loopback import MARKER, Processes
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.runs.experiment import prepare
from murmurfl.privacy import SQLiteLedger, read_ledger

from tests.deployment.rig import configuration

pytestmark = pytest.mark.deployment

NODES, ASKED, KILLED, ROUNDS = 40, 36, 4, 4
REGISTERED_AT_ONCE = 4
LONGEST_S, CONNECTED_WITHIN_S = 1500, 600
MEMORY_MIB = 8_000


def available_mib():
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) / 1024


def used_mib(pid):
    """What a process has of its own, and its part of what it shares."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


class Fleet:
    """The nodes of a deployment, started together and killed one by one."""

    def __init__(self, running, folder):
        self.running, self.folder = running, folder
        self.killed = []

    def add(self, settings):
        for first in range(0, len(settings), REGISTERED_AT_ONCE):
            self.running.add_nodes(dict(list(settings.items())[first : first + REGISTERED_AT_ONCE]))

    def start(self):
        running = self.running
        connection = ["--superlink", f"127.0.0.1:{running.port}"]
        connection += ["--root-certificates", str(running.certificates.authority)]
        nodes = [
            ["murmurfl", "node", str(files.config), *connection, "--auth-private-key", str(files.private_key)]
            for files in running.nodes.values()
        ]
        path = running.scratch() / "nodes.json"
        path.write_text(json.dumps(nodes))
        program = [sys.executable, str(Path(__file__).with_name("forked_nodes.py")), str(path)]
        with (self.folder / "nodes.log").open("wb") as log:
            running.start_process(program, stdout=log)

    def wait(self):
        """Until all are connected: a run that is submitted before has to share the SuperLink with all of them."""
        limit = time.monotonic() + CONNECTED_WITHIN_S
        while not all(files.log.exists() and b"Connected to " in files.log.read_bytes() for files in self.nodes()):
            assert time.monotonic() < limit, "the nodes did not connect"
            time.sleep(0.5)

    def nodes(self):
        return list(self.running.nodes.values())

    def kill(self, name):
        self.killed.append(name)
        os.kill(int(self.running.nodes[name].config.with_suffix(".pid").read_text()), signal.SIGKILL)

    def used_mib(self):
        marked = Processes(f"{MARKER}={self.running.environment[MARKER]}")
        return sum(used_mib(pid) for pid in marked.living(set()))


def plain(path):
    with np.load(path) as file:
        return json.loads(str(file["header"]))["plain"], file["array state.release_sum"]


@pytest.mark.skipif(available_mib() < MEMORY_MIB, reason="not enough memory for forty nodes")
def test_forty_nodes_train_and_what_the_server_has_is_what_their_ledgers_say(tmp_path, capsys):
    folder = tmp_path / "run"
    settings = {"batch_size": 4, "node_deadline_s": 600.0, "round_timeout_s": 120.0}
    config = configuration(folder, num_clients=NODES, clients_per_round=ASKED, num_rounds=ROUNDS, **settings)
    experiment = prepare(config)
    seen = {}

    def on_line(line):
        if f"round 1/{ROUNDS}" in line:
            for i in range(KILLED):
                fleet.kill(f"node-{i}")
            seen["mib"] = fleet.used_mib()
        if f"round {ROUNDS - 1}/{ROUNDS}" in line:
            shutil.copy(folder / "checkpoint.npz", folder / "before.npz")

    with deployment(folder, timeout_s=LONGEST_S, on_line=on_line) as running:
        fleet = Fleet(running, folder)
        began = time.monotonic()
        fleet.add({f"node-{i}": {**node_settings(experiment, i), "max-participations": 6} for i in range(NODES)})
        registered = time.monotonic()
        fleet.start()
        fleet.wait()
        connected = time.monotonic()
        running.submit(config.to_mapping())
        ended = time.monotonic()
    result = json.loads((folder / "result.json").read_text())
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NODES} nodes: registered in {registered - began:.0f} s, connected in {connected - registered:.0f} s, "
            f"{ROUNDS} rounds in {ended - connected:.0f} s, {seen['mib']:,.0f} MiB of all processes together; "
            f"{result['aggregated']} releases aggregated, {result['lost_replies']} lost. "
        )
    assert result["rounds"] == ROUNDS
    assert result["refusals"] <= KILLED * (ROUNDS - 1)  # Flower's own answers for nodes that are gone
    assert len(fleet.killed) == KILLED
    assert result["aggregated"] >= ROUNDS * ASKED - (ROUNDS - 1) * KILLED
    (after, total), (before, sooner) = plain(folder / "checkpoint.npz"), plain(folder / "before.npz")
    assert sum(after["acks"].values()) == result["aggregated"]
    counts = 0
    for name, files in running.nodes.items():
        ledger = files.config.parent / "ledger.sqlite"
        sessions = read_ledger(ledger).sessions
        if name not in after["acks"]:
            assert all(session.releases <= ROUNDS for session in sessions)
            continue
        (session,) = sessions
        with SQLiteLedger(ledger).exclusive() as page:
            stream = page.stream(after["session"])
        assert session.ack <= after["acks"][name] <= session.releases
        if name not in fleet.killed:
            assert after["acks"][name] == session.releases
        if after["acks"][name] > before["acks"].get(name, 0):
            counts = counts + stream.pending[after["acks"][name]]
    # The last round, to the last bit: each ledger still has what its client sent, in counts of one grid.
    grid = experiment.policy(0).plan(counts.size).grid
    assert np.array_equal(grid.values(counts), total - sooner)
