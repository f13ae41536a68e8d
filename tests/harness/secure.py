"""Secure aggregation for tests: clients under masks, helpers that open their sums, and whole trainings of them.

Clients are this package's clients; what they release is masked here with ``murmurfl.privacy`` alone, so that a test
can have a client do it wrongly. Helpers are real openers, and a test can have one fail at any point. The same clients
and trainings are there without masks.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from murmurfl.clients import Mu2Client, OnlineClient
from murmurfl.clients.adapters.per_sample_gradients import unflatten
from murmurfl.clients.messages import answer
from murmurfl.clients.sums_helper import answer_helper
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, RefusedError, SimulatedKeys, SumAssumption, protocol
from murmurfl.privacy.sums.masking import Masking, Sealed, add_mask, checked_header, opened_seal
from murmurfl.privacy.sums.opening_rule import MemoryOpeningRecord, Opener
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from murmurfl.strategies import Mu2, NothingAggregatedError, OnlineFedSGD, Refusal, Reply, SecureAggregation

from tests.harness.clients import normal_samples
from tests.harness.grid import NodesGrid
from tests.harness.models import Data

HELPERS = ("helper-0", "helper-1")


def roster_of(clients, helpers=HELPERS, seed=0):
    """The roster of simulated keys."""
    return Roster.simulated(seed, tuple(clients), tuple(helpers))


def masking_of(name, roster, seed=0):
    """A client's masks, with its simulated key."""
    return Masking(name, ClientKey.simulated(seed, name), roster)


def sealed_of(entries):
    """What helpers are shown of a reply, from its entries."""
    return Sealed(entries[protocol.HEADER], tuple(entries[protocol.SEALS]), entries[protocol.SIGNATURE])


def unmasked(arrays, entries, roster, seed=0):
    """The counts of one release, by all helpers' keys together: what they must never do, and tests may."""
    assert all(values.dtype == np.uint64 for values in arrays)
    counts = np.concatenate([np.asarray(values).ravel() for values in arrays])
    sealed = sealed_of(entries)
    header = checked_header(sealed, roster)
    for name in roster.helper_names:
        add_mask(counts, opened_seal(sealed, header, name, HelperKey.simulated(seed, name)), subtract=True)
    return counts.astype(np.int64), header


SEED = 3


def secure_policy(*, min_honest=2, min_cohort=3, **changes):
    """A policy for sums of at least three releases, two of them of honest clients."""
    settings = {"clip_norm": 1.0, "batch_size": 1, "max_participations": 30, "mu": 2.0, "trust": "secure-aggregation"}
    return PrivacyPolicy(**{**settings, "sums": SumAssumption(min_honest, min_cohort), **changes})


class Clients:
    """Simulated clients ``"0"`` to ``"count - 1"`` whose contributions are their data; ledgers live as long as this.

    ``masked`` False makes the very same releases and sends them as numbers. ``different`` has policies of single
    clients, and ``mask`` is what turns a release into a masked one: a test may replace it.
    """

    def __init__(self, data, shapes, count=6, *, kind=Mu2Client, masked=True, different=None, options=None, **changes):
        names = tuple(str(i) for i in range(count))
        self.count, self.masked, self.kind = count, masked, kind
        self.roster = Roster.simulated(SEED, names, HELPERS)
        self.gradients, self._data = Data(shapes), data
        self._shapes, self._options = shapes, options or {}
        self._policies = {name: secure_policy(**{**changes, **(different or {}).get(name, {})}) for name in names}
        self._clients = {}
        self.masks = {name: Masking(name, ClientKey.simulated(SEED, name), self.roster) for name in names}

    def client(self, name):
        """A client."""
        if name not in self._clients:
            samples, policy = self._data(name), self._policies[name]
            self._clients[name] = self.kind(
                self.gradients, samples, policy, MemoryLedger(), SimulatedKeys(SEED, name), name=name, **self._options
            )
        return self._clients[name]

    def mask(self, name, release, session):
        """A release under its masks."""
        return self.masks[name].mask(release, session, self._policies[name])

    @property
    def app(self):
        """The clients as an app, one on each node."""
        app = ClientApp()

        @app.train()
        def train(message, context):
            name = str(context.node_config["partition-id"])
            if message.content[protocol.CONFIG].get(protocol.ASK) == protocol.ASK_SEAL:
                return answer(message, lambda: self._seal(name, message.content))
            if protocol.ASK in message.content[protocol.CONFIG]:
                return answer(message, lambda: self._asked(name, message.content))
            return answer(message, lambda: self._train(name, message.content))

        @app.query()
        def query(message, context):
            return answer(message, lambda: self._asked(str(context.node_config["partition-id"]), message.content))

        return app

    def _asked(self, name, content):
        asked = content[protocol.CONFIG]
        said = self.client(name).get_properties(asked)
        if protocol.NONCE in asked:
            said[protocol.SIGNATURE] = self.masks[name].prove_name(asked[protocol.NONCE])
        return RecordDict({protocol.CONFIG: ConfigRecord(said)})

    def _train(self, name, content):
        client, config = self.client(name), dict(content[protocol.CONFIG])
        points = [array.numpy() for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS) if key in content
                  for array in content[key].values()]  # fmt: skip
        return self._reply(name, client.release(client._read(points, config)), config[protocol.SESSION])

    def _seal(self, name, content):
        config = content[protocol.CONFIG]
        asked = (config[key] for key in (protocol.SESSION, protocol.ACK, protocol.RELEASE))
        return self._reply(name, self.client(name).privatizer.last_release(*asked), config[protocol.SESSION])

    def _reply(self, name, release, session):
        client, entries, values = self.client(name), {protocol.CLIENT: name}, release.values
        if self.masked:
            masked = self.mask(name, release, session)
            values = masked.counts
            entries |= {
                protocol.HEADER: masked.sealed.header,
                protocol.SEALS: list(masked.sealed.seals),
                protocol.SIGNATURE: masked.sealed.signature,
            }
        arrays = unflatten(values, self._shapes)
        numbers = {
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.RELEASE: release.release,
            protocol.ACK: release.ack,
            protocol.SENSITIVITY: client.privatizer.plan.sensitivity,
            protocol.MU_GUARANTEED: client.privatizer.plan.mu,
            protocol.DELTA: 1e-5,
            protocol.CLIENT_LEVEL: 0,
            protocol.MU_LOCAL: client.privatizer.plan.loss.worst_case.mu,
            protocol.MIN_HONEST: client.privatizer.policy.sums.min_honest,
            protocol.NUM_EXAMPLES: 1,
            **({protocol.RECOVERED: 1} if release.recovered else {}),
        }
        return RecordDict(
            {
                protocol.ARRAYS: ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)}),
                protocol.METRICS: MetricRecord(numbers),
                protocol.CONFIG: ConfigRecord(entries),
            }
        )


class DirectCohort:
    """The same clients, asked without messages."""

    def __init__(self, clients, lost=lambda server_round, name: False):
        self.clients, self.lost = clients, lost

    def names(self):
        return [str(i) for i in range(self.clients.count)]

    def answer(self, request):
        for name, ack in request.acks.items():
            client = self.clients.client(name)
            points = [part for point in request.points for part in unflatten(point, self.clients._shapes)]
            config = {
                protocol.VERSION: protocol.PROTOCOL_VERSION,
                protocol.SERVER_ROUND: request.server_round,
                protocol.ACK: ack,
                protocol.SESSION: request.session,
            }
            try:
                release = client.release(client._read(points, config))
            except RefusedError as refusal:
                yield Refusal(refusal.code)
                continue
            if not self.lost(request.server_round, name):
                yield Reply(name, release.release, release.ack, release, {protocol.NUM_EXAMPLES: release.samples})

    def statements(self, session):
        return {name: self.clients.client(name).statement(session) for name in self.names()}


class SecureGrid(NodesGrid):
    """Clients on a node each, and beside them the helpers of their roster, each on a node of its own.

    ``watch(kind, helper, message)`` is called before a helper is handed a message, ``"hello"``, ``"whether"``,
    ``"lock"``, ``"open"`` or ``"void"``, and ``seen(kind, helper, reply)`` with what it answers; either may raise what
    a test waits for, or give another answer: None for none at all. Helpers whose names are in ``down`` are not
    connected.
    """

    first_helper = 5000

    def __init__(self, clients, *, lost=0.0, seed=2, helpers=HELPERS):
        super().__init__(clients.app, clients.count, lost=lost, seed=seed)
        self.roster = clients.roster
        self.openers = {
            self.first_helper + i: Opener(name, HelperKey.simulated(SEED, name), self.roster, MemoryOpeningRecord())
            for i, name in enumerate(helpers)
        }
        self.down = set()
        self.asked = []
        self.watch = lambda kind, helper, message: message
        self.seen = lambda kind, helper, reply: reply

    def get_node_ids(self):
        up = [node for node, opener in self.openers.items() if opener.name not in self.down]
        return [*super().get_node_ids(), *up]

    def handle(self, message, identifier):
        opener = self.openers.get(message.metadata.dst_node_id)
        if opener is None:
            return super().handle(message, identifier)
        asked = message.content[protocol.CONFIG].get(protocol.ASK)
        kind = str(asked) if asked in (*protocol.ASKS_OF_SETS, protocol.ASK_OPEN) else "hello"
        delivered = Message(RecordDict(dict(message.content)), message.metadata.dst_node_id,
                            message.metadata.message_type)  # fmt: skip
        delivered.metadata.__dict__["_message_id"] = identifier
        self.asked.append((kind, opener.name))
        if opener.name in self.down or self.watch(kind, opener.name, delivered) is None:
            return None
        reply = self.seen(kind, opener.name, answer_helper(opener, delivered))
        if reply is not None:
            reply.metadata.__dict__["_message_id"] = f"reply to {identifier}"
        return reply


def refusal(helper, code=protocol.OPENING_REFUSED):
    """A helper's error reply to a request to open."""
    node = SecureGrid.first_helper + HELPERS.index(helper)
    request = Message(RecordDict(), dst_node_id=node, message_type=protocol.QUERY_OPEN)
    request.metadata.__dict__["_message_id"] = "request"
    return Message(Error(code, "no"), reply_to=request)


def other_header(masked, client_key, **changes):
    """A masked release whose header says something else, signed all the same."""
    header = json.loads(masked.sealed.header)
    changed = json.dumps({**header, **changes}, sort_keys=True, separators=(",", ":")).encode()
    unsigned = replace(masked.sealed, header=changed, signature=b"")
    return replace(masked, sealed=replace(unsigned, signature=client_key.sign(unsigned.signed)))


def state_bytes(strategy):
    """All of a strategy's state, to the last bit."""
    return {name: np.asarray(value).tobytes() for name, value in vars(strategy.state).items()}


SHAPES = [(2, 3), (4,)]
D = 10
START = ArrayRecord([np.zeros(shape) for shape in SHAPES])
ROUNDS = 6
ONE_POINT = {"kind": OnlineClient, "options": {"learning_rate": 0.1}, "clip_unit": "update"}


def some(name, samples=30):
    return normal_samples(name, samples, D) / 4


def clients(**changes):
    """Six clients with samples of their own."""
    return Clients(some, SHAPES, **changes)


def build(kind=Mu2, *, secure=None, **options):
    """A strategy of six clients; ``secure`` holds what differs from sums of at least three releases."""
    common = {"num_clients": 6, "clients_per_round": 4, "learning_rate": 0.05, "seed": 1, "session": "s"}
    own = {OnlineFedSGD: {"local_steps": 1}}.get(kind, {})
    if secure is not None:
        secure = SecureAggregation(**{"min_cohort": 3, **secure})
    return kind(**{**common, **own, "node_deadline_s": 0.05, **options}, secure_aggregation=secure)


def trained(strategy, grid, rounds=ROUNDS, simulated=False):
    strategy.start(grid, START, num_rounds=rounds, simulated=simulated)
    return strategy


def trained_in_vain(strategy, grid, rounds=ROUNDS):
    """The same where nothing is ever aggregated, which ends a training with an error."""
    with pytest.raises(NothingAggregatedError, match=rf"got none in {len(strategy.history) or rounds} round"):
        trained(strategy, grid, rounds)
    return strategy


class Plain(NodesGrid):
    """The same releases without masks; what comes back of rounds that are ``closed`` elsewhere is lost here."""

    closed = ()

    def tamper(self, replies):
        return [] if self.server_round in self.closed else replies


def plain_run(strategy=Mu2, *, lost=0.0, seed=2, closed=(), **changes):
    """A training with the very same releases and no masks."""
    grid = Plain(clients(masked=False, **changes).app, 6, lost=lost, seed=seed)
    grid.closed = closed
    return trained(
        build(strategy, allow_exhaustion=True), grid
    )  # not asked first: their policies are of masked releases


def closed_rounds(strategy):
    return [report.server_round for report in strategy.history if report.closed]


def same(strategy, plain):
    """Whether two trainings ended in the same state, to the last bit."""
    return state_bytes(strategy) == state_bytes(plain) and strategy.acks == plain.acks
