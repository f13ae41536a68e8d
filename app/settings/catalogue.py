"""All run-config keys and all named things, for people and programs: a table, a TOML file, a JSON schema, sentences.

Everything here is asked of those who know it: the declarations of keys, the registries, and the docstrings of the
mechanisms.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...privacy.mechanisms import MECHANISMS
from ...privacy.release.policy import NO_NOISE
from ...privacy.setting import Setting, Value, spelled_out
from .registry import registry
from .run_config import readers_of, run_keys

_REFERENCE = re.compile(r" \([^()]*ALGORITHMS[^()]*\)")
"""The reference to the papers in a mechanism's docstring."""


@dataclass(frozen=True)
class RegistryView:
    """Things of one kind: how one is asked for, the built-in names, and a sentence for each."""

    title: str
    how: str
    names: Callable[[], Iterable[str]]
    sentence: Callable[[str], str]


def _named(key: str, title: str) -> RegistryView:
    """Return the things that a run-config key names."""

    def sentence(name: str) -> str:
        things = registry(key)
        return things[name].sentence if name in things else ""

    return RegistryView(title, f"--set {key}=NAME", lambda: tuple(registry(key)), sentence)


def _mechanism_sentence(name: str) -> str:
    if name == NO_NOISE:
        return "No noise at all: to see what noise costs."
    return _REFERENCE.sub("", (inspect.getdoc(MECHANISMS[name]) or "").partition("\n")[0]) if name in MECHANISMS else ""


def _papers() -> Iterable[str]:
    from ..papers import PAPERS

    return tuple(PAPERS)


def _paper_sentence(name: str) -> str:
    from ..papers import PAPERS

    return PAPERS[name].sentence if name in PAPERS else ""


CATALOGUE: dict[str, RegistryView] = {
    "strategy": _named("strategy", "Methods"),
    "task": _named("task", "Tasks"),
    "features": _named("features", "Features"),
    "partition": _named("partition", "Partitions"),
    "model": _named("model", "Models"),
    "mechanism": RegistryView(
        "Mechanisms", "--set mechanism=NAME", lambda: (*MECHANISMS, NO_NOISE), _mechanism_sentence
    ),
    "paper": RegistryView("Papers", "murmurfl reproduce NAME", _papers, _paper_sentence),
}
"""All named things, by the run-config key that names them, and ``paper``."""


def key_schema(one: Setting) -> dict[str, Any]:
    """Return a key as a JSON schema."""
    schema = {**one.reader.json_schema(), "default": one.default, "description": one.sentence}
    if one.known and one.kind is str:
        own = [{"pattern": r"^[\w.]+:[\w.]+$"}] if one.names or one.own else []
        own += [{"pattern": rf"{re.escape(suffix)}$"}] if (suffix := _suffix(one)) else []
        schema |= {"anyOf": [{"enum": list(one.known)}, *own]} if own else {"enum": list(one.known)}
    return schema


def shown(value: Value) -> str:
    """Return a value as it is typed; nothing for an empty text."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def expected(one: Setting) -> str:
    """Return the values that a key may have, in words; names may also be things of one's own."""
    names = [name for name in one.known if name]
    if one.kind is not str or not names:
        words = one.expected
        return f"{words} (empty: {one.zero})" if one.kind is str and one.zero else words
    own = ", or one of your own, package.module:Thing" if one.names or one.own else ""
    file = f" or path/to/file{suffix}" if (suffix := _suffix(one)) else ""
    return f"one of {', '.join(names)}{own}{file}"


def _suffix(one: Setting) -> str:
    """Return the suffix of files that a key may name."""
    return registry(one.name).suffix if one.names else ""


def readers(one: Setting) -> str:
    """Return the readers of a key."""
    return ", ".join(readers_of(one)) or ("every run" if not one.read_by else f"no built-in {one.read_by}")


def key_table() -> str:
    """Every key, as a table in Markdown: the documentation's."""
    lines = ["| key | default | what it may be | read by | what it is |", "|---|---|---|---|---|"]
    for one in run_keys().values():
        default = shown(one.default)
        cells = (f"`{one.name}`", f"`{default}`" if default else "", expected(one), readers(one), one.sentence)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def key_toml() -> str:
    """Every key with its default as TOML, such as ``[tool.flwr.app.config]`` holds them."""
    default = spelled_out({name: one.default for name, one in run_keys().items()}, run_keys())
    # JSON's words for the four types of values are TOML's too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in default.items())


def config_schema() -> Mapping[str, Any]:
    """Return a run configuration as a JSON schema.

    Any of its keys, and no others; a choice is a name, or a table by kind.
    """
    properties = {name: key_schema(one) for name, one in run_keys().items()}
    tables = {name: one.table_schema() for name, one in run_keys().items() if one.union}
    definitions = {known: made for table in tables.values() for known, made in table.pop("$defs").items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run configuration of murmurfl",
        "type": "object",
        "additionalProperties": False,
        "properties": properties | {name: {"anyOf": [properties[name], table]} for name, table in tables.items()},
        "$defs": definitions,
    }
