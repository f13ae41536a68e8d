"""Flower's own ``flower-superlink`` as a child process that ends with its parent.

``python -m murmurfl.app.servers.flower_superlink PARENT_PID [options of flower-superlink]``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0


def main() -> None:
    """Run ``flower-superlink`` with the remaining arguments."""
    parent = int(sys.argv.pop(1))
    sys.argv[0] = "flower-superlink"  # which its messages name
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="murmurfl-parent").start()
    from flwr.superlink.cli.flower_superlink import flower_superlink

    flower_superlink()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    # Politely first: the processes of its runs end with it.
    signal.raise_signal(signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
