"""Write the tables of README.md and docs/ from what they speak of, so that no figure and no sentence is typed twice.

``python -m benchmarks.pages`` takes the documents that ``murmurfl reproduce`` and ``python -m benchmarks`` left in
docs/results/, and the declarations of run-config keys and of ``result.json``, and replaces what stands between
``<!-- NAME -->`` and ``<!-- /NAME -->``; a test compares the pages with where they come from.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from murmurfl.app.guarantees import table_caption
from murmurfl.app.key_reference import key_table
from murmurfl.app.papers import PAPERS
from murmurfl.app.papers.reproduce import tables_of
from murmurfl.app.report.schema import result_schema
from murmurfl.app.report.table import spread
from murmurfl.privacy import rounded_up

from . import engines, footprint, mechanisms, momentum, noise, profile, scale, streams
from .peers import run as peers

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ROOT / "docs" / "results"


def document(name: str) -> dict[str, Any]:
    """A reproduction's JSON."""
    return json.loads((DOCUMENTS / f"{name}.json").read_text())


def accuracy(entry: Mapping[str, Any]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    return spread(100 * entry["accuracy"]["mean"], 100 * entry["accuracy"]["std"], ".1f")


def shown(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Of a cell's algorithms ours, and the one the summary sets beside it."""
    other = next(label for label in cell["algorithms"] if label != "mu2")
    return {label: cell["algorithms"][label] for label in ("mu2", other)}


def summary() -> str:
    """The README's table: what was printed, and what comes out here."""
    made = document("reshef-levy-2025")
    summarised = {"cells": [{**cell, "algorithms": shown(cell)} for cell in made["cells"]]}
    lines = [
        "MNIST, one pass, untrusted server; test accuracy in percent, mean ± standard deviation over "
        f"{made['seeds']} seeds, in brackets what the paper prints.",
        "",
        table_caption(summarised).replace("Epsilon", "ε"),
        "",
        "| setting | machines | ε | DP-μ²-FL | noisy SGD |",
        "|---|---|---|---|---|",
    ]
    for cell in made["cells"]:
        settings, algorithms = cell["settings"], shown(cell)
        ours = algorithms["mu2"]
        cells = []
        for entry in algorithms.values():
            printed = entry["paper"].get("accuracy")
            cells.append(accuracy(entry) + ("" if printed is None else f" ({printed:.1f})"))
        note = "" if "noisy-sgd" in algorithms else " (the papers' release rule)"
        lines.append(
            f"| {cell['table']}, μ = {settings['mu']:g} | {settings['clients-per-round']} of "
            f"{settings['num-clients']} | {rounded_up(ours['epsilon']['mean'])} | {cells[0]} | {cells[1]}{note} |"
        )
    lines += [
        "",
        "And reshef-levy-2024, 100 machines in every round, the papers' constants: test loss, the paper's in brackets.",
        "",
        "| μ | untrusted server | trusted server |",
        "|---|---|---|",
    ]
    for cell in document("reshef-levy-2024")["cells"]:
        if cell["settings"]["num-clients"] == 100:
            losses = [
                f"{entry['loss']['mean']:.4f} ({entry['paper']['loss']:.3f})"
                for entry in (cell["algorithms"]["mu2"], cell["algorithms"]["trusted-mu2"])
            ]
            lines.append(f"| {cell['settings']['mu']:g} | {losses[0]} | {losses[1]} |")
    return "\n".join(lines)


def table(name: str) -> str:
    """Every row of a reproduction, and what its epsilons are true of."""
    first, *_ = tables_of(document(name), name, PAPERS[name].table)
    return f"{first.caption}\n\n{first.markdown().rstrip()}"


def performance() -> str:
    """The README's table of speed and memory: every engine and both peers, on work of the same size."""
    measured = document("performance")
    rows = [
        (f"murmurfl, {engine} engine", entry["updates_per_second"], entry["peak_mib"])
        for engine, entry in measured["engines"]["engines"].items()
    ]
    names = {"pfl": "pfl", "flower-localdp": "Flower FedAvg with LocalDpMod on Ray, flwr"}
    rows += [
        (
            f"{names[name]} {peer['version']}",
            1000 / statistics.median(peer["seconds_per_1000"]),
            statistics.median(peer["peak_mib"]),
        )
        for name, peer in measured["peers"].items()
    ]
    lines = ["| | client updates/s | seconds per 1,000 | peak memory MiB |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {rate:,.0f} | {1000 / rate:.3g} | {peak:,.0f} |"
        for name, rate, peak in sorted(rows, key=lambda row: -row[1])
    ]
    return "\n".join(lines)


def part(name: str, table: Callable[[Any], str]) -> Callable[[], str]:
    """A table of docs/performance.md."""
    return lambda: table(document("performance")[name])


def measured_on() -> str:
    """The machine of the benchmarks."""
    told = document("performance")["machine"]
    packages = ", ".join(f"{name} {told[name]}" for name in ("flwr", "ray", "torch", "numpy"))
    return f"Python {told['python']} on {told['cores']} cores, {packages}."


def powers() -> str:
    """The powers fitted to tran-cutkosky-2022's gradient norms."""
    name = "tran-cutkosky-2022"
    _, fitted = tables_of(document(name), name, PAPERS[name].table)
    return f"{fitted.caption}\n\n{fitted.markdown().rstrip()}"


def result_table() -> str:
    """What stands in result.json, key by key."""
    lines = ["| key | type | what it is |", "|---|---|---|"]

    def add(properties: Mapping[str, Any], before: str = "") -> None:
        for name, described in properties.items():
            kinds = described["type"] if isinstance(described["type"], list) else [described["type"]]
            lines.append(f"| `{before}{name}` | {' or '.join(kinds)} | {described['description']} |")
            if name == "config":  # docs/keys.md has its keys
                continue
            add(described.get("properties", {}), f"{before}{name}.")
            add(described.get("items", {}).get("properties", {}), f"{before}{name}[].")

    add(result_schema()["properties"])
    return "\n".join(lines)


BLOCKS = {
    "README.md": {"results": summary, "performance": performance},
    "docs/performance.md": {
        "machine": measured_on,
        "engines": part("engines", engines.table),
        "noise": part("noise", noise.table),
        "streams": part("streams", streams.table),
        "profile": part("profile", profile.table),
        "profile-before": lambda: profile.table(document("profile-before")),
        "scale": part("scale", scale.table),
        "peers": part("peers", peers.table),
        "footprint": lambda: footprint.table(document("footprint")),
    },
    "docs/keys.md": {"keys": key_table},
    "docs/result.md": {"result": result_table},
    "docs/mechanisms.md": {"mechanisms": lambda: mechanisms.table(document("mechanisms"))},
    "docs/results.md": {
        **{name: lambda name=name: table(name) for name in PAPERS if (DOCUMENTS / f"{name}.json").exists()},
        "tran-cutkosky-2022-powers": powers,
        "momentum": lambda: momentum.table(document("momentum")),
    },
}


def filled(text: str, blocks: Mapping[str, Any]) -> str:
    """A page's text with its blocks written anew.

    Raises
    ------
    ValueError
        If the page lacks a block's marks.
    """
    for name, write in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"Expected the marks of block {name!r}, found none.")
        text = pattern.sub(lambda marks, write=write: f"{marks[1]}{write()}\n{marks[2]}", text)
    return text


def main() -> None:
    """Write the pages."""
    for page, blocks in BLOCKS.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), blocks))
        print(page)


if __name__ == "__main__":
    main()
