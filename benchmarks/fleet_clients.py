"""The clients of :mod:`.fleet`: real ones, with samples and ledgers on disk, in a process of their own.

Messages arrive and leave as the bytes that Flower would put on the wire. What a client sent is added up here as well,
so that in the end the server's sum can be compared with what clients say they released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from murmurfl.app.nodes.node_app import Answers
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.clients import Label, Part, Schema, numpy_client_app
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import SQLiteLedger, protocol
from numpy.typing import NDArray

CLASSES = 10
DELTA = 1e-5


@dataclass(frozen=True)
class Told:
    """What operators write into their files.

    Parameters
    ----------
    clients, features, samples : int
        M; p, for d = 10 x (p + 1); samples of a client, one a release.
    clip_norm, mu : float
    """

    clients: int
    features: int
    samples: int
    clip_norm: float
    mu: float


def serve(pipe: Connection, folder: str, told: Told) -> None:
    """Do what the network says until the pipe closes; the first answer says that all clients are made.

    Parameters
    ----------
    pipe : Connection
        Of pairs: what is to be done (``post``, ``answer``, ``fetch``, ``compare``), and with what.
    folder : str
        For samples and ledgers.
    told : Told
    """
    fleet = Clients(Path(folder), told)
    pipe.send("made")
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        answer = getattr(fleet, what)(given)
        if answer is not None:
            pipe.send(answer)


def schema_text(features: int) -> str:
    """Return what a record of these clients is, as an operator's file of it."""
    inputs = (Part(shape=(features,), bounds=(-10, 10)),)
    return document(Schema(inputs=inputs, label=Label(classes=CLASSES), reviewed=True))


class Clients:
    """All of them, each with its own ClientApp, samples and ledger."""

    def __init__(self, folder: Path, told: Told) -> None:
        self._folder, self._told = folder, told
        self._apps = [self._made(number) for number in range(told.clients)]
        self._released: dict[str, dict[int, NDArray[np.float64]]] = {}
        self._messages: dict[int, tuple[int, bytes]] = {}
        self._replies: dict[int, bytes] = {}
        self.releases = 0

    def _ledger(self, name: str) -> Path:
        return self._folder / f"{name}.sqlite"

    def _made(self, number: int) -> Answers:
        told, name = self._told, str(number)
        generator = np.random.Generator(np.random.Philox(key=number))
        samples = self._folder / f"{name}.npz"
        features = generator.standard_normal((told.samples, told.features), np.float32)
        np.savez(samples, features=features, labels=generator.integers(0, CLASSES, told.samples))
        schema = self._folder / "schema.toml"
        if not schema.exists():
            schema.write_text(schema_text(told.features))
        values = {
            "client": name,
            "ledger": str(self._ledger(name)),
            "samples": str(samples),
            "schema": str(schema),
            "num-records": told.samples,
            "clip-norm": told.clip_norm,
            "batch-size": 1,
            "max-participations": told.samples,
            "mu": told.mu,
        }
        SQLiteLedger.create(self._ledger(name), budget_mu=told.mu, delta=DELTA, data=name)
        client = NodeConfig.from_mapping(values).make_client()
        return numpy_client_app(lambda context: client)  # noqa: ARG005 - as on a real node

    def post(self, messages: Sequence[tuple[int, int, bytes]]) -> None:
        """Take messages that are on their way, so that they burden nobody else: number, client, bytes of each."""
        self._messages |= {number: (client, wire) for number, client, wire in messages}

    def answer(self, numbers: Sequence[int]) -> None:
        """Have messages answered, one after the other; the replies are on their way back."""
        for number in numbers:
            self._replies[number] = self._answered(*self._messages.pop(number))

    def fetch(self, numbers: Sequence[int]) -> list[bytes]:
        """Return replies that have arrived."""
        return [self._replies.pop(number) for number in numbers]

    def _answered(self, client: int, wire: bytes) -> bytes:
        message = message_from_proto(ProtoMessage.FromString(wire))
        node = message.metadata.dst_node_id
        reply = self._apps[client](message, Context(message.metadata.run_id, node, {}, RecordDict(), {}))
        if message.metadata.message_type == MessageType.TRAIN and not reply.has_error():
            self._note(str(client), reply)
        return message_to_proto(reply).SerializeToString()

    def _note(self, name: str, reply: Message) -> None:
        """P_k, from P_k - P_ack and the P_ack that was sent before; exact, since all are multiples of one spacing."""
        made = reply.content.metric_records[protocol.METRICS]
        release, ack = int(made[protocol.RELEASE]), int(made[protocol.ACK])  # type: ignore[arg-type]
        known = self._released.setdefault(name, {})
        parts = reply.content.array_records[protocol.ARRAYS].to_numpy_ndarrays()
        sent = np.concatenate([part.ravel() for part in parts])
        known[release] = sent + known[ack] if ack else sent
        for old in [number for number in known if number < ack]:
            del known[old]
        self.releases += 1

    def compare(self, given: tuple[str, Mapping[str, int], bytes]) -> dict[str, Any]:
        """Whether the server's acknowledgements and its sum are those of the clients' ledgers.

        Parameters
        ----------
        given : tuple
            The session, the last release that the server aggregated of each client, and its sum of all releases,
            float64 as bytes.
        """
        session, acks, total = given
        agree, carried = 0, 0
        for name in self._released:
            with SQLiteLedger(self._ledger(name)).exclusive() as page:
                stream = page.stream(session)
            ack = acks.get(name, 0)
            agree += stream is not None and _agrees(stream.release, stream.ack, list(stream.pending), ack)
            carried += 0 if stream is None else stream.release - ack
        server = np.frombuffer(total)
        sent = [self._released.get(name, {}).get(release) for name, release in acks.items()]
        known = all(values is not None for values in sent)
        added = sum((values for values in sent if values is not None), np.zeros_like(server))
        return {
            "released": self.releases,
            "clients": len(self._released),
            "agreeing": agree,
            "carried": carried,
            "sums_equal": known and bool(np.array_equal(added, server)),
        }


def _agrees(release: int, own_ack: int, pending: Sequence[int], ack: int) -> bool:
    """Whether what a ledger has goes on where the server's acknowledgement is: nothing between them is forgotten."""
    return own_ack <= ack <= release and (ack == release or ack in (own_ack, *pending)) and release in (ack, *pending)
