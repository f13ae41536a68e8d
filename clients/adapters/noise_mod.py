"""Correlated noise for anybody's ClientApp: a Flower mod around a training that knows nothing of it.

The ClientApp trains as it always did. What leaves the client is the release P_k - P_ack of its update (trained minus
received model), clipped, with noise, on the grid and recorded in the ledger before it goes
(:class:`~murmurfl.privacy.Privatizer`). :class:`~murmurfl.strategies.CorrelatedFedAvg` adds the releases up.
Nothing that the ClientApp raises may reach the server: the text of an exception can carry data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from ...privacy import protocol
from ...privacy.errors import (
    OF_DATA,
    PUBLIC,
    ConfigurationError,
    LedgerError,
    MurmurflError,
    RefusedError,
    is_interrupt,
)
from ...privacy.ledger.ledger_records import Ledger
from ...privacy.ledger.sqlite import SQLiteLedger
from ...privacy.noise import NoiseKeys
from ...privacy.protocol import read_array
from ...privacy.release.clipping import TrainingFigures, observing
from ...privacy.release.known_samples import any_data
from ...privacy.release.ledgered_privatizer import Release
from ...privacy.release.prefix_sums import Privatizer
from ...privacy.sums.masking import Masking
from ..messages import (
    answer,
    check_addressed,
    check_masking,
    check_version,
    in_simulation,
    integer_entry,
    log_own_forecast,
    malformed,
    name_shown,
    outgoing_reply,
    records_being_read,
    session_entry,
    skipped_entry,
    statement_entries,
    training_entries,
)
from ..nodes.client_file import UpdateNode
from ..nodes.operators_file import NODE_CONFIG_KEY, NODE_CONFIG_VARIABLE, operators_file
from ..simulation.simulated_clients import LEDGER_RECORDS, ContextLedger, SimulatedSums, simulated_client
from .update_policy import UpdatePolicy, update_guarantee

_in_training: ContextVar[Message | None] = ContextVar("murmurfl_noise_mod", default=None)

# The records that Flower's legacy ClientApp looks for, and does not find.
_OF_LEGACY = ("'fitins.", "'evaluateins.")
_LEGACY = (
    "this client has Flower's legacy ClientApp(client_fn, mods=...), which cannot read messages of the Message API: "
    "write app = numpy_client_app(client_fn, mods=[CorrelatedNoiseMod(...)])"
)


def is_in_training(message: Message) -> bool:
    """Return True if a mod around this one is calling the ClientApp with this message already."""
    return _in_training.get() is message


def received_model(content: RecordDict) -> dict[str, NDArray[np.float64]]:
    """Return the floating-point arrays of the received model, in order, in float64."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise malformed(
            f"expected one ArrayRecord, the model, got {len(records)}: put everything that clients need into its "
            "arrays, or entries into a ConfigRecord"
        )
    received = {}
    for name, array in records[0].items():
        try:
            values = read_array(array.dtype, array.shape, array.data)
        except (TypeError, ValueError) as error:
            raise malformed("the arrays cannot be read") from error
        if values.dtype.kind in "iub":
            continue
        if values.dtype.kind != "f" or not np.isfinite(values := np.asarray(values, dtype=np.float64)).all():
            raise malformed("expected arrays of finite floating-point numbers, integers or booleans")
        received[name] = values
    if not received:
        raise malformed("expected floating-point arrays to train")
    return received


class ClientAppError(MurmurflError):
    """The ClientApp failed; its text stays in the client's own log."""

    kind = "failed"


def called(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    """Return the ClientApp's reply.

    A :class:`ClientAppError` if it fails, a refusal if it is of Flower's legacy kind.
    """
    outside = _in_training.set(message)
    try:
        reply = call_next(message, context)
    except BaseException as error:  # a refusal of our own too: its text would be sent, and here it is the project's
        if is_interrupt(error):
            raise
        if isinstance(error, KeyError) and str(error).startswith(_OF_LEGACY):
            raise RefusedError(protocol.LEGACY_CLIENT_APP, _LEGACY) from error
        raise ClientAppError("Expected the ClientApp to answer, got an exception; see above.") from error
    finally:
        _in_training.reset(outside)
    if reply.has_error():
        raise ClientAppError(f"Expected the ClientApp to answer, got its error {reply.error.code}; see above.")
    return reply


def trained_model(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    received: Mapping[str, NDArray[np.float64]],
    *,
    guarded: bool,
) -> Callable[[], NDArray[np.float64]]:
    """Have the ClientApp train; the result gives the trained model as one vector, or raises what the training raised.

    An exception is kept back because a real client must release something all the same: whether training fails may
    depend on the data. ``guarded`` clients have their ledger in ``context.state``, which must stay there.
    """
    state, ours = context.state, _ledger_records(context)
    values: NDArray[np.float64] | Exception
    try:
        values = _reply_vector(called(call_next, message, context), received)
    except Exception as error:
        values = error
    if guarded:
        after = _ledger_records(context)
        if context.state is not state or any(after.get(key) is not record for key, record in ours.items()):
            raise ConfigurationError(
                "Expected the records of murmurfl in context.state to stay, got others: this client's ledger is in "
                "them. Put new records beside them.",
                kind="mismatch",
            )

    def result() -> NDArray[np.float64]:
        if isinstance(values, Exception):
            raise values
        return values

    return result


def _ledger_records(context: Context) -> dict[str, Any]:
    return {key: record for key, record in context.state.items() if key.startswith(LEDGER_RECORDS)}


_MOST_NAMED = 8


def _named(names: list[str]) -> str:
    """Return the names of the arrays that came, as many as a message has room for."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(repr, names[:_MOST_NAMED]))}{more}" if names else "no array at all"


def _model_record(reply: Message, received: Mapping[str, NDArray[np.float64]]) -> ArrayRecord:
    """Return the record of a reply with the arrays of the received model; others stay on the client."""
    records = list(reply.content.array_records.values())
    whole = [record for record in records if received.keys() <= record.keys()]
    if len(records) > 1 and len(whole) == 1:
        report_dropped_arrays()
        return whole[0]
    if len(records) != 1:
        raise ConfigurationError(
            f"Expected the ClientApp to reply with one ArrayRecord of the model that it was sent, got {len(records)}, "
            f"of which {len(whole)} have its arrays. Put everything that the server needs into this record: it is "
            "clipped and gets its noise as a whole.",
            kind="wrong-type",
        )
    return records[0]


def _reply_vector(reply: Message, received: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the arrays of the ClientApp's model in the order of those received, as one vector."""
    record = _model_record(reply, received)
    parts = []
    for name, before in received.items():
        array = record.get(name)
        values = None if array is None else array.numpy()
        if values is None or values.dtype.kind != "f" or values.shape != before.shape:
            came = f"none of that name, but {_named(list(record))}"
            received_kind = came if values is None else f"{values.dtype} of shape {values.shape}"
            raise ConfigurationError(
                f"Expected the ClientApp to reply with the arrays it was sent, floating-point {before.shape} for "
                f"{name!r}, got {received_kind}.",
                kind="wrong-type",
            )
        parts.append(np.asarray(values, dtype=np.float64).ravel())
    return np.concatenate(parts)


logger = logging.getLogger("flwr")
_MOST_PARAMETERS = 2**40


@dataclass(frozen=True)
class _Node:
    policy: UpdatePolicy
    name: str
    ledger: Ledger
    keys: NoiseKeys
    known_by: Callable[[], bytes] = bytes
    """The ledger's name of the ClientApp's data as they are now (:meth:`UpdateNode.known_by`)."""
    masking: Masking | None = None

    def __post_init__(self) -> None:
        # In a simulation, too: whatever it releases is sent.
        check_masking(self.policy.privacy_policy(), self.masking, self.name, simulated=False)

    def private(self, num_parameters: int) -> Privatizer:
        policy, parts = self.policy.privacy_policy(), self.policy.releases_per_pass
        known = self.known_by()  # once for this message
        data = any_data if self.policy.unit == "client" else lambda part: b"%d " % part + known
        # Under another roster a helper may not know what was opened in the session.
        roster = "" if self.masking is None else self.masking.roster.digest
        return Privatizer(policy, num_parameters, parts, self.ledger, self.keys, data=data, roster=roster)


class CorrelatedNoiseMod:
    """Local differential privacy with correlated noise over the model updates of any Message-API ClientApp.

    Put it first in ``ClientApp(mods=[...])``, so that it is around everything, and train with
    :class:`~murmurfl.strategies.CorrelatedFedAvg` in place of Flower's FedAvg.

    Parameters
    ----------
    simulation : UpdatePolicy, optional
        Policy of every *simulated* client. A real node does not look at it: there the operator's file decides
        (:class:`~murmurfl.clients.UpdateNode`), that of ``murmurfl node``, or one named by the environment variable
        ``MURMURFL_NODE_CONFIG`` or ``flower-supernode --node-config 'murmurfl-config="..."'``. Without a file the
        client refuses.
    seed : int
        Seed of the simulated clients' keys. A simulation repeats if the strategy has a ``seed`` and a ``session`` of
        its own as well.
    helpers : int
        How many of a simulation's nodes, the last ones, are helpers, under secure aggregation. The ClientApp is told of
        the others only, as ``num-partitions``.
    node : UpdateNode, optional
        The real client, if its operator's file was read already; no other file is looked for.

    Raises
    ------
    ConfigurationError, LedgerError
        If ``node`` cannot work: its ledger is missing, does not cover a session, or was used with other data.

    Notes
    -----
    If two of these mods are around one app, the inner one lets messages pass: the outer one releases the update, once.

    **What leaves.** For a training request: the release, in float64; its number, the acknowledgement it is built on,
    the client's name, and what it guarantees. Everything else the ClientApp returns (loss, accuracy, the number of
    examples) stays, and the log of the client's process says so once. Results of ``evaluate`` are refused unless the
    client's own configuration allows them, and are then marked ``not-private``: no epsilon covers them. Queries are
    answered here or refused.

    **Arrays.** The update is taken of all floating-point arrays of the model, float buffers included, in float64.
    Arrays of integers and booleans are handed to the ClientApp as they came; what it makes of them is dropped. Other
    kinds (complex numbers, or bfloat16, which Flower cannot carry) are refused.

    **Formal guarantees.** What leaves is what its :class:`~murmurfl.clients.UpdatePolicy` guarantees: by default mu-GDP
    for replacement of all data of the client (client-level). It rests on the client running this code and on
    ``ClientApp(mods=[...])``: functions registered with another app, and Flower's ``lifespan``, are not covered.
    (``murmurfl node`` runs what its operator installed, and puts a mod around all of it.) On a real node, a training
    that fails or does not answer with the model counts as an update of zero, because whether it fails may depend on the
    data; only the client's own log says so. In simulation it is an error reply with a fixed text. Timing is not
    protected. Simulated keys protect nobody's data. Under secure aggregation no release is sent without masks, in a
    simulation neither.
    Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from murmurfl.clients import UpdatePolicy
    >>> policy = UpdatePolicy(clip_norm=1.0, epsilon=2.0, max_participations=5)
    >>> app = ClientApp(mods=[CorrelatedNoiseMod(simulation=policy)])
    """

    def __init__(
        self, simulation: UpdatePolicy | None = None, *, seed: int = 0, helpers: int = 2, node: UpdateNode | None = None
    ) -> None:
        if simulation is not None and not isinstance(simulation, UpdatePolicy):
            raise ConfigurationError(
                f"Expected simulation to be an UpdatePolicy, got {type(simulation).__name__}: write "
                "CorrelatedNoiseMod(simulation=UpdatePolicy(clip_norm=1.0, mu=4.0, max_participations=20)).",
                kind="wrong-type",
                setting="simulation",
            )
        self.simulation = simulation
        self.seed = seed
        secure = simulation is not None and simulation.trust == "secure-aggregation"
        self._sums = SimulatedSums(helpers, seed) if secure else None
        self._own = None if node is None else _real(node, {})

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; Flower calls this."""
        if is_in_training(message):
            return call_next(message, context)
        if self._own is None and self._sums is not None and in_simulation():
            return self._sums.answer(message, context, lambda own: self._answer(message, own, call_next))
        return self._answer(message, context, call_next)

    def _answer(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return answer(message, lambda: self._content(message, context, call_next))

    def _content(self, message: Message, context: Context, call_next: ClientAppCallable) -> RecordDict:
        client = self._client(context)
        key, config = _config(message.content)
        if protocol.ASK in config:
            return _asked(client, config)
        kind = message.metadata.message_type.split(".")[0]
        if kind == MessageType.TRAIN:
            report_dropped_metrics()
            return _train(client, key, config, message, context, call_next)
        if kind == MessageType.EVALUATE:
            return _evaluate(client, message, context, call_next)
        raise malformed(
            "a query of a project's own would be answered without noise, so it is not: ask for private statistics "
            "(murmurfl.strategies.Statistics), or public data"
        )

    def _client(self, context: Context) -> _Node:
        if self._own is not None:
            return self._own
        if in_simulation():
            if self.simulation is None:
                raise ConfigurationError(
                    "Expected a policy for simulated clients, got none: CorrelatedNoiseMod(simulation=UpdatePolicy("
                    "clip_norm=1.0, mu=4.0, max_participations=20)).",
                    kind="missing",
                    setting="simulation",
                )
            made = simulated_client(context, seed=self.seed)
            masking = None if self._sums is None else self._sums.masking(context, self.simulation.sums)
            return _Node(policy=self.simulation, **made, masking=masking)
        path = operators_file(context.node_config)
        if path is None:
            raise ConfigurationError(
                f"Expected an operator's file on a real node, got none: name it with the environment variable "
                f"{NODE_CONFIG_VARIABLE} or --node-config '{NODE_CONFIG_KEY}=\"...\"'. The policy in the ClientApp is "
                "for simulation only.",
                kind="missing",
            )
        made = _unchecked(UpdateNode.read(path), context.node_config)
        with records_being_read():
            return _checked(made)


@cache  # for the whole process: a simulation's worker makes the app and its mod anew for every message
def report_dropped_metrics() -> None:
    """Log what becomes of a training's metrics, before it: what it returns may depend on data."""
    logger.info(
        "Metrics that the ClientApp's training returns (a loss, a number of examples) stay on the client: they "
        "have no noise. Measure the model on public data (evaluate_fn), or with a private evaluation.",
        extra=PUBLIC,
    )


@cache
def report_dropped_arrays() -> None:
    """Log that arrays beside the model stay on the client."""
    logger.info(
        "Arrays that the ClientApp's training returns beside the model stay on the client: they have no noise. What "
        "the server needs must be among the model's arrays.",
        extra=PUBLIC,
    )


def privatizer_behind(node: UpdateNode) -> Privatizer:
    """Return the client of an operator's file with a ClientApp of its own, for a model of one parameter.

    Notes
    -----
    **Formal guarantees.** Policy, budget and ledger are those of the operator's file: a release of the client would be
    spent like any other.
    """
    return _real(node, {}).private(1)


def check_before_data(node: UpdateNode) -> None:
    """Raise what keeps a real client from being made whatever its data are; none of them is read."""
    _unchecked(node, {})


def _unchecked(node: UpdateNode, node_config: Mapping[str, Any]) -> _Node:
    ledger = SQLiteLedger(node.ledger)  # never created here: a new ledger would have forgotten what was spent
    known_by = partial(node.known_by, node_config)
    return _Node(node.policy(ledger), node.client, ledger, ledger.keys(), known_by, node.masking())


def _real(node: UpdateNode, node_config: Mapping[str, Any]) -> _Node:
    return _checked(_unchecked(node, node_config))


def _checked(client: _Node) -> _Node:
    """Return a client whose ledger was used with no other data, before it says that it is ready."""
    client.private(1).check_data()  # which needs no model, so its size may be any
    return client


def _config(content: RecordDict) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the entries of the record with a protocol version; both empty if there is none."""
    found = [(key, record) for key, record in content.config_records.items() if protocol.VERSION in record]
    if len(found) > 1:
        raise malformed("expected one ConfigRecord with a protocol version")
    return (found[0][0], dict(found[0][1])) if found else ("", {})


def _asked(privatizer: _Node, config: Mapping[str, Any]) -> RecordDict:
    check_version(config)
    entries: dict[str, Any] = {protocol.VERSION: protocol.PROTOCOL_VERSION, protocol.CLIENTS: privatizer.name}
    if config[protocol.ASK] == protocol.ASK_PRIVACY:
        size = integer_entry(config, protocol.NUM_PARAMETERS, 1, _MOST_PARAMETERS)
        entries |= statement_entries(privatizer.private(size), session_entry(config))
        entries |= {"unit": privatizer.policy.unit, "evaluation-allowed": privatizer.policy.allow_evaluation}
    elif config[protocol.ASK] == protocol.ASK_HELLO:
        entries |= name_shown(privatizer.masking, config)
    else:
        raise malformed("the query is not one this client answers")
    return RecordDict({protocol.CONFIG: ConfigRecord(entries)})


def _train(
    privatizer: _Node,
    key: str,
    config: Mapping[str, Any],
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
) -> RecordDict:
    if not config:
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this client speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states no "
            "version: the server must use murmurfl's CorrelatedFedAvg",
        )
    check_addressed(config, privatizer.name)
    ack, session = integer_entry(config, protocol.ACK, 0, protocol.LARGEST_ROUND), session_entry(config)
    received = received_model(message.content)
    start = np.concatenate([values.ravel() for values in received.values()])
    known = (
        privatizer.known_by()
    )  # before the ledger compares the data as well, so that a change from here on is noticed
    private = privatizer.private(len(start))
    part = private.admits(session, ack).start  # refused before anything is trained
    message.content[key] = ConfigRecord({**config, protocol.PART: part})
    # Outside of the ledger's transaction: training may take long, and a process it starts must not hold the ledger.
    trained = trained_model(message, context, call_next, received, guarded=isinstance(privatizer.ledger, ContextLedger))
    if privatizer.known_by() != known:
        raise LedgerError(
            "Expected the data-files to stay as they are while they are used, got other contents.",
            kind="mismatch",
            setting="data-files",
        )

    def contribution(samples: slice) -> NDArray[np.floating]:
        if samples.start != part:
            raise ClientAppError(
                "Expected the part of the data that was trained on, got a request in between.", kind="wrong-order"
            )
        with np.errstate(all="ignore"):  # what is not finite is clipped to zero
            return (trained() - start)[None, :]

    with observing() as observer:
        release = private.release(session, ack, contribution, skipped=skipped_entry(config))
    figures = observer.figures()
    _log_release(privatizer, private, release, figures)
    return _reply(privatizer, private, release, session, figures, received)


def _reply(
    privatizer: _Node,
    private: Privatizer,
    release: Release,
    session: str,
    figures: TrainingFigures | None,
    received: Mapping[str, NDArray[np.float64]],
) -> RecordDict:
    """Return the release in the model's arrays, and the client's statements of it: nothing else leaves."""
    shapes = [values.shape for values in received.values()]
    policy = private.policy
    sent, hidden = outgoing_reply(release, shapes, masking=privatizer.masking, session=session, policy=policy)
    arrays = dict(zip(received, map(Array, sent), strict=True))
    loss = private.plan.loss
    sums = {protocol.MU_LOCAL: loss.worst_case.mu, protocol.MIN_HONEST: policy.sums.min_honest} if hidden else {}
    entries = {
        protocol.VERSION: protocol.PROTOCOL_VERSION,
        protocol.RELEASE: release.release,
        protocol.ACK: release.ack,
        protocol.SENSITIVITY: private.plan.sensitivity,
        protocol.MU_GUARANTEED: loss.mu,
        protocol.DELTA: privatizer.policy.delta,
        protocol.CLIENT_LEVEL: int(privatizer.policy.unit == "client"),
        protocol.NUM_EXAMPLES: 1,  # of equal weight: a count could depend on data
        **sums,
        **({protocol.RECOVERED: 1} if release.recovered else {}),
        **training_entries(privatizer.name, figures if private.simulated else None),
    }
    return RecordDict(
        {
            protocol.ARRAYS: ArrayRecord(arrays),
            protocol.METRICS: MetricRecord(entries),
            protocol.CONFIG: ConfigRecord({protocol.CLIENT: privatizer.name, **hidden}),
        }
    )


def _log_release(privatizer: _Node, private: Privatizer, release: Release, figures: TrainingFigures | None) -> None:
    """Log on the client what left it and what is guaranteed."""
    if not private.simulated and figures is not None and figures.worrying:
        logger.warning("In this client's own log alone, not private: %s", figures.sentence, extra=OF_DATA)
    policy = privatizer.policy
    guarantee = update_guarantee(policy, private.plan.loss, simulated=private.simulated)
    # A simulation has many clients: the first one says it once, and the server's log has it in every round.
    quiet = private.simulated and (release.release > 1 or privatizer.name != "0")
    logger.log(
        logging.DEBUG if quiet else logging.INFO,
        "%s",
        f"Client {privatizer.name}: release {release.release} of at most {policy.max_participations}. "
        f"{guarantee.sentence}",
        extra=PUBLIC,
    )
    if release.release == 1:
        log_own_forecast(privatizer.name, private, unit=policy.unit)


def _evaluate(privatizer: _Node, message: Message, context: Context, call_next: ClientAppCallable) -> RecordDict:
    if not privatizer.policy.allow_evaluation:
        raise RefusedError(
            protocol.EVALUATION_BLOCKED, "this client does not evaluate: the result would not be private"
        )
    reply = called(call_next, message, context)
    metrics = {key: value for record in reply.content.metric_records.values() for key, value in record.items()}
    logger.warning(
        "Client %s answers an evaluation without noise: no epsilon covers it.", privatizer.name, extra=PUBLIC
    )
    return RecordDict(
        {
            protocol.METRICS: MetricRecord({**metrics, protocol.NOT_PRIVATE: 1}),
            protocol.CONFIG: ConfigRecord({protocol.CLIENT: privatizer.name}),
        }
    )
