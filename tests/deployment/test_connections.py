"""Real nodes that do not reach their SuperLink, and a check beside a node that does."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key

from tests.harness.schemas import write_samples

pytestmark = pytest.mark.deployment

NODE = {"clip-norm": 1.0, "batch-size": 2, "mu": 1.0, "max-participations": 6}
NODE |= {"budget-mu": 2.0, "delta": 1e-5}
PATIENCE_S = 90.0


def until(holds, what):
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connections")
    generator = np.random.Generator(np.random.Philox(key=1))
    own = write_samples(folder, generator.random((40, 5)), generator.integers(2, size=40))
    (folder / "samples.npz").chmod(0o600)
    with deployment(folder, timeout_s=600) as deployed:
        deployed.add_nodes({name: {**NODE, **own} for name in ("node-0", "node-1")})
        yield deployed


def said(running, name):
    log = running.files_of(name).log
    return log.read_text() if log.exists() else ""


def nodes(running):
    with closing(sqlite3.connect(f"file:{running.scratch()}/superlink.db?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return {row["node_id"]: dict(row) for row in database.execute("SELECT * FROM node")}


def check(running, name):
    files = running.files_of(name)
    command = [sys.executable, "-m", "murmurfl.app", "node", str(files.config), "--check", "--json"]
    command += ["--superlink", f"127.0.0.1:{running.port}", "--auth-private-key", str(files.private_key)]
    command += ["--root-certificates", str(running.certificates.authority)]
    done = subprocess.run(command, env=running.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, json.loads(done.stdout)


def bytes_of(running, name):
    folder = running.files_of(name).config.parent
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".log"}


def test_a_check_leaves_a_running_node_alone(running):
    running.start_node("node-0")
    until(lambda: "Connected to" in said(running, "node-0"), lambda: said(running, "node-0"))
    before, ledger, log = nodes(running), bytes_of(running, "node-0"), said(running, "node-0")
    code, document = check(running, "node-0")
    assert code == 0, document
    states = {check["check"]: check["state"] for check in document["checks"]}
    assert states == {**dict.fromkeys(states, "ok"), "certificate": "warning"}  # it is valid for a day
    assert bytes_of(running, "node-0") == ledger
    after = nodes(running)
    beats = {"online_until", "heartbeat_interval"}  # the node's own, meanwhile
    for node, row in before.items():
        assert {k: v for k, v in row.items() if k not in beats} == {
            k: v for k, v in after[node].items() if k not in beats
        }
    assert said(running, "node-0") == log


def test_a_second_node_with_one_key_is_told_why(running):
    files = running.files_of("node-1")
    kept = files.private_key.read_bytes()
    files.private_key.write_bytes(running.files_of("node-0").private_key.read_bytes())
    try:
        second = running.start_node("node-1")
        until(lambda: "(session-open; tried again in" in said(running, "node-1"), lambda: said(running, "node-1"))
        second.terminate()
        second.wait(30)
    finally:
        files.private_key.write_bytes(kept)
    assert "Disconnected" not in said(running, "node-0")


def test_a_node_whose_key_is_not_registered_is_told_so(running, tmp_path):
    files = running.files_of("node-1")
    make_node_key(tmp_path / "unknown")
    kept = files.private_key.read_bytes()
    files.private_key.write_bytes((tmp_path / "unknown").read_bytes())
    try:
        code, document = check(running, "node-1")
        assert code == 1
        assert [check["check"] for check in document["checks"] if check["state"] == "failed"] == ["key"]
        node = running.start_node("node-1")
        until(lambda: "(key-not-registered; tried again in" in said(running, "node-1"), lambda: said(running, "node-1"))
        node.terminate()
        node.wait(30)
    finally:
        files.private_key.write_bytes(kept)


def test_a_lost_superlink_is_logged_and_found_again(running):
    running.superlink.terminate()
    running.superlink.wait(30)
    until(
        lambda: "(refused; tried again at least every 20 s.)" in said(running, "node-0"),
        lambda: said(running, "node-0"),
    )
    assert check(running, "node-0")[0] == 1
    with (running.scratch() / "again.log").open("wb") as log:
        running.superlink = running.start_process(running.superlink.args, stdout=log)
    until(lambda: said(running, "node-0").count("Connected to") == 2, lambda: said(running, "node-0"))
    assert check(running, "node-0")[0] == 0
