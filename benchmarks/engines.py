"""Updates a second and peak memory of every engine: the same app, 100 clients, 50 a round, d = 7,850, b = 1.

Run with ``python -m benchmarks.engines``; all engines in one run, taking turns, each in a process of its own, medians
over repeats. The task is synthetic, with the sizes of softmax regression on MNIST: same model, same messages, nothing
to download. The cohort engine also runs the papers' whole 1,200 rounds, ours and noisy SGD in turn; the arithmetic
alone stands beside it in :mod:`benchmarks.bare`, which tells a slow computer from slow code.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from murmurfl.app.engines.start import ENGINES, run_cohort, run_in_process, run_on_ray
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig

from .peers.memory import PeakMemory

NODES, PER_ROUND = 100, 50
# Rounds of a measurement: seconds on each engine.
ROUNDS = {"ray": 60, "inprocess": 120, "cohort": 600}
WHOLE_PASS = 1_200

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def configuration(rounds: int, strategy: str = "mu2") -> RunConfig:
    """Return the app's configuration: every client has as many samples as it is asked for."""
    return RunConfig(
        task="synthetic",
        strategy=strategy,
        synthetic_samples=max(rounds * PER_ROUND, 6_000),
        num_clients=NODES,
        clients_per_round=PER_ROUND,
        batch_size=1,
        num_rounds=rounds,
        sampling="balanced",
        evaluate_every=rounds,
        noise_quality="fast",
        checkpoint=False,
    )


def measure_here(engine: str, rounds: int, strategy: str) -> dict[str, float]:
    """One measurement in this process: data are made before the clock starts."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = configuration(rounds, strategy)
    if engine == "ray":
        document = run_on_ray(config)
        updates, seconds, cpu_seconds = document["aggregated"], document["seconds"], math.nan  # other processes' work
    else:
        prepare(config)
        used = time.process_time()
        result = (run_cohort if engine == "cohort" else run_in_process)(config)
        cpu_seconds = time.process_time() - used
        updates, seconds = sum(report.aggregated for report in result.strategy.history), result.seconds
    parameters = prepare(config).model.num_parameters
    rates = {"rate": updates / seconds, "cpu_rate": updates / cpu_seconds}
    return {"updates": updates, "seconds": seconds, **rates, "parameters": parameters}


def measure_apart(engine: str, rounds: int, strategy: str = "mu2") -> dict[str, float]:
    """One measurement in a process of its own, with its peak memory and that of all it starts."""
    command = [sys.executable, "-m", "benchmarks.engines", "--one", engine, str(rounds), strategy]
    with PeakMemory() as memory:
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=1800,
            cwd=Path(__file__).resolve().parents[1], env={**os.environ, **_ONE_THREAD},
        ).stdout  # fmt: skip
    return {**json.loads(output.splitlines()[-1]), "peak_mib": memory.peak_mib}


def measure(repeats: int) -> dict[str, Any]:
    """Every engine, taking turns; then ours and noisy SGD, taking turns."""
    runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    passes: dict[str, list[dict[str, float]]] = {"mu2": [], "noisy-sgd": []}
    for _ in range(repeats):
        for engine, kept in runs.items():
            kept.append(measure_apart(engine, ROUNDS[engine]))
        for strategy, kept in passes.items():
            kept.append(measure_apart("cohort", WHOLE_PASS, strategy))
    ours = passes["mu2"]
    to_sgd = [one["seconds"] / other["seconds"] for one, other in zip(ours, passes["noisy-sgd"], strict=True)]
    engines = {
        engine: {
            "rounds": ROUNDS[engine],
            "updates_per_second": statistics.median(run["rate"] for run in kept),
            "range": [min(run["rate"] for run in kept), max(run["rate"] for run in kept)],
            "peak_mib": statistics.median(run["peak_mib"] for run in kept),
        }
        for engine, kept in runs.items()
    }
    return {
        "nodes": NODES,
        "per_round": PER_ROUND,
        "parameters": runs["cohort"][0]["parameters"],
        "repeats": repeats,
        "engines": engines,
        "inprocess / ray": engines["inprocess"]["updates_per_second"] / engines["ray"]["updates_per_second"],
        "cohort / inprocess": engines["cohort"]["updates_per_second"] / engines["inprocess"]["updates_per_second"],
        "whole pass": {
            "rounds": WHOLE_PASS,
            **{
                name: {
                    "updates_per_second": statistics.median(run["rate"] for run in kept),
                    "range": [min(run["rate"] for run in kept), max(run["rate"] for run in kept)],
                }
                for name, kept in passes.items()
            },
            "mu2 / noisy-sgd, seconds": statistics.median(to_sgd),
        },
    }


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    lines = ["| engine | updates/s | peak memory MiB |", "|---|---|---|"]
    lines += [
        f"| {engine} | {entry['updates_per_second']:,.0f} ({entry['range'][0]:,.0f} to {entry['range'][1]:,.0f}) "
        f"| {entry['peak_mib']:,.0f} |"
        for engine, entry in sorted(document["engines"].items(), key=lambda item: item[1]["updates_per_second"])
    ]
    whole = document["whole pass"]
    return "\n".join(
        [
            *lines,
            "",
            f"{document['nodes']} clients, {document['per_round']} a round, d = {document['parameters']:,.0f}, "
            f"medians of {document['repeats']}. In-process / Ray: {document['inprocess / ray']:.1f}; "
            f"cohort / in-process: {document['cohort / inprocess']:.1f}. "
            f"On the cohort engine the papers' {whole['rounds']:,} rounds run at "
            f"{whole['mu2']['updates_per_second']:,.0f} updates/s with DP-μ²-FL and "
            f"{whole['noisy-sgd']['updates_per_second']:,.0f} with noisy SGD: ours takes "
            f"{whole['mu2 / noisy-sgd, seconds']:.2f} times as long (the paper's: 1.44).",
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "ROUNDS", "STRATEGY"), default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.one:
        engine, rounds, strategy = arguments.one
        print(json.dumps(measure_here(engine, int(rounds), strategy)))
        return
    document = measure(arguments.repeats)
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
