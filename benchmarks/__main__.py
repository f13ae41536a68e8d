"""All benchmarks in one run: ``python -m benchmarks`` (``make bench``).

Writes one JSON document and prints it as tables; ``python -m benchmarks.pages`` puts them into the README and
docs/performance.md. ``--without-peers`` leaves out pfl, plain Flower and jax_privacy, which need the network once
for environments of their own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmurfl.app.engines.cohort import DEFAULT_ROW_CACHE_MIB

from . import engines, masks, noise, profile, scale, streams
from .peers import run as peers

DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "performance.json"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = ("flwr", "numpy", "ray", "torch")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument(
        "--only", choices=["engines", "noise", "streams", "profile", "scale", "masks", "peers"], action="append"
    )
    arguments = parser.parse_args()
    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
        "engines": (lambda: engines.measure(arguments.repeats), engines.table),
        "noise": (noise.measure, noise.table),
        "streams": (streams.measure, streams.table),
        "profile": (profile.measure, profile.table),
        "scale": (lambda: scale.measure(1, DEFAULT_ROW_CACHE_MIB), scale.table),
        "masks": (lambda: masks.measure(arguments.repeats), masks.table),
        "peers": (
            lambda: {
                "pfl": peers.measure_pfl(repeats=arguments.repeats),
                "flower-localdp": peers.measure_flower(repeats=arguments.repeats),
            },
            peers.table,
        ),
    }
    if arguments.without_peers:
        del parts["peers"], parts["streams"]
    document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name, (measure, table) in parts.items():
        if arguments.only and name not in arguments.only:
            continue
        document |= {"machine": machine(), name: measure()}
        print(f"\n{name}\n\n{table(document[name])}", flush=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
