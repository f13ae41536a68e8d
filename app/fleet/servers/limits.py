"""Limits on what a server spends on senders that it does not know, and on what known senders may hold.

Flower's web application reads and parses a request before it looks at the sender. Here a connection has a deadline from
the moment it is accepted (:class:`ConnectionLimits`): TLS, the head of a request and the answer to an unknown sender
must be over by then. An address may hold few connections that have not shown who sends, and all addresses together some
more; a new one displaces the oldest. The gate says when it knows a sender, and reads bodies here
(:class:`BodyLimits`).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import ipaddress
import logging
import ssl
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from ....privacy.errors import ConfigurationError

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

logger = logging.getLogger("flwr")  # so that its lines are read as the SuperLink's own

LONGEST_HEAD = 16 << 10
"""Bytes of a request's line and headers."""
UNKNOWN_S = 15.0
"""Seconds for TLS and the head of a request, and for the rest of a request from an unknown sender."""
NODE_S = 900.0
"""Seconds for one request of a node."""
UNKNOWN_PER_ADDRESS, UNKNOWN = 64, 256
"""Connections that have not shown who sends: of one IPv4 address or IPv6 network of 64 bits, and of all."""
KNOWN_PER_SENDER = 32
"""Connections of one known sender; Flower's SuperNode has up to four."""

_AREA_BITS = {4: 24, 6: 48}
_BACKLOG = 128  # accepted at once, before the first is counted
_OTHER_FILES = 64  # database, logs, pipes
_MOST_FILES, _LEAST_FILES = 1 << 16, 768
_TLS_GOODBYE_S = 5.0
_MUCH, _COLLECT_AFTER_S = 32 << 20, 0.1
_SAY_AGAIN_S = 60.0


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit, and return it; raise if it is too small to serve.

    Raises
    ------
    ConfigurationError
        If not even connections of unknown senders fit into the hard limit.
    """
    import resource  # not everywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        wanted = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _LEAST_FILES:
        raise ConfigurationError(
            f"Expected at least {_LEAST_FILES} open files to be allowed, got {wanted}: raise the hard limit with "
            "`ulimit -n`, or LimitNOFILE= in the unit.",
            kind="out-of-range",
        )
    return wanted


def known_connections(files: int) -> int:
    """Return how many connections of known senders fit into so many open files."""
    return files - UNKNOWN - 2 * _BACKLOG - _OTHER_FILES


class Garbage:
    """Collects garbage once there may be much of it.

    An exception that ends a request holds its body in a cycle: megabytes that Python, which counts objects and not
    bytes, would keep for long.
    """

    def __init__(self) -> None:
        self._bytes = 0

    @staticmethod
    def freeze() -> None:
        """Leave out what there is now, which stays: collecting the rest takes milliseconds."""
        gc.collect()
        gc.freeze()

    def add(self, size: int) -> None:
        """Note that so many bytes may be garbage soon."""
        self._bytes += size
        if self._bytes >= _MUCH:
            self._bytes = 0
            asyncio.get_running_loop().call_later(_COLLECT_AFTER_S, gc.collect)


def server_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return what a server speaks TLS by; None without a certificate."""
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


class ConnectionLimits:
    """Counts a server's connections, and closes those of unknown senders that are too many or too slow.

    ``files`` is how many may be open; ``context`` has the server's certificate, None without TLS. uvicorn makes a
    protocol of each connection with :meth:`options`. A sender is *known* once a request on the connection has been
    authenticated (:meth:`Connection.is_from`), and only for the count: every request shows anew who sends.
    """

    def __init__(self, files: int, context: ssl.SSLContext | None = None) -> None:
        self.context = context
        self._most_known = known_connections(files)
        self._unknown: dict[Connection, None] = {}  # the oldest first
        self._addresses: Counter[str] = Counter()
        self._areas: Counter[str] = Counter()
        self._senders: Counter[bytes] = Counter()
        self._closed, self._said_at = 0, float("-inf")

    def options(self) -> dict[str, Any]:
        """Options of ``uvicorn.run`` under which these limits hold."""
        from uvicorn.protocols.http.h11_impl import H11Protocol  # for whoever serves only

        def connection(
            config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
        ) -> Connection:
            return Connection(self, H11Protocol(config, server_state, app_state, _loop), server_state)

        return {
            "http": connection,
            "loop": "asyncio",
            "ws": "none",
            "backlog": _BACKLOG,
            "h11_max_incomplete_event_size": LONGEST_HEAD,
            # TLS begins above the limits; an address in a header is anybody's.
            "ssl_keyfile": None,
            "ssl_certfile": None,
            "proxy_headers": False,
            # An answer that is still on its way would be cut off; `Connection.answered` closes what is idle.
            "timeout_keep_alive": int(NODE_S),
        }

    def add(self, connection: Connection) -> None:
        """Count a new connection; close the oldest unknown one if there are too many."""
        address = connection.address
        if self._addresses[address] >= UNKNOWN_PER_ADDRESS:
            self._close_oldest(address)
        elif len(self._unknown) >= UNKNOWN:
            (area, _), *_ = self._areas.most_common(1)
            near = [one for one in self._addresses if _area(one) == area]
            self._close_oldest(max(near, key=self._addresses.__getitem__))
        self._addresses[address] += 1
        self._areas[_area(address)] += 1
        self._unknown[connection] = None

    def know(self, connection: Connection, sender: bytes) -> bool:
        """Count a connection as a known sender's; return False if the sender has too many."""
        if connection.sender == sender:
            return True
        if self._senders[sender] >= KNOWN_PER_SENDER:
            return False
        if connection.sender is not None or sum(self._senders.values()) < self._most_known:
            self.remove(connection)
            connection.sender = sender
            self._senders[sender] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection in self._unknown:
            del self._unknown[connection]
            for counts, counted in (self._addresses, connection.address), (self._areas, _area(connection.address)):
                counts[counted] -= 1
                counts += Counter()  # without those at zero
        if connection.sender is not None:
            self._senders[connection.sender] -= 1
            self._senders += Counter()
            connection.sender = None

    def _close_oldest(self, address: str) -> None:
        oldest = next(one for one in self._unknown if one.address == address)
        self.remove(oldest)
        oldest.abort()
        self._closed += 1
        now = time.monotonic()
        if now - self._said_at >= _SAY_AGAIN_S:
            logger.warning(
                "Closed %d connections that had not shown a node's key or a login: %s has too many.",
                self._closed,
                address,
            )
            self._closed, self._said_at = 0, now


CONNECTION: contextvars.ContextVar[Connection | None] = contextvars.ContextVar("murmurfl-connection", default=None)
"""The connection of the request that is being answered; None in front of another server."""


class Connection(asyncio.Protocol):
    """One connection: TLS, then HTTP by uvicorn's protocol, within the limits."""

    def __init__(self, limits: ConnectionLimits, http: H11Protocol, server: ServerState) -> None:
        self.address = ""
        self.sender: bytes | None = None  # who the last request came from, if known
        self._limits, self._http, self._server = limits, http, server
        self._transport: asyncio.Transport | None = None
        self._secured: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._early: list[bytes] = []
        self._serving = self._lost = False
        self._context = contextvars.copy_context()
        self._context.run(CONNECTION.set, self)

    # Of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        self.address = _network(transport.get_extra_info("peername"))
        self._limits.add(self)
        self.within(UNKNOWN_S)
        if self._limits.context is None:
            self._serve(transport)
            return
        self._server.connections.add(self)  # type: ignore[arg-type] - asked to shut down like all others
        self._server.tasks.add(task := asyncio.get_running_loop().create_task(self._secure(transport)))
        task.add_done_callback(self._server.tasks.discard)

    async def _secure(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        if transport.is_closing():  # displaced before it began
            return
        try:
            secured = await loop.start_tls(
                transport,
                self,
                self._limits.context,  # type: ignore[arg-type]
                server_side=True,
                ssl_handshake_timeout=UNKNOWN_S,
                ssl_shutdown_timeout=_TLS_GOODBYE_S,
            )
        except (OSError, asyncio.CancelledError) as error:  # an SSLError is an OSError
            traceback.clear_frames(error.__traceback__)  # they hold TLS's buffers until garbage is collected
            secured = None
        if secured is None or secured.is_closing():  # asyncio tells nobody
            self.abort()
            self.connection_lost(None)
            return
        self._server.connections.discard(self)  # type: ignore[arg-type]
        self._secured = secured
        self._serve(secured)

    def _serve(self, transport: asyncio.Transport) -> None:
        self._serving = True
        self._http.connection_made(transport)
        for data in self._early:
            self.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._serving:
            self._context.run(self._http.data_received, data)
        else:
            self._early.append(data)  # what came with the end of the handshake

    def eof_received(self) -> None:
        if self._serving:
            self._http.eof_received()

    def pause_writing(self) -> None:
        if self._serving:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._serving:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._stop_timer()
        self._limits.remove(self)
        self._server.connections.discard(self)  # type: ignore[arg-type]
        if self._serving:
            self._serving = False
            self._http.connection_lost(exc)
        self._transport = self._secured = None
        self._context.run(CONNECTION.set, None)  # or buffers would stay until garbage is collected

    # Of the gate and the server.

    def is_from(self, sender: bytes, seconds: float | None) -> bool:
        """Note who sends the present request and when it must be over; return False if they have too many."""
        if not self._limits.know(self, sender):
            return False
        self.within(seconds)
        return True

    def within(self, seconds: float | None) -> None:
        """Close the connection after so long, if this is not called again before; None: do not."""
        self._stop_timer()
        if seconds is not None and not self._lost:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def answered(self, unsent: int | None = None) -> None:
        """Give the next request's head the time of an unknown sender's, once the present answer has left.

        Until then the request's own deadline holds, and a part of the answer must leave within each such time: there
        were ``unsent`` bytes when it was looked at last.
        """
        transports = [one for one in (self._transport, self._secured) if one is not None]
        left = sum(one.get_write_buffer_size() for one in transports if one is self._transport or not one.is_closing())
        if not left:
            self.within(UNKNOWN_S)
        elif unsent is not None and left >= unsent:
            self.abort()
        elif not self._lost:
            self._look = asyncio.get_running_loop().call_later(UNKNOWN_S, self.answered, left)

    def _stop_timer(self) -> None:
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        self._timer = self._look = None

    def abort(self) -> None:
        """Close the connection at once, whatever the other side does."""
        if self._transport is not None:
            self._transport.abort()

    def shutdown(self) -> None:
        """End a connection whose TLS has not begun: the server ends."""
        self.abort()


@contextmanager
def request_of_unknown() -> Iterator[Connection | None]:
    """Give the present request the time of an unknown sender's; after its answer the next one's head has as long."""
    connection = CONNECTION.get()
    if connection is not None:
        connection.within(UNKNOWN_S)
    try:
        yield connection
    finally:
        if connection is not None:
            connection.answered()


def _network(peer: Sequence[Any] | None) -> str:
    """Return the address whose connections are counted together: of IPv6 a network of 64 bits."""
    if not peer:
        return "?"
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@lru_cache(4 * UNKNOWN)
def _area(network: str) -> str:
    """Return the network whose addresses may be one person's: this computer, or one that providers give a customer."""
    try:
        address = ipaddress.ip_address(network.partition("/")[0])
    except ValueError:
        return network
    if address.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network((address, _AREA_BITS[address.version]), strict=False))


LARGEST_BODY = 32 << 20
"""Bytes of one object that a node uploads; Flower cuts arrays into objects of 5 MiB."""
LARGEST_CALL = 1 << 20
"""Bytes of every other call of a node: it has no values of a reply, but the hashes of its parts."""
LARGEST_INTRODUCTION = 4 << 10
"""Bytes of a call by which an unknown sender introduces itself."""
LARGEST_OF_TASK = 1 << 30
"""Bytes of a call by the process of a run, which has an owner's code."""

LARGEST_REPLY_VARIABLE = "MURMURFL_LARGEST_REPLY_MIB"
"""Environment variable of a server: the size of a node's reply in MiB, if not 1,024."""

_LARGEST_REPLY, _REPLIES_SAVED, _LARGEST_SETTING = 1 << 30, 4, 1 << 20
_SMALL = 64 << 10  # uvicorn holds as much anyway
_ALL_BODIES, _BODIES_OF_SENDER = 8 * LARGEST_BODY, 2 * LARGEST_BODY
_TURN_S = 20.0  # Flower's SuperNode waits for 30 s
_SILENT_S = 30.0


@dataclass
class RejectedRequestError(Exception):
    """A request is not read: HTTP's status, and why."""

    status: int
    reason: str


class BodyLimits:
    """Reads bodies of requests, and holds no more of them at a time than fit.

    A sender's bodies take at most 64 MiB and all senders' 256 MiB; others wait for their turn before they are read.
    """

    def __init__(self) -> None:
        self._changed, self._garbage = asyncio.Condition(), Garbage()
        self._held: Counter[bytes] = Counter()

    @asynccontextmanager
    async def body(
        self, receive: Receive, headers: Sequence[tuple[bytes, bytes]], sender: bytes, largest: int
    ) -> AsyncIterator[bytes]:
        """Read a body of at most ``largest`` bytes; it counts as held until the block ends.

        Raises
        ------
        RejectedRequestError
            If it is larger, or says so, comes too slowly, or its turn does not come.
        """
        size = _declared(headers, largest)
        if not size:
            yield b""
            return
        if size <= _SMALL or largest == LARGEST_OF_TASK:
            yield await _read(receive, size)
            return
        await self._take(sender, size)
        try:
            yield await _read(receive, size)
        finally:
            async with self._changed:
                self._held[sender] -= size
                self._held += Counter()
                self._changed.notify_all()
            self._garbage.add(size)

    async def _take(self, sender: bytes, size: int) -> None:
        def fits() -> bool:
            own = self._held[sender] + size <= _BODIES_OF_SENDER
            return own and sum(self._held.values()) + size <= _ALL_BODIES

        try:
            async with asyncio.timeout(_TURN_S), self._changed:
                await self._changed.wait_for(fits)
                self._held[sender] += size
        except TimeoutError:
            raise RejectedRequestError(503, "Too much is being uploaded; try again.") from None


class UploadLimits:
    """Bounds what a node uploads: ``largest_reply`` bytes for each message that it was sent, saved up for a few.

    A member that is asked once cannot fill the server's disk. Parts that are sent again after a failure count again.
    """

    def __init__(self, largest_reply: int) -> None:
        self._largest = largest_reply
        self._left: dict[bytes, int] = {}

    def asked(self, node: bytes) -> None:
        """Note that a message was sent to a node."""
        left = self._left.get(node, self._largest)
        self._left[node] = min(left + self._largest, _REPLIES_SAVED * self._largest)

    def take(self, node: bytes, size: int) -> None:
        """Count an upload.

        Raises
        ------
        RejectedRequestError
            If the node has uploaded too much.
        """
        left = self._left.get(node, self._largest)
        if size > left:
            raise RejectedRequestError(
                413,
                f"Expected a reply of at most {self._largest >> 20} MiB, got a larger one: its server sets another "
                f"limit with {LARGEST_REPLY_VARIABLE}.",
            )
        self._left[node] = left - size


def largest_reply(named: str | None) -> int:
    """Bytes of a reply by the environment's variable, or by default."""
    if named is None:
        return _LARGEST_REPLY
    if not named.isdecimal() or not 0 < int(named) <= _LARGEST_SETTING:
        raise ConfigurationError(
            f"Expected {LARGEST_REPLY_VARIABLE} to be MiB, a whole number from 1 to {_LARGEST_SETTING}, got {named!r}.",
            kind="out-of-range",
            setting=LARGEST_REPLY_VARIABLE,
            got=named,
        )
    return int(named) << 20


def _declared(headers: Sequence[tuple[bytes, bytes]], largest: int) -> int:
    """Return the size of a body by its headers; the largest possible if they do not say."""
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        return largest
    lengths = [value for name, value in headers if name.lower() == b"content-length"] or [b"0"]
    with suppress(ValueError):
        if len(lengths) == 1 and 0 <= (size := int(lengths[0])) <= largest:
            return size
    raise RejectedRequestError(413, f"Expected a request of at most {largest} bytes, got a larger one.")


async def _read(receive: Receive, largest: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout(_SILENT_S):
                message = await receive()
        except TimeoutError:
            raise RejectedRequestError(
                408, f"Expected the rest of the request within {_SILENT_S:.0f} s, got nothing."
            ) from None
        if message["type"] != "http.request":
            raise RejectedRequestError(400, "Expected the rest of the request, got an end of the connection.")
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > largest:
            raise RejectedRequestError(413, f"Expected a request of at most {largest} bytes, got a larger one.")
        parts.append(part)
    return b"".join(parts)


def received(body: bytes, receive: Receive) -> Receive:
    """Return what an application calls to get a body that was read already, and then what comes after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        if left:
            return left.pop()  # it is not needed here any more
        # What an application that waits for the end must not see: a body that nobody reads.
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return again
