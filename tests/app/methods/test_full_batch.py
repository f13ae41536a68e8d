"""Full batches as the application has them: what their preset follows from, and whose policies it makes."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.methods import METHODS
from murmurfl.app.methods.presets import usual_norm
from murmurfl.app.models import make_model
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.run_guarantees import COUNTED, expected_guarantee
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.clients import CountedGradients
from murmurfl.privacy import ConfigurationError, MemoryLedger
from murmurfl.privacy.setting import by_key

from tests.app import additive_table
from tests.app.plain import simulate

pytestmark = pytest.mark.usefixtures("no_forecast")

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


def test_other_clients_and_trust_are_read_off_at_the_mu_with_as_much_noise():
    assert settled(1.0, [300] * 400) == settled(1.0)  # twice the samples: of 4 times the clients the same noise
    assert settled(1.0, [60] * 100) == settled(0.1)
    sums = {"trust": "secure-aggregation", "min_cohort": 100, "colluders": 0}
    assert settled(0.1, **sums) == settled(1.0)  # the noise of a sum is that of mu sqrt(h) on each client
    assert settled(0.1, trust="trusted-server") == settled(1.0)  # one noise for a hundred clients
    assert settled(1.0, mechanism="none") == settled(50.0)


def test_rounds_and_steps_never_fall_as_mu_grows():
    mus = np.geomspace(1e-4, 100, 60)
    rounds, values = zip(*(settled(mu) for mu in mus), strict=True)
    assert (np.diff(rounds) >= 0).all()
    assert rounds[0] == 2
    assert (np.diff([one.learning_rate for one in values]) >= -1e-9).all()
    assert all(0.6 - 1e-9 <= one.momentum <= 0.9 + 1e-9 for one in values)


def test_noise_counts_for_two_classes_and_few_rounds_do_not_travel_far_on_other_data():
    table = RunConfig(strategy="full-batch", task="synthetic", num_clients=100, clients_per_round=100)
    norm = usual_norm(table, make_model("softmax", 9, 2))
    found = {}
    for classes, times in ((2, 1.0), (8, 2.0)):  # 8 classes have 4 times the parameters: noise is twice as long
        model = make_model("softmax", 9, classes)
        config = replace(table, mu=0.1)
        assert METHOD.noise(config, model, SIZES) == pytest.approx(
            times * METHOD.noise(config, make_model("softmax", 9, 2), SIZES)
        )
        found[classes] = METHOD.usual_rounds(config, SIZES, model), METHOD.settled(config, 100, model, SIZES)
    assert found[2] == found[8]
    values = METHOD.settled(replace(table, mu=50.0), 3, make_model("softmax", 9, 2), SIZES)
    assert values.learning_rate * values.clip_norm * norm == pytest.approx(25.0)


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
    assert (strategy.rule.momentum, strategy.rule.average, strategy.rule.l2) == (0.3, "linear", 0.01)
    policy = experiment.policy()
    assert (policy.clip_norm, policy.max_participations) == (2.5, 5)
    assert dict(policy.mechanism_options) == {"shares": "average"}
    trusted = prepare(replace(config, trust="trusted-server")).strategy()
    assert trusted.aggregator.stream.rounds_noise.shares == "average"


@pytest.mark.parametrize("changes", [{"batch_size": 4}, {"passes": 2}, {"mechanism": "cancelling"}, {"momentum": 1.0}])
def test_keys_that_mean_nothing_here_are_refused(changes):
    with pytest.raises(ConfigurationError, match=f"Expected {next(iter(by_key(changes, run_keys())))} to be"):
        replace(BASE, **changes)


def test_clients_that_are_asked_in_turn_reserve_as_many_releases_as_they_are_asked_for():
    experiment = prepare(replace(BASE, clients_per_round=3, num_rounds=10))
    assert experiment.policy().max_participations == 3  # 30 requests of 10 clients
    asked = [name for t in range(1, 11) for name in _sampled(experiment, t)]
    assert max(asked.count(name) for name in set(asked)) == 3
    experiment.check_rounds()
    whole = prepare(replace(BASE, clients_per_round=3, num_rounds=10, sampling="uniform"))
    assert whole.policy().max_participations == 10


def _sampled(experiment, server_round):
    strategy = experiment.strategy()
    strategy.clients.restore([str(i) for i in range(10)])
    return strategy.sampler.draw(server_round)


def test_a_cap_ends_a_run_with_refusals_that_change_nothing_further():
    run = run_cohort(replace(BASE, num_rounds=4, max_participations=2, allow_exhaustion=True, give_up_after=0))
    assert [report.aggregated for report in run.strategy.history] == [10, 10, 0, 0]
    assert [report.refusals for report in run.strategy.history] == [0, 0, 10, 10]
    shorter = run_cohort(replace(BASE, num_rounds=2, momentum=run.strategy.rule.momentum))
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


FOLLOWING = RunConfig(strategy="full-batch", quantile=0.3, checkpoint=False, mu=2.0)
SUMS = {"trust": "secure-aggregation", "min_cohort": 8}


@pytest.mark.parametrize("changes", [{}, SUMS, {"centring": "private"}])
def test_engines_agree_to_the_last_bit(changes):
    config = replace(FOLLOWING, num_rounds=3, training_samples=200, **changes)
    one, other = run_cohort(config), run_in_process(config)
    assert all((a == b).all() for a, b in zip(one.parameters, other.parameters, strict=True))
    assert one.strategy.state.clip.tobytes() == other.strategy.state.clip.tobytes()
    assert float(one.strategy.state.clip) != one.strategy.rule.first_clip


def test_closed_sums_of_a_softmax_regression_are_those_of_its_rows():
    generator = np.random.Generator(np.random.Philox(key=5))
    features, labels = generator.normal(size=(40, 6)), np.arange(40) % 3
    model, bound = make_model("softmax", 6, 3), prepare(FOLLOWING).policy().bound
    counted = CountedGradients(model, 0.1)
    for clip in (0.5, 2.0, 1e300, -1.0, 0.0):
        point = [generator.normal(size=(3, 6)), np.zeros(3), np.array([clip])]
        rows = counted(point, (features, labels))
        with np.errstate(all="ignore"):
            total = bound.total(counted.stacked([point], [1.0], (features, labels)), 22)
        assert total == pytest.approx(bound.total(rows, 22), abs=1e-12)


def test_the_guarantee_is_the_same_and_says_what_of_it_is_for_the_quantile():
    plain, counted = expected_guarantee(replace(FOLLOWING, quantile=0.0)), expected_guarantee(FOLLOWING)
    assert counted.mu == pytest.approx(plain.mu) == 2.0
    assert "Of it mu = 0.2829, 2 % of mu^2, is for how many gradients are clipped." in counted.sentence
    assert "gradients are clipped" not in plain.sentence
    more = expected_guarantee(replace(FOLLOWING, quantile_share=0.25)).sentence
    assert "Of it mu = 1, 25 % of mu^2, is for how many" in more
    assert COUNTED in expected_guarantee(replace(FOLLOWING, num_rounds=4), deployed=True).sentence


def test_the_share_in_the_sentence_is_that_of_the_noise_that_is_added():
    """Of marks alone, worked out from what a mark can move and the noise on it."""
    experiment = prepare(FOLLOWING)
    plan = experiment.plans()[0]
    client = experiment.client(0, MemoryLedger())
    marks = client.gradients.rows.marks(np.array([0.0, 2.0]), 1.0)
    mu = abs(marks[0] - marks[1]) * math.sqrt(experiment.num_rounds) / plan.noise_std
    assert mu == pytest.approx(math.sqrt(0.02) * 2.0, rel=1e-3)
    assert mu <= 0.2829


def test_after_a_mean_of_features_the_share_is_of_what_is_left():
    config = replace(FOLLOWING, centring="private", centring_share=0.2)
    assert "1.6 % of mu^2, is for how many gradients are clipped" in expected_guarantee(config).sentence


@pytest.mark.long
def test_a_clip_that_starts_ten_times_too_long_costs_little():
    """Three seeds each; a clip that stays there costs 15 points."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tuned = prepare(FOLLOWING).values.clip_norm

    def accuracy(**changes):
        runs = [
            run_cohort(replace(FOLLOWING, mu=4.0, evaluate_every=10**6, seed=seed, **changes)) for seed in (1, 2, 3)
        ]
        return np.mean([run.accuracy for run in runs])

    best = accuracy(quantile=0.0)
    assert accuracy(clip_norm=10 * tuned) > best - 0.05
    assert accuracy(clip_norm=10 * tuned, quantile=0.0) < best - 0.1


def test_the_result_says_where_the_clip_came_to():
    run = run_cohort(replace(FOLLOWING, num_rounds=2))
    said = run.outcome.document()["clip"]
    assert said == {
        "quantile": 0.3,
        "share": 0.02,
        "first": run.strategy.rule.first_clip,
        "last": float(run.strategy.state.clip),
    }
    json.dumps(said)
    assert run_cohort(replace(FOLLOWING, num_rounds=2, quantile=0.0)).outcome.document()["clip"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantile": 1.0}, "Expected clipping.quantile to be"),
        ({"quantile": 0.0, "quantile_share": 0.1}, "Expected clipping.quantile-share to be"),
        ({"quantile_share": 1.0}, "Expected clipping.quantile-share to be"),
        ({"clipping": "automatic"}, "Expected clipping to be"),
        ({"trust": "trusted-server"}, "Expected clipping.quantile to be"),
        ({"strategy": "mu2"}, "Expected clipping.quantile to be"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        replace(FOLLOWING, **changes)


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
    assert (images.rule.ridge, table.rule.ridge) == (11.0, 2.0)
    assert prepare(RunConfig(strategy="one-shot", task="synthetic", ridge=5.0)).strategy().rule.ridge == 5.0


def test_every_client_has_one_release_of_the_size_of_the_moments():
    experiment = prepare(RunConfig(strategy="one-shot"))
    policy = experiment.policy()
    assert (policy.batch_selection, policy.max_participations, policy.clip_unit, policy.classes) == (
        "full_batch",
        1,
        "moments",
        10,
    )
    assert experiment.client(0, MemoryLedger()).privatizer.num_parameters == 65 * 66 // 2 + 65 * 9


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rounds": 2},
        {"learning_rate": 0.1},
        {"model": "cnn"},
        {"passes": 2},
        {"batch_size": 4},
        {"projection_radius": 1.0},
    ],
    ids=str,
)
def test_what_one_round_has_no_use_for_is_refused(changes):
    with pytest.raises(ConfigurationError, match=next(iter(by_key(changes, run_keys())))):
        RunConfig(strategy="one-shot", **changes)


def test_an_additive_models_recipe_publishes_the_mean_of_the_last_two_iterates_unless_noise_is_large():
    settings = {"task": additive_table.NAME, "model": "additive", "strategy": "full-batch", "num-clients": 4}
    config = RunConfig.from_mapping({**settings, "clients-per-round": 4, "mu": 100.0, "trust": "untrusted-server"})
    assert prepare(config).strategy().rule.average == "last-two"
    assert prepare(replace(config, average="last")).strategy().rule.average == "last"
    assert prepare(replace(config, mu=1.0)).strategy().rule.average == "last"
