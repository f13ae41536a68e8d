"""From a client's policy to its noise: what is charged, what is promised, what is refused."""

import json
import math
from dataclasses import replace

import pytest
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SumAssumption, gdp_epsilon
from murmurfl.privacy.accounting.loss import MOST_SUMMED
from murmurfl.privacy.noise import LARGEST_NORMAL
from murmurfl.privacy.release.policy import check_federation, read_fields

from tests.harness.errors import raises


def policy(**changes):
    return PrivacyPolicy(**{"clip_norm": 2.0, "batch_size": 4, "max_participations": 30, "mu": 1.0, **changes})


SCHEDULES = ["uniform", "harmonic", "paper"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mu", [0.1, 1.0, 16.0])
def test_mu_of_all_releases_never_exceeds_the_configured(schedule, mu):
    plan = policy(schedule=schedule, mu=mu).plan(7850)
    sigmas = plan.noise_std * plan.mechanism.sigmas
    total = plan.sensitivity * math.sqrt(sum(1 / sigma**2 for sigma in sigmas))
    assert plan.mu == pytest.approx(total)
    assert plan.mu <= mu
    if schedule != "paper":
        assert plan.mu == pytest.approx(mu)
    assert plan.epsilon(1e-5) == gdp_epsilon(plan.mu, 1e-5)


def test_third_of_releases_spends_third_of_squared_mu():
    alone = {"mechanism": "independent", "release_rule": "paper"}
    plan = policy(**alone, sample_participations=3, min_separation=10).plan(10**8)
    assert plan.resolution_mu > 1e-5
    assert plan.spent_mu(10) ** 2 == pytest.approx(plan.mu**2 / 3, rel=1e-11)


def test_participations_are_limited_by_the_cap():
    asked = [(1, 1, 30), (3, 10, 30), (5, 10, 30), (5, 10, 31), (5, 30, 30)]
    made = [policy(sample_participations=k, min_separation=s, max_participations=most) for k, s, most in asked]
    assert [one.participations for one in made] == [1, 3, 3, 4, 1]


def test_range_of_normals_is_checked_for_all_participations(monkeypatch):
    asked = []
    monkeypatch.setattr("murmurfl.privacy.release.policy.range_problem", lambda shift, *_: asked.append(shift) or "")
    alone = {"mechanism": "independent", "release_rule": "paper", "mu": 0.9871}  # plans are made once, so its own
    plan = policy(**alone, sample_participations=3, min_separation=10).plan(10)
    assert asked == [pytest.approx(plan.mu)]
    assert plan.mu > 1.7 * plan.sensitivity / plan.noise_std


def test_rounding_to_the_grid_is_charged():
    plan = policy().plan(7850)
    delta = 2 * 2.0 / 4
    assert plan.sensitivity == pytest.approx(delta + plan.grid.spacing * math.sqrt(7850), rel=1e-12)
    assert delta < plan.sensitivity < delta * 1.002
    assert plan.grid.spacing <= 2.0**-20 * plan.noise_std * plan.mechanism.sigmas.min()


def test_mu_of_some_releases_is_that_of_the_leading_block():
    plan = policy().plan(10)
    assert plan.spent_mu(0) == 0
    assert plan.spent_mu(30) == pytest.approx(plan.mu)
    assert plan.spent_mu(12) == pytest.approx(plan.mu * math.sqrt(12 / 30))


def test_independent_noise_needs_no_composition_when_samples_are_fresh():
    plan = policy(mechanism="independent").plan(10)
    assert plan.noise_std == pytest.approx(plan.sensitivity / 1.0)
    assert plan.spent_mu(30) == pytest.approx(plan.spent_mu(1)) == pytest.approx(1.0)


def test_a_trusted_servers_client_claims_no_guarantee_of_its_own():
    plan = policy(trust="trusted-server").plan(10)
    assert plan.noise_std == 0
    assert plan.mu == math.inf
    assert plan.spent_mu(1) == math.inf


def test_local_budget_allows_what_a_share_of_noise_leaves():
    """Alone its noise is that of one of min_honest clients, so that mu is sqrt(min_honest) times as much."""
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(9, 18)}
    assert policy(budget_mu=2.0, **sums).budget.worst_case.mu == pytest.approx(6.0)
    assert policy(**sums).budget.worst_case.mu == pytest.approx(3.0)
    assert policy(budget_local_mu=4.0, **sums).budget.worst_case.mu == 4.0


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"mu": -1.0},
        {"mu": math.inf},
        {"mu": "4"},
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"max_participations": True},
        {"budget_mu": 0.0},
        {"delta": 0.0},
        {"mechanism": "no noise"},
        {"mechanism": "none", "schedule": "uniform"},
        {"schedule": "linear"},
        {"noise_quality": "float16"},
        {"release_rule": "latest"},
        {"trust": "everybody"},
        {"mechanism": "independent", "schedule": "uniform"},
    ],
)
def test_impossible_policies_are_refused(changes):
    with pytest.raises(ConfigurationError, match="Expected"):
        policy(**changes)


@pytest.mark.parametrize("name", ["batch_size", "max_participations", "sample_participations", "min_separation"])
def test_counts_that_no_array_is_made_for_are_refused_by_name(name):
    for count in (2**31, 2**63, 2**100):
        with raises(ConfigurationError, "out-of-range", name):
            policy(**{name: count}, mechanism="independent")


def test_there_is_no_plan_without_parameters_or_finite_noise():
    with raises(ConfigurationError, "out-of-range", "num_parameters"):
        policy().plan(0)
    with raises(ConfigurationError, "out-of-range", "mu", match="too small"):
        policy(mu=1e-310, noise_quality="fast").plan(10)


def test_sums_account_for_so_many_clients_where_samples_return():
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(2, 2)}
    twice = {"sample_participations": 2, "min_separation": 15}
    check_federation(policy(**sums, **twice), MOST_SUMMED)
    with raises(ConfigurationError, "out-of-range", "clients"):
        check_federation(policy(**sums, **twice), MOST_SUMMED + 1)
    for others in (sums, twice, {**sums, **twice, "mechanism": "independent", "release_rule": "paper"}):
        check_federation(policy(**others), MOST_SUMMED + 1)


@pytest.mark.parametrize("mechanism", ["independent", "cancelling", "tree", "decay"])
def test_the_largest_value_of_a_release_is_no_smaller_than_its_noise_may_be(mechanism):
    plan = policy(mechanism=mechanism, mu=0.01).plan(10)
    largest = max(plan.mechanism.row_std(release) for release in range(1, 31))
    assert plan.largest_value > 2 * LARGEST_NORMAL * plan.noise_std * largest


def test_the_resolution_of_fast_noise_is_not_counted():
    for trust in ({}, {"trust": "secure-aggregation", "sums": SumAssumption(2, 2)}):
        assert policy(noise_quality="fast", **trust).plan(10).resolution_mu == 0.0
        assert policy(**trust).plan(10).resolution_mu > 0.0


def test_a_mu_beyond_exact_arithmetic_is_refused():
    with raises(ConfigurationError, "out-of-range", "mu"):
        policy(mu=1e12, noise_quality="fast").plan(10)


def test_the_fingerprint_names_policy_and_model():
    assert policy().plan(10).fingerprint == policy().plan(10).fingerprint
    assert len({policy().plan(10).fingerprint, policy().plan(11).fingerprint, policy(mu=2.0).plan(10).fingerprint}) == 3


def test_names_of_before_are_refused_with_the_new_one():
    for name in ("min_honest", "min_cohort"):
        with pytest.raises(ConfigurationError, match=r"sums=SumAssumption\(min_honest"):
            PrivacyPolicy(1.0, 1, 1, 1.0, trust="secure-aggregation", **{name: 2})
        with pytest.raises(ConfigurationError, match=r"sums=SumAssumption\(min_honest"):
            replace(PrivacyPolicy(1.0, 1, 1, 1.0), **{name: 2})
    with pytest.raises(ConfigurationError, match=r"sums=SumAssumption\(min_honest"):
        PrivacyPolicy(1.0, 1, 1, 1.0, trust="secure-aggregation", sums=(2, 3))
    for made in (lambda: PrivacyPolicy(1.0, 1, 1, 1.0, order="all"), lambda: replace(policy(), order="all")):
        with raises(ConfigurationError, "unknown-name", "order") as caught:
            made()
        assert "'full_batch' for 'all'" in str(caught.value)


DIGESTS = [
    "582429602e9970ab9a947e25c3ca7669e01305dba7162868d020dff3943f1310",
    "493bae976ad0619769ce3d9c91928e8ae31f6c97b688d9225ce97fc3f11765c2",
]
"""Of policies of an earlier version: clients of both versions may share a sum, and a session goes on."""
SELECTIONS = [("once", "in-turn"), ("cyclic", "again"), ("full_batch", "all"), ("shuffled", "secret")]


@pytest.mark.parametrize(("selection", "word"), SELECTIONS)
def test_a_ledger_keeps_its_words_for_the_batch_selection(selection, word):
    terms = json.loads(policy(mechanism="independent", batch_size=1, batch_selection=selection).terms(10))
    assert "batch_selection" not in terms
    assert terms.get("order", "in-turn") == word
    assert read_fields({**terms, "order": word})["batch_selection"] == selection


@pytest.mark.parametrize("word", ["sideways", "full_batch", None, ["all"]])
def test_a_word_of_no_batch_selection_is_not_read(word):
    with pytest.raises(ValueError, match="in-turn"):
        read_fields({"order": word})


def test_the_digest_of_shared_terms_stays_what_it_was():
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(2, 3), "mechanism": "independent", "batch_size": 1}
    modes = [policy(**sums), policy(**sums, release_rule="paper")]
    assert [one.release_mode for one in modes] == ["cumulative", "independent"]
    assert [one.shared_terms(10) for one in modes] == DIGESTS
