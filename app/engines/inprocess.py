"""A Flower ``Grid`` that runs the ClientApp in this process: the same app as under Ray, without Ray.

Every node has its own ``Context``, as a SuperNode would, and keeps its clients from one message to the next, as
``murmurfl node`` does. Messages are handled one after the other. Private names of flwr are touched here, and where
records are made (:mod:`murmurfl.clients.messages`, :mod:`murmurfl.strategies.rounds.replies`).
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array, Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from ...clients.messages import simulated_in_process

_SERVER_NODE = 1
_FIRST_NODE = 1000
_UNKNOWN_ERROR = 0
_UNCHANGEABLE = frozenset((bool, int, float, str, bytes))


class InProcessGrid(Grid):
    """Nodes of a ClientApp in this process: a node's ``partition-id`` is its number, ``run_config`` what it sees.

    ``simulated`` is False where the one client is real, with keys and a ledger of its own.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp()
    >>> @app.query()
    ... def query(message, context):
    ...     return Message(RecordDict(), reply_to=message)
    >>> grid = InProcessGrid(app, 3, {"lr": 0.1})
    >>> asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    >>> [reply.has_error() for reply in grid.send_and_receive(asked)]
    [False, False, False]
    """

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: Mapping[str, Any], *, simulated: bool = True
    ) -> None:
        self.simulated = simulated
        self._client_app = client_app
        self._run = Run.create_empty(run_id=uuid.uuid4().int >> 65)
        self._run.override_config = dict(run_config)
        self._contexts = {
            _FIRST_NODE + i: Context(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for i in range(num_nodes)
        }
        self._kept: dict[int, dict[str, Any]] = {node_id: {} for node_id in self._contexts}
        self._replies: dict[str, Message] = {}
        self._name, self._messages = uuid.uuid4().hex, itertools.count()
        self._claim_identity()

    def _claim_identity(self) -> None:
        # `Message(...)` takes its sender from here; a SuperLink sets it when it starts the ServerApp.
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = self._run.run_id
        TaskIdentity.node_id = _SERVER_NODE

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._claim_identity()
        identifiers = []
        for message in messages:
            identifier = self._next_identifier()
            self._replies[identifier] = self._handle(message, identifier)
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(identifier) for identifier in message_ids if identifier in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _next_identifier(self) -> str:
        return f"{self._name}{next(self._messages):x}"

    def _handle(self, message: Message, identifier: str) -> Message:
        delivered = _delivered(message, identifier)
        context = self._contexts.get(message.metadata.dst_node_id)
        if context is None:
            return Message(Error(_UNKNOWN_ERROR, "no such node"), reply_to=delivered)
        with simulated_in_process(self._kept[context.node_id]):
            try:
                reply = self._client_app(delivered, context)
            except Exception as error:  # as a SuperNode: the node lives on, and the server gets an error reply
                reply = Message(Error(_UNKNOWN_ERROR, str(error)), reply_to=delivered)
        reply.metadata.__dict__["_message_id"] = self._next_identifier()
        return reply


def _delivered(message: Message, identifier: str) -> Message:
    """Return a message as its node gets it, with records of its own: a strategy may hand the same ones to all nodes."""
    metadata = Metadata.__new__(Metadata)
    metadata.__dict__.update(message.metadata.__dict__, _message_id=identifier)
    content = message.content.copy()
    records = content.__dict__["_data"]
    for key, record in records.items():
        records[key] = _own_record(record)
    delivered = Message.__new__(Message)
    delivered.__dict__.update(_metadata=metadata, _content=content, _error=None)
    return delivered


def _own_record(record: Any) -> Any:
    """Return a copy of a record that its node may change; the values were checked when they were put in."""
    own = record.copy()
    values = own.__dict__["_data"]
    for key, value in values.items():
        if type(value) in _UNCHANGEABLE:
            continue
        if isinstance(value, Array):
            values[key] = Array.__new__(Array)
            values[key].__dict__.update(value.__dict__)  # strings, integers and bytes cannot change
        elif isinstance(value, list):
            values[key] = list(value)
    return own
