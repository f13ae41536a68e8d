"""Tables of people: scaled by constants alone, split once and for all."""

import csv
import gzip
import os

import numpy as np
import pytest
from murmurfl.app.data.built_in_tasks import unit_rows
from murmurfl.app.data.loading import load_dataset
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.runs.outcome import Outcome
from murmurfl.app.runs.run_summary import shown_accuracy
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

needs_data = pytest.mark.skipif(not os.environ.get("MURMURFL_DATA"), reason="MURMURFL_DATA is not set")
SIZES = {"credit-default": (24_000, 6_000, 45), "recidivism": (5_700, 1_514, 12)}
FILES = {"credit-default": "uci/UCI_Credit_Card.csv.gz", "recidivism": "compas/compas-two-years.csv.gz"}


@needs_data
@pytest.mark.parametrize("task", SIZES)
def test_everybody_is_in_one_part_and_every_row_has_length_one(task):
    data = load_dataset(RunConfig(task=task))
    assert (len(data.train_labels), len(data.test_labels), data.num_features) == SIZES[task]
    norms = np.linalg.norm(np.concatenate([data.train_features, data.test_features]), axis=1)
    assert norms == pytest.approx(1, abs=1e-5)
    assert (data.train_features[:, -1] > 0).all()  # the constant
    assert data.train_labels.mean() == pytest.approx(data.test_labels.mean(), abs=0.02)


@needs_data
@pytest.mark.parametrize("task", SIZES)
def test_a_row_depends_on_its_own_person_alone(task, tmp_path):
    """A table of the first fifty people gives the same rows: nothing is scaled by statistics."""
    name = FILES[task]
    with gzip.open(f"{os.environ['MURMURFL_DATA']}/{name}", "rt") as file:
        few = list(csv.reader(file))[:51]
    path = tmp_path / name
    path.parent.mkdir()
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows(few)
    kind = RunConfig(task=task)
    from murmurfl.app.data import TASKS

    values, labels = TASKS[kind.task].rows(os.environ["MURMURFL_DATA"])
    some, their_labels = TASKS[kind.task].rows(str(tmp_path))
    assert (some == values[:50]).all()
    assert (their_labels == labels[:50]).all()


def test_rows_are_scaled_one_by_one():
    values = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert unit_rows(values)[0] == pytest.approx(np.array([3, 4, 0.7]) / np.linalg.norm([3, 4, 0.7]))
    assert unit_rows(values)[1].tolist() == [0, 0, 1]


@pytest.mark.parametrize("task", SIZES)
def test_without_its_file_a_table_is_refused_with_its_name(task, tmp_path):
    with pytest.raises(ConfigurationError, match=FILES[task]):
        load_dataset(RunConfig(task=task, data_root=str(tmp_path)))


@needs_data
def test_a_run_with_two_classes_says_its_area_under_the_curve():
    config = RunConfig(task="recidivism", num_clients=20, clients_per_round=20, batch_size=57, mu=16.0)
    document = run_cohort(config).outcome.document()
    assert document["auc"] > 0.65
    assert document["per_round"][-1]["auc"] == document["auc"]
    assert f"AUC {document['auc']:.3f}" in shown_accuracy(Outcome.model_validate(document))
    assert run_cohort(RunConfig()).outcome.document()["auc"] is None
