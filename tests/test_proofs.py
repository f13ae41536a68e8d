"""The pages of docs/proofs/: every step has a check that exists, every page a docstring that rests on it.

docs/proofs/checks.toml names the checks of each step; the site shows them below it.

Files are parsed and not imported, so a check's name is found wherever it runs.
"""

import ast
import re
import runpy
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.imports import parsed

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "proofs").glob("*.md"))
FOLDERS = ("privacy", "clients", "strategies")
CHECKS = tomllib.loads((ROOT / "docs" / "proofs" / "checks.toml").read_text())
STEP = re.compile(r"^\*\*(\d+)([a-z]?)\. ", flags=re.MULTILINE)
NAMED = re.compile(r"docs/proofs/([\w-]+\.md)")
CLAIM = re.compile(r"\bmu\b|GDP|-GDP|\bRDP\b")

WITHOUT_A_PAGE = {
    "privacy/accounting/gdp.py:asked_mu": "arithmetic of privacy/accounting/gdp.py",
    "privacy/audit/many_runs.py:": "measures a claim and makes none",
    "privacy/audit/many_runs.py:AuditResult": "measures a claim and makes none",
    "privacy/audit/many_runs.py:audit_client": "measures a claim and makes none",
    "privacy/accounting/gdp.py:": "arithmetic on a mu that somebody else vouches for; checked against dp-accounting",
    "privacy/accounting/gdp.py:gdp_best_guess": "the same, from its total variation distance",
    "privacy/accounting/guarantee.py:policy_guarantee": "says a mu that its caller vouches for",
    "privacy/accounting/guarantee.py:server_guarantee": "says a mu that its caller vouches for",
    "privacy/mechanisms/optimal.py:": "says what files cannot change; mechanisms/test_optimal.py changes them",
    "privacy/accounting/gdp.py:rdp_epsilon": "a conversion, cited: Mironov 2017, proposition 3",
    "privacy/accounting/gdp.py:rdp_mu": "the inverse of rdp_epsilon",
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
    """What a docstring says under Formal guarantees, without its examples; empty if it says nothing."""
    return " ".join(text.partition("Formal guarantees")[2].partition("Examples\n--------")[0].split())


@cache
def functions(path):
    """Names of the test functions of a file."""
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), flags=re.MULTILINE))


def missing(checks, root=ROOT):
    """Checks of a page's steps that are not in the test tree."""
    named = [check.split("::") for step in checks.values() for check in step]
    return [
        f"{file}::{name}" for file, name in named if not (root / file).is_file() or name not in functions(root / file)
    ]


def unchecked(text, checks):
    """Steps of a page without a check of their own, checks without a step, and numbers out of order."""
    steps = STEP.findall(text)
    wrong = {f"{number}{letter}" for number, letter in steps} ^ {step for step, tests in checks.items() if tests}
    numbers = [int(number) for number, letter in steps if not letter]
    return sorted(wrong) + [
        number for number, place in zip(numbers, range(1, len(numbers) + 1), strict=True) if number != place
    ]


def test_there_are_pages():
    assert {page.name for page in PAGES} >= {
        "release-rule.md",
        "grid-and-noise.md",
        "sensitivities.md",
        "returning-samples.md",
    }


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_step_names_checks_that_exist(page):
    text = page.read_text()
    assert STEP.search(text)
    assert missing(CHECKS[page.stem]) == []
    assert unchecked(text, CHECKS[page.stem]) == []
    assert "**Neighbours**" in text or "replacement of one sample" in text


def test_there_are_checks_of_pages_only():
    assert CHECKS.keys() == {page.stem for page in PAGES}


def test_a_check_that_was_renamed_or_left_out_would_be_noticed():
    text, checks = (ROOT / "docs/proofs/release-rule.md").read_text(), CHECKS["release-rule"]
    (file, _), *_ = (check.split("::") for check in checks["1"])
    assert missing(checks | {"1": [f"{file}::test_of_another_name"]}) != []
    assert missing(checks | {"1": ["tests/privacy/test_gone.py::test_x"]}) != []
    assert unchecked(text, checks | {"1": []}) == ["1"]
    assert unchecked(text, checks | {"99": checks["1"]}) == ["99"]
    assert unchecked(text.replace("**3. ", "**4. ", 1), checks) == ["3", 4]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_shows_the_checks_of_a_step_below_it(page):
    source = [page.read_text()]
    app = SimpleNamespace(env=SimpleNamespace(note_dependency=lambda path: None))
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["put_checks"](app, f"proofs/{page.stem}", source)
    _, *parts = STEP.split(source[0])
    for number, letter, step in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        shown = re.findall(r"^\* `(tests/.*)`$", step, flags=re.MULTILINE)
        assert shown == CHECKS[page.stem][f"{number}{letter}"]
        assert step.index("<details>") < step.find("\n## ") or "\n## " not in step


@pytest.mark.few_cases(6)
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
