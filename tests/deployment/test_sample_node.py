"""``murmurfl node`` with a ``private_client_app``: a training with the operators' privacy, and a bundle that steals."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from murmurfl.app.fleet.deployment import deployment
from murmurfl.privacy import protocol, read_ledger

from tests.harness.schemas import write_schema

pytestmark = pytest.mark.deployment

PROJECT = Path(__file__).parent / "samples_app"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROJECT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
FILE = """\
client = "{name}"
ledger = "ledger.sqlite"
method = "{method}"
clip-norm = 1.0
mu = {mu}
max-participations = 3
app = "sampled.client_app:{app}"
schema = "schema.toml"
num-records = {rows}
{more}

[run-config]
local = "the operator's"

[node-config]
partition-id = {number}
num-partitions = 2
"""
MADE = {"clip-norm": 1.0, "batch-size": 1, "mu": 1.0, "task": "digits", "num-partitions": 2, "partition-id": 0}
BUDGET = {"budget-mu": 4.0, "delta": 1e-6}


def written(files, name, number, **values):
    values = {"more": "", "mu": 4.0, "method": "full-batch", "app": "app", **values}
    rows = len(range(number, 360, 2))  # of two classes of digits
    files.config.write_text(FILE.format(name=name, number=number, rows=rows, **values))
    write_schema(files.config.parent / "schema.toml", (64,), bounds=(0, 1))


def test_real_nodes_keep_their_policy_against_a_stealing_bundle(tmp_path, make_stealing_app):
    thief = make_stealing_app(2)
    with deployment(tmp_path / "run", timeout_s=400, environment=ENVIRONMENT) as running:
        running.add_nodes({f"clinic-{i}": {**MADE, **BUDGET} for i in range(2)})
        for number, (name, files) in enumerate(running.nodes.items()):
            written(files, name, number, more="evaluation.share = 0.2")
            running.start_node(name)
        running.submit({"folder": str(tmp_path)}, PROJECT)
        ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
        running.submit({}, thief.folder)
        logs = [files.log.read_text() for files in running.nodes.values()]
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["aggregated"] == [2, 2, 2]
    assert said["accuracy"] > 0.9
    assert said["privately"] == pytest.approx(said["accuracy"], abs=0.1)
    assert said["samples"] == 36, "a tenth is set aside"
    for stated in said["stated"].values():
        assert (stated["mu-guaranteed"], stated["delta"]) == (pytest.approx(4.0), 1e-6)
    assert [sorted(session.releases for session in ledger.sessions) for ledger in ledgers] == [[1, 3], [1, 3]]
    assert all("replacement of one sample" in log and "mu = 4 " in log for log in logs)
    # The bundle's ClientApp was never imported, and no message of its server got anything at all.
    assert not thief.marker.exists()
    codes = {name: {answer["code"] for answer in answers} for name, answers in thief.seen().items()}
    assert codes.pop("evaluate") == {protocol.EVALUATION_BLOCKED}
    assert codes.pop("other-version") <= {protocol.PROTOCOL_MISMATCH, protocol.MALFORMED_REQUEST}
    assert all(code in protocol.REFUSAL_NAMES for found in codes.values() for code in found)
    assert all("arrays" not in answer for answers in thief.seen().values() for answer in answers)


def test_updates_from_gradients_train_under_secure_aggregation_between_real_processes(tmp_path):
    with deployment(tmp_path / "run", timeout_s=400, environment=ENVIRONMENT) as running:
        sums = {"trust": "secure-aggregation", "trust.min-honest": 2, "trust.min-cohort": 2, "budget-local-mu": 8.0}
        running.add_nodes({f"clinic-{i}": {**MADE, **BUDGET, **sums} for i in range(2)}, helpers=["one", "two"])
        for number, (name, files) in enumerate(running.nodes.items()):
            keys = tomllib.loads(files.config.read_text())
            own = {
                key: keys[key]
                for key in ("trust", "trust.min-honest", "trust.min-cohort", "roster", "roster-digest", "signing-key")
            }
            more = "\n".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in own.items())
            written(files, name, number, method="fedavg", app="updates", more=more)
        for name in (*running.helpers, *running.nodes):
            running.start_node(name)
        running.submit({"folder": str(tmp_path), "secure": True}, PROJECT)
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["aggregated"] == [2, 2, 2]
    assert said["accuracy"] > 0.9
    assert all(stated["min-honest"] == 2 and stated["mu-guaranteed"] == 4.0 for stated in said["stated"].values())
