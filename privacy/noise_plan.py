"""A policy worked out for a model: the charged sensitivity, the grid, the noise, and the mu that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .gdp import gdp_epsilon
from .grid import Grid
from .mechanisms import Mechanism


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
        Standard deviation in front of the mechanism's rows; 0 for a machine that adds no noise.
    mu : float
        What all K releases together guarantee; infinite for a machine that adds no noise (under ``trusted-server`` the
        guarantee is the server's).
    fingerprint : str
        Names the policy and d; a session in a ledger belongs to one of them.
    largest_value : float
        No value of a release is larger in magnitude.
    pattern : mapping
        A sample's participations (:attr:`PrivacyPolicy.pattern`).
    problem : str
        Why this noise guarantees nothing, or empty: a mu so large, or a delta so small, that the range of the normals
        shows (:func:`~murmurfl.privacy.normals.range_problem`). Then mu is infinite, and a real machine refuses.
    resolution_mu : float
        What of mu is charged for the resolution of the normals (:mod:`murmurfl.privacy.normals`).
    mu_local : float
        What all K releases guarantee if each of them is seen by itself: under ``secure-aggregation`` what holds
        whatever the server, helpers and other machines do; mu itself otherwise.
    local_problem : str
        As ``problem``, of mu_local.
    summing : float
        What a sum of releases guarantees of what one of them would, for ideal normals: 1 / sqrt(h) under
        ``secure-aggregation`` for samples that are used once.
    """

    mechanism: Mechanism
    grid: Grid
    sensitivity: float
    noise_std: float
    mu: float
    fingerprint: str
    largest_value: float
    pattern: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    resolution_mu: float = 0.0
    mu_local: float = math.inf
    local_problem: str = ""
    summing: float = 1.0

    def spent_mu(self, releases: int) -> float:
        """Bookkeeping: the mu of the first ``releases`` releases.

        Notes
        -----
        **Formal guarantees.** None beyond that of :attr:`mu`: a server that chooses when to stop can make this figure
        depend on the data. It is exact for a number of releases fixed in advance.
        Proof: docs/proofs/release-rule.md.
        """
        if releases == 0:
            return 0.0
        if math.isinf(self.mu):
            return math.inf
        noise = self.sensitivity * self.mechanism.sensitivity(n=releases, **self.pattern) / self.noise_std
        spent = math.hypot(noise * self.summing, self.resolution_mu * math.sqrt(releases / self.mechanism.num_releases))
        return self.mu if math.isclose(spent, self.mu, rel_tol=1e-12) else spent

    def epsilon(self, delta: float) -> float:
        """Epsilon at delta of all K releases of one session."""
        return gdp_epsilon(self.mu, delta)
