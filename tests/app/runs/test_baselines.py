"""Models without privacy: each finds what its kind can find, and none looks at rows that are held out."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app.data.task import Dataset
from murmurfl.app.runs import baselines as made
from murmurfl.app.runs.baselines import baselines, mean_scores, one_against_others, sites_alone_on_own
from sklearn.metrics import roc_auc_score


def dataset(label, count=1500, classes=2, columns=4):
    """Rows of uniform columns, a quarter held out."""
    random = np.random.Generator(np.random.Philox(key=5))
    rows = random.uniform(-1, 1, (count, columns)).astype(np.float32)
    labels = np.asarray(label(rows))
    train = count * 3 // 4
    return Dataset(rows[:train], labels[:train], rows[train:], labels[train:], classes)


def line(rows):
    return (rows[:, 0] + rows[:, 1] > 0).astype(np.int64)


def curve(rows):
    return (np.abs(rows[:, 0]) + np.abs(rows[:, 1]) > 1).astype(np.int64)


def both(rows):
    return (rows[:, 0] * rows[:, 1] > 0).astype(np.int64)


@pytest.mark.parametrize(
    ("label", "able"),
    [(line, {"linear", "additive", "boosted"}), (curve, {"additive", "boosted"}), (both, {"boosted"})],
)
def test_each_model_finds_what_its_kind_can(label, able):
    found = baselines(dataset(label))
    aucs = {name: getattr(found, name).auc for name in ("linear", "additive", "boosted")}
    assert {name for name, auc in aucs.items() if auc > 0.95} == able
    assert all(auc < 0.7 for name, auc in aucs.items() if name not in able)


def test_numbers_have_a_squared_error_and_curves_lessen_it():
    found = baselines(dataset(lambda rows: np.abs(rows[:, 0]).astype(np.float32), classes=1))
    assert found.linear.accuracy is found.linear.auc is None
    assert found.additive.loss < found.linear.loss / 10
    assert found.boosted.loss < found.linear.loss / 10


def test_labels_of_rows_held_out_change_no_model():
    data = dataset(curve)
    other = replace(data, test_labels=1 - data.test_labels)
    ours, theirs = baselines(data), baselines(other)
    for name in ("linear", "additive", "boosted"):
        assert getattr(ours, name).auc == pytest.approx(1 - getattr(theirs, name).auc)


def test_a_large_table_is_sampled_and_says_so(monkeypatch):
    monkeypatch.setattr(made, "MOST_ROWS", 300)
    data = dataset(line)
    assert len(data.train_labels) > 300
    assert baselines(data).rows == 300


def test_rows_of_one_class_have_no_baselines():
    assert baselines(dataset(lambda rows: np.zeros(len(rows), np.int64))) is None


@pytest.mark.parametrize("classes", [2, 3])
def test_the_auc_is_scikit_learns_mean_of_one_against_others(classes):
    random = np.random.Generator(np.random.Philox(key=7))
    scores, labels = random.normal(size=(400, classes)), random.integers(classes, size=400)
    scores[np.arange(400), labels] += 1
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = roc_auc_score(labels, shares[:, 1] if classes == 2 else shares, multi_class="ovr")
    assert one_against_others(scores, labels) == pytest.approx(expected)


def test_a_site_alone_is_judged_on_rows_of_its_own():
    """Two sites whose labels are each other's opposite: each is right on its own rows."""
    data = dataset(line, 2000)
    sites, test_sites = np.arange(1500) % 2, np.arange(500) % 2
    turned = replace(
        data,
        train_labels=data.train_labels ^ sites,
        test_labels=data.test_labels ^ test_sites,
        client_of=sites.astype(np.int64),
    )
    assert mean_scores(sites_alone_on_own(turned, test_sites).values()).auc > 0.98
    assert mean_scores(sites_alone_on_own(turned, 1 - test_sites).values()).auc < 0.02, "sites that are exchanged show"
    assert baselines(turned).linear.auc < 0.7


def test_missing_values_are_the_mean_for_linear_models_and_no_knot():
    data = dataset(curve)
    gaps = data.train_features.copy(), data.test_features.copy()
    for rows in gaps:
        rows[::5, 0] = np.nan
    found = baselines(replace(data, train_features=gaps[0], test_features=gaps[1]))
    aucs = {name: getattr(found, name).auc for name in ("linear", "additive", "boosted")}
    assert min(aucs["additive"], aucs["boosted"]) > 0.85
    assert aucs["linear"] < 0.7
