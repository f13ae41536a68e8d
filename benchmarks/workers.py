"""Updates a second of the cohort engine in one process and over several workers, and what the driver itself costs.

Run with ``python -m benchmarks.workers``. One run after the other, taking turns, on one pool that is started once: its
start is no part of a round, and neither is the first round, in which clients are made. Beside wall-clock time stands
the processor time of each process, which other work on the computer does not change: the driver's share of a round is
what keeps N workers from being N times as fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CLIENTS, FEATURES, ROUNDS = 1_000, 784, 41  # so many that loops are compiled


def _config(rounds: int) -> Any:
    from murmurfl.app.settings.run_config import RunConfig

    return RunConfig(
        task="synthetic",
        synthetic_samples=rounds * CLIENTS,
        synthetic_features=FEATURES,
        num_clients=CLIENTS,
        clients_per_round=CLIENTS,
        batch_size=1,
        num_rounds=rounds,
        evaluate_every=rounds,
        sampling="balanced",
        noise_quality="fast",
        checkpoint=False,
    )


def processor_seconds(state: dict[str, Any], worker: int) -> float:  # noqa: ARG001 - as a worker's function gets them
    """Of a worker's process, since it began."""
    return time.process_time()


def _rounds(clients: Any, config: Any, after_first: Callable[[], None] = list) -> tuple[list[float], list[float], Any]:
    """Return the wall-clock and processor seconds of each round but the first, and the result."""
    from murmurfl.app.runs.training_run import run_experiment

    ended: list[tuple[float, float]] = []

    def note(_: object) -> None:
        if not ended:
            after_first()
        ended.append((time.perf_counter(), time.process_time()))

    result = run_experiment(clients, config, on_progress=note)
    wall, own = ([later[i] - earlier[i] for earlier, later in itertools.pairwise(ended)] for i in (0, 1))
    return wall, own, result


def _extend(seconds: list[float], pool: Any) -> None:
    seconds.extend(pool.on_all(processor_seconds))


def measure(workers: int = 2, rounds: int = ROUNDS, repeats: int = 3) -> dict[str, Any]:
    """Return rounds in one process and over workers, in turns; medians of the rounds of all repeats."""
    import logging

    from murmurfl.app.engines.cohort import CohortClients
    from murmurfl.app.engines.pool import computing_alone, opened_pool
    from murmurfl.app.engines.workers import WorkerClients
    from murmurfl.app.runs.experiment import prepare

    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = _config(rounds)
    experiment = prepare(config)
    alone: dict[str, list[float]] = {"wall": [], "own": []}
    spread: dict[str, list[float]] = {"wall": [], "own": [], "busiest": []}
    same = True
    began = time.perf_counter()
    with computing_alone(), opened_pool(workers, most=CLIENTS, of="clients", say=lambda _: None) as pool:
        started = time.perf_counter() - began
        for _ in range(repeats):
            wall, own, one = _rounds(CohortClients(experiment), config)
            alone["wall"] += wall
            alone["own"] += own
            before: list[float] = []
            wall, own, other = _rounds(WorkerClients(experiment, pool), config, partial(_extend, before, pool))
            spent = [b - a for a, b in zip(before, pool.on_all(processor_seconds), strict=True)]
            spread["wall"] += wall
            spread["own"] += own
            spread["busiest"].append(max(spent) / (rounds - 1))
            pairs = zip(one.parameters, other.parameters, strict=True)
            same = same and all(a.tobytes() == b.tobytes() for a, b in pairs)
    one_round, its_own = statistics.median(alone["wall"]), statistics.median(spread["wall"])
    return {
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "clients": CLIENTS,
        "parameters": experiment.model.num_parameters,
        "rounds": rounds - 1,
        "repeats": repeats,
        "same_model": same,
        "start_seconds": started,
        "updates_per_second": {"1": CLIENTS / one_round, str(workers): CLIENTS / its_own},
        "speedup": one_round / its_own,
        "least": {"1": min(alone["wall"]), str(workers): min(spread["wall"])},
        "processor_seconds_a_round": {
            "1": statistics.median(alone["own"]),
            "driver": statistics.median(spread["own"]),
            "busiest_worker": statistics.median(spread["busiest"]),
        },
        "driver_share": statistics.median(spread["own"]) / its_own,
    }


def table(document: dict[str, Any]) -> str:
    """Return the measurements as a Markdown table."""
    workers, spent = document["workers"], document["processor_seconds_a_round"]
    rates = document["updates_per_second"]
    lines = [
        "| workers | updates/s | of one worker | processor ms a round: driver | busiest worker |",
        "|---|---|---|---|---|",
        f"| 1 | {rates['1']:,.0f} | 1.00 | {1000 * spent['1']:.1f} | |",
        f"| {workers} | {rates[str(workers)]:,.0f} | {document['speedup']:.2f} | {1000 * spent['driver']:.1f} | "
        f"{1000 * spent['busiest_worker']:.1f} |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    document = measure(arguments.workers, arguments.rounds, arguments.repeats)
    print(table(document))
    print(json.dumps(document, indent=2), file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
