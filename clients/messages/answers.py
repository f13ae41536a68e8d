"""A machine's replies: a release, under masks or without, a statement about itself, or a refusal.

When something goes wrong it is the fixed text of a refusal, or one fixed sentence for all else: Flower forwards the
texts of exceptions to the server, and those can carry data.

Under secure aggregation the order is always the same: the release is made and recorded, then it is masked, and only
then anything is sent. If masking fails nothing is sent, and the machine's next release carries what this one had.

Flower checks every key and value that is put into a record, which takes longer than many a gradient. So values of plain
types are checked here and go in together; all others are left to Flower.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from ...privacy import (
    ConfigurationError,
    LedgeredMachine,
    LedgerError,
    PrivacyPolicy,
    PrivacyStatement,
    RefusedError,
    Release,
    protocol,
)
from ...privacy.accounting.noise_forecast import stated_noise
from ...privacy.errors import is_interrupt
from ...privacy.protocol import dtype_name, write_array
from ...privacy.sums.masking import Masking
from ..adapters.per_sample_gradients import unflatten

logger = logging.getLogger(__name__)

Answers = Callable[[Message, Context], Message]
"""Answers a message: a ClientApp, or something around one."""

_INTERNAL = "internal error; the machine's own log says more"


def answer(message: Message, handle: Callable[[], RecordDict]) -> Message:
    """The reply to a message: what ``handle`` gives, or an error whose text says nothing of any data.

    No text of an exception leaves the machine but that of a :class:`~murmurfl.privacy.RefusedError`, which is fixed.
    That it failed, and in which of these ways, does.
    """
    try:
        return Message(handle(), reply_to=message)
    except RefusedError as refusal:
        logger.info("Refused a request: %s.", refusal.reason)
        return Message(Error(refusal.code, refusal.reason), reply_to=message)
    except ConfigurationError as error:
        # The text says what to do; a cause is shown beside it.
        logger.error("This machine is not configured to answer: %s", error, exc_info=error.__cause__ and error)
        return Message(Error(protocol.NOT_CONFIGURED, "this machine is not configured to answer"), reply_to=message)
    except LedgerError:
        logger.exception("This machine's ledger cannot be used; nothing was released.")
        return Message(Error(protocol.LEDGER_UNUSABLE, "this machine's ledger cannot be used"), reply_to=message)
    except BaseException as error:
        if is_interrupt(error):
            raise
        logger.exception("This machine failed to answer.")
        return Message(Error(protocol.INTERNAL_ERROR, _INTERNAL), reply_to=message)


RecordT = TypeVar("RecordT", ConfigRecord, MetricRecord)
AnyT = TypeVar("AnyT", bound=MutableMapping[str, Any])

_STYPE = "numpy.ndarray"  # how Flower calls the format of numpy.save
_NUMBERS = frozenset((int, float))
_PLAIN = frozenset((int, float, str, bytes, bool))


def entry_records(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a reply as records: numbers in a MetricRecord, the others in a ConfigRecord, if there are any."""
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
    """Records as the content of a reply."""
    return _put(RecordDict(), records)


def _array(values: NDArray[Any]) -> Array:
    # Flower's constructor would find out four times which of its signatures is meant.
    array = Array.__new__(Array)
    vars(array).update(dtype=dtype_name(values), shape=values.shape, stype=_STYPE, data=write_array(values))
    return array


def own_array(array: Array) -> Array:
    """A new Array with the bytes of another one."""
    own = Array.__new__(Array)
    vars(own).update(dtype=array.dtype, shape=array.shape, stype=array.stype, data=array.data)
    return own


def plain_record(values: dict[str, Any]) -> ConfigRecord:
    """Plain values as a record of a machine's state."""
    return _record(ConfigRecord, values)


def _record(kind: type[RecordT], values: dict[str, Any]) -> RecordT:
    """A record with these values."""
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


def statement_entries(machine: LedgeredMachine, session: str, beside: Sequence[LedgeredMachine] = ()) -> dict[str, Any]:
    """A machine's figures of a session, spent and guaranteed, as plain values; independent of its data.

    The side releases of the machines ``beside`` it are in sessions of their own; the figures are of all together.
    """
    statement = machine.statement(session)
    for other in beside:
        statement = _with_release(statement, other)
    owners = {"unit": machine.policy.unit, "samples-per-owner": machine.policy.samples_per_owner}
    sums = {
        protocol.MU_LOCAL: statement.mu_local,
        protocol.MIN_HONEST: statement.min_honest,
        protocol.MIN_COHORT: statement.min_cohort,
    }
    return {
        "releases": statement.releases,
        "mu-spent": statement.mu_spent,
        "mu-guaranteed": statement.mu_guaranteed,
        "mu-budget": statement.mu_budget,
        "samples-used": statement.samples_used,
        "max-participations": statement.max_participations,
        protocol.RELEASES_LEFT: statement.releases_left,
        "delta": machine.policy.delta,
        "mechanism": machine.policy.mechanism,
        "trust": machine.policy.trust,
        "noise-quality": machine.policy.noise_quality,
        "noise-std": machine.plan.noise_std,
        "sensitivity": machine.plan.sensitivity,
        **(owners if machine.policy.samples_per_owner else {}),
        **stated_noise(machine.policy, machine.plan, machine.num_samples),
        **{name: value for name, value in sums.items() if value is not None},
    }


def _with_release(statement: PrivacyStatement, other: LedgeredMachine) -> PrivacyStatement:
    """A session's statement with the one release of another session added."""
    # The mean takes every sample, so none are used before it. An evaluation comes last, and is counted from the first
    # release on, as it is reserved.
    spent = other.plan.mu if statement.samples_used else 0.0
    local = None if statement.mu_local is None else math.hypot(statement.mu_local, other.plan.mu_local)
    return replace(
        statement,
        mu_spent=math.hypot(statement.mu_spent, spent),
        mu_guaranteed=math.hypot(statement.mu_guaranteed, other.plan.mu),
        mu_local=local,
    )


_TRUST = "secure-aggregation"


def check_masking(policy: PrivacyPolicy, masking: Masking | None, name: str, *, simulated: bool) -> None:
    """Refuse masks that do not belong to the policy or the machine, and a real machine that lacks them.

    A simulated machine can be made without masks, for engines that carry no messages; it sends none either.
    """
    if policy.trust != _TRUST:
        if masking is not None:
            raise ConfigurationError(
                f"Expected masking only with trust {_TRUST!r}, got it with {policy.trust!r}: a server that is to see "
                "each release could not read this machine's."
            )
        return
    if masking is None:
        if not simulated:
            raise _without_masks()
        return
    masking.check_policy(policy)
    if masking.name != name:
        raise ConfigurationError(
            f"Expected masking for machine {name!r}, got that of {masking.name!r}: a release says whose it is once."
        )


def outgoing_reply(
    release: Release,
    shapes: Sequence[tuple[int, ...]],
    *,
    masking: Masking | None,
    session: str,
    policy: PrivacyPolicy,
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """The arrays of a reply with a recorded release, in the model's shapes, and the entries beside them.

    Under secure aggregation these are the masked counts, uint64, with header, seals and signature: nothing is sent that
    :class:`~murmurfl.privacy.sums.masking.Masking` did not mask, on a real machine and in a simulation. Otherwise they
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
    """The entries of an answer to a hello by which a machine of a roster shows that its name is its own."""
    if masking is None or protocol.NONCE not in asked:
        return {}
    return {protocol.SIGNATURE: masking.prove_name(asked[protocol.NONCE])}


def check_can_send(policy: PrivacyPolicy, masking: Masking | None) -> None:
    """Refuse to make a release that could not be sent: it would spend what nobody gets."""
    if policy.trust == _TRUST and masking is None:
        raise _without_masks()


def _without_masks() -> ConfigurationError:
    return ConfigurationError(
        f"Expected masking under trust {_TRUST!r}, got none: nothing leaves this machine without masks. Pass "
        "masking=Masking(name, key, roster), with the machine's own key and the roster its operator pinned."
    )
