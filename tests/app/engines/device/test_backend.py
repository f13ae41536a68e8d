"""A device is taken by its name, tried, or refused before anything starts with what was found and what to do."""

import pytest
import torch
from murmurfl.app.engines.device import device_block
from murmurfl.app.engines.device.backend import check_device_name
from murmurfl.app.engines.device.device_block import open_device
from murmurfl.privacy import ConfigurationError


def test_pytorchs_cpu_is_there_wherever_pytorch_is():
    assert open_device("torch-cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "torch-cpu:0", "numpy"])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"Expected device 'cuda', .* got {name!r}"):
        open_device(name)


@pytest.mark.parametrize("name", ["", "torch-cpu", "cuda", "cuda:3"])
def test_names_are_checked_without_the_device(name):
    check_device_name(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_a_gpu_the_refusal_says_what_was_found_and_what_to_do(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError) as refusal:
        open_device(name)
    assert f"Expected a GPU for device {name!r}, got PyTorch {torch.__version__}" in str(refusal.value)
    assert "leave the device empty to compute with NumPy" in str(refusal.value)


def test_a_gpu_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigurationError, match=r"Expected device 'cuda:0' to cuda:1, got 'cuda:2': PyTorch .* finds 2"
    ):
        open_device("cuda:2")


def test_without_pytorch_the_refusal_says_what_to_install(monkeypatch):
    def missing(*_):
        raise ConfigurationError("Expected the package torch for device 'cuda'.")

    monkeypatch.setattr(device_block, "check_installed", missing)
    with pytest.raises(ConfigurationError, match="Expected the package torch for device 'cuda'"):
        open_device("cuda")
