"""The tool itself: the exact mu of every sample from everything that was opened."""

import math
import time

import numpy as np
import pytest
from murmurfl.privacy import MECHANISMS, MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys, make_mechanism
from murmurfl.privacy.sums.masking import NOTHING_OPENED, Header

from tests.harness.transcripts import Opened, Stream, Transcript, opened_sets, played

EVERY = [*MECHANISMS]


def alone(name, releases, acks):
    """One client, seen release by release."""
    return Transcript(Stream.of_mechanism(name, releases), [[Opened("0", k + 1, ack)] for k, ack in enumerate(acks)])


@pytest.mark.parametrize("name", [name for name in EVERY if name != "tree"])
@pytest.mark.parametrize("acks", [(0, 1, 2, 3, 4), (0, 0, 0, 0, 0), (0, 1, 1, 3, 3)])
def test_one_client_seen_by_itself_has_the_columns_of_its_encoder(name, acks):
    columns = np.linalg.norm(make_mechanism(name, 5).materialize(), axis=0)
    found = alone(name, 5, acks)
    assert [found.square("0", k) for k in range(1, 6)] == pytest.approx(columns**2)
    assert found.worst().mu == pytest.approx(columns.max())


def test_a_trees_prefixes_tell_no_more_than_its_nodes():
    nodes = np.linalg.norm(make_mechanism("tree", 8).materialize(), axis=0)
    found = alone("tree", 8, range(8))
    assert all(found.square("0", k) <= nodes[k - 1] ** 2 * (1 + 1e-12) for k in range(1, 9))


def test_a_policys_client_by_itself_has_its_local_mu():
    plan = PrivacyPolicy(1.0, 2, 5, 2.0, mechanism="cancelling").plan(10)
    found = Transcript(Stream.of_plan(plan), [[Opened("m", k + 1, k)] for k in range(5)])
    assert found.worst().mu == pytest.approx(plan.mu, rel=1e-6)
    assert found.worst()[1:] == ("m", "s", 1)


def test_colluders_noise_hides_nothing_and_other_clients_noise_does():
    patterns = [[2] * 4] * 5
    stream = Stream.of_mechanism("cancelling", 4)
    assert Transcript(stream, played(patterns)).square("0", 1) == pytest.approx(1 / 5)
    assert Transcript(stream, played(patterns), colluders={"2", "4"}).square("0", 1) == pytest.approx(1 / 3)
    everybody = Transcript(stream, played(patterns), colluders={"1", "2", "3", "4"})
    assert everybody.square("0", 1) == pytest.approx(1)


def test_a_sum_less_one_client_shows_that_client():
    stream = Stream.of_mechanism("cancelling", 2)
    again = [[Opened("0", 1, 0)], [Opened("0", 2, 1)], [Opened("0", 2, 0)]]  # P_2 - P_0 after P_1 and P_2 - P_1
    assert Transcript(stream, again).square("0", 1) == pytest.approx(1.0)
    both = [Opened("0", 1, 0), Opened("1", 1, 0)]
    assert Transcript(stream, [both]).square("0", 1) == pytest.approx(1 / 4)
    assert Transcript(stream, [both, both[1:]]).square("0", 1) == pytest.approx(1 / 2), "as if it were by itself"


def test_sums_that_show_a_sample_without_noise_are_infinitely_bad():
    """The same noise in both releases: their difference has none."""
    shown = Transcript(Stream(np.array([[1.0], [1.0]])), [[Opened("0", 1, 0)], [Opened("0", 2, 0)]])
    assert shown.square("0", 1) == pytest.approx(1.0)
    assert shown.square("0", 2) == math.inf
    assert shown.worst().mu == math.inf


def test_sessions_have_noise_of_their_own():
    stream = Stream.of_mechanism("cancelling", 2)
    sets = [[Opened("0", 1, 0, session), Opened("1", 1, 0, session)] for session in ("a", "b")]
    found = Transcript(stream, sets)
    assert found.square("0", 1, "a") == pytest.approx(1 / 4)
    assert found.square("0", 1, "b") == pytest.approx(1 / 4)


def test_clients_may_differ_in_noise_and_sensitivity():
    streams = {
        "0": Stream(np.eye(2), noise_std=1.0, sensitivity=2.0),
        "1": Stream(np.eye(2), noise_std=3.0, sensitivity=1.0),
    }
    found = Transcript(streams, [[Opened("0", 1, 0), Opened("1", 1, 0)]])
    assert found.square("0", 1) == pytest.approx(4 / 10)
    assert found.square("1", 1) == pytest.approx(1 / 10)


@pytest.mark.parametrize("name", EVERY)
def test_the_covariance_is_that_of_the_releases_that_clients_really_make(name, reader):
    """Unit rows in the place of normals: a release is its own coefficients of Z."""
    policy = reader.policy(mechanism=name)
    asked = [("s", ack) for ack in (0, 1, 1, 3)]
    sent = reader.sent(policy, asked)
    found = Transcript(Stream.of_plan(sent.plan), [[Opened("m", k + 1, ack)] for k, (_, ack) in enumerate(asked)])
    scale = sent.plan.noise_std**2
    assert found.covariance / scale == pytest.approx(sent.noise @ sent.noise.T, abs=1e-6)
    changes = np.array([found.change("m", k) for k in range(1, 5)]).T
    assert changes == pytest.approx(sent.signal[:, :4], abs=1e-6)


def test_headers_give_the_sets_and_their_ids_the_acknowledgements():
    def header(client, release, identity, ack, release_mode="cumulative"):
        return Header("t", client, release_mode, release, identity * 32, ack, 3, 0.5, 2, "r", ("h",), "terms")

    nothing = NOTHING_OPENED.hex()
    first, lost, third = header("a", 1, "1", nothing), header("a", 2, "2", "1" * 32), header("a", 3, "3", "1" * 32)
    assert opened_sets([[first], [third]], made=[lost]) == [[Opened("a", 1, 0, "t")], [Opened("a", 3, 1, "t")]]
    assert opened_sets([[header("a", 7, "7", nothing, "nothing")]]) == [[Opened("a", 7, 6, "t")]]
    with pytest.raises(KeyError):
        opened_sets([[third]])


def test_what_played_says_is_what_clients_do():
    """Against real clients whose ledger counts: not asked, lost, opened, and the cap."""
    patterns = [[2, 1, 1, 2, 0], [0, 2, 2, 2, 2]]
    policy = PrivacyPolicy(1.0, 1, 3, 2.0)
    clients = [Privatizer(policy, 2, 3, MemoryLedger(), SimulatedKeys(1, str(i))) for i in range(2)]
    acks, sets = [0, 0], []
    for states in zip(*patterns, strict=True):
        members = []
        for number, (privatizer, state) in enumerate(zip(clients, states, strict=True)):
            if not state or (number, len(sets)) in {(0, 3), (1, 4)}:  # three releases each
                continue
            release = privatizer.release("s", acks[number], lambda chosen: np.zeros((1, 2)))
            if state == 2:
                members.append(Opened(str(number), release.release, release.ack))
                acks[number] = release.release
        sets.append(members)
    assert played(patterns, releases=3) == sets


def test_a_thousand_sums_of_many_clients_take_seconds():
    generator = np.random.Generator(np.random.Philox(key=3))
    patterns = generator.choice(3, size=(20, 400), p=(0.2, 0.1, 0.7))
    began = time.perf_counter()
    found = Transcript(Stream.of_mechanism("cancelling", 400), played(patterns)).worst()
    assert 0 < found.mu < math.inf
    assert time.perf_counter() - began < 20.0


def test_releases_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="ack < release"):
        Transcript(Stream.of_mechanism("cancelling", 2), [[Opened("0", 3, 0)]])
    with pytest.raises(ValueError, match="ack < release"):
        Transcript(Stream.of_mechanism("cancelling", 2), [[Opened("0", 1, 1)]])
