"""Who a run trusts, and with what: what the run-config keys of secure aggregation come to.

Under ``trust = secure-aggregation`` the server sees only sums of at least ``min-cohort`` machines' releases, as long as
one helper is honest. What the sums guarantee depends on h, the machines of each sum that do not work with the server:
``min-cohort`` less the ``colluders`` that are reckoned with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...privacy import ConfigurationError, Trust
from ...privacy.machine.policy import MOST_MACHINES, MOST_SUMMED
from ...privacy.setting import refusal

SECURE: Trust = "secure-aggregation"
TRUST_KEYS = frozenset({"helpers", "min-cohort", "colluders", "culprits", "most-skipped", "most-noise"})
"""Run-config keys that secure aggregation reads, and no other trust model."""

_ROUNDING = 1e-9


def keys_of_trust(trust: object) -> frozenset[str]:
    """The keys that a trust model reads beyond the common ones."""
    return TRUST_KEYS if trust == SECURE else frozenset()


def helper_names(helpers: int) -> tuple[str, ...]:
    """The names of a simulation's helpers."""
    return tuple(f"helper-{number}" for number in range(helpers))


def cohort_floor(clients_per_round: int, min_cohort: int) -> int:
    """The fewest releases of a sum: as set, or four fifths of the machines asked, rounded up."""
    return min_cohort or -(-4 * clients_per_round // 5)


def honest_machines(clients_per_round: int, floor: int, colluders: int) -> int:
    """h: of the fewest releases of a sum, those of machines that do not work with the server.

    Parameters
    ----------
    clients_per_round : int
        m.
    floor : int
        The fewest releases of a sum.
    colluders : int
        Machines that may work with the server; negative for what leaves half of m honest.

    Notes
    -----
    It is an assumption, which nobody can check: mu holds if it does.
    """
    return floor - colluders if colluders >= 0 else max(clients_per_round // 2, 1)


def check_cohorts(num_clients: int, clients_per_round: int, asked: int, min_cohort: int, colluders: int) -> None:
    """Refuse numbers of machines with which no sum could be opened, or in which nobody would be honest.

    A sum has at most the ``asked`` machines of a round: ``ask`` times ``clients_per_round``.
    """
    if num_clients > MOST_MACHINES:
        raise refusal("num_clients", f"at most {MOST_MACHINES} with trust = {SECURE!r}", num_clients)
    if asked > MOST_SUMMED:
        expected = f"at most {MOST_SUMMED} machines a round, with ask, for trust = {SECURE!r}, or sums could wrap"
        raise refusal("clients_per_round", expected, asked)
    if min_cohort > clients_per_round:
        raise refusal("min_cohort", f"at most clients-per-round = {clients_per_round}", min_cohort)
    floor = cohort_floor(clients_per_round, min_cohort)
    if colluders >= floor:
        raise refusal("colluders", f"below the {floor} releases of the smallest sum: one of them is honest", colluders)
    half = honest_machines(clients_per_round, floor, -1)
    if colluders < 0 and floor < half:
        raise ConfigurationError(
            f"Expected colluders beside min-cohort = {floor}, which is below the {half} honest machines that are "
            f"assumed where it is left out: set colluders to a number below {floor}, or min-cohort to {half} at least."
        )


def check_lost_replies(clients_per_round: int, floor: int, lost_replies: float) -> None:
    """Refuse so many lost replies that the usual round would have too few releases for a sum."""
    expected = clients_per_round * (1 - lost_replies)
    if expected >= floor - _ROUNDING:
        return
    most = math.floor(1000 * (clients_per_round - floor) / clients_per_round) / 1000
    raise ConfigurationError(
        f"Expected replies for a sum of min-cohort = {floor}, got {expected:.4g} of {clients_per_round} a round with "
        f"lost-replies = {lost_replies:g}: most rounds would stay closed. Here lost-replies may be at most {most:g}, "
        f"or min-cohort at most {math.floor(expected + _ROUNDING)}."
    )


def check_end_of_rounds(needed: int, floor: int) -> None:
    """Refuse rounds that wait for fewer machines than a sum must have."""
    if needed < floor:
        raise ConfigurationError(
            f"Expected rounds that wait for at least min-cohort = {floor} machines, got wait-for x clients-per-round = "
            f"{needed}: raise wait-for, or lower min-cohort."
        )


def nothing_gained(min_honest: int) -> str:
    """The warning if ``min_honest`` is 1, else an empty string."""
    if min_honest > 1:
        return ""
    return (
        "Secure aggregation saves no noise here: of each sum one machine only is taken to be honest (h = min-cohort - "
        "colluders = 1), so mu is what each machine's own noise gives without it. Lower colluders, raise min-cohort, "
        "or leave trust out."
    )


def refused_trust(trust: str, strategy: str, able: Iterable[str], others: Iterable[str]) -> ConfigurationError:
    """The refusal of a trust model that a method does not serve.

    Parameters
    ----------
    trust, strategy : str
        As they were set.
    able : iterable of str
        What the method serves.
    others : iterable of str
        Built-in methods that serve this one.
    """
    served = " or ".join(repr(one) if one else "left out" for one in able)
    return ConfigurationError(
        f"Expected trust to be {served} with strategy = {strategy!r}, got {trust!r}; that is served by "
        f"{', '.join(others)}."
    )
