"""The high-water mark of a helper's opening record: how far it had come, kept outside the file that is backed up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import check_private, replace_durably
from .opening_record import OpeningRecordError

_FORMAT = 1
_FORMAT_KEY = "murmurfl-opening-mark"

RECORD_LOST = (
    "If the newest one is lost, this helper's keys are used up: make new ones (`murmurfl roster key`), have a roster "
    "made with them, and begin new sessions. Nothing was opened."
)
"""What to do about a record that cannot be believed, for errors."""

ANOTHER_RECORD = (
    "Go on with the version of murmurfl that wrote it, or with new keys of this helper (`murmurfl roster key`), a "
    "roster made with them, and new sessions: with its old keys it would open again what it has forgotten."
)
"""The same, of a record of another format."""


@dataclass(frozen=True)
class OpeningPlace:
    """How far a record has come.

    Parameters
    ----------
    record : str
        The record's own random name.
    number : int
        Sets opened so far.
    link : str
        Of the last of them, in hexadecimal; it depends on all before it.
    """

    record: str
    number: int
    link: str

    def write_mark(self, path: Path) -> None:
        """Make this the mark, durably."""
        document = {_FORMAT_KEY: _FORMAT, **asdict(self)}
        replace_durably(path, json.dumps(document, indent=1).encode() + b"\n", error=OpeningRecordError)


def read_opening_mark(path: Path) -> OpeningPlace:
    """The mark at ``path``.

    Raises
    ------
    OpeningRecordError
        If there is none, others can read or write it, or it is damaged or of another format.
    """
    check_private(
        path,
        "the opening record's high-water mark",
        missing=f"Without it nobody can tell whether the record was copied back. Put the mark back. {RECORD_LOST}",
        error=OpeningRecordError,
    )
    try:
        document = json.loads(path.read_text())
        if (version := document.pop(_FORMAT_KEY)) != _FORMAT:
            raise OpeningRecordError(
                f"Expected an opening record's high-water mark of format {_FORMAT} at {path}, got one of format "
                f"{version!r}; it was left alone, and nothing was opened. {ANOTHER_RECORD}"
            )
        mark = OpeningPlace(**document)
        if type(mark.number) is not int or mark.number < 0 or len(bytes.fromhex(mark.link)) != 32:
            raise ValueError("impossible values")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OpeningRecordError(
            f"Expected the opening record's high-water mark at {path}, got a file that is damaged or something else "
            f"({error}). Put the mark back. {RECORD_LOST}"
        ) from error
    return mark
