"""What leaves a machine, and what is recorded before: its releases, and its statements about itself."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..accounting.noise_plan import NoisePlan
from ..ledger.ledger_block import AccountBlock, StreamBlock
from ..noise.grid import Grid
from .admission import Admissions
from .policy import PrivacyPolicy


@dataclass(frozen=True)
class Release:
    """What leaves the machine: nothing in it but ``counts`` depends on data.

    Under secure aggregation it does not leave as it is. It has only this machine's share of the noise, so it is as
    sensitive as data: by itself it guarantees the plan's mu_local. Clients send it under masks
    (:class:`~murmurfl.privacy.sums.masking.Masking`) and in no other way.

    Parameters
    ----------
    counts : ndarray of shape (parameters,), int64
        P_k - P_ack, or the end of an epoch, in units of the grid's spacing; read-only.
    release, ack : int
        k, and the acknowledgement it was built on.
    release_id, ack_id : bytes
        Random names of the two, 16 bytes each, under secure aggregation; empty otherwise.
    samples : int
        How many samples the server counts it for: b, or all that the machine has; public.
    mended : bool
        Whether it also takes out the noise of releases whose sums were skipped.

    Notes
    -----
    **Formal guarantees.** The counts are covered by the plan of the session that they belong to: mu for replacement of
    one sample, under secure aggregation only of the sum they enter. Nothing else in it depends on data.
    Proof: docs/proofs/release-rule.md.
    """

    counts: NDArray[np.int64]
    spacing: float
    release: int
    ack: int
    release_id: bytes = b""
    ack_id: bytes = b""
    samples: int = 1
    mended: bool = False

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The counts as numbers, shape (parameters,), exact multiples of the spacing, as they are sent."""
        return Grid(self.spacing).values(self.counts)


@dataclass(frozen=True)
class PrivacyStatement:
    """A machine's account of what it has spent and guarantees in one session; independent of its data.

    Parameters
    ----------
    releases : int
        Releases made in this session.
    mu_spent : float
        Bookkeeping: mu of those releases, from the noise that was put on them. Of a session that was opened under
        another policy, or closed, all that it reserved.
    mu_guaranteed : float
        mu of all the releases this session may make: the guarantee against the server; of such a session what it
        reserved. Infinite under a trusted server, whose own guarantee towards everybody else is not the machine's to
        state, and with mechanism ``none``.
    mu_budget : float
        mu of everything the machine will ever release, against any server; infinite once contributions have left
        without noise. Under secure aggregation it rests on what ``mu_guaranteed`` rests on; of a machine whose ledger
        has such sessions and which now has releases seen by themselves it is that of what holds whatever happens.
    samples_used : int
        Fresh samples used up.
    max_participations : int
        K.
    releases_left : int
        How many more releases of this session its cap and the fresh samples allow, whatever the budget allows.
    mu_local : float, optional
        Under secure aggregation, mu of all the releases this session may make, whatever server, helpers and other
        machines do; of a session that was opened under other terms what it reserved. None otherwise.
    min_honest, min_cohort : int, optional
        Of the machine's policy, likewise.
    """

    releases: int
    mu_spent: float
    mu_guaranteed: float
    mu_budget: float
    samples_used: int
    max_participations: int
    releases_left: int
    mu_local: float | None = None
    min_honest: int | None = None
    min_cohort: int | None = None


_ID_BYTES = 16
_NO_ID = bytes(_ID_BYTES)


def stream_fingerprint(plan: NoisePlan, secret_key: bytes, roster: str = "") -> str:
    """The digest of a policy, the machine's key and, under secure aggregation, a roster: a stream belongs to them.

    Under another key the last noise row of a stream could not be taken back out.
    """
    terms = plan.fingerprint.encode() + (b"\x00" + roster.encode() if roster else b"")
    return hmac.digest(secret_key, b"murmurfl stream\x00" + terms, hashlib.sha256).hex()


def recorded(admitted: Admissions, policy: PrivacyPolicy) -> tuple[StreamBlock, AccountBlock]:
    """Rows that ledgers must have before an admission's releases leave, with samples used up and random names."""
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
    """The release of one stream, which was recorded before.

    Notes
    -----
    **Formal guarantees.** The ledger has the release before it is put together here. All but ``counts`` is public:
    under a secret order the constant b stands for the number of samples.
    """
    release, ack, names = int(streams.release[row]), int(streams.ack[row]), streams.ids[row]
    ids = [names.get(j, _NO_ID) for j in (release, ack)] if names else (b"", b"")
    return Release(counts, plan.grid.spacing, release, ack, *ids, samples=samples_counted(policy, num_samples))


def samples_counted(policy: PrivacyPolicy, num_samples: int) -> int:
    """The number of samples the server counts a release for: public."""
    # Of a secret order nobody learns how many samples there are in a release: the constant b stands for them.
    return num_samples if policy.order == "all" else policy.batch_size
