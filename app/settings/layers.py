"""Settings of a run from several places: a TOML file of run-config keys, a command line, a program's own.

What comes later wins. ``mu`` and ``epsilon`` say the same thing in two ways, so a later one of the two puts an earlier
other one out of force; both in one place are refused. Where nothing is asked for it is the default run.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...privacy.errors import ConfigurationError
from ...privacy.setting import Value, flat, key_of, mu_and_epsilon, unknown_key
from .registry import registry
from .run_config import AUTO, SECURE, RunConfig, run_keys, without_unread

_SAME = {"mu": "epsilon", "epsilon": "mu"}


def layered(*layers: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings by hyphenated key, of which later layers win over earlier ones."""
    merged: dict[str, Value] = {}
    for layer in layers:
        if layer.get("mu") and layer.get("epsilon"):
            raise mu_and_epsilon(layer["mu"], layer["epsilon"])
        for name, value in layer.items():
            if name in _SAME and value:  # epsilon = 0 says that mu counts: it takes nothing out of force
                merged.pop(_SAME[name], None)
            merged[name] = value
    return merged


def parse_assignments(assignments: Iterable[str]) -> dict[str, Value]:
    """``key=value`` texts as a mapping, each value read as its key's type."""
    values: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name, text = key_of(name.strip(), run_keys()), text.strip()
        if not equals:
            raise ConfigurationError(f"Expected key=value, got {assignment!r}.", kind="malformed")
        if name not in run_keys():
            raise unknown_key(name, run_keys())
        values[name] = run_keys()[name].parsed(text)
    return layered(values)


def read_settings(path: Path) -> dict[str, Value]:
    """Return the settings of a TOML file: hyphenated run-config keys, by themselves or in their tables.

    A refusal names the file and the key. What goes together is checked where a
    :class:`~murmurfl.app.settings.run_config.RunConfig` is made.
    """
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"Expected a TOML file of run-config keys at {path}: {error.strerror}.", kind="unreadable"
        ) from None
    except ValueError as error:  # of TOML and of UTF-8
        raise ConfigurationError(
            f"Expected a TOML file of run-config keys at {path}, got: {error}.", kind="unreadable"
        ) from None
    try:
        return layered({name: _read(name, value) for name, value in flat(found, run_keys()).items()})
    except ConfigurationError as error:
        raise error.reworded(f"In {path}: {error}") from None


def _read(name: str, value: Any) -> Value:
    known = run_keys()
    if name in known:
        return known[name].read(value)
    raise unknown_key(name, known)


def names_own(settings: Mapping[str, Value]) -> bool:
    """Return True if settings, by hyphenated key, name something of one's own."""
    own = (one.name for one in run_keys().values() if one.names or one.own)
    return any(":" in str(settings.get(name, "")) for name in own)


def search_here() -> None:
    """Look for modules in the current folder first, as ``python -m`` does."""
    folder = str(Path.cwd())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def environment_for(config: RunConfig) -> dict[str, str]:
    """Return the environment in which an engine's processes find things of one's own where this one does."""
    if not names_own(config.to_mapping()):
        return {}
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *([before] if before else [])])}


_FEDERATION: Mapping[str, Value] = {
    "num-clients": 50,
    "features": "soft-gradients",
    "partition": "label-skew",
    "partition.alpha": 0.3,
}
"""Clients and data of the default run: what belongs to its task."""

DEFAULT_RUN: Mapping[str, Value] = {
    "strategy": "full-batch",
    **_FEDERATION,
    "clients-per-round": 0,
    "trust": SECURE,
    "epsilon": 4.0,
}
"""Settings of a run for which nothing else is asked: many clients with different mixtures of digits, whose server sees
only sums."""

FROM_DEFAULT_RUN = "default"
"""Value of the keys of :data:`DEFAULT_RUN` in ``[tool.flwr.app.config]``: Flower merges overrides into that table, and
refuses those that are not in it, so a key that nobody has set must have a value which nobody sets."""


def flower_config(values: Mapping[str, Any], *, deployed: bool = False) -> RunConfig:
    """Return the configuration of a run that Flower started, from its merged run configuration.

    Keys of :data:`DEFAULT_RUN` that nobody has overridden have the default run's values in a simulation. With real
    clients they have the keys' own defaults: the data, the policy and the trust model are the operators'.
    """
    given = flat(values, run_keys())
    left = {name: value for name, value in given.items() if name not in DEFAULT_RUN or value != FROM_DEFAULT_RUN}
    return RunConfig.from_mapping(left if deployed or len(left) == len(given) else with_defaults(left))


def with_defaults(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings of a run on top of those of the default run.

    Another task has clients and features of its own, and a strategy that cannot work with sums has its own trust
    model. The papers' preset starts from the defaults of the keys, which are the papers'.
    """
    if _given(settings, "preset") != run_keys()["preset"].default:
        return dict(settings)
    own = dict(DEFAULT_RUN)
    if _given(settings, "task") != run_keys()["task"].default:
        own = {name: value for name, value in own.items() if name not in _FEDERATION}
    reads_pixels = registry("model")[str(_given(settings, "model"))].reads_pixels
    if settings.get("strategy") == AUTO or reads_pixels:  # which chooses features, or has them
        own.pop("features", None)
    if SECURE not in registry("strategy")[str(settings.get("strategy", own["strategy"]))].trusts:
        del own["trust"]
    merged = layered(own, settings)
    unread = own.keys() - without_unread(merged).keys()
    return {name: value for name, value in merged.items() if name in settings or name not in unread}


def _given(settings: Mapping[str, Value], name: str) -> Value:
    return settings.get(name, run_keys()[name].default)
