"""Workers on a real Ray: a private one, which leaves nothing behind, and a cluster of two nodes on loopback."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from murmurfl.app.engines import WorkerError, run_cohort
from murmurfl.app.engines import pool as ray_pool
from murmurfl.app.engines.loopback import Processes, free_port, scratch_parent
from murmurfl.app.engines.pool import opened_pool
from murmurfl.app.papers import Cell
from murmurfl.app.papers.accuracy import AccuracyTable
from murmurfl.app.papers.reproduction import run_cells
from murmurfl.app.settings.run_config import RunConfig

from tests.app.engines.test_engines import assert_same_result as assert_same
from tests.app.run_table import BASE

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]
BOUND_S = 180.0
SMALL = {"num-clients": 4, "clients-per-round": 4, "num-rounds": 2, "checkpoint": False}
MINE = """
import numpy as np


def make_task():
    features = np.random.default_rng(1).standard_normal((160, 4))
    labels = (features[:, 0] > 0).astype(int)
    return features[:120], labels[:120], features[120:], labels[120:]
"""


def own_process(state):
    return os.getpid()


def end(state):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def nothing_left():
    """After the test no process with its mark in its environment is left, and no folder of Ray's."""
    mark, before = f"test-{os.getpid()}-{time.monotonic_ns()}", folders()
    os.environ["MURMURFL_TEST_MARK"] = mark
    yield mark
    del os.environ["MURMURFL_TEST_MARK"]
    processes, deadline = Processes(f"MURMURFL_TEST_MARK={mark}"), time.monotonic() + 20
    while processes.living(set()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes.living(set())
    left, deadline = folders() - before, time.monotonic() + 60
    while left & folders() and time.monotonic() < deadline:  # those of a test beside this one go with it
        time.sleep(0.2)
    assert not left & folders()


def folders():
    return set(Path(scratch_parent() or tempfile.gettempdir()).glob("mf-*"))


def test_a_private_ray_leaves_no_processes_and_the_same_model(tmp_path, monkeypatch, nothing_left):
    (tmp_path / "mine_on_workers.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = []
    own = RunConfig(task="mine_on_workers:make_task", num_clients=3, clients_per_round=3, num_rounds=2, batch_size=4)
    assert_same(run_cohort(own), run_cohort(own, workers=2, say=said.append))
    assert "Starting 2 workers" in said[0]
    with opened_pool(2, most=2, of="clients", say=said.append) as pool:
        numbers = [made for _, made in pool.each(own_process, [()] * 4)]
        assert len(set(numbers)) == 2
        assert os.getpid() not in numbers
        with pytest.raises(ZeroDivisionError):
            dict(pool.completed([pool.call(0, division, 0)]))
        with pytest.raises(WorkerError, match="worker 2 of 2"):
            dict(pool.completed([pool.call(1, end)]))


def division(state, by):
    return 1 / by


def test_an_interrupted_run_leaves_no_process_and_no_half_result(tmp_path, nothing_left):
    settings = [
        "strategy=mu2",
        "batch-size=1",
        "evaluate-every=1000",
        "noise-quality=fast",
        "mechanism=blt",
        "passes=500",
    ]
    command = [sys.executable, "-m", "murmurfl.app", "run", "--engine", "cohort", "--workers", "2", "--name", "x"]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored in the background
    )  # fmt: skip
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith("round"):
            break
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=BOUND_S)
    assert run.returncode == 130, "".join(lines) + said
    assert "Interrupted." in said
    assert not list(tmp_path.glob("runs/*/result.json"))


@pytest.fixture
def cluster(nothing_left, monkeypatch):
    """The address of a Ray cluster of two nodes of one core, which are told apart by their addresses on loopback."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="mf-", dir=scratch_parent())
    for name, value in ray_pool._QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Where Ray notes which cluster was the last: it makes no such folder for a node with one of its own.
    monkeypatch.setenv("RAY_TMPDIR", folder)
    (Path(folder) / "ray").mkdir()
    made = Cluster()
    try:
        for port in (free_port(), None):
            options = {} if port is None else {"gcs_server_port": port, "temp_dir": folder, "include_dashboard": False}
            made.add_node(num_cpus=1, object_store_memory=100 * 2**20, **options)
        yield made.address
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def node_of(state):
    import ray

    return ray.get_runtime_context().get_node_id()


def test_a_cluster_of_two_nodes_gives_the_same_model_and_makes_reproductions(cluster, tmp_path):
    config = replace(BASE, lost_replies=0.2)
    said = []
    assert_same(run_cohort(config), run_cohort(config, workers=2, ray_address=cluster, say=said.append))
    assert said[0] == f"Connecting to the Ray cluster at {cluster} ..."
    with opened_pool(None, cluster, most=10, of="clients", say=said.append) as pool:
        assert pool.size == 2
        assert len(set(pool.on_all(lambda state, _: node_of(state)))) == 2
    cells = [Cell("small", SMALL, {"mu2": {"strategy": "mu2"}, "noisy SGD": {"strategy": "noisy-sgd"}})]
    options = {"seeds": 2, "engine": "cohort"}
    there = run_cells(cells, AccuracyTable(), out=tmp_path / "there", workers=2, ray_address=cluster, **options)
    here = run_cells(cells, AccuracyTable(), out=tmp_path / "here", workers=1, **options)
    for one, other in zip(there["cells"], here["cells"], strict=True):
        for label, entry in one["algorithms"].items():
            assert entry["accuracy"] == other["algorithms"][label]["accuracy"]
            assert entry["loss"] == other["algorithms"][label]["loss"]
    assert len(list((tmp_path / "there" / "runs").glob("*.json"))) == 4
