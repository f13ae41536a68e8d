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
from .smoothness import smoothness


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


@dataclass(frozen=True)
class _Tuned:
    """Constants chosen on held-out training samples (docs/tuning.md), and the rules that carry them to other sizes.

    mu^2-SGD: eta = mu2_rate x mu^mu2_power / T^2, for w moves by eta times a momentum that grows with t.
    Noisy SGD: eta = sgd_rate x mu b sqrt(m / T), for its noise adds up over the rounds; with samples that return P
    times the noise is sqrt(P) times as large.

    Both grow with mu, as long as noise is what limits a step. ``mu2_most`` and ``sgd_most`` are where the curvature
    does: the most that eta L may be (:func:`_largest_step`).
    """

    mu2_clip_norm: float
    mu2_rate: float
    mu2_power: float
    sgd_clip_norm: float
    sgd_rate: float
    diameter: float
    mu2_most: float
    sgd_most: float


_UNTUNED = _Tuned(8.0, 110.0, 0.5, 4.0, 0.0135, 20.0, 60.0, 80.0)
"""For every other task: the rates of MNIST's pixels, and the most careful bounds of all below."""

_TUNED = {
    ("digits", "pixels"): _Tuned(2.0, 58.0, 1.0, 2.0, 0.1, 1000.0, 80.0, 80.0),
    ("mnist", "pixels"): _Tuned(8.0, 110.0, 0.5, 4.0, 0.0135, 20.0, 150.0, 600.0),
    ("mnist", "oriented-gradients"): _Tuned(1.0, 700.0, 1.0, 1.0, 0.15, 1000.0, 60.0, 140.0),
}


_TREE_PATH = 30.0
"""What the normalised steps of private momentum add up to."""

_FEATURE_BOUND = 12.0
"""Of the synthetic(alpha, beta) task with 100 features, whose samples have norms around 10."""


def feature_bound(config: RunConfig) -> float:
    """R of the ``logistic``, ``nonconvex-logistic`` and ``ridge`` models."""
    task = SHUFFLED.get(config.task)
    return config.feature_bound or (_FEATURE_BOUND if task is None else task.feature_bound)


@dataclass(frozen=True)
class ShuffledTask:
    """What jiang-2026 settles for a task, and a public bound on its features.

    Parameters
    ----------
    regularizer : str
    strength : float
        lambda, or C.
    feature_bound : float
        R: no private and no public sample's features are longer, or they are scaled down to it.
    """

    regularizer: Regularizer
    strength: float
    feature_bound: float


SHUFFLED = {
    "mnist-69": ShuffledTask("ball", 10.0, 28.0),
    "cifar10-ridge": ShuffledTask("l2", 0.1, math.sqrt(3072)),
    "crime": ShuffledTask("l2", 0.1, 84.0),
    "compas": ShuffledTask("l1", 0.1, 20.0),
    "credit-card": ShuffledTask("l1", 0.1, 20.0),
}
"""Bounds: pixels are in [0, 1]; the features of Crime too, before public ones are multiplied by their public matrix;
those of the last two tasks have a length of
10 where a sample is typical."""


def regularization(config: RunConfig) -> tuple[Regularizer, float]:
    """Psi and its lambda or radius."""
    task = SHUFFLED.get(config.task)
    if task is None or (config.regularizer and config.regularizer != task.regularizer):
        kind, strength = config.regularizer or "none", config.regularizer_strength
    else:
        kind, strength = task.regularizer, config.regularizer_strength or task.strength
    return kind, strength  # type: ignore[return-value]


def _online(config: RunConfig) -> Hyperparameters:
    if config.model == "logistic":
        return Hyperparameters(
            clip_norm=_FEATURE_BOUND, learning_rate=0.01, diameter=1.0, schedule="uniform", sampling="uniform"
        )
    return Hyperparameters(clip_norm=1.0, learning_rate=0.05, diameter=1.0, schedule="uniform", sampling="uniform")


def _shuffled(config: RunConfig, num_features: int) -> Hyperparameters:
    """The paper's clip, and the largest step that its theorem covers."""
    bound = feature_bound(config)
    smoothness = {"mean": 1.0, "ridge": 2.0 * bound**2, "logistic": bound**2 / 4}.get(config.model, float(num_features))
    return Hyperparameters(10.0, min(0.001, 1.0 / smoothness), 1.0, "uniform", "uniform")


def _practical(config: RunConfig, num_rounds: int, num_features: int) -> Hyperparameters:
    tuned = _TUNED.get((config.task, config.features), _UNTUNED)
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


def _largest_step(config: RunConfig, tuned: _Tuned, num_rounds: int, num_features: int) -> float:
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
