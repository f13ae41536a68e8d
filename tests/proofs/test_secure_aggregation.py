"""docs/proofs/secure-aggregation.md, step by step: what the sums of clients' releases tell of one sample, exactly.

In a sum that is opened in round t every client's noise is new, and a sample stands in the one sum it was first opened
in: v is a unit vector, and v' S^{-1} v a diagonal entry of the inverse. That is what the enumerations here compute, by
millions; tests/harness/transcripts.py computes the same from lists of releases and knows nothing of it.
"""

import math
from collections import Counter
from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest
from murmurfl.privacy import SimulatedKeys, SumAssumption, make_mechanism
from murmurfl.privacy.release.prefix_sums import ReleaseRule

from tests.harness.clients import stream_noise
from tests.harness.transcripts import (
    MECHANISMS,
    ROUNDING,
    Opened,
    Stream,
    Transcript,
    delta_of_two,
    generator,
    largest_column,
    mechanism,
    played,
    quadratic,
    random_patterns,
    stream,
)
from tests.privacy.clients import D, zero
from tests.privacy.clients import client as real_client

QUICK = ("cancelling", "sqrt_toeplitz", "tree")


def diagonal_of_inverse(covariances):
    """v' S^{-1} v for the sample of every round; infinite where no sum was opened."""
    empty = np.diagonal(covariances, axis1=-2, axis2=-1) == 0
    filled = covariances + empty[..., None] * np.eye(covariances.shape[-1])
    return np.where(empty, np.inf, np.diagonal(np.linalg.inv(filled), axis1=-2, axis2=-1))


def all_cases(name, rounds, clients, states=3):
    """Exact, refined and coarse mu^2 of all samples, for all {not asked, lost, opened} of so many clients.

    Arrays with one row for every choice of patterns and a column for every round; NaN where none was opened.
    """
    patterns = list(product(range(states), repeat=rounds))
    own = np.array([Transcript(stream(name, rounds), played([p])).covariance for p in patterns])
    opened = np.array(patterns) >= 2
    alone = diagonal_of_inverse(own)
    chosen = np.array(list(combinations_with_replacement(range(len(patterns)), clients)))  # clients are alike
    cohort = opened[chosen].sum(axis=1)
    shown = np.where(cohort > 0, 1.0, np.nan)
    exact = diagonal_of_inverse(own[chosen].sum(axis=1)) * shown
    refined = shown / np.where(opened[chosen], 1 / alone[chosen], 0.0).sum(axis=1).clip(1e-300)
    coarse = shown * largest_column(name, rounds) ** 2 / np.maximum(cohort, 1)
    return exact, refined, coarse, int(distinct(chosen, opened).sum())


def distinct(chosen, opened):
    """How many clients with other patterns than each other's are opened in each round: their samples are the cases."""
    first = np.ones(chosen.shape, bool)
    first[:, 1:] = chosen[:, 1:] != chosen[:, :-1]  # a choice is sorted
    return (opened[chosen] & first[:, :, None]).sum(axis=1)


def holds_everywhere(name, rounds, clients, states=3):
    exact, refined, coarse, cases = all_cases(name, rounds, clients, states)
    known = ~np.isnan(exact)
    assert (exact[known] <= refined[known] * ROUNDING).all()
    assert (refined[known] <= coarse[known] * ROUNDING).all()
    return exact[known] / coarse[known], cases


@pytest.mark.parametrize("name", QUICK)
def test_no_pattern_of_three_clients_and_four_rounds_tells_more_than_the_theorem(name):
    """Every client in every round not asked, lost or opened: exact <= refined <= coarse, and attained."""
    ratios, cases = holds_everywhere(name, 4, 3)
    assert cases == 358_668
    assert ratios.max() == pytest.approx(1.0) or name == "tree"


MENDING = [name for name in MECHANISMS if mechanism(name, 4).recovers]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", MENDING)
def test_clients_that_mend_skipped_sums_tell_no_more_whoever_says_which_were_skipped(name):
    """Each client by itself may be told of any of its opened releases that its sum was skipped."""
    for rounds, clients in ((3, 3), (4, 2)):
        ratios, _ = holds_everywhere(name, rounds, clients, states=4)
        assert ratios.max() == pytest.approx(1.0) or "paper" in name


def test_independent_noise_that_mended_would_tell_twice_as_much():
    """The planted bug: noise that is not taken out by the next release is not to be taken out by a later one."""
    exact, _, coarse, _ = all_cases("independent", 3, 2, states=4)
    assert np.nanmax(exact / coarse) == pytest.approx(2.0)
    assert MENDING == ["cancelling", "cancelling-harmonic", "cancelling-paper", "decay", "decay-half"]
    assert [make_mechanism("decay", 4, decay=decay).recovers for decay in (0.49, 0.5, 0.71, 0.95, 1.0)] == [
        0,
        1,
        2,
        4,
        4,
    ]


@pytest.mark.parametrize("name", MENDING)
def test_what_mends_has_no_entry_twice_as_large_as_one_of_a_contribution_before(name):
    made = mechanism(name, 20)
    encoder = made.materialize()
    assert (encoder >= 0).all()
    for m in range(1, min(made.recovers, 19) + 1):
        assert (np.tril(encoder[:, m:], -m) <= 2 * np.tril(encoder[:, :-m], -m) * ROUNDING).all()


def courses(name, rounds):
    """What a real client sends under any acknowledgements, forward, each with its sum used or skipped.

    Of every course: the encoder C; which contributions each release has, T; and its noise N_k - N_b, the rows of I - S
    on N = B Z. Which b, is found by the bits, and a release says that it mends if b is not what was acknowledged.
    """
    summed = {"trust": "secure-aggregation", "sums": SumAssumption(2, 2), "budget_local_mu": 99.0}
    options = {"mechanism": name.split("-")[0], **({"decay": 0.5} if name == "decay-half" else {})}
    key, names = SimulatedKeys(1, "m").secret_key, [SimulatedKeys(1, "m").nonce("s", k) for k in range(1, rounds + 1)]
    for acks in product(*map(range, range(1, rounds + 1))):
        if list(acks) != sorted(acks):
            continue
        for skips in product((False, True), repeat=rounds - 1):
            subject = real_client(max_participations=rounds, **summed, **options)
            noise = [stream_noise(subject.plan, D, key, names[:k]) for k in range(rounds + 1)]
            moved, seen = np.zeros((rounds, rounds)), np.zeros((rounds, rounds))
            for k, (ack, skipped) in enumerate(zip(acks, (False, *skips), strict=True), start=1):
                made = subject.release("s", ack, zero, skipped=skipped)
                (base,) = (b for b in range(k) if np.array_equal(made.counts, noise[k] - noise[b]))
                assert made.recovered == (base != ack)
                moved[k - 1, ack:k] = 1.0
                seen[k - 1, k - 1] = 1.0
                if base:
                    seen[k - 1, base - 1] = -1.0
            yield subject.plan.mechanism.materialize(), moved, seen


def told(name, monkeypatch, most=None):
    """The largest mu^2 over the charged one to whoever sees all that leaves a real client, of any acks and skips."""
    if most is not None:
        monkeypatch.setattr(type(mechanism(name, 4)), "recovers", most)
    worst = 0.0
    for encoder, moved, seen in courses(name, 4):
        shifts = encoder @ np.linalg.solve(np.tril(np.ones_like(seen)), np.linalg.solve(seen, moved))
        worst = max(worst, np.square(shifts).sum(axis=0).max() / np.square(encoder).sum(axis=0).max())
    return worst


def taken_out(name, rounds):
    """How often each number of contributions is taken out of a course; refuses what step 19 says cannot be.

    A contribution j is in the prefixes from release j on, and in none from the first on that takes it out.
    """
    found = Counter()
    for encoder, moved, seen in courses(name, rounds):
        prefixes = np.linalg.solve(seen, moved)
        for j, there in enumerate(prefixes.T):
            assert set(there) <= {0.0, 1.0}
            until = int(there.sum()) + j
            assert there[j:until].all(), "it comes back"
            expected = encoder[:, j] - (encoder[:, until] if until < rounds else 0.0)
            shift = encoder @ np.linalg.solve(np.tril(np.ones_like(seen)), there)
            assert shift == pytest.approx(expected)
            assert until == rounds or until - j <= mechanism(name, rounds).recovers
            assert (np.abs(shift) <= encoder[:, j] * ROUNDING + 1e-12).all()
        found[int((prefixes[-1] == 0).sum())] += 1
    return found


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("rounds", [4, pytest.param(5, marks=pytest.mark.more_cases)])
@pytest.mark.parametrize("name", ["cancelling", "decay", "decay-half"])
def test_whatever_is_skipped_a_contribution_is_taken_out_once_for_good(name, rounds):
    """Of any number of skipped sums, one after the other or not: it moves C (e_j - e_i), or C e_j, and nothing else."""
    found = taken_out(name, rounds)
    assert found.total() == {4: 14 * 8, 5: 42 * 16}[rounds]
    assert set(found) == set(range(rounds)), "up to all but the last one"


def test_a_client_that_forgets_what_it_mended_before_is_caught(monkeypatch):
    """The planted bug: after two skipped sums the third release takes out the second's own noise alone."""
    made = ReleaseRule.advance_mending

    def forgetful(self, streams, *args, **options):
        is_next, before = streams.release[0] == streams.ack[0], streams.noise_state[0]
        release, recovered = made(self, streams, *args, **options)
        if recovered and is_next:
            noise, about = streams.noise_state[0]
            streams.noise_state[0] = (noise - before[0], about)
        return release, recovered

    monkeypatch.setattr(ReleaseRule, "advance_mending", forgetful)
    with pytest.raises(AssertionError, match="it comes back"):
        taken_out("decay-half", 4)
    assert told("decay-half", monkeypatch) > 1.2


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", ["cancelling", "decay", "decay-half"])
def test_mu_local_holds_whatever_a_client_is_told_of_acknowledgements_and_skipped_sums(name, monkeypatch):
    assert told(name, monkeypatch) == pytest.approx(1.0)


def test_mending_releases_that_carried_others_over_would_tell_more_than_mu_local(monkeypatch):
    """The planted bug: C (e_1 - e_4) is longer than C e_1 where a column falls to a quarter in two rows."""
    assert told("decay-half", monkeypatch, most=4) > 1.5


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_pattern_of_three_rounds_tells_more_than_the_theorem_whatever_the_mechanism(name):
    for clients in (1, 2, 3):
        ratios, _ = holds_everywhere(name, 3, clients)
        assert ratios.max() == pytest.approx(1.0) or "tree" in name or "paper" in name


@pytest.mark.long
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_pattern_of_four_clients_exceeds_the_theorem(name):
    holds_everywhere(name, 4, 3)
    holds_everywhere(name, 3, 4)
    holds_everywhere(name, 5, 2)


def compared(name, patterns, releases):
    """Exact, refined and coarse mu^2 of every sample that any client's releases have, by way of transcripts."""
    sets = played(patterns, releases)
    whole = Transcript(stream(name, releases), sets)
    worst = largest_column(name, releases) ** 2
    for (client, _, release), exact in whole.squares.items():
        (tau,) = np.flatnonzero(whole.change(client, release))
        at_tau = np.eye(len(sets))[:, [tau]]
        others = [member.client for member in sets[tau]]
        own = [float(quadratic(whole.covariance_of(other), at_tau)[0]) for other in others]
        yield exact, 1 / sum(1 / one for one in own), worst / len(others)


def random_cases(name, count, **sizes):
    chance, found = generator(len(name)), 0
    for _ in range(count):
        for exact, refined, coarse in compared(name, *random_patterns(chance, **sizes)):
            assert exact <= refined * ROUNDING <= coarse * ROUNDING**2
            found += 1
    return found


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_random_pattern_with_losses_and_caps_tells_more_than_the_theorem(name):
    assert random_cases(name, 25) > 100


@pytest.mark.long
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_pattern_of_many_random_ones_tells_more_than_the_theorem(name):
    assert random_cases(name, 1500, most_clients=7, most_rounds=9) > 10_000


def test_enumeration_and_transcripts_agree():
    """Two ways to the same figures: inverses of sums of increments, and lists of releases."""
    exact, refined, coarse, _ = all_cases("blt", 3, 2)
    patterns = list(combinations_with_replacement(product(range(3), repeat=3), 2))
    for number in range(0, len(patterns), 7):
        expected = {(round(a, 9), round(b, 9), round(c, 9)) for a, b, c in compared("blt", patterns[number], 3)}
        rows = zip(exact[number], refined[number], coarse[number], strict=True)
        assert expected == {tuple(round(float(x), 9) for x in row) for row in rows if not np.isnan(row[0])}


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_sample_enters_the_sums_once_and_stays(name):
    """Q_t, all that was opened so far, moves by 1[t >= tau]: what was lost is carried over, never sent twice."""
    chance = generator(4)
    for _ in range(20):
        patterns, releases = random_patterns(chance)
        whole = Transcript(stream(name, releases), played(patterns, releases))
        for client, session, release in whole.squares:
            in_total = np.cumsum(whole.change(client, release, session))
            assert set(in_total) <= {0.0, 1.0}
            assert (np.diff(in_total) >= 0).all()


def test_added_covariances_resist_at_least_as_their_parts():
    """1 / (v' S^+ v) >= sum of 1 / (v' S_i^+ v), for any covariances, of any rank."""
    chance = generator(5)
    for _ in range(300):
        size, count = int(chance.integers(1, 7)), int(chance.integers(1, 5))
        factors = [chance.normal(size=(size, int(chance.integers(1, size + 1)))) for _ in range(count)]
        change = factors[0] @ chance.normal(size=(factors[0].shape[1], 1))  # in the range of one of them at least
        own = [float(quadratic(factor @ factor.T, change)[0]) for factor in factors]
        together = float(quadratic(sum(factor @ factor.T for factor in factors), change)[0])
        assert 1 / together >= sum(1 / value for value in own) * (1 - 1e-6)
        twice = sum(1 / value for value in own) + 1 / own[0]
        assert count > 1 or 1 / together < twice * (1 - 1e-6), "the planted bug: a client that is counted twice"


def test_unequal_clients_count_by_their_own_noise():
    """mu^2 = Delta_victim^2 / sum over the cohort of (Delta_i / mu_i)^2; h times the victim's own is exceeded."""
    chance, exceeded = generator(6), 0
    for _ in range(150):
        patterns, releases = random_patterns(chance)
        names = chance.choice(list(MECHANISMS), size=len(patterns))
        streams = {
            str(i): Stream(mechanism(name, releases).decoder(), chance.uniform(0.2, 3.0), chance.uniform(0.5, 2.0))
            for i, name in enumerate(names)
        }
        local = {
            str(i): streams[str(i)].sensitivity * largest_column(name, releases) / streams[str(i)].noise_std
            for i, name in enumerate(names)
        }
        sets = played(patterns, releases)
        whole = Transcript(streams, sets)
        for (client, _, release), exact in whole.squares.items():
            (tau,) = np.flatnonzero(whole.change(client, release))
            weights = [(streams[m.client].sensitivity / local[m.client]) ** 2 for m in sets[tau]]
            assert exact <= streams[client].sensitivity ** 2 / sum(weights) * ROUNDING
            exceeded += exact > local[client] ** 2 / len(weights) * 1.01
    assert exceeded, "the planted bug: everybody counted as if of the victim's noise"


@pytest.mark.parametrize("name", MECHANISMS)
def test_colluders_take_their_own_noise_out_and_only_the_honest_count(name):
    """min_cohort = h + colluders: h of every sum remain. Counting all clients of it, the planted bug, is exceeded."""
    chance, honest, colluders = generator(7), 2, 2
    everybody = [str(i) for i in range(6)]
    bad = everybody[-colluders:]
    for _ in range(10):
        made, last, sets = dict.fromkeys(everybody, 0), dict.fromkeys(everybody, 0), []
        for _ in range(6):
            cohort = set(chance.choice(everybody, size=honest + colluders, replace=False))
            members = []
            for client in cohort:
                made[client] += 1
                members.append(Opened(client, made[client], last[client]))
                last[client] = made[client]
            sets.append(members)
        worst = Transcript(stream(name, 6), sets, colluders=bad).worst().mu
        assert worst <= largest_column(name, 6) / math.sqrt(honest) * ROUNDING
    fixed = played([[2] * 6] * 4)
    left = Transcript(stream(name, 6), fixed, colluders=["2", "3"]).worst().mu
    assert left > 1.2 * Transcript(stream(name, 6), fixed).worst().mu


def test_seen_by_itself_a_client_has_its_local_mu_whatever_the_others_do():
    """Server and all helpers together: every release a set of its own, beside any sums."""
    chance = generator(8)
    for name in MECHANISMS:
        for _ in range(10):
            patterns, releases = random_patterns(chance)
            sums = played(patterns, releases)
            singles = [[member] for members in sums for member in members]
            worst = Transcript(stream(name, releases), [*sums, *singles]).worst().mu
            assert worst <= largest_column(name, releases) * ROUNDING


def test_sessions_side_by_side_add_in_squares_and_share_no_noise():
    for name in ("cancelling", "blt"):
        sets = []
        for members in played([[2, 2, 1, 2], [2, 0, 2, 2], [1, 2, 2, 2]]):
            sets += [[member._replace(session=session) for member in members] for session in ("a", "b")]
        both = Transcript(stream(name, 4), sets)
        one = Transcript(stream(name, 4), [members for members in sets if members and members[0].session == "a"])
        for (client, session, release), square in both.squares.items():
            assert square == pytest.approx(one.square(client, release, "a"))
            assert session in {"a", "b"}


# Servers that choose who is in the next sum by what the last ones were.

CLIENTS = 4
COHORTS = [cohort for size in (2, 3, 4) for cohort in combinations(range(CLIENTS), size)]


def on_path(path):
    """Everything a server saw that opened these cohorts."""
    sets = played([[2 if client in cohort else 0 for cohort in path] for client in range(CLIENTS)])
    return Transcript(stream("cancelling", len(path)), sets)


def path_squares(path):
    """mu^2 of client 0's first sample in the first 1, 2, ... sums of a path: what each adds, given those before it."""
    whole = on_path(path)
    return np.cumsum(np.linalg.solve(np.linalg.cholesky(whole.covariance), whole.change("0", 1)) ** 2)


def test_on_every_path_the_squared_shifts_add_up_to_mu_squared_at_most():
    """What a further sum adds depends on who was in the sums so far, and on nothing that comes later."""
    most, largest = 1 / 2, 0.0
    for path in product(COHORTS, repeat=3):
        squares = path_squares(path)
        assert squares[-1] == pytest.approx(on_path(path).square("0", 1), abs=1e-9)
        assert squares[-1] <= most * ROUNDING
        largest = max(largest, squares[-1])
    assert largest == pytest.approx(most)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.5])
def test_a_server_that_chooses_the_second_cohort_by_the_first_sum_is_covered(epsilon):
    """Exact delta of two rounds: every rule that chooses between three cohorts by two thresholds."""
    local, worst = 2.0, 0.0
    starts = path_squares([(0, 1), (0, 1)])
    first = local * math.sqrt(starts[0])
    choices = {cohort: path_squares([(0, 1), cohort])[1] - starts[0] for cohort in COHORTS}
    shifts = sorted({round(local * math.sqrt(max(more, 0.0)), 9) for more in choices.values()})
    claimed = delta_of_two(0.0, lambda y: np.full_like(y, local / math.sqrt(2)), epsilon)
    for lengths in product(shifts, repeat=3):
        chosen = lambda y, lengths=lengths: np.array(lengths)[np.searchsorted([0.0, 1.0], y)]  # noqa: E731
        worst = max(worst, delta_of_two(first, chosen, epsilon))
    assert worst <= claimed + 1e-9
    assert worst > 0.999 * claimed, "attained by the server that stays with the smallest cohort"
    everybody = delta_of_two(0.0, lambda y: np.full_like(y, local / math.sqrt(CLIENTS)), epsilon)
    assert worst > 1.2 * everybody, "the planted bug: h = all clients that there are"
