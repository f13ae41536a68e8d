"""Sampling machines by the thousand: the same ones as a plain implementation draws, without a list of all of them."""

import sys

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, derived_seed
from murmurfl.strategies import sample_machines
from murmurfl.strategies.rounds.attendance import _dealer, first_asked_too_often, rounds_possible, sample_numbers
from murmurfl.strategies.rounds.known_machines import (
    NumberedNames,
    in_order,
    plain_names,
    restored_names,
)


def drawn_plainly(machines, count, seed, server_round):
    generator = np.random.Generator(np.random.Philox(key=derived_seed("sample machines", seed, server_round)))
    return sorted(generator.choice(machines, size=count, replace=False).tolist())


def dealt_plainly(machines, count, seed, rounds):
    """Hands from a shuffled pack, one card after the other: who is in the hand already waits for the next."""
    hands, pack, packs = [], [], 0
    for _ in range(rounds):
        hand = []
        while len(hand) < count:
            if not pack:
                packs += 1
                key = derived_seed("deal machines", seed, packs)
                pack = np.random.Generator(np.random.Philox(key=key)).permutation(machines).tolist()
            card = next(card for card in pack if card not in hand)
            pack.remove(card)
            hand.append(card)
        hands.append(sorted(hand))
    return hands


@pytest.mark.parametrize(("machines", "count"), [(1, 1), (7, 1), (7, 3), (7, 6), (7, 7), (50, 20), (50, 49), (60, 7)])
def test_machines_are_dealt_as_cards_are(machines, count):
    for seed in (0, 5):
        hands = [sample_numbers(machines, count, seed, t, "balanced").tolist() for t in range(1, 61)]
        assert hands == dealt_plainly(machines, count, seed, 60)


def test_a_hand_is_the_same_whichever_was_dealt_before():
    hands = dealt_plainly(30, 13, 9, 40)
    for t in np.random.default_rng(1).permutation(40).tolist():
        assert sample_numbers(30, 13, 9, t + 1, "balanced").tolist() == hands[t]
        _dealer.cache_clear() if t % 7 == 0 else None


def test_machines_are_drawn_as_numpy_draws_them():
    for machines, count in ((1, 1), (12, 5), (20_000, 300), (20_000, 900)):
        for t in (1, 2, 17):
            assert sample_numbers(machines, count, 3, t).tolist() == drawn_plainly(machines, count, 3, t)
            names = [f"node-{i}" for i in range(machines)]
            assert sample_machines(names, count, 3, t) == [names[i] for i in drawn_plainly(machines, count, 3, t)]


def test_dealing_keeps_one_permutation_however_many_rounds_there_are():
    machines, count = 50_000, 1_000
    for t in range(1, 151):
        sample_numbers(machines, count, 4, t, "balanced")
    dealer = _dealer(machines, count, 4)
    kept = [dealer._open[1]._order, *dealer._leftovers]
    assert sum(array.nbytes for array in kept) <= 4 * machines
    assert len(dealer._firsts) <= 4


def test_more_machines_a_round_than_there_are_cannot_be_dealt():
    with pytest.raises(ConfigurationError, match="no more machines a round"):
        sample_numbers(3, 4, 1, 1, "balanced")


@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
@pytest.mark.parametrize("seed", range(10))
def test_block_and_single_search_find_the_same_exhausted_machine(sampling, seed):
    names = [str(i) for i in range(9)]
    limits = np.random.default_rng(seed).integers(0, 9, size=9)
    found = first_asked_too_often(lambda t: sample_numbers(9, 4, seed, t, sampling), range(1, 12), limits)
    plainly = rounds_possible(
        lambda t: sample_machines(names, 4, seed, t, sampling), range(1, 12), dict(zip(names, limits, strict=True))
    )
    assert plainly == ((None, None) if found is None else (found[0], str(found[1])))


def test_numbered_names_are_a_list_that_is_not_made():
    names, listed = NumberedNames(101), [str(i) for i in range(101)]
    assert names == listed
    assert names == NumberedNames(101)
    assert names != listed[:-1]
    assert names != tuple(listed)
    assert len({names, NumberedNames(101)}) == 1
    assert list(names) == sorted(listed, key=lambda name: (len(name), name))
    assert (names[7], names[-1], names[:3], names[98::2]) == ("7", "100", NumberedNames(3), ["98", "100"])
    assert names[2::-1] == ["2", "1", "0"]
    assert all(name in names for name in listed)
    for stranger in ("101", "07", "-1", "", "x", "٣", "9" * 5000, 7, None):
        assert stranger not in names
    assert in_order(names) is names
    assert in_order(["10", "9"]) == ["9", "10"]
    assert sys.getsizeof(NumberedNames(10**9)) < 100
    some = NumberedNames(range(3, 101, 4))
    assert some == [str(i) for i in range(3, 101, 4)]
    assert [name for name in names if name in some] == list(some)
    assert some[1:3] == NumberedNames(range(7, 15, 4))
    assert some != NumberedNames(25)


def test_names_come_back_from_a_checkpoint():
    for names in (["a", "10"], NumberedNames(1_000_000), NumberedNames(range(1, 9))):
        assert restored_names(plain_names(names)) == names
    assert plain_names(NumberedNames(1_000_000)) == 1_000_000
