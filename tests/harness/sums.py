"""What the tests of sums of releases have in common: mechanisms by a name, and random patterns of losses."""

import numpy as np
from murmurfl.privacy import make_mechanism

from tests.harness.transcripts import Stream

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


def random_patterns(chance, most_machines=6, most_rounds=8):
    """Patterns with any share of replies lost, and a cap that may end machines early."""
    rounds, machines = int(chance.integers(2, most_rounds + 1)), int(chance.integers(2, most_machines + 1))
    patterns = chance.choice(3, size=(machines, rounds), p=chance.dirichlet([1, 1, 2]))
    return patterns, int(chance.integers(1, rounds + 1))
