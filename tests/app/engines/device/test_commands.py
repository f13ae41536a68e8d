"""A device as it is asked for: on the command line and from Python."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.outcome import result_schema
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

from benchmarks import device
from tests.app.plain import SET, simulate
from tests.harness.errors import raises

SETTINGS = {
    "task": "synthetic",
    "task.samples": 60,
    "task.features": 9,
    "noise-quality": "fast",
    "num-rounds": 2,
    "batch-size": 1,
}


def run(*arguments):
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    return CliRunner().invoke(cli, ["run", "--no-twin", *SET, *arguments, *words])


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_on_a_device_says_so_in_its_result(tmp_path):
    result = run("--device", "torch-cpu", "--name", "on-device")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "runs/on-device/result.json").read_text())
    assert (document["engine"], document["device"]) == ("cohort", "torch-cpu")
    assert "device" in result_schema()["properties"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device", "gpu"], "Expected device 'cuda'"),
        (["--device", "cuda"], "Expected a GPU for device 'cuda'"),
        (["--device", "torch-cpu", "--engine", "ray"], "Expected engine 'cohort' for device 'torch-cpu', got 'ray'"),
        (["--device", "torch-cpu", "--workers", "2"], "Expected no workers beside device 'torch-cpu', got 2"),
        (
            ["--device", "torch-cpu", "--ray", "auto"],
            "Expected no workers beside device 'torch-cpu', got a Ray cluster",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(arguments, why, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert result.exit_code != 0
    assert why in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_from_python_it_is_the_same_run():
    settings = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
    result = simulate(device="torch-cpu", **settings)
    again = run_cohort(result.experiment.config, device="torch-cpu")
    assert result.device == again.device == "torch-cpu"
    assert all((ours == theirs).all() for ours, theirs in zip(result.parameters, again.parameters, strict=True))
    assert simulate(**settings).device == ""
    assert np.abs(result.parameters[0] - simulate(**settings).parameters[0]).max() > 0  # other bits of noise


def test_from_python_another_engine_is_refused():
    with raises(ConfigurationError, "conflict", "engine", match="'torch-cpu', got 'inprocess'"):
        simulate(engine="inprocess", device="torch-cpu")


ROW = {"clients": 20, "parameters": 1_000_000, "device": 30.0, "one_core": 60.0}


def test_the_device_table_names_the_cpu_without_a_gpu():
    table = device.table({"gpu": "", "backend": "torch-cpu", "rows": [ROW]})
    assert "| 1,000,000 | 20 | not measured: no GPU was found | 60 | |" in table
    assert "PyTorch's CPU backend on one core, the same path without a GPU: 30 at d = 1,000,000 updates/s." in table
    assert "0.5" not in table


def test_with_a_gpu_the_table_has_its_name_and_the_ratio():
    table = device.table({"gpu": "Some GPU", "backend": "cuda", "rows": [{**ROW, "device": 1_800.0}]})
    assert "Some GPU, updates/s" in table
    assert "| 1,000,000 | 20 | 1,800 | 60 | 30.0 |" in table
    assert "not measured" not in table
