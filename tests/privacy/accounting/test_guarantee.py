"""The standard sentence: complete, never an epsilon below the true one, and refused without one of its parts.

The plain meaning of mu: true of the best test there is, rounded up, and silent where nothing is guaranteed.
The words for noise come from the policy: a client's, an epoch's, a trusted server's, and those of no noise.
"""

import doctest
import math

import numpy as np
import pytest
from murmurfl.privacy import (
    NO_NOISE_WORDS,
    NOT_PRIVATE,
    ConfigurationError,
    Guarantee,
    PrivacyPolicy,
    ShuffledPolicy,
    SumAssumption,
    caption,
    epoch_words,
    gdp_best_guess,
    gdp_epsilon,
    policy_guarantee,
    rounded_up,
    server_guarantee,
    server_noise_words,
    stated_words,
)
from murmurfl.privacy.accounting import guarantee, noise_plan
from murmurfl.privacy.accounting.amplification import allocation_delta
from murmurfl.privacy.accounting.guarantee import plain_meaning, rounded_down, stated_guarantee
from murmurfl.privacy.accounting.loss import Curve, Loss

from tests.harness.errors import raises


@pytest.mark.parametrize("module", [guarantee, noise_plan], ids=["guarantee", "noise_plan"])
def test_the_examples_of_the_documentation_hold(module):
    found = doctest.testmod(module)
    assert found.attempted >= 1
    assert not found.failed


def test_the_sentence_names_delta_unit_relation_trust_and_mechanism():
    sentence = Guarantee(1.0, 1e-6, "blt noise on each client", trust="trusted-server", unit="client").sentence
    assert sentence == (
        "mu = 1 Gaussian DP, epsilon = 4.887 at delta = 1e-06, for replacement of all samples of one client, against "
        "everybody but the trusted server; blt noise on each client; over all releases its cap allows."
    )


@pytest.mark.parametrize(
    "part",
    [{"trust": "nobody"}, {"unit": "user"}, {"relation": "zero-out"}, {"mechanism": " "}, {"covers": ""},
     {"delta": 0.0}, {"delta": 1.0}, {"loss": -1.0}, {"loss": math.nan}],
)  # fmt: skip
def test_no_guarantee_without_its_parts(part):
    with pytest.raises(ConfigurationError, match="Expected"):
        Guarantee(**{"loss": 1.0, "delta": 1e-5, "mechanism": "tree noise", **part})


def test_no_noise_is_said_and_not_shown_as_a_figure():
    made = Guarantee(math.inf, 1e-5, "no noise was added")
    assert made.sentence.startswith("Nothing is guaranteed, epsilon is infinite at delta = 1e-05")
    assert made.document()["epsilon"] is made.document()["mu"] is None


@pytest.mark.parametrize("mu", [0.1, 0.25, 1.0, 3.0, 4.0, 7.77, 16.0, 123.0])
@pytest.mark.parametrize("shown", [{}, {"digits": 3}, {"places": 2}])
def test_shown_epsilon_is_rounded_up_closely(mu, shown):
    epsilon = gdp_epsilon(mu, 1e-5)
    read = float(rounded_up(epsilon, **shown))
    assert epsilon * (1 - 1e-9) <= read <= epsilon * 1.011 + 0.01


@pytest.mark.parametrize("mu", [0.1, 0.25, 1.0, 3.0, 4.0, 7.77, 16.0, 123.0])
def test_an_epsilon_that_is_left_is_rounded_down_closely(mu):
    epsilon = gdp_epsilon(mu, 1e-5)
    assert epsilon * 0.999 <= float(rounded_down(epsilon)) <= epsilon * (1 + 1e-9)
    assert rounded_down(math.sqrt(3.0) ** 2) == "3"  # float64 has less


def test_what_float64_may_have_added_is_not_rounded_up():
    assert rounded_up(math.sqrt(2.0) ** 2) == "2"
    assert rounded_up(9.9999) == "10"
    assert rounded_up(0.0) == "0"


def test_a_caption_says_shared_terms_once_and_whose_are_whose():
    ours, theirs = (Guarantee(1.0, 1e-5, f"{name} noise on each client") for name in ("tree", "blt"))
    assert caption([("a", ours), ("b", ours)]).count("tree noise on each client;") == 1
    text = caption([("a", ours), ("b", theirs)])
    assert text.count("at delta") == 1
    assert "tree noise on each client (a); blt noise on each client (b)" in text
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


SUMS = {"loss": Loss.of(1.0, 7.0711), "trust": "secure-aggregation", "min_honest": 50}


def test_under_secure_aggregation_both_figures_and_what_they_rest_on_are_said():
    made = Guarantee(delta=1e-5, mechanism="tree noise on each client, under masks", **SUMS)
    assert made.sentence == (
        "mu = 1 Gaussian DP, epsilon = 4.378 at delta = 1e-05, for replacement of one sample of one client, against "
        "the server and everybody else if one helper and 50 clients of each sum are honest, and mu = 7.072, epsilon = "
        "54.38 in the worst case; tree noise on each client, under masks; over all releases its cap allows."
    )
    document = made.document()
    assert (document["mu"], document["mu_local"], document["min_honest"]) == (1.0, 7.0711, 50)
    assert document["epsilon_local"] == made.loss.worst_case.epsilon(1e-5) == gdp_epsilon(7.0711, 1e-5)
    alone = Guarantee(Loss.of(1.0, math.inf), 1e-5, "tree noise", trust="secure-aggregation", min_honest=1)
    assert "if one helper and 1 client of each sum are honest, and nothing if they are not;" in alone.sentence
    assert alone.document()["mu_local"] is alone.document()["epsilon_local"] is None


def test_a_guarantee_that_is_no_gaussian_shows_epsilon_alone():
    hidden = Curve(lambda epsilon: allocation_delta(1.0, 100, epsilon))
    made = Guarantee(Loss(hidden, hidden, conditional=False), 1e-5, "independent noise on each client")
    assert made.sentence.startswith(f"epsilon = {rounded_up(hidden.epsilon(1e-5))} at delta = 1e-05")
    assert (made.document()["mu"], made.document()["epsilon"]) == (None, hidden.epsilon(1e-5))


def test_other_guarantees_have_no_figure_of_secure_aggregation():
    document = Guarantee(1.0, 1e-5, "tree noise").document()
    assert document["mu_local"] is document["epsilon_local"] is document["min_honest"] is None
    assert "worst case" not in document["sentence"]


@pytest.mark.parametrize(
    "part",
    [{"loss": 1.0}, {"min_honest": None}, {"min_honest": 0}, {"min_honest": True}, {"loss": Loss.of(1.0, math.nan)},
     {"loss": Loss.of(1.0, -1.0)}, {"trust": "untrusted-server"}, {"trust": "untrusted-server", "loss": 1.0}],
)  # fmt: skip
def test_sum_figures_come_together_or_not_at_all(part):
    with pytest.raises(ConfigurationError, match="Expected"):
        Guarantee(**{**SUMS, "delta": 1e-5, "mechanism": "tree noise", **part})


def test_a_policys_guarantee_under_secure_aggregation_has_both_figures_of_its_plan():
    policy = PrivacyPolicy(1.0, 4, 6, 2.0, trust="secure-aggregation", sums=SumAssumption(9, 12))
    plan = policy.plan(10)
    made = policy_guarantee(policy, plan.loss)
    assert (made.mu, made.min_honest, made.trust) == (2.0, 9, "secure-aggregation")
    assert made.loss.worst_case.mu == pytest.approx(6.0, rel=1e-8)
    assert made.mechanism == "cancelling (uniform) noise on each client, under masks"
    with raises(ConfigurationError, "missing", match="worst case"):
        policy_guarantee(policy, plan.mu)
    # What holds in the worst case holds.
    assert policy_guarantee(policy, Loss.of(math.inf, 6.0)).mu == 6.0
    assert policy_guarantee(policy, 0.0).sentence.startswith("mu = 0 ")
    other = PrivacyPolicy(1.0, 4, 6, 2.0)
    assert not policy_guarantee(other, 2.0).loss.conditional, "one figure where there is one"
    with raises(ConfigurationError, "conflict", "min_honest"):
        policy_guarantee(other, Loss.of(1.0, 2.0))


def test_a_caption_says_what_holds_whatever_happens_of_each():
    ours, theirs = (
        Guarantee(Loss.of(mu, 3 * mu), 1e-5, "tree noise", trust="secure-aggregation", min_honest=9)
        for mu in (1.0, 0.25)
    )
    assert caption([("a", ours)]) == (
        "Epsilon is at delta = 1e-05, for replacement of one sample of one client, against the server and everybody "
        "else if one helper and 9 clients of each sum are honest; tree noise; over all releases its cap allows. "
        f"Without anybody's honesty: mu = 3, epsilon = {rounded_up(gdp_epsilon(3.0, 1e-5))} in the worst case."
    )
    text = caption([("a", ours), ("b", theirs)])
    assert text.count("at delta") == 1
    assert f"mu = 3, epsilon = {rounded_up(gdp_epsilon(3.0, 1e-5))} in the worst case (a); mu = 0.75" in text
    text = caption([("a", ours), ("c", Guarantee(1.0, 1e-5, "tree noise"))])
    assert "Epsilon of a is at" in text
    assert "in the worst case (a)." in text


def test_a_caption_beside_both_columns_explains_each_once():
    several = [
        (f"{honest}", Guarantee(Loss.of(1.0, 3.0), 1e-5, "tree noise", trust="secure-aggregation", min_honest=honest))
        for honest in (1, 9)
    ]
    assert caption(several, in_columns=True) == (
        "Epsilon is at delta = 1e-05, for replacement of one sample of one client, against the server and everybody "
        "else if one helper and h clients of each sum are honest; tree noise; over all releases its cap allows. "
        "The worst case rests on nobody else's honesty: no server's, helper's or client's."
    )
    plain = [("a", Guarantee(1.0, 1e-5, "tree noise"))]
    assert caption(plain, in_columns=True) == caption(plain), "nothing to say where nothing is summed"


def percent(text):
    return float(text.partition("at most ")[2].partition(" %")[0])


@pytest.mark.parametrize("mu", [0.0, 0.02, 0.5, 1.0, 4.0, 12.0])
def test_percentage_is_the_best_guess_rounded_up(mu):
    said, exact = percent(plain_meaning(mu)), 100 * gdp_best_guess(mu)
    assert exact - 1e-6 <= said < exact + 0.1


def test_the_best_guesser_is_right_as_often_as_it_says():
    """The likelihood ratio test of N(0, 1) and N(1, 1), each half of the time; false alarm 1 in 10,000."""
    draws = np.random.default_rng(7).standard_normal(100_000)
    used = np.arange(len(draws)) % 2
    right = np.mean((draws + used > 0.5) == used)
    assert right == pytest.approx(percent(plain_meaning(1.0)) / 100, abs=3.9 * 0.5 / math.sqrt(len(draws)) + 1e-3)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "holds for the server and everybody else, even if they know every other sample."),
        ({"trust": "trusted-server"}, "holds for everybody but the trusted server, even if they know every other"),
        ({"unit": "client"}, "whether the samples of one client were used, or any others in their place,"),
        ({"unit": "owner"}, "whether one owner's samples on a client were used, or any others of that owner in their"),
    ],
)
def test_it_says_what_is_guessed_and_by_whom(parts, words):
    guarantee = Guarantee(1.0, 1e-5, "tree noise", **parts)
    assert words in guarantee.meaning
    assert guarantee.document()["meaning"] == guarantee.meaning


def test_under_secure_aggregation_it_says_what_it_rests_on_and_what_holds_without():
    sums = {"trust": "secure-aggregation", "min_honest": 50}
    said = Guarantee(Loss.of(1.0, 7.1), 1e-5, "tree noise", **sums).meaning
    assert "if one helper and 50 clients of each sum are honest; if not, at most 100 %." in said
    said = Guarantee(Loss.of(1.0, math.inf), 1e-5, "tree noise", **sums).meaning
    assert said.endswith("are honest; if not, nothing is promised.")


def test_where_nothing_is_guaranteed_it_says_nothing():
    assert Guarantee(math.inf, 1e-5, "no noise").meaning == ""


TRUSTING = PrivacyPolicy(1.0, 4, 6, 2.0, trust="trusted-server")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "cancelling (uniform) noise on each client"),
        ({"mechanism": "tree"}, "tree noise on each client"),
        ({"mechanism": "banded", "mechanism_options": {"bands": 3}}, "banded (3) noise on each client"),
        ({"clip_unit": "update"}, "cancelling (uniform) noise on each client, update sensitivity"),
        ({"trust": "secure-aggregation"}, "cancelling (uniform) noise on each client, under masks"),
        ({"mechanism": "none"}, NO_NOISE_WORDS),
        ({"trust": "trusted-server"}, "no noise on the client"),
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
    with raises(ConfigurationError, "conflict", "trust"):
        server_guarantee(PrivacyPolicy(1.0, 4, 6, 2.0), 2.0, "tree")


def test_without_noise_nothing_is_guaranteed_whoever_is_trusted():
    for trust in ("untrusted-server", "trusted-server"):
        policy = PrivacyPolicy(1.0, 4, 6, 2.0, mechanism="none", trust=trust)
        made = [policy_guarantee(policy, 2.0)]
        made += [server_guarantee(policy, 2.0, "tree", 9)] if trust == "trusted-server" else []
        for stated in made:
            assert math.isinf(stated.mu)
            assert stated.notes == (NOT_PRIVATE,)
            assert stated.trust == "untrusted-server", "nothing holds against anybody"


def test_a_client_under_a_trusted_server_vouches_for_nothing_itself():
    made = policy_guarantee(TRUSTING, 2.0)
    assert math.isinf(made.mu)
    assert made.mechanism == "no noise on the client"
    assert NOT_PRIVATE not in made.notes


def test_nobody_asked_is_nothing_spent():
    made = policy_guarantee(ShuffledPolicy(1.0, 10, 3, 1.0), 0.0)
    assert made.epsilon == 0.0
    assert made.mechanism == "nobody was asked"
    assert "nothing is spent" in made.sentence


def test_what_real_clients_state_stands_in_the_place_of_the_policys_words():
    said = stated_words(["tree", "blt", "tree", ""])
    assert said == "blt or tree noise on each client, by its own account"
    assert stated_words(["tree"], masked=True) == "tree noise on each client, under masks, by its own account"
    policy = PrivacyPolicy(1.0, 4, 6, 2.0)
    assert policy_guarantee(policy, 1.0, words=said).mechanism == said
    assert policy_guarantee(policy, 1.0, words=stated_words([])).mechanism == policy.words
    assert not policy_guarantee(policy, math.inf, stated=True).notes
    assert policy_guarantee(policy, math.inf).notes


def test_a_client_that_trusts_a_server_without_noise_takes_the_guarantee_and_nothing_else():
    own = {"mu-guaranteed": 1.0, "delta": 1e-5, "mechanism": "tree", "trust": "untrusted-server", "unit": "sample"}
    said = stated_guarantee({"a": own, "b": {**own, "trust": "trusted-server"}}, 2, masked=False)
    assert math.isinf(said.mu)
    assert "Nothing is guaranteed" in said.sentence
