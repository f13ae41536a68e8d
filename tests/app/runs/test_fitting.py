"""From a table to a model: how rows are read, what is said of the model, and what its folder holds."""

import csv
import json
import pickle
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from murmurfl.app import RunResult, fit, load_model
from murmurfl.app.commands.main import cli
from murmurfl.app.data.table_task import ReadTable, held_out
from murmurfl.app.models.trained_model import TrainedModel
from murmurfl.app.planning.rehearsal import SKEWED
from murmurfl.app.reports.making import SERVERS_NOISE, make_report
from murmurfl.app.runs import rehearsal
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.fit_summary import REHEARSED, fit_lines, is_useless
from murmurfl.app.runs.model_card import card_text
from murmurfl.app.runs.result import write_record
from murmurfl.clients import Column, Label, Schema
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import ConfigurationError, LedgerError, derived_seed, gdp_mu
from murmurfl.privacy.ledger.ledger_history import read_ledger
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "small_rehearsals")

QUICK = {"strategy": "full-batch", "num_rounds": 12}


def people(count=400, key="people"):
    """Rows with a blank, a category and a site; who is older than 50 is ill."""
    random = np.random.Generator(np.random.Philox(key=derived_seed("fitting", key)))
    ages, wards = random.integers(18, 90, count), random.choice(["a", "b"], count)
    return [
        {
            "name": f"person {number}",
            "age": "" if number % 19 == 0 else str(age),
            "ward": "" if number % 23 == 0 else ward,
            "hospital": f"H{number % 4}",
            "ill": "yes" if age > 50 else "no",
        }
        for number, (age, ward) in enumerate(zip(ages, wards, strict=True))
    ]


@pytest.fixture(scope="module")
def result():
    return fit(people(), label="ill", site="hospital", epsilon=8)


@pytest.fixture(scope="module")
def saved(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("model"))


def test_sites_are_clients_and_no_feature(result):
    assert result.num_clients == 4
    assert list(result.table.schema.columns) == ["age", "ward"]
    assert result.table.left_out == {"names: of persons, it seems": ["name"], "the sites": ["hospital"]}


def test_epsilon_is_what_was_asked_for(result):
    assert result.epsilon == pytest.approx(8)


def test_the_model_learns_who_is_ill(result):
    assert result.outcome.auc > 0.9
    assert result.predict([{"age": 30, "ward": "a"}, {"age": 80, "ward": ""}]).tolist() == ["no", "yes"]


@pytest.mark.parametrize(("better", "words"), [(0.01, "better than"), (0.0, "as good as"), (-0.01, "")])
def test_a_site_alone_that_is_no_worse_than_the_model_is_said_to_be(result, better, words):
    alone = result.outcome.alone.model_copy(update={"auc": result.outcome.auc + better})
    found = replace(result, table=result.table)
    vars(found)["outcome"] = result.outcome.model_copy(update={"alone": alone})
    (said,) = [line for line in fit_lines(found, result.table, None) if line.startswith("compare")]
    assert ("this model" in said) == bool(words)
    assert f"{words} this model" in said or not words


def test_each_sites_own_model_stands_next_to_the_common_one_on_the_same_rows(result):
    found = result.outcome.rehearsal
    mean = np.mean([one.auc for one in found.sites.values()])
    (said,) = [line for line in fit_lines(result, result.table, None) if line.startswith("by site")]
    assert f"common model AUC {mean:.3f} on average" in said
    assert f"each site's own model {found.alone_on_own.auc:.3f}" in said
    for by_site in (found.sites, found.sites_alone):
        assert len(by_site) == 4
        scores = [one.auc for one in by_site.values()]
        assert f"({min(scores):.3f} to {max(scores):.3f})" in said
    fewer = found.model_copy(update={"alone_on_own": found.alone_on_own.model_copy(update={"rows": 1})})
    other = replace(result, table=result.table)
    vars(other)["outcome"] = result.outcome.model_copy(update={"rehearsal": fewer})
    assert any("some sites alone" in line for line in fit_lines(other, result.table, None))


def test_report_of_a_trusted_servers_rehearsal_names_whose_noise_protects(tmp_path):
    made = fit(people(), label="ill", site="hospital", epsilon=2, trust="trusted-server", **QUICK)
    write_record(made, tmp_path / "run")
    page = make_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert page.count(SERVERS_NOISE) == made.num_clients
    assert "infinite" not in page
    assert "test set, which is public" not in page
    plain = fit(people(), label="ill", clients=2, epsilon=8, trust="trusted-server", mechanism="none", **QUICK)
    write_record(plain, tmp_path / "plain")
    page = make_report([tmp_path / "plain"], tmp_path / "report").read_text()
    assert "infinite" in page, "without any noise nothing is guaranteed"
    assert SERVERS_NOISE not in page


def test_models_without_privacy_and_a_client_alone_stand_beside_it(result):
    found = result.outcome.rehearsal.baselines
    assert min(found.linear.auc, found.additive.auc, found.boosted.auc) > 0.9
    assert found.rows == result.table.trained
    assert result.outcome.alone.clients == 4
    (said,) = [line for line in fit_lines(result, result.table, None) if line.startswith("compare")]
    assert all(name in said for name in ("without privacy", "trees 0.9", "linear 0.9", "one site alone 0.9"))


def test_baselines_see_the_rows_that_an_additive_model_sees():
    """A schema may leave out `missing`, which additive models do not need."""
    columns = {
        "age": Column(kind="integer", bounds=(18, 90)),
        "male": Column(kind="yes/no"),
        "ward": Column(kind="category", values=("a", "b")),
    }
    schema = Schema(label=Label(column="ill", classes=("no", "yes")), columns=columns, reviewed=True)
    rows = [{**row, "male": ("", "yes", "no")[number % 3]} for number, row in enumerate(people())]
    made = fit(rows, schema=schema, site="hospital", epsilon=8, trust="trusted-server", **QUICK)
    found, table = made.outcome.rehearsal, made.table
    assert (table.trained + table.tested, table.invalid_records) == (400, {})
    assert found.baselines.rows == table.trained
    assert {one.rows for one in (found.baselines.linear, found.baselines.boosted)} == {table.tested}
    assert found.alone_on_own.rows == table.tested
    assert min(one.auc for one in (found.baselines.linear, found.baselines.additive, found.baselines.boosted)) > 0.8


def test_a_row_that_does_not_fit_has_no_prediction(result):
    found = result.predict([{"age": 80, "ward": "a" * 10**6}, {"age": 80, "ward": "a"}])
    assert found.tolist() == [None, "yes"]


def test_a_text_in_a_number_is_predicted_as_a_missing_value(saved):
    rows = [{"age": cell, "ward": "a"} for cell in ("old", "", "1e999", [7])]
    shares = load_model(saved).predict_proba(rows)
    assert np.isfinite(shares).all()
    assert (shares == shares[0]).all()


def test_a_strange_row_is_left_out_and_changes_no_other():
    schema = Schema(columns={"age": Column(kind="number", bounds=(0, 100))}, label=Label(column="ill", classes=2))
    rows = [{"age": number, "ill": number % 2} for number in range(40)]
    plain = ReadTable.of(rows, schema=schema).read()
    for cell in ("", "1e999", "abc", "\x00", "9" * 500, None):
        strange = ReadTable.of([*rows[:7], {"age": cell, "ill": 1}, *rows[8:]], schema=schema).read()
        assert np.array_equal(strange.features, np.delete(plain.features, 7, axis=0))
        assert sum(strange.invalid_records.values()) == 1


def test_folder_predicts_as_the_result_does(result, saved):
    rows = people(60, "others")
    loaded = RunResult.load(saved)
    assert np.array_equal(loaded.predict(rows), result.predict(rows))
    shares = loaded.predict_proba(rows)
    assert shares.shape == (60, 2)
    assert np.allclose(shares.sum(axis=1), 1)


def test_folder_is_an_estimator_of_scikit_learn(saved):
    found, rows = load_model(saved), people(30, "others")
    again = pickle.loads(pickle.dumps(clone(found)))
    assert np.array_equal(again.predict(rows), found.predict(rows))
    assert make_pipeline(found).predict(rows).tolist() == found.predict(rows).tolist()
    assert found.score(rows, [row["ill"] for row in rows]) > 0.8
    assert list(found.classes_) == ["no", "yes"]


def noisy(count):
    random = np.random.Generator(np.random.Philox(key=derived_seed("noisy")))
    ages = random.uniform(20, 80, count)
    return [
        {"age": round(age, 2), "ill": "yes" if age + step > 50 else "no"}
        for age, step in zip(ages.tolist(), random.normal(0, 20, count).tolist(), strict=True)
    ]


def test_probabilities_are_scores_over_the_temperature_wherever_they_come_from(tmp_path):
    """In the result's loss, the saved model, its pipeline, curves and coefficients; what ranks rows stays."""
    rows, new = noisy(1200), [{"age": 25.0}, {"age": 48.0}, {"age": 75.0}]
    result = fit(rows, label="ill", clients=2, epsilon=8)
    assert float(result.model.arrays["temperature"]) == result.experiment.model.temperature == 2.0
    config, clip = result.experiment.config, result.experiment.values.clip_norm
    assert prepare(replace(config, clip_norm=1.001 * clip)).model.temperature == 2.0, "as operators' files round it"
    assert prepare(replace(config, clip_norm=1.1 * clip)).model.temperature == 1.0
    held = result.experiment.seen_by(result.answers).data
    weight, bias = (np.asarray(one) for one in result.parameters)
    raw = held.test_features @ weight.T + bias
    raw = raw[:, 1] - raw[:, 0]
    labels = held.test_labels
    loss = float(np.logaddexp(0.0, np.where(labels == 1, -raw, raw) / 2.0).mean())
    assert result.outcome.loss == pytest.approx(loss) == pytest.approx(result.outcome.rehearsal.log_loss)
    assert loss < float(np.logaddexp(0.0, np.where(labels == 1, -raw, raw)).mean()), "scores by themselves are too sure"
    assert result.outcome.auc == pytest.approx(roc_auc_score(labels, raw))
    folder = result.save(tmp_path / "model")
    shares = load_model(folder).predict_proba(new)
    assert np.allclose(shares, result.model.predict_proba(new))
    odds = np.log(shares[:, 1] / shares[:, 0])
    features = result.model.inputs(new)
    assert odds == pytest.approx((features @ (weight[1] - weight[0]) + bias[1] - bias[0]) / 2.0, abs=1e-6)
    pd, sio = pytest.importorskip("pandas"), pytest.importorskip("skops.io")
    pipeline = sio.load(folder / "pipeline.skops")
    assert np.allclose(pipeline.predict_proba(pd.DataFrame(new)), shares)
    curve = result.curves()["age"]
    there = np.interp([25.0, 75.0], curve.values, curve.effect)
    assert there[1] - there[0] == pytest.approx(odds[2] - odds[0], rel=0.02)
    assert "divided by 2 " in (folder / "CARD.md").read_text()


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 1.0}, {"clip_norm": 3.0}, {"num_rounds": 4}, {"clipping": "automatic"}]
)
def test_other_constants_than_the_rules_have_no_temperature(changes):
    result = fit(noisy(300), label="ill", clients=2, epsilon=8, **{"num_rounds": 8, **changes})
    assert result.experiment.model.temperature == 1.0
    assert "temperature" not in result.model.arrays


def rare(count=3000):
    """One in twenty is ill, and nobody surely."""
    random = np.random.Generator(np.random.Philox(key=derived_seed("rare")))
    ages = random.uniform(20, 80, count)
    return [
        {"age": round(age, 2), "ill": "yes" if age + step > 85 else "no"}
        for age, step in zip(ages.tolist(), random.normal(0, 10, count).tolist(), strict=True)
    ]


RARE = Schema(
    columns={"age": Column(kind="number", bounds=(0, 100))},
    label=Label(column="ill", classes=("no", "yes"), class_weights=(1, 15)),
)


def test_weights_of_the_schema_let_a_rare_class_be_predicted():
    rows = rare()
    equal = RARE.model_copy(update={"label": RARE.label.model_copy(update={"class_weights": ()})})
    found = {}
    for name, schema in (("equal", equal), ("weighted", RARE)):
        result = fit(rows, schema=schema, clients=2, epsilon=8, model="additive", strategy="full-batch")
        confusion = np.array(result.outcome.rehearsal.confusion)
        found[name] = (np.diag(confusion) / confusion.sum(axis=1)).mean()
    assert found["weighted"] > found["equal"] + 0.1
    assert result.experiment.model.class_weights.tolist() == [1 / 15, 1.0]
    assert "class_weights" in result.model.card["probabilities"]
    assert fit(rows[:300], schema=RARE, clients=2).experiment.config.strategy == "full-batch"


@pytest.mark.parametrize(
    ("settings", "kind", "setting"),
    [
        ({"strategy": "mu2"}, "conflict", "strategy"),
        ({"strategy": "one-shot"}, "conflict", "strategy"),
        ({"model": "logistic", "strategy": "full-batch"}, "unsupported", "class_weights"),
    ],
)
def test_weights_that_would_not_be_used_are_refused(settings, kind, setting):
    with raises(ConfigurationError, kind, setting, match="class_weights"):
        fit(rare(200), schema=RARE, clients=2, **{"model": "softmax", **settings})


def test_uncalibrated_probabilities_are_said_by_result_card_and_prediction(tmp_path):
    rows = [{"age": float(age), "ill": "yes" if age > 50 else "no"} for age in np.linspace(20, 80, 200)]
    result = fit(rows, label="ill", clients=2, epsilon=0.05)
    assert any("equal probabilities have" in words for words in result.outcome.warnings)
    assert "warning" in repr(result)
    card = result.save(tmp_path / "model")
    assert "not calibrated" in (card / "CARD.md").read_text()
    model = load_model(card)
    with pytest.warns(UserWarning, match="not calibrated"):
        model.predict_proba([{"age": 30.0}])


def test_card_of_a_rehearsal_has_no_epsilon_of_its_own(saved):
    card = json.loads((saved / "card.json").read_text())
    assert card["epsilon"] is card["mu"] is card["sentence"] is None
    assert "do not publish" in card["what"]
    assert card["would_have"]["epsilon"] == pytest.approx(8)
    text = (saved / "CARD.md").read_text()
    assert "nobody was protected" in " ".join(text.split())


def test_a_card_shows_names_letter_by_letter_and_no_markup_of_theirs(saved):
    card = json.loads((saved / "card.json").read_text())
    card["data"] = {"table": "a_b.csv", "label": "<img src=x onerror=alert(1)>*bold* [a](b) `c`\n# Heading"}
    text = card_text(card)
    assert "<img" not in text
    assert r"&lt;img src=x onerror=alert(1)&gt;\*bold\* \[a\](b) \`c\` # Heading" in " ".join(text.split())
    assert r"a\_b.csv" in text
    assert not re.search(r"(?m)^# Heading", text)


def test_model_folder_has_no_figure_without_noise(saved):
    own = {path.name for path in saved.iterdir()} - {"pipeline.skops"}  # which is there with skops
    assert own == {"CARD.md", "card.json", "schema.toml", "weights.npz"}
    assert (
        not {"accuracy", "auc", "loss", "alone", "without_noise"} & json.loads((saved / "card.json").read_text()).keys()
    )


def test_schema_of_the_folder_is_not_reviewed(saved):
    with raises(ConfigurationError, "missing", "reviewed"):
        Schema.read_file(saved / "schema.toml").check_for_real_nodes()


def test_lines_are_few_and_say_that_nobody_was_protected(result):
    lines = fit_lines(result, result.table, Path("runs/people/model"))
    assert len(lines) <= 11
    assert sum(len(textwrap.wrap(line, 80)) for line in lines) <= 25
    assert "REHEARSAL" in "\n".join(lines)
    assert "epsilon = 8 at delta = 1e-05" in "\n".join(lines)


def row(result, name):
    (line,) = [line for line in fit_lines(result, result.table, None) if line.startswith(f"{name} ")]
    return line


def test_columns_that_a_model_does_not_use_are_named_with_the_reason(result, reviewed):
    assert "not used: name (names: of persons, it seems), hospital (the sites)" in row(result, "columns")
    constant = fit([{**one, "country": "US"} for one in people(100)], label="ill", clients=2, epsilon=8, **QUICK)
    assert "country (a single value)" in row(constant, "columns")
    table, schema = reviewed
    table.write_text("\n".join(f"{line},{'ward' if not i else 3}" for i, line in enumerate(table.read_text().split())))
    given = fit(table, schema=schema, epsilon=8, **QUICK)
    assert "not used: ward (not in the schema)" in row(given, "columns")


def test_a_rehearsal_says_what_it_is_for_as_the_pages_do(result):
    assert REHEARSED in row(result, "privacy")
    for page in ("tables.md", "sharp-edges.md"):
        text = (Path(__file__).parents[3] / "docs" / page).read_text()
        assert REHEARSED in " ".join(text.split())


@pytest.mark.parametrize("trust", ["untrusted-server", "trusted-server"])
def test_a_rehearsal_says_under_which_trust_a_real_fit_runs(trust, result):
    made = (
        result if trust == "untrusted-server" else fit(people(100), label="ill", trust=trust, epsilon=8, num_rounds=2)
    )
    assert made.guarantee.trust == trust
    assert "--real, with all rows on this computer, which " in row(made, "next")
    assert ("--trust trusted-server rehearses" in row(made, "next")) == (trust == "untrusted-server")
    assert ("which is the trusted server" in row(made, "next")) == (trust == "trusted-server")


def test_the_baseline_of_the_commonest_class_is_named_with_its_measure(result):
    assert f"majority-class baseline: accuracy {100 * result.table.majority:.1f} %" in row(result, "compare")


def test_a_useless_model_is_said_in_the_first_line(tmp_path):
    random = np.random.Generator(np.random.Philox(key=3))
    rows = [{"coin": float(random.random()), "side": "head" if random.random() < 0.8 else "tail"} for _ in range(200)]
    result = fit(rows, label="side", clients=4, epsilon=0.3)
    assert is_useless(result.outcome, result.table)
    assert fit_lines(result, result.table, tmp_path)[0].startswith("Do not use this model")
    assert not result.table.better, "sums tell no more of a coin"
    assert [line.split()[0] for line in repr(result).splitlines()[:2]] == ["REHEARSAL:", "Do"]
    assert result._repr_html_().startswith("<b>REHEARSAL")


def test_a_model_that_nothing_tells_from_chance_is_useless(result):
    lucky = replace(result.table, majority=0.5, tested=8, differing=5)
    outcome = result.outcome.model_copy(update={"auc": 0.4, "accuracy": 0.625})
    assert is_useless(outcome, lucky)
    assert not is_useless(outcome, replace(lucky, tested=800, differing=500))


def test_an_accuracy_below_the_majority_is_said_of_a_model_that_ranks(result, tmp_path):
    rare = replace(result.table, majority=0.99, tested=2000, differing=4)
    made = replace(result, table=rare)
    vars(made)["outcome"] = result.outcome.model_copy(update={"auc": 0.7, "accuracy": 0.989})
    assert fit_lines(made, rare, tmp_path)[0].startswith(
        "Accuracy 98.9 % is not above that of always predicting the commonest class, 99.0 %"
    )


def test_sums_are_advised_where_they_were_rehearsed_and_help(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "is_useless", lambda outcome, _: outcome.privacy.trust == "untrusted-server")
    result = fit(people(), label="ill", clients=4)
    assert result.table.better.startswith("--trust secure-aggregation: AUC 0.9")
    assert any(line.startswith("better") for line in fit_lines(result, result.table, tmp_path))
    assert result.guarantee.trust == "untrusted-server"


def test_sums_are_rehearsed_and_shown_wherever_there_are_several_clients(result):
    """Though the model is of use, and better than a client alone."""
    assert result.guarantee.trust == "untrusted-server"
    (sums,) = result.outcome.rehearsal.alternatives.values()
    assert list(result.outcome.rehearsal.alternatives) == ["--trust secure-aggregation"]
    (said,) = [line for line in fit_lines(result, result.table, None) if line.startswith("model")]
    assert f"under sums {sums.auc:.3f}" in said
    summed = fit(people(), label="ill", site="hospital", epsilon=8, trust="secure-aggregation")
    assert summed.outcome.auc == pytest.approx(sums.auc)
    assert not summed.outcome.rehearsal.alternatives


def test_rows_that_are_dealt_show_what_skewed_labels_would_cost_a_client_alone(result):
    """They are dealt evenly, or as somebody declares; sites of a column are as they are."""
    dealt = fit(people(), label="ill", clients=4, epsilon=8, **QUICK)
    skewed = dealt.outcome.rehearsal.alone_skewed
    assert skewed.auc < dealt.outcome.alone.auc
    (line,) = [line for line in fit_lines(dealt, dealt.table, None) if line.startswith("compare")]
    assert f"({skewed.auc:.3f} if sites' labels differed: label-skew 0.3)" in line
    declared = fit(
        people(), label="ill", clients=4, epsilon=8, partition="label-skew", dirichlet_alpha=SKEWED.amount, **QUICK
    )
    assert declared.outcome.alone == skewed
    assert declared.outcome.rehearsal.alone_skewed is result.outcome.rehearsal.alone_skewed is None


def test_models_without_privacy_depend_on_neither_epsilon_nor_trust(result):
    other = fit(people(), label="ill", site="hospital", epsilon=0.5, trust="secure-aggregation", num_rounds=2)
    ours, theirs = result.outcome.rehearsal, other.outcome.rehearsal
    assert (ours.baselines, ours.alone_on_own) == (theirs.baselines, theirs.alone_on_own)
    assert other.outcome.auc != result.outcome.auc


def codes(count):
    """Mostly zeros: of twenty codes a person has two or three, and the illness follows from some."""
    random = np.random.Generator(np.random.Philox(key=8))
    cells = random.poisson(0.1, (count, 20))
    ill = (cells[:, :5].sum(axis=1) > 0).astype(int)
    return [
        {**{f"c{i}": int(cell) for i, cell in enumerate(row)}, "ill": int(y)} for row, y in zip(cells, ill, strict=True)
    ]


CODES = Schema(
    columns={f"c{i}": Column(kind="integer", bounds=(0, 10)) for i in range(20)},
    label=Label(column="ill", classes=2),
    reviewed=True,
)


@pytest.mark.more_cases
def test_centring_is_advised_where_rows_are_mostly_zeros_and_fitted_for_real(tmp_path):
    options = {"label": "ill", "epsilon": 4, "model": "softmax", **QUICK}
    plain = fit(codes(2000), schema=CODES, clients=4, **options)
    assert plain.table.better.startswith("--set centring=private: AUC ")
    table = tmp_path / "codes.csv"
    rows = codes(2000)
    table.write_text("\n".join(",".join(map(str, row)) for row in [rows[0], *(row.values() for row in rows)]) + "\n")
    real = fit(table, schema=CODES, real=True, centring="private", **options)
    spent = read_ledger(Path(f"{table}.ledger"))
    assert len(spent.sessions) == 3, "mean, training, evaluation"
    assert real.mu == pytest.approx(spent.spent.mu) == pytest.approx(gdp_mu(4, 1e-5))
    assert "the mean of the features" in str(real.guarantee)
    loaded = load_model(real.save(tmp_path / "m"))
    assert np.mean([int(one) == row["ill"] for one, row in zip(loaded.predict(rows), rows, strict=True)]) > 0.9


def test_a_result_shows_what_must_be_known_of_the_model(result):
    said = repr(result)
    assert "REHEARSAL: nobody was protected" in said
    assert max(map(len, said.splitlines())) <= 100


def test_a_site_keeps_a_row_to_train_on():
    """With any seed, though a fifth of the rows is drawn: two of them are all that a site has."""
    rows = [{**row, "hospital": f"s{number // 2}"} for number, row in enumerate(people(40))]
    for seed in range(1, 6):
        read = ReadTable.of(rows, label="ill", site="hospital").read("hospital")
        made = held_out(read, ReadTable.of(rows, label="ill", site="hospital").schema, 0.2, seed)
        assert sorted(set(made.client_of.tolist())) == list(range(20))
        assert 1 <= len(made.test_labels) <= 8


def wide_ages(width):
    age = Column(kind="integer", bounds=(0, width), missing=50)
    return Schema(columns={"age": age}, label=Label(column="ill", classes=("no", "yes")))


@pytest.mark.long
@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_private_statistics_narrow_bounds_that_are_too_wide_within_the_same_epsilon(trust, tmp_path):
    rows, options = (
        people(2000),
        {"schema": wide_ages(5000), "clients": 4, "epsilon": 8, "trust": trust, "model": "softmax"},
    )
    plain, scaled = fit(rows, **options), fit(rows, **options, scale="private")
    assert plain.table.better.startswith("--scale private: AUC 0.9")
    assert not fit(rows, **{**options, "schema": wide_ages(100)}).table.better
    low, high = scaled.table.schema.columns["age"].bounds
    assert 0 <= low < high < 500
    assert scaled.outcome.accuracy > plain.outcome.accuracy + 0.1
    assert scaled.epsilon == pytest.approx(8)
    assert scaled.outcome.epsilon == pytest.approx(8)
    assert plain.guarantee.loss.worst_case.mu == pytest.approx(scaled.guarantee.loss.worst_case.mu)
    assert "private statistics" in str(scaled.guarantee)
    assert "1 used, scaled by private statistics (10% of mu^2)" in "\n".join(fit_lines(scaled, scaled.table, tmp_path))
    spent = scaled.experiment.config.mu
    assert spent**2 == pytest.approx(0.9 * plain.experiment.config.mu**2)


def test_statistics_without_noise_scale_a_model_without_noise():
    result = fit(people(), schema=wide_ages(5000), clients=4, scale="private", mechanism="none", **QUICK)
    assert result.outcome.mu is None
    assert result.table.schema.columns["age"].bounds[1] < 200


def test_a_private_figure_is_part_of_the_same_epsilon(tmp_path):
    result = fit(people(2000), label="ill", clients=2, epsilon=8, evaluate="private")
    assert result.epsilon == pytest.approx(8)
    assert result.evaluation.accuracy == pytest.approx(result.accuracy, abs=0.2)
    assert any(line.startswith("private ") for line in fit_lines(result, result.table, tmp_path))


def test_spellings_of_a_class_are_one_class(tmp_path):
    rows = [{**row, "ill": row["ill"].upper() if number % 3 else row["ill"]} for number, row in enumerate(people())]
    result = fit(rows, label="ill", clients=2, epsilon=8)
    assert result.table.schema.num_classes == 2
    assert sum(result.table.invalid_records.values()) == 0
    assert "no, yes are read as these" in "\n".join(fit_lines(result, result.table, tmp_path))


def test_rows_that_do_not_fit_are_said_with_their_reason(tmp_path):
    rows = [{**row, "ill": ""} if number % 9 == 0 else row for number, row in enumerate(people())]
    result = fit(rows, label="ill", clients=2, epsilon=8)
    assert "45 rows do not fit and are not used (ill: a missing label" in "\n".join(
        fit_lines(result, result.table, tmp_path)
    )


def test_no_released_figure_passes_for_more_than_it_shows(reviewed, tmp_path):
    table, schema = reviewed
    result = fit(table, schema=schema, real=True, epsilon=0.1, evaluate="private", **QUICK)
    assert fit_lines(result, result.table, tmp_path)[0].startswith("The released figure does not show")


@pytest.fixture(scope="module")
def regression():
    random = np.random.Generator(np.random.Philox(key=5))
    sizes = random.uniform(20, 120, 600)
    return fit([{"size": size, "rent": 200 + 10 * size} for size in sizes], label="rent", clients=3, epsilon=8, **QUICK)


def test_numbers_are_predicted_in_their_own_unit(regression):
    low, high = regression.predict([{"size": 40}, {"size": 100}])
    assert low == pytest.approx(600, abs=150)
    assert high == pytest.approx(1200, abs=150)


def test_a_model_of_numbers_has_no_shares_of_classes(regression, tmp_path):
    found = load_model(regression.save(tmp_path))
    assert not hasattr(found, "predict_proba")
    with raises(ConfigurationError, "unsupported", match="model of classes"):
        regression.model.predict_proba([{"size": 40}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "il"}, "did you mean 'ill'"),
        ({"site": "hospitals"}, "did you mean 'hospital'"),
        ({"site": "hospital", "clients": 3}, "each site is a client"),
        ({"site": "ill"}, "neither the label nor"),
        ({"epsilon": 0.0}, "epsilon > 0"),
        ({"scale": "public"}, "scale to be empty"),
        ({"site": "hospital", "partition": "iid"}, "site or clients in the place of partition"),
        ({"partition": "own"}, "own"),
        ({"partition": "lable-skew"}, "did you mean 'label-skew'"),
        ({"num_clients": 3}, "site or clients in the place of num-clients"),
        ({"evaluate": "public"}, "evaluate to be empty"),
        (
            {
                "schema": Schema(columns={"age": Column(kind="yes/no")}, label=Label(column="ill", classes=2)),
                "label": "age",
            },
            "label of the schema",
        ),
    ],
)
def test_what_is_wrong_is_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(people(), **{"label": "ill", **options})


@pytest.mark.parametrize("table", [np.zeros((3, 2)), [], [1, 2], 7])
def test_what_is_no_table_is_refused(table):
    with raises(ConfigurationError, "wrong-type", "table"):
        fit(table, label="y")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["age,ill", "40,yes"], r"got none in 1 row \(age: a single value\)"),
        (["age,ill", *["40,yes", "50,yes"] * 20], "in the column 'ill', got 'yes' alone"),
        (["age,ill", *(f"{n},p{n}" for n in range(40))], "got 40 values, of which 0 are frequent"),
        (["age,ill", *["40,yes,1", "50,no,2"] * 20], r"got 40 of 40 with a line with another number .*3 cells"),
    ],
)
def test_a_file_from_which_nothing_can_be_learnt_says_what_was_found(lines, message, tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    with pytest.raises(ConfigurationError, match=message):
        fit(path, label="ill")


def test_the_folder_of_a_run_will_do_for_its_model(regression, tmp_path):
    regression.save(tmp_path / "model")
    assert TrainedModel.read(tmp_path).predict([{"size": 40}]) == regression.predict([{"size": 40}])


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with raises(ConfigurationError, "unreadable"):
        TrainedModel.read(tmp_path)


@pytest.fixture
def reviewed(tmp_path):
    """A sorted file with a strange row, and a reviewed schema of it."""
    schema = Schema(
        columns={"age": Column(kind="number", bounds=(0, 100))}, label=Label(column="ill", classes=2), reviewed=True
    )
    (tmp_path / "schema.toml").write_text(document(schema))
    rows = sorted((int(row["ill"] == "yes"), row["age"] or "40") for row in people())
    lines = ["age,ill", *(f"{age},{ill}" for ill, age in rows), "old,1"]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "people.csv", tmp_path / "schema.toml"


def test_a_real_fit_shows_nothing_that_was_not_released(reviewed, tmp_path):
    table, schema = reviewed
    rounds = []
    result = fit(table, schema=schema, real=True, epsilon=40, evaluate="private", on_progress=rounds.append, **QUICK)
    assert len(rounds) == result.rounds
    assert all(one.accuracy is one.loss is one.auc is None for one in rounds)
    assert result.deployed
    assert result.accuracy is result.auc is result.alone is None
    assert result.outcome.loss is None
    assert result.epsilon == pytest.approx(40)
    assert result.evaluation.accuracy > 0.7  # of rows that were set aside, drawn from all of a sorted file
    card = json.loads((result.save(tmp_path / "m") / "card.json").read_text())
    assert card["epsilon"] == pytest.approx(40)
    assert card["would_have"] is None
    assert "REAL" in "\n".join(fit_lines(result, result.table, tmp_path))


def test_real_fits_of_one_table_share_a_budget(reviewed):
    table, schema = reviewed
    for _ in range(2):
        fit(
            table,
            schema=schema,
            real=True,
            epsilon=1,
            **QUICK,
            budget=1.5 if not Path(f"{table}.ledger").exists() else 0,
        )
    with raises(
        ConfigurationError, "exhausted", "budget", match=r"room for epsilon = 1, got 1\.\d+ spent of 1\.5 in the ledger"
    ):
        fit(table, schema=schema, real=True, epsilon=1)


def test_a_table_with_a_ledger_gets_no_second_one(reviewed):
    table, schema = reviewed
    fit(table, schema=schema, real=True, epsilon=1, **QUICK)
    other = table.with_name("other.ledger")
    with raises(ConfigurationError, "mismatch", "ledger"):
        fit(table, schema=schema, real=True, epsilon=1, ledger=other, **QUICK)
    assert not other.exists()


@pytest.fixture
def far_too_wide(reviewed):
    """The same table with a schema whose bounds are a thousand times as wide, and a way to change one cell."""
    table, schema = reviewed
    schema.write_text(schema.read_text().replace("100.0]", "100000.0]"))

    def changed(cell):
        lines = table.read_text().splitlines()
        table.write_text("\n".join([*lines[:40], f"{cell},0", *lines[41:]]) + "\n")
        return table, schema

    return changed


def fitted_for_real(far_too_wide, cell, **options):
    table, schema = far_too_wide(cell)
    ledger = table.with_name(f"{cell or 'blank'}.ledger")
    asked = {"scale": "private", "evaluate": "private", "epsilon": 6, **QUICK, **options}
    return fit(table, schema=schema, real=True, ledger=ledger, **asked), ledger


def test_a_real_fit_scales_by_statistics_out_of_the_same_epsilon(far_too_wide, tmp_path, hushed_noise):
    result, ledger = fitted_for_real(far_too_wide, "33")
    low, high = result.table.schema.columns["age"].bounds
    assert -1000 < low < 30 < 80 < high < 2000, "of bounds from 0 to 100,000"
    assert result.evaluation.accuracy > 0.7
    spent = read_ledger(ledger)
    assert len(spent.sessions) == 3, "statistics, training, evaluation"
    assert result.mu == pytest.approx(spent.spent.mu) == pytest.approx(gdp_mu(6, 1e-5))
    card = json.loads((result.save(tmp_path / "m") / "card.json").read_text())
    assert (card["epsilon"], card["mu"]) == (pytest.approx(6), pytest.approx(spent.spent.mu))
    assert "private statistics" in card["sentence"]
    assert "private statistics" in card["data"]["schema"]
    assert "1 used, scaled by private statistics" in "\n".join(fit_lines(result, result.table, tmp_path))


def test_statistics_are_not_released_where_the_training_would_be_refused(far_too_wide):
    _, ledger = fitted_for_real(far_too_wide, "33", budget=6.5)
    before = read_ledger(ledger)
    with raises(
        ConfigurationError, "exhausted", "budget", match=r"room for epsilon = 6, got 6 spent of 6\.5 in the ledger"
    ):
        fitted_for_real(far_too_wide, "33")
    assert read_ledger(ledger) == before


def test_a_ledger_knows_rows_that_were_scaled_otherwise_before(far_too_wide):
    _, ledger = fitted_for_real(far_too_wide, "33", budget=14.0)
    again, _ = fitted_for_real(far_too_wide, "33")
    assert len(read_ledger(ledger).sessions) == 6
    assert again.epsilon == pytest.approx(6)
    table, schema = far_too_wide("34")
    with raises(LedgerError, "mismatch", match="unchanged and in their order"):
        fit(table, schema=schema, real=True, epsilon=1, ledger=ledger, **QUICK)


@pytest.mark.few_cases(2, others="long")
@pytest.mark.parametrize("cell", ["1e308", "-1e308", "nan", "inf", "text", "", "1e999", "\u0660", "=1+1"])
def test_one_strange_cell_shows_neither_in_the_bounds_nor_in_what_is_said(far_too_wide, cell, hushed_noise):
    """With a thousandth of the noise: one row of 401 moves a bound by less than the noise would."""
    plain, _ = fitted_for_real(far_too_wide, "33")
    strange, _ = fitted_for_real(far_too_wide, cell)
    before, after = (one.table.schema.columns["age"].bounds for one in (plain, strange))
    assert after == pytest.approx(before, abs=0.05 * (before[1] - before[0]))
    assert strange.mu == plain.mu
    for name in ("rounds", "refusals", "lost_replies", "releases"):
        assert getattr(strange.outcome, name) == getattr(plain.outcome, name)
    said, usual = ({**one.statements["people.csv"], "schema": "of the released bounds"} for one in (strange, plain))
    assert said == usual
    assert all(np.isfinite(part).all() for part in strange.parameters)


def test_a_real_fit_with_other_keys_has_other_noise(reviewed):
    table, schema = reviewed
    first, second = (
        fit(table, schema=schema, real=True, epsilon=2, **QUICK, ledger=table.with_name(f"{number}.ledger"))
        for number in "ab"
    )
    assert not np.array_equal(first.parameters[0], second.parameters[0])


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": None}, "reviewed schema"),
        ({"clients": 3}, r"no clients \(--clients\)"),
        ({"real": False, "budget": 2.0}, "a rehearsal spends nothing"),
        ({"scale": "public"}, "scale to be empty or 'private'"),
    ],
)
def test_what_no_real_fit_can_have_is_refused(reviewed, options, message):
    table, schema = reviewed
    with pytest.raises(ConfigurationError, match=message):
        fit(table, **{"schema": schema, "real": True, "epsilon": 2.0, **options})


def test_a_draft_is_no_schema_for_a_real_fit(reviewed):
    table, schema = reviewed
    schema.write_text(schema.read_text().replace("reviewed = true", "reviewed = false"))
    with raises(ConfigurationError, "missing", "reviewed", match="reviewed = true"):
        fit(table, schema=schema, real=True, epsilon=2)


def test_numbers_are_fitted_for_real(tmp_path):
    schema = Schema(
        columns={"size": Column(kind="number", bounds=(0, 150))},
        label=Label(column="rent", bounds=(0, 2000)),
        reviewed=True,
    )
    random = np.random.Generator(np.random.Philox(key=5))
    sizes = random.uniform(20, 120, 500)
    table = tmp_path / "flats.csv"
    table.write_text("size,rent\n" + "".join(f"{size},{200 + 10 * size}\n" for size in sizes))
    result = fit(table, schema=schema, real=True, epsilon=8, **QUICK)
    assert "how far numbers are off is not released" in "\n".join(fit_lines(result, result.table, tmp_path))
    assert result.predict([{"size": 100}])[0] == pytest.approx(1200, abs=200)


def command(*arguments):
    done = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_column_that_is_there_twice_is_not_predicted_from(result, tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("age,ward,age\n30,a,80\n")
    with raises(ConfigurationError, "duplicate", "rows", match="once, got several named 'age'"):
        result.predict(path)
    result.save(tmp_path / "model")
    path.write_text("age,ward,note,note\n30,a,1,2\n")
    done = CliRunner().invoke(cli, ["predict", str(tmp_path / "model"), str(path)])
    assert done.exit_code == 1
    assert "got several named 'note'" in done.output
    assert not (tmp_path / "twice.predicted.csv").exists()


def test_commands_fit_and_predict(tmp_path):
    path = tmp_path / "people.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(people(1)[0]))
        writer.writeheader()
        writer.writerows(people())
        file.write("a line of another kind\n")
    said = command(
        "fit", path, "--label", "ill", "--site", "hospital", "--epsilon", "4", "--out", tmp_path, "--name", "f"
    )
    assert "AUC" in said
    assert "epsilon = 4 at delta" in said
    said = command("predict", tmp_path / "f" / "model", path)
    assert "1 rows do not fit" in said
    with (tmp_path / "people.predicted.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 400
    assert {row["predicted_ill"] for row in rows} == {"yes", "no"}
    assert all(0 <= float(row["probability_yes"]) <= 1 for row in rows)


def test_predict_counts_the_cells_that_a_model_does_not_read_as_they_stand(result, saved, tmp_path):
    low, high = result.table.schema.columns["age"].bounds
    rows = [{"age": "40", "ward": "a", "colour": "red"} for _ in range(8)]
    for number, cell in enumerate((high + 1, low - 1, high, "old", "")):
        rows[number]["age"] = cell
    rows[7]["ward"] = "z"
    path = tmp_path / "new.csv"
    path.write_text("\n".join(["age,ward,colour", *(",".join(map(str, one.values())) for one in rows)]) + "\n")
    said = command("predict", saved, path)
    assert "clipped to the nearer one: 2 cells of age\n" in said
    assert "read as missing: 1 cell of age\n" in said
    assert "read as other: 1 cell of ward\n" in said
    assert "not used by the model: colour\n" in said
    path.write_text("age,ward\n40,a\n")
    assert len(command("predict", saved, path, "--force").splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], "no --trust"),
        (["--trust", "trusted-server"], "--trust trusted-server"),
        (["--set", "trust="], "no --trust"),
    ],
)
def test_helpers_without_sums_are_refused_in_the_words_of_the_command(tmp_path, given, found):
    done = CliRunner().invoke(cli, ["fit", str(tmp_path / "people.csv"), "--helpers", "3", *given])
    assert done.exit_code == 1
    assert f"Expected --trust secure-aggregation beside --helpers 3, got {found}: set it" in " ".join(
        done.stderr.split()
    )
