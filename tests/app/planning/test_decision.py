"""Which strategy a situation calls for: the theorem's two cases, what is impossible, and figures that are the runs'."""

import math
from dataclasses import replace

import pytest
from murmurfl.app.methods import METHODS
from murmurfl.app.planning import PlanRequest, decide, noise_to_signal
from murmurfl.app.planning.plan_document import decision_document
from murmurfl.app.runs.experiment import resolve
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, PrivacyPolicy

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("small_rehearsals")

MNIST = RunConfig(strategy="auto", task="synthetic", num_clients=100, clients_per_round=100, mu=1.0)


def situation(config=MNIST, samples=600, features=588):
    return PlanRequest(config, (samples,) * config.num_clients, features, 10, resolve)


def decided(samples=600, features=588, **changes):
    return decide(situation(replace(MNIST, **changes), samples, features))


def test_where_samples_may_be_used_in_every_round_full_batches_are_chosen():
    for mu in (0.1, 0.25, 1.0, 2.0):
        made = decided(mu=mu)
        assert made.chosen.strategy == "full-batch"
        assert made.chosen.uses == made.chosen.rounds > 4
        assert all(one.score >= made.chosen.score for one in made.others)
        assert "independent noise and few full batches win" in made.reason


def test_where_samples_are_used_once_no_round_has_them_again():
    made = decided(sample_uses="once")
    assert {option.uses for option in (made.chosen, *made.others)} == {1}
    assert {option.rounds for option in made.others if option.strategy == "full-batch"} == {1}
    few = decided(sample_uses="few")
    assert max(option.uses for option in (few.chosen, *few.others)) <= 4


def test_for_a_stream_noise_cancels():
    made = decided(stream=True)
    assert made.chosen.strategy == "mu2"
    assert made.chosen.uses == 1
    reasons = made.impossible
    assert {"full-batch", "one-shot"} <= set(reasons)
    assert "samples come as a stream" in reasons["full-batch"]


def test_a_trusted_server_and_sums_are_decided_among_the_strategies_that_serve_them():
    sums, trusted = decided(trust="secure-aggregation"), decided(trust="trusted-server")
    assert (sums.chosen.strategy, trusted.chosen.strategy) == ("full-batch", "trusted-full-batch")
    alone = decided()
    assert sums.chosen.noise_to_signal < alone.chosen.noise_to_signal
    for made in (sums, trusted):
        for option in (made.chosen, *made.others):
            assert option.problem.config.trust_model in METHODS[option.strategy].trusts


def test_clients_that_may_be_asked_in_few_rounds_are_asked_in_no_more():
    for rounds in (1, 3, 7):
        made = decided(num_rounds=rounds)
        assert all(option.rounds <= rounds for option in (made.chosen, *made.others))


def test_the_same_sizes_give_the_same_choice_wherever_it_is_made():
    assert decision_document(decided()) == decision_document(decided())
    assert decided().settings == decided(seed=2).settings


def test_noise_to_signal_is_that_of_the_sums_it_is_defined_by():
    """2 S sqrt(T) / (n mu sqrt(M)) in one value, for T full batches and for one pass of mu^2 in T rounds."""
    size, clients, dimension, rounds = 600, 100, 1000, 20
    whole = PrivacyPolicy(
        0.5,
        1,
        rounds,
        1.0,
        batch_selection="full_batch",
        mechanism="independent",
        release_rule="paper",
        noise_quality="fast",
    )
    turn = PrivacyPolicy(8.0, size // rounds, rounds, 1.0, noise_quality="fast")
    expected = 2 * math.sqrt(rounds) / (size * math.sqrt(clients)) * math.sqrt(dimension)
    shared = {"num_values": dimension, "rounds": rounds, "asked": clients, "clients": clients}
    for policy, alone, summed in ((whole, True, size), (turn, False, 1)):
        found = noise_to_signal(
            policy.plan(dimension), longest=policy.bound.longest, is_memoryless=alone, samples_summed=summed, **shared
        )
        assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.more_cases
def test_more_clients_samples_or_mu_never_make_noise_louder():
    base = decided().chosen
    same = {"num_rounds": base.rounds}
    reference = decided(**same).chosen.noise_to_signal
    for louder in (
        decided(samples=300, **same),
        decided(mu=0.5, **same),
        decided(num_clients=50, clients_per_round=50),
    ):
        assert louder.chosen.noise_to_signal > reference * 0.99


def test_every_option_is_a_run_that_could_be_started():
    made = decided()
    for option in (made.chosen, *made.others):
        config = made.request.with_settings({"strategy": option.strategy, **option.settings})
        assert RunConfig.from_mapping(config.to_mapping()) == config
        assert config.strategy == option.strategy
        assert METHODS[config.strategy].plans(option.problem)


@pytest.mark.parametrize("samples", [20, 48, 55, 61])
def test_a_pass_has_room_for_what_is_held_out(samples):
    """Of 48 samples 4 are set aside, and the others have no eighth batch of 6."""
    made = decided(samples, 5, private_evaluation=0.1, sample_uses="once", num_clients=5, clients_per_round=5)
    for option in (made.chosen, *made.others):
        rounds, batch = (int(option.settings.get(name, 1)) for name in ("num-rounds", "batch-size"))
        assert rounds * batch <= min(option.problem.sizes) < samples


@pytest.mark.parametrize(
    ("changes", "samples", "said"),
    [
        ({"stream": True, "num_rounds": 700}, 600, "Expected rounds <= 600 for a stream of 600 samples a client"),
        ({"mu": 1e-9}, 600, "Expected a situation that some strategy can serve"),
        (
            {"private_evaluation": 0.1},
            1,
            "^Expected at least two samples on every client with evaluation.held-out = 0.1, got 1",
        ),
        ({"passes": 2}, 600, "Expected passes to be 1 with strategy = 'auto'"),
        ({"sample_uses": "onc"}, 600, "did you mean 'once'"),
        ({"batch_size": 3}, 600, "Expected batch-size to be left at 8 with strategy = 'auto'"),
    ],
)
def test_impossible_requests_say_what_to_change(changes, samples, said):
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        decided(samples=samples, **changes)


def test_sizes_that_are_not_the_clients_are_refused():
    with raises(ConfigurationError, "out-of-range", "sizes", match="Expected sizes of num-clients = 100 clients"):
        PlanRequest(MNIST, (600,) * 99, 588, 10, resolve)
    with raises(ConfigurationError, "out-of-range", "sizes"):
        PlanRequest(MNIST, (600,) * 99 + (0,), 588, 10, resolve)


def test_without_noise_mu_changes_nothing():
    one, other = (decided(mechanism="none", mu=mu) for mu in (0.1, 50.0))
    assert one.settings == other.settings
    assert one.chosen.noise_to_signal == 0
