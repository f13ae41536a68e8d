"""A run worked out for its method, and the presets: the papers' constants, the tuned ones, and how long a step may be.

``paper`` uses the papers' constants for softmax regression on inputs in [0, 1] (ALGORITHMS 2.3): reshef-levy-2024 with
full participation, reshef-levy-2025 with partial. ``practical`` gives far better accuracy at the same privacy; its
values were chosen on 10,000 held-out training images (docs/tuning.md), never on test data. A search for such values on
private data would itself cost privacy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from ...clients.algorithms import MU2, MU2_ROUNDS, SGD, Scale
from ...privacy.errors import ConfigurationError
from ...privacy.noise import derived_seed
from ...privacy.sums.roster import Roster
from ...strategies.sums.secure_aggregation import SecureAggregation
from ..data.partition import shard_sizes
from ..data.task import SYNTHETIC_FEATURE_BOUND, Dataset, Shard, Task, Tuned
from ..models.model import Model, Recipe
from ..settings.registry import registry
from ..settings.run_config import SECURE, RunConfig, helper_names, is_additive, is_centred
from .queries import RUN_QUERIES, shares, trained_config, trained_samples

_FOR_EVER = 2**31
"""Rounds in which helpers are waited for, where that is never given up."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that a preset settles where the run configuration leaves them open.

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
        How the clients of a round are drawn.
    """

    clip_norm: float
    learning_rate: float
    diameter: float = 1.0
    schedule: str = "uniform"
    sampling: str = "uniform"

    def overridden(self, config: RunConfig) -> Hyperparameters:
        """Return these values, with those a run configuration sets in their place."""
        names = [field.name for field in fields(self) if field.name != "diameter"]
        given = {"diameter": 2 * config.projection_radius, **{name: getattr(config, name) for name in names}}
        return replace(self, **{name: value for name, value in given.items() if value})


@dataclass(frozen=True)
class ResolvedRun:
    """A run configuration worked out on its data.

    Parameters
    ----------
    shards : sequence of Shard
        One a client, in the order of their names.
    num_rounds : int
        T.
    values : Hyperparameters
        Clip, step, ball and schedule.
    """

    config: RunConfig
    data: Dataset
    shards: Sequence[Shard]
    model: Model
    num_rounds: int
    values: Hyperparameters
    fewest: int = 0  # samples that every client has at least, whatever the shards say: real ones state what they have

    @cached_property
    def sizes(self) -> list[int]:
        """Samples that each client trains on: all but those that are set aside."""
        sizes = shard_sizes(self.shards, partial(trained_samples, self.config))
        return [max(size, self.fewest) for size in sizes] if self.fewest else sizes

    @cached_property
    def session(self) -> str:
        """The session's name, which in simulation depends on the seed alone.

        Noise is a function of seed, client and release. So two runs with one seed differ by what was changed between
        them and not by their noise. Every run has ledgers of its own.
        """
        return hashlib.sha256(f"seed {self.config.seed}".encode()).hexdigest()[:32]

    def query_session(self, name: str) -> str:
        """Return the session's name of a query, in simulation."""
        return hashlib.sha256(f"{name}, seed {self.config.seed}".encode()).hexdigest()[:32]

    @property
    def trained_on(self) -> int:
        """Samples that all clients train on."""
        return sum(self.sizes)

    @property
    def sum_mu(self) -> float:
        """The mu of the noise in a sum over all clients, however much of it each of them adds."""
        trusted = registry("strategy")[self.config.strategy].trusted
        return wanted_mu(self.config) / (1.0 if trusted else math.sqrt(self.config.asked_per_round))

    @cached_property
    def is_centred(self) -> bool:
        """Whether clients release the mean of their features first."""
        return is_centred(self.config)

    @property
    def trains_on_values(self) -> bool:
        """Whether samples are values of a table's columns, of which clients make additive features."""
        return is_additive(self.config)

    @cached_property
    def trained(self) -> ResolvedRun:
        """The training alone, with the mu that queries leave for it."""
        if not shares(self.config):
            return self
        parts = (self.data, self.shards, self.model, self.num_rounds, self.values, self.fewest)
        return ResolvedRun(trained_config(self.config), *parts)

    @property
    def uses_beside(self) -> int:
        """The number of queries that a training sample is in."""
        return sum(not self.config.held_out or RUN_QUERIES[name].of_trained for name in shares(self.config))

    @cached_property
    def roster(self) -> Roster:
        """The clients and helpers of a simulation under secure aggregation; their keys are the seed's.

        Notes
        -----
        Whoever knows the seed knows every key. Real clients have rosters of their own.
        """
        if not self.config.secure:
            raise ConfigurationError(
                f"Expected trust = {SECURE!r} for a roster, got {self.config.trust_model!r}.",
                kind="conflict",
                setting="trust",
                got=self.config.trust_model,
            )
        clients = tuple(str(client) for client in range(self.config.num_clients))
        return Roster.simulated(self.config.seed, clients, helper_names(self.config.summing.helpers))

    def summation(self) -> dict[str, SecureAggregation]:
        """Return the options of a strategy under secure aggregation; empty under another trust model.

        Which roster it is helpers say: without messages none is made, of however many clients.
        """
        config = self.config
        if not config.secure:
            return {}
        summing = config.summing
        secure_aggregation = SecureAggregation(
            min_cohort=config.sums.min_cohort,
            helpers=summing.helpers,
            patience=config.give_up_after or _FOR_EVER,
            max_byzantine=summing.max_byzantine,
            max_failed_aggregations=summing.max_failed_aggregations,
            max_noise=summing.max_noise,
        )
        return {"secure_aggregation": secure_aggregation}

    def order_seed(self, client: int) -> int:
        """Return the seed of a client's orders of samples, where a method shuffles them."""
        return derived_seed("order of a silo", self.config.seed, client)


Resolve = Callable[[RunConfig, Dataset, Sequence[Any]], ResolvedRun]
"""Works a run configuration out on data (:func:`~murmurfl.app.runs.experiment.resolve`)."""


@dataclass(frozen=True)
class PaperConstants:
    """The papers' constants of softmax regression on inputs in [0, 1].

    Parameters
    ----------
    lipschitz, smoothness, diameter : float
        G, L and D.
    """

    lipschitz: float
    smoothness: float
    diameter: float = 0.1

    @classmethod
    def of(cls, model: Model) -> PaperConstants:
        """Return the constants for a model of this size."""
        inputs = model.num_features + 1  # the bias is one more input that is always 1
        return cls(math.sqrt(2 * inputs), inputs / 2)

    def sgd_variance(self, config: RunConfig, model: Model, passes: int = 1) -> float:
        """Return the noise variance d sigma^2 of one client's release, a mean of gradients over a batch."""
        std = 2 * self.lipschitz / (config.batch_size * wanted_mu(config))
        return std**2 * passes * model.num_parameters


def the_task(config: RunConfig) -> Task:
    """Return the task of a run configuration."""
    return registry("task")[config.task]


def feature_bound(config: RunConfig) -> float:
    """R of the linear models, a public bound on a sample's norm: the configuration's, the task's, or the usual one."""
    bound = config.feature_bound or the_task(config).feature_bound or SYNTHETIC_FEATURE_BOUND
    return math.hypot(bound, 1.0) if is_additive(config) else bound  # its features end with a constant


def wanted_mu(config: RunConfig) -> float:
    """Return the mu that a step is for: without noise, the limit of large ones.

    Under secure aggregation a client adds only its share of the noise: the sum has that of mu sqrt(h).
    """
    return config.mu * math.sqrt(config.sums.min_honest) if config.private else math.inf


def tuned(config: RunConfig) -> Tuned | None:
    """Return the constants chosen for a task and its features.

    None where none were: :func:`scale_of` then says how long.

    Seen from their mean, features have length 1.
    """
    if registry("model")[config.model].reads_pixels:
        return None  # they are for linear scores of pixels
    chosen = the_task(config).tuned.get(config.features)
    bound = registry("features")[config.features].norm_bound
    if chosen is None or not is_centred(config) or bound is None:
        return chosen
    # A model of features R times as long is the same model with parameters divided by R.
    rates = {name: getattr(chosen, name) * bound**2 for name in ("mu2_rate", "sgd_rate")}
    clips = {name: getattr(chosen, name) / bound for name in ("mu2_clip_norm", "sgd_clip_norm")}
    return replace(chosen, **rates, **clips, diameter=chosen.diameter * bound)


def image_network_recipe(config: RunConfig, model: Model, strength: float) -> Recipe | None:
    """Return the constants of a network for images, by samples times the mu of a sum; None for another model."""
    kind = registry("model")[config.model]
    return kind.recipe(model.num_classes, strength) if kind.reads_pixels else None


def scaled(scale: Scale, bound: float, *, slower: float = 1.0) -> Hyperparameters:
    """Clip and step for rows of length R, with a step divided by ``slower``."""
    clip_norm = scale.clip * bound
    return Hyperparameters(clip_norm, scale.step(clip_norm, bound, slower=slower), math.inf)


def mu2_scaled(config: RunConfig, num_rounds: int, model: Model) -> Hyperparameters:
    """Clip and step of mu^2-SGD in units of R: w moves by eta times a momentum that grows with t."""
    return scaled(MU2, usual_norm(config, model), slower=max(num_rounds / MU2_ROUNDS, 1.0) ** 2)


def largest_squared_norm(config: RunConfig, num_features: int) -> float:
    """Return the largest ||x||^2 of a sample's features, by how they are made."""
    task = the_task(config)
    return task.squared_norm_bound(config.features, num_features, config.feature_bound or task.feature_bound)


def smoothness(config: RunConfig, model: Model) -> float:
    """L: the gradient of one sample's loss changes by at most L times what the parameters change by.

    See :meth:`~murmurfl.app.models.model.ModelKind.smoothness`.
    """
    bound, kind = feature_bound(config), registry("model")[config.model]
    squares = 1.0 if is_centred(config) else largest_squared_norm(config, model.num_features)
    return kind.smoothness(model.num_features, squares, bound)


_USUAL_SHARE = 1 / 6
"""The usual squared norm of features in [0, 1], as a share of the largest: pixels are mostly background."""


def in_unit_range(config: RunConfig) -> bool:
    """Return True if features are values in [0, 1], such as pixels, without a known norm and not centred."""
    known = registry("features")[config.features].norm_bound is not None
    return the_task(config).has_images and not known and not is_centred(config)


def usual_squared_norm(config: RunConfig, model: Model) -> float:
    """Return the usual squared norm of a sample, its bias counted, by how its features are made: a rule for steps."""
    if is_centred(config) or registry("model")[config.model].reads_pixels:  # which normalises what it reads
        return 1.0
    squares = largest_squared_norm(config, model.num_features)
    if in_unit_range(config):
        squares *= _USUAL_SHARE
    return squares + float("bias" in model.names)


def usual_norm(config: RunConfig, model: Model) -> float:
    """R with the bias: the root of :func:`usual_squared_norm`."""
    return math.sqrt(usual_squared_norm(config, model))


_TYPICAL = 0.55
"""Typical length of rows of values from -1 to 1, as a share of the longest: the root of their number."""


def typical_norm(config: RunConfig, model: Model) -> float:
    """R as rows are, for steps that cannot tell from gradients: shorter where nobody has declared how long."""
    task, known = the_task(config), registry("features")[config.features].norm_bound
    declared = known is not None or config.feature_bound or task.feature_bound or task.has_images
    return usual_norm(config, model) * (1.0 if declared or is_centred(config) else _TYPICAL)


def usual_smoothness(config: RunConfig, model: Model) -> float:
    """L of a usual sample: what the model's kind declares, or that of the softmax regression; a rule for steps."""
    declared = registry("model")[config.model].declared_smoothness(model.num_features, feature_bound(config))
    return usual_squared_norm(config, model) / 2 if declared is None else declared


def constant_feature(config: RunConfig) -> bool:
    """Return True if the features have a constant of their own, so that a linear model needs no bias."""
    return bool(getattr(registry("features")[config.features], "constant", False)) or the_task(config).constant


def sgd_preset(config: RunConfig, num_rounds: int, model: Model, *, accelerated: bool = False) -> Hyperparameters:
    """Return the practical preset of methods whose noise adds up over the rounds.

    eta = sgd_rate x mu b sqrt(m / T); with samples that return P times the noise is sqrt(P) times as large.
    """
    constants = tuned(config)
    if constants is None:
        return scaled(SGD, usual_norm(config, model), slower=num_rounds / 2 if accelerated else 1.0)
    share = math.sqrt(config.asked_per_round / (num_rounds * config.passes))
    eta = constants.sgd_rate * wanted_mu(config) * config.batch_size * share
    if accelerated:
        eta *= 2 / num_rounds  # the steps r eta have this eta as their mean
        most = largest_step(config, constants.sgd_most / 2, num_rounds, model)
    else:
        most = constants.sgd_most / smoothness(config, model)
    return Hyperparameters(constants.sgd_clip_norm, min(eta, most), constants.diameter)


_SAMPLING = 16.0
"""The factor 16 of :func:`largest_step`, where rounds have few samples."""


def largest_step(config: RunConfig, multiple: float, num_rounds: int, model: Model) -> float:
    """Return the largest step that makes sense without any noise, for methods that add up corrections.

    No mu leads beyond it.

    Parameters
    ----------
    multiple : float
        What eta L may be at most, as tuned.
    num_rounds : int
        T.

    Notes
    -----
    Gradient descent on a loss of curvature lambda overshoots beyond eta = 2 / lambda, and so does mu^2-SGD.
    Without noise q_t = t grad f(x_t), and x moves by 2 / (t + 2) of what w does, so a step is 2 eta long and the
    momentum bears 4 / lambda. The same holds for the accelerated ISRL-DP, whose steps r eta are averaged in with 2 / (r
    + 1). Its bound is half of the plain one's, as it is among the paper's constants. L bounds the curvature of one
    sample's loss where it is steepest. The mean over samples, clipped, is far flatter; how much is the tuned multiple
    of 1 / L.

    The corrected gradients of mu^2-SGD and the growing steps of the accelerated ISRL-DP also add up what the samples of
    a round, b m of them, have in error: like sqrt(T) in q and T^1.5 in w, over sqrt(b m). So where there are many
    rounds of few samples, the bound is 16 sqrt(b m) / T^1.5 of the above; with b m = T that is the papers' 1 / T.
    """
    samples = config.batch_size * config.asked_per_round
    errors = min(1.0, _SAMPLING * math.sqrt(samples) / num_rounds**1.5)
    return errors * multiple / smoothness(config, model)
