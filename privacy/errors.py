"""The errors murmurfl raises on purpose, and checks that several rooms share."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Mapping
from typing import Any

OF_DATA: Mapping[str, object] = {"of_data": True}
"""``extra`` of a line of a machine's own log that depends on its data, by what it says or by being there at all. A real
node leaves it out of its log, unless its operator asks for details."""

PUBLIC: Mapping[str, object] = {"public": True}
"""``extra`` of a line of code that sees samples which depends on none of them: a real node leaves out the others."""

ANOTHER_FORMAT = (
    "Go on with the version of murmurfl that wrote it, or with a new ledger for data that were never used before: the "
    "same data would spend their budget twice."
)
"""The way out from a file of another format that says what a machine's data have spent."""


class MurmurflError(Exception):
    """Base class of every error murmurfl raises on purpose."""


class ConfigurationError(MurmurflError, ValueError):
    """A setting is unknown, of the wrong type, or impossible together with the others."""


class LedgerError(MurmurflError):
    """A ledger cannot be read, written or believed. Nothing was released."""


class MisfitError(MurmurflError):
    """A record does not fit its schema: it counts as zero, and only the machine's own log says so."""


class RefusedError(MurmurflError):
    """A machine refuses a request; nothing was released and nothing was spent.

    ``code`` is one of :mod:`murmurfl.privacy.protocol`. ``reason`` is a fixed text: it depends on the request and on
    the machine's own configuration, never on its data, because Flower forwards it to the server.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception asks this process to end, rather than being a failure of the code it came through.

    A machine must not show that somebody's code failed on its data, whatever it raised: an extension written in Rust
    panics with a ``BaseException``, a script may call ``sys.exit``. Ctrl-C reaches the main thread alone.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def check_format(what: str, document: Any, key: str, expected: int) -> None:
    """Raise if a document names another format under ``key``.

    The error quotes that number and nothing else of the document, which may be a secret.
    """
    found = document.get(key) if isinstance(document, dict) else None
    if type(found) is int and found != expected:
        raise ConfigurationError(
            f"Expected {what} of format {expected}, got one of format {found}. Use the version of murmurfl that made "
            "it."
        )


class UnsupportedFlowerError(MurmurflError, ImportError):
    """The installed version of Flower is not one this package was tested with."""


def check_installed(package: str, extra: str, setting: str, *, load: bool = True) -> None:
    """Raise if a package of an extra, ``pip install 'murmurfl[extra]'``, is missing; ``setting`` is what needs it.

    A package that is there and broken raises its own error, which says more. Without ``load`` it is looked for, and not
    imported.
    """
    try:
        if load:
            importlib.import_module(package)
        elif importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Expected the package {package} for {setting}, got: {error}. Install it with "
            f"pip install 'murmurfl[{extra}]'."
        ) from error
