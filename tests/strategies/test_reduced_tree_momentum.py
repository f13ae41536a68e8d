"""Algorithm 2 over a grid: lemma 17 from noisy nodes, what the server keeps, and what ends a run."""

import math
import tracemalloc

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, SimulatedKeys, SystemKeys
from murmurfl.strategies import IncompleteRoundError, ReducedTreeMomentum, ReducedTreeMomentumState, TreeMomentum

from tests.harness import momentum as harness
from tests.harness.callbacks import AfterRound
from tests.harness.errors import raises
from tests.harness.momentum import BATCHES, CLIENTS, IMPOSSIBLE, ROUNDS, START, D, data, grid, policy
from tests.harness.rules import begun, stepped


def strategy(kind=ReducedTreeMomentum, **changes):
    return harness.strategy(kind, **{**({"smoothness": 1.0} if kind is ReducedTreeMomentum else {}), **changes})


def test_a_run_is_lemma_17_on_the_noisy_nodes_of_three_trees():
    """Algorithm 2 written out: A and D at the epochs' first iterates, nodes with noise, and the noisy combination."""
    subject = strategy(gamma=0.3)
    subject.start(grid(), START, num_rounds=ROUNDS)
    trees, stds = subject.aggregator.stream.trees(D)
    nonces = subject.state.nonces
    rows = subject.aggregator.stream._rows(trees, nonces, list(range(trees.num_nodes)), D)
    noise = stds[:, None] * np.array(rows, dtype=np.float64)
    w, anchors, series = np.ones(D), [], np.zeros((3, ROUNDS, D))
    encoder, decoder = trees.materialize(), trees.decoder()
    for t in range(ROUNDS):
        epoch, place = divmod(t, BATCHES)
        if not place:
            anchors.append(w)

        def gradient(x, place=place):
            return np.sum([x - data(str(i))[place] for i in range(CLIENTS)], axis=0)

        before = gradient(anchors[epoch - 1]) if epoch else np.zeros(D)
        series[0, t] = gradient(anchors[epoch])
        series[1, t], series[2, t] = series[0, t] - before, gradient(w) - series[0, t]
        nodes = encoder @ np.concatenate(series) + noise
        momentum = decoder[t] @ nodes
        w = w - 0.05 * momentum / np.linalg.norm(momentum)
    assert subject.state.w == pytest.approx(w, abs=1e-5)
    assert np.linalg.norm(w - 1) > 0.1
    noiseless = strategy(policy=policy(mu=1e6))
    noiseless.start(grid(), START, num_rounds=ROUNDS)
    assert np.abs(noiseless.state.w - w).max() > 0.01, "the noise was seen"


def test_with_next_to_no_noise_it_is_algorithm_1():
    ends = []
    for kind in (ReducedTreeMomentum, TreeMomentum):
        subject = strategy(kind, policy=policy(mu=1e6))
        subject.start(grid(), START, num_rounds=ROUNDS)
        ends.append(subject.state.w)
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def test_the_noise_on_every_momentum_has_the_covariance_of_the_trees():
    """4,000 values of 20 rounds of noise, whitened with B diag(std): a standard normal each.

    A whitened value's mean square is 1 within 5 sqrt(2 / 4,000) and correlations are below 5.5 / sqrt(4,000): false
    alarm below 2e-5 in all. With noise that is a tenth too small the first is missed by far.
    """
    size, subject = 4000, strategy()
    trees, stds = subject.aggregator.stream.trees(size)
    nonces = np.stack([np.frombuffer(SimulatedKeys(5, "server").nonce("s", t), np.uint8) for t in range(1, ROUNDS + 1)])
    seen = np.array([subject.aggregator.stream.noise(nonces, t, size) for t in range(1, ROUNDS + 1)])
    lower = np.linalg.cholesky((trees.decoder() * stds) @ (trees.decoder() * stds).T)
    white = np.linalg.solve(lower, seen)
    tolerance = 5 * math.sqrt(2 / size)
    squares = (white**2).mean(axis=1)
    assert np.abs(squares - 1).max() < tolerance
    assert np.abs(np.corrcoef(white) - np.eye(ROUNDS)).max() < 5.5 / math.sqrt(size)
    assert np.abs(0.9**2 * squares - 1).min() > tolerance


def test_what_a_server_keeps_does_not_grow_with_the_trees():
    """It keeps two vectors of d floats and 16 bytes a round; a step needs memory for a few times log2 T vectors."""
    size, rounds = 100_000, 256
    options = {"max_participations": rounds, "sample_participations": 16, "min_separation": 16}
    subject = strategy(
        policy=policy(**options, noise_quality="fast"), num_rounds=rounds, noise_cache_mib=0.0, gamma=0.2
    )
    state = begun(subject, np.zeros(size))
    assert sum(values.nbytes for values in vars(state).values()) == 2 * 8 * size + 16 * rounds
    nodes = np.count_nonzero(subject.aggregator.stream.trees(size)[1])
    nonces = np.zeros((rounds, 16), np.uint8)
    state = ReducedTreeMomentumState(state.w, state.momentum, nonces)
    tracemalloc.start()
    try:
        stepped(subject, state, np.ones(size), 255)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * (math.log2(rounds) + 1) * 8 * size, "a few times log2 T vectors"
    assert nodes * 4 * size > 10 * peak, "all nodes would be far more"


def test_kept_and_redrawn_rows_give_equal_noise():
    nonces = np.random.Generator(np.random.Philox(key=1)).integers(256, size=(ROUNDS, 16), dtype=np.uint8)
    kept, drawn = strategy(), strategy(noise_cache_mib=0.0)
    for t in range(1, ROUNDS + 1):
        assert (kept.aggregator.stream.noise(nonces, t, 50) == drawn.aggregator.stream.noise(nonces, t, 50)).all()
    assert len(kept.aggregator.stream._cached) > 20
    assert not drawn.aggregator.stream._cached
    other = nonces.copy()
    other[:, 0] ^= 1
    assert (
        np.abs(
            kept.aggregator.stream.noise(other, ROUNDS, 50) - drawn.aggregator.stream.noise(nonces, ROUNDS, 50)
        ).min()
        > 0
    ), "rows belong to nonces"


def test_real_keys_never_repeat_noise_for_a_round_that_is_made_again():
    subject = strategy(noise_keys=SystemKeys.generate())
    state = begun(subject, np.zeros(50))
    once, again = (stepped(subject, state, np.zeros(50), 1) for _ in range(2))
    assert np.abs(once.w - again.w).min() > 0


def test_a_missing_reply_ends_the_run_before_anything_of_the_round_is_published(tmp_path):
    seen = []
    note = AfterRound(lambda report, metrics: seen.append(report.server_round))
    subject = strategy(checkpoint=tmp_path / "c.npz", callbacks=[note])
    with raises(IncompleteRoundError, "missing", match="all 3 clients"):
        subject.start(grid(lost=0.1), START, num_rounds=ROUNDS)
    assert 0 < len(subject.history) < ROUNDS
    assert seen == list(range(1, len(subject.history) + 1))


def test_a_float32_model_is_refused_where_smoothness_is_used():
    start = ArrayRecord([np.ones(D, np.float32)])
    with raises(ConfigurationError, "wrong-type", match="float64"):
        strategy().start(grid(), start, num_rounds=ROUNDS)
    strategy(smoothness=math.inf).start(grid(), start, num_rounds=ROUNDS)


def test_steps_that_float64_would_make_longer_are_refused():
    subject = strategy(learning_rate=1e-9)
    with raises(ConfigurationError, "out-of-range", "learning_rate"):
        stepped(subject, begun(subject, np.full(D, 1e5)), np.ones(D), 1)


def test_bounds_never_exceed_twice_the_clip():
    subject = strategy(policy=policy(clip_norm=2.0, batch_size=4), smoothness=3.0)
    bounds, rounding = subject.aggregator.stream.changes(D), subject.aggregator.policy.plan(D).grid.charge(D)
    assert bounds.anchored == pytest.approx(2 * 2.0 / 4)
    assert bounds.moved == pytest.approx(2 * 3.0 * 0.05 * BATCHES / 4)
    assert bounds.residual == pytest.approx([2 * 3.0 * 0.05 * place / 4 + rounding for place in range(BATCHES)])
    assert bounds.node_rounding == 2 * subject.aggregator.stream.noise_grid(D).charge(D)
    assert bounds.residual[0] == rounding
    unknown = strategy(policy=policy(clip_norm=2.0, batch_size=4), smoothness=math.inf).aggregator.stream.changes(D)
    assert unknown.moved == pytest.approx(2 * 2 * 2.0 / 4)
    assert unknown.residual[0] == rounding, "the first iterate of an epoch is its anchor"


@pytest.mark.parametrize(
    "changes",
    [
        *IMPOSSIBLE,
        {"smoothness": -1.0},
        {"smoothness": math.nan},
        {"gamma": 1.5},
        {"policy": policy(max_participations=3)},
        {"policy": policy(noise_quality="fast"), "noise_keys": SystemKeys.generate()},
    ],
)
def test_impossible_servers_are_refused(changes):
    with pytest.raises(ConfigurationError, match="Expected"):
        strategy(**changes)
