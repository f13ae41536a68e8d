"""A model adapted inside a site is never taken for a private one; each table gives a clear result or a refusal."""

import json
import logging
import shutil
import stat
import warnings
from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app import fit, load_model, personalise, simulate
from murmurfl.app.commands.main import cli
from murmurfl.app.models.public_pipeline import public_pipeline
from murmurfl.app.models.trained_model import PERSONAL, PersonalModel, TrainedModel, read_model
from murmurfl.app.reports.making import make_report
from murmurfl.app.runs.result import write_record
from murmurfl.clients import Column, Label, Schema
from murmurfl.privacy import ConfigurationError, derived_seed
from sklearn.base import clone
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "small_rehearsals")


def people(count, limit, key):
    """Rows of a site where who is older than ``limit`` is ill; every nineteenth age is missing."""
    random = np.random.Generator(np.random.Philox(key=derived_seed("personal", key)))
    ages, wards = random.integers(18, 90, count), random.choice(["a", "b"], count)
    return [
        {
            "age": "" if number % 19 == 0 else str(age),
            "ward": str(ward),
            "ill": "yes" if age > limit else "no",
            "hospital": f"H{number % 4}",
        }
        for number, (age, ward) in enumerate(zip(ages, wards, strict=True))
    ]


def write(path, rows, columns=("age", "ward", "ill", "hospital")):
    """A CSV file with columns in this order."""
    path.write_text("\n".join([",".join(columns), *(",".join(row[name] for name in columns) for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="module")
def result():
    return fit(people(400, 50, "all"), label="ill", site="hospital", epsilon=8)


@pytest.fixture(scope="module")
def made(result):
    return personalise(result.model, people(150, 30, "here"))


@pytest.fixture
def run(result, tmp_path):
    """A run's folder, with the private model in it."""
    folder = tmp_path / "runs" / "all"
    write_record(result, folder)
    result.save(folder / "model")
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*arguments):
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def test_a_site_with_another_limit_is_adapted_to(result, made):
    new = people(300, 30, "new")
    right = [
        np.mean([one == row["ill"] for one, row in zip(model.predict(new), new, strict=True)])
        for model in (result, made)
    ]
    assert right[1] > right[0] + 0.1
    assert made.comparison.personal.right > made.comparison.common.right
    assert made.comparison.standard_error < 0.1
    assert made.rows == 150


def test_every_view_says_first_what_the_model_contains(made, tmp_path):
    folder = made.save(tmp_path / "own")
    card = json.loads((folder / "card.json").read_text())
    assert list(card)[:1] == ["what"]
    assert card["what"] == PERSONAL == "contains this site's records, do not publish"
    assert card["epsilon"] is None is card["mu"]
    assert (folder / "CARD.md").read_text().lower().startswith(f"# {PERSONAL}")
    assert PERSONAL in repr(made).splitlines()[0]
    assert PERSONAL in repr(made.model)
    with pytest.warns(UserWarning, match=PERSONAL):
        loaded = load_model(folder)
    assert "Personalised" in repr(loaded)
    for guarantee in (made.guarantee, loaded.guarantee):
        assert guarantee.startswith(f"No guarantee: this model {PERSONAL}.")


def test_the_common_model_keeps_its_guarantee_in_words(result, made):
    assert made.guarantee.endswith("nobody was protected, and there is no guarantee: do not publish).")
    card = {**result.model.card, "epsilon": 8.0, "sentence": "mu = 1.66 Gaussian DP, epsilon = 8"}
    real = replace(result.model, card=card)
    assert real.guarantee == card["sentence"]
    assert personalise(real, people(20, 30, "few")).guarantee.endswith(f"keeps its guarantee: {card['sentence']}")
    assert result.model.guarantee.startswith("No guarantee: a rehearsal")


def test_only_the_owner_can_read_the_files(made, tmp_path):
    folder = made.save(tmp_path / "own")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {"CARD.md", "card.json", "personal.npz", "schema.toml"}


def test_a_saved_model_predicts_the_same(made, tmp_path):
    rows = people(30, 30, "same")
    with pytest.warns(UserWarning, match=PERSONAL):
        loaded = load_model(made.save(tmp_path / "own"))
    assert loaded.predict(rows).tolist() == made.predict(rows).tolist()
    assert np.allclose(loaded.predict_proba(rows), made.model.predict_proba(rows))
    assert clone(loaded).predict(rows).tolist() == made.predict(rows).tolist()
    assert isinstance(read_model(tmp_path / "own"), PersonalModel)


def test_nothing_that_shows_or_publishes_a_model_takes_it(made, run, tmp_path):
    folder = made.save(tmp_path / "own")
    with raises(ConfigurationError, "unsupported", match=PERSONAL):
        TrainedModel.read(folder)
    for use in (
        made.model.curves,
        made.model.importance,
        made.model.coefficients,
        lambda: made.model.save(tmp_path / "x"),
    ):
        with raises(ConfigurationError, "unsupported", match=PERSONAL):
            use()
    with raises(ConfigurationError, "unsupported", "model"):
        public_pipeline(made.model)
    assert made.model.pipeline.made is None
    with raises(ConfigurationError, "unsupported", "model"):
        personalise(made.model, people(20, 30, "again"))
    assert command("curves", folder).exit_code == 1
    assert command("personalise", folder, write(tmp_path / "again.csv", people(20, 30, "again"))).exit_code == 1
    shutil.rmtree(run / "model")
    shutil.copytree(folder, run / "model")
    with raises(ConfigurationError, "unsupported", match=PERSONAL):
        make_report([run], tmp_path / "report")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("other", ["card.json", "personal.npz", "weights.npz"])
def test_files_of_both_kinds_of_models_cannot_be_swapped(result, made, tmp_path, other):
    private, own = result.save(tmp_path / "private"), made.save(tmp_path / "own")
    source = own if (own / other).exists() else private
    target = private if source is own else own
    shutil.copy(source / other, target / other)
    if other == "card.json":
        with raises(ConfigurationError, "unsupported", match=PERSONAL):
            TrainedModel.read(target)
        with raises(ConfigurationError, "unreadable"), warnings.catch_warnings():
            load_model(target)
    elif target is private:
        assert type(read_model(target)) is TrainedModel
    else:
        assert type(read_model(target)) is PersonalModel


def test_the_command_leaves_the_private_model_and_other_files_alone(run, tmp_path):
    table = write(tmp_path / "north.csv", people(120, 30, "north"))
    before = contents(tmp_path)
    done = command("personalise", run, table)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert PERSONAL in lines[0]
    assert "stays inside this site" in lines[0]
    assert [line.split("  ")[0].strip() for line in lines[1:2]] == ["rows"]
    for name in ("common model", "this site alone", "personalised"):
        assert sum(f"{name} " in line and "% right" in line for line in lines) == 1
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    assert {path.parent.name for path in after.keys() - before.keys()} == {"north.personal"}
    again = command("personalise", run, table)
    assert again.exit_code == 1
    assert "exists" in again.output


def test_predictions_are_marked_as_well(run, tmp_path):
    table = write(tmp_path / "north.csv", people(40, 30, "north"))
    assert command("personalise", run, table, "--output", tmp_path / "own").exit_code == 0
    done = command("predict", tmp_path / "own", table)
    assert done.exit_code == 0
    assert PERSONAL in done.output.splitlines()[0]
    assert (tmp_path / "north.personalised.csv").read_text().splitlines()[0].split(",")[-2] == "personalised_ill"
    assert not (tmp_path / "north.predicted.csv").exists()


def test_a_folder_that_may_be_published_is_refused(made, run):
    for folder in (run / "own", run / "model" / "own"):
        with raises(ConfigurationError, "conflict"):
            made.save(folder)
        assert not folder.exists()
    with raises(ConfigurationError, "exists"):
        made.save(run)
    with raises(ConfigurationError, "not-found"):
        made.save(run.parent / "none" / "own")


def test_nothing_is_logged_or_printed_from_python(result, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    rows = [*people(40, 30, "quiet"), {"age": "secret", "ward": "secret", "ill": "secret", "hospital": "H1"}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = personalise(result.model, rows)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert "secret" not in repr(made)


def test_rows_and_columns_in_another_order_give_the_same_model(result, made, tmp_path):
    rows = people(150, 30, "here")
    table = write(tmp_path / "turned.csv", rows[::-1], ("hospital", "ill", "ward", "age"))
    other = personalise(result.model, table)
    assert np.array_equal(other.model.head.weights, made.model.head.weights)
    assert np.array_equal(other.model.head.offsets, made.model.head.offsets)


def test_odd_rows_are_counted_and_left_out(result):
    odd = [
        {"age": "old", "ward": "mars", "ill": "yes", "hospital": "H1"},  # missing and other: both fit
        {"age": "60", "ward": "a", "ill": "maybe", "hospital": "H1"},
        {"age": "60", "ward": "a", "ill": "", "hospital": "H1"},
    ]
    found = personalise(result.model, [*people(30, 30, "odd"), *odd])
    assert found.rows == 31
    assert sum(found.left_out.values()) == 2
    assert found.unused == ("hospital",)


@pytest.mark.parametrize("count", [1, 5])
def test_tiny_sites_get_the_common_model_back(result, count):
    found = personalise(result.model, people(count, 30, "tiny"))
    assert found.model.head.common == 1.0
    new = people(100, 50, "new")
    assert found.predict(new).tolist() == result.predict(new).tolist()
    assert (found.comparison is None) == (count == 1)


def test_a_site_of_one_class_and_constant_columns_is_fitted(result):
    rows = [{"age": "40", "ward": "a", "ill": "yes", "hospital": "H1"}] * 40
    found = personalise(result.model, rows)
    assert found.predict(rows[:1]).tolist() == ["yes"]
    assert found.comparison.personal.auc is None
    assert found.comparison.personal.right == 1.0


@pytest.mark.parametrize(
    ("columns", "rows", "kind", "setting", "match"),
    [
        (("age", "ward", "ill"), 0, "missing", "rows", "got none"),
        (("age", "ward", "il"), 9, "mismatch", "columns", "Rename 'il' if it is 'ill'"),
        (("aged", "ward", "ill"), 9, "mismatch", "columns", "Rename 'aged' if it is 'age'"),
        (("age", "ward", "ill", "ill"), 9, "mismatch", "columns", "twice"),
    ],
)
def test_tables_that_do_not_fit_are_refused(result, tmp_path, columns, rows, kind, setting, match):
    path = tmp_path / "site.csv"
    path.write_text("\n".join([",".join(columns), *[",".join(["40", "a", "yes", "no"][: len(columns)])] * rows]) + "\n")
    with raises(ConfigurationError, kind, setting, match=match):
        personalise(result.model, path)


def test_a_folder_that_is_mistyped_is_named(run, tmp_path):
    table = write(tmp_path / "north.csv", people(10, 30, "north"))
    done = command("personalise", run.with_name("al"), table)
    assert done.exit_code == 1
    assert f"Did you mean {run}?" in done.output
    assert "Did you mean" in command("personalise", run, table, "--outptu", "x").output


def test_all_rows_of_an_owner_count_once():
    visits = [row | {"person": f"p{number // 2}"} for number, row in enumerate(people(300, 50, "visits"))]
    common = fit(visits, label="ill", owner="person", clients=3, epsilon=8)
    here = [row | {"person": "one"} for row in people(60, 30, "one person")]
    assert personalise(common.model, here).model.head.common == 1.0
    apart = [row | {"person": f"q{number}"} for number, row in enumerate(here)]
    assert personalise(common.model, apart).model.head.common < 1.0


def test_a_rare_class_with_a_weight_is_still_predicted():
    def rare(count, key, *, turned=False):
        random = np.random.Generator(np.random.Philox(key=derived_seed("rare", key)))
        ages = random.integers(0, 100, count)
        ill = (ages < 20 if turned else ages > 80) & (random.random(count) < 0.3)  # at any age less likely than not
        return [{"age": str(age), "ill": "yes" if one else "no"} for age, one in zip(ages, ill, strict=True)]

    label = Label(column="ill", classes=("no", "yes"), class_weights=(1, 15))
    schema = Schema(columns={"age": Column(kind="number", bounds=(0, 100))}, label=label)
    common = fit(rare(3000, "all"), schema=schema, clients=2, epsilon=8, model="additive", strategy="full-batch")
    alike, turned = (personalise(common.model, rare(1000, "here", turned=one)) for one in (False, True))
    assert alike.predict([{"age": "95"}, {"age": "20"}]).tolist() == ["yes", "no"]
    assert turned.predict([{"age": "5"}, {"age": "60"}]).tolist() == ["yes", "no"]
    assert turned.model.head.share < 0.5
    assert alike.comparison.alone.right < 0.9, "it names the rare class, too, which is often wrong"


@pytest.mark.parametrize("model", ["additive", "ridge"])
def test_models_of_numbers_are_adapted_in_the_labels_unit(model):
    def flats(count, rent, key):
        random = np.random.Generator(np.random.Philox(key=derived_seed("flats", key)))
        sizes = random.integers(20, 120, count)
        return [{"size": int(size), "rent": round(float(rent * size + random.normal(0, 20)), 1)} for size in sizes]

    common = fit(flats(600, 10, "all"), label="rent", clients=3, epsilon=8, model=model)
    made = personalise(common.model, flats(100, 7, "here"))
    assert made.comparison.personal.error < made.comparison.common.error
    assert made.comparison.personal.error < 60
    assert made.predict([{"size": 100}])[0] == pytest.approx(700, abs=60)


def test_models_of_arrays_take_labels(tmp_path):
    result = simulate({"task": "digits", "num-clients": 10, "clients-per-round": 10, "epsilon": 8, "seed": 1})
    from murmurfl.app.data.loading import load_dataset

    data = load_dataset(result.experiment.config)
    folder = result.save(tmp_path / "digits")
    few = np.flatnonzero(data.train_labels < 2)[:80]
    made = personalise(folder, data.train_features[few], data.train_labels[few])
    assert made.model.head.offsets[:2].min() > made.model.head.offsets[2:].max()
    with raises(ConfigurationError, "missing", "labels"):
        personalise(folder, data.train_features[few])
    with raises(ConfigurationError, "wrong-shape", "labels"):
        personalise(folder, data.train_features[few], [1])


def test_a_mean_of_features_has_nothing_to_adapt():
    result = simulate(task="digits", model="mean", strategy="full-batch", num_clients=4, num_rounds=1, engine="cohort")
    rows = np.zeros((3, result.model.num_features))
    with raises(ConfigurationError, "unsupported", "model", match="mean of features"):
        personalise(result.model, rows, labels=[0, 1, 2])
