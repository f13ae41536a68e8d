"""Flower's own ``flower-superlink`` behind the gate, as a child process that ends with its parent.

``python -m murmurfl.app.nodes.servers.flower_superlink PARENT_PID OWNERS [options of flower-superlink]``; OWNERS is
``-`` without a list of owners.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ..flower_supernode import end_with

PROOF_VARIABLE, PUBLISHED_VARIABLE = "MURMURFL_GATE_SECRET", "MURMURFL_PUBLISHED"
"""Environment variables of the gate's secret, in hexadecimal digits, and of the folder that it publishes."""


def main() -> None:
    """Run ``flower-superlink`` with the remaining arguments."""
    parent, owners = int(sys.argv.pop(1)), sys.argv.pop(1)
    sys.argv[0] = "flower-superlink"  # for its messages
    end_with(parent, signal.SIGTERM)  # the processes of its runs end with it
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _close(None if owners == "-" else Path(owners))
    flower_superlink()


def _close(owners: Path | None) -> None:
    """Put the gate in front of whatever uvicorn serves; :mod:`.watched_server` checks that it is there."""
    import uvicorn

    from .gate import Gate, server_name
    from .server_health import SuperLinkOptions

    secret = bytes.fromhex(os.environ.pop(PROOF_VARIABLE, ""))  # no process started from here may inherit it
    certificate = SuperLinkOptions.read(sys.argv[1:]).certificate
    name, serve = server_name(Path(certificate) if certificate else None), uvicorn.run
    published = os.environ.get(PUBLISHED_VARIABLE)

    def closed(app: Any, **options: Any) -> None:
        serve(Gate(app, owners, name, secret, published=Path(published) if published else None), **options)

    uvicorn.run = closed


if __name__ == "__main__":
    main()
