"""The Flower ClientApp.

In simulation the engine (Ray, or the in-process grid) builds each machine's configuration from the run configuration,
with seeded keys and a ledger in ``context.state``. Anywhere else a machine's privacy is its operator's business: the
operator's file decides (:mod:`murmurfl.app.nodes.config`), and without that file the machine refuses, whatever the run
configuration says. It is the installed murmurfl that answers there, also where Flower's plain ``flower-supernode`` runs
the bundle that the server sent (:mod:`.installed`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from ..clients import ContextLedger, PrivateClient, numpy_client_app
from ..clients.simulation import in_simulation
from ..privacy import ConfigurationError, protocol
from .config import RunConfig
from .experiment import prepare
from .installed import answered_as_installed, has_real_machines


def client_fn(context: Context) -> PrivateClient:
    """The machine a message is for.

    In simulation it is built from the run configuration. On a real node it is built from its operator's file
    (:class:`~murmurfl.app.nodes.config.NodeConfig`) and from nothing else: the context's run configuration is not
    looked at.

    Raises
    ------
    ConfigurationError
        On a real node without its operator's file, or if that describes no machine.
    """
    if not in_simulation():
        # By name, because a bundle has no such room: its code is the server's (:mod:`.installed`).
        nodes = import_module(f"{__package__}.nodes.config") if has_real_machines() else None
        path = None if nodes is None else nodes.operators_file(context.node_config)
        if nodes is None or path is None:
            raise ConfigurationError(
                "Expected an operator's configuration (ledger, key, policy) on a real node, and murmurfl installed on "
                "it: start it with `murmurfl node CONFIG`. This app builds machines from the run configuration in "
                "simulation only."
            )
        return nodes.configured_client(path)
    config = RunConfig.from_mapping(context.run_config)
    machine = int(context.node_config["partition-id"])
    return prepare(config).client(machine, ContextLedger(context.state, str(machine)))


def simulated_machines(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: with fewer nodes than machines, a simulated node hosts several, each with its own partition.

    ``flwr run`` starts ten virtual nodes unless told otherwise, so ``-c "num-clients=20"`` alone would wait for ever.
    A node then answers a hello with the names of all it hosts, and a request says which of them it is for.
    """
    if not in_simulation():
        return call_next(message, context)
    node, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    num_clients = RunConfig.from_mapping(context.run_config).num_clients
    hosted = list(range(node, num_clients, nodes))
    config = message.content.get(protocol.CONFIG, None)
    config = config if isinstance(config, ConfigRecord) else ConfigRecord()
    if message.metadata.message_type == MessageType.QUERY and config.get(protocol.ASK) == protocol.ASK_HELLO:
        answer: dict[str, Any] = {
            protocol.VERSION: protocol.PROTOCOL_VERSION,
            protocol.MACHINES: [str(machine) for machine in hosted],
        }
        return Message(RecordDict({protocol.CONFIG: ConfigRecord(answer)}), reply_to=message)
    wanted = config.get(protocol.MACHINE)
    machine = next((machine for machine in hosted if str(machine) == wanted), None)
    if machine is None:
        error = Error(protocol.MALFORMED_REQUEST, "malformed request: this node does not host that machine")
        return Message(error, reply_to=message)
    own = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={**context.node_config, "partition-id": machine, "num-partitions": num_clients},
        state=context.state,
        run_config=context.run_config,
    )
    return call_next(message, own)


app = numpy_client_app(client_fn, mods=[answered_as_installed, simulated_machines])
