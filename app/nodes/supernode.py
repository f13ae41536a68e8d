"""``murmurfl node``: a real SuperNode that runs only code that its operator installed.

Flower ships an app's code with the run, so a plain ``flower-supernode`` executes whatever the server sends. Here
Flower's SuperNode only does the networking (``--isolation process``). This process answers its messages with the
machine of the operator's file (:class:`~murmurfl.app.nodes.executor.LocalExecutor`): a client of murmurfl, or the
operator's own ClientApp behind the noise mod.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from ...clients import PrivateClient, UpdateNode, numpy_client_app
from ...clients.messages import Answers
from ...clients.nodes.machine_file import SampleNode
from ...clients.records.machine_records import Items
from ...clients.sums_helper import helper_app
from ...privacy import SQLiteLedger
from ..engines.loopback import free_port, interrupts_as_keyboard_interrupt, without_proxy
from .child_process import end_process, followed
from .connections.connection import Connection
from .connections.reconnecting import Reconnecting
from .describing import describe, describe_helper, describe_own
from .executor import LocalExecutor, environment_of_large_blocks, give_back_large_blocks
from .helper_config import HelperConfig
from .node_config import NodeConfig
from .own_app import OwnNode, own_app, own_client
from .taken_runs import TakenRuns, taking
from .watching.journal import Journal, noting

logger = logging.getLogger(__name__)


def run_node(
    config: NodeConfig | OwnNode, connection: Connection, journal: Journal | None = None, runs: TakenRuns | None = None
) -> None:
    """Answer whatever the SuperLink asks, until interrupted (SIGINT, SIGTERM or SIGHUP).

    A SuperNode that ends, because the SuperLink restarted or the old session is still open, is started again after 1 to
    15 seconds.

    Parameters
    ----------
    journal : Journal, optional
        Receives an entry for every event.
    runs : TakenRuns, optional
        Runs to take, from the same file as ``config``; default all.

    Raises
    ------
    ConfigurationError, LedgerError
        If the machine cannot be made from its configuration; nothing was started.

    Notes
    -----
    **Formal guarantees.** Under the trust of its policy everything that leaves this machine through the SuperNode is
    mu-GDP for replacement of one record (with an ``app`` of updates of what its :class:`~murmurfl.clients.UpdatePolicy`
    says), against a server that chooses runs, bundles, run configurations and messages: no code of a bundle runs and
    every message is answered by the one machine made from ``config``. With ``runs`` only the runs that they admit are
    answered. Timing is not protected.
    """
    answers, description = machine_of(config)
    logger.info(description)
    _say(runs)
    repeat = repeating_the_last_answer()

    def app(message: Message, context: Context) -> Message:
        return repeat(message, context, answers)

    journal = journal or Journal()
    journal.note("started", kind="node", name=config.machine)
    _answer_forever(noting(taking(app, runs), journal), connection, journal)


def run_helper(
    config: HelperConfig, connection: Connection, journal: Journal | None = None, runs: TakenRuns | None = None
) -> None:
    """Open sums of masked releases for whatever the SuperLink asks, until interrupted (SIGINT, SIGTERM or SIGHUP).

    Parameters
    ----------
    journal, runs : optional
        As for :func:`run_node`.

    Raises
    ------
    ConfigurationError, MurmurflError
        If the helper cannot be made from its configuration; nothing was started.

    Notes
    -----
    **Formal guarantees.** Every sum that leaves this process through the SuperNode was opened by the rule of its
    :class:`~murmurfl.privacy.sums.opening_rule.Opener`, against a server that chooses runs, bundles, run configurations
    and messages: no code of a bundle runs. No release of a machine is ever sent to a helper, and no key of its own
    leaves it. With ``runs`` only the runs that they admit are answered.
    """
    opener = config.opener()
    logger.info(describe_helper(config, opener))
    _say(runs)
    journal = journal or Journal()
    journal.note("started", kind="helper", name=config.helper)
    _answer_forever(noting(taking(helper_app(opener), runs), journal), connection, journal)


def _say(runs: TakenRuns | None) -> None:
    if runs is not None:
        logger.info(runs.sentence())


def _answer_forever(app: Answers, connection: Connection, journal: Journal) -> None:
    os.environ.update(without_proxy(os.environ))
    give_back_large_blocks()
    reconnecting = Reconnecting(connection, journal)
    with tempfile.TemporaryDirectory(prefix="murmurfl-node-") as folder, interrupts_as_keyboard_interrupt():
        secret = secrets.token_bytes(32)
        secret_file = Path(folder) / "secret"  # only this user may enter the folder
        secret_file.write_bytes(secret)
        try:
            while True:
                reconnecting.starts()
                _serve(app, connection, secret, secret_file, journal)
                time.sleep(reconnecting.ended())
        except KeyboardInterrupt:
            journal.note("stopped")


def machine_of(config: NodeConfig | OwnNode) -> tuple[Answers, str]:
    """The callable that answers messages to a machine, and the machine in one sentence.

    Raises
    ------
    ConfigurationError, LedgerError
        If the machine cannot be made from its configuration.
    """
    if isinstance(config, UpdateNode):
        return own_app(config), describe_own(config)
    answers, client = client_of(config)
    return answers, describe(client)


def client_of(
    config: NodeConfig | SampleNode, *, ledger: SQLiteLedger | None = None, items: Items | None = None
) -> tuple[Answers, PrivateClient]:
    """The callable that answers messages to a machine that bounds samples, and its client.

    Parameters
    ----------
    ledger, items : optional
        An audit's, instead of the file's ledger and an app's own samples.

    Raises
    ------
    ConfigurationError, LedgerError
        If the machine cannot be made from its configuration.

    Notes
    -----
    **Formal guarantees.** Everything the client returns is mu-GDP for replacement of one record, under the policy of
    the node's file.
    """
    if isinstance(config, SampleNode):
        return own_client(config, ledger=ledger, items=items)
    client = config.client(ledger)
    return numpy_client_app(lambda context: client), client  # noqa: ARG005


def repeating_the_last_answer() -> Mod:
    """Flower mod that answers a repeated request with the same answer, from memory.

    A server that was killed in a round and resumed from its checkpoint asks the round again, bit for bit, under a new
    run. A second release would waste budget and give the round twice its weight.

    Notes
    -----
    **Formal guarantees.** What is sent again was sent, or was recorded as sent, before.
    """
    last: dict[str, RecordDict] = {}

    def repeat(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN or message.has_error():
            return call_next(message, context)
        request = message.content.object_id  # a hash of its content
        if request in last:
            return Message(last[request].copy(), reply_to=message)
        reply = call_next(message, context)
        if not reply.has_error():
            last.clear()
            last[request] = reply.content.copy()
        return reply

    return repeat


def _serve(app: Answers, connection: Connection, secret: bytes, secret_file: Path, journal: Journal) -> None:
    port = free_port()
    command = [sys.executable, "-m", f"{__package__}.flower_supernode", str(os.getpid()), *connection.arguments()]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret_file)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment |= {**environment_of_large_blocks(), **os.environ}
    with followed(subprocess.Popen, command, environment, journal, connection.superlink) as process:
        executor = LocalExecutor(app, f"127.0.0.1:{port}", secret, journal.reached)
        try:
            executor.serve(lambda: process.poll() is not None)
        finally:
            executor.close()
            end_process(process)
