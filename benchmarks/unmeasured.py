"""Parts of the benchmarks that could not be measured where they ran: noted as such, and shown as such."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

WHY = "not_measured"
"""The key of such a part's document."""


def measured(name: str, measure: Callable[[], Any]) -> Any:
    """Return a part's document, or why there is none.

    The error is printed, and what it says of this computer stays here.
    """
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        print(f"{name} could not be measured here.", file=sys.stderr)
        return {WHY: type(error).__name__}


def is_missing(document: Any) -> bool:
    """Return True if a part has no figures."""
    return document is None or (isinstance(document, Mapping) and WHY in document)


def shown(document: Any, table: Callable[[Any], str]) -> str:
    """Return a part's table, or that there is none."""
    if document is None:
        return "Not measured yet."
    return f"Not measured: {document[WHY]} where the others ran." if is_missing(document) else table(document)
