"""Who imports whom among the files of the four packages, read from their text: nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDERS = ("app", "clients", "privacy", "strategies")


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file's text; several checks of a process ask for the same files."""
    return ast.parse(text)


class Imports:
    """The imports of every file of a checkout's packages, those inside of functions too.

    What only a type checker reads (``if TYPE_CHECKING:``) counts among our own files, for a reader follows it too; of
    packages outside it is left out, for it is not there when the program runs.

    Parameters
    ----------
    root : Path
        The checkout's, with the four packages in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(
            path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py")
        )
        self._known = set(self.files)
        self.ours: dict[str, set[str]] = {}
        """The files each one names."""
        self.outside: dict[str, set[str]] = {}
        """The top-level packages each one names that are not ours."""
        for name in self.files:
            self.ours[name], self.outside[name] = self._of(name)

    def _file_of(self, module: tuple[str, ...]) -> str | None:
        """Where a module of ours stands, given the parts of its name."""
        path = "/".join(module)
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self._known), None)

    def circles(self) -> list[list[str]]:
        """Sets of files that import one another, directly or through others.

        That a module's package runs before the module is no arrow: then every package that imports its own files
        would be one.
        """
        reached = {name: self._reached(name) for name in self.files}
        circles = {frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in reached}
        return sorted(sorted(circle) for circle in circles if len(circle) > 1 or (set(circle) <= reached[min(circle)]))

    def _reached(self, start: str) -> set[str]:
        found: set[str] = set()
        waiting = [*self.ours[start]]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.ours[name]
        return found

    def at_the_top(self, name: str) -> set[str]:
        """The packages outside that are imported as soon as a file is."""
        outside: set[str] = set()
        for node in _statements(parsed((self.root / name).read_text()), functions=False):
            outside |= _outside(node)
        return outside

    def _holding(self, package: tuple[str, ...], name: str) -> str | None:
        """Where ``from package import name`` finds the name: a module, or the package itself."""
        return self._file_of((*package, name)) or self._file_of(package)

    def _of(self, name: str) -> tuple[set[str], set[str]]:
        ours: set[str] = set()
        outside: set[str] = set()
        # In a wheel these files are in the package itself.
        package = () if name.startswith("app/wheel/") else tuple(name.split("/")[:-1])
        tree = parsed((self.root / name).read_text())
        for node in _statements(tree):
            outside |= _outside(node)
        for node in _statements(tree, types=True):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1] + tuple(
                    (node.module or "").split(".") if node.module else ()
                )
                for alias in node.names:
                    file = self._holding(base, alias.name)
                    if file is None:
                        raise AssertionError(f"{name} imports {'.'.join(base)}: there is no such file")
                    ours.add(file)
        return ours, outside


def _outside(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The top-level packages of an absolute import."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return set() if node.level else {(node.module or "").split(".")[0]}


def _statements(tree: ast.AST, *, functions: bool = True, types: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; those in functions, and those for a type checker, only if they are asked for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in (
            getattr(node.test, "id", ""),
            getattr(node.test, "attr", ""),
        ):
            yield from _statements(node if types else ast.Module(node.orelse, []), functions=functions, types=types)
        elif not isinstance(node, ast.expr) and (
            functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ):
            yield from _statements(node, functions=functions, types=types)
