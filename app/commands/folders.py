"""The folder a command puts a run's files into."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..settings.run_config import check_run_name


@contextmanager
def folder_for(out: Path, name: str | None, beginning: str) -> Iterator[Path]:
    """The folder of a run: ``out / name``, or without a name a new one called after the time.

    The latter is this run's own, also beside others that start in the same second; if nothing is put into it, it goes.

    Raises
    ------
    ConfigurationError
        If the name would leave ``out`` (:func:`~murmurfl.app.settings.run_config.check_run_name`).
    """
    if name is not None:
        check_run_name(name)
        yield out / name
        return
    folder = _new_folder(out, f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _new_folder(out: Path, name: str) -> Path:
    number = 1
    while True:
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
