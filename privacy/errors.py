"""The errors murmurfl raises on purpose, and checks that several rooms share."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import unquote, urlsplit

MadeT = TypeVar("MadeT", bound=Callable[..., Any])

OF_DATA: Mapping[str, object] = {"of_data": True}
"""``extra`` of a line of a client's own log that depends on its data, by what it says or by being there at all. A real
node leaves it out of its log, unless its operator asks for details."""

PUBLIC: Mapping[str, object] = {"public": True}
"""``extra`` of a line of code that sees samples which depends on none of them: a real node leaves out the others."""

ANOTHER_FORMAT = (
    "Go on with the version of murmurfl that wrote it, or with a new ledger for data that were never used before: the "
    "same data would spend their budget twice."
)
"""The way out from a file of another format that says what a client's data have spent."""


MOST_COUNTED = 2**31 - 1
"""The largest number of releases, samples or parts of a setting: arrays are made of so many, and numpy refuses more
in its own words."""

ErrorT = TypeVar("ErrorT", bound="MurmurflError")
ErrorKind = Literal[
    "busy",  # another process uses the file, or keeps writing to it
    "conflict",  # settings exclude each other, or one needs another value of the other
    "damaged",  # a ledger, a record or a checkpoint contradicts itself
    "duplicate",  # a name, a key or a column is there more than once
    "exhausted",  # budget, caps or samples do not last for what is asked
    "exists",  # something is there where something new is to be made
    "failed",  # the operating system, another program, or somebody else's code failed
    "insecure",  # others can read or change a file, or listen on the way
    "invalid",  # anything else
    "invalid-record",  # a record does not fit its schema
    "malformed",  # a text or a document is not of its form
    "mismatch",  # two things that must agree do not
    "missing",  # a value, an argument or a reply that is needed is not there
    "not-found",  # no file, folder, module or device of that name
    "not-installed",  # a package is missing
    "not-permitted",  # no owner signed for it, or the permit has ended
    "other-format",  # another version of murmurfl wrote the file
    "out-of-range",  # a number is too small, too large or not finite
    "refused",  # a client or a helper refuses a request
    "rolled-back",  # a file came back from a backup and has forgotten releases
    "unknown-name",  # a name is none of the known ones
    "unreachable",  # a server, nodes or helpers did not answer
    "unreadable",  # a file cannot be read, or is something else
    "unsupported",  # a model, a client or a version cannot do this
    "wrong-order",  # a call comes too early, too late or twice
    "wrong-shape",  # an array, a key or a list is of another size
    "wrong-type",  # a value is of another type
]
"""Everything an error's ``kind`` may be, with what it says."""


class MurmurflError(Exception):
    """Base class of every error murmurfl raises on purpose.

    Programs read the class, ``kind`` and ``setting``, which stay as they are; the message is for people, and its
    wording may change.

    Parameters
    ----------
    message : str
        What was expected, what was received, and what to do.
    kind : ErrorKind, optional
        What is wrong. Default: the kind of the class.
    setting : str, optional
        Name of the parameter or key at fault, as the message writes it.
    got : object, optional
        Value of that setting. Only a text, a number or a boolean is kept.

    Attributes
    ----------
    kind : ErrorKind
        What is wrong. The integer ``code`` of a :class:`RefusedError` is the protocol's, and says which refusal it is.
    setting : str or None
        Name of the parameter or key at fault, if it is one.
    got : str, int, float, bool or None
        Value that was received for the setting, if the message shows it. It is never a value of a record.

    Examples
    --------
    >>> from murmurfl.privacy import ConfigurationError, PrivacyPolicy
    >>> try:
    ...     PrivacyPolicy(clip_norm=1.0, batch_size=4, max_participations=5, mu=1.0, delta=2.0)
    ... except ConfigurationError as error:
    ...     print(error.kind, error.setting, error.got)
    out-of-range delta 2.0
    """

    kind: ErrorKind = "invalid"

    def __init__(
        self,
        message: str = "",
        *,
        kind: ErrorKind | None = None,
        setting: str | None = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        self.setting = setting
        self.got = got if isinstance(got, str | int | float) else None  # an array could hold samples

    def reworded(self, message: str) -> Self:
        """Return this error with another message, such as one that also names a file."""
        return _restored(type(self), (message,), self.__dict__)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # An exception is otherwise pickled as a call with its message alone, which not every subclass can be made by.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[ErrorT], arguments: tuple[object, ...], fields: Mapping[str, object]) -> ErrorT:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class ConfigurationError(MurmurflError, ValueError):
    """A setting is unknown, of the wrong type, or impossible together with the others.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> try:
    ...     PrivacyPolicy(clip_norm=0.0, batch_size=4, max_participations=5, mu=1.0)
    ... except ConfigurationError as error:
    ...     print(error.kind, error.setting)
    out-of-range clip_norm
    """


class LedgerError(MurmurflError):
    """A ledger cannot be read, written or believed. Nothing was released.

    Examples
    --------
    >>> from murmurfl.privacy import read_ledger
    >>> try:
    ...     read_ledger("no-such-folder/ledger.sqlite")
    ... except LedgerError as error:
    ...     error.kind
    'not-found'
    """

    kind = "damaged"


class InvalidRecordError(MurmurflError):
    """A record does not fit its schema: it counts as zero, and only the client's own log says so."""

    kind = "invalid-record"

    def __init__(self, message: str) -> None:
        super().__init__(message)  # without fields: what was received is of a record


class RefusedError(MurmurflError):
    """A client refuses a request; nothing was released and nothing was spent.

    ``code`` is one of :mod:`murmurfl.privacy.protocol`. ``reason`` is a fixed text: it depends on the request and on
    the client's own configuration, never on its data, because Flower forwards it to the server.

    Examples
    --------
    >>> from murmurfl.privacy import protocol
    >>> error = RefusedError(protocol.BUDGET_EXHAUSTED, "the budget is spent")
    >>> error.kind, error.reason
    ('refused', 'the budget is spent')
    """

    kind = "refused"

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def is_interrupt(error: BaseException) -> bool:
    """Return True if an exception asks this process to end, rather than being a failure of the code it came through.

    A client must not show that somebody's code failed on its data, whatever it raised: an extension written in Rust
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
            "it.",
            kind="other-format",
        )


class UnsupportedFlowerError(MurmurflError, ImportError):
    """The installed version of Flower is not one this package was tested with.

    Examples
    --------
    >>> try:
    ...     raise UnsupportedFlowerError("Expected Flower 1.41 or 1.42, got 1.0.")
    ... except ImportError as error:
    ...     error.kind
    'unsupported'
    """

    kind = "unsupported"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout that this package was installed from, if any."""
    root = Path(__file__).resolve().parents[1]
    # A bundle that Flower sent has a pyproject.toml too, but no py.typed.
    if not (root / "app" / "py.typed").is_file():
        with suppress(metadata.PackageNotFoundError):
            found = json.loads(metadata.distribution("murmurfl").read_text("direct_url.json") or "{}").get("url", "")
            root = Path(unquote(urlsplit(found).path)) if found.startswith("file:") else root
    if not ((root / "pyproject.toml").is_file() and (root / "app" / "py.typed").is_file()):
        return f"pip install 'murmurfl[{extra}]'"
    return f"pip install '{'.' if Path.cwd() == root else root}[{extra}]'"


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
            f"Expected the package {package} for {setting}, got: {error}. Install it with {install_command(extra)}.",
            kind="not-installed",
            setting=package,
        ) from error


def formerly(**now: str) -> Callable[[MadeT], MadeT]:
    """Return a decorator that refuses arguments under names of before, by name, with what takes their place."""

    def decorated(made: MadeT) -> MadeT:
        kind: Any = made
        target = kind.__init__ if isinstance(made, type) else kind

        @functools.wraps(target)
        def checked(*args: Any, **arguments: Any) -> Any:
            for name in now.keys() & arguments.keys():
                raise ConfigurationError(
                    f"Expected {now[name]}, got {name}, its name of before.", kind="unknown-name", setting=name
                )
            return target(*args, **arguments)

        if not isinstance(made, type):
            return checked  # type: ignore[return-value]
        kind.__init__ = checked
        return kind

    return decorated
