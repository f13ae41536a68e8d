"""Where the time of the in-process engine goes: shares of its own time by what the code is for.

Run with ``python -m benchmarks.profile``; the app of :mod:`benchmarks.engines` under cProfile, which slows calls down
more than arithmetic: shares, not seconds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
from collections import defaultdict
from pathlib import Path

from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.runs.experiment import prepare

from .engines import configuration

# The first that fits: part of a file's path or of a function's name, and what it is for.
KINDS = [
    ("privacy/noise", "noise"),
    ("cryptography", "noise"),
    ("_hashlib", "noise"),
    ("ciphers", "noise"),
    ("app/models", "gradients"),
    ("per_sample_gradients", "gradients"),
    ("release/clipping", "clipping and grid"),
    ("engines/native", "compiled loops: normals, clipping and grid"),
    ("astype", "clipping and grid"),
    ("flwr/app/message", "Flower's messages and records"),
    ("reply_records", "Flower's messages and records"),
    ("rounds/replies", "Flower's messages and records"),
    ("engines/inprocess", "Flower's messages and records"),
    ("flwr", "Flower's messages and records"),
    ("_format_impl", "NumPy's file format"),
    ("numpy/lib", "NumPy's file format"),
    ("privacy/protocol", "NumPy's file format"),
    ("BytesIO", "NumPy's file format"),
    ("ledger", "ledger and release rule"),
    ("release/policy", "policy and construction of clients"),
    ("privacy/release", "ledger and release rule"),
    ("runs/experiment", "policy and construction of clients"),
    ("settings/run_config", "policy and construction of clients"),
    ("clients/", "clients"),
    ("strategies/", "strategy"),
]


def shares(engine: str, rounds: int) -> dict[str, float]:
    """Share of the run's own time by kind, largest first."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = configuration(rounds)
    prepare(config)
    profile = cProfile.Profile()
    profile.enable()
    (run_cohort if engine == "cohort" else run_in_process)(config)
    profile.disable()
    times: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = f"{file}:{function}"
        times[next((kind for part, kind in KINDS if part in place), "the rest of Python")] += own
    total = sum(times.values())
    return {kind: own / total for kind, own in sorted(times.items(), key=lambda item: -item[1])}


def table(document: dict[str, dict[str, float]]) -> str:
    """Return the shares as Markdown."""
    lines = ["| engine | where its time goes |", "|---|---|"]
    for engine, kinds in document.items():
        lines.append(
            f"| {engine} | " + ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in kinds.items()) + " |"
        )
    return "\n".join(lines)


def measure(rounds: int = 60) -> dict[str, dict[str, float]]:
    """Both engines of this process."""
    return {engine: shares(engine, rounds) for engine in ("inprocess", "cohort")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    document = measure()
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
