"""Full batches as the application has them: what their preset follows from, and whose policies it makes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.models import make_model
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

METHOD = METHODS["full-batch"]
BASE = RunConfig(strategy="full-batch", checkpoint=False)
MNIST = replace(BASE, task="mnist", num_clients=100, clients_per_round=100, features="soft-gradients")
SIZES = [600] * 100


def settled(mu, sizes=SIZES, config=MNIST, **changes):
    config = replace(config, mu=mu, **changes)
    model = make_model(config.model, 589, 10, constant=True)
    method = METHODS[config.strategy]
    rounds = method.usual_rounds(config, sizes, model)
    return rounds, method.settled(config, rounds, model, sizes)


@pytest.mark.parametrize(
    ("mu", "rounds", "rate", "momentum", "clip_norm"),
    [
        (0.1, 6, 60, 0.6, 0.35),
        (0.25, 8, 100, 0.6, 0.35),
        (0.5, 12, 100, 0.7, 0.35),
        (1, 20, 100, 0.7, 0.5),
        (2, 30, 100, 0.8, 0.5),
        (10, 60, 300, 0.9, 0.5),
        (50, 60, 300, 0.9, 0.5),
    ],
)
def test_the_preset_is_the_table_where_it_was_tuned(mu, rounds, rate, momentum, clip_norm):
    found, values = settled(mu)
    assert found == rounds
    stated = (values.learning_rate, values.momentum, values.clip_norm, values.average)
    assert stated == (pytest.approx(rate), pytest.approx(momentum), pytest.approx(clip_norm), "last")


def test_other_machines_and_trust_are_read_off_at_the_mu_with_as_much_noise():
    assert settled(1.0, [300] * 400) == settled(1.0)  # twice the samples: of 4 times the machines the same noise
    assert settled(1.0, [60] * 100) == settled(0.1)
    sums = {"trust": "secure-aggregation", "min_cohort": 100, "colluders": 0}
    assert settled(0.1, **sums) == settled(1.0)  # the noise of a sum is that of mu sqrt(h) on each machine
    assert settled(0.1, trust="trusted-server") == settled(1.0)  # one noise for a hundred machines
    assert settled(1.0, mechanism="none") == settled(50.0)


def test_rounds_and_steps_never_fall_as_mu_grows():
    mus = np.geomspace(1e-4, 100, 60)
    rounds, values = zip(*(settled(mu) for mu in mus), strict=True)
    assert (np.diff(rounds) >= 0).all()
    assert rounds[0] == 2
    assert (np.diff([one.learning_rate for one in values]) >= -1e-9).all()
    assert all(0.6 - 1e-9 <= one.momentum <= 0.9 + 1e-9 for one in values)


def test_steps_of_two_classes_travel_no_farther_with_less_noise():
    people, model = replace(BASE, task="recidivism", num_clients=100), make_model("softmax", 28, 2)
    travelled = []
    for mu in np.geomspace(0.1, 1000, 40):
        config = replace(people, mu=mu)
        rounds = METHOD.usual_rounds(config, SIZES, model)
        found = METHOD.settled(config, rounds, model, SIZES)
        travelled.append(found.learning_rate * found.clip_norm * math.sqrt(2) * rounds)  # R is 1, and the bias
    assert max(travelled) == pytest.approx(360)
    assert travelled[-1] == pytest.approx(360)


def test_longer_features_have_a_longer_clip_and_shorter_steps():
    found = settled(1.0, config=replace(MNIST, features="oriented-gradients"))[1]
    model = make_model("softmax", 392, 10)
    found = METHOD.settled(replace(MNIST, mu=1.0, features="oriented-gradients"), 20, model, SIZES)
    assert found.clip_norm == pytest.approx(0.5 * math.sqrt(17))  # norm 4, and a bias
    assert found.learning_rate == pytest.approx(100 / 17)


def test_what_is_set_stands_in_the_place_of_the_preset():
    config = replace(BASE, momentum=0.3, average="linear", l2=0.01, shares="average", num_rounds=5, clip_norm=2.5)
    experiment = prepare(config)
    strategy = experiment.strategy()
    assert (strategy.options.momentum, strategy.options.average, strategy.options.l2) == (0.3, "linear", 0.01)
    policy = experiment.policy()
    assert (policy.clip_norm, policy.max_participations) == (2.5, 5)
    assert dict(policy.mechanism_options) == {"shares": "average"}
    trusted = prepare(replace(config, trust="trusted-server")).strategy()
    assert trusted.trust.rounds_noise.shares == "average"


@pytest.mark.parametrize("changes", [{"batch_size": 4}, {"passes": 2}, {"mechanism": "cancelling"}, {"momentum": 1.0}])
def test_keys_that_mean_nothing_here_are_refused(changes):
    with pytest.raises(ConfigurationError, match=f"Expected {next(iter(changes)).replace('_', '-')} to be"):
        replace(BASE, **changes)


def test_machines_that_are_asked_in_turn_reserve_as_many_releases_as_they_are_asked_for():
    experiment = prepare(replace(BASE, clients_per_round=3, num_rounds=10))
    assert experiment.policy().max_participations == 3  # 30 requests of 10 machines
    asked = [name for t in range(1, 11) for name in _sampled(experiment, t)]
    assert max(asked.count(name) for name in set(asked)) == 3
    experiment.check_rounds()
    whole = prepare(replace(BASE, clients_per_round=3, num_rounds=10, sampling="uniform"))
    assert whole.policy().max_participations == 10


def _sampled(experiment, server_round):
    strategy = experiment.strategy()
    strategy.machines.restore([str(i) for i in range(10)])
    return strategy._sample(server_round)


def test_a_cap_ends_a_run_with_refusals_that_change_nothing_further():
    run = run_cohort(replace(BASE, num_rounds=4, max_participations=2, run_dry=True, give_up_after=0))
    assert [report.aggregated for report in run.strategy.history] == [10, 10, 0, 0]
    assert [report.refusals for report in run.strategy.history] == [0, 0, 10, 10]
    shorter = run_cohort(replace(BASE, num_rounds=2, momentum=run.strategy.options.momentum))
    assert all((one == other).all() for one, other in zip(run.parameters, shorter.parameters, strict=True))


@pytest.mark.long
def test_a_fifth_of_the_replies_lost_costs_what_a_fifth_of_the_samples_would():
    """Means of 4 seeds: both within three standard errors of each other, and nothing is carried over."""
    lossy = [run_cohort(replace(BASE, lost_replies=0.2, seed=seed, evaluate_every=10**6)) for seed in range(1, 5)]
    fewer = [
        run_cohort(replace(BASE, training_samples=1150, num_clients=8, clients_per_round=8, seed=seed, num_rounds=28))
        for seed in range(1, 5)
    ]
    one, other = ([run.accuracy for run in runs] for runs in (lossy, fewer))
    assert np.mean(one) > 0.9
    spread = math.hypot(np.std(one, ddof=1), np.std(other, ddof=1)) / 2
    assert abs(np.mean(one) - np.mean(other)) < max(3 * spread, 0.01)
    assert all(report.samples > 0 for run in lossy for report in run.strategy.history)


def test_features_with_a_constant_of_their_own_need_no_bias():
    with_bias, without = make_model("softmax", 7, 3), make_model("softmax", 7, 3, constant=True)
    assert (with_bias.names, without.names) == (["weight", "bias"], ["weight"])
    generator = np.random.Generator(np.random.Philox(key=4))
    features, labels = generator.normal(size=(5, 7)), np.array([0, 1, 2, 0, 1])
    weight = generator.normal(size=(3, 7))
    longer = with_bias([weight, np.zeros(3)], (features, labels))
    rows = without([weight], (features, labels))
    assert rows == pytest.approx(longer[:, :21])
    assert without.logits([weight], features) == pytest.approx(features @ weight.T)
    stacked = without.stacked([[weight]], [1.0], (features, labels))
    assert stacked.norms() == pytest.approx(np.linalg.norm(rows, axis=1))
    assert stacked.scaled_sum(np.arange(5.0)) == pytest.approx(np.arange(5.0) @ rows)
    row = np.empty(21)
    stacked.write(3, 2.0, row)
    assert row == pytest.approx(2 * rows[3])


def test_every_engine_and_real_trust_gives_the_same_model():
    for trust in ("", "trusted-server"):
        config = replace(BASE, num_rounds=2, trust=trust, training_samples=200)
        one, other = run_cohort(config), run_in_process(config)
        assert all((a == b).all() for a, b in zip(one.parameters, other.parameters, strict=True))
