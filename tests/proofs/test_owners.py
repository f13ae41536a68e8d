"""docs/proofs/owners.md, step by step: what a person with several samples shows, exactly, and rows that are owners.

"Exact" is v' S^+ v of everything that was sent or opened (tests/harness/transcripts.py), for a person whose samples
move their releases together, in the worst of all signs. Mus are in units of one sample's own.
"""

import math
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from murmurfl.privacy import compose_gdp, make_mechanism, person_loss
from murmurfl.privacy.accounting.loss import Loss

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
    quadratic,
    stream,
)

RELEASES = 5
KINDS = [name for name in MECHANISMS if name != "bisr"]  # which takes seconds to begin


def alone(clients, acks):
    """Every release of some clients, each seen by itself."""
    return [[Opened(str(client), k, acks(client, k))] for k in range(1, RELEASES + 1) for client in range(clients)]


def person(transcript, samples):
    """The most that (client, release) samples show together, over all their signs."""
    changes = np.array([transcript.change(str(client), release) for client, release in samples]).T
    signs = np.array(list(product([1.0], *[[-1.0, 1.0]] * (len(samples) - 1)))).T
    return math.sqrt(quadratic(transcript.covariance, changes @ signs).max())


def exposed(name):
    """The release that shows a sample most, and what one sample in it shows: under a tree less than is charged."""
    worst = Transcript(stream(name, RELEASES), alone(1, lambda client, k: k - 1)).worst()
    assert worst.mu <= largest_column(name, RELEASES) * ROUNDING
    return worst.release, worst.mu


@pytest.mark.parametrize("name", KINDS)
def test_samples_on_several_clients_cost_the_root_of_their_number(name):
    chance, (worst, own) = generator(1), exposed(name)
    for clients in (2, 3, 4):
        acks = {(client, 1): 0 for client in range(clients)}
        for client, k in product(range(clients), range(2, RELEASES + 1)):
            acks[client, k] = int(chance.integers(acks[client, k - 1], k))
        seen = Transcript(stream(name, RELEASES), alone(clients, lambda client, k, acks=acks: acks[client, k]))
        claimed = person_loss(own, clients=clients).mu
        placed = [[(client, int(chance.integers(1, RELEASES + 1))) for client in range(clients)] for _ in range(4)]
        assert all(person(seen, samples) <= claimed * ROUNDING for samples in placed)
        assert person(seen, [(client, worst) for client in range(clients)]) == pytest.approx(claimed)


def test_clients_of_unequal_mus_and_numbers_of_samples_add_in_squares():
    streams = {str(i): Stream(np.eye(RELEASES), noise_std=std) for i, std in enumerate((1.0, 2.0, 5.0))}
    seen = Transcript(streams, alone(3, lambda client, k: k - 1))
    own = [math.sqrt(RELEASES) / std for std in (1.0, 2.0, 5.0)]
    samples = [(0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 1)]
    assert person(seen, samples) == pytest.approx(compose_gdp([own[0], 2 * own[1], 3 * own[2]]))
    assert person(seen, samples) > person_loss(own[2], clients=3, samples=2).mu  # the root of j is of equal clients


def test_noise_that_two_clients_share_would_make_it_their_number():
    """The square root counts on noise of their own; a key used on two clients is caught."""
    decoder = mechanism("decay", RELEASES).decoder()
    both = Transcript(Stream(np.sqrt(2) * decoder), [[Opened("0", k, k - 1)] for k in range(1, RELEASES + 1)])
    worst, _ = exposed("decay")
    # The sum of both clients' releases then has twice the noise of one, not the root of two of it.
    change = 2 * both.change("0", worst)
    honest = math.sqrt(quadratic(both.covariance, change[:, None])[0])
    shared = Transcript(Stream(decoder), alone(1, lambda client, k: k - 1))
    assert honest == pytest.approx(person_loss(largest_column("decay", RELEASES), clients=2).mu)
    assert person(shared, [(0, worst), (0, worst)]) > honest * 1.4


@pytest.mark.parametrize("name", KINDS)
def test_samples_of_one_client_cost_their_number_at_most(name):
    seen, (worst, own) = Transcript(stream(name, RELEASES), alone(1, lambda client, k: k - 1)), exposed(name)
    shown = {
        places: person(seen, [(0, k) for k in places])
        for places in combinations_with_replacement(range(1, RELEASES + 1), 3)
    }
    claimed = person_loss(own, samples=3).mu
    assert max(shown.values()) == pytest.approx(claimed)
    assert shown[(worst,) * 3] == pytest.approx(claimed)


def test_samples_in_different_releases_cost_root_to_full_number():
    """Of independent noise the root; of noise that cancels nearly their number. So what is said is their number."""
    for name, expected in (("independent", math.sqrt(3)), ("cancelling", None)):
        seen = Transcript(stream(name, 50), [[Opened("0", k, k - 1)] for k in range(1, 51)])
        found = person(seen, [(0, 1), (0, 2), (0, 3)]) / largest_column(name, 50)
        assert found == pytest.approx(expected) if expected else 2.9 < found < 3


def summed(clients, honest):
    """One sum a round of all clients that are honest, of uniform cancelling noise."""
    assert clients <= honest
    return Transcript(Stream(np.eye(RELEASES)), played(np.full((honest, RELEASES), 2)))


@pytest.mark.parametrize(("clients", "honest"), [(1, 4), (2, 4), (3, 4), (4, 4), (2, 2), (3, 9)])
def test_under_secure_aggregation_clients_in_one_sum_cost_their_number(clients, honest):
    local = math.sqrt(RELEASES)
    mu = local / math.sqrt(honest)
    claimed = person_loss(Loss.of(mu, local), clients=clients, trust="secure-aggregation").mu
    assert claimed == pytest.approx(clients * mu)
    found = person(summed(clients, honest), [(client, 1) for client in range(clients)])
    assert found == pytest.approx(claimed)
    if clients > 1:  # the root of their number would be wrong
        assert found > person_loss(mu, clients=clients).mu * 1.4


def test_a_persons_many_clients_cost_the_local_mu_at_most():
    """Nine of a person's clients in one sum, where mu counts on four: they are nine honest ones themselves."""
    local = math.sqrt(RELEASES)
    claimed = person_loss(Loss.of(local / 2, local), clients=9, trust="secure-aggregation").mu
    assert claimed == pytest.approx(3 * local)
    assert claimed < 9 * local / 2
    assert person(summed(9, 9), [(client, 1) for client in range(9)]) == pytest.approx(claimed)


def test_random_sums_never_show_a_person_more_than_is_said():
    """Clients that miss rounds, with any noise; each person has a sample on each of two or three of them."""
    chance = generator(7)
    for name in ("independent", "cancelling", "decay", "blt", "tree"):
        for _ in range(6):
            honest, rounds = int(chance.integers(3, 6)), 4
            patterns = chance.choice(3, size=(honest, rounds), p=[0.2, 0.1, 0.7])
            seen = Transcript(stream(name, rounds), played(patterns))
            if not seen.squares:
                continue
            mu, local = seen.worst().mu, largest_column(name, rounds)  # the least mu that any claim may state
            for clients in (2, 3):
                samples = [(client, int(chance.integers(1, rounds + 1))) for client in range(clients)]
                said = person_loss(Loss.of(mu, local), clients=clients, trust="secure-aggregation").mu
                assert person(seen, samples) <= said * ROUNDING


def test_samples_cost_their_number_under_a_trusted_server():
    """One noise for all: the published sums are one stream, and j clients move one of its releases j times as far."""
    for name in ("independent", "tree", "blt"):
        seen, (worst, own) = Transcript(stream(name, RELEASES), alone(1, lambda client, k: k - 1)), exposed(name)
        said = person_loss(own, clients=4, trust="trusted-server").mu
        assert person(seen, [(0, worst)] * 4) == pytest.approx(said)
        assert said == pytest.approx(4 * own)


def test_full_batches_attain_the_number_of_samples():
    """Every sample is in every release: the moves of two add up in each of them."""
    encoder = make_mechanism("independent", RELEASES).materialize()
    one = np.linalg.norm(encoder @ np.ones(RELEASES))
    assert np.linalg.norm(encoder @ (3 * np.ones(RELEASES))) == pytest.approx(person_loss(one, samples=3).mu)
