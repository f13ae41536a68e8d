"""The in-process grid beside pfl, in one run and taking turns: updates a second at equal work.

Run with ``python -m benchmarks.peers.in_process``. The work is that of :mod:`.run`: softmax regression on the synthetic
task, d = 7,850, 100 clients, 50 a round, one clipped gradient of one sample each, with noise of its own. pfl and noisy
SGD on the in-process grid do it in processes of their own, one after the other, and each turn gives a ratio: whatever
else the computer does meanwhile slows both down. DP-μ²-FL, with two gradients a client and round and last noise taken
back out, takes part in every turn as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ..engines import measure_apart
from .run import (
    CLIENTS,
    PER_ROUND,
    make_work,
    measure_once,
    nothing_measured,
    pfl_python,
    train_with_pfl,
    write_data,
)

REPEATS = 5
ROUNDS = 120
"""Of every training: one pass over the samples."""

PFL, EQUAL, TWICE = "pfl", "noisy-sgd", "mu2"


def measure(repeats: int = REPEATS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return updates a second of pfl and of both methods on the in-process grid, and the ratios of each turn."""
    work, pfl = make_work(rounds), nothing_measured()
    pfl_python()  # made before anything is measured
    ours: dict[str, list[dict[str, float]]] = {EQUAL: [], TWICE: []}
    cpu_rates: dict[str, list[float]] = {PFL: [], EQUAL: [], TWICE: []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder).resolve() / "data.npz"
        write_data(data, work)
        for turn in range(1, repeats + 1):
            result = measure_once(pfl, lambda turn=turn: train_with_pfl(work, data, turn))
            cpu_rates[PFL].append(result["client_updates"] / result["cpu_seconds"])
            for strategy, kept in ours.items():
                kept.append(measure_apart("inprocess", rounds, strategy))
                cpu_rates[strategy].append(kept[-1]["cpu_rate"])
    rates = {PFL: [1000 / seconds for seconds in pfl["seconds_per_1000"]]}
    rates |= {strategy: [run["rate"] for run in kept] for strategy, kept in ours.items()}
    return {
        "clients": CLIENTS,
        "per_round": PER_ROUND,
        "rounds": rounds,
        "repeats": repeats,
        "pfl": pfl,
        "peak_mib": {strategy: statistics.median(run["peak_mib"] for run in kept) for strategy, kept in ours.items()},
        "updates_per_second": {name: statistics.median(kept) for name, kept in rates.items()},
        "range": {name: [min(kept), max(kept)] for name, kept in rates.items()},
        "inprocess / pfl": _ratio(rates, EQUAL),
        "inprocess / pfl, two gradients": _ratio(rates, TWICE),
        "inprocess / pfl, by processor time": _ratio(cpu_rates, EQUAL),
        "inprocess / pfl, two gradients, by processor time": _ratio(cpu_rates, TWICE),
    }


def _ratio(rates: dict[str, list[float]], strategy: str) -> dict[str, Any]:
    """Return the ratios to pfl, turn by turn: their median and range."""
    ratios = [ours / theirs for ours, theirs in zip(rates[strategy], rates[PFL], strict=True)]
    return {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]}


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    names = {
        PFL: f"pfl {document['pfl']['version']}",
        EQUAL: "murmurfl, in-process grid, noisy SGD: equal work",
        TWICE: "murmurfl, in-process grid, DP-μ²-FL: two gradients, and last noise taken out",
    }
    peaks = {PFL: statistics.median(document["pfl"]["peak_mib"]), **document["peak_mib"]}
    times = {PFL: "1"}
    for name, key in ((EQUAL, "inprocess / pfl"), (TWICE, "inprocess / pfl, two gradients")):
        low, high = document[key]["range"]
        times[name] = f"{document[key]['median']:.2f} ({low:.2f} to {high:.2f})"
    lines = ["| | updates/s | times pfl's | peak memory MiB |", "|---|---|---|---|"]
    for name, label in names.items():
        rate, (low, high) = document["updates_per_second"][name], document["range"][name]
        lines.append(f"| {label} | {rate:,.0f} ({low:,.0f} to {high:,.0f}) | {times[name]} | {peaks[name]:,.0f} |")
    lines += [
        "",
        f"{document['clients']} clients, {document['per_round']} a round, {document['rounds']} rounds, one core each, "
        f"medians of {document['repeats']} turns; ratios are those of each turn. By processor time, "
        "which a busy computer changes less, they are "
        f"{document['inprocess / pfl, by processor time']['median']:.2f} and "
        f"{document['inprocess / pfl, two gradients, by processor time']['median']:.2f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    document = measure(arguments.repeats, arguments.rounds)
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
