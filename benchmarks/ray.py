"""Messages a second on Flower's Ray simulation: murmurfl's app beside plain FedAvg with as many bytes a message.

Run with ``python -m benchmarks.ray``: 100 clients, 50 a round, d = 7,850, both through ``flwr run`` and in turns.
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
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from murmurfl.app.client_app import app as private_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.engines.start import ray_environment, ray_overrides
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import run_experiment
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import messages as simulation

from .engines import NODES, PER_ROUND, configuration
from .peers.memory import PeakMemory

ROUNDS = 50
POINTS = {"mu2": 2, "noisy-sgd": 1}
"""Points of the model's shapes in a request of ours."""

_HERE = Path(__file__).resolve().parent / "peers"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT_S = 900.0


def plain_config(rounds: int, points: int) -> dict[str, Any]:
    """Return what the plain app is asked for."""
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
    """Write a Flower App of our ClientApp, and of a ServerApp that notes when rounds end."""
    shutil.copytree(_HERE / "timed_app", folder, ignore=shutil.ignore_patterns("__pycache__"))
    keys = toml_document(ray_overrides(RunConfig()))
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "timed-app"\nversion = "0.1.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "murmurfl"\n'
        '[tool.flwr.app.components]\nserverapp = "server_app:app"\nclientapp = "murmurfl.app.client_app:app"\n'
        f"[tool.flwr.app.config]\n{keys}",
        encoding="utf-8",
    )


PARTS = ("app", "request", "state", "app read", "request read", "state read", "call", "reply and state", "both read")
"""What is done for a message beside transport, in order: pickled by the driver, read by a worker, and back."""

SIZES = ("request", "state", "reply", "reply and state")
"""What travels, in bytes; a reply goes back in one piece with the node's state."""


class _PicklingGrid(InProcessGrid):
    """Everything is pickled on its way, as Ray does it, in this process; how long each part takes, what it weighs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: list[list[float]] = []
        self.sizes: list[list[int]] = []

    def _handle(self, message: Message, identifier: str) -> Message:
        from ray import cloudpickle  # here, because tests read this module's tables, and Ray takes long to import

        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = identifier
        at = [time.perf_counter()]

        def noted(made: Any) -> Any:
            at.append(time.perf_counter())
            return made

        app = self._client_app
        sent = [noted(cloudpickle.dumps(part)) for part in (lambda: app, message, self._contexts[node])]
        make_app, request, context = (noted(pickle.loads(part)) for part in sent)
        reply = noted(make_app()(request, context))
        back = noted(cloudpickle.dumps((reply, context)))
        reply, self._contexts[node] = noted(pickle.loads(back))
        if message.metadata.message_type == MessageType.TRAIN:
            self.sizes.append([len(sent[1]), len(sent[2]), len(pickle.dumps(reply)), len(back)])
            self.seconds.append([later - earlier for earlier, later in itertools.pairwise(at)])
        reply.metadata.__dict__["_message_id"] = f"{identifier}-reply"
        return reply


def looked_into(candidate: str, rounds: int = 12) -> dict[str, dict[str, float]]:
    """Return what messages weigh and how long their parts take beside transport, after the second round."""
    with _as_worker():
        grid = _run_over(_PicklingGrid, candidate, rounds)
    parts, sizes = (zip(*rows[2 * PER_ROUND :], strict=True) for rows in (grid.seconds, grid.sizes))
    return {
        # The lower quartile: other work of a computer makes single ones longer, and none shorter.
        "parts_ms": {name: 1e3 * statistics.quantiles(part, n=4)[0] for name, part in zip(PARTS, parts, strict=True)},
        "bytes": dict(zip(SIZES, map(statistics.median, sizes), strict=True)),
    }


@contextmanager
def _as_worker() -> Iterator[None]:
    """Have this process be a worker of Ray's, whose nodes' states travel."""
    before, simulation._known_as_worker = simulation._known_as_worker, True
    try:
        yield
    finally:
        simulation._known_as_worker = before


def _run_over(grid_type: type[Any], candidate: str, rounds: int) -> Any:
    """Run a candidate over a grid of this process."""
    kind, _, like = candidate.partition(":")
    if kind != "fedavg":
        own = configuration(rounds, kind)
        grid = grid_type(private_app, NODES, own.to_mapping())
        run_experiment(grid, own, engine="ray")
        return grid
    config = plain_config(rounds, POINTS[like])
    grid = grid_type(_module("client_app").app, NODES, config)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**config, "out-dir": folder}
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
        _module("server_app").main(grid, context)
    return grid


def _module(name: str) -> ModuleType:
    """Return a module of the plain app, which is no package."""
    spec = importlib.util.spec_from_file_location(f"fedavg_{name}", _HERE / "fedavg_app" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"Expected {name}.py in the plain app's folder.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its functions are pickled by their names, as those of a bundle
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
            **looked_into(name),
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
    """Return the measurement as Markdown."""
    lines = [
        "| | messages/s | request, kB | reply, kB | reply with state, kB | a round, s | start, s | peak memory MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in document["candidates"].items():
        size = entry["bytes"]
        lines.append(
            f"| {_label(name)} | {entry['rate']:,.0f} ({entry['range'][0]:,.0f} to {entry['range'][1]:,.0f}) "
            f"| {size['request'] / 1e3:.1f} | {size['reply'] / 1e3:.1f} | {size['reply and state'] / 1e3:.1f} "
            f"| {entry['median_round_s']:.2f} | {entry['start_s']:.1f} | {entry['peak_mib']:,.0f} |"
        )
    parts = [entry["parts_ms"] for entry in document["candidates"].values()]
    beside = " and ".join(f"{sum(one.values()):.2f}" for one in parts)
    ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in document["ratios"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"{document['nodes']} nodes, {document['per_round']} a round, d = {document['parameters']:,}, rounds 2 to "
            f"{document['rounds']}, medians of {document['repeats']} on {document['cores']} cores. Ours to FedAvg's "
            f"with as many bytes: {ratios}. Beside transport a message takes {beside} ms.",
        ]
    )


def _label(candidate: str) -> str:
    kind, _, like = candidate.partition(":")
    return f"Flower's FedAvg, messages of {like}" if like else f"murmurfl, {kind}"


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
