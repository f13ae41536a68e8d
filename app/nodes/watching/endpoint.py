"""The addresses at which a process shows its health and its figures: a web server that can do nothing else.

Python's own web server gives each connection a thread for as long as the other side likes. Whoever reaches the address
may be anybody, so here one thread answers all, a connection has a few seconds and a few kilobytes, and the oldest makes
room for the next.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType

from ....privacy import ConfigurationError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 32
LONGEST_REQUEST = 8192
DEADLINE_S = 5.0
_STARTED_WITHIN_S = 10.0
_WAITING = 128
_LEFT_OVER = 16
_PAUSE_S = 0.5
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Address:
    """Where to listen.

    Parameters
    ----------
    host : str
    port : int
        0 for any that is free.
    """

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """An address as it is typed: HOST:PORT, or PORT alone for this computer only.

        Raises
        ------
        ConfigurationError
            If it is none.
        """
        host, _, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        whole = not host or text.strip().startswith("[") or ":" not in host
        if not (whole and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"Expected an address as HOST:PORT, such as 127.0.0.1:9464, or a PORT of this computer, got {text!r}."
            )
        return cls(host or "127.0.0.1", int(port))

    @property
    def is_local(self) -> bool:
        """Whether only programs of this computer reach it."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a path answers.

    Parameters
    ----------
    content : bytes
    content_type : str
    status : HTTPStatus
    """

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


class Endpoint:
    """One address, and what its paths answer; listens from ``start`` to ``close``, or within a ``with`` block.

    Parameters
    ----------
    address : Address
    paths : mapping of str to callable
        Each makes its answer from what is in memory.

    Raises
    ------
    ConfigurationError
        On start, if nobody can listen there.

    Notes
    -----
    Nothing of a request but its method and its path is looked at, and a path that is not listed gets a fixed answer:
    what leaves is what ``paths`` return. No request changes anything. There is no password and no encryption: whoever
    reaches the address reads it.
    """

    def __init__(self, address: Address, paths: Mapping[str, Callable[[], Answer]]) -> None:
        self.address = address
        self._paths = dict(paths)
        self._open: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="murmurfl-endpoint")
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._ending: asyncio.Event | None = None

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()
        self._started.wait(_STARTED_WITHIN_S)
        if self._failure is not None:
            raise ConfigurationError(
                f"Expected to listen at {self.address}, got: {self._failure.strerror or self._failure}. Choose another "
                "address, or end what listens there."
            )

    def close(self) -> None:
        """Listen no more; open connections are cut."""
        if self._ending is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_STARTED_WITHIN_S)

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except Exception:
            logger.exception("The address %s answers no more.", self.address)
        finally:
            self._started.set()
            self._loop.close()

    async def _listen(self) -> None:
        self._ending = asyncio.Event()
        try:
            listening = self._bound()
        except OSError as error:
            self._failure = error
            return
        with listening:
            self.address = Address(self.address.host, listening.getsockname()[1])
            self._started.set()
            accepting = self._loop.create_task(self._accept(listening))
            await self._ending.wait()
            tasks = [accepting, *self._open]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _bound(self) -> socket.socket:
        host, port = self.address.host, self.address.port
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.create_server(place[:2], family=family, backlog=_WAITING)
        bound.setblocking(False)
        return bound

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except OSError:  # it went away again, or the system has no more files
                await asyncio.sleep(_PAUSE_S)
                continue
            while len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(lambda ended: self._open.pop(ended, None))

    async def _answer(self, connection: socket.socket) -> None:
        # Whoever it was may ask for too much, too slowly, or go away.
        with connection, suppress(OSError, TimeoutError):
            connection.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                head = b""
                while _END_OF_HEAD not in head:
                    piece = await self._loop.sock_recv(connection, LONGEST_REQUEST)
                    head += piece
                    if not piece or len(head) > LONGEST_REQUEST:
                        return
                await self._loop.sock_sendall(connection, self._response(head))
                connection.shutdown(socket.SHUT_WR)
            # What else was sent is read and forgotten: closed with it unread, a connection would take the answer along.
            async with asyncio.timeout(_PAUSE_S):
                for _ in range(_LEFT_OVER):
                    if not await self._loop.sock_recv(connection, LONGEST_REQUEST):
                        return

    def _response(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        method, path = (words[0], words[1].split(b"?", 1)[0]) if len(words) == 3 else (b"", b"")
        make = self._paths.get(path.decode("latin-1"))
        allowed = b""
        if not words[-1].startswith(b"HTTP/") or not method:
            answer = _fixed(HTTPStatus.BAD_REQUEST)
        elif method not in (b"GET", b"HEAD"):
            answer, allowed = _fixed(HTTPStatus.METHOD_NOT_ALLOWED), b"Allow: GET, HEAD\r\n"
        elif make is None:
            answer = _fixed(HTTPStatus.NOT_FOUND)
        else:
            try:
                answer = make()
            except Exception:
                logger.exception("What is shown at %s could not be made.", self.address)
                answer = _fixed(HTTPStatus.INTERNAL_SERVER_ERROR)
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.content)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        )
        first = "".join(f"{line}\r\n" for line in lines).encode("ascii") + allowed + b"\r\n"
        return first if method == b"HEAD" else first + answer.content


def _fixed(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n".encode("ascii"), status=status)
