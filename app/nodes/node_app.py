"""App that answers messages to a client, made from its operator's file, and the client in one sentence.

Flower would run the ClientApp of whoever submits the run. A client runs murmurfl's own client, or the installed
ClientApp that its operator's file names, with the operator's settings:
:class:`~murmurfl.clients.CorrelatedNoiseMod` wraps all of it, Flower's ``lifespan`` included.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...clients.adapters.noise_mod import CorrelatedNoiseMod, check_before_data
from ...clients.adapters.private_app import PrivateClientApp
from ...clients.adapters.update_policy import update_guarantee
from ...clients.messages import Answers, answer
from ...clients.nodes.client_file import SampleNode, UpdateNode
from ...clients.nodes.operators_file import operators_values
from ...clients.private_client import PrivateClient, numpy_client_app
from ...clients.records.client_records import Items
from ...privacy.accounting.amplification import amplification_of
from ...privacy.accounting.guarantee import RECORDS, policy_guarantee, rounded_up
from ...privacy.errors import ConfigurationError, LedgerError
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.setting import flat
from ...privacy.sums.opening_rule import Opener
from .node_config import HelperConfig, NodeConfig

OwnNode = UpdateNode | SampleNode
"""A client with an app of its own: its updates pass the noise mod, or its gradients are bounded sample by sample."""


def read_node(path: Path, *, runs_kept: bool = False) -> NodeConfig | OwnNode:
    """Read an operator's file: a client with murmurfl's clients or, with ``app``, one with its own ClientApp.

    With ``method`` as well, the app is a ``private_client_app``. ``runs_kept`` is as for
    :meth:`~murmurfl.clients.nodes.operators_file.OperatorsFile.read`.

    Notes
    -----
    **Formal guarantees.** Policy, budget and ledger come from the operator's file; no value comes from a server or from
    the app. The node's class states its guarantee.
    """
    values = operators_values(path.expanduser())
    if "app" in values:
        return (SampleNode if "method" in values else UpdateNode).read(path, runs_kept=runs_kept)
    if "batch-size" not in flat(values, NodeConfig.settings()) and {"client", "ledger"} <= values.keys():
        raise ConfigurationError(
            f"Expected in {path} the keys of a client with murmurfl's clients (batch-size among them), or app = "
            "'MODULE:NAME', the installed ClientApp that murmurfl node is to answer with; got neither.",
            kind="missing",
        )
    return NodeConfig.read(path, runs_kept=runs_kept)


def installed_app(name: str) -> ClientApp:
    """Import the installed ClientApp ``MODULE:NAME``."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import runs the operator's own code
        raise ConfigurationError(
            f"Expected a ClientApp at {name}, got: {error}. Install the project on this computer, from a source its "
            "operator trusts (pip install).",
            kind="not-found",
            setting="app",
        ) from error
    if not isinstance(found, ClientApp):
        raise ConfigurationError(
            f"Expected a ClientApp at {name}, got {type(found).__name__}.", kind="wrong-type", setting="app"
        )
    return found


def own_app(node: UpdateNode) -> Answers:
    """Return the callable that answers messages to a client with its own ClientApp.

    Every message goes to the mod, which takes policy, budget and ledger from ``node``; what the app returns leaves only
    through it. A mod inside the app lets messages pass.
    """
    app, mod = installed_app(node.app), CorrelatedNoiseMod(node=node)
    if isinstance(app, PrivateClientApp):
        raise ConfigurationError(
            f"Expected method = {app.method.name!r} in the file, got none: {node.app} is a private_client_app, whose "
            "releases are sums of gradients and whose clip-norm is one sample's.",
            kind="missing",
            setting="method",
        )

    def answer_behind_mod(message: Message, context: Context) -> Message:
        own = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**context.node_config, **node.node_config},
            state=context.state,
            run_config=dict(node.run_config),
        )
        return mod(message, own, app)

    return answer_behind_mod


def client_of(
    config: NodeConfig | SampleNode, *, ledger: SQLiteLedger | None = None, items: Items | None = None
) -> tuple[Answers, PrivateClient]:
    """Return the callable that answers messages to a client that bounds samples, and its client.

    The policy of a ``private_client_app`` is ignored. An audit brings a ledger and items of its own, instead of the
    file's ledger and the app's samples (:meth:`.PrivateClientApp.real_client`).

    Notes
    -----
    **Formal guarantees.** Everything the client returns is mu-GDP for replacement of one record, under the policy and
    the trust of the node's file.
    """
    if isinstance(config, NodeConfig):
        client = config.make_client(ledger)
        return numpy_client_app(lambda context: client), client  # noqa: ARG005
    app = installed_app(config.app)
    if not isinstance(app, PrivateClientApp):
        raise ConfigurationError(
            f"Expected a private_client_app at {config.app} for method = {config.method!r}, got another ClientApp: "
            "leave method out, and its updates are released behind the noise mod.",
            kind="wrong-type",
            setting="app",
        )
    client = app.real_client(config, ledger=ledger, items=items)
    app.answer_as(client)
    return app, client


def answers_of(config: NodeConfig | OwnNode) -> tuple[Answers, str]:
    """Return the callable that answers messages to a client, and the client in one sentence."""
    if isinstance(config, UpdateNode):
        return own_app(config), describe_own(config)
    answers, client = client_of(config)
    return answers, describe(client)


def check_before_records(config: NodeConfig | OwnNode) -> None:
    """Raise what keeps a client from being made whatever its records are; none of them is read.

    What it raises follows from the operator's file, the schema, the model and the ledger alone, so a server may be told
    that it was raised (:func:`unconfigured`; docs/proofs/records.md).
    """
    if isinstance(config, NodeConfig):
        config.check_before_records()
    elif isinstance(config, UpdateNode):
        check_before_data(config)
    else:
        app = installed_app(config.app)
        if isinstance(app, PrivateClientApp):  # another one is refused by client_of
            app.check_before_records(config)


def unconfigured(error: ConfigurationError | LedgerError) -> Answers:
    """Return what answers every message to a client that cannot be made: a fixed code.

    ``error`` must be one of :func:`check_before_records`, so that no record decides which; its own text stays in the
    client's log.
    """

    def fail() -> RecordDict:
        raise error

    return lambda message, context: answer(message, fail)  # noqa: ARG005 - Flower's interface


def describe(client: PrivateClient) -> str:
    """Describe a client and its guarantee in one sentence."""
    policy, plan = client.privatizer.policy, client.privatizer.plan
    name, releases = f"Client {client.name}", policy.max_participations
    budget, worst = rounded_up(policy.budget.mu), rounded_up(policy.budget.worst_case.mu)
    beside = client.beside
    # Whether an owner has more samples depends on data: the sentence does not.
    most = policy.samples_per_owner
    kept = f" Of each owner the first {most} samples are used, and any others left out." if most else ""
    if policy.trust == "trusted-server":
        mu = math.hypot(policy.mu, *(privatizer.policy.mu for privatizer in beside))
        also = "".join(f", and to {part.query.of_client_if_trusted}" for part in client.parts.values())
        return (
            f"{name} adds NO noise to up to {releases} releases a run{also}: the server is trusted with its gradients. "
            f"Against everybody else it is trusted to keep mu = {rounded_up(mu)} a run; budget of all runs: "
            f"mu = {budget}.{kept}"
        )
    notes = []
    for part in client.parts.values():
        notes.append(f"Of it mu = {rounded_up(part.privatizer.plan.mu)} is for {part.query.of_client}.")
    if client.record_kind:
        notes.append(RECORDS[client.record_kind])
    amplified = amplification_of(policy, plan)
    loss = plan.loss.compose(*(privatizer.plan.loss for privatizer in beside))
    guarantee = policy_guarantee(policy, loss, amplified=amplified, notes=notes)
    sums = (
        f" Every sum has at least {policy.sums.min_cohort} releases of the roster's "
        f"{len(client.masking.roster.clients)} clients. Budget of all runs: mu = {budget}, and in the worst case mu = "
        f"{worst}."
        if client.masking is not None
        else f" Budget of all runs: mu = {budget}."
    )
    rows, counted = ("owners", "places of owners") if most else ("samples", "samples")
    most_of = "at most " if policy.has_few(client.privatizer.num_samples) else ""
    batch = f"{most_of}{policy.batch_size} {counted}"
    each = f"the sum of all {rows}" if policy.batch_selection == "full_batch" else batch
    return f"{name}: up to {releases} releases of {each} a run, {guarantee.sentence}{sums}{kept}"


def describe_own(node: UpdateNode) -> str:
    """Describe a client with its own ClientApp and its guarantee in one sentence."""
    policy = node.policy(SQLiteLedger(node.ledger))
    budget = rounded_up(policy.budget_mu or policy.mu)
    return (
        f"Client {node.client}: up to {policy.max_participations} releases of the updates of {node.app} a run, "
        f"{update_guarantee(policy, policy.mu).sentence} Budget of all runs: mu = {budget}."
    )


def describe_helper(config: HelperConfig, opener: Opener) -> str:
    """Describe a helper in one sentence."""
    roster = opener.roster
    others = len(roster.helpers) - 1
    beside = f"beside {others} other helper{'s' * (others != 1)}" if others else "as the only helper"
    return (
        f"Helper {config.helper}: opens sums of releases of the {len(roster.clients)} clients of the roster with "
        f"digest {roster.digest}, {beside}, by the record at {config.record}."
    )
