"""Validation of replies: which releases enter the sum of a round, each at most once.

A reply counts only if it was built on the last release aggregated for its client, so a late original is dropped once
its carry-over was aggregated, and the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

from ...privacy import protocol
from ...privacy.accounting.guarantee import Statements
from ...privacy.errors import ConfigurationError
from ...privacy.release.clipping import TrainingFigures
from ..aggregation.plain import Aggregator
from ..sums.summation import Summation
from .observed import ALL_CLIENTS
from .replies import UNREACHED, Outcome, Refusal, Reply, RoundReport, SummedReplies


@dataclass
class RoundTally:
    """Tally of the replies of a round so far."""

    aggregated: dict[str, int] = field(default_factory=dict)
    """The release of each client that counts."""
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0
    malformed: int = 0
    samples: int = 0
    figures: dict[str, TrainingFigures] = field(default_factory=dict)
    """Effects of clipping, by client; in simulations only."""

    def report(self, server_round: int, sampled: int) -> RoundReport:
        """Return the report of a round that asked so many clients."""
        answered = len(self.aggregated) + self.late + self.malformed + sum(self.refused.values())
        return RoundReport(
            server_round=server_round,
            asked=sampled,
            aggregated=len(self.aggregated),
            lost=max(sampled - answered, 0),
            late=self.late,
            malformed=self.malformed,
            refused=dict(sorted(self.refused.items())),
            samples=self.samples,
        )


class ReplyValidator:
    """Validation of the replies of a training.

    Parameters
    ----------
    aggregator : Aggregator
        It accepts only what can come from a client that keeps to its policy.
    acks : dict of str to int
        The last release aggregated of each client. Releases that count are added at once, unless they are masked and
        count when their sum is opened.
    acknowledges : bool
        Whether clients are told what was aggregated.
    comes_too_late : callable
        Whether what a client answers after its round is dropped.
    check_reply : callable, optional
        Whether the rule accepts what it may see of a reply; None for a rule that accepts everything.
    say_malformed : callable
        Called with the client and the problem of a reply that is malformed.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        acks: dict[str, int],
        *,
        acknowledges: bool,
        comes_too_late: Callable[[str], bool],
        check_reply: Callable[[Reply], bool] | None,
        say_malformed: Callable[[str, str], None],
    ) -> None:
        self._aggregator, self._acks, self._acknowledges = aggregator, acks, acknowledges
        self._comes_too_late, self._check_reply, self._say_malformed = comes_too_late, check_reply, say_malformed

    def ack(self, name: str) -> int:
        """Return the last release aggregated of a client, as requests acknowledge it."""
        return self._acks.get(name, 0) if self._acknowledges else 0

    def acks_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return :meth:`ack` of several clients, by name."""
        if not self._acknowledges:
            return dict.fromkeys(names, 0)
        last = self._acks
        return {name: last.get(name, 0) for name in names}

    def is_late(self, reply: Reply) -> bool:
        """Return True if a part of this reply counted already, in another release of the client, or came too late."""
        late = reply.ack != self.ack(reply.client) or reply.release <= self._acks.get(reply.client, 0)
        return late or self._comes_too_late(reply.client)

    def add_valid(
        self,
        outcomes: Iterable[Outcome],
        summation: Summation,
        statements: Statements,
        observed: Mapping[str, TrainingFigures],
    ) -> RoundTally:
        """Add the releases that count to the sum of a round; return what became of all replies.

        Parameters
        ----------
        statements : mapping
            What clients stated before the first round: none can have made more releases than that.
        observed : mapping
            What clipping did on clients of this process.
        """
        tally = RoundTally()
        for outcome in outcomes:
            if isinstance(outcome, TrainingFigures):
                tally.figures[ALL_CLIENTS] = outcome
            elif isinstance(outcome, Refusal):
                if outcome.code not in UNREACHED:  # these are counted as lost
                    tally.refused[protocol.REFUSAL_NAMES.get(outcome.code, f"error-{outcome.code}")] += 1
            elif isinstance(outcome, SummedReplies):
                self._add_sum(outcome, summation, statements, tally)
            elif outcome is None:
                tally.malformed += 1
            else:
                self._add(outcome, summation, statements, observed, tally)
        return tally

    def _add(
        self,
        reply: Reply,
        summation: Summation,
        statements: Statements,
        observed: Mapping[str, TrainingFigures],
        tally: RoundTally,
    ) -> None:
        name = reply.client
        if not self._is_valid(reply, statements):
            tally.malformed += 1
            self._say_malformed(name, "its figures are not those of its policy")
        elif name in tally.aggregated or self.is_late(reply):
            tally.late += 1
        else:
            summation.add(reply)
            self._count(tally, {name: reply.release}, reply.samples)
            found = observed.get(name) or TrainingFigures.read(reply.metrics)
            if found is not None:
                tally.figures[name] = found

    def _add_sum(self, replies: SummedReplies, summation: Summation, statements: Statements, tally: RoundTally) -> None:
        """Add a sum of releases; refuse one with a release in it that does not count, which nobody can take out."""
        # Of many clients in every round: no object for each, and nothing asked of a check that accepts everything.
        valid = (
            repeat(True) if self._check_reply is None else (self._is_valid(one, statements) for one in replies.each())
        )
        for name, release, ack, is_valid in zip(replies.clients, replies.releases, replies.acks, valid, strict=False):
            last = self._acks.get(name, 0)
            current = ack == (last if self._acknowledges else 0) and release > last
            if name in tally.aggregated or not current or not is_valid:
                raise ConfigurationError(
                    f"Expected a sum of releases that all count, got one with release {release} of client "
                    f"{name!r} in it, which does not: an engine must hand it in by itself.",
                    kind="mismatch",
                )
        summation.add_sum(replies)
        self._count(tally, dict(zip(replies.clients, replies.releases, strict=True)), sum(replies.samples))

    def _count(self, tally: RoundTally, releases: Mapping[str, int], samples: int) -> None:
        if not self._aggregator.masked:  # else they count once they are opened
            self._acks.update(releases)
        tally.aggregated.update(releases)
        tally.samples += samples

    def _is_valid(self, reply: Reply, statements: Statements) -> bool:
        """Return True if rule and aggregator accept what they may see of a reply."""
        most = statements.get(reply.client, {}).get("max-participations", protocol.LARGEST_ROUND)
        if reply.release > most:
            return False
        seen = reply.hidden if self._aggregator.masked else reply
        if self._check_reply is not None and not self._check_reply(seen):
            return False
        return self._aggregator.validate_reply(seen, current=seen.ack == self.ack(seen.client))
