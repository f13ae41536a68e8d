"""The tables of README.md and docs/ are those of the documents they come from: no figure is typed in by hand."""

import html
import importlib.util
import re
import runpy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from murmurfl.app.settings.run_config import run_keys
from murmurfl.privacy import MECHANISMS, SIMULATED, Guarantee, rounded_up
from murmurfl.privacy.accounting.guarantee import FAST_NOISE
from murmurfl.privacy.accounting.loss import Loss

from benchmarks import masks, pages, picture
from benchmarks.skew import COLUMNS

DOCS = sorted((pages.ROOT / "docs").glob("*.md"))


@pytest.fixture(autouse=True)
def built_in_mechanisms(monkeypatch):
    """A mechanism that another test of this process made known is none of the pages'."""
    for name, kind in list(MECHANISMS.items()):
        if not kind.__module__.startswith("murmurfl.privacy."):
            monkeypatch.delitem(MECHANISMS, name)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("page", pages.BLOCKS)
def test_tables_are_what_the_documents_say(page):
    text = (pages.ROOT / page).read_text()
    assert pages.filled(text, pages.BLOCKS[page]) == text, "run `python -m benchmarks.pages`"


def test_a_changed_figure_would_be_noticed():
    text = (pages.ROOT / "README.md").read_text()
    changed = re.sub(r"(\d\d)\.(\d) ±", r"\1.9 ±", text, count=3)
    assert changed != text
    assert pages.filled(changed, pages.BLOCKS["README.md"]) != changed


@pytest.mark.parametrize("page", ["results", "tuning", "performance"])
def test_the_site_has_tables_where_pages_have_links_to_them(page):
    blocks = pages.BLOCKS[f"docs/{page}.md"]
    source = [(pages.ROOT / f"docs/{page}.md").read_text()]
    assert set(pages.LINK.findall(source[0])) == blocks.keys()
    watched = []
    app = SimpleNamespace(env=SimpleNamespace(note_dependency=watched.append))
    runpy.run_path(str(pages.ROOT / "docs" / "conf.py"))["put_tables"](app, page, source)
    assert "[Table: " not in source[0]
    assert all(f"\n\n{write()}\n" in source[0] for write in blocks.values())
    assert pages.DOCUMENTS / "performance.json" in watched


def test_a_link_leads_to_figures_for_those_who_read_the_source():
    for page in pages.BLOCKS:
        links = re.findall(r"^\[Table: .*\]\((.*)\)$", (pages.ROOT / page).read_text(), flags=re.MULTILINE)
        assert all((pages.ROOT / "docs" / link).is_file() for link in links)


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        pages.filled("no marks", {"results": lambda: ""})


def test_a_link_to_no_table_is_refused():
    with pytest.raises(ValueError, match="'result'"):
        pages.built("[Table: result](results/tuning.json)", {"results": lambda: ""})


def test_the_sites_tables_are_those_of_the_declarations():
    reference = reference_tables()
    rows = dict(line.split(" | ", 1) for line in reference.filled("<!-- generated: keys -->").splitlines()[2:])
    assert set(rows) == {f"| `{name}`" for name in run_keys()}
    assert rows["| `mu`"].startswith("`0` | a number >= 0 (0: unset) | every run | ")
    assert "| `per_round[].refused` | object | " in reference.filled("<!-- generated: result -->")
    assert "| [`gdp_epsilon`](generated/api/murmurfl.privacy.gdp_epsilon.rst) | 0.1 | " in reference.filled(
        "<!-- generated: murmurfl.privacy -->"
    )


def test_every_mark_of_a_generated_table_is_known():
    marks = [mark for page in DOCS for mark in re.findall(r"<!-- generated: (\S+) -->", page.read_text())]
    assert sorted(marks) == sorted(reference_tables().TABLES)
    with pytest.raises(KeyError):
        reference_tables().filled("<!-- generated: kyes -->")


def reference_tables():
    spec = importlib.util.spec_from_file_location("reference", pages.ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_what_the_documents_say():
    """Its text is text: every figure of its lines, their names, and what their epsilons are true of."""
    shown = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", pages.PICTURE.read_text()).split()))
    lines = picture.drawn(pages.best())
    assert set(lines) == {*picture.LINES, picture.NOISELESS, picture.SINGLE}
    for line, rows in lines.items():
        assert line.name in shown
        for row in rows:
            if row["epsilon"] is not None:
                assert f"ε = {float(rounded_up(row['epsilon'], 1)):g}" in shown
                assert picture.percent_text(row["accuracy %"]) in shown
    assert picture.CENTRAL.assumes in shown
    assert pages.told_of(lines) in shown


def test_a_figure_that_changed_would_be_noticed_in_the_picture(tmp_path):
    made = pages.best()
    cell = next(cell for cell in made["cells"] if picture.RELEASES.rows({"cells": [cell]}))
    cell["algorithms"][picture.FULL]["accuracy"]["mean"] += 0.0123
    picture.draw(made, "", tmp_path / "other.svg")
    changed = picture.percent_text(picture.RELEASES.rows(made)[0]["accuracy %"])
    assert changed in (tmp_path / "other.svg").read_text()
    assert f">{changed}<" not in pages.PICTURE.read_text()


def test_the_picture_is_drawn_anew_as_it_is(tmp_path):
    made = pages.best()
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for path in (first, again):
        picture.draw(made, pages.told_of(picture.drawn(made)), path)
    assert first.read_bytes() == again.read_bytes()


SUMS = {"loss": Loss.of(0.5, 1.0), "trust": "secure-aggregation", "min_honest": 7}
NOTES = (FAST_NOISE, SIMULATED)
SAME = {"loss": 0.5, "delta": 1e-5, "mechanism": "blt noise on each client", "notes": NOTES}


def test_one_sentence_says_what_all_epsilons_are_true_of():
    made = [Guarantee(**{**SAME, **sums}) for sums in ({}, SUMS)]
    said = picture.terms([("a", one) for one in made])
    assert "one helper and 7 clients of each sum are honest; in the worst case ε is 4.4." in said
    assert said.startswith(f"ε is rounded up and holds {made[0].protects}; noise on each client; {made[0].covers}. ")


@pytest.mark.parametrize(
    "other",
    [
        {"delta": 1e-6},
        {"unit": "owner"},
        {"trust": "trusted-server"},
        {"notes": ()},
        {"mechanism": "the server's noise"},
    ],
    ids=str,
)
def test_a_sentence_that_is_not_true_of_all_is_refused(other):
    sums = Guarantee(**{**SAME, **SUMS})
    with pytest.raises(ValueError, match="guarantees of the same words"):
        picture.terms([("a", Guarantee(**SAME)), ("b", sums), ("c", Guarantee(**{**SAME, **other}))])


def test_the_readme_has_one_table_of_at_most_eight_rows():
    text = (pages.ROOT / "README.md").read_text()
    tables = [found.group().splitlines() for found in re.finditer(r"(^\|.*\n)+", text, flags=re.MULTILINE)]
    (lines,) = tables
    assert 2 <= len(lines) - 2 <= pages.ROWS == 8


def test_masks_cost_what_was_promised_of_them():
    """Each a fifth of an exact noise row at most; a helper of 1,000 clients with 10^6 parameters 5 s and 300 MiB."""
    measured = pages.document("performance")["masks"]
    assert all(row["mask"] <= row["noise"] / 5 for row in measured["masks"])
    one = measured["helper"]
    assert (one["clients"], one["size"]) == (1_000, 1_000_000)
    assert one["seconds"] < 5
    assert one["peak_mib"] < 300


def test_a_round_is_measured_only_if_both_sums_agree(monkeypatch):
    measured, sealed = masks.whole_round(3, 4)
    assert len(sealed) == 3
    assert masks.masked_seconds(measured) > masks.plain_seconds(measured) > 0
    monkeypatch.setattr(masks, "_answer", _with_a_wrong_total(masks._answer))
    with pytest.raises(RuntimeError, match="helper's answer"):
        masks.whole_round(3, 4)


def _with_a_wrong_total(read):
    def answer(reply):
        right = read(reply)
        return replace(right, total=right.total + np.uint64(1))

    return answer


def test_what_the_page_of_sites_that_differ_says_stands_in_its_document():
    """The figures in its sentences, each found by what it is of."""
    text = " ".join((pages.ROOT / "docs" / "sites-that-differ.md").read_text().split())
    rows = {(row["data"], row["skew"], row["way"], row["trust"], row["epsilon"]): row for row in pages.document("skew")}

    def figure(part, skew, name, data="digits"):
        return f"{np.mean(rows[(data, skew, *COLUMNS[name])][part]):.0f}"

    full, alone, averaged = "full batches, sums", "one site alone", "FedAvg"
    skews = ("alike", "Dirichlet 1", "Dirichlet 0.3", "Dirichlet 0.1", "two classes", "one class")
    assert len({f"{np.mean(rows[('digits', one, *COLUMNS[full])]['everybody']):.1f}" for one in skews}) == 1
    skewed = "Dirichlet 0.1"
    for said in (
        f"on its own mix ({figure('own', skewed, alone)} % next to {figure('own', skewed, full)} at Dirichlet 0.1)",
        f"has {figure('everybody', skewed, alone)} % on everybody's digits",
        f"one linear model has {figure('own', 'rotation', full)} %",
        f"({figure('own', 'rotation', alone)} and {figure('own', 'style', alone)} %)",
        f"({figure('own', 'rotation', averaged)} and {figure('own', 'style', averaged)} %)",
        f"({figure('own', 'concept', alone)} % next to {figure('own', 'concept', full)})",
        f"{figure('everybody', 'absent', full)} % with sums",
        f"FedAvg without privacy ({figure('everybody', 'absent', averaged)} %)",
        f"({figure('own', 'own sites', alone, 'heart')} % next to {figure('own', 'own sites', full, 'heart')})",
    ):
        assert said in text, said
