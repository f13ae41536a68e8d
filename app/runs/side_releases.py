"""The side releases of a run: the mean of the features before its training, a private evaluation after it.

A run has a list of them (:attr:`~murmurfl.app.runs.experiment.Experiment.sides`). Each knows the machine's half, its
share of mu^2, its noise, and the server's half with a session of its own, which a permit names too. What they are
stands in :mod:`murmurfl.privacy.side`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...clients import Centring, Evaluation
from ...privacy import (
    ConfigurationError,
    Measured,
    MurmurflError,
    NoisePlan,
    PrivacyPolicy,
    SimulatedKeys,
    centred,
    centring_policy,
    divided_mu,
    evaluation_policy,
)
from ...privacy.accounting.loss import Loss
from ...privacy.permits import read_permit
from ...strategies import (
    DirectMachines,
    EvaluationResult,
    MeanOfFeatures,
    PrivateEvaluation,
    ReleaseStrategy,
    RoundReport,
    TrustedMeanOfFeatures,
    TrustedPrivateEvaluation,
)
from ..data.partition import shard_sizes
from ..data.task import Dataset
from ..methods import Problem
from ..methods.presets import plan_or_largest_mu, trained_samples
from ..models.model import Model
from ..settings.registry import registry
from ..settings.run_config import RunConfig, is_centred, is_evaluated

logger = logging.getLogger("flwr")

MEAN, EVALUATION = "mean", "evaluation"
"""Suffixes of the sessions of side releases, after the training's name."""


def part_session(session: str, part: str) -> str:
    """The session of a part of a run whose training is in a session; the owner's command names it the same way."""
    return session + part


def session_options(config: RunConfig, simulated: str, part: str = "", *, deployed: bool) -> dict[str, Any]:
    """The session, the permit and the schema that a strategy of a ``part`` of a run is told; empty for its training.

    A simulation's session is named ``simulated``. Real machines' is named by the permit, or has a fresh name.
    """
    if not deployed:
        return {"session": simulated}
    told = {"session": None, "schema": config.schema}
    if not config.permit:
        return told
    session = read_permit(config.permit).sessions[0]
    return {**told, "session": part_session(session, part) if part else session, "permit": config.permit}


def check_permit(config: RunConfig) -> None:
    """Refuse a permit that leaves out a part of the run, before anything is spent."""
    if not config.permit:
        return
    sessions = read_permit(config.permit).sessions
    parts = [part for part, there in ((MEAN, is_centred(config)), (EVALUATION, is_evaluated(config))) if there]
    missing = [part for part in parts if part_session(sessions[0], part) not in sessions]
    if missing:
        raise ConfigurationError(
            f"Expected a permit for every part of this run, got one without its {' and its '.join(missing)}: have the "
            f"owner sign `murmurfl owner permit KEY --session {sessions[0]} "
            f"{' '.join(f'--{part}' for part in parts)}`."
        )


_KEPT = ("delta", "noise_quality", "trust", "min_honest", "min_cohort", "budget_local_mu")
"""Fields that the policy of a side release takes from the training's."""


def beside_sides(policy: PrivacyPolicy, budget_mu: float) -> PrivacyPolicy:
    """The training's policy on a machine with side releases: samples are used again, within a budget.

    Notes
    -----
    **Formal guarantees.** A sample is in several sessions then, a side release's and another, which the budget counts
    together: everything is budget_mu-GDP for replacement of one sample.
    """
    once = policy.order == "in-turn" and policy.sample_participations == 1
    return replace(policy, budget_mu=budget_mu, order="again" if once else policy.order)


def features_bound(task: str, features: str, num_features: int, feature_bound: float) -> tuple[float, bool]:
    """The longest that a row of a task's features can be, and whether it has no negative values.

    ``feature_bound`` is R where the run declares it, else 0: the task's. Both results follow from how features are
    made, never from data, and machines enforce them on every row.
    """
    the_task = registry("task")[task]
    declared = feature_bound or the_task.feature_bound
    bound = math.sqrt(the_task.squared_norm_bound(features, num_features, declared))
    return bound, registry("features")[features].nonnegative and the_task.has_images


def make_centring(
    policy: PrivacyPolicy, bound: tuple[float, bool], num_features: int, *, mu: float, share: float
) -> Centring:
    """A machine's half of the mean of the features.

    Parameters
    ----------
    policy : PrivacyPolicy
        The training's.
    bound : tuple of float and bool
        From :func:`features_bound`.
    num_features : int
        Values of one sample.
    mu : float
        Mu of the training with all its side releases.
    share : float
        Share of mu^2 that the side release takes.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.centring_policy`) the release of the
    mean is mu-GDP for replacement of one sample; it stands alone and takes every sample.
    """
    kept: dict[str, Any] = {name: getattr(policy, name) for name in _KEPT}
    length, nonnegative = bound
    mean = centring_policy(
        length,
        nonnegative=nonnegative,
        mu=divided_mu(mu, share)[0],
        mechanism=policy.mechanism,
        budget_mu=policy.budget_mu,
        **kept,
    )
    return Centring(mean, num_features)


def make_evaluation(
    policy: PrivacyPolicy, model: Model, *, mu: float, share: float, bins: int, held_out: int
) -> Evaluation:
    """A machine's half of the private evaluation.

    Parameters
    ----------
    policy : PrivacyPolicy
        The training's.
    mu : float
        Mu of the training with all its side releases.
    share : float
        Share of mu^2 that the side release takes.
    bins : int
        Number of bins of scores.
    held_out : int
        Samples that are set aside.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.evaluation_policy`) the release of an
    evaluation is mu-GDP for replacement of one sample, whatever the model is.
    """
    kept: dict[str, Any] = {name: getattr(policy, name) for name in _KEPT}
    own = evaluation_policy(mu * math.sqrt(share), mechanism=policy.mechanism, budget_mu=policy.budget_mu, **kept)
    return Evaluation(own, partial(_measured, model), bins=bins, held_out=held_out, shapes=model.shapes)


def _measured(model: Model, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
    """Whether a model predicts each sample right, and, of two classes, how sure it is of class 1."""
    features, labels = samples
    scores = np.asarray(model.logits(parameters, features), dtype=np.float64)
    right = scores.argmax(axis=1) == labels
    if model.num_classes != 2:
        return Measured(right)
    with np.errstate(all="ignore"):
        return Measured(right, 1.0 / (1.0 + np.exp(scores[:, 0] - scores[:, 1])), labels)


@dataclass(frozen=True)
class RunSide(ABC):
    """A side release of a run.

    ``policy`` gives the training's policy on a simulated machine; of None for the machine with the most samples.
    """

    problem: Problem
    policy: Callable[[int | None], PrivacyPolicy]

    of: ClassVar[str]
    """Its name in sessions, permits and noise keys."""
    included: ClassVar[str]
    """Its sentence in the guarantee of real machines."""
    included_share: ClassVar[str]
    """Its sentence in the guarantee of a simulation, with ``mu`` and the ``share`` of mu^2 in percent."""

    @property
    @abstractmethod
    def share(self) -> float:
        """Its share of mu^2."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Values of a release."""

    @abstractmethod
    def machine_half(self, machine: int | None = None) -> Centring | Evaluation:
        """The half of a simulated machine; of None for the machine with the most samples."""

    @abstractmethod
    def strategy(self, *, deployed: bool = False, checkpoint: Path | None = None) -> MeanOfFeatures | PrivateEvaluation:
        """The server's half; ``checkpoint`` is the training's."""

    @cached_property
    def plan(self) -> NoisePlan:
        """The noise of one machine."""
        return plan_or_largest_mu(self.machine_half().policy, self.width)

    @cached_property
    def loss(self) -> Loss:
        """Loss of the release: the machine's, or the trusted server's."""
        if self.machine_half().policy.trust != "trusted-server":
            return self.plan.loss
        server: Any = self.strategy()
        return Loss.of(server.aggregator.guaranteed_mu(self.width))

    @property
    def mu(self) -> float:
        """Mu of the release."""
        return self.loss.mu

    @property
    def recorded(self) -> dict[str, float]:
        """Mu and share as a result has them; infinite without noise, whatever the configured mu is."""
        return {"mu": self.mu if self.problem.config.private else math.inf, "share": self.share}

    def _server_options(self, deployed: bool, training: Path | None) -> dict[str, Any]:
        """Options of the server's half; a trusted server makes the noise, by a policy.

        The checkpoint lies beside the training's: a server that is killed asks again in the same session.
        """
        config, policy = self.problem.config, self.machine_half().policy
        options: dict[str, Any] = {
            "num_clients": config.num_clients,
            "seed": config.seed,
            **session_options(config, self.problem.side_session(self.of), self.of, deployed=deployed),
            "largest_value": self.plan.largest_value,
            "node_deadline_s": config.node_deadline_s,
            "checkpoint": None
            if training is None
            else training.with_name(f"{training.stem}-{self.of}{training.suffix}"),
            **self.problem.summation(),
        }
        if policy.trust == "trusted-server":
            options["policy"] = policy
            options["noise_keys"] = None if deployed else SimulatedKeys(config.seed, f"server, {self.of}")
        return options


@dataclass(frozen=True)
class FeatureMean:
    """The mean that a run with centring saw samples from, as machines released it in the round of the ``report``.

    ``constant`` was appended to centred features (:func:`murmurfl.privacy.centred`).
    """

    centre: NDArray[Any]
    constant: float
    report: RoundReport


@dataclass(frozen=True)
class MeanSide(RunSide):
    """The mean of the features, which machines release before the training."""

    of = MEAN
    included = "It includes the mean of the features, which is released first."
    included_share = "Of it mu = {mu}, {share:.4g} % of mu^2, is for the mean of the features, which is released first."

    @property
    def share(self) -> float:
        """Its share of mu^2."""
        return self.problem.config.centring_share

    @property
    def width(self) -> int:
        """Values of a sample's features, without the constant that stands beside them."""
        return self.problem.model.num_features - 1

    @cached_property
    def _half(self) -> Centring:
        config = self.problem.config
        bound = features_bound(config.task, config.features, self.width, config.feature_bound)
        return make_centring(self.policy(None), bound, self.width, mu=config.mu, share=self.share)

    def machine_half(self, machine: int | None = None) -> Centring:
        """The half of a simulated machine, the same for all."""
        return self._half

    def strategy(self, *, deployed: bool = False, checkpoint: Path | None = None) -> MeanOfFeatures:
        """The server's half."""
        options = {"num_features": self.width, **self._server_options(deployed, checkpoint)}
        return TrustedMeanOfFeatures(**options) if "policy" in options else MeanOfFeatures(**options)

    def collect(self, grid: Grid | DirectMachines, checkpoint: Path | None, *, deployed: bool) -> FeatureMean:
        """The mean, released by machines now or read from its checkpoint."""
        strategy = self.strategy(deployed=deployed, checkpoint=checkpoint)
        strategy.machines.several_on_a_node = not deployed
        centre = strategy.collect(grid, timeout=self.problem.config.round_timeout_s)
        return FeatureMean(centre, self._half.constant, strategy.history[-1])

    def seen(self, data: Dataset, centre: NDArray[np.float32]) -> Dataset:
        """Data with a test set centred as machines centre their features; their samples stay as they are."""
        from_centre = partial(centred, centre=centre, constant=self._half.constant)
        data = replace(data, test_features=from_centre(data.test_features))
        if self.problem.config.gradient_norm:  # which a simulation computes from all samples
            data = replace(data, train_features=from_centre(data.train_features))
        return data


@dataclass(frozen=True)
class EvaluationSide(RunSide):
    """The private evaluation of the model, which machines release after the training."""

    of = EVALUATION
    included = "It includes a private evaluation of the model, which is released last."
    included_share = "Of it mu = {mu}, {share:.4g} % of mu^2, is for a private evaluation of the model, released last."

    @property
    def share(self) -> float:
        """Its share of mu^2."""
        return self.problem.config.private_evaluation

    @property
    def width(self) -> int:
        """Values of a release."""
        return self.machine_half().rows.width

    def machine_half(self, machine: int | None = None) -> Evaluation:
        """The half of a simulated machine; of None for the machine with the most samples."""
        problem, config = self.problem, self.problem.config
        samples = max(shard_sizes(problem.shards)) if machine is None else len(problem.shards[machine])
        return make_evaluation(
            self.policy(machine),
            problem.model,
            mu=config.mu,
            share=self.share,
            bins=config.score_bins,
            held_out=samples - trained_samples(config, samples),
        )

    def strategy(
        self, *, deployed: bool = False, checkpoint: Path | None = None, centre: NDArray[np.float32] | None = None
    ) -> PrivateEvaluation:
        """The server's half; ``centre`` is what machines see their samples from."""
        own, options = self.machine_half(), self._server_options(deployed, checkpoint)
        options |= {"bins": own.bins, "scores_share": own.scores_share}
        if centre is not None:
            options["centre"] = centre
        return TrustedPrivateEvaluation(**options) if "policy" in options else PrivateEvaluation(**options)

    def ask(
        self,
        grid: Grid | DirectMachines,
        model: ArrayRecord,
        mean: FeatureMean | None,
        checkpoint: Path | None,
        *,
        trained: ReleaseStrategy[Any],
        deployed: bool,
    ) -> tuple[EvaluationResult | None, str]:
        """The machines' evaluation of a model, or None and why there is none: the run keeps its model.

        Clients that were off or excluded at the end of the training are not waited for or not asked.
        """
        centre = None if mean is None else mean.centre
        strategy = self.strategy(deployed=deployed, checkpoint=checkpoint, centre=centre)
        strategy.machines.several_on_a_node = not deployed
        if deployed:
            strategy.follow(trained)
        try:
            return strategy.evaluate(grid, model, timeout=self.problem.config.round_timeout_s), ""
        except MurmurflError as error:
            logger.warning("The model was not evaluated privately: %s", error)
            return None, str(error)
