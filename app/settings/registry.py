"""Things that a run configuration names: methods, tasks, features, partitions and models.

Each kind has one registry, a mapping from names to objects. A name is one of the built-in ones, or
``package.module:Thing`` for an object of the user's own, which is imported when it is first asked for. There is no
default and no fallback: any other name is refused, with the nearest known one.

The configuration asks for what it names through :func:`registry`, by the name of its key. The registries themselves
stand in the rooms of what they hold. These rooms import the configuration, so the configuration may not import them: it
looks a registry up when it first needs one, and no circle of imports arises.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...clients.records.encoders import load_encoders_with
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import MECHANISMS, Mechanism, register_mechanism
from ...privacy.setting import unknown_name

ThingT = TypeVar("ThingT")

_REGISTRIES = {
    "strategy": ("methods", "METHODS"),
    "task": ("data", "TASKS"),
    "features": ("data.features", "FEATURES"),
    "partition": ("data.partition", "PARTITIONS"),
    "model": ("models", "MODELS"),
}
"""Location of the registry of a run-config key: its room, and its name there."""


TABLES = (".csv", ".tsv", ".parquet", ".pq", ".xlsx")
"""Extensions of a table's file name, which is no task by itself."""


class Named:
    """A thing that a run configuration names, such as a task or a model.

    Attributes
    ----------
    sentence : str
        What it is, for help and documentation.
    keys : frozenset of str
        Hyphenated run-config keys that this thing reads and others of its kind need not.
    """

    name: str = ""
    sentence: str = ""
    keys: frozenset[str] = frozenset()

    def check(self, config: Any) -> None:
        """Raise if this thing cannot serve a run configuration."""


class Registry(Mapping[str, ThingT], Generic[ThingT]):
    """The things of one kind, by name, as the run-config key ``key`` names them.

    The built-in ones have a ``name`` each and stand in the order in which they are listed. ``adapt`` makes a thing of
    this kind from a user's object of another kind, such as a function, and its name; without it such an object is
    refused. ``of_file`` makes one of the path of a file that ends with ``suffix``.
    """

    def __init__(
        self,
        key: str,
        kind: type[ThingT],
        things: Iterable[ThingT],
        adapt: Callable[[Any, str], ThingT] | None = None,
        suffix: str = "",
        of_file: Callable[[str], ThingT] | None = None,
    ) -> None:
        self.key = key
        self.suffix = suffix
        self._of_file = of_file
        self._kind = kind
        self._adapt = adapt
        self._things: dict[str, ThingT] = {thing.name: thing for thing in things}  # type: ignore[attr-defined]
        self._own: dict[str, ThingT] = {}
        self._given: dict[str, Any] = {}

    def __getitem__(self, name: str) -> ThingT:
        """Return the thing that a name stands for; one of a user's own is imported when it is first asked for."""
        if name in self._things:
            return self._things[name]
        if self._of_file is not None and self.is_file(name):
            return self._of_file(name)  # not kept: the file may change, and so may the current folder
        if self.key == "task" and name.lower().endswith(TABLES):
            raise ConfigurationError(
                f"Expected task to name data, got the table {name!r}: `murmurfl fit {name} --label COLUMN` trains on "
                "it, and murmurfl.app.fit in Python.",
                kind="unknown-name",
                setting="task",
            )
        if ":" not in name:
            raise ConfigurationError(unknown_name(self.key, name, self._things), kind="unknown-name", setting=self.key)
        if name not in self._own:
            self._own[name] = self._made(name)
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        """Return the built-in names."""
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def __contains__(self, name: object) -> bool:
        """Return True if a name is built in."""
        return name in self._things

    def is_file(self, name: str) -> bool:
        """Return True if a name is the path of a file."""
        return bool(self.suffix) and name.endswith(self.suffix)

    def located(self, name: str, folder: Path | None = None) -> str:
        """Return a name that means the same everywhere.

        The path of a file, taken from ``folder`` or here, from the root.
        """
        if not self.is_file(name):
            return name
        return str((folder or Path.cwd()).resolve() / Path(name).expanduser())

    def give(self, name: str, thing: ThingT) -> None:
        """Let a name with a colon mean an object of this process, in the place of one to be imported."""
        self._own[name] = thing

    def reading(self, key: str) -> list[str]:
        """Return the built-in names of those that read a run-config key."""
        return [name for name, thing in self._things.items() if key in thing.keys]  # type: ignore[attr-defined]

    def named(self, found: Any) -> str:
        """Return a new name for an object of this process, such as a function defined in a notebook."""
        kind = type(found) if not hasattr(found, "__qualname__") else found
        plain = f"{kind.__module__}:{kind.__qualname__}"
        numbered = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
        name = next(one for one in numbered if self._given.get(one, found) is found)
        if name not in self._given:
            self._own[name] = self._thing(found, name)
            self._given[name] = found
        return name

    def _made(self, name: str) -> ThingT:
        return self._thing(imported(name, self.key), name)

    def _thing(self, found: Any, name: str) -> ThingT:
        if inspect.isclass(found) and issubclass(found, self._kind):
            found = found()
        if isinstance(found, self._kind):
            return found
        if self._adapt is None:
            kind = self._kind.__name__
            raise ConfigurationError(
                f"Expected {self.key} = {name!r} to be a {kind} or a subclass of it, got {type(found).__name__}.",
                kind="wrong-type",
                setting=self.key,
            )
        return self._adapt(found, name)


@functools.cache
def registry(key: str) -> Registry[Any]:
    """Return the registry of a run-config key that names things, such as ``strategy`` or ``task``."""
    room, name = _REGISTRIES[key]
    return getattr(importlib.import_module(f"{__name__.rsplit('.', 2)[0]}.{room}"), name)


def imported(name: str, key: str) -> Any:
    """Return the object ``package.module:Thing`` that the setting of a key names."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # an import runs the user's own code
        raise ConfigurationError(
            f"Expected {key} = {name!r} to name an object of an importable module (package.module:Thing), got "
            f"{type(error).__name__}: {error}.",
            kind="not-found",
            setting=key,
        ) from error
    return found


def known_mechanism(name: str) -> str:
    """Return the name a mechanism is registered under.

    One of the user's own (``package.module:Thing``) is imported first.
    """
    if ":" not in name:
        return name
    kind = imported(name, "mechanism")
    if not (inspect.isclass(kind) and issubclass(kind, Mechanism)):
        raise ConfigurationError(
            f"Expected mechanism = {name!r} to be a subclass of Mechanism, got {kind!r}.",
            kind="wrong-type",
            setting="mechanism",
        )
    if MECHANISMS.get(kind.name) is not kind:
        register_mechanism(kind)
    return kind.name


def own_mechanism_options(name: str) -> Iterable[str]:
    """Return the options that a mechanism of one's own takes; none for any other."""
    kind = MECHANISMS.get(known_mechanism(name))
    return () if kind is None else inspect.signature(kind.__init__).parameters


load_encoders_with(lambda: registry("features"))  # which registers the encoders of images
