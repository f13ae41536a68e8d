"""The rule of admission: whether a request may be answered, and what from.

The rule is a pure function of what the ledger says and of what was asked for. It spends nothing: what an admission
takes is spent when :class:`~murmurfl.privacy.machine.LedgeredMachine` records it.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field, replace

from . import protocol
from .errors import LedgerError, RefusedError
from .keys import NoiseKeys
from .ledger import Account, LedgerPage, StreamRecord
from .noise_plan import NoisePlan
from .normals import NOISE_VERSION
from .policy import NO_NOISE, PrivacyPolicy

logger = logging.getLogger(__name__)

ROUNDING = 1e-9
"""Budgets are compared with this much room, relative, for the rounding of sums of squares."""


@dataclass(frozen=True, eq=False)
class Admission:
    """A request that may be answered, and what it will be answered from; nothing is spent yet.

    Parameters
    ----------
    page : LedgerPage
        The transaction it was made in. It is worth nothing after that.
    session : str
    stream : StreamRecord
        With the acknowledgement applied.
    account : Account
        With the session's mu reserved.
    samples : slice
        The samples the release will be made from.

    Notes
    -----
    Two admissions are never equal: each may be recorded once.
    """

    page: LedgerPage
    session: str
    stream: StreamRecord
    account: Account
    samples: slice

    @property
    def release(self) -> int:
        """The number of the release it is for."""
        return self.stream.release + 1

    @property
    def samples_used(self) -> int:
        """Samples that are used up once it is recorded."""
        return max(self.account.samples_used, self.samples.stop)


@dataclass(frozen=True)
class AdmissionRule:
    """What a machine's policy lets it answer.

    Parameters
    ----------
    policy : PrivacyPolicy
    plan : NoisePlan
        The policy, worked out for the machine's model.
    num_parameters, num_samples : int
        Of the model, and of the machine's data.
    fingerprint : str
        Names the policy and the machine's key: a session in the ledger belongs to one of these.
    local_budget : float
        What of mu may ever be reserved by what holds whatever other machines and helpers do.
    keys : NoiseKeys, optional
        The machine's, from which a session's secret order is drawn; required with ``order="secret"``.

    Notes
    -----
    **Formal guarantees.** Admits at most K releases of a session, takes every sample at most as often as the policy
    says, ``min_separation`` releases apart, reserves a session's whole mu with its first release, and admits no session
    that would take the sum of all reserved mus (in squares) beyond budget_mu, nor that of what holds whatever happens
    beyond local_budget. Samples in a secret order are in no other session, before or after it. Those of
    :class:`~murmurfl.privacy.PrivateMachine` rest on this, provided that what is admitted is recorded before anything
    leaves.
    Proof: docs/proofs/release-rule.md.
    """

    policy: PrivacyPolicy
    plan: NoisePlan
    num_parameters: int
    num_samples: int
    fingerprint: str
    local_budget: float = math.inf
    keys: NoiseKeys | None = None
    _drawn: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def check(self, session: str, stream: StreamRecord | None, account: Account) -> None:
        """Refuse a ledger whose parts contradict each other.

        Raises
        ------
        LedgerError
        """
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

        if stream is not None and stream.fingerprint == self.fingerprint and self._lacks_order(stream):
            raise LedgerError(
                "Expected a session's secret order in the ledger, got none: it is damaged. Restore it from a backup or "
                "retire this machine's data; nothing was released."
            )
        if stream is not None and stream.fingerprint == self.fingerprint and self._nameless(stream):
            raise LedgerError(
                f"Expected the names of releases {self._nameless(stream)} in the ledger, got none: it is damaged. "
                "Restore it from a backup or retire this machine's data; nothing was released."
            )

    def _nameless(self, stream: StreamRecord) -> list[int]:
        """The releases that helpers must be told by name, and whose names are lost."""
        # What a helper would be told instead, that nothing was released before, may open what must stay closed.
        if self.policy.trust != "secure-aggregation" or self.policy.builds_on == "nothing":
            return []
        return sorted({*stream.pending, *([stream.ack] if stream.ack else [])} - set(stream.ids))

    def admit(
        self, page: LedgerPage, session: str, ack: int, stream: StreamRecord | None, account: Account
    ) -> Admission:
        """What a request will be answered from, by a ledger that was checked.

        Raises
        ------
        RefusedError
            If the acknowledgement, the cap, the samples or the budget forbid it.
        """
        if stream is None:
            self._check_alone(page, account)
            account = self._reserved(account, session)
            stream = StreamRecord(self.fingerprint, terms=self.policy.terms(self.num_parameters))
        if self.policy.order == "secret":
            if account.reserved.keys() != {session}:  # of rows that were added since: these may not hide here as well
                raise RefusedError(protocol.SAMPLES_USED_UP, "no fresh samples are left")
            stream = self._in_secret_order(stream, session)
        self._check_stream(stream)
        samples = self._samples(stream, account)
        return Admission(page, session, self.acknowledged(stream, ack), account, samples)

    def _check_alone(self, page: LedgerPage, account: Account) -> None:
        """Refuse a new session that would use samples of a secret order, or hide samples that others have used."""
        # What a secret order is worth is counted for samples that show nowhere else.
        secret = self.policy.order == "secret"
        returning = self.policy.order != "in-turn" or self.policy.sample_participations > 1
        if (secret and account.samples_used) or (returning and _has_secret_order(page, account)):
            raise RefusedError(protocol.SAMPLES_USED_UP, "no fresh samples are left")

    def _in_secret_order(self, stream: StreamRecord, session: str) -> StreamRecord:
        """A stream with the nonce of its secret order, drawn once before its first release and recorded with it."""
        if stream.order or self.keys is None:
            return stream
        # A request is admitted twice, before the gradients are computed and when they are recorded, for one order.
        if session not in self._drawn:
            self._drawn[session] = self.keys.nonce(session, 0)
        return replace(stream, order=self._drawn[session])

    def _lacks_order(self, stream: StreamRecord) -> bool:
        return self.policy.order == "secret" and stream.release > 0 and not stream.order

    def _samples(self, stream: StreamRecord, account: Account) -> slice:
        """The samples a stream's next release is made from."""
        if self.policy.sums_samples:
            return slice(0, self.num_samples)
        start, batch = account.samples_used, self.policy.batch_size
        if self.policy.order == "again":
            start = stream.release * batch
        elif self.policy.sample_participations > 1:
            start = stream.release % self.policy.min_separation * batch
        if start + batch > self.num_samples:
            raise RefusedError(protocol.SAMPLES_USED_UP, "no fresh samples are left")
        return slice(start, start + batch)

    def acknowledged(self, stream: StreamRecord, ack: int) -> StreamRecord:
        """A stream after an acknowledgement.

        Raises
        ------
        RefusedError
            If the acknowledgement moves backwards, or names a release that was not made or that can no longer be
            acknowledged.
        """
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
            # (P_j - P_old) - (P_new - P_old): the same prefixes, told from the new acknowledgement.
            pending = {j: counts - base for j, counts in stream.pending.items() if j > ack and base is not None}
        if not valid:
            raise RefusedError(
                protocol.BAD_ACKNOWLEDGEMENT,
                "the acknowledgement must not move backwards and must name a release that can still be acknowledged",
            )
        return stream.acknowledged(ack, pending)

    def releases_left(self, stream: StreamRecord | None, account: Account) -> int:
        """How many more releases of a session its cap and the fresh samples allow."""
        if stream is not None and stream.fingerprint != self.fingerprint:
            return 0
        left = self.policy.max_participations - (0 if stream is None else stream.release)
        if self.policy.order != "in-turn" or self.policy.sample_participations > 1:
            return left  # the session goes through samples that others may have used
        return min(left, (self.num_samples - account.samples_used) // self.policy.batch_size)

    def _check_stream(self, stream: StreamRecord) -> None:
        """Refuse a session that was opened under other terms, or has reached its cap."""
        if stream.fingerprint != self.fingerprint:
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

    def _samples_of(self, releases: int) -> int:
        """The least number of samples that many releases of a session have used."""
        if self.policy.sums_samples:
            return min(releases, 1)  # all there were: rows may have been added since
        if self.policy.sample_participations > 1:
            releases = min(releases, self.policy.min_separation)
        return releases * self.policy.batch_size

    def _reserved(self, account: Account, session: str) -> Account:
        """The account with the mu of a new session reserved."""
        if self.plan.problem or self.policy.mechanism == NO_NOISE:
            return account.reserve(session, math.inf)  # a simulated machine's, which guarantees nothing
        trusted = self.policy.trust == "trusted-server"
        if account.unbounded and not trusted:
            raise RefusedError(
                protocol.BUDGET_EXHAUSTED,
                "this machine has trusted a server with its samples: it has no budget against servers any more",
            )
        # Without noise of its own the machine's plan guarantees nothing; what counts is what the server has to keep.
        local = self.plan.mu_local if self.policy.trust == "secure-aggregation" else None
        reserved = account.reserve(session, self.policy.mu if trusted else self.plan.mu, trusted=trusted, local=local)
        budget = float(self.policy.budget_mu or self.policy.mu)
        if reserved.reserved_mu > budget * (1 + ROUNDING):
            raise RefusedError(protocol.BUDGET_EXHAUSTED, "the privacy budget of this machine does not allow a session")
        # A simulated machine's may be infinite; a real one's is refused before it comes here.
        if local != math.inf and reserved.reserved_local_mu > self.local_budget * (1 + ROUNDING):
            raise RefusedError(
                protocol.BUDGET_EXHAUSTED,
                "the budget for what holds without anybody's honesty does not allow a session on this machine",
            )
        return reserved


def _has_secret_order(page: LedgerPage, account: Account) -> bool:
    """Whether any of a ledger's sessions had a secret order."""
    streams = (page.stream(session) for session in account.reserved)
    return any(stream is not None and stream.order for stream in streams)


def _noise_version(stream: StreamRecord) -> int:
    """The version of the normals a session was begun with; a ledger that nobody reads does not say."""
    return json.loads(stream.terms).get("noise_version", 1) if stream.terms else NOISE_VERSION
