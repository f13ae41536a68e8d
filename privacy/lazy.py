"""Packages whose exports are imported when they are first used (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that lists its exports for type checkers.

    The list is the block ``if TYPE_CHECKING:`` of the package's own file, so that every name is written once.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    file : str
        The package's ``__file__``, a source file with lines such as ``from .gdp import gdp_mu as gdp_mu`` in its block.
    """
    modules = {
        alias.asname or alias.name: (f"{package}.{node.module}", alias.name)
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = modules[name]
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)  # the next use asks no function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names, sorted(modules)
