"""Which device PyTorch computes on, by the name that a run gives it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...privacy import ConfigurationError
from ...privacy.extras import check_installed

if TYPE_CHECKING:
    import torch

NUMPY = ""
"""No device: the ordinary path of the cohort engine, in NumPy."""
TORCH_CPU = "torch-cpu"
"""PyTorch's CPU backend: the path of a GPU without one, for tests. It is slower than NumPy."""
CUDA = "cuda"

_NAMES = re.compile(rf"{TORCH_CPU}|{CUDA}(:\d+)?")


def check_device_name(name: str) -> None:
    """Refuse what is no name of a device, whether or not it is there.

    Raises
    ------
    ConfigurationError
    """
    if name != NUMPY and not _NAMES.fullmatch(name):
        raise ConfigurationError(
            f"Expected device {CUDA!r}, {CUDA + ':1'!r} (the second GPU) or {TORCH_CPU!r} (PyTorch's CPU backend, for "
            f"tests), got {name!r}. Without a device the cohort engine computes with NumPy."
        )


def open_device(name: str) -> torch.device:
    """The device of a name, which was tried: that it is there, and that its integers are as they must be.

    Parameters
    ----------
    name : str
        ``cuda``, ``cuda:1`` and so on, or ``torch-cpu``.

    Raises
    ------
    ConfigurationError
        If PyTorch is not installed, has no such device, or computes other words with it than were published.
    """
    check_device_name(name)
    check_installed("torch", "torch", f"device {name!r}")
    import torch

    from .philox import check_known_answers

    if name == TORCH_CPU:
        device = torch.device("cpu")
    else:
        _check_cuda(name)
        device = torch.device(name)
    check_known_answers(device)
    return device


def _check_cuda(name: str) -> None:
    import torch

    built = f"PyTorch {torch.__version__}" + (" with CUDA" if torch.version.cuda else " without CUDA")
    other = f"leave the device empty to compute with NumPy, or name {TORCH_CPU!r} to try this path without a GPU"
    if not torch.cuda.is_available():
        cure = "see that its driver is installed" if torch.version.cuda else "install a build of PyTorch with CUDA"
        raise ConfigurationError(f"Expected a GPU for device {name!r}, got {built}, which finds none: {cure}, {other}.")
    count, (_, _, number) = torch.cuda.device_count(), name.partition(":")
    if number and int(number) >= count:
        raise ConfigurationError(
            f"Expected device {CUDA + ':0'!r} to {CUDA}:{count - 1}, got {name!r}: {built} finds {count}; {other}."
        )
