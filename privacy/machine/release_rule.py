r"""The release rule: a machine of prefix sums sends P_k - P_ack.

A machine's private stream is the noisy prefix sum P_k = s_1 + ... + s_k + (row k of B Z), with s_j its contributions
and B Z the mechanism's noise. It sends P_k - P_ack, where ack is the last of its releases that the server says it has
aggregated. With nothing lost this is the papers' message s_k + y_k - y_{k-1} (reshef-levy-2025, algorithm 1). When a
reply is lost the next one carries what was missing, contribution and noise, so a loss costs delay and leaves no noise
behind (ALGORITHMS 2.4).

All arithmetic is on int64 counts of a fixed grid. What is remembered between releases is P_j - P_ack, which was sent
before, so the ledger of a machine whose server is not trusted holds nothing without noise. The rule is made for blocks
of machines, whose counts may be arrays of another library with the same arithmetic; a real machine is a block of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..accounting.noise_plan import NoisePlan
from ..ledger.ledger_block import NOTHING, Counts, StreamBlock
from ..mechanisms import State
from ..noise.noise_stream import NoiseStream, Past, RowCache
from .policy import PrivacyPolicy

# P_j - P_ack is kept for this many of the latest unacknowledged releases. A server that asks again without
# acknowledging will not use the earlier ones, so an honest server only ever names the last.
MOST_PENDING = 4


class ReleaseRule:
    """What makes the contributions of machines of one policy into their releases.

    Parameters
    ----------
    policy : PrivacyPolicy
    plan : NoisePlan
    num_parameters : int
        d.
    rows : RowCache, optional
        For simulations (:class:`~murmurfl.privacy.noise.noise_stream.NoiseStream`).

    Notes
    -----
    **Formal guarantees.** Release k of a stream is P_k - P_ack, exactly, whatever was lost and acknowledged before.
    Each row depends on its own stream, key and contribution alone.
    Proof: docs/proofs/release-rule.md.
    """

    def __init__(
        self, policy: PrivacyPolicy, plan: NoisePlan, num_parameters: int, rows: RowCache | None = None
    ) -> None:
        self.policy = policy
        self.noise = NoiseStream(plan, num_parameters, policy.noise_quality, rows)

    def advance(
        self,
        streams: StreamBlock,
        contributions: Iterable[Counts],
        keys: Sequence[bytes],
        nonces: Sequence[bytes],
        *,
        normals: Iterable[NDArray[np.floating] | None] = repeat(None),
        note: State | None = None,
    ) -> list[Counts]:
        """The next release of each of several machines.

        Parameters
        ----------
        streams : StreamBlock
            After the releases before; changed to what they are after these.
        contributions : iterable of ndarray of shape (d,), int64
            What each machine contributes, on the grid; taken over and changed.
        keys, nonces : sequences of bytes
            The secret key of each machine, and the nonce of its release: never used before under that key.
        normals : iterable of ndarray, optional
            Those of these keys and nonces, where they were made already.
        note : tuple of floating-point arrays, optional
            What each of them remembers with its release; independent of data.

        Returns
        -------
        list of ndarray of shape (d,), int64
            P_k - P_ack, in units of the grid's spacing.
        """
        made = self.noised(streams, contributions, keys, nonces, normals=normals)
        self.carry(streams, made, note)
        return made

    def noised(
        self,
        streams: StreamBlock,
        contributions: Iterable[Counts],
        keys: Sequence[bytes],
        nonces: Sequence[bytes],
        *,
        normals: Iterable[NDArray[np.floating] | None] = repeat(None),
    ) -> list[Counts]:
        """Contributions with what the noise of the next release adds and removes.

        Parameters are those of :meth:`advance`; of the streams only what the noise is made again from moves on.
        """
        made: list[Counts] = []
        past = zip(streams.release.tolist(), streams.nonces, streams.noise_state, strict=True)
        for row, (before, counts, key, nonce, drawn) in enumerate(
            zip(map(Past._make, past), contributions, keys, nonces, normals, strict=False)
        ):
            streams.nonces[row], streams.noise_state[row] = self.noise.add_to(counts, before, key, nonce, drawn)
            made.append(counts)
        return made

    def carry(self, streams: StreamBlock, releases: Sequence[Any], note: State | None = None) -> None:
        """Add to new releases what was lost before them, and keep what may be lost of them.

        Parameters
        ----------
        streams : StreamBlock
            As for :meth:`advance`, but for the noise, which has moved on.
        releases : sequence of arrays
            s_k and what the noise of release k adds and removes, a machine each; changed.
        note : optional
            As for :meth:`advance`.
        """
        for row, (release, ack, counts) in enumerate(
            zip(streams.release.tolist(), streams.ack.tolist(), releases, strict=True)
        ):
            pending = NOTHING
            if self.policy.release_rule != "paper":
                if release > ack:
                    counts += streams.pending[row][release]  # P_{k-1} - P_ack: what was lost, contribution and noise
                pending = {j: sent for j, sent in streams.pending[row].items() if j > release + 1 - MOST_PENDING}
                pending[release + 1] = counts
            streams.pending[row] = pending
            if note is not None:
                streams.noted[row] = note
        streams.release = streams.release + 1
