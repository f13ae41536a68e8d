"""The map of the house (docs/house.md): what it names exists, and it names every room."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "clients", "privacy", "strategies")
HOUSE = (ROOT / "docs" / "house.md").read_text()


def named(text):
    """The files and folders of the repository that a page names, in code marks or in an indented drawing."""
    drawn = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    words = [*re.findall(r"`([\w./-]+)`", text), *re.findall(r"[\w-]+(?:/[\w.-]+)+", drawn)]
    tops = {path.name for path in ROOT.iterdir()}
    return {word.rstrip("/") for word in words if word.split("/")[0] in tops}


def rooms():
    """The folders of the packages and of the tests."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    folders |= {path.parent for path in (ROOT / "tests").glob("*/*.py")}
    return {str(folder.relative_to(ROOT)) for folder in folders}


def missing(text):
    """What a page names and the repository does not have."""
    return sorted(name for name in named(text) if not (ROOT / name).exists())


def test_what_the_map_names_exists():
    assert missing(HOUSE) == []


def test_every_room_is_on_the_map():
    assert rooms() - named(HOUSE) == set()


@pytest.mark.parametrize("wrong", ["`app/cli.py`", "    -> app/engine: runs", "`privacy/sqlite_ledger.py`"])
def test_a_room_that_moved_would_be_noticed(wrong):
    assert missing(f"{HOUSE}\n\n{wrong}\n")


def test_a_new_room_would_be_noticed():
    assert "app/models" in rooms() - named(HOUSE.replace("app/models", "app/data"))


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("privacy/mechanisms/__init__.py", "MECHANISMS"),
        ("app/methods/__init__.py", "METHODS"),
        ("app/data/__init__.py", "TASKS"),
        ("app/data/features/__init__.py", "FEATURES"),
        ("app/data/partition.py", "PARTITIONS"),
        ("app/models/__init__.py", "MODELS"),
        ("app/papers/__init__.py", "PAPERS"),
    ],
)
def test_the_registries_stand_where_the_map_says(room, line):
    assert f"`{room}`" in HOUSE
    assert re.search(rf"^{line}\b.* = ", (ROOT / room).read_text(), flags=re.MULTILINE)


def test_a_newcomer_is_sent_here_first():
    first = re.search(r"\]\((?!http|pictures)([^)]+)\)", (ROOT / "docs" / "index.md").read_text())
    assert first is not None
    assert first[1] == "house.md"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    marked = "\n".join(line for line in page.read_text().splitlines() if not line.startswith("    "))
    assert missing(marked) == []


# docs/glossary.md: one name for a thing. These are the papers' own words, and those of jiang-2026's guarantee.
PAPERS_WORDS = re.compile(r"papers? also|\(the paper's (?:silo|learners)\)|epochs of each silo|its readers call a silo")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_machine_is_called_a_machine(page):
    for line in page.read_text().splitlines():
        assert not re.search(r"\b(?:silo|learner)s?\b", line) or PAPERS_WORDS.search(line.lower()), line
