"""Noise on a private momentum and what a server keeps, against the number of epochs: ``python -m benchmarks.momentum``.

Writes docs/results/momentum.json. By linear algebra and from the strategies' own states; nothing is trained.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from murmurfl.privacy import PrivacyPolicy, SimulatedKeys, make_mechanism
from murmurfl.strategies import ReducedTreeMomentum, TreeMomentum
from murmurfl.strategies.momentum_tree import Changes, MomentumTree, ReconstructionTrees, best_gamma
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = (10, 40, 160)
PATHS = (1.0, 3.0, 10.0, 30.0)
EPOCH_LENGTH = 15
ALPHA = 0.03
SMOOTHNESS = 0.27
VALUES = 1000


def measure() -> list[dict[str, Any]]:
    """One row for each number of epochs."""
    return [noise(epochs) | kept(epochs) for epochs in EPOCHS]


def noise(epochs: int) -> dict[str, Any]:
    """Return standard deviation of the noise on a value of the momentum, root mean square over the steps.

    At mu = 1, for one gradient a step that is no longer than 1: replacing its sample moves it by 2.
    """
    steps = epochs * EPOCH_LENGTH
    tree = MomentumTree(steps, EPOCH_LENGTH, ALPHA)
    momentum = np.tril(ALPHA * (1 - ALPHA) ** np.subtract.outer(np.arange(steps), np.arange(steps)))
    row: dict[str, Any] = {"epochs": epochs, "steps": steps}
    row["algorithm 1"] = root_mean_square(tree.decoder() * tree.noise_stds(2.0, 1.0))
    pattern: dict[str, Any] = {"num_participations": epochs, "min_separation": EPOCH_LENGTH}
    for name, options in (("independent", {}), ("sqrt_toeplitz", {}), ("blt", pattern)):
        mechanism = make_mechanism(name, steps, **options)
        std = mechanism.noise_std(2.0, 1.0, **pattern, pattern="epochs")
        row[name] = std * root_mean_square(momentum @ mechanism.inverse())
    for path in PATHS:
        ways = [2 * min(SMOOTHNESS * path * place / steps, 2.0) for place in range(EPOCH_LENGTH + 1)]
        changes = Changes(2.0, ways[-1], tuple(ways[:-1]))
        trees = ReconstructionTrees(steps, EPOCH_LENGTH, ALPHA, best_gamma(steps, EPOCH_LENGTH, ALPHA, changes))
        row[f"algorithm 2, path {path:g}"] = math.sqrt(trees.mean_variance(trees.noise_stds(changes, 1.0)))
    return row


def kept(epochs: int) -> dict[str, Any]:
    """How many vectors of d values a server's state has, and nodes there are in the trees."""
    steps = epochs * EPOCH_LENGTH
    policy = PrivacyPolicy(
        clip_norm=1.0,
        batch_size=1,
        max_participations=steps,
        mu=1.0,
        mechanism="independent",
        sample_participations=epochs,
        min_separation=EPOCH_LENGTH,
        release_rule="paper",
        trust="trusted-server",
    )
    options: dict[str, Any] = {"num_clients": 1, "clients_per_round": 1, "learning_rate": 1 / steps, "alpha": ALPHA}
    options |= {"policy": policy, "num_rounds": steps, "noise_keys": SimulatedKeys(1, "server")}
    counts: dict[str, Any] = {"nodes": ReconstructionTrees(steps, EPOCH_LENGTH, ALPHA, 0.5).num_nodes}
    for label, strategy in (
        ("algorithm 1", TreeMomentum(**options)),
        ("algorithm 2", ReducedTreeMomentum(smoothness=SMOOTHNESS, **options)),
    ):
        arrays = vars(strategy.rule.init(np.zeros(VALUES), [])).values()
        counts[f"{label} keeps"] = sum(values.size // VALUES for values in arrays if values.dtype == np.float64)
    return counts


def root_mean_square(rows: NDArray[np.float64]) -> float:
    """Of the rows' lengths."""
    return math.sqrt(float((rows**2).sum()) / len(rows))


def table(document: list[dict[str, Any]]) -> str:
    """Return the measurement as Markdown."""
    names = list(document[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in document:
        lines.append(
            "| " + " | ".join(f"{row[n]:.3g}" if isinstance(row[n], float) else f"{row[n]}" for n in names) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    document = measure()
    (ROOT / "docs" / "results" / "momentum.json").write_text(json.dumps(document, indent=2) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
