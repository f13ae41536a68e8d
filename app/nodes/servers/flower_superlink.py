"""Flower's own ``flower-superlink`` behind the gate, as a child process that ends with its parent.

``python -m murmurfl.app.nodes.servers.flower_superlink PARENT_PID OWNERS [options of flower-superlink]``; without a
list of owners ``-``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROOF_VARIABLE = "MURMURFL_GATE_SECRET"
"""Names the secret by which the gate shows whose it is, in hexadecimal digits."""

_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0


def main() -> None:
    """Run ``flower-superlink`` with the remaining arguments."""
    parent, owners = int(sys.argv.pop(1)), sys.argv.pop(1)
    sys.argv[0] = "flower-superlink"  # which its messages name
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="murmurfl-parent").start()
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _close(None if owners == "-" else Path(owners))
    flower_superlink()


def _close(owners: Path | None) -> None:
    """Put the gate before whatever is served; :mod:`.watched_server` checks that it is there."""
    import uvicorn

    from .gate import Gate, server_name
    from .server_health import SuperLinkOptions

    secret = bytes.fromhex(os.environ.pop(PROOF_VARIABLE, ""))  # before any other process is started from here
    certificate = SuperLinkOptions.read(sys.argv[1:]).certificate
    name, serve = server_name(Path(certificate) if certificate else None), uvicorn.run

    def closed(app: Any, **options: Any) -> None:
        serve(Gate(app, owners, name, secret), **options)

    uvicorn.run = closed


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    # Politely first: the processes of its runs end with it.
    signal.raise_signal(signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
