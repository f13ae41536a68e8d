"""What a machine answers when something goes wrong: the fixed text of a refusal, or one fixed sentence for all else.

Flower forwards the texts of exceptions to the server, and those can carry data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Context, Error, Message, RecordDict

from ...privacy import ConfigurationError, LedgerError, RefusedError, protocol
from ...privacy.errors import is_interrupt

logger = logging.getLogger(__name__)

Answers = Callable[[Message, Context], Message]
"""What a node does with a message: a ClientApp, or something around one."""

_INTERNAL = "internal error; the machine's own log says more"


def answer(message: Message, handle: Callable[[], RecordDict]) -> Message:
    """The reply to a message: what ``handle`` gives, or an error whose text says nothing of any data.

    Parameters
    ----------
    message : Message
        What is answered.
    handle : callable
        Makes the reply's content.

    Notes
    -----
    No text of an exception leaves the machine but that of a :class:`~murmurfl.privacy.RefusedError`, which is fixed;
    that it failed, and in which of these ways, does.
    """
    try:
        return Message(handle(), reply_to=message)
    except RefusedError as refusal:
        logger.info("Refused a request: %s.", refusal.reason)
        return Message(Error(refusal.code, refusal.reason), reply_to=message)
    except ConfigurationError as error:
        # It says what to do by itself; where something else lies behind it, that is shown as well.
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
