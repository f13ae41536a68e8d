"""Files under the data root: where they are, and the rows of a packed table."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

from ...privacy import ConfigurationError


def data_file(root: str, name: str) -> Path:
    """A file under the data root.

    Raises
    ------
    ConfigurationError
        If it is not there.
    """
    path = Path(root).expanduser() / name if root else Path(name)
    if not root or not path.is_file():
        raise ConfigurationError(
            f"Expected {name} under the data root {root!r}, got no such file: set data-root or MURMURFL_DATA to the "
            "folder that has it."
        )
    return path


def table_rows(path: Path) -> list[list[str]]:
    """The rows of a packed CSV file, without its heading."""
    with gzip.open(path, "rt") as file:
        return list(csv.reader(file))[1:]
