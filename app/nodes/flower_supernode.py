"""Flower's own ``flower-supernode`` as a child process: it ends with its parent, and when its connection has ended.

``python -m murmurfl.app.nodes.flower_supernode PARENT_PID [options of flower-supernode]``. It tells its parent whether
its SuperLink has accepted it and answers (:mod:`.fleet_contact`). Left to itself, a SuperNode
outlives whoever started it, and a SuperNode that the SuperLink no longer knows stays as a process that does nothing.
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
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="murmurfl-parent").start()
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


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    # Politely first: a node that signs off can come back at once.
    signal.raise_signal(signal.SIGINT)
    time.sleep(_GRACE_S)
    os._exit(_ENDED)


if __name__ == "__main__":
    main()
