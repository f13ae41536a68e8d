"""The guard around a Flower grid: every reply of a training comes through it, and none can end the training.

Flower's own pull confirms a reply before it parses it, waits for objects that were never uploaded, reads as many bytes
as a node sends, and believes the sender that a reply names. The guard pulls one object after the other, within bounds
that are known before, waits for nobody, and hands on a reply that cannot be read as an error of the node that was asked
(:data:`~murmurfl.privacy.protocol.MALFORMED_REPLY`).

Private names of flwr are touched in this file alone where strategies receive replies. Where one is missing (another
version of Flower, a grid of somebody's own) replies are pulled by the grid itself (:class:`GuardedGrid`, Notes).
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid

from ...privacy import protocol

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.run import Run
    from flwr.superlink.grid import HttpGrid

logger = logging.getLogger("flwr")

_MIB = 2**20
_FEWEST_OBJECTS = 64
_OBJECT_BYTES = 2**16
"""A client may cut arrays into chunks of this size or larger; Flower's default is 5 MiB."""
_ARRAY_ENTRY_BYTES = 1024
_HEAD_BYTES = 2**20
"""Most bytes of one reply's header and object tree, which come before its objects."""
_HEADS_BYTES = 64 * _MIB
"""Most bytes of all of them in one look."""
_LARGEST_HTTP = 2**16
"""Bytes that HTTP and protobuf add to an object."""


@dataclass(frozen=True)
class ReplyBounds:
    """Bounds on the size of a reply.

    Parameters
    ----------
    arrays : int
        Most bytes of all its arrays together.
    entries : int
        Most bytes of everything else: names, metrics, texts, headers.
    objects : int
        Most of Flower's objects that it may consist of.
    """

    arrays: int = 64 * _MIB
    entries: int = _MIB
    objects: int = _FEWEST_OBJECTS + 4 * 64 * _MIB // _OBJECT_BYTES

    @classmethod
    def of(cls, *layouts: Collection[tuple[str, tuple[int, ...], object]]) -> ReplyBounds:
        """Return the bounds of replies whose arrays have one of these layouts: name, shape and dtype of each array.

        Arrays may take twice the size that they have in float64 values, and 1 MiB. Everything else may take 1 MiB, and
        for every array 1 KiB and its name.
        """
        values = max((sum(math.prod(shape) for _, shape, _ in layout) for layout in layouts), default=0)
        arrays = 2 * 8 * values + _MIB
        named = max((sum(_ARRAY_ENTRY_BYTES + 8 * len(name) for name, *_ in layout) for layout in layouts), default=0)
        count = max(map(len, layouts), default=0)
        return cls(arrays, _MIB + named, _FEWEST_OBJECTS + 4 * count + arrays // _OBJECT_BYTES)


def printable_lines(text: str) -> str:
    """Return lines that a terminal can show, whatever a client wrote."""
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())


class _MalformedError(Exception):
    """A reply that cannot be read; the text is ours."""


class _MissingError(Exception):
    """A reply whose objects are gone."""


_PARSING = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Exceptions of Flower and NumPy on bytes that are no reply; protobuf has a ``DecodeError`` of its own."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 0.5, 3.0, 0.1
_PULL_PATIENCE_S = 1.0


class GuardedGrid(Grid):
    """A Flower grid whose replies cannot end a training.

    Parameters
    ----------
    grid : Grid
        Flower's grid, or any other.

    Notes
    -----
    **Memory.** A reply takes at most :attr:`bounds`, which a strategy sets by its model: twice the model in float64
    values and 1 MiB for arrays, 1 MiB (and 1 KiB for each array) for everything else. While it is unpacked it takes at
    most five times its arrays and 64 times its other entries, and replies are unpacked one after the other. What is
    larger is not read to its end. A round holds one reply of each client.

    **Time.** Nothing is waited for but the answer of the SuperLink: a reply with objects that are not uploaded yet is
    looked at again with the next look, and is late like any other when its round is over.

    **Senders.** A reply counts for the node that was asked, whatever the reply itself says; one that names another node
    or another request is malformed.

    All of this holds on Flower's ``HttpGrid`` (real nodes). Where a grid of somebody's own has one inside, or a version
    of Flower has other private names, the grid pulls every reply by itself, in a thread that nobody waits for longer
    than a second; its size is checked once it is here, so memory is not bounded before. Any other grid is taken for one
    of this process, whose replies were never bytes: its own methods are called, and raise what they raise.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.bounds = ReplyBounds()
        self.node_names: dict[int, str] = {}
        """Names of the clients and helpers on each node, for the log."""
        self._asked: dict[str, int] = {}
        self._http = _HttpReplies.of(grid)
        self._remote = self._http is not None or is_http(grid)
        self._pulls: dict[str, _Pull] = {}
        self._hinted: set[int] = set()

    # Flower's Grid.

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    @property
    def unguarded(self) -> Grid:
        """The grid behind the guard."""
        return self._grid

    @property
    def pull_interval(self) -> float:
        """Seconds between two looks for replies; short on a simulation's grid."""
        return float(getattr(self._grid, "pull_interval", _LONGEST_PAUSE_S))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; returns an id for each, empty for one that was not taken on."""
        messages = list(messages)
        ids = [message_id or "" for message_id in self._grid.push_messages(messages)] if messages else []
        if len(ids) == len(messages):
            asked = zip(ids, messages, strict=True)
            self._asked.update((one, message.metadata.dst_node_id) for one, message in asked if one)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have come, without waiting; malformed ones as errors."""
        ids = list(message_ids)
        if not self._remote:
            return [self._checked(reply, reply.metadata.reply_to_message_id) for reply in self._grid.pull_messages(ids)]
        found = self._each(ids) if self._http is None else self._http.look(ids, self.bounds)
        return [self._read(request, outcome) for request, outcome in found]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come within ``timeout`` seconds; malformed ones as errors."""
        messages = list(messages)
        if not self._remote:
            replies = self._grid.send_and_receive(messages, timeout=timeout)
            return [self._checked(reply, reply.metadata.reply_to_message_id) for reply in replies]
        waiting = [one for one in self.push_messages(messages) if one]
        started, found = time.monotonic(), list[Message]()
        while True:
            replies = list(self.pull_messages(waiting))
            found += replies
            came = {reply.metadata.reply_to_message_id for reply in replies}
            waiting = [one for one in waiting if one not in came]
            passed = time.monotonic() - started
            left = math.inf if timeout is None else timeout - passed
            if not waiting or left <= 0:
                self.forget(waiting)
                return found
            pause = min(max(_PAUSE_SHARE * passed, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            time.sleep(max(min(pause, left), 0.0))

    def forget(self, message_ids: Iterable[str]) -> None:
        """Wait for replies to these messages no longer."""
        for one in message_ids:
            node = self._asked.pop(one, 0)
            self._pulls.pop(one, None)
            if self._http is not None and self._http.forget(one):
                logger.warning(
                    "A reply of %s is dropped: it was announced, and not uploaded in time.", self.named(node)
                )

    # What becomes of a reply.

    def _read(self, request: str, outcome: Message | Exception) -> Message:
        """Return a reply as its node may have sent it, or the error that stands for it."""
        if isinstance(outcome, _MissingError):
            return self._error(request, ErrorCode.MESSAGE_UNAVAILABLE, str(outcome))
        if isinstance(outcome, Exception):
            self.say_malformed(self._asked.get(request, 0), f"it {outcome}")
            return self._error(request, protocol.MALFORMED_REPLY, str(outcome))
        return self._checked(outcome, request)

    def _checked(self, reply: Message, request: str) -> Message:
        """Return a reply, or an error if it is too large or names another node or request than was asked."""
        node, metadata = self._asked.get(request), reply.metadata
        senders = (node, SUPERLINK_NODE_ID) if reply.has_error() else (node,)  # Flower itself answers with errors only
        if metadata.reply_to_message_id != request or (node is not None and metadata.src_node_id not in senders):
            problem = "names another node or request than was asked"
        elif not reply.has_error() and _array_bytes(reply) > self.bounds.arrays:
            problem = f"has arrays of more than {self.bounds.arrays:,} bytes"
        else:
            self._asked.pop(request, None)
            return reply
        node = metadata.src_node_id if node is None else node
        self.say_malformed(node, f"it {problem}")
        return self._error(request, protocol.MALFORMED_REPLY, problem, node)

    def _error(self, request: str, code: int, reason: str, node: int | None = None) -> Message:
        """Return an error reply of the node that was asked."""
        known = self._asked.pop(request, 0)
        asked = Message(RecordDict(), dst_node_id=known if node is None else node, message_type=MessageType.QUERY)
        vars(asked.metadata)["_message_id"] = request
        return Message(Error(code, reason), reply_to=asked)

    def say_malformed(self, node: int, problem: str) -> None:
        """Log that a node's reply is dropped, and once how the node is excluded."""
        hint = ""
        if self._remote and node not in self._hinted:
            self._hinted.add(node)
            name = self.node_names.get(node, "")
            known = name and name.isprintable()
            leave = (
                f"`murmurfl federation exclude FOLDER {shlex.quote(name)}` with the run's folder, or " if known else ""
            )
            hint = f" To exclude it: {leave}`flwr supernode unregister {node}`."
        logger.warning("A reply of %s is dropped: %s.%s", self.named(node), problem, hint)

    def named(self, node: int) -> str:
        """Return a node's number and, if it is known, who is on it."""
        name = self.node_names.get(node)
        return f"node {node} ({name!r})" if name else f"node {node}"

    def _each(self, ids: Sequence[str]) -> Iterator[tuple[str, Message | Exception]]:
        """Pull replies one by one, each in a thread of its own that may hang."""
        for one in ids:
            pull = self._pulls.get(one) or _Pull(self._grid, one)
            self._pulls[one] = pull
            pull.join(_PULL_PATIENCE_S)
            if pull.is_alive():
                continue
            del self._pulls[one]
            failure = pull.failure
            if isinstance(failure, _PARSING) or type(failure).__name__ == "DecodeError":
                yield one, _MalformedError("cannot be read")
            elif failure is not None:
                raise failure
            else:
                yield from ((one, reply) for reply in pull.replies[:1])


_GUARD = "_murmurfl_guard"


def guarded(grid: Grid) -> GuardedGrid:
    """Return the one guard around a grid, or the guard itself if it is one."""
    if isinstance(grid, GuardedGrid):
        return grid
    found = vars(grid).get(_GUARD)
    if not isinstance(found, GuardedGrid):
        vars(grid)[_GUARD] = found = GuardedGrid(grid)
    return found


def is_http(grid: object) -> bool:
    """Return True if a grid is Flower's for real nodes, or has one inside."""
    # Half a second to import: whoever made such a grid has done so.
    made = getattr(sys.modules.get("flwr.superlink.grid"), "HttpGrid", None)
    if made is None or not isinstance(grid, Grid):
        return False
    return isinstance(grid, made) or any(is_http(part) for name, part in vars(grid).items() if name != _GUARD)


def _array_bytes(reply: Message) -> int:
    records = reply.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


class _Pull(threading.Thread):
    """The pull of one reply by a grid of somebody else's."""

    def __init__(self, grid: Grid, message_id: str) -> None:
        super().__init__(daemon=True, name="murmurfl-pull")
        self._grid, self._id = grid, message_id
        self.replies: list[Message] = []
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.replies = list(self._grid.pull_messages([self._id]))
        except Exception as error:
            self.failure = error


# Flower's HttpGrid, object by object.

_KINDS: Mapping[str, tuple[str, ...]] = {
    "Message": ("RecordDict",),
    "RecordDict": ("ArrayRecord", "ConfigRecord", "MetricRecord"),
    "ArrayRecord": ("Array",),
    "Array": ("ArrayChunk",),
    "ArrayChunk": (),
    "ConfigRecord": (),
    "MetricRecord": (),
}
"""Objects that an object may have below it."""


@dataclass
class _Announced:
    """A reply whose objects are being pulled."""

    request: str  # the id of the message that it answers
    root: str  # the id of its first object
    known: frozenset[str]  # ids of all objects that were announced
    wanted: list[tuple[str, tuple[str, ...]]]  # objects to pull, the next one last, each with the kinds it may have
    contents: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)  # sizes
    arrays: list[str] = field(default_factory=list)
    entries: int = 0  # bytes so far, and the same of chunks
    chunk_bytes: int = 0


class _HttpReplies:
    """The replies of an ``HttpGrid``, pulled within bounds."""

    def __init__(self, grid: HttpGrid, internals: _Internals) -> None:
        self._grid, self._of = grid, internals
        self._announced: dict[str, _Announced] = {}
        self._bounded: httpx.Client | None = None
        self._most = 0
        """Most bytes of the next HTTP response; 0 for a list of replies."""

    @classmethod
    def of(cls, grid: Grid) -> _HttpReplies | None:
        """Return the replies of an ``HttpGrid``; None for another grid, or where Flower's private names are others."""
        made = getattr(sys.modules.get("flwr.superlink.grid"), "HttpGrid", None)
        internals = _Internals.found(grid) if made is not None and isinstance(grid, made) else None
        return None if internals is None else cls(cast("HttpGrid", grid), internals)

    def forget(self, request: str) -> bool:
        """Forget a reply that is not complete; returns whether there was one."""
        announced = self._announced.pop(request, None)
        if announced is not None:
            self._confirm(announced)
        return announced is not None

    def look(self, ids: Sequence[str], bounds: ReplyBounds) -> list[tuple[str, Message | Exception]]:
        """Return the replies to these requests that are complete, or why one never will be."""
        found: list[tuple[str, Message | Exception]] = []
        for request, announced in self._listed(set(ids) - self._announced.keys(), bounds):
            if isinstance(announced, Exception):
                found.append((request, announced))
            else:
                self._announced[request] = announced
        for request in [one for one in ids if one in self._announced]:
            announced = self._announced[request]
            try:
                message: Message | Exception | None = self._pulled(announced, bounds)
            except (_MalformedError, _MissingError) as error:
                message = error
            if message is not None:
                del self._announced[request]
                self._confirm(announced)
                found.append((request, message))
        return found

    def _listed(self, ids: set[str], bounds: ReplyBounds) -> Iterator[tuple[str, _Announced | Exception]]:
        """Ask which replies have come."""
        if not ids:
            return
        self._most = 0
        listed = self._call().PullMessages(self._of.pull_messages_request(message_ids=sorted(ids)))
        for header, tree in zip(listed.messages_list, listed.message_object_trees, strict=False):
            request, root = header.metadata.reply_to_message_id, header.metadata.message_id
            if request not in ids:  # a member may send messages that answer nothing
                continue
            ids.discard(request)
            known = _tree_ids(tree, bounds.objects)
            if known is None or tree.object_id != root:
                yield request, _MalformedError("announces other objects than a reply has, or too many")
                continue
            yield request, _Announced(request, root, known, [(root, ("Message",))])

    def _pulled(self, one: _Announced, bounds: ReplyBounds) -> Message | None:
        """Return a reply once all its objects are here; None as long as one is not uploaded."""
        while one.wanted:
            object_id, kinds = one.wanted[-1]
            if object_id not in one.contents and not self._take(one, object_id, kinds, bounds):
                return None
            one.wanted.pop()
        self._check_arrays(one, bounds)
        message = _parsed(lambda: self._of.inflate(one.root, one.contents))
        if not isinstance(message, Message) or not (message.has_error() or isinstance(message.content, RecordDict)):
            raise _MalformedError("is no message")
        vars(message.metadata)["_message_id"] = one.root
        return message

    def _take(self, one: _Announced, object_id: str, kinds: tuple[str, ...], bounds: ReplyBounds) -> bool:
        """Pull one object and note what is below it; returns False if it is not uploaded yet."""
        chunk = kinds == ("ArrayChunk",)
        left = bounds.arrays - one.chunk_bytes if chunk else bounds.entries - one.entries
        content = self._fetch(object_id, left)
        if content is None:
            return False
        kind, below, _ = _parsed(lambda: self._of.head(content))
        if kind not in kinds:
            raise _MalformedError("has an object of another kind than belongs there")
        if not one.known.issuperset(below) or len(set(below)) != len(below):
            raise _MalformedError("has objects that it did not announce")
        one.contents[object_id] = content
        if chunk:
            one.chunk_bytes += len(content)
            one.chunks[object_id] = len(content)
        else:
            one.entries += len(content)
            one.arrays += [object_id] if kind == "Array" else []
        one.wanted[:0] = [(child, _KINDS[kind]) for child in below if child not in one.contents]
        return True

    def _fetch(self, object_id: str, most: int) -> bytes | None:
        """Return an object's content, None if it was not uploaded yet."""
        if most <= 0:
            raise _MalformedError("is larger than a reply may be")
        self._most = most + _LARGEST_HTTP
        try:
            answer = self._call().PullObject(
                self._of.pull_object_request(node=self._grid.node, run_id=self._grid.run.run_id, object_id=object_id)
            )
        except httpx.HTTPStatusError as error:
            raise _MalformedError(f"cannot be fetched (HTTP {error.response.status_code})") from error
        if not answer.object_found:
            raise _MissingError("Objects of the reply are gone: its sender did not upload them in time.")
        if not answer.object_available:
            return None
        content = bytes(answer.object_content)
        if len(content) > most:
            raise _MalformedError("is larger than a reply may be")
        return content

    def _check_arrays(self, one: _Announced, bounds: ReplyBounds) -> None:
        """Refuse arrays that name a chunk so often that they would be larger than was pulled."""
        size = sum(_parsed(lambda content=one.contents[array]: self._size(content, one.chunks)) for array in one.arrays)
        if size > bounds.arrays:
            raise _MalformedError(f"has arrays of more than {bounds.arrays:,} bytes")

    def _size(self, content: bytes, chunks: Mapping[str, int]) -> int:
        """Return the bytes of an array once its chunks are put together."""
        below, body = self._of.head(content)[1], content.partition(self._of.divider)[2]
        return sum(chunks[below[place]] for place in json.loads(body)["arraychunk_ids"])

    def _confirm(self, one: _Announced) -> None:
        """Have the SuperLink forget a reply's objects."""
        self._most = _LARGEST_HTTP
        self._call().ConfirmMessageReceived(
            self._of.confirm_request(node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=one.root)
        )

    def _call(self) -> Any:
        """Return Flower's client, whose responses are bounded from now on."""
        client, made = self._of.clients(self._grid)
        if made is not self._bounded:  # a grid that was closed has another one
            made.event_hooks = {**made.event_hooks, "response": [*made.event_hooks["response"], self._bound]}
            self._bounded = made
        return client

    def _bound(self, response: httpx.Response) -> None:
        """Bound the body of a response before it is read."""
        path = response.request.url.path
        if response.is_error or not path.endswith(("/pull-messages", "/pull-object")):
            return
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx.UnsupportedProtocol("Expected a SuperLink that does not compress what it sends.")
        if path.endswith("/pull-messages"):
            response.stream = _Lean(cast("httpx.SyncByteStream", response.stream))
        elif int(response.headers.get("content-length", 0)) > self._most:
            response.close()
            raise _MalformedError("is larger than a reply may be")
        else:
            response.stream = _AtMost(cast("httpx.SyncByteStream", response.stream), self._most)


T = TypeVar("T")


def _parsed(parse: Callable[[], T]) -> T:
    """Return what parsing gives; whatever it raises, the bytes are no reply."""
    try:
        return parse()
    except Exception as error:
        problem = f"cannot be read ({type(error).__name__})"
    # Outside of the handler: an exception that is kept would keep all that was parsed.
    raise _MalformedError(problem)


def _tree_ids(tree: ObjectTree, most: int) -> frozenset[str] | None:
    """Return the ids of an object tree, None if it has more than ``most`` nodes."""
    found, left, count = set[str](), [tree], 0
    while left:
        node = left.pop()
        count += 1
        if count > most:
            return None
        found.add(node.object_id)
        left.extend(node.children)
    return frozenset(found)


class _AtMost(httpx.SyncByteStream):
    """A response's body of at most so many bytes."""

    def __init__(self, stream: httpx.SyncByteStream, most: int) -> None:
        self._stream, self._left = stream, most

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise _MalformedError("is larger than a reply may be")
            yield part

    def close(self) -> None:
        self._stream.close()


class _Lean(httpx.SyncByteStream):
    """A list of replies' headers and object trees, of which entries that are too large become empty ones.

    Replies are claimed by asking for them, so the list may not be given up for the sake of one entry. An empty header
    answers nothing, and an empty tree belongs to no reply.
    """

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        buffer, skip, kept = bytearray(), 0, 0
        for part in self._stream:
            taken = min(skip, len(part))
            skip -= taken
            buffer += memoryview(part)[taken:]
            while not skip and (entry := _entry(buffer)) is not None:
                tag, start, size = entry
                if size > _HEAD_BYTES or kept + size > _HEADS_BYTES:
                    yield bytes((tag, 0))
                    present = min(len(buffer) - start, size)
                    del buffer[: start + present]
                    skip = size - present
                elif len(buffer) < start + size:
                    break
                else:
                    kept += size
                    yield bytes(buffer[: start + size])
                    del buffer[: start + size]
        yield bytes(buffer)  # a rest is no entry, and protobuf says so

    def close(self) -> None:
        self._stream.close()


_LENGTH_DELIMITED = 2
_LONGEST_VARINT = 10


def _entry(buffer: bytearray) -> tuple[int, int, int] | None:
    """Return tag, start and size of the first length-delimited entry of a protobuf message; None if it is not here."""
    if len(buffer) < 2 or buffer[0] & 7 != _LENGTH_DELIMITED or buffer[0] >= 128:
        return None
    size = 0
    for place, byte in enumerate(buffer[1 : 1 + _LONGEST_VARINT]):
        size |= (byte & 127) << (7 * place)
        if byte < 128:
            return buffer[0], 2 + place, size
    return None


@dataclass(frozen=True)
class _Internals:
    """The private names of Flower that a pull needs."""

    pull_messages_request: Callable[..., Any]
    pull_object_request: Callable[..., Any]
    confirm_request: Callable[..., Any]
    head: Callable[[bytes], tuple[str, list[str], int]]
    inflate: Callable[[str, dict[str, bytes]], object]
    divider: bytes

    @classmethod
    def found(cls, grid: Grid) -> _Internals | None:
        """Return them, None if one is missing."""
        try:
            from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
            from flwr.proto.runtime_pb2 import PullAppMessagesRequest
            from flwr.supercore.constant import HEAD_BODY_DIVIDER
            from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
            from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

            made = cls(
                PullAppMessagesRequest,
                PullObjectRequest,
                ConfirmMessageReceivedRequest,
                get_object_head_values_from_object_content,
                inflate_object_from_contents,
                HEAD_BODY_DIVIDER,
            )
            client, http = made.clients(grid)
            calls = (client.PullMessages, client.PullObject, client.ConfirmMessageReceived)
            known = all(map(callable, calls)) and isinstance(http, httpx.Client) and hasattr(grid, "node")
        except (ImportError, AttributeError):
            return None
        return made if known else None

    @staticmethod
    def clients(grid: Any) -> tuple[Any, httpx.Client]:
        """Return Flower's client of a grid and the HTTP client below it."""
        client = grid._runtime_client
        return client, client._client
