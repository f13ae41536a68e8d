"""Results of optimisers, kept in memory and on disk: they depend on a few numbers and may take seconds.

One ``.npz`` file a result, in the folder named by the environment variable ``MURMURFL_CACHE``, else
``$XDG_CACHE_HOME/murmurfl``, else ``~/.cache/murmurfl``. A file that cannot be read or does not pass the caller's check
is computed again. Where the folder cannot be written there is no cache, which is no error.

Formal guarantees
-----------------
The files need not be trusted: what is read is a proposal for factors B and C, checked by the caller for being a
factorisation at all, and the sensitivity is always derived from the factors in use, never stored. Somebody who changes
a file can make the noise larger, or its correlation worse, but cannot make the privacy parameter mu wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]

_FORMAT = 1
_MOST_IN_MEMORY = 16

_in_memory: OrderedDict[str, Arrays] = OrderedDict()
_lock = Lock()


def cached(
    name: str, inputs: Mapping[str, int | float | str], compute: Callable[[], Arrays], check: Callable[[Arrays], bool]
) -> Arrays:
    """What ``compute`` returns, computed once for a name and its inputs.

    Parameters
    ----------
    name : str
        The function's name; change it when the function's results change.
    inputs : mapping
        Everything the result depends on.
    compute : callable
        Returns named float64 arrays.
    check : callable
        Whether arrays read from a file, all float64 and finite, have the right names and shapes and may be used.

    Returns
    -------
    dict of str to ndarray
        Read-only arrays.
    """
    text = json.dumps([name, _FORMAT, sorted(inputs.items())])
    key = hashlib.sha256(text.encode()).hexdigest()
    with _lock:
        if key in _in_memory:
            _in_memory.move_to_end(key)
            return dict(_in_memory[key])
    arrays = _read(key, check)
    if arrays is None:
        arrays = compute()
        _write(key, arrays)
    for array in arrays.values():
        array.setflags(write=False)
    with _lock:
        _in_memory[key] = arrays
        while len(_in_memory) > _MOST_IN_MEMORY:
            _in_memory.popitem(last=False)
    return dict(arrays)


def forget() -> None:
    """Empty the memory; the files stay."""
    with _lock:
        _in_memory.clear()


def folder() -> Path:
    """Where the files are.

    Raises
    ------
    RuntimeError
        If no variable names a folder and the user has no home.
    """
    if chosen := os.environ.get("MURMURFL_CACHE"):
        return Path(chosen)
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache") / "murmurfl"


def _read(key: str, check: Callable[[Arrays], bool]) -> Arrays | None:
    try:
        with np.load(folder() / f"{key}.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        sound = all(array.dtype == np.float64 and np.isfinite(array).all() for array in arrays.values())
        return arrays if sound and check(arrays) else None
    except Exception:  # whatever a damaged or foreign file makes NumPy or the check raise
        return None


def _write(key: str, arrays: Arrays) -> None:
    # RuntimeError: no home folder.
    with suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] - its stubs know no named arrays
            Path(temporary).replace(folder() / f"{key}.npz")
        except BaseException:
            Path(temporary).unlink()
            raise
