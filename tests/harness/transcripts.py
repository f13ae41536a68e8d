"""What a server that sees only sums can tell, exactly: from all sums that were opened to the mu of every sample.

Every release is P_k - P_ack of its client's stream, so its noise is row k less row ack of B Z and its signal the
contributions after ack. A *transcript* is the list of opened sums. With S the covariance of the sums' noise, of all
clients that do not work with the server, and v the change of the sums when one contribution moves by one,

    mu^2 = sensitivity^2 v' S^+ v,

infinite where v leaves the range of S, which means that the sums show the sample without noise. Nothing is assumed
about how sets were chosen: forged ones, several sessions, a release opened twice and differences of sums all have the
mu they really have. One parameter stands for all, for their noise is alike and independent.

Mechanisms are told by a name and random patterns of losses by a key; what two Gaussian messages tell is exact too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from murmurfl.privacy import NoisePlan, make_mechanism
from murmurfl.privacy.sums.masking import NOTHING_OPENED, Header
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

ZERO_VARIANCE = 1e-10
"""Of the largest: a direction with less is one without noise. Real ones are above 1e-7 for a thousand sums."""
NO_SIGNAL = 1e-7
"""Of a change: less of it in the directions without noise is rounding."""


@dataclass(frozen=True)
class Stream:
    """The noise of one client in one session.

    Parameters
    ----------
    decoder : ndarray of shape (releases, nodes)
        B: row k - 1 is the noise in P_k, in units of noise_std.
    noise_std, sensitivity : float
        As in a plan; one each for mu in units of them.
    """

    decoder: NDArray[np.float64]
    noise_std: float = 1.0
    sensitivity: float = 1.0

    @classmethod
    def of_plan(cls, plan: NoisePlan) -> Stream:
        """The stream of a client with this plan."""
        return cls(plan.mechanism.decoder(), plan.noise_std, plan.sensitivity)

    @classmethod
    def of_mechanism(cls, name: str, releases: int, **options: object) -> Stream:
        """The stream of a mechanism by its name, in units of its own noise and of one change."""
        return cls(make_mechanism(name, releases, **options).decoder())


class Opened(NamedTuple):
    """One release in an opened sum: P_release - P_ack of a client's stream in a session."""

    client: str
    release: int
    ack: int
    session: str = "s"
    noise_after: int | None = None
    """The release after which its noise begins, where that of skipped ones before it is mended; default ``ack``."""


class Worst(NamedTuple):
    """The sample that is least private: the one in this release."""

    mu: float
    client: str
    session: str
    release: int


class Transcript:
    """Everything that was opened, in order.

    Parameters
    ----------
    streams : Stream or mapping of str to Stream
        Of each client, by its name; one for all of them.
    sets : sequence of sequences of Opened
        The sums; a release that is in one twice counts twice.
    colluders : collection of str
        Clients whose noise and contributions the server knows.
    """

    def __init__(
        self,
        streams: Stream | Mapping[str, Stream],
        sets: Sequence[Iterable[Opened]],
        colluders: Collection[str] = (),
    ) -> None:
        self._streams = streams
        self._terms: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
        self._sums = len(sets)
        for row, members in enumerate(sets):
            for client, release, ack, session, after in members:
                if client in colluders:
                    continue
                if not 0 <= ack < release <= len(self._stream(client).decoder):
                    raise ValueError(f"Expected 0 <= ack < release <= K, got {ack} and {release}.")
                term = (row, release, ack, ack if after is None else after)
                self._terms.setdefault((client, session), []).append(term)

    def _stream(self, client: str) -> Stream:
        return self._streams if isinstance(self._streams, Stream) else self._streams[client]

    def _noise(self, client: str, session: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The sums with this stream in them, and its noise in each: rows of the stream's Z."""
        stream, terms = self._stream(client), self._terms[client, session]
        rows = np.unique([row for row, *_ in terms])
        coefficients = np.zeros((len(rows), len(stream.decoder) + 1))
        for row, release, _, after in terms:
            place = np.searchsorted(rows, row)
            coefficients[place, release] += 1.0
            coefficients[place, after] -= 1.0
        return rows, stream.noise_std * (coefficients[:, 1:] @ stream.decoder)

    @cached_property
    def covariance(self) -> NDArray[np.float64]:
        """S, sum by sum: of the noise of every client that is no colluder."""
        covariance = np.zeros((self._sums, self._sums))
        for client, session in self._terms:
            rows, noise = self._noise(client, session)
            covariance[np.ix_(rows, rows)] += noise @ noise.T
        return covariance

    def covariance_of(self, client: str, session: str = "s") -> NDArray[np.float64]:
        """What one stream adds to :attr:`covariance`."""
        covariance = np.zeros((self._sums, self._sums))
        rows, noise = self._noise(client, session)
        covariance[np.ix_(rows, rows)] = noise @ noise.T
        return covariance

    def change(self, client: str, release: int, session: str = "s") -> NDArray[np.float64]:
        """v: how often each sum contains the contribution to a release."""
        change = np.zeros(self._sums)
        for row, last, ack, _ in self._terms.get((client, session), ()):
            change[row] += ack < release <= last
        return change

    @cached_property
    def squares(self) -> dict[tuple[str, str, int], float]:
        """mu^2 of a sample in each release of each client that is in a sum: (client, session, release)."""
        names = [
            (client, session, release)
            for client, session in self._terms
            for release in range(1, len(self._stream(client).decoder) + 1)
        ]
        changes = [self.change(client, release, session) for client, session, release in names]
        seen = [place for place, change in enumerate(changes) if change.any()]
        if not seen:
            return {}
        values = quadratic(self.covariance, np.array([changes[place] for place in seen]).T)
        found = {}
        for place, value in zip(seen, values, strict=True):
            found[names[place]] = self._stream(names[place][0]).sensitivity ** 2 * float(value)
        return found

    def square(self, client: str, release: int, session: str = "s") -> float:
        """mu^2 of a sample in one release; 0 if no sum shows it."""
        return self.squares.get((client, session, release), 0.0)

    def worst(self) -> Worst:
        """The sample that is least private, among those that are in one release."""
        if not self.squares:
            return Worst(0.0, "", "", 0)
        (client, session, release), square = max(self.squares.items(), key=lambda item: item[1])
        return Worst(math.sqrt(square), client, session, release)

    def gram(self, client: str, releases: Sequence[int], session: str = "s") -> NDArray[np.float64]:
        """Inner products of a sample's participations: mu^2 is the sum of them, times the moves' own."""
        changes = np.array([self.change(client, release, session) for release in releases]).T
        return self._stream(client).sensitivity ** 2 * inner_products(self.covariance, changes)

    def returning(self, client: str, releases: Sequence[int], session: str = "s") -> float:
        """The most mu can be of a sample that moves each of these releases in any direction."""
        return math.sqrt(np.abs(self.gram(client, releases, session)).sum())


def quadratic(covariance: NDArray[np.float64], changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """v' S^+ v for every column v of ``changes``; infinite where v leaves the range of S."""
    scaled, outside = _whitened(covariance, changes)
    return np.where(outside, np.inf, (scaled**2).sum(axis=0))


def inner_products(covariance: NDArray[np.float64], changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """v' S^+ w for all pairs of columns; infinite for those that leave the range of S."""
    scaled, outside = _whitened(covariance, changes)
    products = scaled.T @ scaled
    products[outside, :] = products[:, outside] = np.inf
    return products


def _whitened(
    covariance: NDArray[np.float64], changes: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    variances, directions = np.linalg.eigh(covariance)
    noisy = variances > ZERO_VARIANCE * max(variances[-1], np.finfo(float).tiny)
    along = directions.T @ changes
    outside = np.linalg.norm(along[~noisy], axis=0) > NO_SIGNAL * np.linalg.norm(changes, axis=0)
    return along[noisy] / np.sqrt(variances[noisy])[:, None], outside


def opened_sets(headers: Sequence[Sequence[Header]], made: Iterable[Header] = ()) -> list[list[Opened]]:
    """The sets that these headers of masked releases describe.

    Parameters
    ----------
    headers : sequence of sequences of Header
        Of the opened sums, in order.
    made : iterable of Header
        Of all releases that were made, if one may be built on a release that no sum here has.

    Raises
    ------
    KeyError
        If a release is built on one that is nowhere.
    """
    everything = [*made, *(header for members in headers for header in members)]
    numbers = {header.release_id: header.release for header in everything} | {NOTHING_OPENED.hex(): 0}
    return [
        [
            Opened(
                header.client,
                header.release,
                numbers[header.ack_id] if header.release_mode == "cumulative" else header.release - 1,
                header.session,
            )
            for header in members
        ]
        for members in headers
    ]


def played(patterns: Sequence[Sequence[int]], releases: int | None = None) -> list[list[Opened]]:
    """The opened sets of rounds in which every client is not asked (0), loses its reply (1) or is opened (2).

    Client i is called str(i); an opened release carries all its client lost since the last opened one, as the release
    rule has it. A client may also be opened and be told that its sum was skipped (3): its next release mends that.

    Parameters
    ----------
    patterns : sequence of sequences
        For every client, for every round.
    releases : int, optional
        K: who has made so many is not asked any more.
    """
    made, last, after, sets = *([0] * len(patterns) for _ in range(3)), []
    for states in zip(*patterns, strict=True):
        members = []
        for client, state in enumerate(states):
            if state and (releases is None or made[client] < releases):
                made[client] += 1
                if state >= 2:
                    recovered = after[client] if after[client] < last[client] else None
                    members.append(Opened(str(client), made[client], last[client], noise_after=recovered))
                    last[client] = made[client]
                if state == 2:
                    after[client] = made[client]
        sets.append(members)
    return sets


def hockey_stick(shift, epsilon):
    """Sup over events of P(E) - e^epsilon Q(E) for N(shift, 1) and N(0, 1), any real epsilon."""
    safe = np.maximum(np.abs(shift), 1e-9)
    beyond = np.exp(epsilon + log_ndtr(-epsilon / safe - safe / 2))
    return np.where(safe > 1e-9, ndtr(-epsilon / safe + safe / 2) - beyond, np.maximum(1 - np.exp(epsilon), 0.0))


def delta_of_two(first, second, epsilon):
    """Exact delta of two Gaussian messages, the second's shift a function of the first message: quadrature."""
    y = np.linspace(-12.0, 14.0, 20_001)
    loss = first * y - first**2 / 2
    values = norm.pdf(y - first) * hockey_stick(second(y), epsilon - loss)
    return float(np.sum(values) * (y[1] - y[0]))


MECHANISMS = {
    "independent": {},
    "cancelling": {},
    "cancelling-harmonic": {"schedule": "harmonic"},
    "cancelling-paper": {"schedule": "paper", "num_rounds": 20},
    "decay": {},
    "decay-half": {"decay": 0.5},
    "tree": {},
    "tree-dyadic": {"decoder": "dyadic"},
    "sqrt_toeplitz": {},
    "sqrt_normalised": {},
    "bisr": {"bands": 3},
    "banded": {"bands": 2},
    "blt": {},
    "optimal": {},
}
ROUNDING = 1 + 1e-9
"""A bound is exceeded by more than this or not at all."""


def mechanism(name, releases):
    """A mechanism for so many releases; what follows a hyphen is its option."""
    return make_mechanism(name.partition("-")[0], releases, **MECHANISMS[name])


def stream(name, releases):
    """Its noise, in units of its own and of one change."""
    return Stream(mechanism(name, releases).decoder())


def largest_column(name, releases):
    """The local mu of one participation, in units of sensitivity / noise_std."""
    return float(np.linalg.norm(mechanism(name, releases).materialize(), axis=0).max())


def generator(key):
    """A generator of random numbers of its own."""
    return np.random.Generator(np.random.Philox(key=key))


def random_patterns(chance, most_clients=6, most_rounds=8):
    """Patterns with any share of replies lost, and a cap that may end clients early."""
    rounds, clients = int(chance.integers(2, most_rounds + 1)), int(chance.integers(2, most_clients + 1))
    patterns = chance.choice(3, size=(clients, rounds), p=chance.dirichlet([1, 1, 2]))
    return patterns, int(chance.integers(1, rounds + 1))
