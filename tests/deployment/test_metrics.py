"""The addresses for health and metrics on a real server and two nodes: in a run, after it, without the server."""

import os
import signal
import sys
import time

import httpx
import pytest
from murmurfl.app.engines import superlink
from murmurfl.app.engines.loopback import executable, free_port
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.fleet.health import figures_of
from murmurfl.strategies.callbacks.metrics_file import read_figures

pytestmark = pytest.mark.deployment

NODE = {
    "clip-norm": 2.0,
    "batch-size": 8,
    "mu": 2.0,
    "max-participations": 8,
    "task": "digits",
    "num-partitions": 2,
    "budget-mu": 4.0,
    "delta": 1e-5,
}
RUN = {"num-clients": 2, "clients-per-round": 2, "batch-size": 8, "num-rounds": 3}


def script(path, line):
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m murmurfl.app {line}\n')
    path.chmod(0o700)
    return str(path)


def shown(port):
    """The figures at an address; those with labels by both."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def healthy(port, within_s=120.0, *, wanted=200):
    """Wait for a status of the health address; the answer."""
    end, answer = time.monotonic() + within_s, None
    while time.monotonic() < end:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except httpx.HTTPError:
            answer = None
        if answer is not None and answer.status_code == wanted:
            return answer.json()
        time.sleep(0.2)
    raise AssertionError(f"expected {wanted} at {port} within {within_s} s, got {answer and answer.text}")


def test_a_fleets_health_is_shown_with_and_without_server(tmp_path, monkeypatch):
    server, nodes = free_port(), {f"node-{i}": free_port() for i in range(2)}
    both = f"--health-address {server} --metrics-address {server}"
    program = script(tmp_path / "murmurfl", f'"$@" {both} --figures "{tmp_path / "figures"}"')
    monkeypatch.setattr(superlink, "executable", lambda name: program if name == "murmurfl" else executable(name))
    with deployment(tmp_path / "run", timeout_s=400, environment={"OMP_NUM_THREADS": "1"}) as running:
        assert healthy(server) == {"status": "ok", "kind": "server"}
        assert shown(server)["murmurfl_rounds_total"] == 0
        running.add_nodes({name: {**NODE, "partition-id": i} for i, name in enumerate(nodes)})
        for name, port in nodes.items():
            options = f'"$@" --health-address {port} --metrics-address {port}'
            running.start_node(name, (script(tmp_path / name, options),))
        for port in nodes.values():
            assert healthy(port) == {"status": "ok", "kind": "node"}
        before = {name: shown(port) for name, port in nodes.items()}
        running.submit({**RUN, "out-dir": str(tmp_path), "run-name": "training"})

        noted = read_figures(tmp_path / "figures")
        assert noted is not None
        assert (noted.rounds, noted.aggregated, noted.planned) == (3, 6, 3)
        figures = shown(server)
        assert {name.split("{")[0] for name in figures} <= {f.name for f in figures_of("server")} | {
            "murmurfl_build_info"
        }
        for name, value in {"rounds_total": 3, "asked_total": 6, "releases_total": 6, "lost_total": 0}.items():
            assert figures[f"murmurfl_{name}"] == value
        for name, port in nodes.items():
            after = shown(port)
            assert before[name]["murmurfl_releases_total"] == 0
            assert after["murmurfl_releases_total"] == after["murmurfl_rounds_total"] == 3
            assert after["murmurfl_connected"] == after["murmurfl_ledger_readable"] == 1
            assert not any(value for key, value in after.items() if key.startswith("murmurfl_refusals_total"))
            end = time.monotonic() + 20  # the ledger's mark is looked at every few seconds
            while shown(port)["murmurfl_sessions"] == 0 and time.monotonic() < end:
                time.sleep(0.5)
            assert shown(port)["murmurfl_budget_left_mu"] == pytest.approx(12**0.5)
            assert after["murmurfl_certificate_expiry_timestamp_seconds"] > time.time()

        (process,) = [p for p in running.processes if p.pid == running.superlink.pid]
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        for port in nodes.values():
            assert healthy(port, wanted=503) == {"status": "failed", "kind": "node", "reason": "disconnected"}
            assert shown(port)["murmurfl_connected"] == 0
    text = (tmp_path / "run" / "nodes" / "node-0" / "node.log").read_text()
    assert "\x1b" not in text
