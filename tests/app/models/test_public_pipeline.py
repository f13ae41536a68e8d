"""A saved model as a pipeline of scikit-learn alone, and as a frozen estimator."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from murmurfl.app import RunResult
from murmurfl.app.models.public_pipeline import PIPELINE, linear_terms, pipeline_notes, public_pipeline
from murmurfl.app.models.trained_model import TrainedModel
from murmurfl.clients import Column, Label, Schema
from murmurfl.privacy import ConfigurationError
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

from murmurfl import fit, load_model
from tests.harness.errors import raises

LABELS = {
    "two": Label(column="y", classes=("no", "yes")),
    "three": Label(column="y", classes=("a", "b", "c")),
    "number": Label(column="y", bounds=(-4.0, 4.0)),
}
COLUMNS = {
    "age": Column(kind="number", bounds=(0.0, 100.0), missing=40.0, missing_codes=(-9,)),
    "visits": Column(kind="integer", bounds=(0, 20), missing=2),
    "ward": Column(kind="category", values=("red", "blue"), missing="blue"),
    "code": Column(kind="category", values=("10", "2", "3")),
    "smoker": Column(kind="yes/no", missing="no"),
}


def cells() -> pd.DataFrame:
    random = np.random.default_rng(3)
    count = 700
    frame = pd.DataFrame(
        {
            "age": np.where(random.random(count) < 0.05, -9.0, random.uniform(-5.0, 120.0, count)),
            "visits": random.integers(0, 25, count).astype(float),
            "ward": random.choice(["red", "blue", "green"], count).astype(object),
            "code": random.choice([2, 3, 10, 77], count).astype(float),
            "smoker": random.choice(["yes", "no"], count).astype(object),
        }
    )
    for name in frame:
        frame.loc[random.random(count) < 0.05, name] = np.nan
    return frame


@cache
def trained(label: str, model: str) -> RunResult:
    frame, random = cells(), np.random.default_rng(4)
    scores = frame["age"].fillna(40.0) / 30.0 - 1.5 + (frame["ward"] == "red") + random.normal(size=len(frame)) / 2.0
    numbers = np.clip(scores.to_numpy(), -4.0, 4.0)
    classes: Any = {"two": np.array(["no", "yes"])[(numbers > 0.5).astype(int)], "number": numbers}
    targets = classes.get(label, np.array(["a", "b", "c"])[(numbers > 0).astype(int) + (numbers > 1)])
    schema = Schema(columns=COLUMNS, label=LABELS[label])
    settings: Any = {"model": model, **({"rank_share": 0.4} if model == "additive" else {})}
    return fit(frame.assign(y=targets), schema=schema, clients=4, epsilon=8, **settings)


def predicted(model: Any, rows: Any, label: str) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(model.predict(rows) if label == "number" else model.predict_proba(rows), dtype=float)


@pytest.mark.parametrize(
    ("label", "model"),
    [("two", "additive"), ("three", "additive"), ("number", "additive"), ("two", "softmax"), ("number", "ridge")],
)
def test_pipeline_and_coefficients_predict_as_the_model_does(label, model):
    found = trained(label, model).model
    pipeline = public_pipeline(found)
    rows = cells()
    expected = predicted(found, rows, label)
    assert np.allclose(predicted(pipeline, rows[rows.columns[::-1]], label), expected, atol=1e-6)  # by name
    terms = linear_terms(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no complaint about names of a table's columns
        expanded = pipeline[:-1].transform(rows)
    scores = expanded @ terms.coefficients.T + terms.intercepts
    if label == "two":
        assert np.allclose(1.0 / (1.0 + np.exp(-scores[:, 0])), expected[:, 1], atol=1e-6)
    elif label == "three":
        assert (scores.argmax(axis=1) == expected.argmax(axis=1)).all()
    assert len(terms.names) == len(set(terms.names)) == expanded.shape[1]


def test_cells_that_the_pipeline_cannot_read_are_errors_and_not_other_values():
    pipeline = public_pipeline(trained("two", "additive").model)
    row = cells().dropna().head(1)
    for name, cell in (("age", "12 years"), ("code", "ten"), ("smoker", True), ("smoker", 1), ("age", np.inf)):
        with pytest.raises((TypeError, ValueError), match=r"(?s)."):
            pipeline.predict(row.astype(object).assign(**{name: cell}))


def test_models_that_no_pipeline_expresses_are_refused_and_the_card_says_why(tmp_path):
    mixed = {**COLUMNS, "code": Column(kind="category", values=("1", "A"))}
    codes = {**COLUMNS, "ward": Column(kind="category", values=("red",), missing="red", missing_codes=("x",))}
    frame = cells().assign(y=np.where(np.arange(700) % 3, "no", "yes"))
    for changes, setting in (
        ({"columns": mixed}, "values"),
        ({"columns": codes}, "missing_codes"),
        ({"norm": 1.0}, "model"),
    ):
        schema = Schema(**{"columns": COLUMNS, "label": LABELS["two"], **changes})
        result = fit(frame, schema=schema, clients=2, epsilon=8, model="softmax")
        with raises(ConfigurationError, "unsupported", setting):
            public_pipeline(result.model)
    entry = json.loads((result.save(tmp_path / "m") / "card.json").read_text())["pipeline"]
    assert entry["file"] is None
    assert len(entry["notes"]) == 1
    assert not (tmp_path / "m" / "pipeline.skops").exists()
    assert "**pipeline**: none" in (tmp_path / "m" / "CARD.md").read_text()


def test_notes_name_the_columns_that_are_read_otherwise():
    dollars = Column(kind="number", bounds=(0.0, 1.0), unit="$", missing_codes=("none given",))
    notes = " ".join(pipeline_notes(Schema(columns={**COLUMNS, "fee": dollars}, label=LABELS["two"])))
    assert "(fee)" in notes
    assert "(visits)" in notes
    assert "(smoker)" in notes


def test_saved_pipeline_predicts_in_a_process_without_murmurfl(tmp_path):
    pytest.importorskip("skops")
    result = trained("two", "additive")
    folder = result.save(tmp_path / "model")
    rows = cells()
    rows.to_pickle(tmp_path / "rows.pkl")
    code = (
        "import sys, numpy, pandas, skops.io\n"
        "sys.modules['murmurfl'] = None\n"
        "assert skops.io.get_untrusted_types(file='model/pipeline.skops') == []\n"
        "pipeline = skops.io.load('model/pipeline.skops')\n"
        "numpy.save('found.npy', pipeline.predict_proba(pandas.read_pickle('rows.pkl')))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert np.allclose(np.load(tmp_path / "found.npy"), predicted(result.model, rows, "two"), atol=1e-6)
    assert json.loads((folder / "card.json").read_text())["pipeline"]["file"] == "pipeline.skops"


def test_loaded_model_is_frozen_and_predicts_rows_with_gaps(tmp_path):
    result, rows = trained("two", "additive"), cells()
    loaded = load_model(result.save(tmp_path / "model"))
    assert isinstance(loaded, FrozenEstimator)
    before = predicted(loaded, rows, "two")
    assert clone(loaded) is loaded
    loaded.fit(rows, np.zeros(len(rows)))
    assert np.array_equal(predicted(loaded, rows, "two"), before)
    assert np.isfinite(before).all()
    assert np.isfinite(predicted(loaded, rows.map(lambda _: None).head(1), "two")).all()
    assert loaded.classes_.tolist() == ["no", "yes"]
    assert loaded.score(rows, loaded.predict(rows)) == 1.0
    assert (loaded.n_features_in_, loaded.feature_names_in_.tolist()) == (5, list(COLUMNS))
    with raises(ConfigurationError, "wrong-shape", "rows"):
        loaded.predict(np.zeros((2, 4)))


def test_a_pipelines_file_follows_from_the_model_alone(tmp_path):
    """No time, and no address of an object, which depends on what a process did before."""
    pytest.importorskip("skops")
    rows = [{"age": float(age), "ward": "ab"[age % 2], "ill": "yes" if age > 50 else "no"} for age in range(20, 80)]
    model = fit(rows, label="ill", clients=2, epsilon=8).model
    first = (model.save(tmp_path / "first") / PIPELINE).read_bytes()
    kept = [bytearray(number) for number in range(1, 2000)]  # addresses are others from here on
    again = TrainedModel.read(tmp_path / "first")
    assert (again.save(tmp_path / "again") / PIPELINE).read_bytes() == first, len(kept)
    assert not re.search(rb"\d{12,}\.npy", first)
