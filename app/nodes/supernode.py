"""``murmurfl node`` and ``murmurfl helper``: a real SuperNode that runs only code that its operator installed.

Flower ships an app's code with the run, so a plain ``flower-supernode`` executes whatever the server sends. Here
Flower's SuperNode only does the networking (``--isolation process``), as a child process whose lines go into the log
and whose contact with the SuperLink goes into the journal. This process answers its messages with the client of the
operator's file (:class:`~murmurfl.app.nodes.executor.LocalExecutor`): a client of murmurfl, or the operator's own
ClientApp behind the noise mod.
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

from ...clients.messages import Answers
from ...clients.sums_helper import helper_app
from ...privacy import protocol
from ...privacy.errors import ConfigurationError, LedgerError
from ..engines.loopback import free_port, interrupts_as_keyboard_interrupt, without_proxy
from .connection import Connection
from .diagnosis import Reconnecting
from .executor import LocalExecutor
from .flower_process import (
    end_process,
    environment_of_large_blocks,
    followed,
    give_back_large_blocks,
    no_core_dumps,
)
from .journal import Journal, noting
from .node_app import OwnNode, answers_of, check_before_records, describe_helper, installed_app, unconfigured
from .node_config import HelperConfig, NodeConfig
from .run_admission import RunAdmissionPolicy, taking

logger = logging.getLogger(__name__)


def run_node(
    config: NodeConfig | OwnNode,
    connection: Connection,
    journal: Journal | None = None,
    runs: RunAdmissionPolicy | None = None,
) -> None:
    """Answer whatever the SuperLink asks, until interrupted (SIGINT, SIGTERM or SIGHUP).

    A SuperNode that ends, because the SuperLink restarted or the old session is still open, is started again after 1 to
    15 seconds.

    Parameters
    ----------
    journal : Journal, optional
        Receives an entry for every event.
    runs : RunAdmissionPolicy, optional
        Runs to take, from the same file as ``config``; default all.

    Raises
    ------
    ConfigurationError, LedgerError
        If the client cannot be made once its records are read, or its app cannot be imported; nothing was started, so
        that to a server it is switched off.

    Notes
    -----
    A client that cannot be made whatever its records are answers every request with a fixed code, so that the server
    can say so and does not wait for it. Log and health say so too.

    **Formal guarantees.** Under the trust of its policy everything that leaves this computer through the SuperNode is
    mu-GDP for replacement of one record (with an ``app`` of updates of what its :class:`~murmurfl.clients.UpdatePolicy`
    says), against a server that chooses runs, bundles, run configurations and messages: no code of a bundle runs and
    every message is answered by the one client made from ``config``. With ``runs`` only the runs that they admit are
    answered. Timing is not protected.
    """
    no_core_dumps()
    journal = journal or Journal()
    answers = prepared_answers(config, journal)
    _say(runs)
    repeat = repeating_the_last_answer()

    def app(message: Message, context: Context) -> Message:
        return repeat(message, context, answers)

    journal.note("started", kind="node", name=config.client)
    _answer_forever(noting(taking(app, runs), journal), connection, journal)


def prepared_answers(config: NodeConfig | OwnNode, journal: Journal) -> Answers:
    """Return what answers messages to a client, and log what it is; a fixed code if its configuration cannot work.

    Notes
    -----
    **Formal guarantees.** A server learns that a client cannot be made only if its file, schema, model or ledger are at
    fault. What fails once records are read is raised: the node does not start, as if it were switched off.
    Proof: docs/proofs/records.md.
    """
    if not isinstance(config, NodeConfig):
        installed_app(config.app)  # an import may read data, so what it raises ends the node
    try:
        check_before_records(config)
    except (ConfigurationError, LedgerError) as error:
        logger.critical(
            "This client cannot be made as its file says, whatever its records are. It answers every request with a "
            "fixed code until it is started again with another file: %s",
            error,
        )
        reason = protocol.LEDGER_UNUSABLE if isinstance(error, LedgerError) else protocol.NOT_CONFIGURED
        journal.note("unconfigured", reason=protocol.REFUSAL_NAMES[reason])
        return unconfigured(error)
    answers, description = answers_of(config)
    logger.info(description)
    return answers


def run_helper(
    config: HelperConfig, connection: Connection, journal: Journal | None = None, runs: RunAdmissionPolicy | None = None
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
    and messages: no code of a bundle runs. No release of a client is ever sent to a helper, and no key of its own
    leaves it. With ``runs`` only the runs that they admit are answered.
    """
    no_core_dumps()
    opener = config.opener()
    logger.info(describe_helper(config, opener))
    _say(runs)
    journal = journal or Journal()
    journal.note("started", kind="helper", name=config.helper)
    _answer_forever(noting(taking(helper_app(opener), runs), journal), connection, journal)


def _say(runs: RunAdmissionPolicy | None) -> None:
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
    command = [sys.executable, "-m", f"{__package__}.flower_process", "supernode", str(os.getpid())]
    command += connection.arguments()
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
