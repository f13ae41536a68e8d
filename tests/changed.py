"""Run the tests that a change can reach: ``make test-changed`` (``SINCE=main`` is what it is compared with).

A test reaches the files that it imports, through names that packages hand on, and all that these import; one that
starts processes reaches the whole product. A page or another file reaches the tests that name it. A test that finds a
file in another way is missed, so all tests run before a change lands.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("app", "clients", "privacy", "strategies")
EVERYTHING = ("pyproject.toml", "tests/conftest.py")
"""What every test depends on."""
_STARTS = re.compile(r"\bsubprocess\b|executable\(|deployment\(|multiprocessing|\bray\b")


class Reach:
    """Which Python files of a checkout reach which, read from their text: nothing is run.

    Parameters
    ----------
    root : Path
        The checkout's.
    """

    def __init__(self, root: Path = ROOT) -> None:
        folders = (*PRODUCT, "tests", "benchmarks", "examples")
        paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
        self.texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        if (root / "murmurfl.py").is_file():
            self.texts["murmurfl.py"] = (root / "murmurfl.py").read_text(encoding="utf-8")
        self._nodes: dict[str, list[ast.AST]] = {}
        self._handed: dict[str, dict[str, str]] = {}
        self._direct: dict[str, set[str]] = {}

    @property
    def tests(self) -> list[str]:
        """The files that pytest collects."""
        return [name for name in self.texts if name.startswith("tests/") and Path(name).name.startswith("test_")]

    def of(self, name: str) -> set[str]:
        """All files that one of them reaches, itself included."""
        found, waiting = set(), [name]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self._imports(one)
        if any(_STARTS.search(self.texts[one]) for one in found if one.startswith("tests/")):
            found |= {one for one in self.texts if one.startswith(PRODUCT)}
        return found

    def tests_of(self, changed: Iterable[str]) -> list[str]:
        """The tests that reach one of these files, Python or not."""
        changed = set(changed)
        if changed & set(EVERYTHING):
            return self.tests
        code, others = changed & set(self.texts), {name for name in changed if not name.endswith(".py")}
        gone = {Path(name).stem for name in changed - code if name.endswith(".py")}
        words = re.compile("|".join(re.escape(word) for word in _words(others) | gone) or r"(?!)")
        compared = {Path(name).stem for name in others if name.endswith(".ambr")}  # the snapshots of a file of tests
        return [
            name
            for name in self.tests
            if self.of(name) & code or words.search(self.texts[name]) or Path(name).stem in compared
        ]

    def _file_of(self, module: tuple[str, ...]) -> str | None:
        path = "/".join(module) or "murmurfl"
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.texts), None)

    def _module(self, name: str, node: ast.ImportFrom) -> tuple[str, ...] | None:
        """The module that an import names, as a path from the root; None if it is none of ours."""
        parts = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            package = Path(name).parent.parts
            return (*package[: len(package) - node.level + 1], *parts)
        if parts[:1] == ("murmurfl",):
            return parts[1:]
        return parts if parts[:1] in (("tests",), ("benchmarks",)) else None

    def _nodes_of(self, name: str) -> list[ast.AST]:
        if name not in self._nodes:
            kinds = (ast.Import, ast.ImportFrom)
            self._nodes[name] = [node for node in ast.walk(ast.parse(self.texts[name])) if isinstance(node, kinds)]
        return self._nodes[name]

    def _hands_on(self, name: str) -> dict[str, str]:
        """Where the names of a package come from."""
        if not name.endswith("/__init__.py"):
            return {}
        if name in self._handed:
            return self._handed[name]
        found = self._handed[name] = {}
        for node in self._nodes_of(name):
            if isinstance(node, ast.ImportFrom) and (module := self._module(name, node)) is not None:
                for alias in node.names:
                    file = self._file_of((*module, alias.name)) or self._file_of(module)
                    if file is not None:
                        found[alias.asname or alias.name] = file
        return found

    def _imports(self, name: str) -> set[str]:
        """The files that one names itself."""
        if name in self._direct:
            return self._direct[name]
        found = self._direct[name] = set()
        for node in self._nodes_of(name):
            modules: list[tuple[tuple[str, ...], str]] = []
            if isinstance(node, ast.ImportFrom) and (module := self._module(name, node)) is not None:
                modules = [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                parts = [tuple(alias.name.split(".")) for alias in node.names]
                modules = [(one[1:] if one[0] == "murmurfl" else one, "") for one in parts]
            for module, wanted in modules:
                file = self._file_of((*module, wanted)) if wanted else None
                file = file or self._file_of(module)
                while file is not None and wanted in self._hands_on(file):
                    file = self._hands_on(file)[wanted]
                if file is not None:
                    found.add(file)
        return found


def _words(names: set[str]) -> set[str]:
    """What a test says that reads one of these files: the file's name, or that of the folder of all pages."""
    return {Path(name).name for name in names} | {"docs" for name in names if name.startswith("docs/")}


def changed_files(since: str) -> list[str]:
    """What differs from a commit, with what is new and not yet tracked."""
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    said = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in commands
    ]
    return sorted({line for text in said for line in text.splitlines()})


def main() -> int:
    """Run them; the exit code is pytest's."""
    since = os.environ.get("SINCE") or "main"
    tests = Reach().tests_of(changed_files(since))
    sys.stdout.write(f"{len(tests)} files of tests are reached by what differs from {since}.\n")
    sys.stdout.flush()
    if not tests:
        return 0
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *tests, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
