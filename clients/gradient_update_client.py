"""Per-sample gradients as updates of a model, the client's half, for :class:`~murmurfl.strategies.CorrelatedFedAvg`.

A release is the sum over all samples, or the mean over a batch, of minus the clipped gradient. The server adds up
releases, divides, and takes a step of its own along them, so that its optimisers work on gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy import protocol
from .private_client import PrivateClient


class GradientUpdateClient(PrivateClient):
    """A client whose updates are minus its clipped per-sample gradients.

    Notes
    -----
    With ``batch_selection="full_batch"`` a release is a sum, and says of how many samples; otherwise it is a mean over
    a batch and counts once.

    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner by others of that
    owner, where the policy has samples_per_owner), provided row i of ``gradients`` depends on sample i alone.
    Proof: docs/proofs/release-rule.md.
    """

    summable: ClassVar[bool] = True

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """Weight -1: a step along the release lowers the loss."""
        return (-1.0,)

    def fit(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[list[NDArray[np.float64]], int, dict[str, Any]]:
        """Answer a training request with a release and its guarantee."""
        sent, samples, entries = super().fit(parameters, config)
        policy = self.privatizer.policy
        loss = self.privatizer.plan.loss.compose(*(privatizer.plan.loss for privatizer in self.beside))
        claims: dict[str, Any] = {**loss.statement(), protocol.DELTA: policy.delta, protocol.CLIENT_LEVEL: 0}
        if policy.trust == "secure-aggregation":
            claims[protocol.MIN_HONEST] = policy.sums.min_honest
        counted = policy.sums_samples or protocol.RELEASE_OF in config
        return sent, samples if counted else 1, {**entries, **claims}

    def statement(self, session: str) -> dict[str, Any]:
        """Return the client's privacy statement with its unit."""
        return {**super().statement(session), "unit": "sample", "evaluation-allowed": False}
