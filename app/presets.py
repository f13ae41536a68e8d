"""Presets: clip, step, ball and schedule where the run configuration leaves them open.

``paper`` uses the papers' constants for softmax regression on inputs in [0, 1] (ALGORITHMS 2.3): reshef-levy-2024 with
full participation, reshef-levy-2025 with partial. ``practical`` gives far better accuracy at the same privacy; its
values were chosen on 10,000 held-out training images (docs/tuning.md), never on test data. A search for such values on
private data would itself cost privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..strategies import Regularizer
from .config import BASELINES, MOMENTUM, RunConfig
from .registry import registry
from .smoothness import smoothness
from .tasks.base import UNTUNED, Tuned


@dataclass(frozen=True)
class Hyperparameters:
    """What a preset settles.

    Parameters
    ----------
    clip_norm : float
        S.
    learning_rate : float
        eta.
    diameter : float
        D.
    schedule : str
        Noise schedule of the cancelling mechanism.
    sampling : str
        How the machines of a round are drawn.
    """

    clip_norm: float
    learning_rate: float
    diameter: float
    schedule: str
    sampling: str


def hyperparameters(config: RunConfig, num_rounds: int, num_features: int, num_parameters: int) -> Hyperparameters:
    """The preset's values, with those the run configuration sets in their place.

    Parameters
    ----------
    config : RunConfig
        Values above zero (or a schedule) are taken as they are.
    num_rounds : int
        T.
    num_features : int
        Values of one sample, without the bias.
    num_parameters : int
        d.
    """
    if config.strategy == "online":
        preset = _online(config)
    elif config.strategy == "shuffled":
        preset = _shuffled(config, num_features)
    elif config.preset == "paper":
        preset = _paper(config, num_rounds, num_features, num_parameters)
    else:
        preset = _practical(config, num_rounds, num_features)
    return Hyperparameters(
        clip_norm=config.clip_norm or preset.clip_norm,
        learning_rate=config.learning_rate or preset.learning_rate,
        diameter=config.diameter or preset.diameter,
        schedule=config.schedule or preset.schedule,
        sampling=config.sampling or preset.sampling,
    )


def _mu(config: RunConfig) -> float:
    """The mu that a step is for: without noise, the limit of large ones."""
    return config.mu if config.private else math.inf


def _paper(config: RunConfig, num_rounds: int, num_features: int, num_parameters: int) -> Hyperparameters:
    inputs = num_features + 1  # the bias is one more input that is always 1
    lipschitz, smoothness, diameter = math.sqrt(2 * inputs), inputs / 2, 0.1
    clip_norm = lipschitz + 2 * smoothness * diameter
    machines, asked, mu = config.num_clients, config.clients_per_round, _mu(config)
    if config.strategy == "noisy-sgd":
        clip_norm = lipschitz
        variance = (2 * lipschitz / (config.batch_size * mu)) ** 2 * num_parameters / asked
        eta = diameter / math.sqrt(num_rounds * (lipschitz**2 + variance))
        return Hyperparameters(clip_norm, eta, diameter, "uniform", "balanced")
    if config.strategy in ("isrl-dp", "isrl-dp-accelerated"):
        # Lan 2012 (corollary 1), with the variance of a mean over m machines and the step of AC-SA growing with r.
        noise = (2 * lipschitz / (config.batch_size * mu)) ** 2 * config.passes * num_parameters
        spread = math.sqrt((lipschitz**2 / config.batch_size + noise) / asked)
        if config.strategy == "isrl-dp":
            eta = min(diameter / (spread * math.sqrt(num_rounds)), 1 / (2 * smoothness))
        else:
            eta = min(diameter / (spread * (num_rounds + 2) ** 1.5), 1 / (4 * smoothness))
        return Hyperparameters(lipschitz, eta, diameter, "uniform", "balanced")
    if config.strategy in MOMENTUM:  # theorem 6
        epoch = max(num_rounds // config.passes, 1)
        return Hyperparameters(lipschitz, 1 / math.sqrt(epoch * num_rounds), math.inf, "uniform", "uniform")
    full = asked == machines
    common = mu * diameter / (2 * clip_norm * num_rounds)
    if config.strategy == "trusted-mu2":
        eta = common * asked / math.sqrt(num_parameters)
        smooth = 1 / (4 * smoothness * num_rounds)
    elif full:
        eta = common * math.sqrt(machines) / math.sqrt(num_parameters)
        smooth = 1 / (4 * smoothness * num_rounds)
    else:
        eta = common * asked / math.sqrt(2 * machines * num_parameters * (1 + math.log(num_rounds)))
        smooth = 1 / (8 * smoothness * num_rounds)
    eta, schedule = min(eta, smooth), "uniform" if full else "paper"
    if config.strategy == "delayed-momentum":  # appendix G: everything tau = M / m times as large, averaged over m of M
        delay = machines / asked
        clip_norm, eta = clip_norm * delay, eta / math.sqrt(delay)
    return Hyperparameters(clip_norm, eta, diameter, schedule, "balanced")


_TREE_PATH = 30.0
"""What the normalised steps of private momentum add up to."""


def feature_bound(config: RunConfig) -> float:
    """R of the ``logistic``, ``nonconvex-logistic`` and ``ridge`` models."""
    return config.feature_bound or registry("task")[config.task].feature_bound


def regularization(config: RunConfig) -> tuple[Regularizer, float]:
    """Psi and its lambda or radius."""
    task = registry("task")[config.task]
    if config.regularizer and config.regularizer != task.regularizer:
        return config.regularizer, config.regularizer_strength  # type: ignore[return-value]
    return task.regularizer, config.regularizer_strength or task.regularizer_strength


def _online(config: RunConfig) -> Hyperparameters:
    chosen = registry("model")[config.model].online
    return Hyperparameters(chosen.clip_norm, chosen.learning_rate, 1.0, "uniform", "uniform")


def _shuffled(config: RunConfig, num_features: int) -> Hyperparameters:
    """The paper's clip, and the largest step that its theorem covers."""
    model = registry("model")[config.model]
    declared = model.declared_smoothness(num_features, feature_bound(config)) if model.convex else None
    smoothness = float(num_features) if declared is None else declared
    return Hyperparameters(10.0, min(0.001, 1.0 / smoothness), 1.0, "uniform", "uniform")


def _practical(config: RunConfig, num_rounds: int, num_features: int) -> Hyperparameters:
    tuned = registry("task")[config.task].tuned.get(config.features, UNTUNED)
    most = _largest_step(config, tuned, num_rounds, num_features)
    if config.strategy in (*BASELINES, "trusted-sgd"):
        share = math.sqrt(config.clients_per_round / (num_rounds * config.passes))
        eta = tuned.sgd_rate * _mu(config) * config.batch_size * share
        if config.strategy == "isrl-dp-accelerated":
            eta *= 2 / num_rounds  # the mean of r eta is that eta
        return Hyperparameters(tuned.sgd_clip_norm, min(eta, most), tuned.diameter, "uniform", "uniform")
    if config.strategy in MOMENTUM:  # steps of one length, so that w goes far enough in all
        return Hyperparameters(tuned.sgd_clip_norm, _TREE_PATH / num_rounds, tuned.diameter, "uniform", "uniform")
    eta, clip_norm = tuned.mu2_rate * _mu(config) ** tuned.mu2_power / num_rounds**2, tuned.mu2_clip_norm
    eta = min(eta, most)
    if config.strategy == "delayed-momentum":
        delay = config.num_clients / config.clients_per_round
        clip_norm, eta = clip_norm * delay, eta / math.sqrt(delay)
    return Hyperparameters(clip_norm, eta, tuned.diameter, "uniform", "uniform")


_SAMPLING = 16.0
"""How soon the sampling of a round's batches bounds a step; see :func:`_largest_step`."""


def _largest_step(config: RunConfig, tuned: Tuned, num_rounds: int, num_features: int) -> float:
    """The largest step that makes sense without any noise; no mu leads beyond it.

    Gradient descent on a loss of curvature lambda overshoots beyond eta = 2 / lambda, and so does mu^2-SGD: without
    noise q_t = t grad f(x_t), and x moves by 2 / (t + 2) of what w does, so a step is 2 eta long and the momentum bears
    4 / lambda. The same holds of the accelerated ISRL-DP, whose steps r eta are averaged in with 2 / (r + 1); as among
    the paper's constants, its bound is half of that of the plain one. L bounds the curvature of one sample's loss where
    it is steepest. The mean over samples, clipped, is far flatter; how much is the multiple of 1 / L in ``tuned``.

    The corrected gradients of mu^2-SGD and the growing steps of the accelerated ISRL-DP also add up what the samples of
    a round, b m of them, have in error: like sqrt(T) in q and T^1.5 in w, over sqrt(b m). So where there are many
    rounds of few samples, the bound is 16 sqrt(b m) / T^1.5 of the above; with b m = T that is the papers' 1 / T.
    """
    steepest = smoothness(config, num_features, feature_bound(config))
    if config.strategy in ("noisy-sgd", "isrl-dp", "trusted-sgd"):
        return tuned.sgd_most / steepest
    samples = config.batch_size * config.clients_per_round
    errors = min(1.0, _SAMPLING * math.sqrt(samples) / num_rounds**1.5)
    most = tuned.sgd_most / 2 if config.strategy == "isrl-dp-accelerated" else tuned.mu2_most
    return errors * most / steepest
