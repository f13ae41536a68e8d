"""Examples as their users have them: folders of their own, imported by their own package names."""

import importlib
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.privacy import MECHANISMS

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def project(monkeypatch):
    """An example's module, by the names of its folder and module."""

    def load(folder, module):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
        return importlib.import_module(f"{folder.replace('-', '_')}.{module}")

    return load


@pytest.fixture
def run_example(project, caplog):
    """Run an example's ServerApp over its ClientApp in this process, helpers among the nodes; the lines of its log."""

    def run(folder, *, nodes=None, **changes):
        settings = tomllib.loads((EXAMPLES / folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        config = {**settings["config"], **{key.replace("_", "-"): value for key, value in changes.items()}}
        server, client = project(folder, "server_app"), project(folder, "client_app")
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        with caplog.at_level("INFO", logger="flwr"):
            server.main(InProcessGrid(client.app, nodes or config["num-clients"], config), context)
        return [record.getMessage() for record in caplog.records if record.name == "flwr"]

    return run


@pytest.fixture(autouse=True, scope="module")
def forget_registered_mechanisms():
    """The example's own mechanism is not one of ours."""
    before = dict(MECHANISMS)
    yield
    for name in MECHANISMS.keys() - before.keys():
        del MECHANISMS[name]
