"""One shot in the app: every engine, sums, losses, two classes, and what it refuses."""

import numpy as np
import pytest
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.simulate import simulate
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError, MemoryLedger

ONE = {"strategy": "one-shot", "mu": 2.0}


def test_it_learns_digits_in_one_round_and_says_so():
    result = simulate(**ONE)
    assert result.progress[-1].accuracy > 0.8
    assert len(result.progress) == 1
    assert result.guarantee.mu == 2.0
    assert "moments sensitivity" in result.guarantee.sentence


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_engines_make_the_same_model_to_the_last_bit(trust):
    models = [
        simulate(**ONE, trust=trust, num_clients=4, clients_per_round=4, engine=engine).parameters
        for engine in ("cohort", "inprocess")
    ]
    for one, other in zip(*models, strict=True):
        assert np.array_equal(one, other)


def test_a_lost_reply_leaves_the_others_moments():
    result = simulate(**ONE, lost_replies=0.3, seed=3)
    assert 5 <= result.strategy.history[0].aggregated < 10
    assert result.progress[-1].accuracy > 0.7


def test_two_classes_of_the_logistic_model():
    result = simulate(
        **ONE, task="synthetic-logistic", model="logistic", partition="own", synthetic_alpha=0.0, synthetic_beta=0.0,
        synthetic_features=20, synthetic_samples=4000,
    )  # fmt: skip
    assert result.parameters[0].shape == (20,)
    assert result.progress[-1].accuracy > 0.75


def test_without_noise_it_is_least_squares():
    assert simulate(**ONE, mechanism="none").progress[-1].accuracy > 0.9


def test_no_floor_of_images_reaches_other_data():
    images, table = (prepare(RunConfig(strategy="one-shot", task=task)).strategy() for task in ("digits", "synthetic"))
    assert (images.options.ridge, table.options.ridge) == (11.0, 2.0)
    assert prepare(RunConfig(strategy="one-shot", task="synthetic", ridge=5.0)).strategy().options.ridge == 5.0


def test_every_machine_has_one_release_of_the_size_of_the_moments():
    experiment = prepare(RunConfig(strategy="one-shot"))
    policy = experiment.policy()
    assert (policy.order, policy.max_participations, policy.clip_unit, policy.classes) == ("all", 1, "moments", 10)
    assert experiment.client(0, MemoryLedger()).machine.num_parameters == 65 * 66 // 2 + 65 * 9


@pytest.mark.parametrize(
    "changes",
    [{"num_rounds": 2}, {"learning_rate": 0.1}, {"model": "cnn"}, {"passes": 2}, {"batch_size": 4}, {"diameter": 1.0}],
    ids=str,
)
def test_what_one_round_has_no_use_for_is_refused(changes):
    with pytest.raises(ConfigurationError, match=next(iter(changes)).replace("_", "-")):
        RunConfig(strategy="one-shot", **changes)
