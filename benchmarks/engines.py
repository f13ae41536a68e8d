"""Client messages a second of Ray and of the in-process grid: the same app, 100 nodes, 50 a round, d = 7,850.

Run with ``python -m benchmarks.engines``; both engines in one run, medians over repeats. The task is synthetic, with
the sizes of softmax regression on MNIST: same model, same messages, nothing to download.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path

from murmurfl.app.config import RunConfig
from murmurfl.app.engines import run_in_process, run_on_ray

NODES, PER_ROUND, ROUNDS = 100, 50, 60


# 100 machines of 60 samples each; every round asks 50 of them for one.
CONFIGURATION = RunConfig(
    task="synthetic",
    num_clients=NODES,
    clients_per_round=PER_ROUND,
    batch_size=1,
    num_rounds=ROUNDS,
    sampling="balanced",
    evaluate_every=ROUNDS,
    noise_quality="fast",
    checkpoint=False,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rates: dict[str, list[float]] = {"ray": [], "inprocess": []}
    parameters = 0
    for _ in range(arguments.repeats):
        document = run_on_ray(CONFIGURATION)
        rates["ray"].append(document["aggregated"] / document["seconds"])
        result = run_in_process(CONFIGURATION)
        rates["inprocess"].append(sum(r.aggregated for r in result.strategy.history) / result.seconds)
        parameters = result.experiment.model.num_parameters
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["inprocess"] / medians["ray"]
    print(f"{NODES} nodes, {PER_ROUND} a round, {ROUNDS} rounds, d = {parameters}, medians of {arguments.repeats}")
    for name, rate in medians.items():
        print(f"{name:>10}  {rate:8.0f} client messages a second")
    print(f"in-process / Ray  {ratio:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"messages_per_second": rates, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
