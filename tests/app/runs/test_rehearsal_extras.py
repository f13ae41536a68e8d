"""Further figures of a rehearsal: several seeds, single sites, the confusion matrix and the AUC of several classes."""

import numpy as np
import pytest
from murmurfl.app import fit
from murmurfl.app.runs.baselines import reliability
from murmurfl.app.runs.fit_summary import fit_lines
from murmurfl.privacy import ConfigurationError, derived_seed
from sklearn.metrics import log_loss, roc_auc_score

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "small_rehearsals")

QUICK = {"strategy": "full-batch", "num_rounds": 6}


def ill(count=500, classes=("a", "b", "c")):
    random = np.random.Generator(np.random.Philox(key=derived_seed("rehearsal extras")))
    ages = random.integers(20, 90, count)
    noisy = np.clip((ages - 20 + random.normal(0, 8, count)) / 70 * len(classes), 0, len(classes) - 1)
    return [
        {"age": int(age), "hospital": f"H{number % 4}", "ill": classes[int(at)]}
        for number, (age, at) in enumerate(zip(ages, noisy, strict=True))
    ]


@pytest.fixture(scope="module")
def several():
    return fit(ill(), label="ill", site="hospital", epsilon=8, seeds=3, **QUICK)


def row(result, name):
    (found,) = [line for line in fit_lines(result, result.table, None) if line.split()[0] == name]
    return found


def test_confusion_and_sites_add_up_to_the_accuracy(several):
    found, accuracy = several.outcome.rehearsal, several.outcome.accuracy
    confusion = np.array(found.confusion)
    assert found.classes == ["a", "b", "c"]
    assert confusion.sum() == several.table.tested == sum(one.rows for one in found.sites.values())
    assert np.trace(confusion) / confusion.sum() == pytest.approx(accuracy)
    assert accuracy > 0.5
    assert sum(one.accuracy * one.rows for one in found.sites.values()) / confusion.sum() == pytest.approx(accuracy)
    assert confusion.sum(axis=1).tolist() == np.bincount(several.experiment.data.test_labels).tolist()
    assert list(found.sites) == ["H0", "H1", "H2", "H3"]


def test_the_auc_of_several_classes_is_scikit_learns(several):
    held = several.experiment.seen_by(several.answers).data
    scores = several.model.model.logits(
        [several.model.arrays[name] for name in several.model.model.names], held.test_features
    )
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = roc_auc_score(held.test_labels, shares, multi_class="ovr")
    assert several.outcome.rehearsal.macro_auc == pytest.approx(expected)
    assert f"macro AUC {expected:.3f}" in row(several, "model")


def test_reliability_compares_probabilities_with_what_came_true(several):
    held, found = several.experiment.seen_by(several.answers).data, several.outcome.rehearsal
    scores = several.experiment.model.logits(several.parameters, held.test_features)
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    sure, right = shares.max(axis=1), shares.argmax(axis=1) == held.test_labels
    assert found.log_loss == pytest.approx(log_loss(held.test_labels, shares))
    assert sum(one.rows for one in found.reliability) == len(sure)
    for one in found.reliability:
        tenth = np.floor(sure * 10) == np.floor(one.predicted * 10)
        assert (one.rows, one.predicted) == (tenth.sum(), pytest.approx(sure[tenth].mean()))
        assert one.observed == pytest.approx(right[tenth].mean())
    assert reliability(np.array([[0.0, np.inf], [0.0, 1.0]]), np.array([1, 1]))[0].rows == 1  # one is no number


def test_seeds_have_a_mean_and_its_standard_error(several):
    found = several.outcome.rehearsal.seeds
    assert found.seeds == [1, 2, 3]
    singles = [
        fit(ill(), label="ill", site="hospital", epsilon=8, seed=seed, **QUICK).outcome.accuracy for seed in (2, 3)
    ]
    assert found.figures == pytest.approx([several.outcome.accuracy, *singles])
    assert len(set(found.figures)) > 1, "rows held out and noise differ"
    assert found.mean == pytest.approx(np.mean(found.figures))
    assert found.standard_error == pytest.approx(np.std(found.figures, ddof=1) / np.sqrt(3))
    assert f"{found.mean:.3f} on average of 3 seeds, standard error {found.standard_error:.3f}" in row(several, "seeds")
    for seed, one in zip(found.seeds, found.figures, strict=True):
        assert f"{one:.3f} of seed {seed}" in row(several, "seeds")
    assert f"{100 * found.figures[0]:.1f} %" in row(several, "model")
    assert "by seed 1, whose model this is" in row(several, "model")
    assert "with seed 1: " in row(several, "compare")


def test_the_worst_and_the_best_site_are_named():
    rows = [{**one, "ill": "yes" if (one["age"] > 55) ^ (one["hospital"] == "H2") else "no"} for one in ill()]
    result = fit(rows, label="ill", site="hospital", epsilon=8, **QUICK)
    aucs = {name: one.auc for name, one in result.outcome.rehearsal.sites.items()}
    assert min(aucs, key=aucs.get) == "H2"
    assert aucs["H2"] < 0.2
    assert f"{aucs['H2']:.3f} at 'H2'" in row(result, "by")


def test_numbers_have_no_classes_but_sites():
    rows = [{**one, "ill": one["age"] * 2.5} for one in ill()]
    found = fit(rows, label="ill", site="hospital", epsilon=8, **QUICK).outcome.rehearsal
    assert (found.confusion, found.classes, found.macro_auc, found.measure) == (None, [], None, "r2")
    assert (found.reliability, found.log_loss) == ([], None)
    assert all(one.r2 is not None for one in found.sites.values())


@pytest.mark.parametrize(
    ("options", "kind"), [({"seeds": 0}, "out-of-range"), ({"seeds": 2, "scale": "private"}, "out-of-range")]
)
def test_impossible_seeds_are_refused(options, kind):
    with raises(ConfigurationError, kind, "seeds"):
        fit(ill(60), label="ill", **QUICK, **options)


def test_a_real_fit_has_one_seed(tmp_path):
    with raises(ConfigurationError, "conflict", "seeds"):
        fit(tmp_path / "people.csv", label="ill", real=True, seeds=2)
