"""How much of a model will be noise: the closed forms, what would help, and what clients may state of it."""

import math

import numpy as np
import pytest
from murmurfl.privacy import (
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    ShuffledPolicy,
    SimulatedKeys,
    StatedNoise,
    SumAssumption,
    forecast_of,
    gdp_epsilon,
    protocol,
    stated_noise,
)
from murmurfl.privacy.accounting.noise_forecast import LEAST_USELESS, TYPICAL, kept_share
from murmurfl.privacy.release.policy import CLIP_UNITS

D, K, MU = 2500, 8, 1.5
UPDATES = {
    "clip_norm": 0.3,
    "batch_size": 1,
    "max_participations": K,
    "mu": MU,
    "mechanism": "independent",
    "clip_unit": "update",
    "sample_participations": K,
}
FULL = {"clip_norm": 2.0, "batch_size": 1, "max_participations": K, "mu": MU, "mechanism": "independent"}
ROUNDING = 1e-3
"""What the grid is charged for, relative."""


def stated(settings, samples=1, unit="sample", **changes):
    policy = PrivacyPolicy(**settings)
    plan = policy.plan(D)
    entries = {
        **stated_noise(policy, plan, samples),
        "mu-guaranteed": plan.mu,
        "delta": 1e-5,
        "max-participations": K,
        "mechanism": policy.mechanism,
        "trust": policy.trust,
        "unit": unit,
        **changes,
    }
    return StatedNoise.read(entries)


def forecast(one, clients=50, per_round=None, rounds=K, parameters=D):
    asked = per_round or clients
    return forecast_of([one], num_parameters=parameters, clients=clients, per_round=asked, rounds=rounds)


@pytest.mark.parametrize("clients", [1, 10, 400])
def test_relative_update_noise_is_independent_of_clip_and_rounds(clients):
    found = forecast(stated(UPDATES, unit="client"), clients)
    assert found.ratio == pytest.approx(2 * math.sqrt(D / clients) / MU, rel=ROUNDING)
    assert found.clip_unit == "update"


def test_clients_that_are_never_asked_do_not_help():
    one = stated(UPDATES, unit="client")
    few, many = (forecast(one, clients, per_round=5, rounds=4) for clients in (20, 100_000))
    assert many.ratio == few.ratio


def test_full_batches_are_divided_by_all_samples():
    found = forecast(stated({**FULL, "batch_selection": "full_batch", "release_rule": "paper"}, samples=30), clients=20)
    assert found.ratio == pytest.approx(2 * math.sqrt(D * 20) / (20 * 30 * MU), rel=ROUNDING)


def test_under_sums_a_client_states_its_share():
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(9, 9), "release_rule": "paper"}
    alone, summed = forecast(stated({**UPDATES, "release_rule": "paper"})), forecast(stated({**UPDATES, **sums}))
    assert summed.ratio == pytest.approx(alone.ratio / 3, rel=ROUNDING)


def test_what_is_asked_for_less_often_has_made_fewer_releases():
    """Half of the clients a round: half of the releases, whose noise is charged as if there were all of them."""
    once, half = forecast(stated(UPDATES)), forecast(stated(UPDATES), per_round=25)
    assert half.ratio == pytest.approx(once.ratio * math.sqrt(2), rel=ROUNDING)
    correlated = stated({**UPDATES, "mechanism": "tree"})
    assert forecast(correlated, per_round=25).ratio == pytest.approx(2 * forecast(correlated).ratio)


def test_an_epoch_of_noisy_steps_is_the_sum_of_them():
    policy = ShuffledPolicy(clip_norm=2.0, batch_size=40, max_participations=3, mu=1.0)
    plan = policy.plan(D)
    entries = stated_noise(policy, plan, 40)
    assert entries[protocol.LONGEST_RELEASE] == pytest.approx(80.0)
    assert entries[protocol.NOISE_IN_ALL] == pytest.approx(plan.noise_std * math.sqrt(3 * 40))
    assert entries[protocol.CLIP_UNIT] == "sample"


def test_a_sample_of_a_secret_order_is_in_one_release():
    policy = PrivacyPolicy(**{**FULL, "batch_selection": "shuffled", "batch_size": 5})
    assert stated_noise(policy, policy.plan(D), 80)[protocol.LONGEST_RELEASE] == pytest.approx(2.0 * 80 / (K * 5))


@pytest.mark.parametrize("settings", [UPDATES, {**FULL, "batch_selection": "full_batch"}])
@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_the_numbers_that_are_needed_are_just_enough(settings, mu):
    found = forecast(stated({**settings, "mu": mu}, samples=30))
    enough = forecast(stated({**settings, "mu": mu}, samples=30), clients=found.clients_needed)
    assert enough.verdict == "useful"
    if found.clients_needed > 1:
        fewer = forecast(stated({**settings, "mu": mu}, samples=30), clients=found.clients_needed - 1)
        assert fewer.typical_ratio > 1 - ROUNDING
    if found.parameters_needed:
        assert (
            forecast(stated({**settings, "mu": mu}, samples=30), parameters=found.parameters_needed).verdict == "useful"
        )
    more = forecast(stated({**settings, "mu": found.mu_needed * (1 + ROUNDING)}, samples=30))
    assert more.typical_ratio == pytest.approx(1.0, rel=2 * ROUNDING)
    assert found.epsilon_needed == gdp_epsilon(found.mu_needed, 1e-5)


def test_clients_needed_keep_the_share_of_honest_ones():
    def summed(clients, honest):
        sums = {"trust": "secure-aggregation", "sums": SumAssumption(honest, honest), "release_rule": "paper"}
        return forecast(stated({**UPDATES, **sums}, **{protocol.MIN_HONEST: honest}), clients)

    found = summed(20, 10)
    assert found.verdict == "useless"
    assert summed(found.clients_needed, found.clients_needed // 2).typical_ratio == pytest.approx(1, rel=0.02)


def test_the_verdict_follows_from_the_noise_over_a_typical_update():
    found = [forecast(stated({**UPDATES, "mu": mu}, unit="client")) for mu in (0.5, 1.0, 5.0, 10.0, 25.0)]
    assert [one.verdict for one in found] == ["useless", "useless", "noisy", "noisy", "useful"]
    assert [one.is_warning for one in found] == [True, True, True, True, False]
    assert [one.kept for one in found] == sorted(one.kept for one in found)
    assert found[0].typical_ratio == pytest.approx(found[0].ratio / TYPICAL["update"])
    assert kept_share(LEAST_USELESS) < 0.3
    assert kept_share(1.0) == pytest.approx(0.9)
    assert set(TYPICAL) == set(CLIP_UNITS)


def test_what_would_help_is_in_the_order_of_what_costs_least():
    found = forecast(stated(UPDATES, unit="client"), clients=40)
    ratios = {change.kind: change.ratio for change in found.changes()}
    assert list(ratios) == ["sample", "sums", "both", "clients", "parameters", "epsilon"]
    assert ratios["sums"] == pytest.approx(found.typical_ratio / math.sqrt(20))
    assert ratios["both"] == pytest.approx(ratios["sample"] / math.sqrt(20))
    assert ratios["clients"] == ratios["parameters"] == ratios["epsilon"] == 1.0
    amounts = {change.kind: change.amount for change in found.changes()}
    assert found.samples == 0
    assert amounts["sample"] == 100
    assert amounts["clients"] == found.clients_needed
    assert amounts["parameters"] == found.parameters_needed


def test_the_same_under_sums_is_what_clients_would_state_there():
    one = stated({**UPDATES, "release_rule": "paper"}, unit="client")
    sums = {"trust": "secure-aggregation", "sums": SumAssumption(25, 25), "release_rule": "paper"}
    assert forecast(one).summed().ratio == pytest.approx(forecast(stated({**UPDATES, **sums})).ratio, rel=ROUNDING)


def test_without_noise_there_is_nothing_to_say():
    assert forecast_of([], num_parameters=D, clients=2, per_round=2, rounds=K) is None
    silent = stated({**FULL, "mechanism": "none"})
    assert silent.noise == 0.0
    assert forecast(silent) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (protocol.LONGEST_RELEASE, 0.0),
        (protocol.LONGEST_RELEASE, math.inf),
        (protocol.LONGEST_RELEASE, 5e-324),
        (protocol.NOISE_IN_ALL, 1e300),
        (protocol.LONGEST_RELEASE, "far"),
        (protocol.NOISE_IN_ALL, -1.0),
        (protocol.NOISE_IN_ALL, math.nan),
        (protocol.NOISE_IN_ALL, True),
        (protocol.NOISE_IN_ALL, None),
        ("mu-guaranteed", math.nan),
        ("max-participations", 0),
        ("max-participations", 2.5),
        ("delta", 0.0),
        ("delta", "small"),
        (protocol.MIN_HONEST, 0),
        (protocol.MIN_HONEST, "half"),
    ],
)
def test_a_statement_that_is_none_makes_no_forecast(name, value):
    assert stated(UPDATES) is not None
    assert stated(UPDATES, **{name: value}) is None


@pytest.mark.parametrize("noise", [1e-300, 1e-90, 1e90])
def test_noise_that_no_client_has_makes_no_forecast(noise):
    loud = stated(UPDATES, **{protocol.NOISE_IN_ALL: noise})
    assert forecast(loud) is None
    assert forecast(stated(UPDATES)) is not None


def test_words_that_nobody_knows_are_taken_for_the_usual_ones():
    found = stated(UPDATES, **{protocol.CLIP_UNIT: "gradient", "unit": 3, "mechanism": "of my own"})
    assert (found.clip_unit, found.unit, found.alone) == ("sample", "sample", False)


def test_statements_do_not_depend_on_data_or_releases():
    policy = PrivacyPolicy(**FULL)
    privatizer = Privatizer(policy, D, K, MemoryLedger(), SimulatedKeys(1, "0"))
    before = stated_noise(privatizer.policy, privatizer.plan, privatizer.num_samples)
    privatizer.release("s", 0, lambda _: np.full((1, D), 1e9))
    assert stated_noise(privatizer.policy, privatizer.plan, privatizer.num_samples) == before


def test_the_typical_client_of_different_ones_is_their_mean():
    """Ten clients with ten times the noise of the others: lengths of independent noise add up in squares."""
    loud, quiet = stated({**UPDATES, "mu": 0.15}), stated(UPDATES)
    mixed = forecast_of([quiet, loud], num_parameters=D, clients=20, per_round=20, rounds=K)
    alone = forecast(quiet, clients=20)
    assert mixed.ratio == pytest.approx(alone.ratio * math.sqrt((1 + 100) / 2), rel=ROUNDING)
    assert mixed.mu == pytest.approx(MU)
