r"""The release rule: a machine sends P_k - P_ack.

A machine's private stream is the noisy prefix P_k = s_1 + ... + s_k + (row k of B Z), with s_j its contributions and
B Z the mechanism's noise. It sends P_k - P_ack, where ack is the last of its releases that the server says it has
aggregated. With nothing lost this is the papers' message s_k + y_k - y_{k-1} (reshef-levy-2025, algorithm 1). When a
reply is lost the next one carries what was missing, contribution and noise, so a loss costs delay and leaves no noise
behind (ALGORITHMS 2.4).

All arithmetic is on int64 counts of a fixed grid; what is remembered between releases is P_j - P_ack, which was sent
before, so the ledger of an untrusted-server machine holds nothing un-noised.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import protocol
from .clipping import clip_contributions, clip_per_sample
from .data_digest import DataDigest, RowBytes, any_data
from .errors import ConfigurationError, LedgerError, RefusedError, is_interrupt
from .grid import MARK, Grid
from .keys import NoiseKeys
from .ledger import Account, Ledger, LedgerPage, StreamRecord, by_a_servers_word
from .mechanisms import Draw, State
from .noise import NONCE_BYTES, row_key, standard_normal_rows, standard_normals
from .noise_plan import NoisePlan
from .normals import LARGEST_NORMAL, NOISE_VERSION
from .policy import NO_NOISE, PrivacyPolicy

logger = logging.getLogger(__name__)

# P_j - P_ack is kept for this many of the latest unacknowledged releases. A server that asks again without
# acknowledging has given the earlier ones up, so an honest one only ever names the last.
MOST_PENDING = 4

# Budgets are compared with this much room for the rounding of sums of squares.
_ROUNDING = 1e-9

_OWN_CACHE_BYTES = 256 << 20

PerSampleContribution = Callable[[slice], NDArray[np.floating]]
"""Contributions of the samples in a slice of the machine's data: shape (samples, parameters), or (1, parameters) for an
update made from all of them."""

NotedContribution = Callable[[int, State], PerSampleContribution]
"""Given how many releases a session has made and what was noted with the last one, the contributions to the next."""


@dataclass(frozen=True)
class Release:
    """What leaves the machine: nothing in it but ``counts`` depends on data.

    Parameters
    ----------
    counts : ndarray of shape (parameters,), int64
        P_k - P_ack in units of the grid's spacing; read-only.
    spacing : float
        That of the machine's grid.
    release : int
        k.
    ack : int
        The acknowledgement it was built on.
    """

    counts: NDArray[np.int64]
    spacing: float
    release: int
    ack: int

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """P_k - P_ack, shape (parameters,), exact multiples of the spacing: what is sent."""
        return Grid(self.spacing).values(self.counts)


@dataclass(frozen=True)
class Admission:
    """A request that may be answered, and what it will be answered from; nothing is spent yet.

    Parameters
    ----------
    stream : StreamRecord
        With the acknowledgement applied.
    account : Account
        With the session's mu reserved.
    samples : slice
        The fresh samples it will use up.
    """

    stream: StreamRecord
    account: Account
    samples: slice


class RowCache:
    """Arrays made from noise lately, kept as long as they fit: whoever has them need not make them twice.

    Parameters
    ----------
    limit_bytes : int
        Most to keep; the oldest go first, and what is gone is made again from its nonces.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._rows: dict[tuple[bytes, bytes], tuple[NDArray[np.generic], ...]] = {}
        self._bytes = 0

    def keep(self, key: bytes, nonce: bytes, arrays: tuple[NDArray[np.generic], ...]) -> None:
        """Keep what belongs to a key and the nonce of a release."""
        self._rows[key, nonce] = arrays
        self._bytes += _nbytes(arrays)
        while self._bytes > self.limit_bytes and self._rows:
            self._bytes -= _nbytes(self._rows.pop(next(iter(self._rows))))

    def take(self, key: bytes, nonce: bytes) -> Any:
        """The arrays, if they are still here; they are forgotten, for each is needed once."""
        arrays = self._rows.pop((key, nonce), None)
        if arrays is not None:
            self._bytes -= _nbytes(arrays)
        return arrays


def _nbytes(arrays: tuple[NDArray[np.generic], ...]) -> int:
    return arrays[0].nbytes if len(arrays) == 1 else sum(values.nbytes for values in arrays)


@dataclass(frozen=True)
class PrivacyStatement:
    """What a machine has spent and guarantees in one session; independent of its data.

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
        state.
    mu_budget : float
        mu of everything the machine will ever release, against any server; infinite once it has trusted one.
    samples_used : int
        Fresh samples used up.
    max_participations : int
        K.
    releases_left : int
        How many more releases of this session its cap and the fresh samples allow; whether the budget allows a session
        at all is not in it.
    """

    releases: int
    mu_spent: float
    mu_guaranteed: float
    mu_budget: float
    samples_used: int
    max_participations: int
    releases_left: int


def _noise_version(stream: StreamRecord) -> int:
    """The version of the normals a session was begun with; ledgers that nobody reads do not say."""
    return json.loads(stream.terms).get("noise_version", 1) if stream.terms else NOISE_VERSION


class PrivateMachine:
    """The private half of a machine: its policy, its ledger, its keys, and the only way anything leaves it.

    Parameters
    ----------
    policy : PrivacyPolicy
        The machine's own configuration.
    num_parameters : int
        d.
    num_samples : int
        Samples the machine holds; each is used as often as the policy says.
    ledger : Ledger
        Where releases are recorded before they leave.
    keys : NoiseKeys
        The secret key and the source of nonces.
    data : callable, optional
        What each row of the machine's data is known by (:func:`~murmurfl.privacy.row_bytes`), so that the ledger knows
        the data it was used with; required with real keys, not looked at with simulated ones, whose ledger ends with
        the run.
    rows : RowCache, optional
        For simulations; default every row is regenerated when it is taken back out, and where a state would have to be
        made again from all noise before, 256 MiB are set aside for it.

    Raises
    ------
    ConfigurationError
        If the cap needs more fresh samples than there are, or with real keys the noise is ``fast`` or ``none`` or
        cannot serve the policy, the ledger is not durable, or ``data`` is missing.

    Notes
    -----
    **Formal guarantees.** Everything :meth:`release` ever returns is, per session, plan.mu-GDP and over all sessions
    budget_mu-GDP for replacement of one sample of this machine, whatever requests arrive in whatever order, provided
    the ledger keeps its promise. Samples are computed one by one, so that a contribution can depend on no other sample
    unless the callable remembers it; with simulated keys they go together and that is assumed. ``exact`` noise makes
    this true of the numbers actually sent, up to the quality of its pseudorandom normals
    (:mod:`murmurfl.privacy.noise`).
    Under ``trusted-server`` nothing is guaranteed against the server, and with mechanism ``none`` nothing at all. Under
    the former every session reserves the policy's mu, which the server is trusted to keep towards everybody else, and
    all sessions together stay within budget_mu. A ledger that has seen such a session opens none for a server that is
    not trusted.
    Proof: docs/proofs/release-rule.md.
    """

    def __init__(
        self,
        policy: PrivacyPolicy,
        num_parameters: int,
        num_samples: int,
        ledger: Ledger,
        keys: NoiseKeys,
        rows: RowCache | None = None,
        *,
        data: RowBytes | None = None,
    ) -> None:
        if not keys.simulated and not ledger.durable:
            raise ConfigurationError(
                f"Expected a durable ledger on a real machine, got {type(ledger).__name__}: what it forgets when the "
                "process ends would be spent again."
            )
        if policy.noise_quality != "exact" and not keys.simulated:
            raise ConfigurationError(
                f"Expected noise_quality 'exact' on a real machine, got {policy.noise_quality!r}: 'fast' noise is for "
                "simulation only."
            )
        if policy.mechanism == NO_NOISE and not keys.simulated:
            raise ConfigurationError(
                f"Expected a noise mechanism on a real machine, got {policy.mechanism!r}: runs without noise are for "
                "simulation only."
            )
        if not keys.simulated and data is None:
            raise ConfigurationError(
                "Expected `data` on a real machine, got none: the ledger must know the rows it was used with. Pass "
                "data=row_bytes(samples)."
            )
        for name in ("budget_mu", "delta"):
            fixed, ours = getattr(ledger, name), getattr(policy, name)
            if fixed is not None and not math.isclose(fixed, ours, rel_tol=_ROUNDING):
                raise ConfigurationError(
                    f"Expected {name} = {fixed!r}, with which the ledger was made, got {ours!r} in the policy: "
                    "everything on this machine's data shares one budget. Put the ledger's into the configuration."
                )
        releases, name, why = policy.max_participations, "max_participations", "each is used once"
        if policy.sample_participations > 1:
            releases, name, why = policy.min_separation, "min_separation", "so many are gone through"
        if policy.batch_size * releases > num_samples:
            raise ConfigurationError(
                f"Expected batch_size x {name} <= the machine's {num_samples} samples ({why}), got "
                f"{policy.batch_size} x {releases} = {policy.batch_size * releases}."
            )
        self.policy = policy
        self.plan: NoisePlan = policy.plan(num_parameters)
        if self.plan.problem and not keys.simulated:
            raise ConfigurationError(self.plan.problem)
        self.num_parameters = num_parameters
        self.num_samples = num_samples
        self._ledger = ledger
        self._keys = keys
        if rows is None and self.plan.mechanism.memory == "all":
            rows = RowCache(_OWN_CACHE_BYTES)  # without it every release would draw all noise before it again
        self._rows = rows
        known = None if keys.simulated or data is any_data else data
        self._data = None if known is None else DataDigest(keys.secret_key, known)
        if self._data is not None:
            self._data.warn_of_kind(num_samples)
        # A stream belongs to a policy and a key: under another key its last noise row could not be taken back out.
        mark = hmac.digest(keys.secret_key, b"murmurfl stream\x00" + self.plan.fingerprint.encode(), hashlib.sha256)
        self._fingerprint = mark.hex()

    @property
    def simulated(self) -> bool:
        """Whether the keys are a simulation's."""
        return self._keys.simulated

    def release(self, session: str, ack: int, contribution: PerSampleContribution) -> Release:
        """Make the next release of a session, recorded before it is returned.

        Parameters
        ----------
        session : str
            Names the training this release belongs to; a new name opens a new stream and reserves its whole mu.
        ack : int
            The last release of this session that the server has aggregated; 0 for none.
        contribution : callable
            Gives the per-sample contributions, one row a sample, of the slice of samples it is handed. Rows are clipped
            here; a non-finite row becomes zero and still counts. With real keys it is called for every row by itself,
            a row it fails on counts as zero, and it may be called again for the next samples, if another request took
            these while it was computing.

        Returns
        -------
        Release

        Raises
        ------
        RefusedError
            If the acknowledgement, the cap, the samples or the budget forbid it. Nothing was released or spent.
        ConfigurationError
            If ``contribution`` returns the wrong shape, in simulation.
        LedgerError
            If the ledger cannot be believed.
        """
        return self._release(session, ack, lambda *_: contribution, None)

    def release_noting(self, session: str, ack: int, contribution: NotedContribution, note: State) -> Release:
        """:meth:`release`, with public values that the session remembers from one release to the next.

        Parameters
        ----------
        session, ack
            See :meth:`release`.
        contribution : callable
            Given the number of this session's releases so far and what was noted with the last of them, the per-sample
            contributions as for :meth:`release`. Called again if another request made a release in between.
        note : tuple of floating-point arrays
            What to remember with this release; it must not depend on data.

        Raises
        ------
        RefusedError, ConfigurationError, LedgerError
            See :meth:`release`.

        Notes
        -----
        **Formal guarantees.** Those of :meth:`release`.
        """
        return self._release(session, ack, contribution, note)

    def _release(self, session: str, ack: int, contribution: NotedContribution, note: State | None) -> Release:
        counts: NDArray[np.int64] | None = None
        made_for: tuple[int, slice] | None = None
        self.check_data()
        while True:
            with self._ledger.exclusive() as page:
                admission = self._admit(page, session, ack)
                stream, wanted = admission.stream, (admission.stream.release, admission.samples)
                if self._keys.simulated:  # whose ledger nobody else waits for
                    rows = contribution(stream.release, stream.noted)
                    counts, made_for = self._contribution_counts(rows, admission.samples), wanted
                if counts is not None and made_for == wanted:
                    return self._finish(page, session, admission, counts, note=note)
            # A gradient may take long, so it is computed while others may use the ledger. Nothing is spent by that: it
            # counts only if the same samples are still fresh when the request is admitted again, inside the transaction
            # that records it; otherwise somebody else took them, and the next ones are computed.
            rows = contribution(stream.release, stream.noted)
            counts, made_for = self._contribution_counts(rows, admission.samples), wanted
            self._digest_of(max(admission.account.samples_used, admission.samples.stop))

    def check_data(self) -> None:
        """Refuse data that are not those this machine's ledger was used with.

        Raises
        ------
        LedgerError
            With the way out.

        Notes
        -----
        **Formal guarantees.** Releases and spends nothing; every release checks it too. The rows used so far are read
        and hashed here, once in the life of this object, while others may use the ledger.
        """
        if self._data is None:
            return
        with self._ledger.exclusive() as page:
            account = page.account()
        self._check_data(account)

    def _check_data(self, account: Account) -> None:
        if self._data is not None and account.samples_used:
            self._data.check(account.samples_used, account.data, self.num_samples)

    def _digest_of(self, rows: int, otherwise: str = "") -> str:
        return otherwise if self._data is None else self._data.of(rows)

    def admits(self, session: str, ack: int) -> slice:
        """The samples a release asked for now would be made from: for whoever computes it outside of a transaction.

        Raises
        ------
        RefusedError
            As :meth:`release` would.

        Notes
        -----
        **Formal guarantees.** Releases and spends nothing; :meth:`release` decides anew.
        """
        with self._ledger.exclusive() as page:
            return self._admit(page, session, ack).samples

    def noted(self, session: str) -> tuple[int, State]:
        """How many releases a session has made, and what was remembered with the last one.

        Notes
        -----
        **Formal guarantees.** Releases nothing.
        """
        with self._ledger.exclusive() as page:
            stream = page.stream(session)
        return (0, ()) if stream is None else (stream.release, stream.noted)

    def acknowledge(self, session: str, ack: int) -> None:
        """Take note of an acknowledgement ahead of the next request: what is behind it need not be remembered.

        Raises
        ------
        RefusedError
            If it is none that could stand in the next request.

        Notes
        -----
        **Formal guarantees.** Releases nothing.
        """
        with self._ledger.exclusive() as page:
            stream = page.stream(session)
            if stream is None:
                raise RefusedError(protocol.BAD_ACKNOWLEDGEMENT, "there is nothing to acknowledge in this session")
            page.commit(session, self._acknowledge(stream, ack), page.account())

    def statement(self, session: str) -> PrivacyStatement:
        """What this machine has spent in a session and what it guarantees; independent of its data."""
        with self._ledger.exclusive() as page:
            stream, account = page.stream(session), page.account()
        releases = 0 if stream is None else stream.release
        if stream is None or stream.fingerprint == self._fingerprint:
            spent, guaranteed = self.plan.spent_mu(releases), self.plan.mu
        else:
            # Opened under another policy, or closed: today's noise says nothing of it, what it reserved holds for it.
            reserved = account.reserved.get(session, math.inf)
            spent = guaranteed = math.inf if by_a_servers_word(reserved) else reserved
        no_bound = self.policy.trust == "trusted-server" or account.trusted_a_server
        return PrivacyStatement(
            releases=releases,
            mu_spent=spent,
            mu_guaranteed=guaranteed,
            mu_budget=math.inf if no_bound else float(self.policy.budget_mu or 0.0),
            samples_used=account.samples_used,
            max_participations=self.policy.max_participations,
            releases_left=self._releases_left(stream, account),
        )

    def _releases_left(self, stream: StreamRecord | None, account: Account) -> int:
        """How many more releases of a session its cap and the fresh samples allow."""
        if stream is not None and stream.fingerprint != self._fingerprint:
            return 0
        left = self.policy.max_participations - (0 if stream is None else stream.release)
        if self.policy.sample_participations > 1:  # the same samples are gone through again
            return left
        return min(left, (self.num_samples - account.samples_used) // self.policy.batch_size)

    def _admit(self, page: LedgerPage, session: str, ack: int) -> Admission:
        """What a request would be answered from, or a refusal."""
        stream, account = page.stream(session), page.account()
        if (stream is None) != (session not in account.reserved):
            raise LedgerError(
                "Expected a session's stream and its reserved budget in the ledger together, got one of them: the "
                "ledger is damaged. Restore it from a backup or retire this machine's data; nothing was released."
            )
        if stream is not None and account.samples_used < self._samples_of(stream.release):
            raise LedgerError(
                f"Expected at least {self._samples_of(stream.release)} used samples in the ledger, got "
                f"{account.samples_used}: the ledger is damaged. Restore it from a backup or retire this machine's "
                "data; nothing was released."
            )
        self._check_data(account)
        if stream is None:
            account = self._reserve(account, session)
            stream = StreamRecord(self._fingerprint, terms=self.policy.terms(self.num_parameters))
        if stream.fingerprint != self._fingerprint:
            if _noise_version(stream) != NOISE_VERSION:
                raise RefusedError(
                    protocol.POLICY_CHANGED,
                    "this session was begun with the noise of another version of murmurfl, which this version cannot "
                    "take out again; start a new session",
                )
            raise RefusedError(
                protocol.POLICY_CHANGED,
                "this session was opened under another privacy policy or key, or was closed; start a new session",
            )
        if stream.release >= self.policy.max_participations:
            raise RefusedError(protocol.CAP_REACHED, "the cap of releases for this session is reached")
        start, batch = account.samples_used, self.policy.batch_size
        if self.policy.sample_participations > 1:
            start = stream.release % self.policy.min_separation * batch
        if start + batch > self.num_samples:
            raise RefusedError(protocol.SAMPLES_USED_UP, "no fresh samples are left")
        return Admission(self._acknowledge(stream, ack), account, slice(start, start + batch))

    def _samples_of(self, releases: int) -> int:
        """The least number of samples that many releases of a session have used."""
        if self.policy.sample_participations > 1:
            releases = min(releases, self.policy.min_separation)
        return releases * self.policy.batch_size

    def _finish(
        self,
        page: LedgerPage,
        session: str,
        admission: Admission,
        counts: NDArray[np.int64],
        normals: NDArray[np.floating] | None = None,
        note: State | None = None,
    ) -> Release:
        """Noise on the contribution, both recorded, then the release; ``counts`` come from clipped rows, and go."""
        stream, counts = self._advance(admission.stream, session, counts, normals)
        if note is not None:
            stream = replace(stream, noted=note)
        before = admission.account
        used = max(before.samples_used, admission.samples.stop)
        page.commit(session, stream, Account(used, before.reserved, self._digest_of(used, before.data)))
        counts.setflags(write=False)  # the ledger in memory may hold the very array
        return Release(counts, self.plan.grid.spacing, stream.release, stream.ack)

    def _reserve(self, account: Account, session: str) -> Account:
        trusted = self.policy.trust == "trusted-server"
        if self.plan.problem or self.policy.mechanism == NO_NOISE:
            return account.reserve(session, math.inf)  # a simulated machine's, which guarantees nothing
        if account.trusted_a_server and not trusted:
            raise RefusedError(
                protocol.BUDGET_EXHAUSTED,
                "this machine has trusted a server with its samples: it has no budget against servers any more",
            )
        # Without noise of its own the machine's plan guarantees nothing; what counts is what the server has to keep.
        reserved = account.reserve(session, self.policy.mu if trusted else self.plan.mu, trusted=trusted)
        budget = float(self.policy.budget_mu or self.policy.mu)
        if reserved.reserved_mu > budget * (1 + _ROUNDING):
            raise RefusedError(protocol.BUDGET_EXHAUSTED, "the privacy budget of this machine does not allow a session")
        return reserved

    def _acknowledge(self, stream: StreamRecord, ack: int) -> StreamRecord:
        if ack == stream.ack:
            return stream
        if ack > stream.release:
            logger.error(
                "The server acknowledges release %d of a session in which the ledger knows of %d. Either the server is "
                "wrong or this machine's ledger was copied back from a backup: see docs/ledger.md before going on.",
                ack,
                stream.release,
            )
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT,
                "the acknowledgement names a release this machine's ledger does not know of; if the machine did make "
                "it, its ledger was rolled back",
            )
        if self.policy.release_rule == "paper":
            valid = stream.ack < ack <= stream.release
            pending = {}
        else:
            valid = ack > stream.ack and ack in stream.pending
            base = stream.pending.get(ack)
            pending = {j: counts - base for j, counts in stream.pending.items() if j > ack and base is not None}
        if not valid:
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT,
                "the acknowledgement must not move backwards and must name a release that can still be acknowledged",
            )
        return stream.acknowledged(ack, pending)

    def _contribution_counts(self, contribution: PerSampleContribution, samples: slice) -> NDArray[np.int64]:
        """The mean of the clipped contributions, on the grid; each is rounded by itself, so the sum is exact."""
        if self._keys.simulated:
            return self._mean_counts(self._rows_of(contribution, samples))
        # Each row by itself: a sample's then depends on it alone by construction, and so does whether it fails, which
        # must not show. A failure that zeroed the whole batch would move the release by S and not by 2 S / b. One row
        # at a time is in memory, whatever the batch.
        total = np.zeros(self.num_parameters, dtype=np.int64)
        share = self.policy.batch_size // self.policy.rows_per_release
        for start in range(samples.start, samples.stop, share):
            try:
                counts = self._mean_counts(self._rows_of(contribution, slice(start, start + share)))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                logger.exception("A contribution could not be computed; it counts as zero.")
                continue
            total += counts
            del counts  # before the next row is made
        return total

    def _mean_counts(self, rows: NDArray[np.floating]) -> NDArray[np.int64]:
        # The steps of a contractive update were clipped one by one, where they were made.
        clip = clip_per_sample if self.policy.clip_unit == "contractive" else clip_contributions
        clipped = clip(rows, self.policy.clip_norm)
        share = 1.0 / self.policy.rows_per_release
        return self.plan.grid.counts(clipped, scale=share, bound=self.policy.clip_norm).sum(axis=0)

    def _rows_of(self, contribution: PerSampleContribution, samples: slice) -> NDArray[np.floating]:
        count = samples.stop - samples.start if self.policy.clip_unit == "sample" else 1
        rows, expected = contribution(samples), (count, self.num_parameters)
        if np.shape(rows) != expected:
            raise ConfigurationError(f"Expected contributions of shape {expected}, got {np.shape(rows)}.")
        return rows

    def _advance(
        self,
        stream: StreamRecord,
        session: str,
        counts: NDArray[np.int64],
        normals: NDArray[np.floating] | None,
    ) -> tuple[StreamRecord, NDArray[np.int64]]:
        release = stream.release + 1
        nonce = self._keys.nonce(session, release)
        nonces, noise_state = nonce, stream.noise_state
        if self.plan.noise_std > 0.0:
            added, removed, noise_state = self._noise(stream, release, nonce, normals)
            counts += added
            counts -= MARK if removed is None else removed
            if self.plan.mechanism.memory == "all":
                nonces = stream.nonces + nonce
        if self.policy.release_rule == "paper":
            pending = {}
        else:
            if stream.release > stream.ack:
                counts += stream.pending[stream.release]
            pending = {j: sent for j, sent in stream.pending.items() if j > release - MOST_PENDING}
            pending[release] = counts
        return stream.released(nonces, pending, noise_state), counts

    def _noise(
        self, stream: StreamRecord, release: int, nonce: bytes, normals: NDArray[np.floating] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, State]:
        """What a release adds and removes, as marked counts, and the part of the mechanism's state to remember."""
        mechanism, scale = self.plan.mechanism, self._noise_scale
        state, kept = stream.noise_state, None
        if release == 1:
            state = mechanism.initial_state(self.num_parameters)
        elif mechanism.memory in ("last", "all"):
            last = stream.nonces[-NONCE_BYTES:]
            made = None if self._rows is None else self._rows.take(self._keys.secret_key, last)
            if made is not None and mechanism.removes_last:
                state, kept = (), made[0]
            elif made is not None:
                state = made
            else:
                state = mechanism.state_after(stream.release, self._draw(stream), scale)
        normals = self._normals(nonce, mechanism.draws(release)) if normals is None else normals
        increment = mechanism.increment(state, release, normals, scale)
        bound = mechanism.increment_bound(release)
        bound = None if bound is None else LARGEST_NORMAL * bound * self.plan.noise_std
        if increment.removed is not None and not mechanism.removes_last:
            # Only a whole row cancels to the last bit. A part of one, rounded by itself, would make a message depend on
            # more than the real-valued mechanism releases (docs/proofs/grid-and-noise.md).
            increment = increment._replace(added=increment.added - increment.removed, removed=None)
            bound = None if bound is None else 2 * bound
        added = self._marked_counts(increment.added, bound)
        removed = kept
        if kept is None and increment.removed is not None:
            removed = self._marked_counts(increment.removed, bound)
        if self._rows is not None and mechanism.memory in ("last", "all"):
            if mechanism.removes_last:
                self._rows.keep(self._keys.secret_key, nonce, (added,))
            elif increment.state is not None:
                self._rows.keep(self._keys.secret_key, nonce, increment.state)
        return added, removed, (increment.state or ()) if mechanism.memory == "state" else ()

    @cached_property
    def _noise_scale(self) -> float:
        # Noise is made in units of the grid: its spacing is a power of two, so no digit depends on that.
        return float(self.plan.grid.factor(self.plan.noise_std))

    def _marked_counts(self, noise: NDArray[np.floating], bound: float | None) -> NDArray[np.int64]:
        # Not in the mechanism's own memory unless it hands that over: what it adds may be part of its state, which a
        # cache may hold, or of what it removes.
        return self.plan.grid.marked(np.asarray(noise), bound, in_place=self._in_place)

    @cached_property
    def _in_place(self) -> bool:
        return bool(vars(type(self.plan.mechanism)).get("hands_over", False))

    def _row_key(self, session: str, release: int) -> bytes | None:
        """The key of the normals a simulated machine's release will be made with; None where it must make its own."""
        if self.plan.noise_std == 0.0 or self.plan.mechanism.draws(release) != 1:
            return None
        return row_key(self._keys.secret_key, self._keys.nonce(session, release))

    def _normals(self, nonce: bytes, draws: int = 1) -> NDArray[np.floating]:
        key = row_key(self._keys.secret_key, nonce)
        return standard_normals(key, draws * self.num_parameters, self.policy.noise_quality)

    def _draw(self, stream: StreamRecord) -> Draw:
        """The normals of earlier releases whose nonces are kept."""
        first = stream.release - len(stream.nonces) // NONCE_BYTES + 1

        def draw(releases: range) -> NDArray[np.floating]:
            nonces = [stream.nonces[NONCE_BYTES * (j - first) : NONCE_BYTES * (j - first + 1)] for j in releases]
            keys = [row_key(self._keys.secret_key, nonce) for nonce in nonces]
            return standard_normal_rows(keys, self.num_parameters, self.policy.noise_quality)

        return draw
