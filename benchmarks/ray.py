"""Messages a second on Flower's Ray simulation: murmurfl's app beside plain FedAvg with as many bytes a message.

Run with ``python -m benchmarks.ray``: 100 machines, 50 a round, d = 7,850, both through ``flwr run`` and in turns.
FedAvg's requests carry as many points of the model's shapes as ours, its replies one, all float64; its clients halve
what came. Counted are messages answered from the end of the first round to the end of the last: the first round starts
Ray's actors and loads the app, and is shown beside as the start.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import pickle
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from murmurfl.app.client_app import app as private_app
from murmurfl.app.config import RunConfig
from murmurfl.app.engines.flower_run import run_flower_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import ray_environment, ray_overrides
from murmurfl.app.engines.toml import toml_document
from murmurfl.app.experiment import prepare
from murmurfl.app.run import run_experiment

from .engines import NODES, PER_ROUND, configuration
from .peers.memory import PeakMemory

ROUNDS = 60
CANDIDATES = ("fedavg", "mu2", "noisy-sgd")
POINTS = {"mu2": 2, "noisy-sgd": 1}
"""Points of the model's shapes in a request of ours."""

_HERE = Path(__file__).resolve().parent / "peers"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT_S = 900.0


def plain_config(rounds: int, points: int) -> dict[str, Any]:
    """What the plain app is asked for."""
    model = prepare(configuration(rounds)).model
    rows, columns = model.shapes[0]
    return {
        "num-rounds": rounds,
        "num-clients": NODES,
        "clients-per-round": PER_ROUND,
        "rows": rows,
        "columns": columns,
        "points": points,
    }


def run_once(candidate: str, rounds: int) -> dict[str, float]:
    """One run of a candidate: ``fedavg`` with the points of a strategy of ours behind a colon, or that strategy."""
    kind, _, like = candidate.partition(":")
    with tempfile.TemporaryDirectory() as scratch:
        folder, environment = Path(scratch).resolve(), dict(_ONE_THREAD)
        out = folder / "out"
        out.mkdir()
        if kind == "fedavg":
            app, settings = _HERE / "fedavg_app", plain_config(rounds, POINTS[like])
        else:
            config = configuration(rounds, kind)
            environment |= ray_environment(config)
            app, settings = folder / "timed-app", ray_overrides(config)
            write_timed_app(app)
        with PeakMemory() as memory:
            result = run_flower_app(
                app,
                run_config={**settings, "out-dir": str(out)},
                num_supernodes=NODES,
                timeout_s=_TIMEOUT_S,
                environment=environment,
                on_line=lambda line: None,  # noqa: ARG005 - nobody reads along
            )
        noted = json.loads((out / "rounds.json").read_text(encoding="utf-8"))
    ended, seconds = noted["ended"], noted["ended"][-1] - noted["ended"][0]
    messages = sum(noted["answered"][1:])
    return {
        "messages": messages,
        "seconds": seconds,
        "rate": messages / seconds,
        "start_s": ended[0] - noted["started"],
        "whole_s": result.seconds,
        "median_round_s": statistics.median(after - before for before, after in itertools.pairwise(ended)),
        "peak_mib": memory.peak_mib,
        "peak_pss_mib": memory.peak_pss_mib,
    }


def write_timed_app(folder: Path) -> None:
    """A Flower App of our ClientApp, and of a ServerApp that notes when rounds end."""
    shutil.copytree(_HERE / "timed_app", folder, ignore=shutil.ignore_patterns("__pycache__"))
    keys = toml_document(RunConfig().to_mapping())
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "timed-app"\nversion = "0.1.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "murmurfl"\n'
        '[tool.flwr.app.components]\nserverapp = "server_app:app"\nclientapp = "murmurfl.app.client_app:app"\n'
        f"[tool.flwr.app.config]\n{keys}",
        encoding="utf-8",
    )


class _CountingGrid(InProcessGrid):
    """Bytes of the requests and replies of trainings, and of the nodes' contexts, as Ray pickles them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[tuple[int, int, int]] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As the engine's, counted."""
        asked = list(messages)
        contexts = [len(pickle.dumps(self._contexts[m.metadata.dst_node_id])) for m in asked]
        replies = list(super().send_and_receive(asked, timeout=timeout))
        if asked and asked[0].metadata.message_type == MessageType.TRAIN:
            for request, reply, context in zip(asked, replies, contexts, strict=True):
                self.sizes.append((len(pickle.dumps(request.content)), len(pickle.dumps(reply.content)), context))
        return replies


def message_bytes(candidate: str, rounds: int = 4) -> dict[str, float]:
    """What a request, its reply and the node's context weigh: medians of the rounds after the first."""
    kind, _, like = candidate.partition(":")
    if kind == "fedavg":
        config = plain_config(rounds, POINTS[like])
        with tempfile.TemporaryDirectory() as folder:
            grid = _CountingGrid(_module("client_app").app, NODES, config)
            settings = {**config, "out-dir": folder}
            context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
            _module("server_app").main(grid, context)
    else:
        own = configuration(rounds, kind)
        grid = _CountingGrid(private_app, NODES, own.to_mapping())
        run_experiment(grid, own, engine="inprocess")
    sizes = zip(*grid.sizes[PER_ROUND:], strict=True)
    return dict(zip(("request", "reply", "context"), map(statistics.median, sizes), strict=True))


def _module(name: str) -> ModuleType:
    """A module of the plain app, which is no package."""
    spec = importlib.util.spec_from_file_location(f"fedavg_{name}", _HERE / "fedavg_app" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"Expected {name}.py in the plain app's folder.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(repeats: int, rounds: int = ROUNDS, strategies: Iterable[str] = ("mu2",)) -> dict[str, Any]:
    """Each strategy of ours and FedAvg with as many bytes, taking turns; the first of a repeat changes."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    candidates = [name for strategy in strategies for name in (strategy, f"fedavg:{strategy}")]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    for repeat in range(repeats):
        for name in candidates if repeat % 2 else candidates[::-1]:
            runs[name].append(run_once(name, rounds))
    keys = ("rate", "start_s", "whole_s", "median_round_s", "peak_mib", "peak_pss_mib")
    entries = {
        name: {
            **{key: statistics.median(run[key] for run in kept) for key in keys},
            "range": [min(run["rate"] for run in kept), max(run["rate"] for run in kept)],
            "bytes": message_bytes(name),
        }
        for name, kept in runs.items()
    }
    return {
        "nodes": NODES,
        "per_round": PER_ROUND,
        "parameters": prepare(configuration(rounds)).model.num_parameters,
        "rounds": rounds,
        "repeats": repeats,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "candidates": entries,
        "ratios": {
            strategy: statistics.median(
                one["rate"] / other["rate"]
                for one, other in zip(runs[strategy], runs[f"fedavg:{strategy}"], strict=True)
            )
            for strategy in strategies
        },
    }


def table(document: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    lines = [
        "| | messages/s | request, kB | reply, kB | state, kB | a round, s | start, s | peak memory MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in document["candidates"].items():
        kind, _, like = name.partition(":")
        label = f"Flower's FedAvg, messages of {like}" if like else f"murmurfl, {kind}"
        size = entry["bytes"]
        lines.append(
            f"| {label} | {entry['rate']:,.0f} ({entry['range'][0]:,.0f} to {entry['range'][1]:,.0f}) "
            f"| {size['request'] / 1e3:.1f} | {size['reply'] / 1e3:.1f} | {size['context'] / 1e3:.1f} "
            f"| {entry['median_round_s']:.2f} | {entry['start_s']:.1f} | {entry['peak_mib']:,.0f} |"
        )
    ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in document["ratios"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"{document['nodes']} nodes, {document['per_round']} a round, d = {document['parameters']:,}, rounds 2 to "
            f"{document['rounds']}, medians of {document['repeats']} on {document['cores']} cores. Ours to FedAvg's "
            f"with as many bytes: {ratios}.",
        ]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", default=None, help="one run of a candidate, such as mu2 or fedavg:mu2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=["mu2"], choices=sorted(POINTS))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_once(arguments.one, arguments.rounds)))
        return
    document = measure(arguments.repeats, arguments.rounds, arguments.strategies)
    print(table(document))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
