"""The weighted tree of private momentum: COMPOSE by brute force, the algebra, sensitivities, and the paper's bounds.

The trees of algorithm 2: lemma 17 as a matrix, sensitivities and counts from its entries, the paper's bounds.
"""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError
from murmurfl.strategies.momentum_tree import (
    SERIES,
    Changes,
    MomentumTree,
    ReconstructionTrees,
    best_gamma,
    compose,
)

from tests.harness.errors import raises


def reconstructed_momentum(anchored, moved, residual, *, epoch_length, alpha, gamma):
    r"""The momentum of the last step from three series of differences: lemma 17, without noise (algorithm 2).

    With t = q N + r, 0 <= r < N, and w_{qN} the anchor of step t, m_t = alpha (G_[1,t] + r_[1,t]) where G_[1,t] is made
    from the sums over [1, r] and [r + 1, r + N] and, for the epochs after, from (1 - gamma) Delta + gamma G: what
    changed from anchor to anchor is small, and would need little noise. The lemma's two sums have ranges of their own
    (algorithm 4 prints one). It is true only if every sample returns exactly N steps later.

    Row s of ``anchored`` is the gradient of step s's sample at the step's anchor, ``moved`` the same minus that at the
    anchor before (not used in the first epochs), ``residual`` its gradient at w_s minus that at the anchor.
    """
    n, t = epoch_length, len(anchored)
    decay = 1 - alpha

    def total(terms, first, last):
        sums = np.zeros(terms.shape[1])
        for y, z in compose(first, last):
            node = decay ** np.arange(z - y, -1, -1.0) @ terms[y - 1 : z]
            sums += decay ** (last - z) * node
        return sums

    q, r = divmod(t, n)
    gradient = decay ** (t - r) * total(anchored, 1, r)
    if q:
        second = sum(decay ** (n * i) * (1 - gamma) ** (q - 1 - i) for i in range(q))
        gradient += second * total(anchored, r + 1, r + n)
    for i in range(1, q):
        first, last = t - i * n + 1, t - (i - 1) * n
        weight = sum((1 - gamma) ** j * decay ** ((i - 1 - j) * n) for j in range(i))
        gradient += weight * ((1 - gamma) * total(moved, first, last) + gamma * total(anchored, first, last))
    return alpha * (gradient + total(residual, 1, t))


CASES = [(1, 1, 0.5), (7, 3, 0.4), (16, 16, 0.1), (37, 5, 0.3), (64, 10, 0.1), (100, 9, 1.0), (60, 100, 0.05)]


def fewest_dyadic(first, last):
    """The fewest intervals [q 2^k + 1, (q + 1) 2^k] that make up [first, last], by trying all."""
    best = {last + 1: []}
    for a in range(last, first - 1, -1):
        sizes = [2**k for k in range(8) if (a - 1) % 2**k == 0 and a + 2**k - 1 <= last]
        best[a] = min(([(a, a + size - 1), *best[a + size]] for size in sizes), key=len)
    return best[first]


def test_compose_is_the_shortest_way_to_make_an_interval_of_dyadic_ones():
    for first in range(1, 41):
        for last in range(first - 1, 41):
            nodes = compose(first, last)
            assert [s for a, b in nodes for s in range(a, b + 1)] == list(range(first, last + 1))
            assert len(nodes) == len(fewest_dyadic(first, last)) if last >= first else nodes == []
            for a, b in nodes:
                size = b - a + 1
                assert size & (size - 1) == 0
                assert (a - 1) % size == 0
    with raises(ConfigurationError, "out-of-range", "first"):
        compose(0, 3)


@pytest.mark.parametrize(("steps", "epoch", "alpha"), CASES)
def test_decoded_nodes_are_the_momentum(steps, epoch, alpha):
    tree, gradients, momentum = MomentumTree(steps, epoch, alpha), np.random.default_rng(3).normal(size=(steps, 4)), 0.0
    decoded = tree.decoder() @ (tree.materialize() @ gradients)
    for t in range(steps):
        momentum = (1 - alpha) * momentum + alpha * gradients[t]
        assert decoded[t] == pytest.approx(momentum, abs=1e-12)


@pytest.mark.parametrize(("steps", "epoch", "alpha"), CASES)
def test_changes_are_those_of_the_materialised_tree(steps, epoch, alpha):
    tree = MomentumTree(steps, epoch, alpha)
    encoder = tree.materialize()
    for place in range(epoch):
        assert tree.changes[:, place] == pytest.approx(encoder[:, place::epoch].sum(axis=1), abs=1e-15)


@pytest.mark.parametrize(("steps", "epoch", "alpha"), CASES)
@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_the_noise_is_exactly_mu_for_the_worst_sample(steps, epoch, alpha, rounding):
    tree, mu, change = MomentumTree(steps, epoch, alpha), 0.7, 3.0
    stds, encoder = tree.noise_stds(change, mu, rounding=rounding), tree.materialize()
    spent = []
    for place in range(epoch):
        moved = change * encoder[:, place::epoch].sum(axis=1)
        moved += rounding * (moved > 0)
        spent.append(math.sqrt(((moved / stds) ** 2).sum()))
    assert max(spent) == pytest.approx(mu)


@pytest.mark.parametrize(("steps", "epoch", "alpha"), CASES)
def test_the_papers_closed_forms_corrected_are_upper_bounds(steps, epoch, alpha):
    """2 alpha G sum_{j < ceil(length / N)} (1 - alpha)^{jN} for a node, and V for their number (section 4)."""
    tree = MomentumTree(steps, epoch, alpha)
    heights = int(math.log2(steps))
    low = int(math.log2(epoch))
    count = (min(heights, low) + 1) * math.ceil(steps / epoch)
    count += sum(steps // 2**j for j in range(low + 1, heights + 1))
    for step in range(1, steps + 1):
        first, last = tree.node(step)
        terms = math.ceil((last - first + 1) / epoch)
        bound = alpha * sum((1 - alpha) ** (j * epoch) for j in range(terms))
        assert tree.changes[step - 1].max() == pytest.approx(bound), "for the best place it is exact"
        printed = math.ceil((last - first) / epoch)
        if first == last:
            assert printed == 0, "as printed, a leaf would need no noise"
            assert bound > 0
    exact = ((tree.changes / tree.changes.max(axis=1)[:, None]) ** 2).sum(axis=0).max()
    assert exact <= count * (1 + 1e-12)


def test_reshuffling_would_break_the_count():
    """A sample that changes its place from epoch to epoch moves the nodes more than any fixed place does."""
    tree = MomentumTree(12, 3, 0.3)
    stds, encoder = tree.noise_stds(1.0, 1.0), tree.materialize()
    spent = {
        places: math.sqrt(((encoder[:, [3 * e + c for e, c in enumerate(places)]].sum(axis=1) / stds) ** 2).sum())
        for places in product(range(3), repeat=4)
    }
    assert max(spent[c, c, c, c] for c in range(3)) == pytest.approx(1.0)
    assert max(spent.values()) > 1.1


def a_run(steps, epoch, alpha, reshuffled=False):
    """Plain momentum SGD on quadratics of different curvature; its momentum, and the three series of algorithm 2."""
    rng = np.random.default_rng(7)
    curvature, centre = rng.uniform(0.5, 2.0, size=(epoch, 3)), rng.normal(size=(epoch, 3))
    order, w, momentum = rng.permutation(epoch), np.ones(3), np.zeros(3)
    anchors, series = {0: w, -1: w}, []
    for t in range(1, steps + 1):
        q, r = divmod(t, epoch)
        if r == 0:
            anchors[q] = w
            order = rng.permutation(epoch) if reshuffled else order
        i = order[r]
        at_w, at_anchor, before = (curvature[i] * (x - centre[i]) for x in (w, anchors[q], anchors[q - 1]))
        series.append((at_anchor, at_anchor - before, at_w - at_anchor))
        momentum = (1 - alpha) * momentum + alpha * at_w
        w = w - 0.1 * momentum / np.linalg.norm(momentum)
    return momentum, [np.array(part) for part in zip(*series, strict=True)]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("epoch", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("steps", [1, 4, 8, 13, 29, 64])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_the_reconstruction_of_algorithm_2_is_plain_momentum(epoch, steps, alpha, gamma):
    momentum, series = a_run(steps, epoch, alpha)
    rebuilt = reconstructed_momentum(*series, epoch_length=epoch, alpha=alpha, gamma=gamma)
    assert np.abs(rebuilt - momentum).max() < 1e-10


def test_the_reconstruction_is_false_under_reshuffling():
    momentum, series = a_run(29, 5, 0.2, reshuffled=True)
    rebuilt = reconstructed_momentum(*series, epoch_length=5, alpha=0.2, gamma=0.3)
    assert np.abs(rebuilt - momentum).max() > 1e-3


@pytest.mark.parametrize("wrong", [(0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.0), (1, 1, 1.5), (1, 1, math.nan)])
def test_impossible_trees_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="Expected"):
        MomentumTree(*wrong)


@pytest.mark.parametrize("wrong", [(0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, -1.0), (math.inf, 1.0, 0.0)])
def test_impossible_noise_is_refused(wrong):
    with raises(ConfigurationError, "out-of-range", "change"):
        MomentumTree(4, 2, 0.5).noise_stds(wrong[0], wrong[1], rounding=wrong[2])


TREE_CASES = [
    (1, 1, 0.5, 0.3),
    (9, 1, 0.4, 0.2),
    (7, 3, 0.4, 0.0),
    (16, 16, 0.1, 0.5),
    (37, 5, 0.3, 1.0),
    (64, 8, 0.1, 0.2),
    (64, 10, 1.0, 0.2),
    (60, 100, 0.05, 0.5),
]


def changes(epoch, moved=0.4, rounding=0.0):
    return Changes(2.0, moved, tuple(moved * place / epoch for place in range(epoch)), rounding)


def series_of(gradients, epoch, residual):
    moved = gradients.copy()
    moved[epoch:] -= gradients[:-epoch]
    return np.concatenate([gradients, moved, residual])


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES)
def test_what_the_nodes_are_combined_to_is_plain_momentum(steps, epoch, alpha, gamma):
    trees, rng, momentum = ReconstructionTrees(steps, epoch, alpha, gamma), np.random.default_rng(3), 0.0
    anchored, residual = rng.normal(size=(2, steps, 3))
    rebuilt = trees.decoder() @ (trees.materialize() @ series_of(anchored, epoch, residual))
    for t in range(steps):
        momentum = (1 - alpha) * momentum + alpha * (anchored[t] + residual[t])
        assert np.abs(rebuilt[t] - momentum).max() < 1e-10


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES)
def test_for_any_series_a_row_is_lemma_17(steps, epoch, alpha, gamma):
    """Not only for series that telescope: every node has the weight that the lemma gives it."""
    trees, rng = ReconstructionTrees(steps, epoch, alpha, gamma), np.random.default_rng(4)
    series = rng.normal(size=(3, steps, 2))
    rebuilt = trees.decoder() @ (trees.materialize() @ np.concatenate(series))
    for t in range(1, steps + 1):
        lemma = reconstructed_momentum(*(part[:t] for part in series), epoch_length=epoch, alpha=alpha, gamma=gamma)
        assert np.abs(rebuilt[t - 1] - lemma).max() < 1e-10


def test_under_reshuffling_the_combination_is_something_else():
    """Algorithm 4 with differences of two samples' gradients where the lemma has those of one sample's."""
    trees, rng = ReconstructionTrees(29, 5, 0.2, 0.3), np.random.default_rng(5)
    gradients = rng.normal(size=(29, 2))
    moved = rng.normal(size=(29, 2))  # of samples that were elsewhere an epoch ago
    rebuilt = trees.decoder() @ (trees.materialize() @ np.concatenate([gradients, moved, np.zeros((29, 2))]))
    weights = 0.2 * 0.8 ** np.arange(28, -1, -1)
    assert np.abs(rebuilt[-1] - weights @ gradients).max() > 0.01


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES)
def test_weights_and_changes_are_those_of_the_materialised_trees(steps, epoch, alpha, gamma):
    trees, bounds = ReconstructionTrees(steps, epoch, alpha, gamma), changes(epoch, rounding=0.01)
    encoder, decoder, moved = trees.materialize(), trees.decoder(), trees.moved(bounds)
    used = np.abs(decoder).max(axis=0) > 0
    for place in range(epoch):
        terms = np.zeros(3 * steps)
        terms[place:steps:epoch], terms[steps + place : 2 * steps : epoch] = bounds.anchored, bounds.moved
        terms[2 * steps + place :: epoch] = bounds.residual[place]
        expected = encoder @ terms
        expected[-steps:] += bounds.node_rounding
        assert moved[used, place] == pytest.approx(expected[used], abs=1e-14)
    assert (moved[~used] == 0).all(), "what no momentum uses is not released"
    stds = trees.noise_stds(bounds, 1.0)
    assert trees.mean_variance(stds) == pytest.approx(((decoder * stds) ** 2).sum() / steps)


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES)
@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_the_noise_of_three_trees_is_exactly_mu_for_the_worst_sample(steps, epoch, alpha, gamma, rounding):
    trees, mu = ReconstructionTrees(steps, epoch, alpha, gamma), 0.7
    bounds = changes(epoch, rounding=rounding)
    stds, moved = trees.noise_stds(bounds, mu), trees.moved(bounds)
    assert ((stds > 0) == (moved.max(axis=1) > 0)).all()
    spent = np.sqrt(((moved[stds > 0] / stds[stds > 0, None]) ** 2).sum(axis=0))
    assert spent.max() == pytest.approx(mu)


def true_mu(trees, stds, contributions):
    """Of momenta with the trees' noise, for a sample that adds ``contributions`` to the steps' gradients."""
    decoder, steps = trees.decoder() * stds, trees.num_steps
    weights = MomentumTree(steps, 1, trees.alpha).decoder() @ MomentumTree(steps, 1, trees.alpha).materialize()
    change = weights @ contributions
    whitened = np.linalg.lstsq(decoder, change, rcond=None)[0]
    assert decoder @ whitened == pytest.approx(change, abs=1e-9)
    return float(np.linalg.norm(whitened))


def a_path(rng, bounds, steps, place, epoch):
    """A sample's contributions in one direction, as far from each other as the bounds allow, signs at random."""
    contributions, anchored = np.zeros(steps), bounds.anchored
    for t in range(place, steps, epoch):
        if t > place:
            anchored = float(np.clip(anchored + rng.choice([-1, 1]) * bounds.moved, -bounds.anchored, bounds.anchored))
        contributions[t] = anchored + rng.choice([-1, 1]) * bounds.residual[place]
    return contributions


@pytest.mark.parametrize("gamma", [0.0, 0.2, 1.0])
def test_bounded_gradient_paths_cost_at_most_mu(gamma):
    """The mu of the published momenta themselves, by linear algebra: what a distinguisher of two data sets has."""
    steps, epoch, rng = 48, 6, np.random.default_rng(6)
    trees, bounds = ReconstructionTrees(steps, epoch, 0.2, gamma), changes(epoch, moved=0.1)
    stds = trees.noise_stds(bounds, 0.7)
    worst = 0.0
    for place in range(epoch):
        for _ in range(20):
            worst = max(worst, true_mu(trees, stds, a_path(rng, bounds, steps, place, epoch)))
    assert worst <= 0.7 * (1 + 1e-9)
    assert worst > 0.1
    halved = max(true_mu(trees, stds / 4, a_path(rng, bounds, steps, place, epoch)) for place in range(epoch))
    assert halved > 0.7, "a quarter of the noise would be seen"
    if gamma == 0.0:
        # A reply that is missing every other epoch: the differences are whole gradients.
        gaps = a_path(rng, bounds, steps, 2, epoch)
        gaps[2 :: 2 * epoch] = 0.0
        assert true_mu(trees, stds, gaps) > 0.7


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES)
def test_the_papers_closed_forms_of_three_trees_are_upper_bounds(steps, epoch, alpha, gamma):
    """Theorem 8 with the discount sum it drops, and with the nodes of all series counted: sensitivities and V.

    A node's change is at most that of one step times sum_{j < ceil(length / N)} (1 - alpha)^{jN}. A sample is in at
    most 2 (floor(log2 2N) + 1) nodes that end within 2 N steps, and of one tree in at most V.
    """
    trees, bounds = ReconstructionTrees(steps, epoch, alpha, gamma), changes(epoch)
    moved = trees.moved(bounds)
    heights, low = int(math.log2(steps)), int(math.log2(epoch))
    count = (min(heights, low) + 1) * math.ceil(steps / epoch)
    count += sum(steps // 2**j for j in range(low + 1, heights + 1))
    largest = dict(zip(SERIES, (bounds.anchored, bounds.moved, max(bounds.residual)), strict=True))
    nodes = [trees.node(number) for number in range(trees.num_nodes)]
    for number, (series, first, last) in enumerate(nodes):
        terms = math.ceil((last - first + 1) / epoch)
        discounts = sum((1 - alpha) ** (j * epoch) for j in range(terms))
        assert moved[number].max() <= alpha * discounts * largest[series] * (1 + 1e-12)
        if alpha >= 1 / epoch:
            assert discounts <= 1 / (1 - math.exp(-1)), "proposition 13"
    for series in SERIES:
        chosen = np.array([kind == series for kind, _, _ in nodes])
        ends = np.array([last for _, _, last in nodes])
        assert (moved[chosen] > 0).sum(axis=0).max() <= count
        assert (moved[chosen & (ends <= 2 * epoch)] > 0).sum(axis=0).max() <= 2 * (int(math.log2(2 * epoch)) + 1)


def test_every_interval_lemma_17_asks_for_is_made_of_few_nodes():
    """Proposition 18: |COMPOSE(a, b)| <= 2 (1 + ceil(log2(b - a + 1))), so a momentum has O((T / N) log T) of them."""
    for first, last in product(range(1, 60), repeat=2):
        if first <= last:
            assert len(compose(first, last)) <= 2 * (1 + math.ceil(math.log2(last - first + 1)))
    trees = ReconstructionTrees(300, 20, 0.1, 0.3)
    for t in range(1, 301):
        assert len(trees.row(t)[0]) <= 4 * (1 + math.ceil(math.log2(20))) * (t // 20 + 1) + math.log2(t) + 1


def test_noise_beats_algorithm_1_only_on_short_paths():
    steps, epoch, alpha = 320, 20, 0.1
    plain = MomentumTree(steps, epoch, alpha)
    reference = float(((plain.decoder() * plain.noise_stds(2.0, 1.0)) ** 2).sum() / steps)
    variances = []
    for moved in (0.01, 0.1, 1.0, 4.0):
        bounds = changes(epoch, moved=moved)
        trees = ReconstructionTrees(steps, epoch, alpha, best_gamma(steps, epoch, alpha, bounds))
        variances.append(trees.mean_variance(trees.noise_stds(bounds, 1.0)))
    assert all(one < other for one, other in pairwise(variances))
    assert variances[0] < 0.3 * reference
    assert variances[-1] > reference


@pytest.mark.parametrize(("steps", "epoch", "alpha", "gamma"), TREE_CASES[4:])
def test_the_noise_is_no_more_than_the_papers_shares_would_need(steps, epoch, alpha, gamma):
    """Theorem 8's way: in each tree in proportion to a node's change, and a third of mu^2 for each."""
    trees, bounds = ReconstructionTrees(steps, epoch, alpha, gamma), changes(epoch)
    moved = trees.moved(bounds)
    largest = moved.max(axis=1)
    theirs = np.zeros_like(largest)
    for series in SERIES:
        chosen = np.array([trees.node(number)[0] == series for number in range(trees.num_nodes)]) & (largest > 0)
        if chosen.any():
            count = ((moved[chosen] / largest[chosen, None]) ** 2).sum(axis=0).max()
            theirs[chosen] = largest[chosen] * math.sqrt(3 * count)
    assert trees.mean_variance(trees.noise_stds(bounds, 1.0)) <= trees.mean_variance(theirs)


def test_the_best_gamma_is_the_best_of_its_grid():
    bounds = changes(8, moved=0.2)
    chosen = best_gamma(64, 8, 0.1, bounds)

    def variance(gamma):
        trees = ReconstructionTrees(64, 8, 0.1, gamma)
        return trees.mean_variance(trees.noise_stds(bounds, 1.0))

    assert 0 < chosen < 1
    assert all(variance(chosen) <= variance(gamma) for gamma in (0.0, 0.01, 0.5, 1.0))


@pytest.mark.parametrize("wrong", [(0, 1, 0.5, 0.1), (4, 0, 0.5, 0.1), (4, 2, 0.0, 0.1), (4, 2, 0.5, 1.1)])
def test_three_impossible_trees_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="Expected"):
        ReconstructionTrees(*wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Changes(0.0, 1.0, (1.0,)),
        lambda: Changes(1.0, -1.0, (1.0,)),
        lambda: Changes(1.0, 1.0, (math.inf,)),
        lambda: Changes(1.0, 1.0, (1.0,), math.nan),
        lambda: ReconstructionTrees(4, 2, 0.5, 0.1).noise_stds(changes(3), 1.0),
        lambda: ReconstructionTrees(4, 2, 0.5, 0.1).noise_stds(changes(2), 0.0),
    ],
)
def test_impossible_changes_are_refused(make):
    with pytest.raises(ConfigurationError, match="Expected"):
        make()
