"""Files of secure aggregation: the roster, and the private keys of clients and helpers.

A roster's file is no secret; what makes it believable is its digest, which every operator compares with the others' by
their own means and then pins. Files with private keys are made once, with mode 600, and are never written over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...privacy.errors import ConfigurationError, check_format
from ...privacy.files import check_private, create_private
from ...privacy.sums.roster import ClientKey, HelperKey, Roster

_FORMAT = 1
_CLIENT_KEY = "murmurfl-client-key"
_HELPER_KEY = "murmurfl-helper-key"
_MAKE_ONE = "Make one with `murmurfl roster key`, and have its card put into the roster."


def read_roster(path: Path, digest: str | None) -> Roster:
    """Read a roster; refuse another one than the operator pinned by its digest.

    The digest is None only for whoever looks at a roster and does not take part by it. With one, the clients and
    helpers are those that the operator compared, down to each key, whoever wrote the file since. That they are
    different people is the operators' to know.
    """
    content = _content(path, "a roster", "Take it from whoever keeps it, or make one with `murmurfl roster make`.")
    try:
        roster = Roster.from_json(content.decode())
    except ConfigurationError as error:
        raise error.reworded(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: {error}", kind="unreadable") from error
    if digest is not None and roster.digest != pinned_digest(digest):
        raise ConfigurationError(
            f"Expected the roster with digest {digest}, which this operator's configuration pins, got {path} with "
            f"digest {roster.digest}: it has other clients, helpers or keys. Compare the new digest with the other "
            "operators' by your own means, and pin it only if they are the same; the server's word counts for nothing.",
            kind="mismatch",
            setting="roster-digest",
        )
    return roster


def pinned_digest(text: str) -> str:
    """Return the 64 digits of a roster's digest as an operator wrote it: blanks and capital letters do not matter."""
    digits = "".join(text.split()).lower()
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ConfigurationError(
            f"Expected roster-digest to be 64 hexadecimal digits, as `murmurfl roster show` says them, got {text!r}.",
            kind="malformed",
            setting="roster-digest",
            got=text,
        )
    return digits


def write_roster(path: Path, roster: Roster) -> None:
    """Write a roster to a new file: a roster that clients pinned must not change under them."""
    text = json.dumps(roster.document, indent=2) + "\n"
    create_private(path, "a roster", text.encode(), error=ConfigurationError)


def read_client_key(path: Path) -> ClientKey:
    """Read the private key of a client.

    Notes
    -----
    **Formal guarantees.** A key that others may have read is refused: with it somebody else's releases would count as
    this client's, and a sum would have fewer honest clients than it seems to.
    """
    entries = _secrets(path, "a client's key", _CLIENT_KEY, ("secret",))
    return ClientKey(entries["secret"])


def write_client_key(path: Path, key: ClientKey) -> None:
    """Write a client's private key to a new file of mode 600, durable when this returns.

    The client counts among the honest only while the file stays its operator's alone; it is not encrypted.
    """
    _write_secrets(path, "a client's key", _CLIENT_KEY, {"secret": key.secret.hex()})


def read_helper_key(path: Path) -> tuple[str, HelperKey]:
    """Read the name and the private keys of a helper.

    Notes
    -----
    **Formal guarantees.** Keys that others may have read are refused: who has those of every helper sees each client's
    own release.
    """
    entries = _secrets(path, "a helper's keys", _HELPER_KEY, ("sealing-secret", "signing-secret"), ("name",))
    return entries["name"], HelperKey(entries["sealing-secret"], entries["signing-secret"])


def write_helper_key(path: Path, name: str, key: HelperKey) -> None:
    """Write a helper's name and private keys to a new file of mode 600, durable when this returns.

    The helper counts as honest only while the file stays its operator's alone; it is not encrypted. A helper whose
    opening record is lost needs new keys.
    """
    entries = {"name": name, "sealing-secret": key.sealing_secret.hex(), "signing-secret": key.signing_secret.hex()}
    _write_secrets(path, "a helper's keys", _HELPER_KEY, entries)


def _write_secrets(path: Path, what: str, kind: str, entries: Mapping[str, str]) -> None:
    document = {kind: _FORMAT, **entries}
    create_private(path, what, (json.dumps(document, indent=2) + "\n").encode(), error=ConfigurationError)


def _secrets(path: Path, what: str, kind: str, secrets: tuple[str, ...], texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the entries of a file of private keys: ``secrets`` as bytes, ``texts`` as they are."""
    check_private(path, what, missing=_MAKE_ONE, error=ConfigurationError)
    content = _content(path, what, _MAKE_ONE)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ConfigurationError(
            f"Expected {what} at {path}, got something that is no JSON document.", kind="unreadable"
        ) from None
    check_format(f"{what} at {path}", document, kind, _FORMAT)
    # No content is in an error's text or causes: more people read logs than this file.
    try:
        if set(document) != {kind, *secrets, *texts} or document[kind] != _FORMAT:
            raise ValueError
        if not all(isinstance(document[name], str) for name in (*secrets, *texts)):
            raise ValueError
        return {name: bytes.fromhex(document[name]) for name in secrets} | {name: document[name] for name in texts}
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"Expected {what} of format {_FORMAT} at {path}, got something else: name the file that `murmurfl roster "
            "key` made.",
            kind="other-format",
        ) from None


def _content(path: Path, what: str, missing: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"Expected {what} at {path}, got: {error.strerror or error}. {missing}", kind="unreadable"
        ) from error
