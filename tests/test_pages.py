"""The tables of README.md and docs/ are those of the documents they come from: no figure is typed in by hand."""

import re

import pytest

from benchmarks import pages


@pytest.mark.parametrize("page", pages.BLOCKS)
def test_tables_are_what_the_documents_say(page):
    text = (pages.ROOT / page).read_text()
    assert pages.filled(text, pages.BLOCKS[page]) == text, "run `python -m benchmarks.pages`"


def test_a_changed_figure_would_be_noticed():
    text = (pages.ROOT / "docs/results.md").read_text()
    changed = re.sub(r"(\d\d)\.(\d) ±", r"\1.9 ±", text, count=3)
    assert changed != text
    assert pages.filled(changed, pages.BLOCKS["docs/results.md"]) != changed


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        pages.filled("no marks", {"results": lambda: ""})
