"""Private federated learning whose noise cancels itself: a Flower app and library.

The import root of a checkout and of the bundle that Flower ships: the folder this file lies in, as the package
``murmurfl``. In a wheel and an editable install app/wheel stands in its place.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__path__ = [str(Path(__file__).parent)]

_PLACES = {"__version__": ".app.version", "fit": ".app.runs.fitting", "leave_training": ".app.reports.own_training"}
"""The module of each public name, and of what strategies, which import no app, do after a training."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), "__version__", "fit"})
