"""What a run may be called."""

from __future__ import annotations

from ..privacy import ConfigurationError

_LONGEST_RUN_NAME = 200
"""Bytes; file systems take 255, and files that are being written have longer names for a moment."""


def check_run_name(name: str) -> None:
    """Refuse a run's name that is not simply the name of a folder.

    Parameters
    ----------
    name : str

    Raises
    ------
    ConfigurationError
        If it is empty, too long, ``.`` or ``..``, begins or ends with a space, or has a separator or a character in it
        that cannot be printed: the files of a run stay in a folder of its own, below the one that was chosen for runs.
    """
    simple = name.isprintable() and not set(name) & set("/\\:") and name.strip() == name
    if not simple or name in ("", ".", "..") or len(name.encode("utf-8", "replace")) > _LONGEST_RUN_NAME:
        raise ConfigurationError(
            f"Expected a run's name to be the name of a folder, of 1 to {_LONGEST_RUN_NAME} bytes that can be printed, "
            f"without / \\ or :, got {name[:_LONGEST_RUN_NAME]!r}: --out (or out-dir) says where folders are made."
        )
