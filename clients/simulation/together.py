"""How several simulated machines of one kind and one model are computed at once (:mod:`.cohort_machines`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...privacy.machine.clipping import StackedContributions
from ...privacy.mechanisms import State


@dataclass(frozen=True)
class Together:
    """How several simulated machines of one kind and one model are computed at once.

    Parameters
    ----------
    contributions : callable
        Takes positions of machines and one batch of their samples, machine after machine. Gives, in the same order,
        what :meth:`PrivateClient.contribution` gives for each machine, up to rounding; unclipped.
    note : tuple of floating-point arrays, optional
        Public values that each of them remembers with its release (:meth:`~murmurfl.privacy.PrivateMachine.noted`).
    """

    contributions: Callable[[Sequence[int], Any], StackedContributions]
    note: State | None = None
