"""The server's state in one file, written after every round and replaced atomically.

A checkpoint of a trusted server holds the un-noised momentum, which is private data: the file is readable by its owner
only, and belongs where the server's own data is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...privacy import MurmurflError

_FORMAT = 1


class CheckpointError(MurmurflError):
    """A checkpoint cannot be read, or belongs to another training."""


ANOTHER_FORMAT = (
    "Go on with the version of murmurfl that wrote it, or train under another run name on data that were never used "
    "before."
)
"""What to do about a checkpoint of another format, for errors."""


def save_checkpoint(path: Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write arrays and plain values to ``path``, whole or not at all, for a training of these settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in state.items() if name not in arrays}
    header = json.dumps({"format": _FORMAT, "settings": dict(settings), "plain": plain})
    temporary = path.with_name(path.name + ".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # of one that was left behind by a crash, whoever made it
    with os.fdopen(descriptor, "wb") as file:
        entries: dict[str, Any] = {f"array {name}": value for name, value in arrays.items()}
        np.savez(file, **entries, header=np.array(header))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(path: Path, settings: Mapping[str, Any], expected: Iterable[str] = ()) -> dict[str, Any]:
    """The state that :func:`save_checkpoint` wrote.

    Raises
    ------
    CheckpointError
        If the file is damaged, of another format or of other settings, or lacks an ``expected`` name.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            state: dict[str, Any] = {
                name.removeprefix("array "): file[name] for name in file.files if name.startswith("array ")
            }
    except Exception as error:  # NumPy and zipfile raise many kinds on damaged files; all mean the same
        raise CheckpointError(
            f"Expected a readable checkpoint at {path}, got {error}; remove it to start anew."
        ) from error
    if (version := header.get("format")) != _FORMAT:
        raise CheckpointError(
            f"Expected a checkpoint of format {_FORMAT} at {path}, got one of format {version!r}; it was left alone. "
            f"{ANOTHER_FORMAT}"
        )
    wanted = json.loads(json.dumps(dict(settings)))
    found = header["settings"]
    if found != wanted:
        different = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
        raise CheckpointError(
            f"Expected a checkpoint of the same training at {path}, got other "
            + ", ".join(f"{key} ({found.get(key)!r}, now {wanted.get(key)!r})" for key in different)
            + "; remove it to start anew."
        )
    state |= header["plain"]
    missing = sorted(set(expected) - set(state))
    if missing:
        raise CheckpointError(
            f"Expected a whole checkpoint at {path}, got one without {', '.join(missing)}; remove it to start anew."
        )
    return state
