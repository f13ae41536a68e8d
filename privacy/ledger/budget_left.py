"""What a ledger's budget leaves, from its high-water mark: for somebody who asks every few seconds.

The mark is one small file that every commit writes anew as a whole. Nothing is locked, and nobody waits: the ledger
itself is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..accounting.gdp import compose_gdp, gdp_epsilon
from .mark import LedgerState, read_mark


@dataclass(frozen=True)
class BudgetLeft:
    """What a ledger allows and what is left of it.

    Parameters
    ----------
    budget_mu : float
        Of all runs.
    left_mu, left_epsilon : float
        What new sessions may still reserve; epsilon at the ledger's delta.
    left_local_mu : float
        The same of what holds whatever other machines and helpers do.
    sessions : int
        That reserved something.
    """

    budget_mu: float
    left_mu: float
    left_epsilon: float
    left_local_mu: float
    sessions: int


def budget_left(mark: Path) -> BudgetLeft:
    """What the high-water mark at a path says of its ledger's budget.

    Parameters
    ----------
    mark : Path

    Raises
    ------
    LedgerError
        If there is none that can be read and believed.

    Notes
    -----
    What it returns does not depend on the machine's data: budgets, and what sessions reserved when they were opened.
    Between a commit and its mark it is what was left before; the ledger alone decides what is released.
    """
    state = read_mark(mark)
    budget_local_mu = state.budget_mu if state.budget_local_mu is None else state.budget_local_mu
    left = _left(state.budget_mu, (abs(session.mu) for session in state.sessions.values()))
    local = _left(budget_local_mu, _local(state))
    return BudgetLeft(state.budget_mu, left, gdp_epsilon(left, state.delta), local, len(state.sessions))


def _local(state: LedgerState) -> Iterable[float]:
    return (abs(session.mu) if session.local is None else session.local for session in state.sessions.values())


def _left(budget: float, reserved: Iterable[float]) -> float:
    mus = list(reserved)
    spent = math.inf if math.inf in mus else compose_gdp(mus)
    return math.sqrt(max(budget**2 - spent**2, 0.0))
