"""`murmurfl schema` and `statistics`: a draft for a person to review, and private statistics as a rehearsal."""

import csv
import gzip
import json
import tomllib

import numpy as np
import pytest
from murmurfl.app.commands.main import cli
from murmurfl.clients import Schema
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import ConfigurationError
from typer.testing import CliRunner

from tests.harness.errors import raises

ROWS = 400


def murmurfl(*arguments):
    result = CliRunner().invoke(cli, ["schema", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def said(*arguments):
    result = murmurfl(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    result = murmurfl(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def people():
    """Rows as COMPAS has them: blanks, categories, a rare one, a free text, and columns that say nothing."""
    random = np.random.Generator(np.random.Philox(key=3))
    for number in range(ROWS):
        yield {
            "id": number,
            "name": f"Person {number}",
            "sex": ["Male", "Female"][random.integers(2)],
            "race": "Tuareg" if number < 5 else ["Asian", "Black", "White"][random.integers(3)],
            "age": "" if number % 9 == 0 else random.integers(18, 90),
            "priors": 38 if number == 7 else random.integers(0, 20),
            "country": "US",
            "note": "",
            "reoffended": random.integers(2),
        }


def write(path, rows):
    rows = list(rows)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "people.csv", people())


def test_a_draft_has_types_bounds_categories_and_missing_values(table):
    drafted = Schema(**tomllib.loads(said(table)))
    assert list(drafted.columns) == ["sex", "race", "age", "priors"], "an id and names are left out"
    assert drafted.label.column == "reoffended"
    assert drafted.label.names == ("0", "1")
    assert drafted.columns["sex"].values == ("Female", "Male")
    assert drafted.columns["age"].kind == "integer"
    assert drafted.columns["age"].missing is not None
    assert drafted.columns["sex"].missing is None


def test_a_draft_shows_no_rare_category_no_extreme_and_no_folder(table):
    text = said(table)
    assert "Tuareg" not in text
    assert "Person" not in text
    assert "38" not in text
    assert str(table.parent) not in text


def test_the_heading_says_what_to_do_and_what_is_left_out(table, check_output):
    check_output(said(table))


def test_a_node_refuses_a_draft_until_somebody_reviewed_it(table, tmp_path):
    out = tmp_path / "schema.toml"
    said(table, "--out", out)
    with raises(ConfigurationError, "missing", "reviewed"):
        Schema.read_file(out).check_for_real_nodes()
    out.write_text(out.read_text().replace("reviewed = false", "reviewed = true"))
    Schema.read_file(out).check_for_real_nodes()


def test_names_cannot_write_into_a_draft(tmp_path):
    rows = [{"a\x7f": n, "b": "", "reviewed = true": "x", "y": n % 2} for n in range(50)]
    path = write(tmp_path / "x\nreviewed = true\n.csv", rows)
    drafted = tomllib.loads(said(path))
    assert drafted["reviewed"] is False
    assert list(drafted["columns"]) == ["a\x7f"]


@pytest.mark.parametrize("name", ["people.csv.gz", "people.parquet"])
def test_other_kinds_of_tables_give_the_same_draft(name, table, tmp_path):
    other = tmp_path / name
    if name.endswith(".gz"):
        write(other, people())
    else:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.read_csv(table).to_parquet(other)
    first = "# Leave only"  # behind the file's name
    assert said(other).partition(first)[2] == said(table).partition(first)[2] != ""


def test_an_npz_gives_a_draft_of_arrays(tmp_path):
    path = tmp_path / "samples.npz"
    random = np.random.default_rng(5)
    np.savez(path, features=random.uniform(0, 1, (60, 3)), labels=np.arange(60) % 4)
    drafted = Schema(**tomllib.loads(said(path)))
    (part,) = drafted.inputs
    assert (part.shape, part.bounds, drafted.num_classes) == ((3,), (0.0, 1.0), 4)
    assert "60 of 60" in said(path, "--schema", _write(tmp_path / "schema.toml", said(path)))
    assert "for an .npz" in refusal(path, "--label", "y")


def _write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_header_in_quotes_and_another_separator(separator, tmp_path):
    rows = [separator.join(['"a"', '"b, c"', '"y"']), *(separator.join(map(str, (n, n % 7, n % 2))) for n in range(50))]
    drafted = Schema(**tomllib.loads(said(_write(tmp_path / "x.csv", "\n".join(rows)))))
    assert drafted.separator == separator
    assert list(drafted.columns) == ["a", "b, c"]


def test_columns_of_sites_and_owners_stand_in_the_draft_as_no_features(table, tmp_path):
    shown = said(table, "--site", "race", "--owner", "id", "--out", tmp_path / "schema.toml").splitlines()
    rows = {words[0]: " ".join(words[1:]) for line in shown if (words := line.split())}
    assert rows["race"].startswith("left out says the site")
    assert rows["id"].startswith("left out says whose a row is")
    assert rows["country"].startswith("left out a single value")


def test_owner_and_label_are_no_inputs(table):
    drafted = Schema(**tomllib.loads(said(table, "--owner", "id", "--label", "sex")))
    assert drafted.owner == "id"
    assert drafted.label.names == ("Female", "Male")
    assert list(drafted.columns) == ["race", "age", "priors", "reoffended"]


def test_a_mistyped_label_gets_the_column_that_was_meant(table):
    assert "did you mean 'reoffended'?" in refusal(table, "--label", "reofended")
    assert "age, priors" in refusal(table, "--owner", "zzz")


def test_eighty_columns(tmp_path):
    rows = [{**{f"x{i}": n * i % 83 for i in range(1, 80)}, "y": n % 2} for n in range(100)]
    path = write(tmp_path / "wide.csv", rows)
    assert len(tomllib.loads(said(path))["columns"]) == 79
    line = refusal(path, "--label", "x100000")
    assert "did you mean" in line
    assert len(line) < 300


def test_columns_of_one_name_are_left_out_of_a_draft(tmp_path):
    path = _write(tmp_path / "x.csv", "a,a,b,y\n" + "".join(f"{n},1,{n},{n % 2}\n" for n in range(50)))
    text = said(path)
    assert "# Left out, with a name that stands twice: 'a'." in text
    assert list(tomllib.loads(text)["columns"]) == ["b"]
    assert "2 times" in refusal(path, "--label", "a")


@pytest.mark.parametrize("content", ["", "a,y\n", "y\n1\n0\n"])
def test_a_file_without_records_is_refused(content, tmp_path):
    assert refusal(_write(tmp_path / "x.csv", content)).startswith("murmurfl: Expected")


def test_a_schema_that_is_there_is_overwritten_by_force_only(table, tmp_path):
    out = _write(tmp_path / "schema.toml", "reviewed = true")
    assert "--force" in refusal(table, "--out", out)
    assert out.read_text() == "reviewed = true"
    assert "reviewed = true" in said(table, "--out", out, "--force")
    assert out.read_text() == said(table)


def test_the_digest_is_that_of_what_records_are_read_by(table, tmp_path):
    out = tmp_path / "schema.toml"
    said(table, "--out", out)
    digest = said(out, "--digest").strip()
    assert digest == Schema.read_file(out).digest
    out.write_text(out.read_text().replace("reviewed = false", "reviewed = true"))
    assert said(out, "--digest").strip() == digest
    out.write_text(out.read_text().replace('"Female", "Male"', '"Male", "Female"'))
    assert said(out, "--digest").strip() != digest


def test_a_file_is_read_back_by_a_schema(table, tmp_path):
    out = tmp_path / "schema.toml"
    said(table, "--out", out)
    assert said(table, "--schema", out).startswith(f"{ROWS} of {ROWS} records fit")
    lines = table.read_text().splitlines()
    lines[1] = lines[1].rpartition(",")[0] + ",9"
    broken = _write(tmp_path / "other.csv", "\n".join([*lines, "only one cell"]))
    report = said(broken, "--schema", out)
    assert report.startswith(f"{ROWS - 1} of {ROWS + 1} records fit")
    assert "reoffended: a label that is none of the classes" in report


def test_records_with_missing_cells_fit_an_additive_model_alone(table, tmp_path):
    """Numbers of a schema without `missing`: an additive model reads their empty cells."""
    out = tmp_path / "schema.toml"
    said(table, "--out", out)
    found = Schema.read_file(out)
    columns = {**found.columns, "age": found.columns["age"].changed(missing=None)}
    out.write_text(document(found.changed(columns=columns)))
    with table.open() as file:
        empty = sum(not row["age"].strip() for row in csv.DictReader(file))
    assert empty
    additive, other = said(table, "--schema", out).split("Any other model")
    assert f"{ROWS} of {ROWS} records fit" in " ".join(additive.split())
    assert f"{ROWS - empty} of {ROWS} records fit" in " ".join(other.split())


@pytest.mark.parametrize(
    "mixed", [("--digest", "--force"), ("--digest", "--schema", "s.toml"), ("--schema", "s", "--label=a")]
)
def test_one_thing_is_asked_for_at_a_time(mixed, table):
    assert "several of them" in refusal(table, *mixed)


@pytest.mark.parametrize("name", ["schema.toml", "people.txt"])
def test_a_file_of_another_kind_is_refused(name, tmp_path):
    assert "ends in .csv" in refusal(_write(tmp_path / name, "a,y\n1,2\n"))


@pytest.fixture
def clinics(tmp_path):
    path = tmp_path / "patients.csv"
    rows = [f"{20 + i % 60},{'' if i % 10 == 0 else 150 + i % 40},{'abc'[i % 3]},{i % 2}" for i in range(2000)]
    path.write_text("\n".join(["age,height,ward,ill", *rows]) + "\n")
    return path


def rehearsed(*arguments, code=0):
    result = CliRunner().invoke(cli, ["statistics", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_it_says_first_that_nobody_is_protected_and_that_the_schema_was_drafted(clinics):
    lines = rehearsed(clinics, "--epsilon", "2").splitlines()
    assert lines[0].startswith("REHEARSAL: nobody is protected")
    assert "it would have: mu = 0.5" in lines[1]
    assert "epsilon = 2 at delta = 1e-05, for replacement of one sample of one client, against the server" in lines[1]
    assert "drafted from these records" in lines[2]


def test_columns_are_shown_by_kind(clinics):
    lines = [line.split() for line in rehearsed(clinics, "--epsilon", "4").splitlines()[3:] if line]
    assert [words[0] for words in lines] == ["number", "age", "height", "category", "ward", "ill"]
    age = lines[1]
    assert float(age[3]) == pytest.approx(49.5, abs=3)
    assert lines[0][-5:] == ["%", "75", "%", "95", "%"]


def test_as_json_it_has_every_figure_and_no_epsilon_of_its_own(clinics):
    found = json.loads(rehearsed(clinics, "--clients", "5", "--trust", "secure-aggregation", "--json"))
    assert found["rehearsal"] is True
    assert "epsilon" not in found
    assert found["would_have"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert "worst case" in found["would_have"]["sentence"]
    assert (found["clients"], found["records"]) == (5, 2000)
    assert set(found["columns"]["age"]) >= {"mean", "quantiles", "histogram", "count", "missing", "bounds"}


def test_a_schema_of_ones_own_is_taken(clinics, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'reviewed = true\n[label]\ncolumn = "ill"\nclasses = ["0", "1"]\n'
        '[columns.age]\nkind = "integer"\nbounds = [0, 99]\n'
    )
    shown = rehearsed(clinics, "--schema", schema, "--site", "ward", "--epsilon", "2")
    assert "drafted" not in shown
    assert "3 clients" in shown


def test_what_is_impossible_is_one_line(clinics, tmp_path):
    for arguments in ((clinics, "--trust", "nobody"), (tmp_path / "none.csv",), (clinics, "--epsilon", "0")):
        (line,) = rehearsed(*arguments, code=1).splitlines()
        assert line.startswith("murmurfl: ")
