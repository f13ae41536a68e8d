"""The arithmetic of DP-mu^2-FL and nothing else, in torch on one thread, and the cohort engine beside it.

Run with ``python -m benchmarks.bare``. The bare loop computes the gradients of a round at once, clips them, draws a
block of torch's normals, takes the last ones out of kept rows and steps, all in float32: no keys, no grid, no ledger,
no release rule, no refusals, nothing that could be regenerated, audited or lost. It releases nothing and protects
nobody. Updates a second alone say as much about the computer as about the code; a ratio to this loop does not.

Three sizes. At d = 7,850 the sum of a round's gradients is one product of matrices. At d = 100,000 and 1,000,000
gradients are dense: softmax regression of which every client's gradient is written out as a row of d values, which is
then measured, scaled and added up; the cohort engine is given a model that writes the same rows (:func:`written_out`).
Each turn is a process of its own for each candidate. The rounds alone are what a training longer than this one costs;
the whole process has everything in it that a user waits for: imports, data, and compiled loops, which are read from a
cache, or compiled where it is empty ("first run").
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from murmurfl.app.models.linear import SoftmaxRegression
from murmurfl.app.models.model import Batch, Parameters
from murmurfl.privacy.release.clipping import DenseContributions
from numpy.typing import NDArray

from .peers.memory import PeakMemory

CLASSES = 10
CLIP_NORM, NOISE_STD, LEARNING_RATE = 1.0, 10.0, 1e-3
LOOP, COHORT, NUMPY = "bare", "cohort", "cohort without compiled loops"
FIRST, DECAY = "cohort, first run", "cohort, decay"
"""What is measured at each size; the first is what the others are held against."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Size:
    """What is computed at one size.

    Parameters
    ----------
    features : int
        d = 10 x (features + 1).
    clients, per_round, rounds : int
        M, m and T; one fresh sample a client and round.
    dense : bool
        Whether each client's gradient is written out as a row of d values.
    target : float
        The most that the cohort engine's rounds are to take, in times of the bare loop.
    task : str
        The cohort engine's data where gradients are dense.
    """

    features: int
    clients: int
    per_round: int
    rounds: int
    dense: bool
    target: float
    task: str = "synthetic"


SIZES = (
    Size(784, 100, 50, 1_200, False, 0.9),
    Size(9_999, 40, 20, 100, True, 0.8, "benchmarks.large:hundred_thousand"),
    Size(99_999, 20, 20, 15, True, 0.8, "benchmarks.large:million"),
)


class WrittenOut(SoftmaxRegression):
    """Softmax regression whose gradients are rows of d values in float32, as of any model that has no closed form."""

    def stacked(  # type: ignore[override]
        self, points: Sequence[Parameters], weights: Sequence[float | NDArray[np.float64]], samples: Batch
    ) -> DenseContributions:
        """Weighted sums of a sample's gradients at several points, each written out once."""
        outer = super().stacked(points, weights, samples)
        residuals, split = outer.residuals.astype(np.float32), self.num_classes * self.num_features
        rows = np.empty((len(residuals), self.num_parameters), np.float32)
        by_class = rows[:, :split].reshape(len(rows), self.num_classes, self.num_features)
        np.multiply(residuals[:, :, None], np.asarray(samples[0], np.float32)[:, None, :], out=by_class)
        rows[:, split:] = residuals
        return DenseContributions(rows)


def written_out(num_features: int, num_classes: int) -> WrittenOut:
    """Return the model of the cohort engine where gradients are dense."""
    return WrittenOut(num_features, num_classes)


def bare(size: Size) -> dict[str, float]:
    """Return the loop, in this process."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    count, split = size.rounds * size.per_round, CLASSES * size.features
    d = split + CLASSES
    features = torch.randn(count, size.features, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    order = torch.randperm(count, generator=generator)  # as scattered in memory as those of sampled clients are
    last = torch.zeros(size.clients, d)
    model, query, last_query, gradient = (torch.zeros(d) for _ in range(4))

    def residuals(point: Any, batch: Any, truth: Any) -> Any:
        made = torch.softmax(batch @ point[:split].view(CLASSES, -1).T + point[split:], 1)
        made[torch.arange(len(truth)), truth] -= 1
        return made

    started, processor = time.perf_counter(), time.process_time()
    for t in range(1, size.rounds + 1):
        asked = torch.randperm(size.clients, generator=generator)[: size.per_round]
        chosen = order[(t - 1) * size.per_round : t * size.per_round]
        batch, truth = features[chosen], labels[chosen]
        made = t * residuals(query, batch, truth) - (t - 1) * residuals(last_query, batch, truth)
        if size.dense:
            rows = torch.empty(size.per_round, d)
            by_class = rows[:, :split].view(size.per_round, CLASSES, -1)
            torch.mul(made[:, :, None], batch[:, None, :], out=by_class)
            rows[:, split:] = made
            rows *= (CLIP_NORM / torch.linalg.vector_norm(rows, dim=1)).clamp(max=1)[:, None]
            total = rows.sum(0)
        else:
            norms = ((made * made).sum(1) * ((batch * batch).sum(1) + 1)).sqrt()
            made *= (CLIP_NORM / norms).clamp(max=1)[:, None]
            total = torch.cat([(made.T @ batch).reshape(-1), made.sum(0)])
        normals = torch.randn(size.per_round, d, generator=generator)
        total += NOISE_STD * (normals.sum(0) - last[asked].sum(0))
        last[asked] = normals
        gradient += total / size.per_round
        model -= LEARNING_RATE * gradient
        last_query, query = query, query + (model - query) * (2 / (t + 2))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    if not torch.isfinite(query).all():
        raise RuntimeError("Expected a finite model.")
    return {"updates": count, "seconds": seconds, "processor_s": processor, "parameters": d}


def cohort(size: Size, *, compiled: bool = True, mechanism: str = "cancelling") -> dict[str, float]:
    """Return the cohort engine with a mechanism, in this process; the papers' is the default."""
    import logging

    from murmurfl.app.engines import compiled as loops
    from murmurfl.app.engines.start import run_cohort
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.settings.run_config import RunConfig
    from threadpoolctl import threadpool_limits

    logging.getLogger("flwr").setLevel(logging.ERROR)
    threadpool_limits(1)
    config = RunConfig(
        task=size.task,
        model="benchmarks.bare:written_out" if size.dense else "softmax",
        mechanism=mechanism,
        synthetic_samples=6_000 if size.dense else size.rounds * size.per_round,
        num_clients=size.clients,
        clients_per_round=size.per_round,
        batch_size=1,
        num_rounds=size.rounds,
        sampling="balanced",
        evaluate_every=size.rounds,
        noise_quality="fast",
        checkpoint=False,
    )
    experiment = prepare(config)
    loops.WORTH_COMPILING = loops.WORTH_LOADING = 0 if compiled else 1 << 62
    processor = time.process_time()
    result = run_cohort(config)
    return {
        "updates": sum(report.aggregated for report in result.strategy.history),
        "seconds": result.seconds,
        "processor_s": time.process_time() - processor,
        "parameters": experiment.model.num_parameters,
    }


MEASURES: dict[str, Callable[[Size], dict[str, float]]] = {
    LOOP: bare,
    COHORT: cohort,
    DECAY: lambda size: cohort(size, mechanism="decay"),
    FIRST: cohort,
    NUMPY: lambda size: cohort(size, compiled=False),
}


def _apart(which: str, size: Size, cache: str) -> dict[str, float]:
    """Measure in a process of its own, with compiled loops in the folder ``cache``, or in one that is empty."""
    command = [sys.executable, "-m", "benchmarks.bare", "--one", which, str(SIZES.index(size))]
    before, started = _processor_of_children(), time.perf_counter()
    with tempfile.TemporaryDirectory() as empty, PeakMemory() as memory:
        kept = {"NUMBA_CACHE_DIR": empty if which == FIRST else cache}
        output = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1],
            env={**os.environ, **_ONE_THREAD, **kept}, timeout=1800,
        ).stdout  # fmt: skip
    whole = {"process_s": time.perf_counter() - started, "process_processor_s": _processor_of_children() - before}
    return {**json.loads(output.splitlines()[-1]), **whole, "peak_mib": memory.peak_mib}


def _processor_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(repeats: int = 3) -> list[dict[str, Any]]:
    """Return a row for each size: medians, and the median of each turn's ratio to the bare loop."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for size in SIZES:
            for which in (COHORT, DECAY):  # fills the cache
                _apart(which, size, cache)
            runs: dict[str, list[dict[str, float]]] = {which: [] for which in MEASURES}
            for _ in range(repeats):
                for which, kept in runs.items():
                    kept.append(_apart(which, size, cache))
            rows.append(row(size, runs))
    return rows


MEASURED = ("seconds", "processor_s", "process_s", "process_processor_s", "peak_mib")


def row(size: Size, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the row of a size, from the runs of each turn."""

    def ratios(kept: Sequence[dict[str, float]], what: str) -> list[float]:
        return [run[what] / loop[what] for run, loop in zip(kept, runs[LOOP], strict=True)]

    return {
        "parameters": int(runs[LOOP][0]["parameters"]),
        "clients": size.clients,
        "per_round": size.per_round,
        "rounds": size.rounds,
        "dense": size.dense,
        "target": size.target,
        "repeats": len(runs[LOOP]),
        "measured": {
            which: {
                "updates_per_second": statistics.median(run["updates"] / run["seconds"] for run in kept),
                **{what: statistics.median(run[what] for run in kept) for what in MEASURED},
                "times_bare": statistics.median(ratios(kept, "seconds")),
                "range": [f(ratios(kept, "seconds")) for f in (min, max)],
                "whole_times_bare": statistics.median(ratios(kept, "process_s")),
                "whole_range": [f(ratios(kept, "process_s")) for f in (min, max)],
                "whole_processor_times_bare": statistics.median(ratios(kept, "process_processor_s")),
            }
            for which, kept in runs.items()
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the measurement as Markdown."""
    lines = [
        "| d | M | m | rounds | | updates/s | s of rounds | times the bare loop "
        "| s of the process | times the bare loop | by processor time | peak memory MiB |",
        "|" + "---|" * 12,
    ]
    names = {
        LOOP: "bare torch loop",
        COHORT: "cohort engine",
        DECAY: "cohort engine, `decay`",
        FIRST: "cohort engine, first run",
        NUMPY: "cohort engine, NumPy alone",
    }
    for one in rows:
        head = f"{one['parameters']:,} | {one['clients']} | {one['per_round']} | {one['rounds']:,}"
        for which, made in one["measured"].items():
            times, whole, processor = "1", "1", "1"
            if which != LOOP:
                times, whole = (
                    _spread(made["times_bare"], made["range"]),
                    _spread(made["whole_times_bare"], made["whole_range"]),
                )
                processor = f"{made['whole_processor_times_bare']:.2f}"
            lines.append(
                f"| {head} | {names[which]} | {made['updates_per_second']:,.0f} | {made['seconds']:.2f} | {times} "
                f"| {made['process_s']:.2f} | {whole} | {processor} | {made['peak_mib']:,.0f} |"
            )
    targets = " and ".join(f"{one['target']:g} at d = {one['parameters']:,}" for one in rows)
    lines += [
        "",
        f"One thread, b = 1, medians of {rows[0]['repeats']} turns; ratios are those of each turn, by the wall clock "
        "unless processor time is named. From d = 100,000 on each client's gradient is a row of d values. A first run "
        "compiles the loops, later ones read them from a cache. The aim for the rounds was at most "
        f"{targets}.",
    ]
    return "\n".join(lines)


def _spread(median: float, ends: Sequence[float]) -> str:
    return f"{median:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("WHICH", "SIZE"), default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.one:
        which, number = arguments.one
        print(json.dumps(MEASURES[which](SIZES[int(number)])))
        return
    rows = measure(arguments.repeats)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
