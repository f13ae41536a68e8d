"""Flower's own ``HttpGrid`` before a SuperLink of a few lines, and replies as bytes that a test may damage.

Everything from ``HttpGrid`` down to HTTP is Flower's, and so is the parsing. The SuperLink keeps objects as they are
handed in and checks nothing of them.
"""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import count

import httpx
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from tests.harness.grid import claim_identity

MIB = 2**20


@dataclass
class Wire:
    """A reply as a SuperLink has it: header, object tree, and objects; one that is None is announced only."""

    header: ProtoMessage
    tree: ObjectTree
    objects: dict
    gone: set = field(default_factory=set)  # objects that the SuperLink has no more
    endless: dict = field(default_factory=dict)  # sizes of objects that are zeros, made while they are sent

    @property
    def root(self):
        return self.tree.object_id

    def kinds(self):
        """Each object's id and kind."""
        return {one: content.partition(b" ")[0].decode() for one, content in self.objects.items()}


_salts = count()


def wire_of(message):
    """A message as an honest node sends it, with ids of objects that no other message has.

    A SuperLink keeps objects by their digest; here those of two nodes may be damaged one without the other.
    """
    salt = next(_salts)
    with no_object_id_recompute():  # which it would do at every level for all below
        objects = {one: made.deflate() for one, made in get_all_nested_objects(message).items()}
        tree = get_object_tree(message)
    own = {one: hashlib.sha256(f"{salt} {one}".encode()).hexdigest() for one in objects}
    header = ProtoMessage(metadata=metadata_to_proto(message.metadata))
    for node in _nodes(tree):
        node.object_id = own[node.object_id]
    header.metadata.message_id = tree.object_id
    return Wire(header, tree, {own[one]: _renamed(content, own) for one, content in objects.items()})


def _renamed(content, names):
    for old, new in names.items():
        content = content.replace(old.encode(), new.encode())
    return content


def _nodes(tree):
    yield tree
    for child in tree.children:
        yield from _nodes(child)


def with_head(content, *, kind=None, below=None, body=None, size=None):
    """An object with another head or body; its length fits unless ``size`` is given."""
    head, _, old = content.partition(b"\0")
    parts = head.decode().split(" ")
    body = old if body is None else body
    kind = parts[0] if kind is None else kind
    below = parts[1] if below is None else ",".join(below)
    return f"{kind} {below} {len(body) if size is None else size}".encode() + b"\0" + body


def body_of(content):
    return content.partition(b"\0")[2]


def json_body(content, **changes):
    """An object whose JSON has other values."""
    return with_head(content, body=json.dumps({**json.loads(body_of(content)), **changes}).encode())


class Counted(httpx.SyncByteStream):
    """So many zeros after a prefix, made while they are read."""

    def __init__(self, link, prefix, size):
        self.link, self.prefix, self.size = link, prefix, size

    def __iter__(self):
        yield self.prefix
        for _ in range(self.size // MIB):
            self.link.sent += MIB
            yield bytes(MIB)
        yield bytes(self.size % MIB)

    def close(self):
        pass


class Parts(httpx.SyncByteStream):
    """A body that comes in parts, as from a network."""

    def __init__(self, content, size=2**16):
        self.content, self.size = content, size

    def __iter__(self):
        yield from (self.content[at : at + self.size] for at in range(0, len(self.content), self.size))


class FakeSuperLink:
    """A SuperLink whose nodes answer by ``answer(node_id, message)``, which gives a :class:`Wire` or None."""

    def __init__(self, nodes, answer):
        self.nodes, self.answer = list(nodes), answer
        self.replies, self.objects, self.pushed, self.trees = {}, {}, {}, {}
        self.gone, self.endless = set(), {}
        self.unasked = []  # messages of members that answer nothing
        self.pulled, self.confirmed, self.sent = [], [], 0
        self.lengths = True  # whether sizes are announced

    def grid(self):
        """A ``HttpGrid`` that talks to it."""
        claim_identity()
        grid = HttpGrid("127.0.0.1:1", insecure=True, token="t")
        grid.set_run(Run.create_empty(run_id=1))
        client = grid._runtime_client
        client._client = httpx.Client(transport=httpx.MockTransport(self._handle))
        return grid

    def _handle(self, request):
        body = getattr(self, "_" + request.url.path.rpartition("/")[2].replace("-", "_"))(request.content)
        if isinstance(body, httpx.Response):
            return body
        content = body.SerializeToString()
        return httpx.Response(200, headers={"content-length": str(len(content))}, stream=Parts(content))

    def _get_nodes(self, _):
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self.nodes])

    def _push_messages(self, content):
        request = PushAppMessagesRequest.FromString(content)
        for header in request.messages_list:
            self.trees[header.metadata.message_id] = header.metadata.dst_node_id
        wanted = [node.object_id for tree in request.message_object_trees for node in _nodes(tree)]
        return PushAppMessagesResponse(
            message_ids=[header.metadata.message_id for header in request.messages_list],
            objects_to_push=sorted(set(wanted) - self.pushed.keys()),
            session_id="s",
        )

    def _push_object(self, content):
        request = PushObjectRequest.FromString(content)
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def _pull_messages(self, content):
        found = PullAppMessagesResponse()
        for one in PullAppMessagesRequest.FromString(content).message_ids:
            if one not in self.trees:
                continue
            message = inflate_object_from_contents(one, dict(self.pushed), keep_object_contents=True)
            message.metadata.__dict__["_message_id"] = one
            wire = self.answer(self.trees[one], message)
            if wire is None:
                continue
            del self.trees[one]  # claimed: it is not handed out again
            self.add(wire)
            found.messages_list.append(wire.header)
            found.message_object_trees.append(wire.tree)
        for wire in self.unasked:
            found.messages_list.append(wire.header)
            found.message_object_trees.append(wire.tree)
        self.unasked = []
        return found

    def add(self, wire):
        self.objects.update(wire.objects)
        self.gone |= wire.gone
        self.endless.update(wire.endless)

    def _pull_object(self, content):
        request = PullObjectRequest.FromString(content)
        one = request.object_id
        self.pulled.append(one)
        if one in self.endless:
            return self._endless(self.endless[one])
        known = one in self.objects and one not in self.gone
        content = self.objects.get(one)
        found = PullObjectResponse(object_found=known, object_available=bool(known and content is not None))
        found.object_content = content or b""
        return found

    def _endless(self, size):
        prefix = PullObjectResponse(object_found=True, object_available=True).SerializeToString()
        tag = bytes([3 << 3 | 2]) + _varint(size)
        headers = {"content-length": str(len(prefix) + len(tag) + size)} if self.lengths else {}
        return httpx.Response(200, headers=headers, stream=Counted(self, prefix + tag, size))

    def _confirm_message_received(self, content):
        self.confirmed.append(ConfirmMessageReceivedRequest.FromString(content).message_object_id)
        return ConfirmMessageReceivedResponse()


def _varint(number):
    made = bytearray()
    while number >= 128:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])
