"""The update rules beside the papers' equations."""

import math

import numpy as np
import pytest
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SimulatedKeys, SystemKeys, protocol
from murmurfl.strategies import (
    AnytimeMu2,
    DelayedMomentum,
    DelayedMomentumState,
    IsrlDp,
    IsrlDpState,
    Mu2,
    NoisySGD,
    NoisySGDState,
    OnlineFedSGD,
    OnlineState,
    TrustedMu2,
    delayed_momentum_step,
    isrl_dp_step,
    mu2_start,
    mu2_step,
    noisy_sgd_step,
    online_step,
    sample_clients,
)
from murmurfl.strategies.mu2 import project_to_ball

from tests.harness.errors import raises
from tests.harness.rules import begun, stepped

rng = np.random.Generator(np.random.Philox(key=21))


def test_mu2_is_anytime_averaging_of_projected_steps_along_the_momentum():
    """x_t is the alpha-weighted mean of w_1 .. w_t with alpha_t = t, and q the running sum of s (ALGORITHMS 2)."""
    start, m, eta, diameter = rng.normal(size=5), 4, 0.3, 2.0
    state, w, q = mu2_start(start), [start], np.zeros(5)
    for t in range(1, 30):
        releases = rng.normal(size=5)
        state = mu2_step(state, releases, t, clients_per_round=m, learning_rate=eta, diameter=diameter)
        q = q + releases / m
        step = w[-1] - eta * q
        offset = step - start
        w.append(start + offset * min(1.0, (diameter / 2) / np.linalg.norm(offset)))
        weights = np.arange(1, t + 2)
        assert state.x == pytest.approx(weights @ np.array(w) / weights.sum())
        assert state.w == pytest.approx(w[-1])
        assert state.release_sum / m == pytest.approx(q)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("loudness", [1.0, 1e-3])
def test_anytime_steps_are_as_long_as_all_momenta_so_far_are_loud(window, loudness):
    """Whatever the releases' scale; beyond a window everything of the past fades by 1 - 1 / W."""
    start, m, eta, diameter = rng.normal(size=5), 4, 0.3, 3.0
    strategy = AnytimeMu2(num_clients=m, learning_rate=eta, diameter=diameter, window=window)
    state, w, x, momenta, past = begun(strategy, start), start, start, [], []
    for t in range(1, 12):
        releases = loudness * rng.normal(size=5)
        forgets = bool(window) and t > window
        past = [(1 - 1 / window) * one for one in past] if forgets else past
        past.append(releases / m)
        momenta.append(np.sum(past, axis=0))
        assert strategy.rule.points(state)[0] is state.x
        state = stepped(strategy, state, releases, t)
        shares = [1 / t] * t
        if window and t > window:
            fading = (1 - 1 / window) ** np.arange(t - window, -1, -1.0)
            shares = [fading[0] / window] * window + list(fading[1:] / window)
        rms = math.sqrt(sum(share * np.mean(q**2) for share, q in zip(shares, momenta, strict=True)))
        drawn = start + (1 - 1 / (2 * window)) * (w - start) if forgets else w
        rms *= 2 if t == 1 else 1
        w = project_to_ball(drawn - eta / rms * momenta[-1], start, diameter / 2)
        a = 2 / (min(t, window or t) + 2)
        x = (1 - a) * x + a * w
        assert state.w == pytest.approx(w)
        assert state.x == pytest.approx(x)
        assert strategy.rule.model(state) is state.w
        assert strategy.rule.entries(t) == ({protocol.WEIGHED_AS: window} if forgets else {})


def test_anytime_steps_wait_where_nothing_came():
    strategy = AnytimeMu2(num_clients=4, learning_rate=0.1)
    state = stepped(strategy, begun(strategy, np.ones(3)), np.zeros(3), 1)
    assert (state.w == 1).all()
    assert np.isfinite(stepped(strategy, state, np.ones(3), 2).w).all()


def test_the_previous_query_point_is_the_one_asked_for_before():
    state = mu2_start(np.zeros(2))
    for t in range(1, 5):
        asked = state.x
        state = mu2_step(state, np.ones(2), t, clients_per_round=1, learning_rate=0.1, diameter=math.inf)
        assert state.x_previous is asked


def test_noise_of_a_trusted_server_is_used_once_and_not_accumulated():
    server, alone = (trusted(noise_keys=SimulatedKeys(5, "server"), session="s").aggregator.stream for _ in range(2))
    server.shape(3, 3)
    first, second = (server.released(np.ones(3), t) for t in (1, 2))
    assert np.abs(first - 1).min() > 0
    assert (first + second == alone.noisy(2 * np.ones(3), 2)).all(), "to the last bit"


def test_noisy_sgd_is_a_projected_step():
    state = NoisySGDState(np.zeros(2), np.array([1.0, 0.0]))
    state = noisy_sgd_step(state, np.array([-8.0, 0.0]), clients_per_round=4, learning_rate=0.5, diameter=3.0)
    assert state.w == pytest.approx([1.5, 0.0])


def test_delayed_momentum_is_anytime_averaging_along_the_clients_own_momenta():
    start, m, eta, diameter = rng.normal(size=5), 4, 0.3, 2.0
    state, w = DelayedMomentumState(start, start, start, np.zeros(5)), [start]
    for t in range(1, 30):
        momenta = rng.normal(size=5)
        state = delayed_momentum_step(state, momenta, t, clients_per_round=m, learning_rate=eta, diameter=diameter)
        offset = w[-1] - eta * momenta / m - start
        w.append(start + offset * min(1.0, (diameter / 2) / np.linalg.norm(offset)))
        weights = np.arange(1, t + 2)
        assert state.x == pytest.approx(weights @ np.array(w) / weights.sum())
        assert state.q == pytest.approx(momenta / m), "nothing of the round before"


def test_minibatch_sgd_publishes_the_average_of_its_iterates():
    start, m, eta, diameter = rng.normal(size=5), 4, 0.3, 2.0
    state, w, iterates = IsrlDpState(start, start, start, start), start, []
    for r in range(1, 30):
        assert state.query == pytest.approx(w)
        gradients = rng.normal(size=5)
        state = isrl_dp_step(
            state, gradients, r, variant="minibatch", clients_per_round=m, learning_rate=eta, diameter=diameter
        )
        offset = w - eta * gradients / m - start
        w = start + offset * min(1.0, (diameter / 2) / np.linalg.norm(offset))
        iterates.append(w)
        assert state.average == pytest.approx(np.mean(iterates, axis=0))


def test_the_accelerated_variant_is_ac_sa_and_converges_as_such():
    """Lan 2012, with beta_r = (r + 1) / 2 and gamma_r = r eta: on a quadratic O(1 / r^2), not O(1 / r)."""
    curvature = np.array([1.0, 0.1, 0.01, 0.001])
    optimum, eta = np.array([3.0, -2.0, 1.0, 5.0]), 0.25
    state = IsrlDpState(*[np.zeros(4)] * 4)
    x, published = np.zeros(4), np.zeros(4)
    for r in range(1, 101):
        beta = (r + 1) / 2
        middle = x / beta + (1 - 1 / beta) * published
        assert state.query == pytest.approx(middle)
        gradient = curvature * (middle - optimum)
        x = x - r * eta * gradient
        published = x / beta + (1 - 1 / beta) * published
        state = isrl_dp_step(
            state, 3 * gradient, r, variant="accelerated", clients_per_round=3, learning_rate=eta, diameter=math.inf
        )
        assert state.average == pytest.approx(published)
        loss = 0.5 * curvature @ (state.average - optimum) ** 2
        # f(v_r) - f* <= ||x_0 - x*||^2 / (eta r (r + 1)), which gradient descent breaks by far.
        assert loss <= optimum @ optimum / (eta * r * (r + 1))


def test_online_learning_steps_by_the_mean_of_what_was_asked_for():
    """x^{r+1} = x^r - eta~ / n sum of replies, eta~ = eta eta_g tau (zhang-2025, algorithm 1)."""
    options = {"num_clients": 4, "clients_per_round": 4, "learning_rate": 0.1, "local_steps": 5}
    assert OnlineFedSGD(**options).rule.step_size == pytest.approx(0.5)
    assert OnlineFedSGD(**options, global_learning_rate=3.0).rule.step_size == pytest.approx(1.5)
    state = online_step(OnlineState(np.ones(2)), np.array([4.0, 8.0]), clients_per_round=4, step=0.5)
    assert state.x == pytest.approx([0.5, 0.0])
    for wrong in ({"learning_rate": 0.0}, {"local_steps": 0}, {"global_learning_rate": math.inf}):
        with pytest.raises(ConfigurationError, match="Expected"):
            OnlineFedSGD(**{**options, **wrong})


def test_projection_leaves_inner_points_alone():
    assert (project_to_ball(np.array([0.3, 0.4]), np.zeros(2), 0.5) == [0.3, 0.4]).all()
    assert project_to_ball(np.array([3.0, 4.0]), np.zeros(2), 1.0) == pytest.approx([0.6, 0.8])
    assert (project_to_ball(np.array([3.0, 4.0]), np.zeros(2), math.inf) == [3.0, 4.0]).all()


NAMES = [str(i) for i in range(12)]


def test_uniform_samples_are_distinct_and_uniform():
    """6,000 rounds: each client's share is 5/12 within 5 standard errors (false alarm 12 x 6e-7)."""
    counts = dict.fromkeys(NAMES, 0)
    for t in range(1, 6001):
        sample = sample_clients(NAMES, 5, 3, t)
        assert len(set(sample)) == 5
        assert sample == sorted(sample, key=NAMES.index)
        for name in sample:
            counts[name] += 1
    error = math.sqrt(6000 * 5 / 12 * 7 / 12)
    assert all(abs(count - 2500) < 5 * error for count in counts.values())


@pytest.mark.parametrize("m", [1, 5, 7, 12])
def test_balanced_samples_ask_every_client_equally_often(m):
    counts = dict.fromkeys(NAMES, 0)
    for t in range(1, 12 * 4 + 1):
        sample = sample_clients(NAMES, m, 3, t, "balanced")
        assert len(set(sample)) == m
        for name in sample:
            counts[name] += 1
        assert max(counts.values()) - min(counts.values()) <= 2
    assert set(counts.values()) == {4 * m}


def test_samples_are_functions_of_seed_and_round():
    for sampling in ("uniform", "balanced"):
        assert sample_clients(NAMES, 5, 3, 8, sampling) == sample_clients(NAMES, 5, 3, 8, sampling)
        different = {tuple(sample_clients(NAMES, 5, seed, t, sampling)) for seed in (1, 2) for t in range(1, 20)}
        assert len(different) > 30


def policy(**changes):
    return PrivacyPolicy(
        **{"clip_norm": 1.0, "batch_size": 2, "max_participations": 9, "mu": 2.0, "trust": "trusted-server", **changes}
    )


def trusted(**changes):
    options = {"num_clients": 8, "clients_per_round": 4, "learning_rate": 0.1, "policy": policy(), "num_rounds": 9}
    return TrustedMu2(**{**options, **changes})


def test_trusted_noise_is_that_of_the_papers():
    """sigma^2 = (Delta / m)^2 T / mu^2 (ALGORITHMS 2.2)."""
    strategy = trusted()
    delta = strategy.aggregator.policy.plan(50).sensitivity
    assert strategy.aggregator.stream.noise_std(50) == pytest.approx(delta / 4 * 3 / 2.0)
    assert delta == pytest.approx(1.0, rel=1e-4)


def test_trusted_noise_measured_over_rounds_has_that_size_and_is_fresh():
    """9 x 4,000 values: the standard deviation within 5 standard errors, 1.9 % (false alarm 6e-7)."""
    strategy = trusted(noise_keys=SimulatedKeys(5, "server"), seed=1, session="s")
    state = begun(strategy, np.zeros(4000))
    strategy.aggregator.shape(4000, 4000)
    steps = []
    for t in range(1, 10):
        after = stepped(strategy, state, strategy.aggregator.stream.released(np.zeros(4000), t), t)
        steps.append((state.w - after.w) / 0.1)
        state = after
    steps = np.array(steps)
    assert steps.std() == pytest.approx(strategy.aggregator.stream.noise_std(4000), rel=0.019)
    correlation = np.corrcoef(steps)
    assert np.abs(correlation - np.eye(9)).max() < 5.5 / math.sqrt(4000)


def test_a_trusted_server_stops_at_the_rounds_it_was_calibrated_for():
    strategy = trusted()
    with raises(ConfigurationError, "exhausted", "num_rounds"):
        strategy.aggregator.stream.released(np.zeros(0), 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mu2(num_clients=3, clients_per_round=4, learning_rate=1.0),
        lambda: Mu2(num_clients=3, clients_per_round=0, learning_rate=1.0),
        lambda: Mu2(num_clients=3, clients_per_round=3, learning_rate=0.0),
        lambda: Mu2(num_clients=3, clients_per_round=3, learning_rate=1.0, diameter=-1.0),
        lambda: Mu2(num_clients=3, clients_per_round=3, learning_rate=1.0, sampling="random"),
        lambda: Mu2(num_clients=3, clients_per_round=3, learning_rate=1.0, session="a b"),
        lambda: NoisySGD(num_clients=3, clients_per_round=3, learning_rate=math.nan),
        lambda: DelayedMomentum(num_clients=3, clients_per_round=3, learning_rate=-1.0),
        lambda: IsrlDp(num_clients=3, clients_per_round=3, learning_rate=1.0, diameter=0.0),
        lambda: AnytimeMu2(num_clients=3, clients_per_round=3, learning_rate=1.0, window=1),
        lambda: IsrlDp(num_clients=3, clients_per_round=3, learning_rate=1.0, variant="fast"),
        lambda: trusted(policy=policy(trust="untrusted-server")),
        lambda: trusted(num_rounds=0),
        lambda: trusted(policy=policy(noise_quality="fast"), noise_keys=SystemKeys.generate()),
    ],
)
def test_impossible_strategies_are_refused(make):
    with pytest.raises(ConfigurationError, match="Expected"):
        make()
