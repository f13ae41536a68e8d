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
    policy_guarantee,
    rounded_up,
)
from murmurfl.privacy.accounting import guarantee


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


SUMS = {"trust": "secure-aggregation", "mu_local": 7.0711, "min_honest": 50}


def test_under_secure_aggregation_both_figures_and_what_they_rest_on_are_said():
    made = Guarantee(1.0, 1e-5, "tree noise on each machine, under masks", **SUMS)
    assert made.sentence == (
        "mu = 1 Gaussian DP, epsilon = 4.378 at delta = 1e-05, for replacement of one sample of one machine, against "
        "the server and everybody else if one helper and 50 machines of each sum are honest, and mu = 7.072, epsilon = "
        "54.38 whatever happens; tree noise on each machine, under masks; over all releases its cap allows."
    )
    document = made.document()
    assert (document["mu"], document["mu_local"], document["min_honest"]) == (1.0, 7.0711, 50)
    assert document["epsilon_local"] == made.epsilon_local == gdp_epsilon(7.0711, 1e-5)
    alone = Guarantee(1.0, 1e-5, "tree noise", trust="secure-aggregation", mu_local=math.inf, min_honest=1)
    assert "if one helper and 1 machine of each sum are honest, and nothing if they are not;" in alone.sentence
    assert alone.document()["mu_local"] is alone.document()["epsilon_local"] is None


def test_other_guarantees_have_no_figure_of_secure_aggregation():
    document = Guarantee(1.0, 1e-5, "tree noise").document()
    assert document["mu_local"] is document["epsilon_local"] is document["min_honest"] is None
    assert "whatever" not in document["sentence"]


@pytest.mark.parametrize(
    "part",
    [{"mu_local": None}, {"min_honest": None}, {"min_honest": 0}, {"min_honest": True}, {"mu_local": math.nan},
     {"mu_local": -1.0}, {"trust": "untrusted-server"}, {"trust": "untrusted-server", "mu_local": None}],
)  # fmt: skip
def test_neither_figure_of_secure_aggregation_without_the_other_and_what_it_rests_on(part):
    with pytest.raises(ConfigurationError, match="Expected"):
        Guarantee(1.0, 1e-5, "tree noise", **{**SUMS, **part})


def test_a_policys_guarantee_under_secure_aggregation_has_both_figures_of_its_plan():
    policy = PrivacyPolicy(1.0, 4, 6, 2.0, trust="secure-aggregation", min_honest=9, min_cohort=12)
    plan = policy.plan(10)
    made = policy_guarantee(policy, plan.mu, mu_local=plan.mu_local)
    assert (made.mu, made.min_honest, made.trust) == (2.0, 9, "secure-aggregation")
    assert made.mu_local == pytest.approx(6.0, rel=1e-8)
    assert made.mechanism == "cancelling (uniform) noise on each machine, under masks"
    with pytest.raises(ConfigurationError, match="mu_local"):
        policy_guarantee(policy, plan.mu)
    # What holds whatever happens holds.
    assert policy_guarantee(policy, math.inf, mu_local=6.0).mu == 6.0
    assert policy_guarantee(policy, 0.0).sentence.startswith("mu = 0 ")
    other = PrivacyPolicy(1.0, 4, 6, 2.0)
    assert policy_guarantee(other, 2.0, mu_local=2.0).mu_local is None, "one figure where there is one"


def test_a_caption_says_what_holds_whatever_happens_of_each():
    ours, theirs = (
        Guarantee(mu, 1e-5, "tree noise", trust="secure-aggregation", mu_local=3 * mu, min_honest=9)
        for mu in (1.0, 0.25)
    )
    assert caption([("a", ours)]) == (
        "Epsilon is at delta = 1e-05, for replacement of one sample of one machine, against the server and everybody "
        "else if one helper and 9 machines of each sum are honest; tree noise; over all releases its cap allows. "
        f"Without anybody's honesty: mu = 3, epsilon = {rounded_up(gdp_epsilon(3.0, 1e-5))} whatever happens."
    )
    text = caption([("a", ours), ("b", theirs)])
    assert text.count("at delta") == 1
    assert f"mu = 3, epsilon = {rounded_up(gdp_epsilon(3.0, 1e-5))} whatever happens (a); mu = 0.75" in text
    text = caption([("a", ours), ("c", Guarantee(1.0, 1e-5, "tree noise"))])
    assert "Epsilon of a is at" in text
    assert "whatever happens (a)." in text


def test_a_caption_beside_both_columns_explains_each_once():
    several = [
        (f"{honest}", Guarantee(1.0, 1e-5, "tree noise", trust="secure-aggregation", mu_local=3.0, min_honest=honest))
        for honest in (1, 9)
    ]
    assert caption(several, in_columns=True) == (
        "Epsilon is at delta = 1e-05, for replacement of one sample of one machine, against the server and everybody "
        "else if one helper and h machines of each sum are honest; tree noise; over all releases its cap allows. "
        "What holds whatever happens rests on nobody else's honesty: no server's, helper's or machine's."
    )
    plain = [("a", Guarantee(1.0, 1e-5, "tree noise"))]
    assert caption(plain, in_columns=True) == caption(plain), "nothing to say where nothing is summed"
