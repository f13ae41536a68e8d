"""``murmurfl statistics``: what it prints, that it says that nobody was protected, and what it refuses."""

import json

import pytest
from murmurfl.app.commands.main import cli
from typer.testing import CliRunner


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "patients.csv"
    rows = [f"{20 + i % 60},{'' if i % 10 == 0 else 150 + i % 40},{'abc'[i % 3]},{i % 2}" for i in range(2000)]
    path.write_text("\n".join(["age,height,ward,ill", *rows]) + "\n")
    return path


def said(*arguments, code=0):
    result = CliRunner().invoke(cli, ["statistics", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_it_says_first_that_nobody_is_protected_and_that_the_schema_was_drafted(table):
    lines = said(table, "--epsilon", "2").splitlines()
    assert lines[0].startswith("REHEARSAL: nobody is protected")
    assert "it would have: mu = 0.5" in lines[1]
    assert "epsilon = 2 at delta = 1e-05, for replacement of one sample of one machine, against the server" in lines[1]
    assert "drafted from these records" in lines[2]


def test_columns_are_shown_by_kind(table):
    lines = [line.split() for line in said(table, "--epsilon", "4").splitlines()[3:] if line]
    assert [words[0] for words in lines] == ["number", "age", "height", "category", "ward", "ill"]
    age = lines[1]
    assert float(age[3]) == pytest.approx(49.5, abs=3)
    assert lines[0][-5:] == ["%", "75", "%", "95", "%"]


def test_as_json_it_has_every_figure_and_no_epsilon_of_its_own(table):
    found = json.loads(said(table, "--machines", "5", "--trust", "secure-aggregation", "--json"))
    assert found["rehearsal"] is True
    assert "epsilon" not in found
    assert found["would_have"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert "whatever happens" in found["would_have"]["sentence"]
    assert (found["machines"], found["records"]) == (5, 2000)
    assert set(found["columns"]["age"]) >= {"mean", "quantiles", "histogram", "count", "missing", "bounds"}


def test_a_schema_of_ones_own_is_taken(table, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'reviewed = true\n[label]\ncolumn = "ill"\nclasses = ["0", "1"]\n'
        '[columns.age]\nkind = "integer"\nbounds = [0, 99]\n'
    )
    shown = said(table, "--schema", schema, "--site", "ward", "--epsilon", "2")
    assert "drafted" not in shown
    assert "3 machines" in shown


def test_what_is_impossible_is_one_line(table, tmp_path):
    for arguments in ((table, "--trust", "nobody"), (tmp_path / "none.csv",), (table, "--epsilon", "0")):
        (line,) = said(*arguments, code=1).splitlines()
        assert line.startswith("murmurfl: ")
