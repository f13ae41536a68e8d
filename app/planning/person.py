"""What a guarantee becomes for a person with several samples, on one machine or on several (``murmurfl plan``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from ...privacy import Guarantee, gdp_epsilon, person_mu, rounded_up
from ...privacy.machine.policy import MOST_SUMMED
from ...privacy.noise.normals import range_problem, summed_range_problem

OWNERS_UNDECIDED = "What to take was decided for samples by themselves; the table of mechanisms is of owners."

USUAL = 3
"""Samples, and machines, of the person that is told of where nobody asks for another."""


@dataclass(frozen=True)
class Person:
    """A guarantee worked out for somebody with samples on several machines.

    Parameters
    ----------
    guarantee : Guarantee
        For one sample, or for one owner on one machine; of each machine.
    machines : int
        j.
    samples : int
        On each of them; 1 where the unit is an owner, whose samples count as one.
    values : int
        Of noise, in all releases of a machine: what the range of the normals costs depends on it.

    Notes
    -----
    The figures hold if the guarantee is that of each machine, where the range of exact noise allows them; they are
    infinite elsewhere. Each machine's share of delta for that range, below 2^-20 delta, counts once a machine.
    """

    guarantee: Guarantee
    machines: int
    samples: int
    values: int

    @property
    def mu(self) -> float:
        """Of all that person's samples together."""
        return self._vouched(self._of(self.guarantee.mu, self.guarantee.mu_local))

    @property
    def mu_local(self) -> float | None:
        """The same whatever happens, under secure aggregation; None under another trust model."""
        local = self.guarantee.mu_local
        if local is None:
            return None
        figure = person_mu(local, machines=self.machines, samples=self.samples)
        return self._in_range(figure, self.samples * local)

    def _of(self, mu: float, mu_local: float | None) -> float:
        known = {"machines": self.machines, "samples": self.samples, "trust": self.guarantee.trust}
        return person_mu(mu, **known, mu_local=mu_local)

    def _vouched(self, figure: float) -> float:
        guarantee = self.guarantee
        if guarantee.trust != "secure-aggregation":
            # A machine's noise must reach over what is moved on it, and a server's over everything.
            moved = figure if guarantee.trust == "trusted-server" else self.samples * guarantee.mu
            return self._in_range(figure, moved)
        sound = not summed_range_problem(self.values * MOST_SUMMED, guarantee.delta, figure)
        return figure if sound else math.inf

    def _in_range(self, figure: float, moved: float) -> float:
        """The figure, if noise reaches over one value that takes all of the move: more than any other would."""
        sound = moved == 0.0 or not range_problem(moved, self.values, self.guarantee.delta, moved)
        return figure if sound and math.isfinite(moved) else math.inf

    def document(self) -> dict[str, Any]:
        """Everything as plain values; None for what nothing is vouched for."""
        local = self.mu_local
        figures = {"mu": self.mu, "epsilon": self._epsilon(self.mu), "mu_local": local}
        figures["epsilon_local"] = None if local is None else self._epsilon(local)
        shown = {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}
        return {"machines": self.machines, "samples": self.samples, **shown}

    def _epsilon(self, mu: float) -> float:
        return gdp_epsilon(mu, self.guarantee.delta)

    @property
    def words(self) -> str:
        """Who it is, and the figures, for a sentence."""
        owner = self.guarantee.unit == "owner"
        held = "all samples" if owner else _counted(self.samples, "sample")
        each = "each of " if self.machines > 1 else ""
        figures = self._figures(self.mu)
        if self.mu_local is not None:
            figures += f", whatever happens {self._figures(self.mu_local)}"
        return f"with {held} on {each}{_counted(self.machines, 'machine')}: {figures}"

    def _figures(self, mu: float) -> str:
        if math.isinf(mu):
            return "more than this noise can be vouched for"
        return f"mu = {rounded_up(mu)} (epsilon = {rounded_up(self._epsilon(mu))})"


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


class Claim(Protocol):
    """What makes a claim of a machine's sample: a choice, or a plan."""

    @property
    def guarantee(self) -> Guarantee: ...

    @property
    def noise_values(self) -> int:
        """How many values of noise all releases have."""
        ...


@dataclass(frozen=True)
class Asked:
    """Which person is asked about; without any, one of several samples and one of several machines.

    Parameters
    ----------
    machines, samples : int or None
        As for :class:`Person`.
    """

    machines: int | None = None
    samples: int | None = None

    def of(self, claim: Claim) -> list[Person]:
        """What a claim becomes for them; empty where nothing is claimed."""
        guarantee, values = claim.guarantee, claim.noise_values
        owner = guarantee.unit == "owner"
        if not math.isfinite(guarantee.mu):
            return []
        if self.machines is not None or self.samples is not None:
            # All samples that an owner has on a machine are one row of it, however many they are.
            return [Person(guarantee, self.machines or 1, 1 if owner else self.samples or 1, values)]
        several = Person(guarantee, USUAL, 1, values)
        return [several] if owner else [Person(guarantee, 1, USUAL, values), several]


def person_lines(persons: list[Person]) -> list[str]:
    """What people read."""
    if not persons:
        return []
    return [f"Somebody {'; '.join(person.words for person in persons)}."]
