"""A round's requests, how they are sent, and which replies to believe.

A model travels as named arrays; update rules see it as one vector of float64 values. A reply comes from a client that
may be broken, a node that may be somebody else's, and a network that may duplicate or delay: it is read as a whole, or
dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.accounting.loss import MOST_SUMMED
from ...privacy.errors import ConfigurationError
from ...privacy.protocol import dtype_name, read_array, write_array
from ...privacy.release.clipping import TrainingFigures
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.sums.masking import MaskedRelease, Sealed
from .guarded_grid import guarded, printable_lines

logger = logging.getLogger("flwr")

Vector = NDArray[np.float64]
Layout = Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]]
"""Name, shape and dtype of each of the model's arrays, in order."""

STATEMENT_TIMEOUT_S = 60.0
"""Longest wait for what clients answer at once, such as their statements."""
_MOST_NAMED = 3
_STYPE = "numpy.ndarray"  # Flower's name of the format of numpy.save

_WHOLE_STATE = (
    ": it cannot be trained. Of a PyTorch module send what is trained, trainable_arrays(module), in place of its "
    "state_dict."
)


def model_vector(arrays: ArrayRecord) -> tuple[Layout, Vector]:
    """Return a model's layout and its values as one vector, shape (d,); refuse arrays that are not finite floats."""
    values = {name: array.numpy() for name, array in arrays.items()}
    if not values or all(value.dtype.kind in "iub" for value in values.values()):
        got = ", ".join(f"{value.dtype} in {name!r}" for name, value in list(values.items())[:_MOST_NAMED])
        raise ConfigurationError(
            "Expected a model with floating-point arrays, to which noise can be added, got "
            f"{got or 'an empty ArrayRecord'}. Trees (XGBoost, LightGBM, random forests) and models that travel as "
            "bytes have none. Train a model with weights on the same features, such as LogisticRegression or a small "
            "network (private_client_app takes both); or grow the trees on public data and train their leaf values "
            "alone, as one array of floats.",
            kind="wrong-type",
        )
    for name, value in values.items():
        if value.dtype.kind != "f" or not np.isfinite(value).all():
            raise ConfigurationError(
                f"Expected finite floating-point initial arrays, got {value.dtype} in {name!r}"
                f"{_WHOLE_STATE if value.dtype.kind != 'f' else ' with values that are not finite.'}",
                kind="wrong-type",
            )
    layout = [(name, value.shape, value.dtype) for name, value in values.items()]
    return layout, np.concatenate([np.asarray(value, dtype=np.float64).ravel() for value in values.values()])


def array_record(vector: Vector, layout: Layout) -> ArrayRecord:
    """Return the arrays of a model from its vector, each cast to its own dtype."""
    record, start = ArrayRecord(), 0
    for name, shape, dtype in layout:
        size = math.prod(shape)
        values = np.asarray(vector[start : start + size].reshape(shape), dtype=dtype)
        record[name] = Array(dtype_name(values), values.shape, _STYPE, write_array(values))
        start += size
    return record


def vector_size(layout: Layout) -> int:
    """d, the number of values in all arrays."""
    return sum(math.prod(shape) for _, shape, _ in layout)


LARGEST_VALUE = 1e100
"""Largest value of a release: sums of finite but huge values could become infinite, and then NaN."""

LARGEST_COUNT = 2**53
"""Largest count of a release in magnitude: what is sent is float64, and exact."""

_MOST_SAMPLES = 2**31


@dataclass(frozen=True)
class RoundReport:
    """Outcome of one round's requests.

    Examples
    --------
    >>> report = RoundReport(server_round=1, asked=10, aggregated=9, lost=1)
    >>> report.asked - report.aggregated
    1
    """

    server_round: int
    asked: int = 0
    """m, clients sampled."""
    aggregated: int = 0
    """Replies that entered the model."""
    lost: int = 0
    """Clients that were not connected or whose reply did not come in time."""
    late: int = 0
    """Replies dropped because another of the client's was aggregated since, or because they came after their round."""
    malformed: int = 0
    """Replies dropped for their shape, values or entries."""
    refused: dict[str, int] = field(default_factory=dict)
    """Error replies by reason."""
    samples: int = 0
    """Samples in the aggregated replies by their own account, public: b of each client, or all that it has."""
    unopened: int = 0
    """Replies carried over under secure aggregation: the round was closed, or they want more releases in it."""
    skipped: int = 0
    """Replies in a sum that came out wrong, under secure aggregation, of which nothing is in the model."""
    closed: str = ""
    """Reason for which the round was closed; empty if it was not."""
    overdue: int = 0
    """Replies to requests of earlier rounds."""
    awaited: int = 0
    """Requests, of this round and earlier ones, that were open when it ended."""
    finished: int = 0
    """Clients that have made all their releases, and are not asked any more."""

    @property
    def refusals(self) -> int:
        """Error replies in all."""
        return sum(self.refused.values())

    @property
    def metrics(self) -> MetricRecord:
        """The counts for Flower's results."""
        counts = {
            "asked": self.asked,
            "aggregated": self.aggregated,
            "lost": self.lost,
            "late": self.late,
            "malformed": self.malformed,
            "refused": self.refusals,
            **({"unopened": self.unopened} if self.closed else {}),
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"overdue": self.overdue, "awaited": self.awaited} if self.overdue or self.awaited else {}),
        }
        return _metrics(tuple(counts.items())).copy()


@lru_cache(maxsize=64)
def _metrics(counts: tuple[tuple[str, int], ...]) -> MetricRecord:
    """Return a round's counts as a record; Flower checks each entry, which takes longer than anything else of it."""
    return MetricRecord(dict(counts))


@dataclass(frozen=True)
class RoundRequest:
    """Request of one round, before it becomes messages.

    Examples
    --------
    >>> import numpy as np
    >>> request = RoundRequest(1, "session", acks={"0": 0, "1": 0}, aggregated={}, points=(np.zeros(3),))
    >>> list(request.acks), request.points[0].shape
    (['0', '1'], (3,))
    """

    server_round: int  # t, from 1
    session: str
    acks: Mapping[str, int]
    """The clients asked, in order, and the last release of each that was aggregated."""
    aggregated: Mapping[str, int]
    """The last release aggregated of every client, asked or not; it grows while the round's replies are taken."""
    points: tuple[Vector, ...]
    """The query points, each of shape (d,)."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the request to every client, plain values."""
    sums_suffice: bool = False
    """Whether replies of several clients may come as :class:`SummedReplies`."""
    skipped: Collection[str] = ()
    """The clients whose last acknowledged release was in a sum that was skipped."""


@dataclass(frozen=True)
class Reply:
    """A reply that could be read.

    Examples
    --------
    >>> import numpy as np
    >>> from murmurfl.privacy import protocol
    >>> reply = Reply(client="3", release=2, ack=1, contents=np.array([0.5, -1.0]), metrics={protocol.NUM_EXAMPLES: 8})
    >>> reply.values.tolist(), reply.samples
    ([0.5, -1.0], 8)
    """

    client: str
    release: int
    """k."""
    ack: int
    """The acknowledgement that the release was built on."""
    contents: Vector | Release | MaskedRelease | None
    """P_k - P_ack: the values that were sent, shape (d,); in a simulation without messages the release itself; under
    secure aggregation the masked one. None where it must not be looked at (:attr:`hidden`)."""
    metrics: Mapping[str, Any]
    """The other entries."""

    @property
    def values(self) -> Vector:
        """P_k - P_ack, shape (d,); refused where it is masked."""
        if self.contents is None or isinstance(self.contents, MaskedRelease):
            raise ConfigurationError(
                "Expected a release without masks, got a masked one: only sums can be seen.", kind="mismatch"
            )
        return self.contents.values if isinstance(self.contents, Release) else self.contents

    @property
    def samples(self) -> int:
        """Samples in the release by its own account; 0 where that is impossible."""
        samples = self.metrics.get(protocol.NUM_EXAMPLES)
        return samples if isinstance(samples, int) and 1 <= samples <= _MOST_SAMPLES else 0

    @property
    def hidden(self) -> Reply:
        """The reply without its release: what is seen of one under masks, on every engine."""
        return replace(self, contents=None)


@dataclass(frozen=True)
class SummedReplies:
    """Replies of several clients of a simulation, whose releases were added up where they were made."""

    clients: tuple[str, ...]
    releases: tuple[int, ...]  # k of each
    acks: tuple[int, ...]
    samples: tuple[int, ...]
    counts: NDArray[np.int64]  # the sum of their releases, shape (d,), in units of the grid's spacing
    spacing: float  # of their common grid
    largest: int = LARGEST_COUNT  # bound on the magnitude of a count of a single release
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the other entries, the same for all

    def each(self) -> Iterator[Reply]:
        """Return the reply of each client, without its release."""
        for name, release, ack, samples in zip(self.clients, self.releases, self.acks, self.samples, strict=True):
            yield Reply(name, release, ack, None, {**self.metrics, protocol.NUM_EXAMPLES: samples})


@dataclass(frozen=True)
class Refusal:
    """An error reply.

    Examples
    --------
    >>> from murmurfl.privacy import protocol
    >>> Refusal(protocol.BUDGET_EXHAUSTED).code == protocol.BUDGET_EXHAUSTED
    True
    """

    code: int  # of :mod:`murmurfl.privacy.protocol`


Outcome = Reply | SummedReplies | Refusal | TrainingFigures | None
"""The answer to a request; None if it cannot be read. Clients that are asked directly may answer several at once, and
add what clipping did in the round."""


@runtime_checkable
class DirectReplies(Protocol):
    """Clients that are asked without messages: a simulation in this process.

    Examples
    --------
    >>> class Silent:
    ...     def names(self):
    ...         return ["0", "1"]
    ...     def answer(self, request):
    ...         return []
    ...     def statements(self, session, names=None):
    ...         return {}
    >>> isinstance(Silent(), DirectReplies)
    True
    """

    def names(self) -> Sequence[str]:
        """All clients."""
        ...

    def answer(self, request: RoundRequest) -> Iterable[Outcome]:
        """Return the answers, without lost ones."""
        ...

    def statements(self, session: str, names: Sequence[str] | None = None) -> Mapping[str, Mapping[str, Any]]:
        """Return the clients' privacy statements by name, of all or of ``names``."""
        ...


UNREACHED = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE})
"""Errors by which Flower says that a client does not answer: killed, cut off or gone, it has refused nothing."""


def read_outcome(
    message: Message,
    layout: Layout,
    nodes: Mapping[str, int],
    largest_value: float = LARGEST_VALUE,
    *,
    masked: bool = False,
) -> Refusal | Reply | None:
    """Read a message: a refusal, a reply with the model's arrays (``layout``), or None if it is malformed.

    A client answers for itself only: ``nodes`` has those of the clients asked in this round. ``largest_value`` bounds
    magnitudes, since a huge one would swallow everybody else's; it is not checked under masks.
    """
    if message.has_error():
        return None if message.error.code == protocol.MALFORMED_REPLY else Refusal(message.error.code)
    arrays, metrics, config = (
        message.content.get(key, None) for key in (protocol.ARRAYS, protocol.METRICS, protocol.CONFIG)
    )
    if not (isinstance(arrays, ArrayRecord) and isinstance(metrics, MetricRecord) and isinstance(config, ConfigRecord)):
        return None
    name, numbered = config.get(protocol.CLIENT), _read_numbers(metrics)
    if not isinstance(name, str) or nodes.get(name) != message.metadata.src_node_id or numbered is None:
        return None
    release, ack = numbered
    parts = _read_parts(arrays, layout)
    contents: Vector | MaskedRelease | None = None
    if parts is not None:
        contents = _read_masked(parts, config) if masked else _read_values(parts, largest_value)
    # Lists are nobody's, and what is read from a number that is too large may overflow.
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float) and _is_plain(value)}
    return None if contents is None else Reply(name, release, ack, contents, numbers)


def _read_numbers(metrics: MetricRecord) -> tuple[int, int] | None:
    """Return the numbers of a release and its acknowledgement; None if they are impossible, or of another protocol."""
    if metrics.get(protocol.VERSION) != protocol.PROTOCOL_VERSION:
        return None
    release, ack = metrics.get(protocol.RELEASE), metrics.get(protocol.ACK)
    if not isinstance(release, int) or not isinstance(ack, int) or max(release, ack) > protocol.LARGEST_ROUND:
        return None
    return release, ack


def is_masked(message: Message) -> bool | None:
    """Whether a client's reply came under masks; None for anything else."""
    config = None if message.has_error() else message.content.get(protocol.CONFIG, None)
    if not isinstance(config, ConfigRecord) or protocol.CLIENT not in config:
        return None
    return protocol.HEADER in config


def _read_parts(arrays: ArrayRecord, layout: Layout) -> list[NDArray[Any]] | None:
    """Read the arrays of a reply if they have the model's shapes."""
    if len(arrays) != len(layout):
        return None
    parts = []
    for array, (_, shape, _) in zip(arrays.values(), layout, strict=True):
        try:
            values = read_array(array.dtype, array.shape, array.data)
        except (TypeError, ValueError):
            return None
        if values.shape != shape:
            return None
        parts.append(values)
    return parts


def _read_values(parts: list[NDArray[Any]], largest_value: float) -> Vector | None:
    if any(values.dtype.kind != "f" for values in parts):
        return None
    vector = np.concatenate([np.asarray(values, dtype=np.float64).ravel() for values in parts])
    largest = min(largest_value, LARGEST_VALUE)
    # Also false for NaN. Twice through the values, but without writing their magnitudes anywhere.
    return vector if -largest <= vector.min(initial=0.0) and vector.max(initial=0.0) <= largest else None


def _read_masked(parts: list[NDArray[Any]], config: Mapping[str, Any]) -> MaskedRelease | None:
    header, seals, signature = (config.get(key) for key in (protocol.HEADER, protocol.SEALS, protocol.SIGNATURE))
    if any(values.dtype != np.dtype(np.uint64) for values in parts):
        return None
    if not (isinstance(header, bytes) and isinstance(signature, bytes) and isinstance(seals, list)):
        return None
    if not all(isinstance(seal, bytes) for seal in seals):
        return None
    counts = np.concatenate([values.ravel() for values in parts])
    return MaskedRelease(counts, Sealed(header, tuple(map(bytes, seals)), signature))


def exchange(grid: Grid, messages: Iterable[Message], timeout: float) -> list[Message]:
    """Send and receive, never two messages at a time to one node, whose state Flower would lose."""
    waves: list[dict[int, Message]] = []
    for message in messages:
        node_id = message.metadata.dst_node_id
        wave = next((wave for wave in waves if node_id not in wave), None)
        if wave is None:
            waves.append(wave := {})
        wave[node_id] = message
    return [reply for wave in waves for reply in guarded(grid).send_and_receive(list(wave.values()), timeout=timeout)]


_ONLY_SOMETIMES = ("unopened", "skipped", "closed", "overdue", "awaited", "finished")


def plain(report: RoundReport) -> dict[str, Any]:
    """Return a report for a checkpoint, without zeros of :data:`_ONLY_SOMETIMES`."""
    return {name: value for name, value in asdict(report).items() if value or name not in _ONLY_SOMETIMES}


def log_losses(report: RoundReport) -> None:
    """Log a line where replies are missing; a warning where one was malformed."""
    if report.aggregated < report.asked or report.overdue:
        overdue = f", {report.overdue} asked for before" if report.overdue else ""
        awaited = f", {report.awaited} awaited" if report.awaited else ""
        logger.log(
            logging.WARNING if report.malformed else logging.INFO,
            "Round %d: %d of %d replies aggregated (lost %d, refused %s, late %d, malformed %d%s).",
            *(report.server_round, report.aggregated, report.asked, report.lost, report.refused),
            *(report.late, report.malformed, overdue + awaited),
        )


RecordT = TypeVar("RecordT", bound=MutableMapping[str, Any])


def request_messages(
    config: ConfigRecord,
    request: RoundRequest,
    points: Mapping[str, ArrayRecord],
    nodes: Mapping[str, int],
    message_type: str = MessageType.TRAIN,
) -> list[Message]:
    """Make the messages of a round, one a client; they share the query points, which nobody may change."""
    # What is equal for all clients is made and checked once: a copy of a record shares its values.
    entries = ConfigRecord(
        {
            **config,
            **request.entries,
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: request.server_round,
            protocol.SESSION: request.session,
        }
    )
    content = RecordDict(dict(points))
    messages: list[Message] = []
    for name, ack in request.acks.items():
        skipped = {protocol.SKIPPED: 1} if name in request.skipped else {}
        own = _put(entries.copy(), {protocol.CLIENT: name, protocol.ACK: ack, **skipped})
        records = _put(content.copy(), {protocol.CONFIG: own})
        alike = _alike(messages[0], records, nodes[name]) if messages else None
        messages.append(alike or Message(records, dst_node_id=nodes[name], message_type=message_type))
    return messages


def _alike(message: Message, content: RecordDict, node_id: int) -> Message | None:
    """Copy an unsent message with other content for another node, which is quicker; None if Flower has changed."""
    made, metadata = Message.__new__(Message), Metadata.__new__(Metadata)
    vars(metadata).update(vars(message.metadata))
    metadata.dst_node_id = node_id
    vars(made).update(vars(message), _metadata=metadata, _content=content)
    return made if vars(made).keys() == vars(message).keys() else None


def _put(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """Put values into a copy of a record, without Flower's checks."""
    inside = vars(record).get("_data")
    if inside is None:  # a Flower that keeps them elsewhere
        record.update(values)
    else:
        inside.update(values)
    return record


_LONGEST_REASON = 300
_MOST_REASONS = 10


def say_refusals(server_round: int, replies: Iterable[Message], known: list[str], *, simulated: bool = False) -> None:
    """Log why clients refuse, each reason once: new ones are appended to ``known``.

    Those of simulated clients have a traceback.
    """
    for reply in replies:
        if not reply.has_error() or reply.error.code not in protocol.REFUSAL_NAMES:
            continue
        text = reply.error.reason or ""
        traced = simulated and "\n" in text
        if reply.error.code == protocol.MALFORMED_REPLY or (reply.error.code == protocol.INTERNAL_ERROR and not traced):
            continue  # its text is ours, or says nothing
        # Whatever a client writes ends up in a terminal.
        reason = printable_lines(text if traced else text.partition("\n")[0][:_LONGEST_REASON])
        if traced and any("\n" in one for one in known):
            continue  # one traceback is enough
        if reason and reason not in known and len(known) < _MOST_REASONS:
            known.append(reason)
            logger.warning("Round %d: clients refuse: %s.", server_round, reason)


def say_unlike(server_round: int, unlike: int, *, masked: bool) -> None:
    """Warn where server and clients disagree about masks: all such replies are malformed."""
    if unlike and masked:
        logger.warning(
            "Round %d: %d replies without masks, and this server has sums of masked releases only: they are "
            "dropped. Have these clients set trust = 'secure-aggregation'.",
            *(server_round, unlike),
        )
    elif unlike:
        logger.warning(
            "Round %d: %d replies under masks (trust = 'secure-aggregation'), and this server cannot take them "
            "off: they are dropped. Give the strategy secure_aggregation=SecureAggregation(...), or run murmurfl's "
            "app with trust=secure-aggregation.",
            *(server_round, unlike),
        )


_STATEMENT_COUNTS = ("releases", "max-participations", "samples-used")
_STATEMENT_MUS = ("mu-spent", "mu-guaranteed", "mu-budget")
_STATEMENT_WORDS = (
    *("mechanism", "trust", "noise-quality", "unit"),
    *(protocol.CLIP_UNIT, protocol.RECORD, protocol.SCHEMA),
)
_LONGEST_WORD = 256
_MOST_ENTRIES = 64


def ask_statements(
    grid: Grid,
    nodes: Mapping[str, int],
    *,
    session: str,
    num_parameters: int,
    message_type: str,
    timeout: float,
    entries: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Ask clients for their privacy statements; return the sensible ones by name, unchecked.

    A client behind a noise mod learns the model's size from ``num_parameters``.
    """
    messages = []
    for name, node_id in nodes.items():
        config = ConfigRecord(
            {
                **entries,
                protocol.VERSION: protocol.PROTOCOL_VERSION,
                protocol.ASK: protocol.ASK_PRIVACY,
                protocol.SESSION: session,
                protocol.CLIENT: name,
                protocol.NUM_PARAMETERS: num_parameters,
            }
        )
        content = RecordDict({protocol.CONFIG: config})
        messages.append(Message(content, dst_node_id=node_id, message_type=message_type))
    statements = {}
    for reply in exchange(grid, messages, timeout):
        if not reply.has_error() and protocol.CONFIG in reply.content.config_records:
            entries = dict(reply.content.config_records[protocol.CONFIG])
            name = str(entries.pop(protocol.CLIENTS, ""))
            # A client speaks for itself only, and what it says must be a statement.
            if nodes.get(name) == reply.metadata.src_node_id and is_statement(entries):
                statements[name] = entries
    return statements


def is_statement(entries: Mapping[str, Any]) -> bool:
    """Return True if entries are a client's privacy statement, whose values everybody can read without a check."""
    if len(entries) > _MOST_ENTRIES or not all(_is_plain(value) for value in entries.values()):
        return False
    if math.inf in (value for key, value in entries.items() if key not in (*_STATEMENT_MUS, protocol.MU_LOCAL)):
        return False
    if any(not isinstance(entries.get(key, ""), str) for key in _STATEMENT_WORDS):
        return False
    delta = entries.get(protocol.DELTA, 0.5)
    if not isinstance(delta, float) or not 0 < delta < 1:
        return False
    return _has_counts(entries) and _has_figures(entries)


def _has_counts(entries: Mapping[str, Any]) -> bool:
    """Return True if a statement has all counts, none of them impossible."""
    counts = [entries.get(key) for key in _STATEMENT_COUNTS]
    if any(type(count) is not int or not 0 <= count <= LARGEST_COUNT for count in counts):
        return False
    return max(counts[:2]) <= protocol.LARGEST_ROUND  # type: ignore[type-var]


def _has_figures(entries: Mapping[str, Any]) -> bool:
    """Return True if a statement has every mu, and what it rests on."""
    mus = [entries.get(key) for key in _STATEMENT_MUS]
    # Under secure aggregation all three, or none: a mu without what it rests on would be said of anybody.
    sums = [entries.get(key) for key in (protocol.MU_LOCAL, protocol.MIN_HONEST, protocol.MIN_COHORT)]
    if sums != [None] * len(sums):
        mus.append(sums[0])
        if any(type(number) is not int or not 1 <= number <= MOST_SUMMED for number in sums[1:]):
            return False
    return all(isinstance(mu, int | float) and not isinstance(mu, bool) and mu >= 0 for mu in mus)


def _is_plain(value: Any) -> bool:
    """Return True for a number that is one, or a short text that can be printed."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_WORD and value.isprintable()
    return isinstance(value, int | float) and (abs(value) <= LARGEST_VALUE or value == math.inf)
