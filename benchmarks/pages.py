"""Write the tables of README.md and docs/ from what they speak of, so that no figure and no sentence is typed twice.

``python -m benchmarks.pages`` takes the documents that ``murmurfl reproduce`` and ``python -m benchmarks`` left in
docs/results/, and the declarations of run-config keys and of ``result.json``, and replaces what stands between
``<!-- NAME -->`` and ``<!-- /NAME -->``; a test compares the pages with where they come from.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurfl.app.key_reference import key_table
from murmurfl.app.papers import PAPERS
from murmurfl.app.papers.captions import table_caption
from murmurfl.app.papers.reproduce import tables_of
from murmurfl.app.report.schema import result_schema
from murmurfl.app.report.table import spread
from murmurfl.privacy import rounded_up

from . import engines, footprint, masks, mechanisms, momentum, noise, picture, profile, scale, streams
from .peers import run as peers

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "pictures" / "accuracy.svg"


def document(name: str) -> dict[str, Any]:
    """A reproduction's JSON."""
    return json.loads((DOCUMENTS / f"{name}.json").read_text())


def accuracy(entry: Mapping[str, Any]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    return spread(100 * entry["accuracy"]["mean"], 100 * entry["accuracy"]["std"], ".1f")


ROWS = 8
"""Rows of the README's table."""


def summary() -> str:
    """The README's table: what was printed, and what comes out here."""
    made = document("reshef-levy-2025")
    printed = [pair for pair in picture.pairs(made) if not pair.practical and pair.asked == "50 of 100"]
    rows = [*printed, *picture.drawn(made)][1 - ROWS :]
    summed = _summed()
    lines = [
        "| setting | machines | ε | DP-μ²-FL | noisy SGD |",
        "|---|---|---|---|---|",
    ]
    for pair in rows:
        cells = []
        for entry in pair.entries.values():
            told = entry["paper"].get("accuracy")
            cells.append(accuracy(entry) + ("" if told is None else f" ({told:.1f})"))
        note = "" if pair.other == "noisy-sgd" else " (the papers' release rule)"
        setting = f"{pair.cell['table']}, μ = {pair.cell['settings']['mu']:g}"
        lines.append(f"| {setting} | {pair.asked} | {pair.epsilon} | {cells[0]} | {cells[1]}{note} |")
    lines.append(_line_of(summed))
    return "\n".join(
        [
            "MNIST, one pass, no trusted server; test accuracy in percent, mean ± standard deviation over "
            f"{made['seeds']} seeds, in brackets what the paper prints.",
            "",
            told_of(rows, summed).replace("Epsilon", "ε"),
            "",
            *lines,
            "",
            _many_passes(rows),
        ]
    )


def _summed() -> dict[str, Any]:
    """The README's line of secure aggregation: its cell, the entry, and the same with an untrusted server."""
    cell = next(one for one in document("secure-aggregation")["cells"] if _is_of_summary(one["settings"]))
    algorithms = cell["algorithms"]
    return {"cell": cell, "entry": algorithms["h = 0.5 m"], "without": algorithms["untrusted server"]}


def _line_of(summed: Mapping[str, Any]) -> str:
    settings, entry = summed["cell"]["settings"], summed["entry"]
    shown = (
        f"secure aggregation, {summed['cell']['table']}, μ = {settings['mu']:g}",
        f"{settings['clients-per-round']} of {settings['num-clients']}",
        rounded_up(entry["epsilon"]["mean"]),
        accuracy(entry),
        f"{accuracy(summed['without'])} (DP-μ²-FL, each release seen by itself)",
    )
    return f"| {' | '.join(shown)} |"


def _is_of_summary(settings: Mapping[str, Any]) -> bool:
    everybody = settings["clients-per-round"] == settings["num-clients"]
    return everybody and settings["features"] == "oriented-gradients" and settings["mu"] == 0.25


def told_of(rows: Sequence[picture.Pair], summed: Mapping[str, Any] | None = None) -> str:
    """What the epsilons of such rows are true of."""
    cells = [{**pair.cell, "algorithms": pair.entries} for pair in rows]
    if summed is not None:
        cells.append({**summed["cell"], "algorithms": {"secure aggregation": summed["entry"]}})
    return table_caption({"cells": cells})


def _many_passes(rows: Sequence[picture.Pair]) -> str:
    """The baselines of the same cells that use samples more than once: no comparison without them."""
    found = [
        f"{label}, {accuracy(entry)} ({pair.cell['table']}, μ = {pair.cell['settings']['mu']:g})"
        for pair in rows
        for label, entry in pair.cell["algorithms"].items()
        if pair.practical and entry["settings"].get("passes", 1) > 1
    ]
    return f"Baselines that use every sample many times, at the same ε: {'; '.join(found)}."


def draw_pictures() -> None:
    """Draw the README's picture anew."""
    rows = picture.drawn(document("reshef-levy-2025"))
    picture.draw(rows, told_of(rows), PICTURE)


def table(name: str) -> str:
    """Every row of a reproduction, and what its epsilons are true of."""
    first, *_ = tables_of(document(name), name, PAPERS[name].table)
    return f"{first.caption}\n\n{first.markdown().rstrip()}"


def by_trust() -> str:
    """Accuracies by whom a machine trusts beside each other, and what holds whatever happens."""
    name = "secure-aggregation"
    _, *crosswise = tables_of(document(name), name, PAPERS[name].table)
    shown = [f"{one.title[0].upper()}{one.title[1:]}:\n\n{one.markdown().rstrip()}" for one in crosswise]
    return "\n\n".join([crosswise[0].caption, *shown])


def performance() -> str:
    """The table of speed and memory: every engine and both peers, on work of the same size."""
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
    lines = ["| | updates/s | seconds per 1,000 | peak memory MiB |", "|---|---|---|---|"]
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
    "README.md": {"results": summary},
    "docs/performance.md": {
        "machine": measured_on,
        "performance": performance,
        "engines": part("engines", engines.table),
        "noise": part("noise", noise.table),
        "streams": part("streams", streams.table),
        "profile": part("profile", profile.table),
        "profile-before": lambda: profile.table(document("profile-before")),
        "scale": part("scale", scale.table),
        "masks": part("masks", masks.table),
        "peers": part("peers", peers.table),
        "footprint": lambda: footprint.table(document("footprint")),
    },
    "docs/keys.md": {"keys": key_table},
    "docs/result.md": {"result": result_table},
    "docs/mechanisms.md": {"mechanisms": lambda: mechanisms.table(document("mechanisms"))},
    "docs/results.md": {
        **{name: lambda name=name: table(name) for name in PAPERS if (DOCUMENTS / f"{name}.json").exists()},
        "secure-aggregation": by_trust,
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
    draw_pictures()
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
