"""The machine of prefix sums: contributions of its samples, bounded and on the grid, become releases P_k - P_ack.

A machine's private stream is the noisy prefix sum P_k = s_1 + ... + s_k + (row k of B Z), with s_j its contributions
and B Z the mechanism's noise. It sends P_k - P_ack, where ack is the last of its releases that the server says it has
aggregated. With nothing lost this is the papers' message s_k + y_k - y_{k-1} (reshef-levy-2025, algorithm 1). When a
reply is lost the next one carries what was missing, contribution and noise, so a loss costs delay and leaves no noise
behind (ALGORITHMS 2.4).

All arithmetic is on int64 counts of a fixed grid. What is remembered between releases is P_j - P_ack, which was sent
before, so the ledger of a machine whose server is not trusted holds nothing without noise. Under secure aggregation it
also holds the last release's noise by itself, so that the next one can mend what a skipped sum did. The rule is made
for blocks of machines, whose counts may be arrays of another library with the same arithmetic; a real machine, and one
that a simulation asks alone, is a block of one. Machines asked together are :mod:`.machine_block`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import protocol
from ..accounting.noise_plan import NoisePlan
from ..errors import OF_DATA, ConfigurationError, MisfitError, RefusedError, is_interrupt
from ..ledger import Ledger
from ..ledger.ledger_block import NOTHING, Counts, StreamBlock
from ..mechanisms import State
from ..noise.noise_keys import NoiseKeys
from ..noise.noise_stream import NoiseStream, Past, RowCache
from .admission import Admission
from .clipping import BLOCK_ROWS, FittingContributions, StackedContributions, blocks
from .data_digest import RowBytes
from .ledgered_machine import LedgeredMachine
from .outgoing import Release, release_of
from .policy import PrivacyPolicy
from .record_owners import Owners
from .secret_order import weights_of, weights_of_owners

# P_j - P_ack is kept for this many of the latest unacknowledged releases. A server that asks again without
# acknowledging will not use the earlier ones, so an honest server only ever names the last.
MOST_PENDING = 4


class ReleaseRule:
    """The rule that makes contributions of machines of one policy into their releases.

    ``rows`` is for simulations (:class:`~murmurfl.privacy.noise.noise_stream.NoiseStream`).

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
            One a machine, on the grid; taken over and changed.
        keys, nonces : sequences of bytes
            The secret key of each machine, and the nonce of its release: never used before under that key.
        normals : iterable of ndarray, optional
            Those of these keys and nonces, where they were made already.
        note : tuple of floating-point arrays, optional
            What each of them remembers with its release; independent of data.
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

    @cached_property
    def mends(self) -> bool:
        """Whether releases can take out the noise of those whose sums were skipped."""
        chained = self.policy.trust == "secure-aggregation" and self.policy.builds_on == "last-opened"
        return chained and self.noise.plan.noise_std > 0.0 and self.noise.plan.mechanism.mends

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
        """The next release of one machine, whose sums may be skipped; also whether it mends what that did.

        With ``skipped`` the sum of the acknowledged release was not used. The noise of that release is then put on this
        one as well, so that the sum of all that were used has the noise of one prefix, as if nothing had happened; its
        contributions are lost.

        Notes
        -----
        **Formal guarantees.** Of any pattern of skipped releases, whoever says so: a sample moves one release, by no
        more in units of the noise than where none is skipped (:attr:`~murmurfl.privacy.mechanisms.Mechanism.mends`).
        Proof: docs/proofs/secure-aggregation.md.
        """
        if not self.mends:
            return self.advance(streams, [contribution], [key], [nonce], note=note)[0], False
        release, ack = int(streams.release[0]), int(streams.ack[0])
        kept: Any = streams.noise_state[0]  # the noise in the last release; what that was built on, whether it mended
        known = len(kept) == 2
        before, built_on, mended = (kept[0], *kept[1].tolist()) if known else (0, 0, 0)
        made = contribution.copy()
        self.noised(streams, [made], [key], [nonce])
        noise = made - contribution
        if release > ack:  # the release before is carried over, with whatever it mended
            known = known and built_on == ack  # else there was an acknowledgement in between
            noise += before
        else:
            mended, known = known and skipped, True
            if mended:
                made += before
                noise += before
        now: Any = (noise, np.array([ack, mended])) if known else ()
        streams.noise_state[0] = now
        self.carry(streams, [made], note)
        return made, bool(mended)

    def carry(self, streams: StreamBlock, releases: Sequence[Any], note: State | None = None) -> None:
        """Add to new releases what was lost before them, and keep what may be lost of them.

        ``releases`` are s_k and what the noise of release k adds and removes, a machine each; they are changed. The
        streams' noise has moved on already; the rest is as for :meth:`advance`.
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


logger = logging.getLogger(__name__)

_VALUES_AT_A_TIME = 1 << 22
"""Values of rows in memory at a time where samples of a sum over all of them are computed together."""

MadeT = TypeVar("MadeT")

PerSampleContribution = Callable[[slice], NDArray[np.floating] | StackedContributions]
"""Contributions of the samples in a slice of the machine's data: shape (samples, parameters), or (1, parameters) for an
update made from all of them. Simulated machines whose releases are sums over all samples may give them unwritten."""

NotedContribution = Callable[[int, State], PerSampleContribution]
"""Given how many releases a session has made and what was noted with the last one, the contributions to the next."""


class PrivateMachine(LedgeredMachine):
    """The machine of prefix sums: clipped contributions, and the noise of its mechanism on every release.

    Parameters
    ----------
    policy, num_parameters, num_samples, ledger, keys, data, roster
        See :class:`~murmurfl.privacy.machine.ledgered_machine.LedgeredMachine`, which also says what is refused.
    rows : RowCache, optional
        For simulations; by default every row is regenerated when it is taken back out, and where a state would have to
        be made again from all noise before, 256 MiB are set aside for it.

    Notes
    -----
    **Formal guarantees.** Everything :meth:`release` ever returns is, per session, plan.mu-GDP and over all sessions
    budget_mu-GDP for replacement of one sample of this machine (:class:`~murmurfl.privacy.PrivacyPolicy`), whatever
    requests arrive in whatever order, provided the ledger keeps its promise. Samples are computed one by one, so that a
    contribution can depend on no other sample unless the callable remembers it; with simulated keys, and where
    :attr:`together` vouches for the rows, they are computed together, and that they do not depend on each other is
    assumed. ``exact`` noise makes this true of the numbers
    actually sent, up to the quality of its pseudorandom normals (:mod:`murmurfl.privacy.noise.keyed_noise`).
    Under ``secure-aggregation`` plan.mu and budget_mu are guaranteed of *sums* of releases alone. What :meth:`release`
    returns by itself guarantees plan.mu_local, and local_budget over all sessions: whoever calls it must treat it as
    data, and let nothing but its masked form leave.
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
        data: RowBytes | Owners | None = None,
        roster: str = "",
    ) -> None:
        super().__init__(policy, num_parameters, num_samples, ledger, keys, data=data, roster=roster)
        self._rows = rows
        self.fits: NDArray[np.bool_] | None = None
        """Of samples computed together, which count: the others' contributions are zero. None for all of them."""
        self.together = False
        """Whether the model vouches that a row of a batch depends on its own sample and the batch's size alone, to the
        last bit, and never fails: then a real machine's sums over all samples are computed together, too."""
        # None where every row has a place of its own.
        self._owners = data if isinstance(data, Owners) and data.marks is not None else None
        if self._owners is not None and self._owners.num_places != num_samples:
            raise ConfigurationError(
                f"Expected num_samples = {self._owners.num_places}, the places of owners, got {num_samples}."
            )

    @property
    def in_blocks(self) -> bool:
        """Whether it has a row for each of its samples, or places: only then it may be one of a block."""
        return self._owners is None

    @cached_property
    def release_rule(self) -> ReleaseRule:
        """The rule that makes contributions into releases."""
        return ReleaseRule(self.policy, self.plan, self.num_parameters, self._rows)

    def alike(self, num_samples: int, ledger: Ledger, keys: NoiseKeys) -> Self:
        if not self.in_blocks:
            raise ConfigurationError(
                "Expected owners with a place each, got others: Owners.one_each is for simulation."
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
            Gives the per-sample contributions, one row a sample, of the slice of samples it is handed; of a machine of
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
        """The last release of a session once more, as its ledger has it, for fresh masks under secure aggregation.

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
        with self._ledger.exclusive() as page:
            stream = page.stream(session)
        streams = StreamBlock.of(session, stream)
        last = stream is not None and (stream.release, stream.ack) == (release, ack)
        known = stream is not None and stream.fingerprint == self._fingerprint
        counts = streams.pending[0].get(release) if last and known else None
        if counts is None or self.policy.trust != "secure-aggregation":
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT, "this is not the last release of this session, or not kept"
            )
        return release_of(streams, 0, counts, self.plan, self.policy, self.num_samples)

    def release_noting(self, session: str, ack: int, contribution: NotedContribution, note: State) -> Release:
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
        self, session: str, ack: int, contribution: NotedContribution, note: State | None, *, skipped: bool = False
    ) -> Release:
        def compute(admission: Admission) -> NDArray[np.int64]:
            rows = contribution(admission.release - 1, admission.streams.noted[0])
            return self._contribution_counts(rows, admission.samples, self._weights(admission))

        def record(admission: Admission, counts: NDArray[np.int64]) -> Release:
            nonce = self._keys.nonce(session, admission.release)
            counts, mended = self.release_rule.advance_mending(
                *(admission.streams, counts, self._keys.secret_key, nonce), skipped=skipped, note=note
            )
            made = self._record(admission, counts)
            return replace(made, mended=True) if mended else made

        return self._answer(session, ack, compute, record)

    def _weights(self, admission: Admission) -> NDArray[np.float64] | None:
        """Weight 1 for samples in a release, where that is the machine's secret; None where all of them are."""
        if self.policy.order != "secret":
            return None
        drawn = self._keys.secret_key, admission.streams.order[0]
        asked = self.policy.max_participations, admission.release
        if self._owners is not None:
            return weights_of_owners(*drawn, self._owners.mark_bytes, *asked)
        return weights_of(*drawn, self.num_samples, *asked)

    def _contribution_counts(
        self, contribution: PerSampleContribution, samples: slice, weights: NDArray[np.float64] | None = None
    ) -> NDArray[np.int64]:
        """The contribution on the grid: the mean of b bounded rows, or the sum over all samples divided by b.

        ``samples`` are places on a machine of owners: the sum over whoever is in them, divided by b. ``weights``, 0 or
        1, say which samples are in the release of a sum over all of them; all are computed.
        """
        if self._owners is not None:
            samples = self._owners.in_places(samples)
        if self.policy.sums_samples:
            return self._sum_counts(contribution, samples, weights)
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
        """The sum of bounded rows over b, each block of samples rounded by itself (:mod:`.clipping`)."""
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
        """The sum of a block's bounded rows, those with weight 0 left out after they were computed."""
        # With real keys every sample by itself, as above, but where the model vouches for them; else as many as memory
        # has room for, in batches that do not depend on data: rounding may depend on their size.
        width = self.policy.bound.width(self.num_parameters)
        step = max(_VALUES_AT_A_TIME // width, 1) if self.simulated or self.together else 1
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
        """The sum of some samples' bounded rows; of one that fails zero, and nothing of the others is lost with it."""
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
        """What a real machine makes of some samples' rows; None if it fails, which its own log alone says."""
        try:
            return take(self._rows_of(contribution, samples))
        except MisfitError:
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
        if self.policy.sums_samples and self.simulated and hasattr(rows, "norms"):
            return rows if self.fits is None else FittingContributions(rows, self.fits[samples])  # unwritten
        expected = (count, self.policy.bound.width(self.num_parameters))
        if np.shape(rows) != expected:
            raise ConfigurationError(f"Expected contributions of shape {expected}, got {np.shape(rows)}.")
        if self.fits is not None and self.policy.clips_samples:
            rows = np.where(self.fits[samples, None], rows, 0.0)
        return np.asarray(rows)
