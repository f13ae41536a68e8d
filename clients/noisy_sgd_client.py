"""Noisy SGD, the machine's half: the baseline of reshef-levy-2025, inspired by Abadi et al. 2016.

A machine gets x_t, takes b samples it has never used before, and releases the mean of their clipped gradients with
fresh noise. Every sample is in one release, so sigma = Delta / mu without composition, whatever the number of rounds.
"""

from __future__ import annotations

from typing import ClassVar

from ..privacy import NO_NOISE, ConfigurationError, PrivacyPolicy
from .private_client import PrivateClient


class NoisySGDClient(PrivateClient):
    """A machine of noisy SGD, for :class:`~murmurfl.strategies.NoisySGD`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`; the policy's mechanism must be ``independent`` (or
    ``none``), and a ``release_rule`` of ``paper`` makes each reply stand alone.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner, where the policy has
    samples_per_owner), provided row i of ``gradients`` depends on sample i alone.
    Proof: docs/proofs/release-rule.md.
    """

    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.mechanism not in ("independent", NO_NOISE):
            raise ConfigurationError(f"Expected mechanism 'independent' for noisy SGD, got {policy.mechanism!r}.")

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """1: the gradient itself."""
        return (1.0,)
