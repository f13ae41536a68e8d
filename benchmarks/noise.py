"""Keyed noise against NumPy's own normals: time of a row, medians over repeats, in one run.

Run with ``python -m benchmarks.noise``; prints a table and writes JSON with ``--json PATH``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from murmurfl.privacy import row_key, standard_normals

SIZES = (7_850, 100_000, 1_000_000)


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that a slow moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    for size in SIZES:
        generator = np.random.Generator(np.random.PCG64(1))
        philox = np.random.Generator(np.random.Philox(1))
        calls: dict[str, Callable[[], object]] = {
            "fast": lambda size=size: standard_normals(row_key(bytes(32), bytes(16)), size, "fast"),
            "exact": lambda size=size: standard_normals(row_key(bytes(32), bytes(16)), size, "exact"),
            "PCG64 float64": lambda size=size, g=generator: g.standard_normal(size),
            "PCG64 float32": lambda size=size, g=generator: g.standard_normal(size, dtype=np.float32),
            "Philox float64": lambda size=size, g=philox: g.standard_normal(size),
        }
        measured = medians(calls, 500 if size < 50_000 else 30)
        rows.append({"size": size, "seconds": measured, "fast / PCG64": measured["fast"] / measured["PCG64 float64"]})
    print(f"{'values':>9}  " + "  ".join(f"{name:>15}" for name in rows[0]["seconds"]) + "  fast / PCG64 float64")
    for row in rows:
        times = "  ".join(f"{1e6 * seconds:>12.1f} us" for seconds in row["seconds"].values())
        print(f"{row['size']:>9}  {times}  {row['fast / PCG64']:>12.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"noise": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
