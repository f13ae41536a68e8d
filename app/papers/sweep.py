"""Many runs of shuffled gradients at once: all variants, epsilons and step sizes of a figure, one seed at a time.

jiang-2026 chooses a step size for every curve from a grid of eighteen, so a figure takes some 1,600 runs. The runs of
one seed have the same data, order and noise (a function of seed, client and epoch alone) and differ in their iterates.
Here the iterates are the rows of one matrix and go through an epoch together. The result is that of the clients and
the server one by one, up to rounding, which a test holds. A client would refuse a step beyond the theorem; here it is
computed all the same, and marked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy.accounting.loss import Loss
from ...privacy.errors import ConfigurationError
from ...privacy.noise import SimulatedKeys, row_key
from ...privacy.release.shuffled_privatizer import epoch_order, step_noise
from ...strategies.shuffled import penalty, proximal
from ..data.loading import public_shard
from ..methods import METHODS
from ..methods.gradient_methods import regularization
from ..models.linear import LinearModel, MeanEstimation, RidgeRegression
from ..runs.experiment import Experiment, prepare
from ..settings.run_config import RunConfig

Matrix = NDArray[np.float64]

# Steps whose margins are computed together.
_BLOCK = 64
# Fewer steps where products of 1 - eta are divided by, so that none of them is below 2^-32.
_MEAN_BLOCK = 32
_OPTIMUM_STEPS = 20_000

CURVES = frozenset({"loss"})
"""Curves that a sweep keeps of its runs."""


def sweep_of(config: RunConfig) -> RunConfig:
    """Return a key: runs that go together have the same."""
    return replace(config, variant="interleaved", mu=1.0, learning_rate=1.0)


@dataclass(frozen=True)
class _Columns:
    """Settings of the runs, one entry a run."""

    rates: Matrix
    noise_stds: Matrix
    rounds: list[range]
    mixed: NDArray[np.bool_]


def run_sweep(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Return the figures of several runs and their objectives after every epoch, as plain values, in their order.

    Epsilon and mu are None for a run that is not covered (:meth:`~murmurfl.app.methods.Method.covers`).
    """
    if len({sweep_of(config) for config in configs}) != 1 or not all(
        METHODS[config.strategy].sweeps(config) for config in configs
    ):
        raise ConfigurationError(
            "Expected runs of 'shuffled' that differ in variant, mu and learning rate only.",
            kind="mismatch",
            setting="configs",
        )
    started = time.perf_counter()
    experiments = [prepare(config) for config in configs]
    first = experiments[0]
    policies = [experiment.policy(0) for experiment in experiments]
    columns = _Columns(
        np.array([experiment.values.learning_rate for experiment in experiments]),
        np.array([policy.plan(first.model.num_parameters).noise_std for policy in policies]),
        [experiment.asked_rounds for experiment in experiments],
        np.array([config.variant == "interleaved" for config in configs]),
    )
    ends, objectives = _epochs(first, columns)
    seconds = (time.perf_counter() - started) / len(configs)
    return [
        {**_figures(experiment, ends[i], objectives[i]), "seconds": seconds} for i, experiment in enumerate(experiments)
    ]


def _figures(experiment: Experiment, end: Matrix, objectives: Matrix) -> dict[str, Any]:
    """Return the result figures of a run that ended at a point."""
    config, data = experiment.config, experiment.data
    _, accuracy = experiment.model.evaluate([end], (data.test_features, data.test_labels))
    loss = experiment.loss() if experiment.method.covers(config, prepare) else Loss.of(math.inf)
    return {
        "accuracy": None if math.isnan(accuracy) else accuracy,
        "loss": float(objectives[-1]),
        **loss.document(config.delta),
        "delta": config.delta,
        "releases": len(experiment.asked_rounds),
        "refusals": 0,
        "lost_replies": 0,
        "curves": {
            "loss": {
                "rounds": list(range(1, experiment.num_rounds + 1)),
                "values": [float(f"{value:.6g}") for value in objectives],
            }
        },
    }


def _epochs(experiment: Experiment, columns: _Columns) -> tuple[Matrix, Matrix]:
    """Return where the runs end, shape (runs, d), and their objectives after every epoch, shape (runs, K)."""
    config, shard, model = experiment.config, experiment.shards[0], experiment.model
    samples, public = len(shard), public_shard(experiment.data, 0)
    own = _as_model_takes(experiment, shard[:])
    others = own if public is None else _as_model_takes(experiment, public[:])
    private_steps = max(round(config.private_share * samples), 1)
    keys, order_seed = SimulatedKeys(config.seed, "0"), experiment.order_seed(0)
    kind, strength = regularization(config)
    weights = (columns.rates * samples)[:, None]
    objective = _objective(experiment)
    iterates = np.zeros((len(columns.rates), model.num_parameters))
    objectives = np.empty((len(columns.rates), experiment.num_rounds))
    for epoch in range(1, experiment.num_rounds + 1):
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, rounds in enumerate(columns.rounds):
            release = epoch - rounds.start + 1 if epoch in rounds else 0
            groups.setdefault((release, bool(release and columns.mixed[i])), []).append(i)
        noise: dict[int, Matrix] = {}
        for (release, mixed), chosen in groups.items():
            if not release:
                sequence = tuple(part[:samples] for part in others)
            else:
                order = epoch_order(config.order, samples, order_seed, release)  # type: ignore[arg-type]
                order = order[:private_steps] if mixed else order
                rest = samples - len(order)
                sequence = tuple(np.concatenate([a[order], b[:rest]]) for a, b in zip(own, others, strict=True))
            if release and release not in noise:
                key = row_key(keys.secret_key, keys.nonce(experiment.session, release))
                normals = step_noise(key, samples, model.num_parameters, 1.0, config.noise_quality)  # type: ignore[arg-type]
                noise[release] = np.stack(list(normals))
            stds = columns.noise_stds[chosen] if release else np.zeros(len(chosen))
            settings = noise.get(release), columns.rates[chosen], stds, experiment.values.clip_norm
            if isinstance(model, LinearModel):
                iterates[chosen] = _linear_epoch(model, iterates[chosen], sequence, *settings)
            else:
                iterates[chosen] = _mean_epoch(iterates[chosen], sequence[0], *settings)
        iterates = proximal(kind, iterates, strength, weights)  # type: ignore[arg-type]
        objectives[:, epoch - 1] = objective(iterates)
    return iterates, objectives


def _linear_epoch(
    model: LinearModel,
    iterates: Matrix,
    sequence: tuple[Matrix, ...],
    normals: Matrix | None,
    rates: Matrix,
    noise_stds: Matrix,
    clip_norm: float,
) -> Matrix:
    """Return a gradient is a slope times its features, so that within a block only margins need be kept up to date."""
    features, labels = sequence
    iterates = iterates.copy()
    norms = np.linalg.norm(features, axis=1)
    limits = clip_norm / np.where(norms > 0, norms, 1.0)
    spread = rates * noise_stds
    for start in range(0, len(labels), _BLOCK):
        block = features[start : start + _BLOCK]
        margins = block @ iterates.T
        if normals is not None:
            noise = normals[start : start + _BLOCK]
            margins -= np.tril(block @ noise.T, -1).sum(axis=1)[:, None] * spread
            iterates -= spread[:, None] * noise.sum(axis=0)
        gram = block @ block.T
        moves = np.zeros_like(margins)
        for i in range(len(block)):
            margin = margins[i] - gram[i, :i] @ moves[:i]
            limit = limits[start + i]
            moves[i] = rates * np.clip(model.slopes(margin, labels[start + i]), -limit, limit)
        iterates -= moves.T @ block
    return iterates


def _mean_epoch(
    iterates: Matrix, features: Matrix, normals: Matrix | None, rates: Matrix, noise_stds: Matrix, clip_norm: float
) -> Matrix:
    """Return an iterate is a combination of the block's start, samples and noise, so that only inner products are kept.

    With m_i the step times the clipping's scale, x_{i+1} = (1 - m_i) x_i + m_i q_i - s z_i, that is
    x_i = D_i (x_0 + sum_{j<i} (m_j q_j - s z_j) / D_{j+1}) with D_i the product of 1 - m_j over j < i.
    """
    spread = rates * noise_stds
    for start in range(0, len(features), _MEAN_BLOCK):
        block = features[start : start + _MEAN_BLOCK]
        count = len(block)
        parts = block if normals is None else np.concatenate([block, normals[start : start + count]])
        gram, start_products = parts @ parts.T, parts @ iterates.T
        weights = np.zeros_like(start_products)
        product, squares = np.ones(len(rates)), np.einsum("ij,ij->i", iterates, iterates)
        for i in range(count):
            target = product * (start_products[i] + gram[i] @ weights)
            distance = np.sqrt(np.maximum(squares - 2 * target + gram[i, i], 1e-300))
            move = rates * np.minimum(1.0, clip_norm / distance)
            kept = 1 - move
            squares = kept * (kept * squares + 2 * move * target) + move * move * gram[i, i]
            if normals is not None:
                j = count + i
                other = product * (start_products[j] + gram[j] @ weights)
                squares += spread * (spread * gram[j, j] - 2 * (kept * other + move * gram[i, j]))
                weights[j] = -spread / (product * kept)
            product = product * kept
            weights[i] = move / product
        iterates = product[:, None] * (iterates + weights.T @ parts)
    return iterates


def _as_model_takes(experiment: Experiment, samples: tuple[NDArray[Any], NDArray[Any]]) -> tuple[Matrix, Matrix]:
    features, labels = np.asarray(samples[0], dtype=np.float64), np.asarray(samples[1])
    model = experiment.model
    return (model.bounded(features) if isinstance(model, LinearModel) else features), labels


def _objective(experiment: Experiment) -> Callable[[Matrix], Matrix]:
    """G(x; D) of points, one a row: the loss on the evaluation samples and the regulariser."""
    kind, strength = regularization(experiment.config)
    model, task = experiment.model, experiment.data
    features, labels = _as_model_takes(experiment, (task.test_features, task.test_labels))
    if isinstance(model, LinearModel):
        return lambda points: model.losses(points @ features.T, labels).mean(axis=1) + penalty(kind, points, strength)
    centre, squares = features.mean(axis=0), float(np.einsum("ij,ij->", features, features)) / len(features)
    return lambda points: (
        0.5 * np.square(points).sum(axis=1) - points @ centre + 0.5 * squares + penalty(kind, points, strength)
    )


def optimum(config: RunConfig) -> float:
    """Return the least objective on the evaluation samples: what the excess risk is measured from."""
    return _optimum(sweep_of(replace(config, seed=1, private_share=0.5, order="RR")))


@lru_cache(maxsize=16)
def _optimum(config: RunConfig) -> float:
    experiment = prepare(config)
    kind, strength = regularization(config)
    model, task = experiment.model, experiment.data
    features, labels = _as_model_takes(experiment, (task.test_features, task.test_labels))
    if isinstance(model, MeanEstimation) and kind in ("ball", "none"):
        point = proximal(kind, np.asarray(features.mean(axis=0), dtype=np.float64), strength, 1.0)
    elif isinstance(model, RidgeRegression) and kind == "l2":
        gram = 2 * features.T @ features / len(labels) + strength * np.eye(features.shape[1])
        point = np.asarray(np.linalg.solve(gram, 2 * features.T @ labels / len(labels)), dtype=np.float64)
    elif isinstance(model, LinearModel) and kind in ("l1", "none"):
        point = _accelerated(model, features, labels, strength if kind == "l1" else 0.0)
    else:
        raise ConfigurationError(
            f"Expected one of the paper's problems, got {config.model!r} with {kind!r}.",
            kind="unknown-name",
            setting="model",
            got=config.model,
        )
    return float(_objective(experiment)(point[None])[0])


def _accelerated(model: LinearModel, features: Matrix, labels: NDArray[Any], strength: float) -> Matrix:
    """FISTA (Beck and Teboulle 2009), until nothing moves."""
    curvature = model.smoothness * float(np.linalg.norm(features, 2)) ** 2 / len(labels) / model.feature_bound**2
    point = ahead = np.zeros(features.shape[1])
    momentum = 1.0
    for _ in range(_OPTIMUM_STEPS):
        gradient = model.slopes(features @ ahead, labels) @ features / len(labels)
        following = proximal("l1", ahead - gradient / curvature, strength, 1.0 / curvature)
        growth = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = following + (momentum - 1) / growth * (following - point)
        if np.array_equal(following, point):
            break
        point, momentum = following, growth
    return point
