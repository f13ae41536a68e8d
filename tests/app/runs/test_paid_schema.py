"""A declared schema that is completed by releases: paid once, known to the ledger, and nothing else leaves."""

import json
import math
import re
import tomllib

import numpy as np
import pytest
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.reports.card import card
from murmurfl.app.reports.finding import RecordedRun
from murmurfl.app.reports.groups import Group
from murmurfl.app.runs import paid_schema as paid_schemas
from murmurfl.app.runs.paid_schema import PaidSchema, paid_schema
from murmurfl.app.runs.sealed import SealedError
from murmurfl.clients import Schema
from murmurfl.clients.records.schema import NONE_NAMED, WIDEST
from murmurfl.privacy import ConfigurationError, LedgerError, SQLiteLedger, gdp_epsilon, gdp_mu, rounded_up
from murmurfl.privacy.accounting.guarantee import GIVEN_DECLARATIONS, PAID_ROW, RECORDS
from murmurfl.privacy.ledger.ledger_history import read_ledger
from murmurfl.privacy.queries.knots import LogColumn
from murmurfl.privacy.queries.statistics import StatisticsRows
from typer.testing import CliRunner

from tests.harness.errors import raises

ROWS = 1200
DECLARED = """reviewed = true
[label]
column = "ill"
classes = ["no", "yes"]
[columns.age]
kind = "integer"
[columns.income]
kind = "number"
unit = "$"
[columns.ward]
kind = "category"
values = ["a", "b"]
"""
OPEN = DECLARED.replace('values = ["a", "b"]\n', "").replace("unit", "missing_codes = [-9]\nunit", 1)
"""The same with a category whose values are open."""


def rows_of(count=ROWS, seed=5):
    random = np.random.Generator(np.random.Philox(key=seed))
    for _ in range(count):
        age, income = int(random.integers(18, 90)), math.exp(random.normal(10.0, 1.0))
        yield f"{age},${income:.2f},{'ab'[random.integers(2)]},{'yes' if age > 50 else 'no'}"


def table(home, rows, declared=DECLARED):
    home.mkdir(exist_ok=True)
    (home / "declared.toml").write_text(declared)
    lines = [row if isinstance(row, bytes) else row.encode() for row in rows]
    (home / "people.csv").write_bytes(b"age,income,ward,ill\n" + b"\n".join(lines) + b"\n")
    return home / "people.csv"


def pay(path, epsilon=4.0, **options) -> PaidSchema:
    return paid_schema(path, path.parent / "declared.toml", epsilon=epsilon, **options)


def spent(path):
    return read_ledger(f"{path}.ledger")


def murmurfl(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


def written(made, path):
    """The file of a completed schema, which reads as it was made."""
    from murmurfl.clients.records.drafting import document

    path.write_text(document(made.schema))
    assert Schema.read_file(path) == made.schema
    return path


def test_bounds_fills_and_knots_are_near_those_of_the_rows(tmp_path):
    path = table(tmp_path / "home", rows_of(4000))
    made = pay(path, epsilon=8.0).schema
    ages, incomes = zip(*((int(row.split(",")[0]), float(row.split(",")[1][1:])) for row in rows_of(4000)), strict=True)
    for name, values in (("age", ages), ("income", incomes)):
        column = made.columns[name]
        low, high = column.bounds
        ends = np.quantile(values, [0.005, 0.995])
        assert low <= np.quantile(values, 0.03)
        assert np.quantile(values, 0.97) <= high
        assert ends[0] - low < 0.75 * (ends[1] - ends[0])
        assert high - ends[1] < 0.75 * (ends[1] - ends[0])
        assert np.mean(np.asarray(values) <= column.missing) == pytest.approx(0.5, abs=0.06)
        shares = [np.mean(np.asarray(values) <= knot) for knot in column.knots]
        assert shares == pytest.approx(np.linspace(0.01, 0.99, 8), abs=0.06)
    assert made.columns["ward"].values == ("a", "b")
    assert made.columns["ward"].released == ()


def test_a_label_of_numbers_gets_bounds_and_a_scale(tmp_path):
    declared = DECLARED.replace('classes = ["no", "yes"]', 'kind = "number"')
    rows = [",".join([*row.split(",")[:3], row.split(",")[0]]) for row in rows_of()]
    path = table(tmp_path / "home", rows, declared)
    made = pay(path, epsilon=8.0, budget=20.0)
    label = made.schema.label
    assert label.bounds[0] <= label.scale[0] < 40
    assert 70 < label.scale[1] <= label.bounds[1] < 200
    result = fit(path, schema=written(made, tmp_path / "schema.toml"), real=True, epsilon=4, num_rounds=2)
    assert result.answers["knots"].answer[-2:].tolist() == list(label.scale)


def test_both_releases_together_cost_what_was_asked_for_and_are_paid_for_once(tmp_path):
    path = table(tmp_path / "home", rows_of())
    first = pay(path, epsilon=0.8, budget=3.0)
    assert first.loss.mu == pytest.approx(gdp_mu(0.8, 1e-5)) == pytest.approx(spent(path).spent.mu)
    before = spent(path)
    again = pay(path, epsilon=2.0)
    assert again.again
    assert not first.again
    assert again.schema == first.schema
    assert spent(path).commits == before.commits
    assert again.loss == first.loss
    with raises(ConfigurationError, "mismatch", "schema"):
        (path.parent / "declared.toml").write_text(DECLARED.replace('unit = "$"', 'unit = "$"\nmissing_codes = [-9]'))
        pay(path)
    assert spent(path).commits == before.commits


def test_a_fit_counts_what_the_schema_cost_and_pays_for_no_knots(tmp_path):
    path = table(tmp_path / "home", rows_of())
    schema = written(pay(path, epsilon=0.8, budget=6.0), tmp_path / "schema.toml")
    result = fit(path, schema=schema, real=True, epsilon=2, evaluate="private", num_rounds=2)
    whole = gdp_mu(2.0, 1e-5)
    evaluation = next(one.loss.mu for one in spent(path).sessions if one.releases == 1 and "schema" not in one.session)
    training = next(one.loss.mu for one in spent(path).sessions if one.releases == 2)
    assert math.hypot(training, evaluation) == pytest.approx(whole)  # nothing of it is for knots
    assert result.table.spent_mu == pytest.approx(math.hypot(whole, gdp_mu(0.8, 1e-5)))
    assert RECORDS[PAID_ROW] in result.guarantee.notes
    assert RECORDS["row"] not in result.guarantee.notes
    given = Schema.read_file(schema).knots
    assert result.answers["knots"].answer[1:].tolist() == list(given)


def test_an_edited_schema_is_read_but_its_guarantee_keeps_the_condition_on_drafts(tmp_path):
    path = table(tmp_path / "home", rows_of())
    schema = written(pay(path, epsilon=0.8, budget=6.0), tmp_path / "schema.toml")
    schema.write_text(re.sub(r"bounds = \[\d+, (\d+)\]", r"bounds = [0, \1]", schema.read_text(), count=1))
    text = schema.read_text()
    schema.write_text(text.replace("missing = ", "missing = 1", 1))
    result = fit(path, schema=schema, real=True, epsilon=1, num_rounds=2)
    assert RECORDS["row"] in result.guarantee.notes
    assert RECORDS[PAID_ROW] not in result.guarantee.notes
    left_out = re.sub(r"\[columns\.income\]\n(?:\w.*\n)*", "", text)
    schema.write_text(left_out)
    fit(path, schema=schema, real=True, epsilon=1, num_rounds=2)  # a column may be left out
    other = table(tmp_path / "other", rows_of(seed=6))
    schema.write_text(text)
    result = fit(other, schema=schema, real=True, epsilon=1, num_rounds=2)  # its ledger has released no schema
    assert RECORDS["row"] in result.guarantee.notes


def test_a_call_that_was_interrupted_stays_booked_and_is_never_paid_for_again(tmp_path, monkeypatch):
    path = table(tmp_path / "home", rows_of())

    def interrupted(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(paid_schemas, "_store", interrupted)
        with raises(SealedError, "failed"):
            pay(path, epsilon=0.8, budget=3.0)
    before = spent(path)
    assert before.spent.mu == pytest.approx(gdp_mu(0.8, 1e-5))
    with raises(ConfigurationError, "exhausted", "ledger"):
        pay(path, epsilon=0.8)
    assert spent(path) == before
    whole = path.parent / "whole.toml"  # what was open is declared
    whole.write_text(
        DECLARED.replace('"integer"', '"integer"\nbounds = [0, 120]').replace('"number"', '"number"\nbounds = [0, 1e6]')
    )
    result = fit(path, schema=whole, real=True, epsilon=1, num_rounds=2)
    assert RECORDS["row"] in result.guarantee.notes


@pytest.mark.parametrize(
    ("old", "new", "kind", "setting"),
    [
        ("reviewed = true", "reviewed = false", "missing", "reviewed"),
        ("reviewed = true", 'reviewed = true\nowner = "patient"', "conflict", "owner"),
        ("reviewed = true", "reviewed = true\nnorm = 1.0", "conflict", "norm"),
        ('kind = "integer"', 'kind = "integer"\nbounds = [0, 100]\nknots = [1, 2]', "exists", "schema"),
        ('classes = ["no", "yes"]', "", "invalid", "label"),
    ],
)
def test_what_cannot_be_completed_is_refused_before_a_ledger_is_made(tmp_path, old, new, kind, setting):
    rows = [f"{row},{number}" for number, row in enumerate(rows_of(20))]
    path = table(tmp_path / "home", rows, DECLARED.replace(old, new))
    path.write_text(path.read_text().replace("ill\n", "ill,patient\n", 1))
    with raises(ConfigurationError, kind, setting):
        pay(path)
    assert sorted(one.name for one in path.parent.iterdir()) == ["declared.toml", "people.csv"]


COUNTED = DECLARED.replace('"integer"', '"integer"\nbounds = [0, 120]').replace(
    '"number"', '"number"\nbounds = [0, 1e6]'
)
"""The same with bounds: only values for empty cells and knots are open."""


@pytest.mark.parametrize("declared", [DECLARED, OPEN, COUNTED])
def test_an_epsilon_is_refused_unless_it_is_enough_for_columns_with_empty_cells(tmp_path, declared):
    """At what is called enough, a column without a sixth of its values is hidden with a probability below 1e-4."""
    rows = [f",,{row.split(',', 2)[2]}" if i % 6 == 0 else row for i, row in enumerate(rows_of(300))]
    path = table(tmp_path / "home", rows, declared)
    with raises(ConfigurationError, "out-of-range", "epsilon", got=0.01) as caught:
        pay(path, epsilon=0.01)
    assert not (path.parent / "people.csv.ledger").exists()
    enough = float(re.search(r"epsilon = ([\d.]+\d)", str(caught.value))[1])
    with raises(ConfigurationError, "out-of-range", "epsilon"):
        pay(path, epsilon=0.98 * enough)
    for seed in range(20):  # each a call with a new key
        made = pay(path, epsilon=enough, ledger=tmp_path / f"{seed}.ledger")  # figures are rounded up
        assert made.hidden == ()


@pytest.mark.parametrize("declared", [DECLARED, COUNTED.replace('values = ["a", "b"]\n', "")])
def test_a_declared_schema_that_is_open_says_how_it_is_completed(tmp_path, declared):
    path = table(tmp_path / "home", rows_of(20), declared)
    found = murmurfl("schema", path, "--schema", path.parent / "declared.toml")
    assert found.exit_code == 1
    assert "`murmurfl schema FILE --schema SCHEMA.toml --epsilon E`" in found.stderr


def test_no_budget_is_exceeded(tmp_path):
    path = table(tmp_path / "home", rows_of())
    with raises(ConfigurationError, "out-of-range", "budget"):
        pay(path, epsilon=2.0, budget=1.0)
    pay(path, epsilon=1.0)
    schema = written(pay(path), tmp_path / "schema.toml")
    with raises(ConfigurationError, "exhausted", "budget"):
        fit(path, schema=schema, real=True, epsilon=1, num_rounds=2)


def test_rows_of_the_grid_of_all_magnitudes_are_bounded_and_not_negative():
    columns = (LogColumn.widest("a"), LogColumn.widest("b", whole=True))
    query = StatisticsRows(columns)
    values = [0.0, -0.0, 1.0, -1e-300, 5e-324, 1e308, -1e308, 3.7e-7, -2.5e11, 1e12, math.pi]
    at = np.array([[column.place(value) for column in columns] for value in values])
    rows = query.rows(np.concatenate([at, [[math.nan, math.nan]]]))
    assert (rows >= 0.0).all()
    assert np.linalg.norm(rows, axis=1).max() <= 1.0 + 1e-12
    assert (np.linalg.norm(rows, axis=1) > 0.6).all()  # every record is counted
    assert columns[0].place(1e308) == columns[0].places - 1
    assert columns[0].place(0.0) == columns[0].places // 2


STRANGE = [
    *("33,$10,Nobody else's,yes", "33,$10,,no", "33,$10,none named,no", "33,$10,other,no"),
    *("33,$10,a,yes", "nan,$nan,a,yes", "inf,$-inf,b,no", "1e308,$1e308,a,yes", "-1e308,$-1e308,a,no", ",,,", ""),
    *("9" * 401 + ",$1,a,no", "x" * 100_000 + ",$1,b,no", "5551234,$5551234,5551234,5551234", '"33,$1,a,yes'),
    *(b"\xff,\xfe,\xfd,\xfc", b"\x00,\x00,\x00,\x00", b"\xed\xa0\x80,$1,a,yes", "%s,{0},<b>,\x1b[2J"),
]


def test_one_strange_row_shows_in_nothing_but_the_figures_that_were_released(tmp_path):
    """The folder, the texts and the exit code are the same whatever one row says, but for released figures."""
    seen = []
    for number, line in enumerate(STRANGE):
        rows = list(rows_of())
        rows[7] = line
        home = tmp_path / f"home{number}"
        path = table(home, rows, OPEN)
        found = murmurfl(
            *("schema", path, "--schema", home / "declared.toml", "--epsilon", 4, "--budget", 8),
            *("--out", home / "schema.toml"),
        )
        text = (home / "schema.toml").read_text()
        assert tomllib.loads(text)["columns"]["ward"]["values"] in (["a", "b"], ["b", "a"])
        figures = re.sub(r"(?m)^(bounds|missing|knots|seal|values) = .*$", r"\1", text).replace(str(home), "HOME")
        again = murmurfl("schema", path, "--schema", home / "declared.toml", "--epsilon", 4)
        assert again.exit_code == 0
        assert "5551234" not in text + found.output + again.output
        assert len(tomllib.loads(text)["columns"]["age"]["knots"]) == 8
        files = sorted((one.name, one.stat().st_mode) for one in home.iterdir())
        seen.append((found.exit_code, found.output.replace(str(home), "HOME"), figures, files))
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == 0


def test_open_categories_are_named_if_frequent_and_the_ledger_books_their_delta(tmp_path):
    rows = [row.replace(",b,", f",rare {i},") if i % 3 == 0 else row for i, row in enumerate(rows_of(1500))]
    path = table(tmp_path / "home", rows, OPEN)
    made = pay(path, epsilon=1.0, budget=6.0)
    ward = made.schema.columns["ward"]
    assert (sorted(ward.values), ward.released) == (["a", "b"], ("values",))
    assert made.loss.added_delta == pytest.approx(1e-6)
    assert made.loss.assumed.epsilon(1e-5) == pytest.approx(1.0)
    assert [one.session for one in spent(path).sessions] == ["schema: values", "schema: bounds", "schema: knots"]
    schema = written(made, tmp_path / "schema.toml")
    result = fit(path, schema=schema, real=True, epsilon=2, num_rounds=2)
    total = spent(path).spent
    assert total.mu == pytest.approx(math.hypot(made.loss.mu, gdp_mu(2.0, 1e-5)))
    epsilon = gdp_epsilon(total.mu, 9e-6)
    assert f"added delta of 1e-06, epsilon = {rounded_up(epsilon)} at delta = 1e-05" in result.table.spent(1e-5)
    assert result.table.spent(1e-5) in result.outcome.guarantee
    shown = card([Group("run", [RecordedRun("run", result.outcome, None)])])  # the officer's, with total and condition
    assert result.table.spent(1e-5) in shown["full"][0][0]
    assert shown["who"]["Given"][0][0] == GIVEN_DECLARATIONS
    assert RECORDS[PAID_ROW] in result.guarantee.notes
    assert total.assumed.epsilon(1e-5) == pytest.approx(epsilon, rel=1e-9)
    assert sorted(set(result.predict([{"age": 30, "income": "$1", "ward": "rare 3"}]))) in (["no"], ["yes"])


def left_in(text):
    """The largest epsilon that a text says is left."""
    return float(re.search(r"epsilon = ([\d.]+) is left", text)[1])


@pytest.mark.parametrize("declared", [DECLARED, OPEN])
def test_what_a_schema_leaves_is_named_and_can_be_spent(tmp_path, declared):
    path = table(tmp_path / "home", rows_of(), declared)
    made = pay(path, epsilon=1.0, budget=3.0)
    schema, left = written(made, tmp_path / "schema.toml"), left_in(made.sentences[0])
    with raises(ConfigurationError, "exhausted", "budget") as caught:
        fit(path, schema=schema, real=True, epsilon=1.001 * left, num_rounds=2)
    assert left_in(str(caught.value)) == left
    fit(path, schema=schema, real=True, epsilon=left, num_rounds=2)


def test_what_is_left_for_a_schema_that_names_values_is_named_and_can_be_spent(tmp_path):
    path = table(tmp_path / "home", rows_of(), OPEN)
    SQLiteLedger.create(f"{path}.ledger", budget_mu=gdp_mu(2.0, 1e-5), delta=1e-5)
    for more in (3.0, 2.01):
        with raises(ConfigurationError, "exhausted", "budget") as caught:
            pay(path, epsilon=more)
        assert left_in(str(caught.value)) == 2.0
    assert pay(path, epsilon=2.0).sentences[0].endswith("Nothing is left.")


def test_a_table_of_categories_alone_pays_for_their_names(tmp_path):
    declared = re.sub(r"\[columns\.(age|income)\]\n(?:\w.*\n)*", "", OPEN)
    path = table(tmp_path / "home", rows_of(), declared)
    made = pay(path, epsilon=1.0)
    assert sorted(made.schema.columns["ward"].values) == ["a", "b"]
    assert [one.session for one in spent(path).sessions] == ["schema: values"]
    assert pay(path).schema == made.schema


def test_a_column_of_rare_values_is_hidden_and_stays_readable(tmp_path):
    rows = [re.sub(",[ab],", f",rare {i},", row) for i, row in enumerate(rows_of())]
    made = pay(table(tmp_path / "home", rows, OPEN))
    assert made.hidden == ("ward",)
    assert made.schema.columns["ward"].values == (NONE_NAMED,)
    assert written(made, tmp_path / "schema.toml")
    assert "ward" in made.sentences[1]


def test_a_changed_row_is_noticed_before_and_after_the_schema_was_completed(tmp_path):
    path = table(tmp_path / "home", rows_of())
    schema = written(pay(path, epsilon=0.8, budget=6.0), tmp_path / "schema.toml")
    rows = list(rows_of())
    rows[3] = rows[3].replace("$", "$1", 1)
    table(path.parent, rows)
    before = spent(path).spent
    with raises(LedgerError, "mismatch"):
        fit(path, schema=schema, real=True, epsilon=1, num_rounds=2)
    assert spent(path).spent == before
    table(path.parent, [*rows_of(), "44,$3,a,no"])  # new rows at the end may be added
    fit(path, schema=schema, real=True, epsilon=1, num_rounds=2)


@pytest.mark.parametrize("fitted_before", [False, True])
def test_a_schema_declared_with_everything_pays_for_knots_alone(tmp_path, fitted_before):
    declared = DECLARED.replace('"integer"', '"integer"\nbounds = [0, 120]\nmissing = 50').replace(
        'unit = "$"', 'unit = "$"\nbounds = [0, 1000000]\nmissing = 0'
    )
    path = table(tmp_path / "home", rows_of(), declared)
    if fitted_before:
        fit(path, schema=path.parent / "declared.toml", real=True, epsilon=1, budget=9, num_rounds=2)
    made = pay(path, **({} if fitted_before else {"budget": 9.0})).schema
    assert [one.session for one in spent(path).sessions if "schema" in one.session] == ["schema: knots"]
    assert made.columns["age"].bounds == (0, 120)
    assert made.columns["age"].missing == 50
    assert all(column.released == () for column in made.columns.values())
    assert made.declared().columns["age"].bounds == (0, 120)
    assert len(made.columns["age"].knots) == 8
    result = fit(path, schema=written(pay(path), tmp_path / "schema.toml"), real=True, epsilon=1, num_rounds=2)
    assert RECORDS[PAID_ROW] in result.guarantee.notes


def test_the_declared_schema_of_a_completed_one_is_the_one_that_was_declared(tmp_path):
    path = table(tmp_path / "home", rows_of())
    declared = Schema.read_declared(path.parent / "declared.toml")
    made = pay(path).schema
    assert declared.columns["income"].bounds == WIDEST
    assert made.columns["income"].bounds != WIDEST
    assert made.declared() == declared
    assert declared.declared() == declared
    assert json.loads(made.sealed_text()) != json.loads(declared.sealed_text())


def test_the_command_prints_the_schema_and_refuses_other_options(tmp_path):
    path = table(tmp_path / "home", rows_of())
    declared = path.parent / "declared.toml"
    for options in (["--label", "ill"], ["--digest"], ["--html", tmp_path / "a.html"]):
        assert murmurfl("schema", path, "--schema", declared, "--epsilon", 1, *options).exit_code == 1
    assert murmurfl("schema", path, "--epsilon", 1).exit_code == 1
    assert murmurfl("schema", path, "--schema", declared, "--budget", 1).exit_code == 1
    found = murmurfl("schema", path, "--schema", declared, "--epsilon", 1)
    assert tomllib.loads(found.stdout)["columns"]["age"]["released"] == ["bounds", "missing"]
    assert max(len(line) for line in found.stdout.splitlines() if line.startswith("#")) <= 80
