"""Claims about secure aggregation that are tempting and false, each beside what the sums really tell; and returning
samples and releases that stand alone, where the theorem says something else.

"Exact" is v' S^+ v of everything that was opened (tests/harness/transcripts.py). Uniform cancelling noise is in units
in which a client by itself has mu^2 = K.
"""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from murmurfl.privacy import make_mechanism

from tests.harness.transcripts import (
    MECHANISMS,
    ROUNDING,
    Opened,
    Stream,
    Transcript,
    generator,
    largest_column,
    mechanism,
    played,
    random_patterns,
    stream,
)

ROOT = Path(__file__).parents[2]


def uniform(releases):
    """P_k has noise z_k: sensitivity and noise_std one each."""
    return Stream(np.eye(releases))


def square(sets, releases, client="0", release=1):
    return Transcript(uniform(releases), sets).square(client, release)


def fixed(clients, rounds):
    return np.full((clients, rounds), 2)


def with_acks(releases, honest, ack_of_the_victim):
    """Everybody in every sum; the victim is told what the server likes, the others the truth."""
    return [
        [Opened("0", k, ack_of_the_victim(k)), *(Opened(str(i), k, k - 1) for i in range(1, honest))]
        for k in range(1, releases + 1)
    ]


def test_the_theorem_is_attained_by_one_cohort_for_all_rounds():
    assert square(played(fixed(10, 50)), 50) == pytest.approx(50 / 10)


def victim_once():
    """It takes part once, nine others fifty times; mu^2 over the claim that K is its own later releases."""
    patterns = fixed(10, 50)
    patterns[0, 1:] = 0
    return square(played(patterns), 50) / (1 / 10)


def others_once():
    """Nine others in round 1 only, the victim from round 2 on; over the claim that h is who ever took part."""
    patterns = np.zeros((10, 50), int)
    patterns[1:, 0] = patterns[0, 1:] = 2
    return square(played(patterns), 50) / (50 / 10)


def two_and_later_ten(rounds):
    """Two in the sample's round, ten in those after it; over the claim that h is ten."""
    patterns = fixed(10, rounds)
    patterns[2:, 0] = 0
    return square(played(patterns), rounds) / (rounds / 10)


def told_zero(releases, honest):
    """The victim's P_k anew in every sum, beside others' differences; over the claim that acks may be the server's."""
    return square(with_acks(releases, honest, lambda k: 0), releases) / (releases / honest)


def test_the_victims_own_later_releases_are_not_k():
    """What the others' noise tells of its first sum counts."""
    assert victim_once() == pytest.approx(10 / (1 + 9 / 50))
    assert victim_once() <= 50


def test_past_participants_do_not_count_as_h():
    """Their noise never changes, and a difference has none."""
    assert others_once() == pytest.approx(49 / 5)


def test_the_mean_or_a_later_size_of_a_cohort_is_not_h():
    for rounds in (2, 5, 50):
        assert two_and_later_ten(rounds) == pytest.approx((1 / 2 + (rounds - 1) / 10) / (rounds / 10))
        mean = (2 + 10 * (rounds - 1)) / rounds
        assert two_and_later_ten(rounds) * mean / 10 > 1.05, "the mean size"
        assert two_and_later_ten(rounds) <= 10 / 2, "the theorem"


def test_a_server_that_alone_checks_acknowledgements_may_tell_the_victim_zero_for_ever():
    """Others' noise cancels in the total."""
    assert told_zero(100, 50) > 46
    assert told_zero(100, 50) <= 50, "its local mu holds all the same"
    assert square(with_acks(100, 50, lambda k: k - 1), 100) == pytest.approx(100 / 50)


def test_a_late_original_and_its_carry_over_may_not_both_be_opened():
    assert told_zero(2, 10) > 2.1


def test_the_proof_prints_these_factors():
    """The last two are in mu."""
    factors = {
        f"{victim_once():.1f} times": "8.5 times",
        f"{others_once():.1f} times": "9.8 times",
        f"{two_and_later_ten(50):.2f} times": "1.08 times",
        f"{two_and_later_ten(2):.0f} times": "3 times",
        f"{told_zero(100, 50):.0f} times": "47 times",
        f"{told_zero(2, 10):.1f} times": "2.2 times",
        f"{asked_in_these_rounds_only()[0]:.2f} times": "1.06 times",
        f"{first_replies_lost()[0]:.2f} times": "1.21 times",
    }
    assert [*factors] == [*factors.values()]
    text = (ROOT / "docs/proofs/secure-aggregation.md").read_text()
    assert [printed for printed in factors if printed not in text] == []


def test_a_cumulative_release_that_passes_for_one_that_stands_alone_breaks_the_guarantee():
    """Helpers check no acknowledgement where releases build on nothing: P_k - P_0 must not pass for one of those."""
    alone = Stream.of_mechanism("independent", 100)
    single = [[Opened(str(i), k, k - 1) for i in range(50)] for k in range(1, 101)]
    assert Transcript(alone, single).worst().mu ** 2 == pytest.approx(1 / 50)
    passed = square(with_acks(100, 50, lambda k: 0), 100)
    assert passed > 46 * square(played(fixed(50, 100)), 100)


def test_a_set_may_not_be_opened_again_with_one_client_less():
    """In the same round, or in the next with the same release."""
    cohort = [Opened(str(i), 1, 0) for i in range(10)]
    assert square([cohort], 10) == pytest.approx(1 / 10)
    assert square([cohort, cohort[1:]], 10) == pytest.approx(1.0), "the victim by itself"


def test_two_releases_of_one_client_in_a_sum_are_one_client():
    """Ten releases, all the victim's: a cohort of one."""
    sets = [[Opened("0", k, 0) for k in range(1, 11)]]
    assert square(sets, 10) == pytest.approx(10.0), "P_1 + ... + P_10 has the sample ten times, and noise of 10"


@pytest.mark.parametrize("attack", ["P_2 - P_0 after P_1", "a release of a lost chain"])
def test_sums_that_are_not_built_on_what_was_opened_exceed_the_theorem(attack):
    """The planted bug of a helper that does not look at acks, for the shortest of all attacks."""
    second = 0 if attack.startswith("P_2") else 1
    sets = with_acks(10, 10, lambda k: k - 1)
    sets[2 - second] = [Opened("0", 3 - second, 0), *sets[2 - second][1:]]
    assert square(sets, 10) > 1.2 * 10 / 10


# Samples that return.


def returning_cases(name, count, key):
    """Random patterns, and releases of a client that a sample of its was in, with the sizes of the sums they were
    first opened in.
    """
    chance = generator(key)
    for _ in range(count):
        patterns, releases = random_patterns(chance)
        whole = Transcript(stream(name, releases), sets := played(patterns, releases))
        for client in {client for client, _, _ in whole.squares}:
            shown = sorted(release for owner, _, release in whole.squares if owner == client)
            if len(shown) < 2:
                continue
            taken = sorted(chance.choice(shown, size=int(chance.integers(2, len(shown) + 1)), replace=False).tolist())
            sizes = [len(sets[np.flatnonzero(whole.change(client, release))[0]]) for release in taken]
            yield whole, client, taken, sizes, releases


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_returning_sample_costs_no_more_than_its_turns_added_up(name):
    """(participations) x largest column / sqrt(h), moves of any direction: the triangle inequality."""
    for whole, client, taken, sizes, releases in returning_cases(name, 30, 9):
        column = largest_column(name, releases)
        exact = whole.returning(client, taken)
        assert exact <= sum(column / math.sqrt(size) for size in sizes) * ROUNDING
        assert exact <= len(taken) * column / math.sqrt(min(sizes)) * ROUNDING


def of_turns(sets):
    """Three turns two releases apart in two bands: mu over the claim, and over the triangle bound."""
    whole = Transcript(Stream.of_mechanism("banded", 6, bands=2), sets)
    noise = make_mechanism("banded", 6, bands=2)
    exact = math.sqrt(whole.gram("0", [1, 3, 5]).sum())
    claim = noise.sensitivity(3, 2, pattern="epochs") / math.sqrt(2)
    return exact / claim, whole.returning("0", [1, 3, 5]) / (3 * noise.sensitivity() / math.sqrt(2))


def asked_in_these_rounds_only():
    """The victim's turns do not overlap; the other client's releases of the same rounds follow each other."""
    return of_turns(played([[2] * 5, [2, 0, 2, 0, 2]]))


def first_replies_lost():
    """The victim's first four replies are lost: its three turns stand in one sum, which is the other's first."""
    sets = played([[1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 2, 2]])
    assert {len(members) for members in sets} == {0, 2}, "all clients are in every opened sum"
    return of_turns(sets)


def test_the_local_pattern_over_root_h_is_not_a_bound():
    over_the_claim, over_the_bound = asked_in_these_rounds_only()
    assert over_the_claim > 1.06
    assert over_the_bound <= 1


def test_unequal_release_numbers_break_the_local_pattern_bound():
    over_the_claim, over_the_bound = first_replies_lost()
    assert over_the_claim > 1.20
    assert over_the_bound <= 1


@pytest.mark.parametrize("name", MECHANISMS)
def test_it_is_enough_where_all_are_in_every_sum_with_the_same_numbers(name):
    """Then S is h times one client's covariance."""
    releases, honest = 6, 3
    for participations, separation in [(2, 3), (3, 2), (6, 1)]:
        local = mechanism(name, releases).sensitivity(participations, separation, pattern="epochs")
        whole = Transcript(stream(name, releases), played(fixed(honest, releases)))
        for begin in range(1, separation + 1):
            taken = list(range(begin, releases + 1, separation))[:participations]
            assert whole.returning("0", taken) <= local / math.sqrt(honest) * ROUNDING


def test_releases_that_stand_alone_compose_round_by_round_exactly():
    """mu^2 = turns / (h tau^2), whoever else is in which sum and whatever was lost: no claim, but equality."""
    chance = generator(10)
    for _ in range(50):
        rounds, clients, honest = 6, 5, 3
        cohorts = [{0, *chance.choice(range(1, clients), size=honest - 1, replace=False)} for _ in range(rounds)]
        sets = [[Opened(str(i), k, k - 1) for i in sorted(cohort)] for k, cohort in enumerate(cohorts, start=1)]
        whole = Transcript(Stream.of_mechanism("independent", rounds), sets)
        taken = sorted(chance.choice(range(1, rounds + 1), size=int(chance.integers(1, 7)), replace=False).tolist())
        gram = whole.gram("0", taken)
        assert gram == pytest.approx(np.eye(len(taken)) / honest)
        assert whole.returning("0", taken) == pytest.approx(math.sqrt(len(taken) / honest))


def test_what_was_lost_of_releases_that_stand_alone_is_never_seen():
    sets = [[Opened(str(i), 3, 2) for i in range(4)]]
    whole = Transcript(Stream.of_mechanism("independent", 4), sets)
    assert [whole.square("0", release) for release in (1, 2, 4)] == [0.0, 0.0, 0.0]
    assert whole.square("0", 3) == pytest.approx(1 / 4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cancelling", "sqrt_toeplitz", "banded", "blt", "independent"])
def test_climbing_finds_no_pattern_beyond_the_theorem_or_the_triangle_bound(name):
    """Thirty climbs of 120 steps each, for one turn and for several."""
    chance, releases = generator(11), 5
    for turns in product((1, 3), range(15)):
        column, taken = largest_column(name, releases), [1, 3, 5][: turns[0]]
        best, patterns = 0.0, chance.choice(3, size=(4, releases))
        patterns[0] = 2
        for _ in range(120):
            tried = patterns.copy()
            tried[chance.integers(1, 4), chance.integers(releases)] = chance.integers(3)
            sets = played(tried)
            whole = Transcript(stream(name, releases), sets)
            sizes = [len(sets[release - 1]) for release in taken]
            ratio = whole.returning("0", taken) / sum(column / math.sqrt(size) for size in sizes)
            assert ratio <= ROUNDING
            if ratio >= best:
                best, patterns = ratio, tried
        assert best > 0.5


def known_afterwards(memory, releases=10, honest=10):
    """mu^2 over the claim, once all other clients' ledgers leak after the session: what their noise is made again
    from stands in them, of the last release or of all."""
    decoder = np.eye(releases)
    left = decoder.copy() if memory == "last" else np.zeros_like(decoder)
    left[-1] = 0
    streams = {str(i): Stream(left if i else decoder) for i in range(honest)}
    return Transcript(streams, played(fixed(honest, releases))).square("0", 1) / (releases / honest)


def test_a_leaked_ledger_leaves_one_honest_client_fewer():
    """A key that was secret for the whole session is not enough: noise can be made again as long as key and nonces
    are anywhere. Mechanisms that keep all nonces leave nothing, the others still the noise of what was replaced."""
    assert make_mechanism("cancelling", 10).memory == "last"
    assert make_mechanism("sqrt_toeplitz", 10).memory == "all"
    assert known_afterwards("last") == pytest.approx(1.9)
    assert known_afterwards("all") == pytest.approx(10)
