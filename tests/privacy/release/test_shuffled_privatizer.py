"""Accounting of shuffled epochs against brute force, closed forms and an independent accountant; the client's half."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    RefusedError,
    ShuffledPolicy,
    ShuffledPrivatizer,
    SimulatedKeys,
    compose_gdp,
    epoch_mu,
    gdp_epsilon,
    gdp_mu,
    protocol,
    rdp_epsilon,
    rdp_mu,
)
from murmurfl.privacy.release.shuffled_privatizer import (
    ITERATION_ROUNDING,
    epoch_order,
    noisy_epoch,
    step_noise,
)
from scipy.optimize import minimize

from tests.harness.errors import raises

S, SIGMA = 10.0, 3.0


def iteration_bound(sensitivities):
    """Theorem 22 of Feldman et al. by brute force: the least sum of a_t^2 with z_t >= 0 and z_T = 0."""
    steps, before = len(sensitivities), np.cumsum(sensitivities)
    found = minimize(
        lambda a: np.sum(a**2),
        np.asarray(sensitivities, dtype=float) + 1e-3,
        constraints=[
            {"type": "ineq", "fun": lambda a: (before - np.cumsum(a))[:-1]},
            {"type": "eq", "fun": lambda a: before[-1] - a.sum()},
        ],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return math.sqrt(found.fun) if steps > 1 else sensitivities[0]


@pytest.mark.parametrize(("private", "public"), [(1, 0), (1, 4), (3, 0), (2, 3), (4, 1)])
def test_the_amplified_mu_is_that_of_the_theorem_at_its_worst_position(private, public):
    bounds = []
    for position in range(private):
        sensitivities = np.zeros(private + public)
        sensitivities[position] = 2 * S
        bounds.append(iteration_bound(sensitivities) / SIGMA)
    assert max(bounds) == bounds[-1] == pytest.approx(epoch_mu(S, SIGMA, public), rel=1e-4)
    assert min(bounds) < max(bounds) or private == 1


def exact_mu(factor, private, public):
    """Of steps x -> factor x in one dimension, everything Gaussian: shift over standard deviation at the end."""
    noise = math.sqrt(sum(factor ** (2 * i) for i in range(private + public)))
    return 2 * S * factor**public / (SIGMA * noise)


@pytest.mark.parametrize("factor", [1.0, 0.99, 0.5, 0.0])
@pytest.mark.parametrize(("private", "public"), [(1, 0), (1, 7), (3, 7), (3, 40)])
def test_no_step_that_contracts_loses_more_than_is_claimed(factor, private, public):
    assert exact_mu(factor, private, public) <= epoch_mu(S, SIGMA, public) * (1 + 1e-12)


def test_amplification_needs_non_expansive_steps():
    assert exact_mu(1.0, 1, 40) == pytest.approx(epoch_mu(S, SIGMA, 40))
    assert exact_mu(1.05, 1, 40) > 1.4 * epoch_mu(S, SIGMA, 40), "without eta <= 2 / L the bound is false"
    assert exact_mu(1.05, 1, 40) <= epoch_mu(S, SIGMA, 40, "composed")


def test_plain_composition_is_the_amplified_figure_without_public_steps():
    assert epoch_mu(S, SIGMA, 30, "composed") == epoch_mu(S, SIGMA, 0) == 2 * S / SIGMA
    assert epoch_mu(S, SIGMA, 24) == pytest.approx(epoch_mu(S, SIGMA, 0) / 5)


@pytest.mark.parametrize(("epochs", "public"), [(50, 0), (25, 0), (50, 500)])
def test_epsilon_lies_between_the_exact_curve_and_the_papers_conversion(epochs, public):
    """The paper's closed form is the least over orders; dp-accounting's conversion of the same curve is tighter."""
    mu = rdp_mu(5.0, 1e-6)
    sigma = epoch_mu(S, 1.0, public) * math.sqrt(epochs) / mu
    orders = np.linspace(1.01, 60, 20000)
    paper = (2 * orders * S**2 * epochs / ((public + 1) * sigma**2) + math.log(1e6) / (orders - 1)).min()
    assert rdp_epsilon(mu, 1e-6) == pytest.approx(paper, rel=1e-6) == pytest.approx(5.0)
    multiplier = sigma * math.sqrt(public + 1) / (2 * S)
    accountant = RdpAccountant(list(orders[::20]))
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), epochs))
    theirs = accountant.get_epsilon(1e-6)
    total = compose_gdp([epoch_mu(S, sigma, public)] * epochs)
    assert total == pytest.approx(mu)
    assert gdp_epsilon(total, 1e-6) < theirs < 5.0
    assert theirs > 0.9 * 5.0


def policy(**changes):
    common = {"clip_norm": S, "batch_size": 6, "max_participations": 4, "mu": 0.7, "delta": 1e-6}
    return ShuffledPolicy(**{**common, "private_steps": 3, "public_steps": 8, **changes})


def test_a_policys_noise_is_what_its_mu_needs_over_all_epochs():
    for accounting, gain in (("amplified", 3.0), ("composed", 1.0)):
        plan = policy(accounting=accounting).plan(5)
        assert plan.mu == pytest.approx(0.7)
        assert plan.noise_std * gain == pytest.approx(2 * S * 2 / 0.7, rel=2 * ITERATION_ROUNDING + 1e-3)
        total = compose_gdp([epoch_mu(S, plan.noise_std, 8, accounting)] * 4)
        assert total <= plan.mu
        assert [plan.spent_mu(k) for k in (0, 1, 4)] == pytest.approx([0.0, 0.35, 0.7])
    assert policy(private_steps=0).private_steps == 6
    for bad in ({"private_steps": 7}, {"public_steps": -1}, {"accounting": "none"}, {"clip_norm": 0.0}):
        with pytest.raises(ConfigurationError, match="Expected"):
            policy(**bad)
    assert policy(delta=1e-80).plan(5).problem.startswith("Expected delta")
    for bad in ((0.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.nan)):
        with raises(ConfigurationError, "out-of-range", "clip_norm"):
            epoch_mu(*bad, 1)
    for bad in ((1.0, 1.0, -1, "amplified"), (1.0, 1.0, 1, "hoped")):
        with raises(ConfigurationError, "out-of-range", "public_steps"):
            epoch_mu(*bad)
    with raises(ConfigurationError, "out-of-range", "epsilon"):
        rdp_mu(0.0, 1e-6)
    assert gdp_mu(5.0, 1e-6) > 1.05 * rdp_mu(5.0, 1e-6)


def test_an_epoch_is_the_papers_iterates():
    generator = np.random.Generator(np.random.Philox(key=61))
    targets, start, noise = generator.normal(size=(5, 3)), generator.normal(size=3), generator.normal(size=(5, 3))
    x = start.copy()
    for target, rho in zip(targets, noise, strict=True):
        x = x - 0.3 * ((x - target) + rho)
    total = noisy_epoch(
        lambda point, i: point - targets[i], start, 5, learning_rate=0.3, clip_norm=None, noise=iter(noise)
    )
    assert start - 0.3 * total == pytest.approx(x)
    clipped = noisy_epoch(lambda point, i: 1e3 * point, start, 5, learning_rate=1e-9, clip_norm=2.0)
    assert np.linalg.norm(clipped) == pytest.approx(10.0)


def test_orders_are_the_papers():
    orders = {name: [epoch_order(name, 20, 3, epoch).tolist() for epoch in (1, 2)] for name in ("IG", "SO", "RR")}
    assert orders["IG"] == [list(range(20))] * 2
    assert orders["SO"][0] == orders["SO"][1] != orders["IG"][0]
    assert orders["RR"][0] != orders["RR"][1]
    assert all(sorted(order) == list(range(20)) for both in orders.values() for order in both)
    with raises(ConfigurationError, "unknown-name", "order"):
        epoch_order("XX", 3, 1, 1)


def test_every_step_has_noise_of_its_own_with_the_right_spread():
    """200,000 normals: their standard deviation is within 1.5 % with a false alarm below 1e-20."""
    rows = np.stack(list(step_noise(b"k" * 32, 400, 500, 2.5, "exact")))
    assert rows.std() == pytest.approx(2.5, rel=0.015)
    assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.02
    assert (rows == np.stack(list(step_noise(b"k" * 32, 400, 500, 2.5, "exact")))).all()
    assert not np.allclose(rows[0], next(step_noise(b"j" * 32, 1, 500, 2.5, "exact")))


def test_a_silo_records_every_epoch_and_stops_at_its_cap_and_budget():
    ledger, seen = MemoryLedger(), []
    privatizer = ShuffledPrivatizer(policy(budget_mu=0.8), 5, 6, ledger, SimulatedKeys(1, "0"))

    def epoch(release, noise):
        seen.append((release, np.stack(list(noise))))
        return np.full(5, 0.25 * release)

    ends = [privatizer.release_epoch("s", k, epoch) for k in range(4)]
    assert [end.release for end in ends] == [1, 2, 3, 4]
    assert ends[2].values == pytest.approx(np.full(5, 0.75), abs=privatizer.plan.grid.spacing)
    assert [rows.shape for _, rows in seen] == [(11, 5)] * 4
    assert not np.allclose(seen[0][1], seen[1][1])
    statement = privatizer.statement("s")
    assert (statement.releases, statement.samples_used) == (4, 6)
    assert statement.mu_spent == pytest.approx(0.7)
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        privatizer.release_epoch("s", 4, epoch)
    with raises(RefusedError, "refused", code=protocol.BUDGET_EXHAUSTED, match="budget"):
        privatizer.release_epoch("other", 0, epoch)
    assert len(seen) == 4, "a refusal computes nothing"
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="does not know"):
        ShuffledPrivatizer(policy(), 5, 6, MemoryLedger(), SimulatedKeys(1, "0")).release_epoch("s", 3, epoch)
