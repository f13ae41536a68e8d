"""Clients that lie: a training goes on without them, blames nobody, and says what it lost."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.clients import NoisySGDClient
from murmurfl.privacy import ClientKey, SimulatedKeys, make_mechanism, protocol
from murmurfl.privacy.accounting.noise_forecast import lasting_noise
from murmurfl.strategies import Mu2, NodesUnavailableError, NoisySGD, NothingAggregatedError
from murmurfl.strategies.rounds import loop as rounds
from murmurfl.strategies.sums.exclusion_policy import ExclusionPolicy, most_wrong_sums, suspects_of

from tests.harness.clients import stream_noise
from tests.harness.errors import raises
from tests.harness.secure import SEED, SHAPES, Clients, SecureGrid, build, other_header, some, state_bytes, trained

pytestmark = pytest.mark.usefixtures("no_result_folder")

ALONE = {"kind": NoisySGDClient, "mechanism": "independent", "release_rule": "paper"}
CLIENTS, MIN_COHORT, LIARS = 8, 4, ("2", "5")

# Who is left out.


def lies(culprits, clients, room, when):
    """Plays rounds in which ``when(round, asked culprits)`` says whether the sum is wrong; yields who was left out."""
    names = [str(number) for number in range(clients)]
    suspects = ExclusionPolicy(2)
    for number in itertools.count():
        asked = [name for name in names if name not in suspects.left_out]
        yield asked, suspects
        if when(number, [name for name in asked if name in culprits]):
            assert suspects.wrong(asked, names, room), "the true culprits are always a hypothesis that is left"
        else:
            suspects.correct()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("clients", "min_cohort"), [(20, 12), (20, 14), (10, 6), (6, 3), (6, 4)])
def test_so_many_sums_are_wrong_at_most_whoever_lies(clients, min_cohort):
    """Every pair of liars, always lying; nobody is let in again, as for streams."""
    worst = 0
    for pair in itertools.combinations(map(str, range(clients)), 2):
        wrong = 0
        for asked, suspects in lies(pair, clients, clients - min_cohort, lambda _, here: bool(here)):
            suspects.lets_in = False
            assert len(asked) >= min_cohort
            if not set(pair).intersection(asked):
                break
            wrong += 1
        worst = max(worst, wrong)
    assert worst == most_wrong_sums(clients, clients - min_cohort, 2)


@pytest.mark.parametrize("seed", range(20))
def test_liars_who_choose_when_to_lie_gain_nothing_by_it(seed):
    """They behave at random, while others are left out too; and once all is calm everybody but they is asked again."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    pair = tuple(map(str, generator.choice(20, 2, replace=False)))
    wrong, rounds_made, share = 0, 400, generator.uniform(0.05, 1.0)
    said = []
    for asked, _ in itertools.islice(
        lies(pair, 20, 8, lambda _, here: said.append(bool(here) and generator.random() < share) or said[-1]),
        rounds_made,
    ):
        assert len(asked) >= 12
    wrong = sum(said)
    assert wrong <= most_wrong_sums(20, 8, 2) + np.log2(rounds_made) + 1
    assert len(asked) >= 18 or share < 1


def test_nobody_stays_left_out_for_good_and_always_liars_nearly_do():
    times = dict.fromkeys(map(str, range(20)), 0)
    for asked, _ in itertools.islice(lies(("3", "17"), 20, 8, lambda _, here: bool(here)), 200):
        for name in asked:
            times[name] += 1
    assert all(count >= 150 for name, count in times.items() if name not in ("3", "17"))
    assert all(0 < times[name] <= 12 for name in ("3", "17"))


def test_hypotheses_run_out_if_a_helper_lies_whoever_is_left_out():
    names, suspects = [str(number) for number in range(6)], ExclusionPolicy(2)
    wrong = 0
    while suspects.wrong([name for name in names if name not in suspects.left_out], names, 3):
        wrong += 1
    assert wrong == most_wrong_sums(6, 3, 2) == 7
    assert suspects.left_out == ()


def test_nobody_is_left_out_where_min_cohort_has_no_room():
    assert suspects_of(["0", "1", "2"], [["0", "1", "2"]], 2, 0) == ()


def test_rounds_with_too_few_releases_ask_one_more_each_until_nobody_is_left_out():
    names, suspects = [str(number) for number in range(8)], ExclusionPolicy(2)
    assert suspects.wrong(names, names, 4)
    for left in (3, 2, 1, 0, 0):
        suspects.too_few()
        assert len(suspects.left_out) == left


def test_of_many_clients_groups_are_left_out_and_the_culprits_are_found():
    names = [str(number) for number in range(300)]
    suspects, liars, wrong = ExclusionPolicy(2), {"17", "250"}, 0
    while liars.intersection(asked := [name for name in names if name not in suspects.left_out]):
        assert suspects.wrong(asked, names, 100)
        wrong += 1
        assert len(suspects.left_out) <= 100
    assert wrong <= 25


def test_a_schedule_from_a_checkpoint_goes_on():
    ours, names = ExclusionPolicy(2), [str(number) for number in range(20)]
    for number in range(30):
        asked = [name for name in names if name not in ours.left_out]
        if {"3", "9"}.intersection(asked):
            ours.wrong(asked, names, 8)
        else:
            ours.correct()
        again = ExclusionPolicy(2)
        again.restore(ours.plain())
        assert vars(again) == {**vars(ours), "lets_in": True}, number


def test_a_schedule_that_forgets_who_was_in_a_wrong_sum_would_never_end():
    """The planted bug: every wrong sum is taken to be one of all clients, so the same ones are left out for ever."""
    names, suspects, wrong = [str(number) for number in range(20)], ExclusionPolicy(2), 0
    for _ in range(50):
        wrong += bool({"12", "13"}.difference(suspects.left_out))
        suspects.wrong(names, names, 8)
    assert wrong == 50 > most_wrong_sums(20, 8, 2)


# Trainings.


def garbage(masked):
    return replace(masked, counts=GENERATOR.integers(0, 2**64, size=masked.counts.shape, dtype=np.uint64))


GENERATOR = np.random.Generator(np.random.Philox(key=11))


def resealed(masked, name, bad):
    """With seals that do not open for some helpers, signed all the same."""
    seals = tuple(bytes(80) if i in bad else seal for i, seal in enumerate(masked.sealed.seals))
    unsigned = replace(masked.sealed, seals=seals, signature=b"")
    return replace(masked, sealed=replace(unsigned, signature=ClientKey.simulated(SEED, name).sign(unsigned.signed)))


def header(**changes):
    return lambda masked, name: other_header(masked, ClientKey.simulated(SEED, name), **changes)


def flipped(masked, name):
    counts = masked.counts.copy()
    counts[0] ^= np.uint64(1 << 58 + int(name))  # not the same bit: two flips could cancel
    return replace(masked, counts=counts)


ATTACKS = {
    "garbage counts": lambda masked, name: garbage(masked),
    "a flipped bit": flipped,
    "garbage for one helper": lambda masked, name: resealed(masked, name, {1}),
    "garbage for both": lambda masked, name: resealed(masked, name, {0, 1}),
    "a wrong chain": header(ack_id="7" * 32),
    "a huge header": lambda masked, name: replace(masked, sealed=replace(masked.sealed, header=bytes(2**16))),
    "a huge d": header(size=2**32),
    "wants all": header(min_cohort=CLIENTS),
}


def attacked(attack, first, kind=NoisySGD, *, rounds=24, checkpoint=None, data=some, mechanism="cancelling", **options):
    """A training of eight clients, two of which do what ``attack`` does to their releases from a round on."""
    terms = ALONE if kind is NoisySGD else {"mechanism": mechanism}
    made = Clients(data, SHAPES, count=CLIENTS, min_cohort=MIN_COHORT, **terms)
    real = made.mask

    def mask(name, release, session):
        masked = real(name, release, session)
        if name in LIARS and release.release >= first:
            return attack(masked, name)
        return masked

    made.mask = mask
    grid = SecureGrid(made)
    grid.clients = made
    settings = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "allow_exhaustion": True, **options}
    strategy = build(kind, secure={"min_cohort": MIN_COHORT}, checkpoint=checkpoint, **settings)
    return strategy, grid, rounds


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("kind", [NoisySGD, Mu2])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_rounds_at_most_and_the_training_ends(name, kind, first):
    strategy, grid, rounds = attacked(ATTACKS[name], first, kind, rounds=16)
    trained(strategy, grid, rounds)
    skipped = sum(bool(one.skipped) for one in strategy.history)
    assert strategy.ended or len(strategy.history) == 16
    assert strategy.ended or any(one.aggregated >= MIN_COHORT for one in strategy.history[-3:])
    assert skipped <= 16
    assert (skipped > 0) == (name in ("garbage counts", "a flipped bit"))
    assert all(one.aggregated >= MIN_COHORT or one.skipped for one in strategy.history)
    assert set(strategy.acks) >= {str(i) for i in range(CLIENTS)} - set(LIARS)
    assert np.isfinite(strategy.rule.model(strategy.state)).all()


def silent(replies):
    return [one for one in replies if one.metadata.src_node_id - SecureGrid.first_node not in map(int, LIARS)]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("kind", [NoisySGD, Mu2])
@pytest.mark.parametrize("how", ["silence", "lateness"])
def test_silence_and_lateness_cost_no_more_than_their_own_releases(how, kind, first):
    strategy, grid, _ = attacked(lambda masked, name: masked, 1, kind)
    held = []

    def tamper(replies):
        if len(strategy.history) + 1 < first:
            return replies
        late, held[:] = list(held), [one for one in replies if one not in silent(replies)]
        return [*silent(replies), *(late if how == "lateness" else ())]

    grid.tamper = tamper
    trained(strategy, grid, 10)
    assert len(strategy.history) == 10
    assert all(report.aggregated >= CLIENTS - len(LIARS) and not report.skipped for report in strategy.history)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("kind", [NoisySGD, Mu2])
def test_culprits_that_behave_while_others_are_left_out_end_no_training(kind, first):
    strategy, grid, rounds = attacked(
        lambda masked, name: masked if strategy.sampler.left_out else garbage(masked), first, kind, rounds=16
    )
    trained(strategy, grid, rounds)
    assert len(strategy.history) == 16
    skipped = sum(bool(one.skipped) for one in strategy.history)
    assert 0 < skipped <= most_wrong_sums(CLIENTS, CLIENTS - MIN_COHORT, len(LIARS)) + np.log2(rounds) + 1
    assert strategy.skipped_noise == pytest.approx(1.0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", [9, 10, 11])
def test_silence_lateness_and_all_attacks_at_once(seed, monkeypatch):
    """Also where those who are asked, while suspects are left out, send fewer releases than a sum needs."""
    monkeypatch.setitem(globals(), "GENERATOR", np.random.Generator(np.random.Philox(key=seed)))
    kinds = list(ATTACKS.values())

    def any_of(masked, name):
        return kinds[GENERATOR.integers(len(kinds))](masked, name)

    strategy, grid, rounds = attacked(any_of, 1, rounds=30)
    held = []

    def tamper(replies):
        late, held[:] = list(held), [one for one in replies if one not in silent(replies)]
        chance = GENERATOR.random()
        return silent(replies) if chance < 0.2 else [*silent(replies), *late] if chance < 0.4 else replies

    grid.tamper = tamper
    trained(strategy, grid, rounds)
    assert strategy.ended or len(strategy.history) == 30
    assert sum(report.aggregated >= MIN_COHORT for report in strategy.history) >= 10


@pytest.mark.parametrize("gone", [4, 5])
def test_clients_that_leave_for_good_do_not_end_a_training_that_has_enough_without_them(gone, caplog, tmp_path):
    strategy, grid, _ = attacked(lambda masked, name: masked, 1, checkpoint=tmp_path / "checkpoint")
    here = grid.get_node_ids
    waits = []
    strategy.clients.sleep = waits.append

    def fewer():
        away = range(grid.first_node, grid.first_node + gone) if len(strategy.history) in range(2, 6) else ()
        return [node for node in here() if node not in away]

    grid.get_node_ids = fewer
    if gone > CLIENTS - MIN_COHORT:
        with raises(NodesUnavailableError, "conflict", "secure_aggregation", match="missing: 0, 1, 2, 3, 4"):
            trained(strategy, grid, 8)
        return
    trained(strategy, grid, 4)
    before = strategy.history
    options = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "allow_exhaustion": True}
    strategy = build(NoisySGD, secure={"min_cohort": MIN_COHORT}, checkpoint=tmp_path / "checkpoint", **options)
    assert caplog.text.count("4 of 8 clients are connected; the training goes on without") == 1
    caplog.clear()
    trained(strategy, grid, 8)
    assert strategy.history[:4] == before
    assert [report.aggregated for report in strategy.history] == [8, 8, 4, 4, 4, 4, 8, 8]
    assert [report.lost for report in strategy.history] == [0, 0, 4, 4, 4, 4, 0, 0]
    assert caplog.text.count("4 of 8 clients are connected; the training goes on without") == 1


def test_a_wrong_sum_changes_nothing_but_what_it_says(tmp_path):
    """State, query points and weights of the round after are those of the one that was skipped."""
    points, entries = [], []
    strategy, grid, _ = attacked(ATTACKS["garbage counts"], 3, Mu2)
    real = strategy._plan_round

    def watched(server_round, nodes):
        request = real(server_round, nodes)
        points.append([point.tobytes() for point in request.points])
        entries.append(request.entries)
        return request

    strategy._plan_round = watched
    trained(strategy, grid, rounds=4)
    assert [bool(report.skipped) for report in strategy.history][:3] == [False, False, True]
    assert points[2] == points[3]
    assert (entries[2].get("weighed-as"), entries[3].get("weighed-as")) == (None, 3)
    assert all(strategy.acks[name] >= 3 for name in strategy.acks), "helpers have recorded what was opened"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", [Mu2, NoisySGD])
def test_a_server_killed_after_any_round_leaves_out_whom_it_left_out(kind, tmp_path, monkeypatch):
    def made(checkpoint):
        counts = np.random.Generator(np.random.Philox(key=7))

        def attack(masked, name):
            return replace(masked, counts=counts.integers(0, 2**64, size=masked.counts.shape, dtype=np.uint64))

        return attacked(attack, 2, kind, checkpoint=checkpoint)

    whole, grid, _ = made(None)
    trained(whole, grid, 10)
    strategy, grid, _ = made(tmp_path / "checkpoint")
    real, saves = rounds.save_checkpoint, []

    class Killed(BaseException):
        pass

    def save(path, settings, state):
        real(path, settings, state)
        saves.append(1)
        if len(saves) % 3 == 0:
            raise Killed

    monkeypatch.setattr(rounds, "save_checkpoint", save)
    for _ in range(40):
        try:
            trained(strategy, grid, 10)
            break
        except Killed:
            options = {"num_clients": CLIENTS, "clients_per_round": CLIENTS, "allow_exhaustion": True}
            strategy = build(kind, secure={"min_cohort": MIN_COHORT}, checkpoint=tmp_path / "checkpoint", **options)
    assert state_bytes(strategy) == state_bytes(whole)
    assert strategy.history == whole.history
    assert strategy.ended == whole.ended


def sometimes():
    """Two rounds of three without, one with garbage."""
    turn = itertools.count()
    return lambda masked, name: garbage(masked) if (next(turn) // 2) % 3 == 2 else masked


@pytest.mark.parametrize("mechanism", ["cancelling", "decay"])
def test_streams_whose_clients_mend_have_the_noise_of_one_prefix_whatever_was_skipped(mechanism):
    """Clients without data: all that is in the sum is the noise of each one's last release that was used."""
    strategy, grid, _ = attacked(sometimes(), 1, Mu2, data=lambda name: np.zeros((30, 10)), mechanism=mechanism)
    trained(strategy, grid, 24)
    assert len(strategy.history) == 24
    assert sum(bool(one.skipped) for one in strategy.history) > 3
    assert strategy.skipped_noise == pytest.approx(1.0)
    total = 0
    for name, made in ((name, grid.clients.client(name).privatizer) for name in strategy.clients.names):
        last, keys = strategy.aggregator.noise.skipped.get(name, strategy.acks[name]), SimulatedKeys(SEED, name)
        nonces = [keys.nonce("s", k) for k in range(1, last + 1)]
        total = total + stream_noise(made.plan, 10, keys.secret_key, nonces)
    spacing = made.plan.grid.spacing
    assert np.array_equal(np.rint(strategy.state.release_sum / spacing).astype(np.int64), total)


def test_liars_that_say_they_cannot_mend_keep_nobody_left_out():
    strategy, grid, _ = attacked(sometimes(), 1, Mu2)
    real = grid.handle

    def handle(message, identifier):
        reply = real(message, identifier)
        if str(message.metadata.dst_node_id - grid.first_node) in LIARS and protocol.METRICS in reply.content:
            reply.content[protocol.METRICS].pop(protocol.RECOVERED, None)
        return reply

    grid.handle = handle
    trained(strategy, grid, 24)
    assert strategy.aggregator.exclusion_policy.lets_in
    assert set(strategy.aggregator.noise.lost) > set(LIARS)
    assert all(bool(lost) == (name in LIARS) for name, lost in strategy.aggregator.noise.lost.items())


def test_streams_end_with_their_model_once_wrong_sums_left_too_much_noise():
    """Clients whose noise would tell more if it were mended."""
    strategy, grid, _ = attacked(sometimes(), 1, Mu2, mechanism="sqrt_toeplitz")
    strategy.aggregator.option = replace(strategy.aggregator.option, max_noise=1.2)
    trained(strategy, grid, 24)
    assert len(strategy.history) < 24
    assert "max_noise is 1.2" in strategy.ended
    assert strategy.skipped_noise > 1.2
    again = build(Mu2, secure={"min_cohort": MIN_COHORT})
    assert again.skipped_noise is None


def test_the_noise_that_is_said_is_the_noise_that_is_there():
    """The same releases, some of them left out, from the rows of B Z themselves."""
    for name in ("cancelling", "decay", "independent", "sqrt_toeplitz"):
        mechanism = make_mechanism(name, 12)
        rows = mechanism.decoder(12)
        increments = np.diff(np.vstack([np.zeros_like(rows[:1]), rows]), axis=0)
        used = np.array([1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
        found = used @ increments
        said = lasting_noise(mechanism, [(12, [(2, 4), (7, 8)])] * 3)
        assert said == pytest.approx(found @ found / (rows[-1] @ rows[-1]))


def test_most_skipped_ends_a_training_that_nothing_helps():
    strategy, grid, _ = attacked(ATTACKS["garbage counts"], 1)
    strategy.aggregator.option = replace(strategy.aggregator.option, max_failed_aggregations=2)
    with raises(NothingAggregatedError, "missing", match="its sum is wrong"):
        trained(strategy, grid, rounds=24)
    assert len(strategy.history) == 2
    assert strategy.ended == "2 sums were skipped, as many as max_failed_aggregations allows"
