"""What a policy states under secure aggregation against what the sums tell exactly; rounding, masks and the modulus."""

import math

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SumAssumption,
    gdp_delta,
)
from murmurfl.privacy.release.policy import MOST_SUMMED
from murmurfl.privacy.sums.masking import Masking, add_mask, checked_header, opened_seal
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from scipy.stats import norm

from tests.harness.transcripts import ROUNDING, Opened, Stream, Transcript, generator, opened_sets

HONEST, COHORT, K, D = 3, 5, 6, 20


def policy(name="cancelling", **changes):
    options = {
        "mechanism": name,
        "trust": "secure-aggregation",
        "sums": SumAssumption(HONEST, COHORT),
        "mechanism_options": {"bands": 2} if name in ("banded", "bisr") else {},
    }
    return PrivacyPolicy(
        **{"clip_norm": 1.0, "batch_size": 2, "max_participations": K, "mu": 1.5, **options, **changes}
    )


def sums(chance, clients, cohort, rounds, lost=0.0, is_memoryless=False):
    """Rounds of at least ``cohort`` clients of those named; who is asked and lost is carried over."""
    made, last, sets = dict.fromkeys(clients, 0), dict.fromkeys(clients, 0), []
    for _ in range(rounds):
        asked = [name for name in chance.permutation(clients).tolist() if made[name] < K]
        came = asked[: max(cohort, int(chance.integers(0, len(asked) + 1)))]
        members = []
        for name in asked:
            if name not in came and chance.random() > lost:
                continue
            made[name] += 1
            if name in came and len(came) >= cohort:
                members.append(Opened(name, made[name], made[name] - 1 if is_memoryless else last[name]))
                last[name] = made[name]
        sets.append(members)
    return sets


def smallest_honest(sets, colluders):
    return min(len([one for one in members if one.client not in colluders]) for members in sets if members)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_stated_mu_is_a_tight_bound_against_colluders(name):
    """20 random courses of 8 rounds with losses and two colluders, and the fixed cohort that attains it."""
    plan, clients = policy(name).plan(D), [str(i) for i in range(8)]
    colluders = clients[: COHORT - HONEST]
    chance = generator(1)
    for _ in range(20):
        sets = sums(chance, clients, COHORT, 8, lost=0.5)
        worst = Transcript(Stream.of_plan(plan), sets, colluders).worst().mu
        assert worst <= plan.mu * ROUNDING
        assert worst <= plan.loss.worst_case.mu / math.sqrt(max(smallest_honest(sets, colluders), 1)) * ROUNDING
    fixed = sums(chance, clients[:COHORT], COHORT, K)
    attained = Transcript(Stream.of_plan(plan), fixed, colluders).worst().mu
    assert attained > 0.999 * plan.mu or name == "tree"
    planted = Transcript(Stream.of_plan(plan), fixed, clients[: COHORT - HONEST + 1]).worst().mu
    assert planted > 1.1 * plan.mu or name == "tree", "one colluder more than was assumed"


@pytest.mark.parametrize("name", MECHANISMS)
def test_whatever_happens_the_stated_local_mu_holds_and_is_attained(name):
    plan = policy(name).plan(D)
    singles = [[Opened("0", k, k - 1)] for k in range(1, K + 1)]
    alone = Transcript(Stream.of_plan(plan), singles, colluders=["1", "2"]).worst().mu
    assert alone <= plan.loss.worst_case.mu * ROUNDING
    assert alone > 0.999 * plan.loss.worst_case.mu or name == "tree"
    assert plan.loss.worst_case.mu == pytest.approx(1.5 * math.sqrt(HONEST), rel=1e-3)
    assert plan.mu == pytest.approx(1.5)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("participations", "separation"), [(2, 3), (3, 2), (6, 1)])
def test_the_stated_mu_covers_samples_that_return_whoever_else_is_in_the_sums(name, participations, separation):
    chosen = policy(name, sample_participations=participations, min_separation=separation)
    plan, clients = chosen.plan(D), [str(i) for i in range(6)]
    chance, stream = generator(2), Stream.of_plan(chosen.plan(D))
    for _ in range(10):
        whole = Transcript(stream, sums(chance, clients, COHORT, 8, lost=0.5), clients[: COHORT - HONEST])
        for client in {client for client, _, _ in whole.squares}:
            for begin in range(1, separation + 1):
                taken = list(range(begin, K + 1, separation))
                assert whole.returning(client, taken) <= plan.mu * ROUNDING
                alone = Transcript(stream, [[Opened("0", k, k - 1)] for k in range(1, K + 1)])
                assert alone.returning("0", taken) <= plan.loss.worst_case.mu * ROUNDING


@pytest.mark.parametrize(("participations", "separation"), [(1, 1), (2, 3), (6, 1)])
def test_releases_that_stand_alone_are_charged_exactly(participations, separation):
    chosen = policy(
        "independent", release_rule="paper", sample_participations=participations, min_separation=separation
    )
    assert chosen.release_mode == "independent"
    plan, clients = chosen.plan(D), [str(i) for i in range(COHORT)]
    sets = sums(generator(3), clients, COHORT, K, is_memoryless=True)
    whole = Transcript(Stream.of_plan(plan), sets, clients[HONEST:])
    taken = list(range(1, K + 1, separation))[:participations]
    assert whole.returning("0", taken) <= plan.mu * ROUNDING
    assert whole.returning("0", taken) > 0.999 * plan.mu


@pytest.mark.parametrize("name", MECHANISMS)
def test_bookkeeping_of_fewer_releases_covers_what_they_tell_when_their_number_is_fixed(name):
    for options in ({}, {"sample_participations": 2, "min_separation": 3}):
        plan, clients = policy(name, **options).plan(D), [str(i) for i in range(COHORT)]
        for releases in range(1, K + 1):
            sets = sums(generator(4), clients, COHORT, releases)
            whole = Transcript(Stream.of_plan(plan), sets, clients[HONEST:])
            for begin in range(1, min(releases, 3) + 1):
                taken = [begin, begin + 3] if options and begin + 3 <= releases else [begin]
                assert whole.returning("0", taken) <= plan.spent_mu(releases) * ROUNDING


def test_a_masked_session_follows_its_headers_and_keeps_mu():
    """Real clients and masks, a lost reply and a closed round: the sums are opened by taking the keystreams out."""
    names, chosen = tuple("abcd"), policy(sums=SumAssumption(2, 3))
    roster = Roster.simulated(1, names, ("h", "i"))
    clients = {name: Privatizer(chosen, D, 2 * K, MemoryLedger(), SimulatedKeys(1, name)) for name in names}
    masking = {name: Masking(name, ClientKey.simulated(1, name), roster) for name in names}
    acks, total, headers, made, kept = dict.fromkeys(names, 0), np.zeros(D, np.int64), [], [], {}
    for cohort in ("abcd", "abc", "ab", "bcd", "acd"):
        hidden, plain, sealed = np.zeros(D, np.uint64), np.zeros(D, np.int64), []
        for name in names:
            release = clients[name].release("s", acks[name], lambda chosen: np.ones((2, D)) / 9)
            masked = masking[name].mask(release, "s", chosen)
            header = checked_header(masked.sealed, roster)
            made.append(header)
            if name in cohort and len(cohort) >= chosen.sums.min_cohort:
                hidden += masked.counts
                plain += release.counts
                sealed.append((masked.sealed, header))
                acks[name] = release.release
        for helper in ("h", "i"):
            for one, header in sealed:
                seed = opened_seal(one, header, helper, HelperKey.simulated(1, helper))
                add_mask(hidden, seed, subtract=True)
        assert (hidden.astype(np.int64) == plain).all(), "to the last bit, negative counts too"
        total += plain
        kept[cohort] = plain
        headers.append([header for _, header in sealed])
    sets = opened_sets(headers, made)
    assert [len(members) for members in sets] == [4, 3, 0, 3, 3]
    assert [(one.release, one.ack) for one in sets[3]] == [(4, 2), (4, 2), (4, 1)]
    plan = chosen.plan(D)
    assert Transcript(Stream.of_plan(plan), sets, colluders=["d"]).worst().mu <= plan.mu * ROUNDING


def test_a_mask_of_one_secret_seed_makes_any_counts_equally_likely():
    """For every sum and every counts there is one keystream between them: what is left is AES-CTR under a fresh key."""
    chance = generator(5)
    counts, other = chance.integers(-(2**51), 2**51, size=(2, 50))
    hidden = counts.astype(np.uint64)
    add_mask(hidden, bytes(range(32)))
    needed = hidden - other.astype(np.uint64)
    assert (other.astype(np.uint64) + needed == hidden).all()
    halves = np.unpackbits(hidden.view(np.uint8)).mean()
    assert abs(halves - 0.5) < 5 / (2 * math.sqrt(64 * 50)), "bits of the masked counts: a false alarm in 10^6"


def test_so_many_clients_as_a_sum_may_have_cannot_wrap_it():
    """It bounds the releases of one opened set, which helpers count, and not the clients of a roster."""
    plan = policy(mu=0.05).plan(D)
    assert plan.largest_value / plan.grid.spacing < 2.0**52
    assert MOST_SUMMED * 2**52 <= 2**63
    largest = np.full(MOST_SUMMED, 2**52 - 1, np.int64)
    assert int(largest.sum()) == MOST_SUMMED * (2**52 - 1), "no wrap"
    one_more = int(largest.astype(object).sum()) + 2**53
    assert one_more > 2**63 - 1


def test_the_stated_mu_pays_for_the_largest_sums_normals():
    """The resolution's mu, of 2^11 clients' normals, is in it in squares: noise is a little above ideal normals'.

    It bounds the clients of the sums that a sample is in; the others' noise is alike in both worlds.
    """
    chosen = policy(mu=0.5)
    plan = chosen.plan(D)
    ideal = plan.sensitivity * plan.mechanism.sensitivity() / plan.noise_std / math.sqrt(HONEST)
    of_one = 2.0**-51 * math.sqrt(D * K) / (plan.grid.spacing / (plan.noise_std * plan.mechanism.rounded_std()[0]))
    assert plan.resolution_mu == pytest.approx(of_one * math.sqrt(MOST_SUMMED), rel=1e-6)
    assert math.hypot(ideal, plan.resolution_mu) <= plan.mu * ROUNDING


# Rounded Gaussians: the sum of h of them against the continuous one of their variance.


def rounded(sigma):
    """Probabilities of the counts of a Gaussian of ``sigma`` grid units."""
    reach = int(14 * sigma) + 3
    edges = np.arange(-reach, reach + 2) - 0.5
    return np.diff(norm.cdf(edges / sigma))


def excess(one, other, mu):
    """By how much delta exceeds mu-GDP's, for the worst epsilon."""
    worst = -math.inf
    for epsilon in np.linspace(0, 6 * mu + mu * mu, 60):
        reached = np.maximum(one - math.exp(epsilon) * other, 0).sum()
        worst = max(worst, float(reached) - gdp_delta(mu, epsilon))
    return worst


def excess_of_a_sum(sigma, clients):
    whole = np.array([1.0])
    for _ in range(clients):
        whole = np.convolve(whole, rounded(sigma))
    return excess(np.append(0, whole), np.append(whole, 0), 1 / (sigma * math.sqrt(clients)))


@pytest.mark.parametrize("clients", [1, 2, 5, 20])
@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.7, 1.0, 2.0])
def test_rounded_sums_tell_no_more_but_for_aliasing(sigma, clients):
    """A shift of one grid unit. Ours are 2^20 grid units wide, where e^(-pi^2 sigma^2) is zero."""
    assert excess_of_a_sum(sigma, clients) <= math.exp(-(math.pi**2) * sigma**2) + 1e-9


def test_aliasing_is_seen_where_noise_is_a_fifth_of_the_grid():
    """The planted bug, a grid that is too coarse: the comparison above can fail."""
    assert excess_of_a_sum(0.2, 5) > 0.05


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.0])
def test_rounded_rows_that_stay_over_two_rounds_tell_no_more_than_continuous_ones(sigma):
    """Q_1 = w + z_1 and Q_2 = w + z_2, with w the row of a client that took part in the first round only."""
    row = rounded(sigma)
    size = len(row)
    joint = np.zeros((2 * size - 1, 2 * size - 1))
    for shift, chance in enumerate(row):
        joint[shift : shift + size, shift : shift + size] += chance * np.outer(row, row)
    one, other = np.zeros(np.add(joint.shape, 1)), np.zeros(np.add(joint.shape, 1))
    one[1:, 1:], other[:-1, :-1] = joint, joint
    covariance = sigma**2 * np.array([[2.0, 1.0], [1.0, 2.0]])
    mu = math.sqrt(float(np.ones(2) @ np.linalg.solve(covariance, np.ones(2))))
    assert excess(one, other, mu) <= math.exp(-2 * math.pi**2 * sigma**2 / 3) + 1e-9


def test_a_sum_of_rounded_gaussians_is_a_rounded_gaussian_and_uniforms():
    """h - 1 uniforms beside the Gaussian of all of them, rounded once: the same probabilities up to aliasing."""
    sigma, clients = 0.8, 3
    whole = rounded(sigma)
    for _ in range(clients - 1):
        whole = np.convolve(whole, rounded(sigma))
    reach, steps = len(whole) // 2, 400
    offsets = (np.arange(steps) + 0.5) / steps - 0.5
    two = np.add.outer(offsets, offsets).ravel()  # two uniforms
    edges = np.arange(-reach, reach + 2) - 0.5
    below = np.array([norm.cdf((edge - two) / (sigma * math.sqrt(clients))).mean() for edge in edges])
    assert np.abs(whole - np.diff(below)).max() < 6 * math.exp(-(math.pi**2) * sigma**2)
    assert np.abs(whole - np.diff(norm.cdf(edges / (sigma * math.sqrt(clients))))).max() > 0.001, "uniforms count"
