r"""Delayed momentum, the machine's half: alternative 1 of reshef-levy-2025 (eq. 12), a baseline.

A machine gets x_t and t, takes b samples it has never used before, and corrects its own momentum against the query
point of its own last participation, tau rounds ago:

    q_i <- q_i + mean over samples of clip_S( t grad f(x_t; z) - (t - tau) grad f(x_{t-tau}; z) )

The prefix sum of these contributions is q_i, so the release rule with cancelling noise sends q_i + y_k to a server that
acknowledges nothing. A correction is up to tau times as long as one of mu^2-SGD, and S with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..privacy import (
    ConfigurationError,
    Ledger,
    LedgerError,
    NoiseKeys,
    PrivacyPolicy,
    Release,
    RowCache,
)
from ..privacy.cohort import StackedContributions
from .base import PrivateClient, Request
from .gradients import PerSampleGradients, Samples, combined_gradients, unflatten


class DelayedMomentumClient(PrivateClient):
    """A machine of delayed momentum, for :class:`~murmurfl.strategies.DelayedMomentum`.

    Parameters, guarantees and errors are those of :class:`~murmurfl.clients.base.PrivateClient`; the policy's
    ``release_rule`` must be ``acknowledged``. The last query point and its round, which are the server's, are kept in
    the ledger.

    Notes
    -----
    **Formal guarantees.** Those of :class:`~murmurfl.clients.base.PrivateClient`: earlier query points are public.
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
        rows: RowCache | None = None,
    ) -> None:
        if policy.release_rule != "acknowledged":
            raise ConfigurationError(
                f"Expected release_rule 'acknowledged' for delayed momentum, got {policy.release_rule!r}: the server "
                "needs the whole momentum and not its last change."
            )
        super().__init__(gradients, samples, policy, ledger, keys, name=name, rows=rows)

    def release(self, request: Request) -> Release:
        """The machine's momentum with noise, for a request that has passed every check.

        Notes
        -----
        **Formal guarantees.** Those of the class.
        """
        point, t = request.query_points[0], request.server_round
        points, weights = [point], [float(t)]
        releases, noted = self.machine.noted(request.session)
        if releases and len(noted) != 2:
            raise LedgerError(
                "Expected the last query point in the ledger, got none: the session was opened by another kind of "
                "client or the ledger is damaged; start a new session. Nothing was released."
            )
        if releases:
            points.append(unflatten(noted[1], self._shapes))
            weights.append(-float(noted[0][0]))

        def contribution(samples: slice) -> NDArray[np.floating]:
            with np.errstate(all="ignore"):
                return combined_gradients(self.gradients, points, weights, self.samples[samples])

        flat = np.concatenate([np.asarray(values, dtype=np.float64).ravel() for values in point])
        return self.machine.release(request.session, request.ack, contribution, note=(np.array([float(t)]), flat))

    @classmethod
    def together(
        cls,
        server_round: int,  # noqa: ARG003 - every machine has a last query point of its own
        points: Sequence[Sequence[NDArray[Any]]],  # noqa: ARG003
    ) -> Callable[[Sequence[PrivateClient], Any], StackedContributions] | None:
        return None
