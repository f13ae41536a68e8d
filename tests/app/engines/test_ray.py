"""The real thing: `flwr run` on Ray, compared with the in-process engine, and what is left behind."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import LaunchError, Processes
from murmurfl.app.engines.start import run_in_process
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.settings.run_config import RunConfig
from typer.testing import CliRunner

from tests.app.plain import simulate
from tests.harness import packages

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nothing_left(monkeypatch):
    """After the test, no process and no port of its launches is left."""
    markers, ports = [], []
    environment, free_port = launch.launch_environment, launch.free_port

    def remember_marker(*arguments):
        variables = environment(*arguments)
        markers.append(variables[launch.MARKER])
        return variables

    def remember_port():
        ports.append(free_port())
        return ports[-1]

    monkeypatch.setattr(launch, "launch_environment", remember_marker)
    monkeypatch.setattr(launch, "free_port", remember_port)
    yield
    assert markers
    assert not [pid for marker in markers for pid in Processes(f"{launch.MARKER}={marker}").living(set())]
    assert not [port for port in ports if launch.is_listening(port)]


@pytest.mark.long
def test_ray_gives_the_in_process_engines_model(tmp_path, nothing_left):
    """More clients than nodes, partial participation, losses: everything that could tell engines apart."""
    config = RunConfig(
        num_clients=6, clients_per_round=4, num_rounds=4, lost_replies=0.2, out_dir=str(tmp_path), run_name="a b'\"c"
    )
    app = packages.checkout(tmp_path / "checkout")
    project = (app / "pyproject.toml").read_bytes()
    lines = []
    run_flower_app(app, run_config=config.to_mapping(), num_supernodes=4, on_line=lines.append, timeout_s=300)
    expected = run_in_process(replace(config, checkpoint=False))
    with np.load(tmp_path / config.run_name / "model.npz") as model:
        for name, values in zip(expected.experiment.model.names, expected.parameters, strict=True):
            assert model[name].tobytes() == np.asarray(values).tobytes()
    assert sum("round " in line and "accuracy" in line for line in lines) == 4
    assert (app / "pyproject.toml").read_bytes() == project


@pytest.mark.long
def test_a_run_that_fails_says_why_and_leaves_nothing_behind(tmp_path, nothing_left):
    """Flower itself exits with 0 here: the ServerApp refuses a batch larger than all samples."""
    lines = []
    with pytest.raises(LaunchError, match="Expected batch-size <= 1438"):
        run_flower_app(
            ROOT,
            run_config={"batch-size": 2000, "out-dir": str(tmp_path)},
            num_supernodes=2,
            timeout_s=300,
            on_line=lines.append,
        )
    assert not any(line.startswith('  File "') for line in lines), "one clear line, no traceback"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_unknown_key_and_a_folder_without_an_app_are_refused(tmp_path, nothing_left):
    with pytest.raises(LaunchError, match="speed"):
        run_flower_app(ROOT, run_config={"speed": 3}, num_supernodes=2, timeout_s=120)
    with pytest.raises(LaunchError, match=r"pyproject\.toml"):
        run_flower_app(tmp_path, num_supernodes=2)


MINE = """
import numpy as np
import torch


def make_task():
    features = np.random.default_rng(1).standard_normal((160, 4))
    labels = (features[:, 0] > 0).astype(int)
    return features[:120], labels[:120], features[120:], labels[120:]


def make_model(num_features, num_classes):
    return torch.nn.Linear(num_features, num_classes)
"""


@pytest.mark.long
def test_ray_finds_tasks_and_models_of_the_folder(tmp_path, monkeypatch, nothing_left):
    """The command is started where the module lies, which is on nobody's search path."""
    (tmp_path / "mine_on_ray.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    settings = {"task": "mine_on_ray:make_task", "model": "mine_on_ray:make_model", "num-clients": "3"}
    settings |= {"clients-per-round": "3", "num-rounds": "2"}
    assignments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ran = CliRunner().invoke(cli, ["run", "--name", "x", "--timeout", "300", *assignments])
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "runs" / "x" / "result.json").read_text())
    assert document["engine"] == "ray"
    assert document["aggregated"] == 6
    expected = simulate({name: int(value) if value.isdigit() else value for name, value in settings.items()})
    with np.load(tmp_path / "runs" / "x" / "model.npz") as model:
        for name, values in zip(expected.experiment.model.names, expected.parameters, strict=True):
            assert np.allclose(model[name], values, rtol=1e-5, atol=1e-6)
    del sys.modules["mine_on_ray"]


@pytest.mark.long
def test_a_run_that_does_not_end_is_stopped(nothing_left):
    with pytest.raises(LaunchError, match="within 6 s"):
        run_flower_app(ROOT, run_config={"num-rounds": 100_000, "batch-size": 1}, num_supernodes=2, timeout_s=6)
