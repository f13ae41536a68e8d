"""A real SuperLink with TLS and node keys, real nodes with ledgers: one short deployment for all tests here."""

import contextlib
import json
import os
import re
import threading

import numpy as np
import pytest
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import Processes
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import SQLiteLedger, protocol, read_ledger
from murmurfl.privacy.setting import by_key

from tests.harness import packages

ROUNDS = 2
MU = 0.5
pytestmark = pytest.mark.long

SETTINGS = {
    "num-clients": 2,
    "clients-per-round": 2,
    "batch-size": 32,
    "num-rounds": ROUNDS,
    "mu": MU,
    "node-deadline-s": 60.0,
    "round-timeout-s": 60.0,
}


def configuration(folder, **changes):
    settings = {**SETTINGS, **by_key(changes, run_keys())}
    return RunConfig.from_mapping({**settings, "out-dir": str(folder.parent), "run-name": folder.name})


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, make_stealing_app):
    """A run to its end over two nodes, then a bundle that steals, over the same two nodes."""
    folder = tmp_path_factory.mktemp("deployed") / "run"
    config = configuration(folder)
    experiment = prepare(config)
    # Room in the budget for the run and for one session of the attacker's, and for no more.
    nodes = {f"node-{i}": {**node_settings(experiment, i), "budget-mu": MU * 2**0.5} for i in range(2)}

    kept = tmp_path_factory.mktemp("kept")
    with checkpoints_kept(folder / "checkpoint.npz", kept), deployment(folder, timeout_s=240) as running:
        running.add_nodes(nodes)
        for name in nodes:
            running.start_node(name)
        running.submit(config.to_mapping(), packages.checkout(tmp_path_factory.mktemp("app") / "checkout"))
        running.result = json.loads((folder / "result.json").read_text())
        running.recorded = {
            name: read_ledger(files.config.parent / "ledger.sqlite") for name, files in running.nodes.items()
        }
        running.acks = checkpoint_of(folder / "checkpoint.npz")["acks"]
        running.checkpoints = {checkpoint_of(path)["server_round"]: path for path in kept.iterdir()}
        running.stealing = make_stealing_app(nodes=2)
        running.submit({}, running.stealing.folder)
        running.logs = {name: files.log.read_text() for name, files in running.nodes.items()}
    return running


@contextlib.contextmanager
def checkpoints_kept(checkpoint, folder):
    """Link every checkpoint into a folder as it is written: a line of the log may come when the next round is over."""
    over = threading.Event()

    def keep():
        while not over.wait(0.01):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(checkpoint, folder / f"{checkpoint.stat().st_ino}.npz")

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def checkpoint_of(path):
    with np.load(path) as file:
        return json.loads(str(file["header"]))["plain"]


def test_a_real_run_leaves_the_usual_files(deployed):
    assert deployed.result["rounds"] == ROUNDS
    assert deployed.result["aggregated"] == 2 * ROUNDS == deployed.result["releases"]
    assert deployed.result["refusals"] == deployed.result["lost_replies"] == 0
    assert deployed.result["mu"] == pytest.approx(MU)
    assert sorted(deployed.result["clients"]) == ["node-0", "node-1"]
    assert {path.name for path in deployed.folder.iterdir()} >= {"result.json", "model.npz"}
    assert "Real clients" in deployed.result["guarantee"]


def test_ledgers_know_of_every_release_the_server_has(deployed):
    assert deployed.acks == {"node-0": ROUNDS, "node-1": ROUNDS}
    for ledger in deployed.recorded.values():
        (session,) = ledger.sessions
        assert session.releases == ROUNDS
        assert session.ack == ROUNDS - 1  # the last acknowledgement would come with the next request
        assert ledger.spent.mu == pytest.approx(MU)
        assert ledger.samples_used == ROUNDS * 32


def test_what_the_server_added_up_is_what_the_ledgers_say_was_released(deployed):
    """The last round, for the ledgers keep no more: each still holds its P_2 - P_1, in counts of the clients' grid."""
    with np.load(deployed.checkpoints[2]) as after, np.load(deployed.checkpoints[1]) as before:
        step = after["array state.release_sum"] - before["array state.release_sum"]
    session = checkpoint_of(deployed.checkpoints[2])["session"]
    counts = np.zeros(650, np.int64)
    for files in deployed.nodes.values():
        with SQLiteLedger(files.config.parent / "ledger.sqlite").exclusive() as page:
            pending = page.stream(session).pending
        assert list(pending) == [ROUNDS]
        counts += pending[ROUNDS]
    grid = prepare(configuration(deployed.folder)).policy(0).plan(650).grid
    assert np.array_equal(grid.values(counts), step)  # to the last bit: sums on a grid are exact


def test_a_bundle_that_steals_raw_gradients_is_never_executed(deployed):
    assert not deployed.stealing.marker.exists()
    answers = deployed.stealing.seen()
    assert [answer["code"] for answer in answers["raw"]] == [protocol.PROTOCOL_MISMATCH] * 2
    assert [answer["code"] for answer in answers["unknown-kind"]] == [protocol.MALFORMED_REQUEST] * 2
    assert [answer["code"] for answer in answers["evaluate"]] == [protocol.EVALUATION_BLOCKED] * 2
    assert "42.0" not in deployed.stealing.answers.read_text()


def test_another_protocol_version_is_refused_with_a_message_on_both_sides(deployed):
    for answer in deployed.stealing.seen()["other-version"]:
        assert answer["code"] == protocol.PROTOCOL_MISMATCH
        assert answer["reason"] == "this client speaks murmurfl's protocol version 1, the request states version 99"
    for log in deployed.logs.values():
        assert "speaks murmurfl's protocol version 1, the request states version 99" in log


def test_nothing_a_server_sends_weakens_the_noise_or_widens_the_budget(deployed):
    answers = deployed.stealing.seen()
    noise = prepare(configuration(deployed.folder)).policy(0).plan(650)
    first_row_std = noise.noise_std * noise.mechanism.row_std_range()[0]
    for answer in answers["weaker"]:  # a session is opened, under the client's own policy
        values = np.concatenate(answer["arrays"])
        # Noise of 0.35 hides a gradient of 0.02. 650 values: 20 % are 7 standard errors, exceeded once in 10^11 runs.
        assert values.std() == pytest.approx(first_row_std, rel=0.2)
    assert [answer["code"] for answer in answers["forged-ack"]] == [protocol.BAD_ACKNOWLEDGEMENT] * 2
    assert [answer["code"] for answer in answers["other-session"]] == [protocol.BUDGET_EXHAUSTED] * 2


def test_everything_is_stopped_and_nothing_listens(deployed):
    marker = f"{launch.MARKER}={deployed.environment[launch.MARKER]}"
    assert not Processes(marker).living(set())
    assert not launch.is_listening(deployed.port)
    assert not deployed.home.exists()
    ports = {int(port) for log in deployed.logs.values() for port in re.findall(r"http://127\.0\.0\.1:(\d+)", log)}
    assert ports
    assert not [port for port in ports if launch.is_listening(port)]


def test_private_files_of_a_node_are_its_owners_alone(deployed):
    for files in deployed.nodes.values():
        assert not (files.config.parent / "ledger.sqlite").stat().st_mode & 0o077


def test_two_nodes_of_one_deployment_have_keys_of_their_own(deployed):
    keys = {SQLiteLedger(files.config.parent / "ledger.sqlite").keys().secret_key for files in deployed.nodes.values()}
    assert len(keys) == 2
