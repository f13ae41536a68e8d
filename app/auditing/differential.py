"""A differential audit of a real client: it is made and asked twice, on records that differ in one of them.

The client is made as ``murmurfl node`` makes it, on made-up records of its public schema, asked a training's
questions, and made and asked again with one record replaced by a strange one. Key and nonces are the same, so the noise
is, and two releases differ by what the record moved. Everything else must be the same, byte for byte: whether the
client starts, types and shapes, numbers and texts beside the arrays, refusals, and the lines of a log without details.

Where row k of G is what the contribution to release k moved, and C the mechanism's encoder
(:mod:`murmurfl.privacy.mechanisms`), releases show the record as much as a Gaussian mechanism with
mu = ||C G||_F / noise_std.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from ...clients.adapters.private_app import PrivateClientApp
from ...clients.messages import Answers
from ...clients.nodes.client_file import SampleNode
from ...clients.private_client import PrivateClient
from ...clients.records.client_records import items_of
from ...clients.records.drafting import document
from ...clients.records.schema import Schema
from ...privacy import protocol
from ...privacy.accounting.gdp import asked_mu
from ...privacy.errors import ConfigurationError, is_interrupt
from ...privacy.ledger.ledger_history import read_ledger
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.noise import NONCE_BYTES, NoiseKeys, derived_bytes
from ...privacy.release.ledgered_privatizer import LedgeredPrivatizer
from ..engines.inprocess import InProcessGrid
from ..nodes.journal import LogSettings, lines_of_log
from ..nodes.node_app import OwnNode, client_of, describe, installed_app
from ..nodes.node_config import NodeConfig
from ..nodes.supernode import repeating_the_last_answer
from .neighbours import OWNERS, ROWS, handed_over, made_up_rows, neighbours, written

MOST_RELEASES, MOST_BATCH = 8, 6
"""Releases and batch of the audited client; its noise is what the operator's has for releases of that size."""
TOLERANCE = 1e-9
_NODE = 5
_DELTA = 1e-5
_MEMORY = "/dev/shm"  # noqa: S108 - what is made there is in a folder of its own, for this user alone
_START, _REFUSAL = "whether it starts", "refusal of request"


@dataclass(frozen=True)
class Found:
    """The effect of one strange record, at the worst of its places and forms."""

    record: str
    ratio: float
    """The mu that it moved over the mu that is charged; above 1 the claim is wrong."""
    differs: tuple[str, ...]
    """Other things that differed, and how records were handed over then."""

    @property
    def refutes(self) -> bool:
        """Whether it contradicts what the client claims."""
        return bool(self.differs) or not self.ratio <= 1 + TOLERANCE


@dataclass(frozen=True)
class DifferentialAudit:
    """The findings of a differential audit: one for each strange record, and what the audit does not see."""

    client: str
    unit: str
    """Unit that was replaced: a record, or all records of an owner."""
    sources: tuple[str, ...]
    """Format in which records were handed over."""
    trials: int
    """Clients that were made."""
    found: tuple[Found, ...]
    notes: tuple[str, ...] = ()

    @property
    def refuted(self) -> bool:
        """Whether anything contradicts what the client claims."""
        return any(one.refutes for one in self.found)

    @property
    def worst(self) -> float:
        """The most that any record moved over what is charged."""
        return max(one.ratio for one in self.found)

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        beginning = f"{self.trials} clients on data that differ in {self.unit}: "
        if self.refuted:
            wrong = sum(one.refutes for one in self.found)
            return f"{beginning}{wrong} of {len(self.found)} strange records show. The claim is refuted."
        return (
            f"{beginning}none of {len(self.found)} strange records shows, and none moves more than is charged (at most "
            f"{self.worst:.3f} of it). A test finds mistakes and proves nothing."
        )

    @property
    def errors(self) -> list[str]:
        """Texts of the errors that kept a client from starting, each once."""
        texts = (text for one in self.found for text in one.differs if text != _short(text))
        return list(dict.fromkeys(texts))

    def document(self) -> dict[str, Any]:
        """Everything as plain values; what is infinite is None."""
        ratios = [one.ratio if math.isfinite(one.ratio) else None for one in self.found]
        found = [
            {"record": one.record, "moved-over-charged": ratio, "differs": list(one.differs)}
            for one, ratio in zip(self.found, ratios, strict=True)
        ]
        return {
            "client": self.client,
            "unit": self.unit,
            "sources": list(self.sources),
            "trials": self.trials,
            "refuted": self.refuted,
            "records": found,
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, str]]:
        """Return the table that people read."""
        return [
            {
                "strange record": one.record,
                "moved / charged": f"{one.ratio:.3f}" if one.ratio < 100 else f"{one.ratio:.3g}",
                "same bytes": "yes" if not one.differs else f"no: {'; '.join(map(_short, one.differs))}",
            }
            for one in self.found
        ]


def audit_node(config: NodeConfig | OwnNode) -> DifferentialAudit:
    """Audit the client of an operator's file on made-up records: neither its data nor its ledger is touched.

    Raises
    ------
    ConfigurationError
        If its unit is not a record or an owner of a file, its data are built in, or it cannot be made.

    Notes
    -----
    It tests the neighbouring relation of :class:`~murmurfl.privacy.Privatizer`, replacement of one record (of all
    records of one owner), and is exact for the records, requests and points that it tries: what it finds is a mistake,
    and a mistake that it does not find may be there. A project's own function for samples is not audited.
    """
    if not isinstance(config, NodeConfig | SampleNode):
        raise ConfigurationError(
            "Expected a client that bounds records, got one whose app's updates are released as a whole: all data of "
            "the client are its unit, so no record of them can be audited.",
            kind="unsupported",
        )
    if isinstance(config, NodeConfig) and not config.samples:
        raise ConfigurationError(
            f"Expected a node with samples of its own, got task = {config.task!r}, whose data are public: audit the "
            "run's clients with `murmurfl audit --set`.",
            kind="unsupported",
            setting="task",
        )
    schema = Schema.read_file(Path(config.schema))
    return _Audit(config, schema).run()


def audit_app(name: str) -> DifferentialAudit:
    """Audit a ``private_client_app`` as a real node would run it, with the policy of its simulation.

    Raises
    ------
    ConfigurationError
        If it is another app, or says nothing of what a record is.
    """
    app: ClientApp = installed_app(name)
    if not isinstance(app, PrivateClientApp):
        raise ConfigurationError(
            f"Expected a private_client_app at {name}, got {type(app).__name__}: only what bounds records can be "
            "audited record by record.",
            kind="wrong-type",
            setting="name",
        )
    schema = app.schema or app.model.schema
    if schema is None:
        raise ConfigurationError(
            f"Expected an app that says what a record is, got none at {name}: give private_client_app a schema, or "
            "audit the node with --node.",
            kind="missing",
        )
    policy, evaluation = app.policy, app.evaluation
    own: dict[str, Any] = {}
    if evaluation is not None:
        own |= {"private_evaluation": evaluation.share, "held_out": evaluation.held_out}
        own |= {"score_bins": evaluation.score_bins}
    node = SampleNode(
        client="audited",
        ledger="none",
        method=app.method.name,
        schema="none",
        num_records=ROWS,
        clip_norm=policy.clip_norm,
        max_participations=policy.max_participations,
        mu=policy.mu,
        batch_size=0 if policy.sums_samples else policy.batch_size,
        mechanism=policy.mechanism,
        samples_per_owner=policy.samples_per_owner,
        app=name,
        **own,
    )
    return _Audit(node, schema).run()


class _RepeatedKeys(NoiseKeys):
    """A key and nonces that come again, so that two clients have the same noise: for made-up data and nothing else."""

    simulated: ClassVar[bool] = False

    def __init__(self, secret_key: bytes) -> None:
        self.secret_key = secret_key

    def nonce(self, session: str, release: int) -> bytes:
        return derived_bytes(NONCE_BYTES, "nonce of an audit", session, release)


class _AuditLedger(SQLiteLedger):
    """A ledger that an audit made and throws away."""

    def keys(self) -> Any:
        return _RepeatedKeys(super().keys().secret_key)


class _Asked(NamedTuple):
    """One request, the same for all clients: its kind, content, and the part it asks a release of, if it does."""

    kind: str
    content: RecordDict
    part: str = ""


@dataclass
class _Seen:
    """Observations of one client: named facts that must be the same, and each release's part and values."""

    facts: list[tuple[str, Any]] = field(default_factory=list)
    values: list[tuple[str, NDArray[np.float64]]] = field(default_factory=list)


Point = list[NDArray[np.float64]]
Source = tuple[str, str, Any]
"""A form of records: its name, a file's path, or without a file what a project would hand over."""


class _Audit:
    """One operator's file, made small and put on made-up records."""

    def __init__(self, config: NodeConfig | SampleNode, schema: Schema) -> None:
        self._config, self._schema = config, schema
        self._delta = _delta_of(config)
        self._mu = asked_mu(config.mu, config.epsilon or None, self._delta)
        self._ending = _ending(config.samples)
        self._trials = 0

    def run(self) -> DifferentialAudit:
        """Every neighbour in every form, against the made-up records in the same form."""
        # In memory where there is such a folder: nobody needs these ledgers, so nobody has to wait for a disk.
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        ratios: dict[str, float] = {}
        differs: dict[str, dict[str, None]] = {}
        with tempfile.TemporaryDirectory(prefix="murmurfl-audit-", dir=memory) as folder:
            home = Path(folder)
            self._prepare(home)
            bases = {source[0]: self._base(home, source) for source in self._sources(home, made_up_rows(self._schema))}
            forms = list(bases)
            for number, neighbour in enumerate(neighbours(self._schema, lines=self._ending.startswith(".csv"))):
                wanted = [forms[number % len(forms)]] if neighbour.again else forms
                name = neighbour.name
                for source in self._sources(home, neighbour.rows):
                    if source[0] in wanted:
                        ratio, seen = self._compared(home, source, *bases[source[0]])
                        where = f" ({source[0]})" if len(forms) > 1 else ""
                        ratios[name] = max(ratios.get(name, 0.0), ratio)
                        differs.setdefault(name, {}).update({f"{one}{where}": None for one in seen})
        results = tuple(Found(name, ratio, _few(differs[name])) for name, ratio in ratios.items())
        unit = "all records of an owner" if self._schema.owner else "one record"
        client = describe(bases[forms[0]][1])
        return DifferentialAudit(client, unit, tuple(forms), self._trials, results, tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        if self._config.secure:
            yield "Audited without masks, as for a server that is not trusted: masks are drawn anew each time."
        if not self._ending:
            yield (
                "The project's own function for samples is not audited: made-up records stand in the place of what it "
                "gives. It must treat each record by itself."
            )

    def _prepare(self, home: Path) -> None:
        """Write the files that all clients are made from: schema and ledger."""
        reviewed = self._schema.model_copy(update={"reviewed": True})
        (home / "schema.toml").write_text(document(reviewed))
        (home / "fresh").mkdir()
        SQLiteLedger.create(home / "fresh" / "ledger.sqlite", budget_mu=self._mu, delta=self._delta)
        config = self._config
        changed: dict[str, Any] = {"ledger": str(home / "ledger.sqlite"), "schema": str(home / "schema.toml")}
        changed["num_records"] = OWNERS if self._schema.owner else ROWS
        sums_samples, passes = False, 1
        if isinstance(config, NodeConfig):
            changed |= {"budget_local_mu": 0.0, "budget_mu": 0.0}
            sums_samples, passes = config.method.sums_samples, config.passes
        if config.secure:
            changed["trust"] = type(config).settings()["trust"].default
        batch = min(config.batch_size, MOST_BATCH // 3 if self._schema.owner else MOST_BATCH)
        held_out = math.ceil(config.held_out * changed["num_records"]) if config.private_evaluation else 0
        most = MOST_RELEASES
        if batch and not sums_samples:
            most = min(most, passes * ((changed["num_records"] - held_out) // batch))
        releases = min(config.max_participations or most, most)
        self._small = replace(config, batch_size=batch, max_participations=releases, **changed)

    def _sources(self, home: Path, rows: list[Any]) -> Iterator[Source]:
        """Rows as the operator's kind of file or, without one, in all forms in which a project may give them."""
        if self._ending:
            path = home / f"samples{self._ending}"
            if written(self._schema, rows, path):
                yield self._ending[1:], str(path), None
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, found in handed_over(self._schema, rows):
                yield name, "", found

    def _made(self, home: Path, source: Source) -> tuple[Answers, PrivateClient]:
        """Return a client on records, with the ledger as it was at first."""
        for file in home.glob("ledger.sqlite*"):
            file.unlink()
        for file in (home / "fresh").iterdir():
            shutil.copy2(file, home / file.name)
        _, path, found = source
        self._trials += 1
        config = replace(self._small, samples=path)
        items = None if path else items_of(found)
        return client_of(config, ledger=_AuditLedger(config.ledger), items=items)

    def _base(self, home: Path, source: Source) -> tuple[_Seen, PrivateClient, list[_Asked]]:
        seen = _Seen()
        with _recorded(seen):
            answers, client = self._made(home, source)
            asked = _requests(client)
            _replay(seen, answers, client, asked)
        return seen, client, asked

    def _compared(
        self, home: Path, source: Source, base: _Seen, client: PrivateClient, asked: list[_Asked]
    ) -> tuple[float, list[str]]:
        seen = _Seen()
        with _recorded(seen):
            try:
                _replay(seen, *self._made(home, source), asked)
            except BaseException as error:
                if is_interrupt(error):
                    raise
                seen.facts.append((_START, f"{type(error).__name__}: {error}"))
        return _moved_over_charged(base, seen, client), _differences(base, seen)


@contextmanager
def _recorded(seen: _Seen) -> Iterator[None]:
    """Keep what a node's log would say meanwhile, and whatever is printed."""
    printed = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(printed), redirect_stderr(printed):
        warnings.simplefilter("ignore")  # a node's log has none
        with lines_of_log(LogSettings(verbose=True)) as lines:
            yield
    seen.facts += [("the log", tuple(lines)), ("what is printed", printed.getvalue())]


def _requests(client: PrivateClient) -> list[_Asked]:
    """Return the requests of an honest server and of another one: every release and more, all at made-up points."""
    points, session = _Points(client), "audit"
    asked = [_Asked(kind, _content(ask=ask, session=session)) for kind in ("query", "train") for ask in _QUESTIONS]
    asked_for = [part.query for part in client.parts.values()]
    first, last = [one for one in asked_for if one.gives], [one for one in asked_for if not one.gives]
    asked += [_Asked("train", _content(session=one.name, of=one.name), one.name) for one in first]
    policy = client.privatizer.policy
    for k in range(1, policy.max_participations + 1):
        asked.append(_Asked("train", _content(k, session, points=points.of(k), public=points.public), "training"))
    for one in last:
        model = points.model(client.parts[one.name].asked_at) if one.at_a_model else []
        content = _content(session=one.name, of=one.name, public=points.public, points=model)
        asked.append(_Asked("train", content, one.name))
    after = policy.max_participations + 1
    asked += [
        _Asked("train", _content(after, session, points=points.of(after), public=points.public)),
        _Asked("train", _content(1, "another", points=points.of(1), public=points.public)),
        _Asked("train", _content(1, session, points=[[np.full(3, math.nan)]])),
        _Asked("train", _content(1, "of nothing", of="everything")),
        _Asked("evaluate", _content(1, session, points=points.of(1))),
        _Asked("query", _content(ask=protocol.ASK_PRIVACY, session=session)),
    ]
    return asked


_QUESTIONS = (protocol.ASK_HELLO, protocol.ASK_PRIVACY, "anything")


class _Points:
    """Made-up query points of a client: zero, ordinary ones, a slope, and one far away.

    At the slope most gradients agree, which shows whether a record has moved others than its own.
    """

    def __init__(self, client: PrivateClient) -> None:
        self._shapes = [tuple(shape) for shape in client.gradients.shapes]
        self._count = client.query_points
        self._random = np.random.Generator(np.random.Philox(key=97))
        self.public: dict[str, bytes] = {}  # what requests bring of the answer to a query
        if client.giver is not None:
            asked = client.giver.asked
            values = asked.made_up_input(self._random.normal(size=asked.input_width))
            self.public[asked.query.gives] = values.astype(asked.query.gives_type).tobytes()

    def of(self, k: int) -> list[Point]:
        """Return the points of a request for release k."""
        scale = (0.0, 1.0, 10.0, 100.0)[(k - 1) % 4]
        made = _slope if scale == 10.0 else lambda shape: self._random.normal(size=shape)
        return [[scale * made(shape) for shape in self._shapes] for _ in range(self._count)]

    def model(self, shapes: Sequence[tuple[int, ...]] | None) -> list[Point]:
        """Return a model to evaluate."""
        return [[self._random.normal(size=shape) for shape in shapes or self._shapes]]


def _slope(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Values that grow along the first axis, such as classes: one class is then most likely for every record."""
    return np.linspace(-1.0, 1.0, shape[0] if shape else 1).reshape(-1, *[1] * (len(shape) - 1)) * np.ones(shape)


def _content(
    k: int = 1,
    session: str = "audit",
    *,
    points: Sequence[Point] = (),
    ask: str = "",
    of: str = "",
    public: Mapping[str, bytes] | None = None,
) -> RecordDict:
    entries: dict[str, Any] = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.SESSION: session}
    entries |= {protocol.ASK: ask} if ask else {protocol.SERVER_ROUND: k, protocol.ACK: k - 1}
    entries |= {protocol.RELEASE_OF: of} if of else {}
    entries |= public or {}
    content = RecordDict({protocol.CONFIG: ConfigRecord(entries)})
    for name, point in zip((protocol.ARRAYS, protocol.PREVIOUS_ARRAYS), points, strict=False):
        content[name] = ArrayRecord({str(i): Array(values) for i, values in enumerate(point)})
    return content


def _replay(seen: _Seen, answers: Answers, client: PrivateClient, asked: Sequence[_Asked]) -> None:
    """Ask a client everything, as a SuperNode would hand it over."""
    seen.facts.append(("what it says of itself", describe(client)))
    repeat, grid = repeating_the_last_answer(), InProcessGrid(ClientApp(), 1, {})
    context = Context(run_id=1, node_id=_NODE, node_config={}, state=RecordDict(), run_config={})
    for number, one in enumerate(asked, 1):
        message = grid.create_message(one.content.copy(), one.kind, _NODE, "")
        reply = repeat(message, context, answers)
        if reply.has_error():
            seen.facts.append((f"{_REFUSAL} {number}", (reply.error.code, reply.error.reason)))
            continue
        values = [np.zeros(0)]
        for name, record in reply.content.items():
            entries: list[Any] = [type(record).__name__, *map(str, record)]
            if isinstance(record, ArrayRecord):
                entries += [
                    (array.dtype, tuple(array.shape), array.stype, len(array.data)) for array in record.values()
                ]
                values += [array.numpy().astype(np.float64).ravel() for array in record.values()]
                seen.facts.append((f"arrays of reply {number}", (name, entries)))
            else:
                seen.facts += [(f"{key} of reply {number}", (type(value), value)) for key, value in record.items()]
                seen.facts.append((f"entries of reply {number}", (name, entries)))
        if one.part:
            seen.values.append((one.part, np.concatenate(values)))


def _moved_over_charged(base: _Seen, seen: _Seen, client: PrivateClient) -> float:
    """Return the mu that a neighbour's releases show over the mu that is charged.

    The worst of parts and of all together.
    """
    privatizers = {"training": client.privatizer, **{name: part.privatizer for name, part in client.parts.items()}}
    both = list(zip(base.values, seen.values, strict=False))
    if any(before[0] != after[0] or before[1].shape != after[1].shape for before, after in both):
        return math.inf
    moved, charged = [], []
    for part, privatizer in privatizers.items():
        rows = [after - before for (name, before), (_, after) in both if name == part]
        found, claimed = _moved(privatizer, np.array(rows)) if rows else (0.0, privatizer.plan.mu)
        moved.append(found)
        charged.append(claimed)
    ratios = [one / other for one, other in zip(moved, charged, strict=True)]
    return max(*ratios, math.hypot(*moved) / math.hypot(*charged), 0.0)


def _moved(privatizer: LedgeredPrivatizer, rows: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mu that differences of releases, shape (releases, d), show, and the mu that is charged.

    Every request acknowledges all releases before it, so a difference is what one contribution moved.
    """
    plan = privatizer.plan
    spacing = plan.grid.spacing
    rows = np.rint(rows / spacing) * spacing  # as the grid has it: what is sent is a multiple of its spacing
    if not plan.noise_std:  # a trusted server's: it counts what is moved in all releases
        turns = math.sqrt(privatizer.policy.sample_participations if not privatizer.policy.sums_samples else len(rows))
        return float(np.linalg.norm(rows)), plan.sensitivity * turns
    encoder = plan.mechanism.materialize(len(rows))
    return float(np.linalg.norm(encoder @ rows)) / plan.noise_std, plan.mu


def _differences(base: _Seen, seen: _Seen) -> list[str]:
    """Differences between two clients, in a few words each."""
    before, after = dict(base.facts), dict(seen.facts)
    if _START in after:
        return [f"does not start: {after[_START]}"]
    names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    refused = {name.rpartition(" ")[2]: name for name in names if _REFUSAL in name}
    rest = [name for name in names if name.rpartition(" ")[2] not in refused]
    return [*(f"{name}, {after.get(name, ('before',))[0]}" for name in refused.values()), *rest]


def _short(difference: str) -> str:
    """Return a difference without the text of an error."""
    return ":".join(difference.split(":")[:2])


def _few(differs: Iterable[str], most: int = 2) -> tuple[str, ...]:
    """Return the first differences, and how many more there are."""
    listed = list(differs)
    return (*listed[:most], *([f"{len(listed) - most} more"] if len(listed) > most else []))


def _delta_of(config: NodeConfig | SampleNode) -> float:
    """Return the delta at which an epsilon was asked for; the ledger is read, and not altered."""
    delta = config.delta if isinstance(config, NodeConfig) else 0.0
    if delta or not config.epsilon:
        return delta or _DELTA
    return read_ledger(config.ledger).delta


def _ending(samples: str) -> str:
    """Return the kind of a file; empty where there is none."""
    return "".join(Path(samples).suffixes[-2:]) if samples.endswith(".gz") else Path(samples).suffix
