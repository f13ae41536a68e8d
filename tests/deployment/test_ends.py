"""How runs over real nodes end, and that a server tells them apart: a log line, a count, what became of the model."""

import json
import threading
import time

import pytest
from murmurfl.app.engines import superlink
from murmurfl.app.engines.loopback import LaunchError, executable, free_port
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.runs.outcome import CHECKPOINT_NAME
from murmurfl.app.runs.result import ask_to_end

from tests.deployment.test_metrics import NODE, healthy, script, shown
from tests.deployment.test_runs import kill_the_server_app

pytestmark = pytest.mark.deployment

ROUNDS = 150
RUN = {"num-clients": 2, "clients-per-round": 2, "batch-size": 8, "max-participations": ROUNDS, "num-rounds": ROUNDS}
RELEASES = {"max-participations": ROUNDS, "budget-mu": 20.0}


def ends(port):
    return {name.split('"')[1]: value for name, value in shown(port).items() if "murmurfl_runs_total" in name}


def wait_for(port, **wanted):
    limit = time.monotonic() + 150
    while {name: count for name, count in ends(port).items() if count} != wanted:
        assert time.monotonic() < limit, (wanted, ends(port))
        time.sleep(0.5)


def test_each_end_of_a_run_is_told_apart(tmp_path, monkeypatch):
    server = free_port()
    program = script(tmp_path / "murmurfl", f'"$@" --health-address {server} --metrics-address {server}')
    monkeypatch.setattr(superlink, "executable", lambda name: program if name == "murmurfl" else executable(name))
    log = tmp_path / "server.log"

    def after_a_round(name, act):
        """Do something once a run has ended a round, while its log is followed."""

        def watch():
            while not (tmp_path / name / CHECKPOINT_NAME).exists():
                time.sleep(0.05)
            act()

        threading.Thread(target=watch, daemon=True).start()

    with deployment(tmp_path / "run", timeout_s=500, environment={"OMP_NUM_THREADS": "1"}) as running:
        healthy(server)
        nodes = {f"node-{i}": {**NODE, **RELEASES, "batch-size": 4, "partition-id": i} for i in range(2)}
        running.add_nodes(nodes)
        for name in nodes:
            running.start_node(name)
        assert set(ends(server).values()) == {0.0}

        def submit(name, **changes):
            return running.submit({**RUN, "batch-size": 4, "out-dir": str(tmp_path), "run-name": name, **changes})

        with pytest.raises(LaunchError, match="says that it can make"):  # before the first round
            submit("impossible", **{"num-rounds": ROUNDS + 1})
        wait_for(server, failed=1)

        after_a_round("ended", lambda: ask_to_end(tmp_path / "ended"))
        submit("ended")
        result = json.loads((tmp_path / "ended" / "result.json").read_text())
        assert 0 < result["rounds"] < ROUNDS
        assert result["accuracy"] is not None
        assert (tmp_path / "ended" / "model.npz").exists()
        wait_for(server, failed=1, completed=1)

        after_a_round("killed", lambda: kill_the_server_app(running))
        with pytest.raises(LaunchError):
            submit("killed")
        wait_for(server, failed=1, completed=1, killed=1)
        log.write_text((running.scratch() / "superlink.log").read_text())
    said = log.read_text()
    for end_of_run in ("failed (ServerApp failed with exception: Expected at most", "completed.", "killed ("):
        assert said.count(f" ended: {end_of_run}") == 1, said[-3000:]
