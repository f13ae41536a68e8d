"""Models of a million and ten million parameters: updates a second, and memory in vectors of d float64.

Run with ``python -m benchmarks.large``; every row is a process of its own. On the engines, softmax regression, one
sample a client and round, with noise of full dimension on every client; memory is what the process holds at most,
beyond its imports and data. On a real node, Flower's SuperLink and SuperNode over TLS on the loopback interface
(:mod:`.footprint`); memory is that of the node's own process beyond what it holds while it waits. Then come
gradients of a perceptron in PyTorch, sample by sample, in the memory that was stated.
``--steps`` measures steps of transformers with random weights instead: clipped gradients, summed without being written
out, and an ordinary step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
DOCUMENT, STEPS = RESULTS / "large.json", RESULTS / "steps.json"
MANY, MOST = 99_999, 999_999  # features: d = 10 x (features + 1)
# Engine, features, clients, clients a round, rounds.
ENGINES = [
    ("cohort", MANY, 20, 10, 8),
    ("cohort", MOST, 4, 2, 4),
    ("inprocess", MANY, 20, 10, 4),
    ("inprocess", MOST, 4, 2, 4),
]
NODES = [MANY, MOST]
HIDDEN, SAMPLES, INPUTS, CLASSES = 1_000, 64, 988, 10  # of the perceptron: d = 1,000,000 and a little
MEMORIES = [48.0, 128.0, 512.0]  # MiB
NODE_IDLE_S = 2.0
# Words, width, heads, layers, words of a text: of transformers that classify texts.
TRANSFORMERS = [(4096, 128, 4, 2, 64), (8192, 256, 4, 4, 64), (8192, 256, 4, 4, 128)]
TEXTS, TURNS = 32, 5  # of a step; steps of each kind, which take turns


@dataclass(frozen=True)
class Row:
    """One row of the table of engines and nodes.

    Parameters
    ----------
    engine : str
    parameters : int
        d.
    clients, per_round : int
        M and m; 1 and 1 of a real node.
    updates_per_second : float
        Of a real node, from one answer to the next, its server's work included.
    base_mib, peak_mib : float
        Resident memory of the process with imports and data, or of a node that waits; and at most.
    vectors : float
        The difference in vectors of d float64.
    supernode_vectors : float
        Of a real node, the same of Flower's SuperNode, a process of its own.
    """

    engine: str
    parameters: int
    clients: int
    per_round: int
    updates_per_second: float
    base_mib: float
    peak_mib: float
    vectors: float
    supernode_vectors: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """Gradients of a perceptron in a stated memory.

    Parameters
    ----------
    parameters, samples : int
        d, and how many samples' gradients were computed.
    stated_mib : float
        ``gradient_memory_mib``.
    needed_mib : float
        What the process held at most, beyond what it held before.
    seconds : float
        For norms and the sum of all rows, each scaled.
    """

    parameters: int
    samples: int
    stated_mib: float
    needed_mib: float
    seconds: float


@dataclass(frozen=True)
class Step:
    """A step of a transformer: the sum of its clipped gradients, and the gradient of the mean loss as usual.

    Parameters
    ----------
    parameters, texts, words : int
        d, texts of a step, and words of a text.
    together : int
        Texts that are computed together for clipped gradients; all of them for the ordinary step.
    seconds, ordinary_seconds : float
        Median of steps that take turns.
    mib, ordinary_mib : float
        What a process held at most during a step, beyond what it held before the model was made.
    time_ratio, memory_ratio : float
    """

    parameters: int
    texts: int
    words: int
    together: int
    seconds: float
    ordinary_seconds: float
    mib: float
    ordinary_mib: float
    time_ratio: float
    memory_ratio: float


def _memory_mib(entry: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{entry}:"))
    return int(line.split()[1]) / 1024


def _peak_from_here() -> float:
    """Begin to look for the largest memory; what is held now, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_mib("VmRSS")


def _vectors(mib: float, parameters: int) -> float:
    return mib * 2**20 / (8 * parameters)


def hundred_thousand(
    config: Any,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return a task on which softmax regression has d = 100,000."""
    return _samples(config, MANY // 10)


def million(config: Any) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return a task of as few samples as a run uses, on which softmax regression has d = 1,000,000."""
    return _samples(config, MANY)


def ten_million(config: Any) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return the same with d = 10,000,000."""
    return _samples(config, MOST)


def _samples(config: Any, features: int) -> Any:
    generator = np.random.Generator(np.random.Philox(key=1))
    count = config.num_rounds * config.clients_per_round
    rows = generator.random((count + CLASSES, features), dtype=np.float32)
    labels = np.arange(count + CLASSES) % CLASSES
    return rows[:count], labels[:count], rows[count:], labels[count:]


def run_engine(engine: str, features: int, clients: int, per_round: int, rounds: int) -> Row:
    """Measure an engine in this process."""
    import logging

    from murmurfl.app.engines.start import run_cohort, run_in_process
    from murmurfl.app.runs.experiment import prepare
    from murmurfl.app.settings.run_config import RunConfig
    from threadpoolctl import threadpool_limits

    logging.getLogger("flwr").setLevel(logging.ERROR)
    threadpool_limits(1)
    config = RunConfig(
        task=f"benchmarks.large:{'ten_million' if features == MOST else 'million'}",
        num_clients=clients,
        clients_per_round=per_round,
        batch_size=1,
        num_rounds=rounds,
        evaluate_every=rounds,
        sampling="balanced",
        noise_quality="fast",
        checkpoint=False,
    )
    parameters = prepare(config).model.num_parameters
    base = _peak_from_here()
    result = {"cohort": run_cohort, "inprocess": run_in_process}[engine](config)
    updates = sum(report.aggregated for report in result.strategy.history)
    peak = _memory_mib("VmHWM")
    speed, vectors = updates / result.seconds, _vectors(peak - base, parameters)
    return Row(engine, parameters, clients, per_round, speed, base, peak, vectors)


def run_node(features: int) -> Row:
    """Measure a real node; its processes are started from this one."""
    from .footprint import measure_one

    made = measure_one(features, NODE_IDLE_S, growth=False)
    return Row(
        engine="a real node",
        parameters=made.parameters,
        clients=1,
        per_round=1,
        updates_per_second=1.0 / made.round_s,
        base_mib=made.idle_mib,
        peak_mib=made.peak_mib,
        vectors=_vectors(made.peak_mib - made.idle_mib, made.parameters),
        supernode_vectors=_vectors(made.supernode_peak_mib - made.supernode_idle_mib, made.parameters),
    )


def run_chunks(stated_mib: float) -> Chunk:
    """Norms and sum of a perceptron's gradients, sample by sample, in this process."""
    import torch
    from murmurfl.app.nodes.flower_process import give_back_large_blocks
    from murmurfl.clients.adapters.per_sample_gradients import stacked_gradients
    from murmurfl.clients.adapters.torch_model import ModuleGradients

    give_back_large_blocks()  # what was freed is not to be counted
    torch.set_num_threads(1)
    module = torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES))
    point = [values.detach().numpy() for values in module.parameters()]
    generator = np.random.Generator(np.random.Philox(key=1))
    samples = generator.random((SAMPLES, INPUTS), dtype=np.float32), generator.integers(CLASSES, size=SAMPLES)
    width = sum(values.size for values in point)
    total, row = np.full((2, width), 0.0)
    loss = torch.nn.functional.cross_entropy
    few = samples[0][:2], samples[1][:2]
    ModuleGradients(module, loss)(point, few)  # PyTorch's own first time
    gradients = ModuleGradients(module, loss, gradient_memory_mib=stated_mib)
    base, started = _peak_from_here(), time.perf_counter()
    stacked = stacked_gradients(gradients, [point], [1.0], samples)
    for i, norm in enumerate(stacked.norms()):
        stacked.write(i, 1.0 / max(norm, 1.0), row)
        total += row
    seconds = time.perf_counter() - started
    return Chunk(width, SAMPLES, stated_mib, _memory_mib("VmHWM") - base, seconds)


def _transformer(words: int, width: int, heads: int, layers: int, length: int) -> Any:
    """Return a transformer of random weights, which classifies texts."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix = nn.MultiheadAttention(width, heads, batch_first=True)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            normed = self.first(values)
            values = values + self.mix(normed, normed, normed, need_weights=False)[0]
            return values + self.down(nn.functional.gelu(self.up(self.second(values))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.places = nn.Parameter(0.02 * torch.randn(length, width))
            self.layers = nn.Sequential(*[Layer() for _ in range(layers)])
            self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.layers(self.words(text) + self.places)).mean(1))

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return Transformer()


def _steps(*sizes: int) -> tuple[Callable[[], Any], Callable[[], Any], int, int]:
    """Return a step with clipped gradients and an ordinary one, the texts together in the former, and d."""
    import torch
    from murmurfl.clients.adapters.torch_model import ModuleGradients
    from murmurfl.privacy.release.clipping import RowBound

    module, loss = _transformer(*sizes), torch.nn.functional.cross_entropy
    generator = np.random.Generator(np.random.Philox(key=1))
    texts, classes = generator.integers(sizes[0], size=(TEXTS, sizes[-1])), generator.integers(CLASSES, size=TEXTS)
    point = [values.detach().numpy() for values in module.parameters()]
    gradients = ModuleGradients(module, loss)
    bound = RowBound(1.0)

    def clipped() -> Any:
        made = gradients.summed([point], 1.0, lambda i: (texts[i : i + 1], classes[i : i + 1]), TEXTS)
        if made is None:
            raise SystemExit("Expected a transformer whose gradients have factors.")
        return bound.total(made, sum(values.size for values in point))

    def ordinary() -> None:
        module.zero_grad()
        loss(module(torch.from_numpy(texts)), torch.from_numpy(classes)).backward()

    program = gradients.program(torch.from_numpy(texts[0]), torch.from_numpy(classes)[0])
    together = gradients.summed_together(program)
    return clipped, ordinary, together, sum(values.size for values in point)


def run_step_memory(kind: str, *sizes: int) -> dict[str, float]:
    """Measure the largest memory of a step in this process, beyond that before its model is made."""
    from murmurfl.app.nodes.flower_process import give_back_large_blocks

    give_back_large_blocks()
    _steps(4096, 128, 4, 1, 8)[kind == "ordinary"]()  # PyTorch's own first time
    base = _peak_from_here()
    clipped, ordinary, *_ = _steps(*sizes)
    gc.collect()
    _peak_from_here()
    (ordinary if kind == "ordinary" else clipped)()
    return {"mib": _memory_mib("VmHWM") - base}


def run_step(*sizes: int) -> Step:
    """Measure steps of a transformer, their memory in processes of their own."""
    import torch

    torch.set_num_threads(1)
    clipped, ordinary, together, parameters = _steps(*sizes)
    times: dict[Callable[[], Any], list[float]] = {clipped: [], ordinary: []}
    for turn in range(TURNS + 1):
        for step, taken in times.items():
            started = time.perf_counter()
            step()
            if turn:  # the first one is PyTorch's
                taken.append(time.perf_counter() - started)
    seconds, usual = (float(np.median(times[step])) for step in (clipped, ordinary))
    mib, usual_mib = (_in_a_process("step-memory", kind, *sizes)["mib"] for kind in ("clipped", "ordinary"))
    ratios = float(np.median(np.divide(times[clipped], times[ordinary]))), mib / usual_mib
    return Step(parameters, TEXTS, sizes[-1], together, seconds, usual, mib, usual_mib, *ratios)


def _in_a_process(kind: str, *values: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--row", kind, *map(str, values)]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=1800,
    ).stdout  # fmt: skip
    return json.loads(output.splitlines()[-1])


def measure(*, nodes: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Every row; without real nodes where there is no need for them."""
    rows = [_in_a_process("engine", *row) for row in ENGINES]
    if nodes:
        rows += [_in_a_process("node", features) for features in NODES]
    return {
        "rows": rows,
        "chunks": [_in_a_process("chunks", stated) for stated in MEMORIES],
    }


def table(document: dict[str, list[dict[str, Any]]]) -> str:
    """Engines and nodes as a Markdown table, and below it gradients in chunks."""
    lines = [
        "| engine | d | M | m | updates/s | memory before MiB | at most MiB | beyond, in vectors of d float64 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        beside = f", and {row['supernode_vectors']:.1f} in Flower's SuperNode" if row["supernode_vectors"] else ""
        lines.append(
            f"| {row['engine']} | {row['parameters']:,} | {row['clients']} | {row['per_round']} | "
            f"{row['updates_per_second']:.3g} | {row['base_mib']:,.0f} | {row['peak_mib']:,.0f} | "
            f"{row['vectors']:.1f}{beside} |"
        )
    lines += [
        "",
        "| gradients in PyTorch, d | samples | memory stated MiB | needed MiB | seconds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['parameters']:,} | {row['samples']} | {row['stated_mib']:,.0f} | {row['needed_mib']:,.0f} | "
        f"{row['seconds']:.2f} |"
        for row in document["chunks"]
    ]
    return "\n".join(lines)


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Return steps of transformers as a Markdown table."""
    lines = [
        "| transformer, d | words | texts a step | together | clipped s | ordinary s | ratio | clipped MiB | "
        "ordinary MiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['parameters']:,} | {row['words']} | {row['texts']} | {row['together']} | {row['seconds']:.2f} | "
        f"{row['ordinary_seconds']:.2f} | {row['time_ratio']:.2f} | {row['mib']:,.0f} | {row['ordinary_mib']:,.0f} | "
        f"{row['memory_ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--row", nargs="+", default=None, help="one row in this process: its kind and what it is made of"
    )
    parser.add_argument("--without-nodes", action="store_true", help="engines and gradients only")
    parser.add_argument("--steps", action="store_true", help="steps of transformers only")
    arguments = parser.parse_args()
    if arguments.row:
        kind, *values = arguments.row
        if kind == "step-memory":
            print(json.dumps(run_step_memory(values[0], *map(int, values[1:]))))
            return
        makers: dict[str, Callable[[], Row | Chunk | Step]] = {
            "engine": lambda: run_engine(values[0], *map(int, values[1:])),
            "node": lambda: run_node(int(values[0])),
            "chunks": lambda: run_chunks(float(values[0])),
            "step": lambda: run_step(*map(int, values)),
        }
        print(json.dumps(asdict(makers[kind]())))
        return
    if arguments.steps:
        made = {"steps": [_in_a_process("step", *sizes) for sizes in TRANSFORMERS]}
        STEPS.write_text(json.dumps(made, indent=2) + "\n")
        print(steps_table(made["steps"]))
        return
    document = measure(nodes=not arguments.without_nodes)
    if not arguments.without_nodes:
        DOCUMENT.write_text(json.dumps(document, indent=2) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
