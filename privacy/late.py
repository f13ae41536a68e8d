"""Names of a package that are imported when they are first asked for.

The library offers more than murmurfl's own app needs: what is for an operator, or for other people's projects. Flower
sends the app's code to every machine of a run; what nobody in it asks for by name is neither sent nor imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package with such names.

    Parameters
    ----------
    package : str
        Its full name, ``__name__``.
    modules : mapping
        From each name to the module it stands in, relative to the package. A table ``_LATE`` of literals: tests read
        it to know what the bundle must hold.
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return attribute, names
