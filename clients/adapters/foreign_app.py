"""Calls of somebody else's ClientApp: the model it is sent, the model it answers with, and its failures.

Nothing that it raises may reach the server: the text of an exception can carry data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from ...privacy import ConfigurationError, MurmurflError, RefusedError, protocol
from ...privacy.errors import is_interrupt
from ...privacy.protocol import read_array
from ..messages.requests import malformed
from ..simulation.context_ledger import LEDGER_RECORDS

_in_training: ContextVar[Message | None] = ContextVar("murmurfl_noise_mod", default=None)


# The records that Flower's legacy ClientApp looks for, and does not find.
_OF_LEGACY = ("'fitins.", "'evaluateins.")
_LEGACY = (
    "this machine has Flower's legacy ClientApp(client_fn, mods=...), which cannot read messages of the Message API: "
    "write app = numpy_client_app(client_fn, mods=[CorrelatedNoiseMod(...)])"
)


def is_in_training(message: Message) -> bool:
    """Whether a mod around this one is calling the ClientApp with this message already."""
    return _in_training.get() is message


def received_model(content: RecordDict) -> dict[str, NDArray[np.float64]]:
    """The floating-point arrays of the received model, in order, in float64."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise malformed("expected one ArrayRecord, the model")
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
    """The ClientApp failed; its text stays in the machine's own log."""


def called(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    """The ClientApp's reply; a :class:`ClientAppError` if it fails, a refusal if it is of Flower's legacy kind."""
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

    An exception is kept back because a real machine must release something all the same: whether training fails may
    depend on the data. ``guarded`` machines have their ledger in ``context.state``, which must stay there.
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
                "Expected the records of murmurfl in context.state to stay, got others: this machine's ledger is in "
                "them. Put new records beside them."
            )

    def result() -> NDArray[np.float64]:
        if isinstance(values, Exception):
            raise values
        return values

    return result


def _ledger_records(context: Context) -> dict[str, Any]:
    return {key: record for key, record in context.state.items() if key.startswith(LEDGER_RECORDS)}


def _reply_vector(reply: Message, received: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """The arrays of the ClientApp's model in the order of those received, as one vector."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise ConfigurationError(f"Expected the ClientApp to reply with one ArrayRecord, got {len(records)}.")
    parts = []
    for name, before in received.items():
        array = records[0].get(name)
        values = None if array is None else array.numpy()
        if values is None or values.dtype.kind != "f" or values.shape != before.shape:
            stated = "none" if values is None else f"{values.dtype} of shape {values.shape}"
            raise ConfigurationError(
                f"Expected the ClientApp to reply with the arrays it was sent, floating-point {before.shape} for "
                f"{name!r}, got {stated}."
            )
        parts.append(np.asarray(values, dtype=np.float64).ravel())
    return np.concatenate(parts)
