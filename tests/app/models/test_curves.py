"""Curves, importance and coefficients of additive models, and how much of them is noise."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.data.task import Dataset, Task
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.models.trained_model import TrainedModel
from murmurfl.app.reports.plots import curve_plots, curves_picture
from murmurfl.app.runs.model_card import noise_in_model
from murmurfl.app.settings.registry import registry
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError
from scipy.stats import chi2
from typer.testing import CliRunner

from tests.app.additive_table import SCHEMA, made_up
from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "small_rehearsals")

RARELY = 1e-7
"""How often a statistical test of this file fails by chance."""
TOLD, SILENT = 3, 120
"""Features that tell something of the label, and features that are zero in all records."""
TRUSTS = ("untrusted-server", "secure-aggregation", "trusted-server")


class Silent(Task):
    """The same records for every seed; gradients never reach the weights of most features."""

    name = "made:silent"
    sentence = "records of which most features are zero"
    feature_bound = 2.0

    def load(self, config, root):
        random = np.random.Generator(np.random.Philox(key=3))
        features = np.zeros((400, TOLD + SILENT), np.float32)
        features[:, :TOLD] = random.normal(size=(400, TOLD))
        labels = (features[:, 0] + random.normal(size=400) > 0).astype(np.int64)
        return Dataset(features[:300], labels[:300], features[300:], labels[300:], 2)


def trained(trust, seed, **keys):
    registry("task").give(Silent.name, Silent())
    strategy = "trusted-full-batch" if trust == "trusted-server" else "full-batch"
    settings = {"task": Silent.name, "strategy": strategy, "trust": trust, "partition": "iid", "seed": seed}
    config = {"num-clients": 6, "clients-per-round": 6, "mu": 1.0, "num-rounds": 9, "strategy.momentum": 0.7}
    more = {"learning-rate": 3.0, "clip-norm": 0.5, **keys}
    return run_cohort(RunConfig.from_mapping({**settings, **config, **more}))


@pytest.fixture(scope="module", params=TRUSTS)
def runs(request):
    return [trained(request.param, seed) for seed in range(1, 7)]


def squares(results, stds, columns):
    """Squares of weights, in units of their noise's variance, less what the mean over seeds has of them."""
    weights = np.array([one.parameters[0][:, columns] for one in results])
    return np.square(weights - weights.mean(axis=0)).sum() / np.mean(np.square(stds)), weights[1:].size


def test_noise_of_weights_without_gradients_is_known_exactly(runs):
    stds = [noise_in_model(one.strategy, one.statements) for one in runs]
    found, degrees = squares(runs, stds, slice(TOLD, None))
    assert chi2.ppf(RARELY / 2, degrees) < found < chi2.ppf(1 - RARELY / 2, degrees)
    assert runs[0].model.card["noise_std"] == stds[0]


def test_a_rule_without_its_momentum_would_be_noticed(runs):
    stds = []
    for one in runs:
        rule = one.strategy.full_batch
        one.strategy.full_batch = replace(rule, momentum=0.0)
        stds.append(noise_in_model(one.strategy, one.statements))
        one.strategy.full_batch = rule
    found, degrees = squares(runs, stds, slice(TOLD, None))
    assert found > chi2.ppf(1 - RARELY / 2, degrees)


def test_noise_of_weights_with_gradients_is_no_more_than_that():
    runs = [
        trained("trusted-server", seed, **{"strategy.l2": 0.01, "strategy.average": "linear"}) for seed in range(30)
    ]
    stds = [noise_in_model(one.strategy, one.statements) for one in runs]
    found, degrees = squares(runs, stds, slice(0, TOLD))
    assert found < chi2.ppf(1 - RARELY, degrees)
    half, _ = squares(runs, np.array(stds) / 2, slice(0, TOLD))
    assert half > chi2.ppf(1 - RARELY, degrees), "a bound that is half of it would be noticed"


def test_the_noise_of_a_clip_that_follows_gradients_is_not_known():
    result = trained("untrusted-server", 1, **{"clipping.quantile": 0.5})
    assert noise_in_model(result.strategy, result.statements) is None


def test_the_noise_of_releases_with_other_shares_is_not_known():
    assert trained("untrusted-server", 1, **{"strategy.shares": "late"}).model.card["noise_std"] is None


@pytest.fixture(scope="module", params=["two", "several", "numbers"])
def model(request):
    rows = made_up(600)
    if request.param == "numbers":
        rows = [{**row, "ill": row["age"] / 10 + 3 * (row["ill"] == "yes")} for row in rows]
    if request.param == "several":
        rows = [{**row, "ill": "abc"[(row["age"] > 40) + (row["age"] > 70)]} for row in rows]
    return fit(rows, label="ill", clients=3, epsilon=8).model


def test_curves_and_the_constant_add_up_to_the_scores(model):
    found = model.curves()
    rows = made_up(600)[:40]
    of_classes = len(model.classes) > 2
    total = np.zeros((3 if of_classes else 1, len(rows)))
    for name, curve in found.items():
        for place, row in enumerate(rows):
            value = row[name]
            if curve.is_number and value == "":
                effect = curve.missing[..., 0]
            elif curve.is_number:
                at = np.atleast_2d(curve.effect)
                effect = np.array([np.interp(float(value), curve.values, one) for one in at])
            else:
                known = list(curve.values)
                effect = curve.effect[..., known.index(value) if value in known else known.index("other")]
            total[:, place] += effect
    total += np.array([one.value for one in model.coefficients() if one.feature == "constant"])[:, None]
    if model.num_classes == 1:
        expected = model.predict(rows)[None]
        total = np.clip(total, expected.min(), expected.max())
    else:
        scores = model.scores(rows).T
        expected = scores - scores.mean(axis=0) if of_classes else scores[1:] - scores[:1]
    np.testing.assert_allclose(total, expected, atol=1e-6)


def test_bands_are_as_wide_as_the_noise_in_the_features(model):
    for curve in model.curves().values():
        assert (curve.upper > curve.lower).all()
        np.testing.assert_allclose(curve.upper + curve.lower, 2 * curve.effect, atol=1e-9)
    names = {one.feature: one.noise_std for one in model.coefficients()}
    curve = model.curves()["age"]
    assert curve.missing[..., 2] - curve.missing[..., 0] == pytest.approx(1.959964 * names["missing"], rel=1e-6)


def test_importance_is_the_mean_absolute_effect_in_order(model):
    found = model.importance()
    assert list(found.values()) == sorted(found.values(), reverse=True)
    city = model.curves()["city"]
    assert found["city"] == pytest.approx(np.abs(city.effect).mean())
    assert city.effect.mean(axis=-1) == pytest.approx(0, abs=1e-9)
    assert set(found) == set(SCHEMA.columns)


def test_a_saved_model_has_the_same_curves(model, tmp_path):
    again = TrainedModel.read(model.save(tmp_path / "model")).curves()
    assert again["income"].upper.tolist() == model.curves()["income"].upper.tolist()


def test_the_command_lists_columns_and_draws_them(model, tmp_path):
    folder, picture = model.save(tmp_path / "model"), tmp_path / "curves.png"
    found = CliRunner().invoke(cli, ["curves", str(folder), "--out", str(picture)])
    assert found.exit_code == 0
    head, *lines = found.output.splitlines()
    assert head.split() == ["column", "importance", "noise"]
    shown = [line.split() for line in lines[: len(SCHEMA.columns)]]
    assert [(name, value) for name, value, _ in shown] == [(n, f"{v:.3f}") for n, v in model.importance().items()]
    for name, _, noise in shown:
        curve = model.curves()[name]
        assert float(noise) == pytest.approx((curve.upper - curve.lower).max() / 2, abs=1e-3)
        assert float(noise) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(cli, ["curves", str(folder), "--out", str(picture)])
    assert again.exit_code != 0, "files are not overwritten"
    assert len(curve_plots(TrainedModel.read(folder))) == len(SCHEMA.columns)
    few = CliRunner().invoke(cli, ["curves", str(folder), "--most", "2", "--out", str(tmp_path / "few.png")])
    assert [line.split()[0] for line in few.output.splitlines()[1:3]] == list(model.importance())[:2]
    assert few.output.splitlines()[-1].endswith("2 curves")
    assert len([axes for axes in curves_picture(model, 2).axes if axes.axison]) == 2


def test_a_model_without_known_noise_has_curves_without_bands(model):
    unknown = replace(model, card={**model.card, "noise_std": None})
    curve = unknown.curves()["age"]
    assert np.isfinite(curve.effect).all()
    assert np.isnan(curve.lower).all()


def test_curves_of_a_linear_model_are_refused():
    result = fit(made_up(300), schema=SCHEMA, clients=3, epsilon=8, model="softmax")
    with raises(ConfigurationError, "unsupported", "model"):
        result.curves()


def test_a_real_fit_has_bands_of_what_it_released(tmp_path):
    path = tmp_path / "table.csv"
    rows = made_up(400)
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    schema = SCHEMA.model_copy(update={"reviewed": True})
    result = fit(path, schema=schema, real=True, epsilon=8, ledger=tmp_path / "ledger")
    curve = result.curves()["age"]
    assert (curve.upper > curve.lower).all()
