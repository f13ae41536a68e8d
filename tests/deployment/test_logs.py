"""What the operator of a real node reads in the morning: releases, refusals, and when the SuperLink was away."""

import json
import re
import subprocess
import sys
import time

import pytest
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import LaunchError
from murmurfl.app.fleet.deployment import deployment, node_settings
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig

pytestmark = pytest.mark.deployment

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING|ERROR) +\S.*")
SETTINGS = {"num-clients": 2, "clients-per-round": 2, "batch-size": 32, "num-rounds": 2, "round-timeout-s": 30.0}


def configuration(folder, **changes):
    return RunConfig.from_mapping({**SETTINGS, **changes, "out-dir": str(folder.parent), "run-name": folder.name})


def start(running, name, *options):
    """As an operator would, who has more to say than the demonstration."""
    files, python = running.files_of(name), [sys.executable, "-m", "murmurfl.app"]
    command = [*python, "node", str(files.config), "--superlink", f"127.0.0.1:{running.port}", *options]
    command += ["--auth-private-key", str(files.private_key)]
    command += ["--root-certificates", str(running.certificates.authority)]
    with files.log.open("ab") as log:
        running.running[name] = running.start_process(command, stdout=log)


def wait_for(running, said):
    while not said():
        running.check_time()
        time.sleep(0.2)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_connected(path):
    """By the last line that says whether it is."""
    said = [line["event"] for line in events(path) if line["event"] in ("connected", "disconnected")]
    return said[-1:] == ["connected"]


def test_log_and_ledger_record_a_night_without_superlink(tmp_path):
    config = configuration(tmp_path / "run")
    experiment = prepare(config)
    with deployment(tmp_path / "run", timeout_s=400) as running:
        running.add_nodes({f"node-{i}": node_settings(experiment, i) for i in range(2)})
        for_people, for_programs = (files.log for files in running.nodes.values())
        start(running, "node-0")
        start(running, "node-1", "--log-json")
        run, _ = running.submit(config.to_mapping())
        superlink = running.superlink
        superlink.terminate()
        superlink.wait()
        wait_for(running, lambda: not is_connected(for_programs) and " Disconnected " in for_people.read_text())
        with (running.home / "again.log").open("wb") as log:
            running.superlink = running.start_process(superlink.args, stdout=log)
        wait_for(running, lambda: launch.is_healthy(running.port, running.tls()))
        wait_for(running, lambda: is_connected(for_programs))
        wait_for(running, lambda: for_people.read_text().count(" Connected to ") == 2)
        with pytest.raises(LaunchError, match="budget-exhausted"):  # the budget was for one run
            running.submit(configuration(tmp_path / "again", **{"give-up-after": 1}).to_mapping())
        for process in running.running.values():
            process.terminate()
        assert [process.wait(30) for process in running.running.values()] == [0, 0]
        told, text = events(for_programs), for_people.read_text()
        ledger = str(running.nodes["node-1"].config.parent / "ledger.sqlite")
        command = [sys.executable, "-m", "murmurfl.app", "ledger", "show", "--releases", "--json", ledger]
        shown = subprocess.run(command, capture_output=True, check=True).stdout
    wanted = ["started", "connecting", "connected", "released", "released", "disconnected", "connected"]
    assert [line["event"] for line in told if line["event"] not in ("message", "refused", "flower")][:7] == wanted
    assert told[-1]["event"] == "stopped"
    released = [line for line in told if line["event"] == "released"]
    assert [(line["run"], line["round"], line["release"], line["samples"]) for line in released] == [
        (str(run), 1, 1, 32),
        (str(run), 2, 2, 32),
    ]
    refusals = {line["reason"] for line in told if line["event"] == "refused"}
    assert refusals == {"budget-exhausted"}
    # As the ledger has it, which has nothing from the log.
    releases = json.loads(shown)["releases"]
    assert [(line["session"], line["release"]) for line in releases] == [
        (line["session"], line["release"]) for line in released
    ]
    assert releases[-1]["mu_so_far"] <= releases[-1]["mu_reserved"] * (1 + 1e-12)
    # For people the same, a line each.
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    for words in (" Released: ", " Refused: budget-exhausted (", " Disconnected from ", " Stopped."):
        assert words in text
    assert text.count(" Released: ") == 2
