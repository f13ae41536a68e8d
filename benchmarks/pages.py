"""Write the tables of README.md and docs/ from what they speak of, so that no figure and no sentence is typed twice.

``python -m benchmarks.pages`` takes the documents that ``murmurfl reproduce`` and ``python -m benchmarks`` left in
docs/results/, and the declarations of run-config keys and of ``result.json``, and replaces what stands between
``<!-- NAME -->`` and ``<!-- /NAME -->``; a test compares the pages with where they come from.
"""

from __future__ import annotations

import json
import re
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

from . import (
    bare,
    device,
    engines,
    fleet,
    footprint,
    forecast,
    glance,
    large,
    masks,
    mechanisms,
    momentum,
    noise,
    picture,
    profile,
    ray,
    scale,
    stragglers,
    streams,
    workers,
)
from .peers import in_process
from .peers import run as peers
from .unmeasured import is_missing, shown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "pictures" / "accuracy.svg"


def document(name: str) -> dict[str, Any]:
    """A reproduction's JSON."""
    return json.loads((DOCUMENTS / f"{name}.json").read_text())


ROWS = 8
"""Rows of a table of the README, at most."""


def summary() -> str:
    """The README's table of results: the picture's lines, and a record of others."""
    made = document("best-accuracy")
    drawn = picture.drawn(made)
    epsilons = sorted({row["epsilon"] for rows in drawn.values() for row in rows if row["epsilon"] is not None})
    lines = [
        f"| | {' | '.join(f'ε = {rounded_up(one)}' for one in epsilons)} | no noise |",
        f"|---|{'---|' * (len(epsilons) + 1)}",
    ]
    for line in picture.LINES:
        rows = {row["epsilon"]: row for row in drawn.get(line, [])}
        if line.algorithm == picture.FULL:
            rows[None] = _without_noise(made, line.features)
        cells = [_percent(rows.get(one)) for one in (*epsilons, None)]
        lines.append(f"| {line.name} | {' | '.join(cells)} |")
    central = picture.CENTRAL
    assumed = f"{central.accuracy:g} at ε = {central.epsilon:g}; {central.assumes}"
    return "\n".join(
        [
            "MNIST, 60,000 samples on 100 machines; test accuracy in percent, mean ± standard deviation over "
            f"{made['seeds']} seeds.",
            "",
            *lines,
            "",
            f"For comparison: {central.name}, {assumed}.",
            "",
            told_of(drawn).replace("Epsilon", "ε"),
        ]
    )


def _without_noise(made: Mapping[str, Any], features: str) -> Mapping[str, Any] | None:
    noiseless = (row for row in picture.best_rows(made) if row["epsilon"] is None)
    return next((row for row in noiseless if row["table"] == features), None)


def _percent(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else spread(row["accuracy %"], row["± std"], ".1f")


def told_of(drawn: Mapping[picture.Line, Sequence[Mapping[str, Any]]]) -> str:
    """What the epsilons of the picture's lines are true of."""
    wanted = {(line.features, line.algorithm): line.name for line in drawn}
    cells = []
    for cell in document("best-accuracy")["cells"]:
        named = {wanted.get((cell["table"], label)): entry for label, entry in cell["algorithms"].items()}
        cells.append({**cell, "algorithms": {name: entry for name, entry in named.items() if name is not None}})
    return table_caption({"cells": cells})


def draw_pictures() -> None:
    """Draw the README's picture anew."""
    made = document("best-accuracy")
    picture.draw(made, told_of(picture.drawn(made)), PICTURE)


def table(name: str) -> str:
    """Every row of a reproduction, and what its epsilons are true of."""
    first, *_ = tables_of(document(name), name, PAPERS[name].table)
    return f"{first.caption}\n\n{first.markdown().rstrip()}"


def crosswise(name: str) -> str:
    """Figures of a reproduction beside each other: its tables but for the first, which has a line for each run."""
    _, *further = tables_of(document(name), name, PAPERS[name].table)
    shown = [f"{one.title[0].upper()}{one.title[1:]}:\n\n{one.markdown().rstrip()}" for one in further]
    return "\n\n".join([further[0].caption, *shown])


def speed() -> str:
    """The table of speed: each engine beside its peer."""
    return glance.table(document("performance"))


def speed_of_peers() -> str:
    """The same of frameworks alone."""
    return glance.table(document("performance"), loop=False)


def part(name: str, table: Callable[[Any], str]) -> Callable[[], str]:
    """A table of docs/performance.md."""
    return lambda: shown(document("performance").get(name), table)


def other_frameworks() -> str:
    """What the same work takes in other frameworks, in the documents that have them."""
    measured = document("performance")
    made = measured.get("inprocess")
    pfl = {} if is_missing(made) else {"pfl": made["pfl"]}
    others = measured.get("peers")
    return shown(others, lambda found: peers.table(found | pfl))


def ray_before_and_after() -> str:
    """What became of a message on Ray."""
    return shown(document("performance").get("ray"), lambda now: ray.before_and_after(document("ray-before"), now))


def measured_on() -> str:
    """The machine of the benchmarks."""
    told = document("performance")["machine"]
    packages = ", ".join(f"{name} {told[name]}" for name in ("flwr", "ray", "torch", "numpy", "numba") if name in told)
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
    "README.md": {"results": summary, "speed": speed_of_peers},
    "docs/performance.md": {
        "machine": measured_on,
        "speed": speed,
        "engines": part("engines", engines.table),
        "profile": part("profile", profile.table),
        "profile-before": lambda: profile.table(document("profile-before")),
        "bare": part("bare", bare.table),
        "workers": part("workers", workers.table),
        "ray": part("ray", ray.table),
        "ray-before": ray_before_and_after,
        "inprocess": part("inprocess", in_process.table),
        "large": part("large", large.table),
        "scale": part("scale", scale.table),
        "fleet": part("fleet", fleet.table),
        "device": part("device", device.table),
        "noise": part("noise", noise.table),
        "streams": part("streams", streams.table),
        "stragglers": part("stragglers", stragglers.table),
        "footprint": lambda: footprint.table(document("footprint")),
        "masks": part("masks", masks.table),
        "peers": other_frameworks,
    },
    "docs/forecast.md": {"measured": lambda: forecast.table(document("forecast"))},
    "docs/keys.md": {"keys": key_table},
    "docs/result.md": {"result": result_table},
    "docs/mechanisms.md": {"mechanisms": lambda: mechanisms.table(document("mechanisms"))},
    "docs/swap-in.md": {"machines-needed": forecast.needed},
    "docs/results.md": {
        **{name: lambda name=name: table(name) for name in PAPERS if (DOCUMENTS / f"{name}.json").exists()},
        "best-accuracy": lambda: crosswise("best-accuracy"),
        "secure-aggregation": lambda: crosswise("secure-aggregation"),
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
