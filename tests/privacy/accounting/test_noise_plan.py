"""The plan's figures: those of a client by itself as ever, and those of sums under secure aggregation."""

import math

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    PrivacyPolicy,
    ShuffledPolicy,
    SumAssumption,
    gdp_epsilon,
    make_mechanism,
)
from murmurfl.privacy.accounting.noise_plan import Summing
from murmurfl.privacy.noise import LARGEST_RADIUS, range_problem, resolution_mu, summed_range_problem
from murmurfl.privacy.release.policy import MOST_CLIENTS, MOST_SUMMED

from tests.harness.errors import raises

H = 16
SIZE = 100


def policy(**changes):
    settings = {"clip_norm": 2.0, "batch_size": 4, "max_participations": 12, "mu": 1.0}
    return PrivacyPolicy(**{**settings, **changes})


def summed(**changes):
    return policy(**{"trust": "secure-aggregation", "sums": SumAssumption(H, H + 4), **changes})


# Of the version before there was secure aggregation: a session begun then goes on only if these stay as they are.
BEFORE = {
    "eee0233911ccff90fc6f0f614689687b450927fab7868b5d7138d30cb37c131f": {},
    "a80878d4590476cc1b0a5b89bba6d6b89cd483fdf191560b1524f611dff05cbe": {"trust": "trusted-server"},
    "1bc968e0a018ad43df61c2520a49f0d47841b9e100f3f0d02af1a6332752a123": {"mechanism": "none"},
    "b4ecac4b88bafdafe4b4bc595adf27422dac8dd18e0d4c64d1cf1174afb49fcf": {
        "mechanism": "tree", "budget_mu": 3.0, "delta": 1e-6,
    },
    "df4341f02e2fe40c7b54e30fa600e46166ed9c29bad68fee4d449b13312d1391": {
        "schedule": "harmonic", "clip_unit": "update", "sample_participations": 3, "min_separation": 10,
    },
    "dfc08fb474f2ad841f737d3b0299ea36670d3c4a9a9c1b513cd9e8d6dee6ba58": {
        "mechanism": "independent", "release_rule": "paper", "noise_quality": "fast", "clip_unit": "contractive",
    },
}  # fmt: skip


def test_sessions_that_were_begun_before_secure_aggregation_go_on():
    found = {fingerprint: policy(max_participations=30, **made) for fingerprint, made in BEFORE.items()}
    assert {made.plan(7850).fingerprint: made for made in found.values()} == found
    silo = ShuffledPolicy(1.0, 10, 3, 1.0, private_steps=4, public_steps=6)
    assert silo.plan(7850).fingerprint == "0d943d312bcab59cd8a0b93b9ec03b0c7a32047b703b618ea45c1d5c36d5c83e"


def test_a_session_under_secure_aggregation_belongs_to_its_numbers_of_clients():
    made = [summed(), summed(sums=SumAssumption(H - 1, H + 4)), summed(sums=SumAssumption(H, H + 5)), policy()]
    assert len({one.plan(SIZE).fingerprint for one in made}) == len(made)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_sample_that_is_used_once_is_hidden_by_h_clients(mechanism):
    made = summed(mechanism=mechanism)
    plan, alone = made.plan(SIZE), policy(mechanism=mechanism, mu=math.sqrt(H)).plan(SIZE)
    assert plan.mu == 1.0
    assert plan.summing == pytest.approx(1 / 4, rel=1e-15)
    assert plan.noise_std == pytest.approx(alone.noise_std, rel=1e-9)
    assert plan.sensitivity == alone.sensitivity, "rounding is charged once"
    assert plan.loss.worst_case.mu == pytest.approx(math.sqrt(H), rel=1e-9)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("returning", [{}, {"sample_participations": 3, "min_separation": 4}], ids=["once", "returns"])
@pytest.mark.parametrize("honest", [1, 2, H])
@pytest.mark.parametrize("quality", ["exact", "fast"])
def test_the_local_mu_is_one_clients_guarantee(mechanism, returning, honest, quality):
    made = summed(mechanism=mechanism, sums=SumAssumption(honest, H + 4), noise_quality=quality, **returning)
    plan = made.plan(SIZE)
    encoder = make_mechanism(mechanism, 12)
    ideal = plan.sensitivity * encoder.sensitivity(**made.pattern) / plan.noise_std
    hint = resolution_mu(SIZE * 12, plan.grid.spacing / (plan.noise_std * encoder.rounded_std()[0]))
    assert plan.loss.worst_case.mu == pytest.approx(math.hypot(ideal, hint if quality == "exact" else 0.0), rel=1e-14)
    assert plan.loss.worst_case.mu >= ideal
    assert plan.mu <= plan.loss.worst_case.mu * (1 + 1e-9)


def test_a_client_by_itself_has_one_figure():
    for made in (policy(), policy(mechanism="tree", sample_participations=3, min_separation=4)):
        plan = made.plan(SIZE)
        assert plan.loss.worst_case.mu == plan.mu == 1.0
        assert plan.summing == 1.0
        assert plan.sums is None


def test_the_mu_of_one_client_charges_the_normals_of_all_its_releases():
    plan = policy(mu=0.01).plan(10**6)
    ideal = plan.sensitivity * plan.mechanism.sensitivity() / plan.noise_std
    told = resolution_mu(10**6 * 12, plan.grid.spacing / (plan.noise_std * math.sqrt(12.0)))
    assert plan.resolution_mu == pytest.approx(told, rel=1e-14)
    assert told > 1e-5 * plan.mu, "or nothing was tested"
    assert math.hypot(ideal, told) == pytest.approx(0.01, rel=1e-12)


def test_the_mu_of_sums_charges_all_clients_normals():
    plan = summed(mu=0.01).plan(10**6)
    ideal = plan.sensitivity * plan.mechanism.sensitivity() / plan.noise_std / 4
    told = resolution_mu(10**6 * 12 * MOST_SUMMED, plan.grid.spacing / (plan.noise_std * math.sqrt(12.0)))
    assert plan.resolution_mu == pytest.approx(told, rel=1e-14)
    assert told > 1e-4 * plan.mu, "or nothing was tested"
    assert ideal < plan.mu == 0.01
    assert math.hypot(ideal, told) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_turns_of_a_sample_that_returns_add_up(mechanism):
    made = summed(mechanism=mechanism, sample_participations=3, min_separation=4)
    plan = made.plan(SIZE)
    encoder = make_mechanism(mechanism, 12)
    column = np.linalg.norm(encoder.materialize(), axis=0).max()
    assert plan.sensitivity * 3 * column / (plan.noise_std * 4) == pytest.approx(1.0, rel=1e-9)
    pattern = encoder.sensitivity(3, 4, pattern="epochs")
    assert plan.loss.worst_case.mu == pytest.approx(4 * pattern / (3 * column), rel=1e-9)
    assert 1 / 4 <= plan.summing <= 3 / 4 + 1e-12


def test_releases_that_stand_alone_are_exact_for_returning_samples_too():
    made = summed(mechanism="independent", release_rule="paper", sample_participations=3, min_separation=4)
    plan = made.plan(SIZE)
    assert plan.mu == 1.0
    assert plan.sensitivity * math.sqrt(3) / (plan.noise_std * 4) == pytest.approx(1.0, rel=1e-9)
    assert plan.loss.worst_case.mu == pytest.approx(4.0, rel=1e-9)
    assert plan.spent_mu(4) == pytest.approx(1 / math.sqrt(3), rel=1e-9)
    built = summed(mechanism="independent", sample_participations=3, min_separation=4).plan(SIZE)
    assert built.noise_std == pytest.approx(math.sqrt(3) * plan.noise_std, rel=1e-5), "turns add up"


def test_a_sum_never_shows_more_than_its_releases_would():
    """With few honest clients added turns would be more than the client's own figure, which needs no sum."""
    for mechanism in MECHANISMS:
        plan = summed(
            mechanism=mechanism, sums=SumAssumption(1, H + 4), sample_participations=3, min_separation=4
        ).plan(SIZE)
        assert plan.summing == pytest.approx(1.0, rel=1e-12)
        assert plan.mu == pytest.approx(plan.loss.worst_case.mu, rel=1e-9)


def test_spent_mu_counts_clients_that_made_all_releases():
    plan = summed().plan(SIZE)
    assert plan.spent_mu(0) == 0.0
    assert plan.spent_mu(12) == plan.mu
    # One release of 12, uniform: by itself 1/12 of mu_local^2, and the other 15 hide it as they do after all of theirs.
    expected = 1 / math.sqrt(12 / H + (H - 1) / H)
    assert plan.spent_mu(1) == pytest.approx(expected, rel=1e-9)
    assert plan.spent_mu(1) > plan.mu / math.sqrt(12), "which a client by itself has spent"
    spent = [plan.spent_mu(k) for k in range(13)]
    assert spent == sorted(spent)
    fine = summed(mu=0.01).plan(10**6)
    ideal = fine.sensitivity * fine.summed_sensitivity(1) / fine.noise_std
    assert fine.spent_mu(1) == pytest.approx(math.hypot(ideal, fine.resolution_mu), rel=1e-12), "of all their normals"


def separation(encoder, opened, turns):
    """sqrt(v' S^+ v) of what all opened sums show of a sample: ``opened[i][t]`` is client i's last opened release in
    round t, ``turns`` the releases of client 0 that the sample is in."""
    rows = np.vstack([np.zeros(encoder.num_releases), encoder.decoder() @ encoder.materialize()])
    noise = np.vstack([np.zeros(encoder.decoder().shape[1]), encoder.decoder()])
    assert np.allclose(rows[1:], np.tri(encoder.num_releases))
    covariance = sum(noise[a] @ noise[a].T for a in opened)
    moved = sum((opened[0] >= turn).astype(float) for turn in turns)
    solved = np.linalg.lstsq(covariance, moved, rcond=1e-10)[0]
    assert np.allclose(covariance @ solved, moved, atol=1e-6), "a sum without noise would show the sample"
    return math.sqrt(moved @ solved)


def random_rounds(rng, releases, honest, rounds=8):
    """The last opened release of each of h clients, round by round: some are lost, and client 0 has all beside it."""
    opened, made = np.zeros((honest, rounds), dtype=int), np.zeros(honest, dtype=int)
    for t in range(rounds):
        wanted = np.ones(honest, dtype=bool) if rng.random() < 0.5 else rng.random(honest) < 0.5
        wanted[0] = wanted.all()
        made[wanted] += rng.integers(1, 3, wanted.sum())
        if (made > releases).any():
            return opened
        opened[:, t:] = made[:, None]
    return opened


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("returns", [False, True])
def test_no_pattern_of_openings_shows_more_than_was_charged(mechanism, returns):
    """Exact, for random patterns of a few clients; docs/proofs/secure-aggregation.md has what holds for all."""
    rng = np.random.default_rng(16)
    releases, honest = 6, 3
    encoder = make_mechanism(mechanism, releases)
    pattern = {"num_participations": 3, "min_separation": 2, "pattern": "epochs"} if returns else {}
    bound, closest = Summing(honest, is_memoryless=False), 0.0
    for _ in range(150):
        opened = random_rounds(rng, releases, honest)
        last = int(opened[0].max())
        if last == 0:
            continue
        for first in range(1, min(last, 2 if returns else last) + 1):
            turns = range(first, last + 1, 2) if returns else (first,)
            shown = separation(encoder, opened, turns)
            assert shown <= bound.sensitivity(encoder, pattern, n=last) * (1 + 1e-6)
            closest = max(closest, shown / bound.sensitivity(encoder, pattern))
    assert closest > 0.3, "or the bound says nothing"


def test_to_charge_only_ones_own_releases_would_be_seen():
    """The planted bug: one release made, the others hide it after five of theirs no better than that."""
    encoder = make_mechanism("cancelling", 6)
    opened = np.array([[0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    shown = separation(encoder, opened, (1,))
    assert shown > 1.1 * encoder.sensitivity(n=1) / math.sqrt(3)
    assert shown <= Summing(3, is_memoryless=False).sensitivity(encoder, {}, n=1)


def test_the_local_pattern_divided_by_sqrt_h_would_be_seen():
    """The planted bug: turns three releases apart here are closer to each other on another client."""
    encoder = make_mechanism("banded", 6, bands=2)
    pattern = {"num_participations": 3, "min_separation": 2, "pattern": "epochs"}
    opened = np.array([[1, 2, 3, 4, 5, 6], [1, 1, 2, 2, 3, 3]])
    worst = max(
        separation(encoder, np.array([opened[0], np.cumsum(steps)]), (1, 3, 5))
        for steps in [(1, 0, 1, 0, 1, 0), (1, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 1)]
    )
    assert worst > 1.01 * encoder.sensitivity(**pattern) / math.sqrt(2)
    assert worst <= Summing(2, is_memoryless=False).sensitivity(encoder, pattern)


def test_clients_share_a_sum_only_with_one_noise():
    terms = summed().shared_terms(SIZE)
    assert len(terms) == 64
    other = [
        summed(clip_norm=2.5),
        summed(max_participations=13),
        summed(mu=1.1),
        summed(sums=SumAssumption(H - 1, H + 4)),
        summed(mechanism="tree"),
        summed(schedule="harmonic"),
        summed(noise_quality="fast"),
        summed(mechanism="independent"),
        summed(mechanism="independent", release_rule="paper"),
        summed(mechanism="banded", mechanism_options={"bands": 2}),
        summed(mechanism="banded", mechanism_options={"bands": 3}),
        summed(sample_participations=3, min_separation=4),
    ]
    assert len({terms, summed().shared_terms(SIZE + 1), *(one.shared_terms(SIZE) for one in other)}) == len(other) + 2


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "uniform"},
        {"sums": SumAssumption(H, H + 9)},
        {"budget_mu": 3.0},
        {"budget_local_mu": 40.0},
        {"delta": 1e-6},
        {"clip_norm": 1.0, "batch_size": 2},
        {"clip_unit": "update", "clip_norm": 0.5},
        {"clip_norm": 2.0 * (1 + 1e-12)},
    ],
)
def test_what_the_noise_does_not_depend_on_clients_need_not_agree_on(changes):
    assert summed(**changes).shared_terms(SIZE) == summed().shared_terms(SIZE)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sums": SumAssumption(H + 5, H + 4)}, "min_honest <= min_cohort"),
        ({"sums": SumAssumption(H, MOST_SUMMED + 1)}, f"<= {MOST_SUMMED}"),
        ({"sums": SumAssumption(0, H)}, "min_honest"),
        ({"sums": SumAssumption(1, True)}, "min_cohort"),
        ({"budget_local_mu": 0.0}, "budget_local_mu"),
        ({"release_rule": "paper"}, "independent"),
        ({"trust": "untrusted-server"}, "only with trust 'secure-aggregation'"),
    ],
)
def test_impossible_policies_of_secure_aggregation_are_refused(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        summed(**changes)


@pytest.mark.parametrize("numbers", [(H, H), (H, MOST_SUMMED), (MOST_SUMMED, MOST_SUMMED)])
def test_a_sum_may_have_as_many_clients_as_a_plan_pays_for(numbers):
    assert summed(sums=SumAssumption(*numbers)).sums == SumAssumption(*numbers)


def test_epochs_are_refused_under_secure_aggregation():
    with raises(ConfigurationError, "conflict", "trust"):
        ShuffledPolicy(1.0, 10, 3, 1.0, trust="secure-aggregation", sums=SumAssumption(2, 3))


def test_local_mu_beyond_the_range_has_its_own_refusal():
    plan = summed(mechanism="independent", sums=SumAssumption(400, 400)).plan(SIZE)
    assert plan.mu == 1.0
    assert not plan.problem
    assert plan.loss.worst_case.mu == math.inf
    assert plan.local_problem.startswith("Expected mu_local <= ")
    assert "got 20" in plan.local_problem


def test_what_normals_miss_is_charged_exp_epsilon_times_to_a_sum():
    assert summed_range_problem(10**10, 1e-5, 1.0) == ""
    values, delta = 10**10, 1e-5
    missing = values * (2.0**-267 + math.exp(1.0 - LARGEST_RADIUS**2 / 2.0))
    largest = float(summed_range_problem(values, delta, 100.0).split("mu <= ")[1].split(" ")[0])
    assert missing * (1.0 + math.exp(gdp_epsilon(largest, delta))) <= delta * 2.0**-20
    assert missing * (1.0 + math.exp(gdp_epsilon(1.02 * largest, delta))) > delta * 2.0**-20
    assert summed_range_problem(values, delta, largest) == ""
    for problem in (summed_range_problem, lambda values, delta, mu: range_problem(mu, values, delta, mu)):
        least = float(problem(10**70, delta, 1e-3).split("delta >= ")[1].split(" ")[0])
        assert problem(10**70, least, 1e-3) == ""
        assert "delta >=" in problem(10**70, 0.97 * least, 1e-3)
    plan = summed(mu=16.0, sums=SumAssumption(1, 1)).plan(SIZE)
    assert plan.mu == math.inf
    assert plan.problem.startswith("Expected mu <= ")
    assert f" for sums of {SIZE * 12 * MOST_CLIENTS:,} values of noise" in plan.problem  # a server chooses its sets
