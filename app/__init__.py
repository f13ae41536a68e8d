"""The Flower App: server and client app, run configuration, tasks, reproductions and the ``murmurfl`` command.

Public, and listed in docs/api.md, are :func:`fit`, :func:`load_model`, :func:`private_statistics`, :func:`simulate`,
:class:`RunConfig`, :class:`RunResult` and :func:`record_training`; everything else may change in any release. They come
when they are first asked for, because every process of a run imports this package, and most of them need none of the
engines behind :func:`simulate`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .models.trained_model import load_model
    from .reports.own_training import record_training
    from .runs.fitting import fit
    from .runs.private_statistics import private_statistics
    from .runs.result import RunResult
    from .runs.simulate import simulate
    from .settings.run_config import RunConfig

__all__ = ["RunConfig", "RunResult", "fit", "load_model", "private_statistics", "record_training", "simulate"]

_LATE = {
    "RunConfig": "settings.run_config",
    "RunResult": "runs.result",
    "fit": "runs.fitting",
    "leave_training": "reports.own_training",
    "load_model": "models.trained_model",
    "private_statistics": "runs.private_statistics",
    "record_training": "reports.own_training",
    "simulate": "runs.simulate",
}
"""The module each public name stands in, and what strategies have done after a training."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
