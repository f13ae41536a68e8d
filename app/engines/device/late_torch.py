"""PyTorch, imported at its first use: an installation without it still imports every module."""

from __future__ import annotations

import importlib
from typing import Any


class _ImportedLate:
    """A module's names, each looked up once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._name), name)
        setattr(self, name, found)
        return found


torch: Any = _ImportedLate("torch")
