"""Versions of Flower that murmurfl works with; importing this module checks the installed one.

Strategies and clients import it before anything of Flower's, so that the error names the unsupported version, and not
the first thing that fails under it. Nothing of Flower is imported here.
"""

from __future__ import annotations

from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version

from .errors import UnsupportedFlowerError

FLOWER_VERSIONS = ">=1.41,<1.43"
"""The versions that were tested, as in ``pyproject.toml``."""

_LEAST, _BEYOND = (1, 41), (1, 43)


def check_flower_version() -> None:
    """Raise if flwr is missing, or another version than :data:`FLOWER_VERSIONS`."""
    found = _installed_version() or "none"
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


def _installed_version() -> str | None:
    """Return the version of flwr; None without it. A listing of packages that failed or is old is made once more."""
    for _ in range(2):
        try:
            return version("flwr")
        except PackageNotFoundError:
            invalidate_caches()
    return None


check_flower_version()
