"""Many real nodes that share what they import: ``forked_nodes.py NODES.json``, a list of arguments of ``murmurfl``.

Each is a process of its own and starts a Flower SuperNode of its own, as ``murmurfl node`` does; both are forked where
they would otherwise start a new Python, which takes seconds and 140 MiB each. What they do then is the product's: the
same operator's file, ledger, key, TLS and messages. Beside a node's log lies its process's number, ``NAME.pid``.
"""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from flwr.supernode.cli import flower_supernode  # noqa: F401 - what a SuperNode imports
from murmurfl.app.commands import main as cli
from murmurfl.app.nodes import flower_process as child
from murmurfl.app.nodes import supernode as supernode
from murmurfl.clients import ContextLedger  # noqa: F401

AT_ONCE, LONGEST_S = 3, 60.0


class Forked(subprocess.Popen):
    """A process that goes on as a SuperNode in a copy of this one, instead of starting a program."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        given = dict(zip(("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"), rest[3:9], strict=True))
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.dup2(given["p2cread"], 0)
            os.dup2(given["c2pwrite"], 1)
            os.dup2(given["c2pwrite"], 2)
            become(args[2:], env, child.main)
        self._close_pipe_fds(*rest[3:9])


def become(arguments, environment, main):
    """What a new process does first, and then for good."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        logging.root.handlers.clear()  # the node's: a SuperNode has its own
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(arguments)
        main()
    finally:
        os._exit(1)


def connected(log):
    return b"Connected to " in log.read_bytes()


def main():
    supernode.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    gc.freeze()  # pages that nobody writes to stay shared
    children, logs = [], []
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        log = Path(arguments[2]).with_suffix(".log")
        pid = os.fork()
        if pid == 0:
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(target, 1)
            os.dup2(target, 2)
            become(arguments, dict(os.environ), cli.main)
        log.with_suffix(".pid").write_text(str(pid))
        children.append(pid)
        logs.append(log)
        # A few at a time: each handshake and each first message costs the SuperLink a while.
        limit = time.monotonic() + LONGEST_S
        while len(logs) > AT_ONCE and not connected(logs[-AT_ONCE - 1]) and time.monotonic() < limit:
            time.sleep(0.1)
    for pid in children:
        os.waitpid(pid, 0)


main()
