"""What Ray does to a simulation, without Ray: messages and states travel, and any worker may get any client."""

import pickle

import numpy as np
from flwr.app import Message, MessageType
from murmurfl.app import client_app
from murmurfl.app.engines.inprocess import InProcessGrid
from murmurfl.app.engines.start import num_nodes
from murmurfl.app.runs.experiment import prepare
from murmurfl.clients import messages as simulation


class TravellingGrid(InProcessGrid):
    """Two workers that take turns, each with what it keeps; everything is pickled on its way, as Ray does it."""

    def __init__(self, monkeypatch, config):
        prepare(config)  # what workers are started with
        super().__init__(client_app.app, num_nodes(config), config.to_mapping())
        self.turn = lambda worker: monkeypatch.setattr(simulation, "_worker", worker)
        self.workers = [simulation._Worker(), simulation._Worker()]
        self.generator = np.random.Generator(np.random.Philox(key=3))
        self.sizes = []
        monkeypatch.setattr(simulation, "_known_as_worker", True)

    def _handle(self, message: Message, identifier: str) -> Message:
        message.metadata.__dict__["_message_id"] = identifier
        node = message.metadata.dst_node_id
        self.turn(self.workers[self.generator.integers(2)])
        app, sent, context = (
            pickle.loads(pickle.dumps(part)) for part in (self._client_app, message, self._contexts[node])
        )
        pickled = pickle.dumps((reply := app(sent, context), context))
        if message.metadata.message_type == MessageType.TRAIN and reply.has_content():
            self.sizes.append((len(pickled), len(pickle.dumps(reply))))
        reply, self._contexts[node] = pickle.loads(pickled)
        reply.metadata.__dict__["_message_id"] = f"{identifier}-reply"
        return reply
