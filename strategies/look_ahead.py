"""What a training finds out before its first round, while nothing is spent: whether machines last for all rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from ..privacy import ConfigurationError
from .machines import rounds_possible
from .statements import releases_left


def check_rounds(
    sample: Callable[[int], Iterable[str]],
    statements: Mapping[str, Mapping[str, Any]],
    done: int,
    num_rounds: int,
) -> None:
    """Refuse a training that asks a machine more often than it says it can answer; it knows before it begins.

    Parameters
    ----------
    sample : callable
        The machines that are asked in a round.
    statements : mapping
        What each machine says of itself, by name.
    done : int
        Rounds that are over.
    num_rounds : int
        T.

    Raises
    ------
    ConfigurationError
        If a machine is asked too often, and no round is over yet.
    """
    stated = {name: releases_left(said) for name, said in statements.items()}
    last, name = rounds_possible(sample, range(done + 1, num_rounds + 1), stated)
    if last is None or name is None:
        return
    said = (
        f"machine {name} says that it can make {stated[name]} {'more ' if done else ''}releases, and round {last} "
        "asks it for one more: its cap (max-participations) and its fresh samples decide"
    )
    if not done:
        raise ConfigurationError(
            f"Expected at most {last - 1} rounds, got {num_rounds}: {said}. Use fewer rounds, or run_dry=True "
            "(run-dry = true in murmurfl's own app): machines that can make no more then refuse."
        )
    # No refusal here: a server that was killed asks for a round again, and what its machines released for it the first
    # time is spent. So a training that was possible may end up short of a release, through no fault of its plan.
    log(WARNING, "In what is left of %d rounds %s; it refuses from then on.", num_rounds, said)
