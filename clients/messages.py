"""Flower's messages on a client: what a request may say, where it is answered, and what a reply may say.

A request comes from a server that is not trusted: each entry is checked, or the request is refused, with a text that
depends on the request alone, because Flower forwards it to the server.

A reply is a release, under masks or without, a statement about the client, or a refusal. When something goes wrong it
is the fixed text of a refusal, or one fixed sentence for all else: the texts of exceptions can carry data. Under secure
aggregation a release is made and recorded first, then masked, and only then sent. If masking fails nothing is sent, and
the client's next release carries what this one had.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from ..privacy import protocol
from ..privacy.accounting.noise_forecast import StatedNoise, forecast_of, stated_noise
from ..privacy.errors import (
    OF_DATA,
    ConfigurationError,
    LedgerError,
    MurmurflError,
    RefusedError,
    is_interrupt,
)
from ..privacy.forecast_text import own_forecast_sentence
from ..privacy.protocol import dtype_name, write_array
from ..privacy.release.clipping import TrainingFigures, observer_around
from ..privacy.release.ledgered_privatizer import LedgeredPrivatizer, PrivacyStatement, Release
from ..privacy.release.policy import PrivacyPolicy
from ..privacy.sums.masking import Masking
from .adapters.per_sample_gradients import unflatten

logger = logging.getLogger(__name__)
GRADIENTS = "gradients"
"""A request for a contribution to the training, and not for another query."""


@dataclass(frozen=True)
class Request:
    """A training request that has passed every check.

    Examples
    --------
    >>> import numpy as np
    >>> request = Request(server_round=1, session="s", ack=0, query_points=([np.zeros(3)],))
    >>> request.of, request.skipped
    ('gradients', False)
    """

    server_round: int
    """t, from 1, by which gradients are weighed."""
    session: str
    """The training this request belongs to."""
    ack: int
    """The last of this client's releases that the server has aggregated."""
    query_points: tuple[list[NDArray[Any]], ...]
    """The points to compute gradients at, each a list of the model's arrays."""
    of: str = GRADIENTS
    """Query that is asked: :data:`GRADIENTS`, or the name of another query (:mod:`murmurfl.clients.queries`)."""
    public_input: NDArray[np.float32] | None = None
    """Values that the server made of the answer to an earlier query, such as a centre that samples are seen from."""
    skipped: bool = False
    """Whether the sum with release ``ack`` was skipped."""


def malformed(reason: str) -> RefusedError:
    """Return the refusal of a malformed request; the reason must depend on the request alone."""
    return RefusedError(protocol.MALFORMED_REQUEST, f"malformed request: {reason}")


def check_version(config: Mapping[str, Any]) -> None:
    """Refuse a request of another protocol version; the text names ours, so that both sides' logs say what to do."""
    version = config.get(protocol.VERSION)
    if version != protocol.PROTOCOL_VERSION:
        claimed = f"version {version}" if isinstance(version, int) else "no version"
        raise RefusedError(
            protocol.PROTOCOL_MISMATCH,
            f"this client speaks murmurfl's protocol version {protocol.PROTOCOL_VERSION}, the request states {claimed}",
        )


def check_addressed(config: Mapping[str, Any], name: str) -> None:
    """Refuse a request of another protocol version, or one that names another client than this one."""
    check_version(config)
    if config.get(protocol.CLIENT, name) != name:
        raise malformed("the request names another client")


def skipped_entry(config: Mapping[str, Any]) -> bool:
    """Return True if the request says that the sum with the acknowledged release was skipped."""
    return protocol.SKIPPED in config and integer_entry(config, protocol.SKIPPED, 0, 1) == 1


def integer_entry(config: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Read an integer of the request, or refuse it."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise malformed(f"expected {key} to be an integer from {low} to {high}")
    return value


def session_entry(config: Mapping[str, Any]) -> str:
    """Read the session of the request, or refuse it."""
    session = config.get(protocol.SESSION)
    if not isinstance(session, str) or not 0 < len(session) <= protocol.LONGEST_SESSION_NAME or not session.isalnum():
        raise malformed(f"expected {protocol.SESSION} to be 1 to {protocol.LONGEST_SESSION_NAME} letters and digits")
    return session


def read_points(
    parameters: Sequence[NDArray[Any]], shapes: Sequence[tuple[int, ...]], count: int
) -> tuple[list[NDArray[Any]], ...]:
    """Read the query points of the request, each a list of the model's arrays, or refuse them."""
    width = len(shapes)
    if len(parameters) != width * count:
        raise malformed(f"expected {count} query points of {width} arrays")
    points = []
    for start in range(0, len(parameters), width):
        point = list(parameters[start : start + width])
        for values, shape in zip(point, shapes, strict=True):
            if values.shape != shape or values.dtype.kind != "f" or not np.isfinite(values).all():
                raise malformed("expected finite floating-point arrays of the model's shapes")
        points.append(point)
    return tuple(points)


class _InProcess(AbstractContextManager[None]):
    """A message of a simulation in this process; not a generator, because every message comes here."""

    def __init__(self, kept: dict[str, Any] | None) -> None:
        self.kept = kept

    def __enter__(self) -> None:
        self._token = _in_process.set(self)

    def __exit__(self, *error: object) -> None:
        _in_process.reset(self._token)


_in_process: ContextVar[_InProcess | None] = ContextVar("murmurfl_inprocess", default=None)


def simulated_in_process(kept: dict[str, Any] | None = None) -> AbstractContextManager[None]:
    """Mark what runs inside as a message of a simulation in this process, with what its node keeps; for engines."""
    return _InProcess(kept)


class _Worker(threading.local):
    """Memory of a simulation's worker process for its nodes; each thread has its own."""

    def __init__(self) -> None:
        self.run_id: int | None = None
        self.nodes: dict[int, dict[str, Any]] = {}


_MOST_NODES = 1024  # of which a worker keeps something; the first ones go first
_worker = _Worker()
_known_as_worker = False


def kept_by_node(context: Context) -> dict[str, Any] | None:
    """Return what a simulation's node keeps in this process between messages; None outside a simulation.

    No other node sees it, and it ends with the run. Another worker may have had the node's message before: only what
    does not change in a run may be kept, the rest is in the context's state, which travels (:func:`state_travels`).
    """
    if (inside := _in_process.get()) is not None:
        return inside.kept
    if not in_simulation():
        return None
    if _worker.run_id != context.run_id:
        _worker.run_id, _worker.nodes = context.run_id, {}
    kept = _worker.nodes.get(context.node_id)
    if kept is None:
        if len(_worker.nodes) >= _MOST_NODES:
            del _worker.nodes[next(iter(_worker.nodes))]
        kept = _worker.nodes[context.node_id] = {}
    return kept


def in_simulation() -> bool:
    """Return True if this process is a simulation's worker: no message can make it look like one."""
    return _in_process.get() is not None or _is_worker()


def _is_worker() -> bool:
    global _known_as_worker  # for good: Ray gives an actor a process of its own
    if not _known_as_worker:
        ray = sys.modules.get("ray")  # a worker of Ray's has imported it
        _known_as_worker = (
            ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None
        )
    return _known_as_worker


def state_travels() -> bool:
    """Return True if a simulated client's state returns with each reply; with an engine in this process it stays."""
    return _in_process.get() is None


def training_entries(name: str, figures: TrainingFigures | None) -> dict[str, int | float]:
    """Figures of clipping in a simulated client's release, as entries of its reply.

    An engine in this process is told directly, so that replies are those of real clients. The figures are not private:
    outside a simulation there are no entries, and nobody is told.
    """
    if figures is None or not in_simulation():
        return {}
    if state_travels():
        return figures.entries()
    observer = observer_around()
    if observer is not None:
        observer.clients[name] = figures
    return {}


class SilentFailureError(Exception):
    """A client that failed once it had begun to read its records: whether it did may depend on them."""


@contextmanager
def records_being_read() -> Iterator[None]:
    """Turn every failure of the block into one of which a server sees nothing but silence.

    Raises
    ------
    SilentFailureError
        Whatever fails; the cause is for the client's own log (:func:`answer`).

    Notes
    -----
    No code and no text of an answer depends on a record: what fails before the block is answered by a fixed
    code, which depends on the operator's file, the schema, the model and the ledger alone, and what fails within is
    never answered. To a server such a client is like one that is switched off.
    Proof: docs/proofs/records.md.
    """
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise SilentFailureError from error


_stay_silent: Callable[[], object] = threading.Event().wait
"""Waits for ever: the process ends with its node, or is ended by its operator."""

Answers = Callable[[Message, Context], Message]
"""Answers a message: a ClientApp, or something around one."""

_INTERNAL = "internal error; the client's own log says more"


def answer(message: Message, handle: Callable[[], RecordDict]) -> Message:
    """Return the reply to a message: what ``handle`` gives, or an error whose text says nothing of any data.

    No text of an exception leaves a real client but that of a :class:`~murmurfl.privacy.RefusedError`, which is fixed.
    That it failed, and in which of these ways, does. A simulated client adds its traceback, for there is nobody whose
    data it could give away, and whoever runs the simulation should see it at once. A failure of
    :func:`records_being_read` is never answered.
    """
    try:
        return Message(handle(), reply_to=message)
    except RefusedError as refusal:
        logger.info("Refused a request: %s.", refusal.reason)
        return Message(Error(refusal.code, refusal.reason), reply_to=message)
    except ConfigurationError as error:
        # The text says what to do; a cause is shown beside it.
        logger.error("This client is not configured to answer: %s", error, exc_info=error.__cause__ and error)
        return _failure(message, protocol.NOT_CONFIGURED, "this client is not configured to answer", error)
    except LedgerError as error:
        logger.exception("This client's ledger cannot be used; nothing was released.")
        return _failure(message, protocol.LEDGER_UNUSABLE, "this client's ledger cannot be used", error)
    except SilentFailureError as error:
        logger.critical(
            "This client could not be made once its records were being read. It stays silent, as if it were off, until "
            "it is started again; what follows is for its operator alone."
        )
        logger.error("%s", error.__cause__, exc_info=error.__cause__, extra=OF_DATA)
        _stay_silent()
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        logger.exception("This client failed to answer.")
        return _failure(message, protocol.INTERNAL_ERROR, _INTERNAL, error)


_LONGEST_TRACEBACK = 6000


def _failure(message: Message, code: int, reason: str, error: BaseException) -> Message:
    """Return an error reply with a fixed text; in a simulation with the end of the traceback as well."""
    if in_simulation():
        own = isinstance(error, MurmurflError)
        raised = error.__cause__ if own else error  # where an error of ours comes from says less than its text
        lines = [] if raised is None else traceback.format_exception(raised)
        reason = f"{reason}\n{''.join(lines)[-_LONGEST_TRACEBACK:]}{error if own else ''}".rstrip()
    return Message(Error(code, reason), reply_to=message)


RecordT = TypeVar("RecordT", ConfigRecord, MetricRecord)
AnyT = TypeVar("AnyT", bound=MutableMapping[str, Any])
_STYPE = "numpy.ndarray"  # how Flower calls the format of numpy.save
_NUMBERS = frozenset((int, float))
_PLAIN = frozenset((int, float, str, bytes, bool))


def entry_records(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a reply as records.

    Numbers in a MetricRecord, the others in a ConfigRecord, if there are any.
    """
    numbers: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        (numbers if is_number else others)[name] = value
    records: dict[str, Any] = {protocol.METRICS: _record(MetricRecord, numbers)}
    if others:
        records[protocol.CONFIG] = _record(ConfigRecord, others)
    return records


def array_record(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> ArrayRecord:
    """Arrays as Flower sends them; what is not NumPy's is left to Flower."""
    made = {
        str(name): _array(values) if isinstance(values, np.ndarray) else Array(values)
        for name, values in zip(names, arrays, strict=True)
    }
    return _put(ArrayRecord(), made)  # a record made from a dictionary makes every array of it anew


def reply_content(records: Mapping[str, Any]) -> RecordDict:
    """Return records as the content of a reply."""
    return _put(RecordDict(), records)


def _array(values: NDArray[Any]) -> Array:
    # Flower's constructor would find out four times which of its signatures is meant.
    array = Array.__new__(Array)
    vars(array).update(dtype=dtype_name(values), shape=values.shape, stype=_STYPE, data=write_array(values))
    return array


def own_array(array: Array) -> Array:
    """Return a new Array with the bytes of another one."""
    own = Array.__new__(Array)
    vars(own).update(dtype=array.dtype, shape=array.shape, stype=array.stype, data=array.data)
    return own


def plain_record(values: dict[str, Any]) -> ConfigRecord:
    """Plain values as a record of a client's state."""
    return _record(ConfigRecord, values)


def _record(kind: type[RecordT], values: dict[str, Any]) -> RecordT:
    """Return a record with these values."""
    plain = _NUMBERS if kind is MetricRecord else _PLAIN
    for name, value in values.items():
        if type(name) is not str or type(value) not in plain:
            return kind(values)  # lists, subclasses, and whatever is refused
    return _put(kind(), values)


def _put(record: AnyT, values: Mapping[str, Any]) -> AnyT:
    """Put values whose types are right into a new record."""
    inside = vars(record).get("_data")
    if inside is None:  # a Flower that keeps them elsewhere, and checks them
        record.update(values)
    else:
        inside.update(values)
    return record


def statement_entries(
    privatizer: LedgeredPrivatizer, session: str, beside: Sequence[LedgeredPrivatizer] = ()
) -> dict[str, Any]:
    """Return a client's figures of a session, spent and guaranteed, as plain values; independent of its data.

    The answers to queries by the clients ``beside`` it are in sessions of their own; the figures are of all together.
    """
    statement = privatizer.statement(session)
    for other in beside:
        statement = _with_release(statement, other)
    owners = {"unit": privatizer.policy.unit, "samples-per-owner": privatizer.policy.samples_per_owner}
    sums = statement.sums
    assumed = {protocol.MIN_HONEST: sums.min_honest, protocol.MIN_COHORT: sums.min_cohort} if sums else {}
    return {
        "releases": statement.releases,
        "mu-spent": statement.mu_spent,
        **statement.guaranteed.statement(),
        "mu-budget": statement.mu_budget,
        "samples-used": statement.samples_used,
        "max-participations": statement.max_participations,
        protocol.RELEASES_LEFT: statement.releases_left,
        "delta": privatizer.policy.delta,
        "mechanism": privatizer.policy.mechanism,
        "trust": privatizer.policy.trust,
        "noise-quality": privatizer.policy.noise_quality,
        "noise-std": privatizer.plan.noise_std,
        "sensitivity": privatizer.plan.sensitivity,
        **(owners if privatizer.policy.samples_per_owner else {}),
        **stated_noise(privatizer.policy, privatizer.plan, privatizer.num_samples),
        **assumed,
    }


def _with_release(statement: PrivacyStatement, other: LedgeredPrivatizer) -> PrivacyStatement:
    """Return a session's statement with the one release of another session added."""
    # The mean takes every sample, so none are used before it. An evaluation comes last, and is counted from the first
    # release on, as it is reserved.
    spent = other.plan.mu if statement.samples_used else 0.0
    return replace(
        statement,
        mu_spent=math.hypot(statement.mu_spent, spent),
        guaranteed=statement.guaranteed.compose(other.plan.loss),
    )


_TRUST = "secure-aggregation"


def check_masking(policy: PrivacyPolicy, masking: Masking | None, name: str, *, simulated: bool) -> None:
    """Refuse masks that do not belong to the policy or the client, and a real client that lacks them.

    A simulated client can be made without masks, for engines that carry no messages; it sends none either.
    """
    if policy.trust != _TRUST:
        if masking is not None:
            raise ConfigurationError(
                f"Expected masking only with trust {_TRUST!r}, got it with {policy.trust!r}: a server that is to see "
                "each release could not read this client's.",
                kind="conflict",
                setting="masking",
            )
        return
    if masking is None:
        if not simulated:
            raise _without_masks()
        return
    masking.check_policy(policy)
    if masking.name != name:
        raise ConfigurationError(
            f"Expected masking for client {name!r}, got that of {masking.name!r}: a release says whose it is once.",
            kind="mismatch",
            setting="masking",
        )


def outgoing_reply(
    release: Release,
    shapes: Sequence[tuple[int, ...]],
    *,
    masking: Masking | None,
    session: str,
    policy: PrivacyPolicy,
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """Return the arrays of a reply with a recorded release, in the model's shapes, and the entries beside them.

    Under secure aggregation these are the masked counts, uint64, with header, seals and signature: nothing is sent that
    :class:`~murmurfl.privacy.sums.masking.Masking` did not mask, on a real client and in a simulation. Otherwise they
    are the release's values, float64, and nothing. All entries but the arrays are independent of data.
    """
    if policy.trust != _TRUST:
        return unflatten(release.values, shapes), {}
    if masking is None:
        raise _without_masks()
    masked = masking.mask(release, session, policy)
    entries = {
        protocol.HEADER: masked.sealed.header,
        protocol.SEALS: list(masked.sealed.seals),
        protocol.SIGNATURE: masked.sealed.signature,
    }
    return unflatten(masked.counts, shapes), entries


def name_shown(masking: Masking | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of an answer to a hello that prove the client's name; none without a roster."""
    if masking is None or protocol.NONCE not in asked:
        return {}
    return {protocol.SIGNATURE: masking.prove_name(asked[protocol.NONCE])}


def check_can_send(policy: PrivacyPolicy, masking: Masking | None) -> None:
    """Refuse to make a release that could not be sent: it would spend what nobody gets."""
    if policy.trust == _TRUST and masking is None:
        raise _without_masks()


def _without_masks() -> ConfigurationError:
    return ConfigurationError(
        f"Expected masking under trust {_TRUST!r}, got none: nothing leaves this client without masks. Pass "
        "masking=Masking(name, key, roster), with the client's own key and the roster its operator pinned.",
        kind="missing",
        setting="masking",
    )


def log_own_forecast(name: str, privatizer: LedgeredPrivatizer, *, unit: str = "") -> None:
    """Log :func:`own_forecast` of the client with this name."""
    if foreseen := own_forecast(privatizer, unit=unit):
        # A simulation has many clients, and its server says it of all of them.
        level = logging.DEBUG if privatizer.simulated else logging.INFO
        logging.getLogger("flwr").log(level, "Client %s: %s", name, foreseen)


def own_forecast(privatizer: LedgeredPrivatizer, *, unit: str = "") -> str:
    """Return a sentence on a client's noise beside its longest update, and on how many such clients are needed.

    It follows from the client's policy and the public number of samples alone, and is empty without noise. ``unit`` is
    protected as a whole: "sample", "owner" or "client"; default the policy's.
    """
    plan, policy = privatizer.plan, privatizer.policy
    entries = stated_noise(policy, plan, privatizer.num_samples)
    statement = {
        **entries,
        "max-participations": plan.mechanism.num_releases,
        "mu-guaranteed": plan.mu,
        "delta": policy.delta,
        "mechanism": policy.mechanism,
        "unit": unit or policy.unit,
    }
    read = StatedNoise.read(statement)
    # By itself, with the noise it adds: what others add under secure aggregation is not in it.
    alone = read and forecast_of(
        [read], num_parameters=privatizer.num_parameters, clients=1, per_round=1, rounds=read.releases
    )
    return "" if alone is None else own_forecast_sentence(alone)
