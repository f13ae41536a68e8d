"""Which runs a device can compute; the others are refused before anything starts, with what would do."""

from __future__ import annotations

from typing import Any

from ....clients import PrivateClient
from ....privacy import ConfigurationError, MemoryLedger, PrivacyPolicy
from ...runs.experiment import Experiment
from ...settings.side_settings import is_centred
from .device_noise import check_mechanism_on_device

_WITHOUT = "or leave the device empty"


def check_on_device(experiment: Experiment) -> None:
    """Refuse an experiment that a device cannot compute.

    Raises
    ------
    ConfigurationError
        With what was expected and what to set.
    """
    config = experiment.config
    policies = [experiment.policy(machine) for machine in _of_each_size(experiment)]
    if config.noise_quality != "fast" and any(policy.adds_noise for policy in policies):
        raise ConfigurationError(
            f"Expected noise-quality = 'fast' on a device, got {config.noise_quality!r}: exact normals need float64's "
            "own logarithm, of which backends round the last digit each in its way. Set noise-quality=fast (for "
            f"simulations, no guarantee), {_WITHOUT}."
        )
    if is_centred(config) or config.private_evaluation:
        what = "centring" if is_centred(config) else "private-evaluation"
        raise ConfigurationError(
            f"Expected a run whose machines release gradients alone on a device, got one with {what}: a release beside "
            f"the training is made on the processor. Set {_OFF[what]}, {_WITHOUT}."
        )
    if config.samples_per_owner:
        raise ConfigurationError(
            "Expected samples-per-owner = 0 on a device, got "
            f"{config.samples_per_owner}: owners are computed on the processor. Set samples-per-owner=0, {_WITHOUT}."
        )
    if not _asked_together(type(experiment.client(0, MemoryLedger()))):
        raise ConfigurationError(
            "Expected a strategy whose machines release weighted gradients of the query points on a device, such as "
            f"mu2, trusted-mu2 or noisy-sgd, got {config.strategy!r}: its machines compute by themselves. Choose "
            f"another, {_WITHOUT}."
        )
    for policy in policies:
        _check_policy(policy)
    for plan in experiment.plans():
        if plan.noise_std:
            check_mechanism_on_device(plan.mechanism)


_OFF = {"centring": "centring=none", "private-evaluation": "private-evaluation=0"}


def _of_each_size(experiment: Experiment) -> list[int]:
    """A machine of each number of samples: the policy follows from it."""
    return list({size: machine for machine, size in enumerate(experiment.sizes)}.values())


def _check_policy(policy: PrivacyPolicy) -> None:
    if policy.sums_samples or not policy.clips_samples or policy.bound.moments is not None:
        raise ConfigurationError(
            "Expected machines that release the mean of a batch of clipped gradients on a device, got "
            f"order {policy.order!r} and clip-unit {policy.clip_unit!r}: sums over all samples and whole updates are "
            f"computed on the processor. Choose another strategy, {_WITHOUT}."
        )


def _asked_together(client: type[PrivateClient]) -> bool:
    """Whether machines of a kind contribute what their weights of query points say, as the model computes it."""
    plain = client.contribution is PrivateClient.contribution and client.release is PrivateClient.release
    together: Any = client.together
    return plain and together.__func__ is PrivateClient.__dict__["together"].__func__
