"""All benchmarks in one run: ``python -m benchmarks`` (``make bench``).

Writes one JSON document and prints it as tables; ``python -m benchmarks.pages`` puts them into the README and
docs/performance.md. ``--only`` names a part; ``--without-peers`` leaves out pfl, plain Flower and jax_privacy, which
need the network once for environments of their own. A part that cannot be measured where this runs, without a network
say, is noted as such, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from murmurfl.app.engines.cohort import DEFAULT_ROW_CACHE_MIB

from . import bare, device, engines, fleet, large, masks, noise, profile, ray, scale, stragglers, streams, workers
from .peers import in_process
from .peers import run as peers
from .unmeasured import measured, shown

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "performance.json"
NEED_PEERS = ("streams", "inprocess", "peers")

Part = tuple[Callable[[], Any], Callable[[Any], str]]


def computer() -> dict[str, Any]:
    """Return the Python version, cores and packages of the computer that runs the benchmarks."""
    packages = ("flwr", "numba", "numpy", "ray", "torch")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{package: importlib.metadata.version(package) for package in packages if find_spec(package)},
    }


def parts(repeats: int) -> dict[str, Part]:
    """Return what is measured, how, and how it is shown."""
    return {
        "engines": (lambda: engines.measure(repeats), engines.table),
        "bare": (lambda: bare.measure(repeats), bare.table),
        "noise": (noise.measure, noise.table),
        "streams": (streams.measure, streams.table),
        "profile": (profile.measure, profile.table),
        "workers": (lambda: workers.measure(repeats=repeats), workers.table),
        "ray": (lambda: ray.measure(repeats), ray.table),
        "inprocess": (in_process.measure, in_process.table),
        "large": (large.measure, large.table),
        "scale": (lambda: scale.measure(1, DEFAULT_ROW_CACHE_MIB), scale.table),
        "fleet": (fleet.measure, fleet.table),
        "device": (lambda: device.measure(repeats), device.table),
        "stragglers": (stragglers.measure, stragglers.table),
        "masks": (lambda: masks.measure(repeats), masks.table),
        "peers": (lambda: {"flower-localdp": peers.measure_flower(repeats=repeats)}, peers.table),
    }


def main() -> None:
    """Measure, print, write."""
    everything = parts(3)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--only", choices=list(everything), action="append")
    arguments = parser.parse_args()
    chosen = [name for name in everything if not arguments.only or name in arguments.only]
    if arguments.without_peers:
        chosen = [name for name in chosen if name not in NEED_PEERS]
    document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name, (measure, table) in parts(arguments.repeats).items():
        if name not in chosen:
            continue
        began = time.perf_counter()
        document |= {"computer": computer(), name: measured(name, measure)}
        print(f"\n{name}, {time.perf_counter() - began:.0f} s\n\n{shown(document[name], table)}", flush=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
