"""The file of an owner's private key: made once, with mode 600, and never overwritten; it belongs on no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...privacy import ConfigurationError
from ...privacy.errors import check_format
from ...privacy.files import check_private, create_private
from ...privacy.permits import OwnerKey

_FORMAT = 1
_KIND = "murmurfl-owner-key"
_WHAT = "an owner's key"


def write_owner_key(path: Path, key: OwnerKey) -> None:
    """Write an owner's private key to a new file of mode 600, durable on return.

    Raises
    ------
    ConfigurationError
        If ``path`` exists; it is left alone.

    Notes
    -----
    The file is not encrypted: whoever reads it decides which runs machines take.
    """
    document = {_KIND: _FORMAT, "secret": key.secret.hex()}
    create_private(path, _WHAT, (json.dumps(document, indent=2) + "\n").encode(), error=ConfigurationError)


def read_owner_key(path: Path) -> OwnerKey:
    """Read an owner's private key.

    Raises
    ------
    ConfigurationError
        If there is none, others could have read it and so could sign with it, or the file holds something else.
    """
    check_private(path, _WHAT, missing="Make one with `murmurfl owner key`.", error=ConfigurationError)
    # Nothing of the content but the format's number is in an error's text or causes.
    try:
        document: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        document = None
    check_format(f"{_WHAT} at {path}", document, _KIND, _FORMAT)
    try:
        if not isinstance(document, dict) or set(document) != {_KIND, "secret"} or document[_KIND] != _FORMAT:
            raise ValueError
        return OwnerKey(bytes.fromhex(document["secret"]))
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"Expected {_WHAT} of format {_FORMAT} at {path}, got something else: name the file that `murmurfl owner "
            "key` made."
        ) from None
