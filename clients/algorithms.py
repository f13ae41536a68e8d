"""The one registry of algorithms: what a client does in each, whoever configures it.

Runs (``strategy``) and apps with per-sample gradients (``method``, :func:`~murmurfl.clients.private_client_app`) take
name, client and the policy's own fields from here. A run's other half, such as presets and the server's strategy, is a
:class:`~murmurfl.app.methods.Method` that is made for an algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..privacy.errors import ConfigurationError
from ..privacy.release.policy import ClipUnit, PrivacyPolicy, check_own_noise
from .baseline_clients import DelayedMomentumClient, IsrlDpClient, NoisySGDClient
from .full_batch_client import FullBatchClient
from .gradient_update_client import GradientUpdateClient
from .mu2_client import Mu2Client
from .one_shot_client import OneShotClient, StatisticsClient
from .online_client import OnlineClient
from .private_client import PrivateClient
from .shuffled_client import ShuffledClient


@dataclass(frozen=True)
class Scale:
    """Constants without dimension: they hold for any data whose records have a known bound R (docs/tuning.md)."""

    clip: float
    """S / R."""
    travel: float
    """eta S R: how far one unclipped step moves the scores of the longest record."""

    def step(self, clip_norm: float, bound: float, *, slower: float = 1.0) -> float:
        """Eta for records of length R and a clip, divided by ``slower``."""
        return self.travel / (clip_norm * bound * slower)


FULL_BATCH = Scale(0.1, 120.0)
"""Scale of full batches with a momentum of :data:`MOMENTUM`; the travel is that of all rounds together."""

MOMENTUM = 0.9
LONGEST_STEP = 0.2
"""eta S of full batches of a network, over the norm of its untrained parameters."""
MU2 = Scale(0.15, 10.0)
"""Scale of mu^2-SGD, in up to eight rounds."""

MU2_ROUNDS = 8
SGD = Scale(0.4, 6.0)
"""Scale of steps along one round's mean gradient."""


@dataclass(frozen=True)
class Algorithm:
    """Client's side of an algorithm, and which fields of its policy are the algorithm's own.

    Parameters
    ----------
    name : str
        Value of a run's ``strategy`` and of an app's ``method``.
    client : type of PrivateClient
        Answers the server.
    strategy : str
        The server's class in :mod:`murmurfl.strategies`.
    mechanism : str
        The noise of a run where none is chosen.
    mechanisms : tuple of str, optional
        The mechanisms that may be chosen; None for any.
    clip_units : tuple of str
        Units that may be clipped, of which the first is the default.
    release_rule : {"", "acknowledged", "paper"}
        The release rule; empty where it is open.
    sums_samples : bool
        Whether every release is a sum over all of a client's samples.
    scale : Scale, optional
        Constants of clip and steps in an app; None if it takes no steps, and its rows are 1 long.
    batched, whole : mapping, optional
        Fields of an app's policy for batches of samples that are each used once, and for releases of all samples. None
        for what an app cannot have.
    """

    name: str
    client: type[PrivateClient]
    strategy: str
    mechanism: str = "cancelling"
    mechanisms: tuple[str, ...] | None = None
    clip_units: tuple[ClipUnit, ...] = ("sample",)
    release_rule: Literal["", "acknowledged", "paper"] = ""
    sums_samples: bool = False
    scale: Scale | None = None
    batched: Mapping[str, Any] | None = None
    whole: Mapping[str, Any] | None = None

    @property
    def in_apps(self) -> bool:
        """Whether :func:`~murmurfl.clients.private_client_app` has it."""
        return self.batched is not None or self.whole is not None

    @property
    def updates(self) -> bool:
        """Whether the server takes releases as updates of its model, and not as gradients."""
        return issubclass(self.client, GradientUpdateClient)

    def policy(self, *, batch_size: int | None, **chosen: Any) -> PrivacyPolicy:
        """Return a client's policy in an app; ``chosen`` fields win over the algorithm's.

        A ``batch_size`` of None stands for releases of all samples.
        """
        own = self.whole if batch_size is None else self.batched
        if own is None:
            expected = "left out" if self.batched is None else "set"
            why = "every release is a sum over all samples" if self.batched is None else "samples in a release"
            raise ConfigurationError(
                f"Expected batch_size to be {expected} with method {self.name!r} ({why}), got {batch_size!r}.",
                kind="conflict",
                setting="batch_size",
                got=batch_size,
            )
        policy = PrivacyPolicy(**{"batch_size": 1 if batch_size is None else batch_size, **own, **chosen})
        self.check(policy)
        return policy

    def check(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy that an app's clients cannot keep, or under which they would add no noise."""
        check_own_noise(policy)
        self.client.check_policy(policy)

    def steps(self, clip_norm: float, bound: float, rounds: int, *, norm: float = math.inf) -> dict[str, float]:
        """Return options of its strategy for records of length R and a clip.

        ``norm`` is that of a network's untrained parameters, and infinite for a linear model.
        """
        if self.scale is None:
            return {}
        if self.scale is not FULL_BATCH and math.isfinite(norm):
            raise ConfigurationError(
                f"Expected a linear model, or method 'full-batch', for suggested steps, got a network with "
                f"{self.name!r}: choose a learning_rate on public data, beginning with a small one.",
                kind="unsupported",
                setting="method",
                got=self.name,
            )
        slower = {MU2: max(rounds / MU2_ROUNDS, 1.0) ** 2, FULL_BATCH: float(rounds)}.get(self.scale, 1.0)
        step = self.scale.step(clip_norm, bound, slower=slower)
        if self.scale is not FULL_BATCH:
            return {"learning_rate": step}
        return {"learning_rate": min(step, LONGEST_STEP * norm / clip_norm), "momentum": MOMENTUM}


_INDEPENDENT = ("independent",)
_EVERY_SAMPLE: Mapping[str, Any] = {
    "batch_selection": "full_batch",
    "mechanism": "independent",
    "release_rule": "paper",
}

_KNOWN = (
    Algorithm("mu2", Mu2Client, "Mu2", "decay", scale=MU2, batched={"mechanism": "cancelling"}),
    Algorithm("trusted-mu2", Mu2Client, "TrustedMu2", mechanisms=()),
    Algorithm("delayed-momentum", DelayedMomentumClient, "DelayedMomentum", "decay", release_rule="acknowledged"),
    # A gradient at a model that is gone is of no use: a release stands alone.
    Algorithm(
        "full-batch",
        FullBatchClient,
        "FullBatch",
        "independent",
        _INDEPENDENT,
        release_rule="paper",
        sums_samples=True,
        scale=FULL_BATCH,
        whole=_EVERY_SAMPLE,
    ),
    Algorithm(
        "trusted-full-batch",
        FullBatchClient,
        "TrustedFullBatch",
        "independent",
        (),
        release_rule="paper",
        sums_samples=True,
    ),
    # SGD has nothing to carry over either.
    Algorithm(
        "noisy-sgd",
        NoisySGDClient,
        "NoisySGD",
        "independent",
        _INDEPENDENT,
        release_rule="paper",
        scale=SGD,
        batched={"mechanism": "independent"},
    ),
    Algorithm("isrl-dp", IsrlDpClient, "IsrlDp", "independent", _INDEPENDENT, release_rule="paper"),
    Algorithm("isrl-dp-accelerated", IsrlDpClient, "IsrlDp", "independent", _INDEPENDENT, release_rule="paper"),
    Algorithm("tree-momentum", NoisySGDClient, "TreeMomentum", mechanisms=(), release_rule="paper"),
    Algorithm("reduced-tree-momentum", NoisySGDClient, "ReducedTreeMomentum", mechanisms=(), release_rule="paper"),
    Algorithm("correlated-momentum", NoisySGDClient, "CorrelatedMomentum", mechanisms=(), release_rule="paper"),
    Algorithm("trusted-sgd", NoisySGDClient, "CorrelatedMomentum", mechanisms=(), release_rule="paper"),
    Algorithm(
        "one-shot",
        OneShotClient,
        "OneShot",
        "independent",
        _INDEPENDENT,
        ("moments",),
        release_rule="paper",
        sums_samples=True,
    ),
    Algorithm("online", OnlineClient, "OnlineFedSGD", clip_units=("update", "contractive")),
    Algorithm("shuffled", ShuffledClient, "ShuffledAvg", "independent", ()),
    Algorithm(
        "fedavg",
        GradientUpdateClient,
        "CorrelatedFedAvg",
        scale=SGD,
        batched={"mechanism": "blt"},
        whole=_EVERY_SAMPLE,
    ),
    Algorithm(
        "statistics",
        StatisticsClient,
        "Statistics",
        whole={**_EVERY_SAMPLE, "clip_unit": "nonnegative", "max_participations": 1},
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = {one.name: one for one in _KNOWN}
APP_METHODS: tuple[str, ...] = tuple(one.name for one in _KNOWN if one.in_apps)
"""The algorithms of :func:`~murmurfl.clients.private_client_app`."""


def app_method(name: str) -> Algorithm:
    """Return the algorithm of an app's ``method``."""
    if name not in APP_METHODS:
        raise ConfigurationError(
            f"Expected method one of {', '.join(map(repr, APP_METHODS))}, got {name!r}.",
            kind="unknown-name",
            setting="method",
            got=name,
        )
    return ALGORITHMS[name]
