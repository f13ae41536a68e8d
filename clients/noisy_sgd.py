"""Noisy SGD, the machine's half: the baseline of reshef-levy-2025, inspired by Abadi et al. 2016.

A machine gets x_t, takes b samples it has never used before, and releases the mean of their clipped gradients with
fresh noise. Every sample is in one release, so sigma = Delta / mu without composition, whatever the number of rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..privacy import ConfigurationError, Ledger, NoiseKeys, PrivacyPolicy
from .base import PrivateClient, Request
from .gradients import PerSampleGradients, Samples


class NoisySGDClient(PrivateClient):
    """A machine of noisy SGD, for :class:`~murmurfl.strategies.NoisySGD`.

    Parameters, guarantees and errors are those of :class:`~murmurfl.clients.base.PrivateClient`; the policy's mechanism
    must be ``independent``, and a ``release_rule`` of ``paper`` makes each reply stand alone.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.clients.base.PrivateClient`.
    """

    def __init__(
        self,
        gradients: PerSampleGradients,
        samples: Samples,
        policy: PrivacyPolicy,
        ledger: Ledger,
        keys: NoiseKeys,
        *,
        name: str,
    ) -> None:
        if policy.mechanism != "independent":
            raise ConfigurationError(f"Expected mechanism 'independent' for noisy SGD, got {policy.mechanism!r}.")
        super().__init__(gradients, samples, policy, ledger, keys, name=name)

    def contribution(self, request: Request, samples: Any) -> NDArray[np.floating]:
        return self._gradients(request.query_points[0], samples)
