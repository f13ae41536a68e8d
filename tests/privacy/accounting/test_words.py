"""The words for noise come from the policy: a machine's, an epoch's, a trusted server's, and those of no noise."""

import doctest
import math

import pytest
from murmurfl.privacy import (
    NO_NOISE_WORDS,
    NOT_PRIVATE,
    ConfigurationError,
    PrivacyPolicy,
    ShuffledPolicy,
    epoch_words,
    policy_guarantee,
    server_guarantee,
    server_noise_words,
    stated_words,
)
from murmurfl.privacy.accounting import noise_plan as words

TRUSTING = PrivacyPolicy(1.0, 4, 6, 2.0, trust="trusted-server")


def test_the_examples_of_the_documentation_hold():
    assert doctest.testmod(words).attempted
    assert not doctest.testmod(words).failed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "cancelling (uniform) noise on each machine"),
        ({"mechanism": "tree"}, "tree noise on each machine"),
        ({"mechanism": "banded", "mechanism_options": {"bands": 3}}, "banded (3) noise on each machine"),
        ({"clip_unit": "update"}, "cancelling (uniform) noise on each machine, update sensitivity"),
        ({"trust": "secure-aggregation"}, "cancelling (uniform) noise on each machine, under masks"),
        ({"mechanism": "none"}, NO_NOISE_WORDS),
        ({"trust": "trusted-server"}, "no noise on the machine"),
        ({"trust": "trusted-server", "mechanism": "none"}, NO_NOISE_WORDS),
    ],
)
def test_a_policy_says_its_own_words(options, said):
    assert PrivacyPolicy(1.0, 4, 6, 2.0, **options).words == said


def test_a_silos_words_name_its_epochs_and_the_account_that_was_used():
    silo = ShuffledPolicy(1.0, 10, 3, 1.0, private_steps=4, public_steps=6)
    assert silo.words == epoch_words("amplified", 3)
    assert "3 epochs of each silo" in silo.words
    assert "plain composition" in ShuffledPolicy(1.0, 10, 3, 1.0).words, "no public step amplifies"
    assert ShuffledPolicy(1.0, 10, 3, 1.0, mechanism="none").words == NO_NOISE_WORDS


def test_a_trusted_server_vouches_for_its_own_noise_towards_everybody_else():
    made = server_guarantee(TRUSTING, 2.0, "tree", 9)
    assert made.trust == "trusted-server"
    assert made.mechanism == server_noise_words("tree", 9) == "tree noise of the server in each of 9 rounds"
    assert made.covers == "over all models it publishes"
    assert server_noise_words("fresh") == "fresh noise of the server in each round"
    assert "more than this noise can be vouched for" in server_guarantee(TRUSTING, math.inf, "tree").sentence
    with pytest.raises(ConfigurationError, match="trusted-server"):
        server_guarantee(PrivacyPolicy(1.0, 4, 6, 2.0), 2.0, "tree")


def test_without_noise_nothing_is_guaranteed_whoever_is_trusted():
    for trust in ("untrusted-server", "trusted-server"):
        policy = PrivacyPolicy(1.0, 4, 6, 2.0, mechanism="none", trust=trust)
        made = [policy_guarantee(policy, 2.0)]
        made += [server_guarantee(policy, 2.0, "tree", 9)] if trust == "trusted-server" else []
        for guarantee in made:
            assert math.isinf(guarantee.mu)
            assert guarantee.notes == (NOT_PRIVATE,)
            assert guarantee.trust == "untrusted-server", "nothing holds against anybody"


def test_a_machine_under_a_trusted_server_vouches_for_nothing_itself():
    made = policy_guarantee(TRUSTING, 2.0)
    assert math.isinf(made.mu)
    assert made.mechanism == "no noise on the machine"
    assert NOT_PRIVATE not in made.notes


def test_nobody_asked_is_nothing_spent():
    made = policy_guarantee(ShuffledPolicy(1.0, 10, 3, 1.0), 0.0)
    assert made.epsilon == 0.0
    assert made.mechanism == "nobody was asked"
    assert "nothing is spent" in made.sentence


def test_what_real_machines_state_stands_in_the_place_of_the_policys_words():
    said = stated_words(["tree", "blt", "tree", ""])
    assert said == "blt or tree noise on each machine, by its own account"
    assert stated_words(["tree"], masked=True) == "tree noise on each machine, under masks, by its own account"
    policy = PrivacyPolicy(1.0, 4, 6, 2.0)
    assert policy_guarantee(policy, 1.0, words=said).mechanism == said
    assert policy_guarantee(policy, 1.0, words=stated_words([])).mechanism == policy.words
    assert not policy_guarantee(policy, math.inf, stated=True).notes
    assert policy_guarantee(policy, math.inf).notes
