"""Who may import whom, held by a test: privacy nothing of ours, strategies and clients not each other; no circles, no
merge markers.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.imports import Imports, parsed

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "privacy": {"privacy"},
    "strategies": {"strategies", "privacy"},
    "clients": {"clients", "privacy"},
    "app": {"app", "clients", "strategies", "privacy"},
}
FORBIDDEN_OUTSIDE = {"privacy": {"flwr", "torch", "torchvision", "ray"}}


def imports(path):
    """Top-level packages imported, and our own folders imported, absolutely or relatively."""
    relative = path.relative_to(ROOT)
    outside, ours = set(), set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = relative.parts[: len(relative.parts) - node.level]
            module = [*base, *(node.module.split(".") if node.module else [])]
            ours |= {module[0]} if module else {alias.name for alias in node.names}
    return outside, ours


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_they_may(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        outside, ours = imports(path)
        assert ours <= FOLDERS[folder], f"{path} imports {ours - FOLDERS[folder]}"
        assert not outside & FORBIDDEN_OUTSIDE.get(folder, set()), f"{path} imports {outside}"
        assert not outside & {"murmurfl", *FOLDERS}, f"{path}: import ours relatively"


def imported_modules(path):
    """The full names of everything imported absolutely, wherever in the file: ``from a import b`` gives a and a.b."""
    names = set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def of_the_app(path):
    """What a test file imports of the application or of its tests."""
    return {name for name in imported_modules(path) if f"{name}.".startswith(("murmurfl.app.", "tests.app."))}


@pytest.mark.parametrize("folder", ["clients", "strategies", "harness"])
def test_tests_of_clients_and_strategies_import_no_app(folder):
    files = sorted((ROOT / "tests" / folder).rglob("*.py"))
    assert files
    for path in files:
        assert not of_the_app(path), f"{path} imports the app: take a grid from tests/harness, or move the test"


@pytest.mark.parametrize(
    "text", ["def test():\n    from murmurfl.app.inprocess import InProcessGrid\n", "from murmurfl import app\n"]
)
def test_the_check_of_tests_sees_an_import_of_the_app(text, tmp_path):
    (tmp_path / "test_bad.py").write_text(text)
    assert of_the_app(tmp_path / "test_bad.py")


def test_the_check_sees_an_import_that_is_not_allowed(tmp_path, monkeypatch):
    (tmp_path / "privacy").mkdir()
    bad = tmp_path / "privacy" / "bad.py"
    bad.write_text("import torch\nfrom ..clients import Mu2Client\nfrom .. import strategies\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports(bad) == ({"torch"}, {"clients", "strategies"})


def test_the_import_root_makes_a_checkout_a_package():
    import murmurfl

    assert str(ROOT) in list(murmurfl.__path__)


def test_the_packages_of_the_wheel_are_the_folders_of_the_tree():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaged = set(project["tool"]["setuptools"]["packages"])
    folders = {
        f"murmurfl.{'.'.join(path.parent.relative_to(ROOT).parts)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    folders = {"murmurfl" if name == "murmurfl.app.wheel" else name for name in folders}
    assert packaged == folders


def test_files_import_one_another_in_no_circle():
    """Nor from within a function. What is found by its name alone stands in app/registry.py and nowhere else."""
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


MARKERS = {"<" * 7 + " HEAD": 1, ">" * 7 + " acc": 1, "|" * 7 + " 83b9f1c": 1, "<" * 7: 1}
NO_MARKERS = {"=" * 7: 0, "=" * 8 + " " + "=" * 7: 0, "    " + ">" * 7 + " acc": 0, "<" * 8: 0, "| a |": 0}


@pytest.mark.parametrize(("line", "found"), [*MARKERS.items(), *NO_MARKERS.items()])
def test_lint_sees_merge_markers_of_tracked_files(line, found, tmp_path):
    (search,) = re.findall(r"^\t(git grep .*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    def lint(folder):
        return subprocess.run(
            ["sh", "-c", search.replace("$$", "$")], cwd=folder, capture_output=True, text=True, check=False
        )

    assert lint(tmp_path).returncode != 0, "nothing can be searched: that is no success"
    (tmp_path / "page.rst").write_text(f"Title\n{line}\nText\n")
    subprocess.run(["git", "init", "--quiet", "."], cwd=tmp_path, check=True)
    assert lint(tmp_path).returncode == 0, "it is not tracked"
    subprocess.run(["git", "add", "page.rst"], cwd=tmp_path, check=True)
    said = lint(tmp_path)
    assert said.returncode == found
    assert said.stdout == (f"page.rst:2:{line}\n" if found else "")
