"""A real machine that answers with its operator's own ClientApp, behind the noise mod.

Flower would run the ClientApp of whoever submits the run. This machine runs the installed one that its operator's file
names, with the operator's settings. :class:`~murmurfl.clients.CorrelatedNoiseMod` wraps all of it, Flower's
``lifespan`` included.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...clients import CorrelatedNoiseMod, PrivateClient, UpdateNode
from ...clients.adapters.private_app import PrivateClientApp
from ...clients.messages import Answers
from ...clients.nodes.machine_file import SampleNode
from ...clients.nodes.operators_file import operators_values
from ...clients.records.machine_records import Items
from ...privacy import ConfigurationError, SQLiteLedger
from ...privacy.setting import flat
from .node_config import NodeConfig

OwnNode = UpdateNode | SampleNode
"""A machine with an app of its own: its updates pass the noise mod, or its gradients are bounded sample by sample."""


def read_node(path: Path, *, runs_kept: bool = False) -> NodeConfig | OwnNode:
    """Read an operator's file: a machine with murmurfl's clients or, with ``app``, one with its own ClientApp.

    With ``method`` as well, the app is a ``private_client_app``.

    Parameters
    ----------
    runs_kept : bool
        As for :meth:`~murmurfl.clients.nodes.operators_file.OperatorsFile.read`.

    Raises
    ------
    ConfigurationError
        If it is neither.

    Notes
    -----
    **Formal guarantees.** Policy, budget and ledger come from the operator's file; no value comes from a server or from
    the app. The node's class states its guarantee.
    """
    values = operators_values(path.expanduser())
    if "app" in values:
        return (SampleNode if "method" in values else UpdateNode).read(path, runs_kept=runs_kept)
    if "batch-size" not in flat(values, NodeConfig.settings()) and {"machine", "ledger"} <= values.keys():
        raise ConfigurationError(
            f"Expected in {path} the keys of a machine with murmurfl's clients (batch-size among them), or app = "
            "'MODULE:NAME', the installed ClientApp that murmurfl node is to answer with; got neither."
        )
    return NodeConfig.read(path, runs_kept=runs_kept)


def installed_app(name: str) -> ClientApp:
    """Import the installed ClientApp ``MODULE:NAME``.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import runs the operator's own code
        raise ConfigurationError(
            f"Expected a ClientApp at {name}, got: {error}. Install the project on this machine, from a source its "
            "operator trusts (pip install)."
        ) from error
    if not isinstance(found, ClientApp):
        raise ConfigurationError(f"Expected a ClientApp at {name}, got {type(found).__name__}.")
    return found


def own_app(node: UpdateNode) -> Answers:
    """The callable that answers messages to a machine with its own ClientApp.

    Raises
    ------
    ConfigurationError, LedgerError
        If the app or the ledger is missing, or the ledger does not cover a run.

    Notes
    -----
    Every message goes to the mod, which takes policy, budget and ledger from ``node``; what the app returns leaves only
    through it. A mod inside the app lets messages pass.
    """
    app, mod = installed_app(node.app), CorrelatedNoiseMod(node=node)
    if isinstance(app, PrivateClientApp):
        raise ConfigurationError(
            f"Expected method = {app.method.name!r} in the file, got none: {node.app} is a private_client_app, whose "
            "releases are sums of gradients and whose clip-norm is one sample's."
        )

    def answer(message: Message, context: Context) -> Message:
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**context.node_config, **node.node_config},
            state=context.state,
            run_config=dict(node.run_config),
        )
        return mod(message, own, app)

    return answer


def own_client(
    node: SampleNode, *, ledger: SQLiteLedger | None = None, items: Items | None = None
) -> tuple[Answers, PrivateClient]:
    """The callable that answers messages to a machine of a ``private_client_app``, and its client.

    Parameters
    ----------
    ledger, items : optional
        An audit's (:meth:`.PrivateClientApp.real_machine`).

    Raises
    ------
    ConfigurationError, LedgerError
        If app, samples or ledger are missing, or the ledger does not cover a run.

    Notes
    -----
    **Formal guarantees.** Under the trust of the policy of ``node``, everything the client returns is mu-GDP for
    replacement of one record. The app's own policy is ignored.
    """
    app = installed_app(node.app)
    if not isinstance(app, PrivateClientApp):
        raise ConfigurationError(
            f"Expected a private_client_app at {node.app} for method = {node.method!r}, got another ClientApp: leave "
            "method out, and its updates are released behind the noise mod."
        )
    client = app.real_machine(node, ledger=ledger, items=items)
    app.answer_as(client)
    return app, client
