"""A server that is killed, and helpers that are down, before, while and after a sum is opened."""

import re

import numpy as np
import pytest
from flwr.app import Array
from murmurfl.privacy import Opener, Sealed, protocol, set_digest
from murmurfl.strategies import (
    CheckpointError,
    HelpersDisagreeError,
    HelperUnavailableError,
    Mu2,
    NodesUnavailableError,
    OpeningError,
    SecureAggregation,
    WrongSumError,
)
from murmurfl.strategies.rounds import loop as rounds

from tests.harness.callbacks import AfterRound
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.secure import (
    HELPERS,
    ROUNDS,
    SHAPES,
    START,
    Clients,
    SecureGrid,
    build,
    clients,
    closed_rounds,
    plain_run,
    refusal,
    same,
    some,
    state_bytes,
    trained,
    trained_in_vain,
)

pytestmark = pytest.mark.usefixtures("no_result_folder")

ROUND = 3
"""In which things go wrong."""


class Killed(BaseException):
    """What a kill -9 is to a test."""


def killed(*_):
    raise Killed


def in_round(grid, kind, helper, act, server_round=ROUND, asked="open"):
    """Have ``act`` in the place of what a helper is handed or answers (``kind`` "asked" or "answers") in one round."""
    before = grid.watch if kind == "asked" else grid.seen

    def hook(what, name, message):
        message = before(what, name, message)
        here = message is not None and not message.has_error() and what == asked and name == helper
        if here and message.content["config"][protocol.OPENING] == str(server_round):
            return act(message)
        return message

    if kind == "asked":
        grid.watch = hook
    else:
        grid.seen = hook


def kill_at_saving(point, monkeypatch):
    """Kill the server when it writes its checkpoint in the round: before or after the file is there."""
    real = rounds.save_checkpoint

    def save(path, settings, state):
        here = state["server_round"] == ROUND - 1 and state["held"] is not None
        last = state["server_round"] == ROUND and state["held"] is None
        if point == "before the round is saved" and last:
            raise Killed
        real(path, settings, state)
        if (point == "after the set is saved" and here) or (point == "after the round is saved" and last):
            raise Killed

    monkeypatch.setattr(rounds, "save_checkpoint", save)


def kill_at_helper(point, grid):
    """Kill the server while helpers are at work in the round."""
    kind = "asked" if point == "before anybody is asked" else "answers"
    helper = HELPERS[1] if point.startswith("after the second") else HELPERS[0]
    in_round(grid, kind, helper, killed, asked="lock" if point.endswith("promised") else "open")


AT_SAVING = ("after the set is saved", "before the round is saved", "after the round is saved")
AT_HELPERS = (
    *("before anybody is asked", "after one has promised", "after the second has promised"),
    *("after one has opened", "after the second has opened"),
)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("point", [*AT_SAVING, *AT_HELPERS])
@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_a_killed_server_goes_on_and_gives_the_same_model_to_the_last_bit(point, lost, tmp_path, monkeypatch):
    made = clients()
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(made, lost=lost, seed=5)
    with monkeypatch.context() as patch:
        if point in AT_SAVING:
            kill_at_saving(point, patch)
        else:
            kill_at_helper(point, grid)
        with pytest.raises(Killed):
            trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.watch = grid.seen = lambda kind, helper, message: message
    resumed = trained(build(secure={}, checkpoint=checkpoint), grid)
    others = clients()
    whole = trained(build(secure={}), SecureGrid(others, lost=lost, seed=5))
    assert same(resumed, whole)
    assert resumed.history == whole.history
    assert resumed.participation == whole.participation
    assert same(resumed, plain_run(lost=lost, seed=5, closed=closed_rounds(resumed)))
    assert resumed.history[ROUND - 1].aggregated >= 3
    for name in resumed.clients.names:
        made_by = [one.client(name).statement("s")["releases"] for one in (made, others)]
        assert made_by[0] == made_by[1], "nobody was asked for a release twice"


@pytest.mark.parametrize("connected", [True, False])
def test_a_resumed_server_never_closes_a_round_whose_set_may_be_open(connected, tmp_path):
    """One helper has opened the set, the server is killed, and the other helper is out of reach when it is back."""
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, "answers", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.seen = lambda kind, helper, reply: reply
    if connected:  # as far as its node goes, and it says hello to whoever asks for the first time
        grid.watch = lambda kind, helper, message: None if (kind, helper) == ("open", HELPERS[1]) else message
    else:
        grid.down = {HELPERS[1]}
    for _ in range(2):
        with pytest.raises(HelperUnavailableError if connected else NodesUnavailableError, match="helper"):
            trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.down, grid.watch = set(), lambda kind, helper, message: message
    resumed = trained(build(secure={}, checkpoint=checkpoint), grid)
    assert not closed_rounds(resumed)
    assert same(resumed, plain_run())


def test_a_helper_that_is_reached_and_then_silent_does_not_close_a_resumed_round(tmp_path):
    """It answers the first greeting of the resumed server, and none after that."""
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, "answers", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    greeted = []

    def silent(kind, helper, message):
        if helper == HELPERS[1]:
            greeted.append(kind)
        return None if helper == HELPERS[1] and len(greeted) > 1 else message

    grid.seen, grid.watch = (lambda kind, helper, reply: reply), silent
    with raises(HelperUnavailableError, "unreachable", match="helper 'helper-1' does not answer"):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.watch = lambda kind, helper, message: message
    assert same(trained(build(secure={}, checkpoint=checkpoint), grid), plain_run())


def test_a_server_killed_before_saving_asks_clients_only(tmp_path, monkeypatch):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    with monkeypatch.context() as patch:
        real = rounds.save_checkpoint

        def save(path, settings, state):
            if state["server_round"] == ROUND - 1 and state["held"] is not None:
                raise Killed
            real(path, settings, state)

        patch.setattr(rounds, "save_checkpoint", save)
        with pytest.raises(Killed):
            trained(build(secure={}, checkpoint=checkpoint), grid)
    assert sum(kind == "open" for kind, _ in grid.asked) == 2 * (ROUND - 1)
    resumed = trained(build(secure={}, checkpoint=checkpoint), grid)
    assert [report.aggregated for report in resumed.history] == [4] * ROUNDS
    assert not closed_rounds(resumed)


def test_a_bug_that_saves_the_set_too_late_is_seen(tmp_path, monkeypatch):
    """The planted bug: a checkpoint that does not hold the set, and a server that is killed once one has opened it."""
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    real = rounds.save_checkpoint
    monkeypatch.setattr(
        rounds,
        "save_checkpoint",
        lambda path, settings, state: None if state["held"] is not None else real(path, settings, state),
    )
    in_round(grid, "answers", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.seen = lambda kind, helper, message: message
    with raises(HelpersDisagreeError, "mismatch", match=r"got 4 of helper 'helper-0' alone \('2', '3', '4', '5'\)"):
        trained(build(secure={}, checkpoint=checkpoint), grid)


@pytest.mark.parametrize("rounds_down", [1, 2])
def test_a_helper_down_before_opening_costs_rounds_only(rounds_down):
    grid = SecureGrid(clients())
    seen = []

    def leave(replies):
        if replies and protocol.METRICS in replies[0].content:
            seen.append(1)
            away = ROUND <= len(seen) < ROUND + rounds_down
            grid.down = {"helper-1"} if away else set()
        return replies

    grid.tamper = leave
    strategy = trained(build(secure={}), grid)
    assert closed_rounds(strategy) == list(range(ROUND, ROUND + rounds_down))
    report = strategy.history[ROUND - 1]
    assert (report.closed, report.unopened, report.aggregated) == ("helper 'helper-1' does not answer", 4, 0)
    assert same(strategy, plain_run(closed=closed_rounds(strategy)))
    assert sum(kind == "open" for kind, _ in grid.asked) == 2 * (ROUNDS - rounds_down), "nobody was asked to open them"


def test_an_absent_helper_ends_a_resumable_run_by_name(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    down = AfterRound(lambda report, _: grid.down.add("helper-1") if report.server_round == 2 else None)
    strategy = build(secure={}, checkpoint=checkpoint, callbacks=[down])
    with raises(
        HelperUnavailableError, "unreachable", match=r"in 3 rounds in a row, the last of them round 5, helper 'helper-1"
    ):
        trained(strategy, grid)
    assert closed_rounds(strategy) == [3, 4]
    grid.down.clear()
    resumed = trained(build(secure={}, checkpoint=checkpoint), grid)
    assert closed_rounds(resumed) == [3, 4], "the set of the last round was kept, and is opened now"
    assert same(resumed, plain_run(closed=[3, 4]))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("when", ["asked", "answers"])
@pytest.mark.parametrize("helper", HELPERS)
def test_a_failing_helper_is_asked_for_the_same_set_again(when, helper):
    grid = SecureGrid(clients())
    failures = iter([None, None if when == "asked" else refusal(helper, protocol.LEDGER_UNUSABLE)])

    def fail(message):
        return next(failures, message)

    in_round(grid, when, helper, fail)
    strategy = trained(build(secure={}), grid)
    assert not closed_rounds(strategy)
    assert same(strategy, plain_run())


@pytest.mark.parametrize("when", ["asked", "answers"])
def test_an_unopened_set_outlives_the_run_it_ends(when, tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, when, HELPERS[1], lambda message: None)
    strategy = build(secure={"patience": 2}, checkpoint=checkpoint)
    with raises(
        HelperUnavailableError, "unreachable", match=r"round 3, asked 2 times, but helper 'helper-1' does not answer"
    ):
        trained(strategy, grid)
    assert len(strategy.history) == 2, "no round begins before that"
    before = len(grid.asked)
    with pytest.raises(HelperUnavailableError):
        trained(build(secure={"patience": 2}, checkpoint=checkpoint), grid)
    assert len(grid.asked) > before
    grid.watch = grid.seen = lambda kind, helper, message: message
    assert same(trained(build(secure={}, checkpoint=checkpoint), grid), plain_run())


def test_a_set_that_all_helpers_promised_and_then_refuse_is_kept(tmp_path):
    """No other could take its place: the run pauses, and is resumed with the very set."""
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    for helper in HELPERS:  # shown a set under a name that is no name, which they refuse by themselves
        in_round(grid, "asked", helper, entry(protocol.OPENING, "?"))
    with raises(HelperUnavailableError, "unreachable", match="answers with opening-refused"):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.watch = lambda kind, helper, message: message
    assert same(trained(build(secure={}, checkpoint=checkpoint), grid), plain_run())


def standing(grid, server_round=ROUND):
    """What became of a round's set at each helper: whether it was opened there, and whether it is void."""
    records = [opener._record for opener in grid.openers.values()]
    name = "s", str(server_round)
    return [(one.set_digest(*name) is not None, bool(one.voids(*name))) for one in records]


def assert_skipped(strategy, rounds=ROUNDS):
    """The round has no part in the model, clients build on it, and the others are as ever."""
    assert len(strategy.history) == rounds
    closed = "a helper did not answer, and it was skipped"
    assert [report.closed for report in strategy.history] == ["", "", closed, *[""] * (rounds - ROUND)]
    assert (strategy.history[ROUND - 1].skipped, strategy.history[ROUND - 1].aggregated) == (4, 0)
    assert not strategy.aggregator.exclusion_policy.left_out, "no client is left out for what a helper did"
    assert np.isfinite(strategy.rule.model(strategy.state)).all()


HALF_OPEN = {
    "it refuses": ("asked", lambda helper: entry(protocol.OPENING, "?"), (False, True)),
    "its answers are lost for good": (
        "answers",
        lambda helper: lambda reply: refusal(helper, protocol.INTERNAL_ERROR),
        (True, False),
    ),
    "its answers are not signed": ("answers", lambda helper: entry(protocol.SIGNATURE, bytes(64)), (True, False)),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("how", HALF_OPEN)
@pytest.mark.parametrize("helper", HELPERS)
def test_a_set_that_one_helper_does_not_answer_costs_its_round_and_no_more(how, helper, saved, tmp_path):
    """Whichever it is: it has opened the set, or declares it void; and the training ends with a model."""
    grid = SecureGrid(clients())
    kind, of, became = HALF_OPEN[how]
    act = of(helper)
    in_round(grid, kind, helper, act)
    checkpoint = tmp_path / "checkpoint.npz" if saved else None
    strategy = build(secure={}, checkpoint=checkpoint)
    if saved:  # and the server is killed when it has seen that
        in_round(grid, "answers", helper, killed, asked="void")
        with pytest.raises(Killed):
            trained(strategy, grid)
        grid.seen = lambda kind, helper, message: message
        grid.watch = lambda kind, helper, message: message
        in_round(grid, kind, helper, act)
        strategy = build(secure={}, checkpoint=checkpoint)
    assert_skipped(trained(strategy, grid))
    place = HELPERS.index(helper)
    assert standing(grid)[place] == became
    assert standing(grid)[1 - place] == (True, False)
    assert standing(grid, ROUND + 1) == [(True, False)] * 2
    assert strategy.skipped_noise == pytest.approx(1.0), "clients mend the noise"


def test_helpers_that_a_hostile_server_had_promise_different_sets_go_on():
    """Both under the round's name. The set of the one that is asked first is opened there, and void at the other."""
    grid = SecureGrid(clients())

    def promised(message):
        opener = grid.openers[SecureGrid.first_helper + 1]
        config = message.content["config"]
        sealed = zip(config[protocol.HEADER], config[protocol.SEALS][::2], config[protocol.SEALS][1::2],
                     config[protocol.SIGNATURE], strict=True)  # fmt: skip
        releases = [Sealed(header, (one, other), signature) for header, one, other, signature in sealed]
        assert opener.view("s", str(ROUND), releases[:3], lock=True).would_open == "locked"
        return message

    in_round(grid, "asked", HELPERS[1], promised, asked="lock")
    strategy = trained(build(secure={}), grid)
    assert_skipped(strategy)
    assert standing(grid) == [(True, False), (False, True)]


def test_a_helper_that_will_neither_open_nor_declare_void_pauses_the_run_and_is_named(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, "answers", HELPERS[1], lambda reply: refusal(HELPERS[1]))
    in_round(grid, "answers", HELPERS[1], lambda reply: refusal(HELPERS[1]), asked="void")
    with raises(HelpersDisagreeError, "mismatch", match="or to declare it void, got neither of helper 'helper-1'"):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    grid.seen = lambda kind, helper, message: message
    assert same(trained(build(secure={}, checkpoint=checkpoint), grid), plain_run()), "the checkpoint held the set"


def test_a_set_that_no_helper_promises_closes_the_round(monkeypatch):
    """Another server had them promise something in between."""
    grid, real = SecureGrid(clients()), Opener.view

    def moved_on(self, session, opening, releases, *, lock=False):
        if lock and opening == str(ROUND):
            return self._view(session, opening, set_digest(session, opening, releases), "no", [])
        return real(self, session, opening, releases, lock=lock)

    monkeypatch.setattr(Opener, "view", moved_on)
    strategy = trained(build(secure={}), grid)
    assert closed_rounds(strategy) == [ROUND]
    assert strategy.history[ROUND - 1].closed.endswith("would not promise to open it")
    assert same(strategy, plain_run(closed=[ROUND])), "and everything is carried over"


def offset(by):
    """A helper's answer with another total, signed all the same: by a helper that lies."""

    def change(grid):
        opener = grid.openers[SecureGrid.first_helper]
        real = opener.open

        def lie(session, opening, releases):
            from dataclasses import replace

            from murmurfl.privacy.sums.opening_rule import _signed

            true = real(session, opening, releases)
            total = true.total + by(true.total.shape)
            signed = _signed(opener.name, session, opening, true.set_digest, total)
            return replace(true, total=total, signature=opener._key.sign(signed))

        opener.open = lie
        return lambda: setattr(opener, "open", real)

    return change


GARBAGE = np.random.Generator(np.random.Philox(key=3))


def garbage(shape):
    return GARBAGE.integers(0, 2**64, size=shape, dtype=np.uint64)


def test_a_helper_that_lies_in_every_sum_pauses_the_run_and_is_named(tmp_path):
    """Once no two clients can be what is wrong: nobody is left out for it, and a resumed run asks the next round."""
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    truth = offset(garbage)(grid)
    strategy = build(clients_per_round=6, secure={}, checkpoint=checkpoint)
    with raises(
        WrongSumError, "mismatch", match=r"more than 2 clients lie, or helper 'helper-0' or helper 'helper-1' does"
    ):
        trained(strategy, grid, rounds=30)
    assert len(strategy.history) == 8, "one more than seven, the most that two clients of six can spoil"
    assert all(report.skipped for report in strategy.history)
    assert (strategy.state.release_sum == 0).all()
    truth()
    resumed = trained(build(clients_per_round=6, secure={}, checkpoint=checkpoint), grid, rounds=10)
    assert [(report.skipped > 0, report.aggregated) for report in resumed.history[8:]] == [(False, 6)] * 2
    assert resumed.ended == ""


def test_the_largest_value_of_a_release_bounds_what_a_sum_can_be():
    """Of a lie that stays within what honest releases could add up to, nobody can know: that is said, and true."""
    plan = clients().client("0").privatizer.plan
    for factor, caught in ((9.0, True), (0.5, False)):
        grid = SecureGrid(clients())
        counts = np.uint64(factor * plan.largest_value / plan.grid.spacing)
        offset(lambda shape, counts=counts: np.full(shape, counts))(grid)
        strategy = build(secure={}, largest_value=plan.largest_value)
        if caught:
            assert trained_in_vain(strategy, grid, rounds=1).history[0].skipped == 4
        else:
            assert not same(trained(strategy, grid, rounds=1), plain_run())
    grid = SecureGrid(clients())
    offset(lambda shape: np.full(shape, np.uint64(1 << 55)))(grid)
    assert trained_in_vain(build(secure={}), grid, rounds=1).history[0].skipped == 4


def changed_total(reply):
    reply.content["arrays"]["total"] = Array(reply.content["arrays"]["total"].numpy() + np.uint64(1))
    return reply


def shorter_total(reply):
    reply.content["arrays"]["total"] = Array(reply.content["arrays"]["total"].numpy()[1:])
    return reply


def entry(key, value):
    def change(reply):
        reply.content["config"][key] = value
        return reply

    return change


def no_arrays(reply):
    del reply.content["arrays"]
    return reply


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_total, "not signed with its key in the roster"),
        (entry(protocol.SIGNATURE, bytes(64)), "not signed with its key in the roster"),
        (entry(protocol.SIGNATURE, 7), "does not understand"),
        (shorter_total, "does not understand"),
        (no_arrays, "does not understand"),
        (entry(protocol.HELPER, HELPERS[1]), "about another set"),
        (entry(protocol.OPENING, "77"), "about another set"),
        (entry(protocol.SET_DIGEST, "0" * 64), "about another set"),
    ],
)
def test_only_what_the_helper_signed_for_this_very_set_is_an_answer(change, said, caplog):
    grid = SecureGrid(clients())
    in_round(grid, "answers", HELPERS[0], change)
    assert_skipped(trained(build(secure={}), grid))
    assert re.search(rf"helper 'helper-0' gives an answer.*{said}", caplog.text)


def test_an_earlier_sets_answer_does_not_pass_for_a_later(caplog):
    grid, kept = SecureGrid(clients()), []

    def replay(kind, helper, reply):
        if kind == "open" and helper == HELPERS[0]:
            kept.append(reply)
            return kept[0]
        return reply

    grid.seen = replay
    strategy = trained(build(secure={}), grid)
    assert [report.aggregated for report in strategy.history] == [4, *[0] * (ROUNDS - 1)]
    assert "about another set" in caplog.text


def test_a_checkpoint_with_a_set_in_it_that_was_damaged_is_refused(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, "asked", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    whole = checkpoint.read_bytes()
    for position in range(0, len(whole), len(whole) // 40):
        checkpoint.write_bytes(whole[:position] + bytes([whole[position] ^ 64]) + whole[position + 1 :])
        try:
            trained(build(secure={}, checkpoint=checkpoint), SecureGrid(clients()), rounds=2)
        except (CheckpointError, OpeningError, NodesUnavailableError):
            continue


@pytest.mark.parametrize("change", [lambda held: held.update(min_cohort=3), lambda held: held.pop("ids")])
def test_a_checkpoint_whose_set_has_other_fields_is_refused(change, tmp_path, monkeypatch):
    checkpoint, grid, real = tmp_path / "checkpoint.npz", SecureGrid(clients()), rounds.save_checkpoint

    def save(path, settings, state):
        if state["held"] is not None:
            change(state["held"])
        real(path, settings, state)

    monkeypatch.setattr(rounds, "save_checkpoint", save)
    in_round(grid, "asked", HELPERS[0], killed)
    with pytest.raises(Killed):
        trained(build(secure={}, checkpoint=checkpoint), grid)
    left = checkpoint.read_bytes()
    with pytest.raises(CheckpointError, match="Expected a checkpoint whose pending set") as refused:
        trained(build(secure={}, checkpoint=checkpoint), SecureGrid(clients()))
    assert refused.value.kind == "other-format"
    assert checkpoint.read_bytes() == left


def test_a_checkpoint_of_other_terms_is_refused_and_patience_is_none_of_them(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    trained(build(secure={}, checkpoint=checkpoint), grid, rounds=2)
    for other in ({"min_cohort": 2}, {"helpers": 3}, {"roster": "0" * 64}):
        with raises(CheckpointError, "mismatch", "secure_aggregation"):
            trained(build(secure=other, checkpoint=checkpoint), grid)
    with raises(CheckpointError, "mismatch", "secure_aggregation"):
        trained(build(checkpoint=checkpoint), grid)
    trained(build(secure={"patience": 9}, checkpoint=checkpoint), grid, rounds=3)


def test_checkpoints_without_secure_aggregation_have_nothing_new_in_them(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(rounds, "save_checkpoint", lambda path, settings, state: written.update(settings | state))
    strategy = build(checkpoint=tmp_path / "checkpoint.npz")
    trained(strategy, NodesGrid(Clients(some, SHAPES, masked=False).app, 6), rounds=1)
    assert not {"secure_aggregation", "held", "opened", "held.total"} & set(written)
    assert list(written["history"][0]) == [
        "server_round",
        "asked",
        "aggregated",
        "lost",
        "late",
        "malformed",
        "refused",
        "samples",
    ]


def test_a_set_is_saved_as_it_is(tmp_path):
    checkpoint, grid = tmp_path / "checkpoint.npz", SecureGrid(clients())
    in_round(grid, "asked", HELPERS[0], killed, server_round=1)
    strategy = build(secure={}, checkpoint=checkpoint)
    with pytest.raises(Killed):
        trained(strategy, grid)
    again = Mu2(num_clients=6, clients_per_round=4, learning_rate=0.05, seed=1, session="s", checkpoint=checkpoint,
                secure_aggregation=SecureAggregation(3))  # fmt: skip
    again._ensure_state(START)
    assert again._resume(result()) == 0
    mine, theirs = vars(strategy.aggregator.pending_cohort), vars(again.aggregator.pending_cohort)
    assert (mine.pop("total") == theirs.pop("total")).all()
    assert mine == theirs
    assert state_bytes(strategy) == state_bytes(again)


def result():
    from flwr.serverapp.strategy import Result

    return Result()
