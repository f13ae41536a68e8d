"""Time and memory of the cohort engine against the number of clients M and of parameters d.

Run with ``python -m benchmarks.scale``; every row is a process of its own, so that its memory is its own. The data are
synthetic and their size is shown beside the rest. In the rows up to 10,000 clients every client takes part at least
twice, so that all of them have a stream. Rows of a few rounds beside rows of many say what a client costs before and
after it was asked; from these parts :mod:`.estimate` works out what nobody here can run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import estimate

ROWS = [
    # clients, per round, features (d = 10 x (features + 1)), rounds, samples of a client
    (100, 100, 784, 20, 20),
    (1_000, 100, 784, 20, 2),
    (10_000, 100, 784, 200, 2),
    (1_000, 100, 78, 20, 2),
    (1_000, 100, 7_840, 20, 2),
    (1_000, 100, 31_360, 20, 2),
    (1_000_000, 1_000, 784, 20, 1),
]
ALIKE = [(100_000, 1_000, 78, 20, 2), (100_000, 1_000, 78, 120, 2), (1_000_000, 1_000, 78, 20, 2)]
"""Rows whose differences say what a client costs: kept noise has the same limit in all of them, and reaches it."""
_ALIKE_MIB = 16.0

Document = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One row of the table; memory is resident memory in MiB.

    Parameters
    ----------
    clients, per_round, parameters, rounds, samples : int
        M, m, d, T, and samples of a client.
    row_cache_mib : float
        The limit for kept noise rows.
    updates_per_second, seconds : float
        Of the rounds, everything in them.
    asked, acks_bytes : int
        Different clients that were asked, and what the server's half remembers of them.
    data_mib : float
        The training data.
    import_mib, prepared_mib, engine_mib, first_mib, last_mib, end_mib : float
        After the imports, after data and partition are there, after the engine, after the first and the last round,
        and after what clients state is written.
    peak_mib : float
        The most that it ever was.
    prepare_s, state_s, write_s : float
        Seconds before the first round, for what clients state in the end, and for the files.
    """

    clients: int
    per_round: int
    parameters: int
    rounds: int
    samples: int
    row_cache_mib: float
    updates_per_second: float
    seconds: float
    asked: int
    acks_bytes: int
    data_mib: float
    import_mib: float
    prepared_mib: float
    engine_mib: float
    first_mib: float
    last_mib: float
    end_mib: float
    peak_mib: float
    prepare_s: float
    state_s: float
    write_s: float


def _memory_mib(which: str = "VmRSS") -> float:
    # Not ru_maxrss: a process starts with that of the one it was forked from.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return int(line.split()[1]) / 1024


def run_row(clients: int, per_round: int, features: int, rounds: int, samples: int, row_cache_mib: float) -> Row:
    """Measure one row in this process."""
    import logging

    from murmurfl.app.engines.cohort import CohortClients
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.runs.result import write_record
    from murmurfl.app.runs.training_run import run_experiment
    from murmurfl.app.settings.run_config import RunConfig
    from threadpoolctl import threadpool_limits

    logging.getLogger("flwr").setLevel(logging.ERROR)
    threadpool_limits(1)
    config = RunConfig(
        task="synthetic",
        synthetic_samples=samples * clients,
        synthetic_features=features,
        num_clients=clients,
        clients_per_round=per_round,
        batch_size=1,
        num_rounds=rounds,
        evaluate_every=rounds,
        sampling="balanced",
        noise_quality="fast",
        checkpoint=False,
    )
    memory, clock = [_memory_mib()], [time.perf_counter()]

    def passed(*_: Any) -> None:
        gc.collect()
        memory.append(_memory_mib())
        clock.append(time.perf_counter())

    experiment = prepare(config)
    passed()
    experiment.check_rounds()
    engine = CohortClients(experiment, row_cache_mib=row_cache_mib)
    passed()
    of_rounds: dict[int, float] = {}

    def after(progress: Any) -> None:
        if progress.report.server_round in (1, rounds):
            of_rounds[progress.report.server_round] = _memory_mib()

    result = run_experiment(engine, config, on_progress=after, engine="cohort", experiment=experiment)
    passed()
    with tempfile.TemporaryDirectory() as folder:
        write_record(result, Path(folder))
    passed()
    imports, prepared, made, _, end = memory
    acks = result.strategy.acks
    updates = sum(report.aggregated for report in result.strategy.history)
    return Row(
        *(clients, per_round, experiment.model.num_parameters, rounds, samples, row_cache_mib),
        updates_per_second=updates / result.seconds,
        seconds=result.seconds,
        asked=len(acks),
        acks_bytes=sys.getsizeof(acks) + sum(map(sys.getsizeof, acks)),
        data_mib=experiment.data.train_features.nbytes / 2**20,
        import_mib=imports,
        prepared_mib=prepared,
        engine_mib=made,
        first_mib=of_rounds[1],
        last_mib=of_rounds[rounds],
        end_mib=end,
        peak_mib=_memory_mib("VmHWM"),
        prepare_s=clock[2] - clock[0],
        state_s=clock[3] - clock[2] - result.seconds,
        write_s=clock[4] - clock[3],
    )


def measure(repeats: int, row_cache_mib: float) -> list[dict[str, float]]:
    """Every row, each repeat in a process of its own; medians."""
    rows = []
    for row, cache, kept in [*((row, row_cache_mib, 0) for row in ROWS), *((row, _ALIKE_MIB, 1) for row in ALIKE)]:
        runs = []
        for _ in range(repeats):
            command = [sys.executable, "-m", "benchmarks.scale", "--row", *map(str, row), str(cache)]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800,
            ).stdout  # fmt: skip
            runs.append(json.loads(output.splitlines()[-1]))
        rows.append({name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"kept": kept})
    return rows


def table(rows: Document) -> str:
    """Return the rows as a Markdown table, what a client costs, and the estimate that is made from it."""
    lines = [
        "| M | m | d | rounds | updates/s | peak memory MiB | of that imports MiB | data MiB | all else MiB | "
        "before the first round, s | afterwards, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['clients']:,.0f} | {row['per_round']:,.0f} | {row['parameters']:,.0f} | "
        f"{row['rounds']:,.0f} | {row['updates_per_second']:,.0f} | {row['peak_mib']:,.0f} | "
        f"{row['import_mib']:,.0f} | {row['data_mib']:,.0f} | "
        f"{row['peak_mib'] - row['import_mib'] - row['data_mib']:,.0f} | "
        f"{row['prepare_s']:,.1f} | {row['state_s'] + row['write_s']:,.1f} |"
        for row in rows
    ]
    said = estimate.paragraphs(rows)
    return "\n".join([*lines, *(["", said] if said else [])])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--row", nargs=6, default=None, help="clients, per round, features, rounds, samples, MiB of kept noise"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--row-cache-mib", type=float, default=256.0)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.row:
        *numbers, cache = arguments.row
        print(json.dumps(asdict(run_row(*map(int, numbers), row_cache_mib=float(cache)))))  # type: ignore[misc]
        return
    rows = measure(arguments.repeats, arguments.row_cache_mib)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
