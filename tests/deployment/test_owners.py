"""Real nodes whose operators say whose their samples are: what the server hears, and what their ledgers know."""

import json

import numpy as np
import pytest
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import read_ledger

from tests.harness.schemas import write_schema

pytestmark = pytest.mark.deployment

MU, ROUNDS, OWNERS, MOST = 1.0, 2, 60, 3
RUN = {
    "strategy": "full-batch",
    "num-clients": 2,
    "clients-per-round": 2,
    "num-rounds": ROUNDS,
    "mu": MU,
    "samples-per-owner": MOST,
    "node-deadline-s": 60.0,
    "round-timeout-s": 60.0,
}
NODE = {
    "strategy": "full-batch",
    "samples": "samples.npz",
    "schema": "schema.toml",
    "num-records": OWNERS,
    "samples-per-owner": MOST,
    "batch-size": 1,
    "max-participations": ROUNDS,
    "mu": MU,
    "budget-mu": MU,
    "delta": 1e-5,
}


def write_samples(folder, data, client):
    """Digits of owners with one to seven samples each."""
    folder.mkdir(parents=True)
    owners = np.repeat(np.arange(OWNERS), 1 + np.arange(OWNERS) % 7)
    chosen = slice(client * len(owners), (client + 1) * len(owners))
    np.savez(
        folder / "samples.npz",
        features=data.train_features[chosen],
        labels=data.train_labels[chosen],
        owners=owners,
    )
    write_schema(folder / "schema.toml", data.train_features.shape[1:], bounds=(0, 1), classes=10, owner="owners")


def test_owners_are_the_unit_from_the_operators_file_to_the_servers_result(tmp_path):
    folder = tmp_path / "run"
    config = RunConfig.from_mapping({**RUN, "out-dir": str(folder.parent), "run-name": folder.name})
    data = prepare(config).data
    with deployment(folder, timeout_s=240) as running:
        for client in range(2):
            write_samples(folder / "nodes" / f"node-{client}", data, client)
        running.add_nodes({f"node-{client}": {**NODE, "clip-norm": 1.0} for client in range(2)})
        for name in running.nodes:
            running.start_node(name)
        running.submit(config.to_mapping())
        result = json.loads((folder / "result.json").read_text())
        assert result["aggregated"] == 2 * ROUNDS
        assert result["privacy"]["unit"] == "owner"
        assert "for replacement of all samples of one owner on one client" in result["privacy"]["sentence"]
        assert "Real clients" in result["privacy"]["sentence"]
        for name, files in running.nodes.items():
            ledger = read_ledger(files.config.parent / "ledger.sqlite")
            assert [session.releases for session in ledger.sessions] == [ROUNDS]
            assert ledger.samples_used == OWNERS
            assert "releases of the sum of all owners a run" in files.log.read_text(), name
