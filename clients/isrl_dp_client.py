"""ISRL-DP minibatch SGD, the machine's half: the "other work" of reshef-levy-2025 (Lowy and Razaviyayn 2023).

A machine gets a point and releases the mean of K clipped gradients there with fresh noise. Its samples return in later
rounds, so releases compose. The paper draws K of n samples at random in every round and charges every round to every
sample. Here the machine goes through minibatches of K samples in the same order, pass after pass, so that one sample is
in at most P = ``sample_participations`` releases, exactly n // K apart, which the ledger enforces. With
Delta = 2 S / K the noise for mu is then sigma = Delta sqrt(P) / mu. With K = n both are the same.
"""

from __future__ import annotations

from .noisy_sgd_client import NoisySGDClient


class IsrlDpClient(NoisySGDClient):
    """A machine of ISRL-DP minibatch SGD, for :class:`~murmurfl.strategies.IsrlDp`.

    Parameters are those of :class:`~murmurfl.clients.NoisySGDClient`; a policy with ``sample_participations`` P > 1
    lets samples return.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy all releases of a session together are mu-GDP for replacement
    of one sample, which takes part in P of them. No amplification by sampling is claimed: which samples a release uses
    is public.
    Proof: docs/proofs/returning-samples.md.
    """
