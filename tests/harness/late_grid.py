"""A grid whose answers take their time, by a clock that runs only while somebody waits."""

import numpy as np
from flwr.app import MessageType
from murmurfl.privacy import derived_seed, protocol
from murmurfl.strategies.rounds.attendance import Clock

from tests.harness.grid import NodesGrid


class Late:
    """Hands a training's replies on after a while, or never; for a :class:`NodesGrid`.

    ``delay(machine, server_round)`` gives seconds, infinite for a reply that is lost. A node works on one message at a
    time, in the order in which they were sent. :attr:`queues` has how many training requests each node had at once.
    """

    def __init__(self, *parts, delay):
        super().__init__(*parts)
        self.delay, self.now = delay, 0.0
        self.clock = Clock(now=lambda: self.now, sleep=self._sleep)
        self.sent = []  # what machines answered, whether it arrived or not: name, release, ack, values
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
            node, name = message.metadata.dst_node_id, config[protocol.MACHINE]
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
        """P_k of every machine and release, from all that was sent: P_0 = 0, and P_k - P_ack in each message."""
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
