"""Privacy that is asked for as a mu or as an epsilon: exactly one of them, and never less private than was said."""

from dataclasses import replace

import pytest
from murmurfl.clients import UpdateNode, UpdatePolicy
from murmurfl.privacy import (
    ConfigurationError,
    PrivacyPolicy,
    centring_policy,
    evaluation_policy,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
)
from murmurfl.privacy.accounting.gdp import asked_mu
from murmurfl.privacy.machine.shuffled_machine import ShuffledPolicy
from murmurfl.privacy.side.evaluation_query import counting_policy


def of_samples(**asked):
    return PrivacyPolicy(clip_norm=1.0, batch_size=2, max_participations=5, **asked)


def of_updates(**asked):
    return UpdatePolicy(clip_norm=1.0, max_participations=5, **asked)


def of_epochs(**asked):
    return ShuffledPolicy(clip_norm=1.0, batch_size=4, max_participations=5, **asked)


def of_a_mean(**asked):
    return centring_policy(1.0, nonnegative=True, **asked)


POLICIES = [of_samples, of_updates, of_epochs, of_a_mean, counting_policy, evaluation_policy]


@pytest.mark.parametrize("made", POLICIES)
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_every_policy_takes_an_epsilon_in_the_place_of_a_mu(made, delta):
    policy = made(epsilon=4.0, delta=delta)
    assert policy.mu == gdp_mu(4.0, delta)
    assert 4.0 * (1 - 1e-9) < gdp_epsilon(policy.mu, delta) <= 4.0
    assert made(mu=policy.mu, delta=delta) == policy


@pytest.mark.parametrize("made", POLICIES)
def test_both_are_refused_and_so_is_neither(made):
    with pytest.raises(ConfigurationError, match=r"Expected mu or epsilon, got both: mu = 1.0, epsilon = 4.0\."):
        made(mu=1.0, epsilon=4.0)
    with pytest.raises(
        ConfigurationError, match=r"Expected mu or epsilon, a number > 0, got mu = 0\.0 and epsilon = None"
    ):
        made()


@pytest.mark.parametrize("made", POLICIES)
def test_a_policy_is_altered_as_before(made):
    policy = made(epsilon=4.0)
    assert replace(policy) == policy
    assert replace(policy, delta=1e-6).mu == policy.mu  # what is kept is the mu
    assert replace(policy, mu=2.0, budget_mu=None).mu == 2.0
    assert replace(policy, mu=0.0, epsilon=1.0).mu == gdp_mu(1.0, 1e-5)
    with pytest.raises(ConfigurationError, match="got both"):
        replace(policy, epsilon=1.0)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"mu": -1.0}, "Expected mu > 0 and finite, got -1.0"),
        ({"mu": float("inf")}, "Expected mu > 0 and finite, got inf"),
        ({"mu": True}, "Expected mu > 0 and finite, got True"),
        ({"epsilon": 0.0}, "Expected epsilon > 0 and finite, got 0.0"),
        ({"epsilon": -4.0}, "Expected epsilon > 0 and finite, got -4.0"),
        ({"epsilon": float("nan")}, "Expected epsilon > 0 and finite, got nan"),
        ({"epsilon": "4"}, "Expected epsilon > 0 and finite, got '4'"),
        ({"epsilon": 4.0, "delta": 1.0}, "Expected delta > 0 and < 1"),
    ],
)
def test_what_is_no_amount_of_privacy_is_refused(asked, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        of_samples(**asked)


def test_an_epsilon_is_never_rounded_to_less_privacy():
    for epsilon in (0.01, 0.5, 1.0, 3.0, 10.0, 100.0):
        for delta in (1e-3, 1e-5, 1e-10):
            assert gdp_delta(asked_mu(0.0, epsilon, delta), epsilon) <= delta


def test_an_operators_epsilon_beside_a_mu_that_somebody_chose_is_refused():
    def node(stated, **asked):
        return UpdateNode(machine="1", ledger="ledger.sqlite", updates=of_updates(**asked), epsilon=stated)

    assert node(3.0, epsilon=3.0).updates.mu == gdp_mu(3.0, 1e-5)
    assert node(0.0, mu=0.1).updates.mu == 0.1
    for asked in ({"mu": 0.1}, {"epsilon": 2.0}):
        with pytest.raises(ConfigurationError, match="Expected mu or epsilon, got both"):
            node(24.0, **asked)
