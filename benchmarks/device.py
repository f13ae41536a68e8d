"""Updates a second of the cohort engine on a GPU beside the same engine on one core, in one run.

Run with ``python -m benchmarks.device``. DP-mu^2-FL with cancelling noise and softmax regression on synthetic data, at
d = 7,850 with 1,000 clients a round and at d = 1,000,000 with 20. Where there is no GPU the page says so, and what is
measured is PyTorch's CPU backend, which is the same path and tells nothing of a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import Any

CUDA, CPU_BACKEND, NUMPY = "cuda", "torch-cpu", ""
NOT_MEASURED = "not measured: no GPU was found"

CLASSES = 10
ROWS = [
    # clients, all of which are asked in every round; features: d = 10 x (features + 1); rounds on a core
    (1_000, 784, 4),
    (20, 99_999, 2),
]
ROUNDS_ON_GPU = 10
"""So many times the rounds: they would be over before the clock has moved."""


def rate(clients: int, features: int, rounds: int, device: str) -> float:
    """Return updates a second of one training in this process, on one core and, if there is one, a device."""
    import torch
    from murmurfl.app.engines.start import run_cohort
    from murmurfl.app.settings.run_config import RunConfig
    from threadpoolctl import threadpool_limits

    logging.getLogger("flwr").setLevel(logging.ERROR)
    rounds *= ROUNDS_ON_GPU if device == CUDA else 1
    config = RunConfig(
        task="synthetic",
        synthetic_samples=clients * rounds,
        synthetic_features=features,
        mechanism="cancelling",
        num_clients=clients,
        clients_per_round=clients,
        batch_size=1,
        num_rounds=rounds,
        evaluate_every=rounds,
        noise_quality="fast",
        checkpoint=False,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            result = run_cohort(config, device=device)
    finally:
        torch.set_num_threads(threads)
    return sum(report.aggregated for report in result.strategy.history) / result.seconds


def found_gpu() -> str:
    """Return the name of the first GPU; empty if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def measure(repeats: int = 3, rows: list[tuple[int, int, int]] | None = None) -> dict[str, Any]:
    """Medians of a few trainings on the device and on one core, taking turns."""
    gpu = found_gpu()
    device = CUDA if gpu else CPU_BACKEND
    measured = []
    for clients, features, rounds in rows or ROWS:
        rates: dict[str, list[float]] = {device: [], NUMPY: []}
        rate(clients, features, 1, device)  # what is compiled and allocated once
        for _ in range(repeats):
            for one, found in rates.items():
                found.append(rate(clients, features, rounds, one))
        measured.append(
            {
                "clients": clients,
                "parameters": CLASSES * (features + 1),
                "device": statistics.median(rates[device]),
                "one_core": statistics.median(rates[NUMPY]),
            }
        )
    return {"gpu": gpu, "backend": device, "rows": measured}


def table(document: dict[str, Any]) -> str:
    """Return what was measured as a Markdown table, or that no GPU was."""
    gpu = document["gpu"]
    head = f"| d | clients a round | {gpu or 'GPU'}, updates/s | cohort engine, one core | ratio |"
    lines = [head, "|---|---|---|---|---|"]
    lines += [
        f"| {row['parameters']:,} | {row['clients']:,} | {row['device']:,.0f} | {row['one_core']:,.0f} | "
        f"{row['device'] / row['one_core']:.1f} |"
        if gpu
        else f"| {row['parameters']:,} | {row['clients']:,} | {NOT_MEASURED} | {row['one_core']:,.0f} | |"
        for row in document["rows"]
    ]
    if not gpu:
        rates = ", ".join(f"{row['device']:,.0f} at d = {row['parameters']:,}" for row in document["rows"])
        lines += ["", f"PyTorch's CPU backend on one core, the same path without a GPU: {rates} updates/s."]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    document = measure(arguments.repeats)
    print(table(document))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
