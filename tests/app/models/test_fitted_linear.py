"""Linear models that private trainings are compared with: scikit-learn's, to the third digit of a probability."""

import numpy as np
import pytest
from murmurfl.app.models.fitted_linear import discriminant, logistic, ridge
from scipy.special import softmax
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge


@pytest.fixture(params=[load_digits, load_breast_cancer], ids=["ten", "two"])
def classes(request):
    rows, labels = request.param(return_X_y=True)
    rows = (rows / np.sqrt(np.square(rows).sum(axis=1).mean())).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    return rows[order], labels[order], int(labels.max()) + 1


@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_logistic_regression_is_scikit_learns(classes, strength):
    rows, labels, count = classes
    expected = LogisticRegression(C=strength, max_iter=300, tol=1e-3).fit(rows[:150], labels[:150])
    found = softmax(logistic(rows[:150], labels[:150], strength, count).scores(rows[150:]), axis=1)
    np.testing.assert_allclose(found, expected.predict_proba(rows[150:]), atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of classes with one row
@pytest.mark.parametrize("count", [4, 150])
def test_discriminant_analysis_is_scikit_learns(classes, count):
    rows, labels, num_classes = classes
    expected = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(rows[:count], labels[:count])
    found = softmax(discriminant(rows[:count], labels[:count], num_classes).scores(rows[150:]), axis=1)
    np.testing.assert_allclose(found[:, expected.classes_], expected.predict_proba(rows[150:]), atol=1e-3)
    assert found.sum() == pytest.approx(found[:, expected.classes_].sum()), "a class that was not seen is never named"


def test_ridge_regression_is_scikit_learns():
    rows, numbers = load_diabetes(return_X_y=True)
    expected = Ridge(0.01).fit(rows, numbers).predict(rows)
    np.testing.assert_allclose(ridge(rows, numbers, 0.01).scores(rows)[:, 0], expected, rtol=1e-9)


def test_one_class_alone_is_always_named():
    found = logistic(np.ones((3, 2)), np.full(3, 2), 1.0, 4).scores(np.ones((5, 2)))
    assert set(found.argmax(axis=1)) == {2}
