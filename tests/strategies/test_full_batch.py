"""Full batches: Nesterov's steps along the mean over the samples that came, untrusted and trusted server."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from flwr.app import ArrayRecord
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, protocol
from murmurfl.privacy.queries.clipped_share import CountedRows
from murmurfl.strategies import (
    FullBatch,
    Refusal,
    Reply,
    TrustedFullBatch,
    full_batch_start,
    full_batch_step,
)
from murmurfl.strategies.aggregation.streams import Sum
from murmurfl.strategies.full_batch import FullBatchRule, next_clip, query_point

from tests.harness.errors import raises

D, T = 5, 6
POLICY = PrivacyPolicy(
    0.5, 1, T, 1.0, batch_selection="full_batch", mechanism="independent", release_rule="paper", trust="trusted-server"
)
OPTIONS = {"num_clients": 3, "clients_per_round": 3, "learning_rate": 0.3, "seed": 1, "session": "s"}


def descended(gradients, beta, l2=0.0, rate=0.3, nesterov=True):
    """Iterates by the recursion of ALGORITHMS section 8, written out."""
    w, v, iterates = np.zeros(D), np.zeros(D), []
    for gradient in gradients:
        point = w + beta * v if nesterov else w
        v = beta * v - rate * (gradient + l2 * point)
        w = w + v
        iterates.append(w)
    return iterates


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_steps_are_nesterovs_and_the_average_weighs_iterates_by_their_number(nesterov, l2):
    gradients = np.random.Generator(np.random.Philox(key=3)).normal(size=(8, D))
    state = full_batch_start(np.zeros(D))
    expected = descended(gradients, 0.7, l2, nesterov=nesterov)
    for t, gradient in enumerate(gradients, start=1):
        state = full_batch_step(state, gradient, learning_rate=0.3, momentum=0.7, nesterov=nesterov, l2=l2)
        assert state.w == pytest.approx(expected[t - 1])
        weights = np.arange(1, t + 1)
        assert state.average == pytest.approx(weights @ np.array(expected[:t]) / weights.sum())
    ahead = state.w + 0.7 * state.velocity if nesterov else state.w
    assert query_point(state, momentum=0.7, nesterov=nesterov) == pytest.approx(ahead)


def test_the_mean_of_the_last_two_iterates_is_the_optimum_of_a_direction_too_steep_for_the_step():
    """A curvature of 2 / eta, around which the last iterate goes back and forth for ever."""
    rule = FullBatchRule(learning_rate=0.5, average="last-two")
    state = full_batch_start(np.zeros(1))
    for _ in range(7):
        state = full_batch_step(state, 4.0 * (state.w - 3.0), learning_rate=0.5)
    assert abs(state.w[0] - 3.0) == pytest.approx(3.0)
    assert rule.model(state) == pytest.approx([3.0])


class Clients:
    """Clients whose release is a sum over so many samples; ``missing`` says who does not answer in which round."""

    def __init__(self, sizes, missing=None):
        self.sizes, self.missing, self.points = sizes, missing or {}, []

    def names(self):
        return list(self.sizes)

    def statements(self, session):
        return {}

    def mean(self, name, server_round):
        """No longer than S, and on the grid."""
        values = np.random.Generator(np.random.Philox(key=[int(name), server_round])).normal(size=D)
        return np.round(values * 2**8 / 16) / 2**8

    def answer(self, request):
        self.points.append(request.points[0])
        for name in request.acks:
            if name in self.missing.get(request.server_round, ()):
                continue
            size = self.sizes[name]
            entries = {protocol.NUM_EXAMPLES: size, protocol.SENSITIVITY: POLICY.plan(D).sensitivity}
            yield Reply(
                name, request.server_round, request.acks[name], size * self.mean(name, request.server_round), entries
            )


SIZES = {"0": 1, "1": 2, "2": 13}


def trained(clients, strategy=None, rounds=T, **options):
    subject = strategy or FullBatch(**{**OPTIONS, "momentum": 0.6, **options})
    return subject, subject.start(clients, ArrayRecord([np.zeros(D)]), num_rounds=rounds).arrays.to_numpy_ndarrays()[0]


def means(clients, rounds=T):
    """The mean over the samples that came, round by round."""
    for t in range(1, rounds + 1):
        there = {name: size for name, size in clients.sizes.items() if name not in clients.missing.get(t, ())}
        if there:
            yield sum(size * clients.mean(name, t) for name, size in there.items()) / sum(there.values())


@pytest.mark.parametrize("missing", [{}, {2: "2", 4: "01"}, {1: "012", 3: "012"}])
@pytest.mark.parametrize("average", ["last", "last-two", "linear"])
def test_the_mean_is_over_the_samples_that_came(missing, average):
    clients = Clients(SIZES, missing)
    subject, model = trained(clients, average=average)
    iterates = descended(means(clients), 0.6)
    weights = np.arange(1, len(iterates) + 1)
    linear = weights @ np.array(iterates) / weights.sum()
    expected = {"last": iterates[-1], "last-two": (iterates[-1] + iterates[-2]) / 2, "linear": linear}[average]
    assert model == pytest.approx(expected)
    assert [report.samples for report in subject.history] == [
        sum(size for name, size in SIZES.items() if name not in missing.get(t, "")) for t in range(1, T + 1)
    ]


def test_a_step_along_a_mean_over_clients_is_another_one(monkeypatch):
    """The planted bug: each client counts the same, however many samples it has."""
    clients, update = Clients(SIZES), FullBatchRule.update

    def over_clients(rule, state, total, turn):
        return update(rule, state, total, replace(turn, samples=turn.aggregated))

    monkeypatch.setattr(FullBatchRule, "update", over_clients)
    assert trained(clients)[1] != pytest.approx(descended(means(clients), 0.6)[-1])


def test_a_round_in_which_nothing_came_changes_nothing():
    class Refusing(Clients):
        def answer(self, request):
            replies = list(super().answer(request))
            return [Refusal(protocol.MALFORMED_REQUEST)] * 3 if request.server_round == 2 else replies

    clients = Refusing(SIZES)
    trained(clients, rounds=3)
    after_one = trained(Clients(SIZES), rounds=1)[1]
    assert clients.points[1].tobytes() == clients.points[2].tobytes()
    assert clients.points[1] == pytest.approx(after_one + 0.6 * after_one)  # w_1 + beta v_1, from rest


def test_a_reply_without_its_sample_number_is_malformed():
    class Silent(Clients):
        def answer(self, request):
            for reply in super().answer(request):
                silent = reply.client == "2"
                yield replace(reply, metrics={}) if silent else reply

    subject, model = trained(Silent(SIZES))
    assert all((report.malformed, report.aggregated) == (1, 2) for report in subject.history)
    assert model == pytest.approx(descended(means(Clients({"0": 1, "1": 2})), 0.6)[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"momentum": math.nan},
        {"l2": -1.0},
        {"l2": math.inf},
        {"average": "first"},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigurationError, match=f"Expected.*{next(iter(options))}"):
        FullBatch(**{**OPTIONS, **options})


def test_a_step_that_overflows_is_refused():
    state = full_batch_start(np.zeros(2))
    with raises(ConfigurationError, "out-of-range", "learning_rate"):
        full_batch_step(state, np.array([1e300, 0.0]), learning_rate=1e300)


# With a trusted server.


def trusted(**changes):
    options = {"policy": POLICY, "num_rounds": T, "noise_keys": SimulatedKeys(5, "server"), "momentum": 0.6}
    return TrustedFullBatch(**{**OPTIONS, **options, **changes})


@pytest.mark.parametrize("shares", ["uniform", "average", "late"])
def test_the_noise_of_all_rounds_is_that_of_mu(shares):
    """Exact, with the noise that is really added: the distance of neighbouring runs in everything published."""
    subject = trusted(shares=shares)
    stds = np.array([subject.aggregator.stream.noise_std(D, t) for t in range(1, T + 1)])
    change = POLICY.plan(D).sensitivity
    assert 0.999 < math.sqrt(np.sum((change / stds) ** 2)) <= 1.0
    assert change >= 2 * 0.5


def published_noise(subject, rounds=T, clients=None):
    """The noise on the sums of a run's rounds, from its query points, as anybody could work it out."""
    clients = clients or Clients(SIZES)
    _, last = trained(clients, subject, rounds)
    w, v, noise = np.zeros(D), np.zeros(D), []
    points = [*clients.points[1:], last + 0.6 * subject.state.velocity]
    for t, point in enumerate(points, start=1):
        after = (point + 0.6 * w) / 1.6  # point = w' + beta (w' - w)
        gradient = (0.6 * v - (after - w)) / 0.3
        noise.append(gradient * sum(SIZES.values()) - sum(size * clients.mean(name, t) for name, size in SIZES.items()))
        v, w = after - w, after
    return np.array(noise)


def measured_mu(noise):
    """Of one sample that moves every sum by 2 S, from the noise that was measured."""
    return math.sqrt(np.sum((2 * 0.5) ** 2 / np.mean(np.square(noise), axis=(1, 2))))


def many(runs=80, **changes):
    """Rounds by runs by values: the noise of so many runs."""
    return np.stack(
        [published_noise(trusted(noise_keys=SimulatedKeys(seed, "server"), **changes)) for seed in range(runs)], axis=1
    )


@pytest.mark.parametrize("shares", ["uniform", "late"])
def test_a_trusted_server_publishes_sums_with_as_much_noise_as_it_says(shares):
    """Of 2400 values the standard deviation is known to 1.5 %: beyond 8 % with a chance below 1e-6."""
    assert measured_mu(many(shares=shares)) == pytest.approx(1.0, rel=0.08)


def test_noise_for_one_round_alone_is_noticed(monkeypatch):
    """The planted bug: Delta / mu in each of T rounds, as if a sample were in one of them."""
    monkeypatch.setattr(Sum, "_often", 1.0)
    assert measured_mu(many(40)) > 0.9 * math.sqrt(T)


def test_a_round_in_which_nothing_came_publishes_nothing_new():
    subject = trusted()
    clients = Clients(SIZES, {2: "012"})
    trained(clients, subject, rounds=3)
    assert clients.points[1].tobytes() == clients.points[2].tobytes()


def test_a_trusted_server_makes_no_more_rounds_than_its_noise_is_for():
    with raises(ConfigurationError, "exhausted", "num_rounds", match=f"at most {T} rounds"):
        trained(Clients(SIZES), trusted(), rounds=T + 1)


@pytest.mark.parametrize("changes", [{"batch_selection": "once"}, {"release_rule": "acknowledged"}])
def test_a_trusted_server_refuses_policies_of_other_releases(changes):
    fields_of = {field.name: getattr(POLICY, field.name) for field in fields(POLICY)}
    other = PrivacyPolicy(**{**fields_of, "sample_participations": 1, **changes})
    with raises(ConfigurationError, "conflict", "batch_selection"):
        trusted(policy=other)


def test_a_trusted_server_drops_sums_that_so_many_samples_cannot_have():
    class Longer(Clients):
        def answer(self, request):
            for reply in super().answer(request):
                long = np.zeros(D)
                long[0] = 0.5 * reply.samples * (2 if reply.client == "1" else 1)  # S times the samples, and twice that
                yield replace(reply, contents=long)

    subject, _ = trained(Longer(SIZES), trusted(), rounds=1)
    assert (subject.history[0].aggregated, subject.history[0].malformed) == (2, 1)


D, N, SHARE = 4, 2000, 0.1
QUANTILE_OPTIONS = {"num_clients": 1, "clients_per_round": 1, "learning_rate": 1e-6, "seed": 1, "session": "s"}
GENERATOR = np.random.Generator(np.random.Philox(key=12))
GRADIENTS = GENERATOR.normal(size=(N, D)) * np.exp(GENERATOR.normal(size=N))[:, None]
NORMS = np.linalg.norm(GRADIENTS, axis=1)


class Client:
    """A client whose gradients are the same everywhere, with noise of so much on a sum."""

    def __init__(self, noise=0.0, silent=()):
        self.noise, self.silent, self.points = noise, silent, []

    def names(self):
        return ["0"]

    def statements(self, session):
        return {}

    def answer(self, request):
        point, rows = request.points[0], CountedRows(SHARE)
        self.points.append(point)
        if request.server_round in self.silent:
            return
        assert point.shape == (D + 1,)
        total = np.append(rows.scales(NORMS, point[-1]) @ GRADIENTS, rows.marks(NORMS, point[-1]).sum())
        total += self.noise * np.random.Generator(np.random.Philox(key=request.server_round)).normal(size=D + 1)
        yield Reply("0", request.server_round, request.acks["0"], total, {protocol.NUM_EXAMPLES: N})


def with_quantile(client, rounds=40, **options):
    strategy = FullBatch(**{**QUANTILE_OPTIONS, "quantile": 0.3, "quantile_share": SHARE, "first_clip": 1.0, **options})
    strategy.start(client, ArrayRecord([np.zeros(D)]), num_rounds=rounds)
    return strategy


def within(strategy):
    return (float(strategy.state.clip) >= NORMS).mean()


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("first_clip", [0.3, 1.0, 20.0])
def test_the_clip_comes_to_the_quantile_that_is_wanted(quantile, first_clip):
    """Noise of 5 on a sum of 2000 marks of 0.32: on a share 0.4 %."""
    strategy = with_quantile(Client(noise=5.0), quantile=quantile, first_clip=first_clip)
    assert within(strategy) == pytest.approx(quantile, abs=0.05)


def test_a_share_that_is_misread_leads_the_clip_elsewhere(monkeypatch):
    """The planted bug: marks are read as if they were 0 or 1."""
    read = CountedRows.read

    def misread(self, mean, clip):
        gradient, _ = read(self, mean, clip)
        return gradient, float(mean[-1]) / math.sqrt(self.share)

    monkeypatch.setattr(CountedRows, "read", misread)
    assert abs(within(with_quantile(Client())) - 0.3) > 0.2


def test_a_step_follows_the_clipped_mean_and_shortens_with_it():
    for first_clip in (0.1, 100.0):
        strategy = with_quantile(Client(), rounds=1, learning_rate=1.0, first_clip=first_clip)
        mean = (GRADIENTS * np.minimum(1.0, first_clip / NORMS)[:, None]).mean(axis=0)
        share = (first_clip >= NORMS).mean()
        clip = next_clip(first_clip, share, quantile=0.3, rate=4.0)
        assert float(strategy.state.clip) == pytest.approx(clip)
        assert strategy.state.w == pytest.approx(-mean * min(1.0, clip / first_clip))


def test_rounds_in_which_nothing_came_leave_the_clip_where_it_was():
    client = Client(silent=(2, 3))
    with_quantile(client, rounds=4)
    assert client.points[1].tobytes() == client.points[2].tobytes() == client.points[3].tobytes()


def test_a_run_that_was_interrupted_goes_on_with_its_clip(tmp_path):
    whole, half = Client(noise=5.0), Client(noise=5.0)
    with_quantile(whole, rounds=6)
    with_quantile(half, rounds=3, checkpoint=tmp_path / "c.npz")
    with_quantile(half, rounds=6, checkpoint=tmp_path / "c.npz")
    assert [point.tobytes() for point in half.points] == [point.tobytes() for point in whole.points]


@pytest.mark.parametrize(
    "options",
    [
        {"quantile": 1.0},
        {"quantile": -0.1},
        {"quantile": math.nan},
        {"quantile_rate": 0.0},
        {"quantile_rate": math.inf},
        {"first_clip": 0.0},
        {"first_clip": math.inf},
        {"first_clip": math.nan},
        {"quantile": 0.0},
    ],
)
def test_impossible_options_of_a_quantile_are_refused(options):
    with pytest.raises(ConfigurationError, match=r"Expected (quantile|first_clip|quantile_rate)"):
        with_quantile(Client(), **options)
