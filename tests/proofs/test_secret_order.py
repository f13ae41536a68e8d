"""A secret order: one release moved by what is charged, servers that follow what they see, and what a permutation is.

Statistical tests state how often they fail by chance, for another seed than theirs.
"""

import math

import numpy as np
import pytest
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys, gdp_delta
from murmurfl.privacy.accounting.amplification import (
    allocation_delta,
    allocation_epsilon,
    zero_out_deltas,
    zero_out_shift,
)
from scipy.stats import ks_2samp

SLOTS, D = 5, 3
POLICY = PrivacyPolicy(
    clip_norm=1.0,
    batch_size=2,
    max_participations=SLOTS,
    mu=2.0,
    mechanism="independent",
    batch_selection="shuffled",
    release_rule="paper",
)


def sent(rows, seed=1):
    """All releases of a client, made on these rows."""
    privatizer = Privatizer(POLICY, D, len(rows), MemoryLedger(), SimulatedKeys(seed, "m"))
    return np.array([privatizer.release("s", k, lambda samples: rows[samples]).values for k in range(SLOTS)])


def test_with_the_same_keys_a_sample_moves_one_release_by_what_is_charged():
    generator = np.random.Generator(np.random.Philox(key=5))
    plan = POLICY.plan(D)
    most = zero_out_shift(POLICY, plan) * plan.noise_std
    for seed in range(20):
        rows = generator.normal(size=(12, D)) * 10.0
        zeroed = rows.copy()
        zeroed[seed % 12] = 0.0
        moves = np.linalg.norm(sent(rows, seed) - sent(zeroed, seed), axis=1)
        assert (moves > 0).sum() == 1
        assert moves.max() <= most
        assert moves.max() == pytest.approx(most, rel=1e-3)
    assert most <= plan.sensitivity / 2 * (1 + 1e-3)


SHIFT, DRAWS = 1.0, 40_000


def next_direction(history, step):
    """A server that asks for more where it has seen more: the length and the sign of what a sample adds."""
    seen = np.zeros((len(step), 2)) if not history else np.sum(history, axis=0)
    length = np.where(np.linalg.norm(seen, axis=1) > 1.0, 1.0, 0.6)
    angle = np.arctan2(seen[:, 1], seen[:, 0])
    return length[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def transcripts(slots, generator):
    """What a client sends to such a server; slot -1: the sample is zeroed out."""
    history, ratio = [], []
    for k in range(SLOTS):
        adds = SHIFT * next_direction(history, slots)
        values = generator.standard_normal((len(slots), 2)) + adds * (slots == k)[:, None]
        ratio.append(np.sum(adds * values, axis=1) - np.sum(adds**2, axis=1) / 2)
        history.append(values)
    return np.stack(history, axis=1), np.stack(ratio, axis=1)


def simulated(slots, generator):
    """The same, made from one number for each release, as in step 2."""
    history = []
    for k in range(SLOTS):
        number = generator.standard_normal(len(slots)) + SHIFT * (slots == k)
        adds = SHIFT * next_direction(history, slots)
        length = np.linalg.norm(adds, axis=1)
        along, across = adds / length[:, None], np.stack([-adds[:, 1], adds[:, 0]], axis=1) / length[:, None]
        share = length / SHIFT
        mixed = share * number + np.sqrt(1 - share**2) * generator.standard_normal(len(slots))
        history.append(mixed[:, None] * along + generator.standard_normal((len(slots), 1)) * across)
    return np.stack(history, axis=1)


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_a_server_that_follows_what_it_sees_gets_no_more_than_the_pair(epsilon):
    """By the exact likelihood ratio of its transcripts; fails for 1 seed in 10^4."""
    generator = np.random.Generator(np.random.Philox(key=11))
    with_it = transcripts(generator.integers(SLOTS, size=DRAWS), generator)[1]
    without = transcripts(np.full(DRAWS, -1), generator)[1]
    losses = [np.log(np.mean(np.exp(ratio), axis=1)) for ratio in (with_it, without)]
    for loss, claimed in zip((losses[0], -losses[1]), zero_out_deltas(SHIFT, SLOTS, epsilon), strict=True):
        drawn = np.maximum(0.0, 1.0 - np.exp(np.minimum(epsilon - loss, 0.0)))
        assert drawn.mean() <= claimed + 4 * drawn.std() / math.sqrt(DRAWS)
        assert drawn.mean() > 0.2 * claimed, "the server is not a weak one"


@pytest.mark.parametrize("slot", [-1, 0, 3])
def test_what_the_simulator_sends_has_the_law_of_what_the_client_sends(slot):
    """Six projections each; fails for 1 seed in 10^3."""
    generator = np.random.Generator(np.random.Philox(key=12))
    slots = np.full(8000, slot)
    ours, theirs = transcripts(slots, generator)[0].reshape(8000, -1), simulated(slots, generator).reshape(8000, -1)
    weights = generator.standard_normal((ours.shape[1], 5))
    for weight in (*weights.T, np.ones(ours.shape[1])):
        assert ks_2samp(ours @ weight, theirs @ weight).pvalue > 1e-4


def test_replacing_is_taking_one_away_and_adding_another():
    for mu, slots, epsilon in ((1.0, 20, 0.6), (2.0, 20, 1.5)):
        splits = np.linspace(0.0, epsilon, 33)
        by_hand = min(
            zero_out_deltas(mu / 2, slots, first)[0] + math.exp(first) * zero_out_deltas(mu / 2, slots, rest)[1]
            for first, rest in zip(splits, epsilon - splits, strict=True)
        )
        assert allocation_delta(mu, slots, epsilon) == pytest.approx(min(by_hand, gdp_delta(mu, epsilon)), rel=0.05)


@pytest.mark.parametrize(
    ("mu", "permuted", "independent"),
    [
        (1.0, 0.62, 0.366),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2.0, 5.41, 1.13), (3.0, 12.3, 3.57))),
    ],
)
def test_a_permutation_is_worth_what_the_page_says(mu, permuted, independent):
    assert max(zero_out_deltas(mu, 100, permuted * 1.02)) < 1e-5 < max(zero_out_deltas(mu, 100, permuted * 0.98))
    assert allocation_epsilon(mu, 100, 1e-5) == pytest.approx(independent, rel=0.01)
