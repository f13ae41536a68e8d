"""The client of prefix sums: contributions of its samples, bounded and on the grid, become releases P_k - P_ack.

A client's private stream is the noisy prefix sum P_k = s_1 + ... + s_k + (row k of B Z), with s_j its contributions
and B Z the mechanism's noise. It sends P_k - P_ack, where ack is the last of its releases that the server says it has
aggregated. With nothing lost this is the papers' message s_k + y_k - y_{k-1} (reshef-levy-2025, algorithm 1). When a
reply is lost the next one carries what was missing, contribution and noise, so a loss costs delay and leaves no noise
behind (ALGORITHMS 2.4).

All arithmetic is on int64 counts of a fixed grid. What is remembered between releases is P_j - P_ack, which was sent
before, so the ledger of a client whose server is not trusted holds nothing without noise. Under secure aggregation it
also holds the last release's noise by itself, so that the next one can mend what a skipped sum did. The rule is made
for blocks of clients, whose counts may be arrays of another library with the same arithmetic; a real client, and one
that a simulation asks alone, is a block of one. Clients asked together are :mod:`.privatizer_block`.

The stream's noise
------------------
It is B Z, row by row. Release k carries the difference of row k and row k - 1, as int64 counts on the
client's grid, so that what a sum of releases should cancel does cancel, to the last bit. Normals are pure functions of
the client's secret key and a nonce, so earlier noise is made again from its nonce and never stored.

Formal guarantees
-----------------
The counts of releases 1 to k, summed, are row k of noise_std B Z. Each release is rounded to the grid once; where the
mechanism removes its last row whole, what is removed is the very counts that were added. Z comes from
:func:`~murmurfl.privacy.standard_normals`, under keys that no two releases share as long as no nonce repeats. What the
stream guarantees is the mechanism's promise, and the grid's.
Proof: docs/proofs/grid-and-noise.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..accounting.noise_plan import NoisePlan
from ..errors import OF_DATA, ConfigurationError, InvalidRecordError, RefusedError, is_interrupt
from ..ledger.ledger_records import NOTHING, Counts, Ledger, Pending, StreamBlock, StreamRecord
from ..mechanisms import Draw, Increment, State
from ..noise import (
    LARGEST_NORMAL,
    MARK,
    NONCE_BYTES,
    NoiseKeys,
    NoiseQuality,
    row_key,
    standard_normal_rows,
    standard_normals,
)
from .admission import Admission
from .clipping import BLOCK_ROWS, FittingContributions, StackedContributions, blocks
from .known_samples import Owners, RowBytes, sampled, sampled_owners, weights_of, weights_of_owners
from .ledgered_privatizer import LedgeredPrivatizer, Release, release_of
from .policy import PrivacyPolicy

# Where a row is made from much of the noise before it, so much is kept by a client whose caller keeps nothing.
_OWN_CACHE_BYTES = 256 << 20
_FROM_NONCES = ("last", "recent", "all")


class RowCache:
    """A cache of arrays made from recent noise, at most ``limit_bytes`` in all.

    The oldest go first, and are made again from their nonces.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> rows = RowCache(limit_bytes=2**20)
    >>> privatizer = Privatizer(policy, 3, 100, MemoryLedger(), SimulatedKeys(1, "3"), rows)
    >>> privatizer.release("session", 0, lambda samples: np.zeros((2, 3))).release
    1
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._rows: dict[tuple[bytes, bytes], tuple[NDArray[np.generic], ...]] = {}
        self._bytes = 0

    def keep(self, key: bytes, nonce: bytes, arrays: tuple[NDArray[np.generic], ...]) -> None:
        """Keep arrays that belong to a key and the nonce of a release."""
        self._rows[key, nonce] = arrays
        self._bytes += _nbytes(arrays)
        while self._bytes > self.limit_bytes and self._rows:
            self._bytes -= _nbytes(self._rows.pop(next(iter(self._rows))))

    def take(self, key: bytes, nonce: bytes) -> Any:
        """Return a release's arrays and forget them, because each is needed once; None if they are gone."""
        arrays = self._rows.pop((key, nonce), None)
        if arrays is not None:
            self._bytes -= _nbytes(arrays)
        return arrays


def _nbytes(arrays: tuple[NDArray[np.generic], ...]) -> int:
    return arrays[0].nbytes if len(arrays) == 1 else sum(values.nbytes for values in arrays)


class StreamState(NamedTuple):
    """The part of a stream that its next release's noise depends on, as :class:`StreamRecord` has it."""

    release: int
    nonces: bytes
    noise_state: State


class NoiseStream:
    """The noise of sessions of the clients of one policy, for models of ``num_parameters`` parameters.

    ``rows`` keeps what the next release will need, for simulations; by default each row is made again when it is taken
    back out, and 256 MiB are set aside where that would take the noise of several releases.
    """

    def __init__(
        self, plan: NoisePlan, num_parameters: int, quality: NoiseQuality, rows: RowCache | None = None
    ) -> None:
        if rows is None and plan.mechanism.memory in ("recent", "all"):
            rows = RowCache(_OWN_CACHE_BYTES)
        self.plan = plan
        self.num_parameters = num_parameters
        self.quality: NoiseQuality = quality
        self._rows = rows
        self._mechanism, self._memory = plan.mechanism, plan.mechanism.memory
        self._silent = plan.noise_std == 0.0
        self._bounds: dict[int, float | None] = {}
        self._fitting: set[int] = set()

    def add_to(
        self,
        counts: NDArray[np.int64],
        stream: StreamState | StreamRecord,
        key: bytes,
        nonce: bytes,
        normals: NDArray[np.floating] | None = None,
    ) -> tuple[bytes, State]:
        """Put the noise of a stream's next release on its contribution, counts of shape (d,) that are changed in place.

        ``stream`` stands after the release before; the nonce was never used before under the client's secret key.
        ``normals`` are those of key and nonce, shape (draws x d,), if they were made already. Returned are the nonces
        that the noise up to this release is made again from, and the part of it that cannot be made again.
        """
        if self._silent:
            return nonce, stream.noise_state
        mechanism, memory, release = self._mechanism, self._memory, stream.release + 1
        state, kept = self._before(stream, release, key)
        if normals is None:
            normals = standard_normals(
                row_key(key, nonce), mechanism.draws(release) * self.num_parameters, self.quality
            )
        increment = mechanism.increment(state, release, normals, self._scale)
        added, removed = self._rounded(increment, release, kept)
        counts += added
        # Marked counts carry the grid's mark, which goes with what is removed; without that it goes by itself.
        counts -= MARK if removed is None else removed
        self._keep(key, nonce, added, increment)
        left = (increment.state or ()) if memory == "state" else ()
        return self.nonces_after(stream.nonces, nonce), left

    def nonces_after(self, nonces: bytes, nonce: bytes) -> bytes:
        """Return the nonces that the noise up to a release is made again from: those before it, and its own."""
        if self._silent or self._memory not in ("recent", "all"):
            return nonce
        nonces = nonces + nonce
        return nonces[-NONCE_BYTES * self._mechanism.remembered :] if self._memory == "recent" else nonces

    def scale_of(self, release: int) -> float:
        """Return the factor from the mechanism's noise to counts; raise if a release's noise does not fit the grid."""
        if release not in self._fitting:
            self.plan.grid.marked(np.empty(0), self._bound(release))
            self._fitting.add(release)
        return self._scale

    @property
    def cache_bytes(self) -> int:
        """Memory that is set aside for what the next releases need."""
        return 0 if self._rows is None else self._rows.limit_bytes

    def draws_a_row(self, release: int) -> bool:
        """Return True if a release needs one row of normals, which can be made beforehand with those of others."""
        return self.plan.noise_std > 0.0 and self.plan.mechanism.draws(release) == 1

    def _before(
        self, stream: StreamState | StreamRecord, release: int, key: bytes
    ) -> tuple[State, NDArray[np.int64] | None]:
        """Return the mechanism's state before a release.

        Or the counts of its last row, if these are what is removed.
        """
        mechanism = self._mechanism
        if release == 1:
            return mechanism.initial_state(self.num_parameters), None
        if self._memory not in _FROM_NONCES:
            return stream.noise_state, None
        last = stream.nonces[-NONCE_BYTES:]
        made = None if self._rows is None else self._rows.take(key, last)
        if made is None:
            return mechanism.state_after(stream.release, self._draw(stream, key), self._scale), None
        return ((), made[0]) if mechanism.removes_last else (made, None)

    def _rounded(
        self, increment: Increment, release: int, kept: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the marked counts that a release adds and removes."""
        mechanism, bound = self._mechanism, self._bound(release)
        if increment.removed is not None and not mechanism.removes_last:
            # Only a whole row cancels to the last bit. A part of one, rounded by itself, would make a message depend on
            # more than the real-valued mechanism releases (docs/proofs/grid-and-noise.md).
            increment = increment._replace(added=increment.added - increment.removed, removed=None)
            bound = None if bound is None else 2 * bound
        added = self._marked(increment.added, bound)
        if kept is None and increment.removed is not None:
            kept = self._marked(increment.removed, bound)
        return added, kept

    def _bound(self, release: int) -> float | None:
        """Return the largest value that a release adds or removes; None if that is not known."""
        if release not in self._bounds:
            bound = self._mechanism.increment_bound(release)
            self._bounds[release] = None if bound is None else LARGEST_NORMAL * bound * self.plan.noise_std
        return self._bounds[release]

    def _keep(self, key: bytes, nonce: bytes, added: NDArray[np.int64], increment: Increment) -> None:
        """Keep what the next release takes back out, or starts from."""
        if self._rows is None or self._memory not in _FROM_NONCES:
            return
        if self._mechanism.removes_last:
            self._rows.keep(key, nonce, (added,))
        elif increment.state is not None:
            self._rows.keep(key, nonce, increment.state)

    @cached_property
    def _scale(self) -> float:
        # Noise is made in units of the grid: its spacing is a power of two, so no digit depends on that.
        return float(self.plan.grid.factor(self.plan.noise_std))

    def _marked(self, noise: NDArray[np.floating], bound: float | None) -> NDArray[np.int64]:
        # Not in the mechanism's own memory unless it hands that over: what it adds may be part of its state, which a
        # cache may hold, or of what it removes.
        return self.plan.grid.marked(np.asarray(noise), bound, in_place=self._in_place)

    @cached_property
    def _in_place(self) -> bool:
        return bool(vars(type(self.plan.mechanism)).get("owns_output", False))

    def _draw(self, stream: StreamState | StreamRecord, key: bytes) -> Draw:
        """Return the normals of earlier releases whose nonces are kept."""
        first = stream.release - len(stream.nonces) // NONCE_BYTES + 1

        def draw(releases: range) -> NDArray[np.floating]:
            nonces = [stream.nonces[NONCE_BYTES * (j - first) : NONCE_BYTES * (j - first + 1)] for j in releases]
            return standard_normal_rows([row_key(key, nonce) for nonce in nonces], self.num_parameters, self.quality)

        return draw


# P_j - P_ack is kept for this many of the latest unacknowledged releases. A server that asks again without
# acknowledging will not use the earlier ones, so an honest server only ever names the last.
MOST_PENDING = 4


class ReleaseRule:
    """The rule that makes contributions of clients of one policy into their releases.

    ``rows`` is for simulations (:class:`~murmurfl.privacy.release.prefix_sums.NoiseStream`).

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
        """Return the next release of each of several clients, whose streams move on.

        Contributions are int64 counts of shape (d,), on the grid; taken over and changed. A nonce was never used before
        under its client's secret key. ``note`` is what each remembers with its release; it must not depend on data.
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
        """Add to contributions what the noise of the next release adds and removes.

        Parameters are those of :meth:`advance`; of the streams only what the noise is made again from moves on.
        """
        made: list[Counts] = []
        past = zip(streams.release.tolist(), streams.nonces, streams.noise_state, strict=True)
        for row, (before, counts, key, nonce, drawn) in enumerate(
            zip(map(StreamState._make, past), contributions, keys, nonces, normals, strict=False)
        ):
            streams.nonces[row], streams.noise_state[row] = self.noise.add_to(counts, before, key, nonce, drawn)
            made.append(counts)
        return made

    @cached_property
    def recovers(self) -> int:
        """The most contributions of a release whose sum was skipped and whose noise the next one takes out; 0: none."""
        chained = self.policy.trust == "secure-aggregation" and self.policy.release_mode == "cumulative"
        return self.noise.plan.mechanism.recovers if chained and self.noise.plan.noise_std > 0.0 else 0

    def advance_mending(
        self,
        streams: StreamBlock,
        contribution: Counts,
        key: bytes,
        nonce: bytes,
        *,
        skipped: bool,
        note: State | None = None,
    ) -> tuple[Counts, bool]:
        """Return the next release of one client, whose sums may be skipped; also whether it mends what that did.

        With ``skipped`` the sum of the acknowledged release was not used. The noise of that release is then put on this
        one as well, so that the sum of all that were used has the noise of one prefix, as if nothing had happened; its
        contributions are lost. A release that carried over more contributions than :attr:`recovers` is not mended:
        whoever saw the ones it carried would see these move more noise than is charged.

        Notes
        -----
        **Formal guarantees.** Of any pattern of skipped releases, whoever says so: a sample moves one release, by no
        more in units of the noise than where none is skipped (:attr:`~murmurfl.privacy.mechanisms.Mechanism.recovers`).
        Proof: docs/proofs/secure-aggregation.md.
        """
        if not self.recovers:
            return self.advance(streams, [contribution], [key], [nonce], note=note)[0], False
        release, ack = int(streams.release[0]), int(streams.ack[0])
        kept: Any = streams.noise_state[0]  # the noise in the last release; what that was built on, whether it mended
        before, built_on, recovered = (kept[0], *kept[1].tolist()) if len(kept) == 2 else (0, -math.inf, False)
        made = contribution.copy()
        self.noised(streams, [made], [key], [nonce])
        noise = made - contribution
        if release > ack:  # the release before is carried over, with whatever it mended
            known = built_on == ack  # else there was an acknowledgement in between, and it begins behind that one
            recovered = recovered and known
            noise += before
        else:
            recovered, known = skipped and release - built_on <= self.recovers, True
            if recovered:
                made += before
                noise += before
        now: Any = (noise, np.array([ack, recovered])) if known else ()
        streams.noise_state[0] = now
        self.carry(streams, [made], note)
        return made, bool(recovered)

    def carry(self, streams: StreamBlock, releases: Sequence[Any], note: State | None = None) -> None:
        """Add to new releases what was lost before them, and keep what may be lost of them.

        ``releases`` are s_k and what the noise of release k adds and removes, a client each; they are changed. The
        streams' noise has moved on already; the rest is as for :meth:`advance`.
        """
        made, lost = streams.release.tolist(), streams.pending
        if self.policy.release_rule == "paper":
            streams.pending = [NOTHING] * len(lost)
        else:
            for release, ack, before, counts in zip(made, streams.ack.tolist(), lost, releases, strict=True):
                if release > ack:
                    counts += before[release]  # P_{k-1} - P_ack: what was lost, contribution and noise
            streams.pending = [
                {**_latest(before, release), release + 1: counts}
                for release, before, counts in zip(made, lost, releases, strict=True)
            ]
        if note is not None:
            streams.noted = [note] * len(lost)
        streams.release = streams.release + 1


def _latest(pending: Pending, release: int) -> Pending:
    """Return the pending releases that are still kept once another has been made."""
    return {j: sent for j, sent in pending.items() if j > release + 1 - MOST_PENDING} if pending else pending


logger = logging.getLogger(__name__)

_VALUES_AT_A_TIME = 1 << 22
"""Values of rows in memory at a time where samples of a sum over all of them are computed together."""

MadeT = TypeVar("MadeT")

PerSampleContribution = Callable[[slice], NDArray[np.floating] | StackedContributions]
"""Contributions of the samples in a slice of the client's data: shape (samples, parameters), or (1, parameters) for an
update made from all of them. Simulated clients whose releases are sums over all samples may give them unwritten."""

StatefulContribution = Callable[[int, State], PerSampleContribution]
"""Given how many releases a session has made and what was noted with the last one, the contributions to the next."""


class Privatizer(LedgeredPrivatizer):
    """The client of prefix sums: clipped contributions, and the noise of its mechanism on every release.

    Parameters
    ----------
    policy, num_parameters, num_samples, ledger, keys, data, roster
        See :class:`~murmurfl.privacy.release.ledgered_privatizer.LedgeredPrivatizer`, which also says what is refused.
    rows : RowCache, optional
        For simulations; by default every row is regenerated when it is taken back out, and where a state would have to
        be made again from all noise before, 256 MiB are set aside for it.

    Notes
    -----
    **Formal guarantees.** Everything :meth:`release` ever returns is, per session, plan.mu-GDP and over all sessions
    budget_mu-GDP for replacement of one sample of this client (:class:`~murmurfl.privacy.PrivacyPolicy`), whatever
    requests arrive in whatever order, provided the ledger keeps its promise. Samples are computed one by one, so that a
    contribution can depend on no other sample unless the callable remembers it; with simulated keys, and where
    :attr:`together` vouches for the rows, they are computed together, and that they do not depend on each other is
    assumed. ``exact`` noise makes this true of the numbers
    actually sent, up to the quality of its pseudorandom normals (:mod:`murmurfl.privacy.noise`).
    Under ``secure-aggregation`` plan.mu and budget_mu are guaranteed of *sums* of releases alone. What :meth:`release`
    returns by itself guarantees the worst case alone, of plan.loss and of the budget: whoever calls it must treat it as
    data, and let nothing but its masked form leave.
    Under ``trusted-server`` nothing is guaranteed against the server, and with mechanism ``none`` nothing at all. Under
    the former every session reserves the policy's mu, which the server is trusted to keep towards everybody else, and
    all sessions together stay within budget_mu. A ledger that has seen such a session opens none for a server that is
    not trusted.
    Proof: docs/proofs/release-rule.md.

    Examples
    --------
    >>> from murmurfl.privacy import MemoryLedger, PrivacyPolicy, SimulatedKeys
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0)
    >>> ledger, keys = MemoryLedger(), SimulatedKeys(1, "3")
    >>> privatizer = Privatizer(policy, num_parameters=3, num_samples=100, ledger=ledger, keys=keys)
    >>> privatizer.policy.mu
    1.0
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
        data: RowBytes | Owners | None = None,
        roster: str = "",
    ) -> None:
        super().__init__(policy, num_parameters, num_samples, ledger, keys, data=data, roster=roster)
        self._rows = rows
        self.fits: NDArray[np.bool_] | None = None
        """Whether each of the samples computed together counts: the others contribute zero. None if all count."""
        self.together = False
        """Whether the model vouches that a row of a batch depends on its own sample and the batch's size alone, to the
        last bit, and never fails: then a real client's sums over all samples are computed together, too."""
        self.unwritten = False
        """Whether contributions to a sum over all samples come as one object for a block of samples, which bounds and
        adds up rows that are never written out (``clipped_sum``), and in which a sample that fails counts as zero."""
        # None where every row has a place of its own.
        self._owners = data if isinstance(data, Owners) and data.marks is not None else None
        if self._owners is not None and self._owners.num_places < num_samples:  # the places behind are set aside
            raise ConfigurationError(
                f"Expected num_samples <= {self._owners.num_places}, the places of owners, got {num_samples}.",
                kind="mismatch",
                setting="num_samples",
                got=num_samples,
            )

    @property
    def has_few(self) -> bool:
        """Whether its samples do not fill the batches of a pass: then it releases by itself."""
        return self.policy.has_few(self.num_samples)

    @property
    def in_blocks(self) -> bool:
        """Whether it has a row for each of its samples, or places: only then it may be one of a block."""
        return self._owners is None

    def rows_before(self, sample: int) -> int:
        """Return the number of rows before a sample or, as secret as who they are, of owners before a place."""
        return sample if self._owners is None else self._owners.in_places(slice(0, sample)).stop

    @cached_property
    def release_rule(self) -> ReleaseRule:
        """The rule that makes contributions into releases."""
        return ReleaseRule(self.policy, self.plan, self.num_parameters, self._rows)

    def alike(self, num_samples: int, ledger: Ledger, keys: NoiseKeys) -> Self:
        if not self.in_blocks:
            raise ConfigurationError(
                "Expected owners with a place each, got others: Owners.one_each is for simulation.", kind="mismatch"
            )
        return super().alike(num_samples, ledger, keys)

    def release(self, session: str, ack: int, contribution: PerSampleContribution, *, skipped: bool = False) -> Release:
        """Make the next release of a session, recorded before it is returned.

        Parameters
        ----------
        session : str
            Names the training this release belongs to; a new name opens a new stream and reserves its whole mu.
        ack : int
            The last release of this session that the server has aggregated; 0 for none.
        contribution : callable
            Gives the per-sample contributions, one row a sample, of the slice of samples it is handed; of a client of
            owners one row an owner, of a slice of owners. Rows are clipped here; a non-finite row becomes zero and
            still counts. With real keys it is called for every row by itself, a row it fails on counts as zero, and it
            may be called again for the next samples, if another request took these while it was computing.
        skipped : bool
            Under secure aggregation, whether the sum with release ``ack`` was wrong and was not used: where the
            mechanism allows it, this release mends the noise.

        Returns
        -------
        Release
            Under secure aggregation it is not to be sent as it is
            (:meth:`murmurfl.privacy.sums.masking.Masking.mask`).

        Raises
        ------
        RefusedError
            If the acknowledgement, the cap, the samples or the budget forbid it. Nothing was released or spent.
        LedgerError
            If the ledger cannot be believed.
        """
        return self._release(session, ack, lambda *_: contribution, None, skipped=skipped)

    def last_release(self, session: str, ack: int, release: int) -> Release:
        """Return the last release of a session once more.

        As its ledger has it, for fresh masks under secure aggregation.

        Raises
        ------
        RefusedError
            If it is not the last, was not built on ``ack``, or is not kept (releases that stand alone are not).

        Notes
        -----
        **Formal guarantees.** Nothing is made, recorded or spent: the counts are those that :meth:`release` returned,
        under the same random name, of which a helper opens one sealing at most. Proof:
        docs/proofs/secure-aggregation.md.
        """
        with self._ledger.exclusive() as transaction:
            stream = transaction.stream(session)
        streams = StreamBlock.of(session, stream)
        last = stream is not None and (stream.release, stream.ack) == (release, ack)
        known = stream is not None and stream.fingerprint == self._fingerprint
        counts = streams.pending[0].get(release) if last and known else None
        if counts is None or self.policy.trust != "secure-aggregation":
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT, "this is not the last release of this session, or not kept"
            )
        return release_of(streams, 0, counts, self.plan, self.policy, self.num_samples)

    def release_with_state(self, session: str, ack: int, contribution: StatefulContribution, note: State) -> Release:
        """Make a release, as :meth:`release` does, with public values that the session remembers until the next one.

        Parameters
        ----------
        contribution : callable
            Given the number of this session's releases so far and what was noted with the last of them, the per-sample
            contributions as for :meth:`release`. Called again if another request made a release in between.
        note : tuple of floating-point arrays
            What to remember with this release; it must not depend on data.
        """
        return self._release(session, ack, contribution, note)

    def _release(
        self, session: str, ack: int, contribution: StatefulContribution, note: State | None, *, skipped: bool = False
    ) -> Release:
        def compute(admission: Admission) -> NDArray[np.int64]:
            rows = contribution(admission.release - 1, admission.streams.noted[0])
            return self._contribution_counts(rows, admission.samples, self._weights(admission))

        def record(admission: Admission, counts: NDArray[np.int64]) -> Release:
            nonce = self._keys.nonce(session, admission.release)
            counts, recovered = self.release_rule.advance_mending(
                *(admission.streams, counts, self._keys.secret_key, nonce), skipped=skipped, note=note
            )
            made = self._record(admission, counts)
            return replace(made, recovered=True) if recovered else made

        return self._answer(session, ack, compute, record)

    def _weights(self, admission: Admission) -> NDArray[np.float64] | None:
        """Return weight 1 for samples in a release that not all are in, and 0 for others; None where all are."""
        if self.policy.batch_selection == "poisson":
            # With real keys a nonce is fresh at every call, so no two releases have one batch, whatever became of them.
            nonce = self._keys.nonce(admission.session, admission.release)
            drawn, rate = (self._keys.secret_key, nonce), self.policy.sampling_rate
            if self._owners is not None:
                return sampled_owners(*drawn, self._owners.mark_bytes, rate)
            return sampled(*drawn, self.num_samples, rate)
        if self.policy.batch_selection != "shuffled":
            return None
        drawn = self._keys.secret_key, admission.streams.order[0]
        asked = self.policy.max_participations, admission.release
        if self._owners is not None:
            return weights_of_owners(*drawn, self._owners.mark_bytes, *asked)
        return weights_of(*drawn, self.num_samples, *asked)

    def _contribution_counts(
        self, contribution: PerSampleContribution, samples: slice, weights: NDArray[np.float64] | None = None
    ) -> NDArray[np.int64]:
        """Return the contribution on the grid: the sum of at most b bounded rows, or of all samples', divided by b.

        ``samples`` are places on a client of owners: the sum over whoever is in them, divided by b. ``weights``, 0 or
        1, say which samples are in the release of a sum over all of them; all are computed.
        """
        if self._owners is not None:
            samples = self._owners.in_places(samples)
        if self.policy.sums_samples:
            return self._sum_counts(contribution, samples, weights)
        if samples.start == samples.stop:  # of a client with few samples, whose number is public
            return np.zeros(self.num_parameters, dtype=np.int64)
        if self._keys.simulated and self.in_blocks:
            return self._mean_counts(self._rows_of(contribution, samples))
        # Each row by itself: a sample's then depends on it alone by construction, and so does whether it fails, which
        # must not show. A failure that zeroed the whole batch would move the release by S and not by 2 S / b. One row
        # at a time is in memory, whatever the batch.
        total = np.zeros(self.num_parameters, dtype=np.int64)
        share = self.policy.batch_size // self.policy.rows_per_release
        for start in range(samples.start, samples.stop, share):
            counts = self._or_nothing(contribution, slice(start, start + share), self._mean_counts)
            if counts is not None:
                total += counts
            del counts  # before the next row is made
        return total

    def _sum_counts(
        self, contribution: PerSampleContribution, samples: slice, weights: NDArray[np.float64] | None
    ) -> NDArray[np.int64]:
        """Return the sum of bounded rows over b, each block of samples rounded by itself (:mod:`.clipping`)."""
        total = np.zeros(self.num_parameters, dtype=np.int64)
        # Each owner by itself, so that one owner more or less moves one rounding and nobody to another block.
        for block in blocks(samples, BLOCK_ROWS if self.in_blocks else 1):
            chosen = None if weights is None else weights[block]
            made = self._block_sum(contribution, block, chosen)
            total += self.plan.grid.counts(made, scale=1.0 / self.policy.batch_size)
        return total

    def _block_sum(
        self, contribution: PerSampleContribution, block: slice, weights: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """Return the sum of a block's bounded rows, those with weight 0 left out after they were computed."""
        # With real keys every sample by itself, as above, but where the model vouches for them; else as many as memory
        # has room for, in batches that do not depend on data: rounding may depend on their size.
        width = self.policy.bound.width(self.num_parameters)
        step = max(_VALUES_AT_A_TIME // width, 1) if self.simulated or self.together else 1
        step = block.stop - block.start if self.unwritten else step
        total = np.zeros(self.num_parameters)
        for start in range(block.start, block.stop, step):
            part = slice(start, min(start + step, block.stop))
            chosen = None if weights is None else weights[part.start - block.start : part.stop - block.start]
            if self.simulated:
                total += self._bounded_sum(self._rows_of(contribution, part), chosen)
            else:
                total += self._real_sum(contribution, part, chosen)
        return total

    def _real_sum(
        self, contribution: PerSampleContribution, part: slice, weights: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """Sum some samples' bounded rows; one that fails counts as zero and costs no other."""
        made = self._or_nothing(contribution, part, lambda rows: self._bounded_sum(rows, weights))
        if made is not None:
            return made
        total = np.zeros(self.num_parameters)
        if part.stop - part.start > 1:  # though they were vouched for
            for i in range(part.start, part.stop):
                weight = None if weights is None else weights[i - part.start : i - part.start + 1]
                total += self._real_sum(contribution, slice(i, i + 1), weight)
        return total

    def _bounded_sum(
        self, rows: NDArray[np.floating] | StackedContributions, weights: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        return self.policy.bound.total(rows, self.num_parameters, weights)

    def _or_nothing(
        self, contribution: PerSampleContribution, samples: slice, take: Callable[[Any], MadeT]
    ) -> MadeT | None:
        """Return what a real client makes of some samples' rows; None if that fails, which only its log says."""
        try:
            return take(self._rows_of(contribution, samples))
        except InvalidRecordError:
            return None
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A contribution could not be computed; it counts as zero.", extra=OF_DATA)
            return None

    def _mean_counts(self, rows: NDArray[np.floating]) -> NDArray[np.int64]:
        bounded = self.policy.bound.rows(rows)
        share = 1.0 / self.policy.rows_per_release
        return self.plan.grid.counts(bounded, scale=share, bound=self.policy.clip_norm).sum(axis=0)

    def _rows_of(self, contribution: PerSampleContribution, samples: slice) -> Any:
        count = samples.stop - samples.start if self.policy.clips_samples else 1
        rows: Any = contribution(samples)
        if self.policy.sums_samples and (self.simulated or self.unwritten) and hasattr(rows, "norms"):
            if self.fits is None:
                return rows
            if hasattr(rows, "leave_out"):
                rows.leave_out(self.fits[samples])
                return rows
            return FittingContributions(rows, self.fits[samples])  # unwritten
        expected = (count, self.policy.bound.width(self.num_parameters))
        if np.shape(rows) != expected:
            raise ConfigurationError(
                f"Expected contributions of shape {expected}, got {np.shape(rows)}.",
                kind="wrong-shape",
                setting="contribution",
            )
        if self.fits is not None and self.policy.clips_samples:
            rows = np.where(self.fits[samples, None], rows, 0.0)
        return np.asarray(rows)
