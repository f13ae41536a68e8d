"""PrivateClassifier and PrivateRegressor as scikit-learn's own tools use them, in rehearsals and for real."""

from __future__ import annotations

import hashlib
import pickle
import secrets
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from murmurfl.clients import Column, Label, Schema
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, PredefinedSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from murmurfl import PrivateClassifier, PrivateRegressor
from tests.harness.errors import raises

REVIEWED = Schema(
    columns={name: Column(kind="number", bounds=(-4.0, 4.0)) for name in "abc"},
    label=Label(column="state", classes=("ill", "well")),
    reviewed=True,
)


@parametrize_with_checks([PrivateClassifier(), PrivateRegressor()])
def test_scikit_learn_s_checks_pass_without_an_exception(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    features = random.normal(size=(1200, 3))
    return features, np.where(features[:, 0] + 0.5 * features[:, 1] > 0.2, "ill", "well")


@pytest.mark.parametrize("classes", [(False, True), (0, 1), (7, -3), ("no", "yes"), ("a", " a"), (1.0, 2.0)])
def test_classes_come_back_in_the_type_of_the_labels(rows, classes):
    features, state = rows
    labels = np.array(classes)[(state == "ill").astype(int)]
    model = PrivateClassifier(epsilon=8, random_state=1).fit(features, labels)
    assert model.classes_.tolist() == sorted(classes)
    assert model.predict(features).dtype == labels.dtype
    assert model.score(features, labels) > 0.8
    assert np.allclose(model.predict_proba(features).sum(axis=1), 1.0)


def test_words_and_gaps_of_a_frame_are_read_and_another_order_of_columns_is_refused(rows):
    features, state = rows
    frame = pd.DataFrame({"size": features[:, 0], "colour": np.where(features[:, 1] > 0, "red", "blue")})
    frame.loc[::7, "size"] = np.nan
    frame.loc[::11, "colour"] = None
    model = PrivateClassifier(epsilon=8, random_state=1).fit(frame, state)
    assert model.feature_names_in_.tolist() == ["size", "colour"]
    assert model.score(frame, state) > 0.7
    assert {"colour=red", "size=missing"} <= set(model.coef_names_)
    assert model.coef_.shape == (1, len(model.coef_names_))
    with pytest.raises(ValueError, match="order"):
        model.predict(frame[["colour", "size"]])


def test_sites_are_clients_and_one_may_lack_a_class(rows):
    features, state = rows
    sites = np.where(state == "ill", np.where(np.arange(len(state)) % 2, "north", "south"), "south")
    model = PrivateClassifier(epsilon=8, random_state=1).fit(features, state, sites=sites)
    assert model.result_.num_clients == 2
    assert model.score(features, state) > 0.7
    with raises(ConfigurationError, "wrong-shape", "sites"):
        PrivateClassifier().fit(features, state, sites=sites[:-1])


def test_one_class_is_refused(rows):
    with raises(ConfigurationError, "out-of-range", "y"):
        PrivateClassifier().fit(rows[0], np.zeros(len(rows[0])))


def test_rehearsal_says_so_first_and_spends_nothing(rows, tmp_path):
    model = PrivateClassifier(random_state=3).fit(*rows)
    assert repr(model).startswith("REHEARSAL")
    assert model._repr_html_().startswith("<b>REHEARSAL")
    assert model._repr_mimebundle_()["text/html"].startswith("<b>REHEARSAL")
    assert repr(model.result_).startswith("REHEARSAL")
    again = clone(model).fit(*rows)
    assert np.array_equal(model.coef_, again.coef_)
    assert not np.array_equal(model.coef_, clone(model).set_params(random_state=4).fit(*rows).coef_)


def test_pipelines_and_cross_validation_work_with_a_rehearsal(rows):
    model = make_pipeline(StandardScaler(), PrivateClassifier(epsilon=8, random_state=1))
    assert cross_val_score(model, *rows, cv=3).mean() > 0.8


def test_pickle_keeps_the_model_and_no_rows(rows):
    features, state = rows
    marked = features.copy()
    marked[5, 0] = 0.123456789
    model = PrivateClassifier(random_state=1).fit(marked, state)
    text = pickle.dumps(model)
    assert np.float64(0.123456789).tobytes() not in text
    loaded = pickle.loads(text)
    assert np.array_equal(loaded.predict_proba(features), model.predict_proba(features))
    assert not hasattr(loaded, "result_")


def test_coefficients_give_the_scores_of_a_linear_model_and_the_numbers_of_a_regressor(rows):
    features, _ = rows
    numbers = 3.0 * features[:, 0] + 100.0
    regressor = PrivateRegressor(epsilon=8, model="ridge", random_state=1).fit(features, numbers)
    low, high = features.min(axis=0), features.max(axis=0)
    predicted = (2.0 * (features - low) / (high - low) - 1.0) @ regressor.coef_ + regressor.intercept_
    assert np.allclose(np.clip(predicted, numbers.min(), numbers.max()), regressor.predict(features), atol=1e-3)


def real(tmp_path: Any, name: str = "rows", **more: Any) -> PrivateClassifier:
    return PrivateClassifier(schema=REVIEWED, ledger=tmp_path / f"{name}.ledger", **more)


def spent(model: PrivateClassifier) -> float:
    with SQLiteLedger(model.ledger).exclusive() as page:
        return page.account().spent.mu


def test_real_noise_is_not_seeded_and_the_result_says_real(rows, tmp_path):
    one, other = (real(tmp_path, name, random_state=1).fit(*rows) for name in ("one", "other"))
    assert not np.allclose(one.coef_, other.coef_)
    assert all(text.startswith("REAL") for text in (repr(one), repr(one.result_)))
    assert one.classes_.tolist() == ["ill", "well"]
    assert one.score(*rows) > 0.7
    assert one.result_.accuracy is None
    assert spent(one) == pytest.approx(one.result_.mu)


def test_real_fit_reads_arrays_and_frames_alike_row_by_row(rows, tmp_path):
    features, state = rows
    model = real(tmp_path, budget=8.0).fit(features, state)
    before = spent(model)
    model.fit(pd.DataFrame(features[:, ::-1], columns=list("cba")), pd.Series(state))  # the same rows to the ledger
    assert spent(model) == pytest.approx(before * np.sqrt(2.0))
    strange = features.astype(object)
    strange[3, 1], strange[4, 0] = {"no": "number"}, "far"
    assert real(tmp_path, "strange").fit(strange, state).score(features, state) > 0.6


class Unprintable:
    """A cell on which everything fails."""

    def __str__(self) -> str:
        raise RuntimeError("5551234")

    __repr__ = __float__ = __str__


@pytest.mark.parametrize("in_frame", [False, True])
@pytest.mark.parametrize(
    ("cell", "label"),
    [(Unprintable(), "ill"), (1.0, Unprintable()), (1.0, "5551234"), (b"\xff", None), (1.0, 5551234.5)],
)
def test_strange_record_shows_in_nothing_that_a_real_fit_leaves(
    rows, tmp_path, monkeypatch, recwarn, capfd, cell, label, in_frame
):
    """With the same key, all of it is what is left where that row has no label: both records count as zero."""
    drawn = iter(())
    monkeypatch.setattr(
        secrets, "token_bytes", lambda size: hashlib.blake2b(b"%d" % next(drawn), digest_size=size).digest()
    )
    left = []
    for name, (value, target) in {"missing": (1.0, None), "strange": (cell, label)}.items():
        drawn = iter(range(10_000))
        features, state = rows[0].astype(object), list(rows[1])
        features[3, 1], state[3] = value, target
        given = pd.DataFrame(features, columns=list("abc")) if in_frame else features
        model = real(tmp_path, name).fit(given, state)
        card = {key: entry for key, entry in model.model_.card.items() if key != "date"}
        arrays = {key: array.tobytes() for key, array in model.model_.arrays.items()}
        left.append((card, arrays, repr(model).replace(f"{name}.ledger", ""), capfd.readouterr(), len(recwarn.list)))
        assert "5551234" not in str(left[-1])
    assert left[0] == left[1]


def test_real_fit_of_other_rows_is_refused_and_books_nothing(rows, tmp_path):
    features, state = rows
    model = real(tmp_path, budget=8.0).fit(features, state)
    before = spent(model)
    with raises(LedgerError, "mismatch"):
        model.fit(features + 1.0, state)
    with raises(LedgerError, "mismatch"):
        model.fit(features[:600], state[:600])
    assert spent(model) == before


@pytest.mark.parametrize(
    ("parameters", "kind", "setting"),
    [
        ({"schema": None}, "missing", "schema"),
        ({"schema": REVIEWED.model_copy(update={"reviewed": False})}, "missing", "reviewed"),
        ({"trust": "trusted-server"}, "conflict", "trust"),
        ({"schema": REVIEWED.model_copy(update={"owner": "who"})}, "mismatch", "columns"),
    ],
)
def test_what_a_real_fit_cannot_be_is_refused_before_a_ledger_is_made(rows, tmp_path, parameters, kind, setting):
    with raises(ConfigurationError, kind, setting):
        real(tmp_path).set_params(**parameters).fit(*rows)
    for features in (rows[0].tolist(), rows[0][:, :2]):
        with raises(ConfigurationError, "wrong-type" if isinstance(features, list) else "wrong-shape", "X"):
            real(tmp_path).fit(features, rows[1])
    assert list(tmp_path.iterdir()) == []


def test_search_on_real_rows_warns_and_every_fit_is_booked(rows, tmp_path):
    model = real(tmp_path, budget=8.0)
    split = PredefinedSplit([-1] * 900 + [0] * 300)
    with pytest.warns(UserWarning, match="spends"):
        GridSearchCV(model, {"epsilon": [1.0, 2.0]}, cv=split, refit=False).fit(*rows)
    each = [real(tmp_path, f"{epsilon}", epsilon=epsilon).fit(*rows).result_.mu for epsilon in (1.0, 2.0)]
    assert spent(model) == pytest.approx(np.hypot(*each))
