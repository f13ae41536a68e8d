"""Real nodes killed, cut off and refusing: every case ends in a defined way, in time, with its reason."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.result import exclude_clients
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.clients.nodes.operators_file import NODE_CONFIG_KEY
from murmurfl.privacy import read_ledger
from murmurfl.privacy.setting import by_key

from tests.deployment.rig import federation

pytestmark = pytest.mark.deployment

SETTINGS = {
    "num-clients": 2,
    "clients-per-round": 2,
    "batch-size": 32,
    "num-rounds": 6,
    "node-deadline-s": 45.0,
    "round-timeout-s": 30.0,
}


# Room for releases that a crash wastes; a cap of just the rounds would refuse the last of them.
SPARE = {"max-participations": 10}


def configuration(folder, **changes):
    settings = {**SETTINGS, **by_key(changes, run_keys())}
    return RunConfig.from_mapping({**settings, "out-dir": str(folder.parent), "run-name": folder.name})


@contextmanager
def nodes_of(config, folder, timeout_s=400, **changes):
    experiment = prepare(config)
    lines = []
    with deployment(folder, timeout_s=timeout_s, on_line=lines.append) as running:
        running.add_nodes({f"node-{i}": {**node_settings(experiment, i), **changes} for i in range(config.num_clients)})
        for name in running.nodes:
            running.start_node(name)
        running.seen = lines
        yield running


def after_round(running, number, action):
    """Do something as soon as the run's log shows that a round is over."""

    def watch():
        while not any(f"round {number}/" in line for line in running.seen):
            if launch_ended(running):
                return
            time.sleep(0.1)
        action()

    threading.Thread(target=watch, daemon=True).start()


def launch_ended(running):
    return not running.home.exists()


def ledger(running, name):
    return read_ledger(running.nodes[name].config.parent / "ledger.sqlite")


def result(folder):
    return json.loads((folder / "result.json").read_text())


def failure(folder):
    return json.loads((folder / "failure.json").read_text())


def test_a_killed_node_comes_back_and_the_run_completes(tmp_path):
    folder = tmp_path / "run"
    config = configuration(folder)
    with nodes_of(config, folder, **SPARE) as running:

        def kill_and_restart():
            process = running.running["node-0"]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            running.start_node("node-0")

        after_round(running, 2, kill_and_restart)
        running.submit(config.to_mapping())
        document = result(folder)
        recorded = {name: ledger(running, name).sessions[0].releases for name in running.nodes}
    assert document["rounds"] == 6
    assert sum(recorded.values()) >= document["aggregated"] >= 8, "of 12; nobody waits for one that was missed"
    assert all(recorded[name] >= statement["releases"] for name, statement in document["clients"].items())
    assert document["accuracy"] > 0.4


def kill_server_app(running):
    for path in launch.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            ours = os.fsencode(str(running.home)) in path.with_name("environ").read_bytes()
        except OSError:
            continue
        if ours and any(word.endswith(b"flwr-serverapp") for word in words):
            os.kill(int(path.parent.name), signal.SIGKILL)


def test_run_goes_on_without_a_killed_client_and_resumes_without_an_excluded_one(tmp_path):
    """Five clients, no helpers: one is killed in round 2 and never back; later the operator takes another one out."""
    folder = tmp_path / "run"
    config = configuration(
        folder, num_clients=5, clients_per_round=5, batch_size=16, num_rounds=8, node_deadline_s=15.0
    )
    with nodes_of(config, folder, 600, **SPARE) as running:

        def kill():
            os.kill(running.running["node-0"].pid, signal.SIGKILL)

        after_round(running, 1, kill)
        after_round(running, 5, lambda: kill_server_app(running))
        with pytest.raises(LaunchError):
            running.submit(config.to_mapping())
        assert exclude_clients(folder, ["node-1"]) == ["node-1"]
        before = ledger(running, "node-1").sessions[0].releases
        # As the settings of a federation that two members have left, with another quorum.
        left = {"num-clients": 3, "clients-per-round": 3, "quorum": 0.9}
        running.submit({**config.to_mapping(), **left})
        recorded = {name: ledger(running, name).sessions[0].releases for name in running.nodes}
    document = result(folder)
    assert document["rounds"] == 8
    assert document["num_clients"] == 5
    assert recorded["node-0"] <= 2
    assert recorded["node-1"] == before < 8
    assert document["per_round"][-1]["aggregated"] == 3
    assert document["accuracy"] > 0.4


def test_a_node_that_must_not_be_missing_ends_the_run_in_time_with_the_reason(tmp_path):
    folder = tmp_path / "run"
    config = configuration(folder, node_deadline_s=20.0, min_available_nodes=2)
    with nodes_of(config, folder) as running:
        after_round(running, 1, lambda: running.running["node-1"].terminate())
        started = time.monotonic()
        with pytest.raises(LaunchError, match="NodesUnavailableError"):
            running.submit(config.to_mapping())
        assert time.monotonic() - started < 180
    reason = failure(folder)
    assert "Expected 2 clients within 20 s, got 1 (missing: node-1)" in reason["reason"]
    assert reason["checkpoint"] == str(folder / "checkpoint.npz")


def test_nodes_that_all_refuse_end_the_run_in_time_with_the_reason(tmp_path):
    folder, again = tmp_path / "run", tmp_path / "again"
    config, second = configuration(folder, num_rounds=2), configuration(again, num_rounds=6, give_up_after=2)
    third = configuration(tmp_path / "third", num_rounds=11)
    with nodes_of(config, folder, **SPARE) as running:
        running.submit(config.to_mapping())
        with pytest.raises(LaunchError, match="budget-exhausted"):  # the budget was for one run
            running.submit(second.to_mapping())
        with pytest.raises(LaunchError, match="at most 10 rounds, got 11: client node-0 says"):
            running.submit(third.to_mapping())
    assert "got none in 2 rounds in a row" in failure(again)["reason"]
    assert "clients refused with budget-exhausted" in failure(again)["reason"]


def test_a_stopped_run_goes_on_from_its_checkpoint(tmp_path):
    folder = tmp_path / "run"
    config = configuration(folder)
    with nodes_of(config, folder, **SPARE) as running:
        after_round(running, 3, lambda: kill_server_app(running))
        with pytest.raises(LaunchError):
            running.submit(config.to_mapping())
        assert not (folder / "result.json").exists()
        running.submit(config.to_mapping())
        recorded = [ledger(running, name).sessions for name in running.nodes]
    document = result(folder)
    assert document["rounds"] == 6
    # The same session, not a new one; and the round that was asked twice got the same release twice.
    assert [[session.releases for session in sessions] for sessions in recorded] == [[6], [6]]
    assert document["aggregated"] == 12
    assert document["accuracy"] > 0.4


def test_nodes_with_wrong_clocks_are_refused_and_join_when_these_are_right(tmp_path):
    folder, clocks = tmp_path / "run", {"node-0": 60.0, "node-1": -600.0}
    config = configuration(folder, num_rounds=2)
    files = {name: tmp_path / f"{name}.clock" for name in clocks}
    with federation(config, folder, 600) as real:
        for name, path in files.items():
            path.write_text(str(clocks[name]))
        real.start({name: {"clock": str(path)} for name, path in files.items()})
        logs = [node.log for node in real.running.nodes.values()]
        while not all("; tried again in " in log.read_text() for log in logs):
            real.running.check_time()
            time.sleep(0.2)
        assert not any(" Connected to " in log.read_text() for log in logs)
        for path in files.values():
            path.write_text("0")
        real.submit()
        assert real.result()["aggregated"] == 4
        assert dict(real.restarts) == {}, "the node itself goes on"


def test_the_same_bundle_is_executed_by_a_plain_supernode(tmp_path, make_stealing_app):
    """The sibling that shows the other test can fail, and why plain `flower-supernode` protects nobody."""
    app = make_stealing_app(nodes=1)
    config = configuration(tmp_path / "run", num_clients=1, clients_per_round=1)
    with deployment(tmp_path / "run", timeout_s=120) as running:
        running.add_nodes({"node-0": node_settings(prepare(config), 0)})
        files = running.nodes["node-0"]
        command = [launch.executable("flower-supernode"), "--superlink", f"127.0.0.1:{running.port}"]
        command += ["--root-certificates", str(running.certificates.authority), "--port", str(launch.free_port())]
        command += ["--auth-supernode-private-key", str(files.private_key)]
        command += ["--node-config", f'{NODE_CONFIG_KEY}="{files.config}"']
        with files.log.open("wb") as log:
            running.start_process(command, stdout=log)
        running.submit({}, app.folder)
    assert app.marker.read_text() == "executed"
    assert app.seen()["raw"] == [{"arrays": [[42.0] * 10]}]


def test_a_demo_that_cannot_work_exits_with_one_line_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "murmurfl.app", "deploy-demo", "--out", str(tmp_path), "--name", "demo"]
    ended = subprocess.run(
        [*command, "--set", "mechanism=banded", "--set", "mechanism.bands=3"], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("murmurfl: Expected a mechanism without options")
    assert not (tmp_path / "demo").exists()


def test_nodes_outlive_a_restart_of_the_superlink(tmp_path):
    first, second = configuration(tmp_path / "first", num_rounds=2), configuration(tmp_path / "second", num_rounds=2)
    with nodes_of(first, tmp_path / "first", **{"budget-mu": 4.0 * 2**0.5}) as running:
        running.submit(first.to_mapping())
        superlink = running.superlink
        superlink.terminate()
        superlink.wait()
        time.sleep(5.0)  # the nodes notice
        with (running.home / "superlink-again.log").open("wb") as log:
            running.superlink = running.start_process(superlink.args, stdout=log)
        while not launch.is_healthy(running.port, running.tls()):
            time.sleep(0.2)
        running.submit(second.to_mapping())
        spent = [ledger(running, name).spent.mu for name in running.nodes]
    assert result(tmp_path / "second")["aggregated"] == 4
    assert spent == pytest.approx([4.0 * 2**0.5] * 2)
