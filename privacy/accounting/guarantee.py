"""Conditions under which an epsilon holds, in one standard sentence: nothing in murmurfl shows an epsilon without it.

A :class:`Guarantee` carries what makes an epsilon mean something: delta, the unit that is protected, the neighbouring
relation, against whom it holds, and whose noise of which mechanism. Under secure aggregation two figures belong
together: one if enough clients are honest, one in the worst case. It is said in one way only: by
:attr:`Guarantee.sentence`, and by :func:`caption` for a table or figure with many of them. The words come from the
policy that was used (:func:`policy_guarantee`, :func:`server_guarantee`). What clients of a federation state of
themselves becomes one guarantee that is true of all of them (:func:`stated_guarantee`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypedDict, get_args

from .. import protocol
from ..errors import ConfigurationError
from ..release.policy import NO_NOISE, TRUST_MODELS, PrivacyPolicy, Trust
from .amplification import Amplification
from .gdp import check_count, gdp_best_guess
from .loss import Loss, Profile, SumAssumption, as_loss, weakest_loss
from .noise_plan import NOBODY_ASKED, server_noise_words, stated_words

_GUESSED = {
    "sample": ("whether one sample of a client was used, or another in its place,", "every other sample"),
    "owner": (
        "whether one owner's samples on a client were used, or any others of that owner in their place,",
        "every other owner",
    ),
    "client": ("whether the samples of one client were used, or any others in their place,", "every other client's"),
}
_GUESSERS = {
    "untrusted-server": "the server and everybody else, even if they know",
    "secure-aggregation": "the server and everybody else, even if they know",
    "trusted-server": "everybody but the trusted server, even if they know",
}


def plain_meaning(
    loss: Loss | float,
    unit: str = "sample",
    trust: str = "untrusted-server",
    min_honest: int | None = None,
) -> str:
    """Return what a loss means, in plain words; empty where nothing is guaranteed.

    A number is a mu. A guarantee has it as :attr:`murmurfl.privacy.Guarantee.meaning`.

    Notes
    -----
    Whoever holds two neighbouring data sets, equally likely before, and sees all that the mu is of, tells which of them
    was used with probability Phi(mu / 2) at most (:func:`~murmurfl.privacy.gdp_best_guess`), and with Gaussian noise in
    the worst case with no less. Percentages are rounded up. What is said of a single person is true where a person is
    one unit (:func:`~murmurfl.privacy.person_loss`).

    Examples
    --------
    >>> print(plain_meaning(1.0))  # doctest: +NORMALIZE_WHITESPACE
    The best guess whether one sample of a client was used, or another in its place, is right at most 69.2 % of the
    time; tossing a coin is right 50 % of the time. This holds for the server and everybody else, even if they know
    every other sample.
    """
    loss = as_loss(loss)
    if not math.isfinite(loss.mu):
        return ""
    guessed, known = _GUESSED[unit]
    meaning = (
        f"The best guess {guessed} is right at most {right_at_most(loss.mu, loss.added_delta)} of the time; tossing a "
        f"coin is right 50 % of the time. This holds for {_GUESSERS[trust]} {known}"
    )
    if not loss.conditional or min_honest is None:
        return f"{meaning}."
    worst = loss.worst_case.mu
    local = f"at most {right_at_most(worst, loss.added_delta)}" if math.isfinite(worst) else "nothing is promised"
    honest = f"{min_honest} client{'s' * (min_honest != 1)}"
    return f"{meaning}, if one helper and {honest} of each sum are honest; if not, {local}."


def right_at_most(mu: float, added_delta: float = 0.0) -> str:
    """Return how often the best guess is right at most, rounded up.

    An added delta is a distance in total variation, of which a guess between two gains half.
    """
    return f"{min(math.ceil(1000 * (gdp_best_guess(mu) + added_delta / 2) - 1e-9) / 10, 100.0):g} %"


def rounded_up(value: float, digits: int = 4, *, places: int | None = None) -> str:
    """Return a mu or an epsilon for people, never below what it is.

    In significant ``digits``, or in decimal ``places``.

    Examples
    --------
    >>> rounded_up(24.3812), rounded_up(4.0), rounded_up(4.371, places=2), rounded_up(float("inf"))
    ('24.39', '4', '4.38', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    rounded = Decimal(f"{value:.{digits - 1}e}" if places is None else f"{value:.{places}f}")
    if float(rounded) < value * (1 - 1e-9):  # beyond what rounding in float64 may have added
        rounded += Decimal((0, (1,), rounded.adjusted() - digits + 1 if places is None else -places))
    return f"{float(rounded):.{digits}g}" if places is None else f"{rounded:.{places}f}"


def rounded_down(value: float, digits: int = 4) -> str:
    """Return what is left of a mu or an epsilon for people, never above what it is, in significant ``digits``.

    Examples
    --------
    >>> rounded_down(1.7677), rounded_down(4.0), rounded_down(0.0), rounded_down(float("inf"))
    ('1.767', '4', '0', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    rounded = Decimal(f"{value:.{digits - 1}e}")
    if float(rounded) > value * (1 + 1e-9):  # beyond what rounding in float64 may have taken
        rounded -= Decimal((0, (1,), rounded.adjusted() - digits + 1))
    return f"{float(rounded):.{digits}g}"


Unit = Literal["sample", "owner", "client"]
UNITS: tuple[Unit, ...] = get_args(Unit)
Relation = Literal["replacement"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)

UNIT_WORDS: Mapping[str, str] = {
    "sample": "one sample of one client",
    "owner": "all samples of one owner on one client",
    "client": "all samples of one client",
}
_REPLACED_BY: Mapping[str, str] = {"owner": " by others of that owner"}
"""Replacement of a unit, where it is not just any other: samples under another owner's name would move two owners."""
SAME_OWNER = "On clients that protect owners a sample is replaced by one of the same owner."
"""Note where clients, or sessions, of owners and of samples have one figure together."""
AGAINST: dict[Trust, str] = {
    "untrusted-server": "against the server and everybody else",
    "secure-aggregation": "against the server and everybody else",
    "trusted-server": "against everybody but the trusted server",
}

CURATED = "The computer that trained sees every row; everybody else is given only what it released."
"""Note where one computer with all rows, a trusted curator, takes the place of the clients: there is no server."""
CURATED_NOISE = "{mechanisms} noise of that computer"
"""Noise next to :data:`CURATED`, by its mechanisms."""
AGAINST_OTHERS = "against everybody but the computer that trained, a trusted curator"
_OTHERS = "everybody but the computer that trained, even if they know"

SESSION = "over all releases its cap allows"
PUBLISHED = "over all models it publishes"
SIMULATED = "Simulated with seeded keys."
REHEARSED = "REHEARSAL: the clients were simulated, so nobody was protected."
"""Note on a training of one's own project whose clients Flower simulated."""
FAST_NOISE = "Fast simulation noise: a figure for research, no guarantee for the data used."
NOT_PRIVATE = "Not private: for comparison only."
NOTHING_SPENT = "No private sample was used: nothing is spent."
GIVEN_SCHEMA = "a schema that does not come from these {records}"
"""Condition of every guarantee for records that are read by a schema: nobody can check where a schema came from."""
GIVEN_DECLARATIONS = (
    "declarations that do not come from these rows; the rest of the schema was released with noise, and the ledger "
    "counts it"
)
"""The condition where a ledger has paid for everything in the schema that nobody declared."""
PAID_ROW = "row of a paid schema"
"""Kind of a record that is read by a schema of which nothing else comes from the rows than releases in the ledger."""
RECORDS = {
    "row": "A sample is one row of a client's file. The guarantee holds given "
    f"{GIVEN_SCHEMA.format(records='rows')}: a reviewed draft shows something of them.",
    PAID_ROW: f"A sample is one row of a client's file. The guarantee holds given {GIVEN_DECLARATIONS}.",
    "item": "A sample is one item as a client's code handed it over, if what made the items treats each by itself. "
    f"The guarantee holds given {GIVEN_SCHEMA.format(records='items')}: a reviewed draft shows something of them.",
}
"""Sentences on what a sample is, a row that murmurfl read from a file or an item that was handed over, and on what the
guarantee is conditional."""
IN_HIDING = "While nobody learns which of {slots} releases {row} is in, epsilon = {epsilon} at the same delta."
IN_BATCHES = (
    "While nobody but that server learns in which of {slots} rounds {row} is, in each with probability {rate:.3g}, "
    "epsilon = {epsilon} at the same delta."
)
ESTIMATED = "If nobody learns which of {slots} releases {row} is in, an estimate of epsilon is {epsilon}, no guarantee."
BEYOND_RANGE = "mu = {mu:g} at delta = {delta:g} is more than this noise can be vouched for."
"""Note on a policy whose mu is so large that the range of the normals shows (:mod:`murmurfl.privacy.noise`)."""


@dataclass(frozen=True, init=False)
class Guarantee:
    """A loss, and everything that must be said for its epsilon to mean something.

    Parameters
    ----------
    loss : Loss or float
        What all the releases cost; a number is the mu of Gaussian DP against everybody. Under ``secure-aggregation``,
        and only there, it is conditional: its worst case holds whatever server, helpers and other clients do. Infinite
        where nothing is guaranteed.
    delta : float
        Where epsilon is shown.
    mechanism : str
        Whose noise of which mechanism, such as ``cancelling (uniform) noise on each client``.
    trust : {"untrusted-server", "secure-aggregation", "trusted-server"}
        Against whom it holds.
    unit : {"sample", "owner", "client"}
        What is protected as a whole.
    relation : {"replacement"}
        How neighbouring data sets differ: the unit is replaced by any other of its kind.
    covers : str
        Which releases the figure is true of.
    notes : tuple of str
        Sentences about what the figure rests on.
    min_honest : int, optional
        How many clients of each sum must be honest for what the loss assumes, the one it protects among them. Under
        ``secure-aggregation``, and only there.
    amplified : Amplification, optional
        What a secret order makes of epsilon, or an estimate of that. ``loss`` and ``epsilon`` are without it.

    Notes
    -----
    **Formal guarantees.** Its figures are for replacement of one ``unit`` under what ``trust`` assumes. Whoever makes
    it vouches for the loss; figures are rounded up, so that nobody reads a smaller one than holds.

    Examples
    --------
    >>> print(Guarantee(1.0, 1e-5, "tree noise on each client"))  # doctest: +NORMALIZE_WHITESPACE
    mu = 1 Gaussian DP, epsilon = 4.378 at delta = 1e-05, for replacement of one sample of one client, against the
    server and everybody else; tree noise on each client; over all releases its cap allows.
    >>> sums = Guarantee(Loss.of(1.0, 7.0711), 1e-5, "tree noise", trust="secure-aggregation", min_honest=50)
    >>> print(sums)  # doctest: +NORMALIZE_WHITESPACE
    mu = 1 Gaussian DP, epsilon = 4.378 at delta = 1e-05, for replacement of one sample of one client, against the
    server and everybody else if one helper and 50 clients of each sum are honest, and mu = 7.072, epsilon = 54.38
    in the worst case; tree noise; over all releases its cap allows.
    """

    loss: Loss
    delta: float
    mechanism: str
    trust: Trust
    unit: Unit
    relation: Relation
    covers: str
    notes: tuple[str, ...]
    min_honest: int | None
    amplified: Amplification | None

    def __init__(
        self,
        loss: Loss | float,
        delta: float,
        mechanism: str,
        trust: Trust = "untrusted-server",
        unit: Unit = "sample",
        relation: Relation = "replacement",
        covers: str = SESSION,
        notes: tuple[str, ...] = (),
        min_honest: int | None = None,
        amplified: Amplification | None = None,
    ) -> None:
        self.__dict__.update(loss=as_loss(loss), delta=delta, mechanism=mechanism, trust=trust, unit=unit)
        self.__dict__.update(relation=relation, covers=covers, notes=notes, min_honest=min_honest, amplified=amplified)
        self._check()

    def _check(self) -> None:
        """Raise if a term is unknown, or a figure comes without what it rests on."""
        for name, allowed in (("trust", TRUST_MODELS), ("unit", UNITS), ("relation", RELATIONS)):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"Expected {name} one of {allowed}, got {getattr(self, name)!r}.", kind="unknown-name", setting=name
                )
        for name in ("mechanism", "covers"):
            if not getattr(self, name).strip():
                raise ConfigurationError(
                    f"Expected {name} of a guarantee in words, got an empty text.", kind="missing", setting=name
                )
        self.loss.document(self.delta)  # the checks of all figures
        self._check_sums()

    def _check_sums(self) -> None:
        """Raise if one figure of secure aggregation comes without the other, or without what it rests on."""
        given = {"a loss in the worst case": self.loss.conditional, "min_honest": self.min_honest is not None}
        missing = [name for name, is_given in given.items() if not is_given]
        if self.trust != "secure-aggregation":
            if len(missing) < len(given):
                raise ConfigurationError(
                    f"Expected {' and '.join(given)} only with trust 'secure-aggregation', got {self.loss} and "
                    f"{self.min_honest!r} with {self.trust!r}.",
                    kind="conflict",
                    setting="min_honest",
                )
            return
        if missing:
            raise ConfigurationError(
                f"Expected {' and '.join(missing)} of a guarantee with trust 'secure-aggregation', got None: its mu is "
                "not shown without what it rests on and the worst case.",
                kind="missing",
            )
        check_count("min_honest", self.min_honest)

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of what is assumed; infinite where nothing is guaranteed."""
        return self.loss.mu

    @property
    def epsilon(self) -> float:
        """Epsilon at delta; infinite where nothing is guaranteed."""
        return self.loss.assumed.epsilon(self.delta)

    @property
    def terms(self) -> str:
        """All terms without the figures, to stand once above a table."""
        return f"{self.protects}; {self.mechanism}; {self.covers}"

    @property
    def protects(self) -> str:
        """Protection without the mechanism: where epsilon is shown, what is protected, and against whom."""
        return self.protected("" if self.min_honest is None else str(self.min_honest))

    @property
    def against(self) -> str:
        """Against whom the guarantee holds."""
        return AGAINST_OTHERS if CURATED in self.notes else AGAINST[self.trust]

    def protected(self, honest: str) -> str:
        """Return the text of :attr:`protects` with another word for the number of honest clients, such as ``h``."""
        replaced = f"{self.relation} of {UNIT_WORDS[self.unit]}{_REPLACED_BY.get(self.unit, '')}"
        protects = f"at delta = {self.delta:g}, for {replaced}, {self.against}"
        if self.min_honest is None:
            return protects
        clients = "client" if honest == "1" else "clients"
        return f"{protects} if one helper and {honest} {clients} of each sum are honest"

    @property
    def whatever_happens(self) -> str:
        """Figures that need nobody's honesty, for a sentence; empty unless under secure aggregation."""
        if not self.loss.conditional:
            return ""
        figures = _figures(self.loss.worst_case, self.delta)
        return f"{figures} in the worst case" if figures else "nothing if they are not"

    @property
    def sentence(self) -> str:
        """The guarantee in one standard sentence, and its notes."""
        figures = (
            _figures(self.loss.assumed, self.delta, " Gaussian DP") or "Nothing is guaranteed, epsilon is infinite"
        )
        local = f", and {self.whatever_happens}" if self.whatever_happens else ""
        sentences = [f"{figures} {self.protects}{local}; {self.mechanism}; {self.covers}.", self.of_secret_order]
        return " ".join([*filter(None, sentences), *self.notes])

    @property
    def of_secret_order(self) -> str:
        """Effect of a secret order on epsilon, in a sentence of its own; empty where there is none."""
        if self.amplified is None:
            return ""
        found, row = self.amplified, "an owner" if self.unit == "owner" else "a sample"
        template = IN_BATCHES if found.rate else IN_HIDING if found.proved else ESTIMATED
        return template.format(row=row, slots=found.slots, rate=found.rate, epsilon=rounded_up(found.epsilon))

    @property
    def meaning(self) -> str:
        """Meaning of mu in plain words (:func:`~murmurfl.privacy.accounting.guarantee.plain_meaning`)."""
        words = plain_meaning(self.loss, self.unit, self.trust, self.min_honest)
        return words.replace(_GUESSERS[self.trust], _OTHERS) if CURATED in self.notes else words

    def __str__(self) -> str:
        return self.sentence

    def document(self) -> dict[str, Any]:
        """Everything as plain values; None for what is infinite, and for what only secure aggregation has."""
        figures = self.loss.document(self.delta)
        return {
            "mu": figures["mu"],
            "epsilon": figures["epsilon"],
            "delta": self.delta,
            "unit": self.unit,
            "relation": self.relation,
            "trust": self.trust,
            "mu_local": figures["mu_local"],
            "epsilon_local": figures["epsilon_local"],
            "min_honest": self.min_honest,
            "epsilon_amplified": None if self.amplified is None else self.amplified.epsilon,
            "amplified_proved": None if self.amplified is None else self.amplified.proved,
            "mechanism": self.mechanism,
            "covers": self.covers,
            "notes": list(self.notes),
            "sentence": self.sentence,
            "meaning": self.meaning,
        }


class _Sums(TypedDict, total=False):
    """Arguments of a guarantee under secure aggregation only."""

    trust: Trust
    min_honest: int


def _figures(profile: Profile, delta: float, of_mu: str = "") -> str:
    """Return mu, if there is one, and epsilon of a profile in words; empty where nothing is guaranteed."""
    if math.isinf(profile.epsilon(delta)):
        return ""
    epsilon = f"epsilon = {rounded_up(profile.epsilon(delta))}"
    if math.isinf(profile.mu):
        return epsilon
    return f"mu = {rounded_up(profile.mu)}{of_mu}{added_words(profile)}, {epsilon}"


def added_words(profile: Profile) -> str:
    """Return the added delta of a profile in words, to follow its mu; empty if it has none.

    Examples
    --------
    >>> from murmurfl.privacy import Gaussian
    >>> added_words(Gaussian(1.0, added_delta=1.2345e-6))
    ' with an added delta of 1.235e-06'
    """
    return f" with an added delta of {rounded_up(profile.added_delta)}" if profile.added_delta else ""


def policy_guarantee(
    policy: PrivacyPolicy,
    loss: Loss | float,
    *,
    covers: str = SESSION,
    unit: Unit | None = None,
    notes: Iterable[str] = (),
    words: str = "",
    stated: bool = False,
    amplified: Amplification | None = None,
) -> Guarantee:
    """Return the guarantee of a loss under a client's policy, in the policy's own words.

    Under a trusted server a client alone can vouch for nothing: use :func:`server_guarantee`.

    Parameters
    ----------
    loss : Loss or float
        That of its noise plan, or of several clients the largest, with a worst case under ``secure-aggregation``. A
        number is a mu. Infinite where the client adds no noise, 0 if no client is asked for a release.
    covers : str
        Which releases it is true of.
    unit : {"sample", "owner", "client"}, optional
        What the policy's participations were counted for; default the policy's own.
    notes : iterable of str
        Further sentences about what the figure rests on.
    words : str
        In the place of the policy's: what real clients say of themselves (:func:`stated_words`).
    stated : bool
        Whether mu is what real clients say, or are expected to say: then it is theirs to explain why it is infinite.
    amplified : Amplification, optional
        What the policy's secret order is worth (:func:`~murmurfl.privacy.accounting.amplification.amplification_of`).

    Notes
    -----
    **Formal guarantees.** Says what mu is true of under the policy: of which neighbours, against whom and if who is
    honest. Never shows a figure where the policy adds no noise.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0)
    >>> policy_guarantee(policy, 1.0).trust
    'untrusted-server'
    """
    unit, loss = unit or policy.unit, as_loss(loss)
    if loss.mu == 0.0:
        return Guarantee(0.0, policy.delta, NOBODY_ASKED, unit=unit, covers=covers, notes=(NOTHING_SPENT, *notes))
    if not policy.adds_noise:
        # A client that trusts its server is private towards everybody else; one without any noise is not.
        notes = (NOT_PRIVATE, *notes) if policy.mechanism == NO_NOISE else tuple(notes)
        return Guarantee(math.inf, policy.delta, policy.words, unit=unit, covers=covers, notes=notes)
    sums: _Sums = {}
    if policy.trust == "secure-aggregation":
        sums = {"trust": policy.trust, "min_honest": policy.sums.min_honest}
        loss = loss.tightened()
    notes = (*_quality_and_range(policy, loss.mu, stated), *notes)
    amplified = amplified if math.isfinite(loss.mu) else None
    return Guarantee(
        loss, policy.delta, words or policy.words, unit=unit, covers=covers, notes=notes, amplified=amplified, **sums
    )


def server_guarantee(
    policy: PrivacyPolicy,
    mu: float,
    noise: str,
    rounds: int | None = None,
    *,
    notes: Iterable[str] = (),
    stated: bool = False,
    amplified: Amplification | None = None,
) -> Guarantee:
    """Return what a trusted server guarantees to everybody else: the mu of the clients' policy, which it has to keep.

    ``mu`` is of all models the server publishes; infinite where its noise cannot serve the policy. ``noise`` is a
    mechanism's name, or ``fresh``; ``amplified`` is what Poisson batches are worth
    (:func:`~murmurfl.privacy.accounting.poisson.sampling_amplification`). The rest is as for :func:`policy_guarantee`.

    Notes
    -----
    **Formal guarantees.** Says what mu is true of under a trusted server: replacement of one sample of one client,
    against everybody but the server. With mechanism ``none`` it says that nothing is guaranteed, against anybody.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> policy = PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0, trust="trusted-server")
    >>> server_guarantee(policy, 1.0, "tree").trust
    'trusted-server'
    """
    if policy.trust != "trusted-server":
        raise ConfigurationError(
            f"Expected a policy with trust 'trusted-server', got {policy.trust!r}.",
            kind="conflict",
            setting="trust",
            got=policy.trust,
        )
    if policy.mechanism == NO_NOISE:
        return policy_guarantee(policy, math.inf, notes=notes)
    words, notes = server_noise_words(noise, rounds), (*_quality_and_range(policy, mu, stated), *notes)
    amplified = amplified if math.isfinite(mu) else None
    return Guarantee(
        *(mu, policy.delta, words),
        trust=policy.trust,
        unit=policy.unit,
        covers=PUBLISHED,
        notes=notes,
        amplified=amplified,
    )


def _quality_and_range(policy: PrivacyPolicy, mu: float, stated: bool) -> tuple[str, ...]:
    """Return notes on noise for simulation only, and on a mu that noise cannot be vouched for."""
    fast = () if policy.noise_quality == "exact" else (FAST_NOISE,)
    if stated or not math.isinf(mu):
        return fast
    return (*fast, BEYOND_RANGE.format(mu=policy.mu, delta=policy.delta))


WORST_CASE_SENTENCE = "The worst case rests on nobody else's honesty: no server's, helper's or client's."
"""Note beside a column with these figures."""


def caption(guarantees: Iterable[tuple[str, Guarantee]], *, in_columns: bool = False) -> str:
    """Return the terms of many epsilons, to stand once beside their table or figure.

    Parameters
    ----------
    guarantees : iterable of pairs
        The name of a row or column, and its guarantee; guarantees with the same terms are said once. What holds
        in the worst case, under secure aggregation, is said of each, and so is what a secret order is worth.
    in_columns : bool
        Whether the table has columns for h, the honest clients of each sum, and for the worst case: then
        both are said in words, and once.

    Examples
    --------
    >>> from murmurfl.privacy import Guarantee
    >>> print(caption([("mu2", Guarantee(1.0, 1e-5, "noise on each client"))])[:10])
    Epsilon is
    """
    # Labels in their order, by mechanism, by all other terms.
    groups: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    notes: dict[str, None] = {}
    local: dict[str, dict[str, None]] = {}
    hidden: dict[str, dict[str, None]] = {}
    for label, guarantee in guarantees:
        protects = guarantee.protected("h") if in_columns else guarantee.protects
        mechanisms = groups.setdefault((protects, guarantee.covers), {})
        mechanisms.setdefault(guarantee.mechanism, {})[label] = None
        if guarantee.whatever_happens:
            local.setdefault(guarantee.whatever_happens, {})[label] = None
        if guarantee.amplified is not None:
            known = f", and {rounded_up(guarantee.epsilon)} for somebody who learns it."
            hidden.setdefault(label, {})[guarantee.of_secret_order.removesuffix(".") + known] = None
        notes |= dict.fromkeys(guarantee.notes)
    if not groups:
        raise ConfigurationError("Expected the guarantees of a table's epsilons, got none.", kind="missing")
    sentences = []
    for (protects, covers), mechanisms in groups.items():
        labels = dict.fromkeys(label for named in mechanisms.values() for label in named)
        of = f" of {' / '.join(labels)}" if len(groups) > 1 else ""
        words = [f"{words} ({' / '.join(named)})" for words, named in mechanisms.items()]
        words = list(mechanisms) if len(words) == 1 else words
        sentences.append(f"Epsilon{of} is {protects}; {'; '.join(words)}; {covers}.")
    if local and in_columns:
        sentences.append(WORST_CASE_SENTENCE)
    elif local:
        # Beside other groups or figures it must be told whose they are; the sentence itself says what they rest on.
        alone = len(local) == len(groups) == 1
        figures = [entry if alone else f"{entry} ({' / '.join(named)})" for entry, named in local.items()]
        sentences.append(f"Without anybody's honesty: {'; '.join(figures)}.")
    sentences += [f"Of {label}: {' '.join(entry)}" for label, entry in hidden.items()]
    return " ".join([*sentences, *notes])


def mechanism_words(policy: PrivacyPolicy) -> str:
    """Return a client's mechanism and its options in words: :attr:`~murmurfl.privacy.PrivacyPolicy.words`.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> mechanism_words(PrivacyPolicy(clip_norm=1.0, batch_size=8, max_participations=5, mu=1.0))
    'cancelling (uniform) noise on each client'
    """
    return policy.words


Statements = Mapping[str, Mapping[str, Any]]

_UNCHECKED = "It is what {said} of {all} clients say of themselves, which a server cannot check."


@dataclass(frozen=True)
class Figures:
    """The guarantee of a run in numbers.

    Parameters
    ----------
    loss : Loss
        Of everything the run may release; infinite without noise, 0 if nobody is asked. Conditional under secure
        aggregation.
    sums : SumAssumption or None
        What the loss rests on under secure aggregation.

    Notes
    -----
    A :class:`Guarantee` says in words what they are true of.
    """

    loss: Loss
    sums: SumAssumption | None = None


def stated_figures(expected: Figures, statements: Statements, num_clients: int) -> Figures:
    """Return figures that are true of all real clients, from what each states.

    Parameters
    ----------
    expected : Figures
        What the run configuration expects of them: counts for clients that did not answer.
    statements : mapping
        What each client says of itself.
    num_clients : int
        Clients in all.

    Notes
    -----
    A server cannot check what clients say. Under secure aggregation a client says its mu for h honest clients of a
    sum, and clients may differ in h. One sentence names the smallest: what a client stated for a larger one is worked
    out again for it, mu sqrt(h), and never more than in its worst case. Where the run configuration does not ask for
    sums, what a client states for them is not said of it: its worst case is.
    """
    silent = len(statements) < num_clients
    claims = [(Loss.stated(one), int(one.get("min-honest", 1))) for one in statements.values()]
    if silent or not claims:
        claims.append((expected.loss, expected.sums.min_honest if expected.sums else 1))
    if not expected.loss.conditional:
        return Figures(weakest_loss(loss.unconditional() for loss, _ in claims))
    named = [int(one["min-honest"]) for one in statements.values() if "min-honest" in one]
    if expected.sums is not None and (silent or not named):
        named.append(expected.sums.min_honest)
    fewest = min(named, default=1)
    cohorts = [int(one["min-cohort"]) for one in statements.values() if "min-cohort" in one]
    if expected.sums is not None and (silent or not cohorts):
        cohorts.append(expected.sums.min_cohort)
    weakest = weakest_loss(loss.under_weaker(math.sqrt(max(honest / fewest, 1.0))) for loss, honest in claims)
    # Conditional, even if no claim rests on anybody: the figures are those of sums.
    return Figures(Loss(weakest.assumed, weakest.worst_case), SumAssumption(fewest, min(cohorts, default=1)))


def stated_guarantee(
    statements: Statements, num_clients: int, notes: tuple[str, ...] = (), *, masked: bool
) -> Guarantee:
    """Return one guarantee that is true of all clients, from what each states.

    Parameters
    ----------
    statements : mapping
        What each client says of itself.
    num_clients : int
        Clients in all.
    notes : tuple of str
        Further sentences about what the figure rests on.
    masked : bool
        Whether the training had sums of masked releases: without it nothing is said of sums, whatever clients state.

    Raises
    ------
    ConfigurationError
        If no client states anything, or all trust their server: what such a server guarantees, they cannot say.

    Notes
    -----
    **Formal guarantees.** Mu and its terms are those of the client that states the weakest, for replacement of its
    unit; they are said of sums only if all clients hide their releases. A server cannot check statements, and a
    client that states nothing is not spoken for: the sentence counts who does. Next to clients that vouch for their
    noise, one that states that it trusts its server has no guarantee, and so has the whole.
    """
    if not statements:
        raise ConfigurationError(
            "Expected what clients state, got nothing: pass strategy.ask_privacy(grid), after the training.",
            kind="missing",
            setting="statements",
        )
    if stated_values(statements, "trust") != {"trusted-server"}:
        # Nobody else adds the noise of one that trusts its server here: it is the weakest, and ends nobody's record.
        statements = {name: _alone(one) for name, one in statements.items()}
    trusts = stated_values(statements, "trust")
    kinds = stated_values(statements, protocol.RECORD)
    notes = (*notes, *(sentence for kind, sentence in RECORDS.items() if kind in kinds))
    if "trusted-server" in trusts:
        raise ConfigurationError(
            "Expected clients that vouch for their own noise, got trust 'trusted-server': what the server guarantees, "
            "clients cannot say. Run it with murmurfl's own app (`murmurfl run`), which knows it.",
            kind="conflict",
            setting="statements",
        )
    # Only if all of them hide their releases: what is said of sums is not true of a client without masks.
    secure = masked and trusts == {"secure-aggregation"}
    own = max(float(one["mu-guaranteed"]) for one in statements.values())
    figures = stated_figures(Figures(Loss.of(own, own if secure else None)), statements, len(statements))
    # Whoever protects all data of a client protects each sample, and whoever protects owners each that stays its own.
    units = {one.get("unit") for one in statements.values()}
    unit = "client" if units == {"client"} else "owner" if units <= {"client", "owner"} else "sample"
    words = stated_words(stated_values(statements, "mechanism"), masked=secure)
    return Guarantee(
        figures.loss.tightened(),
        min(stated_values(statements, "delta")),
        words or "noise on each client, by its own account",
        trust="secure-aggregation" if secure else "untrusted-server",
        unit=unit,
        notes=(
            _UNCHECKED.format(said=len(statements), all=num_clients),
            *([SAME_OWNER] if unit == "sample" and "owner" in units else []),
            *notes,
        ),
        min_honest=figures.sums.min_honest if secure and figures.sums else None,
    )


def _alone(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a statement as it is true next to a server that adds no noise."""
    if statement.get("trust") != "trusted-server":
        return statement
    return {**statement, "trust": "untrusted-server", "mu-guaranteed": math.inf}


def stated_values(statements: Statements, name: str) -> set[Any]:
    """Return the distinct values that clients state under a name."""
    return {one[name] for one in statements.values() if name in one}


def person_loss(loss: Loss | float, *, clients: int = 1, samples: int = 1, trust: Trust = "untrusted-server") -> Loss:
    """Return the loss of a person with ``samples`` samples on each of ``clients`` clients, from that of one sample.

    ``loss`` and ``trust`` are those of the guarantee, the same on each client; a number is a mu. Under
    ``secure-aggregation`` a loss with a worst case is required.

    Notes
    -----
    **Formal guarantees.** For replacement of all of that person's samples by any others, on all these clients at once.
    Clients that add their own noise are independent, so their mus add in squares: samples x sqrt(clients) x mu.
    Where mu counts on other clients' noise, or on the server's, one sample after the other is replaced: samples x
    clients x mu; under secure aggregation no more than the worst case, samples x sqrt(clients) times that of one
    sample, which needs nobody. All of these are upper bounds that some placement of the samples attains. The clients
    must be honest, as mu asks of the client that it is of. Of a secret order's epsilon nothing is said.
    Proof: docs/proofs/owners.md.

    Examples
    --------
    >>> person_loss(1.0, clients=4).mu, person_loss(1.0, samples=3).mu
    (2.0, 3.0)
    >>> person_loss(1.0, clients=4, trust="trusted-server").mu
    4.0
    >>> person_loss(Loss.of(1.0, 5.0), clients=100, trust="secure-aggregation").mu  # 25 honest clients of each sum
    50.0
    """
    for name, value in (("clients", clients), ("samples", samples)):
        check_count(name, value)
    loss = as_loss(loss)
    if not loss.mu >= 0:
        raise ConfigurationError(f"Expected mu >= 0, got {loss.mu!r}.", kind="out-of-range", setting="mu", got=loss.mu)
    if loss.conditional != (trust == "secure-aggregation"):
        raise ConfigurationError(
            f"Expected a worst case under secure aggregation and only there, got {loss}, {trust!r}.",
            kind="conflict",
            setting="worst_case",
        )
    independent, together = samples * math.sqrt(clients), samples * clients
    if trust == "untrusted-server":
        return loss.times(independent)
    if trust == "trusted-server":
        return loss.times(together)
    return Loss(loss.times(together).assumed, loss.times(independent).worst_case).tightened()
