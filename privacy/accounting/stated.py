"""What machines say of themselves, in one guarantee that is true of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from .guarantee import Guarantee
from .noise_words import stated_words

Statements = Mapping[str, Mapping[str, Any]]

_UNCHECKED = "It is what {said} of {all} machines say of themselves, which a server cannot check."


@dataclass(frozen=True)
class Figures:
    """The guarantee of a run in numbers.

    Parameters
    ----------
    mu : float
        Of everything the run may release; infinite without noise, 0 if nobody is asked.
    mu_local : float or None
        Under secure aggregation, what holds whatever server, helpers and other machines do.
    min_honest, min_cohort : int or None
        Under secure aggregation, h, which mu rests on, and the fewest releases of a sum.

    Notes
    -----
    A :class:`Guarantee` says in words what they are true of.
    """

    mu: float
    mu_local: float | None = None
    min_honest: int | None = None
    min_cohort: int | None = None


def stated_figures(expected: Figures, statements: Statements, num_clients: int) -> Figures:
    """The figures that real machines state, in one that is true of all of them.

    Parameters
    ----------
    expected : Figures
        What the run configuration expects of them: counts for machines that did not answer.
    statements : mapping
        What each machine says of itself.
    num_clients : int
        Machines in all.

    Notes
    -----
    A server cannot check what machines say. Under secure aggregation a machine says its mu for h honest machines of a
    sum, and machines may differ in h. One sentence names the smallest: what a machine stated for a larger one is worked
    out again for it, mu sqrt(h), and never more than its mu_local. Where the run configuration does not ask for sums,
    what a machine states for them is not said of it: its mu_local is.
    """
    silent = len(statements) < num_clients
    stated = [_stated(one) for one in statements.values()]
    own = (expected.mu, expected.mu if expected.mu_local is None else expected.mu_local, expected.min_honest or 1)
    claims = [*stated, *([own] if silent or not stated else [])]
    local = max(mu_local for _, mu_local, _ in claims)
    if expected.mu_local is None:
        return Figures(local)
    named = [int(one["min-honest"]) for one in statements.values() if "min-honest" in one]
    if expected.min_honest is not None and (silent or not named):
        named.append(expected.min_honest)
    fewest = min(named, default=1)
    cohorts = [int(one["min-cohort"]) for one in statements.values() if "min-cohort" in one]
    if expected.min_cohort is not None and (silent or not cohorts):
        cohorts.append(expected.min_cohort)
    mu = max(min(mu_local, mu * math.sqrt(max(honest / fewest, 1.0))) for mu, mu_local, honest in claims)
    return Figures(mu, local, fewest, min(cohorts, default=1))


def _stated(statement: Mapping[str, Any]) -> tuple[float, float, int]:
    """A machine's mu, its mu_local and the h that its mu is for; one that says no more than mu needs nobody."""
    mu = float(statement["mu-guaranteed"])
    return mu, float(statement.get("mu-local", mu)), int(statement.get("min-honest", 1))


def stated_guarantee(
    statements: Statements, num_clients: int, notes: tuple[str, ...] = (), *, masked: bool
) -> Guarantee:
    """The guarantee that machines state, in one sentence that is true of all of them.

    Parameters
    ----------
    statements : mapping
        What each machine says of itself.
    num_clients : int
        Machines in all.
    notes : tuple of str
        Further sentences about what the figure rests on.
    masked : bool
        Whether the training had sums of masked releases: without it nothing is said of sums, whatever machines state.

    Raises
    ------
    ConfigurationError
        If no machine states anything, or machines trust their server: what such a server guarantees, they cannot say.

    Notes
    -----
    **Formal guarantees.** Mu and its terms are those of the machine that states the weakest, for replacement of its
    unit; they are said of sums only if all machines hide their releases. A server cannot check statements, and a
    machine that states nothing is not spoken for: the sentence counts who does.
    """
    if not statements:
        raise ConfigurationError(
            "Expected what machines state, got nothing: pass strategy.ask_privacy(grid), after the training."
        )
    trusts = stated_values(statements, "trust")
    if "trusted-server" in trusts:
        raise ConfigurationError(
            "Expected machines that vouch for their own noise, got trust 'trusted-server': what the server guarantees, "
            "machines cannot say. Run it with murmurfl's own app (`murmurfl run`), which knows it."
        )
    # Only if all of them hide their releases: what is said of sums is not true of a machine without masks.
    secure = masked and trusts == {"secure-aggregation"}
    own = max(float(one["mu-guaranteed"]) for one in statements.values())
    figures = stated_figures(Figures(own, own if secure else None), statements, len(statements))
    # Whoever protects all data of a machine protects each sample.
    units = {one.get("unit") for one in statements.values()}
    unit = "machine" if units == {"machine"} else "owner" if units <= {"machine", "owner"} else "sample"
    words = stated_words(stated_values(statements, "mechanism"), masked=secure)
    return Guarantee(
        min(figures.mu, figures.mu_local or math.inf),
        min(stated_values(statements, "delta")),
        words or "noise on each machine, by its own account",
        trust="secure-aggregation" if secure else "untrusted-server",
        unit=unit,
        notes=(_UNCHECKED.format(said=len(statements), all=num_clients), *notes),
        mu_local=figures.mu_local if secure else None,
        min_honest=figures.min_honest if secure else None,
    )


def stated_values(statements: Statements, name: str) -> set[Any]:
    """The different values that machines state for something."""
    return {one[name] for one in statements.values() if name in one}
