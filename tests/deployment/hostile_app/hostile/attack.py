"""A server that wants the data: whatever it may ask, again and again, out of order, forged and several runs at once.

It adapts: what it has heard it acknowledges, denies, repeats or builds on. Sessions have names that every run of it
knows, so that several runs at once meet in them. All that comes back is handed on: releases as they are, refusals as
their codes.
"""

import json
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from murmurfl.privacy import protocol

LOT = 20  # requests a node is sent at once
LONGEST_WAIT_S, PAUSE_S = 300.0, 0.01
WEAKER = {
    "mu": 1e9, "budget-mu": 1e9, "delta": 0.5, "clip-norm": 1e9, "noise-quality": "fast", "mechanism": "none",
    "trust": "trusted-server", "max-participations": 10**6, "batch-size": 1, "strategy": "trusted-mu2", "passes": 99,
    "strategy.release-rule": "paper", "seed": 1,
    "samples": "/etc/passwd", "ledger": "/dev/null", "client-key": "00" * 32,
}  # fmt: skip


class Attack:
    """Requests for nodes of a softmax model with two classes.

    Parameters
    ----------
    features : int
    seed : int
        Of the choices.
    """

    def __init__(self, features, seed):
        self.shapes = [(2, features), (2,)]
        self.generator = np.random.Generator(np.random.Philox(key=seed))
        self.last = {}  # node and session: the last release heard of
        self.sent = {}  # node: a request of old
        self.open = {}  # node: sessions that have not reached their cap
        self.asked = {}
        self.opened = 0

    def on(self, grid, nodes, requests):
        """Ask so many requests of all nodes together; yields what came back."""
        left = requests
        while left > 0:
            messages, asked = [], []
            for node in nodes:
                for _ in range(min(LOT, left)):
                    kind, content = self.request(node)
                    asked.append((node, content))
                    messages.append(Message(content, dst_node_id=node, message_type=kind))
                    left -= 1
            pushed = zip(grid.push_messages(messages), asked, strict=True)
            waiting = {message_id: request for message_id, request in pushed if message_id}
            end = time.monotonic() + LONGEST_WAIT_S
            while waiting and time.monotonic() < end:
                for reply in grid.pull_messages(list(waiting)):
                    yield self.heard(*waiting.pop(reply.metadata.reply_to_message_id), reply)
                time.sleep(PAUSE_S)

    def request(self, node):
        """One more request, of a kind that is drawn."""
        # First of all it asks for less noise, then it forges.
        begun = self.asked.get(node, 0)
        self.asked[node] = begun + 1
        draw = [0.9, 0.8, 0.6, 0.8][begun] if begun < 4 else self.generator.random()
        if draw < 0.6:  # what an honest server might ask, and what gives most: the gradient where it says which class
            content = self.content(node)
        elif draw < 0.65 and node in self.sent:
            content = self.sent[node]
        elif draw < 0.75:
            content = self.content(node, self.hostile_points())
        elif draw < 0.85:
            forged = 7 if begun < 4 else int(self.generator.choice([-1, 0, 1, 2, 7, 2**31 - 1]))
            content = self.content(node, ack=forged, server_round=int(self.generator.integers(1, 2**31)))
        elif draw < 0.95:
            content = self.content(node, **WEAKER)
        else:
            return self.nonsense(node)
        self.sent[node] = content
        return "train", content

    def content(self, node, points=None, **entries):
        session = self.session(node)
        zero = [np.zeros(shape) for shape in self.shapes]
        first, second = points or (zero, zero)
        config = {
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.SERVER_ROUND: 1,
            protocol.SESSION: session,
            protocol.ACK: self.last.get((node, session), 0),
            **{name.replace("_", "-"): value for name, value in entries.items()},
        }
        records = {protocol.ARRAYS: ArrayRecord(first), protocol.PREVIOUS_ARRAYS: ArrayRecord(second)}
        return RecordDict({**records, protocol.CONFIG: ConfigRecord(config)})

    def session(self, node):
        """One that gave something, or one more; its name may be another run's."""
        known = self.open.setdefault(node, [])
        if known and self.generator.random() < 0.5:
            return known[int(self.generator.integers(len(known)))]
        self.opened += 1
        return f"run{self.opened // 4}"

    def hostile_points(self):
        draw = int(self.generator.integers(7))
        fill = [1e30, -1e30, 1e308, 1e-320, np.nan, np.inf, 50.0][draw]
        return [[np.full(shape, fill) * (-1) ** i for i, shape in enumerate(self.shapes)]] * 2

    def nonsense(self, node):
        zero, config = [np.zeros(shape) for shape in self.shapes], {protocol.VERSION: protocol.PROTOCOL_VERSION}
        good = dict(self.content(node)[protocol.CONFIG])
        choices = [
            ("train", {protocol.ARRAYS: ArrayRecord(zero), protocol.CONFIG: ConfigRecord(good)}),  # a point is missing
            ("train", {protocol.CONFIG: ConfigRecord({**good, protocol.CLIENT: "somebody"})}),
            ("train", {}),
            ("train", {protocol.ARRAYS: ArrayRecord([np.zeros(3)] * 4), protocol.CONFIG: ConfigRecord(good)}),
            ("train", {protocol.CONFIG: ConfigRecord({**good, protocol.SESSION: "../../etc/passwd"})}),
            ("train", {protocol.CONFIG: ConfigRecord({**good, protocol.VERSION: 99})}),
            ("train.other", {protocol.CONFIG: ConfigRecord(good)}),
            ("evaluate", {protocol.ARRAYS: ArrayRecord(zero), protocol.CONFIG: ConfigRecord(config)}),
            ("query", {protocol.CONFIG: ConfigRecord({**config, protocol.ASK: "samples"})}),
            ("query", {protocol.CONFIG: ConfigRecord({**good, protocol.ASK: protocol.ASK_PRIVACY})}),
        ]
        kind, records = choices[int(self.generator.integers(len(choices)))]
        return kind, RecordDict(records)

    def heard(self, node, content, reply):
        """What came back as plain values, and what the attack makes of it."""
        if reply.has_error():
            if reply.error.code == protocol.CAP_REACHED:  # on to the next
                session, known = content[protocol.CONFIG][protocol.SESSION], self.open[node]
                self.open[node] = [name for name in known if name != session]
            return {"node": node, "code": reply.error.code, "reason": reply.error.reason}
        if protocol.ARRAYS not in reply.content:
            return {"node": node, "answer": json.loads(json.dumps(dict(reply.content[protocol.CONFIG])))}
        metrics, session = reply.content[protocol.METRICS], str(content[protocol.CONFIG][protocol.SESSION])
        release = int(metrics[protocol.RELEASE])
        if session not in self.open[node]:
            self.open[node].append(session)
        if self.generator.random() < 0.7:  # otherwise it pretends never to have heard of it
            self.last[node, session] = max(release, self.last.get((node, session), 0))
        values = np.concatenate([array.numpy().ravel() for array in reply.content[protocol.ARRAYS].values()])
        return {
            "node": node,
            "client": str(reply.content[protocol.CONFIG][protocol.CLIENT]),
            "session": session,
            "release": release,
            "ack": int(metrics[protocol.ACK]),
            "values": [value.hex() for value in values.tolist()],
        }
