"""Sampling: whom a round asks, how long it waits, what becomes of late answers, and who leaves when."""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.clients import FullBatchClient, Mu2Client, NoisySGDClient
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, derived_seed
from murmurfl.strategies import (
    CorrelatedFedAvg,
    CorrelatedMomentum,
    DelayedMomentum,
    FullBatch,
    MeanOfFeatures,
    Mu2,
    NoisySGD,
    OneShot,
    SecureAggregation,
    ShuffledAvg,
    TrustedMu2,
    sample_clients,
)
from murmurfl.strategies.rounds.client_registry import (
    NumberedNames,
    in_order,
    plain_names,
    restored_names,
)
from murmurfl.strategies.rounds.exhaustion import NO_CAP, RemainingReleases, exhaustion_schedule
from murmurfl.strategies.rounds.in_flight import InFlightRequests
from murmurfl.strategies.rounds.participation import ParticipationConfig
from murmurfl.strategies.rounds.sampling import ShuffledSampler, most_requests, sample_numbers
from murmurfl.strategies.rounds.validation import ReplyValidator

from tests.harness import secure as secure_training
from tests.harness.callbacks import AfterRound
from tests.harness.clients import normal_samples, simulated_app
from tests.harness.errors import raises
from tests.harness.grid import Late, LateGrid, NodesGrid, coin
from tests.harness.models import Data
from tests.harness.secure import SecureGrid

pytestmark = pytest.mark.usefixtures("no_result_folder")


def drawn_plainly(clients, count, seed, server_round):
    generator = np.random.Generator(np.random.Philox(key=derived_seed("sample machines", seed, server_round)))
    return sorted(generator.choice(clients, size=count, replace=False).tolist())


def dealt_plainly(clients, count, seed, rounds):
    """Batches from a shuffled order, one client after the other: who is in it already waits for the next."""
    hands, pack, packs = [], [], 0
    for _ in range(rounds):
        hand = []
        while len(hand) < count:
            if not pack:
                packs += 1
                key = derived_seed("deal machines", seed, packs)
                pack = np.random.Generator(np.random.Philox(key=key)).permutation(clients).tolist()
            card = next(card for card in pack if card not in hand)
            pack.remove(card)
            hand.append(card)
        hands.append(sorted(hand))
    return hands


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(("clients", "count"), [(1, 1), (7, 1), (7, 3), (7, 6), (7, 7), (50, 20), (50, 49), (60, 7)])
def test_clients_are_dealt_as_cards_are(clients, count):
    for seed in (0, 5):
        hands = [sample_numbers(clients, count, seed, t, "balanced").tolist() for t in range(1, 61)]
        assert hands == dealt_plainly(clients, count, seed, 60)


def test_a_hand_is_the_same_whichever_was_dealt_before():
    hands = dealt_plainly(30, 13, 9, 40)
    for t in np.random.default_rng(1).permutation(40).tolist():
        assert sample_numbers(30, 13, 9, t + 1, "balanced").tolist() == hands[t]
        assert ShuffledSampler(30, 13, 9).batch(t + 1).tolist() == hands[t]


def test_clients_are_drawn_as_numpy_draws_them():
    for clients, count in ((1, 1), (12, 5), (20_000, 300), (20_000, 900)):
        for t in (1, 2, 17):
            assert sample_numbers(clients, count, 3, t).tolist() == drawn_plainly(clients, count, 3, t)
            names = [f"node-{i}" for i in range(clients)]
            assert sample_clients(names, count, 3, t) == [names[i] for i in drawn_plainly(clients, count, 3, t)]


def test_shuffling_keeps_one_permutation_however_many_rounds_there_are():
    sampler = ShuffledSampler(50_000, 1_000, 4)
    tracemalloc.start()
    try:
        for t in range(1, 151):
            sampler.batch(t)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= 1.1 * 4 * 50_000


def test_more_clients_a_round_than_there_are_cannot_be_dealt():
    with raises(ConfigurationError, "out-of-range", match="no more clients a round"):
        sample_numbers(3, 4, 1, 1, "balanced")


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
@pytest.mark.parametrize("seed", range(10))
def test_the_first_refusal_is_found_whether_clients_are_passed_over_or_not(sampling, seed):
    caps, left, rounds = np.random.default_rng(seed).integers(0, 9, size=9), {}, range(1, 12)

    def asked(server_round, _=None):
        return sample_numbers(9, 4, seed, server_round, sampling)

    found = exhaustion_schedule(asked, caps, rounds)
    refused = None
    for t in rounds:
        for number in asked(t).tolist():
            left[number] = left.get(number, caps[number]) - 1
            if left[number] < 0 and refused is None:
                refused = t, number
    assert found.refused == refused

    def willing(server_round, left):
        return np.array([number for number in asked(server_round) if left[number] > 0], np.int64)

    passed_over = exhaustion_schedule(willing, caps, rounds)
    assert passed_over.refused is None
    times = Counter(number for t in rounds for number in asked(t).tolist())
    for number, cap in enumerate(caps.tolist()):
        spent = [t for t in rounds if number in asked(t)][:cap]
        expected = 0 if not cap else spent[-1] if times[number] >= cap else None
        assert passed_over.after.get(str(number)) == (expected if expected != rounds[-1] else None)
    assert [passed_over.left(t) for t in rounds] == [
        9 - sum(last < t for last in passed_over.after.values()) for t in rounds
    ]


def test_clients_without_a_cap_never_run_out():
    nobody = exhaustion_schedule(lambda t, left: np.arange(3), np.full(3, NO_CAP), range(1, 1000))
    assert (nobody.after, nobody.refused, nobody.left(999), nobody.lines()) == ({}, None, 3, [])


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
@pytest.mark.parametrize(("clients", "count", "rounds"), [(7, 3, 20), (5, 5, 4), (9, 2, 9), (9, 2, 10)])
def test_nobody_is_asked_in_more_rounds_than_is_said(sampling, clients, count, rounds):
    times = Counter(i for t in range(1, rounds + 1) for i in sample_numbers(clients, count, 3, t, sampling).tolist())
    most = most_requests(clients, count, rounds, sampling)
    assert max(times.values()) <= most
    assert sampling == "uniform" or max(times.values()) == most


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
    for unknown_node in ("101", "07", "-1", "", "x", "٣", "9" * 5000, 7, None):
        assert unknown_node not in names
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


SHAPES = [(2, 3), (4,)]
D = 10
START = ArrayRecord([np.zeros(shape) for shape in SHAPES])
FAST, TIMEOUT = 3.0, 300.0


def app(samples=60, *, kind=Mu2Client, **changes):
    """Contributions are the data, whatever the query point."""
    return simulated_app(kind, Data(SHAPES), lambda name: normal_samples(name, samples, D) / 4, **changes)


def slow_fifth(name, server_round, seed=1):
    """Every fifth client takes 10 to 60 s more."""
    return FAST + (10 + 50 * coin(seed, name, server_round) if int(name) % 5 == 0 else 0.0)


def twelve_seconds(name, server_round):
    """One client takes four times as long as the others."""
    return 12.0 if name == "0" else FAST


def trouble(seed):
    """Answers that are in time, late, very late and lost, at random."""

    def delay(name, server_round):
        share = coin(seed, "kind", name, server_round)
        if share < 0.06:
            return math.inf
        return FAST * (1 + coin(seed, "fast", name, server_round)) + (
            120 * coin(seed, "slow", name, server_round) if share < 0.35 else 0.0
        )

    return delay


def trained(grid, rounds, *, kind=Mu2, clients=None, timeout=TIMEOUT, **options):
    clients = len(grid.contexts) if clients is None else clients
    defaults = {"num_clients": clients, "clients_per_round": clients, "learning_rate": 0.05, "seed": 1}
    strategy = kind(**{**defaults, "session": "s", "node_deadline_s": 1.0, **options})
    if isinstance(grid, LateGrid):
        strategy.requests.clock = grid.clock
    strategy.start(grid, START, num_rounds=rounds, timeout=timeout)
    return strategy


def assert_the_sum_is_that_of_the_prefix_sums(strategy, grid):
    """Of every client all of P_j, noise and contributions, j its last release that was aggregated; nothing else."""
    sums = grid.prefix_sums()
    expected = sum((sums[name, ack] for name, ack in strategy.acks.items()), np.zeros(D))
    # The rule of a trusted server only sees what is published; the sum is the aggregator's.
    found = strategy.aggregator.state().get("prefix", strategy.state.release_sum)
    assert np.array_equal(found, expected), "to the last bit"


ENDS = [
    {"quorum": 0.5, "clients_per_round": 8},
    {"quorum": 0.8, "clients_per_round": 5, "sampling": "balanced"},
    {"over_selection": 1.4, "clients_per_round": 5},
    {"quorum": 0.7, "over_selection": 1.25, "clients_per_round": 6, "sampling": "balanced"},
]


def checked_run(seed, rounds, **options):
    """A training in trouble, looked at after every round; its reports."""
    grid = LateGrid(app(), 8, trouble(seed))
    look = AfterRound(lambda report, metrics: assert_the_sum_is_that_of_the_prefix_sums(strategy, grid))
    common = {"learning_rate": 0.05, "seed": 1, "session": "s", "node_deadline_s": 1.0, "callbacks": [look]}
    strategy = Mu2(num_clients=8, **common, **options)
    strategy.requests.clock = grid.clock
    strategy.start(grid, START, num_rounds=rounds, timeout=50.0)
    assert max(strategy.acks.values()) <= rounds
    return strategy.history


def test_late_and_lost_replies_leave_exact_prefix_sums():
    history = [report for seed, end in enumerate(ENDS) for report in checked_run(seed, 10, **end)]
    assert sum(report.overdue for report in history) > 5
    assert sum(report.lost for report in history) > 2


@pytest.mark.long
def test_so_it_is_in_many_trainings_in_trouble():
    history = [report for seed in range(24) for report in checked_run(seed, 25, **ENDS[seed % 4])]
    assert sum(report.overdue for report in history) > 100
    assert sum(report.lost for report in history) > 100


def test_a_server_that_ignores_a_late_answers_base_is_caught(monkeypatch):
    """It asks clients again while they compute, and believes both answers: what the first one has counts twice."""
    monkeypatch.setattr(ReplyValidator, "is_late", lambda self, reply: False)
    monkeypatch.setattr(InFlightRequests, "clients", frozenset())
    grid = LateGrid(app(), 4, twelve_seconds)
    strategy = trained(grid, 12, quorum=0.75)
    with pytest.raises(AssertionError, match="to the last bit"):
        assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_asking_again_meanwhile_costs_no_bit_as_long_as_answers_are_looked_at(monkeypatch):
    """The sibling of the planted bug: which of two answers counts is decided where all are looked at."""
    monkeypatch.setattr(InFlightRequests, "clients", frozenset())
    grid = LateGrid(app(), 4, twelve_seconds)
    strategy = trained(grid, 12, quorum=0.75)
    assert sum(report.late for report in strategy.history) > 0
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_what_a_client_sends_late_adds_up_to_what_it_sends_in_time():
    late = LateGrid(app(), 4, twelve_seconds)
    strategy = trained(late, 12, quorum=0.75)
    least = strategy.acks["0"]
    assert 1 < least < strategy.acks["1"]
    reference = trained(NodesGrid(app(), 4), least)
    sums = late.prefix_sums()
    heard = sum(sums[name, least] for name in "0123")
    assert np.array_equal(reference.state.release_sum, heard), "prefix sums do not depend on when they are heard"


def test_a_round_neither_waits_for_late_clients_nor_asks_them_again():
    grids = [LateGrid(app(), 10, slow_fifth) for _ in range(2)]
    patient = trained(grids[0], 18, quorum=0.8)
    trained(grids[1], 18)
    assert grids[1].now > 3 * grids[0].now, "of as many rounds"
    assert max(grids[0].queues.values()) == 1
    assert [report.awaited for report in patient.history].count(2) > 5
    assert sum(report.overdue for report in patient.history) >= 1
    assert sum(report.late for report in patient.history) == 0
    assert min(report.aggregated for report in patient.history) >= 8
    for name, release in patient.participation.items():
        assert release is None or release == patient.acks[name]


def test_with_more_asked_than_needed_a_round_ends_when_enough_have_answered():
    grid = LateGrid(app(), 12, slow_fifth)
    strategy = trained(grid, 8, clients_per_round=5, over_selection=1.6, sampling="balanced")
    assert strategy.clients_per_round == 8, "what steps divide by"
    assert {report.asked for report in strategy.history} == {8}
    assert all(report.aggregated - report.overdue >= 5 for report in strategy.history)
    assert grid.now < 8 * 2 * FAST
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)
    assert max(grid.queues.values()) == 1


def test_in_place_of_clients_that_are_late_others_are_asked():
    grid = LateGrid(app(), 12, slow_fifth)
    strategy = trained(grid, 6, clients_per_round=6, quorum=0.8)
    assert {report.asked for report in strategy.history} == {6}


def test_random_lateness_of_everybody_ends_no_round_with_nothing():
    grid = LateGrid(app(), 6, lambda name, t: FAST + (50.0 if coin(7, name, t) < 0.4 else 0.0))
    strategy = trained(grid, 10, quorum=0.5)
    assert min(report.aggregated for report in strategy.history) >= 1
    assert np.mean([report.aggregated for report in strategy.history]) >= 3
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_waiting_for_all_is_bit_by_bit_what_it_was():
    grids = [NodesGrid(app(), 6, lost=0.3) for _ in range(2)]
    runs = [
        trained(grids[0], 8, clients_per_round=4),
        trained(grids[1], 8, clients_per_round=4, quorum=1.0, over_selection=1),
    ]
    assert np.array_equal(runs[0].state.release_sum, runs[1].state.release_sum)
    assert runs[0].settings() == runs[1].settings()
    assert "quorum" not in runs[0].settings(), "checkpoints of before are read"


def test_a_run_is_resumed_with_requests_open_and_nothing_of_them_counts_twice(tmp_path):
    grid = LateGrid(app(), 4, lambda name, t: 10.0 if name == "0" else FAST)
    options = {"quorum": 0.75, "checkpoint": tmp_path / "checkpoint.npz"}
    first = trained(grid, 4, **options)
    assert first.history[-1].awaited == 1
    again = trained(grid, 14, **options)  # nobody hears what the first one asked for
    assert len(again.history) == 14
    assert again.acks["0"] > first.acks.get("0", 0) + 1
    assert_the_sum_is_that_of_the_prefix_sums(again, grid)


def test_an_abandoned_requests_answer_is_carried_over():
    grid = LateGrid(app(), 4, lambda name, t: 30.0 if name == "0" and t == 1 else FAST)
    strategy = trained(grid, 15, quorum=0.75, timeout=10.0)
    assert sum(report.lost for report in strategy.history) >= 1
    assert strategy.acks["0"] > 1, "the first is not listened to any more; a later one has it"
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_a_client_that_comes_back_on_another_node_is_asked_at_once():
    grid = LateGrid(app(), 5, lambda name, t: math.inf if name == "0" and t == 2 else FAST)

    def restart(report, metrics):
        if report.server_round == 4:
            context = grid.contexts.pop(grid.first_node)
            context.node_id = 77
            grid.contexts[77] = context

    strategy = trained(grid, 10, quorum=0.8, callbacks=[AfterRound(restart)])
    assert sum(report.lost for report in strategy.history) == 1
    assert strategy.acks["0"] > 5
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_full_batches_drop_gradients_of_older_models(caplog):
    policy = {
        "batch_selection": "full_batch",
        "mechanism": "independent",
        "release_rule": "paper",
        "sample_participations": 20,
    }
    slow = LateGrid(app(4, kind=FullBatchClient, max_participations=20, **policy), 5, twelve_seconds)
    strategy = trained(slow, 8, kind=FullBatch, quorum=0.8)
    assert sum(report.overdue for report in strategy.history) >= 1
    assert sum(report.late for report in strategy.history) == sum(report.overdue for report in strategy.history)
    assert all(report.samples == 16 for report in strategy.history)
    assert "waits for 4 of 5 clients" in caplog.text
    assert "spent for nothing" in caplog.text
    assert strategy.forecast.per_round == 4


def test_delayed_momentum_drops_what_its_next_answer_has_again():
    assert DelayedMomentum.late_answers == "dropped"


def test_releases_that_stand_alone_without_a_sum_over_samples_count_when_they_come():
    policy = {"mechanism": "independent", "release_rule": "paper"}
    strategy = trained(LateGrid(app(kind=NoisySGDClient, **policy), 5, twelve_seconds), 8, kind=NoisySGD, quorum=0.8)
    assert sum(report.overdue for report in strategy.history) >= 1
    assert sum(report.late for report in strategy.history) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: OneShot(clip_norm=1.0, num_clients=4, **o),
        lambda **o: ShuffledAvg(learning_rate=0.1, steps_per_epoch=3, num_clients=4, **o),
        lambda **o: CorrelatedFedAvg(num_clients=4, evaluate_on_clients=True, **o),
        lambda **o: MeanOfFeatures(num_features=3, num_clients=4, **o),
        lambda **o: CorrelatedMomentum(
            learning_rate=0.1, alpha=0.1, num_clients=4, clients_per_round=4, num_rounds=3,
            policy=PrivacyPolicy(1.0, 1, 3, 1.0, trust="trusted-server", release_rule="paper"), **o,
        ),
    ],
    ids=["one shot", "shuffled", "evaluations", "mean of features", "private momentum"],
)  # fmt: skip
def test_where_a_late_answer_is_of_no_use_rounds_wait_for_all(make):
    make()
    for options in ({"quorum": 0.8}, {"over_selection": 1.2, "min_available_nodes": 2}):
        with pytest.raises(ConfigurationError):
            make(**options)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quorum": 0.0}, "0 < quorum <= 1"),
        ({"quorum": 1.1}, "0 < quorum <= 1"),
        ({"quorum": True}, "quorum to be a finite number"),
        ({"over_selection": 0.9}, "over_selection >= 1"),
        ({"over_selection": math.nan}, "over_selection to be a finite number"),
        ({"over_selection": 1e308}, "over_selection >= 1 and <= 2147483647"),
        ({"over_selection": 1.5}, "at most 10 clients, got 1.5 x 8"),
        (
            {"quorum": 0.4, "secure_aggregation": SecureAggregation(min_cohort=5, helpers=2)},
            "at least min_cohort = 5",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Mu2(num_clients=10, clients_per_round=8, learning_rate=0.1, **options)


class LateSecureGrid(Late, SecureGrid):
    """Clients under masks, one of them late, and helpers."""


@pytest.mark.parametrize("floor", [3, 5])
def test_a_late_masked_release_joins_the_round_it_reaches(floor):
    """The model is that of the same releases without masks, and no sum is opened of fewer than min_cohort."""
    options = {"clients_per_round": 6, "quorum": 0.8}
    runs = []
    for masked in (True, False):
        made = secure_training.clients(masked=masked)
        late = LateSecureGrid(made, delay=twelve_seconds) if masked else LateGrid(made.app, 6, twelve_seconds)
        strategy = secure_training.build(
            secure={"min_cohort": floor} if masked else None, allow_exhaustion=True, **options
        )
        strategy.requests.clock = late.clock
        runs.append(secure_training.trained(strategy, late, 10))
    assert secure_training.same(*runs)
    history = runs[0].history
    assert [report.closed for report in history] == [""] * 10
    assert min(report.aggregated for report in history) >= floor
    assert sum(report.overdue for report in history) >= 2


def test_late_contributions_count_once_over_all_asked():
    policy = {"trust": "trusted-server", "max_participations": 30}
    grid = LateGrid(app(**policy), 4, twelve_seconds)
    own = PrivacyPolicy(1.0, 1, 30, 2.0, trust="trusted-server")
    keys = SimulatedKeys(5, "server")
    strategy = trained(grid, 10, kind=TrustedMu2, quorum=0.75, policy=own, num_rounds=10, noise_keys=keys)
    assert sum(report.overdue for report in strategy.history) >= 2
    assert sum(report.malformed for report in strategy.history) == 0
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def unequal():
    """Five clients with 4, 6, 8, 10 and 12 releases."""
    made = simulated_app(Mu2Client, Data(SHAPES), lambda name: normal_samples(name, 4 + 2 * int(name), D))
    return LateGrid(made, 5, lambda name, server_round: FAST)


def test_the_log_says_when_small_clients_leave(caplog):
    strategy = trained(unequal(), 8, quorum=0.6)
    assert strategy.leaving.after == {"0": 4, "1": 6}
    assert [strategy.leaving.left(t) for t in (4, 5, 6, 7, 8)] == [5, 4, 4, 3, 3]
    assert (
        "Clients leave: 2 of 5 before the end of 8 rounds; 4 left from round 5 on, 3 left from round 7" in caplog.text
    )
    assert "First: '0' after round 4 (4 releases), '1' after round 6 (6 releases)." in caplog.text
    assert [report.asked for report in strategy.history] == [5, 5, 5, 5, 4, 4, 3, 3]
    assert sum(report.refusals for report in strategy.history) == 0


def test_a_training_that_too_few_finish_is_refused_beforehand():
    grid = unequal()
    with raises(ConfigurationError, "exhausted", "num_rounds", match="6 rounds, got 8: from round 7 on 3"):
        trained(grid, 8, quorum=0.8)
    assert not grid.sent


def test_others_are_asked_in_the_place_of_those_that_have_left():
    strategy = trained(unequal(), 16, clients_per_round=2, quorum=0.5, sampling="balanced")
    assert {report.asked for report in strategy.history} == {2}
    assert sum(report.refusals for report in strategy.history) == 0
    assert strategy.history[-1].finished == len(strategy.leaving.after)


def test_a_request_that_never_arrived_costs_a_client_no_release():
    remaining = RemainingReleases()
    remaining.read({"a": {"releases": 2, "releases-left": 3}, "b": {"releases": 0}})
    remaining.requested(["a", "b"])
    remaining.requested(["a"])
    assert remaining.left == {"a": 1}
    remaining.received({"a": 3, "b": 1})
    assert remaining.left == {"a": 2}
    remaining.requested(["a", "a"])
    assert remaining.exhausted == {"a"}


def test_how_many_are_asked_and_waited_for():
    config = ParticipationConfig(num_clients=20, clients_per_round=10, quorum=0.8, over_selection=1.2)
    assert (config.asked(20), config.needed(20), config.needed(20, 6)) == (12, 8, 4)
    assert ParticipationConfig(num_clients=10, quorum=0.8).needed(10) == 8, "and not 9 for the sake of floating point"
    assert ParticipationConfig(fraction_train=0.5, over_selection=1.2).asked(100) == 60
    assert not ParticipationConfig(over_selection=1.2).waits_for_all
