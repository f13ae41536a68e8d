r"""Baselines, the client's half: noisy SGD, ISRL-DP minibatch SGD and delayed momentum.

* **Noisy SGD** (baseline of reshef-levy-2025, inspired by Abadi et al. 2016). A client gets x_t, takes b samples it
  has never used before, and releases the mean of their clipped gradients with fresh noise. Every sample is in one
  release, so sigma = Delta / mu without composition, whatever the number of rounds.
* **ISRL-DP** (after Lowy and Razaviyayn 2023). A client gets a point and releases the mean
  of K clipped gradients there with fresh noise. Its samples return in later rounds, so releases compose. Their paper
  draws K of n samples at random in every round and charges every round to every sample. Here the client goes through
  minibatches of K samples in the same order, pass after pass, so that one sample is in at most
  P = ``sample_participations`` releases, exactly n // K apart, which the ledger enforces. With Delta = 2 S / K the
  noise for mu is then sigma = Delta sqrt(P) / mu. With K = n both are the same.
* **Delayed momentum** (alternative 1 of reshef-levy-2025, eq. 12). A client gets x_t and t, takes b samples it has
  never used before, and corrects its own momentum against the query point of its own last participation, tau rounds
  ago:

      q_i <- q_i + mean over samples of clip_S( t grad f(x_t; z) - (t - tau) grad f(x_{t-tau}; z) )

  The prefix sum of these contributions is q_i, so the release rule with cancelling noise sends q_i + y_k to a server
  that acknowledges nothing. A correction is up to tau times as long as one of mu^2-SGD, so S must be larger as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..privacy.errors import ConfigurationError, LedgerError
from ..privacy.mechanisms import State
from ..privacy.release.clipping import StackedContributions
from ..privacy.release.ledgered_privatizer import Release
from ..privacy.release.policy import NO_NOISE, PrivacyPolicy
from .adapters.per_sample_gradients import combined_gradients, flat_point, stacked_gradients, unflatten
from .private_client import BatchedContribution, PrivateClient, Request


class NoisySGDClient(PrivateClient):
    """A client of noisy SGD, for :class:`~murmurfl.strategies.NoisySGD`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`; the policy's mechanism must be ``independent`` (or
    ``none``), and a ``release_rule`` of ``paper`` makes each reply stand alone.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner by others of that
    owner, where the policy has samples_per_owner), provided row i of ``gradients`` depends on sample i alone.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> client = NoisySGDClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.name
    '3'
    """

    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.mechanism not in ("independent", NO_NOISE):
            raise ConfigurationError(
                f"Expected mechanism 'independent' for noisy SGD, got {policy.mechanism!r}.",
                kind="conflict",
                setting="mechanism",
                got=policy.mechanism,
            )

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """1: the gradient itself."""
        return (1.0,)


class IsrlDpClient(NoisySGDClient):
    """A client of ISRL-DP minibatch SGD, for :class:`~murmurfl.strategies.IsrlDp`.

    Parameters are those of :class:`~murmurfl.clients.NoisySGDClient`; a policy with ``sample_participations`` P > 1
    lets samples return.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP for replacement
    of one sample, which takes part in P of them. No amplification by sampling is claimed: which samples a release uses
    is public.
    Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> client = IsrlDpClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.name
    '3'
    """


class DelayedMomentumClient(PrivateClient):
    """A client of delayed momentum, for :class:`~murmurfl.strategies.DelayedMomentum`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`; the policy's ``release_rule`` must be
    ``acknowledged``. The last query point and its round, which are the server's, are kept in the ledger.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner by others of that owner, where
    the policy has samples_per_owner), provided row i of ``gradients`` depends on sample i alone. Earlier query points
    are public.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from murmurfl.clients import TorchGradients
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> gradients = TorchGradients(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
    >>> samples = TensorDataset(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> client = DelayedMomentumClient(gradients, samples, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.name
    '3'
    """

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.release_rule != "acknowledged":
            raise ConfigurationError(
                f"Expected release_rule 'acknowledged' for delayed momentum, got {policy.release_rule!r}: the server "
                "needs the whole momentum and not its last change.",
                kind="conflict",
                setting="release_rule",
                got=policy.release_rule,
            )

    def release(self, request: Request) -> Release:
        """Return the client's momentum with noise, for a request that has passed every check."""
        point, t = request.query_points[0], float(request.server_round)

        def corrected(releases: int, noted: State) -> Callable[[slice], NDArray[np.floating]]:
            points, weights = [point], [t]
            last = _last_participation(releases, noted)
            if last is not None:
                points.append(unflatten(last[1], self._shapes))
                weights.append(-last[0])

            def contribution(samples: slice) -> NDArray[np.floating]:
                with np.errstate(all="ignore"):
                    return combined_gradients(self.gradients, points, weights, self.batch(request, samples))

            return contribution

        return self.privatizer.release_with_state(request.session, request.ack, corrected, _note(t, point))

    @classmethod
    def together(
        cls, clients: Sequence[PrivateClient], server_round: int, session: str, points: Sequence[Sequence[NDArray[Any]]]
    ) -> BatchedContribution | None:
        if cls.release is not DelayedMomentumClient.release:
            return None
        # Clients that last took part in the same round share their earlier point: it is evaluated once for all.
        last = [_last_participation(*client.privatizer.noted(session)) for client in clients]
        gradients, batch = clients[0].gradients, clients[0].privatizer.policy.batch_size

        def contributions(positions: Sequence[int], samples: Any) -> StackedContributions:
            their, evaluated = [last[i] for i in positions], [points[0]]
            weights: list[float | NDArray[np.float64]] = [float(server_round)]
            for t, point in {id(entry[1]): entry for entry in their if entry is not None}.values():
                evaluated.append(unflatten(point, gradients.shapes))
                there = [entry is not None and entry[1] is point for entry in their]
                weights.append(-t * np.repeat(np.asarray(there, dtype=np.float64), batch))
            return stacked_gradients(gradients, evaluated, weights, samples)

        return BatchedContribution(contributions, _note(server_round, points[0]))


def _last_participation(releases: int, noted: State) -> tuple[float, NDArray[np.floating]] | None:
    """Return the round of a client's last release and its query point, None before the first."""
    if not releases:
        return None
    if len(noted) != 2:
        raise LedgerError(
            "Expected the last query point in the ledger, got none: the session was opened by another kind of "
            "client or the ledger is damaged; start a new session. Nothing was released."
        )
    return float(noted[0][0]), noted[1]


def _note(server_round: float, point: Sequence[NDArray[Any]]) -> State:
    return np.array([float(server_round)]), flat_point(point)
