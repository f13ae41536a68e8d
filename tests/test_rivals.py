"""How models of other libraries are compared: rows that are held out, settings, and noise for the same guarantee."""

import csv
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from murmurfl.privacy import gdp_mu

from benchmarks import rival_models, rivals
from benchmarks.judged_tables import JUDGED, REGRESSION, TableSource

DELTA = 1e-5


def delta_of_adding_a_record(noise, epsilon, rate, steps):
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    return PLDAccountant().compose(event).get_delta(epsilon)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_noise_of_full_batches_is_that_of_twice_the_sensitivity(epsilon):
    found = rival_models.multiplier(epsilon, DELTA, 1.0, 30)
    assert found == pytest.approx(2 * math.sqrt(30) / gdp_mu(epsilon, DELTA), rel=2e-3)


def test_noise_of_nearly_full_batches_is_near_that_of_full_ones():
    full, nearly = (rival_models.multiplier(2.0, DELTA, rate, 30) for rate in (1.0, 0.9999))
    assert nearly == pytest.approx(full, rel=1e-2)


@pytest.mark.parametrize(("rate", "steps"), [(0.25, 50), (0.05, 400)])
def test_replacing_a_record_costs_more_than_adding_it_and_less_than_twice_the_sensitivity(rate, steps):
    noise = rival_models.multiplier(2.0, DELTA, rate, steps)
    assert delta_of_adding_a_record(noise, 2.0, rate, steps) < DELTA / 10
    assert delta_of_adding_a_record(noise / 2, 2.0, rate, steps) > 0.9 * DELTA


def test_training_and_test_rows_are_apart_and_classes_have_equal_shares(tmp_path):
    table = tmp_path / "table.csv"
    rows = [[str(at), "yes" if at % 10 == 0 else "no"] for at in range(200)]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["x", "label"], *rows])
    train, test = (
        list(csv.reader(path.open(newline="")))[1:]
        for path in rivals.split_files(table, TableSource("", "label", ("yes",)), 1, tmp_path)
    )
    assert sorted([*train, *test]) == sorted(rows)
    assert len(test) == 40
    assert sum(row[1] == "yes" for row in test) == 4


def test_settings_are_chosen_without_the_table_in_question():
    rival, count = "diffprivlib", len(rivals.GRIDS["diffprivlib"])
    best = {"heart": 3, "hypothyroid": 5, "bank": 5}
    scores = {
        name: {f"{rival}, 2": [90.0 if at == place else 50.0 for at in range(count)]} for name, place in best.items()
    }
    document = {"tuning": scores}
    assert rivals.chosen(document, rival, "census", 2.0) == rivals.GRIDS[rival][5]
    only = {"tuning": {"heart": scores["heart"], "bank": scores["bank"]}}
    assert rivals.chosen(only, rival, "bank", 2.0) == rivals.GRIDS[rival][3]
    assert rivals.chosen(only, rival, "heart", 2.0) == rivals.GRIDS[rival][5]


def test_no_table_judges_that_helped_to_choose():
    assert not JUDGED.keys() & REGRESSION.keys()
    assert not {one.source for one in JUDGED.values()} & {one.source for one in REGRESSION.values()}
    assert all(one.judged for one in JUDGED.values())
    assert not any(one.judged for one in REGRESSION.values())


def test_means_of_splits_are_shown_with_their_errors():
    made = {"rows": 1_000, "columns": 5, "scores": {"HGB": {"1": 80.0, "2": 82.0}}, "seconds": {"HGB": {"1": 1.0}}}
    made["scores"]["diffprivlib, 2"] = {"1": 70.0}
    made["seconds"]["diffprivlib, 2"] = {"1": 3.0}
    first, second, _ = rivals.shown({"tables": {"heart": made}}).splitlines()[2:]
    assert first.startswith("| heart (1,000, 5) | 0.5 | 81.0 ± 1.0 |")
    assert second.endswith("| 70.0 | 1 / - / - / - |")


def test_a_gap_is_that_to_the_best_without_privacy():
    scores = {"HGB": {"1": 80.0}, "EBM": {"1": 82.0}, "additive": {"1": 99.0}, "now, sums, 2": {"1": 79.0}}
    document = {"tables": {"heart": {"scores": scores}, "Ames": {"scores": {"now, sums, 2": {"1": 1.0}}}}}
    assert rivals.gaps(document, ["heart", "Ames"]).splitlines()[2:] == ["| now, sums |  | 3.0 |  | 1 |"]


def test_a_lead_is_over_the_best_private_rival_of_the_same_splits():
    scores = {
        "before, trusted, 2": {"1": 70.0, "2": 71.0},
        "now, trusted, 2": {"1": 82.0, "2": 84.0},
        "diffprivlib, 2": {"1": 81.0, "2": 81.0, "3": 81.0},
        "Opacus linear, 2": {"1": 60.0},
    }
    found = rivals.leads({"tables": {"heart": {"scores": scores}}}, ["heart", "Ames"]).splitlines()[2:]
    assert found == ["| heart |  | 2.0 ± 1.0 (diffprivlib) |  |"]


def test_the_small_run_shows_what_is_recorded_and_measures_four_tables_anew(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        rivals, "measure", lambda document, names, what: asked.append((names, what.columns, what.epsilons))
    )
    monkeypatch.setattr("sys.argv", ["rivals", "--small"])
    rivals.main()
    assert asked == [([*rivals.SMALL], [*rivals.PRODUCT], (2.0,))]
    assert capsys.readouterr().out.startswith("Recorded:\n| table (rows, columns) |")
