"""A table: one set of columns for the terminal, Markdown and page, and unrounded figures for CSV and JSON."""

import csv
import io
import json

import pytest
from murmurfl.app.papers import PAPERS
from murmurfl.app.papers.reproduction import tables_of
from murmurfl.app.reports.table import Column, Marked, Table
from murmurfl.privacy import ConfigurationError, rounded_up

from benchmarks import pages
from tests.harness.errors import raises

COLUMNS = (
    Column("who", "whose it is", label=True),
    Column("accuracy %", "on the test set", "accuracy", ".1f", "std"),
    Column("epsilon", "what is guaranteed", form=rounded_up, missing="none"),
    Column("of", "asked, of all", lambda row: f"{row['asked']} of {row['all']}"),
    Column("best", "stands out", "accuracy", lambda value: Marked(f"{value:.0f}", " (best)") if value > 50 else "no"),
)
ROWS = (
    {"who": "a", "accuracy": 61.24, "std": None, "epsilon": 1.23451, "asked": 2, "all": 3},
    {"who": "b|c", "accuracy": 42.0, "std": 1.06, "epsilon": None, "asked": 3, "all": 3},
)


def table(**changes):
    return Table(**{"title": "T", "columns": COLUMNS, "rows": ROWS, "caption": "words", **changes})


def test_texts_and_markdown_say_the_same():
    made = table()
    assert made.texts() == [
        {"who": "a", "accuracy %": "61.2", "epsilon": "1.235", "of": "2 of 3", "best": "61 (best)"},
        {"who": "b|c", "accuracy %": "42.0 ± 1.1", "epsilon": "none", "of": "3 of 3", "best": "no"},
    ]
    assert made.labels == ["who"]
    assert made.markdown().splitlines() == [
        "| who | accuracy % | epsilon | of | best |",
        "|---|---|---|---|---|",
        "| a | 61.2 | 1.235 | 2 of 3 | **61** (best) |",
        r"| b\|c | 42.0 ± 1.1 | none | 3 of 3 | no |",
    ]


def test_figures_are_written_unrounded_each_with_what_it_is_true_of():
    made = table()
    rows = list(csv.DictReader(io.StringIO(made.csv())))
    assert [row["guarantee"] for row in rows] == ["words", "words"]
    assert [(float(row["accuracy"]), row["epsilon"]) for row in rows] == [(61.24, "1.23451"), (42.0, "")]
    document = json.loads(json.dumps(made.document()))
    assert document["rows"] == list(ROWS)
    assert document["guarantee"] == "words"
    assert document["columns"][0] == {"name": "who", "meaning": "whose it is"}
    assert "guarantee" not in table(caption="").csv()
    assert table(figures=[{"x": 1}, {"y": 2}]).csv().splitlines() == ["x,y,guarantee", "1,,words", ",2,words"]


def test_two_columns_of_one_name_are_refused():
    with raises(ConfigurationError, "duplicate", "columns", match="two called 'who'"):
        table(columns=(*COLUMNS, Column("who", "again")))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", [name for name in PAPERS if (pages.DOCUMENTS / f"{name}.json").exists()])
def test_every_column_of_a_paper_says_what_it_means(name):
    for made in tables_of(pages.document(name), name, PAPERS[name].table):
        assert made.labels
        assert all(column.meaning for column in made.columns)
        assert len(made.texts()) == len(made.rows) > 0
        # A heading is wrapped where there is little room; no two of them may end in the same word then.
        last = [column.name.split()[-1] for column in made.columns if not column.label]
        assert "asked" not in last
