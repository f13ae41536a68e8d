"""The operator's file of a real client: where it is, who may write it, and how it is read.

One TOML document, read on the client; nothing in it ever comes from a message.
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ...privacy.errors import ConfigurationError
from ...privacy.files import open_folder
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.setting import Setting, flat, refusal, renamed, settings, settings_of

NODE_CONFIG_VARIABLE = "MURMURFL_NODE_CONFIG"
"""The environment variable with the path of the operator's file."""
NODE_CONFIG_KEY = "murmurfl-config"
"""The key of ``flower-supernode --node-config``, on the operator's own command line, with that path."""
CONNECTION_TABLE = "connection"
"""The table of an operator's file that says how its node reaches the SuperLink."""
RUNS_TABLE = "runs"
"""The table of an operator's file that says which runs its node takes."""


def operators_file(node_config: Mapping[str, Any]) -> Path | None:
    """Return the operator's file that the environment or ``flower-supernode --node-config`` names, or None."""
    named = os.environ.get(NODE_CONFIG_VARIABLE) or node_config.get(NODE_CONFIG_KEY)
    return Path(str(named)) if named else None


def operators_values(path: Path) -> dict[str, Any]:
    """Read the TOML document in an operator's file; refuse one that others may write or exchange.

    On POSIX systems a document is believed only if its file belongs to the user this runs as or to root, neither its
    group nor others may write to it, and no folder on the way to it, before and after symbolic links, may be written by
    others (but for folders with the sticky bit and file systems mounted read-only). Members of the group of such a
    folder could still exchange it for another file of the operator's own.
    """
    try:
        with path.open("rb") as file:
            if os.name == "posix":
                _check_writers(path, os.fstat(file.fileno()))
            return tomllib.loads(file.read().decode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"Expected a node configuration at {path}, got: {reason}.", kind="unreadable"
        ) from error
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"Expected valid TOML in {path}, got: {error}", kind="unreadable") from error


def _check_writers(path: Path, status: os.stat_result) -> None:
    """Refuse a file that others than its operator could have written."""
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"Expected a node configuration that belongs to the user this runs as or to root, got {path}, which "
            f"belongs to user {status.st_uid}: look at what is in it, then run chown {os.geteuid()} {path}.",
            kind="insecure",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"Expected a node configuration only its operator may change, got {path} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, which others may write to: look at what is in it, then run chmod go-w "
            f"{path}.",
            kind="insecure",
        )
    folder = open_folder(path)
    if folder is not None:
        raise ConfigurationError(
            f"Expected a node configuration in folders only its operator may change, got {folder} with mode "
            f"{stat.S_IMODE(folder.stat().st_mode):o}, where anybody may put another in its place: run chmod o-w "
            f"{folder}, or keep it elsewhere.",
            kind="insecure",
        )


@settings
class OperatorsFile:
    """The settings of an operator's file, by themselves or in their tables.

    No value comes from a message or a run configuration, and what an operator wrote about runs is never silently left
    out: it is refused unless the reader says that it is kept.
    """

    required: ClassVar[frozenset[str]] = frozenset()
    """Settings that must be given and not be zero, though they have a default."""

    def __post_init__(self) -> None:
        for one in settings_of(type(self)).values():
            value = one.of(self)
            if not value and (one.default is MISSING or one.name in self.required):
                raise refusal(one.name, _NOT_ZERO[one.kind], value, kind="missing")

    @classmethod
    def key_of(cls, attribute: str) -> str:
        """Return the key of the setting in a field."""
        return next(one.name for one in settings_of(cls).values() if one.attribute == attribute)

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Return the settings that such a file may have."""
        return dict(settings_of(cls))

    @classmethod
    def read(cls, path: Path, *, runs_kept: bool = False) -> Self:
        """Read an operator's file; relative paths in it are taken from its folder.

        ``runs_kept`` says that the caller lets through only what the table ``[runs]`` takes, or answers no requests.
        """
        path = path.expanduser().absolute()
        values = operators_values(path)  # the path as it was given: folders of links count as well
        values.pop(CONNECTION_TABLE, None)  # read by whoever starts the node
        path = path.resolve()
        if values.pop(RUNS_TABLE, None) is not None and not runs_kept:
            raise ConfigurationError(
                f"{path}: Expected no table [{RUNS_TABLE}] where nothing keeps it, got one: under a plain "
                "flower-supernode the server's own code runs, whatever the table says. Start this client with "
                "`murmurfl node FILE`, or take the table out and take every run.",
                kind="conflict",
            )
        try:
            return cls.from_mapping(values).located(path.parent)
        except ConfigurationError as error:
            raise error.reworded(f"{path}: {error}") from error

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return a file's settings from a document with hyphenated keys."""
        return cls(**cls.values_of(values))

    @classmethod
    def values_of(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a document's values, checked, by the names of fields."""
        known = cls.settings()
        needed = {one.name for one in known.values() if one.default is MISSING} | cls.required
        found = read_values(flat(document, known), known, needed)
        return {known[name].attribute: known[name].read(value) for name, value in found.items()}

    def located(self, folder: Path) -> Self:
        """Return these settings with relative paths taken from a folder."""

        def at(file: str) -> str:
            return str(folder / Path(file).expanduser()) if file else file

        files = {one.attribute: one.of(self) for one in settings_of(type(self)).values() if one.file}
        placed = {name: at(value) if isinstance(value, str) else tuple(map(at, value)) for name, value in files.items()}
        made: Any = self
        return replace(made, **placed)


_NOT_ZERO = {str: "set", int: "an integer >= 1", float: "a number > 0"}


def read_values(document: Mapping[str, Any], known: Collection[str], needed: Collection[str]) -> dict[str, Any]:
    """Return the values of a document; refused if a key is unknown, or one that is needed is missing."""
    unknown = sorted(set(document) - set(known))
    if unknown and (now := renamed(unknown[0], known)):
        raise ConfigurationError(
            f"Expected known node-config keys, got {unknown[0]}: {now}.", kind="unknown-name", setting=unknown[0]
        )
    if unknown:
        raise ConfigurationError(
            f"Expected known node-config keys, got {', '.join(unknown)}: {_meant(unknown, list(known))}expected keys "
            f"among {', '.join(known)}.",
            kind="unknown-name",
            setting=unknown[0],
        )
    missing = {key for key in needed if key not in document}
    if {"mu", "epsilon"} <= set(known) and not {"mu", "epsilon"} & set(document):
        missing.add("mu")  # one of the two is needed
    if missing:
        named = ["mu or epsilon" if key == "mu" else key for key in known if key in missing]
        raise ConfigurationError(
            f"Expected values for {', '.join(named)}, got none of that name.",
            kind="missing",
            setting=next(key for key in known if key in missing),
        )
    return dict(document)


def named_values(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table with hyphenated keys, by the names of a dataclass's fields."""
    known = {one.name.replace("_", "-"): one for one in fields(kind)}
    needed = [key for key, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    return {known[key].name: value for key, value in read_values(values, known, needed).items()}


def _meant(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Return a guess at what unknown keys were meant to be, or nothing."""
    for kind, command in (("helper", "murmurfl helper"), ("client", "murmurfl node")):
        if kind in unknown:
            return f"this is a {kind}'s file, for `{command}`; "
    near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
    meant = [f"{name} for {found[0]}" for name, found in near.items() if found]
    return f"perhaps {', '.join(meant)}; " if meant else ""


def covering_budget(mu: float, ledger: SQLiteLedger, budget: float = 0.0) -> float:
    """Return the budget of all runs: the file's if it is not 0, else the ledger's; it must cover one run of ``mu``."""
    budget = budget or float(ledger.budget_mu or 0.0)
    if mu > budget:
        raise ConfigurationError(
            f"Expected mu <= {budget:g}, the budget of all runs in the ledger {ledger.path}, got {mu:g}: not one run "
            "would be answered.",
            kind="out-of-range",
            setting="mu",
            got=mu,
        )
    return budget
