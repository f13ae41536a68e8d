"""Mechanisms as a run configuration names them: built in, registered, or ``package.module:Thing`` of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from ..privacy import MECHANISMS, NO_NOISE, ConfigurationError, Mechanism, register_mechanism
from .registry import imported


def known_mechanism(name: str) -> str:
    """The name a mechanism is registered under; one of the user's own (``package.module:Thing``) is imported first.

    Raises
    ------
    ConfigurationError
        If it is no mechanism, or its stream is not what its matrices say.
    """
    if ":" not in name:
        return name
    kind = imported(name, f"mechanism = {name!r}")
    if not (inspect.isclass(kind) and issubclass(kind, Mechanism)):
        raise ConfigurationError(f"Expected mechanism = {name!r} to be a subclass of Mechanism, got {kind!r}.")
    if MECHANISMS.get(kind.name) is not kind:
        register_mechanism(kind)
    return kind.name


def mechanism_options_of(name: str) -> Iterable[str]:
    """The options a mechanism takes."""
    if not name or name == NO_NOISE:
        return ()
    return inspect.signature(MECHANISMS[known_mechanism(name)].__init__).parameters
