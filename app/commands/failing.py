"""How a command fails: one clear line on standard error, and an exit code that scripts can tell apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ...privacy import MurmurflError
from .terminal import say

FAILED = 1
MISUSED = 2
"""What click returns for options that are missing or unknown."""
CLAIM_REFUTED = 3
INTERRUPTED = 130


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Say why, and end the process."""
    say(f"murmurfl: {message}", err=True)
    sys.exit(code)


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Turn an error of ours, of the operating system or of the keyboard into one line and an exit code.

    Any other error is a mistake in the program: its traceback is shown as it is.
    """
    try:
        yield
    except MurmurflError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt:
        fail("Interrupted.", INTERRUPTED)
