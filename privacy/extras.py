"""Packages that only some settings need, and how they are got: the extras of murmurfl's own distribution."""

from __future__ import annotations

import importlib

from .errors import ConfigurationError


def check_installed(package: str, extra: str, setting: str) -> None:
    """Import a package that the base of murmurfl does without.

    Parameters
    ----------
    package : str
        Its import name.
    extra : str
        What brings it: ``pip install 'murmurfl[extra]'``.
    setting : str
        What needs it, for the refusal.

    Raises
    ------
    ConfigurationError
        If it is not installed. A package that is there and broken raises its own error, which says more.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Expected the package {package} for {setting}, got: {error}. Install it with "
            f"pip install 'murmurfl[{extra}]'."
        ) from error
