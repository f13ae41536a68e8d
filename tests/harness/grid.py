"""A grid for tests: nodes of a ClientApp in this process, whose replies may be lost, changed, late or never come.

It is Flower's ``Grid`` as strategies see it and no more; the application's own engine has tests of its own. Late
answers take their time by a clock that runs only while somebody waits.
"""

import uuid

import numpy as np
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from murmurfl.clients import numpy_client_app
from murmurfl.clients.messages import simulated_in_process
from murmurfl.privacy import derived_seed, protocol
from murmurfl.strategies.rounds.in_flight import Clock


def reply_is_lost(share, seed, server_round, client):
    """A coin for every round and client: the same seed loses the same replies."""
    coin = np.random.Generator(np.random.Philox(key=derived_seed("loss", seed, server_round, client)))
    return bool(coin.random() < share)


class NodesGrid(Grid):
    """Nodes 0 .. num_nodes - 1 of an app; ``lost`` is the share of replies to training requests that never come.

    Of what never comes Flower says at once that nobody was reached. Tests override :meth:`handle`, what a node answers,
    and :meth:`tamper`, what becomes of a round's replies.
    """

    first_node = 1000

    def __init__(self, app, num_nodes, *, lost=0.0, seed=2):
        self.app, self.lost, self.seed = app, lost, seed
        told = {"num-partitions": num_nodes}
        self.contexts = {self.first_node + i: context_of(self.first_node + i, i, **told) for i in range(num_nodes)}
        self._replies = {}
        self._deaf = set()
        self.server_round = 0  # of the last training request
        claim_identity()

    def handle(self, message, identifier):
        # A message of its own: a strategy may hand the same records to every node, and a node may change its copy.
        delivered = Message(
            RecordDict(dict(message.content)), message.metadata.dst_node_id, message.metadata.message_type
        )
        delivered.metadata.__dict__["_message_id"] = identifier
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return Message(Error(0, "no such node"), reply_to=delivered)
        with simulated_in_process():
            try:
                reply = self.app(delivered, context)
            except Exception as error:  # as a SuperNode does: the node lives on, the server gets an error reply
                reply = Message(Error(0, str(error)), reply_to=delivered)
        reply.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        return reply

    def tamper(self, replies):
        return replies

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        claim_identity()
        identifiers = []
        for message in messages:
            identifiers.append(uuid.uuid4().hex)
            config = message.content.config_records.get(protocol.CONFIG, {})
            self.server_round = config.get(protocol.SERVER_ROUND, self.server_round)
            reply = self.handle(message, identifiers[-1])
            if reply is not None:
                self._replies[identifiers[-1]] = reply
                if self._loses(message):
                    self._deaf.add(identifiers[-1])
        return identifiers

    def pull_messages(self, message_ids):
        pulled = {one: self._replies.pop(one) for one in message_ids if one in self._replies}
        replies = list(pulled.values())
        if not replies or replies[0].metadata.message_type != MessageType.TRAIN:
            return replies
        came = list(self.tamper([reply for one, reply in pulled.items() if one not in self._deaf]))
        answered = {reply.metadata.reply_to_message_id for reply in came}
        return [*came, *(unreached(one, reply) for one, reply in pulled.items() if one not in answered)]

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(self.push_messages(list(messages))))

    def _loses(self, message):
        config = message.content.get(protocol.CONFIG, None)
        # A noise mod is queried in messages of this type as well; answers to queries are not lost.
        if message.metadata.message_type != MessageType.TRAIN or config is None or protocol.ASK in config:
            return False
        return self.lost > 0 and reply_is_lost(
            self.lost, self.seed, config[protocol.SERVER_ROUND], config[protocol.CLIENT]
        )

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)


def unreached(identifier, reply):
    """What Flower says in the place of a reply that never comes."""
    request = Message(RecordDict(), reply.metadata.src_node_id, reply.metadata.message_type)
    request.metadata.__dict__["_message_id"] = identifier
    return Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE), reply_to=request)


class TamperedNodes(NodesGrid):
    """Clients made by ``client_of(name, state)``; ``deaf`` ones' replies are lost, ``forged`` changes all others."""

    def __init__(self, client_of, num_nodes, *, deaf=(), forged=lambda reply: reply):
        def client_fn(context):
            return client_of(str(context.node_config["partition-id"]), context.state)

        super().__init__(numpy_client_app(client_fn), num_nodes)
        self.deaf, self.forged = {self.first_node + i for i in deaf}, forged

    def tamper(self, replies):
        return [self.forged(reply) for reply in replies if reply.metadata.src_node_id not in self.deaf]


class KilledError(Exception):
    """The server is killed before it has heard a reply."""


def killing(reply):
    """What becomes of a reply if the server is killed with it."""
    raise KilledError


class Reliable:
    """Loses replies until a round, and none from then on; for a :class:`NodesGrid`."""

    reliable_from = 0

    def push_messages(self, messages):
        messages = list(messages)
        asked = max((message.content[protocol.CONFIG].get(protocol.SERVER_ROUND, 0) for message in messages), default=0)
        share, self.lost = self.lost, self.lost if asked < self.reliable_from else 0.0
        try:
            return super().push_messages(messages)
        finally:
            self.lost = share


def claim_identity():
    """`Message(...)` takes its sender from here; a SuperLink would have set it when it started the ServerApp."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def context_of(node_id, partition=0, **node_config):
    """What Flower hands to a ClientApp beside a message, with no state yet."""
    node_config = {"partition-id": partition, **node_config}
    return Context(run_id=1, node_id=node_id, node_config=node_config, state=RecordDict(), run_config={})


def ask(app, kind="train", content=None, *, grid=None):
    """The reply of the only node of an app, or the first of a grid, to one message."""
    grid = NodesGrid(app, 1) if grid is None else grid
    message = Message(content or RecordDict(), dst_node_id=grid.get_node_ids()[0], message_type=kind)
    (reply,) = grid.send_and_receive([message])
    return reply


def ask_real_node(app, content, kind="train", **node_config):
    """The reply of a real node: no simulation is around it, as under a SuperNode."""
    claim_identity()
    message = Message(content, dst_node_id=5, message_type=kind)
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(run_id=1, node_id=5, node_config=node_config, state=RecordDict(), run_config={})
    return app(message, context)


class Late:
    """Hands a training's replies on after a while, or never; for a :class:`NodesGrid`.

    ``delay(client, server_round)`` gives seconds, infinite for a reply that is lost. A node works on one message at a
    time, in the order in which they were sent. :attr:`queues` has how many training requests each node had at once.
    """

    def __init__(self, *parts, delay):
        super().__init__(*parts)
        self.delay, self.now = delay, 0.0
        self.clock = Clock(now=lambda: self.now, sleep=self._sleep)
        self.sent = []  # what clients answered, whether it arrived or not: name, release, ack, values
        self.queues = {}
        self._due, self._free, self._open = {}, {}, {}

    def _sleep(self, seconds):
        self.now += seconds

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, identifier in zip(messages, ids, strict=True):
            config = message.content.config_records.get(protocol.CONFIG)
            if message.metadata.message_type != MessageType.TRAIN or config is None or protocol.ASK in config:
                continue
            node, name = message.metadata.dst_node_id, config[protocol.CLIENT]
            seconds = self.delay(name, config[protocol.SERVER_ROUND])
            began = max(self.now, self._free.get(node, 0.0))
            self._due[identifier] = began + seconds
            self._free[node] = began if np.isinf(seconds) else began + seconds
            open_now = [due for due in self._open.get(node, []) if due > self.now]
            self._open[node] = [*open_now, self._due[identifier]]
            self.queues[name] = max(self.queues.get(name, 0), len(open_now) + 1)
            reply = self._replies.get(identifier)
            if reply is not None and not reply.has_error():
                metrics = reply.content[protocol.METRICS]
                values = np.concatenate([a.numpy().ravel() for a in reply.content[protocol.ARRAYS].values()])
                self.sent.append((name, metrics[protocol.RELEASE], metrics[protocol.ACK], values))
        return ids

    def pull_messages(self, message_ids):
        return super().pull_messages([one for one in message_ids if self._due.get(one, 0.0) <= self.now])

    def send_and_receive(self, messages, *, timeout=None):
        ids, end = list(self.push_messages(messages)), self.now + (timeout or 0.0)
        due = [self._due.get(one, 0.0) for one in ids]
        self.now = max([self.now, *(one for one in due if one <= end)]) if all(one <= end for one in due) else end
        return list(self.pull_messages(ids))

    def prefix_sums(self):
        """P_k of every client and release, from all that was sent: P_0 = 0, and P_k - P_ack in each message."""
        sums = {}
        for name, release, ack, values in self.sent:
            sums[name, release] = values + (sums[name, ack] if ack else 0.0)
        return sums


class LateGrid(Late, NodesGrid):
    """Nodes of an app, some of which are late."""

    def __init__(self, app, num_nodes, delay):
        super().__init__(app, num_nodes, delay=delay)


def coin(seed, *what):
    """A number from 0 to 1, the same for the same arguments."""
    return float(np.random.Generator(np.random.Philox(key=derived_seed("late", seed, *what))).random())
