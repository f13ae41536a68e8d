"""Full batches, the machine's half (ALGORITHMS section 8): the sum of all samples' clipped gradients, every time.

A machine gets a point and releases the sum over all of its samples of clipped gradients there, with fresh noise. Every
sample is in every release, so K releases of sensitivity Delta = 2 S with noise sigma are mu-GDP for
mu = Delta sqrt(K) / sigma. A release stands alone: one that is lost is never made up for, nor does it weigh on others.
"""

from __future__ import annotations

from typing import ClassVar

from ..privacy import NO_NOISE, ConfigurationError, PrivacyPolicy
from .base import PrivateClient


class FullBatchClient(PrivateClient):
    """A machine of full batches, for :class:`~murmurfl.strategies.FullBatch`.

    Parameters, guarantees and errors are those of :class:`~murmurfl.clients.base.PrivateClient`. The policy has
    ``order="all"`` (and so a batch of 1), ``clip_unit="sample"``, the mechanism ``independent`` (or ``none``) and
    ``release_rule="paper"``, under which every release stands alone.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.clients.base.PrivateClient`: mu-GDP for replacement of one sample
    in all K releases together, for which 2 S sqrt(K) is charged, whatever the number of samples; under a policy with
    ``trust="trusted-server"`` sums leave without noise and the guarantee is the server's
    (:class:`~murmurfl.strategies.TrustedFullBatch`).
    Proof: docs/proofs/returning-samples.md, docs/proofs/sensitivities.md.
    """

    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.mechanism not in ("independent", NO_NOISE):
            raise ConfigurationError(f"Expected mechanism 'independent' for full batches, got {policy.mechanism!r}.")
        for name, expected in (("order", "all"), ("clip_unit", "sample"), ("release_rule", "paper")):
            if getattr(policy, name) != expected:
                raise ConfigurationError(
                    f"Expected {name} {expected!r} for full batches, got {getattr(policy, name)!r}: every release is "
                    "the sum over all samples, and stands alone."
                )

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """1: the gradient itself."""
        return (1.0,)
