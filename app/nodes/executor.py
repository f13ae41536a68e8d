"""Answer a SuperNode's messages with one local app, and never with the code of a bundle.

A SuperNode with ``--isolation process`` hands its messages to whoever asks at its Runtime API with a shared secret.
Flower's own executor installs the run's bundle and runs its ClientApp. This one receives the bundle as bytes, hashes
them if an operator lists bundles, and never opens them. It lives between messages, so that a message starts no process.

A large model is in memory once. Flower cuts an array into objects of 5 MiB, and its own executor keeps all objects of a
message until the last array is assembled. This one assembles each array as soon as its objects are there, and drops
them before it pulls the next array's.

This is the only module that touches private names of Flower's Runtime API; a test with a real SuperNode covers it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from ...privacy import protocol
from ...privacy.errors import is_interrupt
from .run_admission import ReceivedContext

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 1.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 0.1, 1.0, 0.02
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def pulled_message(tree: ObjectTree, pull: Callable[[str], bytes]) -> Message:
    """Pull and assemble the message of an untrusted server's object tree; ``pull`` gets an object by its id."""
    message = _made(tree, pull, {})
    if not isinstance(message, Message):
        raise TypeError(f"Expected the objects of a message, got those of a {type(message).__name__}.")
    return message


def _made(tree: ObjectTree, pull: Callable[[str], bytes], whole: dict[str, InflatableObject]) -> InflatableObject:
    """Assemble an object from its content and its children; ``whole`` has the earlier objects with children."""
    if tree.object_id in whole:
        return whole[tree.object_id]  # a repeated array travels once
    children = {child.object_id: _made(child, pull, whole) for child in tree.children if child.children}
    leaves = {child.object_id for child in tree.children if not child.children}
    contents = pull_objects(
        [tree.object_id, *sorted(leaves - {tree.object_id})],
        pull,
        max_tries_per_object=None,
        initial_backoff=_FIRST_BACKOFF_S,
        backoff_cap=_LONGEST_BACKOFF_S,
    )
    made = inflate_object_from_contents(tree.object_id, contents, objects=children)
    if tree.children:
        whole[tree.object_id] = made
    return made


def pause_s(idle_s: float) -> float:
    """Seconds to wait before asking for a message again: 2 % of the seconds without one, between 0.1 and 1."""
    return min(max(_PAUSE_SHARE * idle_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)


class LocalExecutor:
    """The executor of one SuperNode: ``app`` answers every message, of whatever run.

    ``address`` is the SuperNode's Runtime API on the loopback interface, ``secret`` its
    ``--superexec-auth-secret-file``: without it, other programs of the client get no messages. ``reached`` is called
    at every answer of the SuperNode.

    Notes
    -----
    **Formal guarantees.** What leaves through the SuperNode is what ``app`` returns, or an error with a fixed text. No
    byte of a bundle is executed, imported, unpacked or written to disk, and no run configuration reaches the app.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        address: str,
        secret: bytes,
        reached: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._reached, self._address = app, reached, address
        self._answering = threading.Lock()
        self._client = self._connect(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE}))

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Answer messages one after the other until ``stopped()``; retry if the SuperNode does not answer.

        The SuperNode is asked ten times a second after a message, and less often the longer none comes, down to once a
        second: waiting all day should not drain a device.
        """
        wait, since = threading.Event().wait, time.monotonic()
        # Take every kind of task: one that nobody took would block its SuperNode for good.
        request = AcquireTaskRequest(supported_task_types=[kind.value for kind in TaskType])
        abandoned = threading.Event()
        try:
            while not stopped():
                try:
                    acquired = self._client.AcquireTask(request)
                except httpx.HTTPError as error:
                    logger.debug("The SuperNode's Runtime API does not answer: %s", error)
                    wait(_SHORTEST_PAUSE_S)
                    continue
                self._reached()
                if acquired.HasField("task") and acquired.token:
                    since = time.monotonic()
                    # A SuperNode completes a message before it takes the next, unless the message's run is over:
                    # whoever still pulls the earlier one waits in vain.
                    abandoned.set()
                    abandoned = threading.Event()
                    arguments = (acquired.task, acquired.token, abandoned)
                    threading.Thread(target=self._handle, args=arguments, daemon=True, name="murmurfl-task").start()
                else:
                    wait(pause_s(time.monotonic() - since))
        finally:
            abandoned.set()

    def close(self) -> None:
        self._client.close()

    def _connect(self, interceptor: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self._address,
            insecure=True,  # on the loopback interface, between two processes of one operator
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor],
        )

    def _handle(self, task: Task, token: str, abandoned: threading.Event) -> None:
        client = self._connect(RuntimeTokenHttpInterceptor(token))
        heartbeat = HeartbeatSender(_heartbeat(client))
        ended: tuple[str, str] | None = None
        context: Context | None = None
        try:
            heartbeat.start()
            message, context, bundle = _pull(client, abandoned)
            if task.type == TaskType.CLIENT_APP:
                with self._answering:
                    reply = self._answer(message, ReceivedContext(context, bundle))
                    del message  # a model or two, before the reply is cut into pieces
                    push_message(client, reply, context)
                ended = SubStatus.COMPLETED, ""
            else:
                logger.warning("Refused a task of type %s: this client answers messages to a ClientApp.", task.type)
                ended = SubStatus.FAILED, "this client answers messages to a ClientApp only"
        except _AbandonedError:
            logger.info("A message was given up: its run ended before it had arrived.")
            ended = SubStatus.FAILED, "the run ended before the message had arrived"
        except Exception:
            # The network failed, or the message is malformed; the app's errors do not get here. Without an end and a
            # heartbeat the task expires, and the SuperNode reports that to the server.
            logger.exception("A message could not be answered.")
        finally:
            if heartbeat.is_running:
                heartbeat.stop()
            if ended is not None:
                push_task_output(client, context, *ended)
            client.close()

    def _answer(self, message: Message, context: Context) -> Message:
        try:
            return self._app(message, context)
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("A message was refused: the app does not answer its kind.")
            error = Error(protocol.MALFORMED_REQUEST, "malformed request: this client does not answer such messages")
            return Message(error, reply_to=message)


class _AbandonedError(Exception):
    """Nobody waits for the message any more."""


def _pull(client: RuntimeHttpClient, abandoned: threading.Event) -> tuple[Message, Context, bytes]:
    """Return a task's message, its context and the bundle's bytes; everything else about the run is ignored."""
    task = client.PullTaskInput(PullTaskInputRequest())
    context = context_from_proto(task.context)
    pulled = client.PullMessages(PullAppMessagesRequest())
    tree = pulled.message_object_trees[0]
    node = Node(node_id=context.node_id)
    pull = make_pull_object_fn_protobuf(client.PullObject, node, context.run_id)

    def pull_unless_abandoned(object_id: str) -> bytes:
        if abandoned.is_set():
            raise _AbandonedError
        return pull(object_id)

    message = pulled_message(tree, pull_unless_abandoned)
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, context.run_id)(tree.object_id)
    message.metadata.__dict__["_message_id"] = tree.object_id  # as Flower's own executor does
    return message, context, task.fab.content


def _heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    def beat() -> bool:
        try:
            if not client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                logger.warning("The SuperNode has given up on a message that is still being answered.")
        except httpx.HTTPError:
            return False
        return True

    return beat
