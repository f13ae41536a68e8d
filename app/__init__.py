"""The Flower App: server and client app, run configuration, tasks, reproductions and the ``murmurfl`` command.

Public, and listed in docs/api.md, are :func:`fit`, :func:`load_model`, :func:`personalise`, :func:`private_statistics`,
:func:`simulate`, :class:`PrivateClassifier`, :class:`PrivateRegressor`, :class:`RunConfig`, :class:`RunResult`,
:func:`record_training` and :func:`try_project`; everything else may change in any release. They are
imported when they are first used, because every process of a run imports this package, and most of them need none of
the engines behind :func:`simulate`.
"""

from typing import TYPE_CHECKING

from ..privacy.lazy import lazy_exports
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .models.trained_model import load_model as load_model
    from .projects.trial import Trial as Trial
    from .projects.trial import try_project as try_project
    from .reports.own_training import record_training as record_training
    from .runs.estimators import PrivateClassifier as PrivateClassifier
    from .runs.estimators import PrivateRegressor as PrivateRegressor
    from .runs.fitting import fit as fit
    from .runs.personal import personalise as personalise
    from .runs.private_statistics import private_statistics as private_statistics
    from .runs.result import RunResult as RunResult
    from .runs.simulate import simulate as simulate
    from .settings.run_config import RunConfig as RunConfig

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
