"""Private centring, the machine's half: it releases the mean of its features once, and sees its samples from a centre.

What is released and what it costs stands in :mod:`murmurfl.privacy.side.centring_query`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...privacy import NO_NOISE, ConfigurationError, PrivacyPolicy, PrivateMachine, Release, protocol
from ...privacy.mechanisms import noise_stands_alone
from ...privacy.side.centring_query import CENTRING_CONSTANT, centred
from ..adapters.per_sample_gradients import Samples
from ..messages import Request
from .side_parts import PartTerms, SidePart, SideRelease, check_beside


@dataclass(frozen=True)
class Centring(SideRelease):
    """Configures a machine to release the mean of its features, and to see its samples from a centre that it is sent.

    Parameters
    ----------
    policy : PrivacyPolicy
        Policy of the mean's release (:func:`~murmurfl.privacy.centring_policy`), on the same budget as the machine's
        other policy.
    num_features : int
        k, values of one sample's features.
    constant : float
        Value appended to them: the model has k + 1 inputs, the last of which is a bias.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy the release of the mean is mu-GDP for replacement of one
    sample. What a machine computes around a centre depends on one sample and the centre alone, whoever made the centre.
    Proof: docs/proofs/sensitivities.md.
    """

    of: ClassVar[str] = protocol.OF_MEAN
    option: ClassVar[str] = "centring"
    ability: ClassVar[str] = "centres"
    unable: ClassVar[str] = "its samples are not seen from a centre"
    not_configured: ClassVar[str] = (
        "this machine is not configured for centring: it releases no mean and takes no centre"
    )

    policy: PrivacyPolicy
    num_features: int
    constant: float = CENTRING_CONSTANT

    def __post_init__(self) -> None:
        policy = self.policy
        alone = policy.builds_on == "nothing" and (policy.mechanism == NO_NOISE or noise_stands_alone(policy.mechanism))
        if not (policy.order == "all" and policy.max_participations == 1 and policy.clipping == "clip" and alone):
            raise ConfigurationError(
                "Expected for a mean of features a policy with order 'all', max_participations 1, clipping 'clip', "
                "mechanism 'independent' and release_rule 'paper', got another: make it with centring_policy."
            )
        if isinstance(self.num_features, bool) or not isinstance(self.num_features, int) or self.num_features < 1:
            raise ConfigurationError(f"Expected num_features to be an integer >= 1, got {self.num_features!r}.")
        if not (math.isfinite(self.constant) and self.constant > 0):
            raise ConfigurationError(f"Expected a constant > 0 and finite, got {self.constant!r}.")

    def check_beside(self, policy: PrivacyPolicy) -> None:
        """Refuse a policy of everything else with which the mean cannot share samples or a budget."""
        check_beside(self.policy, policy, beside="centring", release="the mean of features")

    def part(self, terms: PartTerms) -> Centred:
        """The part of a machine that releases the mean of the samples that are trained on."""
        mean = terms.private_machine(self.policy, self.num_features, terms.machine.num_samples)
        mean.num_rows = terms.machine.num_rows
        return Centred(self, terms.samples, mean, beside=terms.machine.policy)

    def features(self, batch: Any) -> NDArray[np.float64]:
        """The features of a batch of samples, an array or a tuple that begins with it: one row each."""
        values = np.asarray(batch[0] if isinstance(batch, tuple) else batch, dtype=np.float64)
        return values.reshape(len(values), -1)

    def batch(self, batch: Any, centre: NDArray[np.float32]) -> Any:
        """A batch of samples, an array or a tuple that begins with their features, seen from a centre.

        Notes
        -----
        **Formal guarantees.** Sample i of it depends on sample i of the batch and on the centre alone.
        """
        if isinstance(batch, tuple):
            return (centred(batch[0], centre, self.constant), *batch[1:])
        return centred(batch, centre, self.constant)

    @property
    def terms(self) -> tuple[int, float]:
        """Settings that machines computed together must share."""
        return self.num_features, self.constant


class Centred(SidePart):
    """The part of a machine that releases the mean of its features and sees its samples from a centre.

    Samples are arrays of features, or tuples that begin with one. ``machine`` makes the mean, on the ledger and keys of
    everything else the machine releases, whose policy is ``beside``.

    Notes
    -----
    **Formal guarantees.** The ledger counts the mean's session and all others together, so that both stay within one
    budget for replacement of one sample.
    """

    def __init__(self, centring: Centring, samples: Samples, machine: PrivateMachine, *, beside: PrivacyPolicy) -> None:
        centring.check_beside(beside)
        super().__init__(machine)
        self.centring = centring
        self._samples = samples
        # A simulation whose releases are from all samples asks for the same ones again and again.
        self._keeps = machine.simulated and beside.sums_samples
        self._centre: NDArray[np.float32] | None = None
        self._batches: dict[tuple[int, int], Any] = {}

    def answer(self, request: Request, batch: Callable[[slice], Any]) -> Release:
        """The sum of the machine's features, bounded and with noise; the only one of its session."""
        return self.machine.release(
            request.session, request.ack, lambda chosen: self.centring.features(self._samples[chosen])
        )

    def batch(self, samples: slice, centre: NDArray[np.float32]) -> Any:
        """The samples of a slice, seen from a centre."""
        if not self._keeps:
            return self.centring.batch(self._samples[samples], centre)
        if self._centre is None or not np.array_equal(self._centre, centre):
            self._centre, self._batches = centre, {}
        key = samples.start, samples.stop
        if key not in self._batches:
            self._batches[key] = self.centring.batch(self._samples[samples], centre)
        return self._batches[key]
