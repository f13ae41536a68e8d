"""The files for those who contribute, report, cite and look around say what is true of the code."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.test_docs import BLOCK, check_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "examples/README.md")


def blocks(language):
    """Return code and source mark of the blocks of CONTRIBUTING.md."""
    found = (match for match in BLOCK.finditer(CONTRIBUTING) if match["language"] == language)
    return [
        ("\n".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines()), match["source"])
        for match in found
    ]


def test_worked_examples_of_contributing_run():
    names = {"__name__": "contributing"}
    for text, source in blocks("python"):
        if source:
            assert text.strip() in (ROOT / source).read_text()
        else:
            exec(compile(text, "CONTRIBUTING.md", "exec"), names)
    assert len(names["norms"].norms) == 4


@pytest.mark.parametrize("text", [text for text, _ in blocks("sh")])
def test_commands_of_contributing_are_ones(text):
    for line in text.splitlines():
        words = re.findall(r'[^\s"]+"[^"]*"|\S+', line)
        if words[0] not in ("pre-commit", "twine") and words != ["pip", "install", "pre-commit"]:
            check_command(words)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", (ROOT / page).read_text())
    gone = [one for one in targets if "://" not in one and not (ROOT / page).parent.joinpath(one).exists()]
    assert gone == []


def test_files_named_by_contributing_exist():
    named = re.findall(
        r"`((?:privacy|strategies|clients|app|tests|docs|examples)/[\w./-]+|\.ci/run|[\w-]+\.toml)`", CONTRIBUTING
    )
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("MECHANISMS", "privacy/mechanisms/__init__.py"),
        ("CASES", "tests/privacy/mechanisms/test_mechanisms.py"),
        ("QUERIES", "privacy/queries/__init__.py"),
        ("RUN_QUERIES", "app/methods/queries.py"),
    ],
)
def test_registries_stand_where_contributing_says(name, file):
    assert f"`{name}`" in CONTRIBUTING
    assert f"`{file}`" in CONTRIBUTING
    assert re.search(rf"^{name}\b.* = ", (ROOT / file).read_text(), flags=re.MULTILINE)


def test_the_citation_is_valid_and_of_this_version():
    """Against the parts of Citation File Format 1.2.0 that it uses."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    known = {
        "cff-version",
        "message",
        "title",
        "type",
        "authors",
        "version",
        "license",
        "repository-code",
        "abstract",
        "keywords",
    }
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() <= known
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert all(author.keys() == {"name"} for author in citation["authors"])
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]


def test_hooks_use_the_version_of_ruff_that_ci_uses():
    (pinned,) = [line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("ruff")]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [one for one in hooks if one["repo"].endswith("/ruff-pre-commit")]
    assert pinned == f"ruff=={ruff['rev'].removeprefix('v')}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_ones(path):
    """As GitHub reads them: names, and elements with a label each."""
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [element.get("id") for element in form["body"] if element["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for element in form["body"]:
        assert element["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert element["attributes"].get("value" if element["type"] == "markdown" else "label")


def rows(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_the_index_has_each_example_and_notebook_once():
    index = (ROOT / "examples" / "README.md").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", index)
    folders = [path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "notebooks"]
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")]
    assert sorted(linked) == sorted([*folders, *notebooks])


@pytest.mark.parametrize(
    "row",
    [row for row in rows((ROOT / "examples" / "README.md").read_text()) if len(row) == 6 and row[3].isdigit()],
    ids=lambda row: row[1],
)
def test_the_index_says_what_each_example_says(row):
    folder = re.search(r"\]\(([^)]+)\)", row[1])[1]
    summary = (ROOT / "examples" / folder / "README.md").read_text().split("\n\n")[1]
    assert f"Epsilon: {row[3]} " in summary
    assert row[2] in summary.replace("\n", " ").lower()
    assert set(re.findall(r"\d+(?:\.\d+)?", row[4])) <= set(re.findall(r"\d+(?:\.\d+)?", summary))


def test_the_changelog_names_what_was_renamed():
    """Every key that is refused under its old name with a message that has the new one."""
    from murmurfl.privacy import setting

    changelog = (ROOT / "CHANGELOG.md").read_text()
    renamed = getattr(setting, "_RENAMED")  # noqa: B009
    missing = [old for old, new in renamed.items() if f"`{old}`" not in changelog or f"`{new}`" not in changelog]
    assert missing == []
    assert json.dumps(PROJECT["version"]).strip('"') in changelog
