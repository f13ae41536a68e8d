"""The clients of a training: their names, and waiting for them with a deadline.

Flower's node ids are random in every run and change when a node restarts. A client is therefore known by a name that
it reports once (its partition id, say). Clients are ordered by name.

Waiting ends at once where it is certain to be pointless. The nodes of a simulation are all there from its start, and
run the same ClientApp. More real nodes may come, and others may be mended; there the deadline decides, unless none of
the connected nodes runs murmurfl, or none of those that do is configured to answer.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...privacy import protocol
from ...privacy.errors import MurmurflError
from .guarded_grid import GuardedGrid, guarded, printable_lines

logger = logging.getLogger("flwr")


def by_length_and_name(name: str) -> tuple[int, str]:
    """Return a sort key of clients' names: 2 before 10."""
    return len(name), name


_MOST_DIGITS = 20
"""No number of a client has more."""


class NumberedNames(Sequence[str]):
    """The names "0" to "M - 1" of simulated clients, or an ascending range of them, each made when it is looked at."""

    def __init__(self, numbers: int | range) -> None:
        self.numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[str]:
        return map(str, self.numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, int):
            return str(self.numbers[place])
        numbers = self.numbers[place]
        return NumberedNames(numbers) if numbers.step > 0 else [str(number) for number in numbers]

    def at(self, places: Sequence[int]) -> list[str]:
        """Return the names at several places."""
        first, step = self.numbers.start, self.numbers.step
        return list(map(str, places if (first, step) == (0, 1) else [first + step * place for place in places]))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or len(name) > _MOST_DIGITS:
            return False
        try:
            number = int(name)
        except ValueError:
            return False
        # Only what str() writes: no sign, no leading zero, and no digits of other scripts.
        return number in self.numbers and str(number) == name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedNames):
            return self.numbers == other.numbers
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((NumberedNames, self.numbers))

    def __repr__(self) -> str:
        return f"NumberedNames({self.numbers})"


def in_order(names: Iterable[str]) -> Sequence[str]:
    """Names in the order of clients; :class:`NumberedNames` are in it already."""
    return names if isinstance(names, NumberedNames) else sorted(names, key=by_length_and_name)


def plain_names(names: Sequence[str]) -> list[str] | int:
    """Names as a checkpoint has them; :class:`NumberedNames` from 0 as their number."""
    whole = isinstance(names, NumberedNames) and names.numbers == range(len(names))
    return len(names) if whole else list(names)


def restored_names(saved: Any) -> Sequence[str]:
    """Read the names from what :func:`plain_names` returned."""
    return NumberedNames(saved) if isinstance(saved, int) else [str(name) for name in saved]


_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_GREET_AGAIN_S = 60.0
_ANSWERS_WITHIN_S = 30.0  # a node that is there, where the training waits for whoever is
_ALL_MADE_WITHIN_S = 2.0  # the nodes of a simulation, after the last of them was made
_SAY_AGAIN_S = 30.0
_OTHER_SCHEMA = "another schema of records than this training's"
_OWN_FAILURES = (
    *(protocol.NOT_CONFIGURED, protocol.INTERNAL_ERROR, protocol.LEDGER_UNUSABLE),
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
)
"""Codes of a client that fails at a greeting: more nodes and more time do not mend it."""
_NOT_LOADED = "a ClientApp that cannot be loaded"
_OWN_FAILURE_NAMES = frozenset(protocol.REFUSAL_NAMES.get(code, _NOT_LOADED) for code in _OWN_FAILURES)
_UNUSED = "clients that are not used"
_SEVERAL_NAMES = "more names than one, which a real node may not have"


class NodesUnavailableError(MurmurflError):
    """Too few clients were connected when the deadline passed, or it is certain that there will be too few.

    Its kind is ``unreachable`` where more nodes may come, ``unsupported`` where the ClientApp of those that are there
    does not know murmurfl, ``refused`` where they answer that they are not configured, and ``conflict`` where server
    and nodes were started with settings that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from murmurfl.app.engines.inprocess import InProcessGrid
    >>> from murmurfl.clients import NoisySGDClient, numpy_client_app, simulated_client
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> from murmurfl.strategies import NoisySGD
    >>> class Mean:
    ...     shapes = [(1,)]
    ...     def __call__(self, parameters, samples):
    ...         return parameters[0] - samples
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0, mechanism="independent")
    >>> def client_fn(context):
    ...     return NoisySGDClient(Mean(), np.ones((20, 1)), policy, **simulated_client(context))
    >>> grid = InProcessGrid(numpy_client_app(client_fn), 4, {})
    >>> strategy = NoisySGD(learning_rate=0.1, num_clients=5, node_deadline_s=0.1)
    >>> try:
    ...     strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=1)
    ... except NodesUnavailableError as error:
    ...     error.kind
    'unreachable'
    """

    kind = "unreachable"


@dataclass(frozen=True)
class Awaited:
    """Number of clients that are waited for, and the number with which a training in progress goes on all the same."""

    clients: int
    fewest: int | None = None  # default as many
    without: Collection[str] = ()  # clients that are not counted


class ClientRegistry:
    """Names of the connected clients and the nodes they are on.

    Parameters
    ----------
    num_clients : int or None
        M, clients of the training; None for all that are connected when it begins.
    deadline_s : float
        Longest wait, in seconds, for enough clients to be connected.
    sleep : callable
        For tests.
    message_type : str
        Type of the messages in which clients are asked for their names.
    fewest : int
        Fewest clients that the training begins with, where M is not known.
    client : str
        The ClientApp that clients must have, as a line of code.
    permit : str
        Permit of the session's owner, for every message; empty for none.
    schema : str
        Digest of the schema that clients must state; empty for any.

    Notes
    -----
    A node that says it is several clients is dropped: a real one could take all names of a training. Only the
    nodes of a simulation may be several clients each (:attr:`several_on_a_node`).

    If two nodes report one name, it belongs to the one that shows by a key in the roster that it is its own
    (:attr:`shows`). Without a roster, or of two that do so, it is the node that was met first (of two met at once, the
    smaller node id) as long as that is connected: a node may have restarted before its old connection was given up, or
    somebody pretends. Other reports are dropped and logged. The SuperLink checks who may connect, by the nodes' keys,
    and a client's guarantee holds whoever else takes its name.

    Examples
    --------
    >>> registry = ClientRegistry(num_clients=10, deadline_s=60.0)
    >>> registry.restore(["0", "1", "2"])  # names that a checkpoint knows
    >>> list(registry.names), registry.node_map()  # nobody is connected yet
    (['0', '1', '2'], {})
    """

    def __init__(
        self,
        num_clients: int | None,
        deadline_s: float,
        sleep: Callable[[float], None] = time.sleep,
        *,
        message_type: str = MessageType.QUERY,
        fewest: int = 1,
        client: str = "",
        permit: str = "",
        schema: str = "",
    ) -> None:
        self.num_clients = num_clients
        self.schema = schema
        self.fewest = fewest if num_clients is None else num_clients
        """Clients that must be known before their names are fixed."""
        self.client = client
        self.deadline_s = deadline_s
        self.names: Sequence[str] = []
        """The M clients of the training, in order; fixed by the first :meth:`meet`."""
        self.entries: Mapping[str, str] = {protocol.PERMIT: permit} if permit else {}
        """Entries of every message to every node."""
        self.several_on_a_node = False
        """Whether a node may report several names: in a simulation only."""
        self.simulated = False
        """Whether the nodes are known to be simulated ones, whose errors have a traceback."""
        self.sleep = sleep
        self._message_type = message_type
        self.shows: Callable[[str, Handshake], bool | None] = lambda *_: None
        """Whether a node showed that a name is its own; None where nobody can tell."""
        self._hosted: dict[int, Handshake] = {}
        self._nonces: dict[int, str] = {}
        self._greeted: dict[int, tuple[str, float]] = {}
        self._warned: set[str] = set()
        self._failures: dict[int, str] = {}
        self._strangers: dict[int, str] = {}
        self._raised = ""
        self._nodes, self._nodes_since = 0, math.inf
        self._last_said = ("", 0.0)

    def _by_proof(self) -> list[tuple[int, Handshake]]:
        """Return connected nodes in the order in which they were met; those that proved their name come first."""
        if self.several_on_a_node:
            return list(self._hosted.items())
        return sorted(self._hosted.items(), key=lambda one: not all(self.shows(name, one[1]) for name in one[1].names))

    def node_map(self) -> dict[str, int]:
        """Return connected clients of the training and their nodes."""
        members = set(self.names)
        nodes: dict[str, int] = {}
        for node_id, met in self._by_proof():
            for name in met.clients:
                if name in members:
                    nodes.setdefault(name, node_id)
        return nodes

    def helpers(self) -> dict[str, tuple[int, str]]:
        """Return connected helpers: the node of each that showed that it is, and the roster it says it works with."""
        found: dict[str, tuple[int, str]] = {}
        for node_id, met in self._hosted.items():
            for name in met.helpers:
                if self.several_on_a_node or self.shows(name, met) is not False:
                    found.setdefault(name, (node_id, met.roster))
        return found

    def restore(self, names: Sequence[str]) -> None:
        """Take the clients of a checkpoint."""
        self.names = names if isinstance(names, NumberedNames) else list(names)

    def meet(
        self,
        grid: Grid,
        awaited: Awaited,
        helpers: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until so many clients of the training, and helpers, are connected.

        Where names are known, the training goes on with fewer once the deadline has passed. ``meanwhile`` is called
        before every wait for helpers, and may raise.

        Raises
        ------
        NodesUnavailableError
            If the deadline passes first; at once where it is certain to (:func:`pointless`).
        """
        deadline = time.monotonic() + self.deadline_s
        begun, needed = bool(self.names), awaited.clients
        fewest = awaited.fewest if begun and awaited.fewest is not None else needed
        pause, wanted = _FIRST_PAUSE_S, Needed(fewest, helpers, self.client, resumable=begun)
        while True:
            self.refresh(grid)
            if not self.names and self._complete():
                known = self._known()
                self.names = known[: self.num_clients]
                self._report_unused(len(known))
            connected = sum(name not in awaited.without for name in self.node_map())
            late = time.monotonic() >= deadline
            enough = bool(self.names) and connected >= (fewest if late else needed)
            if enough and len(self.helpers()) >= helpers:
                if begun:  # a simulation makes its nodes one after the other
                    self._report_unused(len(self._known()), met=True)
                return
            self._check_hope(self._attending(simulated=is_simulation(grid)), wanted, late=late, enough=enough)
            if enough:
                meanwhile()
                self._say(f"helpers: {len(self.helpers())} of {helpers}")
            else:
                self._say(f"clients: {connected if begun else len(self._known())} of {needed}")
            self.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _check_hope(self, seen: Attending, wanted: Needed, *, late: bool, enough: bool) -> None:
        """Raise if there is no point in waiting, or no time left; ``enough``: clients are there, and helpers miss."""
        if self._raised:
            raise NodesUnavailableError(
                f"Expected simulated clients that answer, got one that fails before the first round; more nodes "
                f"or more time do not help: {self._raised}",
                kind="refused",
            )
        if not self.several_on_a_node and (in_vain := pointless(wanted, seen)):
            raise in_vain
        if late:
            error = no_helpers if enough else shortage
            raise error(wanted, seen, self.deadline_s)

    def _attending(self, *, simulated: bool) -> Attending:
        connected = self.node_map() if self.names else self._known()
        return Attending(
            nodes=self._nodes,
            silent=sum(bool(message_id) for message_id, _ in self._greeted.values()),
            clients=list(connected),
            helpers=list(self.helpers()),
            gone=[name for name in self.names if name not in connected],
            doubles=self._repeated(),
            strangers=Counter(self._strangers.values()),
            others=self._said(),
            unconfigured=sum(reason in _OWN_FAILURE_NAMES for reason in self._failures.values()),
            # A simulation makes its nodes one after the other, while its server runs already.
            simulated=simulated and time.monotonic() - self._nodes_since >= _ALL_MADE_WITHIN_S,
        )

    def _say(self, waiting: str) -> None:
        """Log what is waited for, when it changes and from time to time."""
        text, now = f"Waiting for {waiting} connected{self._said()}.", time.monotonic()
        if text != self._last_said[0] or now - self._last_said[1] >= _SAY_AGAIN_S:
            self._last_said = text, now
            logger.info("%s", text)

    def _complete(self) -> bool:
        """Return True if all clients of the training are known."""
        if len(self._known()) < self.fewest:
            return False
        if self.num_clients is not None:
            return True
        # Nodes that are connected as well may be about to say who they are.
        pending = [since for message_id, since in self._greeted.values() if message_id]
        return all(time.monotonic() - since >= _ANSWERS_WITHIN_S for since in pending)

    def refresh(self, grid: Grid) -> None:
        """Greet new nodes and take the answers that have come, without waiting."""
        now, grid = time.monotonic(), guarded(grid)
        connected = set(grid.get_node_ids())
        if len(connected) != self._nodes:
            self._nodes, self._nodes_since = len(connected), now
        self._hosted = {node_id: met for node_id, met in self._hosted.items() if node_id in connected}
        self._strangers = {node_id: kind for node_id, kind in self._strangers.items() if node_id in connected}
        self._failures = {node_id: reason for node_id, reason in self._failures.items() if node_id in connected}
        self._greet(grid, connected, now)
        self._take_answers(grid)
        grid.node_names.update({node_id: ", ".join(met.names) for node_id, met in self._hosted.items()})
        self._report_repeated()
        self._report_schemas()

    def _greet(self, grid: GuardedGrid, connected: set[int], now: float) -> None:
        """Greet new nodes, and forget greetings that are too old or of nodes that are gone."""
        # A node that gives no sensible answer is asked again after a while. Nobody waits for it meanwhile.
        before = {message_id for message_id, _ in self._greeted.values() if message_id}
        self._greeted = {
            node_id: (message_id, since)
            for node_id, (message_id, since) in self._greeted.items()
            if node_id in connected and now - since < _GREET_AGAIN_S
        }
        grid.forget(before - {message_id for message_id, _ in self._greeted.values()})
        new = sorted(connected - self._hosted.keys() - self._greeted.keys())
        if new:
            self._nonces |= {node_id: secrets.token_hex(16) for node_id in new}
            hellos = [hello(node_id, self._message_type, self.entries, self._nonces[node_id]) for node_id in new]
            message_ids = list(grid.push_messages(hellos))
            for node_id, message_id in zip(new, message_ids, strict=False):
                self._greeted[node_id] = (message_id or "", now)

    def _take_answers(self, grid: GuardedGrid) -> None:
        """Take the answers to greetings that have come, in the order of nodes."""
        waiting = {message_id: node_id for node_id, (message_id, _) in self._greeted.items() if message_id}
        if not waiting:
            return
        answered = [
            (node_id, reply)
            for reply in guarded(grid).pull_messages(list(waiting))
            if (node_id := waiting.pop(reply.metadata.reply_to_message_id, None)) is not None  # the first answer counts
        ]
        for node_id, reply in sorted(answered, key=lambda pair: pair[0]):
            self._met(reply, node_id)

    def _met(self, reply: Message, node_id: int) -> None:
        met, kind = introduction(reply, self._nonces.get(node_id, "")), unknown_node(reply)
        self._strangers = {**self._strangers, node_id: kind} if kind else self._strangers
        several = 0 if met is None else len(met.clients) + len(met.helpers)
        if met is not None and met.clients and self.schema and met.schema != self.schema:
            logger.warning("Node %d has %s and is not asked.", node_id, _OTHER_SCHEMA)
            self._greeted[node_id] = ("", self._greeted[node_id][1])
            self._failures[node_id] = _OTHER_SCHEMA
            return
        if met is not None and (several == 1 or self.several_on_a_node):
            self._hosted[node_id] = met
            del self._greeted[node_id]
            self._strangers.pop(node_id, None)
            self._failures.pop(node_id, None)
            return
        self._greeted[node_id] = ("", self._greeted[node_id][1])
        if met is None:
            self._failures[node_id] = failure(reply)
            self._report_failure(node_id, reply)
            return
        logger.warning("Node %d says that it is %d clients and is not asked: it may be one.", node_id, several)
        self._failures[node_id] = _SEVERAL_NAMES

    def _report_failure(self, node_id: int, reply: Message) -> None:
        """Say at once that a client cannot be configured; keep the traceback of a simulated one."""
        if not reply.has_error() or reply.error.code not in _OWN_FAILURES:
            return
        if self.simulated:
            self._raised = self._raised or printable_lines(reply.error.reason or "")
        elif (failure := f"{node_id} {reply.error.code}") not in self._warned:
            self._warned.add(failure)
            logger.warning(
                "Node %d is connected, and its client cannot answer (%s). Its own log says why: that of `murmurfl "
                "node`, or of `flower-supernode`, on the computer of the node (`flwr supernode list` has its owner).",
                *(node_id, self._failures[node_id]),
            )

    def _report_schemas(self) -> None:
        """Warn once of clients with different schemas, whose releases do not belong together."""
        digests = {met.schema for met in self._hosted.values() if met.clients and met.schema}
        if len(digests) > 1 and _OTHER_SCHEMA not in self._warned:
            self._warned.add(_OTHER_SCHEMA)
            logger.warning(
                "Clients state %d schemas of records: have their operators compare schema files.", len(digests)
            )

    def _report_unused(self, known: int, *, met: bool = False) -> None:
        """Say once how many clients are connected, if the training does not use all of them.

        Nodes that were not met yet count as clients, unless only those who were are ``met``.
        """
        connected = known if self.several_on_a_node or met else max(known, self._nodes - len(self.helpers()))
        if self.num_clients is not None and connected > self.num_clients and _UNUSED not in self._warned:
            self._warned.add(_UNUSED)
            logger.warning(
                "%d nodes are connected, and this training uses %d of them, because num_clients = %d; the data of the "
                "other %d are not used. Raise num_clients, or leave it out to use all.",
                *(connected, self.num_clients, self.num_clients, connected - self.num_clients),
            )

    def _report_repeated(self) -> None:
        for name in self._repeated():
            if name not in self._warned:
                logger.warning(
                    "Client %r is reported by two nodes; the one is asked that shows that the name is its own, or was "
                    "met first.",
                    name,
                )
                self._warned.add(name)
        for node_id, met in [] if self.several_on_a_node else self._hosted.items():
            for name in met.names:
                if self.shows(name, met) is False and (claim := f"{node_id} {name}") not in self._warned:
                    self._warned.add(claim)
                    logger.warning(
                        "Node %d says that it is %s %r and does not sign with the key that the roster has for that name"
                        "%s.",
                        *(node_id, "helper" if name in met.helpers else "client", name),
                        ": it is not asked" if name in met.helpers else "",
                    )

    def _repeated(self) -> list[str]:
        """Names that several connected nodes report."""
        return sorted(name for name, times in Counter(self._all_names()).items() if times > 1)

    def _all_names(self) -> Iterable[str]:
        return (name for met in self._hosted.values() for name in met.clients)

    def _known(self) -> list[str]:
        return sorted(set(self._all_names()), key=by_length_and_name)

    def _said(self) -> str:
        """Return the answers of nodes that could not be met."""
        return "".join(
            f"; {count} answered with {reason}" for reason, count in Counter(self._failures.values()).items()
        )


# Codes of an exception that left the ClientApp, as none leaves murmurfl's.
_RAISED = (ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
# What Flower's legacy ClientApp raises on a message of the Message API.
_OF_LEGACY = ("fitins.", "evaluateins.", "Invalid message type: query")


@dataclass(frozen=True)
class Handshake:
    """Identity that a node claims; a real node is one client or one helper."""

    clients: tuple[str, ...]  # names
    helpers: tuple[str, ...] = ()  # names
    roster: str = ""  # of its helpers, as JSON text
    schema: str = ""  # digest of its clients' schema; empty where they do not say
    nonce: str = ""  # that it was sent
    signature: bytes = b""  # on it; empty for none

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.clients, *self.helpers)


def hello(node_id: int, message_type: str, entries: Mapping[str, Any], nonce: str) -> Message:
    """Make the greeting of a node, with the entries of every message of the training."""
    asked = {protocol.ASK: protocol.ASK_HELLO, protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.NONCE: nonce}
    config = ConfigRecord({**entries, **asked})
    return Message(RecordDict({protocol.CONFIG: config}), dst_node_id=node_id, message_type=message_type)


def introduction(reply: Message, nonce: str) -> Handshake | None:
    """Read the introduction in a node's reply to a hello with that nonce; None if it cannot be understood."""
    config = None if reply.has_error() else reply.content.config_records.get(protocol.CONFIG)
    if config is None or config.get(protocol.VERSION) != protocol.PROTOCOL_VERSION:
        return None
    clients, helpers = _names(config, protocol.CLIENTS), _names(config, protocol.HELPERS)
    roster = config.get(protocol.ROSTER, "")
    if clients is None or helpers is None or not (clients or helpers) or not isinstance(roster, str):
        return None
    schema = config.get(protocol.SCHEMA, "")
    known = isinstance(schema, str) and re.fullmatch(r"[0-9a-f]{32}", schema)
    signature = config.get(protocol.SIGNATURE, b"")
    signature = signature if isinstance(signature, bytes) else b""
    return Handshake(clients, helpers, roster if helpers else "", str(schema) if known else "", nonce, signature)


def failure(reply: Message) -> str:
    """Return why a node could not be met, in words a node cannot choose."""
    version: Any = None
    if not reply.has_error():
        config = reply.content.config_records.get(protocol.CONFIG)
        version = None if config is None else config.get(protocol.VERSION)
    elif reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION:
        return _NOT_LOADED
    elif reply.error.code != protocol.PROTOCOL_MISMATCH:
        return protocol.REFUSAL_NAMES.get(reply.error.code, f"error {reply.error.code}")
    elif found := re.search(r"protocol version (\d{1,9})\b", reply.error.reason or ""):
        version = int(found[1])
    if isinstance(version, int) and version != protocol.PROTOCOL_VERSION:
        name, ours = protocol.REFUSAL_NAMES[protocol.PROTOCOL_MISMATCH], protocol.PROTOCOL_VERSION
        return f"{name} (they speak version {version} of murmurfl's protocol, this server version {ours})"
    return "an answer this server does not understand"


def unknown_node(reply: Message) -> str:
    """Return the kind of a node's ClientApp that does not know murmurfl; empty where it does, or cannot be told."""
    if not reply.has_error():
        return "" if any(protocol.VERSION in record for record in reply.content.config_records.values()) else WITHOUT
    if reply.error.code not in _RAISED:
        return ""
    reason = reply.error.reason or ""
    return LEGACY if any(mark in reason for mark in _OF_LEGACY) else WITHOUT


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    """Return the names of an entry, () if it is missing; None if it is no list of names."""
    names = config.get(key, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        return None
    if not all(isinstance(name, str) and 0 < len(name) <= protocol.LONGEST_CLIENT_NAME for name in names):
        return None
    if not all(name.isprintable() for name in names):  # they stand in logs, errors and files
        return None
    return tuple(str(name) for name in names)


MOST_NAMED = 10

WITHOUT = "without"
"""A ClientApp that does not speak murmurfl's protocol."""
LEGACY = "legacy"
"""One of Flower's legacy kind."""


def is_simulation(grid: object) -> bool:
    """Return True if a grid is that of Flower's simulation, whose nodes are all there from the start."""
    module = sys.modules.get("flwr.superlink.grid")  # half a second to import: whoever made such a grid has done so
    grid = grid.unguarded if isinstance(grid, GuardedGrid) else grid
    return module is not None and isinstance(grid, module.InMemoryGrid)


@dataclass(frozen=True)
class Attending:
    """State of the nodes, as a server knows it while it waits."""

    nodes: int  # connected
    silent: int  # of these, those that have not answered their greeting yet
    clients: Sequence[str]  # names
    helpers: Sequence[str] = ()  # names
    gone: Sequence[str] = ()  # clients of the training that are not connected any more
    doubles: Sequence[str] = ()  # names that several nodes report
    strangers: Mapping[str, int] = field(default_factory=dict)  # how many nodes of each kind (:func:`unknown_node`)
    others: str = ""  # answers of other nodes
    unconfigured: int = 0  # of these, those that are not configured to answer
    simulated: bool = False  # whether no more nodes will come


@dataclass(frozen=True)
class Needed:
    """Requirements of a training."""

    clients: int
    helpers: int = 0
    client: str = ""  # the clients' ClientApp, as a line of code
    resumable: bool = False  # whether it has begun, with names that are known

    @property
    def nodes(self) -> int:
        """Nodes of a simulation."""
        return self.clients + self.helpers


def pointless(needed: Needed, seen: Attending) -> NodesUnavailableError | None:
    """Return the error if there is no point in waiting; None where there may be."""
    strangers = sum(seen.strangers.values())
    if not seen.simulated:
        some = bool(seen.clients or seen.helpers)
        if seen.silent or len(seen.clients) >= needed.clients or (some and (needed.resumable or not seen.unconfigured)):
            return None
        return None if len(seen.clients) + strangers + seen.unconfigured < needed.clients else shortage(needed, seen)
    if seen.nodes < needed.nodes:
        return _small(needed, seen)
    if seen.nodes - strangers < needed.nodes and strangers:
        return _foreign(needed, seen)
    if seen.silent:
        return None
    if len(seen.clients) < needed.clients:
        return shortage(needed, seen)
    return no_helpers(needed, seen) if len(seen.helpers) < needed.helpers else None


def shortage(needed: Needed, seen: Attending, deadline_s: float | None = None) -> NodesUnavailableError:
    """Return the error of too few clients, after a wait of ``deadline_s`` or none."""
    if seen.strangers:
        return _foreign(needed, seen)
    within = "" if deadline_s is None else f" within {deadline_s:g} s"
    missing = f" (missing: {_listed(seen.gone)})" if seen.gone else ""
    doubles = (
        f"; {len(seen.doubles)} reported by several nodes, of which one is asked: "
        f"{', '.join(map(repr, seen.doubles[:MOST_NAMED]))}"
        if seen.doubles
        else ""
    )
    text = f"Expected {needed.clients} clients{within}, got {len(seen.clients)}{missing}{seen.others}{doubles}."
    if seen.helpers and not needed.helpers:
        return NodesUnavailableError(
            f"{text} {len(seen.helpers)} of the nodes are helpers, which open sums of masked releases: give the "
            "strategy secure_aggregation=SecureAggregation(...).",
            kind="conflict",
            setting="secure_aggregation",
        )
    if seen.unconfigured and len(seen.clients) + seen.unconfigured >= needed.clients:
        return _unconfigured(text, seen)
    if deadline_s is None:
        return NodesUnavailableError(f"{text} The log above has what the nodes say of it.")
    why = " Nodes that answered so say in their own logs what is wrong." if seen.others else ""
    if needed.resumable:
        return NodesUnavailableError(
            f"{text}{why} Nothing is lost: start these nodes and resume from the checkpoint; or resume with a smaller "
            "min-available-nodes (min_available_nodes), or a larger node-deadline-s."
        )
    return NodesUnavailableError(
        f"{text}{why} Nothing was asked of anybody yet: start more nodes, raise node-deadline-s, or begin with a "
        "smaller num-clients."
    )


def no_helpers(needed: Needed, seen: Attending, deadline_s: float | None = None) -> NodesUnavailableError:
    """Return the error of too few helpers, after a wait of ``deadline_s`` or none."""
    names = f" ({', '.join(map(repr, sorted(seen.helpers)))})" if seen.helpers else ""
    if deadline_s is None:
        return NodesUnavailableError(
            f"Expected {needed.helpers} helpers, got {len(seen.helpers)}{names}: without every helper no sum can be "
            "opened. Have the clients release under masks, UpdatePolicy(..., trust='secure-aggregation', "
            "sums=SumAssumption(min_honest=..., min_cohort=...)), with CorrelatedNoiseMod(..., "
            f"helpers={needed.helpers}).",
            kind="conflict",
            setting="trust",
        )
    return NodesUnavailableError(
        f"Expected {needed.helpers} helpers within {deadline_s:g} s, got {len(seen.helpers)}{names}{seen.others}. "
        "Start them (murmurfl helper; in a simulation CorrelatedNoiseMod(helpers=...)), or raise node-deadline-s; "
        "without every helper no sum can be opened."
    )


def _small(needed: Needed, seen: Attending) -> NodesUnavailableError:
    """Return the error of a simulation with too few nodes."""
    what = f"{needed.clients} clients"
    if needed.helpers:
        what = f"{needed.nodes} nodes, for {what} and {needed.helpers} helpers"
    return NodesUnavailableError(
        f"Expected a simulation of {what}, got {seen.nodes} nodes (Flower's default is 2). Start it with as many: flwr "
        f'run . --federation-config "num-supernodes={needed.nodes}". Or ask for fewer: lower num_clients.',
        kind="conflict",
        setting="num-supernodes",
        got=seen.nodes,
    )


def _foreign(needed: Needed, seen: Attending) -> NodesUnavailableError:
    """Return the error of nodes whose ClientApp does not know murmurfl."""
    strangers = sum(seen.strangers.values())
    there = f"{strangers} of {seen.nodes} nodes"
    if seen.strangers.get(LEGACY):
        return NodesUnavailableError(
            f"Expected ClientApps that speak murmurfl's protocol, got Flower's legacy ClientApp(client_fn) on {there}. "
            "No model was sent to them. Write "
            f"{needed.client.replace('ClientApp(', 'numpy_client_app(client_fn, ', 1)}",
            kind="unsupported",
        )
    real = (
        "" if seen.simulated else " On a real node the operator's file decides the policy, and murmurfl node reads it."
    )
    # A mod answers for CorrelatedFedAvg alone: under other strategies Flower does not even call it.
    lacks = "it has no mod of murmurfl's around it" if "Mod(" in needed.client else "it is none of this strategy's"
    raised = " If it is written so already, it failed before it answered: look for the first error above."
    if "Mod(" in needed.client:
        raised += (
            " A mod of your own before murmurfl's may fail on its greeting, which has neither a model nor a round: put "
            "murmurfl's first in mods=[...]."
        )
    return NodesUnavailableError(
        f"Expected ClientApps that speak murmurfl's protocol, got {there} whose ClientApp does not: {lacks}. No model "
        f"was sent to them. Write {needed.client}.{raised}{real}",
        kind="unsupported",
    )


def _unconfigured(text: str, seen: Attending) -> NodesUnavailableError:
    """Return the error of nodes that answer, and refuse because of their own configuration, which no data decide."""
    where = (
        "The first error above, of a node, says which and how to mend it."
        if seen.simulated
        else "The warnings above name them. Each node's own log (of `murmurfl node` or `flower-supernode`, on its own "
        "computer) says why; `murmurfl node CONFIG --check` tries it again there. Mend and restart these nodes."
    )
    return NodesUnavailableError(
        f"{text} These nodes are connected, and cannot answer with the model, the schema or the settings that their "
        f"ClientApp or operator's file names; more nodes of the same kind do not help. {where}",
        kind="refused",
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"
