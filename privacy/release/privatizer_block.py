"""Clients of a simulation that have one policy and one model, asked together: a row each, whole blocks at once.

Admission, noise, recording and acknowledgement are the rules that a client by itself keeps (:mod:`.admission`,
:mod:`.ledgered_privatizer`, :mod:`.prefix_sums`). Here the contributions of many clients come in one piece, whose rows
the caller vouches for: so keys are simulated ones, and real clients are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigurationError, RefusedError
from ..ledger.ledger_records import BlockLedger, Counts, JoinedLedgers, LedgerBlock, StreamBlock
from ..mechanisms import State
from ..noise import NoiseKeys, each_normal_row, row_key
from .admission import Admission, AdmissionRule, Request, has_shuffled_batches
from .clipping import StackedContributions, observe_releases
from .ledgered_privatizer import Release, release_of, samples_counted, stream_fingerprint
from .prefix_sums import Privatizer, ReleaseRule

Contributions = Callable[[list[int], list[slice]], StackedContributions]
"""Given which of the clients that were asked may release, and the fresh samples of each: their per-sample
contributions, client after client."""


class BlockArithmetic(Protocol):
    """The arithmetic on all values of a block's releases; the rules need no more of them than + and -."""

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> Sequence[Any]:
        """Contributions, bounded and on the grid, with what the noise of the next release adds and removes.

        Counts of shape (d,), a client each. What the noise is made again from goes into ``streams``.
        """
        ...

    def total(self, counts: Sequence[Any], places: Sequence[int]) -> Counts:
        """Return the sum of some clients' counts, as an array of NumPy's."""
        ...

    def sent(self, counts: Any) -> Counts:
        """One client's counts, as an array of NumPy's."""
        ...


class RowByRow:
    """The arithmetic of a block (:class:`BlockArithmetic`) in NumPy, one row after the other."""

    def __init__(self, rule: ReleaseRule) -> None:
        self._rule = rule

    def noised(
        self, streams: StreamBlock, contributions: StackedContributions, keys: Sequence[bytes], nonces: Sequence[bytes]
    ) -> list[Counts]:
        policy, noise = self._rule.policy, self._rule.noise
        batch = policy.rows_per_release
        norms = contributions.norms().reshape(len(keys), batch)
        normals: Iterator[Any] = repeat(None)
        if all(map(noise.draws_a_row, set((streams.release + 1).tolist()))):
            drawn = [row_key(key, nonce) for key, nonce in zip(keys, nonces, strict=True)]
            normals = each_normal_row(drawn, noise.num_parameters, policy.noise_quality)
        return self._rule.noised(streams, self._counts(contributions, norms), keys, nonces, normals=normals)

    def total(self, counts: Sequence[Counts], places: Sequence[int]) -> Counts:
        total = counts[places[0]].copy()
        for place in places[1:]:
            total += counts[place]
        return total

    def sent(self, counts: Counts) -> Counts:
        return counts

    def _counts(self, stack: StackedContributions, norms: NDArray[np.float64]) -> Iterator[Counts]:
        """Yield the mean of each client's bounded rows, on the grid; each is rounded by itself."""
        policy, grid, size = self._rule.policy, self._rule.noise.plan.grid, self._rule.noise.num_parameters
        bound, clip_norm, share = policy.bound, policy.clip_norm, 1.0 / norms.shape[1]
        scales: NDArray[np.float64] = np.full_like(norms, math.nan) if bound.nonnegative else bound.scales(norms)
        # Negative entries, a row that is not finite, or one too large to square: the careful way.
        plain = np.atleast_1d(np.isfinite(scales).all(axis=1))
        if bound.observed:
            observe_releases(norms[plain], clip_norm)
        factors = scales * (share / grid.spacing)
        for client, (simple, theirs) in enumerate(zip(plain.tolist(), factors.tolist(), strict=True)):
            first = client * norms.shape[1]
            if not simple:
                rows = np.empty((norms.shape[1], size))
                with np.errstate(all="ignore"):
                    for i, row in enumerate(rows):
                        stack.write(first + i, 1.0, row)
                yield grid.counts(bound.rows(rows), scale=share, bound=clip_norm).sum(axis=0)
                continue
            total: Counts | None = None
            for i, factor in enumerate(theirs):
                row = np.empty(size)
                stack.write(first + i, factor, row)
                counts = grid.rounded(row, clip_norm * share)
                total = counts if total is None else total.__iadd__(counts)
            if total is None:
                raise ConfigurationError("Expected at least one sample in a release.", kind="out-of-range")
            yield total


@dataclass(frozen=True)
class BlockReleases:
    """The answer of a block."""

    rows: list[int]
    """Indices of the clients that have released, among those that were asked."""
    counts: Sequence[Any]
    """P_k - P_ack of each, shape (d,), int64."""
    streams: StreamBlock
    """Streams of the clients, after the release."""
    refused: Mapping[int, RefusedError]
    """Reason for which each of the others has not released."""


class PrivatizerBlock:
    """Clients of one policy and one model.

    Real keys are refused: a real client releases by itself, and its failures must not show.
    ``client`` is one of them, ``keys`` gives those of a row's client. ``arithmetic``, given the release rule, makes
    what computes the values of a block; by default NumPy, row by row, as long as each stays in a processor's cache.

    Notes
    -----
    **Formal guarantees.** Each client releases exactly what its own :class:`Privatizer` would release or refuse,
    up to rounding of the contributions, provided a client's contributions are those of the samples it is handed. Keys
    are simulated, so no data are protected: mu says what real clients would give.
    Proof: docs/proofs/release-rule.md.
    """

    def __init__(
        self,
        privatizer: Privatizer,
        ledgers: LedgerBlock,
        num_samples: NDArray[np.int64],
        keys: Callable[[int], NoiseKeys],
        *,
        arithmetic: Callable[[ReleaseRule], BlockArithmetic] | None = None,
    ) -> None:
        _refuse_real(privatizer.simulated)
        self.policy, self.plan, self.num_parameters = privatizer.policy, privatizer.plan, privatizer.num_parameters
        self._admission: AdmissionRule = privatizer.admission
        self.releases: ReleaseRule = privatizer.release_rule
        self._arithmetic = (arithmetic or RowByRow)(self.releases)
        self._ledgers = ledgers
        self._num_samples = num_samples
        self._keys = keys
        self._known: dict[int, tuple[NoiseKeys, str]] = {}

    @classmethod
    def of(
        cls,
        clients: Sequence[Privatizer],
        *,
        arithmetic: Callable[[ReleaseRule], BlockArithmetic] | None = None,
    ) -> PrivatizerBlock:
        """Return a block of clients that were made by themselves, each with a ledger of its own."""
        _refuse_real(all(privatizer.simulated for privatizer in clients))
        if not all(privatizer.in_blocks for privatizer in clients):
            raise ConfigurationError(
                "Expected owners with a place each, got others: Owners.one_each is for simulation.", kind="mismatch"
            )
        if len({(privatizer.plan.fingerprint, privatizer.policy) for privatizer in clients}) != 1:
            raise ConfigurationError("Expected clients of one policy and one size, got several.", kind="mismatch")
        samples = np.array([privatizer.num_samples for privatizer in clients])
        keys = [privatizer.keys for privatizer in clients]
        ledgers = JoinedLedgers([privatizer.ledger for privatizer in clients])
        return cls(clients[0], ledgers, samples, keys.__getitem__, arithmetic=arithmetic)

    def release(
        self,
        session: str,
        rows: Sequence[int],
        acks: Sequence[int],
        contributions: Contributions,
        *,
        note: State | None = None,
    ) -> BlockReleases:
        """Return the next release of each of several clients, recorded before any is returned.

        ``contributions`` are unclipped; session, rows and acks are as for :meth:`admitted`, and the note, the same for
        all, as for :meth:`Privatizer.release_with_state`.
        """
        with self.admitted(session, rows, acks) as admission:
            stack = contributions(admission.places, admission.slices) if admission.places else None
            return admission.release(stack, note)

    @contextmanager
    def admitted(
        self, session: str, rows: Sequence[int], acks: Sequence[int], here: Sequence[bool] | None = None
    ) -> Iterator[BlockAdmission]:
        """Hold the ledgers of several clients, none twice, while what they are asked for is computed.

        ``here`` says which of them are computed here. Of the others only what follows from requests alone is recorded:
        others compute them, and know the same of these. The admission is good for one release of each, until the
        context ends.
        """
        index = np.asarray(rows, dtype=np.intp)
        with self._ledgers.exclusive(index) as ledgers:
            streams, accounts = ledgers.streams(session, index), ledgers.accounts(index)
            keys = self._keys_of(index)
            asked = Request(
                self._num_samples[index],
                [fingerprint for _, fingerprint in keys],
                order_nonce=lambda row, session: keys[row][0].nonce(session, 0),
                has_shuffled_batches=lambda row, account: has_shuffled_batches(
                    ledgers.transaction(int(index[row])), account
                ),
            )
            admitted = self._admission.admit(streams, accounts, np.asarray(acks, dtype=np.int64), asked)
            computed = np.ones(len(index), bool) if here is None else np.asarray(here, dtype=bool)
            admission = Admission(self, ledgers, index, admitted)
            try:
                yield BlockAdmission(self, admission, computed[admitted.rows])
            finally:
                admission.is_open = False

    def acknowledge(self, session: str, rows: Sequence[int], acks: Sequence[int]) -> None:
        """Apply acknowledgements to several clients; if one refuses, others may have taken note."""
        index = np.asarray(rows, dtype=np.intp)
        with self._ledgers.exclusive(index) as ledgers:
            if isinstance(ledgers, BlockLedger) and (kept := ledgers.whole(session, index)) is not None:
                # Each row is all or nothing by itself, so it need not be copied and put back.
                self._admission.acknowledge_each(*kept, acks)
                return
            streams = ledgers.streams(session, index)
            self._admission.acknowledge_each(streams, range(len(streams)), acks)
            ledgers.commit(index, streams)

    def made(self, releases: BlockReleases, place: int, row: int) -> Release:
        """Return the release at a place, as the client by itself would have made it."""
        num_samples = int(self._num_samples[row])
        counts = self._arithmetic.sent(releases.counts[place])
        counts.setflags(write=False)  # the ledger holds the very array
        return release_of(releases.streams, place, counts, self.plan, self.policy, num_samples)

    def total(self, releases: BlockReleases, places: Sequence[int]) -> Counts:
        """Return the sum of some of the releases: integers, the same in any order."""
        return self._arithmetic.total(releases.counts, places)

    def samples_counted(self, rows: Sequence[int]) -> list[int]:
        """Return the number of samples the server counts each client's release for: public."""
        return [samples_counted(self.policy, size) for size in self._num_samples[np.asarray(rows)].tolist()]

    def _noised(
        self, streams: StreamBlock, index: NDArray[np.intp], contributions: StackedContributions
    ) -> Sequence[Any]:
        keys = [key for key, _ in self._keys_of(index)]
        nonces = [
            key.nonce(streams.session, release + 1) for key, release in zip(keys, streams.release.tolist(), strict=True)
        ]
        return self._arithmetic.noised(streams, contributions, [key.secret_key for key in keys], nonces)

    def _keys_of(self, index: NDArray[np.intp]) -> list[tuple[NoiseKeys, str]]:
        """Return clients' keys, and their fingerprints."""
        rows, known = index.tolist(), self._known
        for row in rows:
            if row not in known:
                keys = self._keys(row)
                _refuse_real(keys.simulated)
                known[row] = keys, stream_fingerprint(self.plan, keys.secret_key)
        return [known[row] for row in rows]


class BlockAdmission:
    """Requests of clients of a block that may be answered, once: made by :meth:`PrivatizerBlock.admitted`."""

    def __init__(self, block: PrivatizerBlock, admission: Admission, here: NDArray[np.bool_]) -> None:
        self._block, self._admission = block, admission
        self.places: list[int] = admission.admitted.rows.tolist()
        """Indices of the clients that may release, among those that were asked."""
        self.start, self.stop = admission.admitted.start, admission.admitted.stop
        """The first of the fresh samples of each, and the one behind the last."""
        self.here: list[bool] = here.tolist()
        """Whether each of these is computed here."""

    @property
    def slices(self) -> list[slice]:
        """The fresh samples of each."""
        return self._admission.admitted.slices

    def release(self, contributions: StackedContributions | None, note: State | None = None) -> BlockReleases:
        """Make the releases and record them; ``contributions`` are unclipped, None if no client is computed here."""
        admission, block = self._admission, self._block
        admission.use(block)
        admitted = admission.admitted
        index, counts = admission.index[admitted.rows], [_ELSEWHERE] * len(self.places)
        computed = np.flatnonzero(self.here)
        if contributions is not None and computed.size:
            streams = admitted.streams if computed.size == len(index) else admitted.streams.chosen(computed)
            made = block._noised(streams, index[computed], contributions)
            if streams is not admitted.streams:
                admitted.streams.put(computed, streams)
            for place, row in zip(computed.tolist(), made, strict=True):
                counts[place] = row
        block.releases.carry(admitted.streams, counts, note)
        admission.record(block.policy)
        return BlockReleases(self.places, counts, admitted.streams, admitted.refused)


_ELSEWHERE: Any = np.int64(0)  # in the place of counts that are computed elsewhere


def _refuse_real(simulated: bool) -> None:
    if not simulated:
        raise ConfigurationError(
            "Expected simulated clients, got one with real keys: it must release by itself.", kind="unsupported"
        )
