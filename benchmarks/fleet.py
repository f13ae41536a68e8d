"""One server and thousands of clients, some down and some late: its memory, its time for a round, and nothing lost.

Run with ``python -m benchmarks.fleet``. The clients are real ones (:mod:`.fleet_clients`): operators' values,
samples, ClientApps and ledgers on disk, in a process beside the server's. The server is the strategy of a run on real
nodes, with its checkpoint; between the two are the bytes of Flower's messages and a network whose clock jumps
(:mod:`.fleet_grid`). In the end every ledger is compared with what the server acknowledged, and the server's sum with
what clients say they sent. Flower's own processes are not in it: the test of forty real nodes has them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS = [
    # clients, asked a round, features (d = 10 x (features + 1)), rounds
    (500, 50, 784, 8),
    (5_000, 500, 784, 8),
]
ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 8
QUORUM = 0.7  # nine tenths are there, and four fifths of these answer in time
TIMEOUT_S = 600.0
COUNTED = ("aggregated", "lost", "late", "malformed")


def _memory_mib(which: str = "VmRSS") -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return int(line.split()[1]) / 1024


def run_row(clients: int, asked: int, features: int, rounds: int) -> dict[str, Any]:
    """Measure one row; this process is the server's.

    Raises
    ------
    RuntimeError
        If something was lost.
    """
    memory = {"imports": _imported()}
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.settings.run_config import RunConfig

    config = RunConfig(
        task="synthetic",
        synthetic_samples=clients,
        synthetic_features=features,
        num_clients=clients,
        clients_per_round=asked,
        batch_size=1,
        num_rounds=rounds,
        mu=2.0,
    )
    experiment = prepare(config)
    memory["prepared"] = _memory_mib()
    policy = experiment.policy(0)
    with tempfile.TemporaryDirectory(dir=_fast_disk()) as folder:
        from .fleet_clients import Told

        told = Told(clients, features, SAMPLES, policy.clip_norm, config.mu)
        began = time.perf_counter()
        pipe, process = _start(folder, told)
        made_s = time.perf_counter() - began
        try:
            found = _train(pipe, experiment, Path(folder), memory)
        finally:
            pipe.close()
            process.join(10)
            process.kill()
    return {"clients": clients, "asked": asked, "rounds": rounds, "clients_s": made_s, **found}


def _imported() -> float:
    """Memory after the server's imports."""
    import logging

    import murmurfl.app.server_app  # noqa: F401

    logging.getLogger("flwr").setLevel(logging.ERROR)
    return _memory_mib()


def _fast_disk() -> str | None:
    """Where ledgers lie: in memory where that is a file system, for the disk is not what is measured."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _start(folder: str, told: Any) -> tuple[Any, Any]:
    from .fleet_clients import serve

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, folder, told), daemon=True)
    process.start()
    there.close()
    if here.recv() != "made":
        raise RuntimeError("Expected the clients to be made.")
    return here, process


def _train(pipe: Any, experiment: Any, folder: Path, memory: dict[str, float]) -> dict[str, Any]:
    from murmurfl.strategies import Callback

    from .fleet_grid import FleetGrid, Weather

    config = experiment.config
    grid = FleetGrid(pipe, config.num_clients, Weather())
    rounds: list[dict[str, float]] = []

    class Usage(Callback):
        def after_round(self, *_: Any) -> None:
            rounds.append({"cpu": time.process_time(), "virtual": grid.clock.now(), "memory": _memory_mib()})

    options = {"checkpoint": folder / "checkpoint.npz", "callbacks": [Usage()], "quorum": QUORUM}
    strategy = experiment.strategy(deployed=True, **options)
    strategy.requests.clock, strategy.clients.sleep = grid.clock, grid.clock.sleep
    began, started = time.process_time(), time.perf_counter()
    strategy.start(grid, experiment.initial_arrays(), num_rounds=experiment.num_rounds, timeout=TIMEOUT_S)
    wall = time.perf_counter() - started
    gc.collect()
    memory |= {"first": rounds[0]["memory"], "end": _memory_mib(), "peak": _memory_mib("VmHWM")}
    total = strategy.state.release_sum
    pipe.send(("compare", (strategy.session, dict(strategy.acks), total.tobytes())))
    compared = pipe.recv()
    if compared["agreeing"] != compared["clients"] or not compared["sums_equal"]:
        raise RuntimeError(f"Expected every ledger to agree with the server, got {compared}.")
    steady = [later["cpu"] - sooner["cpu"] for sooner, later in itertools.pairwise(rounds)]
    history = strategy.history
    counted = {name: sum(getattr(report, name) for report in history) for name in COUNTED}
    return {
        "parameters": experiment.model.num_parameters,
        "memory_mib": memory,
        "first_s": rounds[0]["cpu"] - began,
        "round_s": statistics.median(steady),
        "wall_s": wall,
        "virtual_round_s": (rounds[-1]["virtual"] - rounds[0]["virtual"]) / len(steady),
        "late_answers": grid.late_answers,
        "requests": grid.requests,
        **counted,
        "refused": sum(report.refusals for report in history),
        "sent_mb": grid.bytes_sent / 1e6,
        "received_mb": grid.bytes_received / 1e6,
        "compared": compared,
    }


def measure() -> list[dict[str, Any]]:
    """Every row, each in processes of its own."""
    rows = []
    for row in ROWS:
        command = [sys.executable, "-m", "benchmarks.fleet", "--row", *map(str, row)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1800, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"A row was not measured: {ended.stderr[-2000:]}")
        rows.append(json.loads(ended.stdout.splitlines()[-1]))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, and what became of every release."""
    lines = [
        "| M | m | d | server's CPU a round, s | CPU before the first round, s | server's peak memory MiB | "
        "of that imports and data MiB | both ways a round, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = row["memory_mib"]
        lines.append(
            f"| {row['clients']:,} | {row['asked']:,} | {row['parameters']:,} | {row['round_s']:.2f} | "
            f"{row['first_s'] - row['round_s']:.1f} | {memory['peak']:,.0f} | {memory['prepared']:,.0f} | "
            f"{(row['sent_mb'] + row['received_mb']) / row['rounds']:,.1f} |"
        )
    return "\n".join([*lines, "", _told(rows[-1])])


def _told(row: Mapping[str, Any]) -> str:
    """Return what became of the releases of a row."""
    compared = row["compared"]
    unheard = row["requests"] - compared["released"] - row["refused"]
    return (
        f"In the last row {row['late_answers']:,} of {row['requests']:,} requests are answered late. Clients made "
        f"{compared['released']:,} releases: {row['aggregated']:,} are in the model, {row['late']:,} came too late, "
        f"{compared['carried']:,} are not there yet, and what is in these the same clients send with their next. "
        f"{unheard:,} requests wait for clients that are down, {row['refused']} were refused. "
        f"**{compared['agreeing']:,} of {compared['clients']:,} ledgers agree with what the server acknowledged, "
        "and the server's sum is that of the clients' own releases, to the last bit.** By the network's clock a round "
        f"took {row['virtual_round_s']:.0f} s."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--row", nargs=4, type=int, help="clients, asked a round, features, rounds")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(run_row(*arguments.row)))
        return
    rows = measure()
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
