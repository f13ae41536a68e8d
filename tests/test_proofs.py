"""The pages of docs/proofs/: every step has a check that exists, every page a docstring that rests on it.

Files are parsed and not imported, so a check's name is found wherever it runs.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness.imports import parsed

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "proofs").glob("*.md"))
FOLDERS = ("privacy", "clients", "strategies")
CHECK = re.compile(r"^\* `(tests/\S+\.py)::(test_\w+)`$", flags=re.MULTILINE)
STEP = re.compile(r"^\*\*(\d+)\. ", flags=re.MULTILINE)
NAMED = re.compile(r"docs/proofs/([\w-]+\.md)")
CLAIM = re.compile(r"\bmu\b|GDP|-GDP|\bRDP\b")

WITHOUT_A_PAGE = {
    "privacy/asked.py:asked_mu": "arithmetic of privacy/gdp.py",
    "privacy/audit/bounds.py:": "measures a claim and makes none",
    "privacy/audit/many_runs.py:AuditResult": "measures a claim and makes none",
    "privacy/audit/many_runs.py:audit_client": "measures a claim and makes none",
    "privacy/gdp.py:": "arithmetic on a mu that somebody else vouches for; checked against dp-accounting",
    "privacy/gdp.py:gdp_best_guess": "the same, from its total variation distance",
    "privacy/guarantee.py:Guarantee": "says a mu that its maker vouches for",
    "privacy/guarantee.py:policy_guarantee": "says a mu that its caller vouches for",
    "privacy/guarantee.py:server_guarantee": "says a mu that its caller vouches for",
    "privacy/mechanisms/cache.py:": "says what files cannot change; mechanisms/test_optimal.py changes them",
    "privacy/rdp.py:rdp_epsilon": "a conversion, cited: Mironov 2017, proposition 3",
    "privacy/rdp.py:rdp_mu": "the inverse of rdp_epsilon",
}
"""Docstrings whose formal guarantees speak of mu and rest on no page here, and why."""


@cache
def all_docstrings():
    return list(docstrings())


def docstrings(root=ROOT):
    """Every docstring of the library with its place: ``file:qualified name``."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            waiting = [(parsed(path.read_text()), "")]
            while waiting:
                node, name = waiting.pop()
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(root).as_posix()}:{name}", text
                for child in node.body:
                    if isinstance(child, ast.ClassDef | ast.FunctionDef):
                        waiting.append((child, f"{name}.{child.name}" if name else child.name))


def guarantee(text):
    """What a docstring says under Formal guarantees; empty if it says nothing."""
    return " ".join(text.partition("Formal guarantees")[2].split())


@cache
def functions(path):
    """Names of the test functions of a file."""
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), flags=re.MULTILINE))


def missing(text, root=ROOT):
    """Checks of a page that are not in the test tree."""
    return [
        f"{file}::{name}"
        for file, name in CHECK.findall(text)
        if not (root / file).is_file() or name not in functions(root / file)
    ]


def unchecked(text):
    """Steps of a page without a check of their own, and numbers out of order."""
    parts = STEP.split(text)
    numbers, steps = [int(number) for number in parts[1::2]], parts[2::2]
    wrong = [number for number, step in zip(numbers, steps, strict=True) if not CHECK.search(step)]
    return wrong + [
        number for number, place in zip(numbers, range(1, len(numbers) + 1), strict=True) if number != place
    ]


def test_there_are_pages():
    assert {page.name for page in PAGES} >= {
        "release-rule.md",
        "grid-and-noise.md",
        "sensitivities.md",
        "returning-samples.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_step_names_checks_that_exist(page):
    text = page.read_text()
    assert STEP.search(text)
    assert missing(text) == []
    assert unchecked(text) == []
    assert "**Neighbours**" in text or "replacement of one sample" in text
    assert len(CHECK.findall(text)) == text.count("* `tests/"), "a check that is written otherwise is not looked for"


def test_a_check_that_was_renamed_or_left_out_would_be_noticed():
    text = (ROOT / "docs/proofs/release-rule.md").read_text()
    name = CHECK.search(text)[2]
    assert missing(text.replace(name, "test_of_another_name")) != []
    assert missing(text.replace("tests/privacy/test_release.py", "tests/privacy/test_gone.py")) != []
    assert unchecked(CHECK.sub("", text)) != []
    assert unchecked(text.replace("**3. ", "**4. ", 1)) == [4]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_named_by_a_docstring_and_stands_in_the_site(page):
    assert any(page.name in NAMED.findall(text) for _, text in all_docstrings())
    assert f"\nproofs/{page.stem}\n" in (ROOT / "docs/index.md").read_text()


def test_every_page_that_is_named_exists():
    names = {page.name for page in PAGES}
    for place, text in all_docstrings():
        assert set(NAMED.findall(text)) <= names, place


def test_whoever_claims_a_mu_names_its_proof():
    claims = {place for place, text in all_docstrings() if CLAIM.search(guarantee(text)) and not NAMED.search(text)}
    assert claims - set(WITHOUT_A_PAGE) == set(), (
        "name a page of docs/proofs/, or say in WITHOUT_A_PAGE why there is none"
    )
    assert set(WITHOUT_A_PAGE) <= claims, "no longer needed"


def test_a_claim_without_a_proof_would_be_noticed(tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    claim = '"""A module.\n\nFormal guarantees\n-----------------\nThe stream is mu-GDP.\n"""\n'
    (tmp_path / "privacy" / "new.py").write_text(claim)
    ((place, text),) = docstrings(tmp_path)
    assert place == "privacy/new.py:"
    assert CLAIM.search(guarantee(text))
    assert not NAMED.search(text)
