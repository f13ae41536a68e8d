"""Clients that are off, slow, silent or excluded: trainings go on, with one normaliser and the same guarantee."""

from __future__ import annotations

import math
from functools import partial

import murmurfl.strategies
import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.clients import FullBatchClient, Mu2Client, NoisySGDClient
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.accounting.guarantee import stated_guarantee
from murmurfl.strategies import (
    CheckpointError,
    FullBatch,
    Mu2,
    NodesUnavailableError,
    NoisySGD,
    OnlineFedSGD,
    ReducedTreeMomentum,
    TreeMomentum,
)
from murmurfl.strategies.reduced_tree_momentum import IncompleteRoundError
from murmurfl.strategies.rounds.in_flight import Absences
from murmurfl.strategies.rounds.strategy import ReleaseStrategy

from tests.harness import momentum
from tests.harness import secure as secure_training
from tests.harness.callbacks import AfterRound, Excluding
from tests.harness.clients import normal_samples, simulated_app
from tests.harness.errors import raises
from tests.harness.grid import Late, LateGrid, NodesGrid
from tests.harness.models import Data
from tests.harness.secure import DirectCohort, SecureGrid

pytestmark = pytest.mark.usefixtures("no_result_folder")

SHAPES = [(2, 3), (4,)]
D, CLIENTS, ROUNDS = 10, 5, 10
START = ArrayRecord([np.zeros(shape) for shape in SHAPES])
FAST, TIMEOUT = 3.0, 100.0
FULL = {
    "batch_selection": "full_batch",
    "mechanism": "independent",
    "release_rule": "paper",
    "sample_participations": 60,
}
KINDS = {
    Mu2: (Mu2Client, {}),
    NoisySGD: (NoisySGDClient, {"mechanism": "independent"}),
    FullBatch: (FullBatchClient, FULL),
}


def clients(kind=Mu2, samples=60):
    client, policy = KINDS[kind]
    samples = 4 if kind is FullBatch else samples
    return simulated_app(
        client,
        Data(SHAPES),
        lambda name: normal_samples(name, samples, D) / 4,
        max_participations=60 if kind is FullBatch else samples,
        **policy,
    )


def built(kind=Mu2, **options):
    defaults = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "learning_rate": 0.05, "seed": 1, "session": "s"}
    return kind(**{**defaults, "node_deadline_s": 0.05, **options})


def trained(grid, kind=Mu2, rounds=ROUNDS, strategy=None, timeout=TIMEOUT, **options):
    strategy = built(kind, **options) if strategy is None else strategy
    if isinstance(grid, LateGrid):
        strategy.requests.clock = grid.clock
    strategy.start(grid, START, num_rounds=rounds, timeout=timeout)
    return strategy


class LateSecureGrid(Late, SecureGrid):
    """Masked clients that take their time, and helpers."""


def fast(name, server_round):
    return FAST


def away(grid, name, first, last=math.inf):
    """A client's node is off from the round ``first`` on, and back after ``last``; after a round."""
    node, kept = grid.first_node + int(name), {}

    def after(report, metrics):
        if report.server_round + 1 == first:
            kept[node] = grid.contexts.pop(node)
        elif report.server_round == last:
            grid.contexts.update(kept)

    return AfterRound(after)


def assert_the_sum_is_that_of_the_prefix_sums(strategy, grid):
    sums = grid.prefix_sums()
    expected = sum((sums[name, ack] for name, ack in strategy.acks.items()), np.zeros(D))
    assert np.array_equal(strategy.state.release_sum, expected), "to the last bit"


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_without_a_client_that_stays_off(kind, caplog):
    grid = LateGrid(clients(kind), CLIENTS, fast)
    strategy = trained(grid, kind, callbacks=[away(grid, "0", 3)])
    assert [report.aggregated for report in strategy.history] == [5, 5] + [4] * 8
    assert strategy.clients_per_round == CLIENTS
    assert caplog.text.count("goes on without '0'") == 1, "it is waited for once"
    if kind is Mu2:
        assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)
    if kind is NoisySGD:
        total = sum(values for *_, values in grid.sent)
        assert strategy.state.w == pytest.approx(-0.05 / CLIENTS * total, abs=1e-12), "steps divide by m"


@pytest.mark.parametrize("kind", KINDS)
def test_client_that_comes_back_is_asked_again(kind):
    grid = LateGrid(clients(kind), CLIENTS, lambda name, t: 1.5 * FAST if name == "0" else FAST)
    strategy = trained(grid, kind, callbacks=[away(grid, "0", 3, last=6)])
    assert [report.aggregated for report in strategy.history] == [5, 5, 4, 4, 4, 4, 5, 5, 5, 5]
    assert sum(report.late for report in strategy.history) == 0, "it is a little slower, and nothing of it is wasted"
    if kind is Mu2:
        assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_guarantee_does_not_depend_on_who_is_off():
    grids = [LateGrid(clients(), CLIENTS, fast) for _ in range(2)]
    whole, lacking = trained(grids[0]), trained(grids[1], callbacks=[away(grids[1], "0", 3)])
    said = [stated_guarantee(one._stated_before, CLIENTS, masked=False) for one in (whole, lacking)]
    assert said[0] == said[1]
    for strategy, grid in zip((whole, lacking), grids, strict=True):
        stated = strategy.ask_privacy(grid)
        assert {one["mu-guaranteed"] for one in stated.values()} == {said_mu(whole)}


def said_mu(strategy):
    (mu,) = {one["mu-guaranteed"] for one in strategy._stated_before.values()}
    return mu


@pytest.mark.parametrize("kind", [Mu2, OnlineFedSGD])
def test_masked_training_without_a_client_is_the_plain_one(kind):
    runs, changes = [], {} if kind is Mu2 else secure_training.ONE_POINT
    for masked in (True, False):
        made = secure_training.clients(masked=masked, **changes)
        grid = SecureGrid(made) if masked else NodesGrid(made.app, 6)
        options = {"clients_per_round": 6, "allow_exhaustion": True, "callbacks": [away(grid, "0", 3, last=5)]}
        runs.append(
            secure_training.trained(secure_training.build(kind, secure={} if masked else None, **options), grid, 8)
        )
    assert secure_training.same(*runs)
    assert [report.aggregated for report in runs[0].history] == [6, 6, 5, 5, 5, 6, 6, 6]


def test_masked_training_ends_where_fewer_than_min_cohort_are_left():
    grid = SecureGrid(secure_training.clients())
    strategy = secure_training.build(secure={"min_cohort": 6}, clients_per_round=6, callbacks=[away(grid, "0", 3)])
    with raises(
        NodesUnavailableError,
        "conflict",
        "secure_aggregation",
        match=r"Expected 6 clients within .*got 5 \(missing: 0\)",
    ):
        secure_training.trained(strategy, grid, 8)


# Slow and silent ones.


def test_slow_client_is_heard_late_and_holds_one_round_only():
    grid = LateGrid(clients(), CLIENTS, lambda name, t: 60.0 if name == "0" else FAST)
    strategy = trained(grid, rounds=60, timeout=40.0)
    assert grid.now < 40.0 + 60 * 2 * FAST
    assert strategy.acks["0"] >= 2
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


@pytest.mark.parametrize(
    ("silent", "waits"),
    [(lambda t: True, 1), (lambda t: t % 2 == 0, 6), (lambda t: t % 5 == 0, 6)],
    ids=["always", "every other", "every fifth"],
)
def test_silence_of_a_member_costs_few_timeouts(silent, waits):
    """It answers handshakes and lets rounds wait: about log2 T of T = 50 rounds."""
    grid = LateGrid(clients(), CLIENTS, lambda name, t: math.inf if name == "0" and silent(t) else FAST)
    strategy = trained(grid, rounds=50)
    assert len(strategy.history) == 50
    assert grid.now < waits * TIMEOUT + 50 * 2 * FAST
    assert min(report.aggregated for report in strategy.history) >= 4
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_silence_that_is_forgotten_would_hold_every_round(monkeypatch):
    """The sibling of the test above: it is caught."""
    monkeypatch.setattr(Absences, "missed", lambda self, name: None)
    grid = LateGrid(clients(), CLIENTS, lambda name, t: math.inf if name == "0" else FAST)
    trained(grid, rounds=20)
    assert grid.now >= 20 * TIMEOUT


def test_sums_wait_for_absent_clients_that_they_cannot_do_without():
    """Three answers are lost in the first round: without these clients, who are slower, no sum is opened."""

    def delay(name, server_round):
        slower = int(name) < 3
        return math.inf if slower and server_round == 1 else 4 * FAST if slower else FAST

    grid = LateSecureGrid(secure_training.clients(), delay=delay)
    strategy = secure_training.build(secure={"min_cohort": 5}, clients_per_round=6, allow_exhaustion=True)
    strategy.requests.clock = grid.clock
    strategy.start(grid, START, num_rounds=6, timeout=TIMEOUT)
    assert [report.closed for report in strategy.history] == ["3 of at least 5 releases"] + [""] * 5


def test_client_that_comes_and_goes_is_waited_for_less_and_less(caplog):
    grid = LateGrid(clients(), CLIENTS, fast)
    node, kept = grid.first_node, {}

    def flap(report, metrics):
        if kept:
            grid.contexts.update(kept)
            kept.clear()
        else:
            kept[node] = grid.contexts.pop(node)

    trained(grid, rounds=40, callbacks=[AfterRound(flap)])
    assert 1 <= caplog.text.count("goes on without '0'") <= 6


def test_silent_majority_is_waited_for():
    grid = LateGrid(clients(), CLIENTS, lambda name, t: math.inf if int(name) < 3 else FAST)
    strategy = trained(grid, rounds=4)
    assert grid.now >= 4 * TIMEOUT, "two of five do not rush through a training on their own"
    assert [report.aggregated for report in strategy.history] == [2] * 4


def test_absences_double_the_answers_that_are_owed():
    absences, owed = Absences(), []
    for _ in range(4):
        absences.missed("a")
        answers = 0
        while not absences.waits_for("a"):
            absences.answered("a")
            answers += 1
        owed.append(answers)
    assert owed == [1, 2, 4, 8]
    assert absences.waits_for("b")


# The fewest that are left, and other numbers after a resume.


def test_too_few_connected_end_with_advice_that_works(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", LateGrid(clients(), CLIENTS, fast)

    def most_leave(report, metrics):
        if report.server_round == 3:
            for node in list(grid.contexts)[:3]:
                grid.contexts.pop(node)

    with raises(
        NodesUnavailableError, "unreachable", match=r"Expected 3 clients .*resume with a smaller min-available-nodes"
    ):
        trained(grid, checkpoint=checkpoint, callbacks=[AfterRound(most_leave)])
    strategy = trained(grid, checkpoint=checkpoint, min_available_nodes=2)
    assert [report.aggregated for report in strategy.history] == [5] * 3 + [2] * 7
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_begins_with_all_clients_and_says_how_many_must_stay(caplog):
    caplog.set_level("INFO", "flwr")
    with raises(NodesUnavailableError, "unreachable", match="Nothing was asked of anybody yet"):
        trained(LateGrid(clients(), 4, fast))
    trained(LateGrid(clients(), CLIENTS, fast), rounds=1)
    assert "goes on as long as 3 of 5 are connected" in caplog.text


@pytest.mark.parametrize("masked", [False, True])
def test_resumed_training_takes_another_quorum_and_no_other_normaliser(masked, tmp_path):
    made = secure_training.clients(masked=masked)
    grid = SecureGrid(made) if masked else NodesGrid(made.app, 6)
    secure = {"min_cohort": 3} if masked else None
    options = {"clients_per_round": 6, "allow_exhaustion": True, "checkpoint": tmp_path / "checkpoint.npz"}
    first = secure_training.trained(secure_training.build(secure=secure, **options), grid, 4)
    changed = {"quorum": 0.5, "min_available_nodes": 4, "excluded": ["2"]}
    again = secure_training.trained(secure_training.build(secure=secure, **options, **changed), grid, 8)
    assert [report.aggregated for report in again.history] == [6] * 4 + [5] * 4
    assert again.acks["2"] == first.acks["2"]
    assert again.clients_per_round == 6
    with raises(CheckpointError, "mismatch", "clients_per_round", match=r"clients_per_round \(6, now 5\)"):
        secure_training.build(secure=secure, **{**options, "clients_per_round": 5}).start(grid, START, num_rounds=9)


# Clients that the operator takes out.


def excluding(name, first, last=math.inf):
    return Excluding(lambda rounds: [name] if first <= rounds + 1 <= last else [])


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_client_is_not_asked_until_it_is_taken_back(kind, caplog):
    grid = LateGrid(clients(kind), CLIENTS, fast)
    strategy = trained(grid, strategy=built(kind, callbacks=[excluding("1", 3, last=7)]))
    assert [report.aggregated for report in strategy.history] == [5, 5] + [4] * 5 + [5] * 3
    assert len([name for name, *_ in grid.sent if name == "1"]) == 5
    assert strategy.clients_per_round == CLIENTS
    assert "Excluded from now on: '1'. 4 clients are left." in caplog.text
    assert "Excluded from now on: nobody. 5 clients are left." in caplog.text
    if kind is Mu2:
        assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


@pytest.mark.parametrize("kind", [Mu2, OnlineFedSGD])
def test_engines_agree_on_a_training_with_an_excluded_client(kind):
    changes, runs = {} if kind is Mu2 else secure_training.ONE_POINT, []
    for engine in ("masked", "plain", "cohort"):
        made = secure_training.clients(masked=engine == "masked", **changes)
        grid = {"masked": SecureGrid, "cohort": DirectCohort}.get(engine, lambda made: NodesGrid(made.app, 6))(made)
        secure = {} if engine == "masked" else None
        strategy = secure_training.build(
            kind, secure=secure, clients_per_round=4, allow_exhaustion=True, callbacks=[excluding("3", 3)]
        )
        runs.append(secure_training.trained(strategy, grid, 8))
    assert secure_training.same(runs[0], runs[1])
    assert secure_training.same(runs[1], runs[2])
    assert [report.asked for report in runs[0].history] == [4] * 8, "others are asked in its place"


def test_answer_that_is_under_way_is_not_looked_at_once_its_client_is_excluded():
    grid = LateGrid(clients(), CLIENTS, lambda name, t: 20.0 if name == "1" else FAST)
    strategy = trained(grid, rounds=30, strategy=built(quorum=0.8, callbacks=[excluding("1", 2)]))
    assert "1" not in strategy.acks
    assert_the_sum_is_that_of_the_prefix_sums(strategy, grid)


def test_caps_are_forecast_anew_without_an_excluded_client(caplog):
    caplog.set_level("INFO", "flwr")
    grid = LateGrid(clients(samples=7), CLIENTS, fast)
    strategy = built(clients_per_round=3, sampling="balanced", callbacks=[excluding("1", 3)])
    trained(grid, strategy=strategy)
    assert strategy.leaving.left(1) == 4
    assert strategy.leaving.after, "four have to make what five would have made"
    assert "Clients leave: " in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"excluded": ["nobody"]}, "Expected names of this training's clients to exclude, got 'nobody'"),
        ({"excluded": list("01234")}, "Expected at least 1 clients to be left"),
        ({"excluded": "01"}, "names of clients, got '01'"),
    ],
)
def test_exclusions_that_cannot_be_are_refused_before_anybody_is_asked(options, said):
    grid = LateGrid(clients(), CLIENTS, fast)
    with pytest.raises(ConfigurationError, match=said):
        trained(grid, **options)
    assert not grid.sent


def test_a_wrong_name_in_mid_training_ends_nothing(caplog):
    grid = LateGrid(clients(), CLIENTS, fast)
    strategy = trained(grid, strategy=built(callbacks=[excluding("typo", 3)]))
    assert [report.aggregated for report in strategy.history] == [5] * ROUNDS
    assert caplog.text.count("Nobody else is excluded.") == 1


def test_sums_keep_min_cohort_when_clients_are_excluded():
    strategy = secure_training.build(secure={"min_cohort": 5}, clients_per_round=6, excluded=["0", "1"])
    with raises(ConfigurationError, "out-of-range", match=r"at least 5 clients to be left, .* got 4 after 2"):
        secure_training.trained(strategy, SecureGrid(secure_training.clients()))


# Rules whose proof needs everybody.


def test_rule_that_needs_everybody_says_so_first_and_ends(caplog):
    made = partial(momentum.strategy, ReducedTreeMomentum)

    class Deaf(NodesGrid):
        def tamper(self, replies):
            assert "ReducedTreeMomentum needs every client in every round" in caplog.text, "before the first round"
            return replies[1:]

    with raises(IncompleteRoundError, "missing"):
        made().start(Deaf(momentum.app(), momentum.CLIENTS), momentum.START, num_rounds=momentum.ROUNDS)
    excluding_one = made(callbacks=[Excluding(lambda rounds: ["0"])])
    with raises(ConfigurationError, "out-of-range", match="Expected at least 3 clients to be left"):
        excluding_one.start(NodesGrid(momentum.app(), momentum.CLIENTS), momentum.START, num_rounds=momentum.ROUNDS)


def test_momentum_says_first_that_a_client_which_misses_a_round_is_out(caplog):
    caplog.set_level("INFO", "flwr")
    grid = NodesGrid(momentum.app(), momentum.CLIENTS)
    strategy = momentum.strategy(TreeMomentum, node_deadline_s=0.05, callbacks=[away(grid, "0", 3, last=4)])
    strategy.start(grid, momentum.START, num_rounds=6)
    assert "A client that misses a round is left out of all later ones" in caplog.text
    assert [report.aggregated for report in strategy.history] == [3, 3, 2, 2, 2, 2]


def test_every_rule_says_what_a_missing_answer_does():
    def below(kind):
        return {one for sub in kind.__subclasses__() for one in (sub, *below(sub))}

    for name in murmurfl.strategies.__all__:
        getattr(murmurfl.strategies, name)  # exports are lazy
    refusing = {one for one in below(ReleaseStrategy) if one.late_answers == "refused"}
    needing = {one.__name__ for one in below(ReleaseStrategy) if one.needs_all}
    assert needing == {"ReducedTreeMomentum"}
    assert {"ShuffledAvg", "OneShot", "TreeMomentum"} <= {one.__name__ for one in refusing}
