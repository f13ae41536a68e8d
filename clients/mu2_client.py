r"""DP-mu^2-FL, the client's half (reshef-levy-2025, algorithm 1; reshef-levy-2024, algorithm 1).

A client gets x_t, x_{t-1} and t, takes b samples it has never used before, and contributes the corrected gradient

    s = mean over samples of clip_S( t grad f(x_t; z) - (t - 1) grad f(x_{t-1}; z) )

released through the release rule with noise that cancels. Clipping is on the client: the papers' bound ||s|| <= S
holds only for query points an honest server would send.
"""

from __future__ import annotations

from typing import ClassVar

from ..privacy.errors import ConfigurationError
from ..privacy.release.policy import PrivacyPolicy
from .private_client import PrivateClient


class Mu2Client(PrivateClient):
    """A client of DP-mu^2-FL, for :class:`~murmurfl.strategies.Mu2` and :class:`~murmurfl.strategies.TrustedMu2`.

    Parameters are those of :class:`~murmurfl.clients.PrivateClient`.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP, those of all
    sessions budget_mu-GDP, for replacement of one sample (of all samples of one owner by others of that owner, where
    the policy has samples_per_owner), provided row i of ``gradients`` depends on sample i alone. Under a policy with
    ``trust="trusted-server"`` the contributions leave without noise and the guarantee is the server's, which counts
    every sample once: policies under which samples return are refused.
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
    >>> client = Mu2Client(gradients, samples, policy, MemoryLedger(), SimulatedKeys(1, "3"), name="3")
    >>> client.name
    '3'
    """

    query_points: ClassVar[int] = 2
    summable: ClassVar[bool] = True

    @classmethod
    def check_policy(cls, policy: PrivacyPolicy) -> None:
        if policy.trust == "trusted-server" and policy.sample_participations > 1:
            raise ConfigurationError(
                f"Expected sample_participations = 1 under a trusted server, got {policy.sample_participations}: "
                "TrustedMu2 counts every sample once, and a second use would go without noise that covers it.",
                kind="conflict",
                setting="sample_participations",
                got=policy.sample_participations,
            )

    def point_weights(self, server_round: int) -> tuple[float, ...]:
        """T and -(t - 1)."""
        return float(server_round), -float(server_round - 1)
