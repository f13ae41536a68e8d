"""Time and peak memory of the cohort engine against the number of machines M and of parameters d.

Run with ``python -m benchmarks.scale``; every row is a process of its own, so that its peak is its own. The data are
synthetic and their size is shown beside the peak. Every machine takes part at least twice, so that all of them exist.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PARTICIPATIONS = 2
LEAST_ROUNDS = 20
ROWS = [
    # machines, per round, features: d = 10 x (features + 1)
    (100, 100, 784),
    (1_000, 100, 784),
    (10_000, 100, 784),
    (100_000, 1_000, 784),
    (1_000, 100, 78),
    (1_000, 100, 7_840),
    (1_000, 100, 31_360),
]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Parameters
    ----------
    machines, per_round, parameters, rounds : int
        M, m, d and T.
    row_cache_mib : float
        The limit for kept noise rows.
    updates_per_second, seconds : float
        Of the rounds.
    data_mib : float
        The training data.
    peak_mib : float
        Largest resident memory of the process, imports and data included.
    import_mib : float
        Resident memory after the imports, before anything is made.
    """

    machines: int
    per_round: int
    parameters: int
    rounds: int
    row_cache_mib: float
    updates_per_second: float
    seconds: float
    data_mib: float
    peak_mib: float
    import_mib: float


def _peak_mib() -> float:
    # Not ru_maxrss: a process starts with that of the one it was forked from.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def run_row(machines: int, per_round: int, features: int, row_cache_mib: float) -> Row:
    """Measure one row in this process."""
    import logging

    from murmurfl.app.config import RunConfig
    from murmurfl.app.engines.start import run_cohort
    from threadpoolctl import threadpool_limits

    logging.getLogger("flwr").setLevel(logging.ERROR)
    threadpool_limits(1)
    imports = _peak_mib()
    rounds = max(PARTICIPATIONS * machines // per_round, LEAST_ROUNDS)
    samples = rounds * per_round // machines
    config = RunConfig(
        task="synthetic",
        synthetic_samples=samples * machines,
        synthetic_features=features,
        num_clients=machines,
        clients_per_round=per_round,
        batch_size=1,
        num_rounds=rounds,
        evaluate_every=rounds,
        sampling="balanced",
        noise_quality="fast",
        checkpoint=False,
    )
    result = run_cohort(config, row_cache_mib=row_cache_mib)
    updates = sum(report.aggregated for report in result.strategy.history)
    data = result.experiment.task.train_features.nbytes / 2**20
    parameters = result.experiment.model.num_parameters
    return Row(
        machines, per_round, parameters, rounds, row_cache_mib, updates / result.seconds, result.seconds, data,
        _peak_mib(), imports,
    )  # fmt: skip


def measure(repeats: int, row_cache_mib: float) -> list[dict[str, float]]:
    """Every row, each repeat in a process of its own; medians."""
    rows = []
    for machines, per_round, features in ROWS:
        runs = []
        for _ in range(repeats):
            command = [sys.executable, "-m", "benchmarks.scale", "--row"]
            command += [str(machines), str(per_round), str(features), str(row_cache_mib)]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800,
            ).stdout  # fmt: skip
            runs.append(json.loads(output.splitlines()[-1]))
        rows.append({name: statistics.median(run[name] for run in runs) for name in runs[0]})
    return rows


def table(rows: list[dict[str, float]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| M | m | d | rounds | updates/s | peak memory MiB | of that imports MiB | data MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['machines']:,.0f} | {row['per_round']:,.0f} | {row['parameters']:,.0f} | "
        f"{row['rounds']:,.0f} | {row['updates_per_second']:,.0f} | {row['peak_mib']:,.0f} | "
        f"{row['import_mib']:,.0f} | {row['data_mib']:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=4, default=None, help="machines, per round, features, MiB of kept noise")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--row-cache-mib", type=float, default=256.0)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.row:
        machines, per_round, features, cache = arguments.row
        print(json.dumps(asdict(run_row(int(machines), int(per_round), int(features), float(cache)))))
        return
    rows = measure(arguments.repeats, arguments.row_cache_mib)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
