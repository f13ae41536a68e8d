"""docs/proofs/grid-and-noise.md, step by step: what is sent is a function of a real-valued Gaussian mechanism."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from murmurfl.privacy import MECHANISMS, Grid, MemoryLedger, Privatizer, SimulatedKeys
from murmurfl.privacy.mechanisms import Increment, IndependentNoise

D, K = 40, 5


def nearest(value):
    """The nearest integer, ties to even, of an exact rational."""
    return round(Fraction(value))


@given(st.integers(-(10**6), 10**6), st.integers(-(10**9), 10**9), st.integers(1, 10))
def test_counts_and_rounded_noise_are_their_rounded_sum(count, noise, bits):
    """For any noise that is no tie between two integers; a Gaussian is one with probability zero."""
    noise = Fraction(2 * noise + 1, 2 ** (bits + 1)) if bits > 1 else Fraction(2 * noise + 1, 4)
    assert count + nearest(noise) == nearest(count + noise)


def test_rounded_values_and_rounded_noise_are_not():
    """The planted bug: a contribution that is not on the grid shows in the message, whatever the noise was."""
    value, noise = Fraction(3, 10), Fraction(3, 10)
    assert nearest(value) + nearest(noise) != nearest(value + noise)


class KeepsAPart(IndependentNoise):
    """C^{-1} with 1 on the diagonal and -0.3 below it: a release takes out a part of the noise of the one before."""

    name = "keeps-a-part"
    memory = "state"

    def inverse(self, n=None):
        n = self._check_n(n)
        return np.eye(n) - 0.3 * np.eye(n, k=-1)

    def decoder(self, n=None):
        return np.cumsum(self.inverse(n), axis=0)

    def materialize(self, n=None):
        return np.linalg.inv(self.inverse(n))

    def increment(self, state, release, normals, scale=1.0):
        row = np.multiply(normals, scale, dtype=np.float64)
        return Increment(row, 0.3 * state[0] if state else None, (row,))

    def row_std(self, release):
        return float(np.linalg.norm(self.decoder()[release - 1]))

    def _sensitivity(self, n, num_participations, min_separation):
        return None


def contributions(k):
    return np.random.Generator(np.random.Philox(key=k)).normal(size=(1, D)) / 10


def of_the_real_mechanism(subject, rows):
    """What the client must send: contributions on the grid and its noise, in real numbers, rounded once.

    Where a release takes out the whole of the last row this is said of the prefixes, otherwise of every message.
    """
    mechanism, grid = subject.plan.mechanism, subject.plan.grid
    state, exact, scale = mechanism.initial_state(D), [], subject.plan.noise_std / grid.spacing
    for k in range(1, K + 1):
        before, normals = state, rows[k].copy()
        if mechanism.memory in ("last", "all") and k > 1:
            before = mechanism.state_after(k - 1, lambda chosen: np.stack([rows[j].copy() for j in chosen]), scale)
        increment = mechanism.increment(before, k, normals, scale)
        removed = 0.0 if increment.removed is None or mechanism.removes_last else increment.removed
        exact.append(increment.added - removed)
        state = () if increment.state is None else tuple(part.copy() for part in increment.state)
    counts = [grid.counts(contributions(k))[0] for k in range(1, K + 1)]
    if mechanism.removes_last:
        return np.diff(np.cumsum(counts, axis=0) + np.rint(exact), axis=0, prepend=0.0)
    return np.array(counts) + np.rint(exact)


@pytest.mark.parametrize("name", [*MECHANISMS, "keeps-a-part"])
def test_what_is_sent_is_the_real_mechanisms_output_rounded_once(name, reader, monkeypatch):
    """A part of a row that is rounded by itself is the planted bug: it was sent so before, and this test failed."""
    monkeypatch.setitem(MECHANISMS, "keeps-a-part", KeepsAPart)
    generator, rows = np.random.Generator(np.random.Philox(key=8)), {}

    def drawn(key, size):
        return rows.setdefault(key, generator.normal(size=size)).copy()

    reader.normals(drawn)
    policy = reader.policy(mechanism=name, max_participations=K)
    subject = Privatizer(policy, D, K, MemoryLedger(), SimulatedKeys(1, "m"))
    sent = [subject.release("s", k - 1, lambda chosen, k=k: contributions(k)).counts for k in range(1, K + 1)]
    by_release = dict(enumerate(rows.values(), start=1))
    assert (np.array(sent) == of_the_real_mechanism(subject, by_release)).all()


def shift(reader, batch, one, other, clip_unit="sample", clip_norm=1.0):
    """How far a client's release moves when its first sample's contribution is another, and what is charged."""
    reader.no_noise()
    policy = reader.policy(
        batch_size=batch, clip_unit=clip_unit, clip_norm=clip_norm, mechanism="independent", max_participations=1
    )
    counts = []
    for first in (one, other):
        subject = Privatizer(policy, len(one), batch, MemoryLedger(), SimulatedKeys(1, "m"))
        rows = np.vstack([first[None], np.full((policy.rows_per_release - 1, len(one)), 0.01)])
        counts.append(subject.release("s", 0, lambda chosen, rows=rows: rows).counts)
    moved = subject.plan.grid.spacing * math.sqrt(int(((counts[0] - counts[1]) ** 2).sum()))
    return moved, policy.sensitivity, subject.plan


def awkward(reader, batch, size, clip_unit):
    """A contribution as long as the clip allows, every coordinate of which is just above the middle of two counts."""
    _, _, plan = shift(reader, batch, np.zeros(size), np.zeros(size), clip_unit, 0.9)
    one = plan.grid.spacing * (batch if clip_unit == "sample" else 1)
    coordinate = (math.floor(0.9 / math.sqrt(size) / one) + 0.5) * one * (1 + 1e-12)
    return np.full(size, coordinate), coordinate * math.sqrt(size) * (1 + 2.0**-39)


@pytest.mark.parametrize("size", [3, 1000])
@pytest.mark.parametrize(("batch", "clip_unit"), [(1, "sample"), (3, "sample"), (8, "sample"), (8, "update")])
def test_rounding_moves_a_release_within_its_charge(reader, size, batch, clip_unit):
    """Every row of the batch is rounded by itself, and one of them is replaced: gamma sqrt(d) once, whatever b is.

    Without the charge, the planted bug, mu would be too small by what is between the two.
    """
    row, clip_norm = awkward(reader, batch, size, clip_unit)
    moved, delta, plan = shift(reader, batch, row, -row, clip_unit, clip_norm)
    assert moved <= plan.sensitivity
    assert moved - delta > 0.99 * plan.grid.charge(size)


@pytest.mark.parametrize("batch", [1, 4])
def test_no_neighbours_found_by_climbing_move_a_release_further_than_is_charged(reader, batch):
    generator, size = np.random.Generator(np.random.Philox(key=9)), 3
    best = 0.0
    for _ in range(5):
        pair, reached = generator.normal(size=(2, size)), 0.0
        for _ in range(120):
            tried = pair + generator.normal(size=(2, size)) * 10.0 ** generator.integers(-5, 1)
            moved, delta, plan = shift(reader, batch, *tried)
            assert moved <= plan.sensitivity
            if moved > reached:
                pair, reached = tried, moved
        best = max(best, reached)
    assert best > 0.999 * delta, "the climb gets there"


def test_sums_and_what_is_sent_are_exact_up_to_two_to_the_53():
    """Float64 has every count below 2^53 and skips the next odd one: there a sent value would be another."""
    grid = Grid(2.0**-20)
    for count in (2**52 - 1, 2**53 - 1, -(2**53) + 1):
        assert int(Fraction(grid.values(np.array([count]))[0].item()) / Fraction(1, 2**20)) == count
    skipped = 2**53 + 1
    assert int(Fraction(grid.values(np.array([skipped]))[0].item()) / Fraction(1, 2**20)) != skipped


def test_a_plan_leaves_sums_and_differences_of_prefixes_below_two_to_the_52(reader):
    for mu, releases in [(1e-3, 1), (1.0, 100), (16.0, 4000)]:
        plan = reader.policy(mu=mu, max_participations=releases).plan(7850)
        assert plan.largest_value / plan.grid.spacing < 2.0**52
