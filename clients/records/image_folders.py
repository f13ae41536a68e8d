"""A folder of images as a table: a directory for each class, or for each site with one for each class."""

from __future__ import annotations

import hmac
import os
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...privacy.errors import ConfigurationError, check_installed
from .client_records import Rows, table_file
from .image_files import ImageFile
from .schema import Schema

IMAGE, CLASS = "image", "class"
"""Columns of a folder: the file, and the name of its directory."""


class ImageFolder(Rows):
    """The entries of the directories of a folder, each a row with its image and class, and its site if there are any.

    Every entry of a class's directory is a row, whatever it is: a hidden file, a link or a directory is a record that
    does not fit. Entries of the folder itself count if they are directories and not hidden.

    Parameters
    ----------
    folder : path
    site : str
        Name of the column of sites: directories are then sites, and theirs are classes. Empty for one directory a
        class.

    Notes
    -----
    **Formal guarantees.** Row i depends on its entry alone. Public are the folder's directories, and how many entries
    they have together, as the number of rows of a table is: a file that is replaced by any other, in whatever
    directory, changes one row. Where a row stands may depend on names of other files, so who relies on places puts rows
    in a secret order first (:meth:`in_secret_order`).

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("cat", "dog"):
    ...         _ = (Path(folder) / name).mkdir(), (Path(folder) / name / "1.png").write_bytes(b"no image")
    ...     rows = ImageFolder(folder)
    ...     len(rows), rows.classes, rows[0]["class"], str(rows[1]["image"])
    (2, ('cat', 'dog'), 'cat', 'dog/1.png')
    """

    def __init__(self, folder: Path | str, site: str = "") -> None:
        check_installed("PIL", "images", "a folder of images", load=False)
        where = Path(folder).expanduser()
        try:
            found = [(one.name,) for one in _directories(where)]
            if site:
                found = [(outer, inner.name) for (outer,) in found for inner in _directories(where / outer)]
            entries = [(*parts, one.name) for parts in found for one in where.joinpath(*parts).iterdir()]
        except OSError as error:
            raise ConfigurationError(
                f"Expected a folder of images at {where}, got: {error.strerror}.", kind="unreadable", setting="path"
            ) from error
        if not entries:
            raise ConfigurationError(
                f"Expected images in {where} in a directory for each class"
                f"{', within one for each site' if site else ''}, got none. An image outside of them has no class.",
                kind="missing",
                setting="path",
            )
        self.classes = tuple(sorted({parts[-1] for parts in found}))
        """Names of the directories of classes."""
        self.folder, self._site = where, site
        self._entries = sorted(entries, key=lambda parts: os.fsencode("/".join(parts)))
        super().__init__(len(entries), self._named, [*([site] if site else []), IMAGE, CLASS], "row")

    def _named(self, number: int) -> dict[str, Any]:
        parts = self._entries[number]
        site = {self._site: parts[0]} if self._site else {}
        return {**site, IMAGE: ImageFile(self.folder, "/".join(parts)), CLASS: parts[-2]}

    def in_secret_order(self, secret: bytes) -> ImageFolder:
        """Return the same rows in an order that a secret key and their paths decide.

        Notes
        -----
        **Formal guarantees.** For whoever does not know the secret the order is uniformly random, whatever the paths
        are, but for the security of HMAC-SHA256. So for two folders that differ in one file there is a pair of orders,
        equally likely, in which all other files have the same places: one row differs.
        """
        made = copy(self)
        key = hmac.digest(secret, b"murmurfl places of files", sha256)
        made._entries = sorted(self._entries, key=lambda parts: hmac.digest(key, os.fsencode("/".join(parts)), sha256))
        made._row = made._named
        return made


def _directories(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return sorted((one for one in found if not one.name.startswith(".") and one.is_dir()), key=lambda one: one.name)


def rows_of_table(path: Path, schema: Schema) -> Rows:
    """Read the rows of a file with named columns, or of a folder of images with a directory for each class."""
    where = Path(path).expanduser()
    return ImageFolder(where) if where.is_dir() else table_file(where, schema)
