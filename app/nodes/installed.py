"""A real machine answers with the murmurfl that its operator installed, never with a bundle's.

Flower's plain ``flower-supernode`` runs the ClientApp of the bundle that the server sent. On a real machine that app
hands the message to the installed murmurfl, which made the machine's ledger. (``murmurfl node`` runs no bundle at all.)
"""

from __future__ import annotations

import importlib
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from ...clients.messages import in_simulation

_APP = Path(__file__).resolve().parent.parent
_ROOT = _APP.parent
_PACKAGE = __name__.partition(".")[0]
IN_BUNDLE = not (_APP / "py.typed").is_file()
"""Whether this copy of murmurfl is a bundle's: every installation has this file, and Flower leaves it out of bundles.
"""

logger = logging.getLogger(__name__)


def answered_as_installed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: on a real machine a bundle passes the message to the installed murmurfl.

    Whoever lets a server's bundle run trusts the server. The installed client app answers, with the operator's file and
    ledger; without one, the bundle refuses.
    """
    if in_simulation() or not IN_BUNDLE:
        return call_next(message, context)
    installed = _installed_app()
    # Without one, the bundle answers with a refusal of fixed text.
    return (installed or call_next)(message, context)


@cache
def _installed_app() -> ClientAppCallable | None:
    """The installed murmurfl's client app, from then on the only one of this process; None if there is none."""
    ours, path = _take_out(), list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != _ROOT]
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(f"{_PACKAGE}.app.client_app")
    except Exception:  # its text must not leave the machine
        logger.exception("Expected murmurfl to be installed on this machine; the server's bundle alone refuses.")
        _take_out()  # code of two versions must not mix
        sys.modules.update(ours)
        sys.path[:] = path
        return None
    return found.app


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}
