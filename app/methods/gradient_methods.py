"""Methods of one round's gradients or local steps: noisy SGD and ISRL-DP, private momentum, online, shuffled.

Those that correct a gradient over the rounds stand in :mod:`.mu2_methods`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clients.adapters.per_sample_gradients import gradients_at
from ...privacy.accounting.amplification import Amplification
from ...privacy.accounting.noise_plan import epoch_words
from ...privacy.accounting.poisson import poisson_mu
from ...privacy.errors import ConfigurationError
from ...privacy.mechanisms import IndependentNoise
from ...privacy.noise import SimulatedKeys
from ...privacy.release.policy import NO_NOISE, PrivacyPolicy
from ...privacy.release.shuffled_privatizer import ShuffledPolicy
from ...privacy.release.tables import POISSON
from ...privacy.setting import refusal
from ...strategies.baselines import IsrlDp, NoisySGD
from ...strategies.correlated_momentum import MOMENTUM_MECHANISMS, CorrelatedMomentum, Momentum
from ...strategies.online import OnlineFedSGD
from ...strategies.reduced_tree_momentum import ReducedTreeMomentum
from ...strategies.shuffled import PublicEpochs, Regularizer, ShuffledAvg, penalty, private_rounds
from ...strategies.tree_momentum import TreeMomentum
from ..data.loading import public_shard
from ..models.model import Model
from ..settings.registry import known_mechanism, registry
from ..settings.run_config import RunConfig
from .method import BOUNDING, Method, bounding
from .presets import (
    SGD,
    Hyperparameters,
    PaperConstants,
    ResolvedRun,
    image_network_recipe,
    sgd_preset,
    the_task,
    tuned,
    usual_norm,
    usual_smoothness,
    wanted_mu,
)


class NoisySgdMethod(Method, algorithm="noisy-sgd"):
    """Noisy SGD, the baseline of reshef-levy-2025."""

    sentence = "Noisy SGD: fresh noise in every release, the server is not trusted."
    keys = Method.keys | {"strategy.projection-radius", "batch-selection"} | BOUNDING
    presets = ("practical", "paper")
    sums_suffice = True
    on_real_nodes = True
    strategy_type = NoisySGD

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model)
        constants = PaperConstants.of(model)
        variance = constants.sgd_variance(config, model) / config.asked_per_round
        eta = constants.diameter / math.sqrt(num_rounds * (constants.lipschitz**2 + variance))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


class IsrlDpMethod(NoisySgdMethod, algorithm="isrl-dp"):
    """ISRL-DP minibatch SGD, after Lowy and Razaviyayn 2023, on batches that are dealt.

    The "other work" of reshef-levy-2025 is theirs: clients draw every batch anew, in rounds that grow with epsilon.
    """

    sentence = "ISRL-DP minibatch SGD: fresh noise, an average of the iterates, the server is not trusted."
    keys = NoisySgdMethod.keys - {"batch-selection"}
    sums_suffice = False
    on_real_nodes = False
    strategy_type = IsrlDp
    variant = "minibatch"

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        return {**super().strategy_options(problem), "variant": self.variant}

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model)
        constants, spread = PaperConstants.of(model), _spread(config, model)
        eta = min(constants.diameter / (spread * math.sqrt(num_rounds)), 1 / (2 * constants.smoothness))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


class AcceleratedIsrlDpMethod(IsrlDpMethod, algorithm="isrl-dp-accelerated"):
    """ISRL-DP with the accelerated steps of AC-SA."""

    sentence = "ISRL-DP with accelerated steps (AC-SA), the server is not trusted."
    variant = "accelerated"

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset != "paper":
            return sgd_preset(config, num_rounds, model, accelerated=True)
        constants, spread = PaperConstants.of(model), _spread(config, model)
        eta = min(constants.diameter / (spread * (num_rounds + 2) ** 1.5), 1 / (4 * constants.smoothness))
        return Hyperparameters(constants.lipschitz, eta, constants.diameter, "uniform", "balanced")


def _spread(config: RunConfig, model: Model) -> float:
    """Lan 2012 (corollary 1), with the variance of a mean over m clients and the step of AC-SA growing with r."""
    constants = PaperConstants.of(model)
    noise = constants.sgd_variance(config, model, config.passes)
    return math.sqrt((constants.lipschitz**2 / config.batch_size + noise) / config.asked_per_round)


_PATH = 30.0
"""The length of all normalised steps together, and so the furthest that w can come, for pixels."""
_SCORES = 300.0
"""Furthest that the steps move the scores of the longest row, where no constants were chosen."""


class TreeMomentumMethod(Method, algorithm="tree-momentum"):
    """Tree-aggregated momentum with normalised steps (algorithm 1)."""

    sentence = "Tree-aggregated momentum with normalised steps; the server is trusted."
    keys = Method.keys | {"strategy.alpha"} | BOUNDING
    trusted = True
    presets = ("practical", "paper")
    everybody = True
    strategy_type = TreeMomentum

    def mechanism(self, config: RunConfig) -> str:
        # The clients add no noise; the mechanism that may be set is the server's.
        return NO_NOISE if not config.private else "independent"

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        if config.preset == "paper":  # theorem 6
            epoch = max(num_rounds // config.passes, 1)
            eta = 1 / math.sqrt(epoch * num_rounds)
            return Hyperparameters(PaperConstants.of(model).lipschitz, eta, math.inf)
        return self._practical(config, num_rounds, model)

    def _practical(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        chosen = tuned(config)
        if chosen is None:
            bound = usual_norm(config, model)
            return Hyperparameters(SGD.clip * bound, _SCORES / (bound * num_rounds), math.inf)
        return Hyperparameters(chosen.sgd_clip_norm, _PATH / num_rounds, chosen.diameter)

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        return {"alpha": problem.config.alpha}

    def server_noise(self, config: RunConfig) -> str:
        return "tree"


class ReducedTreeMomentumMethod(TreeMomentumMethod, algorithm="reduced-tree-momentum"):
    """Momentum of less sensitivity (algorithm 2)."""

    sentence = "Tree-aggregated momentum of less sensitivity, for smooth losses; the server is trusted."
    # Automatic clipping moves two gradients further apart than they were; it may not.
    keys = TreeMomentumMethod.keys - BOUNDING
    tolerates_dropouts = False
    strategy_type = ReducedTreeMomentum

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        smoothness = float(getattr(problem.model, "smoothness", math.inf))
        return {**super().strategy_options(problem), "smoothness": smoothness}


class CorrelatedMomentumMethod(TreeMomentumMethod, algorithm="correlated-momentum"):
    """Momentum with any correlated noise."""

    sentence = "Momentum with correlated noise of the server, normalised steps; the server is trusted."
    mechanisms = MOMENTUM_MECHANISMS
    default_server_mechanism = "blt"
    strategy_type = CorrelatedMomentum

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        config, options = problem.config, dict(problem.config.mechanism_options)
        mechanism = self.server_noise(config) if config.private else "independent"
        if mechanism == "blt" and config.passes > 1:
            separation = self.policy(problem, max(problem.sizes)).min_separation
            options |= {"num_participations": config.passes, "min_separation": separation}
        return {**super().strategy_options(problem), "mechanism": mechanism, "mechanism_options": options}

    def server_noise(self, config: RunConfig) -> str:
        return known_mechanism(config.mechanism.kind) or self.default_server_mechanism


class TrustedSgdMethod(TreeMomentumMethod, algorithm="trusted-sgd"):
    """Noisy SGD with a trusted server, to compare with: with Poisson batches DP-SGD (Abadi et al. 2016).

    Without them samples are in a fixed order, and the noise is that of plain composition: 3 to 7.3 times as much at the
    same epsilon, in the cells of tran-cutkosky-2022 with 6,000 samples (docs/results.md).
    """

    sentence = "SGD with fresh noise of the server, to compare with; the server is trusted."
    keys = Method.keys | {"batch-selection"} | BOUNDING
    batch_selections = ("", POISSON)
    strategy_type = CorrelatedMomentum

    def usual_rounds(self, config: RunConfig, sizes: Sequence[int], model: Model) -> int:
        if not config.poisson_batches:
            return super().usual_rounds(config, sizes, model)
        return round(max(config.passes, _POISSON_PASSES) / _rate(config, sizes))

    def releases_of(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> tuple[float, str]:
        if not config.poisson_batches:
            return super().releases_of(config, samples, sizes)
        return config.max_participations or math.inf, f"max-participations = {config.max_participations}"

    def calibrated(self, config: RunConfig, num_rounds: int, sizes: Sequence[int]) -> RunConfig:
        if not (config.poisson_batches and config.epsilon):
            return config
        rounds = min(num_rounds, config.max_participations or num_rounds)
        # The mu is for noise without resolution; what resolution shows is left room for.
        mu = poisson_mu(0.9995 * config.epsilon, _rate(config, sizes), rounds, 0.99 * config.delta)
        return replace(config, mu=mu, epsilon=0.0)

    def policy(self, problem: ResolvedRun, samples: int) -> PrivacyPolicy:
        config = problem.config
        if not config.poisson_batches:
            return super().policy(problem, samples)
        return self.client_policy(
            clip_norm=problem.values.clip_norm,
            batch_size=1,
            max_participations=config.max_participations or problem.num_rounds,
            mu=config.mu,
            delta=config.delta,
            mechanism=self.mechanism(config),
            noise_quality=config.noise_quality,
            batch_selection=POISSON,
            sampling_rate=_rate(config, problem.sizes),
            **bounding(config, self.keys),
        )

    def server_amplification(self, problem: ResolvedRun) -> Amplification | None:
        if not problem.config.poisson_batches:
            return None
        stream = Momentum(1.0, IndependentNoise(problem.num_rounds))
        stream.bind(self._policy_of_all(problem), problem.num_rounds, SimulatedKeys(0, "nobody"))
        return stream.amplification(problem.model.num_parameters)

    def _practical(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        return sgd_preset(config, num_rounds, model)

    def settled(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> Hyperparameters:
        """Clip and step in units of R with Poisson batches: all steps together are the shorter the more noise."""
        if not config.poisson_batches or config.preset == "paper":
            return super().settled(config, num_rounds, model, sizes)
        bound = usual_norm(config, model)
        clip_norm, noise = SGD.clip * bound, _rate(config, sizes) * wanted_mu(config)
        if recipe := image_network_recipe(config, model, noise * sum(sizes)):
            return Hyperparameters(recipe.clip, recipe.distance / (recipe.clip * num_rounds), math.inf)
        travel = min(_POISSON_TRAVEL * math.sqrt(noise), _LONGEST_TRAVEL)
        return Hyperparameters(clip_norm, travel / (clip_norm * bound * num_rounds), math.inf)

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        return {"alpha": 1.0, "normalised": False}

    def server_noise(self, config: RunConfig) -> str:
        return "fresh"


_POISSON_PASSES, _POISSON_TRAVEL, _LONGEST_TRAVEL = 10, 680.0, 960.0
"""Passes of Poisson batches on average where no more are set, eta S R of all rounds together over the root of q mu, and
the longest of all rounds (docs/tuning.md)."""


def _rate(config: RunConfig, sizes: Sequence[int]) -> float:
    """Return q with which a Poisson batch has b samples of a client on average."""
    return min(config.batch_size * len(sizes) / sum(sizes), 1.0)


_UPDATE_CLIP, _UPDATE_TRAVEL = 0.1, 7.5
"""Defaults for whole updates: S / R, since gradients along the steps hardly agree, and eta L tau."""


class OnlineMethod(Method, algorithm="online"):
    """Online federated SGD: local steps on samples as they come."""

    sentence = "Locally private online learning: clients take local steps, the server is not trusted."
    keys = Method.keys | {"clip-unit", "strategy.global-learning-rate", "strategy.release-rule"}
    local_steps = True
    has_regret = True
    centres = False
    sums_suffice = True
    on_real_nodes = True
    strategy_type = OnlineFedSGD

    def preset(self, config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
        kind, bound = registry("model")[config.model], usual_norm(config, model)
        longest = 1 / usual_smoothness(config, model)
        if config.clip_unit == "contractive":
            return Hyperparameters(SGD.clip * bound, longest)
        # Beyond 1 / L steps on scores still lead somewhere, and those on squares nowhere.
        eta = _UPDATE_TRAVEL / config.batch_size * longest
        return Hyperparameters(_UPDATE_CLIP * bound, eta if kind.scores else min(eta, longest))

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        config = problem.config
        return {"local_steps": config.batch_size, "global_learning_rate": config.global_learning_rate}


_ROUNDING = 1e-12
_EPOCH_TRAVEL = 30.0
"""eta L of all steps of an epoch together."""


def regularization(config: RunConfig) -> tuple[Regularizer, float]:
    """Psi and its lambda or radius: the configuration's, or the task's."""
    task = the_task(config)
    kind = config.regularizer or task.regularizer
    strength = task.regularizer_strength if kind == task.regularizer else 0.0
    return kind, config.regularizer_strength or strength  # type: ignore[return-value]


class ShuffledMethod(Method, algorithm="shuffled"):
    """Shuffled gradient methods whose intermediate iterates stay on the client."""

    sentence = "Shuffled gradients: noise on every step of an epoch on the client, public samples on either side."
    keys = frozenset(
        {
            *("strategy.variant", "strategy.order", "strategy.private-share", "strategy.public-samples"),
            *("strategy.regularizer", "strategy.regularizer-strength", "strategy.accounting"),
        }
    )
    uses_public = True
    centres = False
    evaluates = False
    strategy_type = ShuffledAvg

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if the_task(config).public and config.public_samples:
            raise refusal(
                "strategy.public-samples", "0 for a task with public samples of its own", config.public_samples
            )

    def settled(self, config: RunConfig, num_rounds: int, model: Model, sizes: Sequence[int]) -> Hyperparameters:
        """Clip and step in units of R; no longer a step than the paper's theorem covers."""
        share = min(_EPOCH_TRAVEL / max(sizes), 1.0)
        return Hyperparameters(SGD.clip * usual_norm(config, model), share / usual_smoothness(config, model))

    def rounds_of_a_pass(self, config: RunConfig, sizes: Sequence[int]) -> int:
        return 1  # an epoch

    def asked_rounds(self, config: RunConfig, num_rounds: int) -> range:
        return private_rounds(config.variant, num_rounds, config.private_share)  # type: ignore[arg-type]

    def releases_of(self, config: RunConfig, samples: int, sizes: Sequence[int]) -> tuple[float, str]:
        # An epoch takes all samples, and they return.
        return config.max_participations or math.inf, f"max-participations = {config.max_participations}"

    def policy(self, problem: ResolvedRun, samples: int) -> ShuffledPolicy:
        config, private = problem.config, samples
        if config.variant == "interleaved":
            private = max(round(config.private_share * samples), 1)
        asked = self.asked_rounds(config, problem.num_rounds)
        return ShuffledPolicy(
            clip_norm=problem.values.clip_norm,
            batch_size=samples,
            max_participations=config.max_participations or max(len(asked), 1),
            mu=config.mu,
            delta=config.delta,
            private_steps=private,
            public_steps=samples - private,
            accounting=config.accounting,  # type: ignore[arg-type]
            noise_quality=config.noise_quality,  # type: ignore[arg-type]
            mechanism=self.mechanism(config),
        )

    def client_options(self, problem: ResolvedRun, client: int) -> Mapping[str, Any]:
        policy = self.policy(problem, problem.sizes[client])
        return {
            "learning_rate": problem.values.learning_rate,
            "public": public_shard(problem.data, client * policy.public_steps),
            "order": problem.config.order,
            "order_seed": problem.order_seed(client),
        }

    def strategy_options(self, problem: ResolvedRun) -> Mapping[str, Any]:
        config, steps, model = problem.config, max(problem.sizes), problem.model
        rounds, epochs = self.asked_rounds(config, problem.num_rounds), None
        if len(rounds) < problem.num_rounds:
            shard = public_shard(problem.data, 0)
            if shard is None or len(shard) < steps:
                raise ConfigurationError(
                    f"Expected {steps} public samples, an epoch of a silo, for variant {config.variant!r}, got "
                    f"{0 if shard is None else len(shard)}: set strategy.public-samples, or use a task that has them.",
                    kind="mismatch",
                    setting="strategy.public-samples",
                )
            public = shard
            epochs = PublicEpochs(
                lambda point, i: gradients_at(model, point[None], public[i : i + 1])[0], steps, problem.values.clip_norm
            )
        kind, strength = regularization(config)
        return {
            "steps_per_epoch": steps,
            "regularizer": kind,
            "strength": strength,
            "rounds": rounds,
            "public": epochs,
        }

    def brief_words(self, policy: PrivacyPolicy) -> str:
        return epoch_words(policy.accounting_used) if isinstance(policy, ShuffledPolicy) else policy.words

    def objective(self, problem: ResolvedRun, parameters: Sequence[NDArray[Any]], loss: float) -> float:
        kind, strength = regularization(problem.config)
        return loss + sum(float(penalty(kind, np.ravel(part), strength)) for part in parameters)

    def sweeps(self, config: RunConfig) -> bool:
        alone = config.num_clients == 1 and not config.lost_replies and config.max_participations == 0
        return alone and registry("model")[config.model].sweeps(config)

    def covers(self, config: RunConfig, prepare: Callable[[RunConfig], ResolvedRun]) -> bool:
        """Amplification needs eta <= 1 / L*, plain composition nothing."""
        if config.variant != "interleaved" or config.accounting != "amplified" or not config.private:
            return True
        problem = prepare(config)
        smoothness = float(getattr(problem.model, "smoothness", math.inf))
        return problem.values.learning_rate * smoothness <= 1.0 + _ROUNDING
