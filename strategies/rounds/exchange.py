"""The exchange of a round's messages: how long a round waits for answers, and what is counted of them.

A late answer is taken in the round in which it comes, by the same rule as any other, so whatever is late, lost or given
up, a release enters the model at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from ...privacy.errors import ConfigurationError
from .in_flight import JUST_BEHIND, RoundReplies
from .participation import LateAnswers
from .replies import UNREACHED, RoundReport, exchange
from .sampling import CohortSampler


class RoundExchange:
    """The requests and replies of a training's rounds.

    Parameters
    ----------
    sampler : CohortSampler
        Whom rounds ask, and with how many answers they end.
    late_answers : {"counted", "dropped", "refused"}
        What becomes of an answer that comes after its round.
    strategy : str
        Name of the strategy, for its refusals.
    """

    def __init__(self, sampler: CohortSampler, *, late_answers: LateAnswers, strategy: str) -> None:
        config = sampler.config
        if late_answers == "refused" and not config.waits_for_all:
            raise ConfigurationError(
                f"Expected quorum = 1 and over_selection = 1 for {strategy}, got {config.quorum:g} and "
                f"{config.over_selection:g}: it has no use for a late answer, whose budget would be spent for "
                "nothing. The timeout of start() says how long a round waits.",
                kind="conflict",
                setting="quorum",
                got=config.quorum,
            )
        self._sampler, self.requests, self.late_answers = sampler, sampler.requests, late_answers
        self.sampled = 0
        """Number of clients drawn for the round that is under way, connected or not."""
        self.asked: dict[str, int] = {}
        """The connected ones among them, each with its last aggregated release."""
        self._overdue: dict[str, int] = {}
        self._given_up = 0

    def give_up(self, reachable: Mapping[str, int] | None, timeout: float) -> None:
        """Forget requests that nobody will answer; ``reachable`` is None where there are no messages."""
        if reachable is not None:
            self._given_up = self.requests.give_up(reachable, timeout, self._sampler.excluded)

    def begin(self, names: Sequence[str], acks: Mapping[str, int]) -> None:
        """Note the clients of a round, and the acknowledgements of those that are asked."""
        self.sampled, self.asked, self._overdue = len(names), dict(acks), {}
        self._sampler.count_requests(acks.keys())

    def gather(
        self,
        grid: Grid,
        messages: Iterable[Message],
        nodes: Mapping[str, int],
        *,
        server_round: int,
        least_releases: int,
        timeout: float,
    ) -> list[Message]:
        """Send a round's requests and take what comes; ``nodes`` has all connected clients."""
        messages, sampler, config = list(messages), self._sampler, self._sampler.config
        if sampler.clients.several_on_a_node:
            return exchange(grid, messages, timeout)
        done, waits_for = sampler.unaskable - self.requests.clients, self.requests.absences.waits_for
        askable = [name for name in nodes if name not in done]
        awaited = [name for name in askable if waits_for(name)]
        if len(awaited) < max(
            len(askable) / 2, sampler.fewest_summed
        ):  # of so few a round waits for the others as well
            awaited, waits_for = askable, lambda _: True
        elif config.waits_for_all:
            found = self._answers_of_all(grid, messages, nodes, waits_for, server_round, timeout)
            self._overdue = found.overdue
            return found.replies
        share = config.needed(sampler.num_clients, min(len(awaited), sampler.clients_per_round))
        found = self.requests.gather(
            *(grid, messages, self.asked),
            server_round=server_round,
            answers=config.needed(sampler.num_clients, sum(map(waits_for, self.asked))),
            most_open=max(len(awaited) - share, 0),
            least_releases=least_releases,
            timeout=timeout,
            waits_for=waits_for,
        )
        self._overdue = found.overdue
        self._given_up += found.given_up + found.unreached
        return found.replies

    def _answers_of_all(
        self,
        grid: Grid,
        messages: Sequence[Message],
        nodes: Mapping[str, int],
        waits_for: Callable[[str], bool],
        server_round: int,
        timeout: float,
    ) -> RoundReplies:
        """Wait for the answers of all that rounds wait for, and for as long again for the others that are asked."""
        started = self.requests.clock.now()
        names = {nodes[name]: name for name in self.asked}
        absent = {node_id for node_id, name in names.items() if not waits_for(name)}
        awaited = [message for message in messages if message.metadata.dst_node_id not in absent]
        rest = [message for message in messages if message.metadata.dst_node_id in absent]
        asked = [names[message.metadata.dst_node_id] for message in rest]
        found = self.requests.ask(grid, rest, asked, server_round)
        replies = exchange(grid, awaited, timeout)
        passed = self.requests.clock.now() - started
        self.requests.linger(grid, found, server_round, until=started + min((1 + JUST_BEHIND) * passed, timeout))
        self._given_up += found.given_up + found.unreached
        answered = [reply for reply in replies if not (reply.has_error() and reply.error.code in UNREACHED)]
        came = {reply.metadata.src_node_id for reply in answered}
        for node_id, name in names.items():
            if node_id not in came | absent:
                self.requests.absences.missed(name)
        self._given_up += max(len(awaited) - len(answered), 0)
        found.replies += replies
        return found

    def answering(self, nodes: Mapping[str, int]) -> dict[str, int]:
        """Return the nodes of clients that may answer in this round: those it asked, and those that were late."""
        return {name: nodes[name] for name in self.asked} | self._overdue

    def drops(self, client: str) -> bool:
        """Return True if a client's answer came too late to count."""
        return self.late_answers != "counted" and client in self._overdue

    def counted(self, report: RoundReport, participation: Mapping[str, int | None], *, direct: bool) -> RoundReport:
        """Return the report with the counts of requests."""
        self._sampler.remaining.received(participation)
        finished = len(self._sampler.remaining.exhausted)
        if self._sampler.clients.several_on_a_node or direct:
            return replace(report, finished=finished)
        return replace(
            report,
            lost=self.sampled - len(self.asked) + self._given_up,
            overdue=len(self._overdue),
            awaited=len(self.requests.clients),
            finished=finished,
        )

    @property
    def heard_per_round(self) -> int:
        """Number of clients of a round that enter the model, sooner or later."""
        return self._sampler.clients_per_round - self.dropped_per_round

    @property
    def dropped_per_round(self) -> int:
        """The most clients of a round whose answers come too late to count."""
        sampler = self._sampler
        if not (sampler.is_patient and self.late_answers == "dropped"):
            return 0
        return sampler.clients_per_round - sampler.config.needed(sampler.num_clients)
