"""A strategy: an update rule, and the rounds of a training around it.

A subclass has the rule (:mod:`.rule`); :mod:`.loop` has what happens between rounds. A round is put together from a
sampler (:mod:`.sampling`: whom it asks), the validation of replies (:mod:`.validation`) and an aggregator
(:mod:`~murmurfl.strategies.aggregation`: how releases become a sum, and whose noise is in it).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from ...privacy import protocol
from ...privacy.accounting.guarantee import Statements
from ...privacy.errors import ConfigurationError
from ...privacy.release.clipping import TrainingFigures, observing
from ..aggregation.plain import Aggregator, Opened, RoundContext, RoundOutcome, Skipped
from ..sums.summation import Summation
from .client_registry import by_length_and_name
from .guarded_grid import guarded
from .loop import Run, TrainingLoop
from .options import RoundOptions, check_permitted, refusing_others
from .replies import (
    DirectReplies,
    Outcome,
    Reply,
    RoundReport,
    RoundRequest,
    Vector,
    is_masked,
    log_losses,
    read_outcome,
    request_messages,
    say_refusals,
    say_unlike,
    vector_size,
)
from .rule import Rule, Turn
from .validation import ReplyValidator

logger = logging.getLogger("flwr")

StateT = TypeVar("StateT")


class ReleaseStrategy(TrainingLoop[StateT]):
    """A strategy whose clients answer with releases P_k - P_ack.

    Parameters
    ----------
    options : RoundOptions
        What every strategy takes; a subclass lists these as parameters of its own.
    rule : Rule
        The server's update.
    aggregator : Aggregator, optional
        How the releases of a round become a sum. Default: they are added up, or opened by helpers with
        ``secure_aggregation``.

    Notes
    -----
    A server that adds no noise need not be trusted: it computes post-processing of what clients released. Each release
    is aggregated at most once: a reply counts only if it was built on the last release aggregated for that client, so
    a late original beside its carry-over is dropped. Without acknowledgements every release is a prefix sum that stands
    alone, and counts in one round only.

    Examples
    --------
    >>> from murmurfl.strategies import NoisySGD, RoundOptions
    >>> rule = NoisySGD(learning_rate=0.1, num_clients=10).rule
    >>> strategy = ReleaseStrategy(RoundOptions(num_clients=10, clients_per_round=5), rule)
    >>> strategy.rule.learning_rate, len(strategy.history)
    (0.1, 0)
    """

    _QUERY_RECORDS: ClassVar[tuple[str, ...]] = (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS)

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            cls.__init__ = refusing_others(cls.__init__)

    def __init__(self, options: RoundOptions, rule: Rule[StateT], *, aggregator: Aggregator | None = None) -> None:
        super().__init__(options, rule, aggregator=aggregator)
        self._validator = ReplyValidator(
            self.aggregator,
            self.acks,
            acknowledges=self.acknowledges,
            comes_too_late=self.exchange.drops,
            check_reply=None if type(self).check_reply is ReleaseStrategy.check_reply else self.check_reply,
            say_malformed=lambda name, problem: self._say_malformed(self._nodes.get(name, 0), problem),
        )
        self._nodes: dict[str, int] = {}
        self._observed: Mapping[str, TrainingFigures] = {}
        self._looked_at: tuple[Statements | None, bool] = None, False
        self._skipped = 0, 0  # rounds looked at, and in how many of them a sum was skipped

    def _run_round(self, server_round: int, run: Run) -> MetricRecord | None:
        """Ask the clients of a round and take the step; returns the counts of the round."""
        if self.aggregator.pending:
            self._grid = None if isinstance(run.grid, DirectReplies) else run.grid
            return self._finish_round(self.aggregator.open_pending(self._context())).metrics
        if run.direct is not None:
            self._grid = None
            if not (self.clients.names and self.clients_per_round):  # later on they are all there
                self._wait_for_clients(run.direct)
            return self._take_round(server_round, run.direct.answer(self._plan_round(server_round, None))).metrics
        grid: Any = run.grid
        messages = self.configure_train(server_round, run.initial_arrays, run.train_config, grid)
        with observing() as observer:  # simulated clients of this process
            replies = self.exchange.gather(
                *(grid, messages, self._nodes),
                server_round=server_round,
                least_releases=self.aggregator.fewest_releases,
                timeout=self._timeout,
            )
        self._observed = observer.clients
        return self.aggregate_train(server_round, replies)[1]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this round's clients and ask each of them; waits for enough of them to be connected.

        Raises
        ------
        NodesUnavailableError
            If too few clients are connected when the deadline passes: all of a training that begins, later
            ``min_available_nodes``.
        """
        self._ensure_state(arrays)
        self._grid = grid
        if not self._foreseen and not self.history:
            self._begin_without_start(grid, server_round - 1)
        self._wait_for_clients(grid)
        self._nodes = self.clients.node_map()
        request = self._plan_round(server_round, self._nodes)
        points = {key: self._asked_at(point) for key, point in zip(self._QUERY_RECORDS, request.points, strict=False)}
        return request_messages(config, request, points, self._nodes)

    def _plan_round(self, server_round: int, reachable: Mapping[str, int] | None) -> RoundRequest:
        """Return the request for a round's clients, of those that can be reached (None: all can)."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a round is planned.", kind="wrong-order")
        self.exchange.give_up(reachable, self._timeout)
        names = self._cohort(server_round)
        acks = self._validator.acks_of(names if reachable is None else [name for name in names if name in reachable])
        entries = self.clients.entries
        if entries:
            check_permitted(entries[protocol.PERMIT], self.session)  # of a training that was begun under another one
        request = RoundRequest(
            *(server_round, self.session, acks, self.acks if self.acknowledges else {}),
            *(self.rule.points(self.state), {**self.entries, **entries, **self._entries_of(server_round)}),
            sums_suffice=self.sums_suffice and not self.aggregator.adds_noise,
        )
        self.exchange.begin(names, acks)
        request = self.aggregator.annotate(request, self._save)
        self._before_asking()
        return request

    def _turn(self, server_round: int) -> int:
        """Return which round of the update rule a round is: one that was skipped does not count."""
        return server_round - self._rounds_skipped()

    def _rounds_skipped(self) -> int:
        """Return in how many rounds so far a sum was skipped."""
        looked, skipped = self._skipped if self._skipped[0] <= len(self.history) else (0, 0)
        skipped += sum(bool(report.skipped) for report in self.history[looked:])
        self._skipped = len(self.history), skipped
        return skipped

    def _entries_of(self, server_round: int) -> dict[str, Any]:
        turn = self._turn(server_round)
        return {**({protocol.WEIGHED_AS: turn} if turn < server_round else {}), **self.rule.entries(turn)}

    def _before_asking(self) -> None:
        """Write what must be known before a client is asked."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the releases that can be believed and take one step of the update rule."""
        asked = self.exchange.answering(self._nodes)
        layout, masked, replies = self.release_layout, self.aggregator.masked, list(replies)
        say_unlike(server_round, sum(is_masked(reply) is (not masked) for reply in replies), masked=masked)
        say_refusals(server_round, replies, self._reasons, simulated=self.simulated)
        outcomes: list[Outcome] = []
        for reply in replies:
            outcomes.append(read_outcome(reply, layout, asked, self.options.largest_value, masked=masked))
            if outcomes[-1] is None and not reply.has_error():  # else it was said already
                self._say_malformed(reply.metadata.src_node_id, "its arrays, values or entries are no release's")
        # In the order of names: the same sum on every engine (and on the clients' grid any order gives it).
        outcomes.sort(key=lambda outcome: by_length_and_name(outcome.client) if isinstance(outcome, Reply) else (0, ""))
        report = self._take_round(server_round, outcomes)
        return self._model(), report.metrics

    def _take_round(self, server_round: int, outcomes: Iterable[Outcome]) -> RoundReport:
        """Believe what can be believed and take one step of the update rule."""
        if self.state is None:
            raise ConfigurationError("Expected configure_train before aggregate_train.", kind="wrong-order")
        done = self.history[-1].server_round if self.history else 0
        if server_round != done + 1:
            raise ConfigurationError(
                f"Expected round {done + 1} after round {done}, got round {server_round}.", kind="wrong-order"
            )
        count = partial(self._count_replies, server_round)
        return self._finish_round(self.aggregator.add(outcomes, count, self._context()))

    def _count_replies(
        self, server_round: int, outcomes: Iterable[Outcome], summation: Summation
    ) -> tuple[RoundReport, Mapping[str, int]]:
        """Add the releases that count to a sum; return the report of the round, and these releases."""
        tally = self._validator.add_valid(outcomes, summation, self._stated_before, self._observed)
        self._clipping.take(server_round, tally.figures, self.forecast, of_updates=self._clips_updates())
        self.participation = {name: tally.aggregated.get(name) for name in self.exchange.asked} | tally.aggregated
        report = tally.report(server_round, self.exchange.sampled)
        report = self.exchange.counted(report, self.participation, direct=self._grid is None)
        if not self.aggregator.masked:  # else it is not over yet
            log_losses(report)
        self.check_report(report)
        return report, {name: release for name, release in self.participation.items() if release is not None}

    def _clips_updates(self) -> bool:
        """Return True if any client has stated that it clips whole updates."""
        statements, found = self._looked_at
        if statements is not self._stated_before:  # which is replaced, and never changed
            statements = self._stated_before
            found = any(one.get(protocol.CLIP_UNIT) == "update" for one in statements.values())
            self._looked_at = statements, found
        return found

    def _say_malformed(self, node: int, problem: str) -> None:
        if self._grid is not None:
            guarded(self._grid).say_malformed(node, problem)

    def _context(self) -> RoundContext:
        """Return what the aggregator needs of the round."""
        return RoundContext(
            session=self.session,
            timeout=self._timeout,
            grid=self._grid,
            acks=self.acks,
            asked=self.exchange.asked,
            askable=lambda: self.sampler.askable,
            nodes=self._nodes,
            entries=self.clients.entries,
            layout=self.release_layout,
            is_late=self._validator.is_late,
            save=self._save,
        )

    def _finish_round(self, outcome: RoundOutcome) -> RoundReport:
        """Acknowledge the releases of a round, and take the step along their sum."""
        if self.state is None:
            raise ConfigurationError("Expected a state before a step is taken.", kind="wrong-order")
        report, total = outcome.report, None
        if isinstance(outcome, Opened):
            weight = self._weight(outcome)
            total = outcome.total if weight == 1.0 else weight * outcome.total
            if self.aggregator.masked:
                log_losses(report)
        self.acks.update(outcome.acknowledged)
        taken = dict(outcome.releases) if isinstance(outcome, Opened) else {}
        self.participation = {name: taken.get(name) for name in outcome.asked} | taken  # late ones, too
        if not isinstance(outcome, Skipped):  # else the next round asks for the same step again
            total = np.zeros(vector_size(self.release_layout)) if total is None else total
            counts = {"aggregated": report.aggregated, "samples": report.samples}
            turn = Turn(self._turn(report.server_round), self.clients_per_round, **counts, layout=self._layout)
            before, self.state = self.state, self.rule.update(self.state, total, turn)
            if self._divergence is not None:
                self._divergence.begin(self.rule.model(before))
                model = self.rule.model(self.state)
                self._divergence.take(report.server_round, total, report.aggregated, model, self.forecast)
        self.history.append(report)
        return report

    def _weight(self, outcome: Opened) -> float:
        """Return the factor for a round's sum: a step divides by the clients of a round that leaves nobody out."""
        # Other strategies divide by what came; and of streams a sum that weighs more than the next would leave noise.
        divides = self.rule.divides_by_cohort and outcome.is_memoryless
        if not (self.sampler.left_out and outcome.report.asked and divides):
            return 1.0
        asked = min(
            self.clients_per_round, len(self.sampler.askable) + len(self.sampler.left_out)
        )  # if nobody were left out
        return max(asked / outcome.report.asked, 1.0)

    def check_reply(self, reply: Reply) -> bool:
        """Return True if a well-formed reply may be aggregated; a masked release cannot be looked at."""
        return True

    def check_report(self, report: RoundReport) -> None:
        """Refuse a round from whose replies the rule must not make a step."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No requests: a client's loss or accuracy has no noise. Use ``evaluate_fn``."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None; see :meth:`configure_evaluate`."""
        return None

    def _asked_at(self, point: Vector) -> ArrayRecord:
        """Return the arrays of a query point in a request."""
        return self._record(point)
