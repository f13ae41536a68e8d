"""What a trusted server believes of a client that adds no noise."""

import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys, protocol
from murmurfl.privacy.noise import FINEST_GRID
from murmurfl.strategies import NothingAggregatedError, Reply
from murmurfl.strategies.aggregation.noisy import is_well_formed

from tests.harness.errors import raises
from tests.harness.trusted_runs import CLIENTS, KINDS, ROUNDS, Clients, D, first_step, policy, strategy

SIZE, CAP = 4, 20
POLICY = policy("trusted-mu2")
PLAN = POLICY.plan(SIZE)


def reply(release, ack, length, *, sensitivity=PLAN.sensitivity, values=None, name="0"):
    if values is None:
        values = np.zeros(SIZE)
        values[0] = length  # a power of two: on the grid
    return Reply(name, release, ack, values, {protocol.SENSITIVITY: sensitivity})


def honest(sent, most=3, of=POLICY):
    return is_well_formed(of, sent, most_releases=most)


@pytest.mark.parametrize(
    ("sent", "most"),
    [(reply(1, 0, 1.0), 1), (reply(3, 0, 2.0), 3), (reply(CAP, CAP - 1, 1.0), 3), (reply(2, 0, 0.0), 3)],
)
def test_what_an_honest_client_sends_is_believed(sent, most):
    assert honest(sent, most)


@pytest.mark.parametrize(
    "sent",
    [
        reply(10**9, 0, 2.0**29),  # believed by 0.1: the client's own number bounded its values
        reply(CAP + 1, CAP, 1.0),
        reply(CAP, 0, 16.0),
        reply(4, 0, 1.0),
        reply(1, 0, 2.0),
        reply(1, 1, 0.0),
        reply(1, 2, 0.0),
        reply(1, -1, 1.0),
        reply(True, 0, 1.0),
        reply(2.0, 1, 1.0),
        reply(1, 0, math.nan),
        reply(1, 0, math.inf),
        reply(1, 0, 1e300),
        reply(1, 0, 0.0, values=np.full(SIZE, PLAN.grid.spacing / 2)),
        reply(1, 0, 1.0, sensitivity=2 * PLAN.sensitivity),
        reply(1, 0, 1.0, sensitivity=0.0),
        reply(1, 0, 1.0, sensitivity=math.nan),
        reply(1, 0, 1.0, sensitivity=None),
    ],
)
def test_what_no_honest_client_can_send_is_dropped(sent):
    assert not honest(sent)


def test_under_the_papers_rule_a_reply_is_one_release_whatever_was_acknowledged():
    assert honest(reply(9, 0, 1.0), 1, policy())
    assert not honest(reply(9, 0, 2.0), 1, policy())


def test_oversized_contributions_to_a_trusted_server_are_rejected():
    """Configured for full batches it states the same sensitivity, and at an optimum its sums are no longer than S."""
    batches = PrivacyPolicy(1.0, 1, CAP, 1.0, mechanism="independent", release_rule="paper", trust="trusted-server")
    ledger, keys, rows = MemoryLedger(), SimulatedKeys(1, "0"), np.tile([[0.5, 0, 0, 0], [-0.5, 0, 0, 0]], (20, 1))
    privatizer = Privatizer(replace(batches, batch_selection="full_batch"), SIZE, len(rows), ledger, keys)
    release = privatizer.release("s", 0, lambda samples: rows[samples])
    stated = {protocol.SENSITIVITY: privatizer.plan.sensitivity, protocol.NUM_EXAMPLES: release.samples}
    sent = Reply("0", 1, 0, release, stated)
    assert honest(sent, 1, replace(batches, batch_selection="full_batch"))
    assert not honest(sent, 1, batches)
    assert honest(replace(sent, metrics=stated | {protocol.NUM_EXAMPLES: 1}), 1, batches), "nothing else is wrong"


class Scripted(Clients):
    """Clients that answer only in some rounds, and state what they are told to."""

    def __init__(self, replies):
        super().__init__(POLICY, SIZE)
        self.replies = replies

    def answer(self, request):
        return [sent for sent in self.replies.get(request.server_round, []) if sent.ack == request.acks[sent.client]]


def report_of(replies, rounds):
    subject = strategy("trusted-mu2", None)
    subject.start(Scripted(replies), ArrayRecord([np.zeros(SIZE)]), num_rounds=rounds)
    return [(report.aggregated, report.malformed) for report in subject.history]


def test_a_client_cannot_have_made_more_releases_than_it_was_asked_for():
    assert report_of({1: [reply(2, 0, 2.0)], 2: [reply(2, 0, 2.0)], 3: [reply(4, 2, 2.0)]}, 3) == [
        (0, 1),
        (1, 0),
        (0, 1),
    ]


def test_what_was_carried_over_many_lost_replies_is_believed():
    assert report_of({7: [reply(7, 0, 4.0)], 9: [reply(9, 7, 2.0)]}, 9)[6::2] == [(1, 0), (1, 0)]


def test_the_round_that_a_crash_cut_off_may_have_been_answered(tmp_path):
    """The client made a release in that round, which the server never counted; its next reply has two."""
    start = ArrayRecord([np.zeros(SIZE)])
    strategy("trusted-mu2", tmp_path / "c").start(Scripted({1: [reply(1, 0, 1.0)]}), start, num_rounds=1)
    for release, believed in ((4, False), (3, True)):  # each resume allows one more
        resumed = strategy("trusted-mu2", tmp_path / "c")
        resumed.start(Scripted({2: [reply(release, 1, 2.0)]}), start, num_rounds=2 if believed else 1)
        if not believed:
            assert not resumed.aggregator.validate_reply(reply(release, 1, 2.0), current=True)
    assert resumed.history[1].aggregated == 1


def test_a_client_that_states_a_huge_number_moves_nothing():
    class Liar(Clients):
        def answer(self, request):
            yield reply(10**9, request.acks["0"], 2.0**29)

    subject = strategy("trusted-mu2", None)
    with pytest.raises(NothingAggregatedError):
        subject.start(Liar(POLICY, SIZE), ArrayRecord([np.zeros(SIZE)]), num_rounds=2)
    assert not subject.aggregator.state()["prefix"].any()
    assert [report.malformed for report in subject.history] == [1, 1]


@pytest.mark.parametrize("changes", [{"num_rounds": 0}, {"policy": policy(trust="untrusted-server")}])
def test_impossible_trusted_servers_are_refused(changes):
    for kind in ("trusted-mu2", "tree"):
        with pytest.raises(ConfigurationError, match="Expected"):
            strategy(kind, None, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grid_too_fine_for_the_servers_noise_is_made_coarser_and_charged(kind, tmp_path):
    """At mu = 0.001 the clients' grid is at most 2^-35 of the noise: so fine that the normals of 0.1 showed."""
    size = 1000
    terms = policy("tree" if kind != "trusted-mu2" else kind, mu=1e-3, delta=1e-6)
    subject = strategy(kind, tmp_path / "checkpoint", policy=terms)
    clients, ours = terms.plan(size).grid, subject.aggregator.stream.noise_grid(size)
    grid_per_std = ours.spacing / subject.aggregator.stream.unrounded_noise_std(size)
    assert clients.spacing < FINEST_GRID * subject.aggregator.stream.unrounded_noise_std(size)
    assert FINEST_GRID < grid_per_std <= 4 * FINEST_GRID
    assert subject.aggregator.stream.rounding_charge(size) == ours.charge(size)
    published = first_step(subject, size)
    noise = {"trusted-mu2": "w", "tree": "noisy"}.get(kind)
    if noise is not None:
        values = getattr(published, noise)
        values = values / -subject.rule.learning_rate * CLIENTS if noise == "w" else values[0]
        counts = values / ours.spacing
        assert np.abs(counts - np.rint(counts)).max() < 1e-2, "what is published is on the coarser grid"
        assert np.std(values) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_mu_beyond_the_normals_range_is_refused_or_infinite(kind, tmp_path):
    terms = policy("tree" if kind != "trusted-mu2" else kind, mu=300.0)
    real = strategy(kind, tmp_path / "checkpoint", policy=terms)
    with raises(ConfigurationError, "out-of-range", match="Expected mu <="):
        first_step(real, D)
    simulated = strategy(kind, None, policy=terms, noise_keys=SimulatedKeys(1, "server"))
    first_step(simulated, D)
    assert math.isinf(simulated.aggregator.guaranteed_mu(D))
    assert simulated.aggregator.policy is terms
    assert strategy(kind, None).aggregator.guaranteed_mu(D) == strategy(kind, None).aggregator.mu == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_cannot_serve_its_mu_refuses_before_a_client_is_asked(kind, tmp_path):
    terms = policy("tree" if kind != "trusted-mu2" else kind, mu=300.0)
    subject, clients = strategy(kind, tmp_path / "checkpoint", policy=terms), Clients(terms)
    with raises(ConfigurationError, "out-of-range", match="Expected mu <="):
        subject.start(clients, ArrayRecord([np.ones(D)]), num_rounds=ROUNDS)
    assert clients.seen == []
    assert not list(tmp_path.iterdir()), "and leaves no files"
    assert math.isinf(subject.aggregator.epsilon())
