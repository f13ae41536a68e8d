"""Plain values as TOML, which the standard library reads and does not write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from ...privacy import ConfigurationError

Scalar = bool | int | float | str


def toml_document(run_config: Mapping[str, Scalar]) -> str:
    """Plain values as TOML."""
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in run_config.items())


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        # Through float: a NumPy scalar's repr names its type.
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigurationError(f"Expected a bool, int, float or str in the run config, got {value!r}.")
