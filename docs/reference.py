"""Tables that are made while the site is built, from declarations and measurements: ``<!-- generated: NAME -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.app.runs.outcome import result_schema
from murmurfl.app.settings.catalogue import expected, key_table
from murmurfl.app.settings.run_config import run_keys
from murmurfl.clients import UpdateNode
from murmurfl.clients.nodes.client_file import SampleNode

from docs import site_pages


def result_table() -> str:
    """Return what stands in result.json, key by key."""
    lines = ["| key | type | what it is |", "|---|---|---|"]

    def add(properties: Mapping[str, Any], before: str = "") -> None:
        for name, described in properties.items():
            kinds = described["type"] if isinstance(described["type"], list) else [described["type"]]
            lines.append(f"| `{before}{name}` | {' or '.join(kinds)} | {described['description']} |")
            if name == "config":  # keys.md has its keys
                continue
            add(described.get("properties", {}), f"{before}{name}.")
            add(described.get("items", {}).get("properties", {}), f"{before}{name}[].")

    add(result_schema()["properties"])
    return "\n".join(lines)


def file_table() -> str:
    """Return the settings of operators' files, and what has them."""
    kinds = {
        "node": NodeConfig.settings(),
        "own samples": SampleNode.settings(),
        "own updates": UpdateNode.settings(),
        "helper": HelperConfig.settings(),
    }
    known = {name: one for kind in reversed(kinds.values()) for name, one in kind.items()}
    lines = ["| key | of | what it may be | what it is |", "|---|---|---|---|"]
    for name, one in sorted(known.items()):
        of = ", ".join(kind for kind, settings in kinds.items() if name in settings)
        sentence = one.sentence or RELEASES_OF_UPDATES[name]
        may_be = expected(
            replace(one, zero="") if name in run_keys() else one
        )  # what a run's zero stands for is its own
        cells = (f"`{name}`", of, may_be, sentence)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


RELEASES_OF_UPDATES = {
    "releases-per-pass": "Into how many disjoint, fixed parts the ClientApp divides its data, one for each release.",
    "allow-evaluation": "Whether results of the ClientApp's `evaluate` may leave, without noise.",
}
"""What only :class:`~murmurfl.clients.UpdatePolicy` says."""


TABLES: Mapping[str, Callable[[], str]] = {
    "keys": key_table,
    "result": result_table,
    "files": file_table,
    "commands": site_pages.command_table,
    "modules": site_pages.module_table,
    **{package: lambda package=package: site_pages.name_table(package) for package in site_pages.PUBLIC},
}


def filled(text: str) -> str:
    """Return a page's text with its tables in it."""
    return re.sub(r"<!-- generated: (\S+) -->", lambda mark: TABLES[mark[1]](), text)
