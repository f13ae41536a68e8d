"""The sum of a round's releases: plain ones as they come, masked ones as one set that helpers then open.

Masked releases are added modulo 2^64, masks and all; less the helpers' totals that is the sum of the counts, to the bit
as of plain ones. A set can only be opened if its releases fit each other, so those that do not are dropped before, with
the name of the client and what is different about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.accounting.loss import MOST_SUMMED
from ...privacy.errors import ConfigurationError
from ...privacy.noise import Grid
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.policy import RECORDED_MODES, ReleaseMode, release_mode_of
from ...privacy.sums.masking import (
    NOTHING_OPENED,
    Header,
    MaskedRelease,
    MaskedReleaseError,
    Sealed,
    checked_header,
)
from ...privacy.sums.roster import Roster
from ..rounds.checkpoint import ANOTHER_FORMAT, CheckpointError
from ..rounds.replies import LARGEST_COUNT, Outcome, Reply, SummedReplies, Vector

logger = logging.getLogger("flwr")

Terms = tuple[ReleaseMode | Literal[""], str, float]
"""Terms that all releases of a session's sums share: release mode, the noise's terms, the grid's spacing. Releases of
clients that were asked without messages have no header, and empty words."""


@dataclass(frozen=True)
class CohortSet:
    """The releases of a round that are to be opened, and their sum under masks, as a checkpoint holds them."""

    server_round: int
    releases: dict[str, int]  # the number of each client's release, in the order of clients
    terms: Terms
    total: NDArray[np.uint64]  # the sum of the counts, shape (d,), under masks unless ``sealed`` is empty
    sealed: tuple[Sealed, ...]  # for helpers; empty for clients that were asked without messages
    ids: dict[str, str]  # the releases' random names
    report: dict[str, Any]  # the round's report, were the set opened
    asked: tuple[str, ...]  # the clients that were asked
    recovered: tuple[str, ...] = ()  # whose releases also take out the noise of those that were skipped

    @property
    def min_cohort(self) -> int:
        """Largest ``min_cohort`` that a client of this set signed; 1 for clients that were asked without messages."""
        return max((_header(one.header).min_cohort for one in self.sealed), default=1)

    @property
    def opening(self) -> str:
        """The name of the opening for helpers."""
        return str(self.server_round)

    def plain(self) -> dict[str, Any]:
        """Return the set without its sum, for JSON."""
        sealed = [[one.header.hex(), [seal.hex() for seal in one.seals], one.signature.hex()] for one in self.sealed]
        return {
            "server_round": self.server_round,
            "releases": self.releases,
            "terms": plain_terms(self.terms),
            "sealed": sealed,
            "ids": self.ids,
            "report": self.report,
            "asked": list(self.asked),
            "recovered": list(self.recovered),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], total: NDArray[np.uint64]) -> CohortSet:
        """Rebuild the set from :meth:`plain` and its sum.

        Raises
        ------
        CheckpointError
            If another version of murmurfl wrote the set, with other fields.
        """
        known = {one.name for one in fields(cls)} - {"total"}
        if set(plain) | {"asked", "recovered"} != known:
            raise CheckpointError(
                f"Expected a checkpoint whose pending set has the fields {', '.join(sorted(known))}, got "
                f"{', '.join(sorted(plain))}. {ANOTHER_FORMAT}",
                kind="other-format",
                got=sorted(plain),
            )
        sealed = tuple(
            Sealed(bytes.fromhex(header), tuple(map(bytes.fromhex, seals)), bytes.fromhex(signature))
            for header, seals, signature in plain["sealed"]
        )
        names = {key: tuple(plain.get(key, ())) for key in ("asked", "recovered")}
        settled = {"sealed": sealed, "terms": read_terms(plain["terms"]), **names}
        return cls(**{**plain, **settled}, total=total)


@dataclass
class CohortSum:
    """The sum of a round's releases that fit each other, as counts modulo 2^64."""

    size: int  # d
    counts: NDArray[np.uint64] = field(init=False)
    releases: dict[str, int] = field(init=False, default_factory=dict)
    headers: dict[str, Header] = field(init=False, default_factory=dict)
    terms: Terms = field(init=False, default=("", "", 1.0))
    recovered: set[str] = field(init=False, default_factory=set)
    _masked: dict[str, tuple[MaskedRelease, int]] = field(init=False, default_factory=dict)  # and its samples

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.size, np.uint64)

    def add(self, reply: Reply) -> None:
        """Add a release of the same terms as those before."""
        contents = reply.contents
        self.terms = terms_of(contents)
        self.releases[reply.client] = reply.release
        if reply.metrics.get(protocol.RECOVERED) == 1:
            self.recovered.add(reply.client)
        if isinstance(contents, MaskedRelease):
            self.counts += contents.counts
            self._masked[reply.client] = contents, reply.samples
            self.headers[reply.client] = _header(contents.sealed.header)
        elif isinstance(contents, Release):
            self.counts += contents.counts.ravel().view(np.uint64)  # two's complement is arithmetic modulo 2^64

    def add_sum(self, replies: SummedReplies) -> None:
        """Add several releases of clients that were asked without messages."""
        self.terms = "", "", replies.spacing
        self.releases.update(zip(replies.clients, replies.releases, strict=True))
        self.counts += replies.counts.view(np.uint64)

    def remove(self, clients: Iterable[str]) -> int:
        """Take masked releases out again; returns how many samples they count for."""
        samples = 0
        for name in clients:
            masked, its = self._masked.pop(name)
            self.counts -= masked.counts
            samples += its
            del self.releases[name], self.headers[name]
        return samples

    @property
    def sealed(self) -> tuple[Sealed, ...]:
        """Masked releases without their counts, for the helpers."""
        return tuple(masked.sealed for masked, _ in self._masked.values())

    def wanting_more(self) -> list[str]:
        """Return clients that want more releases in a sum than there would be with them and all that want no more."""
        wanted = {name: header.min_cohort for name, header in self.headers.items()}
        while wanted and max(wanted.values()) > len(wanted):
            wanted = {name: fewest for name, fewest in wanted.items() if fewest <= len(wanted)}
        return [name for name in self.headers if name not in wanted]


def plain_terms(terms: Terms) -> list[str | float]:
    """Return terms as a checkpoint has them, with the word of its format for the release mode."""
    mode, noise, spacing = terms
    return [mode and RECORDED_MODES[mode], noise, spacing]


def read_terms(plain: Sequence[Any]) -> Terms:
    """Return the terms that :func:`plain_terms` wrote."""
    word, noise, spacing = plain
    return release_mode_of(word) if word else "", str(noise), float(spacing)


def terms_of(contents: Any) -> Terms:
    """Return the terms of a release."""
    if isinstance(contents, MaskedRelease):
        header = _header(contents.sealed.header)
        return header.release_mode, header.terms, header.spacing
    return "", "", float(contents.spacing)


@lru_cache(maxsize=MOST_SUMMED)
def _header(content: bytes) -> Header:
    """Return a header that was checked before; it is read several times in a round."""
    return Header.from_bytes(content)


class ReplyScreen:
    """Screen for the replies of a round that can stand in one sum: no single client can spoil all of them.

    Parameters
    ----------
    most : int
        The most releases a round can have.
    roster : Roster or None
        None where clients are asked without messages.
    opened : mapping of str to str
        The random name of each client's last opened release.
    terms : tuple or None
        :data:`Terms` of the sums opened so far.
    is_late : callable
        Whether a reply is late, and not looked at.
    warned : set of tuples
        Warnings so far; grows.
    left_out : collection of str
        Clients that are left out for now.
    """

    def __init__(
        self,
        session: str,
        size: int,
        most: int,
        roster: Roster | None,
        opened: Mapping[str, str],
        terms: Terms | None,
        is_late: Callable[[Reply], bool],
        warned: set[tuple[str, str]],
        left_out: Collection[str] = (),
    ) -> None:
        self._session, self._size, self._most = session, size, most
        self._roster, self._opened, self._terms = roster, opened, terms
        self._is_late, self._warned, self._left_out = is_late, warned, left_out

    def screened(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Return the outcomes, with None for a reply that fits no sum, or not the sum of most others."""
        fitting = [self._fitting(outcome) for outcome in outcomes]
        terms = [self._terms_of(outcome) for outcome in fitting]
        most, room = self._terms or _most_common(fitting, terms), MOST_SUMMED
        for outcome, its in zip(fitting, terms, strict=True):
            if isinstance(outcome, SummedReplies):
                yield from self._fitting_sums(outcome, most)
            elif isinstance(outcome, Reply) and its is not None and (problem := _mismatch(its, most, room)):
                self._warn(outcome.client, problem)
                yield None
            else:
                room -= its is not None
                yield outcome

    def _fitting_sums(self, replies: SummedReplies, most: Terms | None) -> Iterator[Outcome]:
        """Return the sum of several releases, or None for each of them if it does not fit."""
        if most is None or replies.spacing == most[2]:
            yield replies
            return
        for client in replies.clients:
            self._warn(client, _difference(("", "", replies.spacing), most))
            yield None

    def _terms_of(self, outcome: Outcome) -> Terms | None:
        return terms_of(outcome.contents) if isinstance(outcome, Reply) and not self._is_late(outcome) else None

    def _fitting(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Reply) or self._is_late(outcome):
            return outcome
        if isinstance(outcome.contents, Release) and self._roster is None:
            return outcome if outcome.contents.counts.size == self._size else None
        if not isinstance(outcome.contents, MaskedRelease) or self._roster is None:
            self._warn(outcome.client, "its release is not masked")
            return None
        if outcome.client in self._left_out:  # an answer to an earlier round
            return None
        problem = self._problem(outcome, outcome.contents, self._roster)
        if problem:
            self._warn(outcome.client, problem)
            return None
        return outcome

    def _problem(self, reply: Reply, masked: MaskedRelease, roster: Roster) -> str:
        """Return why helpers would refuse a set with this release in it, or an empty string."""
        try:
            header = checked_header(masked.sealed, roster)
            Grid(header.spacing)
        except (MaskedReleaseError, ConfigurationError) as error:
            return str(error)
        if (header.client, header.release) != (reply.client, reply.release):
            return "its header names another client or release"
        if header.session != self._session:
            return "its release is of another session"
        if header.size != self._size:
            return "its model has another size"
        if header.min_cohort > self._most:
            return f"it insists on sums of at least {header.min_cohort} releases, and a round has at most {self._most}"
        built_on = NOTHING_OPENED.hex()
        if header.release_mode == "cumulative":
            built_on = self._opened.get(header.client, built_on)
        return "" if header.ack_id == built_on else "its release is not built on the last one that was opened"

    def _warn(self, client: str, problem: str) -> None:
        if (client, problem) not in self._warned:
            self._warned.add((client, problem))
            logger.warning("Client %r cannot be summed with the others: %s. Its reply is dropped.", client, problem)


def _most_common(outcomes: Iterable[Outcome], terms: Iterable[Terms | None]) -> Terms | None:
    """Return the terms of most clients, the first of several; None without any."""
    votes: dict[Terms, set[str]] = {}
    for outcome, its in zip(outcomes, terms, strict=True):
        if isinstance(outcome, Reply) and its is not None:
            votes.setdefault(its, set()).add(outcome.client)
        elif isinstance(outcome, SummedReplies):
            votes.setdefault(("", "", outcome.spacing), set()).update(outcome.clients)
    return max(votes, key=lambda its: len(votes[its]), default=None)


def _mismatch(terms: Terms, most: Terms | None, room: int) -> str:
    """Return why a release of some terms cannot stand in a sum that has room for so many, or an empty string."""
    if most is not None and terms != most:
        return _difference(terms, most)
    return "" if room else f"the sum has {MOST_SUMMED} releases, as many as helpers open"


def _difference(terms: Terms, others: Terms) -> str:
    if terms[0] != others[0]:
        return "its releases build on something else (release-rule)"
    if terms[2] != others[2]:
        return f"its grid has the spacing {terms[2]:g}, theirs {others[2]:g} (clip, batch, mu or cap)"
    return "its noise has other terms (clip, batch, mu, mechanism, cap or min-honest)"


_MOST_TOGETHER = 2**62  # a sum of counts up to this much in magnitude fits into an int64


class Summation(Protocol):
    """Accumulator for the sum of a round's releases."""

    def add(self, reply: Reply) -> None:
        """Add one release."""
        ...

    def add_sum(self, replies: SummedReplies) -> None:
        """Add the sum of several releases."""
        ...


class ReleaseSum:
    """The sum of a round's releases.

    A release that was not sent in a message is integers, the counts of its grid; counts of one grid are added exactly
    and turned into numbers once. A release that was sent is multiples of the grid's spacing, whose sum is exact below
    2^53 spacings. Both ways give the same sum.
    """

    def __init__(self, size: int) -> None:
        self._values = np.zeros(size)
        self._counts = np.zeros(size, np.int64)
        self._spacing = 0.0
        self._largest = 0  # no count of the sum is larger in magnitude

    def add(self, reply: Reply) -> None:
        contents = reply.contents
        if not isinstance(contents, Release):
            self._values += reply.values
            return
        self._add(contents.counts, contents.spacing, LARGEST_COUNT)

    def add_sum(self, replies: SummedReplies) -> None:
        self._add(replies.counts, replies.spacing, replies.largest * len(replies.clients))

    def _add(self, counts: NDArray[np.int64], spacing: float, largest: int) -> None:
        if spacing != self._spacing or self._largest + largest > _MOST_TOGETHER:
            self._collect()
            self._spacing = spacing
        self._counts += counts
        self._largest += largest

    def total(self) -> Vector:
        """Return the sum, shape (d,)."""
        self._collect()
        return self._values

    def _collect(self) -> None:
        if self._largest:
            self._values += Grid(self._spacing).values(self._counts)
            self._counts[:] = 0
            self._largest = 0
