"""Flower's own ``flower-superlink`` or ``flower-superexec`` as a process of ours.

``python -m murmurfl.app.fleet.servers.superlink_process superlink PARENT_PID OWNERS [options of flower-superlink]``
puts the gate in front of the SuperLink; OWNERS is ``-`` without a list of owners.

``python -m murmurfl.app.fleet.servers.superlink_process superexec [options of flower-superexec]`` starts runs'
processes without their tokens on the command line, where every user of the computer could read them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...nodes.connection import server_name
from ...nodes.flower_process import end_with, give_back_large_blocks
from .gate import Gate, SuperLinkOptions
from .limits import (
    LARGEST_REPLY_VARIABLE,
    ConnectionLimits,
    Garbage,
    largest_reply,
    raise_file_limit,
    server_context,
)

PROOF_VARIABLE, PUBLISHED_VARIABLE = "MURMURFL_GATE_SECRET", "MURMURFL_PUBLISHED"
"""Environment variables of the gate's secret, in hexadecimal digits, and of the folder that it publishes."""


def run_superlink() -> None:
    """Run ``flower-superlink`` with the remaining arguments."""
    parent, owners = int(sys.argv.pop(1)), sys.argv.pop(1)
    sys.argv[0] = "flower-superlink"  # for its messages
    end_with(parent, signal.SIGTERM)  # the processes of its runs end with it
    give_back_large_blocks()
    from flwr.superlink.cli.flower_superlink import flower_superlink

    from .objects import keep_own_objects

    keep_own_objects()
    _put_gate(None if owners == "-" else Path(owners))
    flower_superlink()


def _put_gate(owners: Path | None) -> None:
    """Put the gate in front of whatever uvicorn serves; :mod:`.watched_server` checks that it is there."""
    import uvicorn

    from .senders import flower_senders

    secret = bytes.fromhex(os.environ.pop(PROOF_VARIABLE, ""))  # no process started from here may inherit it
    certificate = SuperLinkOptions.read(sys.argv[1:]).certificate
    name, serve = server_name(Path(certificate) if certificate else None), uvicorn.run
    published = os.environ.get(PUBLISHED_VARIABLE)
    files, reply = raise_file_limit(), largest_reply(os.environ.get(LARGEST_REPLY_VARIABLE))

    def closed(app: Any, **options: Any) -> None:
        folder = Path(published) if published else None
        gate = Gate(app, owners, name, flower_senders(app), secret, published=folder, largest_reply=reply)
        context = server_context(options.get("ssl_certfile"), options.get("ssl_keyfile"))
        Garbage.freeze()
        serve(gate, **{**options, **ConnectionLimits(files, context).options()})

    uvicorn.run = closed


def run_superexec() -> None:
    """Run ``flower-superexec`` with the remaining arguments."""
    sys.argv[0] = "flower-superexec"  # for its messages
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    # The one name by which Flower starts a run's process.
    subprocess_executor.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_start_without_token, DEVNULL=subprocess.DEVNULL
    )
    flower_superexec()


def _start_without_token(
    command: Sequence[str], start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a run's process with its token in a file that has no name; whoever has it is the run."""
    before, (_, token, *after) = command[: (at := command.index("--token"))], command[at:]
    with tempfile.TemporaryFile() as file:
        file.write(token.encode())
        file.flush()
        file.seek(0)
        token_options = ["--token-file", f"/dev/fd/{file.fileno()}"]
        return start([*before, *token_options, *after], pass_fds=[file.fileno()], **options)


def main() -> None:
    """Be the process that the first argument names, with the remaining arguments."""
    {"superlink": run_superlink, "superexec": run_superexec}[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
