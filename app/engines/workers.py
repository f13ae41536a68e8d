"""The cohort engine over several workers: each has some of the clients, and adds up their releases.

Client i belongs to worker i mod N for good, with its ledger and its noise stream. A round draws clients regardless of
their numbers, and if sizes follow numbers then neighbours are alike, so all workers have about as much to do. A round's
query points go to the workers once. Back come sums of counts, integers that add up to the same in any grouping, and of
single clients as little as a round's report needs.

The strategy, its step and all observations stay in this process: :class:`WorkerClients` is asked as
:class:`~murmurfl.app.engines.cohort.CohortClients` is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.ledger.ledger_records import MemoryLedger
from ...privacy.release.clipping import ObservedFigures, TrainingFigures
from ...privacy.release.ledgered_privatizer import Release
from ...strategies.rounds.client_registry import NumberedNames
from ...strategies.rounds.replies import Outcome, Refusal, Reply, RoundRequest, SummedReplies
from ..data.task import Dataset, Shard
from ..runs.client_statements import GroupedStatements, Statement
from ..runs.experiment import Experiment, model_of
from .cohort import DEFAULT_ROW_CACHE_MIB, CohortClients
from .pool import Pool, WorkerState

logger = logging.getLogger(__name__)

LEDGERS = "ledgers"
"""Key of the clients' ledgers by name in a worker's state, if it keeps them."""
EXPERIMENT = "experiment"
"""Key of the last training's experiment in a worker's state."""
_CLIENTS = "clients"
_SENT = "sent"
_HEARD = "heard"


@dataclass(frozen=True)
class _Question:
    """One worker's part of a round's request."""

    server_round: int
    session: str
    # In order, the worker's own clients; or all, if a client's gradients depend on the others in the batch
    clients: NDArray[np.int64]
    acks: NDArray[np.int64]
    unanswered_for: list[str] | None  # its clients whose last release was not aggregated; None: no news
    sums_suffice: bool


@dataclass
class _Sum:
    """Releases on one grid that a worker has added up, as in SummedReplies, but of clients by position."""

    counts: NDArray[np.int64]
    spacing: float
    metrics: Mapping[str, Any]
    largest: int = 0
    positions: list[int] = field(default_factory=list)  # of the clients in the question
    releases: list[int] = field(default_factory=list)  # of each client, like samples
    samples: list[int] = field(default_factory=list)

    def add(self, position: int, reply: Reply) -> None:
        """Add one client's release."""
        counts = reply.contents.counts.ravel()  # type: ignore[union-attr]
        self.counts += counts
        self.largest = max(self.largest, int(counts.max(initial=0)), -int(counts.min(initial=0)))
        self.positions.append(position)
        self.releases.append(reply.release)
        self.samples.append(reply.samples)

    def add_sum(self, positions: Iterable[int], replies: SummedReplies) -> None:
        """Add several clients' releases."""
        self.counts += replies.counts
        self.largest = max(self.largest, replies.largest)
        self.positions.extend(positions)
        self.releases.extend(replies.releases)
        self.samples.extend(replies.samples)


@dataclass
class _Answer:
    """One worker's outcomes of a round."""

    parts: list[_Sum] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    refusals: Counter[int] = field(default_factory=Counter)
    figures: list[ObservedFigures] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


class WorkerClients:
    """An experiment's clients, spread over the workers of a pool, of which there are at most as many as clients.

    ``samples`` is the result of :func:`shared_samples`; by default the samples are sent now. With ``keeps_ledgers``
    clients keep the ledgers of earlier trainings on this pool.
    """

    def __init__(
        self,
        experiment: Experiment,
        pool: Pool,
        *,
        row_cache_mib: float = DEFAULT_ROW_CACHE_MIB,
        samples: Any = None,
        keeps_ledgers: bool = False,
    ) -> None:
        self._pool = pool
        self._names = NumberedNames(experiment.config.num_clients)
        self._asks_all = not experiment.model.rows_stand_alone
        # A worker makes the model anew: a network cannot be sent.
        bare: Any = {"model": None, "data": None, "shards": ()}
        sent = shared_samples(experiment, pool) if samples is None else samples
        # Other sessions on the same ledgers are unknown here.
        options = row_cache_mib / pool.size, keeps_ledgers, not keeps_ledgers and experiment.shortage is None
        pool.on_all(begin_training, pool.size, pool.share(replace(experiment, **bare)), sent, *options)
        self._sent: list[dict[str, int]] = [{} for _ in range(pool.size)]
        self._said: set[str] = set()

    def names(self) -> Sequence[str]:
        return self._names

    def answer(self, request: RoundRequest) -> Iterator[Outcome]:
        """Yield the outcomes of a round's request, without lost replies."""
        shared = self._pool.share((request.points, dict(request.entries)))
        own: list[list[str]] = [[] for _ in range(self._pool.size)]
        for name in request.acks:
            own[int(name) % len(own)].append(name)
        asked = [list(request.acks)] * len(own) if self._asks_all else own
        calls = {
            self._pool.call(worker, answer_part, self._question(worker, request, asked[worker]), shared): worker
            for worker, names in enumerate(own)
            if names or self._asks_all  # a worker that gets all names learns who may release
        }
        answers: list[_Answer] = []
        for call, answer in self._pool.completed(list(calls)):
            worker = calls[call]
            for message in answer.messages:
                if message not in self._said:  # several workers may say the same
                    self._said.add(message)
                    logger.warning("%s", message)
            for part in answer.parts:
                yield self._summed(worker, part, asked[worker], request)
            answers.append(answer)
        yield from self._others(answers, request)

    def _question(self, worker: int, request: RoundRequest, names: Sequence[str]) -> _Question:
        sent, aggregated = self._sent[worker], request.aggregated
        unanswered_for = None
        if aggregated:
            unanswered_for = [name for name, release in sent.items() if aggregated.get(name) != release]
            self._sent[worker] = {name: sent[name] for name in unanswered_for}
        return _Question(
            request.server_round,
            request.session,
            np.array(names, np.int64),
            np.fromiter(map(request.acks.__getitem__, names), np.int64, len(names)),
            unanswered_for,
            request.sums_suffice,
        )

    def _summed(self, worker: int, part: _Sum, names: list[str], request: RoundRequest) -> SummedReplies:
        """Return a worker's sum as strategies take it."""
        # In the part's order, which equals the question's only if all clients are alike.
        everybody = part.positions == list(range(len(names)))
        clients = tuple(names) if everybody else tuple(names[i] for i in part.positions)
        self._sent[worker].update(zip(clients, part.releases, strict=True))
        acks = tuple(map(request.acks.__getitem__, clients))
        sums = part.counts, part.spacing, part.largest, part.metrics
        return SummedReplies(clients, tuple(part.releases), acks, tuple(part.samples), *sums)

    def _others(self, answers: Iterable[_Answer], request: RoundRequest) -> Iterator[Outcome]:
        """Yield replies of single clients in the request's order, refusals, and the round's clipping figures."""
        replies = {reply.client: reply for answer in answers for reply in answer.replies}
        for name in request.acks if replies else ():
            if name in replies:
                self._sent[int(name) % self._pool.size][name] = replies[name].release
                yield replies[name]
        for code, count in sorted(sum((answer.refusals for answer in answers), Counter[int]()).items()):
            yield from (Refusal(code) for _ in range(count))
        figures = [one for answer in answers for one in answer.figures]
        if figures:
            yield ObservedFigures.united(figures)

    def statements(self, session: str, names: Sequence[str] | None = None) -> GroupedStatements:
        """Return what each client has spent."""
        numbers = np.arange(len(self._names)) if names is None else np.array([int(name) for name in names])
        return GroupedStatements(
            part for parts in self._pool.on_all(stated, self._pool.size, session, numbers) for part in parts
        )


def shared_samples(experiment: Experiment, pool: Pool) -> Any:
    """Send an experiment's data and partition to the workers of a pool, once."""
    return pool.share((experiment.data, experiment.shards))


# Workers call these functions, with their own state first.


def begin_training(
    state: WorkerState,
    worker: int,
    workers: int,
    bare: Experiment,
    samples: tuple[Dataset, Sequence[Shard]],
    row_cache_mib: float,
    keeps_ledgers: bool,
    all_answer: bool,
) -> None:
    """Make a worker's clients."""
    data, shards = samples
    whole = replace(bare, data=data, shards=shards, model=model_of(bare.config, data))
    # A worker that is asked for its own clients only need not know of the others.
    mine = None if whole.model.rows_stand_alone else range(worker, whole.config.num_clients, workers)
    ledgers = None
    if keeps_ledgers:
        ledgers = state.setdefault(LEDGERS, {str(i): MemoryLedger() for i in range(whole.config.num_clients)})
    state[_CLIENTS] = CohortClients(whole, row_cache_mib=row_cache_mib, ledgers=ledgers, clients=mine)
    state[_CLIENTS].cohort.all_answer = mine is not None and all_answer
    state[EXPERIMENT] = whole
    state[_SENT] = {}
    if _HEARD not in state:
        state[_HEARD] = _Heard()


def answer_part(state: WorkerState, question: _Question, shared: tuple[tuple[Any, ...], Mapping[str, Any]]) -> _Answer:
    """Return a worker's outcomes of a round."""
    points, entries = shared
    sent: dict[str, int] = state[_SENT]
    aggregated: dict[str, int] = {}
    if question.unanswered_for is not None:
        kept = {name: sent[name] for name in question.unanswered_for if name in sent}
        aggregated = {name: release for name, release in sent.items() if name not in kept}
        state[_SENT] = sent = kept
    names = list(map(str, question.clients.tolist()))
    acks = dict(zip(names, question.acks.tolist(), strict=True))
    request = RoundRequest(
        question.server_round, question.session, acks, aggregated, points, entries, question.sums_suffice
    )
    with state[_HEARD] as log:
        answer = _gathered(state[_CLIENTS].answer(request), names, sums_suffice=question.sums_suffice)
    answer.messages = log.messages()
    for part in answer.parts:
        sent.update(zip((names[i] for i in part.positions), part.releases, strict=True))
    sent.update((reply.client, reply.release) for reply in answer.replies)
    return answer


def stated(
    state: WorkerState, worker: int, workers: int, session: str, numbers: NDArray[np.int64]
) -> list[tuple[Statement, NDArray[np.integer]]]:
    """Statements of a worker's clients among the given numbers."""
    mine = numbers[numbers % workers == worker]
    return state[_CLIENTS].statements(session, [str(number) for number in mine.tolist()]).parts


def _gathered(outcomes: Iterable[Outcome], names: Sequence[str], *, sums_suffice: bool) -> _Answer:
    """Return a worker's outcomes, added up where sums suffice."""
    answer = _Answer()
    sums: dict[Any, _Sum] = {}
    positions = {name: i for i, name in enumerate(names)}
    for outcome in outcomes:
        if isinstance(outcome, SummedReplies):
            total = _sum_for(sums, outcome.spacing, outcome.metrics, outcome.counts.size)
            total.add_sum(map(positions.__getitem__, outcome.clients), outcome)
        elif isinstance(outcome, Reply) and sums_suffice and isinstance(outcome.contents, Release):
            entries = {name: value for name, value in outcome.metrics.items() if name != protocol.NUM_EXAMPLES}
            total = _sum_for(sums, outcome.contents.spacing, entries, outcome.contents.counts.size)
            total.add(positions[outcome.client], outcome)
        elif isinstance(outcome, Reply):
            answer.replies.append(outcome)
        elif isinstance(outcome, Refusal):
            answer.refusals[outcome.code] += 1
        elif isinstance(outcome, ObservedFigures):
            answer.figures.append(outcome)
        elif isinstance(outcome, TrainingFigures):
            raise TypeError("Expected figures that can be united, got some without medians.")
    answer.parts = list(sums.values())
    return answer


def _sum_for(sums: dict[Any, _Sum], spacing: float, metrics: Mapping[str, Any], size: int) -> _Sum:
    key = spacing, tuple(sorted(metrics.items()))
    if key not in sums:
        sums[key] = _Sum(np.zeros(size, np.int64), spacing, dict(metrics))
    return sums[key]


class _Heard(logging.Handler):
    """Collects the clients' warnings: nobody sees a worker's own log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def messages(self) -> list[str]:
        """Return the warnings since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def __enter__(self) -> _Heard:
        logging.getLogger("murmurfl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("murmurfl").removeHandler(self)
