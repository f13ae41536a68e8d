"""Versions of Flower that murmurfl works with; importing this module checks the installed one.

Strategies and clients import it before anything of Flower's, so that the error names the unsupported version, and not
the first thing that fails under it. Nothing of Flower is imported here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .errors import UnsupportedFlowerError

FLOWER_VERSIONS = ">=1.41,<1.43"
"""The versions that were tested, as in ``pyproject.toml``."""

_LEAST, _BEYOND = (1, 41), (1, 43)


def check_flower_version() -> None:
    """Raise if flwr is missing, or another version than :data:`FLOWER_VERSIONS`."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        found = "none"
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
        supported = _LEAST <= (major, minor) < _BEYOND
    except ValueError:
        supported = False
    if not supported:
        raise UnsupportedFlowerError(
            f"Expected Flower {FLOWER_VERSIONS}, got {found}: murmurfl knows the messages of these versions only. Run "
            f"pip install 'flwr{FLOWER_VERSIONS}', or install the release of murmurfl for yours."
        )


check_flower_version()
