"""Side releases as a run asks for them: the mean of the features before its training, a private evaluation after it.

What they are stands in :mod:`murmurfl.privacy.side`; how a run makes them, in :mod:`murmurfl.app.runs.side_releases`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ...privacy import CENTRING_SHARE, divided_mu
from ...privacy.machine.tables import HELD_OUT, PRIVATE
from ...privacy.setting import refusal
from .registry import registry
from .run_keys import RunKeys

Config = TypeVar("Config", bound=RunKeys)


def is_centred(config: RunKeys) -> bool:
    """Whether machines release the mean of their features first: as set, or else as the features want it."""
    if config.centring:
        return config.centring == PRIVATE
    if config.samples_per_owner:  # the mean counts samples, not owners
        return False
    return centred_by_default(config.strategy, config.features, secret_order=config.secret_order)


def centred_by_default(strategy: str, features: str, *, secret_order: bool) -> bool:
    """Whether features want centring where nothing is set, and the method can have it."""
    wanted = registry("features")[features].centring == PRIVATE
    return wanted and registry("strategy")[strategy].centres and not secret_order


def is_evaluated(config: RunKeys) -> bool:
    """Whether machines say privately, after the training, how good the model is."""
    return config.private_evaluation > 0


def trained_config(config: Config) -> Config:
    """The run configuration with the mu that side releases leave for the training."""
    shares = config.centring_share if is_centred(config) else 0.0
    shares += config.private_evaluation
    return replace(config, mu=divided_mu(config.mu, shares)[1]) if shares else config


def check_sides(config: RunKeys) -> None:
    """Refuse a side release that the method cannot have, and keys of one that nobody asked for."""
    method = registry("strategy")[config.strategy]
    if config.centring == PRIVATE:
        if not method.centres:
            able = ", ".join(name for name, one in registry("strategy").items() if one.centres)
            expected = (
                f"'none' or empty with strategy = {config.strategy!r}, which takes samples as they come or has public "
                f"ones beside them (strategies with centring: {able})"
            )
            raise refusal("centring", expected, config.centring)
        if config.secret_order:
            raise refusal("centring", "'none' or empty with secret-order = true: the mean shows every sample", PRIVATE)
        if config.samples_per_owner:
            raise refusal("centring", "'none' or empty with samples-per-owner: the mean is one of samples", PRIVATE)
    if config.centring_share != CENTRING_SHARE and not is_centred(config):
        raise refusal("centring_share", f"{CENTRING_SHARE} without centring = {PRIVATE!r}", config.centring_share)
    if not is_evaluated(config):
        if config.held_out != HELD_OUT:
            raise refusal("held_out", f"{HELD_OUT} without private-evaluation", config.held_out)
        if config.score_bins:
            raise refusal("score_bins", "0 without private-evaluation", config.score_bins)
        return
    mean = config.centring_share if is_centred(config) else 0.0
    expected = ""
    if not method.evaluates:
        able = ", ".join(name for name, one in registry("strategy").items() if one.evaluates)
        expected = (
            f"0 with strategy = {config.strategy!r}, whose epochs go through all samples (strategies with a private "
            f"evaluation: {able})"
        )
    elif config.samples_per_owner:
        expected = "0 with samples-per-owner: an evaluation counts samples"
    elif config.secret_order:
        expected = "0 with secret-order = true: the evaluation shows every sample"
    elif mean + config.private_evaluation >= 1:
        expected = f"below {1 - mean:g}, what centring-share leaves of mu^2"
    if expected:
        raise refusal("private_evaluation", expected, config.private_evaluation)


def check_classes(config: RunKeys, num_classes: int) -> None:
    """Refuse an evaluation of data without classes, and scores of more than two."""
    if is_evaluated(config) and num_classes < 2:
        expected = f"0 for task = {config.task!r}, which has no classes"
        raise refusal("private_evaluation", expected, config.private_evaluation)
    if config.score_bins and num_classes != 2:
        raise refusal("score_bins", f"0 for {num_classes} classes: an AUC is of two", config.score_bins)
