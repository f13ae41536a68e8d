"""Privacy loss of a release: one loss under assumptions, one in the worst case.

Under secure aggregation a guarantee has two sides. One is *assumed*: it holds if enough other clients and one helper
are honest. The other, the *worst case*, holds whatever server, helpers and other clients do. They are spent, composed,
compared and printed together, so they are one value, a :class:`Loss`. Wherever nothing is assumed of others, both
sides are the same profile, and the loss is not ``conditional``.

Each side is a *privacy profile*: the smallest known delta for every epsilon. A :class:`Gaussian` one is exact and has
one number, mu. It may have an *added delta* as well: the probability with which a release shows something that mu does
not cover, such as the name of a value that a single record has. A :class:`Curve` is any upper bound on delta, such as
that of a secret order (:func:`~murmurfl.privacy.accounting.amplification.allocation_profile`). Every profile also has a
``mu``, a Gaussian that bounds it. It is infinite where none is known, so whatever counts in mu alone fails closed.

Formal guarantees
-----------------
Of profiles that bound what they are of, every result here is a bound again, for the same neighbouring relation:

* Composition is exact for Gaussians (Dong, Roth and Su 2022, corollary 3.3). Of curves it is the basic one: if the i-th
  of n mechanisms is (epsilon_i, delta / n)-DP, all together are (sum of epsilon_i, delta)-DP, also if each is chosen
  from the results of those before (Dwork, Kenthapadi et al. 2006). The smaller of both bounds counts.
* Added deltas add up. Each is a distance in total variation to a mechanism that mu covers
  (docs/proofs/sensitivities.md, 2j).
* A search for an epsilon or a delta returns the end of its interval at which the bound was found to hold.
* A multiple, a maximum and what is left of a budget are those of the Gaussians that bound both sides. Of a multiple of
  a profile with an added delta nothing is said: it has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .. import protocol
from ..errors import ConfigurationError
from .gdp import compose_gdp, gdp_delta, gdp_epsilon, gdp_mu

MOST_SUMMED = 2**11
"""Clients whose releases may be in one sum: each count stays below 2^52, so an int64 cannot wrap around."""
_BISECTIONS = 100
_LARGEST_EPSILON = 1e4
"""Largest epsilon that is searched for, if a curve has not come below a delta by then."""
_SMALLEST_DELTA = 1e-300


@dataclass(frozen=True)
class SumAssumption:
    """Assumption of a client's loss about every sum that its releases enter, under secure aggregation.

    Parameters
    ----------
    min_honest : int
        h, clients of every sum, this one among them, that do not work with the server. Nobody can check it.
    min_cohort : int
        n, the fewest releases of a sum: h, and as many as may work with the server. Helpers see to it.

    Examples
    --------
    >>> SumAssumption(min_honest=25, min_cohort=40)
    SumAssumption(min_honest=25, min_cohort=40)
    """

    min_honest: int = 1
    min_cohort: int = 1


NOTHING_ASSUMED = SumAssumption()
"""Assumption where releases are seen one by one, so that nobody else counts."""


def plain_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values, those of its ``sums`` by themselves: files have them so."""
    fields: dict[str, Any] = {}
    for name, found in asdict(value).items():
        fields |= found if name == "sums" else {name: found}
    return fields


class Profile(Protocol):
    """An upper bound on delta for every epsilon, for one neighbouring relation.

    Examples
    --------
    >>> from murmurfl.privacy import Curve, Gaussian
    >>> profiles = [Gaussian(1.0), Curve(bound=lambda epsilon: 1e-6)]
    >>> [round(profile.epsilon(1e-5), 3) for profile in profiles]
    [4.377, 0.0]
    """

    @property
    def mu(self) -> float:
        """A mu for which it is mu-GDP, but for the added delta; infinite if none is known."""
        ...

    @property
    def added_delta(self) -> float:
        """Delta at every epsilon in addition to that of mu."""
        ...

    def epsilon(self, delta: float) -> float:
        """Return the smallest known epsilon at a delta; infinite if there is none."""
        ...

    def delta(self, epsilon: float) -> float:
        """Return the smallest known delta at an epsilon, at most 1."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """The profile of mu-GDP, with an added delta where there is one; with an infinite mu nothing is guaranteed.

    Parameters
    ----------
    mu : float
        The parameter of Gaussian DP.
    added_delta : float
        Delta at every epsilon in addition to that of mu.

    Examples
    --------
    >>> round(Gaussian(1.0).epsilon(1e-5), 3), round(Gaussian(1.0, added_delta=9e-6).epsilon(1e-5), 3)
    (4.377, 4.887)
    >>> Gaussian(1.0, added_delta=1e-5).epsilon(1e-5)  # all of this delta is taken
    inf
    """

    mu: float
    added_delta: float = 0.0

    def __repr__(self) -> str:
        added = f", added_delta={self.added_delta!r}" if self.added_delta else ""
        return f"Gaussian(mu={self.mu!r}{added})"

    def epsilon(self, delta: float) -> float:
        """Return the exact epsilon at what the added delta leaves of a delta; infinite if it leaves nothing."""
        if self.added_delta == 0.0:
            return gdp_epsilon(self.mu, delta)
        left = math.nextafter(delta - self.added_delta, 0.0)  # rounding must not leave more
        return gdp_epsilon(self.mu, left) if left > 0.0 else math.inf

    def delta(self, epsilon: float) -> float:
        """Return the exact delta at an epsilon."""
        return min(gdp_delta(self.mu, epsilon) + self.added_delta, 1.0)


@dataclass(frozen=True)
class Curve:
    """A profile given by a function that bounds delta at every epsilon from above.

    Parameters
    ----------
    bound : callable
        Returns a delta for an epsilon >= 0.
    mu : float
        A mu for which it is mu-GDP as well; infinite if none is known.

    Examples
    --------
    >>> from math import exp
    >>> curve = Curve(bound=lambda epsilon: min(1.0, exp(1.0 - 2.0 * epsilon)))
    >>> round(curve.epsilon(delta=1e-5), 3), curve.mu
    (6.256, inf)
    """

    bound: Callable[[float], float]
    mu: float = math.inf

    @property
    def added_delta(self) -> float:
        """None: the bound is of all of delta."""
        return 0.0

    def epsilon(self, delta: float) -> float:
        """Return an epsilon at which the bound was found to be at most delta."""
        high = gdp_epsilon(self.mu, delta)
        if math.isinf(high):
            high = 1.0
            while self.bound(high) > delta:
                high *= 2.0
                if high > _LARGEST_EPSILON:
                    return math.inf
        return _least(0.0, high, lambda epsilon: self.bound(epsilon) <= delta)

    def delta(self, epsilon: float) -> float:
        """Return the smaller of the bound and of mu's delta."""
        return min(self.bound(epsilon), gdp_delta(self.mu, epsilon), 1.0)


@dataclass(frozen=True)
class _Composed:
    """Several profiles together, of which at least one is not Gaussian."""

    parts: tuple[Profile, ...]

    @property
    def mu(self) -> float:
        return math.hypot(*(part.mu for part in self.parts))

    @property
    def added_delta(self) -> float:
        return math.fsum(part.added_delta for part in self.parts)

    @property
    def _gaussian(self) -> Gaussian:
        return Gaussian(self.mu, self.added_delta)

    def epsilon(self, delta: float) -> float:
        each = math.fsum(part.epsilon(delta / len(self.parts)) for part in self.parts)
        return min(each, self._gaussian.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        low, high = math.log(_SMALLEST_DELTA), math.log(0.5)
        if self.epsilon(math.exp(high)) > epsilon:
            return self._gaussian.delta(epsilon)
        least = _least(low, high, lambda logarithm: self.epsilon(math.exp(logarithm)) <= epsilon)
        return min(math.exp(least), self._gaussian.delta(epsilon))


def _least(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Return a value at which something holds, as close to where it begins to as bisections come."""
    if holds(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def compose_profiles(profiles: Iterable[Profile]) -> Profile:
    """Return the profile of several mechanisms together, each of which may be chosen from the results of others.

    Examples
    --------
    >>> compose_profiles([Gaussian(3.0), Gaussian(4.0)])
    Gaussian(mu=5.0)
    """
    gaussian: list[Gaussian] = []
    others: list[Profile] = []
    for profile in profiles:
        for part in profile.parts if isinstance(profile, _Composed) else (profile,):
            if isinstance(part, Gaussian):
                gaussian.append(part)
            else:
                others.append(part)
    exact = Gaussian(math.hypot(*(one.mu for one in gaussian)), math.fsum(one.added_delta for one in gaussian))
    if not others:
        return exact
    parts = (exact, *others) if exact.mu or exact.added_delta else tuple(others)
    return parts[0] if len(parts) == 1 else _Composed(parts)


@dataclass(frozen=True)
class Loss:
    """A privacy loss: what it is if others are honest as assumed, and in the worst case.

    Parameters
    ----------
    assumed : Profile
        What holds under the assumptions on other clients and helpers.
    worst_case : Profile
        What holds whatever server, helpers and other clients do; the same as ``assumed`` where nothing is assumed.
    conditional : bool
        Whether ``assumed`` rests on an assumption, so that both sides are stated.

    Notes
    -----
    **Formal guarantees.** Both sides bound the same releases for the same neighbouring relation. Every operation keeps
    each on its side, and returns bounds (module description).

    Examples
    --------
    >>> session = Loss.of(1.0, 5.0)
    >>> session.compose(session, session, session)
    Loss(assumed=Gaussian(mu=2.0), worst_case=Gaussian(mu=10.0), conditional=True)
    """

    assumed: Profile
    worst_case: Profile
    conditional: bool = True

    @classmethod
    def of(cls, mu: float, mu_local: float | None = None) -> Loss:
        """Return the loss of a mu, and of what holds without the assumption; None if there is no assumption."""
        assumed = Gaussian(mu)
        return cls(assumed, assumed if mu_local is None else Gaussian(mu_local), mu_local is not None)

    @classmethod
    def stated(cls, statement: Mapping[str, Any]) -> Loss:
        """Read the loss that a client states; a statement of mu alone rests on no other client."""
        local = statement.get(protocol.MU_LOCAL)
        return cls.of(float(statement[protocol.MU_GUARANTEED]), None if local is None else float(local))

    def statement(self) -> dict[str, float]:
        """Return the entries that a client states; what holds in the worst case only if it is another figure.

        They are of mu alone, so one with an added delta states an infinite one.
        """
        if self.added_delta:
            return self.times(1.0).statement()
        local = {protocol.MU_LOCAL: self.worst_case.mu} if self.conditional else {}
        return {protocol.MU_GUARANTEED: self.assumed.mu, **local}

    def with_added(self, delta: float) -> Loss:
        """Return the loss with this much more added delta on both sides."""
        return self._each(lambda side: Gaussian(side.mu, side.added_delta + delta)) if delta else self

    @property
    def mu(self) -> float:
        """Mu under the assumptions, but for the added delta; infinite where no mu holds."""
        return self.assumed.mu

    @property
    def added_delta(self) -> float:
        """Delta at every epsilon in addition to that of mu."""
        return self.assumed.added_delta

    @property
    def mus(self) -> tuple[float, float | None]:
        """Mu, and mu in the worst case if it is stated by itself: the two entries of files and documents."""
        return self.assumed.mu, self.worst_case.mu if self.conditional else None

    def document(self, delta: float) -> dict[str, float | None]:
        """Return both sides at a delta as entries of a document; None for infinity, and where nothing is assumed."""
        sides = {"": self.assumed, **({"_local": self.worst_case} if self.conditional else {})}
        made: dict[str, float | None] = dict.fromkeys(("mu", "epsilon", "mu_local", "epsilon_local"))
        for suffix, profile in sides.items():
            for name, value in (("mu", profile.mu), ("epsilon", profile.epsilon(delta))):
                made[name + suffix] = value if math.isfinite(value) else None
        return made

    def compose(self, *others: Loss) -> Loss:
        """Return the loss of this and others together."""
        return self._each(lambda *sides: compose_profiles(sides), *others)

    def times(self, factor: float) -> Loss:
        """Return a multiple, such as that of a group of several neighbours' units."""
        return self._each(lambda side: Gaussian(math.inf if side.added_delta else side.mu * factor))

    def less_added(self, added_delta: float, delta: float) -> Loss:
        """Return this budget, which fixes an epsilon at ``delta``, as mus that keep to it with an added delta.

        Notes
        -----
        **Formal guarantees.** What stays within the result, and has this added delta in addition, has an epsilon at
        ``delta`` within the budget's. Nothing stays within it if the added delta is the whole delta.

        Examples
        --------
        >>> budget = Loss.of(1.0)
        >>> left = budget.less_added(1e-6, 1e-5).with_added(1e-6)
        >>> round(left.mu, 4), abs(left.assumed.epsilon(1e-5) - budget.assumed.epsilon(1e-5)) < 1e-9
        (0.9952, True)
        """
        if not added_delta:
            return self
        rest = math.nextafter(delta - added_delta, 0.0)

        def within(side: Profile) -> Gaussian:
            if math.isinf(side.mu):
                return Gaussian(side.mu)
            return Gaussian(gdp_mu(gdp_epsilon(side.mu, delta), rest) if rest > 0.0 else 0.0)

        return self._each(within)

    def left_of(self, spent: Loss, delta: float | None = None) -> Loss:
        """Return what is left of this budget, on each side: what composed with ``spent`` gives the budget again.

        The budget fixes an epsilon at ``delta``, which must be given where ``spent`` has an added delta.
        """
        if spent.added_delta and delta is None:
            raise ConfigurationError("Expected a delta with an added one, got none.", kind="missing", setting="delta")
        budget = self.less_added(spent.added_delta, delta or 0.0)
        return budget._each(lambda side, used: Gaussian(_left_of(side.mu, used.mu)), spent)

    def tightened(self) -> Loss:
        """Return the loss with what holds in the worst case on both sides, if that is less: it always holds."""
        return Loss(self.worst_case, self.worst_case, self.conditional) if self.worst_case.mu < self.mu else self

    def under_weaker(self, factor: float) -> Loss:
        """Return the loss under a weaker assumption, under which mu is a multiple; in the worst case it is the same."""
        return Loss(Gaussian(self.mu * factor, self.added_delta), self.worst_case, self.conditional).tightened()

    def unconditional(self) -> Loss:
        """Return what is left of it if nothing is assumed of others."""
        return Loss(self.worst_case, self.worst_case, conditional=False)

    def _each(self, operation: Callable[..., Profile], *others: Loss) -> Loss:
        conditional = any(loss.conditional for loss in (self, *others))
        assumed = operation(self.assumed, *(loss.assumed for loss in others))
        if not conditional:
            return Loss(assumed, assumed, conditional=False)
        return Loss(assumed, operation(self.worst_case, *(loss.worst_case for loss in others)))


NO_LOSS = Loss.of(0.0)
"""The loss of no release."""


def as_loss(value: Loss | float) -> Loss:
    """Return a loss; a number is the mu of one that assumes nothing of others."""
    return value if isinstance(value, Loss) else Loss.of(value)


def total_loss(losses: Iterable[Loss]) -> Loss:
    """Return the loss of all sessions of a ledger together, in mu.

    Squares are summed exactly, as ledgers have always counted: a figure must not differ in its last bit between two
    versions that read one file.
    """
    every = list(losses)
    local = compose_gdp(loss.worst_case.mu for loss in every) if any(loss.conditional for loss in every) else None
    made = Loss.of(compose_gdp(loss.assumed.mu for loss in every), local)
    return made.with_added(math.fsum(loss.added_delta for loss in every))


def weakest_loss(losses: Iterable[Loss]) -> Loss:
    """Return a loss that is true of whatever any of the losses is true of: the largest mu of each side."""
    every = list(losses)
    if not every:
        raise ConfigurationError("Expected at least one loss, got none.", kind="out-of-range", setting="losses")
    local = max(loss.worst_case.mu for loss in every) if any(loss.conditional for loss in every) else None
    made = Loss.of(max(loss.assumed.mu for loss in every), local)
    return made.with_added(max(loss.added_delta for loss in every))


def _left_of(budget_mu: float, spent_mu: float) -> float:
    return math.sqrt(max(budget_mu**2 - spent_mu**2, 0.0))
