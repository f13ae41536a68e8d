"""The Flower ClientApp.

In simulation the engine (Ray, or the in-process grid) builds each client's configuration from the run configuration,
with seeded keys and a ledger in ``context.state``, and under secure aggregation the helpers as well. Anywhere else a
client's privacy is its operator's business: the operator's file decides (:mod:`murmurfl.app.nodes.node_config`), and
without that file the client refuses, whatever the run configuration says. It is the installed murmurfl that answers
there, also where Flower's plain ``flower-supernode`` runs the bundle that the server sent
(:func:`answered_as_installed`).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from ..clients.messages import in_simulation, kept_by_node, state_travels
from ..clients.nodes.operators_file import operators_file
from ..clients.private_client import PrivateClient, serving
from ..clients.simulation.simulated_clients import ContextLedger, TravellingLedger, answer_simulated_helper
from ..privacy import protocol
from ..privacy.errors import ConfigurationError
from ..privacy.ledger.ledger_records import Ledger, MemoryLedger
from ..privacy.release.prefix_sums import RowCache
from .nodes.flower_internals import ClientAppCallable
from .nodes.node_config import answering_client
from .runs.experiment import prepare
from .runs.progress import participant_names
from .settings.layers import flower_config
from .settings.run_config import RunConfig

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = __name__.partition(".")[0]
IN_BUNDLE = not (_ROOT / "app" / "py.typed").is_file()
"""Whether this copy of murmurfl is a bundle's: every installation has this file, and Flower leaves it out of bundles.
"""
_ROWS_BYTES = 256 << 20
"""Noise rows that all nodes of a simulation in this process keep for taking them back out, in bytes."""
_WORKERS_ROWS_BYTES = 32 << 20
"""Noise rows that a worker of Ray's keeps, in bytes; what another worker takes back stays until there is no room."""


def client_fn(context: Context) -> PrivateClient:
    """Return the client a message is for.

    In simulation it is built from the run configuration. On a real node it is built from its operator's file
    (:class:`~murmurfl.app.nodes.node_config.NodeConfig`) and from nothing else: the context's run configuration is not
    looked at.

    Raises
    ------
    ConfigurationError
        On a real node without its operator's file, or if that describes no client.

    Notes
    -----
    **Formal guarantees.** On a real node the client's mu and budget are its operator's, whatever a run configuration
    says; a simulated one has seeded keys, which protect nobody's data.
    """
    if not in_simulation():
        path = None if IN_BUNDLE else operators_file(context.node_config)
        if path is None:
            raise ConfigurationError(
                "Expected an operator's configuration (ledger, key, policy) on a real node, and murmurfl installed on "
                "it: start it with `murmurfl node CONFIG`. This app builds clients from the run configuration in "
                "simulation only.",
                kind="missing",
            )
        return answering_client(path)
    return _simulated_client(context, int(context.node_config["partition-id"]))


def _simulated_client(context: Context, client_id: int) -> PrivateClient:
    """Return a simulated client: made for every message, or kept from one to the next where its node keeps things."""
    kept = kept_by_node(context)
    nodes = int(context.node_config["num-partitions"])
    clients: dict[int, tuple[PrivateClient, Ledger]] = {} if kept is None else kept.setdefault("clients", {})
    if client_id not in clients:
        travels = state_travels()
        kind = TravellingLedger(str(client_id)) if travels else MemoryLedger()
        ledger = ContextLedger(context.state, str(client_id)) if kept is None else kind
        limit = (_WORKERS_ROWS_BYTES if travels else _ROWS_BYTES) // nodes
        rows = None if kept is None else kept.setdefault("rows", RowCache(limit))
        config = flower_config(context.run_config)
        # Messages leave the client, here as on a real one: under secure aggregation with masks.
        clients[client_id] = prepare(config).client(client_id, ledger, rows, masked=True), ledger
    client, ledger = clients[client_id]
    if isinstance(ledger, TravellingLedger):
        ledger.arrive(context.state)
    return client


def answered_as_installed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: on a real client a bundle passes the message to the installed murmurfl, which made the ledger.

    Flower's plain ``flower-supernode`` runs the bundle that the server sent, and whoever lets it run trusts the server.
    The installed client app answers, with the operator's file and ledger; without one, the bundle refuses.
    ``murmurfl node`` runs no bundle at all.
    """
    if in_simulation() or not IN_BUNDLE:
        return call_next(message, context)
    installed = _installed_app()
    # Without one, the bundle answers with a refusal of fixed text.
    return (installed or call_next)(message, context)


@cache
def _installed_app() -> ClientAppCallable | None:
    """Return the installed murmurfl's client app, from then on the only one of this process; None if there is none."""
    ours, path = _take_out(), list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != _ROOT]
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(f"{_PACKAGE}.app.client_app")
    except Exception:  # its text must not leave the client
        logger.exception("Expected murmurfl to be installed on this computer; the server's bundle alone refuses.")
        _take_out()  # code of two versions must not mix
        sys.modules.update(ours)
        sys.path[:] = path
        return None
    return found.app


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def simulated_clients(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return a Flower mod.

    A simulated node hosts clients, each with its own partition, and helpers of secure aggregation.

    ``flwr run`` starts ten virtual nodes unless told otherwise, so ``-c "num-clients=20"`` alone would wait for ever.
    Node i of n therefore hosts every n-th participant from i on, clients first and helpers after them. It answers a
    hello with the names of all it hosts, and a request says which of them it is for.
    """
    if not in_simulation():
        return call_next(message, context)
    config, clients, helpers = _hosted(context)
    entries = message.content.get(protocol.CONFIG, None)
    entries = entries if isinstance(entries, ConfigRecord) else ConfigRecord()
    if message.metadata.message_type == protocol.QUERY_OPEN or entries.get(protocol.ASK) in protocol.ASKS_OF_SETS:
        helper = str(entries.get(protocol.HELPER))
        if helper not in helpers:
            return _not_here(message, "helper")
        roster = prepare(config).roster
        return answer_simulated_helper(message, context.state, name=helper, seed=config.seed, roster=roster)
    if message.metadata.message_type == MessageType.QUERY and entries.get(protocol.ASK) == protocol.ASK_HELLO:
        answer = _hello(config, clients, helpers)
        if len(helpers) == 1 and not clients:  # as a real one does, it shows that the name is its own
            hello = answer_simulated_helper(
                message, context.state, name=helpers[0], seed=config.seed, roster=prepare(config).roster
            )
            answer = {**hello.content.config_records[protocol.CONFIG], **answer}
        return Message(RecordDict({protocol.CONFIG: ConfigRecord(answer)}), reply_to=message)
    client = str(entries.get(protocol.CLIENT))
    if client not in clients:
        return _not_here(message, "client")
    own = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={**context.node_config, "partition-id": int(client), "num-partitions": config.num_clients},
        state=context.state,
        run_config=context.run_config,
    )
    reply = call_next(message, own)
    _, ledger = (kept_by_node(own) or {}).get("clients", {}).get(int(client), (None, None))
    if isinstance(ledger, TravellingLedger):
        ledger.leave(reply.content if reply.has_content() else None)
    return reply


def _hosted(context: Context) -> tuple[RunConfig, list[str], list[str]]:
    """Return the configuration of a simulation, and the clients and helpers on one of its nodes."""
    kept = kept_by_node(context)
    if kept is not None and "hosted" in kept:
        return kept["hosted"]
    node, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    config = flower_config(context.run_config)
    hosted = participant_names(config)[node::nodes]
    clients = [name for name in hosted if name.isdecimal()]
    found = config, clients, [name for name in hosted if not name.isdecimal()]
    if kept is not None:
        kept["hosted"] = found
    return found


def _hello(config: RunConfig, clients: list[str], helpers: list[str]) -> dict[str, Any]:
    """Return the answer to a hello: who is on a simulated node."""
    answer: dict[str, Any] = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: clients}
    if helpers:
        roster = json.dumps(prepare(config).roster.document)
        answer |= {protocol.HELPERS: helpers, protocol.ROSTER: roster}
    return answer


def _not_here(message: Message, kind: str) -> Message:
    error = Error(protocol.MALFORMED_REQUEST, f"malformed request: this node does not host that {kind}")
    return Message(error, reply_to=message)


class _NamedApp(ClientApp):
    """The app of this module; it goes to a worker by its name: the worker has the module, as it has its functions.

    Flower hands the app over with every message. By its contents, which are wrapped in closures, that takes longer
    than the model.
    """

    def __reduce__(self) -> tuple[Callable[[], ClientApp], tuple[()]]:
        return _this_app, ()


def _this_app() -> ClientApp:
    return app


app = serving(_NamedApp(mods=[answered_as_installed, simulated_clients]), client_fn)


@app.query("open")
def not_a_helper(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's interface
    """Refuse to open sums: of what is left here for this app itself, nothing is a helper.

    Registered because Flower hands an app's mods no message of a kind that the app has no function for, and the helpers
    of a simulation answer in a mod.
    """
    return Message(Error(protocol.OPENING_REFUSED, "this node is no helper"), reply_to=message)
