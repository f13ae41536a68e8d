"""The structure of the product: who may import whom, what pages name, and the map of the house (docs/house.md).

What one file must be is a rule of the table :data:`RULES`, each with texts that break it.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.imports import FOLDERS, Imports, parsed

ROOT = Path(__file__).parents[1]
HOUSE, INDEX = ((ROOT / "docs" / name).read_text() for name in ("house.md", "index.md"))
TOPS = {path.name for path in ROOT.iterdir()}
# One name for a thing (docs/glossary.md). Names that are gone from code, and phrases that are gone from every text.
GONE_NAMES = re.compile(
    r"(?i:.*machine.*)|Attendance|Computing|FigureFile|Introduction|Joining|Kinds|Kit|LedgerPage|Lesson|MisfitError|OpeningPage"
    r"|Past|Problem|RollCall|Scene|Screen|Shelf|Shortage|SidePart|Suspects|TakenRuns|Together|counts_misfits|hands_over"
    r"|may_lose|mended|mends|misfits?|release_noting|run_dry|secret_order|side_release|stands_alone|taken_runs|takes_steps"
    r"|taught|told_apart|worked_out"
)
STILL_NAMES = {"RuleBasedStateMachine", "create_target_machine"}  # hypothesis's own, and LLVM's
GONE_PHRASES = re.compile(r"\bmachines?\b|\bmisfits?\b|\bside releases?\b|\bwhatever happens\b", re.IGNORECASE)
# Machine learning is still called that. The labels from which random streams and keys come stay: they decide results.
STILL_PHRASES = re.compile(
    r"machine[ -]learning|machine-readable|state machine|(?:busy|loaded|slow|bare) machine|platform_machine"
    r'|derived_\w+\(.*"(?:(?:sample|deal|replace) machines|machine key)"|_STORED_CLIENTS = "machines"'
    r'|"machine(?:s", "sites", "num-machines"|": "client)',
    re.IGNORECASE,
)
# These are the papers' own words, and those of jiang-2026's guarantee.
PAPERS_WORDS = re.compile(r"papers? also|\(the paper's (?:silo|learners)\)|epochs of each silo|its readers call a silo")

# What a docstring begins with instead of the thing it describes: a pronoun, a conjunction or a preposition.
NO_SUBJECT = re.compile(
    r"(?:As|Beside|By|Else|For|From|How|In|It|Its|Of|On|That|Their|Them|These|They|This|Those|Under|What|When|Where|Which|Who"
    r"|Whom|Whose|Why|With|Without)\b"
)


def named(text: str) -> set[str]:
    """The files and folders of the repository that a page names, in code marks or in an indented drawing."""
    drawn = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    words = [*re.findall(r"`([\w./-]+)`", text), *re.findall(r"[\w-]+(?:/[\w.-]+)+", drawn)]
    return {word.rstrip("/") for word in words if word.split("/")[0] in TOPS}


def rooms() -> set[str]:
    """The folders of the packages and of the tests."""
    folders = {path.parent for package in FOLDERS for path in (ROOT / package).rglob("*.py")}
    folders |= {path.parent for path in (ROOT / "tests").glob("*/*.py")}
    return {str(folder.relative_to(ROOT)) for folder in folders}


def of_the_app(path: Path, text: str) -> Iterable[str]:
    """What a test imports of the application or of its tests: it takes a grid from tests/harness, or moves."""
    for node in ast.walk(parsed(text)):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        yield from (name for name in names if f"{name}.".startswith(("murmurfl.app.", "tests.app.")))


def missing(path: Path, text: str) -> list[str]:
    """What a page names and the repository does not have; a drawing may be of somebody else's folders."""
    if path.name != "house.md":
        text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return sorted(name for name in named(text) if not (ROOT / name).exists())


REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
HERE = (
    f"{REPOSITORY}/blob/main/",
    f"{REPOSITORY}/tree/main/",
    f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/",
)
"""Beginnings of absolute links to this repository's files, which PyPI needs."""


def dead_links(path: Path, text: str) -> Iterable[str]:
    """Links to files that do not exist; those to generated pages are checked where the pages are built."""
    found = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    ours = (
        *(target.removeprefix(beginning) for target in found for beginning in HERE if target.startswith(beginning)),
    )
    targets = (target for target in found if "://" not in target and not target.startswith("generated/"))
    gone = [target for target in targets if not (ROOT / path.parent / target).exists()]
    return [*gone, *(target for target in ours if not (ROOT / target).exists())]


def other_words(path: Path, text: str) -> Iterable[str]:
    """Lines that call a client otherwise."""
    lines = (line for line in text.splitlines() if re.search(r"\b(?:silo|learner)s?\b", line))
    return (line for line in lines if not PAPERS_WORDS.search(line.lower()))


def gone_names(path: Path, text: str) -> Iterable[str]:
    """Names in code that are gone."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                names = name.split(".")
            case ast.ImportFrom(module=str(module)):
                names = module.split(".")
            case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case _:
                continue
        yield from (name for name in names if GONE_NAMES.fullmatch(name) and name not in STILL_NAMES)


def vague_variables(path: Path, text: str) -> Iterable[str]:
    """Variables named after how a value was come by and not after what it is."""
    stored = (node for node in ast.walk(parsed(text)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return (node.id for node in stored if node.id in ("said", "told", "shown", "heard", "stated"))


def gone_phrases(path: Path, text: str) -> Iterable[str]:
    """Lines with a phrase that is gone."""
    return (line for line in text.splitlines() if GONE_PHRASES.search(STILL_PHRASES.sub("", line)))


def docstrings_without_subject(path: Path, text: str) -> Iterable[str]:
    """First lines of docstrings, those of attributes too, that begin neither with a noun nor with a verb."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Expr(ast.Constant(str(words))) if NO_SUBJECT.match(words):
                yield words.partition("\n")[0]


@dataclass(frozen=True)
class Rule:
    """What must not be found in some files, and texts in which it is: a file that would have each."""

    files: tuple[str, ...]
    faults: Callable[[Path, str], Iterable[str]]
    broken: tuple[tuple[str, str], ...]


PAGES = ("README.md", "docs/**/*.md")
CODE = ("murmurfl.py", *(f"{folder}/**/*.py" for folder in (*FOLDERS, "benchmarks", "examples", "docs")))
RULES = {
    "tests of clients and strategies import no app": Rule(
        tuple(f"tests/{folder}/**/*.py" for folder in ("clients", "strategies", "harness")),
        of_the_app,
        (
            ("tests/clients/test_bad.py", "def test():\n    from murmurfl.app.inprocess import InProcessGrid\n"),
            ("tests/clients/test_bad.py", "from murmurfl import app\n"),
        ),
    ),
    "what a page names exists": Rule(
        PAGES,
        missing,
        (
            ("docs/house.md", "`app/cli.py`"),
            ("docs/house.md", "    -> app/engine: runs"),
            ("docs/start.md", "`privacy/sqlite_ledger.py`"),
        ),
    ),
    "every room is on the map": Rule(
        ("docs/house.md",),
        lambda _, text: rooms() - named(text),
        (("docs/house.md", HOUSE.replace("app/models", "app/data")),),
    ),
    "links lead somewhere": Rule(
        PAGES, dead_links, (("docs/start.md", "[it](gone.md)"), ("README.md", f"[it]({HERE[0]}gone.md#a-part)"))
    ),
    "names that are gone stay gone": Rule(
        (*CODE, "tests/**/*.py"),
        gone_names,
        (
            ("app/bad.py", "class PrivateMachine: ..."),
            ("app/bad.py", "def reads(num_machines): ..."),
            ("app/bad.py", "from .taken_runs import x"),
            ("app/bad.py", "release.mended = True"),
            ("app/bad.py", "made(run_dry=True)"),
        ),
    ),
    "variables are named after what they hold": Rule(
        tuple(f"{folder}/**/*.py" for folder in FOLDERS),
        vague_variables,
        (
            ("app/bad.py", "said = reply.content"),
            ("app/bad.py", "lines = [shown for shown in figures]"),
            ("app/bad.py", "class Answer:\n    heard: int = 0"),
        ),
    ),
    "phrases that are gone stay gone": Rule(
        (*PAGES, *CODE, "examples/**/*.md"),
        gone_phrases,
        (
            ("docs/start.md", "Each machine trains by machine learning."),
            ("app/bad.py", '"""Holds whatever happens."""'),
            ("app/bad.py", "# a side release"),
        ),
    ),
    "docstrings begin with a noun or a verb": Rule(
        tuple(f"{folder}/**/*.py" for folder in FOLDERS),
        docstrings_without_subject,
        (
            ("app/bad.py", '"""What a run leaves."""'),
            ("app/bad.py", 'class Fit:\n    share = 0.2\n    """Of the rows, for the figure."""'),
        ),
    ),
    "a client is called a client": Rule(PAGES, other_words, (("docs/start.md", "Each silo trains."),)),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", RULES)
def test_every_file_keeps_the_rule(name):
    rule = RULES[name]
    files = {path for pattern in rule.files for path in ROOT.glob(pattern)}
    assert files
    faults = {path.relative_to(ROOT): list(rule.faults(path.relative_to(ROOT), path.read_text())) for path in files}
    assert {str(path): found for path, found in faults.items() if found} == {}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("name", "path", "text"), [(name, *broken) for name, rule in RULES.items() for broken in rule.broken]
)
def test_a_file_that_breaks_the_rule_is_noticed(name, path, text):
    assert list(RULES[name].faults(Path(path), text))


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("privacy/mechanisms/__init__.py", "MECHANISMS"),
        ("clients/algorithms.py", "ALGORITHMS"),
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


def test_the_landing_page_has_three_doors_and_the_map():
    links = re.findall(r"\]\((?!http|pictures)([^)]+)\)", INDEX)
    assert links[:3] == ["tables.md", "swap-in.md", "results.md"]
    assert "house.md" in links


def layers(folder: Path, packages: Path) -> dict[str, str]:
    """What import-linter says of each contract of pyproject.toml, for the four packages that lie in a folder."""
    pytest.importorskip("importlinter", reason="an environment from before `make install` declared it")
    root = folder / "murmurfl"
    root.mkdir()
    (root / "__init__.py").touch()
    for name in FOLDERS:
        (root / name).symlink_to(packages / name)
    command = [Path(sys.executable).with_name("lint-imports"), ROOT / "pyproject.toml", "--no-cache"]
    environment = {**os.environ, "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = dict(re.findall(r"^(.*) (KEPT|BROKEN)$", ran.stdout, flags=re.MULTILINE))
    assert said, ran.stdout + ran.stderr
    return said


def test_layers_hold(tmp_path):
    assert set(layers(tmp_path, ROOT).values()) == {"KEPT"}


def test_imports_against_the_layers_are_noticed(tmp_path):
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    for name, text in {
        "privacy/ledger/bad.py": "def late():\n    from ...clients import Mu2Client\n",
        "privacy/bad.py": "import torch\n",
        "app/nodes/bad.py": "from ..fleet import health\n",
        "app/runs/bad.py": "from ..engines.device.backend import torch\n",
    }.items():
        (tmp_path / "copy" / name).write_text(text)
    assert set(layers(tmp_path, tmp_path / "copy").values()) == {"BROKEN"}


def test_files_import_one_another_in_no_circle():
    """Nor from within a function. Only app/settings/registry.py finds things by name."""
    assert Imports(ROOT).circles() == []


@pytest.mark.parametrize(
    "late", ["", "    ", "if TYPE_CHECKING:\n    "], ids=["at the top", "in a function", "for a type checker"]
)
def test_a_circle_is_seen(late, tmp_path):
    for name, text in {
        "app/first.py": "from ..privacy import Second\n",
        "privacy/__init__.py": "from .second import Second\n",
        "privacy/second.py": f"def second():\n    pass\n{late}from ..app.first import first\n",
        "privacy/beside.py": "from . import second\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert Imports(tmp_path).circles() == [["app/first.py", "privacy/__init__.py", "privacy/second.py"]]


MARKERS = ("<" * 7 + " HEAD", ">" * 7 + " acc", "|" * 7 + " 83b9f1c", "<" * 7)
NO_MARKERS = ("=" * 7, "=" * 8 + " " + "=" * 7, "    " + ">" * 7 + " acc", "<" * 8, "| a |")


def test_lint_sees_merge_markers_of_tracked_files(tmp_path):
    (search,) = re.findall(r"^\t(git grep .*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    def lint():
        command = ["sh", "-c", search.replace("$$", "$")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert lint().returncode != 0, "nothing can be searched: that is no success"
    subprocess.run(["git", "init", "--quiet", "."], cwd=tmp_path, check=True)
    (tmp_path / "page.rst").write_text("\n".join([*NO_MARKERS, *MARKERS]) + "\n")
    assert lint().returncode == 0, "it is not tracked"
    subprocess.run(["git", "add", "page.rst"], cwd=tmp_path, check=True)
    said = lint()
    assert said.returncode == 1
    assert said.stdout == "".join(f"page.rst:{line}:{text}\n" for line, text in enumerate(MARKERS, len(NO_MARKERS) + 1))
    (tmp_path / "page.rst").write_text("\n".join(NO_MARKERS) + "\n")
    assert lint().returncode == 0
