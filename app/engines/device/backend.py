"""The PyTorch device that a run names, and PyTorch itself, imported at its first use.

An installation without PyTorch still imports every module.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from ....privacy.errors import ConfigurationError


class _ImportedLate:
    """A module's names, each looked up once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._name), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import torch
else:
    torch = _ImportedLate("torch")

NUMPY = ""
"""No device: the cohort engine computes in NumPy."""
TORCH_CPU = "torch-cpu"
"""PyTorch's CPU backend: the path of a GPU without one, for tests. It is slower than NumPy."""
CUDA = "cuda"

_NAMES = re.compile(rf"{TORCH_CPU}|{CUDA}(:\d+)?")


def check_device_name(name: str) -> None:
    """Raise if ``name`` is no device's name, whether or not the device is there."""
    if name != NUMPY and not _NAMES.fullmatch(name):
        raise ConfigurationError(
            f"Expected device {CUDA!r}, {CUDA + ':1'!r} (the second GPU) or {TORCH_CPU!r} (PyTorch's CPU backend, for "
            f"tests), got {name!r}. Without a device the cohort engine computes with NumPy.",
            kind="unknown-name",
            setting="device",
            got=name,
        )


def checked_device(name: str, engine: str = "cohort", workers: int | None = None, ray_address: str = "") -> None:
    """Raise if the engine has no devices, or workers are asked for beside one; an empty name is no device."""
    check_device_name(name)
    if not name:
        return
    if engine != "cohort":
        raise ConfigurationError(
            f"Expected engine 'cohort' for device {name!r}, got {engine!r}: only the cohort engine computes the "
            "clients of a round in one piece.",
            kind="conflict",
            setting="engine",
            got=engine,
        )
    if (workers or 1) > 1 or ray_address:
        raise ConfigurationError(
            f"Expected no workers beside device {name!r}, got {'a Ray cluster' if ray_address else workers}: a device "
            "computes all clients in one process. Leave out one of the two.",
            kind="conflict",
            setting="workers",
        )
