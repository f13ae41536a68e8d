"""Features from a file: on a real node it is the one that the operator's file names, and engines take it along."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from murmurfl.app import client_app
from murmurfl.app.data.features import learnt as weights_file
from murmurfl.app.data.features.own_features import save_features
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.engines.start import ray_environment, ray_overrides
from murmurfl.app.nodes.node_config import NodeConfig, configured_client
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients.nodes.operators_file import NODE_CONFIG_VARIABLE
from murmurfl.privacy import SQLiteLedger

torch = pytest.importorskip("torch")
NODE = {
    "client": "clinic",
    "ledger": "ledger.sqlite",
    "clip-norm": 2.0,
    "batch-size": 32,
    "mu": 4.0,
    "task": "digits",
    "num-partitions": 4,
    "partition-id": 1,
    "features": "net.pt",
}


@pytest.fixture
def operator(tmp_path):
    """An operator's folder: file, ledger and net."""
    configured_client.cache_clear()
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=4.0, delta=1e-5)
    (tmp_path / "node.toml").write_text(toml_document(NODE))
    save_features(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5)), tmp_path / "net.pt")
    return tmp_path


def test_a_relative_path_is_taken_from_the_operators_folder(operator, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    config = NodeConfig.read(operator / "node.toml")
    assert config.features == str(operator / "net.pt")
    samples, num_features, _ = config.load_samples()
    assert num_features == 5
    assert np.linalg.norm(samples[slice(0, 9)][0], axis=1) == pytest.approx(np.ones(9), abs=1e-6)


def test_a_file_that_the_server_names_is_never_read(operator, monkeypatch):
    read = []
    monkeypatch.setattr(
        torch,
        "load",
        lambda path, *args, load=torch.load, **kwargs: read.append(str(path)) or load(path, *args, **kwargs),
    )
    monkeypatch.setenv(NODE_CONFIG_VARIABLE, str(operator / "node.toml"))
    server_says = {"features": str(operator / "of_the_server.pt"), "task": "digits"}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=server_says)
    assert client_app.client_fn(context).name == "clinic"
    assert set(read) <= {str(operator / "net.pt")}


def test_other_processes_get_the_file_and_the_weights(operator, monkeypatch):
    monkeypatch.chdir(operator)
    config = RunConfig(features="net.pt")
    assert ray_overrides(config)["features"] == str(operator / "net.pt")
    folder = Path(ray_environment(config)[weights_file.WEIGHTS_VARIABLE])
    assert {path.name for path in folder.iterdir()} == weights_file.SHA256.keys()
