"""The standard sentence: complete, never an epsilon below the true one, and refused without one of its parts."""

import doctest
import math

import pytest
from murmurfl.privacy import (
    ConfigurationError,
    Guarantee,
    PrivacyPolicy,
    caption,
    gdp_epsilon,
    guarantee,
    policy_guarantee,
    rounded_up,
)


def test_the_examples_of_the_documentation_hold():
    assert doctest.testmod(guarantee).attempted >= 2
    assert not doctest.testmod(guarantee).failed


def test_the_sentence_names_delta_unit_relation_trust_and_mechanism():
    sentence = Guarantee(1.0, 1e-6, "blt noise on each machine", trust="trusted-server", unit="machine").sentence
    assert sentence == (
        "mu = 1 Gaussian DP, epsilon = 4.887 at delta = 1e-06, for replacement of all samples of one machine, against "
        "everybody but the trusted server; blt noise on each machine; over all releases its cap allows."
    )


@pytest.mark.parametrize(
    "part",
    [{"trust": "nobody"}, {"unit": "user"}, {"relation": "zero-out"}, {"mechanism": " "}, {"covers": ""},
     {"delta": 0.0}, {"delta": 1.0}, {"mu": -1.0}, {"mu": math.nan}],
)  # fmt: skip
def test_no_guarantee_without_its_parts(part):
    with pytest.raises(ConfigurationError, match="Expected"):
        Guarantee(**{"mu": 1.0, "delta": 1e-5, "mechanism": "tree noise", **part})


def test_no_noise_is_said_and_not_shown_as_a_figure():
    made = Guarantee(math.inf, 1e-5, "no noise was added")
    assert made.sentence.startswith("Nothing is guaranteed, epsilon is infinite at delta = 1e-05")
    assert made.document()["epsilon"] is made.document()["mu"] is None


@pytest.mark.parametrize("mu", [0.1, 0.25, 1.0, 3.0, 4.0, 7.77, 16.0, 123.0])
@pytest.mark.parametrize("shown", [{}, {"digits": 3}, {"places": 2}])
def test_a_shown_epsilon_is_never_below_the_true_one_and_close_to_it(mu, shown):
    epsilon = gdp_epsilon(mu, 1e-5)
    read = float(rounded_up(epsilon, **shown))
    assert epsilon * (1 - 1e-9) <= read <= epsilon * 1.011 + 0.01


def test_what_float64_may_have_added_is_not_rounded_up():
    assert rounded_up(math.sqrt(2.0) ** 2) == "2"
    assert rounded_up(9.9999) == "10"
    assert rounded_up(0.0) == "0"


def test_a_caption_says_shared_terms_once_and_whose_are_whose():
    ours, theirs = (Guarantee(1.0, 1e-5, f"{name} noise on each machine") for name in ("tree", "blt"))
    assert caption([("a", ours), ("b", ours)]).count("tree noise on each machine;") == 1
    text = caption([("a", ours), ("b", theirs)])
    assert text.count("at delta") == 1
    assert "tree noise on each machine (a); blt noise on each machine (b)" in text
    trusted = Guarantee(1.0, 1e-5, "noise of the server", trust="trusted-server", notes=("A note.",))
    text = caption([("a", ours), ("c", trusted)])
    assert "Epsilon of a is at delta" in text
    assert "Epsilon of c is at delta" in text
    assert text.endswith(" A note.")
    with pytest.raises(ConfigurationError):
        caption([])


@pytest.mark.parametrize(
    ("participations", "separation", "releases", "said"),
    [(1, 1, 6, None), (2, 6, 6, None), (2, 10, 6, None), (2, 3, 6, 2), (3, 3, 6, 2), (3, 3, 7, 3), (9, 1, 4, 4)],
)
def test_a_sentence_says_in_how_many_releases_a_sample_can_really_be(participations, separation, releases, said):
    policy = PrivacyPolicy(1.0, 1, releases, 1.0, sample_participations=participations, min_separation=separation)
    often = max(len(range(first, releases, separation)) for first in range(separation))
    often = min(often, releases) if participations > 1 else 1
    assert said == (often if often > 1 else None), "by counting"
    sentence = policy_guarantee(policy, 1.0).sentence
    assert ("every sample in up to" in sentence) == (said is not None)
    assert said is None or f"every sample in up to {said} releases" in sentence


def test_a_policys_guarantee_is_its_own():
    policy = PrivacyPolicy(
        1.0, 4, 6, 2.0, clip_unit="update", noise_quality="fast", sample_participations=2, min_separation=3
    )
    sentence = policy_guarantee(policy, policy.plan(10).mu).sentence
    for words in ("mu = 2 ", "cancelling (uniform)", "update sensitivity", "up to 2 releases", "no guarantee"):
        assert words in sentence
    trusted = policy_guarantee(PrivacyPolicy(1.0, 4, 6, 2.0, trust="trusted-server"), 2.0)
    assert math.isinf(trusted.mu)
