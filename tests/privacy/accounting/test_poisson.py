"""What Poisson batches are worth: numbers against quadrature, dp-accounting and draws, and mistakes that would show.

Statistical tests state how often they fail by chance, for another seed than theirs.
"""

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from murmurfl.privacy import (
    Amplification,
    ConfigurationError,
    Loss,
    PrivacyPolicy,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
    poisson_delta,
    poisson_epsilon,
    poisson_mu,
    poisson_profile,
    server_guarantee,
)
from murmurfl.privacy.accounting.poisson import LARGEST_SHIFT, MOST_ROUNDS, loss_sum, sampling_amplification
from scipy.stats import norm

from tests.harness.errors import raises

DELTA = 1e-5
PAIRS = [(1.0, 0.1), (0.5, 0.3), (2.0, 0.05), (3.0, 0.01), (0.2, 0.9)]
"""m and q."""


def mixtures(x, shift, rate):
    """Densities with a sample and with another one in its place, in one round."""
    base = (1 - rate) * norm.pdf(x)
    return base + rate * norm.pdf(x - shift), base + rate * norm.pdf(x + shift)


def by_quadrature(shift, rate, rounds, epsilon, *, mirrored=False):
    """Delta of one round or two, by the trapezoidal rule."""
    x = np.linspace(-9 - shift, 9 + shift, 20_001 if rounds == 1 else 2_401)
    with_it, without = mixtures(x, shift, rate)
    if mirrored:
        with_it, without = without, with_it
    for _ in range(rounds - 1):
        with_it, without = np.outer(with_it, with_it), np.outer(without, without)
    return float(np.maximum(with_it - math.exp(epsilon) * without, 0.0).sum()) * (x[1] - x[0]) ** rounds


def by_pld(noise_multiplier, rate, rounds, delta=DELTA):
    """Epsilon by dp-accounting, whose noise multiplier is sigma / S."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)), rounds)
    return PLDAccountant(NeighboringRelation.REPLACE_ONE).compose(event).get_epsilon(delta)


def mu_of(shift, rounds):
    return 2 * shift * math.sqrt(rounds)


@pytest.mark.parametrize("mirrored", [False, True], ids=["with it", "without it"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("shift", "rate"), PAIRS)
def test_one_round_and_two_are_what_quadrature_says_and_never_less(shift, rate, rounds, mirrored):
    for epsilon in (0.0, 0.1, 1.0):
        exact = by_quadrature(shift, rate, rounds, epsilon, mirrored=mirrored)
        claimed = poisson_delta(mu_of(shift, rounds), rate, rounds, epsilon)
        assert exact <= claimed * (1 + 1e-6)
        assert claimed == pytest.approx(exact, rel=6e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("noise", "rate", "rounds"),
    [(1.0, 0.01, 1000), (2.0, 0.05, 400), (0.5, 0.01, 500), (4.0, 0.2, 100), (10.0, 0.9, 50)],
)
def test_many_rounds_agree_with_pld_accounting(noise, rate, rounds):
    found, theirs = poisson_epsilon(mu_of(1 / noise, rounds), rate, rounds, DELTA), by_pld(noise, rate, rounds)
    assert found == pytest.approx(theirs, rel=2e-3)
    assert found >= theirs * (1 - 1e-4), "theirs is rounded up, too"


def test_a_noise_in_units_of_what_replacement_moves_would_be_caught():
    """Whoever takes sigma / (2 S) for sigma / S, or the reverse, is off by far more than this."""
    mu, rate, rounds = 20.0, 0.05, 400
    assert poisson_epsilon(mu, rate, rounds, DELTA) == pytest.approx(
        by_pld(2 * math.sqrt(rounds) / mu, rate, rounds), rel=2e-3
    )
    assert by_pld(math.sqrt(rounds) / mu, rate, rounds) > 2 * poisson_epsilon(mu, rate, rounds, DELTA)
    assert 2 * by_pld(4 * math.sqrt(rounds) / mu, rate, rounds) < poisson_epsilon(mu, rate, rounds, DELTA) * 1.1


def test_adding_a_sample_alone_would_claim_too_little():
    """An account of one direction of adding or removing is exceeded by what replacement shows."""
    shift, rate, epsilon = 1.0, 0.1, 0.5
    x = np.linspace(-10, 10, 20_001)
    with_it, _ = mixtures(x, shift, rate)
    for one, other in ((with_it, norm.pdf(x)), (norm.pdf(x), with_it)):
        alone = np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * (x[1] - x[0])
        assert alone < 0.9 * by_quadrature(shift, rate, 1, epsilon) <= poisson_delta(mu_of(shift, 1), rate, 1, epsilon)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_no_two_rows_within_the_clip_are_further_apart_than_opposite_ones(rate):
    """The hockey-stick of rows in any direction, by quadrature in the plane."""
    generator, shift, step = np.random.Generator(np.random.Philox(key=3)), 1.0, 0.05
    axis = np.arange(-8, 8, step)
    plane = np.stack(np.meshgrid(axis, axis), axis=-1)

    def density(row):
        here = np.exp(-((plane - row) ** 2).sum(axis=-1) / 2) / (2 * math.pi)
        return (1 - rate) * np.exp(-(plane**2).sum(axis=-1) / 2) / (2 * math.pi) + rate * here

    def apart(row, other, epsilon):
        return np.maximum(density(row) - math.exp(epsilon) * density(other), 0.0).sum() * step**2

    for epsilon in (0.0, 0.05, 0.3):
        most = apart(np.array([shift, 0.0]), np.array([-shift, 0.0]), epsilon)
        assert most == pytest.approx(by_quadrature(shift, rate, 1, epsilon), rel=1e-3)
        for _ in range(30):
            angles, lengths = generator.uniform(0, 2 * math.pi, 2), shift * np.sqrt(generator.uniform(0, 1, 2))
            rows = lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
            assert apart(rows[0], rows[1], epsilon) <= most * (1 + 1e-6)
        # A pair of a row and no row, as if a sample were added, is not the worst.
        assert apart(np.array([shift, 0.0]), np.zeros(2), epsilon) < most


def test_drawing_from_the_pair_stays_below_within_its_error():
    """Fails for 1 seed in 10^4."""
    shift, rate, rounds, draws = 0.8, 0.1, 30, 200_000
    generator = np.random.Generator(np.random.Philox(key=17))
    losses = np.zeros(draws)
    for _ in range(rounds):
        x = generator.standard_normal(draws) + shift * (generator.random(draws) < rate)
        with_it, without = mixtures(x, shift, rate)
        losses += np.log(with_it / without)
    for epsilon in (0.5, 2.0, 4.0):
        drawn = np.maximum(-np.expm1(epsilon - losses), 0.0) * (losses > epsilon)
        claimed = poisson_delta(mu_of(shift, rounds), rate, rounds, epsilon)
        assert drawn.mean() <= claimed + 4 * drawn.std() / math.sqrt(draws)
        assert drawn.mean() >= claimed * 0.99 - 4 * drawn.std() / math.sqrt(draws), "and it is no loose bound"


def test_every_round_counts():
    """Fewer rounds than there are would claim too little: epsilon grows with each."""
    shift, rate = 0.8, 0.1
    found = [poisson_epsilon(mu_of(shift, rounds), rate, rounds, DELTA) for rounds in (1, 2, 3, 10, 11, 100, 101)]
    assert all(one < other for one, other in pairwise(found))


def test_without_sampling_it_is_the_gaussian_mechanism_and_never_more():
    assert poisson_epsilon(2.0, 1.0, 10, DELTA) == gdp_epsilon(2.0, DELTA)
    near = poisson_epsilon(2.0, 1 - 1e-9, 10, DELTA)
    assert near == pytest.approx(gdp_epsilon(2.0, DELTA), rel=1e-3)
    for rate in (0.001, 0.1, 0.9):
        for mu in (0.01, 1.0, 10.0, 100.0):
            assert poisson_epsilon(mu, rate, 50, DELTA) <= gdp_epsilon(mu, DELTA)
            assert poisson_delta(mu, rate, 50, 0.3) <= gdp_delta(mu, 0.3)
    assert poisson_delta(0.0, 0.1, 5, 1.0) == poisson_epsilon(0.0, 0.1, 5, DELTA) == 0.0


def test_what_is_not_worked_out_is_not_amplified():
    mu = 2 * LARGEST_SHIFT * 1.01
    assert poisson_epsilon(mu, 0.1, 1, DELTA) == gdp_epsilon(mu, DELTA)
    assert poisson_epsilon(1.0, 0.1, MOST_ROUNDS + 1, DELTA) == gdp_epsilon(1.0, DELTA)


def test_sums_of_losses_keep_their_mass_and_the_mean_of_the_ratio():
    """The mean of Q / P under P is 1 if no cell is lost; whatever was raised from below lowers it."""
    for shift, rate, rounds in [(1.0, 0.1, 1), (0.5, 0.3, 7), (2.0, 0.05, 100)]:
        found = loss_sum(shift, rate, rounds)
        assert found.masses.min() >= 0.0
        assert found.masses.sum() + found.lost == pytest.approx(1.0, abs=1e-9)
        assert found.lost < 1e-15
        assert 1 - 1e-6 < float(found.masses @ np.exp(-found.losses)) < 1 + 1e-9


@pytest.mark.parametrize(("epsilon", "rate", "rounds"), [(0.5, 0.02, 300), (2.0, 0.1, 100), (8.0, 0.5, 20)])
def test_calibration_is_the_inverse(epsilon, rate, rounds):
    mu = poisson_mu(epsilon, rate, rounds, DELTA)
    assert poisson_epsilon(mu, rate, rounds, DELTA) <= epsilon
    assert poisson_epsilon(mu * 1.02, rate, rounds, DELTA) > epsilon
    assert mu > 1.2 * poisson_mu(epsilon, 1.0, rounds, DELTA)


def test_what_the_resolution_of_normals_shows_is_added():
    plain = poisson_epsilon(10.0, 0.05, 400, DELTA)
    assert plain < poisson_epsilon(10.0, 0.05, 400, DELTA, resolution_mu=1e-3) < plain * 1.02
    assert poisson_epsilon(10.0, 0.05, 400, DELTA, resolution_mu=0.5) > plain + gdp_epsilon(0.5, DELTA) - 0.1
    with raises(ConfigurationError, "out-of-range", "resolution_mu"):
        poisson_epsilon(1.0, 0.05, 400, DELTA, resolution_mu=1.0)


def test_it_is_booked_as_a_curve_and_ledgers_count_the_mu():
    curve = poisson_profile(10.0, 0.05, 400)
    assert curve.epsilon(DELTA) == pytest.approx(poisson_epsilon(10.0, 0.05, 400, DELTA), rel=1e-6)
    assert curve.delta(1.0) == poisson_delta(10.0, 0.05, 400, 1.0)
    loss = Loss(curve, curve).compose(Loss.of(1.0))
    assert loss.mu == pytest.approx(math.hypot(10.0, 1.0))
    assert curve.epsilon(DELTA) < loss.assumed.epsilon(DELTA) < gdp_epsilon(10.0, DELTA)


def test_the_sentence_says_both_figures_and_who_must_not_learn_the_batches():
    policy = PrivacyPolicy(
        *(1.0, 1, 400), mu=10.0, mechanism="independent", release_rule="paper", trust="trusted-server",
        batch_selection="poisson", sampling_rate=0.05,
    )  # fmt: skip
    guarantee = server_guarantee(policy, 10.0, "fresh", 400, amplified=Amplification(1.2345, 400, True, rate=0.05))
    assert guarantee.epsilon == gdp_epsilon(10.0, DELTA)
    assert guarantee.document()["epsilon_amplified"] == 1.2345
    hidden = "While nobody but that server learns in which of 400 rounds a sample is, in each with probability 0.05"
    assert f"{hidden}, epsilon = 1.235 at the same delta." in guarantee.sentence


def test_an_amplification_counts_rounds_clip_and_rounding():
    common = {"mechanism": "independent", "release_rule": "paper", "trust": "trusted-server"}
    policy = PrivacyPolicy(
        clip_norm=3.0,
        batch_size=1,
        max_participations=50,
        mu=9.0,
        batch_selection="poisson",
        sampling_rate=0.1,
        **common,
    )

    def epsilon(**changes):
        given = {"rounds": 50, "noise_std": 6.0, "rounding": 0.0, "resolution_mu": 0.0, **changes}
        return sampling_amplification(policy, 4, **given).epsilon

    assert epsilon() == pytest.approx(by_pld(2.0, 0.1, 50), rel=2e-3), "sigma over the clip"
    assert epsilon(rounds=1000) == epsilon(), "a client caps its releases"
    assert epsilon(rounds=20) == pytest.approx(by_pld(2.0, 0.1, 20), rel=2e-3)
    assert epsilon(rounding=0.3) == pytest.approx(by_pld(6.0 / 3.3, 0.1, 50), rel=2e-3)
    assert epsilon(resolution_mu=0.1) > epsilon()


@pytest.mark.parametrize(
    ("given", "setting"),
    [((1.0, 0.0, 5), "rate"), ((1.0, 1.1, 5), "rate"), ((-1.0, 0.1, 5), "mu"), ((1.0, 0.1, 0), "rounds")],
)
def test_impossible_batches_are_refused(given, setting):
    with raises(ConfigurationError, "out-of-range", setting):
        poisson_epsilon(*given, DELTA)


def test_the_pages_noise_multipliers_are_the_accounts():
    """Those of a fixed order are plain composition: a sample is in q T rounds."""
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d., ]*?) ?\| (0\.5|2|8) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    rate, rounds = 0.0, 0
    for of, *figures in rows:
        if of.strip():
            first, second = of.split(", ")
            rate, rounds = float(first), int(second.replace(",", ""))
        epsilon, fixed, sampled, times = map(float, figures)
        assert 2 * math.sqrt(rounds * rate) / gdp_mu(epsilon, DELTA) == pytest.approx(fixed, rel=6e-3)
        assert 2 * math.sqrt(rounds) / poisson_mu(epsilon, rate, rounds, DELTA) == pytest.approx(sampled, rel=6e-3)
        assert fixed / sampled == pytest.approx(times, rel=3e-2)
