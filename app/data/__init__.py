"""Tasks: data sets, their features, and how they are split among machines."""

from ..settings.registry import Registry
from .digits import Digits
from .mnist import Mnist, MnistParity
from .own_task import own_task
from .public_samples import PUBLIC_TASKS
from .synthetic import Synthetic, SyntheticLogistic
from .tabular import CreditDefault, Recidivism
from .task import Task

__all__ = ["TASKS"]

_BUILT_IN = (
    Digits(),
    Mnist(),
    MnistParity(),
    Synthetic(),
    SyntheticLogistic(),
    CreditDefault(),
    Recidivism(),
    *PUBLIC_TASKS,
)

TASKS = Registry("task", Task, _BUILT_IN, adapt=own_task)
"""The built-in tasks by name, and a user's own as ``package.module:make_task``."""
