"""docs/proofs/sensitivities.md, step by step; what stands elsewhere in tests/ is named there and not repeated."""

import math
from fractions import Fraction

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    PrivacyPolicy,
    SimulatedKeys,
    clip_per_sample,
    make_mechanism,
)
from murmurfl.privacy.release import clipping as clipping_module
from murmurfl.privacy.release.clipping import LEAST_CLIP, DenseContributions, RowBound
from murmurfl.privacy.release.shuffled_privatizer import noisy_epoch
from murmurfl.strategies import TrustedMu2

from tests.harness.errors import raises
from tests.harness.rules import begun, stepped


def exact_square(row):
    """The squared norm in rational arithmetic."""
    values, counts = np.unique(row, return_counts=True)
    return sum(int(count) * Fraction(float(value)) ** 2 for value, count in zip(values, counts, strict=True))


def stagnating(size, large):
    """Entries whose squares a running sum of float64 does not notice beside the first ones."""
    row = np.full(size, 2.0**-27 * 0.999)
    row[:large] = 1.0
    return row


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("large", [1, 2, 8])
@pytest.mark.parametrize("size", [7850, 8192, 1 << 18, 1 << 20])
@pytest.mark.parametrize("clip_norm", [1.0, 0.3])
def test_no_row_exceeds_the_clip_in_exact_arithmetic(clip_norm, size, large, count):
    """By itself and among others, whose squares NumPy would add up in another order."""
    clipped = clip_per_sample(np.tile(stagnating(size, large), (count, 1)), clip_norm)
    assert (clipped == clipped[0]).all()
    assert exact_square(clipped[0]) <= Fraction(clip_norm) ** 2
    assert exact_square(clipped[0]) > Fraction(clip_norm) ** 2 * (1 - Fraction(1, 2**36))


def test_a_row_is_clipped_alike_however_many_stand_beside_it():
    """To the last bit, and in whichever order they lie in memory."""
    rows = np.random.Generator(np.random.Philox(key=42)).normal(size=(5, 20_000))
    together = clip_per_sample(rows, 1.0)
    assert (clip_per_sample(np.asfortranarray(rows), 1.0) == together).all()
    for chosen in (slice(0, 1), slice(1, 3), slice(4, 5)):
        assert (clip_per_sample(rows[chosen], 1.0) == together[chosen]).all()


@pytest.mark.parametrize("stability", [None, 0.01])
def test_rows_in_columns_are_bounded_as_each_alone(stability):
    rows = np.random.default_rng(3).normal(size=(40, 300))
    bound = RowBound(1.0, stability=stability, observed=False)
    columns = np.asfortranarray(rows)
    scales, bounded = bound.scales(DenseContributions(columns).norms()), bound.rows(columns)
    for i, row in enumerate(rows):
        assert bound.scales(DenseContributions(row[None]).norms()) == scales[i]
        assert (bound.rows(row[None]) == bounded[i]).all()


@pytest.mark.parametrize("lost", [1e-323, 1e-200, math.nextafter(LEAST_CLIP, 0.0)])
def test_a_clip_too_short_for_float64_is_refused(lost):
    """With a clip of 1e-300 and entries of 1e22 the factor is subnormal: rows were up to twice as long as the clip."""
    for bounded in (lambda: clip_per_sample(np.ones((1, 3)), lost), lambda: RowBound(lost)):
        with raises(ConfigurationError, "out-of-range", "clip_norm", match="clip_norm >= 1e-150"):
            bounded()
    extreme = np.random.default_rng(4)
    rows = np.exp(extreme.uniform(-690, 690, (200, 3)))
    bound, out = RowBound(LEAST_CLIP, observed=False), np.empty(3)
    contributions = DenseContributions(rows)
    scales = bound.scales(contributions.norms())
    for i, row in enumerate(bound.rows(rows)):
        assert exact_square(row) <= Fraction(LEAST_CLIP) ** 2
        if np.isfinite(scales[i]):
            contributions.write(i, scales[i], out)
            assert exact_square(out) <= Fraction(LEAST_CLIP) ** 2


@pytest.mark.parametrize("planted", ["no margin", "one running sum"])
def test_a_clip_without_margin_or_blocked_sum_is_exceeded(planted, monkeypatch):
    """The planted bugs: 2^-40 is for runs of 8192 values, and what is rounded after them."""
    if planted == "no margin":
        monkeypatch.setattr(clipping_module, "_MARGIN", 1.0)
    else:
        monkeypatch.setattr(clipping_module, "squared_lengths", lambda rows: np.einsum("ij,ij->i", rows, rows))
    clipped = clip_per_sample(np.tile(stagnating(1 << 18, 1), (2, 1)), 1.0)
    assert exact_square(clipped[0]) > 1


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "tree"])
@pytest.mark.parametrize("releases", [1, 2, 3, 7])
def test_one_participation_costs_the_longest_column_in_everything_sent(name, releases, reader):
    policy = reader.policy(mechanism=name, max_participations=releases)
    sent = reader.sent(policy, [("s", k) for k in range(releases)])
    columns = np.linalg.norm(sent.plan.mechanism.materialize(), axis=0)
    for column, norm in enumerate(columns):
        assert sent.mu([column]) == pytest.approx(sent.plan.sensitivity * norm / sent.plan.noise_std)
    assert sent.worst() == pytest.approx(sent.plan.sensitivity * columns.max() / sent.plan.noise_std)


@pytest.mark.parametrize("decoder", ["least-squares", "dyadic"])
def test_tree_prefixes_tell_no_more_than_nodes_for_any_decoder(decoder, reader):
    """Data processing: the nodes' mu is an upper bound, attained only where every node can be had back."""
    for releases in range(1, 9):
        policy = reader.policy(mechanism="tree", decoder=decoder, max_participations=releases)
        sent = reader.sent(policy, [("s", k) for k in range(releases)])
        nodes = make_mechanism("tree", releases).materialize()
        for column in range(releases):
            of_nodes = sent.plan.sensitivity * np.linalg.norm(nodes[:, column]) / sent.plan.noise_std
            assert sent.mu([column]) <= of_nodes * (1 + 1e-9)
        assert np.linalg.norm(nodes, axis=0).max() ** 2 == pytest.approx(releases.bit_length())
    bare = sent.noise.copy()
    bare[0] = 0.0  # the planted bug: the first leaf as the paper prints it, without noise
    assert math.isinf(type(sent)(sent.signal, bare, sent.samples, sent.plan).worst())


@pytest.mark.parametrize("schedule", ["uniform", "harmonic", "paper"])
def test_the_squares_of_a_cancelling_schedule_add_up_to_mu(schedule, reader):
    options = {"num_rounds": 20} if schedule == "paper" else {}
    policy = reader.policy(schedule=schedule, max_participations=8, **options)
    sent = reader.sent(policy, [("s", k) for k in range(8)])
    sigmas = sent.plan.noise_std * sent.plan.mechanism.sigmas
    for first in range(8):
        expected = sent.plan.sensitivity * math.sqrt(float((1 / sigmas[first:] ** 2).sum()))
        assert sent.mu([first]) == pytest.approx(expected)
    assert (sent.mu([0]) == pytest.approx(2.0)) == (schedule != "paper")
    assert sent.mu([0]) <= 2.0 * (1 + 1e-9)


ROUNDS, CLIENTS, SIZE = 6, 3, 4


def trusted_momenta(sign):
    """What a trusted server steps along in every round, where one sample of the first points one way or the other."""
    policy = PrivacyPolicy(1.0, 1, ROUNDS, 2.0, trust="trusted-server")
    strategy = TrustedMu2(
        num_clients=CLIENTS,
        clients_per_round=CLIENTS,
        learning_rate=1.0,
        policy=policy,
        num_rounds=ROUNDS,
        noise_keys=SimulatedKeys(1, "server"),
        session="s",
    )
    state, momenta, grid = begun(strategy, np.zeros(SIZE)), [], policy.plan(SIZE).grid
    strategy.aggregator.shape(SIZE, SIZE)
    sample = grid.values(grid.counts(sign * np.eye(SIZE)[0]))
    for t in range(1, ROUNDS + 1):
        after = stepped(
            strategy, state, strategy.aggregator.stream.released(sample if t == 1 else np.zeros(SIZE), t), t
        )
        momenta.append(state.w - after.w)
        state = after
    return np.array(momenta), strategy


def test_a_trusted_servers_rounds_all_show_the_sample_and_together_cost_mu():
    """Delta / m in each of T rounds, each under fresh noise: T times the square."""
    one, strategy = trusted_momenta(1.0)
    other, _ = trusted_momenta(-1.0)
    moved, std = np.linalg.norm(one - other, axis=1), strategy.aggregator.stream.noise_std(SIZE)
    assert moved == pytest.approx(np.full(ROUNDS, 2.0 / CLIENTS)), "the sample stays in q"
    spent = math.sqrt(float(((moved / std) ** 2).sum()))
    assert spent <= strategy.aggregator.mu
    assert spent == pytest.approx(strategy.aggregator.mu, rel=1e-5)
    assert spent / math.sqrt(ROUNDS) < 0.5 * strategy.aggregator.mu, "the planted bug: the noise of one round"


def test_one_sample_moves_one_step_of_an_epoch():
    """Plain composition: with the iterates before it given, the sample's step moves by 2 S and no other step at all."""
    generator = np.random.Generator(np.random.Philox(key=41))
    worst = 0.0
    for _ in range(200):
        start, steps, replaced = generator.normal(size=3), 5, int(generator.integers(5))
        samples = generator.normal(size=(steps, 3)) * generator.choice([0.1, 1.0, 50.0], size=(steps, 1))
        neighbour = samples.copy()
        neighbour[replaced] = -samples[replaced] * generator.choice([1.0, 100.0])
        given = [start + generator.normal(size=3) * k for k in range(steps)]

        def moved(step, data, given=given):
            gradient = lambda point, i: np.tanh(given[step]) * 3 + data[step]  # noqa: E731 - expands, if it likes
            return noisy_epoch(gradient, given[step], 1, learning_rate=0.3, clip_norm=1.0)

        for step in range(steps):
            difference = np.linalg.norm(moved(step, samples) - moved(step, neighbour))
            assert difference <= 2.0 if step == replaced else difference == 0.0
            worst = max(worst, difference)
    assert worst > 1.9
