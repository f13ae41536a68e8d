"""Poisson batches under a trusted server: draws of clients, divisors of the server, attacks with a strange row.

Statistical tests state how often they fail by chance, for another seed than theirs.
"""

import math
from functools import cache

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.clients import NoisySGDClient
from murmurfl.privacy import (
    ConfigurationError,
    PrivacyPolicy,
    Privatizer,
    SimulatedKeys,
    SystemKeys,
    poisson_delta,
    protocol,
    row_bytes,
)
from murmurfl.privacy.release.known_samples import sampled, sampled_owners
from murmurfl.strategies import (
    CorrelatedMomentum,
    ReducedTreeMomentum,
    Reply,
    TreeMomentum,
    TrustedFullBatch,
    TrustedMu2,
)
from murmurfl.strategies.aggregation.noisy import is_well_formed
from scipy.stats import binom, chisquare

from tests.harness.errors import raises
from tests.privacy.clients import DurableLedger

pytestmark = pytest.mark.usefixtures("quick_disk")

RATE, ROUNDS, D = 0.2, 12, 3
KEY, NONCE = b"k" * 32, b"n" * 16
FIELDS = {
    "clip_norm": 1.0,
    "batch_size": 1,
    "max_participations": ROUNDS,
    "mu": 3.0,
    "mechanism": "independent",
    "release_rule": "paper",
    "trust": "trusted-server",
    "batch_selection": "poisson",
    "sampling_rate": RATE,
}
ROWS = np.random.Generator(np.random.Philox(key=5)).normal(size=(400, D))


def policy(**changes):
    return PrivacyPolicy(**{**FIELDS, **changes})


class Constant:
    """Gradients that are the samples themselves, wherever they are taken: every round draws from one law."""

    def __init__(self, size):
        self.shapes = [(size,)]

    def __call__(self, parameters, samples):
        return np.asarray(samples)


def client(rows=ROWS, keys=None, name="0", ledger=None, **changes):
    keys = keys or SimulatedKeys(1, name)
    rows = np.asarray(rows)
    return NoisySGDClient(Constant(rows.shape[1]), rows, policy(**changes), ledger or DurableLedger(), keys, name=name)


def sums(subject, rounds=ROUNDS, session="s"):
    """What a client's releases are: sums without noise."""
    rows = subject.samples
    made = [subject.privatizer.release(session, 0, lambda part: rows[part]) for _ in range(rounds)]
    return np.array([release.values for release in made])


class Direct:
    """Clients that answer a server in this process, each round; ``absent`` says which do not, by round."""

    def __init__(self, clients, absent=()):
        self.clients, self.absent = {one.name: one for one in clients}, set(absent)
        self.models = []
        """w_1, w_2, ..: what the server publishes."""

    def names(self):
        return list(self.clients)

    def answer(self, request):
        self.models.append(request.points[0].copy())
        for name, ack in request.acks.items():
            if (request.server_round, name) not in self.absent:
                one = self.clients[name]
                rows = one.samples
                made = one.privatizer.release(request.session, ack, lambda part, rows=rows: rows[part])
                entries = {**one.public_entries("gradients"), protocol.NUM_EXAMPLES: made.samples}
                yield Reply(name, made.release, made.ack, made, entries)

    def statements(self, session):
        return {}


def strategy(rounds=ROUNDS, clients=1, **changes):
    options = {
        "num_clients": clients,
        "clients_per_round": clients,
        "learning_rate": 1.0,
        "alpha": 1.0,
        "normalised": False,
        "policy": policy(max_participations=rounds),
        "num_rounds": rounds,
        "noise_keys": SimulatedKeys(5, "server"),
    }
    return CorrelatedMomentum(**{**options, **changes})


# What clients draw.


def test_each_sample_is_in_each_batch_with_the_same_probability_independently():
    """Fails for one key in 10^4, each of the three."""
    drawn = np.array([sampled(KEY, bytes([k]) * 16, 500, RATE) for k in range(100)])
    assert set(np.unique(drawn)) == {0.0, 1.0}
    p = binom.cdf(drawn.sum(), drawn.size, RATE)
    assert 5e-5 < p < 1 - 5e-5
    for pairs in (2 * drawn[:, ::2] + drawn[:, 1::2], 2 * drawn[::2] + drawn[1::2]):  # of samples, and of rounds
        expected = np.array([(1 - RATE) ** 2, RATE * (1 - RATE), RATE * (1 - RATE), RATE**2]) * pairs.size
        assert chisquare(np.bincount(pairs.astype(int).ravel(), minlength=4), expected).pvalue > 1e-4


def test_how_many_samples_a_batch_holds_is_left_to_chance():
    """Batches of a fixed size would have variance 0; fails for one key in 10^4."""
    sizes = np.array([sampled(KEY, k.to_bytes(16, "big"), 100, RATE).sum() for k in range(2000)])
    ratio = sizes.var() / (100 * RATE * (1 - RATE))
    assert abs(ratio - 1) < 4 * math.sqrt(2 / 2000)


def test_a_batch_depends_on_key_nonce_and_row_only():
    batch = sampled(KEY, NONCE, 50, RATE)
    assert (sampled(KEY, NONCE, 80, RATE)[:50] == batch).all()
    assert (sampled(KEY, b"m" * 16, 50, RATE) != batch).any()
    assert (sampled(b"j" * 32, NONCE, 50, RATE) != batch).any()
    assert sampled(KEY, NONCE, 50, 1.0).all()
    with raises(ConfigurationError, "wrong-shape", "secret_key"):
        sampled(KEY, b"", 50, RATE)


def test_an_owner_is_in_a_batch_whoever_else_is_there():
    marks = [bytes([i]) * 8 for i in range(200)]
    batch = sampled_owners(KEY, NONCE, marks, RATE)
    assert (sampled_owners(KEY, NONCE, marks[50:], RATE) == batch[50:]).all()
    assert 0 < batch.sum() < 200


@pytest.mark.parametrize("keys", [SimulatedKeys(1, "m"), SystemKeys(KEY)], ids=["simulated", "real"])
def test_no_two_rounds_have_one_batch(keys):
    made = sums(client(np.eye(30), keys, sampling_rate=0.5))
    batches = {row.round(6).tobytes() for row in made}
    assert len(batches) == ROUNDS
    assert set(np.unique(made.round(6))) == {0.0, 1.0}


def test_a_real_client_draws_anew_where_it_lost_its_ledger():
    """A batch from key, session and release alone would be drawn again, and the sums of two rounds would be of one."""
    first, second = (sums(client(np.eye(30), SystemKeys(KEY), sampling_rate=0.5), 1) for _ in range(2))
    assert (first != second).any()


def test_a_release_is_the_sum_of_the_drawn_rows_and_counts_all_samples():
    keys, rows = SimulatedKeys(1, "0"), ROWS / np.maximum(np.linalg.norm(ROWS, axis=1), 1.0)[:, None]
    subject = client()
    for k in range(1, ROUNDS + 1):
        release = subject.privatizer.release("s", 0, lambda part: ROWS[part])
        expected = sampled(keys.secret_key, keys.nonce("s", k), len(ROWS), RATE) @ rows
        assert release.values == pytest.approx(expected, abs=1e-5)
        assert release.samples == len(ROWS), "which is public: not how many were drawn"


def test_every_round_computes_all_samples():
    asked = []

    def counting(part):
        asked.append((part.start, part.stop))
        return ROWS[part]

    subject = Privatizer(policy(), D, len(ROWS), DurableLedger(), SystemKeys(KEY), data=row_bytes(ROWS))
    for _ in range(2):
        asked.clear()
        subject.release("s", 0, counting)
        assert asked == [(i, i + 1) for i in range(len(ROWS))]


def test_a_failing_sample_counts_as_zero_and_shows_in_no_batch():
    def failing(part):
        if part.start == 3:
            raise ValueError("of this sample")
        return ROWS[part]

    subject = Privatizer(policy(), D, len(ROWS), DurableLedger(), SystemKeys(KEY), data=row_bytes(ROWS))
    assert [subject.release("s", 0, failing).samples for _ in range(ROUNDS)] == [len(ROWS)] * ROUNDS


def test_with_the_same_keys_a_sample_moves_a_round_by_the_clip_or_not_at_all():
    plan = policy().plan(D)
    for seed in range(10):
        rows, other = ROWS * 10, ROWS * 10
        other[seed] = -rows[seed]
        moves = np.linalg.norm(sums(client(rows)) - sums(client(other)), axis=1)
        there = moves > 0
        assert 0 <= there.sum() < ROUNDS
        assert moves.max() <= plan.sensitivity
        assert not there.any() or moves[there] == pytest.approx(2.0, rel=1e-3)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"trust": "untrusted-server"}, "trust"),
        ({"release_rule": "acknowledged"}, "release_rule"),
        ({"clip_unit": "nonnegative"}, "clip_unit"),
        ({"mechanism": "cancelling"}, "mechanism"),
        ({"batch_size": 2}, "batch_size"),
        ({"sample_participations": 2}, "sample_participations"),
        ({"batch_selection": "full_batch"}, "sampling_rate"),
    ],
)
def test_policies_whose_batches_are_not_accounted_for_are_refused(changes, setting):
    with raises(ConfigurationError, "conflict", setting):
        policy(**changes)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan, True])
def test_impossible_rates_are_refused(rate):
    with raises(ConfigurationError, "out-of-range", "sampling_rate"):
        policy(sampling_rate=rate)


def test_mu_is_that_of_a_sample_in_every_round():
    """What holds for whoever knows the batches, and what ledgers count."""
    assert policy().participations == ROUNDS
    stream = strategy().aggregator.stream
    stream.clients_per_round = 1
    assert stream.sum_noise_std(D) == pytest.approx(2.0 * math.sqrt(ROUNDS) / 3.0, rel=1e-4)
    subject = client()
    sums(subject, 1)
    with subject.privatizer.ledger.exclusive() as page:
        assert page.account().spent.mu == 3.0


@pytest.mark.parametrize("kind", [TreeMomentum, ReducedTreeMomentum, TrustedFullBatch, TrustedMu2])
def test_servers_whose_noise_is_not_accounted_for_are_refused(kind):
    options = {"policy": policy(), "num_rounds": ROUNDS, "learning_rate": 0.1, "num_clients": 2}
    if kind in (TreeMomentum, ReducedTreeMomentum):
        options["alpha"] = 0.3
    if kind is ReducedTreeMomentum:
        options["smoothness"] = 1.0
    with raises(ConfigurationError, "conflict", "batch_selection"):
        kind(**options)


@pytest.mark.parametrize("changes", [{"mechanism": "blt"}, {"mechanism_options": {"shares": "late"}}])
def test_noise_that_is_not_fresh_and_equal_is_refused(changes):
    with raises(ConfigurationError, "conflict", "mechanism"):
        strategy(**changes)


def test_a_client_that_samples_otherwise_is_not_aggregated():
    known = policy()
    plan, values = known.plan(D), np.zeros(D)

    def believed(**entries):
        stated = {protocol.SENSITIVITY: plan.sensitivity, protocol.NUM_EXAMPLES: 5, **entries}
        return is_well_formed(known, Reply("0", 1, 0, values, stated), most_releases=1)

    assert believed(**{protocol.SAMPLING_RATE: RATE})
    assert not believed(**{protocol.SAMPLING_RATE: 1.0})
    assert not believed(), "full batches state no rate"
    assert client().public_entries("gradients")[protocol.SAMPLING_RATE] == RATE


# What the server does.


def test_sums_are_divided_by_the_expected_size_of_the_clients_that_came():
    sizes, absent = (400, 100, 300), {(2, "1"), (3, "0"), (3, "1"), (3, "2"), (4, "2")}
    clients = [client(ROWS[:size], name=str(i), mu=1e3) for i, size in enumerate(sizes)]
    grid = Direct(clients, absent)
    subject = strategy(clients=3, policy=policy(mu=1e3))
    subject.start(grid, ArrayRecord([np.zeros(D)]), num_rounds=6)
    again = {one.name: sums(client(one.samples, name=one.name, mu=1e3), 6, subject.session) for one in clients}
    numbers = dict.fromkeys(again, 0)
    for t in range(1, 6):
        here = [str(i) for i in range(3) if (t, str(i)) not in absent]
        total = np.zeros(D)
        for name in here:
            total += again[name][numbers[name]]
            numbers[name] += 1
        size = RATE * sum(sizes[int(name)] for name in here)
        step = grid.models[t - 1] - grid.models[t]
        assert step == pytest.approx(total / size if here else np.zeros(D), abs=1e-3)
    assert [report.samples for report in subject.history[:4]] == [800, 700, 0, 500]
    assert subject.history[4].aggregated == 3, "who was lost comes back: a batch is drawn anew"


def test_no_figure_of_a_round_says_how_many_were_drawn():
    """Two orders of chance with other batches: all that is said of rounds is the same."""
    told = []
    for name in ("a", "b"):
        subject = strategy()
        subject.start(Direct([client(name=name)]), ArrayRecord([np.zeros(D)]), num_rounds=ROUNDS)
        told.append([report.metrics for report in subject.history])
    assert told[0] == told[1]


def test_a_resumed_training_goes_on_with_fresh_batches(tmp_path):
    """A round that was cut off was answered and never published; with fixed batches its client would be left out."""
    ledger, keys = DurableLedger(), SystemKeys(KEY)
    subject = client(keys=keys, ledger=ledger)
    known = {"noise_keys": None, "checkpoint": tmp_path / "checkpoint", "session": "s"}
    start = ArrayRecord([np.zeros(D)])
    strategy(**known).start(Direct([subject]), start, num_rounds=3)
    subject.privatizer.release("s", 2, lambda part: ROWS[part])
    grid, again = Direct([client(keys=keys, ledger=ledger)]), strategy(**known)
    again.start(grid, start, num_rounds=6)
    assert [report.aggregated for report in again.history] == [1] * 6
    assert len(np.unique(np.array(grid.models), axis=0)) == 3
    assert subject.privatizer.statement("s").releases == 7


def test_the_account_counts_the_rounds_that_are_published():
    subject = strategy()
    stream = subject.aggregator.stream
    found = stream.amplification(D)
    assert (found.slots, found.rate, found.proved) == (ROUNDS, RATE, True)
    assert found.epsilon < 0.5 * stream.epsilon()
    capped = strategy(policy=policy(max_participations=5)).aggregator.stream.amplification(D)
    assert capped.slots == 5
    assert strategy(policy=policy(mechanism="none")).aggregator.stream.amplification(D) is None


# Attacks.

DRAWS, SHIFT = 4001, 1.5


@cache
def shown(strange, others):
    """What a server publishes of one strange row among others, in so many rounds, in deviations of the noise."""
    rows = np.full((21, 1), float(others))
    rows[0] = strange
    rate, mu = 0.2, 2 * SHIFT * math.sqrt(DRAWS)
    fields = {"mu": mu, "sampling_rate": rate, "max_participations": DRAWS, "noise_quality": "fast"}
    grid = Direct([client(rows, SimulatedKeys(3, f"{strange}"), **fields)])
    keys = SimulatedKeys(5, f"server {strange}")
    subject = strategy(DRAWS, policy=policy(**fields), noise_keys=keys)
    subject.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=DRAWS)
    return -np.diff(np.array(grid.models)[:, 0]) * rate * len(rows) * SHIFT


def excess(with_it, without, threshold, epsilon):
    """Delta that is seen, and its standard error."""
    p, q = (with_it > threshold).mean(), (without > threshold).mean()
    error = math.sqrt((p * (1 - p) + math.exp(2 * epsilon) * q * (1 - q)) / len(with_it))
    return p - math.exp(epsilon) * q, error


def claimed_in_a_round(epsilon, rate=0.2):
    return poisson_delta(2 * SHIFT, rate, 1, epsilon)


def test_a_strange_row_shows_in_what_is_published_as_much_as_is_claimed():
    """Every other row is zero, so nothing else hides it. Fails for 1 seed in 10^4."""
    with_it, without = shown(1.0, 0.0), shown(-1.0, 0.0)
    for epsilon in (0.0, 0.5, 1.0):
        x = np.linspace(-5, 8, 2601)
        ratio = [0.8 * np.exp(-(x**2) / 2) + 0.2 * np.exp(-((x - sign * SHIFT) ** 2) / 2) for sign in (1, -1)]
        threshold = x[np.argmax(ratio[0] > math.exp(epsilon) * ratio[1])]
        seen, error = excess(with_it, without, threshold, epsilon)
        assert seen <= claimed_in_a_round(epsilon) + 4 * error
        assert seen >= claimed_in_a_round(epsilon) - 4 * error, "the attack is no weak one"


def test_rounds_are_independent_of_each_other():
    """A batch that was drawn once for all rounds would be in the mean of many; fails for 1 seed in 10^4."""
    with_it = shown(1.0, 0.0)
    parts = with_it.reshape(40, -1).mean(axis=1)
    deviation = math.sqrt((1 + SHIFT**2 * 0.2 * 0.8) / (len(with_it) / 40))
    assert abs(parts.mean() - 0.2 * SHIFT) < 4 * deviation / math.sqrt(40)
    assert parts.std() == pytest.approx(deviation, rel=0.5)


@pytest.mark.parametrize("planted", ["a mean over those that were drawn", "batches of a fixed size", "as it is"])
def test_batches_whose_size_shows_are_caught(planted):
    """All others are at -S, and known. Then a hole shows where the strange row is missing, twice as deep."""
    generator = np.random.Generator(np.random.Philox(key=7))
    rate, draws, epsilon = 0.05, 400_000, 1.0

    def published(strange):
        there = generator.random(draws) < rate
        noise = generator.standard_normal(draws) / SHIFT
        if planted == "as it is":
            return (there * strange + noise) * SHIFT
        if planted == "batches of a fixed size":
            others = np.where(there, 9, 10)  # one of ten makes room
            return (there * strange - others + 10 + noise) * SHIFT
        drawn = 10 + there
        return ((there * strange - 10 + noise) / drawn + 1) * 10 * SHIFT

    with_it, without = published(1.0), published(-1.0)
    seen, error = max(excess(with_it, without, t, epsilon) for t in np.linspace(0.5, 5, 46))
    claimed = claimed_in_a_round(epsilon, rate)
    if planted == "as it is":
        assert seen <= claimed + 4 * error
    else:
        assert seen > claimed + 4 * error
