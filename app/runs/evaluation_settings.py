"""Private evaluation as a run has it: whether it is wanted, which samples it is of, and how mu is divided.

What it is stands in :mod:`murmurfl.privacy.side.evaluation_query`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...clients import Evaluation
from ...clients.side.evaluation_client import held_out_samples
from ...privacy import ConfigurationError, Measured, PrivacyPolicy, evaluation_policy
from .centring_settings import KEPT, is_centred
from ...privacy.machine.tables import HELD_OUT as HELD_OUT
from ...privacy.setting import refusal
from ..models.model import Model
from ..settings.registry import registry
from ..settings.run_keys import RunKeys


def is_evaluated(config: RunKeys) -> bool:
    """Whether machines say privately, after the training, how good the model is."""
    return config.private_evaluation > 0


def check_evaluation(config: RunKeys) -> None:
    """Refuse an evaluation where a method cannot have it, and keys of it where there is none.

    Raises
    ------
    ConfigurationError
    """
    if not is_evaluated(config):
        if config.held_out != HELD_OUT:
            raise refusal("held_out", f"{HELD_OUT} without private-evaluation", config.held_out)
        if config.score_bins:
            raise refusal("score_bins", "0 without private-evaluation", config.score_bins)
        return
    method = registry("strategy")[config.strategy]
    if not method.evaluates:
        able = ", ".join(name for name, one in registry("strategy").items() if one.evaluates)
        raise refusal(
            "private_evaluation",
            f"0 with strategy = {config.strategy!r}, whose epochs go through all samples (strategies with a private "
            f"evaluation: {able})",
            config.private_evaluation,
        )
    if config.samples_per_owner:
        expected = "0 with samples-per-owner: an evaluation counts samples"
        raise refusal("private_evaluation", expected, config.private_evaluation)
    if config.secret_order:
        raise refusal(
            "private_evaluation",
            "0 with secret-order = true: the evaluation shows every sample",
            config.private_evaluation,
        )
    mean = config.centring_share if is_centred(config) else 0.0
    if mean + config.private_evaluation >= 1:
        raise refusal(
            "private_evaluation", f"below {1 - mean:g}, what centring-share leaves of mu^2", config.private_evaluation
        )


def check_classes(config: RunKeys, num_classes: int) -> None:
    """Refuse an evaluation of data without classes, and scores of more than two.

    Raises
    ------
    ConfigurationError
    """
    if is_evaluated(config) and num_classes < 2:
        raise refusal(
            "private_evaluation", f"0 for task = {config.task!r}, which has no classes", config.private_evaluation
        )
    if config.score_bins and num_classes != 2:
        raise refusal("score_bins", f"0 for {num_classes} classes: an AUC is of two", config.score_bins)


class Divides(Protocol):
    """A run configuration, or an operator's file: what of a machine's samples is for an evaluation."""

    @property
    def private_evaluation(self) -> float:
        """Of mu^2."""
        ...

    @property
    def held_out(self) -> float:
        """Of a machine's samples."""
        ...


def trained_samples(config: Divides, samples: int) -> int:
    """How many of a machine's samples are trained on: all but those that are set aside for an evaluation.

    Raises
    ------
    ConfigurationError
        If there is one sample only, which cannot be shared.
    """
    if not config.private_evaluation or not config.held_out:
        return samples
    if samples < 2:
        raise ConfigurationError(
            f"Expected at least two samples on every machine with held-out = {config.held_out:g}, got {samples}: one "
            "to train on, and one to evaluate on."
        )
    return samples - held_out_samples(samples, config.held_out)


def evaluation_mu(mu: float, share: float) -> float:
    """The mu of an evaluation, whose square is a share of that of everything."""
    return mu * math.sqrt(share)


def make_evaluation(
    policy: PrivacyPolicy,
    model: Model,
    *,
    mu: float,
    share: float,
    bins: int,
    held_out: int,
) -> Evaluation:
    """A machine's evaluation beside a policy of everything else, with its share of mu^2.

    Parameters
    ----------
    policy : PrivacyPolicy
        Of everything else.
    model : Model
    mu : float
        Of a training, the evaluation and everything else together.
    share : float
    bins : int
        Of scores.
    held_out : int
        Samples that are set aside.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy (:func:`~murmurfl.privacy.evaluation_policy`) the release of an
    evaluation is mu-GDP for replacement of one sample, whatever the model is.
    """
    kept: dict[str, Any] = {name: getattr(policy, name) for name in KEPT}
    own = evaluation_policy(evaluation_mu(mu, share), mechanism=policy.mechanism, budget_mu=policy.budget_mu, **kept)
    return Evaluation(own, partial(measured, model), bins=bins, held_out=held_out, shapes=model.shapes)


def measured(model: Model, parameters: Sequence[NDArray[Any]], samples: Any) -> Measured:
    """Whether a model predicts each sample right, and, of two classes, how sure it is of class 1."""
    features, labels = samples
    scores = np.asarray(model.logits(parameters, features), dtype=np.float64)
    right = scores.argmax(axis=1) == labels
    if model.num_classes != 2:
        return Measured(right)
    with np.errstate(all="ignore"):
        return Measured(right, 1.0 / (1.0 + np.exp(scores[:, 0] - scores[:, 1])), labels)
