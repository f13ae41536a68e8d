"""What one real node needs: memory, bytes on the wire, size of its ledger. ``python -m benchmarks.footprint``.

A SuperLink with TLS, one ``murmurfl node`` (two processes: the node, and Flower's SuperNode below it) and a server that
asks for releases, all on the loopback interface. Bytes are counted by a relay between node and SuperLink, TLS and
polling included. A helper is asked for sums of every size that its bounds allow, and of larger ones.
``--only nodes`` or ``--only helper`` measures one of the two. Writes docs/results/footprint.json. Linux only.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from murmurfl.app.fleet.deployment import Deployment, deployment
from murmurfl.app.nodes.node_config import HelperConfig
from murmurfl.clients.nodes.roster_files import read_roster, write_roster
from murmurfl.privacy import (
    ClientKey,
    Header,
    Masking,
    PrivacyPolicy,
    Privatizer,
    Release,
    Roster,
    Sealed,
    SQLiteLedger,
    SumAssumption,
    protocol,
    row_bytes,
)

from .fleet_clients import schema_text

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "results" / "footprint.json"
CLASSES, BATCH, ROUNDS = 10, 16, 6
FEATURES = (784, 99_999, 999_999)  # d = 10 x (features + 1)
SETTLE_S, IDLE_S = 10.0, 30.0
MANY_PARAMETERS, FEW_SAMPLES, FEW_ROUNDS = 10**7, 4, 4
"""From so many parameters on a release is made of few samples, in few rounds: neither changes what it takes."""
# The ledger's file grows by pages of 4 KiB.
GROWTH_RELEASES, FIRST_RELEASES = 800, 20
_SESSION = "0123456789abcdef" * 2  # as long as those of strategies
POLICY = {"clip-norm": 1.0, "mu": 1.0, "budget-mu": 1.0, "delta": 1e-5}

PROJECT = """
[project]
name = "asking-app"
version = "1.0.0"
description = "Asks for releases"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "benchmarks"

[tool.flwr.app.components]
serverapp = "asking.server_app:app"
clientapp = "asking.client_app:app"

[tool.flwr.app.config]
features = 0
classes = 0
rounds = 0
progress = ""
"""

CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()
"""

SERVER = """
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    settings = context.run_config
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    shapes = [(settings["classes"], settings["features"]), (settings["classes"],)]
    draw = np.random.default_rng(1).random
    points = [ArrayRecord([draw(shape) for shape in shapes])]
    for server_round in range(1, settings["rounds"] + 1):
        config = {"protocol-version": 1, "server-round": server_round, "session": "footprint", "ack": server_round - 1}
        points = [points[-1], ArrayRecord([draw(shape) for shape in shapes])]  # equal ones would travel once
        content = RecordDict({"arrays": points[1], "previous-arrays": points[0], "config": ConfigRecord(config)})
        message = Message(content, dst_node_id=nodes[0], message_type="train")
        (reply,) = grid.send_and_receive([message], timeout=120)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        with open(settings["progress"], "a") as file:
            print(server_round, file=file)
"""


@dataclass(frozen=True)
class Footprint:
    """One node with a model of d parameters.

    Parameters
    ----------
    parameters : int
        d.
    data_mib : float
        Its samples, which it holds in memory.
    idle_mib, peak_mib : float
        Resident memory of the node's process, waiting and at most during rounds.
    supernode_idle_mib, supernode_peak_mib : float
        The same of Flower's SuperNode.
    received_bytes, sent_bytes : float
        By the node in one round, median.
    idle_bytes_per_minute : float
        Both ways, while nothing is asked.
    ledger_bytes : int
        After the rounds, the last release unacknowledged.
    ledger_bytes_per_release : float
        What a further release adds for good; 0 where it was not measured.
    round_s : float
        Seconds from one answer to the next, median.
    """

    parameters: int
    data_mib: float
    idle_mib: float
    peak_mib: float
    supernode_idle_mib: float
    supernode_peak_mib: float
    received_bytes: float
    sent_bytes: float
    idle_bytes_per_minute: float
    ledger_bytes: int
    ledger_bytes_per_release: float
    round_s: float = 0.0


class Relay:
    """Hands bytes on between a node and a SuperLink, and counts them.

    Parameters
    ----------
    target : int
        The SuperLink's port on the loopback interface.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.received = self.sent = 0  # by the node
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                superlink = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, name in ((node, superlink, "sent"), (superlink, node, "received")):
                    threading.Thread(target=self._hand_on, args=(source, sink, name), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


def _memory_mib(pid: int, entry: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _write_app(folder: Path, server: str = SERVER) -> Path:
    package = folder / "app" / "asking"
    package.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("client_app", CLIENT), ("server_app", server)):
        (package / f"{name}.py").write_text(text)
    return folder / "app"


def _started(running: Deployment, name: str, port: int) -> int:
    """Start a node or helper at a port; its process, once it is signed in."""
    files = running.files_of(name)
    command = [sys.executable, "-m", "murmurfl.app", files.command, str(files.config)]
    command += ["--superlink", f"127.0.0.1:{port}", "--auth-private-key", str(files.private_key)]
    command += ["--root-certificates", str(running.certificates.authority)]
    with files.log.open("wb") as log:
        process = running.start_process(command, stdout=log)
    while "Connected to" not in files.log.read_text():
        if process.poll() is not None:
            raise RuntimeError(files.log.read_text())
        running.check_time()
        time.sleep(0.2)
    return process.pid


def _rounds(
    running: Deployment, relay: Relay, app: Path, settings: dict[str, str | int]
) -> list[tuple[int, int, float]]:
    """Return what was received and sent in each round but the first, which brings the bundle along, and its seconds."""
    progress, ended = Path(str(settings["progress"])), threading.Event()
    counted: list[tuple[int, int, float]] = []

    def watch() -> None:
        while not ended.wait(0.02):
            done = len(progress.read_text().splitlines()) if progress.exists() else 0
            if done > len(counted):
                counted.append((relay.received, relay.sent, time.perf_counter()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    running.submit(settings, app)
    ended.set()
    watcher.join()
    return [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(counted)]


def ledger_growth(parameters: int, releases: int = GROWTH_RELEASES) -> float:
    """Bytes a release adds to a ledger for good, everything before it acknowledged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = SQLiteLedger.create(path, budget_mu=1.0, delta=1e-4)
        policy = PrivacyPolicy(clip_norm=1.0, batch_size=1, max_participations=releases, mu=1.0, delta=1e-4)
        privatizer = Privatizer(policy, parameters, releases, ledger, ledger.keys(), data=row_bytes(range(releases)))
        sizes, row = [], np.zeros((1, parameters))
        for k in range(releases):
            privatizer.release(_SESSION, k, lambda samples: row)  # noqa: ARG005 - all samples are alike
            sizes.append(path.stat().st_size)
        return (sizes[-1] - sizes[FIRST_RELEASES]) / (releases - 1 - FIRST_RELEASES)


def measure_one(features: int, idle_s: float = IDLE_S, *, growth: bool = True) -> Footprint:
    """One node with softmax regression on so many features.

    Parameters
    ----------
    features : int
    idle_s : float
        How long nothing is asked, to see what is sent meanwhile.
    growth : bool
        Whether a ledger of many releases is made as well.
    """
    parameters = CLASSES * (features + 1)
    batch, rounds = (FEW_SAMPLES, FEW_ROUNDS) if parameters >= MANY_PARAMETERS else (BATCH, ROUNDS)
    policy = {**POLICY, "batch-size": batch, "max-participations": rounds}
    generator = np.random.Generator(np.random.Philox(key=1))
    data = generator.random((rounds * batch, features), dtype=np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "samples.npz", features=data, labels=generator.integers(CLASSES, size=len(data)))
        app = _write_app(folder)
        with deployment(folder / "run", timeout_s=600) as running:
            (folder / "schema.toml").write_text(schema_text(features))
            files = {key: str(folder / file) for key, file in (("samples", "samples.npz"), ("schema", "schema.toml"))}
            running.add_nodes({"node": {**policy, **files, "num-records": len(data)}})
            relay = Relay(running.port or 0)
            node = _started(running, "node", relay.port)
            time.sleep(SETTLE_S)
            pids, before = (node, _child(node)), relay.received + relay.sent
            time.sleep(idle_s)
            idle_bytes = (relay.received + relay.sent - before) * 60.0 / idle_s
            idle = [_memory_mib(pid, "VmRSS") for pid in pids]
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # peaks from here on
            settings = {"features": features, "classes": CLASSES, "rounds": rounds}
            counted = _rounds(running, relay, app, {**settings, "progress": str(folder / "progress")})
            peak = [_memory_mib(pid, "VmHWM") for pid in pids]
            relay.close()
            size = (folder / "run" / "nodes" / "node" / "ledger.sqlite").stat().st_size
    received, sent, round_s = (statistics.median(column) for column in zip(*counted, strict=True))
    grown = 0.0
    if growth and parameters < MANY_PARAMETERS:  # pages are as many, and each release writes 8 d bytes
        grown = ledger_growth(parameters, GROWTH_RELEASES if parameters < 10**5 else GROWTH_RELEASES // 2)
    memory = idle[0], peak[0], idle[1], peak[1]
    return Footprint(parameters, data.nbytes / 2**20, *memory, received, sent, idle_bytes, size, grown, round_s)


HELPER_SERVER = """
import json
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    with open(context.run_config["progress"]) as file:
        entries = json.load(file)
    for key in ("header", "seals", "signature"):
        entries[key] = [bytes.fromhex(one) for one in entries[key]]
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    content = RecordDict({"config": ConfigRecord(entries)})
    message = Message(content, dst_node_id=nodes[0], message_type="query.open")
    (reply,) = grid.send_and_receive([message], timeout=300)
    with open(context.run_config["progress"], "w") as file:
        print(reply.error.reason if reply.has_error() else len(reply.content["arrays"]["total"].data), file=file)
"""
HELPERS = ("helper", "other")
LARGEST = HelperConfig.max_model_size
# Releases of a set, and how many values their headers say: the most that a helper opens by itself.
SETS = ((20, 7_850), (20, 10**5), (20, LARGEST), (2**11, 7_850), (20, LARGEST + 1), (20, 2**32))
_SMALL = 1_000
_TASK = {"task": "digits", "num-partitions": 1, "partition-id": 0, "budget-local-mu": 4.0}


@dataclass(frozen=True)
class HelperFootprint:
    """A helper that was asked for one sum.

    Parameters
    ----------
    releases, parameters : int
        Of the set, by its headers.
    opened : bool
        Whether it gave the sum.
    idle_mib, peak_mib, supernode_peak_mib : float
        Resident memory of the helper's process before, at most meanwhile, and of Flower's SuperNode below it.
    """

    releases: int
    parameters: int
    opened: bool
    idle_mib: float
    peak_mib: float
    supernode_peak_mib: float


def _clients_of_a_roster(running: Deployment, number: int) -> list[Masking]:
    """Add clients to the roster that the helper pins; they exist on paper only."""
    config = running.helpers[HELPERS[0]].config
    path = config.parent.parent / "roster.json"
    before = read_roster(path, None)
    keys = {f"client-{i}": ClientKey.simulated(1, f"client-{i}") for i in range(number)}
    roster = Roster({name: key.public for name, key in keys.items()}, before.helpers)
    path.unlink()
    write_roster(path, roster)
    config.write_text(config.read_text().replace(before.digest, roster.digest))
    return [Masking(name, key, roster) for name, key in keys.items()]


def _released(privatizer: Masking, parameters: int, session: str) -> Sealed:
    """Return a masked release of zeros; beyond the helper's bound one whose header says more than it has."""
    policy = PrivacyPolicy(**_SUMS)
    size = parameters if parameters <= LARGEST else _SMALL
    release = Release(np.zeros(size, np.int64), 1.0, 1, 0, secrets.token_bytes(16), bytes(16))
    sealed = privatizer.mask(release, session, policy).sealed
    header = replace(Header.from_bytes(sealed.header), size=parameters).to_bytes()
    unsigned = replace(sealed, header=header)
    return replace(unsigned, signature=ClientKey.simulated(1, privatizer.name).sign(unsigned.signed))


_SUMS: dict[str, Any] = {
    "trust": "secure-aggregation",
    "clip_norm": 1.0,
    "batch_size": 1,
    "max_participations": 4,
    "mu": 1.0,
    "sums": SumAssumption(min_honest=2, min_cohort=3),
}


def measure_helper() -> list[HelperFootprint]:
    """One real helper, asked for every set in turn."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = _write_app(folder, HELPER_SERVER)
        with deployment(folder / "run", timeout_s=1200) as running:
            client = {key.replace("_", "-"): value for key, value in _SUMS.items()}
            running.add_nodes({"node": {**POLICY, **client, **_TASK}}, HELPERS)
            clients = _clients_of_a_roster(running, max(releases for releases, _ in SETS))
            helper = _started(running, HELPERS[0], running.port or 0)
            time.sleep(SETTLE_S)
            pids = (helper, _child(helper))
            for number, (releases, parameters) in enumerate(SETS):
                session, asked = f"session{number}", folder / f"asked-{number}.json"
                sealed = [_released(client, parameters, session) for client in clients[:releases]]
                entries = {
                    protocol.VERSION: protocol.PROTOCOL_VERSION,
                    protocol.SESSION: session,
                    protocol.OPENING: "1",
                    protocol.HELPER: HELPERS[0],
                    protocol.HEADER: [one.header.hex() for one in sealed],
                    protocol.SIGNATURE: [one.signature.hex() for one in sealed],
                    protocol.SEALS: [seal.hex() for one in sealed for seal in one.seals],
                }
                asked.write_text(json.dumps(entries))
                idle = _memory_mib(helper, "VmRSS")
                for pid in pids:
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # peaks from here on
                running.submit({"features": 0, "classes": 0, "rounds": 0, "progress": str(asked)}, app)
                peak, below = (_memory_mib(pid, "VmHWM") for pid in pids)
                answer = asked.read_text().strip()
                opened = answer.isdigit() and int(answer) >= 8 * parameters
                found.append(HelperFootprint(releases, parameters, opened, idle, peak, below))
    return found


def measure_nodes() -> list[Footprint]:
    """Every node."""
    return [measure_one(features) for features in FEATURES]


def table(document: dict[str, list[dict[str, float]]]) -> str:
    """Return a column a node, and a row for each sum that a helper was asked for, in Markdown."""
    rows = document["nodes"]

    def vectors(mib: float, row: dict[str, float]) -> str:
        return f"{mib * 2**20 / (8 * row['parameters']):.0f}" if row["parameters"] >= 10**6 else "too few to tell"

    def size(number: float) -> str:
        return f"{number / 1e6:,.2f} MB" if number >= 1e6 else f"{number / 1e3:,.1f} kB"

    lines = [
        "| | " + " | ".join(f"d = {row['parameters']:,.0f}" for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    entries = {
        "node, waiting": lambda row: f"{row['idle_mib']:,.0f} MiB, {row['data_mib']:,.1f} of them its samples",
        "node, at most in a round": lambda row: f"{row['peak_mib']:,.0f} MiB",
        "that is, in vectors of d float64": lambda row: vectors(row["peak_mib"] - row["idle_mib"], row),
        "Flower's SuperNode, waiting": lambda row: f"{row['supernode_idle_mib']:,.0f} MiB",
        "Flower's SuperNode, at most in a round": lambda row: f"{row['supernode_peak_mib']:,.0f} MiB",
        "that is, in vectors again": lambda row: vectors(row["supernode_peak_mib"] - row["supernode_idle_mib"], row),
        "received in a round": lambda row: size(row["received_bytes"]),
        "sent in a round": lambda row: size(row["sent_bytes"]),
        "both ways in a minute of waiting": lambda row: size(row["idle_bytes_per_minute"]),
        "ledger": lambda row: size(row["ledger_bytes"]),
        "ledger, for a further release": lambda row: (
            f"{row['ledger_bytes_per_release']:.0f} bytes" if row["ledger_bytes_per_release"] else "as many"
        ),
    }
    lines += [f"| {name} | " + " | ".join(entry(row) for row in rows) + " |" for name, entry in entries.items()]
    lines += ["", "| a helper is asked for the sum of | it answers | its process, at most | Flower's SuperNode |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| {row['releases']:,} releases of {row['parameters']:,} values | {'the sum' if row['opened'] else 'no'} | "
        f"{row['peak_mib']:,.0f} MiB, {row['idle_mib']:,.0f} before | {row['supernode_peak_mib']:,.0f} MiB |"
        for row in document.get("helper", ())
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parts: dict[str, Callable[[], Sequence[Any]]] = {"nodes": measure_nodes, "helper": measure_helper}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--only", choices=list(parts))
    only = parser.parse_args().only
    document = json.loads(DOCUMENT.read_text()) if DOCUMENT.exists() else {}
    for name, measure in parts.items():
        if only in (None, name):
            document[name] = [asdict(one) for one in measure()]
            DOCUMENT.write_text(json.dumps(document, indent=2) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
