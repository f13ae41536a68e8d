"""A clip that follows the gradients, in the app: the same on all engines, said in the guarantee, and worth its cost."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.app.models import make_model
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.run_guarantees import COUNTED, expected_guarantee
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import CountedGradients
from murmurfl.privacy import ConfigurationError, MemoryLedger

BASE = RunConfig(strategy="full-batch", quantile=0.3, checkpoint=False, mu=2.0)
SUMS = {"trust": "secure-aggregation", "min_cohort": 8}


@pytest.mark.parametrize("changes", [{}, SUMS, {"centring": "private"}])
def test_engines_agree_to_the_last_bit(changes):
    config = replace(BASE, num_rounds=3, training_samples=200, **changes)
    one, other = run_cohort(config), run_in_process(config)
    assert all((a == b).all() for a, b in zip(one.parameters, other.parameters, strict=True))
    assert one.strategy.state.clip.tobytes() == other.strategy.state.clip.tobytes()
    assert float(one.strategy.state.clip) != one.strategy.options.first_clip


def test_closed_sums_of_a_softmax_regression_are_those_of_its_rows():
    generator = np.random.Generator(np.random.Philox(key=5))
    features, labels = generator.normal(size=(40, 6)), np.arange(40) % 3
    model, bound = make_model("softmax", 6, 3), prepare(BASE).policy().bound
    counted = CountedGradients(model, 0.1)
    for clip in (0.5, 2.0, 1e300, -1.0, 0.0):
        point = [generator.normal(size=(3, 6)), np.zeros(3), np.array([clip])]
        rows = counted(point, (features, labels))
        with np.errstate(all="ignore"):
            total = bound.total(counted.stacked([point], [1.0], (features, labels)), 22)
        assert total == pytest.approx(bound.total(rows, 22), abs=1e-12)


def test_the_guarantee_is_the_same_and_says_what_of_it_is_for_the_quantile():
    plain, counted = expected_guarantee(replace(BASE, quantile=0.0)), expected_guarantee(BASE)
    assert counted.mu == pytest.approx(plain.mu) == 2.0
    assert "Of it mu = 0.2829, 2 % of mu^2, is for how many gradients are clipped." in counted.sentence
    assert "gradients are clipped" not in plain.sentence
    more = expected_guarantee(replace(BASE, quantile_share=0.25)).sentence
    assert "Of it mu = 1, 25 % of mu^2, is for how many" in more
    assert COUNTED in expected_guarantee(replace(BASE, num_rounds=4), deployed=True).sentence


def test_the_share_in_the_sentence_is_that_of_the_noise_that_is_added():
    """Of marks alone, worked out from what a mark can move and the noise on it."""
    experiment = prepare(BASE)
    plan = experiment.plans()[0]
    client = experiment.client(0, MemoryLedger())
    marks = client.gradients.rows.marks(np.array([0.0, 2.0]), 1.0)
    mu = abs(marks[0] - marks[1]) * math.sqrt(experiment.num_rounds) / plan.noise_std
    assert mu == pytest.approx(math.sqrt(0.02) * 2.0, rel=1e-3)
    assert mu <= 0.2829


def test_after_a_mean_of_features_the_share_is_of_what_is_left():
    config = replace(BASE, centring="private", centring_share=0.2)
    assert "1.6 % of mu^2, is for how many gradients are clipped" in expected_guarantee(config).sentence


@pytest.mark.long
def test_a_clip_that_starts_ten_times_too_long_costs_little():
    """Three seeds each; a clip that stays there costs 15 points."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tuned = prepare(BASE).values.clip_norm

    def accuracy(**changes):
        runs = [run_cohort(replace(BASE, mu=4.0, evaluate_every=10**6, seed=seed, **changes)) for seed in (1, 2, 3)]
        return np.mean([run.accuracy for run in runs])

    best = accuracy(quantile=0.0)
    assert accuracy(clip_norm=10 * tuned) > best - 0.05
    assert accuracy(clip_norm=10 * tuned, quantile=0.0) < best - 0.1


def test_the_result_says_where_the_clip_came_to():
    run = run_cohort(replace(BASE, num_rounds=2))
    said = run.outcome.document()["clip"]
    assert said == {
        "quantile": 0.3,
        "share": 0.02,
        "first": run.strategy.options.first_clip,
        "last": float(run.strategy.state.clip),
    }
    json.dumps(said)
    assert run_cohort(replace(BASE, num_rounds=2, quantile=0.0)).outcome.document()["clip"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantile": 1.0}, "Expected quantile to be"),
        ({"quantile": 0.0, "quantile_share": 0.1}, "Expected quantile-share to be"),
        ({"quantile_share": 1.0}, "Expected quantile-share to be"),
        ({"clipping": "automatic"}, "Expected clipping to be"),
        ({"trust": "trusted-server"}, "Expected quantile to be"),
        ({"strategy": "mu2"}, "Expected quantile to be"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        replace(BASE, **changes)
