"""``murmurfl node`` with its operator's own ClientApp: an honest project's run, and one whose bundle would steal."""

import os
import shutil
from pathlib import Path

import pytest
from murmurfl.app.fleet.deployment import deployment
from murmurfl.privacy import Guarantee, protocol, read_ledger

pytestmark = pytest.mark.deployment

EXAMPLE = Path(__file__).parents[2] / "examples" / "legacy-numpyclient"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{EXAMPLE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
FILE = """\
client = "{name}"
ledger = "ledger.sqlite"
clip-norm = 0.5
mu = 1.0
max-participations = 3
app = "legacy_numpyclient.client_app:app"

[node-config]
partition-id = {number}
num-partitions = 2
"""


def plain(folder):
    """The example's project, whose server takes no sums of 95 clients but the updates of these two."""
    shutil.copytree(EXAMPLE, folder)
    server = folder / "legacy_numpyclient" / "server_app.py"
    assert server.read_text().count(", secure_aggregation=sums") == 1
    server.write_text(server.read_text().replace(", secure_aggregation=sums", ""))
    return folder


def test_the_operators_client_answers_whatever_the_bundle_holds(tmp_path, make_stealing_app):
    lines, thief = [], make_stealing_app(2)
    with deployment(tmp_path / "run", timeout_s=300, on_line=lines.append, environment=ENVIRONMENT) as running:
        made = {"clip-norm": 1.0, "batch-size": 1, "mu": 1.0, "task": "digits", "num-partitions": 2, "partition-id": 0}
        running.add_nodes({f"clinic-{i}": {**made, "budget-mu": 2.0, "delta": 1e-6} for i in range(2)})
        for number, (name, files) in enumerate(running.nodes.items()):
            files.config.write_text(FILE.format(name=name, number=number))
            running.start_node(name)
        running.submit({"num-clients": 2, "num-server-rounds": 3}, plain(tmp_path / "legacy-numpyclient"))
        ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
        running.submit({}, thief.folder)
        logs = [files.log.read_text() for files in running.nodes.values()]
    stated = Guarantee(1.0, 1e-6, "noise on each client, by its own account", unit="client").sentence
    assert sum("2 of 2 updates aggregated" in line and stated in line for line in lines) == 3
    assert [[session.releases for session in ledger.sessions] for ledger in ledgers] == [[3], [3]]
    assert all("round 3, release 3" in log for log in logs)
    # The bundle's ClientApp was never imported, and no message of its server got anything un-noised.
    assert not thief.marker.exists()
    seen = thief.seen()
    refused = {"other-version": protocol.PROTOCOL_MISMATCH, "evaluate": protocol.EVALUATION_BLOCKED}
    for name, answers in seen.items():
        assert len(answers) == 2, name
        for answer in answers:
            assert answer.get("arrays") != [[42.0] * 10], name
            if name in refused:
                assert answer["code"] == refused[name]
            if "arrays" in answer:
                assert all(any(abs(value) > 1e-3 for value in values) for values in answer["arrays"]), "noise"
    assert all("code" in answer for name in ("raw", "unknown-kind", "forged-ack") for answer in seen[name])
