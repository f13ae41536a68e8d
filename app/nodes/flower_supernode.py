"""Flower's own ``flower-supernode`` as a child process that ends with its parent, or when its connection has ended.

``python -m murmurfl.app.nodes.flower_supernode PARENT_PID [options of flower-supernode]``. It tells its parent whether
the SuperLink has accepted it and answers (:mod:`.fleet_contact`). Without this, a SuperNode outlives whoever started
it, and one that the SuperLink no longer knows stays and does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0
_ENDED = 1


def main() -> None:
    """Run ``flower-supernode`` with the remaining arguments."""
    parent = int(sys.argv.pop(1))
    end_with(parent, signal.SIGINT)  # a node that signs off can come back at once
    code = _ENDED
    try:
        from flwr.supernode.cli import flower_supernode

        from .connections.fleet_contact import telling_the_node, watch_fleet

        contact = telling_the_node()
        if contact is not None:
            watch_fleet(contact)
        flower_supernode()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _ENDED
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    # Not sys.exit: the thread of its API would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(min(code, 255))


def end_with(parent: int, politely: signal.Signals) -> None:
    """End this process once its parent has ended: by a signal, and for certain ten seconds later."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        signal.raise_signal(politely)
        time.sleep(_GRACE_S)
        os._exit(_ENDED)

    threading.Thread(target=watch, daemon=True, name="murmurfl-parent").start()


if __name__ == "__main__":
    main()
