"""The weighted tree of private momentum: COMPOSE by brute force, the algebra, sensitivities, and the paper's bounds."""

import math
from itertools import product

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.mechanisms.momentum_tree import MomentumTree, compose

from tests.harness.lemma_17 import reconstructed_momentum

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
    with pytest.raises(ConfigurationError, match="from 1"):
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
    with pytest.raises(ConfigurationError, match="Expected"):
        MomentumTree(4, 2, 0.5).noise_stds(wrong[0], wrong[1], rounding=wrong[2])
