"""Trainings under masks: the model is that of the same releases without masks, to the last bit, whatever gets lost."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from murmurfl.clients import NoisySGDClient
from murmurfl.privacy import MECHANISMS, ConfigurationError, PrivacyPolicy, SimulatedKeys, SumAssumption
from murmurfl.strategies import (
    CorrelatedFedAvg,
    DelayedMomentum,
    HelperUnavailableError,
    Mu2,
    NodesUnavailableError,
    NoisySGD,
    OnlineFedSGD,
    SecureAggregation,
    ShuffledAvg,
    TrustedMu2,
)

from tests.harness.errors import raises
from tests.harness.grid import NodesGrid, reply_is_lost
from tests.harness.secure import (
    HELPERS,
    ONE_POINT,
    ROUNDS,
    START,
    DirectCohort,
    SecureGrid,
    build,
    clients,
    closed_rounds,
    plain_run,
    same,
    trained,
    trained_in_vain,
)

pytestmark = pytest.mark.usefixtures("no_result_folder")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("mechanism", "lost"), [*((one, 0.2) for one in MECHANISMS), ("blt", 0.0)])
def test_masks_do_not_change_the_models_bits(mechanism, lost):
    changes = {**ONE_POINT, "mechanism": mechanism}
    strategy = trained(build(OnlineFedSGD, secure={}), SecureGrid(clients(**changes), lost=lost))
    assert same(strategy, plain_run(OnlineFedSGD, lost=lost, closed=closed_rounds(strategy), **changes))
    assert np.linalg.norm(strategy.state.x) > 0
    assert sum(report.lost for report in strategy.history) > 0 or not lost


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Mu2, {}),
        (Mu2, {"different": {str(i): {"min_cohort": 2 + i % 3} for i in range(6)}}),
        (NoisySGD, {"kind": NoisySGDClient, "mechanism": "independent"}),
        (NoisySGD, {"kind": NoisySGDClient, "mechanism": "independent", "release_rule": "paper"}),
        (CorrelatedFedAvg, {}),
    ],
)
def test_every_strategy_makes_the_same_steps_of_masked_sums(kind, changes):
    """Also where clients insist on different cohorts, and where releases are built on nothing."""
    strategy = trained(build(kind, secure={}), SecureGrid(clients(**as_asked(kind, changes)), lost=0.1))
    changes = as_asked(kind, changes)
    assert same(strategy, plain_run(kind, lost=0.1, closed=closed_rounds(strategy), **changes))
    assert sum(report.aggregated for report in strategy.history) >= 9


def as_asked(kind, changes):
    """Federated averaging sends one point, so its clients here are online learning's."""
    return {**ONE_POINT, **changes} if kind is CorrelatedFedAvg else changes


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_clients_that_are_asked_without_messages_give_the_same_model(lost):
    """The cohort engine leaves the masks out; it closes the same rounds."""
    strategy = trained(build(secure={}), SecureGrid(clients(), lost=lost))
    direct = DirectCohort(clients(), lost=lambda server_round, name: reply_is_lost(lost, 2, server_round, name))
    cohort = trained(build(secure={}), direct)
    assert same(strategy, cohort)
    assert strategy.history == cohort.history
    assert strategy.participation == cohort.participation
    assert any(report.closed for report in cohort.history) == (lost > 0)


def late(held):
    """Replies of the first client that come a round late, beside the next ones."""

    def tamper(replies):
        before, held[:] = list(held), replies[:1]
        return [*replies[1:], *before]

    return tamper


def twice(replies):
    return [*replies, *replies]


@pytest.mark.parametrize("delay", [True, False])
def test_late_originals_and_duplicates_count_once_under_masks_as_without(delay):
    runs = []
    for masked in (True, False):
        made = clients(masked=masked)
        grid = SecureGrid(made) if masked else NodesGrid(made.app, 6)
        grid.tamper = late([]) if delay else twice
        runs.append(trained(build(clients_per_round=6, secure={} if masked else None), grid))
    assert same(*runs)
    assert runs[0].history == runs[1].history
    assert sum(report.late for report in runs[0].history) > 0 or delay


def test_a_round_with_too_few_releases_is_closed_and_carried_over():
    grid = SecureGrid(clients())
    grid.tamper = lambda replies: replies[:2] if grid.rounds.append(1) or len(grid.rounds) in (2, 3) else replies
    grid.rounds = []
    strategy = trained(build(clients_per_round=6, secure={}), grid)
    closed = [report for report in strategy.history if report.closed]
    assert [report.server_round for report in closed] == [2, 3]
    assert {report.closed for report in closed} == {"2 of at least 3 releases"}
    assert [(report.aggregated, report.unopened, report.lost) for report in closed] == [(0, 2, 4)] * 2
    assert closed[0].metrics["unopened"] == 2
    assert len([one for one in grid.asked if one[0] == "open"]) == 2 * (ROUNDS - 2), "nobody was asked to open them"
    # Nothing of them is missing in the end: the sum is that of a training in which nothing was lost.
    whole = trained(build(clients_per_round=6), NodesGrid(clients(masked=False).app, 6))
    assert (strategy.state.release_sum == whole.state.release_sum).all()


def test_the_most_careful_client_decides_how_many_there_must_be():
    grid = SecureGrid(clients(different={"0": {"min_cohort": 5}}))
    strategy = trained(build(clients_per_round=6, secure={}), grid, rounds=2)
    assert [report.closed for report in strategy.history] == ["", ""]
    grid = SecureGrid(clients(min_cohort=5))
    grid.tamper = lambda replies: [one for one in replies if one.metadata.src_node_id < grid.first_node + 4]
    strategy = trained_in_vain(build(clients_per_round=6, secure={}), grid, rounds=2)
    assert {report.closed for report in strategy.history} == {"4 of at least 5 releases"}
    assert not [one for one in grid.asked if one[0] == "open"]


def test_server_opens_no_sum_below_its_own_number():
    grid = SecureGrid(clients(min_cohort=3))
    grid.tamper = lambda replies: [one for one in replies if one.metadata.src_node_id < grid.first_node + 4]
    strategy = trained_in_vain(build(clients_per_round=6, secure={"min_cohort": 5}), grid, rounds=2)
    assert {report.closed for report in strategy.history} == {"4 of at least 5 releases"}
    assert not [one for one in grid.asked if one[0] == "open"]


@pytest.mark.parametrize("wanted", [{"0": 5}, {"0": 6, "1": 5}, {"0": 6, "1": 6}])
def test_clients_that_want_more_releases_than_came_are_left_out_and_not_the_round(wanted, caplog):
    """Theirs are carried over: once all answer, the sum is that of a training in which nothing was lost."""
    made = clients(different={name: {"min_cohort": most} for name, most in wanted.items()})
    grid = SecureGrid(made)
    grid.rounds = []
    grid.tamper = lambda replies: replies[:-1] if grid.rounds.append(1) or len(grid.rounds) in (2, 3) else replies
    strategy = trained(build(clients_per_round=6, secure={}), grid)
    rest = 5 if wanted == {"0": 5} else 5 - len(wanted)
    assert [report.aggregated for report in strategy.history] == [6, rest, rest, 6, 6, 6]
    assert [report.unopened for report in strategy.history] == [0, 5 - rest, 5 - rest, 0, 0, 0]
    assert [report.samples for report in strategy.history] == [6, rest, rest, 6, 6, 6]
    assert not closed_rounds(strategy)
    assert ("it wants more releases in a sum than came" in caplog.text) == (rest < 5)
    whole = trained(build(clients_per_round=6), NodesGrid(clients(masked=False).app, 6))
    assert (strategy.state.release_sum == whole.state.release_sum).all()


def test_nobody_is_acknowledged_before_the_sum_is_open():
    grid, strategy = SecureGrid(clients()), build(clients_per_round=6, secure={})
    seen = []
    grid.watch = lambda kind, helper, message: seen.append(dict(strategy.acks)) if kind == "open" else message
    with pytest.raises(HelperUnavailableError):
        trained(strategy, grid)
    assert seen
    assert not any(seen)
    assert strategy.acks == {}


def test_configure_and_aggregate_by_hand_open_sums_as_well():
    grid, strategy = SecureGrid(clients()), build(secure={})
    for server_round in (1, 2, 3):
        messages = strategy.configure_train(server_round, START, ConfigRecord(), grid)
        arrays, metrics = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        assert metrics["aggregated"] == 4
    plain = build()
    plain.start(NodesGrid(clients(masked=False).app, 6), START, num_rounds=3)
    assert same(strategy, plain)
    assert (arrays["0"].numpy().ravel() == plain.state.x[:6]).all()


def test_helpers_are_not_clients():
    """Not to a strategy that knows of them, and not to one that does not."""
    for strategy in (build(secure={}), build()):
        masked = strategy.secure_aggregation is not None
        grid = SecureGrid(clients(masked=masked))
        trained(strategy, grid, rounds=2)
        assert strategy.clients.names == [str(i) for i in range(6)]
        assert sorted(strategy.clients.helpers()) == list(HELPERS)
        assert sorted(strategy.ask_privacy(grid)) == [str(i) for i in range(6)]


def test_a_missing_helper_is_waited_for_and_named_as_such():
    grid = SecureGrid(clients())
    grid.down = {"helper-1"}
    with raises(NodesUnavailableError, "unreachable", match=r"Expected 2 helpers within 0\.05 s, got 1 \('helper-0'\)"):
        trained(build(secure={}), grid)
    strategy = build(secure={}, node_deadline_s=30.0)
    strategy.clients.sleep = lambda seconds: grid.down.clear()
    trained(strategy, grid, rounds=2)
    assert [report.aggregated for report in strategy.history] == [4, 4]


def test_nobody_waits_for_more_helpers_than_the_roster_has():
    strategy = build(secure={"helpers": 3}, node_deadline_s=60.0)
    strategy.clients.sleep = lambda seconds: pytest.fail("waited")
    with raises(ConfigurationError, "mismatch", "helpers", match="3 helpers, got 'helper-0' with one of 2"):
        trained(strategy, SecureGrid(clients()))


def test_a_real_node_may_not_be_helper_and_client():
    class Both(SecureGrid):
        def handle(self, message, identifier):
            reply = super().handle(message, identifier)
            if message.metadata.dst_node_id == self.first_helper and reply is not None:
                reply.content["config"]["clients"] = "7"
            return reply

    with raises(NodesUnavailableError, "unreachable", match="1 answered with more names than one"):
        trained(build(secure={}), Both(clients()))
    strategy = build(secure={})
    trained(strategy, Both(clients()), rounds=1, simulated=True)
    assert strategy.history[0].aggregated == 4


class Hosted(SecureGrid):
    """Both helpers on one node, as a simulation may have it, which is never asked two things at once."""

    def __init__(self, clients):
        super().__init__(clients)
        self.inside = list(self.openers.values())
        del self.openers[self.first_helper + 1]
        self.waiting = 0

    def handle(self, message, identifier):
        if message.metadata.dst_node_id != self.first_helper:
            return super().handle(message, identifier)
        config = message.content["config"]
        helper = config.get("helper")
        self.openers[self.first_helper] = next((one for one in self.inside if one.name == helper), self.inside[0])
        reply = super().handle(message, identifier)
        if "helpers" in reply.content["config"]:
            reply.content["config"]["helpers"] = [one.name for one in self.inside]
            reply.content["config"]["clients"] = []
        return reply

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        assert len(set(nodes)) == len(nodes)
        return super().send_and_receive(messages, timeout=timeout)


def test_in_a_simulation_helpers_may_share_a_node():
    strategy = build(secure={})
    trained(strategy, Hosted(clients()), simulated=True)
    assert same(strategy, plain_run())


def test_impossible_options_are_refused():
    for wrong in (
        {"min_cohort": 0},
        {"min_cohort": True},
        {"min_cohort": 3, "helpers": 0},
        {"min_cohort": 3, "helpers": 17},
        {"min_cohort": 2**11 + 1},
    ):
        with pytest.raises(ConfigurationError, match=r"Expected (min_cohort|helpers) to be an integer >= 1"):
            SecureAggregation(**wrong)
    with raises(ConfigurationError, "out-of-range", "patience"):
        SecureAggregation(3, patience=0)
    with raises(ConfigurationError, "malformed", "roster", match="Expected roster to be a digest of 64"):
        SecureAggregation(3, roster="abc")
    with raises(ConfigurationError, "wrong-type", "secure_aggregation"):
        Mu2(num_clients=4, clients_per_round=4, learning_rate=0.1, secure_aggregation=3)
    with raises(ConfigurationError, "out-of-range", "min_cohort", match="4, got 5"):
        build(secure={"min_cohort": 5})


def test_strategies_that_need_more_than_sums_refuse_it():
    secure = SecureAggregation(2)
    policy = PrivacyPolicy(1.0, 1, 30, 2.0, trust="trusted-server")
    common = {"num_clients": 4, "clients_per_round": 4, "learning_rate": 0.1, "secure_aggregation": secure}
    for make in (
        lambda: TrustedMu2(**common, policy=policy, num_rounds=3, noise_keys=SimulatedKeys(1, "server")),
        lambda: DelayedMomentum(**common),
        lambda: ShuffledAvg(**common, steps_per_epoch=1),
    ):
        with raises(ConfigurationError, "conflict", "secure_aggregation"):
            make()


def test_releases_without_masks_are_malformed_and_both_sides_are_told_what_to_do(caplog):
    strategy = trained_in_vain(build(secure={}), SecureGrid(clients(masked=False)), rounds=1)
    assert (strategy.history[0].malformed, strategy.history[0].aggregated) == (4, 0)
    assert strategy.history[0].closed == "0 of at least 3 releases"
    plain = trained_in_vain(build(), SecureGrid(clients()), rounds=1)
    assert plain.history[0].malformed == 4, "nor can masked ones be added up as numbers"
    assert "4 replies without masks" in caplog.text
    assert "set trust = 'secure-aggregation'" in caplog.text
    assert "4 replies under masks" in caplog.text
    assert "secure_aggregation=SecureAggregation(...)" in caplog.text


@pytest.mark.parametrize("secure", [None, {}])
def test_nothing_is_said_of_masks_where_server_and_clients_agree(secure, caplog):
    trained(build(secure=secure), SecureGrid(clients(masked=secure is not None)), rounds=1)
    assert not [one for one in caplog.records if one.levelname == "WARNING" and "masks" in one.message]


class Suspicious(Mu2):
    """Somebody's strategy that would drop what looks unlike the others."""

    def check_reply(self, reply):
        return float(np.linalg.norm(reply.values)) < 1e9


@pytest.mark.parametrize("grid", [lambda: DirectCohort(clients()), lambda: SecureGrid(clients())])
def test_no_strategy_looks_at_single_releases_of_sums_and_in_no_simulation(grid):
    """Without masks it could, in this process, and show an accuracy that no real run can have."""
    with raises(ConfigurationError, "mismatch", match="only sums can be seen"):
        trained(build(Suspicious, secure={}), grid())
    assert trained(
        build(Suspicious), DirectCohort(clients(masked=False, trust="untrusted-server", sums=SumAssumption(1, 1)))
    ).acks
