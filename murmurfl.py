"""Private federated learning whose noise cancels itself: a Flower app and library.

The import root of a checkout and of the bundle that Flower ships: the folder this file lies in, as the package
``murmurfl``. In a wheel and an editable install app/wheel stands in its place.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__path__ = [str(Path(__file__).parent)]


def __getattr__(name: str) -> Any:
    if name not in ("__version__", "fit", "leave_training"):  # the last one for strategies, which import no app
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.app"), name)
