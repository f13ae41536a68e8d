"""The error of every mechanism's prefix sums against the number of releases: ``python -m benchmarks.mechanisms``.

Writes docs/results/mechanisms.json and docs/pictures/mechanisms.png. The error is the root mean square of the rows of
B, times the sensitivity of one participation: the standard deviation of a released prefix sum in units of Delta / mu.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from murmurfl.privacy import Mechanism, make_mechanism

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SHOWN = (16, 64, 256, 1024)
VALUES = 10**6

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "independent": ("independent", {}),
    "cancelling, uniform": ("cancelling", {}),
    "cancelling, harmonic": ("cancelling", {"schedule": "harmonic"}),
    "decay, for mu2": ("decay", {}),
    "decay, for prefix sums": ("decay", {"workload": "prefix-sum"}),
    "tree, dyadic": ("tree", {"decoder": "dyadic"}),
    "tree, least squares": ("tree", {}),
    "banded, 16": ("banded", {"bands": 16}),
    "bisr, 16": ("bisr", {}),
    "sqrt_toeplitz": ("sqrt_toeplitz", {}),
    "sqrt_normalised": ("sqrt_normalised", {}),
    "blt, 3": ("blt", {}),
    "optimal": ("optimal", {}),
}


def error(mechanism: Mechanism) -> float:
    """Root mean square of the rows of B, times the sensitivity."""
    stds = np.array([mechanism.row_std(release) for release in range(1, mechanism.num_releases + 1)])
    return float(np.sqrt((stds**2).mean()) * mechanism.sensitivity())


def measure() -> dict[str, Any]:
    """Return the errors of every mechanism at every size, and what its streams keep."""
    return {
        label: {
            "errors": [error(make_mechanism(name, n, **options)) for n in SIZES],
            "memory": make_mechanism(name, SHOWN[-1], **options).memory,
            "bytes": make_mechanism(name, SHOWN[-1], **options).memory_bytes(VALUES),
        }
        for label, (name, options) in KINDS.items()
    }


def table(document: dict[str, Any]) -> str:
    """Return the measurement as Markdown."""
    lines = [
        f"| mechanism | {' | '.join(f'n = {n}' for n in SHOWN)} | a stream keeps | bytes at d = 1e6, n = {SHOWN[-1]} |",
        "|---" * (len(SHOWN) + 3) + "|",
    ]
    what = {
        "nothing": "nothing",
        "last": "the last nonce",
        "recent": "the last nonces",
        "all": "all nonces",
        "state": "arrays of d values",
    }
    for label, entry in document.items():
        errors = " | ".join(f"{entry['errors'][SIZES.index(n)]:.3f}" for n in SHOWN)
        lines.append(f"| {label} | {errors} | {what[entry['memory']]} | {entry['bytes']:,} |")
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """Error against the number of releases."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, entry in document.items():
        style = {"optimal": "k--", "blt, 3": "--", "sqrt_normalised": ":"}.get(label, "-")
        axes.plot(SIZES, entry["errors"], style, label=label, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("releases n")
    axes.set_ylabel("error of a prefix sum [Δ / μ]")
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, draw, write."""
    document = measure()
    (ROOT / "docs" / "results" / "mechanisms.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(document, ROOT / "docs" / "pictures" / "mechanisms.png")
    print(table(document))


if __name__ == "__main__":
    main()
