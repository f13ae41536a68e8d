"""Private federated learning whose noise cancels itself: a Flower app and library.

The package ``murmurfl`` of a wheel and of an editable install; in a checkout and in Flower's bundle it is murmurfl.py.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("__version__", "fit", "leave_training"):  # the last one for strategies, which import no app
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.app"), name)
