"""Tables in which a person has several rows: who is protected, who is held out, and which column is proposed."""

from dataclasses import replace

import numpy as np
import pytest
from murmurfl.app import fit
from murmurfl.app.commands.main import cli
from murmurfl.app.data.table_task import ReadTable, held_out, split_rows
from murmurfl.app.runs.fit_summary import fit_lines
from murmurfl.clients import Column, Label, Schema
from murmurfl.privacy import ConfigurationError, derived_seed
from typer.testing import CliRunner

from tests.harness.errors import raises

pytestmark = pytest.mark.usefixtures("no_forecast", "small_rehearsals")


def visits(persons=120, seed="visits"):
    """Rows of persons with one to nine visits each, in a file sorted by nothing; the older half is ill."""
    random = np.random.Generator(np.random.Philox(key=derived_seed("persons", seed)))
    rows = []
    for person in range(persons):
        age = int(random.integers(20, 90))
        ill = "yes" if age > 55 else "no"
        for _ in range(int(random.choice([1, 2, 3, 9], p=[0.4, 0.3, 0.2, 0.1]))):
            rows.append({"patient_nbr": 1000 + person, "age": age, "hospital": f"H{random.integers(3)}", "ill": ill})
    return [rows[i] for i in random.permutation(len(rows))]


def on_both_sides(read, train, test):
    """Number of persons with rows on both sides of a split."""
    return len(np.intersect1d(read.owner_of[train], read.owner_of[test]))


@pytest.mark.parametrize("site", ["", "hospital"])
def test_no_person_is_trained_on_and_held_out(site):
    found = ReadTable.of(visits(), label="ill", site=site, owner="patient_nbr")
    read = found.read(site)
    for seed in range(1, 8):
        train, test = split_rows(read, 0.2, seed)
        assert sorted([*train, *test]) == list(range(len(read.labels)))
        assert on_both_sides(read, train, test) == 0
        assert 0.1 < len(test) / len(read.labels) < 0.35
        assert on_both_sides(read, *split_rows(replace(read, owner_of=None), 0.2, seed)) > 5, "a split by rows shows"


def test_sites_of_few_persons_keep_one_to_train_on():
    rows = [{**row, "hospital": f"s{(row['patient_nbr'] - 1000) // 2}"} for row in visits(40)]
    found = ReadTable.of(rows, label="ill", site="hospital", owner="patient_nbr")
    for seed in range(1, 6):
        made = held_out(found.read("hospital"), found.schema, 0.2, seed)
        assert sorted(set(made.client_of.tolist())) == list(range(20))
        assert len(made.test_labels)


@pytest.fixture(scope="module")
def rows():
    return visits()


@pytest.fixture(scope="module")
def of_persons(rows):
    return fit(rows, label="ill", clients=3, owner="patient_nbr", epsilon=8, num_rounds=8)


def test_the_protected_unit_is_a_person_and_how_many_there_are_is_said(of_persons, rows):
    table, config = of_persons.table, of_persons.experiment.config
    assert of_persons.guarantee.unit == "owner"
    assert table.owners == len({row["patient_nbr"] for row in rows}) == 120
    assert "patient_nbr" not in table.schema.columns
    assert table.schema.owner == "patient_nbr"
    lines = fit_lines(of_persons, table, None)
    (said,) = [line for line in lines if line.startswith("persons")]
    assert "120 by 'patient_nbr', each protected with all rows" in said
    assert not any("use --owner" in line for line in lines)
    data = of_persons.experiment.data
    _, counts = np.unique(data.owner_of, return_counts=True)
    assert table.unused == sum(max(count - config.samples_per_owner, 0) for count in counts) > 0
    assert f"{table.unused:,} of {table.trained:,} rows are not" in said
    assert 1 - table.unused / table.trained > 0.8


def test_all_rows_of_a_person_are_dealt_to_one_client(of_persons):
    data = of_persons.experiment.data
    for person in np.unique(data.owner_of):
        assert len(np.unique(data.client_of[data.owner_of == person])) == 1
    sizes = of_persons.experiment.sizes
    assert sum(sizes) == len(np.unique(data.owner_of))
    assert max(sizes) - min(sizes) <= 1


def test_a_schema_names_the_owner_as_the_option_does(rows, of_persons):
    schema = of_persons.table.schema
    again = fit(rows, schema=schema, clients=3, epsilon=8, num_rounds=8)
    assert again.guarantee.unit == "owner"
    assert all(np.array_equal(a, b) for a, b in zip(again.parameters, of_persons.parameters, strict=True))


def test_a_column_of_persons_is_proposed_before_any_figure(rows):
    result = fit(rows, label="ill", clients=3, epsilon=8, num_rounds=2, strategy="full-batch")
    assert result.guarantee.unit == "sample"
    first = fit_lines(result, result.table, None)[0]
    assert "'patient_nbr' has 120 values" in first
    assert "--owner patient_nbr" in first


@pytest.mark.parametrize(
    ("name", "values", "proposed"),
    [
        ("PatientID", lambda number: number // 3, True),
        ("id", lambda number: f"p{number // 3}", True),
        ("id", lambda number: number, False),  # one row each
        ("patient_id", lambda number: number % 5, False),  # of a few groups
        ("idea", lambda number: number // 3, False),
        ("postcode", lambda number: number // 3, False),
    ],
)
def test_only_names_of_persons_that_repeat_are_proposed(name, values, proposed):
    rows = [{name: values(number), "age": 20 + number % 70, "ill": number % 2} for number in range(300)]
    assert (ReadTable.of(rows, label="ill").likely_owner()[0] == name) is proposed


OTHER = Schema(
    columns={"age": Column(kind="number", bounds=(0, 100))}, label=Label(column="ill", classes=("no", "yes"))
)


@pytest.mark.parametrize(
    ("options", "kind", "setting"),
    [
        ({"owner": "patient"}, "unknown-name", None),
        ({"owner": "age", "schema": OTHER}, "conflict", "owner"),
        ({"owner": "patient_nbr", "schema": OTHER.model_copy(update={"owner": "hospital"})}, "mismatch", "owner"),
        ({"owner": "patient_nbr", "site": "patient_nbr"}, "conflict", "site"),
        ({"owner": "patient_nbr", "scale": "private"}, "conflict", "scale"),
        ({"owner": "patient_nbr", "clients": 500}, "out-of-range", "clients"),
        ({"owner": "patient_nbr", "owners": 100}, "conflict", "owners"),
        ({"samples_per_owner": 3, "strategy": "full-batch"}, "missing", "owner"),
    ],
)
def test_what_is_wrong_with_owners_is_named(rows, options, kind, setting):
    with raises(ConfigurationError, kind, setting):
        fit(rows, **{"label": "ill", **options})


def test_the_command_protects_persons(rows, tmp_path):
    table = tmp_path / "visits.csv"
    names = list(rows[0])
    table.write_text("\n".join(",".join(map(str, line)) for line in [names, *(row.values() for row in rows)]))
    options = ["--label", "ill", "--owner", "patient_nbr", "--set", "num-rounds=2", "--out", tmp_path, "--name", "f"]
    done = CliRunner().invoke(cli, [str(one) for one in ["fit", table, *options]])
    assert done.exit_code == 0, done.output
    assert "120 by 'patient_nbr'" in done.output
    assert "all samples of one owner" in done.output
