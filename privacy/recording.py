"""What is recorded of a release before it leaves, and what then leaves: for one machine, and for many."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import numpy as np
from numpy.typing import NDArray

from .admitted import Admissions
from .ledger.block import AccountBlock, StreamBlock
from .noise_plan import NoisePlan
from .outgoing import Release
from .policy import PrivacyPolicy

_ID_BYTES = 16
_NO_ID = bytes(_ID_BYTES)


def stream_fingerprint(plan: NoisePlan, secret_key: bytes, roster: str = "") -> str:
    """What names a policy, a key and a roster: a stream belongs to them.

    Parameters
    ----------
    plan : NoisePlan
    secret_key : bytes
        The machine's: under another key the last noise row of a stream could not be taken back out.
    roster : str
        Under secure aggregation the digest of the roster that releases are masked for.
    """
    terms = plan.fingerprint.encode() + (b"\x00" + roster.encode() if roster else b"")
    return hmac.digest(secret_key, b"murmurfl stream\x00" + terms, hashlib.sha256).hex()


def recorded(admitted: Admissions, policy: PrivacyPolicy) -> tuple[StreamBlock, AccountBlock]:
    """What ledgers must know before the releases of an admission leave.

    Parameters
    ----------
    admitted : Admissions
        Whose streams have made their releases.
    policy : PrivacyPolicy

    Returns
    -------
    streams, accounts : StreamBlock, AccountBlock
        With the samples used up, and under secure aggregation with a random name for each release.
    """
    streams, accounts = admitted.streams, admitted.accounts
    accounts.samples_used = admitted.samples_used
    if policy.trust == "secure-aggregation":
        for row, release in enumerate(streams.release.tolist()):
            kept = {int(streams.ack[row]), *streams.pending[row]}
            known = {j: name for j, name in streams.ids[row].items() if j in kept}
            streams.ids[row] = {**known, release: secrets.token_bytes(_ID_BYTES)}
    return streams, accounts


def release_of(
    streams: StreamBlock,
    row: int,
    counts: NDArray[np.int64],
    plan: NoisePlan,
    policy: PrivacyPolicy,
    num_samples: int,
) -> Release:
    """What leaves a machine: its release, which was recorded before.

    Notes
    -----
    **Formal guarantees.** The ledger has the release before it is put together here. All but ``counts`` is public:
    under a secret order the constant b stands for the number of samples.
    """
    release, ack, names = int(streams.release[row]), int(streams.ack[row]), streams.ids[row]
    ids = [names.get(j, _NO_ID) for j in (release, ack)] if names else (b"", b"")
    return Release(counts, plan.grid.spacing, release, ack, *ids, samples=samples_counted(policy, num_samples))


def samples_counted(policy: PrivacyPolicy, num_samples: int) -> int:
    """How many samples the server counts a release for: public."""
    # Of a secret order nobody learns how many samples there are in a release: the constant b stands for them.
    return num_samples if policy.order == "all" else policy.batch_size
