"""A policy worked out for a model: the noise that follows from it, in numbers and in words.

A policy says its own words (:attr:`murmurfl.privacy.PrivacyPolicy.words`), made of the functions here. Whoever knows
only a part of a policy, such as the caption of a table, calls them directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..mechanisms import Mechanism
from ..noise import Grid
from .loss import Loss


@dataclass(frozen=True)
class Summing:
    """Sums of releases, at least ``honest`` of which come from honest clients with noise of one kind.

    Parameters
    ----------
    honest : int
        h, the client itself among them.
    is_memoryless : bool
        Whether every release has noise of its own. Otherwise each is built on the last one of its client that was
        opened.
    """

    honest: int
    is_memoryless: bool

    def sensitivity(self, mechanism: Mechanism, pattern: Mapping[str, Any], n: int | None = None) -> float:
        """Return the sensitivity of the sums to one sample's contributions.

        In the units of :meth:`Mechanism.sensitivity`.

        With ``n``, only the client's first n releases count; the others may have made all of theirs.

        Notes
        -----
        **Formal guarantees.** An upper bound. One turn of a sample shows in a sum with other clients' noise as much as
        1 / v'S^+v >= sum_i 1 / (v'S_i^+ v) says, where no client's part is less than by its largest column; several
        turns show at most what each shows by itself, added up, and never more than without any sum.
        Proof: docs/proofs/secure-aggregation.md.
        """
        alone = mechanism.sensitivity(n=n, **pattern)
        if self.is_memoryless:
            return alone / math.sqrt(self.honest)
        own, others = mechanism.sensitivity(n=n), mechanism.sensitivity()
        turn = own / math.sqrt(1.0 + (self.honest - 1) * (own / others) ** 2)
        return min(alone, _turns(pattern, mechanism.num_releases if n is None else n) * turn)

    def share(self, mechanism: Mechanism, pattern: Mapping[str, Any]) -> float:
        """Return the sums' sensitivity over that of releases seen one by one, at most 1."""
        return self.sensitivity(mechanism, pattern) / mechanism.sensitivity(**pattern)


def _turns(pattern: Mapping[str, Any], releases: int) -> int:
    """Return in how many of the first releases a sample may be."""
    if not pattern:
        return 1
    return min(pattern["num_participations"], -(-releases // pattern["min_separation"]))


@dataclass(frozen=True)
class NoisePlan:
    """A policy worked out for d parameters.

    Parameters
    ----------
    mechanism : Mechanism
        For the K releases of one session.
    grid : Grid
        Where contributions, noise and sums live.
    sensitivity : float
        The charged change of one release: 2 S / b + gamma sqrt(d).
    noise_std : float
        Standard deviation in front of the mechanism's rows; 0 for a client that adds no noise.
    loss : Loss
        What all K releases together guarantee; in the worst case, if each of them is seen by itself, which under
        ``secure-aggregation`` holds whatever the server, helpers and other clients do. Infinite for a client that
        adds no noise (under ``trusted-server`` the guarantee is the server's).
    fingerprint : str
        Names the policy and d; a session in a ledger belongs to one of them.
    largest_value : float
        No value of a release is larger in magnitude.
    pattern : mapping
        A sample's participations (:attr:`PrivacyPolicy.pattern`).
    problem : str
        Why this noise guarantees nothing, or empty: a mu so large, or a delta so small, that the range of the normals
        shows (:func:`~murmurfl.privacy.noise.range_problem`). Then mu is infinite, and a real client refuses.
    local_problem : str
        The same for the worst case.
    resolution_mu : float
        What of mu is charged for the resolution of the normals (:mod:`murmurfl.privacy.noise`).
    sums : Summing, optional
        What mu counts on under ``secure-aggregation``; None: every release is seen by itself.

    Notes
    -----
    **Formal guarantees.** With this noise all K releases together are ``loss.assumed``-DP for replacement of one sample
    that keeps to the pattern, and ``loss.worst_case``-DP if each of them is seen by itself. Against whom, and if who is
    honest, is the policy's trust.
    Proof: docs/proofs/release-rule.md, docs/proofs/secure-aggregation.md.

    Examples
    --------
    >>> from murmurfl.privacy import PrivacyPolicy
    >>> plan = PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, mu=1.0).plan(num_parameters=3)
    >>> plan.mechanism.name, plan.mu, round(plan.epsilon(1e-5), 3)
    ('cancelling', 1.0, 4.377)
    >>> round(plan.spent_mu(1), 3)  # after one of five releases
    0.447
    """

    mechanism: Mechanism
    grid: Grid
    sensitivity: float
    noise_std: float
    loss: Loss
    fingerprint: str
    largest_value: float
    pattern: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    local_problem: str = ""
    resolution_mu: float = 0.0
    sums: Summing | None = None

    @property
    def mu(self) -> float:
        """Mu of all K releases together, under what the policy's trust assumes."""
        return self.loss.mu

    @property
    def summing(self) -> float:
        """Ratio of mu to that of the worst case for ideal normals: 1 where every release is seen by itself.

        1 / sqrt(h) under ``secure-aggregation`` for samples that are used once, and for releases that stand alone.
        """
        return 1.0 if self.sums is None else self.sums.share(self.mechanism, self.pattern)

    def summed_sensitivity(self, releases: int | None = None) -> float:
        """Return the sensitivity behind mu, of all releases or of the first ones."""
        if self.sums is None:
            return self.mechanism.sensitivity(n=releases, **self.pattern)
        return self.sums.sensitivity(self.mechanism, self.pattern, releases)

    def spent_mu(self, releases: int) -> float:
        """Bookkeeping: the mu of the first ``releases`` releases.

        Notes
        -----
        **Formal guarantees.** The first ``releases`` are mu-GDP for this figure if their number was fixed in advance:
        exact, and an upper bound under secure aggregation, whatever number of releases the other clients have made. A
        server that chooses when to stop can make the figure depend on the data; :attr:`mu` holds then too.
        Proof: docs/proofs/release-rule.md.
        """
        if releases == 0:
            return 0.0
        if math.isinf(self.mu):
            return math.inf
        noise = self.sensitivity * self.summed_sensitivity(releases) / self.noise_std
        # The normals of a sum are those of clients that may have made all of their releases.
        share = releases / self.mechanism.num_releases if self.sums is None else 1.0
        spent = math.hypot(noise, self.resolution_mu * math.sqrt(share))
        return self.mu if math.isclose(spent, self.mu, rel_tol=1e-12) else spent

    def epsilon(self, delta: float) -> float:
        """Epsilon at delta of all K releases of one session."""
        return self.loss.assumed.epsilon(delta)


NO_NOISE = "none"
"""The mechanism of a simulated client that adds no noise, to see what noise costs."""

NO_NOISE_WORDS = "no noise was added anywhere"
"""Words for the mechanism ``none``: neither the clients nor the server add noise."""

TRUSTING_WORDS = "no noise on the client"
"""Words for a client under a trusted server, as far as the client itself can tell."""

NOBODY_ASKED = "nobody was asked"
"""Words for a run in which no client makes a release."""

_ACCOUNTS = {"amplified": "amplification by iteration", "composed": "plain composition"}


def noise_words(
    mechanism: str,
    options: Iterable[object] = (),
    *,
    where: str = "on each client",
    sensitivity: str = "",
    participations: int = 1,
    masked: bool = False,
    secret: bool = False,
    clipping: str = "",
    per_owner: int = 0,
) -> str:
    """Words for noise that clients put on their own releases.

    Parameters
    ----------
    mechanism : str
        Its name.
    options : iterable
        Values of its options, a schedule first; what is empty is left out.
    where : str
        Whose noise it is.
    sensitivity : str
        What is clipped, if not each sample's own row: ``update`` or ``contractive``.
    participations : int
        In how many releases a sample may be.
    masked : bool
        Whether only sums of these releases are seen.
    secret : bool
        Whether each sample is in a release that only its client knows.
    clipping : str
        How samples' rows are bounded, if not by cutting them: ``automatic``.
    per_owner : int
        How many samples of an owner are clipped together, at most; 0 where each is clipped by itself.

    Examples
    --------
    >>> noise_words("banded", (None, 4), sensitivity="update", participations=2)
    'banded (4) noise on each client, update sensitivity, every sample in up to 2 releases'
    """
    named = ", ".join(str(value) for value in options if value)
    words = f"{mechanism}{f' ({named})' if named else ''} noise {where}"
    words += ", under masks" if masked else ""
    words += f", {clipping} clipping" if clipping else ""
    words += f", up to {per_owner} samples of an owner clipped together" if per_owner else ""
    words += f", {sensitivity} sensitivity" if sensitivity else ""
    words += ", samples in a secret order" if secret else ""
    return words + (f", every sample in up to {participations} releases" if participations > 1 else "")


def epoch_words(accounting: str, epochs: int | None = None) -> str:
    """Words for noise inside the epochs of a client, which the paper and its readers call a silo.

    ``accounting`` is the account the guarantee rests on (:attr:`murmurfl.privacy.ShuffledPolicy.accounting_used`),
    ``epochs`` how many use private samples, where that is known.

    Examples
    --------
    >>> epoch_words("composed", epochs=5).startswith("noise on every step of 5 epochs")
    True
    """
    which = "the epochs" if epochs is None else f"{epochs} epochs"
    return (
        f"noise on every step of {which} of each silo that use private samples, {_ACCOUNTS[accounting]}, only their "
        "ends released"
    )


def server_noise_words(noise: str, rounds: int | None = None) -> str:
    """Words for noise that a trusted server adds: of a mechanism, or ``fresh`` where rounds are independent.

    Examples
    --------
    >>> server_noise_words("tree", rounds=20)
    'tree noise of the server in each of 20 rounds'
    """
    return f"{noise} noise of the server in each {'round' if rounds is None else f'of {rounds} rounds'}"


def stated_words(mechanisms: Iterable[str], *, masked: bool = False) -> str:
    """Words for the noise of real clients, from the mechanisms they state; empty if none states any.

    Examples
    --------
    >>> stated_words(["cancelling", "independent", "cancelling"])
    'cancelling or independent noise on each client, by its own account'
    """
    names = " or ".join(sorted(set(mechanisms) - {""}))
    return f"{names} noise on each client{', under masks' if masked else ''}, by its own account" if names else ""
